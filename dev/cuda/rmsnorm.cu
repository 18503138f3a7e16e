// Checks and times llmc/kernels/rmsnorm.cuh.
// Build and run: make build/bench_rmsnorm && build/bench_rmsnorm
#include "../../llmc/reference/rmsnorm.h"
#include "../../llmc/kernels/rmsnorm.cuh"
#include "check_quantized.cuh"

#define EPS 1e-5f
#define NO_WATCH \
    RmsnormWatch {}

// One rounding to bf16 is off by at most 2^-8 of the value; the 1% allows for fp32 sums in another order than the
// reference.
static const double BF16_ROUNDING = 0.00390625 * 1.01;

typedef enum { FILL_NORMAL, FILL_ZERO_ROW, FILL_NAN, FILL_INFINITY, FILL_DENORMAL, NUM_FILLS } Fill;
static const char *const fill_names[NUM_FILLS] = {"normal", "zero row", "NaN", "infinity", "denormal"};

typedef struct {
    int64_t R, C;
    char label[96];
    bf16_bits *residual, *delta, *dy, *weight;  // host arrays; x is residual + delta
    float *sum;                                 // x rounded to bf16
} Case;

static Case case_create(int64_t R, int64_t C, Fill fill) {
    Case k;
    k.R = R, k.C = C;
    format_checked(k.label, sizeof k.label, "%lld x %lld %s", (long long)R, (long long)C, fill_names[fill]);
    const float scale = fill == FILL_DENORMAL ? 1e-39f : 1;
    k.residual = bench_normal(1, R * C, scale);
    k.delta = bench_normal(2, R * C, 0.25f * scale);
    k.dy = bench_normal(3, R * C, 0.5f);
    k.weight = bench_normal(4, C, 0.5f);
    const int64_t row = R / 2;
    if (fill == FILL_ZERO_ROW)
        memset(k.residual + row * C, 0, (size_t)C * 2), memset(k.delta + row * C, 0, (size_t)C * 2);
    if (fill == FILL_NAN) k.residual[row * C + C - 1] = 0xffc0;
    if (fill == FILL_INFINITY) k.delta[row * C + C / 2] = 0x7f80;
    float *a = bf16_to_floats(k.residual, R * C), *b = bf16_to_floats(k.delta, R * C);
    k.sum = a;
    residual_add(k.sum, a, b, R * C, ROUND_BF16);
    free(b);
    return k;
}

static void case_free(Case *k) { free(k->residual), free(k->delta), free(k->dy), free(k->weight), free(k->sum); }

static void check_forward(const Case *k) {
    const int64_t R = k->R, C = k->C, n = R * C;
    char label[160];
    bf16 *residual = (bf16 *)bench_upload(k->residual, n * 2), *delta = (bf16 *)bench_upload(k->delta, n * 2),
         *weight = (bf16 *)bench_upload(k->weight, C * 2);
    bf16 *x = (bf16 *)bench_alloc(n * 2), *y = (bf16 *)bench_alloc(n * 2), *y_alone = (bf16 *)bench_alloc(n * 2);
    float *rstd = (float *)bench_alloc(R * 4), *rstd_alone = (float *)bench_alloc(R * 4);
    QTensor t = qtensor_create(R, C, FP8_E4M3);
    residual_rmsnorm_forward(x, y, rstd, NULL, residual, delta, weight, R, C, EPS, NO_WATCH, 0);
    rmsnorm_forward(y_alone, rstd_alone, NULL, x, weight, R, C, EPS, NO_WATCH, 0);
    // run in place, without storing y, with amax
    residual_rmsnorm_forward(residual, NULL, rstd, t.amax, residual, delta, weight, R, C, EPS, NO_WATCH, 0);
    quantize_source("norm", t, RmsnormSource{x, weight, rstd, C}, R, C, 0);

    bf16_bits *got_x = (bf16_bits *)bench_download(x, n * 2, k->label),
              *got_y = (bf16_bits *)bench_download(y, n * 2, k->label);
    float *xf = bf16_to_floats(got_x, n), *yf = bf16_to_floats(got_y, n), *wf = bf16_to_floats(k->weight, C),
          *got_rstd = (float *)bench_download(rstd, R * 4, k->label);
    float *want_y = (float *)xcalloc((size_t)n, 4), *want_rstd = (float *)xcalloc((size_t)R, 4);
    rmsnorm_forward_reference(want_y, want_rstd, k->sum, wf, R, C, EPS, ROUND_NONE);
    format_checked(label, sizeof label, "%s: residual + delta", k->label);
    check_close(label, xf, k->sum, n, C, 0, 0);
    format_checked(label, sizeof label, "%s: rstd", k->label);
    // A few fp32 roundings: a thread adds up to 32 squares one by one, and then the block adds up the threads' sums.
    check_close(label, got_rstd, want_rstd, R, 1, 2e-6, 0);
    format_checked(label, sizeof label, "%s: y", k->label);
    check_close(label, yf, want_y, n, C, BF16_ROUNDING, 1e-40);
    check_same_on_device("norm without the residual add", y, y_alone, n * 2, C * 2);
    check_same_on_device("residual in place", x, residual, n * 2, C * 2);
    check_amax(k->label, t.amax, got_y, n);
    check_quantized(k->label, t, got_y, R, C);
    free(got_x), free(got_y), free(xf), free(yf), free(wf), free(got_rstd), free(want_y), free(want_rstd);
    bench_free(residual), bench_free(delta), bench_free(weight), bench_free(x), bench_free(y), bench_free(y_alone),
        bench_free(rstd), bench_free(rstd_alone);
    qtensor_free(t);
}

