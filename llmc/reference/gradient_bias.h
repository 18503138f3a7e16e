// The bias of gradients: estimates from inner products over micro-batches, with jackknife intervals, in plain C.
//
// g_i is a tensor's gradient of micro-batch i of N, and g_i + e_i the same gradient in another arithmetic. G and E are
// the sums over all micro-batches. Two micro-batches have no noise in common, so a mean over pairs i != j has none:
//     squared bias           |b|^2 = (|E|^2 - sum |e_i|^2) / (N (N - 1)), where |E / N|^2 would count noise as bias
//     squared mean gradient  |g|^2, from G and g_i alike
//     along                  <b, g> / |g|^2: the relative error of the gradient's scale
//     across                 |b|^2 - along^2 |g|^2: the squared bias that no scale makes
// These are U-statistics of degree 2 (Hoeffding 1948) and ratios of them. Their intervals are those of the jackknife
// (Efron and Stein 1981). Where the bias is zero it makes the interval of |b|^2 too wide, by a factor of 1.4.
#ifndef LLMC_REFERENCE_GRADIENT_BIAS_H
#define LLMC_REFERENCE_GRADIENT_BIAS_H

#include <math.h>

#include "../base/utils.h"

// Inner products of a tensor's e_i and g_i with each other, with E and G, and with the E of the checkpoint before.
enum { BIAS_EE, BIAS_GG, BIAS_EG, BIAS_OWN, BIAS_E_SUM = BIAS_OWN, BIAS_G_SUM, BIAS_CROSS, BIAS_BEFORE, BIAS_TERMS };

// How a micro-batch joins the sums E and G: it replaces them, is added, or leaves them as they are.
typedef enum { BIAS_STORE, BIAS_ADD, BIAS_READ } BiasJoin;

// Joins one element, and adds its products to `terms`. *E and *G are the sums with this micro-batch. BIAS_CROSS is
// e_i G + g_i E. `before` is the element of the E of the checkpoint before, or 0.
HOST_DEVICE static inline void bias_join(double terms[BIAS_TERMS], float plain, float other, float *E, float *G,
                                         float before, BiasJoin join) {
    const float error = other - plain;
    if (join != BIAS_READ) {
        *E = join == BIAS_ADD ? *E + error : error;
        *G = join == BIAS_ADD ? *G + plain : plain;
    }
    const double e = error, g = plain;
    terms[BIAS_EE] += e * e, terms[BIAS_GG] += g * g, terms[BIAS_EG] += e * g;
    terms[BIAS_E_SUM] += e * *E, terms[BIAS_G_SUM] += g * *G, terms[BIAS_CROSS] += e * *G + g * *E;
    terms[BIAS_BEFORE] += e * before;
}

// Statistics of a tensor. BIAS_NOISE is the squared bias relative to the gradient's variance over micro-batches;
// BIAS_INNER the inner product with the bias of the checkpoint before.
enum {
    BIAS_SQUARED,
    BIAS_GRADIENT,
    BIAS_ALONG,
    BIAS_ACROSS,
    BIAS_NOISE,
    BIAS_INNER,
    BIAS_ERROR_VARIANCE,
    BIAS_GRADIENT_VARIANCE,
    BIAS_STATISTICS
};

// Computes the statistics of n micro-batches from the sums of their terms. BIAS_E_SUM, BIAS_G_SUM and BIAS_CROSS are
// then |E|^2, |G|^2 and 2 <E, G>.
static inline void bias_statistics(double out[BIAS_STATISTICS], const double sums[BIAS_TERMS], double n) {
    const double pairs = n * (n - 1), squared = (sums[BIAS_E_SUM] - sums[BIAS_EE]) / pairs,
                 gradient = (sums[BIAS_G_SUM] - sums[BIAS_GG]) / pairs,
                 inner = (sums[BIAS_CROSS] / 2 - sums[BIAS_EG]) / pairs;
    out[BIAS_SQUARED] = squared, out[BIAS_GRADIENT] = gradient;
    out[BIAS_ALONG] = inner / gradient, out[BIAS_ACROSS] = squared - inner * inner / gradient;
    out[BIAS_ERROR_VARIANCE] = sums[BIAS_EE] / n - squared;
    out[BIAS_GRADIENT_VARIANCE] = sums[BIAS_GG] / n - gradient;
    out[BIAS_NOISE] = squared / out[BIAS_GRADIENT_VARIANCE];
    out[BIAS_INNER] = sums[BIAS_BEFORE] / n / n;
}

