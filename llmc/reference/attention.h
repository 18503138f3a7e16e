// Causal attention with grouped key/value heads in plain C: S = Q K^T / sqrt(HD), P = softmax(S), O = P V.
//
// Each query sees the keys of its document up to its own. qkv [B, T, (NH + 2 NKV) * HD] after RoPE, out [B, T, NH *
// HD], lse [B, NH, T] = log(sum(exp(S))). Handles QUERY_BLOCK queries of a document at a time, so that no T x T matrix
// is held, and so that a document has the bits that it has alone.
#ifndef LLMC_REFERENCE_ATTENTION_H
#define LLMC_REFERENCE_ATTENTION_H

#include <math.h>

#include "../config/model_config.h"
#include "matmul.h"

enum { QUERY_BLOCK = 64 };

// Returns one head of packed qkv as a matrix [T, HD].
static inline MatrixView attention_head(const float *qkv, const Dims *d, int64_t b, int64_t head) {
    const int64_t width = (d->NH + 2 * d->NKV) * d->HD;
    return matrix_view(qkv + b * d->T * width + head * d->HD, width, 1);
}

static inline MatrixView view_from_row(MatrixView v, int64_t row) {
    return matrix_view(v.data + row * v.row_stride, v.row_stride, v.col_stride);
}
static inline MatrixView view_transposed(MatrixView v) { return matrix_view(v.data, v.col_stride, v.row_stride); }

// Rows t0 ... t0 + queries - 1 of sequence b, all of one document, which begins at row `first`; and how many of its
// keys they see.
typedef struct {
    int64_t t0, queries, first, keys;
} QueryBlock;

static inline QueryBlock query_block(const Dims *d, int64_t b, int64_t t0) {
    const Documents *of = &d->documents;
    const int64_t first = of->starts ? of->starts[b * d->T + t0] : 0, end = of->ends ? of->ends[b * d->T + t0] : d->T,
                  queries = min_i64(QUERY_BLOCK, end - t0);
    return (QueryBlock){t0, queries, first, t0 + queries - first};
}

// s [queries, keys] = scaled scores of the block's queries against its keys. Scores of keys after the query are -inf.
static inline void attention_scores(float *s, MatrixView q, MatrixView k, QueryBlock block, int64_t HD) {
    matmul(s, block.keys, view_from_row(q, block.t0), view_transposed(view_from_row(k, block.first)), block.queries,
           block.keys, HD, epilogue((float)(1 / sqrt((double)HD)), NULL, false, ROUND_NONE));
    for (int64_t i = 0; i < block.queries; i++)
        for (int64_t j = block.keys - block.queries + i + 1; j < block.keys; j++) s[i * block.keys + j] = -INFINITY;
}

// Turns one row of scores into exp(s - max), rounded as an operand of the next GEMM. Sets *largest to the row's
// maximum. Returns the sum of the values before rounding.
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

static inline void attention_forward_reference(float *out, float *lse, const float *qkv, const Dims *d,
                                               Rounding rounding) {
    PARALLEL_FOR_UNEVEN
    for (int64_t task = 0; task < d->B * d->NH; task++) {
        const int64_t b = task / d->NH, h = task % d->NH, kv = h / (d->NH / d->NKV);
        MatrixView q = attention_head(qkv, d, b, h), k = attention_head(qkv, d, b, d->NH + kv),
                   v = attention_head(qkv, d, b, d->NH + d->NKV + kv);
        float *s = (float *)xcalloc((size_t)(QUERY_BLOCK * d->T), sizeof(float));
        for (int64_t t0 = 0, queries; t0 < d->T; t0 += queries) {
            const QueryBlock block = query_block(d, b, t0);
            const int64_t keys = block.keys;
            float sums[QUERY_BLOCK];
            queries = block.queries;
            attention_scores(s, q, k, block, d->HD);
            for (int64_t i = 0; i < queries; i++) {
                float largest;
                sums[i] = softmax_row(s + i * keys, keys, &largest, rounding);
                lse[(b * d->NH + h) * d->T + t0 + i] = largest + logf(sums[i]);
            }
            float *o = out + ((b * d->T + t0) * d->NH + h) * d->HD;
            matmul(o, d->NH * d->HD, matrix_rows(s, keys), view_from_row(v, block.first), queries, d->HD, keys,
                   epilogue(1, NULL, false, ROUND_NONE));
            for (int64_t i = 0; i < queries; i++)
                for (int64_t c = 0; c < d->HD; c++)
                    o[i * d->NH * d->HD + c] = round_to(o[i * d->NH * d->HD + c] / sums[i], rounding);
        }
        free(s);
    }
}

