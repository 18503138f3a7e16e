// Tests the memory placement of the GPU trainer, without a GPU: no tensor may overwrite memory that is still needed.
// place() gives tensors addresses in an arena that is never accessed. This file knows the size of each tensor, and the
// first and the last moment of a step at which it is needed, and compares all pairs. Also tests the memory planned for
// NCCL, the check that ranks have different GPUs, the value for CUDA_ARCH, and for FP8 gradients: which runs are
// refused, and the launches of AdamW.
#define TESTING
#include "../../train_fp8.cu"

#include "lib/check.h"

// Moments of a step are numbered in order. The forward pass of layer l is moment l. The functions below return the
// numbers of the later moments in a model of L layers.
typedef struct {
    int64_t L;
} Moments;

static int64_t final_norm(Moments m) { return m.L; }
static int64_t loss(Moments m) { return m.L + 1; }
static int64_t final_norm_backward(Moments m) { return m.L + 2; }
static int64_t backward(Moments m, int64_t l) { return m.L + 3 + (m.L - 1 - l); }
static int64_t embedding_backward_moment(Moments m) { return 2 * m.L + 3; }
static int64_t optimizer(Moments m) { return 2 * m.L + 4; }

// Bytes that are needed from one moment to another, both included.
typedef struct {
    const char *name;
    const char *at;
    int64_t bytes, from, to;
} Piece;

enum { MAX_PIECES = 8192 };
static Piece pieces[MAX_PIECES];
static int num_pieces;

static void needed(const char *name, const void *at, int64_t bytes, int64_t from, int64_t to) {
    if (!at || !bytes) return;
    if (num_pieces == MAX_PIECES) die("more than %d pieces", MAX_PIECES);
    const Piece p = {name, (const char *)at, bytes, from, to};
    pieces[num_pieces++] = p;
}

// Adds a piece that every layer needs in its forward and in its backward pass, but that the loss does not need. It
// counts as needed up to the final norm, because that reads the output of the last layer's last GEMM.
static void needed_by_layers(Moments m, const char *name, const void *at, int64_t bytes) {
    needed(name, at, bytes, 0, final_norm(m));
    needed(name, at, bytes, backward(m, m.L - 1), backward(m, 0));
}

static void needed_in_backward(Moments m, const char *name, const void *at, int64_t bytes) {
    needed(name, at, bytes, backward(m, m.L - 1), backward(m, 0));
}
static void needed_always(Moments m, const char *name, const void *at, int64_t bytes) {
    needed(name, at, bytes, 0, optimizer(m));
}

// Returns the bytes of the scales that are stored with FP8 data [R, columns] of a role.
static int64_t own_scales(const Trainer *t, TensorRole role, TensorUsage copy, int64_t columns) {
    return tensor_scales_own_bytes(&t->linears.scales, role, copy, t->d.R, columns);
}

static void list_state(const Trainer *t, Moments m) {
    const Linears *ln = &t->linears;
    const TensorScales *s = &ln->scales;
    const int64_t n = t->fsdp.plan.shard.total, tensors = tensor_count(t->d.L), scales = 3 * 4 * t->table.count;
    const bool fp32 = t->o->optimizer_state == MOMENTS_FP32, msamp = t->o->optimizer_state == MOMENTS_MSAMP;
    needed_always(m, "weights", t->params.weights, 2 * weights_begin(&t->fsdp.plan.shard, t->d.L));
    needed_always(m, "fp32 master weights", t->params.master, 4 * n);
    needed_always(m, "FP16 master weights", t->params.scaled.master, 2 * n);
    needed_always(m, "AdamW's first moment", t->params.exp_avg, fp32 ? 4 * n : msamp ? n : 2 * n);
    needed_always(m, "AdamW's second moment", t->params.exp_avg_sq, fp32 ? 4 * n : 2 * n);
    for (int64_t i = 0; i < t->offload.num_slots; i++)
        for (int k = 0; k < OFFLOAD_ARRAYS; k++)
            needed_always(m, "slot of an offloaded array", t->offload.slots[i].array[k],
                          OFFLOAD_PART * t->offload.bytes[k]);
    const Offloaded off = options_offloaded(t->o);
    CHECK((t->params.master != NULL) == (t->o->master_weights == STORAGE_FP32 && !off.master) &&
              (t->params.exp_avg != NULL) == !off.moments,
          "fp32 masters and first moments are on the GPU if the run has them and does not offload them");
    needed_always(m, "scales of states", t->params.scaled.scales, scales);
    needed_always(m, "new scales of states", t->params.scaled.new_scales, scales);
    needed_always(m, "amaxes of states", t->params.scaled.amaxes, scales);
    needed_always(m, "factors of FP16 masters", t->fsdp.weights.masters.factors,
                  t->precision.casts_masters ? t->d.L * FP16_TENSORS * (int64_t)sizeof(Fp16Factors) : 0);
    needed_always(m, "amaxes", s->amax, t->d.L * s->amax_stride * 4);
    needed_always(m, "scales", s->scale_inv, tensors * 16);
    needed_always(m, "histories", s->history, tensors * t->o->fp8_amax_history * 4);
    needed_always(m, "delayed scales", s->delayed_scale, tensors * 4);
    needed_always(m, "bounded scales", s->weight_scale, tensors * 4);
    needed_always(m, "copy of the delayed state from before a step", s->before,
                  s->before ? tensor_scales_delayed_elements(s) * 4 : 0);
    needed_always(m, "audit", s->audit, s->audit ? audit_count(&t->precision) * (int64_t)sizeof(AuditSums) : 0);
    needed_always(m, "amaxes of a step", s->step_amax, s->step_amax ? tensors * 4 : 0);
    needed_always(m, "delayed scales from before a step", s->step_scale, s->step_scale ? tensors * 4 : 0);
    needed_always(m, "squares", t->step.squares, 8);
    needed_always(m, "losses of micro-steps", t->step.losses, micro_batches(t) * 8);
    needed_always(m, "squares of blocks", t->step.block_squares, adamw_workspace_bytes(&t->table, &t->fsdp.plan.shard));
    if (t->fsdp.clip.grad_clip > 0) {
        const AdamwClip *clip = &t->fsdp.clip.adamw;
        needed_always(m, "workspace of units' squares", clip->workspace, fsdp_clip_workspace(&t->fsdp) * 8);
        needed_always(m, "squares of units", clip->squares, ADAMW_CLIP_SLOTS * 8);
        needed_always(m, "squares so far", clip->so_far, 8);
        needed_always(m, "norms of the last step", clip->norms, (1 + t->d.L) * 4);
    }
    needed_always(m, "statistics", t->step.stats, sizeof(StepStats));
    needed_always(m, "losses", t->acts.losses, t->d.R * 4);
    needed_always(m, "RoPE table", t->acts.rope_table, t->d.T * t->d.HD * 4);
    for (int i = 0; i < TOKEN_SLOTS; i++)
        needed_always(m, "tokens", t->batches.slots[i].device.inputs, batches_slot_bytes(&t->batches));
    needed("workspace of GEMMs", ln->gemm.workspace, GEMM_WORKSPACE_BYTES, 0, optimizer(m) - 1);
    needed("workspace of the optimizer", ln->gemm.workspace, adamw_workspace_bytes(&t->table, &t->fsdp.plan.shard),
           optimizer(m), optimizer(m));
    needed_always(m, "decoded operands of emulated GEMMs", ln->gemm.scratch, linears_emulation_elements(ln) * 2);
    needed_always(m, "alpha of emulated GEMMs", ln->gemm.alpha, 4);
}

