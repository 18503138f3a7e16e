// Checks and times the casts of every recipe (llmc/fp8/quantize.cuh): of a tensor in memory, and of values that the
// cast computes itself (RMSNorm, SwiGLU, SwiGLU's gradient).
// Build and run: make build/bench_quantize_fine && build/bench_quantize_fine
#include "../../llmc/kernels/rmsnorm.cuh"
#include "../../llmc/kernels/swiglu.cuh"
#include "check_quantized.cuh"

#define EPS 1e-5f

// ---------------------------------------------------------------------------------------------------------------------
// Inputs

typedef enum {
    FILL_MIXED,
    FILL_NAN,
    FILL_INFINITY,
    FILL_ZERO,
    FILL_DENORMAL,
    FILL_BELOW_FLOOR,
    FILL_HUGE,
    NUM_FILLS
} Fill;
static const char *const fill_names[NUM_FILLS] = {"mixed",    "NaN",         "infinity", "zero",
                                                  "denormal", "below 1e-12", "huge"};

// Mixed input has rows and columns of very different size, outliers, denormals, a column of zeros, if there are several
// rows also a row of zeros and, if the tensor is large enough, a square of zeros. FILL_NAN and FILL_INFINITY are mixed
// input with three NaNs or infinities in it. The other fills are normal values times a constant.
static bf16_bits *make_input(Fill fill, int64_t R, int64_t C) {
    const float scales[NUM_FILLS] = {1, 1, 1, 0, 1e-39f, 1e-14f, 1e37f};
    bf16_bits *x = bench_normal(31, R * C, scales[fill]);
    if (fill > FILL_INFINITY) return x;
    for (int64_t i = 0; i < R * C; i++) {
        const int64_t r = i / C, c = i % C;
        const uint64_t random = rng_u64(7, (uint64_t)i);
        float v = bf16_to_float(x[i]) * exp2f((float)((r * 7 + 3) % 23 - 11)) * exp2f((float)((c / 3 * 5) % 13 - 6));
        if (random % 193 == 0) v *= 3000;
        if (random % 509 == 1) v *= 1e-36f;
        if ((R > 1 && r == R / 3) || c == C / 2 || (r >= 128 && r < 256 && c >= 128 && c < 256)) v = 0;
        x[i] = bf16_from_float(v);
    }
    for (int i = 0; i < 3 && fill == FILL_NAN; i++) x[R * C * (2 * i + 1) / 6] = i == 1 ? 0xffc1 : 0x7fc0;
    for (int i = 0; i < 3 && fill == FILL_INFINITY; i++) x[R * C * (2 * i + 1) / 6] = i == 1 ? 0xff80 : 0x7f80;
    return x;
}

// A tensor of a recipe in an FP8 format. Only dy has cases in E5M2.
typedef struct {
    char name[96];
    TensorRole role;
    ScaleGranularity row, col;
    ScaleRule rule;
    Fp8Format format;
} Case;

enum { MAX_CASES = NUM_RECIPES * NUM_TENSORS * 2 };

static int make_cases(Case cases[MAX_CASES], int role) {
    int count = 0;
    for (int recipe = 0; recipe < NUM_RECIPES; recipe++)
        for (int tensor = 0; tensor < NUM_TENSORS; tensor++)
            for (int f = 0; f < (tensor == TENSOR_DY ? 2 : 1); f++) {
                const Recipe *r = recipe_row(recipe);
                if (role != NUM_TENSORS && role != tensor) continue;
                Case *c = &cases[count++];
                c->role = (TensorRole)tensor, c->rule = r->rule, c->format = (Fp8Format)f;
                c->row = recipe_granularity(r, c->role, ROWWISE), c->col = recipe_granularity(r, c->role, COLUMNWISE);
                format_checked(c->name, sizeof c->name, "%s %s %s", r->name,
                               tensor == TENSOR_X   ? "x"
                               : tensor == TENSOR_W ? "w"
                                                    : "dy",
                               f ? "e5m2" : "e4m3");
            }
    return count;
}

