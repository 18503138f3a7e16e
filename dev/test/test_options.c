// Tests options.h and options_rules.h: every row of the table, parsing, wrong values, conflicts, what `auto` stands
// for, the text of --help, and the printed settings.
#include "../../llmc/config/defaults.h"
#include "../../llmc/config/supported.h"
#include "lib/check.h"

typedef struct {
    int argc;
    char *argv[12];
} CommandLine;

// Splits "tiny --seed 3" at spaces. '~' is an empty word.
static CommandLine command_line(const char *text) {
    static char words[12][64];
    CommandLine c;
    memset(&c, 0, sizeof c);
    static char program[] = "train";
    c.argv[c.argc++] = program;
    while (*text) {
        const size_t n = strcspn(text, " ");
        if (c.argc == 12 || n >= 64) die("the test's command line is too long");
        format_checked(words[c.argc], 64, "%.*s", (int)n, text);
        if (strcmp(words[c.argc], "~") == 0) words[c.argc][0] = 0;
        c.argv[c.argc] = words[c.argc];
        c.argc++;
        text += n + (text[n] == ' ');
    }
    return c;
}

static Options parse(const char *text) {
    static CommandLine c;  // the options point to it; the next call reuses it and its words
    c = command_line(text);
    Options o = options_parse(c.argc, c.argv);
    options_require_model(&o, c.argc, c.argv, "tiny, small");
    return o;
}

static void parse_action(void *text) {
    fclose(stdout);
    parse((const char *)text);
}

static void test_defaults(void) {
    Options o = parse("tiny");
    CHECK(strcmp(o.model, "tiny") == 0 && strncmp(o.train_data, "data/", 5) == 0 && *o.checkpoint_dir == 0,
          "MODEL is read, and text options have their defaults");
    CHECK(o.seed == 42 && o.learning_rate == -1 && o.weight_decay == 0.01 && o.beta1 == 0.9 && o.beta2 == 0.999 &&
              o.eps == 1e-8 && o.grad_clip == 0,
          "the optimizer's options have their defaults");
    CHECK(o.warmup_steps == 0 && o.lr_schedule == SCHEDULE_CONSTANT && o.on_nonfinite == NONFINITE_STOP &&
              o.shuffle == ON && o.batch_size == 1 && !o.resume && !o.help,
          "options of the schedule, the data and the run have their defaults");
    CHECK(o.master_weights == STORAGE_AUTO && o.optimizer_state == MOMENTS_AUTO && o.recompute == RECOMPUTE_NONE,
          "options of storage and recompute have their defaults");
    Options d = options_default();
    CHECK(*d.model == 0, "MODEL is empty by default");
}

