// Softmax cross-entropy over the vocabulary, in place on a chunk of bf16 logits [R, VP], VP >= V.
//
// The last VP - V columns are padding: they become -infinity before the loss, and 0 after the gradient.
//
//   loss[r]      = log(sum_v exp(x[r][v])) - x[r][target]                            fp32, natural logarithm
//   dlogits[r][v] = bf16((softmax(x[r])[v] - (v == target)) * gradient_scale)        overwrites the logits
//
// For FP8 GEMMs the gradients are rounded further, stochastically (cross_entropy_round). If all of these GEMMs read
// codes of one known scale, the kernel writes the codes, as a cast of the rounded gradients does, and keeps the logits.
//
// A row whose target lies outside [0, V) is ignored: its loss and gradient are 0. In any other row, a NaN or +inf logit
// makes the loss and the gradient NaN.
//
// Bytes moved: 2 read + 2 written per logit (codes: 2 + 1; without gradient: 2 + 0). A row of 128k-152k logits
// (257-304 KB) fits on one SM only in its registers and shared memory together. So a persistent block keeps the row
// there from reading to writing: each thread holds its vectors of the row in registers and, if these do not suffice, in
// shared memory. When a vector is no longer needed, its registers or shared memory take the next row's vector. If VP is
// above 163840, too large for the GPU's shared memory or not a multiple of 8, or vectors are not aligned, another
// kernel reads each row three times (twice without gradient). Sums have a fixed order, so every run gives equal bits.
#ifndef LLMC_CROSS_ENTROPY_CUH
#define LLMC_CROSS_ENTROPY_CUH

#include "../fp8/quantize_kernels.cuh"
#include "../reference/cross_entropy.h"

enum {
    CROSS_ENTROPY_THREADS = 512,
    // Vectors of 8 logits that a thread holds in registers: for short rows with two blocks per SM, and for long rows
    // with one block per SM.
    CROSS_ENTROPY_FEW = 8,
    CROSS_ENTROPY_MANY = 24,
    // How many more vectors a thread can keep in shared memory. Each takes 8 KB per block. With CROSS_ENTROPY_MANY this
    // allows V up to 163840.
    CROSS_ENTROPY_SHARED = 16,
    CROSS_ENTROPY_ROW_THREADS = 1024
};

typedef enum {
    CROSS_ENTROPY_LOSS,
    CROSS_ENTROPY_GRADIENT,
    CROSS_ENTROPY_STOCHASTIC,
    CROSS_ENTROPY_CODES  // rounds stochastically too, and writes E5M2 codes
} CrossEntropyMode;

#define NEGATIVE_INFINITY_PAIR 0xff80ff80u  // two bf16
#define CROSS_ENTROPY_LN_2 0.6931471805599453f

// Returns the larger of two, NaN if either is NaN.
__device__ static inline float cross_entropy_max(float a, float b) { return a > b || a != a ? a : b; }

// Returns the larger of each of two packed bf16, NaN if either is NaN.
__device__ static inline uint32_t cross_entropy_pair_max(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// These two return the maximum and the sum over a block of whole warps, with equal bits in every thread. scratch is 32
// floats of shared memory, which a block may use again only after another barrier.
__device__ static inline float cross_entropy_block_max(float x, float *scratch) {
    const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2)
        x = cross_entropy_max(x, __shfl_xor_sync(0xffffffffu, x, offset));
    if (lane == 0) scratch[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    x = lane < warps ? scratch[lane] : -INFINITY;
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2)
        x = cross_entropy_max(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

__device__ static inline float cross_entropy_block_sum(float x, float *scratch) {
    const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    x = warp_sum(x);
    if (lane == 0) scratch[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

__device__ static inline uint32_t cross_entropy_vector_max(uint32_t pair_max, Bf16x8 v) {
#pragma unroll
    for (int j = 0; j < 4; j++) pair_max = cross_entropy_pair_max(pair_max, v.word[j]);
    return pair_max;
}

// Returns exp(x) * 2^offset in two instructions. With offset = -maximum * log2(e) this is exp(x - maximum). Rounding
// the offset gives a factor common to the row: it cancels in the softmax, and the loss corrects for it.
__device__ static inline float cross_entropy_exp(float x, float offset) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, LOG2_E, offset)));
    return y;
}

__device__ static inline float cross_entropy_vector_sum(float sum, Bf16x8 v, float offset) {
    float f[8];
    bf16x8_unpack(f, v);
#pragma unroll
    for (int j = 0; j < 8; j++) sum += cross_entropy_exp(f[j], offset);
    return sum;
}

