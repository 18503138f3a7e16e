// The documents of packed sequences: where each begins and ends (--document-mask).
#ifndef LLMC_DOCUMENTS_H
#define LLMC_DOCUMENTS_H

#include "utils.h"

// For each token [B, T], the positions in its sequence at which its document begins and behind which it ends. Both
// NULL: each sequence is one document.
typedef struct {
    int32_t *starts, *ends;
} Documents;

// Finds the documents of `inputs` [B, T]. One begins with each sequence, and with each token `separator`.
static inline void documents_find(Documents out, const int32_t *inputs, int64_t B, int64_t T, int64_t separator) {
    for (int64_t i = 0; i < B * T; i++) {
        const int32_t t = (int32_t)(i % T);
        out.starts[i] = t == 0 || inputs[i] == separator ? t : out.starts[i - 1];
    }
    for (int64_t i = B * T - 1; i >= 0; i--) {
        const int64_t t = i % T;
        out.ends[i] = t + 1 == T || out.starts[i + 1] != out.starts[i] ? (int32_t)(t + 1) : out.ends[i + 1];
    }
}

#endif
