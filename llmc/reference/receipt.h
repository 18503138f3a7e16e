// Receipts (--receipt): hashes of a run's arrays that do not depend on how ranks share them, in plain C.
//
// A tensor's hash is the sum of its words' hashes, modulo 2^64, so that the ranks that hold parts of it, and threads,
// add theirs in any order. A word has 8 bytes, or 4 in arrays of 4-byte elements, and is numbered in the flat array of
// parameters.h; elements of other tensors count as 0. A word that changes always changes the tensor's hash.
#ifndef LLMC_RECEIPT_H
#define LLMC_RECEIPT_H

#include "../base/rng.h"

// A part of a tensor in a rank's array.
typedef struct {
    int64_t flat, count;  // its first element in the flat array, and how many it has
    int64_t shard;        // its first element in the rank's array; equal to `flat` modulo 8
} ReceiptPart;

// Elements of a word, for elements of `bytes` bytes.
HOST_DEVICE static inline int64_t receipt_per_word(int64_t bytes) { return bytes == 4 ? 1 : 8 / bytes; }

// The number of words in which a part lies.
HOST_DEVICE static inline int64_t receipt_words(ReceiptPart p, int64_t bytes) {
    const int64_t e = receipt_per_word(bytes);
    return p.count ? (p.flat + p.count - 1) / e - p.flat / e + 1 : 0;
}

// The hash of word w of a part, counted from 0. `array`: the rank's array, 8-byte aligned.
HOST_DEVICE static inline uint64_t receipt_word(const void *array, int64_t bytes, ReceiptPart p, int64_t w) {
    const int64_t e = receipt_per_word(bytes), flat = p.flat / e + w, shard = p.shard / e + w;
    const int64_t before = p.flat - flat * e, behind = (flat + 1) * e - (p.flat + p.count);
    uint64_t word = bytes == 4 ? ((const uint32_t *)array)[shard] : ((const uint64_t *)array)[shard];
    if (before > 0) word = word >> (8 * bytes * before) << (8 * bytes * before);
    if (behind > 0) word = word << (8 * bytes * behind) >> (8 * bytes * behind);
    return rng_mix(word ^ ((uint64_t)(flat + 1) * 0x9e3779b97f4a7c15ull));
}

// The hash of a part.
static inline uint64_t receipt_sum(const void *array, int64_t bytes, ReceiptPart p) {
    uint64_t sum = 0;
    for (int64_t w = 0; w < receipt_words(p, bytes); w++) sum += receipt_word(array, bytes, p, w);
    return sum;
}

// Adds a value to a chain of hashes, which depends on the order of its values.
static inline uint64_t receipt_chain(uint64_t chain, uint64_t value) {
    return rng_mix((chain + 0x9e3779b97f4a7c15ull) ^ value);
}

#endif
