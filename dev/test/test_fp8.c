// Tests fp8.h, bf16.h and rng.h: casts and scales compared with torchao's (dev/reference), casts compared with the
// definition of the formats, unbiased stochastic rounding, and random numbers that are uniform, normal and independent.
// Run it from the root of the repository.
#include "../../llmc/base/rng.h"
#include "lib/check.h"
#include "lib/fp8_golden.h"

// ---- Goldens.

// Casts all 65,536 bfloat16 values.
static void test_golden_casts(void) {
    Safetensors st = fp8_golden_open("dev/reference/goldens/fp8_casts.safetensors");
    for (int f = 0; f < 2; f++) {
        const Fp8Format format = (Fp8Format)f;
        uint8_t *expected = (uint8_t *)fp8_golden_bytes(&st, fp8_format_name(format), ST_U8, 65536);
        int wrong = 0, nans = 0, first = -1;
        for (int i = 0; i < 65536; i++) {
            const uint8_t got = fp8_from_float(bf16_to_float((bf16_bits)i), format);
            nans += fp8_is_nan(got, format);
            if (!fp8_same(got, expected[i], format) && wrong++ == 0) first = i;
        }
        CHECK(wrong == 0 && nans == 2 * 127,
              "%s: all casts equal torchao's (%d of 65536 differ, first bf16 %04x), and 254 are NaN (found %d)",
              fp8_format_name(format), wrong, first, nans);
        free(expected);
    }
    safetensors_close(&st);
}

static void test_golden_scales(void) {
    Safetensors st = fp8_golden_open("dev/reference/goldens/fp8_scales.safetensors");
    for (int f = 0; f < 2; f++) {
        const Fp8Format format = (Fp8Format)f;
        char name[32];
        format_checked(name, sizeof name, "%s_special", fp8_format_name(format));
        float *expected = (float *)fp8_golden_bytes(&st, fp8_format_name(format), ST_F32, 0x7f80),
              *special = (float *)fp8_golden_bytes(&st, name, ST_F32, 2);
        int wrong = 0;
        for (int i = 0; i < 0x7f80; i++)
            wrong += float_bits(fp8_scale(bf16_to_float((bf16_bits)i), format)) != float_bits(expected[i]);
        CHECK(wrong == 0, "%s: all scales equal torchao's; %d of 32640 differ", fp8_format_name(format), wrong);
        CHECK(fp8_scale(INFINITY, format) == special[0] && isnan(fp8_scale(NAN, format)) && isnan(special[1]),
              "%s: an amax of infinity or NaN gives torchao's scale", fp8_format_name(format));
        free(expected);
        free(special);
    }
    safetensors_close(&st);
}

// Tests amax, scale and cast of whole tensors.
static void test_golden_tensors(void) {
    Safetensors st = fp8_golden_open("dev/reference/goldens/fp8_tensors.safetensors");
    int cases = 0;
    for (int64_t i = 0; i < st.count; i++) {
        const size_t n = strlen(st.tensors[i].name);
        if (n < 3 || strcmp(st.tensors[i].name + n - 2, ".x") != 0) continue;
        cases++;
        const int64_t elements = st.tensors[i].elements;
        bf16_bits *x = (bf16_bits *)fp8_golden_bytes(&st, st.tensors[i].name, ST_BF16, -1);
        float amax = 0;
        for (int64_t k = 0; k < elements; k++) {
            const float magnitude = fabsf(bf16_to_float(x[k]));
            if (magnitude > amax || isnan(magnitude)) amax = magnitude;
            if (isnan(amax)) break;
        }
        for (int f = 0; f < 2; f++) {
            const Fp8Format format = (Fp8Format)f;
            char name[128];
            format_checked(name, sizeof name, "%.*s.%s", (int)n - 2, st.tensors[i].name, fp8_format_name(format));
            uint8_t *expected = (uint8_t *)fp8_golden_bytes(&st, name, ST_U8, elements);
            format_checked(name, sizeof name, "%.*s.%s_scale", (int)n - 2, st.tensors[i].name, fp8_format_name(format));
            float *scale = (float *)fp8_golden_bytes(&st, name, ST_F32, 1);
            const float s = fp8_scale(amax, format);
            int64_t wrong = 0;
            for (int64_t k = 0; k < elements; k++) {
                const uint8_t got = fp8_from_float(bf16_to_float(x[k]) * s, format);
                wrong += !fp8_same(got, expected[k], format);
            }
            CHECK(wrong == 0 && (s == scale[0] || (isnan(s) && isnan(scale[0]))),
                  "%s: the casts equal torchao's (%lld of %lld differ); the scale is %.9g, torchao's %.9g", name,
                  (long long)wrong, (long long)elements, s, scale[0]);
            free(expected);
            free(scale);
        }
        free(x);
    }
    CHECK(cases > 0, "the goldens have cases");
    safetensors_close(&st);
}

