// IEEE half precision (FP16) as 16 stored bits.
#ifndef LLMC_FP16_H
#define LLMC_FP16_H

#include "bf16.h"

typedef uint16_t fp16_bits;

#define FP16_MAX 65504.0f

HOST_DEVICE static inline float fp16_to_float(fp16_bits half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 0x1fu, fraction = half & 0x3ffu;
    if (exponent == 31) return float_from_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent) return float_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    const float value = (float)fraction * 0x1p-24f;
    return sign ? -value : value;
}

// Round to nearest, ties to even. Finite values saturate at 65504, infinity stays, and NaN stays NaN (quiet).
HOST_DEVICE static inline fp16_bits fp16_from_float(float x) {
    const uint32_t u = float_bits(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) return (fp16_bits)(sign | (magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (magnitude < 0x38800000u)  // below 2^-14: the sum is rounded to multiples of 2^-24, as subnormal halves are
        return (fp16_bits)(sign | (float_bits(float_from_bits(magnitude) + 0.5f) - 0x3f000000u));
    const uint32_t code = ((magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10);
    return (fp16_bits)(sign | (code > 0x7bffu ? 0x7bffu : code));
}

// Stochastic rounding by 32 random bits; the upper ones must be good. The magnitude is rounded up with probability
// (distance to the lower neighbour) / (distance between the neighbours), below 2^-14 within 2^-32. Finite values
// saturate at 65504; infinities and NaNs stay.
HOST_DEVICE static inline fp16_bits fp16_from_float_stochastic(float x, uint32_t random) {
    const uint32_t u = float_bits(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) return fp16_from_float(x);
    if (magnitude < 0x38800000u) {  // below 2^-14 neighbours are 2^-24 apart; all products and differences are exact
        const float units = float_from_bits(magnitude) * 0x1p24f;
        const uint32_t whole = (uint32_t)units, part = (uint32_t)((units - (float)whole) * 0x1p32f);
        return (fp16_bits)(sign | (whole + (random < part)));
    }
    const uint32_t code = ((magnitude + (random >> 19)) >> 13) - (112u << 10);
    return (fp16_bits)(sign | (code > 0x7bffu ? 0x7bffu : code));
}

#endif
