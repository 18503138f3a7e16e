// The programs gradient_bias: gradients of micro-batches by two arithmetics from equal weights, and the bias of one.
//
// Two trainers with equal weights compute the gradients of the same micro-batches: one in BF16, the other by the
// precision on the command line. A first pass sums the gradients and their errors over micro-batches. A second pass
// computes all of them again and takes their inner products with these sums (gradient_bias.h), since no memory holds
// the gradients of all micro-batches. Both passes must give equal bits.
#ifndef LLMC_BIAS_RUN_H
#define LLMC_BIAS_RUN_H

#include "../reference/gradient_bias.h"
#include "train.h"

enum { BIAS_CHUNK = 1 << 18, BIAS_LEAST = 8, BIAS_CHECKPOINTS = 16 };

static const char *const BIAS_USAGE =
    "usage: gradient_bias MODEL --bias-out FILE [options] [trainer options]\n"
    "Compares gradients by --precision and its options with those in BF16, and writes FILE, as JSON. With --precision\n"
    "bf16 both are BF16, but wgrad of one sums in another order (on the CPU: rounds at random): the null arm.\n"
    "  --micro-batches N   micro-batches of --batch-size sequences (64)\n"
    "  --checkpoints LIST  folders of more checkpoints, with commas between, to compare their biases with MODEL's\n"
    "  --only PLACE        FP8 in this linear layer or GEMM alone: LAYER.LINEAR or LAYER.LINEAR.GEMM, such as "
    "3.down.dgrad\n"
    "  --plant PLACE=X     for tests: multiplies the result of the GEMM LAYER.LINEAR.GEMM by X\n"
    "scripts/gradient_bias.sh runs this program for each recipe and prints a table.\n";

// A linear layer of a transformer layer, or one of its GEMMs. layer -1: none; gemm -1: all three.
typedef struct {
    int64_t layer;
    int linear, gemm;
} BiasPlace;

// How the GEMMs of the second trainer differ from the options. `active` while it computes.
typedef struct {
    BiasPlace only, plant;
    float factor;
    bool active;
    uint64_t random;  // key of random bits; a function of the micro-batch and of how many GEMMs it has had
} BiasHooks;

static inline BiasHooks *bias_hooks(void) {
    static BiasHooks hooks = {{-1, 0, -1}, {-1, 0, -1}, 1, false, 0};
    return &hooks;
}

static inline bool bias_is_at(BiasPlace p, int64_t layer, int linear, int gemm) {
    return p.layer == layer && p.linear == linear && (p.gemm < 0 || p.gemm == gemm);
}

// True if --only keeps this GEMM in bf16 although its linear layer is FP8.
static inline bool bias_keeps_bf16(int64_t layer, int linear, int gemm) {
    const BiasHooks *h = bias_hooks();
    return h->active && h->only.gemm >= 0 && !bias_is_at(h->only, layer, linear, gemm);
}

// Returns what the GEMM's result is to be multiplied by.
static inline float bias_planted(int64_t layer, int linear, int gemm) {
    const BiasHooks *h = bias_hooks();
    return h->active && bias_is_at(h->plant, layer, linear, gemm) ? h->factor : 1;
}

// A part of one tensor in the flat array of parameters. Tensor l * NUM_LINEARS + id is a weight matrix; the last is the
// rest: all other parameters.
typedef struct {
    int64_t offset, count, tensor;
} BiasChunk;

typedef struct {
    BiasChunk *chunks;
    int64_t count;
    float *errors, *gradients, *before;  // E and G, and the E of the checkpoint before or NULL [elements of parameters]
    BiasJoin join;
    double *terms;  // [count][BIAS_TERMS] of one micro-batch
} BiasWork;

// The operations of a trainer that the program needs beside TrainerOps.
typedef struct {
    const TrainerOps *trainer;
    void *plain, *other;
    void (*sum_otherwise)(void *t);  // for the null arm: lets wgrad of trainer t sum in another order; may be NULL
    // Computes the gradients of the mean loss over the micro-batch that begins with first_sample, and waits for them.
    void (*gradients)(void *t, DataLoader *data, int64_t first_sample);
    float *(*sum_memory)(int64_t elements);  // uninitialized, in the memory of gradients
    void *(*shared_memory)(int64_t bytes);   // zeroed; the host and `join` read it
    void (*join)(void *plain, void *other, const BiasWork *w);
} BiasOps;

