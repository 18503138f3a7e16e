// Appends to a log.jsonl like a resumed run: complete lines must be kept, and an incomplete last line removed.
#include "fuzz.h"

static void log_run(const uint8_t *data, size_t size) {
    ModelConfig m;
    Options o = options_default();
    const RunInfo run = {"train_fp8", "CPU", "", 1, 0, true, 0, NULL};
    fuzz_write("log.jsonl", data, size);
    o.log_dir = fuzz()->folder;
    FUZZ_CHECK(model_config_preset(&m, "tiny"));
    m.vocab_size = 64;
    options_resolve(&o);
    ParameterTable t = parameter_table(&m);
    Precision p = precision_plan(&o, o.fp8_filter, &m, &t, true);
    Logger l = logger_open(&o, &m, &t, &p, run);  // writes a line with the settings
    logger_close(&l);
    precision_free(&p);
    parameter_table_free(&t);
    size_t kept = size, found = 0;
    while (kept && data[kept - 1] != '\n') kept--;
    char *text = read_file(fuzz_path("log.jsonl"), &found), *line = text + kept;
    FUZZ_CHECK(text && found > kept && (!kept || memcmp(text, data, kept) == 0));
    FUZZ_CHECK(*line == '{' && strchr(line, '\n') == text + found - 1);
    fuzz_free(text);
}

static size_t log_seed(int i, uint8_t *out) {
    static const char *const seeds[] = {"{'type': 'settings'}\n{'type': 'step', 'step': 1}\n",
                                        "{'type': 'settings'}\n{'type': 'st", "\n", "{", "{}\n\n\n{}\r\n{"};
    return i < (int)(sizeof seeds / sizeof seeds[0]) ? fuzz_text(out, seeds[i]) : 0;
}

FUZZ_TARGET(log)
