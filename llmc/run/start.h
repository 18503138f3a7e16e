// Prints the start of a run: model, device, data, recipe, options and memory, in at most 27 lines.
// A dry run does not print this: it prints the whole plan (run_print_plan). The largest number of lines: 1 model,
// 1 validation data, 2 starting weights and --resume or --branch, 1 earlier export that was restored,
// 1 --fp8-filter auto, 1 device, 1 ranks, 1 data, 1 learning, 1 recipe, 1 sums, 5 options, 2 derived options, 2 memory,
// 4 communication and GEMMs of the GPU trainer, 1 earlier log, 1 empty: 27. More lines come only with warnings, with a
// lineage, with settings that differ from the checkpoint's, with checkpoints that --resume or --branch skips (one
// each), when no step is left, with the sources of --mix, with ranks that come late (rendezvous.h), and with the report
// of --check-links.
#ifndef LLMC_START_H
#define LLMC_START_H

#include "../reference/gradient_fp8.h"
#include "plan_json.h"

// A line begins with a label of START_LABEL columns. It has at most START_COLUMNS columns, unless one item is longer or
// an ellipsis follows.
enum { START_LABEL = 9, START_COLUMNS = 100 };
enum { START_OPTION_LINES = 5, START_LINES = 2 };

// A text under one label, of at most max_lines lines. `full`: an item did not fit.
typedef struct {
    int column, lines, max_lines;
    bool full;
} StartText;

static inline StartText start_begin(const char *label, int max_lines) {
    const StartText t = {START_LABEL, 1, max_lines, false};
    printf("%-*s", START_LABEL, label);
    return t;
}

// Adds an item; items are never broken. An ellipsis replaces items that do not fit.
static inline void start_add(StartText *t, const char *item) {
    const int width = 1 + (int)strlen(item);
    if (t->full) return;
    if (t->column > START_LABEL && t->column + width > START_COLUMNS) {
        t->full = t->lines == t->max_lines;
        if (t->full) {
            printf(" ...");
            return;
        }
        printf("\n%*s", START_LABEL, "");
        t->column = START_LABEL, t->lines++;
    }
    printf(" %s", item);
    t->column += width;
}

static inline void start_end(const StartText *t) {
    if (t->column > START_LABEL || t->full) printf("\n");
}

// Writes a count as "143680", "494.0M" or "8.03B".
static inline const char *start_count(char *out, size_t capacity, int64_t n) {
    if (n >= 1000000000) format_checked(out, capacity, "%.2fB", (double)n * 1e-9);
    else if (n >= 1000000) format_checked(out, capacity, "%.1fM", (double)n * 1e-6);
    else format_checked(out, capacity, "%lld", (long long)n);
    return out;
}

// Prints which program trains which model. Call it after run_setup.
static inline void start_print_model(const RunSetup *s, const char *program) {
    const ModelConfig *m = &s->model;
    ParameterTable t = parameter_table(m);
    char parameters[32];
    printf("%s %s: %s, %lld layers, %s parameters, vocabulary %lld\n", program, TRAINER_VERSION, m->name,
           (long long)m->num_layers, start_count(parameters, sizeof parameters, t.num_parameters),
           (long long)m->vocab_size);
    parameter_table_free(&t);
}

// Prints which weights the first step starts from. If the run continues from a checkpoint, checkpoint_find_newest
// prints that.
static inline void start_print_weights(const RunSetup *s, const Options *o) {
    if (s->continues) return;
    if (s->load_weights) printf("starting weights: from %s\n", s->model_folder);
    else
        printf("starting weights: random, from --seed %lld%s%s%s\n", (long long)o->seed, s->model_folder ? " (" : "",
               s->model_folder ? s->model_folder : "", s->model_folder ? " holds none)" : "");
}

static inline void start_print_device(const DeviceInfo *d) {
    printf("%-*s %s, %s; ", START_LABEL, "device", d->name, d->versions);
    if (d->peak_bf16 > 0) printf("peak %.1f TFLOP/s in BF16\n", d->peak_bf16 * 1e-12);
    else printf("peak unknown: mfu and sol need --peak-tflops\n");
}

static inline void start_print_ranks(const Options *o, const Comm *c) {
    char sharding[32];
    if (c->world == 1) return;
    option_format(o, option_find("sharding", strlen("sharding")), sharding, sizeof sharding);
    printf("%-*s %lld: %lld replica%s of %lld rank%s, sharding %s\n", START_LABEL, "ranks", (long long)c->world,
           (long long)c->replicas, c->replicas == 1 ? "" : "s", (long long)c->shard_size, c->shard_size == 1 ? "" : "s",
           sharding);
}

