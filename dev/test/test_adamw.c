// Tests the rounding bits of adamw_math.h, and the bound on a step in weight_bound.h. Some must have pinned values. The
// 48 bits of each element must look independent and uniform, and sums of rounded values must be unbiased. All seeds are
// fixed. The statistical bounds are five standard deviations of truly random bits or a little more, so a failed check
// shows a flaw, not chance.
#include "../../llmc/reference/adamw_math.h"
#include "lib/check.h"

enum { FIELDS = 3, SAMPLES = 1 << 18 };
#define SIGMAS 5.0

typedef struct {
    uint32_t field[FIELDS];  // 16 bits each: weight, exp_avg, exp_avg_sq
} Draw;

static AdamwStep step_of(int64_t step, uint64_t seed) {
    return adamw_step(step, 1e-3, 0.9, 0.999, 1e-8, 0.1, false, seed);
}

static Draw draw(const AdamwStep *s, int64_t i) {
    const AdamwRandom r = adamw_random(s, i);
    return (Draw){{r.weight >> 16, r.exp_avg >> 16, r.exp_avg_sq >> 16}};
}

// Returns how far a uniform 16-bit number is from its mean, in standard deviations.
static double centred(uint32_t field) { return ((double)field + 0.5 - 32768) / (65536 / sqrt(12)); }

// The bits must not change between builds: a run that another build resumes must draw the same ones.
static void test_pinned(void) {
    const struct {
        uint64_t seed;
        int64_t step, i;
        uint32_t weight, exp_avg, exp_avg_sq;
    } pinned[] = {
        {0, 1, 0, 0x097f294e, 0x6b8028b6, 0x684bbeae},
        {0, 1, 1, 0x6d4cb1ce, 0xd733a736, 0x04a2af2e},
        {42, 1, 7, 0x88020653, 0x3a522b97, 0x493208c3},
        {42, 2, 7, 0x3d149f3a, 0x70333f32, 0x0f23a05a},
        {42, 1, 8, 0x5bb6047f, 0xaac07553, 0xdf9066af},
        {1234, 1000000, (1ll << 32) + 13, 0xe385c77e, 0x8787e726, 0x513dd3de},
        {UINT64_MAX, 77, (1ll << 35) + 101, 0xe5f369ed, 0x8f37cfa9, 0x2b4fdb7d},
        {5, 3, 0x123456789ab, 0x8d29483e, 0x606548e6, 0xe10db09e},
    };
    for (size_t k = 0; k < sizeof pinned / sizeof pinned[0]; k++) {
        const AdamwStep s = step_of(pinned[k].step, pinned[k].seed);
        const AdamwRandom r = adamw_random(&s, pinned[k].i);
        const bool same =
            r.weight == pinned[k].weight && r.exp_avg == pinned[k].exp_avg && r.exp_avg_sq == pinned[k].exp_avg_sq;
        CHECK(same, "seed %llu, step %lld, element %lld has the pinned bits; found 0x%08x, 0x%08x, 0x%08x",
              (unsigned long long)pinned[k].seed, (long long)pinned[k].step, (long long)pinned[k].i, r.weight,
              r.exp_avg, r.exp_avg_sq);
    }
    const AdamwStep nearest = adamw_step(1, 1e-3, 0.9, 0.999, 1e-8, 0.1, true, 42);
    CHECK(adamw_random(&nearest, 5).weight == 0x80000000u,
          "if weights are rounded to nearest, the rounding bits of each weight are 0x80000000");
}

// Tests mean, variance and single bits of each field, over elements first .. first + SAMPLES - 1 of one step.
static void check_distribution(const char *label, const AdamwStep *s, int64_t first) {
    double mean[FIELDS] = {0}, square[FIELDS] = {0}, worst_bit = 0;
    int64_t ones[FIELDS][16] = {{0}};
    for (int64_t n = 0; n < SAMPLES; n++) {
        const Draw d = draw(s, first + n);
        for (int f = 0; f < FIELDS; f++) {
            const double x = centred(d.field[f]);
            mean[f] += x, square[f] += x * x;
            for (int b = 0; b < 16; b++) ones[f][b] += d.field[f] >> b & 1;
        }
    }
    for (int f = 0; f < FIELDS; f++) {
        const double z_mean = mean[f] / sqrt(SAMPLES),
                     z_square = (square[f] - SAMPLES) / sqrt(0.8 * SAMPLES);  // x^2 has variance 0.8
        CHECK(fabs(z_mean) < SIGMAS && fabs(z_square) < SIGMAS,
              "%s, field %d: mean and variance are within 5 standard deviations; found %.1f and %.1f", label, f, z_mean,
              z_square);
        for (int b = 0; b < 16; b++)
            worst_bit = fmax(worst_bit, fabs((double)ones[f][b] - SAMPLES / 2.0) / (sqrt(SAMPLES) / 2));
    }
    CHECK(worst_bit < SIGMAS,
          "%s: each bit is 1 half of the time; the worst bit is off by %.1f standard deviations, and less than 5 is "
          "allowed",
          label, worst_bit);
}

