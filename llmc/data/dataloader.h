// Pre-tokenized binary shards as training sequences.
//
// Shard: 256 x int32 header (little-endian), then the tokens, to the end of the file.
//   header[0], header[1] = 20240801, 7   uint32 tokens, header[2] = their number
//                          20240801, 8   uint32 tokens, header[2..3] = their number as uint64
//                          20240801, 9   as 8, with a loss mask: bit 31 of a token says that it is context
//                          20240520, 1   uint16 tokens, header[2] = their number
// Predicting a token that is context does not count: its target is -1, which has no loss and no gradient.
// Sequences: each shard is cut into windows of T + 1 tokens at stride T: window i holds tokens i*T to i*T + T, both
// included. So the last target of one window is the first input of the next. No window crosses from one shard into the
// next. Each token is predicted once an epoch, except a shard's first and those at its end, fewer than T, that fill no
// window. Documents are packed: a window starts and ends anywhere in them (documents.h).
//
// Order: sample g of a run (g = 0, 1, 2, ...) lies in epoch g / num_sequences, rounded down. The order of an epoch is a
// permutation of all sequences of all shards, keyed by seed and epoch. So it depends on the seed, T and the shards
// alone: not on ranks, batch size or where the run was resumed. Without shuffling it is the order of the files. With
// `spread`, the samples are so many sequences, which lie evenly over all shards. With --mix, each source has the epochs
// and orders that it would have alone (config/mix.h).
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../base/documents.h"
#include "../base/rng.h"
#include "../base/utils.h"
#include "../base/xxhash64.h"
#include "../config/mix.h"

#define SHARD_MAGIC_U32 20240801
#define SHARD_MAGIC_U16 20240520
#define SHARD_MASKED 9
#define SHARD_CONTEXT 0x80000000u
#define SHARD_HEADER_INTS 256
#define SHARD_HEADER_BYTES (SHARD_HEADER_INTS * (int64_t)sizeof(int32_t))
#define SHARD_FEISTEL_ROUNDS 6
#define SHARD_SCAN_TOKENS ((int64_t)1 << 18)
#define FINGERPRINT_BLOCKS 16
#define FINGERPRINT_TOKENS 1024

typedef struct {
    char *path;
    int fd;
    int64_t bytes;            // size of the file when it was opened
    struct timespec changed;  // its modification time then, or when shard_has_changed last found its data unchanged
    uint64_t fingerprint;     // made by dataloader_identity; 0: not known
    int token_bytes;          // 2 or 4
    bool masked;              // tokens have the bit SHARD_CONTEXT
    int64_t num_tokens;
    int64_t first_sequence;  // number of the shard's first window among those of all shards
    int64_t num_sequences;   // windows of this shard
} DataShard;

typedef struct {
    DataShard *shards;  // sorted by path, within each part of a list
    int64_t num_shards;
    DataShard left_out;  // the longest of the shards without a whole sequence: its path and num_tokens; path NULL: none
    int64_t num_left_out;
    int64_t num_tokens;     // in all shards
    int64_t num_sequences;  // in all shards: one epoch
    int64_t T;
    int64_t vocabulary;  // a token with an id that is not below it ends the run; the caller sets it when it is known
    int64_t separator;   // --document-mask: the token that begins each document; the caller sets it
    bool shuffle;
    uint64_t seed;
    int64_t spread;    // not with shuffle; the caller sets it; 0: the samples are all sequences
    bool masked;       // true if a shard is
    Mix mix;           // sources, whose shards follow each other in `shards`
    uint32_t *buffer;  // holds max(T + 1, SHARD_SCAN_TOKENS) tokens
    bool *context;     // for each token of the buffer: predicting it does not count
} DataLoader;

// Identifies the contents of the shards and their order, but not their names and folders.
typedef struct {
    int64_t tokens, shards;
    uint64_t fingerprint;  // one hash over every shard's header and some of its tokens, in the order of the shards
} DataIdentity;

