// Parses a command line: each line of the input is one argument.
#include "fuzz.h"
#include "../../llmc/config/options_rules.h"

// Checks that numbers are in range and choices are valid.
static void options_check_values(const Options *o) {
    for (const OptionRow *row = option_rows(); row->name; row++) {
        const void *at = (const char *)o + row->field;
        char value[PATH_CAPACITY];
        option_format(o, row, value, sizeof value);
        const bool whole = row->kind == OPTION_INT;
        if (row->kind == OPTION_CHOICE)
            FUZZ_CHECK(option_choice_name(row->text, *(const int *)at, value, sizeof value));
        if (!whole && row->kind != OPTION_REAL) continue;
        const double number = whole ? (double)*(const int64_t *)at : *(const double *)at;
        FUZZ_CHECK(number >= row->low && number <= row->high);
    }
}

static void options_run(const uint8_t *data, size_t size) {
    static char text[4096], *argv[128];
    char message[512];
    if (size >= sizeof text) return;
    if (size) memcpy(text, data, size);
    text[size] = 0;
    int argc = 0;
    argv[argc++] = (char *)"train_fp8";
    for (char *at = text, *end; at && argc < 127; at = end ? end + 1 : NULL) {
        end = strchr(at, '\n');
        if (end) *end = 0;
        argv[argc++] = at;
    }
    argv[argc] = NULL;
    Options o = options_parse(argc, argv);
    options_require_model(&o, argc, argv, "tiny, small");
    options_check_values(&o);
    FUZZ_CHECK(*o.model && !o.help);
    if (*options_conflict(&o, message, sizeof message)) return;
    options_resolve(&o);
    options_check_values(&o);
    if (o.sharding == SHARDING_HYBRID && !o.shard_size) o.shard_size = 8;  // as on one host of 8 ranks
    FUZZ_CHECK(options_shard_group(&o, 8) >= 1);
    options_print(&o);
}

static size_t options_seed(int i, uint8_t *out) {
    static const char *const seeds[] = {
        ("tiny\n--precision\nfp8\n--fp8-recipe=delayed\n--sequence-length\n128\n--learning-rate\n3e-3\n"
         "--fp8-amax-history\n16\n--fp8-filter\nfirst,last"),
        ("small\n--sharding\nhybrid\n--shard-size\n2\n--num-steps=20\n--checkpoint-dir\nck\n--checkpoint-every\n5\n"
         "--resume\n--deterministic\n--mix\na=1,b*.bin=0.5"),
        "--help",
        "tiny\n--help\nall",
        ("tiny\n--val-data\nv.bin\n--val-every\n2\n--beta1\n0.95\n--lr-schedule\nwsd\n--warmup-steps\n3\n"
         "--grad-clip\n1\n--seed\n-1"),
        "tiny\n--dry-run\n--world-size\n512\n--lerning-rate\n1\n--batch-size\n1e3\n--num-steps\n0x10",
        "tiny\n--export-hf=\n--log-dir\n/tmp\n--keep-checkpoints\n3\n-x"};
    return i < (int)(sizeof seeds / sizeof seeds[0]) ? fuzz_text(out, seeds[i]) : 0;
}

FUZZ_TARGET(options)
