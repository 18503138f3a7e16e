// Fully sharded data parallelism: gathers each layer's weights before use and reduces its gradients after backward.
//
// Layers are numbered from 0; ROOT is the root unit (embedding, final norm, lm_head), which has no FP8 weights.
//
// With one rank in the shard group (for example a single GPU, or --sharding none), the shard is the whole model, and
// units are views of the flat arrays. FP8 weights are cast in each pass. With recipe tensorwise_bounded AdamW writes
// their rowwise codes instead, which stay, and backward transposes those of a layer. Each unit's gradient is
// all-reduced over replicas after its last micro-step. If the sums of gradients are bf16, the first micro-step of a
// step writes gradients directly into the sums. All later micro-steps, and the first one too if the sums are fp32,
// write a unit's gradient into a buffer, which is then added to the sums (gradient_sum.h). With FP8 gradients a layer's
// gradient always goes through the buffer. The embedding's gradient never does: it is added directly to the sums at the
// end of backward.
//
// With several ranks in the shard group, a layer's matrices are gathered into one of `num_slots` slots while the pass
// computes the layer before. There are 2 slots (1 if there is 1 layer), or one for each layer if slots keep their data
// for the whole step. With one scale per tensor, a layer is gathered in FP8, which each rank casts from its shard once
// a step (tensorwise_bounded: which AdamW writes), with scales common to all ranks. With --fp8-all-gather off it is
// gathered in bf16 and cast on arrival with these scales, to the same bytes. Forward reads rowwise data. Backward reads
// columnwise data, which each rank transposes from the rowwise data. With finer scales, a layer is gathered in bf16 and
// cast on arrival, rowwise for forward and columnwise for backward. If backward recomputes GEMMs of a layer, it reads
// rowwise data too. A layer that has a bf16 linear layer is gathered in bf16. The root unit and all vectors are
// gathered once a step, after the optimizer has changed them.
//
// Backward writes a layer's whole gradient into one of two buffers. Its reduce-scatter overlaps with the backward pass
// of the layer below. The root's gradient has its own buffer. A batch touches few rows of the embedding. So if the
// input gradients (dx [R, C], the gradient of the embedding's output) of all ranks of the group are together no larger
// than the embedding's table, they are gathered at the end of backward, and each rank adds them to its part of the
// table's gradient. The buffer of the root's gradient then lacks the embedding's gradient, and is reduced right after
// the loss. Otherwise the whole root gradient is reduced at the end.
//
// With --optimizer-in-backward, AdamW updates a layer in the backward pass. With one rank, it does so right after the
// layer's backward, and the layers' sums take turns in the memory of one layer. With several ranks, it waits until the
// layer's gradient is reduced: it updates the layer after the backward of the layer below (layer 0 after its own), and
// the sums take turns in the memory of two layers. Every rank has then finished its last gather of the layer. With
// --grad-clip and several ranks, a layer's squares are summed right after its reduction.
//
// Copy engines read other ranks' memory, so two orders must hold:
//   before a layer's gather   every rank has updated its shard: the gather of the vectors, which comes first, waits for
//                             all ranks
//   before AdamW's update     every rank has finished its last gather of these weights: the reduction of their gradient
//                             comes after that gather and waits for all ranks
//
// Events order the compute stream and the communication stream, without waits of the host:
//   slot.arrived    the compute stream waits for it before it reads the slot
//   slot.released   a gather into the slot waits for it
//   reduced         the compute stream waits for it before it writes into the gradient buffer again
//   summed          the compute stream waits for it before AdamW reads a layer's sums in the backward pass
//   handover        (transport.cuh) one stream waits for all work enqueued on the other so far
#ifndef LLMC_FSDP_CUH
#define LLMC_FSDP_CUH

#include "fsdp_gradient_fp8.cuh"
#include "fsdp_norm.cuh"
#include "fsdp_weights.cuh"

// ---- creation

// Invalidates all gathered and cast weights.
static inline void fsdp_invalidate(FsdpWeights *w) {
    for (int64_t i = 0; i < w->num_slots; i++) w->slot[i].layer = NO_LAYER;
    for (int64_t i = 0; i < w->num_rowwise; i++) w->rowwise_layer[i] = NO_LAYER;
    for (int64_t i = 0; i < w->num_columnwise; i++) w->columnwise_layer[i] = NO_LAYER;
}

