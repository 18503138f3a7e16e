// AdamW on the GPU: updates a rank's shard. The gradient norm (adamw_norm.cuh) decides clipping and skipped steps.
// A unit is a layer or the root unit, which holds all other parameters (parameters.h).
//
// adamw_math.h, which the CPU uses too, defines the arithmetic of one element, its stochastic rounding and the clip
// factor: equal input gives equal bits. The norm, the clip factor and the decision to skip a step stay in device memory
// (AdamwControl), so the host need not wait for them before it launches the update.
//
// The norm is computed before the update if the update depends on it: with clipping, or if a step with a non-finite
// norm must leave weights and moments unchanged. It also comes first with FP8 gradients, which are cheap to read.
// Otherwise the update kernel itself sums the squares of the gradients, so gradients are read only once.
// --optimizer-in-backward is the exception: the update kernel sums them also with clipping, which reads the gradients
// of each unit once more before the unit's update (adamw_clip). For recipes with one scale per tensor the update kernel
// also finds the amax of each FP8 weight's new values.
//
// Bytes per element: the update with bf16 weights, moments and gradients reads 8 and writes 6. fp32 master weights add
// 6 to the sum of both, fp32 moments add 8, COAT's moments save 4, fp32 gradients add 2, FP8 gradients save 1.
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include "adamw_coat.cuh"
#include "../config/shard_plan.h"

// Arguments of one step's update.
typedef struct {
    AdamwArrays arrays;
    AdamwStep step;
    const AdamwControl *control;  // NULL: the step is applied, without clipping
    // Workspace of adamw_workspace_bytes, in which each block of the update stores its sum of squared gradients, for
    // adamw_updated_squares and adamw_locate_block. NULL: not computed.
    double *squares;
    // amax[l * amax_stride + j] is the amax slot of the j-th fused FP8 weight of layer l (table order: qkv, o, gate_up,
    // down). The caller has cleared it. The update raises it to the largest magnitude in this rank's part, even if the
    // step is skipped. NULL: not computed.
    uint32_t *amax;
    int64_t amax_stride;
    MsampStep msamp;  // read with MS-AMP's moments
} AdamwUpdate;

// Consecutive elements of a rank's part of a unit with equal decay, amax slot and shift. `end` is the index of the
// element after the last one, counted from AdamwUnits.first and divided by PARAMETER_ALIGNMENT.
typedef struct {
    uint32_t end;
    bool decay;
    int amax_slot;  // number of the fused FP8 weight in the layer (AdamwUpdate.amax); -1: none
    int entry;      // with FP8 gradients: the tensor's entry of the parameter table, counted from the unit's first
    // An element's index in its unit of the flat parameter array (parameters.h) minus its index in this rank's part of
    // that unit.
    int64_t shift;
} AdamwRun;

enum {
    ADAMW_MAX_RUNS = 12,
    ADAMW_MAX_SLOTS = 8,
    ADAMW_TILES = 8,
    ADAMW_STRIDE = 8 * ADAMW_THREADS,
    ADAMW_BLOCK = ADAMW_STRIDE * ADAMW_TILES
};
static_assert((int)ADAMW_BLOCK == (int)SHARD_BLOCK, "a block of the update has one sum of squares");

// The elements that a launch updates: of `count` units, which lie `stride` elements apart in the shard, from element
// `first` on. The first `size` elements of each are updated. The amax slots of unit u begin at amax + u * amax_stride.
// Stochastic rounding depends on an element's index in the flat parameter array: element e of unit u has the index
// flat + u * flat_size + e + (shift of its run).
typedef struct {
    int64_t first, size, stride, count;
    int64_t gradient_gap;          // units are stride - gradient_gap elements apart in FP8 gradients, stride in others
    int64_t first_entry, entries;  // with FP8 gradients: unit u begins at entry first_entry + u * entries of the table
    int64_t flat, flat_size;
    int num_runs;
    AdamwRun runs[ADAMW_MAX_RUNS];
    uint32_t *amax;  // NULL: not computed
    int64_t amax_stride;
    double *squares;         // the sum of the first unit's first block; NULL: not computed
    int64_t squares_stride;  // sums of a unit
} AdamwUnits;

