// Tests the whole CPU trainer: against goldens of transformers, against itself (threads, accumulation, recompute,
// resume), with values that are not finite, with signals, and with input that it refuses. Run this test from the root
// of the repository. To run a whole training, the test starts its own executable with "--run", because libgomp does not
// survive a fork.
#define TESTING
#include "../../llmc/reference/cross_entropy.h"
static bool spoil_loss;  // true: the loss becomes NaN, its gradient does not
static void spoiled_cross_entropy(float *losses, const float *logits, const int32_t *targets, int64_t R, int64_t V) {
    cross_entropy_forward(losses, logits, targets, R, V);
    if (spoil_loss) losses[R / 2] = NAN;
}
#define cross_entropy_forward spoiled_cross_entropy
#include "../../train_fp8.c"

#include <libgen.h>

#include "lib/check.h"
#include "lib/golden.h"
#include "lib/linear_gemms.h"
#include "lib/scratch.h"

static char goldens_folder[PATH_CAPACITY];

// ---- Goldens.

// Returns options for B sequences of T tokens.
static Options small_options(int precision, int64_t B, int64_t T) {
    Options o = options_default();
    o.model = "test", o.precision = precision, o.batch_size = B, o.sequence_length = T;
    o.learning_rate = 1e-3;
    options_resolve(&o);
    return o;
}

static void trainer_create(Trainer *t, const Options *o, const ModelConfig *m) {
    static Comm one;  // static, because the trainer keeps its address
    one = comm_one();
    trainer_plan(t, o, m, &one);
    trainer_allocate(t);
}

static void load_golden_weights(Trainer *t, const Golden *g) {
    for (int64_t i = 0; i < t->table.count; i++) {
        int64_t n;
        float *values = golden_values(g, "param.", t->table.entries[i].name, &n);
        if (n != parameter_elements(&t->table.entries[i])) die("golden of another shape: %s", t->table.entries[i].name);
        memcpy(t->params.master + t->table.entries[i].offset, values, (size_t)n * sizeof(float));
        free(values);
    }
    weights_refresh(t);
}

// Makes a trainer with random weights, as in a run that loads none.
static void trainer_begin(Trainer *t, const Options *o, const ModelConfig *m) {
    trainer_create(t, o, m);
    weights_initialize(t);
    weights_refresh(t);
}

// Returns the largest relative error of a tensor of `array` against golden `prefix`. *worst is that tensor's name.
static double worst_tensor(const Trainer *t, const Golden *g, const char *prefix, const float *array,
                           const char **worst) {
    double largest = -1;
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        float *expected = golden_values(g, prefix, p->name, NULL);
        const double error = check_relative_error(array + p->offset, expected, parameter_elements(p));
        free(expected);
        if (check_is_worse(error, largest)) largest = error, *worst = p->name;
    }
    return largest;
}

// Returns the mean loss of the trainer's batch, as in validation.
static double batch_loss(Trainer *t) {
    model_forward(t, &t->batch);
    loss_forward(t, &t->batch);
    return array_sum(t->acts.losses, t->d.R) / (double)t->d.R;
}

typedef struct {
    double loss, logits, gradients, weights;  // largest relative error accepted; weights 0: not compared
} Tolerances;

static void test_golden(const char *name, int precision, Tolerances tolerance) {
    const char *precision_name = precision == PRECISION_FP32   ? "fp32"
                                 : precision == PRECISION_BF16 ? "bf16"
                                                               : "fp8",
               *worst = "";
    Golden g = golden_open(goldens_folder, scratch, name);
    const int64_t B = g.B, T = g.T;
    const double loss = golden_number(&g, "loss"), norm = golden_number(&g, "grad_norm");
    float *logits = golden_values(&g, "", "logits", NULL);
    Options o = small_options(precision, B, T);
    Trainer t;
    trainer_create(&t, &o, &g.m);
    load_golden_weights(&t, &g);
    golden_batch(&g, t.batch.inputs, t.batch.targets);
    for (int64_t step = 0; step < (tolerance.weights > 0 ? 3 : 1); step++) {
        if (step == 0) {
            const double loss_error = fabs(batch_loss(&t) / loss - 1),
                         error = check_relative_error(t.acts.logits, logits, t.d.R * t.d.V);
            CHECK(error < tolerance.logits, "%s %s: logits agree with transformers'; relative error %g", name,
                  precision_name, error);
            CHECK(loss_error < tolerance.loss, "%s %s: the loss agrees with transformers'; relative error %g", name,
                  precision_name, loss_error);
            printf("%-12s %s, relative errors: loss %.2e, logits %.2e", name, precision_name, loss_error, error);
        }
        model_forward_backward(&t, &t.batch, (float)(1.0 / (double)(B * T)));
        if (step == 0) {
            const double error = worst_tensor(&t, &g, "grad.", t.params.gradients, &worst),
                         norm_error = fabs(sqrt(squares_sum(t.params.gradients, t.table.total)) / norm - 1);
            CHECK(error < tolerance.gradients,
                  "%s %s: all gradients agree with transformers'; the worst is %s with relative error %g", name,
                  precision_name, worst, error);
            CHECK(norm_error < tolerance.gradients,
                  "%s %s: the gradient norm agrees with transformers'; relative error %g", name, precision_name,
                  norm_error);
            printf(", gradients %.2e (%s)", error, worst);
        }
        if (tolerance.weights > 0) weights_update(&t, step, sqrt(squares_sum(t.params.gradients, t.table.total)));
    }
    if (tolerance.weights > 0) {
        const double error = worst_tensor(&t, &g, "after3.", t.params.master, &worst);
        CHECK(error < tolerance.weights,
              "%s %s: all weights agree with transformers'; the worst is %s with relative error %g after 3 steps", name,
              precision_name, worst, error);
        printf(", weights after 3 steps %.2e (%s)", error, worst);
    }
    printf("\n");
    trainer_free(&t);
    golden_close(&g);
    free(logits);
}

static void test_goldens(void) {
    static const char *const names[] = {"llama_tiny", "llama31_tiny", "qwen2_tiny", "qwen3_tiny"};
    // fp32: only the order of sums differs. bf16: some ten times, values are rounded to 8 significant bits, which has
    // an rms error of 0.2%. fp8: operands of two layers are rounded to 4 significant bits (E4M3: up to 6% per value,
    // 2-3% rms) or to 3 (E5M2: up to 12%, 5-6% rms).
    const Tolerances fp32 = {1e-5, 1e-5, 1e-4, 1e-5};
    const Tolerances bf16 = {1e-2, 2e-2, 3e-2, 0};
    const Tolerances fp8 = {3e-2, 1e-1, 2.5e-1, 0};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        test_golden(names[i], PRECISION_FP32, fp32);
        test_golden(names[i], PRECISION_BF16, bf16);
        test_golden(names[i], PRECISION_FP8, fp8);
    }
}

// ---- Parts of the trainer without goldens: against itself, against plain code, and with special values.

static ModelConfig odd_model(ModelFamily family) {
    ModelConfig m;
    model_config_preset(&m, "tiny");
    m.family = family, m.qk_norm = family == FAMILY_QWEN3, m.qkv_bias = family == FAMILY_QWEN2;
    m.vocab_size = 37, m.hidden_size = 20, m.intermediate_size = 28, m.num_layers = 2;
    m.num_heads = 6, m.num_kv_heads = 2, m.head_dim = 6;
    m.initializer_range = 0.3;
    m.tie_word_embeddings = family != FAMILY_QWEN2;
    return m;
}

static void fill_tokens(Trainer *t, uint64_t key) {
    for (int64_t i = 0; i < t->d.R; i++) {
        t->batch.inputs[i] = (int32_t)(rng_u64(key, (uint64_t)i) % (uint64_t)t->m.vocab_size);
        t->batch.targets[i] = (int32_t)(rng_u64(key, (uint64_t)i + 1) % (uint64_t)t->m.vocab_size);
    }
}

// Moving the weights by a distance h along their gradient changes the loss by h times the gradient's norm. Tests odd
// sizes, every model family, T = 1 and T above QUERY_BLOCK (attention.h).
static void test_slope(ModelFamily family, int64_t B, int64_t T) {
    Options o = small_options(PRECISION_FP32, B, T);
    ModelConfig m = odd_model(family);
    Trainer t;
    trainer_begin(&t, &o, &m);
    fill_tokens(&t, 5);
    model_forward_backward(&t, &t.batch, (float)(1.0 / (double)(B * T)));
    const double norm = sqrt(squares_sum(t.params.gradients, t.table.total)), h = 2e-3;
    float *start = (float *)xcalloc((size_t)t.table.total, sizeof(float));
    memcpy(start, t.params.master, (size_t)t.table.total * sizeof(float));
    double loss[2];
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < t.table.total; i++)
            t.params.master[i] = (float)(start[i] + (side ? h : -h) * t.params.gradients[i] / norm);
        loss[side] = batch_loss(&t);
    }
    const double slope = (loss[1] - loss[0]) / (2 * h);
    // Losses of about 4 in fp32 are off by 5e-7, so the slope is off by 5e-7 / 2h, about 1e-4. The third derivative of
    // the loss adds an error of order h^2.
    CHECK(fabs(slope / norm - 1) < 2e-3, "family %d, B %lld, T %lld: the slope of the loss is %g, the gradient norm %g",
          (int)family, (long long)B, (long long)T, slope, norm);
    free(start);
    trainer_free(&t);
}

// Runs forward and backward of `t` on tokens [from, from + R) of a packed text. grad_scale is that of the whole text.
static void run_documents(Trainer *t, const int32_t *tokens, int64_t separator, float grad_scale) {
    for (int64_t i = 0; i < t->d.R; i++) {
        t->batch.inputs[i] = tokens[i];
        t->batch.targets[i] = tokens[i] % 36 + 1;
    }
    if (t->batch.documents.starts) documents_find(t->batch.documents, t->batch.inputs, t->d.B, t->d.T, separator);
    model_forward_backward(t, &t->batch, grad_scale);
}

// With --document-mask each document of a packed batch has the losses and input gradients that it has alone, bit for
// bit, in fp32. Weight gradients are sums over all rows, which have another order. The lengths: one token, fewer than
// QUERY_BLOCK queries, as many, and more; the second sequence goes on within a document.
static void test_documents(ModelFamily family, int recompute) {
    enum { B = 2, T = 300, SEPARATOR = 5, DOCUMENTS = 9 };
    static const int64_t lengths[DOCUMENTS] = {1, 150, 64, 85, 30, 1, 1, 65, 203};
    int32_t tokens[B * T];
    Options o = small_options(PRECISION_FP32, B, T), one = o;
    ModelConfig m = odd_model(family);
    const float grad_scale = 1.0f / (B * T);
    Trainer packed, alone;
    o.document_mask = "on", o.recompute = recompute;
    for (int64_t i = 0; i < B * T; i++) tokens[i] = 6 + (int32_t)(rng_u64(3, (uint64_t)i) % 31);
    for (int64_t i = 0, at = 0; i < DOCUMENTS; at += lengths[i++])
        if (at != T) tokens[at] = SEPARATOR;
    trainer_begin(&packed, &o, &m);
    run_documents(&packed, tokens, SEPARATOR, grad_scale);
    float *sum = (float *)xcalloc((size_t)packed.table.total, sizeof *sum);
    int64_t losses = 0, inputs = 0;
    for (int64_t i = 0, at = 0; i < DOCUMENTS; at += lengths[i++]) {
        one.batch_size = 1, one.sequence_length = lengths[i];
        trainer_begin(&alone, &one, &m);
        run_documents(&alone, tokens + at, SEPARATOR, grad_scale);
        losses += memcmp(alone.acts.losses, packed.acts.losses + at, (size_t)lengths[i] * sizeof(float)) != 0;
        inputs += memcmp(alone.acts.dx, packed.acts.dx + at * m.hidden_size,
                         (size_t)(lengths[i] * m.hidden_size) * sizeof(float)) != 0;
        for (int64_t k = 0; k < alone.table.total; k++) sum[k] += alone.params.gradients[k];
        trainer_free(&alone);
    }
    const double error = check_relative_error(packed.params.gradients, sum, packed.table.total);
    CHECK(!losses && !inputs && error < 1e-6,
          "family %d, --recompute %d: documents have the bits that they have alone; %lld differ in losses, %lld in "
          "input gradients; relative error of weight gradients %g",
          (int)family, recompute, (long long)losses, (long long)inputs, error);
    free(sum);
    trainer_free(&packed);
}

// Writes a shard of 4 sequences of T tokens with a mask, of which sequence i has 3 i + 1 targets that count.
static void write_masked_shard(const char *name, int64_t T) {
    Failure failure;
    const int64_t tokens = 4 * T + 1;
    uint32_t *words = (uint32_t *)xcalloc((size_t)(SHARD_HEADER_INTS + tokens), sizeof(uint32_t));
    words[0] = SHARD_MAGIC_U32, words[1] = SHARD_MASKED, words[2] = (uint32_t)tokens;
    for (int64_t i = 0; i < tokens; i++) {
        words[SHARD_HEADER_INTS + i] = (uint32_t)(rng_u64(3, (uint64_t)i) % 37);
        if (i == 0 || (i - 1) % T > (i - 1) / T * 3) words[SHARD_HEADER_INTS + i] |= SHARD_CONTEXT;
    }
    if (!file_write(scratch, name, words, (SHARD_HEADER_INTS + tokens) * 4, NULL, &failure)) die("%s", failure.text);
    free(words);
}

