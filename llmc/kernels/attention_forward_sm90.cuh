// Causal attention forward for Hopper (sm_90a): a TMA producer warp feeds warpgroups of 64 query rows each.
//
// For u <= t, g = h / (NH / NKV) and scale = 1/sqrt(HD):
//   out[b,t,h,:] = sum_u softmax_u(scale * q[b,t,h,:].k[b,u,g,:]) v[b,u,g,:]
//   lse[b,h,t]   = ln(sum_u exp(scale * q[b,t,h,:].k[b,u,g,:]))
//
// It uses online softmax (Milakov and Gimelshein 2018; Dao 2023) over blocks of 128 keys, from the diagonal down to 0.
// As in FlashAttention-3 (Shah et al. 2024), the GEMM of the scores of block j and the GEMM P V of block j+1 are
// started together, and P V goes on while softmax runs on block j. The warpgroups share K and V but run independently,
// so the softmax of one overlaps the GEMMs of another. The ping-pong barriers of that paper, which make warpgroups take
// turns at the tensor cores, gained nothing at head_dim 128 on an H100. At head_dim 64 they lost: they prevent a
// warpgroup from skipping key blocks that only later rows of the tile attend to.
//
// Tiles (128 query rows of one head, or 192 at head_dim 64) are assigned to a persistent grid, longest first within a
// section (ForwardPlan), and in alternating direction. This balances the causal triangle without an atomic counter. The
// producer loads the next tile's Q, K and V during the current tile's last GEMMs. Rounding: scores, softmax and sums
// are fp32, P is rounded to bf16 before P V, and the output is rounded once. Memory traffic per token: reads (NH +
// 2*NKV)*HD bf16, writes NH*HD bf16 + NH floats; K and V are re-read from L2.
//
// With MASKED, attention stays within documents: key blocks before the document of a tile's first query are not loaded.
#ifndef LLMC_ATTENTION_FORWARD_SM90_CUH
#define LLMC_ATTENTION_FORWARD_SM90_CUH

#include "attention_dims.h"
#include "../gpu/cuda_utils.cuh"
#include "../gpu/hopper.cuh"

// Tile sizes and shared-memory layout of a thread block, by head dimension.
template <int HD>
struct ForwardTile {
    // Consumer warpgroups; registers allow 2 with 240 or 3 with 160 per thread.
    static constexpr int WARPGROUPS = HD == 128 ? 2 : 3;
    static constexpr int ROWS = 64 * WARPGROUPS;  // query rows
    static constexpr int KEYS = 128;              // keys per step
    static constexpr int STAGES = 2;              // pipeline stages of K and of V
    static constexpr int THREADS = 128 * (WARPGROUPS + 1);
    static constexpr int PRODUCER_REGISTERS = HD == 128 ? 24 : 32, CONSUMER_REGISTERS = HD == 128 ? 240 : 160;
    static constexpr uint32_t Q_BYTES = ROWS * HD * 2, KV_BYTES = KEYS * HD * 2, OUT_BYTES = 64 * HD * 2;
    static constexpr uint32_t Q = 0, K = Q_BYTES, V = K + STAGES * KV_BYTES,
                              OUT = V + STAGES * KV_BYTES;  // byte offsets
    static constexpr uint32_t BARRIERS = OUT + WARPGROUPS * OUT_BYTES;
    static constexpr uint32_t Q_FULL = BARRIERS, Q_EMPTY = BARRIERS + 8, K_FULL = BARRIERS + 16,
                              K_EMPTY = K_FULL + 8 * STAGES, V_FULL = K_EMPTY + 8 * STAGES,
                              V_EMPTY = V_FULL + 8 * STAGES, END = V_EMPTY + 8 * STAGES;
    static constexpr uint32_t SMEM_BYTES = END + 1024;  // the base is rounded up to 1024
};

// How tiles are numbered. A section is one (sequence, key/value head) pair, or several whose K and V fit in L2
// together. Tiles are ordered by section, then by query block from the last (longest) to the first, then by head.
typedef struct {
    int T, NH, NKV;
    int query_blocks, heads_per_section;  // query heads per section
    int tiles;
    float scale;            // 1 / sqrt(HD)
    const int32_t *starts;  // Documents.starts; NULL: not MASKED
} ForwardPlan;