// Raises the slot to the largest magnitude that 16 threads have found.
__device__ static inline void adamw_publish(uint32_t *amax, uint32_t packed_amax) {
    const uint32_t bits = __reduce_max_sync(0xffffu << (threadIdx.x & 16), amax_bits(packed_amax));
    if (threadIdx.x % 16 == 0 && bits > *(volatile uint32_t *)amax) atomicMax(amax, bits);
}

// Returns pointers to element i of the arrays, and to element `gradient` of the gradients.
template <bool MASTER, AdamwMoments MOMENTS, AdamwGradientType GRADIENTS>
__device__ static inline AdamwArrays adamw_arrays_from(AdamwArrays a, int64_t i, int64_t gradient) {
    const int64_t moment_bytes = i * adamw_moment_bytes(MOMENTS);
    a.weights += i;
    if (GRADIENTS == GRADIENTS_FP8) a.gradients.codes += gradient;
    else if (GRADIENTS == GRADIENTS_FP32) a.gradients.fp32_data += gradient;
    else a.gradients.bf16_data += gradient;
    if (MASTER) a.master += i;
    a.exp_avg = (char *)a.exp_avg + moment_bytes, a.exp_avg_sq = (char *)a.exp_avg_sq + moment_bytes;
    if (adamw_is_coat(MOMENTS)) {
        a.coat.exp_avg_groups += i / COAT_GROUP;
        a.coat.exp_avg_sq_groups += i / COAT_GROUP;
    }
    return a;
}

