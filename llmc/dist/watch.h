// A stuck rank ends the run, with its name: one watcher thread in each rank.
// One thread a rank watches; no thread where there is only one rank.
//
// Twice a second each rank's watcher sends rank 0's what its rank does (activity.h), and rank 0's answers, on a
// communicator of their own. From that:
//   silent    a rank's watcher is not heard for --stall-timeout seconds: the rank is stopped (SIGSTOP), or its host is
//             frozen or away
//   file      a rank's watcher is heard, but one call on a file has not returned for as long; WATCH_PATIENCE times
//             that while loading, saving or exporting
//   standing  every rank is heard and waits for others, in MPI or in NCCL, and nothing has moved on any for as long
// A rank that is heard and computes is never stuck, however long it takes. When rank 0 is the silent one, the others
// call each other and the lowest of them speaks. Exactly one rank speaks, at once, and ends the others with MPI_Abort.
//
// The watcher never touches CUDA or NCCL, and waits for nothing: with a rank gone the main thread comes to stand in MPI
// or in a kernel launch. It knows its own rank alone before the ranks have met, once they part (MPI_Finalize), and
// where MPI lets only one thread call it: then waiting too long for others ends the run, too, without the name of the
// rank that is stuck.
#ifndef LLMC_WATCH_H
#define LLMC_WATCH_H

#include <signal.h>

#include "comm.h"
#include "../config/parameters.h"

// Seconds between two looks. When a look comes so late, this process itself was stopped, and all have their time again.
#define WATCH_BEAT_SECONDS 0.5
#define WATCH_SUSPENDED_SECONDS 4

// A rank that is not heard for so long is perhaps not heard again: whether all stand still is then not known.
#define WATCH_FRESH_SECONDS 3

// How long the ranks call each other when rank 0 is silent, before the lowest speaks: a few looks.
#define WATCH_CALL_SECONDS 2

// An fsync of many GiB may take minutes.
#define WATCH_PATIENCE 4

// MPI_Abort that does not come back is ended by SIGALRM.
#define WATCH_ABORT_SECONDS 10

// The state that a rank reports of itself.
typedef struct {
    int32_t phase, kind;                 // Phase, ActivityKind
    int64_t step, changes, collectives;  // of Activity
    int64_t waits_for_nccl;              // 1: operations of NCCL are pending
    double idle;                         // seconds for which nothing of this rank has moved
    int64_t speaker;  // of rank 0: the rank that is to say that its own call on a file hangs; -1: none
    char doing[ACTIVITY_DETAIL + 64];
} WatchRow;

typedef struct {
    WatchRow row;    // what it said last
    double silence;  // seconds since then
    char host[64];
} WatchRank;

typedef struct {
    WatchRank *ranks;  // [world]; of a rank other than 0, those that are 0, itself, or have called it
    int64_t world, self, timeout;
    bool alone;                // this rank's watcher has nobody to talk to
    double standing, calling;  // seconds for which nothing has moved on any rank, and since rank 0 is found silent
    int64_t changes;           // of all ranks
} WatchTable;

typedef enum { WATCH_GOOD, WATCH_SILENT, WATCH_FILE, WATCH_STANDING, WATCH_ALONE } WatchFinding;

typedef struct {
    WatchFinding finding;
    int64_t rank, speaker;  // that is stuck; that is to say so
} WatchVerdict;

// ---- the verdict, which is a function of the table alone

static inline double watch_file_limit(const WatchTable *t, const WatchRow *row) {
    const bool patient = row->phase == PHASE_LOADING || row->phase == PHASE_SAVING || row->phase == PHASE_EXPORT;
    return (double)(t->timeout * (patient ? WATCH_PATIENCE : 1));
}

static inline bool watch_file_hangs(const WatchTable *t, const WatchRow *row) {
    return row->kind == ACTIVITY_FILE && row->idle >= watch_file_limit(t, row);
}

static inline bool watch_waits(const WatchRow *row) {
    return row->kind == ACTIVITY_WAITING || (row->kind == ACTIVITY_COMPUTING && row->waits_for_nccl);
}

// `seconds` have passed since the table was aged last.
static inline void watch_age(WatchTable *t, double seconds) {
    const bool suspended = seconds > WATCH_SUSPENDED_SECONDS;
    int64_t changes = 0;
    bool standing = true;
    for (int64_t r = 0; r < t->world; r++) {
        WatchRank *rank = &t->ranks[r];
        rank->silence = suspended || r == t->self ? 0 : rank->silence + seconds;
        changes += rank->row.changes;
        standing = standing && watch_waits(&rank->row) && rank->silence < WATCH_FRESH_SECONDS;
    }
    t->standing = standing && !suspended && changes == t->changes ? t->standing + seconds : 0;
    t->calling = t->self > 0 && t->ranks[0].silence >= (double)t->timeout ? t->calling + seconds : 0;
    t->changes = changes;
}