// Returns the mean loss of the 4 sequences over their targets that count, by hand: from the loss of every target.
static double masked_loss(Trainer *t) {
    double sum = 0, counted = 0;
    model_forward(t, &t->batch);
    loss_forward(t, &t->batch);
    for (int64_t i = 0; i < t->d.R; i++)
        if (i % t->d.T <= i / t->d.T * 3) sum += (double)t->acts.losses[i], counted++;
    return sum / counted;
}

// With a mask, the step's loss is the mean over the targets of all micro-steps that count, and its gradient is that
// mean's: moving the weights along it changes the mean that is computed by hand. 4 micro-steps of 1 sequence give what
// one of 4 gives, though their numbers of counted targets differ.
static void test_mask(ModelFamily family) {
    enum { T = 12 };
    Options o = small_options(PRECISION_FP32, 4, T), micro;
    ModelConfig m = odd_model(family);
    Trainer t, cut;
    write_masked_shard("masked.bin", T);
    DataLoader data = dataloader_open(scratch_path("masked.bin"), T, false, 1);
    o.learning_rate = 0, micro = o;
    micro.batch_size = 1, micro.grad_accumulation_steps = 4;
    trainer_begin(&t, &o, &m), trainer_begin(&cut, &micro, &m);
    const StepRecord s = train_step(&t, &data, 0, 0), c = train_step(&cut, &data, 0, 0);
    for (int64_t i = 0; i < 4; i++) dataloader_read(&data, i), memcpy(t.batch.targets + i * T, data.buffer + 1, T * 4);
    const double error = fabs(masked_loss(&t) / s.loss - 1), h = 2e-3;
    const double cut_error = check_relative_error(cut.params.gradients, t.params.gradients, t.table.total);
    CHECK(error < 1e-6 && fabs(c.loss / s.loss - 1) < 1e-6 && cut_error < 1e-6,
          "family %d: the loss %g is the mean over counted targets; relative error %g; 4 micro-steps: loss %g, "
          "gradients %g",
          (int)family, s.loss, error, c.loss, cut_error);
    double loss[2];
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < t.table.total; i++)
            t.params.master[i] = (float)(cut.params.master[i] + (side ? h : -h) * t.params.gradients[i] / s.norm);
        loss[side] = masked_loss(&t);
    }
    const double slope = (loss[1] - loss[0]) / (2 * h);
    CHECK(fabs(slope / s.norm - 1) < 2e-3, "family %d: the slope of that mean is %g, the gradient norm %g (test_slope)",
          (int)family, slope, s.norm);
    dataloader_close(&data);
    trainer_free(&t), trainer_free(&cut);
}

// A model with sizes on which every recipe can run FP8.
static ModelConfig fp8_model(void) {
    ModelConfig m = odd_model(FAMILY_QWEN3);
    m.hidden_size = 128, m.intermediate_size = 256;
    m.num_heads = 4, m.num_kv_heads = 2, m.head_dim = 32;
    m.initializer_range = 0.1;
    return m;
}

// The result of train_some: the weights, then the last gradient norm, then the scales of delayed scaling.
typedef struct {
    float *values;
    int64_t count, weights;
} Trained;

static bool keeps_fp8;  // --fp8-activations of train_some

// Trains some steps on synthetic tokens, with the global batch as `micro_steps` micro-batches. With FP8 all sequences
// are equal, so that each micro-batch has the scales of the whole batch.
static Trained train_some(int precision, int recipe, int recompute, int threads, int64_t micro_steps, int steps) {
    const int64_t B = 4, T = precision == PRECISION_FP8 ? 32 : 16;
    Options o = small_options(precision, B / micro_steps, T);
    o.fp8_recipe = recipe, o.fp8_amax_history = 3;
    o.fp8_format = FP8_FORMAT_AUTO, o.fp8_all_gather = AUTO;
    options_resolve(&o);
    ModelConfig m = precision == PRECISION_FP8 ? fp8_model() : odd_model(FAMILY_QWEN3);
    o.recompute = recompute, o.grad_accumulation_steps = micro_steps;
    o.fp8_activations = keeps_fp8 ? ON : OFF;
    omp_set_num_threads(threads);
    Trainer t;
    trainer_begin(&t, &o, &m);
    CHECK(precision != PRECISION_FP8 || !t.precision.any_bf16, "recipe %d: all linear layers are FP8", recipe);
    for (int step = 0; step < steps; step++) {
        for (int64_t micro = 0; micro < micro_steps; micro++) {
            for (int64_t i = 0; i < t.o->batch_size * T; i++) {
                const int64_t at =
                    precision == PRECISION_FP8 ? i % T : (step * micro_steps + micro) * o.batch_size * T + i;
                t.batch.inputs[i] = (int32_t)(rng_u64(9, (uint64_t)at) % 37);
                t.batch.targets[i] = (int32_t)(rng_u64(9, (uint64_t)at + 1) % 37);
            }
            micro_step(&t, (float)(1.0 / (double)(B * T)), step, micro);
        }
        end_micro_steps(&t);
        weights_update(&t, step, sqrt(squares_sum(t.params.gradients, t.table.total)));
    }
    const int64_t scales = t.scales.delayed.tensors;
    Trained r = {(float *)xcalloc((size_t)(t.table.total + 1 + scales), sizeof(float)), t.table.total + 1 + scales,
                 t.table.total};
    memcpy(r.values, t.params.master, (size_t)t.table.total * sizeof(float));
    r.values[t.table.total] = (float)sqrt(squares_sum(t.params.gradients, t.table.total));
    if (scales) memcpy(r.values + t.table.total + 1, t.scales.delayed.scale, (size_t)scales * sizeof(float));
    trainer_free(&t);
    omp_set_num_threads(2);
    return r;
}

static bool same_training(Trained a, Trained b) {
    return a.count == b.count && memcmp(a.values, b.values, (size_t)a.count * sizeof(float)) == 0;
}

// --fp8-activations changes the gradient norm a little. With it, --recompute attention changes no bit.
static void test_fp8_activations(int recipe) {
    const char *name = recipe_row(recipe)->name;
    keeps_fp8 = true;
    Trained with = train_some(PRECISION_FP8, recipe, RECOMPUTE_NONE, 2, 1, 1);
    Trained again = train_some(PRECISION_FP8, recipe, RECOMPUTE_ATTENTION, 1, 1, 1);
    CHECK(same_training(with, again), "%s: with FP8 activations, --recompute attention changes no bit", name);
    keeps_fp8 = false;
    Trained without = train_some(PRECISION_FP8, recipe, RECOMPUTE_NONE, 2, 1, 1);
    const double change = fabs(with.values[with.weights] / without.values[with.weights] - 1);
    CHECK(change > 1e-6 && change < 0.02, "%s: FP8 activations change the gradient norm a little, by %g", name, change);
    free(again.values);
    free(without.values);
    free(with.values);
}

// True if c is the product of two operands of lm_head that are cast here: x or dy [R, C or V], by rows or (wgrad) by
// columns, by `scale` if that is above 0, and w [V, C] or (wgrad) x, by rows (fprop) or by columns.
static bool head_product(const Trainer *t, GemmKind gemm, const Real *c, const Real *first, const Real *second,
                         float scale) {
    const Recipe *r = recipe_row(t->o->fp8_recipe);
    const GemmSizes n = precision_sizes(&t->precision.lm_head, gemm, t->d.R);
    const bool fprop = gemm == GEMM_FPROP, wgrad = gemm == GEMM_WGRAD;
    LinearOperand a =
        linear_operand(second, t->d.R, fprop ? t->d.C : t->d.V, wgrad ? COLUMNWISE : ROWWISE, r->granularity[gemm][1],
                       r->rule, fprop ? FP8_E4M3 : t->precision.dy_format, scale);
    LinearOperand w = linear_operand(first, wgrad ? t->d.R : t->d.V, t->d.C, fprop ? ROWWISE : COLUMNWISE,
                                     r->granularity[gemm][0], r->rule, FP8_E4M3, 0);
    float *want = (float *)xcalloc((size_t)(n.rows * n.columns), sizeof *want);
    for (int64_t i = 0; i < n.rows; i++)
        for (int64_t j = 0; j < n.columns; j++) {
            double sum = 0;
            for (int64_t k = 0; k < n.depth; k++)
                sum += (double)a.view.data[i * a.view.row_stride + k * a.view.col_stride] *
                       (double)w.view.data[j * w.view.row_stride + k * w.view.col_stride];
            want[i * n.columns + j] = (float)(sum * (double)a.scale_inv * (double)w.scale_inv);
        }
    const double error = check_relative_error(c, want, n.rows * n.columns);
    linear_operand_free(&a), linear_operand_free(&w);
    free(want);
    return error < 0x1p-8;  // c is rounded to bf16
}

// --fp8-lm-head: logits, with `on` the gradient of lm_head's input, and with `all` that of its weight, are products of
// the cast bytes, if the recipe has this GEMM in FP8, and else bf16 products.
static void test_lm_head(int recipe) {
    ModelConfig m = fp8_model();
    m.tie_word_embeddings = true;
    m.initializer_range = 0.02;  // no softmax is near 0 or 1, so the bound is above the amax
    const int last = recipe_row(recipe)->granularity[GEMM_WGRAD][1] == PER_ROW ? LM_HEAD_ON : LM_HEAD_ALL;
    for (int head = LM_HEAD_OFF; head <= last; head++) {
        Options o = small_options(PRECISION_FP8, 1, 32);
        o.fp8_recipe = recipe, o.fp8_lm_head = head;
        if (granularity_traits(recipe_row(recipe)->granularity[GEMM_DGRAD][1])->cols != WHOLE)
            o.fp8_format = FP8_FORMAT_E4M3;
        Trainer t;
        trainer_begin(&t, &o, &m);
        const int64_t R = t.d.R, V = t.d.V, C = t.d.C;
        const float grad_scale = 1 / (float)R, bound = precision_dlogits_amax(grad_scale);
        for (int64_t i = 0; i < R; i++)
            t.batch.inputs[i] = (int32_t)(i * 7 % V), t.batch.targets[i] = (int32_t)(i * 5 % V);
        const Root w = root_weights(&t);
        float *plain = (float *)xcalloc((size_t)(R * V + R * C + V * C), sizeof *plain), *dx = plain + R * V,
              *dw = dx + R * C;
        model_forward(&t, &t.batch);
        logits_forward(&t);
        linear_forward_reference(plain, t.acts.y_final, w.lm_head, NULL, R, C, V, t.rounding);
        const bool same = memcmp(plain, t.acts.logits, (size_t)(R * V) * sizeof *plain) == 0;
        const bool product = head_product(&t, GEMM_FPROP, t.acts.logits, w.lm_head, t.acts.y_final, 0);
        CHECK(head == LM_HEAD_OFF ? same : !same && product, "%s, head %d: logits are FP8 products, or bf16 (%d, %d)",
              recipe_row(recipe)->name, head, same, product);
        loss_forward_backward(&t, &t.batch, grad_scale);
        linear_dgrad_reference(dx, t.acts.logits, w.lm_head, R, C, V, t.rounding);
        linear_wgrad_reference(dw, t.acts.logits, t.acts.y_final, R, C, V, t.rounding);
        const bool same_dx = memcmp(dx, t.acts.dbranch, (size_t)(R * C) * sizeof *dx) == 0,
                   same_dw = memcmp(dw, root_gradients(&t).lm_head, (size_t)(V * C) * sizeof *dw) == 0;
        const float scale = recipe_row(recipe)->granularity[GEMM_DGRAD][1] == PER_TENSOR
                                ? fp8_rule_scale(SCALE_TORCHAO, bound, t.precision.dy_format)
                                : 0;
        const bool product_dx = head_product(&t, GEMM_DGRAD, t.acts.dbranch, w.lm_head, t.acts.logits, scale),
                   product_dw =
                       head_product(&t, GEMM_WGRAD, root_gradients(&t).lm_head, t.acts.y_final, t.acts.logits, scale),
                   fp8_dw = head == LM_HEAD_ALL && recipe_is_fp8(recipe_row(recipe), GEMM_WGRAD);
        float largest = 0;
        uint32_t bits = 0;
        for (int64_t i = 0; i < R * V; i++)
            largest = fmaxf(largest, fabsf(t.acts.logits[i])), bits |= float_bits(t.acts.logits[i]) >> 16;
        const uint32_t dropped = t.precision.dy_format == FP8_E5M2 ? 31 : 15;
        CHECK((bits & 31) == (head < LM_HEAD_ON ? 31 : 31 & ~dropped),
              "%s, head %d: gradients of logits that FP8 GEMMs read have their format's mantissas (%x)",
              recipe_row(recipe)->name, head, bits);
        CHECK(largest <= bound && largest > bound / 2, "no gradient of a logit is above its bound %g: %g",
              (double)bound, (double)largest);
        CHECK(head < LM_HEAD_ON ? same_dx : !same_dx && product_dx,
              "%s, head %d: the input's gradient is an FP8 product, or bf16 (%d, %d)", recipe_row(recipe)->name, head,
              same_dx, product_dx);
        CHECK(fp8_dw ? !same_dw && product_dw : same_dw,
              "%s, head %d: the weight's gradient is an FP8 product, or bf16 (%d, %d)", recipe_row(recipe)->name, head,
              same_dw, product_dw);
        CHECK(check_relative_error(t.acts.dbranch, dx, R * C) < 0.06, "%s, head %d: FP8 changes it a little: %g",
              recipe_row(recipe)->name, head, check_relative_error(t.acts.dbranch, dx, R * C));
        free(plain);
        trainer_free(&t);
    }
}