static QTensor case_tensor(const Case *c, int64_t R, int64_t C) {
    return qtensor_of(R, C, c->row, c->col, c->rule, c->format);
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks

// Checks that all data of `got`, codes and scales, equals that of `want`.
static void check_same_data(const char *label, const QTensor *got, const QTensor *want, int64_t R, int64_t C) {
    if (got->rowwise) check_same_on_device(label, got->rowwise, want->rowwise, R * C, C);
    if (got->rowwise)
        check_same_on_device(label, got->rowwise_scale_inv, want->rowwise_scale_inv,
                             scale_bytes(got->row_granularity, R, C), 4);
    if (got->columnwise) check_same_on_device(label, got->columnwise, want->columnwise, R * C, R);
    if (got->columnwise)
        check_same_on_device(label, got->columnwise_scale_inv, want->columnwise_scale_inv,
                             scale_bytes(got->col_granularity, C, R), 4);
}

// Compares the amaxes that tensor_quantize has found with the CPU's.
static void check_amaxes(const char *label, const QTensor *t, const float *x, int64_t R, int64_t C) {
    const int64_t count = tensor_amaxes(t->row_granularity, t->col_granularity, R, C),
                  rows = usage_amaxes(t->row_granularity, R);
    uint32_t *got = (uint32_t *)bench_download(t->amax, max_i64(1, count) * 4, label);
    int64_t bad = 0, first = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t want;
        if (i < rows && t->row_granularity == PER_ROW) want = quantize_tensor_amax(x + i * C, C, t->rule);
        else if (i >= rows && t->col_granularity == PER_ROW)
            want = quantize_block_amax(x + i - rows, usage_shape(R, C, COLUMNWISE), 1, R, t->rule);
        else want = quantize_tensor_amax(x, R * C, t->rule);
        if (!same_or_nan(got[i], want) && bad++ == 0) first = i;
    }
    CHECK(bad == 0, "%s: all amaxes are as expected; %lld of %lld differ, first at index %lld: got %.9g", label,
          (long long)bad, (long long)count, (long long)first, float_from_bits(got[first]));
    free(got);
}

static void check_dequantized(const char *label, const QTensor *t, TensorUsage usage, int64_t R, int64_t C) {
    const ScaleGranularity granularity = usage == ROWWISE ? t->row_granularity : t->col_granularity;
    const UsageShape s = usage_shape(R, C, usage);
    const int64_t outer = s.outer, depth = s.depth;
    if (depth % 16) return;
    bf16 *out = (bf16 *)bench_alloc(R * C * 2);
    const uint8_t *device_codes = usage == ROWWISE ? t->rowwise : t->columnwise;
    const void *device_scales = usage == ROWWISE ? t->rowwise_scale_inv : t->columnwise_scale_inv;
    fp8_dequantize(out, device_codes, device_scales, granularity, t->format, outer, depth, 0);
    bf16_bits *got = (bf16_bits *)bench_download(out, R * C * 2, label);
    uint8_t *codes = (uint8_t *)bench_download(device_codes, R * C, label);
    void *scales = bench_download(device_scales, scale_bytes(granularity, outer, depth), label);
    float *want = (float *)xcalloc((size_t)(R * C), sizeof(float));
    dequantize_copy(want, codes, scales, outer, depth, granularity, t->format);
    int64_t bad = 0, first = 0;
    for (int64_t i = 0; i < R * C; i++)
        if (!same_or_nan(float_bits(bf16_to_float(got[i])), float_bits(bf16_to_float(bf16_from_float(want[i])))) &&
            bad++ == 0)
            first = i;
    CHECK(bad == 0,
          "%s, %s data decoded to bf16 is as expected; %lld of %lld values differ, first at index %lld: got %.9g, want "
          "%.9g",
          label, usage == ROWWISE ? "rowwise" : "columnwise", (long long)bad, (long long)(R * C), (long long)first,
          bf16_to_float(got[first]), want[first]);
    free(got), free(codes), free(scales), free(want);
    bench_free(out);
}

// Checks the cast of rowwise and columnwise data together, and then the cast of each alone, with the amaxes that the
// first cast found. `back`: also checks the decoding of the codes to bf16.
static void check_tensor(const Case *c, const char *what, const bf16 *device_x, const float *x, int64_t R, int64_t C,
                         bool back) {
    char label[160];
    format_checked(label, sizeof label, "%s, %lld x %lld %s", c->name, (long long)R, (long long)C, what);
    QTensor t = case_tensor(c, R, C);
    tensor_quantize(t, device_x, R, C, 0);
    check_amaxes(label, &t, x, R, C);
    check_data(label, &t, x, R, C, 0);
    if (back && t.rowwise) check_dequantized(label, &t, ROWWISE, R, C);
    if (back && t.columnwise) check_dequantized(label, &t, COLUMNWISE, R, C);
    for (int usage = 0; usage < 2 && t.rowwise && t.columnwise; usage++) {
        QTensor all = case_tensor(c, R, C), alone = all;
        bench_free(all.amax);
        all.amax = t.amax, alone.amax = t.amax;
        if (usage == ROWWISE) alone.columnwise = NULL;
        else alone.rowwise = NULL;
        quantize_transpose(alone, device_x, R, C, 0);
        check_same_data(label, &alone, &t, R, C);
        all.amax = NULL;
        qtensor_free(all);
    }
    qtensor_free(t);
}

