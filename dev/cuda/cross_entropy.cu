// Checks llmc/kernels/cross_entropy.cuh against llmc/reference/cross_entropy.h, and times it.
// Build and run: make build/bench_cross_entropy && build/bench_cross_entropy
#include "../../llmc/kernels/cross_entropy.cuh"
#include "../../llmc/config/precision.h"
#include "../../llmc/reference/cross_entropy.h"
#include "check_quantized.cuh"

enum { CASE_PLAIN, CASE_LARGE, CASE_SPECIAL };

// Makes the logits of a case: standard normal, or from -90 to 90 (CASE_LARGE). CASE_SPECIAL puts a NaN into row 0, +inf
// into row 1, -inf into the first eighth of row 2, and -inf everywhere in row 3, as far as there are these rows.
static bf16_bits *make_logits(uint64_t seed, int64_t R, int64_t V, int kind) {
    bf16_bits *x = bench_normal(seed, R * V, 1.0f);
    const uint64_t key = rng_key(seed, 1);
    for (int64_t i = 0; kind == CASE_LARGE && i < R * V; i++)
        x[i] = bf16_from_float((rng_uniform(key, (uint64_t)i) - 0.5f) * 180);
    if (kind != CASE_SPECIAL) return x;
    x[V / 2] = bf16_from_float(NAN);
    if (R > 1) x[V + V / 3] = bf16_from_float(INFINITY);
    for (int64_t v = 0; R > 2 && v < ceil_div(V, 8); v++) x[2 * V + v] = bf16_from_float(-INFINITY);
    for (int64_t v = 0; R > 3 && v < V; v++) x[3 * V + v] = bf16_from_float(-INFINITY);
    return x;
}

static int32_t *make_targets(uint64_t seed, int64_t R, int64_t V) {
    int32_t *targets = (int32_t *)xcalloc((size_t)R, sizeof *targets);
    for (int64_t i = 0; i < R; i++) targets[i] = (int32_t)(rng_u64(rng_key(seed, 2), (uint64_t)i) % (uint64_t)V);
    targets[0] = (int32_t)V - 1;  // the last logit of the row
    if (R > 2) targets[R - 1] = -100;
    return targets;
}

// Tolerance of the loss, which follows from fp32 sums of exponentials. Their arguments are up to about 2^8 after
// scaling by log2(e), so rounding changes them by about 2^-17.
#define LOSS_TOLERANCE 2e-5
// Tolerance of the gradient against the exact value: one bf16 rounding (2^-8 of the value) and the error of the sum.
// The floor is for the target's gradient, softmax - 1, if the softmax is near 1.
#define GRADIENT_TOLERANCE (1.01 / 256)
#define GRADIENT_FLOOR 2e-5

static void check_case(uint64_t seed, int64_t R, int64_t V, int kind) {
    const float scale = 1.0f / 3;
    char label[96];
    format_checked(label, sizeof label, "R=%lld V=%lld kind %d", (long long)R, (long long)V, kind);
    bf16_bits *x = make_logits(seed, R, V, kind);
    int32_t *targets = make_targets(seed, R, V);
    float *values = bf16_to_floats(x, R * V), *want = (float *)xcalloc((size_t)(R * V), sizeof(float)),
          *want_losses = (float *)xcalloc((size_t)R, sizeof(float));
    cross_entropy_forward(want_losses, values, targets, R, V);
    cross_entropy_backward(want, values, targets, R, V, scale, 0, ROUND_NONE);

    bf16 *logits = (bf16 *)bench_upload(x, R * V * 2), *again = (bf16 *)bench_upload(x, R * V * 2);
    int32_t *device_targets = (int32_t *)bench_upload(targets, R * 4);
    float *losses = (float *)bench_alloc(R * 4), *losses_again = (float *)bench_alloc(R * 4);
    cross_entropy_loss(losses, logits, device_targets, R, V, V, 0);
    float *got_losses = (float *)bench_download(losses, R * 4, label);
    bf16_bits *kept = (bf16_bits *)bench_download(logits, R * V * 2, label);
    check_close(label, got_losses, want_losses, R, 1, LOSS_TOLERANCE, LOSS_TOLERANCE);
    check_bytes(label, kept, x, R * V * 2, V * 2);

    cross_entropy_loss_and_gradient(losses_again, logits, device_targets, R, V, V, scale, 0, ProducedCodes{}, 0);
    check_same_on_device(label, losses, losses_again, R * 4, 4);
    cross_entropy_loss_and_gradient(losses, again, device_targets, R, V, V, scale, 0, ProducedCodes{}, 0);
    check_same_on_device(label, losses, losses_again, R * 4, 4);
    check_same_on_device(label, logits, again, R * V * 2, V * 2);
    bf16_bits *got_bits = (bf16_bits *)bench_download(logits, R * V * 2, label);
    float *got = bf16_to_floats(got_bits, R * V);
    check_close(label, got, want, R * V, V, GRADIENT_TOLERANCE, GRADIENT_FLOOR * scale);
    void *device[] = {logits, again, device_targets, losses, losses_again};
    void *host[] = {x, targets, values, want, want_losses, got_losses, kept, got_bits, got};
    for (void *p : device) bench_free(p);
    for (void *p : host) free(p);
}

