// FP8 tensors in the kernel programs: creates them, and checks all codes and scales against the host's casts
// (llmc/base/fp8.h, llmc/reference/quantize_reference.h).
#ifndef DEV_CUDA_CHECK_QUANTIZED_CUH
#define DEV_CUDA_CHECK_QUANTIZED_CUH

#include "../../llmc/fp8/quantize.cuh"
#include "../../llmc/reference/quantize_reference.h"
#include "bench.cuh"

// Reasons why casts with tensor scales, and amax passes, may stay below their ceiling (bench_report).
#define CAST_REASON \
    "transposed tiles go through shared memory: a barrier between a block's loads and its columnwise stores"
#define AMAX_REASON "every block loads only briefly, then ends in a reduction and a read of the amax"

// Returns a tensor that a cast can fill: its data and scales are poisoned, its amaxes are zero. A usage whose
// granularity is NO_SCALE has neither data nor scales.
static inline QTensor qtensor_of(int64_t R, int64_t C, ScaleGranularity row_granularity,
                                 ScaleGranularity col_granularity, ScaleRule rule, Fp8Format format) {
    QTensor t = {};
    t.row_granularity = row_granularity, t.col_granularity = col_granularity, t.rule = rule, t.format = format;
    if (row_granularity != NO_SCALE)
        t.rowwise = (uint8_t *)bench_alloc(R * C),
        t.rowwise_scale_inv = bench_alloc(scale_bytes(row_granularity, R, C));
    if (col_granularity != NO_SCALE) t.columnwise = (uint8_t *)bench_alloc(R * C);
    if (row_granularity == PER_TENSOR && col_granularity == PER_TENSOR) t.columnwise_scale_inv = t.rowwise_scale_inv;
    else if (t.columnwise) t.columnwise_scale_inv = bench_alloc(scale_bytes(col_granularity, C, R));
    t.amax = (uint32_t *)bench_zeros(max_i64(1, tensor_amaxes(row_granularity, col_granularity, R, C)) *
                                     (int64_t)sizeof(uint32_t));
    return t;
}

// Returns a tensor whose rowwise and columnwise data share one scale, which follows from the tensor's amax.
static inline QTensor qtensor_create(int64_t R, int64_t C, Fp8Format format) {
    return qtensor_of(R, C, PER_TENSOR, PER_TENSOR, SCALE_TORCHAO, format);
}

static inline void qtensor_free(QTensor t) {
    void *device[] = {t.rowwise, t.columnwise, t.rowwise_scale_inv,
                      t.columnwise_scale_inv == t.rowwise_scale_inv ? NULL : t.columnwise_scale_inv, t.amax};
    for (void *p : device) bench_free(p);
}

static inline uint32_t read_amax(const uint32_t *slot) {
    uint32_t bits;
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(&bits, slot, sizeof bits, cudaMemcpyDeviceToHost));
    return bits;
}

static inline bool same_or_nan(uint32_t a, uint32_t b) {
    return a == b || (isnan(float_from_bits(a)) && isnan(float_from_bits(b)));
}

// Returns the fp32 bits of max |x|. NaN is the largest.
static inline uint32_t host_amax(const bf16_bits *x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++)
        if ((uint32_t)(x[i] & 0x7fff) << 16 > largest) largest = (uint32_t)(x[i] & 0x7fff) << 16;
    return largest;
}

static inline void check_amax(const char *label, const uint32_t *slot, const bf16_bits *x, int64_t n) {
    const uint32_t got = read_amax(slot), want = host_amax(x, n);
    CHECK(same_or_nan(got, want), "%s: the amax is %.9g (0x%08x), want %.9g (0x%08x)", label, float_from_bits(got), got,
          float_from_bits(want), want);
}