// Compares each field of element i of step s with each field of element i + lag of step t: correlation, and chi-square
// over 16 x 16 bins. If lag is 0 and s is t, it does not compare a field with itself.
static void check_independence(const char *label, const AdamwStep *s, const AdamwStep *t, int64_t first, int64_t lag) {
    static int32_t bins[FIELDS][FIELDS][256];
    double product[FIELDS][FIELDS] = {{0}}, worst = 0, worst_chi = 0;
    memset(bins, 0, sizeof bins);
    for (int64_t n = 0; n < SAMPLES; n++) {
        const Draw a = draw(s, first + n), b = draw(t, first + n + lag);
        for (int f = 0; f < FIELDS; f++)
            for (int g = 0; g < FIELDS; g++) {
                product[f][g] += centred(a.field[f]) * centred(b.field[g]);
                bins[f][g][a.field[f] >> 12 << 4 | b.field[g] >> 12]++;
            }
    }
    for (int f = 0; f < FIELDS; f++)
        for (int g = 0; g < FIELDS; g++) {
            if (f == g && lag == 0 && s == t) continue;
            double chi = 0;
            for (int b = 0; b < 256; b++) chi += pow(bins[f][g][b] - SAMPLES / 256.0, 2) / (SAMPLES / 256.0);
            worst = fmax(worst, fabs(product[f][g]) / sqrt(SAMPLES)),
            worst_chi = fmax(worst_chi, fabs(chi - 255) / sqrt(2 * 255));
        }
    CHECK(worst < SIGMAS && worst_chi < SIGMAS,
          "%s, elements %lld apart: correlations and chi-squares are within 5 standard deviations; the largest are "
          "%.1f and %.1f",
          label, (long long)lag, worst, worst_chi);
}

// Sums of 256 numbers a stride apart, as in a column of a matrix, vary like sums of independent numbers.
static void check_strides(const char *label, const AdamwStep *s) {
    enum { TERMS = 256, SUMS = 1 << 10 };
    for (int k = 0; k < 36; k++) {
        const int64_t stride = 1ll << k;
        double square[FIELDS] = {0};
        for (int64_t n = 0; n < SUMS; n++) {
            double sum[FIELDS] = {0};
            const int64_t first = (int64_t)(rng_u64(5, (uint64_t)(k * SUMS + n)) >> 30);
            for (int64_t j = 0; j < TERMS; j++) {
                const Draw d = draw(s, first + j * stride);
                for (int f = 0; f < FIELDS; f++) sum[f] += centred(d.field[f]);
            }
            for (int f = 0; f < FIELDS; f++) square[f] += sum[f] * sum[f] / TERMS;
        }
        for (int f = 0; f < FIELDS; f++) {
            const double z = (square[f] - SUMS) / sqrt(2.0 * SUMS);
            CHECK(fabs(z) < SIGMAS,
                  "%s, stride 2^%d, field %d: the variance of sums is within 5 standard deviations; found %.1f", label,
                  k, f, z);
        }
    }
}

static int differing_bits(Draw a, Draw b) {
    int bits = 0;
    for (int f = 0; f < FIELDS; f++) bits += __builtin_popcount(a.field[f] ^ b.field[f]);
    return bits;
}

// Changing one of the lowest 44 bits of the element's index, or one bit of the key, changes half of the 48 bits on
// average.
static void check_avalanche(const char *label, const AdamwStep *s) {
    enum { TRIALS = 1 << 12 };
    for (int bit = 0; bit < 44 + 64; bit++) {
        AdamwStep other = *s;
        if (bit >= 44) other.key ^= 1ull << (bit - 44);
        double sum = 0;
        for (int64_t n = 0; n < TRIALS; n++) {
            const int64_t i = (int64_t)(rng_u64(6, (uint64_t)n) >> 24);
            sum += differing_bits(draw(s, i), draw(&other, bit < 44 ? i ^ 1ll << bit : i));
        }
        const double z = (sum - 24.0 * TRIALS) / sqrt(12.0 * TRIALS);
        CHECK(fabs(z) < SIGMAS, "%s: changing bit %d of %s changes 24 of 48 bits on average; found %.2f", label,
              bit < 44 ? bit : bit - 44, bit < 44 ? "the index" : "the key", sum / TRIALS);
    }
}

