// Ends the run when a rank is stuck, and names the rank: one watcher thread in each rank.
// There is no thread if there is only one rank.
//
// Twice a second the watcher of rank 0 and the watcher of each other rank send each other a message, on a communicator
// or TCP connections of their own. The message says what the rank is doing (activity.h). From these messages the
// watcher of rank 0 finds three kinds of stuck ranks:
//   silent    no message has come from a rank: the rank is stopped (SIGSTOP), or its host is frozen or unreachable. The
//             limit is a sixth of --stall-timeout, but at least 10 s and at most all of it (watch_silence_limit): a
//             watcher is never busy
//   file      messages come from a rank, but one call on a file has not returned. The limit is --stall-timeout, or
//             WATCH_PATIENCE times that while the rank loads, saves or exports
//   standing  messages come from all ranks, but each waits for others (MPI, TCP, NCCL), and none has made progress. The
//             limit is --stall-timeout
// A rank that computes while no NCCL operation is pending, and sends messages, is never stuck, however long it takes.
// If rank 0 is silent, the other ranks send messages to each other, and the lowest of them that is not silent reports.
// One rank prints the error and ends all ranks.
//
// A rank is lost if its process has died or cannot be reached. Over TCP (mesh.h) its connections then break, and
// another rank ends the run. With MPI, mpirun ends the run.
//
// The watcher does not call CUDA or NCCL, and does not wait for other ranks while it watches them. The main thread may
// block: when a rank dies, the main threads of other ranks may hang in MPI or in a kernel launch. A watcher is alone
// (it knows only its own rank) until watch_open has opened the exchange of messages, after watch_close, and if MPI does
// not allow several threads to call it. Then it ends the run too if a call on a file hangs, or if its rank waits too
// long for other ranks; but it cannot name the rank that its own rank waits for.
#ifndef LLMC_WATCH_H
#define LLMC_WATCH_H

#include <signal.h>

#include "beats.h"
#include "../config/parameters.h"

// Interval of the watcher in seconds. If an interval takes longer than WATCH_SUSPENDED_SECONDS, the watcher assumes
// that its own process was stopped: its timeouts for silent, file and standing then start again.
#define WATCH_BEAT_SECONDS 0.5
#define WATCH_SUSPENDED_SECONDS 4

// If the last message of a rank is older than this, the rank may be stopped: it does not count as waiting (standing).
#define WATCH_FRESH_SECONDS 3

// If rank 0 is silent, the other ranks exchange messages for this time, a few intervals, before the lowest reports.
#define WATCH_CALL_SECONDS 2

// A rank without messages is stuck after --stall-timeout / WATCH_SILENT_SHARE, but at least WATCH_SILENT_LEAST seconds
// (and at most --stall-timeout).
#define WATCH_SILENT_SHARE 6
#define WATCH_SILENT_LEAST 10

// If a connection breaks, the main thread of a rank that uses it reports that (mesh.h). If no main thread uses it, the
// watcher of rank 0 reports it after this time, or if rank 0 is lost, a higher rank still later (watch_lost_verdict).
#define WATCH_LOST_SECONDS 3

// Factor of --stall-timeout for files while loading, saving or exporting: an fsync of many GiB may take minutes.
#define WATCH_PATIENCE 4

// SIGALRM ends this process if it takes longer than this to end all ranks.
#define WATCH_ABORT_SECONDS 10

// The state that a rank sends to other watchers.
typedef struct {
    int32_t phase, kind;                 // Phase, ActivityKind
    int64_t step, changes, collectives;  // copied from Activity
    int64_t waits_for_nccl;              // 1 if NCCL operations are pending
    double idle;                         // seconds since this rank last made progress
    int64_t speaker;  // in rank 0's row: the rank whose call on a file hangs, which must report it; -1: none
    char doing[ACTIVITY_DETAIL + 64];
} WatchRow;

typedef struct {
    WatchRow row;    // its last message
    double silence;  // seconds since that message
    bool broken;     // its connection is broken
    double lost;     // seconds since it broke
    char host[64];
} WatchRank;

typedef struct {
    WatchRank *ranks;  // [world]; on ranks other than 0 only rank 0, itself, and ranks that sent it a message are valid
    int64_t world, self, timeout;
    bool alone;       // this watcher does not exchange messages
    double standing;  // seconds for which all ranks have waited and none has made progress
    double calling;   // on ranks other than 0: seconds since rank 0 was found silent; 0: rank 0 is not silent, or this
                      // is rank 0
    int64_t changes;  // sum of `changes` over all ranks
} WatchTable;

typedef enum { WATCH_GOOD, WATCH_SILENT, WATCH_LOST, WATCH_FILE, WATCH_STANDING, WATCH_ALONE } WatchFinding;

