// Linear layer y = x W^T + bias in plain C, with fp32 operands or with operands of any FP8 recipe.
//
// x [rows, in], W [out, in], y [rows, out], bias [out] or NULL. "dgrad" is the gradient of x, "wgrad" that of W.
#ifndef LLMC_REFERENCE_LINEAR_H
#define LLMC_REFERENCE_LINEAR_H

#include "matmul.h"
#include "quantize_reference.h"

// dbias [out] = column sums of dy
static inline void bias_backward_reference(float *dbias, const float *dy, int64_t rows, int64_t out,
                                           Rounding rounding) {
    PARALLEL_FOR
    for (int64_t j = 0; j < out; j++) {
        double sum = 0;
        for (int64_t i = 0; i < rows; i++) sum += dy[i * out + j];
        dbias[j] = round_to((float)sum, rounding);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The three GEMMs with operands of any recipe (recipes.h). Each operand is the rowwise or columnwise data [outer,
// depth] of x, w or dy. Every GEMM computes c [outer of a, outer of b] = a b^T with fp32 sums, multiplies by scale_inv
// of whole tensors, adds the bias if there is one, and rounds once:
//     fprop: x rowwise, w rowwise;  dgrad: dy rowwise, w columnwise;  wgrad: dy columnwise, x columnwise

// An operand of the emulated GEMM.
typedef struct {
    MatrixView view;   // [outer, depth]: decoded codes, or without a cast the tensor's values
    float scale_inv;   // the whole tensor's; 1 without a cast, or if `values` already include finer scales
    uint8_t *codes;    // FP8 bytes, freed with the operand; NULL without a cast, or if the caller keeps them
    void *scales;      // scale_inv of `codes`; NULL if `codes` is NULL
    float *values;     // decoded codes; NULL without a cast
    UsageShape shape;  // shape of `codes` and `values`; `view` may be its transpose
} LinearOperand;

// Makes the operand that a GEMM reads from x [rows, cols]. With NO_SCALE the operand is a view of x. Else x holds bf16
// values, which are cast to FP8, with scales made from amaxes by `rule`. If the whole tensor has one scale, a `scale`
// above 0 is taken instead. The caller frees with linear_operand_free.
static inline LinearOperand linear_operand(const float *x, int64_t rows, int64_t cols, TensorUsage copy,
                                           ScaleGranularity granularity, ScaleRule rule, Fp8Format format,
                                           float scale) {
    // with one scale for the whole tensor, rowwise and columnwise data have the same codes
    const bool turned = copy == COLUMNWISE && granularity != PER_TENSOR;
    LinearOperand q = {};
    q.scale_inv = 1;
    q.shape = usage_shape(rows, cols, turned ? COLUMNWISE : ROWWISE);
    if (granularity == NO_SCALE) {
        q.view = matrix_view(x, q.shape.outer_stride, q.shape.depth_stride);
        return q;
    }
    q.codes = (uint8_t *)xrealloc(NULL, (size_t)(rows * cols));
    q.scales = xrealloc(NULL, (size_t)scale_bytes(granularity, q.shape.outer, q.shape.depth));
    q.values = (float *)xrealloc(NULL, (size_t)(rows * cols) * sizeof(float));
    quantize_copy(q.codes, q.scales, x, q.shape, granularity, rule, format, scale);
    dequantize_copy(q.values, q.codes, q.scales, q.shape.outer, q.shape.depth, granularity, format);
    if (is_per_tensor(granularity)) q.scale_inv = *(const float *)q.scales;
    q.view = copy == COLUMNWISE && !turned ? matrix_transposed(q.values, cols) : matrix_rows(q.values, q.shape.depth);
    return q;
}

// Makes an operand from the FP8 bytes of a tensor [rows, cols] that was cast with one scale. The caller keeps `codes`,
// and frees the operand with linear_operand_free.
static inline LinearOperand linear_operand_of_codes(const uint8_t *codes, int64_t rows, int64_t cols, TensorUsage copy,
                                                    Fp8Format format, float scale) {
    LinearOperand q = {};
    q.scale_inv = 1.0f / scale;
    q.values = (float *)xrealloc(NULL, (size_t)(rows * cols) * sizeof(float));
    dequantize_copy(q.values, codes, NULL, rows, cols, PER_TENSOR, format);
    q.view = copy == COLUMNWISE ? matrix_transposed(q.values, cols) : matrix_rows(q.values, cols);
    q.shape = usage_shape(rows, cols, ROWWISE);
    return q;
}

static inline void linear_operand_free(LinearOperand *q) {
    free(q->codes);
    free(q->scales);
    free(q->values);
    memset(q, 0, sizeof *q);
}

// c [M, N] = a [M, depth] b [N, depth]^T + bias [N].
static inline void linear_product(float *c, LinearOperand a, LinearOperand b, int64_t M, int64_t N, int64_t depth,
                                  const float *bias, Rounding rounding) {
    const MatrixView turned_b = matrix_view(b.view.data, b.view.col_stride, b.view.row_stride);
    matmul(c, N, a.view, turned_b, M, N, depth, epilogue(a.scale_inv * b.scale_inv, bias, false, rounding));
}

#endif
