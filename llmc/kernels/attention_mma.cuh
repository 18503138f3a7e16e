// Causal attention, forward and backward, with mma.sync (sm_80 and newer): the portable version.
// Formulas and data layouts are those of the Hopper kernels. Both versions round P and dS to bf16, but their results
// differ in the last bits. This one is always deterministic.
//
//   S = Q K^T / sqrt(HD) over keys u <= t      P = softmax(S) = exp(S - lse)      O = P V
//   dP = dO V^T    delta = rowsum(dO * O)      dS = P * (dP - delta)
//   dV = P^T dO    dK = dS^T Q / sqrt(HD)      dQ = dS K / sqrt(HD)
//
// A thread block has 4 warps and works on tiles of 64 rows; a warp owns 16 rows of the output tile. Tiles of the
// operands that change along the loop are loaded by cp.async in a pipeline of two stages. Backward computes S and dP
// twice, once by keys (for dK, dV) and once by queries (for dQ). That is 7 GEMMs instead of 5, but needs neither
// atomics nor buffers for partial sums. A shared-memory tile is [64][HD] bf16; 16-byte chunk c of row r is stored at
// chunk c ^ (r % 8), so ldmatrix has no bank conflicts.
//
// Kernels with MASKED keep attention within documents (AttentionDims.documents). They skip tiles in which no query sees
// a key.
#ifndef LLMC_ATTENTION_MMA_CUH
#define LLMC_ATTENTION_MMA_CUH

#include <float.h>

#include "../fp8/amax.cuh"
#include "attention_dims.h"

#define MMA_TILE 64  // rows of every tile
#define MMA_THREADS 128

// ---- tiles in shared memory (32-bit shared-space addresses)

template <int HD>
__device__ __forceinline__ uint32_t mma_chunk(uint32_t tile, int row, int chunk) {
    return tile + (uint32_t)(row * HD * 2 + ((chunk ^ (row & 7)) << 4));
}

// Starts the copy of 64 rows, from row0 on, of a [T, stride] matrix; rows from T on become zero.
template <int HD>
__device__ __forceinline__ void mma_copy_tile(uint32_t tile, const bf16 *from, int64_t stride, int64_t row0,
                                              int64_t T) {
    for (int i = (int)threadIdx.x; i < MMA_TILE * HD / 8; i += MMA_THREADS) {
        int row = i / (HD / 8), chunk = i % (HD / 8), bytes = row0 + row < T ? 16 : 0;
        const bf16 *p = from + (bytes ? (row0 + row) * stride + chunk * 8 : 0);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(mma_chunk<HD>(tile, row, chunk)),
                     "l"(__cvta_generic_to_global(p)), "r"(bytes)
                     : "memory");
    }
}