// Rounding to groups of FP8 codes changes a value by at most half a unit in E4M3's last place. The results are bf16
// numbers. Rounding the results again changes nothing.
static void test_fp8_groups(void) {
    enum { N = 5 * FP8_GROUP + 40 };
    float x[N], rounded[N], twice[N];
    for (int i = 0; i < N; i++) x[i] = bf16_round(rng_normal(4, (uint64_t)i) * ldexpf(1, i / FP8_GROUP * 20 - 50));
    for (int i = 2 * FP8_GROUP; i < 3 * FP8_GROUP; i++) x[i] = 0;
    x[3 * FP8_GROUP + 5] = INFINITY, x[4 * FP8_GROUP + 9] = NAN;
    memcpy(rounded, x, sizeof x);
    fp8_group_round(rounded, N);
    memcpy(twice, rounded, sizeof x);
    fp8_group_round(twice, N);
    int far = 0, other = 0, not_bf16 = 0;
    for (int i = 0; i < N; i++) {
        const int group = i / FP8_GROUP;
        float amax = 0;
        for (int k = group * FP8_GROUP; k < N && k < (group + 1) * FP8_GROUP; k++) amax = fmaxf(amax, fabsf(x[k]));
        if (group == 3 || group == 4) continue;
        // the smallest codes stand for numbers 2^-9 apart, and the code of the amax for a number from 224 to 448
        far += !(fabsf(rounded[i] - x[i]) <= fmaxf(fabsf(x[i]) / 16, amax / 224 * 0x1p-10f));
        other += rounded[i] != twice[i], not_bf16 += bf16_round(rounded[i]) != rounded[i];
    }
    CHECK(far == 0 && other == 0 && not_bf16 == 0,
          "rounded values are near the values (%d are not), stay if they are rounded again (%d do not), and are bf16 "
          "(%d are not)",
          far, other, not_bf16);
    CHECK(isinf(rounded[3 * FP8_GROUP + 5]) && isnan(rounded[4 * FP8_GROUP]) && isnan(rounded[4 * FP8_GROUP + 9]),
          "an infinity stays, and a NaN makes its group NaN: %g, %g", (double)rounded[3 * FP8_GROUP + 5],
          (double)rounded[4 * FP8_GROUP]);
}

static void test_invariance(int precision, int recipe) {
    const int steps = SANITIZED ? 1 : 3, most_threads = SANITIZED ? 2 : 3;
    const char *name = precision == PRECISION_FP32   ? "fp32"
                       : precision == PRECISION_BF16 ? "bf16"
                                                     : recipe_row(recipe)->name;
    Trained one = train_some(precision, recipe, RECOMPUTE_NONE, 1, 1, steps);
    for (int recompute = SANITIZED ? RECOMPUTE_MLP : RECOMPUTE_NORM; recompute <= RECOMPUTE_LAYER; recompute++) {
        const int threads = 2 + recompute % (most_threads - 1);
        Trained many = train_some(precision, recipe, recompute, threads, 1, steps);
        CHECK(same_training(one, many), "%s: --recompute %d with %d threads changes no bit", name, recompute, threads);
        free(many.values);
    }
    const Trained whole = steps == 1 ? one : train_some(precision, recipe, RECOMPUTE_NONE, 2, 1, 1);
    for (int64_t micro_steps = precision == PRECISION_FP8 ? 4 : 2; micro_steps <= 4; micro_steps *= 2) {
        Trained split = train_some(precision, recipe, RECOMPUTE_NONE, 2, micro_steps, 1);
        const double norm_error = fabs(split.values[split.weights] / whole.values[whole.weights] - 1);
        // In fp32 only the order of sums differs. In bf16 and FP8 runs each micro-step rounds the running sum to bf16
        // once more.
        const double tolerance = precision == PRECISION_FP32 ? 1e-6 : 4e-3;
        CHECK(norm_error < tolerance,
              "%s: the gradient norm in %lld micro-steps is that of one batch; relative error %g", name,
              (long long)micro_steps, norm_error);
        if (precision == PRECISION_FP32) {
            const double error = check_relative_error(split.values, whole.values, whole.weights);
            CHECK(error < 1e-4, "weights after a step of %lld micro-steps are those of one batch; relative error %g",
                  (long long)micro_steps, error);
        }
        free(split.values);
    }
    if (steps > 1) free(whole.values);
    free(one.values);
}

// Delayed scaling, tensor by tensor: when histories change, and which scale casts a tensor.
static void test_delayed(void) {
    const ModelConfig m = fp8_model();
    Options o = small_options(PRECISION_FP8, 1, 32);
    o.fp8_recipe = RECIPE_DELAYED, o.fp8_amax_history = 4, o.fp8_margin = 1;
    Trainer t;
    trainer_begin(&t, &o, &m);
    fill_tokens(&t, 5);
    const DelayedState *d = &t.scales.delayed;
    model_forward(&t, &t.batch);  // as in validation
    for (int64_t i = 0; i < d->tensors; i++)
        CHECK(d->scale[i] == 0 && d->history[4 * i + 3] == 0,
              "a forward pass alone changes neither scale nor history of tensor %lld", (long long)i);
    const int64_t w = tensor_index(1, TENSOR_W, DOWN_PROJ), x = tensor_index(0, TENSOR_X, QKV_PROJ),
                  dy = tensor_index(0, TENSOR_DY, GATE_UP_PROJ);
    const float first_weight = float_from_bits(t.scales.amax[w]);
    CHECK(weight_scale(&t, 1, DOWN_PROJ) == 224 / first_weight,
          "the first weights are cast with the scale of their own amax");
    micro_step(&t, 1.0f / 32, 0, 0);
    CHECK(d->scale[x] == 0, "a micro-step alone changes no scale");
    end_micro_steps(&t);
    const float first_input = d->history[4 * x + 3], first_scale = d->scale[x];
    CHECK(first_input == float_from_bits(quantize_tensor_amax(t.acts.layer[0].norm1.data, 32 * 128, SCALE_TE)),
          "the history of an input gets the amax of its values; found %g", (double)first_input);
    CHECK(first_scale == 224 / first_input && d->scale[dy] == 28672 / d->history[4 * dy + 3] && d->scale[w] == 0,
          "a step sets the scales of x and dy from their amaxes and leaves that of w");
    micro_step(&t, 1.0f / 32, 1, 0), micro_step(&t, 1.0f / 32, 1, 1);
    end_micro_steps(&t);
    CHECK(d->history[4 * x + 1] == 0 && d->history[4 * x + 2] == first_input && d->history[4 * x + 3] == first_input &&
              d->scale[x] == first_scale,
          "a step of two equal micro-steps appends one equal amax and keeps the scale");
    weights_update(&t, 0, 1);
    const float second_weight = float_from_bits(t.scales.amax[w]);
    CHECK(d->history[4 * w + 3] == first_weight && d->scale[w] == 224 / first_weight &&
              weight_scale(&t, 1, DOWN_PROJ) == d->scale[w],
          "new weights are cast with the scale of the earlier amax: scale %g, amax %g", (double)d->scale[w],
          (double)first_weight);
    weights_update(&t, 1, 1);
    CHECK(d->history[4 * w + 3] == second_weight && d->history[4 * w + 2] == first_weight,
          "the next update appends the amax %g to the history", (double)second_weight);
    trainer_free(&t);
}

// Recipe tensorwise_bounded: before the first step a weight has its exact scale, and then that of the bound, which no
// new weight exceeds. The largest gradients, all of one sign, come nearest.
static void test_bounded(void) {
    const ModelConfig m = fp8_model();
    Options o = small_options(PRECISION_FP8, 1, 32);
    o.fp8_recipe = RECIPE_BOUNDED, o.learning_rate = 0.01, o.warmup_steps = 0;
    Trainer t;
    trainer_begin(&t, &o, &m);
    const int64_t w = tensor_index(1, TENSOR_W, DOWN_PROJ);
    const ShardRange r = linear_range(&t, 1, DOWN_PROJ);
    CHECK(weight_scale(&t, 1, DOWN_PROJ) == fp8_scale(float_from_bits(t.scales.amax[w]), FP8_E4M3),
          "the first weights are cast with the scale of their own amax");
    for (int64_t step = 0; step < 4; step++) {
        const float before = float_from_bits(t.scales.amax[w]);
        for (int64_t i = 0; i < t.plan.total; i++) t.params.gradients[i] = -ldexpf(1, (int)step);
        weights_update(&t, step, 1);
        const float amax = float_from_bits(t.scales.amax[w]), scale = weight_scale(&t, 1, DOWN_PROJ);
        CHECK(scale == weight_bound_scale(before, adamw_bound_of(&o, step, 0)) &&
                  amax == float_from_bits(quantize_tensor_amax(t.params.weights + r.shard, r.count, SCALE_TORCHAO)),
              "step %lld: the scale follows from the amax before the step; found %g", (long long)step + 1,
              (double)scale);
        CHECK(amax * scale <= 448 && amax * scale > 410, "step %lld: the largest new weight becomes %g of 448",
              (long long)step + 1, (double)(amax * scale));
    }
    trainer_free(&t);
}

// Copies histories and scales. The caller frees the copy.
static float *delayed_copy(const Trainer *t) {
    float *copy = (float *)xcalloc((size_t)delayed_elements(t), sizeof *copy);
    memcpy(copy, t->scales.delayed.history, (size_t)delayed_elements(t) * sizeof *copy);
    return copy;
}

// Takes step `step` with two micro-steps, with an infinite weight in the final norm if `spoil`.
static StepRecord delayed_step(Trainer *t, DataLoader *data, int64_t step, int64_t first_sample, bool spoil) {
    float *norm = t->params.master + t->table.root.norm;
    const float kept = *norm;
    if (spoil) *norm = INFINITY;
    weights_refresh(t);
    const StepRecord s = train_step(t, data, step, first_sample);
    CHECK(s.skipped == spoil, "step %lld is skipped exactly if it was spoiled; the norm is %g", (long long)step + 1,
          s.norm);
    if (spoil) *norm = kept, weights_refresh(t);
    return s;
}

// Delayed scaling with --on-nonfinite skip: skipped steps, even the first one, do not change histories and scales. The
// other steps equal those of a trainer without the skipped ones.
static void test_delayed_skip(void) {
    ModelConfig m = fp8_model();
    m.vocab_size = 64;
    Options o = small_options(PRECISION_FP8, 1, 32);
    o.fp8_recipe = RECIPE_DELAYED, o.fp8_amax_history = 3, o.on_nonfinite = NONFINITE_SKIP,
    o.grad_accumulation_steps = 2, o.train_data = scratch_path("train.bin");
    Trainer t, without;
    trainer_begin(&t, &o, &m), trainer_begin(&without, &o, &m);
    DataLoader data = dataloader_open(o.train_data, 32, true, 42);
    const size_t bytes = (size_t)delayed_elements(&t) * sizeof(float);
    for (int64_t step = 0; step < (SANITIZED ? 1 : 3); step++) {
        float *before = delayed_copy(&t);
        delayed_step(&t, &data, step, step + 100, true);
        CHECK(memcmp(before, t.scales.delayed.history, bytes) == 0,
              "the skipped step %lld changes neither histories nor scales", (long long)step + 1);
        const StepRecord a = delayed_step(&t, &data, step, step, false),
                         b = delayed_step(&without, &data, step, step, false);
        CHECK(memcmp(before, t.scales.delayed.history, bytes) != 0,
              "step %lld, which is taken, changes histories or scales", (long long)step + 1);
        CHECK(a.loss == b.loss && a.norm == b.norm &&
                  memcmp(t.scales.delayed.history, without.scales.delayed.history, bytes) == 0 &&
                  memcmp(t.params.master, without.params.master, (size_t)t.table.total * sizeof(float)) == 0,
              "step %lld equals that of a trainer without skipped steps: loss %g, and %g there", (long long)step + 1,
              a.loss, b.loss);
        free(before);
    }
    dataloader_close(&data);
    trainer_free(&t), trainer_free(&without);
}

// Returns the message that says where the problem of a step that is not taken begins.
static const char *place_of(Trainer *t, double loss) {
    static char place[640];
    const TrainerState state = trainer_state(t);
    const NonfiniteStep what = nonfinite_step(t, loss, (double)NAN);
    nonfinite_place(&t->table, &state, &what, place, sizeof place);
    return place;
}

// Huge, infinite or NaN weights in one part of the model: the message names the part, and the first of these weights as
// the largest there.
static void test_blocks(ModelFamily family, int precision, int recompute, int masters) {
    static const struct {
        const char *weight, *place;
        float value;
    } blocks[] = {
        {"model.embed_tokens.weight", "in the embedding, in the forward pass; the largest weight there is nan, in",
         NAN},
        {"model.layers.0.self_attn.q_proj.weight",
         "in the attention block of layer 0, in the forward pass; the largest weight there is 1.70141e+38, in",
         0x1p127f},
        {"model.layers.0.post_attention_layernorm.weight",
         "in the MLP of layer 0, in the forward pass; the largest weight there is inf, in", INFINITY},
        {"model.layers.1.self_attn.v_proj.weight",
         "in the attention block of layer 1, in the forward pass; the largest weight there is -inf, in", -INFINITY},
        {"model.layers.1.mlp.down_proj.weight",
         "in the MLP of layer 1, in the forward pass; the largest weight there is nan, in", NAN},
        {"model.norm.weight", "in the final norm or lm_head, in the forward pass; the largest weight there is inf, in",
         INFINITY}};
    ModelConfig m = odd_model(family);
    Options o = small_options(precision, 1, 8);
    o.recompute = recompute, o.master_weights = masters;
    Trainer t;
    trainer_create(&t, &o, &m);
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        char expected[256];
        const Parameter *p = parameter_find(&t.table, blocks[i].weight);
        const int64_t element = i == 0    ? 0
                                : p->cols ? 3 * p->cols
                                          : 7,
                      count = i == 0    ? parameter_elements(p)
                              : p->cols ? p->cols
                                        : 1;
        initialize(&t);
        fill_tokens(&t, 5);
        for (int64_t k = 0; k < count; k++) t.params.master[p->offset + element + k] = blocks[i].value;
        for (int64_t k = 0; t.params.scales && k < t.table.count; k++) *tensor_scale(&t, STATE_MASTER_SCALE, k) = 0;
        weights_changed(&t);
        t.bad_norm = NONFINITE_NONE;
        const double loss = micro_step(&t, 1.0f / 8, 0, 0);
        format_checked(expected, sizeof expected, "The problem begins %s %s, element %lld", blocks[i].place, p->name,
                       (long long)element);
        CHECK(strcmp(place_of(&t, loss), expected) == 0, "the message is \"%s\"; found \"%s\"", expected,
              place_of(&t, loss));
    }
    // A forward pass alone, as in validation, does not search for the origin.
    t.bad_norm = NONFINITE_NONE;
    model_forward(&t, &t.batch);
    CHECK(t.bad_norm == NONFINITE_NONE, "a forward pass alone records no norm as the origin; found %lld",
          (long long)t.bad_norm);
    trainer_free(&t);
}