static void check_shape(int64_t R, int64_t C, Fill fill) {
    Case cases[MAX_CASES];
    const int count = make_cases(cases, NUM_TENSORS);
    bf16_bits *host = make_input(fill, R, C);
    float *x = bf16_to_floats(host, R * C);
    bf16 *device_x = (bf16 *)bench_upload(host, R * C * 2);
    for (int i = 0; i < count; i++) check_tensor(&cases[i], fill_names[fill], device_x, x, R, C, fill < FILL_ZERO);
    bench_free(device_x);
    free(host), free(x);
}

// Checks a delayed cast: one pass, with a scale that is known before. This is the scale of the tensor itself, one that
// is too large (values saturate), or one that is too small. The pass must also find the tensor's amax, ignoring NaN.
static void check_delayed(int64_t R, int64_t C, Fill fill, Fp8Format format, float factor) {
    char label[128];
    format_checked(label, sizeof label, "delayed, %lld x %lld %s %s, scale x %g", (long long)R, (long long)C,
                   fill_names[fill], format == FP8_E4M3 ? "e4m3" : "e5m2", factor);
    bf16_bits *host = make_input(fill, R, C);
    float *x = bf16_to_floats(host, R * C);
    const uint32_t amax = quantize_tensor_amax(x, R * C, SCALE_TE);
    const float scale = fp8_scale_te(float_from_bits(amax), format, 0) * factor;
    bf16 *device_x = (bf16 *)bench_upload(host, R * C * 2);
    QTensor t = qtensor_of(R, C, PER_TENSOR, PER_TENSOR, SCALE_TE, format);
    t.delayed_scale = (float *)bench_upload(&scale, sizeof scale);
    tensor_quantize(t, device_x, R, C, 0);
    check_data(label, &t, x, R, C, scale);
    CHECK(read_amax(t.amax) == amax, "%s: the amax is %.9g, want %.9g", label, float_from_bits(read_amax(t.amax)),
          float_from_bits(amax));
    bench_free((void *)t.delayed_scale);
    qtensor_free(t);
    bench_free(device_x);
    free(host), free(x);
}

// Checks the cast of a source against the cast of the bf16 values [R, columns] that its plain kernel stores, with
// current and with delayed scales.
template <class Source>
static void check_source(const char *what, TensorRole role, Source source, const bf16 *values, int64_t R, int64_t C) {
    const int64_t columns = C * Source::OUTPUTS;
    const float one = 0.75f;
    Case cases[MAX_CASES];
    const int count = make_cases(cases, role);
    float *delayed_scale = (float *)bench_upload(&one, sizeof one);
    for (int i = 0; i < count; i++) {
        const Case *c = &cases[i];
        const bool tensor = c->row == PER_TENSOR;
        // quantize_source() refuses these: a block with one scale would hold values of two outputs.
        if (Source::OUTPUTS > 1 && C % 128 && usage_amaxes(c->row, 1) == 0) continue;
        for (int delayed = 0; delayed <= (tensor && c->rule == SCALE_TE); delayed++) {
            char label[192];
            format_checked(label, sizeof label, "%s of %s, %lld x %lld%s", c->name, what, (long long)R,
                           (long long)columns, delayed ? ", delayed scale" : "");
            QTensor got = case_tensor(c, R, columns), want = case_tensor(c, R, columns);
            if (delayed) got.delayed_scale = want.delayed_scale = delayed_scale;
            tensor_quantize(want, values, R, columns, 0);
            if (!delayed) quantize_amax_source(label, got, source, R, C, 0);
            quantize_source(label, got, source, R, C, 0);
            check_same_on_device(label, got.amax, want.amax, max_i64(1, tensor_amaxes(c->row, c->col, R, columns)) * 4,
                                 4);
            check_same_data(label, &got, &want, R, columns);
            qtensor_free(got), qtensor_free(want);
        }
    }
    bench_free(delayed_scale);
}

