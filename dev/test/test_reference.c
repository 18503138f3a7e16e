// Tests the operations of a model in llmc/reference/, GEMMs of every recipe, AdamW and initial weights: forward
// compared with a plain double-precision version in this file, backward with central differences of that version,
// rounding, odd sizes and special values. Also tests that attention, a gradient norm and wgrad GEMMs give the same bits
// with any number of threads from 1 to 5.
#include <omp.h>

#include "../../llmc/reference/adamw.h"
#include "../../llmc/reference/attention.h"
#include "../../llmc/reference/cross_entropy.h"
#include "../../llmc/reference/embedding.h"
#include "../../llmc/reference/initialize.h"
#include "../../llmc/reference/linear.h"
#include "../../llmc/reference/rmsnorm.h"
#include "../../llmc/reference/rope.h"
#include "../../llmc/reference/swiglu.h"
#include "lib/check.h"
#include "lib/linear_gemms.h"

// Bound of the relative error of fp32 results against double: norm of the difference over norm of the double results.
// The largest error of these tests is 5.1e-7. It comes from sums of 1,100 terms.
#define FP32_TOLERANCE 5e-6

static float *random_floats(int64_t n, uint64_t stream, float scale) {
    float *x = (float *)xcalloc((size_t)n, sizeof(float));
    for (int64_t i = 0; i < n; i++) x[i] = rng_normal(rng_key(7, stream), (uint64_t)i) * scale;
    return x;
}

static float *zeros(int64_t n) { return (float *)xcalloc((size_t)n, sizeof(float)); }

// An operation in double. `in` holds all differentiable inputs in sequence.
typedef void (*Forward)(double *out, const double *in, const void *context);

// Checks an fp32 result, and the fp32 gradient of sum(out * g) with respect to all inputs.
static void check_operation(const char *name, Forward forward, const void *context, const float *in, int64_t num_in,
                            const float *out, const float *g, int64_t num_out, const float *gradient) {
    double *x = (double *)xcalloc((size_t)num_in, sizeof(double)),
           *y = (double *)xcalloc((size_t)num_out, sizeof(double));
    float *expected = zeros(max_i64(num_in, num_out));
    for (int64_t i = 0; i < num_in; i++) x[i] = in[i];
    forward(y, x, context);
    for (int64_t i = 0; i < num_out; i++) expected[i] = (float)y[i];
    double error = check_relative_error(out, expected, num_out);
    CHECK(error < FP32_TOLERANCE, "%s forward agrees with the version in double; relative error %g", name, error);
    for (int64_t i = 0; i < num_in; i++) {
        const double at = x[i], h = 1e-5;
        double sum[2] = {0, 0};
        for (int side = 0; side < 2; side++) {
            x[i] = at + (side ? h : -h);
            forward(y, x, context);
            for (int64_t j = 0; j < num_out; j++) sum[side] += y[j] * g[j];
        }
        x[i] = at;
        expected[i] = (float)((sum[1] - sum[0]) / (2 * h));
    }
    error = check_relative_error(gradient, expected, num_in);
    CHECK(error < 2 * FP32_TOLERANCE, "%s backward agrees with central differences; relative error %g", name, error);
    free(x), free(y), free(expected);
}

static void check_rounded(const char *name, const float *rounded, const float *exact, int64_t n) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) wrong += float_bits(rounded[i]) != float_bits(bf16_round(exact[i]));
    CHECK(wrong == 0, "%s: all values are the fp32 result rounded once to bf16; %lld of %lld are not", name,
          (long long)wrong, (long long)n);
}

static void linear_double(double *y, const double *in, const void *context) {
    const int64_t *n = (const int64_t *)context, rows = n[0], C = n[1], O = n[2];
    const double *x = in, *w = in + rows * C, *b = w + O * C;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t o = 0; o < O; o++) {
            y[i * O + o] = b[o];
            for (int64_t c = 0; c < C; c++) y[i * O + o] += x[i * C + c] * w[o * C + c];
        }
}

static void test_linear(int64_t rows, int64_t C, int64_t O) {
    const int64_t n[] = {rows, C, O}, num_in = rows * C + O * C + O;
    float *in = random_floats(num_in, 1, 1), *g = random_floats(rows * O, 2, 1), *y = zeros(rows * O),
          *yr = zeros(rows * O), *d = zeros(num_in);
    float *w = in + rows * C, *b = w + O * C;
    linear_forward_reference(y, in, w, b, rows, C, O, ROUND_NONE);
    linear_dgrad_reference(d, g, w, rows, C, O, ROUND_NONE);
    linear_wgrad_reference(d + rows * C, g, in, rows, C, O, ROUND_NONE);
    bias_backward_reference(d + rows * C + O * C, g, rows, O, ROUND_NONE);
    check_operation("linear", linear_double, n, in, num_in, y, g, rows * O, d);
    linear_forward_reference(yr, in, w, b, rows, C, O, ROUND_BF16);
    check_rounded("linear", yr, y, rows * O);
    // The weight gradient replaces what was there before.
    float *dw = random_floats(O * C, 3, 1);
    linear_wgrad_reference(dw, g, in, rows, C, O, ROUND_BF16);
    check_rounded("weight gradient", dw, d + rows * C, O * C);
    free(in), free(g), free(y), free(yr), free(d), free(dw);
}