typedef struct {
    WatchFinding finding;
    int64_t rank, speaker;  // the stuck, lost or (WATCH_ALONE) waiting rank, and the rank that must report it
} WatchVerdict;

// ---- the verdict, a function of the table only

static inline double watch_silence_limit(const WatchTable *t) {
    return (double)min_i64(t->timeout, max_i64(t->timeout / WATCH_SILENT_SHARE, WATCH_SILENT_LEAST));
}

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

// Adds `seconds`, the time since the last call, to each time in the table, or sets the time to 0 if it starts again.
static inline void watch_age(WatchTable *t, double seconds) {
    const bool suspended = seconds > WATCH_SUSPENDED_SECONDS;
    int64_t changes = 0;
    bool standing = true;
    for (int64_t r = 0; r < t->world; r++) {
        WatchRank *rank = &t->ranks[r];
        rank->silence = suspended || r == t->self ? 0 : rank->silence + seconds;
        rank->lost += rank->broken ? seconds : 0;
        changes += rank->row.changes;
        standing = standing && watch_waits(&rank->row) && rank->silence < WATCH_FRESH_SECONDS;
    }
    t->standing = standing && !suspended && changes == t->changes ? t->standing + seconds : 0;
    t->calling = t->self > 0 && t->ranks[0].silence >= watch_silence_limit(t) ? t->calling + seconds : 0;
    t->changes = changes;
}

// Returns the verdict of this rank about itself: a call on a file hangs (if this watcher is alone or rank 0 has asked
// it to report that), or this rank has waited too long for others (if this watcher is alone).
static inline WatchVerdict watch_own_verdict(const WatchTable *t) {
    const WatchRow *own = &t->ranks[t->self].row;
    const bool may_speak = t->alone || t->ranks[0].row.speaker == t->self;
    // for WATCH_ALONE: all ranks may find it at the same time, so rank 0 is first, to end the others before they print
    const int64_t patience = t->timeout + (t->self > 0 ? COMM_SILENCE_SECONDS : 0);
    WatchVerdict v = {WATCH_GOOD, t->self, t->self};
    if (may_speak && watch_file_hangs(t, own)) v.finding = WATCH_FILE;
    else if (t->alone && watch_waits(own) && own->idle >= (double)patience) v.finding = WATCH_ALONE;
    return v;
}

// Returns the verdict about a rank whose connection is broken. A higher rank waits longer, so that a lower one reports.
static inline WatchVerdict watch_lost_verdict(const WatchTable *t) {
    WatchVerdict v = {WATCH_GOOD, t->self, t->self};
    const double limit = WATCH_LOST_SECONDS + (t->self > 0 ? 2 * COMM_SILENCE_SECONDS + 0.25 * (double)t->self : 0);
    for (int64_t r = t->world - 1; r >= 0 && !t->alone; r--)
        if (t->ranks[r].lost >= limit) v.finding = WATCH_LOST, v.rank = r;
    return v;
}

