// Receipts on the GPU: hashes of the parts of tensors in one array (receipt.h), in one pass over it.
#ifndef LLMC_RECEIPT_CUH
#define LLMC_RECEIPT_CUH

#include "../reference/receipt.h"
#include "cuda_utils.cuh"

enum { RECEIPT_THREADS = 256, RECEIPT_BLOCKS = 128 };  // threads of a block, blocks for each part
enum { RECEIPT_ADD_BLOCKS = 1056 };                    // blocks for a single part

// *sum += the hash of a part, by all blocks of the same y.
__device__ static inline void receipt_add_words(unsigned long long *sum, const void *array, int64_t bytes,
                                                ReceiptPart p) {
    const int64_t words = receipt_words(p, bytes);
    unsigned long long own = 0;
#pragma unroll 4
    for (int64_t w = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; w < words; w += gridDim.x * (int64_t)blockDim.x)
        own += receipt_word(array, bytes, p, w);
    for (int offset = 16; offset; offset /= 2) own += __shfl_down_sync(0xffffffff, own, offset);
    if (threadIdx.x % 32 == 0 && own) atomicAdd(sum, own);
}

// sums [parts] += the hashes of the parts. Blocks (x, i) hash part i.
static __global__ void receipt_kernel(unsigned long long *sums, const void *array, int64_t bytes,
                                      const ReceiptPart *parts) {
    grid_dependency_wait();
    receipt_add_words(&sums[blockIdx.y], array, bytes, parts[blockIdx.y]);
}

// *sum += the hash of a part.
static __global__ void receipt_add_kernel(unsigned long long *sum, const void *array, int64_t bytes, ReceiptPart p) {
    grid_dependency_wait();
    receipt_add_words(sum, array, bytes, p);
}

static inline void receipt_add(uint64_t *sum, const void *array, int64_t bytes, ReceiptPart p, cudaStream_t stream) {
    CUDA_LAUNCH(receipt_add_kernel, RECEIPT_ADD_BLOCKS, RECEIPT_THREADS, 0, stream, (unsigned long long *)sum, array,
                bytes, p);
}

// Bytes of the device memory that receipt_sums needs for n parts.
static inline size_t receipt_scratch_bytes(int64_t n) { return (size_t)n * (sizeof(ReceiptPart) + sizeof(uint64_t)); }

// Writes the hashes of n parts of an array to `sums`, in host memory, and waits for them. The array is in device or
// pinned host memory.
static inline void receipt_sums(uint64_t *sums, const void *array, int64_t bytes, const ReceiptPart *parts, int64_t n,
                                void *scratch, cudaStream_t stream) {
    ReceiptPart *device_parts = (ReceiptPart *)scratch;
    unsigned long long *device_sums = (unsigned long long *)(device_parts + n);
    CUDA_CHECK(cudaMemcpyAsync(device_parts, parts, (size_t)n * sizeof *parts, cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaMemsetAsync(device_sums, 0, (size_t)n * sizeof *device_sums, stream));
    CUDA_LAUNCH(receipt_kernel, dim3(RECEIPT_BLOCKS, (unsigned)n), RECEIPT_THREADS, 0, stream, device_sums, array,
                bytes, device_parts);
    CUDA_CHECK(cudaMemcpyAsync(sums, device_sums, (size_t)n * sizeof *sums, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

#endif