typedef struct {
    const BiasOps *ops;
    Run run;  // that of the second trainer
    Options plain_options;
    TrainerParts parts[2];  // ops->plain's and ops->other's
    BiasWork work;
    int64_t micro_batches, tensors, rows;  // rows: tensors, then each linear layer over all layers, and the whole
    double *terms, *again;                 // [micro_batches][rows][BIAS_TERMS] of both passes
    const char *out, *more;
    const char *checkpoints[BIAS_CHECKPOINTS];
    int64_t num_checkpoints;
    char filter[256];
    BiasInterval *last;  // [rows][BIAS_STATISTICS] of the checkpoint before
} BiasRun;

// ---- the command line

// Reads a place such as 3.down.dgrad, up to `end`. Dies if it is none.
static inline BiasPlace bias_place(const char *option, const char *text, const char *end) {
    static const char *const linears[NUM_LINEARS] = {"qkv", "attn_out", "gate_up", "down"};
    char linear[16] = "", gemm[16] = "", word[64];
    long long layer = -1;
    int n = 0, m = 0;
    BiasPlace p = {-1, -1, -1};
    format_checked(word, sizeof word, "%.*s", (int)min_i64(60, end - text), text);
    const int found = sscanf(word, "%lld.%15[a-z_]%n.%15[a-z]%n", &layer, linear, &n, gemm, &m);
    for (int i = 0; i < NUM_LINEARS; i++) p.linear = strcmp(linear, linears[i]) ? p.linear : i;
    for (int i = 0; i < NUM_GEMMS; i++) p.gemm = strcmp(gemm, gemm_kind_name((GemmKind)i)) ? p.gemm : i;
    if (found < 2 || layer < 0 || p.linear < 0 || (found == 3) != (p.gemm >= 0) || word[found == 3 ? m : n])
        die_with(EXIT_USAGE,
                 "%s: \"%s\" is no place such as 3.down or 3.down.dgrad; linear layers are qkv, attn_out, "
                 "gate_up and down, GEMMs fprop, dgrad and wgrad",
                 option, word);
    p.layer = layer;
    return p;
}

static inline void bias_option(BiasRun *b, const char *name, const char *value) {
    BiasHooks *h = bias_hooks();
    const char *equals = strchr(value, '=');
    char *end;
    if (strcmp(name, "--bias-out") == 0) b->out = value;
    else if (strcmp(name, "--checkpoints") == 0) b->more = value;
    else if (strcmp(name, "--only") == 0) h->only = bias_place(name, value, value + strlen(value));
    else if (strcmp(name, "--plant") == 0) {
        h->plant = bias_place(name, value, equals ? equals : value + strlen(value));
        h->factor = equals ? strtof(equals + 1, &end) : 0;
        if (!equals || *end || !(h->factor > 0) || h->plant.gemm < 0)
            die_with(EXIT_USAGE, "--plant: \"%s\" is no GEMM and factor such as 3.down.wgrad=1.005", value);
    } else {
        b->micro_batches = strtoll(value, &end, 10);
        if (*end || b->micro_batches < BIAS_LEAST || b->micro_batches > 1 << 20)
            die_with(EXIT_USAGE, "--micro-batches: \"%s\" is no whole number from %d on", value, BIAS_LEAST);
    }
}

// Takes this program's options out of the command line. Returns the other words, to which it adds --deterministic.
static inline char **bias_options(BiasRun *b, int *argc, char **argv) {
    static const char *const own[] = {"--micro-batches", "--bias-out", "--checkpoints", "--only", "--plant"};
    char **rest = (char **)xcalloc((size_t)*argc + 2, sizeof *rest);
    int n = 0;
    b->micro_batches = 64;
    for (int i = 0; i < *argc; i++) {
        bool is_own = false;
        for (size_t k = 0; k < sizeof own / sizeof *own; k++) is_own |= strcmp(argv[i], own[k]) == 0;
        if (strcmp(argv[i], "--help") == 0) exit(printf("%s", BIAS_USAGE) < 0);
        if (is_own && i + 1 == *argc) die_with(EXIT_USAGE, "%s needs a value", argv[i]);
        if (is_own) bias_option(b, argv[i], argv[i + 1]), i++;
        else rest[n++] = argv[i];
    }
    static char deterministic[] = "--deterministic";
    rest[n++] = deterministic;
    *argc = n;
    return rest;
}

