// Gradients in FP8 by the rules of MS-AMP: E4M3 codes and one fp32 scale for each weight matrix of a layer, in plain C.
//
// (Peng and others 2023, "FP8-LM", arXiv 2310.18313; github.com/Azure/MS-AMP.) The scale comes from the amax of the
// gradient that is cast (msamp_scale), over all ranks that share the tensor. A micro-step adds its gradient in fp32 to
// the value of the stored code, and the sum is cast again with a scale of its own.
//
// Over W ranks (--reduce-dtype fp8) all ranks cast with one scale, made from the largest amax of all ranks. The codes
// are then added rank after rank, 0 to W - 1. The result of each addition is E4M3 again, so the order decides the
// bits. MS-AMP adds in the order of NCCL's ring. Codes saturate at 448. A sum over W replicas (MS-AMP's
// DDP) therefore divides the scale by the square root of W, which leaves room for gradients of random sign; a sum
// within a shard group (MS-AMP without DDP) does not. The value of a code of the sum is code * scale_inv / W: the mean.
//
// The last division is for gradients of a rank's own tokens, as in MS-AMP and the CPU trainer. In the GPU trainer the
// loss is already divided by the tokens of all ranks: there the sum is the mean, and scale_inv is not divided. If W is
// a power of two, gradients divided by W have W times the scale and equal codes, so both give the same values.
//
// A gradient that is infinite or NaN becomes the code of NaN, where MS-AMP's cast saturates infinity at 448. NaN stays
// NaN in sums, so the gradient norm is not finite and the step is not taken (nonfinite.h).
#ifndef LLMC_GRADIENT_FP8_H
#define LLMC_GRADIENT_FP8_H

#include "../base/msamp.h"
#include "rounding.h"

#define GRADIENT_FP8_NAN 0x7f

// A gradient's magnitude as bits, which have the order of the magnitudes. Infinity and NaN are the largest.
HOST_DEVICE static inline uint32_t gradient_fp8_bits(float gradient) { return float_bits(gradient) & 0x7fffffffu; }

// Returns the scale of a tensor from its amax, which is given as bits. 1 if the amax is zero or not finite.
HOST_DEVICE static inline float gradient_fp8_scale(uint32_t amax) {
    return msamp_scale(float_from_bits(amax), 1, FP8_E4M3_MAX);
}

// Returns the factor for the scale of gradients that are summed over `ranks` whole replicas.
static inline float gradient_fp8_headroom(int64_t ranks) { return (float)(1 / sqrt((double)ranks)); }

HOST_DEVICE static inline uint8_t gradient_fp8_code(float gradient, float scale) {
    if (gradient_fp8_bits(gradient) >= 0x7f800000u) return GRADIENT_FP8_NAN;
    return fp8_from_float(gradient * scale, FP8_E4M3);
}

HOST_DEVICE static inline float gradient_fp8_value(uint8_t code, float scale_inv) {
    return float_product(fp8_to_float(code, FP8_E4M3), scale_inv);
}

// Returns the code of a + b. fp32 holds the sum of two codes exactly. FP16, in which MS-AMP adds, has more than twice
// the significant bits of E4M3, so its rounding in between changes no code (test_gradient_fp8.c compares all pairs).
HOST_DEVICE static inline uint8_t gradient_fp8_add(uint8_t a, uint8_t b) {
    return gradient_fp8_code(fp8_to_float(a, FP8_E4M3) + fp8_to_float(b, FP8_E4M3), 1);
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

static inline void gradient_fp8_decode(float *x, const uint8_t *codes, float scale_inv, int64_t n) {
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) x[i] = gradient_fp8_value(codes[i], scale_inv);
}

// Rounds n gradients to the values of their codes.
static inline void gradient_fp8_round(float *x, float scale, int64_t n) {
    const float scale_inv = 1 / scale;
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) x[i] = gradient_fp8_value(gradient_fp8_code(x[i], scale), scale_inv);
}

// sum [n] = the codes of all ranks, added in the order of ranks. codes [ranks][stride] may begin at `sum`.
static inline void gradient_fp8_sum(uint8_t *sum, const uint8_t *codes, int64_t ranks, int64_t stride, int64_t n) {
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) {
        uint8_t code = codes[i];
        for (int64_t r = 1; r < ranks; r++) code = gradient_fp8_add(code, codes[r * stride + i]);
        sum[i] = code;
    }
}

#endif
