// Matrix products of linear layers through cuBLASLt: planned once per shape, run many times.
//
// A linear layer has weight w [N, K] and three products over R rows:
//   fprop  y [R, N] = x [R, K]   w^T        contraction over K
//   dgrad  dx[R, K] = dy[R, N]   w          contraction over N
//   wgrad  dw[N, K] = dy[R, N]^T x [R, K]   contraction over R
// All row-major, fp32 accumulation, bf16 results. BF16 products read their operands as they lie. FP8 products on Hopper need the contraction
// index contiguous in both operands, so dgrad reads the transposed weight [K, N], and wgrad reads x^T [K, R] and dy^T [N, R].
// FP8 sizes must be multiples of 16, BF16 sizes multiples of 8 (cuBLASLt's 16-byte alignment).
#ifndef LLMC_GEMM_CUH
#define LLMC_GEMM_CUH

#include <cublasLt.h>

#include "cuda_utils.cuh"

#define GEMM_WORKSPACE_BYTES (64ll << 20)
#define GEMM_CANDIDATES 8

static inline void gemm_check_status(cublasStatus_t status, const char *call, const char *file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS) die("%s:%d: %s: %s", file, line, call, cublasLtGetStatusString(status));
}
#define CUBLAS_CHECK(call) gemm_check_status(call, #call, __FILE__, __LINE__)

typedef struct {
    cublasLtHandle_t handle;
    void *workspace;     // GEMM_WORKSPACE_BYTES, 256-byte aligned, used on one stream
    bool deterministic;  // take the first algorithm instead of the fastest of several
    cudaStream_t stream;
} Gemm;

typedef enum { GEMM_FPROP, GEMM_DGRAD, GEMM_WGRAD } GemmKind;

// A tensor as a product reads it: its data and, for FP8, the device address of its inverse scale (16-byte aligned).
typedef struct {
    const void *data;
    const float *inverse_scale;
} GemmOperand;

typedef struct {
    const char *layer;
    GemmKind kind;
    int64_t R, N, K;
    cudaDataType type_a, type_b;  // in cuBLASLt's order: A is w, w, x; B is x, dy, dy
    bool bias;
    cublasLtMatmulDesc_t matmul;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    double microseconds;  // of the algorithm chosen by timing; 0 when the first was taken
} GemmPlan;

static inline bool gemm_is_fp8(cudaDataType type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
static inline const char *gemm_kind_name(GemmKind kind) { return kind == GEMM_FPROP ? "fprop" : kind == GEMM_DGRAD ? "dgrad" : "wgrad"; }
static inline const char *gemm_type_name(cudaDataType type) { return type == CUDA_R_8F_E4M3 ? "e4m3" : type == CUDA_R_8F_E5M2 ? "e5m2" : "bf16"; }
static inline double gemm_flops(const GemmPlan *p) { return 2.0 * (double)p->R * (double)p->N * (double)p->K; }

static inline cublasLtMatrixLayout_t gemm_layout(cudaDataType type, int64_t rows, int64_t cols) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)rows, (uint64_t)cols, rows));
    return layout;
}

static inline void gemm_set(cublasLtMatmulDesc_t matmul, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(matmul, attribute, value, bytes));
}

// Describes one product. Column-major cuBLASLt computes the transpose D^T of the row-major result, so that no result needs transposing.
static inline GemmPlan gemm_describe(const char *layer, GemmKind kind, int64_t R, int64_t N, int64_t K, cudaDataType type_a, cudaDataType type_b, bool bias) {
    GemmPlan p;
    memset(&p, 0, sizeof p);
    p.layer = layer, p.kind = kind, p.R = R, p.N = N, p.K = K, p.type_a = type_a, p.type_b = type_b, p.bias = bias;
    const bool fp8 = gemm_is_fp8(type_a);
    const int64_t multiple = fp8 ? 16 : 8;
    if (N % multiple || K % multiple || (fp8 && R % multiple))
        die("%s %s: sizes %lld x %lld x %lld must be multiples of %lld for %s", layer, gemm_kind_name(kind), (long long)R, (long long)N, (long long)K,
            (long long)multiple, fp8 ? "FP8; use --precision bf16" : "BF16");
    const int64_t rows = kind == GEMM_FPROP ? N : K, cols = kind == GEMM_WGRAD ? N : R, depth = kind == GEMM_FPROP ? K : kind == GEMM_DGRAD ? N : R;
    const bool transpose_a = fp8 || kind == GEMM_FPROP, transpose_b = !fp8 && kind == GEMM_WGRAD;
    const cublasOperation_t op_a = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&p.matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    gemm_set(p.matmul, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a);
    gemm_set(p.matmul, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b);
    if (fp8) {
        // Fast accumulation keeps fewer bits of the running sum: forward only, as torchao and Transformer Engine do.
        const int8_t fast = kind == GEMM_FPROP;
        gemm_set(p.matmul, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
    }
    if (bias) {
        const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        const cudaDataType bias_type = CUDA_R_16BF;
        gemm_set(p.matmul, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
        gemm_set(p.matmul, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, sizeof bias_type);
    }
    p.a = transpose_a ? gemm_layout(type_a, depth, rows) : gemm_layout(type_a, rows, depth);
    p.b = transpose_b ? gemm_layout(type_b, cols, depth) : gemm_layout(type_b, depth, cols);
    p.d = gemm_layout(CUDA_R_16BF, rows, cols);
    return p;
}

static inline void gemm_destroy(GemmPlan *p) {
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(p->a));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(p->b));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(p->d));
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(p->matmul));
}

