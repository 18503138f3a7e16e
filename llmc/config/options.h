// The one table of options: parser, --help, range checks, settings log, and what a resumed run must share.
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include <math.h>

#include "recipes.h"

// The choices of an option: each list gives both the enum and the words of the command line. Recipes are in recipes.h.
#define PRECISIONS(X) X(PRECISION_FP32, "fp32") X(PRECISION_BF16, "bf16") X(PRECISION_FP8, "fp8")
#define STATE_STORAGES(X) X(STORAGE_AUTO, "auto") X(STORAGE_BF16, "bf16") X(STORAGE_FP32, "fp32")
#define WEIGHT_STORAGES(X) STATE_STORAGES(X) X(STORAGE_BF16_NEAREST, "bf16-nearest")
#define RECOMPUTES(X) X(RECOMPUTE_NONE, "none") X(RECOMPUTE_LAYER, "layer")
#define SCHEDULES(X) \
    X(SCHEDULE_CONSTANT, "constant") X(SCHEDULE_COSINE, "cosine") X(SCHEDULE_LINEAR, "linear") X(SCHEDULE_WSD, "wsd")
#define NONFINITES(X) X(NONFINITE_STOP, "stop") X(NONFINITE_SKIP, "skip")
#define OUTPUT_LOSSES(X) X(OUTPUT_LOST_CONTINUE, "continue") X(OUTPUT_LOST_STOP, "stop")
#define SAVE_ERRORS(X) X(SAVE_ERROR_RETRY, "retry") X(SAVE_ERROR_STOP, "stop")
#define SHARDINGS(X) \
    X(SHARDING_FULL, "full") X(SHARDING_GRAD_OP, "grad_op") X(SHARDING_NONE, "none") X(SHARDING_HYBRID, "hybrid")
#define REDUCES(X) X(REDUCE_BF16, "bf16") X(REDUCE_FP32, "fp32")
#define SWITCHES(X) X(OFF, "off") X(ON, "on")
#define AUTO_SWITCHES(X) SWITCHES(X) X(AUTO, "auto")
#define FP8_FORMATS(X) X(FP8_FORMAT_AUTO, "auto") X(FP8_FORMAT_HYBRID, "hybrid") X(FP8_FORMAT_E4M3, "e4m3")
#define FAST_ACCUMS(X) X(FAST_ACCUM_FPROP, "fprop") X(FAST_ACCUM_ALL, "all") X(FAST_ACCUM_NONE, "none")

#define LISTS(X) \
    X(LIST_NOTHING, "nothing") X(LIST_MODELS, "models") X(LIST_RECIPES, "recipes") X(LIST_OPTIONS, "options")

#define CHOICE_ID(id, word) id,
#define CHOICE_WORD(id, word) "|" word
enum { PRECISIONS(CHOICE_ID) };
enum { WEIGHT_STORAGES(CHOICE_ID) };
enum { RECOMPUTES(CHOICE_ID) };
enum { SCHEDULES(CHOICE_ID) };
enum { NONFINITES(CHOICE_ID) };
enum { OUTPUT_LOSSES(CHOICE_ID) };
enum { SAVE_ERRORS(CHOICE_ID) };
enum { SHARDINGS(CHOICE_ID) };
enum { REDUCES(CHOICE_ID) };
enum { AUTO_SWITCHES(CHOICE_ID) };
enum { FP8_FORMATS(CHOICE_ID) };
enum { FAST_ACCUMS(CHOICE_ID) };
enum { LISTS(CHOICE_ID) };

#define OPTION_MAX 1e15

// What a resumed run must share with the run that wrote the checkpoint.
enum { FREE, MUST_MATCH };

