// Casts FP16 master weights of linear layers to FP8 (msamp.h), without a bf16 copy between.
//
// As FP16, each tensor of a fused weight (q, k, v; gate, up) has a scale of its own. As FP8, these tensors share one
// scale, which follows from the largest of their amaxes:
//
//    code = saturating RNE cast of fp32(master) * (FP8 scale / FP16 scale of its tensor)
//
// All scales are powers of two. They are known before the cast begins, so the cast takes one pass. It reads 2 bytes per
// element and writes 1, or 2 if it makes rowwise and columnwise codes.
#ifndef LLMC_FP16_WEIGHTS_CUH
#define LLMC_FP16_WEIGHTS_CUH

#include "../base/msamp.h"
#include "../config/shard_plan.h"
#include "../fp8/quantize.cuh"

enum { FP16_TENSORS = 8, FP16_ELEMENTS = 16, FP16_THREADS = 256 };

// The tensors among a layer's matrices, in the order of memory.
typedef struct {
    int count;
    int64_t ends[FP16_TENSORS];  // each tensor's end, in elements from the start of the layer's matrices
    int linears[FP16_TENSORS];   // LinearId of the weight that the tensor is part of
    int entries[FP16_TENSORS];   // index of layer 0's tensor in the parameter table
    int64_t layer_entries;       // how many entries of the table a layer has
} Fp16Tensors;

// Factors by which the masters of one tensor are multiplied.
typedef struct {
    float to_fp8;     // gives the value that is cast to FP8
    float scale_inv;  // gives the value that the master stands for
} Fp16Factors;

// A rank's slices of the matrices of all layers.
typedef struct {
    Fp16Tensors tensors;
    const fp16_bits *masters;  // layer l's slice begins at masters + l * stride
    int64_t stride;
    int64_t first;         // the element of a layer's matrices at which this rank's slice begins
    Fp16Factors *factors;  // [layers, FP16_TENSORS]
} Fp16Weights;

static inline Fp16Tensors fp16_tensors(const ParameterTable *t) {
    const int64_t matrices = layer_offset(t, 0) + t->layer_segments[SEGMENT_VECTORS];
    Fp16Tensors r = {};
    int linear = -1;
    for (int64_t i = 0; i < t->count; i++) {
        const Parameter *p = &t->entries[i];
        r.layer_entries += p->layer == 0;
        if (p->layer != 0 || !(p->flags & PARAM_FP8)) continue;
        if (r.count == FP16_TENSORS) die("a layer has more than %d matrices", FP16_TENSORS);
        linear += !(p->flags & PARAM_JOINED);
        r.ends[r.count] = p->offset + parameter_elements(p) - matrices;
        r.linears[r.count] = linear, r.entries[r.count++] = (int)i;
        if (p->rows % 4 || p->cols % FP16_ELEMENTS)
            die("%s: casts need rows in multiples of 4 and columns in multiples of 16", p->name);
    }
    return r;
}

// Loads 8 FP16 numbers.
__device__ static inline void fp16x8_load(float out[8], const fp16_bits *p) {
    const uint4 v = *(const uint4 *)p;
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; k++)
        out[2 * k] = half_bits_to_float(words[k] & 0xffffu), out[2 * k + 1] = half_bits_to_float(words[k] >> 16);
}

// Returns the number of the tensor to which an element of a layer's matrices belongs; t.count for padding behind the
// last tensor.
__device__ static inline int fp16_tensor_at(const Fp16Tensors &t, int64_t element) {
    int k = 0;
    while (k < t.count && element >= t.ends[k]) k++;
    return k;
}

// Casts 8 masters: .x holds the codes of the first 4.
__device__ static inline uint2 fp16x8_to_fp8(const fp16_bits *p, float to_fp8) {
    float x[8];
    fp16x8_load(x, p);
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = __fmul_rn(x[j], to_fp8);
    return make_uint2(fp8x4_from_floats<FP8_E4M3>(x), fp8x4_from_floats<FP8_E4M3>(x + 4));
}

// ---- factors

// A thread block computes the factors of a layer, a thread those of one tensor. `scales` holds the FP16 scale of each
// entry of the parameter table. `amax` and scale_inv belong to the layers' FP8 weights and are laid out as in
// Fp8Slices.
static __global__ void fp16_factors_kernel(const __grid_constant__ Fp16Weights w, const float *scales,
                                           const uint32_t *amax, float *scale_inv, int64_t slot_stride) {
    grid_dependency_wait();
    const int64_t layer = blockIdx.x, slot = layer * slot_stride + w.tensors.linears[threadIdx.x];
    const float fp16 = scales[w.tensors.entries[threadIdx.x] + layer * w.tensors.layer_entries],
                fp8 = msamp_scale(__uint_as_float(amax[slot]), 1, FP8_E4M3_MAX);
    w.factors[layer * FP16_TENSORS + threadIdx.x] = Fp16Factors{msamp_factor(fp8, fp16), 1 / fp16};
    scale_inv[4 * slot] = 1 / fp8;
}