__device__ __forceinline__ void mma_ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void mma_ldmatrix_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// GEMMs. An accumulator float[N/8][4] holds 16 x N: lane l has rows l/4 (elements 0, 1) and l/4 + 8 (2, 3), columns 8j
// + 2*(l%4) + {0, 1}.

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Computes d[16 x 64] = A B^T: rows row0..row0+15 of tile a times all rows of tile b, contracted over HD.
template <int HD>
__device__ __forceinline__ void mma_rows_times_rows(float (&d)[8][4], uint32_t a, int row0, uint32_t b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; j++) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < HD / 16; k++) {
        uint32_t fa[4], fb[4];
        mma_ldmatrix(fa, mma_chunk<HD>(a, row0 + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < 4; n++) {
            mma_ldmatrix(fb, mma_chunk<HD>(b, 16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            mma_m16n8k16(d[2 * n], fa, fb[0], fb[1]);
            mma_m16n8k16(d[2 * n + 1], fa, fb[2], fb[3]);
        }
    }
}

// Computes d[16 x HD] += P B: P is a 16 x 64 accumulator rounded to bf16, B all 64 rows of tile b.
template <int HD>
__device__ __forceinline__ void mma_add_times_tile(float (&d)[HD / 8][4], const float (&p)[8][4], uint32_t b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t fa[4], fb[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            __nv_bfloat162 pair = __floats2bfloat162_rn(p[2 * k + i / 2][i % 2 * 2], p[2 * k + i / 2][i % 2 * 2 + 1]);
            fa[i] = *(const uint32_t *)&pair;
        }
#pragma unroll
        for (int n = 0; n < HD / 16; n++) {
            mma_ldmatrix_trans(fb, mma_chunk<HD>(b, 16 * k + lane % 16, 2 * n + lane / 16));
            mma_m16n8k16(d[2 * n], fa, fb[0], fb[1]);
            mma_m16n8k16(d[2 * n + 1], fa, fb[2], fb[3]);
        }
    }
}

// Writes an accumulator d, 16 x HD, as bf16 rows row0 to row0 + 15 of a [T, stride] matrix, as far as they are below T.
// Lane l multiplies its part of row row0 + l/4 + 8h by factor[h].
template <int HD>
__device__ __forceinline__ void mma_store_rows(bf16 *to, int64_t stride, int64_t row0, int64_t T,
                                               const float (&d)[HD / 8][4], const float (&factor)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t row = row0 + lane / 4 + 8 * h;
        if (row >= T) continue;
#pragma unroll
        for (int j = 0; j < HD / 8; j++)
            *(__nv_bfloat162 *)(to + row * stride + 8 * j + 2 * (lane % 4)) =
                __floats2bfloat162_rn(d[j][2 * h] * factor[h], d[j][2 * h + 1] * factor[h]);
    }
}

// ---- forward

// Returns at[t] of a sequence's Documents.starts or ends; for t from T on that of the last token. Without MASKED: 0.
template <bool MASKED>
__device__ __forceinline__ int mma_document(const int32_t *at, int64_t sequence, int64_t t, int64_t T) {
    return MASKED ? __ldg(at + sequence * T + (t < T ? t : T - 1)) : 0;
}

// Turns one tile's unscaled scores s of this thread's two rows into exp(scale * (s - max)). Updates the max (of
// unscaled scores), the output so far, and the sum so far, which is over this thread's columns only.
template <int HD>
__device__ __forceinline__ void mma_softmax(float (&s)[8][4], float (&o)[HD / 8][4], float (&row_max)[2],
                                            float (&row_sum)[2], float scale) {
    const float c = scale * LOG2_E;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float m = row_max[h];
#pragma unroll
        for (int j = 0; j < 8; j++) m = fmaxf(m, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        const float correction = exp2f((row_max[h] - m) * c);
        row_max[h] = m;
        row_sum[h] *= correction;
#pragma unroll
        for (int j = 0; j < HD / 8; j++) o[j][2 * h] *= correction, o[j][2 * h + 1] *= correction;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            s[j][2 * h] = exp2f((s[j][2 * h] - m) * c);
            s[j][2 * h + 1] = exp2f((s[j][2 * h + 1] - m) * c);
            row_sum[h] += s[j][2 * h] + s[j][2 * h + 1];
        }
    }
}

