// Moments of AdamW in FP8 by the rule of COAT: E4M3 codes in groups of 128 whose range of magnitudes is expanded.
// (Xi and others 2024, arXiv 2410.19313.) The CPU trainer and the CUDA kernel share this file, so that both compute the
// same bits.
//
// E4M3 spans 2^17.8. The magnitudes in a group may span little of it, or much more. So a group stores |x| / max to the
// power k, and k is such that the group's range of magnitudes fills that of E4M3:
//     r = max / min,  k = floor(16 log2(448 * 448 / 2) / log2(r)) / 16,  code = E4M3(448 (|x| / max)^k)
//     |x| = max (code / 448)^(1 / k)
// These are COAT's numbers. COAT keeps a scale, k and sqrt(max * min) for each group. They reduce to max and k, which
// fit one word of 32 bits: the bits of the max, whose mantissa is rounded up to 16 bits, and in the lowest 8 bits
// 16 k - 1. A moment takes 1 + 4 / 128 bytes. Where COAT has no sound answer, this differs:
//   - k is at most 16, where COAT divides by log2(1) = 0 if all magnitudes are equal, and at least 1/8, which spans all
//     of fp32;
//   - zeros stay zeros, and do not count for the min; COAT's min counts some of them, by their place in the warp;
//   - a group whose max is below 2^-100 becomes zero. There AdamW's eps decides.
//
// A power differs between a CPU and a GPU. So tables hold, for each k, the magnitudes that codes stand for and those at
// which rounding moves to the next code. Where a computed power is too near to such a magnitude, comparisons with them
// decide: both compute the same code.
#ifndef LLMC_COAT_H
#define LLMC_COAT_H

#include <math.h>

#include "fp8.h"
#include "utils.h"

#define COAT_GROUP 128                // values that share a word
#define COAT_POWERS 256               // k = 1/16, 2/16, ... 16
#define COAT_CODES 127                // magnitudes of E4M3, from 0 to 448
#define COAT_SPAN 16.614709844115207  // log2(448 * 448 / 2): the range that a group's magnitudes get
#define COAT_SMALLEST 0x1p-100f       // groups whose max is below are zero

// Indexed by 16 k - 1.
typedef struct {
    float value[COAT_POWERS][COAT_CODES + 1];      // |x| / max of each code; the entry behind the last is infinity
    float threshold[COAT_POWERS][COAT_CODES + 1];  // from this |x| / max on, rounding to nearest gives the code or more
    float range[COAT_POWERS];                      // largest max / min for which this k may be used
} CoatTables;

static inline void coat_tables_fill(CoatTables *t) {
    for (int p = 0; p < COAT_POWERS; p++) {
        const double root = 16.0 / (p + 1);  // 1 / k
        t->range[p] = (float)exp2(COAT_SPAN * root);
        for (int c = 0; c < COAT_CODES; c++) {
            const double value = (double)fp8_to_float((uint8_t)c, FP8_E4M3),
                         below = c ? (double)fp8_to_float((uint8_t)(c - 1), FP8_E4M3) : 0;
            t->value[p][c] = (float)pow(value / 448, root);
            t->threshold[p][c] = (float)pow((below + value) / 2 / 448, root);
        }
        t->value[p][COAT_CODES] = t->threshold[p][COAT_CODES] = INFINITY;
    }
}

