// FP16 master weights in GPU memory: initial values, and access for checkpoints.
//
// A scale follows from the amax of a whole tensor. So new masters arrive as fp32 numbers, each in two halves: the upper
// half in place of the bf16 weight, the lower half in place of the FP16 master. When all are there, they are encoded in
// place.
#ifndef LLMC_FP16_MASTERS_CUH
#define LLMC_FP16_MASTERS_CUH

#include "adamw_msamp.cuh"
#include "../reference/adamw_msamp.h"

__device__ static inline float fp16_masters_joined(const bf16 *upper, const fp16_bits *lower, int64_t i) {
    return float_from_bits((uint32_t)((const bf16_bits *)upper)[i] << 16 | lower[i]);
}

// Raises *amax to the largest magnitude of n masters in halves.
static __global__ void fp16_masters_amax_kernel(uint32_t *amax, const bf16 *upper, const fp16_bits *lower, int64_t n) {
    grid_dependency_wait();
    uint32_t largest = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        largest = max(largest, float_bits(fabsf(fp16_masters_joined(upper, lower, i))));
    largest = warp_max_u32(largest);
    if (threadIdx.x % WARP_SIZE == 0 && largest > *(volatile uint32_t *)amax) atomicMax(amax, largest);
}

// Encodes n masters in halves as FP16, and rounds the weights to bf16 from what they then stand for.
static __global__ void fp16_masters_encode_kernel(bf16 *weights, fp16_bits *masters, int64_t n, const float *scale) {
    grid_dependency_wait();
    const float factor = *scale, scale_inv = 1 / factor;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const fp16_bits code = fp16_from_float(fp16_masters_joined(weights, masters, i) * factor);
        masters[i] = code;
        ((bf16_bits *)weights)[i] = bf16_from_float(fp16_to_float(code) * scale_inv);
    }
}

// Returns enough blocks of 256 threads for n elements, or to fill any GPU.
static inline unsigned fp16_masters_blocks(int64_t n) { return grid_size(min_i64(n, 1 << 20), 256); }

// Finds the amaxes of this rank's parts of all masters, which are in halves.
static inline void fp16_masters_amaxes(const AdamwArrays *a, const ParameterTable *t, const ShardPlan *plan,
                                       cudaStream_t stream) {
    const size_t bytes = (size_t)(t->count * MSAMP_STATES) * sizeof *a->scaled.amaxes;
    CUDA_CHECK(cudaMemsetAsync(a->scaled.amaxes, 0, bytes, stream));
    for (int64_t i = 0; i < t->count; i++) {
        const ShardRange r = shard_parameter(t, plan, &t->entries[i]);
        if (r.count)
            CUDA_LAUNCH(fp16_masters_amax_kernel, fp16_masters_blocks(r.count), 256, 0, stream,
                        a->scaled.amaxes + i * MSAMP_STATES + MSAMP_MASTER, a->weights + r.shard,
                        a->scaled.master + r.shard, r.count);
    }
}

// Encodes all masters, which are in halves and whose amaxes are known. A scale that a checkpoint brought stays.
static inline void fp16_masters_encode(const AdamwArrays *a, const ParameterTable *t, const ShardPlan *plan,
                                       cudaStream_t stream) {
    const AdamwScaled *s = &a->scaled;
    float *scales = s->scales + MSAMP_MASTER * s->tensors, *new_scales = s->new_scales + MSAMP_MASTER * s->tensors;
    const MsampTensors all = {0, t->count};
    msamp_new_scales(s, all, NULL, true, stream);
    CUDA_CHECK(cudaMemcpyAsync(scales, new_scales, (size_t)t->count * sizeof *scales, cudaMemcpyDefault, stream));
    for (int64_t i = 0; i < t->count; i++) {
        const ShardRange r = shard_parameter(t, plan, &t->entries[i]);
        if (r.count)
            CUDA_LAUNCH(fp16_masters_encode_kernel, fp16_masters_blocks(r.count), 256, 0, stream, a->weights + r.shard,
                        s->master + r.shard, r.count, scales + i);
    }
}

// Copies `count` masters of tensor i, the first of which is element `shard` of the flat shard arrays, to the host: the
// fp32 numbers that they stand for. Waits for the copy.
static inline void fp16_masters_read(const AdamwArrays *a, int64_t i, int64_t shard, int64_t count, float *host,
                                     cudaStream_t stream) {
    const AdamwScaled *s = &a->scaled;
    const size_t bytes = (size_t)count * sizeof *s->master;
    fp16_bits *codes = (fp16_bits *)xcalloc((size_t)count, sizeof *codes);
    float scale;
    CUDA_CHECK(cudaMemcpyAsync(codes, s->master + shard, bytes, cudaMemcpyDefault, stream));
    CUDA_CHECK(
        cudaMemcpyAsync(&scale, s->scales + MSAMP_MASTER * s->tensors + i, sizeof scale, cudaMemcpyDefault, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    fp16_weights_decode(host, codes, scale, count);
    free(codes);
}

// Copies `count` masters from the host, in halves. Waits for the copy.
static inline void fp16_masters_write(const AdamwArrays *a, int64_t shard, int64_t count, const float *host,
                                      cudaStream_t stream) {
    const size_t bytes = (size_t)count * sizeof(fp16_bits);
    fp16_bits *halves = (fp16_bits *)xcalloc((size_t)count, 2 * sizeof *halves);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = float_bits(host[i]);
        halves[i] = (fp16_bits)(bits >> 16), halves[count + i] = (fp16_bits)bits;
    }
    CUDA_CHECK(cudaMemcpyAsync(a->weights + shard, halves, bytes, cudaMemcpyDefault, stream));
    CUDA_CHECK(cudaMemcpyAsync(a->scaled.master + shard, halves + count, bytes, cudaMemcpyDefault, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    free(halves);
}

#endif
