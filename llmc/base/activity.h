// Records the current activity of this rank for the watcher thread, which must name a stuck rank (watch.h).
// The main thread writes the activity, and the watcher thread reads it.
//
// Most calls that can wait long for a disk or for other ranks stand between activity_begin and activity_end. Pairs do
// not nest. NCCL operations run on the GPU while the host goes on, so activity_operation counts them apart. Outside all
// pairs the rank counts as waiting while NCCL operations are pending, else as computing.
#ifndef LLMC_ACTIVITY_H
#define LLMC_ACTIVITY_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef enum { ACTIVITY_COMPUTING, ACTIVITY_WAITING, ACTIVITY_FILE } ActivityKind;

typedef enum {
    PHASE_START,
    PHASE_LOADING,
    PHASE_TRAINING,
    PHASE_VALIDATION,
    PHASE_SAMPLING,
    PHASE_SAVING,
    PHASE_EXPORT,
    PHASE_END,
    NUM_PHASES
} Phase;

// Bytes of Activity.detail, with its zero byte. Only the end of a longer path is kept.
#define ACTIVITY_DETAIL 256

typedef struct {
    Phase phase;
    int64_t step;  // in training the current step, else the last finished one; counted from 1; 0: none
    ActivityKind kind;
    const char *what;              // static text: the call, or what the ranks do together; "" or NULL while computing
    char detail[ACTIVITY_DETAIL];  // path of a file or folder, pattern of file names, "stdout", or ""
    int64_t changes;               // grows with each sign of progress of this rank
    int64_t collectives;           // number of finished waits (ACTIVITY_WAITING) and finished NCCL operations
    int64_t pending;               // number of NCCL operations that are enqueued and not known to have finished
    const char *pending_what;      // name of the oldest pending operation, static text
    int64_t pending_layer;         // layer of that operation, or ROOT or NO_LAYER (parameters.h)
} Activity;

static inline pthread_mutex_t *activity_mutex(void) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    return &mutex;
}

// Returns the activity and locks it until activity_unlock.
static inline Activity *activity_lock(void) {
    static Activity activity;
    pthread_mutex_lock(activity_mutex());
    return &activity;
}

static inline void activity_unlock(void) { pthread_mutex_unlock(activity_mutex()); }

// Sets the phase of the run. `step`: as in Activity.
static inline void activity_phase(Phase phase, int64_t step) {
    Activity *a = activity_lock();
    a->phase = phase, a->step = step, a->changes++;
    activity_unlock();
}

// Begins an activity of kind ACTIVITY_WAITING or ACTIVITY_FILE. `what` and `detail`: as in Activity.
static inline void activity_begin(ActivityKind kind, const char *what, const char *detail) {
    const size_t length = strlen(detail), skip = length < ACTIVITY_DETAIL ? 0 : length - ACTIVITY_DETAIL + 1;
    Activity *a = activity_lock();
    a->kind = kind, a->what = what, a->changes++;
    memcpy(a->detail, detail + skip, length - skip + 1);
    activity_unlock();
}

// Ends the activity: the rank computes again. errno stays as it was.
static inline void activity_end(void) {
    Activity *a = activity_lock();
    a->collectives += a->kind == ACTIVITY_WAITING;
    a->kind = ACTIVITY_COMPUTING, a->what = "", a->detail[0] = 0, a->changes++;
    activity_unlock();
}

// Tells the watcher of progress within a call.
static inline void activity_moved(void) {
    activity_lock()->changes++;
    activity_unlock();
}

// Notes that an NCCL operation was enqueued or, with `finished`, has finished. `pending`: operations that are left;
// `what` and `layer` name the oldest of them.
static inline void activity_operation(int64_t pending, const char *what, int64_t layer, bool finished) {
    Activity *a = activity_lock();
    a->pending = pending, a->pending_what = what, a->pending_layer = layer;
    a->collectives += finished, a->changes++;
    activity_unlock();
}

// Evaluates a call that may wait for a disk, and marks it as this rank's activity. `what`: the call's name.
#define FILE_WORK(what, path, call)                \
    __extension__({                                \
        activity_begin(ACTIVITY_FILE, what, path); \
        const __typeof__(call) result_ = (call);   \
        activity_end();                            \
        result_;                                   \
    })

#endif
