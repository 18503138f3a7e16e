// AdamW on the GPU: gradient norm, clipping, the check for non-finite gradients, and the update of a rank's shard.
//
// The arithmetic of an element, its rounding bits and the clip factor are adamw_math.h's, shared with the CPU: same
// input, same bits. Norm, clip factor and the gate stay in device memory (AdamwControl): nothing waits for the host.
//
// The norm comes first where the update hangs on it: gradients are clipped, or a step whose norm is not finite leaves
// weights and moments untouched. Else the update takes the squares of the gradients on its way, as it takes the amax
// that tensorwise FP8 needs of each new weight: no gradient is read twice.
//
// Bytes an element: norm by itself 2. Update with bf16 weights and moments 8 read + 6 written; fp32 masters add 6, fp32
// moments 8. fp32 gradients add 2 to both.
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include "../reference/adamw_math.h"
#include "cuda_utils.cuh"
#include "../config/shard_plan.h"

// What a step's gradient norm is, and what follows from it. In device memory: adamw_norm writes it, updates may obey
// it, the host may copy it.
typedef struct {
    float gradient_factor;  // clipping
    float gradient_norm;    // before clipping
    // 1: the norm is not finite or too large (adamw_accepts), and an update that obeys changes nothing
    uint32_t nonfinite;
    uint32_t largest;             // if so, of the rank's gradients: the largest magnitude (adamw_magnitude), and
    unsigned long long position;  // in backward order of the first large one (adamw_large); ADAMW_NONE in other steps
} AdamwControl;

#define ADAMW_NONE (~0ull)

// A rank's gradients, in one of the two: the other is NULL.
typedef struct {
    const bf16 *bf16_data;
    const float *fp32_data;
} AdamwGradients;

// ---------------------------------------------------------------------------------------------------------------------
// Gradient norm. A fixed number of blocks, each with its fixed part of the array: the same bits on every GPU and in
// every run.

enum { ADAMW_NORM_BLOCKS = 1056, ADAMW_NORM_THREADS = 512, ADAMW_NORM_VECTORS = 4 };

// Sum over a block of THREADS.
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

// 8 gradients as they are stored.
typedef struct {
    float4 first, second;
} AdamwFp32x8;

__device__ static inline Bf16x8 adamw_gradients_load(const bf16 *p) { return bf16x8_load(p); }
__device__ static inline AdamwFp32x8 adamw_gradients_load(const float *p) {
    return AdamwFp32x8{((const float4 *)p)[0], ((const float4 *)p)[1]};
}
__device__ static inline void adamw_gradients_unpack(float out[8], Bf16x8 v) { bf16x8_unpack(out, v); }
__device__ static inline void adamw_gradients_unpack(float out[8], AdamwFp32x8 v) {
    out[0] = v.first.x, out[1] = v.first.y, out[2] = v.first.z, out[3] = v.first.w;
    out[4] = v.second.x, out[5] = v.second.y, out[6] = v.second.z, out[7] = v.second.w;
}

