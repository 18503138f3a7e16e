// Common code of the kernel programs in dev/cuda: poisoned device buffers, comparisons that name the first bad element,
// timing with a cold L2, and result lines that give each kernel's share of its ceiling.
// A program checks with CHECK and the functions below (arguments "check", "large"), times its kernels ("bench"), and
// ends with check_report(). attention.cu has other arguments.
#ifndef DEV_CUDA_BENCH_CUH
#define DEV_CUDA_BENCH_CUH

#include "../../llmc/gpu/cuda_utils.cuh"
#include "../../llmc/config/flops.h"
#include "../../llmc/base/rng.h"
#include "../../llmc/ranks/gpu_monitor.h"
#include "../test/lib/check.h"

// Call it after a <<<>>> launch. It reports a bad launch configuration; a later synchronizing call reports an error
// inside the kernel.
#define CUDA_CHECK_LAUNCH() cuda_check(cudaGetLastError(), "kernel launch", __FILE__, __LINE__)

// ---------------------------------------------------------------------------------------------------------------------
// Buffers. Each has a guard behind it. bench_alloc fills both with BENCH_POISON. A comparison then shows elements that
// a kernel did not write, and bench_download shows writes behind the buffer.

enum { BENCH_GUARD_BYTES = 256, BENCH_POISON = 0xa5 };

static inline void *bench_alloc(int64_t bytes) {
    void *p = NULL;
    CUDA_CHECK(cudaMalloc(&p, (size_t)(bytes + BENCH_GUARD_BYTES)));
    CUDA_CHECK(cudaMemset(p, BENCH_POISON, (size_t)(bytes + BENCH_GUARD_BYTES)));
    return p;
}

static inline void *bench_upload(const void *host, int64_t bytes) {
    void *p = bench_alloc(bytes);
    CUDA_CHECK(cudaMemcpy(p, host, (size_t)bytes, cudaMemcpyHostToDevice));
    return p;
}

static inline void *bench_zeros(int64_t bytes) {
    void *p = bench_alloc(bytes);
    CUDA_CHECK(cudaMemset(p, 0, (size_t)bytes));
    return p;
}

// Returns a host copy, which the caller frees. Waits for the device; fails a check if the guard was overwritten.
static inline void *bench_download(const void *device, int64_t bytes, const char *label) {
    uint8_t *host = (uint8_t *)xcalloc((size_t)(bytes + BENCH_GUARD_BYTES), 1);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(host, device, (size_t)(bytes + BENCH_GUARD_BYTES), cudaMemcpyDeviceToHost));
    int written = 0;
    for (int i = 0; i < BENCH_GUARD_BYTES; i++) written += host[bytes + i] != BENCH_POISON;
    CHECK(written == 0, "%s: %d bytes behind the buffer were written; expected none", label, written);
    return host;
}

static inline void bench_free(void *device) { CUDA_CHECK(cudaFree(device)); }

// ---------------------------------------------------------------------------------------------------------------------
// Comparisons on the host

// Checks for equal bytes; names the first bad one as [row, column] of a matrix with `columns` bytes in a row.
static inline void check_bytes(const char *label, const void *got, const void *want, int64_t n, int64_t columns) {
    const uint8_t *a = (const uint8_t *)got, *b = (const uint8_t *)want;
    int64_t bad = 0, first = -1;
    for (int64_t i = 0; i < n; i++)
        if (a[i] != b[i] && bad++ == 0) first = i;
    CHECK(bad == 0,
          "%s: all bytes are as expected; %lld of %lld differ, first at [%lld, %lld]: got 0x%02x, want 0x%02x", label,
          (long long)bad, (long long)n, (long long)(first / columns), (long long)(first % columns), a[first], b[first]);
}

static inline bool fp8_is_nan(uint8_t code, Fp8Format format) {
    return format == FP8_E4M3 ? (code & 0x7f) == 0x7f : (code & 0x7f) > 0x7c;
}

