// Sums over rows in a fixed order: gradients of norm weights, from partial sums, and of biases.
#ifndef LLMC_COLUMN_SUMS_CUH
#define LLMC_COLUMN_SUMS_CUH

#include "cuda_utils.cuh"

enum { COLUMN_SUMS_WARPS = 32 };

// Computes sums_out [C] = sum over the rows of partials [count, C]. A block of 32 x 32 threads takes 32 columns; warp w
// adds rows w, w + 32, ..., then one warp adds up the warps' sums.
static __global__ void __launch_bounds__(COLUMN_SUMS_WARPS *WARP_SIZE)
    column_sums_finish_kernel(bf16 *sums_out, const float *partials, int count, int C) {
    grid_dependency_wait();
    __shared__ float sums[COLUMN_SUMS_WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE,
              column = (int)blockIdx.x * WARP_SIZE + lane;
    float sum = 0;
    if (column < C) {
#pragma unroll 8
        for (int i = warp; i < count; i += COLUMN_SUMS_WARPS) sum += partials[(int64_t)i * C + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= C) return;
    for (int w = 1; w < COLUMN_SUMS_WARPS; w++) sum += sums[w][lane];
    sums_out[column] = __float2bfloat16_rn(sum);
}

// Writes out [C] = sum over the rows of partials [count, C], rounded to bf16.
static inline void column_sums_finish(bf16 *out, const float *partials, int64_t count, int64_t C, cudaStream_t stream) {
    CUDA_LAUNCH(column_sums_finish_kernel, grid_size(C, WARP_SIZE), COLUMN_SUMS_WARPS * WARP_SIZE, 0, stream, out,
                partials, (int)count, (int)C);
}

enum { BIAS_THREADS = 256, BIAS_WARPS = BIAS_THREADS / WARP_SIZE, BIAS_COLUMNS = 8 * WARP_SIZE, BIAS_MAX_PARTS = 64 };

// blockIdx.x selects 256 columns, blockIdx.y a part of the rows. Writes partials [parts, columns]. Warp w adds rows w,
// w + 8, ... of the part, then the warps' sums are added in order.
static __global__ void __launch_bounds__(BIAS_THREADS)
    bias_backward_kernel(float *partials, const bf16 *dy, int64_t rows, int columns) {
    grid_dependency_wait();
    __shared__ float sums[BIAS_WARPS][BIAS_COLUMNS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE,
              column = (int)blockIdx.x * BIAS_COLUMNS + lane * 8;
    const int64_t share = ceil_div(rows, gridDim.y), begin = blockIdx.y * share,
                  end = begin + share < rows ? begin + share : rows;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (column < columns) {
#pragma unroll 4
        for (int64_t row = begin + warp; row < end; row += BIAS_WARPS) {
            float d[8];
            bf16x8_unpack(d, bf16x8_load(dy + row * columns + column));
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += d[j];
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) sums[warp][lane * 8 + j] = sum[j];
    __syncthreads();
    const int c = (int)blockIdx.x * BIAS_COLUMNS + (int)threadIdx.x;
    if (c >= columns) return;
    float total = sums[0][threadIdx.x];
    for (int w = 1; w < BIAS_WARPS; w++) total += sums[w][threadIdx.x];
    partials[blockIdx.y * (int64_t)columns + c] = total;
}

static inline int64_t bias_parts(int64_t rows) { return min_i64(BIAS_MAX_PARTS, ceil_div(rows, 4 * BIAS_WARPS)); }

// Writes dbias [columns] = sum over the rows of dy [rows, columns], rounded to bf16. workspace holds
// bias_workspace_bytes. Dies unless rows is at least 1 and columns a multiple of 8.
static inline void bias_backward(bf16 *dbias, const bf16 *dy, int64_t rows, int64_t columns, void *workspace,
                                 cudaStream_t stream) {
    if (rows < 1 || columns < 8 || columns % 8 || columns > INT_MAX)
        die("bias_backward: dy has %lld rows and %lld columns; at least 1 row and a multiple of 8 columns, from 8 to "
            "2^31 - 8, are needed",
            (long long)rows, (long long)columns);
    require_aligned16(dy, "bias_backward", "dy");
    const dim3 grid(grid_size(columns, BIAS_COLUMNS), (unsigned)bias_parts(rows));
    CUDA_LAUNCH(bias_backward_kernel, grid, BIAS_THREADS, 0, stream, (float *)workspace, dy, rows, (int)columns);
    column_sums_finish(dbias, (const float *)workspace, bias_parts(rows), columns, stream);
}

// Returns the bytes of device workspace that bias_backward needs.
static inline size_t bias_workspace_bytes(int64_t rows, int64_t columns) {
    return (size_t)(bias_parts(rows) * columns) * sizeof(float);
}

#endif