// Updates a block's elements, at most ADAMW_BLOCK; a thread takes 8 at a time. Returns the sum of squares of this
// thread's gradients. 16 threads share a run, because runs end at multiples
// of 128 elements. The loop is bound by instruction issue, so NEAREST is a template parameter and the run is looked up
// only where a new one begins. With COAT's moments whole warps stay together: if only the first half of a warp has
// elements, the second half computes the same ones and stores nothing. With COAT's moments an SM holds too few warps to
// hide latency, so they prefetch the next elements. With CODES writes codes of FP8 weights (AdamwCodes).
template <bool MASTER, AdamwMoments MOMENTS, AdamwGradientType GRADIENTS, bool CODES, bool NEAREST>
__device__ static inline float adamw_update_block(uint32_t *amax, const AdamwArrays &arrays, const AdamwUnits &u,
                                                  AdamwTerms c, const AdamwCodes &codes) {
    c.step.nearest_weights = NEAREST;
    const uint32_t begin = blockIdx.x * (ADAMW_BLOCK / PARAMETER_ALIGNMENT), stop = u.runs[u.num_runs - 1].end;
    const int64_t first = (int64_t)begin * PARAMETER_ALIGNMENT, flat = u.flat + blockIdx.y * u.flat_size + first,
                  at = u.first + blockIdx.y * u.stride + first,
                  gradient = GRADIENTS == GRADIENTS_FP8 ? at - blockIdx.y * u.gradient_gap : at;
    const AdamwArrays a = adamw_arrays_from<MASTER, MOMENTS, GRADIENTS>(arrays, at, gradient);
    int run = 0, slot = -1;
    uint32_t end = 0, largest = 0;
    float kept = 1, squares = 0, scale = 0;
    uint8_t *code = NULL;
    int64_t group = 0;
    for (uint32_t i = threadIdx.x * 8; i < ADAMW_BLOCK; i += ADAMW_STRIDE) {
        bool active = true;
        if (i >= end) {
            const uint32_t at = begin + i / PARAMETER_ALIGNMENT;
            if (slot >= 0) adamw_publish(&amax[slot], largest);
            slot = -1, largest = 0, active = at < stop;
            if ((adamw_is_coat(MOMENTS) ? at & ~1u : at) >= stop) break;
            while (active && at >= u.runs[run].end) run++;
            if (active) {
                const AdamwRun r = u.runs[run];
                end = min(r.end - begin, ADAMW_BLOCK / PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT;
                kept = r.decay ? c.step.decay : 1.0f, group = (flat + r.shift) / 8;
                if (GRADIENTS == GRADIENTS_FP8)
                    c.gradient_scale_inv = a.gradients.scale_inv[u.first_entry + blockIdx.y * u.entries + r.entry];
                if (u.amax) slot = r.amax_slot;
                if (CODES) code = slot < 0 ? NULL : codes.codes + blockIdx.y * codes.stride + first;
                if (CODES && code) scale = codes.scale[blockIdx.y * codes.scale_stride + slot];
            }
        }
        if constexpr (adamw_is_coat(MOMENTS)) {
            const uint32_t ahead = i + ADAMW_STRIDE, next = begin + ahead / PARAMETER_ALIGNMENT < stop ? ahead : i;
            // clang-format off
            largest = adamw_update_8_coat<MASTER, MOMENTS == ADAMW_COAT_STOCHASTIC, GRADIENTS>(
                a, active ? i : i - PARAMETER_ALIGNMENT, next, group + i / 8, c, kept, largest, &squares, active);
            // clang-format on
        } else {
            largest = adamw_update_8<MASTER, MOMENTS, GRADIENTS, CODES>(a, i, group + i / 8, c, kept, largest, &squares,
                                                                        code, scale);
        }
    }
    if (slot >= 0) adamw_publish(&amax[slot], largest);
    return squares;
}

// blockIdx.y is the unit, blockIdx.x the block within it.
template <bool MASTER, AdamwMoments MOMENTS, AdamwGradientType GRADIENTS, bool CODES>
__device__ static inline void adamw_update_all(const AdamwUpdate &update, const AdamwUnits &u,
                                               const AdamwCodes &codes) {
    __shared__ uint32_t amax[ADAMW_MAX_SLOTS];
    AdamwTerms c = {update.step, 1, 1, false};
    if (update.control) c.factor = update.control->gradient_factor, c.skipped = update.control->nonfinite;
    if (threadIdx.x < ADAMW_MAX_SLOTS) amax[threadIdx.x] = 0;
    __syncthreads();
    const AdamwArrays &a = update.arrays;
    const float squares = !MASTER && c.step.nearest_weights
                              ? adamw_update_block<MASTER, MOMENTS, GRADIENTS, CODES, true>(amax, a, u, c, codes)
                              : adamw_update_block<MASTER, MOMENTS, GRADIENTS, CODES, false>(amax, a, u, c, codes);
    if (u.squares) {
        const double sum = adamw_block_sum<ADAMW_THREADS>((double)squares);
        if (threadIdx.x == 0) u.squares[blockIdx.y * u.squares_stride + blockIdx.x] = sum;
    }
    if (!u.amax) return;
    __syncthreads();
    if (threadIdx.x >= ADAMW_MAX_SLOTS || amax[threadIdx.x] == 0) return;
    uint32_t *slot = u.amax + blockIdx.y * u.amax_stride + threadIdx.x;
    if (amax[threadIdx.x] > *(volatile uint32_t *)slot) atomicMax(slot, amax[threadIdx.x]);
}

// Four blocks of 256 threads per SM leave 64 registers per thread. COAT's moments, fp32 moments with fp32 master
// weights, and FP8 gradients need more, so three blocks run.
HOST_DEVICE static constexpr int adamw_blocks_per_sm(bool master, AdamwMoments moments, AdamwGradientType gradients) {
    return adamw_is_coat(moments) || (master && moments == ADAMW_FP32) || gradients == GRADIENTS_FP8 ? 3 : 4;
}

template <bool MASTER, AdamwMoments MOMENTS, AdamwGradientType GRADIENTS>
static __global__ void __launch_bounds__(ADAMW_THREADS, adamw_blocks_per_sm(MASTER, MOMENTS, GRADIENTS))
    adamw_update_kernel(const __grid_constant__ AdamwUpdate update, const __grid_constant__ AdamwUnits u) {
    grid_dependency_wait();
    const AdamwCodes none = {};
    adamw_update_all<MASTER, MOMENTS, GRADIENTS, false>(update, u, none);
}

// The update that also writes codes.
template <bool MASTER, AdamwMoments MOMENTS, AdamwGradientType GRADIENTS>
static __global__ void __launch_bounds__(ADAMW_THREADS, adamw_blocks_per_sm(MASTER, MOMENTS, GRADIENTS))
    adamw_codes_kernel(const __grid_constant__ AdamwUpdate update, const __grid_constant__ AdamwUnits u,
                       const __grid_constant__ AdamwCodes codes) {
    grid_dependency_wait();
    adamw_update_all<MASTER, MOMENTS, GRADIENTS, true>(update, u, codes);
}

static inline void adamw_add_run(AdamwUnits *u, int64_t end, bool decay, int amax_slot, int64_t entry, int64_t shift) {
    AdamwRun *last = &u->runs[u->num_runs - 1];
    if (u->num_runs > 0 && amax_slot < 0 && last->amax_slot < 0 && last->decay == decay && last->shift == shift) {
        last->end = (uint32_t)(end / PARAMETER_ALIGNMENT);
        return;
    }
    if (u->num_runs == ADAMW_MAX_RUNS)
        die("a layer, or the part outside the layers, has more than %d ranges of parameters that differ in weight "
            "decay, amax slot or shift",
            ADAMW_MAX_RUNS);
    if (amax_slot >= ADAMW_MAX_SLOTS) die("a layer has more than %d FP8 weights", ADAMW_MAX_SLOTS);
    if (end % PARAMETER_ALIGNMENT)
        die("tensors of one unit meet at element %lld, not at a multiple of PARAMETER_ALIGNMENT", (long long)end);
    u->runs[u->num_runs++] = AdamwRun{(uint32_t)(end / PARAMETER_ALIGNMENT), decay, amax_slot, (int)entry, shift};
}

// True if a tensor is in the group of the tensor before it (adamw_units).
static inline bool adamw_joins(const Parameter *p, bool split) {
    return p->flags & PARAM_JOINED && !(split && p->flags & PARAM_FP8);
}

// Describes this rank's slices of unit `l` (ROOT: the root unit) and of the count - 1 layers that follow. A segment is
// a sequence of groups of tensors (fused linear layers form one group), each cut to this rank's slice. Neighbours that
// have no amax slot and equal decay and shift form one run. The last group takes the padding behind it. `split`:
// each matrix of a layer forms a group of its own, because its FP8 gradient has its own scale.
static inline AdamwUnits adamw_units(const ParameterTable *t, const ShardPlan *plan, int64_t l, int64_t count,
                                     bool split) {
    AdamwUnits u = {};
    u.first = shard_begin(plan, l), u.size = u.stride = shard_elements(plan, l), u.count = count;
    u.flat = layer_offset(t, l), u.flat_size = l == ROOT ? t->root_size : t->layer_size;
    while (t->entries[u.first_entry].layer != l) u.first_entry++;
    for (int64_t i = u.first_entry; i < t->count && t->entries[i].layer == l; i++) u.entries++;
    int slots = 0;
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = segment_slice(t, plan, l, k);
        // The slice begins at element slice_begin of the segment, and at element in_unit of this rank's part of the
        // unit.
        const int64_t slice_begin = plan->shard_rank * g.slice, in_unit = g.shard - u.first;
        const int64_t shift = g.flat - u.flat + slice_begin - in_unit;
        for (int64_t i = 0; i < t->count; i++) {
            const Parameter *p = &t->entries[i];
            if (p->layer != l || parameter_segment(p) != k || adamw_joins(p, split)) continue;
            int64_t end = plan->shard_size * g.slice;  // end of the group in the segment, where the next group begins
            for (int64_t j = t->count - 1; j > i; j--) {
                const Parameter *next = &t->entries[j];
                if (next->layer == l && parameter_segment(next) == k && !adamw_joins(next, split))
                    end = next->offset - g.flat;
            }
            if (p->flags & PARAM_FP8) slots += !(p->flags & PARAM_JOINED);
            const int slot = p->flags & PARAM_FP8 ? slots - 1 : -1;
            const int64_t begin_here = max_i64(p->offset - g.flat, slice_begin),
                          end_here = min_i64(end, slice_begin + g.slice);
            if (begin_here < end_here)
                adamw_add_run(&u, in_unit + end_here - slice_begin, p->flags & PARAM_DECAY, slot, i - u.first_entry,
                              shift);
        }
    }
    return u;
}

