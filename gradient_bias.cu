// gradient_bias: measures on the GPU what FP8 does to gradients (llmc/run/bias_run.h), with train_fp8.cu as it is.
#define TESTING
#include "llmc/fp8/linear.cuh"
#include "llmc/run/bias_run.h"

// Calls of the linear layers' GEMMs in train_fp8.cu come here. a, b: operands in cuBLASLt's order (gemm_run).
static void hooked_gemm(void *trainer, GemmKind kind, bf16 *result, const QTensor *a, const QTensor *b,
                        const bf16 *bias);
#define linears_fprop(ln, y, x, w, bias) hooked_gemm(t, GEMM_FPROP, y, w, x, bias)
#define linears_dgrad(ln, dx, dy, w) hooked_gemm(t, GEMM_DGRAD, dx, w, dy, NULL)
#define linears_wgrad(ln, dw, dy, x) hooked_gemm(t, GEMM_WGRAD, dw, x, dy, NULL)
// With --only PLACE.GEMM the linear layer's other GEMMs read bf16 data, so its tensors keep that beside their FP8 data.
#define recipe_needs_bf16(r, role) (bias_hooks()->only.gemm >= 0 || recipe_needs_bf16(r, role))
#include "train_fp8.cu"

// Runs a GEMM with alpha = factor, from device memory. Emulated GEMMs have another alpha.
static void planted_gemm(Trainer *t, GemmPlan plan, float factor, bf16 *result, const QTensor *a, const QTensor *b,
                         const bf16 *bias) {
    const bool host_mode = !plan.one_zero;
    float *alpha_beta = NULL;
    const float values[2] = {factor, 0};
    if (plan.emulated || plan.blockwise)
        die_with(EXIT_UNSUPPORTED,
                 "--plant changes GEMMs of cuBLASLt alone: with blockwise on Hopper wgrad, with --fp8-emulate none");
    CUDA_CHECK(cudaMalloc((void **)&alpha_beta, sizeof values));
    CUDA_CHECK(cudaMemcpyAsync(alpha_beta, values, sizeof values, cudaMemcpyHostToDevice, t->stream));
    plan.one_zero = alpha_beta;
    gemm_set_int(plan.matmul, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    gemm_run(&t->linears.gemm, &plan, result, a, b, bias, false);
    if (host_mode) gemm_set_int(plan.matmul, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_HOST);
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    CUDA_CHECK(cudaFree(alpha_beta));
}

static void hooked_gemm(void *trainer, GemmKind kind, bf16 *result, const QTensor *a, const QTensor *b,
                        const bf16 *bias) {
    Trainer *t = (Trainer *)trainer;
    LinearPlans *plans = &t->linears.plans[a->linear];
    const bool in_bf16 = !a->fp8 || bias_keeps_bf16(a->layer, a->linear, kind);
    const QTensor *x = kind == GEMM_FPROP ? b : a;
    // SwiGLU's output is never in bf16 if its linear layer is FP8.
    if (a->fp8 && in_bf16 && kind != GEMM_DGRAD && a->linear == DOWN_PROJ)
        swiglu_forward(x->data, t->acts.layer[a->layer].gate_up, t->d.R, t->d.F, t->stream);
    GemmPlan *plan = in_bf16 ? &plans->bf16[kind] : &plans->fp8[kind];
    const float factor = bias_planted(a->layer, a->linear, kind);
    if (factor != 1) planted_gemm(t, *plan, factor, result, a, b, bias);
    else linears_gemm(&t->linears, "linear layers", plan, result, a, b, bias, false);
}

// Gives a plan the last of cuBLASLt's algorithms that can run it; its own is the first. Most differ in tiles or in how
// they split the sum.
static void other_algorithm(const Gemm *g, GemmPlan *p) {
    cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES], result;
    cublasStatus_t status;
    if (!p->matmul) return;
    for (int i = gemm_candidates(g, p, found, &status) - 1; i > 0; i--) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS ||
            cublasLtMatmulAlgoCheck(g->handle, p->matmul, p->a, p->b, p->d, p->d, &found[i].algo, &result))
            continue;
        p->algo = found[i].algo;
        return;
    }
}

// Changes wgrad alone: fprop and dgrad read equal values in many micro-batches (embeddings of frequent tokens), so
// other sums there would be a bias.
static void sum_otherwise(void *context) {
    Linears *ln = &((Trainer *)context)->linears;
    for (int id = 0; id < NUM_LINEARS; id++) other_algorithm(&ln->gemm, &ln->plans[id].bf16[GEMM_WGRAD]);
    other_algorithm(&ln->gemm, &ln->lm_head[GEMM_WGRAD]);
    other_algorithm(&ln->gemm, &ln->lm_head_tail[GEMM_WGRAD]);
}

static void gradients(void *context, DataLoader *data, int64_t first_sample) {
    Trainer *t = (Trainer *)context;
    fsdp_begin_step(&t->fsdp, 0);
    tensor_scales_begin_step(&t->linears.scales);
    fsdp_begin_micro_step(&t->fsdp, 0);
    const Batch batch = send_batch(t, data, first_sample, 0, 0);
    model_forward_backward(t, &batch, 1.0f / (float)t->d.R, true);
    trainer_wait_all(t);
}

static float *sum_memory(int64_t elements) {
    float *memory;
    CUDA_CHECK(cudaMalloc((void **)&memory, (size_t)elements * sizeof *memory));
    return memory;
}

static void *pinned_memory(int64_t bytes) { return host_memory_pinned("gradient_bias", bytes); }

// Block c joins chunk c, and writes the chunk's terms. All sums are in a fixed order.
static __global__ void __launch_bounds__(256) join_kernel(const bf16 *plain, const bf16 *other, BiasWork w) {
    __shared__ double sums[BIAS_TERMS][256];
    double terms[BIAS_TERMS] = {};
    grid_dependency_wait();
    const BiasChunk chunk = w.chunks[blockIdx.x];
    for (int64_t i = chunk.offset + threadIdx.x; i < chunk.offset + chunk.count; i += 256)
        bias_join(terms, __bfloat162float(plain[i]), __bfloat162float(other[i]), &w.errors[i], &w.gradients[i],
                  w.before ? w.before[i] : 0, w.join);
    for (int k = 0; k < BIAS_TERMS; k++) sums[k][threadIdx.x] = terms[k];
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        for (int k = 0; k < BIAS_TERMS && threadIdx.x < half; k++) sums[k][threadIdx.x] += sums[k][threadIdx.x + half];
    }
    __syncthreads();
    if (threadIdx.x < BIAS_TERMS) w.terms[blockIdx.x * BIAS_TERMS + threadIdx.x] = sums[threadIdx.x][0];
}

static void join(void *plain, void *other, const BiasWork *w) {
    const Trainer *t = (const Trainer *)plain;
    CUDA_LAUNCH(join_kernel, grid_size(w->count, 1), 256, 0, t->stream, t->fsdp.transport.sums,
                ((const Trainer *)other)->fsdp.transport.sums, *w);
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
}

int main(int argc, char **argv) {
    static Trainer plain, other;
    const BiasOps ops = {&trainer_ops, &plain, &other, sum_otherwise, gradients, sum_memory, pinned_memory, join};
    return bias_main(argc, argv, &ops);
}
