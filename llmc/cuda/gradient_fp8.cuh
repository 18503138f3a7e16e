// Gradients in FP8 on the GPU (--grad-accum-dtype fp8), bit-identical to the CPU (gradient_fp8.h).
//
// Backward computes a layer's gradients in bf16, in the buffer of one layer. The first pass finds the amax of each
// matrix, or of its sum with the stored gradient; the second casts to codes with the new scales. A last kernel, which
// moves almost nothing, stores the scales. Bytes per element: the first pass reads 2, the second reads 2 and writes 1.
// In later micro-steps each pass also reads the 1 byte of the stored code.
//
// The codes of all layers lie one behind the other, and so do the bf16 gradients: the root's, then those of each
// layer's vectors.
#ifndef LLMC_GRADIENT_FP8_CUH
#define LLMC_GRADIENT_FP8_CUH

#include "../config/parameters.h"
#include "../reference/gradient_fp8.h"
#include "cuda_utils.cuh"

enum { GRADIENT_FP8_MOST = 8, GRADIENT_FP8_THREADS = 256, GRADIENT_FP8_BLOCKS = 264 };

// A matrix of a layer: its place among the layer's matrices, in elements, and among the layer's entries in the
// parameter table.
typedef struct {
    int64_t begin, end, entry;
} GradientFp8Tensor;

// The places of gradients. The scales and amaxes of layer l begin at entry first_entry + l * entries of the table.
typedef struct {
    int64_t root, vectors, matrices;  // elements of the root, and of a layer's vectors and matrices
    int64_t layers, first_entry, entries;
    int count;
    GradientFp8Tensor tensors[GRADIENT_FP8_MOST];
} GradientFp8Layout;

// FP8 gradients in device memory.
typedef struct {
    uint8_t *codes;    // [layers][matrices]; NULL: gradients are not FP8
    float *scale_inv;  // [entries of the parameter table]
    uint32_t *amaxes;  // [entries of the parameter table] fp32 bits; zero between casts
} GradientFp8;

// Returns the layout on one rank, which has whole layers.
static inline GradientFp8Layout gradient_fp8_layout(const ParameterTable *t) {
    GradientFp8Layout a;
    memset(&a, 0, sizeof a);
    a.root = t->root_size, a.layers = t->num_layers;
    a.vectors = t->layer_segments[SEGMENT_VECTORS], a.matrices = t->layer_segments[SEGMENT_MATRICES];
    while (t->entries[a.first_entry].layer != 0) a.first_entry++;
    a.entries = (t->count - a.first_entry) / t->num_layers;
    for (int64_t i = 0; i < a.entries; i++) {
        const Parameter *p = &t->entries[a.first_entry + i];
        if (!(p->flags & PARAM_FP8)) continue;
        if (a.count == GRADIENT_FP8_MOST) die("a layer has more than %d matrices", GRADIENT_FP8_MOST);
        const int64_t begin = p->offset - layer_offset(t, 0) - a.vectors;
        a.tensors[a.count++] = GradientFp8Tensor{begin, begin + parameter_elements(p), i};
    }
    return a;
}

// ---------------------------------------------------------------------------------------------------------------------
// Casts

// Loads 8 gradients of a layer. With ADD it adds the stored ones.
template <bool ADD>
__device__ static inline void gradient_fp8_load(float x[8], const bf16 *gradients, const uint8_t *codes, int64_t i,
                                                float scale_inv) {
    bf16x8_unpack(x, bf16x8_load(gradients + i));
    if (!ADD) return;
    float before[8];
    fp8x8_to_floats(before, *(const uint2 *)(codes + i));
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] += __fmul_rn(before[j], scale_inv);
}

// Finds the amax of each matrix of a layer: blockIdx.y is the matrix. The pointers are those of the layer.
template <bool ADD>
static __global__ void __launch_bounds__(GRADIENT_FP8_THREADS)
    gradient_fp8_amax_kernel(GradientFp8 to, const bf16 *gradients, const __grid_constant__ GradientFp8Layout a) {
    grid_dependency_wait();
    const GradientFp8Tensor t = a.tensors[blockIdx.y];
    const float scale_inv = ADD ? to.scale_inv[t.entry] : 0;
    uint32_t amax = 0;
    for (int64_t i = t.begin + (blockIdx.x * GRADIENT_FP8_THREADS + threadIdx.x) * 8; i < t.end;
         i += (int64_t)gridDim.x * GRADIENT_FP8_THREADS * 8) {
        float x[8];
        gradient_fp8_load<ADD>(x, gradients, to.codes, i, scale_inv);
#pragma unroll
        for (int j = 0; j < 8; j++) amax = max(amax, gradient_fp8_bits(x[j]));
    }
    amax = warp_max_u32(amax);
    uint32_t *slot = to.amaxes + t.entry;
    if (threadIdx.x % WARP_SIZE == 0 && amax > *(volatile uint32_t *)slot) atomicMax(slot, amax);
}

