// AdamW with one scale for each tensor: MS-AMP's moments, FP16 master weights, or both (msamp.h).
//
// A new scale follows from the amax of the tensor's new values, so an update has two passes. The first computes the new
// values and finds their amaxes; the caller takes the maxima over the ranks that share the tensors. The second computes
// the new values again, from the same stored ones, and stores them with the new scales.
//
// Bytes per element with bf16 weights and gradients, and MS-AMP's moments: the first pass reads 5, the second reads 7
// and writes 5. With FP16 masters the first reads 7, and the second writes 7, or 5 where there are no bf16 weights. FP8
// gradients save 1 in each pass.
#ifndef LLMC_ADAMW_MSAMP_CUH
#define LLMC_ADAMW_MSAMP_CUH

#include "adamw.cuh"
#include "fp16_weights.cuh"

typedef enum { MSAMP_WEIGHTS_BF16, MSAMP_WEIGHTS_FP32, MSAMP_WEIGHTS_FP16 } MsampWeights;

// This rank's part of a tensor: elements [begin, end), counted from AdamwUnits.first.
typedef struct {
    int64_t begin, end;
    bool decay;
    bool has_bf16;  // the part has bf16 weights (weights_have)
    int tensor;     // index among the tensors of the unit
    int amax_slot;  // amax slot of the fused FP8 weight; -1: none
    int64_t shift;  // index in the unit of the flat parameter array minus index in this rank's part of the unit
} MsampRun;

enum { MSAMP_MAX_TENSORS = 16 };

// `count` units, as AdamwUnits. The tensors of unit u are num_tensors entries of the parameter table, from entry
// first_tensor + u * num_tensors on.
typedef struct {
    AdamwUnits units;  // its own runs are not used
    // Index of an element in the array of bf16 weights minus its index in the flat shard arrays: bf16_shift in the
    // first unit, and bf16_shift_step more in each later unit.
    int64_t bf16_shift, bf16_shift_step;
    int first_tensor, num_tensors, num_runs;
    MsampRun runs[MSAMP_MAX_TENSORS];
} MsampUnits;

// The tensor that a thread works on. The arrays have MSAMP_STATES entries.
typedef struct {
    float scale_inv[MSAMP_STATES], new_scale[MSAMP_STATES];
    float new_master_scale_inv;
    float gradient_scale_inv;  // for FP8 gradients
    bool decay;
    bf16 *weights;  // the bf16 weight of element i of the flat shard arrays is weights[i]; NULL: there are none
} MsampTensor;

// The weights and moments of 8 elements.
typedef struct {
    float weight[8];
    MsampPair moments[8];
} Msamp8;

// Returns the bits of x in FP16. Finite values saturate, as in fp16_from_float. Here infinity saturates too, and NaN
// becomes -FP16_MAX.
__device__ static inline uint32_t msamp_half_bits(float x) {
    return __half_as_ushort(__float2half_rn(fminf(fmaxf(x, -FP16_MAX), FP16_MAX)));
}

// Returns the bits of a weight in FP16, rounded as the step says. hash: of the weight's group of 8, whose j-th it is.
__device__ static inline uint32_t msamp_weight_bits(float x, const AdamwStep &step, uint32_t hash, uint32_t j) {
    if (step.nearest_weights) return msamp_half_bits(x);
    return fp16_from_float_stochastic(fminf(fmaxf(x, -FP16_MAX), FP16_MAX), adamw_random_member(&step, hash, j).weight);
}

__device__ static inline void msamp_store_halves(fp16_bits *p, const uint32_t bits[8]) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; k++) words[k] = bits[2 * k] | bits[2 * k + 1] << 16;
    *(uint4 *)p = make_uint4(words[0], words[1], words[2], words[3]);
}

// Loads the stored moments of 8 elements and, if with_weights, their weights.
template <MsampWeights WEIGHTS, bool FP32_MOMENTS>
__device__ static inline void msamp_load(Msamp8 *e, const AdamwArrays &a, int64_t i, const MsampTensor &t,
                                         bool with_weights) {
    float m[8], v[8];
    if (FP32_MOMENTS) {
        adamw_load<true>(m, a.exp_avg, i), adamw_load<true>(v, a.exp_avg_sq, i);
    } else {
        fp8x8_to_floats(m, *(const uint2 *)((const uint8_t *)a.exp_avg + i));
        fp16x8_load(v, (const fp16_bits *)a.exp_avg_sq + i);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) e->moments[j] = MsampPair{m[j], v[j]};
    if (!with_weights) return;
    if (WEIGHTS == MSAMP_WEIGHTS_FP32) adamw_load<true>(e->weight, a.master, i);
    if (WEIGHTS == MSAMP_WEIGHTS_BF16) adamw_load<false>(e->weight, t.weights, i);
    if (WEIGHTS == MSAMP_WEIGHTS_FP16) {
        fp16x8_load(e->weight, a.scaled.master + i);
#pragma unroll
        for (int j = 0; j < 8; j++) e->weight[j] = __fmul_rn(e->weight[j], t.scale_inv[MSAMP_MASTER]);
    }
}

