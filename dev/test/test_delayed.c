// Tests delayed.h: scales and histories compared with Transformer Engine's rule written out plainly (its goldens are in
// test_recipes.c), the first scale, amaxes that do not count, and the order of tensors.
#include "../../llmc/reference/delayed.h"
#include "../../llmc/base/rng.h"
#include "lib/check.h"

// Puts a pass's amax into the expected window as Transformer Engine does: into slot 0, from which a shift of all slots
// by one takes it to the last slot. Slot 0 is then cleared.
static void roll(float *history, int64_t window, float amax) {
    history[0] = amax;
    const float first = history[0];
    for (int64_t i = 0; i + 1 < window; i++) history[i] = history[i + 1];
    history[window - 1] = first;
    history[0] = 0;
}

// Makes 500 passes whose amaxes may be zero, NaN or infinite. The scale comes from the largest amax of the whole
// window. While the window holds an infinity, the scale stays.
static void test_passes(int64_t window, int margin, Fp8Format format) {
    float *history = (float *)xcalloc((size_t)window, sizeof(float)),
          *expected = (float *)xcalloc((size_t)window, sizeof(float)), scale = 0, want = 1;
    int64_t wrong = 0, wrong_history = 0;
    for (uint64_t i = 0; i < 500; i++) {
        const uint64_t kind = rng_u64(1, i) % 40;
        const float amax = kind < 4                  ? 0
                           : kind == 4               ? NAN
                           : kind == 5 && i % 7 == 0 ? INFINITY
                                                     : expf(3 * rng_normal(2, i));
        delayed_update(history, window, &scale, float_bits(amax), format, margin);
        if (amax > 0) {
            float largest = amax;
            for (int64_t k = 1; k < window; k++) largest = fmaxf(largest, expected[k]);
            if (isfinite(largest)) want = (float)ldexp(fp8_max(format), -margin) / largest;
            roll(expected, window, amax);
        }
        wrong += float_bits(scale) != float_bits(want);
        wrong_history += memcmp(history, expected, (size_t)window * sizeof(float)) != 0;
    }
    CHECK(wrong == 0 && wrong_history == 0,
          "window %lld, margin %d: scales and histories are as expected; %lld and %lld of 500 are not",
          (long long)window, margin, (long long)wrong, (long long)wrong_history);
    free(history), free(expected);
}

// Single cases with exact results: a scale of 0 (which Transformer Engine never has, because it starts with scale 1),
// amaxes of 0, NaN and infinity, a window of one with a margin, and the smallest amax.
static void test_edges(void) {
    const uint32_t nan = 0x7fc00000u, infinity = 0x7f800000u;
    float history[3] = {0, 0, 0}, scale = 0;
    delayed_update(history, 3, &scale, 0, FP8_E4M3, 0);
    CHECK(scale == 1 && history[2] == 0, "a tensor of zeros gets scale 1 and enters no amax; found scale %g",
          (double)scale);
    scale = 0;
    delayed_update(history, 3, &scale, nan, FP8_E4M3, 0);
    CHECK(scale == 1 && history[2] == 0, "a tensor of NaN gets scale 1 and enters no amax; found scale %g",
          (double)scale);
    scale = 0;
    delayed_update(history, 3, &scale, infinity, FP8_E4M3, 0);
    CHECK(scale == 1 && float_bits(history[2]) == infinity,
          "an infinite tensor gets scale 1 and enters its amax; found scale %g", (double)scale);
    for (int i = 1; i < 3; i++) {
        delayed_update(history, 3, &scale, float_bits(7.0f), FP8_E4M3, 0);
        CHECK(scale == 1, "the scale stays while the infinity is in the window; found %g", (double)scale);
    }
    delayed_update(history, 3, &scale, float_bits(7.0f), FP8_E4M3, 0);
    CHECK(scale == 64 && history[0] == 0 && history[1] == 7 && history[2] == 7,
          "the scale changes when the infinity has left; found %g", (double)scale);
    delayed_update(history, 3, &scale, nan, FP8_E4M3, 0);
    CHECK(scale == 64 && history[1] == 7, "an amax of NaN changes neither scale nor history; found scale %g",
          (double)scale);
    float alone = 0;  // a window of one is empty between passes
    scale = 0;
    delayed_update(&alone, 1, &scale, float_bits(3.5f), FP8_E5M2, 1);
    CHECK(scale == 8192 && alone == 0,
          "margin 1 halves the scale, and the window of one is empty; found scale %g, history %g", (double)scale,
          (double)alone);
    delayed_update(&alone, 1, &scale, 1, FP8_E4M3, 0);
    CHECK(float_bits(scale) == 0x7f7fffffu,
          "the smallest amax above zero gets the largest float as its scale; found %g", (double)scale);
}

static void test_order(void) {
    int64_t next = 0;
    for (int64_t l = 0; l < 3; l++) {
        const TensorRole order[] = {TENSOR_W, TENSOR_X, TENSOR_DY};
        for (int r = 0; r < 3; r++)
            for (int id = 0; id < NUM_LINEARS; id++)
                CHECK(tensor_index(l, order[r], id) == next++,
                      "layer %lld, tensor %d, linear layer %d: tensors are numbered by layer, then w, x and dy, then "
                      "linear layer",
                      (long long)l, r, id);
    }
    CHECK(tensor_count(3) == next, "tensor_count() of 3 layers is %lld", (long long)next);
    float scales[] = {1, 0.5f, 0};
    CHECK(delayed_is_complete(scales, 2) && !delayed_is_complete(scales, 3),
          "the state is complete exactly if no scale is 0");
}

int main(void) {
    test_passes(1, 0, FP8_E4M3);
    test_passes(2, 1, FP8_E5M2);
    test_passes(16, 0, FP8_E5M2);
    test_passes(1024, 3, FP8_E4M3);
    test_edges();
    test_order();
    return check_report();
}