// INT(field, name, default, smallest, largest, match, help)           whole number
// REAL(...)                                                          finite number
// TEXT(field, name, default, match, help)                            free text, "" = not given
// CHOICE(field, name, default, LIST, match, help)                    one of a list of choices (above)
// FLAG(field, name, help)                                            given or not
// GROUP(title)                                                       heading in --help
// clang-format off
#define OPTIONS(GROUP, INT, REAL, TEXT, CHOICE, FLAG) \
    GROUP("data") \
    TEXT(train_data, "train-data", "data/tinystories_llama3_train.bin", FREE, "training shards (a glob)") \
    TEXT(val_data, "val-data", "", FREE, "validation shards (a glob)") \
    CHOICE(shuffle, "shuffle", ON, SWITCHES, MUST_MATCH, "order of the sequences: a keyed permutation each epoch, or file order") \
    INT(sequence_length, "sequence-length", 2048, 1, 1 << 20, MUST_MATCH, "tokens per sequence (T)") \
    INT(batch_size, "batch-size", 1, 1, 65535, FREE, "sequences per GPU and micro-step (B)") \
    INT(grad_accumulation_steps, "grad-accumulation-steps", 1, 1, 1 << 20, FREE, "micro-steps per optimizer step") \
    INT(num_steps, "num-steps", 100, 1, 1000000000, FREE, "optimizer steps in all") \
    INT(seed, "seed", 42, 0, 4294967295.0, MUST_MATCH, "of initial weights, data order and stochastic rounding") \
    GROUP("precision") \
    CHOICE(precision, "precision", PRECISION_BF16, PRECISIONS, MUST_MATCH, "of matrix products; fp8: linear layers as --fp8-recipe says, the rest bf16; fp32: CPU trainer only") \
    CHOICE(fp8_recipe, "fp8-recipe", RECIPE_TENSORWISE, RECIPES, MUST_MATCH, \
           "what shares a scale: a tensor (by its amax now, or delayed: its latest amaxes), a row (gw_hp: weight gradients in bf16), " \
           "blocks of 128 (weights 128x128), blocks of 32 (mxfp8: Blackwell)") \
    CHOICE(fp8_format, "fp8-format", FP8_FORMAT_AUTO, FP8_FORMATS, MUST_MATCH, "of gradients: hybrid E5M2, e4m3 as everything else; auto: what the recipe is known for") \
    TEXT(fp8_filter, "fp8-filter", "", MUST_MATCH, \
         "what stays bf16, comma-separated: first, last, layers=A-B (from 0), attention, mlp, qkv, attn_out, gate_up, down, lm_head (always does); " \
         "or auto: whatever is faster in bf16 on this GPU") \
    INT(fp8_amax_history, "fp8-amax-history", 1024, 1, 65536, MUST_MATCH, \
        "amaxes that the delayed recipe looks back on: of inputs and gradients one a micro-step, of weights one an optimizer step (Transformer Engine by default " \
        "one a micro-step); the first cast of an input or a gradient is by each rank's own amax") \
    INT(fp8_margin, "fp8-margin", 0, 0, 16, MUST_MATCH, "powers of two that the delayed recipe leaves free at the top") \
    CHOICE(fp8_fast_accum, "fp8-fast-accum", FAST_ACCUM_FPROP, FAST_ACCUMS, MUST_MATCH, "products that Hopper may sum with fewer bits, if the recipe can") \
    FLAG(fp8_emulate, "fp8-emulate", "quantize, then multiply in bf16: the recipe's numbers without its speed, on GPUs that lack its products") \
    INT(fp8_audit, "fp8-audit", 0, 0, 1000000000, FREE, "steps between audits of every FP8 operand (amax, scale, share flushed to zero and saturated, SQNR); 0: none") \
    CHOICE(master_weights, "master-weights", STORAGE_AUTO, WEIGHT_STORAGES, MUST_MATCH, \
           "bf16 is rounded stochastically: right on average, but at --learning-rate 1e-5 weights stray from fp32 ones in 1,000 steps by 4.0e-4 rms, where gradients " \
           "of pure noise move them by 2.4e-4 and gradients with a direction by 1.9e-3; bf16-nearest is rounded to nearest (loses small updates); auto: bf16, or fp32 with --precision fp32") \
    CHOICE(optimizer_state, "optimizer-state", STORAGE_AUTO, STATE_STORAGES, MUST_MATCH, "AdamW's two moments, as above") \
    CHOICE(grad_accum_dtype, "grad-accum-dtype", STORAGE_AUTO, STATE_STORAGES, FREE, \
           "in which gradients of micro-steps are added up: bf16 rounds each sum stochastically, which adds noise of 0.00014% of the norm a micro-step; fp32 takes " \
           "2 bytes a parameter more; auto: fp32 from 256 micro-steps on, or where --master-weights or --reduce-dtype are fp32, else bf16") \
    GROUP("memory") \
    CHOICE(recompute, "recompute", RECOMPUTE_NONE, RECOMPUTES, FREE, "layer: keep each layer's input alone, redo its forward pass in backward") \
    CHOICE(fp8_weight_cache, "fp8-weight-cache", OFF, SWITCHES, FREE, "keep every layer's FP8 weights for the step where weights are whole (one GPU, --sharding none): 2 bytes a weight, and no casts after the first micro-step; off: cast them in each pass") \
    GROUP("optimizer") \
    REAL(learning_rate, "learning-rate", 1e-5, 0, 1e3, FREE, "AdamW's step size at its peak") \
    CHOICE(lr_schedule, "lr-schedule", SCHEDULE_CONSTANT, SCHEDULES, FREE, "after warm-up; cosine and linear end at 0, wsd decays over the last fifth") \
    INT(warmup_steps, "warmup-steps", 0, 0, 1000000000, FREE, "steps of linear warm-up") \
    REAL(weight_decay, "weight-decay", 0.01, 0, 1e3, FREE, "decoupled; on matrices only") \
    REAL(beta1, "beta1", 0.9, 0, 0.9999999, FREE, "decay of the first moment") \
    REAL(beta2, "beta2", 0.999, 0, 0.9999999, FREE, "decay of the second moment") \
    REAL(eps, "eps", 1e-8, 1e-30, 1, FREE, "added to the root of the second moment") \
    REAL(grad_clip, "grad-clip", 0, 0, OPTION_MAX, FREE, "largest global gradient norm; 0: off") \
    CHOICE(on_nonfinite, "on-nonfinite", NONFINITE_STOP, NONFINITES, FREE, "a gradient norm that is not finite, or above 2^63, ends the run, with nothing of its step saved; skip: the step changes no weight, but counts for schedule and bias correction (10 in a row stop)") \
    GROUP("ranks (mpirun -np N)") \
    CHOICE(sharding, "sharding", SHARDING_FULL, SHARDINGS, FREE, "of weights, gradients and optimizer state; grad_op: weights stay whole for a step; hybrid: full within --shard-size ranks, replicas across") \
    INT(shard_size, "shard-size", 0, 0, 1 << 20, FREE, "ranks that share one copy of the model with --sharding hybrid; divides the ranks") \
    CHOICE(reduce_dtype, "reduce-dtype", REDUCE_BF16, REDUCES, FREE, "in which gradients are reduced over ranks; fp32 also adds up micro-steps and feeds AdamW in fp32 (--grad-accum-dtype); nothing on one rank with one micro-step") \
    CHOICE(fp8_all_gather, "fp8-all-gather", AUTO, AUTO_SWITCHES, FREE, "weights travel as FP8, the results are the same bits; auto: where the recipe allows it") \
    CHOICE(copy_engines, "copy-engines", AUTO, AUTO_SWITCHES, FREE, "GPUs of one host read each other's weights and gradients by their copy engines, which leaves the multiprocessors to the products; off: NCCL moves them; on: that or an error") \
    INT(stall_timeout, "stall-timeout", 300, 5, 86400, FREE, \
        "seconds after which a rank that gives no sign of life, or hangs in a call on a file, ends the run with its name; " \
        "4 times that for calls on files while loading, saving and exporting") \
    INT(world_size, "world-size", 0, 0, 1 << 20, FREE, "with --dry-run: plan for this many ranks, without mpirun") \
    GROUP("output") \
    INT(val_every, "val-every", 0, 0, 1000000000, FREE, "steps between validations (one more at the end); 0: at the end alone, if --val-data is given") \
    INT(val_steps, "val-steps", 10, 1, 1000000000, FREE, "validation sequences: the first N of --val-data, whatever the ranks and the batch size") \
    INT(sample_every, "sample-every", 0, 0, 1000000000, FREE, "steps between printed samples; 0: none") \
    INT(sample_tokens, "sample-tokens", 64, 1, 65536, FREE, "length of a sample") \
    TEXT(log_dir, "log-dir", "", FREE, "folder for log.jsonl") \
    CHOICE(on_output_lost, "on-output-lost", OUTPUT_LOST_CONTINUE, OUTPUT_LOSSES, FREE, "when stdout or stderr cannot be written any more (a closed pipe, a full disk): go on without it, or save and stop as for SIGINT") \
    FLAG(profile, "profile", "print where the time of the last step went (GPU trainer)") \
    REAL(peak_tflops, "peak-tflops", 0, 0, 1e9, FREE, "dense BF16 peak for mfu; 0: by the GPU's name") \
    GROUP("checkpoints") \
    TEXT(checkpoint_dir, "checkpoint-dir", "", FREE, "folder of checkpoints") \
    INT(checkpoint_every, "checkpoint-every", 0, 0, 1000000000, FREE, "steps between checkpoints; 0: at the end only, if --checkpoint-dir is given") \
    INT(keep_checkpoints, "keep-checkpoints", 2, 1, 1000000, FREE, "newest ones kept") \
    FLAG(resume, "resume", "continue from the newest whole checkpoint in --checkpoint-dir, if there is one") \
    CHOICE(on_save_error, "on-save-error", SAVE_ERROR_RETRY, SAVE_ERRORS, FREE, \
           "a save that fails is tried again, at once and when the next is due, and the run goes on; stop: it ends") \
    FLAG(no_verify, "no-verify", "start from MODEL without comparing its files with the hashes saved beside them") \
    TEXT(export_hf, "export-hf", "", FREE, "folder for the final weights as Hugging Face reads them") \
    GROUP("run") \
    FLAG(dry_run, "dry-run", "print settings, memory plan and precision table, then stop; needs no GPU") \
    FLAG(json, "json", "with --dry-run: print one JSON object, for programs, and nothing else") \
    CHOICE(list, "list", LIST_NOTHING, LISTS, FREE, "print the names of all models, FP8 recipes or options, one a line, then stop") \
    FLAG(deterministic, "deterministic", "the same bits in every run") \
    FLAG(help, "help", "this text")