static void check_sources(int64_t R, int64_t C, Fill fill) {
    bf16_bits *x_host = make_input(fill, R, 2 * C), *dy_host = bench_normal(5, R * C, 1);
    bf16 *x = (bf16 *)bench_upload(x_host, R * 2 * C * 2), *dh = (bf16 *)bench_upload(dy_host, R * C * 2),
         *weight = bench_random(2 * C, 6, 1);
    bf16 *y = (bf16 *)bench_alloc(R * 2 * C * 2), *h = (bf16 *)bench_alloc(R * C * 2);
    float *rstd = (float *)bench_alloc(R * 4);
    rmsnorm_forward(y, rstd, NULL, x, weight, R, 2 * C, EPS, RmsnormWatch{}, 0);
    const RmsnormSource norm = {x, weight, rstd, 2 * C};
    check_source("a norm", TENSOR_X, norm, y, R, 2 * C);
    swiglu_backward(y, h, dh, x, R, C, 0);
    const SwigluSource swiglu = {x, C};
    check_source("SwiGLU", TENSOR_X, swiglu, h, R, C);
    const SwigluGradientSource gradient = {dh, x, C};
    check_source("SwiGLU's gradient", TENSOR_DY, gradient, y, R, C);
    void *device[] = {x, dh, weight, y, h, rstd};
    for (void *p : device) bench_free(p);
    free(x_host), free(dy_host);
}

// Casts a large dy with each recipe whose scales are finer than a tensor. The codes of its last rows must equal those
// of a cast of these rows alone. This is not checked for data whose scales depend on other rows too. A second run must
// equal the first.
static void check_large(int64_t R, int64_t C) {
    const int64_t slab = 2048, first = R - slab;
    Case cases[MAX_CASES];
    const int count = make_cases(cases, TENSOR_DY);
    bf16 *x = bench_random(R * C, 3, 1);
    uint8_t *cut = (uint8_t *)bench_alloc(slab * C);
    for (int i = 0; i < count; i++) {
        const Case *c = &cases[i];
        if (c->row == PER_TENSOR) continue;
        QTensor t = case_tensor(c, R, C), part = case_tensor(c, slab, C);
        tensor_quantize(t, x, R, C, 0);
        tensor_quantize(part, x + first * C, slab, C, 0);
        check_same_on_device(c->name, t.rowwise + first * C, part.rowwise, slab * C, C);
        if (usage_amaxes(c->col, C) == 0 && t.columnwise) {
            CUDA_CHECK(cudaMemcpy2D(cut, (size_t)slab, t.columnwise + first, (size_t)R, (size_t)slab, (size_t)C,
                                    cudaMemcpyDeviceToDevice));
            check_same_on_device(c->name, cut, part.columnwise, slab * C, slab);
        }
        qtensor_free(part);
        QTensor again = case_tensor(c, R, C);
        tensor_quantize(again, x, R, C, 0);
        check_same_data(c->name, &again, &t, R, C);
        qtensor_free(t), qtensor_free(again);
    }
    bench_free(cut), bench_free(x);
}

// Refusals run before the first CUDA call of this process: a check runs in a forked child, which cannot use its
// parent's CUDA context.
static void call_quantize(void *context) {
    quantize_transpose(*(const QTensor *)context, (const bf16 *)16, 128, 128, 0);
}

static void call_gradient(void *context) {
    const SwigluGradientSource source = {(const bf16 *)16, (const bf16 *)16, 144};
    quantize_source("call_gradient", *(const QTensor *)context, source, 128, 144, 0);
}

static void call_norm(void *context) {
    const RmsnormSource source = {(const bf16 *)16, (const bf16 *)16, (const float *)16, 128};
    quantize_source("call_norm", *(const QTensor *)context, source, 128, 128, 0);
}

