// Whole units on the CPU: weights gathered from the shard group, gradients reduced into it, in fp32, bf16 or FP8.
#ifndef LLMC_CPU_SHARD_H
#define LLMC_CPU_SHARD_H

#include "../reference/gradient_fp8.h"
#include "trainer.h"

// Fills a segment of the root or of layer l in `unit` from the slices of the shard group.
static inline void gather_segment(Trainer *t, float *unit, int64_t l, int segment) {
    const ShardSegment g = segment_slice(&t->table, &t->plan, l, segment);
    comm_all_gather(t->comm, COMM_SHARD, t->params.weights + g.shard, unit + g.gathered,
                    g.slice * (int64_t)sizeof(float));
}

// True if layer l's matrices are cast to FP8 codes when they change. A shard group then gathers codes, not values.
static inline bool cast_ahead(const Trainer *t, int64_t l) {
    return t->units.casts_ahead && precision_layer_is_fp8(&t->precision, l);
}

static inline GatheredLayer *layer_slot(const Trainer *t, int64_t l) {
    return &t->units.slots[t->units.num_slots > 1 ? l : 0];
}

// Gathers layer l's weights if they are sharded and its slot does not hold them yet. `backward` changes nothing: both
// passes read the same values.
static inline void unshard(Trainer *t, int64_t l, bool backward) {
    (void)backward;
    GatheredLayer *slot = layer_slot(t, l);
    if (t->plan.shard_size == 1 || slot->layer == l) return;
    const int64_t matrices = t->plan.layer_slices[SEGMENT_MATRICES];
    gather_segment(t, slot->values, l, SEGMENT_VECTORS);
    if (cast_ahead(t, l)) comm_all_gather(t->comm, COMM_SHARD, t->units.codes + l * matrices, slot->codes, matrices);
    else gather_segment(t, slot->values, l, SEGMENT_MATRICES);
    slot->layer = l;
}

// Called when a pass has no more use for layer l's weights. Does nothing here: they stay until another layer needs the
// slot.
static inline void reshard(Trainer *t, int64_t l) { (void)t, (void)l; }

// Returns where the backward pass writes the gradients of the root or of layer l.
static inline float *unit_gradients(const Trainer *t, int64_t l) {
    if (!t->units.buffered) return t->params.gradients + gradients_begin(t, l);
    return l == ROOT ? t->units.root_gradients : t->units.layer_gradients;
}

static inline QTensor qtensor(Real *data, int64_t l, TensorRole role, LinearId id) {
    return (QTensor){data, NULL, l, role, id};
}

// Returns linear layer `id`'s weight, or its gradient, in layer l's `unit`. If `codes` is not NULL, returns the FP8
// codes of the weight instead.
static inline QTensor unit_matrix(const Trainer *t, int64_t l, LinearId id, float *unit, const uint8_t *codes) {
    const int64_t offset = t->precision.linear[id].offset, vectors = t->table.layer_segments[SEGMENT_VECTORS];
    QTensor w = qtensor(NULL, l, TENSOR_W, id);
    if (codes) w.codes = codes + offset;
    else w.data = unit + gathered_offset(&t->table, &t->plan, l, vectors + offset);
    return w;
}

// Returns views of layer l's unit, whose vectors come first. GEMMs read fused weights as one matrix.
static inline Layer unit_layer(const Trainer *t, int64_t l, float *unit, const uint8_t *codes) {
    const LayerOffsets *at = &t->table.layer;
    Layer v;
    v.norm1 = unit + at->norm1, v.norm2 = unit + at->norm2;
    v.q_norm = t->m.qk_norm ? unit + at->q_norm : NULL, v.k_norm = t->m.qk_norm ? unit + at->k_norm : NULL;
    v.qkv_bias = t->m.qkv_bias ? unit + at->bq : NULL;
    v.qkv = unit_matrix(t, l, QKV_PROJ, unit, codes), v.out = unit_matrix(t, l, OUT_PROJ, unit, codes);
    v.gate_up = unit_matrix(t, l, GATE_UP_PROJ, unit, codes), v.down = unit_matrix(t, l, DOWN_PROJ, unit, codes);
    return v;
}

