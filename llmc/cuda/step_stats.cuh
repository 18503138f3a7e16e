// Statistics and times of optimizer steps: written on the GPU, read by the host while the next step runs.
#ifndef LLMC_STEP_STATS_CUH
#define LLMC_STEP_STATS_CUH

#include "adamw.cuh"

// Steps whose statistics and end are kept: the one that runs, the one that is reported, and the one before that, from
// whose end it is timed.
#define STEP_SLOTS 3

// Statistics of one step.
typedef struct {
    float loss;            // mean over the step's tokens
    uint32_t bad_norm;     // the first norm whose input was not finite (nonfinite.h), on this rank; UINT32_MAX: none
    AdamwControl control;  // gradient norm, and whether it is finite
} StepStats;

typedef struct {
    StepStats *host;  // [STEP_SLOTS] pinned
    cudaEvent_t done[STEP_SLOTS], begin;
    int64_t first;   // the latest step that came after a pause: it is timed from `begin`
    int64_t memory;  // bytes in use on the GPU when the first step was done; 0: not yet
} StepLog;

static inline StepLog step_log_create(void) {
    StepLog log;
    memset(&log, 0, sizeof log);
    CUDA_CHECK(cudaMallocHost((void **)&log.host, STEP_SLOTS * sizeof(StepStats)));
    for (int i = 0; i < STEP_SLOTS; i++) CUDA_CHECK(cudaEventCreate(&log.done[i]));
    CUDA_CHECK(cudaEventCreate(&log.begin));
    return log;
}

static inline void step_log_destroy(StepLog *log) {
    for (int i = 0; i < STEP_SLOTS; i++) CUDA_CHECK(cudaEventDestroy(log->done[i]));
    CUDA_CHECK(cudaEventDestroy(log->begin));
    CUDA_CHECK(cudaFreeHost(log->host));
}

// Step `step` begins. after_pause: something other than steps ran before it, which its time leaves out.
static inline void step_log_begin(StepLog *log, StepStats *stats, int64_t step, bool after_pause, cudaStream_t stream) {
    if (after_pause) {
        log->first = step;
        CUDA_CHECK(cudaEventRecord(log->begin, stream));
    }
    CUDA_CHECK(cudaMemsetAsync(&stats->loss, 0, sizeof stats->loss, stream));
    CUDA_CHECK(cudaMemsetAsync(&stats->bad_norm, 0xff, sizeof stats->bad_norm, stream));
}

// Step `step` ends: its statistics are on the host when done[step % STEP_SLOTS] has happened.
static inline void step_log_end(StepLog *log, const StepStats *stats, int64_t step, cudaStream_t stream) {
    const int64_t slot = step % STEP_SLOTS;
    CUDA_CHECK(cudaMemcpyAsync(&log->host[slot], stats, sizeof *stats, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaEventRecord(log->done[slot], stream));
}

// Seconds of a step that is done: from the end of the step before.
static inline double step_log_seconds(const StepLog *log, int64_t step) {
    float ms = 0;
    const cudaEvent_t begin = step == log->first ? log->begin : log->done[(step + STEP_SLOTS - 1) % STEP_SLOTS];
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, log->done[step % STEP_SLOTS]));
    return ms * 1e-3;
}

// Bytes in use on the GPU when the first step was done.
static inline int64_t step_log_memory(StepLog *log) {
    size_t available = 0, total = 0;
    if (log->memory) return log->memory;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return log->memory = (int64_t)(total - available);
}

#endif
