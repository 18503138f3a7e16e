// Every operation of the model in plain C: the arithmetic of the CPU trainer, and what CUDA kernels are checked with.
//
// All tensors are float arrays, row-major. Inside an operation everything is fp32 (sums over many elements in double, so that the truth has no
// error of its own); each output is rounded once, where the GPU rounds it: `rounding` is ROUND_BF16 to emulate bf16 tensors, ROUND_NONE for pure fp32.
// Gradients of weights are overwritten, or added to before that one rounding when `accumulate` is true; gradients of activations are overwritten.
//
// Results do not depend on the number of threads: every output element is summed by one thread in a fixed order.
#ifndef LLMC_REFERENCE_H
#define LLMC_REFERENCE_H

#include <math.h>

#include "adamw_math.h"
#include "attention_dims.h"
#include "../config/model_config.h"
#include "quantize_reference.h"

typedef enum { ROUND_NONE, ROUND_BF16 } Rounding;

static inline float round_to(float x, Rounding rounding) { return rounding == ROUND_BF16 ? bf16_round(x) : x; }

// Rounds n values in place.
static inline void round_array(float *x, int64_t n, Rounding rounding) {
    if (rounding == ROUND_NONE) return;
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) x[i] = bf16_round(x[i]);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Matrix product

// Element (i, j) is data[i * row_stride + j * col_stride]: a transpose is a view.
typedef struct {
    const float *data;
    int64_t row_stride, col_stride;
} MatrixView;

static inline MatrixView matrix_view(const float *data, int64_t row_stride, int64_t col_stride) {
    MatrixView v = {data, row_stride, col_stride};
    return v;
}

static inline MatrixView matrix_rows(const float *data, int64_t columns) { return matrix_view(data, columns, 1); }
static inline MatrixView matrix_transposed(const float *data, int64_t columns) { return matrix_view(data, 1, columns); }

// What happens to a sum before it is stored: c = round(sum * alpha + bias[column] + (accumulate ? c : 0)).
typedef struct {
    float alpha;
    const float *bias;  // NULL: none
    bool accumulate;
    Rounding rounding;
} Epilogue;

static inline Epilogue epilogue(float alpha, const float *bias, bool accumulate, Rounding rounding) {
    Epilogue e = {alpha, bias, accumulate, rounding};
    return e;
}

// Register tile of the inner loop: 12 vectors of 16 floats. gcc makes good code of it for AVX2 and SSE too, but not of a tile 16 wide, whose loop it
// unrolls before it looks for vectors.
enum { TILE_ROWS = 6, TILE_COLS = 32 };
enum { SLAB = 512 };                     // elements of the sum taken at once, so that the tile's operands stay in cache

// Copies `lanes` rows of a view (or columns, given its transpose) into panels [ceil(count / lanes)][K][lanes], padded with zeros, the order in
// which the inner loop reads them.
static inline void matrix_pack(float *panels, MatrixView m, int64_t count, int64_t K, int64_t lanes) {
    PARALLEL_FOR
    for (int64_t p = 0; p < ceil_div(count, lanes); p++) {
        float *panel = panels + p * K * lanes;
        const float *from = m.data + p * lanes * m.row_stride;
        const int64_t filled = min_i64(lanes, count - p * lanes);
        if (filled < lanes) memset(panel, 0, (size_t)(K * lanes) * sizeof(float));
        if (m.row_stride == 1) {
            for (int64_t k = 0; k < K; k++) memcpy(panel + k * lanes, from + k * m.col_stride, (size_t)filled * sizeof(float));
        } else {
            for (int64_t i = 0; i < filled; i++)
                for (int64_t k = 0; k < K; k++) panel[k * lanes + i] = from[i * m.row_stride + k * m.col_stride];
        }
    }
}

// tile += a panel [K][TILE_ROWS] times b panel [K][TILE_COLS]. The loops over the tile have constant bounds, so it lives in registers.
static inline void matmul_tile(float tile[TILE_ROWS][TILE_COLS], const float *a, const float *b, int64_t K) {
    float sum[TILE_ROWS][TILE_COLS];
    memcpy(sum, tile, sizeof sum);
    for (int64_t k = 0; k < K; k++, a += TILE_ROWS, b += TILE_COLS)
        for (int i = 0; i < TILE_ROWS; i++)
            for (int j = 0; j < TILE_COLS; j++) sum[i][j] += a[i] * b[j];
    memcpy(tile, sum, sizeof sum);
}