// Updates one element, with the functions that the CPU uses. A gradient that is not finite counts as zero. So it does
// not spoil the weight, even if the norm is computed after the update.
template <bool FP32_MOMENTS>
__device__ static inline void msamp_update_one(float *weight, MsampPair *moments, float gradient, const MsampTensor &t,
                                               const AdamwUpdate &u) {
    if (adamw_magnitude(gradient) == 0x7f800000u) gradient = 0;
    if (FP32_MOMENTS) {
        AdamwElement e = {*weight, moments->exp_avg, moments->exp_avg_sq};
        e = adamw_update(e, gradient, t.decay, &u.step);
        *weight = e.weight, moments->exp_avg = e.exp_avg, moments->exp_avg_sq = e.exp_avg_sq;
    } else {
        const MsampPair scale_inv = {t.scale_inv[MSAMP_EXP_AVG], t.scale_inv[MSAMP_EXP_AVG_SQ]};
        *moments = msamp_moments(*moments, scale_inv, gradient, &u.msamp);
        *weight = msamp_weight(*weight, *moments, t.decay, &u.msamp);
    }
}

// Returns the largest magnitude of 8 values, as fp32 bits.
__device__ static inline uint32_t msamp_largest(const float x[8]) {
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) largest = max(largest, float_bits(fabsf(x[j])));
    return largest;
}

// Returns the largest magnitude, as fp32 bits, of 8 stored values from which FP8 weights are cast: bf16 weights or,
// where there are none, the values that FP16 masters stand for.
template <MsampWeights WEIGHTS>
__device__ static inline uint32_t msamp_stored_magnitude(const AdamwArrays &a, int64_t i, const MsampTensor &t) {
    if (WEIGHTS != MSAMP_WEIGHTS_FP16 || t.weights) return amax_bits(amax_update(0, bf16x8_load(t.weights + i)));
    float weight[8];
    fp16x8_load(weight, a.scaled.master + i);
    return float_bits(__fmul_rn(float_from_bits(msamp_largest(weight)), t.scale_inv[MSAMP_MASTER]));
}

// Stores 8 weights, whose flat indices begin with 8 * group. Returns the largest magnitude of the stored weights, as
// fp32 bits.
template <MsampWeights WEIGHTS>
__device__ static inline uint32_t msamp_store_weights(const AdamwArrays &a, int64_t i, int64_t group, float weight[8],
                                                      const MsampTensor &t, const AdamwStep &step) {
    Bf16x8 rounded;
    uint32_t bits[8];
    const uint32_t hash = adamw_random_group(step.key, group);
    if (WEIGHTS == MSAMP_WEIGHTS_BF16) {
#pragma unroll
        for (int j = 0; j < 8; j++) bits[j] = adamw_round(weight[j], adamw_random_member(&step, hash, j).weight);
#pragma unroll
        for (int k = 0; k < 4; k++) rounded.word[k] = bits[2 * k] | bits[2 * k + 1] << 16;
    } else {
        if (WEIGHTS == MSAMP_WEIGHTS_FP32) {
            adamw_store_fp32(a.master, i, weight);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                bits[j] = msamp_weight_bits(__fmul_rn(weight[j], t.new_scale[MSAMP_MASTER]), step, hash, j);
                weight[j] = __fmul_rn(half_bits_to_float(bits[j]), t.new_master_scale_inv);
            }
            msamp_store_halves(a.scaled.master + i, bits);
            if (!t.weights) return msamp_largest(weight);
        }
        rounded = bf16x8_pack(weight);
    }
    bf16x8_store(t.weights + i, rounded);
    return amax_bits(amax_update(0, rounded));
}