static void rmsnorm_double(double *y, const double *in, const void *context) {
    const int64_t *n = (const int64_t *)context, rows = n[0], C = n[1];
    const double *w = in + rows * C;
    for (int64_t i = 0; i < rows; i++) {
        double s = 0;
        for (int64_t c = 0; c < C; c++) s += in[i * C + c] * in[i * C + c];
        for (int64_t c = 0; c < C; c++)
            y[i * C + c] = in[i * C + c] / sqrt(s / (double)C + 1e-5) * w[c] +
                           in[i * C + c];  // plus the residual that bypasses the norm
    }
}

static void test_rmsnorm(int64_t rows, int64_t C) {
    const int64_t n[] = {rows, C}, num_in = rows * C + C;
    float *in = random_floats(num_in, 3, 1), *g = random_floats(rows * C, 4, 1), *y = zeros(rows * C),
          *yr = zeros(rows * C), *d = zeros(num_in), *rstd = zeros(rows);
    float *w = in + rows * C;
    rmsnorm_forward_reference(y, rstd, in, w, rows, C, 1e-5, ROUND_NONE);
    rmsnorm_forward_reference(yr, rstd, in, w, rows, C, 1e-5, ROUND_BF16);
    check_rounded("rmsnorm", yr, y, rows * C);
    residual_add(y, y, in, rows * C, ROUND_NONE);
    rmsnorm_backward_reference(d, d + rows * C, g, g, in, rstd, w, rows, C, ROUND_NONE);
    check_operation("rmsnorm", rmsnorm_double, n, in, num_in, y, g, rows * C, d);
    float *dr = zeros(num_in);
    rmsnorm_backward_reference(dr, dr + rows * C, g, g, in, rstd, w, rows, C, ROUND_BF16);
    check_rounded("rmsnorm backward", dr, d, num_in);
    // The fused form rounds the sum before the norm reads it.
    float *sum = zeros(rows * C), *fused = zeros(rows * C);
    residual_rmsnorm_forward_reference(fused, rstd, sum, in, g, w, rows, C, 1e-5, ROUND_BF16);
    residual_add(yr, in, g, rows * C, ROUND_NONE);
    check_rounded("residual add", sum, yr, rows * C);
    rmsnorm_forward_reference(y, rstd, sum, w, rows, C, 1e-5, ROUND_NONE);
    check_rounded("residual add and rmsnorm", fused, y, rows * C);
    free(in), free(g), free(y), free(yr), free(d), free(dr), free(rstd), free(sum), free(fused);
}

static void swiglu_double(double *y, const double *in, const void *context) {
    const int64_t *n = (const int64_t *)context, rows = n[0], F = n[1];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t f = 0; f < F; f++)
            y[i * F + f] = in[i * 2 * F + f] / (1 + exp(-in[i * 2 * F + f])) * in[i * 2 * F + F + f];
}

static void test_swiglu(void) {
    const int64_t n[] = {5, 7}, rows = n[0], F = n[1];
    float *in = random_floats(rows * 2 * F, 5, 2), *g = random_floats(rows * F, 6, 1), *y = zeros(rows * F),
          *yr = zeros(rows * F), *d = zeros(rows * 2 * F);
    swiglu_forward_reference(y, in, rows, F, ROUND_NONE);
    swiglu_backward_reference(d, g, in, rows, F, ROUND_NONE);
    check_operation("swiglu", swiglu_double, n, in, rows * 2 * F, y, g, rows * F, d);
    swiglu_forward_reference(yr, in, rows, F, ROUND_BF16);
    check_rounded("swiglu", yr, y, rows * F);
    float large[] = {-200, 200, 3, 3}, out[2];  // exp(-x) overflows at x = -200
    swiglu_forward_reference(out, large, 1, 2, ROUND_NONE);
    CHECK(out[0] == 0 && out[1] == 600, "swiglu with a gate of +-200 is 0 and 600; found %g %g", (double)out[0],
          (double)out[1]);
    float dlarge[4], ones[] = {1, 1};
    swiglu_backward_reference(dlarge, ones, large, 1, 2, ROUND_NONE);
    CHECK(dlarge[0] == 0 && dlarge[1] == 3 && dlarge[2] == 0 && dlarge[3] == 200,
          "the gradient of swiglu with a gate of +-200 is 0, 3, 0 and 200; found %g %g %g %g", (double)dlarge[0],
          (double)dlarge[1], (double)dlarge[2], (double)dlarge[3]);
    free(in), free(g), free(y), free(yr), free(d);
}

// Sizes of an attention call. Other fields stay 0.
static Dims attention_sizes(int64_t B, int64_t T, int64_t NH, int64_t NKV, int64_t HD) {
    Dims d;
    memset(&d, 0, sizeof d);
    d.B = B, d.T = T, d.R = B * T, d.NH = NH, d.NKV = NKV, d.HD = HD;
    return d;
}

typedef struct {
    Dims d;
    bool norm;
    const ModelConfig *m;
} HeadContext;

static void rope_double(double *y, const double *in, const void *context) {
    const HeadContext *c = (const HeadContext *)context;
    const Dims d = c->d;
    const int64_t heads = d.NH + 2 * d.NKV, half = d.HD / 2;
    const double *norms = in + d.B * d.T * heads * d.HD;
    for (int64_t row = 0; row < d.B * d.T; row++)
        for (int64_t h = 0; h < heads; h++) {
            const double *x = in + (row * heads + h) * d.HD;
            double *out = y + (row * heads + h) * d.HD, n[256], squares = 0;
            for (int64_t i = 0; i < d.HD; i++) squares += x[i] * x[i];
            for (int64_t i = 0; i < d.HD; i++)
                n[i] = c->norm && h < d.NH + d.NKV
                           ? x[i] / sqrt(squares / (double)d.HD + 1e-6) * norms[(h < d.NH ? 0 : d.HD) + i]
                           : x[i];
            for (int64_t i = 0; i < half; i++) {
                double angle = h < d.NH + d.NKV ? (double)(row % d.T) * rope_inverse_frequency(c->m, i) : 0;
                out[i] = n[i] * cos(angle) - n[i + half] * sin(angle);
                out[i + half] = n[i + half] * cos(angle) + n[i] * sin(angle);
            }
        }
}

