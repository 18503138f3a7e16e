// FP8 casts by any recipe: picks the kernel by the granularity of the scales, and audits the result.
// It also decodes FP8 to bf16, casts a rank's slices of weights, and transposes codes.
//
// Casting a tensor takes two passes, the amax pass and the cast, unless its scales are per block, or are delayed and
// known. If the kernel that produces the tensor has already raised its amax, the amax pass is skipped.
#ifndef LLMC_QUANTIZE_CUH
#define LLMC_QUANTIZE_CUH

#include <cuda_fp16.h>

#include "audit.cuh"
#include "quantize_fine.cuh"

// Dies unless R rows of C columns per output can be cast. `function` names the caller in error messages.
static inline void quantize_check_size(const char *function, int64_t R, int64_t C) {
    if (R < 1 || C < 16 || C % 16)
        die("%s: %lld rows of %lld columns: need at least 1 row, and a multiple of 16 columns", function, (long long)R,
            (long long)C);
}

// Returns the addresses of the amaxes that the granularities of a tensor of R rows need.
static inline FineAmaxes fine_amaxes(const QTensor *t, int64_t R) {
    FineAmaxes a = {NULL, NULL, NULL};
    uint32_t *next = t->amax + usage_amaxes(t->row_granularity, R);
    if (t->row_granularity == PER_ROW) a.rows = t->amax;
    if (t->col_granularity == PER_ROW) a.columns = next;
    if (is_per_tensor(t->col_granularity)) a.tensor = next;
    if (is_per_tensor(t->row_granularity)) a.tensor = t->amax;
    return a;
}

// Returns the granularity of the data wanted (pointers that are not NULL). If rowwise and columnwise data are both
// wanted and differ in granularity, returns NO_SCALE, because no kernel casts that. PER_TENSOR_BROADCAST counts as
// PER_ROW.
static inline ScaleGranularity quantize_fine_granularity(const QTensor *t) {
    const ScaleGranularity row = t->row_granularity == PER_TENSOR_BROADCAST ? PER_ROW : t->row_granularity,
                           col = t->col_granularity == PER_TENSOR_BROADCAST ? PER_ROW : t->col_granularity;
    return !t->columnwise || row == col ? row : t->rowwise ? NO_SCALE : col;
}

template <class Source, ScaleGranularity GRANULARITY, Fp8Format FORMAT>
static inline void quantize_fine_launch(const QTensor &out, const Source &source, int64_t R, int64_t C,
                                        cudaStream_t stream) {
    const unsigned blocks = grid_size(ceil_div(R, CAST_TILE) * ceil_div(C, CAST_TILE), 1);
    CUDA_LAUNCH(quantize_fine_kernel<Source, GRANULARITY, FORMAT>, blocks, CAST_THREADS, 0, stream, source, out,
                fine_amaxes(&out, R), R, C);
}

// Casts with scales finer than a tensor. Returns false, and casts nothing, if there is no kernel for this cast: kernels
// are compiled only for casts that some recipe needs of the source.
template <class Source, Fp8Format FORMAT>
static inline bool quantize_fine(const QTensor &out, const Source &source, int64_t R, int64_t C, cudaStream_t stream) {
    if constexpr (!Source::AMAX) {
        const ScaleGranularity granularity = quantize_fine_granularity(&out);
        if (granularity < PER_ROW || out.rule != fine_rule(granularity) || out.delayed_scale) return false;
        if (granularity == PER_ROW) quantize_fine_launch<Source, PER_ROW, FORMAT>(out, source, R, C, stream);
        if (granularity == BLOCK_1X128) quantize_fine_launch<Source, BLOCK_1X128, FORMAT>(out, source, R, C, stream);
        if (granularity == BLOCK_1X32) quantize_fine_launch<Source, BLOCK_1X32, FORMAT>(out, source, R, C, stream);
        if (granularity != BLOCK_128X128) return true;
        if constexpr ((Source::ROLES & 1 << TENSOR_W) != 0 && FORMAT == FP8_E4M3) {
            quantize_fine_launch<Source, BLOCK_128X128, FORMAT>(out, source, R, C, stream);
            return true;
        }
    }
    return false;
}

