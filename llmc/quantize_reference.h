// FP8 copies of matrices in plain C: codes and inverse scales of every grain and scale rule of the recipes, bit for bit what a GPU's casts must give.
#ifndef LLMC_QUANTIZE_REFERENCE_H
#define LLMC_QUANTIZE_REFERENCE_H

#include "recipes.h"

// Largest magnitude, as bits, of the block [rows, cols] whose element (i, k) is x[i * row_stride + k * col_stride].
static inline uint32_t quantize_block_amax(const float *x, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride, ScaleRule rule) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < cols; k++) amax = fp8_rule_amax(rule, amax, x[i * row_stride + k * col_stride]);
    return amax;
}

// The same for the whole matrix [outer, depth].
static inline uint32_t quantize_tensor_amax(const float *x, int64_t outer, int64_t depth, int64_t outer_stride, int64_t depth_stride, ScaleRule rule) {
    uint32_t amax = 0;
    PARALLEL_MAX
    for (int64_t i = 0; i < outer; i++) {
        const uint32_t row = quantize_block_amax(x + i * outer_stride, 1, depth, outer_stride, depth_stride, rule);
        if (row > amax) amax = row;
    }
    return amax;
}

// Codes of one block, `depth` apart from row to row. The product with the scale is one rounding in fp32, as torchao and Transformer Engine have it.
static inline void quantize_block_cast(uint8_t *codes, int64_t depth, const float *x, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride, float scale,
                                       Fp8Format format) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < cols; k++) codes[i * depth + k] = fp8_from_float(x[i * row_stride + k * col_stride] * scale, format);
}

// What shares a scale along the depth of a copy.
static inline int64_t grain_width(Grain g, int64_t depth) { return g == GRAIN_1X128 || g == GRAIN_128X128 ? 128 : g == GRAIN_1X32 ? 32 : depth; }

// Codes [outer, depth] and inverse scales (scale_bytes(), unused places zero) of a copy of the matrix whose element (i, k) is
// x[i * outer_stride + k * depth_stride], with the largest magnitudes by the rule from x itself; the grains of a whole tensor take `scale` instead if it is
// above 0 (delayed scaling). x holds the values of the bf16 tensor as floats. A block at a ragged edge is a smaller block. An inverse scale is the fp32
// quotient 1 / scale (infinite where an infinite amax made the scale zero), in E8M0 the power of two itself. GRAIN_1X32 goes with SCALE_MX.
static inline void quantize_copy(uint8_t *codes, void *scales, const float *x, int64_t outer, int64_t depth, int64_t outer_stride, int64_t depth_stride, Grain grain,
                                 ScaleRule rule, Fp8Format format, float scale) {
    const bool whole = grain_is_tensor(grain);
    if (whole && !(scale > 0)) scale = fp8_rule_scale(rule, float_from_bits(quantize_tensor_amax(x, outer, depth, outer_stride, depth_stride, rule)), format);
    const int64_t height = grain == GRAIN_128X128 ? 128 : 1, width = grain_width(grain, depth);
    memset(scales, 0, (size_t)scale_bytes(grain, outer, depth));
    PARALLEL_FOR
    for (int64_t band = 0; band < ceil_div(outer, height); band++) {
        const int64_t i = band * height, rows = min_i64(height, outer - i);
        for (int64_t k = 0; k < depth; k += width) {
            const int64_t cols = min_i64(width, depth - k), place = scale_index(grain, i, k, outer, depth);
            const float *block = x + i * outer_stride + k * depth_stride;
            const float amax = whole ? 0 : float_from_bits(quantize_block_amax(block, rows, cols, outer_stride, depth_stride, rule));
            const float s = whole ? scale : fp8_rule_scale(rule, amax, format);
            quantize_block_cast(codes + i * depth + k, depth, block, rows, cols, outer_stride, depth_stride, s, format);
            if (grain == GRAIN_1X32) ((uint8_t *)scales)[place] = e8m0_from_amax(amax, format);
            else if (grain != GRAIN_TENSOR || i == 0) ((float *)scales)[place] = 1.0f / s;
        }
    }
}

// What a product sees of a copy, [outer, depth]: the codes' values, times the inverse scales for the grains finer than a tensor (powers of two: exact, short of
// fp32's smallest numbers); the products multiply their sums by the inverse scales of whole tensors themselves.
static inline void dequantize_copy(float *out, const uint8_t *codes, const void *scales, int64_t outer, int64_t depth, Grain grain, Fp8Format format) {
    const int64_t width = grain_width(grain, depth);
    PARALLEL_FOR
    for (int64_t i = 0; i < outer; i++)
        for (int64_t k = 0; k < depth; k++) {
            const float inverse = grain_is_tensor(grain) ? 1.0f : scale_load(grain, scales, scale_index(grain, i, k / width * width, outer, depth));
            out[i * depth + k] = fp8_to_float(codes[i * depth + k], format) * inverse;
        }
}

#endif
