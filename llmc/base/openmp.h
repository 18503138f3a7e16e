// Lets OpenMP's idle threads sleep while other programs take the cores.
#ifndef LLMC_OPENMP_H
#define LLMC_OPENMP_H

#include <omp.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>

#include "file_io.h"

// libgomp's threads spin for 300,000 rounds at a barrier before they sleep. That is fastest while the cores are theirs.
// If other programs or ranks need the cores, or a container has a quota, a step takes 10 times as long, because the
// thread that all wait for gets no core. But with more OpenMP threads than CPUs they spin for 100 rounds only
// (libgomp's manual, GOMP_SPINCOUNT). So while the cores are taken, one more OpenMP thread than CPUs is kept asleep.
#define OPENMP_TAKEN 0.05       // share of the time for which the main thread waited for a core
#define OPENMP_CHECK_US 100000  // between two looks at this share
#define OPENMP_CALM_CHECKS 20   // looks in sequence at a free core before threads spin again

// The nanoseconds for which the main thread was ready and had no core, or 0 if the kernel does not tell.
static inline int64_t openmp_waited(void) {
    long long waited = 0;
    FILE *file = fopen("/proc/self/schedstat", "r");
    if (file && fscanf(file, "%*d %lld", &waited) != 1) waited = 0;
    if (file) fclose(file);
    return waited;
}

// Makes OpenMP threads that sleep, until *end is posted.
static inline void *openmp_crowd(void *end) {
    const int free_cpus = omp_get_num_procs() - omp_get_max_threads();
    omp_set_num_threads(free_cpus > 0 ? free_cpus + 2 : 2);  // for this thread's loops alone
    PARALLEL_FOR
    for (int i = 0; i < omp_get_max_threads(); i++) __asm__ volatile("");  // else the compiler may drop the loop
    while (sem_wait((sem_t *)end)) {}
    return NULL;
}

static inline void *openmp_run(void *) {
    pthread_t crowd;
    sem_t end;
    if (sem_init(&end, 0, 0)) return NULL;
    int64_t waited = openmp_waited();
    double before = seconds_now();
    for (int calm = 0, crowded = 0;;) {
        usleep(OPENMP_CHECK_US);
        const double now = seconds_now();
        const int64_t waited_now = openmp_waited();
        calm = (double)(waited_now - waited) * 1e-9 > OPENMP_TAKEN * (now - before) ? 0 : calm + 1;
        waited = waited_now, before = now;
        if (!calm && !crowded) crowded = !pthread_create(&crowd, NULL, openmp_crowd, &end);
        else if (crowded && calm == OPENMP_CALM_CHECKS) crowded = sem_post(&end) || pthread_join(crowd, NULL);
    }
}

// Calls process_prepare, and starts the thread that looks whether others take the cores. Call it first in main. No
// thread is started if the user has chosen how threads wait, by GOMP_SPINCOUNT or OMP_WAIT_POLICY, or if that fails.
static inline void openmp_give_way(void) {
    pthread_t thread;
    sigset_t all, before;
    process_prepare();  // the thread opens files, which must not get the descriptor of a closed stdout
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    sigfillset(&all);  // signals go to the main thread
    if (pthread_sigmask(SIG_SETMASK, &all, &before)) return;
    if (!pthread_create(&thread, NULL, openmp_run, NULL)) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

#endif
