// Fully sharded data parallelism: where each layer's weights and gradients are, and when they are communicated.
//
// Layers are numbered from 0; ROOT is the root unit (embedding, final norm, lm_head), which has no FP8 weights.
//
// One rank in the shard group (a single GPU, or --sharding none): the shard is the whole, and units are views of the
// flat arrays. FP8 weights are cast in each pass, or, with --fp8-weight-cache on, when the weights change. Each unit's
// gradient is all-reduced over replicas after its last micro-step. A single micro-step writes its gradient where it
// stays. Of several, the first does so too if the sums are bf16; the others, and all if the sums are fp32, compute it
// in a buffer of one unit, from which it joins the sum (gradient_sum.h).
//
// Several ranks: a layer's matrices are gathered into one of `num_slots` slots while the layer before it computes.
// There are 2 slots, or one for each layer if layers are kept for the whole step. FP8 runs with one scale a tensor
// gather FP8, cast once a step from the shard with scales that hold for all ranks. Without FP8 all-gather they gather
// bf16 and cast it on arrival by these scales, to the same bytes. Forward reads rowwise data; backward reads columnwise
// data, which is transposed here from the rowwise data. Recipes with finer scales gather bf16 and cast it on arrival,
// rowwise for forward and columnwise for backward. A layer with a linear layer in bf16 is gathered in bf16, and stays
// readable so. The root unit and all vectors are gathered once a step, as soon as the optimizer has changed them.
//
// Backward writes a layer's whole gradient into one of two buffers; its reduce-scatter runs beside the backward pass of
// the layer below. The root's gradient has a buffer of its own. A batch touches few rows of the embedding: where the
// gradients of all ranks' inputs are smaller than its table, these are gathered at the end of backward, and each rank
// adds up those of its part of the table. The root's gradient then has no embedding, and is reduced right after the
// loss. Else the whole root is reduced at the end.
//
// Copy engines read other ranks' memory, so these orders matter:
//   before a layer's gather   every rank has made its part: the gather of the vectors, which comes first, waits for all
//   before the optimizer      every rank has made its last gather: the reduction of layer 0's gradient waits for that
//
// Events alone order the compute stream and the communication stream; the host never waits:
//   arrived    of a slot: computing waits for it before it reads the slot
//   released   of a slot: a gather into the slot waits for it
//   reduced    of a gradient buffer: computing waits for it before it writes the buffer again
//   handover   (transport.cuh) orders one stream after all that the other has been given so far
#ifndef LLMC_FSDP_CUH
#define LLMC_FSDP_CUH

#include "fsdp_plan.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Creation

// Invalidates all gathered and cast weights.
static inline void fsdp_invalidate(Fsdp *f) {
    for (int64_t i = 0; i < f->num_slots; i++) f->slot[i].layer = NO_LAYER;
    for (int64_t i = 0; i < f->num_rows; i++) f->row_layer[i] = NO_LAYER;
    for (int64_t i = 0; i < f->num_cols; i++) f->col_layer[i] = NO_LAYER;
}

// After the placing. Copies *in.
static inline void fsdp_create(Fsdp *f, const FsdpInputs *in) {
    f->in = *in;
    transport_create(&f->transport, in->nccl, in->stream);
    fsdp_invalidate(f);
    for (int i = 0; in->nccl && i < 1 + FSDP_GRADIENT_BUFFERS; i++) event_create(&f->reduced[i]);
    for (int64_t i = 0; in->nccl && i < f->num_slots; i++)
        event_create(&f->slot[i].arrived), event_create(&f->slot[i].released);
}

static inline void fsdp_destroy(Fsdp *f) {
    for (int i = 0; f->in.nccl && i < 1 + FSDP_GRADIENT_BUFFERS; i++) CUDA_CHECK(cudaEventDestroy(f->reduced[i]));
    for (int64_t i = 0; f->in.nccl && i < f->num_slots; i++) {
        CUDA_CHECK(cudaEventDestroy(f->slot[i].arrived));
        CUDA_CHECK(cudaEventDestroy(f->slot[i].released));
    }
    transport_destroy(&f->transport);
    free(f->slot);
    free(f->amaxes_known);
    free(f->row_layer);
    free(f->col_layer);
}