// Returns layer l's weights. Call it between unshard and reshard.
static inline Layer layer_weights(Trainer *t, int64_t l) {
    const bool whole = t->plan.shard_size == 1;
    const GatheredLayer *slot = layer_slot(t, l);
    const uint8_t *codes = whole ? t->units.codes + l * t->plan.layer_slices[SEGMENT_MATRICES] : slot->codes;
    float *values = whole ? t->params.weights + layer_offset(&t->table, l) : slot->values;
    return unit_layer(t, l, values, cast_ahead(t, l) ? codes : NULL);
}

static inline Layer layer_gradients(Trainer *t, int64_t l) { return unit_layer(t, l, unit_gradients(t, l), NULL); }

static inline Root unit_root(const Trainer *t, float *unit) {
    const RootOffsets *at = &t->table.root;
    const int64_t lm_head = t->m.tie_word_embeddings ? at->embedding : at->lm_head;
    return (Root){unit + gathered_offset(&t->table, &t->plan, ROOT, at->embedding),
                  unit + gathered_offset(&t->table, &t->plan, ROOT, lm_head),
                  unit + gathered_offset(&t->table, &t->plan, ROOT, at->norm)};
}

// Returns the root's weights. Once gathered they stay until the weights change.
static inline Root root_weights(Trainer *t) {
    if (t->plan.shard_size == 1) return unit_root(t, t->params.weights);
    for (int k = 0; k < NUM_SEGMENTS && !t->units.root_held; k++) gather_segment(t, t->units.root, ROOT, k);
    t->units.root_held = true;
    return unit_root(t, t->units.root);
}

static inline Root root_gradients(Trainer *t) { return unit_root(t, unit_gradients(t, ROOT)); }

// Returns the sum of element i over `ranks` arrays, `stride` elements apart, in the order of ranks.
static inline float rank_sum(const float *arrays, int64_t ranks, int64_t stride, int64_t i) {
    double sum = 0;
    for (int64_t r = 0; r < ranks; r++) sum += arrays[r * stride + i];
    return (float)sum;
}

// Returns how the gradients of this micro-step of rank `rank` of the shard group are added to the sum.
static inline GradientSum micro_sum(const Trainer *t, int64_t rank) {
    const int64_t batch = t->units.micro * t->comm->world + t->comm->rank - t->plan.shard_rank + rank;
    const uint64_t key = gradient_sum_key((uint64_t)t->o->rounding_seed, t->units.step, 2 * batch);
    const bool add = t->units.micro > 0 || rank > 0;
    return (GradientSum){add, add, key, 0};
}

// The entries [begin, end) of the parameter table that are in one unit.
typedef struct {
    int64_t begin, end;
} UnitEntries;

static inline UnitEntries unit_entries(const Trainer *t, int64_t l) {
    UnitEntries u = {0, 0};
    while (t->table.entries[u.begin].layer != l) u.begin++;
    for (u.end = u.begin; u.end < t->table.count && t->table.entries[u.end].layer == l;) u.end++;
    return u;
}

// Returns this rank's part of entry i of the table. Its count is 0 if the gradient of the entry is not FP8, or if this
// rank has no part of it.
static inline ShardRange fp8_gradient_part(const Trainer *t, int64_t i) {
    const Parameter *p = &t->table.entries[i];
    const ShardRange none = {0, 0, 0};
    return p->flags & PARAM_FP8 ? shard_parameter(&t->table, &t->plan, p) : none;
}

// Returns the scale of an FP8 gradient from its amax, which units.amaxes has.
static inline float fp8_gradient_scale(const Trainer *t, int64_t i) { return gradient_fp8_scale(t->units.amaxes[i]); }

// Finds the amaxes of layer l's FP8 gradients in params.gradients, over all ranks of `group`.
static inline void fp8_gradient_amaxes(Trainer *t, int64_t l, CommGroup group) {
    const UnitEntries u = unit_entries(t, l);
    for (int64_t i = u.begin; i < u.end; i++) {
        const ShardRange r = fp8_gradient_part(t, i);
        t->units.amaxes[i] = r.count ? gradient_fp8_amax(gradients_at(t, l, r.shard), r.count) : 0;
    }
    comm_max_u32(t->comm, group, t->units.amaxes + u.begin, u.end - u.begin);
}

