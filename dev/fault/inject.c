// A shared library for LD_PRELOAD that makes file calls of a program fail, or kills the program at one. It simulates a
// full disk, a bad disk, a killed process or a power cut. It counts the calls that change files under one folder, such
// as open for writing, write, fsync and rename, in the order of the program's calls. It strikes at the Nth; with the
// kinds that end in "-on", at all later ones too.
//
//   FAULT_DIR     the folder, as an absolute path without links; if unset, the library does nothing
//   FAULT_KIND    the fault, see KINDS; "none" only counts calls
//   FAULT_AT      the number of the call, counted from 1
//   FAULT_RANK    the MPI rank whose calls are counted; unset for a program without MPI
//   FAULT_REPORT  a file that gets a line "call N NAME BYTES PATH" for each counted call with FAULT_KIND=none, and
//                 "struck N NAME BYTES PATH" when the library strikes
//   FAULT_STATE   a file shared by the ranks, which lists written data and renames that are not on disk yet; if unset,
//                 the list is of this process only
//   FAULT_CALLS   the only call that is counted, instead of all calls that change files: "pread"
//   FAULT_DELAY   microseconds between the call and the kill, for FAULT_KIND=kill-later
//
// A power cut kills all ranks. Written data that no fsync covers then reads as zeros. With power-names, a rename is
// also undone unless an fsync of its folder followed it. The creation and the removal of files are not undone.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

//    kind          FAULT_KIND
// clang-format off
#define KINDS(X) \
    X(KIND_NONE,    "none") \
    X(KILL_BEFORE,  "kill-before") \
    X(KILL_AFTER,   "kill-after") \
    X(KILL_MIDDLE,  "kill-middle") \
    X(KILL_LATER,   "kill-later") \
    X(POWER_CUT,    "power-cut") \
    X(POWER_NAMES,  "power-names") \
    X(ENOSPC_ONCE,  "enospc") \
    X(EIO_ONCE,     "eio") \
    X(ENOSPC_ON,    "enospc-on") \
    X(EIO_ON,       "eio-on") \
    X(SHORT_WRITE,  "short") \
    X(EINTR_ONCE,   "eintr")
// clang-format on

typedef enum {
#define X(kind, name) kind,
    KINDS(X)
#undef X
        NUM_KINDS
} Kind;

static Kind kind_find(const char *name) {
#define X(kind, text) \
    if (strcmp(name, text) == 0) return kind;
    KINDS(X)
#undef X
    abort();
}

// The fate of a call. GO: it runs. GO_THEN_KILL: it runs, and then the process is killed. FAIL: it fails with the errno
// that is set. WRITE_HALF: it writes half of its data, and then the process is killed. WRITE_ONE: it writes one byte.
typedef enum { GO, GO_THEN_KILL, FAIL, WRITE_HALF, WRITE_ONE } Verdict;

// Groups of calls. FAULT_KIND=enospc-on strikes all but CALL_FREES: a full disk lets files be removed and closed.
typedef enum { CALL_TAKES_SPACE, CALL_WRITES, CALL_FREES, CALL_READS } CallGroup;

#define MAX_RANGES 8192
#define MAX_RENAMES 64
#define MAX_RANKS 64

typedef struct {
    char path[512];
    int64_t begin, end;
} Range;

typedef struct {
    char from[512], to[512];
    bool exchange;
} Rename;

// The state that all ranks share if FAULT_STATE is set.
typedef struct {
    int lock;
    int num_ranks, num_ranges, num_renames;
    pid_t ranks[MAX_RANKS];
    Range ranges[MAX_RANGES];     // written data that is not on disk yet
    Rename renames[MAX_RENAMES];  // renames that are not on disk yet, oldest first
} Shared;

typedef struct {
    bool active, counts;  // active: FAULT_DIR is set, and this is no mpirun; counts: calls of this rank are counted
    char dir[PATH_MAX];
    const char *report, *calls;
    Kind kind;
    int64_t at, count;
    useconds_t delay;
    Shared *shared;
} Fault;

