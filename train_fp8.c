// train_fp8: pre-trains Llama and Qwen models on the CPU. The readable reference for train_fp8cu: the same model, the same recipes, and with
// --precision bf16 or fp8 it rounds wherever the GPU rounds (--precision fp32 rounds nowhere).
//
// From top to bottom: sizes and storage, linear layers, the model's forward pass, its backward pass, the optimizer, the step, validation and
// samples, checkpoints, the run. The arithmetic of each operation is in llmc/reference.h.

#include <omp.h>
#include <signal.h>
#include <sys/resource.h>

#include "llmc/arena.h"
#include "llmc/checkpoint.h"
#include "llmc/dataloader.h"
#include "llmc/flops.h"
#include "llmc/initialize.h"
#include "llmc/logger.h"
#include "llmc/options.h"
#include "llmc/parameters.h"
#include "llmc/reference.h"
#include "llmc/run_setup.h"
#include "llmc/sampler.h"
#include "llmc/schedule.h"
#include "llmc/tokenizer.h"

// Skipped steps in a row after which a run with --on-nonfinite skip gives up.
#define MAX_SKIPPED_IN_A_ROW 10

// ---------------------------------------------------------------------------------------------------------------------
// Sizes and storage

typedef struct {
    int64_t B, T, R;      // sequences, tokens each, rows R = B*T
    int64_t V, C, F, L;   // vocabulary, hidden, intermediate, layers
    int64_t NH, NKV, HD;  // query heads, key/value heads, head dimension
    int64_t QKV, ATT;     // columns of the packed q, k, v and of the attention output
} Dims;

// What a layer keeps for its backward pass. With --recompute layer all layers share everything but x.
typedef struct {
    float *x;             // [R, C] residual stream that enters the layer
    float *norm1;         // [R, C] its RMSNorm
    float *rstd1;         // [R]
    float *qkv;           // [R, QKV] as the product leaves it
    float *rotated;       // [R, QKV] after QK-norm and RoPE
    float *att;           // [R, ATT]
    float *lse;           // [B, NH, T]
    float *x_mid;         // [R, C] residual stream between attention and MLP
    float *norm2, *rstd2; // [R, C], [R]
    float *gate_up;       // [R, 2F]
    float *h;             // [R, F] silu(gate) * up
} LayerActs;

typedef struct {
    const Options *o;
    ModelConfig m;
    ParameterTable table;
    Dims d;                       // of the batch; forward() narrows B, T and R for samples
    Rounding rounding;            // of every tensor that is bf16 on the GPU
    bool fp8;
    void *memory;                 // the arena
    int64_t memory_bytes;

    // flat arrays of parameters.h, [total] each; bf16 storage is emulated: floats that hold bf16 values
    float *master;                // what the optimizer updates
    float *weights;               // what the model computes with: master, or its bf16 rounding
    float *gradients;
    float *exp_avg, *exp_avg_sq;

    LayerActs *acts;              // [L + 1]; of the last only x, the final residual stream
    float *branch;                // [R, C] output of attention or MLP before it joins the residual stream
    float *y_final, *rstd_final;  // [R, C], [R] final norm
    float *logits;                // [R, V], overwritten by their gradient
    float *losses;                // [R]
    float *dx;                    // [R, C] gradient of the residual stream
    float *dbranch, *dh, *dgate_up, *datt, *dqkv;  // gradients inside the current layer
    float *cosine, *sine;         // [T, HD/2] of RoPE
    int32_t *inputs, *targets;    // [R]
} Trainer;

static Dims make_dims(const ModelConfig *m, int64_t B, int64_t T) {
    Dims d;
    d.B = B, d.T = T, d.R = B * T;
    d.V = m->vocab_size, d.C = m->hidden_size, d.F = m->intermediate_size, d.L = m->num_layers;
    d.NH = m->num_heads, d.NKV = m->num_kv_heads, d.HD = m->head_dim;
    d.QKV = model_qkv_size(m), d.ATT = d.NH * d.HD;
    return d;
}

