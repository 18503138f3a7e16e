// Tests gradients in FP8 (gradient_fp8.h): 20 micro-steps as in MS-AMP, and means over 1 to 4 ranks, byte for byte
// against dev/reference/make_msamp_gradient_goldens.py; gradients that are not finite; sums over many micro-steps and
// many ranks, which must lose nothing on average.
#include "../../llmc/reference/gradient_fp8.h"
#include "lib/check.h"
#include "lib/fp8_golden.h"

enum { RANKS = 4, STEPS = 20, TENSORS = 8, MOST = 1024 };

static const GradientSum nearest = {false, false, 0, 0};

typedef struct {
    Safetensors st;
    float *gradients;  // [RANKS, STEPS, n]
    int64_t n, begin[TENSORS + 1];
} Golden;

static Golden golden_begin(void) {
    Golden g;
    g.st = fp8_golden_open("dev/reference/goldens/msamp_gradients.safetensors");
    int32_t *sizes = (int32_t *)fp8_golden_bytes(&g.st, "sizes", ST_I32, TENSORS);
    g.begin[0] = g.n = 0;
    for (int k = 0; k < TENSORS; k++) g.n = g.begin[k + 1] = g.begin[k] + sizes[k];
    if (g.n > MOST) die("the golden has %lld elements", (long long)g.n);
    g.gradients = (float *)fp8_golden_bytes(&g.st, "gradients", ST_F32, RANKS * STEPS * g.n);
    free(sizes);
    return g;
}

// Adds up the gradients of rank 0 with sums that are rounded to nearest, as in MS-AMP. Codes, and values rounded like
// the CPU trainer's, must agree.
static void test_added(const Golden *g) {
    uint8_t codes[MOST];
    float scale[TENSORS], values[MOST], sums[MOST];
    int64_t differ = 0;
    for (int64_t step = 0; step < STEPS; step++) {
        for (int k = 0; k < TENSORS; k++) {
            const int64_t at = g->begin[k], n = g->begin[k + 1] - at;
            const float *gradients = g->gradients + step * g->n + at;
            if (step) gradient_fp8_sum(values + at, codes + at, 1, 0, 1 / scale[k], n);
            for (int64_t i = 0; i < n; i++) {
                differ += step && float_bits(values[at + i]) != float_bits(sums[at + i]);
                sums[at + i] = step ? gradients[i] + sums[at + i] : gradients[i];
            }
            scale[k] = gradient_fp8_scale(gradient_fp8_amax(sums + at, n));
            gradient_fp8_encode(codes + at, sums + at, scale[k], n);
            gradient_fp8_round(sums + at, scale[k], 0, n, &nearest);
        }
        fp8_golden_check(&g->st, "", "added", ST_U8, STEPS, step, codes, g->n);
        fp8_golden_check(&g->st, "", "added_scale", ST_F32, STEPS, step, scale, TENSORS);
    }
    CHECK(differ == 0, "all rounded sums are the values of the codes; %lld are not", (long long)differ);
}

// Checks one step's mean over `ranks` ranks against the golden.
static void test_mean(const Golden *g, int64_t ranks, int64_t step) {
    static uint8_t codes[RANKS][MOST];
    float mean[MOST], scale[TENSORS];
    char name[64];
    for (int k = 0; k < TENSORS; k++) {
        const int64_t at = g->begin[k], n = g->begin[k + 1] - at;
        uint32_t amax = 0;
        for (int64_t r = 0; r < ranks; r++) {
            const uint32_t own = gradient_fp8_amax(g->gradients + (r * STEPS + step) * g->n + at, n);
            amax = own > amax ? own : amax;
        }
        const float common = gradient_fp8_scale(amax);
        for (int64_t r = 0; r < ranks; r++)
            gradient_fp8_encode(codes[r] + at, g->gradients + (r * STEPS + step) * g->n + at, common, n);
        gradient_fp8_sum(mean + at, codes[0] + at, ranks, MOST, 1 / common / (float)ranks, n);
        scale[k] = gradient_fp8_scale(gradient_fp8_amax(mean + at, n));
        gradient_fp8_encode(codes[0] + at, mean + at, scale[k], n);
    }
    format_checked(name, sizeof name, "mean.%lld", (long long)ranks);
    fp8_golden_check(&g->st, "", name, ST_U8, STEPS, step, codes[0], g->n);
    format_checked(name, sizeof name, "mean.%lld.scale", (long long)ranks);
    fp8_golden_check(&g->st, "", name, ST_F32, STEPS, step, scale, TENSORS);
}