// partials[block] = sum of squares of the block's part. fp32 within 32 elements, double beyond. A gradient above 1.8e19
// overflows to an infinite norm.
template <class Gradient>
static __global__ void __launch_bounds__(ADAMW_NORM_THREADS)
    adamw_squares_kernel(double *partials, const Gradient *gradients, int64_t n) {
    grid_dependency_wait();
    const int64_t stride = 8 * ADAMW_NORM_THREADS, tile = stride * ADAMW_NORM_VECTORS;
    double sum = 0;
    for (int64_t base = blockIdx.x * tile + threadIdx.x * 8; base < n; base += ADAMW_NORM_BLOCKS * tile) {
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

// sums[block] = sum of the block's part of values [n].
static __global__ void __launch_bounds__(ADAMW_NORM_THREADS)
    adamw_sum_kernel(double *sums, const double *values, int64_t n) {
    grid_dependency_wait();
    double sum = 0;
    for (int64_t i = blockIdx.x * ADAMW_NORM_THREADS + threadIdx.x; i < n; i += gridDim.x * ADAMW_NORM_THREADS)
        sum += values[i];
    sum = adamw_block_sum<ADAMW_NORM_THREADS>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

static __global__ void adamw_norm_kernel(AdamwControl *control, const double *squares, int64_t copies,
                                         float grad_clip) {
    grid_dependency_wait();
    const double norm = sqrt(*squares / (double)copies);
    control->gradient_norm = (float)norm;
    control->nonfinite = !adamw_accepts(norm);
    control->gradient_factor = clip_factor(norm, grad_clip);
    control->largest = 0;
    control->position = ADAMW_NONE;
}

// The largest of n gradients. Ends at once unless the step is refused, as the next kernel does.
template <class Gradient>
static __global__ void adamw_largest_kernel(AdamwControl *control, const Gradient *gradients, int64_t n) {
    grid_dependency_wait();
    if (!control->nonfinite) return;
    uint32_t largest = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x)
        largest = max(largest, adamw_magnitude((float)gradients[i]));
    atomicMax(&control->largest, largest);
}

// The first large one in backward order.
template <class Gradient>
static __global__ void adamw_find_large_kernel(AdamwControl *control, const Gradient *gradients, BackwardOrder order) {
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

// *squares (device) = sum of squares of gradients [n] (n a multiple of 8). Sharded gradients: the caller adds up those
// of all ranks. workspace: adamw_workspace_bytes. Returns the bytes that it moves.
static inline int64_t adamw_squares(double *squares, AdamwGradients gradients, int64_t n, double *workspace,
                                    cudaStream_t stream) {
    if (n % 8) die("adamw_squares: %lld elements are not a multiple of 8", (long long)n);
    require_aligned16(gradients.bf16_data, "adamw_squares", "gradients");
    require_aligned16(gradients.fp32_data, "adamw_squares", "gradients");
    if (gradients.fp32_data)
        CUDA_LAUNCH(adamw_squares_kernel<float>, ADAMW_NORM_BLOCKS, ADAMW_NORM_THREADS, 0, stream, workspace,
                    gradients.fp32_data, n);
    else
        CUDA_LAUNCH(adamw_squares_kernel<bf16>, ADAMW_NORM_BLOCKS, ADAMW_NORM_THREADS, 0, stream, workspace,
                    gradients.bf16_data, n);
    CUDA_LAUNCH(adamw_sum_kernel, 1, ADAMW_NORM_THREADS, 0, stream, squares, workspace, ADAMW_NORM_BLOCKS);
    return n * (gradients.fp32_data ? 4 : 2);
}

// Looks for the largest of gradients [order.total] if the step is refused.
template <class Gradient>
static inline void adamw_find_large(AdamwControl *control, const Gradient *gradients, BackwardOrder order,
                                    cudaStream_t stream) {
    CUDA_LAUNCH(adamw_largest_kernel<Gradient>, ADAMW_NORM_BLOCKS, 256, 0, stream, control, gradients, order.total);
    CUDA_LAUNCH(adamw_find_large_kernel<Gradient>, ADAMW_NORM_BLOCKS, 256, 0, stream, control, gradients, order);
}

// Fills *control (device). *squares (device): sum of squares over `copies` copies of the whole gradient. If the step is
// refused, the largest of this rank's part of it are looked for. grad_clip: largest norm, 0 for none.
static inline void adamw_norm(AdamwControl *control, const double *squares, int64_t copies, AdamwGradients gradients,
                              BackwardOrder order, float grad_clip, cudaStream_t stream) {
    CUDA_LAUNCH(adamw_norm_kernel, 1, 1, 0, stream, control, squares, copies, grad_clip);
    if (gradients.fp32_data) adamw_find_large(control, gradients.fp32_data, order, stream);
    else adamw_find_large(control, gradients.bf16_data, order, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Update

// A rank's flat shard arrays, all of the shard plan's `total` elements.
typedef struct {
    bf16 *weights;
    float *master;  // fp32 weights, of which `weights` is the rounded copy; NULL: `weights` are all there is,
                    // stochastically rounded
    void *exp_avg, *exp_avg_sq;
    bool fp32_moments;  // else bf16, stochastically rounded
    AdamwGradients gradients;
} AdamwArrays;

// One step's update.
typedef struct {
    AdamwArrays arrays;
    AdamwStep step;
    const AdamwControl *control;  // obeyed; NULL: the step is applied as it is
    double *squares;              // workspace (adamw_workspace_bytes) for sums of the gradients' squares, see
                                  // adamw_updated_squares; NULL: not wanted
} AdamwUpdate;

// Consecutive elements of a rank's slices of a unit that are treated alike. Ends are counted in PARAMETER_ALIGNMENT
// elements from the unit's start.
typedef struct {
    uint32_t end;
    bool decay;
    int amax_slot;  // of the fused FP8 weight; -1: none
    int64_t
        shift;  // from an element's place in the rank's unit to its place in the unit of the flat array of parameters.h
} AdamwRun;

enum {
    ADAMW_MAX_RUNS = 12,
    ADAMW_MAX_SLOTS = 8,
    ADAMW_THREADS = 256,
    ADAMW_TILES = 8,
    ADAMW_BLOCK = 8 * ADAMW_THREADS * ADAMW_TILES
};

// `count` units of `size` elements each in the shard, from element `first` on. Unit u's amax slots begin at amax + u *
// amax_stride. Rounding is keyed by places in the flat array: element e of unit u stands at flat + u * flat_size + e +
// its run's shift.
typedef struct {
    int64_t first, size, count;
    int64_t flat, flat_size;
    int num_runs;
    AdamwRun runs[ADAMW_MAX_RUNS];
    uint32_t *amax;  // NULL: not wanted
    int64_t amax_stride;
    double *squares;  // [count, blocks of a unit]; NULL: not wanted
} AdamwUnits;

// What holds for all elements of a step.
typedef struct {
    AdamwStep step;
    float factor;  // of the gradients
    bool refused;  // nothing is to change
} AdamwTerms;

// 8 elements of an array, stored as bf16 or fp32.
template <bool FP32>
__device__ static inline void adamw_load(float out[8], const void *array, int64_t i) {
    if (FP32) {
        const float4 *p = (const float4 *)((const float *)array + i);
        const float4 a = p[0], b = p[1];
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    } else {
        bf16x8_unpack(out, bf16x8_load((const bf16 *)array + i));
    }
}

__device__ static inline void adamw_store_fp32(void *array, int64_t i, const float x[8]) {
    float4 *p = (float4 *)((float *)array + i);
    p[0] = make_float4(x[0], x[1], x[2], x[3]);
    p[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// The upper halves of 8 words.
__device__ static inline Bf16x8 adamw_upper_halves(const uint32_t x[8]) {
    Bf16x8 v;
#pragma unroll
    for (int k = 0; k < 4; k++) v.word[k] = __byte_perm(x[2 * k], x[2 * k + 1], 0x7632);
    return v;
}

__device__ static inline float adamw_load_one(const void *array, int64_t i, bool fp32) {
    return fp32 ? ((const float *)array)[i] : __bfloat162float(((const bf16 *)array)[i]);
}

template <bool FP32_GRADIENTS>
__device__ static inline const void *adamw_gradients(const AdamwArrays &a) {
    return FP32_GRADIENTS ? (const void *)a.gradients.fp32_data : (const void *)a.gradients.bf16_data;
}

// Element i, at `flat` in the flat array, by the CPU's own functions. One whose gradient is not finite stays as it is,
// so that the weights can still be looked at where the norm comes after the update. Returns the magnitude of the new
// bf16 weight.
template <bool MASTER, bool FP32_MOMENTS, bool FP32_GRADIENTS>
__device__ static uint32_t adamw_update_one(const AdamwArrays &a, int64_t i, int64_t flat, const AdamwStep *step,
                                            float factor, bool decay) {
    const float gradient = __fmul_rn(adamw_load_one(adamw_gradients<FP32_GRADIENTS>(a), i, FP32_GRADIENTS),
                                     factor);  // __fmul_rn: not contracted with the next sum
    if (adamw_magnitude(gradient) == 0x7f800000u) return ((const bf16_bits *)a.weights)[i] & 0x7fffu;
    AdamwElement e = {adamw_load_one(MASTER ? (const void *)a.master : (const void *)a.weights, i, MASTER),
                      adamw_load_one(a.exp_avg, i, FP32_MOMENTS), adamw_load_one(a.exp_avg_sq, i, FP32_MOMENTS)};
    e = adamw_update(e, gradient, decay, step);
    const AdamwRandom random = adamw_random(step, flat);
    const bf16_bits weight = MASTER ? bf16_from_float(e.weight) : adamw_round(e.weight, random.weight);
    if (MASTER) a.master[i] = e.weight;
    ((bf16_bits *)a.weights)[i] = weight;
    if (FP32_MOMENTS) {
        ((float *)a.exp_avg)[i] = e.exp_avg;
        ((float *)a.exp_avg_sq)[i] = e.exp_avg_sq;
    } else {
        ((bf16_bits *)a.exp_avg)[i] = adamw_round(e.exp_avg, random.exp_avg);
        ((bf16_bits *)a.exp_avg_sq)[i] = adamw_round(e.exp_avg_sq, random.exp_avg_sq);
    }
    return weight & 0x7fffu;
}

// What adamw_update_8 does where adamw_update_fast may not be exact, and where the step is refused: nothing, but the
// weights have their magnitudes.
template <bool MASTER, bool FP32_MOMENTS, bool FP32_GRADIENTS>
__device__ static inline uint32_t adamw_update_rare(const AdamwArrays &a, uint32_t i, int64_t group,
                                                    const AdamwTerms &c, float kept, uint32_t largest) {
    if (c.refused) return amax_update(largest, bf16x8_load(a.weights + i));
#pragma unroll 1
    for (int j = 0; j < 8; j++)
        largest = amax_larger(largest, adamw_update_one<MASTER, FP32_MOMENTS, FP32_GRADIENTS>(
                                           a, i + j, 8 * group + j, &c.step, c.factor, kept != 1));
    return largest;
}

// adamw_update without the branches of sqrtf and division for rare operands (the iterations are those that nvcc uses
// for common ones): the same bits wherever
//   - the denominator is 2^-33 or more (infinities and NaNs on the way end in a NaN as weight: an infinite gradient or
//     second moment, whose root is infinity times the 0 that rsqrt gives, makes the denominator NaN);
//   - the new weight is in [2^-30, infinity): else a quotient below 2^-67, which may be inexact, could still change it.
__device__ static inline AdamwElement adamw_update_fast(AdamwElement e, float gradient, float kept, const AdamwStep &s,
                                                        float *denominator) {
    e.exp_avg = __fmaf_rn(s.one_minus_beta1, __fsub_rn(gradient, e.exp_avg), e.exp_avg);
    e.exp_avg_sq = __fmaf_rn(s.beta2, e.exp_avg_sq, __fmul_rn(__fmul_rn(s.one_minus_beta2, gradient), gradient));
    // sqrt(exp_avg_sq * 2^60), so that the remainder of the smallest operand is a normal number. The addend changes 0
    // alone, which has no rsqrt: it gets a root of 2^-93, which vanishes beside such a denominator.
    const float x = __fmaf_rn(e.exp_avg_sq, 0x1p60f, 0x1p-126f);
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    float root = __fmul_rn(x, r);
    root = __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(r, 0.5f), root);
    const float d = __fmaf_rn(root, s.inverse_sqrt_bias2 * 0x1p-30f, s.eps);
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    r = __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
    float q = __fmul_rn(e.exp_avg, r);
    q = __fmaf_rn(r, __fmaf_rn(-d, q, e.exp_avg), q);
    e.weight = __fmaf_rn(-s.step_size, q, __fmul_rn(e.weight, kept));
    *denominator = d;
    return e;
}

// Whether 8 denominators are at least `limit` and the new weights, which are rounded by less than a unit, where
// adamw_update_fast is exact.
__device__ static inline bool adamw_is_common(const float denominators[8], float limit, Bf16x8 weights,
                                              uint32_t largest) {
    uint32_t smallest = 0x7fff7fffu, denominator = UINT32_MAX;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        smallest = __vminu2(smallest, weights.word[k] & 0x7fff7fffu);
        denominator = __vimin3_u32(denominator, float_bits(denominators[2 * k]), float_bits(denominators[2 * k + 1]));
    }
    const uint32_t low = float_bits(0x1p-30f) + 0x10000u,
                   high = float_bits(INFINITY);  // one unit up: rounding may have raised the weight by one
    return !((denominator < float_bits(limit)) | (smallest < low) | (smallest << 16 < low) | (largest >= high) |
             (largest << 16 >= high));
}

// Elements i .. i + 7, which are group `group` of the flat array. Joins the magnitudes of the new bf16 weights to
// `largest` (see amax_update), and adds the squares of the gradients to *squares.
template <bool MASTER, bool FP32_MOMENTS, bool FP32_GRADIENTS>
__device__ static inline uint32_t adamw_update_8(const AdamwArrays &a, uint32_t i, int64_t group, const AdamwTerms &c,
                                                 float kept, uint32_t largest, float *squares) {
    float w[8], m[8], v[8], g[8], denominators[8];
    uint32_t w_sum[8], m_sum[8], v_sum[8];
    adamw_load<MASTER>(w, MASTER ? (const void *)a.master : (const void *)a.weights, i);
    adamw_load<FP32_MOMENTS>(m, a.exp_avg, i);
    adamw_load<FP32_MOMENTS>(v, a.exp_avg_sq, i);
    adamw_load<FP32_GRADIENTS>(g, adamw_gradients<FP32_GRADIENTS>(a), i);
    const uint32_t hash = adamw_random_group(c.step.key, group);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        AdamwElement e = {w[j], m[j], v[j]};
        e = adamw_update_fast(e, __fmul_rn(g[j], c.factor), kept, c.step, &denominators[j]);
        *squares = __fmaf_rn(g[j], g[j], *squares);
        w[j] = e.weight, m[j] = e.exp_avg, v[j] = e.exp_avg_sq;
        const AdamwRandom random = adamw_random_member(&c.step, hash, j);
        w_sum[j] = float_bits(w[j]) +
                   (random.weight >> 16);  // the upper half is bf16_from_float_stochastic's, if w[j] is finite
        m_sum[j] = float_bits(m[j]) + (random.exp_avg >> 16);
        v_sum[j] = float_bits(v[j]) + (random.exp_avg_sq >> 16);
    }
    const Bf16x8 weights = MASTER ? bf16x8_pack(w) : adamw_upper_halves(w_sum);
    const uint32_t joined = amax_update(largest, weights);
    if (!adamw_is_common(denominators, c.refused ? INFINITY : 0x1p-33f, weights, joined))
        return adamw_update_rare<MASTER, FP32_MOMENTS, FP32_GRADIENTS>(a, i, group, c, kept, largest);
    if (MASTER) adamw_store_fp32(a.master, i, w);
    bf16x8_store(a.weights + i, weights);
    if (FP32_MOMENTS) {
        adamw_store_fp32(a.exp_avg, i, m);
        adamw_store_fp32(a.exp_avg_sq, i, v);
    } else {
        bf16x8_store((bf16 *)a.exp_avg + i, adamw_upper_halves(m_sum));
        bf16x8_store((bf16 *)a.exp_avg_sq + i, adamw_upper_halves(v_sum));
    }
    return joined;
}

// Raises the slot to the largest magnitude that 16 threads have seen.
__device__ static inline void adamw_publish(uint32_t *amax, uint32_t halves) {
    const uint32_t bits = __reduce_max_sync(0xffffu << (threadIdx.x & 16), amax_bits(halves));
    if (threadIdx.x % 16 == 0 && bits > *(volatile uint32_t *)amax) atomicMax(amax, bits);
}

// The arrays from element i on.
template <bool MASTER, bool FP32_MOMENTS, bool FP32_GRADIENTS>
__device__ static inline AdamwArrays adamw_arrays_from(AdamwArrays a, int64_t i) {
    const int64_t moment_bytes = i * (FP32_MOMENTS ? 4 : 2);
    a.weights += i;
    if (FP32_GRADIENTS) a.gradients.fp32_data += i;
    else a.gradients.bf16_data += i;
    if (MASTER) a.master += i;
    a.exp_avg = (char *)a.exp_avg + moment_bytes, a.exp_avg_sq = (char *)a.exp_avg_sq + moment_bytes;
    return a;
}

// A block's ADAMW_BLOCK elements, 8 a thread at a time. Returns the sum of the squares of this thread's gradients. 16
// threads share a run, because runs end at multiples of 128 elements. NEAREST is a parameter, and what hangs on the run
// is looked up where a run begins, because the loop is bound by the instructions it issues.
template <bool MASTER, bool FP32_MOMENTS, bool FP32_GRADIENTS, bool NEAREST>
__device__ static inline float adamw_update_block(uint32_t *amax, const AdamwArrays &arrays, const AdamwUnits &u,
                                                  AdamwTerms c) {
    c.step.nearest_weights = NEAREST;
    const uint32_t begin = blockIdx.x * (ADAMW_BLOCK / PARAMETER_ALIGNMENT);
    const int64_t first = (int64_t)begin * PARAMETER_ALIGNMENT, flat = u.flat + blockIdx.y * u.flat_size + first;
    const AdamwArrays a =
        adamw_arrays_from<MASTER, FP32_MOMENTS, FP32_GRADIENTS>(arrays, u.first + blockIdx.y * u.size + first);
    int run = 0, slot = -1;
    uint32_t end = 0, largest = 0;
    float kept = 1, squares = 0;
    int64_t group = 0;
    for (uint32_t i = threadIdx.x * 8; i < ADAMW_BLOCK; i += ADAMW_THREADS * 8) {
        if (i >= end) {
            if (slot >= 0) adamw_publish(&amax[slot], largest);
            slot = -1, largest = 0;
            while (run < u.num_runs && begin + i / PARAMETER_ALIGNMENT >= u.runs[run].end) run++;
            if (run == u.num_runs) break;
            const AdamwRun r = u.runs[run];
            end = min(r.end - begin, ADAMW_BLOCK / PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT;
            kept = r.decay ? c.step.decay : 1.0f, group = (flat + r.shift) / 8;
            if (u.amax) slot = r.amax_slot;
        }
        largest = adamw_update_8<MASTER, FP32_MOMENTS, FP32_GRADIENTS>(a, i, group + i / 8, c, kept, largest, &squares);
    }
    if (slot >= 0) adamw_publish(&amax[slot], largest);
    return squares;
}

// blockIdx.y: unit; blockIdx.x: place in it. Four blocks an SM have 64 registers a thread; with fp32 masters and
// moments that is too few.
template <bool MASTER, bool FP32_MOMENTS, bool FP32_GRADIENTS>
static __global__ void __launch_bounds__(ADAMW_THREADS, MASTER &&FP32_MOMENTS ? 3 : 4)
    adamw_update_kernel(const __grid_constant__ AdamwUpdate update, const __grid_constant__ AdamwUnits u) {
    grid_dependency_wait();
    __shared__ uint32_t amax[ADAMW_MAX_SLOTS];
    AdamwTerms c = {update.step, 1, false};
    if (update.control) c.factor = update.control->gradient_factor, c.refused = update.control->nonfinite;
    if (threadIdx.x < ADAMW_MAX_SLOTS) amax[threadIdx.x] = 0;
    __syncthreads();
    const float squares =
        !MASTER && c.step.nearest_weights
            ? adamw_update_block<MASTER, FP32_MOMENTS, FP32_GRADIENTS, true>(amax, update.arrays, u, c)
            : adamw_update_block<MASTER, FP32_MOMENTS, FP32_GRADIENTS, false>(amax, update.arrays, u, c);
    if (u.squares) {
        const double sum = adamw_block_sum<ADAMW_THREADS>((double)squares);
        if (threadIdx.x == 0) u.squares[blockIdx.y * gridDim.x + blockIdx.x] = sum;
    }
    if (!u.amax) return;
    __syncthreads();
    if (threadIdx.x >= ADAMW_MAX_SLOTS || amax[threadIdx.x] == 0) return;
    uint32_t *slot = u.amax + blockIdx.y * u.amax_stride + threadIdx.x;
    if (amax[threadIdx.x] > *(volatile uint32_t *)slot) atomicMax(slot, amax[threadIdx.x]);
}

static inline void adamw_add_run(AdamwUnits *u, int64_t end, bool decay, int amax_slot, int64_t shift) {
    AdamwRun *last = &u->runs[u->num_runs - 1];
    if (u->num_runs > 0 && amax_slot < 0 && last->amax_slot < 0 && last->decay == decay && last->shift == shift) {
        last->end = (uint32_t)(end / PARAMETER_ALIGNMENT);
        return;
    }
    if (u->num_runs == ADAMW_MAX_RUNS || amax_slot >= ADAMW_MAX_SLOTS)
        die("the optimizer takes at most %d runs of parameters a unit", ADAMW_MAX_RUNS);
    u->runs[u->num_runs++] = AdamwRun{(uint32_t)(end / PARAMETER_ALIGNMENT), decay, amax_slot, shift};
}

// This rank's slices of unit `l` (ROOT: the root), and of the count - 1 layers that follow. A segment is a sequence of
// groups of tensors (fused linear layers are one), each cut to the slice here; neighbours that are treated alike make
// one run. The last group takes the padding that follows it.
static inline AdamwUnits adamw_units(const ParameterTable *t, const ShardPlan *plan, int64_t l, int64_t count) {
    AdamwUnits u = {};
    u.first = shard_begin(plan, l), u.size = shard_elements(plan, l), u.count = count;
    u.flat = layer_offset(t, l), u.flat_size = l == ROOT ? t->root_size : t->layer_size;
    int slots = 0;
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = segment_slice(t, plan, l, k);
        const int64_t slice_begin = plan->shard_rank * g.slice,
                      in_unit = g.shard - u.first;  // of the slice: in the segment, in the rank's unit
        const int64_t shift = g.flat - u.flat + slice_begin - in_unit;
        for (int64_t i = 0; i < t->count; i++) {
            const Parameter *p = &t->entries[i];
            if (p->layer != l || parameter_segment(p) != k || (p->flags & PARAM_JOINED)) continue;
            int64_t end = plan->shard_size * g.slice;  // of the group, in the segment: where the next begins
            for (int64_t j = t->count - 1; j > i; j--) {
                const Parameter *next = &t->entries[j];
                if (next->layer == l && parameter_segment(next) == k && !(next->flags & PARAM_JOINED))
                    end = next->offset - g.flat;
            }
            const int slot = p->flags & PARAM_FP8 ? slots++ : -1;
            const int64_t begin_here = max_i64(p->offset - g.flat, slice_begin),
                          end_here = min_i64(end, slice_begin + g.slice);
            if (begin_here < end_here)
                adamw_add_run(&u, in_unit + end_here - slice_begin, p->flags & PARAM_DECAY, slot, shift);
        }
    }
    return u;
}

// Blocks that update a unit of `size` elements.
static inline unsigned adamw_blocks(int64_t size) { return grid_size(size, ADAMW_BLOCK); }

enum { ADAMW_SUM_BLOCKS = 64 };

// Sums of squares that the update of this rank's shard leaves in its workspace.
static inline int64_t adamw_update_sums(const ParameterTable *t, const ShardPlan *plan) {
    return adamw_blocks(shard_elements(plan, ROOT)) + t->num_layers * adamw_blocks(shard_elements(plan, 0));
}

// Bytes of device memory that a step needs as workspace.
static inline int64_t adamw_workspace_bytes(const ParameterTable *t, const ShardPlan *plan) {
    return (max_i64(ADAMW_NORM_BLOCKS, adamw_update_sums(t, plan)) + ADAMW_SUM_BLOCKS) * (int64_t)sizeof(double);
}

template <bool FP32_GRADIENTS>
static inline void adamw_launch_kernel(const AdamwUpdate *w, const AdamwUnits *u, cudaStream_t stream) {
    const AdamwArrays *a = &w->arrays;
    const dim3 grid(adamw_blocks(u->size), (unsigned)u->count);
    if (a->master && a->fp32_moments)
        CUDA_LAUNCH(adamw_update_kernel<true, true, FP32_GRADIENTS>, grid, ADAMW_THREADS, 0, stream, *w, *u);
    else if (a->master)
        CUDA_LAUNCH(adamw_update_kernel<true, false, FP32_GRADIENTS>, grid, ADAMW_THREADS, 0, stream, *w, *u);
    else if (a->fp32_moments)
        CUDA_LAUNCH(adamw_update_kernel<false, true, FP32_GRADIENTS>, grid, ADAMW_THREADS, 0, stream, *w, *u);
    else CUDA_LAUNCH(adamw_update_kernel<false, false, FP32_GRADIENTS>, grid, ADAMW_THREADS, 0, stream, *w, *u);
}

static inline void adamw_launch(const AdamwUpdate *w, const AdamwUnits *u, cudaStream_t stream) {
    const AdamwArrays *a = &w->arrays;
    const void *pointers[] = {
        a->weights, a->master, a->exp_avg, a->exp_avg_sq, a->gradients.bf16_data, a->gradients.fp32_data};
    for (int i = 0; i < 6; i++) require_aligned16(pointers[i], "adamw", "an array");
    if (a->gradients.fp32_data) adamw_launch_kernel<true>(w, u, stream);
    else adamw_launch_kernel<false>(w, u, stream);
}

// Updates this rank's part of the root unit.
static inline void adamw_update_root(const AdamwUpdate *w, const ParameterTable *t, const ShardPlan *plan,
                                     cudaStream_t stream) {
    AdamwUnits root = adamw_units(t, plan, ROOT, 1);
    root.squares = w->squares;
    adamw_launch(w, &root, stream);
}

// Updates this rank's part of all layers. amax (NULL: not wanted): the j-th fused FP8 weight of layer l (in table
// order: qkv, o, gate_up, down) raises amax[l * amax_stride + j] to the largest magnitude in this rank's part, also
// when the step is not applied; the caller has cleared the slots.
static inline void adamw_update_layers(const AdamwUpdate *w, const ParameterTable *t, const ShardPlan *plan,
                                       uint32_t *amax, int64_t amax_stride, cudaStream_t stream) {
    AdamwUnits layers = adamw_units(t, plan, 0, t->num_layers);
    layers.amax = amax, layers.amax_stride = amax_stride;
    layers.squares = w->squares ? w->squares + adamw_blocks(shard_elements(plan, ROOT)) : NULL;
    adamw_launch(w, &layers, stream);
}

// Bytes that an update of n elements moves: the gradient is read; moments and weights are read and written.
static inline int64_t adamw_bytes(const AdamwArrays *a, int64_t n) {
    return n * ((a->gradients.fp32_data ? 4 : 2) + 2 * 2 * (a->fp32_moments ? 4 : 2) + (a->master ? 10 : 4));
}

// *squares (device) = sum of squares of this rank's gradients, from the workspace of an update of the root unit and all
// layers.
static inline void adamw_updated_squares(double *squares, const AdamwUpdate *w, const ParameterTable *t,
                                         const ShardPlan *plan, cudaStream_t stream) {
    const int64_t count = adamw_update_sums(t, plan);
    double *parts = w->squares + count;
    CUDA_LAUNCH(adamw_sum_kernel, ADAMW_SUM_BLOCKS, ADAMW_NORM_THREADS, 0, stream, parts, w->squares, count);
    CUDA_LAUNCH(adamw_sum_kernel, 1, ADAMW_NORM_THREADS, 0, stream, squares, parts, ADAMW_SUM_BLOCKS);
}

#endif