static inline void start_print_data(const RunSetup *s, const Options *o, const Comm *c) {
    const DataLoader *d = &s->train;
    char tokens[32], step[32];
    if (!d->num_shards) return;
    const int64_t sequences = c->world * o->grad_accumulation_steps * o->batch_size;
    start_count(tokens, sizeof tokens, d->num_tokens);
    start_count(step, sizeof step, sequences * o->sequence_length);
    printf("%-*s %s: %s tokens in %lld shard%s; a step takes %s: %lld sequence%s of %lld", START_LABEL, "data",
           *o->mix ? o->mix : o->train_data, tokens, (long long)d->num_shards, d->num_shards == 1 ? "" : "s", step,
           (long long)sequences, sequences == 1 ? "" : "s", (long long)o->sequence_length);
    if (options_masks_documents(o)) printf("; documents begin with token %lld", (long long)d->separator);
    printf("%s\n", d->masked ? "; tokens marked as context do not count in the loss" : "");
}

// Prints which linear layers stay bf16 in an FP8 run, lm_head first.
static inline void start_print_bf16_linears(const Precision *p) {
    char layers[128];
    const char *separator = "; bf16 linear layers: ";
    if (!recipe_is_fp8(&p->head, GEMM_WGRAD)) {
        const bool fprop = recipe_is_fp8(&p->head, GEMM_FPROP), dgrad = recipe_is_fp8(&p->head, GEMM_DGRAD);
        printf("%slm_head%s", separator, dgrad ? " (wgrad)" : fprop ? " (dgrad, wgrad)" : "");
        separator = ", ";
    }
    for (int id = 0; id < NUM_LINEARS; id++) {
        const int64_t n = precision_layers(p, id, false, layers, sizeof layers);
        if (!n) continue;
        printf("%s%s", separator, p->linear[id].name);
        if (n < p->num_layers) printf(" in %lld of %lld layers", (long long)n, (long long)p->num_layers);
        separator = ", ";
    }
}

// Prints a line for each source of --mix. `samples`: all that the run reads.
static inline void start_print_sources(const Mix *mix, int64_t samples) {
    for (const MixSource *s = mix->sources; s < mix->sources + mix->num; s++)
        printf("%-*s %.*s: share %.1f%%, %lld sequences, %.3g epochs\n", START_LABEL, "source", s->length, s->name,
               100.0 * (double)s->count / MIX_BLOCK, (long long)s->num_sequences,
               (double)samples * (double)s->count / MIX_BLOCK / (double)s->num_sequences);
}

// Prints what decides how the loss falls: rate, schedule, optimizer, and how often the data is read.
static inline void start_print_learning(const RunSetup *s, const Options *o, const Comm *c) {
    char schedule[32], fall[32] = "", epochs[48] = "";
    option_format(o, option_find("lr-schedule", strlen("lr-schedule")), schedule, sizeof schedule);
    if (o->lr_schedule != SCHEDULE_CONSTANT) format_checked(fall, sizeof fall, " to %g%%", 100 * o->min_lr_ratio);
    const int64_t samples = o->num_steps * c->world * o->grad_accumulation_steps * o->batch_size;
    if (s->train.num_sequences && !s->train.mix.num)
        format_checked(epochs, sizeof epochs, "; %.3g epochs", (double)samples / (double)s->train.num_sequences);
    printf("%-*s rate %.3g%s, warm-up %lld of %lld steps, %s%s; decay %g, betas %g and %g, clip %g%s\n", START_LABEL,
           "learning", o->learning_rate, s->rate_reason, (long long)o->warmup_steps, (long long)o->num_steps, schedule,
           fall, o->weight_decay, o->beta1, o->beta2, o->grad_clip, epochs);
    start_print_sources(&s->train.mix, samples);
}

static inline void start_print_recipe(const Options *o, const Precision *p) {
    // in the order of FAST_ACCUMS
    static const char *const fast_accums[] = {"fprop", "fprop, and dgrad and wgrad of layers", "none"};
    const Recipe *r = p->recipe;
    printf("%-*s ", START_LABEL, "recipe");
    if (!precision_is_fp8(p)) {
        const bool fp32 = o->precision == PRECISION_FP32;
        printf("%s: all GEMMs, with fp32 accumulation\n", fp32 ? "fp32" : "bf16");
        return;
    }
    if (!precision_any_gemm_fp8(p)) {
        printf("no GEMM runs in FP8: --fp8-filter keeps all in bf16, or sizes are not multiples of %d\n", r->multiple);
        return;
    }
    printf("fp8 %s%s: a scale for each %s; w, x e4m3, dy %s; fast_accum %s", r->name, p->emulated ? " (emulated)" : "",
           r->scales, p->dy_format == FP8_E4M3 ? "e4m3" : "e5m2",
           fast_accums[r->fast_accum ? p->fast_accum : FAST_ACCUM_NONE]);
    start_print_bf16_linears(p);
    printf("\n");
}

// Says how much too large FP8 sums of gradients can make the norm, if that is 1% or more (gradient_fp8.h).
static inline void start_print_sums(const Options *o) {
    const double noise = sqrt(1 + GRADIENT_FP8_NOISE * (double)o->grad_accumulation_steps) - 1;
    if (!options_fp8_gradients(o) || noise < 0.01) return;
    printf("%-*s FP8 over %lld micro-steps: noise makes the norm up to %.0f%% too large (bf16: %.2f%%)\n", START_LABEL,
           "sums", (long long)o->grad_accumulation_steps, 100 * noise, 1.4e-4 * (double)o->grad_accumulation_steps);
}

