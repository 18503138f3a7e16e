// Basics of CUDA files: checked calls, launches, bf16 vectors, cp.async, sums, amax slots, FP8 casts, pinned memory.
// Do not build with -use_fast_math or -ftz=true: casts and AdamW must give the bits of the CPU's code, which keeps
// denormals.
#ifndef LLMC_CUDA_UTILS_CUH
#define LLMC_CUDA_UTILS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <limits.h>

#include "../base/fp8.h"
#include "../base/utils.h"

typedef __nv_bfloat16 bf16;
static_assert(sizeof(bf16) == sizeof(bf16_bits), "host and device exchange bf16 as bytes");

#define WARP_SIZE 32
#define LOG2_E 1.4426950408889634f  // for softmax in base 2

// ---- host

static inline void cuda_check(cudaError_t error, const char *call, const char *file, int line) {
    const int code = error == cudaErrorMemoryAllocation ? EXIT_MEMORY : EXIT_OTHER;
    if (error != cudaSuccess)
        die_with(code, "%s:%d: %s: %s (%s)", file, line, call, cudaGetErrorString(error), cudaGetErrorName(error));
}

// If a CUDA call failed, prints file, line, call and error, and ends the process.
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

// Returns an attribute of the current device.
static inline int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

// Returns the number of SMs (streaming multiprocessors) of the current device.
static inline int device_sm_count(void) { return device_attribute(cudaDevAttrMultiProcessorCount); }

template <typename T>
struct AsDeclared {
    typedef T type;
};

// Implements CUDA_LAUNCH. The arguments are converted to the kernel's parameter types.
template <typename... P>
static inline void cuda_launch(const char *file, int line, void (*kernel)(P...), dim3 grid, dim3 block,
                               size_t shared_bytes, cudaStream_t stream, typename AsDeclared<P>::type... arguments) {
    // A process uses only one device.
    static const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
    config.attrs = &early, config.numAttrs = major >= 9;
    void *pointers[] = {(void *)&arguments...};
    cuda_check(cudaLaunchKernelExC(&config, (const void *)kernel, pointers), "kernel launch", file, line);
}

// CUDA_LAUNCH(kernel, grid, block, shared_bytes, stream, arguments...) launches like kernel<<<grid, block,
// shared_bytes, stream>>>(arguments...). From compute capability 9.0 it uses programmatic dependent launch: the
// kernel's blocks are launched when the previous kernel's blocks have ended, before that kernel counts as complete,
// which saves about a microsecond. So every kernel that it launches must start with grid_dependency_wait(). A bad
// launch configuration ends the process; an error inside the kernel shows in a later CUDA call.
#define CUDA_LAUNCH(...) cuda_launch(__FILE__, __LINE__, __VA_ARGS__)

// Returns the number of thread blocks for n items, with `per_block` items in each; at least 1. Dies if that is more
// than a grid can have.
static inline unsigned grid_size(int64_t n, int64_t per_block) {
    int64_t blocks = max_i64(1, ceil_div(n, per_block));
    if (blocks > INT_MAX)
        die("a kernel over %lld items needs %lld blocks, more than a grid can have (%d)", (long long)n,
            (long long)blocks, INT_MAX);
    return (unsigned)blocks;
}

// Dies unless the pointer is aligned to 16 bytes (NULL passes). For pointers that kernels access 16 bytes at a time.
static inline void require_aligned16(const void *pointer, const char *function, const char *name) {
    if ((uintptr_t)pointer % 16) die("%s: %s at %p is not 16-byte aligned", function, name, pointer);
}

// ---- device: the start of every kernel

// Returns when all work enqueued in the stream before this kernel has finished and its writes are visible. It must be
// the first statement of every kernel, for every thread. The next kernel only waits until this kernel's blocks have
// ended: if they ended without this wait, it could start before the work ahead of this kernel has finished.
__device__ static inline void grid_dependency_wait(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- 8 bf16 as one 16-byte access. Element 2i is the low half of word[i], 2i+1 the high half.

typedef struct __align__(16) {
    uint32_t word[4];
} Bf16x8;

__device__ static inline Bf16x8 bf16x8_load(const bf16 *p) {
    uint4 v = *(const uint4 *)p;
    return Bf16x8{{v.x, v.y, v.z, v.w}};
}

__device__ static inline void bf16x8_store(bf16 *p, Bf16x8 v) {
    *(uint4 *)p = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}

__device__ static inline void bf16x8_unpack(float out[8], Bf16x8 v) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __uint_as_float(v.word[i] << 16);
        out[2 * i + 1] = __uint_as_float(v.word[i] & 0xffff0000u);
    }
}

