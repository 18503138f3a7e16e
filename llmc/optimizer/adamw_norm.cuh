// Gradient norm on the GPU: sums of squares, norm, clip factor, and the search for gradients too large or not finite.
//
// Sums of squares read 2 bytes per bf16 gradient, 4 per fp32 gradient, 1 per FP8 gradient. adamw_math.h defines the
// clip factor, and which norms and gradients are too large.
#ifndef LLMC_ADAMW_NORM_CUH
#define LLMC_ADAMW_NORM_CUH

#include "../base/arena.h"
#include "../config/shard_plan.h"
#include "../reference/adamw_math.h"
#include "gradient_fp8.cuh"

// The gradient norm of a step and the decisions made from it, in device memory. adamw_norm writes all of it, adamw_clip
// the factor and `nonfinite` for each unit, and adamw_locate or adamw_locate_block the last two members. Updates may
// read it, and the host may copy it.
typedef struct {
    float gradient_factor;  // factor for the gradients, from clipping
    float gradient_norm;    // before clipping
    // 1 if the step is not taken (adamw_takes): an update that reads it then changes no weight and no moment.
    uint32_t nonfinite;
    // Results of adamw_locate. If nonfinite is 0: 0 and ADAMW_NONE. If it is 1: the largest magnitude of this rank's
    // gradients (adamw_magnitude), and the place in backward order of the first large one (adamw_large).
    // adamw_locate_block takes norms of blocks of ADAMW_BLOCK elements instead of magnitudes, and the place of a
    // block's first element.
    uint32_t largest;
    unsigned long long position;
} AdamwControl;

#define ADAMW_NONE (~0ull)

// A rank's gradients. At most one of the first two pointers is set. If gradients of the layers' matrices are FP8,
// bf16_data has all others, in the order of gradient_fp8.cuh.
typedef struct {
    const bf16 *bf16_data;
    const float *fp32_data;
    const uint8_t *codes;             // FP8 gradients, else NULL
    const float *scale_inv;           // [entries of the parameter table] of the codes
    const GradientFp8Layout *layout;  // describes `codes`; host memory
} AdamwGradients;

// ---------------------------------------------------------------------------------------------------------------------
// Gradient norm. The number of blocks is fixed and each block sums a fixed part of the array, so the bits do not depend
// on the GPU or the run. If the shard plan is in_blocks, there is one sum for each block of SHARD_BLOCK elements, so
// the bits do not depend on the number of ranks either (fsdp_norm.cuh).

enum { ADAMW_NORM_BLOCKS = 1056, ADAMW_NORM_THREADS = 512, ADAMW_NORM_VECTORS = 4, ADAMW_FP8_BLOCKS = 32 };

// Returns the sum of x over a block of THREADS threads, in every thread of the block.
template <int THREADS>
__device__ static inline double adamw_block_sum(double x) {
    __shared__ double warps[THREADS / 32];
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_down_sync(0xffffffffu, x, lanes);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
    for (int i = 0; i < THREADS / 32; i++) sum += warps[i];
    return sum;
}

__device__ static inline Bf16x8 adamw_gradients_load(const bf16 *p) { return bf16x8_load(p); }
__device__ static inline Fp32x8 adamw_gradients_load(const float *p) { return fp32x8_load(p); }
__device__ static inline void adamw_gradients_unpack(float out[8], Bf16x8 v) { bf16x8_unpack(out, v); }
__device__ static inline void adamw_gradients_unpack(float out[8], Fp32x8 v) { fp32x8_unpack(out, v); }

static_assert((int)SHARD_BLOCK == 8 * (int)ADAMW_NORM_THREADS * (int)ADAMW_NORM_VECTORS,
              "adamw_squares_kernel takes a block of a shard at a time");