// Adds FP8 gradients of matrices, and bf16 gradients of all else. The buffer in which a layer's gradient is computed is
// listed here only if the gradient is then cast, without a sum over micro-steps or ranks.
static void list_fp8_gradients(const Trainer *t, Moments m) {
    const Fsdp *f = &t->fsdp;
    const ShardPlan *shard = &f->plan.shard;
    const FsdpGradients *g = &f->gradients;
    const bool cast = f->plan.gradient_place == FSDP_GRADIENTS_CAST;
    const int64_t *root = shard->root_slices, vectors = shard->layer_slices[SEGMENT_VECTORS],
                  matrices = shard->layer_slices[SEGMENT_MATRICES], before = segment_begin(root, SEGMENT_EMBEDDING);
    const bf16 *sums = f->transport.sums;
    if (cast)
        needed_in_backward(m, "gradient of a layer before it is cast", g->layer_buffer[0], t->table.layer_size * 2);
    CHECK(sums && !f->transport.sums_fp32 && g->fp8_sums.codes && g->layer_buffer[0],
          "FP8 codes, bf16 gradients and the buffer of a layer have places, and fp32 sums have none");
    needed("gradient of the root", sums, before * 2, cast ? loss(m) : 0, optimizer(m));
    needed("gradient of the embedding", sums + before, root[SEGMENT_EMBEDDING] * 2,
           cast ? embedding_backward_moment(m) : 0, optimizer(m));
    for (int64_t l = 0; l < t->d.L; l++) {
        const int64_t from = cast ? backward(m, l) : 0;
        needed("gradient of vectors", sums + shard_elements(shard, ROOT) + l * vectors, vectors * 2, from,
               optimizer(m));
        needed("FP8 gradient of matrices", g->fp8_sums.codes + l * matrices, matrices, from, optimizer(m));
    }
    needed_always(m, "scales of gradients", g->fp8_sums.scale_inv, t->table.count * 4);
    needed_always(m, "amaxes of gradients", g->fp8_sums.amaxes, t->table.count * 4);
}

// Adds the memory in which FP8 gradients are reduced over ranks.
static void list_fp8_reduction(const Fsdp *f, Moments m) {
    const FsdpGradients *g = &f->gradients;
    if (!f->plan.fp8_gradients || f->plan.world == 1) return;
    const int64_t slice = f->plan.shard.layer_slices[SEGMENT_MATRICES], sharded = f->plan.shard.shard_size > 1,
                  codes = f->transport.reduce_dtype == REDUCE_FP8, entries = g->fp8_layout.entries,
                  part = ceil_div(slice, f->plan.replicas), sent = codes && sharded;
    const int64_t received =
        max_i64(sharded ? (f->plan.shard.shard_size - 1) * slice : 0, (f->plan.replicas - 1) * part);
    CHECK((g->fp8_received != NULL) == codes && (g->fp8_sent.codes != NULL) == sent &&
              (g->fp8_reduced != NULL) == (!codes && f->plan.replicas > 1),
          "the reduction of FP8 gradients has the buffers that it needs");
    needed_always(m, "codes for other ranks", g->fp8_sent.codes, sent ? f->plan.shard.shard_size * slice : 0);
    needed_always(m, "scales of codes for other ranks", g->fp8_sent.scale_inv, sent ? entries * 4 : 0);
    needed_always(m, "amaxes of codes for other ranks", g->fp8_sent.amaxes, sent ? entries * 4 : 0);
    needed_always(m, "codes from other ranks", g->fp8_received, codes ? received : 0);
    needed_always(m, "gradients while replicas sum them", g->fp8_reduced, g->fp8_reduced ? slice * 2 : 0);
}

// Adds the gradients. One that backward writes in place is needed from that moment on. Sums are needed always.
static void list_gradients(const Trainer *t, Moments m) {
    const Fsdp *f = &t->fsdp;
    const int64_t *root = t->table.root_segments;
    if (f->plan.gradient_place == FSDP_GRADIENTS_BUFFERED) {  // the root's buffer holds the final norm's gradient
        needed("gradient of the root before it is added to its sum", f->gradients.root_buffer,
               segment_begin(root, SEGMENT_EMBEDDING) * 2, loss(m),
               fsdp_embedding_joins(f) ? final_norm_backward(m) : embedding_backward_moment(m));
        needed_in_backward(m, "gradient of a layer before it is added to its sum", f->gradients.layer_buffer[0],
                           t->table.layer_size * 2);
    }
    if (f->plan.fp8_gradients) return list_fp8_gradients(t, m);
    if (f->plan.gradient_place != FSDP_GRADIENTS_IN_PLACE) {
        const bool fp32 = f->transport.fp32_sums;
        const bf16 *sums = f->transport.sums;
        const float *sums_fp32 = f->transport.sums_fp32;
        const int64_t n = shard_begin(&f->plan.shard, f->plan.sum_layers);
        needed_always(m, "gradients", sums, sums ? n * 2 : 0);
        needed_always(m, "fp32 gradients", sums_fp32, fp32 ? n * 4 : 0);
        CHECK(fp32 ? sums_fp32 && !sums : sums && !sums_fp32,
              "gradients have one place, of the sums' dtype (%s); bf16 sums have %s, fp32 sums %s",
              fp32 ? "fp32" : "bf16", sums ? "one" : "none", sums_fp32 ? "one" : "none");
        return;
    }
    const bf16 *embedding = f->transport.sums + segment_begin(root, SEGMENT_EMBEDDING);
    needed("gradient of the root", f->transport.sums, segment_begin(root, SEGMENT_EMBEDDING) * 2, loss(m),
           optimizer(m));
    needed("gradient of the embedding", embedding, root[SEGMENT_EMBEDDING] * 2, embedding_backward_moment(m),
           optimizer(m));
    // If layers take turns at few places, each place may be in use from backward of the last layer on.
    for (int64_t l = 0; l < f->plan.sum_layers; l++)
        needed("gradient of a layer", f->transport.sums + layer_offset(&t->table, l), t->table.layer_size * 2,
               backward(m, f->plan.sum_layers < t->d.L ? t->d.L - 1 : l), optimizer(m));
}