typedef struct {
    int sequence, head, kv_head, row;  // row: first query row
} ForwardPosition;

template <int ROWS>
__device__ __forceinline__ ForwardPosition forward_position(const ForwardPlan &p, int tile) {
    int per_section = p.heads_per_section * p.query_blocks;
    int section = tile / per_section, rest = tile - section * per_section;
    int block = rest / p.heads_per_section;
    int head = section * p.heads_per_section + rest - block * p.heads_per_section;  // index over all sequences
    ForwardPosition at;
    at.sequence = head / p.NH;
    at.head = head - at.sequence * p.NH;
    at.kv_head = at.head / (p.NH / p.NKV);
    at.row = (p.query_blocks - 1 - block) * ROWS;
    return at;
}

// Returns this thread block's tile of a round; ForwardPlan.tiles or more if there is none. Rounds alternate direction
// over the grid.
__device__ __forceinline__ int forward_tile_of_round(int round) {
    int column = round & 1 ? (int)gridDim.x - 1 - (int)blockIdx.x : (int)blockIdx.x;
    return round * (int)gridDim.x + column;
}

// Returns how many blocks of KEYS keys the ROWS queries from `row` on attend to: those up to the diagonal, none past
// the end of the sequence.
template <int ROWS, int KEYS>
__device__ __forceinline__ int forward_key_blocks(int row, int T) {
    return (min(row + ROWS, T) + KEYS - 1) / KEYS;
}

// Returns where the document of query `row` begins; for rows from T on, that of the last token. Without MASKED: 0.
template <bool MASKED>
__device__ __forceinline__ int forward_document_start(const ForwardPlan &p, int sequence, int row) {
    return MASKED ? __ldg(p.starts + (int64_t)sequence * p.T + min(row, p.T - 1)) : 0;
}

#if HOPPER_DEVICE_CODE

// The producer thread. For each tile it loads K of the diagonal block, then Q, then K and V alternately, with K one
// block ahead.
template <int HD, bool MASKED>
__device__ __forceinline__ void forward_produce(const CUtensorMap *map_q, const CUtensorMap *map_kv, uint32_t smem,
                                                const ForwardPlan &plan) {
    typedef ForwardTile<HD> Tile;
    const int column_blocks = HD / 64;
    const uint64_t keep = l2_evict_last(), drop = l2_evict_first();
    PipelineState k = {0, 1}, v = {0, 1};  // All stages are empty: phase 1 of a fresh mbarrier counts as complete.
    uint32_t q_phase = 1;
    for (int round = 0, tile; (tile = forward_tile_of_round(round)) < plan.tiles; round++) {
        ForwardPosition at = forward_position<Tile::ROWS>(plan, tile);
        const int end = forward_key_blocks<Tile::ROWS, Tile::KEYS>(at.row, plan.T),
                  blocks = end - forward_document_start<MASKED>(plan, at.sequence, at.row) / Tile::KEYS;
        const int k_column = (plan.NH + at.kv_head) * column_blocks, v_column = k_column + plan.NKV * column_blocks;
        for (int j = 0; j <= blocks; j++) {
            if (j < blocks) {
                uint32_t full = smem + Tile::K_FULL + 8 * k.index;
                pipeline_wait(smem + Tile::K_EMPTY, k);
                mbarrier_arrive_expect(full, Tile::KV_BYTES);
                tma_load_4d_hint(smem + Tile::K + k.index * Tile::KV_BYTES, map_kv, full, 0, (end - 1 - j) * Tile::KEYS,
                                 k_column, at.sequence, keep);
                pipeline_next<Tile::STAGES>(k);
            }
            if (j == 0) {
                mbarrier_wait(smem + Tile::Q_EMPTY, q_phase);
                mbarrier_arrive_expect(smem + Tile::Q_FULL, Tile::Q_BYTES);
                tma_load_4d_hint(smem + Tile::Q, map_q, smem + Tile::Q_FULL, 0, at.row, at.head * column_blocks,
                                 at.sequence, drop);
                q_phase ^= 1;
            } else {
                uint32_t full = smem + Tile::V_FULL + 8 * v.index;
                pipeline_wait(smem + Tile::V_EMPTY, v);
                mbarrier_arrive_expect(full, Tile::KV_BYTES);
                tma_load_4d_hint(smem + Tile::V + v.index * Tile::KV_BYTES, map_kv, full, 0, (end - j) * Tile::KEYS,
                                 v_column, at.sequence, keep);
                pipeline_next<Tile::STAGES>(v);
            }
        }
    }
}

