// gradient_bias: measures on the CPU what FP8 does to gradients (llmc/run/bias_run.h), with train_fp8.c as it is.
#define TESTING
#include "llmc/run/bias_run.h"

#include "llmc/cpu/quantize.h"

// gemm() of llmc/cpu/quantize.h, with what --only and --plant change.
static void hooked_gemm(Trainer *t, Real *c, const QTensor *a, TensorUsage copy_a, const QTensor *b, TensorUsage copy_b,
                        int64_t M, int64_t N, int64_t depth, const Real *bias) {
    const GemmKind kind = b->role == TENSOR_X ? GEMM_WGRAD : a->role == TENSOR_X ? GEMM_FPROP : GEMM_DGRAD;
    bool *bf16 = &t->precision.keeps_bf16[a->layer * NUM_LINEARS + a->linear];
    const bool before = *bf16;
    const float factor = bias_planted(a->layer, a->linear, kind);
    *bf16 = before || bias_keeps_bf16(a->layer, a->linear, kind);
    gemm(t, c, a, copy_a, b, copy_b, M, N, depth, bias);
    *bf16 = before;
    for (int64_t i = 0; factor != 1 && i < M * N; i++) c[i] = round_to(c[i] * factor, t->rounding);
}
#define gemm hooked_gemm
#include "train_fp8.c"
#undef gemm

// In the null arm, the sequences change their places in the batch: weight gradients then sum over tokens in another
// order. The CPU has only one algorithm for a GEMM.
static void gradients(void *context, DataLoader *data, int64_t first_sample) {
    Trainer *t = (Trainer *)context;
    const int64_t T = t->d.T;
    const bool moves = bias_hooks()->active && t->o->precision == PRECISION_BF16;
    for (int64_t row = 0; row < t->d.B; row++) {
        const int64_t to = (row + moves) % t->d.B;
        dataloader_batch(data, first_sample + row, 1, t->batch.inputs + to * T, t->batch.targets + to * T);
    }
    micro_step(t, 1.0f / (float)t->d.R, 0, 0);
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
    openmp_spin_briefly(argv);
    const BiasOps ops = {&trainer_ops, &plain, &other, 2, NULL, gradients, sum_memory, shared_memory, join};
    return bias_main(argc, argv, &ops);
}
