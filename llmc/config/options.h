// Options: reads the command line by the table, prints --help and settings, and computes what follows from options.
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include <math.h>

#include "../base/coat.h"
#include "options_table.h"

// Copies choice number `index` of "a|b|c", counted from 0, to `out`. Returns false if there is no such choice.
static inline bool option_choice_name(const char *choices, int index, char *out, size_t capacity) {
    for (; index > 0; index--) {
        choices = strchr(choices, '|');
        if (!choices) return false;
        choices++;
    }
    format_checked(out, capacity, "%.*s", (int)strcspn(choices, "|"), choices);
    return true;
}

// The number of the choice `word` in "a|b|c", counted from 0; -1 if it is none of them.
static inline int option_choice_number(const char *choices, const char *word) {
    char name[64];
    for (int i = 0; option_choice_name(choices, i, name, sizeof name); i++)
        if (strcmp(name, word) == 0) return i;
    return -1;
}

// Writes the value of one option as the user would type it; a flag's value is "on" or "off".
static inline void option_format(const Options *o, const OptionRow *row, char *out, size_t capacity) {
    const void *at = (const char *)o + row->field;
    switch (row->kind) {
    case OPTION_INT: format_checked(out, capacity, "%lld", (long long)*(const int64_t *)at); break;
    case OPTION_REAL: format_checked(out, capacity, "%.9g", *(const double *)at); break;
    case OPTION_TEXT: format_checked(out, capacity, "%s", *(const char *const *)at); break;
    case OPTION_CHOICE: option_choice_name(row->text, *(const int *)at, out, capacity); break;
    case OPTION_FLAG: format_checked(out, capacity, "%s", *(const bool *)at ? "on" : "off"); break;
    case OPTION_GROUP: out[0] = 0; break;
    }
}

static inline Options options_default(void) {
    Options o = {};
    o.model = "";
    for (const OptionRow *row = option_rows(); row->name; row++) {
        void *at = (char *)&o + row->field;
        if (row->kind == OPTION_INT) *(int64_t *)at = (int64_t)row->initial;
        if (row->kind == OPTION_REAL) *(double *)at = row->initial;
        if (row->kind == OPTION_TEXT) *(const char **)at = row->text;
        if (row->kind == OPTION_CHOICE) *(int *)at = (int)row->initial;
    }
    return o;
}

// The option that has `value` among its choices, or the flag of this name; NULL if there is none, or several.
static inline const OptionRow *option_with_choice(const char *value) {
    const OptionRow *found = NULL;
    for (const OptionRow *row = option_rows(); row->name; row++) {
        const bool flag = row->kind == OPTION_FLAG && strcmp(row->name, value) == 0;
        if (!flag && (row->kind != OPTION_CHOICE || option_choice_number(row->text, value) < 0)) continue;
        if (found) return NULL;
        found = row;
    }
    return found;
}

// Reads the number of an option. Dies if the text is no number, or not a whole one if `whole`, or is out of range.
static inline double option_number(const char *name, const char *value, bool whole, double low, double high) {
    char *end;
    errno = 0;
    double real = strtod(value, &end);
    bool decimal =
        value[strspn(value, "0123456789+-.eE")] == 0;  // strtod also takes spaces, hexadecimal, "inf" and "nan"
    if (end == value || *end || !decimal || !isfinite(real) || (whole && real != floor(real)) ||
        (real == 0 && errno == ERANGE))
        die_with(EXIT_USAGE, "--%s: \"%s\" cannot be read as a %s", name, value, whole ? "whole number" : "number");
    if (real < low || real > high) die_with(EXIT_USAGE, "--%s: %s is outside %.10g..%.10g", name, value, low, high);
    return real;
}

// Reads the numbers of --checkpoint-every: one number of steps between saves or, with commas, a list of steps.
typedef struct {
    const char *at;  // the rest of the text; NULL: all is read
    bool list;
    int64_t step;  // the latest number
} CheckpointEvery;

static inline CheckpointEvery checkpoint_every(const Options *o) {
    return (CheckpointEvery){o->checkpoint_every, strchr(o->checkpoint_every, ',') != NULL, 0};
}