// Dies if the options ask for what this program cannot do, or if a place or a checkpoint is not the model's.
static inline void bias_check(BiasRun *b) {
    const Options *o = &b->run.options;
    const BiasHooks *h = bias_hooks();
    const int64_t L = b->run.setup.model.num_layers, B = o->batch_size,
                  needed = (1 + b->num_checkpoints) * b->micro_batches * B;
    if (!b->out) die_with(EXIT_USAGE, "--bias-out FILE is missing; --help prints the options");
    if (b->run.comm.world > 1 || o->grad_accumulation_steps > 1 || o->optimizer_in_backward || o->resume || *o->mix ||
        o->dry_run || options_fp8_gradients(o) || options_fp16_weights(o) || o->precision == PRECISION_FP32)
        die_with(
            EXIT_USAGE,
            "gradient_bias runs on one rank, in bf16 or fp8, and takes no --mix, "
            "--grad-accumulation-steps, --optimizer-in-backward, --resume, --dry-run, FP8 gradients or FP16 weights");
    if (max_i64(h->only.layer, h->plant.layer) >= L)
        die_with(EXIT_USAGE, "the model has no layer %lld; it has 0 to %lld",
                 (long long)max_i64(h->only.layer, h->plant.layer), (long long)L - 1);
    if (h->only.layer >= 0 && (*o->fp8_filter || o->precision != PRECISION_FP8 || (h->only.gemm >= 0 && L == 1)))
        die_with(EXIT_USAGE, "--only needs --precision fp8 without --fp8-filter, and for one GEMM a model of 2 layers");
    if (h->only.layer >= 0 && o->fp8_lm_head)
        die_with(EXIT_USAGE, "--only keeps all other GEMMs in bf16, and --fp8-lm-head wants lm_head's in FP8; leave it "
                             "out, or with --fast add --fp8-lm-head off");
    if (b->run.setup.train.num_sequences < needed)
        die_with(EXIT_USAGE,
                 "--train-data has %lld sequences, but %lld micro-batches of %lld need %lld: each checkpoint "
                 "reads other data",
                 (long long)b->run.setup.train.num_sequences, (long long)b->micro_batches, (long long)B,
                 (long long)needed);
}

// Splits --checkpoints, and dies if one does not fit MODEL.
static inline void bias_find_checkpoints(BiasRun *b) {
    ParameterTable table = parameter_table(&b->run.setup.model);
    Failure failure;
    for (char *at = b->more ? strtok(xstrdup(b->more), ",") : NULL; at; at = strtok(NULL, ",")) {
        if (b->num_checkpoints == BIAS_CHECKPOINTS)
            die_with(EXIT_USAGE, "--checkpoints names more than %d folders", BIAS_CHECKPOINTS);
        if (!folder_exists(at) || !model_has_weights(at))
            die_with(EXIT_USAGE, "--checkpoints: %s holds no weights", at);
        if (!model_verify(at, INT64_MAX, &failure)) die("--checkpoints %s: %s", at, failure.text);
        model_check_weights(at, &b->run.setup.model, &table);
        b->checkpoints[b->num_checkpoints++] = at;
    }
    parameter_table_free(&table);
}

// With --only: sets the filter that keeps all other linear layers in bf16.
static inline void bias_filter(BiasRun *b) {
    static const char *const others[NUM_LINEARS] = {"attn_out,gate_up,down", "qkv,gate_up,down", "qkv,attn_out,down",
                                                    "qkv,attn_out,gate_up"};
    const BiasPlace p = bias_hooks()->only;
    const long long l = (long long)p.layer, last = (long long)b->run.setup.model.num_layers - 1;
    if (l < 0) return;
    char below[32] = "", above[48] = "";
    if (l > 0) format_checked(below, sizeof below, "layers=0-%lld,", l - 1);
    if (l < last) format_checked(above, sizeof above, "layers=%lld-%lld,", l + 1, last);
    format_checked(b->filter, sizeof b->filter, "%s%s%s", below, above, others[p.linear]);
    b->run.options.fp8_filter = b->filter;
}

// ---- passes

