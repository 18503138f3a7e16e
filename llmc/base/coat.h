// Moments of AdamW in FP8 by the rule of COAT: E4M3 codes in groups of 128 whose range of magnitudes is expanded.
// (Xi and others 2024, arXiv 2410.19313.) The CPU trainer and CUDA kernels share this file, so that both compute the
// same bits.
//
// The largest number of E4M3 is 2^17.8 times the smallest above zero. The ratio of the largest to the smallest
// magnitude in a group may be far less, or far more. So a group stores |x| / max to the power k, with the k that makes
// the group's magnitudes fill the range of E4M3:
//     r = max / min,  k = floor(16 log2(448 * 448 / 2) / log2(r)) / 16,  code = E4M3(448 (|x| / max)^k)
//     |x| = max (code / 448)^(1 / k)
// These are COAT's numbers. COAT keeps a scale, k and sqrt(max * min) for each group. They reduce to max and k, which
// fit one word of 32 bits: the lowest 8 bits are 16 k - 1, and the upper 24 bits are max, rounded up to 15 bits of
// mantissa. A moment takes 1 + 4 / 128 bytes per element. In three cases COAT's rules give no sound answer, and the
// rules here differ:
//   - k is at most 16; if all magnitudes are equal, COAT divides by log2(1) = 0. k is at least 1/8, also if the ratio
//     is too large for it. The largest code then stands for 2^142 times the magnitude of the lowest code above zero,
//     and smaller magnitudes are rounded to zero or to that code;
//   - zeros stay zeros, and do not count for the min; COAT's min counts some of them, by their place in the warp;
//   - a group whose max is below 2^-100 becomes zero. Beside the default --eps, 1e-8, such moments are negligible.
//
// pow() rounds differently on a CPU and on a GPU. So tables hold, for each k, the magnitudes that codes stand for and
// those at which rounding moves to the next code, and comparisons with them decide. The GPU guesses a code by powers,
// and the tables tell whether the guess is right (adamw_coat.cuh).
#ifndef LLMC_COAT_H
#define LLMC_COAT_H

#include <math.h>

#include "fp8.h"
#include "utils.h"

#define COAT_GROUP 128                // values that share a word
#define COAT_POWERS 256               // k = 1/16, 2/16, ... 16
#define COAT_CODES 127                // magnitudes of E4M3, from 0 to 448
#define COAT_SIGN 128                 // a code's bit for values below zero
#define COAT_SPAN 16.614709844115207  // log2(448 * 448 / 2): most that log2(max / min) may be after the power k
#define COAT_SMALLEST 0x1p-100f       // a group whose max is below it becomes zero

// Indexed by 16 k - 1.
typedef struct {
    float value[COAT_POWERS][COAT_CODES + 1];  // |x| / max of each code, then that of 480, as if a code stood for it
    float threshold[COAT_POWERS][COAT_CODES + 1];  // smallest |x| / max that is rounded to the code or a larger one
    float range[COAT_POWERS];                      // largest max / min of a group that may use this k
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
        t->value[p][COAT_CODES] = (float)pow(480 / 448.0, root);
        t->threshold[p][COAT_CODES] = INFINITY;
    }
}

// log2 and quotient, inexact on a GPU. They only make a guess, which coat_word checks.
HOST_DEVICE static inline float coat_log2(float x) {
#ifdef __CUDA_ARCH__
    return __log2f(x);
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

// True if k = (power + 1) / 16 may be used in a group with these extremes, of which `smallest` is above zero. k = 1/16
// and k = 1/8 may always be used: their range is infinite in fp32. So no group gets 1/16.
HOST_DEVICE static inline bool coat_fits(const CoatTables *t, int power, float max, float smallest) {
    return max <= float_product(t->range[power], smallest);
}

// Returns the word of a group whose largest magnitude is `largest` and whose smallest magnitude above zero is
// `smallest`; 0 if the group becomes zero.
HOST_DEVICE static inline uint32_t coat_word(const CoatTables *t, float largest, float smallest) {
    if (!(largest >= COAT_SMALLEST)) return 0;
    const uint32_t bits = (float_bits(largest) + 255) & ~255u;
    const float max = float_from_bits(bits), guess = coat_log2(coat_quotient(max, smallest));
    int power = guess > 1.1f ? (int)coat_quotient((float)COAT_SPAN * 16, guess) : COAT_POWERS - 1;
    while (power < COAT_POWERS - 1 && coat_fits(t, power + 1, max, smallest)) power++;
    while (!coat_fits(t, power, max, smallest)) power--;
    return bits | (uint32_t)power;
}

HOST_DEVICE static inline float coat_max(uint32_t word) { return float_from_bits(word & ~255u); }

// Returns the value of a code in a group with this word.
HOST_DEVICE static inline float coat_decode(const CoatTables *t, uint32_t word, uint8_t code) {
    const float magnitude = float_product(t->value[word & 255][code & (COAT_SIGN - 1)], coat_max(word));
    return code & COAT_SIGN ? -magnitude : magnitude;
}

// Returns the largest code whose entry in `row` is at most `part`.
HOST_DEVICE static inline uint32_t coat_find(const float *row, float part) {
    uint32_t code = 0;
    for (uint32_t step = 64; step; step /= 2)
        if (code + step < COAT_CODES && row[code + step] <= part) code += step;
    return code;
}

// Returns random bits as a number from 1 to below 2.
HOST_DEVICE static inline float coat_uniform(uint32_t random) {
#ifdef __CUDA_ARCH__
    return float_from_bits(__funnelshift_r(random, 127, 9));
#else
    return float_from_bits(127u << 23 | random >> 9);
#endif
}

// Stochastic rounding of a magnitude between the values of two neighbouring codes. above_code: its distance from the
// lower value; gap: the distance between the two values. Returns true if the upper code is taken. The decoded magnitude
// is then right on average.
HOST_DEVICE static inline bool coat_rounds_up(float above_code, float gap, uint32_t random) {
    return above_code > fmaf(gap, coat_uniform(random), -gap);
}

// Returns the code of x in a group with this word, which is not 0: the code nearest to 448 (|x| / max)^k with the sign
// of x, or, with `stochastic`, one of the two codes around that, by random bits. inverse_max: 1 / coat_max(word).
HOST_DEVICE static inline uint8_t coat_encode(const CoatTables *t, uint32_t word, float inverse_max, float x,
                                              bool stochastic, uint32_t random) {
    const uint32_t bits = float_bits(x), sign = bits >> 24 & COAT_SIGN, row = word & 255;
    const float part = float_product(float_from_bits(bits & 0x7fffffffu), inverse_max);
    if (!(bits & 0x7fffffffu)) return (uint8_t)sign;
    uint32_t code = coat_find(stochastic ? t->value[row] : t->threshold[row], part);
    if (stochastic) {
        const float value = t->value[row][code];
        code += coat_rounds_up(part - value, t->value[row][code + 1] - value, random);
    }
    return (uint8_t)(sign | code);
}

#endif
