// How long OpenMP's idle threads spin before they sleep: briefly, unless the user has chosen.
#ifndef LLMC_OPENMP_H
#define LLMC_OPENMP_H

#include <sys/auxv.h>
#include <unistd.h>

#include "utils.h"

// Rounds that a thread spins at a barrier. libgomp's own 300,000 keep the cores from the threads that a barrier waits
// for, if other programs need these cores or a container has a quota: a step then takes 10 times as long. On a quiet
// machine a few hundred rounds are as fast.
#define OPENMP_SPIN_COUNT "300"

// Starts this program again, in the same process, with GOMP_SPINCOUNT set: libgomp reads it only while it is loaded.
// Call it first in main. Returns if it is set (so also in the program that was started again), or if OMP_WAIT_POLICY
// is; also under valgrind, which would not follow the new program, if the command names the dynamic linker, and if the
// program cannot be started again. The run then goes on with what libgomp has.
static inline void openmp_spin_briefly(char **argv) {
    const char *preload = getenv("LD_PRELOAD");
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY") || (preload && strstr(preload, "vgpreload"))) return;
    if (!getauxval(AT_BASE) || length < 0 || setenv("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT, 1)) return;
    path[length] = 0;
    execv(path, argv);  // the file's own path, because a process that was started as /proc/self/exe is called "exe"
    if (unsetenv("GOMP_SPINCOUNT")) die("unsetenv GOMP_SPINCOUNT failed: %s", strerror(errno));
}

#endif
