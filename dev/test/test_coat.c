// Tests moments in FP8 (coat.h): 20 AdamW steps byte for byte against dev/reference/make_coat_goldens.py, errors of
// encoded groups, groups with zeros and extreme values, and stochastic rounding.
#include "../../llmc/reference/adamw.h"
#include "lib/check.h"
#include "lib/fp8_golden.h"

enum { STEPS = 20, GROUPS = 8, N = GROUPS * COAT_GROUP };

typedef struct {
    uint8_t codes[2][N];  // exp_avg, exp_avg_sq
    uint32_t groups[2][GROUPS];
    float weights[N];
} State;

static void take_step(State *s, const float *gradients, int64_t step, int64_t first, int64_t groups, bool stochastic) {
    const AdamwStep a = adamw_step(step, 1e-3, 0.9, 0.95, 1e-8, 0.1, false, 42);
    const CoatMoment m = {s->codes[0] + first, s->groups[0] + first / COAT_GROUP},
                     v = {s->codes[1] + first, s->groups[1] + first / COAT_GROUP};
    adamw_coat_reference(s->weights + first, m, v, gradients + first, first, groups * COAT_GROUP, true, 1, false,
                         stochastic, &a);
}

static void test_golden(bool stochastic) {
    Safetensors st = fp8_golden_open("dev/reference/goldens/coat.safetensors");
    const char *mode = stochastic ? "stochastic." : "nearest.";
    float *gradients = (float *)fp8_golden_bytes(&st, "gradients", ST_F32, STEPS * N),
          *weights = (float *)fp8_golden_bytes(&st, "weights", ST_F32, N);
    State s;
    memset(&s, 0, sizeof s);
    memcpy(s.weights, weights, sizeof s.weights);
    for (int64_t step = 0; step < STEPS; step++) {
        take_step(&s, gradients + step * N, step + 1, 0, 3, stochastic);  // in two parts, as two ranks would
        take_step(&s, gradients + step * N, step + 1, 3 * COAT_GROUP, GROUPS - 3, stochastic);
        fp8_golden_check(&st, mode, "exp_avg", ST_U8, STEPS, step, s.codes[0], N);
        fp8_golden_check(&st, mode, "exp_avg_sq", ST_U8, STEPS, step, s.codes[1], N);
        fp8_golden_check(&st, mode, "exp_avg_groups", ST_U32, STEPS, step, s.groups[0], GROUPS);
        fp8_golden_check(&st, mode, "exp_avg_sq_groups", ST_U32, STEPS, step, s.groups[1], GROUPS);
        fp8_golden_check(&st, mode, "weights", ST_F32, STEPS, step, s.weights, N);
    }
    free(gradients), free(weights);
    safetensors_close(&st);
}

// Fills a group with magnitudes from 2^low to 2^high and random signs. Every `zeros`-th value is 0 (zeros = 0: none).
static void fill(float *x, uint64_t seed, double low, double high, int zeros) {
    for (int i = 0; i < COAT_GROUP; i++) {
        const double part = rng_uniform(seed, (uint64_t)i), magnitude = exp2(low + (high - low) * part);
        x[i] = zeros && i % zeros == 0 ? 0 : (float)(rng_u64(seed, 1000 + (uint64_t)i) & 1 ? -magnitude : magnitude);
    }
}

// Encodes a group, rounding to nearest, and decodes it. Zeros stay zero. Other values keep their sign and do not become
// 0. The largest magnitude has a relative error below 2^-15. Each value has a relative error of at most `bound`.
// Encoding a decoded value again in this group gives the same code.
static void check_group(const char *label, const float *x, double bound) {
    const CoatTables *t = coat_tables();
    uint8_t codes[COAT_GROUP];
    uint32_t word;
    float decoded[COAT_GROUP], largest = 0, largest_decoded = 0;
    int lost = 0, signs = 0, moved = 0;
    double worst = 0;
    coat_encode_group(t, x, NULL, codes, &word);
    for (int i = 0; i < COAT_GROUP; i++) {
        decoded[i] = coat_decode(t, word, codes[i]);
        lost += (decoded[i] == 0) != (x[i] == 0);
        signs += decoded[i] * x[i] < 0;
        moved += coat_encode(t, word, 1 / coat_max(word), decoded[i], false, 0) != codes[i];
        if (x[i] != 0) worst = fmax(worst, fabs((double)decoded[i] / x[i] - 1));
        largest = fmaxf(largest, fabsf(x[i])), largest_decoded = fmaxf(largest_decoded, fabsf(decoded[i]));
    }
    CHECK(lost == 0 && signs == 0,
          "%s: %d values became zero or stopped being zero, and %d changed their sign; expected none", label, lost,
          signs);
    CHECK(fabs((double)largest_decoded / largest - 1) < 0x1p-15,
          "%s: the largest magnitude, %g, comes back with an error below 2^-15 of it; found %g", label, (double)largest,
          (double)largest_decoded);
    CHECK(worst <= bound, "%s: the worst relative error is %.4f; %.4f is allowed", label, worst, bound);
    CHECK(moved == 0, "%s: each decoded value is encoded as its own code again; %d are not", label, moved);
}