// Starts S = Q K^T for this warpgroup's 64 rows, and does not wait.
template <int HD, int ROWS, int KEYS, int N>
__device__ __forceinline__ void forward_start_scores(float (&s)[N], uint64_t q, uint64_t k) {
    wgmma_fence_registers(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < HD / 16; i++) {
        const int column = (i % 4) * 2;  // 32 bytes per step, in units of 16
        wgmma_ss<0, 0>(s, q + column + (i / 4) * (ROWS * 128 / 16), k + column + (i / 4) * (KEYS * 128 / 16), i > 0);
    }
    wgmma_commit();
}

// Starts O += P V, and does not wait.
template <int KEYS, int N>
__device__ __forceinline__ void forward_start_output(float (&o)[N], const uint32_t (&p)[KEYS / 16][4], uint64_t v) {
    wgmma_fence_registers(o);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) wgmma_rs<1>(o, p[i], v + i * (2048 / 16), 1);
    wgmma_commit();
}

// Sets the scores of keys after the query to -inf. row is this thread's first query (its second is row + 8), column the
// key of s[0].
template <int N>
__device__ __forceinline__ void forward_mask(float (&s)[N], int row, int column) {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (2 * j + (e & 1) > row - column + (e & 2) * 4) s[j + e] = -INFINITY;
    }
}

// Sets the scores of keys before the documents of this thread's two queries to -inf.
template <int N>
__device__ __forceinline__ void forward_mask_documents(float (&s)[N], const int (&starts)[2], int column) {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (column + 2 * j + (e & 1) < starts[e / 2]) s[j + e] = -INFINITY;
    }
}

// Awaits and releases blocks j - 1 down to `end` of keys and values, which this warp does not need. If it did not wait,
// its arrival could count for a stage's previous block, and release that while another warp still reads it.
template <class Tile>
__device__ __forceinline__ void forward_skip(uint32_t smem, int j, int end, PipelineState &k, PipelineState &v) {
    for (; j > end; j--) {
        pipeline_wait(smem + Tile::K_FULL, k);
        pipeline_release<Tile::STAGES>(smem + Tile::K_EMPTY, k);
        pipeline_wait(smem + Tile::V_FULL, v);
        pipeline_release<Tile::STAGES>(smem + Tile::V_EMPTY, v);
    }
}

// Turns one block of scores of this thread's two rows into exp2(c * (s - max)), c = scale * log2(e). Updates the rows'
// running max, and the running sum, which is over this thread's columns only. correction is the factor for values
// accumulated under the old max.
template <int N>
__device__ __forceinline__ void forward_softmax(float (&s)[N], float (&row_max)[2], float (&row_sum)[2],
                                                float (&correction)[2], float c) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        // Two independent chains each for the max and the sum shorten the wait for earlier results.
        float m0 = row_max[h], m1 = s[2 * h];
#pragma unroll
        for (int j = 2 * h; j < N; j += 4) {
            m0 = fmaxf(m0, s[j]);
            m1 = fmaxf(m1, s[j + 1]);
        }
        m0 = fmaxf(m0, m1);
        m0 = fmaxf(m0, __shfl_xor_sync(0xffffffffu, m0, 1));
        m0 = fmaxf(m0, __shfl_xor_sync(0xffffffffu, m0, 2));
        const float offset = m0 * c;
        correction[h] = exp2_approx(fmaf(row_max[h], c, -offset));
        row_max[h] = m0;
        float sum0 = row_sum[h] * correction[h], sum1 = 0.0f;
#pragma unroll
        for (int j = 2 * h; j < N; j += 4) {
            s[j] = exp2_approx(fmaf(s[j], c, -offset));
            s[j + 1] = exp2_approx(fmaf(s[j + 1], c, -offset));
            sum0 += s[j];
            sum1 += s[j + 1];
        }
        row_sum[h] = sum0 + sum1;
    }
}

