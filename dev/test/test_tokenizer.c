// Tests the tokenizer table: naming rule, decoding, printing, damaged and hostile files.
#include "../../llmc/data/encode.h"

#include "lib/check.h"
#include "lib/scratch.h"

typedef struct {
    char bytes[256];
    size_t size;
} Table;

static void table_put(Table *t, const void *data, size_t size) {
    memcpy(t->bytes + t->size, data, size);
    t->size += size;
}

static void table_put_u32(Table *t, uint32_t value) { table_put(t, &value, sizeof value); }

// Makes a valid table of three tokens: token 0 is "Once", token 1 is empty, token 2 has control characters and a byte
// that is not UTF-8. Token 2 is the separator.
static Table make_table(void) {
    Table t;
    memset(&t, 0, sizeof t);
    table_put_u32(&t, TOKENIZER_MAGIC);
    table_put_u32(&t, TOKENIZER_VERSION);
    table_put_u32(&t, 3);
    table_put_u32(&t, 2);
    table_put_u32(&t, 4);
    table_put(&t, "Once", 4);
    table_put_u32(&t, 0);
    table_put_u32(&t, 5);
    table_put(&t, "\n\x1b\0\xc3\x7f", 5);
    return t;
}

// Writes the table to a file and returns its path.
static const char *write_table(const char *name, const Table *t) {
    const char *path = scratch_path("%s", name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(t->bytes, 1, t->size, f) != t->size || fclose(f) != 0) die("%s: %s", path, strerror(errno));
    return path;
}