// Adds the chunks of one parameter.
static inline void bias_add_chunks(BiasWork *w, const Parameter *p, int64_t tensor) {
    const int64_t n = parameter_elements(p);
    for (int64_t at = 0; at < n; at += BIAS_CHUNK) {
        const BiasChunk c = {p->offset + at, min_i64(BIAS_CHUNK, n - at), tensor};
        if (w->chunks) w->chunks[w->count] = c;
        w->count++;
    }
}

// Lists the chunks of all parameters; without w->chunks only counts them.
static inline void bias_list_chunks(BiasWork *w, const ParameterTable *t) {
    int64_t linear = -1, layer = ROOT;
    w->count = 0;
    for (int64_t i = 0; i < t->count; i++) {
        const Parameter *p = &t->entries[i];
        if (p->layer != layer) layer = p->layer, linear = -1;
        if ((p->flags & (PARAM_FP8 | PARAM_JOINED)) == PARAM_FP8) linear++;
        bias_add_chunks(w, p, p->flags & PARAM_FP8 ? layer * NUM_LINEARS + linear : t->num_layers * NUM_LINEARS);
    }
}

// Drops what a pass leaves in a trainer: with recipe delayed, histories and scales.
static inline void bias_reset(const BiasRun *b, void *trainer, const TrainerState *s) {
    float *zeros = (float *)xcalloc((size_t)(s->delayed_tensors * (s->delayed_window + 1)) + 1, sizeof *zeros);
    if (s->delayed_window) s->write(s->context, STATE_AMAX_HISTORY, 0, s->delayed_tensors * s->delayed_window, zeros);
    if (s->delayed_tensors) s->write(s->context, STATE_SCALES, 0, s->delayed_tensors, zeros);
    free(zeros);
    b->ops->trainer->weights_changed(trainer);
}

// Sums the chunks' terms of a micro-batch into its rows.
static inline void bias_sum_chunks(const BiasRun *b, double *terms) {
    for (int64_t c = 0; c < b->work.count; c++) {
        const int64_t tensor = b->work.chunks[c].tensor, whole = b->rows - 1,
                      linear = tensor == b->tensors - 1 ? tensor : b->tensors + tensor % NUM_LINEARS;
        for (int k = 0; k < BIAS_TERMS; k++) {
            const double x = b->work.terms[c * BIAS_TERMS + k];
            terms[tensor * BIAS_TERMS + k] += x, terms[whole * BIAS_TERMS + k] += x;
            if (linear != tensor) terms[linear * BIAS_TERMS + k] += x;
        }
    }
}

// Computes the gradients of all micro-batches of checkpoint number c by both trainers, and their terms [micro_batches]
// [rows][BIAS_TERMS]. `first`: also their sums.
static inline void bias_pass(BiasRun *b, int64_t c, bool first, double *terms) {
    const BiasOps *ops = b->ops;
    const int64_t B = b->run.options.batch_size, row = b->rows * BIAS_TERMS;
    memset(terms, 0, (size_t)(b->micro_batches * row) * sizeof *terms);
    bias_reset(b, ops->plain, &b->parts[0].state), bias_reset(b, ops->other, &b->parts[1].state);
    for (int64_t i = 0; i < b->micro_batches; i++) {
        const int64_t sample = (c * b->micro_batches + i) * B;
        activity_phase(PHASE_TRAINING, i + 1);
        ops->gradients(ops->plain, &b->run.setup.train, sample);
        bias_hooks()->active = true, bias_hooks()->random = (uint64_t)sample;
        ops->gradients(ops->other, &b->run.setup.train, sample);
        bias_hooks()->active = false;
        b->work.join = !first ? BIAS_READ : i ? BIAS_ADD : BIAS_STORE;
        ops->join(ops->plain, ops->other, &b->work);
        bias_sum_chunks(b, terms + i * row);
    }
}

// Dies unless both passes found the same gradients, and finite ones.
static inline void bias_compare_passes(const BiasRun *b) {
    for (int64_t i = 0; i < b->micro_batches * b->rows; i++) {
        const double *x = b->terms + i * BIAS_TERMS, *y = b->again + i * BIAS_TERMS;
        if (!isfinite(x[BIAS_EE] + x[BIAS_GG]))
            die_with(EXIT_NONFINITE, "micro-batch %lld has a gradient that is not finite", (long long)(i / b->rows));
        if (memcmp(x, y, BIAS_OWN * sizeof *x))
            die("micro-batch %lld has other gradients when they are computed again, so the intervals would be wrong",
                (long long)(i / b->rows));
    }
}