// Writes partials[block] = sum of squares of the block's part of n gradients. blockIdx.y is the unit: its gradients lie
// `step` elements, and its sums `sums` numbers, behind those of the unit before. A thread sums 32 squares in fp32, and
// such sums in double. A gradient above 1.8e19 makes the norm infinite, because its square overflows fp32.
template <class Gradient>
static __global__ void __launch_bounds__(ADAMW_NORM_THREADS)
    adamw_squares_kernel(double *partials, const Gradient *gradients, int64_t n, int64_t step, int64_t sums) {
    grid_dependency_wait();
    const int64_t stride = 8 * ADAMW_NORM_THREADS, tile = stride * ADAMW_NORM_VECTORS;
    double sum = 0;
    gradients += blockIdx.y * step, partials += blockIdx.y * sums;
    for (int64_t base = blockIdx.x * tile + threadIdx.x * 8; base < n; base += gridDim.x * tile) {
        decltype(adamw_gradients_load(gradients)) v[ADAMW_NORM_VECTORS];
#pragma unroll
        for (int k = 0; k < ADAMW_NORM_VECTORS; k++) {
            if (base + k * stride < n) v[k] = adamw_gradients_load(gradients + base + k * stride);
            else v[k] = {};
        }
        float squares = 0;
#pragma unroll
        for (int k = 0; k < ADAMW_NORM_VECTORS; k++) {
            float g[8];
            adamw_gradients_unpack(g, v[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) squares = fmaf(g[j], g[j], squares);
        }
        sum += (double)squares;
    }
    sum = adamw_block_sum<ADAMW_NORM_THREADS>(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// adamw_squares_kernel for FP8 gradients: blockIdx.y is the matrix, blockIdx.z the layer.
static __global__ void __launch_bounds__(ADAMW_NORM_THREADS)
    adamw_squares_fp8_kernel(double *partials, const uint8_t *codes, const float *scale_inv,
                             const __grid_constant__ GradientFp8Layout a) {
    grid_dependency_wait();
    const GradientFp8Tensor t = a.tensors[blockIdx.y];
    const int64_t stride = 8 * ADAMW_NORM_THREADS, tile = stride * ADAMW_NORM_VECTORS;
    const float inverse = scale_inv[a.first_entry + blockIdx.z * a.entries + t.entry];
    codes += blockIdx.z * a.matrices;
    double sum = 0;
    for (int64_t base = t.begin + blockIdx.x * tile + threadIdx.x * 8; base < t.end; base += ADAMW_FP8_BLOCKS * tile) {
        uint2 v[ADAMW_NORM_VECTORS];
#pragma unroll
        for (int k = 0; k < ADAMW_NORM_VECTORS; k++)
            v[k] = base + k * stride < t.end ? *(const uint2 *)(codes + base + k * stride) : make_uint2(0, 0);
        float squares = 0;
#pragma unroll
        for (int k = 0; k < ADAMW_NORM_VECTORS; k++) {
            float g[8];
            fp8x8_to_floats(g, v[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                g[j] = __fmul_rn(g[j], inverse);
                squares = fmaf(g[j], g[j], squares);
            }
        }
        sum += (double)squares;
    }
    sum = adamw_block_sum<ADAMW_NORM_THREADS>(sum);
    if (threadIdx.x == 0)
        partials[(blockIdx.z * gridDim.y + blockIdx.y) * (int64_t)ADAMW_FP8_BLOCKS + blockIdx.x] = sum;
}

// Writes sums[block] = sum of the block's part of values [n].
static __global__ void __launch_bounds__(ADAMW_NORM_THREADS)
    adamw_sum_kernel(double *sums, const double *values, int64_t n) {
    grid_dependency_wait();
    double sum = 0;
    for (int64_t i = blockIdx.x * ADAMW_NORM_THREADS + threadIdx.x; i < n; i += gridDim.x * ADAMW_NORM_THREADS)
        sum += values[i];
    sum = adamw_block_sum<ADAMW_NORM_THREADS>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

static __global__ void adamw_norm_kernel(AdamwControl *control, const double *squares, const float *loss,
                                         int64_t replicas, float grad_clip) {
    grid_dependency_wait();
    const double norm = sqrt(*squares / (double)replicas);
    control->gradient_norm = (float)norm;
    control->nonfinite = !adamw_takes(loss ? *loss : 0, norm);
    control->gradient_factor = clip_factor(norm, grad_clip);
    control->largest = 0;
    control->position = ADAMW_NONE;
}

// Finds the largest magnitude of n gradients. Like the next kernel, it returns at once if the step is taken.
template <class Gradients>
static __global__ void adamw_largest_kernel(AdamwControl *control, const Gradients gradients, int64_t n) {
    grid_dependency_wait();
    if (!control->nonfinite) return;
    uint32_t largest = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x)
        largest = max(largest, adamw_magnitude((float)gradients[i]));
    atomicMax(&control->largest, largest);
}

// Finds the first large gradient in backward order.
template <class Gradients>
static __global__ void adamw_find_large_kernel(AdamwControl *control, const Gradients gradients, BackwardOrder order) {
    grid_dependency_wait();
    if (!control->nonfinite) return;
    const uint32_t large = adamw_large(control->largest);
    unsigned long long first = ADAMW_NONE;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < order.total;
         i += gridDim.x * (int64_t)blockDim.x)
        if (adamw_magnitude((float)gradients[i]) >= large)
            first = min(first, (unsigned long long)backward_position(order, i));
    if (first != ADAMW_NONE) atomicMin(&control->position, first);
}

// Writes *squares (device) = sum of squares of gradients [n]; n is a multiple of 8. With sharded gradients the caller
// adds up the results of all ranks. workspace holds ADAMW_NORM_BLOCKS sums and, with FP8 gradients, ADAMW_FP8_BLOCKS
// for each matrix of each layer: adamw_workspace_bytes are enough. Returns the bytes moved.
static inline int64_t adamw_squares(double *squares, AdamwGradients gradients, int64_t n, double *workspace,
                                    cudaStream_t stream) {
    if (n % 8) die("adamw_squares: %lld elements are not a multiple of 8", (long long)n);
    require_aligned16(gradients.bf16_data, "adamw_squares", "gradients");
    require_aligned16(gradients.fp32_data, "adamw_squares", "gradients");
    const GradientFp8Layout *a = gradients.codes ? gradients.layout : NULL;
    const int64_t in_fp8 = a ? a->layers * a->matrices : 0;
    int64_t blocks = ADAMW_NORM_BLOCKS;
    if (gradients.fp32_data)
        CUDA_LAUNCH(adamw_squares_kernel<float>, ADAMW_NORM_BLOCKS, ADAMW_NORM_THREADS, 0, stream, workspace,
                    gradients.fp32_data, n, 0, 0);
    else
        CUDA_LAUNCH(adamw_squares_kernel<bf16>, ADAMW_NORM_BLOCKS, ADAMW_NORM_THREADS, 0, stream, workspace,
                    gradients.bf16_data, n - in_fp8, 0, 0);
    if (a) {
        const dim3 grid(ADAMW_FP8_BLOCKS, (unsigned)a->count, (unsigned)a->layers);
        CUDA_LAUNCH(adamw_squares_fp8_kernel, grid, ADAMW_NORM_THREADS, 0, stream, workspace + blocks, gradients.codes,
                    gradients.scale_inv, *a);
        blocks += ADAMW_FP8_BLOCKS * a->count * a->layers;
    }
    CUDA_LAUNCH(adamw_sum_kernel, 1, ADAMW_NORM_THREADS, 0, stream, squares, workspace, blocks);
    return (n - in_fp8) * (gradients.fp32_data ? 4 : 2) + in_fp8;
}

// Writes the sums of squares of blocks of SHARD_BLOCK gradients: of n elements from element `first` on, and of as many
// in each of the count - 1 units that follow, `step` elements and `sums` numbers apart.
static inline void adamw_block_squares(double *partials, AdamwGradients gradients, int64_t first, int64_t n,
                                       int64_t count, int64_t step, int64_t sums, cudaStream_t stream) {
    const dim3 grid(grid_size(n, SHARD_BLOCK), (unsigned)count);
    if (gradients.fp32_data)
        CUDA_LAUNCH(adamw_squares_kernel<float>, grid, ADAMW_NORM_THREADS, 0, stream, partials,
                    gradients.fp32_data + first, n, step, sums);
    else
        CUDA_LAUNCH(adamw_squares_kernel<bf16>, grid, ADAMW_NORM_THREADS, 0, stream, partials,
                    gradients.bf16_data + first, n, step, sums);
}

enum { ADAMW_SUM_BLOCKS = 64 };

// Writes *sum (device) = values [n], added in an order that n alone decides. `parts` holds ADAMW_SUM_BLOCKS numbers.
static inline void adamw_sum(double *sum, double *parts, const double *values, int64_t n, cudaStream_t stream) {
    CUDA_LAUNCH(adamw_sum_kernel, ADAMW_SUM_BLOCKS, ADAMW_NORM_THREADS, 0, stream, parts, values, n);
    CUDA_LAUNCH(adamw_sum_kernel, 1, ADAMW_NORM_THREADS, 0, stream, sum, parts, ADAMW_SUM_BLOCKS);
}

// If the step is not taken, finds the largest of order.total gradients and the first large one in backward order.
template <class Gradients>
static inline void adamw_find_large(AdamwControl *control, Gradients gradients, BackwardOrder order,
                                    cudaStream_t stream) {
    CUDA_LAUNCH(adamw_largest_kernel<Gradients>, ADAMW_NORM_BLOCKS, 256, 0, stream, control, gradients, order.total);
    CUDA_LAUNCH(adamw_find_large_kernel<Gradients>, ADAMW_NORM_BLOCKS, 256, 0, stream, control, gradients, order);
}

// Fills *control (device). *squares (device) is the sum of squares of the whole gradient, in which each gradient counts
// `replicas` times. *loss (device): of the step; NULL: counts as finite. Gradients are clipped to a norm of grad_clip;
// 0: no clipping.
static inline void adamw_norm(AdamwControl *control, const double *squares, const float *loss, int64_t replicas,
                              float grad_clip, cudaStream_t stream) {
    CUDA_LAUNCH(adamw_norm_kernel, 1, 1, 0, stream, control, squares, loss, replicas, grad_clip);
}

// After adamw_norm, if the step is not taken: finds this rank's largest gradient, and the first large one in
// backward order.
static inline void adamw_locate(AdamwControl *control, AdamwGradients gradients, BackwardOrder order,
                                cudaStream_t stream) {
    if (gradients.codes) {
        const GradientFp8Reader all = {gradients.bf16_data, gradients.codes, gradients.scale_inv, *gradients.layout};
        adamw_find_large(control, all, order, stream);
    } else if (gradients.fp32_data) adamw_find_large(control, gradients.fp32_data, order, stream);
    else adamw_find_large(control, gradients.bf16_data, order, stream);
}

// ---- --grad-clip with --optimizer-in-backward: each unit is clipped before its update, by clip_norm_so_far

enum { ADAMW_CLIP_SLOTS = 2 };

// All in device memory.
typedef struct {
    double *workspace;  // [ADAMW_NORM_BLOCKS] or, if the shard plan is in_blocks, [fsdp_unit_sums]
    double *squares;    // [ADAMW_CLIP_SLOTS] sums of squares of units' gradients (fsdp_clip_slot: a unit's slot)
    double *so_far;     // sum of squares of all units of this step so far
    float *norms;       // [1 + layers] norm of a step's gradients so far, after each unit: STATE_CLIP_NORMS (tensors.h)
} AdamwClip;

static inline AdamwClip adamw_clip_place(int64_t layers, int64_t workspace, Arena *a) {
    AdamwClip c;
    c.workspace = (double *)arena_take(a, workspace * (int64_t)sizeof(double));
    c.squares = (double *)arena_take(a, ADAMW_CLIP_SLOTS * (int64_t)sizeof(double));
    c.so_far = (double *)arena_take(a, sizeof(double));
    c.norms = (float *)arena_take(a, (1 + layers) * (int64_t)sizeof(float));
    return c;
}

static __global__ void adamw_clip_kernel(AdamwControl *control, AdamwClip c, int64_t l, int64_t slot, bool first,
                                         int64_t replicas, float grad_clip) {
    grid_dependency_wait();
    const double squares = (first ? 0 : *c.so_far) + c.squares[slot] / (double)replicas;
    const float norm = (float)sqrt(squares);
    control->gradient_factor = clip_factor(clip_norm_so_far(norm, c.norms[1 + l], c.norms[1 + ROOT]), grad_clip);
    control->nonfinite = !adamw_accepts(norm);
    *c.so_far = squares;
    c.norms[1 + l] = norm;
}

// Sets the factor of unit l, and whether its update is skipped, from c->squares[slot]: its sum of squares, in which
// each gradient counts `replicas` times. Adds squares / replicas to c->so_far (first: l is the step's first unit, and
// c->so_far begins at 0), and writes the unit's entry of c->norms.
static inline void adamw_clip(AdamwControl *control, const AdamwClip *c, int64_t l, int64_t slot, bool first,
                              int64_t replicas, float grad_clip, cudaStream_t stream) {
    CUDA_LAUNCH(adamw_clip_kernel, 1, 1, 0, stream, control, *c, l, slot, first, replicas, grad_clip);
}

#endif
