// The tokenizer table beside a shard: it turns sampled tokens into text.
//
// File (little-endian): uint32 magic 20251121, version 1, count, separator; then for each id 0 ... count - 1: uint32
// length, bytes. The separator is the id of the token before each document: a sample starts after it, and ends where
// the model emits it again, after --max-tokens tokens, or when the run is asked to stop.
//
// Name: the shard's path without ".bin", then without a "_DIGITS" at its end (a shard's number), then without "_train",
// "_val" or "_valid", then ".tokenizer": data/tiny_train.bin, data/tiny_val.bin and data/tiny_train_000001.bin all have
// data/tiny.tokenizer.
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include <ctype.h>

#include "../base/utils.h"

#define TOKENIZER_MAGIC 20251121u
#define TOKENIZER_VERSION 1u
#define TOKENIZER_HEADER_BYTES 16

typedef struct {
    int64_t count;      // number of ids; 0: no table
    int64_t separator;  // id of the token before each document
    char *file;         // the whole table
    size_t bytes;       // size of `file`
    size_t *offsets;    // [count] position of each id's length in `file`
} Tokenizer;

static inline uint32_t tokenizer_u32(const char *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

// Writes the path of the table that belongs to a shard.
static inline void tokenizer_path(char *out, size_t capacity, const char *shard_path) {
    static const char *const splits[] = {"_train", "_valid", "_val"};
    size_t n = strlen(shard_path);
    if (n >= 4 && strcmp(shard_path + n - 4, ".bin") == 0) n -= 4;
    size_t digits = n;
    while (digits > 0 && isdigit((unsigned char)shard_path[digits - 1])) digits--;
    if (digits < n && digits > 0 && shard_path[digits - 1] == '_') n = digits - 1;
    for (int i = 0; i < 3; i++) {
        size_t length = strlen(splits[i]);
        if (n < length || strncmp(shard_path + n - length, splits[i], length) != 0) continue;
        n -= length;
        break;
    }
    format_checked(out, capacity, "%.*s.tokenizer", (int)n, shard_path);
}

// Checks a table of `size` bytes and finds its tokens. `file` then belongs to *tok. Returns NULL if the table is valid,
// else the error.
static inline const char *tokenizer_parse(Tokenizer *tok, char *file, size_t size) {
    memset(tok, 0, sizeof *tok);
    tok->file = file, tok->bytes = size;
    if (size < TOKENIZER_HEADER_BYTES) return "truncated: shorter than its header of 16 bytes";
    if (tokenizer_u32(file) != TOKENIZER_MAGIC) return "not a tokenizer table (wrong magic number)";
    if (tokenizer_u32(file + 4) != TOKENIZER_VERSION) return "unknown version (1 is expected)";
    size_t count = tokenizer_u32(file + 8), separator = tokenizer_u32(file + 12), at = TOKENIZER_HEADER_BYTES;
    // a token takes 4 bytes at least, so a count that the file cannot hold is refused before memory is asked for
    if (count > (size - at) / 4) return "truncated: the header promises more tokens than the file can hold";
    if (separator >= count) return "the separator's id is not in the table";
    tok->offsets = (size_t *)xcalloc(count, sizeof(size_t));
    for (size_t id = 0; id < count; id++) {
        if (size - at < 4) return "truncated before the end of its last token";
        size_t length = tokenizer_u32(file + at);
        if (length > size - at - 4) return "truncated, or a token's length is wrong";
        tok->offsets[id] = at;
        at += 4 + length;
    }
    if (at != size) return "bytes after the last token";
    tok->count = (int64_t)count;
    tok->separator = (int64_t)separator;
    return NULL;
}

static inline void tokenizer_close(Tokenizer *tok) {
    free(tok->file);
    free(tok->offsets);
    memset(tok, 0, sizeof *tok);
}

// Reads a table. If there is no file, count is 0, and samples are printed as ids. Dies if the file cannot be read or is
// damaged.
static inline Tokenizer tokenizer_open(const char *path) {
    Tokenizer tok = {};
    size_t size = 0;
    char *file = read_file(path, &size);
    if (!file && errno == ENOENT) return tok;
    if (!file) die("%s: cannot be read: %s", path, read_words());
    const char *problem = tokenizer_parse(&tok, file, size);
    const char *words = problem ? file_look_alike(file, size) : NULL;
    if (words) die("%s: this is not a tokenizer table, but %s", path, words);
    if (problem)
        die("%s: %s (the file has %zu bytes); make the shard again, or remove the table to print samples as token ids",
            path, problem, size);
    return tok;
}

// The table beside a shard, by the naming rule above.
static inline Tokenizer tokenizer_open_beside(const char *shard_path) {
    char path[4096];
    tokenizer_path(path, sizeof path, shard_path);
    return tokenizer_open(path);
}

// True if two tables are equal, or if neither exists.
static inline bool tokenizer_same(const Tokenizer *a, const Tokenizer *b) {
    return a->bytes == b->bytes && (a->bytes == 0 || memcmp(a->file, b->file, a->bytes) == 0);
}

// The bytes of a token (not terminated, often not whole UTF-8) and their number; NULL and 0 for an id outside the
// table.
static inline const char *tokenizer_decode(const Tokenizer *tok, int64_t id, size_t *length) {
    *length = 0;
    if (id < 0 || id >= tok->count) return NULL;
    const char *entry = tok->file + tok->offsets[id];
    *length = tokenizer_u32(entry);
    return entry + 4;
}

// Prints a token as text, or as "[id]" if the table does not have it. Control characters other than newline and tab are
// printed as \xNN: an untrained model emits them, and they must not reach the terminal. A character may have its bytes
// in several tokens, so pass the same *at for all tokens of a text (TextPlace).
static inline void tokenizer_print(const Tokenizer *tok, int64_t id, TextPlace *at, FILE *out) {
    size_t length;
    char number[32];
    const char *bytes = tokenizer_decode(tok, id, &length);
    if (!bytes) bytes = number, length = (size_t)snprintf(number, sizeof number, "[%lld]", (long long)id);
    for (size_t i = 0; i < length; i++) {
        const unsigned char c = (unsigned char)bytes[i];
        if (text_is_control(at, c)) fprintf(out, "\\x%02x", c);
        else putc(c, out);
    }
}

#endif