static float *take(Arena *a, int64_t n) { return (float *)arena_take(a, n * (int64_t)sizeof(float)); }

static void place_parameters(Trainer *t, Arena *a) {
    const bool copy = t->rounding != ROUND_NONE && t->o->master_weights == STORAGE_FP32;
    arena_group(a, copy ? "weights and fp32 masters" : "weights");
    t->master = take(a, t->table.total);
    t->weights = copy ? take(a, t->table.total) : t->master;
    arena_group(a, "gradients");
    t->gradients = take(a, t->table.total);
    arena_group(a, "optimizer state");
    t->exp_avg = take(a, t->table.total);
    t->exp_avg_sq = take(a, t->table.total);
}

static LayerActs place_layer(const Dims *d, Arena *a) {
    LayerActs acts;
    acts.x = NULL;
    acts.norm1 = take(a, d->R * d->C), acts.rstd1 = take(a, d->R);
    acts.qkv = take(a, d->R * d->QKV), acts.rotated = take(a, d->R * d->QKV);
    acts.att = take(a, d->R * d->ATT), acts.lse = take(a, d->R * d->NH);
    acts.x_mid = take(a, d->R * d->C);
    acts.norm2 = take(a, d->R * d->C), acts.rstd2 = take(a, d->R);
    acts.gate_up = take(a, d->R * 2 * d->F);
    acts.h = take(a, d->R * d->F);
    return acts;
}

static void place_activations(Trainer *t, Arena *a) {
    const Dims *d = &t->d;
    arena_group(a, "activations kept for backward");
    for (int64_t l = 0; l < d->L; l++) t->acts[l] = l && t->o->recompute == RECOMPUTE_LAYER ? t->acts[0] : place_layer(d, a);
    for (int64_t l = 0; l <= d->L; l++) t->acts[l].x = take(a, d->R * d->C);
    t->branch = take(a, d->R * d->C);
    t->y_final = take(a, d->R * d->C), t->rstd_final = take(a, d->R);
    arena_group(a, "logits");
    t->logits = take(a, d->R * d->V);
    arena_group(a, "gradients of activations");
    t->dx = take(a, d->R * d->C), t->dbranch = take(a, d->R * d->C);
    t->dh = take(a, d->R * d->F), t->dgate_up = take(a, d->R * 2 * d->F);
    t->datt = take(a, d->R * d->ATT), t->dqkv = take(a, d->R * d->QKV);
    arena_group(a, "tokens, losses, RoPE table");
    t->losses = take(a, d->R);
    t->inputs = (int32_t *)arena_take(a, d->R * (int64_t)sizeof(int32_t)), t->targets = (int32_t *)arena_take(a, d->R * (int64_t)sizeof(int32_t));
    t->cosine = take(a, d->T * d->HD / 2), t->sine = take(a, d->T * d->HD / 2);
}

// Lays out everything on an arena without memory: the memory plan. trainer_allocate then gives each pointer its place.
static Arena trainer_plan(Trainer *t, const Options *o, const ModelConfig *m) {
    memset(t, 0, sizeof *t);
    t->o = o, t->m = *m;
    t->table = parameter_table(m);
    t->d = make_dims(m, o->batch_size, o->sequence_length);
    t->rounding = o->precision == PRECISION_FP32 ? ROUND_NONE : ROUND_BF16;
    t->fp8 = o->precision == PRECISION_FP8;
    t->acts = (LayerActs *)xcalloc((size_t)(t->d.L + 1), sizeof(LayerActs));
    Arena plan;
    memset(&plan, 0, sizeof plan);
    place_parameters(t, &plan);
    place_activations(t, &plan);
    t->memory_bytes = plan.used;
    return plan;
}