// Returns how many blocks update a unit of `size` elements.
static inline unsigned adamw_blocks(int64_t size) { return grid_size(size, ADAMW_BLOCK); }

// Returns how many blocks update the segments of unit l before `segment`, if the plan is in_blocks.
static inline int64_t adamw_blocks_before(const ShardPlan *plan, int64_t l, int segment) {
    int64_t blocks = 0;
    for (int k = 0; k < segment; k++) blocks += ceil_div(slice_sizes(plan, l)[k], ADAMW_BLOCK);
    return blocks;
}

// Returns how many blocks update unit l. If the plan is in_blocks, each segment has blocks of its own.
static inline int64_t adamw_unit_blocks(const ShardPlan *plan, int64_t l) {
    return plan->in_blocks ? adamw_blocks_before(plan, l, NUM_SEGMENTS) : adamw_blocks(shard_elements(plan, l));
}

// Returns the index of unit l's first sum among the sums of squares; each block of the update has one sum.
static inline int64_t adamw_first_block(const ShardPlan *plan, int64_t l) {
    return l == ROOT ? 0 : adamw_unit_blocks(plan, ROOT) + l * adamw_unit_blocks(plan, 0);
}

// Returns how many sums of squares the update of this rank's shard writes to its workspace.
static inline int64_t adamw_update_sums(const ParameterTable *t, const ShardPlan *plan) {
    return adamw_first_block(plan, t->num_layers);
}