// Computes the factors of all tensors of `layers` layers, and scale_inv of all FP8 weights, from the amaxes of the
// values that the masters stand for.
static inline void fp16_factors(const Fp16Weights *w, int64_t layers, const float *scales, const uint32_t *amax,
                                float *scale_inv, int64_t slot_stride, cudaStream_t stream) {
    CUDA_LAUNCH(fp16_factors_kernel, (unsigned)layers, (unsigned)w->tensors.count, 0, stream, *w, scales, amax,
                scale_inv, slot_stride);
}

static __global__ void __launch_bounds__(FP16_THREADS)
    fp16_amax_kernel(uint32_t *amax, const fp16_bits *x, int64_t n, const float *scale) {
    grid_dependency_wait();
    uint32_t largest = 0;
    for (int64_t i = blockIdx.x * (int64_t)FP16_THREADS + threadIdx.x; i < n; i += (int64_t)gridDim.x * FP16_THREADS)
        largest = max(largest, (uint32_t)x[i] & 0x7fffu);
    largest = float_bits(__fmul_rn(half_bits_to_float(warp_max_u32(largest)), 1 / *scale));
    if (threadIdx.x % WARP_SIZE == 0 && largest > *(volatile uint32_t *)amax) atomicMax(amax, largest);
}

// Raises *amax to the largest magnitude of the values that n FP16 numbers with this scale stand for.
static inline void fp16_amax(uint32_t *amax, const fp16_bits *x, int64_t n, const float *scale, cudaStream_t stream) {
    CUDA_LAUNCH(fp16_amax_kernel, grid_size(min_i64(n, 1 << 20), FP16_THREADS), FP16_THREADS, 0, stream, amax, x, n,
                scale);
}

// ---- casts

// blockIdx.y is the layer.
static __global__ void __launch_bounds__(FP16_THREADS)
    fp16_slices_kernel(uint8_t *codes, const __grid_constant__ Fp16Weights w, int64_t n) {
    grid_dependency_wait();
    const int64_t layer = blockIdx.y, i = (blockIdx.x * (int64_t)FP16_THREADS + threadIdx.x) * FP16_ELEMENTS;
    if (i >= n) return;
    const int tensor = fp16_tensor_at(w.tensors, w.first + i);
    uint4 out = make_uint4(0, 0, 0, 0);
    if (tensor < w.tensors.count) {
        const fp16_bits *x = w.masters + layer * w.stride + i;
        const float to_fp8 = w.factors[layer * FP16_TENSORS + tensor].to_fp8;
        const uint2 low = fp16x8_to_fp8(x, to_fp8), high = fp16x8_to_fp8(x + 8, to_fp8);
        out = make_uint4(low.x, low.y, high.x, high.y);
    }
    *(uint4 *)(codes + layer * n + i) = out;
}

// Casts the slices of all layers, n elements each, to E4M3: codes [layers, n]. Padding behind the last tensor becomes
// 0. Dies unless n is a multiple of 16, w->stride is a multiple of 8, and the pointers are aligned to 16 bytes.
static inline void fp16_cast_slices(uint8_t *codes, const Fp16Weights *w, int64_t layers, int64_t n,
                                    cudaStream_t stream) {
    if (n % FP16_ELEMENTS || w->stride % 8)
        die("fp16_cast_slices: slices of %lld elements (need a multiple of 16) at a stride of %lld (need a multiple of "
            "8)",
            (long long)n, (long long)w->stride);
    require_aligned16(w->masters, "fp16_cast_slices", "masters");
    require_aligned16(codes, "fp16_cast_slices", "codes");
    const dim3 grid(grid_size(n, FP16_THREADS * FP16_ELEMENTS), (unsigned)layers);
    CUDA_LAUNCH(fp16_slices_kernel, grid, FP16_THREADS, 0, stream, codes, *w, n);
}