static void test_rope(bool norm) {
    ModelConfig m;
    model_config_preset(&m, "llama3.1-8b");
    m.head_dim = 6;
    const Dims d = attention_sizes(2, 5, 4, 2, 6);
    const HeadContext context = {d, norm, &m};
    const int64_t n = d.B * d.T * (d.NH + 2 * d.NKV) * d.HD, num_in = n + (norm ? 2 * d.HD : 0);
    float *in = random_floats(num_in, 8, 1), *g = random_floats(n, 9, 1), *y = zeros(n), *yr = zeros(n),
          *grad = zeros(num_in);
    float *table = zeros(d.T * d.HD);
    rope_table_fill(table, &m, d.T);
    const float *q_norm = norm ? in + n : NULL, *k_norm = norm ? in + n + d.HD : NULL;
    qknorm_rope_forward_reference(y, in, q_norm, k_norm, table, &d, 1e-6, ROUND_NONE);
    qknorm_rope_backward_reference(grad, grad + n, grad + n + d.HD, g, in, q_norm, k_norm, table, &d, 1e-6, ROUND_NONE);
    check_operation(norm ? "QK-norm and RoPE" : "RoPE", rope_double, &context, in, num_in, y, g, n, grad);
    qknorm_rope_forward_reference(yr, in, q_norm, k_norm, table, &d, 1e-6, ROUND_BF16);
    for (int64_t row = 0; row < d.B * d.T; row++)  // v is copied without rounding: in training it is bf16 already
        for (int64_t i = (d.NH + d.NKV) * d.HD; i < (d.NH + 2 * d.NKV) * d.HD; i++)
            yr[row * (d.NH + 2 * d.NKV) * d.HD + i] = bf16_round(yr[row * (d.NH + 2 * d.NKV) * d.HD + i]);
    check_rounded("QK-norm and RoPE", yr, y, n);
    // RoPE in place gives the same result.
    float *place = zeros(n);
    memcpy(place, in, (size_t)n * sizeof(float));
    qknorm_rope_forward_reference(place, place, q_norm, k_norm, table, &d, 1e-6, ROUND_NONE);
    CHECK(memcmp(place, y, (size_t)n * sizeof(float)) == 0, "RoPE in place gives equal bits");
    free(in), free(g), free(y), free(yr), free(grad), free(table), free(place);
}

static void attention_double(double *y, const double *in, const void *context) {
    const Dims d = ((const HeadContext *)context)->d;
    const int64_t width = (d.NH + 2 * d.NKV) * d.HD;
    double *p = (double *)xcalloc((size_t)d.T, sizeof(double));
    for (int64_t b = 0; b < d.B; b++)
        for (int64_t h = 0; h < d.NH; h++)
            for (int64_t t = 0; t < d.T; t++) {
                const int64_t kv = h / (d.NH / d.NKV);
                const double *q = in + (b * d.T + t) * width + h * d.HD, *k = in + b * d.T * width + (d.NH + kv) * d.HD,
                             *v = k + d.NKV * d.HD;
                double *out = y + ((b * d.T + t) * d.NH + h) * d.HD, sum = 0;
                for (int64_t i = 0; i < d.HD; i++) out[i] = 0;
                for (int64_t s = 0; s <= t; s++) {
                    p[s] = 0;
                    for (int64_t i = 0; i < d.HD; i++) p[s] += q[i] * k[s * width + i];
                    sum += p[s] = exp(p[s] / sqrt((double)d.HD));
                }
                for (int64_t s = 0; s <= t; s++)
                    for (int64_t i = 0; i < d.HD; i++) out[i] += p[s] / sum * v[s * width + i];
            }
    free(p);
}

