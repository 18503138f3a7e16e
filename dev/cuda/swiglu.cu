// Checks and times llmc/kernels/swiglu.cuh.
// Build and run: make build/bench_swiglu && build/bench_swiglu
#include "../../llmc/reference/swiglu.h"
#include "../../llmc/kernels/swiglu.cuh"
#include "check_quantized.cuh"

// One rounding to bf16 is off by at most 2^-8 of the value; the 1% allows for the fast exponential (error below 1e-5).
static const double BF16_ROUNDING = 0.00390625 * 1.01;

typedef enum { FILL_NORMAL, FILL_WIDE, FILL_ZERO, FILL_SPECIAL, NUM_FILLS } Fill;
static const char *const fill_names[NUM_FILLS] = {"normal", "wide gates", "zero", "special values"};

// Puts gates and ups that overflow, underflow or are not numbers into the first elements of the last row.
static void put_special_values(bf16_bits *gate_up, int64_t R, int64_t F) {
    const float gates[16] = {INFINITY, -INFINITY, NAN, 100,   -100,  88,     -88, -87,
                             1e-39f,   -1e-39f,   0,   -0.0f, 3e38f, -3e38f, 1,   1};
    const float ups[16] = {1, 1, 1, -2, 2, 2, 2, 2, 1, 1, 1, 1, 0.5f, 1, INFINITY, NAN};
    bf16_bits *gate = gate_up + (R - 1) * 2 * F, *up = gate + F;
    for (int i = 0; i < 16; i++) gate[i] = bf16_from_float(gates[i]), up[i] = bf16_from_float(ups[i]);
}

static bf16_bits *make_gate_up(Fill fill, int64_t R, int64_t F) {
    bf16_bits *x = bench_normal(1, R * 2 * F, fill == FILL_ZERO ? 0 : fill == FILL_WIDE ? 20 : 1);
    if (fill == FILL_SPECIAL) put_special_values(x, R, F);
    return x;
}

// Checks the amaxes and FP8 casts of h and d_gate_up against h and d_gate_up in bf16. If swiglu_backward_amax() gets a
// tensor for h, it must write the bytes of the forward pass's columnwise data to it.
static void check_fp8_passes(const char *label, const bf16 *gate_up, const bf16 *dh, const bf16_bits *h,
                             const bf16_bits *d_gate_up, int64_t R, int64_t F) {
    char name[160];
    QTensor th = qtensor_create(R, F, FP8_E4M3), again = qtensor_create(R, F, FP8_E4M3),
            td = qtensor_create(R, 2 * F, FP8_E5M2);
    swiglu_amax(th.amax, gate_up, R, F, 0);
    format_checked(name, sizeof name, "%s: h", label);
    check_amax(name, th.amax, h, R * F);
    quantize_source("swiglu", th, SwigluSource{gate_up, F}, R, F, 0);
    check_quantized(name, th, h, R, F);
    QTensor col_only = again, none = {};
    col_only.rowwise = NULL;
    CUDA_CHECK(cudaMemcpy(col_only.amax, th.amax, 4, cudaMemcpyDeviceToDevice));
    swiglu_backward_amax(td.amax, col_only, dh, gate_up, R, F, 0);
    format_checked(name, sizeof name, "%s: h written by the backward pass", label);
    check_quantized(name, col_only, h, R, F);
    format_checked(name, sizeof name, "%s: d_gate_up", label);
    check_amax(name, td.amax, d_gate_up, R * 2 * F);
    CUDA_CHECK(cudaMemset(td.amax, 0, 4));
    swiglu_backward_amax(td.amax, none, dh, gate_up, R, F, 0);
    check_amax(name, td.amax, d_gate_up, R * 2 * F);
    quantize_source("swiglu", td, SwigluGradientSource{dh, gate_up, F}, R, F, 0);
    check_quantized(name, td, d_gate_up, R, 2 * F);
    qtensor_free(th), qtensor_free(again), qtensor_free(td);
}

