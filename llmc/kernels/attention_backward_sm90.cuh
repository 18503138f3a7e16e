// Causal attention backward for Hopper (sm_90a): head_dim 64 and 128, bf16 in and out, fp32 sums.
//
//   S = Q K^T / sqrt(HD)        P = exp(S - lse)          dP = dO V^T        delta = rowsum(dO * O)
//   dS = P * (dP - delta)       dV = P^T dO               dK = dS^T Q / sqrt(HD)          dQ = dS K / sqrt(HD)
//
// This is algorithm 4 of FlashAttention (Dao et al.); P and dS are rounded to bf16 before their GEMMs. It runs three
// kernels, the first and the last from attention_backward_passes.cuh:
//  1. attention_backward_stats computes lse * log2(e) and delta of each query row, padded to whole tiles so that
//     padding rows get P = 0, and zeroes dQ and the counters.
//  2. attention_backward_main: a thread block owns 128 keys of one key/value head. It loops over the queries that see
//     them, for `heads_per_block` query heads of the GQA group. One producer thread loads K and V, then Q, dO, lse and
//     delta, by TMA. Two consumer warpgroups own 64 keys each. They compute S^T and dP^T (keys down, queries across),
//     because those accumulators, packed to bf16, are already the register operand A of dV += P^T dO and dK += dS^T Q.
//     Only dS goes through shared memory, for dQ = dS K. Two more threads add dQ to fp32 global memory by bulk adds.
//     dK and dV stay in registers until the end. Then the block writes them: as bf16 rows of dqkv, or as fp32 parts if
//     several blocks share the query heads of a GQA group.
//  3. attention_backward_rows writes dQ, scaled, as bf16 rows of dqkv. If there are fp32 parts of dK and dV, it also
//     sums them, scales dK, and writes both.
// With MASKED, attention stays within documents: queries behind the document of a block's last key are not loaded.
// A "fragment" is an fp32 tile of 64 rows x 64 columns in global memory, in the order of the wgmma accumulators:
// [column / 8][thread of the warpgroup][4]. So a thread accesses 16 contiguous bytes at a time.
#ifndef LLMC_ATTENTION_BACKWARD_SM90_CUH
#define LLMC_ATTENTION_BACKWARD_SM90_CUH

#include "attention_backward_passes.cuh"

typedef struct {
    CUtensorMap q, kv, dout, stats, dkv;
    float *dq, *partial;                              // partial NULL: dK and dV are written to dqkv
    int *order, *ticket;                              // order NULL: dQ is added in any order
    int T, NH, NKV, heads_per_block, section, heads;  // heads: B * NKV * parts of a GQA group
    Documents documents;                              // with MASKED
} AttentionBackwardParams;

// Shared memory of a thread block, as offsets from a multiple of 1024 bytes.
template <int HD> struct AttentionBackwardTiles {
    static const int MQ = HD == 128 ? 64 : 128;
    static const int STAGES = 2;
    static const int K = 0, V = K + 128 * HD * 2;
    static const int Q = V + 128 * HD * 2, Q_BYTES = MQ * HD * 2;
    static const int DO = Q + STAGES * Q_BYTES;
    static const int DS = DO + STAGES * Q_BYTES,
                     DS_BYTES = 128 * MQ * 2;  // two buffers [queries / 64][128 keys][64 queries]
    static const int STATS = DS + 2 * DS_BYTES, STATS_BYTES = 2 * MQ * 4;
    static const int DQ = STATS + STAGES * STATS_BYTES,
                     DQ_BYTES = ATTENTION_BACKWARD_FRAGMENT * 4;  // one fragment tile per consumer warpgroup
    // mbarriers of 8 bytes each: one for K and V together. Q and dO have a full and an empty one per pipeline stage, dQ
    // a full and an empty one per consumer warpgroup.
    static const int KV_FULL = DQ + 2 * DQ_BYTES;
    static const int Q_FULL = KV_FULL + 8, DO_FULL = Q_FULL + 8 * STAGES, Q_EMPTY = DO_FULL + 8 * STAGES,
                     DO_EMPTY = Q_EMPTY + 8 * STAGES;
    static const int DQ_FULL = DO_EMPTY + 8 * STAGES, DQ_EMPTY = DQ_FULL + 16;
    static const int TICKET = DQ_EMPTY + 16;
    static const int BYTES = TICKET + 8;
};

