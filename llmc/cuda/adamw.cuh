// AdamW on the GPU: updates a rank's shard. The gradient norm (adamw_norm.cuh) decides clipping and skipped steps.
//
// The arithmetic of one element, its stochastic rounding and the clip factor come from adamw_math.h, which the CPU uses
// too: equal input gives equal bits. The norm, the clip factor and the decision to skip a step stay in device memory
// (AdamwControl), so the host never waits.
//
// The norm is computed before the update if the update depends on it: with clipping, or if a step with a non-finite
// norm must leave weights and moments unchanged. Otherwise the update kernel itself sums the squares of the gradients.
// It also finds the amax of each new weight, which tensorwise FP8 needs. So gradients are read only once.
//
// Bytes per element: the update with bf16 weights and moments reads 8 and writes 6. fp32 master weights add 6, fp32
// moments add 8, fp32 gradients add 2.
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include "../reference/adamw_math.h"
#include "adamw_norm.cuh"
#include "../config/shard_plan.h"

// A rank's flat shard arrays. Each has the shard plan's `total` elements.
typedef struct {
    bf16 *weights;
    // fp32 master weights, and `weights` is their rounded copy. NULL: `weights` are stored alone, with stochastic
    // rounding.
    float *master;
    void *exp_avg, *exp_avg_sq;
    bool fp32_moments;  // else bf16 moments with stochastic rounding
    AdamwGradients gradients;
} AdamwArrays;

// Arguments of one step's update.
typedef struct {
    AdamwArrays arrays;
    AdamwStep step;
    const AdamwControl *control;  // NULL: the step is always applied
    // Workspace (adamw_workspace_bytes) for sums of squared gradients (adamw_updated_squares). NULL: not computed.
    double *squares;
} AdamwUpdate;

// Consecutive elements of a rank's slices of a unit with equal decay, amax slot and shift. `end` counts from the unit's
// start, in units of PARAMETER_ALIGNMENT elements.
typedef struct {
    uint32_t end;
    bool decay;
    int amax_slot;  // amax slot of the fused FP8 weight; -1: none
    // Index in the unit of the flat parameter array (parameters.h) minus index in this rank's part of the unit.
    int64_t shift;
} AdamwRun;

enum {
    ADAMW_MAX_RUNS = 12,
    ADAMW_MAX_SLOTS = 8,
    ADAMW_THREADS = 256,
    ADAMW_TILES = 8,
    ADAMW_BLOCK = 8 * ADAMW_THREADS * ADAMW_TILES
};

// The shard holds `count` units of `size` elements each, from element `first` on. The amax slots of unit u begin at
// amax + u * amax_stride. Stochastic rounding depends on an element's index in the flat parameter array: element e of
// unit u has index flat + u * flat_size + e + shift of its run.
typedef struct {
    int64_t first, size, count;
    int64_t flat, flat_size;
    int num_runs;
    AdamwRun runs[ADAMW_MAX_RUNS];
    uint32_t *amax;  // NULL: not computed
    int64_t amax_stride;
    double *squares;  // [count, blocks of a unit]; NULL: not computed
} AdamwUnits;

// Values that are constant over all elements of a step.
typedef struct {
    AdamwStep step;
    float factor;  // factor for the gradients
    bool skipped;  // true: the step is skipped
} AdamwTerms;

// Loads 8 elements of an array that is stored as bf16 or fp32.
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

// Returns the upper 16 bits of 8 words.
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