static void check_case(int64_t R, int64_t F, Fill fill) {
    char base[96], label[160];
    format_checked(base, sizeof base, "%lld x 2 x %lld %s", (long long)R, (long long)F, fill_names[fill]);
    const int64_t n = R * F;
    bf16_bits *gate_up_host = make_gate_up(fill, R, F), *dh_host = bench_normal(2, n, 0.5f);
    bf16 *gate_up = (bf16 *)bench_upload(gate_up_host, 4 * n), *dh = (bf16 *)bench_upload(dh_host, 2 * n);
    bf16 *h = (bf16 *)bench_alloc(2 * n), *h_again = (bf16 *)bench_alloc(2 * n), *d = (bf16 *)bench_alloc(4 * n);
    swiglu_forward(h, gate_up, R, F, 0);
    swiglu_backward(d, h_again, dh, gate_up, R, F, 0);
    bf16_bits *got_h = (bf16_bits *)bench_download(h, 2 * n, base),
              *got_d = (bf16_bits *)bench_download(d, 4 * n, base);
    check_fp8_passes(base, gate_up, dh, got_h, got_d, R, F);
    check_same_on_device("h of the backward pass", h, h_again, 2 * n, 2 * F);
    swiglu_backward(gate_up, NULL, dh, gate_up, R, F, 0);
    check_same_on_device("d_gate_up in place", d, gate_up, 4 * n, 4 * F);

    float *xf = bf16_to_floats(gate_up_host, 2 * n), *dhf = bf16_to_floats(dh_host, n), *hf = bf16_to_floats(got_h, n),
          *df = bf16_to_floats(got_d, 2 * n);
    float *want_h = (float *)xcalloc((size_t)n, 4), *want_d = (float *)xcalloc((size_t)(2 * n), 4);
    swiglu_forward_reference(want_h, xf, R, F, ROUND_NONE);
    swiglu_backward_reference(want_d, dhf, xf, R, F, ROUND_NONE);
    format_checked(label, sizeof label, "%s: h", base);
    check_close(label, hf, want_h, n, F, BF16_ROUNDING, 1e-35);  // the kernel takes a sigmoid below 2^-126 as 0
    format_checked(label, sizeof label, "%s: d_gate_up", base);
    // silu's slope s (1 + g (1 - s)) is 0 at g = -1.278. The terms in it are of order 1 there, and so their fp32 error
    // remains, times dh * up.
    check_close(label, df, want_d, 2 * n, 2 * F, BF16_ROUNDING, fill == FILL_WIDE ? 2e-5 : 1e-6);
    free(gate_up_host), free(dh_host), free(got_h), free(got_d), free(xf), free(dhf), free(hf), free(df), free(want_h),
        free(want_d);
    bench_free(gate_up), bench_free(dh), bench_free(h), bench_free(h_again), bench_free(d);
}

// Checks the fused casts and amaxes of d_gate_up, with more than 2^31 elements, and of h, with half as many, against
// those of stored tensors.
static void check_large(void) {
    const int64_t R = 75008, F = 14336, n = R * F;
    bf16 *gate_up = bench_random(2 * n, 1, 1), *dh = bench_random(n, 2, 1), *d = (bf16 *)bench_alloc(4 * n),
         *h = (bf16 *)bench_alloc(2 * n);
    QTensor fused = qtensor_create(R, 2 * F, FP8_E5M2), plain = qtensor_create(R, 2 * F, FP8_E5M2);
    QTensor h_fused = qtensor_create(R, F, FP8_E4M3), h_plain = qtensor_create(R, F, FP8_E4M3), col_only = h_fused;
    col_only.rowwise = NULL;
    swiglu_backward(d, h, dh, gate_up, R, F, 0);
    tensor_quantize(plain, d, R, 2 * F, 0);
    tensor_quantize(h_plain, h, R, F, 0);
    swiglu_amax(h_fused.amax, gate_up, R, F, 0);
    swiglu_backward_amax(fused.amax, col_only, dh, gate_up, R, F, 0);
    quantize_source("swiglu", fused, SwigluGradientSource{dh, gate_up, F}, R, F, 0);
    CHECK(read_amax(fused.amax) == read_amax(plain.amax),
          "the amax of d_gate_up is that of the stored tensor: %08x fused, %08x stored", read_amax(fused.amax),
          read_amax(plain.amax));
    CHECK(read_amax(h_fused.amax) == read_amax(h_plain.amax),
          "the amax of h is that of the stored tensor: %08x fused, %08x stored", read_amax(h_fused.amax),
          read_amax(h_plain.amax));
    check_same_on_device("2^31 elements, rowwise data", fused.rowwise, plain.rowwise, 2 * n, 2 * F);
    check_same_on_device("2^31 elements, columnwise data", fused.columnwise, plain.columnwise, 2 * n, R);
    check_same_on_device("2^30 elements, h columnwise", h_fused.columnwise, h_plain.columnwise, n, R);
    bench_free(gate_up), bench_free(dh), bench_free(d), bench_free(h);
    qtensor_free(fused), qtensor_free(plain), qtensor_free(h_fused), qtensor_free(h_plain);
}

