// Token embedding in plain C: x [rows, C] = table[token] with table [V, C], and its gradient.
#ifndef LLMC_REFERENCE_EMBEDDING_H
#define LLMC_REFERENCE_EMBEDDING_H

#include "rounding.h"

static inline void embedding_forward_reference(float *x, const float *table, const int32_t *tokens, int64_t rows,
                                               int64_t C) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++) memcpy(x + i * C, table + (int64_t)tokens[i] * C, (size_t)C * sizeof(float));
}

// dtable [V, C]: for each token id the sum of dx over the rows that hold it, in row order. With `accumulate` the sum is
// added to dtable. Without it, table rows of ids that do not occur become 0.
static inline void embedding_backward_reference(float *dtable, const float *dx, const int32_t *tokens, int64_t rows,
                                                int64_t C, int64_t V, bool accumulate, Rounding rounding) {
    // chains of equal ids: first[id] is the first row that holds id, next[row] the following one
    int64_t *first = (int64_t *)xcalloc((size_t)V, sizeof *first),
            *next = (int64_t *)xcalloc((size_t)rows, sizeof *next);
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

#endif