static void check_refusals(void) {
    char output[512];
    QTensor good = {};
    good.rowwise = good.columnwise = (uint8_t *)16,
    good.rowwise_scale_inv = good.columnwise_scale_inv = good.amax = (uint32_t *)16;
    good.row_granularity = good.col_granularity = BLOCK_1X128, good.rule = SCALE_TE_POW2;
    QTensor bad = good;
    bad.rule = SCALE_MX;
    CHECK(check_dies(call_quantize, &bad, "no kernel casts", output, sizeof output),
          "a rule that does not fit the granularity is refused: %s", output);
    bad = good, bad.col_granularity = BLOCK_1X32;
    CHECK(check_dies(call_quantize, &bad, "no kernel casts", output, sizeof output),
          "two granularities that no kernel casts together are refused: %s", output);
    bad = good, bad.columnwise_scale_inv = NULL;
    CHECK(check_dies(call_quantize, &bad, "with its scales", output, sizeof output),
          "data without scales are refused: %s", output);
    bad = good, bad.row_granularity = bad.col_granularity = PER_ROW, bad.rule = SCALE_TORCHAO_POW2, bad.amax = NULL;
    CHECK(check_dies(call_quantize, &bad, "needs amax", output, sizeof output),
          "scales of rows without amaxes are refused: %s", output);
    CHECK(check_dies(call_gradient, &good, "values of two outputs", output, sizeof output),
          "a block that would span two outputs is refused: %s", output);
    bad = good, bad.format = FP8_E5M2;
    CHECK(check_dies(call_norm, &bad, "only gradients", output, sizeof output), "a norm in E5M2 is refused: %s",
          output);
    bad = good, bad.row_granularity = bad.col_granularity = BLOCK_128X128;
    CHECK(check_dies(call_norm, &bad, "no kernel casts", output, sizeof output),
          "a norm with 128x128 blocks is refused: %s", output);
}

static void run_checks(void) {
    const int64_t shapes[][2] = {{1, 16},    {2, 48},    {16, 128},  {17, 144},   {128, 128},
                                 {129, 256}, {200, 272}, {333, 528}, {384, 1040}, {640, 256}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int fill = 0; fill < NUM_FILLS; fill++)
            if (fill <= FILL_INFINITY || shapes[i][0] <= 200) check_shape(shapes[i][0], shapes[i][1], (Fill)fill);
    for (int f = 0; f < 2; f++)
        for (int fill = 0; fill < NUM_FILLS; fill++)
            for (int factor = -3; factor <= 3; factor += 3)
                check_delayed(200, 272, (Fill)fill, (Fp8Format)f, exp2f((float)factor) * (factor ? 1.1f : 1));
    const int64_t source_shapes[][2] = {{1, 128}, {129, 256}, {320, 144}, {333, 384}};
    for (size_t i = 0; i < sizeof source_shapes / sizeof source_shapes[0]; i++)
        for (int fill = 0; fill <= FILL_ZERO; fill++)
            check_sources(source_shapes[i][0], source_shapes[i][1], (Fill)fill);
    check_large(4096, 4096);
}

// ---------------------------------------------------------------------------------------------------------------------

// Reports the cast of n values to the data that `t` has. `outputs` is OUTPUTS of the source, `read` the bytes read per
// value that is cast.
static void bench_cast(Bench *b, const char *name, const char *shape, const Case *c, int outputs, double us,
                       const QTensor *t, double read, double n) {
    const double bytes = (read + (t->rowwise ? 1 : 0) + (t->columnwise ? 1 : 0)) * n;
    char reason[256];
    if (c->row == PER_TENSOR) {
        bench_report(b, name, shape, us, bytes, t->columnwise ? CAST_REASON : NULL);
        return;
    }
    format_checked(
        reason, sizeof reason,
        "a tile waits in registers for its scales, so a block's loads, arithmetic and stores do not overlap%s%s%s",
        t->rowwise && t->columnwise && c->row != BLOCK_128X128 ? "; two casts of every value" : "",
        c->row == BLOCK_1X32 ? "; a maximum for every 32 values" : "",
        outputs > 1 ? "; two outputs, so 2 blocks per SM" : "");
    bench_report(b, name, shape, us, bytes, reason);
}