// clang-format on

typedef struct {
    const char *model;
#define GROUP(title)
#define INT(field, ...) int64_t field;
#define REAL(field, ...) double field;
#define TEXT(field, ...) const char *field;
#define CHOICE(field, ...) int field;
#define FLAG(field, ...) bool field;
    OPTIONS(GROUP, INT, REAL, TEXT, CHOICE, FLAG)
#undef GROUP
#undef INT
#undef REAL
#undef TEXT
#undef CHOICE
#undef FLAG
} Options;

typedef enum { OPTION_GROUP, OPTION_INT, OPTION_REAL, OPTION_TEXT, OPTION_CHOICE, OPTION_FLAG } OptionKind;

typedef struct {
    OptionKind kind;
    const char *name;           // without the dashes; a group's title
    size_t field;               // offset in Options
    double initial, low, high;  // of numbers; a choice's initial index
    const char *text;           // a text's default; a choice's "a|b|c"
    int match;
    const char *help;
} OptionRow;

// The table as rows; ends with a row whose name is NULL.
static inline const OptionRow *option_rows(void) {
    static const OptionRow rows[] = {
#define GROUP(title) {OPTION_GROUP, title, 0, 0, 0, 0, "", FREE, ""},
#define INT(field, name, initial, low, high, match, help) \
    {OPTION_INT, name, offsetof(Options, field), (double)(initial), (double)(low), (double)(high), "", match, help},
#define REAL(field, name, initial, low, high, match, help) \
    {OPTION_REAL, name, offsetof(Options, field), (double)(initial), (double)(low), (double)(high), "", match, help},
#define TEXT(field, name, initial, match, help) \
    {OPTION_TEXT, name, offsetof(Options, field), 0, 0, 0, initial, match, help},
#define CHOICE(field, name, initial, choices, match, help)                                                  \
    {OPTION_CHOICE, name, offsetof(Options, field), (double)(initial), 0, 0, &("" choices(CHOICE_WORD))[1], \
     match,         help},
#define FLAG(field, name, help) {OPTION_FLAG, name, offsetof(Options, field), 0, 0, 0, "", FREE, help},
        OPTIONS(GROUP, INT, REAL, TEXT, CHOICE, FLAG)
#undef GROUP
#undef INT
#undef REAL
#undef TEXT
#undef CHOICE
#undef FLAG
            {OPTION_GROUP, NULL, 0, 0, 0, 0, "", FREE, ""}};
    return rows;
}

