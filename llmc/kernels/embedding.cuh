// Token embedding: x [R, C] = table[token], and its gradient.
//
// The gradient of a token's table row is the sum of the rows of dx [R, C] at that token's places in the batch. The
// order of atomics would change from run to run. Instead the host sorts the batch's tokens by id before it sends them
// (embedding_sort), and a block adds up the rows of an id in a fixed order, so every run gives equal bits. If ranks
// shard the table, each rank can add the gradients of all ranks' tokens to its own part of the table's gradient.
//
// Bytes: forward reads 2 + writes 2 per element of x. For a whole table, backward reads 2 per element of dx. It also
// reads 2 and writes 2 per element of each row of the table's gradient whose token occurs (4 and 4 if that gradient is
// fp32). C must be a multiple of 8.
#ifndef LLMC_EMBEDDING_CUH
#define LLMC_EMBEDDING_CUH

#include "../gpu/gradient_sum.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// A rank's part of a table [V, C]: `count` elements from element `first` on, both multiples of 8. The part may begin
// and end inside a row, and may reach into padding behind the table.
typedef struct {
    int64_t first, count;
} EmbeddingPart;

// The index lists the rows of x [R, C], grouped by their token ids. It is one buffer of int32, so that one copy moves
// it to the GPU. It leaves out tokens whose table row lies wholly outside the rank's part.
//    [0]               number of distinct ids, n
//    [1 .. R]          rows, sorted by id and within an id by row
//    [R+1 .. 2R+1]     for each id, where its rows begin in that list, counted from 0; then the end of the list
//    [2R+2 .. 3R+1]    the ids
// If fewer than R rows or ids are listed, the rest of each place has no meaning.

static inline int64_t embedding_index_size(int64_t R) { return 3 * R + 2; }

// Fills index (host memory, embedding_index_size(R) items) from tokens [R], all in [0, 2^24). C: columns of the table.
// The sort is a stable radix sort with 8 bits per pass. Dies if R is less than 1 or more than INT_MAX / 4.
static inline void embedding_sort(int32_t *index, const int32_t *tokens, int64_t R, int64_t C, EmbeddingPart part) {
    if (R < 1 || R > INT_MAX / 4)
        die("embedding_sort: %lld tokens in a batch, must be between 1 and %d", (long long)R, INT_MAX / 4);
    int32_t *rows = index + 1, *begins = index + R + 1, *ids = index + 2 * R + 2, *from = begins, *to = rows;
    int64_t count = 0;
    for (int64_t i = 0; i < R; i++)
        if ((tokens[i] + 1) * C > part.first && tokens[i] * C < part.first + part.count) from[count++] = (int32_t)i;
    for (int shift = 0; shift < 24; shift += 8) {
        int64_t position[257] = {0};
        for (int64_t i = 0; i < count; i++) position[(tokens[from[i]] >> shift & 255) + 1]++;
        for (int d = 0; d < 256; d++) position[d + 1] += position[d];
        for (int64_t i = 0; i < count; i++) to[position[tokens[from[i]] >> shift & 255]++] = from[i];
        int32_t *swap = from;
        from = to, to = swap;
    }
    // After three passes the sorted rows are in their final array, and `begins` is free.
    int32_t n = 0;
    for (int64_t i = 0; i < count; i++) {
        if (i > 0 && tokens[rows[i]] == tokens[rows[i - 1]]) continue;
        begins[n] = (int32_t)i;
        ids[n++] = tokens[rows[i]];
    }
    begins[n] = (int32_t)count;
    index[0] = n;
}

// ---- device

enum { EMBEDDING_THREADS = 128, EMBEDDING_WARPS = EMBEDDING_THREADS / WARP_SIZE, EMBEDDING_COLUMNS = 8 * WARP_SIZE };

static __global__ void embedding_forward_kernel(bf16 *x, const bf16 *table, const int32_t *tokens, int C) {
    grid_dependency_wait();
    const bf16 *from = table + (int64_t)tokens[blockIdx.x] * C;
    bf16 *to = x + (int64_t)blockIdx.x * C;
    for (int c = (int)threadIdx.x * 8; c < C; c += (int)blockDim.x * 8) bf16x8_store(to + c, bf16x8_load(from + c));
}