// Updates element i, whose index in the flat array is `flat`, with the functions that the CPU uses. An element with a
// non-finite gradient stays unchanged, so that the weights can still be inspected if the norm is computed after the
// update. Returns the magnitude of the new bf16 weight.
template <bool MASTER, bool FP32_MOMENTS, bool FP32_GRADIENTS>
__device__ static uint32_t adamw_update_one(const AdamwArrays &a, int64_t i, int64_t flat, const AdamwStep *step,
                                            float factor, bool decay) {
    // __fmul_rn keeps the compiler from fusing this multiplication with the next addition.
    const float gradient = __fmul_rn(adamw_load_one(adamw_gradients<FP32_GRADIENTS>(a), i, FP32_GRADIENTS), factor);
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

// The slow path of adamw_update_8, for elements where adamw_update_fast may not be exact and for skipped steps. A
// skipped step only reads the magnitudes of the weights.
template <bool MASTER, bool FP32_MOMENTS, bool FP32_GRADIENTS>
__device__ static inline uint32_t adamw_update_rare(const AdamwArrays &a, uint32_t i, int64_t group,
                                                    const AdamwTerms &c, float kept, uint32_t largest) {
    if (c.skipped) return amax_update(largest, bf16x8_load(a.weights + i));
#pragma unroll 1
    for (int j = 0; j < 8; j++)
        largest = amax_larger(largest, adamw_update_one<MASTER, FP32_MOMENTS, FP32_GRADIENTS>(
                                           a, i + j, 8 * group + j, &c.step, c.factor, kept != 1));
    return largest;
}

// adamw_update without the branches of sqrtf and division for rare operands; the iterations are those that nvcc uses
// for common operands. The bits are equal to adamw_update's if
//  - the denominator is at least 2^-33 (infinities and NaNs end in a NaN weight: for an infinite gradient or second
//    moment, the root is infinity times the 0 that rsqrt gives, which makes the denominator NaN), and
//  - the new weight is in [2^-30, infinity): otherwise a quotient below 2^-67, which may be inexact, could change it.
__device__ static inline AdamwElement adamw_update_fast(AdamwElement e, float gradient, float kept, const AdamwStep &s,
                                                        float *denominator) {
    e.exp_avg = __fmaf_rn(s.one_minus_beta1, __fsub_rn(gradient, e.exp_avg), e.exp_avg);
    e.exp_avg_sq = __fmaf_rn(s.beta2, e.exp_avg_sq, __fmul_rn(__fmul_rn(s.one_minus_beta2, gradient), gradient));
    // x = exp_avg_sq * 2^60, so that the remainder of the smallest operand is a normal number. The addend changes only
    // 0, which has no rsqrt: its root becomes 2^-93, which vanishes beside such a denominator.
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

// True if adamw_update_fast is exact for 8 elements: each denominator is at least `limit`, and each new weight is in
// the range where it is exact. `weights` are rounded to bf16, so they may be off by less than one unit in the last
// place.
__device__ static inline bool adamw_is_common(const float denominators[8], float limit, Bf16x8 weights,
                                              uint32_t largest) {
    uint32_t smallest = 0x7fff7fffu, denominator = UINT32_MAX;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        smallest = __vminu2(smallest, weights.word[k] & 0x7fff7fffu);
        denominator = __vimin3_u32(denominator, float_bits(denominators[2 * k]), float_bits(denominators[2 * k + 1]));
    }
    // `high` is one unit up, because rounding may have raised the weight by one.
    const uint32_t low = float_bits(0x1p-30f) + 0x10000u, high = float_bits(INFINITY);
    return !((denominator < float_bits(limit)) | (smallest < low) | (smallest << 16 < low) | (largest >= high) |
             (largest << 16 >= high));
}

// Updates elements i .. i + 7, which are group `group` of the flat array. Raises `largest` to the magnitudes of the new
// bf16 weights (see amax_update), and adds the squared gradients to *squares.
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
        // The upper half of w_sum[j] equals bf16_from_float_stochastic() if w[j] is finite.
        w_sum[j] = float_bits(w[j]) + (random.weight >> 16);
        m_sum[j] = float_bits(m[j]) + (random.exp_avg >> 16);
        v_sum[j] = float_bits(v[j]) + (random.exp_avg_sq >> 16);
    }
    const Bf16x8 weights = MASTER ? bf16x8_pack(w) : adamw_upper_halves(w_sum);
    const uint32_t joined = amax_update(largest, weights);
    if (!adamw_is_common(denominators, c.skipped ? INFINITY : 0x1p-33f, weights, joined))
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

// Raises the slot to the largest magnitude that 16 threads have found.
__device__ static inline void adamw_publish(uint32_t *amax, uint32_t packed_amax) {
    const uint32_t bits = __reduce_max_sync(0xffffu << (threadIdx.x & 16), amax_bits(packed_amax));
    if (threadIdx.x % 16 == 0 && bits > *(volatile uint32_t *)amax) atomicMax(amax, bits);
}

// Returns the arrays, starting at element i.
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

// Updates a block's ADAMW_BLOCK elements; each thread takes 8 at a time. Returns the sum of squares of this thread's
// gradients. 16 threads share a run, because runs end at multiples of 128 elements. The loop is bound by instruction
// issue, so NEAREST is a template parameter and the run is looked up only where a new one begins.
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

