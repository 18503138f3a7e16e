// GEMMs of linear layers through cuBLASLt: planned once, run many times.
//
// A linear layer has weight w [N, K] and three GEMMs over R rows:
//   fprop  y [R, N] = x [R, K]   w^T        contraction over K
//   dgrad  dx[R, K] = dy[R, N]   w          contraction over N
//   wgrad  dw[N, K] = dy[R, N]^T x [R, K]   contraction over R
// All matrices are row-major, results are bf16. Sums are fp32, with fewer mantissa bits in FP8 GEMMs with fast_accum.
// BF16 GEMMs need no transposed copies of their operands. FP8 GEMMs on Hopper need the contraction index contiguous in
// both operands, so an FP8 dgrad reads the transposed weight [K, N], and an FP8 wgrad reads x^T [K, R] and dy^T [N, R].
// The transposed matrices are the columnwise data of recipes.h; the other FP8 operands are rowwise data. N and K, and
// in FP8 R too, must be multiples of the recipe's `multiple`: 8 for BF16, 16 or more for FP8, because cuBLASLt needs
// rows aligned to 16 bytes.
//
// FP8 GEMMs can be emulated (--fp8-emulate), even if the GPU has them: the FP8 data is decoded into bf16, and a BF16
// GEMM multiplies it. bf16 holds an FP8 number times a power of two exactly, except near the ends of bf16's range. An
// emulated GEMM may sum in another order, and has no fast_accum. It multiplies its sums by each scale_inv that belongs
// to a whole tensor.
//
// A result is rounded to bf16 once, even if it is added to an old value. With beta = 1 in host memory, cuBLASLt on
// Hopper may round the GEMM's result first and then the sum (seen with cuBLAS 13.1). So wgrad, the only GEMM that
// accumulates, has alpha and beta in device memory.
//
// On Hopper, gemm_blockwise.cuh computes fprop and dgrad of the recipe blockwise, faster than cuBLASLt.
//
// cuBLASLt offers several algorithms for a GEMM; gemm_choose times them. The power of a GPU depends on the bits that it
// multiplies, and at its power limit the clock depends on the power. So GEMMs are timed on normal values, cast about as
// the recipe casts them. A cache (gemm_cache.h) spares later starts the timing.
#ifndef LLMC_GEMM_CUH
#define LLMC_GEMM_CUH

#include <cublasLt.h>

#include "../base/arena.h"
#include "../base/rng.h"
#include "../config/precision.h"
#include "gemm_blockwise.cuh"
#include "gemm_cache.h"
#include "quantize.cuh"

#define GEMM_WORKSPACE_BYTES (64ll << 20)
#define GEMM_CANDIDATES 8  // cuBLASLt 13.1 offered no more (dev/LOG.md)
#define GEMM_TIMING_MS 20
#define GEMM_TIMING_RUNS 32

static inline void gemm_check_status(cublasStatus_t status, const char *call, const char *file, int line) {
    const int code = status == CUBLAS_STATUS_ALLOC_FAILED ? EXIT_MEMORY : EXIT_OTHER;
    if (status != CUBLAS_STATUS_SUCCESS)
        die_with(code, "%s:%d: %s: %s", file, line, call, cublasLtGetStatusString(status));
}
#define CUBLAS_CHECK(call) gemm_check_status(call, #call, __FILE__, __LINE__)

typedef struct {
    cublasLtHandle_t handle;
    void *workspace;  // at least GEMM_WORKSPACE_BYTES, 256-byte aligned, used on one stream
    // linears_emulation_elements(), 16-byte aligned; may be NULL if no plan is emulated.
    bf16 *scratch;
    float *alpha;        // one float, for emulated GEMMs; may be NULL if no plan is emulated
    bool deterministic;  // take the first usable algorithm instead of the fastest
    GemmCache *cache;    // NULL: time all algorithms
    cudaStream_t stream;
} Gemm;

// Operands and options of a GEMM. In cuBLASLt's order, A is w, w, x and B is x, dy, dy for fprop, dgrad, wgrad.
typedef struct {
    const Recipe *recipe;
    Fp8Format format_a, format_b;
    bool fast_accum;  // lower-precision accumulation: precision_fast_accum() of precision.h
    bool emulate;     // compute this FP8 GEMM in BF16
} GemmSpec;