// The index-th of "a|b|c" is copied to `out`. False past the last.
static inline bool option_choice_name(const char *choices, int index, char *out, size_t capacity) {
    for (; index > 0; index--) {
        choices = strchr(choices, '|');
        if (!choices) return false;
        choices++;
    }
    format_checked(out, capacity, "%.*s", (int)strcspn(choices, "|"), choices);
    return true;
}

// The value of one option as text, as the user would type it.
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
    Options o;
    memset(&o, 0, sizeof o);
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

// The one option that has `value` among its choices; NULL if none or several have.
static inline const OptionRow *option_with_choice(const char *value) {
    const OptionRow *found = NULL;
    char name[64];
    for (const OptionRow *row = option_rows(); row->name; row++)
        for (int i = 0; row->kind == OPTION_CHOICE && option_choice_name(row->text, i, name, sizeof name); i++)
            if (strcmp(name, value) == 0) {
                if (found) return NULL;
                found = row;
            }
    return found;
}

// Sets one option from text. Dies when the text is not a whole number, is out of range, or is none of the choices.
static inline void option_set(Options *o, const OptionRow *row, const char *value) {
    void *at = (char *)o + row->field;
    if (row->kind == OPTION_INT || row->kind == OPTION_REAL) {
        char *end;
        errno = 0;
        double real = strtod(value, &end);
        bool whole = row->kind == OPTION_REAL || real == floor(real);
        bool decimal =
            value[strspn(value, "0123456789+-.eE")] == 0;  // strtod also takes spaces, hexadecimal, "inf" and "nan"
        if (end == value || *end || !decimal || !isfinite(real) || !whole || (real == 0 && errno == ERANGE))
            die_with(EXIT_USAGE, "--%s: \"%s\" is not a %s", row->name, value,
                     row->kind == OPTION_INT ? "whole number" : "number");
        if (real < row->low || real > row->high)
            die_with(EXIT_USAGE, "--%s: %s is outside %.10g..%.10g", row->name, value, row->low, row->high);
        if (row->kind == OPTION_INT) *(int64_t *)at = (int64_t)real;
        else *(double *)at = real;
    } else if (row->kind == OPTION_TEXT) {
        *(const char **)at = value;
    } else if (row->kind == OPTION_CHOICE) {
        char name[64];
        for (int i = 0; option_choice_name(row->text, i, name, sizeof name); i++)
            if (strcmp(name, value) == 0) {
                *(int *)at = i;
                return;
            }
        const OptionRow *other = option_with_choice(value);
        die_with(EXIT_USAGE, "--%s: \"%s\" is not one of %s%s%s%s", row->name, value, row->text, other ? "; --" : "",
                 other ? other->name : "", other ? " takes it" : "");
    } else {
        *(bool *)at = true;
    }
}

