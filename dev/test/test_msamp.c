// Tests AdamW with MS-AMP's states (msamp.h): 20 steps byte for byte against dev/reference/make_msamp_goldens.py, the
// scale rule, FP16 conversions, the rounding of bf16 weights, and casts of FP16 weights to FP8.
#include "../../llmc/reference/adamw_msamp.h"
#include "../../llmc/reference/quantize_reference.h"
#include "lib/check.h"
#include "lib/fp8_golden.h"

enum { STEPS = 20, TENSORS = 8, MOST = 4096 };

typedef struct {
    uint8_t exp_avg[MOST];
    fp16_bits exp_avg_sq[MOST], master[MOST];
    float scale[3][TENSORS];          // scales: exp_avg, exp_avg_sq, master
    float weights[MOST], fp32[MOST];  // decoded FP16 masters; fp32 masters
    float *gradients;                 // [STEPS, n]
    int64_t n, begin[TENSORS + 1];
} State;

// Runs pass 1 of msamp.h over n elements of tensor k. `first` is the first of them, counted over all tensors. Updates
// `weights` and returns the amax of each moment.
static MsampPair first_pass(State *s, float *weights, int64_t k, const float *gradients, int64_t first, int64_t n,
                            int64_t step) {
    const MsampStep msamp = msamp_step(step, 1e-3, 0.9, 0.95, 1e-8, 0.1);
    const AdamwStep adamw = adamw_step(step, 1e-3, 0.9, 0.95, 1e-8, 0.1, false, 42);
    const MsampArrays moments = {s->exp_avg + first, s->exp_avg_sq + first};
    const MsampPair scale = {s->scale[0][k], s->scale[1][k]};
    return adamw_msamp_weights(weights + first, moments, scale, gradients + first, first, n, true, 1, false, &msamp,
                               &adamw);
}

static void second_pass(State *s, int64_t k, MsampPair scale, const float *gradients, int64_t first, int64_t n,
                        int64_t step) {
    const MsampStep msamp = msamp_step(step, 1e-3, 0.9, 0.95, 1e-8, 0.1);
    const MsampArrays moments = {s->exp_avg + first, s->exp_avg_sq + first};
    const MsampPair old = {s->scale[0][k], s->scale[1][k]};
    adamw_msamp_moments(moments, old, scale, gradients + first, n, 1, &msamp);
}

static void encode(State *s, int64_t k, const float *weights) {
    const int64_t first = s->begin[k], n = s->begin[k + 1] - first;
    float amax = 0;
    for (int64_t i = 0; i < n; i++) amax = fmaxf(amax, fabsf(weights[first + i]));
    s->scale[2][k] = msamp_scale(amax, s->scale[2][k], FP16_MAX);
    fp16_weights_encode(s->master + first, weights + first, s->scale[2][k], n);
}

// Takes a step for tensor k: with fp32 masters as a whole, then with FP16 masters in two parts, as two ranks would.
// `step` is counted from 1.
static void take_step(State *s, int64_t k, const float *gradients, int64_t step) {
    const int64_t first = s->begin[k], n = s->begin[k + 1] - first, third = n / 3;
    fp16_weights_decode(s->weights + first, s->master + first, s->scale[2][k], n);
    first_pass(s, s->fp32, k, gradients, first, n, step);
    const MsampPair a = first_pass(s, s->weights, k, gradients, first, third, step),
                    b = first_pass(s, s->weights, k, gradients, first + third, n - third, step);
    const MsampPair scale = {msamp_scale(fmaxf(a.exp_avg, b.exp_avg), 1, FP8_E4M3_MAX),
                             msamp_scale(fmaxf(a.exp_avg_sq, b.exp_avg_sq), 1, FP16_MAX)};
    second_pass(s, k, scale, gradients, first, third, step);
    second_pass(s, k, scale, gradients, first + third, n - third, step);
    s->scale[0][k] = scale.exp_avg, s->scale[1][k] = scale.exp_avg_sq;
    encode(s, k, s->weights);
}

