// Recipe tensorwise_bounded: a bound on a weight tensor after AdamW's next step, and the scale made from it before it.
//
// AdamW's step is rate / (1 - beta1^t) * |m| / (sqrt(v) / sqrt(1 - beta2^t) + eps). Gradient g turns the moments into
// m' = beta1 m + (1 - beta1) g and v' = beta2 v + (1 - beta2) g^2. If |m| <= K sqrt(v), Cauchy-Schwarz gives
//     |m'| <= K' sqrt(v'),  K'^2 = r K^2 + (1 - beta1)^2 / (1 - beta2),  r = beta1^2 / beta2,
// and K is 0 before the first step. So after t steps K^2 = (1 - beta1)^2 (1 - r^t) / ((1 - beta2) (1 - r)). Gradients
// that grow by beta2 / beta1 from step to step reach this bound. A stored moment is rounded by up to u of itself, which
// multiplies K^2 by weight_bound_growth in each step, and so r. eps only shortens the step, and clipping changes g.
// The bound holds for moments that are 0 or were made with the same betas; a resumed run must have those of its
// checkpoint (weight_bound_needs), and there they must be old enough (weight_bound_forgets). Rounding loses more than u
// of a second moment near the smallest numbers; there eps is far larger than its root, and keeps the step below the
// bound.
#ifndef LLMC_WEIGHT_BOUND_H
#define LLMC_WEIGHT_BOUND_H

#include <math.h>

#include "options.h"

#define WEIGHT_BOUND_LEAST_EPS 1e-15

// Covers rounding: of the new weight, stochastically to bf16 (2^-7 of it), or of the old and of the new one to nearest
// with fp32 masters (2^-8 each), and of all fp32 arithmetic.
#define WEIGHT_BOUND_ROUNDING (1 + 0x1p-7f + 0x1p-10f)

// A weight w becomes one of at most kept * |w| + step, before it is rounded.
typedef struct {
    float kept, step;
} WeightBound;

// The factor by which rounding of the stored moments raises K^2 in a step: (1 + u)^2 / (1 - u). bf16 moments are
// rounded stochastically, by less than 2^-7; u of fp32 moments includes their arithmetic.
static inline double weight_bound_growth(const Options *o) {
    const double u = o->optimizer_state == MOMENTS_FP32 ? 0x1p-22 : 0x1p-7;
    return (1 + u) * (1 + u) / (1 - u);
}

// True if the bound exists for the betas.
static inline bool weight_bound_exists(const Options *o) {
    return o->beta1 * o->beta1 * weight_bound_growth(o) < o->beta2;
}

// The largest step of AdamW over the learning rate in step t, counted from 1 without skipped ones.
static inline double weight_bound_largest(double beta1, double beta2, double growth, int64_t t) {
    const double n = (double)t, r = beta1 * beta1 / beta2 * growth;
    return (1 - beta1) / (1 - pow(beta1, n)) * sqrt((1 - pow(beta2, n)) * (1 - pow(r, n)) / ((1 - beta2) * (1 - r)));
}

// The steps after which moments of other betas no longer count: of what their K^2 has too much, 1e-6 is left.
static inline int64_t weight_bound_forgets(const Options *o) {
    return (int64_t)ceil(log(1e-6) / log(o->beta1 * o->beta1 / o->beta2 * weight_bound_growth(o)));
}

// Returns the scale of a weight's E4M3 codes after a step, from its amax before it.
HOST_DEVICE static inline float weight_bound_scale(float amax, WeightBound b) {
    return fp8_scale(fmaf(b.kept, amax, b.step) * WEIGHT_BOUND_ROUNDING, FP8_E4M3);
}

// True if a run that resumes or branches must have the checkpoint's value of an option for its bound to hold.
static inline bool weight_bound_needs(const Options *o, const OptionRow *row) {
    return options_recipe(o)->bounded &&
           (row->field == offsetof(Options, beta1) || row->field == offsetof(Options, beta2));
}

#endif
