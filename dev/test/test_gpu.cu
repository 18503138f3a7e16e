// Tests the whole GPU trainer: its FP8 casts against torch's bytes, its model against goldens of transformers, and
// against itself (recompute, repetition, skipped steps, values that are not finite). gpu_runs.sh compares whole runs
// with the CPU trainer.
#define TESTING
#include "../../llmc/reference/linear.h"
#include "../../train_fp8.cu"

#include "lib/check.h"
#include "lib/flips.cuh"
#include "lib/golden.h"
#include "lib/scratch.h"

static const char *const goldens = "dev/reference/goldens";

// ---- FP8 casts.

// Casts all 65,536 bf16 values as a [256, 256] tensor with scale 1, by the kernel that casts and transposes.
static void test_casts(Fp8Format format, const char *tensor) {
    Golden g;
    Failure failure;
    memset(&g, 0, sizeof g);
    if (!safetensors_open(&g.st, "dev/reference/goldens/fp8_casts.safetensors", &failure)) die("%s", failure.text);
    const Safetensor *t = golden_tensor(&g, "", tensor);
    const SafetensorsFile *file = &g.st.files[t->file];
    static uint8_t expected[65536], row[65536], col[65536];
    static uint16_t bits[65536];
    if (!file_read_at(file->fd, file->path, t->offset, expected, 65536, &failure)) die("%s", failure.text);
    for (int i = 0; i < 65536; i++) bits[i] = (uint16_t)i;
    char *memory;
    CUDA_CHECK(cudaMalloc((void **)&memory, 65536 * 4 + 512));
    const uint32_t amax = float_bits(fp8_max(format));
    CUDA_CHECK(cudaMemset(memory, 0xee, 65536 * 4 + 512));
    CUDA_CHECK(cudaMemcpy(memory, bits, sizeof bits, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(memory + 65536 * 4, &amax, sizeof amax, cudaMemcpyHostToDevice));
    QTensor q;
    memset(&q, 0, sizeof q);
    q.row_granularity = q.col_granularity = PER_TENSOR;
    q.rowwise = (uint8_t *)memory + 65536 * 2, q.columnwise = (uint8_t *)memory + 65536 * 3, q.format = format;
    q.amax = (uint32_t *)(memory + 65536 * 4), q.rowwise_scale_inv = q.columnwise_scale_inv = memory + 65536 * 4 + 256;
    quantize_transpose(q, (const bf16 *)memory, 256, 256, 0);
    CUDA_CHECK(cudaMemcpy(row, q.rowwise, 65536, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(col, q.columnwise, 65536, cudaMemcpyDeviceToHost));
    int wrong = 0, wrong_transpose = 0;
    for (int i = 0; i < 65536; i++) {
        const bool is_nan = (bits[i] & 0x7fff) > 0x7f80;
        wrong += is_nan ? !isnan(fp8_to_float(row[i], format)) : row[i] != expected[i];
        wrong_transpose += row[i] != col[i % 256 * 256 + i / 256];
    }
    CHECK(
        wrong == 0,
        "%s: all bytes equal those of torchao's saturating cast, or are NaN where the input is NaN; %d of 65536 differ",
        tensor, wrong);
    CHECK(wrong_transpose == 0, "%s: the columnwise bytes are the rowwise ones, transposed; %d differ", tensor,
          wrong_transpose);
    CUDA_CHECK(cudaFree(memory));
    safetensors_close(&g.st);
}

// ---- Whole models.

static Options test_options(int precision, int64_t B, int64_t T) {
    Options o = options_default();
    o.model = "test", o.precision = precision, o.batch_size = B, o.sequence_length = T, o.deterministic = true,
    o.learning_rate = 1e-3;
    options_resolve(&o);
    return o;
}

// One rank, without MPI.
static const Comm *one_rank(void) {
    static Comm comm;
    comm.world = comm.local_world = comm.shard_size = comm.replicas = 1;
    return &comm;
}

// Returns the plan of the trainer's memory.
static Arena create_random(Trainer *t, const Options *o, const ModelConfig *m) {
    const Arena plan = trainer_describe(t, o, m, one_rank());
    trainer_create(t, &plan);
    initialize(t);
    t->step.targets = t->d.R;  // else a step's loss, which the tests leave at 0, is 0 / 0, and no step is taken
    return plan;
}

static Batch send_tokens(Trainer *t, const int32_t *inputs, const int32_t *targets) {
    TokenSlot *slot = &t->batches.slots[0];
    memcpy(slot->host.inputs, inputs, (size_t)t->d.R * sizeof(int32_t));
    memcpy(slot->host.targets, targets, (size_t)t->d.R * sizeof(int32_t));
    embedding_sort(slot->host.index, slot->host.inputs, t->d.R, t->d.C, fsdp_embedding_part(&t->fsdp));
    batches_send(&t->batches, slot, t->stream);
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    return slot->device;
}

// Runs a micro-step: computes the gradients of the mean loss over its tokens. last: it is the last one of its step.
static void forward_backward(Trainer *t, const int32_t *inputs, const int32_t *targets, bool last) {
    const Batch sent = send_tokens(t, inputs, targets);
    model_forward_backward(t, &sent, gradient_scale(t), last);
}

static bf16 *gradients(const Trainer *t) { return t->fsdp.transport.sums; }

static void load_golden_weights(Trainer *t, const Golden *g) {
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        int64_t n;
        float *values = golden_values(g, "param.", p->name, &n);
        if (n != parameter_elements(p)) die("golden of another shape: %s", p->name);
        bf16_bits *bits = (bf16_bits *)xcalloc((size_t)n, sizeof *bits);
        for (int64_t j = 0; j < n; j++) bits[j] = bf16_from_float(values[j]);
        gpu_state_write(&t->state, STATE_WEIGHTS, p->offset, n, bits);
        free(bits);
        free(values);
    }
    weights_changed(t);
}

// Copies between host and device wait for the trainer's stream, which does not wait for the default stream by itself.
static void *download_bytes(const void *device, int64_t bytes) {
    void *host = xcalloc((size_t)bytes, 1);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(host, device, (size_t)bytes, cudaMemcpyDeviceToHost));
    return host;
}