static void check_step(const char *label, const AdamwStep *s, const AdamwStep *next) {
    const int64_t lags[] = {
        16,        128,       2048,      4096,     5120, 1ll << 24, 1ll << 31, 1ll << 32, (1ll << 32) + 8,
        1ll << 33, 1ll << 35, 1ll << 36, 3ll << 35};
    const int64_t starts[] = {0, (1ll << 32) - SAMPLES / 2, (1ll << 35) - SAMPLES / 2};
    for (size_t k = 0; k < sizeof starts / sizeof starts[0]; k++) check_distribution(label, s, starts[k]);
    for (int64_t lag = 0; lag < 10; lag++) check_independence(label, s, s, 0, lag);
    for (size_t k = 0; k < sizeof lags / sizeof lags[0]; k++) check_independence(label, s, s, 0, lags[k]);
    for (int64_t lag = 0; lag < 2; lag++) check_independence(label, s, next, 1 << 20, lag);
    check_strides(label, s);
    check_avalanche(label, s);
}

// Tests the first two steps of three seeds, and keys that are small numbers.
static void test_quality(void) {
    const uint64_t seeds[] = {0, 1, 42};
    char label[64];
    for (size_t k = 0; k < sizeof seeds / sizeof seeds[0]; k++)
        for (int64_t step = 1; step < 3; step++) {
            const AdamwStep s = step_of(step, seeds[k]), next = step_of(step + 1, seeds[k]);
            format_checked(label, sizeof label, "seed %llu, step %lld", (unsigned long long)seeds[k], (long long)step);
            check_step(label, &s, &next);
        }
    for (uint64_t key = 0; key < 3; key++) {
        AdamwStep s = step_of(1, 0), next = s;
        s.key = key, next.key = key + 1;
        format_checked(label, sizeof label, "key %llu", (unsigned long long)key);
        check_step(label, &s, &next);
    }
}

// The mean of many roundings of a number is the number: over the elements of a step, and over the steps of an element.
static void test_unbiased(void) {
    const float values[] = {1.001f, -1.001f, 3.14159265f, -2.71828e-20f, 1.00390625f, 0.99999994f, 1.0000001f};
    for (size_t k = 0; k < sizeof values / sizeof values[0]; k++)
        for (int over_steps = 0; over_steps < 2; over_steps++) {
            const float x = values[k], low = float_from_bits(float_bits(x) & 0xffff0000u);
            const float spacing = float_from_bits(float_bits(low) + 0x10000u) - low;
            double sum[FIELDS] = {0};
            for (int64_t n = 0; n < SAMPLES; n++) {
                const AdamwStep s = over_steps ? step_of(n + 1, 42) : step_of(3, 42);
                const AdamwRandom r = adamw_random(&s, over_steps ? 5000000007 : n);
                const uint32_t random[FIELDS] = {r.weight, r.exp_avg, r.exp_avg_sq};
                for (int f = 0; f < FIELDS; f++)
                    sum[f] += ((double)bf16_to_float(adamw_round(x, random[f])) - x) / spacing;
            }
            const double up = ((double)x - low) / spacing, sigma = sqrt(up * (1 - up) * SAMPLES);
            for (int f = 0; f < FIELDS; f++)
                CHECK(fabs(sum[f]) < SIGMAS * sigma + 1,
                      "%.9g rounded over %s, field %d: the sum of errors is at most 5 standard deviations and one bf16 "
                      "spacing; found %.1f standard deviations",
                      (double)x, over_steps ? "steps" : "elements", f, sum[f] / sigma);
        }
}

// Adds a tenth of a bf16 spacing to each weight 1000 times. The mean of the weights is the true sum, and their variance
// is that of independent roundings.
static void test_small_steps(void) {
    enum { N = 4096, STEPS = 1000 };
    static float w[N];
    for (int i = 0; i < N; i++) w[i] = 1;
    for (int64_t step = 1; step <= STEPS; step++) {
        const AdamwStep s = step_of(step, 42);
        for (int i = 0; i < N; i++)
            w[i] = bf16_to_float(adamw_round(w[i] + 0.1f * 0x1p-7f, adamw_random(&s, i).weight));
    }
    double sum = 0, square = 0;
    for (int i = 0; i < N; i++) sum += (w[i] - 1) * 128, square += pow((w[i] - 1) * 128 - 0.1 * STEPS, 2);
    const double variance = 0.1 * 0.9 * STEPS;  // in squared spacings
    CHECK(fabs(sum / N - 0.1 * STEPS) < SIGMAS * sqrt(variance / N),
          "the mean moved by %.3f bf16 spacings; expected about %.1f", sum / N, 0.1 * STEPS);
    CHECK(fabs(square / N / variance - 1) < SIGMAS * sqrt(2.0 / N),
          "the variance is %.2f squared spacings; expected about %.2f", square / N, variance);
}