// Rounds layer l's gradients of matrices, in params.gradients, to FP8. `sum`: how they have joined these. The segment
// of matrices begins at `begin` in the rank's shard.
static inline void round_gradients(Trainer *t, int64_t l, const GradientSum *sum, int64_t begin) {
    const UnitEntries u = unit_entries(t, l);
    fp8_gradient_amaxes(t, l, COMM_SHARD);
    for (int64_t i = u.begin; i < u.end; i++) {
        const ShardRange r = fp8_gradient_part(t, i);
        if (r.count)
            gradient_fp8_round(gradients_at(t, l, r.shard), fp8_gradient_scale(t, i), r.shard - begin, r.count, sum);
    }
}

// Returns this rank's slice of the sum of layer l's gradients of matrices over the shard group, sent in FP8. `whole`
// is this rank's gradient of the segment. units.received has three parts, one behind the other: the codes from all
// ranks, this rank's codes, and the result.
static inline const float *reduce_scatter_fp8(Trainer *t, int64_t l, const float *whole) {
    const int64_t ranks = t->plan.shard_size;
    const ShardSegment g = segment_slice(&t->table, &t->plan, l, SEGMENT_MATRICES);
    const UnitEntries u = unit_entries(t, l);
    uint8_t *received = (uint8_t *)t->units.received, *codes = received + ranks * g.slice;
    float *sum = (float *)(codes + ranks * g.slice);
    memset(codes, 0, (size_t)(ranks * g.slice));
    for (int64_t i = u.begin; i < u.end; i++) {
        const Parameter *p = &t->table.entries[i];
        const int64_t at = p->offset - g.flat, n = p->flags & PARAM_FP8 ? parameter_elements(p) : 0;
        t->units.amaxes[i] = n ? gradient_fp8_amax(whole + at, n) : 0;
    }
    comm_max_u32(t->comm, COMM_SHARD, t->units.amaxes + u.begin, u.end - u.begin);
    for (int64_t i = u.begin; i < u.end; i++) {
        const Parameter *p = &t->table.entries[i];
        const int64_t at = p->offset - g.flat;
        if (p->flags & PARAM_FP8)
            gradient_fp8_encode(codes + at, whole + at, fp8_gradient_scale(t, i), parameter_elements(p));
    }
    comm_all_to_all(t->comm, COMM_SHARD, codes, received, g.slice);
    memset(sum, 0, (size_t)g.slice * sizeof *sum);
    for (int64_t i = u.begin; i < u.end; i++) {
        const ShardRange r = fp8_gradient_part(t, i);
        const int64_t at = r.shard - g.shard;
        const float scale_inv = 1 / fp8_gradient_scale(t, i);
        if (r.count) gradient_fp8_sum(sum + at, received + at, ranks, g.slice, scale_inv, r.count);
    }
    return sum;
}

// Returns this rank's slice of the sum of layer l's gradients of matrices over the shard group, rounded to bf16 unless
// --reduce-dtype is fp32. `whole` is this rank's gradient of the segment.
static inline const float *reduce_scatter_matrices(Trainer *t, int64_t l, const float *whole) {
    const ShardSegment g = segment_slice(&t->table, &t->plan, l, SEGMENT_MATRICES);
    float *received = t->units.received;
    comm_all_to_all(t->comm, COMM_SHARD, whole, received, g.slice * (int64_t)sizeof(float));
    for (int64_t i = 0; i < g.slice; i++) {  // into the first rank's part, whose element i was read
        const float sum = rank_sum(received, t->plan.shard_size, g.slice, i);
        received[i] = t->o->reduce_dtype == REDUCE_FP32 ? sum : bf16_round(sum);
    }
    return received;
}

