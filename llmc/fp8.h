// FP8 numbers (OCP 8-bit formats E4M3 and E5M2) and the scales of the FP8 recipes.
// Casts saturate and round to nearest even, as torchao's to_fp8_saturated and the GPU's cvt.rn.satfinite do; NaN stays NaN.
#ifndef LLMC_FP8_H
#define LLMC_FP8_H

#include "bf16.h"

typedef enum { FP8_E4M3, FP8_E5M2 } Fp8Format;

#define FP8_E4M3_MAX 448.0f
#define FP8_E5M2_MAX 57344.0f

HOST_DEVICE static inline float fp8_max(Fp8Format format) { return format == FP8_E4M3 ? FP8_E4M3_MAX : FP8_E5M2_MAX; }

// Saturating cast of a float to 8 bits. Infinity saturates too (the input of a cast is clamped first, as in torchao); NaN gives 0x7f with its sign.
HOST_DEVICE static inline uint8_t fp8_from_float(float x, Fp8Format format) {
    const int mantissa = format == FP8_E4M3 ? 3 : 2;
    const int bias = format == FP8_E4M3 ? 7 : 15;
    const uint32_t largest = format == FP8_E4M3 ? 0x7e : 0x7b;
    uint32_t u = float_bits(x), sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint8_t)(sign | 0x7f);
    int exponent = (int)(magnitude >> 23) - 127 + bias;
    uint32_t fraction = magnitude & 0x7fffffu;
    int shift = 23 - mantissa;
    if (exponent <= 0) {  // subnormal in FP8: make the leading one explicit and shift further
        fraction |= 0x800000u;
        shift += 1 - exponent;
        exponent = 0;
        if (shift > 24) return (uint8_t)sign;  // below half of the smallest subnormal
    }
    uint32_t kept = fraction >> shift, rest = fraction & ((1u << shift) - 1), half = 1u << (shift - 1);
    if (rest > half || (rest == half && (kept & 1))) kept++;
    uint32_t code = ((uint32_t)exponent << mantissa) + kept;  // a carry out of the mantissa raises the exponent, as it should
    return (uint8_t)(sign | (code > largest ? largest : code));
}

HOST_DEVICE static inline float fp8_to_float(uint8_t code, Fp8Format format) {
    const int mantissa = format == FP8_E4M3 ? 3 : 2;
    const int bias = format == FP8_E4M3 ? 7 : 15;
    uint32_t sign = (uint32_t)(code & 0x80) << 24, magnitude = code & 0x7fu;
    bool is_nan = format == FP8_E4M3 ? magnitude == 0x7f : magnitude > 0x7c;
    if (is_nan) return float_from_bits(sign | 0x7fc00000u);
    if (format == FP8_E5M2 && magnitude == 0x7c) return float_from_bits(sign | 0x7f800000u);
    uint32_t exponent = magnitude >> mantissa, fraction = magnitude & ((1u << mantissa) - 1);
    if (exponent == 0) {  // fraction * 2^(1 - bias - mantissa), exact in float
        float unit = float_from_bits((uint32_t)(127 + 1 - bias - mantissa) << 23);
        float value = (float)fraction * unit;
        return sign ? -value : value;
    }
    return float_from_bits(sign | ((exponent - (uint32_t)bias + 127) << 23) | (fraction << (23 - mantissa)));
}

// torchao's amax_to_scale: the multiplier that takes a tensor to FP8, s = fp32(MAX / max(fp64(amax), 1e-12)).
// amax = inf gives 0 (then 1/s = inf, and the product is NaN); amax = NaN gives NaN.
HOST_DEVICE static inline float fp8_scale(float amax, Fp8Format format) {
    double a = (double)amax;
    if (a < 1e-12) a = 1e-12;  // false for NaN, which passes through
    return (float)((double)fp8_max(format) / a);
}

#endif