// Weights whose scale was loaded become FP16 with that scale, even if their amax (here 2047/2048 of a power of two)
// would give a scale twice as large. Other weights get the scale from their amax.
static void test_fp16_masters(void) {
    ModelConfig m = odd_model(FAMILY_LLAMA);
    Options o = small_options(PRECISION_BF16, 1, 8);
    o.master_weights = STORAGE_FP16;
    Trainer t;
    trainer_create(&t, &o, &m);
    const float largest = 32752 * 0x1p-10f, scale = 0x1p10f;
    const int64_t first = t.table.entries[0].offset;
    float read[2] = {0, 0};
    initialize(&t);
    state_write(&t, STATE_WEIGHTS, first + 1, 1, &largest);
    state_write(&t, STATE_MASTER_SCALE, 0, 1, &scale);
    weights_changed(&t);
    state_read(&t, STATE_WEIGHTS, first, 2, read);
    CHECK(*tensor_scale(&t, STATE_MASTER_SCALE, 0) == scale && t.params.fp16_master[first + 1] == 0x77ff &&
              read[1] == largest,
          "the loaded scale is used: scale %g, code %04x, value %g", (double)*tensor_scale(&t, STATE_MASTER_SCALE, 0),
          t.params.fp16_master[first + 1], (double)read[1]);
    CHECK(t.params.weights[first] == bf16_round(read[0]) && t.params.weights[first + 1] == bf16_round(largest),
          "the model computes with the masters, rounded to bf16");
    for (int64_t i = 1; i < t.table.count; i++) {
        const Parameter *p = &t.table.entries[i];
        float amax = 0;
        for (int64_t k = 0; k < parameter_elements(p); k++)
            amax = fmaxf(amax, fabsf(fp16_to_float(t.params.fp16_master[p->offset + k])));
        CHECK(amax >= 32752 && amax <= 65504, "%s: the largest FP16 number is from 32752 to 65504; found %g", p->name,
              (double)amax);
    }
    trainer_free(&t);
}

// Bits of the numbers that a load must refuse or a later save must accept, by their width: zeros, the smallest and the
// largest number, infinities, NaN, and numbers below zero.
static const uint32_t *poked_bits(int64_t bytes, int64_t *count) {
    static const uint32_t codes[] = {0, 1, 0x7e, 0x7f, 0x80, 0x81, 0xfe, 0xff},
                          halves[] = {0, 1, 0x7bff, 0x7c00, 0x7e00, 0x7f7f, 0x7f80, 0x8000, 0xbc00, 0xbf80, 0xfbff},
                          words[] = {0,          1,          0x00800000, 0x3f8000ff, 0x7f7fffff, 0x7f800000,
                                     0x7fc00000, 0x80000000, 0xbf800000, 0xff7fffff, 0xff800000};
    *count = bytes == 1 ? 8 : 11;
    return bytes == 1 ? codes : bytes == 2 ? halves : words;
}

// True if a save would accept all arrays that the trainer has.
static bool can_save(Trainer *t, const TrainerState *s, Failure *failure) {
    CheckpointSource source = {&t->table, s, {STATE_WEIGHTS}};
    const int64_t tensors = state_kinds(s, STATE_WEIGHTS, STATE_MASTER_SCALE, source.kinds) * t->table.count;
    float *values = (float *)xcalloc((size_t)max_i64(t->table.total, s->delayed_tensors * s->delayed_window), 4);
    bool ok = true;
    for (int64_t i = 0; ok && i < tensors; i++) {
        const Parameter *p = &t->table.entries[i % t->table.count];
        const ShardRange r = state_range(&t->table, s, p, checkpoint_kind(&source, i));
        ok = checkpoint_fetch(&source, i, 0, r.count, values, failure);
    }
    for (int i = 0; ok && s->delayed_tensors && i < 2; i++)
        ok = checkpoint_fetch_delayed((void *)s, i, 0, s->delayed_tensors * (i ? 1 : s->delayed_window), values,
                                      failure);
    free(values);
    return ok;
}

// Writes each of poked_bits() over the first element of a tensor in a checkpoint, and loads it. Either the load fails,
// or a save succeeds.
static void poke(Trainer *t, const TrainerState *s, const char *folder, const Safetensors *st, const Safetensor *x) {
    int64_t count, bytes = safetensors_type_bytes(x->type);
    const uint32_t *bits = poked_bits(bytes, &count);
    const int fd = open(st->files[x->file].path, O_RDWR);
    uint32_t before = 0, sign = 1u << (8 * bytes - 1);
    CHECK(pread(fd, &before, (size_t)bytes, x->offset) == bytes, "%s is read", x->name);
    for (int64_t i = 0; i < count; i++) {
        Failure failure = {"", false};
        CHECK(pwrite(fd, &bits[i], (size_t)bytes, x->offset) == bytes, "%s is written", x->name);
        const bool loads = checkpoint_read(folder, &t->m, &t->table, s, &failure);
        if (loads) weights_changed(t);
        CHECK(!loads || can_save(t, s, &failure), "%s: 0x%x is loaded, and not saved: %s", x->name, bits[i],
              failure.text);
        CHECK(!loads || bits[i] <= sign || !strstr(x->name, "_sq"), "%s: 0x%x is loaded, though it is below zero",
              x->name, bits[i]);
    }
    CHECK(pwrite(fd, &before, (size_t)bytes, x->offset) == bytes, "%s is restored", x->name);
    close(fd);
}

// What a run accepts from a checkpoint, it can save again, whatever the optimizer's state.
static void test_pokes(int masters, int moments) {
    static const char *const stems[] = {"model", "optimizer", "fp8_state"};
    Options o = small_options(PRECISION_FP8, 1, 32);
    o.master_weights = masters, o.optimizer_state = moments, o.fp8_recipe = RECIPE_DELAYED, o.fp8_amax_history = 2;
    const ModelConfig m = fp8_model();
    const char *dir = scratch_path("pokes");
    const TrainerProgress progress = {1, 1, 0};
    const CheckpointRun run = {.model = &m, .options = &o};
    char folder[PATH_CAPACITY];
    Failure failure = {"", false};
    Trainer t;
    omp_set_num_threads(1);
    trainer_create(&t, &o, &m);
    initialize(&t), weights_changed(&t);
    fill_tokens(&t, 5);
    micro_step(&t, 1.0f / 32, 0, 0);
    weights_update(&t, 0, 1);
    const TrainerState s = trainer_state(&t);
    CHECK(checkpoint_save(dir, 1, &progress, &run, &t.table, &s, &failure), "the state is saved: %s", failure.text);
    checkpoint_name(dir, 1, "", folder, sizeof folder);
    for (int i = 0; i < 3; i++) {
        Safetensors st;
        if (!safetensors_open_folder(&st, folder, stems[i], &failure)) die("%s", failure.text);
        for (int64_t k = 0; k < st.count; k++)
            if (i == 2 || strstr(st.tensors[k].name, "layers.1.mlp.up_proj")) poke(&t, &s, folder, &st, &st.tensors[k]);
        safetensors_close(&st);
    }
    CHECK(checkpoint_read(folder, &m, &t.table, &s, &failure), "the restored state loads: %s", failure.text);
    remove_tree(dir);
    trainer_free(&t);
    omp_set_num_threads(2);
}

// Trains with these master weights at a rate of 3e-6. Writes the weights before and after the steps. The caller frees
// both.
static void train_masters(int masters, float *weights[2]) {
    ModelConfig m = fp8_model();
    m.vocab_size = 64;
    Options o = small_options(PRECISION_BF16, 1, 32);
    o.master_weights = masters, o.optimizer_state = MOMENTS_FP32, o.train_data = scratch_path("train.bin");
    o.learning_rate = 3e-6, o.weight_decay = 0;
    Trainer t;
    trainer_create(&t, &o, &m);
    initialize(&t), weights_changed(&t);
    DataLoader data = dataloader_open(o.train_data, 32, true, 42);
    for (int step = 0; step <= 20; step++) {
        if (step) train_step(&t, &data, step - 1, step - 1);
        if (step % 20 == 0) {
            float *out = weights[step / 20] = (float *)xcalloc((size_t)t.table.total, sizeof *out);
            for (int64_t i = 0; i < t.table.count; i++) {
                const int64_t at = t.table.entries[i].offset;
                state_read(&t, STATE_WEIGHTS, at, parameter_elements(&t.table.entries[i]), out + at);
            }
        }
    }
    dataloader_close(&data);
    trainer_free(&t);
}

// Small updates of FP16 masters count on average if they are rounded stochastically, and are lost if to nearest: the
// slope of the weights' movement on that of fp32 masters.
static void test_small_updates(void) {
    float *fp32[2], *other[2];
    ModelConfig m = fp8_model();
    m.vocab_size = 64;
    ParameterTable table = parameter_table(&m);
    train_masters(STORAGE_FP32, fp32);
    for (int nearest = 0; nearest < 2; nearest++) {
        double both = 0, squares = 0;
        train_masters(nearest ? STORAGE_FP16 : STORAGE_FP16_STOCHASTIC, other);
        for (int64_t i = 0; i < table.total; i++) {
            const double moved = (double)fp32[1][i] - (double)fp32[0][i];
            both += moved * ((double)other[1][i] - (double)other[0][i]), squares += moved * moved;
        }
        const double slope = both / squares;
        CHECK(nearest ? slope < 0.7 : fabs(slope - 1) < 0.02, "FP16 masters, nearest %d, move by %g of fp32 masters",
              nearest, slope);  // the first slope is within 0.0002 of 1
        free(other[0]), free(other[1]);
    }
    free(fp32[0]), free(fp32[1]);
    parameter_table_free(&table);
}

// FP8 weights are cast from the FP16 masters: one FP8 scale for a fused weight, made from the largest amax of its
// tensors, which have FP16 scales of their own. Checkpoints hold the values that the FP16 masters stand for.
static void test_fp16_casts(void) {
    ModelConfig m = fp8_model();
    Options o = small_options(PRECISION_FP8, 1, 16);
    o.master_weights = STORAGE_FP16, o.fp8_all_gather = AUTO;
    options_resolve(&o);
    Trainer t;
    trainer_create(&t, &o, &m);
    initialize(&t);
    for (int64_t i = 0; i < t.table.count; i++) {  // k has larger weights than q and v, one of gate is just above 448
        const Parameter *p = &t.table.entries[i];
        for (int64_t e = 0; strstr(p->name, "k_proj.weight") && e < parameter_elements(p); e++)
            t.params.master[p->offset + e] *= 37;
        if (strstr(p->name, "gate_proj")) t.params.master[p->offset + 5] = -448.0625f;
    }
    weights_changed(&t);
    float *values = (float *)xcalloc((size_t)t.table.total, sizeof *values);
    for (int64_t i = 0; i < t.table.count; i++)
        state_read(&t, STATE_WEIGHTS, t.table.entries[i].offset, parameter_elements(&t.table.entries[i]),
                   values + t.table.entries[i].offset);
    for (int64_t l = 0; l < t.d.L; l++)
        for (int id = 0; id < NUM_LINEARS; id++) {
            const ShardRange r = linear_range(&t, l, id);
            int64_t wrong = 0, fine = 0;
            double amax = 0, scale = 1;
            for (int64_t e = 0; e < r.count; e++) amax = fmax(amax, fabs((double)values[r.shard + e]));
            while (amax * scale > 448) scale /= 2;
            while (amax * scale * 2 <= 448) scale *= 2;
            for (int64_t e = 0; e < r.count; e++) {
                const float x = values[r.shard + e];
                wrong += linear_codes(&t, l, r)[e] != fp8_from_float((float)((double)x * scale), FP8_E4M3);
                fine += x != bf16_round(x);
            }
            CHECK(
                wrong == 0 && fine > r.count / 2 && (double)weight_scale(&t, l, id) == scale,
                "layer %lld, linear %d: codes and scale are those of the masters' values, most of which are not bf16; "
                "%lld of %lld codes differ, %lld values are not bf16, the scale is %g, expected %g",
                (long long)l, id, (long long)wrong, (long long)r.count, (long long)fine,
                (double)weight_scale(&t, l, id), scale);
            CHECK(id != GATE_UP_PROJ || scale == 1, "448.0625 is 448 in FP16, so the scale of gate_up is 1; found %g",
                  scale);
        }
    const Layer w = layer_weights(&t, 1);
    const ShardRange down = linear_range(&t, 1, DOWN_PROJ);
    CHECK(!w.down.data && w.down.codes == linear_codes(&t, 1, down), "the model reads the codes");
    free(values);
    trainer_free(&t);
}