// Adds the sum of layer l's gradients of matrices over the shard group, `whole` on this rank, to the FP8 sums, and
// rounds these.
static inline void reduce_scatter_to_fp8(Trainer *t, int64_t l, const float *whole) {
    const ShardSegment g = segment_slice(&t->table, &t->plan, l, SEGMENT_MATRICES);
    GradientSum how = micro_sum(t, 0);
    if (t->plan.shard_size > 1)
        whole =
            t->o->reduce_dtype == REDUCE_FP8 ? reduce_scatter_fp8(t, l, whole) : reduce_scatter_matrices(t, l, whole);
    how.flat = g.flat + t->plan.shard_rank * g.slice;
    gradient_sum_reference(gradients_at(t, l, g.shard), whole, 0, g.slice, true, &how);
    round_gradients(t, l, &how, g.shard);
}

// Adds the gradients of a segment, `whole` on this rank, to this rank's slice in params.gradients: those of one rank of
// the shard group after the other. So they are added in the order of samples, micro-step by micro-step and rank by
// rank, on any number of ranks.
static inline void reduce_scatter_segment(Trainer *t, int64_t l, const ShardSegment *g, const float *whole) {
    if (t->plan.shard_size > 1)
        comm_all_to_all(t->comm, COMM_SHARD, whole, t->units.received, g->slice * (int64_t)sizeof(float));
    for (int64_t r = 0; r < t->plan.shard_size; r++) {
        GradientSum how = micro_sum(t, r);
        how.flat = g->flat + t->plan.shard_rank * g->slice;
        gradient_sum_reference(gradients_at(t, l, g->shard),
                               t->plan.shard_size > 1 ? t->units.received + r * g->slice : whole, 0, g->slice,
                               t->units.fp32_sums, &how);
    }
}

// Hashes the gradients of the tensors of unit l for a replay.
static inline void replay_unit(Trainer *t, int64_t l, const float *whole) {
    for (int64_t i = 0; t->units.replay.hashes && i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        if (p->layer != l) continue;
        const int64_t at = gathered_offset(&t->table, &t->plan, l, p->offset - layer_offset(&t->table, l));
        const ReceiptPart part = {at, parameter_elements(p), at};
        t->units.replay.values[i] = receipt_sum(whole, sizeof *whole, part);
    }
}

// Called after the backward pass of the root or of layer l. Does nothing unless gradients are computed in buffers. Adds
// those of the shard group to this rank's slices in params.gradients; the first micro-step replaces these.
static inline void reduce_scatter_gradients(Trainer *t, int64_t l) {
    const float *whole = unit_gradients(t, l);
    replay_unit(t, l, whole);
    if (t->units.replay.again) return;
    for (int k = 0; t->units.buffered && k < NUM_SEGMENTS; k++) {
        const ShardSegment g = segment_slice(&t->table, &t->plan, l, k);
        if (t->units.fp8_sums && l != ROOT && k == SEGMENT_MATRICES) reduce_scatter_to_fp8(t, l, whole + g.gathered);
        else reduce_scatter_segment(t, l, &g, whole + g.gathered);
    }
}

// Replaces the gradients of a segment of unit l by their sums over the replicas, after the last micro-step. Adds those
// of one replica after the other. So if there is one micro-step, replicas of one rank have the bits of a shard group.
static inline void reduce_replicas_segment(Trainer *t, int64_t l, int segment) {
    const ShardSegment g = segment_slice(&t->table, &t->plan, l, segment);
    float *received = t->units.received;
    for (int64_t first = 0; t->comm->replicas > 1 && first < g.slice; first += REPLICA_CHUNK) {
        const int64_t n = min_i64(REPLICA_CHUNK, g.slice - first), flat = g.flat + t->plan.shard_rank * g.slice + first;
        float *sum = gradients_at(t, l, g.shard) + first;
        comm_all_gather(t->comm, COMM_REPLICAS, sum, received, n * (int64_t)sizeof(float));
        memcpy(sum, received, (size_t)n * sizeof *sum);
        for (int64_t r = 1; r < t->comm->replicas; r++) {  // the first micro-step has left this key unused
            const uint64_t seed = (uint64_t)t->o->rounding_seed,
                           key = gradient_sum_key(seed, t->units.step, 2 * r * t->comm->shard_size);
            const GradientSum how = {true, true, key, flat};
            gradient_sum_reference(sum, received + r * n, 0, n, t->units.fp32_sums, &how);
        }
    }
}