// Gradients for FP8 are those in bf16, each rounded up or down in the mantissas' upper bits, without bias, and do not
// depend on which rows are computed together.
static void check_stochastic(uint64_t seed, int64_t R, int64_t V, uint32_t dropped) {
    char label[96];
    format_checked(label, sizeof label, "R=%lld V=%lld, stochastic %x", (long long)R, (long long)V, dropped);
    bf16_bits *x = make_logits(seed, R, V, CASE_SPECIAL);
    int32_t *targets = make_targets(seed, R, V);
    bf16 *plain = (bf16 *)bench_upload(x, R * V * 2), *rounded = (bf16 *)bench_upload(x, R * V * 2),
         *chunk = (bf16 *)bench_upload(x, R * V * 2);
    int32_t *device_targets = (int32_t *)bench_upload(targets, R * 4);
    float *losses = (float *)bench_alloc(R * 4);
    const int64_t last = R / 2;
    cross_entropy_loss_and_gradient(losses, plain, device_targets, R, V, V, 1.0f / 3, 0, ProducedCodes{}, 0);
    cross_entropy_loss_and_gradient(losses, rounded, device_targets, R, V, V, 1.0f / 3, dropped, ProducedCodes{}, 0);
    cross_entropy_loss_and_gradient(losses + last, chunk + last * V, device_targets + last, R - last, V, V, 1.0f / 3,
                                    dropped, ProducedCodes{}, 0);
    check_same_on_device(label, rounded + last * V, chunk + last * V, (R - last) * V * 2, V * 2);
    bf16_bits *want = (bf16_bits *)bench_download(plain, R * V * 2, label),
              *got = (bf16_bits *)bench_download(rounded, R * V * 2, label);
    double sum = 0, n = 0;
    int64_t wrong = 0;
    for (int64_t i = 0; i < R * V; i++) {
        const double value = (double)bf16_to_float(want[i]),
                     step = ((int)got[i] - (int)want[i]) / (double)((dropped & 0xffff) + 1);
        if (value != value || value == 0) wrong += got[i] != want[i];
        else wrong += (got[i] & dropped & 0xffff) || fabs(step) >= 1, sum += value > 0 ? step : 0, n += value > 0;
    }
    CHECK(wrong == 0, "%s: %lld of them are no neighbours", label, (long long)wrong);
    CHECK(fabs(sum) < 5 * 0.5 * sqrt(n), "%s: bias of %g intervals", label, sum / n);
    bench_free(plain), bench_free(rounded), bench_free(chunk), bench_free(device_targets), bench_free(losses);
    free(x), free(targets), free(want), free(got);
}

// Returns the codes that a kernel writes to t, the gradients' tensor of a mean over 1 / grad_scale rows, and sets its
// amax.
static ProducedCodes dlogits_codes(QTensor t, float grad_scale) {
    const float amax = precision_dlogits_amax(grad_scale);
    CUDA_CHECK(cudaMemcpy(t.amax, &amax, sizeof amax, cudaMemcpyHostToDevice));
    return ProducedCodes{t.rowwise, fp8_rule_scale(t.rule, amax, t.format)};
}