// ---------------------------------------------------------------------------------------------------------------------
// Steps

// Begins optimizer step `step`, counted from 0.
static inline void fsdp_begin_step(Fsdp *f, int64_t step) {
    f->step = step;
    if (f->in.nccl) f->in.nccl->step = step;
}

// Begins micro-step `micro` of the step, counted from 0. Replicas round by different bits, so that their noise is
// independent; so do an embedding's gradient and a tied lm_head's.
static inline void fsdp_begin_micro_step(Fsdp *f, int64_t micro) {
    const int64_t part = 2 * (micro * f->replicas + f->replica);
    f->sum.add = f->sum.stochastic = micro > 0;
    f->sum.key = gradient_sum_key(f->seed, f->step, part);
    f->embedding_key = gradient_sum_key(f->seed, f->step, part + 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights

static inline char *fsdp_slot_data(const Fsdp *f, int64_t slot) {
    return f->slots + slot * fsdp_layer_matrices(f) * fsdp_slot_element(f);
}

static inline uint8_t *fsdp_rows(const Fsdp *f, int64_t l) {
    if (fsdp_gathers_fp8(f, l)) return (uint8_t *)fsdp_slot_data(f, l % f->num_slots);
    return f->rows + l % f->num_rows * fsdp_layer_matrices(f);
}

static inline uint8_t *fsdp_cols(const Fsdp *f, int64_t l) {
    return f->cols + l % f->num_cols * fsdp_layer_matrices(f);
}

static inline ShardSegment fsdp_segment(const Fsdp *f, int64_t l, int segment) {
    return segment_slice(f->table, &f->plan, l, segment);
}

// Views of unit l in `array`: a rank's flat array, or, if gathered, memory of this unit alone.
static inline FsdpUnit fsdp_unit(const Fsdp *f, bf16 *array, int64_t l, bool gathered) {
    bf16 *at[NUM_SEGMENTS];
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = fsdp_segment(f, l, k);
        at[k] = array + (gathered ? g.gathered : g.shard);
    }
    const FsdpUnit u = {at[SEGMENT_VECTORS], at[SEGMENT_MATRICES], l == ROOT ? at[embedding_segment(f->table)] : NULL};
    return u;
}

// The weights of a layer between fsdp_unshard and fsdp_reshard, or of the root.
static inline FsdpUnit fsdp_weights(const Fsdp *f, int64_t l) {
    if (!fsdp_is_sharded(f)) return fsdp_unit(f, f->in.weights, l, false);
    FsdpUnit u = {NULL, NULL, NULL};
    if (l == ROOT) {
        u = fsdp_unit(f, f->root, ROOT, true);
        if (f->embedding_is_transient) u.embedding = f->root_grads;
    } else {
        u.vectors = f->vectors + l * fsdp_layer_vectors(f);
        if (!fsdp_gathers_fp8(f, l)) u.matrices = (bf16 *)fsdp_slot_data(f, l % f->num_slots);
    }
    return u;
}

// The weight of a linear layer of layer l, as casts write it and GEMMs read it. Data that the strategy does not keep is
// NULL.
static inline QTensor fsdp_weight(const Fsdp *f, int64_t l, LinearId id) {
    const int64_t offset = f->precision->linear[id].offset;
    const bf16 *matrices = fsdp_weights(f, l).matrices;
    QTensor w = tensor_scales_of(f->in.scales, l, TENSOR_W, id);
    w.data = matrices ? (bf16 *)matrices + offset : NULL;
    if (!w.fp8) return w;
    w.rowwise = fsdp_rows(f, l) + offset, w.columnwise = fsdp_cols(f, l) + offset;
    if (fsdp_tensor_scales(f)) return w;
    w.rowwise_scale_inv = f->row_scales + l % f->num_rows * f->row_scale_bytes + f->scales[id].row_scales;
    w.columnwise_scale_inv = f->col_scales + l % f->num_cols * f->col_scale_bytes + f->scales[id].col_scales;
    return w;
}

// Casts the layer's FP8 weights. The first cast since they changed finds the amaxes of rowwise and columnwise data.
static inline void fsdp_cast(Fsdp *f, int64_t l, bool rows, bool cols) {
    for (int id = 0; id < NUM_LINEARS; id++) {
        const LinearShape *s = &f->precision->linear[id];
        QTensor w = tensor_scales_audited(f->in.scales, fsdp_weight(f, l, (LinearId)id));
        if (!w.fp8) continue;
        if (!rows) w.rowwise = NULL;
        if (!cols) w.columnwise = NULL;
        if (!fsdp_tensor_scales(f) && !f->amaxes_known[l]) tensor_amax_pass(w, w.data, s->N, s->K, f->in.stream);
        quantize_transpose(w, w.data, s->N, s->K, f->in.stream);
    }
    f->amaxes_known[l] = true;
}

// True if the layer's rowwise data is still there from an earlier pass, cast from gathered bf16 that is not read again.
static inline bool fsdp_has_rows(const Fsdp *f, int64_t l) {
    return fsdp_tensor_scales(f) && f->weights != FSDP_WEIGHTS_GATHER_FP8 && precision_layer_is_fp8(f->precision, l) &&
           f->row_layer[l % f->num_rows] == l;
}

// Starts the gather of layer l, unless it is there or no layer has that number. Called before the work that is to hide
// the gather.
static inline void fsdp_prefetch(Fsdp *f, int64_t l) {
    if (!fsdp_is_sharded(f) || l < 0 || l >= f->table->num_layers || fsdp_has_rows(f, l)) return;
    const int64_t index = l % f->num_slots, slice = f->plan.layer_slices[SEGMENT_MATRICES];
    const bool fp8 = fsdp_gathers_fp8(f, l);
    const cudaStream_t stream = f->transport.nccl->stream;
    FsdpSlot *slot = &f->slot[index];
    if (slot->layer == l) return;
    CUDA_CHECK(cudaStreamWaitEvent(stream, slot->released, 0));
    const void *part =
        fp8 ? (void *)(f->shard_fp8 + l * slice) : (void *)(f->in.weights + fsdp_segment(f, l, SEGMENT_MATRICES).shard);
    transport_begin_gather(&f->transport, "all-gather of the weights", l);
    transport_gather(&f->transport, part, fsdp_slot_data(f, index), slice, fp8 ? ncclUint8 : ncclBfloat16);
    transport_end_gather(&f->transport);
    CUDA_CHECK(cudaEventRecord(slot->arrived, stream));
    slot->layer = l;
}

// Makes the FP8 weights that a pass reads of a layer, unless they are there. With scales of tensors a sharded layer's
// columnwise data is transposed from rowwise data, since the bf16 weights may not be there in backward.
static inline void fsdp_make_casts(Fsdp *f, int64_t l, bool backward) {
    const bool transposes = fsdp_is_sharded(f) && fsdp_tensor_scales(f), in_slot = fsdp_gathers_fp8(f, l);
    const bool reads_rows = !backward || transposes || f->recompute_layer;
    const bool rows = !in_slot && reads_rows && f->row_layer[l % f->num_rows] != l;
    const bool cols = backward && f->col_layer[l % f->num_cols] != l;
    if (rows || (cols && !transposes)) fsdp_cast(f, l, rows, cols && !transposes);
    for (int id = 0; cols && transposes && id < NUM_LINEARS; id++) {
        const LinearShape *s = &f->precision->linear[id];
        const QTensor w = fsdp_weight(f, l, (LinearId)id);
        if (w.fp8) fp8_transpose(w.columnwise, w.rowwise, s->N, s->K, f->in.stream);
    }
    if (rows) f->row_layer[l % f->num_rows] = l;
    if (cols) f->col_layer[l % f->num_cols] = l;
}

// Work that is enqueued from now on may read the layer's weights; with `backward`, also columnwise FP8 data.
static inline void fsdp_unshard(Fsdp *f, int64_t l, bool backward) {
    if (fsdp_is_sharded(f) && !fsdp_has_rows(f, l)) {
        fsdp_prefetch(f, l);
        CUDA_CHECK(cudaStreamWaitEvent(f->in.stream, f->slot[l % f->num_slots].arrived, 0));
    }
    if (f->precision->any_fp8 && f->weights != FSDP_WEIGHTS_CACHED) fsdp_make_casts(f, l, backward);
}

// The last reader of the layer's weights in this pass has been enqueued: their memory may be used again.
static inline void fsdp_reshard(Fsdp *f, int64_t l) {
    if (f->in.nccl) nccl_watch(f->in.nccl);  // a pass may be long, and have no collective of its own
    if (fsdp_casts_are_transient(f)) fsdp_invalidate(f);
    if (fsdp_is_sharded(f)) CUDA_CHECK(cudaEventRecord(f->slot[l % f->num_slots].released, f->in.stream));
}

// ---------------------------------------------------------------------------------------------------------------------
// Publishing changed weights: the optimizer, or a load, writes in.weights of the root, calls fsdp_publish_root, writes
// those of the layers (and their amaxes, if fsdp_tensor_scales), and calls fsdp_publish_layers

// The root unit's shard has changed: it is gathered while the layers' weights are being changed.
static inline void fsdp_publish_root(Fsdp *f) {
    if (!fsdp_is_sharded(f)) return;
    const FsdpUnit root = fsdp_weights(f, ROOT);
    bf16 *const to[NUM_SEGMENTS] = {root.vectors, root.matrices, root.embedding};
    comm_waits_compute(&f->transport);
    transport_begin_gather(&f->transport, "all-gather of the weights", ROOT);
    transport_gather_barrier(&f->transport);  // all ranks' weights have changed
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = fsdp_segment(f, ROOT, k);
        if (g.slice) transport_gather(&f->transport, f->in.weights + g.shard, to[k], g.slice, ncclBfloat16);
    }
    transport_end_gather(&f->transport);
}