static inline void embedding_check(const char *function, int64_t R, int64_t C, const void *table, const void *x) {
    if (C < 8 || C % 8 || C > INT_MAX / 2)
        die("%s: hidden size %lld must be a multiple of 8, from 8 to 2^30 - 8", function, (long long)C);
    if (R < 1 || R > INT_MAX / 4)
        die("%s: %lld tokens in a batch, must be between 1 and %d", function, (long long)R, INT_MAX / 4);
    require_aligned16(table, function, "the table");
    require_aligned16(x, function, "the activations");
}

// Writes x [R, C] = rows of table [V, C] at tokens [R] (device), which must be valid ids. Returns the bytes moved,
// without those of the tokens. Dies if C is not a multiple of 8, if R or C is out of range, or if a pointer is not
// 16-byte aligned.
static inline int64_t embedding_forward(bf16 *x, const bf16 *table, const int32_t *tokens, int64_t R, int64_t C,
                                        cudaStream_t stream) {
    embedding_check("embedding_forward", R, C, table, x);
    const int64_t threads = min_i64(256, round_up(C / 8, WARP_SIZE));
    CUDA_LAUNCH(embedding_forward_kernel, grid_size(R, 1), (unsigned)threads, 0, stream, x, table, tokens, (int)C);
    return R * C * 4;
}

// blockIdx.y selects 256 columns, and block x of gridDim.x takes entries x, x + gridDim.x, ... of the list of ids. Warp
// w adds up rows w, w + EMBEDDING_WARPS, ... of an id. Then the warps' sums are added in order.
template <class Sum>
static __global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_backward_kernel(Sum *dtable, EmbeddingPart part, GradientSum to, bool rounds, const bf16 *dx,
                              const int32_t *index, int64_t R, int C) {
    grid_dependency_wait();
    __shared__ float sums[EMBEDDING_WARPS][EMBEDDING_COLUMNS];
    const int32_t *rows = index + 1, *begins = index + R + 1, *ids = index + 2 * R + 2;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE,
              column = (int)blockIdx.y * EMBEDDING_COLUMNS + lane * 8;
    for (int s = (int)blockIdx.x; s < index[0]; s += (int)gridDim.x) {
        const int end = begins[s + 1];
        // Index in dtable.
        const int64_t at = (int64_t)ids[s] * C + column - part.first;
        const bool kept = column < C && at >= 0 && at < part.count;
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
            if (rounds) bf16x8_unpack(sum, bf16x8_pack(sum));
            gradient_join_8(dtable + at, sum, at, to);
        }
        __syncthreads();
    }
}

// Adds to dtable [part.count], bf16 or fp32, for each id in `index` (device), the sum of the id's rows of dx [R, C].
// dtable is the rank's part of the table's gradient; elements outside that part are left out. Sums are fp32; `rounds`:
// they are rounded to bf16 before they are added, as if they had been computed in a bf16 table of their own. If dtable
// is bf16, the sum with the old value is rounded once, to nearest or stochastically, as `rounding` says (`rounding.add`
// is not read; `rounding.flat` is the index of dtable's first element in the flat array of all parameters). Rows of
// other ids stay unchanged. The caller has cleared dtable, or has left in it a gradient to add to: of a tied lm_head,
// or of earlier micro-steps. Returns the bytes that it would move if all ids differed, the part were the whole table
// and dtable bf16. Dies as embedding_forward does, and if the part does not begin and end at multiples of 8 elements.
template <class Sum>
static inline int64_t embedding_backward(Sum *dtable, EmbeddingPart part, const bf16 *dx, const int32_t *index,
                                         int64_t R, int64_t C, GradientSum rounding, bool rounds, cudaStream_t stream) {
    embedding_check("embedding_backward", R, C, dtable, dx);
    if (part.first % 8 || part.count % 8)
        die("embedding_backward: %lld elements from %lld on: multiples of 8 are needed", (long long)part.count,
            (long long)part.first);
    const dim3 grid((unsigned)min_i64(R, 1024), grid_size(C, EMBEDDING_COLUMNS));
    rounding.add = true;
    CUDA_LAUNCH(embedding_backward_kernel<Sum>, grid, EMBEDDING_THREADS, 0, stream, dtable, part, rounding, rounds, dx,
                index, R, (int)C);
    return R * C * 6;
}

#endif