static void list_fsdp(const Trainer *t, Moments m) {
    const Fsdp *f = &t->fsdp;
    const ShardPlan *shard = &f->plan.shard;
    const FsdpWeights *w = &f->weights;
    const int64_t matrices = fsdp_layer_matrices(f), rows = w->num_rowwise * matrices,
                  cols = w->num_columnwise * matrices;
    if (fsdp_casts_are_transient(f)) {
        needed("rowwise data of a layer's weights", w->rowwise, rows, 0, m.L - 1);
        if (f->plan.recomputes_gemms) needed_in_backward(m, "rowwise data of a layer's weights", w->rowwise, rows);
        needed_in_backward(m, "columnwise data of a layer's weights", w->columnwise, cols);
        needed_by_layers(m, "scales of rowwise weights", w->rowwise_scales, w->num_rowwise * w->rowwise_scale_bytes);
        needed_by_layers(m, "scales of columnwise weights", w->columnwise_scales,
                         w->num_columnwise * w->columnwise_scale_bytes);
    } else {
        needed_always(m, "rowwise data of weights", w->rowwise, rows);
        needed_always(m, "columnwise data of weights", w->columnwise, cols);
        needed_always(m, "scales of rowwise weights", w->rowwise_scales, w->num_rowwise * w->rowwise_scale_bytes);
        needed_always(m, "scales of columnwise weights", w->columnwise_scales,
                      w->num_columnwise * w->columnwise_scale_bytes);
    }
    needed_always(m, "sums in fp32", f->transport.staging, shard->shard_size * f->transport.staging_slice * 4);
    needed_always(m, "FP8 shard", w->shard_fp8, w->shard_fp8 ? t->d.L * shard->layer_slices[SEGMENT_MATRICES] : 0);
    list_fp8_reduction(f, m);
    if (!fsdp_is_sharded(f)) return;
    const int segments = f->plan.embedding_is_transient ? SEGMENT_EMBEDDING : NUM_SEGMENTS;
    const int64_t root = shard->shard_size * segment_begin(shard->root_slices, segments);
    needed_always(m, "gathered root", w->root, root * 2);
    needed_always(m, "gathered vectors", w->vectors, t->d.L * fsdp_layer_vectors(f) * 2);
    needed_always(m, "gathered layers", w->slots, w->num_slots * matrices * fsdp_slot_element(f));
    const int64_t embedding = f->plan.embedding_is_transient ? shard->root_slices[SEGMENT_EMBEDDING] : 0;
    const int64_t inputs = fsdp_input_ranks(f) > 1 ? f->plan.input_elements : 0, layer = gathered_elements(shard, 0);
    const Transport *transport = &f->transport;
    needed_always(m, "unreduced gradient of the root, or what shares its memory", f->gradients.root_buffer,
                  max_i64(fsdp_root_gradient(f), shard->shard_size * max_i64(embedding, inputs)) * 2);
    needed_in_backward(m, "unreduced gradients of layers", f->gradients.layer_buffer[0],
                       FSDP_GRADIENT_BUFFERS * layer * 2);
    needed_always(m, "received gradients", transport->received,
                  (shard->shard_size - 1) * transport->received_slice * 2);
    needed_always(m, "arrivals", transport->arrivals, PEER_MAX_RANKS * 4);
}

// Returns the input of linear layer `id` of layer l. If layers share the input and layer l has no bf16 data of it, the
// result has those of the first layer that has some.
static QTensor kept_input(const Trainer *t, int64_t l, bool shared, LinearId id) {
    QTensor x = *layer_input(&t->acts.layer[l], id);
    for (int64_t other = 0; shared && !x.data && other < t->d.L; other++)
        x.data = layer_input(&t->acts.layer[other], id)->data;
    return x;
}

// Adds a piece that backward of layer l reads and forward of layer l writes. With --offload activations it must lie in
// the layer's range of kept activations. If that range leaves the GPU, it is copied to the host before forward of layer
// l + KEPT_SLOTS begins, and back once backward of layer l + KEPT_SLOTS has ended.
static void needed_by_backward(const Trainer *t, Moments m, const char *name, const void *at, int64_t bytes,
                               int64_t l) {
    const KeptSpan *span = &t->acts.kept[l];
    const char *const begin = (const char *)at;
    if (t->offload.kept.kept && begin && bytes)
        CHECK(begin >= span->begin && begin + bytes <= span->begin + span->bytes,
              "%s of layer %lld lies in the layer's range of kept activations", name, (long long)l);
    if (l >= kept_leaving(&t->offload.kept)) return needed(name, at, bytes, l, backward(m, l));
    needed(name, at, bytes, l, l + KEPT_SLOTS - 1);
    needed(name, at, bytes, backward(m, l + KEPT_SLOTS) + 1, backward(m, l));
}

