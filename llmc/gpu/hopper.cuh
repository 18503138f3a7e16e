// Hopper (sm_90a) building blocks: thin wrappers over PTX for mbarriers, TMA copies and wgmma.
//
// A bf16 tile in shared memory is rows of 128 bytes (64 bf16) with the 128-byte swizzle: 16-byte chunk c of row r is
// stored at chunk c ^ (r % 8). A tile starts at a multiple of 1024 bytes. A tile wider than 64 columns is stored as
// several such tiles, one after another. Sources: the PTX ISA manual (wgmma matrix descriptors, tensor maps) and the
// CUDA driver API manual.
#ifndef LLMC_HOPPER_CUH
#define LLMC_HOPPER_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "cuda_utils.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "wgmma needs the sm_90a target: build with -gencode=arch=compute_90a,code=sm_90a"
#endif

// For targets other than sm_90a the Hopper kernels only wait for earlier work (plain sm_90 is refused above). The host
// launches them only if hopper_available().
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_DEVICE_CODE 1
#else
#define HOPPER_DEVICE_CODE 0
#endif

// ---- host

// True if the current device has compute capability 9.0 and this program was built for 9.0.
static inline bool hopper_available(void) {
#ifdef __CUDA_ARCH_LIST__
    const int built_for[] = {__CUDA_ARCH_LIST__};
    bool built = false;
    for (size_t i = 0; i < sizeof built_for / sizeof built_for[0]; i++) built |= built_for[i] == 900;
    return built && device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
           device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
#else
    return false;
#endif
}

typedef CUresult (*TensorMapEncode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                    const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Returns the driver's cuTensorMapEncodeTiled. It is looked up at run time so that the program does not link libcuda.
// Dies if the driver has none.
static inline TensorMapEncode tensor_map_encoder(void) {
    void *function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || !function)
        die_with(EXIT_UNSUPPORTED,
                 "the CUDA driver has no cuTensorMapEncodeTiled (%s, query result %d): update the driver: CUDA 13 "
                 "needs 580 or newer",
                 cudaGetErrorString(error), (int)found);
    return (TensorMapEncode)function;
}