static inline void matmul_store(float *c, int64_t ldc, const float tile[TILE_ROWS][TILE_COLS], int64_t rows, int64_t cols, const float *bias, Epilogue e) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            float v = tile[i][j] * e.alpha;
            if (bias) v += bias[j];
            if (e.accumulate) v += c[i * ldc + j];
            c[i * ldc + j] = round_to(v, e.rounding);
        }
}

// c [M, N] (rows `ldc` apart) from a [M, K] and b [K, N]. Each element is one fp32 sum over K, in order.
static inline void matmul(float *c, int64_t ldc, MatrixView a, MatrixView b, int64_t M, int64_t N, int64_t K, Epilogue e) {
    const int64_t row_panels = ceil_div(M, TILE_ROWS), col_panels = ceil_div(N, TILE_COLS);
    float *pa = (float *)xrealloc(NULL, (size_t)(row_panels * K * TILE_ROWS) * sizeof(float));
    float *pb = (float *)xrealloc(NULL, (size_t)(col_panels * K * TILE_COLS) * sizeof(float));
    matrix_pack(pa, a, M, K, TILE_ROWS);
    matrix_pack(pb, matrix_view(b.data, b.col_stride, b.row_stride), N, K, TILE_COLS);
    enum { GROUP = 8 };  // row panels that one task walks for each column panel
    PARALLEL_FOR_UNEVEN
    for (int64_t task = 0; task < ceil_div(row_panels, GROUP) * col_panels; task++) {
        const int64_t p0 = task / col_panels * GROUP, q = task % col_panels, p1 = min_i64(p0 + GROUP, row_panels);
        float tiles[GROUP][TILE_ROWS][TILE_COLS];
        memset(tiles, 0, sizeof tiles);
        for (int64_t k = 0; k < K; k += SLAB)
            for (int64_t p = p0; p < p1; p++)
                matmul_tile(tiles[p - p0], pa + (p * K + k) * TILE_ROWS, pb + (q * K + k) * TILE_COLS, min_i64(SLAB, K - k));
        for (int64_t p = p0; p < p1; p++)
            matmul_store(c + p * TILE_ROWS * ldc + q * TILE_COLS, ldc, tiles[p - p0], min_i64(TILE_ROWS, M - p * TILE_ROWS),
                         min_i64(TILE_COLS, N - q * TILE_COLS), e.bias ? e.bias + q * TILE_COLS : NULL, e);
    }
    free(pa);
    free(pb);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Linear layer y = x W^T + bias, with x [rows, in], W [out, in], y [rows, out], bias [out] or NULL

static inline void linear_forward(float *y, const float *x, const float *w, const float *bias, int64_t rows, int64_t in, int64_t out, Rounding rounding) {
    matmul(y, out, matrix_rows(x, in), matrix_transposed(w, in), rows, out, in, epilogue(1, bias, false, rounding));
}

// dx [rows, in] = dy W ("dgrad")
static inline void linear_backward_input(float *dx, const float *dy, const float *w, int64_t rows, int64_t in, int64_t out, Rounding rounding) {
    matmul(dx, in, matrix_rows(dy, out), matrix_rows(w, in), rows, in, out, epilogue(1, NULL, false, rounding));
}

// dw [out, in] = dy^T x ("wgrad")
static inline void linear_backward_weight(float *dw, const float *dy, const float *x, int64_t rows, int64_t in,
                                          int64_t out, Rounding rounding) {
    matmul(dw, in, matrix_transposed(dy, out), matrix_rows(x, in), out, in, rows, epilogue(1, NULL, false, rounding));
}

// dbias [out] = column sums of dy
static inline void bias_backward(float *dbias, const float *dy, int64_t rows, int64_t out, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t j = 0; j < out; j++) {
        double sum = 0;
        for (int64_t i = 0; i < rows; i++) sum += dy[i * out + j];
        dbias[j] = round_to((float)sum, rounding);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// The same products with operands of any recipe (recipes.h): each is a copy [outer, depth] of x, w or dy, and every product is
// c [outer of a, outer of b] = a b^T, with fp32 sums, times the inverse scales of whole tensors, rounded once:
//     fprop: row copies of x and w;  dgrad: row copy of dy, col copy of w;  wgrad: col copies of dy and x

// A copy as the emulated product takes it.
typedef struct {
    MatrixView view;                      // [outer, depth], codes decoded
    float inverse_scale;                  // of the whole tensor; 1: none, finer ones are in the values
    uint8_t *codes;                       // [rows, cols] and their inverse scales; NULL: bf16
    void *scales;
    float *values;
    CopyShape shape;                      // of codes and values: the copy as it is quantized, which `view` may turn
} LinearOperand;

// The copy of x [rows, cols], bf16 values. `scale`: of delayed scaling, or known already; 0: by the rule. The caller frees with linear_operand_free; a bf16
// operand is a view of x.
static inline LinearOperand linear_operand(const float *x, int64_t rows, int64_t cols, CopyKind copy, Grain grain, ScaleRule rule, Fp8Format format, float scale) {
    const bool turned = copy == COPY_COL && grain != GRAIN_TENSOR;  // one scale for all: the codes of either copy are the other's
    LinearOperand q;
    memset(&q, 0, sizeof q);
    q.inverse_scale = 1;
    q.shape = copy_shape(rows, cols, turned ? COPY_COL : COPY_ROW);
    if (grain == GRAIN_BF16) {
        q.view = matrix_view(x, q.shape.outer_stride, q.shape.depth_stride);
        return q;
    }
    q.codes = (uint8_t *)xrealloc(NULL, (size_t)(rows * cols));
    q.scales = xrealloc(NULL, (size_t)scale_bytes(grain, q.shape.outer, q.shape.depth));
    q.values = (float *)xrealloc(NULL, (size_t)(rows * cols) * sizeof(float));
    quantize_copy(q.codes, q.scales, x, q.shape, grain, rule, format, scale);
    dequantize_copy(q.values, q.codes, q.scales, q.shape.outer, q.shape.depth, grain, format);
    if (grain_is_tensor(grain)) q.inverse_scale = *(const float *)q.scales;
    q.view = copy == COPY_COL && !turned ? matrix_transposed(q.values, cols) : matrix_rows(q.values, q.shape.depth);
    return q;
}

// Of a tensor [rows, cols] of which only codes have come, cast with one scale for all of it. They stay the caller's.
static inline LinearOperand linear_operand_of_codes(const uint8_t *codes, int64_t rows, int64_t cols, CopyKind copy, Fp8Format format, float scale) {
    LinearOperand q;
    memset(&q, 0, sizeof q);
    q.inverse_scale = 1.0f / scale;
    q.values = (float *)xrealloc(NULL, (size_t)(rows * cols) * sizeof(float));
    dequantize_copy(q.values, codes, NULL, rows, cols, GRAIN_TENSOR, format);
    q.view = copy == COPY_COL ? matrix_transposed(q.values, cols) : matrix_rows(q.values, cols);
    q.shape = copy_shape(rows, cols, COPY_ROW);
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
    matmul(c, N, a.view, turned_b, M, N, depth, epilogue(a.inverse_scale * b.inverse_scale, bias, false, rounding));
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Embedding: x [rows, C] = table[token], table [V, C]

static inline void embedding_forward(float *x, const float *table, const int32_t *tokens, int64_t rows, int64_t C) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++) memcpy(x + i * C, table + (int64_t)tokens[i] * C, (size_t)C * sizeof(float));
}

// dtable [V, C]: for each token id the sum of dx over the rows that hold it, in row order. Rows of ids that do not occur become 0
// (or stay, when accumulating).
static inline void embedding_backward(float *dtable, const float *dx, const int32_t *tokens, int64_t rows, int64_t C, int64_t V, bool accumulate,
                                      Rounding rounding) {
    // chains of equal ids: first[id] is the first row that holds id, next[row] the following one
    int64_t *first = (int64_t *)xcalloc((size_t)V, sizeof *first), *next = (int64_t *)xcalloc((size_t)rows, sizeof *next);
    for (int64_t id = 0; id < V; id++) first[id] = -1;
    for (int64_t i = rows - 1; i >= 0; i--) {
        next[i] = first[tokens[i]];
        first[tokens[i]] = i;
    }
    PARALLEL_FOR
    for (int64_t id = 0; id < V; id++)
        for (int64_t c = 0; c < C; c++) {
            if (first[id] < 0 && accumulate) continue;
            double sum = accumulate ? dtable[id * C + c] : 0;
            for (int64_t i = first[id]; i >= 0; i = next[i]) sum += dx[i * C + c];
            dtable[id * C + c] = round_to((float)sum, rounding);
        }
    free(first);
    free(next);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// RMSNorm (Zhang and Sennrich 2019): y = x * rstd * w, rstd = 1 / sqrt(mean(x^2) + eps), over the last dimension C

static inline float rms_reciprocal(const float *x, int64_t C, double eps) {
    double squares = 0;
    for (int64_t c = 0; c < C; c++) squares += (double)x[c] * x[c];
    return (float)(1 / sqrt(squares / (double)C + eps));
}

// y [rows, C]; rstd [rows] is kept for backward (NULL: not wanted).
static inline void rmsnorm_forward(float *y, float *rstd, const float *x, const float *w, int64_t rows, int64_t C, double eps, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++) {
        const float r = rms_reciprocal(x + i * C, C, eps);
        if (rstd) rstd[i] = r;
        for (int64_t c = 0; c < C; c++) y[i * C + c] = round_to(x[i * C + c] * r * w[c], rounding);
    }
}

// sum[i] = a[i] + b[i]; may be in place.
static inline void residual_add(float *sum, const float *a, const float *b, int64_t n, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t i = 0; i < n; i++) sum[i] = round_to(a[i] + b[i], rounding);
}