// blockIdx.y is the unit, blockIdx.x the block within it. An occupancy of four blocks per SM leaves 64 registers per
// thread; fp32 master weights and moments need more.
template <bool MASTER, bool FP32_MOMENTS, bool FP32_GRADIENTS>
static __global__ void __launch_bounds__(ADAMW_THREADS, MASTER &&FP32_MOMENTS ? 3 : 4)
    adamw_update_kernel(const __grid_constant__ AdamwUpdate update, const __grid_constant__ AdamwUnits u) {
    grid_dependency_wait();
    __shared__ uint32_t amax[ADAMW_MAX_SLOTS];
    AdamwTerms c = {update.step, 1, false};
    if (update.control) c.factor = update.control->gradient_factor, c.skipped = update.control->nonfinite;
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
        die("the optimizer supports at most %d runs of parameters per unit", ADAMW_MAX_RUNS);
    u->runs[u->num_runs++] = AdamwRun{(uint32_t)(end / PARAMETER_ALIGNMENT), decay, amax_slot, shift};
}

// Describes this rank's slices of unit `l` (ROOT: the root unit) and of the count - 1 layers that follow. A segment is
// a sequence of groups of tensors (fused linear layers form one group), each cut to this rank's slice. Neighbours that
// have no amax slot and equal decay and shift form one run. The last group takes the padding behind it.
static inline AdamwUnits adamw_units(const ParameterTable *t, const ShardPlan *plan, int64_t l, int64_t count) {
    AdamwUnits u = {};
    u.first = shard_begin(plan, l), u.size = shard_elements(plan, l), u.count = count;
    u.flat = layer_offset(t, l), u.flat_size = l == ROOT ? t->root_size : t->layer_size;
    int slots = 0;
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = segment_slice(t, plan, l, k);
        // in_unit: index of the slice in the segment minus its index in this rank's unit.
        const int64_t slice_begin = plan->shard_rank * g.slice, in_unit = g.shard - u.first;
        const int64_t shift = g.flat - u.flat + slice_begin - in_unit;
        for (int64_t i = 0; i < t->count; i++) {
            const Parameter *p = &t->entries[i];
            if (p->layer != l || parameter_segment(p) != k || (p->flags & PARAM_JOINED)) continue;
            int64_t end = plan->shard_size * g.slice;  // end of the group in the segment, where the next group begins
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

// Returns how many blocks update a unit of `size` elements.
static inline unsigned adamw_blocks(int64_t size) { return grid_size(size, ADAMW_BLOCK); }

enum { ADAMW_SUM_BLOCKS = 64 };

// Returns how many sums of squares the update of this rank's shard writes to its workspace.
static inline int64_t adamw_update_sums(const ParameterTable *t, const ShardPlan *plan) {
    return adamw_blocks(shard_elements(plan, ROOT)) + t->num_layers * adamw_blocks(shard_elements(plan, 0));
}

// Returns the bytes of device workspace that a step needs.
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

// Updates this rank's part of all layers. If amax is not NULL, the j-th fused FP8 weight of layer l (table order: qkv,
// o, gate_up, down) raises amax[l * amax_stride + j] to the largest magnitude in this rank's part, even if the step is
// skipped. The caller has cleared the slots.
static inline void adamw_update_layers(const AdamwUpdate *w, const ParameterTable *t, const ShardPlan *plan,
                                       uint32_t *amax, int64_t amax_stride, cudaStream_t stream) {
    AdamwUnits layers = adamw_units(t, plan, 0, t->num_layers);
    layers.amax = amax, layers.amax_stride = amax_stride;
    layers.squares = w->squares ? w->squares + adamw_blocks(shard_elements(plan, ROOT)) : NULL;
    adamw_launch(w, &layers, stream);
}

// Returns the bytes that an update of n elements moves: it reads the gradient, and reads and writes moments and
// weights.
static inline int64_t adamw_bytes(const AdamwArrays *a, int64_t n) {
    return n * ((a->gradients.fp32_data ? 4 : 2) + 2 * 2 * (a->fp32_moments ? 4 : 2) + (a->master ? 10 : 4));
}

// Writes *squares (device) = sum of squares of this rank's gradients, from the workspace that an update of the root
// unit and all layers has filled.
static inline void adamw_updated_squares(double *squares, const AdamwUpdate *w, const ParameterTable *t,
                                         const ShardPlan *plan, cudaStream_t stream) {
    const int64_t count = adamw_update_sums(t, plan);
    double *parts = w->squares + count;
    CUDA_LAUNCH(adamw_sum_kernel, ADAMW_SUM_BLOCKS, ADAMW_NORM_THREADS, 0, stream, parts, w->squares, count);
    CUDA_LAUNCH(adamw_sum_kernel, 1, ADAMW_NORM_THREADS, 0, stream, squares, parts, ADAMW_SUM_BLOCKS);
}

#endif
