// Tests gradients in FP8 (gradient_fp8.h): 20 micro-steps, and sums over 1 to 4 ranks, byte for byte against
// dev/reference/make_msamp_gradient_goldens.py; gradients that are not finite; and all sums of two codes.
#include "../../llmc/reference/gradient_fp8.h"
#include "lib/check.h"
#include "lib/fp8_golden.h"

enum { RANKS = 4, STEPS = 20, TENSORS = 8, MOST = 1024 };

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

// Compares an array with that of the golden in `step`.
static void check_array(const Golden *g, const char *name, SafetensorsType type, int64_t step, const void *got,
                        int64_t elements) {
    const int64_t bytes = elements * safetensors_type_bytes(type);
    char *want = (char *)fp8_golden_bytes(&g->st, name, type, STEPS * elements);
    int64_t differ = 0;
    for (int64_t i = 0; i < bytes; i++) differ += ((const char *)got)[i] != want[step * bytes + i];
    CHECK(differ == 0, "step %lld: no byte of %s differs from the golden; %lld of %lld do", (long long)step + 1, name,
          (long long)differ, (long long)bytes);
    free(want);
}

// Adds up the gradients of rank 0 as codes and, like the CPU trainer, as rounded values. Both must agree.
static void test_added(const Golden *g) {
    uint8_t codes[MOST];
    float scale[TENSORS], values[MOST], sums[MOST];
    int64_t differ = 0;
    for (int64_t step = 0; step < STEPS; step++) {
        for (int k = 0; k < TENSORS; k++) {
            const int64_t at = g->begin[k], n = g->begin[k + 1] - at;
            const float *gradients = g->gradients + step * g->n + at;
            if (step) gradient_fp8_decode(values + at, codes + at, 1 / scale[k], n);
            for (int64_t i = 0; i < n; i++) {
                differ += step && float_bits(values[at + i]) != float_bits(sums[at + i]);
                sums[at + i] = step ? gradients[i] + sums[at + i] : gradients[i];
            }
            scale[k] = gradient_fp8_scale(gradient_fp8_amax(sums + at, n));
            gradient_fp8_encode(codes + at, sums + at, scale[k], n);
            gradient_fp8_round(sums + at, scale[k], n);
        }
        check_array(g, "added", ST_U8, step, codes, g->n);
        check_array(g, "added_scale", ST_F32, step, scale, TENSORS);
    }
    CHECK(differ == 0, "all rounded sums are the values of the codes; %lld are not", (long long)differ);
}

// Checks one step's sum over `ranks` ranks against the golden. The ranks are whole replicas, whose scale leaves
// headroom for the sum, or a shard group, whose scale does not.
static void test_sum(const Golden *g, int64_t ranks, bool replicas, int64_t step) {
    static uint8_t codes[RANKS][MOST];
    float scale[TENSORS], scale_inv[TENSORS];
    char name[64];
    for (int k = 0; k < TENSORS; k++) {
        const int64_t at = g->begin[k], n = g->begin[k + 1] - at;
        uint32_t amax = 0;
        for (int64_t r = 0; r < ranks; r++) {
            const uint32_t own = gradient_fp8_amax(g->gradients + (r * STEPS + step) * g->n + at, n);
            amax = own > amax ? own : amax;
        }
        scale[k] = gradient_fp8_scale(amax) * (replicas ? gradient_fp8_headroom(ranks) : 1);
        scale_inv[k] = 1 / scale[k] / (float)ranks;
        for (int64_t r = 0; r < ranks; r++)
            gradient_fp8_encode(codes[r] + at, g->gradients + (r * STEPS + step) * g->n + at, scale[k], n);
        gradient_fp8_sum(codes[0] + at, codes[0] + at, ranks, MOST, n);
    }
    format_checked(name, sizeof name, "%s.%lld", replicas ? "replicas" : "shards", (long long)ranks);
    check_array(g, name, ST_U8, step, codes[0], g->n);
    format_checked(name, sizeof name, "%s.%lld.scale", replicas ? "replicas" : "shards", (long long)ranks);
    check_array(g, name, ST_F32, step, scale, TENSORS);
    format_checked(name, sizeof name, "%s.%lld.scale_inv", replicas ? "replicas" : "shards", (long long)ranks);
    check_array(g, name, ST_F32, step, scale_inv, TENSORS);
}

// Gradients that are not finite must show in what the optimizer reads, whatever else their tensor has.
static void test_nonfinite(void) {
    const float bad[] = {INFINITY, -INFINITY, NAN, -NAN};
    for (int i = 0; i < 4; i++) {
        float x[5] = {0, 1, bad[i], -3e38f, 1e-30f};
        const uint32_t amax = gradient_fp8_amax(x, 5);
        const float scale = gradient_fp8_scale(amax);
        uint8_t codes[2][5];
        CHECK(amax >= 0x7f800000u && scale == 1,
              "a tensor with %g has an amax that is not finite, and scale 1; found amax %08x, scale %g", (double)bad[i],
              amax, (double)scale);
        gradient_fp8_encode(codes[0], x, scale, 5);
        memset(codes[1], 0x38, 5);
        gradient_fp8_sum(codes[0], codes[0], 2, 5, 5);
        gradient_fp8_round(x, scale, 5);
        CHECK(codes[0][2] == GRADIENT_FP8_NAN && isnan(x[2]),
              "a sum with %g has the code of NaN, and %g is rounded to NaN; found code %02x, value %g", (double)bad[i],
              (double)bad[i], codes[0][2], (double)x[2]);
        CHECK(codes[0][0] == 0x38 && codes[0][3] != GRADIENT_FP8_NAN && x[3] == -448,
              "other elements of the tensor stay numbers");
    }
    CHECK(gradient_fp8_scale(0) == 1 && gradient_fp8_scale(1) == 0x1p126f,
          "an amax of zero gives scale 1, and the smallest amax above zero gives 2^126");
}

// Adds each pair of codes. The sum is that of FP16, rounded to E4M3.
static void test_add(void) {
    int64_t differ = 0;
    for (int pair = 0; pair < 1 << 16; pair++) {
        const uint8_t a = (uint8_t)pair, b = (uint8_t)(pair >> 8);
        const float half = fp16_to_float(fp16_from_float(fp8_to_float(a, FP8_E4M3) + fp8_to_float(b, FP8_E4M3)));
        differ += !fp8_same(gradient_fp8_add(a, b), fp8_from_float(half, FP8_E4M3), FP8_E4M3);
    }
    CHECK(differ == 0, "each sum is the FP16 sum, rounded to E4M3; %lld of 65536 are not", (long long)differ);
    CHECK(gradient_fp8_add(0x7f, 0) == 0x7f && gradient_fp8_add(0xfe, 0xff) == 0x7f, "NaN stays NaN in sums");
    CHECK(gradient_fp8_add(0x7e, 0x7e) == 0x7e && gradient_fp8_add(0xfe, 0xfe) == 0xfe, "sums saturate");
    CHECK(gradient_fp8_add(0x7e, 0xfe) == 0, "opposite codes cancel");
}

int main(void) {
    Golden g = golden_begin();
    test_added(&g);
    for (int64_t step = 0; step < STEPS; step++)
        for (int64_t ranks = 1; ranks <= RANKS; ranks++)
            test_sum(&g, ranks, true, step), test_sum(&g, ranks, false, step);
    test_nonfinite();
    test_add();
    free(g.gradients);
    safetensors_close(&g.st);
    return check_report();
}
