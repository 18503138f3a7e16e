// gradient_bias: measures on the CPU what FP8 does to gradients (llmc/run/bias_run.h), with train_fp8.c as it is.
#define TESTING
#include "llmc/run/bias_run.h"

#include "llmc/cpu/quantize.h"

// gemm() of llmc/cpu/quantize.h, with what --only and --plant change. In the null arm wgrad rounds its results
// stochastically: the CPU has only one order of sums. fprop and dgrad stay as they are: they read equal values in many
// micro-batches (embeddings of frequent tokens), so other roundings there would be a bias.
static void hooked_gemm(Trainer *t, Real *c, const QTensor *a, TensorUsage copy_a, const QTensor *b, TensorUsage copy_b,
                        int64_t M, int64_t N, int64_t depth, const Real *bias) {
    BiasHooks *h = bias_hooks();
    const GemmKind kind = b->role == TENSOR_X ? GEMM_WGRAD : a->role == TENSOR_X ? GEMM_FPROP : GEMM_DGRAD;
    bool *bf16 = &t->precision.keeps_bf16[a->layer * NUM_LINEARS + a->linear];
    const bool before = *bf16, null_arm = h->active && kind == GEMM_WGRAD && !precision_is_fp8(&t->precision);
    const float factor = bias_planted(a->layer, a->linear, kind);
    const Rounding rounding = t->rounding;
    *bf16 = before || bias_keeps_bf16(a->layer, a->linear, kind);
    if (null_arm || factor != 1) t->rounding = ROUND_NONE;
    gemm(t, c, a, copy_a, b, copy_b, M, N, depth, bias);
    *bf16 = before;
    h->random = rng_key(h->random, 0);
    for (int64_t i = 0; t->rounding != rounding && i < M * N; i++) {
        const uint32_t bits = (uint32_t)(rng_u64(h->random, (uint64_t)i) >> 48);
        c[i] = null_arm ? bf16_to_float(bf16_from_float_stochastic(c[i] * factor, bits)) : bf16_round(c[i] * factor);
    }
    t->rounding = rounding;
}
#define gemm hooked_gemm
#include "train_fp8.c"
#undef gemm

static void gradients(void *context, DataLoader *data, int64_t first_sample) {
    Trainer *t = (Trainer *)context;
    read_batch(t, data, first_sample, 0, 0);
    micro_step(t, 1.0f / (float)t->d.R, 0, 0);
    end_micro_steps(t);
}

static float *sum_memory(int64_t elements) { return (float *)xcalloc((size_t)elements, sizeof(float)); }
static void *shared_memory(int64_t bytes) { return xcalloc((size_t)bytes, 1); }

static void join(void *plain, void *other, const BiasWork *w) {
    const float *g = ((Trainer *)plain)->params.gradients, *x = ((Trainer *)other)->params.gradients;
    PARALLEL_FOR
    for (int64_t c = 0; c < w->count; c++) {
        double *terms = w->terms + c * BIAS_TERMS;
        memset(terms, 0, BIAS_TERMS * sizeof *terms);
        for (int64_t i = w->chunks[c].offset; i < w->chunks[c].offset + w->chunks[c].count; i++)
            bias_join(terms, g[i], x[i], &w->errors[i], &w->gradients[i], w->before ? w->before[i] : 0, w->join);
    }
}

int main(int argc, char **argv) {
    static Trainer plain, other;
    openmp_give_way();
    const BiasOps ops = {&trainer_ops, &plain, &other, NULL, gradients, sum_memory, shared_memory, join};
    return bias_main(argc, argv, &ops);
}