// Sets f->in to *in and creates the transport and the events. Call it after fsdp_place.
static inline void fsdp_create(Fsdp *f, const FsdpInputs *in) {
    FsdpWeights *w = &f->weights;
    f->in = *in;
    if (f->plan.precision->casts_masters) fsdp_find_masters(f);
    transport_create(&f->transport, in->nccl, in->log);
    fsdp_invalidate(w);
    for (int i = 0; in->nccl && i < 1 + FSDP_GRADIENT_BUFFERS; i++) event_create(&f->gradients.reduced[i]);
    for (int i = 0; in->nccl && i < FSDP_GRADIENT_BUFFERS; i++) event_create(&f->gradients.summed[i]);
    for (int64_t i = 0; in->nccl && i < w->num_slots; i++)
        event_create(&w->slot[i].arrived), event_create(&w->slot[i].released);
}

static inline void fsdp_destroy(Fsdp *f) {
    const FsdpWeights *w = &f->weights;
    const FsdpGradients *g = &f->gradients;
    for (int i = 0; f->in.nccl && i < 1 + FSDP_GRADIENT_BUFFERS; i++) CUDA_CHECK(cudaEventDestroy(g->reduced[i]));
    for (int i = 0; f->in.nccl && i < FSDP_GRADIENT_BUFFERS; i++) CUDA_CHECK(cudaEventDestroy(g->summed[i]));
    for (int64_t i = 0; f->in.nccl && i < w->num_slots; i++) {
        CUDA_CHECK(cudaEventDestroy(w->slot[i].arrived));
        CUDA_CHECK(cudaEventDestroy(w->slot[i].released));
    }
    transport_destroy(&f->transport);
    free(w->slot);
    free(w->amaxes_known);
    free(w->rowwise_layer);
    free(w->columnwise_layer);
}

// ---- steps

// Begins optimizer step `step`, counted from 0.
static inline void fsdp_begin_step(Fsdp *f, int64_t step) {
    f->step = step;
    if (f->in.nccl) f->in.nccl->step = step;
}

// Begins micro-step `micro` of the step, counted from 0. Each micro-step of each rank has its own random bits to round
// sums, so that rounding errors are independent. If ranks are summed before, the first of them gives the bits. An
// embedding's gradient that is added apart has its own bits too, because a tied lm_head's gradient is added to the same
// sums.
static inline void fsdp_begin_micro_step(Fsdp *f, int64_t micro) {
    FsdpGradients *g = &f->gradients;
    const int64_t part = 2 * (micro * f->plan.world + f->plan.replica * f->plan.shard.shard_size);
    const RankKeys keys = {gradient_sum_step_key(f->plan.rounding_seed, f->step), part};
    g->sum.add = g->sum.stochastic = micro > 0;
    g->sum.key = gradient_sum_key(f->plan.rounding_seed, f->step, part);
    g->embedding_key = gradient_sum_key(f->plan.rounding_seed, f->step, part + 1);
    f->transport.keys = keys;
}

// ---- weights

// True if layer l's rowwise data is still valid from an earlier pass and replaces a gather of its bf16 weights: forward
// reads it, and backward transposes it. Only with one scale per tensor and without FP8 all-gather.
static inline bool fsdp_rowwise_is_cached(const Fsdp *f, int64_t l) {
    return fsdp_tensor_scales(f) && f->plan.weight_source != FSDP_WEIGHTS_GATHER_FP8 &&
           precision_layer_is_fp8(f->plan.precision, l) && f->weights.rowwise_layer[l % f->weights.num_rowwise] == l;
}