// Refusals run before the first CUDA call of this process: a check runs in a forked child, which cannot use its
// parent's CUDA context.
static void call_forward(void *context) {
    swiglu_forward((bf16 *)16, (const bf16 *)16, 1, *(const int64_t *)context, 0);
}

static void check_refusals(void) {
    char output[512];
    int64_t odd = 24;
    CHECK(check_dies(call_forward, &odd, "multiple of 16", output, sizeof output),
          "a width that is no multiple of 16 is refused: %s", output);
}

static void run_checks(void) {
    const int64_t shapes[][2] = {{1, 16}, {3, 48}, {33, 256}, {31, 272}, {129, 528}, {300, 1040}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int fill = 0; fill < NUM_FILLS; fill++) check_case(shapes[i][0], shapes[i][1], (Fill)fill);
}

// ---------------------------------------------------------------------------------------------------------------------

static void bench_shape(Bench *b, int64_t R, int64_t F) {
    char shape[32];
    format_checked(shape, sizeof shape, "%lld x 2x%lld", (long long)R, (long long)F);
    const double n = (double)R * (double)F;
    bf16 *gate_up = bench_random(2 * R * F, 1, 1), *dh = bench_random(R * F, 2, 1), *h = (bf16 *)bench_alloc(2 * R * F),
         *d = (bf16 *)bench_alloc(4 * R * F);
    QTensor t = qtensor_create(R, F, FP8_E4M3), row = t, col = t, td = qtensor_create(R, 2 * F, FP8_E5M2), none = {};
    row.columnwise = NULL, col.rowwise = NULL;
    bench_report(b, "swiglu forward bf16", shape, bench_time_us(b, [&] { swiglu_forward(h, gate_up, R, F, 0); }),
                 6 * n);
    bench_report(b, "swiglu_amax", shape, bench_time_us(b, [&] { swiglu_amax(t.amax, gate_up, R, F, 0); }), 4 * n,
                 AMAX_REASON);
    bench_report(b, "swiglu cast, rowwise only", shape,
                 bench_time_us(b, [&] { quantize_source("swiglu", row, SwigluSource{gate_up, F}, R, F, 0); }), 5 * n);
    bench_report(b, "swiglu cast, rowwise and columnwise", shape,
                 bench_time_us(b, [&] { quantize_source("swiglu", t, SwigluSource{gate_up, F}, R, F, 0); }), 6 * n);
    bench_report(b, "swiglu forward FP8 passes (rowwise)", shape,
                 bench_time_us(b,
                               [&] {
                                   swiglu_amax(t.amax, gate_up, R, F, 0);
                                   quantize_source("swiglu", row, SwigluSource{gate_up, F}, R, F, 0);
                               }),
                 9 * n);
    bench_report(b, "swiglu backward bf16", shape,
                 bench_time_us(b, [&] { swiglu_backward(d, NULL, dh, gate_up, R, F, 0); }), 10 * n);
    bench_report(b, "swiglu backward bf16 and h", shape,
                 bench_time_us(b, [&] { swiglu_backward(d, h, dh, gate_up, R, F, 0); }), 12 * n);
    bench_report(b, "swiglu backward amax", shape,
                 bench_time_us(b, [&] { swiglu_backward_amax(td.amax, none, dh, gate_up, R, F, 0); }), 6 * n);
    bench_report(b, "swiglu backward amax and h columnwise", shape,
                 bench_time_us(b, [&] { swiglu_backward_amax(td.amax, col, dh, gate_up, R, F, 0); }), 7 * n);
    bench_report(
        b, "swiglu backward cast", shape,
        bench_time_us(b, [&] { quantize_source("swiglu", td, SwigluGradientSource{dh, gate_up, F}, R, F, 0); }),
        10 * n);
    bench_report(b, "swiglu backward FP8 passes", shape,
                 bench_time_us(b,
                               [&] {
                                   swiglu_backward_amax(td.amax, col, dh, gate_up, R, F, 0);
                                   quantize_source("swiglu", td, SwigluGradientSource{dh, gate_up, F}, R, F, 0);
                               }),
                 17 * n);
    bench_free(gate_up), bench_free(dh), bench_free(h), bench_free(d);
    qtensor_free(t), qtensor_free(td);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        check_refusals();
        run_checks();
    }
    if (bench_part_wanted(argc, argv, "large")) check_large();
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_shape(&b, 8192, 14336);
        bench_shape(&b, 2048, 14336);
        bench_shape(&b, 8192, 3072);
        bench_destroy(&b);
    }
    return check_report();
}