// One thread block computes the output of 64 queries of one head, over the key tiles from the first that a query sees
// up to the diagonal.
template <int HD, bool MASKED>
__global__ void __launch_bounds__(MMA_THREADS)
    attention_forward_mma_kernel(bf16 *__restrict__ out, float *__restrict__ lse, const bf16 *__restrict__ qkv,
                                 AttentionDims d, float scale) {
    grid_dependency_wait();
    extern __shared__ __align__(128) uint8_t mma_smem[];
    constexpr uint32_t TILE_BYTES = MMA_TILE * HD * 2;
    // Behind q_tile in shared memory lie K and V of pipeline stage 0, then those of stage 1.
    const uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(mma_smem), stages = q_tile + TILE_BYTES;
    const int64_t stride = (d.NH + 2 * d.NKV) * HD, block = gridDim.x - 1 - blockIdx.x;  // longest tiles first
    const int64_t head = blockIdx.y, sequence = blockIdx.z, q0 = block * MMA_TILE;
    const bf16 *base = qkv + sequence * d.T * stride, *k = base + (d.NH + head / (d.NH / d.NKV)) * HD,
               *v = k + d.NKV * HD;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;

    const int64_t first = mma_document<MASKED>(d.documents.starts, sequence, q0, d.T) / MMA_TILE,
                  last_start = mma_document<MASKED>(d.documents.starts, sequence, q0 + MMA_TILE - 1, d.T);
    const int starts[2] = {mma_document<MASKED>(d.documents.starts, sequence, q0 + row0 + lane / 4, d.T),
                           mma_document<MASKED>(d.documents.starts, sequence, q0 + row0 + lane / 4 + 8, d.T)};

    mma_copy_tile<HD>(q_tile, base + head * HD, stride, q0, d.T);
    mma_copy_tile<HD>(stages + (uint32_t)(first % 2) * 2 * TILE_BYTES, k, stride, first * MMA_TILE, d.T);
    mma_copy_tile<HD>(stages + (uint32_t)(first % 2) * 2 * TILE_BYTES + TILE_BYTES, v, stride, first * MMA_TILE, d.T);
    copy_async_commit();
    // A row may see no key of the first tiles, and -inf - -inf would be NaN.
    const float least = MASKED ? -FLT_MAX : -INFINITY;
    float o[HD / 8][4] = {{0.0f}}, row_max[2] = {least, least}, row_sum[2] = {0.0f, 0.0f};
    for (int64_t j = first; j <= block; j++) {
        const uint32_t k_tile = stages + (uint32_t)(j % 2) * 2 * TILE_BYTES,
                       next = stages + (uint32_t)((j + 1) % 2) * 2 * TILE_BYTES;
        if (j < block) {
            mma_copy_tile<HD>(next, k, stride, (j + 1) * MMA_TILE, d.T);
            mma_copy_tile<HD>(next + TILE_BYTES, v, stride, (j + 1) * MMA_TILE, d.T);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        float s[8][4];
        mma_rows_times_rows<HD>(s, q_tile, row0, k_tile);
        if (j == block) {
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (i / 4 * 8 + lane % 4 * 2 + i % 2 > row0 + lane / 4 + i % 4 / 2 * 8) s[i / 4][i % 4] = -INFINITY;
        }
        if (MASKED && j * MMA_TILE < last_start) {
#pragma unroll
            for (int i = 0; i < 32; i++)
                if ((int)j * MMA_TILE + i / 4 * 8 + lane % 4 * 2 + i % 2 < starts[i % 4 / 2])
                    s[i / 4][i % 4] = -INFINITY;
        }
        mma_softmax<HD>(s, o, row_max, row_sum, scale);
        mma_add_times_tile<HD>(o, s, k_tile + TILE_BYTES);
        __syncthreads();
    }
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], 1);
        row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], 2);
        inverse[h] = 1.0f / row_sum[h];
        const int64_t t = q0 + row0 + lane / 4 + 8 * h;
        if (lane % 4 == 0 && t < d.T) lse[(sequence * d.NH + head) * d.T + t] = row_max[h] * scale + logf(row_sum[h]);
    }
    mma_store_rows<HD>(out + (sequence * d.T * d.NH + head) * HD, d.NH * HD, q0 + row0, d.T, o, inverse);
}

// ---- backward

// Computes delta[b,h,t] = sum over HD of dout * out, with one warp per (b, t, h).
static __global__ void attention_delta_kernel(float *__restrict__ delta, const bf16 *__restrict__ dout,
                                              const bf16 *__restrict__ out, AttentionDims d) {
    grid_dependency_wait();
    const int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= d.B * d.T * d.NH) return;
    float sum = 0.0f;
    for (int64_t i = lane; i < d.HD; i += 32)
        sum += __bfloat162float(dout[row * d.HD + i]) * __bfloat162float(out[row * d.HD + i]);
    sum = warp_sum(sum);
    const int64_t h = row % d.NH, t = row / d.NH % d.T, b = row / d.NH / d.T;
    if (lane == 0) delta[(b * d.NH + h) * d.T + t] = sum;
}

// Returns lse*log2(e) and delta of one query. A query from T on gets lse = +inf, so that its P is 0.
__device__ __forceinline__ float2 mma_row_stats(const float *lse, const float *delta, int64_t t, int64_t T) {
    return t < T ? make_float2(lse[t] * LOG2_E, delta[t]) : make_float2(INFINITY, 0.0f);
}