// With sharding: starts the gather of layer l, unless that has been started before, the layer needs no gather
// (fsdp_rowwise_is_cached), or l is no layer. Call it before the work that is to overlap with the gather.
static inline void fsdp_prefetch(Fsdp *f, int64_t l) {
    if (!fsdp_is_sharded(f) || l < 0 || l >= f->plan.table->num_layers || fsdp_rowwise_is_cached(f, l)) return;
    const int64_t index = l % f->weights.num_slots, slice = f->plan.shard.layer_slices[SEGMENT_MATRICES];
    const bool fp8 = fsdp_gathers_fp8(f, l);
    const cudaStream_t stream = f->transport.nccl->stream;
    FsdpSlot *slot = &f->weights.slot[index];
    if (slot->layer == l) return;
    CUDA_CHECK(cudaStreamWaitEvent(stream, slot->released, 0));
    const void *part = fp8 ? (void *)(f->weights.shard_fp8 + l * slice)
                           : (void *)(f->in.weights + fsdp_segment(f, l, SEGMENT_MATRICES).shard);
    transport_begin(&f->transport, "all-gather of the weights", l);
    transport_gather(&f->transport, part, fsdp_slot_data(f, index), slice, fp8 ? ncclUint8 : ncclBfloat16);
    transport_end(&f->transport);
    CUDA_CHECK(cudaEventRecord(slot->arrived, stream));
    slot->layer = l;
}

// Casts the FP8 weights that a pass reads in layer l, unless they are valid. With one scale per tensor, columnwise
// data of a sharded layer, or of resident codes, is transposed from rowwise data: backward may not have the bf16
// weights.
static inline void fsdp_make_casts(Fsdp *f, int64_t l, bool backward) {
    FsdpWeights *w = &f->weights;
    const bool has_rowwise = fsdp_gathers_fp8(f, l) || fsdp_codes_are_resident(f),  // it needs no cast
        transposes = has_rowwise || (fsdp_is_sharded(f) && fsdp_tensor_scales(f));
    const bool reads_rowwise = !backward || transposes || f->plan.recomputes_gemms;
    const bool rowwise = !has_rowwise && reads_rowwise && w->rowwise_layer[l % w->num_rowwise] != l;
    const bool columnwise = backward && w->columnwise_layer[l % w->num_columnwise] != l;
    if (rowwise || (columnwise && !transposes)) fsdp_cast(f, l, rowwise, columnwise && !transposes);
    for (int id = 0; columnwise && transposes && id < NUM_LINEARS; id++) {
        const LinearShape *s = &f->plan.precision->linear[id];
        const QTensor weight = fsdp_weight(f, l, (LinearId)id);
        if (weight.fp8) fp8_transpose(weight.columnwise, weight.rowwise, s->N, s->K, f->transport.compute);
    }
    if (rowwise) w->rowwise_layer[l % w->num_rowwise] = l;
    if (columnwise) w->columnwise_layer[l % w->num_columnwise] = l;
}

// Makes the compute stream wait for layer l's weights, and makes the FP8 casts that the pass reads. Work enqueued
// afterwards may read the weights: in forward rowwise FP8 data; in backward columnwise FP8 data and, if backward
// recomputes GEMMs, rowwise data.
static inline void fsdp_unshard(Fsdp *f, int64_t l, bool backward) {
    if (fsdp_is_sharded(f) && !fsdp_rowwise_is_cached(f, l)) {
        fsdp_prefetch(f, l);
        compute_waits_event(&f->transport, f->weights.slot[l % f->weights.num_slots].arrived);
    }
    if (f->plan.precision->any_fp8) fsdp_make_casts(f, l, backward);
}

// Allows the memory of the layer's weights to be reused. Call it after enqueuing their last reader in this pass.
static inline void fsdp_reshard(Fsdp *f, int64_t l) {
    if (f->in.nccl) nccl_watch(f->in.nccl);  // a pass may be long and enqueue no collective
    if (fsdp_casts_are_transient(f)) fsdp_invalidate(&f->weights);
    if (fsdp_is_sharded(f))
        CUDA_CHECK(cudaEventRecord(f->weights.slot[l % f->weights.num_slots].released, f->transport.compute));
}

// ---------------------------------------------------------------------------------------------------------------------
// Publishing changed weights. The trainer calls fsdp_publish_root when the root's weights in in.weights have changed.
// It calls fsdp_publish_layers after that, when the layers' weights (and, if fsdp_tensor_scales, their amaxes) have
// changed too.