// The codes, and their transpose, are the bytes of a cast of the gradients in bf16; losses are equal too, and rows that
// are computed alone have the same codes. Logits stay. Needs R * VP to be a multiple of 16; the transpose is checked if
// VP is one.
static void check_codes(uint64_t seed, int64_t R, int64_t V, int64_t VP, int kind) {
    char label[96];
    const uint32_t dropped = 0x001f001f;
    const int64_t n = R * VP, last = R / 2, columns = VP % 16 ? 16 : VP;
    format_checked(label, sizeof label, "R=%lld V=%lld of %lld kind %d, codes", (long long)R, (long long)V,
                   (long long)VP, kind);
    bf16_bits *x = make_logits(seed, R, VP, kind);
    int32_t *targets = make_targets(seed, R, V);
    for (int64_t i = 0; i < n; i++)
        if (i % VP >= V) x[i] = bf16_from_float(NAN);
    if (R > 4 && kind == CASE_SPECIAL) x[(R - 1) * VP] = bf16_from_float(NAN);  // in a row that is ignored
    bf16 *logits = (bf16 *)bench_upload(x, n * 2), *gradients = (bf16 *)bench_upload(x, n * 2);
    int32_t *device_targets = (int32_t *)bench_upload(targets, R * 4);
    float *losses = (float *)bench_alloc(R * 4), *want_losses = (float *)bench_alloc(R * 4);
    QTensor got = qtensor_create(R, VP, FP8_E5M2), want = qtensor_create(R, VP, FP8_E5M2);
    const float scale_of = kind == CASE_LARGE ? 1.0f / 192 : 1.0f / 3;  // the smaller one saturates
    ProducedCodes codes = dlogits_codes(got, scale_of);
    dlogits_codes(want, scale_of);
    cross_entropy_loss_and_gradient(want_losses, gradients, device_targets, R, V, VP, 1.0f / 3, dropped,
                                    ProducedCodes{}, 0);
    if (columns == VP) quantize_transpose(want, gradients, R, VP, 0);
    QTensor rowwise = want;
    rowwise.columnwise = NULL;
    if (columns != VP) quantize_transpose(rowwise, gradients, n / columns, columns, 0);
    cross_entropy_loss_and_gradient(losses, logits, device_targets, R, V, VP, 1.0f / 3, dropped, codes, 0);
    check_same_on_device(label, losses, want_losses, R * 4, 4);
    check_same_on_device(label, got.rowwise, want.rowwise, n, VP);
    if (columns == VP) {
        fp8_transpose(got.columnwise, got.rowwise, R, VP, 0);
        check_same_on_device(label, got.columnwise, want.columnwise, n, R);
    }
    codes.rowwise += last * VP;
    CUDA_CHECK(cudaMemset(codes.rowwise, BENCH_POISON, (size_t)((R - last) * VP)));
    cross_entropy_loss_and_gradient(losses + last, logits + last * VP, device_targets + last, R - last, V, VP, 1.0f / 3,
                                    dropped, codes, 0);
    check_same_on_device(label, got.rowwise, want.rowwise, n, VP);
    bf16_bits *kept = (bf16_bits *)bench_download(logits, n * 2, label);
    for (int64_t i = 0; i < n; i++)
        if (i % VP >= V) kept[i] = x[i];
    check_bytes(label, kept, x, n * 2, VP * 2);
    free(bench_download(got.rowwise, n, label)), free(kept), free(x), free(targets);
    qtensor_free(got), qtensor_free(want);
    for (void *p : {(void *)logits, (void *)gradients, (void *)device_targets, (void *)losses, (void *)want_losses})
        bench_free(p);
}