// Kernel and reference use the same rstd, computed on the CPU, so that only this kernel's error is checked.
static void check_backward(const Case *k, bool with_residual) {
    const int64_t R = k->R, C = k->C, n = R * C;
    char label[160];
    float *wf = bf16_to_floats(k->weight, C), *dyf = bf16_to_floats(k->dy, n), *drf = bf16_to_floats(k->delta, n),
          *rstd_host = (float *)xcalloc((size_t)R, 4);
    for (int64_t r = 0; r < R; r++) rstd_host[r] = rms_reciprocal(k->sum + r * C, C, EPS);
    bf16_bits *sum_bits = bf16_from_floats(k->sum, n), *dw_before = bench_normal(9, C, 3);
    bf16 *x = (bf16 *)bench_upload(sum_bits, n * 2), *dy = (bf16 *)bench_upload(k->dy, n * 2),
         *weight = (bf16 *)bench_upload(k->weight, C * 2);
    bf16 *dresidual = (bf16 *)bench_upload(k->delta, n * 2), *dx = (bf16 *)bench_alloc(n * 2),
         *dw = (bf16 *)bench_upload(dw_before, C * 2), *dw2 = (bf16 *)bench_upload(dw_before, C * 2);
    float *rstd = (float *)bench_upload(rstd_host, R * 4);
    const int64_t workspace_bytes = (int64_t)rmsnorm_workspace_bytes(R, C);
    void *workspace = bench_alloc(workspace_bytes);
    uint32_t *amax = (uint32_t *)bench_zeros(4);
    rmsnorm_backward(dx, dw, amax, dy, x, rstd, weight, with_residual ? dresidual : NULL, R, C, workspace, 0);

    bf16_bits *got = (bf16_bits *)bench_download(dx, n * 2, k->label),
              *got_dw = (bf16_bits *)bench_download(dw, C * 2, k->label);
    free(bench_download(workspace, workspace_bytes, k->label));
    float *gotf = bf16_to_floats(got, n), *got_dwf = bf16_to_floats(got_dw, C), *want = (float *)xcalloc((size_t)n, 4),
          *want_dw = bf16_to_floats(dw_before, C);
    rmsnorm_backward_reference(want, want_dw, with_residual ? drf : NULL, dyf, k->sum, rstd_host, wf, R, C, ROUND_NONE);
    // If the terms of dx (of order 1, times rstd) cancel, their fp32 errors remain. dw is an fp32 sum of R terms of
    // order 1.
    float largest_rstd = 1;
    for (int64_t r = 0; r < R; r++) largest_rstd = fmaxf(largest_rstd, rstd_host[r]);
    format_checked(label, sizeof label, "%s: dx%s", k->label, with_residual ? " with residual" : "");
    check_close(label, gotf, want, n, C, BF16_ROUNDING, 2e-6 * largest_rstd);
    format_checked(label, sizeof label, "%s: dweight", k->label);
    check_close(label, got_dwf, want_dw, C, C, BF16_ROUNDING, 1e-5 + 1e-7 * (double)R);
    check_amax(k->label, amax, got, n);
    if (with_residual) {
        rmsnorm_backward(dresidual, dw2, NULL, dy, x, rstd, weight, dresidual, R, C, workspace, 0);
        check_same_on_device("dx in place of dresidual", dx, dresidual, n * 2, C * 2);
        check_same_on_device("dweight of a second run", dw, dw2, C * 2, C * 2);
    }
    free(wf), free(dyf), free(drf), free(rstd_host), free(sum_bits), free(dw_before), free(got), free(got_dw),
        free(gotf), free(got_dwf), free(want), free(want_dw);
    bench_free(x), bench_free(dy), bench_free(weight), bench_free(dresidual), bench_free(dx), bench_free(dw),
        bench_free(dw2), bench_free(rstd), bench_free(workspace), bench_free(amax);
}