// Gathers the root unit, whose shard has changed. The gather may overlap with the update of the layers' weights. Does
// nothing without sharding.
static inline void fsdp_publish_root(Fsdp *f) {
    if (!fsdp_is_sharded(f)) return;
    const FsdpUnit root = fsdp_weights(f, ROOT);
    bf16 *const to[NUM_SEGMENTS] = {root.vectors, root.matrices, root.embedding};
    comm_waits_compute(&f->transport);
    transport_begin(&f->transport, "all-gather of the weights", ROOT);
    transport_barrier(&f->transport);  // waits until all ranks have updated their shards
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = fsdp_segment(f, ROOT, k);
        if (g.slice) transport_gather(&f->transport, f->in.weights + g.shard, to[k], g.slice, ncclBfloat16);
    }
    transport_end(&f->transport);
}

static inline void fsdp_gather_vectors(Fsdp *f) {
    nccl_begin(f->in.nccl, "all-gather of norms and biases", NO_LAYER);
    for (int64_t l = 0; l < f->plan.table->num_layers; l++) {
        const ShardSegment g = fsdp_segment(f, l, SEGMENT_VECTORS);
        bf16 *to = f->weights.vectors + l * fsdp_layer_vectors(f);
        nccl_all_gather(f->in.nccl, COMM_SHARD, f->in.weights + weights_place(&f->plan.shard, l, g.shard), to, g.slice,
                        ncclBfloat16);
    }
    nccl_end(f->in.nccl);
}

// Replaces amaxes, as many as in.scales has, by their maxima over a group of ranks. Does nothing if the group has one
// rank.
static inline void fsdp_reduce_amaxes(Fsdp *f, CommGroup group, uint32_t *amaxes) {
    if (!f->in.nccl || (group == COMM_SHARD && !fsdp_is_sharded(f))) return;
    comm_waits_compute(&f->transport);
    nccl_begin(f->in.nccl, "all-reduce of the amaxes", NO_LAYER);
    nccl_all_reduce(f->in.nccl, group, amaxes, f->plan.table->num_layers * f->in.scales->amax_stride, ncclUint32,
                    ncclMax);
    nccl_end(f->in.nccl);
    compute_waits_comm(&f->transport);
}

// Makes all later work read the new weights of the layers, whose shards have changed. If fsdp_tensor_scales, in.scales
// must hold the amaxes of this rank's part of each weight; else the amaxes of the weights must be zero there.
static inline void fsdp_publish_layers(Fsdp *f) {
    const int64_t L = f->plan.table->num_layers;
    if (fsdp_tensor_scales(f)) fsdp_reduce_amaxes(f, COMM_SHARD, f->in.scales->amax);
    if (!f->weights.update_coded) tensor_scales_begin_weights(f->in.scales);
    if (f->plan.precision->casts_masters)
        fp16_factors(&f->weights.masters, L, f->in.masters->scales + MSAMP_MASTER * f->in.masters->tensors,
                     f->in.scales->amax, f->in.scales->scale_inv, TENSORS_PER_LAYER, f->transport.compute);
    fsdp_invalidate(&f->weights);
    memset(f->weights.amaxes_known, 0, (size_t)L * sizeof *f->weights.amaxes_known);
    if (fsdp_keeps_codes(f)) fsdp_cast_shard(f);
    f->weights.update_coded = false;
    if (!fsdp_is_sharded(f)) return;
    comm_waits_compute(&f->transport);
    fsdp_gather_vectors(f);
    compute_waits_comm(&f->transport);
}

// ---- gradients

static inline int fsdp_gradient_buffer(int64_t l) { return l == ROOT ? 0 : 1 + (int)(l % FSDP_GRADIENT_BUFFERS); }

// True if backward of this micro-step writes unit l's gradient directly into the gradient array.
static inline bool fsdp_in_place(const Fsdp *f, int64_t l) {
    return !fsdp_is_sharded(f) && !f->transport.fp32_sums && !f->gradients.sum.add &&
           (l == ROOT || !f->plan.fp8_gradients);
}

// Returns views of the memory in which unit l's gradient is computed.
static inline FsdpUnit fsdp_gradients(const Fsdp *f, int64_t l) {
    if (fsdp_in_place(f, l)) return fsdp_unit(f, f->transport.sums + fsdp_sums_begin(f, l), l, false);
    bf16 *buffer = l == ROOT ? f->gradients.root_buffer : f->gradients.layer_buffer[l % FSDP_GRADIENT_BUFFERS];
    FsdpUnit u = fsdp_unit(f, buffer, l, true);
    if (fsdp_embedding_joins(f)) u.embedding = NULL;
    return u;
}