static void state_begin(State *s, const Safetensors *st) {
    int32_t *sizes = (int32_t *)fp8_golden_bytes(st, "sizes", ST_I32, TENSORS);
    memset(s, 0, sizeof *s);
    for (int k = 0; k < TENSORS; k++) s->n = s->begin[k + 1] = s->begin[k] + sizes[k];
    if (s->n > MOST) die("the golden has %lld elements", (long long)s->n);
    s->gradients = (float *)fp8_golden_bytes(st, "gradients", ST_F32, STEPS * s->n);
    float *weights = (float *)fp8_golden_bytes(st, "weights", ST_F32, s->n);
    memcpy(s->fp32, weights, (size_t)s->n * sizeof *weights);
    for (int k = 0; k < TENSORS; k++) {
        s->scale[0][k] = s->scale[1][k] = s->scale[2][k] = 1;
        encode(s, k, weights);
    }
    free(sizes), free(weights);
}

static void test_golden(void) {
    static State s;
    Safetensors st = fp8_golden_open("dev/reference/goldens/msamp.safetensors");
    state_begin(&s, &st);
    for (int64_t step = 0; step < STEPS; step++) {
        for (int64_t k = 0; k < TENSORS; k++) take_step(&s, k, s.gradients + step * s.n, step + 1);
        fp8_golden_check(&st, "", "exp_avg", ST_U8, STEPS, step, s.exp_avg, s.n);
        fp8_golden_check(&st, "", "exp_avg_scale", ST_F32, STEPS, step, s.scale[0], TENSORS);
        fp8_golden_check(&st, "", "exp_avg_sq", ST_F16, STEPS, step, s.exp_avg_sq, s.n);
        fp8_golden_check(&st, "", "exp_avg_sq_scale", ST_F32, STEPS, step, s.scale[1], TENSORS);
        fp8_golden_check(&st, "", "weights.fp32", ST_F32, STEPS, step, s.fp32, s.n);
        fp8_golden_check(&st, "", "weights.fp16", ST_F16, STEPS, step, s.master, s.n);
        fp8_golden_check(&st, "", "weights.fp16_scale", ST_F32, STEPS, step, s.scale[2], TENSORS);
    }
    free(s.gradients);
    safetensors_close(&st);
}

static void test_rule(void) {
    Safetensors st = fp8_golden_open("dev/reference/goldens/msamp.safetensors");
    const int64_t n = safetensors_find(&st, "rule.amax")->elements;
    static const char *const names[] = {"rule.amax", "rule.scale", "rule.fp_max", "rule.result"};
    float *columns[4];
    int64_t wrong = 0;
    for (int i = 0; i < 4; i++) columns[i] = (float *)fp8_golden_bytes(&st, names[i], ST_F32, n);
    for (int64_t i = 0; i < n; i++) {
        const float got = msamp_scale(columns[0][i], columns[1][i], columns[2][i]);
        if (float_bits(got) == float_bits(columns[3][i])) continue;
        if (!wrong++)
            printf("  amax %g, scale %g, fp_max %g: scale %g, the golden's %g\n", (double)columns[0][i],
                   (double)columns[1][i], (double)columns[2][i], (double)got, (double)columns[3][i]);
    }
    CHECK(n > 1000 && wrong == 0, "all scales equal the golden's; %lld of %lld differ", (long long)wrong, (long long)n);
    CHECK(msamp_scale(0, 4, 448) == 4 && msamp_scale(NAN, 4, 448) == 4 && msamp_scale(INFINITY, 4, 448) == 0.25f,
          "an amax of zero or NaN keeps the scale, an infinite amax inverts it");
    CHECK(msamp_scale(448, 1, 448) == 1 && msamp_scale(449, 1, 448) == 0.5f && msamp_scale(224, 1, 448) == 2,
          "the scale is the largest power of two with which the amax does not overflow");
    CHECK(msamp_scale(0x1p-149f, 1, 448) == 0x1p126f && msamp_scale(0x1p127f, 1, FP16_MAX) == 0x1p-112f,
          "a scale is at most 2^126, and may be as small as 2^-112");
    for (int i = 0; i < 4; i++) free(columns[i]);
    safetensors_close(&st);
}

// Returns the nearest finite FP16 number by the definition of the format: 11 significant bits, and a multiple of 2^-24.
static double nearest_fp16(double x) {
    int exponent;
    frexp(x, &exponent);
    const double unit = ldexp(1, exponent < -13 ? -24 : exponent - 11);
    return fmax(-65504, fmin(65504, nearbyint(x / unit) * unit));
}