#define REAL(name) ((__typeof__(&name))real_call(#name))

static void *real_call(const char *name) {
    void *call = dlsym(RTLD_NEXT, name);
    if (!call) abort();
    return call;
}

static void *shared_memory(const char *path) {
    const int fd = path ? REAL(open)(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
    if (path && (fd < 0 || REAL(ftruncate)(fd, sizeof(Shared)))) abort();
    const int flags = MAP_SHARED | (path ? 0 : MAP_ANONYMOUS);
    void *memory = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, flags, fd, 0);
    if (memory == MAP_FAILED) abort();
    if (fd >= 0) REAL(close)(fd);
    return memory;
}

static Fault *fault_of_process(void) {
    static Fault fault;
    return &fault;
}

static void shared_lock(Shared *s) {
    while (__atomic_exchange_n(&s->lock, 1, __ATOMIC_ACQUIRE)) usleep(10);
}

static void shared_unlock(Shared *s) { __atomic_store_n(&s->lock, 0, __ATOMIC_RELEASE); }

__attribute__((constructor)) static void fault_begin(void) {
    Fault *f = fault_of_process();
    const char *dir = getenv("FAULT_DIR"), *kind = getenv("FAULT_KIND");
    const char *chosen = getenv("FAULT_RANK"), *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (!dir || (chosen && !rank)) return;  // mpirun itself has no rank
    f->active = true;
    f->counts = !chosen || strcmp(chosen, rank) == 0;
    snprintf(f->dir, sizeof f->dir, "%s", dir);
    f->report = getenv("FAULT_REPORT"), f->calls = getenv("FAULT_CALLS");
    f->at = getenv("FAULT_AT") ? atoll(getenv("FAULT_AT")) : 0;
    f->delay = getenv("FAULT_DELAY") ? (useconds_t)atoi(getenv("FAULT_DELAY")) : 0;
    f->kind = kind_find(kind ? kind : "none");
    f->shared = shared_memory(getenv("FAULT_STATE"));
    shared_lock(f->shared);
    if (f->shared->num_ranks < MAX_RANKS) f->shared->ranks[f->shared->num_ranks++] = getpid();
    shared_unlock(f->shared);
    setvbuf(stdout, NULL, _IOLBF, 0);  // so that lines printed before a kill are seen
}

// ---- written data and renames that are not on disk yet, and the power cut that loses them

static void path_copy(char *out, size_t capacity, const char *path) {
    if (strlen(path) >= capacity) abort();
    memcpy(out, path, strlen(path) + 1);
}

static bool path_is_under(const char *path, const char *dir) {
    const size_t n = strlen(dir);
    return strncmp(path, dir, n) == 0 && (path[n] == 0 || path[n] == '/');
}

static void range_add(Fault *f, const char *path, int64_t begin, int64_t bytes) {
    Shared *s = f->shared;
    shared_lock(s);
    Range *last = s->num_ranges ? &s->ranges[s->num_ranges - 1] : NULL;
    if (last && last->end == begin && strcmp(last->path, path) == 0) last->end += bytes;
    else if (s->num_ranges == MAX_RANGES) abort();
    else {
        Range *r = &s->ranges[s->num_ranges++];
        path_copy(r->path, sizeof r->path, path);
        r->begin = begin, r->end = begin + bytes;
    }
    shared_unlock(s);
}

// Removes written data of a file, or renames into a folder, from the lists of what is not on disk yet. Called after an
// fsync, and after open has truncated a file, which then has no data.
static void path_is_synced(Fault *f, const char *path) {
    Shared *s = f->shared;
    int ranges = 0, renames = 0;
    shared_lock(s);
    for (int i = 0; i < s->num_ranges; i++)
        if (strcmp(s->ranges[i].path, path) != 0) s->ranges[ranges++] = s->ranges[i];
    for (int i = 0; i < s->num_renames; i++) {
        const char *to = s->renames[i].to, *slash = strrchr(to, '/');
        const size_t n = (size_t)(slash - to);
        if (strlen(path) != n || strncmp(path, to, n) != 0) s->renames[renames++] = s->renames[i];
    }
    s->num_ranges = ranges, s->num_renames = renames;
    shared_unlock(s);
}