// x <- residual + x, y <- RMSNorm(x): the add rounds, and the norm reads the rounded sum.
static inline void residual_rmsnorm_forward(float *y, float *rstd, float *sum, const float *residual, const float *x, const float *w, int64_t rows,
                                            int64_t C, double eps, Rounding rounding) {
    residual_add(sum, residual, x, rows * C, rounding);
    rmsnorm_forward(y, rstd, sum, w, rows, C, eps, rounding);
}

// With n = x * rstd and g = dy * w:  dx = dresidual + rstd * (g - n * mean(g * n)), rounded once;  dw = sum over rows of dy * n.
// dresidual [rows, C] is the gradient that reaches x past the norm (NULL: none); dx may be dresidual itself.
static inline void rmsnorm_backward(float *dx, float *dw, const float *dresidual, const float *dy, const float *x, const float *rstd, const float *w,
                                    int64_t rows, int64_t C, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t c = 0; c < C; c++) {
        double sum = 0;
        for (int64_t i = 0; i < rows; i++) sum += (double)dy[i * C + c] * (x[i * C + c] * rstd[i]);
        dw[c] = round_to((float)sum, rounding);
    }
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++) {
        const float *dyi = dy + i * C, *xi = x + i * C;
        const float r = rstd[i];
        double dot = 0;
        for (int64_t c = 0; c < C; c++) dot += (double)(dyi[c] * w[c]) * (xi[c] * r);
        const float mean = (float)(dot / (double)C);
        for (int64_t c = 0; c < C; c++) {
            float d = r * (dyi[c] * w[c] - xi[c] * r * mean);
            if (dresidual) d += dresidual[i * C + c];
            dx[i * C + c] = round_to(d, rounding);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// QK-norm (Qwen3) and rotary position embedding (Su et al. 2021), on packed qkv [B, T, (NH + 2 NKV) * HD]

// What the operation needs besides the activations.
typedef struct {
    const float *q_norm, *k_norm;   // weights [HD], shared by all heads; NULL: no norm
    double eps;
    const float *table;             // rope_table_fill
} RopeArgs;

// Each query and key head: norm (if any), then rotate the pairs (i, i + HD/2); one rounding. Values are copied. out may be qkv.
static inline void qknorm_rope_forward(float *out, const float *qkv, RopeArgs r, AttentionDims d, Rounding rounding) {
    const int64_t heads = d.NH + 2 * d.NKV, half = d.HD / 2;
    PARALLEL_FOR
    for (int64_t row = 0; row < d.B * d.T; row++) {
        const float *table = r.table + row % d.T * d.HD;
        for (int64_t h = 0; h < heads; h++) {
            const float *x = qkv + (row * heads + h) * d.HD;
            float *y = out + (row * heads + h) * d.HD;
            if (h >= d.NH + d.NKV) {
                memmove(y, x, (size_t)d.HD * sizeof(float));
                continue;
            }
            const float *w = h < d.NH ? r.q_norm : r.k_norm;
            const float rstd = w ? rms_reciprocal(x, d.HD, r.eps) : 1.0f;
            for (int64_t i = 0; i < half; i++) {
                float a = x[i], b = x[i + half];
                if (w) a = a * rstd * w[i], b = b * rstd * w[i + half];
                y[i] = round_to(a * table[2 * i] - b * table[2 * i + 1], rounding);
                y[i + half] = round_to(b * table[2 * i] + a * table[2 * i + 1], rounding);
            }
        }
    }
}

// Gradient of one normed head: dn is d(output of the norm), overwritten by d(input).
static inline void head_norm_backward(float *dn, const float *x, const float *w, int64_t HD, double eps) {
    const float rstd = rms_reciprocal(x, HD, eps);
    double dot = 0;
    for (int64_t i = 0; i < HD; i++) dot += (double)(dn[i] * w[i]) * (x[i] * rstd);
    const float mean = (float)(dot / (double)HD);
    for (int64_t i = 0; i < HD; i++) dn[i] = rstd * (dn[i] * w[i] - x[i] * rstd * mean);
}

// From dout (gradient of the rotated qkv) to dqkv (gradient of the projection's output, `qkv`); may be in place. dq_norm, dk_norm [HD] sum over all
// rows and heads; NULL without QK-norm.
static inline void qknorm_rope_backward(float *dqkv, float *dq_norm, float *dk_norm, const float *dout, const float *qkv, RopeArgs r, AttentionDims d,
                                        Rounding rounding) {
    const int64_t heads = d.NH + 2 * d.NKV, half = d.HD / 2, rows = d.B * d.T;
    // gradient of the norm's output: the rotation turned back, fp32
    float *dn = (float *)xrealloc(NULL, (size_t)(rows * heads * d.HD) * sizeof(float));
    PARALLEL_FOR
    for (int64_t row = 0; row < rows; row++) {
        const float *table = r.table + row % d.T * d.HD;
        for (int64_t h = 0; h < heads; h++) {
            const float *dy = dout + (row * heads + h) * d.HD;
            float *g = dn + (row * heads + h) * d.HD;
            if (h >= d.NH + d.NKV) memcpy(g, dy, (size_t)d.HD * sizeof(float));
            else
                for (int64_t i = 0; i < half; i++) {
                    g[i] = dy[i] * table[2 * i] + dy[i + half] * table[2 * i + 1];
                    g[i + half] = dy[i + half] * table[2 * i] - dy[i] * table[2 * i + 1];
                }
        }
    }
    for (int side = 0; r.q_norm && side < 2; side++) {
        float *dw = side == 0 ? dq_norm : dk_norm;
        const int64_t h0 = side == 0 ? 0 : d.NH, h1 = side == 0 ? d.NH : d.NH + d.NKV;
        double *sum = (double *)xcalloc((size_t)d.HD, sizeof(double));
        for (int64_t row = 0; row < rows; row++)
            for (int64_t h = h0; h < h1; h++) {
                const float *x = qkv + (row * heads + h) * d.HD, *g = dn + (row * heads + h) * d.HD;
                const float rstd = rms_reciprocal(x, d.HD, r.eps);
                for (int64_t i = 0; i < d.HD; i++) sum[i] += (double)g[i] * (x[i] * rstd);
            }
        for (int64_t i = 0; i < d.HD; i++) dw[i] = round_to((float)sum[i], rounding);
        free(sum);
    }
    PARALLEL_FOR
    for (int64_t row = 0; row < rows; row++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = (row * heads + h) * d.HD;
            const float *w = h < d.NH ? r.q_norm : r.k_norm;
            if (w && h < d.NH + d.NKV) head_norm_backward(dn + at, qkv + at, w, d.HD, r.eps);
            for (int64_t i = 0; i < d.HD; i++) dqkv[at + i] = round_to(dn[at + i], rounding);
        }
    free(dn);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Causal attention with grouped key/value heads. S = Q K^T / sqrt(HD), P = softmax(S) over keys <= query, O = P V.
// qkv [B, T, (NH + 2 NKV) * HD] after RoPE, out [B, T, NH * HD], lse [B, NH, T] = log(sum(exp(S))).
// Works on blocks of queries, so that no T x T matrix is held.

enum { QUERY_BLOCK = 64 };

// Where one query head and its key and value heads begin, in a token-major array of `heads` heads a token.
static inline MatrixView attention_head(const float *qkv, AttentionDims d, int64_t b, int64_t head) {
    const int64_t width = (d.NH + 2 * d.NKV) * d.HD;
    return matrix_view(qkv + b * d.T * width + head * d.HD, width, 1);
}

static inline MatrixView view_from_row(MatrixView v, int64_t row) { return matrix_view(v.data + row * v.row_stride, v.row_stride, v.col_stride); }
static inline MatrixView view_transposed(MatrixView v) { return matrix_view(v.data, v.col_stride, v.row_stride); }

// s [queries, keys] = scaled scores of query rows t0 ... t0 + queries - 1 against keys 0 ... keys - 1; keys after the query are -inf.
static inline void attention_scores(float *s, MatrixView q, MatrixView k, int64_t t0, int64_t queries, int64_t keys, int64_t HD) {
    matmul(s, keys, view_from_row(q, t0), view_transposed(k), queries, keys, HD, epilogue((float)(1 / sqrt((double)HD)), NULL, false, ROUND_NONE));
    for (int64_t i = 0; i < queries; i++)
        for (int64_t j = t0 + i + 1; j < keys; j++) s[i * keys + j] = -INFINITY;
}

// One row of scores becomes exp(s - max), rounded as the operand of the next product; returns the sum of the unrounded values.
static inline float softmax_row(float *s, int64_t n, float *largest, Rounding rounding) {
    float m = -INFINITY;
    for (int64_t j = 0; j < n; j++) m = s[j] > m ? s[j] : m;
    double sum = 0;
    for (int64_t j = 0; j < n; j++) {
        float p = expf(s[j] - m);
        sum += p;
        s[j] = round_to(p, rounding);
    }
    *largest = m;
    return (float)sum;
}

static inline void attention_forward(float *out, float *lse, const float *qkv, AttentionDims d, Rounding rounding) {
    PARALLEL_FOR_UNEVEN
    for (int64_t task = 0; task < d.B * d.NH; task++) {
        const int64_t b = task / d.NH, h = task % d.NH, kv = h / (d.NH / d.NKV);
        MatrixView q = attention_head(qkv, d, b, h), k = attention_head(qkv, d, b, d.NH + kv), v = attention_head(qkv, d, b, d.NH + d.NKV + kv);
        float *s = (float *)xcalloc((size_t)(QUERY_BLOCK * d.T), sizeof(float));
        for (int64_t t0 = 0; t0 < d.T; t0 += QUERY_BLOCK) {
            const int64_t queries = min_i64(QUERY_BLOCK, d.T - t0), keys = t0 + queries;
            float sums[QUERY_BLOCK];
            attention_scores(s, q, k, t0, queries, keys, d.HD);
            for (int64_t i = 0; i < queries; i++) {
                float largest;
                sums[i] = softmax_row(s + i * keys, keys, &largest, rounding);
                lse[(b * d.NH + h) * d.T + t0 + i] = largest + logf(sums[i]);
            }
            float *o = out + ((b * d.T + t0) * d.NH + h) * d.HD;
            matmul(o, d.NH * d.HD, matrix_rows(s, keys), v, queries, d.HD, keys, epilogue(1, NULL, false, ROUND_NONE));
            for (int64_t i = 0; i < queries; i++)
                for (int64_t c = 0; c < d.HD; c++) o[i * d.NH * d.HD + c] = round_to(o[i * d.NH * d.HD + c] / sums[i], rounding);
        }
        free(s);
    }
}

// Turns scores s into P and dp = dO V^T into dS = P * (dP - sum(dO * O)), both [queries, keys], both rounded as operands of the products that follow.
static inline void attention_backward_softmax(float *s, float *dp, const float *out, const float *dout, const float *lse, int64_t queries, int64_t keys,
                                              int64_t row_stride, int64_t HD, Rounding rounding) {
    for (int64_t i = 0; i < queries; i++) {
        double delta = 0;
        for (int64_t c = 0; c < HD; c++) delta += (double)out[i * row_stride + c] * dout[i * row_stride + c];
        for (int64_t j = 0; j < keys; j++) {
            const float p = expf(s[i * keys + j] - lse[i]);
            dp[i * keys + j] = round_to(p * (dp[i * keys + j] - (float)delta), rounding);
            s[i * keys + j] = round_to(p, rounding);
        }
    }
}

// Adds query head h's part to dk, dv [T, HD] (fp32) and writes its dq into dqkv.
static inline void attention_backward_head(float *dqkv, float *dk, float *dv, const float *dout, const float *qkv, const float *out, const float *lse,
                                           AttentionDims d, int64_t b, int64_t h, Rounding rounding) {
    const int64_t kv = h / (d.NH / d.NKV), row_stride = d.NH * d.HD, width = (d.NH + 2 * d.NKV) * d.HD;
    const float scale = (float)(1 / sqrt((double)d.HD));
    MatrixView q = attention_head(qkv, d, b, h), k = attention_head(qkv, d, b, d.NH + kv), v = attention_head(qkv, d, b, d.NH + d.NKV + kv);
    float *s = (float *)xcalloc((size_t)(QUERY_BLOCK * d.T), sizeof(float)), *dp = (float *)xcalloc((size_t)(QUERY_BLOCK * d.T), sizeof(float));
    for (int64_t t0 = 0; t0 < d.T; t0 += QUERY_BLOCK) {
        const int64_t queries = min_i64(QUERY_BLOCK, d.T - t0), keys = t0 + queries;
        const int64_t at = ((b * d.T + t0) * d.NH + h) * d.HD;
        MatrixView d_o = matrix_rows(dout + at, row_stride), ds = matrix_rows(dp, keys);
        attention_scores(s, q, k, t0, queries, keys, d.HD);
        matmul(dp, keys, d_o, view_transposed(v), queries, keys, d.HD, epilogue(1, NULL, false, ROUND_NONE));
        attention_backward_softmax(s, dp, out + at, dout + at, lse + (b * d.NH + h) * d.T + t0, queries, keys, row_stride, d.HD, rounding);
        matmul(dv, d.HD, matrix_transposed(s, keys), d_o, keys, d.HD, queries, epilogue(1, NULL, true, ROUND_NONE));
        matmul(dk, d.HD, view_transposed(ds), view_from_row(q, t0), keys, d.HD, queries, epilogue(scale, NULL, true, ROUND_NONE));
        matmul(dqkv + (b * d.T + t0) * width + h * d.HD, width, ds, k, queries, d.HD, keys, epilogue(scale, NULL, false, rounding));
    }
    free(s);
    free(dp);
}

// dqkv [B, T, (NH + 2 NKV) * HD] from dout, with forward's qkv, out and lse.
static inline void attention_backward(float *dqkv, const float *dout, const float *qkv, const float *out, const float *lse, AttentionDims d,
                                      Rounding rounding) {
    const int64_t width = (d.NH + 2 * d.NKV) * d.HD, group = d.NH / d.NKV;
    PARALLEL_FOR_UNEVEN
    for (int64_t task = 0; task < d.B * d.NKV; task++) {
        const int64_t b = task / d.NKV, kv = task % d.NKV;
        float *dk = (float *)xcalloc((size_t)(d.T * d.HD), sizeof(float)), *dv = (float *)xcalloc((size_t)(d.T * d.HD), sizeof(float));
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) attention_backward_head(dqkv, dk, dv, dout, qkv, out, lse, d, b, h, rounding);
        for (int64_t t = 0; t < d.T; t++)
            for (int64_t c = 0; c < d.HD; c++) {
                float *token = dqkv + (b * d.T + t) * width;
                token[(d.NH + kv) * d.HD + c] = round_to(dk[t * d.HD + c], rounding);
                token[(d.NH + d.NKV + kv) * d.HD + c] = round_to(dv[t * d.HD + c], rounding);
            }
        free(dk);
        free(dv);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// SwiGLU (Shazeer 2020): h = silu(gate) * up, silu(g) = g / (1 + exp(-g)); gate_up [rows, 2F] holds gate, then up, of a row

static inline void swiglu_forward(float *h, const float *gate_up, int64_t rows, int64_t F, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++)
        for (int64_t f = 0; f < F; f++) {
            const float gate = gate_up[i * 2 * F + f], up = gate_up[i * 2 * F + F + f];
            h[i * F + f] = round_to(gate / (1 + expf(-gate)) * up, rounding);
        }
}

// dgate_up [rows, 2F] from dh; may overwrite gate_up.
static inline void swiglu_backward(float *dgate_up, const float *dh, const float *gate_up, int64_t rows, int64_t F, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++)
        for (int64_t f = 0; f < F; f++) {
            const float gate = gate_up[i * 2 * F + f], up = gate_up[i * 2 * F + F + f], d = dh[i * F + f];
            const float sigmoid = 1 / (1 + expf(-gate));
            dgate_up[i * 2 * F + f] = round_to(d * up * sigmoid * (1 + gate * (1 - sigmoid)), rounding);
            dgate_up[i * 2 * F + F + f] = round_to(d * gate * sigmoid, rounding);
        }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Cross-entropy of logits [rows, V] against targets [rows]; a negative target is ignored (loss and gradient 0)

static inline float logits_lse(const float *logits, int64_t V) {
    float m = -INFINITY;
    for (int64_t v = 0; v < V; v++) m = logits[v] > m ? logits[v] : m;
    double sum = 0;
    for (int64_t v = 0; v < V; v++) sum += expf(logits[v] - m);
    return m + (float)log(sum);
}

// losses [rows] = log(sum(exp(logits))) - logits[target]
static inline void cross_entropy_forward(float *losses, const float *logits, const int32_t *targets, int64_t rows, int64_t V) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++) losses[i] = targets[i] < 0 ? 0.0f : logits_lse(logits + i * V, V) - logits[i * V + targets[i]];
}

// dlogits = (softmax(logits) - onehot(target)) * grad_scale; may overwrite logits. For a mean over N tokens grad_scale is 1/N.
static inline void cross_entropy_backward(float *dlogits, const float *logits, const int32_t *targets, int64_t rows, int64_t V, float grad_scale,
                                          Rounding rounding) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++) {
        const float lse = targets[i] < 0 ? 0.0f : logits_lse(logits + i * V, V);
        for (int64_t v = 0; v < V; v++) {
            const float p = targets[i] < 0 ? 0.0f : expf(logits[i * V + v] - lse);
            dlogits[i * V + v] = round_to((p - (v == targets[i] ? 1.0f : 0.0f)) * grad_scale, rounding);
        }
    }
}

