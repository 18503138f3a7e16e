// Small things for many files: fatal errors, exit statuses, texts, memory, reading a file, rounding of sizes, time.
#ifndef LLMC_UTILS_H
#define LLMC_UTILS_H

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "activity.h"

#define UTILS_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

// Marks code that a CUDA kernel calls as well as the host.
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// A PARALLEL_ macro stands before a loop whose iterations do not depend on each other. OpenMP threads share the
// iterations, in equal parts, or one by one with PARALLEL_FOR_UNEVEN. After a loop with PARALLEL_MAX, the variables
// that it names have the largest values of all threads. Without OpenMP one thread runs the loop.
#ifdef _OPENMP
#define PARALLEL_PRAGMA(text) _Pragma(#text)
#define PARALLEL_FOR _Pragma("omp parallel for")
#define PARALLEL_FOR_UNEVEN _Pragma("omp parallel for schedule(dynamic)")
#define PARALLEL_MAX(...) PARALLEL_PRAGMA(omp parallel for reduction(max : __VA_ARGS__))
#else
#define PARALLEL_FOR
#define PARALLEL_FOR_UNEVEN
#define PARALLEL_MAX(...)
#endif

// The exit statuses of the trainers, on one rank and on several. Scripts go by these numbers, not by messages. X(name,
// number, meaning); --help all prints this list. Number 5 is free. If a signal kills the process (a second Ctrl-C), the
// shell reports 128 + the signal's number.
#define EXIT_CODES(X)                                                                                       \
    X(EXIT_DONE, 0,                                                                                         \
      "done; or stopped by a signal or --on-output-lost stop, with all finished steps saved if there is a " \
      "--checkpoint-dir")                                                                                   \
    X(EXIT_OTHER, 1, "another failure, such as a file that is missing or damaged, or a disk that is full")  \
    X(EXIT_USAGE, 2, "wrong command line: an option, MODEL or the number of ranks")                         \
    X(EXIT_MEMORY, 3, "out of memory, of the host or a GPU; also a memory plan that does not fit")          \
    X(EXIT_UNSUPPORTED, 4, "no usable GPU; or this GPU, trainer or recipe cannot do this model or option")  \
    X(EXIT_LOST, 6, "a rank or host was lost or is stuck")                                                  \
    X(EXIT_NONFINITE, 7,                                                                                    \
      "the loss or gradient norm was not finite, the norm too large, or a value for a checkpoint was not finite")

#define EXIT_CODE_ID(id, number, meaning) id = number,
enum { EXIT_CODES(EXIT_CODE_ID) };

// Hooks for a program of several ranks that dies. comm.h sets them.
typedef struct {
    char prefix[128];       // stands before the message: "rank 3 on HOST: "
    void (*before)(void);   // called before the message is printed
    void (*end)(int code);  // ends this process and the other ranks, with this status
} DieHook;

static inline DieHook *die_hook(void) {
    static DieHook hook;
    return &hook;
}

// A place in a text. Zero it at the start of the text.
typedef struct {
    unsigned char before;  // the byte before this place
    int expected;          // bytes that a UTF-8 character before this place still needs
} TextPlace;

// True if byte c, the next of a text, is a control character other than newline and tab: a terminal would act on it.
// Bytes 80 to 9F (C1) are control characters unless they continue a UTF-8 character. C2 80 to C2 9F are control
// characters in UTF-8: for their second byte the function returns true.
static inline bool text_is_control(TextPlace *at, unsigned char c) {
    const bool c1 = c >= 0x80 && c < 0xa0 && (at->expected == 0 || at->before == 0xc2);
    if (c >= 0x80 && c < 0xc0) at->expected -= at->expected > 0;
    else at->expected = c >= 0xf0 ? 3 * (c < 0xf5) : c >= 0xe0 ? 2 : c >= 0xc2;
    at->before = c;
    return c1 || (c < 32 && c != '\n' && c != '\t') || c == 127;
}

