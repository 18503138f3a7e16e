// The GPU trainer on one rank with --grad-accum-dtype fp8, which also adds the gradients of the layers' matrices in
// fp32, and compares its FP8 sums with these after 16, 64 and 256 micro-steps.
#include "sums_fp8.h"

#include "../../../llmc/optimizer/gradient_fp8.cuh"

enum { FIT_THREADS = 256 };

// Adds gradients [n] to `exact`, or stores them there.
static __global__ void exact_kernel(float *exact, const bf16 *gradients, bool add, int64_t n) {
    grid_dependency_wait();
    for (int64_t i = blockIdx.x * (int64_t)FIT_THREADS + threadIdx.x; i < n; i += (int64_t)gridDim.x * FIT_THREADS)
        exact[i] = (add ? exact[i] : 0) + __bfloat162float(gradients[i]);
}

static __global__ void fit_kernel(double *fit, GradientFp8 sums, const float *exact,
                                  const __grid_constant__ GradientFp8Layout a) {
    grid_dependency_wait();
    const GradientFp8Tensor t = a.tensors[blockIdx.y];
    double own[FIT_SUMS] = {};
    for (int64_t i = t.begin + blockIdx.x * FIT_THREADS + threadIdx.x; i < t.end;
         i += (int64_t)gridDim.x * FIT_THREADS) {
        const double sum = gradient_fp8_value(sums.codes[i], sums.scale_inv[t.entry]), want = exact[i];
        own[FIT_PRODUCT] += sum * want, own[FIT_EXACT] += want * want, own[FIT_FP8] += sum * sum;
        own[FIT_DIFFERENCE] += (sum - want) * (sum - want);
    }
    for (int k = 0; k < FIT_SUMS; k++) atomicAdd(fit + k, own[k]);
}

static int64_t compared_join(GradientFp8 to, const GradientFp8Layout *a, int64_t l, const bf16 *gradients,
                             GradientSum how, cudaStream_t stream) {
    static float *exact;
    static double *fit;
    static int64_t micro_steps;  // each begins with the last layer
    const bool is_first = l == a->layers - 1;
    const int64_t bytes = gradient_fp8_join(to, a, l, gradients, how, stream);
    if (!exact) {
        CUDA_CHECK(cudaMalloc((void **)&exact, (size_t)(a->layers * a->matrices) * sizeof *exact));
        CUDA_CHECK(cudaMallocManaged((void **)&fit, FIT_SUMS * sizeof *fit));
    }
    if (is_first) micro_steps = how.add ? micro_steps + 1 : 1;
    CUDA_LAUNCH(exact_kernel, 1024, FIT_THREADS, 0, stream, exact + l * a->matrices, gradients, how.add, a->matrices);
    if (!fit_is_due(micro_steps)) return bytes;
    if (is_first) CUDA_CHECK(cudaMemsetAsync(fit, 0, FIT_SUMS * sizeof *fit, stream));
    CUDA_LAUNCH(fit_kernel, dim3(64, (unsigned)a->count), FIT_THREADS, 0, stream, fit, gradient_fp8_of_layer(to, a, l),
                exact + l * a->matrices, *a);
    if (l > 0) return bytes;
    CUDA_CHECK(cudaStreamSynchronize(stream));
    fit_print(fit, micro_steps);
    return bytes;
}

#define gradient_fp8_join compared_join
#include "../../../train_fp8.cu"