// Returns how many sums the blocks of all ranks have: 0 if the plan is not in_blocks, or if one rank has them all.
static inline int64_t adamw_sums_of_ranks(const ParameterTable *t, const ShardPlan *plan) {
    const ShardPlan whole = shard_plan_of(t, 1, 0, true);
    return plan->in_blocks && plan->shard_size > 1 ? adamw_update_sums(t, &whole) : 0;
}

// Returns the bytes of device workspace that a step needs for sums of squares.
static inline int64_t adamw_workspace_bytes(const ParameterTable *t, const ShardPlan *plan) {
    const int64_t norm = ADAMW_NORM_BLOCKS + ADAMW_FP8_BLOCKS * GRADIENT_FP8_MOST * t->num_layers;
    return (max_i64(norm, adamw_update_sums(t, plan)) + adamw_sums_of_ranks(t, plan) + ADAMW_SUM_BLOCKS) *
           (int64_t)sizeof(double);
}

template <bool MASTER, AdamwGradientType GRADIENTS>
static inline void adamw_launch_kernel(const AdamwUpdate *w, const AdamwUnits *u, const AdamwCodes *codes,
                                       cudaStream_t stream) {
    const AdamwMoments moments = w->arrays.moments;
    const dim3 grid(adamw_blocks(u->size), (unsigned)u->count);
    const auto with_codes = moments == ADAMW_FP32 ? adamw_codes_kernel<MASTER, ADAMW_FP32, GRADIENTS>
                                                  : adamw_codes_kernel<MASTER, ADAMW_BF16, GRADIENTS>;
    if (codes) return CUDA_LAUNCH(with_codes, grid, ADAMW_THREADS, 0, stream, *w, *u, *codes);
    const auto kernel = moments == ADAMW_COAT   ? adamw_update_kernel<MASTER, ADAMW_COAT, GRADIENTS>
                        : moments == ADAMW_FP32 ? adamw_update_kernel<MASTER, ADAMW_FP32, GRADIENTS>
                        : moments == ADAMW_BF16 ? adamw_update_kernel<MASTER, ADAMW_BF16, GRADIENTS>
                                                : adamw_update_kernel<MASTER, ADAMW_COAT_STOCHASTIC, GRADIENTS>;
    CUDA_LAUNCH(kernel, grid, ADAMW_THREADS, 0, stream, *w, *u);
}

// Returns the type of the gradients of one launch (AdamwLaunch).
static inline AdamwGradientType adamw_gradient_type(AdamwGradients g) {
    return g.codes ? GRADIENTS_FP8 : g.fp32_data ? GRADIENTS_FP32 : GRADIENTS_BF16;
}

// Launches one update. codes: of its launch, with bf16 or fp32 moments; NULL: none are written.
static inline void adamw_launch_codes(const AdamwUpdate *w, const AdamwUnits *u, const AdamwCodes *codes,
                                      cudaStream_t stream) {
    const AdamwArrays *a = &w->arrays;
    const void *pointers[] = {
        a->weights,        a->master, a->exp_avg, a->exp_avg_sq, a->gradients.bf16_data, a->gradients.fp32_data,
        a->gradients.codes};
    for (int i = 0; i < 7; i++) require_aligned16(pointers[i], "adamw", "an array");
    const AdamwGradientType gradients = adamw_gradient_type(a->gradients);
    if (a->master && gradients == GRADIENTS_FP8) adamw_launch_kernel<true, GRADIENTS_FP8>(w, u, codes, stream);
    else if (a->master && gradients == GRADIENTS_FP32) adamw_launch_kernel<true, GRADIENTS_FP32>(w, u, codes, stream);
    else if (a->master) adamw_launch_kernel<true, GRADIENTS_BF16>(w, u, codes, stream);
    else if (gradients == GRADIENTS_FP8) adamw_launch_kernel<false, GRADIENTS_FP8>(w, u, codes, stream);
    else if (gradients == GRADIENTS_FP32) adamw_launch_kernel<false, GRADIENTS_FP32>(w, u, codes, stream);
    else adamw_launch_kernel<false, GRADIENTS_BF16>(w, u, codes, stream);
}