// ---- FP8 from the definition of the formats.

static double defined_value(uint8_t code, Fp8Format format) {
    const int mantissa = format == FP8_E4M3 ? 3 : 2, bias = format == FP8_E4M3 ? 7 : 15,
              exponent = (code & 0x7f) >> mantissa, fraction = code & ((1 << mantissa) - 1);
    if (fp8_is_nan(code, format)) return NAN;
    if (format == FP8_E5M2 && (code & 0x7f) == 0x7c) return code & 0x80 ? -INFINITY : INFINITY;
    const double magnitude =
        exponent ? ldexp((1 << mantissa) + fraction, exponent - bias - mantissa) : ldexp(fraction, 1 - bias - mantissa);
    return code & 0x80 ? -magnitude : magnitude;
}

static void test_decode(void) {
    for (int f = 0; f < 2; f++) {
        const Fp8Format format = (Fp8Format)f;
        int wrong = 0, back = 0;
        for (int code = 0; code < 256; code++) {
            const double expected = defined_value((uint8_t)code, format);
            const float got = fp8_to_float((uint8_t)code, format);
            wrong += isnan(expected) ? !isnan(got) : got != expected || !signbit(got) != !signbit(expected);
            if (isfinite(expected)) back += fp8_from_float(got, format) != code;
        }
        CHECK(wrong == 0 && back == 0,
              "%s: all codes decode to their value (%d do not) and come back when cast again (%d finite ones do not)",
              fp8_format_name(format), wrong, back);
        CHECK(fp8_to_float(format == FP8_E4M3 ? 0x7e : 0x7b, format) == fp8_max(format),
              "the largest finite code decodes to fp8_max");
        CHECK(fp8_from_float(INFINITY, format) == (format == FP8_E4M3 ? 0x7e : 0x7b) &&
                  fp8_from_float(-1e30f, format) == (format == FP8_E4M3 ? 0xfe : 0xfb),
              "infinity and large values saturate at the largest finite code");
        CHECK(fp8_from_float(NAN, format) == 0x7f && fp8_from_float(-0.0f, format) == 0x80 &&
                  fp8_from_float(0.0f, format) == 0,
              "NaN is cast to 0x7f, and zeros keep their sign");
    }
}

// Returns the nearest of all finite codes, ties to even, by search.
static uint8_t nearest_code(float x, Fp8Format format) {
    int best = 0;
    double distance = INFINITY;
    for (int code = 0; code < 128; code++) {
        const double value = defined_value((uint8_t)code, format);
        if (!isfinite(value)) continue;
        const double d = fabs(fabs((double)x) - value);
        if (d < distance || (d == distance && code % 2 == 0)) best = code, distance = d;
    }
    return (uint8_t)(best | (signbit(x) ? 0x80 : 0));
}

