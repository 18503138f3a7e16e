// Amaxes, scales of whole tensors, delayed scaling's state and audit sums, of all tensors that FP8 GEMMs read.
// All of it is in device memory. Scales finer than a tensor are not here: they lie beside the FP8 data.
#ifndef LLMC_TENSOR_SCALES_CUH
#define LLMC_TENSOR_SCALES_CUH

#include "../base/arena.h"
#include "../config/precision.h"
#include "../config/weight_bound.h"
#include "delayed.cuh"
#include "qtensor.cuh"

typedef struct {
    const Precision *precision;
    int64_t layers, rows;  // rows: R of x and dy
    // [layers, amax_stride]; the amaxes of tensor i of a layer begin at amax_offset[i].
    uint32_t *amax;
    int64_t amax_stride, amax_offset[TENSORS_PER_LAYER];
    // [tensors, 4]: scale_inv of each tensor that has one scale, and 3 unused floats, as cuBLASLt needs 16-byte
    // alignment.
    float *scale_inv;
    AuditSums *audit;  // NULL without --fp8-audit
    bool auditing;     // true while casts are audited
    // [tensors] with recipe tensorwise_bounded: the scales of weights, 0 before the first cast; else NULL
    float *weight_scale;

    // state of the delayed recipe; NULL with other recipes
    float *history;        // [tensors, window]
    float *delayed_scale;  // [tensors], directly behind the histories
    uint32_t *step_amax;   // [tensors] largest amaxes of the step's micro-steps so far
    float *step_scale;     // [tensors] delayed_scale from before the step
    // Copy of histories and scales from before the current step; NULL also without --on-nonfinite skip.
    float *before;
    int64_t window;
    int margin;
    bool may_skip;  // --on-nonfinite skip
    // True only if each tensor that is cast has a delayed scale. It may be false although all have one; casts then make
    // amax passes that they do not need.
    bool scales_ready;
    cudaStream_t stream;
} TensorScales;

// Describes the state of a model's tensors; x and dy have R rows. Dies if a recipe with one scale per tensor does not
// have one amax for each tensor. tensor_scales_place must follow before use.
static inline void tensor_scales_describe(TensorScales *s, const Precision *p, int64_t R, const Options *o) {
    memset(s, 0, sizeof *s);
    s->precision = p, s->layers = p->num_layers, s->rows = R;
    s->window = o->fp8_amax_history, s->margin = (int)o->fp8_margin;
    s->may_skip = o->on_nonfinite == NONFINITE_SKIP;
    for (int role = 0; role < NUM_TENSORS; role++)
        for (int id = 0; id < NUM_LINEARS; id++) {
            const ScaleGranularity row = recipe_granularity(p->recipe, (TensorRole)role, ROWWISE);
            const ScaleGranularity col = recipe_granularity(p->recipe, (TensorRole)role, COLUMNWISE);
            const int64_t rows = role == TENSOR_W ? p->linear[id].N : R;
            s->amax_offset[tensor_index(0, (TensorRole)role, id)] = s->amax_stride;
            s->amax_stride += tensor_amaxes(row, col, rows, precision_columns(p, (TensorRole)role, id));
        }
    // The kernels of delayed.cuh and quantize_slices() index amaxes like scales, by tensor_index().
    if (recipe_has_tensor_scales(p->recipe) && s->amax_stride != TENSORS_PER_LAYER)
        die("recipe %s has %lld amaxes per layer, but needs one for each of %d tensors", p->recipe->name,
            (long long)s->amax_stride, TENSORS_PER_LAYER);
}

static inline int64_t tensor_scales_delayed_elements(const TensorScales *s) {
    return tensor_count(s->layers) * (s->window + 1);
}