// Sum in double, in order.
static inline double array_sum(const float *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Gradient norm and AdamW over (part of) the flat parameter array

// Square root of the sum of squares: blocks of 4096 summed in order, then the blocks in order.
static inline double global_norm(const float *x, int64_t n) {
    enum { BLOCK = 4096 };
    const int64_t blocks = ceil_div(n, BLOCK);
    double *sums = (double *)xcalloc((size_t)blocks, sizeof(double)), total = 0;
    PARALLEL_FOR
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t i = b * BLOCK; i < min_i64((b + 1) * BLOCK, n); i++) sums[b] += (double)x[i] * x[i];
    for (int64_t b = 0; b < blocks; b++) total += sums[b];
    free(sums);
    return sqrt(total);
}

// One AdamW step of n elements, the first of which is element `first` of the flat array (the arrays here start at it). bf16_weights and
// bf16_state: the stored values are bf16, rounded stochastically.
static inline void adamw_reference(float *weights, float *exp_avg, float *exp_avg_sq, const float *gradients, int64_t first, int64_t n, bool decay,
                                   float gradient_factor, bool bf16_weights, bool bf16_state, const AdamwStep *step) {
    const int64_t block = 4096;
    PARALLEL_FOR
    for (int64_t start = 0; start < n; start += block) {
        const AdamwStep s = *step;  // stays in registers: no store below can reach it
        for (int64_t i = start; i < min_i64(start + block, n); i++) {
            AdamwElement e = {weights[i], exp_avg[i], exp_avg_sq[i]};
            e = adamw_update(e, gradients[i] * gradient_factor, decay, &s);
            const AdamwRandom random = adamw_random(&s, first + i);
            weights[i] = bf16_weights ? bf16_to_float(adamw_round(e.weight, random.weight)) : e.weight;
            exp_avg[i] = bf16_state ? bf16_to_float(adamw_round(e.exp_avg, random.exp_avg)) : e.exp_avg;
            exp_avg_sq[i] = bf16_state ? bf16_to_float(adamw_round(e.exp_avg_sq, random.exp_avg_sq)) : e.exp_avg_sq;
        }
    }
}

#endif