// Rounds 8 floats to nearest even; NaN stays NaN.
__device__ static inline Bf16x8 bf16x8_pack(const float in[8]) {
    Bf16x8 r;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
        r.word[i] = *(const uint32_t *)&pair;
    }
    return r;
}

// 8 fp32, as loaded by two 16-byte accesses.
typedef struct {
    float4 first, second;
} Fp32x8;

__device__ static inline Fp32x8 fp32x8_load(const float *p) {
    return Fp32x8{((const float4 *)p)[0], ((const float4 *)p)[1]};
}

__device__ static inline void fp32x8_unpack(float out[8], Fp32x8 v) {
    out[0] = v.first.x, out[1] = v.first.y, out[2] = v.first.z, out[3] = v.first.w;
    out[4] = v.second.x, out[5] = v.second.y, out[6] = v.second.z, out[7] = v.second.w;
}

__device__ static inline void fp32x8_store(float *p, const float in[8]) {
    ((float4 *)p)[0] = make_float4(in[0], in[1], in[2], in[3]);
    ((float4 *)p)[1] = make_float4(in[4], in[5], in[6], in[7]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Asynchronous 16-byte copies to shared memory (cp.async). A thread commits its copies as one group, and waits for its
// groups in order.

__device__ static inline void copy16_async(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(__cvta_generic_to_global(global))
                 : "memory");
}

__device__ static inline void copy_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are in flight. To read other threads' copies, a barrier must
// follow.
template <int PENDING>
__device__ static inline void copy_async_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- reductions

template <class T> __device__ static inline T warp_sum(T x) {
#pragma unroll
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ static inline uint32_t warp_max_u32(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// Returns the sum over WARPS consecutive warps, with equal bits in every thread and every run. `scratch` is WARPS
// floats of shared memory. The first warp's number is a multiple of WARPS. `barrier` is one of the block's barriers, 0
// to 15; 0 is the one of __syncthreads. Sets of warps that sum at the same time have different ones. The function waits
// at it only once, so a caller in a loop must alternate between two scratch arrays: otherwise a fast warp overwrites
// values that a slow warp still reads.
template <int WARPS>
__device__ static inline float group_sum(float x, float *scratch, int barrier) {
    x = warp_sum(x);
    if (threadIdx.x % WARP_SIZE == 0) scratch[threadIdx.x / WARP_SIZE % WARPS] = x;
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(WARPS * WARP_SIZE) : "memory");
    float sum = scratch[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += scratch[w];
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// An amax slot holds the largest |x| of a tensor, a row or a column: the bits of an fp32 number as an unsigned integer,
// in device memory, cleared to 0 before use. Unsigned order is the order of non-negative floats, with infinity above
// the finite numbers and NaN above infinity. So the result does not depend on the order of the atomics, and one NaN
// makes the amax NaN. The recipes delayed and blockwise leave NaN out of amaxes (fp8_rule_keeps_nan; KEEPS_NAN false).

// Returns, in each 16-bit half, the larger of the two bf16 magnitudes in that half. With KEEPS_NAN, NaN is above
// infinity. Without it, a NaN in `magnitudes` is ignored; `packed_amax` never holds one if it starts from 0.
template <bool KEEPS_NAN = true>
__device__ static inline uint32_t amax_larger(uint32_t packed_amax, uint32_t magnitudes) {
    if (KEEPS_NAN) return __vmaxu2(packed_amax, magnitudes);
    const __nv_bfloat162 larger = __hmax2(*(const __nv_bfloat162 *)&packed_amax, *(const __nv_bfloat162 *)&magnitudes);
    return *(const uint32_t *)&larger;
}

// Raises a running maximum to the magnitudes of 8 values. The maximum is packed as two 16-bit halves, of which the
// larger counts, and starts from 0.
template <bool KEEPS_NAN = true>
__device__ static inline uint32_t amax_update(uint32_t packed_amax, Bf16x8 v) {
#pragma unroll
    for (int i = 0; i < 4; i++) packed_amax = amax_larger<KEEPS_NAN>(packed_amax, v.word[i] & 0x7fff7fffu);
    return packed_amax;
}

// Returns the larger of the two packed magnitudes, encoded for an amax slot.
__device__ static inline uint32_t amax_bits(uint32_t packed_amax) {
    return max(packed_amax << 16, packed_amax & 0xffff0000u);
}

// Raises the slot to the largest running maximum of a warp's threads.
__device__ static inline void amax_publish_warp(uint32_t *slot, uint32_t packed_amax) {
    const uint32_t bits = warp_max_u32(amax_bits(packed_amax));
    if (threadIdx.x % WARP_SIZE == 0 && bits > *(volatile uint32_t *)slot) atomicMax(slot, bits);
}

// Raises the slot to the largest running maximum of the threads of a one-dimensional block. Every thread of the block
// must call it; a kernel calls it once, or puts a barrier between calls.
__device__ static inline void amax_publish(uint32_t *slot, uint32_t packed_amax) {
    __shared__ uint32_t scratch[WARP_SIZE];
    uint32_t bits = warp_max_u32(amax_bits(packed_amax));
    int warps = (int)(blockDim.x + WARP_SIZE - 1) / WARP_SIZE;
    if (threadIdx.x % WARP_SIZE == 0) scratch[threadIdx.x / WARP_SIZE] = bits;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < warps; w++) bits = max(bits, scratch[w]);
    // Most blocks find a larger value in the slot and skip the atomic.
    if (bits > *(volatile uint32_t *)slot) atomicMax(slot, bits);
}

// ---------------------------------------------------------------------------------------------------------------------
// FP8 casts, and decoding of E4M3. Casts give the bits of fp8_from_float, except that the GPU's instruction turns every
// NaN into 0x7f (it drops the sign).

// Casts two floats to two bytes, `low` in bits 0-7. GPUs below compute capability 8.9 lack the instruction and run the
// plain code.
template <Fp8Format FORMAT>
__device__ static inline uint32_t fp8x2_from_floats(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    return fp8_from_float(low, FORMAT) | (uint32_t)fp8_from_float(high, FORMAT) << 8;
#else
    uint16_t r;
    if (FORMAT == FP8_E4M3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
#endif
}

// Casts four floats to one word, x[0] in the lowest byte.
template <Fp8Format FORMAT>
__device__ static inline uint32_t fp8x4_from_floats(const float x[4]) {
    return fp8x2_from_floats<FORMAT>(x[0], x[1]) | fp8x2_from_floats<FORMAT>(x[2], x[3]) << 16;
}

__device__ static inline float half_bits_to_float(uint32_t bits) {
    return __half2float(__ushort_as_half((unsigned short)bits));
}

// Decodes 8 E4M3 codes. From compute capability 8.9 on it goes by way of FP16, which holds all E4M3 values exactly.
__device__ static inline void fp8x8_to_floats(float out[8], uint2 codes) {
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
        const uint32_t pair = (k < 4 ? codes.x : codes.y) >> (8 * (k % 4)) & 0xffffu;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
        out[k] = fp8_to_float((uint8_t)pair, FP8_E4M3), out[k + 1] = fp8_to_float((uint8_t)(pair >> 8), FP8_E4M3);
#else
        uint32_t halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)pair));
        out[k] = half_bits_to_float(halves & 0xffffu), out[k + 1] = half_bits_to_float(halves >> 16);
#endif
    }
}

// ---- pinned host memory

// Returns `bytes` of pinned host memory, all zero. Dies if it cannot be had; the message names `what`, the option that
// needs it.
static inline void *host_memory_pinned(const char *what, int64_t bytes) {
    void *memory = NULL;
    const cudaError_t status = cudaHostAlloc(&memory, (size_t)bytes, cudaHostAllocDefault);
    if (status != cudaSuccess)
        die_with(EXIT_MEMORY, "%s: cannot pin %.1f GiB of host memory: %s; free host memory, or leave out %s", what,
                 (double)bytes / (1 << 30), cudaGetErrorString(status), what);
    memset(memory, 0, (size_t)bytes);
    return memory;
}

#endif
