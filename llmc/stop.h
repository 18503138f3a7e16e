// A request to stop, from SIGTERM, SIGINT, SIGUSR1 or SIGHUP: the step in progress is finished, then the run saves and ends. A second Ctrl-C, seconds after
// the first, ends it at once.
#ifndef LLMC_STOP_H
#define LLMC_STOP_H

#include <signal.h>
#include <time.h>

#include "comm.h"
#include "options.h"

static volatile sig_atomic_t stop_signal;

// mpirun may hand on the same Ctrl-C that the ranks have got from the terminal: what comes within so many seconds is the same one.
#define STOP_SECOND_REQUEST_SECONDS 2

static inline void stop_note(int signal_number) {
    static volatile time_t first;
    if (!stop_signal) first = time(NULL);
    else if (signal_number == SIGINT && time(NULL) - first >= STOP_SECOND_REQUEST_SECONDS) signal(SIGINT, SIG_DFL), raise(SIGINT);
    stop_signal = signal_number;
}

// From now on. A SIGHUP that nohup has this process ignore stays ignored. What the signal interrupts goes on: SA_RESTART.
static inline void stop_catch(void) {
    const int signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    action.sa_handler = stop_note;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 4; i++)
        if (sigaction(signals[i], NULL, &before) || (!(signals[i] == SIGHUP && before.sa_handler == SIG_IGN) && sigaction(signals[i], &action, NULL)))
            die("cannot install signal handlers: %s", strerror(errno));
}

// The signal that some rank got; 0: none. All ranks ask together and get the same answer.
static inline int stop_requested(const Comm *c) { return (int)comm_max(c, COMM_WORLD, (double)stop_signal); }

// Says after which step the run ended early.
static inline void stop_print(const Options *o, int signal_number, int64_t step) {
    printf("stopped by signal %d after step %lld; %s\n", signal_number, (long long)step, *o->checkpoint_dir ? "--resume continues" : "without --checkpoint-dir nothing was saved");
}

#endif
