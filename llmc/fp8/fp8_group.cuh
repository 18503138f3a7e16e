// Casts bf16 activations to groups of FP8 codes (base/fp8_group.h), and back.
//
// Bytes per value: the cast reads 2 and writes 1, the way back reads 1 and writes 2. Each also moves one byte of
// scale_inv for each group of 128 values. Both are bound by memory.
#ifndef LLMC_FP8_GROUP_CUH
#define LLMC_FP8_GROUP_CUH

#include "../base/arena.h"
#include "../base/fp8_group.h"
#include "../gpu/cuda_utils.cuh"

// The n values of an activation that is kept in FP8.
typedef struct {
    uint8_t *codes, *scales_inv;  // E4M3 [n], E8M0 [n / FP8_GROUP]
} Fp8Groups;

enum { FP8_GROUP_THREADS = 256, FP8_GROUP_AHEAD = 4, FP8_GROUP_VECTOR = 8 };

static inline int64_t fp8_group_blocks(int64_t n) {
    return grid_size(n, FP8_GROUP_THREADS * FP8_GROUP_VECTOR * FP8_GROUP_AHEAD);
}

// A thread takes 8 values at each of FP8_GROUP_AHEAD places, and 16 neighbouring threads together take the 128 values
// of a group. n is a multiple of FP8_GROUP.
static __global__ void __launch_bounds__(FP8_GROUP_THREADS)
    fp8_group_encode_kernel(Fp8Groups to, const bf16 *x, int64_t n) {
    grid_dependency_wait();
    const int64_t stride = FP8_GROUP_THREADS * FP8_GROUP_VECTOR;
    const int64_t first = blockIdx.x * stride * FP8_GROUP_AHEAD + threadIdx.x * FP8_GROUP_VECTOR;
    Bf16x8 v[FP8_GROUP_AHEAD] = {};
#pragma unroll
    for (int k = 0; k < FP8_GROUP_AHEAD; k++)
        if (first + k * stride < n) v[k] = bf16x8_load(x + first + k * stride);
#pragma unroll
    for (int k = 0; k < FP8_GROUP_AHEAD; k++) {
        const int64_t i = first + k * stride;
        uint32_t amax = amax_bits(amax_update(0, v[k]));
#pragma unroll
        for (int lanes = 8; lanes; lanes /= 2) amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
        const uint8_t scale_inv = fp8_group_scale_inv(amax);
        const float factor = fp8_group_factor(scale_inv);
        float values[8];
        bf16x8_unpack(values, v[k]);
#pragma unroll
        for (int j = 0; j < 8; j++) values[j] *= factor;
        if (i >= n) continue;
        *(uint2 *)(to.codes + i) =
            make_uint2(fp8x4_from_floats<FP8_E4M3>(values), fp8x4_from_floats<FP8_E4M3>(values + 4));
        if (threadIdx.x % 16 == 0) to.scales_inv[i / FP8_GROUP] = scale_inv;
    }
}

static __global__ void __launch_bounds__(FP8_GROUP_THREADS)
    fp8_group_decode_kernel(bf16 *x, Fp8Groups from, int64_t n) {
    grid_dependency_wait();
    const int64_t stride = FP8_GROUP_THREADS * FP8_GROUP_VECTOR;
    const int64_t first = blockIdx.x * stride * FP8_GROUP_AHEAD + threadIdx.x * FP8_GROUP_VECTOR;
    uint2 codes[FP8_GROUP_AHEAD] = {};
    uint8_t scales_inv[FP8_GROUP_AHEAD] = {};
#pragma unroll
    for (int k = 0; k < FP8_GROUP_AHEAD; k++) {
        const int64_t i = first + k * stride;
        if (i >= n) continue;
        codes[k] = *(const uint2 *)(from.codes + i);
        scales_inv[k] = from.scales_inv[i / FP8_GROUP];
    }
#pragma unroll
    for (int k = 0; k < FP8_GROUP_AHEAD; k++) {
        const int64_t i = first + k * stride;
        const float scale_inv = e8m0_to_float(scales_inv[k]);
        float values[8];
        fp8x8_to_floats(values, codes[k]);
#pragma unroll
        for (int j = 0; j < 8; j++) values[j] *= scale_inv;
        if (i < n) bf16x8_store(x + i, bf16x8_pack(values));
    }
}

// Takes the memory of groups for n values from the arena; n is a multiple of FP8_GROUP.
static inline Fp8Groups fp8_group_place(Arena *a, int64_t n) {
    Fp8Groups g;
    g.codes = (uint8_t *)arena_take(a, n), g.scales_inv = (uint8_t *)arena_take(a, n / FP8_GROUP);
    return g;
}

// Casts x [n] to groups. Returns the bytes that it reads and writes. Dies unless n is a multiple of FP8_GROUP and x is
// 16-byte aligned.
static inline int64_t fp8_group_encode(Fp8Groups to, const bf16 *x, int64_t n, cudaStream_t stream) {
    require_aligned16(x, "fp8_group_encode", "x");
    if (n % FP8_GROUP) die("fp8_group_encode: %lld values are not a multiple of %d", (long long)n, FP8_GROUP);
    CUDA_LAUNCH(fp8_group_encode_kernel, (unsigned)fp8_group_blocks(n), FP8_GROUP_THREADS, 0, stream, to, x, n);
    return 3 * n + n / FP8_GROUP;
}

// Writes the values of groups, rounded to bf16, to x [n]; n is a multiple of FP8_GROUP. Returns the bytes that it reads
// and writes. Dies unless x is 16-byte aligned.
static inline int64_t fp8_group_decode(bf16 *x, Fp8Groups from, int64_t n, cudaStream_t stream) {
    require_aligned16(x, "fp8_group_decode", "x");
    CUDA_LAUNCH(fp8_group_decode_kernel, (unsigned)fp8_group_blocks(n), FP8_GROUP_THREADS, 0, stream, x, from, n);
    return 3 * n + n / FP8_GROUP;
}

#endif