static void trainer_allocate(Trainer *t) {
    const int64_t available = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    if (t->memory_bytes > available)
        die("this run needs %.1f GiB and the machine has %.1f GiB; a smaller --batch-size or --sequence-length, --recompute layer or a smaller model would help",
            (double)t->memory_bytes / 1073741824.0, (double)available / 1073741824.0);
    Arena a;
    memset(&a, 0, sizeof a);
    a.base = (char *)(t->memory = xcalloc((size_t)t->memory_bytes, 1));
    place_parameters(t, &a);
    place_activations(t, &a);
    rope_tables(t->cosine, t->sine, &t->m, t->d.T);
}

static void trainer_free(Trainer *t) {
    parameter_table_free(&t->table);
    free(t->acts);
    free(t->memory);
    memset(t, 0, sizeof *t);
}

// ---------------------------------------------------------------------------------------------------------------------
// The weights of one layer, and its linear layers

// Views of one layer in `weights` or in `gradients`. The fused products read neighbours as one matrix.
typedef struct {
    float *norm1, *norm2;    // [C]
    float *wqkv, *bqkv;      // [QKV, C]; [QKV] or NULL
    float *q_norm, *k_norm;  // [HD] or NULL
    float *wo;               // [C, ATT]
    float *wgate_up;         // [2F, C]
    float *wdown;            // [C, F]
} Block;

static Block block(const Trainer *t, float *flat, int64_t l) {
    float *unit = flat + layer_offset(&t->table, l);
    const LayerOffsets *at = &t->table.layer;
    Block b;
    b.norm1 = unit + at->norm1, b.norm2 = unit + at->norm2;
    b.wqkv = unit + at->wq, b.bqkv = t->m.qkv_bias ? unit + at->bq : NULL;
    b.q_norm = t->m.qk_norm ? unit + at->q_norm : NULL, b.k_norm = t->m.qk_norm ? unit + at->k_norm : NULL;
    b.wo = unit + at->wo, b.wgate_up = unit + at->wgate, b.wdown = unit + at->wdown;
    return b;
}

static float *lm_head(const Trainer *t, float *flat) { return flat + (t->m.tie_word_embeddings ? t->table.root.embedding : t->table.root.lm_head); }

// y [R, out] = x [R, in] w^T + bias, in the precision of the run.
static void linear(const Trainer *t, float *y, const float *x, const float *w, const float *bias, int64_t in, int64_t out) {
    if (t->fp8) linear_forward_fp8(y, x, w, bias, t->d.R, in, out, t->rounding);
    else linear_forward(y, x, w, bias, t->d.R, in, out, t->rounding);
}

