// Reads token shards of all formats: header, batches, scan, identity.
#include "fuzz.h"

// Makes a shard in `file` and returns its size. `data` holds the first 16 bytes of the header (fewer if it has fewer),
// then the bytes after the header. In `choices`, bit 0 corrects the count in the header; else bit 1 cuts the file off
// after these 16 bytes.
static size_t shard_build(const uint8_t *data, size_t size, uint8_t choices, uint8_t *file) {
    memset(file, 0, SHARD_HEADER_BYTES);
    const size_t header = size < 16 ? size : 16, rest = size - header;
    if (header) memcpy(file, data, header);
    if (rest) memcpy(file + SHARD_HEADER_BYTES, data + header, rest);
    int32_t *words = (int32_t *)file;
    const int width = words[0] == SHARD_MAGIC_U16 ? 2 : 4;
    if (choices & 1) {  // correct the count in the header
        const int64_t count = (int64_t)rest / width;
        words[2] = (int32_t)count, words[3] = 0;
        return (size_t)(SHARD_HEADER_BYTES + count * width);
    }
    return choices & 2 ? header : SHARD_HEADER_BYTES + rest;
}

static void shard_check(DataLoader *dl) {
    int32_t inputs[2 * 64], targets[2 * 64];
    const DataIdentity a = dataloader_identity(dl), b = dataloader_identity(dl);
    FUZZ_CHECK(a.fingerprint == b.fingerprint && a.tokens == dl->num_tokens && dl->num_sequences > 0);
    const TokenPlace largest = dataloader_scan(dl, INT64_MAX);
    FUZZ_CHECK(largest.token >= 0 && largest.position >= 0 && largest.position < dl->shards[largest.shard].num_tokens);
    for (int64_t sample = 0; sample < 4; sample++) {
        const int64_t sequence = dataloader_sequence(dl, sample * 1000003);
        FUZZ_CHECK(sequence >= 0 && sequence < dl->num_sequences);
        dataloader_batch(dl, sample * 1000003, 2, inputs, targets);
        for (int64_t row = 0; row < 2; row++)
            for (int64_t t = 0; t + 1 < dl->T; t++) {
                const int32_t target = targets[row * dl->T + t];
                FUZZ_CHECK(target == inputs[row * dl->T + t + 1] || (dl->masked && target == -1));
            }
        FUZZ_CHECK(dataloader_counted(dl, sample * 1000003, 2) <= 2 * dl->T);
        for (int64_t t = 0; t < 2 * dl->T; t++) FUZZ_CHECK((int64_t)(uint32_t)inputs[t] <= largest.token);
    }
    dataloader_check_vocabulary(dl, largest.token + 1);
}

static void shard_run(const uint8_t *data, size_t size) {
    static uint8_t file[1 << 16];
    const int64_t T = 1 + fuzz_byte(&data, &size) % 64;
    const uint8_t choices = fuzz_byte(&data, &size);
    if (size + SHARD_HEADER_BYTES > sizeof file) return;
    fuzz_write("d_000001.bin", file, shard_build(data, size, choices, file));
    const bool two = choices & 4;
    if (two) fuzz_write("d_000002.bin", file, shard_build(data, size, choices | 1, file));
    DataLoader dl = dataloader_open(fuzz_path(two ? "d_*.bin" : "d_000001.bin"), T, choices & 8, 7);
    shard_check(&dl);
    dataloader_close(&dl);
}

static size_t shard_seed(int i, uint8_t *out) {
    static const int32_t formats[][2] = {
        {SHARD_MAGIC_U16, 1}, {SHARD_MAGIC_U32, 7}, {SHARD_MAGIC_U32, 8}, {SHARD_MAGIC_U32, SHARD_MASKED}};
    if (i >= 8) return 0;
    const int32_t header[4] = {formats[i % 4][0], formats[i % 4][1], 100, 0};
    const size_t bytes = i % 4 ? 400 : 200;
    out[0] = (uint8_t)(15 >> (i / 4)), out[1] = (uint8_t)(i < 4 ? 0 : 13);
    memcpy(out + 2, header, sizeof header);
    for (size_t k = 0; k < bytes; k++) out[18 + k] = (uint8_t)(k % 4 == 0 ? k : 0);
    return 18 + bytes;
}

FUZZ_TARGET(shard)