template <bool FP32_MOMENTS>
__device__ static inline void msamp_store_moments(const AdamwArrays &a, int64_t i, const MsampPair moments[8],
                                                  const MsampTensor &t) {
    float m[8], v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        m[j] = FP32_MOMENTS ? moments[j].exp_avg : __fmul_rn(moments[j].exp_avg, t.new_scale[MSAMP_EXP_AVG]);
        v[j] = FP32_MOMENTS ? moments[j].exp_avg_sq : __fmul_rn(moments[j].exp_avg_sq, t.new_scale[MSAMP_EXP_AVG_SQ]);
    }
    if (FP32_MOMENTS) {
        adamw_store_fp32(a.exp_avg, i, m), adamw_store_fp32(a.exp_avg_sq, i, v);
    } else {
        *(uint2 *)((uint8_t *)a.exp_avg + i) =
            make_uint2(fp8x4_from_floats<FP8_E4M3>(m), fp8x4_from_floats<FP8_E4M3>(m + 4));
        uint32_t bits[8];
#pragma unroll
        for (int j = 0; j < 8; j++) bits[j] = msamp_half_bits(v[j]);
        msamp_store_halves((fp16_bits *)a.exp_avg_sq + i, bits);
    }
}

// Raises the amaxes of the states to the magnitudes of 8 new values.
template <MsampWeights WEIGHTS>
__device__ static inline void msamp_raise(uint32_t largest[MSAMP_STATES], const Msamp8 &e) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        largest[MSAMP_EXP_AVG] = max(largest[MSAMP_EXP_AVG], float_bits(fabsf(e.moments[j].exp_avg)));
        largest[MSAMP_EXP_AVG_SQ] = max(largest[MSAMP_EXP_AVG_SQ], float_bits(e.moments[j].exp_avg_sq));
        if (WEIGHTS == MSAMP_WEIGHTS_FP16)
            largest[MSAMP_MASTER] = max(largest[MSAMP_MASTER], float_bits(fabsf(e.weight[j])));
    }
}

// Processes 8 elements, whose gradients begin at element `gradient`. The first pass raises largest[MSAMP_STATES] to the
// magnitudes of their new values, the second (STORE) stores them and raises largest[0] to the magnitudes of the stored
// weights, all as fp32 bits. Adds the squared gradients to *squares.
template <MsampWeights WEIGHTS, bool FP32_MOMENTS, AdamwGradientType GRADIENTS, bool STORE>
__device__ static inline void msamp_update_8(const AdamwUpdate &u, int64_t i, int64_t gradient, int64_t group,
                                             const MsampTensor &t, float factor, uint32_t largest[MSAMP_STATES],
                                             float *squares) {
    const AdamwArrays &a = u.arrays;
    Msamp8 e;
    float g[8];
    adamw_load_gradients<GRADIENTS>(g, a.gradients, gradient, t.gradient_scale_inv);
    msamp_load<WEIGHTS, FP32_MOMENTS>(&e, a, i, t, STORE || WEIGHTS == MSAMP_WEIGHTS_FP16);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        *squares = __fmaf_rn(g[j], g[j], *squares);
        msamp_update_one<FP32_MOMENTS>(&e.weight[j], &e.moments[j], __fmul_rn(g[j], factor), t, u);
    }
    if (STORE) {
        msamp_store_moments<FP32_MOMENTS>(a, i, e.moments, t);
        largest[0] = max(largest[0], msamp_store_weights<WEIGHTS>(a, i, group, e.weight, t, u.step));
    } else {
        msamp_raise<WEIGHTS>(largest, e);
    }
}

// Returns what threads need of the tensor of a run of unit number `unit`.
template <AdamwGradientType GRADIENTS, bool STORE>
__device__ static inline MsampTensor msamp_tensor(const AdamwArrays &a, const MsampUnits &u, const MsampRun &run,
                                                  int64_t unit) {
    const AdamwScaled &s = a.scaled;
    const int64_t index = u.first_tensor + unit * u.num_tensors + run.tensor;
    const int64_t shift = u.bf16_shift + unit * u.bf16_shift_step;
    MsampTensor t;
    t.decay = run.decay;
    t.weights = run.has_bf16 ? (bf16 *)((intptr_t)a.weights + shift * (intptr_t)sizeof(bf16)) : NULL;
    t.gradient_scale_inv = GRADIENTS == GRADIENTS_FP8 ? a.gradients.scale_inv[index] : 1;
#pragma unroll
    for (int state = 0; state < MSAMP_STATES; state++) {
        t.scale_inv[state] = 1 / s.scales[state * s.tensors + index];
        if (STORE) t.new_scale[state] = s.new_scales[state * s.tensors + index];
    }
    if (STORE) t.new_master_scale_inv = 1 / t.new_scale[MSAMP_MASTER];
    return t;
}

