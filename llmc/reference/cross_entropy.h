// Cross-entropy of logits [rows, V] against targets [rows] in plain C, and its gradient.
//
// A negative target is ignored: its loss and gradient are 0.
#ifndef LLMC_REFERENCE_CROSS_ENTROPY_H
#define LLMC_REFERENCE_CROSS_ENTROPY_H

#include <math.h>

#include "adamw_math.h"
#include "rounding.h"

static inline float logits_lse(const float *logits, int64_t V) {
    float m = -INFINITY;
    for (int64_t v = 0; v < V; v++) m = logits[v] > m ? logits[v] : m;
    double sum = 0;
    for (int64_t v = 0; v < V; v++) sum += expf(logits[v] - m);
    return m + (float)log(sum);
}

// losses [rows] = log(sum(exp(logits))) - logits[target]
static inline void cross_entropy_forward(float *losses, const float *logits, const int32_t *targets, int64_t rows,
                                         int64_t V) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++)
        losses[i] = targets[i] < 0 ? 0.0f : logits_lse(logits + i * V, V) - logits[i * V + targets[i]];
}

// Gradients of logits for FP8 GEMMs are rounded stochastically to the mantissa bits of their FP8 format, and their
// scale is a power of two, so the cast that follows changes only those that are subnormal in FP8. Rounding to nearest
// gave a bias (dev/results/2026-11-29.md, "lm_head's rounding"): nearly all gradients of targets are near -1 and round
// alike, and in the weight's gradient they nearly cancel with the probabilities.

// Random bits for 8 columns. row: a number that follows from the row's logits and grad_scale alone, so that the bits
// depend on neither chunks, ranks nor seeds.
HOST_DEVICE static inline uint32_t cross_entropy_hash(float row, int64_t column) {
    return adamw_random_group(float_bits(row) * 0x9e3779b97f4a7c15ull, (uint32_t)column >> 3);
}

// Rounds two gradients beside each other, as bf16 bits: those of columns 2 * pair (lower half) and 2 * pair + 1 of the
// 8 of a hash. `dropped`: the bits of both mantissas that are to become 0, at most 5 of each. Gradients must be finite,
// or dropped must be 0.
HOST_DEVICE static inline uint32_t cross_entropy_round(uint32_t bits, uint32_t hash, uint32_t pair, uint32_t dropped) {
    const uint32_t random = adamw_random_word(hash, pair) * 0x846ca68bu >> 11;
    return (bits + (random & dropped)) & ~dropped;
}

// Rounds the gradient of one column.
HOST_DEVICE static inline bf16_bits cross_entropy_round_one(bf16_bits bits, float row, int64_t column,
                                                            uint32_t dropped) {
    const uint32_t shift = column & 1 ? 16 : 0, pair = (uint32_t)column >> 1 & 3;
    return (bf16_bits)(cross_entropy_round((uint32_t)bits << shift, cross_entropy_hash(row, column), pair, dropped) >>
                       shift);
}

// dlogits = (softmax(logits) - onehot(target)) * grad_scale; may overwrite logits. For a mean over N tokens grad_scale
// is 1/N. dropped: see cross_entropy_round; unless it is 0, rounding must be ROUND_BF16.
static inline void cross_entropy_backward(float *dlogits, const float *logits, const int32_t *targets, int64_t rows,
                                          int64_t V, float grad_scale, uint32_t dropped, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++) {
        const float lse = targets[i] < 0 ? 0.0f : logits_lse(logits + i * V, V);
        for (int64_t v = 0; v < V; v++) {
            const float p = targets[i] < 0 ? 0.0f : expf(logits[i * V + v] - lse);
            float d = round_to((p - (v == targets[i] ? 1.0f : 0.0f)) * grad_scale, rounding);
            if (dropped && isfinite(d)) d = bf16_to_float(cross_entropy_round_one(bf16_from_float(d), lse, v, dropped));
            dlogits[i * V + v] = d;
        }
    }
}

#endif