// The verdict of a rank other than 0 while it hears rank 0, and of one that is alone.
static inline WatchVerdict watch_own_verdict(const WatchTable *t) {
    const WatchRow *own = &t->ranks[t->self].row;
    const bool may_speak = t->alone || t->ranks[0].row.speaker == t->self;
    // all find it at once: rank 0 ends the others before they say it, too
    const int64_t patience = t->timeout + (t->self > 0 ? COMM_SILENCE_SECONDS : 0);
    WatchVerdict v = {WATCH_GOOD, t->self, t->self};
    if (may_speak && watch_file_hangs(t, own)) v.finding = WATCH_FILE;
    else if (t->alone && watch_waits(own) && own->idle >= (double)patience) v.finding = WATCH_ALONE;
    return v;
}

// True if this table shows a stuck rank, which, and who is to say so.
static inline WatchVerdict watch_verdict(const WatchTable *t) {
    const bool rank0_heard = t->calling < WATCH_CALL_SECONDS || t->ranks[0].silence < (double)t->timeout;
    if (t->alone || (t->self > 0 && rank0_heard)) return watch_own_verdict(t);
    int64_t silent = -1, heard = -1, hangs = -1, behind = 0;
    for (int64_t r = t->world - 1; r >= 0; r--) {
        if (t->ranks[r].silence >= (double)t->timeout) silent = r;
        else heard = r;
        if (watch_file_hangs(t, &t->ranks[r].row)) hangs = r;
        if (t->ranks[r].row.collectives <= t->ranks[behind].row.collectives) behind = r;
    }
    WatchVerdict v = {WATCH_GOOD, 0, 0};
    if (silent >= 0) v.finding = WATCH_SILENT, v.rank = silent, v.speaker = heard;
    else if (hangs >= 0) v.finding = WATCH_FILE, v.rank = v.speaker = hangs;
    else if (t->standing >= (double)t->timeout) v.finding = WATCH_STANDING, v.rank = behind, v.speaker = heard;
    return v;
}

// "step 12, training: all-to-all"
static inline void watch_place(const WatchRow *row, char *out, size_t capacity) {
    static const char *const phases[NUM_PHASES] = {
        "start-up", "loading", "training", "validation", "sampling", "saving a checkpoint", "export", "the end"};
    char step[32] = "";
    if (row->step) format_checked(step, sizeof step, "step %lld, ", (long long)row->step);
    format_checked(out, capacity, "%s%s%s%s", step, phases[row->phase], *row->doing ? ": " : "", row->doing);
}

// The verdict in words, with rank, host, step and what is waited for. Only for a finding.
static inline void watch_message(const WatchTable *t, WatchVerdict v, char *out, size_t capacity) {
    const WatchRank *rank = &t->ranks[v.rank];
    const WatchRow *from = &t->ranks[v.speaker].row;
    const long long number = v.rank, speaker = v.speaker, timeout = t->timeout;
    char place[ACTIVITY_DETAIL + 160], here[ACTIVITY_DETAIL + 160], more[64] = "";
    int64_t silent = 0;
    for (int64_t r = 0; r < t->world; r++) silent += t->ranks[r].silence >= (double)t->timeout;
    if (v.speaker == 0 && silent > 1) format_checked(more, sizeof more, ", nor do %lld others", (long long)silent - 1);
    watch_place(&rank->row, place, sizeof place);
    watch_place(from, here, sizeof here);
    if (v.finding == WATCH_SILENT)
        format_checked(out, capacity,
                       "rank %lld on %s gives no sign of life for %.0f s (--stall-timeout %lld)%s; "
                       "it was %s%s; rank %lld %s in %s",
                       number, rank->host, rank->silence, timeout, more,
                       rank->row.changes ? "last seen in " : "never heard", rank->row.changes ? place : "", speaker,
                       watch_waits(from) ? "waits for it" : "is", here);
    else if (v.finding == WATCH_FILE)
        format_checked(out, capacity,
                       "rank %lld on %s: a call on a file has not returned for %.0f s "
                       "(--stall-timeout %lld%s), in %s",
                       number, rank->host, rank->row.idle, timeout,
                       watch_file_limit(t, &rank->row) > (double)t->timeout ? ", 4 times that here" : "", place);
    else if (v.finding == WATCH_STANDING)
        format_checked(out, capacity,
                       "nothing has moved on any rank for %.0f s (--stall-timeout %lld), and each waits "
                       "for the others; rank %lld on %s has finished the fewest collectives: it is in %s; "
                       "rank %lld is in %s",
                       t->standing, timeout, number, rank->host, place, speaker, here);
    else
        format_checked(out, capacity,
                       "rank %lld on %s has waited for %.0f s (--stall-timeout %lld) in %s: "
                       "another rank is stuck",
                       number, rank->host, rank->row.idle, timeout, place);
}