// Levenshtein's edit distance of two short words.
static inline int option_edit_distance(const char *a, const char *b) {
    int row[64], columns = (int)strlen(b);
    if (columns > 63) return 64;
    for (int j = 0; j <= columns; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= columns; j++) {
            int replace = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            int shorter = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            row[j] = replace < shorter ? replace : shorter;
        }
    }
    return row[columns];
}

// Columns of --help: where the texts begin, and where they are wrapped.
enum { HELP_INDENT = 49, HELP_WIDTH = 130 };

// Prints `text` from column HELP_INDENT on, where the cursor is, in as many lines as it needs.
static inline void options_help_text(const char *text) {
    for (int room = HELP_WIDTH - HELP_INDENT; *text;) {
        int n = (int)strlen(text);
        if (n > room)
            for (n = room; n > 0 && text[n] != ' ';) n--;
        if (n == 0) n = (int)strcspn(text, " ");  // a word longer than a line
        printf("%.*s\n", n, text);
        text += n + strspn(text + n, " ");
        if (*text) printf("%*s", HELP_INDENT, "");
    }
}

static inline void options_help(const char *program, const char *presets) {
    Options o = options_default();
    printf("usage: %s MODEL [--option value ...]\n\nMODEL: %s,\n  or a folder with a Hugging Face config.json (Llama, "
           "Qwen2, Qwen3) and, to start from its weights, *.safetensors\n",
           program, presets);
    for (const OptionRow *row = option_rows(); row->name; row++) {
        if (row->kind == OPTION_GROUP) {
            printf("\n%s\n", row->name);
            continue;
        }
        char left[128], value[256], text[1024];
        option_format(&o, row, value, sizeof value);
        format_checked(left, sizeof left, "--%s%s%s", row->name, row->kind == OPTION_FLAG ? "" : " ",
                       row->kind == OPTION_CHOICE ? row->text
                       : row->kind == OPTION_INT  ? "N"
                       : row->kind == OPTION_REAL ? "X"
                       : row->kind == OPTION_TEXT ? "TEXT"
                                                  : "");
        const bool shown = *value && row->kind != OPTION_FLAG;
        format_checked(text, sizeof text, "%s%s%s%s", row->help, shown ? " [" : "", shown ? value : "",
                       shown ? "]" : "");
        printf("  %-*s%s", HELP_INDENT - 3, left, strlen(left) > HELP_INDENT - 3 ? "\n" : " ");
        if (strlen(left) > HELP_INDENT - 3) printf("%*s", HELP_INDENT, "");
        options_help_text(text);
    }
    printf("\nexit status\n");
#define EXIT_CODE_LINE(id, number, meaning) printf("  %d  %s\n", number, meaning);
    EXIT_CODES(EXIT_CODE_LINE)
#undef EXIT_CODE_LINE
}