// Returns -log(softmax(x)[target]) from sum = sum_v exp(x[v]) * 2^offset.
__device__ static inline float cross_entropy_row_loss(float sum, float offset, float target_logit) {
    return logf(sum) - fmaf(offset, CROSS_ENTROPY_LN_2, target_logit);
}

// Returns the offset for which cross_entropy_exp(x, offset) = softmax(x) * gradient_scale.
__device__ static inline float cross_entropy_gradient_offset(float sum, float offset, float gradient_scale) {
    return offset + log2f(gradient_scale / sum);
}

// Returns the gradients of the row's vector number `at`, without the target's -1. Keeps all their bits or, with a mask
// of 0, none: an ignored row's gradient is 0 even if its logits are not finite. drop: see cross_entropy_round.
template <CrossEntropyMode MODE>
__device__ static inline Bf16x8 cross_entropy_vector_gradient(Bf16x8 v, float gradient_offset, uint32_t mask, int at,
                                                              uint32_t drop) {
    float f[8];
    bf16x8_unpack(f, v);
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] = cross_entropy_exp(f[j], gradient_offset);
    v = bf16x8_pack(f);
    const uint32_t hash = cross_entropy_hash(gradient_offset, at * 8);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (MODE >= CROSS_ENTROPY_STOCHASTIC) v.word[j] = cross_entropy_round(v.word[j], hash, (uint32_t)j, drop);
        v.word[j] &= mask;
    }
    return v;
}

// Returns the gradient of one column in bf16, rounded as the mode says.
template <CrossEntropyMode MODE>
__device__ static inline bf16 cross_entropy_one_column(float gradient, float gradient_offset, int64_t column,
                                                       uint32_t drop) {
    const bf16 rounded = __float2bfloat16(gradient);
    if (MODE < CROSS_ENTROPY_STOCHASTIC) return rounded;
    return __ushort_as_bfloat16(cross_entropy_round_one(__bfloat16_as_ushort(rounded), gradient_offset, column, drop));
}

// Stores the gradients of a row's vector number `at`, as codes of the row or over its logits x.
template <CrossEntropyMode MODE>
__device__ static inline void cross_entropy_store_vector(bf16 *x, uint8_t *codes, float scale, int at, Bf16x8 v) {
    if (MODE == CROSS_ENTROPY_CODES) *(uint2 *)(codes + at * 8) = fp8x8_from_bf16<FP8_E5M2>(v, scale);
    else bf16x8_store(x + at * 8, v);
}

// Stores the gradient of one column in the same way.
template <CrossEntropyMode MODE>
__device__ static inline void cross_entropy_store_one(bf16 *x, uint8_t *codes, float scale, int64_t column,
                                                      bf16 gradient) {
    const float scaled = __fmul_rn(__bfloat162float(gradient), scale);
    if (MODE == CROSS_ENTROPY_CODES) codes[column] = (uint8_t)fp8x2_from_floats<FP8_E5M2>(scaled, 0);
    else x[column] = gradient;
}