// This kernel splits the weight into tiles and transposes them like quantize_transpose_kernel. Each tensor has a
// multiple of 4 rows, so the 4 rows that a thread casts at a time belong to one tensor.
static __global__ void __launch_bounds__(CAST_THREADS, 4)
    fp16_transpose_kernel(uint8_t *rowwise, uint8_t *columnwise, const __grid_constant__ Fp16Weights w, int64_t layer,
                          int64_t at, int64_t R, int64_t C) {
    grid_dependency_wait();
    __shared__ __align__(16) uint32_t tile[1][CAST_TILE][CAST_WORDS];
    const unsigned column_tiles = (unsigned)ceil_div(C, CAST_TILE);
    const int64_t first_row = (int64_t)(blockIdx.x / column_tiles) * CAST_TILE,
                  first_column = (int64_t)(blockIdx.x % column_tiles) * CAST_TILE;
    const int tx = threadIdx.x % CAST_COLUMN_THREADS, ty = threadIdx.x / CAST_COLUMN_THREADS;
    const int64_t column = first_column + 8 * tx;
    const fp16_bits *x = w.masters + layer * w.stride + at;
#pragma unroll
    for (int g = 0; g < CAST_GROUPS; g++) {
        const int64_t row = first_row + g * CAST_GROUP_ROWS + 4 * ty;
        const bool inside = column < C && row < R;
        uint32_t low[4] = {}, high[4] = {};
        const int tensor = inside ? fp16_tensor_at(w.tensors, at + row * C) : 0;
        const float to_fp8 = w.factors[layer * FP16_TENSORS + tensor].to_fp8;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (!inside || row + j >= R) continue;
            const uint2 codes = fp16x8_to_fp8(x + (row + j) * C + column, to_fp8);
            low[j] = codes.x, high[j] = codes.y;
            if (rowwise) *(uint2 *)(rowwise + (row + j) * C + column) = codes;
        }
        if (columnwise) put_tile_words(tile[0], low, high, g);
    }
    if (!columnwise) return;
    __syncthreads();
    store_tile_columns<1>(columnwise, tile, first_row, first_column, R, C);
}

// Casts the weight [R, C] that begins at element `at` of the layer's matrices. This rank must have the layer's whole
// matrices. Writes E4M3 codes, rowwise, columnwise or both: those whose pointer in `out` is not NULL. fp16_factors has
// written their scale_inv. Dies unless C is a multiple of 16.
static inline void fp16_cast(QTensor out, const Fp16Weights *w, int64_t layer, int64_t at, int64_t R, int64_t C,
                             cudaStream_t stream) {
    quantize_check_size("fp16_cast", R, C);
    if (w->first) die("fp16_cast: this rank has only a part of the layer's matrices");
    require_aligned16(w->masters + layer * w->stride + at, "fp16_cast", "masters");
    require_aligned16(out.rowwise, "fp16_cast", "rowwise");
    require_aligned16(out.columnwise, "fp16_cast", "columnwise");
    CUDA_LAUNCH(fp16_transpose_kernel, grid_size(ceil_div(R, CAST_TILE) * ceil_div(C, CAST_TILE), 1), CAST_THREADS, 0,
                stream, out.rowwise, out.columnwise, *w, layer, at, R, C);
}

// ---- audit

static __global__ void __launch_bounds__(AUDIT_THREADS)
    fp16_audit_kernel(AuditSums *to, const fp16_bits *x, const uint8_t *codes, const Fp16Factors *factors,
                      const float *scale_inv, int64_t n) {
    grid_dependency_wait();
    const int64_t step = (int64_t)gridDim.x * AUDIT_THREADS;
    AuditSums sums = {};
    for (int64_t i = blockIdx.x * (int64_t)AUDIT_THREADS + threadIdx.x; i < n; i += step)
        audit_add(&sums, __fmul_rn(half_bits_to_float(x[i]), factors->scale_inv), codes[i], *scale_inv, FP8_E4M3);
    AuditSums *const destinations[2] = {to, NULL};
    audit_publish(destinations, sums);
}

// Adds to *to the audit sums of n codes of one weight, which compare the codes with the values that the masters stand
// for. The n elements begin at element `at` of this rank's slice of the layer's matrices, and their codes at `codes`.
// *scale_inv belongs to the FP8 weight.
static inline void fp16_audit(AuditSums *to, const Fp16Weights *w, int64_t layer, int64_t at, int64_t n,
                              const uint8_t *codes, const float *scale_inv, cudaStream_t stream) {
    int64_t begin = at;
    for (int k = 0; k < w->tensors.count; k++) {
        const int64_t end = min_i64(at + n, w->tensors.ends[k] - w->first);
        if (end <= begin) continue;
        CUDA_LAUNCH(fp16_audit_kernel, audit_blocks(ceil_div(end - begin, AUDIT_THREADS)), AUDIT_THREADS, 0, stream, to,
                    w->masters + layer * w->stride + begin, codes + begin - at, w->factors + layer * FP16_TENSORS + k,
                    scale_inv, end - begin);
        begin = end;
    }
}

#endif