static inline void adamw_launch(const AdamwUpdate *w, const AdamwUnits *u, cudaStream_t stream) {
    adamw_launch_codes(w, u, NULL, stream);
}

// Returns the gradients with their pointers moved by `elements`, forward or, if that is below zero, back.
static inline AdamwGradients adamw_shift_gradients(AdamwGradients g, int64_t elements) {
    if (g.bf16_data) g.bf16_data = (const bf16 *)((intptr_t)g.bf16_data + elements * (intptr_t)sizeof(bf16));
    if (g.fp32_data) g.fp32_data = (const float *)((intptr_t)g.fp32_data + elements * (intptr_t)sizeof(float));
    if (g.codes) g.codes = (const uint8_t *)((intptr_t)g.codes + elements);
    return g;
}

// Returns the arguments of the update of this rank's part of unit l, a layer or ROOT, and of the count - 1 layers that
// follow it, and writes *u. Their gradients begin at element first_gradient of their array.
static inline AdamwUpdate adamw_update_of(const AdamwUpdate *w, const ParameterTable *t, const ShardPlan *plan,
                                          int64_t l, int64_t count, int64_t first_gradient, AdamwUnits *u) {
    AdamwUpdate update = *w;
    *u = adamw_units(t, plan, l, count, w->arrays.gradients.codes != NULL);
    // So one index serves the gradients and the other arrays, which takes fewer registers than two.
    update.arrays.gradients = adamw_shift_gradients(w->arrays.gradients, first_gradient - u->first);
    u->amax = w->amax && l != ROOT ? w->amax + l * w->amax_stride : NULL, u->amax_stride = w->amax_stride;
    u->squares = w->squares ? w->squares + adamw_first_block(plan, l) : NULL;
    u->squares_stride = adamw_unit_blocks(plan, l);
    return update;
}

// Returns a part of each of the units: `size` elements from element `begin` of the unit on, both multiples of
// PARAMETER_ALIGNMENT. With unit->squares, `begin` is a multiple of ADAMW_BLOCK, or the caller sets the part's squares.
static inline AdamwUnits adamw_part(const AdamwUnits *unit, int64_t begin, int64_t size) {
    AdamwUnits u = *unit;
    u.first += begin, u.size = size, u.flat += begin, u.num_runs = 0;
    if (u.squares) u.squares += begin / ADAMW_BLOCK;
    for (int i = 0; i < unit->num_runs; i++) {
        AdamwRun r = unit->runs[i];
        const int64_t end = min_i64((int64_t)r.end * PARAMETER_ALIGNMENT - begin, size);
        if (end <= 0 || (u.num_runs && u.runs[u.num_runs - 1].end * (int64_t)PARAMETER_ALIGNMENT == size)) continue;
        r.end = (uint32_t)(end / PARAMETER_ALIGNMENT);
        u.runs[u.num_runs++] = r;
    }
    return u;
}

// One launch of an update. All its gradients have one type. l is its first layer, or ROOT.
typedef struct {
    AdamwUpdate update;
    AdamwUnits units;
    int64_t l;
} AdamwLaunch;

// True if each segment has a launch, because it has blocks of its own whose squares are summed.
static inline bool adamw_splits(const AdamwUpdate *w, const ShardPlan *plan) { return w->squares && plan->in_blocks; }

// Returns how many launches update unit l and the count - 1 layers that follow it. If gradients of matrices are FP8,
// the vectors of each layer have a launch of their own, and the matrices of all layers have one together. One launch
// for the vectors of all layers would need more registers, because their gradients lie closer together than their
// weights.
static inline int64_t adamw_num_launches(const AdamwUpdate *w, const ShardPlan *plan, int64_t l, int64_t count) {
    if (adamw_splits(w, plan)) return SEGMENT_EMBEDDING + (slice_sizes(plan, l)[SEGMENT_EMBEDDING] > 0);
    return w->arrays.gradients.codes && l != ROOT ? count + 1 : 1;
}

