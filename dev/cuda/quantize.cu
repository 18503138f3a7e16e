// Checks and times llmc/fp8/quantize.cuh with one scale for a whole tensor, which follows from its amax: amaxes,
// casts, casts of sharded weights, and the transpose of FP8 data. quantize_fine.cu has the casts of all recipes. Build
// and run: make build/bench_quantize && build/bench_quantize
#include "check_quantized.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Inputs

typedef enum {
    FILL_NORMAL,
    FILL_ZERO,
    FILL_NAN,
    FILL_NEGATIVE_NAN,
    FILL_INFINITY,
    FILL_DENORMAL,
    FILL_BELOW_FLOOR,
    FILL_HUGE,
    NUM_FILLS
} Fill;
static const char *const fill_names[NUM_FILLS] = {"normal",   "zero",     "NaN",         "negative NaN",
                                                  "infinity", "denormal", "below 1e-12", "huge"};

static bf16_bits *make_input(Fill fill, int64_t n) {
    const float scales[NUM_FILLS] = {1, 0, 1, 1, 1, 1e-39f, 1e-14f, 1e37f};
    bf16_bits *x = bench_normal(17, n, scales[fill]);
    if (fill == FILL_NAN) x[n / 2] = 0x7fc0;
    if (fill == FILL_NEGATIVE_NAN) x[n - 1] = 0xffc1;
    if (fill == FILL_INFINITY) x[0] = 0xff80;
    return x;
}

static void check_case(int64_t R, int64_t C, Fp8Format format, Fill fill) {
    char label[128];
    format_checked(label, sizeof label, "%lld x %lld %s %s", (long long)R, (long long)C,
                   format == FP8_E4M3 ? "e4m3" : "e5m2", fill_names[fill]);
    bf16_bits *host = make_input(fill, R * C);
    bf16 *x = (bf16 *)bench_upload(host, R * C * 2);
    QTensor t = qtensor_create(R, C, format);
    tensor_quantize(t, x, R, C, 0);
    check_amax(label, t.amax, host, R * C);
    check_quantized(label, t, host, R, C);
    qtensor_free(t);
    bench_free(x);
    free(host);
}

static void check_one_copy(int64_t R, int64_t C, bool row) {
    bf16_bits *host = make_input(FILL_NORMAL, R * C);
    bf16 *x = (bf16 *)bench_upload(host, R * C * 2);
    QTensor t = qtensor_create(R, C, FP8_E4M3);
    bench_free(row ? t.columnwise : t.rowwise);
    if (row) t.columnwise = NULL;
    else t.rowwise = NULL;
    tensor_quantize(t, x, R, C, 0);
    check_quantized(row ? "rowwise only" : "columnwise only", t, host, R, C);
    qtensor_free(t);
    bench_free(x);
    free(host);
}

// Checks the cast of every bf16 number. `amax` gives the scale, which is 1 if amax is the format's largest number.
static void check_all_numbers(Fp8Format format, float amax) {
    char label[64];
    format_checked(label, sizeof label, "all bf16, %s, amax %g", format == FP8_E4M3 ? "e4m3" : "e5m2", amax);
    bf16_bits *host = (bf16_bits *)xcalloc(65536, sizeof(bf16_bits));
    for (int i = 0; i < 65536; i++) host[i] = (bf16_bits)i;
    bf16 *x = (bf16 *)bench_upload(host, 65536 * 2);
    QTensor t = qtensor_create(256, 256, format);
    CUDA_CHECK(cudaMemcpy(t.amax, &amax, sizeof amax, cudaMemcpyHostToDevice));
    quantize_transpose(t, x, 256, 256, 0);
    check_quantized(label, t, host, 256, 256);
    qtensor_free(t);
    bench_free(x);
    free(host);
}

