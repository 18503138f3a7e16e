// The GPU trainer with a rank that flips a bit of the first layer's input (faulty_rank.h): for tests of --replay-every.
#include "faulty_rank.h"

#include "../../../llmc/kernels/embedding.cuh"

static __global__ void flip_bit_kernel(bf16 *x) { *(uint16_t *)x ^= 1 << 5; }

static inline int64_t faulty_embedding_forward(bf16 *x, const bf16 *table, const int32_t *tokens, int64_t R, int64_t C,
                                               cudaStream_t stream) {
    const int64_t bytes = embedding_forward(x, table, tokens, R, C, stream);
    if (pass_is_faulty()) CUDA_LAUNCH(flip_bit_kernel, 1, 1, 0, stream, x + R * C / 2);
    return bytes;
}

#define embedding_forward faulty_embedding_forward
#include "../../../train_fp8.cu"