// Block b processes rows b, b + gridDim.x, ... Vector v of a row (v < `vectors` = V / 8) belongs to thread v %
// CROSS_ENTROPY_THREADS, as its number v / CROSS_ENTROPY_THREADS. A thread's first HELD vectors are in registers, later
// ones in dynamic shared memory.
template <int HELD, CrossEntropyMode MODE>
static __global__ void __launch_bounds__(CROSS_ENTROPY_THREADS, HELD == CROSS_ENTROPY_FEW ? 2 : 1)
    cross_entropy_kernel(float *losses, bf16 *logits, const int32_t *targets, int64_t R, int vectors,
                         float gradient_scale, uint32_t dropped, uint8_t *codes, float scale) {
    grid_dependency_wait();
    constexpr bool GRADIENT = MODE != CROSS_ENTROPY_LOSS;
    extern __shared__ Bf16x8 shared[];
    __shared__ float max_scratch[WARP_SIZE], sum_scratch[WARP_SIZE];
    const int first_shared = HELD * CROSS_ENTROPY_THREADS + (int)threadIdx.x;
    bf16 *x = logits + (int64_t)blockIdx.x * vectors * 8;
    uint8_t *to = codes + (int64_t)blockIdx.x * vectors * 8;
    Bf16x8 held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int v = i * CROSS_ENTROPY_THREADS + (int)threadIdx.x;
        if (v < vectors) held[i] = bf16x8_load(x + v * 8);
        // Padding that adds nothing to the sum.
        else held[i].word[0] = held[i].word[1] = held[i].word[2] = held[i].word[3] = NEGATIVE_INFINITY_PAIR;
    }
    for (int v = first_shared; v < vectors; v += CROSS_ENTROPY_THREADS)
        copy16_async(&shared[v - HELD * CROSS_ENTROPY_THREADS], x + v * 8);

    for (int64_t row = blockIdx.x; row < R; row += gridDim.x) {
        const bool more = row + gridDim.x < R;
        const bf16 *next = x + (int64_t)gridDim.x * vectors * 8;
        const int target = targets[row];
        const bool counted = target >= 0 && target / 8 < vectors,
                   owns_target = counted && target / 8 % CROSS_ENTROPY_THREADS == (int)threadIdx.x;
        // Reading needs no barrier: the thread that owns the target is the only one that overwrites it, below.
        const float target_logit = owns_target ? __bfloat162float(x[target]) : 0.0f;
        copy_async_commit(), copy_async_wait<0>();

        uint32_t pair_max = NEGATIVE_INFINITY_PAIR;
#pragma unroll
        for (int i = 0; i < HELD; i++) pair_max = cross_entropy_vector_max(pair_max, held[i]);
        for (int v = first_shared; v < vectors; v += CROSS_ENTROPY_THREADS)
            pair_max = cross_entropy_vector_max(pair_max, shared[v - HELD * CROSS_ENTROPY_THREADS]);
        const float maximum = cross_entropy_block_max(
            cross_entropy_max(__uint_as_float(pair_max << 16), __uint_as_float(pair_max & 0xffff0000u)), max_scratch);

        const float offset = -maximum * LOG2_E;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int v = i * CROSS_ENTROPY_THREADS + (int)threadIdx.x;
            sum = cross_entropy_vector_sum(sum, held[i], offset);
            if (!GRADIENT && more && v < vectors) held[i] = bf16x8_load(next + v * 8);
        }
        for (int v = first_shared; v < vectors; v += CROSS_ENTROPY_THREADS) {
            Bf16x8 *at = &shared[v - HELD * CROSS_ENTROPY_THREADS];
            sum = cross_entropy_vector_sum(sum, *at, offset);
            if (!GRADIENT && more) copy16_async(at, next + v * 8);
        }
        sum = cross_entropy_block_sum(sum, sum_scratch);

        if (owns_target) losses[row] = cross_entropy_row_loss(sum, offset, target_logit);
        if (!counted && threadIdx.x == 0) losses[row] = 0.0f;
        if (GRADIENT) {
            const float gradient_offset = cross_entropy_gradient_offset(sum, offset, gradient_scale);
            const uint32_t mask = counted ? 0xffffffffu : 0,
                           drop = gradient_offset == gradient_offset ? dropped : 0;  // a NaN must stay one
#pragma unroll
            for (int i = 0; i < HELD; i++) {
                const int v = i * CROSS_ENTROPY_THREADS + (int)threadIdx.x;
                if (v < vectors) {
                    cross_entropy_store_vector<MODE>(
                        x, to, scale, v, cross_entropy_vector_gradient<MODE>(held[i], gradient_offset, mask, v, drop));
                    if (more) held[i] = bf16x8_load(next + v * 8);
                }
            }
            for (int v = first_shared; v < vectors; v += CROSS_ENTROPY_THREADS) {
                Bf16x8 *at = &shared[v - HELD * CROSS_ENTROPY_THREADS];
                cross_entropy_store_vector<MODE>(
                    x, to, scale, v, cross_entropy_vector_gradient<MODE>(*at, gradient_offset, mask, v, drop));
                if (more) copy16_async(at, next + v * 8);
            }
            if (owns_target)
                cross_entropy_store_one<MODE>(
                    x, to, scale, target,
                    cross_entropy_one_column<MODE>(cross_entropy_exp(target_logit, gradient_offset) - gradient_scale,
                                                   gradient_offset, target, drop));
        }
        x += (int64_t)gridDim.x * vectors * 8, to += (int64_t)gridDim.x * vectors * 8;
    }
}