static inline void tensor_scales_place(TensorScales *s, bool audit, Arena *a) {
    const int64_t tensors = tensor_count(s->layers),
                  delayed = tensor_scales_delayed_elements(s) * (int64_t)sizeof(float);
    const bool is_delayed = s->precision->recipe->delayed;
    arena_group(a, "amaxes, scales, audit");
    s->amax = (uint32_t *)arena_take(a, s->layers * s->amax_stride * (int64_t)sizeof(uint32_t));
    s->scale_inv = (float *)arena_take(a, tensors * 4 * (int64_t)sizeof(float));
    s->history = is_delayed ? (float *)arena_take(a, delayed) : NULL;
    s->delayed_scale = is_delayed ? s->history + tensors * s->window : NULL;
    s->step_amax = is_delayed ? (uint32_t *)arena_take(a, tensors * (int64_t)sizeof(uint32_t)) : NULL;
    s->step_scale = is_delayed ? (float *)arena_take(a, tensors * (int64_t)sizeof(float)) : NULL;
    s->before = is_delayed && s->may_skip ? (float *)arena_take(a, delayed) : NULL;
    s->weight_scale = s->precision->recipe->bounded ? (float *)arena_take(a, tensors * (int64_t)sizeof(float)) : NULL;
    s->audit = audit ? (AuditSums *)arena_take(a, (s->layers * AUDIT_LAYER) * (int64_t)sizeof(AuditSums)) : NULL;
}

static inline AmaxSource tensor_scales_amax_source(const Recipe *r, TensorRole role, LinearId id) {
    const ScaleGranularity row = recipe_granularity(r, role, ROWWISE), col = recipe_granularity(r, role, COLUMNWISE);
    if (!recipe_is_fp8(r, GEMM_FPROP) || (!usage_amaxes(row, 1) && !usage_amaxes(col, 1))) return AMAX_UNUSED;
    if (r->delayed) return AMAX_DELAYED;
    const bool made_by_its_cast = role == TENSOR_X && id == DOWN_PROJ;  // SwiGLU's output
    return recipe_has_current_tensor_scales(r) && !made_by_its_cast ? AMAX_FROM_PRODUCER : AMAX_FROM_PASS;
}

// Returns the first amax slot of a tensor, also if its linear layer is not FP8. With block scales a tensor has no slot,
// and nothing may be read or written there.
static inline uint32_t *tensor_scales_amax(const TensorScales *s, int64_t l, TensorRole role, LinearId id) {
    return s->amax + l * s->amax_stride + s->amax_offset[tensor_index(0, role, id)];
}

// Returns the scales that a checkpoint keeps, which are known before a step: weight_scale or delayed_scale, or NULL.
static inline float *tensor_scales_known(const TensorScales *s) {
    return s->weight_scale ? s->weight_scale : s->delayed_scale;
}

// Returns a tensor of layer l without data. If its linear layer is FP8, the tensor gets pointers to its amaxes, to its
// delayed scale if the recipe is delayed (of a weight: if it is bounded too), and to scale_inv for PER_TENSOR data. l
// may be -1, below the first layer: no GEMM reads that tensor.
static inline QTensor tensor_scales_of(const TensorScales *s, int64_t l, TensorRole role, LinearId id) {
    const Recipe *r = l < 0 ? recipe_row(RECIPE_BF16) : precision_of(s->precision, l, id);
    QTensor q = recipe_qtensor(r, role, precision_format(s->precision, role));
    q.layer = l, q.linear = id;
    q.fp8 = recipe_is_fp8(r, GEMM_FPROP);
    if (!q.fp8) return q;
    const int64_t number = tensor_index(l, role, id);
    q.amax_source = tensor_scales_amax_source(r, role, id);
    q.amax = tensor_scales_amax(s, l, role, id);
    q.delayed_scale = r->delayed                       ? s->delayed_scale + number
                      : r->bounded && role == TENSOR_W ? s->weight_scale + number
                                                       : NULL;
    if (q.row_granularity == PER_TENSOR) q.rowwise_scale_inv = s->scale_inv + number * 4;
    if (q.col_granularity == PER_TENSOR) q.columnwise_scale_inv = s->scale_inv + number * 4;
    return q;
}

// Returns tensor q; while casts are audited, with pointers to its audit sums.
static inline QTensor tensor_scales_audited(const TensorScales *s, QTensor q) {
    for (int usage = 0; usage < 2 && s->auditing; usage++)
        q.audit[usage] = s->audit + audit_index(q.layer, q.linear, q.role, (TensorUsage)usage);
    return q;
}

// Returns the bytes of the scales that are stored with the rowwise or columnwise data of a tensor [rows, columns]: 0
// for PER_TENSOR, whose scale TensorScales holds, and for bf16 data.
static inline int64_t tensor_scales_own_bytes(const TensorScales *s, TensorRole role, TensorUsage usage, int64_t rows,
                                              int64_t columns) {
    const ScaleGranularity g = recipe_granularity(s->precision->recipe, role, usage);
    const UsageShape shape = usage_shape(rows, columns, usage);
    return g == PER_TENSOR ? 0 : scale_bytes(g, shape.outer, shape.depth);
}

