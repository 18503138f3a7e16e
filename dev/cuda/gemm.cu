// Checks and times llmc/fp8/gemm.cuh: every GEMM of every recipe.
// Build and run: make build/bench_gemm && build/bench_gemm
#include "../../llmc/fp8/gemm.cuh"
#include "../../llmc/reference/quantize_reference.h"
#include "bench.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Inputs

// Makes normal values times powers of two. The power depends on the row, on the column, and on blocks of 32 or 128 rows
// or columns. So most neighbouring blocks have different scales, and transposed, shifted or wrong scales change the
// result. The powers are 2^-8 to 2^7.
static float *make_matrix(uint64_t seed, int64_t rows, int64_t cols) {
    const uint64_t key = rng_key(seed, 0);
    float *x = (float *)xcalloc((size_t)(rows * cols), sizeof(float));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            const int64_t places[] = {i, j, i / 32 * cols + j, i * cols + j / 32, i / 128 * cols + j / 128};
            int power = -8;
            for (int n = 0; n < 5; n++) power += (int)(rng_u64(key + 1 + (uint64_t)n, (uint64_t)places[n]) % 4);
            x[i * cols + j] = bf16_to_float(bf16_from_float(ldexpf(rng_normal(key, (uint64_t)(i * cols + j)), power)));
        }
    return x;
}

// One operand of a GEMM on the device, and its exact values.
typedef struct {
    QTensor operand;
    // [outer, depth]: bf16 values; or decoded codes, times scale_inv unless the scale is per tensor.
    float *values;
    double inverse;   // scale_inv of a whole tensor, else 1
    uint8_t *scales;  // host copy
    int64_t num_scale_bytes;
} Operand;

// Makes the rowwise data of x [rows, cols] (contracted over columns) or the columnwise data (contracted over rows). A
// bf16 operand is the tensor itself.
static Operand operand_create(const float *x, int64_t rows, int64_t cols, TensorUsage usage,
                              ScaleGranularity granularity, ScaleRule rule, Fp8Format format) {
    const UsageShape s = usage_shape(rows, cols, usage);
    const int64_t outer = s.outer, depth = s.depth;
    float *values = (float *)xcalloc((size_t)(outer * depth), sizeof(float));
    Operand o = {};
    o.inverse = 1;
    if (granularity == NO_SCALE) {
        bf16_bits *bits = bf16_from_floats(x, rows * cols);
        o.operand = qtensor_operand(bench_upload(bits, rows * cols * 2), NULL);
        for (int64_t i = 0; i < outer * depth; i++)
            values[i] = x[i / depth * s.outer_stride + i % depth * s.depth_stride];
        free(bits);
    } else {
        uint8_t *codes = (uint8_t *)xcalloc((size_t)(outer * depth), 1);
        o.num_scale_bytes = scale_bytes(granularity, outer, depth);
        o.scales = (uint8_t *)xcalloc((size_t)o.num_scale_bytes, 1);
        quantize_copy(codes, o.scales, x, s, granularity, rule, format, 0);
        dequantize_copy(values, codes, o.scales, outer, depth, granularity, format);
        if (is_per_tensor(granularity)) o.inverse = scale_load(granularity, o.scales, 0);
        void *data = bench_upload(codes, outer * depth);
        o.operand = qtensor_operand(data, bench_upload(o.scales, o.num_scale_bytes));
        free(codes);
    }
    o.values = (float *)bench_upload(values, outer * depth * (int64_t)sizeof(float));
    free(values);
    return o;
}

static void operand_free(Operand o) {
    bench_free((void *)o.operand.data), bench_free(o.values);
    if (o.operand.rowwise_scale_inv) bench_free((void *)o.operand.rowwise_scale_inv);
    free(o.scales);
}

// Doubles the largest scale_inv of an operand, on the device alone. check_spoiled() then checks that the GEMM's result
// is wrong.
static void operand_spoil(const Operand *o, ScaleGranularity granularity) {
    const int64_t width = granularity == BLOCK_1X32 ? 1 : 4, count = o->num_scale_bytes / width;
    int64_t largest = 0;
    for (int64_t i = 1; i < count; i++)
        if (scale_load(granularity, o->scales, i) > scale_load(granularity, o->scales, largest)) largest = i;
    const float twice = 2 * scale_load(granularity, o->scales, largest);
    const uint8_t code = (uint8_t)(o->scales[largest] + 1);
    const void *value = granularity == BLOCK_1X32 ? (const void *)&code : (const void *)&twice;
    CUDA_CHECK(cudaMemcpy((uint8_t *)o->operand.rowwise_scale_inv + largest * width, value, (size_t)width,
                          cudaMemcpyHostToDevice));
}

