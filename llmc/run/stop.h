// Ends a run early: on a signal, or when its output can no longer be written.
// SIGTERM, SIGINT, SIGUSR1 and SIGHUP ask the run to stop: it finishes the current step, saves if it has a
// --checkpoint-dir, and ends. Until the run creates its trainer (stop_catch), these signals end it at once. SIGHUP is
// ignored under nohup. A second SIGINT or SIGTERM, at least STOP_SECOND_REQUEST_SECONDS after the first, ends the run
// at once. Output that cannot be written stops a training run only with --on-output-lost stop.
#ifndef LLMC_STOP_H
#define LLMC_STOP_H

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "../ranks/comm.h"
#include "../config/options.h"

static volatile sig_atomic_t stop_signal;

// SIGINT and SIGTERM count as one request for this many seconds after the first: ranks may get one Ctrl-C twice, from
// the terminal and from mpirun.
#define STOP_SECOND_REQUEST_SECONDS 2

// The signal handler. SIGUSR1 and SIGHUP do not count as a first or second request: a batch system may send one of them
// before a SIGTERM, and the run must then still have time to save.
static inline void stop_note(int signal_number) {
    static volatile double first;  // seconds_now of the first SIGINT or SIGTERM; 0: none yet
    if (signal_number == SIGINT || signal_number == SIGTERM) {
        if (first == 0) first = seconds_now();
        else if (seconds_now() - first >= STOP_SECOND_REQUEST_SECONDS)
            signal(signal_number, SIG_DFL), raise(signal_number);
    }
    stop_signal = signal_number;
}

// Installs the handler. SIGHUP stays ignored under nohup. Interrupted system calls restart (SA_RESTART).
static inline void stop_catch(void) {
    const int signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
    struct sigaction action = {}, before;
    action.sa_handler = stop_note;
    action.sa_flags = SA_RESTART;
    sigfillset(&action.sa_mask);
    for (int i = 0; i < 4; i++)
        if (sigaction(signals[i], NULL, &before) ||
            (!(signals[i] == SIGHUP && before.sa_handler == SIG_IGN) && sigaction(signals[i], &action, NULL)))
            die("cannot install signal handlers: %s", strerror(errno));
}

// Returns why lines printed to `stream` are lost; NULL if none are. The errno of the failed write may be gone, so this
// tries to write an empty line.
static inline const char *output_trouble(FILE *stream) {
    if (!ferror(stream) && !fflush(stream)) return NULL;
    clearerr(stream);
    return fputc('\n', stream) == EOF || fflush(stream) ? strerror(errno) : "it could not be written for a while";
}

// Returns the place of a flag that is true with --on-output-lost stop.
static inline bool *output_loss_stops(void) {
    static bool stops;
    return &stops;
}

// If lines printed to stdout or stderr are lost, warns on stderr, with `consequence` at the end. Warns at most once in
// a process. Returns true if this call warned.
static inline bool output_lost(const char *consequence) {
    static bool said;
    if (said) return false;
    const char *name = "stdout", *trouble = output_trouble(stdout);
    if (!trouble) name = "stderr", trouble = output_trouble(stderr);
    if (trouble) warn("lines printed to %s are lost: %s%s", name, trouble, consequence);
    said = trouble != NULL;
    return said;
}

static inline void output_end(void) { output_lost(""); }

// Ignores SIGPIPE: writing to a closed pipe then fails, but does not kill the process. A dry run does not ignore it: a
// closed pipe ends it, as is usual for output piped to head. Also makes the process warn at its end if it has lost
// lines and has not warned yet.
static inline void output_survive(const Options *o) {
    *output_loss_stops() = o->on_output_lost == OUTPUT_LOST_STOP;
    if (!o->dry_run && signal(SIGPIPE, SIG_IGN) == SIG_ERR) die("cannot ignore SIGPIPE: %s", strerror(errno));
    if (atexit(output_end)) die("atexit failed");
}

// Returns a signal that some rank got, or SIGPIPE if a rank's output is lost and --on-output-lost is stop; 0: none. All
// ranks call, and get one answer.
static inline int stop_requested(const Comm *c) {
    const bool stops = *output_loss_stops();
    if (output_lost(stops ? "; the run stops (--on-output-lost stop)" : "; the run goes on without them") && stops &&
        !stop_signal)
        stop_signal = SIGPIPE;
    return (int)comm_max(c, COMM_WORLD, (double)stop_signal);
}

// Prints after which step the run ended early.
static inline void stop_print(const Options *o, int signal_number, int64_t step) {
    printf("stopped by signal %d after step %lld; %s\n", signal_number, (long long)step,
           *o->checkpoint_dir ? "--resume continues after it" : "without --checkpoint-dir nothing was saved");
}

#endif