// Clears the amaxes of the tensors with roles [first, last] in `count` layers from layer l on.
static inline void tensor_scales_clear_amaxes(TensorScales *s, int64_t l, int64_t count, TensorRole first,
                                              TensorRole last) {
    const int64_t begin = s->amax_offset[tensor_index(0, first, 0)];
    const int64_t end =
        last + 1 < NUM_TENSORS ? s->amax_offset[tensor_index(0, (TensorRole)(last + 1), 0)] : s->amax_stride;
    if (!s->amax_stride) return;
    CUDA_CHECK(cudaMemset2DAsync(s->amax + l * s->amax_stride + begin, (size_t)s->amax_stride * sizeof(uint32_t), 0,
                                 (size_t)(end - begin) * sizeof(uint32_t), (size_t)count, s->stream));
}

// Turns the audit of the casts that follow on, from empty sums, or off (--fp8-audit).
static inline void tensor_scales_audit_casts(TensorScales *s, bool on) {
    s->auditing = on;
    if (on) CUDA_CHECK(cudaMemsetAsync(s->audit, 0, (size_t)(s->layers * AUDIT_LAYER) * sizeof(AuditSums), s->stream));
}

// ---- Recipe tensorwise_bounded: scales of weights, n of them, which are NUM_LINEARS in each layer.

static __global__ void weight_scales_begin_kernel(float *scale, const uint32_t *amax, int64_t n) {
    grid_dependency_wait();
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    const int64_t w = tensor_index(i / NUM_LINEARS, TENSOR_W, (int)(i % NUM_LINEARS));
    if (i < n && scale[w] == 0) scale[w] = fp8_scale(__uint_as_float(amax[w]), FP8_E4M3);
}

