// Initial weights on the GPU: the values of initialize.h, bit for bit those of the CPU.
#ifndef LLMC_INITIALIZE_CUH
#define LLMC_INITIALIZE_CUH

#include "../gpu/cuda_utils.cuh"
#include "../reference/initialize.h"
#include "../config/shard_plan.h"

// Flat shard arrays [total] that get initial values. `master` and `lower` may be NULL.
typedef struct {
    // If `lower` is NULL: bf16 weights, rounded to nearest even. Else the array of second moments, which gets the upper
    // halves of the fp32 values, not rounded (fp16_masters.cuh).
    bf16 *weights;
    float *master;    // fp32 master weights
    uint16_t *lower;  // lower halves of the fp32 values (fp16_masters.cuh)
} InitialWeights;

// Initializes elements [first, first + n) of a tensor; the first of them is element `shard` of the shard arrays.
static __global__ void initialize_parameter_kernel(InitialWeights w, int64_t shard, int64_t first, int64_t n,
                                                   unsigned flags, float initializer_range, uint64_t seed,
                                                   int64_t tensor_index) {
    grid_dependency_wait();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x) {
        const float x = parameter_initial_value(flags, initializer_range, seed, tensor_index, first + i);
        ((bf16_bits *)w.weights)[shard + i] = w.lower ? (bf16_bits)(float_bits(x) >> 16) : bf16_from_float(x);
        if (w.master) w.master[shard + i] = x;
        if (w.lower) w.lower[shard + i] = (uint16_t)float_bits(x);
    }
}

// Fills a rank's shard with initial values; padding becomes 0.
static inline void initialize_parameters(InitialWeights w, const ParameterTable *t, const ShardPlan *plan,
                                         float initializer_range, uint64_t seed, cudaStream_t stream) {
    const size_t n = (size_t)plan->total;
    CUDA_CHECK(cudaMemsetAsync(w.weights, 0, n * sizeof *w.weights, stream));
    if (w.master) CUDA_CHECK(cudaMemsetAsync(w.master, 0, n * sizeof *w.master, stream));
    if (w.lower) CUDA_CHECK(cudaMemsetAsync(w.lower, 0, n * sizeof *w.lower, stream));
    for (int64_t i = 0; i < t->count; i++) {
        const Parameter *p = &t->entries[i];
        const ShardRange r = shard_parameter(t, plan, p);
        if (!r.count) continue;
        // At most 2^20 threads, which loop over the elements.
        const unsigned blocks = grid_size(min_i64(r.count, 1 << 20), 256);
        CUDA_LAUNCH(initialize_parameter_kernel, blocks, 256, 0, stream, w, r.shard, r.first, r.count, p->flags,
                    initializer_range, seed, i);
    }
}

static __global__ void round_weights_kernel(bf16 *weights, const float *master, int64_t n) {
    grid_dependency_wait();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        weights[i] = __float2bfloat16_rn(master[i]);
}

// Writes weights [n] = master [n], rounded to nearest even.
static inline void round_weights(bf16 *weights, const float *master, int64_t n, cudaStream_t stream) {
    CUDA_LAUNCH(round_weights_kernel, 8 * device_sm_count(), 256, 0, stream, weights, master, n);
}

#endif
