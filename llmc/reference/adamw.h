// Gradient norm and AdamW in plain C, over (part of) the flat parameter array.
#ifndef LLMC_REFERENCE_ADAMW_H
#define LLMC_REFERENCE_ADAMW_H

#include "adamw_math.h"
#include "rounding.h"

// Returns the square root of the sum of squares: sums blocks of 4096 in order, then the blocks in order.
static inline double global_norm(const float *x, int64_t n) {
    enum { BLOCK = 4096 };
    const int64_t blocks = ceil_div(n, BLOCK);
    double *sums = (double *)xcalloc((size_t)blocks, sizeof(double)), total = 0;
    PARALLEL_FOR
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t i = b * BLOCK; i < min_i64((b + 1) * BLOCK, n); i++) sums[b] += (double)x[i] * x[i];
    for (int64_t b = 0; b < blocks; b++) total += sums[b];
    free(sums);
    return sqrt(total);
}

// Takes one AdamW step for n elements, the first of which is element `first` of the flat array (the arrays here start
// at it). With bf16_weights and bf16_state the stored values are bf16, rounded stochastically.
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

#endif