// The rate is chosen by size or for trained weights, and with it what is not given.
static void test_chosen(void) {
    static const struct {
        int64_t parameters;
        double rate;
    } sizes[] = {{143680, 3.5e-3}, {3229952, 1.4e-3}, {125000000, 4.5e-4}, {1235814400, 2.2e-4}, {8030261248, 1.3e-4}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        CHECK(fabs(defaults_rate(sizes[i].parameters) / sizes[i].rate - 1) < 1e-9, "%lld parameters: rate %g, not %g",
              (long long)sizes[i].parameters, defaults_rate(sizes[i].parameters), sizes[i].rate);
    Options o = parse("tiny --num-steps 300");
    defaults_set(&o, 143680, false);
    CHECK(o.lr_schedule == SCHEDULE_COSINE && o.min_lr_ratio == 0.1 && o.warmup_steps == 15 && o.weight_decay == 0.1 &&
              o.beta1 == 0.9 && o.beta2 == 0.95 && o.grad_clip == 1,
          "the schedule and the optimizer of pre-training are chosen with the rate");
    o = parse("tiny --num-steps 1000000");
    defaults_set(&o, 143680, true);
    CHECK(o.learning_rate == 1e-5 && o.warmup_steps == 2000, "trained weights get 1e-5, and warm-up ends by step 2000");
    o = parse("tiny --lr-schedule constant --beta2=0.99 --grad-clip 0 --weight-decay 0 --warmup-steps 0");
    defaults_set(&o, 143680, false);
    CHECK(fabs(o.learning_rate / 3.5e-3 - 1) < 1e-9 && o.lr_schedule == SCHEDULE_CONSTANT && o.min_lr_ratio == 0 &&
              o.warmup_steps == 0 && o.weight_decay == 0 && o.beta2 == 0.99 && o.grad_clip == 0,
          "options that are given stay as they are");
    o = parse("tiny --lr-schedule wsd --decay-steps 98");
    defaults_set(&o, 143680, false);
    CHECK(o.warmup_steps == 2, "warm-up leaves room for --decay-steps");
    o = parse("tiny --learning-rate 1e-5");
    const Options before = o;
    defaults_set(&o, 143680, false);
    CHECK(memcmp(&before, &o, sizeof o) == 0, "a rate that is given leaves all other defaults");
}

// For each row: names are unique and short enough for the spelling aid, the default is in its range, and option_set
// reads what option_format writes.
static void test_rows(void) {
    int rows = 0, groups = 0;
    for (const OptionRow *row = option_rows(); row->name; row++) {
        if (row->kind == OPTION_GROUP) {
            groups++;
            continue;
        }
        rows++;
        CHECK(strlen(row->name) < 40 && row->help[0] && option_find(row->name, strlen(row->name)) == row,
              "--%s has a short name and a help text, and is found by its name", row->name);
        for (const OptionRow *other = row + 1; other->name; other++)
            CHECK(other->kind == OPTION_GROUP || strcmp(row->name, other->name) != 0,
                  "no other option has the name --%s", row->name);
        Options a = options_default(), b = options_default();
        char text[256], again[256];
        if (row->kind == OPTION_INT || row->kind == OPTION_REAL) {
            CHECK(row->low <= row->initial && row->initial <= row->high, "--%s: the default %g is in the range %g..%g",
                  row->name, row->initial, row->low, row->high);
            const double values[] = {row->low, row->high, row->initial};
            for (int i = 0; i < 3; i++) {
                format_checked(text, sizeof text, "%.17g", values[i]);
                option_set(&a, row, text);
                option_format(&a, row, text, sizeof text);
                option_set(&b, row, text);
                option_format(&b, row, again, sizeof again);
                CHECK(strcmp(text, again) == 0, "--%s: %s is read and written again as %s", row->name, text, again);
                const double kept = row->kind == OPTION_INT ? (double)*(int64_t *)((char *)&b + row->field)
                                                            : *(double *)((char *)&b + row->field);
                CHECK(fabs(kept - values[i]) <= 1e-8 * fabs(values[i]), "--%s: %.17g is kept; found %.17g", row->name,
                      values[i], kept);
            }
        } else if (row->kind == OPTION_CHOICE) {
            int choices = 0;
            for (; option_choice_name(row->text, choices, text, sizeof text); choices++) {
                option_set(&a, row, text);
                option_format(&a, row, again, sizeof again);
                CHECK(*(int *)((char *)&a + row->field) == choices && strcmp(text, again) == 0,
                      "--%s %s is read and written", row->name, text);
            }
            CHECK(choices >= 2 && (int)row->initial < choices,
                  "--%s has two choices or more, and its default is one of them; found %d choices", row->name, choices);
        } else if (row->kind == OPTION_TEXT) {
            option_set(&a, row, "a b");
            option_format(&a, row, text, sizeof text);
            CHECK(strcmp(text, "a b") == 0, "--%s takes a text with a blank", row->name);
        } else {
            option_format(&a, row, text, sizeof text);
            CHECK(strcmp(text, "off") == 0, "--%s is off by default", row->name);
            option_set(&a, row, "");
            option_format(&a, row, text, sizeof text);
            CHECK(strcmp(text, "on") == 0, "--%s is on if it is given", row->name);
        }
    }
    CHECK(rows > 30 && groups >= 6, "there are over 30 options, in 6 groups or more; found %d in %d", rows, groups);
}

// Each row of the shorthands is in --help, and sets its option. Of a shorthand and an option the later one counts.
static void test_shorthands(void) {
    for (const ShorthandRow *s = shorthand_rows(); s->shorthand; s++) {
        const OptionRow *row = option_find(s->shorthand, strlen(s->shorthand)),
                        *set = option_find(s->option, strlen(s->option));
        char level[32] = "", value[32], given[64], other[64], line[192];
        option_choice_name(row->text, s->level, level, sizeof level);
        option_choice_name(set->text, option_choice_number(set->text, s->value) == 0, value, sizeof value);
        format_checked(given, sizeof given, "--%s%s%s", s->shorthand, *level ? "=" : "", level);
        format_checked(other, sizeof other, "--%s %s", s->option, value);
        for (int later = 0; later < 2; later++) {
            format_checked(line, sizeof line, "tiny %s %s", later ? given : other, later ? other : given);
            const Options o = parse(line);
            char now[32];
            option_format(&o, set, now, sizeof now);
            CHECK(strcmp(now, later ? value : s->value) == 0, "%s gives --%s %s", line, s->option, now);
        }
        format_checked(line, sizeof line, "--%s %s", s->option, s->value);
        CHECK(row < set && strstr(row->help, line), "--%s stands before %s, and its help has it", s->shorthand, line);
    }
    const Options o = parse("tiny --msamp O2");
    CHECK(o.precision == PRECISION_FP8 && o.optimizer_state == MOMENTS_MSAMP && o.sharding == SHARDING_FULL,
          "a level sets what lower ones set, and not what higher ones do");
    const Options offloads = parse("tiny --msamp O1 --offload moments");
    char message[768];
    ModelConfig m;
    model_config_preset(&m, "tiny");
    CHECK(supported(GPU_TRAINER, &m, &offloads, 1, message, sizeof message) == EXIT_UNSUPPORTED &&
              strstr(message, "; --msamp sets --master-weights fp16-stochastic: give"),
          "what a trainer does not support names the shorthand that sets it: %s", message);
}

static void test_accepted(void) {
    Options o = parse("--num-steps 1e3 llama3.1-8b --precision=fp8 --resume --eps 1e-6");
    CHECK(strcmp(o.model, "llama3.1-8b") == 0 && o.num_steps == 1000 && o.precision == PRECISION_FP8 && o.resume &&
              o.eps == 1e-6,
          "options and MODEL are read in any order, with a space or =");
    o = parse("tiny --log-dir=a=b --seed=4294967295 --shuffle off --seed 7");
    CHECK(strcmp(o.log_dir, "a=b") == 0 && o.seed == 7 && o.shuffle == OFF,
          "a value may hold '=', and the last of two values counts");
    o = parse("tiny --grad-clip 0 --learning-rate +.5e0 --master-weights fp32");
    CHECK(o.learning_rate == 0.5 && o.master_weights == STORAGE_FP32, "numbers and choices are read");
}

static void test_refused(void) {
    static const char *const cases[][2] = {
        {"tiny --nun-steps 3", "unknown option --nun-steps; the nearest is --num-steps"},
        {"tiny --sequence 3", "the nearest is --sequence-length"},
        {"tiny --lr 1", "unknown option --lr; the nearest is --learning-rate"},
        {"tiny --wd 1", "unknown option --wd; the nearest is --weight-decay"},
        {"tiny --learning_rate 1", "unknown option --learning_rate; the nearest is --learning-rate"},
        {"tiny --seq-len 1", "the nearest is --sequence-length"},
        {"tiny --max-steps 1", "the nearest is --num-steps"},
        {"tiny --foo", "unknown option --foo (--help all lists all)"},
        {"tiny --batchsize=3", "unknown option --batchsize; the nearest is --batch-size"},
        {"tiny -b 3", "unknown option -b; options have two dashes"},
        {"tiny -", "unknown option -"},
        {"tiny --", "unknown option --"},
        {"tiny --zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz", "unknown option --zzz"},
        {"tiny --msamp O2 --msamp=off", "--msamp is given twice: what the first one sets would stay; give one"},
        {"tiny small", "two models given: \"tiny\" and \"small\"; a glob needs quotes"},
        {"--seed 3", "no MODEL given"},
        {"~ --seed 3", "no MODEL given"},
        {"tiny --seed", "--seed needs a value"},
        {"tiny --checkpoint-dir --resume", "--checkpoint-dir needs a value"},
        {"tiny --resume=on", "--resume takes no value"},
        {"tiny --seed abc", "--seed: \"abc\" cannot be read as a whole number"},
        {"tiny --seed 1.5", "cannot be read as a whole number"},
        {"tiny --seed 3x", "\"3x\" cannot be read as a whole number"},
        {"tiny --seed ~", "\"\" cannot be read as a whole number"},
        {"tiny --seed=", "\"\" cannot be read as a whole number"},
        {"tiny --seed 0x10", "cannot be read as a whole number"},
        {"tiny --seed nan", "cannot be read as a whole number"},
        {"tiny --seed inf", "cannot be read as a whole number"},
        {"tiny --seed 1e999", "cannot be read as a whole number"},
        {"tiny --seed 4294967296", "--seed: 4294967296 is outside 0..4294967295"},
        {"tiny --seed -1", "is outside"},
        {"tiny --batch-size 0", "--batch-size: 0 is outside 1..65535"},
        {"tiny --sequence-length 0", "is outside"},
        {"tiny --num-steps 0", "is outside"},
        {"tiny --keep-checkpoints 0", "is outside"},
        {"tiny --checkpoint-every x", "--checkpoint-every: \"x\" cannot be read as a whole number"},
        {"tiny --checkpoint-every ~", "\"\" cannot be read as a whole number"},
        {"tiny --checkpoint-every 2e9", "--checkpoint-every: 2e9 is outside 0..1000000000"},
        {"tiny --checkpoint-every 0,5", "--checkpoint-every: 0 is outside 1..1000000000"},
        {"tiny --checkpoint-every 5,,7", "\"\" cannot be read as a whole number"},
        {"tiny --checkpoint-every 5,7.5", "\"7.5\" cannot be read as a whole number"},
        {"tiny --checkpoint-every 5,9,7", "--checkpoint-every: 7 comes after 9; give the steps in rising order"},
        {"tiny --checkpoint-every 5,5", "5 comes after 5"},
        {"tiny --min-lr-ratio 1.1", "is outside"},
        {"tiny --decay-steps -1", "is outside"},
        {"tiny --learning-rate nan", "\"nan\" cannot be read as a number"},
        {"tiny --learning-rate inf", "cannot be read as a number"},
        {"tiny --learning-rate 1e-5e", "cannot be read as a number"},
        {"tiny --learning-rate -2", "--learning-rate: -2 is outside -1..1000"},
        {"tiny --beta1 1", "is outside"},
        {"tiny --beta2 1.0", "is outside"},
        {"tiny --eps 0", "is outside"},
        {"tiny --weight-decay 1,5", "cannot be read as a number"},
        {"tiny --precision fp16", "--precision: \"fp16\" is not one of fp32|bf16|fp8"},
        {"tiny --precision fp", "is not one of"},
        {"tiny --precision fp8|bf16", "is not one of"},
        {"tiny --precision ~", "is not one of"},
        {"tiny --shuffle yes", "--shuffle: \"yes\" is not one of off|on"},
        {"tiny --lr-schedule Cosine", "is not one of constant|cosine|linear|wsd"},
        {"tiny --recompute all", "is not one of none|norm|attention|mlp|layer|auto"},
        {"tiny --on-nonfinite ignore", "is not one of stop|skip"},
        {"tiny --master-weights fp8", "is not one of auto|bf16|fp32"},
        {"tiny --fp8-recipe row", "--fp8-recipe: \"row\" is not one of tensorwise|"},
        {"tiny --fp8-recipe MXFP8", "is not one of tensorwise|"},
        {"tiny --precision mxfp8", "\"mxfp8\" is not one of fp32|bf16|fp8; --fp8-recipe takes it"},
        {"tiny --fp8-recipe e4m3", "; --fp8-format takes it"},
        {"tiny --fp8-recipe fast", "blockwise|mxfp8; --fast is an option of its own"},
        {"tiny --fp8-recipe bf16", "--fp8-recipe: \"bf16\" is not one of tensorwise|"},
        {"tiny --precision hybrid", "is not one of fp32|bf16|fp8\n"},
        {"tiny --fp8-format e5m2", "is not one of auto|hybrid|e4m3"},
        {"tiny --fp8-fast-accum on", "is not one of fprop|all|none"},
        {"tiny --fp8-fast-accum dgrad", "is not one of fprop|all|none"},
        {"tiny --fp8-all-gather yes", "is not one of off|on|auto"},
        {"tiny --fp8-amax-history 0", "--fp8-amax-history: 0 is outside 1..65536"},
        {"tiny --fp8-amax-history 65537", "is outside"},
        {"tiny --fp8-margin -1", "--fp8-margin: -1 is outside 0..16"},
        {"tiny --fp8-margin 17", "is outside"},
        {"tiny --fp8-margin 0.5", "cannot be read as a whole number"},
        {"tiny --fp8-audit -1", "is outside"},
        {"tiny --fp8-emulate=on", "--fp8-emulate takes no value"},
        {"tiny --fp8-filter", "--fp8-filter needs a value"},
        {"tiny --help=short", "--help: \"short\" is not one of off|on|all"},
        {"tiny --fp8-filters first", "the nearest is --fp8-filter"},
        {"tiny --recipe rowwise", "unknown option --recipe; the nearest is --"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK_DIES(parse_action, (void *)cases[i][0], cases[i][1], "%s is refused", cases[i][0]);
    CHECK(text_edit_distance("", "abc") == 3 && text_edit_distance("kitten", "sitting") == 3 &&
              text_edit_distance("same", "same") == 0 && text_edit_distance("ab", "ba") == 2,
          "text_edit_distance counts insertions, deletions and substitutions");
}

// Parses `first` and `words`, and checks that options_conflict() says `expected`, or nothing if that is "".
static Options check_conflict(const char *first, const char *words, const char *expected) {
    char message[512], line[256];
    format_checked(line, sizeof line, "%s%s", first, words);
    const Options o = parse(line);
    options_conflict(&o, message, sizeof message);
    CHECK(*expected ? strstr(message, expected) != NULL : *message == 0, "%s is refused or allowed as expected: \"%s\"",
          line, message);
    return o;
}

// Each case has FP8 options and a part of the message that refuses them together, or "" if they are allowed.
static void test_fp8_conflicts(void) {
    static const char *const cases[][2] = {
        // batch-size x sequence-length must be a multiple of 16, 32 or 128: it depends on the recipe
        {"--fp8-recipe blockwise --sequence-length 64",
         "(recipe blockwise) needs batch-size x sequence-length in multiples of 128 (FP8 GEMMs), not 1 x 64; "
         "--sequence-length 128 would do"},
        {"--fp8-recipe blockwise --sequence-length 64 --batch-size 2", ""},
        {"--fp8-recipe blockwise --sequence-length 100 --batch-size 6", "not 6 x 100; --sequence-length 128 would do"},
        {"--fp8-recipe mxfp8 --sequence-length 48",
         "(recipe mxfp8) needs batch-size x sequence-length in multiples of 32 (FP8 GEMMs), not 1 x 48; "
         "--sequence-length 64 would do"},
        {"--fp8-recipe mxfp8 --sequence-length 48 --batch-size 2", ""},
        {"--fp8-recipe rowwise --sequence-length 48", ""},
        {"--fp8-recipe delayed --sequence-length 40", "multiples of 16"},
        // not every recipe can gather FP8 weights or has fast_accum
        {"--fp8-all-gather on", ""},
        {"--fp8-recipe delayed --fp8-all-gather on", ""},
        {"--fp8-recipe rowwise --fp8-all-gather on",
         "--fp8-all-gather on: recipe rowwise has one scale for each row or block"},
        {"--fp8-recipe rowwise_with_gw_hp --fp8-all-gather on", "gathered in bf16; leave it at auto"},
        {"--fp8-recipe blockwise --fp8-all-gather on", "recipe blockwise"},
        {"--fp8-recipe mxfp8 --fp8-all-gather on", "recipe mxfp8"},
        {"--fp8-recipe mxfp8 --fp8-all-gather off", ""},
        {"--fp8-recipe rowwise --fp8-all-gather auto", ""},
        {"--fp8-fast-accum all", ""},
        {"--fp8-recipe rowwise_with_gw_hp --fp8-fast-accum all", ""},
        {"--fp8-recipe blockwise --fp8-fast-accum all", "--fp8-fast-accum all: the GEMMs of recipe blockwise"},
        {"--fp8-recipe mxfp8 --fp8-fast-accum all", "recipe mxfp8 have no fast accumulation"},
        {"--fp8-recipe blockwise --fp8-fast-accum none", ""},
        {"--fp8-recipe blockwise --fp8-fast-accum fprop", ""},
        // options that only the delayed recipe reads
        {"--fp8-recipe delayed --fp8-amax-history 16 --fp8-margin 2", ""},
        {"--fp8-amax-history 16",
         "--fp8-amax-history 16 is for --fp8-recipe delayed; recipe tensorwise scales by current"},
        {"--fp8-amax-history 1024", ""},
        {"--fp8-lm-head forward", ""},
        {"--fp8-recipe mxfp8 --fp8-lm-head on", ""},
        {"--fp8-recipe blockwise --fp8-lm-head all", ""},
        {"--fp8-recipe rowwise_with_gw_hp --fp8-format hybrid --fp8-lm-head all", ""},
        {"--fp8-recipe rowwise --fp8-lm-head forward", ""},
        {"--fp8-recipe rowwise --fp8-lm-head on", "add --fp8-format hybrid, or use --fp8-lm-head forward"},
        {"--fp8-format e4m3 --fp8-lm-head all", "add --fp8-format hybrid, or use --fp8-lm-head forward"},
        {"--fp8-recipe rowwise --fp8-lm-head all", "use --fp8-lm-head on with --fp8-format hybrid, or another"},
        {"--fp8-lm-head forward --fp8-filter first,lm_head", "but --fp8-lm-head wants it in FP8; leave out one"},
        {"--fast --fp8-recipe blockwise", "use none; --fast sets --fp8-fast-accum all: give"},
        {"--fast --precision bf16", "leave --fp8-recipe out; --fast sets --fp8-recipe tensorwise_bounded: give"},
        {"--fp8-recipe delayed --fp8-lm-head on", "use another --fp8-recipe, or --fp8-lm-head off"},
        // tensorwise_bounded needs a bound on AdamW's step
        {"--fp8-recipe tensorwise_bounded", ""},
        {"--fp8-recipe tensorwise_bounded --optimizer-state fp32 --master-weights fp32", ""},
        {"--fp8-recipe tensorwise_bounded --beta1 0.95 --beta2 0.95 --fp8-lm-head on", ""},
        {"--fp8-recipe tensorwise_bounded --beta1 0.98 --beta2 0.95",
         "no bound with --beta1 0.98 and --beta2 0.95; it has one if --beta2 is above 0.9831, or take"},
        {"--fp8-recipe tensorwise_bounded --beta1 0.99",
         "and --beta2 0.999; it has one if --beta1 is below 0.9879, or with --optimizer-state fp32, or take"},
        {"--fp8-recipe tensorwise_bounded --beta1 0.99 --optimizer-state fp32", ""},
        {"--fp8-recipe tensorwise_bounded --optimizer-state coat", "bf16 and fp32 moments and bf16 and fp32 weights"},
        {"--fp8-recipe tensorwise_bounded --optimizer-state msamp", "use these, or --fp8-recipe tensorwise"},
        {"--fp8-recipe tensorwise_bounded --master-weights fp16", "use these, or --fp8-recipe tensorwise"},
        {"--fp8-recipe tensorwise_bounded --eps 1e-20", "needs --eps of at least 1e-15, not 1e-20"},
        {"--fp8-recipe tensorwise_bounded --fp8-margin 1", "recipe tensorwise_bounded scales by current"},
        {"--fp8-recipe blockwise --fp8-margin 1",
         "--fp8-margin 1 is for --fp8-recipe delayed; recipe blockwise scales by current"},
        // every recipe takes every --fp8-format
        {"--fp8-recipe rowwise --fp8-format hybrid", ""},
        {"--fp8-format e4m3", ""},
        {"--fp8-recipe mxfp8 --fp8-format hybrid", ""},
        // --fp8-filter auto measures FP8 against bf16: not with --fp8-emulate, and not with --deterministic
        {"--fp8-filter auto", ""},
        {"--fp8-filter auto --fp8-emulate",
         "--fp8-filter auto keeps in FP8 only layers that run faster in FP8, and with --fp8-emulate none does"},
        {"--fp8-filter auto --deterministic", "--fp8-filter auto depends on measured times"},
        {"--fp8-filter first --deterministic --fp8-emulate", ""},
        {"--fp8-audit 10 --fp8-emulate", ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_conflict("tiny --precision fp8 ", cases[i][0], cases[i][1]);
}

// Each case has an option beside --optimizer-in-backward and a part of the message that refuses both, or "" if they are
// allowed.
static void test_backward_conflicts(void) {
    static const char *const cases[][2] = {
        {"", ""},
        {"--on-nonfinite stop --precision fp8 --sharding none", ""},
        {"--grad-clip 1", ""},
        {"--on-nonfinite skip",
         "must know that all gradients are finite before it changes a weight; leave out one of the two"},
        {"--grad-accumulation-steps 2", "keeps no gradients from one micro-step to the next; use "
                                        "--grad-accumulation-steps 1, and a larger --batch-size or more ranks"},
        {"--grad-accum-dtype fp8", "FP8 would save little memory; use --grad-accum-dtype bf16 and --reduce-dtype bf16"},
        {"--reduce-dtype fp8", "FP8 would save little memory; use --reduce-dtype bf16"}};
    char message[512];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options o = check_conflict("tiny --optimizer-in-backward ", cases[i][0], cases[i][1]);
        o.optimizer_in_backward = false;
        CHECK(*options_conflict(&o, message, sizeof message) == 0,
              "%s is allowed if --optimizer-in-backward is left out: \"%s\"", cases[i][0], message);
    }
}

// Each case has --offload with a list, the parts that are read from the list (those before the first unknown word), and
// a part of the message that refuses the list, or "" if it is accepted.
static void test_offload(void) {
    static const struct {
        const char *options;
        bool moments, master, activations;
        const char *message;
    } cases[] = {
        {"", false, false, false, ""},
        {"--offload none", false, false, false, ""},
        {"--offload moments", true, false, false, ""},
        {"--offload master --master-weights fp32", false, true, false, ""},
        {"--offload moments,master --master-weights fp32", true, true, false, ""},
        {"--offload master,moments --master-weights fp32", true, true, false, ""},
        {"--offload activations", false, false, true, ""},
        {"--offload activations --precision fp8 --recompute layer", false, false, true, ""},
        {"--offload moments,activations", true, false, true, ""},
        {"--offload activation", false, false, false, "\"activation\" is not moments, master"},
        {"--offload master,activations", false, true, true, "this run has none: add --master-weights fp32"},
        {"--offload moment", false, false, false,
         "\"moment\" is not moments, master or activations; \"none\" must stand alone"},
        {"--offload moments,masters", true, false, false, "\"masters\" is not moments, master or activations"},
        {"--offload none,moments", false, false, false, "\"none\" is not moments, master or activations"},
        {"--offload master", false, true, false, "this run has none: add --master-weights fp32, or leave master out"},
        {"--offload moments,master --master-weights fp16", true, true, false, "this run has none: add"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const Options o = check_conflict("tiny ", cases[i].options, cases[i].message);
        Offloaded out;
        options_read_offload(o.offload, &out);
        CHECK(out.moments == cases[i].moments && out.master == cases[i].master &&
                  out.activations == cases[i].activations,
              "%s: the expected parts are read; found moments %d, master %d, activations %d", cases[i].options,
              out.moments, out.master, out.activations);
    }
}

// FP8 options are refused without --precision fp8, and the message says what to change. Defaults and --fp8-all-gather
// off are accepted.
static void test_stray_fp8(void) {
    static const char *const strays[] = {"recipe mxfp8", "recipe rowwise",  "format e4m3",  "filter first",
                                         "filter auto",  "amax-history 16", "margin 1",     "fast-accum none",
                                         "emulate",      "audit 5",         "all-gather on"};
    static const char *const fine[] = {"recipe tensorwise", "format auto", "all-gather off",  "all-gather auto",
                                       "audit 0",           "margin 0",    "fast-accum fprop"};
    char message[512], line[256], expected[256];
    for (int fp32 = 0; fp32 < 2; fp32++) {
        for (size_t i = 0; i < sizeof strays / sizeof strays[0]; i++) {
            const int n = (int)strcspn(strays[i], " ");
            format_checked(line, sizeof line, "tiny --precision %s --fp8-%s", fp32 ? "fp32" : "bf16", strays[i]);
            format_checked(expected, sizeof expected,
                           "--fp8-%.*s is for --precision fp8, and this run is --precision %s; add --precision fp8 or "
                           "leave --fp8-%.*s out",
                           n, strays[i], fp32 ? "fp32" : "bf16", n, strays[i]);
            Options o = parse(line);
            CHECK(strcmp(options_conflict(&o, message, sizeof message), expected) == 0,
                  "%s is refused with the remedy: \"%s\"", line, message);
        }
        for (size_t i = 0; i < sizeof fine / sizeof fine[0]; i++)
            check_conflict(fp32 ? "tiny --precision fp32 --fp8-" : "tiny --precision bf16 --fp8-", fine[i], "");
    }
    // A very long text must not displace the expected words of the message.
    Options o = parse("tiny");
    char *filter = (char *)xcalloc(3001, 1);
    memset(filter, 'x', 3000);
    o.fp8_filter = filter;
    CHECK(strstr(options_conflict(&o, message, sizeof message), "--fp8-filter is for --precision fp8"),
          "a filter of 3000 characters is refused: %s", message);
    free(filter);
}

// --tokens-per-step sets the number of micro-steps, or names tokens that would do.
static void test_tokens_per_step(void) {
    static const struct {
        const char *line;
        int64_t world;
        bool given;
        int64_t steps;  // 0: refused
        const char *message;
    } cases[] = {
        {"tiny", 3, false, 1, ""},
        {"tiny --grad-accumulation-steps 5", 3, true, 5, ""},
        {"tiny --tokens-per-step 49152 --batch-size 2", 3, false, 4, ""},
        {"tiny --tokens-per-step 49152 --batch-size 2 --grad-accumulation-steps 4", 3, true, 4, ""},
        {"tiny --tokens-per-step 49152 --grad-accumulation-steps 4", 3, true, 0,
         "needs --grad-accumulation-steps 8 here, not 4"},
        {"tiny --tokens-per-step 49152 --grad-accumulation-steps 1", 3, true, 0, "here, not 1"},
        {"tiny --tokens-per-step 50000 --batch-size 2", 3, false, 0,
         "--tokens-per-step 50000 is no multiple of the 12288 tokens of a micro-step (3 ranks x --batch-size 2 x "
         "--sequence-length 2048); 49152 or 61440 would do"},
        {"tiny --tokens-per-step 1", 1, false, 0, "--sequence-length 2048); 2048 would do"},
        {"tiny --tokens-per-step 1e12 --sequence-length 1", 1, false, 0, "micro-steps, more than 1048576; give fewer"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options o = parse(cases[i].line);
        char message[512];
        options_set_accumulation(&o, cases[i].world, cases[i].given, message, sizeof message);
        CHECK(strstr(message, cases[i].message) && !*message == (cases[i].steps > 0), "%s: %s", cases[i].line, message);
        CHECK(!cases[i].steps || o.grad_accumulation_steps == cases[i].steps, "%s: %lld micro-steps", cases[i].line,
              (long long)o.grad_accumulation_steps);
    }
}

static void test_conflicts(void) {
    static const char *const cases[][2] = {
        {"tiny", ""},
        {"tiny --warmup-steps 101", "--warmup-steps 101 is more than --num-steps 100"},
        {"tiny --warmup-steps 100", ""},
        {"tiny --lr-schedule wsd --decay-steps 90 --warmup-steps 10 --min-lr-ratio 0.1", ""},
        {"tiny --lr-schedule wsd --decay-steps 91 --warmup-steps 10",
         "--decay-steps 91 is more than the 90 steps that follow warm-up (--num-steps 100, --warmup-steps 10)"},
        {"tiny --lr-schedule cosine --decay-steps 5", "--decay-steps is for --lr-schedule wsd"},
        {"tiny --decay-steps 5", "--decay-steps is for --lr-schedule wsd"},
        {"tiny --learning-rate 1 --min-lr-ratio 0.1", "a constant rate does not fall"},
        {"tiny --lr-schedule constant --min-lr-ratio 0.1", "a constant rate does not fall"},
        {"tiny --min-lr-ratio 0.1", ""},
        {"tiny --learning-rate -0.5", "--learning-rate -0.5 is below 0; -1 lets the run choose it"},
        {"tiny --checkpoint-every 5", "--checkpoint-every needs --checkpoint-dir"},
        {"tiny --checkpoint-every 5 --checkpoint-dir c", ""},
        {"tiny --checkpoint-every 5,7", "--checkpoint-every needs --checkpoint-dir"},
        {"tiny --checkpoint-every 500 --checkpoint-dir c", ""},
        {"tiny --checkpoint-every 5,100 --checkpoint-dir c", ""},
        {"tiny --checkpoint-every 5,101 --checkpoint-dir c", "names step 101, after --num-steps 100"},
        {"tiny --document-mask on", ""},
        {"tiny --document-mask 128000", ""},
        {"tiny --document-mask -1", "\"-1\" is neither on, off nor the id of a token"},
        {"tiny --document-mask 5x", "\"5x\" is neither"},
        {"tiny --document-mask=", "\"\" is neither"},
        {"tiny --resume", "--resume needs --checkpoint-dir"},
        {"tiny --resume --checkpoint-dir c", ""},
        {"tiny --val-every 5", "--val-every needs --val-data"},
        {"tiny --val-every 5 --val-data v", ""},
        {"tiny --precision fp32 --master-weights bf16", "--precision fp32 keeps weights and optimizer state in fp32"},
        {"tiny --precision fp32 --grad-accum-dtype bf16", "adds up gradients in fp32"},
        {"tiny --precision fp32 --grad-accum-dtype fp8", "adds up gradients in fp32"},
        {"tiny --precision fp32 --reduce-dtype fp8", "reduces gradients in fp32; leave out --reduce-dtype fp8"},
        {"tiny --precision fp32 --grad-accum-dtype fp32", ""},
        {"tiny --reduce-dtype fp8 --grad-accum-dtype bf16", "with --grad-accum-dtype bf16 they are not FP8"},
        {"tiny --reduce-dtype fp8 --grad-accum-dtype fp32", "with --grad-accum-dtype fp32 they are not FP8"},
        {"tiny --reduce-dtype fp8 --grad-accum-dtype fp8", ""},
        {"tiny --reduce-dtype fp8", ""},
        {"tiny --reduce-dtype bf16 --grad-accum-dtype fp8 --optimizer-state msamp --master-weights fp16", ""},
        {"tiny --precision fp32 --optimizer-state bf16", "--precision fp32 keeps weights and optimizer state in fp32"},
        {"tiny --precision fp32 --optimizer-state coat", "--precision fp32 keeps weights and optimizer state in fp32"},
        {"tiny --precision bf16 --fp8-lm-head on", "--fp8-lm-head is for --precision fp8"},
        {"tiny --precision bf16 --fp8-activations on", "--fp8-activations is for --precision fp8"},
        {"tiny --precision fp8 --fp8-activations on --recompute mlp",
         "with --recompute mlp backward computes gate and"},
        {"tiny --precision fp8 --fp8-activations on --recompute layer",
         "with --recompute layer backward computes gate"},
        {"tiny --precision fp8 --fp8-activations on --recompute attention", ""},
        {"tiny --precision fp8 --fp8-activations on --recompute auto", ""},
        {"tiny --precision fp32 --optimizer-state msamp", "--precision fp32 keeps weights and optimizer state in fp32"},
        {"tiny --precision fp32 --master-weights fp16", "--precision fp32 keeps weights and optimizer state in fp32"},
        {"tiny --optimizer-state msamp --master-weights fp16", ""},
        {"tiny --precision fp32 --master-weights fp32", ""},
        {"tiny --precision fp8 --sequence-length 40",
         "in multiples of 16 (FP8 GEMMs), not 1 x 40; --sequence-length 48 would do"},
        {"tiny --precision fp8 --sequence-length 40 --batch-size 2", ""},
        {"tiny --precision bf16 --sequence-length 40", ""},
        {"tiny --sharding hybrid", ""},
        {"tiny --sharding hybrid --dry-run --world-size 8", "--world-size with --sharding hybrid needs --shard-size"},
        {"tiny --sharding hybrid --shard-size 2", ""},
        {"tiny --sharding none --copy-engines on",
         "--copy-engines on: with --sharding none, or hybrid with --shard-size 1, no weights are gathered"},
        {"tiny --sharding hybrid --shard-size 1 --copy-engines on", "no weights are gathered"},
        {"tiny --sharding hybrid --shard-size 2 --copy-engines on", ""},
        {"tiny --sharding none --copy-engines off", ""},
        {"tiny --copy-engines on", ""},
        {"tiny --shard-size 2", "--shard-size is for --sharding hybrid"},
        {"tiny --world-size 8", "--world-size is for --dry-run"},
        {"tiny --world-size 8 --dry-run", ""},
        {"tiny --json", "--json is for --dry-run"},
        {"tiny --json --dry-run", ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) check_conflict("", cases[i][0], cases[i][1]);
}

static void conflict_action(void *text) {
    char message[512];
    CommandLine c = command_line((const char *)text);
    const Options o = options_parse(c.argc, c.argv);
    if (*options_conflict(&o, message, sizeof message)) die("%s", message);
}

static void mix_action(void *text) { mix_read((const char *)text); }

// The shares of --mix are counts of 1000, by the largest remainder. Damaged texts are refused.
static void test_mix(void) {
    static const struct {
        const char *text;
        int64_t counts[3];
    } read[] = {{"a=0.7,b=0.3", {700, 300}},
                {"a*.bin=1, b=1,c=1", {334, 333, 333}},
                {"a=b=2,b=1e3", {2, 998}},
                {"a=1,b=2,c=4", {143, 286, 571}},
                {"a=1e15,b=1e15", {500, 500}}};
    static const char *const refused[][2] = {
        {"a", "--mix: \"a\" is not of the form PATH=WEIGHT"},
        {"a=1,b", "\"b\" is not of the form"},
        {"a=1,=2", "\"=2\" is not of the form"},
        {"a=1,b=2,", "\"\" is not of the form"},
        {"a=1", "--mix names one source; name a second one, or use --train-data"},
        {"a=1,b=0", "--mix: 0 is outside"},
        {"a=1,b=-0.5", "--mix: -0.5 is outside"},
        {"a=1,b=", "--mix: \"\" cannot be read as a number"},
        {"a=1,b=nan", "\"nan\" cannot be read as a number"},
        {"a=1,b=2/c", "\"2/c\" cannot be read as a number"},
        {"a=1,b=1e-5", "--mix: with weight 1e-05 of 1.00001 b has none of 1000 sequences"},
        {"a=1,b=1 --train-data c", "--mix names all training data; leave out --train-data"}};
    char line[128], many[65 * 4 + 1] = "";
    for (size_t i = 0; i < sizeof read / sizeof read[0]; i++) {
        const Mix mix = mix_read(read[i].text);
        for (int k = 0; k < 3; k++)
            CHECK(mix.sources[k].count == read[i].counts[k], "%s: source %d has %lld of 1000", read[i].text, k,
                  (long long)mix.sources[k].count);
    }
    CHECK(mix_read("a=b=2,b=1e3").sources[0].length == 3, "a path may hold \"=\"");
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        format_checked(line, sizeof line, "tiny --mix %s", refused[i][0]);
        CHECK_DIES(conflict_action, line, refused[i][1], "%s is refused", line);
    }
    for (int i = 0; i < 65; i++) strcat(many, i ? ",a=1" : "a=1");
    CHECK_DIES(mix_action, many, "--mix names more than 64 sources", "65 sources are too many");
    Options o = parse("tiny --mix a=1,b=2");
    options_resolve(&o);
    CHECK(!*o.train_data, "--mix clears --train-data");
}

static void test_resolve(void) {
    static const struct {
        const char *line;
        int weights, state;
        int64_t moment_bytes, weight_bytes;  // bytes of both moments of 256 elements; bytes of a weight in a file
    } cases[] = {{"tiny", STORAGE_BF16, MOMENTS_BF16, 1024, 2},
                 {"tiny --precision fp8", STORAGE_BF16, MOMENTS_BF16, 1024, 2},
                 {"tiny --precision fp32", STORAGE_FP32, MOMENTS_FP32, 2048, 4},
                 {"tiny --master-weights fp32", STORAGE_FP32, MOMENTS_BF16, 1024, 4},
                 {"tiny --master-weights bf16-nearest", STORAGE_BF16_NEAREST, MOMENTS_BF16, 1024, 2},
                 {"tiny --master-weights fp16", STORAGE_FP16, MOMENTS_BF16, 1024, 4},
                 {"tiny --master-weights fp16-stochastic", STORAGE_FP16_STOCHASTIC, MOMENTS_BF16, 1024, 4},
                 {"tiny --optimizer-state fp32", STORAGE_BF16, MOMENTS_FP32, 2048, 2},
                 {"tiny --optimizer-state coat", STORAGE_BF16, MOMENTS_COAT, 528, 2},
                 {"tiny --optimizer-state coat-stochastic", STORAGE_BF16, MOMENTS_COAT_STOCHASTIC, 528, 2},
                 {"tiny --optimizer-state msamp", STORAGE_BF16, MOMENTS_MSAMP, 768, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options o = parse(cases[i].line);
        options_resolve(&o);
        CHECK(o.master_weights == cases[i].weights && o.optimizer_state == cases[i].state &&
                  options_moment_bytes(&o, 256) == cases[i].moment_bytes &&
                  options_weight_bytes(&o) == cases[i].weight_bytes,
              "weights and optimizer state have the expected dtypes and sizes: %s", cases[i].line);
    }
}

// auto follows from the recipe. Given values stay.
static void test_resolve_fp8(void) {
    static const struct {
        const char *line;
        int gather, format;
    } cases[] = {{"tiny --precision fp8", ON, FP8_FORMAT_HYBRID},
                 {"tiny --precision fp8 --fp8-recipe delayed", ON, FP8_FORMAT_HYBRID},
                 {"tiny --precision fp8 --fp8-recipe rowwise", OFF, FP8_FORMAT_E4M3},
                 {"tiny --precision fp8 --fp8-recipe rowwise_with_gw_hp", OFF, FP8_FORMAT_E4M3},
                 {"tiny --precision fp8 --fp8-recipe blockwise", OFF, FP8_FORMAT_E4M3},
                 {"tiny --precision fp8 --fp8-recipe mxfp8", OFF, FP8_FORMAT_E4M3},
                 {"tiny --precision fp8 --fp8-format e4m3 --fp8-all-gather off", OFF, FP8_FORMAT_E4M3},
                 {"tiny --precision fp8 --fp8-recipe blockwise --fp8-format hybrid", OFF, FP8_FORMAT_HYBRID},
                 {"tiny --precision fp8 --fp8-recipe delayed --fp8-all-gather on", ON, FP8_FORMAT_HYBRID},
                 {"tiny", OFF, FP8_FORMAT_AUTO},
                 {"tiny --precision fp32", OFF, FP8_FORMAT_AUTO}};  // without FP8, --fp8-format stays auto
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options o = parse(cases[i].line), again;
        options_resolve(&o);
        CHECK(o.fp8_all_gather == cases[i].gather && o.fp8_format == cases[i].format,
              "%s: auto gives the expected all-gather and format; found %d and %d", cases[i].line, o.fp8_all_gather,
              o.fp8_format);
        again = o;
        options_resolve(&again);
        CHECK(memcmp(&o, &again, sizeof o) == 0, "%s: resolving again changes nothing", cases[i].line);
        char message[512];
        CHECK(*options_conflict(&o, message, sizeof message) == 0, "%s: what auto stands for is allowed: \"%s\"",
              cases[i].line, message);
        CHECK(strcmp(options_recipe(&o)->name,
                     o.precision == PRECISION_FP8 ? recipe_row(o.fp8_recipe)->name : "bf16") == 0,
              "%s: the recipe is that of --fp8-recipe, or bf16 without FP8; found %s", cases[i].line,
              options_recipe(&o)->name);
    }
    // The choices of --fp8-recipe are the rows of the table, in its order.
    const OptionRow *row = option_find("fp8-recipe", 10);
    char name[64];
    for (int i = 0; i < NUM_RECIPES; i++)
        CHECK(option_choice_name(row->text, i, name, sizeof name) && strcmp(name, recipe_row(i)->name) == 0,
              "choice %d of --fp8-recipe is the table's row: %s, %s", i, name, recipe_row(i)->name);
    CHECK(!option_choice_name(row->text, NUM_RECIPES, name, sizeof name), "there is no recipe beyond the table");
}

static void shard_group_action(void *text) {
    const Options o = parse((const char *)text);
    options_shard_group(&o, 6);
}

static void test_sharding(void) {
    static const struct {
        const char *line;
        int64_t world, group;
    } cases[] = {{"tiny", 1, 1},
                 {"tiny", 6, 6},
                 {"tiny --sharding grad_op", 6, 6},
                 {"tiny --sharding none", 6, 1},
                 {"tiny --sharding hybrid --shard-size 3", 6, 3},
                 {"tiny --sharding hybrid --shard-size 6", 6, 6}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const Options o = parse(cases[i].line);
        CHECK(options_shard_group(&o, cases[i].world) == cases[i].group,
              "%s: the shard group has the expected number of ranks", cases[i].line);
    }
    CHECK_DIES(shard_group_action, (void *)"tiny --sharding hybrid --shard-size 4",
               "--shard-size 4 does not divide the 6 ranks",
               "a shard size that does not divide the number of ranks is refused");
    Options o = parse("tiny --precision fp32"), half = parse("tiny --precision fp8");
    options_resolve(&o), options_resolve(&half);
    CHECK(o.reduce_dtype == REDUCE_FP32 && half.reduce_dtype == REDUCE_BF16 && half.fp8_all_gather == ON,
          "--precision fp32 reduces in fp32; --precision fp8 reduces in bf16 and gathers weights in FP8");
}

// The options give the dtype in which gradients are summed. The options and the number of ranks tell if AdamW reads
// fp32 gradients.
static void test_gradient_sums(void) {
    static const struct {
        const char *line;
        int64_t world;
        int storage;
        bool fp32;
    } cases[] = {{"tiny", 1, SUM_BF16, false},
                 {"tiny --grad-accumulation-steps 255", 1, SUM_BF16, false},
                 {"tiny --grad-accumulation-steps 256", 1, SUM_FP32, true},
                 {"tiny --grad-accumulation-steps 256 --grad-accum-dtype bf16", 1, SUM_BF16, false},
                 {"tiny --grad-accumulation-steps 2 --grad-accum-dtype fp32", 1, SUM_FP32, true},
                 {"tiny --grad-accumulation-steps 2 --master-weights fp32", 4, SUM_FP32, true},
                 {"tiny --master-weights fp32", 4, SUM_FP32, false},
                 {"tiny --reduce-dtype fp32", 1, SUM_FP32, false},
                 {"tiny --reduce-dtype fp32", 2, SUM_FP32, true},
                 {"tiny --reduce-dtype fp32 --grad-accum-dtype bf16", 2, SUM_BF16, false},
                 {"tiny --grad-accum-dtype fp8", 1, SUM_FP8, false},
                 {"tiny --reduce-dtype fp8", 1, SUM_FP8, false},
                 {"tiny --reduce-dtype fp8 --master-weights fp32 --grad-accumulation-steps 300", 2, SUM_FP8, false},
                 {"tiny --reduce-dtype fp32 --grad-accum-dtype fp8", 2, SUM_FP8, false},
                 {"tiny --precision fp32", 1, SUM_FP32, true},
                 {"tiny --deterministic --grad-accumulation-steps 64", 4, SUM_FP32, true},
                 {"tiny --deterministic --grad-accumulation-steps 63", 4, SUM_BF16, false},
                 {"tiny --deterministic --grad-accumulation-steps 64 --grad-accum-dtype bf16", 4, SUM_BF16, false},
                 {"tiny --deterministic --grad-accumulation-steps 64 --reduce-dtype fp8", 4, SUM_FP8, false},
                 {"tiny --deterministic --master-weights fp32", 1, SUM_FP32, false},
                 {"tiny --deterministic --master-weights fp32", 2, SUM_FP32, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options o = parse(cases[i].line);
        options_count_micro_steps(&o, cases[i].world);
        options_resolve(&o);
        CHECK(o.grad_accum_dtype == cases[i].storage && options_fp32_gradients(&o, cases[i].world) == cases[i].fp32,
              "%s on %lld ranks: sums and AdamW's gradients have the expected dtypes; found sums %d, fp32 gradients %d",
              cases[i].line, (long long)cases[i].world, o.grad_accum_dtype, options_fp32_gradients(&o, cases[i].world));
        CHECK(options_fp8_gradients(&o) == (cases[i].storage == SUM_FP8),
              "%s: gradients are FP8 if sums are, and only then", cases[i].line);
    }
}

static void print_action(void *arguments) {
    const Options o = parse((const char *)arguments);
    options_print(&o);
    fflush(stdout);
}

// Parses `train ARGUMENTS` and prints the settings, in a child process. Returns its stdout. *status is as from
// waitpid().
static char *printed_by(const char *arguments, int *status) {
    char *text = (char *)xcalloc(1 << 16, 1);
    *status = check_child(print_action, (void *)arguments, 1, text, 1 << 16);
    return text;
}

// --help prints the common options, at most 26 with --help itself, and says how many others --help all prints.
static void test_help_levels(void) {
    int status, common = 0, rare = 0, wrong = 0;
    char *help = printed_by("--help", &status), name[64], line[128];
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "--help ends with exit status 0");
    for (const OptionRow *row = option_rows(); row->name; row++) {
        if (row->kind == OPTION_GROUP) continue;
        format_checked(name, sizeof name, "\n  --%s ", row->name);
        common += row->level == COMMON, rare += row->level == RARE;
        wrong += (strstr(help, name) != NULL) != (row->level == COMMON);
    }
    CHECK(common <= 26 && rare > common && !wrong,
          "--help has the common options, at most 26, and no other; found %d of %d, %d of them wrong: %s", common,
          common + rare, wrong, help);
    format_checked(line, sizeof line, "\n--help all prints the rest: %d more options", rare);
    CHECK(strstr(help, line) && !strstr(help, "exit status\n"), "--help says what --help all adds: %s", help);
    CHECK(strstr(help, " dtype of GEMMs [bf16]\n") && !strstr(help, "\nplan (--dry-run)\n"),
          "--help prints a text up to its first semicolon, and no heading without options: %s", help);
    free(help);
    static const struct {
        const char *line, *model;
        int help;
    } cases[] = {{"tiny", "tiny", HELP_OFF},
                 {"tiny --help", "tiny", HELP_ON},
                 {"--help tiny", "tiny", HELP_ON},
                 {"--help --json", "", HELP_ON},
                 {"--help all tiny", "tiny", HELP_ALL},
                 {"tiny --help=all", "tiny", HELP_ALL},
                 {"tiny --help on", "tiny", HELP_ON}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CommandLine c = command_line(cases[i].line);
        const Options o = options_parse(c.argc, c.argv);
        CHECK(o.help == cases[i].help && strcmp(o.model, cases[i].model) == 0, "%s: found --help %d, model \"%s\"",
              cases[i].line, o.help, o.model);
    }
}

static void test_help_and_table(void) {
    int status;
    char *help = printed_by("--help all", &status);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0 && strstr(help, "usage: train MODEL") &&
              strstr(help, "MODEL: tiny, small,"),
          "--help all prints usage and models, with exit status 0: %s", help);
    for (const OptionRow *row = option_rows(); row->name; row++) {
        char name[64];
        format_checked(name, sizeof name, row->kind == OPTION_GROUP ? "\n%s\n" : "  --%s ", row->name);
        CHECK(strstr(help, name), "--help all has %s", row->name);
    }
    const char *line = strstr(help, "\ndata\n");  // after the usage, which lists presets
    for (int n = 0; line && *line; line += strspn(line, "\n")) {
        n = (int)strcspn(line, "\n");
        CHECK(n <= HELP_WIDTH && (n == 0 || line[n - 1] != ' '),
              "no line of --help all is too long or ends with a blank; this one has %d columns: %.*s", n, n, line);
        line += n;
    }
    char recipes[256];
    format_checked(recipes, sizeof recipes, "\n  --fp8-recipe %s\n%*swhich values share",
                   option_find("fp8-recipe", strlen("fp8-recipe"))->text, HELP_INDENT, "");
    CHECK(strstr(help, recipes), "--help all shows the choices of --fp8-recipe: %s", help);
    CHECK(strstr(help, "[1e-08]") && strstr(help, "--precision fp32|bf16|fp8") && strstr(help, "[bf16]"),
          "--help all shows defaults and choices");
    free(help);
    help = printed_by("", &status);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) != 0 && strstr(help, "usage: train MODEL"),
          "a call without arguments prints the usage and fails");
    free(help);
    char *table = printed_by("tiny --seed 7 --val-data v.bin --resume --checkpoint-dir c", &status);
    CHECK(strstr(table, "model                      tiny\n") && strstr(table, "seed                       7\n") &&
              strstr(table, "resume                     on\n"),
          "the settings have the values that were given: %s", table);
    CHECK(strstr(table, "val-data                   v.bin\n") && !strstr(table, "log-dir") && !strstr(table, "help") &&
              !strstr(table, "fp8"),
          "the settings leave out options without a value, and FP8 options without FP8: %s", table);
    free(table);
    table = printed_by("tiny --precision fp8 --fp8-recipe blockwise --fp8-filter first,mlp", &status);
    CHECK(strstr(table, "fp8-recipe                 blockwise\n") &&
              strstr(table, "fp8-filter                 first,mlp\n") &&
              strstr(table, "fp8-emulate                off\n"),
          "the settings have the FP8 options: %s", table);
    free(table);
}

int main(void) {
    test_defaults();
    test_rows();
    test_shorthands();
    test_accepted();
    test_refused();
    test_chosen();
    test_conflicts();
    test_tokens_per_step();
    test_fp8_conflicts();
    test_backward_conflicts();
    test_offload();
    test_stray_fp8();
    test_mix();
    test_resolve();
    test_resolve_fp8();
    test_sharding();
    test_gradient_sums();
    test_help_levels();
    test_help_and_table();
    return check_report();
}