// Returns launch `index` of the update of this rank's part of unit l and of the count - 1 layers that follow it
// (adamw_update_of).
static inline AdamwLaunch adamw_launch_of(const AdamwUpdate *w, const ParameterTable *t, const ShardPlan *plan,
                                          int64_t l, int64_t count, int64_t first_gradient, int64_t index) {
    AdamwLaunch launch = {};
    AdamwGradients *g = &launch.update.arrays.gradients;
    const GradientFp8Layout *a = w->arrays.gradients.layout;
    if (adamw_splits(w, plan)) {
        const int segment = (int)index;
        launch.l = l;
        launch.update = adamw_update_of(w, t, plan, l, count, first_gradient, &launch.units);
        launch.units =
            adamw_part(&launch.units, segment_begin(slice_sizes(plan, l), segment), slice_sizes(plan, l)[segment]);
        launch.units.squares = w->squares + adamw_first_block(plan, l) + adamw_blocks_before(plan, l, segment);
        return launch;
    }
    const bool split = adamw_num_launches(w, plan, l, count) > 1, matrices = split && index == count;
    const int64_t vectors = split && !matrices ? index : 0;  // the layer, counted from l
    launch.l = l + vectors;
    launch.update = adamw_update_of(w, t, plan, launch.l, split && !matrices ? 1 : count,
                                    first_gradient + (split ? vectors * a->vectors : 0), &launch.units);
    if (!matrices) g->codes = NULL;
    if (split && !matrices) launch.units = adamw_part(&launch.units, 0, a->vectors);
    if (!matrices) return launch;
    launch.units = adamw_part(&launch.units, a->vectors, a->matrices);
    launch.units.gradient_gap = a->vectors;
    *g = w->arrays.gradients;
    g->bf16_data = NULL;
    *g = adamw_shift_gradients(*g, l * a->matrices - launch.units.first);
    return launch;
}

// Updates this rank's part of unit l and of the count - 1 layers that follow it (adamw_update_of).
static inline void adamw_update_units(const AdamwUpdate *w, const ParameterTable *t, const ShardPlan *plan, int64_t l,
                                      int64_t count, int64_t first_gradient, cudaStream_t stream) {
    for (int64_t i = 0; i < adamw_num_launches(w, plan, l, count); i++) {
        const AdamwLaunch launch = adamw_launch_of(w, t, plan, l, count, first_gradient, i);
        adamw_launch(&launch.update, &launch.units, stream);
    }
}

// adamw_update_units of layers, which also writes codes. `all`: those of this rank's slices of the matrices of all
// layers, and their scales, from layer 0 on.
static inline void adamw_update_coded(const AdamwUpdate *w, const AdamwCodes *all, const ParameterTable *t,
                                      const ShardPlan *plan, int64_t l, int64_t count, int64_t first_gradient,
                                      cudaStream_t stream) {
    for (int64_t i = 0; i < adamw_num_launches(w, plan, l, count); i++) {
        const AdamwLaunch launch = adamw_launch_of(w, t, plan, l, count, first_gradient, i);
        const ShardSegment matrices = segment_slice(t, plan, launch.l, SEGMENT_MATRICES);
        AdamwCodes codes = *all;
        codes.codes = (uint8_t *)((intptr_t)all->codes + launch.l * all->stride + launch.units.first - matrices.shard);
        codes.scale += launch.l * all->scale_stride;
        adamw_launch_codes(&launch.update, &launch.units, &codes, stream);
    }
}

// Returns the bytes that an update of n elements moves: it reads the gradient, and reads and writes moments and
// weights. With one scale for each tensor (adamw_msamp.cuh) a pass before that reads gradient, moments and FP16
// masters. If some gradients are FP8, all elements count as if theirs were. Likewise, with FP16 masters each element
// counts as if it had a bf16 weight too. Scales and the words of COAT's groups do not count.
static inline int64_t adamw_bytes(const AdamwArrays *a, int64_t n) {
    const int64_t gradient = a->gradients.codes       ? 1
                             : a->gradients.fp32_data ? 4
                                                      : 2,
                  moments = adamw_moments_bytes(a->moments), fp16 = a->scaled.master ? 2 : 0;
    const int64_t first_pass = a->scaled.scales ? gradient + moments + fp16 : 0;
    return n * (first_pass + gradient + 2 * moments + (a->master ? 10 : fp16 ? 6 : 4));
}