// The squares of gradients overflow: no such step is taken, so every weight and moment stays finite.
static void test_overflow(int precision, int sums) {
    Options o = small_options(precision, 2, 16);
    o.grad_accum_dtype = sums;
    o.on_nonfinite = NONFINITE_SKIP, o.learning_rate = 1000, o.train_data = scratch_path("train.bin");
    ModelConfig m;
    model_config_preset(&m, "tiny");
    m.vocab_size = 64;
    Trainer t;
    trainer_begin(&t, &o, &m);
    DataLoader data = dataloader_open(o.train_data, 16, true, 42);
    int64_t large = 0;
    for (int step = 0; step < 12; step++) {
        const StepRecord s = train_step(&t, &data, step, 2 * step);
        large += s.skipped && isfinite(s.norm);
        const float *arrays[] = {t.params.master, t.params.exp_avg, t.params.exp_avg_sq};
        for (int a = 0; a < 3; a++)
            CHECK(all_finite(arrays[a], t.table.total, ST_F32),
                  "precision %d, sums %d, step %d, norm %g: array %d is finite", precision, sums, step + 1, s.norm, a);
    }
    CHECK(large > 0, "precision %d, sums %d: a step is skipped because squares of its gradients overflow", precision,
          sums);
    dataloader_close(&data);
    trainer_free(&t);
}

// Computes the gradient of a batch that `seed` selects, as micro-step `micro`.
static void compute_gradients(Trainer *t, uint64_t seed, int64_t micro) {
    for (int64_t i = 0; i < t->d.R; i++) {
        t->batch.inputs[i] = (int32_t)(rng_u64(seed, (uint64_t)i) % 37);
        t->batch.targets[i] = (int32_t)(rng_u64(seed, (uint64_t)i + 1) % 37);
    }
    micro_step(t, (float)(1.0 / (double)t->d.R), 0, micro);
}

// After each micro-step, FP8 gradients must be the sum before it plus the micro-step's bf16 gradients, rounded by
// gradient_fp8.h. Other gradients must stay bf16. An infinite gradient of a layer makes the norm NaN, and is located.
static void test_fp8_gradients(void) {
    Options o = small_options(PRECISION_BF16, 2, 16), o_fp8 = o;
    ModelConfig m = odd_model(FAMILY_QWEN3);
    o_fp8.grad_accum_dtype = SUM_FP8;
    Trainer plain, fp8;
    trainer_begin(&plain, &o, &m), trainer_begin(&fp8, &o_fp8, &m);
    float *sum = (float *)xcalloc((size_t)plain.table.total, sizeof *sum);
    for (int64_t micro = 0; micro < 2; micro++) {
        int64_t differ = 0, changed = 0, others = 0;
        fp8.units.micro = micro;
        const GradientSum how = micro_sum(&fp8, 0);
        compute_gradients(&plain, 5 + (uint64_t)micro, 0), compute_gradients(&fp8, 5 + (uint64_t)micro, micro);
        for (int64_t i = 0; i < plain.table.count; i++) {
            const Parameter *p = &plain.table.entries[i];
            const int64_t n = parameter_elements(p);
            float *s = sum + p->offset;
            const float *g = plain.params.gradients + p->offset, *got = fp8.params.gradients + p->offset;
            for (int64_t e = 0; e < n; e++) s[e] += g[e];
            if (p->flags & PARAM_FP8)
                gradient_fp8_round(s, gradient_fp8_scale(gradient_fp8_amax(s, n)), p->offset, n, &how);
            for (int64_t e = 0; e < n; e++) {
                if (p->flags & PARAM_FP8) differ += got[e] != s[e], changed += got[e] != g[e];
                else others += micro == 0 ? got[e] != g[e] : got[e] != bf16_round(got[e]);
            }
        }
        CHECK(
            differ == 0 && others == 0 && changed > 100,
            "after micro-step %lld all gradients are as expected (%lld FP8 ones and %lld others are not), and over 100 "
            "FP8 ones differ from the bf16 gradients of this micro-step (%lld do)",
            (long long)micro + 1, (long long)differ, (long long)others, (long long)changed);
    }
    const int64_t at = plain.table.layer.wup + 11;
    fp8.units.layer_gradients[at] = -INFINITY;
    reduce_scatter_gradients(&fp8, 1);
    const double norm = gradient_norm(&fp8);
    const NonfiniteStep s = nonfinite_step(&fp8, 1, norm);
    CHECK(isnan(norm) && s.magnitude == 0x7f800000u &&
              backward_position(backward_order(&fp8.table), s.position) == layer_offset(&fp8.table, 1) + at,
          "an infinite gradient of a layer makes the norm NaN and is located; found norm %g, magnitude %08x, position "
          "%lld",
          norm, s.magnitude, (long long)s.position);
    free(sum);
    trainer_free(&plain), trainer_free(&fp8);
}

// The smallest and the largest factor by which a unit was clipped.
typedef struct {
    double smallest, largest;
} Factors;

// --grad-clip with --optimizer-in-backward, in plain code: clips the units of `gradients` in the order of backward.
// norms [1 + L]: for each unit, the norm of the units done so far, the unit's included. It holds those of the last step
// (0: there was none), and gets those of this step.
static Factors clip_plainly(const ParameterTable *table, float *gradients, int64_t L, double clip, double *norms) {
    const double whole_before = norms[0];
    double squares = 0;
    Factors f = {1, 0};
    for (int64_t l = L - 1; l >= ROOT; l--) {
        const int64_t n = l == ROOT ? table->root_size : table->layer_size;
        float *unit = gradients + layer_offset(table, l);
        const double own = sqrt(squares_sum(unit, n));
        squares += own * own;
        const double so_far = (double)(float)sqrt(squares), before = norms[1 + l];
        const double norm = before > 0 ? so_far * (whole_before / before) : so_far;
        const double factor = clip / (norm + 1e-6) < 1 ? clip / (norm + 1e-6) : 1;
        CHECK(own * factor <= clip && norm >= so_far,
              "layer %lld: the norm after clipping is at most %g; found norm %g, factor %g", (long long)l, clip, own,
              factor);
        for (int64_t i = 0; i < n; i++) unit[i] *= (float)factor;
        norms[1 + l] = so_far;
        f.smallest = fmin(f.smallest, factor), f.largest = fmax(f.largest, factor);
    }
    return f;
}

// Takes 6 steps with clipping in the backward pass, and in plain code: gradients of the whole model, clipped by
// clip_plainly, then AdamW. Both give the same bits. A clip value that no norm reaches changes no bit.
static void test_clip_in_backward(void) {
    ModelConfig m = odd_model(FAMILY_QWEN3);
    m.vocab_size = 64;
    Options o = small_options(PRECISION_FP32, 2, 16);
    o.train_data = scratch_path("train.bin"), o.optimizer_in_backward = true, o.learning_rate = 0.02;
    Options clipped = o, high = o, plain = o;
    clipped.grad_clip = 0.5, high.grad_clip = 1e6, plain.optimizer_in_backward = false;
    const Options *options[] = {&o, &high, &clipped, &plain};
    Trainer t[4];
    for (int i = 0; i < 4; i++) trainer_begin(&t[i], options[i], &m);
    DataLoader data = dataloader_open(o.train_data, 16, true, 42);
    Trainer *p = &t[3];
    const size_t bytes = (size_t)p->table.total * sizeof(float);
    double norms[3] = {0, 0, 0};
    int apart = 0, whole = 0;
    for (int64_t step = 0; step < 6; step++) {
        StepRecord s[3];
        for (int i = 0; i < 3; i++) s[i] = train_step(&t[i], &data, step, 2 * step);
        read_batch(p, &data, 2 * step, 0, 0);
        micro_step(p, 1.0f / 32, step, 0);
        const double norm = sqrt(squares_sum(p->params.gradients, p->table.total));
        const Factors f = clip_plainly(&p->table, p->params.gradients, m.num_layers, clipped.grad_clip, norms);
        weights_update(p, step, 0);
        apart += f.smallest < f.largest, whole += f.largest < 1;
        CHECK(memcmp(t[2].params.master, p->params.master, bytes) == 0 &&
                  memcmp(t[2].params.exp_avg_sq, p->params.exp_avg_sq, bytes) == 0,
              "step %lld: weights and second moments have the bits of the plain code", (long long)step + 1);
        CHECK(fabs(s[2].norm / norm - 1) < 1e-12, "step %lld: the norm before clipping is %g; expected %g",
              (long long)step + 1, s[2].norm, norm);
        CHECK(s[0].norm == s[1].norm && memcmp(t[0].params.master, t[1].params.master, bytes) == 0,
              "step %lld: a clip value above all norms changes no bit", (long long)step + 1);
    }
    CHECK(apart >= 3 && whole >= 3,
          "3 steps or more clip units by different factors (found %d), and 3 or more clip all units (found %d)", apart,
          whole);
    CHECK(memcmp(t[0].params.master, t[2].params.master, bytes) != 0, "clipping changes the weights");
    dataloader_close(&data);
    for (int i = 0; i < 4; i++) trainer_free(&t[i]);
}

// If all gradients have grown or shrunk by one factor since the last step, each unit is clipped by the whole norm. In
// the first step it is clipped by the norm so far.
static void test_clip_norms(void) {
    const float before[] = {1, 2, 4};
    for (int i = 0; i < 3; i++) {
        CHECK(clip_norm_so_far(before[i] * 10, before[i], 4) == 40, "unit %d: gradients grew from norm 4 to 40", i);
        CHECK(clip_norm_so_far(before[i] / 8, before[i], 4) == 0.5, "unit %d: gradients shrank from norm 4 to 0.5", i);
        CHECK(clip_norm_so_far(before[i], 0, 0) == (double)before[i], "unit %d: the first step takes the norm so far",
              i);
    }
}

// Returns the run of a trainer, without a log.
static Run run_of(Trainer *t) {
    Run run;
    memset(&run, 0, sizeof run);
    run.ops = &trainer_ops, run.trainer = t, run.options = *t->o, run.comm = *t->comm;
    run.gpus = (GpuReading *)xcalloc(1, sizeof *run.gpus);
    run.parts.table = &t->table, run.parts.precision = &t->precision, run.parts.state = trainer_state(t);
    return run;
}

static StepRecord run_one_step(Run *run, DataLoader *data, int64_t step) {
    run->ops->start_step(run->trainer, data, step, run_skipped(run), run_samples_seen(run, step), step == 0);
    return run_report_step(run, step);
}

// With --optimizer-in-backward, find_large sees the gradients of one unit after the other, in the order of backward. It
// must find what it finds in the gradients of the whole model.
static void test_find_large_by_units(Trainer *t) {
    const float values[][3] = {{1e18f, 2e18f, INFINITY}, {1e18f, INFINITY, INFINITY}, {1e18f, INFINITY, 1},
                               {1e20f, 1, 4e21f},        {1e15f, 1e20f, 4e22f},       {(float)NAN, 1, 1}};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        float *g = t->params.gradients;
        memset(g, 0, (size_t)t->table.total * sizeof *g);
        g[layer_offset(&t->table, 1) + 6] = values[i][0], g[layer_offset(&t->table, 0) + 7] = values[i][1];
        g[t->table.root.embedding + 8] = values[i][2];
        const NonfiniteStep whole = nonfinite_step(t, 1, (double)NAN);
        NonfiniteStep units = {1, (double)NAN, 0, 0, NONFINITE_NONE, 1};
        for (int64_t l = 1; l >= ROOT; l--) {
            const int64_t begin = shard_begin(&t->plan, l);
            find_large(t, g + begin, begin, shard_elements(&t->plan, l), &units);
        }
        CHECK(units.magnitude == whole.magnitude && units.position == whole.position,
              "gradients %g, %g, %g: found by units: magnitude %08x, position %lld; expected %08x, %lld",
              (double)values[i][0], (double)values[i][1], (double)values[i][2], units.magnitude,
              (long long)units.position, whole.magnitude, (long long)whole.position);
    }
}

