// AdamW for one element, clip factors and rounding, shared by the CPU trainer and CUDA kernels: the same bits on both.
// The rule is torch.optim.AdamW's (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"):
//     p *= 1 - lr * wd;  m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g;
//     p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
// t counts the steps that were taken: a skipped step leaves it as it is, as with torch's GradScaler.
// Where a compiler could fuse a product with a sum, fmaf does so explicitly, so that all compilers give the same bits.
//
// bf16 and FP16 weights and bf16 moments are rounded stochastically (weights with nearest_weights: to nearest) with
// random bits that depend on (rounding seed, step, flat element index) alone: neither on the launch shape nor on how
// the parameters are split over ranks.
#ifndef LLMC_ADAMW_MATH_H
#define LLMC_ADAMW_MATH_H

#include <math.h>

#include "../base/rng.h"
#include "../config/schedule.h"
#include "../config/weight_bound.h"

// The numbers that all elements share in one optimizer step.
typedef struct {
    float one_minus_beta1, beta2, one_minus_beta2;
    float step_size;           // lr / (1 - beta1^t)
    float inverse_sqrt_bias2;  // 1 / sqrt(1 - beta2^t)
    float eps;
    float decay;           // 1 - lr * weight_decay, the factor for tensors with PARAM_DECAY
    uint64_t key;          // key of this step's rounding bits
    bool nearest_weights;  // rounds bf16 weights to nearest, ties away from zero; FP16 weights to nearest even
} AdamwStep;

typedef struct {
    float weight, exp_avg, exp_avg_sq;
} AdamwElement;

// `step` is the optimizer step that is being taken, counted from 1 and without skipped steps.
static inline AdamwStep adamw_step(int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
                                   bool nearest_weights, uint64_t seed) {
    AdamwStep s;
    s.one_minus_beta1 = (float)(1 - beta1);
    s.beta2 = (float)beta2;
    s.one_minus_beta2 = (float)(1 - beta2);
    s.step_size = (float)(lr / (1 - pow(beta1, (double)step)));
    s.inverse_sqrt_bias2 = (float)(1 / sqrt(1 - pow(beta2, (double)step)));
    s.eps = (float)eps;
    s.decay = (float)(1 - lr * weight_decay);
    s.key = rng_key(seed, 0x5352000000000000ull + (uint64_t)step);
    s.nearest_weights = nearest_weights;
    return s;
}

// Returns the numbers of a run's optimizer step `step`, counted from 0, if `skipped` steps before it were skipped.
static inline AdamwStep adamw_step_of(const Options *o, int64_t step, int64_t skipped) {
    return adamw_step(step + 1 - skipped, schedule_learning_rate(o, step), o->beta1, o->beta2, o->eps, o->weight_decay,
                      options_nearest_weights(o), (uint64_t)o->rounding_seed);
}

// Returns the bound of the same step on a weight that decays, for recipe tensorwise_bounded.
static inline WeightBound adamw_bound_of(const Options *o, int64_t step, int64_t skipped) {
    const double rate = schedule_learning_rate(o, step);
    return (WeightBound){
        (float)fmax(1, fabs(1 - rate * o->weight_decay)),
        (float)(rate * weight_bound_largest(o->beta1, o->beta2, weight_bound_growth(o), step + 1 - skipped))};
}

// The largest gradient norm, before clipping, with which a step is taken. A larger norm counts as not finite. In a step
// that is taken, no gradient is larger than the norm, so its square, and with it the second moment, is at most 2^126:
// below fp32's largest number, 2^128, by more than any rounding to bf16 adds.
#define ADAMW_LARGEST_NORM 0x1p63

// True if a step may be taken with this gradient norm, which may be NaN.
HOST_DEVICE static inline bool adamw_accepts(double norm) { return norm <= ADAMW_LARGEST_NORM; }

// True if a step with this loss and gradient norm is taken: the norm is accepted, and the loss is finite.
HOST_DEVICE static inline bool adamw_takes(double loss, double norm) {
    return adamw_accepts(norm) && fabs(loss) < INFINITY;
}

// A gradient's magnitude as bits, which have the order of the magnitudes. NaN counts as infinity.
HOST_DEVICE static inline uint32_t adamw_magnitude(float gradient) {
    const uint32_t magnitude = float_bits(gradient) & 0x7fffffffu;
    return magnitude < 0x7f800000u ? magnitude : 0x7f800000u;
}

// Returns the smallest magnitude that counts as large in a step that is not taken: 1/1024 of the largest gradient, or
// infinity if that is infinite. Gradients grow on their way back through the model, so the first large one in backward
// order is nearer to the cause than the largest.
HOST_DEVICE static inline uint32_t adamw_large(uint32_t largest) {
    const uint32_t factor = 10u << 23;
    return largest == 0x7f800000u ? largest : largest > factor ? largest - factor : 0;
}