// Logits with padding, whatever it holds, have the losses and gradients of the row without it, within the roundings of
// another order of the sum; the padding's gradient is 0.
static void check_padding(uint64_t seed, int64_t R, int64_t V, int64_t VP) {
    char label[96];
    format_checked(label, sizeof label, "R=%lld V=%lld padded to %lld", (long long)R, (long long)V, (long long)VP);
    bf16_bits *x = make_logits(seed, R, VP, CASE_SPECIAL), *plain = (bf16_bits *)xcalloc((size_t)(R * V), sizeof *x);
    int32_t *targets = make_targets(seed, R, V);
    for (int64_t r = 0; r < R; r++) {
        memcpy(plain + r * V, x + r * VP, (size_t)V * sizeof *x);
        for (int64_t v = V; v < VP; v++) x[r * VP + v] = bf16_from_float(v % 2 ? NAN : 50.0f);
    }
    float *values = bf16_to_floats(plain, R * V), *want = (float *)xcalloc((size_t)(R * VP), sizeof(float)),
          *gradient = (float *)xcalloc((size_t)(R * V), sizeof(float)),
          *want_losses = (float *)xcalloc((size_t)R, sizeof(float));
    cross_entropy_forward(want_losses, values, targets, R, V);
    cross_entropy_backward(gradient, values, targets, R, V, 1.0f / 3, 0, ROUND_NONE);
    for (int64_t r = 0; r < R; r++) memcpy(want + r * VP, gradient + r * V, (size_t)V * sizeof(float));
    bf16 *logits = (bf16 *)bench_upload(x, R * VP * 2);
    int32_t *device_targets = (int32_t *)bench_upload(targets, R * 4);
    float *losses = (float *)bench_alloc(R * 4);
    cross_entropy_loss(losses, logits, device_targets, R, V, VP, 0);
    float *got_losses = (float *)bench_download(losses, R * 4, label);
    check_close(label, got_losses, want_losses, R, 1, LOSS_TOLERANCE, LOSS_TOLERANCE);
    cross_entropy_loss_and_gradient(losses, logits, device_targets, R, V, VP, 1.0f / 3, 0, ProducedCodes{}, 0);
    bf16_bits *got_bits = (bf16_bits *)bench_download(logits, R * VP * 2, label);
    float *got = bf16_to_floats(got_bits, R * VP);
    check_close(label, got, want, R * VP, VP, GRADIENT_TOLERANCE, GRADIENT_FLOOR / 3);
    bench_free(logits), bench_free(device_targets), bench_free(losses);
    void *host[] = {x, plain, targets, values, want, gradient, want_losses, got_losses, got_bits, got};
    for (void *p : host) free(p);
}

// Checks the gradients of the last rows of more than 2^31 logits.
static void check_large(void) {
    const int64_t V = 128256, R = (1ll << 31) / V + 64, rows = 4, from = (R - rows) * V;
    bf16 *logits = bench_random(R * V, 99, 3.0f);
    int32_t *targets = make_targets(98, R, V), *device_targets = (int32_t *)bench_upload(targets, R * 4);
    float *losses = (float *)bench_alloc(R * 4);
    bf16_bits *x = (bf16_bits *)xcalloc((size_t)(rows * V), 2);
    CUDA_CHECK(cudaMemcpy(x, logits + from, (size_t)(rows * V * 2), cudaMemcpyDeviceToHost));
    float *values = bf16_to_floats(x, rows * V), *want = (float *)xcalloc((size_t)(rows * V), sizeof(float));
    cross_entropy_backward(want, values, targets + R - rows, rows, V, 1.0f, 0, ROUND_NONE);
    cross_entropy_loss_and_gradient(losses, logits, device_targets, R, V, V, 1.0f, 0, ProducedCodes{}, 0);
    bf16_bits *got_bits = (bf16_bits *)bench_download(logits + from, rows * V * 2, "2^31 logits");
    float *got = bf16_to_floats(got_bits, rows * V);
    check_close("2^31 logits", got, want, rows * V, V, GRADIENT_TOLERANCE, GRADIENT_FLOOR);
    bench_free(logits), bench_free(device_targets), bench_free(losses);
    free(targets), free(x), free(values), free(want), free(got_bits), free(got);
}

static void check_sums(int64_t n) {
    float *x = (float *)xcalloc((size_t)n, sizeof(float));
    for (int64_t i = 0; i < n; i++) x[i] = rng_normal(rng_key(5, 0), (uint64_t)i) + 11;
    double two[2] = {0, 0.5};
    float *losses = (float *)bench_upload(x, n * 4), *out = (float *)bench_alloc(4);
    double *sums = (double *)bench_upload(two, sizeof two);
    loss_sum(sums, losses, n, 0);
    loss_mean(out, sums, 2, 4, 0);
    float *got = (float *)bench_download(out, 4, "loss_mean"), want = (float)((array_sum(x, n) + 0.5) / 4);
    // Both sum in double, then round once.
    check_close("loss_sum, loss_mean", got, &want, 1, 1, 1.2e-7, 0);
    bench_free(losses), bench_free(out), bench_free(sums);
    free(x), free(got);
}