// Returns how this micro-step's gradients are added to this rank's slice of segment g.
static inline GradientSum fsdp_sum_of(const Fsdp *f, ShardSegment g) {
    GradientSum s = f->gradients.sum;
    s.flat = g.flat + f->plan.shard.shard_rank * g.slice;
    return s;
}

// Returns how the embedding's gradient is added to this rank's sums (fsdp_embedding_joins).
static inline GradientSum fsdp_embedding_sum(const Fsdp *f) {
    GradientSum s = fsdp_sum_of(f, fsdp_segment(f, ROOT, embedding_segment(f->plan.table)));
    s.key = f->gradients.embedding_key;
    return s;
}

// Zeroes the padding between and after a unit's vectors, and after its matrices: it is reduced with them. Matrices have
// none between them.
static inline void fsdp_zero_padding(Fsdp *f, int64_t l) {
    const FsdpPlan *plan = &f->plan;
    const FsdpUnit g = fsdp_gradients(f, l);
    const int64_t *elements = l == ROOT ? plan->root_elements : plan->layer_elements,
                  *slices = slice_sizes(&plan->shard, l);
    const int64_t vectors = plan->shard.shard_size * slices[SEGMENT_VECTORS], matrices = elements[SEGMENT_MATRICES],
                  padding = plan->shard.shard_size * slices[SEGMENT_MATRICES] - matrices;
    if (vectors > elements[SEGMENT_VECTORS])
        CUDA_CHECK(cudaMemsetAsync(g.vectors, 0, (size_t)vectors * sizeof(bf16), f->transport.compute));
    if (padding)
        CUDA_CHECK(cudaMemsetAsync(g.matrices + matrices, 0, (size_t)padding * sizeof(bf16), f->transport.compute));
}

// Makes the compute stream wait until the last reduction from the unit's gradient buffer is done, and zeroes the
// padding of the unit's vectors and matrices. Call it before the first write to that gradient in a micro-step. Call it
// with ROOT before the loss: the compute stream then waits for all buffers, because the loss may use the buffers of
// layers (fsdp_loss_span).
static inline void fsdp_begin_gradients(Fsdp *f, int64_t l) {
    const int buffer = fsdp_gradient_buffer(l);
    for (int i = 0; fsdp_is_sharded(f) && i < 1 + FSDP_GRADIENT_BUFFERS; i++)
        if (l == ROOT || i == buffer) compute_waits_event(&f->transport, f->gradients.reduced[i]);
    fsdp_zero_padding(f, l);
}

// Without sharding: adds a unit's gradient to the sums, unless it was computed there; the first micro-step stores it
// there instead. Leaves out the embedding's gradient, which fsdp_embedding_join adds. Returns the bytes moved.
static inline int64_t fsdp_join(Fsdp *f, int64_t l) {
    const FsdpGradients *g = &f->gradients;
    if (fsdp_in_place(f, l)) return 0;
    const bool fp8 = f->plan.fp8_gradients && l != ROOT;
    const int64_t n =
        fp8 ? g->fp8_layout.vectors : segment_begin(slice_sizes(&f->plan.shard, l), fsdp_reduced_segments(f));
    const bf16 *from = l == ROOT ? g->root_buffer : g->layer_buffer[0];
    GradientSum how = g->sum;
    how.flat = shard_begin(&f->plan.shard, l);
    transport_add(&f->transport, fsdp_sums_begin(f, l), from, n, how, grid_size(n, TRANSPORT_THREADS * 8),
                  f->transport.compute);
    const int64_t bytes = n * (2 + (how.add + 1) * (f->transport.fp32_sums ? 4 : 2));
    if (!fp8) return bytes;
    how.flat += n;
    return bytes + gradient_fp8_join(g->fp8_sums, &g->fp8_layout, l, from + n, how, f->transport.compute);
}