// Without `gradients` it checks backward by one directional derivative, because central differences of all inputs would
// take too long.
static void test_attention(int64_t B, int64_t T, int64_t NH, int64_t NKV, int64_t HD, bool gradients) {
    const HeadContext context = {attention_sizes(B, T, NH, NKV, HD), false, NULL};
    const Dims d = context.d;
    const int64_t n = B * T * (NH + 2 * NKV) * HD, num_out = B * T * NH * HD;
    float *in = random_floats(n, 10, 1), *g = random_floats(num_out, 11, 1), *y = zeros(num_out),
          *lse = zeros(B * NH * T), *grad = zeros(n);
    attention_forward_reference(y, lse, in, &d, ROUND_NONE);
    attention_backward_reference(grad, g, in, y, lse, &d, ROUND_NONE);
    if (gradients) check_operation("attention", attention_double, &context, in, n, y, g, num_out, grad);
    else {
        double *x = (double *)xcalloc((size_t)n, sizeof(double)),
               *out = (double *)xcalloc((size_t)num_out, sizeof(double));
        for (int64_t i = 0; i < n; i++) x[i] = in[i];
        attention_double(out, x, &context);
        float *expected = zeros(num_out);
        for (int64_t i = 0; i < num_out; i++) expected[i] = (float)out[i];
        double error = check_relative_error(y, expected, num_out);
        CHECK(error < FP32_TOLERANCE,
              "attention forward at T %lld agrees with the version in double; relative error %g", (long long)T, error);
        // Directional derivative: moving by h along the gradient's direction changes the loss by h |gradient|.
        double norm = sqrt(squares_sum(grad, n)), sum[2] = {0, 0}, h = 1e-4;
        for (int side = 0; side < 2; side++) {
            for (int64_t i = 0; i < n; i++) x[i] = in[i] + (side ? h : -h) * grad[i] / norm;
            attention_double(out, x, &context);
            for (int64_t i = 0; i < num_out; i++) sum[side] += out[i] * g[i];
        }
        double slope = (sum[1] - sum[0]) / (2 * h);
        CHECK(fabs(slope / norm - 1) < 1e-5,
              "attention backward at T %lld gives the slope of the loss along the gradient: %g, gradient norm %g",
              (long long)T, slope, norm);
        free(x), free(out), free(expected);
    }
    // Compares attention that rounds operands and results to bf16 with attention in fp32. bf16 has 8 significant bits:
    // P and the result are each off by at most 2^-8 of their value, about 2^-9 in root mean square.
    float *yr = zeros(num_out), *gr = zeros(n);
    attention_forward_reference(yr, lse, in, &d, ROUND_BF16);
    double error = check_relative_error(yr, y, num_out);
    CHECK(error < 0.004 && error > 0, "attention in bf16 is near attention in fp32; relative error %g", error);
    attention_backward_reference(gr, g, in, yr, lse, &d, ROUND_BF16);
    error = check_relative_error(gr, grad, n);
    CHECK(error < 0.008 && error > 0, "attention backward in bf16 is near that in fp32; relative error %g", error);
    free(in), free(g), free(y), free(lse), free(grad), free(yr), free(gr);
}

static void cross_entropy_double(double *y, const double *in, const void *context) {
    const int32_t *targets = (const int32_t *)context;
    for (int64_t i = 0; i < 4; i++) {
        double sum = 0;
        for (int64_t v = 0; v < 11; v++) sum += exp(in[i * 11 + v]);
        y[i] = targets[i] < 0 ? 0 : log(sum) - in[i * 11 + targets[i]];
    }
}

// The correlation of n differences that are 0 on average with those `distance` after them, in standard errors.
static double lag_correlation(const float *steps, int64_t n, int64_t distance) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i + distance < n; i++) {
        const double product = (double)steps[i] * (double)steps[i + distance];
        sum += product, squares += product * product;
    }
    return sum / sqrt(squares);
}

// Gradients for FP8 have fewer mantissa bits. Each is a neighbour of that in bf16, and the mean of their differences,
// in units between neighbours, is 0 within 5 standard errors of at most 0.5 each. Rounding to nearest gives -0.1 and
// -0.2: the probabilities lie in the lower part of an interval. Differences of columns of a vector of 8, of vectors and
// of rows do not correlate, within 5 standard errors.
static void test_cross_entropy_rounding(void) {
    enum { ROWS = 64, COLUMNS = 1024, N = ROWS * COLUMNS };
    float *in = zeros(N), *plain = zeros(N), *rounded = zeros(N), *steps = zeros(N);
    int32_t targets[ROWS];
    for (int r = 0; r < ROWS; r++) targets[r] = r % 8 ? r : -1;
    for (int64_t i = 0; i < N; i++) in[i] = 0.05f * rng_uniform(3, (uint64_t)i);
    in[5 * COLUMNS + 7] = bf16_to_float(0x7fff);  // a NaN that a carry would make -0
    cross_entropy_backward(plain, in, targets, ROWS, COLUMNS, 1.05f, 0, ROUND_BF16);
    for (int format = 0; format < 2; format++) {
        const uint32_t dropped = format ? 0x000f000f : 0x001f001f;
        double sum = 0, n = 0;
        int64_t wrong = 0;
        cross_entropy_backward(rounded, in, targets, ROWS, COLUMNS, 1.05f, dropped, ROUND_BF16);
        for (int64_t i = 0; i < N; i++) {
            const uint32_t x = float_bits(plain[i]) >> 16, y = float_bits(rounded[i]) >> 16;
            const double step = ((double)y - (double)x) / (1 + (dropped & 0xffff));
            const bool row_of_nan = i / COLUMNS == 5, ignored = i / COLUMNS % 8 == 0, probability = plain[i] > 0;
            if (row_of_nan || ignored) wrong += row_of_nan ? !isnan(rounded[i]) : rounded[i] != 0;
            else wrong += (y & dropped & 0xffff) || fabs(step) >= 1;
            steps[i] = probability ? (float)step : 0;
            if (probability) sum += step, n++;
        }
        CHECK(wrong == 0, "gradients for FP8 are neighbours, and NaN and 0 stay; %lld of them do not",
              (long long)wrong);
        CHECK(fabs(sum / n) < 5 * 0.5 / sqrt(n), "they are rounded without bias: %g of an interval", sum / n);
        for (int64_t d = 1; d <= N / 2; d = d < 8 ? d + 1 : 2 * d)
            CHECK(fabs(lag_correlation(steps, N, d)) < 5, "their rounding does not correlate with that %lld after: %g",
                  (long long)d, lag_correlation(steps, N, d));
    }
    free(in), free(plain), free(rounded), free(steps);
}