// Checks for equal FP8 codes; a NaN equals any NaN, because the GPU's cast drops its sign.
static inline void check_fp8(const char *label, const uint8_t *got, const uint8_t *want, int64_t n, int64_t columns,
                             Fp8Format format) {
    int64_t bad = 0, first = 0;
    for (int64_t i = 0; i < n; i++) {
        if (got[i] == want[i] || (fp8_is_nan(got[i], format) && fp8_is_nan(want[i], format))) continue;
        if (bad++ == 0) first = i;
    }
    CHECK(bad == 0,
          "%s: all codes are as expected; %lld of %lld differ, first at [%lld, %lld]: got 0x%02x, want 0x%02x", label,
          (long long)bad, (long long)n, (long long)(first / columns), (long long)(first % columns), got[first],
          want[first]);
}

// Checks |got - want| <= absolute + relative * |want| for every element; infinities must match, NaN must meet NaN.
static inline void check_close(const char *label, const float *got, const float *want, int64_t n, int64_t columns,
                               double relative, double absolute) {
    int64_t bad = 0, first = 0;
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        if (got[i] == want[i] || (isnan(got[i]) && isnan(want[i]))) continue;
        double error = fabs((double)got[i] - want[i]), allowed = absolute + relative * fabs((double)want[i]);
        if (isfinite(error) && error <= allowed) continue;
        if (bad++ == 0) first = i;
        worst = fmax(worst, error / allowed);
    }
    CHECK(bad == 0,
          "%s: all elements are within the tolerance; %lld of %lld are not (worst %.3g x the tolerance), first at "
          "[%lld, %lld]: got %.9g, want %.9g",
          label, (long long)bad, (long long)n, worst, (long long)(first / columns), (long long)(first % columns),
          got[first], want[first]);
}

static inline float *bf16_to_floats(const void *bits, int64_t n) {
    float *x = (float *)xcalloc((size_t)n, sizeof(float));
    for (int64_t i = 0; i < n; i++) x[i] = bf16_to_float(((const bf16_bits *)bits)[i]);
    return x;
}

static inline bf16_bits *bf16_from_floats(const float *x, int64_t n) {
    bf16_bits *bits = (bf16_bits *)xcalloc((size_t)n, sizeof(bf16_bits));
    for (int64_t i = 0; i < n; i++) bits[i] = bf16_from_float(x[i]);
    return bits;
}

// Returns n standard normal values times `scale`, rounded to bf16.
static inline bf16_bits *bench_normal(uint64_t seed, int64_t n, float scale) {
    bf16_bits *bits = (bf16_bits *)xcalloc((size_t)n, sizeof(bf16_bits));
    for (int64_t i = 0; i < n; i++) bits[i] = bf16_from_float(rng_normal(rng_key(seed, 0), (uint64_t)i) * scale);
    return bits;
}

// ---------------------------------------------------------------------------------------------------------------------
// Large buffers, compared on the device

static __global__ void bench_fill_kernel(bf16 *x, int64_t n, uint64_t key, float scale) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x)
        x[i] = __float2bfloat16(rng_normal(key, (uint64_t)i) * scale);
}

static inline void bench_fill_normal(bf16 *x, int64_t n, uint64_t seed, float scale) {
    bench_fill_kernel<<<2048, 256>>>(x, n, rng_key(seed, 0), scale);
    CUDA_CHECK_LAUNCH();
}

static inline bf16 *bench_random(int64_t n, uint64_t seed, float scale) {
    bf16 *x = (bf16 *)bench_alloc(n * (int64_t)sizeof(bf16));
    bench_fill_normal(x, n, seed, scale);
    return x;
}

static __global__ void bench_first_difference_kernel(unsigned long long *first, const uint8_t *a, const uint8_t *b,
                                                     int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x)
        if (a[i] != b[i]) atomicMin(first, (unsigned long long)i);
}