// The work unit of one thread block.
typedef struct {
    // Key tile; sequence; key/value head; first query head; index of the fp32 partial sums.
    int tile, b, kv, head, part;
    int first, last;  // query tiles [first, last)
} AttentionBackwardUnit;

#if HOPPER_DEVICE_CODE

// Returns at[t] of sequence b, of Documents.starts or ends; for t from T on that of the last token.
__device__ __forceinline__ int attention_backward_document(const int32_t *at, int b, int t, int T) {
    return __ldg(at + (int64_t)b * T + min(t, T - 1));
}

// Returns work unit `ticket`. Units are ordered by section, and within a section by key tile: units of the first key
// tile, which take longest, come first.
template <int HD, bool MASKED> __device__ __forceinline__ AttentionBackwardUnit
attention_backward_unit(const AttentionBackwardParams &p, int ticket) {
    const int MQ = AttentionBackwardTiles<HD>::MQ;
    int tiles = (p.T + 127) / 128, group = p.NH / p.NKV, parts = group / p.heads_per_block;
    int start = ticket / (tiles * p.section) * p.section, width = min(p.section, p.heads - start),
        rest = ticket - start * tiles;
    AttentionBackwardUnit u;
    u.tile = rest / width;
    u.part = start + rest % width;
    u.kv = u.part / parts % p.NKV;
    u.b = u.part / parts / p.NKV;
    u.head = u.kv * group + u.part % parts * p.heads_per_block;
    u.first = u.tile * 128 / MQ;
    const int end = MASKED ? attention_backward_document(p.documents.ends, u.b, u.tile * 128 + 127, p.T) : p.T;
    u.last = (end + MQ - 1) / MQ;
    return u;
}

// The producer thread. It loads K and V once, then for each query head Q, dO and statistics of every query tile that
// sees the keys, last tile first.
template <int HD> __device__ __forceinline__ void attention_backward_produce(const AttentionBackwardParams &p,
                                                                             AttentionBackwardUnit u, uint32_t smem) {
    using L = AttentionBackwardTiles<HD>;
    const int blocks = HD / 64;
    mbarrier_arrive_expect(smem + L::KV_FULL, 2 * 128 * HD * 2);
    tma_load_4d(smem + L::K, &p.kv, smem + L::KV_FULL, 0, u.tile * 128, (p.NH + u.kv) * blocks, u.b);
    tma_load_4d(smem + L::V, &p.kv, smem + L::KV_FULL, 0, u.tile * 128, (p.NH + p.NKV + u.kv) * blocks, u.b);
    int step = 0;
    for (int h = u.head; h < u.head + p.heads_per_block; h++)
        for (int m = u.last - 1; m >= u.first; m--, step++) {
            int stage = step % L::STAGES, parity = (step / L::STAGES & 1) ^ 1;
            uint32_t q_full = smem + L::Q_FULL + 8 * stage, do_full = smem + L::DO_FULL + 8 * stage;
            mbarrier_wait(smem + L::Q_EMPTY + 8 * stage, parity);
            mbarrier_arrive_expect(q_full, L::Q_BYTES + L::STATS_BYTES);
            tma_load_4d(smem + L::Q + stage * L::Q_BYTES, &p.q, q_full, 0, m * L::MQ, h * blocks, u.b);
            tma_load_3d(smem + L::STATS + stage * L::STATS_BYTES, &p.stats, q_full, m * L::MQ, 0, u.b * p.NH + h);
            mbarrier_wait(smem + L::DO_EMPTY + 8 * stage, parity);
            mbarrier_arrive_expect(do_full, L::Q_BYTES);
            tma_load_4d(smem + L::DO + stage * L::Q_BYTES, &p.dout, do_full, 0, m * L::MQ, h * blocks, u.b);
        }
}

