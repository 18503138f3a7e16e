// Softmax cross-entropy over the vocabulary, in place on a chunk of bf16 logits [R, V].
//
//   loss[r]      = log(sum_v exp(x[r][v])) - x[r][target]                            fp32, natural logarithm
//   dlogits[r][v] = bf16((softmax(x[r])[v] - (v == target)) * gradient_scale)        written over the logits
//
// A row whose target lies outside [0, V) is ignored: loss 0, gradient 0. A NaN or +inf logit makes the row's loss and gradient NaN.
//
// Bytes moved: 2 read + 2 written per logit (2 read without gradient). A row of 128k-152k logits does not fit one SM, so a cluster of up
// to 8 blocks holds it in registers: each thread loads its vectors once, blocks exchange (maximum, sum) through distributed shared memory,
// and the gradient is computed from the registers. Rows that this cannot take (V not a multiple of 8, or V > 262144) go through a block
// per row that reads the row three times.
// Sums have a fixed order: the same bits in every run.
#ifndef LLMC_CROSS_ENTROPY_CUH
#define LLMC_CROSS_ENTROPY_CUH

#include <cooperative_groups.h>

#include "cuda_utils.cuh"

#define CROSS_ENTROPY_VECTORS 4       // 16-byte vectors a thread holds
#define CROSS_ENTROPY_MAX_CLUSTER 8   // the largest portable cluster
#define CROSS_ENTROPY_MAX_THREADS 1024
#define NEGATIVE_INFINITY_PAIR 0xff80ff80u  // two bf16

// Clusters exist from compute capability 9.0 on. Code for less has an empty cluster kernel, and every row goes through the other one.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CROSS_ENTROPY_HAS_CLUSTERS 1
#else
#define CROSS_ENTROPY_HAS_CLUSTERS 0
#endif

// The larger of two, NaN if either is.
__device__ static inline float cross_entropy_max(float a, float b) { return a > b || a != a ? a : b; }