// Finds the row of an argument's name (`length` characters, without dashes). Dies with the nearest name when there is
// none.
static inline const OptionRow *option_find(const char *name, size_t length) {
    char word[64];
    format_checked(word, sizeof word, "%.*s", (int)(length < 60 ? length : 60), name);
    const OptionRow *nearest = NULL;
    int nearest_distance = 1 << 30;
    for (const OptionRow *row = option_rows(); row->name; row++) {
        if (row->kind == OPTION_GROUP) continue;
        if (strcmp(row->name, word) == 0) return row;
        const bool begins = *word && strncmp(row->name, word, strlen(word)) == 0;
        const int distance = begins ? 1 : option_edit_distance(word, row->name);
        if (distance < nearest_distance) nearest = row, nearest_distance = distance;
    }
    die_with(EXIT_USAGE, "unknown option --%s; the nearest is --%s (--help lists all)", word, nearest->name);
}

// Reads the command line: one MODEL and --name value or --name=value. options_require_model comes next.
static inline Options options_parse(int argc, char **argv) {
    Options o = options_default();
    const OptionRow *flag = NULL;  // the one right before this argument
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (argument[0] != '-') {
            if (*o.model && flag)
                die_with(EXIT_USAGE, "--%s takes no value, but \"%s\" follows it", flag->name, argument);
            if (*o.model)
                die_with(EXIT_USAGE, "two models given: \"%s\" and \"%s\"; one run trains one", o.model, argument);
            o.model = argument, flag = NULL;
            continue;
        }
        if (argument[1] != '-')
            die_with(EXIT_USAGE, "unknown option %s; options have two dashes and a long name (--help lists all)",
                     argument);
        const char *name = argument + 2, *equals = strchr(name, '=');
        const OptionRow *row = option_find(name, equals ? (size_t)(equals - name) : strlen(name));
        flag = row->kind == OPTION_FLAG ? row : NULL;
        if (flag) {
            if (equals) die_with(EXIT_USAGE, "--%s takes no value", row->name);
            option_set(&o, row, "");
        } else {
            if (!equals && (i + 1 >= argc || strncmp(argv[i + 1], "--", 2) == 0))
                die_with(EXIT_USAGE, "--%s needs a value", row->name);
            option_set(&o, row, equals ? equals + 1 : argv[++i]);
        }
    }
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

// After options_parse: --list prints names, and --help, or no argument at all, prints the help, which shows `presets`;
// both end the program. Dies if there is no MODEL.
static inline void options_require_model(const Options *o, int argc, char **argv, const char *presets) {
    if (o->list && !o->help) {
        options_print_list(o->list, presets);
        exit(EXIT_DONE);
    }
    if (o->help || argc == 1) {
        options_help(argv[0], presets);
        exit(o->help ? EXIT_DONE : EXIT_USAGE);
    }
    if (!*o->model) die_with(EXIT_USAGE, "no MODEL given; for example \"tiny\", or one of: %s", presets);
}

// What linear layers run in unless a filter says otherwise.
static inline const Recipe *options_recipe(const Options *o) {
    return recipe_row(o->precision == PRECISION_FP8 ? o->fp8_recipe : RECIPE_BF16);
}

static inline bool option_is_fp8(const OptionRow *row) {
    return row->kind != OPTION_GROUP && strncmp(row->name, "fp8-", 4) == 0;
}

// Without --precision fp8: the first option for it that was given a value that means something; NULL if none.
static inline const OptionRow *options_stray_fp8(const Options *o) {
    const Options initial = options_default();
    for (const OptionRow *row = option_rows(); row->name; row++) {
        char now[4096], then[64];
        if (!option_is_fp8(row) || (row->field == offsetof(Options, fp8_all_gather) && o->fp8_all_gather == OFF))
            continue;
        option_format(o, row, now, sizeof now);
        option_format(&initial, row, then, sizeof then);
        if (strcmp(now, then) != 0) return row;
    }
    return NULL;
}