template <class Source, Fp8Format FORMAT>
static inline void quantize_any(const char *function, const QTensor &out, const Source &source, int64_t R, int64_t C,
                                cudaStream_t stream) {
    const bool per_tensor = (!out.rowwise || out.row_granularity == PER_TENSOR) &&
                            (!out.columnwise || out.col_granularity == PER_TENSOR),
               rule = out.delayed_scale || out.rule == SCALE_TORCHAO || out.rule == SCALE_TE;
    if (per_tensor && rule) quantize_transpose_launch<Source, FORMAT>(out, source, R, C, stream);
    else if (!quantize_fine<Source, FORMAT>(out, source, R, C, stream))
        die("%s: no kernel casts this tensor with row granularity %d, col granularity %d, scale rule %d", function,
            out.row_granularity, out.col_granularity, out.rule);
}

// Returns how many bytes of its bf16 tensors a source reads to make a tensor of R rows and C columns per output.
template <class Source>
static inline int64_t source_bytes(int64_t R, int64_t C) {
    return R * C * Source::INPUTS * (int64_t)sizeof(bf16);
}

// Casts a source with C columns per output: writes codes and scale_inv of the data wanted (pointers that are not NULL),
// and adds audit sums if out.audit is set. `function` names the caller in error messages. Returns the bytes that the
// cast moves (source_bytes and codes), without those of the audit. Dies if R or C is out of range, if `out` lacks a
// pointer that the cast needs, if a pointer is not aligned, or if no kernel does this cast.
template <class Source>
static inline int64_t quantize_source(const char *function, QTensor out, Source source, int64_t R, int64_t C,
                                      cudaStream_t stream) {
    quantize_check_size(function, R, C);
    if ((!out.rowwise && !out.columnwise) || (out.rowwise && !out.rowwise_scale_inv) ||
        (out.columnwise && !out.columnwise_scale_inv))
        die("%s: a QTensor needs rowwise or columnwise data, with its scales", function);
    const bool blocks = usage_amaxes(out.rowwise ? out.row_granularity : out.col_granularity, 1) == 0;
    if (!out.amax && !blocks) die("%s: a QTensor with these granularities needs amax", function);
    if (blocks && Source::OUTPUTS > 1 && C % CAST_TILE)
        die("%s: %lld columns per output must be a multiple of %d: a scale block must not hold values of two outputs",
            function, (long long)C, CAST_TILE);
    require_aligned16(out.rowwise, function, "rowwise");
    require_aligned16(out.columnwise, function, "columnwise");
    require_aligned16(out.rowwise_scale_inv, function, "rowwise_scale_inv");
    require_aligned16(out.columnwise_scale_inv, function, "columnwise_scale_inv");
    if (out.format == FP8_E4M3) quantize_any<Source, FP8_E4M3>(function, out, source, R, C, stream);
    else if constexpr ((Source::ROLES & 1 << TENSOR_DY) != 0)
        quantize_any<Source, FP8_E5M2>(function, out, source, R, C, stream);
    else die("%s: only gradients are cast to E5M2", function);
    if (out.audit[ROWWISE] || out.audit[COLUMNWISE]) audit_source(out, source, R, C, stream);
    return source_bytes<Source>(R, C) + R * C * Source::OUTPUTS * ((out.rowwise != NULL) + (out.columnwise != NULL));
}

// Raises *amax to the largest magnitude of the source's values (NaN above infinity) with the source's own amax kernel.
// Returns false if it has none.
template <class Source>
static inline bool source_amax(uint32_t *, const Source &, int64_t, int64_t, cudaStream_t) {
    return false;
}
static inline bool source_amax(uint32_t *amax, const TensorSource &source, int64_t R, int64_t C, cudaStream_t stream) {
    tensor_amax(amax, source.x, R * C, stream);
    return true;
}

