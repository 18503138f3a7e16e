// Ends a run early: on a signal, or when its output can no longer be written.
// A signal is a request to stop, by SIGTERM, SIGINT, SIGUSR1 or SIGHUP: the step in progress is finished, then the run
// saves and ends; a second SIGINT or SIGTERM, seconds after the first, ends it at once. Lost output is output that
// cannot be written; it ends no run unless --on-output-lost says so.
#ifndef LLMC_STOP_H
#define LLMC_STOP_H

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "../dist/comm.h"
#include "../config/options.h"

static volatile sig_atomic_t stop_signal;

// mpirun may hand on the same Ctrl-C that the ranks have got from the terminal: what comes within so many seconds is
// the same one.
#define STOP_SECOND_REQUEST_SECONDS 2

// SIGUSR1 and SIGHUP only ask: batch systems send one of them some time before the SIGTERM that must still leave time
// for the save.
static inline void stop_note(int signal_number) {
    static volatile double first;  // seconds_now of the first SIGINT or SIGTERM; 0: none yet
    if (signal_number == SIGINT || signal_number == SIGTERM) {
        if (first == 0) first = seconds_now();
        else if (seconds_now() - first >= STOP_SECOND_REQUEST_SECONDS)
            signal(signal_number, SIG_DFL), raise(signal_number);
    }
    stop_signal = signal_number;
}

// From now on. A SIGHUP that nohup has this process ignore stays ignored. What the signal interrupts goes on:
// SA_RESTART.
static inline void stop_catch(void) {
    const int signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    action.sa_handler = stop_note;
    action.sa_flags = SA_RESTART;
    sigfillset(&action.sa_mask);
    for (int i = 0; i < 4; i++)
        if (sigaction(signals[i], NULL, &before) ||
            (!(signals[i] == SIGHUP && before.sa_handler == SIG_IGN) && sigaction(signals[i], &action, NULL)))
            die("cannot install signal handlers: %s", strerror(errno));
}

// Why `stream` cannot be written, or NULL if it can. What could not be written is gone and errno with it, so an empty
// line is tried.
static inline const char *output_trouble(FILE *stream) {
    if (!ferror(stream) && !fflush(stream)) return NULL;
    clearerr(stream);
    return fputc('\n', stream) == EOF || fflush(stream) ? strerror(errno) : "it can be now, but lines are missing";
}

// --on-output-lost stop
static inline bool *output_loss_stops(void) {
    static bool stops;
    return &stops;
}

// Says on stderr, once, when lines that were printed are lost, and `consequence`. True if this call found it.
static inline bool output_lost(const char *consequence) {
    static bool said;
    if (said) return false;
    const char *name = "stdout", *trouble = output_trouble(stdout);
    if (!trouble) name = "stderr", trouble = output_trouble(stderr);
    if (trouble) warn("%s cannot be written: %s%s", name, trouble, consequence);
    said = trouble != NULL;
    return said;
}

static inline void output_end(void) { output_lost(""); }

// Before any work: a reader of stdout or stderr that goes away is an error of the calls that write from now on, no
// signal that ends the run. A dry run ends by it, as is usual for output that is piped to head. No file of the run may
// get the number of a stream that is closed.
static inline void output_survive(const Options *o) {
    *output_loss_stops() = o->on_output_lost == OUTPUT_LOST_STOP;
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
            die("cannot open /dev/null: %s", strerror(errno));
    if (!o->dry_run && signal(SIGPIPE, SIG_IGN) == SIG_ERR) die("cannot ignore SIGPIPE: %s", strerror(errno));
    if (atexit(output_end)) die("atexit failed");
}

// The signal that some rank got, or SIGPIPE where lost output is one; 0: none. All ranks ask together and get the same
// answer.
static inline int stop_requested(const Comm *c) {
    const bool stops = *output_loss_stops();
    if (output_lost(stops ? "; the run saves and stops (--on-output-lost stop)" : "; the run goes on without it") &&
        stops && !stop_signal)
        stop_signal = SIGPIPE;
    return (int)comm_max(c, COMM_WORLD, (double)stop_signal);
}

// Says after which step the run ended early.
static inline void stop_print(const Options *o, int signal_number, int64_t step) {
    printf("stopped by signal %d after step %lld; %s\n", signal_number, (long long)step,
           *o->checkpoint_dir ? "--resume continues" : "without --checkpoint-dir nothing was saved");
}

#endif
