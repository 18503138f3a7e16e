// QK-norm (Qwen3) and rotary position embedding (Su et al. 2021) in plain C, on packed q, k and v.
//
// Arguments: qkv [B, T, (NH + 2 NKV) * HD]; q_norm [HD] is the norm weight that all query heads share, and k_norm [HD]
// the one that all key heads share (NULL: no norm); table is what rope_table_fill made. Positions count from the start
// of a token's document.
#ifndef LLMC_REFERENCE_ROPE_H
#define LLMC_REFERENCE_ROPE_H

#include "../config/model_config.h"
#include "rmsnorm.h"

// Returns the cosines and sines of a row's position.
static inline const float *rope_angles_of(const float *table, const Dims *d, int64_t row) {
    return table + (row % d->T - (d->documents.starts ? d->documents.starts[row] : 0)) * d->HD;
}

// Norms each query and key head, if there is a norm, then rotates its pairs (i, i + HD/2), with one rounding. Value
// heads are copied. out may be qkv.
static inline void qknorm_rope_forward_reference(float *out, const float *qkv, const float *q_norm, const float *k_norm,
                                                 const float *table, const Dims *d, double eps, Rounding rounding) {
    const int64_t heads = d->NH + 2 * d->NKV, half = d->HD / 2;
    PARALLEL_FOR
    for (int64_t row = 0; row < d->R; row++) {
        const float *angles = rope_angles_of(table, d, row);
        for (int64_t h = 0; h < heads; h++) {
            const float *x = qkv + (row * heads + h) * d->HD;
            float *y = out + (row * heads + h) * d->HD;
            if (h >= d->NH + d->NKV) {
                memmove(y, x, (size_t)d->HD * sizeof(float));
                continue;
            }
            const float *w = h < d->NH ? q_norm : k_norm;
            const float rstd = w ? rms_reciprocal(x, d->HD, eps) : 1.0f;
            for (int64_t i = 0; i < half; i++) {
                float a = x[i], b = x[i + half];
                if (w) a = a * rstd * w[i], b = b * rstd * w[i + half];
                y[i] = round_to(a * angles[2 * i] - b * angles[2 * i + 1], rounding);
                y[i + half] = round_to(b * angles[2 * i] + a * angles[2 * i + 1], rounding);
            }
        }
    }
}

// Rotates dout, the gradient of rotated heads, back in fp32: dn is the gradient of the norms' outputs. Copies value
// heads.
static inline void rope_backward_rotate(float *dn, const float *dout, const float *table, const Dims *d) {
    const int64_t heads = d->NH + 2 * d->NKV, half = d->HD / 2;
    PARALLEL_FOR
    for (int64_t row = 0; row < d->R; row++) {
        const float *angles = rope_angles_of(table, d, row);
        for (int64_t h = 0; h < heads; h++) {
            const float *dy = dout + (row * heads + h) * d->HD;
            float *g = dn + (row * heads + h) * d->HD;
            if (h >= d->NH + d->NKV) memcpy(g, dy, (size_t)d->HD * sizeof(float));
            else
                for (int64_t i = 0; i < half; i++) {
                    g[i] = dy[i] * angles[2 * i] + dy[i + half] * angles[2 * i + 1];
                    g[i + half] = dy[i + half] * angles[2 * i] - dy[i] * angles[2 * i + 1];
                }
        }
    }
}

// Computes the weight gradient dw [HD] of the norm of heads [first, last): the sum over all rows and these heads.
static inline void head_norm_wgrad(float *dw, const float *dn, const float *qkv, int64_t first, int64_t last,
                                   const Dims *d, double eps, Rounding rounding) {
    const int64_t heads = d->NH + 2 * d->NKV;
    double *sum = (double *)xcalloc((size_t)d->HD, sizeof(double));
    for (int64_t row = 0; row < d->R; row++)
        for (int64_t h = first; h < last; h++) {
            const float *x = qkv + (row * heads + h) * d->HD, *g = dn + (row * heads + h) * d->HD;
            const float rstd = rms_reciprocal(x, d->HD, eps);
            for (int64_t i = 0; i < d->HD; i++) sum[i] += (double)g[i] * (x[i] * rstd);
        }
    for (int64_t i = 0; i < d->HD; i++) dw[i] = round_to((float)sum[i], rounding);
    free(sum);
}

// Turns dn, the gradient of one head's norm output, into the gradient of its input x, in place.
static inline void head_norm_backward(float *dn, const float *x, const float *w, int64_t HD, double eps) {
    const float rstd = rms_reciprocal(x, HD, eps);
    double dot = 0;
    for (int64_t i = 0; i < HD; i++) dot += (double)(dn[i] * w[i]) * (x[i] * rstd);
    const float mean = (float)(dot / (double)HD);
    for (int64_t i = 0; i < HD; i++) dn[i] = rstd * (dn[i] * w[i] - x[i] * rstd * mean);
}

// Turns dout, the gradient of the rotated qkv, into dqkv, the gradient of the projection's output `qkv`; dqkv may be
// dout. Sets dq_norm and dk_norm [HD] to the gradients of the norms' weights, summed over all rows and heads; without
// QK-norm they are not used.
static inline void qknorm_rope_backward_reference(float *dqkv, float *dq_norm, float *dk_norm, const float *dout,
                                                  const float *qkv, const float *q_norm, const float *k_norm,
                                                  const float *table, const Dims *d, double eps, Rounding rounding) {
    const int64_t heads = d->NH + 2 * d->NKV;
    float *dn = (float *)xrealloc(NULL, (size_t)(d->R * heads * d->HD) * sizeof(float));
    rope_backward_rotate(dn, dout, table, d);
    if (q_norm) {
        head_norm_wgrad(dq_norm, dn, qkv, 0, d->NH, d, eps, rounding);
        head_norm_wgrad(dk_norm, dn, qkv, d->NH, d->NH + d->NKV, d, eps, rounding);
    }
    PARALLEL_FOR
    for (int64_t row = 0; row < d->R; row++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = (row * heads + h) * d->HD;
            const float *w = h < d->NH ? q_norm : k_norm;
            if (w && h < d->NH + d->NKV) head_norm_backward(dn + at, qkv + at, w, d->HD, eps);
            for (int64_t i = 0; i < d->HD; i++) dqkv[at + i] = round_to(dn[at + i], rounding);
        }
    free(dn);
}

#endif
