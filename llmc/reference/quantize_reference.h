// FP8 casts of matrices in plain C: the codes and scales that a GPU's casts must give, bit for bit.
#ifndef LLMC_QUANTIZE_REFERENCE_H
#define LLMC_QUANTIZE_REFERENCE_H

#include "../config/recipes.h"

// Returns the amax, as fp32 bits, of one block of a tensor's rowwise or columnwise data (shape s): `rows` along the
// outer dimension by `cols` along the depth. x points to the block's first element.
static inline uint32_t quantize_block_amax(const float *x, UsageShape s, int64_t rows, int64_t cols, ScaleRule rule) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < cols; k++) amax = fp8_rule_amax(rule, amax, x[i * s.outer_stride + k * s.depth_stride]);
    return amax;
}

// Returns the amax, as bits, of all n values of a tensor.
static inline uint32_t quantize_tensor_amax(const float *x, int64_t n, ScaleRule rule) {
    uint32_t amax = 0;
    PARALLEL_MAX(amax)
    for (int64_t i = 0; i < n; i++) {
        const uint32_t one = fp8_rule_amax(rule, 0, x[i]);
        if (one > amax) amax = one;
    }
    return amax;
}

// Casts a block, given as in quantize_block_amax, to codes in rows of s.depth bytes. `codes` points to the block's
// first code. Multiplication by the scale rounds once, in fp32, as in torchao and Transformer Engine.
static inline void quantize_block_cast(uint8_t *codes, const float *x, UsageShape s, int64_t rows, int64_t cols,
                                       float scale, Fp8Format format) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < cols; k++)
            codes[i * s.depth + k] = fp8_from_float(x[i * s.outer_stride + k * s.depth_stride] * scale, format);
}

// Returns the number of values along the depth that share a scale.
static inline int64_t block_width(ScaleGranularity g, int64_t depth) {
    const int64_t cols = granularity_traits(g)->cols;
    return cols == WHOLE ? depth : cols;
}

// Casts x, a bf16 tensor as floats, to rowwise or columnwise codes [outer, depth]. Writes scale_bytes() bytes of
// scale_inv to `scales`; their padding is zero. `rule` makes the scale of a block from the block's amax. If the whole
// tensor has one scale and the argument `scale` is above 0, that scale is taken instead. Blocks at the edges may
// be smaller. An fp32 scale_inv is 1 / scale, infinite if an infinite amax made the scale zero. An E8M0 scale_inv is a
// power of two, stored as its exponent: e8m0_from_amax() makes it without a division. BLOCK_1X32 needs SCALE_MX.
static inline void quantize_copy(uint8_t *codes, void *scales, const float *x, UsageShape s,
                                 ScaleGranularity granularity, ScaleRule rule, Fp8Format format, float scale) {
    const bool whole = is_per_tensor(granularity);
    const int64_t outer = s.outer, depth = s.depth;
    if (whole && !(scale > 0))
        scale = fp8_rule_scale(rule, float_from_bits(quantize_tensor_amax(x, outer * depth, rule)), format);
    const GranularityTraits *traits = granularity_traits(granularity);
    const int64_t height = max_i64(1, traits->rows), width = block_width(granularity, depth);
    memset(scales, 0, (size_t)scale_bytes(granularity, outer, depth));
    PARALLEL_FOR
    for (int64_t band = 0; band < ceil_div(outer, height); band++) {
        const int64_t i = band * height, rows = min_i64(height, outer - i);
        for (int64_t k = 0; k < depth; k += width) {
            const int64_t cols = min_i64(width, depth - k), place = scale_index(granularity, i, k, outer, depth);
            const float *block = x + i * s.outer_stride + k * s.depth_stride;
            const float amax = whole ? 0 : float_from_bits(quantize_block_amax(block, s, rows, cols, rule)),
                        block_scale = whole ? scale : fp8_rule_scale(rule, amax, format);
            quantize_block_cast(codes + i * depth + k, block, s, rows, cols, block_scale, format);
            if (traits->type == SCALE_TYPE_E8M0) ((uint8_t *)scales)[place] = e8m0_from_amax(amax, format);
            else if (traits->rows != WHOLE || i == 0) ((float *)scales)[place] = 1.0f / block_scale;
        }
    }
}

// Decodes FP8 data [outer, depth] as a GEMM reads it: the codes' values times scale_inv of granularities finer than a
// tensor. In every recipe that scale_inv is a power of two, so the result is exact in fp32's normal range. The
// scale_inv of a whole tensor is not included: GEMMs multiply their sums by it.
static inline void dequantize_copy(float *out, const uint8_t *codes, const void *scales, int64_t outer, int64_t depth,
                                   ScaleGranularity granularity, Fp8Format format) {
    const int64_t width = block_width(granularity, depth);
    PARALLEL_FOR
    for (int64_t i = 0; i < outer; i++)
        for (int64_t k = 0; k < depth; k++) {
            const int64_t place = scale_index(granularity, i, k / width * width, outer, depth);
            const float inverse = is_per_tensor(granularity) ? 1.0f : scale_load(granularity, scales, place);
            out[i * depth + k] = fp8_to_float(codes[i * depth + k], format) * inverse;
        }
}

#endif