// One row per block, for any V and any alignment.
template <CrossEntropyMode MODE>
static __global__ void cross_entropy_row_kernel(float *losses, bf16 *logits, const int32_t *targets, int64_t V,
                                                float gradient_scale, uint32_t dropped, uint8_t *codes, float scale) {
    grid_dependency_wait();
    __shared__ float max_scratch[WARP_SIZE], sum_scratch[WARP_SIZE];
    bf16 *x = logits + (int64_t)blockIdx.x * V;
    uint8_t *to = codes + (int64_t)blockIdx.x * V;
    const int64_t target = targets[blockIdx.x];
    const bool counted = target >= 0 && target < V;
    // Read before it is overwritten.
    const float target_logit = counted ? __bfloat162float(x[target]) : 0.0f;
    float maximum = -INFINITY, sum = 0.0f;
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) maximum = cross_entropy_max(maximum, __bfloat162float(x[v]));
    const float offset = -cross_entropy_block_max(maximum, max_scratch) * LOG2_E;
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) sum += cross_entropy_exp(__bfloat162float(x[v]), offset);
    sum = cross_entropy_block_sum(sum, sum_scratch);
    if (threadIdx.x == 0) losses[blockIdx.x] = counted ? cross_entropy_row_loss(sum, offset, target_logit) : 0.0f;
    if (MODE == CROSS_ENTROPY_LOSS) return;
    const float gradient_offset = cross_entropy_gradient_offset(sum, offset, gradient_scale);
    const uint32_t drop = gradient_offset == gradient_offset ? dropped : 0;  // a NaN must stay one
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) {
        const float d = cross_entropy_exp(__bfloat162float(x[v]), gradient_offset);
        const bf16 gradient =
            cross_entropy_one_column<MODE>(v == target ? d - gradient_scale : d, gradient_offset, v, drop);
        cross_entropy_store_one<MODE>(x, to, scale, v, counted ? gradient : __float2bfloat16(0.0f));
    }
}

// Returns the bytes of dynamic shared memory that a block needs for rows of V logits, if each thread holds `held`
// vectors of 8 logits in registers.
static inline int64_t cross_entropy_shared_bytes(int64_t V, int64_t held) {
    return max_i64(0, ceil_div(V / 8, CROSS_ENTROPY_THREADS) - held) * CROSS_ENTROPY_THREADS * (int64_t)sizeof(Bf16x8);
}

// True if an SM can hold a row of V logits in registers and shared memory. Consumer GPUs have about 100 KB of shared
// memory per block.
static inline bool cross_entropy_row_fits(int64_t V) {
    const int available = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    const int64_t needed = cross_entropy_shared_bytes(V, CROSS_ENTROPY_MANY), scratch = 1024;
    return needed <= cross_entropy_shared_bytes(8 * CROSS_ENTROPY_THREADS * CROSS_ENTROPY_SHARED, 0) &&
           needed + scratch <= available;
}

template <int HELD, CrossEntropyMode MODE>
static inline void cross_entropy_launch_held(float *losses, bf16 *logits, const int32_t *targets, int64_t R, int64_t V,
                                             float gradient_scale, uint32_t dropped, ProducedCodes codes,
                                             cudaStream_t stream) {
    const size_t shared_bytes = (size_t)cross_entropy_shared_bytes(V, HELD);
    CUDA_CHECK(cudaFuncSetAttribute(cross_entropy_kernel<HELD, MODE>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)shared_bytes));
    const int64_t resident = device_sm_count() * (HELD == CROSS_ENTROPY_FEW ? 2 : 1);
    const unsigned blocks = (unsigned)min_i64(R, resident);
    CUDA_LAUNCH(cross_entropy_kernel<HELD, MODE>, blocks, CROSS_ENTROPY_THREADS, shared_bytes, stream, losses, logits,
                targets, R, (int)(V / 8), gradient_scale, dropped, codes.rowwise, codes.scale);
}

template <CrossEntropyMode MODE>
static inline void cross_entropy_launch(float *losses, bf16 *logits, const int32_t *targets, int64_t R, int64_t V,
                                        float gradient_scale, uint32_t dropped, ProducedCodes codes,
                                        cudaStream_t stream) {
    if (V % 8 || (uintptr_t)logits % 16 || (uintptr_t)codes.rowwise % 8 || !cross_entropy_row_fits(V)) {
        CUDA_LAUNCH(cross_entropy_row_kernel<MODE>, grid_size(R, 1), CROSS_ENTROPY_ROW_THREADS, 0, stream, losses,
                    logits, targets, V, gradient_scale, dropped, codes.rowwise, codes.scale);
    } else if (cross_entropy_shared_bytes(V, CROSS_ENTROPY_FEW) == 0) {
        cross_entropy_launch_held<CROSS_ENTROPY_FEW, MODE>(losses, logits, targets, R, V, gradient_scale, dropped,
                                                           codes, stream);
    } else {
        cross_entropy_launch_held<CROSS_ENTROPY_MANY, MODE>(losses, logits, targets, R, V, gradient_scale, dropped,
                                                            codes, stream);
    }
}

