// The fastest GEMM algorithms that earlier starts have found, in a text file, so that they are not timed again.
//
// The file is train_fp8cu/gemms.txt in $XDG_CACHE_HOME or, if that is no absolute path, in $HOME/.cache. It may be
// removed at any time. A line is "HASH ALGORITHM KEY": 16 digits of XXH64 of all that follows them, the 64 bytes of a
// cublasLtMatmulAlgo_t, and a text that names the GPU, cuBLASLt and the GEMM. Any other line is ignored, and the next
// write drops it. A write makes a new file, and renames it: several starts at once find no torn file. If they write at
// once, the last one wins, and a later start times again what is lost. If the file cannot be read or written, each
// start times its algorithms, without a warning: many machines have no home folder that lasts.
#ifndef LLMC_GEMM_CACHE_H
#define LLMC_GEMM_CACHE_H

#include "../base/file_io.h"

#define GEMM_CACHE_FILE "gemms.txt"
#define GEMM_CACHE_TITLE \
    "# The fastest algorithms of cuBLASLt, as train_fp8cu has timed them. This file may be removed.\n"

enum {
    GEMM_CACHE_WORDS = 8,                                    // uint64_t in a cublasLtMatmulAlgo_t
    GEMM_CACHE_HASH = 17,                                    // characters of the hash, with the space behind it
    GEMM_CACHE_HEAD = 18 + 16 * GEMM_CACHE_WORDS,            // characters before the key
    GEMM_CACHE_KEY = 512,                                    // bytes of a key, with its zero byte
    GEMM_CACHE_LINE = GEMM_CACHE_HEAD + GEMM_CACHE_KEY + 1,  // bytes of a line, with line break and zero byte
    GEMM_CACHE_MOST = 1024  // entries in a file, where a run of one shape and recipe has about 30
};

typedef struct {
    char key[GEMM_CACHE_KEY];
    uint64_t algorithm[GEMM_CACHE_WORDS];
    bool timed;  // by this process
} GemmCacheEntry;

typedef struct {
    char machine[320];        // the first part of each key that this process makes: its GPU and cuBLASLt
    GemmCacheEntry *entries;  // [GEMM_CACHE_MOST], oldest first
    int64_t count;
    int64_t asked, known;  // GEMMs whose algorithm was chosen with this cache; those that took one of an earlier start
} GemmCache;

// Writes the path of the folder, which need not exist, in at most PATH_CAPACITY - 64 bytes. False: there is no place
// for one, since neither variable is an absolute path of such a length, or since $HOME does not exist.
static inline bool gemm_cache_folder(char out[PATH_CAPACITY]) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    const bool given = cache && *cache == '/';
    const char *base = given ? cache : home;
    if (!base || *base != '/' || (!given && access(home, F_OK))) return false;
    return snprintf(out, PATH_CAPACITY, "%s%s/train_fp8cu", base, given ? "" : "/.cache") < PATH_CAPACITY - 64;
}

// Writes the line of an entry, with a line break and a zero byte. Returns its length.
static inline size_t gemm_cache_line(const GemmCacheEntry *e, char out[GEMM_CACHE_LINE]) {
    size_t n = GEMM_CACHE_HASH;
    char hash[GEMM_CACHE_HASH];
    for (int i = 0; i < GEMM_CACHE_WORDS; i++)
        n += (size_t)snprintf(out + n, GEMM_CACHE_LINE - n, "%016llx", (unsigned long long)e->algorithm[i]);
    n += (size_t)snprintf(out + n, GEMM_CACHE_LINE - n, " %s\n", e->key);
    const uint64_t sum = xxhash64(out + GEMM_CACHE_HASH, n - GEMM_CACHE_HASH);
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)sum);
    memcpy(out, hash, sizeof hash - 1);
    out[sizeof hash - 1] = ' ';
    return n;
}