// Casts numbers of all magnitudes, each FP16 number below 65504 in magnitude, and the ties between neighbours.
// test_safetensors.c checks the casts from FP16 to fp32.
static void test_fp16(void) {
    int64_t wrong = 0, ties = 0, tested = 0;
    for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 2053) {
        const float x = float_from_bits((uint32_t)bits);
        if (!isfinite(x)) continue;
        tested++;
        wrong += (double)fp16_to_float(fp16_from_float(x)) != nearest_fp16((double)x);
    }
    for (uint32_t code = 0; code < 0x7bff; code++)
        for (int sign = -1; sign <= 1; sign += 2) {
            const float x = (float)sign * fp16_to_float((fp16_bits)code),
                        tie = (x + (float)sign * fp16_to_float((fp16_bits)(code + 1))) / 2;
            const fp16_bits high = sign < 0 ? 0x8000 : 0, even = (fp16_bits)(code + (code & 1));
            ties += fp16_from_float(x) != (high | code) || fp16_from_float(tie) != (high | even);
        }
    CHECK(wrong == 0, "casts to FP16 give the nearest number; %lld of %lld do not", (long long)wrong,
          (long long)tested);
    CHECK(ties == 0, "FP16 numbers keep their codes, and ties go to the even code; %lld do not", (long long)ties);
    CHECK(fp16_from_float(INFINITY) == 0x7c00 && fp16_from_float(-INFINITY) == 0xfc00 &&
              fp16_from_float(NAN) == 0x7e00 && fp16_from_float(1e30f) == 0x7bff && fp16_from_float(-65520) == 0xfbff,
          "infinity and NaN stay, finite values saturate");
}

// Returns how often x, a positive number, is rounded up by `draws` random words with evenly spaced upper bits. *wrong
// counts results other than the two neighbours.
static int64_t rounded_up(float x, uint32_t draws, int64_t *wrong) {
    int64_t up = 0;
    for (uint32_t i = 0; i < draws; i++) {
        const uint32_t random = i * (uint32_t)(((uint64_t)1 << 32) / draws);
        const fp16_bits code = fp16_from_float_stochastic(x, random);
        const float got = fp16_to_float(code), above = fp16_to_float((fp16_bits)(code + 1));
        up += got > x, *wrong += got > x ? fp16_to_float((fp16_bits)(code - 1)) > x : above <= x;
        *wrong += fp16_from_float_stochastic(-x, random) != (code | 0x8000);
    }
    return up;
}

// Stochastic rounding to FP16: up with the probability that keeps the mean, for normal and subnormal numbers.
static void test_fp16_stochastic(void) {
    enum { DRAWS = 1 << 13 };
    int64_t wrong = 0, kept = 0;
    double worst = 0;
    for (int i = 0; i < 2000; i++) {
        const uint64_t u = rng_u64(rng_key(5, 0), (uint64_t)i);
        const float x = ldexpf(1 + (float)(u & 0x7fffff) * 0x1p-23f, (int)(u >> 32) % 46 - 31);  // 2^-31 to 2^15
        const double unit = ldexp(1, x < 0x1p-14f ? -24 : ilogbf(x) - 10), part = fmod((double)x, unit) / unit;
        worst = fmax(worst, fabs((double)rounded_up(x, DRAWS, &wrong) / DRAWS - part));
    }
    CHECK(wrong == 0 && worst <= 1.0 / DRAWS,
          "all are rounded to a neighbour (%lld are not), up as often as the mean needs; "
          "the shares are off by at most %g",
          (long long)wrong, worst);
    for (uint32_t code = 0; code < 0x7c00; code++) {
        const float x = fp16_to_float((fp16_bits)code);
        kept +=
            fp16_from_float_stochastic(x, UINT32_MAX) == code && fp16_from_float_stochastic(-x, 0) == (code | 0x8000);
    }
    CHECK(kept == 0x7c00, "%lld of %d FP16 numbers keep their codes", (long long)kept, 0x7c00);
    CHECK(fp16_from_float_stochastic(65519, UINT32_MAX) == 0x7bff && fp16_from_float_stochastic(-1e30f, 0) == 0xfbff &&
              fp16_from_float_stochastic(INFINITY, 7) == 0x7c00 && fp16_from_float_stochastic(NAN, 7) == 0x7e00,
          "finite values saturate, infinity and NaN stay");
    // FP16 masters take the random bits that bf16 weights take for the step and the flat element.
    const AdamwStep step = adamw_step(3, 1e-3, 0.9, 0.95, 1e-8, 0.1, false, 42);
    const float x[2] = {0.3f, 1e-6f};
    fp16_bits got[2];
    fp16_weights_round(got, x, 0.25f, 1000, 2, &step);
    for (int i = 0; i < 2; i++)
        CHECK(got[i] == fp16_from_float_stochastic(x[i] / 4, adamw_random(&step, 1000 + i).weight),
              "master %d is rounded with the bits of its flat element", i);
}

