// FP8 numbers (OCP 8-bit formats E4M3 and E5M2) and the scales of the FP8 recipes.
// Casts saturate and round to nearest even, as torchao's to_fp8_saturated and the GPU's cvt.rn.satfinite. NaN stays
// NaN.
#ifndef LLMC_FP8_H
#define LLMC_FP8_H

#include "bf16.h"

typedef enum { FP8_E4M3, FP8_E5M2 } Fp8Format;
static_assert(FP8_E4M3 == 0 && FP8_E5M2 == 1, "tables that a format indexes begin with E4M3: gemm.cuh");

#define FP8_E4M3_MAX 448.0f
#define FP8_E5M2_MAX 57344.0f

HOST_DEVICE static inline float fp8_max(Fp8Format format) { return format == FP8_E4M3 ? FP8_E4M3_MAX : FP8_E5M2_MAX; }

// Saturating cast of a float to 8 bits. Infinity saturates too, since torchao clamps before it casts. NaN gives 0x7f
// with its sign.
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
    const uint32_t code = ((uint32_t)exponent << mantissa) + kept;  // a carry of the mantissa raises the exponent
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

// torchao's amax_to_scale: the multiplier that takes a tensor to FP8, s = fp32(MAX / max(fp64(amax), 1e-12)). amax =
// inf gives s = 0, so that scale_inv = 1 / s is infinite and a GEMM gives NaN. amax = NaN gives NaN.
HOST_DEVICE static inline float fp8_scale(float amax, Fp8Format format) {
    double a = (double)amax;
    if (a < 1e-12) a = 1e-12;  // false for NaN, which passes through
    return (float)((double)fp8_max(format) / a);
}

// The largest power of two not above x, for x >= 0. Zero, infinity and NaN stay; a subnormal number becomes zero.
// If x is the scale of a bfloat16 amax, torchao's exp2(floor(log2 x)) gives an equal value.
HOST_DEVICE static inline float fp8_pow2_down(float x) {
    const uint32_t exponent = float_bits(x) & 0x7f800000u;
    return exponent == 0x7f800000u ? x : float_from_bits(exponent);
}

// Transformer Engine's scale: MAX / 2^margin is divided by the amax, in fp32. An amax of zero, infinity or NaN gives 1,
// with any margin. A quotient above the largest float becomes the largest float.
HOST_DEVICE static inline float fp8_scale_te(float amax, Fp8Format format, int margin) {
    const uint32_t bits = float_bits(amax);
    if (bits == 0 || bits >= 0x7f800000u) return 1.0f;
    const float range = margin ? fp8_max(format) * float_from_bits((uint32_t)(127 - margin) << 23) : fp8_max(format);
    const float scale = range / amax;
    return float_bits(scale) == 0x7f800000u ? float_from_bits(0x7f7fffffu) : scale;
}

// E8M0: a power of two by its exponent, 2^(code - 127); 0xff is NaN.
HOST_DEVICE static inline float e8m0_to_float(uint8_t code) {
    if (code == 0xff) return float_from_bits(0x7fc00000u);
    return code ? float_from_bits((uint32_t)code << 23) : float_from_bits(0x00400000u);
}

// The scale_inv of a block in an MX format: amax / MAX as E8M0, rounded up so that no finite bf16 value saturates
// (RCEIL: Transformer Engine, torchao). Zero gives 0, infinity 0xfe, NaN 0xff.
HOST_DEVICE static inline uint8_t e8m0_from_amax(float amax, Fp8Format format) {
    const uint32_t u = float_bits(amax * (1.0f / fp8_max(format))), exponent = u >> 23, fraction = u & 0x7fffffu;
    if (u > 0x7f800000u) return 0xff;
    if (u == 0x7f800000u) return 0xfe;
    return (uint8_t)(exponent + (exponent ? fraction != 0 : fraction > 0x400000u));
}

// How recipes (recipes.h) make a scale, the multiplier that takes values to FP8, from an amax.
typedef enum { SCALE_TORCHAO, SCALE_TORCHAO_POW2, SCALE_TE, SCALE_TE_POW2, SCALE_MX } ScaleRule;

HOST_DEVICE static inline float fp8_rule_scale(ScaleRule rule, float amax, Fp8Format format) {
    if (rule == SCALE_TORCHAO) return fp8_scale(amax, format);
    if (rule == SCALE_TORCHAO_POW2) return fp8_pow2_down(fp8_scale(amax, format));
    if (rule == SCALE_TE) return fp8_scale_te(amax, format, 0);
    if (rule == SCALE_TE_POW2) return fp8_pow2_down(fp8_scale_te(amax, format, 0));
    const uint8_t code = e8m0_from_amax(amax, format);  // 2^(127 - code)
    return code == 0xff   ? float_from_bits(0x7fc00000u)
           : code == 0xfe ? float_from_bits(0x00400000u)
                          : float_from_bits((uint32_t)(254 - code) << 23);
}

// True if a NaN makes the amax NaN; false if a NaN is ignored.
HOST_DEVICE static inline bool fp8_rule_keeps_nan(ScaleRule rule) { return rule != SCALE_TE && rule != SCALE_TE_POW2; }

// Returns the bits of the larger of `amax` (bits too) and |x|. These bits order NaN above infinity above finite values;
// a rule that does not keep NaN ignores a NaN x.
HOST_DEVICE static inline uint32_t fp8_rule_amax(ScaleRule rule, uint32_t amax, float x) {
    const uint32_t magnitude = float_bits(x) & 0x7fffffffu;
    if (magnitude > 0x7f800000u && !fp8_rule_keeps_nan(rule)) return amax;
    return magnitude > amax ? magnitude : amax;
}

#endif
