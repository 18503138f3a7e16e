// Every fuzz target includes this file. A target is a function that calls the code under test with some bytes, and
// aborts if that code violates a check. FUZZ_TARGET makes it an entry point of libFuzzer, or with FUZZ_REPLAY an entry
// of the table in replay.c.
//
// die() ends a run of the target, not the process: before die() prints, its hook jumps back to fuzz_run, which frees
// the run's memory and closes its descriptors. exit() in the code under test ends a run in the same way. A run that
// calls neither must free all memory and close all files itself; else fuzz_run aborts the process.
#ifndef DEV_FAULT_FUZZ_H
#define DEV_FAULT_FUZZ_H

#include <fcntl.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FUZZ_MAX_BLOCKS (1 << 20)

enum { FUZZ_FILES = 16 };  // files with a lower descriptor than this one are checked and closed

typedef struct {
    sigjmp_buf back;
    bool running;
    void **blocks;  // memory that this run has allocated and not freed
    size_t num_blocks;
    bool open_before[FUZZ_FILES];  // descriptors that were open before the target ran, libFuzzer's among them
    char folder[200];              // this process's folder for files that targets write
} Fuzz;

static inline Fuzz *fuzz(void) {
    static Fuzz state;
    return &state;
}

// Aborts the process if the condition does not hold.
#define FUZZ_CHECK(condition)                                                                   \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            fprintf(stderr, "%s:%d: this does not hold: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                            \
        }                                                                                       \
    } while (0)

// ---- allocations of the code under test

static inline void *fuzz_note(void *block) {
    Fuzz *f = fuzz();
    if (!block || !f->running) return block;
    FUZZ_CHECK(f->num_blocks < FUZZ_MAX_BLOCKS);
    return f->blocks[f->num_blocks++] = block;
}

static inline void fuzz_forget(void *block) {
    Fuzz *f = fuzz();
    for (size_t i = f->num_blocks; block && i-- > 0;)  // starts with the newest, which is the likeliest
        if (f->blocks[i] == block) {
            f->blocks[i] = f->blocks[--f->num_blocks];
            return;
        }
}

static inline void *fuzz_calloc(size_t count, size_t size) { return fuzz_note(calloc(count, size)); }

static inline void *fuzz_realloc(void *old, size_t bytes) {
    fuzz_forget(old);
    return fuzz_note(realloc(old, bytes));
}

static inline void fuzz_free(void *block) {
    fuzz_forget(block);
    free(block);
}

__attribute__((noreturn)) static inline void fuzz_exit(int status) {
    if (!fuzz()->running) _exit(status);
    siglongjmp(fuzz()->back, 1);
}

#define calloc fuzz_calloc
#define realloc fuzz_realloc
#define free fuzz_free
#define exit fuzz_exit  // --help calls it
#define IO_CHUNK_BYTES 4096

#include "../../llmc/checkpoint/hf_export.h"
#include "../../llmc/run/logger.h"
#include "../../llmc/data/tokenizer.h"

#undef calloc
#undef realloc
#undef free
#undef exit

// ---- one run

static inline void fuzz_died(void) {
    if (fuzz()->running) fuzz_exit(1);
}

static inline void fuzz_remove_folder(void) {
    Failure ignored;
    folder_remove(fuzz()->folder, &ignored);
}

// Prepares the process; only the first call does something. Targets write their files in a folder under TMPDIR
// (default: /tmp). What the code under test prints to stdout is discarded.
static inline void fuzz_begin(void) {
    Fuzz *f = fuzz();
    if (f->blocks) return;
    f->blocks = (void **)calloc(FUZZ_MAX_BLOCKS, sizeof *f->blocks);
    const char *parent = getenv("TMPDIR");
    format_checked(f->folder, sizeof f->folder, "%s/train_fp8_fuzz_XXXXXX", parent ? parent : "/tmp");
    if (!f->blocks || !mkdtemp(f->folder) || !freopen("/dev/null", "w", stdout) || atexit(fuzz_remove_folder)) abort();
    die_hook()->before = fuzz_died;
}

// Returns the path of a name in the process's folder. It stays valid for the next seven calls.
static inline const char *fuzz_path(const char *name) {
    static char paths[8][256];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, 256, "%s/%s", fuzz()->folder, name);
    return path;
}

static inline void fuzz_write(const char *name, const void *data, size_t size) {
    const int fd = open(fuzz_path(name), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    FUZZ_CHECK(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    close(fd);
}

static inline void fuzz_run(void (*target)(const uint8_t *, size_t), const uint8_t *data, size_t size) {
    Fuzz *f = fuzz();
    fuzz_begin();
    for (int fd = 0; fd < FUZZ_FILES; fd++) f->open_before[fd] = fcntl(fd, F_GETFD) >= 0;
    f->num_blocks = 0;
    if (sigsetjmp(f->back, 0) == 0) {
        f->running = true;
        target(data, size);
        f->running = false;
        FUZZ_CHECK(f->num_blocks == 0);  // all memory is freed
        for (int fd = 0; fd < FUZZ_FILES; fd++) FUZZ_CHECK((fcntl(fd, F_GETFD) >= 0) == f->open_before[fd]);
        return;
    }
    f->running = false;
    for (size_t i = 0; i < f->num_blocks; i++) free(f->blocks[i]);
    for (int fd = 0; fd < FUZZ_FILES; fd++)
        if (!f->open_before[fd]) close(fd);
}

// ---- input

// Takes the next byte of the input, by which a target chooses something. Returns 0 at the end of the input.
static inline uint8_t fuzz_byte(const uint8_t **data, size_t *size) {
    if (!*size) return 0;
    ++*data, --*size;
    return (*data)[-1];
}

#define FUZZ_SEED_CAPACITY 8192

// Copies a text seed without its terminating zero and replaces ' by ", so that JSON is readable in C. Returns its size.
static inline size_t fuzz_text(uint8_t *out, const char *text) {
    const size_t n = strlen(text);
    FUZZ_CHECK(n <= FUZZ_SEED_CAPACITY);
    for (size_t i = 0; i < n; i++) out[i] = (uint8_t)(text[i] == '\'' ? '"' : text[i]);
    return n;
}

// A target for replay.c. `seed` writes seed number i to `out` and returns its size; 0 if there is no such seed.
typedef struct {
    const char *name;
    void (*run)(const uint8_t *data, size_t size);
    size_t (*seed)(int i, uint8_t *out);
} FuzzTarget;

#ifdef FUZZ_REPLAY
#define FUZZ_TARGET(name) static const FuzzTarget fuzz_##name = {#name, name##_run, name##_seed};
#else
#define FUZZ_TARGET(name)                                          \
    int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);  \
    int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { \
        (void)name##_seed;                                         \
        fuzz_run(name##_run, data, size);                          \
        return 0;                                                  \
    }
#endif

#endif