// Copies a text that may come from a file, so that it is safe to print: writes each control character as \xNN
// (text_is_control). A text that does not fit is cut.
static inline void text_printable(const char *text, char *out, size_t capacity) {
    TextPlace at = {0, 0};
    size_t n = 0;
    for (; *text && n + 5 <= capacity; text++) {
        const unsigned char c = (unsigned char)*text;
        if (text_is_control(&at, c)) n += (size_t)snprintf(out + n, 5, "\\x%02x", c);
        else out[n++] = *text;
    }
    out[n] = 0;
}

// Copies the letters and digits of a text, as small letters. A text that does not fit is cut.
static inline void text_letters(const char *text, char *out, size_t capacity) {
    size_t n = 0;
    for (; *text && n + 1 < capacity; text++)
        if (isalnum((unsigned char)*text)) out[n++] = (char)tolower((unsigned char)*text);
    out[n] = 0;
}

// Levenshtein's edit distance of two short words. Returns 64 if b has more than 63 characters.
static inline int text_edit_distance(const char *a, const char *b) {
    int row[64], columns = (int)strlen(b);
    if (columns > 63) return 64;
    for (int j = 0; j <= columns; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= columns; j++) {
            int replace = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            int shorter = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            row[j] = replace < shorter ? replace : shorter;
        }
    }
    return row[columns];
}

// Flushes stdout unless another thread holds it, since that thread may never let go.
static inline void flush_stdout(void) {
    if (ftrylockfile(stdout)) return;
    fflush(stdout);
    funlockfile(stdout);
}

// die_with, with the arguments as a list.
__attribute__((noreturn)) UTILS_PRINTF(2, 0) static inline void die_list(int code, const char *format, va_list args) {
    const DieHook *hook = die_hook();
    char given[8000], text[8000];
    vsnprintf(given, sizeof given, format, args);
    text_printable(given, text, sizeof text);
    flush_stdout();
    if (hook->before) hook->before();
    // one call, so that no output of other processes comes between its parts
    fprintf(stderr, "error: %s%s\n", hook->prefix, text);
    if (hook->end) hook->end(code);
    exit(code);
}

// Prints "error: ..." on stderr. Then ends this process and all other ranks with a status of EXIT_CODES. For bad input
// the text should say what was given, why it cannot be, and what would work.
__attribute__((noreturn)) UTILS_PRINTF(2, 3) static inline void die_with(int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    die_list(code, format, args);
}

// die_with for a failure that has no status of its own.
__attribute__((noreturn)) UTILS_PRINTF(1, 2) static inline void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    die_list(EXIT_OTHER, format, args);
}

UTILS_PRINTF(1, 2) static inline void warn(const char *format, ...) {
    char given[8000], text[8000];
    va_list args;
    va_start(args, format);
    vsnprintf(given, sizeof given, format, args);
    va_end(args);
    text_printable(given, text, sizeof text);
    fprintf(stderr, "warning: %s\n", text);
}

// Returns zeroed memory for `count` items of `size` bytes; a count or size of 0 counts as 1. Dies if there is no memory
// left, so it never returns NULL.
static inline void *xcalloc(size_t count, size_t size) {
    void *p = calloc(count ? count : 1, size ? size : 1);
    if (!p) die_with(EXIT_MEMORY, "out of host memory: could not allocate %zu x %zu bytes", count, size);
    return p;
}

static inline void *xrealloc(void *old, size_t bytes) {
    void *p = realloc(old, bytes ? bytes : 1);
    if (!p) die_with(EXIT_MEMORY, "out of host memory: could not allocate %zu bytes", bytes);
    return p;
}

static inline char *xstrdup(const char *s) {
    char *p = (char *)xcalloc(strlen(s) + 1, 1);
    memcpy(p, s, strlen(s) + 1);
    return p;
}

// Formats into a fixed buffer and dies if the text does not fit, so that no path is cut silently.
UTILS_PRINTF(3, 4) static inline void format_checked(char *out, size_t capacity, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(out, capacity, format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= capacity)
        die("text of %d bytes does not fit in %zu with its zero byte: \"%s...\"", n, capacity, out);
}

