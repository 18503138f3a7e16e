// Checks the casts of activations to groups of FP8 codes, and back (llmc/fp8/fp8_group.cuh), byte for byte against
// the CPU's functions; a NaN equals any NaN. Times the casts.
// Build and run: make build/bench_fp8_group && build/bench_fp8_group
#include "../../llmc/fp8/fp8_group.cuh"
#include "../../llmc/reference/fp8_group.h"
#include "bench.cuh"

static Fp8Groups groups_create(int64_t n) {
    const Fp8Groups g = {(uint8_t *)bench_alloc(n), (uint8_t *)bench_alloc(n / FP8_GROUP)};
    return g;
}

// Fills x with groups of several kinds: common, spread over a factor of 2^59, close to the smallest normal number or
// denormal, huge, zero, about half zero, with one infinity, with one NaN.
static void fill(float *x, int64_t n, uint64_t seed) {
    for (int64_t i = 0; i < n; i++) {
        const uint64_t u = rng_u64(rng_key(seed, 1), (uint64_t)i);
        const int64_t kind = i / FP8_GROUP % 8, member = i % FP8_GROUP;
        float v = rng_normal(rng_key(seed, 0), (uint64_t)i);
        if (kind == 1) v = ldexpf(v, (int)(u % 60) - 40);
        if (kind == 2) v = ldexpf(v, -126 - (int)(u % 8));
        if (kind == 3) v = ldexpf(v, 125);
        if (kind == 4 || (kind == 5 && (u & 1))) v = 0;
        if (kind == 6 && member == 77) v = u & 1 ? -INFINITY : INFINITY;
        if (kind == 7 && member == 3 && i / FP8_GROUP % 16 == 7) v = NAN;
        x[i] = bf16_round(v);
    }
}

static void check_size(int64_t n) {
    float *x = (float *)xcalloc((size_t)n, sizeof *x);
    uint8_t *codes = (uint8_t *)xcalloc((size_t)n, 1), *scales_inv = (uint8_t *)xcalloc((size_t)(n / FP8_GROUP), 1);
    fill(x, n, (uint64_t)n);
    bf16_bits *bits = bf16_from_floats(x, n);
    bf16 *device = (bf16 *)bench_upload(bits, n * 2), *back = (bf16 *)bench_alloc(n * 2);
    const Fp8Groups g = groups_create(n);
    char label[64];
    format_checked(label, sizeof label, "%lld values", (long long)n);
    fp8_group_encode(g, device, n, 0);
    fp8_group_decode(back, g, n, 0);
    for (int64_t i = 0; i < n; i++) {
        if (i % FP8_GROUP == 0) scales_inv[i / FP8_GROUP] = fp8_group_find_scale_inv(x + i, FP8_GROUP);
        codes[i] = fp8_group_code(x[i], scales_inv[i / FP8_GROUP]);
    }
    uint8_t *got = (uint8_t *)bench_download(g.codes, n, label),
            *got_scales = (uint8_t *)bench_download(g.scales_inv, n / FP8_GROUP, label);
    check_fp8(label, got, codes, n, FP8_GROUP, FP8_E4M3);
    check_bytes(label, got_scales, scales_inv, n / FP8_GROUP, 1);
    fp8_group_round(x, n);
    bf16_bits *values = (bf16_bits *)bench_download(back, n * 2, label);
    int64_t differ = 0;
    for (int64_t i = 0; i < n; i++)
        differ += isnan(x[i]) ? !isnan(bf16_to_float(values[i])) : values[i] != bf16_from_float(x[i]);
    CHECK(differ == 0, "%s come back as on the CPU; %lld do not", label, (long long)differ);
    free(x), free(codes), free(scales_inv), free(bits), free(got), free(got_scales), free(values);
    bench_free(device), bench_free(back), bench_free(g.codes), bench_free(g.scales_inv);
}

static void bench_size(Bench *b, int64_t R, int64_t F) {
    const int64_t n = R * 2 * F;
    char shape[32];
    format_checked(shape, sizeof shape, "%lld x 2x%lld", (long long)R, (long long)F);
    bf16 *x = bench_random(n, 1, 1);
    const Fp8Groups g = groups_create(n);
    bench_report(b, "bf16 to FP8 groups", shape, bench_time_us(b, [&] { fp8_group_encode(g, x, n, 0); }),
                 3.0 * (double)n);
    bench_report(b, "FP8 groups to bf16", shape, bench_time_us(b, [&] { fp8_group_decode(x, g, n, 0); }),
                 3.0 * (double)n);
    bench_free(x), bench_free(g.codes), bench_free(g.scales_inv);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check"))
        for (int64_t groups : {1, 7, 16, 64, 65, 1000, 4099}) check_size(groups * FP8_GROUP);
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_size(&b, 8192, 14336);
        bench_size(&b, 2048, 14336);
        bench_size(&b, 2048, 8192);
        bench_destroy(&b);
    }
    return check_report();
}
