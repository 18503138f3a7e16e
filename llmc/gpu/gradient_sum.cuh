// Adds gradients to a bf16 or fp32 sum on the GPU, 8 elements at a time, bit-identical to the CPU (gradient_sum.h).
#ifndef LLMC_GRADIENT_SUM_CUH
#define LLMC_GRADIENT_SUM_CUH

#include "cuda_utils.cuh"
#include "../reference/gradient_sum.h"

__device__ static inline void gradient_load_8(float x[8], const bf16 *p) { bf16x8_unpack(x, bf16x8_load(p)); }
__device__ static inline void gradient_load_8(float x[8], const float *p) { fp32x8_unpack(x, fp32x8_load(p)); }

// Rounds x to bf16 stochastically, with the random bits of elements i .. i + 7 of the sum.
__device__ static inline Bf16x8 gradient_round_8(const float x[8], int64_t i, const GradientSum &s) {
    const uint32_t hash = adamw_random_group(s.key, (s.flat + i) >> 3);
    Bf16x8 v;
#pragma unroll
    for (int k = 0; k < 4; k++)
        v.word[k] = gradient_sum_round(x[2 * k], hash, 2 * k) |
                    (uint32_t)gradient_sum_round(x[2 * k + 1], hash, 2 * k + 1) << 16;
    return v;
}

__device__ static inline void gradient_store_8(float *to, const float x[8], int64_t, const GradientSum &) {
    fp32x8_store(to, x);
}
__device__ static inline void gradient_store_8(bf16 *to, const float x[8], int64_t i, const GradientSum &s) {
    bf16x8_store(to, s.stochastic ? gradient_round_8(x, i, s) : bf16x8_pack(x));
}

// Adds gradients x to elements i .. i + 7 of the sum, which are at `to`; if !s.add, stores x there instead. i is a
// multiple of 8.
template <class Sum>
__device__ static inline void gradient_join_8(Sum *to, float x[8], int64_t i, const GradientSum &s) {
    if (s.add) {
        float before[8];
        gradient_load_8(before, to);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] += before[j];
    }
    gradient_store_8(to, x, i, s);
}

#endif