// Lists the activations that a layer keeps, except its input: needed from its forward to its backward pass, or in the
// passes of every layer if layers share them.
static void list_layer(const Trainer *t, Moments m, int64_t l) {
    const Dims *d = &t->d;
    const LayerActs *a = &t->acts.layer[l];
    const Recomputed shared = options_recomputed(t->o);
    const QTensor norm1 = kept_input(t, l, shared.norms, QKV_PROJ), att = a->att,
                  norm2 = kept_input(t, l, shared.norms, GATE_UP_PROJ);
    const int64_t scales = own_scales(t, TENSOR_X, COLUMNWISE, d->C),
                  att_scales = own_scales(t, TENSOR_X, COLUMNWISE, d->ATT);
    const struct {
        const char *name;
        const void *at;
        int64_t bytes;
        bool shared;
    } kept[] = {
        {"x_mid", a->x_mid, d->R * d->C * 2, shared.stream},
        {"rstd1", a->rstd1, d->R * 4, shared.stream},
        {"rstd2", a->rstd2, d->R * 4, shared.stream},
        {"qkv", a->qkv, d->R * d->QKV * 2, shared.attention},
        {"att", att.data, d->R * d->ATT * 2, shared.attention},
        {"lse", a->lse, d->R * d->NH * 4, shared.attention},
        {"gate_up", a->gate_up, d->R * d->F * 4, shared.mlp || t->acts.gate_up_fp8[l].codes},
        {"FP8 gate_up", t->acts.gate_up_fp8[l].codes, d->R * d->F * 2, false},
        {"scales of FP8 gate_up", t->acts.gate_up_fp8[l].scales_inv, d->R * d->F * 2 / FP8_GROUP, false},
        {"norm1", norm1.data, d->R * d->C * 2, shared.norms},
        {"norm2", norm2.data, d->R * d->C * 2, shared.norms},
        {"columnwise norm1", norm1.columnwise, d->R * d->C, shared.norms},
        {"columnwise att", att.columnwise, d->R * d->ATT, shared.attention},
        {"columnwise norm2", norm2.columnwise, d->R * d->C, shared.norms},
        {"scales of columnwise norm1", norm1.columnwise_scale_inv, norm1.columnwise ? scales : 0, shared.norms},
        {"scales of columnwise att", att.columnwise_scale_inv, att.columnwise ? att_scales : 0, shared.attention},
        {"scales of columnwise norm2", norm2.columnwise_scale_inv, norm2.columnwise ? scales : 0, shared.norms}};
    CHECK(att.data, "layer %lld: attention's output has a place", (long long)l);
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        if (!kept[i].shared) needed_by_backward(t, m, kept[i].name, kept[i].at, kept[i].bytes, l);
        else if (l == 0) needed_by_layers(m, kept[i].name, kept[i].at, kept[i].bytes);
    }
}

// lm_head's tensors in FP8 are needed while the logits are.
static void list_head(const Trainer *t, Moments m) {
    const Linears *ln = &t->linears;
    const QTensor *tensors[NUM_TENSORS] = {&ln->head_tensors.w, &ln->head_tensors.y, &ln->head_tensors.dlogits};
    for (int role = 0; role < NUM_TENSORS && linears_head_is_fp8(ln); role++) {
        const QTensor *q = tensors[role];
        const int64_t rows = role == TENSOR_W ? t->d.VP : ln->head_rows, cols = role == TENSOR_DY ? t->d.VP : t->d.C;
        const bool row = q->row_granularity != NO_SCALE, col = q->col_granularity != NO_SCALE;
        CHECK(row == (q->rowwise != NULL) && col == (q->columnwise != NULL) && q->fp8 == row,
              "lm_head has the data that its FP8 GEMMs read, of tensor %d", role);
        if (row) needed("rowwise data of lm_head", q->rowwise, rows * cols, loss(m), loss(m));
        if (col) needed("columnwise data of lm_head", q->columnwise, rows * cols, loss(m), loss(m));
        if (row)
            needed("scales of lm_head's rowwise data", q->rowwise_scale_inv,
                   scale_bytes(q->row_granularity, rows, cols), loss(m), loss(m));
        if (col && q->columnwise_scale_inv != q->rowwise_scale_inv)
            needed("scales of lm_head's columnwise data", q->columnwise_scale_inv,
                   scale_bytes(q->col_granularity, cols, rows), loss(m), loss(m));
        const int64_t amaxes = tensor_amaxes(q->row_granularity, q->col_granularity, rows, cols);
        if (amaxes) needed("amaxes of lm_head", q->amax, amaxes * 4, loss(m), loss(m));
    }
}

static void list_activations(const Trainer *t, Moments m) {
    const Dims *d = &t->d;
    const Activations *acts = &t->acts;
    const QTensor *norm1 = &acts->layer[0].norm1, h = kept_input(t, 0, true, DOWN_PROJ);
    const int64_t widest = max_i64(max_i64(d->C, d->ATT), d->F);
    for (int64_t l = 0; l < d->L; l++) {
        const bf16 *rotated = acts->layer[l].rotated;
        needed_by_backward(t, m, "x", acts->layer[l].x, d->R * d->C * 2, l);
        list_layer(t, m, l);
        CHECK(acts->rotated_is_shared ? rotated == acts->layer[0].rotated : rotated == acts->layer[l].qkv,
              "layer %lld: `rotated` is at the shared address, or at the layer's qkv", (long long)l);
    }
    // Rowwise data belong to one layer at a time. A layer with only bf16 linears has none.
    const QTensor *row = norm1->rowwise ? norm1 : &h;
    needed_by_layers(m, "rowwise data of an input", row->rowwise, d->R * widest);
    needed_by_layers(m, "scales of an input's rowwise data", row->rowwise_scale_inv,
                     t->precision.any_fp8 ? own_scales(t, TENSOR_X, ROWWISE, widest) : 0);
    needed_by_layers(m, "h", h.data, d->R * d->F * 2);
    needed_by_layers(m, "columnwise h", h.columnwise, d->R * d->F);
    needed_by_layers(m, "scales of columnwise h", h.columnwise_scale_inv,
                     h.columnwise ? own_scales(t, TENSOR_X, COLUMNWISE, d->F) : 0);
    needed_by_layers(m, "branch", acts->branch, d->R * d->C * 2);
    if (acts->rotated_is_shared) needed_by_layers(m, "rotated q, k, v", acts->layer[0].rotated, d->R * d->QKV * 2);
    needed("x_final", acts->x_final, d->R * d->C * 2, final_norm(m), final_norm_backward(m));
    needed("y_final", acts->y_final, d->R * d->C * 2, final_norm(m), loss(m));
    needed("rstd_final", acts->rstd_final, d->R * 4, final_norm(m), final_norm_backward(m));
    needed("logits", acts->logits, t->linears.head_rows * d->V * 2, loss(m), loss(m));
    list_head(t, m);
}