// ---- the report

static inline void bias_row_name(const BiasRun *b, int64_t row, char *name, size_t capacity) {
    const LinearShape *s = b->parts[0].precision->linear;
    if (row == b->rows - 1) format_checked(name, capacity, "whole");
    else if (row >= b->tensors) format_checked(name, capacity, "%s", s[row - b->tensors].name);
    else if (row == b->tensors - 1) format_checked(name, capacity, "rest");
    else format_checked(name, capacity, "%lld.%s", (long long)row / NUM_LINEARS, s[row % NUM_LINEARS].name);
}

// Appends a member: the interval times `factor`, or null if it is not known.
static inline void bias_write(JsonText *out, const char *key, BiasInterval x, double factor, bool known) {
    json_text_add(out, ",\"%s\":", key);
    if (!known || !isfinite((x.low + x.high) * factor)) json_text_add(out, "null");
    else json_text_add(out, "[%.9g,%.9g,%.9g]", x.estimate * factor, x.low * factor, x.high * factor);
}

// Appends one row. Ratios to a mean gradient that cannot be told from zero are null.
static inline void bias_write_row(BiasRun *b, JsonText *out, int64_t row, bool again) {
    BiasInterval x[BIAS_STATISTICS], *last = b->last + row * BIAS_STATISTICS;
    char name[64];
    bias_jackknife(x, b->again + row * BIAS_TERMS, b->micro_batches, b->rows * BIAS_TERMS);
    bias_row_name(b, row, name, sizeof name);
    const bool gradient = x[BIAS_GRADIENT].low > 0;
    const double product = x[BIAS_SQUARED].estimate * last[BIAS_SQUARED].estimate;
    json_text_add(out, "%s{\"name\":\"%s\"", row ? ",\n" : "", name);
    bias_write(out, "squared_bias", x[BIAS_SQUARED], 1, true);
    bias_write(out, "squared_gradient", x[BIAS_GRADIENT], 1, true);
    bias_write(out, "error_variance", x[BIAS_ERROR_VARIANCE], 1, true);
    bias_write(out, "gradient_variance", x[BIAS_GRADIENT_VARIANCE], 1, true);
    bias_write(out, "along", x[BIAS_ALONG], 1, gradient);
    bias_write(out, "across", x[BIAS_ACROSS], 1, gradient);
    bias_write(out, "bias_to_noise", x[BIAS_NOISE], 1, true);
    bias_write(out, "inner", x[BIAS_INNER], 1, again);
    bias_write(out, "persists", x[BIAS_INNER], 1 / sqrt(product),
               again && x[BIAS_SQUARED].low > 0 && last[BIAS_SQUARED].low > 0);
    json_text_add(out, "}");
    memcpy(last, x, sizeof x);
}

static inline void bias_write_start(const BiasRun *b, JsonText *out) {
    const Options *o = &b->run.options;
    const bool fp8 = o->precision == PRECISION_FP8;
    json_text_add(out, "{\"program\":\"%s\",\"device\":", b->ops->trainer->program);
    json_text_add_string(out, b->run.device.name);
    json_text_add(out, ",\"recipe\":\"%s\",\"emulated\":%s", fp8 ? b->parts[1].precision->recipe->name : "bf16",
                  fp8 && b->parts[1].precision->emulated ? "true" : "false");
    json_text_add(out, ",\"micro_batches\":%lld,\"batch_size\":%lld,\"sequence_length\":%lld,\"checkpoints\":[",
                  (long long)b->micro_batches, (long long)o->batch_size, (long long)o->sequence_length);
}

