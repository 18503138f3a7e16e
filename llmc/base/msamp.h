// AdamW with the states of MS-AMP: exp_avg in E4M3 and exp_avg_sq in FP16, each with one fp32 scale for a whole tensor.
// (Peng and others 2023, "FP8-LM", arXiv 2310.18313; github.com/Azure/MS-AMP.) FP16 master weights have such a scale
// too. The CPU trainer and CUDA kernels share this file, so that both compute the same bits.
//
// Apart from the cases at msamp_scale, the scale of a tensor is the largest power of two with which its amax does not
// overflow. So a step has two passes:
//   1. m and v of each element, from the stored moments and the gradient; the new weight; the amax of each of these
//      that has a scale;
//   2. m and v once more, from the same stored moments, then stored as E4M3(m scale_m) and FP16(v scale_v) with the new
//      scales. An FP16 master is stored as FP16(p scale_p).
// Casts to FP8 and FP16 round to nearest even; masters may be rounded stochastically instead. Order of operations, fp32
// constants and the scale rule are those of MS-AMP's adamw.cu and meta.py, except that nothing is fused here (nvcc
// fuses as it likes), and that scales end at 2^126.
#ifndef LLMC_MSAMP_H
#define LLMC_MSAMP_H

#include <math.h>

#include "fp16.h"
#include "fp8.h"

#define MSAMP_LARGEST_EXPONENT 126  // the inverse of 2^126 is the smallest normal fp32 number

// Returns the new scale of a tensor, by MS-AMP's rule: 2^floor(log2(fp_max / amax)). `scale` is the old scale. If amax
// is zero or NaN, the new scale is the old one. If amax is infinite, the new scale is 1 / `scale`, as MS-AMP's is. If
// fp_max / amax is above 2^126, the new scale is 2^126. MS-AMP's scale has no such limit: it becomes infinite if
// fp_max / amax overflows, and zeros then become NaN. log2 is rounded to fp32, as in MS-AMP. So a quotient just below a
// power of two counts as that power: the scaled amax is then slightly above fp_max, and saturates.
HOST_DEVICE static inline float msamp_scale(float amax, float scale, float fp_max) {
    const float exponent = floorf((float)log2((double)(fp_max / amax)));
    float factor = scale;
    if (amax > 0 && amax < INFINITY) {
        const int power = (int)fminf(fabsf(exponent), MSAMP_LARGEST_EXPONENT);
        factor = float_from_bits((uint32_t)(127 + power) << 23);
    }
    return exponent < 0 ? 1 / factor : factor;
}

// Returns the factor that takes an FP16 weight to the value that is cast to FP8. Both scales are powers of two.
HOST_DEVICE static inline float msamp_factor(float fp8_scale, float fp16_scale) { return fp8_scale * (1 / fp16_scale); }

// The states that have a scale.
enum { MSAMP_EXP_AVG, MSAMP_EXP_AVG_SQ, MSAMP_MASTER, MSAMP_STATES };

// The numbers that all elements share in one optimizer step.
typedef struct {
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float step_size;   // lr / (1 - beta1^t)
    float sqrt_bias2;  // sqrt(1 - beta2^t)
    float eps;
    float decay;  // 1 - lr * weight_decay, the factor for tensors with weight decay
} MsampStep;

// `step` is the optimizer step that is being taken, counted from 1 and without skipped steps. MS-AMP's kernel gets lr
// and betas in fp32.
static inline MsampStep msamp_step(int64_t step, double lr, double beta1, double beta2, double eps,
                                   double weight_decay) {
    MsampStep s;
    s.beta1 = (float)beta1, s.beta2 = (float)beta2;
    s.one_minus_beta1 = 1 - s.beta1, s.one_minus_beta2 = 1 - s.beta2;
    const float bias1 = (float)(1 - pow((double)s.beta1, (double)step)),
                bias2 = (float)(1 - pow((double)s.beta2, (double)step));
    s.step_size = (float)lr / bias1;
    s.sqrt_bias2 = sqrtf(bias2);
    s.eps = (float)eps;
    s.decay = (float)(1 - lr * weight_decay);
    return s;
}

// One number for each moment: its value, scale, scale_inv or amax.
typedef struct {
    float exp_avg, exp_avg_sq;
} MsampPair;

// Returns an element's new moments from the stored numbers. `gradient` is already clipped.
HOST_DEVICE static inline MsampPair msamp_moments(MsampPair stored, MsampPair scale_inv, float gradient,
                                                  const MsampStep *s) {
    const float m = float_product(s->beta1, stored.exp_avg), v = float_product(s->beta2, stored.exp_avg_sq),
                square = float_product(gradient, gradient);
    MsampPair e;
    e.exp_avg = float_product(m, scale_inv.exp_avg) + float_product(s->one_minus_beta1, gradient);
    e.exp_avg_sq = float_product(v, scale_inv.exp_avg_sq) + float_product(s->one_minus_beta2, square);
    return e;
}

// Returns an element's new weight from its new moments.
HOST_DEVICE static inline float msamp_weight(float weight, MsampPair e, bool decay, const MsampStep *s) {
    const float denominator = sqrtf(e.exp_avg_sq) / s->sqrt_bias2 + s->eps;
    const float kept = decay ? float_product(weight, s->decay) : weight;
    return kept - float_product(s->step_size, e.exp_avg / denominator);
}

#endif