// The amax pass: raises the amaxes at out.amax, which the caller has cleared. It raises those of rowwise and of
// columnwise data, even if only one of the two is wanted now. Does nothing if the granularities need no amax, as those
// of blocks. Returns the bytes read (source_bytes).
template <class Source>
static inline int64_t quantize_amax_source(const char *function, QTensor out, Source source, int64_t R, int64_t C,
                                           cudaStream_t stream) {
    quantize_check_size(function, R, C);
    const FineAmaxes amaxes = fine_amaxes(&out, R);
    if (!usage_amaxes(out.row_granularity, R) && !usage_amaxes(out.col_granularity, C)) return 0;
    if (!out.amax) die("%s: a QTensor with these granularities needs amax", function);
    const bool whole = !amaxes.rows && !amaxes.columns && fp8_rule_keeps_nan(out.rule);
    if (whole && source_amax(amaxes.tensor, source, R, C, stream)) return source_bytes<Source>(R, C);
    const unsigned blocks = grid_size(ceil_div(R, CAST_TILE) * ceil_div(C, CAST_TILE), 1);
    if (fp8_rule_keeps_nan(out.rule))
        CUDA_LAUNCH(quantize_amax_kernel<Source, true>, blocks, CAST_THREADS, 0, stream, source, amaxes, R, C);
    else CUDA_LAUNCH(quantize_amax_kernel<Source, false>, blocks, CAST_THREADS, 0, stream, source, amaxes, R, C);
    return source_bytes<Source>(R, C);
}

// ---- tensors in memory

// Casts x [R, C]. If the granularities of `out` need amaxes, the caller has found them in out.amax.
static inline void quantize_transpose(QTensor out, const bf16 *x, int64_t R, int64_t C, cudaStream_t stream) {
    require_aligned16(x, "quantize_transpose", "x");
    TensorSource source = {x, C};
    quantize_source("quantize_transpose", out, source, R, C, stream);
}

// Runs the amax pass of x [R, C]; see quantize_amax_source.
static inline void tensor_amax_pass(QTensor out, const bf16 *x, int64_t R, int64_t C, cudaStream_t stream) {
    require_aligned16(x, "tensor_amax_pass", "x");
    TensorSource source = {x, C};
    quantize_amax_source("tensor_amax_pass", out, source, R, C, stream);
}

// Casts x [R, C], after the amax pass if its scales need amaxes and are not delayed. The caller has cleared the slots
// at out.amax.
static inline void tensor_quantize(QTensor out, const bf16 *x, int64_t R, int64_t C, cudaStream_t stream) {
    if (!out.delayed_scale) tensor_amax_pass(out, x, R, C, stream);
    quantize_transpose(out, x, R, C, stream);
}

// ---- FP8 to bf16

enum { DEQUANTIZE_THREADS = 256, DEQUANTIZE_ELEMENTS = 16 };

// Decodes two codes to two floats, exactly; the one in bits 0-7 first.
template <Fp8Format FORMAT>
__device__ static inline float2 floats_from_fp8x2(uint16_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    return make_float2(fp8_to_float((uint8_t)codes, FORMAT), fp8_to_float((uint8_t)(codes >> 8), FORMAT));
#else
    uint32_t halves;
    if (FORMAT == FP8_E4M3) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    else asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(codes));
    return __half22float2(*(const __half2 *)&halves);
#endif
}

template <Fp8Format FORMAT>
static __global__ void __launch_bounds__(DEQUANTIZE_THREADS)
    fp8_dequantize_kernel(bf16 *out, const uint8_t *codes, const void *scales, ScaleGranularity granularity,
                          int64_t outer, int64_t depth) {
    grid_dependency_wait();
    const int64_t at = (blockIdx.x * (int64_t)DEQUANTIZE_THREADS + threadIdx.x) * DEQUANTIZE_ELEMENTS, i = at / depth,
                  k = at % depth;
    if (i >= outer) return;
    const float inverse = is_per_tensor(granularity)
                              ? 1.0f
                              : scale_load(granularity, scales, scale_index(granularity, i, k, outer, depth));
    const uint4 c = *(const uint4 *)(codes + at);
    const uint32_t word[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float f[8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 pair = floats_from_fp8x2<FORMAT>((uint16_t)(word[2 * half + j / 2] >> (16 * (j % 2))));
            f[2 * j] = __fmul_rn(pair.x, inverse), f[2 * j + 1] = __fmul_rn(pair.y, inverse);
        }
        bf16x8_store(out + at + 8 * half, bf16x8_pack(f));
    }
}