// Converts accumulator layout to A-operand layout, rounded to bf16.
template <int N>
__device__ __forceinline__ void forward_pack(uint32_t (&p)[N / 8][4], const float (&s)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

template <int N>
__device__ __forceinline__ void forward_rescale(float (&o)[N], const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < N; j++) o[j] *= factor[(j / 2) % 2];
}

// Divides by the sums, writes lse, and stores the 64 x HD output through shared memory with TMA, which drops rows from
// T on. packed_amax is the running maximum of the magnitudes of rows before T (amax_update in cuda_utils.cuh).
template <int HD, int N>
__device__ __forceinline__ void forward_finish(float (&o)[N], const float (&row_max)[2], float (&row_sum)[2],
                                               uint32_t staging, const CUtensorMap *map_out, float *lse,
                                               const ForwardPlan &plan, const ForwardPosition &at, int warpgroup,
                                               uint32_t &packed_amax) {
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4, row = at.row + 64 * warpgroup;
    uint32_t magnitude[2];  // mask of a row's magnitude bits; 0 for rows from T on
    const int barrier = 1 + warpgroup;
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], 1);
        row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], 2);
        inverse[h] = 1.0f / row_sum[h];
        const int t = row + 16 * warp + 8 * h + lane / 4;
        magnitude[h] = t < plan.T ? 0x7fff7fffu : 0;
        if (lane % 4 == 0 && t < plan.T)
            lse[((int64_t)at.sequence * plan.NH + at.head) * plan.T + t] =
                fmaf(row_max[h], plan.scale, logf(row_sum[h]));
    }
    forward_rescale(o, inverse);
    const bool leader = threadIdx.x % 128 == 0;
    // Waits until the store of the previous tile has read the staging buffer.
    if (leader) bulk_wait_read<0>();
    named_barrier_sync(barrier, 128);
    const int in_tile = 16 * warp + lane % 16, swizzle = lane % 8;
#pragma unroll
    for (int i = 0; i < HD / 16; i++) {
        const int chunk = (i % 4) * 2 + lane / 16;
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            packed[j] = pack_bf16(o[8 * i + 2 * j], o[8 * i + 2 * j + 1]);
            packed_amax = amax_larger(packed_amax, packed[j] & magnitude[j % 2]);
        }
        stmatrix_x4(staging + (i / 4) * (64 * 128) + in_tile * 128 + ((chunk ^ swizzle) << 4), packed[0], packed[1],
                    packed[2], packed[3]);
    }
    fence_async_proxy();
    named_barrier_sync(barrier, 128);
    if (leader) {
        tma_store_4d(map_out, staging, 0, row, at.head * (HD / 64), at.sequence);
        bulk_commit();
    }
}