// Reads the next number; false if there is none. Dies if the text is no number of steps, or if a list does not rise.
static inline bool checkpoint_every_next(CheckpointEvery *e) {
    char item[32];
    if (!e->at) return false;
    const size_t n = strcspn(e->at, ",");
    format_checked(item, sizeof item, "%.*s", (int)(n < 31 ? n : 31), e->at);
    const int64_t step = (int64_t)option_number("checkpoint-every", item, true, e->list, 1e9);
    if (e->step && step <= e->step)
        die_with(EXIT_USAGE, "--checkpoint-every: %lld comes after %lld; give the steps in rising order",
                 (long long)step, (long long)e->step);
    e->step = step;
    e->at = e->at[n] && e->at[n + 1] ? e->at + n + 1 : NULL;
    return true;
}

// Returns the number of steps between saves, or the last step of the list.
static inline int64_t options_last_save(const Options *o) {
    CheckpointEvery e = checkpoint_every(o);
    while (checkpoint_every_next(&e)) continue;
    return e.step;
}

// True if --checkpoint-every is a list that has the step.
static inline bool options_names_save(const Options *o, int64_t step) {
    CheckpointEvery e = checkpoint_every(o);
    while (e.list && checkpoint_every_next(&e))
        if (e.step == step) return true;
    return false;
}

// Sets one option from text; a flag becomes true. Dies if the text of a number option is no number (option_number), or
// if the value of a choice is not in its list.
static inline void option_set(Options *o, const OptionRow *row, const char *value) {
    void *at = (char *)o + row->field;
    if (row->kind == OPTION_INT) {
        *(int64_t *)at = (int64_t)option_number(row->name, value, true, row->low, row->high);
    } else if (row->kind == OPTION_REAL) {
        *(double *)at = option_number(row->name, value, false, row->low, row->high);
    } else if (row->kind == OPTION_TEXT) {
        if (strlen(value) >= OPTION_TEXT_CAPACITY)
            die_with(EXIT_USAGE, "--%s: the text has more than %d bytes", row->name, OPTION_TEXT_CAPACITY - 1);
        *(const char **)at = value;
    } else if (row->kind == OPTION_CHOICE) {
        *(int *)at = option_choice_number(row->text, value);
        if (*(int *)at >= 0) return;
        const OptionRow *other = option_with_choice(value);
        die_with(EXIT_USAGE, "--%s: \"%s\" is not one of %s%s%s%s", row->name, value, row->text, other ? "; --" : "",
                 other ? other->name : "",
                 !other                       ? ""
                 : other->kind == OPTION_FLAG ? " is an option of its own"
                                              : " takes it");
    } else {
        *(bool *)at = true;
    }
}

// Columns of --help: where the texts begin, and where they are wrapped.
enum { HELP_INDENT = 49, HELP_WIDTH = 130 };

// Prints `text` in as many lines as it needs. The cursor stands at column HELP_INDENT; later lines are indented to it.
static inline void options_help_text(const char *text) {
    for (int width = HELP_WIDTH - HELP_INDENT; *text;) {
        int n = (int)strlen(text);
        if (n > width)
            for (n = width; n > 0 && text[n] != ' ';) n--;
        if (n == 0) n = (int)strcspn(text, " ");  // a word longer than a line
        printf("%.*s\n", n, text);
        text += n + strspn(text + n, " ");
        if (*text) printf("%*s", HELP_INDENT, "");
    }
}

// Prints the row of --help of one option. `whole`: with the whole help, not only up to the first semicolon.
static inline void options_help_row(const Options *o, const OptionRow *row, bool whole) {
    char left[128], value[256], text[1024];
    option_format(o, row, value, sizeof value);
    format_checked(left, sizeof left, "--%s%s%s", row->name, row->kind == OPTION_FLAG ? "" : " ",
                   row->kind == OPTION_CHOICE ? row->text
                   : row->kind == OPTION_INT  ? "N"
                   : row->kind == OPTION_REAL ? "X"
                   : row->kind == OPTION_TEXT ? "TEXT"
                                              : "");
    const bool shown = *value && row->kind != OPTION_FLAG;
    format_checked(text, sizeof text, "%.*s%s%s%s", (int)strcspn(row->help, whole ? "" : ";"), row->help,
                   shown ? " [" : "", shown ? value : "", shown ? "]" : "");
    printf("  %-*s%s", HELP_INDENT - 3, left, strlen(left) > HELP_INDENT - 3 ? "\n" : " ");
    if (strlen(left) > HELP_INDENT - 3) printf("%*s", HELP_INDENT, "");
    options_help_text(text);
}

