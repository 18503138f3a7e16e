// Times of a step: NVTX ranges of its parts for Nsight Systems, and the table of operations that --profile prints.
// The trainer calls profile_mark after an operation, with its name and its bytes or FLOPs; the time since the previous
// mark is the operation's. Small operations have no mark: their time counts with the next operation that has one. A
// wait of the stream (for weights in transfer, for example) is an operation of its own.
#ifndef LLMC_PROFILE_CUH
#define LLMC_PROFILE_CUH

#include "../base/json.h"
#include "cuda_utils.cuh"
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define PROFILE_HAS_NVTX 1
#else
#define PROFILE_HAS_NVTX 0  // the CUDA Toolkit was installed without NVTX
#endif

enum { PROFILE_MAX_OPS = 64 };

// How an operation's work is counted, and so which rate limits the operation: bytes of memory traffic, or FLOPs in bf16
// or FP8. PROFILE_WAIT: it has no work.
typedef enum { PROFILE_WAIT, PROFILE_BYTES, PROFILE_FLOPS_BF16, PROFILE_FLOPS_FP8 } ProfileBound;

typedef struct {
    const char *op;  // string literal; marks with equal text and bound are one operation
    ProfileBound bound;
    double work;  // bytes or FLOPs
    cudaEvent_t done;
} ProfileMark;

typedef struct {
    bool on;  // true between profile_begin and profile_end
    cudaStream_t stream;
    ProfileMark *marks;
    int64_t count, capacity;
} Profile;

typedef struct {
    const char *op;
    ProfileBound bound;
    int64_t calls;
    double ms, work;
} ProfileOp;

// Marks the end of the operation enqueued last. Does nothing outside of a profiled step.
static inline void profile_mark(Profile *p, const char *op, ProfileBound bound, double work) {
    if (!p->on) return;
    if (p->count == p->capacity) {
        p->capacity = p->capacity ? 2 * p->capacity : 1024;
        p->marks = (ProfileMark *)xrealloc(p->marks, (size_t)p->capacity * sizeof *p->marks);
    }
    ProfileMark *m = &p->marks[p->count++];
    m->op = op, m->bound = bound, m->work = work;
    CUDA_CHECK(cudaEventCreate(&m->done));
    CUDA_CHECK(cudaEventRecord(m->done, p->stream));
}

// Marks the end of an operation that moves `bytes`.
static inline void profile_bytes(Profile *p, const char *op, int64_t bytes) {
    profile_mark(p, op, PROFILE_BYTES, (double)bytes);
}

// Begins a named range of enqueued work, for Nsight Systems (nsys profile ./train_fp8cu ...). It costs almost nothing
// without a profiler. `number` is appended to the name unless negative. Ranges nest.
static inline void profile_range_begin(const char *name, int64_t number) {
#if PROFILE_HAS_NVTX
    char text[64];
    if (number < 0) format_checked(text, sizeof text, "%s", name);
    else format_checked(text, sizeof text, "%s %lld", name, (long long)number);
    nvtxRangePushA(text);
#else
    (void)name, (void)number;
#endif
}

static inline void profile_range_end(void) {
#if PROFILE_HAS_NVTX
    nvtxRangePop();
#endif
}

// Starts profiling; work enqueued before is not counted.
static inline void profile_begin(Profile *p, cudaStream_t stream) {
    p->on = true, p->stream = stream;
    profile_mark(p, "", PROFILE_WAIT, 0);
}

static inline void profile_end(Profile *p) { p->on = false; }

static inline int profile_compare(const void *a, const void *b) {
    const double x = ((const ProfileOp *)a)->ms, y = ((const ProfileOp *)b)->ms;
    return x < y ? 1 : x > y ? -1 : 0;
}

// Sums the marks by operation into `ops`, longest operation first, and returns how many operations there are. Dies if
// there are more than PROFILE_MAX_OPS. All marked work must have completed.
static inline int profile_sum(const Profile *p, ProfileOp *ops) {
    int count = 0;
    for (int64_t i = 1; i < p->count; i++) {
        const ProfileMark *m = &p->marks[i];
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, p->marks[i - 1].done, m->done));
        int at = 0;
        while (at < count && (strcmp(ops[at].op, m->op) != 0 || ops[at].bound != m->bound)) at++;
        if (at == PROFILE_MAX_OPS) die("more than %d operations in a profile", PROFILE_MAX_OPS);
        if (at == count) {
            const ProfileOp fresh = {m->op, m->bound, 0, 0, 0};
            ops[count++] = fresh;
        }
        ops[at].calls++, ops[at].ms += ms, ops[at].work += m->work;
    }
    qsort(ops, (size_t)count, sizeof *ops, profile_compare);
    return count;
}