// Returns the spec of one of the run's GEMMs in recipe r.
static inline GemmSpec gemm_spec(const Precision *p, const Recipe *r, GemmKind kind) {
    return GemmSpec{r, precision_format(p, gemm_tensor(kind, 0)), precision_format(p, gemm_tensor(kind, 1)),
                    precision_fast_accum(p, r, kind), p->emulated && recipe_is_fp8(r, kind)};
}

typedef struct {
    const char *layer;
    GemmKind kind;
    int64_t R, N, K;
    // In cuBLASLt's terms: D [rows, cols] column-major = A [rows, depth] B [depth, cols].
    int64_t rows, cols, depth;
    GemmSpec spec;
    ScaleGranularity granularity_a, granularity_b;
    bool bias;
    // `native`: a GEMM on FP8 operands. `emulated`: a BF16 GEMM on FP8 operands decoded into the scratch. Both false: a
    // BF16 GEMM on bf16 operands.
    bool native, emulated;
    bool blockwise;  // a native GEMM that runs the kernel of gemm_blockwise.cuh instead of cuBLASLt's
    // {1, 0} in device memory for plans with alpha and beta in device memory; else NULL.
    const float *one_zero;
    cublasLtMatmulDesc_t matmul;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
} GemmPlan;

static inline const char *gemm_type_name(ScaleGranularity g, Fp8Format format) {
    return g == NO_SCALE ? "bf16" : format == FP8_E4M3 ? "e4m3" : "e5m2";
}
static inline double gemm_flops(const GemmPlan *p) { return 2.0 * (double)p->R * (double)p->N * (double)p->K; }

// True if a GPU of compute capability major.minor has all GEMMs of a recipe.
static inline bool recipe_native(const Recipe *r, int major, int minor) {
    for (int i = 0; i < 2 * NUM_GEMMS; i++) {
        const GranularityTraits *g = granularity_traits(r->granularity[i / 2][i % 2]);
        if (10 * major + minor < g->first_gpu || 10 * major + minor > g->last_gpu) return false;
    }
    return true;
}

// Dies if the current GPU lacks a GEMM of the recipe.
static inline void gemm_require_native(const Recipe *r) {
    const int major = device_attribute(cudaDevAttrComputeCapabilityMajor),
              minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
    if (recipe_native(r, major, minor)) return;
    const char *where = recipe_native(r, 8, 9)   ? "8.9 and above"
                        : recipe_native(r, 9, 0) ? "9.0 (Hopper)"
                                                 : "10.0 and above (Blackwell)";
    die_with(EXIT_UNSUPPORTED,
             "GPUs of compute capability %s have GEMMs for --fp8-recipe %s (%s), but this GPU has %d.%d; --fp8-emulate "
             "computes them in BF16 with the numerics of FP8 but not its speed, or use another recipe or "
             "--precision bf16",
             where, r->name, r->scales, major, minor);
}

static inline cublasLtMatrixLayout_t gemm_layout(cudaDataType type, int64_t rows, int64_t cols) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)rows, (uint64_t)cols, rows));
    return layout;
}

static inline void gemm_set(cublasLtMatmulDesc_t matmul, cublasLtMatmulDescAttributes_t attribute, const void *value,
                            size_t bytes) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(matmul, attribute, value, bytes));
}

static inline void gemm_set_int(cublasLtMatmulDesc_t matmul, cublasLtMatmulDescAttributes_t attribute, int32_t value) {
    gemm_set(matmul, attribute, &value, sizeof value);
}

static inline void gemm_set_fast_accum(cublasLtMatmulDesc_t matmul, bool fast_accum) {
    const int8_t value = fast_accum;
    gemm_set(matmul, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &value, sizeof value);
}

static inline int32_t gemm_scale_mode(ScaleGranularity g) {
#define GRANULARITY_MODE(id, name, rows, cols, pad_rows, pad_cols, type, amaxes, same, mode, first, last) \
    CUBLASLT_MATMUL_MATRIX_SCALE_##mode,
    static const int32_t modes[NUM_GRANULARITIES] = {SCALE_GRANULARITIES(GRANULARITY_MODE)};
    return modes[g];
}

