// Choosing the next token of a sample from the model's logits.
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <math.h>

#include "rng.h"

#define SAMPLE_TEMPERATURE 0.8f

// Draws a token with probability softmax(logits / SAMPLE_TEMPERATURE) among the first `count` of `logits` (fp32), by one uniform number:
// the same seed, step and position give the same choice.
static inline int32_t sampler_choose(const float *logits, int64_t count, uint64_t seed, int64_t step, int64_t position) {
    const uint64_t sample_stream = 0x73616d706c65ull;  // "sample": apart from the streams of weights and data order
    float largest = -INFINITY;
    for (int64_t v = 0; v < count; v++) largest = logits[v] > largest ? logits[v] : largest;
    double sum = 0, below = 0;
    for (int64_t v = 0; v < count; v++) sum += expf((logits[v] - largest) / SAMPLE_TEMPERATURE);
    const double target = sum * rng_uniform(rng_key(rng_key(seed, sample_stream), (uint64_t)step), (uint64_t)position);
    for (int64_t v = 0; v < count; v++) {
        below += expf((logits[v] - largest) / SAMPLE_TEMPERATURE);
        if (below > target) return (int32_t)v;
    }
    return (int32_t)(count - 1);
}

#endif
