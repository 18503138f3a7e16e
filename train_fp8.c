// train_fp8: pre-trains Llama and Qwen models on the CPU. It is the readable reference for train_fp8cu: it has the same
// model and FP8 recipes, and casts equal values to equal FP8 bits. With --precision bf16 or fp8 it rounds to bf16 and
// FP8 wherever the GPU does. Exceptions are sums that the GPU computes in parts: lm_head's weight gradient, in chunks
// of rows; and without --deterministic the embedding's gradient, which the GPU may add directly to lm_head's (if they
// are tied) and to the sums of earlier micro-steps, and sums over ranks.
//
// From top to bottom: the model's operations, one layer, the whole model, the step, validation and samples,
// checkpoints, the run. In llmc/cpu/ are the trainer's state, what it gathers and reduces over ranks, its casts and its
// optimizer. The arithmetic of each operation is in llmc/reference/.
//
// The functions of one layer, forward and backward, are the same text in train_fp8.cu (dev/test/test_twins.py).
//
// `mpirun -np N ./train_fp8 ...` trains one model with N ranks, sharded as llmc/config/shard_plan.h says. Every rank
// runs the same program on its own sequences of each batch.

#include <omp.h>
#include <sys/resource.h>

#include "llmc/base/openmp.h"

#include "llmc/config/options.h"
#include "llmc/config/schedule.h"

#include "llmc/data/dataloader.h"

#include "llmc/reference/attention.h"
#include "llmc/reference/cross_entropy.h"
#include "llmc/reference/embedding.h"
#include "llmc/reference/fp8_group.h"
#include "llmc/reference/linear.h"
#include "llmc/reference/rmsnorm.h"
#include "llmc/reference/rope.h"
#include "llmc/reference/swiglu.h"

#include "llmc/ranks/comm.h"

#include "llmc/run/train.h"

#include "llmc/cpu/optimizer.h"

// ---------------------------------------------------------------------------------------------------------------------
// Linear layers and the model's other operations

// y [R, N] = x [R, K] w^T + bias
static void linear(Trainer *t, Real *y, const QTensor *x, const QTensor *w, const Real *bias) {
    const LinearShape *s = &t->precision.linear[w->linear];
    gemm(t, y, x, ROWWISE, w, ROWWISE, t->d.R, s->N, s->K, bias);
}

// dx [R, K] = dy [R, N] w
static void linear_dgrad(Trainer *t, Real *dx, const QTensor *dy, const QTensor *w) {
    const LinearShape *s = &t->precision.linear[w->linear];
    gemm(t, dx, dy, ROWWISE, w, COLUMNWISE, t->d.R, s->K, s->N, NULL);
}

// dw [N, K] = dy^T x
static void linear_wgrad(Trainer *t, const QTensor *dw, const QTensor *dy, const QTensor *x) {
    const LinearShape *s = &t->precision.linear[dw->linear];
    gemm(t, dw->data, dy, COLUMNWISE, x, COLUMNWISE, s->N, s->K, t->d.R, NULL);
}

// Called when a tensor's data is complete. Does nothing here: GEMMs cast a tensor when they read it.
static void qtensor_ready(Trainer *t, QTensor *q) { (void)t, (void)q; }

// In a micro-step: records the number of a norm (nonfinite_norm) if its input is bad (NonfiniteStep.forward).
static void watch_norm(Trainer *t, int64_t norm, const float *rstd) {
    for (int64_t i = 0; t->training && i < t->d.R; i++)
        if (!float_is_positive(rstd[i])) t->bad_norm = min_i64(t->bad_norm, norm);
}

// Returns the number of the norm whose output is the input y of a linear layer.
static int64_t norm_number(const QTensor *y) { return nonfinite_norm(y->layer, y->linear == GATE_UP_PROJ); }

// y [R, C] = RMSNorm(x) w
static void rmsnorm(Trainer *t, QTensor *y, float *rstd, const Real *x, const Real *w) {
    rmsnorm_forward_reference(y->data, rstd, x, w, t->d.R, t->d.C, t->m.rms_norm_eps, t->rounding);
    watch_norm(t, norm_number(y), rstd);
}