// Returns the amax of n values that FP16 numbers stand for.
static float stored_amax(const fp16_bits *x, float scale, int64_t n) {
    static float values[MOST];
    fp16_weights_decode(values, x, scale, n);
    return float_from_bits(quantize_tensor_amax(values, n, SCALE_TORCHAO));
}

// Casts weights to FP16, and from there to FP8. The tensors of a fused weight have one FP8 scale.
static void test_casts(void) {
    static fp16_bits halves[MOST];
    static uint8_t codes[MOST];
    enum { MANY = 64 };
    float scales[MANY], inverses[MANY], largest[MANY] = {0};
    Safetensors st = fp8_golden_open("dev/reference/goldens/msamp.safetensors");
    const int64_t tensors = safetensors_find(&st, "cast.sizes")->elements,
                  n = safetensors_find(&st, "cast.weights")->elements;
    if (tensors > MANY || n > MOST) die("the golden has %lld tensors, %lld elements", (long long)tensors, (long long)n);
    int32_t *sizes = (int32_t *)fp8_golden_bytes(&st, "cast.sizes", ST_I32, tensors),
            *fused = (int32_t *)fp8_golden_bytes(&st, "cast.fused", ST_I32, tensors);
    float *weights = (float *)fp8_golden_bytes(&st, "cast.weights", ST_F32, n);
    for (int64_t k = 0, at = 0; k < tensors; at += sizes[k++]) {
        const float amax = float_from_bits(quantize_tensor_amax(weights + at, sizes[k], SCALE_TORCHAO));
        scales[k] = msamp_scale(amax, 1, FP16_MAX);
        fp16_weights_encode(halves + at, weights + at, scales[k], sizes[k]);
        largest[fused[k]] = fmaxf(largest[fused[k]], stored_amax(halves + at, scales[k], sizes[k]));
    }
    for (int64_t k = 0, at = 0; k < tensors; at += sizes[k++]) {
        const float scale = fp16_weights_fp8_scale(largest[fused[k]]);
        fp16_weights_cast(codes + at, halves + at, scales[k], scale, sizes[k]);
        inverses[fused[k]] = 1 / scale;
    }
    fp8_golden_check(&st, "", "cast.fp16", ST_F16, 1, 0, halves, n);
    fp8_golden_check(&st, "", "cast.fp16_scale", ST_F32, 1, 0, scales, tensors);
    fp8_golden_check(&st, "", "cast.fp8", ST_U8, 1, 0, codes, n);
    fp8_golden_check(&st, "", "cast.fp8_scale_inv", ST_F32, 1, 0, inverses, fused[tensors - 1] + 1);
    free(sizes), free(fused), free(weights);
    safetensors_close(&st);
}

// bf16 weights are rounded with the random bits that adamw_reference uses for the step and the flat element.
static void test_bf16_weights(void) {
    enum { N = 64 };
    const MsampStep msamp = msamp_step(3, 1e-3, 0.9, 0.95, 1e-8, 0.1);
    const AdamwStep adamw = adamw_step(3, 1e-3, 0.9, 0.95, 1e-8, 0.1, false, 42);
    float weights[N], exact[N], gradients[N];
    uint8_t m[N] = {0};
    fp16_bits v[N] = {0};
    const MsampArrays moments = {m, v};
    const MsampPair one = {1, 1};
    for (int i = 0; i < N; i++) weights[i] = exact[i] = bf16_round((float)(i + 1) / 7), gradients[i] = (float)(i - 20);
    adamw_msamp_weights(weights, moments, one, gradients, 1000, N, true, 1, true, &msamp, &adamw);
    adamw_msamp_weights(exact, moments, one, gradients, 1000, N, true, 1, false, &msamp, &adamw);
    int wrong = 0;
    for (int i = 0; i < N; i++)
        wrong += weights[i] != bf16_to_float(adamw_round(exact[i], adamw_random(&adamw, 1000 + i).weight));
    CHECK(wrong == 0, "bf16 weights are rounded with the bits of their flat elements; %d of %d are not", wrong, N);
}

int main(void) {
    test_golden();
    test_rule();
    test_fp16();
    test_fp16_stochastic();
    test_casts();
    test_bf16_weights();
    return check_report();
}