// ---------------------------------------------------------------------------------------------------------------------
// The exact result: fp64 sums, and the magnitude that errors are relative to

// Computes sum[j, i] = sum over k of a[i, k] b[j, k]; norm is the root of the sum of the squared terms. Element [j, i]
// is at the position of (i, j) in cuBLASLt's column-major D.
static __global__ void truth_kernel(double *sum, double *norm, const float *a, const float *b, int64_t rows,
                                    int64_t cols, int64_t depth) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, j = blockIdx.y;
    if (i >= rows || j >= cols) return;
    double s = 0, q = 0;
    for (int64_t k = 0; k < depth; k++) {
        const double term = (double)a[i * depth + k] * (double)b[j * depth + k];
        s += term, q += term * term;
    }
    sum[j * rows + i] = s, norm[j * rows + i] = sqrt(q);
}

// The error of a GEMM's sum before rounding to bf16 is given in units of
//    2^-bits sqrt(span) * norm.
// The tensor cores shift the terms and the running sum to the exponent of the largest of them, and cut the bits below.
// So each term loses up to 2^-bits of the running sum, with either sign. Terms of random sign have a running sum of
// about the norm, and the losses of `span` terms add up as a random walk. After `span` terms, the sum is added to an
// fp32 sum:
//    native FP8      bits is 13, as on Hopper (DeepSeek-V3, arXiv:2412.19437 section 3.5.2, and its cuBLAS experiments:
//                    14 with the leading one). span is the whole depth with fast_accum, and 128 without.
//    BF16, emulated  bits is 23, span is the whole depth.
// Terms that all have one sign can lose more, by a factor of sqrt(span). These tests have no such terms. A check allows
// LIMIT_UNITS units.
static const double LIMIT_UNITS = 4;

static double error_unit(const GemmPlan *p) {
    if (!p->native) return ldexp(sqrt((double)p->depth), -23);
    return ldexp(sqrt(p->spec.fast_accum ? (double)p->depth : 128.0), -13);
}

// Result of a comparison: the worst error in units, and how many elements exceed the limit.
typedef struct {
    double worst;
    int64_t bad, first;
    float got;
    double want;
} Comparison;

