// Names a rank that works slower than the others: its GPU may throttle, or its host may be busy.
#ifndef LLMC_SLOW_RANKS_H
#define LLMC_SLOW_RANKS_H

#include "../base/step_times.h"
#include "../ranks/gpu_monitor.h"

#define SLOW_RANK_SHARE 1.05    // a rank that takes longer than so many medians is slow in a step
#define SLOW_RANK_STEPS 20      // a rank that is slow in so many steps in a row is named
#define SLOW_RANK_SECONDS 2e-3  // steps of less work say nothing: their times are noise

// How many steps in a row this rank was slow, and the seconds of its own work and of the median rank's in them.
typedef struct {
    int64_t steps;
    double own, median;
} SlowRank;

// Seconds of a rank's own work in a step: without waits for data and other ranks.
static inline double slow_rank_work(const StepTimes *s) {
    return s->seconds[TIME_COMPUTE] + s->seconds[TIME_OPTIMIZER];
}

// Sorts n numbers, and returns their median; of two the smaller one.
static inline double slow_rank_median(double *values, int64_t n) {
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return values[(n - 1) / 2];
}

// Counts a step in which this rank worked for `own` seconds and the median rank for `median`. Returns true if this rank
// has now been slow for SLOW_RANK_STEPS steps, once until it is fast again.
static inline bool slow_rank_count(SlowRank *s, double own, double median) {
    const SlowRank none = {0, 0, 0};
    if (median < SLOW_RANK_SECONDS || own <= SLOW_RANK_SHARE * median) *s = none;
    else s->steps++, s->own += own, s->median += median;
    return s->steps == SLOW_RANK_STEPS;
}

// Warns that this rank is slow, with the reading of its GPU. others: the median clock of all GPUs in MHz.
static inline void slow_rank_warn(const SlowRank *s, int64_t rank, const char *host, const GpuReading *gpu,
                                  double others) {
    char reading[256] = "", reasons[128] = "";
    gpu_throttle_text(reasons, sizeof reasons, gpu->throttle);
    if (gpu->present)
        format_checked(reading, sizeof reading, "; its GPU: %.0f MHz (median of all %.0f), %.0f C%s%s", gpu->sm_mhz,
                       others, gpu->celsius, *reasons ? ", " : "", reasons);
    warn("rank %lld on %s is slow: for %d steps its own work took %.1f%% longer than the median rank's%s",
         (long long)rank, host, SLOW_RANK_STEPS, 100 * (s->own / s->median - 1), reading);
}

#endif