// Gradients that are not finite must show in what the optimizer reads, whatever else their tensor has.
static void test_nonfinite(void) {
    const float bad[] = {INFINITY, -INFINITY, NAN, -NAN};
    for (int i = 0; i < 4; i++) {
        float x[5] = {0, 1, bad[i], -3e38f, 1e-30f};
        const uint32_t amax = gradient_fp8_amax(x, 5);
        const float scale = gradient_fp8_scale(amax);
        float sum[5], rounded[5];
        uint8_t codes[2][5];
        CHECK(amax >= 0x7f800000u && scale == 1,
              "a tensor with %g has an amax that is not finite, and scale 1; found amax %08x, scale %g", (double)bad[i],
              amax, (double)scale);
        gradient_fp8_encode(codes[0], x, scale, 5);
        memset(codes[1], 0x38, 5);
        gradient_fp8_sum(sum, codes[0], 2, 5, 1, 5);
        CHECK(
            codes[0][2] == GRADIENT_FP8_NAN && isnan(sum[2]) && sum[0] == 1 && sum[3] == -447,
            "%g has the code of NaN, sums with it are NaN, and other elements stay numbers; found code %02x, sums %g, "
            "%g and %g",
            (double)bad[i], codes[0][2], (double)sum[2], (double)sum[0], (double)sum[3]);
        for (int add = 0; add < 2; add++) {
            const GradientSum how = {add, add, gradient_sum_key(1, 0, 1), 0};
            memcpy(rounded, x, sizeof x);
            gradient_fp8_round(rounded, scale, 0, 5, &how);
            CHECK(isnan(rounded[2]) && rounded[0] == 0 && rounded[1] == 1 && rounded[3] == -448,
                  "%g is rounded to NaN, and other elements stay numbers; found %g, %g, %g and %g", (double)bad[i],
                  (double)rounded[2], (double)rounded[0], (double)rounded[1], (double)rounded[3]);
        }
    }
    CHECK(gradient_fp8_scale(0) == 1 && gradient_fp8_scale(1) == 0x1p126f,
          "an amax of zero gives scale 1, and the smallest amax above zero gives 2^126");
}

// Rounds each number between and beside E4M3's stochastically. The mean over many random bits must be the number.
static void test_stochastic(void) {
    enum { DRAWS = 1 << 14 };
    int64_t outside = 0, off = 0;
    for (int code = 0; code < 0x7e; code++)
        for (int part = 0; part < 3; part++) {
            const float low = fp8_to_float((uint8_t)code, FP8_E4M3), high = fp8_to_float((uint8_t)(code + 1), FP8_E4M3),
                        share = part ? ldexpf(1, -2 * part) : 0, x = low + share * (high - low);
            int64_t up = 0;
            for (int i = 0; i < DRAWS; i++) {
                const uint32_t hash = adamw_random_group(gradient_sum_key(1, code, part), i >> 3);
                const float got = gradient_fp8_stochastic(i % 2 ? -x : x, hash, (uint32_t)i & 7) * (i % 2 ? -1 : 1);
                up += got == high, outside += got != low && got != high;
            }
            off += fabs((double)up - share * DRAWS) > 4.5 * sqrt(share * (1 - share) * DRAWS);
        }
    CHECK(outside == 0 && off == 0,
          "all numbers are rounded to a neighbour, and up as often as they should (4.5 standard deviations); %lld are "
          "not a neighbour, %lld of 378 shares are off",
          (long long)outside, (long long)off);
}

// The slope of sums on the exact sums, and the root mean square of their differences and their norm, relative to those
// of the exact sums.
typedef struct {
    double slope, error, norm;
} Fit;

// Compares elements first, first + stride, ... of n sums with the exact ones.
static Fit fit_of(const float *sum, const float *exact, int64_t first, int64_t stride, int64_t n) {
    double product = 0, squares = 0, differences = 0, own = 0;
    for (int64_t i = first; i < n; i += stride) {
        const double off = (double)sum[i] - exact[i];
        product += (double)sum[i] * exact[i], squares += (double)exact[i] * exact[i], differences += off * off;
        own += (double)sum[i] * sum[i];
    }
    return (Fit){product / squares, sqrt(differences / squares), sqrt(own / squares)};
}

// Fills g [n] with the gradients of one micro-step or rank: of one sign, of a signal as large as the noise, or of
// noise. Every 4th is 2^-12 as large as the others.
static void many_gradients(float *g, int64_t n, int kind, int64_t part) {
    const uint64_t key = rng_key(31, (uint64_t)part), of_signal = rng_key(32, 0);
    for (int64_t i = 0; i < n; i++) {
        const float noise = rng_uniform(key, (uint64_t)i) - 0.5f, signal = rng_uniform(of_signal, (uint64_t)i) - 0.5f,
                    x = kind == 0   ? signal * (1 + 0.2f * noise)
                        : kind == 1 ? signal + noise
                                    : noise;
        g[i] = bf16_round(i % 4 ? x : x * 0x1p-12f);
    }
}

