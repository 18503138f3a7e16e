// Counted checks for the test programs. A program ends with `return check_report();`, which prints "N passed, N
// failed".
// CHECK prints nothing if its condition is true. Otherwise it prints the condition and the label, which says what
// should hold or what was found, and mostly both.
#ifndef DEV_TEST_CHECK_H
#define DEV_TEST_CHECK_H

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../../llmc/base/utils.h"

// Sanitizers make arithmetic far slower. With them some tests take fewer steps or cases, and tests of numbers alone are
// left out.
#ifdef __SANITIZE_ADDRESS__
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

typedef struct {
    int passed, failed;
} CheckCounts;

static CheckCounts check_counts;

#define CHECK(condition, ...)                                             \
    do {                                                                  \
        if (condition) {                                                  \
            check_counts.passed++;                                        \
        } else {                                                          \
            check_counts.failed++;                                        \
            printf("FAILED %s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                          \
            printf("\n");                                                 \
        }                                                                 \
    } while (0)

// Returns ||a - b|| / ||b|| in double precision, or ||a - b|| if b is zero. NaN or infinite if any value is not finite.
static inline double check_relative_error(const float *a, const float *b, int64_t n) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

// True if `error` is larger than `worst`. NaN is larger than all numbers.
static inline bool check_is_worse(double error, double worst) { return isnan(error) ? !isnan(worst) : error > worst; }

// Runs `action(context)` in a child process, and copies the first capacity - 1 bytes that it writes to descriptor `fd`
// to `output`. Returns its status, as from waitpid().
static inline int check_child(void (*action)(void *), void *context, int fd, char *output, size_t capacity) {
    int fds[2];
    fflush(stdout);
    if (pipe(fds)) die("pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0) die("fork: %s", strerror(errno));
    if (child == 0) {
        close(fds[0]);
        dup2(fds[1], fd);
        action(context);
        _exit(0);
    }
    close(fds[1]);
    size_t n = 0;
    for (ssize_t got; n + 1 < capacity && (got = read(fds[0], output + n, capacity - n - 1)) > 0;) n += (size_t)got;
    output[n] = 0;
    close(fds[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return status;
}

// Runs check_child for stderr. True if the child ended by itself (no signal) with a non-zero status and `output`
// contains `message`.
static inline bool check_dies(void (*action)(void *), void *context, const char *message, char *output,
                              size_t capacity) {
    const int status = check_child(action, context, 2, output, capacity);
    return WIFEXITED(status) && WEXITSTATUS(status) != 0 && strstr(output, message) != NULL;
}

// Checks that the action dies with the message. `what` and the arguments after it, which are printf's, say what should
// hold; a failure also prints stderr.
#define CHECK_DIES(action, context, message, what, ...)                                                            \
    do {                                                                                                           \
        char stderr_[8192];                                                                                        \
        CHECK(check_dies(action, context, message, stderr_, sizeof stderr_), what ": %s", ##__VA_ARGS__, stderr_); \
    } while (0)

// Checks that a call returns false and that its reason, which it writes to the caller's `failure`, has the words.
#define CHECK_FAILS(call, words, what, ...) \
    CHECK(!(call) && strstr(failure.text, words), what ": %s", ##__VA_ARGS__, failure.text)

// Between check_capture and check_captured stdout goes to a file. check_captured returns what was printed, which the
// caller frees.
typedef struct {
    FILE *file;
    int saved;
} CheckCapture;

static inline CheckCapture check_capture(void) {
    fflush(stdout);
    const CheckCapture c = {tmpfile(), dup(1)};
    if (!c.file || c.saved < 0 || dup2(fileno(c.file), 1) < 0) die("cannot redirect stdout: %s", strerror(errno));
    return c;
}

static inline char *check_captured(CheckCapture c) {
    fflush(stdout);
    dup2(c.saved, 1);
    close(c.saved);
    fseek(c.file, 0, SEEK_END);
    const size_t n = (size_t)ftell(c.file);
    char *text = (char *)xcalloc(n + 1, 1);
    rewind(c.file);
    if (fread(text, 1, n, c.file) != n) die("cannot read back what was printed");
    fclose(c.file);
    return text;
}

// Counts how often `word` occurs in `text`.
static inline int check_count(const char *text, const char *word) {
    int n = 0;
    for (; (text = strstr(text, word)) != NULL; text += strlen(word)) n++;
    return n;
}

static inline int check_report(void) {
    printf("%d passed, %d failed\n", check_counts.passed, check_counts.failed);
    return check_counts.failed ? 1 : 0;
}

#endif