static void upload(void *device, const void *host, size_t bytes) {
    CUDA_CHECK(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());  // the copy may still run
}

static float *download(const bf16 *device, int64_t n) {
    bf16_bits *bits = (bf16_bits *)download_bytes(device, n * (int64_t)sizeof *bits);
    float *values = (float *)xcalloc((size_t)n, sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = bf16_to_float(bits[i]);
    free(bits);
    return values;
}

static double mean_loss(Trainer *t) {
    float *losses = (float *)download_bytes(t->acts.losses, t->d.R * (int64_t)sizeof *losses);
    double sum = 0;
    for (int64_t r = 0; r < t->d.R; r++) sum += losses[r];
    free(losses);
    return sum / (double)t->d.R;
}

// Compares the loss and every gradient with an fp32 run of transformers. The bounds are wide: the trainer rounds to
// bf16, and with FP8 the operands of linear layers' GEMMs to 3 or 2 bits of mantissa. gpu_runs.sh compares closely with
// the CPU trainer, which rounds as the GPU does.
static void test_golden(const char *name, int precision, int recompute, double loss_tolerance,
                        double gradient_tolerance) {
    Golden g = golden_open(goldens, scratch, name);
    Options o = test_options(precision, g.B, g.T);
    o.recompute = recompute;
    if (precision == PRECISION_FP8 && g.B * g.T % 16) {
        printf("skipped: %s in FP8, whose GEMMs need multiples of 16 tokens; its golden has %lld\n", name,
               (long long)(g.B * g.T));
        return golden_close(&g);
    }
    Trainer t;
    create_random(&t, &o, &g.m);
    load_golden_weights(&t, &g);
    int32_t *inputs = (int32_t *)xcalloc((size_t)(2 * t.d.R), sizeof *inputs), *targets = inputs + t.d.R;
    golden_batch(&g, inputs, targets);
    // Fills gradients with NaN, so that a gradient that is not written is detected.
    CUDA_CHECK(cudaMemsetAsync(gradients(&t), 0xff, (size_t)t.table.total * sizeof(bf16), t.stream));
    forward_backward(&t, inputs, targets, true);
    const double loss_error = fabs(mean_loss(&t) / golden_number(&g, "loss") - 1);
    CHECK(loss_error < loss_tolerance, "%s: the loss agrees with transformers'; relative error %g", name, loss_error);
    float *grads = download(gradients(&t), t.table.total);
    double worst = 0;
    for (int64_t i = 0; i < t.table.count; i++) {
        const Parameter *p = &t.table.entries[i];
        float *expected = golden_values(&g, "grad.", p->name, NULL);
        const double error = check_relative_error(grads + p->offset, expected, parameter_elements(p));
        CHECK(error < gradient_tolerance, "%s: the gradient of %s agrees with transformers'; relative error %g", name,
              p->name, error);
        if (!(error <= worst)) worst = error;
        free(expected);
    }
    printf("%-12s %s%s: relative errors: loss %.2e, worst gradient %.2e\n", name,
           precision == PRECISION_FP8 ? "fp8" : "bf16", recompute ? " recompute" : "", loss_error, worst);
    free(grads);
    free(inputs);
    trainer_destroy(&t);
    golden_close(&g);
}

static int64_t different_bits(const bf16 *a, const bf16_bits *b, int64_t n) {
    bf16_bits *bits = (bf16_bits *)download_bytes(a, n * (int64_t)sizeof *bits);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += bits[i] != b[i];
    free(bits);
    return count;
}

static StepStats download_stats(const Trainer *t) {
    StepStats stats;
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    CUDA_CHECK(cudaMemcpy(&stats, t->step.stats, sizeof stats, cudaMemcpyDeviceToHost));
    return stats;
}

static ModelConfig small_model(ModelFamily family) {
    ModelConfig m;
    model_config_preset(&m, "small");
    m.vocab_size = 320, m.num_layers = 2, m.family = family;
    m.qk_norm = family == FAMILY_QWEN3, m.qkv_bias = family == FAMILY_QWEN2;
    return m;
}

// No choice of --recompute changes a bit of loss and gradients, and neither does running a step again.
static void test_recompute_and_repetition(ModelFamily family, int precision) {
    const ModelConfig m = small_model(family);
    bf16_bits *first = NULL;
    double first_loss = 0;
    for (int run = 0; run <= 1 + RECOMPUTE_LAYER; run++) {
        Options o = test_options(precision, 2, 320);
        o.recompute = run > 1 ? run - 1 : RECOMPUTE_NONE;
        Trainer t;
        create_random(&t, &o, &m);
        weights_changed(&t);
        int32_t *tokens = (int32_t *)xcalloc((size_t)(2 * t.d.R), sizeof *tokens);
        for (int64_t i = 0; i < 2 * t.d.R; i++) tokens[i] = (int32_t)(rng_u64(7, (uint64_t)i) % 320);
        forward_backward(&t, tokens, tokens + t.d.R, true);
        const double loss = mean_loss(&t);
        if (run == 0) {
            first = (bf16_bits *)download_bytes(gradients(&t), t.table.total * (int64_t)sizeof *first);
            first_loss = loss;
        } else {
            const int64_t different = different_bits(gradients(&t), first, t.table.total);
            CHECK(loss == first_loss && different == 0,
                  "family %d precision %d, run %d, --recompute %d: loss %.9g equals %.9g, and all gradients are equal; "
                  "%lld differ",
                  family, precision, run, o.recompute, loss, first_loss, (long long)different);
        }
        free(tokens);
        trainer_destroy(&t);
    }
    free(first);
}

// A gradient that is not finite is found, and its element's weight and moments do not change. A step that is skipped
// because of it changes no weight; an ordinary step after that changes weights.
static void test_nonfinite_gate(int on_nonfinite) {
    const ModelConfig m = small_model(FAMILY_LLAMA);
    Options o = test_options(PRECISION_BF16, 1, 128);
    o.on_nonfinite = on_nonfinite;
    Trainer t;
    create_random(&t, &o, &m);
    weights_changed(&t);
    bf16_bits *before = (bf16_bits *)download_bytes(t.params.weights, t.table.total * (int64_t)sizeof *before);
    static const StateKind kinds[] = {STATE_WEIGHTS, STATE_EXP_AVG, STATE_EXP_AVG_SQ};
    const int64_t bad = layer_offset(&t.table, 1) + t.table.layer.wo + 17,
                  follows[] = {layer_offset(&t.table, 0) + t.table.layer.wdown, t.table.root.embedding + 5};
    const int steps = on_nonfinite == NONFINITE_SKIP ? 2 : 1;  // without skipping, a run ends with the first step
    for (int step = 0; step < steps; step++) {
        const bf16_bits value = step == 0 ? 0x7f80 : 0x3c00;  // infinity, then an ordinary gradient
        upload(gradients(&t) + bad, &value, sizeof value);
        for (int i = 0; i < 2; i++) upload(gradients(&t) + follows[i], &value, sizeof value);
        fsdp_begin_step(&t.fsdp, step);
        optimizer_step(&t);
        const StepStats stats = download_stats(&t);
        const int64_t moved = different_bits(t.params.weights, before, t.table.total);
        if (step == 0) {
            const NonfiniteStep what = nonfinite_step(&stats, false);
            const int64_t position = nonfinite_position(&t.table, &t.fsdp.plan.shard, what.position);
            const int64_t found = backward_position(backward_order(&t.table), position);
            CHECK(stats.control.nonfinite && what.magnitude == 0x7f800000u && found == bad,
                  "the first gradient that is not finite, in backward order, is found: nonfinite %u, element %lld, "
                  "expected %lld",
                  stats.control.nonfinite, (long long)found, (long long)bad);
            for (int k = 0; k < 3; k++) {
                bf16_bits now[2];  // room for an fp32 number, as gpu_state_read would write with FP16 masters
                gpu_state_read(&t.state, kinds[k], bad, 1, now);
                CHECK(now[0] == (k ? 0 : before[bad]),
                      "the element with an infinite gradient does not change; array %d holds %04x", k, now[0]);
            }
            if (on_nonfinite == NONFINITE_SKIP)
                CHECK(moved == 0, "a skipped step changes no weight; %lld changed", (long long)moved);
        } else {
            CHECK(!stats.control.nonfinite && moved > 0,
                  "an ordinary step after a skipped one changes weights: nonfinite %u, %lld weights changed",
                  stats.control.nonfinite, (long long)moved);
        }
    }
    free(before);
    trainer_destroy(&t);
}

// Returns amax histories and scales of delayed scaling, as bits.
static uint32_t *download_delayed(const Trainer *t) {
    return (uint32_t *)download_bytes(t->linears.scales.history,
                                      tensor_scales_delayed_elements(&t->linears.scales) * (int64_t)sizeof(uint32_t));
}

// Takes a step of two micro-steps on synthetic tokens. With `refuse`, one gradient is infinite, so that the trainer
// skips the step.
static void delayed_step(Trainer *t, int64_t step, bool refuse) {
    int32_t *tokens = (int32_t *)xcalloc((size_t)(2 * t->d.R), sizeof *tokens);
    for (int64_t i = 0; i < 2 * t->d.R; i++) tokens[i] = (int32_t)(rng_u64(7 + (uint64_t)step, (uint64_t)i) % 320);
    fsdp_begin_step(&t->fsdp, step);
    tensor_scales_copy_before(&t->linears.scales, true);
    tensor_scales_begin_step(&t->linears.scales);
    for (int64_t micro = 0; micro < 2; micro++) {
        forward_backward(t, tokens, tokens + t->d.R, micro);
        CUDA_CHECK(cudaStreamSynchronize(t->stream));
    }
    const bf16_bits infinity = 0x7f80;
    if (refuse) upload(gradients(t) + t->table.root.norm, &infinity, sizeof infinity);
    optimizer_step(t);
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    free(tokens);
}

// Delayed scaling with --on-nonfinite skip: skipped steps, even the first one, do not change amax histories and scales.
// A later step equals that of a trainer without skipped steps.
static void test_delayed_skip(int recompute) {
    const ModelConfig m = small_model(FAMILY_LLAMA);
    Options o = test_options(PRECISION_FP8, 1, 128);
    o.fp8_recipe = RECIPE_DELAYED, o.fp8_format = FP8_FORMAT_AUTO, o.fp8_all_gather = AUTO;
    o.fp8_amax_history = 3, o.on_nonfinite = NONFINITE_SKIP, o.recompute = recompute, o.grad_accumulation_steps = 2;
    options_resolve(&o);
    Trainer t, without;
    create_random(&t, &o, &m), create_random(&without, &o, &m);
    weights_changed(&t), weights_changed(&without);
    const size_t bytes = (size_t)tensor_scales_delayed_elements(&t.linears.scales) * sizeof(uint32_t);
    uint32_t *start = download_delayed(&t);
    delayed_step(&t, 0, true);
    uint32_t *refused = download_delayed(&t);
    CHECK(memcmp(start, refused, bytes) == 0, "a skipped first step leaves histories and scales unchanged");
    for (int64_t step = 1; step < 3; step++) {
        delayed_step(&t, step, false), delayed_step(&without, step, false);
        uint32_t *good = download_delayed(&t), *want = download_delayed(&without);
        CHECK(memcmp(start, good, bytes) != 0, "step %lld, which is taken, changes histories or scales",
              (long long)step);
        CHECK(memcmp(want, good, bytes) == 0,
              "step %lld after a skipped step has the histories and scales of a trainer that skipped none",
              (long long)step);
        bf16_bits *weights =
            (bf16_bits *)download_bytes(without.params.weights, t.table.total * (int64_t)sizeof *weights);
        CHECK(different_bits(t.params.weights, weights, t.table.total) == 0,
              "step %lld after a skipped step has the weights of a trainer that skipped none", (long long)step);
        delayed_step(&t, step, true);
        uint32_t *after = download_delayed(&t);
        CHECK(memcmp(good, after, bytes) == 0, "a skipped step leaves histories and scales unchanged");
        free(good), free(want), free(weights), free(after);
        // The trainer sets this flag after each step that it does not skip. delayed_step does not.
        t.linears.scales.scales_ready = without.linears.scales.scales_ready = true;
    }
    free(start), free(refused);
    trainer_destroy(&t), trainer_destroy(&without);
}

// Checks the codes that AdamW has written, and the amaxes that it has found. `amax`, `scale`: of weights before the
// step. A skipped step keeps the scales.
static void check_codes(const Trainer *t, const uint32_t *amax, const float *scale, WeightBound bound, bool skipped) {
    const TensorScales *s = &t->linears.scales;
    const int64_t tensors = tensor_count(t->d.L), slice = t->fsdp.plan.shard.layer_slices[SEGMENT_MATRICES];
    float *now = (float *)download_bytes(s->weight_scale, tensors * 4),
          *inverse = (float *)download_bytes(s->scale_inv, tensors * 16);
    uint32_t *found = (uint32_t *)download_bytes(s->amax, tensors * 4);
    uint8_t *codes = (uint8_t *)download_bytes(t->fsdp.weights.shard_fp8, t->d.L * slice);
    bf16_bits *weights = (bf16_bits *)download_bytes(t->params.weights, t->table.total * 2);
    int64_t wrong_scales = 0, wrong_codes = 0, saturated = 0;
    for (int64_t l = 0; l < t->d.L; l++)
        for (int id = 0; id < NUM_LINEARS; id++) {
            const LinearShape *shape = &t->precision.linear[id];
            const ShardRange r = shard_matrix(&t->table, &t->fsdp.plan.shard, l, shape->offset, shape->N * shape->K);
            const int64_t w = tensor_index(l, TENSOR_W, id);
            const float want = skipped ? scale[w] : weight_bound_scale(float_from_bits(amax[w]), bound);
            uint32_t largest = 0;
            for (int64_t i = 0; i < r.count; i++) {
                const float x = bf16_to_float(weights[r.shard + i]);
                const uint8_t code = fp8_from_float(x * want, FP8_E4M3);
                wrong_codes += codes[l * slice + shape->offset + i] != code;
                saturated += fabsf(x * want) > 448;
                largest = fp8_rule_amax(SCALE_TORCHAO, largest, x);
            }
            wrong_scales += now[w] != want || inverse[4 * w] != 1 / want || found[w] != largest;
        }
    CHECK(wrong_scales == 0 && wrong_codes == 0 && saturated == 0,
          "skipped %d: AdamW's codes, scales and amaxes are those of the CPU; wrong are %lld codes, %lld tensors; %lld "
          "values saturate",
          skipped, (long long)wrong_codes, (long long)wrong_scales, (long long)saturated);
    free(now), free(inverse), free(found), free(codes), free(weights);
}

// Recipe tensorwise_bounded, with each kind of weights, moments and gradients that AdamW's kernel has codes for.
static void test_bounded(int masters, int moments, int sums) {
    const ModelConfig m = small_model(FAMILY_QWEN3);
    Options o = test_options(PRECISION_FP8, 1, 128);
    o.fp8_recipe = RECIPE_BOUNDED, o.fp8_format = FP8_FORMAT_AUTO, o.fp8_all_gather = AUTO;
    o.master_weights = masters, o.optimizer_state = moments, o.grad_accum_dtype = sums;
    o.on_nonfinite = NONFINITE_SKIP, o.grad_accumulation_steps = 2, o.learning_rate = 1e-2;
    options_resolve(&o);
    Trainer t;
    create_random(&t, &o, &m);
    weights_changed(&t);
    const int64_t tensors = tensor_count(t.d.L);
    for (int64_t step = 0; step < 4; step++) {
        uint32_t *amax = (uint32_t *)download_bytes(t.linears.scales.amax, tensors * 4);
        float *scale = (float *)download_bytes(t.linears.scales.weight_scale, tensors * 4);
        if (step == 3) {  // weights that stay 0 take the slow path
            static const float zeros[1024] = {};
            gpu_state_write(&t.state, STATE_WEIGHTS, layer_offset(&t.table, 1) + t.table.layer.wdown, 1024, zeros);
            o.learning_rate = 0;
        }
        delayed_step(&t, step, step == 2 && sums == SUM_BF16);
        check_codes(&t, amax, scale, adamw_bound_of(&o, step, 0), step == 2 && sums == SUM_BF16);
        free(amax), free(scale);
    }
    trainer_destroy(&t);
}

// With an infinite weight in the MLP of layer 0, the statistics have the number of the first norm of layer 1, which
// reads the result.
static void test_bad_norm(int recompute) {
    const ModelConfig m = small_model(FAMILY_LLAMA);
    Options o = test_options(PRECISION_BF16, 1, 128);
    o.recompute = recompute;
    Trainer t;
    create_random(&t, &o, &m);
    const bf16_bits infinity = 0x7f80;
    gpu_state_write(&t.state, STATE_WEIGHTS, layer_offset(&t.table, 0) + t.table.layer.wdown + 5, 1, &infinity);
    weights_changed(&t);
    int32_t *tokens = (int32_t *)xcalloc((size_t)(2 * t.d.R), sizeof *tokens);
    CUDA_CHECK(cudaMemsetAsync(&t.step.stats->bad_norm, 0xff, sizeof t.step.stats->bad_norm, t.stream));
    forward_backward(&t, tokens, tokens + t.d.R, false);
    const StepStats stats = download_stats(&t);
    CHECK(stats.bad_norm == (uint32_t)nonfinite_norm(1, false), "the first norm of layer 1 is reported; found norm %u",
          stats.bad_norm);
    free(tokens);
    trainer_destroy(&t);
}

// ---- Receipts find flipped bits.

enum { FLIP_STEPS = 4, FLIPS = 100 };  // steps of a trial, and trials for each place

// The trainer of the trials, its memory before the first step, and what trials without a flip leave.
typedef struct {
    Trainer t;
    TrainerState access;
    char *start;
    int64_t bytes, hashes, compared;  // the arena's bytes; a receipt's hashes; bytes of weights and moments
    uint64_t *receipts, *clean;       // [FLIP_STEPS][hashes]
    char *state, *clean_state;        // host copies of weights and moments after the last step
    cudaStream_t flips;
} FlipTrials;

// Takes FLIP_STEPS steps from the start. Without a place, nothing is flipped; else bit number `trial` after the first.
static void flip_trial(FlipTrials *f, const FlipPlace *place, uint64_t trial) {
    Trainer *t = &f->t;
    Logger logger = {};
    const Receipts receipts = {&t->table, &f->access, &logger, 0, true};
    CUDA_CHECK(cudaMemcpy(t->memory, f->start, (size_t)f->bytes, cudaMemcpyDeviceToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());  // neither the host nor the trainer's stream waits for such a copy
    weights_changed(t);
    for (int64_t step = 0; step < FLIP_STEPS; step++) {
        if (place && step == 1) flip_bit(place, trial, f->flips);
        delayed_step(t, step, false);
        CUDA_CHECK(cudaDeviceSynchronize());
        receipt_hash(&receipts, f->receipts + step * f->hashes);
    }
    for (int kind = STATE_WEIGHTS; kind <= STATE_EXP_AVG_SQ; kind++)
        gpu_state_read(&t->state, (StateKind)kind, 0, t->table.total, f->state + kind * t->table.total * 2);
}

static FlipTrials *flip_trials(const Options *o, const ModelConfig *m) {
    FlipTrials *f = (FlipTrials *)xcalloc(1, sizeof *f);
    const Arena plan = create_random(&f->t, o, m);
    f->access = gpu_state_access(&f->t.state, one_rank());
    f->bytes = plan.used, f->hashes = 4 * f->t.table.count;  // weights, two moments, gradients
    f->compared = 3 * f->t.table.total * 2;
    CUDA_CHECK(cudaMalloc((void **)&f->start, (size_t)f->bytes));
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(f->start, f->t.memory, (size_t)f->bytes, cudaMemcpyDeviceToDevice));
    CUDA_CHECK(cudaStreamCreateWithFlags(&f->flips, cudaStreamNonBlocking));
    const size_t bytes = (size_t)(FLIP_STEPS * f->hashes) * sizeof(uint64_t);
    f->receipts = (uint64_t *)xcalloc(bytes, 1), f->clean = (uint64_t *)xcalloc(bytes, 1);
    f->state = (char *)xcalloc((size_t)f->compared, 1), f->clean_state = (char *)xcalloc((size_t)f->compared, 1);
    flip_trial(f, NULL, 0);
    memcpy(f->clean, f->receipts, bytes), memcpy(f->clean_state, f->state, (size_t)f->compared);
    flip_trial(f, NULL, 0);
    CHECK(memcmp(f->clean, f->receipts, bytes) == 0, "receipts of two equal runs are equal");
    return f;
}

// The kernel's hashes of odd parts of arrays are those of the CPU.
static void test_receipt_kernel(void) {
    enum { N = 4096, PARTS = 64 };
    static uint32_t host[N];
    char *device;
    CUDA_CHECK(cudaMalloc((void **)&device, sizeof host + receipt_scratch_bytes(PARTS)));
    for (int i = 0; i < N; i++) host[i] = (uint32_t)rng_u64(5, (uint64_t)i);
    upload(device, host, sizeof host);
    for (int64_t bytes = 1; bytes <= 4; bytes *= 2) {
        ReceiptPart parts[PARTS];
        uint64_t sums[PARTS];
        for (uint64_t i = 0; i < PARTS; i++) {
            parts[i].shard = (int64_t)(rng_u64(6, i) % 3000), parts[i].count = (int64_t)(rng_u64(7, i) % 1000);
            parts[i].flat = parts[i].shard + 8 * (int64_t)(rng_u64(8, i) % 100);
        }
        receipt_sums(sums, device, bytes, parts, PARTS, device + sizeof host, 0);
        int wrong = 0;
        for (int i = 0; i < PARTS; i++) wrong += sums[i] != receipt_sum(host, bytes, parts[i]);
        CHECK(wrong == 0, "hashes of parts of an array of %lld-byte elements; %d of %d differ", (long long)bytes, wrong,
              PARTS);
    }
    CUDA_CHECK(cudaFree(device));
}

// Flips FLIPS random bits of a place, and counts how many changed weights or moments, and how many of these the
// receipts find.
static void flip_place(FlipTrials *f, const FlipPlace *place) {
    int changed = 0, found = 0, missed = 0;
    for (uint64_t i = 0; i < FLIPS; i++) {
        flip_trial(f, place, i);
        const bool differs = memcmp(f->state, f->clean_state, (size_t)f->compared) != 0;
        const bool seen = memcmp(f->receipts, f->clean, (size_t)(FLIP_STEPS * f->hashes) * sizeof(uint64_t)) != 0;
        changed += differs, found += seen, missed += differs && !seen;
    }
    printf("flips in %s: %d of %d changed weights or moments, %d found by receipts\n", place->name, changed, FLIPS,
           found);
    CHECK(missed == 0 && changed >= (place->passing ? 1 : FLIPS / 2),
          "receipts find each flip in %s that changed the result: %d changed it, %d missed", place->name, changed,
          missed);
}

// ---- lm_head in FP8.

// Returns the relative error of c, on the device, against `times` the product of operands that are cast here: w [VP,
// C] or (wgrad) x [R, C], and x or dy [R, VP], by `scale` if that is above 0.
static double head_error(Trainer *t, GemmKind gemm, const bf16 *c, const bf16 *first, const bf16 *second, float scale,
                         float times) {
    const Recipe *r = t->precision.recipe;
    const GemmSizes n = precision_sizes(&t->linears.head, gemm, t->d.R);
    const Fp8Format format = precision_format(&t->precision, gemm_tensor(gemm, 1));
    const int64_t rows = gemm == GEMM_WGRAD ? t->d.R : t->d.VP, cols = gemm == GEMM_FPROP ? t->d.C : t->d.VP;
    float *x = download(second, t->d.R * cols), *w = download(first, rows * t->d.C),
          *got = download(c, n.rows * n.columns), *want = (float *)xcalloc((size_t)(n.rows * n.columns), sizeof *want);
    LinearOperand a =
        linear_operand(x, t->d.R, cols, gemm_usage(gemm, 1), r->granularity[gemm][1], r->rule, format, scale);
    LinearOperand b =
        linear_operand(w, rows, t->d.C, gemm_usage(gemm, 0), r->granularity[gemm][0], r->rule, FP8_E4M3, 0);
    linear_product(want, a, b, n.rows, n.columns, n.depth, NULL, ROUND_NONE);
    for (int64_t i = 0; i < n.rows * n.columns; i++) want[i] *= times;
    const double error = check_relative_error(got, want, n.rows * n.columns);
    linear_operand_free(&a), linear_operand_free(&b);
    free(x), free(w), free(got), free(want);
    return error;
}

// The codes that the cross-entropy has written, their transpose and scale_inv are those of a cast of the gradients in
// bf16, which acts.logits holds. True also if it writes no codes.
static bool head_codes_of_cast(Trainer *t, float grad_scale) {
    Linears *ln = &t->linears;
    const int64_t n = t->d.R * t->d.VP;
    const float amax = precision_dlogits_amax(grad_scale);
    if (!linears_head_codes(ln, grad_scale).rowwise) return true;
    uint8_t *bytes[2];
    for (int cast = 0; cast < 2; cast++) {
        QTensor q = linears_head_gradient(ln, NULL, t->d.R, grad_scale);
        CUDA_CHECK(cudaMemcpyAsync(q.amax, &amax, sizeof amax, cudaMemcpyHostToDevice, t->stream));
        q.data = t->acts.logits;
        if (cast) linears_head_cast(ln, &q, t->d.R, t->d.VP);
        CUDA_CHECK(cudaStreamSynchronize(t->stream));
        bytes[cast] = (uint8_t *)xcalloc((size_t)(2 * n) + sizeof(float), 1);
        CUDA_CHECK(cudaMemcpy(bytes[cast], q.rowwise, (size_t)n, cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(bytes[cast] + n, q.columnwise, (size_t)n, cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(bytes[cast] + 2 * n, q.columnwise_scale_inv, sizeof(float), cudaMemcpyDeviceToHost));
    }
    const bool same = memcmp(bytes[0], bytes[1], (size_t)(2 * n) + sizeof(float)) == 0;
    free(bytes[0]), free(bytes[1]);
    return same;
}

// The codes of rows that are cast alone are those of the same rows in a larger chunk. (build/bench_cross_entropy checks
// this of codes that the cross-entropy writes.)
static bool head_codes_of_chunks(Trainer *t, float grad_scale) {
    Linears *ln = &t->linears;
    const int64_t R = t->d.R, first = R / 2, widest = max_i64(t->d.C, t->d.VP);
    uint8_t *codes = (uint8_t *)xcalloc((size_t)(R * widest), 1), *part = (uint8_t *)xcalloc((size_t)(R * widest), 1);
    bool same = true;
    for (int i = 0; i < 4; i++) {
        const bool gradient = i / 2, columns = i % 2;
        const QTensor *h = gradient ? &ln->head_tensors.dlogits : &ln->head_tensors.y;
        const int64_t C = gradient ? t->d.VP : t->d.C, pieces = columns ? C : 1, size = (R - first) * C / pieces;
        if (!(columns ? h->columnwise : h->rowwise)) continue;
        if (gradient && linears_head_codes(ln, grad_scale).rowwise) continue;
        const bf16 *data = gradient ? t->acts.logits : t->acts.y_final;
        for (int chunk = 0; chunk < 2; chunk++) {
            const int64_t rows = chunk ? R - first : R;
            const bf16 *from = data + (chunk ? first * C : 0);
            const QTensor q =
                gradient ? linears_head_gradient(ln, from, rows, grad_scale) : linears_head_input(ln, from, rows);
            CUDA_CHECK(cudaStreamSynchronize(t->stream));
            CUDA_CHECK(cudaMemcpy(chunk ? part : codes, columns ? q.columnwise : q.rowwise, (size_t)(rows * C),
                                  cudaMemcpyDeviceToHost));
        }
        for (int64_t piece = 0; piece < pieces; piece++)
            same = same && memcmp(codes + (piece + 1) * R * C / pieces - size, part + piece * size, (size_t)size) == 0;
    }
    free(codes), free(part);
    return same;
}

// --fp8-lm-head: logits, with `on` the gradient of lm_head's input, and with `all` that of its weight, are products of
// the bytes that the CPU casts. A second chunk adds to the gradient of the weight.
static void test_lm_head(int recipe, int head) {
    ModelConfig m = small_model(FAMILY_LLAMA);
    m.vocab_size = 380;  // padded to 384, a multiple of 128
    Options o = test_options(PRECISION_FP8, 1, 256);
    o.fp8_recipe = recipe, o.fp8_lm_head = head, o.fp8_emulate = !recipe_native(recipe_row(recipe), 9, 0);
    o.fp8_format = FP8_FORMAT_AUTO, o.fp8_all_gather = AUTO;
    options_resolve(&o);
    Trainer t;
    create_random(&t, &o, &m);
    weights_changed(&t);
    int32_t *tokens = (int32_t *)xcalloc((size_t)(2 * t.d.R), sizeof *tokens);
    for (int64_t i = 0; i < 2 * t.d.R; i++) tokens[i] = (int32_t)(rng_u64(7, (uint64_t)i) % 380);
    const Batch sent = send_tokens(&t, tokens, tokens + t.d.R);
    const float grad_scale = 1 / (float)t.d.R;
    const bool whole = t.precision.recipe->granularity[GEMM_DGRAD][1] == PER_TENSOR;
    const float scale =
        whole ? fp8_rule_scale(t.precision.recipe->rule, precision_dlogits_amax(grad_scale), t.precision.dy_format) : 0;
    fsdp_begin_micro_step(&t.fsdp, 0);
    model_forward(&t, &sent);
    linears_head_begin(&t.linears, root_weights(&t).lm_head, t.acts.y_final, true);
    const QTensor y = logits_forward(&t, 0, t.d.R);
    CUDA_CHECK(cudaStreamSynchronize(t.stream));
    const double logits = head_error(&t, GEMM_FPROP, t.acts.logits, root_weights(&t).lm_head, t.acts.y_final, 0, 1);
    CHECK(logits < 0x1p-8, "%s, head %d: logits are FP8 products, rounded to bf16: relative error %g",
          t.precision.recipe->name, head, logits);
    fsdp_begin_gradients(&t.fsdp, ROOT);
    const ProducedCodes codes = linears_head_codes(&t.linears, grad_scale);
    CHECK((codes.rowwise != NULL) == (whole && head == LM_HEAD_ALL),
          "%s, head %d: the cross-entropy writes codes only of one scale that both GEMMs read",
          t.precision.recipe->name, head);
    const uint32_t dropped = precision_dlogits_dropped(&t.precision);
    if (codes.rowwise)  // keeps the logits
        cross_entropy_loss_and_gradient(t.acts.losses, t.acts.logits, sent.targets, t.d.R, t.d.V, t.d.VP, grad_scale,
                                        dropped, codes, t.stream);
    cross_entropy_loss_and_gradient(t.acts.losses, t.acts.logits, sent.targets, t.d.R, t.d.V, t.d.VP, grad_scale,
                                    dropped, ProducedCodes{}, t.stream);
    bf16 *gradient = root_gradients(&t).lm_head;
    for (int times = 1; times <= 2; times++) {
        linears_head_backward(&t.linears, t.acts.dbranch, gradient, t.acts.logits, &y, t.d.R, grad_scale, times > 1);
        CUDA_CHECK(cudaStreamSynchronize(t.stream));
        const double dw = head_error(&t, GEMM_WGRAD, gradient, t.acts.y_final, t.acts.logits, scale, (float)times);
        CHECK(head == LM_HEAD_ALL || !recipe_is_fp8(t.precision.recipe, GEMM_WGRAD) ? dw < 0x1p-8 : dw > 0x1p-8,
              "%s, head %d: the weight's gradient, added %d times, is the FP8 product exactly with all: error %g",
              t.precision.recipe->name, head, times, dw);
    }
    const double dx = head_error(&t, GEMM_DGRAD, t.acts.dbranch, root_weights(&t).lm_head, t.acts.logits, scale, 1);
    CHECK(head >= LM_HEAD_ON ? dx < 0x1p-8 : dx > 0x1p-8,
          "%s, head %d: the input's gradient is the FP8 product exactly with on: relative error %g",
          t.precision.recipe->name, head, dx);
    float *alone = download(t.acts.dbranch, t.d.R * t.d.C);
    CHECK(head_codes_of_cast(&t, grad_scale), "%s, head %d: the cross-entropy's codes are those of a cast",
          t.precision.recipe->name, head);
    const bool same_codes = head_codes_of_chunks(&t, grad_scale);
    loss_forward_backward(&t, &sent, grad_scale);
    CUDA_CHECK(cudaStreamSynchronize(t.stream));
    float *trained = download(t.acts.dbranch, t.d.R * t.d.C);
    CHECK(memcmp(alone, trained, (size_t)(t.d.R * t.d.C) * sizeof *alone) == 0,
          "%s, head %d: the trainer rounds the gradients of logits as here", t.precision.recipe->name, head);
    free(alone), free(trained);
    CHECK(same_codes, "%s, head %d: codes do not depend on the size of chunks", t.precision.recipe->name, head);
    free(tokens);
    trainer_destroy(&t);
}

static void test_flips(void) {
    const ModelConfig m = small_model(FAMILY_LLAMA);
    Options o = test_options(PRECISION_FP8, 1, 128);
    o.grad_accumulation_steps = 2, o.grad_clip = 1;
    options_resolve(&o);
    FlipTrials *f = flip_trials(&o, &m);
    FlipPlace places[FLIP_PLACES];
    flip_places(places, &f->t);
    for (int i = 0; i < FLIP_PLACES; i++) flip_place(f, &places[i]);
    CUDA_CHECK(cudaFree(f->start));
    trainer_destroy(&f->t);
    free(f->receipts), free(f->clean), free(f->state), free(f->clean_state), free(f);
}

int main(void) {
    scratch_create();
    test_casts(FP8_E4M3, "e4m3");
    test_casts(FP8_E5M2, "e5m2");
    const char *const names[] = {"llama_tiny", "llama31_tiny", "qwen2_tiny", "qwen3_tiny"};
    for (int i = 0; i < 4; i++) {
        test_golden(names[i], PRECISION_BF16, RECOMPUTE_NONE, 1e-2, 3e-2);
        test_golden(names[i], PRECISION_BF16, RECOMPUTE_LAYER, 1e-2, 3e-2);
        test_golden(names[i], PRECISION_FP8, RECOMPUTE_NONE, 3e-2, 0.35);
    }
    for (int family = 0; family < 3; family++) {
        test_recompute_and_repetition((ModelFamily)family, PRECISION_BF16);
        test_recompute_and_repetition((ModelFamily)family, PRECISION_FP8);
    }
    test_nonfinite_gate(NONFINITE_SKIP);
    test_nonfinite_gate(NONFINITE_STOP);
    test_delayed_skip(RECOMPUTE_NONE);
    test_delayed_skip(RECOMPUTE_LAYER);
    for (int sums : {SUM_BF16, SUM_FP32, SUM_FP8}) {
        test_bounded(STORAGE_BF16, MOMENTS_BF16, sums);
        test_bounded(STORAGE_BF16_NEAREST, MOMENTS_FP32, sums);
        test_bounded(STORAGE_FP32, MOMENTS_BF16, sums);
        test_bounded(STORAGE_FP32, MOMENTS_FP32, sums);
    }
    test_bad_norm(RECOMPUTE_NONE);
    test_bad_norm(RECOMPUTE_LAYER);
    test_receipt_kernel();
    test_flips();
    for (int recipe = 0; recipe < NUM_RECIPES; recipe++)
        for (int head = LM_HEAD_FORWARD; head <= LM_HEAD_ALL && !recipe_row(recipe)->delayed; head++)
            if (head < LM_HEAD_ALL || recipe_row(recipe)->granularity[GEMM_WGRAD][1] != PER_ROW)
                test_lm_head(recipe, head);
    scratch_remove();
    return check_report();
}