// Describes a tensor of `rank` (2 to 5) dimensions for TMA, innermost first. dims: elements per dimension. strides[i]:
// bytes from one index to the next of dimension i + 1, a multiple of 16. box: elements per dimension of the tile that
// one copy moves. Reads outside the tensor give zero; writes outside the tensor are dropped. Dies if the driver refuses
// the description. Runs on the host only, and neither allocates nor synchronizes.
static inline CUtensorMap tensor_map_create(CUtensorMapDataType type, CUtensorMapSwizzle swizzle, int rank,
                                            const void *base, const int64_t *dims, const int64_t *strides,
                                            const int *box) {
    static const TensorMapEncode encode = tensor_map_encoder();
    cuuint64_t d[5] = {0}, st[4] = {0};
    cuuint32_t bx[5] = {0}, step[5] = {1, 1, 1, 1, 1};
    for (int i = 0; i < rank; i++) {
        d[i] = (cuuint64_t)dims[i];
        bx[i] = (cuuint32_t)box[i];
        if (i + 1 < rank) st[i] = (cuuint64_t)strides[i];
    }
    CUtensorMap map;
    CUresult result = encode(&map, type, (cuuint32_t)rank, (void *)base, d, st, bx, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        die("tensor map of rank %d with dims (%lld, %lld, %lld, %lld, %lld) at %p was refused by the driver (code %d); "
            "base and strides must be multiples of 16 bytes, and a box has at most 256 elements per dimension",
            rank, (long long)d[0], (long long)d[1], (long long)d[2], (long long)d[3], (long long)d[4], base,
            (int)result);
    return map;
}

// Describes a bf16 tensor [B, T, columns] (row-major, `columns` a multiple of 64) as (64, T, columns/64, B). One copy
// of a box (64, rows, blocks, 1) then loads `rows` tokens x 64*blocks columns as `blocks` swizzled tiles [rows][64],
// one after another. Copy coordinates are (0, token, column / 64, sequence). The sequence is its own dimension, so a
// tail tile never reads the next sequence.
static inline CUtensorMap tensor_map_tokens(const void *base, int64_t B, int64_t T, int64_t columns, int rows,
                                            int blocks) {
    const int64_t dims[4] = {64, T, columns / 64, B};
    const int64_t strides[3] = {columns * 2, 128, T * columns * 2};
    const int box[4] = {64, rows, blocks, 1};
    return tensor_map_create(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, 4, base, dims, strides, box);
}

// ---- device: small things

__device__ __forceinline__ uint32_t smem_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Packs two floats as bf16 (round to nearest even), `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Waits at barrier `id` (1..15) until `threads` threads have come to it.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Raises or lowers the warpgroup's registers per thread (setmaxnreg). Every warp of the warpgroup calls it, in a kernel
// with __launch_bounds__(n, 1).
template <int REGISTERS> __device__ __forceinline__ void warpgroup_reg_alloc(void) {
#if HOPPER_DEVICE_CODE
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}
template <int REGISTERS> __device__ __forceinline__ void warpgroup_reg_dealloc(void) {
#if HOPPER_DEVICE_CODE
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

#if HOPPER_DEVICE_CODE

// ---------------------------------------------------------------------------------------------------------------------
// Device: mbarriers, by shared-memory address. A phase completes when as many arrivals as mbarrier_init's `count`, and
// all expected bytes, are in.

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes the inits visible to TMA. Call it after the inits and before the block-wide barrier.
__device__ __forceinline__ void mbarrier_init_fence(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives once and announces `bytes` of copies to come.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of this parity has completed. On a fresh mbarrier, parity 1 counts as completed.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

// ---- device: a pipeline between a TMA producer and consumers, with a full and an empty mbarrier for each stage.

// Position in a circular buffer of STAGES pipeline stages: the stage, and the phase parity of its mbarrier.
struct PipelineState {
    int index;
    uint32_t phase;
};

template <int STAGES>
__device__ __forceinline__ void pipeline_next(PipelineState &state) {
    if (++state.index == STAGES) {
        state.index = 0;
        state.phase ^= 1;
    }
}

// Waits until the stage is full (barriers: the first of the stages' full mbarriers) or empty (their empty ones).
__device__ __forceinline__ void pipeline_wait(uint32_t barriers, const PipelineState &state) {
    mbarrier_wait(barriers + 8 * state.index, state.phase);
}

// Marks the stage as read by this warp, and advances to the next stage.
template <int STAGES>
__device__ __forceinline__ void pipeline_release(uint32_t empty, PipelineState &state) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * state.index);
    pipeline_next<STAGES>(state);
}

// ---------------------------------------------------------------------------------------------------------------------
// Device: TMA, its fences, and stmatrix. One thread issues a copy. A load completes on an mbarrier. Stores and
// reductions complete in bulk groups.

// Orders this thread's ordinary shared-memory accesses before later accesses by TMA and wgmma. If other threads issue
// those, a barrier must follow the fence.
__device__ __forceinline__ void fence_async_proxy(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Like fence_async_proxy, for all memory: it also orders ordinary accesses to global memory before later bulk copies.
__device__ __forceinline__ void fence_async_proxy_all(void) { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void tensor_map_prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// L2 policies for tma_load_4d_hint: data is evicted from L2 last, or first.
__device__ __forceinline__ uint64_t l2_evict_last(void) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ uint64_t l2_evict_first(void) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// The tma_load functions copy the box of the map at coordinates c0, c1, ... to shared memory at `to`. The bytes
// arrive on `barrier`.
__device__ __forceinline__ void tma_load_2d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1)
        : "memory");
}
__device__ __forceinline__ void tma_load_3d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int c0, int c1,
                                            int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
__device__ __forceinline__ void tma_load_4d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int c0, int c1,
                                            int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
                 "%6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
__device__ __forceinline__ void tma_load_4d_hint(uint32_t to, const CUtensorMap *map, uint32_t barrier, int c0, int c1,
                                                 int c2, int c3, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
                 : "memory");
}

// Stores shared memory at `from` to the box of the map at these coordinates.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap *map, uint32_t from, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
// Adds `bytes`/4 floats of shared memory to contiguous global memory. Each add is atomic; their order is not fixed.
__device__ __forceinline__ void bulk_reduce_add_f32(float *to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(from), "r"(bytes)
                 : "memory");
}
// Commits this thread's stores and reductions as a bulk group. The waits return when all but the last PENDING groups
// have read their shared memory (bulk_wait_read), or have completed (bulk_wait).
__device__ __forceinline__ void bulk_commit(void) { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void bulk_wait_read(void) {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING> __device__ __forceinline__ void bulk_wait(void) {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Stores four 8x8 bf16 matrices to shared memory. Lane l gives the address of row l%8 of matrix l/8; register i holds
// matrix i in fragment layout (lane l: row l/4, columns 2*(l%4) and 2*(l%4) + 1).
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// Device: wgmma, D[64 x N] (+)= A[64 x 16] * B[16 x N], bf16 in, fp32 accumulators in registers. Warp w of the
// warpgroup holds rows 16w..16w+15; lane l holds in d[4*j + 2*h + e] row 16w + 8h + l/4, column 8j + 2*(l%4) + e.
// Accumulators 8i..8i+7 of one wgmma, packed in pairs as bf16, are the A registers of k-step i of the next wgmma, so no
// shuffles are needed.

// Returns the descriptor of a swizzled tile whose contraction index runs along the 128-byte rows (TRANS = 0), as with Q
// and K in S = Q K^T. The next k-step of 16 is at address + 32; beyond 64 columns it is in the next tile. A descriptor
// that begins at a later row r, a multiple of 8, is made from address + 128 * r.
__device__ __forceinline__ uint64_t wgmma_desc_k_major(uint32_t address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | ((uint64_t)1 << 16) | ((uint64_t)(1024 >> 4) << 32) |
           ((uint64_t)1 << 62);
}
// Returns the descriptor of a swizzled tile whose contraction index runs down the rows (TRANS = 1), as with V in O = P
// V. tile_bytes is the distance to the next 64 columns (rows * 128). The next k-step of 16 is at address + 2048.
__device__ __forceinline__ uint64_t wgmma_desc_mn_major(uint32_t address, uint32_t tile_bytes) {
    return (uint64_t)((address & 0x3ffff) >> 4) | ((uint64_t)(tile_bytes >> 4) << 16) | ((uint64_t)(1024 >> 4) << 32) |
           ((uint64_t)1 << 62);
}

// Must come before the first wgmma, and before each wgmma that reads or overwrites registers that a thread has accessed
// since the last one. Not needed between wgmmas of one shape on the same accumulators. All four warps of the warpgroup
// call it together.
__device__ __forceinline__ void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving accesses to these registers across this point, because wgmma writes them
// asynchronously.
template <int N> __device__ __forceinline__ void wgmma_fence_registers(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define HOPPER_ACC8(d, i)                                                                                       \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define HOPPER_ACC16(d) HOPPER_ACC8(d, 0), HOPPER_ACC8(d, 8)
#define HOPPER_ACC32(d) HOPPER_ACC16(d), HOPPER_ACC8(d, 16), HOPPER_ACC8(d, 24)
#define HOPPER_ACC64(d) HOPPER_ACC32(d), HOPPER_ACC8(d, 32), HOPPER_ACC8(d, 40), HOPPER_ACC8(d, 48), HOPPER_ACC8(d, 56)

#define HOPPER_REGISTERS16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define HOPPER_REGISTERS32 \
    HOPPER_REGISTERS16     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HOPPER_REGISTERS64                                                             \
    HOPPER_REGISTERS32                                                                 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// The PTX of D (+)= A B: the operand `flag` is 0 to overwrite D; `rest` is A, B and the modifiers.
#define HOPPER_WGMMA(n, types, registers, flag, rest) \
    "{.reg .pred p; setp.ne.b32 p, " flag ", 0;\n"    \
    "wgmma.mma_async.sync.aligned.m64n" n types " {" registers "}, " rest ";}\n"

// N follows from the accumulator: float[32] is N = 64, [64] is 128. accumulate = 0 overwrites D. wgmma_ss reads A and B
// from shared memory, by descriptors. wgmma_rs reads A from registers and B from shared memory.
#define HOPPER_WGMMA_SS(count, n, a_operand, b_operand, flag, trans_a, trans_b)                           \
    template <int TRANS_A, int TRANS_B>                                                                   \
    __device__ __forceinline__ void wgmma_ss(float (&d)[count], uint64_t a, uint64_t b, int accumulate) { \
        asm volatile(HOPPER_WGMMA(n, "k16.f32.bf16.bf16", HOPPER_REGISTERS##count, flag,                  \
                                  a_operand ", " b_operand ", p, 1, 1, " trans_a ", " trans_b)            \
                     : HOPPER_ACC##count(d)                                                               \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(TRANS_A), "n"(TRANS_B));                      \
    }
HOPPER_WGMMA_SS(32, "64", "%32", "%33", "%34", "%35", "%36")
HOPPER_WGMMA_SS(64, "128", "%64", "%65", "%66", "%67", "%68")

#define HOPPER_WGMMA_RS(count, n, a_operand, b_operand, flag, trans_b)                                                \
    template <int TRANS_B>                                                                                            \
    __device__ __forceinline__ void wgmma_rs(float (&d)[count], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
        asm volatile(HOPPER_WGMMA(n, "k16.f32.bf16.bf16", HOPPER_REGISTERS##count, flag,                              \
                                  a_operand ", " b_operand ", p, 1, 1, " trans_b)                                     \
                     : HOPPER_ACC##count(d)                                                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANS_B));            \
    }
HOPPER_WGMMA_RS(32, "64", "{%32, %33, %34, %35}", "%36", "%37", "%38")
HOPPER_WGMMA_RS(64, "128", "{%64, %65, %66, %67}", "%68", "%69", "%70")

// D[64 x 128] (+)= A[64 x 32] * B[32 x 128] of FP8 codes, B's in E4M3; the sums keep fewer bits than fp32. Both
// descriptors are of wgmma_desc_k_major, as bytes: a row has 128 codes, and the next k-step of 32 is at address + 32.
#define HOPPER_WGMMA_FP8(types)                                                             \
    asm volatile(HOPPER_WGMMA("128", types, HOPPER_REGISTERS64, "%66", "%64, %65, p, 1, 1") \
                 : HOPPER_ACC64(d)                                                          \
                 : "l"(a), "l"(b), "r"(accumulate))
template <Fp8Format A>
__device__ __forceinline__ void wgmma_ss_fp8(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (A == FP8_E4M3) HOPPER_WGMMA_FP8("k32.f32.e4m3.e4m3");
    else HOPPER_WGMMA_FP8("k32.f32.e5m2.e4m3");
}

#endif  // HOPPER_DEVICE_CODE

#endif