// Prints the usage and the common options; if `all`, all options, their whole help, and the exit statuses.
static inline void options_help(const char *program, const char *presets, bool all) {
    const Options o = options_default();
    const char *group = NULL;  // the heading that comes before the next option
    int left_out = 0;
    printf("usage: %s MODEL [--option value ...]\n\nMODEL: %s,\n  or a folder with a Hugging Face config.json (Llama, "
           "Mistral, Qwen2, Qwen3). Training starts from its weights if it has any:\n  model.safetensors, or the files "
           "that model.safetensors.index.json names\n",
           program, presets);
    for (const OptionRow *row = option_rows(); row->name; row++) {
        const bool heading = row->kind == OPTION_GROUP, shown = !heading && (all || row->level == COMMON);
        left_out += !heading && !shown;
        if (shown && group) printf("\n%s\n", group);
        if (shown) options_help_row(&o, row, all);
        group = heading ? row->name : shown ? NULL : group;
    }
    if (!all) {
        printf("\n--help all prints the rest: %d more options, the texts in full, and the exit statuses\n", left_out);
        return;
    }
    printf("\nexit status\n");
#define EXIT_CODE_LINE(id, number, meaning) printf("  %d  %s\n", number, meaning);
    EXIT_CODES(EXIT_CODE_LINE)
}

// The option that a name of other programs stands for; NULL if it is no such name.
static inline const char *option_elsewhere(const char *word) {
    static const char *const names[][2] = {{"max-steps", "num-steps"},         {"train-iters", "num-steps"},
                                           {"max-iters", "num-steps"},         {"epochs", "num-steps"},
                                           {"num-train-epochs", "num-steps"},  {"block-size", "sequence-length"},
                                           {"micro-batch-size", "batch-size"}, {"dtype", "precision"},
                                           {"clip-grad", "grad-clip"},         {"max-grad-norm", "grad-clip"},
                                           {"output-dir", "checkpoint-dir"},   {"save-every", "checkpoint-every"},
                                           {"save-steps", "checkpoint-every"}, {"eval-steps", "val-every"},
                                           {"min-lr", "min-lr-ratio"},         {"hf-export", "export-hf"},
                                           {"sample-tokens", "max-tokens"},    {"max-new-tokens", "max-tokens"}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(word, names[i][0]) == 0) return names[i][1];
    return NULL;
}

// How far a word is from an option's name: 0 if it has the name's initials (lr: learning-rate), few if each of its
// words begins a word of the name in order (seq-len, length: sequence-length), else the edit distance.
static inline int option_distance(const char *word, const char *name) {
    const char *typed = word, *initial = word;
    int left = 1;  // words of the name that no word of `word` begins, and 1
    bool initials = true;
    for (const char *at = name; *at; at += strcspn(at, "-"), at += *at == '-') {
        const size_t n = strcspn(typed, "-");
        if (n && n <= strcspn(at, "-") && strncmp(typed, at, n) == 0) typed += n + (typed[n] == '-');
        else left++;
        initials = initials && *initial++ == *at;
    }
    if (initials && !*initial && strlen(word) > 1) return 0;
    return *word && !*typed ? left : text_edit_distance(word, name);
}

