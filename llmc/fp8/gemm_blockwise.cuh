// FP8 GEMM for Hopper (sm_90a) with scales of the recipe blockwise: a TMA producer warp feeds two warpgroups.
//
// It computes out [M, N] = sum over blocks of 128 k of scale_m[m, block] * scale_n[n / 128, block] * (sum over k in the
// block of m[m, k] n[n, k]), row-major and in bf16, with M, N and the depth multiples of 128:
//   fprop  y [R, N] = x w^T     m = x,   n = w
//   dgrad  dx[R, K] = dy w      m = dy,  n = w^T
// So m is cuBLASLt's B, and n its A. In wgrad both operands have 1x128 scales, which cost each thread twice the
// multiplications. With them this kernel was slower than cuBLASLt's (dev/LOG.md), so wgrad stays there.
//
// Hopper's tensor cores apply no scales, and sum FP8 products with fewer bits than fp32. So they sum only one block of
// 128; each thread multiplies its sums by the scales and adds them to fp32 totals (as in DeepSeek-V3, arXiv:2412.19437,
// section 3.3.2). While one warpgroup does that, the tensor cores work for the other. A wgmma sums 64 x 128 results, so
// a thread has 64 sums and 128 totals: each warpgroup has 128 x 128 results.
//
// Thread blocks form a persistent grid. Rows outside the matrix are computed from zeros and not stored.
#ifndef LLMC_GEMM_BLOCKWISE_CUH
#define LLMC_GEMM_BLOCKWISE_CUH

#include "../config/recipes.h"
#include "../gpu/cuda_utils.cuh"
#include "../gpu/hopper.cuh"

// Tile sizes and shared-memory layout of a thread block. Offsets are in bytes.
struct BlockwiseTile {
    static constexpr int M = 256, N = 128, DEPTH = 128;  // DEPTH: of a stage, one block of scales
    static constexpr int STAGES = 4;
    static constexpr int GROUP = 16;  // tiles that run at a time share m and n in L2: blockwise_position()
    static constexpr int WARPGROUPS = 2, THREADS = 128 * (WARPGROUPS + 1);
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr uint32_t HALF_BYTES = 128 * DEPTH, M_BYTES = 2 * HALF_BYTES, N_BYTES = N * DEPTH;
    static constexpr uint32_t M_SCALE_BYTES = M * 4, N_SCALE_BYTES = 16;  // N: an aligned group of 4
    static constexpr uint32_t SCALE_BYTES = M_SCALE_BYTES + 128;          // TMA writes to multiples of 128
    static constexpr uint32_t STAGING_BYTES = 16 * 128;                   // one warp's 16 rows of 64 results
    static constexpr uint32_t CODES_M = 0, CODES_N = STAGES * M_BYTES, SCALES = CODES_N + STAGES * N_BYTES,
                              STAGING = SCALES + STAGES * SCALE_BYTES, FULL = STAGING + 4 * WARPGROUPS * STAGING_BYTES,
                              EMPTY = FULL + 8 * STAGES, END = EMPTY + 8 * STAGES;
    static constexpr uint32_t SMEM_BYTES = END + 1024;  // the base is rounded up to 1024
};

typedef struct {
    int M, N, blocks;             // blocks: of 128 along the depth
    int m_tiles, n_tiles, tiles;  // tiles: of 256 x 128 results
    bf16 *out;                    // [M, N]
    const bf16 *bias;             // [N], or NULL
} BlockwisePlan;

// Maps of the codes [M or N, depth] and of the scales: m's are [blocks, M], n's are [N / 128, blocks rounded up to 4].
typedef struct {
    CUtensorMap m, n, m_scales, n_scales;
} BlockwiseMaps;

typedef struct {
    int m, n;  // first row and column of this thread block's results
} BlockwisePosition;

// Tiles are numbered in groups of GROUP columns of tiles: within a group by m, then by n. Thread blocks that run at a
// time then work on about as many rows as columns.
__device__ __forceinline__ BlockwisePosition blockwise_position(const BlockwisePlan &p, int tile) {
    typedef BlockwiseTile Tile;
    const int per_group = Tile::GROUP * p.m_tiles, group = tile / per_group, rest = tile - group * per_group;
    const int first = group * Tile::GROUP, width = min(Tile::GROUP, p.n_tiles - first);
    const int m = rest / width;
    return {m * Tile::M, (first + rest - m * width) * Tile::N};
}

#if HOPPER_DEVICE_CODE

