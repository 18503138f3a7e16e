// Token embedding: x [R, C] = table[token], and its gradient.
//
// The gradient is a sum over the rows that hold the same token. Instead of atomics, whose order changes from run to
// run, the host sorts the batch's tokens by id before the step (embedding_sort) and a block adds up the rows of an id
// in a fixed order: the same bits in every run. Ranks that share a table each add, to their part of its gradient, what
// the tokens of all of them give. Bytes: forward 2 read + 2 written an element of x; backward 2 read an element of dx,
// 2 read + 2 written an element of each row of the table that occurs. C must be a multiple of 8.
#ifndef LLMC_EMBEDDING_CUH
#define LLMC_EMBEDDING_CUH

#include "gradient_sum.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// The part of a table [V, C] that a rank keeps: `count` elements from element `first` on, both multiples of 8. It need
// not begin or end with a row.
typedef struct {
    int64_t first, count;
} EmbeddingPart;

// The index: rows of a batch of R tokens grouped by token id, as int32 in one buffer, so that one copy brings it to the
// GPU. Tokens whose row of the table is not in the rank's part, not even in part, are left out.
//     [0]               number of distinct ids, n
//     [1 .. R]          rows, sorted by id and within an id by row
//     [R+1 .. 2R+1]     where each id's rows begin in that list; one more entry closes the last
//     [2R+2 .. 3R+1]    the ids
// Of each list only the entries that are there are written.

static inline int64_t embedding_index_size(int64_t R) { return 3 * R + 2; }

// Fills index (host memory, embedding_index_size(R) items) for tokens [R], all in [0, 2^24). Radix sort by 8 bits at a
// time, which keeps the order of equals.
static inline void embedding_sort(int32_t *index, const int32_t *tokens, int64_t R, int64_t C, EmbeddingPart part) {
    if (R < 1 || R > INT_MAX / 4)
        die("embedding_sort: %lld tokens in a batch, must be between 1 and %d", (long long)R, INT_MAX / 4);
    int32_t *rows = index + 1, *begins = index + R + 1, *ids = index + 2 * R + 2, *from = begins, *to = rows;
    int64_t count = 0;
    for (int64_t i = 0; i < R; i++)
        if ((tokens[i] + 1) * C > part.first && tokens[i] * C < part.first + part.count) from[count++] = (int32_t)i;
    for (int shift = 0; shift < 24; shift += 8) {
        int64_t place[257] = {0};
        for (int64_t i = 0; i < count; i++) place[(tokens[from[i]] >> shift & 255) + 1]++;
        for (int d = 0; d < 256; d++) place[d + 1] += place[d];
        for (int64_t i = 0; i < count; i++) to[place[tokens[from[i]] >> shift & 255]++] = from[i];
        int32_t *swap = from;
        from = to, to = swap;
    }
    int32_t n = 0;  // after three passes the sorted rows are where they belong, and `begins` is free
    for (int64_t i = 0; i < count; i++) {
        if (i > 0 && tokens[rows[i]] == tokens[rows[i - 1]]) continue;
        begins[n] = (int32_t)i;
        ids[n++] = tokens[rows[i]];
    }
    begins[n] = (int32_t)count;
    index[0] = n;
}

// ---------------------------------------------------------------------------------------------------------------------
// Device

enum { EMBEDDING_THREADS = 128, EMBEDDING_WARPS = EMBEDDING_THREADS / WARP_SIZE, EMBEDDING_COLUMNS = 8 * WARP_SIZE };

static __global__ void embedding_forward_kernel(bf16 *x, const bf16 *table, const int32_t *tokens, int C) {
    grid_dependency_wait();
    const bf16 *from = table + (int64_t)tokens[blockIdx.x] * C;
    bf16 *to = x + (int64_t)blockIdx.x * C;
    for (int c = (int)threadIdx.x * 8; c < C; c += (int)blockDim.x * 8) bf16x8_store(to + c, bf16x8_load(from + c));
}

