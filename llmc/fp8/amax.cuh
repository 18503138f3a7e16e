// The amax of a tensor in memory, for tensors whose producing kernel does not find it.
// cuda_utils.cuh says how an amax slot is encoded.
#ifndef LLMC_AMAX_CUH
#define LLMC_AMAX_CUH

#include "../gpu/cuda_utils.cuh"

enum { AMAX_THREADS = 256, AMAX_VECTORS = 8 };

static __global__ void __launch_bounds__(AMAX_THREADS) tensor_amax_kernel(uint32_t *amax, const bf16 *x, int64_t n) {
    grid_dependency_wait();
    const int64_t vectors = n / 8, first = blockIdx.x * (int64_t)(AMAX_THREADS * AMAX_VECTORS) + threadIdx.x;
    Bf16x8 v[AMAX_VECTORS];
#pragma unroll
    for (int i = 0; i < AMAX_VECTORS; i++) {
        v[i] = Bf16x8{{0, 0, 0, 0}};
        if (first + i * AMAX_THREADS < vectors) v[i] = bf16x8_load(x + 8 * (first + i * AMAX_THREADS));
    }
    uint32_t packed_amax = 0;
#pragma unroll
    for (int i = 0; i < AMAX_VECTORS; i++) packed_amax = amax_update(packed_amax, v[i]);
    if (blockIdx.x == 0 && threadIdx.x < n % 8)
        packed_amax = __vmaxu2(packed_amax, __bfloat16_as_ushort(x[8 * vectors + threadIdx.x]) & 0x7fffu);
    amax_publish(amax, packed_amax);
}

// Raises *amax to max |x| over the n values at x (16-byte aligned), which may be any part of a tensor. Reads 2 bytes
// per element.
static inline void tensor_amax(uint32_t *amax, const bf16 *x, int64_t n, cudaStream_t stream) {
    if (n < 1) die("tensor_amax: %lld values, need at least 1", (long long)n);
    require_aligned16(x, "tensor_amax", "x");
    CUDA_LAUNCH(tensor_amax_kernel, grid_size(n, 8 * AMAX_THREADS * AMAX_VECTORS), AMAX_THREADS, 0, stream, amax, x, n);
}

#endif
