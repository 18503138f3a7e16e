// FP16 master weights in GPU memory: initial values, and access for checkpoints.
//
// A master's scale follows from the amax of its whole tensor. While a tensor has no scale, its masters are fp32 numbers
// in two halves: the lower 16 bits are in the memory of the FP16 masters, the upper 16 bits in that of the second
// moments. Once all tensors' masters are in memory, fp16_masters_encode turns them into FP16 in place and sets the
// second moments to zero. If a checkpoint has set a tensor's scale before, fp16_masters_write encodes the tensor's
// masters as FP16 at once.
#ifndef LLMC_FP16_MASTERS_CUH
#define LLMC_FP16_MASTERS_CUH

#include "adamw_msamp.cuh"
#include "../reference/adamw_msamp.h"

__device__ static inline float fp16_masters_joined(const uint16_t *upper, const fp16_bits *lower, int64_t i) {
    return float_from_bits((uint32_t)upper[i] << 16 | lower[i]);
}

// Raises *amax to the largest magnitude of n masters in halves. Does nothing if the tensor has a scale.
static __global__ void fp16_masters_amax_kernel(uint32_t *amax, const uint16_t *upper, const fp16_bits *lower,
                                                int64_t n, const float *scale) {
    grid_dependency_wait();
    uint32_t largest = 0;
    if (*scale != 0) return;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        largest = max(largest, float_bits(fabsf(fp16_masters_joined(upper, lower, i))));
    largest = warp_max_u32(largest);
    if (threadIdx.x % WARP_SIZE == 0 && largest > *(volatile uint32_t *)amax) atomicMax(amax, largest);
}

// If the tensor has no scale (*scale is 0), its masters are in halves: encodes n of them as FP16 with *new_scale, and
// clears the upper halves. Then, in either case, rounds the numbers that the masters stand for to bf16 weights, unless
// `weights` is NULL.
static __global__ void fp16_masters_encode_kernel(bf16 *weights, fp16_bits *masters, uint16_t *upper, int64_t n,
                                                  const float *scale, const float *new_scale) {
    grid_dependency_wait();
    const bool halves = *scale == 0;
    const float factor = *new_scale, scale_inv = 1 / factor;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        if (halves) {
            masters[i] = fp16_from_float(fp16_masters_joined(upper, masters, i) * factor);
            upper[i] = 0;
        }
        if (weights) ((bf16_bits *)weights)[i] = bf16_from_float(fp16_to_float(masters[i]) * scale_inv);
    }
}

// Returns the memory of the upper halves, which is that of the second moments.
static inline uint16_t *fp16_masters_upper(const AdamwArrays *a) { return (uint16_t *)a->exp_avg_sq; }

// Returns the number of blocks of 256 threads for n elements: one thread for each element, but at most 2^20 threads.
static inline unsigned fp16_masters_blocks(int64_t n) { return grid_size(min_i64(n, 1 << 20), 256); }

// Finds the amaxes of this rank's parts of all masters that are in halves. Sets all other amaxes of AdamW's states to
// 0.
static inline void fp16_masters_amaxes(const AdamwArrays *a, const ParameterTable *t, const ShardPlan *plan,
                                       cudaStream_t stream) {
    const AdamwScaled *s = &a->scaled;
    const size_t bytes = (size_t)(t->count * MSAMP_STATES) * sizeof *s->amaxes;
    CUDA_CHECK(cudaMemsetAsync(s->amaxes, 0, bytes, stream));
    for (int64_t i = 0; i < t->count; i++) {
        const ShardRange r = shard_parameter(t, plan, &t->entries[i]);
        if (r.count)
            CUDA_LAUNCH(fp16_masters_amax_kernel, fp16_masters_blocks(r.count), 256, 0, stream,
                        s->amaxes + i * MSAMP_STATES + MSAMP_MASTER, fp16_masters_upper(a) + r.shard,
                        s->master + r.shard, r.count, s->scales + MSAMP_MASTER * s->tensors + i);
    }
}