// Checks the amax for every length up to 40, and for lengths up to 40000 in steps of 1777: each with the largest
// magnitude at the end, and once more with it in the middle. A slot that holds a larger value must keep it.
static void check_amax_lengths(void) {
    uint32_t *slot = (uint32_t *)bench_zeros(sizeof(uint32_t));
    for (int64_t n = 1; n < 40000; n += n < 40 ? 1 : 1777)
        for (int middle = 0; middle < 2; middle++) {
            bf16_bits *host = bench_normal((uint64_t)n, n, 1);
            host[middle ? n / 2 : n - 1] = 0xc2f7;  // -123.5
            bf16 *x = (bf16 *)bench_upload(host, n * 2);
            CUDA_CHECK(cudaMemset(slot, 0, sizeof *slot));
            tensor_amax(slot, x, n, 0);
            char label[64];
            format_checked(label, sizeof label, "amax of %lld values", (long long)n);
            check_amax(label, slot, host, n);
            bench_free(x);
            free(host);
        }
    bf16 *x = bench_random(64, 1, 1);
    tensor_amax(slot, x, 64, 0);
    CHECK(float_from_bits(read_amax(slot)) == 123.5f, "a larger amax in the slot stays; got %g",
          float_from_bits(read_amax(slot)));
    bench_free(x);
    bench_free(slot);
}

// ---------------------------------------------------------------------------------------------------------------------
// Large tensors, checked against a plain kernel that casts element by element with the host's cast, or against a second
// run

static __global__ void plain_quantize_kernel(uint8_t *row, uint8_t *col, const bf16 *x, const uint32_t *amax, int64_t R,
                                             int64_t C, Fp8Format format) {
    const float scale = fp8_scale(__uint_as_float(*amax), format);
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < R * C; i += gridDim.x * (int64_t)blockDim.x) {
        const uint8_t code = fp8_from_float(bf16_to_float(__bfloat16_as_ushort(x[i])) * scale, format);
        row[i] = code;
        col[i % C * R + i / C] = code;
    }
}

static void check_large(int64_t R, int64_t C, Fp8Format format, bool twice) {
    char label[96];
    bf16 *x = bench_random(R * C, 3, 1);
    const float largest = -77;
    const bf16_bits bits = bf16_from_float(largest);
    CUDA_CHECK(cudaMemcpy(x + R * C - 1, &bits, sizeof bits, cudaMemcpyHostToDevice));
    QTensor t = qtensor_create(R, C, format), want = qtensor_create(R, C, format);
    tensor_quantize(t, x, R, C, 0);
    CHECK(float_from_bits(read_amax(t.amax)) == -largest, "%lld x %lld: the amax is %g, want %g", (long long)R,
          (long long)C, float_from_bits(read_amax(t.amax)), -largest);
    if (twice) tensor_quantize(want, x, R, C, 0);
    else plain_quantize_kernel<<<8192, 256>>>(want.rowwise, want.columnwise, x, t.amax, R, C, format);
    CUDA_CHECK_LAUNCH();
    format_checked(label, sizeof label, "%lld x %lld %s, rowwise data", (long long)R, (long long)C,
                   twice ? "second run" : "plain kernel");
    check_same_on_device(label, t.rowwise, want.rowwise, R * C, C);
    format_checked(label, sizeof label, "%lld x %lld %s, columnwise data", (long long)R, (long long)C,
                   twice ? "second run" : "plain kernel");
    check_same_on_device(label, t.columnwise, want.columnwise, R * C, R);
    qtensor_free(t);
    qtensor_free(want);
    bench_free(x);
}

// ---------------------------------------------------------------------------------------------------------------------
// Sharded weights: the slices of all ranks, cast one after the other, put together and transposed, must equal the
// host's cast of the whole tensors.

enum { SLICE_LAYERS = 3, SLICE_TENSORS = 4, SLOT_STRIDE = 6 };