// Reads a line of n bytes, with its line break. False unless it is, byte for byte, the line of the entry.
static inline bool gemm_cache_parse(const char *line, size_t n, GemmCacheEntry *e) {
    char again[GEMM_CACHE_LINE];
    memset(e, 0, sizeof *e);
    if (n < GEMM_CACHE_HEAD + 2 || n >= GEMM_CACHE_LINE) return false;
    for (int i = 0; i < GEMM_CACHE_WORDS; i++) {
        char word[17] = "";
        memcpy(word, line + GEMM_CACHE_HASH + 16 * i, 16);
        e->algorithm[i] = strtoull(word, NULL, 16);
    }
    memcpy(e->key, line + GEMM_CACHE_HEAD, n - GEMM_CACHE_HEAD - 1);
    return gemm_cache_line(e, again) == n && memcmp(again, line, n) == 0;
}

// Returns the entry of a key, or NULL.
static inline GemmCacheEntry *gemm_cache_find(const GemmCache *c, const char *key) {
    for (int64_t i = 0; i < c->count; i++)
        if (strcmp(c->entries[i].key, key) == 0) return &c->entries[i];
    return NULL;
}

// Adds an entry, or replaces that of its key. A full cache loses its oldest entry.
static inline void gemm_cache_put(GemmCache *c, const GemmCacheEntry *e) {
    GemmCacheEntry *place = gemm_cache_find(c, e->key);
    if (!place && c->count == GEMM_CACHE_MOST)
        memmove(c->entries, c->entries + 1, (size_t)--c->count * sizeof *c->entries);
    *(place ? place : &c->entries[c->count++]) = *e;
}

// Reads the file; without one the cache is empty. gemm_cache_free frees the cache.
static inline GemmCache gemm_cache_read(void) {
    char folder[PATH_CAPACITY], path[PATH_CAPACITY];
    size_t size = 0;
    GemmCache c = {};
    GemmCacheEntry e;
    c.entries = (GemmCacheEntry *)xcalloc(GEMM_CACHE_MOST, sizeof *c.entries);
    if (!gemm_cache_folder(folder)) return c;
    format_checked(path, sizeof path, "%s/" GEMM_CACHE_FILE, folder);
    char *text = read_file(path, &size);
    if (!text) return c;
    for (char *line = text, *end; (end = (char *)memchr(line, '\n', (size_t)(text + size - line))) != NULL;
         line = end + 1)
        if (gemm_cache_parse(line, (size_t)(end + 1 - line), &e)) gemm_cache_put(&c, &e);
    free(text);
    return c;
}

static inline void gemm_cache_free(GemmCache *c) {
    free(c->entries);
    c->entries = NULL;
    c->count = 0;
}

// Writes all entries to an open, empty file, and closes it.
static inline bool gemm_cache_print(const GemmCache *c, int fd) {
    char line[GEMM_CACHE_LINE];
    FILE *f = fdopen(fd, "w");
    if (!f) {
        close(fd);
        return false;
    }
    fputs(GEMM_CACHE_TITLE, f);
    for (int64_t i = 0; i < c->count; i++) fwrite(line, 1, gemm_cache_line(&c->entries[i], line), f);
    const bool ok = !ferror(f);
    return fclose(f) == 0 && ok;
}

// Puts the algorithms that this process has timed into the file, beside those that it holds by now. Returns false, and
// leaves the file as it is, if there is no folder that can be written to.
static inline bool gemm_cache_write(const GemmCache *c) {
    char folder[PATH_CAPACITY], path[PATH_CAPACITY], temporary[PATH_CAPACITY];
    Failure failure;
    if (!gemm_cache_folder(folder) || !folder_create(folder, true, &failure)) return false;
    format_checked(path, sizeof path, "%s/" GEMM_CACHE_FILE, folder);
    format_checked(temporary, sizeof temporary, "%s.XXXXXX", path);
    GemmCache now = gemm_cache_read();
    for (int64_t i = 0; i < c->count; i++)
        if (c->entries[i].timed) gemm_cache_put(&now, &c->entries[i]);
    const int fd = mkstemp(temporary);
    const bool ok = fd >= 0 && FILE_WORK("write", temporary, gemm_cache_print(&now, fd)) &&
                    FILE_WORK("rename", path, rename(temporary, path)) == 0;
    if (fd >= 0 && !ok) unlink(temporary);
    gemm_cache_free(&now);
    return ok;
}

#endif