// Decodes an operand of a GEMM: out [outer, depth] = value of each code, times its scale_inv if the granularity is
// finer than a tensor. Such a scale_inv is a power of two, so bf16 holds the product exactly, except near the ends of
// bf16's range. With tensor granularities scale_inv is left out: the GEMM multiplies its sums by it. depth is a
// multiple of 16.
static inline void fp8_dequantize(bf16 *out, const uint8_t *codes, const void *scales, ScaleGranularity granularity,
                                  Fp8Format format, int64_t outer, int64_t depth, cudaStream_t stream) {
    if (outer < 1 || depth < DEQUANTIZE_ELEMENTS || depth % DEQUANTIZE_ELEMENTS)
        die("fp8_dequantize: %lld rows of %lld codes: need at least 1 row, and a multiple of %d codes",
            (long long)outer, (long long)depth, DEQUANTIZE_ELEMENTS);
    require_aligned16(out, "fp8_dequantize", "out");
    require_aligned16(codes, "fp8_dequantize", "codes");
    const unsigned blocks = grid_size(outer * depth, DEQUANTIZE_THREADS * DEQUANTIZE_ELEMENTS);
    if (format == FP8_E4M3)
        CUDA_LAUNCH(fp8_dequantize_kernel<FP8_E4M3>, blocks, DEQUANTIZE_THREADS, 0, stream, out, codes, scales,
                    granularity, outer, depth);
    else
        CUDA_LAUNCH(fp8_dequantize_kernel<FP8_E5M2>, blocks, DEQUANTIZE_THREADS, 0, stream, out, codes, scales,
                    granularity, outer, depth);
}

// ---------------------------------------------------------------------------------------------------------------------
// Sharded weights: a rank casts its slice of a layer's matrices with scales that hold for all ranks. The all-gather
// moves the codes, and fp8_transpose transposes the gathered codes. This needs one scale per tensor. The results equal
// those that quantize_transpose makes of the whole tensors.

enum { SLICE_MAX_TENSORS = 4, SLICE_THREADS = 256, SLICE_ELEMENTS = 16 };

// `count` layers with `num_tensors` quantized tensors each. A layer's slice has n elements. Tensor j of it is elements
// [ends[j - 1], ends[j]), possibly none; elements after the last tensor are padding. n and all ends are multiples of
// 16.
typedef struct {
    int64_t count, n;
    int num_tensors;
    int64_t ends[SLICE_MAX_TENSORS];
    const bf16 *x;  // layer l's slice begins at x + l * x_stride
    int64_t x_stride;
    uint8_t *codes;        // [count, n]
    const uint32_t *amax;  // amax of tensor j of layer l is amax[l * slot_stride + j]
    // Scales to cast with, indexed like amax; the amaxes are then not read. NULL: scales follow from the amaxes.
    const float *delayed_scale;
    float *scale_inv;  // scale_inv of tensor j of layer l is scale_inv[4 * (l * slot_stride + j)]
    int64_t slot_stride;
    ScaleRule rule;
} Fp8Slices;

// blockIdx.y is the layer. Reads 2 bytes and writes 1 per element.
template <Fp8Format FORMAT>
static __global__ void __launch_bounds__(SLICE_THREADS) quantize_slices_kernel(const __grid_constant__ Fp8Slices s) {
    grid_dependency_wait();
    __shared__ float scales[SLICE_MAX_TENSORS];
    const int64_t layer = blockIdx.y, i = (blockIdx.x * (int64_t)SLICE_THREADS + threadIdx.x) * SLICE_ELEMENTS;
    if ((int)threadIdx.x < s.num_tensors) {
        const int64_t slot = layer * s.slot_stride + threadIdx.x;
        const float scale =
            s.delayed_scale ? s.delayed_scale[slot] : fp8_rule_scale(s.rule, __uint_as_float(s.amax[slot]), FORMAT);
        scales[threadIdx.x] = scale;
        if (blockIdx.x == 0) s.scale_inv[4 * slot] = __frcp_rn(scale);
    }
    __syncthreads();
    if (i >= s.n) return;
    int tensor = 0;
    while (tensor < s.num_tensors && i >= s.ends[tensor]) tensor++;
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (tensor < s.num_tensors) {
        const bf16 *x = s.x + layer * s.x_stride + i;
        const uint2 low = fp8x8_from_bf16<FORMAT>(bf16x8_load(x), scales[tensor]),
                    high = fp8x8_from_bf16<FORMAT>(bf16x8_load(x + 8), scales[tensor]);
        codes = make_uint4(low.x, low.y, high.x, high.y);
    }
    *(uint4 *)(s.codes + layer * s.n + i) = codes;
}