// Checks that t is the cast of x [R, C] (host) with the scale from t.amax: its rowwise and columnwise data, unless they
// are NULL, and scale_inv.
static inline void check_quantized(const char *label, QTensor t, const bf16_bits *x, int64_t R, int64_t C) {
    const float scale = fp8_scale(float_from_bits(read_amax(t.amax)), t.format);
    uint8_t *row = (uint8_t *)xcalloc((size_t)(R * C), 1), *col = (uint8_t *)xcalloc((size_t)(R * C), 1);
    for (int64_t r = 0; r < R; r++)
        for (int64_t c = 0; c < C; c++)
            row[r * C + c] = col[c * R + r] = fp8_from_float(bf16_to_float(x[r * C + c]) * scale, t.format);
    char name[160];
    if (t.rowwise) {
        format_checked(name, sizeof name, "%s, rowwise data", label);
        uint8_t *got = (uint8_t *)bench_download(t.rowwise, R * C, name);
        check_fp8(name, got, row, R * C, C, t.format);
        free(got);
    }
    if (t.columnwise) {
        format_checked(name, sizeof name, "%s, columnwise data", label);
        uint8_t *got = (uint8_t *)bench_download(t.columnwise, R * C, name);
        check_fp8(name, got, col, R * C, R, t.format);
        free(got);
    }
    float *inverse =
        (float *)bench_download(t.rowwise ? t.rowwise_scale_inv : t.columnwise_scale_inv, sizeof(float), label);
    CHECK(same_or_nan(float_bits(*inverse), float_bits(1.0f / scale)), "%s: scale_inv is %.9g, want %.9g", label,
          *inverse, 1.0f / scale);
    free(inverse);
    free(row);
    free(col);
}

// Checks rowwise or columnwise data against quantize_copy() of x: all codes and scales. A NaN equals any NaN.
static inline void check_usage(const char *label, const QTensor *t, TensorUsage usage, const float *x, int64_t R,
                               int64_t C, float delayed_scale) {
    const ScaleGranularity granularity = usage == ROWWISE ? t->row_granularity : t->col_granularity;
    const UsageShape s = usage_shape(R, C, usage);
    const int64_t bytes = scale_bytes(granularity, s.outer, s.depth), width = granularity == BLOCK_1X32 ? 1 : 4;
    uint8_t *want = (uint8_t *)xcalloc((size_t)(R * C), 1), *want_scales = (uint8_t *)xcalloc((size_t)bytes, 1);
    quantize_copy(want, want_scales, x, s, granularity, t->rule, t->format, delayed_scale);
    char name[192];
    format_checked(name, sizeof name, "%s, %s data", label, usage == ROWWISE ? "rowwise" : "columnwise");
    uint8_t *got = (uint8_t *)bench_download(usage == ROWWISE ? t->rowwise : t->columnwise, R * C, name);
    uint8_t *got_scales =
        (uint8_t *)bench_download(usage == ROWWISE ? t->rowwise_scale_inv : t->columnwise_scale_inv, bytes, name);
    check_fp8(name, got, want, R * C, s.depth, t->format);
    int64_t bad = 0, first = 0;
    for (int64_t i = 0; i < bytes / width; i++) {
        const bool same = width == 1 ? got_scales[i] == want_scales[i]
                                     : same_or_nan(((uint32_t *)got_scales)[i], ((uint32_t *)want_scales)[i]);
        if (!same && bad++ == 0) first = i;
    }
    CHECK(bad == 0,
          "%s: all scale_inv values are as expected; %lld of %lld differ, first at index %lld: got %.9g, want %.9g",
          name, (long long)bad, (long long)(bytes / width), (long long)first,
          scale_load(granularity, got_scales, first), scale_load(granularity, want_scales, first));
    free(want), free(want_scales), free(got), free(got_scales);
}

// Checks all data that t has against the cast of x [R, C], the values of a bf16 tensor. `delayed_scale` is the scale
// with which t was cast; 0: the scales follow from x.
static inline void check_data(const char *label, const QTensor *t, const float *x, int64_t R, int64_t C,
                              float delayed_scale) {
    if (t->rowwise) check_usage(label, t, ROWWISE, x, R, C, delayed_scale);
    if (t->columnwise) check_usage(label, t, COLUMNWISE, x, R, C, delayed_scale);
}

#endif