static void check_slices(int64_t shard_size) {
    const int64_t N[SLICE_TENSORS] = {112, 48, 336, 48}, K[SLICE_TENSORS] = {48, 64, 48, 176};
    int64_t offset[SLICE_TENSORS], size = 0;
    for (int j = 0; j < SLICE_TENSORS; j++) {
        offset[j] = round_up(size, 128);
        size = offset[j] + N[j] * K[j];
    }
    const int64_t slice = round_up(size, shard_size * 128) / shard_size, full = shard_size * slice;
    bf16_bits *host = make_input(FILL_NORMAL, SLICE_LAYERS * full);
    uint32_t amax[SLICE_LAYERS * SLOT_STRIDE] = {0};
    for (int64_t l = 0; l < SLICE_LAYERS; l++)
        for (int j = 0; j < SLICE_TENSORS; j++)
            amax[l * SLOT_STRIDE + j] = host_amax(host + l * full + offset[j], N[j] * K[j]);
    bf16 *x = (bf16 *)bench_upload(host, SLICE_LAYERS * full * 2);
    uint32_t *slots = (uint32_t *)bench_upload(amax, (int64_t)sizeof amax);
    float *inverse = (float *)bench_zeros(4 * SLICE_LAYERS * SLOT_STRIDE * (int64_t)sizeof(float));
    uint8_t *part = (uint8_t *)bench_alloc(SLICE_LAYERS * slice), *whole = (uint8_t *)bench_alloc(SLICE_LAYERS * full);
    for (int64_t rank = 0; rank < shard_size; rank++) {
        Fp8Slices s = {};
        s.count = SLICE_LAYERS, s.n = slice, s.num_tensors = SLICE_TENSORS;
        for (int j = 0; j < SLICE_TENSORS; j++)
            s.ends[j] = max_i64(0, min_i64(slice, offset[j] + N[j] * K[j] - rank * slice));
        s.x = x + rank * slice, s.x_stride = full, s.codes = part;
        s.amax = slots, s.scale_inv = inverse, s.slot_stride = SLOT_STRIDE;
        quantize_slices(&s, 0);
        CUDA_CHECK(cudaMemcpy2D(whole + rank * slice, (size_t)full, part, (size_t)slice, (size_t)slice, SLICE_LAYERS,
                                cudaMemcpyDeviceToDevice));
    }
    for (int64_t l = 0; l < SLICE_LAYERS; l++)
        for (int j = 0; j < SLICE_TENSORS; j++) {
            char label[64];
            format_checked(label, sizeof label, "slices of %lld ranks, layer %lld, tensor %d", (long long)shard_size,
                           (long long)l, j);
            const int64_t at = l * full + offset[j], slot = l * SLOT_STRIDE + j;
            // separate buffers, which have guards
            uint8_t *row = (uint8_t *)bench_alloc(N[j] * K[j]), *col = (uint8_t *)bench_alloc(N[j] * K[j]);
            float *scale = (float *)bench_alloc(sizeof(float));
            CUDA_CHECK(cudaMemcpy(scale, inverse + 4 * slot, sizeof(float), cudaMemcpyDeviceToDevice));
            CUDA_CHECK(cudaMemcpy(row, whole + at, (size_t)(N[j] * K[j]), cudaMemcpyDeviceToDevice));
            fp8_transpose(col, row, N[j], K[j], 0);
            QTensor t = {};
            t.rowwise = row, t.columnwise = col, t.rowwise_scale_inv = t.columnwise_scale_inv = scale,
            t.amax = slots + slot;
            check_quantized(label, t, host + at, N[j], K[j]);
            bench_free(row), bench_free(col), bench_free(scale);
        }
    free(bench_download(part, SLICE_LAYERS * slice, "slices"));
    void *device[] = {x, slots, inverse, part, whole};
    for (void *p : device) bench_free(p);
    free(host);
}

static void check_transpose(int64_t R, int64_t C) {
    uint8_t *host = (uint8_t *)xcalloc((size_t)(R * C), 1), *want = (uint8_t *)xcalloc((size_t)(R * C), 1);
    for (int64_t i = 0; i < R * C; i++) want[i % C * R + i / C] = host[i] = (uint8_t)rng_u64(5, (uint64_t)i);
    uint8_t *row = (uint8_t *)bench_upload(host, R * C), *col = (uint8_t *)bench_alloc(R * C);
    fp8_transpose(col, row, R, C, 0);
    char label[64];
    format_checked(label, sizeof label, "transpose of %lld x %lld", (long long)R, (long long)C);
    uint8_t *got = (uint8_t *)bench_download(col, R * C, label);
    check_bytes(label, got, want, R * C, 1);
    bench_free(row), bench_free(col);
    free(host), free(want), free(got);
}

// ---------------------------------------------------------------------------------------------------------------------
// Refusals run before the first CUDA call of this process: a check runs in a forked child, which cannot use its
// parent's CUDA context

typedef struct {
    int64_t R, C;
    uint8_t *row;
} BadCall;

static void call_quantize(void *context) {
    const BadCall *bad = (const BadCall *)context;
    QTensor t = {};
    t.rowwise = bad->row, t.rowwise_scale_inv = t.amax = (uint32_t *)16, t.row_granularity = PER_TENSOR;
    quantize_transpose(t, (const bf16 *)16, bad->R, bad->C, 0);
}