static inline void cross_entropy_check(int64_t R, int64_t V, int64_t VP) {
    if (R < 1 || V < 1 || VP < V || VP > INT_MAX)
        die("cross entropy over %lld rows of %lld logits, padded to %lld: rows and logits must be at least 1, the "
            "vocabulary below 2^31",
            (long long)R, (long long)V, (long long)VP);
}

// Block x fills the padding of row x.
static __global__ void cross_entropy_padding_kernel(bf16 *logits, int64_t V, int64_t VP, float value) {
    grid_dependency_wait();
    for (int64_t v = V + threadIdx.x; v < VP; v += blockDim.x)
        logits[(int64_t)blockIdx.x * VP + v] = __float2bfloat16(value);
}

// Fills columns V ... VP - 1 of logits [R, VP].
static inline void cross_entropy_fill_padding(bf16 *logits, int64_t R, int64_t V, int64_t VP, float value,
                                              cudaStream_t stream) {
    if (VP > V) CUDA_LAUNCH(cross_entropy_padding_kernel, grid_size(R, 1), WARP_SIZE, 0, stream, logits, V, VP, value);
}

// Writes losses [R] fp32 from logits [R, VP] bf16 (unchanged but for the padding) and targets [R].
static inline void cross_entropy_loss(float *losses, bf16 *logits, const int32_t *targets, int64_t R, int64_t V,
                                      int64_t VP, cudaStream_t stream) {
    cross_entropy_check(R, V, VP);
    cross_entropy_fill_padding(logits, R, V, VP, -INFINITY, stream);
    cross_entropy_launch<CROSS_ENTROPY_LOSS>(losses, logits, targets, R, VP, 0.0f, 0, ProducedCodes{}, stream);
}

// Computes the losses like cross_entropy_loss, and the gradients of the logits times gradient_scale (1 / number of
// tokens in the mean; dies unless it is above 0), rounded stochastically unless `dropped` is 0 (cross_entropy_round).
// They overwrite the logits, unless `codes` has memory for their codes [R, VP]. Returns the least bytes that must move,
// 2 read and 2 (codes: 1) written per logit, even if cross_entropy_row_kernel moves more.
static inline int64_t cross_entropy_loss_and_gradient(float *losses, bf16 *logits, const int32_t *targets, int64_t R,
                                                      int64_t V, int64_t VP, float gradient_scale, uint32_t dropped,
                                                      ProducedCodes codes, cudaStream_t stream) {
    cross_entropy_check(R, V, VP);
    if (!(gradient_scale > 0))
        die("cross_entropy_loss_and_gradient: gradient_scale %g must be above 0", (double)gradient_scale);
    cross_entropy_fill_padding(logits, R, V, VP, -INFINITY, stream);
    auto *launch =
        dropped ? cross_entropy_launch<CROSS_ENTROPY_STOCHASTIC> : cross_entropy_launch<CROSS_ENTROPY_GRADIENT>;
    if (codes.rowwise) launch = cross_entropy_launch<CROSS_ENTROPY_CODES>;
    launch(losses, logits, targets, R, VP, gradient_scale, dropped, codes, stream);
    if (!codes.rowwise) cross_entropy_fill_padding(logits, R, V, VP, 0.0f, stream);
    else if (VP > V)
        CUDA_CHECK(cudaMemset2DAsync(codes.rowwise + V, (size_t)VP, 0, (size_t)(VP - V), (size_t)R, stream));
    return R * V * (codes.rowwise ? 3 : 4);
}

__global__ static void __launch_bounds__(1024) loss_sum_kernel(double *out, const float *losses, int64_t n) {
    grid_dependency_wait();
    __shared__ double partial[1024];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += 1024) sum += (double)losses[i];
    partial[threadIdx.x] = sum;
    for (int half = 512; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *out = partial[0];
}

// *out (device) = sum of losses [n], added in double and in a fixed order.
static inline void loss_sum(double *out, const float *losses, int64_t n, cudaStream_t stream) {
    CUDA_LAUNCH(loss_sum_kernel, 1, 1024, 0, stream, out, losses, n);
}

static __global__ void loss_mean_kernel(float *out, const double *sums, int64_t n, double tokens) {
    grid_dependency_wait();
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += sums[i];
    *out = (float)(1 / tokens * sum);
}

// *out (device) = sums [n] (device), added in order, divided by `tokens`.
static inline void loss_mean(float *out, const double *sums, int64_t n, double tokens, cudaStream_t stream) {
    CUDA_LAUNCH(loss_mean_kernel, 1, 1, 0, stream, out, sums, n, tokens);
}

#endif