// True for an option that says something about the run, so that logs and tables hold it.
static inline bool option_is_setting(const OptionRow *row) {
    const size_t f = row->field;
    const bool prints = f == offsetof(Options, help) || f == offsetof(Options, list) || f == offsetof(Options, json);
    return row->kind != OPTION_GROUP && !prints;
}

// options_conflict for --precision fp8.
static inline void options_fp8_conflict(const Options *o, char *message, size_t capacity) {
    const Options initial = options_default();
    const Recipe *recipe = options_recipe(o);
    const bool filter_auto = strcmp(o->fp8_filter, "auto") == 0;
    int64_t length = o->sequence_length;
    while (o->batch_size * length % recipe->multiple) length++;
    if (length != o->sequence_length)
        format_checked(message, capacity,
                       "--precision fp8 (recipe %s) needs batch-size x sequence-length in multiples of %d (FP8 matrix "
                       "products), not %lld x %lld; "
                       "--sequence-length %lld would do",
                       recipe->name, recipe->multiple, (long long)o->batch_size, (long long)o->sequence_length,
                       (long long)length);
    else if (o->fp8_all_gather == ON && !recipe_has_tensor_scales(recipe))
        format_checked(message, capacity,
                       "--fp8-all-gather on: recipe %s scales rows or blocks of the whole weight, so its weights "
                       "travel in bf16; leave it at auto",
                       recipe->name);
    else if (o->fp8_fast_accum == FAST_ACCUM_ALL && !recipe->fast_accum)
        format_checked(message, capacity,
                       "--fp8-fast-accum all: the products of recipe %s have no fast accumulation; leave it out",
                       recipe->name);
    else if (!recipe->delayed && o->fp8_amax_history != initial.fp8_amax_history)
        format_checked(message, capacity,
                       "--fp8-amax-history %lld is for --fp8-recipe delayed; recipe %s looks at present values alone",
                       (long long)o->fp8_amax_history, recipe->name);
    else if (!recipe->delayed && o->fp8_margin != initial.fp8_margin)
        format_checked(
            message, capacity,
            "--fp8-margin %lld is for --fp8-recipe delayed; recipe %s knows the values it casts and needs none",
            (long long)o->fp8_margin, recipe->name);
    else if (filter_auto && o->fp8_emulate)
        format_checked(message, capacity,
                       "--fp8-filter auto keeps what is faster in FP8, and --fp8-emulate never is; name what stays "
                       "bf16, or leave out one of the two");
    else if (filter_auto && o->deterministic)
        format_checked(message, capacity,
                       "--fp8-filter auto goes by measured times, which differ from run to run, and --deterministic "
                       "wants the same bits; "
                       "name what stays bf16");
}

// Rules between options. Returns an empty string when they hold, else the reason and a fix (in `message`). Pure, for
// the tests.
static inline const char *options_conflict(const Options *o, char *message, size_t capacity) {
    message[0] = 0;
    const OptionRow *stray = o->precision == PRECISION_FP8 ? NULL : options_stray_fp8(o);
    if (o->warmup_steps > o->num_steps)
        format_checked(message, capacity, "--warmup-steps %lld is more than --num-steps %lld",
                       (long long)o->warmup_steps, (long long)o->num_steps);
    else if (o->checkpoint_every && !*o->checkpoint_dir)
        format_checked(message, capacity, "--checkpoint-every needs --checkpoint-dir");
    else if (o->resume && !*o->checkpoint_dir)
        format_checked(message, capacity, "--resume needs --checkpoint-dir, the folder to continue from");
    else if (o->val_every && !*o->val_data) format_checked(message, capacity, "--val-every needs --val-data");
    else if (o->precision == PRECISION_FP32 &&
             (o->master_weights == STORAGE_BF16 || o->master_weights == STORAGE_BF16_NEAREST ||
              o->optimizer_state == STORAGE_BF16))
        format_checked(message, capacity,
                       "--precision fp32 keeps weights and optimizer state in fp32; leave --master-weights and "
                       "--optimizer-state at auto");
    else if (o->precision == PRECISION_FP32 && o->grad_accum_dtype == STORAGE_BF16)
        format_checked(message, capacity,
                       "--precision fp32 adds up gradients in fp32; leave --grad-accum-dtype at auto");
    else if (stray)
        format_checked(
            message, capacity,
            "--%s is for --precision fp8, and this run is --precision %s; add --precision fp8 or leave --%s out",
            stray->name, o->precision == PRECISION_FP32 ? "fp32" : "bf16", stray->name);
    else if (o->sharding == SHARDING_HYBRID && !o->shard_size)
        format_checked(message, capacity,
                       "--sharding hybrid needs --shard-size, the ranks that share one copy of the model (for example "
                       "those of one host)");
    else if (o->sharding != SHARDING_HYBRID && o->shard_size)
        format_checked(message, capacity, "--shard-size is for --sharding hybrid");
    else if (o->copy_engines == ON &&
             (o->sharding == SHARDING_NONE || (o->sharding == SHARDING_HYBRID && o->shard_size == 1)))
        format_checked(message, capacity,
                       "--copy-engines on: with --sharding none, or hybrid with --shard-size 1, nothing is gathered, "
                       "and NCCL reduces the gradients; leave it at auto");
    else if (o->world_size && !o->dry_run)
        format_checked(message, capacity, "--world-size is for --dry-run; a run has the ranks that mpirun -np starts");
    else if (o->json && !o->dry_run)
        format_checked(message, capacity, "--json is for --dry-run; a run writes log.jsonl to --log-dir");
    else if (o->precision == PRECISION_FP8) options_fp8_conflict(o, message, capacity);
    return message;
}