// Times the amax pass of one tensor, if it needs one (the delayed recipe does not), and its cast; for x also the
// rowwise and the columnwise cast alone. `read` is the bytes read per value that is cast.
template <class Source>
static void bench_source(Bench *b, const char *what, const Case *c, Source source, int64_t R, int64_t C, double read) {
    enum { OUTPUTS = Source::OUTPUTS };
    const int64_t columns = C * OUTPUTS;
    const double n = (double)R * (double)columns;
    const float one = 1;
    const char *data[] = {"cast", "rowwise cast", "columnwise cast"};
    char name[128], shape[32];
    format_checked(shape, sizeof shape, "%lld x %lld", (long long)R, (long long)columns);
    float *known = (float *)bench_upload(&one, sizeof one);
    QTensor t = case_tensor(c, R, columns);
    if (c->row == PER_TENSOR) t.delayed_scale = known;
    if (usage_amaxes(c->row, R) && !t.delayed_scale) {
        format_checked(name, sizeof name, "%s%s, amaxes", c->name, what);
        bench_report(b, name, shape, bench_time_us(b, [&] { quantize_amax_source("bench", t, source, R, C, 0); }),
                     read * n, "atomics for the amaxes of every tile");
    }
    for (int i = 0; i < (t.rowwise && t.columnwise && c->role == TENSOR_X ? 3 : 1); i++) {
        QTensor part = t;
        if (i == 1) part.columnwise = NULL;
        if (i == 2) part.rowwise = NULL;
        format_checked(name, sizeof name, "%s%s, %s", c->name, what, data[i]);
        bench_cast(b, name, shape, c, OUTPUTS,
                   bench_time_us(b, [&] { quantize_source("bench", part, source, R, C, 0); }), &part, read, n);
    }
    qtensor_free(t);
    bench_free(known);
}

// Casts with one scale that follows from the amax are timed beside their amax passes, in quantize.cu, rmsnorm.cu and
// swiglu.cu.
static bool bench_wanted(const Case *c, TensorRole role) {
    return c->role == role && c->format == FP8_E4M3 && (c->row != PER_TENSOR || c->rule == SCALE_TE);
}

static void bench_shape(Bench *b, int64_t R, int64_t C) {
    char shape[32];
    format_checked(shape, sizeof shape, "%lld x %lld", (long long)R, (long long)C);
    Case cases[MAX_CASES];
    const int count = make_cases(cases, NUM_TENSORS);
    bf16 *x = bench_random(R * C, 5, 1), *out = (bf16 *)bench_alloc(R * C * 2);
    const TensorSource source = {x, C};
    for (int i = 0; i < count; i++)
        if (bench_wanted(&cases[i], TENSOR_X) || bench_wanted(&cases[i], TENSOR_W))
            bench_source(b, "", &cases[i], source, R, C, 2);
    QTensor mx = qtensor_of(R, C, BLOCK_1X32, NO_SCALE, SCALE_MX, FP8_E4M3);
    tensor_quantize(mx, x, R, C, 0);
    const double us =
        bench_time_us(b, [&] { fp8_dequantize(out, mx.rowwise, mx.rowwise_scale_inv, BLOCK_1X32, FP8_E4M3, R, C, 0); });
    bench_report(b, "fp8_dequantize, 1x32", shape, us, 3.0 * (double)(R * C),
                 "short threads: 16 codes each, which wait for their scale");
    qtensor_free(mx);
    bench_free(x), bench_free(out);
}

// Times the casts of a norm, of SwiGLU and of its gradient.
static void bench_sources(Bench *b, int64_t R, int64_t C, int64_t F) {
    Case cases[MAX_CASES];
    const int count = make_cases(cases, NUM_TENSORS);
    bf16 *x = bench_random(R * 2 * F, 1, 1), *dh = bench_random(R * F, 2, 1), *weight = bench_random(C, 3, 1);
    float *rstd = (float *)bench_alloc(R * 4);
    rmsnorm_forward(NULL, rstd, NULL, x, weight, R, C, EPS, RmsnormWatch{}, 0);
    const RmsnormSource norm = {x, weight, rstd, C};
    const SwigluSource swiglu = {x, F};
    const SwigluGradientSource gradient = {dh, x, F};
    for (int i = 0; i < count; i++) {
        if (bench_wanted(&cases[i], TENSOR_X))
            bench_source(b, " of norm", &cases[i], norm, R, C, 2),
                bench_source(b, " of SwiGLU", &cases[i], swiglu, R, F, 4);
        if (bench_wanted(&cases[i], TENSOR_DY)) bench_source(b, " of SwiGLU", &cases[i], gradient, R, F, 3);
    }
    bench_free(x), bench_free(dh), bench_free(weight), bench_free(rstd);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        check_refusals();
        run_checks();
    }
    if (bench_part_wanted(argc, argv, "large")) check_large(524416, 4096);  // 2^31 + 524288 elements
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_shape(&b, 8192, 4096);
        bench_shape(&b, 8192, 14336);
        bench_shape(&b, 2048, 4096);
        bench_sources(&b, 8192, 4096, 14336);
        bench_destroy(&b);
    }
    return check_report();
}