static void test_nearest(void) {
    for (int f = 0; f < 2; f++) {
        const Fp8Format format = (Fp8Format)f;
        int wrong = 0;
        float first = 0;
        for (uint64_t i = 0; i < 20000; i++) {
            // Random floats over the format's range and beyond, ties between neighbours, and the floats next to those
            // ties.
            float x = ldexpf(rng_uniform(1, i) + 0.5f, (int)(rng_u64(2, i) % 50) - 30) * (i & 1 ? -1.0f : 1.0f);
            if (i < 3 * 126) {
                const float low = fp8_to_float((uint8_t)(i / 3), format),
                            high = fp8_to_float((uint8_t)(i / 3 + 1), format);
                if (!isfinite(high) || !isfinite(low)) continue;
                x = 0.5f * (low + high);
                if (i % 3 == 1) x = nextafterf(x, 0);
                if (i % 3 == 2) x = nextafterf(x, INFINITY);
            }
            if (fp8_from_float(x, format) != nearest_code(x, format) && wrong++ == 0) first = x;
        }
        CHECK(wrong == 0, "%s: all casts give the nearest code; %d do not, the first of them %.9g",
              fp8_format_name(format), wrong, first);
    }
}

// ---- bfloat16.

static void test_bf16(void) {
    int wrong = 0;
    for (uint32_t i = 0; i < 65536; i++) {
        const float x = bf16_to_float((bf16_bits)i);
        const bool is_nan = (i & 0x7fff) > 0x7f80;
        wrong += is_nan ? !isnan(x) || !isnan(bf16_round(x)) : bf16_from_float(x) != i;
    }
    CHECK(wrong == 0, "all bf16 numbers come back from fp32; %d of 65536 do not", wrong);
    // Nearest with ties to even: between neighbours a < b, values below the middle round to a, values above to b, the
    // middle to the even one.
    for (uint32_t i = 0; i < 0x7f7f; i += 7) {
        const float a = bf16_to_float((bf16_bits)i), b = bf16_to_float((bf16_bits)(i + 1)),
                    middle = (float)(0.5 * ((double)a + b));
        const bf16_bits even = (bf16_bits)(i % 2 ? i + 1 : i);
        wrong += bf16_from_float(middle) != even || bf16_from_float(nextafterf(middle, 0)) != i ||
                 bf16_from_float(nextafterf(middle, INFINITY)) != i + 1 || bf16_from_float(-middle) != (even | 0x8000);
    }
    CHECK(wrong == 0, "all roundings to bf16 are right; %d are not", wrong);
    CHECK(bf16_from_float(3.4e38f) == 0x7f80 && bf16_from_float(-INFINITY) == 0xff80 &&
              isnan(bf16_round(float_from_bits(0x7f800001u))),
          "3.4e38 and -infinity become infinities in bf16, and NaN stays NaN");
}

// Over all 65536 random inputs, every result is one of the two neighbours, and the mean of the results is the value.
static void test_stochastic_rounding(void) {
    const float values[] = {1.0f,   1.001f, -1.001f, 3.14159265f, -2.71828e-20f,
                            1e-40f, 0.0f,   -0.0f,   6.0e37f,     0.99999994f};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        double sum = 0;
        int foreign = 0;
        const float x = values[i], low = bf16_to_float((bf16_bits)(float_bits(x) >> 16)),
                    high = bf16_to_float((bf16_bits)((float_bits(x) >> 16) + 1));
        for (uint32_t r = 0; r < 65536; r++) {
            const float y = bf16_to_float(bf16_from_float_stochastic(x, r));
            foreign += y != low && y != high;
            sum += y;
        }
        CHECK(foreign == 0 && fabs(sum / 65536 - x) <= 1e-15 * fabs(x),
              "%.9g: the mean of all roundings is the value; found %.17g, and %d results that are no neighbours", x,
              sum / 65536, foreign);
    }
    CHECK(bf16_from_float_stochastic(1.001f, 0xabcd0000u) == bf16_from_float_stochastic(1.001f, 0),
          "only the lower 16 random bits count");
    CHECK(bf16_from_float_stochastic(INFINITY, 65535) == 0x7f80 &&
              isnan(bf16_to_float(bf16_from_float_stochastic(NAN, 65535))),
          "stochastic rounding keeps infinity and NaN");
    // 1000 additions of a tenth of a bf16 spacing end near the true sum, while rounding to nearest never leaves 1. Each
    // addition has a variance of 0.1 * 0.9 spacings^2, so sigma of the sum is 0.3 * 2^-7 * sqrt(1000) = 0.074.
    float sum = 1;
    for (uint64_t i = 0; i < 1000; i++)
        sum = bf16_to_float(bf16_from_float_stochastic(sum + 0.00078125f, (uint32_t)rng_u64(9, i)));
    CHECK(fabsf(sum - 1.78125f) < 4 * 0.074f, "the sum is about 1.78; found %g", sum);
    CHECK(bf16_round(1 + 0.00078125f) == 1, "rounding to nearest rounds 1.00078 to 1");
}

