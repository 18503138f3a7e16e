// train_fp8cu: pre-trains Llama and Qwen models on NVIDIA GPUs, in BF16 or by the FP8 recipes of llmc/config/recipes.h.
// Each rank uses one GPU: `mpirun -np N ./train_fp8cu ...` trains one model with N ranks (llmc/shard/fsdp.cuh).
//
// From top to bottom: the trainer and its memory, operations of a layer, the model's forward pass, its backward pass,
// the optimizer, the step, validation and samples, setting up, the run. train_fp8.c is the same model in plain C on the
// CPU. The functions of one layer are the same text in both (dev/test/test_twins.py).

#include <cuda_runtime.h>

#include "llmc/base/arena.h"
#include "llmc/base/utils.h"

#include "llmc/config/model_config.h"
#include "llmc/config/options.h"
#include "llmc/config/parameters.h"
#include "llmc/config/precision.h"
#include "llmc/config/schedule.h"

#include "llmc/gpu/column_sums.cuh"
#include "llmc/gpu/profile.cuh"
#include "llmc/fp8/auto_filter.cuh"
#include "llmc/fp8/linear.cuh"
#include "llmc/fp8/quantize.cuh"
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/cross_entropy.cuh"
#include "llmc/kernels/embedding.cuh"
#include "llmc/kernels/initialize.cuh"
#include "llmc/kernels/rmsnorm.cuh"
#include "llmc/kernels/rope.cuh"
#include "llmc/kernels/swiglu.cuh"
#include "llmc/optimizer/adamw.cuh"
#include "llmc/optimizer/adamw_state.cuh"
#include "llmc/memory/activations.cuh"
#include "llmc/memory/batches.cuh"
#include "llmc/memory/step_stats.cuh"

#include "llmc/shard/check_links.cuh"
#include "llmc/shard/device.cuh"
#include "llmc/shard/fsdp.cuh"
#include "llmc/shard/fsdp_embedding.cuh"
#include "llmc/shard/fsdp_memory.cuh"
#include "llmc/shard/fsdp_optimizer.cuh"
#include "llmc/shard/fsdp_replay.cuh"
#include "llmc/shard/fsdp_report.cuh"

#include "llmc/checkpoint/gpu_state.cuh"
#include "llmc/run/nonfinite.cuh"
#include "llmc/run/replay.h"
#include "llmc/run/train.h"
static_assert((int)SUPPORTED_CAST_TILE == CAST_TILE && (int)SUPPORTED_NORM_COLUMNS == RMSNORM_MAX_C, "kernels");

// ---------------------------------------------------------------------------------------------------------------------
// The trainer and its memory

// Numbers of the current step; the pointers are to device memory.
typedef struct {
    StepStats *stats;
    int64_t skipped;        // how many steps before it were skipped
    int64_t targets;        // that count in it, of all ranks
    double *squares;        // one number: the gradient's sum of squares
    double *losses;         // [micro-steps, ranks] sums of the rows' losses
    double *block_squares;  // with --optimizer-in-backward: AdamwUpdate.squares; else NULL
    GpuReplay replay;       // --replay-every
} StepNumbers;

typedef struct {
    const Options *o;
    const Comm *comm;
    ModelConfig m;
    ParameterTable table;
    Precision precision;  // the recipe of each linear layer
    Dims d;
    cudaStream_t stream;
    Nccl nccl;        // with several ranks
    Fsdp fsdp;        // gathers weights, reduces gradients
    Linears linears;  // GEMMs and FP8 scales of the linear layers
    Activations acts;
    AdamwArrays params;  // this rank's flat shard arrays (shard_plan.h)
    Offload offload;     // moments, masters, activations in host memory
    StepNumbers step;    // the current step
    StepLog log;         // statistics and times of the latest steps
    GpuState state;      // access of checkpoints to these arrays
    Batches batches;
    float *results;  // host: [max(V, R)], of next_logits or token_losses
    Profile profile;
    char *memory;  // the arena
} Trainer;

// Number of micro-steps of all ranks in a step.
static int64_t micro_batches(const Trainer *t) { return t->o->grad_accumulation_steps * t->comm->world; }

// The weight of each row's loss in a step's mean.
static float gradient_scale(const Trainer *t) { return (float)(1 / (double)t->step.targets); }

static void place_statistics(Trainer *t, Arena *a) {
    arena_group(a, "statistics, tokens");
    t->step.squares = (double *)arena_take(a, sizeof(double));
    t->step.losses = (double *)arena_take(a, micro_batches(t) * (int64_t)sizeof(double));
    if (t->o->optimizer_in_backward)
        t->step.block_squares = (double *)arena_take(a, adamw_workspace_bytes(&t->table, &t->fsdp.plan.shard));
    t->step.stats = (StepStats *)arena_take(a, sizeof(StepStats));
    t->step.replay.count = replay_count(&t->table);
    if (t->o->replay_every)
        t->step.replay.sums = (uint64_t *)arena_take(a, t->step.replay.count * (int64_t)sizeof(uint64_t));
    t->acts.losses = take_float(a, t->d.R);
    t->acts.rope_table = take_float(a, t->d.T * t->d.HD);
    batches_place(&t->batches, a, t->d.R, fsdp_input_ranks(&t->fsdp), fsdp_embedding_indexes(&t->fsdp),
                  options_masks_documents(t->o));
}

static void place_activations(Trainer *t, Arena *a) {
    ActivationsLayout layout = {};
    layout.dims = &t->d, layout.scales = &t->linears.scales;
    layout.recomputed = options_recomputed(t->o), layout.qk_norm = t->m.qk_norm;
    layout.fp8_kept = options_keeps_fp8(t->o), layout.kept_moves = options_offloaded(t->o).activations;
    layout.chunk = t->linears.head_rows;
    fsdp_place_gradients(&t->fsdp, a);
    t->params.gradients = fsdp_sums(&t->fsdp);
    if (linears_head_is_fp8(&t->linears)) layout.head = ArenaGuest{linears_place_head, &t->linears};
    fsdp_share_memory(&t->fsdp, &layout);
    activations_place(&t->acts, &layout, a);
}

// Places the trainer's arrays in GPU memory on an arena. An arena without memory only counts bytes: the result is the
// memory plan.
static void place(Trainer *t, Arena *a) {
    adamw_place(&t->params, t->o, &t->table, &t->fsdp.plan.shard, a);
    offload_place(&t->offload, a);
    fsdp_place(&t->fsdp, a);
    tensor_scales_place(&t->linears.scales, t->o->fp8_audit, a);
    place_statistics(t, a);
    place_activations(t, a);
    linears_place(&t->linears, adamw_workspace_bytes(&t->table, &t->fsdp.plan.shard), a);
}

