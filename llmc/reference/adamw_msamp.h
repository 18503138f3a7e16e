// AdamW with MS-AMP's moments, and FP16 weights with a scale, in plain C, over (part of) one tensor.
#ifndef LLMC_REFERENCE_ADAMW_MSAMP_H
#define LLMC_REFERENCE_ADAMW_MSAMP_H

#include "../base/msamp.h"
#include "adamw_math.h"
#include "rounding.h"

// Returns the numbers of a run's optimizer step (adamw_step_of).
static inline MsampStep msamp_step_of(const Options *o, int64_t step, int64_t skipped) {
    return msamp_step(step + 1 - skipped, schedule_learning_rate(o, step), o->beta1, o->beta2, o->eps, o->weight_decay);
}

// The moments of n elements of one tensor.
typedef struct {
    uint8_t *exp_avg;       // [n] E4M3 codes
    fp16_bits *exp_avg_sq;  // [n]
} MsampArrays;

static inline MsampPair msamp_scale_inv(MsampPair scale) {
    return (MsampPair){1 / scale.exp_avg, 1 / scale.exp_avg_sq};
}

static inline MsampPair msamp_stored(MsampArrays moments, int64_t i) {
    return (MsampPair){fp8_to_float(moments.exp_avg[i], FP8_E4M3), fp16_to_float(moments.exp_avg_sq[i])};
}

// Pass 1: updates n weights, the first of which is element `first` of the flat array, and returns the amaxes of the new
// moments. With bf16_weights the new weights are rounded to bf16 with the random bits that adamw_reference uses.
static inline MsampPair adamw_msamp_weights(float *weights, MsampArrays moments, MsampPair scale,
                                            const float *gradients, int64_t first, int64_t n, bool decay,
                                            float gradient_factor, bool bf16_weights, const MsampStep *s,
                                            const AdamwStep *rounding) {
    const MsampPair scale_inv = msamp_scale_inv(scale);
    float amax = 0, amax_sq = 0;
    PARALLEL_MAX(amax, amax_sq)
    for (int64_t i = 0; i < n; i++) {
        const MsampPair e = msamp_moments(msamp_stored(moments, i), scale_inv, gradients[i] * gradient_factor, s);
        const float weight = msamp_weight(weights[i], e, decay, s);
        const uint32_t random = adamw_random(rounding, first + i).weight;
        weights[i] = bf16_weights ? bf16_to_float(adamw_round(weight, random)) : weight;
        amax = fmaxf(amax, fabsf(e.exp_avg)), amax_sq = fmaxf(amax_sq, e.exp_avg_sq);
    }
    return (MsampPair){amax, amax_sq};
}

// Pass 2: computes the moments of n elements again and stores them with the new scales of the whole tensor.
static inline void adamw_msamp_moments(MsampArrays moments, MsampPair scale, MsampPair new_scale,
                                       const float *gradients, int64_t n, float gradient_factor, const MsampStep *s) {
    const MsampPair scale_inv = msamp_scale_inv(scale);
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) {
        const MsampPair e = msamp_moments(msamp_stored(moments, i), scale_inv, gradients[i] * gradient_factor, s);
        moments.exp_avg[i] = fp8_from_float(e.exp_avg * new_scale.exp_avg, FP8_E4M3);
        moments.exp_avg_sq[i] = fp16_from_float(e.exp_avg_sq * new_scale.exp_avg_sq);
    }
}

// Stores n weights as FP16(weight * scale), rounded to nearest.
static inline void fp16_weights_encode(fp16_bits *out, const float *weights, float scale, int64_t n) {
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) out[i] = fp16_from_float(weights[i] * scale);
}

// Stores n weights as FP16(weight * scale). The first is element `first` of the flat array. They are rounded as
// `rounding` says, with the random bits that adamw_reference uses for bf16 weights; NULL: to nearest.
static inline void fp16_weights_round(fp16_bits *out, const float *weights, float scale, int64_t first, int64_t n,
                                      const AdamwStep *rounding) {
    if (!rounding || rounding->nearest_weights) return fp16_weights_encode(out, weights, scale, n);
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++)
        out[i] = fp16_from_float_stochastic(weights[i] * scale, adamw_random(rounding, first + i).weight);
}

static inline void fp16_weights_decode(float *out, const fp16_bits *weights, float scale, int64_t n) {
    const float scale_inv = 1 / scale;
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) out[i] = fp16_to_float(weights[i]) * scale_inv;
}

// Returns the scale of an FP8 weight that is cast from FP16 weights, by MS-AMP's rule. amax: the largest magnitude of
// the values that the FP16 numbers stand for, over all tensors of a fused weight.
static inline float fp16_weights_fp8_scale(float amax) { return msamp_scale(amax, 1, FP8_E4M3_MAX); }

// Casts n FP16 weights of one tensor, which has this scale, to E4M3.
static inline void fp16_weights_cast(uint8_t *out, const fp16_bits *weights, float scale, float fp8_scale, int64_t n) {
    const float factor = msamp_factor(fp8_scale, scale);
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) out[i] = fp8_from_float(fp16_to_float(weights[i]) * factor, FP8_E4M3);
}

#endif