// sum [R, C] = residual + delta, y [R, C] = RMSNorm(sum) w
static void add_rmsnorm(Trainer *t, QTensor *y, float *rstd, Real *sum, const Real *residual, const Real *delta,
                        const Real *w) {
    residual_rmsnorm_forward_reference(y->data, rstd, sum, residual, delta, w, t->d.R, t->d.C, t->m.rms_norm_eps,
                                       t->rounding);
    watch_norm(t, norm_number(y), rstd);
}

// Adds the gradient through the norm to dx, and computes dweight. Before the call dx is the gradient that reaches x on
// the residual path around the norm; after it, the whole gradient of x.
static void rmsnorm_backward(Trainer *t, QTensor *dx, Real *dweight, const Real *dy, const Real *x, const float *rstd,
                             const Real *w) {
    rmsnorm_backward_reference(dx->data, dweight, dx->data, dy, x, rstd, w, t->d.R, t->d.C, t->rounding);
}

static void qknorm_rope(Trainer *t, Real *rotated, const Real *qkv, const Real *q_norm, const Real *k_norm) {
    qknorm_rope_forward_reference(rotated, qkv, q_norm, k_norm, t->acts.rope_table, &t->d, t->m.rms_norm_eps,
                                  t->rounding);
}

// Turns dqkv, the gradient of the rotated q, k, v, into the gradient of the projection's output, in place.
static void qknorm_rope_backward(Trainer *t, QTensor *dqkv, Real *dq_norm, Real *dk_norm, const Real *qkv,
                                 const Real *q_norm, const Real *k_norm) {
    qknorm_rope_backward_reference(dqkv->data, dq_norm, dk_norm, dqkv->data, qkv, q_norm, k_norm, t->acts.rope_table,
                                   &t->d, t->m.rms_norm_eps, t->rounding);
}

// dbias [QKV] = column sums of dy. Does nothing without a bias.
static void bias_backward(Trainer *t, Real *dbias, const QTensor *dy) {
    if (dbias) bias_backward_reference(dbias, dy->data, t->d.R, t->precision.linear[dy->linear].N, t->rounding);
}

static void attention(Trainer *t, QTensor *att, float *lse, const Real *rotated) {
    attention_forward_reference(att->data, lse, rotated, &t->d, t->rounding);
}

static void attention_backward(Trainer *t, QTensor *dqkv, const Real *datt, const Real *rotated, const QTensor *att,
                               const float *lse) {
    attention_backward_reference(dqkv->data, datt, rotated, att->data, lse, &t->d, t->rounding);
}

static void swiglu(Trainer *t, QTensor *h, const Real *gate_up) {
    swiglu_forward_reference(h->data, gate_up, t->d.R, t->d.F, t->rounding);
}

// If options_keeps_fp8: keeps gate and up for backward in FP8, which here means rounded to the values of FP8 codes.
static void keep_gate_up(Trainer *t, int64_t l) {
    if (options_keeps_fp8(t->o)) fp8_group_round(t->acts.layer[l].gate_up, t->d.R * 2 * t->d.F);
}

// Does nothing here: gate_up has the kept values already.
static void restore_gate_up(Trainer *t, int64_t l) { (void)t, (void)l; }

// Computes dgate_up from dh. Computes h again if it may hold another layer's values, or if gate_up was rounded to FP8.
static void swiglu_backward(Trainer *t, QTensor *dgate_up, QTensor *h, const Real *dh, const Real *gate_up) {
    if (options_recomputed(t->o).mlp || options_keeps_fp8(t->o)) swiglu(t, h, gate_up);
    swiglu_backward_reference(dgate_up->data, dh, gate_up, t->d.R, t->d.F, t->rounding);
}

// Returns the gradients of the outputs of layer l's linear layers. `out` and `down` are the gradient of the residual
// stream. For l = -1 `down` is the gradient of the embedding's output.
static OutputGradients layer_output_gradients(Trainer *t, int64_t l) {
    const Activations *a = &t->acts;
    const OutputGradients dy = {qtensor(a->dqkv, l, TENSOR_DY, QKV_PROJ), qtensor(a->dx, l, TENSOR_DY, OUT_PROJ),
                                qtensor(a->dgate_up, l, TENSOR_DY, GATE_UP_PROJ),
                                qtensor(a->dx, l, TENSOR_DY, DOWN_PROJ)};
    return dy;
}

// ---------------------------------------------------------------------------------------------------------------------
// One layer: the same text as in train_fp8.cu

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

// ---------------------------------------------------------------------------------------------------------------------
// The whole model