// Checks that the n bytes of two device buffers are equal; names the first different byte as [row, column] of a matrix
// with `columns` bytes in a row.
static inline void check_same_on_device(const char *label, const void *a, const void *b, int64_t n, int64_t columns) {
    unsigned long long none = ~0ull, first, *slot = (unsigned long long *)bench_upload(&none, sizeof none);
    bench_first_difference_kernel<<<2048, 256>>>(slot, (const uint8_t *)a, (const uint8_t *)b, n);
    CUDA_CHECK_LAUNCH();
    CUDA_CHECK(cudaMemcpy(&first, slot, sizeof first, cudaMemcpyDeviceToHost));
    bench_free(slot);
    CHECK(first == none, "%s: both buffers hold equal bytes; the first byte that differs is at [%lld, %lld]", label,
          (long long)(first / (unsigned long long)columns), (long long)(first % (unsigned long long)columns));
}

// ---------------------------------------------------------------------------------------------------------------------
// Timing

typedef struct {
    uint4 *flush;  // read before every timed launch; larger than the L2
    int64_t flush_bytes;
    uint32_t *sink;
    double copy_rate;  // bytes per second, reads plus writes, of a plain copy on this GPU in this run
    double peak_bf16;  // FLOP/s, dense; 0: unknown
    double peak_ghz;   // clock at which the peak holds; 0: unknown
    int num_sms;
    // [2, num_sms, 2] cycles and nanoseconds of each SM, before and after.
    uint64_t *clocks;
    cudaEvent_t start, stop;
    double sustained_us, sustained_joules;  // per call that bench_sustained repeated last; 0: not measured
} Bench;

// Reads the whole buffer, so that the L2 holds neither the timed kernel's input nor lines that must be written back
// first.
static __global__ void bench_flush_kernel(uint32_t *sink, const uint4 *p, int64_t n) {
    uint32_t x = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x)
        x ^= p[i].x ^ p[i].w;
    if (x == 0x12345678u) *sink = x;  // never true for the poison; it keeps the compiler from removing the loads
}

// Returns the joules that the GPU has used since some moment; NAN if NVML does not tell.
static inline double bench_joules(void) {
    static Nvml nvml;
    static void *gpu;
    char bus_id[32];
    int device;
    unsigned long long millijoules;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device));
    if (!gpu && (!nvml_load(&nvml, "libnvidia-ml.so.1") || nvml.init() || nvml.device_by_pci_bus_id(bus_id, &gpu)))
        return (double)NAN;
    return nvml.energy(gpu, &millijoules) ? (double)NAN : (double)millijoules * 1e-3;
}

// The GPU reaches its power limit within BENCH_WARM_SECONDS, and an H200's energy counter, which lags by about 0.5 s,
// counts that. An energy counter that does not change for BENCH_STILL_SECONDS is not measured.
#define BENCH_WARM_SECONDS 1.0
#define BENCH_STILL_SECONDS 2.0