// Opens a file to be read. NULL with errno if that fails; EMEDIUMTYPE: it is no regular file, whose reading may never
// end; EFBIG: it has more than `most` bytes.
static inline FILE *open_regular(const char *path, int64_t most) {
    struct stat info;
    const int fd = FILE_WORK("open", path, open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // open waits at a pipe
    if (fd < 0) return NULL;
    int error = fstat(fd, &info) ? errno : S_ISDIR(info.st_mode) ? EISDIR : !S_ISREG(info.st_mode) ? EMEDIUMTYPE : 0;
    if (!error && info.st_size > most) error = EFBIG;
    FILE *f = error ? NULL : fdopen(fd, "rb");
    if (f) return f;
    close(fd);
    if (error) errno = error;
    return NULL;
}

// The reason (errno) why open_regular or read_file failed.
static inline const char *read_words(void) {
    return errno == EMEDIUMTYPE ? "it is not a regular file"
           : errno == EFBIG     ? "it has more bytes than any such file"
                                : strerror(errno);
}

#define READ_FILE_MOST ((int64_t)256 << 20)  // the largest files read whole are tokenizers and indexes, of tens of MB

// Reads a whole file into memory with a terminating zero byte (not counted in *size). NULL if it cannot be read; errno
// says why (read_words).
static inline char *read_file(const char *path, size_t *size) {
    FILE *f = open_regular(path, READ_FILE_MOST);
    if (!f) return NULL;
    size_t capacity = 1 << 16, n = 0;
    char *data = (char *)xcalloc(capacity, 1);
    for (size_t got; (got = FILE_WORK("fread", path, fread(data + n, 1, capacity - n - 1, f))) > 0;) {
        n += got;
        if (n + 1 >= capacity) data = (char *)xrealloc(data, capacity *= 2);
    }
    if (ferror(f)) {
        int error = errno;
        fclose(f);
        free(data);
        errno = error;
        return NULL;
    }
    fclose(f);
    data[n] = 0;
    if (size) *size = n;
    return data;
}

// For a file of which `head` holds the first n bytes, and which is not what a program expects: returns what it is by
// these bytes, and what to do, for a message; NULL if they do not show it.
static inline const char *file_look_alike(const char *head, size_t n) {
    static const struct {
        const char *begin, *words;
    } rows[] = {{"version https://git-lfs", "a pointer of Git LFS: get the file itself with git lfs pull"},
                {"<", "a web page or XML: download the file itself (on the Hugging Face hub by a link with /resolve/)"},
                {"PK\x03\x04", "a zip archive, as PyTorch's .bin and .pt files are"},
                {"\x1f\x8b", "compressed by gzip: unpack it"},
                {"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it"},
                {"PAR1", "Parquet data"},
                {"GGUF", "a GGUF file"},
                {"\x93NUMPY", "a NumPy array"},
                {"\xff\xfe", "UTF-16 text: save it as UTF-8"},
                {"\xfe\xff", "UTF-16 text: save it as UTF-8"},
                {"{", "JSON text"},
                {"[", "JSON text"}};
    size_t space = 0;
    while (space < n && (head[space] == ' ' || head[space] == '\n' || head[space] == '\r')) space++;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const size_t length = strlen(rows[i].begin);
        if (n - space >= length && memcmp(head + space, rows[i].begin, length) == 0) return rows[i].words;
    }
    return NULL;
}

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
HOST_DEVICE static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
HOST_DEVICE static inline int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

static inline int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Sorts n values and returns their median: for an even n the mean of the two middle ones; 0 if there are none.
static inline double median_of(double *values, int64_t n) {
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return n == 0 ? 0 : n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// Seconds of a clock that never goes back.
static inline double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Sleeps for `seconds` (below 1), or until *wakes, which `mutex` guards. `changed` tells of it, by CLOCK_MONOTONIC.
// Returns *wakes.
static inline bool thread_sleep(double seconds, pthread_mutex_t *mutex, pthread_cond_t *changed, const bool *wakes) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(seconds * 1e9);
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(mutex);
    while (!*wakes && pthread_cond_timedwait(changed, mutex, &until) == 0) continue;
    const bool woken = *wakes;
    pthread_mutex_unlock(mutex);
    return woken;
}

#endif