static void test_names(void) {
    static const char *const cases[][2] = {
        {"data/tiny_train.bin", "data/tiny.tokenizer"},
        {"data/tiny_val.bin", "data/tiny.tokenizer"},
        {"data/tiny_valid.bin", "data/tiny.tokenizer"},
        {"data/tiny.bin", "data/tiny.tokenizer"},
        {"data/tiny_train_000001.bin", "data/tiny.tokenizer"},
        {"data/tiny_000001.bin", "data/tiny.tokenizer"},
        {"tiny2024_train.bin", "tiny2024.tokenizer"},
        {"llama3.2_train.bin", "llama3.2.tokenizer"},
        {"shards/x_train.bin", "shards/x.tokenizer"},
        {"tokens", "tokens.tokenizer"},
        {"7.bin", "7.tokenizer"},
        {"a_train_val.bin", "a_train.tokenizer"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[4096];
        tokenizer_path(path, sizeof path, cases[i][0]);
        CHECK(strcmp(path, cases[i][1]) == 0, "the table of %s is %s; expected %s", cases[i][0], path, cases[i][1]);
    }
}

// Returns ids 0 ... n - 1 as tokenizer_print prints them as one text. The caller frees it.
static char *print_ids(const Tokenizer *tok, int64_t n) {
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (!out) die("open_memstream: %s", strerror(errno));
    TextPlace at = {0, 0};
    for (int64_t id = 0; id < n; id++) tokenizer_print(tok, id, &at, out);
    fclose(out);
    return text;
}

static void test_sound_table(void) {
    Table t = make_table();
    write_table("ok.tokenizer", &t);
    Tokenizer tok = tokenizer_open_beside(scratch_path("ok_train.bin"));
    size_t length;
    CHECK(tok.count == 3 && tok.separator == 2, "the table has 3 tokens and separator 2; found %lld and %lld",
          (long long)tok.count, (long long)tok.separator);
    const char *once = tokenizer_decode(&tok, 0, &length);
    CHECK(length == 4 && memcmp(once, "Once", 4) == 0, "token 0 is Once; found length %zu", length);
    CHECK(tokenizer_decode(&tok, 1, &length) != NULL && length == 0, "token 1 is empty; found length %zu", length);
    CHECK(tokenizer_decode(&tok, 2, &length) != NULL && length == 5, "token 2 has 5 bytes; found %zu", length);
    CHECK(tokenizer_decode(&tok, 3, &length) == NULL && length == 0, "id 3, past the vocabulary, has no text");
    CHECK(tokenizer_decode(&tok, -1, &length) == NULL && length == 0, "id -1 has no text");
    char *text = print_ids(&tok, 4);
    CHECK(strcmp(text, "Once\n\\x1b\\x00\xc3\\x7f[3]") == 0,
          "control characters other than newline are printed as escapes, other bytes as they are, and an unknown id in "
          "brackets; found \"%s\"",
          text);
    free(text);
    tokenizer_close(&tok);
}

// C1 controls, of one byte or of two in UTF-8, are printed as escapes, also if tokens divide them. Bytes 80 to 9F of
// other UTF-8 characters are printed as they are.
static void test_print_c1(void) {
    static const char *const tokens[] = {"\x9b", "\xc2",     "\x9b", "\xc2\xa9", "\xe2\x82",
                                         "\x9b", "\xe2\x82", "a",    "\x9b"};
    Table t = {"", 0};
    table_put_u32(&t, TOKENIZER_MAGIC), table_put_u32(&t, TOKENIZER_VERSION);
    table_put_u32(&t, 9), table_put_u32(&t, 0);
    for (int i = 0; i < 9; i++)
        table_put_u32(&t, (uint32_t)strlen(tokens[i])), table_put(&t, tokens[i], strlen(tokens[i]));
    Tokenizer tok = tokenizer_open(write_table("c1.tokenizer", &t));
    char *text = print_ids(&tok, 10);
    CHECK(strcmp(text, "\\x9b\xc2\\x9b\xc2\xa9\xe2\x82\x9b\xe2\x82"
                       "a\\x9b[9]") == 0,
          "C1 controls are printed as escapes; found \"%s\"", text);
    free(text);
    tokenizer_close(&tok);
}

static void test_missing_table(void) {
    Tokenizer tok = tokenizer_open_beside(scratch_path("absent_train.bin"));
    size_t length = 1;
    CHECK(tok.count == 0 && tokenizer_decode(&tok, 0, &length) == NULL && length == 0,
          "a missing table gives no tokens; found %lld", (long long)tok.count);
    tokenizer_close(&tok);
}

static void open_table(void *path) { tokenizer_open((const char *)path); }

static void check_refused(const Table *t, const char *message) {
    CHECK_DIES(open_table, (void *)write_table("bad.tokenizer", t), message, "the table is refused with \"%s\"; found",
               message);
}

static void table_set_u32(Table *t, size_t at, uint32_t value) { memcpy(t->bytes + at, &value, sizeof value); }

static void test_damaged_tables(void) {
    Table sound = make_table(), t;
    // A table that is cut at any byte is refused. It is parsed in this process, so that sanitizers see it.
    for (size_t size = 0; size < sound.size; size++) {
        Tokenizer tok;
        char *cut = (char *)xcalloc(size, 1);
        memcpy(cut, sound.bytes, size);
        CHECK(tokenizer_parse(&tok, cut, size) != NULL, "a table that is cut to %zu bytes is refused", size);
        tokenizer_close(&tok);
    }
    t = sound, t.size = 10;
    check_refused(&t, "truncated: shorter than its header");
    t = sound, t.size -= 2;
    check_refused(&t, "truncated");
    t = sound, table_set_u32(&t, 0, 7);
    check_refused(&t, "not a tokenizer table");
    t = sound, table_set_u32(&t, 4, 2);
    check_refused(&t, "unknown version");
    t = sound, table_set_u32(&t, 8, 0xffffffffu);
    check_refused(&t, "the header promises more tokens than the file can hold");
    t = sound, table_set_u32(&t, 8, 2), table_set_u32(&t, 12, 1);
    check_refused(&t, "bytes after the last token");
    t = sound, table_set_u32(&t, 12, 3);
    check_refused(&t, "the separator's id is not in the table");
    t = sound, table_set_u32(&t, 8, 0);
    check_refused(&t, "the separator's id is not in the table");
    t = sound, table_set_u32(&t, 16, 0xfffffffcu);
    check_refused(&t, "a token's length is wrong");
    t = sound, t.size = 0;
    check_refused(&t, "truncated");
    CHECK_DIES(open_table, scratch, "cannot be read: Is a directory", "a folder is refused");
}

// A table of all bytes but '#', and of merges from id 256 on.
static Tokenizer make_merges(void) {
    static const char *const merges[] = {"  ", " t", "he", " the", "12", "23", "123", "45", "n't", "\n\n", ".\n"};
    const uint32_t count = 256 + sizeof merges / sizeof merges[0],
                   head[] = {TOKENIZER_MAGIC, TOKENIZER_VERSION, count, 0};
    char *file = (char *)xcalloc(4096, 1);
    size_t size = sizeof head;
    memcpy(file, head, size);
    for (uint32_t id = 0; id < count; id++) {
        const char byte = (char)id, *bytes = id < 256 ? &byte : merges[id - 256];
        const uint32_t n = id == '#' ? 0 : id < 256 ? 1 : (uint32_t)strlen(bytes);
        memcpy(file + size, &n, 4), memcpy(file + size + 4, bytes, n);
        size += 4 + n;
    }
    Tokenizer tok;
    const char *problem = tokenizer_parse(&tok, file, size);
    if (problem) die("the test's table: %s", problem);
    return tok;
}

// The ids of Llama 3's and Qwen's own tokenizers were equal for 1,000 texts of Python's documentation (2026-11-28).
static void test_encode(void) {
    static const struct {
        const char *text;
        int64_t count;
        int32_t ids[8];
    } cases[] = {
        {"", 0, {0}},
        {"the", 2, {'t', 258}},
        {" the", 1, {259}},
        {"   the", 2, {256, 259}},              // the last space belongs to the word
        {"the  ", 3, {'t', 258, 256}},          // at the end all spaces are one piece
        {" 12345", 3, {' ', 262, 263}},         // digits are cut in threes, and take no space
        {"2345", 3, {261, '4', '5'}},           // not 45: that crosses the cut
        {"n't", 3, {'n', '\'', 't'}},           // 't is a piece, so n't is no token
        {".\n\nthe", 4, {'.', 265, 't', 258}},  // the lower id is merged first
        {" \n\n the", 3, {' ', 265, 259}},      // white space is cut after its last newline
        {"a#b", -2, {0}},
    };
    Tokenizer tok = make_merges();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t ids[16];
        const int64_t count = tokenizer_encode(&tok, cases[i].text, strlen(cases[i].text), ids);
        bool same = count == cases[i].count;
        for (int64_t k = 0; same && k < count; k++) same = ids[k] == cases[i].ids[k];
        CHECK(same, "\"%s\" has %lld tokens, the first %d; expected %lld, the first %d", cases[i].text,
              (long long)count, ids[0], (long long)cases[i].count, cases[i].ids[0]);
    }
    tokenizer_close(&tok);
}

int main(void) {
    scratch_create();
    test_names();
    test_sound_table();
    test_print_c1();
    test_missing_table();
    test_damaged_tables();
    test_encode();
    scratch_remove();
    return check_report();
}
