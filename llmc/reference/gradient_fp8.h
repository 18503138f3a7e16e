// Gradients in FP8 by the rules of MS-AMP: E4M3 codes and one fp32 scale for each weight matrix of a layer, in plain C.
//
// (Peng and others 2023, "FP8-LM", arXiv 2310.18313; github.com/Azure/MS-AMP.) The scale comes from the amax of the
// gradient that is cast (msamp_scale), over all ranks that share the tensor. A cast rounds to nearest even.
//
// Sums differ from MS-AMP's, which lose gradient. A micro-step adds its gradient in fp32 to the value of the stored
// code, and the sum is cast again with a scale of its own. MS-AMP rounds it to nearest, so a term below 1/32 of its sum
// is lost. Here it is rounded stochastically, so that each add is right on average: also if the scale of the sum
// changes, and if the sum underflows. The rule of the random bits is that of bf16 sums (gradient_sum.h). What is left
// is noise. E4M3 has 4 bits of mantissa less than bf16, so the noise has 2^8 times the variance: over n micro-steps of
// random sign GRADIENT_FP8_NOISE n of the square of the whole sum. The norm becomes up to 3.5e-4 n too large: 0.6% at
// 16 micro-steps, 2.2% at 64, 8.6% at 256. The noise of gradients of one sign grows no longer when they are small
// beside an ulp of the sum: it stays below 0.05 of the square of the sum, 2.5% of the norm.
//
// Over W ranks (--reduce-dtype fp8) all ranks cast with one scale, made from the largest amax of all ranks. The values
// of the codes are then added in fp32, rank after rank, and the sum is cast with a scale of its own. So no sum
// saturates, whatever the signs, and W gradients are rounded once each, and their sum once. MS-AMP casts each partial
// sum of NCCL's ring to E4M3 again, without a new scale: its sums saturate at 448, and in DDP it divides the first
// scale by the square root of W against that. Replicas have sums over micro-steps in FP8 already. Their cast with the
// common scale is a second one, but an exact one as long as it does not underflow: scales are powers of two.
//
// MS-AMP divides the sum of gradients of a rank's own tokens by W. Here the loss is divided by the tokens of all ranks
// before, so the sum is the mean. If W is a power of two, gradients divided by W have W times the scale and equal
// codes, so both give the same values.
//
// A gradient that is infinite or NaN becomes the code of NaN, where MS-AMP's cast saturates infinity at 448. NaN stays
// NaN in sums, so the gradient norm is not finite and the step is not taken (nonfinite.h).
#ifndef LLMC_GRADIENT_FP8_H
#define LLMC_GRADIENT_FP8_H

#include "../base/msamp.h"
#include "gradient_sum.h"

#define GRADIENT_FP8_NAN 0x7f

// The noise of a sum over n micro-steps of gradients of random sign has GRADIENT_FP8_NOISE n of the sum's square.
#define GRADIENT_FP8_NOISE 7e-4

// A gradient's magnitude as bits, which have the order of the magnitudes. Infinity and NaN are the largest.
HOST_DEVICE static inline uint32_t gradient_fp8_bits(float gradient) { return float_bits(gradient) & 0x7fffffffu; }

// Returns the scale of a tensor from its amax, which is given as bits. 1 if the amax is zero or not finite.
HOST_DEVICE static inline float gradient_fp8_scale(uint32_t amax) {
    return msamp_scale(float_from_bits(amax), 1, FP8_E4M3_MAX);
}

HOST_DEVICE static inline uint8_t gradient_fp8_code(float gradient, float scale) {
    if (gradient_fp8_bits(gradient) >= 0x7f800000u) return GRADIENT_FP8_NAN;
    return fp8_from_float(gradient * scale, FP8_E4M3);
}

HOST_DEVICE static inline float gradient_fp8_value(uint8_t code, float scale_inv) {
    return float_product(fp8_to_float(code, FP8_E4M3), scale_inv);
}

// Rounds x stochastically to a number of 4 significant bits, or below 2^-6 to a multiple of 2^-9: to a neighbour that
// E4M3 holds, if |x| is at most 448. group_hash, member: as in gradient_sum_round. x must be finite. Below 2^-6, adding
// 2^-6 with x's sign moves the bits to drop to where larger numbers have them.
HOST_DEVICE static inline float gradient_fp8_stochastic(float x, uint32_t group_hash, uint32_t member) {
    const uint32_t random = adamw_random_word(group_hash, member) * 0x846ca68bu >> 12;
    const float lift = fabsf(x) < 0x1p-6f ? copysignf(0x1p-6f, x) : 0;
    return float_from_bits((float_bits(x + lift) + random) & 0xfff00000u) - lift;
}

// Returns the amax of n gradients as bits.
static inline uint32_t gradient_fp8_amax(const float *x, int64_t n) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < n; i++)
        if (gradient_fp8_bits(x[i]) > amax) amax = gradient_fp8_bits(x[i]);
    return amax;
}

static inline void gradient_fp8_encode(uint8_t *codes, const float *x, float scale, int64_t n) {
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) codes[i] = gradient_fp8_code(x[i], scale);
}

// Rounds n gradients to the values of their codes. They are elements first .. first + n - 1 of a sum. Sums with an
// earlier micro-step's (s->add) are rounded stochastically, other gradients to nearest.
static inline void gradient_fp8_round(float *x, float scale, int64_t first, int64_t n, const GradientSum *s) {
    const float scale_inv = 1 / scale;
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = s->flat + first + i;
        uint8_t code = gradient_fp8_code(x[i], scale);
        if (s->add && code != GRADIENT_FP8_NAN)
            code = fp8_from_float(
                gradient_fp8_stochastic(x[i] * scale, adamw_random_group(s->key, at >> 3), (uint32_t)at & 7), FP8_E4M3);
        x[i] = gradient_fp8_value(code, scale_inv);
    }
}

// sum [n] = the values of the codes [ranks][stride] of all ranks, added in fp32 in the order of ranks.
static inline void gradient_fp8_sum(float *sum, const uint8_t *codes, int64_t ranks, int64_t stride, float scale_inv,
                                    int64_t n) {
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) {
        float x = fp8_to_float(codes[i], FP8_E4M3);
        for (int64_t r = 1; r < ranks; r++) x += fp8_to_float(codes[r * stride + i], FP8_E4M3);
        sum[i] = float_product(x, scale_inv);
    }
}

#endif