// ---------------------------------------------------------------------------------------------------------------------
// Operations of a layer: kernels and GEMMs with the trainer's sizes, workspaces and profile

// One layer's weights (in bf16, FP8 or both), or their gradients (bf16).
typedef struct {
    Real *norm1, *norm2;              // [C]
    Real *q_norm, *k_norm;            // [HD], NULL without QK-norm
    Real *qkv_bias;                   // [QKV], NULL without bias
    QTensor qkv, out, gate_up, down;  // [QKV, C], [C, ATT], [2F, C], [C, F]
} Layer;

static Layer layer_of_unit(const Trainer *t, FsdpUnit unit) {
    const LayerOffsets *offset = &t->table.layer;
    bf16 *v = unit.vectors;
    Layer w = {};
    w.norm1 = v + offset->norm1, w.norm2 = v + offset->norm2;
    if (t->m.qk_norm) w.q_norm = v + offset->q_norm, w.k_norm = v + offset->k_norm;
    if (t->m.qkv_bias) w.qkv_bias = v + offset->bq;
    return w;
}

static Layer layer_weights(const Trainer *t, int64_t l) {
    const Fsdp *f = &t->fsdp;
    Layer w = layer_of_unit(t, fsdp_weights(f, l));
    w.qkv = fsdp_weight(f, l, QKV_PROJ), w.out = fsdp_weight(f, l, OUT_PROJ);
    w.gate_up = fsdp_weight(f, l, GATE_UP_PROJ), w.down = fsdp_weight(f, l, DOWN_PROJ);
    return w;
}

static Layer layer_gradients(const Trainer *t, int64_t l) {
    const LinearShape *s = t->precision.linear;
    const FsdpUnit unit = fsdp_gradients(&t->fsdp, l);
    Layer dw = layer_of_unit(t, unit);
    dw.qkv = qtensor_bf16(unit.matrices + s[QKV_PROJ].offset);
    dw.out = qtensor_bf16(unit.matrices + s[OUT_PROJ].offset);
    dw.gate_up = qtensor_bf16(unit.matrices + s[GATE_UP_PROJ].offset);
    dw.down = qtensor_bf16(unit.matrices + s[DOWN_PROJ].offset);
    return dw;
}

static OutputGradients layer_output_gradients(const Trainer *t, int64_t l) {
    return activations_output_gradients(&t->acts, &t->linears.scales, l);
}

static void produce_norm(Trainer *t, const QTensor *y, const float *rstd, const Real *x, const Real *w) {
    qtensor_produce(&t->linears, y, RmsnormSource{x, w, rstd, t->d.C}, t->d.R, t->d.C);
}

// y = RMSNorm(x) w, with x and y [R, C], w [C] and rstd [R]. Also casts y if FP8 GEMMs read it.
static void rmsnorm(Trainer *t, QTensor *y, float *rstd, const Real *x, const Real *w) {
    const Dims *d = &t->d;
    profile_bytes(&t->profile, "RMSNorm, forward",
                  rmsnorm_forward(y->data, rstd, qtensor_produced_amax(y), x, w, d->R, d->C, (float)t->m.rms_norm_eps,
                                  nonfinite_watch_of(t->step.stats, y), t->stream));
    produce_norm(t, y, rstd, x, w);
}

// sum = residual + delta, y = RMSNorm(sum) w. Also casts y if FP8 GEMMs read it.
static void add_rmsnorm(Trainer *t, QTensor *y, float *rstd, Real *sum, const Real *residual, const Real *delta,
                        const Real *w) {
    const Dims *d = &t->d;
    profile_bytes(&t->profile, "RMSNorm, forward",
                  residual_rmsnorm_forward(sum, y->data, rstd, qtensor_produced_amax(y), residual, delta, w, d->R, d->C,
                                           (float)t->m.rms_norm_eps, nonfinite_watch_of(t->step.stats, y), t->stream));
    produce_norm(t, y, rstd, sum, w);
}

// y [R, N] = x [R, K] w^T + bias.
static void linear(Trainer *t, Real *y, const QTensor *x, const QTensor *w, const Real *bias) {
    linears_fprop(&t->linears, y, x, w, bias);
}

// dx [R, K] = dy [R, N] w.
static void linear_dgrad(Trainer *t, Real *dx, const QTensor *dy, const QTensor *w) {
    linears_dgrad(&t->linears, dx, dy, w);
}

// dw [N, K] = dy^T x.
static void linear_wgrad(Trainer *t, const QTensor *dw, const QTensor *dy, const QTensor *x) {
    linears_wgrad(&t->linears, dw->data, dy, x);
}

// QK-norm, if the model has it, and RoPE. `rotated` may be `qkv`.
static void qknorm_rope(Trainer *t, Real *rotated, const Real *qkv, const Real *q_norm, const Real *k_norm) {
    profile_bytes(&t->profile, "RoPE and QK-norm, forward",
                  qknorm_rope_forward(rotated, qkv, q_norm, k_norm, t->acts.rope_table,
                                      rope_dims(&t->d, t->m.rms_norm_eps), t->stream));
}

// Called when a tensor's data is complete: casts it if FP8 GEMMs read it.
static void qtensor_ready(Trainer *t, const QTensor *q) {
    const int64_t columns = precision_columns(&t->precision, q->role, q->linear);
    qtensor_produce(&t->linears, q, TensorSource{q->data, columns}, t->d.R, columns);
}

static void attention(Trainer *t, QTensor *att, float *lse, const Real *rotated) {
    profile_mark(&t->profile, "attention, forward", PROFILE_FLOPS_BF16,
                 attention_forward(att->data, lse, qtensor_produced_amax(att), rotated,
                                   attention_dims(&t->d, t->o->deterministic), t->stream));
    qtensor_ready(t, att);
}

// h = silu(gate) * up. If forward reads h in FP8, only its rowwise data is made; swiglu_backward makes the rest.
static void swiglu(Trainer *t, QTensor *h, const Real *gate_up) {
    const Dims *d = &t->d;
    if (!h->fp8)
        return profile_bytes(&t->profile, "SwiGLU, forward", swiglu_forward(h->data, gate_up, d->R, d->F, t->stream));
    QTensor row = *h;
    row.columnwise = NULL;
    qtensor_produce(&t->linears, &row, SwigluSource{gate_up, d->F}, d->R, d->F);
}