static void test_cross_entropy(void) {
    const int32_t targets[] = {3, 0, -1, 10};
    float *in = random_floats(44, 12, 3), y[4], d[44], g[] = {0.25f, 0.25f, 0.25f, 0.25f};
    cross_entropy_forward(y, in, targets, 4, 11);
    cross_entropy_backward(d, in, targets, 4, 11, 0.25f, 0, ROUND_NONE);
    check_operation("cross-entropy", cross_entropy_double, targets, in, 44, y, g, 4, d);
    float dr[44];
    cross_entropy_backward(dr, in, targets, 4, 11, 0.25f, 0, ROUND_BF16);
    check_rounded("cross-entropy backward", dr, d, 44);
    float large[] = {90, -90, 90, 0};  // exp(90) overflows fp32
    int32_t target = 1;
    cross_entropy_forward(y, large, &target, 1, 4);
    CHECK(fabsf(y[0] - 180.6931472f) < 1e-4f, "the loss of logits +-90 does not overflow; found %g", (double)y[0]);
    cross_entropy_backward(d, large, &target, 1, 4, 1, 0, ROUND_NONE);
    CHECK(fabsf(d[0] - 0.5f) < 1e-5f && d[1] == -1 && d[3] < 1e-30f,
          "the gradient of logits +-90 does not overflow; found %g %g %g", (double)d[0], (double)d[1], (double)d[3]);
    free(in);
}

static void test_embedding(void) {
    const int32_t tokens[] = {2, 0, 2, 4, 2};
    float *table = random_floats(15, 13, 1), *dx = random_floats(15, 14, 1), x[15], d[15], twice[15];
    embedding_forward_reference(x, table, tokens, 5, 3);
    for (int i = 0; i < 5; i++)
        CHECK(memcmp(x + 3 * i, table + 3 * tokens[i], 12) == 0, "row %d is its token's row of the table", i);
    for (int i = 0; i < 15; i++) d[i] = 77;  // old values; rows of ids that do not occur must become 0
    embedding_backward_reference(d, dx, tokens, 5, 3, 5, false, ROUND_NONE);
    for (int id = 0; id < 5; id++)
        for (int c = 0; c < 3; c++) {
            double sum = 0;
            for (int i = 0; i < 5; i++) sum += tokens[i] == id ? dx[3 * i + c] : 0;
            CHECK(d[3 * id + c] == (float)sum, "the gradient of id %d is the sum over the id's rows", id);
        }
    memcpy(twice, d, sizeof d);
    embedding_backward_reference(twice, dx, tokens, 5, 3, 5, true, ROUND_NONE);
    for (int i = 0; i < 15; i++)
        CHECK(fabsf(twice[i] - 2 * d[i]) < 1e-6f, "element %d is added to the earlier embedding gradient", i);
    free(table), free(dx);
}

// ---- GEMMs of every recipe.

// x [rows, K], w [N, K], dy [rows, N]: bf16 values with some outliers. The tests take sizes that are no multiples of a
// scale block.
typedef struct {
    int64_t rows, N, K;
    float *tensor[NUM_TENSORS];
} LinearCase;

static LinearCase linear_case(int64_t rows, int64_t N, int64_t K) {
    const int64_t sizes[NUM_TENSORS] = {N * K, rows * K, rows * N};
    const float scales[NUM_TENSORS] = {0.02f, 3, 1e-4f};
    LinearCase c = {rows, N, K, {NULL, NULL, NULL}};
    for (int i = 0; i < NUM_TENSORS; i++) {
        c.tensor[i] = random_floats(sizes[i], 15 + (uint64_t)i, scales[i]);
        for (int64_t e = 3; e < sizes[i]; e += 97) c.tensor[i][e] *= 40;
        round_array(c.tensor[i], sizes[i], ROUND_BF16);
    }
    return c;
}

static void linear_case_free(LinearCase *c) {
    for (int i = 0; i < NUM_TENSORS; i++) free(c->tensor[i]);
}

// A GEMM: its two operands, each of rowwise or columnwise data, and its sizes.
typedef struct {
    TensorRole a, b;
    TensorUsage copy_a, copy_b;
    int64_t M, N, depth;
} Product;

static Product product_of(const LinearCase *c, int gemm) {
    const Product products[NUM_GEMMS] = {{TENSOR_X, TENSOR_W, ROWWISE, ROWWISE, c->rows, c->N, c->K},
                                         {TENSOR_DY, TENSOR_W, ROWWISE, COLUMNWISE, c->rows, c->K, c->N},
                                         {TENSOR_DY, TENSOR_X, COLUMNWISE, COLUMNWISE, c->N, c->K, c->rows}};
    return products[gemm];
}

static LinearOperand case_operand(const LinearCase *c, const Recipe *r, TensorRole tensor, TensorUsage copy,
                                  float scale) {
    const int64_t rows = tensor == TENSOR_W ? c->N : c->rows, cols = tensor == TENSOR_DY ? c->N : c->K;
    return linear_operand(c->tensor[tensor], rows, cols, copy, recipe_granularity(r, tensor, copy), r->rule,
                          tensor == TENSOR_DY ? r->dy_format : FP8_E4M3, scale);
}

static void case_product(float *out, const LinearCase *c, const Recipe *r, int gemm, const float *bias,
                         Rounding rounding) {
    const Product p = product_of(c, gemm);
    LinearOperand a = case_operand(c, r, p.a, p.copy_a, 0), b = case_operand(c, r, p.b, p.copy_b, 0);
    linear_product(out, a, b, p.M, p.N, p.depth, bias, rounding);
    linear_operand_free(&a), linear_operand_free(&b);
}

