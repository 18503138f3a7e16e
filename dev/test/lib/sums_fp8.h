// Compares FP8 sums of gradients with fp32 sums of the same gradients, for sums_fp8.c and sums_fp8.cu.
#ifndef SUMS_FP8_H
#define SUMS_FP8_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

// FP8 sum times fp32 sum, and the squares of the fp32 sum, of their difference and of the FP8 sum, over all elements.
enum { FIT_PRODUCT, FIT_EXACT, FIT_DIFFERENCE, FIT_FP8, FIT_SUMS };

static inline bool fit_is_due(int64_t micro_steps) {
    return micro_steps == 16 || micro_steps == 64 || micro_steps == 256;
}

static inline void fit_print(const double *fit, int64_t micro_steps) {
    printf("FP8 sums of %lld micro-steps: slope %.5f, rms error %.5f, norm %.5f\n", (long long)micro_steps,
           fit[FIT_PRODUCT] / fit[FIT_EXACT], sqrt(fit[FIT_DIFFERENCE] / fit[FIT_EXACT]),
           sqrt(fit[FIT_FP8] / fit[FIT_EXACT]));
}

#endif