// One row of x holds `value` once; if `value` is 0, the whole row is zero. The norms numbered 9, 6 and 8 read that row.
// Norm 1 does no check, and norm 2 reads ordinary rows. So if the row is bad, `first` must become 6.
static void check_watch(int64_t R, int64_t C, float value, float eps, bool bad) {
    const int64_t n = R * C, row = 2 * R / 3;
    bf16_bits *x_host = bench_normal(1, n, 1), *weight_host = bench_normal(4, C, 0.5f);
    bf16 *ordinary = (bf16 *)bench_upload(x_host, n * 2), *weight = (bf16 *)bench_upload(weight_host, C * 2),
         *zero = (bf16 *)bench_zeros(n * 2), *y = (bf16 *)bench_alloc(n * 2);
    if (value == 0) memset(x_host + row * C, 0, (size_t)C * 2);
    else x_host[row * C + C - 1] = bf16_from_float(value);
    float *row_values = bf16_to_floats(x_host + row * C, C), *rstd = (float *)bench_alloc(R * 4);
    bf16 *x = (bf16 *)bench_upload(x_host, n * 2);
    const uint32_t none = UINT32_MAX;
    uint32_t *first = (uint32_t *)bench_upload(&none, 4);
    rmsnorm_forward(y, rstd, NULL, x, weight, R, C, eps, RmsnormWatch{first, 9}, 0);
    residual_rmsnorm_forward(y, NULL, rstd, NULL, x, zero, weight, R, C, eps, RmsnormWatch{first, 6}, 0);
    rmsnorm_forward(NULL, rstd, NULL, x, weight, R, C, eps, RmsnormWatch{first, 8}, 0);
    rmsnorm_forward(NULL, rstd, NULL, x, weight, R, C, eps, RmsnormWatch{NULL, 1}, 0);
    rmsnorm_forward(NULL, rstd, NULL, ordinary, weight, R, C, eps, RmsnormWatch{first, 2}, 0);
    uint32_t *got = (uint32_t *)bench_download(first, 4, "watch");
    CHECK(*got == (bad ? 6 : none),
          "%lld x %lld with a value of %g, eps %g: norm 6 is named if the row is bad, else none; got %u", (long long)R,
          (long long)C, value, eps, *got);
    // The CPU adds squares in double, so it accepts finite rows whose sum of squares overflows fp32. On the other rows
    // of this test GPU and CPU agree.
    if (!isfinite(value) || isfinite(value * value))
        CHECK(!float_is_positive(rms_reciprocal(row_values, C, eps)) == bad,
              "the CPU finds the same rows bad; this one has %g, eps %g", value, eps);
    free(x_host), free(weight_host), free(row_values), free(got);
    bench_free(ordinary), bench_free(weight), bench_free(zero), bench_free(y), bench_free(x), bench_free(rstd),
        bench_free(first);
}

static void check_watches(void) {
    const int64_t shapes[][2] = {{1, 16}, {300, 1024}, {5000, 2048}, {33, 5120}, {7, 16384}};
    const struct {
        float value, eps;
        bool bad;
    } rows[] = {{1, EPS, false},       {1e15f, EPS, false},    {0, EPS, false},    {0, 0, true},      {NAN, EPS, true},
                {INFINITY, EPS, true}, {-INFINITY, EPS, true}, {1e30f, EPS, true}, {3e38f, EPS, true}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++)
            check_watch(shapes[i][0], shapes[i][1], rows[k].value, rows[k].eps, rows[k].bad);
}