// Writes this thread's part of a warpgroup's 64 x 16*STEPS bf16 tile (packed accumulator layout) to swizzled shared
// memory. The tile is stored in pieces of 64 columns, tile_bytes apart. `address` is that of the warpgroup's first row
// in the first piece.
template <int STEPS>
__device__ __forceinline__ void attention_backward_store_tile(uint32_t address, uint32_t tile_bytes,
                                                              const uint32_t (&a)[STEPS][4]) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        stmatrix_x4(address + k / 4 * tile_bytes + row * 128 + ((k % 4 * 2 + lane / 16) ^ (row % 8)) * 16, a[k][0],
                    a[k][1], a[k][2], a[k][3]);
}

template <int N> __device__ __forceinline__ void attention_backward_pack(uint32_t (&a)[N / 8][4], const float (&x)[N],
                                                                         float scale) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) a[i / 4][i % 4] = pack_bf16(x[2 * i] * scale, x[2 * i + 1] * scale);
}

// Loads two neighbouring floats from shared memory.
__device__ __forceinline__ float2 attention_backward_stat(uint32_t address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

// Starts S^T or dP^T of one warpgroup and does not wait: 64 keys (K or V rows) x MQ queries (Q or dO rows), contracted
// over HD.
template <int HD> __device__ __forceinline__ void attention_backward_scores(float (&s)[HD == 128 ? 32 : 64],
                                                                            uint32_t keys, uint32_t queries) {
    const int MQ = AttentionBackwardTiles<HD>::MQ;
    wgmma_fence_registers(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HD / 16; k++)
        wgmma_ss<0, 0>(s, wgmma_desc_k_major(keys + k / 4 * 128 * 128 + k % 4 * 32),
                       wgmma_desc_k_major(queries + k / 4 * MQ * 128 + k % 4 * 32), k != 0);
    wgmma_commit();
}

// Applies the causal mask to S^T of a thread whose first key is `key` and whose queries begin at `query`.
template <int N> __device__ __forceinline__ void attention_backward_mask(float (&s)[N], int key, int query) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (key + i % 4 / 2 * 8 > query + i / 4 * 8 + i % 2) s[i] = -INFINITY;
}

// Masks queries behind the documents of a thread's two keys, which end at ends[0] and ends[1].
template <int N>
__device__ __forceinline__ void attention_backward_mask_documents(float (&s)[N], const int (&ends)[2], int query) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (query + i / 4 * 8 + i % 2 >= ends[i % 4 / 2]) s[i] = -INFINITY;
}

// Turns S^T into P^T. stats is the shared-memory address of the base-2 log-sum-exp of this thread's first query.
template <int N> __device__ __forceinline__ void attention_backward_probabilities(float (&s)[N], uint32_t stats,
                                                                                  float scale) {
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        float2 lse = attention_backward_stat(stats + j * 32);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++) s[i] = exp2_approx(s[i] * scale - (i % 2 ? lse.y : lse.x));
    }
}

// Turns dP^T into dS^T = P^T (dP^T - delta). stats is the shared-memory address of delta of this thread's first query.
template <int N> __device__ __forceinline__ void attention_backward_dscores(float (&dp)[N], const float (&p)[N],
                                                                            uint32_t stats) {
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        float2 delta = attention_backward_stat(stats + j * 32);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++) dp[i] = p[i] * (dp[i] - (i % 2 ? delta.y : delta.x));
    }
}

// Starts dV += P^T dO or dK += dS^T Q of one warpgroup and does not wait: 64 keys x HD, contracted over the tile's
// queries.
template <int HD> __device__ __forceinline__ void
attention_backward_accumulate(float (&d)[HD / 2], const uint32_t (&a)[HD == 128 ? 4 : 8][4], uint32_t queries) {
    const int MQ = AttentionBackwardTiles<HD>::MQ;
    wgmma_fence_registers(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < MQ / 16; k++) wgmma_rs<1>(d, a[k], wgmma_desc_mn_major(queries + k * 2048, MQ * 128), 1);
    wgmma_commit();
}

// Starts dQ = dS K of warpgroup w and does not wait: 64 queries x 64 columns, contracted over the block's keys.
template <int HD> __device__ __forceinline__ void attention_backward_start_dq(float (&dq)[32], uint32_t ds,
                                                                              uint32_t keys, int w) {
    wgmma_fence_registers(dq);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++)
        wgmma_ss<1, 1>(dq, wgmma_desc_mn_major(ds + (HD == 128 ? 0 : w * 128 * 128) + k * 2048, 128 * 128),
                       wgmma_desc_mn_major(keys + k * 2048, 128 * 128), k != 0);
    wgmma_commit();
}