// Encodes all masters that are in halves. The amaxes must be those of whole tensors: the caller has reduced them over
// the shard group. Then rounds the bf16 weights that this rank stores from the masters, and makes the new scales the
// masters' scales.
static inline void fp16_masters_encode(const AdamwArrays *a, const ParameterTable *t, const ShardPlan *plan,
                                       cudaStream_t stream) {
    const AdamwScaled *s = &a->scaled;
    float *scales = s->scales + MSAMP_MASTER * s->tensors, *new_scales = s->new_scales + MSAMP_MASTER * s->tensors;
    const MsampTensors all = {0, t->count};
    msamp_new_scales(s, all, NULL, true, stream);
    for (int64_t i = 0; i < t->count; i++) {
        const Parameter *p = &t->entries[i];
        const ShardRange r = shard_parameter(t, plan, p);
        const bool bf16 = weights_have(plan, p->layer, parameter_segment(p));
        if (r.count)
            CUDA_LAUNCH(fp16_masters_encode_kernel, fp16_masters_blocks(r.count), 256, 0, stream,
                        bf16 ? a->weights + weights_place(plan, p->layer, r.shard) : NULL, s->master + r.shard,
                        fp16_masters_upper(a) + r.shard, r.count, scales + i, new_scales + i);
    }
    CUDA_CHECK(cudaMemcpyAsync(scales, new_scales, (size_t)t->count * sizeof *scales, cudaMemcpyDefault, stream));
}

// Returns the scale of the masters of tensor i; 0 if it has none yet. Waits for all work in the stream.
static inline float fp16_masters_scale(const AdamwScaled *s, int64_t i, cudaStream_t stream) {
    float scale;
    CUDA_CHECK(
        cudaMemcpyAsync(&scale, s->scales + MSAMP_MASTER * s->tensors + i, sizeof scale, cudaMemcpyDefault, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return scale;
}

// Copies to the host the fp32 numbers that `count` masters of tensor i, encoded as FP16, stand for. The first of these
// masters is element `shard` of the flat shard arrays. Waits for the copy.
static inline void fp16_masters_read(const AdamwArrays *a, int64_t i, int64_t shard, int64_t count, float *host,
                                     cudaStream_t stream) {
    const AdamwScaled *s = &a->scaled;
    fp16_bits *codes = (fp16_bits *)xcalloc((size_t)count, sizeof *codes);
    CUDA_CHECK(cudaMemcpyAsync(codes, s->master + shard, (size_t)count * sizeof *codes, cudaMemcpyDefault, stream));
    fp16_weights_decode(host, codes, fp16_masters_scale(s, i, stream), count);
    free(codes);
}

// Copies `count` masters of tensor i, given as fp32 numbers, from the host: encoded as FP16 if the tensor has its
// scale, else in halves. `shard` is as in fp16_masters_read. Waits for the copy.
static inline void fp16_masters_write(const AdamwArrays *a, int64_t i, int64_t shard, int64_t count, const float *host,
                                      cudaStream_t stream) {
    const float scale = fp16_masters_scale(&a->scaled, i, stream);
    const size_t bytes = (size_t)count * sizeof(fp16_bits);
    fp16_bits *words = (fp16_bits *)xcalloc((size_t)count, 2 * sizeof *words), *upper = words + count;
    if (scale != 0) fp16_weights_encode(words, host, scale, count);
    for (int64_t k = 0; scale == 0 && k < count; k++) {
        const uint32_t bits = float_bits(host[k]);
        words[k] = (fp16_bits)bits, upper[k] = (uint16_t)(bits >> 16);
    }
    CUDA_CHECK(cudaMemcpyAsync(a->scaled.master + shard, words, bytes, cudaMemcpyDefault, stream));
    if (scale == 0) CUDA_CHECK(cudaMemcpyAsync(fp16_masters_upper(a) + shard, upper, bytes, cudaMemcpyDefault, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    free(words);
}

#endif