static void list_backward(const Trainer *t, Moments m) {
    const Dims *d = &t->d;
    const int64_t narrow = max_i64(d->C, d->QKV);
    needed("dx", t->acts.dx, d->R * d->C * 2, final_norm_backward(m), embedding_backward_moment(m));
    needed("dbranch", t->acts.dbranch, d->R * d->C * 2, loss(m), backward(m, 0));
    needed_in_backward(m, "dh", t->acts.dh, d->R * d->F * 2);
    needed_in_backward(m, "datt", t->acts.datt, d->R * d->ATT * 2);
    needed_in_backward(m, "dqkv", t->acts.dy.qkv.data, d->R * d->QKV * 2);
    needed_in_backward(m, "dgate_up", t->acts.dy.gate_up.data, d->R * d->F * 4);
    for (int wide = 0; wide < 2; wide++) {
        const QTensor *dy = wide ? &t->acts.dy.gate_up : &t->acts.dy.qkv;
        const int64_t columns = wide ? 2 * d->F : narrow;
        needed_in_backward(m, "rowwise data of a gradient", dy->rowwise, d->R * columns);
        needed_in_backward(m, "columnwise data of a gradient", dy->columnwise, d->R * columns);
        needed_in_backward(m, "scales of a rowwise gradient", dy->rowwise_scale_inv,
                           dy->rowwise ? own_scales(t, TENSOR_DY, ROWWISE, columns) : 0);
        needed_in_backward(m, "scales of a columnwise gradient", dy->columnwise_scale_inv,
                           dy->columnwise ? own_scales(t, TENSOR_DY, COLUMNWISE, columns) : 0);
    }
    needed_in_backward(m, "workspace of attention", t->acts.attention_workspace,
                       (int64_t)attention_workspace_bytes(d->B, d->T, d->NH, d->NKV, d->HD));
    needed_in_backward(m, "sums of QK-norm, of biases", t->acts.reduce_workspace,
                       max_i64((int64_t)rope_workspace_bytes(d->HD), (int64_t)bias_workspace_bytes(d->R, d->QKV)));
    needed("workspace of norms", t->acts.norm_workspace, (int64_t)rmsnorm_workspace_bytes(d->R, d->C),
           final_norm_backward(m), backward(m, 0));
}

static bool in_each_others_way(const Piece *a, const Piece *b) {
    return a->at < b->at + b->bytes && b->at < a->at + a->bytes && a->from <= b->to && b->from <= a->to;
}

static int by_address(const void *a, const void *b) {
    const Piece *p = (const Piece *)a, *q = (const Piece *)b;
    return (p->at > q->at) - (p->at < q->at);
}

// Returns an error if two pieces need the same byte at one moment, or if a piece leaves the arena or is not aligned to
// 16 bytes. Returns NULL if there is none. Sorts the pieces.
static const char *find_trouble(const char *base, int64_t size) {
    static char trouble[256];
    qsort(pieces, (size_t)num_pieces, sizeof *pieces, by_address);
    for (int i = 0; i < num_pieces; i++) {
        const Piece *p = &pieces[i];
        if (p->at < base || p->at + p->bytes > base + size || (p->at - base) % 16) {
            format_checked(trouble, sizeof trouble, "%s lies at [%lld, %lld) of %lld", p->name,
                           (long long)(p->at - base), (long long)(p->at - base + p->bytes), (long long)size);
            return trouble;
        }
        for (int j = i + 1; j < num_pieces && pieces[j].at < p->at + p->bytes; j++)
            if (in_each_others_way(p, &pieces[j])) {
                format_checked(trouble, sizeof trouble, "%s, moments %lld to %lld, lies on %s, moments %lld to %lld",
                               pieces[j].name, (long long)pieces[j].from, (long long)pieces[j].to, p->name,
                               (long long)p->from, (long long)p->to);
                return trouble;
            }
    }
    return NULL;
}

// Returns the bytes, with alignment, of operands and result of the largest bf16 GEMM, which are no fewer than those of
// an FP8 GEMM with its scales. linears_plan_gemm() puts them at the start of the arena to time the GEMM.
static int64_t largest_product(const Trainer *t) {
    int64_t most = 0;
    for (int id = 0; id <= NUM_LINEARS; id++) {
        const LinearShape *s = id < NUM_LINEARS ? &t->precision.linear[id] : &t->precision.lm_head;
        const int64_t R = id < NUM_LINEARS ? t->d.R : t->linears.head_rows;
        most = max_i64(most, 2 * (s->N * s->K + R * s->K + R * s->N) + 3 * ARENA_ALIGNMENT);
    }
    return most;
}

static void check_run(const char *label, Options o, const ModelConfig *model, int64_t world) {
    char *const base = (char *)((intptr_t)1 << 40);
    options_resolve(&o);
    Comm comm;
    memset(&comm, 0, sizeof comm);
    comm.world = world;
    Trainer t;
    Arena plan = trainer_describe(&t, &o, model, &comm), arena;
    memset(&arena, 0, sizeof arena);
    arena.base = base;
    place(&t, &arena);
    num_pieces = 0;
    const Moments m = {t.d.L};
    list_state(&t, m);
    list_gradients(&t, m);
    list_fsdp(&t, m);
    list_activations(&t, m);
    list_backward(&t, m);
    const char *trouble = find_trouble(base, arena.used);
    CHECK(!trouble, "%s: every piece keeps its memory: %s", label, trouble);
    CHECK(largest_product(&t) <= (char *)t.linears.gemm.workspace - base,
          "%s: a GEMM of %lld bytes ends before its workspace, which begins at %lld", label,
          (long long)largest_product(&t), (long long)((char *)t.linears.gemm.workspace - base));
    CHECK(plan.used == arena.used, "%s: the plan has as many bytes as are placed; found %lld and %lld", label,
          (long long)plan.used, (long long)arena.used);
    fsdp_destroy(&t.fsdp);
    precision_free(&t.precision);
    parameter_table_free(&t.table);
    free(t.acts.layer), free(t.acts.kept);
}

