// Parses a tokenizer table and prints every token. Also makes a table's name from the input, as from a shard's name.
#include "fuzz.h"

// If the first byte is odd, the magic number and version of the table are corrected.
static void tokenizer_run(const uint8_t *data, size_t size) {
    const uint8_t choice = fuzz_byte(&data, &size);
    char *file = (char *)fuzz_note(malloc(size ? size : 1)), path[64], name[32];
    if (size) memcpy(file, data, size);
    if (choice % 2 && size >= 8) memcpy(file, (uint32_t[]){TOKENIZER_MAGIC, TOKENIZER_VERSION}, 8);
    Tokenizer tok;
    if (!tokenizer_parse(&tok, file, size)) {
        FUZZ_CHECK(tok.count > 0 && tok.separator >= 0 && tok.separator < tok.count && tokenizer_same(&tok, &tok));
        TextPlace at = {0, 0};
        for (int64_t id = -1; id <= tok.count; id++) tokenizer_print(&tok, id, &at, stdout);
    }
    tokenizer_close(&tok);
    snprintf(name, sizeof name, "%.*s", (int)(size < 31 ? size : 31), (const char *)data);
    tokenizer_path(path, sizeof path, name);
    FUZZ_CHECK(strlen(path) >= strlen(".tokenizer"));
}

static size_t tokenizer_seed(int i, uint8_t *out) {
    const uint32_t head[] = {TOKENIZER_MAGIC, TOKENIZER_VERSION, 3, 1, 1}, two = 2, none = 0;
    if (i == 3) return fuzz_text(out, "xdata/tiny_train_000001.bin");
    if (i > 3) return 0;
    out[0] = (uint8_t)(i & 1);
    memcpy(out + 1, head, sizeof head);
    memcpy(out + 21, "a", 1);
    memcpy(out + 22, &two, 4);
    memcpy(out + 26, "\x1b\n", 2);
    memcpy(out + 28, &none, 4);
    return i < 2 ? 32 : 29;
}

FUZZ_TARGET(tokenizer)
