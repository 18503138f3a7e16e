// One element of AdamW, shared by the CPU trainer and the CUDA kernel so that both compute the same bits.
// The rule is torch.optim.AdamW's (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"):
//     p *= 1 - lr * wd;  m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g;
//     p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
// Products that feed a sum are explicit fmaf, so that no compiler contracts differently.
//
// bf16 weights and moments are rounded stochastically with random bits that depend on (seed, step, flat element index) alone: neither on
// the launch shape nor on how the parameters are split over GPUs.
#ifndef LLMC_ADAMW_MATH_H
#define LLMC_ADAMW_MATH_H

#include <math.h>

#include "rng.h"

// What is the same for all elements in one optimizer step.
typedef struct {
    float one_minus_beta1, beta2, one_minus_beta2;
    float step_size;             // lr / (1 - beta1^t)
    float inverse_sqrt_bias2;    // 1 / sqrt(1 - beta2^t)
    float eps;
    float decay;                 // 1 - lr * weight_decay, the factor for tensors with PARAM_DECAY
    uint64_t key;                // of this step's rounding bits
    // The weight's 16 rounding bits are (random & weight_mask) | weight_half: 0xffff, 0 for stochastic rounding; 0, 0x8000 (half a unit: to nearest,
    // ties away from zero) to show what plain rounding costs.
    uint32_t weight_mask, weight_half;
} AdamwStep;

typedef struct {
    float weight, exp_avg, exp_avg_sq;
} AdamwElement;

// `step` is the optimizer step that is being taken, counted from 1.
static inline AdamwStep adamw_step(int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay, bool nearest_weights, uint64_t seed) {
    AdamwStep s;
    s.one_minus_beta1 = (float)(1 - beta1);
    s.beta2 = (float)beta2;
    s.one_minus_beta2 = (float)(1 - beta2);
    s.step_size = (float)(lr / (1 - pow(beta1, (double)step)));
    s.inverse_sqrt_bias2 = (float)(1 / sqrt(1 - pow(beta2, (double)step)));
    s.eps = (float)eps;
    s.decay = (float)(1 - lr * weight_decay);
    s.key = rng_key(seed, 0x5352000000000000ull + (uint64_t)step);
    s.weight_mask = nearest_weights ? 0 : 0xffff, s.weight_half = nearest_weights ? 0x8000 : 0;
    return s;
}

// What a gradient of this norm is multiplied by so that its norm is at most `clip` (0: no clipping). torch.nn.utils.clip_grad_norm_'s rule.
HOST_DEVICE static inline float clip_factor(double norm, double clip) {
    if (clip <= 0) return 1.0f;
    const double factor = clip / (norm + 1e-6);
    return factor < 1 ? (float)factor : 1.0f;
}

// The updated element in fp32. `gradient` is already clipped.
HOST_DEVICE static inline AdamwElement adamw_update(AdamwElement e, float gradient, bool decay, const AdamwStep *s) {
    e.exp_avg = fmaf(s->one_minus_beta1, gradient - e.exp_avg, e.exp_avg);
    e.exp_avg_sq = fmaf(s->beta2, e.exp_avg_sq, (s->one_minus_beta2 * gradient) * gradient);
    float denominator = fmaf(sqrtf(e.exp_avg_sq), s->inverse_sqrt_bias2, s->eps);
    float kept = decay ? e.weight * s->decay : e.weight;
    e.weight = fmaf(-s->step_size, e.exp_avg / denominator, kept);
    return e;
}

// Rounding bits of flat element i: bits 0..15 for the weight, 16..31 for exp_avg, 32..47 for exp_avg_sq.
HOST_DEVICE static inline uint64_t adamw_random(const AdamwStep *s, int64_t i) { return rng_u64(s->key, (uint64_t)i); }

HOST_DEVICE static inline bf16_bits adamw_round_weight(const AdamwStep *s, float x, uint64_t random) {
    return bf16_from_float_stochastic(x, ((uint32_t)random & s->weight_mask) | s->weight_half);
}
HOST_DEVICE static inline bf16_bits adamw_round_exp_avg(float x, uint64_t random) { return bf16_from_float_stochastic(x, (uint32_t)(random >> 16 & 0xffffu)); }
HOST_DEVICE static inline bf16_bits adamw_round_exp_avg_sq(float x, uint64_t random) { return bf16_from_float_stochastic(x, (uint32_t)(random >> 32 & 0xffffu)); }

#endif
