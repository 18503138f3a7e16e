// Statistics and times of optimizer steps: written on the GPU, read by the host when the step has ended.
#ifndef LLMC_STEP_STATS_CUH
#define LLMC_STEP_STATS_CUH

#include "../base/step_times.h"
#include "../optimizer/adamw.cuh"

// Number of steps whose statistics and end events are kept: the running step, the step being reported, and the step
// before the reported one, at whose end the reported step's time begins.
#define STEP_SLOTS 3

// Waits for other ranks within forward and backward are timed in one of this many steps. The other steps count the
// waits of the latest timed step. Timing costs time: an event takes about 2 us (dev/LOG.md).
#define STEP_WAITS_EVERY 8

// Statistics of one step.
typedef struct {
    float loss;  // mean over the step's targets that count, of all ranks
    // Number of the first norm on this rank with bad input (NonfiniteStep.forward); UINT32_MAX: none.
    uint32_t bad_norm;
    AdamwControl control;  // gradient norm, and whether the step is taken
} StepStats;

// Marks within one step. Each mark ends a part of the step's time; that part began at the mark before.
typedef struct {
    cudaEvent_t *events;  // [capacity], reused by later steps
    StepTime *parts;
    int64_t count, capacity;
} StepMarks;

typedef struct {
    StepStats *host;  // [STEP_SLOTS] pinned
    cudaEvent_t done[STEP_SLOTS], begin;
    StepMarks marks[STEP_SLOTS];
    StepMarks *open;      // marks of the step that is being enqueued; NULL: none is
    StepTime work;        // the part to which the work enqueued now belongs
    bool timing_waits;    // true: waits within forward and backward are timed in this step
    double waited;        // seconds of all waits within forward and backward, in the latest step that timed them
    cudaStream_t stream;  // the compute stream
    // Latest step that came after a pause; its time starts at `begin`.
    int64_t first;
    // Bytes in use on the GPU, by all processes, when the first step of this process had ended; 0: not yet known.
    int64_t memory;
} StepLog;

static inline StepLog step_log_create(cudaStream_t stream) {
    StepLog log;
    memset(&log, 0, sizeof log);
    log.stream = stream;
    CUDA_CHECK(cudaMallocHost((void **)&log.host, STEP_SLOTS * sizeof(StepStats)));
    for (int i = 0; i < STEP_SLOTS; i++) CUDA_CHECK(cudaEventCreate(&log.done[i]));
    CUDA_CHECK(cudaEventCreate(&log.begin));
    return log;
}

static inline void step_log_destroy(StepLog *log) {
    for (int i = 0; i < STEP_SLOTS; i++) {
        StepMarks *m = &log->marks[i];
        for (int64_t e = 0; e < m->capacity; e++) CUDA_CHECK(cudaEventDestroy(m->events[e]));
        free(m->events);
        free(m->parts);
        CUDA_CHECK(cudaEventDestroy(log->done[i]));
    }
    CUDA_CHECK(cudaEventDestroy(log->begin));
    CUDA_CHECK(cudaFreeHost(log->host));
}

static inline void step_marks_grow(StepMarks *m) {
    const int64_t capacity = max_i64(64, 2 * m->capacity);
    m->events = (cudaEvent_t *)xrealloc(m->events, (size_t)capacity * sizeof *m->events);
    m->parts = (StepTime *)xrealloc(m->parts, (size_t)capacity * sizeof *m->parts);
    for (; m->capacity < capacity; m->capacity++) CUDA_CHECK(cudaEventCreate(&m->events[m->capacity]));
}

// The compute stream's time since the previous mark belongs to `part`. Does nothing outside of a step.
static inline void step_log_mark(StepLog *log, StepTime part) {
    StepMarks *m = log->open;
    if (!m) return;
    if (m->count == m->capacity) step_marks_grow(m);
    CUDA_CHECK(cudaEventRecord(m->events[m->count], log->stream));
    m->parts[m->count++] = part;
}

// The work enqueued from now on belongs to `part`.
static inline void step_log_work(StepLog *log, StepTime part) {
    step_log_mark(log, log->work);
    log->work = part;
}