// Finds out if the table shows a stuck or lost rank, which rank it is, and which rank must report it.
static inline WatchVerdict watch_verdict(const WatchTable *t) {
    const bool rank0_heard = t->calling < WATCH_CALL_SECONDS || t->ranks[0].silence < watch_silence_limit(t);
    const WatchVerdict lost = watch_lost_verdict(t);
    if (lost.finding) return lost;
    if (t->alone || (t->self > 0 && rank0_heard)) return watch_own_verdict(t);
    int64_t silent = -1, heard = -1, hangs = -1, behind = 0;
    for (int64_t r = t->world - 1; r >= 0; r--) {
        if (t->ranks[r].silence >= watch_silence_limit(t)) silent = r;
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

// Writes what a rank is doing, for example "step 12, training: all-to-all".
static inline void watch_where(const WatchRow *row, char *out, size_t capacity) {
    static const char *const phases[NUM_PHASES] = {
        "start-up", "loading", "training", "validation", "sampling", "saving a checkpoint", "export", "the end"};
    char step[32] = "";
    if (row->step) format_checked(step, sizeof step, "step %lld, ", (long long)row->step);
    format_checked(out, capacity, "%s%s%s%s", step, phases[row->phase], *row->doing ? ": " : "", row->doing);
}

// Writes how many ranks are silent beside the verdict's; "" if there is none, or if rank 0 does not report: the table
// of another rank lacks most ranks.
static inline void watch_more_silent(const WatchTable *t, WatchVerdict v, char *out, size_t capacity) {
    int64_t silent = 0;
    out[0] = 0;
    for (int64_t r = 0; r < t->world; r++) silent += t->ranks[r].silence >= watch_silence_limit(t);
    if (v.speaker == 0 && silent > 1)
        format_checked(out, capacity, ", like %lld more rank%s", (long long)silent - 1, silent > 2 ? "s" : "");
}

// Writes the error of a verdict other than WATCH_GOOD: the rank, its host, and what it is doing (watch_where).
static inline void watch_message(const WatchTable *t, WatchVerdict v, char *out, size_t capacity) {
    const WatchRank *rank = &t->ranks[v.rank];
    const WatchRow *from = &t->ranks[v.speaker].row;
    const long long number = v.rank, speaker = v.speaker, timeout = t->timeout;
    char where[ACTIVITY_DETAIL + 160], here[ACTIVITY_DETAIL + 160], more[64];
    watch_more_silent(t, v, more, sizeof more);
    watch_where(&rank->row, where, sizeof where);
    watch_where(from, here, sizeof here);
    if (v.finding == WATCH_SILENT)
        format_checked(out, capacity,
                       "rank %lld on %s has not responded for %.0f s (limit %.0f s, from --stall-timeout %lld)%s; "
                       "it %s%s; rank %lld %s in %s",
                       number, rank->host, rank->silence, watch_silence_limit(t), timeout, more,
                       rank->row.changes ? "was last seen in " : "never responded", rank->row.changes ? where : "",
                       speaker, watch_waits(from) ? "waits" : "is", here);
    else if (v.finding == WATCH_LOST)
        format_checked(out, capacity,
                       "rank %lld on %s was killed, has crashed or cannot be reached any more; it was last seen in %s; "
                       "rank %lld is in %s",
                       number, rank->host, where, speaker, here);
    else if (v.finding == WATCH_FILE)
        format_checked(out, capacity,
                       "rank %lld on %s: a call on a file has not returned for %.0f s (--stall-timeout %lld%s), in %s",
                       number, rank->host, rank->row.idle, timeout,
                       watch_file_limit(t, &rank->row) > (double)t->timeout ? "; the limit here is 4 times that" : "",
                       where);
    else if (v.finding == WATCH_STANDING)
        format_checked(out, capacity,
                       "no rank has made progress for %.0f s (--stall-timeout %lld): all ranks wait for each other; "
                       "rank %lld on %s has finished the fewest collectives: it is in %s; rank %lld is in %s",
                       t->standing, timeout, number, rank->host, where, speaker, here);
    else
        format_checked(out, capacity,
                       "rank %lld on %s has waited for %.0f s (--stall-timeout %lld) in %s: "
                       "another rank is stuck or too slow",
                       number, rank->host, rank->row.idle, timeout, where);
}

// ---- the thread

typedef struct {
    pthread_mutex_t mutex;  // guards `closing` and `beats`
    pthread_cond_t changed;
    bool closing, open;  // `open`: the thread was started, and watch_close was not called
    const Beats *beats;  // NULL: this watcher is alone
    Comm comm;
    Beats messages;  // after watch_open only the watcher uses the messages and the table
    WatchTable table;
} Watch;

static inline Watch *watch_state(void) {
    static Watch watch;
    return &watch;
}

// Copies the activity of the main thread into the row. `seconds` is the time since the last call.
static inline void watch_note_activity(WatchRow *row, double seconds) {
    const Activity *a = activity_lock();
    const size_t capacity = sizeof row->doing;
    row->idle = row->changes == a->changes && seconds <= WATCH_SUSPENDED_SECONDS ? row->idle + seconds : 0;
    row->phase = a->phase, row->kind = a->kind, row->step = a->step;
    row->changes = a->changes, row->collectives = a->collectives;
    row->waits_for_nccl = a->pending > 0;
    if (a->kind == ACTIVITY_FILE) format_checked(row->doing, capacity, "%.32s of %s", a->what, a->detail);
    else if (a->kind == ACTIVITY_WAITING) format_checked(row->doing, capacity, "%.64s", a->what);
    else if (a->pending && a->pending_layer >= 0)
        format_checked(row->doing, capacity, "%.64s of layer %lld", a->pending_what, (long long)a->pending_layer);
    else if (a->pending)
        format_checked(row->doing, capacity, "%.64s%s", a->pending_what,
                       a->pending_layer == ROOT ? " of the root unit" : "");
    else format_checked(row->doing, capacity, "computing");
    activity_unlock();
}

// True if a row from another rank is one that a watcher writes. Its numbers index tables, and its text is printed.
static inline bool watch_is_row(const WatchRow *row) {
    return row->phase >= 0 && row->phase < NUM_PHASES && row->kind >= 0 && row->kind <= ACTIVITY_FILE &&
           memchr(row->doing, 0, sizeof row->doing);
}

static inline void watch_receive(Watch *w) {
    WatchRow row;
    for (int64_t from; (from = beats_receive(&w->messages, &row)) >= 0;) {
        if (!watch_is_row(&row)) continue;  // such a rank counts as silent
        w->table.ranks[from].row = row;
        w->table.ranks[from].silence = 0;
    }
    const Mesh *mesh = w->messages.comm->mesh;
    const int64_t gone = mesh ? mesh_gone(mesh) : -1;  // with MPI, mpirun notices lost ranks
    if (gone >= 0) w->table.ranks[gone].broken = true;
}

static inline void watch_send(Watch *w) {
    const WatchTable *t = &w->table;
    for (int64_t r = 0; r < t->world; r++)
        if (r != t->self && (t->self == 0 || r == 0 || t->calling > 0))
            beats_send(&w->messages, r, &t->ranks[t->self].row);
}

// Prints the verdict and ends all ranks. Must not wait for the main thread, which may hold the lock of stdout.
__attribute__((noreturn)) static inline void watch_speak(const Watch *w, WatchVerdict v) {
    char text[4096], line[4200];
    watch_message(&w->table, v, text, sizeof text);
    format_checked(line, sizeof line, "error: %s\n", text);
    flush_stdout();
    alarm(WATCH_ABORT_SECONDS);
    if (write(STDERR_FILENO, line, strlen(line)) < 0) alarm(1);
    if (!w->table.alone || w->comm.mesh) comm_end_all(EXIT_LOST);
    _exit(EXIT_LOST);  // if this watcher is alone with MPI, mpirun ends the other ranks
}

// Ends the messages of all watchers (beats_part). This watcher is alone from then on, and still watches its own rank
// here.
static inline void watch_part(Watch *w) {
    WatchTable *t = &w->table;
    double before = seconds_now();
    for (bool parted = false; !parted;) {
        watch_receive(w);
        parted = beats_part(&w->messages);
        if (!parted) usleep(1000);
        const double now = seconds_now();
        watch_note_activity(&t->ranks[t->self].row, now - before);
        before = now;
        const WatchVerdict v = watch_own_verdict(t);
        if (v.finding) watch_speak(w, v);
    }
    beats_free(&w->messages);
    w->beats = NULL;
}

// Sleeps for one interval. If watch_close is called meanwhile, wakes up and ends the messages (watch_part).
static inline void watch_sleep(Watch *w) {
    const bool closing = thread_sleep(WATCH_BEAT_SECONDS, &w->mutex, &w->changed, &w->closing);
    pthread_mutex_lock(&w->mutex);
    w->table.alone = closing || !w->beats;
    pthread_mutex_unlock(&w->mutex);
    if (!closing) return;
    if (w->beats) watch_part(w);
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
        else if (w->comm.mesh && mesh_receive(w->comm.mesh)) mesh_follow(w->comm.mesh);
        const WatchVerdict v = watch_verdict(t);
        if (v.finding && v.speaker == t->self) watch_speak(w, v);
        own->speaker = v.finding ? v.speaker : -1;
        if (!t->alone) watch_send(w);
    }
}

// Starts the thread, with all signals blocked: the main thread handles them.
static inline void watch_start(Watch *w) {
    pthread_condattr_t clock;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    if (pthread_condattr_init(&clock) || pthread_condattr_setclock(&clock, CLOCK_MONOTONIC) ||
        pthread_cond_init(&w->changed, &clock) || pthread_mutex_init(&w->mutex, NULL) ||
        pthread_sigmask(SIG_SETMASK, &all, &before) || pthread_create(&thread, NULL, watch_run, w) ||
        pthread_sigmask(SIG_SETMASK, &before, NULL) || pthread_detach(thread))
        die("cannot start the watcher thread");
    pthread_condattr_destroy(&clock);
}

// Ends the exchange of messages. All ranks call it before MPI_Finalize; at exit it is called if it was not before. The
// watcher itself goes on, alone, and watches MPI_Finalize.
static inline void watch_close(void) {
    Watch *w = watch_state();
    if (!w->open) return;
    w->open = false;
    comm_barrier(&w->comm, COMM_WORLD);
    activity_begin(ACTIVITY_WAITING, "end of the watchers' messages", "");
    pthread_mutex_lock(&w->mutex);
    w->closing = true;
    pthread_cond_broadcast(&w->changed);
    while (w->closing) pthread_cond_wait(&w->changed, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
    activity_end();
}

// Starts the watcher. `timeout`: seconds of --stall-timeout, from which the limits at the head of this file follow. All
// ranks call it once, after comm_open. Does nothing for one rank. Dies if the thread cannot be started.
static inline void watch_open(const Comm *c, int64_t timeout) {
    Watch *w = watch_state();
    if (c->world == 1) return;
    w->comm = *c, w->open = true;
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
    const bool exchange = beats_open(&w->messages, &w->comm, sizeof(WatchRow));
    pthread_mutex_lock(&w->mutex);
    w->beats = exchange ? &w->messages : NULL;
    pthread_mutex_unlock(&w->mutex);
    if (atexit(watch_close)) die("atexit failed");
    if (c->rank == 0 && !exchange)
        warn("this MPI does not let several threads call it: a stuck rank ends the run, but the message may not name "
             "it");
}

#endif