// Infinities in one column of the embedding: the step must be skipped, and all bits of weights and state must stay. If
// gradients are not finite or too large, the message names the place of the first one in backward order.
static void test_nonfinite(int sums) {
    Options o = small_options(PRECISION_BF16, 2, 16);
    o.grad_accum_dtype = sums;
    o.on_nonfinite = NONFINITE_SKIP;
    o.train_data = scratch_path("train.bin");
    ModelConfig m = odd_model(FAMILY_LLAMA);
    m.vocab_size = 64;
    Trainer t;
    trainer_begin(&t, &o, &m);
    DataLoader data = dataloader_open(o.train_data, 16, true, 42);
    Run run = run_of(&t);
    StepRecord s = run_one_step(&run, &data, 0);
    CHECK(!s.skipped && isfinite(s.norm) && s.step == 1 && run_samples_seen(&run, 1) == 2,
          "an ordinary step is not skipped");
    const float good = t.params.master[0];
    for (int64_t i = 0; i < t.m.vocab_size; i++)
        t.params.master[t.table.root.embedding + i * t.m.hidden_size + 5] = INFINITY;
    const size_t bytes = (size_t)t.table.total * sizeof(float);
    float *before = (float *)xcalloc(3, bytes);
    memcpy(before, t.params.master, bytes), memcpy(before + t.table.total, t.params.exp_avg, bytes),
        memcpy(before + 2 * t.table.total, t.params.exp_avg_sq, bytes);
    s = run_one_step(&run, &data, 1);
    CHECK(s.skipped && run.skipped_in_a_row == 1 && s.step == 2, "the step with an infinite weight is skipped");
    CHECK(memcmp(before, t.params.master, bytes) == 0 && memcmp(before + t.table.total, t.params.exp_avg, bytes) == 0 &&
              memcmp(before + 2 * t.table.total, t.params.exp_avg_sq, bytes) == 0,
          "a skipped step leaves weights and AdamW moments unchanged");
    for (int64_t i = 0; i < t.m.vocab_size; i++)
        t.params.master[t.table.root.embedding + i * t.m.hidden_size + 5] = good;
    spoil_loss = true, memcpy(before, t.params.master, bytes);
    s = run_one_step(&run, &data, 2);
    spoil_loss = false;
    CHECK(s.skipped && isfinite(s.norm) && memcmp(before, t.params.master, bytes) == 0,
          "a step whose loss is NaN is skipped, although its norm is %g", s.norm);
    s = run_one_step(&run, &data, 3);
    CHECK(!s.skipped && run.skipped_in_a_row == 0,
          "a step that is taken sets the count of steps skipped in a row to 0");
    const AdamwStep fourth = adamw_step_of(&o, 3, run_skipped(&run)), second = adamw_step_of(&o, 1, 0);
    CHECK(t.skipped == 2 && run_skipped(&run) == 2 && fourth.step_size == second.step_size &&
              fourth.inverse_sqrt_bias2 == second.inverse_sqrt_bias2,
          "bias corrections leave out skipped steps: %lld of 2", (long long)t.skipped);
    // A NaN that arises in the backward pass of layer 1 reaches layer 0, but not the final norm.
    t.bad_norm = NONFINITE_NONE;
    t.params.master[layer_offset(&t.table, 1) + t.table.layer.wq + 8] = -30;
    memset(t.params.gradients, 0, bytes);
    t.params.gradients[t.table.root.embedding] = t.params.gradients[layer_offset(&t.table, 0) + t.table.layer.wo] =
        t.params.gradients[layer_offset(&t.table, 1) + t.table.layer.wo + 3] = NAN;
    const char *const layer = "The problem begins in the attention block of layer 1, in the backward pass: ",
                      *const weight =
                          "; the largest weight there is -30, in model.layers.1.self_attn.q_proj.weight, element 8";
    char expected[640];
    format_checked(expected, sizeof expected,
                   "%sthe first gradient that is not finite, in backward order, is in "
                   "model.layers.1.self_attn.o_proj.weight, element 3%s",
                   layer, weight);
    CHECK(strcmp(place_of(&t, 1), expected) == 0, "the message names the first gradient that is not finite: %s",
          place_of(&t, 1));
    // The GPU trainer with --optimizer-in-backward knows only a range of 16384 elements in which the gradient lies.
    const TrainerState state = trainer_state(&t);
    NonfiniteStep block = nonfinite_step(&t, 1, (double)NAN);
    block.span = 16384;
    char place[640];
    nonfinite_place(&t.table, &state, &block, place, sizeof place);
    CHECK(strstr(place, "o_proj.weight, element 3 or one of the 16383 after it, maybe in another tensor; the largest"),
          "the message names the range: %s", place);
    // Squares that overflow: gradients grow during the backward pass, and the first large one is nearer to the cause
    // than the largest.
    memset(t.params.gradients, 0, bytes);
    t.params.gradients[t.table.root.norm] = 1, t.params.gradients[t.table.root.embedding] = -4e21f,
    t.params.gradients[layer_offset(&t.table, 1) + t.table.layer.wk + 6] = 1e20f;
    format_checked(expected, sizeof expected,
                   "%sgradients reach 4e+21, and the first large one, in backward order, is in "
                   "model.layers.1.self_attn.k_proj.weight, element 6%s",
                   layer, weight);
    CHECK(strcmp(place_of(&t, 1), expected) == 0, "the message names the first large gradient: %s", place_of(&t, 1));
    block = nonfinite_step(&t, 1, 1e22), block.span = 16384;
    nonfinite_place(&t.table, &state, &block, place, sizeof place);
    CHECK(strstr(place,
                 ": norms of blocks of 16384 gradients reach 4e+21, and the first large gradient, in backward "
                 "order, is in model.layers.1.self_attn.k_proj.weight, element 6 or one of the 16383 after it, maybe "
                 "in another tensor"),
          "the message says that the largest value is a block's norm: %s", place);
    test_find_large_by_units(&t);
    CHECK(strstr(place_of(&t, (double)NAN), "The problem begins in the final norm or lm_head, in the forward pass; "),
          "a loss that is not finite comes from the forward pass: %s", place_of(&t, (double)NAN));
    CHECK(adamw_accepts(0x1p63) && !adamw_accepts(0x1.0000001p63) && !adamw_accepts((double)INFINITY) &&
              !adamw_accepts((double)NAN),
          "adamw_accepts() takes norms up to 2^63 and no others");
    // Takes many steps with the largest gradient that is accepted and with the least averaging.
    AdamwElement largest = {0, 0, 0};
    const AdamwStep step = adamw_step(1, 1, 0, 0, 1e-8, 0, false, 1);
    for (int i = 0; i < 100; i++)
        largest = adamw_update(largest, 0x1p63f, true, &step),
        largest.exp_avg_sq = bf16_to_float(adamw_round(largest.exp_avg_sq, 0xffffffffu));
    CHECK(isfinite(largest.weight) && isfinite(largest.exp_avg) && isfinite(largest.exp_avg_sq),
          "weight and moments stay finite: moments %g and %g", (double)largest.exp_avg, (double)largest.exp_avg_sq);
    free(before);
    dataloader_close(&data);
    trainer_free(&t);
}

// ---- Whole runs.

static void write_shard(const char *name, int64_t tokens, int32_t vocabulary) {
    Failure failure;
    uint32_t *words = (uint32_t *)xcalloc((size_t)(SHARD_HEADER_INTS + tokens), sizeof(uint32_t));
    words[0] = SHARD_MAGIC_U32, words[1] = 7, words[2] = (uint32_t)tokens;
    uint32_t token = 1;
    for (int64_t i = 0; i < tokens; i++) {  // text that can be learned: a walk with some jumps
        words[SHARD_HEADER_INTS + i] = token;
        const uint64_t random = rng_u64(3, (uint64_t)i);
        token = (random % 8 == 0 ? (uint32_t)(random >> 32) : token * 5 + 3) % (uint32_t)vocabulary;
    }
    if (!file_write(scratch, name, words, (SHARD_HEADER_INTS + tokens) * 4, NULL, &failure)) die("%s", failure.text);
    free(words);
}

// Starts `train_fp8 ARGUMENTS` as a child process. ARGUMENTS are split at spaces, and @ is the test's folder. The
// output goes to FOLDER/output.
static pid_t start_run(const char *arguments) {
    char text[4096], *argv[64] = {(char *)"train_fp8", (char *)"--run"};
    int argc = 2;
    size_t n = 0;
    for (const char *c = arguments; *c; c++)
        n +=
            (size_t)snprintf(text + n, sizeof text - n, "%.*s", *c == '@' ? PATH_CAPACITY : 1, *c == '@' ? scratch : c);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    argv[argc] = NULL;
    unlink(scratch_path("output"));  // removes the output of the last run
    fflush(stdout);
    const pid_t child = fork();
    if (child < 0) die("fork: %s", strerror(errno));
    if (child > 0) return child;
    const int fd = open(scratch_path("output"), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0) _exit(126);
    execv("/proc/self/exe", argv);
    _exit(127);
}

// Returns what the newest run has printed. The text stays valid until the next call.
static char *run_output(void) {
    static char *text;
    free(text);
    text = read_file(scratch_path("output"), NULL);
    return text ? text : (text = xstrdup(""));
}

// Waits until the first steps of a run are printed, or the run ends.
static void await_steps(pid_t child, int *status) {
    for (int i = 0; i < 600; i++) {
        if (strstr(run_output(), "step       3/") || waitpid(child, status, WNOHANG) == child) break;
        usleep(50000);
    }
}

// Returns the exit status of a whole run, or -1 if a signal ended it. *output is what it printed, as from run_output().
// The arguments from `format` on are printf's, and give those of the run.
UTILS_PRINTF(2, 3) static int run_program(char **output, const char *format, ...) {
    char arguments[1024];
    va_list args;
    va_start(args, format);
    const int length = vsnprintf(arguments, sizeof arguments, format, args);
    va_end(args);
    if (length < 0 || (size_t)length >= sizeof arguments) die("too many arguments: %s", arguments);
    int status = 0;
    waitpid(start_run(arguments), &status, 0);
    *output = run_output();
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#define SMALL_RUN "tiny --train-data @/train.bin --sequence-length 32 --batch-size 2 --learning-rate 3e-3 "

// Returns the "step" lines of a log.jsonl from `first` on, without fields that depend on time and memory.
static char *loss_lines(const char *path, int64_t first) {
    char *text = read_file(path, NULL), *lines = (char *)xcalloc(65536, 1);
    if (!text) return lines;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        long long step;
        char *clock = strstr(line, ", \"ms\"");
        if (sscanf(line, "{\"type\": \"step\", \"step\": %lld", &step) != 1 || step < first || !clock) continue;
        *clock = 0;
        strcat(lines, line), strcat(lines, "\n");
    }
    free(text);
    return lines;
}

// The last step of test_resume()'s runs, and the step from which it resumes.
enum { LAST = SANITIZED ? 4 : 8, RESUMED = SANITIZED ? 3 : 6 };

static void test_resume(const char *name_of_run, const char *precision) {
    char common[256], *output;
    const char *const micro_steps = strstr(precision, "in-backward") ? "" : "--grad-accumulation-steps 2 ";
    format_checked(common, sizeof common,
                   SMALL_RUN "--warmup-steps 2 --lr-schedule cosine --num-steps %d %s--precision", LAST, micro_steps);
    CHECK(run_program(&output, "%s %s --log-dir @/log-%s", common, precision, name_of_run) == 0,
          "%s: a plain run of %d steps ends with status 0", precision, LAST);
    CHECK(run_program(&output, "%s %s --checkpoint-dir @/ck-%s --checkpoint-every 3", common, precision, name_of_run) ==
              0,
          "%s: a run that saves ends with status 0", precision);
    char from[32];
    Failure failure;
    const char *folder = scratch_path("ck-%s/step-%08d", name_of_run, LAST);
    format_checked(from, sizeof from, "step-%08d", RESUMED);
    CHECK(folder_exists(folder) && folder_remove(folder, &failure),
          "%s: the last checkpoint is there and can be removed", precision);
    CHECK(run_program(&output, "%s %s --checkpoint-dir @/ck-%s --resume --log-dir @/log2-%s", common, precision,
                      name_of_run, name_of_run) == 0 &&
              strstr(output, from),
          "%s: the run resumes from %s: %s", precision, from, output);
    char *whole = loss_lines(scratch_path("log-%s/log.jsonl", name_of_run), RESUMED + 1);
    char *resumed = loss_lines(scratch_path("log2-%s/log.jsonl", name_of_run), 0);
    CHECK(*whole && strcmp(whole, resumed) == 0, "%s: step lines of the whole and of the resumed run are equal:\n%s%s",
          precision, whole, resumed);
    free(whole), free(resumed);
}

// clip_norms are the norms of the last step (clip_plainly). A run that clips resumes from a checkpoint that lacks them,
// but not from one that has too few of them. A run that does not clip writes no clip_norms.
static void test_clip_resume(void) {
    char *output;
    const char *const run =
        SMALL_RUN "--precision bf16 --optimizer-in-backward --checkpoint-dir @/ck-clips --num-steps";
    const char *path = NULL;
    for (int step = 1; step <= 2; step++) {
        CHECK(run_program(&output, "%s %d --resume %s", run, step, step == 1 ? "" : "--grad-clip 0.5") == 0,
              "the run to step %d ends with status 0: %s", step, output);
        path = scratch_path("ck-clips/step-%08d/trainer.json", step);
        char *text = read_file(path, NULL);
        CHECK(text && !strstr(text, "\"clip_norms\"") == (step == 1), "only the run that clips writes clip_norms: %s",
              path);
        free(text);
    }
    char *text = read_file(path, NULL), *comma = text ? strchr(strstr(text, "\"clip_norms\""), ',') : NULL;
    if (!comma) die("%s has no norms", path);
    const char *next = comma + 1 + strcspn(comma + 1, ",");
    memmove(comma, next, strlen(next) + 1);  // one number less
    const size_t sealed = strlen(text) - CHECKPOINT_SEAL_BYTES;
    snprintf(text + sealed, CHECKPOINT_SEAL_BYTES + 1, CHECKPOINT_SEAL_FORMAT,
             (unsigned long long)xxhash64(text, sealed));
    Failure failure;
    CHECK(
        file_write(scratch_path("ck-clips/step-00000002"), "trainer.json", text, (int64_t)strlen(text), NULL, &failure),
        "trainer.json is written: %s", failure.text);
    free(text);
    CHECK(run_program(&output, "%s 3 --resume --grad-clip 0.5", run) == 1 &&
              strstr(output, "has 2 clip_norms instead of 3"),
          "a checkpoint with too few clip_norms is refused: %s", output);
}

// A run with delayed scaling resumes only with the --fp8-amax-history of its checkpoint. The checkpoint has
// fp8_state.safetensors; the export that the resumed run writes has no such file.
static void test_delayed_resume(void) {
    char *output;
    const char *const common = SMALL_RUN "--precision fp8 --fp8-recipe delayed --num-steps 9 --grad-accumulation-steps "
                                         "2 --checkpoint-dir @/ck-delayed --resume";
    CHECK(run_program(&output, "%s --fp8-amax-history 5", common) == 1 &&
              strstr(output, "--fp8-amax-history is 3 in the checkpoint, 5 now"),
          "another --fp8-amax-history is refused: %s", output);
    const char *state = scratch_path("ck-delayed/step-%08d/fp8_state.safetensors", LAST);
    CHECK(path_exists(state), "the checkpoint has %s", state);
    CHECK(run_program(&output, "%s --fp8-amax-history 3 --keep-checkpoints 1 --export-hf @/delayed-export", common) ==
              0,
          "the run resumes with its own --fp8-amax-history: %s", output);
    state = scratch_path("delayed-export/fp8_state.safetensors");
    CHECK(!path_exists(state), "an export has no %s", state);
}