// If options_keeps_fp8: keeps gate and up for backward in FP8. All layers then share one bf16 gate_up.
static void keep_gate_up(Trainer *t, int64_t l) {
    if (!options_keeps_fp8(t->o)) return;
    profile_bytes(&t->profile, "activations to FP8 and back",
                  fp8_group_encode(t->acts.gate_up_fp8[l], t->acts.layer[l].gate_up, t->d.R * 2 * t->d.F, t->stream));
}

static void restore_gate_up(Trainer *t, int64_t l) {
    if (!options_keeps_fp8(t->o)) return;
    profile_bytes(&t->profile, "activations to FP8 and back",
                  fp8_group_decode(t->acts.layer[l].gate_up, t->acts.gate_up_fp8[l], t->d.R * 2 * t->d.F, t->stream));
}

// Computes dgate_up from dh, and h again for the down projection's weight gradient. With current tensor scales one pass
// finds the amax of dgate_up and casts h, before another one casts dgate_up.
static void swiglu_backward(Trainer *t, const QTensor *dgate_up, const QTensor *h, const Real *dh,
                            const Real *gate_up) {
    const int64_t R = t->d.R, F = t->d.F;
    const bool h_fp8 = h->col_granularity != NO_SCALE;
    bf16 *h_data = h_fp8 ? NULL : h->data;
    uint32_t *amax = qtensor_produced_amax(dgate_up);
    QTensor columns = *h;
    columns.rowwise = NULL;
    if (!h_fp8) columns.columnwise = NULL;
    if (h_data || dgate_up->data)
        profile_bytes(&t->profile, "SwiGLU, backward",
                      swiglu_backward(dgate_up->data, h_data, dh, gate_up, R, F, t->stream));
    if (amax) {
        const QTensor audited = tensor_scales_audited(&t->linears.scales, columns);
        profile_bytes(&t->profile, "amax passes", swiglu_backward_amax(amax, audited, dh, gate_up, R, F, t->stream));
    } else if (h_fp8) {
        qtensor_cast(&t->linears, &columns, SwigluSource{gate_up, F}, R, F);
    }
    qtensor_produce(&t->linears, dgate_up, SwigluGradientSource{dh, gate_up, F}, R, F);
}

// Computes dqkv from the gradient of attention's output.
static void attention_backward(Trainer *t, const QTensor *dqkv, const Real *datt, const Real *rotated,
                               const QTensor *att, const float *lse) {
    profile_mark(&t->profile, "attention, backward", PROFILE_FLOPS_BF16,
                 attention_backward(dqkv->data, datt, rotated, att->data, lse, t->acts.attention_workspace,
                                    attention_dims(&t->d, t->o->deterministic), t->stream));
}

// Turns dqkv, the gradient of rotated, into the gradient of qkv, in place.
static void qknorm_rope_backward(Trainer *t, const QTensor *dqkv, Real *dq_norm, Real *dk_norm, const Real *qkv,
                                 const Real *q_norm, const Real *k_norm) {
    profile_bytes(&t->profile, "RoPE and QK-norm, backward",
                  qknorm_rope_backward(dqkv->data, dq_norm, dk_norm, qtensor_produced_amax(dqkv), q_norm ? qkv : NULL,
                                       q_norm, k_norm, t->acts.rope_table, rope_dims(&t->d, t->m.rms_norm_eps),
                                       t->acts.reduce_workspace, t->stream));
}

// dbias [QKV] = column sums of dy. Does nothing without a bias.
static void bias_backward(Trainer *t, Real *dbias, const QTensor *dy) {
    if (dbias) bias_backward(dbias, dy->data, t->d.R, t->d.QKV, t->acts.reduce_workspace, t->stream);
}

// Adds the gradient through a norm to dx, and computes dweight. x is the norm's input, dy the gradient of its output.
static void rmsnorm_backward(Trainer *t, const QTensor *dx, Real *dweight, const Real *dy, const Real *x,
                             const float *rstd, const Real *w) {
    profile_bytes(&t->profile, "RMSNorm, backward",
                  rmsnorm_backward(dx->data, dweight, qtensor_produced_amax(dx), dy, x, rstd, w, dx->data, t->d.R,
                                   t->d.C, t->acts.norm_workspace, t->stream));
}

// The tensors of the root unit. A tied lm_head is the embedding. Each tensor begins its segment.
typedef struct {
    Real *embedding, *norm, *lm_head;
} Root;

static Root root_of_unit(FsdpUnit unit) { return Root{unit.embedding, unit.vectors, unit.matrices}; }

static Root root_weights(const Trainer *t) { return root_of_unit(fsdp_weights(&t->fsdp, ROOT)); }
static Root root_gradients(const Trainer *t) { return root_of_unit(fsdp_gradients(&t->fsdp, ROOT)); }

// Work enqueued after this call may use layer l's weights, gathered and cast as needed (fsdp.cuh), and the memory of
// its activations (--offload activations). Also starts the gather of the layer that the pass computes next.
static void unshard(Trainer *t, int64_t l, bool backward) {
    if (kept_begin(&t->offload.kept, l, backward, t->stream))
        profile_mark(&t->profile, "activations from the host: waiting", PROFILE_WAIT, 0);
    fsdp_prefetch(&t->fsdp, backward ? l - 1 : l + 1);  // communicates while layer l computes
    fsdp_unshard(&t->fsdp, l, backward);
    profile_mark(&t->profile, "weights: waiting, casts, transposes", PROFILE_WAIT, 0);
}