// Turns s into P and dp into dS for one element.
__device__ __forceinline__ void mma_probability(float &s, float &dp, float2 stats, float c, bool masked) {
    s = masked ? 0.0f : exp2f(s * c - stats.x);
    dp = s * (dp - stats.y);
}

// One thread block computes dK and dV of 64 keys of one key/value head, over the GQA group's query heads and over the
// query tiles from the diagonal to the last that sees a key. S and dP are computed transposed (keys down), so P^T and
// dS^T are in the layout of the left operands of dV and dK.
template <int HD, bool MASKED>
__global__ void __launch_bounds__(MMA_THREADS)
    attention_backward_kv_mma_kernel(bf16 *__restrict__ dqkv, const bf16 *__restrict__ dout,
                                     const bf16 *__restrict__ qkv, const float *__restrict__ lse,
                                     const float *__restrict__ delta, AttentionDims d, float scale) {
    grid_dependency_wait();
    extern __shared__ __align__(128) uint8_t mma_smem[];
    constexpr uint32_t TILE_BYTES = MMA_TILE * HD * 2;
    const uint32_t k_tile = (uint32_t)__cvta_generic_to_shared(mma_smem), v_tile = k_tile + TILE_BYTES,
                   stages = v_tile + TILE_BYTES;
    const int64_t stride = (d.NH + 2 * d.NKV) * HD, group = d.NH / d.NKV, block = blockIdx.x;
    const int64_t kv_head = blockIdx.y, sequence = blockIdx.z, k0 = block * MMA_TILE;
    const int32_t *document_ends = d.documents.ends;
    const int64_t tiles =
        MASKED ? (mma_document<MASKED>(document_ends, sequence, k0 + MMA_TILE - 1, d.T) + MMA_TILE - 1) / MMA_TILE
               : gridDim.x;
    const int64_t steps = (tiles - block) * group;
    const bf16 *q = qkv + sequence * d.T * stride + kv_head * group * HD,
               *dO = dout + (sequence * d.T * d.NH + kv_head * group) * HD;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    const int64_t k_column = (d.NH + kv_head) * HD, v_column = k_column + d.NKV * HD;
    const int first_end = mma_document<MASKED>(document_ends, sequence, k0, d.T);
    const int ends[2] = {mma_document<MASKED>(document_ends, sequence, k0 + row0 + lane / 4, d.T),
                         mma_document<MASKED>(document_ends, sequence, k0 + row0 + lane / 4 + 8, d.T)};

    mma_copy_tile<HD>(k_tile, qkv + sequence * d.T * stride + k_column, stride, k0, d.T);
    mma_copy_tile<HD>(v_tile, qkv + sequence * d.T * stride + v_column, stride, k0, d.T);
    mma_copy_tile<HD>(stages, q, stride, k0, d.T);
    mma_copy_tile<HD>(stages + TILE_BYTES, dO, d.NH * HD, k0, d.T);
    copy_async_commit();
    float dk[HD / 8][4] = {{0.0f}}, dv[HD / 8][4] = {{0.0f}};
    // Step i takes head i / (tiles - block) and query tile block + i % (tiles - block).
    for (int64_t i = 0; i < steps; i++) {
        const uint32_t q_tile = stages + (uint32_t)(i % 2) * 2 * TILE_BYTES,
                       next = stages + (uint32_t)((i + 1) % 2) * 2 * TILE_BYTES;
        if (i + 1 < steps) {
            const int64_t h = (i + 1) / (tiles - block), row = (block + (i + 1) % (tiles - block)) * MMA_TILE;
            mma_copy_tile<HD>(next, q + h * HD, stride, row, d.T);
            mma_copy_tile<HD>(next + TILE_BYTES, dO + h * HD, d.NH * HD, row, d.T);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const int64_t h = i / (tiles - block), j = block + i % (tiles - block);
        const int64_t stats = (sequence * d.NH + kv_head * group + h) * d.T;
        float s[8][4], dp[8][4];
        mma_rows_times_rows<HD>(s, k_tile, row0, q_tile);
        mma_rows_times_rows<HD>(dp, v_tile, row0, q_tile + TILE_BYTES);
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = 8 * n + lane % 4 * 2 + e % 2, row = row0 + lane / 4 + e / 2 * 8;
                const float2 st = mma_row_stats(lse + stats, delta + stats, j * MMA_TILE + column, d.T);
                const bool behind = MASKED && (j + 1) * MMA_TILE > first_end && j * MMA_TILE + column >= ends[e / 2];
                mma_probability(s[n][e], dp[n][e], st, scale * LOG2_E, (j == block && row > column) || behind);
            }
        }
        mma_add_times_tile<HD>(dv, s, q_tile + TILE_BYTES);
        mma_add_times_tile<HD>(dk, dp, q_tile);
        __syncthreads();
    }
    bf16 *to = dqkv + sequence * d.T * stride;
    const float one[2] = {1.0f, 1.0f}, scales[2] = {scale, scale};
    mma_store_rows<HD>(to + k_column, stride, k0 + row0, d.T, dk, scales);
    mma_store_rows<HD>(to + v_column, stride, k0 + row0, d.T, dv, one);
}