// Returns how many thread blocks have added to the dQ fragment that `order` counts for.
__device__ __forceinline__ int attention_backward_adds_done(const int *order) {
    int adds;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(adds) : "l"(order) : "memory");
    return adds;
}

// The thread that adds the dQ tiles of consumer warpgroup w to global memory. With p.order, thread blocks add to a tile
// in the order of their keys: this one waits until the blocks of earlier keys have added, u.tile of them or, with
// MASKED, those that the tile's first query sees.
template <int HD, bool MASKED>
__device__ __forceinline__ void attention_backward_add_dq(const AttentionBackwardParams &p, AttentionBackwardUnit u,
                                                          uint32_t smem, int w) {
    using L = AttentionBackwardTiles<HD>;
    int tiles = u.last - u.first, per_head = (p.T + 127) / 128 * (128 / L::MQ), turn = -1, parity = 0;
    // Index of the dQ fragment tile; there are two per query tile.
    int tile = ((u.b * p.NH + u.head) * per_head + u.last - 1) * 2 + w;
    for (int h = 0; h < p.heads_per_block; h++, tile += 2 * (per_head + tiles))
        for (int left = tiles; left > 0; left--, parity ^= 1, tile -= 2) {
            mbarrier_wait(smem + L::DQ_FULL + 8 * w, parity);
            if (p.order) {
                const int m = u.first + left - 1,
                          before = MASKED ? attention_backward_document(p.documents.starts, u.b, m * L::MQ, p.T) : 0;
                while (turn != u.tile - before / 128) turn = attention_backward_adds_done(p.order + tile);
                fence_async_proxy_all();
            }
            bulk_reduce_add_f32(p.dq + (int64_t)tile * ATTENTION_BACKWARD_FRAGMENT, smem + L::DQ + w * L::DQ_BYTES,
                                L::DQ_BYTES);
            bulk_commit();
            bulk_wait_read<0>();
            mbarrier_arrive(smem + L::DQ_EMPTY + 8 * w);
            if (p.order) {
                // The next tile's count is loaded early, so that its latency hides behind the add.
                turn = left > 1 ? attention_backward_adds_done(p.order + tile - 2) : -1;
                bulk_wait<0>();
                asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(p.order + tile) : "memory");
            }
        }
    bulk_wait<0>();
}

// Gives this step's dQ fragment tile to the thread that adds it.
template <int HD> __device__ __forceinline__ void attention_backward_put_dq(uint32_t smem, const float (&dq)[32],
                                                                            int step, int w) {
    using L = AttentionBackwardTiles<HD>;
    uint32_t to = smem + L::DQ + w * L::DQ_BYTES + threadIdx.x % 128 * 16;
    mbarrier_wait(smem + L::DQ_EMPTY + 8 * w, (step & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < 8; i++)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 2048), "f"(dq[4 * i]),
                     "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                     : "memory");
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem + L::DQ_FULL + 8 * w);
}

// Epilogue: writes dK and dV of this warpgroup's 64 keys, either as bf16 rows (through shared memory; TMA drops rows
// from T on) or as fp32 fragments.
template <int HD> __device__ __forceinline__ void attention_backward_write(const AttentionBackwardParams &p,
                                                                           AttentionBackwardUnit u, uint32_t smem,
                                                                           const float (&dk)[HD / 2],
                                                                           const float (&dv)[HD / 2]) {
    using L = AttentionBackwardTiles<HD>;
    int w = threadIdx.x / 128 - 1, t = threadIdx.x % 128;
    if (p.partial) {
        float4 *to = (float4 *)p.partial + ((int64_t)(u.part * ((p.T + 127) / 128) + u.tile) * 2 + w) * (HD * 32) + t;
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
            to[i * 128] = make_float4(dk[4 * i], dk[4 * i + 1], dk[4 * i + 2], dk[4 * i + 3]);
            to[(HD / 8 + i) * 128] = make_float4(dv[4 * i], dv[4 * i + 1], dv[4 * i + 2], dv[4 * i + 3]);
        }
        return;
    }
    named_barrier_sync(1, 256);  // both warpgroups have read all of K
    uint32_t a[HD / 16][4], k_rows = smem + L::K + w * 64 * HD * 2, v_rows = smem + L::V + w * 64 * HD * 2;
    attention_backward_pack(a, dk, rsqrtf((float)HD));
    attention_backward_store_tile(k_rows, 64 * 128, a);
    attention_backward_pack(a, dv, 1.0f);
    attention_backward_store_tile(v_rows, 64 * 128, a);
    fence_async_proxy();
    named_barrier_sync(2 + w, 128);
    if (t == 0) {
        tma_store_4d(&p.dkv, k_rows, 0, u.tile * 128 + w * 64, (p.NH + u.kv) * (HD / 64), u.b);
        tma_store_4d(&p.dkv, v_rows, 0, u.tile * 128 + w * 64, (p.NH + p.NKV + u.kv) * (HD / 64), u.b);
        bulk_commit();
        bulk_wait<0>();
    }
}