// Casts the slices to E4M3, with the delayed scales or with scales made from the amaxes. Writes scale_inv of every
// tensor, even if the slice has no part of it.
static inline void quantize_slices(const Fp8Slices *s, cudaStream_t stream) {
    if (s->n % SLICE_ELEMENTS || s->x_stride % 8 || s->num_tensors > SLICE_MAX_TENSORS)
        die("quantize_slices: slices of %lld elements (need a multiple of 16) at a stride of %lld (need a multiple of "
            "8), with %d tensors (at most 4)",
            (long long)s->n, (long long)s->x_stride, s->num_tensors);
    for (int j = 0; j < s->num_tensors; j++)
        if (s->ends[j] % SLICE_ELEMENTS)
            die("quantize_slices: tensor %d ends at element %lld, not a multiple of %d", j, (long long)s->ends[j],
                SLICE_ELEMENTS);
    require_aligned16(s->x, "quantize_slices", "x");
    require_aligned16(s->codes, "quantize_slices", "codes");
    const dim3 grid(grid_size(s->n, SLICE_THREADS * SLICE_ELEMENTS), (unsigned)s->count);
    CUDA_LAUNCH(quantize_slices_kernel<FP8_E4M3>, grid, SLICE_THREADS, 0, stream, *s);
}

// Adds the audit sums of an earlier enqueued quantize_slices, for tensor j of layer l, to sums[l * layer_stride + j *
// tensor_stride] (device memory; audit.h).
static inline void audit_slices(const Fp8Slices *s, AuditSums *sums, int64_t layer_stride, int64_t tensor_stride,
                                cudaStream_t stream) {
    for (int64_t l = 0; l < s->count; l++)
        for (int j = 0; j < s->num_tensors; j++) {
            const int64_t first = j ? s->ends[j - 1] : 0;
            audit_part(sums + l * layer_stride + j * tensor_stride, s->x + l * s->x_stride + first,
                       s->codes + l * s->n + first, s->scale_inv + 4 * (l * s->slot_stride + j), s->ends[j] - first,
                       FP8_E4M3, stream);
        }
}

// Transposes existing codes by tiles, as quantize_transpose_kernel does after its cast.
static __global__ void __launch_bounds__(CAST_THREADS, 4)
    fp8_transpose_kernel(uint8_t *col, const uint8_t *row, int64_t R, int64_t C) {
    grid_dependency_wait();
    __shared__ __align__(16) uint32_t tile[1][CAST_TILE][CAST_WORDS];
    const unsigned column_tiles = (unsigned)ceil_div(C, CAST_TILE);
    const int64_t first_row = (int64_t)(blockIdx.x / column_tiles) * CAST_TILE,
                  first_column = (int64_t)(blockIdx.x % column_tiles) * CAST_TILE;
    const int tx = threadIdx.x % CAST_COLUMN_THREADS, ty = threadIdx.x / CAST_COLUMN_THREADS;
    const int64_t column = first_column + 8 * tx;
    uint2 codes[CAST_GROUPS][4];
#pragma unroll
    for (int g = 0; g < CAST_GROUPS; g++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int64_t r = first_row + g * CAST_GROUP_ROWS + 4 * ty + j;
            codes[g][j] = make_uint2(0, 0);
            if (column < C && r < R) codes[g][j] = __ldcs((const uint2 *)(row + r * C + column));
        }
#pragma unroll
    for (int g = 0; g < CAST_GROUPS; g++) {
        uint32_t low[4], high[4];
#pragma unroll
        for (int j = 0; j < 4; j++) low[j] = codes[g][j].x, high[j] = codes[g][j].y;
        put_tile_words(tile[0], low, high, g);
    }
    __syncthreads();
    store_tile_columns<1>(col, tile, first_row, first_column, R, C);
}

// Writes col [C, R] = row [R, C] transposed, in bytes. C is a multiple of 16. Reads 1 byte and writes 1 per element.
static inline void fp8_transpose(uint8_t *col, const uint8_t *row, int64_t R, int64_t C, cudaStream_t stream) {
    if (R < 1 || C < 16 || C % 16)
        die("fp8_transpose: %lld rows of %lld columns: need at least 1 row, and a multiple of 16 columns", (long long)R,
            (long long)C);
    require_aligned16(row, "fp8_transpose", "row");
    require_aligned16(col, "fp8_transpose", "col");
    CUDA_LAUNCH(fp8_transpose_kernel, grid_size(ceil_div(R, CAST_TILE) * ceil_div(C, CAST_TILE), 1), CAST_THREADS, 0,
                stream, col, row, R, C);
}

#endif