// One thread block computes dQ of 64 queries of one head, over the key tiles from the first that a query sees up to the
// diagonal.
template <int HD, bool MASKED>
__global__ void __launch_bounds__(MMA_THREADS)
    attention_backward_q_mma_kernel(bf16 *__restrict__ dqkv, const bf16 *__restrict__ dout,
                                    const bf16 *__restrict__ qkv, const float *__restrict__ lse,
                                    const float *__restrict__ delta, AttentionDims d, float scale) {
    grid_dependency_wait();
    extern __shared__ __align__(128) uint8_t mma_smem[];
    constexpr uint32_t TILE_BYTES = MMA_TILE * HD * 2;
    const uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(mma_smem), do_tile = q_tile + TILE_BYTES,
                   stages = do_tile + TILE_BYTES;
    const int64_t stride = (d.NH + 2 * d.NKV) * HD, block = gridDim.x - 1 - blockIdx.x;
    const int64_t head = blockIdx.y, sequence = blockIdx.z, q0 = block * MMA_TILE;
    const bf16 *base = qkv + sequence * d.T * stride, *k = base + (d.NH + head / (d.NH / d.NKV)) * HD,
               *v = k + d.NKV * HD;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    const int64_t first = mma_document<MASKED>(d.documents.starts, sequence, q0, d.T) / MMA_TILE,
                  last_start = mma_document<MASKED>(d.documents.starts, sequence, q0 + MMA_TILE - 1, d.T);
    const int starts[2] = {mma_document<MASKED>(d.documents.starts, sequence, q0 + row0 + lane / 4, d.T),
                           mma_document<MASKED>(d.documents.starts, sequence, q0 + row0 + lane / 4 + 8, d.T)};

    mma_copy_tile<HD>(q_tile, base + head * HD, stride, q0, d.T);
    mma_copy_tile<HD>(do_tile, dout + (sequence * d.T * d.NH + head) * HD, d.NH * HD, q0, d.T);
    mma_copy_tile<HD>(stages + (uint32_t)(first % 2) * 2 * TILE_BYTES, k, stride, first * MMA_TILE, d.T);
    mma_copy_tile<HD>(stages + (uint32_t)(first % 2) * 2 * TILE_BYTES + TILE_BYTES, v, stride, first * MMA_TILE, d.T);
    copy_async_commit();
    const int64_t stats_at = (sequence * d.NH + head) * d.T;
    float2 stats[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        stats[h] = mma_row_stats(lse + stats_at, delta + stats_at, q0 + row0 + lane / 4 + 8 * h, d.T);
    float dq[HD / 8][4] = {{0.0f}};
    for (int64_t j = first; j <= block; j++) {
        const uint32_t k_tile = stages + (uint32_t)(j % 2) * 2 * TILE_BYTES,
                       next = stages + (uint32_t)((j + 1) % 2) * 2 * TILE_BYTES;
        if (j < block) {
            mma_copy_tile<HD>(next, k, stride, (j + 1) * MMA_TILE, d.T);
            mma_copy_tile<HD>(next + TILE_BYTES, v, stride, (j + 1) * MMA_TILE, d.T);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        float s[8][4], dp[8][4];
        mma_rows_times_rows<HD>(s, q_tile, row0, k_tile);
        mma_rows_times_rows<HD>(dp, do_tile, row0, k_tile + TILE_BYTES);
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = 8 * n + lane % 4 * 2 + e % 2, row = row0 + lane / 4 + e / 2 * 8;
                const bool before = MASKED && j * MMA_TILE < last_start && j * MMA_TILE + column < starts[e / 2];
                mma_probability(s[n][e], dp[n][e], stats[e / 2], scale * LOG2_E,
                                (j == block && column > row) || before);
            }
        }
        mma_add_times_tile<HD>(dq, dp, k_tile);
        __syncthreads();
    }
    const float scales[2] = {scale, scale};
    mma_store_rows<HD>(dqkv + sequence * d.T * stride + head * HD, stride, q0 + row0, d.T, dq, scales);
}