// Computes the statistics of all n micro-batches but the one with these terms.
static inline void bias_statistics_without(double out[BIAS_STATISTICS], const double sums[BIAS_TERMS],
                                           const double terms[BIAS_TERMS], double n) {
    double rest[BIAS_TERMS];
    for (int k = 0; k < BIAS_TERMS; k++) rest[k] = sums[k] - terms[k];
    rest[BIAS_E_SUM] += terms[BIAS_EE] - terms[BIAS_E_SUM];  // |E - e|^2 = |E|^2 - 2 <e, E> + |e|^2
    rest[BIAS_G_SUM] += terms[BIAS_GG] - terms[BIAS_G_SUM];
    rest[BIAS_CROSS] += 2 * terms[BIAS_EG] - terms[BIAS_CROSS];
    bias_statistics(out, rest, n - 1);
    out[BIAS_INNER] *= (n - 1) / n;  // the sum of the checkpoint before still has n micro-batches
}

typedef struct {
    double estimate, low, high;
} BiasInterval;

// Returns the 97.5% quantile of Student's t, for 7 degrees of freedom or more (Cornish and Fisher; error below 0.002).
static inline double bias_t_quantile(double degrees) {
    const double z = 1.959963985, z3 = z * z * z, z5 = z3 * z * z, z7 = z5 * z * z;
    return z + (z3 + z) / (4 * degrees) + (5 * z5 + 16 * z3 + 3 * z) / (96 * degrees * degrees) +
           (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / (384 * degrees * degrees * degrees);
}

// Computes each statistic with its bias removed by the jackknife, and its 95% interval, from the terms of n
// micro-batches, which are `stride` apart. BIAS_INNER has micro-batches of two checkpoints: the noise of the other's is
// taken to be as large.
static inline void bias_jackknife(BiasInterval out[BIAS_STATISTICS], const double *terms, int64_t n, int64_t stride) {
    double sums[BIAS_TERMS] = {0}, all[BIAS_STATISTICS], mean[BIAS_STATISTICS] = {0}, square[BIAS_STATISTICS] = {0};
    double (*without)[BIAS_STATISTICS] = (double (*)[BIAS_STATISTICS])xcalloc((size_t)n, sizeof *without);
    for (int64_t i = 0; i < n; i++)
        for (int k = 0; k < BIAS_TERMS; k++) sums[k] += terms[i * stride + k];
    bias_statistics(all, sums, (double)n);
    for (int64_t i = 0; i < n; i++) {
        bias_statistics_without(without[i], sums, terms + i * stride, (double)n);
        for (int s = 0; s < BIAS_STATISTICS; s++) mean[s] += without[i][s] / (double)n;
    }
    for (int s = 0; s < BIAS_STATISTICS; s++) {
        for (int64_t i = 0; i < n; i++) square[s] += (without[i][s] - mean[s]) * (without[i][s] - mean[s]);
        const double variance = (double)(n - 1) / (double)n * square[s] * (s == BIAS_INNER ? 2 : 1),
                     half = bias_t_quantile((double)(n - 1)) * sqrt(variance),
                     estimate = s == BIAS_INNER ? all[s] : (double)n * all[s] - (double)(n - 1) * mean[s];
        out[s].estimate = estimate, out[s].low = estimate - half, out[s].high = estimate + half;
    }
    free(without);
}

#endif