// Ranks that share one copy of the parameters, of `world` ranks. Dies if the options do not allow that many.
static inline int64_t options_shard_group(const Options *o, int64_t world) {
    if (o->sharding == SHARDING_NONE) return 1;
    if (o->sharding != SHARDING_HYBRID) return world;
    if (world % o->shard_size)
        die_with(EXIT_USAGE, "--shard-size %lld does not divide the %lld ranks", (long long)o->shard_size,
                 (long long)world);
    return o->shard_size;
}

// From how many micro-steps on bf16 sums of gradients are too noisy: their noise adds 1.4e-6 of the norm a micro-step
// (gradient_sum.h), here 0.035%. The norm is to be right within 0.1%, and no more than about a third of that may be
// noise.
#define FP32_SUM_MICRO_STEPS 256

// The dtype that --grad-accum-dtype auto stands for. It goes by the options alone: a run's bits must not depend on the
// machine's memory.
static inline int options_sum_storage(const Options *o) {
    const bool wanted = o->master_weights == STORAGE_FP32 || o->reduce_dtype == REDUCE_FP32;
    return wanted || o->grad_accumulation_steps >= FP32_SUM_MICRO_STEPS ? STORAGE_FP32 : STORAGE_BF16;
}

// True if gradients of a run on `world` ranks end as fp32 sums. One rank with one micro-step has nothing to add up; nor
// have ranks that reduce in bf16.
static inline bool options_fp32_gradients(const Options *o, int64_t world) {
    const bool sums = o->grad_accumulation_steps > 1 || (world > 1 && o->reduce_dtype == REDUCE_FP32);
    return o->precision == PRECISION_FP32 || (sums && o->grad_accum_dtype == STORAGE_FP32);
}

// Replaces `auto` by what it stands for.
static inline void options_resolve(Options *o) {
    int storage = o->precision == PRECISION_FP32 ? STORAGE_FP32 : STORAGE_BF16;
    if (o->master_weights == STORAGE_AUTO) o->master_weights = storage;
    if (o->optimizer_state == STORAGE_AUTO) o->optimizer_state = storage;
    if (o->precision == PRECISION_FP32) o->reduce_dtype = REDUCE_FP32;
    if (o->grad_accum_dtype == STORAGE_AUTO) o->grad_accum_dtype = options_sum_storage(o);
    if (o->fp8_all_gather == AUTO) o->fp8_all_gather = recipe_has_tensor_scales(options_recipe(o)) ? ON : OFF;
    if (o->precision == PRECISION_FP8 && o->fp8_format == FP8_FORMAT_AUTO)
        o->fp8_format = options_recipe(o)->dy_format == FP8_E5M2 ? FP8_FORMAT_HYBRID : FP8_FORMAT_E4M3;
}

// Bytes of a value in a storage of master weights or optimizer state, after options_resolve.
static inline int64_t storage_bytes(int storage) { return storage == STORAGE_FP32 ? 4 : 2; }

// The settings table. Options of FP8 are left out where they mean nothing.
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
