// RMSNorm (Zhang and Sennrich 2019) in plain C: y = x * rstd * w, rstd = 1 / sqrt(mean(x^2) + eps).
#ifndef LLMC_REFERENCE_RMSNORM_H
#define LLMC_REFERENCE_RMSNORM_H

#include <math.h>

#include "rounding.h"

static inline float rms_reciprocal(const float *x, int64_t C, double eps) {
    double squares = 0;
    for (int64_t c = 0; c < C; c++) squares += (double)x[c] * x[c];
    return (float)(1 / sqrt(squares / (double)C + eps));
}

// y [rows, C]; rstd [rows] is kept for backward (NULL: not wanted).
static inline void rmsnorm_forward_reference(float *y, float *rstd, const float *x, const float *w, int64_t rows,
                                             int64_t C, double eps, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++) {
        const float r = rms_reciprocal(x + i * C, C, eps);
        if (rstd) rstd[i] = r;
        for (int64_t c = 0; c < C; c++) y[i * C + c] = round_to(x[i * C + c] * r * w[c], rounding);
    }
}

// sum[i] = a[i] + b[i]; sum may be a or b.
static inline void residual_add(float *sum, const float *a, const float *b, int64_t n, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) sum[i] = round_to(a[i] + b[i], rounding);
}

// sum = residual + x, y = RMSNorm(sum): the add rounds, and the norm reads the rounded sum.
static inline void residual_rmsnorm_forward_reference(float *y, float *rstd, float *sum, const float *residual,
                                                      const float *x, const float *w, int64_t rows, int64_t C,
                                                      double eps, Rounding rounding) {
    residual_add(sum, residual, x, rows * C, rounding);
    rmsnorm_forward_reference(y, rstd, sum, w, rows, C, eps, rounding);
}

// With n = x * rstd and g = dy * w:  dx = dresidual + rstd * (g - n * mean(g * n)), rounded once;  dw = sum over rows
// of dy * n. dresidual [rows, C] is the gradient that reaches x on the residual path around the norm (NULL: none); dx
// may be dresidual itself.
static inline void rmsnorm_backward_reference(float *dx, float *dw, const float *dresidual, const float *dy,
                                              const float *x, const float *rstd, const float *w, int64_t rows,
                                              int64_t C, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t c = 0; c < C; c++) {
        double sum = 0;
        for (int64_t i = 0; i < rows; i++) sum += (double)dy[i * C + c] * (x[i * C + c] * rstd[i]);
        dw[c] = round_to((float)sum, rounding);
    }
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++) {
        const float *dyi = dy + i * C, *xi = x + i * C;
        const float r = rstd[i];
        double dot = 0;
        for (int64_t c = 0; c < C; c++) dot += (double)(dyi[c] * w[c]) * (xi[c] * r);
        const float mean = (float)(dot / (double)C);
        for (int64_t c = 0; c < C; c++) {
            float d = r * (dyi[c] * w[c] - xi[c] * r * mean);
            if (dresidual) d += dresidual[i * C + c];
            dx[i * C + c] = round_to(d, rounding);
        }
    }
}

#endif