// Compares `got` with sum * inverse + bias + old. Each difference may contain the rounding of the result, which does
// not count: half a unit in the last place of bf16, and fp32 roundings of the product and of both additions.
static Comparison compare(const GemmPlan *p, const bf16_bits *got, const double *sum, const double *norm,
                          double inverse, const bf16_bits *bias, const bf16_bits *old) {
    Comparison c = {};
    const double unit = error_unit(p) * inverse;
    for (int64_t e = 0; e < p->rows * p->cols; e++) {
        const double added = bias ? bf16_to_float(bias[e % p->rows]) : 0, before = old ? bf16_to_float(old[e]) : 0,
                     want = sum[e] * inverse + added + before;
        const double value = bf16_to_float(got[e]), magnitude = fabs(sum[e] * inverse) + fabs(added) + fabs(before);
        const double rounding = ldexp(fmax(fabs(want), fabs(value)), -8) + ldexp(magnitude, -22),
                     off = fabs(value - want);
        const double units = isfinite(value) ? fmax(0, off - rounding) / fmax(unit * norm[e], 1e-300) : INFINITY;
        c.worst = fmax(c.worst, units);
        if (units <= LIMIT_UNITS || c.bad++) continue;
        c.first = e, c.got = (float)value, c.want = want;
    }
    return c;
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks

enum { WAY_SLOW, WAY_FAST, WAY_EMULATED, NUM_WAYS };
static const char *const way_names[NUM_WAYS] = {"native", "fast_accum", "emulated"};
static double worst_units[NUM_RECIPES + 1][NUM_GEMMS][NUM_WAYS];  // -1: not run

typedef struct {
    Gemm gemm;
    QTensor a, b;
    int64_t n;           // elements of the result
    double *sum, *norm;  // host
    double inverse;
    bf16_bits *bias, *old;  // host
    bf16 *device_bias, *d;
} Case;

// Runs the plan. Without accumulate the result starts as NaN, which only a GEMM that ignores old values overwrites.
static Comparison run_case(Case *c, GemmPlan *p, bool bias, bool accumulate) {
    CUDA_CHECK(cudaMemset(c->d, 0xff, (size_t)c->n * sizeof(bf16)));
    if (accumulate) CUDA_CHECK(cudaMemcpy(c->d, c->old, (size_t)c->n * sizeof(bf16), cudaMemcpyHostToDevice));
    gemm_run(&c->gemm, p, c->d, &c->a, &c->b, bias ? c->device_bias : NULL, accumulate);
    bf16_bits *got = (bf16_bits *)bench_download(c->d, c->n * (int64_t)sizeof(bf16), p->layer);
    const Comparison comparison =
        compare(p, got, c->sum, c->norm, c->inverse, bias ? c->bias : NULL, accumulate ? c->old : NULL);
    free(got);
    return comparison;
}

// Checks that launches without a pause between them give equal bits.
static void check_repeats(const Case *c, const char *label, GemmPlan *p) {
    enum { LAUNCHES = 20 };
    bf16 *results = (bf16 *)bench_alloc(LAUNCHES * c->n * (int64_t)sizeof(bf16));
    for (int i = 0; i < LAUNCHES; i++) gemm_run(&c->gemm, p, results + i * c->n, &c->a, &c->b, NULL, false);
    for (int i = 1; i < LAUNCHES; i++)
        check_same_on_device(label, results + i * c->n, results, c->n * (int64_t)sizeof(bf16), p->rows * 2);
    bench_free(results);
}

static void check_way(Case *c, const char *label, GemmKind kind, int64_t R, int64_t N, int64_t K, GemmSpec spec,
                      double *worst) {
    for (int bias = 0; bias < (kind == GEMM_FPROP ? 2 : 1); bias++) {
        GemmPlan p = gemm_describe(label, kind, R, N, K, spec, bias);
        gemm_choose(&c->gemm, &p, c->d, &c->a, &c->b, c->device_bias);
        for (int accumulate = 0; accumulate < (kind == GEMM_WGRAD ? 2 : 1); accumulate++) {
            const Comparison r = run_case(c, &p, bias, accumulate);
            CHECK(r.bad == 0,
                  "%s%s%s: all elements are within the bound; %lld of %lld are not, the worst is off by %.3g times "
                  "error_unit() (%.3g allowed), first at [%lld, %lld]: got %.9g, want %.9g",
                  label, bias ? ", bias" : "", accumulate ? ", accumulated" : "", (long long)r.bad, (long long)c->n,
                  r.worst, LIMIT_UNITS, (long long)(r.first / p.rows), (long long)(r.first % p.rows), r.got, r.want);
            *worst = fmax(*worst, r.worst);
        }
        if (p.blockwise && !bias) check_repeats(c, label, &p);
        gemm_destroy(&p);
    }
}

// Checks that the GEMM's result is wrong after operand_spoil().
static void check_spoiled(Case *c, const char *label, GemmKind kind, int64_t R, int64_t N, int64_t K, GemmSpec spec) {
    GemmPlan p = gemm_describe(label, kind, R, N, K, spec, false);
    gemm_choose(&c->gemm, &p, c->d, &c->a, &c->b, NULL);
    CHECK(run_case(c, &p, false, false).bad > 0, "%s: if one scale is doubled, some element is off", label);
    gemm_destroy(&p);
}

static bool same_algorithm(const cublasLtMatmulAlgo_t *a, const cublasLtMatmulAlgo_t *b) {
    return memcmp(a->data, b->data, sizeof a->data) == 0;
}

// Checks that a deterministic plan takes the first candidate. If cuBLASLt calls that unusable, or refuses to launch it
// (here it is an algorithm of all zeros), another candidate must be taken; `taken` is -1 if there is none. gemm_fastest
// must pass over an algorithm of all zeros too. Plans that would run another kernel than cuBLASLt's take its algorithms
// here.
static void check_first_usable(const Case *c, const char *label, GemmKind kind, int64_t R, int64_t N, int64_t K,
                               GemmSpec spec) {
    cublasLtMatmulHeuristicResult_t found[GEMM_CANDIDATES];
    cublasStatus_t status;
    GemmPlan p = gemm_describe(label, kind, R, N, K, spec, false);
    Gemm gemm = c->gemm;
    gemm.deterministic = true, p.blockwise = false;
    gemm_choose(&gemm, &p, c->d, &c->a, &c->b, NULL);
    const int count = gemm_candidates(&gemm, &p, found, &status);
    CHECK(count > 0 && same_algorithm(&p.algo, &found[0].algo),
          "%s: a deterministic plan takes the first of %d algorithms", label, count);
    const bool has_next = count > 1;
    found[0].state = CUBLAS_STATUS_NOT_SUPPORTED;
    int taken = gemm_first_usable(&gemm, &p, found, count, c->d, &c->a, &c->b);
    CHECK(taken && (taken > 0) == has_next,
          "%s: if algorithm 0 is unusable, another one is taken, if there is one; got %d of %d", label, taken, count);
    found[0].state = CUBLAS_STATUS_SUCCESS;
    memset(&found[0].algo, 0, sizeof found[0].algo);
    taken = gemm_first_usable(&gemm, &p, found, count, c->d, &c->a, &c->b);
    CHECK(taken && (taken > 0) == has_next,
          "%s: if algorithm 0 is all zeros, another one is taken, if there is one; got %d of %d", label, taken, count);
    taken = gemm_fastest(&gemm, &p, found, count, c->d, &c->a, &c->b);
    CHECK(taken && (taken > 0) == has_next,
          "%s: if algorithm 0 is all zeros, another one is the fastest, if there is one; got %d of %d", label, taken,
          count);
    gemm_destroy(&p);
}

static bool gpu_has(const Recipe *r) {
    return recipe_native(r, device_attribute(cudaDevAttrComputeCapabilityMajor),
                         device_attribute(cudaDevAttrComputeCapabilityMinor));
}

static void check_ways(Case *c, int recipe, GemmKind kind, int64_t R, int64_t N, int64_t K, Fp8Format dy,
                       const Operand *a, const Operand *b) {
    const Recipe *r = recipe_row(recipe);
    char label[128];
    for (int way = 0; way < NUM_WAYS; way++) {
        if (way == WAY_FAST && !r->fast_accum) continue;
        if (way == WAY_EMULATED ? !recipe_is_fp8(r, kind) : !gpu_has(r)) continue;
        format_checked(label, sizeof label, "%s %s %lld x %lld x %lld, dy %s, %s", r->name, gemm_kind_name(kind),
                       (long long)R, (long long)N, (long long)K, gemm_type_name(PER_TENSOR, dy), way_names[way]);
        const GemmSpec spec = {r, FP8_E4M3, kind == GEMM_FPROP ? FP8_E4M3 : dy, way == WAY_FAST, way == WAY_EMULATED};
        check_way(c, label, kind, R, N, K, spec, &worst_units[recipe][kind][way]);
        check_first_usable(c, label, kind, R, N, K, spec);
        // WAY_SLOW has just run cuBLASLt's fastest algorithm. The ways after it run its first usable one.
        if (way == WAY_SLOW) c->gemm.deterministic = !c->gemm.deterministic;
    }
    if (!recipe_is_fp8(r, kind)) return;
    const GemmSpec spec = {r, FP8_E4M3, kind == GEMM_FPROP ? FP8_E4M3 : dy, false, !gpu_has(r)};
    operand_spoil(a, r->granularity[kind][0]);
    check_spoiled(c, label, kind, R, N, K, spec);
    CUDA_CHECK(cudaMemcpy((void *)a->operand.rowwise_scale_inv, a->scales, (size_t)a->num_scale_bytes,
                          cudaMemcpyHostToDevice));
    operand_spoil(b, r->granularity[kind][1]);
    check_spoiled(c, label, kind, R, N, K, spec);
}

// Checks one GEMM of one recipe in all ways. x, w, dy are host matrices [R, K], [N, K], [R, N].
static void check_gemm(int recipe, GemmKind kind, int64_t R, int64_t N, int64_t K, const float *x, const float *w,
                       const float *dy, Fp8Format dy_format) {
    const Recipe *r = recipe_row(recipe);
    const ScaleGranularity granularity_a = r->granularity[kind][0], granularity_b = r->granularity[kind][1];
    const Operand a = kind == GEMM_WGRAD ? operand_create(x, R, K, COLUMNWISE, granularity_a, r->rule, FP8_E4M3)
                                         : operand_create(w, N, K, kind == GEMM_FPROP ? ROWWISE : COLUMNWISE,
                                                          granularity_a, r->rule, FP8_E4M3);
    const Operand b = kind == GEMM_FPROP ? operand_create(x, R, K, ROWWISE, granularity_b, r->rule, FP8_E4M3)
                                         : operand_create(dy, R, N, kind == GEMM_DGRAD ? ROWWISE : COLUMNWISE,
                                                          granularity_b, r->rule, dy_format);
    const int64_t rows = kind == GEMM_FPROP ? N : K, cols = kind == GEMM_WGRAD ? N : R,
                  depth = R * N * K / (rows * cols);
    double *sum = (double *)bench_alloc(rows * cols * 8), *norm = (double *)bench_alloc(rows * cols * 8);
    truth_kernel<<<dim3(grid_size(rows, 128), (unsigned)cols), 128>>>(sum, norm, a.values, b.values, rows, cols, depth);
    CUDA_CHECK_LAUNCH();

    Case c = {};
    CUBLAS_CHECK(cublasLtCreate(&c.gemm.handle));
    c.gemm.workspace = bench_alloc(GEMM_WORKSPACE_BYTES);
    c.gemm.scratch = (bf16 *)bench_alloc((rows + cols) * depth * (int64_t)sizeof(bf16));
    c.gemm.alpha = (float *)bench_zeros(sizeof(float));
    c.a = a.operand, c.b = b.operand, c.n = rows * cols, c.inverse = a.inverse * b.inverse;
    c.sum = (double *)bench_download(sum, c.n * 8, "sums"), c.norm = (double *)bench_download(norm, c.n * 8, "norms");
    // Bias and old values are about as large as the results.
    c.bias = bench_normal(4, rows, 1000), c.old = bench_normal(5, c.n, 1000);
    c.device_bias = (bf16 *)bench_upload(c.bias, rows * (int64_t)sizeof(bf16)),
    c.d = (bf16 *)bench_alloc(c.n * (int64_t)sizeof(bf16));
    check_ways(&c, recipe, kind, R, N, K, dy_format, &a, &b);

    CUBLAS_CHECK(cublasLtDestroy(c.gemm.handle));
    void *device[] = {sum, norm, c.gemm.workspace, c.gemm.scratch, c.gemm.alpha, c.device_bias, c.d};
    for (void *p : device) bench_free(p);
    free(c.sum), free(c.norm), free(c.bias), free(c.old);
    operand_free(a), operand_free(b);
}

// Checks the recipes from `first` to `last` that can have these sizes.
static void check_shape(int first, int last, int64_t R, int64_t N, int64_t K) {
    float *x = make_matrix(1, R, K), *w = make_matrix(2, N, K), *dy = make_matrix(3, R, N);
    for (int recipe = first; recipe <= last; recipe++) {
        const int multiple = recipe_row(recipe)->multiple;
        if (R % multiple || N % multiple || K % multiple) continue;
        for (int kind = 0; kind < NUM_GEMMS; kind++)
            for (int format = FP8_E4M3; format <= FP8_E5M2; format++) {
                if (format == FP8_E5M2 && (kind == GEMM_FPROP || !recipe_is_fp8(recipe_row(recipe), (GemmKind)kind)))
                    continue;
                check_gemm(recipe, (GemmKind)kind, R, N, K, x, w, dy, (Fp8Format)format);
            }
    }
    free(x), free(w), free(dy);
}

static void run_checks(void) {
    for (int i = 0; i < (NUM_RECIPES + 1) * NUM_GEMMS * NUM_WAYS; i++) (&worst_units[0][0][0])[i] = -1;
    check_shape(0, NUM_RECIPES, 256, 384, 512);
    check_shape(0, NUM_RECIPES, 640, 256, 1152);
    check_shape(0, NUM_RECIPES, 272, 208, 336);
    check_shape(0, NUM_RECIPES, 128, 128, 8192);  // long contraction in fprop
    // More than two tiles for each SM of a GPU with 132, and sizes that are no multiples of a tile.
    check_shape(RECIPE_BLOCKWISE, RECIPE_BLOCKWISE, 2944, 3072, 3200);
    printf("worst error of each GEMM's sums: native, fast_accum, emulated (unit: error_unit() in dev/cuda/gemm.cu, "
           "%.3g allowed)\n",
           LIMIT_UNITS);
    for (int recipe = 0; recipe <= NUM_RECIPES; recipe++) {
        printf("  %-19s", recipe_row(recipe)->name);
        for (int kind = 0; kind < NUM_GEMMS; kind++) {
            printf("  %s", gemm_kind_name((GemmKind)kind));
            for (int way = 0; way < NUM_WAYS; way++)
                worst_units[recipe][kind][way] < 0 ? printf("     -")
                                                   : printf(" %5.2f", worst_units[recipe][kind][way]);
        }
        printf("\n");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Refusals run before the first CUDA call of this process: a check runs in a forked child, which cannot use its
// parent's CUDA context

typedef struct {
    int recipe;
    int64_t R, N, K;
    bool emulate;
} BadPlan;

static void call_describe(void *context) {
    const BadPlan *bad = (const BadPlan *)context;
    const GemmSpec spec = {recipe_row(bad->recipe), FP8_E4M3, FP8_E4M3, false, bad->emulate};
    gemm_describe("qkv", GEMM_DGRAD, bad->R, bad->N, bad->K, spec, false);
}

// Every GPU lacks the GEMMs of some recipe.
static void call_not_native(void *context) {
    BadPlan *bad = (BadPlan *)context;
    for (bad->recipe = 0; gpu_has(recipe_row(bad->recipe)); bad->recipe++) {}
    call_describe(context);
}

static void check_refusals(void) {
    char output[512];
    const struct {
        BadPlan plan;
        const char *message;
    } sizes[] = {{{RECIPE_TENSORWISE, 24, 32, 32, true}, "multiples of 16 for tensorwise"},
                 {{RECIPE_BLOCKWISE, 128, 192, 128, true}, "multiples of 128 for blockwise"},
                 {{RECIPE_MXFP8, 32, 32, 48, true}, "multiples of 32 for mxfp8"},
                 {{RECIPE_BF16, 1, 8, 12, false}, "multiples of 8 for BF16"}};
    for (auto &bad : sizes)
        CHECK(check_dies(call_describe, (void *)&bad.plan, bad.message, output, sizeof output),
              "sizes that the recipe's GEMMs cannot have are refused: %s", output);
    BadPlan plan = {0, 128, 128, 128, false};
    CHECK(check_dies(call_not_native, &plan, "--fp8-emulate computes them in BF16", output, sizeof output),
          "a recipe without native GEMMs on this GPU is refused: %s", output);
    const int gpus[][2] = {{8, 0}, {8, 9}, {9, 0}, {10, 0}, {12, 0}};
    // One string per granularity, in the order of SCALE_GRANULARITIES; one digit per GPU of `gpus`.
    const char *const native[] = {"11111", "01111", "00100", "00100", "00100", "00100", "00011"};
    static_assert(sizeof native / sizeof *native == NUM_GRANULARITIES, "every granularity has its GPUs");
    for (int recipe = 0; recipe <= NUM_RECIPES; recipe++)
        for (int i = 0; i < 5; i++) {
            const Recipe *r = recipe_row(recipe);
            bool all = true;
            for (int n = 0; n < 2 * NUM_GEMMS; n++) all = all && native[r->granularity[n / 2][n % 2]][i] == '1';
            CHECK(recipe_native(r, gpus[i][0], gpus[i][1]) == all,
                  "%s has native GEMMs on compute capability %d.%d exactly if `native` has a 1 there for all its "
                  "granularities",
                  r->name, gpus[i][0], gpus[i][1]);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Rates

typedef struct {
    Gemm gemm;
    char *memory;  // for operands and result of each GEMM
    cudaEvent_t begin, end;
} Rates;

enum { RATE_RUNS = 8 };

// Returns the microseconds per GEMM in a burst of RATE_RUNS with the plan's fastest algorithm, and the clock during it.
static double burst_us(Bench *bench, Rates *r, GemmPlan *p, double *ghz) {
    char *result = r->memory;
    const QTensor a = gemm_fill_operand(p, 0, &result, 0), b = gemm_fill_operand(p, 1, &result, 0);
    bf16 *const d = (bf16 *)result;
    float ms;
    gemm_choose(&r->gemm, p, d, &a, &b, NULL);
    bench_clock_begin(bench);
    CUDA_CHECK(cudaEventRecord(r->begin));
    for (int i = 0; i < RATE_RUNS; i++) gemm_run(&r->gemm, p, d, &a, &b, NULL, false);
    CUDA_CHECK(cudaEventRecord(r->end));
    *ghz = bench_clock_end(bench);
    CUDA_CHECK(cudaEventElapsedTime(&ms, r->begin, r->end));
    bench_sustained(bench, ms * 1e3 / RATE_RUNS, [&] { gemm_run(&r->gemm, p, d, &a, &b, NULL, false); });
    return ms * 1e3 / RATE_RUNS;
}

// Says why the kernels stay below the peak, apart from the clock. Hopper's tensor cores apply no scales, and
// accumulate FP8 with less precision than fp32.
static const char *rate_reason(const GemmPlan *p) {
    const int vectors = (p->granularity_a == BLOCK_1X128) + (p->granularity_b == BLOCK_1X128);
    if (p->emulated) return "each run decodes both operands to bf16 first";
    if (vectors == 2) return "sums of 128 terms are scaled by two vectors and added in fp32 outside the tensor cores";
    if (vectors == 1) return "sums of 128 terms are scaled and added in fp32 outside the tensor cores";
    if (p->native && !p->spec.fast_accum)
        return "no fast_accum: partial sums are added in fp32 outside the tensor cores";
    return "the fastest algorithm that cuBLASLt offers";
}

static void bench_recipe(Bench *b, Rates *rates, int recipe, int64_t R, int64_t N, int64_t K) {
    const Recipe *r = recipe_row(recipe);
    const bool native = gpu_has(r);
    char name[64], shape[64];
    format_checked(shape, sizeof shape, "%lld x %lld x %lld", (long long)R, (long long)N, (long long)K);
    for (int kind = 0; kind < NUM_GEMMS; kind++) {
        const GemmSpec spec = {r, FP8_E4M3, kind == GEMM_FPROP ? FP8_E4M3 : r->dy_format,
                               r->fast_accum && kind == GEMM_FPROP, !native};
        GemmPlan p = gemm_describe("llama3.1-8b", (GemmKind)kind, R, N, K, spec, false);
        double ghz;
        const double us = burst_us(b, rates, &p, &ghz);
        format_checked(name, sizeof name, "gemm %s, %s%s", gemm_kind_name((GemmKind)kind), r->name,
                       p.emulated ? " (emulated)" : "");
        bench_report_flops(b, name, shape, us, gemm_flops(&p), p.native, ghz, rate_reason(&p));
        gemm_destroy(&p);
    }
}

// Times the GEMMs of llama3.1-8b's linear layers, R x N x K, in every recipe, and in BF16 those of its lm_head over a
// chunk of rows. Bursts are so long that the power limit can lower the clock.
static void bench_rates(void) {
    const int64_t layers[][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}}, rows[] = {2048, 8192},
                  V = 128256;
    // Elements of y and of dy of the widest layer; elements of operands and result of lm_head.
    const int64_t widest = 8192ll * 28672, largest = V * 4096 + 2048 * (V + 4096);
    Bench b = bench_create();
    Rates r = {};
    CUBLAS_CHECK(cublasLtCreate(&r.gemm.handle));
    r.gemm.workspace = bench_alloc(GEMM_WORKSPACE_BYTES);
    r.gemm.scratch = (bf16 *)bench_alloc(2 * 2 * widest);
    r.gemm.alpha = (float *)bench_zeros(sizeof(float));
    r.memory = (char *)bench_alloc(2 * largest + 2 * ARENA_ALIGNMENT);
    CUDA_CHECK(cudaEventCreate(&r.begin));
    CUDA_CHECK(cudaEventCreate(&r.end));
    for (auto &layer : layers)
        for (int64_t R : rows)
            for (int recipe = NUM_RECIPES; recipe >= 0; recipe--) bench_recipe(&b, &r, recipe, R, layer[0], layer[1]);
    bench_recipe(&b, &r, RECIPE_BF16, 2048, V, 4096);
    CUBLAS_CHECK(cublasLtDestroy(r.gemm.handle));
    void *device[] = {r.gemm.workspace, r.gemm.scratch, r.gemm.alpha, r.memory};
    for (void *p : device) bench_free(p);
    CUDA_CHECK(cudaEventDestroy(r.begin));
    CUDA_CHECK(cudaEventDestroy(r.end));
    bench_destroy(&b);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        check_refusals();
        run_checks();
    }
    if (bench_part_wanted(argc, argv, "bench")) bench_rates();
    return check_report();
}