// If BENCH_SECONDS=N is set, calls launch() without a pause for BENCH_WARM_SECONDS and then for about N. Keeps the time
// and the GPU's energy of a call for the next result line; nothing without an energy counter. The counter changes only
// every 20 to 100 ms, so both ends are at a change. Unlike the timed calls, these find their data in the L2, if it fits
// there, and a kernel that works in place gets its own results. `us`: the microseconds of a call, about.
template <class Launch>
static inline void bench_sustained(Bench *b, double us, Launch launch) {
    const double seconds = getenv("BENCH_SECONDS") ? atof(getenv("BENCH_SECONDS")) : 0;
    const int64_t chunk = (int64_t)(5e3 / us) + 1;  // calls from one reading to the next: 5 ms
    b->sustained_us = b->sustained_joules = 0;
    double joules = seconds > 0 ? bench_joules() : (double)NAN, from = 0, begin = 0;
    if (isnan(joules)) return;
    cudaEvent_t done[2];
    for (int i = 0; i < 2; i++) CUDA_CHECK(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
    const double started = seconds_now();
    double now = started, changed = started;
    for (int64_t i = 0, first = 0; b->sustained_us == 0 && now - changed < BENCH_STILL_SECONDS; i++) {
        for (int64_t k = 0; k < chunk; k++) launch();
        CUDA_CHECK(cudaEventRecord(done[i % 2]));
        if (i > 0) CUDA_CHECK(cudaEventSynchronize(done[(i - 1) % 2]));  // chunk i keeps the GPU busy
        const double before = joules;
        now = seconds_now(), joules = bench_joules();
        if (joules == before) continue;
        changed = now;
        if (begin > 0 && now - begin >= seconds) {
            const double calls = (double)((i - first) * chunk);
            b->sustained_us = (now - begin) * 1e6 / calls, b->sustained_joules = (joules - from) / calls;
        }
        if (begin == 0 && now - started >= BENCH_WARM_SECONDS) begin = now, from = joules, first = i;
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < 2; i++) CUDA_CHECK(cudaEventDestroy(done[i]));
}

enum { BENCH_REPEATS = 11 };

// Returns the median time of launch() in microseconds, with a cold L2. launch must only enqueue work on the default
// stream.
template <class Launch>
static inline double bench_time_us(Bench *b, Launch launch) {
    double us[BENCH_REPEATS];
    launch();
    for (int i = 0; i < BENCH_REPEATS; i++) {
        bench_flush_kernel<<<1024, 256>>>(b->sink, b->flush, b->flush_bytes / (int64_t)sizeof(uint4));
        CUDA_CHECK(cudaEventRecord(b->start));
        launch();
        CUDA_CHECK(cudaEventRecord(b->stop));
        CUDA_CHECK(cudaEventSynchronize(b->stop));
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, b->start, b->stop));
        int j = i;
        for (; j > 0 && us[j - 1] > ms * 1e3; j--) us[j] = us[j - 1];
        us[j] = ms * 1e3;
    }
    bench_sustained(b, us[BENCH_REPEATS / 2], launch);
    return us[BENCH_REPEATS / 2];
}

// Launched with as many thread blocks as there are SMs. An SM that gets none keeps the zeros of bench_clock_begin.
static __global__ void bench_clock_kernel(uint64_t *clocks, uint32_t num_sms) {
    uint32_t sm;
    uint64_t ns;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    if (threadIdx.x == 0 && sm < num_sms) clocks[2 * sm] = (uint64_t)clock64(), clocks[2 * sm + 1] = ns;
}

// Starts the clock measurement of work on the default stream.
static inline void bench_clock_begin(Bench *b) {
    CUDA_CHECK(cudaMemset(b->clocks, 0, (size_t)b->num_sms * 4 * sizeof(uint64_t)));
    bench_clock_kernel<<<b->num_sms, 1024>>>(b->clocks, (uint32_t)b->num_sms);
    CUDA_CHECK_LAUNCH();
}