// log2, quotient and 2^x, for guesses that are checked. The GPU's instructions have errors below 2^-22.
HOST_DEVICE static inline float coat_log2(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return log2f(x);
#endif
}
HOST_DEVICE static inline float coat_quotient(float x, float y) {
#ifdef __CUDA_ARCH__
    return __fdividef(x, y);
#else
    return x / y;
#endif
}
HOST_DEVICE static inline float coat_exp2(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// Returns the word of a group whose largest magnitude is `largest` and whose smallest above zero is `smallest`.
HOST_DEVICE static inline uint32_t coat_word(const CoatTables *t, float largest, float smallest) {
    if (!(largest >= COAT_SMALLEST)) return 0;
    const uint32_t max = (float_bits(largest) + 255) & ~255u;
    const float range = float_from_bits(max) / smallest, bits = coat_log2(range);
    int power = bits > 1.1f ? (int)coat_quotient((float)COAT_SPAN * 16, bits) : COAT_POWERS - 1;
    while (power < COAT_POWERS - 1 && range <= t->range[power + 1]) power++;
    while (range > t->range[power]) power--;  // range[0] is infinite
    return max | (uint32_t)power;
}

HOST_DEVICE static inline float coat_max(uint32_t word) { return float_from_bits(word & ~255u); }

// Returns the value of a code in a group with this word.
HOST_DEVICE static inline float coat_decode(const CoatTables *t, uint32_t word, uint8_t code) {
    const float magnitude = float_product(t->value[word & 255][code & 0x7f], coat_max(word));
    return code & 0x80 ? -magnitude : magnitude;
}

HOST_DEVICE static inline float coat_power(uint32_t word) { return (float)((word & 255) + 1) * 0.0625f; }

// The code of y = 448 (|x| / max)^k as computed, and whether the exact y is sure to have it. If not, `code` may be any
// number.
typedef struct {
    uint32_t code;
    bool sure;
} CoatGuess;

// Guesses the code of |x| / max = part: the nearest, or, with `down`, the largest that is at most y. y is off by less
// than 2^-18 of itself: log2 has an error below 2^-22, and the exponent of part^k is above -18. A guess is sure if y is
// further than 2^-16 from the next place at which the code changes.
HOST_DEVICE static inline CoatGuess coat_guess(float k, float part, bool down) {
    const float log2_448 = 8.807354922f, y = coat_exp2(fmaf(coat_log2(part), k, log2_448));
    // Adding 2^-6 to a y that is subnormal in E4M3 gives it the spacing of codes in fp32's exponent -6, 8 codes up.
    const bool subnormal = y < 0x1p-6f;
    const uint32_t half = down ? 0 : 0x80000u, margin = 128;
    const uint32_t place = float_bits(subnormal ? y + 0x1p-6f : y) + half;
    const bool in_range = float_bits(y) - 1 < float_bits(448.0f);  // neither 0, nor above 448, nor NaN
    const CoatGuess guess = {(place >> 20) - (subnormal ? 968 : 960),
                             in_range && ((place + margin) & 0xfffffu) >= 2 * margin};
    return guess;
}

// Rounds up from `code`, the largest whose value is at most `part`, with the probability that the decoded value is
// `part` on average. `random` has the random bits in its upper half.
HOST_DEVICE static inline uint32_t coat_round(const float *values, uint32_t code, float part, uint32_t random) {
    const float below = values[code], gap = values[code + 1] - below;
    return code + (part - below > float_product(gap, (float)(random >> 16) * 0x1p-16f));
}

// Returns the largest code whose entry in `row` is at most x, at most the last code.
HOST_DEVICE static inline uint32_t coat_find(const float *row, float x) {
    uint32_t code = 0;
    for (uint32_t step = 64; step; step /= 2)
        if (code + step < COAT_CODES && row[code + step] <= x) code += step;
    return code;
}

// Returns the code of x in a group with this word, which is not 0: the nearest, or, with `stochastic`, one of the two
// around x (coat_round). inverse_max: 1 / coat_max(word).
HOST_DEVICE static inline uint8_t coat_encode(const CoatTables *t, uint32_t word, float inverse_max, float x,
                                              bool stochastic, uint32_t random) {
    const uint32_t bits = float_bits(x), sign = bits >> 24 & 0x80u, row = word & 255;
    const float part = float_product(float_from_bits(bits & 0x7fffffffu), inverse_max);
    if (!(bits & 0x7fffffffu)) return 0;
    const CoatGuess guess = coat_guess(coat_power(word), part, stochastic);
    uint32_t code = guess.code;
    if (!guess.sure) code = coat_find(stochastic ? t->value[row] : t->threshold[row], part);
    if (stochastic && code < COAT_CODES - 1) code = coat_round(t->value[row], code, part, random);
    return (uint8_t)(sign | code);
}

#endif
