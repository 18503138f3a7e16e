// Turns a text into token ids by a tokenizer table alone: byte pair encoding whose merges are in the order of ids.
//
// The tables of Llama 3, Qwen and other byte-level BPE tokenizers have that order. The text is first cut as Llama 3
// cuts it (Qwen cuts equally, but for digits, of which it has no pairs). Bytes from 0x80 on count as letters, except
// U+2000 to U+207F (dashes, quotes), which count as signs. Another tokenizer may cut elsewhere: the ids then stand for
// the same text, but may differ from those in its shards.
#ifndef LLMC_ENCODE_H
#define LLMC_ENCODE_H

#include "tokenizer.h"

typedef enum { PIECE_LETTER, PIECE_DIGIT, PIECE_NEWLINE, PIECE_SPACE, PIECE_SIGN, PIECE_END } PieceKind;

// The kind of the character at text[i] of n bytes; *next: where the next one begins.
static inline PieceKind piece_kind(const unsigned char *text, size_t n, size_t i, size_t *next) {
    *next = i + 1;
    if (i >= n) return PIECE_END;
    const unsigned char c = text[i];
    while (c >= 0xc0 && *next < n && (text[*next] & 0xc0) == 0x80) ++*next;
    if (c == 0xe2 && i + 1 < n && (text[i + 1] == 0x80 || text[i + 1] == 0x81)) return PIECE_SIGN;
    if (c >= 0x80 || isalpha(c)) return PIECE_LETTER;
    if (isdigit(c)) return PIECE_DIGIT;
    return c == '\n' || c == '\r' ? PIECE_NEWLINE : isspace(c) ? PIECE_SPACE : PIECE_SIGN;
}

// Returns the end of the characters of one kind from `i` on, at most `most`.
static inline size_t piece_run(const unsigned char *text, size_t n, size_t i, PieceKind kind, int most) {
    size_t next;
    for (; most > 0 && piece_kind(text, n, i, &next) == kind; most--) i = next;
    return i;
}

// Returns the end of the piece that begins at text[i], by the alternatives of Llama 3's regular expression in order.
static inline size_t piece_end(const unsigned char *text, size_t n, size_t i) {
    static const char *const endings[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    size_t second, unused;
    for (size_t k = 0; k < sizeof endings / sizeof endings[0]; k++)
        if (n - i >= strlen(endings[k]) && strncasecmp((const char *)text + i, endings[k], strlen(endings[k])) == 0)
            return i + strlen(endings[k]);
    const PieceKind first = piece_kind(text, n, i, &second), then = piece_kind(text, n, second, &unused);
    const bool leads = first == PIECE_SPACE || first == PIECE_SIGN;
    if (first == PIECE_LETTER || (leads && then == PIECE_LETTER))
        return piece_run(text, n, first == PIECE_LETTER ? i : second, PIECE_LETTER, INT32_MAX);
    if (first == PIECE_DIGIT) return piece_run(text, n, i, PIECE_DIGIT, 3);
    if (first == PIECE_SIGN || (text[i] == ' ' && then == PIECE_SIGN))
        return piece_run(text, n, piece_run(text, n, first == PIECE_SIGN ? i : second, PIECE_SIGN, INT32_MAX),
                         PIECE_NEWLINE, INT32_MAX);
    size_t end = i, newline = 0;  // white space
    for (; end < n && isspace(text[end]); end++)
        if (text[end] == '\n' || text[end] == '\r') newline = end + 1;
    if (newline) return newline;
    return end < n && end > i + 1 ? end - 1 : end;
}

// Ids by their bytes: an open hash table.
typedef struct {
    const Tokenizer *tokenizer;
    int32_t *slots;  // an id, or -1
    size_t mask;
} TokenIndex;

// Returns the slot of some bytes: that of the lowest id with them, or an empty one.
static inline int32_t *token_slot(const TokenIndex *x, const char *bytes, size_t n) {
    size_t at = 1469598103934665603u, length;  // FNV-1a
    for (size_t i = 0; i < n; i++) at = (at ^ (unsigned char)bytes[i]) * 1099511628211u;
    for (at &= x->mask; x->slots[at] >= 0; at = (at + 1) & x->mask) {
        const char *token = tokenizer_decode(x->tokenizer, x->slots[at], &length);
        if (length == n && memcmp(token, bytes, n) == 0) break;
    }
    return &x->slots[at];
}

static inline TokenIndex token_index(const Tokenizer *tok) {
    TokenIndex x = {tok, NULL, 1};
    while (x.mask < 2 * (size_t)tok->count) x.mask *= 2;
    x.slots = (int32_t *)xcalloc(x.mask, sizeof *x.slots);
    for (size_t i = 0; i < x.mask; i++) x.slots[i] = -1;
    x.mask--;
    for (int64_t id = 0; id < tok->count; id++) {
        size_t n;
        const char *bytes = tokenizer_decode(tok, id, &n);
        int32_t *slot = token_slot(&x, bytes, n);
        if (n && *slot < 0) *slot = (int32_t)id;
    }
    return x;
}

// Encodes one piece of n bytes into ids [n]: merges the neighbours that make the lowest id until none make any.
// `starts` [n + 1] is scratch. Returns their number, or -1 - i if the table has no token for byte i.
static inline int64_t encode_piece(const TokenIndex *x, const char *text, size_t n, size_t *starts, int32_t *ids) {
    size_t count = n;
    for (size_t i = 0; i <= n; i++) starts[i] = i;
    for (;;) {
        int32_t best = -1;
        size_t where = 0;
        for (size_t i = 0; i + 1 < count; i++) {
            const int32_t id = *token_slot(x, text + starts[i], starts[i + 2] - starts[i]);
            if (id >= 0 && (best < 0 || id < best)) best = id, where = i + 1;
        }
        if (best < 0) break;
        memmove(starts + where, starts + where + 1, (count-- - where) * sizeof *starts);
    }
    for (size_t i = 0; i < count; i++)
        if ((ids[i] = *token_slot(x, text + starts[i], starts[i + 1] - starts[i])) < 0) return -1 - (int64_t)starts[i];
    return (int64_t)count;
}

// Encodes a text of n bytes into ids [n]. Returns their number, or -1 - i if the table has no token for byte i.
static inline int64_t tokenizer_encode(const Tokenizer *tok, const char *text, size_t n, int32_t *ids) {
    const TokenIndex x = token_index(tok);
    size_t *starts = (size_t *)xcalloc(n + 1, sizeof *starts);
    int64_t count = 0;
    for (size_t i = 0, end; i < n && count >= 0; i = end) {
        end = piece_end((const unsigned char *)text, n, i);
        const int32_t whole = *token_slot(&x, text + i, end - i);
        const int64_t more = whole >= 0 ? 1 : encode_piece(&x, text + i, end - i, starts, ids + count);
        if (whole >= 0) ids[count] = whole;
        count = more < 0 ? more - (int64_t)i : count + more;
    }
    free(starts);
    free(x.slots);
    return count;
}

#endif