static void bench_case(Bench *b, int64_t R, int64_t V, const char *shape) {
    const char *held = "a row's maximum and sum are needed before its output, with one or two rows per SM; the "
                       "last wave of rows may not be full";
    const char *reason = cross_entropy_row_fits(V)
                             ? held
                             : "a row that does not fit on an SM is read three times (for the loss alone, twice), "
                               "2 bytes per thread at a time";
    bf16 *logits = bench_random(R * V, 1, 2.0f);
    int32_t *targets = make_targets(2, R, V), *device_targets = (int32_t *)bench_upload(targets, R * 4);
    float *losses = (float *)bench_alloc(R * 4);
    double us = bench_time_us(b, [&] {
        cross_entropy_loss_and_gradient(losses, logits, device_targets, R, V, V, 1e-4f, 0, ProducedCodes{}, 0);
    });
    bench_report(b, "cross entropy, loss and gradient", shape, us, 4.0 * (double)(R * V), reason);
    us = bench_time_us(b, [&] {
        cross_entropy_loss_and_gradient(losses, logits, device_targets, R, V, V, 1e-4f, 0x001f001f, ProducedCodes{}, 0);
    });
    bench_report(b, "cross entropy, gradient for FP8", shape, us, 4.0 * (double)(R * V), reason);
    us = bench_time_us(b, [&] { cross_entropy_loss(losses, logits, device_targets, R, V, V, 0); });
    bench_report(b, "cross entropy, loss", shape, us, 2.0 * (double)(R * V), reason);
    QTensor t = qtensor_create(R, V, FP8_E5M2);
    const ProducedCodes codes = dlogits_codes(t, 1e-4f);
    auto write = [&](ProducedCodes to) {
        cross_entropy_loss_and_gradient(losses, logits, device_targets, R, V, V, 1e-4f, 0x001f001f, to, 0);
    };
    us = bench_time_us(b, [&] { write(codes); });
    bench_report(b, "cross entropy, codes", shape, us, 3.0 * (double)(R * V), reason);
    us = bench_time_us(b, [&] { write(codes), fp8_transpose(t.columnwise, t.rowwise, R, V, 0); });
    bench_report(b, "cross entropy, codes, transpose", shape, us, 5.0 * (double)(R * V), reason);
    us = bench_time_us(b, [&] { write(ProducedCodes{}), quantize_transpose(t, logits, R, V, 0); });
    bench_report(b, "cross entropy, gradient, cast", shape, us, 8.0 * (double)(R * V), reason);
    qtensor_free(t);
    bench_free(logits), bench_free(device_targets), bench_free(losses);
    free(targets);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        // V around the limits of the kernel's variants; some R are above the number of thread blocks
        const int64_t sizes[][2] = {{1, 8},        {5, 128},     {700, 320},  {4, 1000},  {5, 1001},    {600, 4104},
                                    {4, 32768},    {300, 32776}, {4, 50257},  {4, 98304}, {140, 98312}, {4, 128256},
                                    {140, 151936}, {4, 152064},  {2, 163840}, {2, 163848}};
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            for (int kind = CASE_PLAIN; kind <= CASE_SPECIAL; kind++)
                check_case(10 * i + (uint64_t)kind, sizes[i][0], sizes[i][1], kind);
        for (uint32_t dropped : {0x001f001fu, 0x000f000fu}) {
            check_stochastic(50, 5, 1000, dropped), check_stochastic(51, 300, 32776, dropped);
            check_stochastic(52, 5, 1001, dropped), check_stochastic(53, 140, 151936, dropped);
        }
        check_padding(1, 5, 1, 8), check_padding(2, 700, 321, 328), check_padding(3, 5, 50257, 50264);
        check_padding(4, 140, 151943, 151944), check_padding(5, 2, 163841, 163848);
        const int64_t padded[][3] = {
            {16, 1000, 1000},  {16, 1001, 1001},    {700, 321, 336},       {5, 1, 16},          {300, 32776, 32776},
            {6, 50257, 50272}, {140, 98311, 98320}, {140, 128256, 128256}, {3, 151936, 151936}, {4, 163841, 163856}};
        for (size_t i = 0; i < sizeof padded / sizeof padded[0]; i++)
            for (int kind = CASE_PLAIN; kind <= CASE_SPECIAL; kind++)
                check_codes(100 + i, padded[i][0], padded[i][1], padded[i][2], kind);
        const int64_t counts[] = {1, 1000, 8192, 100003};
        for (int64_t n : counts) check_sums(n);
    }
    if (bench_part_wanted(argc, argv, "large")) check_large();
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_case(&b, 2048, 128256, "2048 x 128256");
        bench_case(&b, 2048, 151936, "2048 x 151936");
        bench_case(&b, 8192, 32000, "8192 x 32000");
        bench_case(&b, 2048, 200064, "2048 x 200064");
        bench_destroy(&b);
    }
    return check_report();
}