static inline void embedding_check(const char *function, int64_t R, int64_t C, const void *table, const void *x) {
    if (C < 8 || C % 8 || C > INT_MAX / 2) die("%s: hidden size %lld must be a multiple of 8", function, (long long)C);
    if (R < 1 || R > INT_MAX / 4)
        die("%s: %lld tokens in a batch, must be between 1 and %d", function, (long long)R, INT_MAX / 4);
    require_aligned16(table, function, "the table");
    require_aligned16(x, function, "the activations");
}

// x [R, C] = table [V, C] at tokens [R] (device), which must be valid ids. Returns the bytes that it moves.
static inline int64_t embedding_forward(bf16 *x, const bf16 *table, const int32_t *tokens, int64_t R, int64_t C,
                                        cudaStream_t stream) {
    embedding_check("embedding_forward", R, C, table, x);
    const int64_t threads = min_i64(256, round_up(C / 8, WARP_SIZE));
    CUDA_LAUNCH(embedding_forward_kernel, grid_size(R, 1), (unsigned)threads, 0, stream, x, table, tokens, (int)C);
    return R * C * 4;
}

// blockIdx.y: 256 columns; blockIdx.x: every gridDim.x-th id. Warp w adds up the id's rows w, w + EMBEDDING_WARPS, ...;
// then the warps are added in order.
template <class Sum>
static __global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_backward_kernel(Sum *dtable, EmbeddingPart part, GradientSum to, const bf16 *dx, const int32_t *index,
                              int64_t R, int C) {
    grid_dependency_wait();
    __shared__ float sums[EMBEDDING_WARPS][EMBEDDING_COLUMNS];
    const int32_t *rows = index + 1, *begins = index + R + 1, *ids = index + 2 * R + 2;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE,
              column = (int)blockIdx.y * EMBEDDING_COLUMNS + lane * 8;
    for (int s = (int)blockIdx.x; s < index[0]; s += (int)gridDim.x) {
        const int end = begins[s + 1];
        const int64_t place = (int64_t)ids[s] * C + column - part.first;  // in the part
        const bool kept = column < C && place >= 0 && place < part.count;
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (kept) {
#pragma unroll 4
            for (int i = begins[s] + warp; i < end; i += EMBEDDING_WARPS) {
                float d[8];
                bf16x8_unpack(d, bf16x8_load(dx + (int64_t)rows[i] * C + column));
#pragma unroll
                for (int j = 0; j < 8; j++) sum[j] += d[j];
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) sums[warp][j * WARP_SIZE + lane] = sum[j];
        __syncthreads();
        if (warp == 0 && kept) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                for (int w = 1; w < EMBEDDING_WARPS; w++) sum[j] += sums[w][j * WARP_SIZE + lane];
            gradient_join_8(dtable + place, sum, place, to);
        }
        __syncthreads();
    }
}

// dtable [part.count], bf16 or fp32, += for each id in `index` (device) the sum of its rows of dx [R, C], as far as
// they are in the part: fp32, and rounded once if dtable is bf16, to nearest or as `rounding` says (its `flat`: of
// dtable's first element). Other rows are not touched. The caller has cleared it, or has left in it what the gradient
// joins: a tied lm_head's, or that of earlier micro-steps. Returns the bytes that it moves.
template <class Sum>
static inline int64_t embedding_backward(Sum *dtable, EmbeddingPart part, const bf16 *dx, const int32_t *index,
                                         int64_t R, int64_t C, GradientSum rounding, cudaStream_t stream) {
    embedding_check("embedding_backward", R, C, dtable, dx);
    if (part.first % 8 || part.count % 8)
        die("embedding_backward: %lld elements from %lld on: multiples of 8 are needed", (long long)part.count,
            (long long)part.first);
    const dim3 grid((unsigned)min_i64(R, 1024), grid_size(C, EMBEDDING_COLUMNS));
    rounding.add = true;
    CUDA_LAUNCH(embedding_backward_kernel<Sum>, grid, EMBEDDING_THREADS, 0, stream, dtable, part, rounding, dx, index,
                R, (int)C);
    return R * C * 6;
}

#endif