static inline void reduce_replicas(Trainer *t, int64_t l) {
    for (int k = 0; k < NUM_SEGMENTS; k++) reduce_replicas_segment(t, l, k);
}

// Replaces layer l's gradients of matrices by their sum over the replicas, sent in FP8. The amaxes are over all ranks,
// because the ranks of a shard group have parts of the same tensors. This rank's codes are, for one tensor at a time,
// where backward computes the gradients of matrices.
static inline void reduce_replicas_fp8(Trainer *t, int64_t l) {
    const int64_t replicas = t->comm->replicas;
    const UnitEntries u = unit_entries(t, l);
    uint8_t *codes = (uint8_t *)(t->units.layer_gradients +
                                 segment_slice(&t->table, &t->plan, l, SEGMENT_MATRICES).gathered),
            *received = (uint8_t *)t->units.received;
    fp8_gradient_amaxes(t, l, COMM_WORLD);
    for (int64_t i = u.begin; i < u.end; i++) {
        const ShardRange r = fp8_gradient_part(t, i);
        const float scale = fp8_gradient_scale(t, i), scale_inv = 1 / scale;
        float *gradients = r.count ? gradients_at(t, l, r.shard) : NULL;
        gradient_fp8_encode(codes, gradients, scale, r.count);
        for (int64_t first = 0; first < r.count; first += REPLICA_CHUNK) {
            const int64_t n = min_i64(REPLICA_CHUNK, r.count - first);
            comm_all_gather(t->comm, COMM_REPLICAS, codes + first, received, n);
            gradient_fp8_sum(gradients + first, received, replicas, n, scale_inv, n);
        }
    }
}

// With FP8 gradients: replaces all gradients by their sums over the replicas, after the last micro-step. The sums of
// FP8 gradients are FP8 again.
static inline void reduce_replicas_of_units(Trainer *t) {
    const GradientSum replaces = {false, false, 0, 0};
    if (t->comm->replicas == 1) return;
    reduce_replicas(t, ROOT);
    for (int64_t l = 0; l < t->d.L; l++) {
        const ShardSegment matrices = segment_slice(&t->table, &t->plan, l, SEGMENT_MATRICES);
        reduce_replicas_segment(t, l, SEGMENT_VECTORS);
        if (t->o->reduce_dtype == REDUCE_FP8) reduce_replicas_fp8(t, l);
        else reduce_replicas_segment(t, l, SEGMENT_MATRICES);
        round_gradients(t, l, &replaces, matrices.shard);
    }
}

// Returns the sum of squares of unit l's gradients, the shard group's together. Each rank adds up blocks of
// PARAMETER_ALIGNMENT elements. Then all ranks add these in the order of the flat array, so they get the same bits, on
// any number of ranks.
static inline double unit_squares(const Trainer *t, int64_t l) {
    const int64_t block = PARAMETER_ALIGNMENT, count = segment_begin(segment_sizes(&t->table, l), NUM_SEGMENTS) / block;
    double *sums = (double *)xcalloc((size_t)count, sizeof *sums), total = 0;
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = segment_slice(&t->table, &t->plan, l, k);
        const int64_t begin = t->plan.shard_rank * g.slice, end = min_i64(begin + g.slice, g.size),
                      before = g.flat - layer_offset(&t->table, l);
        PARALLEL_FOR
        for (int64_t i = begin; i < end; i += block)
            sums[(before + i) / block] = squares_sum(gradients_at(t, l, g.shard + i - begin), block);
    }
    comm_sum(t->comm, COMM_SHARD, sums, count);  // one rank has each block's sum; the others have 0 there
    for (int64_t b = 0; b < count; b++) total += sums[b];
    free(sums);
    return total;
}

// Returns the norm of the whole gradient.
static inline double gradient_norm(const Trainer *t) {
    double squares = 0;
    for (int64_t l = ROOT; l < t->d.L; l++) squares += unit_squares(t, l);
    return sqrt(squares);
}

#endif