// Returns on how many of ranks --deterministic gives the same bits. The text is valid until the next call.
static inline const char *start_same_bits(const Options *o, const Comm *c) {
    static char text[160];
    const char *reason = options_bits_of_ranks(o);
    if (!reason) return "on any number of ranks";
    format_checked(text, sizeof text, "on %lld rank%s alone: %s", (long long)c->world, c->world == 1 ? "" : "s",
                   reason);
    return text;
}

// True if a derived option is worth printing. These are not: options for FP8 without --precision fp8, --fp8-all-gather
// and --reduce-dtype on one rank, and a --rounding-seed that equals --seed.
static inline bool start_concerns(const OptionRow *row, const Options *o, const Comm *c) {
    const size_t f = row->field;
    for (const char *const *name = defaults_names(); *name; name++)  // start_print_learning prints these
        if (strcmp(row->name, *name) == 0) return false;
    if (f == offsetof(Options, rounding_seed)) return o->rounding_seed != o->seed;
    if (option_is_fp8(row) && o->precision != PRECISION_FP8) return false;
    return c->world > 1 || (f != offsetof(Options, fp8_all_gather) && f != offsetof(Options, reduce_dtype));
}

// The command line and what came of it: `given` is the result of options_parse, `o` has its `auto` values resolved.
typedef struct {
    const Options *o, *given;
    const Comm *comm;
} StartOptions;

// True if an option is printed. The line of options has each option that the command line names, unless the program
// changed its value; if a shorthand comes later on the command line, the value is that of the shorthand. The line of
// `derived` options has each other option that the program or a shorthand set, if start_concerns is true. Neither has
// --train-data and --mix.
static inline bool start_prints(const StartOptions *s, const OptionRow *row, bool derived) {
    char value[PATH_CAPACITY], given[PATH_CAPACITY], standard[PATH_CAPACITY];
    const Options defaults = options_default();
    if (!option_is_setting(row)) return false;
    if (row->field == offsetof(Options, train_data) || row->field == offsetof(Options, mix)) return false;
    option_format(s->o, row, value, sizeof value);
    option_format(s->given, row, given, sizeof given);
    option_format(&defaults, row, standard, sizeof standard);
    const bool changed = strcmp(value, given) != 0, named = options_give(s->o, row->name);
    if (!derived) return named && !changed;
    return (changed || (!named && strcmp(given, standard) != 0)) && start_concerns(row, s->o, s->comm);
}

// Prints the line of options, or that of `derived` options.
static inline void start_print_options(const StartOptions *s, bool derived) {
    StartText t = start_begin(derived ? "derived" : "options", derived ? START_LINES : START_OPTION_LINES);
    for (const OptionRow *row = option_rows(); row->name; row++) {
        char value[PATH_CAPACITY], item[PATH_CAPACITY + 64];
        if (!start_prints(s, row, derived)) continue;
        option_format(s->o, row, value, sizeof value);
        const char *shown = row->kind == OPTION_FLAG ? "" : *value ? value : "\"\"";
        format_checked(item, sizeof item, "--%s%s%s", row->name, *shown ? " " : "", shown);
        start_add(&t, item);
    }
    if (t.column == START_LABEL && t.lines == 1) start_add(&t, "none");
    start_end(&t);
}

enum { START_MEMORY_PARTS = 5 };

// Prints the memory of one rank: the sum, its largest parts, and the rest together.
static inline void start_print_memory(const Arena *a, int64_t other_bytes) {
    const int64_t total = a->used + other_bytes;
    const double unit = total < 1 << 30 ? 1048576 : 1073741824;
    bool printed[sizeof a->groups / sizeof a->groups[0]] = {false};
    char item[128];
    int64_t rest = total;
    StartText t = start_begin("memory", START_LINES);
    format_checked(item, sizeof item, "%.1f %s a rank:", (double)total / unit, total < 1 << 30 ? "MiB" : "GiB");
    start_add(&t, item);
    for (int n = 0; n < START_MEMORY_PARTS; n++) {
        int largest = -1;
        for (int i = 0; i < a->num_groups; i++)
            if (!printed[i] && (largest < 0 || a->groups[i].bytes > a->groups[largest].bytes)) largest = i;
        if (largest < 0 || !a->groups[largest].bytes) break;
        printed[largest] = true, rest -= a->groups[largest].bytes;
        format_checked(item, sizeof item, "%s %.1f,", a->groups[largest].name, (double)a->groups[largest].bytes / unit);
        start_add(&t, item);
    }
    format_checked(item, sizeof item, "%s %.1f", other_bytes ? "CUDA, libraries and others" : "others",
                   (double)rest / unit);
    start_add(&t, item);
    start_end(&t);
}

#endif