// The row of an option's name (`length` characters, without dashes). Dies, with a name that is near, if there is none.
static inline const OptionRow *option_find(const char *name, size_t length) {
    char given[64], word[64];
    format_checked(given, sizeof given, "%.*s", (int)(length < 60 ? length : 60), name);
    for (size_t i = 0; i < sizeof word; i++) word[i] = given[i] == '_' ? '-' : given[i];
    const OptionRow *nearest = NULL;
    int nearest_distance = max_i64(1, (int64_t)strlen(word) / 2) + 1;
    for (const OptionRow *row = option_rows(); row->name; row++)
        if (row->kind != OPTION_GROUP && strcmp(row->name, given) == 0) return row;
    for (const OptionRow *row = option_rows(); row->name; row++) {
        if (row->kind == OPTION_GROUP) continue;
        const bool elsewhere = option_elsewhere(word) && strcmp(option_elsewhere(word), row->name) == 0;
        const int distance = elsewhere ? 0 : option_distance(word, row->name);
        if (distance < nearest_distance) nearest = row, nearest_distance = distance;
    }
    die_with(EXIT_USAGE, "unknown option --%s%s%s (--help all lists all)", given, nearest ? "; the nearest is --" : "",
             nearest ? nearest->name : "");
}

// True if the command line gives the option.
static inline bool options_give(const Options *o, const char *name) {
    const size_t n = strlen(name);
    for (int i = 1; i < o->argc; i++)
        if (strncmp(o->argv[i], "--", 2) == 0 && strncmp(o->argv[i] + 2, name, n) == 0 &&
            strchr("=", o->argv[i][2 + n]))  // '=' or the end
            return true;
    return false;
}

// True if the shorthand is given and its value has the row's level.
static inline bool shorthand_sets(const Options *o, const ShorthandRow *s) {
    const OptionRow *row = option_find(s->shorthand, strlen(s->shorthand));
    const void *at = (const char *)o + row->field;
    return (row->kind == OPTION_FLAG ? *(const bool *)at : *(const int *)at) >= s->level;
}

// Sets the options that `row` stands for, if it is a shorthand. Dies if it was given before with a value of its own.
static inline void options_set_shorthand(Options *o, const OptionRow *row) {
    for (const ShorthandRow *s = shorthand_rows(); s->shorthand; s++) {
        if (strcmp(s->shorthand, row->name) != 0) continue;
        if (row->kind != OPTION_FLAG && options_give(o, row->name))
            die_with(EXIT_USAGE, "--%s is given twice: what the first one sets would stay; give one", row->name);
        if (shorthand_sets(o, s)) option_set(o, option_find(s->option, strlen(s->option)), s->value);
    }
}

// The value of an option that has none behind "=", if `next` follows on the command line (NULL: nothing does). NULL: it
// takes no value from there. --help needs none.
static inline const char *option_value(const OptionRow *row, const char *next) {
    const bool help = row->field == offsetof(Options, help);
    if (help && (!next || option_choice_number(row->text, next) < 0)) return NULL;
    if (!next || strncmp(next, "--", 2) == 0) die_with(EXIT_USAGE, "--%s needs a value", row->name);
    return next;
}

// Reads the command line: at most one MODEL, and --name (flags, --help), --name value or --name=value. Dies if it is
// wrong, but a missing MODEL is found later, by options_require_model.
static inline Options options_parse(int argc, char **argv) {
    Options o = options_default();
    o.argv = argv;
    const OptionRow *flag = NULL;  // the flag right before this argument, or NULL
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        o.argc = i;  // options_give: what stands before this argument
        if (argument[0] != '-') {
            if (*o.model && flag)
                die_with(EXIT_USAGE, "--%s takes no value, but \"%s\" follows it", flag->name, argument);
            if (*o.model)
                die_with(EXIT_USAGE, "two models given: \"%s\" and \"%s\"; a glob needs quotes", o.model, argument);
            o.model = argument, flag = NULL;
            continue;
        }
        if (argument[1] != '-')
            die_with(EXIT_USAGE, "unknown option %s; options have two dashes and a long name (--help all lists all)",
                     argument);
        const char *name = argument + 2, *equals = strchr(name, '=');
        const OptionRow *row = option_find(name, equals ? (size_t)(equals - name) : strlen(name));
        flag = row->kind == OPTION_FLAG ? row : NULL;
        if (flag && equals) die_with(EXIT_USAGE, "--%s takes no value", row->name);
        const char *value = flag ? "" : equals ? equals + 1 : option_value(row, i + 1 < argc ? argv[i + 1] : NULL);
        i += !flag && !equals && value;
        option_set(&o, row, value ? value : "on");
        options_set_shorthand(&o, row);
    }
    o.argc = argc;
    options_last_save(&o);  // dies if --checkpoint-every cannot be read
    return o;
}