// Amaxes that a block finds. The first pass finds MSAMP_STATES amaxes for each tensor. The second pass finds one amax
// for each FP8 weight.
typedef struct {
    uint32_t value[MSAMP_MAX_TENSORS * MSAMP_STATES];
} MsampAmaxes;

// Raises the block's amaxes to `largest`, the amaxes that a thread has found in this run. Clears `largest`.
template <bool STORE>
__device__ static inline void msamp_publish(MsampAmaxes *shared, const MsampRun &run, uint32_t largest[MSAMP_STATES]) {
    if (STORE && run.amax_slot >= 0) atomicMax(&shared->value[run.amax_slot], largest[0]);
#pragma unroll
    for (int state = 0; state < MSAMP_STATES; state++) {
        if (!STORE && largest[state]) atomicMax(&shared->value[run.tensor * MSAMP_STATES + state], largest[state]);
        largest[state] = 0;
    }
}

// Processes a block's elements of one unit, at most ADAMW_BLOCK; a thread takes 8 at a time. Returns the sum of squares
// of this thread's gradients. In a skipped step the first pass does nothing and returns 0, and the second pass only
// adds the squares and finds the magnitudes of the stored weights.
template <MsampWeights WEIGHTS, bool FP32_MOMENTS, AdamwGradientType GRADIENTS, bool STORE>
__device__ static inline float msamp_update_block(const AdamwUpdate &w, const MsampUnits &u, MsampAmaxes *amaxes) {
    const bool skipped = w.control && w.control->nonfinite;
    const float factor = w.control ? w.control->gradient_factor : 1;
    const int64_t begin = blockIdx.x * (int64_t)ADAMW_BLOCK,
                  first = u.units.first + blockIdx.y * u.units.stride + begin,
                  gradients = GRADIENTS == GRADIENTS_FP8 ? first - blockIdx.y * u.units.gradient_gap : first,
                  unit = u.units.flat + blockIdx.y * u.units.flat_size + begin;
    uint32_t largest[MSAMP_STATES] = {}, end = 0;
    MsampTensor tensor = {};
    int run = 0;
    float squares = 0;
    for (uint32_t i = threadIdx.x * 8; i < ADAMW_BLOCK; i += ADAMW_STRIDE) {
        if (i >= end) {
            if (end) msamp_publish<STORE>(amaxes, u.runs[run], largest);
            while (run < u.num_runs && begin + i >= u.runs[run].end) run++;
            end = 0;
            if (run == u.num_runs) break;
            end = (uint32_t)min(u.runs[run].end - begin, (int64_t)ADAMW_BLOCK);
            tensor = msamp_tensor<GRADIENTS, STORE>(w.arrays, u, u.runs[run], blockIdx.y);
        }
        if (begin + i < u.runs[run].begin) continue;  // padding
        if (!skipped) {
            msamp_update_8<WEIGHTS, FP32_MOMENTS, GRADIENTS, STORE>(
                w, first + i, gradients + i, (unit + i + u.runs[run].shift) / 8, tensor, factor, largest, &squares);
        } else if (STORE) {
            squares =
                adamw_add_squares<GRADIENTS>(squares, w.arrays.gradients, gradients + i, tensor.gradient_scale_inv);
            largest[0] = max(largest[0], msamp_stored_magnitude<WEIGHTS>(w.arrays, first + i, tensor));
        }
    }
    if (end) msamp_publish<STORE>(amaxes, u.runs[run], largest);
    return squares;
}

