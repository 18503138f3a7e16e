// Gradient norm, and AdamW with fp32, bf16 or COAT's moments, in plain C, over (part of) the flat parameter array.
#ifndef LLMC_REFERENCE_ADAMW_H
#define LLMC_REFERENCE_ADAMW_H

#include "../base/coat.h"
#include "adamw_math.h"

// Returns the sum of squares of n values, in double and in order.
static inline double squares_sum(const float *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sum;
}

// Takes one AdamW step for n elements. Element 0 of the arrays here is element `first` of the flat array.
// gradient_factor multiplies each gradient first (clip_factor). With bf16_weights the new weights are rounded to bf16;
// with bf16_state the new moments are rounded to bf16. adamw_random gives the rounding bits.
static inline void adamw_reference(float *weights, float *exp_avg, float *exp_avg_sq, const float *gradients,
                                   int64_t first, int64_t n, bool decay, float gradient_factor, bool bf16_weights,
                                   bool bf16_state, const AdamwStep *step) {
    const int64_t block = 4096;
    PARALLEL_FOR
    for (int64_t start = 0; start < n; start += block) {
        const AdamwStep s = *step;  // a copy, which stays in registers: no store below can alias it
        for (int64_t i = start; i < min_i64(start + block, n); i++) {
            AdamwElement e = {weights[i], exp_avg[i], exp_avg_sq[i]};
            e = adamw_update(e, gradients[i] * gradient_factor, decay, &s);
            const AdamwRandom random = adamw_random(&s, first + i);
            weights[i] = bf16_weights ? bf16_to_float(adamw_round(e.weight, random.weight)) : e.weight;
            exp_avg[i] = bf16_state ? bf16_to_float(adamw_round(e.exp_avg, random.exp_avg)) : e.exp_avg;
            exp_avg_sq[i] = bf16_state ? bf16_to_float(adamw_round(e.exp_avg_sq, random.exp_avg_sq)) : e.exp_avg_sq;
        }
    }
}

// A moment in FP8 (coat.h).
typedef struct {
    uint8_t *codes;    // [n]
    uint32_t *groups;  // [n / COAT_GROUP] words
} CoatMoment;

// Returns the tables. The first call computes them; no other thread may call at that time.
static inline const CoatTables *coat_tables(void) {
    static CoatTables *tables;
    if (tables) return tables;
    tables = (CoatTables *)xcalloc(1, sizeof *tables);
    coat_tables_fill(tables);
    return tables;
}

// Encodes one group. random: [COAT_GROUP] 32 random bits for each value, for stochastic rounding; NULL: to nearest.
static inline void coat_encode_group(const CoatTables *t, const float *x, const uint32_t *random, uint8_t *codes,
                                     uint32_t *word) {
    float largest = 0, smallest = INFINITY;
    for (int i = 0; i < COAT_GROUP; i++) {
        const float magnitude = fabsf(x[i]);
        if (magnitude > largest) largest = magnitude;
        if (magnitude > 0 && magnitude < smallest) smallest = magnitude;
    }
    *word = coat_word(t, largest, smallest);
    const float inverse = 1 / coat_max(*word);
    for (int i = 0; i < COAT_GROUP; i++)
        codes[i] = *word ? coat_encode(t, *word, inverse, x[i], random != NULL, random ? random[i] : 0) : 0;
}

static inline void adamw_coat_group(const CoatTables *t, float *weights, CoatMoment exp_avg, CoatMoment exp_avg_sq,
                                    const float *gradients, int64_t first, bool decay, float gradient_factor,
                                    bool bf16_weights, bool stochastic, const AdamwStep *s) {
    float m[COAT_GROUP], v[COAT_GROUP];
    uint32_t random_m[COAT_GROUP], random_v[COAT_GROUP];
    for (int i = 0; i < COAT_GROUP; i++) {
        AdamwElement e = {weights[i], coat_decode(t, *exp_avg.groups, exp_avg.codes[i]),
                          coat_decode(t, *exp_avg_sq.groups, exp_avg_sq.codes[i])};
        e = adamw_update(e, gradients[i] * gradient_factor, decay, s);
        const AdamwRandom random = adamw_random(s, first + i);
        weights[i] = bf16_weights ? bf16_to_float(adamw_round(e.weight, random.weight)) : e.weight;
        m[i] = e.exp_avg, v[i] = e.exp_avg_sq, random_m[i] = random.exp_avg, random_v[i] = random.exp_avg_sq;
    }
    coat_encode_group(t, m, stochastic ? random_m : NULL, exp_avg.codes, exp_avg.groups);
    coat_encode_group(t, v, stochastic ? random_v : NULL, exp_avg_sq.codes, exp_avg_sq.groups);
}

// adamw_reference with moments in FP8. `first` and n are multiples of COAT_GROUP; padding has zeros everywhere, and
// keeps them. Codes are rounded stochastically with `stochastic`, else to nearest.
static inline void adamw_coat_reference(float *weights, CoatMoment exp_avg, CoatMoment exp_avg_sq,
                                        const float *gradients, int64_t first, int64_t n, bool decay,
                                        float gradient_factor, bool bf16_weights, bool stochastic,
                                        const AdamwStep *step) {
    const CoatTables *tables = coat_tables();
    PARALLEL_FOR
    for (int64_t g = 0; g < n / COAT_GROUP; g++) {
        const int64_t i = g * COAT_GROUP;
        const CoatMoment m = {exp_avg.codes + i, exp_avg.groups + g}, v = {exp_avg_sq.codes + i, exp_avg_sq.groups + g};
        adamw_coat_group(tables, weights + i, m, v, gradients + i, first + i, decay, gradient_factor, bf16_weights,
                         stochastic, step);
    }
}

#endif