// Adds gradients of 256 micro-steps. Rounding to nearest has slopes of 0.1 to 0.9 there.
static void test_many_micro_steps(int kind) {
    enum { N = 1 << 16, PARTS = 256 };
    static const char *const kinds[] = {"of one sign", "with as much signal as noise", "of noise"};
    static const double most[] = {0.22, 0.22, 1};  // gradient_fp8.h
    static float g[N], sum[N], exact[N];
    for (int64_t part = 0; part < PARTS; part++) {
        const GradientSum how = {part > 0, part > 0, gradient_sum_key(42, 0, part), 0};
        many_gradients(g, N, kind, part);
        for (int64_t i = 0; i < N; i++) exact[i] = part ? exact[i] + g[i] : g[i], sum[i] = part ? sum[i] + g[i] : g[i];
        gradient_fp8_round(sum, gradient_fp8_scale(gradient_fp8_amax(sum, N)), 0, N, &how);
        if (part != 15 && part != 63 && part != 255) continue;
        const Fit large = fit_of(sum, exact, 1, 2, N), small = fit_of(sum, exact, 0, 4, N);
        const double stated = fmin(sqrt(GRADIENT_FP8_NOISE * (double)(part + 1)), most[kind]);
        // With other random bits the slope on noise varies with a standard deviation of 0.0018 at 64 micro-steps and of
        // 0.0036 at 256; its mean over 40 seeds is 1.0003 at 64. Small gradients have twice as much noise.
        CHECK(fabs(large.slope - 1) < 0.005 && fabs(small.slope - 1) < 0.02,
              "%lld micro-steps of gradients %s: the slope on the exact sum is %.4f, and %.4f of small gradients",
              (long long)part + 1, kinds[kind], large.slope, small.slope);
        CHECK(large.error < 1.05 * stated && large.error > 0.75 * stated,
              "%lld micro-steps of gradients %s: the rms error is %.3f (stated: %.3f)", (long long)part + 1,
              kinds[kind], large.error, stated);
        CHECK(fabs(large.norm / sqrt(1 + large.error * large.error) - 1) < 0.01,
              "%lld micro-steps of gradients %s: the norm is %.4f of the exact one, want sqrt(1 + rms^2) at rms %.3f",
              (long long)part + 1, kinds[kind], large.norm, large.error);
        printf(
            "%lld micro-steps of gradients %s: slope %.4f, rms error %.3f, norm %.4f; of small gradients %.4f, %.3f\n",
            (long long)part + 1, kinds[kind], large.slope, large.error, large.norm, small.slope, small.error);
    }
}

// Sums over 64 ranks neither saturate nor lose gradients, equal on all ranks or not.
static void test_many_ranks(int kind) {
    enum { N = 1 << 12, MANY = 64 };
    static uint8_t codes[MANY][N];
    static float g[N], sum[N], exact[N];
    const float scale = gradient_fp8_scale(float_bits(1.0f));  // no gradient is larger
    for (int r = 0; r < MANY; r++) {
        many_gradients(g, N, kind, kind ? r : 0);
        for (int64_t i = 0; i < N; i++) exact[i] = r ? exact[i] + g[i] : g[i];
        gradient_fp8_encode(codes[r], g, scale, N);
    }
    gradient_fp8_sum(sum, codes[0], MANY, N, 1 / scale, N);
    gradient_fp8_round(sum, gradient_fp8_scale(gradient_fp8_amax(sum, N)), 0, N, &nearest);
    const Fit f = fit_of(sum, exact, 1, 2, N);
    // Two casts to nearest, each with an rms error of about 2.7%. If gradients differ, the errors of the first cancel.
    CHECK(fabs(f.slope - 1) < 0.005 && f.error < 0.045, "the sum over %d ranks of %s: slope %.4f, rms error %.3f", MANY,
          kind ? "noise" : "equal gradients", f.slope, f.error);
}

int main(void) {
    Golden g = golden_begin();
    test_added(&g);
    for (int64_t step = 0; step < STEPS; step++)
        for (int64_t ranks = 1; ranks <= RANKS; ranks++) test_mean(&g, ranks, step);
    test_nonfinite();
    test_stochastic();
    for (int kind = 0; kind < 3; kind++) test_many_micro_steps(kind);
    test_many_ranks(0), test_many_ranks(2);
    free(g.gradients);
    safetensors_close(&g.st);
    return check_report();
}
