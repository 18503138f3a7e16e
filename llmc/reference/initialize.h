// Initial weights, a pure function of (seed, tensor, element): all ranks and devices make the same ones.
#ifndef LLMC_INITIALIZE_H
#define LLMC_INITIALIZE_H

#include "../config/parameters.h"
#include "../base/rng.h"

// Returns the initial value, in fp32, of element `element` of the tensor that is entry `tensor_index` of the
// ParameterTable and has `flags`. Weights that are stored in bf16 are this value, rounded to nearest even.
HOST_DEVICE static inline float parameter_initial_value(unsigned flags, float initializer_range, uint64_t seed,
                                                        int64_t tensor_index, int64_t element) {
    if (flags & PARAM_INIT_ONE) return 1.0f;
    if (flags & PARAM_INIT_ZERO) return 0.0f;
    return rng_normal(rng_key(seed, (uint64_t)tensor_index + 1), (uint64_t)element) * initializer_range;
}

#endif
