// Tests the estimates of a gradient's bias (reference/gradient_bias.h) on random vectors: against their definitions, as
// plain loops over pairs of micro-batches; their means over many trials against the truth; and how often the
// jackknife's intervals hold the truth.
#include "../../llmc/reference/gradient_bias.h"

#include "../../llmc/base/rng.h"
#include "lib/check.h"

enum { N = 24, D = 32, TRIALS = SANITIZED ? 50 : 3000 };

typedef struct {
    float plain[N][D], other[N][D], before[D];
    double terms[N][BIAS_TERMS];
    float errors[D], gradients[D];
} Trial;

// The truth: a mean gradient of length about 1, and a bias of `along` times it, with `across` at right angles to it.
// Errors grow with the gradient's noise, so that e and g are not independent.
static void draw(Trial *t, uint64_t seed, double along, double across) {
    for (int d = 0; d < D; d++) {
        const double mean = 1 / sqrt(D), side = (d % 2 ? 1 : -1) / sqrt(D);
        t->before[d] = (float)side;
        for (int i = 0; i < N; i++) {
            const uint64_t at = (uint64_t)(i * D + d);
            const double noise = 0.3 * rng_normal(rng_key(seed, 1), at), own = 0.1 * rng_normal(rng_key(seed, 2), at);
            t->plain[i][d] = (float)(mean + noise);
            t->other[i][d] = t->plain[i][d] + (float)(along * mean + across * side + 0.2 * noise + own);
        }
    }
}

static void pass(Trial *t, bool first) {
    memset(t->terms, 0, sizeof t->terms);
    for (int i = 0; i < N; i++)
        for (int d = 0; d < D; d++)
            bias_join(t->terms[i], t->plain[i][d], t->other[i][d], &t->errors[d], &t->gradients[d], t->before[d],
                      !first ? BIAS_READ
                      : i    ? BIAS_ADD
                             : BIAS_STORE);
}

static void estimate(BiasInterval x[BIAS_STATISTICS], Trial *t, uint64_t seed, double along, double across) {
    draw(t, seed, along, across);
    pass(t, true);
    pass(t, false);
    bias_jackknife(x, t->terms[0], N, BIAS_TERMS);
}

// The mean over pairs i != j, of micro-batches other than `left_out`, of <a_i, b_j>; a and b are e or g.
static double mean_of_pairs(const Trial *t, bool a_is_error, bool b_is_error, int left_out) {
    double sum = 0;
    int pairs = 0;
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            if (i == j || i == left_out || j == left_out) continue;
            pairs++;
            for (int d = 0; d < D; d++) {
                const double a = a_is_error ? t->other[i][d] - t->plain[i][d] : t->plain[i][d];
                sum += a * (b_is_error ? t->other[j][d] - t->plain[j][d] : t->plain[j][d]);
            }
        }
    return sum / pairs;
}

static bool near(double a, double b) { return fabs(a - b) < 2e-5 * (1 + fabs(b)); }  // the sums are fp32

static void test_definitions(void) {
    Trial t;
    BiasInterval x[BIAS_STATISTICS];
    estimate(x, &t, 1, 0.1, 0.2);
    double along = 0, values[N], mean = 0, squares = 0;
    for (int k = -1; k < N; k++) {
        const double squared = mean_of_pairs(&t, true, true, k), gradient = mean_of_pairs(&t, false, false, k);
        const double inner = mean_of_pairs(&t, true, false, k);
        if (k >= 0) mean += values[k] = squared - inner * inner / gradient;
        if (k >= 0) continue;
        along = inner / gradient;
        CHECK(near(x[BIAS_SQUARED].estimate, squared), "squared bias %g, %g", x[BIAS_SQUARED].estimate, squared);
        CHECK(near(x[BIAS_GRADIENT].estimate, gradient), "squared gradient %g", gradient);
    }
    for (int k = 0; k < N; k++) squares += (values[k] - mean / N) * (values[k] - mean / N);
    const double half = bias_t_quantile(N - 1) * sqrt((N - 1.0) / N * squares);
    CHECK(near(x[BIAS_ACROSS].high - x[BIAS_ACROSS].estimate, half), "the jackknife's interval of across, %g", half);
    CHECK(fabs(x[BIAS_ALONG].estimate - along) < 0.01, "along %g, without the jackknife's correction %g",
          x[BIAS_ALONG].estimate, along);
    double variance = 0, inner = 0;
    for (int d = 0; d < D; d++) {
        double sum = 0, square = 0;
        for (int i = 0; i < N; i++) sum += t.plain[i][d], square += (double)t.plain[i][d] * t.plain[i][d];
        for (int i = 0; i < N; i++) inner += ((double)t.other[i][d] - t.plain[i][d]) * t.before[d] / N / N;
        variance += (square - sum * sum / N) / (N - 1);
    }
    CHECK(near(x[BIAS_GRADIENT_VARIANCE].estimate, variance), "variance of the gradient %g", variance);
    CHECK(near(x[BIAS_INNER].estimate, inner), "inner product with the bias before %g, %g", x[BIAS_INNER].estimate,
          inner);
}

// Bounds: 5 standard errors of the mean; for coverage 1.5% below 95%, of which 3,000 trials give 1.2% at 3 standard
// errors. Where the bias is zero, the interval of its square is too wide.
static void test_trials(double along, double across) {
    static Trial t;
    const int tested[] = {BIAS_SQUARED, BIAS_GRADIENT, BIAS_ALONG, BIAS_ACROSS, BIAS_NOISE};
    const double squared = along * along + across * across,
                 truth[BIAS_STATISTICS] = {squared, 1, along, across * across, squared / (0.09 * D)};
    for (size_t k = 0; k < sizeof tested / sizeof *tested; k++) {
        double sum = 0, squares = 0, covered = 0;
        for (int trial = 0; trial < TRIALS; trial++) {
            BiasInterval x[BIAS_STATISTICS];
            estimate(x, &t, (uint64_t)trial, along, across);
            const BiasInterval s = x[tested[k]];
            sum += s.estimate, squares += s.estimate * s.estimate;
            covered += s.low <= truth[tested[k]] && truth[tested[k]] <= s.high;
        }
        const double mean = sum / TRIALS, error = sqrt((squares / TRIALS - mean * mean) / TRIALS);
        CHECK(fabs(mean - truth[tested[k]]) < 5 * error, "statistic %d, bias %g and %g: mean %g +- %g, truth %g",
              tested[k], along, across, mean, error, truth[tested[k]]);
        CHECK(covered / TRIALS > (SANITIZED ? 0.8 : 0.935),
              "statistic %d, bias %g and %g: %.3f of the intervals hold it", tested[k], along, across,
              covered / TRIALS);
    }
}

int main(void) {
    test_definitions();
    CHECK(fabs(bias_t_quantile(7) - 2.364624) < 2e-3 && fabs(bias_t_quantile(63) - 1.998341) < 1e-5, "quantiles of t");
    test_trials(0, 0);
    test_trials(0.1, 0.2);
    test_trials(-0.3, 0);
    return check_report();
}