static inline void fsdp_gather_vectors(Fsdp *f) {
    nccl_begin(f->in.nccl, "all-gather of norms and biases", NO_LAYER);
    for (int64_t l = 0; l < f->table->num_layers; l++) {
        const ShardSegment g = fsdp_segment(f, l, SEGMENT_VECTORS);
        bf16 *to = f->vectors + l * fsdp_layer_vectors(f);
        nccl_all_gather(f->in.nccl, COMM_SHARD, f->in.weights + g.shard, to, g.slice, ncclBfloat16);
    }
    nccl_end(f->in.nccl);
}

// Casts this rank's slices of all layers' matrices to FP8.
static inline void fsdp_cast_shard(Fsdp *f) {
    const ShardSegment g = fsdp_segment(f, 0, SEGMENT_MATRICES);
    Fp8Slices s;
    memset(&s, 0, sizeof s);
    s.count = f->table->num_layers, s.n = g.slice, s.num_tensors = NUM_LINEARS;
    for (int j = 0; j < NUM_LINEARS; j++) {
        const LinearShape *linear = &f->precision->linear[j];
        const int64_t end = linear->offset + linear->N * linear->K - f->plan.shard_rank * g.slice;
        s.ends[j] = max_i64(0, min_i64(g.slice, end));
    }
    s.x = f->in.weights + g.shard, s.x_stride = shard_elements(&f->plan, 0);
    s.codes = f->shard_fp8;
    const TensorScales *scales = f->in.scales;
    s.amax = scales->amax, s.scale_inv = scales->scale_inv, s.slot_stride = TENSORS_PER_LAYER;
    s.rule = f->precision->recipe->rule, s.delayed_scale = scales->delayed_scale;
    quantize_slices(&s, f->in.stream);
    AuditSums *audit = scales->auditing ? scales->audit + audit_index(0, 0, TENSOR_W, ROWWISE) : NULL;
    if (audit) audit_slices(&s, audit, AUDIT_LAYER, AUDIT_LINEAR, f->in.stream);
}