// ---- the thread

typedef struct {
    MPI_Request request;
    WatchRow row;
} WatchMessage;

typedef struct {
    pthread_mutex_t mutex;  // guards `closing` and `beats`
    pthread_cond_t changed;
    bool closing;
    MPI_Comm beats;  // MPI_COMM_NULL: this watcher is alone
    Comm comm;
    WatchTable table;        // the watcher's alone, as are the messages
    WatchMessage *messages;  // [world] at most one on its way to each rank: none pile up before a rank that is stopped
} Watch;

static inline Watch *watch_state(void) {
    static Watch watch;
    return &watch;
}

// Notes what the main thread does. `seconds` have passed since the last note.
static inline void watch_note_activity(WatchRow *row, double seconds) {
    const Activity *a = activity_lock();
    const size_t room = sizeof row->doing;
    row->idle = row->changes == a->changes && seconds <= WATCH_SUSPENDED_SECONDS ? row->idle + seconds : 0;
    row->phase = a->phase, row->kind = a->kind, row->step = a->step;
    row->changes = a->changes, row->collectives = a->collectives;
    row->waits_for_nccl = a->pending > 0;
    if (a->kind == ACTIVITY_FILE) format_checked(row->doing, room, "%.32s of %s", a->what, a->detail);
    else if (a->kind == ACTIVITY_WAITING) format_checked(row->doing, room, "%.64s", a->what);
    else if (a->pending && a->pending_layer >= 0)
        format_checked(row->doing, room, "%.64s of layer %lld", a->pending_what, (long long)a->pending_layer);
    else if (a->pending)
        format_checked(row->doing, room, "%.64s%s", a->pending_what,
                       a->pending_layer == ROOT ? " of the root unit" : "");
    else format_checked(row->doing, room, "computing");
    activity_unlock();
}

static inline void watch_receive(Watch *w) {
    for (int there = 1; there;) {
        MPI_Status status;
        COMM_CHECK(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, w->beats, &there, &status));
        if (!there) continue;
        const int from = status.MPI_SOURCE;
        WatchRank *rank = &w->table.ranks[from];
        COMM_CHECK(MPI_Recv(&rank->row, sizeof rank->row, MPI_BYTE, from, status.MPI_TAG, w->beats, MPI_STATUS_IGNORE));
        rank->silence = 0;
    }
}

// True if the last message to a rank has arrived there. Sends are synchronous: not done before that rank's watcher
// takes them.
static inline bool watch_sent(WatchMessage *m) {
    int done = 1;
    if (m->request != MPI_REQUEST_NULL) COMM_CHECK(MPI_Test(&m->request, &done, MPI_STATUS_IGNORE));
    return done;
}

static inline void watch_send(Watch *w) {
    const WatchTable *t = &w->table;
    for (int64_t r = 0; r < t->world; r++) {
        if (r == t->self || (t->self > 0 && r > 0 && t->calling == 0) || !watch_sent(&w->messages[r])) continue;
        WatchMessage *m = &w->messages[r];
        m->row = t->ranks[t->self].row;
        COMM_CHECK(MPI_Issend(&m->row, sizeof m->row, MPI_BYTE, (int)r, 0, w->beats, &m->request));
    }
}

// Says the verdict and ends all ranks. Nothing here may wait for the main thread, which may hold stdout.
__attribute__((noreturn)) static inline void watch_speak(const Watch *w, WatchVerdict v) {
    char text[4096], line[4200];
    watch_message(&w->table, v, text, sizeof text);
    format_checked(line, sizeof line, "error: %s\n", text);
    flush_stdout();
    alarm(WATCH_ABORT_SECONDS);
    if (write(STDERR_FILENO, line, strlen(line)) < 0) alarm(1);
    if (!w->table.alone) MPI_Abort(MPI_COMM_WORLD, EXIT_LOST);
    _exit(EXIT_LOST);  // mpirun ends the others
}

// All ranks part: what is on its way arrives, then no watcher calls MPI any more. (A rank comes to the barrier when all
// its sends have arrived, so when all have come there, nothing is left.)
static inline void watch_part(Watch *w) {
    MPI_Request barrier = MPI_REQUEST_NULL;
    WatchTable *t = &w->table;
    double before = seconds_now();
    for (int parted = 0, entered = 0; !parted;) {
        bool sent = true;
        watch_receive(w);
        for (int64_t r = 0; r < t->world; r++) sent = watch_sent(&w->messages[r]) && sent;
        if (sent && !entered++) COMM_CHECK(MPI_Ibarrier(w->beats, &barrier));
        if (entered) COMM_CHECK(MPI_Test(&barrier, &parted, MPI_STATUS_IGNORE));
        if (!parted) usleep(1000);
        const double now = seconds_now();
        watch_note_activity(&t->ranks[t->self].row, now - before);
        before = now;
        const WatchVerdict v = watch_own_verdict(t);
        if (v.finding) watch_speak(w, v);
    }
    COMM_CHECK(MPI_Comm_free(&w->beats));
}