// Marks a wait of the compute stream for other ranks. The caller calls it twice: before the wait with TIME_COMPUTE,
// after it with TIME_COMMUNICATION. Does nothing within forward and backward of a step that does not time such waits.
static inline void step_log_mark_wait(StepLog *log, StepTime part) {
    if (log->work == TIME_COMPUTE && !log->timing_waits) return;
    step_log_mark(log, part == TIME_COMPUTE ? log->work : part);
}

// True if waits within forward and backward are timed in step `step`. Step 0 is not timed: the first step of a run is
// slower than the others.
static inline bool step_log_times_waits(int64_t step) { return step % STEP_WAITS_EVERY == 1; }

// Marks the start of step `step`. after_pause: something other than a step ran just before; the step's time excludes
// it. Clears the step's bad_norm.
static inline void step_log_begin(StepLog *log, StepStats *stats, int64_t step, bool after_pause) {
    if (after_pause) {
        log->first = step;
        CUDA_CHECK(cudaEventRecord(log->begin, log->stream));
    }
    log->open = &log->marks[step % STEP_SLOTS];
    log->open->count = 0, log->work = TIME_DATA;
    log->timing_waits = step_log_times_waits(step);
    CUDA_CHECK(cudaMemsetAsync(&stats->bad_norm, 0xff, sizeof stats->bad_norm, log->stream));
}

// Marks the end of step `step`. Its statistics are on the host once done[step % STEP_SLOTS] has completed.
static inline void step_log_end(StepLog *log, const StepStats *stats, int64_t step) {
    const int64_t slot = step % STEP_SLOTS;
    CUDA_CHECK(cudaMemcpyAsync(&log->host[slot], stats, sizeof *stats, cudaMemcpyDeviceToHost, log->stream));
    CUDA_CHECK(cudaEventRecord(log->done[slot], log->stream));
    log->open = NULL;
}

static inline double step_log_elapsed(cudaEvent_t begin, cudaEvent_t end) {
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    return ms * 1e-3;
}

// Returns the event at which a step's time begins: the end of the step before it or, after a pause, `begin`.
static inline cudaEvent_t step_log_start(const StepLog *log, int64_t step) {
    return step == log->first ? log->begin : log->done[(step + STEP_SLOTS - 1) % STEP_SLOTS];
}

// Returns the seconds of a completed step, from step_log_start to its end.
static inline double step_log_seconds(const StepLog *log, int64_t step) {
    return step_log_elapsed(step_log_start(log, step), log->done[step % STEP_SLOTS]);
}

// Returns the parts of a completed step's time. The time after the step's last mark is the optimizer's. In a step that
// does not time all waits within forward and backward, counts those of the latest step that did as communication.
static inline StepTimes step_log_times(StepLog *log, int64_t step) {
    const StepMarks *m = &log->marks[step % STEP_SLOTS];
    cudaEvent_t begin = step_log_start(log, step);
    double in_passes = 0;  // seconds of timed waits before the optimizer: up to the last mark with TIME_COMPUTE
    StepTimes times;
    memset(&times, 0, sizeof times);
    for (int64_t i = 0; i < m->count; begin = m->events[i++]) {
        times.seconds[m->parts[i]] += step_log_elapsed(begin, m->events[i]);
        if (m->parts[i] == TIME_COMPUTE) in_passes = times.seconds[TIME_COMMUNICATION];
    }
    times.seconds[TIME_OPTIMIZER] += step_log_elapsed(begin, log->done[step % STEP_SLOTS]);
    if (step_log_times_waits(step)) {
        log->waited = in_passes;
    } else {
        // Waits of updates within backward (TIME_OPTIMIZER) are timed in every step, and are in both terms.
        const double untimed = fmax(0, fmin(log->waited - in_passes, times.seconds[TIME_COMPUTE]));
        times.seconds[TIME_COMPUTE] -= untimed, times.seconds[TIME_COMMUNICATION] += untimed;
    }
    return times;
}

// Returns the bytes in use on the GPU, by all processes, at the first call: the trainer makes it when the first step
// has ended.
static inline int64_t step_log_memory(StepLog *log) {
    size_t available = 0, total = 0;
    if (log->memory) return log->memory;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return log->memory = (int64_t)(total - available);
}

#endif