// ---- Random numbers.

static void test_uniform(void) {
    // Chi-square over 256 bins for the numbers, and over 16 x 16 bins for pairs of neighbours, in several sequences.
    const int64_t n = 1 << 18;
    for (uint64_t stream = 0; stream < 4; stream++) {
        int64_t bins[256] = {0}, pairs[256] = {0};
        const uint64_t key = rng_key(42, stream);
        float low = 1, high = 0;
        for (int64_t i = 0; i < n; i++) {
            const float u = rng_uniform(key, (uint64_t)i), v = rng_uniform(key, (uint64_t)i + 1);
            if (u < low) low = u;
            if (u > high) high = u;
            bins[(int)(u * 256)]++;
            pairs[(int)(u * 16) * 16 + (int)(v * 16)]++;
        }
        double chi = 0, chi_pairs = 0;
        for (int b = 0; b < 256; b++) {
            const double e = (double)n / 256;
            chi += ((double)bins[b] - e) * ((double)bins[b] - e) / e;
            chi_pairs += ((double)pairs[b] - e) * ((double)pairs[b] - e) / e;
        }
        // 255 degrees of freedom: mean 255, sigma 22.6. The bound is five sigma either way. Overlapping pairs vary a
        // little more.
        CHECK(chi > 142 && chi < 368 && chi_pairs > 130 && chi_pairs < 380,
              "stream %llu: single numbers and pairs are evenly distributed; found chi-squares of %.1f and %.1f",
              (unsigned long long)stream, chi, chi_pairs);
        CHECK(low >= 0 && low < 1e-4f && high < 1 && high > 0.9999f,
              "uniform numbers lie in [0, 1), with some below 0.0001 and above 0.9999; found %g to %g", low, high);
    }
}

static void test_normal(void) {
    const int64_t n = 1 << 20;
    const uint64_t key = rng_key(42, 7);
    double moment[5] = {0}, neighbours = 0, streams = 0, largest = 0;
    int64_t below[7] = {0};
    for (int64_t i = 0; i < n; i++) {
        const double x = rng_normal(key, (uint64_t)i);
        for (int k = 1; k <= 4; k++) moment[k] += pow(x, k) / (double)n;
        neighbours += x * rng_normal(key, (uint64_t)i + 1) / (double)n;
        streams += x * rng_normal(rng_key(42, 8), (uint64_t)i) / (double)n;
        for (int t = -3; t <= 3; t++) below[t + 3] += x < t;
        largest = fmax(largest, fabs(x));
    }
    // The bounds are five sigma. For the moments 1 to 4 of n numbers, sigma is the root of 1/n, 2/n, 15/n and 96/n.
    const double s = 5 / sqrt((double)n);
    CHECK(fabs(moment[1]) < s && fabs(moment[2] - 1) < s * sqrt(2) && fabs(moment[3]) < s * sqrt(15) &&
              fabs(moment[4] - 3) < s * sqrt(96),
          "the moments are those of a normal distribution; found %.5f, %.5f, %.5f, %.5f", moment[1], moment[2],
          moment[3], moment[4]);
    CHECK(fabs(neighbours) < s && fabs(streams) < s, "neighbours and streams are uncorrelated; found %.5f and %.5f",
          neighbours, streams);
    for (int t = -3; t <= 3; t++) {
        const double expected = 0.5 * erfc(-t / sqrt(2)), got = (double)below[t + 3] / (double)n;
        CHECK(fabs(got - expected) < s * sqrt(expected * (1 - expected)), "P(x < %d) is %.6f; expected %.6f", t, got,
              expected);
    }
    CHECK(largest > 4.2 && largest < 5.8, "the largest of 2^20 numbers is between 4.2 and 5.8; found %.2f",
          largest);  // numbers from 24 uniform bits end at sqrt(48 ln 2) = 5.77
}