// ---- launchers

template <int HD, bool MASKED>
static inline void attention_forward_mma_launch(bf16 *out, float *lse, const bf16 *qkv, AttentionDims d,
                                                cudaStream_t stream) {
    const int bytes = 5 * MMA_TILE * HD * 2;
    const dim3 grid((unsigned)ceil_div(d.T, MMA_TILE), (unsigned)d.NH, (unsigned)d.B);
    const auto kernel = attention_forward_mma_kernel<HD, MASKED>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CUDA_LAUNCH(kernel, grid, MMA_THREADS, bytes, stream, out, lse, qkv, d, 1.0f / sqrtf((float)HD));
}

// Takes the arguments of attention_forward (attention.cuh).
static inline void attention_forward_mma(bf16 *out, float *lse, uint32_t *amax, const bf16 *qkv, AttentionDims d,
                                         cudaStream_t stream) {
    ATTENTION_INSTANCE(attention_forward_mma_launch, d)(out, lse, qkv, d, stream);
    if (amax) tensor_amax(amax, out, d.B * d.T * d.NH * d.HD, stream);
}

// Returns the bytes of backward's workspace, which holds delta [B,NH,T] fp32.
static inline size_t attention_backward_mma_workspace_bytes(AttentionDims d) {
    return (size_t)(d.B * d.NH * d.T) * sizeof(float);
}

template <int HD, bool MASKED>
static inline void attention_backward_mma_launch(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const float *lse,
                                                 const float *delta, AttentionDims d, cudaStream_t stream) {
    const int bytes = 6 * MMA_TILE * HD * 2;
    const float scale = 1.0f / sqrtf((float)HD);
    const unsigned tiles = (unsigned)ceil_div(d.T, MMA_TILE);
    const auto kv = attention_backward_kv_mma_kernel<HD, MASKED>;
    const auto q = attention_backward_q_mma_kernel<HD, MASKED>;
    CUDA_CHECK(cudaFuncSetAttribute(kv, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CUDA_CHECK(cudaFuncSetAttribute(q, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CUDA_LAUNCH(kv, dim3(tiles, (unsigned)d.NKV, (unsigned)d.B), MMA_THREADS, bytes, stream, dqkv, dout, qkv, lse,
                delta, d, scale);
    CUDA_LAUNCH(q, dim3(tiles, (unsigned)d.NH, (unsigned)d.B), MMA_THREADS, bytes, stream, dqkv, dout, qkv, lse, delta,
                d, scale);
}

// Takes the arguments of attention_backward (attention.cuh).
static inline void attention_backward_mma(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out,
                                          const float *lse, void *workspace, AttentionDims d, cudaStream_t stream) {
    float *delta = (float *)workspace;
    CUDA_LAUNCH(attention_delta_kernel, grid_size(d.B * d.T * d.NH, 8), 256, 0, stream, delta, dout, out, d);
    ATTENTION_INSTANCE(attention_backward_mma_launch, d)(dqkv, dout, qkv, lse, delta, d, stream);
}

#endif
