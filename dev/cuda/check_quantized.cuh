// FP8 tensors in the kernel programs: making one, and checking every byte of one against the casts of llmc/fp8.h on the host.
#ifndef DEV_CUDA_CHECK_QUANTIZED_CUH
#define DEV_CUDA_CHECK_QUANTIZED_CUH

#include "../../llmc/quantize.cuh"
#include "bench.cuh"

// Both copies poisoned, amax cleared.
static inline Fp8Tensor fp8_tensor_create(int64_t R, int64_t C, Fp8Format format) {
    Fp8Tensor t = {(uint8_t *)bench_alloc(R * C), (uint8_t *)bench_alloc(R * C), (float *)bench_alloc(sizeof(float)), (uint32_t *)bench_zeros(sizeof(uint32_t)), format};
    return t;
}

static inline void fp8_tensor_free(Fp8Tensor t) {
    if (t.row) bench_free(t.row);
    if (t.col) bench_free(t.col);
    bench_free(t.inverse_scale);
    bench_free(t.amax);
}

static inline uint32_t read_amax(const uint32_t *slot) {
    uint32_t bits;
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(&bits, slot, sizeof bits, cudaMemcpyDeviceToHost));
    return bits;
}

static inline bool same_or_nan(uint32_t a, uint32_t b) { return a == b || (isnan(float_from_bits(a)) && isnan(float_from_bits(b))); }

// Bits of max |x|.
static inline uint32_t host_amax(const bf16_bits *x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++)
        if ((uint32_t)(x[i] & 0x7fff) << 16 > largest) largest = (uint32_t)(x[i] & 0x7fff) << 16;
    return largest;
}

static inline void check_amax(const char *label, const uint32_t *slot, const bf16_bits *x, int64_t n) {
    const uint32_t got = read_amax(slot), want = host_amax(x, n);
    CHECK(same_or_nan(got, want), "%s: amax %.9g (0x%08x), want %.9g (0x%08x)", label, float_from_bits(got), got, float_from_bits(want), want);
}

// t is the cast of x [R, C] (host) with the scale that t.amax gives: both copies, the inverse scale.
static inline void check_quantized(const char *label, Fp8Tensor t, const bf16_bits *x, int64_t R, int64_t C) {
    const float scale = fp8_scale(float_from_bits(read_amax(t.amax)), t.format);
    uint8_t *row = (uint8_t *)xcalloc((size_t)(R * C), 1), *col = (uint8_t *)xcalloc((size_t)(R * C), 1);
    for (int64_t r = 0; r < R; r++)
        for (int64_t c = 0; c < C; c++) row[r * C + c] = col[c * R + r] = fp8_from_float(bf16_to_float(x[r * C + c]) * scale, t.format);
    char name[160];
    if (t.row) {
        format_checked(name, sizeof name, "%s, row copy", label);
        uint8_t *got = (uint8_t *)bench_download(t.row, R * C, name);
        check_fp8(name, got, row, R * C, C, t.format);
        free(got);
    }
    if (t.col) {
        format_checked(name, sizeof name, "%s, transposed copy", label);
        uint8_t *got = (uint8_t *)bench_download(t.col, R * C, name);
        check_fp8(name, got, col, R * C, R, t.format);
        free(got);
    }
    float *inverse = (float *)bench_download(t.inverse_scale, sizeof(float), label);
    CHECK(same_or_nan(float_bits(*inverse), float_bits(1.0f / scale)), "%s: inverse scale %.9g, want %.9g", label, *inverse, 1.0f / scale);
    free(inverse);
    free(row);
    free(col);
}

#endif
