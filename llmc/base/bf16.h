// bfloat16 as 16 stored bits: the upper half of an IEEE float32.
#ifndef LLMC_BF16_H
#define LLMC_BF16_H

#include "utils.h"

typedef uint16_t bf16_bits;

HOST_DEVICE static inline uint32_t float_bits(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
#endif
}

HOST_DEVICE static inline float float_from_bits(uint32_t u) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
#endif
}

// Returns a * b, rounded to fp32. The product is not fused with an addition: by __fmul_rn on the GPU, by
// -ffp-contract=off in the CPU trainer.
HOST_DEVICE static inline float float_product(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

// True if x is above zero and neither infinite nor NaN.
HOST_DEVICE static inline bool float_is_positive(float x) { return float_bits(x) - 1 < 0x7f7fffffu; }

HOST_DEVICE static inline float bf16_to_float(bf16_bits b) { return float_from_bits((uint32_t)b << 16); }

// Round to nearest, ties to even; NaN stays NaN (quiet), overflow goes to infinity.
HOST_DEVICE static inline bf16_bits bf16_from_float(float x) {
    uint32_t u = float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16_bits)((u >> 16) | 0x0040u);
    return (bf16_bits)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Stochastic rounding by 16 uniformly random bits. The magnitude is rounded up with probability (distance to the lower
// neighbour) / (distance between the neighbours). Infinities and NaNs stay.
HOST_DEVICE static inline bf16_bits bf16_from_float_stochastic(float x, uint32_t random16) {
    uint32_t u = float_bits(x);
    if ((u & 0x7f800000u) == 0x7f800000u) return bf16_from_float(x);
    return (bf16_bits)((u + (random16 & 0xffffu)) >> 16);
}

HOST_DEVICE static inline float bf16_round(float x) { return bf16_to_float(bf16_from_float(x)); }

#endif