// dx and dw from dy [R, out].
static void linear_backward(const Trainer *t, float *dx, float *dw, const float *dy, const float *x, const float *w, int64_t in, int64_t out, bool accumulate) {
    if (t->fp8) {
        linear_backward_input_fp8(dx, dy, w, t->d.R, in, out, t->rounding);
        linear_backward_weight_fp8(dw, dy, x, t->d.R, in, out, accumulate, t->rounding);
    } else {
        linear_backward_input(dx, dy, w, t->d.R, in, out, t->rounding);
        linear_backward_weight(dw, dy, x, t->d.R, in, out, accumulate, t->rounding);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

static AttentionDims attention_dims(const Trainer *t) {
    AttentionDims a = {t->d.B, t->d.T, t->d.NH, t->d.NKV, t->d.HD, true};
    return a;
}

static RopeArgs rope_args(const Trainer *t, const Block *w) {
    RopeArgs r = {w->q_norm, w->k_norm, t->m.rms_norm_eps, t->cosine, t->sine};
    return r;
}

// From acts[l].x to acts[l + 1].x.
static void layer_forward(Trainer *t, int64_t l) {
    const Dims *d = &t->d;
    const Block w = block(t, t->weights, l);
    const double eps = t->m.rms_norm_eps;
    const Rounding r = t->rounding;
    LayerActs *a = &t->acts[l];

    rmsnorm_forward(a->norm1, a->rstd1, a->x, w.norm1, d->R, d->C, eps, r);
    linear(t, a->qkv, a->norm1, w.wqkv, w.bqkv, d->C, d->QKV);
    qknorm_rope_forward(a->rotated, a->qkv, rope_args(t, &w), attention_dims(t), r);
    attention_forward(a->att, a->lse, a->rotated, attention_dims(t), r);
    linear(t, t->branch, a->att, w.wo, NULL, d->ATT, d->C);
    residual_add(a->x_mid, a->x, t->branch, d->R * d->C, r);

    rmsnorm_forward(a->norm2, a->rstd2, a->x_mid, w.norm2, d->R, d->C, eps, r);
    linear(t, a->gate_up, a->norm2, w.wgate_up, NULL, d->C, 2 * d->F);
    swiglu_forward(a->h, a->gate_up, d->R, d->F, r);
    linear(t, t->branch, a->h, w.wdown, NULL, d->F, d->C);
    residual_add(t->acts[l + 1].x, a->x_mid, t->branch, d->R * d->C, r);
}

// Logits [R, V] of B sequences of T tokens; B and T are at most the run's.
static void model_forward(Trainer *t, const int32_t *tokens, int64_t B, int64_t T) {
    t->d = make_dims(&t->m, B, T);
    const Dims *d = &t->d;
    embedding_forward(t->acts[0].x, t->weights + t->table.root.embedding, tokens, d->R, d->C);
    for (int64_t l = 0; l < d->L; l++) layer_forward(t, l);
    rmsnorm_forward(t->y_final, t->rstd_final, t->acts[d->L].x, t->weights + t->table.root.norm, d->R, d->C, t->m.rms_norm_eps, t->rounding);
    linear_forward(t->logits, t->y_final, lm_head(t, t->weights), NULL, d->R, d->C, d->V, t->rounding);
}

// Mean cross-entropy of the logits.
static double model_loss(Trainer *t, const int32_t *targets) {
    cross_entropy_forward(t->losses, t->logits, targets, t->d.R, t->d.V);
    return array_sum(t->losses, t->d.R) / (double)t->d.R;
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// t->dx: from the gradient of the layer's output to that of its input. Gradients of weights go to t->gradients.
static void layer_backward(Trainer *t, int64_t l, bool accumulate) {
    const Dims *d = &t->d;
    const Block w = block(t, t->weights, l), dw = block(t, t->gradients, l);
    const Rounding r = t->rounding;
    LayerActs *a = &t->acts[l];
    if (t->o->recompute == RECOMPUTE_LAYER) layer_forward(t, l);  // the shared activations hold another layer's

    linear_backward(t, t->dh, dw.wdown, t->dx, a->h, w.wdown, d->F, d->C, accumulate);
    swiglu_backward(t->dgate_up, t->dh, a->gate_up, d->R, d->F, r);
    linear_backward(t, t->dbranch, dw.wgate_up, t->dgate_up, a->norm2, w.wgate_up, d->C, 2 * d->F, accumulate);
    rmsnorm_backward(t->dx, dw.norm2, t->dx, t->dbranch, a->x_mid, a->rstd2, w.norm2, d->R, d->C, accumulate, r);

    linear_backward(t, t->datt, dw.wo, t->dx, a->att, w.wo, d->ATT, d->C, accumulate);
    attention_backward(t->dqkv, t->datt, a->rotated, a->att, a->lse, attention_dims(t), r);
    qknorm_rope_backward(t->dqkv, dw.q_norm, dw.k_norm, t->dqkv, a->qkv, rope_args(t, &w), attention_dims(t), accumulate, r);
    if (dw.bqkv) bias_backward(dw.bqkv, t->dqkv, d->R, d->QKV, accumulate, r);
    linear_backward(t, t->dbranch, dw.wqkv, t->dqkv, a->norm1, w.wqkv, d->C, d->QKV, accumulate);
    rmsnorm_backward(t->dx, dw.norm1, t->dx, t->dbranch, a->x, a->rstd1, w.norm1, d->R, d->C, accumulate, r);
}

// After model_forward on the same tokens: gradients of (sum of the rows' losses) * grad_scale replace t->gradients, or join it when `accumulate`.
static void model_backward(Trainer *t, const int32_t *tokens, const int32_t *targets, float grad_scale, bool accumulate) {
    const Dims *d = &t->d;
    const Rounding r = t->rounding;
    cross_entropy_backward(t->logits, t->logits, targets, d->R, d->V, grad_scale, r);
    linear_backward_input(t->dbranch, t->logits, lm_head(t, t->weights), d->R, d->C, d->V, r);
    linear_backward_weight(lm_head(t, t->gradients), t->logits, t->y_final, d->R, d->C, d->V, accumulate, r);
    rmsnorm_backward(t->dx, t->gradients + t->table.root.norm, NULL, t->dbranch, t->acts[d->L].x, t->rstd_final, t->weights + t->table.root.norm, d->R, d->C,
                     accumulate, r);
    for (int64_t l = d->L - 1; l >= 0; l--) layer_backward(t, l, accumulate);
    // a tied embedding's gradient already holds lm_head's
    embedding_backward(t->gradients + t->table.root.embedding, t->dx, tokens, d->R, d->C, d->V, accumulate || t->m.tie_word_embeddings, r);
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights and optimizer

// After the masters changed.
static void weights_refresh(Trainer *t) {
    if (t->weights == t->master) return;
    memcpy(t->weights, t->master, (size_t)t->table.total * sizeof(float));
    round_array(t->weights, t->table.total, t->rounding);
}

static void weights_initialize(Trainer *t) {
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        float *w = t->master + p->offset;
        for (int64_t e = 0; e < parameter_elements(p); e++) w[e] = parameter_initial_value(p->flags, (float)t->m.initializer_range, (uint64_t)t->o->seed, i, e);
        if (t->o->master_weights != STORAGE_FP32) round_array(w, parameter_elements(p), ROUND_BF16);
    }
    weights_refresh(t);
}

// Optimizer step `step` (counted from 0) with the gradients in t->gradients, whose norm is given.
static void weights_update(Trainer *t, int64_t step, double norm) {
    const Options *o = t->o;
    const AdamwStep s = adamw_step(step + 1, schedule_learning_rate(o, step), o->beta1, o->beta2, o->eps, o->weight_decay, o->master_weights == STORAGE_BF16_NEAREST,
                                     (uint64_t)o->seed);
    const float factor = clip_factor(norm, o->grad_clip);
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        const int64_t at = p->offset;
        adamw_reference(t->master + at, t->exp_avg + at, t->exp_avg_sq + at, t->gradients + at, at, parameter_elements(p), p->flags & PARAM_DECAY, factor,
                        o->master_weights != STORAGE_FP32, o->optimizer_state == STORAGE_BF16, &s);
    }
    weights_refresh(t);
}

static bool gradient_is_finite(const Trainer *t, const Parameter *p) {
    for (int64_t e = 0; e < parameter_elements(p); e++)
        if (!isfinite(t->gradients[p->offset + e])) return false;
    return true;
}

// The first tensor, in the order in which the backward pass makes them, whose gradient holds a value that is not finite: what follows from it
// is bad too. That is the final norm and lm_head, then the layers from the last to the first, then the embedding. NULL: none.
static const Parameter *first_nonfinite(const Trainer *t) {
    for (int64_t l = t->d.L; l >= -1; l--)
        for (int64_t i = t->table.count - 1; i >= 0; i--) {
            const Parameter *p = &t->table.entries[i];
            const bool embedding = p->layer < 0 && p->offset == t->table.root.embedding;
            const int64_t turn = embedding ? -1 : p->layer < 0 ? t->d.L : p->layer;
            if (turn == l && !gradient_is_finite(t, p)) return p;
        }
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// The step

// The norm of this step's gradients was not finite, and the weights are as before. Says where; ends the run if the options say so.
static void report_nonfinite(const Trainer *t, int64_t step, double loss, int64_t skipped_in_a_row) {
    const Parameter *p = first_nonfinite(t);
    char place[256] = "the sum of squares overflowed", layer[32] = "";
    if (p && p->layer >= 0) format_checked(layer, sizeof layer, " (layer %lld)", (long long)p->layer);
    if (p) format_checked(place, sizeof place, "first, in backward order, in %s%s; the loss is %g", p->name, layer, loss);
    if (t->o->on_nonfinite == NONFINITE_STOP)
        die("step %lld: the gradient norm is not finite, %s. The weights are those of step %lld. A smaller --learning-rate, --grad-clip 1 or more --warmup-steps "
            "may help; --on-nonfinite skip leaves such steps out", (long long)step + 1, place, (long long)step);
    if (skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW)
        die("step %lld: %lld steps in a row had a gradient norm that is not finite, now %s. The weights are those before them. A smaller --learning-rate may help",
            (long long)step + 1, (long long)skipped_in_a_row, place);
    warn("step %lld skipped: the gradient norm is not finite, %s", (long long)step + 1, place);
}

static int64_t host_memory(void) {
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage)) return 0;
    return (int64_t)usage.ru_maxrss * 1024;
}

// One optimizer step on the samples from progress->samples on. *skipped_in_a_row counts steps whose gradient was not finite.
static StepRecord train_step(Trainer *t, DataLoader *data, TrainerProgress *progress, int64_t *skipped_in_a_row) {
    const double start = seconds_now();
    const int64_t B = t->o->batch_size, T = t->o->sequence_length, micro_steps = t->o->grad_accumulation_steps;
    const float grad_scale = (float)(1.0 / (double)(B * T * micro_steps));
    StepRecord s;
    memset(&s, 0, sizeof s);
    for (int64_t micro = 0; micro < micro_steps; micro++) {
        dataloader_batch(data, progress->samples + micro * B, B, t->inputs, t->targets);
        model_forward(t, t->inputs, B, T);
        s.loss += model_loss(t, t->targets) / (double)micro_steps;
        model_backward(t, t->inputs, t->targets, grad_scale, micro > 0);
    }
    s.norm = global_norm(t->gradients, t->table.total);
    s.skipped = !isfinite(s.norm);
    *skipped_in_a_row = s.skipped ? *skipped_in_a_row + 1 : 0;
    if (s.skipped) report_nonfinite(t, progress->step, s.loss, *skipped_in_a_row);
    else weights_update(t, progress->step, s.norm);
    s.learning_rate = schedule_learning_rate(t->o, progress->step);
    s.step = ++progress->step;
    progress->samples += B * micro_steps;
    s.seconds = seconds_now() - start;
    s.memory = host_memory();
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// Validation and samples

// A request to stop, from SIGTERM, SIGINT or SIGUSR1: the step in progress is finished, then the run saves and ends.
static volatile sig_atomic_t stop_signal;

static void handle_stop(int signal_number) { stop_signal = signal_number; }

// Mean loss of the first --val-steps batches of the validation data. NAN if a stop was requested meanwhile.
static double validate(Trainer *t, DataLoader *data) {
    const int64_t B = t->o->batch_size, batches = max_i64(1, min_i64(t->o->val_steps, data->num_sequences / B));
    double loss = 0;
    for (int64_t i = 0; i < batches; i++) {
        if (stop_signal) return (double)NAN;
        dataloader_batch(data, i * B, B, t->inputs, t->targets);
        model_forward(t, t->inputs, B, t->o->sequence_length);
        loss += model_loss(t, t->targets) / (double)batches;
    }
    return loss;
}

// Prints --sample-tokens tokens that the model writes after the separator. No key/value cache: each token runs the whole forward pass over
// the last --sequence-length tokens.
static void print_sample(Trainer *t, const Tokenizer *tokenizer, int64_t step) {
    const int64_t count = t->o->sample_tokens, V = t->m.vocab_size, choices = tokenizer->count ? min_i64(tokenizer->count, V) : V;
    const int64_t separator = tokenizer->count ? tokenizer->separator : t->m.bos_token_id;
    int32_t *tokens = (int32_t *)xcalloc((size_t)count + 1, sizeof(int32_t));
    tokens[0] = (int32_t)max_i64(0, separator);
    printf("sample after step %lld: ", (long long)step);
    for (int64_t n = 1; n <= count && !stop_signal; n++) {
        const int64_t length = min_i64(n, t->o->sequence_length);
        model_forward(t, tokens + n - length, 1, length);
        tokens[n] = sampler_choose(t->logits + (length - 1) * V, choices, (uint64_t)t->o->seed, step, n);
        if (tokens[n] == separator) break;
        tokenizer_print(tokenizer, tokens[n], stdout);
    }
    printf("\n");
    fflush(stdout);
    free(tokens);
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints: access to the flat arrays in their storage type

static float *state_array(const Trainer *t, StateKind kind) { return kind == STATE_WEIGHTS ? t->master : kind == STATE_EXP_AVG ? t->exp_avg : t->exp_avg_sq; }

static bool state_is_fp32(const Trainer *t, StateKind kind) {
    return (kind == STATE_WEIGHTS ? t->o->master_weights : t->o->optimizer_state) == STORAGE_FP32;
}

static void state_read(void *context, StateKind kind, int64_t offset, int64_t count, void *host) {
    const Trainer *t = (const Trainer *)context;
    const float *from = state_array(t, kind) + offset;
    if (state_is_fp32(t, kind)) memcpy(host, from, (size_t)count * sizeof(float));
    else
        for (int64_t i = 0; i < count; i++) ((bf16_bits *)host)[i] = bf16_from_float(from[i]);
}

static void state_write(void *context, StateKind kind, int64_t offset, int64_t count, const void *host) {
    const Trainer *t = (const Trainer *)context;
    float *to = state_array(t, kind) + offset;
    if (state_is_fp32(t, kind)) memcpy(to, host, (size_t)count * sizeof(float));
    else
        for (int64_t i = 0; i < count; i++) to[i] = bf16_to_float(((const bf16_bits *)host)[i]);
}

static TrainerState trainer_state(Trainer *t) {
    TrainerState s = {t, {state_is_fp32(t, STATE_WEIGHTS), state_is_fp32(t, STATE_EXP_AVG), state_is_fp32(t, STATE_EXP_AVG_SQ)}, state_read, state_write};
    return s;
}

static void save_checkpoint(Trainer *t, const TrainerProgress *progress) {
    Failure failure;
    const TrainerState state = trainer_state(t);
    if (!checkpoint_save(t->o->checkpoint_dir, t->o->keep_checkpoints, progress, &t->m, t->o, &t->table, &state, &failure)) die("%s", failure.text);
    printf("saved checkpoint after step %lld in %s\n", (long long)progress->step, t->o->checkpoint_dir);
}

// Weights and progress to start from: the newest checkpoint, a model folder's weights, or random ones.
static TrainerProgress load_weights(Trainer *t, const RunSetup *setup) {
    TrainerProgress progress = {0, 0};
    const TrainerState state = trainer_state(t);
    char path[PATH_CAPACITY];
    if (t->o->resume && checkpoint_find_newest(t->o->checkpoint_dir, path, sizeof path)) progress = checkpoint_load(path, &t->m, t->o, &t->table, &state);
    else if (setup->load_weights) model_load_weights(setup->model_folder, &t->m, &t->table, &state);
    else weights_initialize(t);
    weights_refresh(t);
    return progress;
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

static void print_products(const Trainer *t) {
    const Dims *d = &t->d;
    const struct { const char *name; int64_t in, out; bool fp8; } products[] = {
        {"qkv", d->C, d->QKV, t->fp8}, {"attn_out", d->ATT, d->C, t->fp8}, {"gate_up", d->C, 2 * d->F, t->fp8}, {"down", d->F, d->C, t->fp8}, {"lm_head", d->C, d->V, false}};
    const char *plain = t->rounding == ROUND_NONE ? "fp32" : "bf16";
    printf("\nmatrix products (fp32 accumulation, %s results)\n  %-10s %9s %9s %9s  %-18s %-18s %s\n", plain, "layer", "rows", "in", "out", "forward x, w", "backward dy",
           "scales");
    for (size_t i = 0; i < sizeof products / sizeof products[0]; i++)
        printf("  %-10s %9lld %9lld %9lld  %-18s %-18s %s\n", products[i].name, (long long)d->R, (long long)products[i].in, (long long)products[i].out,
               products[i].fp8 ? "e4m3" : plain, products[i].fp8 ? "e5m2" : plain, products[i].fp8 ? "tensorwise, current" : "none");
}

static void print_plan(const Trainer *t, const Arena *plan, const RunSetup *setup) {
    options_print(t->o);
    printf("%-26s %.3f million\n", "parameters", (double)t->table.num_parameters * 1e-6);
    printf("%-26s %lld\n", "vocabulary", (long long)t->m.vocab_size);
    if (setup->train.num_shards)
        printf("%-26s %lld tokens, %lld sequences in %lld shards\n", "training data", (long long)setup->train.num_tokens, (long long)setup->train.num_sequences,
               (long long)setup->train.num_shards);
    arena_print_plan(plan, 0);
    print_products(t);
    printf("\n");
    fflush(stdout);
}

// Steps, validations, samples and checkpoints until --num-steps or a stop signal.
static void train(Trainer *t, RunSetup *setup, Logger *log, TrainerProgress *progress) {
    const Options *o = t->o;
    int64_t skipped_in_a_row = 0;
    while (progress->step < o->num_steps && !stop_signal) {
        const StepRecord s = train_step(t, &setup->train, progress, &skipped_in_a_row);
        logger_step(log, &s);
        const bool last = s.step == o->num_steps;
        if (*o->val_data && (last || (o->val_every && s.step % o->val_every == 0))) {
            const double loss = validate(t, &setup->val);
            if (!stop_signal) logger_validation(log, s.step, loss);
        }
        if (o->sample_every && (last || s.step % o->sample_every == 0)) print_sample(t, &setup->tokenizer, s.step);
        if (*o->checkpoint_dir && (last || stop_signal || (o->checkpoint_every && s.step % o->checkpoint_every == 0))) save_checkpoint(t, progress);
    }
}

static void watch_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handle_stop;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGTERM, &action, NULL) || sigaction(SIGINT, &action, NULL) || sigaction(SIGUSR1, &action, NULL))
        die("cannot install signal handlers: %s", strerror(errno));
}

static void export_weights(Trainer *t, const RunSetup *setup) {
    Failure failure;
    const TrainerState state = trainer_state(t);
    if (!model_export_hf(t->o->export_hf, &t->m, &t->table, &state, setup->model_folder, &failure)) die("%s", failure.text);
    printf("exported the weights to %s\n", t->o->export_hf);
}

static int run(int argc, char **argv) {
    char presets[1024], device[64];
    model_config_preset_names(presets, sizeof presets);
    Options o = options_parse(argc, argv, presets);
    RunSetup setup = run_setup(&o);
    Trainer t;
    const Arena plan = trainer_plan(&t, &o, &setup.model);
    print_plan(&t, &plan, &setup);
    if (!o.dry_run) {
        trainer_allocate(&t);
        watch_signals();
        TrainerProgress progress = load_weights(&t, &setup);
        format_checked(device, sizeof device, "CPU, %d threads", omp_get_max_threads());
        const RunInfo info = {"train_fp8", device, "compiler " __VERSION__, 1, o.peak_tflops * 1e12};
        Logger log = logger_open(&o, &t.m, &t.table, info);
        train(&t, &setup, &log, &progress);
        logger_close(&log);
        if (stop_signal) printf("stopped by signal %d after step %lld; %s\n", (int)stop_signal, (long long)progress.step, *o.checkpoint_dir ? "--resume continues" : "without --checkpoint-dir nothing was saved");
        else if (*o.export_hf) export_weights(&t, &setup);
    }
    run_setup_close(&setup);
    trainer_free(&t);
    return EXIT_SUCCESS;
}

#ifndef TESTING
int main(int argc, char **argv) { return run(argc, argv); }
#endif