// Returns cuBLASLt's matmul descriptor of a plan.
static inline cublasLtMatmulDesc_t gemm_matmul(const GemmPlan *p, bool transpose_a, bool transpose_b) {
    cublasLtMatmulDesc_t m;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&m, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    gemm_set_int(m, CUBLASLT_MATMUL_DESC_TRANSA, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    gemm_set_int(m, CUBLASLT_MATMUL_DESC_TRANSB, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (p->native) {
        gemm_set_fast_accum(m, p->spec.fast_accum);
        gemm_set_int(m, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, gemm_scale_mode(p->granularity_a));
        gemm_set_int(m, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, gemm_scale_mode(p->granularity_b));
    }
    if (p->one_zero) gemm_set_int(m, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    if (p->bias) {
        gemm_set_int(m, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        gemm_set_int(m, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
    }
    return m;
}

static __device__ float gemm_one_zero[2] = {1.0f, 0.0f};

// Describes one GEMM, without an algorithm. cuBLASLt's matrices are column-major: it computes the transposed result,
// which in memory is the row-major result. Dies if the recipe does not allow the sizes. Dies if the GEMM is FP8 and not
// emulated, and the GPU lacks a GEMM of the recipe.
static inline GemmPlan gemm_describe(const char *layer, GemmKind kind, int64_t R, int64_t N, int64_t K, GemmSpec spec,
                                     bool bias) {
    GemmPlan p;
    memset(&p, 0, sizeof p);
    p.layer = layer, p.kind = kind, p.R = R, p.N = N, p.K = K, p.spec = spec, p.bias = bias;
    p.granularity_a = spec.recipe->granularity[kind][0], p.granularity_b = spec.recipe->granularity[kind][1];
    const bool fp8 = recipe_is_fp8(spec.recipe, kind);
    p.native = fp8 && !spec.emulate, p.emulated = fp8 && spec.emulate;
    if (p.native) gemm_require_native(spec.recipe);
    p.blockwise = p.native && p.granularity_a == BLOCK_128X128 && p.granularity_b == BLOCK_1X128 &&
                  spec.format_a == FP8_E4M3 && hopper_available();
    const int64_t multiple = fp8 ? spec.recipe->multiple : recipe_row(RECIPE_BF16)->multiple;
    if (N % multiple || K % multiple || (fp8 && R % multiple))
        die_with(
            EXIT_UNSUPPORTED,
            "%s %s: R x N x K is %lld x %lld x %lld, but N and K (in FP8 also R) must be multiples of %lld for %s%s",
            layer, gemm_kind_name(kind), (long long)R, (long long)N, (long long)K, (long long)multiple,
            fp8 ? spec.recipe->name : "BF16", fp8 ? "; use --precision bf16 or another --fp8-recipe" : "");
    p.rows = kind == GEMM_FPROP ? N : K, p.cols = kind == GEMM_WGRAD ? N : R,
    p.depth = kind == GEMM_FPROP   ? K
              : kind == GEMM_DGRAD ? N
                                   : R;
    const bool transpose_a = fp8 || kind == GEMM_FPROP, transpose_b = !fp8 && kind == GEMM_WGRAD;
    if (p.emulated || kind == GEMM_WGRAD) CUDA_CHECK(cudaGetSymbolAddress((void **)&p.one_zero, gemm_one_zero));
    const cudaDataType types[] = {CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    const cudaDataType type_a = p.native ? types[spec.format_a] : CUDA_R_16BF,
                       type_b = p.native ? types[spec.format_b] : CUDA_R_16BF;
    p.matmul = gemm_matmul(&p, transpose_a, transpose_b);
    p.a = transpose_a ? gemm_layout(type_a, p.depth, p.rows) : gemm_layout(type_a, p.rows, p.depth);
    p.b = transpose_b ? gemm_layout(type_b, p.cols, p.depth) : gemm_layout(type_b, p.depth, p.cols);
    p.d = gemm_layout(CUDA_R_16BF, p.rows, p.cols);
    return p;
}

static inline void gemm_destroy(GemmPlan *p) {
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(p->a));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(p->b));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(p->d));
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(p->matmul));
}

// Returns the data that the GEMM reads of a tensor as operand 0 or 1.
static inline const void *gemm_data(const GemmPlan *p, int operand, const QTensor *q) {
    if (!recipe_is_fp8(p->spec.recipe, p->kind)) return q->data;
    return gemm_usage(p->kind, operand) == ROWWISE ? q->rowwise : q->columnwise;
}

static inline const void *gemm_scale_inv(const GemmPlan *p, int operand, const QTensor *q) {
    return gemm_usage(p->kind, operand) == ROWWISE ? q->rowwise_scale_inv : q->columnwise_scale_inv;
}

static inline void gemm_set_pointers(GemmPlan *p, const QTensor *a, const QTensor *b, const bf16 *bias) {
    if (p->native) {
        const void *scale_a = gemm_scale_inv(p, 0, a), *scale_b = gemm_scale_inv(p, 1, b);
        gemm_set(p->matmul, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scale_a, sizeof scale_a);
        gemm_set(p->matmul, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scale_b, sizeof scale_b);
    }
    if (p->bias) gemm_set(p->matmul, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
}

// Launches the GEMM, and returns cuBLASLt's status. An emulated GEMM reads g->scratch and g->alpha, which gemm_decode
// writes, instead of a and b.
static inline cublasStatus_t gemm_launch(const Gemm *g, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, bf16 *d,
                                         const QTensor *a, const QTensor *b, bool accumulate) {
    const float host_one_zero[2] = {1.0f, 0.0f}, *one_zero = p->one_zero ? p->one_zero : host_one_zero;
    const float *alpha = p->emulated ? g->alpha : one_zero, *beta = accumulate ? one_zero : one_zero + 1;
    const void *data_a = p->emulated ? g->scratch : gemm_data(p, 0, a);
    const void *data_b = p->emulated ? g->scratch + p->rows * p->depth : gemm_data(p, 1, b);
    return cublasLtMatmul(g->handle, p->matmul, alpha, data_a, p->a, data_b, p->b, beta, d, p->d, d, p->d, algo,
                          g->workspace, GEMM_WORKSPACE_BYTES, g->stream);
}

// Writes *alpha = *inverse_a * *inverse_b; a NULL factor is 1.
static __global__ void gemm_alpha_kernel(float *alpha, const float *inverse_a, const float *inverse_b) {
    grid_dependency_wait();
    *alpha = (inverse_a ? *inverse_a : 1.0f) * (inverse_b ? *inverse_b : 1.0f);
}

// Decodes the operands of an emulated GEMM to bf16. Scales of whole tensors, which need not be powers of two, go into
// its alpha: *g->alpha becomes the product of their scale_inv; 1 without such scales.
static inline void gemm_decode(const Gemm *g, const GemmPlan *p, const QTensor *a, const QTensor *b) {
    const void *scale_a = gemm_scale_inv(p, 0, a), *scale_b = gemm_scale_inv(p, 1, b);
    fp8_dequantize(g->scratch, (const uint8_t *)gemm_data(p, 0, a), scale_a, p->granularity_a, p->spec.format_a,
                   p->rows, p->depth, g->stream);
    fp8_dequantize(g->scratch + p->rows * p->depth, (const uint8_t *)gemm_data(p, 1, b), scale_b, p->granularity_b,
                   p->spec.format_b, p->cols, p->depth, g->stream);
    const float *inverse_a = is_per_tensor(p->granularity_a) ? (const float *)scale_a : NULL;
    const float *inverse_b = is_per_tensor(p->granularity_b) ? (const float *)scale_b : NULL;
    CUDA_LAUNCH(gemm_alpha_kernel, 1, 1, 0, g->stream, g->alpha, inverse_a, inverse_b);
}

// Writes n standard normal values: times `scale` as FP8, or as bf16 if scale is 0.
static __global__ void gemm_fill_kernel(void *out, int64_t n, uint64_t key, float scale, Fp8Format format) {
    grid_dependency_wait();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x) {
        const float x = rng_normal(key, (uint64_t)i);
        if (scale == 0) ((bf16 *)out)[i] = __float2bfloat16(x);
        else ((uint8_t *)out)[i] = fp8_from_float(x * scale, format);
    }
}

// Fills out [n] with the values of gemm_fill_kernel, the same in each run; another `sequence` gives others.
static inline void gemm_fill(void *out, int64_t n, int sequence, float scale, Fp8Format format, cudaStream_t stream) {
    CUDA_LAUNCH(gemm_fill_kernel, 8 * device_sm_count(), 256, 0, stream, out, n, rng_key(1, (uint64_t)sequence), scale,
                format);
}

// Returns the scale that a recipe's rule gives standard normal values [outer, depth]; 0 with NO_SCALE. The amax of n
// normal values is taken as sqrt(2 ln n), 4 to 12% above its mean, instead of being found by a pass.
static inline float gemm_fill_scale(ScaleGranularity g, ScaleRule rule, Fp8Format format, int64_t outer,
                                    int64_t depth) {
    const GranularityTraits *t = granularity_traits(g);
    const int64_t rows = is_per_tensor(g) ? outer : t->rows, cols = t->cols == WHOLE ? depth : t->cols;
    return g == NO_SCALE ? 0 : fp8_rule_scale(rule, sqrtf(2 * logf((float)(rows * cols))), format);
}

// Returns operand 0 or 1 of a plan, filled for timing. Its data and scales lie at *memory, which is aligned to
// ARENA_ALIGNMENT; *memory moves behind them. They take at most the bytes that the operand would take in bf16, and
// ARENA_ALIGNMENT more.
static inline QTensor gemm_fill_operand(const GemmPlan *p, int operand, char **memory, cudaStream_t stream) {
    const ScaleGranularity g = operand ? p->granularity_b : p->granularity_a;
    const Fp8Format format = operand ? p->spec.format_b : p->spec.format_a;
    const int64_t outer = operand ? p->cols : p->rows, n = outer * p->depth, scales = scale_bytes(g, outer, p->depth);
    char *data = *memory, *scale_inv = data + round_up(g == NO_SCALE ? 2 * n : n, ARENA_ALIGNMENT);
    *memory = scale_inv + round_up(scales, ARENA_ALIGNMENT);
    gemm_fill(data, n, operand, gemm_fill_scale(g, p->spec.recipe->rule, format, outer, p->depth), format, stream);
    // These bytes are a small finite scale of each type. A GEMM multiplies few numbers by scales.
    CUDA_CHECK(cudaMemsetAsync(scale_inv, 0x3c, (size_t)scales, stream));
    return qtensor_operand(data, scale_inv);
}

// Returns the milliseconds that a candidate takes per launch; infinity if cuBLASLt refuses it. Times batches of 1, 2,
// 4, ... back-to-back launches until a batch takes at least GEMM_TIMING_MS or has GEMM_TIMING_RUNS launches. Only the
// last batch counts: at its power limit a GPU clocks lower than at first, and another algorithm may then be the
// fastest.
static inline float gemm_time_candidate(const Gemm *g, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, bf16 *d,
                                        const QTensor *a, const QTensor *b, cudaEvent_t begin, cudaEvent_t end) {
    float ms = 0;
    int runs = 1;
    for (;; runs *= 2) {
        CUDA_CHECK(cudaEventRecord(begin, g->stream));
        for (int i = 0; i < runs; i++)
            if (gemm_launch(g, p, algo, d, a, b, false) != CUBLAS_STATUS_SUCCESS) return INFINITY;
        CUDA_CHECK(cudaEventRecord(end, g->stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (ms >= GEMM_TIMING_MS || runs >= GEMM_TIMING_RUNS) return ms / (float)runs;
    }
}

// Asks cuBLASLt for candidates for a plan whose pointers are set, best guess first. Returns how many there are, and
// cuBLASLt's answer in *status.
static inline int gemm_candidates(const Gemm *g, const GemmPlan *p,
                                  cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES], cublasStatus_t *status) {
    cublasLtMatmulPreference_t preference;
    const uint64_t workspace = GEMM_WORKSPACE_BYTES;
    // An algorithm that splits the contraction (split-K) adds the parts in fp32, in a fixed order.
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    // In bytes. FP8 weights gathered by an odd number of ranks may have only this alignment; cuBLASLt assumes 256 by
    // default.
    const uint32_t alignment = PARAMETER_ALIGNMENT;
    const cublasLtMatmulPreferenceAttributes_t operands[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    int count = 0;
    memset(found, 0, GEMM_CANDIDATES * sizeof *found);  // algorithms are compared byte by byte
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                      sizeof workspace));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                      &reduction, sizeof reduction));
    for (int i = 0; i < 4; i++)
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, operands[i], &alignment, sizeof alignment));
    *status = cublasLtMatmulAlgoGetHeuristic(g->handle, p->matmul, p->a, p->b, p->d, p->d, preference, GEMM_CANDIDATES,
                                             found, &count);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    return *status == CUBLAS_STATUS_SUCCESS ? count : 0;
}