// Measures the weights that both trainers have, of checkpoint number c, and appends the result.
static inline void bias_measure(BiasRun *b, JsonText *out, int64_t c, const char *name) {
    const double start = seconds_now();
    float *swap = b->work.errors;
    if (c) b->work.errors = b->work.before, b->work.before = swap;
    float *before = b->work.before;
    if (!c) b->work.before = NULL;
    bias_pass(b, c, true, b->terms);
    bias_pass(b, c, false, b->again);
    b->work.before = before;
    bias_compare_passes(b);
    json_text_add(out, "%s{\"name\":", c ? ",\n" : "\n");
    json_text_add_string(out, name);
    json_text_add(out, ",\"tensors\":[\n");
    for (int64_t row = 0; row < b->rows; row++) bias_write_row(b, out, row, c > 0);
    json_text_add(out, "]}");
    const BiasInterval *x = b->last + (b->rows - 1) * BIAS_STATISTICS + BIAS_SQUARED;
    printf("%s: squared bias %.4g [%.4g, %.4g], %.1f s\n", name, x->estimate, x->low, x->high, seconds_now() - start);
    fflush(stdout);
}

static inline void bias_write_file(const BiasRun *b, JsonText *out) {
    json_text_add(out, "]}\n");
    FILE *file = fopen(b->out, "w");
    if (!file || fwrite(out->data, 1, out->size, file) != out->size || fclose(file))
        die("cannot write %s: %s", b->out, strerror(errno));
    json_text_free(out);
}

// ---- the run

static inline void bias_create(BiasRun *b) {
    const BiasOps *ops = b->ops;
    Run *run = &b->run;
    void *const trainers[2] = {ops->plain, ops->other};
    const Options *const options[2] = {&b->plain_options, &run->options};
    for (int i = 0; i < 2; i++) {
        b->parts[i] = ops->trainer->describe(trainers[i], options[i], &run->setup.model, &run->comm);
        ops->trainer->create(trainers[i], &b->parts[i].memory);
        if (!run_load(&run->setup, b->parts[i].table, &b->parts[i].state)) ops->trainer->initialize(trainers[i]);
    }
    if (run->options.precision == PRECISION_BF16 && ops->sum_otherwise) ops->sum_otherwise(ops->other);
    const int64_t elements = b->parts[0].table->total;
    BiasWork *w = &b->work;
    w->errors = ops->sum_memory(elements), w->gradients = ops->sum_memory(elements);
    if (b->num_checkpoints) w->before = ops->sum_memory(elements);
    bias_list_chunks(w, b->parts[0].table);
    w->chunks = (BiasChunk *)ops->shared_memory(w->count * (int64_t)sizeof *w->chunks);
    bias_list_chunks(w, b->parts[0].table);
    w->terms = (double *)ops->shared_memory(w->count * BIAS_TERMS * (int64_t)sizeof *w->terms);
    b->tensors = run->setup.model.num_layers * NUM_LINEARS + 1, b->rows = b->tensors + NUM_LINEARS + 1;
    b->terms = (double *)xcalloc((size_t)(2 * b->micro_batches * b->rows * BIAS_TERMS), sizeof *b->terms);
    b->again = b->terms + b->micro_batches * b->rows * BIAS_TERMS;
    b->last = (BiasInterval *)xcalloc((size_t)(b->rows * BIAS_STATISTICS), sizeof *b->last);
}

// The whole of the program's main.
static inline int bias_main(int argc, char **argv, const BiasOps *ops) {
    static BiasRun b;
    JsonText out = {NULL, 0, 0};
    process_prepare();
    b.ops = ops, b.run.ops = ops->trainer, b.run.trainer = ops->other;
    argv = bias_options(&b, &argc, argv);
    run_begin(&b.run, argc, argv);
    bias_find_checkpoints(&b);
    bias_check(&b);
    bias_filter(&b);
    b.plain_options = b.run.options;
    b.plain_options.precision = PRECISION_BF16, b.plain_options.fp8_filter = "";
    bias_create(&b);
    bias_write_start(&b, &out);
    bias_measure(&b, &out, 0, b.run.options.model);
    for (int64_t c = 0; c < b.num_checkpoints; c++) {
        for (int i = 0; i < 2; i++)
            model_load_weights(b.checkpoints[c], &b.run.setup.model, b.parts[i].table, &b.parts[i].state);
        bias_measure(&b, &out, c + 1, b.checkpoints[c]);
    }
    bias_write_file(&b, &out);
    ops->trainer->destroy(ops->plain), ops->trainer->destroy(ops->other);
    run_setup_close(&b.run.setup);
    watch_close();
    comm_close(&b.run.comm);
    return EXIT_SUCCESS;
}

#endif