// Casts each matrix of a layer, with the scale of its amax.
template <bool ADD>
static __global__ void __launch_bounds__(GRADIENT_FP8_THREADS)
    gradient_fp8_cast_kernel(GradientFp8 to, const bf16 *gradients, const __grid_constant__ GradientFp8Layout a) {
    grid_dependency_wait();
    __shared__ float scale;
    const GradientFp8Tensor t = a.tensors[blockIdx.y];
    const float scale_inv = ADD ? to.scale_inv[t.entry] : 0;
    const bool finite = to.amaxes[t.entry] < 0x7f800000u;
    if (threadIdx.x == 0) scale = gradient_fp8_scale(to.amaxes[t.entry]);
    __syncthreads();
    for (int64_t i = t.begin + (blockIdx.x * GRADIENT_FP8_THREADS + threadIdx.x) * 8; i < t.end;
         i += (int64_t)gridDim.x * GRADIENT_FP8_THREADS * 8) {
        float x[8];
        gradient_fp8_load<ADD>(x, gradients, to.codes, i, scale_inv);
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = finite || gradient_fp8_bits(x[j]) < 0x7f800000u ? __fmul_rn(x[j], scale) : NAN;
        *(uint2 *)(to.codes + i) = make_uint2(fp8x4_from_floats<FP8_E4M3>(x), fp8x4_from_floats<FP8_E4M3>(x + 4));
    }
}

// Stores the scales that the cast has used, and clears the amaxes.
static __global__ void gradient_fp8_scales_kernel(GradientFp8 to, const __grid_constant__ GradientFp8Layout a) {
    grid_dependency_wait();
    if (threadIdx.x >= a.count) return;
    const int64_t entry = a.tensors[threadIdx.x].entry;
    to.scale_inv[entry] = 1 / gradient_fp8_scale(to.amaxes[entry]);
    to.amaxes[entry] = 0;
}

// Stores the gradients of layer l's matrices as FP8, or their sum with those that are stored. Returns the bytes moved.
static inline int64_t gradient_fp8_join(GradientFp8 to, const GradientFp8Layout *a, int64_t l, const bf16 *gradients,
                                        bool add, cudaStream_t stream) {
    const int64_t entry = a->first_entry + l * a->entries;
    to.codes += l * a->matrices, to.scale_inv += entry, to.amaxes += entry;
    require_aligned16(gradients, "gradient_fp8_join", "gradients");
    require_aligned16(to.codes, "gradient_fp8_join", "codes");
    for (int i = 0; i < a->count; i++)
        if (a->tensors[i].end != (i + 1 < a->count ? a->tensors[i + 1].begin : a->matrices) || a->tensors[i].end % 8)
            die("FP8 gradients need matrices without padding between them");
    const dim3 grid(min_i64(GRADIENT_FP8_BLOCKS, grid_size(a->matrices, GRADIENT_FP8_THREADS * 8)), (unsigned)a->count);
    if (add) {
        CUDA_LAUNCH(gradient_fp8_amax_kernel<true>, grid, GRADIENT_FP8_THREADS, 0, stream, to, gradients, *a);
        CUDA_LAUNCH(gradient_fp8_cast_kernel<true>, grid, GRADIENT_FP8_THREADS, 0, stream, to, gradients, *a);
    } else {
        CUDA_LAUNCH(gradient_fp8_amax_kernel<false>, grid, GRADIENT_FP8_THREADS, 0, stream, to, gradients, *a);
        CUDA_LAUNCH(gradient_fp8_cast_kernel<false>, grid, GRADIENT_FP8_THREADS, 0, stream, to, gradients, *a);
    }
    CUDA_LAUNCH(gradient_fp8_scales_kernel, 1, GRADIENT_FP8_MOST, 0, stream, to, *a);
    return a->matrices * (add ? 7 : 5);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

// All gradients of a rank by their index in its flat shard arrays: slow, for steps that are not taken.
typedef struct {
    const bf16 *data;
    const uint8_t *codes;
    const float *scale_inv;
    GradientFp8Layout layout;

    __device__ float operator[](int64_t i) const {
        const int64_t in_layers = i - layout.root, unit = layout.vectors + layout.matrices;
        if (in_layers < 0) return __bfloat162float(data[i]);
        const int64_t l = in_layers / unit, in_unit = in_layers % unit, at = in_unit - layout.vectors;
        if (at < 0) return __bfloat162float(data[layout.root + l * layout.vectors + in_unit]);
        int t = 0;
        while (t < layout.count && at >= layout.tensors[t].end) t++;
        if (t == layout.count || at < layout.tensors[t].begin) return 0;  // padding
        const int64_t entry = layout.first_entry + l * layout.entries + layout.tensors[t].entry;
        return gradient_fp8_value(codes[l * layout.matrices + at], scale_inv[entry]);
    }
} GradientFp8Reader;

#endif