// --list: prints names, one a line. `presets`: the models, separated by ", ".
static inline void options_print_list(int list, const char *presets) {
    for (const char *at = presets; list == LIST_MODELS && *at; at += strspn(at, ", ")) {
        const int n = (int)strcspn(at, ",");
        printf("%.*s\n", n, at);
        at += n;
    }
    for (int i = 0; list == LIST_RECIPES && i < NUM_RECIPES; i++) printf("%s\n", recipe_row(i)->name);
    for (const OptionRow *row = option_rows(); list == LIST_OPTIONS && row->name; row++)
        if (row->kind != OPTION_GROUP) printf("%s\n", row->name);
}

// Comes after options_parse. With --help, or without any argument, prints the help, which shows `presets`, and ends the
// program. With --list but not --help, prints names and ends the program. Else dies if there is no MODEL.
static inline void options_require_model(const Options *o, int argc, char **argv, const char *presets) {
    if (o->list && !o->help) {
        options_print_list(o->list, presets);
        exit(EXIT_DONE);
    }
    if (o->help || argc == 1) {
        options_help(argv[0], presets, o->help == HELP_ALL);
        exit(o->help ? EXIT_DONE : EXIT_USAGE);
    }
    if (!*o->model) die_with(EXIT_USAGE, "no MODEL given; for example \"tiny\", or one of: %s", presets);
}

// The recipe of linear layers that neither a filter nor their sizes keep in bf16.
static inline const Recipe *options_recipe(const Options *o) {
    return recipe_row(o->precision == PRECISION_FP8 ? o->fp8_recipe : RECIPE_BF16);
}

static inline bool option_is_fp8(const OptionRow *row) {
    return row->kind != OPTION_GROUP && strncmp(row->name, "fp8-", 4) == 0;
}

// True for the options that logs and tables show: all but --help, --list and --json.
static inline bool option_is_setting(const OptionRow *row) {
    const size_t f = row->field;
    const bool prints = f == offsetof(Options, help) || f == offsetof(Options, list) || f == offsetof(Options, json);
    return row->kind != OPTION_GROUP && !prints;
}

static inline bool options_masks_documents(const Options *o) { return strcmp(o->document_mask, "off") != 0; }

// True if gradients of the layers' matrices are FP8 (gradient_fp8.h), before or after options_resolve.
static inline bool options_fp8_gradients(const Options *o) {
    return o->grad_accum_dtype == SUM_FP8 || (o->grad_accum_dtype == SUM_AUTO && o->reduce_dtype == REDUCE_FP8);
}

// The parts of a run that --offload keeps in host memory.
typedef struct {
    bool moments, master, activations;
} Offloaded;

// Reads --offload. Returns the first word that it does not know; NULL if it knows all.
static inline const char *options_read_offload(const char *text, Offloaded *out) {
    const char *const between = ", ";
    memset(out, 0, sizeof *out);
    if (strcmp(text, "none") == 0) return NULL;
    for (const char *at = text + strspn(text, between); *at; at += strcspn(at, between), at += strspn(at, between)) {
        const size_t n = strcspn(at, between);
        if (n == 7 && strncmp(at, "moments", n) == 0) out->moments = true;
        else if (n == 6 && strncmp(at, "master", n) == 0) out->master = true;
        else if (n == 11 && strncmp(at, "activations", n) == 0) out->activations = true;
        else return at;
    }
    return NULL;
}

// Returns what --offload keeps in host memory, in a run that options_conflict has accepted.
static inline Offloaded options_offloaded(const Options *o) {
    Offloaded out;
    options_read_offload(o->offload, &out);
    return out;
}

static inline bool options_offloads_state(const Options *o) {
    const Offloaded out = options_offloaded(o);
    return out.moments || out.master;
}