// Consumer warpgroup w owns keys 64w to 64w + 63 of the block's tile. It computes one half of each query tile's dQ:
// columns 64w to 64w + 63 (HD 128), or the rows of queries 64w to 64w + 63 (HD 64). wgmmas are issued so that the
// tensor cores have work during the elementwise parts: dP during P, dV and dK during the exchange of dS, the next S
// during the add of dQ. The other warpgroup fills the remaining gaps. Issuing dV before dS would need more registers
// than there are.
template <int HD, bool MASKED>
__device__ __forceinline__ void attention_backward_consume(const AttentionBackwardParams &p, AttentionBackwardUnit u,
                                                           uint32_t smem) {
    using L = AttentionBackwardTiles<HD>;
    const int MQ = L::MQ;
    int w = threadIdx.x / 128 - 1, lane = threadIdx.x % 32,
        key = u.tile * 128 + threadIdx.x / 32 % 4 * 16 + w * 64 + lane / 4;
    uint32_t my_k = smem + L::K + w * 64 * 128, my_v = smem + L::V + w * 64 * 128;
    // The columns of K that this warpgroup's dQ uses.
    uint32_t dq_k = smem + L::K + (HD == 128 ? w * 128 * 128 : 0);
    int tiles = u.last - u.first, steps = tiles * p.heads_per_block;
    float scale = LOG2_E * rsqrtf((float)HD);
    int first_end = 0, ends[2] = {0, 0};
    if (MASKED) {
        first_end = attention_backward_document(p.documents.ends, u.b, u.tile * 128 + w * 64, p.T);
        for (int h = 0; h < 2; h++) ends[h] = attention_backward_document(p.documents.ends, u.b, key + 8 * h, p.T);
    }
    float dk[HD / 2], dv[HD / 2], s[MQ / 2];
#pragma unroll
    for (int i = 0; i < HD / 2; i++) dk[i] = dv[i] = 0;

    mbarrier_wait(smem + L::KV_FULL, 0);
    mbarrier_wait(smem + L::Q_FULL, 0);
    attention_backward_scores<HD>(s, my_k, smem + L::Q);
    wgmma_wait<0>();
    wgmma_fence_registers(s);
    for (int step = 0; step < steps; step++) {
        int stage = step % L::STAGES, m = u.last - 1 - step % tiles;
        uint32_t q = smem + L::Q + stage * L::Q_BYTES, dout = smem + L::DO + stage * L::Q_BYTES,
                 ds = smem + L::DS + (step & 1) * L::DS_BYTES;
        uint32_t stats = smem + L::STATS + stage * L::STATS_BYTES + lane % 4 * 8;

        float dp[MQ / 2];
        mbarrier_wait(smem + L::DO_FULL + 8 * stage, step / L::STAGES & 1);
        attention_backward_scores<HD>(dp, my_v, dout);
        if (m * MQ < u.tile * 128 + w * 64 + 63) attention_backward_mask(s, key, m * MQ + lane % 4 * 2);
        if (MASKED && (m + 1) * MQ > first_end) attention_backward_mask_documents(s, ends, m * MQ + lane % 4 * 2);
        attention_backward_probabilities(s, stats, scale);
        uint32_t a[MQ / 16][4];
        attention_backward_pack(a, s, 1.0f);
        wgmma_wait<0>();
        wgmma_fence_registers(dp);
        attention_backward_dscores(dp, s, stats + MQ * 4);
        uint32_t da[MQ / 16][4];
        attention_backward_pack(da, dp, 1.0f);
        attention_backward_store_tile(ds + w * 64 * 128, 128 * 128, da);
        fence_async_proxy();
        attention_backward_accumulate<HD>(dv, a, dout);
        attention_backward_accumulate<HD>(dk, da, q);
        named_barrier_sync(1, 256);

        float dq[32];
        attention_backward_start_dq<HD>(dq, ds, dq_k, w);
        wgmma_wait<2>();
        if (lane == 0) mbarrier_arrive(smem + L::DO_EMPTY + 8 * stage);
        // The last step multiplies an old tile here and drops the result: a branch around this wgmma would make all
        // wgmmas run one after the other.
        int next = (step + 1) % L::STAGES;
        if (step + 1 < steps) mbarrier_wait(smem + L::Q_FULL + 8 * next, (step + 1) / L::STAGES & 1);
        attention_backward_scores<HD>(s, my_k, smem + L::Q + next * L::Q_BYTES);
        wgmma_wait<1>();
        wgmma_fence_registers(dq);
        if (lane == 0) mbarrier_arrive(smem + L::Q_EMPTY + 8 * stage);
        attention_backward_put_dq<HD>(smem, dq, step, w);
        wgmma_wait<0>();
        wgmma_fence_registers(s);
    }
    wgmma_fence_registers(dk);
    wgmma_fence_registers(dv);
    attention_backward_write<HD>(p, u, smem, dk, dv);
}

