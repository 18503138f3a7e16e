// Statistics and times of optimizer steps: written on the GPU, read by the host while the next step runs.
#ifndef LLMC_STEP_STATS_CUH
#define LLMC_STEP_STATS_CUH

#include "adamw.cuh"

// Number of steps whose statistics and end events are kept: the running step, the one being reported, and the one
// before that, whose end starts its time.
#define STEP_SLOTS 3

// Statistics of one step.
typedef struct {
    float loss;  // mean over the step's tokens
    // First norm on this rank with non-finite input (nonfinite.h); UINT32_MAX: none.
    uint32_t bad_norm;
    AdamwControl control;  // gradient norm, and if it is finite
} StepStats;

typedef struct {
    StepStats *host;  // [STEP_SLOTS] pinned
    cudaEvent_t done[STEP_SLOTS], begin;
    // Latest step that came after a pause; its time starts at `begin`.
    int64_t first;
    // Bytes in use on the GPU at the end of the first step; 0: not yet known.
    int64_t memory;
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

// Marks the begin of step `step`. after_pause: something other than a step ran before it, which its time excludes.
static inline void step_log_begin(StepLog *log, StepStats *stats, int64_t step, bool after_pause, cudaStream_t stream) {
    if (after_pause) {
        log->first = step;
        CUDA_CHECK(cudaEventRecord(log->begin, stream));
    }
    CUDA_CHECK(cudaMemsetAsync(&stats->loss, 0, sizeof stats->loss, stream));
    CUDA_CHECK(cudaMemsetAsync(&stats->bad_norm, 0xff, sizeof stats->bad_norm, stream));
}

// Marks the end of step `step`. Its statistics are on the host once done[step % STEP_SLOTS] has completed.
static inline void step_log_end(StepLog *log, const StepStats *stats, int64_t step, cudaStream_t stream) {
    const int64_t slot = step % STEP_SLOTS;
    CUDA_CHECK(cudaMemcpyAsync(&log->host[slot], stats, sizeof *stats, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaEventRecord(log->done[slot], stream));
}

// Returns the seconds of a completed step, from the end of the step before it.
static inline double step_log_seconds(const StepLog *log, int64_t step) {
    float ms = 0;
    const cudaEvent_t begin = step == log->first ? log->begin : log->done[(step + STEP_SLOTS - 1) % STEP_SLOTS];
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, log->done[step % STEP_SLOTS]));
    return ms * 1e-3;
}

// Returns the bytes in use on the GPU at the end of the first step.
static inline int64_t step_log_memory(StepLog *log) {
    size_t available = 0, total = 0;
    if (log->memory) return log->memory;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return log->memory = (int64_t)(total - available);
}

#endif