static void reshard(Trainer *t, int64_t l, bool backward) {
    fsdp_reshard(&t->fsdp, l);
    kept_end(&t->offload.kept, l, backward, t->stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// Computes q, k, v and attention from the first norm's output, without the output projection.
static void layer_attention(Trainer *t, int64_t l) {
    const Layer w = layer_weights(t, l);
    LayerActs *a = &t->acts.layer[l];
    linear(t, a->qkv, &a->norm1, &w.qkv, w.qkv_bias);
    qknorm_rope(t, a->rotated, a->qkv, w.q_norm, w.k_norm);
    attention(t, &a->att, a->lse, a->rotated);
}

// Computes one layer. Its input a->x is x_mid + branch of the layer below, which the first norm adds; in layer 0 it is
// the embedding. Its output is a->x_mid + t->acts.branch: the next norm adds them.
static void layer_forward(Trainer *t, int64_t l) {
    const Layer w = layer_weights(t, l);
    LayerActs *a = &t->acts.layer[l];
    if (l == 0) rmsnorm(t, &a->norm1, a->rstd1, a->x, w.norm1);
    else add_rmsnorm(t, &a->norm1, a->rstd1, a->x, t->acts.layer[l - 1].x_mid, t->acts.branch, w.norm1);
    layer_attention(t, l);
    linear(t, t->acts.branch, &a->att, &w.out, NULL);
    add_rmsnorm(t, &a->norm2, a->rstd2, a->x_mid, a->x, t->acts.branch, w.norm2);
    linear(t, a->gate_up, &a->norm2, &w.gate_up, NULL);
    swiglu(t, &a->h, a->gate_up);
    keep_gate_up(t, l);
    linear(t, t->acts.branch, &a->h, &w.down, NULL);
}

static void final_norm(Trainer *t, const bf16 *w) {
    const Dims *d = &t->d;
    Activations *a = &t->acts;
    profile_bytes(&t->profile, "RMSNorm, forward",
                  residual_rmsnorm_forward(a->x_final, a->y_final, a->rstd_final, NULL, a->layer[d->L - 1].x_mid,
                                           a->branch, w, d->R, d->C, (float)t->m.rms_norm_eps,
                                           nonfinite_watch(t->step.stats, nonfinite_norm(d->L, false)), t->stream));
}

// Runs the embedding, all layers and the final norm: batch->inputs -> t->acts.y_final [R, C].
static void model_forward(Trainer *t, const Batch *batch) {
    const Dims *d = &t->d;
    const Root w = root_weights(t);
    t->d.documents = batch->documents;
    tensor_scales_clear_amaxes(&t->linears.scales, 0, d->L, TENSOR_X, TENSOR_DY);
    fsdp_prefetch(&t->fsdp, 0);
    profile_bytes(&t->profile, "embedding",
                  embedding_forward(t->acts.layer[0].x, w.embedding, batch->inputs, d->R, d->C, t->stream));
    for (int64_t l = 0; l < d->L; l++) {
        profile_range_begin("forward of layer", l);
        unshard(t, l, false);
        layer_forward(t, l);
        reshard(t, l, false);
        profile_range_end();
    }
    final_norm(t, w.norm);
}

// Computes the logits of rows [first, first + rows) into t->acts.logits. Returns these rows of lm_head's input.
static QTensor logits_forward(Trainer *t, int64_t first, int64_t rows) {
    return linears_head_logits(&t->linears, t->acts.logits, t->acts.y_final + first * t->d.C, rows);
}

// Computes the cross-entropy of every row into t->acts.losses, after model_forward.
static void loss_forward(Trainer *t, const Batch *batch) {
    const Dims d = t->d;
    linears_head_begin(&t->linears, root_weights(t).lm_head, t->acts.y_final, false);
    for (int64_t first = 0, chunk = t->linears.head_rows; first < d.R; first += chunk) {
        const int64_t rows = min_i64(chunk, d.R - first);
        logits_forward(t, first, rows);
        cross_entropy_loss(t->acts.losses + first, t->acts.logits, batch->targets + first, rows, d.V, d.VP, t->stream);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// After model_forward: computes the loss of every row and, back through lm_head and the final norm, t->acts.dx and the
// gradients of lm_head's and the final norm's weights. Only one chunk of rows has its logits in memory at a time.
static void loss_forward_backward(Trainer *t, const Batch *batch, float grad_scale) {
    const Dims *d = &t->d;
    Activations *a = &t->acts;
    const Root w = root_weights(t), dw = root_gradients(t);
    const int64_t chunk = t->linears.head_rows;
    linears_head_begin(&t->linears, w.lm_head, a->y_final, true);
    for (int64_t first = 0; first < d->R; first += chunk) {
        const int64_t rows = min_i64(chunk, d->R - first);
        const QTensor y = logits_forward(t, first, rows);
        profile_bytes(&t->profile, "cross-entropy",
                      cross_entropy_loss_and_gradient(a->losses + first, a->logits, batch->targets + first, rows, d->V,
                                                      d->VP, grad_scale, precision_dlogits_dropped(&t->precision),
                                                      linears_head_codes(&t->linears, grad_scale), t->stream));
        linears_head_backward(&t->linears, a->dbranch + first * d->C, dw.lm_head, a->logits, &y, rows, grad_scale,
                              first > 0);
    }
    const OutputGradients last = layer_output_gradients(t, d->L - 1);
    profile_bytes(&t->profile, "RMSNorm, backward",
                  rmsnorm_backward(a->dx, dw.norm, qtensor_produced_amax(&last.down), a->dbranch, a->x_final,
                                   a->rstd_final, w.norm, NULL, d->R, d->C, a->norm_workspace, t->stream));
}

// Computes again what backward reads of a layer and forward did not keep (--recompute), except SwiGLU's output.
static void layer_recompute(Trainer *t, int64_t l) {
    const Layer w = layer_weights(t, l);
    const Recomputed again = options_recomputed(t->o);
    LayerActs *a = &t->acts.layer[l];
    if (again.norms) rmsnorm(t, &a->norm1, a->rstd1, a->x, w.norm1);
    if (again.attention) layer_attention(t, l);
    if (again.stream) linear(t, t->acts.branch, &a->att, &w.out, NULL);
    if (again.stream) add_rmsnorm(t, &a->norm2, a->rstd2, a->x_mid, a->x, t->acts.branch, w.norm2);
    else if (again.norms) rmsnorm(t, &a->norm2, a->rstd2, a->x_mid, w.norm2);
    if (again.mlp) linear(t, a->gate_up, &a->norm2, &w.gate_up, NULL);
}

// Turns t->acts.dx, the gradient of layer l's output, into that of its input. Computes the gradients of its weights.
static void layer_backward(Trainer *t, int64_t l) {
    const Layer w = layer_weights(t, l), dw = layer_gradients(t, l);
    LayerActs *a = &t->acts.layer[l];
    OutputGradients dy = layer_output_gradients(t, l), below = layer_output_gradients(t, l - 1);
    Real *dbranch = t->acts.dbranch;
    layer_recompute(t, l);
    restore_gate_up(t, l);

    qtensor_ready(t, &dy.down);
    linear_dgrad(t, t->acts.dh, &dy.down, &w.down);
    swiglu_backward(t, &dy.gate_up, &a->h, t->acts.dh, a->gate_up);
    linear_wgrad(t, &dw.down, &dy.down, &a->h);
    linear_dgrad(t, dbranch, &dy.gate_up, &w.gate_up);
    linear_wgrad(t, &dw.gate_up, &dy.gate_up, &a->norm2);
    rmsnorm_backward(t, &dy.out, dw.norm2, dbranch, a->x_mid, a->rstd2, w.norm2);

    qtensor_ready(t, &dy.out);
    linear_dgrad(t, t->acts.datt, &dy.out, &w.out);
    linear_wgrad(t, &dw.out, &dy.out, &a->att);
    if (t->acts.rotated_is_shared) qknorm_rope(t, a->rotated, a->qkv, w.q_norm, w.k_norm);
    attention_backward(t, &dy.qkv, t->acts.datt, a->rotated, &a->att, a->lse);
    qknorm_rope_backward(t, &dy.qkv, dw.q_norm, dw.k_norm, a->qkv, w.q_norm, w.k_norm);
    bias_backward(t, dw.qkv_bias, &dy.qkv);
    qtensor_ready(t, &dy.qkv);
    linear_dgrad(t, dbranch, &dy.qkv, &w.qkv);
    linear_wgrad(t, &dw.qkv, &dy.qkv, &a->norm1);
    rmsnorm_backward(t, &below.down, dw.norm1, dbranch, a->x, a->rstd1, w.norm1);
}

// Computes the gradient of the embedding, at the end of backward. A tied embedding's gradient is added to lm_head's.
static void embedding_backward(Trainer *t, const Batch *batch) {
    fsdp_replay_inputs(&t->fsdp, &t->step.replay, t->acts.dx, t->d.R * t->d.C);
    if (t->step.replay.again && fsdp_embedding_joins(&t->fsdp)) return;
    profile_bytes(&t->profile, "embedding",
                  fsdp_embedding_backward(&t->fsdp, batch->index, t->acts.dx, t->d.R, t->d.C));
}

// Reduces the gradient of layer l or of ROOT over the shard group, and adds it to the sums over micro-steps.
static void reduce_scatter_gradients(Trainer *t, int64_t l) {
    fsdp_replay_unit(&t->fsdp, &t->step.replay, l);
    if (t->step.replay.again) return;
    const int64_t bytes = fsdp_reduce_scatter(&t->fsdp, l);  // communicates while the layer below computes
    if (bytes) profile_bytes(&t->profile, "sums over micro-steps", bytes);
}

// Delayed recipe, after the last micro-step: adds the largest amaxes of the step's inputs and output gradients, over
// all micro-steps and ranks, to their histories.
static void update_delayed_scales(Trainer *t) {
    TensorScales *s = &t->linears.scales;
    if (!s->delayed_scale) return;
    fsdp_reduce_amaxes(&t->fsdp, COMM_WORLD, s->step_amax);
    tensor_scales_update_activations(s);
}

// ---------------------------------------------------------------------------------------------------------------------
// Optimizer

// Returns memory for sums of squares of blocks: the GEMMs' workspace, unless GEMMs run beside the optimizer.
static double *block_squares(const Trainer *t) {
    return t->step.block_squares ? t->step.block_squares : (double *)t->linears.gemm.workspace;
}

// Makes the step's loss that of all ranks, and t->step.squares too if gradients are sharded.
static void reduce_step_stats(Trainer *t) {
    fsdp_reduce_step_stats(&t->fsdp, t->step.losses, micro_batches(t), t->step.squares, block_squares(t));
    loss_mean(&t->step.stats->loss, t->step.losses, micro_batches(t), (double)t->step.targets, t->stream);
}

// Returns the arguments of this step's updates.
static AdamwUpdate update_of_step(const Trainer *t) {
    const TensorScales *scales = &t->linears.scales;
    const bool norm_first = fsdp_norm_first(t->o);
    return AdamwUpdate{t->params,
                       adamw_step_of(t->o, t->fsdp.step, t->step.skipped),
                       norm_first || t->fsdp.clip.grad_clip > 0 ? &t->step.stats->control : NULL,
                       norm_first ? NULL : block_squares(t),
                       fsdp_tensor_scales(&t->fsdp) ? scales->amax : NULL,
                       scales->amax_stride,
                       msamp_step_of(t->o, t->fsdp.step, t->step.skipped)};
}

// Computes the gradient norm, the clip factor, and whether the step is taken, from t->step.squares and the loss of all
// ranks. These results stay on the device, and are equal on all ranks. If the step is not taken, also locates this
// rank's large gradients (AdamwControl).
static void finish_norm(Trainer *t) {
    const Fsdp *f = &t->fsdp;
    AdamwControl *control = &t->step.stats->control;
    const AdamwUpdate update = update_of_step(t);
    adamw_norm(control, t->step.squares, &t->step.stats->loss, fsdp_times_counted(f), (float)t->o->grad_clip,
               t->stream);
    if (t->o->optimizer_in_backward) adamw_locate_block(control, &update, &t->table, &f->plan.shard, t->stream);
    else adamw_locate(control, t->params.gradients, shard_backward_order(&t->table, &f->plan.shard), t->stream);
}

// Runs AdamW on this rank's part of unit l, a layer or ROOT, and of the count - 1 layers that follow it.
static void update_units(Trainer *t, int64_t l, int64_t count) {
    const AdamwUpdate update = update_of_step(t);
    AdamwControl *control = &t->step.stats->control;
    if (t->fsdp.clip.grad_clip > 0) profile_bytes(&t->profile, "gradient norm", fsdp_clip_unit(&t->fsdp, control, l));
    const WeightBound bound = adamw_bound_of(t->o, t->fsdp.step, t->step.skipped);
    if (l != ROOT) tensor_scales_begin_new_weights(&t->linears.scales, l, count, bound, &control->nonfinite);
    const int64_t codes = fsdp_update_units(&t->fsdp, &t->offload, &update, l, count);
    profile_bytes(&t->profile, "AdamW",
                  codes + adamw_bytes(&t->params, count * shard_elements(&t->fsdp.plan.shard, l)));
}

static void update_layer(Trainer *t, int64_t l) {
    fsdp_await_sums(&t->fsdp, l);
    step_log_work(&t->log, TIME_OPTIMIZER);
    update_units(t, l, 1);
    step_log_work(&t->log, TIME_COMPUTE);
}

// --optimizer-in-backward, after the backward pass of layer l: updates layer l if there is one rank. With several ranks
// updates layer l + 1, if there is one, whose gradient was reduced meanwhile; after layer 0, also layer 0.
static void update_in_backward(Trainer *t, int64_t l) {
    const int64_t late = t->comm->world > 1;
    if (l + late < t->d.L) update_layer(t, l + late);
    if (late && l == 0) update_layer(t, 0);
}

// Finds the gradient norm, runs AdamW (with --optimizer-in-backward on the root alone), and publishes the weights.
static void optimizer_step(Trainer *t) {
    Fsdp *f = &t->fsdp;
    const bool norm_first = fsdp_norm_first(t->o);
    update_delayed_scales(t);
    compute_waits_comm(&f->transport);
    profile_mark(&t->profile, "gradients: waiting", PROFILE_WAIT, 0);
    if (norm_first) {
        profile_bytes(&t->profile, "gradient norm",
                      fsdp_squares(f, t->step.squares, block_squares(t), t->params.gradients));
        reduce_step_stats(t);
        finish_norm(t);
    }
    update_units(t, ROOT, 1);
    fsdp_publish_root(f);
    if (!t->o->optimizer_in_backward) update_units(t, 0, t->d.L);
    if (!norm_first) {
        const AdamwUpdate update = update_of_step(t);
        if (!f->plan.any_ranks) adamw_updated_squares(t->step.squares, &update, &t->table, &f->plan.shard, t->stream);
        reduce_step_stats(t);
        finish_norm(t);
    }
    fsdp_publish_layers(f);
    profile_mark(&t->profile, "new weights: FP8 casts, gathers", PROFILE_WAIT, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// One step

// Runs forward and backward of a micro-step on one batch, after fsdp_begin_micro_step. Adds the gradients of (sum of
// the rows' losses) * grad_scale to the sums, or replaces these in the first micro-step. After the last micro-step and
// compute_waits_comm, the sums are over all ranks. With --optimizer-in-backward also updates the layers, not the root.
static void model_forward_backward(Trainer *t, const Batch *batch, float grad_scale, bool last) {
    Fsdp *f = &t->fsdp;
    tensor_scales_begin_micro_step(&t->linears.scales);
    t->offload.kept.stores = true;
    model_forward(t, batch);
    t->offload.kept.stores = false;
    fsdp_begin_gradients(f, ROOT);
    profile_range_begin("loss", -1);
    loss_forward_backward(t, batch, grad_scale);
    if (fsdp_embedding_joins(f)) reduce_scatter_gradients(t, ROOT);
    profile_range_end();
    for (int64_t l = t->d.L - 1; l >= 0; l--) {
        profile_range_begin("backward of layer", l);
        unshard(t, l, true);
        fsdp_begin_gradients(f, l);
        layer_backward(t, l);
        reshard(t, l, true);
        reduce_scatter_gradients(t, l);
        fsdp_reduce_replicas(f, l, last);
        if (t->o->optimizer_in_backward) update_in_backward(t, l);
        profile_range_end();
    }
    embedding_backward(t, batch);
    if (!fsdp_embedding_joins(f)) reduce_scatter_gradients(t, ROOT);
    fsdp_reduce_replicas(f, ROOT, last);
    if (!t->step.replay.again) tensor_scales_end_micro_step(&t->linears.scales);
}

// The host waits for all enqueued work.
static void trainer_wait_all(Trainer *t) {
    offload_wait(&t->offload, t->stream);
    transport_wait_all(&t->fsdp.transport);
}

// Sends the sequences of micro-step `micro` of the step that begins with first_sample to the GPU: those of the rank
// that is `shift` behind this one in its shard group. The host waits only when all slots are in flight.
static Batch send_batch(Trainer *t, DataLoader *data, int64_t first_sample, int64_t micro, int64_t shift) {
    const Comm *c = t->comm;
    const ShardPlan *shard = &t->fsdp.plan.shard;
    const int64_t B = t->d.B, place = (shard->shard_rank + shift) % shard->shard_size;
    const int64_t group_first = dataloader_sample_index(first_sample, micro, c->world, c->rank - shard->shard_rank, B);
    TokenSlot *slot = batches_next(&t->batches);
    transport_wait(&t->fsdp.transport, slot->copied);
    dataloader_whole_batch(data, group_first + place * B, B, &slot->host);
    const int32_t *inputs = batches_group_inputs(&t->batches, slot, data, group_first, place);
    batches_sort(&t->batches, slot, inputs, t->d.C, fsdp_embedding_part(&t->fsdp));
    batches_send(&t->batches, slot, t->stream);
    return slot->device;
}

// ReplayPass.
static void replay_pass(void *trainer, const ReplayedStep *r, int64_t shift, uint64_t *hashes) {
    Trainer *t = (Trainer *)trainer;
    if (shift) {
        const Batch batch = send_batch(t, r->data, r->first_sample, t->o->grad_accumulation_steps - 1, shift);
        fsdp_replay_begin(&t->fsdp, &t->step.replay, true);
        model_forward_backward(t, &batch, gradient_scale(t), false);
    }
    fsdp_replay_end(&t->fsdp, &t->step.replay, hashes);
}

// Returns 1 if step `step` was skipped, else 0. Waits for its end; the GPU may have later work to do meanwhile.
static int64_t was_skipped(Trainer *t, int64_t step) {
    transport_wait(&t->fsdp.transport, t->log.done[step % STEP_SLOTS]);
    return t->log.host[step % STEP_SLOTS].control.nonfinite;
}

// Enqueues a whole optimizer step. Each rank takes its part of the step's samples, which begin with first_sample.
static void start_step(void *context, DataLoader *data, int64_t step, int64_t skipped, int64_t first_sample,
                       bool after_pause) {
    Trainer *t = (Trainer *)context;
    const Options *o = t->o;
    const bool replays = is_due(o->replay_every, step + 1);
    const int64_t micro_steps = o->grad_accumulation_steps, world = t->comm->world;
    fsdp_begin_step(&t->fsdp, step);
    profile_range_begin("step", step + 1);
    if (o->profile && step + 1 == o->num_steps) profile_begin(&t->profile, t->stream);
    step_log_begin(&t->log, t->step.stats, step, after_pause);
    tensor_scales_audit_casts(&t->linears.scales, is_due(o->fp8_audit, step + 1));
    tensor_scales_copy_before(&t->linears.scales, true);
    tensor_scales_begin_step(&t->linears.scales);
    t->step.targets = step_targets(o, t->comm, data, step, first_sample);
    CUDA_CHECK(cudaMemsetAsync(t->step.losses, 0, (size_t)micro_batches(t) * sizeof(double), t->stream));
    for (int64_t micro = 0; micro < micro_steps; micro++) {
        if (micro) step_log_work(&t->log, TIME_DATA);
        const Batch batch = send_batch(t, data, first_sample, micro, 0);
        step_log_work(&t->log, TIME_COMPUTE);
        fsdp_begin_micro_step(&t->fsdp, micro);
        if (replays && micro + 1 == micro_steps) fsdp_replay_begin(&t->fsdp, &t->step.replay, false);
        model_forward_backward(t, &batch, gradient_scale(t), micro + 1 == micro_steps);
        loss_sum(&t->step.losses[micro * world + t->comm->rank], t->acts.losses, t->d.R, t->stream);
    }
    const ReplayedStep replayed = {data, first_sample, step};
    if (replays) replay_check(t->comm, &t->table, replay_pass, t, &replayed, device_uuid().text);
    t->step.skipped = skipped + (after_pause || o->on_nonfinite != NONFINITE_SKIP ? 0 : was_skipped(t, step - 1));
    step_log_work(&t->log, TIME_OPTIMIZER);
    profile_range_begin("optimizer", -1);
    optimizer_step(t);
    profile_range_end();
    tensor_scales_audit_casts(&t->linears.scales, false);
    profile_end(&t->profile);
    step_log_end(&t->log, t->step.stats, step);
    profile_range_end();
}

static StepRecord finish_step(void *context, int64_t step) {
    Trainer *t = (Trainer *)context;
    StepRecord s = {};
    s.skipped = was_skipped(t, step);
    const StepStats *stats = &t->log.host[step % STEP_SLOTS];
    s.loss = stats->loss, s.norm = stats->control.gradient_norm;
    s.seconds = step_log_seconds(&t->log, step), s.times = step_log_times(&t->log, step);
    s.memory = step_log_memory(&t->log);
    if (!s.skipped) t->linears.scales.scales_ready = t->linears.scales.delayed_scale != NULL;
    return s;
}

static NonfiniteStep nonfinite(void *context, const StepRecord *s) {
    Trainer *t = (Trainer *)context;
    trainer_wait_all(t);  // weights are read next, which may take long and does not watch NCCL
    return nonfinite_step(&t->log.host[(s->step - 1) % STEP_SLOTS], t->o->optimizer_in_backward);
}

static void read_audit(void *context, AuditSums *sums) {
    Trainer *t = (Trainer *)context;
    trainer_wait_all(t);
    const size_t bytes = (size_t)audit_count(&t->precision) * sizeof *sums;
    CUDA_CHECK(cudaMemcpy(sums, t->linears.scales.audit, bytes, cudaMemcpyDeviceToHost));
}

// ---------------------------------------------------------------------------------------------------------------------
// Validation and samples

static const float *token_losses(void *context, DataLoader *data, int64_t batch) {
    Trainer *t = (Trainer *)context;
    const Batch sent = send_batch(t, data, 0, batch, 0);
    model_forward(t, &sent);
    loss_forward(t, &sent);
    trainer_wait_all(t);
    CUDA_CHECK(cudaMemcpy(t->results, t->acts.losses, (size_t)t->d.R * sizeof(float), cudaMemcpyDeviceToHost));
    return t->results;
}

// Waits for all enqueued work. With recipe delayed and --on-nonfinite skip, until a step was applied or a checkpoint
// gave every tensor a scale, also drops the scales that validation or samples gave to tensors.
static void settle(void *context) {
    Trainer *t = (Trainer *)context;
    if (!t->linears.scales.scales_ready) tensor_scales_copy_before(&t->linears.scales, false);
    trainer_wait_all(t);
}

// Returns the logits of the last of `length` tokens, which are one document. The model runs over a whole batch that
// begins with them: causal attention does not see the rest.
static const float *next_logits(void *context, const int32_t *tokens, int64_t length) {
    Trainer *t = (Trainer *)context;
    const Dims *d = &t->d;
    TokenSlot *slot = batches_next(&t->batches);
    trainer_wait_all(t);
    memset(slot->host.inputs, 0, (size_t)d->R * sizeof(int32_t));
    memcpy(slot->host.inputs, tokens, (size_t)length * sizeof(int32_t));
    batches_send(&t->batches, slot, t->stream);
    const Batch text = {slot->device.inputs, NULL, {}, NULL};
    model_forward(t, &text);
    const int64_t last = length - 1, first = last / t->linears.head_rows * t->linears.head_rows;
    linears_head_begin(&t->linears, root_weights(t).lm_head, t->acts.y_final, false);
    logits_forward(t, first, min_i64(t->linears.head_rows, d->R - first));
    trainer_wait_all(t);
    bf16_bits *row = (bf16_bits *)xcalloc((size_t)d->V, sizeof *row);
    CUDA_CHECK(
        cudaMemcpy(row, t->acts.logits + (last - first) * d->VP, (size_t)d->V * sizeof *row, cudaMemcpyDeviceToHost));
    for (int64_t v = 0; v < d->V; v++) t->results[v] = bf16_to_float(row[v]);
    free(row);
    return t->results;
}

// ---------------------------------------------------------------------------------------------------------------------
// Setting up

// Computes sizes and the memory plan. Uses no GPU.
static Arena trainer_describe(Trainer *t, const Options *o, const ModelConfig *m, const Comm *comm) {
    memset(t, 0, sizeof *t);
    t->o = o, t->m = *m, t->comm = comm;
    t->table = parameter_table(m);
    t->precision = precision_plan(o, o->fp8_filter, m, &t->table, true);
    fsdp_describe(&t->fsdp, &t->table, &t->precision, o, comm->world, comm->rank);
    t->state = GpuState{o, &t->params, &t->linears.scales, &t->offload, &t->fsdp, &t->linears.gemm.workspace};
    t->d = model_dims(m, o->batch_size, o->sequence_length);
    const int64_t room = t->fsdp.plan.any_ranks ? t->table.root_segments[SEGMENT_EMBEDDING] : fsdp_loss_span(&t->fsdp);
    linears_describe(&t->linears, &t->precision, m, t->d.R, logits_rows(&t->d, room), o, &t->profile);
    t->acts.layer = (LayerActs *)xcalloc((size_t)t->d.L, sizeof(LayerActs));
    t->acts.gate_up_fp8 = (Fp8Groups *)xcalloc((size_t)t->d.L, sizeof(Fp8Groups));
    t->acts.kept = (KeptSpan *)xcalloc((size_t)t->d.L, sizeof(KeptSpan));
    offload_describe(&t->offload, o, &t->fsdp.plan.shard, t->acts.kept, t->d.L);
    Arena plan = {};
    place(t, &plan);
    return plan;
}

// Returns the bytes of GPU memory that a rank needs.
static int64_t memory_needed(const Options *o, const ModelConfig *m, const Comm *comm) {
    Trainer t;
    return trainer_describe(&t, o, m, comm).used + memory_overhead(comm);
}

// Dies unless the plan fits the free memory.
static void check_memory(const Trainer *t, const Arena *plan) {
    const MemoryFit fit = {t->o, &t->m, t->comm, GPU_TRAINER, memory_needed, memory_available(t->comm), true};
    memory_fit_require(&fit, plan->used + memory_overhead(t->comm), "this GPU has free, with CUDA's own memory,");
}

// Allocates the GPU memory, plans the GEMMs, and sets all arrays to their first values, most of them zero.
static void trainer_create(Trainer *t, const Arena *plan) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking));
    if (t->comm->world > 1) nccl_open(&t->nccl, t->comm);
    check_memory(t, plan);
    CUDA_CHECK(cudaMalloc((void **)&t->memory, (size_t)plan->used));
    Arena arena = {};
    arena.base = t->memory;
    place(t, &arena);
    t->log = step_log_create(t->stream);
    const FsdpInputs in = {t->params.weights, &t->linears.scales, t->comm->world > 1 ? &t->nccl : NULL, &t->log,
                           &t->params.scaled};
    fsdp_create(&t->fsdp, &in);
    linears_plan(&t->linears, t->stream, t->memory, t->comm->local_rank == 0);
    CUDA_CHECK(cudaMemsetAsync(t->memory, 0, (size_t)plan->used, t->stream));
    rope_table_upload(t->acts.rope_table, &t->m, t->d.T, t->stream);  // after its memory is cleared
    adamw_begin_states(&t->params, t->stream);
    offload_create(&t->offload, &t->params);
    batches_create(&t->batches);
    t->results = (float *)xcalloc((size_t)max_i64(t->d.V, t->d.R), sizeof *t->results);
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    fsdp_open_peers(&t->fsdp, t->comm, t->memory, plan->used, t->o->copy_engines == ON);
}

static void trainer_destroy(Trainer *t) {
    trainer_wait_all(t);
    offload_destroy(&t->offload);
    linears_destroy(&t->linears);
    batches_destroy(&t->batches);
    step_log_destroy(&t->log);
    free(t->results);
    fsdp_destroy(&t->fsdp);
    transport_close_peers(&t->fsdp.transport, t->comm);
    if (t->fsdp.in.nccl) nccl_close(t->fsdp.in.nccl);
    CUDA_CHECK(cudaFree(t->memory));
    CUDA_CHECK(cudaStreamDestroy(t->stream));
    precision_free(&t->precision);
    parameter_table_free(&t->table);
    free(t->acts.layer), free(t->acts.gate_up_fp8), free(t->acts.kept);
}

// Called after initialization or a load has changed the weights: rounds bf16 weights from masters, finds the amaxes of
// weights with one scale, and publishes the new weights (fsdp.cuh).
static void weights_changed(void *context) {
    Trainer *t = (Trainer *)context;
    t->linears.scales.scales_ready = gpu_state_has_delayed_scales(&t->state);
    fsdp_masters_changed(&t->fsdp, &t->params);
    fsdp_publish_root(&t->fsdp);
    fsdp_find_weight_amaxes(&t->fsdp);
    fsdp_publish_layers(&t->fsdp);
    trainer_wait_all(t);
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

static TrainerParts describe(void *context, const Options *o, const ModelConfig *m, const Comm *comm) {
    Trainer *t = (Trainer *)context;
    const Arena plan = trainer_describe(t, o, m, comm);
    return TrainerParts{&t->table, &t->precision,       gpu_state_access(&t->state, comm), plan, memory_overhead(comm),
                        t->d.R,    t->linears.head_rows};
}

static void print_settings(const void *context) {
    const Trainer *t = (const Trainer *)context;
    fsdp_print_gathers(&t->fsdp);
    offload_print(&t->offload, kept_passes(t->o, &t->m, &t->table, &t->precision));
}

static void print_gemms(const void *context) { linears_print(&((const Trainer *)context)->linears); }

static void create(void *context, const Arena *memory) {
    Trainer *t = (Trainer *)context;
    trainer_create(t, memory);
    fsdp_print_transport(&t->fsdp);
    linears_print_full_accum(&t->linears);
}

static LinkOps links(void *context) {
    Trainer *t = (Trainer *)context;
    return gpu_links(&t->fsdp, t->comm, &t->linears.gemm);
}

static void initialize(void *context) {
    Trainer *t = (Trainer *)context;
    const bool fp16 = t->params.scaled.master != NULL;
    const InitialWeights weights = {fp16 ? (bf16 *)fp16_masters_upper(&t->params) : t->params.weights, t->params.master,
                                    t->params.scaled.master};
    initialize_parameters(weights, &t->table, &t->fsdp.plan.shard, (float)t->m.initializer_range, (uint64_t)t->o->seed,
                          t->stream);
}

static void print_profile(void *context, double peak_bf16, JsonText *parts) {
    Trainer *t = (Trainer *)context;
    if (!t->profile.count) return;
    profile_print(&t->profile, peak_bf16,
                  profile_copy_rate((char *)t->acts.logits, t->linears.head_rows * t->d.VP, t->stream), parts);
}

static void destroy(void *context) { trainer_destroy((Trainer *)context); }

// In the order of TrainerOps.
// clang-format off
static const TrainerOps trainer_ops = {
    "train_fp8cu", 1, GPU_TRAINER, open_device, auto_filter_find, describe, memory_needed, memory_available,
    print_settings, print_gemms, create, links, initialize, weights_changed, device_info, start_step, finish_step,
    nonfinite, read_audit, token_losses, next_logits, settle, print_profile, destroy};
// clang-format on

#ifndef TESTING
int main(int argc, char **argv) {
    static Trainer trainer;
    return run_trainer(argc, argv, &trainer_ops, &trainer);
}
#endif