// Token ids of a batch of B sequences of T tokens, in memory of the host or of a GPU.
typedef struct {
    int32_t *inputs, *targets;  // [B, T]; targets may be NULL if no loss is computed; -1: does not count
    Documents documents;        // NULL without --document-mask
    int32_t *index;             // the rows of the inputs, grouped by token id (embedding.cuh); NULL on the CPU
} Batch;

// A token's id, the number of its shard, and its position there, for error messages.
typedef struct {
    int64_t token, shard, position;
} TokenPlace;

// Reads `bytes` bytes from `offset` on. Dies if the read fails or the file has fewer.
static inline void shard_read_bytes(const DataShard *shard, int64_t offset, int64_t bytes, void *out) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t got = FILE_WORK("pread", shard->path,
                                pread(shard->fd, (char *)out + done, (size_t)(bytes - done), (off_t)(offset + done)));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) die("%s: read at byte %lld failed: %s", shard->path, (long long)(offset + done), strerror(errno));
        if (got == 0)
            die("%s: ends before byte %lld, where %lld more were expected: the file changed after it was opened",
                shard->path, (long long)(offset + done), (long long)(bytes - done));
        done += got;
    }
}

// Reads the ids of tokens [first, first + count), and which of them are context.
static inline void shard_read_tokens(const DataShard *shard, int64_t first, int64_t count, uint32_t *out,
                                     bool *context) {
    int64_t width = shard->token_bytes;
    // uint16 tokens are read into the second half of the buffer and widened in place, without another buffer
    char *raw = (char *)out + count * ((int64_t)sizeof(uint32_t) - width);
    shard_read_bytes(shard, SHARD_HEADER_BYTES + first * width, count * width, raw);
    memset(context, 0, (size_t)count * sizeof *context);
    for (int64_t i = 0; shard->masked && i < count; i++)
        context[i] = (out[i] & SHARD_CONTEXT) != 0, out[i] &= ~SHARD_CONTEXT;
    if (width == sizeof(uint32_t)) return;
    for (int64_t i = 0; i < count; i++) {
        uint16_t token;
        memcpy(&token, raw + i * 2, 2);
        out[i] = token;
    }
}

// Dies because of the id of token `position` of the shard; `cause` says what may be wrong.
static inline void shard_refuse_token(const DataShard *shard, int64_t position, int64_t id, int64_t vocabulary,
                                      const char *cause) {
    die("%s: token %lld has id %lld, but the model's vocabulary is %lld; %s", shard->path, (long long)position,
        (long long)id, (long long)vocabulary, cause);
}

// The largest of `count` ids; 0 if count is 0.
static inline uint32_t tokens_largest(const uint32_t *tokens, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) largest = tokens[i] > largest ? tokens[i] : largest;
    return largest;
}

// Sets token_bytes and num_tokens from the header. Dies if it has none of the formats at the head of this file.
static inline void shard_parse_header(DataShard *shard, const int32_t *header) {
    const char *words = file_look_alike((const char *)header, SHARD_HEADER_BYTES);
    int32_t magic = header[0], version = header[1];
    shard->num_tokens = header[2];
    shard->masked = magic == SHARD_MAGIC_U32 && version == SHARD_MASKED;
    if (shard->masked || (magic == SHARD_MAGIC_U32 && version == 8)) {
        memcpy(&shard->num_tokens, header + 2, sizeof(int64_t));
    } else if (!(magic == SHARD_MAGIC_U32 && version == 7) && !(magic == SHARD_MAGIC_U16 && version == 1)) {
        die("%s: not a token shard: magic %d version %d found; %d version 7, 8 or 9 (uint32 tokens) or %d version 1 "
            "(uint16 tokens) expected. data/prepare.py and build/synth_stories make such shards%s%s",
            shard->path, magic, version, SHARD_MAGIC_U32, SHARD_MAGIC_U16, words ? ". The file is " : "",
            words ? words : "");
    }
    shard->token_bytes = magic == SHARD_MAGIC_U32 ? 4 : 2;
    if (shard->num_tokens < 0 || shard->num_tokens > (INT64_MAX - SHARD_HEADER_BYTES) / 4)
        die("%s: the header gives an impossible token count, %lld", shard->path, (long long)shard->num_tokens);
}