// Returns how many of the `world` ranks share one replica of the parameters. With --sharding hybrid, --shard-size must
// be above 0 by now; dies if it does not divide `world`.
static inline int64_t options_shard_group(const Options *o, int64_t world) {
    if (o->sharding == SHARDING_NONE) return 1;
    if (o->sharding != SHARDING_HYBRID) return world;
    if (world % o->shard_size)
        die_with(EXIT_USAGE, "--shard-size %lld does not divide the %lld ranks", (long long)o->shard_size,
                 (long long)world);
    return o->shard_size;
}

// From this number of micro-steps on, --grad-accum-dtype auto adds up gradients in fp32. In bf16, 256 micro-steps make
// the gradient norm 0.035% too large (gradient_sum.h): a third of the 0.1% that we allow.
#define FP32_SUM_MICRO_STEPS 256

// The dtype that --grad-accum-dtype auto stands for, when --master-weights and --reduce-dtype are resolved. Only
// options decide: bits must not depend on a machine's memory.
static inline int options_sum_storage(const Options *o) {
    const bool wanted = o->master_weights == STORAGE_FP32 || o->reduce_dtype == REDUCE_FP32;
    if (options_fp8_gradients(o)) return SUM_FP8;
    return wanted || o->grad_accumulation_steps >= FP32_SUM_MICRO_STEPS ? SUM_FP32 : SUM_BF16;
}

// Returns why --deterministic gives equal bits on one number of ranks alone; NULL: it gives them on any number.
static inline const char *options_bits_of_ranks(const Options *o) {
    if (options_fp8_gradients(o)) return "sums of FP8 gradients have scales that depend on the number of ranks";
    if (o->sharding == SHARDING_NONE || o->sharding == SHARDING_HYBRID)
        return "each replica sums its own micro-steps first";
    if (o->optimizer_in_backward && options_offloads_state(o))
        return "in backward the squares of offloaded parts are summed in another order";
    return NULL;
}

// True if the run must have the same bits on any number of ranks.
static inline bool options_any_ranks(const Options *o) { return o->deterministic && !options_bits_of_ranks(o); }

// If options_any_ranks, --grad-accum-dtype auto counts micro-steps of all `world` ranks. Call before options_resolve.
static inline void options_count_micro_steps(Options *o, int64_t world) {
    if (options_any_ranks(o) && o->grad_accum_dtype == SUM_AUTO &&
        o->grad_accumulation_steps * world >= FP32_SUM_MICRO_STEPS)
        o->grad_accum_dtype = SUM_FP32;
}

// True if AdamW gets fp32 gradients on `world` ranks, after options_resolve. That is so with --precision fp32, and with
// --grad-accum-dtype fp32 if there are several micro-steps, or several ranks and an fp32 reduction or
// options_any_ranks.
static inline bool options_fp32_gradients(const Options *o, int64_t world) {
    const bool sums =
        o->grad_accumulation_steps > 1 || (world > 1 && (o->reduce_dtype == REDUCE_FP32 || options_any_ranks(o)));
    return o->precision == PRECISION_FP32 || (sums && o->grad_accum_dtype == SUM_FP32);
}

// Replaces `auto` by its value where the options alone decide it. --copy-engines, --init-from, --fp8-filter and
// --recompute keep `auto`: the run decides them. In runs without FP8, --fp8-format keeps `auto` too. Replaces
// --rounding-seed -1 by --seed. With --precision fp32, sets --reduce-dtype to fp32. With --mix, clears --train-data.
static inline void options_resolve(Options *o) {
    const bool fp32 = o->precision == PRECISION_FP32;
    if (o->master_weights == STORAGE_AUTO) o->master_weights = fp32 ? STORAGE_FP32 : STORAGE_BF16;
    if (o->optimizer_state == MOMENTS_AUTO) o->optimizer_state = fp32 ? MOMENTS_FP32 : MOMENTS_BF16;
    if (fp32) o->reduce_dtype = REDUCE_FP32;
    if (*o->mix) o->train_data = "";
    if (o->rounding_seed < 0) o->rounding_seed = o->seed;
    if (o->grad_accum_dtype == SUM_AUTO) o->grad_accum_dtype = options_sum_storage(o);
    if (o->fp8_all_gather == AUTO) o->fp8_all_gather = recipe_has_tensor_scales(options_recipe(o)) ? ON : OFF;
    if (o->precision == PRECISION_FP8 && o->fp8_format == FP8_FORMAT_AUTO)
        o->fp8_format = options_recipe(o)->dy_format == FP8_E5M2 ? FP8_FORMAT_HYBRID : FP8_FORMAT_E4M3;
}