static void range_rename(Range *r, const char *from, const char *to) {
    char path[sizeof r->path];
    snprintf(path, sizeof path, "%.250s%.250s", to, r->path + strlen(from));
    memcpy(r->path, path, sizeof path);
}

static void path_was_renamed(Fault *f, const char *from, const char *to, bool exchange) {
    Shared *s = f->shared;
    shared_lock(s);
    for (int i = 0; i < s->num_ranges; i++)
        if (path_is_under(s->ranges[i].path, from)) range_rename(&s->ranges[i], from, to);
        else if (exchange && path_is_under(s->ranges[i].path, to)) range_rename(&s->ranges[i], to, from);
    if (s->num_renames == MAX_RENAMES) abort();
    Rename *r = &s->renames[s->num_renames++];
    path_copy(r->from, sizeof r->from, from);
    path_copy(r->to, sizeof r->to, to);
    r->exchange = exchange;
    shared_unlock(s);
}

static void range_zero(const Range *r) {
    static const char zeros[4096];
    struct stat info;
    const int fd = REAL(open)(r->path, O_WRONLY);
    if (fd < 0) return;  // the file was removed
    const int64_t end = fstat(fd, &info) ? 0 : r->end < info.st_size ? r->end : info.st_size;
    for (int64_t at = r->begin, n; at < end; at += n) {
        n = end - at < (int64_t)sizeof zeros ? end - at : (int64_t)sizeof zeros;
        if (REAL(pwrite)(fd, zeros, (size_t)n, at) != n) abort();
    }
    REAL(close)(fd);
}

static void die_now(void) {
    for (;;) kill(getpid(), SIGKILL);
}

static void power_cut(Fault *f) {
    Shared *s = f->shared;
    shared_lock(s);
    for (int i = 0; i < s->num_ranks; i++)
        if (s->ranks[i] != getpid()) kill(s->ranks[i], SIGKILL);
    if (s->num_ranks > 1) usleep(20000);  // time for their system calls to end
    for (int i = 0; i < s->num_ranges; i++) range_zero(&s->ranges[i]);
    for (int i = s->num_renames - 1; i >= 0 && f->kind == POWER_NAMES; i--) {
        const Rename *r = &s->renames[i];
        const unsigned flags = r->exchange ? 2 : 1;  // RENAME_EXCHANGE, RENAME_NOREPLACE of linux/fs.h
        REAL(syscall)(SYS_renameat2, AT_FDCWD, r->to, AT_FDCWD, r->from, flags);  // fails if the file was removed
    }
    die_now();
}

// ---- the Nth call

