// A log.jsonl that a resumed run appends to: whole lines are kept, the rest of one that was cut goes.
#include "fuzz.h"

static void log_run(const uint8_t *data, size_t size) {
    static const char line[] = "{\"type\": \"settings\"}\n";
    fuzz_write("log.jsonl", data, size);
    FILE *file = logger_append(fuzz_path("log.jsonl"));
    FUZZ_CHECK(file && fputs(line, file) >= 0 && fclose(file) == 0);
    size_t kept = size, found = 0;
    while (kept && data[kept - 1] != '\n') kept--;
    char *text = read_file(fuzz_path("log.jsonl"), &found);
    FUZZ_CHECK(text && found == kept + sizeof line - 1 && (!kept || memcmp(text, data, kept) == 0) && memcmp(text + kept, line, sizeof line - 1) == 0);
    fuzz_free(text);
}

static size_t log_seed(int i, uint8_t *out) {
    static const char *const seeds[] = {"{\"type\": \"settings\"}\n{\"type\": \"step\", \"step\": 1}\n", "{\"type\": \"settings\"}\n{\"type\": \"st", "\n", "{", "{}\n\n\n{}\r\n{"};
    return i < (int)(sizeof seeds / sizeof seeds[0]) ? fuzz_text(out, FUZZ_SEED_CAPACITY, seeds[i]) : 0;
}

FUZZ_TARGET(log)