// Sleeps for a beat, or until the ranks part; then they do.
static inline void watch_sleep(Watch *w) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(1e9 * WATCH_BEAT_SECONDS);
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&w->mutex);
    while (!w->closing && pthread_cond_timedwait(&w->changed, &w->mutex, &until) == 0) continue;
    const bool closing = w->closing;
    w->table.alone = closing || w->beats == MPI_COMM_NULL;
    pthread_mutex_unlock(&w->mutex);
    if (!closing) return;
    if (w->beats != MPI_COMM_NULL) watch_part(w);
    pthread_mutex_lock(&w->mutex);
    w->closing = false;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
}

static inline void *watch_run(void *context) {
    Watch *w = (Watch *)context;
    WatchTable *t = &w->table;
    WatchRow *own = &t->ranks[t->self].row;
    for (double before = seconds_now(), now;; before = now) {
        watch_sleep(w);
        now = seconds_now();
        watch_note_activity(own, now - before);
        watch_age(t, now - before);
        if (!t->alone) watch_receive(w);
        const WatchVerdict v = watch_verdict(t);
        if (v.finding && v.speaker == t->self) watch_speak(w, v);
        own->speaker = v.finding ? v.speaker : -1;
        if (!t->alone) watch_send(w);
    }
}

// The thread gets no signals: those are for the main thread.
static inline void watch_start(Watch *w) {
    pthread_condattr_t clock;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    if (pthread_condattr_init(&clock) || pthread_condattr_setclock(&clock, CLOCK_MONOTONIC) ||
        pthread_cond_init(&w->changed, &clock) || pthread_mutex_init(&w->mutex, NULL) ||
        pthread_sigmask(SIG_SETMASK, &all, &before) || pthread_create(&thread, NULL, watch_run, w) ||
        pthread_sigmask(SIG_SETMASK, &before, NULL) || pthread_detach(thread))
        die("cannot start the thread that watches over the ranks");
    pthread_condattr_destroy(&clock);
}

// Before MPI_Finalize, by all ranks; at exit if not before. The watcher stays, and watches over MPI_Finalize.
static inline void watch_close(void) {
    Watch *w = watch_state();
    if (!w->messages) return;
    comm_barrier(&w->comm, COMM_WORLD);
    activity_begin(ACTIVITY_WAITING, "the ranks part", "");
    pthread_mutex_lock(&w->mutex);
    w->closing = true;
    pthread_cond_broadcast(&w->changed);
    while (w->closing) pthread_cond_wait(&w->changed, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
    activity_end();
    free(w->messages);
    w->messages = NULL;
}

// From now on a stuck rank ends the run after `timeout` seconds, as the head of this file says. All ranks call, once,
// after comm_open. Nothing to do for one rank. Dies if the thread cannot be started.
static inline void watch_open(const Comm *c, int64_t timeout) {
    Watch *w = watch_state();
    if (c->world == 1) return;
    w->comm = *c, w->beats = MPI_COMM_NULL;
    w->messages = (WatchMessage *)xcalloc((size_t)c->world, sizeof *w->messages);
    for (int64_t r = 0; r < c->world; r++) w->messages[r].request = MPI_REQUEST_NULL;
    WatchTable *t = &w->table;
    t->ranks = (WatchRank *)xcalloc((size_t)c->world, sizeof *t->ranks);
    t->world = c->world, t->self = c->rank, t->timeout = timeout, t->alone = true;
    memcpy(t->ranks[c->rank].host, c->host, sizeof c->host);
    watch_start(w);
    const int64_t bytes = sizeof c->host;
    char *hosts = (char *)xcalloc((size_t)c->world, (size_t)bytes);
    comm_all_gather(c, COMM_WORLD, c->host, hosts, bytes);
    for (int64_t r = 0; r < c->world; r++) memcpy(t->ranks[r].host, hosts + r * bytes, (size_t)bytes);
    free(hosts);
    const MPI_Comm beats = comm_for_thread(c);
    pthread_mutex_lock(&w->mutex);
    w->beats = beats;
    pthread_mutex_unlock(&w->mutex);
    if (atexit(watch_close)) die("atexit failed");
    if (c->rank == 0 && beats == MPI_COMM_NULL)
        warn("this MPI lets only one thread call it: a stuck rank ends the run, but the message cannot name it");
}

#endif