// blockIdx.y is the unit, blockIdx.x the block within it.
template <MsampWeights WEIGHTS, bool FP32_MOMENTS, AdamwGradientType GRADIENTS, bool STORE>
static __global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_msamp_kernel(const __grid_constant__ AdamwUpdate w, const __grid_constant__ MsampUnits u) {
    grid_dependency_wait();
    __shared__ MsampAmaxes amaxes;
    const AdamwScaled &s = w.arrays.scaled;
    const int found = STORE ? (int)ADAMW_MAX_SLOTS : u.num_tensors * MSAMP_STATES;
    uint32_t *to = STORE ? u.units.amax : s.amaxes + (u.first_tensor + blockIdx.y * u.num_tensors) * MSAMP_STATES;
    if (STORE && to) to += blockIdx.y * u.units.amax_stride;
    if (threadIdx.x < found) amaxes.value[threadIdx.x] = 0;
    __syncthreads();
    const float squares = msamp_update_block<WEIGHTS, FP32_MOMENTS, GRADIENTS, STORE>(w, u, &amaxes);
    if (STORE && u.units.squares) {
        const double sum = adamw_block_sum<ADAMW_THREADS>((double)squares);
        if (threadIdx.x == 0) u.units.squares[blockIdx.y * u.units.squares_stride + blockIdx.x] = sum;
    }
    __syncthreads();
    if (!to || threadIdx.x >= found) return;
    const uint32_t amax = amaxes.value[threadIdx.x];
    if (amax > *(volatile uint32_t *)(to + threadIdx.x)) atomicMax(to + threadIdx.x, amax);
}

// Computes the new scales of `count` tensors from their amaxes: blockIdx.y is the state. In a skipped step the new
// scales are the old ones. `keep`: master weights get a new scale only if theirs is still 0.
static __global__ void msamp_scales_kernel(AdamwScaled s, int64_t first, int64_t count, const AdamwControl *control,
                                           bool keep) {
    grid_dependency_wait();
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    const int state = blockIdx.y;
    if (i >= count) return;
    const float amax = float_from_bits(s.amaxes[(first + i) * MSAMP_STATES + state]);
    const float scale = s.scales[state * s.tensors + first + i];
    const float fp_max = state == MSAMP_EXP_AVG ? FP8_E4M3_MAX : FP16_MAX;
    const bool kept = (control && control->nonfinite) || (keep && state == MSAMP_MASTER && scale != 0);
    const float before = state == MSAMP_MASTER && scale != 0 ? scale : 1;
    s.new_scales[state * s.tensors + first + i] = kept ? scale : msamp_scale(amax, before, fp_max);
}

// ---- host

// The tensors of `count` units, as entries of the parameter table.
typedef struct {
    int64_t first, count;
} MsampTensors;

// Returns the tensors of unit l, a layer or ROOT, and of the count - 1 layers that follow it.
static inline MsampTensors msamp_tensors(const ParameterTable *t, int64_t l, int64_t count) {
    MsampTensors r = {0, 0};
    while (r.first < t->count && t->entries[r.first].layer != l) r.first++;
    for (int64_t i = r.first; i < t->count && t->entries[i].layer < l + count; i++) r.count++;
    return r;
}

// Fills u->runs: this rank's parts of the tensors of unit l that the launch updates, in the order of memory, counted
// from where the launch begins. Dies unless runs begin and end at multiples of 8 elements.
static inline void msamp_runs(MsampUnits *u, const ParameterTable *t, const ShardPlan *plan, int64_t l) {
    const MsampTensors tensors = msamp_tensors(t, l, 1);
    if (tensors.count > MSAMP_MAX_TENSORS) die("a unit has more than %d tensors", MSAMP_MAX_TENSORS);
    u->bf16_shift = weights_begin(plan, l) - shard_begin(plan, l);
    u->bf16_shift_step = weights_of_layer(plan) - shard_elements(plan, 0);
    u->first_tensor = (int)tensors.first, u->num_tensors = (int)tensors.count;
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        int slot = -1;
        for (int i = 0; i < u->num_tensors; i++) {
            const Parameter *p = &t->entries[tensors.first + i];
            if (parameter_segment(p) != k) continue;
            const bool fp8 = p->flags & PARAM_FP8;
            slot += fp8 && !(p->flags & PARAM_JOINED);
            const ShardRange r = shard_parameter(t, plan, p);
            const int64_t begin = r.shard - u->units.first;
            if (!r.count || begin < 0 || begin >= u->units.size) continue;
            if (begin % 8 || r.count % 8) die("a rank's part of tensor %s is not aligned to 8 elements", p->name);
            u->runs[u->num_runs++] = MsampRun{begin,
                                              begin + r.count,
                                              (p->flags & PARAM_DECAY) != 0,
                                              weights_have(plan, l, k),
                                              i,
                                              fp8 ? slot : -1,
                                              p->offset + r.first - u->units.flat - begin};
        }
    }
}

