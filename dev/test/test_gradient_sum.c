// Tests sums of gradients over micro-steps (llmc/reference/gradient_sum.h). The random bits that round a sum depend
// only on seed, step, part (number of the addition in its step) and position. Rounding has no bias, and as much noise
// as gradient_sum.h states.
#include "../../llmc/reference/gradient_sum.h"

#include "lib/check.h"

enum { N = 1 << 16 };

static GradientSum later_part(uint64_t seed, int64_t step, int64_t part) {
    return (GradientSum){true, true, gradient_sum_key(seed, step, part), 0};
}

static float *values(float x) {
    float *v = (float *)xcalloc(N, sizeof *v);
    for (int64_t i = 0; i < N; i++) v[i] = x;
    return v;
}

// A sum that is added in pieces has the bits of one that is added as a whole. Another seed, step or part gives others.
static void test_bits(void) {
    float *whole = values(1), *pieces = values(1), *others[3] = {values(1), values(1), values(1)}, *g = values(0x1p-9f);
    const GradientSum sum = later_part(42, 7, 3),
                      other[3] = {later_part(43, 7, 3), later_part(42, 8, 3), later_part(42, 7, 4)};
    gradient_sum_reference(whole, g, 0, N, false, &sum);
    for (int64_t first = 0, n = 1; first < N; first += n, n = min_i64(n + 13, N - first)) {
        GradientSum at = sum;
        at.flat = first / 8 * 8;  // a rank's range begins at a multiple of 8
        gradient_sum_reference(pieces + first, g + first, first % 8, n, false, &at);
    }
    CHECK(memcmp(whole, pieces, N * sizeof *whole) == 0, "a sum in pieces has the bits of the whole sum");
    for (int k = 0; k < 3; k++) {
        int64_t same = 0;
        gradient_sum_reference(others[k], g, 0, N, false, &other[k]);
        for (int64_t i = 0; i < N; i++) same += others[k][i] == whole[i];
        // A sum is rounded up with probability 1/4, so two independent draws agree in 10 of 16 cases. 5 standard
        // deviations are 620 elements.
        CHECK(llabs(same - N * 10 / 16) < 620,
              "with another %s about 10 of 16 elements are rounded alike; found %lld of %d",
              k == 0   ? "seed"
              : k == 1 ? "step"
                       : "part",
              (long long)same, N);
        free(others[k]);
    }
    static const int up[8] = {0, 0, 0, 0, 0, 0, 1, 0};
    for (int i = 0; i < 8; i++)
        CHECK(whole[i] == (up[i] ? 1 + 0x1p-7f : 1), "element %d is rounded as pinned; found %.9g", i,
              (double)whole[i]);
    free(whole), free(pieces), free(g);
}

// A gradient that replaces a bf16 sum is rounded to nearest if `stochastic` is false. A sum in fp32 is not rounded to
// bf16. An infinity stays infinite.
static void test_kinds(void) {
    const float x[4] = {1 + 0x1p-8f + 0x1p-20f, INFINITY, 0x1.fep127f, -0x1p-133f};
    const GradientSum replaces = {false, false, 5, 0}, joins = later_part(1, 2, 3);
    float sum[4] = {9, 9, 9, 9}, fp32[4] = {0x1p-30f, 1, -1, 0};
    gradient_sum_reference(sum, x, 0, 4, false, &replaces);
    for (int i = 0; i < 4; i++)
        CHECK(sum[i] == bf16_round(x[i]), "a replaced sum is the gradient, rounded to nearest: found %.9g for %.9g",
              (double)sum[i], (double)x[i]);
    gradient_sum_reference(fp32, x, 0, 4, true, &joins);
    CHECK(fp32[0] == x[0] + 0x1p-30f && fp32[1] == INFINITY && fp32[2] == x[2] - 1 && fp32[3] == x[3],
          "an fp32 sum is the sum in fp32; the first element is %.9g", (double)fp32[0]);
    gradient_sum_reference(sum, x, 0, 4, false, &joins);
    CHECK(sum[1] == INFINITY && isfinite(sum[3]),
          "a bf16 sum with an infinity is infinite, and a sum of finite numbers stays finite; found %.9g and %.9g",
          (double)sum[1], (double)sum[3]);
}

// Adds gradients of 1 in 1,024 parts: rounding to nearest would stop at a sum of 256. Also measures the noise of
// gradients with random signs.
static void test_sums(void) {
    enum { PARTS = 1024 };
    float *sum = values(0), *g = values(1), *drift = values(0);
    double exact_squares = 0, noise = 0, mean = 0, error = 0;
    float *exact = values(0);
    for (int64_t part = 0; part < PARTS; part++) {
        GradientSum how = later_part(42, 0, part);
        how.add = how.stochastic = part > 0;
        for (int64_t i = 0; i < N; i++) g[i] = bf16_round(rng_normal((uint64_t)part, (uint64_t)i));
        for (int64_t i = 0; i < N; i++) exact[i] += g[i];
        gradient_sum_reference(sum, g, 0, N, false, &how);
        for (int64_t i = 0; i < N; i++) g[i] = 1;
        gradient_sum_reference(drift, g, 0, N, false, &how);
    }
    for (int64_t i = 0; i < N; i++) {
        const double off = (double)sum[i] - exact[i];
        exact_squares += (double)exact[i] * exact[i], noise += off * off, error += off, mean += drift[i];
    }
    // The noise of an element's sum has a standard deviation of 0.043 of that sum: sqrt(1024 * 2/3 * 2.7e-6), since
    // ones have two thirds of the noise that gradients of random sign have (gradient_sum.h). The bound is 5 standard
    // deviations of the mean of N sums.
    CHECK(fabs(mean / N / PARTS - 1) < 5 * 0.043 / sqrt(N),
          "the mean of %d sums of %d ones is near their number; found %.4f", N, PARTS, mean / N);
    CHECK(fabs(error / N) < 5 * sqrt(noise / N) / sqrt(N), "sums have no bias; they are off by %g on average",
          error / N);
    const double share = noise / exact_squares / PARTS;
    // From seed to seed the share varies by about 1%. The expected noise assumes that the logarithms of sums are evenly
    // spread within their binades, which is true within a few percent.
    CHECK(share > 2.5e-6 && share < 3.0e-6,
          "noise of a micro-step is %.3g of the squared sum; gradient_sum.h states 2.7e-6", share);
    printf("noise of %d bf16 additions: %.3g of the squared sum for each; %d ones add up to %.2f on average\n", PARTS,
           share, PARTS, mean / N);
    free(sum), free(g), free(drift), free(exact);
}

int main(void) {
    test_bits();
    test_kinds();
    test_sums();
    return check_report();
}
