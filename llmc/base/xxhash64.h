// XXH64, a 64-bit hash of a stream of bytes, from its published specification (Yann Collet's xxhash_spec.md).
// Checkpoints use it to find torn or damaged files: it runs at about the speed of memory; SHA-256 can add minutes to a
// save of 50 GB. It is no defence against somebody who forges a file. `xxhsum -H64 FILE` prints the same number.
#ifndef LLMC_XXHASH64_H
#define LLMC_XXHASH64_H

#include "utils.h"

#define XXH64_PRIME1 0x9e3779b185ebca87ull
#define XXH64_PRIME2 0xc2b2ae3d27d4eb4full
#define XXH64_PRIME3 0x165667b19e3779f9ull
#define XXH64_PRIME4 0x85ebca77c2b2ae63ull
#define XXH64_PRIME5 0x27d4eb2f165667c5ull

typedef struct {
    uint64_t lanes[4];
    uint64_t length;            // bytes so far
    unsigned char partial[32];  // length % 32 bytes that do not fill a stripe yet
} XxHash64;

static inline uint64_t xxhash64_rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

static inline uint64_t xxhash64_round(uint64_t lane, uint64_t input) {
    return xxhash64_rotate(lane + input * XXH64_PRIME2, 31) * XXH64_PRIME1;
}

// Little-endian words, as every machine this program runs on has them.
static inline uint64_t xxhash64_word(const unsigned char *p) {
    uint64_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

static inline XxHash64 xxhash64_begin(void) {
    XxHash64 h = {};
    h.lanes[0] = XXH64_PRIME1 + XXH64_PRIME2;
    h.lanes[1] = XXH64_PRIME2;
    h.lanes[2] = 0;
    h.lanes[3] = 0 - XXH64_PRIME1;
    return h;
}

static inline void xxhash64_stripes(XxHash64 *h, const unsigned char *p, size_t stripes) {
    uint64_t a = h->lanes[0], b = h->lanes[1], c = h->lanes[2], d = h->lanes[3];
    for (; stripes > 0; stripes--, p += 32) {
        a = xxhash64_round(a, xxhash64_word(p));
        b = xxhash64_round(b, xxhash64_word(p + 8));
        c = xxhash64_round(c, xxhash64_word(p + 16));
        d = xxhash64_round(d, xxhash64_word(p + 24));
    }
    h->lanes[0] = a, h->lanes[1] = b, h->lanes[2] = c, h->lanes[3] = d;
}

static inline void xxhash64_add(XxHash64 *h, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    size_t held = (size_t)(h->length % 32);
    h->length += bytes;
    if (held) {
        size_t take = bytes < 32 - held ? bytes : 32 - held;
        if (take) memcpy(h->partial + held, p, take);
        p += take, bytes -= take;
        if (held + take < 32) return;
        xxhash64_stripes(h, h->partial, 1);
    }
    xxhash64_stripes(h, p, bytes / 32);
    if (bytes % 32) memcpy(h->partial, p + bytes / 32 * 32, bytes % 32);
}

// The hash of everything added so far; more may be added after.
static inline uint64_t xxhash64_end(const XxHash64 *h) {
    const uint64_t *v = h->lanes;
    uint64_t x;
    if (h->length >= 32) {
        x = xxhash64_rotate(v[0], 1) + xxhash64_rotate(v[1], 7) + xxhash64_rotate(v[2], 12) + xxhash64_rotate(v[3], 18);
        for (int i = 0; i < 4; i++) x = (x ^ xxhash64_round(0, v[i])) * XXH64_PRIME1 + XXH64_PRIME4;
    } else {
        x = XXH64_PRIME5;
    }
    x += h->length;
    const unsigned char *p = h->partial, *end = p + h->length % 32;
    for (; p + 8 <= end; p += 8)
        x = xxhash64_rotate(x ^ xxhash64_round(0, xxhash64_word(p)), 27) * XXH64_PRIME1 + XXH64_PRIME4;
    if (p + 4 <= end) {
        uint32_t word;
        memcpy(&word, p, sizeof word);
        x = xxhash64_rotate(x ^ word * XXH64_PRIME1, 23) * XXH64_PRIME2 + XXH64_PRIME3;
        p += 4;
    }
    for (; p < end; p++) x = xxhash64_rotate(x ^ *p * XXH64_PRIME5, 11) * XXH64_PRIME1;
    x = (x ^ (x >> 33)) * XXH64_PRIME2;
    x = (x ^ (x >> 29)) * XXH64_PRIME3;
    return x ^ (x >> 32);
}

static inline uint64_t xxhash64(const void *data, size_t bytes) {
    XxHash64 h = xxhash64_begin();
    xxhash64_add(&h, data, bytes);
    return xxhash64_end(&h);
}

#endif