// ---------------------------------------------------------------------------------------------------------------------

typedef struct {
    const char *name;
    int64_t world;
    int sharding;
    int64_t shard_size;  // with hybrid
} Ranks;

// Checks combinations of options for one model, batch size, sequence length and sharding.
static void check_model(const char *name, int64_t B, int64_t T, Ranks ranks) {
    ModelConfig model;
    if (!model_config_preset(&model, name)) die("no preset %s", name);
    char label[256];
    for (int recipe = RECIPE_TENSORWISE; recipe <= RECIPE_BF16; recipe++)
        for (int variant = 0; variant < 16 * (RECOMPUTE_LAYER + 1); variant++) {
            Options o = options_default();
            o.model = name, o.batch_size = B, o.sequence_length = T;
            o.sharding = ranks.sharding, o.shard_size = ranks.shard_size;
            o.precision = recipe == RECIPE_BF16 ? PRECISION_BF16 : PRECISION_FP8;
            if (recipe < RECIPE_BF16) o.fp8_recipe = recipe, o.fp8_emulate = !recipe_native(recipe_row(recipe), 9, 0);
            if (recipe < RECIPE_BF16 && !recipe_row(recipe)->delayed) o.fp8_lm_head = variant % 5 % 4;
            o.recompute = variant / 16;
            o.grad_accumulation_steps = variant & 1 ? 2 : 1;
            o.grad_clip = variant & 2 ? 1 : 0;
            o.deterministic = (recipe + o.recompute) % 2 > 0;
            o.document_mask = variant & 2 ? "on" : "off";
            if (variant & 4)
                o.reduce_dtype = REDUCE_FP32, o.master_weights = STORAGE_FP32, o.optimizer_state = MOMENTS_FP32,
                o.fp8_audit = 10, o.fp8_filter = recipe == RECIPE_BF16 ? "" : "first,down";
            else if (variant & 8) o.master_weights = STORAGE_FP16, o.optimizer_state = MOMENTS_MSAMP;
            if ((variant & 12) == 12)
                o.grad_accum_dtype = SUM_FP8, o.reduce_dtype = recipe % 2 && ranks.world > 1 ? REDUCE_FP8 : REDUCE_BF16;
            if (recipe < RECIPE_BF16 && o.recompute < RECOMPUTE_MLP) o.fp8_activations = variant & 1 ? ON : OFF;
            if (recipe_row(recipe)->delayed) o.on_nonfinite = variant & 4 ? NONFINITE_SKIP : NONFINITE_STOP;
            if (variant & 4 && o.grad_accum_dtype != SUM_FP8)
                o.offload = variant & 1 ? "moments,master" : recipe == RECIPE_BF16 ? "master,activations" : "none";
            if (strcmp(o.offload, "none") == 0 && recipe % 2 == variant / 16 % 2) o.offload = "activations";
            char conflict[512];
            o.optimizer_in_backward = variant & 8 && o.grad_accum_dtype != SUM_FP8;
            if ((o.optimizer_in_backward || recipe_row(recipe)->bounded) &&
                *options_conflict(&o, conflict, sizeof conflict))
                continue;
            format_checked(label, sizeof label,
                           "%s, %lld x %lld, %s, %s, --recompute %d, --offload %s, %d micro-steps%s%s%s", name,
                           (long long)B, (long long)T, ranks.name, recipe_row(recipe)->name, o.recompute, o.offload,
                           variant & 1 ? 2 : 1, variant & 2 ? ", --grad-clip 1" : "",
                           variant & 4 ? ", fp32 masters and moments" : "",
                           o.optimizer_in_backward ? ", --optimizer-in-backward"
                           : variant & 8           ? ", FP8 gradients"
                                                   : "");
            check_run(label, o, &model, ranks.world);
        }
}

// Returns find_trouble() of three pieces: "a", "b" from byte b on, "c" from moment c on in the memory of both.
static const char *trouble_of_three(int64_t b, int64_t c, int64_t size) {
    char *const base = (char *)((intptr_t)1 << 40);
    num_pieces = 0;
    needed("a", base, 256, 0, 3);
    needed("b", base + b, 256, 0, 3);
    needed("c", base, 512, c, 5);
    return find_trouble(base, size);
}

static void test_comparison(void) {
    CHECK(!trouble_of_three(256, 4, 512), "pieces that do not overlap are accepted");
    CHECK(trouble_of_three(256, 4, 511), "a piece that leaves the arena is found");
    CHECK(trouble_of_three(240, 4, 512), "two pieces that overlap are found");
    CHECK(trouble_of_three(256, 3, 512), "two pieces that share memory at one moment are found");
}

// Tests the memory planned for NCCL. Hybrid has communicators for all ranks, for the shard group and for the replicas.
// A group of all ranks uses the first one, and a group of one rank needs none.
static void test_communicators(void) {
    static const struct {
        int64_t world, group, communicators;
    } cases[] = {{1, 1, 0}, {2, 2, 1}, {2, 1, 1}, {4, 4, 1}, {4, 1, 1}, {4, 2, 3}, {6, 3, 3}, {6, 2, 3}, {512, 8, 3}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Comm comm = comm_one();
        comm_assume(&comm, cases[i].world);
        comm_split(&comm, cases[i].group);
        const int64_t got = memory_overhead(&comm) - CUDA_OVERHEAD_BYTES;
        CHECK(got == cases[i].communicators * NCCL_OVERHEAD_BYTES,
              "%lld ranks in groups of %lld get the expected memory for NCCL; found %lld bytes",
              (long long)cases[i].world, (long long)cases[i].group, (long long)got);
    }
}

static void call_require_own_gpus(void *gpus) { require_own_gpus((const RankGpu *)gpus, 4); }