// Returns an operand as numbers [outer, depth]: bf16 values, or each FP8 code times its scale_inv.
static double *copy_values(const LinearCase *c, const Recipe *r, TensorRole tensor, TensorUsage copy) {
    const int64_t rows = tensor == TENSOR_W ? c->N : c->rows, cols = tensor == TENSOR_DY ? c->N : c->K;
    const UsageShape s = usage_shape(rows, cols, copy);
    const int64_t outer = s.outer, depth = s.depth;
    const ScaleGranularity g = recipe_granularity(r, tensor, copy);
    const Fp8Format format = tensor == TENSOR_DY ? r->dy_format : FP8_E4M3;
    double *values = (double *)xcalloc((size_t)(outer * depth), sizeof(double));
    uint8_t *codes = (uint8_t *)xcalloc((size_t)(outer * depth), 1);
    void *scales = xcalloc((size_t)max_i64(1, scale_bytes(g, outer, depth)), 1);
    if (g != NO_SCALE) quantize_copy(codes, scales, c->tensor[tensor], s, g, r->rule, format, 0);
    for (int64_t i = 0; i < outer; i++)
        for (int64_t k = 0; k < depth; k++) {
            const double code = fp8_to_float(codes[i * depth + k], format);
            values[i * depth + k] = g == NO_SCALE
                                        ? (double)c->tensor[tensor][i * s.outer_stride + k * s.depth_stride]
                                        : code * (double)scale_load(g, scales, scale_index(g, i, k, outer, depth));
        }
    free(codes), free(scales);
    return values;
}

static void test_recipe_products(int recipe) {
    const Recipe *r = recipe_row(recipe);
    LinearCase c = linear_case(45, 70, 150);
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        const Product p = product_of(&c, gemm);
        const int64_t n = p.M * p.N;
        float *got = zeros(n), *rounded = zeros(n), *expected = zeros(n), *plain = zeros(n),
              *bias = random_floats(p.N, 30, 0.1f);
        double *a = copy_values(&c, r, p.a, p.copy_a), *b = copy_values(&c, r, p.b, p.copy_b);
        for (int64_t i = 0; i < p.M; i++)
            for (int64_t j = 0; j < p.N; j++) {
                double sum = 0;
                for (int64_t k = 0; k < p.depth; k++) sum += a[i * p.depth + k] * b[j * p.depth + k];
                expected[i * p.N + j] = (float)sum;
            }
        case_product(got, &c, r, gemm, NULL, ROUND_NONE);
        double error = check_relative_error(got, expected, n);
        CHECK(error < FP32_TOLERANCE, "%s, GEMM %d agrees with its operands' product in double; relative error %g",
              r->name, gemm, error);
        case_product(plain, &c, recipe_row(RECIPE_BF16), gemm, NULL, ROUND_NONE);
        error = check_relative_error(got, plain, n);
        // E4M3 has 3 bits of mantissa, which cost about 2.5 percent of each operand. E5M2 has 2 bits and costs twice
        // that.
        if (recipe_is_fp8(r, (GemmKind)gemm))
            CHECK(error > 0.005 && error < 0.08, "%s, GEMM %d in FP8 is near bf16, but not equal; relative error %g",
                  r->name, gemm, error);
        else CHECK(error == 0, "%s, GEMM %d in bf16 equals that of the bf16 recipe", r->name, gemm);
        case_product(rounded, &c, r, gemm, NULL, ROUND_BF16);
        check_rounded(r->name, rounded, got, n);
        for (int64_t i = 0; i < n; i++) expected[i] = got[i] + bias[i % p.N];
        case_product(rounded, &c, r, gemm, bias, ROUND_BF16);
        check_rounded("with bias", rounded, expected, n);
        free(got), free(rounded), free(expected), free(plain), free(bias), free(a), free(b);
    }
    linear_case_free(&c);
}

// The bf16 recipe equals linear_forward and its gradients in all bits.
static void test_bf16_recipe(void) {
    LinearCase c = linear_case(9, 13, 20);
    float *got[NUM_GEMMS], *want[NUM_GEMMS];
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        got[gemm] = zeros(20 * 20), want[gemm] = zeros(20 * 20);
        case_product(got[gemm], &c, recipe_row(RECIPE_BF16), gemm, NULL, ROUND_BF16);
    }
    linear_forward_reference(want[GEMM_FPROP], c.tensor[TENSOR_X], c.tensor[TENSOR_W], NULL, c.rows, c.K, c.N,
                             ROUND_BF16);
    linear_dgrad_reference(want[GEMM_DGRAD], c.tensor[TENSOR_DY], c.tensor[TENSOR_W], c.rows, c.K, c.N, ROUND_BF16);
    linear_wgrad_reference(want[GEMM_WGRAD], c.tensor[TENSOR_DY], c.tensor[TENSOR_X], c.rows, c.K, c.N, ROUND_BF16);
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        CHECK(memcmp(got[gemm], want[gemm], 400 * sizeof(float)) == 0, "the bf16 recipe's GEMM %d has equal bits",
              gemm);
        free(got[gemm]), free(want[gemm]);
    }
    linear_case_free(&c);
}

