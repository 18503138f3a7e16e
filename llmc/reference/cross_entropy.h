// Cross-entropy of logits [rows, V] against targets [rows] in plain C, and its gradient.
//
// A negative target is ignored: its loss and gradient are 0.
#ifndef LLMC_REFERENCE_CROSS_ENTROPY_H
#define LLMC_REFERENCE_CROSS_ENTROPY_H

#include <math.h>

#include "rounding.h"

static inline float logits_lse(const float *logits, int64_t V) {
    float m = -INFINITY;
    for (int64_t v = 0; v < V; v++) m = logits[v] > m ? logits[v] : m;
    double sum = 0;
    for (int64_t v = 0; v < V; v++) sum += expf(logits[v] - m);
    return m + (float)log(sum);
}

// losses [rows] = log(sum(exp(logits))) - logits[target]
static inline void cross_entropy_forward(float *losses, const float *logits, const int32_t *targets, int64_t rows,
                                         int64_t V) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++)
        losses[i] = targets[i] < 0 ? 0.0f : logits_lse(logits + i * V, V) - logits[i * V + targets[i]];
}

// dlogits = (softmax(logits) - onehot(target)) * grad_scale; may overwrite logits. For a mean over N tokens grad_scale
// is 1/N.
static inline void cross_entropy_backward(float *dlogits, const float *logits, const int32_t *targets, int64_t rows,
                                          int64_t V, float grad_scale, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++) {
        const float lse = targets[i] < 0 ? 0.0f : logits_lse(logits + i * V, V);
        for (int64_t v = 0; v < V; v++) {
            const float p = targets[i] < 0 ? 0.0f : expf(logits[i * V + v] - lse);
            dlogits[i * V + v] = round_to((p - (v == targets[i] ? 1.0f : 0.0f)) * grad_scale, rounding);
        }
    }
}

#endif