// A run with tensorwise_bounded resumes only with the betas of its checkpoint, if these are old enough.
static void test_bounded_resume(void) {
    char *output;
    CHECK(run_program(&output, SMALL_RUN "--precision fp8 --fp8-recipe tensorwise_bounded --num-steps 9 --beta2 0.99 "
                                         "--grad-accumulation-steps 2 --checkpoint-dir @/ck-bounded --resume") == 1 &&
              strstr(output, "--beta2 is 0.999 in the checkpoint, 0.99 now, with --fp8-recipe tensorwise_bounded"),
          "another --beta2 is refused: %s", output);
    const char *const tensorwise = SMALL_RUN "--precision fp8 --fp8-recipe tensorwise --beta2 0.99 --checkpoint-dir "
                                             "@/ck-betas --grad-accumulation-steps 2 --num-steps";
    CHECK(run_program(&output, "%s 10 --branch @/ck-bounded", tensorwise) == 0,
          "recipe tensorwise branches with another --beta2: %s", output);
    CHECK(run_program(&output, "%s 11 --resume", tensorwise) == 0, "and goes on: %s", output);
    CHECK(run_program(&output, "%s 12 --fp8-recipe tensorwise_bounded --branch @/ck-betas --checkpoint-dir @/ck-again",
                      tensorwise) == 1 &&
              strstr(output, SANITIZED ? "7 steps ago, and until step 82 a" : "3 steps ago, and until step 86 a"),
          "a branch is refused while moments of the first betas count: %s", output);
}

// Runs 2 steps, and returns their step lines up to the learning rate. The caller frees them.
static char *run_lines(const char *model, const char *options) {
    char *output, *lines = (char *)xcalloc(4096, 1);
    CHECK(run_program(&output,
                      "%s --train-data @/train.bin --sequence-length 64 --batch-size 2 --learning-rate 1e-3 "
                      "--num-steps 2 %s",
                      model, options) == 0,
          "the run ends with status 0: %s: %s", options, output);
    for (char *line = strtok(output, "\n"); line; line = strtok(NULL, "\n")) {
        char *speed = strstr(line, "| lr ");
        if (strncmp(line, "step ", 5) != 0 || !speed) continue;
        *speed = 0;
        strcat(lines, line), strcat(lines, "\n");
    }
    return lines;
}

// Returns the largest relative difference of two runs' losses in 2 steps, or NaN if there are not 2.
static double lines_differ(const char *a, const char *b) {
    double largest = 0;
    int steps = 0;
    for (; (a = strstr(a, "loss ")) && (b = strstr(b, "loss ")); steps++) {
        const double difference = fabs(atof(a += 5) / atof(b += 5) - 1);
        if (check_is_worse(difference, largest)) largest = difference;
    }
    return steps == 2 ? largest : (double)NAN;
}

static void test_recipes(void) {
    char *bf16 = run_lines("small", "--precision bf16");
    for (int recipe = 0; recipe < NUM_RECIPES; recipe++) {
        char options[128];
        format_checked(options, sizeof options, "--precision fp8 --fp8-recipe %s", recipe_row(recipe)->name);
        char *lines = run_lines("small", options);
        const double difference = lines_differ(lines, bf16);
        // Each operand is off by 2-3% rms (E5M2: 5-6%), at random. That moves a loss, the mean of 128 rows, by some
        // 1e-3, and again in the next step.
        CHECK(difference > 0 && difference < 0.01,
              "%s: losses are near bf16's, but not equal; the largest relative difference is %g:\n%s%s",
              recipe_row(recipe)->name, difference, lines, bf16);
        printf("%-18s 2 steps of small: losses within %.1e of bf16\n", recipe_row(recipe)->name, difference);
        free(lines);
    }
    free(bf16);
}

// Tests which options give the results of a bf16 run, which give those of recipe tensorwise, and which give others. The
// model `tiny` has two layers.
static void test_filters(void) {
    char *bf16 = run_lines("tiny", "--precision bf16"), *tensorwise = run_lines("tiny", "--precision fp8");
    static const struct {
        const char *options;
        int same_as;
    } filtered[] = {// 0: equals bf16, 1: equals tensorwise, 2: neither
                    {"--fp8-filter attention,mlp", 0},
                    {"--fp8-filter first,layers=1-1", 0},
                    {"--fp8-recipe mxfp8 --fp8-filter qkv,attn_out,gate_up,down", 0},
                    {"--fp8-filter lm_head", 1},
                    {"--fp8-emulate", 1},
                    {"--fp8-fast-accum all", 1},
                    {"--fp8-audit 3", 1},
                    {"--fp8-filter last", 2},
                    {"--fp8-filter down", 2},
                    {"--fp8-format e4m3", 2}};
    for (size_t i = 0; i < sizeof filtered / sizeof filtered[0]; i++) {
        char options[160];
        format_checked(options, sizeof options, "--precision fp8 %s", filtered[i].options);
        char *lines = run_lines("tiny", options);
        const bool plain = strcmp(lines, bf16) == 0, fp8 = strcmp(lines, tensorwise) == 0;
        CHECK(plain == (filtered[i].same_as == 0) && fp8 == (filtered[i].same_as == 1),
              "%s gives the results of bf16, of tensorwise, or others, as expected:\n%s", filtered[i].options, lines);
        free(lines);
    }
    free(bf16), free(tensorwise);
}

// --fp8-audit writes one line for each operand of each FP8 GEMM in each audited step, and prints a table at the end. An
// audit is equal if other steps are audited, too.
static void test_audit(void) {
    char *output;
#define AUDITED_RUN SMALL_RUN "--num-steps 5 --precision fp8 --fp8-recipe rowwise --fp8-filter last --recompute layer "
    CHECK(run_program(&output, AUDITED_RUN "--fp8-audit 1 --log-dir @/each") == 0, "each step can be audited");
    CHECK(run_program(&output, AUDITED_RUN "--fp8-audit 2 --log-dir @/audit") == 0, "the run ends with status 0: %s",
          output);
    CHECK(strstr(output, "FP8 audit: rowwise") && strstr(output, "lowest SQNR: layer 0"), "the table is printed: %s",
          output);
    char *text = read_file(scratch_path("audit/log.jsonl"), NULL);
    char *each = read_file(scratch_path("each/log.jsonl"), NULL);
    const char *const step_4 = "\"fp8_audit\", \"step\": 4,", *ours = text ? strstr(text, step_4) : NULL;
    const char *const theirs = each ? strstr(each, step_4) : NULL;
    CHECK(ours && theirs && strncmp(ours, theirs, strcspn(ours, "\n")) == 0, "the audit of step 4 is of its own casts");
    free(each);
    int lines = 0, last = 0, good = 0;
    for (char *line = text ? strtok(text, "\n") : NULL; line; line = strtok(NULL, "\n")) {
        if (!strstr(line, "\"fp8_audit\"")) continue;
        lines++, last += strstr(line, "\"layer\": 1") != NULL;
        const char *db = strstr(line, "\"sqnr_db\": ");
        good += db && atof(db + 11) > 25 &&
                atof(db + 11) < 35;  // rounding to E4M3 is off by at most 2^-4 of the value, 2.4% rms: 32 dB
    }
    CHECK(lines == 2 * NUM_LINEARS * 6 && last == 0 && good == lines,
          "there are 48 lines (found %d), none of the filtered layer (found %d), all with a likely SQNR (found %d)",
          lines, last, good);
    free(text);
}

// Makes a shard of ids below `vocabulary`. During a run, all its tokens become `id`. Returns the output and the status.
// `data`: the options that name the shard.
static char *change_shard(uint32_t id, int32_t vocabulary, const char *data, int *status) {
    char command[512], *words;
    Failure failure;
    size_t bytes;
    write_shard("changes.bin", 20000, vocabulary);
    remove_tree(scratch_path("ck-changes"));
    format_checked(command, sizeof command,
                   "tiny --precision fp32 --sequence-length 16 --num-steps 1000000 --checkpoint-dir @/ck-changes %s",
                   data);
    const pid_t child = start_run(command);
    await_steps(child, status);
    words = read_file(scratch_path("changes.bin"), &bytes);
    for (size_t i = SHARD_HEADER_BYTES; i < bytes; i += 4) memcpy(words + i, &id, 4);
    const int fd = open(scratch_path("changes.bin"), O_WRONLY);
    if (fd < 0 || !file_write_at(fd, "changes.bin", 0, words, (int64_t)bytes, &failure) || close(fd))
        die("cannot rewrite the shard");
    free(words);
    waitpid(child, status, 0);
    return run_output();
}

// Checks that a run whose shard changes ends with `message`, and saves nothing. If `id` is in the model's vocabulary,
// the file's modification time reveals the change. So it does if the run has read the tokens just before the change and
// looks at the file just after it: then the case is tried again.
static void test_changed_shard(uint32_t id, int32_t vocabulary, const char *data, const char *message) {
    const char *by_time = "changes.bin: the file changed after it was opened";
    char *output = NULL;
    int status = 0;
    for (int i = 0; i < 5 && (!output || (!strstr(output, message) && strstr(output, by_time))); i++) {
        output = change_shard(id, vocabulary, data, &status);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1 && strstr(output, message),
          "the run ends with \"%s\" and exit status 1; waitpid() gave %d: %s", message, status, output);
    CHECK(!strstr(output, "saved checkpoint"), "no step is saved: %s", output);
}

// Skipped steps of whole runs with delayed scaling do not change a byte of fp8_state.safetensors, and are counted.
static void test_skipped_state(void) {
    char *output, *before = NULL;
    size_t size = 0;
    int64_t skipped = 0, moved = 0, traces = 0;
    const int status = run_program(
        &output, "tiny --train-data @/train.bin --sequence-length 64 --precision fp8 --fp8-recipe delayed "
                 "--fp8-amax-history 16 --learning-rate 1000 --num-steps 100 "
                 "--on-nonfinite skip --checkpoint-dir @/ck-skip --checkpoint-every 1 --keep-checkpoints 1000");
    CHECK(status == EXIT_NONFINITE &&
              strstr(output, "10 steps in a row were skipped, now because the gradient norm is not finite"),
          "the run ends after 10 skipped steps in a row; status %d: %s", status, output);
    for (int step = 1;; step++) {
        char warning[64];
        size_t bytes;
        char *state = read_file(scratch_path("ck-skip/step-%08d/fp8_state.safetensors", step), &bytes);
        if (!state) break;
        format_checked(warning, sizeof warning, "warning: step %d skipped", step);
        const bool same = before && bytes == size && memcmp(before, state, bytes) == 0;
        if (strstr(output, warning)) skipped++, traces += !same;
        else moved += !same;
        free(before);
        before = state, size = bytes;
    }
    CHECK(skipped >= 9 && moved >= 2 && traces == 0,
          "%lld skipped steps were saved, of which %lld changed the state (expected none); %lld other steps changed it",
          (long long)skipped, (long long)traces, (long long)moved);
    char expected[32];
    const char *path = scratch_path("ck-skip/step-%08lld/trainer.json", (long long)(skipped + moved));
    format_checked(expected, sizeof expected, "\"skipped\": %lld,", (long long)skipped);
    char *trainer = read_file(path, NULL);
    CHECK(trainer && strstr(trainer, expected), "%s says how many steps were skipped: %s", path, expected);
    free(before), free(trainer);
}

// Returns the gradient norm of the first step of a run.
static double run_norm(const char *arguments) {
    char *output;
    CHECK(run_program(&output, "tiny --train-data @/train.bin --sequence-length 16 --shuffle off --num-steps 1 %s",
                      arguments) == 0,
          "the run ends with status 0: %s: %s", arguments, output);
    const char *at = strstr(output, "| norm ");
    return at ? atof(at + 7) : (double)NAN;
}

// The norm of a gradient summed over 512 or 8 micro-steps is near that of one large batch. Over 512 micro-steps, sums
// rounded to the nearest bf16 would lose a part of the norm.
static void test_many_micro_steps(void) {
    static const struct {
        const char *options;
        double tolerance;
    } cases[] = {
        {"--precision fp32 --grad-accumulation-steps 512", 1e-4},  // precision of the printed digits
        // auto: sums in fp32. Each micro-step's gradient is rounded to the nearest bf16; these errors have random
        // signs.
        {"--grad-accumulation-steps 512", 1e-3},
        // Noise of 0.14% of the squared norm, and chance: few elements make up most of the norm of so small a model.
        {"--grad-accumulation-steps 512 --grad-accum-dtype bf16", 1e-2},
        // FP8: the noise makes the norm up to 2.2% too large (gradient_fp8.h). Rounding to nearest lost 15% of it.
        {"--grad-accumulation-steps 64 --batch-size 8 --grad-accum-dtype fp8", 2.2e-2},
        {"--grad-accumulation-steps 8 --batch-size 64", 1e-3},  // auto: bf16
        {"--grad-accumulation-steps 8 --batch-size 64 --master-weights fp32", 1e-3},
    };
    const double whole_fp32 = run_norm("--batch-size 512 --precision fp32"), whole_bf16 = run_norm("--batch-size 512");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const double want = strstr(cases[i].options, "--precision fp32") ? whole_fp32 : whole_bf16;
        const double norm = run_norm(cases[i].options);
        CHECK(fabs(norm / want - 1) < cases[i].tolerance, "%s: the gradient norm is %.4f; %.4f as one batch",
              cases[i].options, norm, want);
    }
}