// Runs the embedding, all layers and the final norm: batch->inputs -> acts.y_final [R, C].
static void model_forward(Trainer *t, const Batch *batch) {
    const Dims *d = &t->d;
    t->d.documents = batch->documents;
    Activations *a = &t->acts;
    const Root w = root_weights(t);
    embedding_forward_reference(a->layer[0].x, w.embedding, batch->inputs, d->R, d->C);
    for (int64_t l = 0; l < d->L; l++) {
        unshard(t, l, false);
        layer_forward(t, l);
        reshard(t, l);
    }
    residual_rmsnorm_forward_reference(a->y_final, a->rstd_final, a->x_final, a->layer[d->L - 1].x_mid, a->branch,
                                       w.norm, d->R, d->C, t->m.rms_norm_eps, t->rounding);
    watch_norm(t, nonfinite_norm(d->L, false), a->rstd_final);
}

// Computes acts.logits [R, V] from acts.y_final.
static void logits_forward(Trainer *t) {
    head_gemm(t, GEMM_FPROP, t->acts.logits, root_weights(t).lm_head, t->acts.y_final, 0);
}

// Computes the cross-entropy of every row into acts.losses, after model_forward.
static void loss_forward(Trainer *t, const Batch *batch) {
    logits_forward(t);
    cross_entropy_forward(t->acts.losses, t->acts.logits, batch->targets, t->d.R, t->d.V);
}

// After model_forward: computes the loss of every row and, back through lm_head and the final norm, acts.dx and the
// gradients of lm_head's and the final norm's weights.
static void loss_forward_backward(Trainer *t, const Batch *batch, float grad_scale) {
    const Dims *d = &t->d;
    const Activations *a = &t->acts;
    const Root w = root_weights(t), dw = root_gradients(t);
    loss_forward(t, batch);
    cross_entropy_backward(a->logits, a->logits, batch->targets, d->R, d->V, grad_scale,
                           precision_dlogits_dropped(&t->precision), t->rounding);
    head_gemm(t, GEMM_DGRAD, a->dbranch, w.lm_head, a->logits, precision_dlogits_amax(grad_scale));
    head_gemm(t, GEMM_WGRAD, dw.lm_head, a->y_final, a->logits, precision_dlogits_amax(grad_scale));
    rmsnorm_backward_reference(a->dx, dw.norm, NULL, a->dbranch, a->x_final, a->rstd_final, w.norm, d->R, d->C,
                               t->rounding);
}

// Computes the embedding's gradient from acts.dx. If the embedding is tied, adds the gradient to lm_head's, which is
// there already.
static void embedding_backward(Trainer *t, const Batch *batch) {
    embedding_backward_reference(root_gradients(t).embedding, t->acts.dx, batch->inputs, t->d.R, t->d.C, t->d.V,
                                 t->m.tie_word_embeddings, t->rounding);
}

// ---------------------------------------------------------------------------------------------------------------------
// The step

// Computes the gradients of (sum of the rows' losses) * grad_scale and adds those of the shard group to
// params.gradients; the first micro-step replaces these. With --optimizer-in-backward also updates the layers, but not
// the root.
static void model_forward_backward(Trainer *t, const Batch *batch, float grad_scale) {
    model_forward(t, batch);
    loss_forward_backward(t, batch, grad_scale);
    for (int64_t l = t->d.L - 1; l >= 0; l--) {
        unshard(t, l, true);
        layer_backward(t, l);
        reshard(t, l);
        reduce_scatter_gradients(t, l);
        if (t->o->optimizer_in_backward) update_in_backward(t, l);
    }
    embedding_backward(t, batch);
    reduce_scatter_gradients(t, ROOT);
}

// Starts the audit of step `step` (counted from 1) if --fp8-audit is due, else turns it off. Adds this rank's casts of
// weights that are cast ahead, which were made before the step.
static void audit_begin(Trainer *t, int64_t step) {
    t->scales.auditing = is_due(t->o->fp8_audit, step);
    if (!t->scales.auditing) return;
    memset(t->scales.step_audit, 0, (size_t)audit_count(&t->precision) * sizeof(AuditSums));
    for (int64_t i = 0; i < t->d.L * NUM_LINEARS; i++) {
        const int64_t l = i / NUM_LINEARS;
        const int id = (int)(i % NUM_LINEARS);
        if (!cast_ahead(t, l)) continue;
        const ShardRange r = linear_range(t, l, id);
        const float scale_inv = 1.0f / weight_scale(t, l, id);
        AuditSums *sums =
            &t->scales.step_audit[audit_index(l, id, TENSOR_W, ROWWISE)];  // rowwise and columnwise codes are equal
        audit_copy(sums, t->params.weights + r.shard, linear_codes(t, l, r), &scale_inv,
                   usage_shape(1, r.count, ROWWISE), PER_TENSOR, FP8_E4M3);
    }
}

