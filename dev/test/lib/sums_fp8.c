// The CPU trainer on one rank with --grad-accum-dtype fp8, which also adds the gradients of the layers' matrices in
// fp32, and compares its FP8 sums with these after 16, 64 and 256 micro-steps. It prints that in the next one.
#include "sums_fp8.h"

#include "../../../llmc/reference/gradient_fp8.h"

enum { MOST_ELEMENTS = 1 << 24 };

// x: the gradients, with the stored sums added to them
static inline void compared_round(float *x, float scale, int64_t first, int64_t n, const GradientSum *s) {
    static float exact[MOST_ELEMENTS], stored[MOST_ELEMENTS];
    static double fit[FIT_SUMS];
    static int64_t micro_steps, top = -1;  // top: the first matrix of the last layer, where each micro-step begins
    const int64_t at = s->flat + first;
    if (at + n > MOST_ELEMENTS) die("sums_fp8: a model of more than %d parameters", MOST_ELEMENTS);
    if (top < 0) top = at;
    if (at == top) {
        if (fit_is_due(micro_steps)) fit_print(fit, micro_steps);
        memset(fit, 0, sizeof fit);
        micro_steps = s->add ? micro_steps + 1 : 1;
    }
    for (int64_t i = 0; i < n; i++) exact[at + i] = s->add ? exact[at + i] + (x[i] - stored[at + i]) : x[i];
    gradient_fp8_round(x, scale, first, n, s);
    for (int64_t i = 0; i < n; i++) {
        const double sum = stored[at + i] = x[i], want = exact[at + i];
        fit[FIT_PRODUCT] += sum * want, fit[FIT_EXACT] += want * want, fit[FIT_FP8] += sum * sum;
        fit[FIT_DIFFERENCE] += (sum - want) * (sum - want);
    }
}

#define gradient_fp8_round compared_round
#include "../../../train_fp8.c"
