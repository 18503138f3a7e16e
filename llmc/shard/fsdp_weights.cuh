// Weights under FSDP: where gathered and cast weights are, and casts to FP8 of a layer or of this rank's slices.
//
// FP8 weights are cast from bf16 weights, or from FP16 masters (precision_casts_masters). If they are cast from FP16
// masters, the layers' matrices have no bf16 weights.
#ifndef LLMC_FSDP_WEIGHTS_CUH
#define LLMC_FSDP_WEIGHTS_CUH

#include "fsdp_plan.cuh"

// ---- views

static inline char *fsdp_slot_data(const Fsdp *f, int64_t slot) {
    return f->weights.slots + slot * fsdp_layer_matrices(f) * fsdp_slot_element(f);
}

static inline uint8_t *fsdp_rowwise(const Fsdp *f, int64_t l) {
    if (fsdp_gathers_fp8(f, l)) return (uint8_t *)fsdp_slot_data(f, l % f->weights.num_slots);
    if (fsdp_codes_are_resident(f)) return f->weights.shard_fp8 + l * fsdp_layer_matrices(f);
    return f->weights.rowwise + l % f->weights.num_rowwise * fsdp_layer_matrices(f);
}

static inline uint8_t *fsdp_columnwise(const Fsdp *f, int64_t l) {
    return f->weights.columnwise + l % f->weights.num_columnwise * fsdp_layer_matrices(f);
}

static inline ShardSegment fsdp_segment(const Fsdp *f, int64_t l, int segment) {
    return segment_slice(f->plan.table, &f->plan.shard, l, segment);
}

// Returns views of unit l, whose memory begins at `unit`: this rank's part of it, or, if `gathered`, the whole unit.
static inline FsdpUnit fsdp_unit(const Fsdp *f, bf16 *unit, int64_t l, bool gathered) {
    bf16 *at[NUM_SEGMENTS];
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = fsdp_segment(f, l, k);
        at[k] = unit + (gathered ? g.gathered : g.shard - shard_begin(&f->plan.shard, l));
    }
    return FsdpUnit{at[SEGMENT_VECTORS], at[SEGMENT_MATRICES], l == ROOT ? at[embedding_segment(f->plan.table)] : NULL};
}

// Returns views of the bf16 weights of the whole unit l. A sharded layer's matrices are valid between fsdp_unshard and
// fsdp_reshard, if fsdp_unshard needed them. A transient embedding is valid until backward computes gradients.
static inline FsdpUnit fsdp_weights(const Fsdp *f, int64_t l) {
    FsdpUnit u = {NULL, NULL, NULL};
    if (!fsdp_is_sharded(f)) {
        u = fsdp_unit(f, f->in.weights + weights_begin(&f->plan.shard, l), l, false);
        if (!weights_have(&f->plan.shard, l, SEGMENT_MATRICES)) u.matrices = NULL;
    } else if (l == ROOT) {
        u = fsdp_unit(f, f->weights.root, ROOT, true);
        if (f->plan.embedding_is_transient) u.embedding = f->gradients.root_buffer;
    } else {
        u.vectors = f->weights.vectors + l * fsdp_layer_vectors(f);
        if (!fsdp_gathers_fp8(f, l)) u.matrices = (bf16 *)fsdp_slot_data(f, l % f->weights.num_slots);
    }
    return u;
}

// Returns a linear layer's weight in layer l, for casts and GEMMs. `data` is NULL if the layer has no bf16 matrices.
static inline QTensor fsdp_weight(const Fsdp *f, int64_t l, LinearId id) {
    const FsdpWeights *kept = &f->weights;
    const int64_t offset = f->plan.precision->linear[id].offset;
    const bf16 *matrices = fsdp_weights(f, l).matrices;
    QTensor w = tensor_scales_of(f->in.scales, l, TENSOR_W, id);
    w.data = matrices ? (bf16 *)matrices + offset : NULL;
    if (!w.fp8) return w;
    w.rowwise = fsdp_rowwise(f, l) + offset, w.columnwise = fsdp_columnwise(f, l) + offset;
    if (fsdp_tensor_scales(f)) return w;
    w.rowwise_scale_inv =
        kept->rowwise_scales + l % kept->num_rowwise * kept->rowwise_scale_bytes + kept->scales[id].rowwise_scales;
    w.columnwise_scale_inv = kept->columnwise_scales + l % kept->num_columnwise * kept->columnwise_scale_bytes +
                             kept->scales[id].columnwise_scales;
    return w;
}

// ---- casts

// Sets where this rank's FP16 masters of the layers' matrices are.
static inline void fsdp_find_masters(Fsdp *f) {
    Fp16Weights *m = &f->weights.masters;
    const ShardSegment g = segment_slice(f->plan.table, &f->plan.shard, 0, SEGMENT_MATRICES);
    m->tensors = fp16_tensors(f->plan.table);
    m->masters = f->in.masters->master + g.shard;
    m->stride = shard_elements(&f->plan.shard, 0);
    m->first = f->plan.shard.shard_rank * g.slice;
}