// Returns the mean clock of the SMs since bench_clock_begin in GHz; 0 if no SM has counts from both ends. Waits for the
// device.
static inline double bench_clock_end(Bench *b) {
    const int n = b->num_sms;
    uint64_t *c = (uint64_t *)xcalloc((size_t)n * 4, sizeof *c);
    bench_clock_kernel<<<n, 1024>>>(b->clocks + 2 * n, (uint32_t)n);
    CUDA_CHECK_LAUNCH();
    CUDA_CHECK(cudaMemcpy(c, b->clocks, (size_t)n * 4 * sizeof *c, cudaMemcpyDeviceToHost));
    double sum = 0, count = 0;
    for (int i = 0; i < 2 * n; i += 2) {
        const uint64_t *begin = c + i, *end = begin + 2 * n;
        if (!begin[1] || end[1] <= begin[1] || end[0] <= begin[0]) continue;
        sum += (double)(end[0] - begin[0]) / (double)(end[1] - begin[1]), count++;
    }
    free(c);
    return count > 0 ? sum / count : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Result lines. A kernel that a training step launches has a line that gives its share of its ceiling. The ceiling is
// the copy rate of this GPU in this run for memory-bound kernels, and the dense peak in llmc/config/flops.h for GEMMs
// and attention. A line below BENCH_PERCENT must give a reason; without one, a check fails. So a kernel that has no
// reason to be slow is noticed when it becomes slow.
//
// Exceptions:
//  - These kernels of a few bytes are part of their callers' lines: adamw_sum, adamw_norm, adamw_largest and
//    adamw_find_large (both return at once if the norm is accepted), msamp_scales, gradient_fp8_scales,
//    column_sums_finish and gemm_alpha.
//  - These kernels of a few bytes have no line: loss_sum, loss_mean, adamw_clip, fp16_factors, delayed_begin,
//    delayed_update, delayed_restore and adamw_find_block (returns at once if the norm is accepted).
//  - gradient_fp8_decode, for replicas that reduce FP8 gradients in bf16, has no line.
//  - These kernels run before or between steps, or in audited steps. They have no line: initialize_parameter,
//    gemm_fill, round_weights, fp16_amax, fp16_masters_amax, fp16_masters_encode and fp16_audit.
//  - transport_sum, which adds gradients that several GPUs have exchanged, has no line.

// A call that moves at most BENCH_RAMP_BYTES, and takes at most BENCH_RAMP_US longer than these bytes take at the copy
// rate, has "launch and ramp" as its reason: it takes a few microseconds to launch a kernel, and to fill the SMs with
// thread blocks and empty them again.
#define BENCH_RAMP_BYTES (64ll << 20)
enum { BENCH_PERCENT = 85, BENCH_RAMP_US = 15 };

// If BENCH_LINES is set, appends a line to the file it names, for scripts/check_gpu.sh: name, shape, percent of the
// ceiling, 1 if that is low, else 0, and the reason for a low one, separated by tabs.
static inline void bench_record(const char *name, const char *shape, double percent, bool low, const char *reason) {
    const char *path = getenv("BENCH_LINES");
    if (!path) return;
    FILE *file = fopen(path, "a");
    if (!file) die("BENCH_LINES=%s: cannot be written: %s", path, strerror(errno));
    fprintf(file, "%s\t%s\t%.1f\t%d\t%s\n", name, shape, percent, low, low && reason ? reason : "");
    fclose(file);
}

// Prints a result line; all result lines come from here. `rate` and `ceiling` are in units of `unit`. `reason` says why
// the share may be low; NULL if it may not.
static inline void bench_line(const Bench *b, const char *name, const char *shape, double us, double rate,
                              const char *unit, double ceiling, const char *whose, const char *reason) {
    const double percent = ceiling > 0 ? 100 * rate / ceiling : 0;
    const bool low = !(percent >= BENCH_PERCENT);
    char because[400] = "", energy[100] = "";
    if (b->sustained_joules > 0)
        format_checked(energy, sizeof energy, " (sustained: %7.1f us, %8.2f mJ, %3.0f W)", b->sustained_us,
                       b->sustained_joules * 1e3, b->sustained_joules / b->sustained_us * 1e6);
    if (low)
        format_checked(because, sizeof because, "  under %d%%: %s", BENCH_PERCENT,
                       reason ? reason : "NO REASON STATED");
    printf("%-46s %-22s %9.1f us%s %6.0f %-7s %5.1f%% of %s %.0f%s\n", name, shape, us, energy, rate, unit, percent,
           whose, ceiling, because);
    fflush(stdout);
    bench_record(name, shape, percent, low, reason);
    CHECK(us > 0 && (!low || reason),
          "%s, %s: %.1f us, %.1f%% of its ceiling: a kernel that is under %d%% has a stated reason", name, shape, us,
          percent, BENCH_PERCENT);
}

// Reports a memory-bound kernel. `bytes` is the least that the operation must move. A small call gets "launch and ramp"
// as its reason, any other call `reason`.
static inline void bench_report(const Bench *b, const char *name, const char *shape, double us, double bytes,
                                const char *reason = NULL) {
    const double lost = us - bytes / b->copy_rate * 1e6;
    char ramp[100];
    if (bytes <= BENCH_RAMP_BYTES && lost <= BENCH_RAMP_US) {
        format_checked(ramp, sizeof ramp, "launch and ramp: %.0f MB, %.1f us lost", bytes * 1e-6, lost);
        reason = ramp;
    }
    bench_line(b, name, shape, us, bytes / us * 1e-3, "GB/s", b->copy_rate * 1e-9, "a copy's", reason);
}

// Reports GEMMs and attention. ghz is the clock during the run; 0: unknown. The power limit may lower it below the
// clock at which the peak holds; a reason then also names both clocks.
static inline void bench_report_flops(const Bench *b, const char *name, const char *shape, double us, double flops,
                                      bool fp8, double ghz, const char *reason) {
    const double rate = flops / us * 1e-6, peak = b->peak_bf16 * (fp8 ? 2 : 1) * 1e-12;
    char because[300];
    if (peak == 0) reason = "llmc/config/flops.h has no peak for this GPU";
    if (reason && ghz > 0 && ghz < b->peak_ghz) {
        format_checked(because, sizeof because,
                       "%s; ran at %.2f GHz, the peak holds at %.2f: %.0f%% of the peak at that clock", reason, ghz,
                       b->peak_ghz, 100 * rate / peak * b->peak_ghz / ghz);
        reason = because;
    }
    bench_line(b, name, shape, us, rate, "TFLOP/s", peak, fp8 ? "the FP8 peak's" : "the peak's", reason);
}

static __global__ void bench_copy_kernel(uint4 *to, const uint4 *from, int64_t n) {
    int64_t i = blockIdx.x * 4ll * blockDim.x + threadIdx.x;
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (i + k * blockDim.x < n) v[k] = from[i + k * blockDim.x];
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (i + k * blockDim.x < n) to[i + k * blockDim.x] = v[k];
}

// Measures the ceiling of memory-bound kernels with a copy of 512 MiB.
static inline void bench_measure_copy(Bench *b) {
    const int64_t bytes = 512ll << 20, n = bytes / (int64_t)sizeof(uint4);
    uint4 *from = (uint4 *)bench_alloc(bytes), *to = (uint4 *)bench_alloc(bytes);
    const double us = bench_time_us(b, [&] { bench_copy_kernel<<<grid_size(n, 1024), 256>>>(to, from, n); });
    CUDA_CHECK_LAUNCH();
    b->copy_rate = 2.0 * (double)bytes / (us * 1e-6);
    bench_report(b, "copy", "512 MiB", us, 2.0 * (double)bytes);
    bench_free(from);
    bench_free(to);
}

// Allocates the buffers, looks up the GPU's peak, and measures the rate of a copy.
static inline Bench bench_create(void) {
    Bench b = {};
    int device = 0;
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&p, device));
    b.num_sms = p.multiProcessorCount;
    b.peak_bf16 = flops_peak_bf16(p.major, p.minor, p.name);
    // A Hopper SM does 4096 dense BF16 FLOPs per cycle.
    if (p.major == 9) b.peak_ghz = b.peak_bf16 / (4096e9 * b.num_sms);
    b.flush_bytes = 2ll * p.l2CacheSize;
    b.flush = (uint4 *)bench_alloc(b.flush_bytes);
    b.sink = (uint32_t *)bench_alloc(sizeof(uint32_t));
    b.clocks = (uint64_t *)bench_alloc(b.num_sms * 4 * (int64_t)sizeof(uint64_t));
    CUDA_CHECK(cudaEventCreate(&b.start));
    CUDA_CHECK(cudaEventCreate(&b.stop));
    bench_measure_copy(&b);
    return b;
}

static inline void bench_destroy(Bench *b) {
    bench_free(b->flush);
    bench_free(b->sink);
    bench_free(b->clocks);
    CUDA_CHECK(cudaEventDestroy(b->start));
    CUDA_CHECK(cudaEventDestroy(b->stop));
}

// True if the program shall do `part`: "check", "large" (checks with more than 2^31 elements) or "bench". Without an
// argument it shall do all. A program without large checks accepts "large" too, and then does nothing.
static inline bool bench_part_wanted(int argc, char **argv, const char *part) {
    if (argc > 2 || (argc == 2 && strcmp(argv[1], "check") && strcmp(argv[1], "large") && strcmp(argv[1], "bench")))
        die("usage: %s [check|large|bench]", argv[0]);
    return argc == 1 || !strcmp(argv[1], part);
}

#endif