// The amaxes of all tensors become their maxima over a group of ranks. Slots that are still cleared take part.
static inline void fsdp_reduce_amaxes(Fsdp *f, CommGroup group) {
    if (!f->in.nccl || (group == COMM_SHARD && !fsdp_is_sharded(f))) return;
    comm_waits_compute(&f->transport);
    nccl_begin(f->in.nccl, "all-reduce of the amaxes", NO_LAYER);
    nccl_all_reduce(f->in.nccl, group, f->in.scales->amax, f->table->num_layers * f->in.scales->amax_stride, ncclUint32,
                    ncclMax);
    nccl_end(f->in.nccl);
    compute_waits_comm(&f->transport);
}

// The shards of the layers have changed: all that is computed from here on reads the new weights. in.scales holds the
// amaxes of this rank's part of each weight if fsdp_tensor_scales; else they are cleared.
static inline void fsdp_publish_layers(Fsdp *f) {
    const int64_t L = f->table->num_layers;
    if (fsdp_tensor_scales(f)) fsdp_reduce_amaxes(f, COMM_SHARD);
    tensor_scales_begin_weights(f->in.scales);
    fsdp_invalidate(f);
    memset(f->amaxes_known, 0, (size_t)L * sizeof *f->amaxes_known);
    if (f->weights == FSDP_WEIGHTS_GATHER_FP8) fsdp_cast_shard(f);
    if (f->weights == FSDP_WEIGHTS_CACHED && f->precision->any_fp8)
        for (int64_t l = 0; l < L; l++) fsdp_cast(f, l, true, true);
    if (!fsdp_is_sharded(f)) return;
    comm_waits_compute(&f->transport);
    fsdp_gather_vectors(f);
    compute_waits_comm(&f->transport);
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients

static inline int fsdp_gradient_buffer(int64_t l) { return l == ROOT ? 0 : 1 + (int)(l % FSDP_GRADIENT_BUFFERS); }

// True if gradients of this micro-step are computed where they stay.
static inline bool fsdp_in_place(const Fsdp *f) {
    return !fsdp_is_sharded(f) && !f->transport.fp32_sums && !f->sum.add;
}

// Views of the memory where unit l's gradient is computed.
static inline FsdpUnit fsdp_gradients(const Fsdp *f, int64_t l) {
    if (fsdp_in_place(f)) return fsdp_unit(f, f->transport.sums, l, false);
    FsdpUnit u = fsdp_unit(f, l == ROOT ? f->root_grads : f->layer_grads[l % FSDP_GRADIENT_BUFFERS], l, true);
    if (fsdp_embedding_joins(f)) u.embedding = NULL;
    return u;
}

// How this micro-step's gradients join this rank's slice of a segment.
static inline GradientSum fsdp_sum_of(const Fsdp *f, ShardSegment g) {
    GradientSum s = f->sum;
    s.flat = g.flat + f->plan.shard_rank * g.slice;
    return s;
}

// How an embedding's gradient joins this rank's sums (fsdp_embedding_joins).
static inline GradientSum fsdp_embedding_sum(const Fsdp *f) {
    GradientSum s = fsdp_sum_of(f, fsdp_segment(f, ROOT, embedding_segment(f->table)));
    s.key = f->embedding_key;
    return s;
}

// Zeroes what is between and behind a unit's tensors: it is reduced as they are. Matrices have no padding between them.
static inline void fsdp_zero_padding(Fsdp *f, int64_t l) {
    const FsdpUnit g = fsdp_gradients(f, l);
    const int64_t *elements = l == ROOT ? f->root_elements : f->layer_elements, *slices = slice_sizes(&f->plan, l);
    const int64_t vectors = f->plan.shard_size * slices[SEGMENT_VECTORS], matrices = elements[SEGMENT_MATRICES],
                  padding = f->plan.shard_size * slices[SEGMENT_MATRICES] - matrices;
    if (vectors > elements[SEGMENT_VECTORS])
        CUDA_CHECK(cudaMemsetAsync(g.vectors, 0, (size_t)vectors * sizeof(bf16), f->in.stream));
    if (padding) CUDA_CHECK(cudaMemsetAsync(g.matrices + matrices, 0, (size_t)padding * sizeof(bf16), f->in.stream));
}

// Before the first write to a unit's gradient in a micro-step: the last reduction from its buffer is waited for. ROOT:
// before the loss, which may use the layers' buffers too (fsdp_loss_room).
static inline void fsdp_begin_gradients(Fsdp *f, int64_t l) {
    const int buffer = fsdp_gradient_buffer(l);
    for (int i = 0; fsdp_is_sharded(f) && i < 1 + FSDP_GRADIENT_BUFFERS; i++)
        if (l == ROOT || i == buffer) CUDA_CHECK(cudaStreamWaitEvent(f->in.stream, f->reduced[i], 0));
    fsdp_zero_padding(f, l);
}

// Without sharding: a unit's gradient joins the sums, unless it has been computed there.
static inline void fsdp_join(Fsdp *f, int64_t l) {
    if (fsdp_in_place(f)) return;
    const int64_t n = segment_begin(slice_sizes(&f->plan, l), fsdp_reduced_segments(f)), at = shard_begin(&f->plan, l);
    const bf16 *from = l == ROOT ? f->root_grads : f->layer_grads[0];
    GradientSum how = f->sum;
    how.flat = at;
    transport_add_computed(&f->transport, at, from, n, how);
}

// The unit's gradient of this micro-step is computed: its reduced segments go to the ranks that keep them, and join the
// sums of the micro-steps before. The loss's gradient has been divided by the tokens of all ranks: the sum is the mean.
static inline void fsdp_reduce_scatter(Fsdp *f, int64_t l) {
    if (!fsdp_is_sharded(f)) return fsdp_join(f, l);
    const FsdpUnit full = fsdp_gradients(f, l);
    bf16 *const from[NUM_SEGMENTS] = {full.vectors, full.matrices, full.embedding};
    TransportSegment segments[NUM_SEGMENTS];
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = fsdp_segment(f, l, k);
        const TransportSegment s = {from[k], g.slice, g.shard, fsdp_sum_of(f, g)};
        segments[k] = s;
    }
    comm_waits_compute(&f->transport);
    transport_reduce_scatter(&f->transport, segments, fsdp_reduced_segments(f), l);
    CUDA_CHECK(cudaEventRecord(f->reduced[fsdp_gradient_buffer(l)], f->transport.nccl->stream));
}