// Reads the sequences of micro-step `micro` of the rank that is `shift` behind this one, in the step that begins with
// first_sample.
static void read_batch(Trainer *t, DataLoader *data, int64_t first_sample, int64_t micro, int64_t shift) {
    const int64_t B = t->o->batch_size, world = t->comm->world;
    const int64_t first = dataloader_sample_index(first_sample, micro, world, (t->comm->rank + shift) % world, B);
    dataloader_whole_batch(data, first, B, &t->batch);
}

// The weight of each row's loss in a step's mean.
static float gradient_scale(const Trainer *t) { return (float)(1.0 / (double)t->units.targets); }

static int64_t host_memory(void) {
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage)) return 0;
    return (int64_t)usage.ru_maxrss * 1024;
}

// Runs the forward and backward pass over t->batch, for micro-step `micro` of optimizer step `step`, both counted from
// 0. Returns the sum of the losses of this rank's rows, divided by their number.
static double micro_step(Trainer *t, float grad_scale, int64_t step, int64_t micro) {
    t->training = true;
    t->units.step = step, t->units.micro = micro;
    model_forward_backward(t, &t->batch, grad_scale);
    t->training = false;
    return array_sum(t->acts.losses, t->d.R) / (double)t->d.R;
}

// ReplayPass.
static void replay_pass(void *trainer, const ReplayedStep *r, int64_t shift, uint64_t *hashes) {
    Trainer *t = (Trainer *)trainer;
    const int64_t micro = t->o->grad_accumulation_steps - 1;
    t->units.replay.hashes = t->units.replay.again = shift != 0;
    if (shift) {
        read_batch(t, r->data, r->first_sample, micro, shift);
        micro_step(t, gradient_scale(t), r->step, micro);
    }
    memcpy(hashes, t->units.replay.values, (size_t)replay_count(&t->table) * sizeof *hashes);
    t->units.replay.hashes = t->units.replay.again = false;
}

// After the last micro-step of a step. With delayed scaling updates the histories of inputs and gradients, with the
// largest amaxes of all micro-steps and ranks.
static void end_micro_steps(Trainer *t) {
    if (!t->precision.recipe->delayed) return;
    comm_max_u32(t->comm, COMM_WORLD, t->scales.amax, t->scales.delayed.tensors);
    histories_update(t, false);
}

// Returns the mean over the step's targets that count, from the losses [micro_steps] of all ranks. Adds them in the
// order of samples.
static double mean_loss(const Trainer *t, const double *losses, int64_t micro_steps) {
    const int64_t world = t->comm->world, count = world * micro_steps;
    double *all = (double *)xcalloc((size_t)count, sizeof *all), sum = 0;
    comm_all_gather(t->comm, COMM_WORLD, losses, all, micro_steps * (int64_t)sizeof *all);
    for (int64_t i = 0; i < count; i++) sum += all[i % world * micro_steps + i / world];
    free(all);
    return sum / ((double)t->units.targets / (double)t->d.R);
}

// Splits the time of a step that began at `start` and whose optimizer began at `optimizer` into its parts. data:
// seconds of reading batches. waited, waited_later: comm_seconds() at `start` and at `optimizer`. Updates in the
// backward pass count as computing.
static StepTimes step_times(double start, double optimizer, double data, double waited, double waited_later) {
    const double now = seconds_now(), waited_now = *comm_seconds();
    StepTimes s;
    s.seconds[TIME_DATA] = data;
    s.seconds[TIME_COMMUNICATION] = waited_now - waited;
    s.seconds[TIME_COMPUTE] = optimizer - start - data - (waited_later - waited);
    s.seconds[TIME_OPTIMIZER] = now - optimizer - (waited_now - waited_later);
    return s;
}