// Returns the factor that brings a gradient of this norm to a norm of at most `clip` (0: no clipping), by the rule of
// torch.nn.utils.clip_grad_norm_.
HOST_DEVICE static inline float clip_factor(double norm, double clip) {
    if (clip <= 0) return 1.0f;
    const double factor = clip / (norm + 1e-6);
    return factor < 1 ? (float)factor : 1.0f;
}

// --grad-clip with --optimizer-in-backward: a unit is updated before the norm of the whole gradient is known. Returns
// the norm by which the unit's gradient is clipped. `so_far` is the norm of all gradients of this step that are
// complete, the unit's included. so_far_before and whole_before are the norms of the same units and of all units in the
// last step (0: no last step). The result is so_far * whole_before / so_far_before. This is the whole norm if all
// gradients have grown or shrunk by one factor since the last step, and also for the step's last unit. The last step's
// norm itself would be a worse guide: it clips a spike too little, and the step after a spike too much. A spike of one
// unit alone is not seen by the units that are updated before it: they are not clipped in its step, and by the spike's
// ratio in the step after it.
//
// The result is at least so_far. So no unit's clipped gradient has a norm above `clip`, and the norm of all clipped
// gradients of a step is at most clip * sqrt(1 + 2 ln(norm / clip)): 3.2 clip for a norm of 100 clip.
HOST_DEVICE static inline double clip_norm_so_far(float so_far, float so_far_before, float whole_before) {
    const bool known = so_far_before > 0 && whole_before > so_far_before;
    return known ? so_far * ((double)whole_before / so_far_before) : so_far;
}

// Returns the updated element, in fp32. `gradient` is already clipped.
HOST_DEVICE static inline AdamwElement adamw_update(AdamwElement e, float gradient, bool decay, const AdamwStep *s) {
    e.exp_avg = fmaf(s->one_minus_beta1, gradient - e.exp_avg, e.exp_avg);
    e.exp_avg_sq = fmaf(s->beta2, e.exp_avg_sq, (s->one_minus_beta2 * gradient) * gradient);
    float denominator = fmaf(sqrtf(e.exp_avg_sq), s->inverse_sqrt_bias2, s->eps);
    float kept = decay ? e.weight * s->decay : e.weight;
    e.weight = fmaf(-s->step_size, e.exp_avg / denominator, kept);
    return e;
}

// Rounding bits of an element: the upper 16 of each word.
typedef struct {
    uint32_t weight, exp_avg, exp_avg_sq;
} AdamwRandom;

// Random bits, 48 for each element, by 32-bit multiplications, which take a GPU fewer instructions than the 64-bit ones
// of rng.h. The rounds, x ^= x >> s; x *= odd number, and their constants are from Wellons 2018, "Prospecting for Hash
// Functions", and his lists in github.com/skeeto/hash-prospector. The 8 elements from 8 * group on share two rounds,
// which mix in both halves of the key. The key is that of a step (AdamwStep) or of a gradient sum (gradient_sum.h).
HOST_DEVICE static inline uint32_t adamw_random_group(uint64_t key, int64_t group) {
    uint32_t x = (uint32_t)group ^ (uint32_t)key;
    x = (x ^ x >> 16) * 0x7feb352du + ((uint32_t)(key >> 32) + (uint32_t)(group >> 32) * 0x9e3779b9u);
    return (x ^ x >> 15) * 0x846ca68bu;
}

// Each member of the group, 0 to 7, gets one more round. The round ends in three multiplications, one for each word
// (adamw_random_member); their upper bits depend on all bits of x. Over all 2^32 hashes, bits of two members correlate
// by less than 4e-4, and bits of one member by less than 1e-7.
HOST_DEVICE static inline uint32_t adamw_random_word(uint32_t group_hash, uint32_t member) {
    const uint32_t x = group_hash + member * 0x21f0aaadu;
    return x ^ x >> 16;
}

HOST_DEVICE static inline AdamwRandom adamw_random_member(const AdamwStep *s, uint32_t group_hash, uint32_t member) {
    const uint32_t x = adamw_random_word(group_hash, member);
    return (AdamwRandom){s->nearest_weights ? 0x80000000u : x * 0xd35a2d97u, x * 0x846ca68bu, x * 0xef1d6b47u};
}

// Rounding bits of flat element i.
HOST_DEVICE static inline AdamwRandom adamw_random(const AdamwStep *s, int64_t i) {
    return adamw_random_member(s, adamw_random_group(s->key, i >> 3), (uint32_t)i & 7);
}

HOST_DEVICE static inline bf16_bits adamw_round(float x, uint32_t random) {
    return bf16_from_float_stochastic(x, random >> 16);
}

#endif
