// Finds on a GPU where a loss or gradient norm that is not finite comes from (nonfinite.h): watches inputs of RMSNorms.
#ifndef LLMC_NONFINITE_CUH
#define LLMC_NONFINITE_CUH

#include "../fp8/qtensor.cuh"
#include "../kernels/rmsnorm.cuh"
#include "../memory/step_stats.cuh"
#include "nonfinite.h"

// Returns the watch of norm `number` (nonfinite_norm): if the norm's input is bad (NonfiniteStep.forward), its kernel
// lowers stats->bad_norm to `number`. `stats` is in device memory.
static inline RmsnormWatch nonfinite_watch(StepStats *stats, int64_t number) {
    return RmsnormWatch{&stats->bad_norm, (uint32_t)number};
}

// Returns the watch of the norm whose output is the input y of a linear layer.
static inline RmsnormWatch nonfinite_watch_of(StepStats *stats, const QTensor *y) {
    return nonfinite_watch(stats, nonfinite_norm(y->layer, y->linear == GATE_UP_PROJ));
}

// Returns what this rank knows of a step that was not taken. `stats` is in host memory.
static inline NonfiniteStep nonfinite_step(const StepStats *stats, bool optimizer_in_backward) {
    const AdamwControl *c = &stats->control;
    const int64_t forward = stats->bad_norm == UINT32_MAX ? NONFINITE_NONE : (int64_t)stats->bad_norm;
    return NonfiniteStep{stats->loss, c->gradient_norm,     forward,
                         c->largest,  (int64_t)c->position, optimizer_in_backward ? ADAMW_BLOCK : 1};
}

#endif