#endif  // HOPPER_DEVICE_CODE

template <int HD, bool MASKED> __global__
__launch_bounds__(384, 1) void attention_backward_main(const __grid_constant__ AttentionBackwardParams p) {
    grid_dependency_wait();
#if HOPPER_DEVICE_CODE
    using L = AttentionBackwardTiles<HD>;
    extern __shared__ __align__(1024) uint8_t attention_backward_smem[];
    uint32_t smem = smem_address(attention_backward_smem);
    int *ticket = (int *)(attention_backward_smem + L::TICKET);
    if (threadIdx.x == 0) {
        if (smem % 1024) __trap();
        // A unit may wait for units of lower tickets, so their blocks must have started. blockIdx.x would not ensure
        // that.
        *ticket = atomicAdd(p.ticket, 1);
        for (uint32_t i = L::KV_FULL; i < L::Q_EMPTY; i += 8) mbarrier_init(smem + i, 1);
        for (uint32_t i = L::Q_EMPTY; i < L::DQ_FULL; i += 8) mbarrier_init(smem + i, 8);  // 8 consumer warps arrive
        // The 4 warps of one warpgroup arrive.
        for (uint32_t i = L::DQ_FULL; i < L::DQ_EMPTY; i += 8) mbarrier_init(smem + i, 4);
        for (uint32_t i = L::DQ_EMPTY; i < L::TICKET; i += 8) mbarrier_init(smem + i, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    AttentionBackwardUnit u = attention_backward_unit<HD, MASKED>(p, *ticket);
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x == 0) attention_backward_produce<HD>(p, u, smem);
        if (threadIdx.x == 32 || threadIdx.x == 64)
            attention_backward_add_dq<HD, MASKED>(p, u, smem, threadIdx.x / 32 - 1);
    } else {
        warpgroup_reg_alloc<240>();
        attention_backward_consume<HD, MASKED>(p, u, smem);
    }
#endif
}

// ---- host

