// Tests openmp.h: an idle OpenMP thread spins while the cores are free, and sleeps while other programs take them. What
// is measured is the CPU time of an idle thread, which does not depend on the speed or the load of the machine.
#include "../../llmc/base/openmp.h"

#include <dirent.h>

#include "lib/check.h"

#define GAP_SECONDS 0.02
#define SPINS 2e-3   // seconds of CPU time of a thread that spins in a gap
#define SLEEPS 1e-3  // at most those of one that sleeps

// Returns the CPU time of the second of all threads since its start.
static double second_thread_time(void) {
    double seconds = 0;
#pragma omp parallel num_threads(omp_get_num_procs() > 1 ? omp_get_num_procs() : 2)
    if (omp_get_thread_num() == 1) {
        struct timespec t;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        seconds = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    }
    return seconds;
}

// Returns the CPU time of the second thread while the first works or sleeps alone.
static double idle_time(bool work) {
    const double before = second_thread_time(), end = seconds_now() + GAP_SECONDS;
    if (!work) usleep((useconds_t)(GAP_SECONDS * 1e6));
    while (seconds_now() < end) {}
    return second_thread_time() - before;
}

static int threads(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    if (!folder) die("no /proc/self/task");
    while (readdir(folder)) count++;
    closedir(folder);
    return count;
}

int main(void) {
    const int programs = omp_get_num_procs();
    pid_t *others = (pid_t *)xcalloc((size_t)programs, sizeof *others);
    const int alone = threads();
    setenv("GOMP_SPINCOUNT", "7", 1), openmp_give_way(), unsetenv("GOMP_SPINCOUNT");
    setenv("OMP_WAIT_POLICY", "active", 1), openmp_give_way(), unsetenv("OMP_WAIT_POLICY");
    CHECK(threads() == alone, "a user who has chosen how threads wait gets no thread that changes it");
    close(STDIN_FILENO), openmp_give_way();
    CHECK(fcntl(STDIN_FILENO, F_GETFD) >= 0, "a closed stream is /dev/null before the thread opens files");
    for (int i = 0; i < programs; i++)
        if (!(others[i] = fork()))
            for (volatile int spin = 1; spin;) {}
    double idle = 1;
    for (const double end = seconds_now() + 30; idle > SLEEPS && seconds_now() < end;) idle = idle_time(true);
    CHECK(idle <= SLEEPS, "beside %d busy programs an idle thread takes %.1f ms of CPU time in 20", programs,
          idle * 1e3);
    for (int i = 0; i < programs; i++) kill(others[i], SIGKILL), waitpid(others[i], NULL, 0);
    for (const double end = seconds_now() + 30; idle < SPINS && seconds_now() < end; usleep(300000))
        idle = idle_time(false);
    CHECK(idle >= SPINS, "alone again it takes %.1f ms", idle * 1e3);
    free(others);
    return check_report();
}