static void test_elementary_functions(void) {
    double worst_log = 0, worst_cos = 0;
    for (uint32_t i = 1; i <= 1 << 24; i += i < 4096 ? 1 : 997) {
        const float u = (float)i * 0x1p-24f;
        const double log_expected = -2 * log((double)u);
        if (log_expected > 0) worst_log = fmax(worst_log, fabs(rng_minus_2ln(u) / log_expected - 1));
        if (i < 1 << 24)
            worst_cos = fmax(worst_cos, fabs(rng_cos_turn(u) - cos(2 * 3.14159265358979323846 * (double)u)));
    }
    CHECK(rng_minus_2ln(1.0f) == 0 && worst_log < 1e-6 && worst_cos < 1e-6,
          "the relative error of -2 ln and the absolute error of cos are below 1e-6, as rng.h states; found %.2g and "
          "%.2g",
          worst_log, worst_cos);
    CHECK(isfinite(rng_minus_2ln(0x1p-24f)), "-2 ln of the smallest uniform number is finite");
}

static void test_keys(void) {
    // All small (seed, stream) pairs have different keys, and their sequences begin differently.
    enum { SEEDS = 40, STREAMS = 50 };
    static uint64_t keys[2 * SEEDS * STREAMS];
    int n = 0, same = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        for (uint64_t stream = 0; stream < STREAMS; stream++) {
            keys[n++] = rng_key(seed, stream);
            keys[n++] = rng_u64(rng_key(seed, stream), 0);
        }
    for (int i = 0; i < n; i++)
        for (int k = i + 1; k < n; k++) same += keys[i] == keys[k];
    CHECK(same == 0, "no two keys or first numbers are equal; found %d pairs", same);
    // A pinned value: the numbers must not change between builds, since checkpoints rely on them.
    CHECK(rng_mix(0x9e3779b97f4a7c15ull) == 0xe220a8397b1dcdafull,
          "rng_mix gives SplitMix64's first output for seed 0; found %016llx",
          (unsigned long long)rng_mix(0x9e3779b97f4a7c15ull));
    // Changing a bit of the key changes about half of the output bits.
    for (int bit = 0; bit < 64; bit += 9) {
        int flips = 0;
        for (uint64_t i = 0; i < 1000; i++) flips += __builtin_popcountll(rng_u64(i, 5) ^ rng_u64(i ^ 1ull << bit, 5));
        CHECK(flips > 31000 && flips < 33000, "changing bit %d of the key changes about 32 of 64 bits; found %.2f", bit,
              flips / 1000.0);  // mean 32, sigma 4 / sqrt(1000)
    }
}

int main(void) {
    test_golden_casts();
    test_golden_scales();
    test_golden_tensors();
    test_decode();
    test_nearest();
    test_bf16();
    test_stochastic_rounding();
    test_uniform();
    test_normal();
    test_elementary_functions();
    test_keys();
    return check_report();
}