static void report(const Fault *f, const char *word, const char *name, int64_t bytes, const char *path) {
    char line[PATH_MAX + 128];
    const int fd = f->report ? REAL(open)(f->report, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    if (fd < 0) return;
    const int n =
        snprintf(line, sizeof line, "%s %lld %s %lld %s\n", word, (long long)f->count, name, (long long)bytes, path);
    if (REAL(write)(fd, line, (size_t)n) != n) abort();
    REAL(close)(fd);
}

static void *kill_after_delay(void *context) {
    usleep(((Fault *)context)->delay);
    die_now();
    return NULL;
}

static Verdict strike(Fault *f, CallGroup group) {
    pthread_t thread;
    switch (f->kind) {
    case KILL_BEFORE: die_now(); break;
    case KILL_AFTER: return GO_THEN_KILL;
    case KILL_MIDDLE: return group == CALL_WRITES ? WRITE_HALF : GO_THEN_KILL;
    case KILL_LATER:
        if (pthread_create(&thread, NULL, kill_after_delay, f)) abort();
        return GO;
    case POWER_CUT:
    case POWER_NAMES: power_cut(f); break;
    case ENOSPC_ON:
        if (group == CALL_FREES) return GO;  // fall through
    case ENOSPC_ONCE: errno = ENOSPC; return FAIL;
    case EIO_ONCE:
    case EIO_ON: errno = EIO; return FAIL;
    case SHORT_WRITE: return group == CALL_WRITES ? WRITE_ONE : GO;
    case EINTR_ONCE: errno = EINTR; return FAIL;
    default: break;
    }
    return GO;
}

// Counts a call and returns its fate.
static Verdict fault_call(const char *name, CallGroup group, int64_t bytes, const char *path) {
    Fault *f = fault_of_process();
    if (!f->active || !f->counts || !path_is_under(path, f->dir)) return GO;
    if (f->calls ? strcmp(f->calls, name) != 0 : group == CALL_READS) return GO;
    f->count++;
    if (f->kind == KIND_NONE) report(f, "call", name, bytes, path);
    const bool goes_on = f->kind == ENOSPC_ON || f->kind == EIO_ON;
    if (f->kind == KIND_NONE || f->count < f->at || (f->count > f->at && !goes_on)) return GO;
    if (f->count == f->at) report(f, "struck", name, bytes, path);
    return strike(f, group);
}

// Called after a call with its result: kills the process if the fault says so.
static long fault_done(Verdict verdict, long result) {
    if (verdict == GO_THEN_KILL || verdict == WRITE_HALF) die_now();
    return result;
}

// ---- paths

// Writes the absolute path of a name relative to a folder's descriptor, without following links.
static const char *path_at(int folder, const char *path, char *out) {
    char base[PATH_MAX] = "", link[64];
    ssize_t n = 0;
    if (*path == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return out;
    }
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) base[0] = 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        n = readlink(link, base, sizeof base - 1);
        base[n > 0 ? n : 0] = 0;
    }
    snprintf(out, PATH_MAX, "%.2000s/%.2000s", base, path);
    return out;
}

static const char *path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, out, PATH_MAX - 1);
    out[n > 0 ? n : 0] = 0;
    return out;
}

static bool is_watched(const char *path) {
    const Fault *f = fault_of_process();
    return f->active && path_is_under(path, f->dir);
}

// ---- the calls