// Makes the scales and scale_inv of weights that a step with bound b changes, and clears their amaxes. A skipped step
// keeps the scales.
static __global__ void weight_scales_bound_kernel(float *scale, float *scale_inv, uint32_t *amax, int64_t n,
                                                  WeightBound b, const uint32_t *skipped) {
    grid_dependency_wait();
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    const int64_t w = tensor_index(i / NUM_LINEARS, TENSOR_W, (int)(i % NUM_LINEARS));
    if (i >= n) return;
    if (!*skipped) {
        scale[w] = weight_bound_scale(__uint_as_float(amax[w]), b);
        scale_inv[4 * w] = __frcp_rn(scale[w]);
    }
    amax[w] = 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The state of the delayed recipe. With every recipe, tensor_scales_begin_new_weights also clears the amaxes of
// weights.

// Returns the state of the layers from layer l on.
static inline DelayedArrays tensor_scales_delayed(const TensorScales *s, int64_t l) {
    const int64_t first = l * TENSORS_PER_LAYER;
    return DelayedArrays{s->history + first * s->window,
                         s->delayed_scale + first,
                         s->amax + first,
                         TENSORS_PER_LAYER,
                         s->window,
                         s->margin,
                         s->precision->dy_format,
                         tensor_index(0, TENSOR_DY, 0)};
}

// Gives a tensor that has no delayed scale yet one from its own amax.
static inline void tensor_scales_begin(TensorScales *s, const QTensor *q) {
    const DelayedArrays layer = tensor_scales_delayed(s, q->layer);
    const int64_t tensor = tensor_index(0, q->role, q->linear);
    delayed_begin(&layer, 1, tensor, tensor + 1, s->stream);
}

// Gives each weight that has no delayed or bounded scale yet one from its own amax. Does nothing with other recipes, or
// if scales_ready.
static inline void tensor_scales_begin_weights(TensorScales *s) {
    const int64_t weights = s->layers * NUM_LINEARS;
    if (s->weight_scale)
        CUDA_LAUNCH(weight_scales_begin_kernel, grid_size(weights, DELAYED_THREADS), DELAYED_THREADS, 0, s->stream,
                    s->weight_scale, s->amax, weights);
    if (!s->delayed_scale || s->scales_ready) return;
    const DelayedArrays d = tensor_scales_delayed(s, 0);
    delayed_begin(&d, s->layers, tensor_index(0, TENSOR_W, 0), tensor_index(0, TENSOR_X, 0), s->stream);
}

// Appends the amaxes of the weights' last cast to their histories, and makes new scales (delayed_update), in `count`
// layers from layer l on. Does nothing with other recipes.
static inline void tensor_scales_update_weights(TensorScales *s, int64_t l, int64_t count) {
    if (!s->delayed_scale) return;
    const DelayedArrays d = tensor_scales_delayed(s, l);
    delayed_update_all(&d, count, tensor_index(0, TENSOR_W, 0), tensor_index(0, TENSOR_X, 0), s->stream);
}

// Begins a step. Does nothing with other recipes.
static inline void tensor_scales_begin_step(TensorScales *s) {
    const size_t bytes = (size_t)tensor_count(s->layers) * sizeof(float);
    if (!s->delayed_scale) return;
    CUDA_CHECK(cudaMemcpyAsync(s->step_scale, s->delayed_scale, bytes, cudaMemcpyDeviceToDevice, s->stream));
    CUDA_CHECK(cudaMemsetAsync(s->step_amax, 0, bytes, s->stream));
}

// Begins a micro-step: its casts have the scales from before the step. A tensor that has none is cast by its own amax
// in each micro-step of its first step, so that the bits do not depend on which rank has which micro-steps. Does
// nothing with other recipes.
static inline void tensor_scales_begin_micro_step(TensorScales *s) {
    if (s->delayed_scale)
        CUDA_CHECK(cudaMemcpyAsync(s->delayed_scale, s->step_scale, (size_t)tensor_count(s->layers) * sizeof(float),
                                   cudaMemcpyDeviceToDevice, s->stream));
}

// Raises step_amax to the amaxes of a micro-step. Does nothing with other recipes.
static inline void tensor_scales_end_micro_step(TensorScales *s) {
    const int64_t n = tensor_count(s->layers);
    if (s->delayed_scale)
        CUDA_LAUNCH(delayed_raise_kernel, grid_size(n, DELAYED_THREADS), DELAYED_THREADS, 0, s->stream, s->step_amax,
                    s->amax, n);
}

// Appends step_amax, of a step's inputs and output gradients, to their histories, and makes new scales. The caller has
// made step_amax the maxima over all ranks. Only for the delayed recipe.
static inline void tensor_scales_update_activations(TensorScales *s) {
    DelayedArrays d = tensor_scales_delayed(s, 0);
    d.amax = s->step_amax;
    delayed_update_all(&d, s->layers, tensor_index(0, TENSOR_X, 0), TENSORS_PER_LAYER, s->stream);
    // A step that may be skipped sets scales_ready later, when it is known to be applied.
    if (!s->before) s->scales_ready = true;
}

// If `keep`, copies histories and scales to `before`; else restores them from there. Does nothing without `before`.
static inline void tensor_scales_copy_before(TensorScales *s, bool keep) {
    float *to = keep ? s->before : s->history, *from = keep ? s->history : s->before;
    if (s->before)
        CUDA_CHECK(cudaMemcpyAsync(to, from, (size_t)tensor_scales_delayed_elements(s) * sizeof(float),
                                   cudaMemcpyDeviceToDevice, s->stream));
}

// Called before the update of the weights of `count` layers from layer l on. With the delayed recipe, appends the
// amaxes of these weights' last cast to the histories; then, if *skipped, in device memory, is not 0, restores the
// histories and scales of all tensors from `before`, if there is one. With tensorwise_bounded, makes the weights'
// scales after a step with bound b from their amaxes over all ranks, unless *skipped is not 0. With every recipe,
// clears the weights' amaxes.
static inline void tensor_scales_begin_new_weights(TensorScales *s, int64_t l, int64_t count, WeightBound b,
                                                   const uint32_t *skipped) {
    const int64_t first = tensor_index(l, TENSOR_W, 0), n = count * NUM_LINEARS;
    if (s->weight_scale)
        return CUDA_LAUNCH(weight_scales_bound_kernel, grid_size(n, DELAYED_THREADS), DELAYED_THREADS, 0, s->stream,
                           s->weight_scale + first, s->scale_inv + 4 * first, s->amax + first, n, b, skipped);
    tensor_scales_update_weights(s, l, count);
    if (s->before) delayed_restore(s->history, s->before, tensor_scales_delayed_elements(s), skipped, s->stream);
    tensor_scales_clear_amaxes(s, l, count, TENSOR_W, TENSOR_W);
}

#endif