static inline void gemm_set_pointers(GemmPlan *p, GemmOperand a, GemmOperand b, const bf16 *bias) {
    if (gemm_is_fp8(p->type_a)) {
        gemm_set(p->matmul, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a.inverse_scale, sizeof a.inverse_scale);
        gemm_set(p->matmul, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &b.inverse_scale, sizeof b.inverse_scale);
    }
    if (p->bias) gemm_set(p->matmul, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
}

static inline cublasStatus_t gemm_launch(const Gemm *g, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, bf16 *d, GemmOperand a, GemmOperand b, float beta) {
    const float alpha = 1.0f;
    return cublasLtMatmul(g->handle, p->matmul, &alpha, a.data, p->a, b.data, p->b, &beta, d, p->d, d, p->d, algo, g->workspace, GEMM_WORKSPACE_BYTES, g->stream);
}

// Best of a few runs of one candidate, in milliseconds; infinity when cuBLASLt refuses it.
static inline float gemm_time_candidate(const Gemm *g, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, bf16 *d, GemmOperand a, GemmOperand b, cudaEvent_t begin, cudaEvent_t end) {
    float best = INFINITY;
    for (int run = 0; run < 4; run++) {
        CUDA_CHECK(cudaEventRecord(begin, g->stream));
        if (gemm_launch(g, p, algo, d, a, b, 0.0f) != CUBLAS_STATUS_SUCCESS) return INFINITY;
        CUDA_CHECK(cudaEventRecord(end, g->stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (run > 0 && ms < best) best = ms;
    }
    return best;
}

// Chooses the plan's algorithm: the fastest of cuBLASLt's first candidates on these buffers (d is overwritten), or the first when deterministic.
static inline void gemm_choose(const Gemm *g, GemmPlan *p, bf16 *d, GemmOperand a, GemmOperand b, const bf16 *bias) {
    cublasLtMatmulPreference_t preference;
    const uint64_t workspace = GEMM_WORKSPACE_BYTES;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    if (g->deterministic) {
        const uint32_t ordered = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &ordered, sizeof ordered));
    }
    gemm_set_pointers(p, a, b, bias);
    cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES];
    int count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(g->handle, p->matmul, p->a, p->b, p->d, p->d, preference, GEMM_CANDIDATES, found, &count);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_SUCCESS || count == 0)
        die("cuBLASLt has no algorithm for %s %s, %lld x %lld x %lld, %s x %s, on this GPU: %s", p->layer, gemm_kind_name(p->kind), (long long)p->R,
            (long long)p->N, (long long)p->K, gemm_type_name(p->type_a), gemm_type_name(p->type_b), cublasLtGetStatusString(status));
    p->algo = found[0].algo;
    if (g->deterministic) return;
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    float best = INFINITY;
    for (int i = 0; i < count; i++) {
        float ms = gemm_time_candidate(g, p, &found[i].algo, d, a, b, begin, end);
        if (ms < best) best = ms, p->algo = found[i].algo;
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    if (best == INFINITY) die("cuBLASLt refuses every algorithm it offers for %s %s", p->layer, gemm_kind_name(p->kind));
    p->microseconds = best * 1e3;
}

// d = a b (+ d when accumulate). Operands in cuBLASLt's order: fprop w, x; dgrad w, dy; wgrad x, dy. `bias` [N] only for plans made with one.
static inline void gemm_run(const Gemm *g, GemmPlan *p, bf16 *d, GemmOperand a, GemmOperand b, const bf16 *bias, bool accumulate) {
    gemm_set_pointers(p, a, b, bias);
    CUBLAS_CHECK(gemm_launch(g, p, &p->algo, d, a, b, accumulate ? 1.0f : 0.0f));
}

#endif
