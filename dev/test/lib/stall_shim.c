// LD_PRELOAD: holds one rank in one call, for stall_cases.sh. gcc -shared -fPIC -o shim.so stall_shim.c -ldl
//   STALL_RANK   the rank to hold, as mpirun numbers it
//   STALL_CALL   the function: pread, fsync, or MPI_Bcast (sampling calls it once per token)
//   STALL_PATH   part of a path: only calls on files whose path has it count; ignored for MPI_Bcast
//   STALL_COUNT  which of these calls to hold, counted from 1
//   STALL_SLEEP  seconds to sleep before the call; without it the process stops itself (SIGSTOP)
//   STALL_MARK   a file into which the process id is written just before the call is held; without it no call is held
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int is(const char *variable, const char *value) {
    const char *text = getenv(variable);
    return text && strcmp(text, value) == 0;
}

// True if a call on this file counts. fd is -1 for MPI_Bcast, whose calls all count.
static int counts(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = fd < 0 ? -1 : readlink(link, path, sizeof path - 1);
    if (length < 0) return fd < 0;
    path[length] = 0;
    return strstr(path, getenv("STALL_PATH")) != NULL;
}

// Sleeps or stops if this is the call to hold.
static void hold(const char *call, int fd) {
    static int count;
    char *mark = getenv("STALL_MARK"), *seconds = getenv("STALL_SLEEP");
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (!rank || !mark || !is("STALL_RANK", rank) || !is("STALL_CALL", call)) return;
    if (!counts(fd) || ++count != atoi(getenv("STALL_COUNT"))) return;
    FILE *file = fopen(mark, "w");
    if (!file) abort();
    fprintf(file, "%d\n", (int)getpid());
    fclose(file);
    if (!seconds) raise(SIGSTOP);
    for (unsigned left = seconds ? (unsigned)atoi(seconds) : 0; left;) left = sleep(left);
}

ssize_t pread(int fd, void *data, size_t bytes, off_t offset) {
    static ssize_t (*next)(int, void *, size_t, off_t);
    if (!next) next = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    hold("pread", fd);
    return next(fd, data, bytes, offset);
}

// Code that is compiled with _FORTIFY_SOURCE may call this function instead of pread.
ssize_t __pread_chk(int fd, void *data, size_t bytes, off_t offset, size_t room) {
    if (bytes > room) abort();
    return pread(fd, data, bytes, offset);
}

int fsync(int fd) {
    static int (*next)(int);
    if (!next) next = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    hold("fsync", fd);
    return next(fd);
}

// Handles are declared as pointers, as in Open MPI.
int MPI_Bcast(void *data, int count, void *type, int root, void *comm) {
    static int (*next)(void *, int, void *, int, void *);
    if (!next) next = (int (*)(void *, int, void *, int, void *))dlsym(RTLD_NEXT, "MPI_Bcast");
    hold("MPI_Bcast", -1);
    return next(data, count, type, root, comm);
}