// Returns the largest step of AdamW over the rate in step t, if the gradient of step i is g[i - 1]. `bf16`: moments are
// rounded as in training, with the bits of element `element`.
static double step_over_rate(const float *g, int64_t t, double beta1, double beta2, bool bf16, int64_t element) {
    AdamwElement e = {0, 0, 0};
    for (int64_t i = 1; i <= t; i++) {
        const AdamwStep s = adamw_step(i, 1e-3, beta1, beta2, 1e-15, 0, false, 42);
        const AdamwRandom random = adamw_random(&s, element);
        e.weight = 0;
        e = adamw_update(e, g[i - 1], false, &s);
        if (bf16) e.exp_avg = bf16_to_float(adamw_round(e.exp_avg, random.exp_avg));
        if (bf16) e.exp_avg_sq = bf16_to_float(adamw_round(e.exp_avg_sq, random.exp_avg_sq));
    }
    return fabs(e.weight) / 1e-3;
}

// The worst gradients reach the bound on AdamW's step, and random ones of very different sizes stay below it.
static void test_step_bound(void) {
    static const struct {
        double beta1, beta2, last;  // last: what the bound tends to
    } betas[] = {{0.9, 0.999, 7.27}, {0.9, 0.95, 1.165}, {0.95, 0.95, 1}, {0.5, 0.99, 5.78}, {0, 0.999, 31.62}};
    static const int64_t steps[] = {1, 2, 3, 10, 100, 400};
    float g[400];
    Options o = options_default();
    const double bf16 = weight_bound_growth(&o);
    for (size_t b = 0; b < sizeof betas / sizeof betas[0]; b++)
        for (size_t k = 0; k < sizeof steps / sizeof steps[0]; k++) {
            const int64_t t = steps[k];
            const double beta1 = betas[b].beta1, beta2 = betas[b].beta2,
                         bound = weight_bound_largest(beta1, beta2, 1, t),
                         rounded = weight_bound_largest(beta1, beta2, bf16, t);
            for (int64_t i = 0; i < t; i++) g[i] = (float)(1e3 * pow(beta1 / beta2, (double)(t - 1 - i)));
            const double worst = step_over_rate(g, t, beta1, beta2, false, 0);
            CHECK(fabs(worst / bound - 1) < 1e-5,
                  "betas %g and %g, step %lld: the worst gradients reach %.7g; got %.7g", beta1, beta2, (long long)t,
                  bound, worst);
            double most = 0, most_rounded = 0;
            for (uint64_t run = 0; run < 500; run++) {
                const float spread = (float)(run % 5);
                for (int64_t i = 0; i < t; i++)
                    g[i] = rng_normal(7 + run, (uint64_t)i) * expf(spread * rng_normal(1000 + run, (uint64_t)i));
                most = fmax(most, step_over_rate(g, t, beta1, beta2, false, 0));
                most_rounded = fmax(most_rounded, step_over_rate(g, t, beta1, beta2, true, (int64_t)run));
            }
            CHECK(
                most <= bound * (1 + 1e-5) && most_rounded <= rounded * (1 + 1e-5),
                "betas %g and %g, step %lld: random gradients stay below %g and, with bf16 moments, %g; got %g and %g",
                beta1, beta2, (long long)t, bound, rounded, most, most_rounded);
        }
    for (size_t b = 0; b < sizeof betas / sizeof betas[0]; b++) {
        const double last = weight_bound_largest(betas[b].beta1, betas[b].beta2, 1, 1000000);
        CHECK(fabs(last / betas[b].last - 1) < 1e-3, "betas %g and %g: the bound tends to %g; found %g", betas[b].beta1,
              betas[b].beta2, betas[b].last, last);
    }
}

// A weight of magnitude amax that moves by the whole step, and is rounded up, does not saturate.
static void test_bounded_scale(void) {
    static const float amaxes[] = {0, 1e-6f, 0.3f, 0.99609375f, 1, 300}, steps[] = {1e-9f, 1e-3f, 0.5f};
    for (size_t i = 0; i < sizeof amaxes / sizeof amaxes[0]; i++)
        for (size_t k = 0; k < sizeof steps / sizeof steps[0]; k++) {
            const WeightBound b = {1, steps[k]};
            const float scale = weight_bound_scale(amaxes[i], b), moved = amaxes[i] + steps[k],
                        up = bf16_to_float(bf16_from_float_stochastic(moved, 0xffff));
            CHECK(up * scale <= 448 && up * scale > 430, "amax %g, step %g: the new weight becomes %g of 448",
                  (double)amaxes[i], (double)steps[k], (double)(up * scale));
        }
}

int main(void) {
    test_step_bound();
    test_bounded_scale();
    test_pinned();
    if (!SANITIZED) test_quality();
    test_unbiased();
    test_small_steps();
    return check_report();
}