// Consumer warpgroup: computes its 64 rows of every tile of this thread block.
template <int HD, bool MASKED>
__device__ __forceinline__ void forward_consume(const CUtensorMap *map_out, float *lse, uint32_t *amax, uint32_t smem,
                                                const ForwardPlan &plan, int warpgroup) {
    typedef ForwardTile<HD> Tile;
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
    const float c = plan.scale * LOG2_E;
    const uint64_t q_desc = wgmma_desc_k_major(smem + Tile::Q + warpgroup * (64 * 128));
    const uint64_t k_desc = wgmma_desc_k_major(smem + Tile::K),
                   v_desc = wgmma_desc_mn_major(smem + Tile::V, Tile::KEYS * 128);
    PipelineState k = {0, 0}, v = {0, 0};
    uint32_t q_phase = 0, packed_amax = 0;
    for (int round = 0, tile; (tile = forward_tile_of_round(round)) < plan.tiles; round++) {
        const ForwardPosition at = forward_position<Tile::ROWS>(plan, tile);
        const int first_row = at.row + 64 * warpgroup, row = first_row + 16 * warp + lane / 4;
        const int loaded = forward_key_blocks<Tile::ROWS, Tile::KEYS>(at.row, plan.T),
                  blocks = forward_key_blocks<64, Tile::KEYS>(first_row, plan.T);
        const int first = forward_document_start<MASKED>(plan, at.sequence, first_row) / Tile::KEYS,
                  first_loaded = forward_document_start<MASKED>(plan, at.sequence, at.row) / Tile::KEYS,
                  last_start = forward_document_start<MASKED>(plan, at.sequence, first_row + 63);
        const int starts[2] = {forward_document_start<MASKED>(plan, at.sequence, row),
                               forward_document_start<MASKED>(plan, at.sequence, row + 8)};
        forward_skip<Tile>(smem, loaded, blocks, k, v);
        float s[Tile::KEYS / 2], o[HD / 2] = {0.0f}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.0f, 0.0f},
                                        correction[2];
        uint32_t p[Tile::KEYS / 16][4];

        mbarrier_wait(smem + Tile::Q_FULL, q_phase);
        pipeline_wait(smem + Tile::K_FULL, k);
        forward_start_scores<HD, Tile::ROWS, Tile::KEYS>(s, q_desc, k_desc + k.index * (Tile::KV_BYTES / 16));
        wgmma_wait<0>();
        wgmma_fence_registers(s);
        pipeline_release<Tile::STAGES>(smem + Tile::K_EMPTY, k);
        // Only this first block reaches past the diagonal. Each row sees one of its keys, so the maximum is finite from
        // here on.
        forward_mask(s, row, (blocks - 1) * Tile::KEYS + 2 * (lane % 4));
        if (MASKED && (blocks - 1) * Tile::KEYS < last_start)
            forward_mask_documents(s, starts, (blocks - 1) * Tile::KEYS + 2 * (lane % 4));
        forward_softmax(s, row_max, row_sum, correction, c);
        forward_pack(p, s);

        for (int j = blocks - 2; j >= first; j--) {  // computes scores of block j and output of block j + 1
            pipeline_wait(smem + Tile::K_FULL, k);
            forward_start_scores<HD, Tile::ROWS, Tile::KEYS>(s, q_desc, k_desc + k.index * (Tile::KV_BYTES / 16));
            pipeline_wait(smem + Tile::V_FULL, v);
            forward_start_output<Tile::KEYS>(o, p, v_desc + v.index * (Tile::KV_BYTES / 16));
            wgmma_wait<1>();
            wgmma_fence_registers(s);
            pipeline_release<Tile::STAGES>(smem + Tile::K_EMPTY, k);
            if (MASKED && j * Tile::KEYS < last_start)
                forward_mask_documents(s, starts, j * Tile::KEYS + 2 * (lane % 4));
            forward_softmax(s, row_max, row_sum, correction, c);
            wgmma_wait<0>();
            wgmma_fence_registers(o);
            pipeline_release<Tile::STAGES>(smem + Tile::V_EMPTY, v);
            forward_rescale(o, correction);
            forward_pack(p, s);
        }
        if (lane == 0) mbarrier_arrive(smem + Tile::Q_EMPTY);
        q_phase ^= 1;
        pipeline_wait(smem + Tile::V_FULL, v);
        forward_start_output<Tile::KEYS>(o, p, v_desc + v.index * (Tile::KV_BYTES / 16));
        wgmma_wait<0>();
        wgmma_fence_registers(o);
        pipeline_release<Tile::STAGES>(smem + Tile::V_EMPTY, v);
        forward_skip<Tile>(smem, first, first_loaded, k, v);
        forward_finish<HD>(o, row_max, row_sum, smem + Tile::OUT + warpgroup * Tile::OUT_BYTES, map_out, lse, plan, at,
                           warpgroup, packed_amax);
    }
    if (amax) amax_publish_warp(amax, packed_amax);
    if (threadIdx.x % 128 == 0) bulk_wait_read<0>();  // shared memory must outlive the last store
}

#endif  // HOPPER_DEVICE_CODE