// Writes *squares (device) = sum of squares of this rank's gradients, from the workspace that an update of the root
// unit and all layers has filled.
static inline void adamw_updated_squares(double *squares, const AdamwUpdate *w, const ParameterTable *t,
                                         const ShardPlan *plan, cudaStream_t stream) {
    const int64_t count = adamw_update_sums(t, plan);
    adamw_sum(squares, w->squares + count, w->squares, count, stream);
}

// How many blocks and elements the root and each layer have in this rank's shard. A block of an update has one sum of
// squares. Blocks begin anew behind each of `ends`, elements of a unit behind its first segments.
typedef struct {
    int64_t root_blocks, layer_blocks, root_elements, layer_elements;
    int64_t root_ends[NUM_SEGMENTS - 1], layer_ends[NUM_SEGMENTS - 1];
    BackwardOrder order;
} AdamwBlocks;

// Returns the first element of block b of a unit.
__device__ static inline int64_t adamw_block_in_unit(const int64_t ends[NUM_SEGMENTS - 1], int64_t b) {
    int64_t begin = 0;
    for (int k = 0; k < NUM_SEGMENTS - 1; k++) {
        const int64_t blocks = (ends[k] - begin + ADAMW_BLOCK - 1) / ADAMW_BLOCK;
        if (b < blocks) break;
        b -= blocks, begin = ends[k];
    }
    return begin + b * ADAMW_BLOCK;
}

// Returns the first element of block b in this rank's flat shard arrays.
__device__ static inline int64_t adamw_block_begin(const AdamwBlocks &at, int64_t b) {
    const int64_t in_layers = b - at.root_blocks;
    if (in_layers < 0) return adamw_block_in_unit(at.root_ends, b);
    return at.root_elements + in_layers / at.layer_blocks * at.layer_elements +
           adamw_block_in_unit(at.layer_ends, in_layers % at.layer_blocks);
}

// If the step is not taken (adamw_takes), writes the largest norm of a block of ADAMW_BLOCK elements to
// control->largest, and to control->position the first block, in backward order, whose norm is large beside it
// (adamw_large). adamw_find_large does this with magnitudes of single gradients. Runs as one thread block.
static __global__ void __launch_bounds__(ADAMW_NORM_THREADS)
    adamw_find_block_kernel(AdamwControl *control, const double *squares, int64_t count, AdamwBlocks at) {
    grid_dependency_wait();
    if (!control->nonfinite) return;
    __shared__ uint32_t largest;
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    for (int64_t b = threadIdx.x; b < count; b += ADAMW_NORM_THREADS)
        atomicMax(&largest, adamw_magnitude((float)sqrt(squares[b])));
    __syncthreads();
    control->largest = largest;
    for (int64_t b = threadIdx.x; b < count; b += ADAMW_NORM_THREADS)
        if (adamw_magnitude((float)sqrt(squares[b])) >= adamw_large(largest))
            atomicMin(&control->position, (unsigned long long)backward_position(at.order, adamw_block_begin(at, b)));
}

// After adamw_norm, if the step is not taken: finds which block of the update was the first, in backward order, with
// a large norm. The gradients themselves are gone, but w->squares has the sum of squares of each block.
static inline void adamw_locate_block(AdamwControl *control, const AdamwUpdate *w, const ParameterTable *t,
                                      const ShardPlan *plan, cudaStream_t stream) {
    AdamwBlocks at = {adamw_first_block(plan, 0),
                      adamw_unit_blocks(plan, 0),
                      shard_elements(plan, ROOT),
                      shard_elements(plan, 0),
                      {},
                      {},
                      shard_backward_order(t, plan)};
    for (int k = 0; plan->in_blocks && k < NUM_SEGMENTS - 1; k++)
        at.root_ends[k] = segment_begin(plan->root_slices, k + 1),
        at.layer_ends[k] = segment_begin(plan->layer_slices, k + 1);
    CUDA_LAUNCH(adamw_find_block_kernel, 1, ADAMW_NORM_THREADS, 0, stream, control, w->squares,
                adamw_update_sums(t, plan), at);
}

#endif
