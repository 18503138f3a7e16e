// Delayed scaling on the GPU: amax histories and scales of all tensors in device memory (layout: delayed.h).
#ifndef LLMC_DELAYED_CUH
#define LLMC_DELAYED_CUH

#include "../gpu/cuda_utils.cuh"
#include "../reference/delayed.h"

enum { DELAYED_THREADS = 256 };

// State of delayed scaling of the tensors of consecutive layers, in device memory.
typedef struct {
    float *history, *scale;  // [layers, per_layer, window], [layers, per_layer]
    const uint32_t *amax;    // [layers, per_layer] the new amaxes, as fp32 bits
    int64_t per_layer, window;
    int margin;
    Fp8Format gradient_format;  // format of tensors from first_gradient on in each layer; the others are E4M3
    int64_t first_gradient;
} DelayedArrays;

__device__ static inline Fp8Format delayed_format(const DelayedArrays &d, int64_t tensor) {
    return tensor >= d.first_gradient ? d.gradient_format : FP8_E4M3;
}

// Updates tensors [first, first + gridDim.x) of layer blockIdx.y, one thread block per tensor. A block computes
// delayed_update() of delayed.h; all its threads shift the window.
static __global__ void __launch_bounds__(DELAYED_THREADS) delayed_update_kernel(const DelayedArrays d, int64_t first) {
    grid_dependency_wait();
    __shared__ uint32_t scratch[DELAYED_THREADS / WARP_SIZE];
    const int64_t tensor = first + blockIdx.x, number = blockIdx.y * d.per_layer + tensor;
    const uint32_t amax = d.amax[number];
    float *history = d.history + number * d.window;
    const bool counts = delayed_counts(amax);
    uint32_t largest = counts ? amax : 0;
    for (int64_t i0 = 1; counts && i0 < d.window; i0 += DELAYED_THREADS) {
        const int64_t i = i0 + threadIdx.x;
        const float old = i < d.window ? history[i] : 0,
                    next = i + 1 < d.window ? history[i + 1] : __uint_as_float(amax);
        largest = max(largest, __float_as_uint(old));
        __syncthreads();
        if (i < d.window) history[i] = next;
    }
    largest = warp_max_u32(largest);
    if (threadIdx.x % WARP_SIZE == 0) scratch[threadIdx.x / WARP_SIZE] = largest;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < DELAYED_THREADS / WARP_SIZE; w++) largest = max(largest, scratch[w]);
    d.scale[number] = delayed_scale(d.scale[number], __uint_as_float(largest), delayed_format(d, tensor), d.margin);
}

// For tensors [first, last) of each of `layers` layers, appends the new amaxes to the histories and computes new
// scales, as delayed_update() does: after an amax of zero or NaN, the history and a scale above 0 stay as they are, and
// a scale of 0 becomes 1.
static inline void delayed_update_all(const DelayedArrays *d, int64_t layers, int64_t first, int64_t last,
                                      cudaStream_t stream) {
    const dim3 grid((unsigned)(last - first), (unsigned)layers);
    CUDA_LAUNCH(delayed_update_kernel, grid, DELAYED_THREADS, 0, stream, *d, first);
}

static __global__ void delayed_raise_kernel(uint32_t *largest, const uint32_t *amax, int64_t n) {
    grid_dependency_wait();
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) largest[i] = max(largest[i], amax[i]);
}

static __global__ void delayed_begin_kernel(const DelayedArrays d, int64_t count, int64_t first, int64_t last) {
    grid_dependency_wait();
    const int64_t number = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, tensor = number % d.per_layer;
    if (number >= count || tensor < first || tensor >= last || d.scale[number] != 0) return;
    d.scale[number] = fp8_scale_te(__uint_as_float(d.amax[number]), delayed_format(d, tensor), d.margin);
}

// Gives a scale, made from its own amax, to each tensor of [first, last) in each layer whose scale is 0, because it was
// not cast yet.
static inline void delayed_begin(const DelayedArrays *d, int64_t layers, int64_t first, int64_t last,
                                 cudaStream_t stream) {
    const int64_t count = layers * d->per_layer;
    CUDA_LAUNCH(delayed_begin_kernel, grid_size(count, DELAYED_THREADS), DELAYED_THREADS, 0, stream, *d, count, first,
                last);
}

// Copies before [n] to state [n] if the step is skipped.
static __global__ void delayed_restore_kernel(float *state, const float *before, int64_t n, const uint32_t *skipped) {
    grid_dependency_wait();
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (*skipped && i < n) state[i] = before[i];
}

// Restores histories and scales, `state` [n], if the step is skipped. `before` is their copy from before the step.
// *skipped is in device memory.
static inline void delayed_restore(float *state, const float *before, int64_t n, const uint32_t *skipped,
                                   cudaStream_t stream) {
    CUDA_LAUNCH(delayed_restore_kernel, grid_size(n, DELAYED_THREADS), DELAYED_THREADS, 0, stream, state, before, n,
                skipped);
}

#endif