// A given scale is used unchanged, and values beyond the range saturate. An operand made from these codes and this
// scale has the values of the operand that was cast, with rowwise and with columnwise data.
static void test_given_scales(void) {
    LinearCase c = linear_case(9, 13, 20);
    const Recipe *r = recipe_row(RECIPE_DELAYED);
    for (int copy = 0; copy < 2; copy++) {
        LinearOperand q = case_operand(&c, r, TENSOR_W, (TensorUsage)copy, 4096);
        LinearOperand of_codes = linear_operand_of_codes(q.codes, c.N, c.K, (TensorUsage)copy, FP8_E4M3, 4096);
        CHECK(q.scale_inv == 1.0f / 4096 && of_codes.scale_inv == q.scale_inv,
              "scale_inv is the inverse of the given scale; found %g", (double)q.scale_inv);
        int64_t wrong = 0, saturated = 0;
        for (int64_t i = 0; i < c.N; i++)
            for (int64_t k = 0; k < c.K; k++) {
                const int64_t row = copy == ROWWISE ? i : k, col = copy == ROWWISE ? k : i;
                const float have = q.view.data[row * q.view.row_stride + col * q.view.col_stride],
                            scaled = c.tensor[TENSOR_W][i * c.K + k] * 4096;
                wrong += have != of_codes.view.data[row * of_codes.view.row_stride + col * of_codes.view.col_stride];
                wrong += have != fp8_to_float(fp8_from_float(scaled, FP8_E4M3), FP8_E4M3);
                saturated += fabsf(scaled) > 464 && fabsf(have) == 448;
            }
        CHECK(wrong == 0 && saturated > 0, "%s data: all values are right (%lld are not), and some saturate (%lld do)",
              copy == ROWWISE ? "rowwise" : "columnwise", (long long)wrong, (long long)saturated);
        linear_operand_free(&q), linear_operand_free(&of_codes);
    }
    linear_case_free(&c);
}

// Tests special values with recipe tensorwise. Zeros stay zero. One infinity or NaN in an operand makes the result
// NaN, because torchao's scale is then 0 or NaN.
static void test_fp8_special(void) {
    const Recipe *r = recipe_row(RECIPE_TENSORWISE);
    float one[] = {1, 1, 1, 1};
    for (int i = 0; i < 3; i++) {
        float special[] = {0, -0.0f, i == 1 ? INFINITY : i == 2 ? NAN : 0.0f, 0}, out[1];
        LinearOperand a = linear_operand(special, 1, 4, ROWWISE, PER_TENSOR, r->rule, FP8_E4M3, 0);
        LinearOperand b = linear_operand(one, 1, 4, ROWWISE, PER_TENSOR, r->rule, FP8_E4M3, 0);
        linear_product(out, a, b, 1, 1, 4, NULL, ROUND_BF16);
        if (i == 0)
            CHECK(out[0] == 0 && a.codes[0] == 0 && a.codes[1] == 0x80,
                  "zeros times ones are zero, and zeros keep their sign; found %g, codes %02x %02x", (double)out[0],
                  a.codes[0], a.codes[1]);
        else CHECK(isnan(out[0]), "%g makes the result NaN; found %g", (double)special[2], (double)out[0]);
        linear_operand_free(&a), linear_operand_free(&b);
    }
}

// ---- AdamW, initial weights, and numbers of threads.

static void test_adamw(void) {
    enum { N = 100000 };
    const AdamwStep s1 = adamw_step(1, 1e-3, 0.9, 0.999, 1e-8, 0.1, false, 42),
                    s2 = adamw_step(2, 1e-3, 0.9, 0.999, 1e-8, 0.1, false, 42);
    float *p = random_floats(N, 18, 0.02f), *g = random_floats(N, 19, 1e-3f), *m = zeros(N), *v = zeros(N),
          *start = zeros(N);
    memcpy(start, p, N * sizeof(float));
    adamw_reference(p, m, v, g, 0, N, true, 0.5f, false, false, &s1);
    adamw_reference(p, m, v, g, 0, N, true, 0.5f, false, false, &s2);
    double worst = 0;
    for (int i = 0; i < N; i++) {
        double P = start[i], M = 0, V = 0, G = g[i] * 0.5;
        for (int t = 1; t <= 2; t++) {
            P *= 1 - 1e-3 * 0.1, M = 0.9 * M + 0.1 * G, V = 0.999 * V + 0.001 * G * G;
            P -= 1e-3 / (1 - pow(0.9, t)) * M / (sqrt(V) / sqrt(1 - pow(0.999, t)) + 1e-8);
        }
        worst = fmax(worst, fabs(P - p[i]));
    }
    CHECK(worst < 2e-8, "AdamW agrees with torch's rule in double; largest difference %g",
          worst);  // half an ulp of 0.1 is 4e-9; the bound is five times that
    // Weights rounded to nearest lose a step of 0.001 on 1.0, since half the spacing above 1 is 2^-8.
    float *w = zeros(N), *w_split = zeros(N);
    const AdamwStep nearest = adamw_step(1, 1e-3, 0.9, 0.999, 1e-8, 0.1, true, 42);
    for (int i = 0; i < N; i++) w[i] = 1, m[i] = v[i] = 0, g[i] = -1;
    adamw_reference(w, m, v, g, 0, N, false, 1, true, true, &nearest);
    CHECK(array_sum(w, N) == N, "weights of 1 that are rounded to nearest do not change by a step of 0.001");
    // Stochastic rounding: a step of 0.001 on 1.0 (bf16 spacing 2^-7) moves the mean by 0.001.
    for (int i = 0; i < N; i++) w[i] = w_split[i] = 1, m[i] = v[i] = 0, g[i] = -1;
    adamw_reference(w, m, v, g, 0, N, false, 1, true, true, &s1);
    const double mean = array_sum(w, N) / N - 1;
    CHECK(fabs(mean - 0.001) < 6e-5,
          "weights that are rounded stochastically change by %g on average; the step is 0.001",
          mean);  // standard deviation of the mean: sqrt(0.001 * 2^-7 / N) = 9e-6
    // An element's weight, exp_avg and exp_avg_sq are each rounded with the upper 16 bits of a random word of its own.
    int64_t wrong = 0;
    for (int i = 0; i < N; i++) {
        const AdamwElement e = adamw_update((AdamwElement){1, 0, 0}, -1, false, &s1);
        const AdamwRandom random = adamw_random(&s1, i);
        wrong += w[i] != bf16_to_float(bf16_from_float_stochastic(e.weight, random.weight >> 16));
        wrong += m[i] != bf16_to_float(bf16_from_float_stochastic(e.exp_avg, random.exp_avg >> 16));
        wrong += v[i] != bf16_to_float(bf16_from_float_stochastic(e.exp_avg_sq, random.exp_avg_sq >> 16));
    }
    CHECK(wrong == 0, "all weights and moments are rounded with the bits of their own words; %lld are not",
          (long long)wrong);
    for (int i = 0; i < N; i++)
        m[i] = v[i] = 0;  // in two parts the result is equal, because the bits depend only on the flat index
    adamw_reference(w_split, m, v, g, 0, 777, false, 1, true, true, &s1);
    adamw_reference(w_split + 777, m + 777, v + 777, g + 777, 777, N - 777, false, 1, true, true, &s1);
    CHECK(memcmp(w, w_split, N * sizeof(float)) == 0, "AdamW in two parts gives equal bits");
    CHECK(clip_factor(2, 0) == 1 && clip_factor(0.5, 1) == 1 && fabsf(clip_factor(4, 1) - 0.25f) < 1e-6f,
          "clip_factor() is 1 without clipping or below the limit, else limit / norm");
    free(p), free(g), free(m), free(v), free(start), free(w), free(w_split);
}