static void check_refusals(void) {
    char output[512];
    BadCall columns = {16, 24, (uint8_t *)16}, rows = {0, 16, (uint8_t *)16}, nothing = {16, 16, NULL},
            misaligned = {16, 16, (uint8_t *)24};
    CHECK(check_dies(call_quantize, &columns, "multiple of 16 columns", output, sizeof output),
          "columns that are no multiple of 16 are refused: %s", output);
    CHECK(check_dies(call_quantize, &rows, "at least 1 row", output, sizeof output),
          "a tensor without rows is refused: %s", output);
    CHECK(check_dies(call_quantize, &nothing, "rowwise or columnwise", output, sizeof output),
          "a tensor without rowwise and columnwise data is refused: %s", output);
    CHECK(check_dies(call_quantize, &misaligned, "not 16-byte aligned", output, sizeof output),
          "a misaligned tensor is refused: %s", output);
}

static void run_checks(void) {
    const int64_t shapes[][2] = {{1, 16},    {2, 48},    {16, 128},  {17, 144},  {64, 64},
                                 {128, 128}, {129, 128}, {200, 272}, {333, 528}, {1000, 160}};
    for (int f = 0; f < 2; f++) {
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
            for (int fill = 0; fill < NUM_FILLS; fill++)
                check_case(shapes[i][0], shapes[i][1], (Fp8Format)f, (Fill)fill);
        check_all_numbers((Fp8Format)f, fp8_max((Fp8Format)f));
        check_all_numbers((Fp8Format)f, 3.171875f);
    }
    check_one_copy(130, 144, true);
    check_one_copy(130, 144, false);
    check_amax_lengths();
    for (int64_t shard_size = 1; shard_size < 6; shard_size++) check_slices(shard_size);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) check_transpose(shapes[i][0], shapes[i][1]);
    check_large(4096, 4096, FP8_E5M2, true);
    check_large(8191, 1040, FP8_E4M3, false);
}

// ---------------------------------------------------------------------------------------------------------------------

static void bench_shape(Bench *b, int64_t R, int64_t C) {
    char shape[32];
    format_checked(shape, sizeof shape, "%lld x %lld", (long long)R, (long long)C);
    const double n = (double)R * (double)C;
    bf16 *x = bench_random(R * C, 5, 1);
    QTensor t = qtensor_create(R, C, FP8_E4M3), row = t, col = t;
    row.columnwise = NULL, col.rowwise = NULL;
    bench_report(b, "tensor_amax", shape, bench_time_us(b, [&] { tensor_amax(t.amax, x, R * C, 0); }), 2 * n,
                 AMAX_REASON);
    bench_report(b, "quantize_transpose", shape, bench_time_us(b, [&] { quantize_transpose(t, x, R, C, 0); }), 4 * n,
                 CAST_REASON);
    bench_report(b, "quantize, rowwise only", shape, bench_time_us(b, [&] { quantize_transpose(row, x, R, C, 0); }),
                 3 * n);
    bench_report(b, "quantize, columnwise only", shape, bench_time_us(b, [&] { quantize_transpose(col, x, R, C, 0); }),
                 3 * n);
    bench_report(b, "fp8_transpose", shape, bench_time_us(b, [&] { fp8_transpose(t.columnwise, t.rowwise, R, C, 0); }),
                 2 * n, CAST_REASON);
    Fp8Slices s = {};
    s.count = 1, s.n = s.x_stride = s.ends[0] = R * C, s.num_tensors = 1, s.slot_stride = 1;
    s.x = x, s.codes = t.rowwise, s.amax = t.amax, s.scale_inv = (float *)t.rowwise_scale_inv;
    bench_report(b, "quantize_slices", shape, bench_time_us(b, [&] { quantize_slices(&s, 0); }), 3 * n);
    bench_report(b, "tensor_quantize (both passes)", shape, bench_time_us(b, [&] { tensor_quantize(t, x, R, C, 0); }),
                 6 * n);
    qtensor_free(t);
    bench_free(x);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        check_refusals();
        run_checks();
    }
    if (bench_part_wanted(argc, argv, "large")) check_large(524416, 4096, FP8_E4M3, false);  // 2^31 + 524288 elements
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_shape(&b, 8192, 4096);
        bench_shape(&b, 2048, 4096);
        bench_shape(&b, 8192, 6144);
        bench_shape(&b, 8192, 14336);
        bench_shape(&b, 28672, 4096);
        bench_destroy(&b);
    }
    return check_report();
}