// Casts a weight of layer l from FP16 masters. This rank must have the masters of the whole weight. Audits a rowwise
// cast in an audited step.
static inline void fsdp_cast_masters(Fsdp *f, QTensor w, int64_t l, const LinearShape *s) {
    fp16_cast(w, &f->weights.masters, l, s->offset, s->N, s->K, f->transport.compute);
    if (w.rowwise && w.audit[ROWWISE])
        fp16_audit(w.audit[ROWWISE], &f->weights.masters, l, s->offset, s->N * s->K, w.rowwise,
                   (const float *)w.rowwise_scale_inv, f->transport.compute);
}

// Casts the layer's FP8 weights to rowwise data, columnwise data or both. With scales finer than per tensor, the
// layer's first cast after its weights changed computes the amaxes that both casts need.
static inline void fsdp_cast(Fsdp *f, int64_t l, bool rowwise, bool columnwise) {
    for (int id = 0; id < NUM_LINEARS; id++) {
        const LinearShape *s = &f->plan.precision->linear[id];
        QTensor w = tensor_scales_audited(f->in.scales, fsdp_weight(f, l, (LinearId)id));
        if (!w.fp8) continue;
        if (!rowwise) w.rowwise = NULL;
        if (!columnwise) w.columnwise = NULL;
        if (!fsdp_tensor_scales(f) && !f->weights.amaxes_known[l])
            tensor_amax_pass(w, w.data, s->N, s->K, f->transport.compute);
        if (f->plan.precision->casts_masters) fsdp_cast_masters(f, w, l, s);
        else quantize_transpose(w, w.data, s->N, s->K, f->transport.compute);
    }
    f->weights.amaxes_known[l] = true;
}

// Casts this rank's slices of the matrices of all layers to FP8, from FP16 masters. Audits the casts in an audited
// step.
static inline void fsdp_cast_shard_masters(Fsdp *f) {
    const FsdpWeights *weights = &f->weights;
    const TensorScales *scales = f->in.scales;
    const int64_t L = f->plan.table->num_layers;
    fp16_cast_slices(weights->shard_fp8, &weights->masters, L, f->plan.shard.layer_slices[SEGMENT_MATRICES],
                     f->transport.compute);
    for (int64_t i = 0; scales->auditing && i < L * NUM_LINEARS; i++) {
        const int64_t l = i / NUM_LINEARS;
        const LinearId id = (LinearId)(i % NUM_LINEARS);
        const LinearShape *s = &f->plan.precision->linear[id];
        const ShardSegment g = fsdp_segment(f, l, SEGMENT_MATRICES);
        const ShardRange r = shard_matrix(f->plan.table, &f->plan.shard, l, s->offset, s->N * s->K);
        const QTensor w = tensor_scales_audited(scales, tensor_scales_of(scales, l, TENSOR_W, id));
        fp16_audit(w.audit[ROWWISE], &weights->masters, l, r.shard - g.shard, r.count,
                   weights->shard_fp8 + l * g.slice + r.shard - g.shard, (const float *)w.rowwise_scale_inv,
                   f->transport.compute);
    }
}

// Casts this rank's slices of the matrices of all layers to FP8, unless AdamW has written their codes. Audits the codes
// in an audited step.
static inline void fsdp_cast_shard(Fsdp *f) {
    if (f->plan.precision->casts_masters) return fsdp_cast_shard_masters(f);
    const ShardSegment g = fsdp_segment(f, 0, SEGMENT_MATRICES);
    Fp8Slices s;
    memset(&s, 0, sizeof s);
    s.count = f->plan.table->num_layers, s.n = g.slice, s.num_tensors = NUM_LINEARS;
    for (int j = 0; j < NUM_LINEARS; j++) {
        const LinearShape *linear = &f->plan.precision->linear[j];
        const int64_t end = linear->offset + linear->N * linear->K - f->plan.shard.shard_rank * g.slice;
        s.ends[j] = max_i64(0, min_i64(g.slice, end));
    }
    s.x = f->in.weights + g.shard, s.x_stride = shard_elements(&f->plan.shard, 0);
    s.codes = f->weights.shard_fp8;
    const TensorScales *scales = f->in.scales;
    s.amax = scales->amax, s.scale_inv = scales->scale_inv, s.slot_stride = TENSORS_PER_LAYER;
    s.rule = f->plan.precision->recipe->rule, s.delayed_scale = tensor_scales_known(scales);
    if (!f->weights.update_coded) quantize_slices(&s, f->transport.compute);
    AuditSums *audit = scales->auditing ? scales->audit + audit_index(0, 0, TENSOR_W, ROWWISE) : NULL;
    if (audit) audit_slices(&s, audit, AUDIT_LAYER, AUDIT_LINEAR, f->transport.compute);
}

#endif