// Four ranks on two hosts, each host with GPUs 1 and 2. GPUs of different hosts are different, and a GPU that two ranks
// have is named.
static void test_gpus(void) {
    RankGpu gpus[4];
    memset(gpus, 0, sizeof gpus);
    for (int i = 0; i < 4; i++) {
        format_checked(gpus[i].host, sizeof gpus[i].host, i < 2 ? "a" : "b");
        gpus[i].uuid.bytes[15] = (char)(1 + i % 2), gpus[i].visible = 1;
    }
    int64_t i, j;
    CHECK(!find_shared_gpu(gpus, 4, &i, &j), "no two ranks have the same GPU; found ranks %lld and %lld", (long long)i,
          (long long)j);
    CHECK(!find_shared_gpu(gpus, 1, &i, &j), "one rank shares its GPU with no other");
    gpus[3].uuid.bytes[15] = 1, gpus[3].visible = 2;
    const char *message = "ranks 2 and 3 on b have the same GPU, GPU-00000000-0000-0000-0000-000000000001 (visible "
                          "GPUs: rank 2 has 1, rank 3 has 2); every rank needs its own GPU: start at most 2 there";
    CHECK_DIES(call_require_own_gpus, gpus, message, "ranks with the same GPU are refused");
}

static void test_cuda_arch(void) {
    char output[16];
    const struct {
        int major, minor;
        const char *arch;
    } all[] = {{8, 0, "80"}, {8, 9, "89"}, {9, 0, "90a"}, {10, 0, "100"}, {12, 1, "121"}};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++) {
        format_cuda_arch(output, sizeof output, all[n].major, all[n].minor);
        CHECK(strcmp(output, all[n].arch) == 0, "CUDA_ARCH=%s is the name for %d.%d", output, all[n].major,
              all[n].minor);
    }
}

// The arguments of supported_require.
typedef struct {
    Options o;
    ModelConfig m;
    int64_t world;
} Supported;

static void call_supported(void *run) {
    const Supported *s = (const Supported *)run;
    supported_require(GPU_TRAINER, &s->m, &s->o, s->world);
}

// FP8 gradients are refused with offloaded optimizer state, as is recipe tensorwise_bounded, and with --reduce-dtype
// fp32 on several ranks.
static void test_fp8_gradients_refused(void) {
    Supported s = {options_default(), {}, 1};
    model_config_preset(&s.m, "tiny");
    s.o.grad_accum_dtype = SUM_FP8;
    call_supported(&s);
    s.o.offload = "moments";
    CHECK_DIES(call_supported, &s, "--offload moments does not go with",
               "FP8 gradients with --offload moments are refused");
    s.o.offload = "activations";
    call_supported(&s);
    s.o.offload = "none", s.world = 2;
    call_supported(&s);
    s.o.reduce_dtype = REDUCE_FP32;
    CHECK_DIES(call_supported, &s, "over several GPUs reduces gradients in bf16 or fp8",
               "FP8 gradients with --reduce-dtype fp32 on 2 ranks are refused");
    s.world = 1;
    call_supported(&s);
    s.o = options_default();
    s.o.precision = PRECISION_FP8, s.o.fp8_recipe = RECIPE_BOUNDED;
    call_supported(&s);
    s.o.offload = "moments";
    CHECK_DIES(call_supported, &s, "does not go with --fp8-recipe tensorwise_bounded",
               "tensorwise_bounded with --offload moments is refused");
}

// Adds 1 to updated[i] for each group i of 128 elements of the shard that a launch updates. Returns how many faults it
// finds: a gradient at a wrong address or of a wrong dtype, a wrong index in the flat array, an FP8 group with the
// scale of another tensor. codes, sums: addresses of all gradients of a rank.
static int64_t wrong_groups(const AdamwLaunch *launch, const ParameterTable *t, const ShardPlan *plan,
                            const GradientFp8Layout *a, const uint8_t *codes, const bf16 *sums, int *updated) {
    const AdamwUnits *u = &launch->units;
    const AdamwGradients *g = &launch->update.arrays.gradients;
    int64_t wrong = 0;
    for (int64_t y = 0; y < u->count; y++)
        for (int64_t e = 0, run = 0; e < u->size; e += PARAMETER_ALIGNMENT) {
            while (e >= u->runs[run].end * (int64_t)PARAMETER_ALIGNMENT) run++;
            const int64_t at = u->first + y * u->stride + e, layer = shard_elements(plan, 0),
                          l = at < a->root ? (int64_t)ROOT : (at - a->root) / layer,
                          in_unit = l == ROOT ? at : (at - a->root) % layer, entry = shard_parameter_at(t, plan, at);
            const bool fp8 = l != ROOT && in_unit >= a->vectors;
            const int64_t vector = l == ROOT ? at : a->root + l * a->vectors + in_unit;
            const void *got = fp8 ? (const void *)(g->codes + at - y * u->gradient_gap) : g->bf16_data + at,
                       *want = fp8 ? (const void *)(codes + l * a->matrices + in_unit - a->vectors) : sums + vector;
            updated[at / PARAMETER_ALIGNMENT]++;
            wrong += got != want || fp8 != !g->bf16_data;
            if (entry < 0) continue;  // padding
            wrong += u->flat + y * u->flat_size + e + u->runs[run].shift != shard_to_flat(t, plan, at);
            wrong += fp8 && u->first_entry + y * u->entries + u->runs[run].entry != entry;
        }
    return wrong;
}

// AdamW's launches with FP8 gradients update each element of rank `rank` of `ranks` once, by its gradient and scale.
static void test_fp8_launches(const char *preset, int64_t ranks, int64_t rank) {
    ModelConfig m;
    if (!model_config_preset(&m, preset)) die("no preset %s", preset);
    m.num_layers = min_i64(m.num_layers, 4);  // layers are equal
    ParameterTable t = parameter_table(&m);
    const ShardPlan plan = shard_plan(&t, ranks, rank);
    const GradientFp8Layout a = gradient_fp8_layout(&t, &plan, false);
    const uint8_t *codes = (const uint8_t *)((intptr_t)1 << 40);
    const bf16 *sums = (const bf16 *)((intptr_t)1 << 44);
    AdamwUpdate w = {};
    w.arrays.gradients = AdamwGradients{sums, NULL, codes, (const float *)sums, &a};
    int *updated = (int *)xcalloc((size_t)(plan.total / PARAMETER_ALIGNMENT), sizeof *updated);
    int64_t wrong = 0, other = 0;
    for (int64_t l = ROOT; l < 1; l++) {
        const int64_t count = l == ROOT ? 1 : t.num_layers;
        for (int64_t i = 0; i < adamw_num_launches(&w, &plan, l, count); i++) {
            const AdamwLaunch launch = adamw_launch_of(&w, &t, &plan, l, count, l == ROOT ? 0 : a.root, i);
            wrong += wrong_groups(&launch, &t, &plan, &a, codes, sums, updated);
        }
    }
    for (int64_t i = 0; i < plan.total / PARAMETER_ALIGNMENT; i++) other += updated[i] != 1;
    CHECK(wrong == 0 && other == 0, "%s, rank %lld of %lld: %lld groups are wrong, %lld are not updated once", preset,
          (long long)rank, (long long)ranks, (long long)wrong, (long long)other);
    free(updated);
    parameter_table_free(&t);
}