template <int HD, bool MASKED>
static inline void attention_backward_launch(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out,
                                             const float *lse, void *workspace, AttentionDims d,
                                             AttentionBackwardPlan plan, cudaStream_t s) {
    using L = AttentionBackwardTiles<HD>;
    AttentionBackwardLayout at = attention_backward_layout(d, plan);
    char *base = (char *)workspace;
    float *dq = (float *)(base + at.dq), *stats = (float *)(base + at.stats);
    int64_t padded = round_up(d.T, ATTENTION_BACKWARD_KEYS), columns = (d.NH + 2 * d.NKV) * HD,
            parts = d.NH / plan.heads_per_block;
    float *partial = parts > d.NKV ? (float *)(base + at.partial) : NULL;

    int *order = (int *)(base + at.order), *ticket = (int *)(base + at.ticket);
    dim3 stats_grid((unsigned)(padded / (256 / (HD / 8))), (unsigned)d.NH, (unsigned)d.B);
    CUDA_LAUNCH(attention_backward_stats<HD>, stats_grid, 256, 0, s, stats, dq, order, ticket + 1 - order, dout, out,
                lse, d.T, d.NH);

    AttentionBackwardParams p;
    const int64_t stats_dims[3] = {padded, 2, d.B * d.NH}, stats_strides[2] = {padded * 4, padded * 8};
    const int stats_box[3] = {L::MQ, 2, 1};
    p.q = tensor_map_tokens(qkv, d.B, d.T, columns, L::MQ, HD / 64);
    p.kv = tensor_map_tokens(qkv, d.B, d.T, columns, ATTENTION_BACKWARD_KEYS, HD / 64);
    p.dout = tensor_map_tokens(dout, d.B, d.T, d.NH * HD, L::MQ, HD / 64);
    p.stats = tensor_map_create(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE, 3, stats, stats_dims,
                                stats_strides, stats_box);
    p.dkv = tensor_map_tokens(dqkv, d.B, d.T, columns, 64, HD / 64);
    p.dq = dq;
    p.partial = partial;
    p.order = d.deterministic ? order : NULL;
    p.ticket = ticket;
    p.T = (int)d.T, p.NH = (int)d.NH, p.NKV = (int)d.NKV;
    p.heads_per_block = plan.heads_per_block, p.section = plan.section, p.heads = (int)(d.B * parts);
    p.documents = d.documents;
    const auto kernel = attention_backward_main<HD, MASKED>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::BYTES));
    unsigned units = grid_size(padded / ATTENTION_BACKWARD_KEYS * p.heads, 1);
    CUDA_LAUNCH(kernel, units, 384, L::BYTES, s, p);

    dim3 rows_grid((unsigned)(padded / 64), (unsigned)((d.NH + (partial ? 2 * d.NKV : 0)) * (HD / 64)), (unsigned)d.B);
    CUDA_LAUNCH(attention_backward_rows<HD>, rows_grid, 256, 0, s, dqkv, dq, partial, d.T, d.NH, d.NKV, parts / d.NKV);
}

// Writes all of dqkv [B, T, (NH + 2*NKV) * HD] from dout and out [B, T, NH*HD], qkv (packed like dqkv, after RoPE) and
// the forward's lse [B, NH, T] (natural log of the sum of exp(S)). workspace holds
// attention_backward_sm90_workspace_bytes(d) bytes. With d.deterministic the adds to dQ happen in the order of the key
// tiles, so equal input gives equal bits (for dK and dV this always holds). Dies if HD is neither 64 nor 128, NKV does
// not divide NH, or a size is out of range for a grid.
static inline void attention_backward_sm90(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out,
                                           const float *lse, void *workspace, AttentionDims d, cudaStream_t s) {
    if (d.HD != 64 && d.HD != 128)
        die("attention_backward_sm90: head_dim %lld is not supported; 64 and 128 are", (long long)d.HD);
    if (d.NKV < 1 || d.NH < 1 || d.NH % d.NKV)
        die("attention_backward_sm90: %lld query heads cannot share %lld key/value heads evenly", (long long)d.NH,
            (long long)d.NKV);
    if (d.B < 1 || d.T < 1 || d.B > 65535 || d.T > 1 << 24 || (d.NH + 2 * d.NKV) * 2 > 65535)
        die("attention_backward_sm90: batch %lld, sequence %lld, heads %lld + 2 * %lld are out of range: "
            "1 to 65535, 1 to 16777216, and up to 32767",
            (long long)d.B, (long long)d.T, (long long)d.NH, (long long)d.NKV);
    AttentionBackwardPlan plan = attention_backward_plan(d);
    ATTENTION_INSTANCE(attention_backward_launch, d)(dqkv, dout, qkv, out, lse, workspace, d, plan, s);
}

#endif
