// Keeps activations in pinned host memory between a layer's forward and its backward pass (--offload activations).
//
// The GPU has at most KEPT_SLOTS slots, and layer l uses slot l % KEPT_SLOTS. The activations of layer l that forward
// leaves there are copied to the host while the next layers compute. They are copied back after backward of layer l +
// KEPT_SLOTS, which uses the slot too. One stream makes all copies, since forward copies only to the host and backward
// only to the GPU. The activations of the last KEPT_SLOTS layers stay in their slots. Results do not depend on
// offloading.
//
// Two events order a slot's accesses. `used`: the compute stream has filled the slot (forward), or no longer needs what
// it holds (backward). `copied`: the copy stream has completed its copy from or to the slot. No copy is left when
// forward or backward ends, because in either pass the last layer waits for the last copy.
#ifndef LLMC_OFFLOAD_KEPT_CUH
#define LLMC_OFFLOAD_KEPT_CUH

#include "../config/step_estimate.h"
#include "activations.cuh"
#include "../gpu/cuda_utils.cuh"

// The rate of copies, each way, that dry runs assume: that of an H200 with PCIe 5.0 x16.
enum { OFFLOAD_GB_PER_S = 47 };

typedef struct {
    const KeptSpan *kept;  // [L] Activations.kept; NULL: activations are not offloaded
    int64_t layers;        // all layers of the model
    bool stores;           // true: a backward pass follows the forward pass that is being enqueued
    char *host;            // pinned: what layers have stored, one behind the other
    cudaStream_t copies;
    cudaEvent_t used[KEPT_SLOTS], copied[KEPT_SLOTS];
} KeptOffload;

// Returns how many layers have activations that leave the GPU: all but the last KEPT_SLOTS, or 0 without --offload
// activations.
static inline int64_t kept_leaving(const KeptOffload *f) { return f->kept ? max_i64(0, f->layers - KEPT_SLOTS) : 0; }

// Returns where the activations of layer l begin in host memory; with l = kept_leaving, the bytes of all that leave the
// GPU.
static inline int64_t kept_host_begin(const KeptOffload *f, int64_t l) {
    int64_t begin = 0;
    for (int64_t below = 0; below < l; below++) begin += f->kept[below].bytes;
    return begin;
}

// Estimated seconds of a micro-step's passes (step_estimate.h).
typedef struct {
    double forward, backward;
} KeptPasses;

static inline KeptPasses kept_passes(const Options *o, const ModelConfig *m, const ParameterTable *t,
                                     const Precision *p) {
    Options plain = *o;  // without recomputation, forward takes about a third of the time of both passes
    plain.recompute = RECOMPUTE_NONE, plain.fp8_activations = OFF;
    const double forward = estimate_passes(&plain, m, t, p, false) / 3;
    return KeptPasses{forward, estimate_passes(o, m, t, p, false) - forward};
}

// Prints, for a dry run, what offloading takes and moves, and whether copies take longer than computation. Prints
// nothing without --offload activations.
static inline void kept_print(const KeptOffload *f, KeptPasses s) {
    const double bytes = (double)kept_host_begin(f, kept_leaving(f)), seconds = bytes / (OFFLOAD_GB_PER_S * 1e9);
    const bool forward = seconds <= s.forward, backward = seconds <= s.backward;
    if (!f->kept) return;
    if (!kept_leaving(f)) {
        printf("%-26s none: the GPU holds the activations of %d layers, and the model has %lld\n",
               "offloaded activations", KEPT_SLOTS, (long long)f->layers);
        return;
    }
    printf("%-26s %.2f GiB of %lld layers in host memory; each micro-step copies as much there during forward, and "
           "back during backward, which takes %.1f ms each at %d GB/s (PCIe 5.0 x16); forward computes for about %.1f "
           "ms and backward for %.1f ms, %s\n",
           "offloaded activations", bytes / (1 << 30), (long long)kept_leaving(f), seconds * 1e3, OFFLOAD_GB_PER_S,
           s.forward * 1e3, s.backward * 1e3,
           forward && backward ? "so both copies hide behind computation"
           : backward          ? "so the copy there makes forward longer; the copy back hides behind backward"
                               : "so the copies make both passes longer");
}

static inline void kept_create(KeptOffload *f) {
    if (!kept_leaving(f)) return;
    f->host = (char *)host_memory_pinned("--offload activations", kept_host_begin(f, kept_leaving(f)));
    CUDA_CHECK(cudaStreamCreateWithFlags(&f->copies, cudaStreamNonBlocking));
    for (int i = 0; i < KEPT_SLOTS; i++)
        for (cudaEvent_t *event : {&f->used[i], &f->copied[i]})
            CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
}

static inline void kept_destroy(KeptOffload *f) {
    if (!kept_leaving(f)) return;
    for (int i = 0; i < KEPT_SLOTS; i++)
        for (cudaEvent_t event : {f->used[i], f->copied[i]}) CUDA_CHECK(cudaEventDestroy(event));
    CUDA_CHECK(cudaStreamDestroy(f->copies));
    CUDA_CHECK(cudaFreeHost(f->host));
}

// Called before forward or backward of layer l. If a copy concerns the layer's slot, makes the compute stream wait
// until the slot may be written (forward) or has been loaded (backward), and returns true.
static inline bool kept_begin(const KeptOffload *f, int64_t l, bool backward, cudaStream_t compute) {
    const bool waits = backward ? l < kept_leaving(f) : f->stores && kept_leaving(f) && l >= KEPT_SLOTS;
    if (waits) CUDA_CHECK(cudaStreamWaitEvent(compute, f->copied[l % KEPT_SLOTS]));
    return waits;
}

// Called after forward or backward of layer l. After forward, starts the copy of layer l to the host; after backward,
// that of layer l - KEPT_SLOTS back into the slot. Does nothing for layers that stay, and after forward without
// `stores`.
static inline void kept_end(const KeptOffload *f, int64_t l, bool backward, cudaStream_t compute) {
    const int64_t moved = backward ? l - KEPT_SLOTS : l, slot = l % KEPT_SLOTS;
    if (moved < 0 || moved >= kept_leaving(f) || (!backward && !f->stores)) return;
    char *const host = f->host + kept_host_begin(f, moved), *const gpu = f->kept[moved].begin;
    CUDA_CHECK(cudaEventRecord(f->used[slot], compute));
    CUDA_CHECK(cudaStreamWaitEvent(f->copies, f->used[slot]));
    CUDA_CHECK(cudaMemcpyAsync(backward ? gpu : host, backward ? host : gpu, (size_t)f->kept[moved].bytes,
                               cudaMemcpyDefault, f->copies));
    CUDA_CHECK(cudaEventRecord(f->copied[slot], f->copies));
}

#endif