// With blocks, the launches of AdamW update each element of rank `rank` of `ranks` once. Each block lies in one
// segment, has one sum of squares, and no other block has it. Blocks of segments have places in the order of the flat
// array.
static void test_block_launches(const char *preset, int64_t ranks, int64_t rank) {
    ModelConfig m;
    if (!model_config_preset(&m, preset)) die("no preset %s", preset);
    if (!m.vocab_size) m.vocab_size = 5000;
    ParameterTable t = parameter_table(&m);
    const ShardPlan plan = shard_plan_of(&t, ranks, rank, true);
    AdamwUpdate w = {};
    w.arrays.gradients.bf16_data = (const bf16 *)((intptr_t)1 << 44);
    w.squares = (double *)((intptr_t)1 << 40);
    int *sums = (int *)xcalloc((size_t)adamw_update_sums(&t, &plan), sizeof *sums);
    int64_t elements = 0, wrong = 0;
    for (int64_t l = ROOT; l < 1; l++) {
        const int64_t count = l == ROOT ? 1 : t.num_layers;
        for (int64_t i = 0; i < adamw_num_launches(&w, &plan, l, count); i++) {
            const AdamwLaunch launch = adamw_launch_of(&w, &t, &plan, l, count, shard_begin(&plan, l), i);
            const AdamwUnits *u = &launch.units;
            for (int64_t y = 0; y < count; y++)
                for (int64_t b = 0; b < (int64_t)adamw_blocks(u->size); b++) {
                    const int64_t at = u->squares - w.squares + y * u->squares_stride + b,
                                  first = u->first + y * u->stride + b * ADAMW_BLOCK,
                                  n = min_i64(ADAMW_BLOCK, u->size - b * ADAMW_BLOCK);
                    const ShardSegment g = segment_slice(&t, &plan, l == ROOT ? l : y, (int)i);
                    sums[at]++, elements += n;
                    wrong += first < g.shard || first + n > g.shard + g.slice || (first - g.shard) % ADAMW_BLOCK;
                    wrong += at != adamw_first_block(&plan, l == ROOT ? l : y) + adamw_blocks_before(&plan, l, (int)i) +
                                       (first - g.shard) / ADAMW_BLOCK;
                }
        }
    }
    for (int64_t i = 0; i < adamw_update_sums(&t, &plan); i++) wrong += sums[i] != 1;
    CHECK(wrong == 0 && elements == plan.total,
          "%s, rank %lld of %lld: %lld blocks are wrong, %lld of %lld elements are updated", preset, (long long)rank,
          (long long)ranks, (long long)wrong, (long long)elements, (long long)plan.total);
    free(sums);
    parameter_table_free(&t);
}

typedef struct {
    int64_t ranks, rank;
} Shard;

// In a root unit of more than 2^32 elements, MS-AMP's update covers each tensor once, from its begin to its end.
static void test_large_root(void) {
    ModelConfig m;
    model_config_preset(&m, "llama3.1-405b");
    m.vocab_size = 262144;  // two tables of 2^32 elements
    ParameterTable t = parameter_table(&m);
    const ShardPlan plan = shard_plan(&t, 1, 0);
    MsampUnits u = {};
    u.units = adamw_units(&t, &plan, ROOT, 1, false);
    msamp_runs(&u, &t, &plan, ROOT);
    for (int i = 0; i < u.num_runs; i++) {
        const Parameter *p = &t.entries[u.runs[i].tensor];
        CHECK((int64_t)u.runs[i].begin == p->offset && (int64_t)u.runs[i].end == p->offset + parameter_elements(p),
              "%s: the update begins at element %lld and ends at %lld", p->name, (long long)u.runs[i].begin,
              (long long)u.runs[i].end);
    }
    parameter_table_free(&t);
}

int main(void) {
    static const char *const models[] = {"tiny",     "small",    "llama3.2-1b", "llama3.1-8b",
                                         "qwen3-4b", "qwen3-8b", "qwen2.5-7b"};
    static const Ranks ranks[] = {{"1 rank", 1, SHARDING_FULL, 0},
                                  {"4 ranks", 4, SHARDING_FULL, 0},
                                  {"4 ranks, grad_op", 4, SHARDING_GRAD_OP, 0},
                                  {"2 ranks, none", 2, SHARDING_NONE, 0},
                                  {"3 ranks", 3, SHARDING_FULL, 0},
                                  {"8 ranks", 8, SHARDING_FULL, 0},
                                  {"7 ranks, grad_op", 7, SHARDING_GRAD_OP, 0},
                                  {"4 ranks in groups of 2", 4, SHARDING_HYBRID, 2},
                                  {"8 ranks in groups of 4", 8, SHARDING_HYBRID, 4},
                                  {"6 ranks in groups of 3", 6, SHARDING_HYBRID, 3},
                                  {"3 ranks in groups of 1", 3, SHARDING_HYBRID, 1}};
    test_comparison();
    test_communicators();
    test_gpus();
    test_cuda_arch();
    test_fp8_gradients_refused();
    test_large_root();
    for (const char *preset : {"tiny", "small", "qwen3-0.6b"})
        for (const Shard s : {Shard{1, 0}, {2, 0}, {2, 1}, {3, 1}, {7, 3}, {7, 6}})
            test_fp8_launches(preset, s.ranks, s.rank), test_block_launches(preset, s.ranks, s.rank);
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        for (size_t r = 0; r < sizeof ranks / sizeof ranks[0]; r++) {
            check_model(models[i], 1, 64, ranks[r]);
            check_model(models[i], 1, 2048, ranks[r]);
            check_model(models[i], 3, 8192, ranks[r]);
        }
    return check_report();
}