// The same on two bf16 at a time.
__device__ static inline uint32_t cross_entropy_pair_max(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Maximum and sum over a block of any number of whole warps, the same bits in every thread. scratch: 32 floats of shared memory, not
// used by another reduction of the same block.
__device__ static inline float cross_entropy_block_max(float x, float *scratch) {
    const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x = cross_entropy_max(x, __shfl_xor_sync(0xffffffffu, x, offset));
    if (lane == 0) scratch[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    x = lane < warps ? scratch[lane] : -INFINITY;
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x = cross_entropy_max(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

__device__ static inline float cross_entropy_block_sum(float x, float *scratch) {
    const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    x = warp_sum(x);
    if (lane == 0) scratch[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

// What exp() subtracts: the maximum, or 0 where every logit is -inf and -inf - -inf would be NaN.
__device__ static inline float cross_entropy_shift(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

#if CROSS_ENTROPY_HAS_CLUSTERS
// Maximum and sum of exp(x - maximum) of this block's part of the row become those of the whole row.
// Every block stores its pair in every block of the cluster, then adds them up in block order.
__device__ static inline void cross_entropy_join_cluster(float *maximum, float *sum) {
    __shared__ float2 parts[CROSS_ENTROPY_MAX_CLUSTER];
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const int blocks = (int)cluster.num_blocks();
    if ((int)threadIdx.x < blocks) {
        float2 *remote = cluster.map_shared_rank(parts, (int)threadIdx.x);
        remote[cluster.block_rank()] = make_float2(*maximum, *sum);
    }
    cluster.sync();
    float m = parts[0].x, s = 0.0f;
    for (int i = 1; i < blocks; i++) m = cross_entropy_max(m, parts[i].x);
    for (int i = 0; i < blocks; i++) s += parts[i].y * __expf(parts[i].x - m);
    *maximum = m;
    *sum = s;
}
#endif

// One row per cluster. `vectors` = V / 8; each block takes `share` consecutive ones, at most CROSS_ENTROPY_VECTORS a thread.
template <bool GRADIENT>
__global__ static void __launch_bounds__(CROSS_ENTROPY_MAX_THREADS)
    cross_entropy_cluster_kernel(float *losses, bf16 *logits, const int32_t *targets, int vectors, int share, float gradient_scale) {
#if CROSS_ENTROPY_HAS_CLUSTERS
    __shared__ float max_scratch[WARP_SIZE], sum_scratch[WARP_SIZE];
    const int blocks = (int)cooperative_groups::this_cluster().num_blocks();
    const int64_t row = blockIdx.x / blocks;
    const int rank = (int)(blockIdx.x % blocks), begin = rank * share, end = min(vectors, begin + share);
    bf16 *x = logits + row * vectors * 8;
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");  // waited for below: no block writes to one that has not started

    Bf16x8 held[CROSS_ENTROPY_VECTORS];
#pragma unroll
    for (int i = 0; i < CROSS_ENTROPY_VECTORS; i++) {
        const int v = begin + i * (int)blockDim.x + (int)threadIdx.x;
        if (v < end) held[i] = bf16x8_load(x + (int64_t)v * 8);
        else held[i].word[0] = held[i].word[1] = held[i].word[2] = held[i].word[3] = NEGATIVE_INFINITY_PAIR;  // adds nothing
    }
    const int target = targets[row];

    uint32_t pair_max = NEGATIVE_INFINITY_PAIR;
#pragma unroll
    for (int i = 0; i < CROSS_ENTROPY_VECTORS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) pair_max = cross_entropy_pair_max(pair_max, held[i].word[j]);
    float maximum = cross_entropy_block_max(cross_entropy_max(__uint_as_float(pair_max << 16), __uint_as_float(pair_max & 0xffff0000u)), max_scratch);
    const float shift = cross_entropy_shift(maximum);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < CROSS_ENTROPY_VECTORS; i++) {
        float f[8];
        bf16x8_unpack(f, held[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += __expf(f[j] - shift);
    }
    sum = cross_entropy_block_sum(sum, sum_scratch);
    asm volatile("barrier.cluster.wait.aligned;");
    cross_entropy_join_cluster(&maximum, &sum);

    const bool counted = target >= 0 && target / 8 < vectors;
    const float factor = counted ? gradient_scale / sum : 0.0f;
    const bool owns_target = counted && target / 8 >= begin && target / 8 < end && (target / 8 - begin) % (int)blockDim.x == (int)threadIdx.x;
    const float target_logit = owns_target ? __bfloat162float(x[target]) : 0.0f;  // this thread alone overwrites it, below
    if (GRADIENT) {
#pragma unroll
        for (int i = 0; i < CROSS_ENTROPY_VECTORS; i++) {
            const int v = begin + i * (int)blockDim.x + (int)threadIdx.x;
            float f[8];
            bf16x8_unpack(f, held[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) f[j] = __expf(f[j] - maximum) * factor;
            if (v < end) bf16x8_store(x + (int64_t)v * 8, bf16x8_pack(f));
        }
        if (owns_target) x[target] = __float2bfloat16(__expf(target_logit - maximum) * factor - gradient_scale);
    }
    if (owns_target) losses[row] = logf(sum) + (maximum - target_logit);
    if (!counted && rank == 0 && threadIdx.x == 0) losses[row] = 0.0f;
#endif
}

// One row per block, any V and any alignment.
template <bool GRADIENT>
__global__ static void cross_entropy_row_kernel(float *losses, bf16 *logits, const int32_t *targets, int64_t V, float gradient_scale) {
    __shared__ float max_scratch[WARP_SIZE], sum_scratch[WARP_SIZE];
    bf16 *x = logits + (int64_t)blockIdx.x * V;
    const int64_t target = targets[blockIdx.x];
    const bool counted = target >= 0 && target < V;
    const float target_logit = counted ? __bfloat162float(x[target]) : 0.0f;  // before it is overwritten
    float maximum = -INFINITY, sum = 0.0f;
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) maximum = cross_entropy_max(maximum, __bfloat162float(x[v]));
    maximum = cross_entropy_block_max(maximum, max_scratch);
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) sum += __expf(__bfloat162float(x[v]) - maximum);
    sum = cross_entropy_block_sum(sum, sum_scratch);
    if (threadIdx.x == 0) losses[blockIdx.x] = counted ? logf(sum) + (maximum - target_logit) : 0.0f;
    if (!GRADIENT) return;
    const float factor = counted ? gradient_scale / sum : 0.0f;
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) {
        float d = __expf(__bfloat162float(x[v]) - maximum) * factor;
        x[v] = __float2bfloat16(counted && v == target ? d - gradient_scale : d);
    }
}

template <bool GRADIENT>
static inline void cross_entropy_launch(float *losses, bf16 *logits, const int32_t *targets, int64_t R, int64_t V, float gradient_scale, cudaStream_t stream) {
    const int64_t vectors = V / 8, held = CROSS_ENTROPY_VECTORS;
    int64_t blocks = 1;  // as few as keep a block within 512 threads: fewer threads wait at a barrier
    while (blocks < CROSS_ENTROPY_MAX_CLUSTER && ceil_div(vectors, blocks) > 512 * held) blocks *= 2;
    const int64_t share = ceil_div(vectors, blocks), threads = round_up(ceil_div(share, held), WARP_SIZE);
    cudaFuncAttributes code;
    CUDA_CHECK(cudaFuncGetAttributes(&code, cross_entropy_cluster_kernel<GRADIENT>));
    if (code.binaryVersion < 90 || V % 8 || (uintptr_t)logits % 16 || threads > CROSS_ENTROPY_MAX_THREADS) {
        cross_entropy_row_kernel<GRADIENT><<<grid_size(R, 1), CROSS_ENTROPY_MAX_THREADS, 0, stream>>>(losses, logits, targets, V, gradient_scale);
        CUDA_CHECK_LAUNCH();
        return;
    }
    cudaLaunchAttribute cluster[1] = {};
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim.x = (unsigned)blocks;
    cluster[0].val.clusterDim.y = cluster[0].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid_size(R * blocks, 1));
    config.blockDim = dim3((unsigned)threads);
    config.stream = stream;
    config.attrs = cluster;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, cross_entropy_cluster_kernel<GRADIENT>, losses, logits, targets, (int)vectors, (int)share, gradient_scale));
}

static inline void cross_entropy_check(int64_t R, int64_t V) {
    if (R < 1 || V < 1 || V > INT_MAX) die("cross entropy over %lld rows of %lld logits: both must be at least 1, the vocabulary below 2^31", (long long)R, (long long)V);
}

// losses [R] fp32, logits [R, V] bf16 (unchanged), targets [R].
static inline void cross_entropy_loss(float *losses, const bf16 *logits, const int32_t *targets, int64_t R, int64_t V, cudaStream_t stream) {
    cross_entropy_check(R, V);
    cross_entropy_launch<false>(losses, (bf16 *)logits, targets, R, V, 0.0f, stream);
}

// As cross_entropy_loss, and the logits become their gradient times gradient_scale (1 / number of tokens the loss is averaged over).
static inline void cross_entropy_loss_and_gradient(float *losses, bf16 *logits, const int32_t *targets, int64_t R, int64_t V, float gradient_scale,
                                                   cudaStream_t stream) {
    cross_entropy_check(R, V);
    cross_entropy_launch<true>(losses, logits, targets, R, V, gradient_scale, stream);
}

__global__ static void __launch_bounds__(1024) loss_accumulate_kernel(float *out, const float *losses, int64_t n, double scale) {
    __shared__ double partial[1024];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += 1024) sum += (double)losses[i];
    partial[threadIdx.x] = sum;
    for (int half = 512; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *out = (float)((double)*out + scale * partial[0]);
}

// *out (device) += scale * (sum of losses [n]), in double precision and a fixed order.
static inline void loss_accumulate(float *out, const float *losses, int64_t n, double scale, cudaStream_t stream) {
    loss_accumulate_kernel<<<1, 1024, 0, stream>>>(out, losses, n, scale);
    CUDA_CHECK_LAUNCH();
}

#endif
