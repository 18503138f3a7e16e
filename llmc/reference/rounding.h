// How the reference functions round their results, and what they share unless their comments say otherwise.
//
// Tensors are float arrays, row-major; FP8 and FP16 data are arrays of codes. Inside an operation values are fp32, and
// so are the sums of GEMMs (matmul.h). Other sums over many elements are in double, so that the reference adds almost
// no error of its own. An output that is bf16 on the GPU is rounded once: `rounding` is ROUND_BF16 to emulate bf16
// tensors, ROUND_NONE for pure fp32. Gradients are overwritten, unless a function has an argument `accumulate` that is
// true. The reference of a CUDA launcher X is called X_reference in most cases.
//
// Results do not depend on the number of threads: one thread sums each output element in a fixed order.
#ifndef LLMC_REFERENCE_ROUNDING_H
#define LLMC_REFERENCE_ROUNDING_H

#include "../base/bf16.h"
#include "../base/utils.h"

typedef enum { ROUND_NONE, ROUND_BF16 } Rounding;

static inline float round_to(float x, Rounding rounding) { return rounding == ROUND_BF16 ? bf16_round(x) : x; }

// Rounds n values in place to bf16; with ROUND_NONE it does nothing.
static inline void round_array(float *x, int64_t n, Rounding rounding) {
    if (rounding == ROUND_NONE) return;
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) x[i] = bf16_round(x[i]);
}

// Returns the sum of n values, in double and in order.
static inline double array_sum(const float *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return sum;
}

#endif