// Turns scores s into P and dp = dO V^T into dS = P * (dP - sum(dO * O)), both [queries, keys] and rounded as operands
// of the next GEMMs.
static inline void attention_backward_softmax(float *s, float *dp, const float *out, const float *dout,
                                              const float *lse, int64_t queries, int64_t keys, int64_t row_stride,
                                              int64_t HD, Rounding rounding) {
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

// Adds the part of query head h to dk and dv [T, HD] of its key/value head (fp32), and writes the head's dq into dqkv.
static inline void attention_backward_head(float *dqkv, float *dk, float *dv, const float *dout, const float *qkv,
                                           const float *out, const float *lse, const Dims *d, int64_t b, int64_t h,
                                           Rounding rounding) {
    const int64_t kv = h / (d->NH / d->NKV), row_stride = d->NH * d->HD, width = (d->NH + 2 * d->NKV) * d->HD;
    const float scale = (float)(1 / sqrt((double)d->HD));
    MatrixView q = attention_head(qkv, d, b, h), k = attention_head(qkv, d, b, d->NH + kv),
               v = attention_head(qkv, d, b, d->NH + d->NKV + kv);
    float *s = (float *)xcalloc((size_t)(QUERY_BLOCK * d->T), sizeof(float)),
          *dp = (float *)xcalloc((size_t)(QUERY_BLOCK * d->T), sizeof(float));
    for (int64_t t0 = 0, queries; t0 < d->T; t0 += queries) {
        const QueryBlock block = query_block(d, b, t0);
        const int64_t keys = block.keys, first = block.first, at = ((b * d->T + t0) * d->NH + h) * d->HD;
        MatrixView d_o = matrix_rows(dout + at, row_stride), ds = matrix_rows(dp, keys);
        queries = block.queries;
        attention_scores(s, q, k, block, d->HD);
        matmul(dp, keys, d_o, view_transposed(view_from_row(v, first)), queries, keys, d->HD,
               epilogue(1, NULL, false, ROUND_NONE));
        attention_backward_softmax(s, dp, out + at, dout + at, lse + (b * d->NH + h) * d->T + t0, queries, keys,
                                   row_stride, d->HD, rounding);
        matmul(dv + first * d->HD, d->HD, matrix_transposed(s, keys), d_o, keys, d->HD, queries,
               epilogue(1, NULL, true, ROUND_NONE));
        matmul(dk + first * d->HD, d->HD, view_transposed(ds), view_from_row(q, t0), keys, d->HD, queries,
               epilogue(scale, NULL, true, ROUND_NONE));
        matmul(dqkv + (b * d->T + t0) * width + h * d->HD, width, ds, view_from_row(k, first), queries, d->HD, keys,
               epilogue(scale, NULL, false, rounding));
    }
    free(s);
    free(dp);
}

// dqkv [B, T, (NH + 2 NKV) * HD] from dout, with forward's qkv, out and lse.
static inline void attention_backward_reference(float *dqkv, const float *dout, const float *qkv, const float *out,
                                                const float *lse, const Dims *d, Rounding rounding) {
    const int64_t width = (d->NH + 2 * d->NKV) * d->HD, group = d->NH / d->NKV;
    PARALLEL_FOR_UNEVEN
    for (int64_t task = 0; task < d->B * d->NKV; task++) {
        const int64_t b = task / d->NKV, kv = task % d->NKV;
        float *dk = (float *)xcalloc((size_t)(d->T * d->HD), sizeof(float)),
              *dv = (float *)xcalloc((size_t)(d->T * d->HD), sizeof(float));
        for (int64_t h = kv * group; h < (kv + 1) * group; h++)
            attention_backward_head(dqkv, dk, dv, dout, qkv, out, lse, d, b, h, rounding);
        for (int64_t t = 0; t < d->T; t++)
            for (int64_t c = 0; c < d->HD; c++) {
                float *token = dqkv + (b * d->T + t) * width;
                token[(d->NH + kv) * d->HD + c] = round_to(dk[t * d->HD + c], rounding);
                token[(d->NH + d->NKV + kv) * d->HD + c] = round_to(dv[t * d->HD + c], rounding);
            }
        free(dk);
        free(dv);
    }
}

#endif
