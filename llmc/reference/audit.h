// --fp8-audit: how far each FP8 operand is from what it was cast from, bf16 values or FP16 masters.
#ifndef LLMC_AUDIT_H
#define LLMC_AUDIT_H

#include <math.h>

#include "../config/recipes.h"

// Sums over the elements of a tensor's rowwise or columnwise data, zero at first. Maxima are bits of floats >= 0.
typedef struct {
    double count;          // elements
    double flushed;        // elements that are not zero and whose code is zero
    double saturated;      // elements whose scaled value lies beyond the format's range
    double signal, noise;  // sums of squares: of the values, and of their quantization errors
    uint32_t amax, scale_max, scale_inv_max;
} AuditSums;
static_assert(sizeof(AuditSums) == 5 * sizeof(double) + 4 * sizeof(uint32_t), "kernels and ranks exchange it as bytes");

// The sums of a model are [L, NUM_LINEARS, NUM_TENSORS, 2]. AUDIT_LINEAR and AUDIT_LAYER are the strides from one
// linear layer to the next, and from one layer to the next.
enum { AUDIT_LINEAR = NUM_TENSORS * 2, AUDIT_LAYER = NUM_LINEARS * AUDIT_LINEAR };
static_assert(ROWWISE == 0 && COLUMNWISE == 1, "the sums of rowwise data stand before those of columnwise data");

// Returns the index of the sums of one tensor's rowwise or columnwise data among the sums of the model.
static inline int64_t audit_index(int64_t l, int id, TensorRole tensor, TensorUsage copy) {
    return l * AUDIT_LAYER + id * AUDIT_LINEAR + tensor * 2 + copy;
}

// Slack, relative to the range, for elements at its end. scale_inv is rounded, so the element that made a scale can
// seem to lie about 2^-23 beyond the range. The slack is far less than the 2^-8 between two neighbouring bf16 numbers.
#define AUDIT_RANGE_SLACK (1.0 / 65536)

// Adds one element: x was cast to `code`, whose value times `scale_inv` stands for x. Values that are not finite
// count as elements and for the amax (NaN above infinity), an infinite one as saturated; signal and noise leave them
// out. A finite value that comes back infinite or NaN, because an infinity or a NaN shared its scale, makes the noise
// infinite.
HOST_DEVICE static inline void audit_add(AuditSums *s, float x, uint8_t code, float scale_inv, Fp8Format format) {
    const uint32_t infinity = 0x7f800000u, magnitude = float_bits(x) & 0x7fffffffu;
    const uint32_t inverse = float_bits(scale_inv) & 0x7fffffffu, scale = float_bits(1.0f / scale_inv) & 0x7fffffffu;
    s->count++;
    if (magnitude > s->amax) s->amax = magnitude;
    if (scale > s->scale_max) s->scale_max = scale;
    if (inverse > s->scale_inv_max) s->scale_inv_max = inverse;
    if (magnitude >= infinity) {
        s->saturated += magnitude == infinity;
        return;
    }
    const double value = (double)x, change = (double)fp8_to_float(code, format) * (double)scale_inv - value,
                 square = change * change;
    s->flushed += magnitude && (code & 0x7f) == 0;
    s->saturated += fabs(value) > (double)fp8_max(format) * (double)scale_inv * (1 + AUDIT_RANGE_SLACK);
    s->signal += value * value;
    s->noise += square < (double)INFINITY ? square : (double)INFINITY;  // NaN counts as infinity
}

// Adds the sums *from to *into.
HOST_DEVICE static inline void audit_merge(AuditSums *into, const AuditSums *from) {
    into->count += from->count, into->flushed += from->flushed, into->saturated += from->saturated;
    into->signal += from->signal, into->noise += from->noise;
    if (from->amax > into->amax) into->amax = from->amax;
    if (from->scale_max > into->scale_max) into->scale_max = from->scale_max;
    if (from->scale_inv_max > into->scale_inv_max) into->scale_inv_max = from->scale_inv_max;
}

// Adds from[i] to into[i], for each i < n.
static inline void audit_merge_all(AuditSums *into, const AuditSums *from, int64_t n) {
    for (int64_t i = 0; i < n; i++) audit_merge(&into[i], &from[i]);
}

// Adds the elements of x with their FP8 data: codes [outer, depth], and scale_inv in the layout of scale_index(). Each
// row has its own sums, which are added in order, so the number of threads changes no bit.
static inline void audit_copy(AuditSums *sums, const float *x, const uint8_t *codes, const void *scales, UsageShape s,
                              ScaleGranularity granularity, Fp8Format format) {
    AuditSums *rows = (AuditSums *)xcalloc((size_t)s.outer, sizeof *rows);
    PARALLEL_FOR
    for (int64_t i = 0; i < s.outer; i++) {
        AuditSums row = rows[i];
        for (int64_t k = 0; k < s.depth; k++)
            audit_add(&row, x[i * s.outer_stride + k * s.depth_stride], codes[i * s.depth + k],
                      scale_load(granularity, scales, scale_index(granularity, i, k, s.outer, s.depth)), format);
        rows[i] = row;
    }
    for (int64_t i = 0; i < s.outer; i++) audit_merge(sums, &rows[i]);
    free(rows);
}

// True if a tensor's rowwise and columnwise data hold the same codes with the same scales.
static inline bool audit_shares_codes(ScaleGranularity row, ScaleGranularity col) {
    return row == col && granularity_traits(row)->same_codes;
}

// Returns the signal-to-quantization-noise ratio, 10 log10(signal / noise), in dB: infinite if no finite value changed
// (a tensor of zeros, too), minus infinity if a finite value came back infinite or NaN. NaN if there is no value, or if
// some values are infinite or NaN and all others are zero.
static inline double audit_sqnr_db(const AuditSums *s) {
    if (s->noise > 0) return 10 * log10(s->signal / s->noise);
    const bool all_zero = s->count > 0 && s->amax == 0;
    return s->signal > 0 || all_zero ? (double)INFINITY : (double)NAN;
}

// Return the smallest and the largest scale seen. Values are multiplied by them before the cast.
static inline float audit_scale_min(const AuditSums *s) { return 1.0f / float_from_bits(s->scale_inv_max); }
static inline float audit_scale_max(const AuditSums *s) { return float_from_bits(s->scale_max); }

#endif