// Checks more than 2^31 elements: the fused cast against the plain cast of a stored y, and the last row of dx against
// the reference.
static void check_large(void) {
    const int64_t R = 524416, C = 4096, n = R * C;
    bf16 *x = bench_random(n, 1, 1), *y = (bf16 *)bench_alloc(n * 2), *weight = bench_random(C, 2, 1),
         *dweight = (bf16 *)bench_alloc(C * 2);
    float *rstd = (float *)bench_alloc(R * 4);
    QTensor fused = qtensor_create(R, C, FP8_E4M3), plain = qtensor_create(R, C, FP8_E4M3);
    rmsnorm_forward(y, rstd, fused.amax, x, weight, R, C, EPS, NO_WATCH, 0);
    quantize_source("norm", fused, RmsnormSource{x, weight, rstd, C}, R, C, 0);
    tensor_quantize(plain, y, R, C, 0);
    CHECK(read_amax(fused.amax) == read_amax(plain.amax), "the norm's amax is that of the y that it stored: %08x, %08x",
          read_amax(fused.amax), read_amax(plain.amax));
    check_same_on_device("2^31 elements, rowwise data", fused.rowwise, plain.rowwise, n, C);
    check_same_on_device("2^31 elements, columnwise data", fused.columnwise, plain.columnwise, n, R);
    void *workspace = bench_alloc((int64_t)rmsnorm_workspace_bytes(R, C));
    rmsnorm_backward(y, dweight, NULL, y, x, rstd, weight, NULL, R, C, workspace, 0);  // dy = y, in place
    CUDA_CHECK(cudaDeviceSynchronize());
    bf16_bits *x_bits = (bf16_bits *)xcalloc((size_t)C, 2), *w_bits = (bf16_bits *)xcalloc((size_t)C, 2),
              *dx_bits = (bf16_bits *)xcalloc((size_t)C, 2);
    CUDA_CHECK(cudaMemcpy(x_bits, x + n - C, (size_t)C * 2, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(w_bits, weight, (size_t)C * 2, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(dx_bits, y + n - C, (size_t)C * 2, cudaMemcpyDeviceToHost));
    float *xf = bf16_to_floats(x_bits, C), *wf = bf16_to_floats(w_bits, C), *got = bf16_to_floats(dx_bits, C);
    float *dyf = (float *)xcalloc((size_t)C, 4), *dwf = (float *)xcalloc((size_t)C, 4),
          *want = (float *)xcalloc((size_t)C, 4), r;
    rmsnorm_forward_reference(dyf, &r, xf, wf, 1, C, EPS, ROUND_BF16);
    rmsnorm_backward_reference(want, dwf, NULL, dyf, xf, &r, wf, 1, C, ROUND_NONE);
    // dy is y. Where y rounds differently on the CPU, it is off by 2^-8 of a value of order 1 to 10, and dx by that
    // times the weight.
    check_close("2^31 elements, last row of dx", got, want, C, C, BF16_ROUNDING, 0.2);
    // 4e-3 is about 2^-8.
    CHECK(check_relative_error(got, want, C) < 4e-3, "the last row of dx is right; relative error %g",
          check_relative_error(got, want, C));
    free(x_bits), free(w_bits), free(dx_bits), free(xf), free(wf), free(got), free(dyf), free(dwf), free(want);
    bench_free(x), bench_free(y), bench_free(weight), bench_free(dweight), bench_free(rstd), bench_free(workspace);
    qtensor_free(fused), qtensor_free(plain);
}

// Refusals run before the first CUDA call of this process: a check runs in a forked child, which cannot use its
// parent's CUDA context.
static void call_forward(void *context) {
    rmsnorm_forward(NULL, NULL, NULL, (const bf16 *)16, (const bf16 *)16, 1, *(const int64_t *)context, EPS, NO_WATCH,
                    0);
}

static void check_refusals(void) {
    char output[512];
    int64_t odd = 24, large = RMSNORM_MAX_C + 16;
    CHECK(check_dies(call_forward, &odd, "multiple of 16", output, sizeof output),
          "a width that is no multiple of 16 is refused: %s", output);
    CHECK(check_dies(call_forward, &large, "up to 16384", output, sizeof output), "a width above 16384 is refused: %s",
          output);
}

static void run_checks(void) {
    const int64_t shapes[][2] = {{1, 16},   {3, 48},   {5, 1024}, {7, 1040},  {33, 2048}, {130, 4096},
                                 {9, 5120}, {3, 8192}, {2, 8208}, {3, 16384}, {600, 272}, {2500, 64}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int fill = 0; fill < NUM_FILLS; fill++) {
            Case k = case_create(shapes[i][0], shapes[i][1], (Fill)fill);
            check_forward(&k);
            check_backward(&k, true);
            if (fill == FILL_NORMAL) check_backward(&k, false);
            case_free(&k);
        }
}

// ---------------------------------------------------------------------------------------------------------------------

static void bench_shape(Bench *b, int64_t R, int64_t C) {
    char shape[32];
    format_checked(shape, sizeof shape, "%lld x %lld", (long long)R, (long long)C);
    const double n = (double)R * (double)C;
    bf16 *x = bench_random(R * C, 1, 1), *delta = bench_random(R * C, 2, 1), *out = (bf16 *)bench_alloc(R * C * 2),
         *y = (bf16 *)bench_alloc(R * C * 2);
    bf16 *weight = bench_random(C, 3, 1), *dweight = (bf16 *)bench_zeros(C * 2);
    float *rstd = (float *)bench_alloc(R * 4);
    void *workspace = bench_alloc((int64_t)rmsnorm_workspace_bytes(R, C));
    QTensor t = qtensor_create(R, C, FP8_E4M3);
    const RmsnormWatch watch = {(uint32_t *)bench_zeros(4), 1};  // as in training
    const char *forward = "a row's sum is needed before its output, and a block loads its next row only after that";
    const char *backward =
        "dw stays in registers, so occupancy is 512 or 1024 threads per SM; a second launch adds up its parts";
    bench_report(b, "rmsnorm, amax", shape,
                 bench_time_us(b, [&] { rmsnorm_forward(NULL, rstd, t.amax, x, weight, R, C, EPS, watch, 0); }), 2 * n,
                 forward);
    bench_report(b, "rmsnorm, y stored", shape,
                 bench_time_us(b, [&] { rmsnorm_forward(y, rstd, NULL, x, weight, R, C, EPS, watch, 0); }), 4 * n,
                 forward);
    bench_report(
        b, "residual+rmsnorm, y stored", shape,
        bench_time_us(b, [&] { residual_rmsnorm_forward(out, y, rstd, NULL, x, delta, weight, R, C, EPS, watch, 0); }),
        8 * n, forward);
    bench_report(
        b, "residual+rmsnorm, amax", shape,
        bench_time_us(
            b, [&] { residual_rmsnorm_forward(out, NULL, rstd, t.amax, x, delta, weight, R, C, EPS, watch, 0); }),
        6 * n, forward);
    bench_report(b, "norm+quantize_transpose", shape,
                 bench_time_us(b, [&] { quantize_source("norm", t, RmsnormSource{out, weight, rstd, C}, R, C, 0); }),
                 4 * n);
    bench_report(b, "residual+rmsnorm, both FP8 passes", shape,
                 bench_time_us(b,
                               [&] {
                                   residual_rmsnorm_forward(out, NULL, rstd, t.amax, x, delta, weight, R, C, EPS, watch,
                                                            0);
                                   quantize_source("norm", t, RmsnormSource{out, weight, rstd, C}, R, C, 0);
                               }),
                 10 * n, "two launches, each with its ramp");
    bench_report(
        b, "rmsnorm backward, residual gradient, amax", shape,
        bench_time_us(b,
                      [&] { rmsnorm_backward(delta, dweight, t.amax, y, x, rstd, weight, delta, R, C, workspace, 0); }),
        8 * n, backward);
    bench_free(x), bench_free(delta), bench_free(out), bench_free(y), bench_free(weight), bench_free(dweight),
        bench_free(rstd), bench_free(workspace), bench_free(watch.first);
    qtensor_free(t);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        check_refusals();
        run_checks();
        check_watches();
    }
    if (bench_part_wanted(argc, argv, "large")) check_large();
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_shape(&b, 8192, 4096);
        bench_shape(&b, 2048, 4096);
        bench_shape(&b, 16384, 1024);
        bench_shape(&b, 8192, 5120);
        bench_shape(&b, 4096, 8192);
        bench_destroy(&b);
    }
    return check_report();
}