// The producer thread.
__device__ __forceinline__ void blockwise_produce(const BlockwiseMaps &maps, uint32_t smem, const BlockwisePlan &plan) {
    typedef BlockwiseTile Tile;
    PipelineState s = {0, 1};  // All stages are empty: phase 1 of a fresh mbarrier counts as complete.
    for (int tile = (int)blockIdx.x; tile < plan.tiles; tile += (int)gridDim.x) {
        const BlockwisePosition at = blockwise_position(plan, tile);
        for (int block = 0; block < plan.blocks; block++) {
            const uint32_t full = smem + Tile::FULL + 8 * s.index, k = block * Tile::DEPTH;
            const uint32_t codes_m = smem + Tile::CODES_M + s.index * Tile::M_BYTES,
                           codes_n = smem + Tile::CODES_N + s.index * Tile::N_BYTES,
                           scales = smem + Tile::SCALES + s.index * Tile::SCALE_BYTES;
            pipeline_wait(smem + Tile::EMPTY, s);
            mbarrier_arrive_expect(full, Tile::M_BYTES + Tile::N_BYTES + Tile::M_SCALE_BYTES + Tile::N_SCALE_BYTES);
            tma_load_2d(codes_m, &maps.m, full, k, at.m);
            tma_load_2d(codes_n, &maps.n, full, k, at.n);
            tma_load_2d(scales, &maps.m_scales, full, at.m, block);
            tma_load_2d(scales + Tile::M_SCALE_BYTES, &maps.n_scales, full, block & ~3, at.n / 128);
            pipeline_next<Tile::STAGES>(s);
        }
    }
}

// Starts the sums of 64 x 128 results over one block of 128, and does not wait.
template <Fp8Format FORMAT_M>
__device__ __forceinline__ void blockwise_start(float (&sum)[64], uint64_t m, uint64_t n) {
    wgmma_fence_registers(sum);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_ss_fp8<FORMAT_M>(sum, m + 2 * i, n + 2 * i, i > 0);
    wgmma_commit();
}

// Adds sums times scales to the totals. scale: of this thread's two rows.
__device__ __forceinline__ void blockwise_promote(float (&total)[64], const float (&sum)[64], const float (&scale)[2]) {
#pragma unroll
    for (int j = 0; j < 64; j++) total[j] = fmaf(sum[j], scale[j / 2 % 2], total[j]);
}

// Adds the bias to a warp's 16 x 128 totals. `from` points at this thread's first column.
__device__ __forceinline__ void blockwise_add_bias(float (&total)[64], const bf16 *from) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 bias = __bfloat1622float2(*(const __nv_bfloat162 *)(from + 8 * i));
        total[4 * i] += bias.x, total[4 * i + 1] += bias.y;
        total[4 * i + 2] += bias.x, total[4 * i + 3] += bias.y;
    }
}

// Rounds a warp's 16 x 128 totals to bf16 and stores them at `to`, 64 columns at a time. `staging` turns the layout of
// wgmma into whole rows of 128 bytes.
__device__ __forceinline__ void blockwise_store(bf16 *to, int64_t row_stride, const float (&total)[64],
                                                uint8_t *staging) {
    const int lane = threadIdx.x % WARP_SIZE, row = lane % 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        __syncwarp();  // all lanes have read the last results
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *t = total + 32 * half + 8 * i;
            const int chunk = (2 * i + lane / 16) ^ (row % 8);
            stmatrix_x4(smem_address(staging) + row * 128 + chunk * 16, pack_bf16(t[0], t[1]), pack_bf16(t[2], t[3]),
                        pack_bf16(t[4], t[5]), pack_bf16(t[6], t[7]));
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = 4 * i + lane / 8, c = lane % 8;
            *(uint4 *)(to + r * row_stride + 64 * half + 8 * c) =
                *(const uint4 *)(staging + r * 128 + ((c ^ (r % 8)) * 16));
        }
    }
}

// Rounds and stores a warpgroup's 128 x 128 results, unless these rows are outside the matrix.
__device__ __forceinline__ void blockwise_finish(float (&total)[2][64], const BlockwisePlan &plan, int row, int column,
                                                 uint8_t *staging) {
    if (row >= plan.M) return;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        bf16 *to = plan.out + (int64_t)(row + 64 * h + 16 * warp) * plan.N + column;
        if (plan.bias) blockwise_add_bias(total[h], plan.bias + column + 2 * (lane % 4));
        blockwise_store(to, plan.N, total[h], staging);
    }
}

// Consumer warpgroup: computes 128 x 128 results of every tile of this thread block. base: shared memory at `smem`.
template <Fp8Format FORMAT_M>
__device__ __forceinline__ void blockwise_consume(uint8_t *base, uint32_t smem, const BlockwisePlan &plan,
                                                  int warpgroup) {
    typedef BlockwiseTile Tile;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE % 4;
    const uint64_t m_desc = wgmma_desc_k_major(smem + Tile::CODES_M + warpgroup * Tile::HALF_BYTES),
                   n_desc = wgmma_desc_k_major(smem + Tile::CODES_N);
    uint8_t *const staging = base + Tile::STAGING + (4 * warpgroup + warp) * Tile::STAGING_BYTES;
    PipelineState s = {0, 0};
    for (int tile = (int)blockIdx.x; tile < plan.tiles; tile += (int)gridDim.x) {
        const BlockwisePosition at = blockwise_position(plan, tile);
        float sum[64], total[2][64] = {};
        for (int block = 0; block < plan.blocks; block++) {
            const float *const scales = (const float *)(base + Tile::SCALES + s.index * Tile::SCALE_BYTES),
                               *const m_scales = scales + 128 * warpgroup + 16 * warp + lane / 4,
                               *const n_scale = scales + Tile::M + block % 4;
            pipeline_wait(smem + Tile::FULL, s);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                blockwise_start<FORMAT_M>(sum, m_desc + (s.index * Tile::M_BYTES + h * 64 * Tile::DEPTH) / 16,
                                          n_desc + s.index * (Tile::N_BYTES / 16));
                const float scale[2] = {m_scales[64 * h] * *n_scale, m_scales[64 * h + 8] * *n_scale};
                wgmma_wait<0>();
                wgmma_fence_registers(sum);
                blockwise_promote(total[h], sum, scale);
            }
            __syncwarp();  // all lanes have read their scales
            pipeline_release<Tile::STAGES>(smem + Tile::EMPTY, s);
        }
        blockwise_finish(total, plan, at.m + 128 * warpgroup, at.n, staging);
    }
}

