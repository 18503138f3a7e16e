// Delayed scaling (Transformer Engine's recipe): the amax histories, the scales made from them, and their update.
//
// With delayed scaling, one pass over a tensor can cast it and find the amax from which later scales are made. Both
// trainers keep this state. tensor_index() numbers the tensors. Linear layers that stay in bf16 have entries too, which
// no cast reads.
#ifndef LLMC_DELAYED_H
#define LLMC_DELAYED_H

#include "../config/recipes.h"

typedef struct {
    int64_t tensors, window;
    float *history;  // [tensors, window] amaxes of earlier passes, the oldest at 1, the newest last; element 0 stays 0
                     // (Transformer Engine keeps the amax of the pass under way there)
    float *scale;  // [tensors] the scale of the next cast; 0: there was no cast yet, and the next one uses its own amax
} DelayedState;

// True if all scales are above zero. On a GPU the first update gives a scale of 1 to tensors that are never cast.
static inline bool delayed_is_complete(const float *scales, int64_t tensors) {
    for (int64_t i = 0; i < tensors; i++)
        if (!(scales[i] > 0)) return false;
    return true;
}

// True if the amax of a pass (as bits) enters the history. Zero does not: the tensor was not cast, or was all zero. NaN
// does not either.
HOST_DEVICE static inline bool delayed_counts(uint32_t amax) { return amax != 0 && amax <= 0x7f800000u; }

// Returns the scale that follows from `largest`, the largest amax of the window; 0: the last amax did not count. As
// long as `largest` is 0 or infinite, the scale does not change, but a scale of 0 becomes 1: if the first amax of a
// tensor was 0, infinite or NaN, that cast had scale 1 (fp8_scale_te), which stays until an amax gives another.
HOST_DEVICE static inline float delayed_scale(float scale, float largest, Fp8Format format, int margin) {
    if (largest > 0 && float_bits(largest) < 0x7f800000u) return fp8_scale_te(largest, format, margin);
    return scale > 0 ? scale : 1.0f;
}

// Updates the history [window] and the scale of one tensor after a pass whose amax (NaN ignored) has the bits `amax`.
// If the amax counts (delayed_counts), it enters the history, the oldest amax leaves, and *scale is computed again.
// Else both stay as they are, but a scale of 0 becomes 1. Transformer Engine: delayed_scaling.py, "max" over the
// window. A window of one holds this pass alone.
HOST_DEVICE static inline void delayed_update(float *history, int64_t window, float *scale, uint32_t amax,
                                              Fp8Format format, int margin) {
    float largest = 0;
    if (delayed_counts(amax)) {
        largest = float_from_bits(amax);
        for (int64_t i = 1; i < window; i++) {
            if (history[i] > largest) largest = history[i];
            history[i] = i + 1 < window ? history[i + 1] : float_from_bits(amax);
        }
    }
    *scale = delayed_scale(*scale, largest, format, margin);
}

#endif