template <MsampWeights WEIGHTS, bool FP32_MOMENTS, bool STORE>
static inline void adamw_msamp_launch_kernel(const AdamwUpdate *w, const MsampUnits *u, cudaStream_t stream) {
    const dim3 grid(adamw_blocks(u->units.size), (unsigned)u->units.count);
    const AdamwGradientType gradients = adamw_gradient_type(w->arrays.gradients);
    const auto kernel = gradients == GRADIENTS_FP8 ? adamw_msamp_kernel<WEIGHTS, FP32_MOMENTS, GRADIENTS_FP8, STORE>
                        : gradients == GRADIENTS_FP32
                            ? adamw_msamp_kernel<WEIGHTS, FP32_MOMENTS, GRADIENTS_FP32, STORE>
                            : adamw_msamp_kernel<WEIGHTS, FP32_MOMENTS, GRADIENTS_BF16, STORE>;
    CUDA_LAUNCH(kernel, grid, ADAMW_THREADS, 0, stream, *w, *u);
}

// Runs one pass over units l to l + count - 1. Arguments as adamw_update_units.
template <bool STORE>
static inline void adamw_msamp_pass(const AdamwUpdate *w, const ParameterTable *t, const ShardPlan *plan, int64_t l,
                                    int64_t count, int64_t first_gradient, cudaStream_t stream) {
    for (int64_t i = 0; i < adamw_num_launches(w, plan, l, count); i++) {
        MsampUnits u = {};
        const AdamwLaunch launch = adamw_launch_of(w, t, plan, l, count, first_gradient, i);
        const AdamwUpdate *update = &launch.update;
        const AdamwArrays *a = &update->arrays;
        const bool fp16 = a->scaled.master != NULL, fp32 = a->master != NULL;
        u.units = launch.units;
        msamp_runs(&u, t, plan, launch.l);
        if (a->moments != ADAMW_MSAMP) adamw_msamp_launch_kernel<MSAMP_WEIGHTS_FP16, true, STORE>(update, &u, stream);
        else if (fp16) adamw_msamp_launch_kernel<MSAMP_WEIGHTS_FP16, false, STORE>(update, &u, stream);
        else if (fp32) adamw_msamp_launch_kernel<MSAMP_WEIGHTS_FP32, false, STORE>(update, &u, stream);
        else adamw_msamp_launch_kernel<MSAMP_WEIGHTS_BF16, false, STORE>(update, &u, stream);
    }
}

// The first pass of the update of this rank's part of unit l and of the count - 1 layers that follow it: finds this
// rank's amaxes. If ranks share the tensors, the caller then replaces the amaxes by the maxima over these ranks. Then
// it calls adamw_msamp_store.
static inline void adamw_msamp_amaxes(const AdamwUpdate *w, const ParameterTable *t, const ShardPlan *plan, int64_t l,
                                      int64_t count, int64_t first_gradient, cudaStream_t stream) {
    const MsampTensors tensors = msamp_tensors(t, l, count);
    uint32_t *amaxes = w->arrays.scaled.amaxes + tensors.first * MSAMP_STATES;
    CUDA_CHECK(cudaMemsetAsync(amaxes, 0, (size_t)(tensors.count * MSAMP_STATES) * sizeof *amaxes, stream));
    adamw_msamp_pass<false>(w, t, plan, l, count, first_gradient, stream);
}

// Computes the new scales of tensors from their amaxes.
static inline void msamp_new_scales(const AdamwScaled *s, MsampTensors tensors, const AdamwControl *control, bool keep,
                                    cudaStream_t stream) {
    CUDA_LAUNCH(msamp_scales_kernel, dim3(grid_size(tensors.count, 128), MSAMP_STATES), 128, 0, stream, *s,
                tensors.first, tensors.count, control, keep);
}

// The second pass: computes the new scales from the amaxes, stores weights and moments with them, and makes them the
// scales of the tensors.
static inline void adamw_msamp_store(const AdamwUpdate *w, const ParameterTable *t, const ShardPlan *plan, int64_t l,
                                     int64_t count, int64_t first_gradient, cudaStream_t stream) {
    const AdamwScaled *s = &w->arrays.scaled;
    const MsampTensors tensors = msamp_tensors(t, l, count);
    const size_t pitch = (size_t)s->tensors * sizeof(float), width = (size_t)tensors.count * sizeof(float);
    msamp_new_scales(s, tensors, w->control, false, stream);
    adamw_msamp_pass<true>(w, t, plan, l, count, first_gradient, stream);
    CUDA_CHECK(cudaMemcpy2DAsync(s->scales + tensors.first, pitch, s->new_scales + tensors.first, pitch, width,
                                 MSAMP_STATES, cudaMemcpyDeviceToDevice, stream));
}

#endif