// Takes one optimizer step, on the samples from first_sample on. Skips the update if loss or gradient norm is not
// accepted (adamw_takes); with --optimizer-in-backward some units may have been updated before, and the run ends.
static StepRecord train_step(Trainer *t, DataLoader *data, int64_t step, int64_t first_sample) {
    const double start = seconds_now(), waited = *comm_seconds();
    const int64_t micro_steps = t->o->grad_accumulation_steps;
    const bool in_backward = t->o->optimizer_in_backward;
    double *losses = (double *)xcalloc((size_t)micro_steps, sizeof *losses);
    StepRecord s;
    memset(&s, 0, sizeof s);
    t->units.targets = step_targets(t->o, t->comm, data, step, first_sample);
    double reading = seconds_now() - start;
    t->bad_norm = t->early.large.position = NONFINITE_NONE, t->early.large.magnitude = 0;
    t->early.step = step, t->early.squares = 0;
    copy_delayed_before(t, true);
    audit_begin(t, step + 1);
    for (int64_t micro = 0; micro < micro_steps; micro++) {
        const double before = seconds_now();
        read_batch(t, data, first_sample, micro, 0);
        reading += seconds_now() - before;
        t->units.replay.hashes = micro + 1 == micro_steps && is_due(t->o->replay_every, step + 1);
        losses[micro] = micro_step(t, gradient_scale(t), step, micro);
    }
    const ReplayedStep replayed = {data, first_sample, step};
    if (t->units.replay.hashes) replay_check(t->comm, &t->table, replay_pass, t, &replayed, "CPU");
    end_micro_steps(t);
    if (t->units.fp8_sums) reduce_replicas_of_units(t);
    for (int64_t l = ROOT; l < t->d.L && !t->units.fp8_sums && !in_backward; l++) reduce_replicas(t, l);
    s.loss = mean_loss(t, losses, micro_steps);
    free(losses);
    const double optimizer = seconds_now(), waited_later = *comm_seconds();
    if (in_backward) update_in_backward(t, ROOT);
    s.norm = in_backward ? sqrt(t->early.squares) : gradient_norm(t);
    s.skipped = !adamw_takes(s.loss, s.norm);
    if (s.skipped) copy_delayed_before(t, false);
    else if (in_backward) finish_update(t, step);
    else weights_update(t, step, s.norm);
    s.times = step_times(start, optimizer, reading, waited, waited_later);
    for (int i = 0; i < NUM_STEP_TIMES; i++) s.seconds += s.times.seconds[i];
    s.memory = (int64_t)comm_max(t->comm, COMM_WORLD, (double)host_memory());
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// Validation and samples

static const float *token_losses(void *context, DataLoader *data, int64_t batch) {
    Trainer *t = (Trainer *)context;
    read_batch(t, data, 0, batch, 0);
    model_forward(t, &t->batch);
    loss_forward(t, &t->batch);
    return t->acts.losses;
}

static const float *next_logits(void *context, const int32_t *tokens, int64_t length) {
    Trainer *t = (Trainer *)context;
    const Dims dims = t->d;
    Batch text = t->batch;
    memcpy(text.inputs, tokens, (size_t)length * sizeof *tokens);
    text.documents.starts = text.documents.ends = NULL;  // a sample is one document
    t->d = model_dims(&t->m, 1, length);
    model_forward(t, &text);
    logits_forward(t);
    t->d = dims;
    return t->acts.logits + (length - 1) * t->m.vocab_size;
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints: access to the flat shard arrays in their storage type

static void *state_array(const Trainer *t, StateKind kind) {
    const Params *p = &t->params;
    const bool coat = options_coat(t->o), msamp = t->o->optimizer_state == MOMENTS_MSAMP;
    if (state_is_scale(kind)) return tensor_scale(t, kind, 0);
    if (kind == STATE_EXP_AVG) return coat ? p->coat_avg.codes : msamp ? p->msamp.exp_avg : (void *)p->exp_avg;
    if (kind == STATE_EXP_AVG_SQ)
        return coat ? p->coat_avg_sq.codes : msamp ? (void *)p->msamp.exp_avg_sq : (void *)p->exp_avg_sq;
    if (state_is_groups(kind)) return kind == STATE_EXP_AVG_GROUPS ? p->coat_avg.groups : p->coat_avg_sq.groups;
    if (kind == STATE_AMAX_HISTORY) return t->scales.delayed.history;
    if (kind == STATE_CLIP_NORMS) return t->early.norms;
    if (kind == STATE_GRADIENTS) return p->gradients;
    return kind == STATE_SCALES ? t->scales.delayed.scale : p->master;
}

// Reads `count` FP16 masters of one parameter as fp32 values.
static void masters_read(const Trainer *t, int64_t offset, int64_t count, float *out) {
    const int64_t i = shard_parameter_at(&t->table, &t->plan, offset);
    fp16_weights_decode(out, t->params.fp16_master + offset, *tensor_scale(t, STATE_MASTER_SCALE, i), count);
}

// Reads part of an array in the type that checkpoints have (state_type). Arrays of bf16 values are floats here, and
// FP16 masters have fp32 values in checkpoints. All other arrays have that type here too.
static void state_read(void *context, StateKind kind, int64_t offset, int64_t count, void *host) {
    const Trainer *t = (const Trainer *)context;
    const int64_t bytes = safetensors_type_bytes(state_type(t->o, kind));
    const void *array = state_array(t, kind);
    if (kind == STATE_WEIGHTS && t->params.fp16_master) masters_read(t, offset, count, (float *)host);
    else if (state_type(t->o, kind) != ST_BF16)
        memcpy(host, (const char *)array + offset * bytes, (size_t)(count * bytes));
    else
        for (int64_t i = 0; i < count; i++)
            ((bf16_bits *)host)[i] = bf16_from_float(((const float *)array)[offset + i]);
}

static void state_write(void *context, StateKind kind, int64_t offset, int64_t count, const void *host) {
    const Trainer *t = (const Trainer *)context;
    const int64_t bytes = safetensors_type_bytes(state_type(t->o, kind));
    void *array = state_array(t, kind);
    if (state_type(t->o, kind) != ST_BF16) memcpy((char *)array + offset * bytes, host, (size_t)(count * bytes));
    else
        for (int64_t i = 0; i < count; i++) ((float *)array)[offset + i] = bf16_to_float(((const bf16_bits *)host)[i]);
}

static TrainerState trainer_state(Trainer *t) {
    TrainerState s = {t,
                      {ST_F32},
                      state_read,
                      state_write,
                      NULL,
                      &t->plan,
                      t->comm,
                      t->scales.delayed.tensors,
                      t->scales.delayed.window,
                      options_clips_in_backward(t->o) ? t->d.L + 1 : 0};
    for (int kind = 0; kind < NUM_STATE_KINDS; kind++) s.types[kind] = state_type(t->o, (StateKind)kind);
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

static TrainerParts describe(void *context, const Options *o, const ModelConfig *m, const Comm *comm) {
    Trainer *t = (Trainer *)context;
    const Arena plan = trainer_plan(t, o, m, comm);
    const TrainerParts parts = {&t->table, &t->precision, trainer_state(t), plan, 0, t->d.R, t->d.R};
    return parts;
}

static void print_gemms(const void *context) {
    const Trainer *t = (const Trainer *)context;
    precision_print(&t->precision, t->d.R, t->d.R, t->rounding == ROUND_NONE ? "fp32" : "bf16");
}

static void create(void *context, const Arena *memory) {
    (void)memory;
    trainer_allocate((Trainer *)context);
}

// --check-links: the context of its functions.
typedef struct {
    Trainer *t;
    char *out, *in;  // [bytes] messages of a pair: the one that this rank sends, and the one that it receives
    int64_t bytes;
} Links;

static double time_collective(void *context, LinkCollective c, int64_t runs) {
    Trainer *t = ((const Links *)context)->t;
    const double start = seconds_now();
    for (int64_t i = 0; i < runs; i++) {
        if (c == LINK_REDUCE) reduce_scatter_gradients(t, 0);
        if (c == LINK_REPLICAS) reduce_replicas(t, 0);
        if (c != LINK_GATHER) continue;
        layer_slot(t, 0)->layer = -1;
        unshard(t, 0, false);
    }
    return seconds_now() - start;
}

static double time_pair(void *context, int64_t peer, int64_t runs) {
    const Links *k = (const Links *)context;
    const double start = seconds_now();
    for (int64_t i = 0; i < runs; i++) comm_exchange(k->t->comm, peer, k->out, k->in, k->bytes);
    return seconds_now() - start;
}

static LinkPath path_to(void *context, int64_t peer, bool same_host) {
    (void)peer;
    if (!same_host) return LINK_NETWORK;
    return ((const Links *)context)->t->comm->mesh ? LINK_LOOPBACK : LINK_HOST_MEMORY;
}

static void close_links(void *context) {
    Links *k = (Links *)context;
    free(k->out);
    free(k->in);
    free(k);
}

static LinkOps links(void *context) {
    Links *k = (Links *)xcalloc(1, sizeof *k);
    Trainer *t = k->t = (Trainer *)context;
    const int64_t part = shard_elements(&t->plan, 0), matrices = t->plan.layer_slices[SEGMENT_MATRICES];
    const double whole = (double)t->plan.shard_size * sizeof(float);
    LinkOps ops = {.context = k, .within = t->comm->mesh ? "TCP" : "MPI"};
    ops.across = ops.within;
    ops.collective = time_collective, ops.pair = time_pair, ops.path = path_to, ops.close = close_links;
    if (t->plan.shard_size > 1) {
        ops.bytes[LINK_REDUCE] = (double)part * whole;
        ops.bytes[LINK_GATHER] = (double)(part - (cast_ahead(t, 0) ? matrices : 0)) * whole;
        if (cast_ahead(t, 0)) ops.bytes[LINK_GATHER] += (double)(matrices * t->plan.shard_size);
    }
    if (t->comm->replicas > 1) ops.bytes[LINK_REPLICAS] = (double)part * sizeof(float);
    ops.pair_bytes = k->bytes = max_i64(LINKS_LEAST_BYTES, min_i64(LINKS_MOST_BYTES, part * (int64_t)sizeof(float)));
    k->out = (char *)xcalloc((size_t)k->bytes, 1), k->in = (char *)xcalloc((size_t)k->bytes, 1);
    return ops;
}

static void initialize(void *context) { weights_initialize((Trainer *)context); }

static void weights_changed(void *context) {
    Trainer *t = (Trainer *)context;
    if (t->params.fp16_master) {
        reduce_tensor_amaxes(t, 0, t->table.count);
        masters_encode(t, 0, t->table.count, NULL);
    }
    weights_refresh(t);
}

static void destroy(void *context) { trainer_free((Trainer *)context); }

static DeviceInfo device(const Options *o) {
    DeviceInfo d;
    format_checked(d.name, sizeof d.name, "CPU, %d threads", omp_get_max_threads());
    format_checked(d.versions, sizeof d.versions, "compiler " __VERSION__);
    d.peak_bf16 = o->peak_tflops * 1e12;
    d.pci_bus_id[0] = 0;
    return d;
}

static void start_step(void *context, DataLoader *data, int64_t step, int64_t skipped, int64_t first_sample,
                       bool after_pause) {
    Trainer *t = (Trainer *)context;
    (void)after_pause;
    t->skipped = skipped;
    t->last_step = train_step(t, data, step, first_sample);
}

static StepRecord finish_step(void *context, int64_t step) {
    (void)step;
    return ((const Trainer *)context)->last_step;
}

static NonfiniteStep nonfinite(void *context, const StepRecord *s) {
    return nonfinite_step((const Trainer *)context, s->loss, s->norm);
}

static void read_audit(void *context, AuditSums *sums) {
    const Trainer *t = (const Trainer *)context;
    memcpy(sums, t->scales.step_audit, (size_t)audit_count(&t->precision) * sizeof *sums);
}

static const TrainerOps trainer_ops = {.program = "train_fp8",
                                       .steps_ahead = 0,
                                       .kind = CPU_TRAINER,
                                       .open_device = NULL,
                                       .find_filter = NULL,
                                       .describe = describe,
                                       .memory_needed = memory_needed,
                                       .memory_available = memory_available,
                                       .print_settings = NULL,
                                       .print_gemms = print_gemms,
                                       .create = create,
                                       .links = links,
                                       .initialize = initialize,
                                       .weights_changed = weights_changed,
                                       .device = device,
                                       .start_step = start_step,
                                       .finish_step = finish_step,
                                       .nonfinite = nonfinite,
                                       .read_audit = read_audit,
                                       .token_losses = token_losses,
                                       .next_logits = next_logits,
                                       .settle = NULL,
                                       .print_profile = NULL,
                                       .destroy = destroy};

#ifndef TESTING
int main(int argc, char **argv) {
    static Trainer trainer;
    openmp_give_way();
    return run_trainer(argc, argv, &trainer_ops, &trainer);
}
#endif