template <int HD, bool MASKED>
__global__ void __launch_bounds__(ForwardTile<HD>::THREADS, 1)
    attention_forward_sm90_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_kv,
                                  const __grid_constant__ CUtensorMap map_out, float *__restrict__ lse, uint32_t *amax,
                                  const ForwardPlan plan) {
    grid_dependency_wait();
#if HOPPER_DEVICE_CODE
    typedef ForwardTile<HD> Tile;
    extern __shared__ uint8_t shared_memory[];
    const uint32_t smem = (smem_address(shared_memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        const uint32_t consumer_warps = 4 * Tile::WARPGROUPS;
        mbarrier_init(smem + Tile::Q_FULL, 1);
        mbarrier_init(smem + Tile::Q_EMPTY, consumer_warps);
        for (int i = 0; i < Tile::STAGES; i++) {
            mbarrier_init(smem + Tile::K_FULL + 8 * i, 1);
            mbarrier_init(smem + Tile::K_EMPTY + 8 * i, consumer_warps);
            mbarrier_init(smem + Tile::V_FULL + 8 * i, 1);
            mbarrier_init(smem + Tile::V_EMPTY + 8 * i, consumer_warps);
        }
        mbarrier_init_fence();
        tensor_map_prefetch(&map_q);
        tensor_map_prefetch(&map_kv);
        tensor_map_prefetch(&map_out);
    }
    __syncthreads();
    // The shuffle tells the compiler that the value is uniform in a warp.
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<Tile::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) forward_produce<HD, MASKED>(&map_q, &map_kv, smem, plan);
    } else {
        warpgroup_reg_alloc<Tile::CONSUMER_REGISTERS>();
        forward_consume<HD, MASKED>(&map_out, lse, amax, smem, plan, warpgroup - 1);
    }
#else
    (void)map_q, (void)map_kv, (void)map_out, (void)lse, (void)amax, (void)plan;
#endif
}

template <int HD, bool MASKED>
static inline void attention_forward_sm90_launch(bf16 *out, float *lse, uint32_t *amax, const bf16 *qkv,
                                                 AttentionDims d, cudaStream_t stream) {
    typedef ForwardTile<HD> Tile;
    const int64_t columns = (d.NH + 2 * d.NKV) * HD, pairs = d.B * d.NKV, group = d.NH / d.NKV;
    const int64_t section_bytes = 32 << 20;  // L2 has 50 MB; Q and the output stream through the rest
    int64_t pairs_per_section = min_i64(pairs, max_i64(1, section_bytes / (d.T * HD * 4)));
    while (pairs % pairs_per_section) pairs_per_section--;  // equal sections keep the tile numbering simple
    ForwardPlan plan;
    plan.T = (int)d.T;
    plan.NH = (int)d.NH;
    plan.NKV = (int)d.NKV;
    plan.query_blocks = (int)ceil_div(d.T, Tile::ROWS);
    plan.heads_per_section = (int)(pairs_per_section * group);
    plan.tiles = (int)(d.B * d.NH * plan.query_blocks);
    plan.scale = 1.0f / sqrtf((float)HD);
    plan.starts = d.documents.starts;
    const CUtensorMap map_q = tensor_map_tokens(qkv, d.B, d.T, columns, Tile::ROWS, HD / 64);
    const CUtensorMap map_kv = tensor_map_tokens(qkv, d.B, d.T, columns, Tile::KEYS, HD / 64);
    const CUtensorMap map_out = tensor_map_tokens(out, d.B, d.T, d.NH * HD, 64, HD / 64);
    const auto kernel = attention_forward_sm90_kernel<HD, MASKED>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SMEM_BYTES));
    const int grid = (int)min_i64(plan.tiles, device_sm_count());
    CUDA_LAUNCH(kernel, grid, Tile::THREADS, Tile::SMEM_BYTES, stream, map_q, map_kv, map_out, lse, amax, plan);
}

// Writes out [B,T,NH*HD] bf16 and lse [B,NH,T] fp32 from qkv [B,T,(NH+2*NKV)*HD] bf16, and raises *amax to max |out|
// unless NULL. All pointers are 16-byte aligned. HD is 64 or 128, and the device has compute capability 9.0
// (hopper_available()). It neither allocates nor synchronizes.
static inline void attention_forward_sm90(bf16 *out, float *lse, uint32_t *amax, const bf16 *qkv, AttentionDims d,
                                          cudaStream_t stream) {
    ATTENTION_INSTANCE(attention_forward_sm90_launch, d)(out, lse, amax, qkv, d, stream);
}

#endif