static void test_signal(int signal_number, const char *dir) {
    char command[512], folder[PATH_CAPACITY];
    format_checked(command, sizeof command,
                   SMALL_RUN "--num-steps 1000000 --val-data @/train.bin --val-every 2 --checkpoint-dir @/%s", dir);
    const pid_t child = start_run(command);
    int status = 0;
    await_steps(child, &status);
    kill(child, signal_number);
    waitpid(child, &status, 0);
    const char *output = run_output();
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "signal %d: the run ends with exit status 0; waitpid() gave %d: %s", signal_number, status, output);
    const char *saved = strstr(output, "saved checkpoint after step ");
    CHECK(saved && !strstr(saved + 1, "saved checkpoint"), "signal %d: there is one save: %s", signal_number, output);
    checkpoint_name(scratch_path("%s", dir), saved ? atoll(saved + 28) : 0, "", folder, sizeof folder);
    Failure failure;
    CHECK(checkpoint_is_whole(folder, true, &failure), "signal %d: the checkpoint is whole", signal_number);
}

// Returns the mean loss of the last 20 steps of a short run, from its summary line. *first is the first loss.
static double run_loss(const char *arguments, double *first) {
    char *output;
    double loss = (double)NAN;
    CHECK(run_program(&output, SMALL_RUN "--num-steps 120 --warmup-steps 10 --val-data @/train.bin --val-steps 6 %s",
                      arguments) == 0,
          "the run ends with status 0: %s: %s", arguments, output);
    const char *summary = strstr(output, "loss of the first step "), *mean = strstr(output, "mean of the last 20 ");
    if (summary && mean) *first = atof(summary + 23), loss = atof(mean + 20);
    CHECK(strstr(output, "validation after step 120 | loss ") != NULL, "%s: the validation is printed: %s", arguments,
          output);
    return loss;
}

static void test_learning(void) {
    double first;
    const double bf16 = run_loss("--precision bf16", &first);
    CHECK(bf16 < 0.5 * first, "bf16 halves the loss: from %g to %g", first, bf16);
    // The text (write_shard) has an entropy of about 0.9 nats per token, and the losses end near that. Other rounding
    // gives another random path with an equally good end.
    const double fp8 = run_loss("--precision fp8", &first), fp32 = run_loss("--precision fp32", &first),
                 masters = run_loss("--master-weights fp32", &first);
    CHECK(fabs(fp8 / bf16 - 1) < 0.05 && fabs(fp32 / bf16 - 1) < 0.05 && fabs(masters / bf16 - 1) < 0.05,
          "losses are within 5 percent of bf16's: bf16 %g, fp8 %g, fp32 %g, bf16 with fp32 masters %g", bf16, fp8, fp32,
          masters);
    printf("loss after 120 steps from %.3f: bf16 %.4f, fp8 %.4f, fp32 %.4f, bf16 with fp32 masters %.4f\n", first, bf16,
           fp8, fp32, masters);
}

static void test_output(void) {
    char *output;
    CHECK(run_program(&output, SMALL_RUN "--num-steps 2 --sample-every 1 --max-tokens 40 --export-hf @/exported") == 0,
          "a run with samples and export ends with status 0: %s", output);
    CHECK(strstr(output, "recipe    bf16") && strstr(output, "sample after step 2: ") &&
              strstr(output, "step 1/2 | loss "),
          "recipe, sample and step are printed: %s", output);
    CHECK(run_program(&output, "@/exported --train-data @/train.bin --sequence-length 16 --num-steps 1") == 0,
          "a run from the exported folder ends with status 0: %s", output);
    CHECK(run_program(&output, "llama3.1-8b --dry-run --precision fp8") == 0,
          "a dry run without data ends with status 0: %s", output);
    CHECK(strstr(output, "parameters                 8030261248") && strstr(output, "e4m3") &&
              strstr(output, "memory plan, MiB") && strstr(output, "\n  lm_head   wgrad ") &&
              !strstr(output, "step 1/"),
          "a dry run prints model, formats and memory plan, and takes no step: %s", output);
}

static void test_refusals(void) {
    static const struct {
        int status;
        const char *arguments, *message;
    } bad[] = {
        {EXIT_OTHER, "tiny --train-data @/train.bin --sequence-length 100000", "use a shorter --sequence-length"},
        {EXIT_USAGE, "nosuch --train-data @/train.bin", "neither a folder nor one of"},
        {EXIT_USAGE, "tiny --train-data @/train.bin --dry-run on", "--dry-run takes no value, but \"on\" follows it"},
        {EXIT_USAGE, "tiny --train-data @/train.bin --resume", "needs --checkpoint-dir"},
        {EXIT_OTHER, "tiny --train-data @/train.bin --val-data @/missing.bin", "no token shard matches"},
        {EXIT_OTHER, "tiny --train-data @/train.bin --sequence-length 32 --log-dir /proc/no/such", "--log-dir"},
        {EXIT_OTHER, "tiny --train-data @/train.bin --sequence-length 32 --checkpoint-dir /proc/no/such",
         "--checkpoint-dir"},
        {EXIT_OTHER, "tiny --train-data @/train.bin --sequence-length 32 --export-hf /proc/exported", "--export-hf"},
        {EXIT_USAGE, "tiny --train-data @/train.bin --sequence-length 32 --precision fp8 --fp8-filter everything",
         "\"everything\" is none of"},
        {EXIT_UNSUPPORTED, "tiny --train-data @/train.bin --sequence-length 32 --precision fp8 --fp8-filter auto",
         "GPU"},
        {EXIT_USAGE, "tiny --train-data @/train.bin --sequence-length 32 --document-mask on",
         "it is not known which token begins a document"},
        {EXIT_USAGE, "tiny --train-data @/train.bin --sequence-length 32 --document-mask 61",
         "--train-data has no token 61"},
        {EXIT_OTHER, "@/qwen3_tiny --train-data @/large.bin --sequence-length 32",
         "use a shard made with the model's own tokenizer"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char *output;
        const int status = run_program(&output, "%s", bad[i].arguments);
        CHECK(status == bad[i].status && strstr(output, bad[i].message) && !strstr(output, "step 1/"),
              "\"%s\" is refused with its status: found %d, expected %d: %s", bad[i].arguments, status, bad[i].status,
              output);
    }
    // The disk has no room for a checkpoint of 2.2 TiB, nor for an export.
    int64_t room;
    Failure failure;
    if (!folder_room(scratch, &room, &failure)) die("%s", failure.text);
    if (room > 700ll << 30) {
        printf("skipped: a disk that is too small for a checkpoint: %s has room\n", scratch);
        return;
    }
    char *output;
    const int status =
        run_program(&output, "llama3.1-405b --train-data @/train.bin --sequence-length 32 --checkpoint-dir @/huge");
    CHECK(status == 1 && strstr(output, "a checkpoint of this model takes 2267.9 GiB"),
          "a checkpoint that does not fit is refused; status %d: %s", status, output);
    const int export_status =
        run_program(&output, "llama3.1-405b --train-data @/train.bin --sequence-length 32 --export-hf @/huge-export");
    CHECK(export_status == 1 && strstr(output, "the weights take 756.0 GiB"),
          "an export that does not fit is refused; status %d: %s", export_status, output);
}

// If a shard's tokenizer table is far smaller than the model's vocabulary, the shard probably belongs to another model,
// and the run warns. A run of `tiny` does not warn, because `tiny` takes its vocabulary from the table.
static void test_tokenizer_warning(void) {
    const uint32_t table[] = {TOKENIZER_MAGIC, TOKENIZER_VERSION, 2, 0, 0, 0};
    Failure failure;
    char *output;
    write_shard("other_train.bin", 20000, 61);
    CHECK(file_write(scratch, "other.tokenizer", (const char *)table, sizeof table, NULL, &failure),
          "the table is written: %s", failure.text);
    const int status = run_program(&output, "llama3.1-405b --train-data @/other_train.bin --sequence-length 32");
    CHECK(status == EXIT_MEMORY && strstr(output, "was the shard made for another model?"),
          "a run with a table that is too small warns; status %d: %s", status, output);
    CHECK(run_program(&output, "tiny --train-data @/other_train.bin --sequence-length 32 --num-steps 1") == 0 &&
              !strstr(output, "another model"),
          "a run of tiny does not warn: %s", output);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--run") == 0) {
        argv[1] = argv[0];
        static Trainer trainer;
        return run_trainer(argc - 1, argv + 1, &trainer_ops, &trainer);
    }
    scratch_create();
    char source[] = __FILE__;
    format_checked(goldens_folder, sizeof goldens_folder, "%s/../reference/goldens", dirname(source));
    omp_set_num_threads(2);
    write_shard("train.bin", 20000, 61);
    write_shard("large.bin", 20000, 5000);
    test_goldens();
    const ModelFamily families[] = {FAMILY_LLAMA, FAMILY_QWEN2, FAMILY_QWEN3};
    for (int i = 0; i < 3; i++) {
        test_slope(families[i], 1, 1);
        test_slope(families[i], 2, 7);
        test_slope(families[i], 1, 70);
    }
    for (int i = 0; i < 3; i++) test_mask(families[i]);
    for (int i = 0; i < 3; i++) test_documents(families[i], i == 1 ? RECOMPUTE_LAYER : RECOMPUTE_NONE);
    test_invariance(PRECISION_FP32, RECIPE_BF16);
    test_invariance(PRECISION_BF16, RECIPE_BF16);
    for (int recipe = 0; recipe < NUM_RECIPES; recipe++) test_invariance(PRECISION_FP8, recipe);
    for (int recipe = 0; recipe < NUM_RECIPES; recipe++)
        if (!SANITIZED || recipe == RECIPE_TENSORWISE || recipe == RECIPE_BLOCKWISE) test_fp8_activations(recipe);
    for (int recipe = 0; recipe < NUM_RECIPES; recipe++)
        if (!recipe_row(recipe)->delayed) test_lm_head(recipe);
    test_fp8_groups();
    test_delayed();
    test_bounded();
    test_delayed_skip();
    test_nonfinite(SUM_BF16);
    test_nonfinite(SUM_FP8);
    test_fp8_gradients();
    for (int i = 0; i < (SANITIZED ? 1 : 3); i++)
        test_blocks(families[i], i == 0 ? PRECISION_FP32 : PRECISION_BF16, i == 1 ? RECOMPUTE_LAYER : RECOMPUTE_NONE,
                    i == 0   ? STORAGE_FP32
                    : i == 1 ? STORAGE_BF16
                             : STORAGE_FP16);
    test_fp16_masters();
    test_fp16_casts();
    const int moments[] = {MOMENTS_FP32, MOMENTS_BF16, MOMENTS_COAT, MOMENTS_MSAMP},
              masters[] = {STORAGE_FP32, STORAGE_BF16, STORAGE_BF16, STORAGE_FP16};
    for (int i = 0; i < 4; i++) test_pokes(masters[i], moments[i]);
    if (!SANITIZED) test_small_updates();
    test_clip_norms();
    test_clip_in_backward();
    test_overflow(PRECISION_FP32, SUM_FP32);
    test_overflow(PRECISION_BF16, SUM_BF16);
    test_overflow(PRECISION_BF16, SUM_FP8);
    // each resume is three runs, so sanitizers see those with most kinds of state
    if (!SANITIZED) test_resume("bf16", "bf16");
    if (!SANITIZED) test_resume("fp8", "fp8");
    test_resume("msamp", "fp8 --optimizer-state msamp --master-weights fp16-stochastic");
    if (!SANITIZED) test_resume("fp32", "fp32");
    test_resume("gradients", "fp8 --grad-accum-dtype fp8 --optimizer-state msamp");
    if (!SANITIZED) test_resume("clip", "fp8 --optimizer-in-backward --grad-clip 0.5");
    test_clip_resume();
    test_resume("delayed", "fp8 --fp8-recipe delayed --fp8-amax-history 3");
    test_delayed_resume();
    test_resume("bounded", "fp8 --fp8-recipe tensorwise_bounded");
    test_bounded_resume();
    if (!SANITIZED) test_recipes();  // sanitizers see the recipes in test_invariance, on smaller layers
    if (!SANITIZED) test_filters();  // test_precision.c has the filters, also with sanitizers
    test_audit();
    test_changed_shard(65535, 320, "--train-data @/changes.bin",
                       "has id 65535, but the model's vocabulary is 320; the file changed after it was opened");
    test_changed_shard(330, 320, "--train-data @/changes.bin",
                       "has id 330, but the model's vocabulary is 320; the file changed after it was opened");
    test_changed_shard(7, 320, "--train-data @/changes.bin", "changes.bin: the file changed after it was opened");
    test_changed_shard(330, 61, "--train-data @/train.bin --val-data @/changes.bin --val-every 1",
                       "has id 330, but the model's vocabulary is 64; the file changed after it was opened");
    if (!SANITIZED) test_skipped_state();     // sanitizers see skipped steps in test_delayed_skip
    if (!SANITIZED) test_many_micro_steps();  // sanitizers see sums in test_resume and test_fp8_gradients
    test_signal(SIGTERM, "term");
    test_signal(SIGINT, "int");
    test_signal(SIGUSR1, "usr1");
    if (!SANITIZED) test_learning();  // sanitizers see whole trainings in test_resume
    test_output();
    test_refusals();
    test_tokenizer_warning();
    scratch_remove();
    return check_report();
}