// The rank's part of a unit's gradient is complete: after the last micro-step it is summed over replicas. It is the sum
// over all ranks after compute_waits_comm.
static inline void fsdp_reduce_replicas(Fsdp *f, int64_t l, bool last) {
    if (!f->in.nccl || !last || f->replicas == 1) return;
    comm_waits_compute(&f->transport);
    transport_all_reduce(&f->transport, COMM_REPLICAS, shard_begin(&f->plan, l), shard_elements(&f->plan, l), l);
}

// Returns the gradients of the inputs [fsdp_input_ranks][input_elements], this rank's being `dx`. What is enqueued from
// now on may read them and write dx, and finds the root's gradient reduced. dx was complete when fsdp_reduce_scatter
// was called last, which waits for all ranks: so all ranks' dx are.
static inline const bf16 *fsdp_gather_input_gradients(Fsdp *f, const bf16 *dx) {
    if (f->embedding != FSDP_EMBEDDING_FROM_INPUTS) return dx;
    comm_waits_compute(&f->transport);
    transport_begin_gather(&f->transport, "all-gather of the inputs' gradients", NO_LAYER);
    transport_gather(&f->transport, dx, f->root_grads, f->input_elements, ncclBfloat16);
    transport_gather_barrier(&f->transport);  // all ranks have read
    transport_end_gather(&f->transport);
    compute_waits_comm(&f->transport);
    return f->root_grads;
}

// Sums over all ranks: of the loss, and of the squares of gradients if those are sharded (NULL: of the loss alone).
// Without sharding every rank has all gradients, and the same.
static inline void fsdp_reduce_step_stats(Fsdp *f, float *loss, double *squares) {
    if (!f->in.nccl) return;
    comm_waits_compute(&f->transport);
    nccl_begin(f->in.nccl, "all-reduce of loss and gradient norm", NO_LAYER);
    nccl_all_reduce(f->in.nccl, COMM_WORLD, loss, 1, ncclFloat32, ncclSum);
    if (squares && fsdp_is_sharded(f)) nccl_all_reduce(f->in.nccl, COMM_WORLD, squares, 1, ncclFloat64, ncclSum);
    nccl_end(f->in.nccl);
    compute_waits_comm(&f->transport);
}

// Times that each gradient counts in the sum of squares over all ranks.
static inline int64_t fsdp_times_counted(const Fsdp *f) { return fsdp_is_sharded(f) ? f->replicas : 1; }

#endif