// Reduce-scatters the unit's gradient of this micro-step and adds the result to the sums of earlier micro-steps.
// Without sharding only adds it (fsdp_join). The gradient of the loss was divided by the number of the step's tokens on
// all ranks, so the sum is the mean. Returns the bytes that the compute stream moves.
static inline int64_t fsdp_reduce_scatter(Fsdp *f, int64_t l) {
    if (!fsdp_is_sharded(f)) return fsdp_join(f, l);
    const FsdpUnit full = fsdp_gradients(f, l);
    bf16 *const from[NUM_SEGMENTS] = {full.vectors, full.matrices, full.embedding};
    TransportSegment segments[NUM_SEGMENTS];
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = fsdp_segment(f, l, k);
        const int64_t at = fsdp_sums_begin(f, l) + g.shard - shard_begin(&f->plan.shard, l);
        const TransportSegment s = {from[k], g.slice, at, fsdp_sum_of(f, g)};
        segments[k] = s;
    }
    const bool fp8 = f->plan.fp8_gradients && l != ROOT;
    comm_waits_compute(&f->transport);
    transport_reduce_scatter(&f->transport, segments, fp8 ? SEGMENT_MATRICES : fsdp_reduced_segments(f), l);
    if (fp8) fsdp_reduce_scatter_fp8(f, l, full.matrices, segments[SEGMENT_MATRICES].how);
    CUDA_CHECK(cudaEventRecord(f->gradients.reduced[fsdp_gradient_buffer(l)], f->transport.nccl->stream));
    return 0;
}

// Call it after the unit's last micro-step, when its reductions are enqueued in the communication stream. If AdamW runs
// in the backward pass, records the event that fsdp_await_sums waits for. With grad_clip, the communication stream sums
// the layer's squares before the event, so that AdamW needs no other wait.
static inline void fsdp_complete_sums(Fsdp *f, int64_t l) {
    if (!f->in.nccl || l == ROOT || !f->plan.optimizer_in_backward) return;
    if (f->clip.grad_clip > 0) fsdp_sum_squares(f, l, f->transport.nccl->stream);
    CUDA_CHECK(cudaEventRecord(f->gradients.summed[l % f->plan.sum_layers], f->transport.nccl->stream));
}

// With optimizer_in_backward: makes the compute stream wait until this rank's sums of layer l are those over all ranks.
static inline void fsdp_await_sums(Fsdp *f, int64_t l) {
    if (f->in.nccl) compute_waits_event(&f->transport, f->gradients.summed[l % f->plan.sum_layers]);
}

// All-reduces this rank's part of a unit's gradient over replicas if this is the `last` micro-step. After
// compute_waits_comm, or fsdp_await_sums, that part is the sum over all ranks.
static inline void fsdp_reduce_replicas(Fsdp *f, int64_t l, bool last) {
    if (!f->in.nccl || !last) return;
    if (f->plan.replicas > 1) {
        comm_waits_compute(&f->transport);
        const bool fp8 = f->plan.fp8_gradients && l != ROOT;
        const int64_t n = fp8 ? f->gradients.fp8_layout.vectors : shard_elements(&f->plan.shard, l);
        transport_all_reduce(&f->transport, COMM_REPLICAS, fsdp_sums_begin(f, l), n, l);
        if (fp8) fsdp_reduce_replicas_fp8(f, l);
    }
    fsdp_complete_sums(f, l);
}

// Returns the input gradients [fsdp_input_ranks][input_elements]. Without FSDP_EMBEDDING_FROM_INPUTS these are this
// rank's own, `dx`. Else gathers those of the shard group: the compute stream then waits for the gather and for the
// reduction of the root's gradient, so later work may overwrite dx and add to the root's sums. Every rank's dx is
// complete before the gather: it was complete at the last fsdp_reduce_scatter, which waits for all ranks.
static inline const bf16 *fsdp_gather_input_gradients(Fsdp *f, const bf16 *dx) {
    if (f->plan.embedding != FSDP_EMBEDDING_FROM_INPUTS) return dx;
    comm_waits_compute(&f->transport);
    transport_begin(&f->transport, "all-gather of the embedding's output gradients", NO_LAYER);
    transport_gather(&f->transport, dx, f->gradients.root_buffer, f->plan.input_elements, ncclBfloat16);
    transport_barrier(&f->transport);  // waits until all ranks have read dx
    transport_end(&f->transport);
    compute_waits_comm(&f->transport);
    return f->gradients.root_buffer;
}

#endif
