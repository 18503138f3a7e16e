// The three GEMMs of a linear layer in fp32 or bf16, as plain calls of matmul().
#ifndef DEV_TEST_LINEAR_GEMMS_H
#define DEV_TEST_LINEAR_GEMMS_H

#include "../../../llmc/reference/matmul.h"

// y [rows, out] = x W^T + bias
static inline void linear_forward_reference(float *y, const float *x, const float *w, const float *bias, int64_t rows,
                                            int64_t in, int64_t out, Rounding rounding) {
    matmul(y, out, matrix_rows(x, in), matrix_transposed(w, in), rows, out, in, epilogue(1, bias, false, rounding));
}

// dx [rows, in] = dy W
static inline void linear_dgrad_reference(float *dx, const float *dy, const float *w, int64_t rows, int64_t in,
                                          int64_t out, Rounding rounding) {
    matmul(dx, in, matrix_rows(dy, out), matrix_rows(w, in), rows, in, out, epilogue(1, NULL, false, rounding));
}

// dw [out, in] = dy^T x
static inline void linear_wgrad_reference(float *dw, const float *dy, const float *x, int64_t rows, int64_t in,
                                          int64_t out, Rounding rounding) {
    matmul(dw, in, matrix_transposed(dy, out), matrix_rows(x, in), out, in, rows, epilogue(1, NULL, false, rounding));
}

#endif