// Returns the index of the first candidate that cuBLASLt calls usable and can launch; -1 if there is none. Overwrites
// d.
static inline int gemm_first_usable(const Gemm *g, const GemmPlan *p, const cublasLtMatmulHeuristicResult_t *found,
                                    int count, bf16 *d, const QTensor *a, const QTensor *b) {
    for (int i = 0; i < count; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS &&
            gemm_launch(g, p, &found[i].algo, d, a, b, false) == CUBLAS_STATUS_SUCCESS)
            return i;
    return -1;
}

// Returns the index of the fastest candidate that cuBLASLt calls usable and can launch; -1 if there is none. Overwrites
// d.
static inline int gemm_fastest(const Gemm *g, const GemmPlan *p, const cublasLtMatmulHeuristicResult_t *found,
                               int count, bf16 *d, const QTensor *a, const QTensor *b) {
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    float best = INFINITY;
    int fastest = -1;
    for (int i = 0; i < count; i++) {
        if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
        const float ms = gemm_time_candidate(g, p, &found[i].algo, d, a, b, begin, end);
        if (ms < best) best = ms, fastest = i;
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return fastest;
}

static_assert(sizeof(cublasLtMatmulAlgo_t) == GEMM_CACHE_WORDS * sizeof(uint64_t), "an entry holds an algorithm");

// Opens the cache for the current GPU, except if g->deterministic. gemm_close_cache must follow.
static inline void gemm_open_cache(Gemm *g) {
    cudaDeviceProp gpu;
    int index;
    if (g->deterministic) return;
    CUDA_CHECK(cudaGetDevice(&index));
    CUDA_CHECK(cudaGetDeviceProperties(&gpu, index));
    g->cache = (GemmCache *)xcalloc(1, sizeof *g->cache);
    *g->cache = gemm_cache_read();
    format_checked(g->cache->machine, sizeof g->cache->machine, "%s, %d SMs, cuBLASLt %zu", gpu.name,
                   gpu.multiProcessorCount, cublasLtGetVersion());
}

// Prints in one line how many algorithms came from the cache, unless none did. With `write`, adds the others to the
// user's file. Then closes the cache, if it is open.
static inline void gemm_close_cache(Gemm *g, bool write) {
    GemmCache *c = g->cache;
    char folder[PATH_CAPACITY];
    if (!c) return;
    if (c->known && gemm_cache_folder(folder))
        printf("cuBLASLt  %lld of %lld algorithms are those of earlier starts, in %s\n", (long long)c->known,
               (long long)c->asked, folder);
    if (write && c->known < c->asked) gemm_cache_write(c);
    gemm_cache_free(c);
    free(c);
    g->cache = NULL;
}

// Returns a plan's entry for the cache, without an algorithm. Its key has all that a candidate's speed depends on but
// the GPU's clock and other load.
static inline GemmCacheEntry gemm_entry(const Gemm *g, const GemmPlan *p) {
    GemmCacheEntry e;
    memset(&e, 0, sizeof e);
    format_checked(e.key, sizeof e.key, "%s: %s %lld x %lld x %lld, %s/%d x %s/%d%s%s%s, workspace %lld, alignment %d",
                   g->cache->machine, gemm_kind_name(p->kind), (long long)p->rows, (long long)p->cols,
                   (long long)p->depth, gemm_type_name(p->granularity_a, p->spec.format_a),
                   gemm_scale_mode(p->granularity_a), gemm_type_name(p->granularity_b, p->spec.format_b),
                   gemm_scale_mode(p->granularity_b), p->emulated ? ", emulated" : "",
                   p->native && p->spec.fast_accum ? ", fast_accum" : "", p->bias ? ", bias" : "",
                   (long long)GEMM_WORKSPACE_BYTES, (int)PARAMETER_ALIGNMENT);
    return e;
}

// gemm_fastest, but without timing if the cache knows the algorithm, and cuBLASLt still offers it and can launch it.
static inline int gemm_fastest_cached(const Gemm *g, const GemmPlan *p, const cublasLtMatmulHeuristicResult_t *found,
                                      int count, bf16 *d, const QTensor *a, const QTensor *b) {
    if (!g->cache) return gemm_fastest(g, p, found, count, d, a, b);
    GemmCacheEntry e = gemm_entry(g, p);
    const GemmCacheEntry *known = gemm_cache_find(g->cache, e.key);
    g->cache->asked++;
    for (int i = 0; known && i < count; i++)
        if (memcmp(found[i].algo.data, known->algorithm, sizeof e.algorithm) == 0 &&
            gemm_first_usable(g, p, found + i, 1, d, a, b) == 0) {
            g->cache->known += !known->timed;
            return i;
        }
    const int fastest = gemm_fastest(g, p, found, count, d, a, b);
    if (fastest < 0) return fastest;
    memcpy(e.algorithm, found[fastest].algo.data, sizeof e.algorithm);
    e.timed = true;
    gemm_cache_put(g->cache, &e);
    return fastest;
}

// Chooses the plan's algorithm: the fastest of cuBLASLt's candidates on these buffers, or the first usable one if
// g->deterministic. Overwrites d. The data of a and b must be like a step's (gemm_fill_operand). If cuBLASLt has no
// fast_accum algorithm for the GEMM, the plan takes one with full accumulation. Dies if no algorithm can be used. A
// plan that is `blockwise` has nothing to choose.
static inline void gemm_choose(const Gemm *g, GemmPlan *p, bf16 *d, const QTensor *a, const QTensor *b,
                               const bf16 *bias) {
    cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES];
    cublasStatus_t status;
    if (p->blockwise) return;
    if (p->emulated) gemm_decode(g, p, a, b);
    gemm_set_pointers(p, a, b, bias);
    int count = gemm_candidates(g, p, found, &status);
    if (!count && p->native && p->spec.fast_accum) {
        p->spec.fast_accum = false;
        gemm_set_fast_accum(p->matmul, false);
        count = gemm_candidates(g, p, found, &status);
    }
    if (!count)
        die_with(EXIT_UNSUPPORTED,
                 "cuBLASLt has no algorithm for %s %s, R x N x K %lld x %lld x %lld, %s x %s (recipe %s%s), on "
                 "this GPU: %s",
                 p->layer, gemm_kind_name(p->kind), (long long)p->R, (long long)p->N, (long long)p->K,
                 gemm_type_name(p->granularity_a, p->spec.format_a), gemm_type_name(p->granularity_b, p->spec.format_b),
                 p->spec.recipe->name, p->emulated ? ", emulated" : "", cublasLtGetStatusString(status));
    const int chosen = (g->deterministic ? gemm_first_usable : gemm_fastest_cached)(g, p, found, count, d, a, b);
    if (chosen < 0)
        die_with(EXIT_UNSUPPORTED, "cuBLASLt refuses every algorithm it offers for %s %s (recipe %s)", p->layer,
                 gemm_kind_name(p->kind), p->spec.recipe->name);
    p->algo = found[chosen].algo;
}

// Computes d = a b, or d += a b if `accumulate`; dies if that is set for a GEMM other than wgrad. Operands are in
// cuBLASLt's order: fprop w, x; dgrad w, dy; wgrad x, dy. `bias` [N] is only for plans made with a bias.
static inline void gemm_run(const Gemm *g, GemmPlan *p, bf16 *d, const QTensor *a, const QTensor *b, const bf16 *bias,
                            bool accumulate) {
    if (accumulate && p->kind != GEMM_WGRAD)
        die("%s %s cannot accumulate; only wgrad can", p->layer, gemm_kind_name(p->kind));
    if (p->blockwise) {
        const BlockwiseOperand m = {gemm_data(p, 1, b), gemm_scale_inv(p, 1, b)},
                               n = {gemm_data(p, 0, a), gemm_scale_inv(p, 0, a)};
        gemm_blockwise(d, m, p->spec.format_b, n, p->bias ? bias : NULL, p->cols, p->rows, p->depth, g->stream);
        return;
    }
    if (p->emulated) gemm_decode(g, p, a, b);
    gemm_set_pointers(p, a, b, bias);
    CUBLAS_CHECK(gemm_launch(g, p, &p->algo, d, a, b, accumulate));
}

#endif