#endif  // HOPPER_DEVICE_CODE

template <Fp8Format FORMAT_M>
static __global__ void __launch_bounds__(BlockwiseTile::THREADS, 1)
    gemm_blockwise_kernel(const __grid_constant__ BlockwiseMaps maps, const BlockwisePlan plan) {
    grid_dependency_wait();
#if HOPPER_DEVICE_CODE
    typedef BlockwiseTile Tile;
    extern __shared__ uint8_t shared_memory[];
    const uint32_t start = smem_address(shared_memory), smem = (start + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tile::STAGES; i++) {
            mbarrier_init(smem + Tile::FULL + 8 * i, 1);
            mbarrier_init(smem + Tile::EMPTY + 8 * i, 4 * Tile::WARPGROUPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    // The shuffle tells the compiler that the value is uniform in a warp.
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<Tile::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) blockwise_produce(maps, smem, plan);
    } else {
        warpgroup_reg_alloc<Tile::CONSUMER_REGISTERS>();
        blockwise_consume<FORMAT_M>(shared_memory + (smem - start), smem, plan, warpgroup - 1);
    }
#else
    (void)maps, (void)plan;
#endif
}

// Describes codes [outer, depth], for boxes of `rows` rows and 128 codes.
static inline CUtensorMap blockwise_codes_map(const void *codes, int64_t outer, int64_t depth, int rows) {
    const int64_t dims[2] = {depth, outer};
    const int box[2] = {BlockwiseTile::DEPTH, rows};
    return tensor_map_create(CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, 2, codes, dims, &depth, box);
}

// Describes scales [rows, columns], for boxes of `width` columns of one row.
static inline CUtensorMap blockwise_scales_map(const void *scales, int64_t rows, int64_t columns, int width) {
    const int64_t dims[2] = {columns, rows}, stride = columns * (int64_t)sizeof(float);
    const int box[2] = {width, 1};
    return tensor_map_create(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE, 2, scales, dims, &stride,
                             box);
}

// An operand: codes [outer, depth], and scale_inv in the layout of scale_index(). Both are 16-byte aligned.
typedef struct {
    const void *codes, *scale_inv;
} BlockwiseOperand;

// Computes out [M, N] = m n^T, plus `bias` [N] unless that is NULL. m has 1x128 scales and codes of format_m; n has
// 128x128 scales and E4M3 codes. The result is rounded once. M, N and depth are multiples of 128, `out` and `bias` are
// 16-byte aligned, and the device is one of hopper_available(). It neither allocates nor synchronizes.
static inline void gemm_blockwise(bf16 *out, BlockwiseOperand m, Fp8Format format_m, BlockwiseOperand n,
                                  const bf16 *bias, int64_t M, int64_t N, int64_t depth, cudaStream_t stream) {
    typedef BlockwiseTile Tile;
    const int64_t blocks = depth / Tile::DEPTH;
    if (M % 128 || N % 128 || depth % 128)
        die("gemm_blockwise: %lld x %lld x %lld are no multiples of 128", (long long)M, (long long)N, (long long)depth);
    require_aligned16(out, "gemm_blockwise", "the output");
    const BlockwiseMaps maps = {blockwise_codes_map(m.codes, M, depth, Tile::M),
                                blockwise_codes_map(n.codes, N, depth, Tile::N),
                                blockwise_scales_map(m.scale_inv, blocks, M, Tile::M),
                                blockwise_scales_map(n.scale_inv, N / 128, round_up(blocks, 4), 4)};
    const int m_tiles = (int)ceil_div(M, Tile::M), n_tiles = (int)ceil_div(N, Tile::N);
    const BlockwisePlan plan = {(int)M, (int)N, (int)blocks, m_tiles, n_tiles, m_tiles * n_tiles, out, bias};
    const auto kernel = format_m == FP8_E4M3 ? gemm_blockwise_kernel<FP8_E4M3> : gemm_blockwise_kernel<FP8_E5M2>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SMEM_BYTES));
    const int grid = (int)min_i64(plan.tiles, device_sm_count());
    CUDA_LAUNCH(kernel, grid, Tile::THREADS, Tile::SMEM_BYTES, stream, maps, plan);
}

#endif
