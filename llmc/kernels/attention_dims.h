// Sizes of one causal attention call, shared by both GPU implementations.
#ifndef LLMC_ATTENTION_DIMS_H
#define LLMC_ATTENTION_DIMS_H

#include "../config/model_config.h"

// qkv is [B, T, (NH + 2*NKV) * HD] bf16: for each token all query heads, then all key heads, then all value heads.
// Query head h reads key/value head h / (NH / NKV).
typedef struct {
    int64_t B, T;         // sequences, tokens per sequence
    int64_t NH, NKV;      // query heads; key/value heads (a divisor of NH)
    int64_t HD;           // head dimension: 64 or 128
    bool deterministic;   // backward gives equal bits in every run
    Documents documents;  // in GPU memory; a query sees keys of its own document alone
} AttentionDims;

// The instance of a launcher, a template of head dimension and masking, for these sizes.
#define ATTENTION_INSTANCE(launch, d)                                                \
    ((d).HD == 128 ? ((d).documents.starts ? launch<128, true> : launch<128, false>) \
                   : ((d).documents.starts ? launch<64, true> : launch<64, false>))

static inline AttentionDims attention_dims(const Dims *d, bool deterministic) {
    return (AttentionDims){d->B, d->T, d->NH, d->NKV, d->HD, deterministic, d->documents};
}

#endif