int mkdirat(int folder, const char *path, mode_t mode) {
    char full[PATH_MAX];
    const Verdict verdict = fault_call("mkdir", CALL_TAKES_SPACE, 0, path_at(folder, path, full));
    return verdict == FAIL ? -1 : (int)fault_done(verdict, REAL(mkdirat)(folder, path, mode));
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int folder, const char *path, int flags) {
    char full[PATH_MAX];
    const char *name = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
    const Verdict verdict = fault_call(name, CALL_FREES, 0, path_at(folder, path, full));
    return verdict == FAIL ? -1 : (int)fault_done(verdict, REAL(unlinkat)(folder, path, flags));
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

static int open_at(int folder, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    if ((flags & O_ACCMODE) == O_RDONLY && !(flags & O_CREAT)) return REAL(openat)(folder, path, flags, mode);
    const Verdict verdict = fault_call("open", CALL_TAKES_SPACE, 0, path_at(folder, path, full));
    if (verdict == FAIL) return -1;
    const int fd = REAL(openat)(folder, path, flags, mode);
    if (fd >= 0 && flags & O_TRUNC && is_watched(full)) path_is_synced(fault_of_process(), full);
    return (int)fault_done(verdict, fd);
}

// Defines `mode`: the argument after the flags if the call may create a file, else 0. O_TMPFILE has several bits, and
// O_DIRECTORY is one of them.
#define OPEN_MODE(flags, mode)                                                    \
    va_list args;                                                                 \
    va_start(args, flags);                                                        \
    const bool creates = (flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE; \
    const mode_t mode = creates ? (mode_t)va_arg(args, int) : 0;                  \
    va_end(args)

int open(const char *path, int flags, ...) {
    OPEN_MODE(flags, mode);
    return open_at(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    OPEN_MODE(flags, mode);
    return open_at(AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...) {
    OPEN_MODE(flags, mode);
    return open_at(folder, path, flags, mode);
}

// Writes at `offset`, or, if it is -1, at the file's current position.
static ssize_t write_at(const char *name, int fd, const void *data, size_t bytes, off_t offset) {
    char path[PATH_MAX];
    Verdict verdict = GO;
    const bool watched = fault_of_process()->active && is_watched(path_of(fd, path));
    if (watched) verdict = fault_call(name, CALL_WRITES, (int64_t)bytes, path);
    if (verdict == FAIL) return -1;
    if (verdict == WRITE_HALF) bytes /= 2;
    if (verdict == WRITE_ONE && bytes) bytes = 1;
    const off_t at = offset >= 0 ? offset : watched ? lseek(fd, 0, SEEK_CUR) : 0;
    const ssize_t done = offset >= 0 ? REAL(pwrite)(fd, data, bytes, offset) : REAL(write)(fd, data, bytes);
    if (watched && done > 0) range_add(fault_of_process(), path, at, done);
    return fault_done(verdict, done);
}

ssize_t write(int fd, const void *data, size_t bytes) { return write_at("write", fd, data, bytes, -1); }

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    return write_at("pwrite", fd, data, bytes, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset) { return pwrite(fd, data, bytes, offset); }

ssize_t pread(int fd, void *data, size_t bytes, off_t offset) {
    char path[PATH_MAX];
    const Fault *f = fault_of_process();
    const bool counts = f->active && f->calls;
    const Verdict verdict = counts ? fault_call("pread", CALL_READS, (int64_t)bytes, path_of(fd, path)) : GO;
    return verdict == FAIL ? -1 : fault_done(verdict, REAL(pread)(fd, data, bytes, offset));
}

// Begins the replacement of a call on an open file `fd`: counts the call, and makes it unless it is to fail.
#define CALL_ON_FILE(name, group, call)                                               \
    char path[PATH_MAX];                                                              \
    Verdict verdict = GO;                                                             \
    const bool watched = fault_of_process()->active && is_watched(path_of(fd, path)); \
    if (watched) verdict = fault_call(name, group, 0, path);                          \
    const int result = verdict == FAIL ? -1 : (call)

int ftruncate(int fd, off_t length) {
    CALL_ON_FILE("ftruncate", CALL_TAKES_SPACE, REAL(ftruncate)(fd, length));
    return (int)fault_done(verdict, result);
}

int ftruncate64(int fd, off64_t length) { return ftruncate(fd, length); }

int fsync(int fd) {
    CALL_ON_FILE("fsync", CALL_TAKES_SPACE, REAL(fsync)(fd));
    if (watched && result == 0) path_is_synced(fault_of_process(), path);
    return (int)fault_done(verdict, result);
}

int fdatasync(int fd) { return fsync(fd); }

// This call is counted only for files that are open for writing. The file is closed even if the call is made to fail.
int close(int fd) {
    const int flags = fault_of_process()->active ? fcntl(fd, F_GETFL) : -1;
    if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY) return REAL(close)(fd);
    CALL_ON_FILE("close", CALL_FREES, 0);
    const int error = errno, closed = REAL(close)(fd);
    if (result) errno = error;
    return (int)fault_done(verdict, result ? result : closed);
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    path_at(from_folder, from, a), path_at(to_folder, to, b);
    const Verdict verdict = fault_call(flags & 2 ? "exchange" : "rename", CALL_TAKES_SPACE, 0, is_watched(b) ? b : a);
    if (verdict == FAIL) return -1;
    const int result = (int)REAL(syscall)(SYS_renameat2, from_folder, from, to_folder, to, flags);
    if (result == 0 && is_watched(b)) path_was_renamed(fault_of_process(), a, b, flags & 2);
    return (int)fault_done(verdict, result);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    return renameat2(from_folder, from, to_folder, to, 0);
}

int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

// Catches renameat2, which the program calls by its number. Passes all other system calls on.
long syscall(long number, ...) {
    long a[6];
    va_list args;
    va_start(args, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(args, long);
    va_end(args);
    if (number == SYS_renameat2)
        return renameat2((int)a[0], (const char *)a[1], (int)a[2], (const char *)a[3], (unsigned)a[4]);
    return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