// Opens one of `num_shards` shards, which all stay open, for sequences of T tokens. Dies if it cannot be read, or is
// not a whole shard.
static inline DataShard shard_open(const char *path, int64_t T, int64_t num_shards) {
    DataShard shard = {};
    shard.path = xstrdup(path);
    shard.fd = FILE_WORK(
        "open", path,
        open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // O_NONBLOCK: a pipe without a writer would block open()
    if (shard.fd < 0 && errno == EMFILE)
        die("%s: cannot be opened: %s: there are %lld shards, and each stays open; raise the limit with ulimit -n, or "
            "make fewer and larger shards",
            path, strerror(EMFILE), (long long)num_shards);
    if (shard.fd < 0) die("%s: cannot be opened: %s", path, strerror(errno));
    struct stat info;
    if (fstat(shard.fd, &info) != 0) die("%s: cannot be examined: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode)) die("%s: is not a regular file; a token shard is expected", path);
    shard.bytes = info.st_size, shard.changed = info.st_mtim;
    int32_t header[SHARD_HEADER_INTS];
    shard_read_bytes(&shard, 0, min_i64(SHARD_HEADER_BYTES, info.st_size), header);
    if (info.st_size < SHARD_HEADER_BYTES) {
        const char *words = file_look_alike((const char *)header, (size_t)info.st_size);
        die("%s: truncated: %lld bytes, less than a shard's header of %lld%s%s", path, (long long)info.st_size,
            (long long)SHARD_HEADER_BYTES, words ? "; the file is " : "", words ? words : "");
    }
    shard_parse_header(&shard, header);
    int64_t expected = SHARD_HEADER_BYTES + shard.num_tokens * shard.token_bytes;
    if (info.st_size != expected)
        die("%s: %s: the header promises %lld tokens, so %lld bytes with the header, but the file has %lld; make or "
            "copy it again",
            path, info.st_size < expected ? "truncated" : "too long", (long long)shard.num_tokens, (long long)expected,
            (long long)info.st_size);
    shard.num_sequences = max_i64(0, shard.num_tokens - 1) / T;
    return shard;
}

// Appends the shards that a path or a pattern (shell wildcards) matches, sorted by path, with their paths alone.
// Returns false if none matches. Dies if files cannot be listed, or if a shard is there already.
static inline bool dataloader_add(DataLoader *dl, const char *pattern) {
    const bool is_path = access(pattern, F_OK) == 0;  // a file name may hold characters of wildcards
    char *one[] = {(char *)pattern};
    glob_t matches = {};
    if (is_path) matches.gl_pathc = 1, matches.gl_pathv = one;
    const int status = is_path ? 0 : FILE_WORK("glob", pattern, glob(pattern, 0, NULL, &matches));
    if (status == GLOB_NOMATCH) return false;
    if (status != 0)
        die_with(status == GLOB_NOSPACE ? EXIT_MEMORY : EXIT_OTHER, "\"%s\": cannot list matching files: %s", pattern,
                 status == GLOB_NOSPACE ? "out of memory" : "read error");
    const int64_t before = dl->num_shards;
    dl->num_shards += (int64_t)matches.gl_pathc;
    dl->shards = (DataShard *)xrealloc(dl->shards, (size_t)dl->num_shards * sizeof *dl->shards);
    for (int64_t i = before; i < dl->num_shards; i++) {
        memset(&dl->shards[i], 0, sizeof dl->shards[i]);
        dl->shards[i].path = xstrdup(matches.gl_pathv[i - before]);
        for (int64_t j = 0; j < before; j++)
            if (strcmp(dl->shards[i].path, dl->shards[j].path) == 0)
                die("\"%s\" names %s a second time; name each shard once", pattern, dl->shards[i].path);
    }
    if (!is_path) globfree(&matches);
    return true;
}

// Finds all shards that `text` names: a path or a pattern, or a list of these with commas between. Dies if one of them
// matches nothing.
static inline void dataloader_find(DataLoader *dl, const char *text) {
    if (dataloader_add(dl, text)) return;
    char part[4096];
    for (const char *at = text, *end; at; at = *end ? end + 1 : NULL) {
        at += strspn(at, " ");
        end = at + strcspn(at, ",");
        format_checked(part, sizeof part, "%.*s", (int)(end - at), at);
        if (!dataloader_add(dl, part))
            die("no token shard matches \"%s\"; make one with data/prepare.py or build/synth_stories, or correct the "
                "path (quote wildcards in the shell)",
                part);
    }
}

// Closes the shard and remembers it if it is the longest of those without a whole sequence.
static inline void dataloader_leave_out(DataLoader *dl, DataShard *shard) {
    close(shard->fd);
    dl->num_left_out++;
    const bool longest = !dl->left_out.path || shard->num_tokens > dl->left_out.num_tokens;
    free(longest ? dl->left_out.path : shard->path);
    if (longest) dl->left_out = *shard;
}

// Returns a loader without shards.
static inline DataLoader dataloader_begin(int64_t T, bool shuffle, uint64_t seed) {
    if (T < 1) die("sequence length %lld: at least 1 token is needed", (long long)T);
    DataLoader dl = {};
    dl.T = T;
    dl.vocabulary = (int64_t)INT32_MAX + 1;  // batches hold int32
    dl.shuffle = shuffle;
    dl.seed = seed;
    dl.buffer = (uint32_t *)xcalloc((size_t)max_i64(T + 1, SHARD_SCAN_TOKENS), sizeof(uint32_t));
    dl.context = (bool *)xcalloc((size_t)max_i64(T + 1, SHARD_SCAN_TOKENS), sizeof(bool));
    return dl;
}

// Opens every shard that `text` names (dataloader_find). A shard without a whole sequence is left out. Dies if `text`
// names none, or if shard_open dies.
static inline void dataloader_append(DataLoader *dl, const char *text) {
    const int64_t before = dl->num_shards;
    dataloader_find(dl, text);
    const int64_t named = dl->num_shards;
    dl->num_shards = before;
    for (int64_t i = before; i < named; i++) {
        char *path = dl->shards[i].path;
        DataShard shard = shard_open(path, dl->T, named);
        free(path);
        shard.first_sequence = dl->num_sequences;
        dl->num_sequences += shard.num_sequences;
        dl->num_tokens += shard.num_sequences ? shard.num_tokens : 0;
        dl->masked |= shard.masked && shard.num_sequences;
        if (shard.num_sequences) dl->shards[dl->num_shards++] = shard;
        else dataloader_leave_out(dl, &shard);
    }
}

// Opens shards as dataloader_append does, for sequences of T tokens. Dies if all are left out.
static inline DataLoader dataloader_open(const char *text, int64_t T, bool shuffle, uint64_t seed) {
    DataLoader dl = dataloader_begin(T, shuffle, seed);
    dataloader_append(&dl, text);
    if (!dl.num_shards)
        die("%s: %lld tokens%s, but one sequence of length %lld needs %lld (its inputs and one more target); use a "
            "shorter --sequence-length or more text",
            dl.left_out.path, (long long)dl.left_out.num_tokens, dl.num_left_out > 1 ? ", the most of all shards" : "",
            (long long)T, (long long)T + 1);
    return dl;
}

// Finds a shard that data/prepare.py writes after X.bin when that is full, X_000002.bin, and that is not read with it.
// Returns false if there is none.
static inline bool dataloader_unread(const DataLoader *dl, char *path, size_t size) {
    for (int64_t i = 0; i < dl->num_shards; i++) {
        const char *first = dl->shards[i].path, *end = strrchr(first, '.');
        if (!end || strcmp(end, ".bin") != 0) continue;
        format_checked(path, size, "%.*s_000002.bin", (int)(end - first), first);
        bool read = access(path, F_OK) != 0 || (dl->left_out.path && strcmp(path, dl->left_out.path) == 0);
        for (int64_t j = 0; j < dl->num_shards; j++) read |= strcmp(path, dl->shards[j].path) == 0;
        if (!read) return true;
    }
    return false;
}

// Warns of shards that are left out, and of those that nobody named. `option`: the name of the option that names them.
static inline void dataloader_warn(const DataLoader *dl, const char *option) {
    char path[4096 + 16];
    if (dl->num_left_out)
        warn("%s: %lld of %lld shards are left out: they have fewer than the %lld tokens that one sequence needs; the "
             "longest of them is %s with %lld",
             option, (long long)dl->num_left_out, (long long)(dl->num_left_out + dl->num_shards), (long long)dl->T + 1,
             dl->left_out.path, (long long)dl->left_out.num_tokens);
    if (dataloader_unread(dl, path, sizeof path))
        warn("%s: %s is not read; '%.*s*.bin' names it and the shard before it", option, path,
             (int)(strlen(path) - strlen("_000002.bin")), path);
}

static inline void dataloader_close(DataLoader *dl) {
    for (int64_t i = 0; i < dl->num_shards; i++) {
        close(dl->shards[i].fd);
        free(dl->shards[i].path);
    }
    free(dl->left_out.path);
    free(dl->shards);
    free(dl->buffer);
    free(dl->context);
    memset(dl, 0, sizeof *dl);
}

// Returns the XXH64 of the shard's header and of FINGERPRINT_BLOCKS blocks of tokens spread over it. Adds these bytes
// to the hash *all too.
static inline uint64_t shard_fingerprint(const DataShard *shard, XxHash64 *all) {
    const int64_t count = min_i64(FINGERPRINT_TOKENS, shard->num_tokens), bytes = count * shard->token_bytes;
    char block[FINGERPRINT_TOKENS * sizeof(uint32_t)];
    XxHash64 own = xxhash64_begin();
    shard_read_bytes(shard, 0, SHARD_HEADER_BYTES, block);
    xxhash64_add(&own, block, SHARD_HEADER_BYTES), xxhash64_add(all, block, SHARD_HEADER_BYTES);
    for (int64_t i = 0; i < FINGERPRINT_BLOCKS; i++) {
        const int64_t first = (shard->num_tokens - count) / (FINGERPRINT_BLOCKS - 1) * i;
        shard_read_bytes(shard, SHARD_HEADER_BYTES + first * shard->token_bytes, bytes, block);
        xxhash64_add(&own, block, (size_t)bytes), xxhash64_add(all, block, (size_t)bytes);
    }
    return xxhash64_end(&own);
}

// Reads the header and FINGERPRINT_BLOCKS blocks of tokens of each shard, and sets its fingerprint. Returns the
// identity of the data, by which a run notices other data or another order of the shards. A change of a few tokens may
// go unnoticed.
static inline DataIdentity dataloader_identity(const DataLoader *dl) {
    XxHash64 hash = xxhash64_begin();
    for (int64_t s = 0; s < dl->num_shards; s++) dl->shards[s].fingerprint = shard_fingerprint(&dl->shards[s], &hash);
    for (int i = 0; i < dl->mix.num; i++) xxhash64_add(&hash, &dl->mix.sources[i].num_shards, sizeof(int64_t));
    return (DataIdentity){dl->num_tokens, dl->num_shards, xxhash64_end(&hash)};
}

// True if the open file has changed. Another file under its name does not count, since the open file is still read. A
// new modification time (touch) does not count either if size and fingerprint are as before; without a fingerprint it
// does. Dies if the file cannot be examined.
static inline bool shard_has_changed(DataShard *shard) {
    struct stat now;
    if (fstat(shard->fd, &now) != 0) die("%s: cannot be examined: %s", shard->path, strerror(errno));
    if (now.st_size != shard->bytes) return true;
    if (now.st_mtim.tv_sec == shard->changed.tv_sec && now.st_mtim.tv_nsec == shard->changed.tv_nsec) return false;
    XxHash64 unused = xxhash64_begin();
    if (!shard->fingerprint || shard_fingerprint(shard, &unused) != shard->fingerprint) return true;
    shard->changed = now.st_mtim;
    return false;
}

// Returns the number of the sample in row 0 of a rank's micro-batch of B rows; row b has that number + b. The samples
// of a step, from `first` on, are the same for every split of the global batch into micro-steps x world x B.
static inline int64_t dataloader_sample_index(int64_t first, int64_t micro_step, int64_t world, int64_t rank,
                                              int64_t B) {
    return first + (micro_step * world + rank) * B;
}

// Number of the B samples from `first` on that come before sample `end`.
static inline int64_t dataloader_rows_before(int64_t first, int64_t B, int64_t end) {
    return max_i64(0, min_i64(B, end - first));
}

// A bijection of [0, n) chosen by key: a Feistel network on the next even number of bits, walked until the value falls
// inside (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). The network's domain is at most 4 n, so a
// walk has at most 4 steps on average.
static inline int64_t dataloader_permute(int64_t index, int64_t n, uint64_t key) {
    int half_bits = 1;
    while (half_bits < 31 && (int64_t)1 << (2 * half_bits) < n) half_bits++;
    uint64_t mask = ((uint64_t)1 << half_bits) - 1, x = (uint64_t)index;
    do {
        uint64_t left = x >> half_bits, right = x & mask;
        for (uint64_t round = 0; round < SHARD_FEISTEL_ROUNDS; round++) {
            uint64_t mixed = left ^ (rng_u64(key, round << 32 | right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half_bits | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

// The sequence (0 ... num_sequences - 1, in file order) that sample g reads. With `spread` N that is sequence
// g * num_sequences / N, rounded down; in two parts, because the product may not fit 64 bits.
static inline int64_t dataloader_sequence(const DataLoader *dl, int64_t sample) {
    if (dl->spread) {
        const int64_t i = sample % dl->spread;
        return i * (dl->num_sequences / dl->spread) + i * (dl->num_sequences % dl->spread) / dl->spread;
    }
    int64_t first = 0, n = dl->num_sequences;
    if (dl->mix.num) {
        const MixSource *source = mix_place(&dl->mix, &sample);
        first = source->first_sequence, n = source->num_sequences;
    }
    const int64_t epoch = sample / n, position = sample % n;
    if (!dl->shuffle) return first + position;
    const uint64_t order_stream = 0x6f72646572ull;  // "order": apart from the streams that the weights draw from
    return first + dataloader_permute(position, n, rng_key(rng_key(dl->seed, order_stream), (uint64_t)epoch));
}

// The shard that holds a sequence (binary search on first_sequence).
static inline DataShard *dataloader_find_shard(const DataLoader *dl, int64_t sequence) {
    int64_t low = 0, high = dl->num_shards - 1;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (dl->shards[middle].first_sequence <= sequence) low = middle;
        else high = middle - 1;
    }
    return &dl->shards[low];
}

// Reads the tokens of a sequence, [T + 1], into dl->buffer and dl->context. Dies if the shard has changed
// (shard_has_changed), or if an id is not in the vocabulary. Files may be rewritten and disks may fail during a run,
// and such an id would be looked up outside the embedding.
static inline void dataloader_read(DataLoader *dl, int64_t sequence) {
    DataShard *shard = dataloader_find_shard(dl, sequence);
    const int64_t first = (sequence - shard->first_sequence) * dl->T, count = dl->T + 1;
    shard_read_tokens(shard, first, count, dl->buffer, dl->context);
    const bool changed = shard_has_changed(shard);  // after the read: notices a change before it too
    if ((int64_t)tokens_largest(dl->buffer, count) >= dl->vocabulary) {
        int64_t i = 0;
        while ((int64_t)dl->buffer[i] < dl->vocabulary) i++;
        shard_refuse_token(shard, first + i, dl->buffer[i], dl->vocabulary,
                           changed ? "the file changed after it was opened"
                                   : "the run read another id there before: the disk or the memory may be failing");
    }
    if (changed)
        die("%s: the file changed after it was opened; a run needs its shards as they are until it ends", shard->path);
}

// Reads samples first_sample ... first_sample + B - 1, one into each row. inputs [B, T] and targets [B, T] are token
// ids; targets[b][t] is the token after inputs[b][t], or -1 if it is context. targets may be NULL: they are then not
// returned. Dies as dataloader_read does.
static inline void dataloader_batch(DataLoader *dl, int64_t first_sample, int64_t B, int32_t *inputs,
                                    int32_t *targets) {
    int64_t T = dl->T;
    for (int64_t b = 0; b < B; b++) {
        dataloader_read(dl, dataloader_sequence(dl, first_sample + b));
        memcpy(inputs + b * T, dl->buffer, (size_t)T * sizeof(int32_t));
        for (int64_t t = 0; targets && t < T; t++)
            targets[b * T + t] = dl->context[t + 1] ? -1 : (int32_t)dl->buffer[t + 1];
    }
}

// Returns how many targets of the `samples` samples from first_sample on count. Reads them if there is a mask, and dies
// as dataloader_read does.
static inline int64_t dataloader_counted(DataLoader *dl, int64_t first_sample, int64_t samples) {
    int64_t counted = 0;
    if (!dl->masked) return samples * dl->T;
    for (int64_t i = 0; i < samples; i++) {
        dataloader_read(dl, dataloader_sequence(dl, first_sample + i));
        for (int64_t t = 1; t <= dl->T; t++) counted += !dl->context[t];
    }
    return counted;
}

// Reads a batch as dataloader_batch does, and finds its documents if it has memory for them.
static inline void dataloader_whole_batch(DataLoader *dl, int64_t first_sample, int64_t B, const Batch *batch) {
    dataloader_batch(dl, first_sample, B, batch->inputs, batch->targets);
    if (batch->documents.starts) documents_find(batch->documents, batch->inputs, B, dl->T, dl->separator);
}

// Reads every token of every shard once, in order, until an id is >= limit. Returns the place of that token or, if no
// id is, the place of the first token with the largest id.
static inline TokenPlace dataloader_scan(DataLoader *dl, int64_t limit) {
    TokenPlace largest = {-1, 0, 0};
    for (int64_t s = 0; s < dl->num_shards; s++) {
        const DataShard *shard = &dl->shards[s];
        for (int64_t first = 0; first < shard->num_tokens; first += SHARD_SCAN_TOKENS) {
            int64_t count = min_i64(SHARD_SCAN_TOKENS, shard->num_tokens - first);
            shard_read_tokens(shard, first, count, dl->buffer, dl->context);
            const uint32_t top = tokens_largest(dl->buffer, count);
            // these tokens are searched for the position only if one of them has a larger id
            if ((int64_t)top <= largest.token) continue;
            int64_t stop = (int64_t)top >= limit ? limit : (int64_t)top, i = 0;
            while ((int64_t)dl->buffer[i] < stop) i++;
            largest.token = dl->buffer[i];
            largest.shard = s;
            largest.position = first + i;
            if (largest.token >= limit) return largest;
        }
    }
    return largest;
}

// True if a shard holds token `id`. Reads from the first shard on until it is found.
static inline bool dataloader_holds(DataLoader *dl, int64_t id) {
    for (int64_t s = 0; s < dl->num_shards; s++)
        for (int64_t first = 0, count; first < dl->shards[s].num_tokens; first += count) {
            count = min_i64(SHARD_SCAN_TOKENS, dl->shards[s].num_tokens - first);
            shard_read_tokens(&dl->shards[s], first, count, dl->buffer, dl->context);
            for (int64_t i = 0; i < count; i++)
                if ((int64_t)dl->buffer[i] == id) return true;
        }
    return false;
}

// Returns the largest token id of all shards, after a full read. Without a tokenizer table, the presets tiny, small and
// medium take their vocabulary size from it.
static inline int64_t dataloader_max_token(DataLoader *dl) { return dataloader_scan(dl, INT64_MAX).token; }

// Dies if a token id is >= vocabulary, with the position of the first one. Reads all tokens: call it once, before
// training.
static inline void dataloader_check_vocabulary(DataLoader *dl, int64_t vocabulary) {
    TokenPlace found = dataloader_scan(dl, vocabulary);
    if (found.token < vocabulary) return;
    shard_refuse_token(&dl->shards[found.shard], found.position, found.token, vocabulary,
                       "use a shard made with the model's own tokenizer");
}

#endif