static void test_initialize(void) {
    CHECK(parameter_initial_value(PARAM_INIT_ONE, 0.02f, 1, 0, 5) == 1 &&
              parameter_initial_value(PARAM_INIT_ZERO, 0.02f, 1, 0, 5) == 0,
          "norms start at 1, biases at 0");
    double sum = 0, squares = 0;
    const int n = 100000;
    for (int i = 0; i < n; i++) {
        double x = parameter_initial_value(PARAM_DECAY, 0.02f, 42, 3, i);
        sum += x, squares += x * x;
    }
    CHECK(fabs(sum / n) < 0.02 * 0.02, "the mean of the initial weights is about 0; found %g",
          sum / n);  // 6 deviations of the mean
    CHECK(fabs(sqrt(squares / n) - 0.02) < 0.0003,
          "the standard deviation of the initial weights is about 0.02; found %g", sqrt(squares / n));
    CHECK(parameter_initial_value(0, 1, 42, 3, 0) != parameter_initial_value(0, 1, 42, 4, 0),
          "the first weights of tensors 3 and 4 differ");
    CHECK(parameter_initial_value(0, 1, 42, 3, 0) != parameter_initial_value(0, 1, 43, 3, 0),
          "the first weights with seeds 42 and 43 differ");
}

// Runs attention, a gradient norm and the wgrad GEMM of each recipe with `threads` threads. `out` receives all results.
static void run_threads(int threads, float *out) {
    const Dims d = attention_sizes(2, 70, 4, 2, 16);
    const int64_t n = d.B * d.T * 8 * d.HD, rows = d.B * d.T;
    LinearCase c = linear_case(45, 70, 150);
    omp_set_num_threads(threads);
    float *x = random_floats(n, 20, 1), *g = random_floats(n, 21, 1), *lse = zeros(d.B * d.NH * d.T),
          *att = zeros(rows * 64);
    attention_forward_reference(att, lse, x, &d, ROUND_BF16);
    memcpy(out, att, (size_t)(rows * 64) * sizeof(float));
    attention_backward_reference(out + rows * 64, g, x, att, lse, &d, ROUND_BF16);
    out += rows * 64 + n;
    *out++ = (float)sqrt(squares_sum(g, n));
    for (int recipe = 0; recipe < NUM_RECIPES; recipe++, out += c.N * c.K)
        case_product(out, &c, recipe_row(recipe), GEMM_WGRAD, NULL, ROUND_BF16);
    free(x), free(g), free(lse), free(att);
    linear_case_free(&c);
}

static void test_threads(void) {
    const int64_t n = 2 * 70 * (64 + 128) + 1 + NUM_RECIPES * 70 * 150;
    float *one = zeros(n), *many = zeros(n);
    run_threads(1, one);
    for (int threads = 2; threads <= 5; threads++) {
        run_threads(threads, many);
        CHECK(memcmp(one, many, (size_t)n * sizeof(float)) == 0, "%d threads give the bits that one thread gives",
              threads);
    }
    omp_set_num_threads(2);
    free(one), free(many);
}

int main(void) {
    test_linear(1, 1, 1);
    test_linear(7, 5, 33);
    test_linear(13, 17, 3);
    test_linear(3, 1100, 2);  // longer than two slabs (matmul.h)
    test_rmsnorm(1, 3);
    test_rmsnorm(6, 10);
    test_swiglu();
    test_rope(false);
    test_rope(true);
    test_attention(1, 1, 1, 1, 2, true);
    test_attention(2, 9, 4, 2, 4, true);
    test_attention(1, 5, 3, 1, 6, true);
    test_attention(1, 64, 2, 1, 16, false);
    test_attention(1, 65, 2, 2, 16, false);
    test_attention(2, 150, 2, 1, 64, false);
    test_cross_entropy();
    test_cross_entropy_rounding();
    test_embedding();
    for (int recipe = 0; recipe <= NUM_RECIPES; recipe++) test_recipe_products(recipe);
    test_bf16_recipe();
    test_given_scales();
    test_fp8_special();
    test_adamw();
    test_initialize();
    test_threads();
    return check_report();
}