// Returns the GPU's copy rate in bytes per second, reads plus writes: the fastest of five copies of `bytes` from the
// first half of `buffer`, which has 2 * bytes, to the second. Overwrites the second half.
static inline double profile_copy_rate(char *buffer, int64_t bytes, cudaStream_t stream) {
    cudaEvent_t begin, end;
    float best = INFINITY;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    for (int run = 0; run < 5; run++) {
        float ms = 0;
        CUDA_CHECK(cudaEventRecord(begin, stream));
        CUDA_CHECK(cudaMemcpyAsync(buffer + bytes, buffer, (size_t)bytes, cudaMemcpyDeviceToDevice, stream));
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (ms < best) best = ms;
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return 2.0 * (double)bytes / (best * 1e-3);
}

// Adds an operation to a JSON array. limit: the GPU's limit for this operation, in bytes or FLOPs per second; 0:
// unknown.
static inline void profile_add(JsonText *parts, const ProfileOp *o, double limit) {
    const char *const kinds[] = {"wait", "memory", "bf16 gemm", "fp8 gemm"};  // in the order of ProfileBound
    json_text_add(parts, "%s{\"name\": ", parts->size ? ", " : "");
    json_text_add_string(parts, o->op);
    json_text_add(parts, ", \"kind\": \"%s\", \"calls\": %lld, \"ms\": ", kinds[o->bound], (long long)o->calls);
    json_text_add_real(parts, o->ms);
    json_text_add(parts, ", \"speed_of_light_ms\": ");
    if (o->bound != PROFILE_WAIT && limit > 0) json_text_add_real(parts, 1e3 * o->work / limit);
    else json_text_add(parts, "null");
    json_text_add(parts, "}");
}

// Prints the table, adds its rows to the JSON array `parts`, and clears the marks. peak_bf16 is the dense peak in
// FLOP/s (0: unknown). It limits bf16 GEMMs and attention; twice that limits FP8 GEMMs. copy_rate, in bytes per second,
// limits operations that are counted in bytes.
static inline void profile_print(Profile *p, double peak_bf16, double copy_rate, JsonText *parts) {
    ProfileOp ops[PROFILE_MAX_OPS];
    double total = 0;
    const int count = profile_sum(p, ops);
    for (int i = 0; i < count; i++) total += ops[i].ms;
    printf("\nprofile of the last step: %.2f ms; a copy moves %.2f TB/s\n  %-38s %6s %9s %7s %10s %8s\n", total,
           copy_rate * 1e-12, "operation", "calls", "ms", "share", "rate", "of limit");
    for (int i = 0; i < count; i++) {
        const ProfileOp *o = &ops[i];
        const double rate = o->work / (o->ms * 1e-3), limit = o->bound == PROFILE_BYTES       ? copy_rate
                                                              : o->bound == PROFILE_FLOPS_FP8 ? 2 * peak_bf16
                                                                                              : peak_bf16;
        char speed[32] = "", share[32] = "";
        if (o->bound != PROFILE_WAIT)
            format_checked(speed, sizeof speed, o->bound == PROFILE_BYTES ? "%.0f GB/s" : "%.0f TFLOP/s",
                           rate * (o->bound == PROFILE_BYTES ? 1e-9 : 1e-12));
        if (o->bound != PROFILE_WAIT && limit > 0) format_checked(share, sizeof share, "%.1f%%", 100 * rate / limit);
        profile_add(parts, o, limit);
        printf("  %-38s %6lld %9.3f %6.1f%% %12s %8s\n", o->op, (long long)o->calls, o->ms, 100 * o->ms / total, speed,
               share);
    }
    for (int64_t i = 0; i < p->count; i++) CUDA_CHECK(cudaEventDestroy(p->marks[i].done));
    free(p->marks);
    memset(p, 0, sizeof *p);
}

#endif