// True if the run trains nothing: it loads a model and uses it.
static inline bool options_uses_model(const Options *o) { return *o->generate || *o->evaluate; }

// True if the master weights are bf16, after options_resolve.
static inline bool options_bf16_weights(const Options *o) {
    return o->master_weights == STORAGE_BF16 || o->master_weights == STORAGE_BF16_NEAREST;
}

// True if the master weights are FP16 numbers with a scale for each tensor.
static inline bool options_fp16_weights(const Options *o) {
    return o->master_weights == STORAGE_FP16 || o->master_weights == STORAGE_FP16_STOCHASTIC;
}

// True if bf16 or FP16 master weights are rounded to nearest.
static inline bool options_nearest_weights(const Options *o) {
    return o->master_weights == STORAGE_BF16_NEAREST || o->master_weights == STORAGE_FP16;
}

// Bytes of a weight in checkpoints and exports, after options_resolve. FP16 masters are written as fp32 numbers.
static inline int64_t options_weight_bytes(const Options *o) { return options_bf16_weights(o) ? 2 : 4; }

// Parts of a layer's activations. True: backward computes them again, so forward need not keep them (--recompute, after
// run_choose_recompute).
typedef struct {
    bool stream;     // the residual stream between attention and MLP, and each row's rstd of both norms
    bool norms;      // the outputs of both norms
    bool attention;  // q, k, v, and attention's output
    bool mlp;        // gate and up
} Recomputed;

static inline Recomputed options_recomputed(const Options *o) {
    const bool layer = o->recompute == RECOMPUTE_LAYER;
    return (Recomputed){layer, o->recompute != RECOMPUTE_NONE, layer || o->recompute == RECOMPUTE_ATTENTION,
                        layer || o->recompute == RECOMPUTE_MLP};
}

// True if the outputs of gate and up are kept for backward in FP8 (base/fp8_group.h).
static inline bool options_keeps_fp8(const Options *o) {
    return o->precision == PRECISION_FP8 && o->fp8_activations == ON && !options_recomputed(o).mlp;
}

// True if gradients are clipped unit by unit (parameters.h), not all at once (clip_norm_so_far in adamw_math.h).
static inline bool options_clips_in_backward(const Options *o) { return o->optimizer_in_backward && o->grad_clip > 0; }

// True if the moments are FP8 codes in groups (coat.h).
static inline bool options_coat(const Options *o) {
    return o->optimizer_state == MOMENTS_COAT || o->optimizer_state == MOMENTS_COAT_STOCHASTIC;
}

// True if moments or masters have one scale for each tensor (msamp.h).
static inline bool options_tensor_scales(const Options *o) {
    return o->optimizer_state == MOMENTS_MSAMP || options_fp16_weights(o);
}

// Bytes of both moments of n elements, after options_resolve. The scales of tensors do not count.
static inline int64_t options_moment_bytes(const Options *o, int64_t n) {
    if (options_coat(o)) return 2 * (n + ceil_div(n, COAT_GROUP) * (int64_t)sizeof(uint32_t));
    if (o->optimizer_state == MOMENTS_MSAMP) return n * (1 + 2);
    return n * (o->optimizer_state == MOMENTS_FP32 ? 8 : 4);
}

// Prints MODEL and the settings. Leaves out empty texts, and in runs without FP8 the options for FP8.
static inline void options_print(const Options *o) {
    printf("%-26s %s\n", "model", o->model);
    for (const OptionRow *row = option_rows(); row->name; row++) {
        if (!option_is_setting(row) || (option_is_fp8(row) && o->precision != PRECISION_FP8)) continue;
        char value[4096];
        option_format(o, row, value, sizeof value);
        if (*value) printf("%-26s %s\n", row->name, value);
    }
}

#endif
