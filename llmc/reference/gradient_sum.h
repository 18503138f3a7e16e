// Sums of gradients over micro-steps in bf16 or fp32 (--grad-accum-dtype): one rule for CPU and GPU, the same bits.
//
// A bf16 sum that is rounded to nearest stops growing when it is 256 to 512 times as large as what is added to it. So
// bf16 sums are rounded stochastically, with random bits that depend on (rounding seed, optimizer step, number of the
// addition, flat element index) alone: neither on the launch shape nor on how a replica's parameters are split over
// ranks. Each add is then right on average, and what is left is noise. One add has an error of at most one ulp of the
// sum, 2^-8 to 2^-7 of it, with a variance of 5.5e-6 of the sum's square (a sixth of the ulp's square, averaged over
// the ratios of ulp and sum). Over n micro-steps of gradients of random sign that adds up to 2.7e-6 n of the square of
// the whole sum, and makes the norm 1.4e-6 n too large: 0.035% at 256 micro-steps, 0.14% at 1,024. Gradients of one
// sign give two thirds of that.
#ifndef LLMC_GRADIENT_SUM_H
#define LLMC_GRADIENT_SUM_H

#include "adamw_math.h"

// How gradients join a sum.
typedef struct {
    bool add;         // true: they are added to the sum; false: they replace it
    bool stochastic;  // true: a bf16 sum is rounded stochastically; false: to nearest; fp32 sums: not used
    uint64_t key;     // key of the rounding bits
    int64_t flat;     // index of the sum's first element in the flat array of parameters.h, a multiple of 8
} GradientSum;

// The key from which gradient_sum_key makes those of optimizer step `step`.
static inline uint64_t gradient_sum_step_key(uint64_t seed, int64_t step) {
    return rng_key(seed, 0x4753000000000000ull + (uint64_t)step);
}

// The key of one addition to every element. `part`: number of the addition within the optimizer step, from 0.
// Micro-step m of rank r of W has the numbers 2 (m W + r) and, for an embedding's gradient that a GPU adds apart, that
// + 1.
static inline uint64_t gradient_sum_key(uint64_t seed, int64_t step, int64_t part) {
    return rng_key(gradient_sum_step_key(seed, step), (uint64_t)part);
}

// Rounds a sum to bf16 stochastically. group_hash: adamw_random_group of the key and of the element's group of 8 in the
// flat array; member: the element's number in the group.
HOST_DEVICE static inline bf16_bits gradient_sum_round(float sum, uint32_t group_hash, uint32_t member) {
    return bf16_from_float_stochastic(sum, adamw_random_word(group_hash, member) * 0x846ca68bu >> 16);
}

// Adds gradients [n] to elements first .. first + n - 1 of a sum, which sum [n] holds; without s->add, writes the
// gradients there. fp32: false if the sum holds bf16 values. The CPU trainer uses this function, and GPU kernels are
// checked against it.
static inline void gradient_sum_reference(float *sum, const float *gradients, int64_t first, int64_t n, bool fp32,
                                          const GradientSum *s) {
    for (int64_t i = 0; i < n; i++) {
        const float x = s->add ? gradients[i] + sum[i] : gradients[i];
        const int64_t at = s->flat + first + i;
        const uint32_t hash = adamw_random_group(s->key, at >> 3);
        if (fp32) sum[i] = x;
        else sum[i] = s->stochastic ? bf16_to_float(gradient_sum_round(x, hash, (uint32_t)at & 7)) : bf16_round(x);
    }
}

#endif