static void test_groups(void) {
    static const struct {
        const char *label;
        double low, high;
        int zeros;
        double bound;  // allowed relative error; about 1 / (4 k) for the smallest values, whose codes are 2 or above
    } cases[] = {
        {"all magnitudes 2^3", 3, 3, 0, 0x1p-15},       {"magnitudes within 2", -1, 0, 0, 0.0157},
        {"magnitudes within 2^4", -20, -16, 0, 0.0625}, {"magnitudes within 2^4 and zeros", -20, -16, 3, 0.0625},
        {"magnitudes within 2^16", -40, -24, 0, 0.3},   {"magnitudes within 2^60", -70, -10, 0, 2.5},
        {"all magnitudes 2^5", 5, 5, 0, 0x1p-15}};
    float x[COAT_GROUP];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (uint64_t seed = 0; seed < 20; seed++) {
            fill(x, seed, cases[i].low, cases[i].high, cases[i].zeros);
            check_group(cases[i].label, x, cases[i].bound);
        }
}

static void test_degenerate(void) {
    const CoatTables *t = coat_tables();
    float x[COAT_GROUP] = {0};
    uint8_t codes[COAT_GROUP];
    uint32_t word = 1;
    coat_encode_group(t, x, NULL, codes, &word);
    CHECK(word == 0 && codes[0] == 0 && coat_decode(t, word, codes[0]) == 0, "a group of zeros has the word 0");
    x[5] = -0x1p-101f;
    coat_encode_group(t, x, NULL, codes, &word);
    CHECK(word == 0 && codes[5] == 0, "a group whose largest magnitude is below 2^-100 becomes zero");
    x[5] = -0x1p-100f;
    coat_encode_group(t, x, NULL, codes, &word);
    CHECK((word & 255) == COAT_POWERS - 1 && codes[5] == 0xfe && coat_decode(t, word, codes[5]) == x[5],
          "a group with one value other than zero has the largest k, and the value is exact; found word %08x, code "
          "%02x",
          word, codes[5]);
    x[6] = 0x1p126f, x[7] = 0x1p-149f;
    coat_encode_group(t, x, NULL, codes, &word);
    CHECK((word & 255) == 1 && coat_decode(t, word, codes[6]) == x[6] && codes[5] > 0x80 && codes[7] > 0,
          "a group from 2^-149 to 2^126 has k = 1/8, and its values do not become 0; found word %08x, codes %02x, %02x",
          word, codes[5], codes[7]);
}

// The mean over 4096 draws of random bits is the value itself, up to five standard deviations and 2^-15 of the value,
// and almost all values vary.
static void test_stochastic(void) {
    enum { DRAWS = 4096 };
    const CoatTables *t = coat_tables();
    float x[COAT_GROUP];
    uint8_t codes[COAT_GROUP];
    uint32_t word, random[COAT_GROUP];
    double sum[COAT_GROUP] = {0}, square[COAT_GROUP] = {0};
    fill(x, 9, -6, 0, 0);
    for (uint64_t n = 0; n < DRAWS; n++) {
        for (int i = 0; i < COAT_GROUP; i++) random[i] = (uint32_t)(rng_u64(n, (uint64_t)i) >> 32);
        coat_encode_group(t, x, random, codes, &word);
        for (int i = 0; i < COAT_GROUP; i++) {
            const double value = coat_decode(t, word, codes[i]);
            sum[i] += value, square[i] += value * value;
        }
    }
    int off = 0, fixed = 0;
    for (int i = 0; i < COAT_GROUP; i++) {
        const double mean = sum[i] / DRAWS, variance = fmax(square[i] / DRAWS - mean * mean, 0);
        off += fabs(mean - x[i]) > 5 * sqrt(variance / DRAWS) + fabs(x[i]) * 0x1p-15;
        fixed += variance == 0;
    }
    CHECK(off == 0, "the mean of a value's decoded draws is the value; %d of %d means are off", off, COAT_GROUP);
    CHECK(fixed < 4, "fewer than 4 values never change; found %d of %d", fixed, COAT_GROUP);
}

int main(void) {
    test_golden(false);
    test_golden(true);
    test_groups();
    test_degenerate();
    test_stochastic();
    return check_report();
}
