// GEMM in fp32 on the CPU: packed operands, register tiles, an epilogue that scales, adds and rounds.
#ifndef LLMC_REFERENCE_MATMUL_H
#define LLMC_REFERENCE_MATMUL_H

#include "rounding.h"

// Element (i, j) is data[i * row_stride + j * col_stride]: a transpose is a view.
typedef struct {
    const float *data;
    int64_t row_stride, col_stride;
} MatrixView;

static inline MatrixView matrix_view(const float *data, int64_t row_stride, int64_t col_stride) {
    return (MatrixView){data, row_stride, col_stride};
}

static inline MatrixView matrix_rows(const float *data, int64_t columns) { return matrix_view(data, columns, 1); }
static inline MatrixView matrix_transposed(const float *data, int64_t columns) { return matrix_view(data, 1, columns); }

// The steps from a sum to the stored value: c = round(sum * alpha + bias[column] + (accumulate ? c : 0)).
typedef struct {
    float alpha;
    const float *bias;  // NULL: none
    bool accumulate;
    Rounding rounding;
} Epilogue;

static inline Epilogue epilogue(float alpha, const float *bias, bool accumulate, Rounding rounding) {
    return (Epilogue){alpha, bias, accumulate, rounding};
}

// Register tile of the inner loop: 12 vectors of 16 floats. gcc vectorizes it well for AVX2 and SSE too. A tile 16
// wide is not vectorized well, because gcc unrolls that loop before it looks for vectors.
enum { TILE_ROWS = 6, TILE_COLS = 32 };
enum { SLAB = 512 };  // elements of K per pass, so that the tile's operands stay in cache

// Copies `count` rows of a view (or columns, given its transpose) into panels of `lanes` rows: [ceil(count /
// lanes)][K][lanes], padded with zeros, the order in which the inner loop reads them.
static inline void matrix_pack(float *panels, MatrixView m, int64_t count, int64_t K, int64_t lanes) {
    PARALLEL_FOR
    for (int64_t p = 0; p < ceil_div(count, lanes); p++) {
        float *panel = panels + p * K * lanes;
        const float *from = m.data + p * lanes * m.row_stride;
        const int64_t filled = min_i64(lanes, count - p * lanes);
        if (filled < lanes) memset(panel, 0, (size_t)(K * lanes) * sizeof(float));
        if (m.row_stride == 1) {
            for (int64_t k = 0; k < K; k++)
                memcpy(panel + k * lanes, from + k * m.col_stride, (size_t)filled * sizeof(float));
        } else {
            for (int64_t i = 0; i < filled; i++)
                for (int64_t k = 0; k < K; k++) panel[k * lanes + i] = from[i * m.row_stride + k * m.col_stride];
        }
    }
}

// tile += a panel [K][TILE_ROWS] times b panel [K][TILE_COLS]. The loops over the tile have constant bounds, so the
// tile lives in registers. Sanitizers leave it out, as it would take most of their time; they see its panels and its
// tile in matrix_pack() and matmul_store().
__attribute__((no_sanitize("address", "undefined"))) static inline void
matmul_tile(float tile[TILE_ROWS][TILE_COLS], const float *a, const float *b, int64_t K) {
    float sum[TILE_ROWS][TILE_COLS];
    memcpy(sum, tile, sizeof sum);
    for (int64_t k = 0; k < K; k++, a += TILE_ROWS, b += TILE_COLS)
        for (int i = 0; i < TILE_ROWS; i++)
            for (int j = 0; j < TILE_COLS; j++) sum[i][j] += a[i] * b[j];
    memcpy(tile, sum, sizeof sum);
}

static inline void matmul_store(float *c, int64_t ldc, const float tile[TILE_ROWS][TILE_COLS], int64_t rows,
                                int64_t cols, const float *bias, Epilogue e) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            float v = tile[i][j] * e.alpha;
            if (bias) v += bias[j];
            if (e.accumulate) v += c[i * ldc + j];
            c[i * ldc + j] = round_to(v, e.rounding);
        }
}

// c [M, N] (rows `ldc` apart) from a [M, K] and b [K, N]. Each element is one fp32 sum over K, in order.
static inline void matmul(float *c, int64_t ldc, MatrixView a, MatrixView b, int64_t M, int64_t N, int64_t K,
                          Epilogue e) {
    const int64_t row_panels = ceil_div(M, TILE_ROWS), col_panels = ceil_div(N, TILE_COLS);
    float *pa = (float *)xrealloc(NULL, (size_t)(row_panels * K * TILE_ROWS) * sizeof(float));
    float *pb = (float *)xrealloc(NULL, (size_t)(col_panels * K * TILE_COLS) * sizeof(float));
    matrix_pack(pa, a, M, K, TILE_ROWS);
    matrix_pack(pb, matrix_view(b.data, b.col_stride, b.row_stride), N, K, TILE_COLS);
    enum { GROUP = 8 };  // row panels of a task, which multiplies them by one column panel
    PARALLEL_FOR_UNEVEN
    for (int64_t task = 0; task < ceil_div(row_panels, GROUP) * col_panels; task++) {
        const int64_t p0 = task / col_panels * GROUP, q = task % col_panels, p1 = min_i64(p0 + GROUP, row_panels);
        float tiles[GROUP][TILE_ROWS][TILE_COLS];
        memset(tiles, 0, sizeof tiles);
        for (int64_t k = 0; k < K; k += SLAB)
            for (int64_t p = p0; p < p1; p++)
                matmul_tile(tiles[p - p0], pa + (p * K + k) * TILE_ROWS, pb + (q * K + k) * TILE_COLS,
                            min_i64(SLAB, K - k));
        for (int64_t p = p0; p < p1; p++)
            matmul_store(c + p * TILE_ROWS * ldc + q * TILE_COLS, ldc, tiles[p - p0],
                         min_i64(TILE_ROWS, M - p * TILE_ROWS), min_i64(TILE_COLS, N - q * TILE_COLS),
                         e.bias ? e.bias + q * TILE_COLS : NULL, e);
    }
    free(pa);
    free(pb);
}

#endif
