// Computes the embedding's gradient under FSDP, from input gradients of this rank or of all ranks of its shard group.
#ifndef LLMC_FSDP_EMBEDDING_CUH
#define LLMC_FSDP_EMBEDDING_CUH

#include "../kernels/embedding.cuh"
#include "fsdp.cuh"

// Returns the part of the table whose gradient this rank computes: its shard with FSDP_EMBEDDING_FROM_INPUTS, else the
// whole table.
static inline EmbeddingPart fsdp_embedding_part(const Fsdp *f) {
    const ShardPlan *shard = &f->plan.shard;
    const ShardSegment g = fsdp_segment(f, ROOT, embedding_segment(f->plan.table));
    const EmbeddingPart kept = {shard->shard_rank * g.slice, g.slice}, whole = {0, shard->shard_size * g.slice};
    return f->plan.embedding == FSDP_EMBEDDING_FROM_INPUTS ? kept : whole;
}

// True if the embedding's gradient has memory of its own. If not (tied embeddings), the memory already holds lm_head's
// gradient, and the embedding's is added to it.
static inline bool fsdp_embedding_is_untied(const Fsdp *f) {
    return embedding_segment(f->plan.table) == SEGMENT_EMBEDDING;
}

// Returns how many indexes the tokens of a micro-step have (embedding_sort): one for all ranks whose input gradients
// this rank adds or, if any_ranks, one for each, because their gradients are added one after the other.
static inline int64_t fsdp_embedding_indexes(const Fsdp *f) { return f->plan.any_ranks ? fsdp_input_ranks(f) : 1; }

// Adds the gradient of `rows` input gradients dx to this rank's part of the sums. number: of the index that sorts them.
static inline int64_t fsdp_embedding_add(Fsdp *f, const int32_t *index, const bf16 *dx, int64_t rows, int64_t C,
                                         int64_t number) {
    const ShardSegment g = fsdp_segment(f, ROOT, embedding_segment(f->plan.table));
    const EmbeddingPart part = fsdp_embedding_part(f);
    const RankKeys keys = f->transport.keys;
    const bool any_ranks = f->plan.any_ranks;
    GradientSum how = fsdp_embedding_sum(f);
    if (any_ranks) how.key = rng_key(keys.step_key, (uint64_t)(keys.part + 2 * number));
    if (any_ranks) how.stochastic = f->gradients.sum.add || number > 0;
    const cudaStream_t stream = f->transport.compute;
    return f->transport.fp32_sums
               ? embedding_backward(f->transport.sums_fp32 + g.shard, part, dx, index, rows, C, how, any_ranks, stream)
               : embedding_backward(f->transport.sums + g.shard, part, dx, index, rows, C, how, any_ranks, stream);
}

// Adds the embedding's gradient to this rank's sums (fsdp_embedding_joins). If the embedding is untied, the first
// micro-step zeroes the embedding's sums before that. Returns the bytes moved, as embedding_backward counts them.
static inline int64_t fsdp_embedding_join(Fsdp *f, const int32_t *index, const bf16 *dx, int64_t rows, int64_t C) {
    const ShardSegment g = fsdp_segment(f, ROOT, embedding_segment(f->plan.table));
    const bool fp32 = f->transport.fp32_sums, clear = fsdp_embedding_is_untied(f) && !f->gradients.sum.add;
    const int64_t element = fp32 ? (int64_t)sizeof(float) : (int64_t)sizeof(bf16), n = fsdp_embedding_indexes(f);
    void *sum = fp32 ? (void *)(f->transport.sums_fp32 + g.shard) : (void *)(f->transport.sums + g.shard);
    int64_t bytes = 0;
    if (clear)
        CUDA_CHECK(cudaMemsetAsync(sum, 0, (size_t)(fsdp_embedding_part(f).count * element), f->transport.compute));
    for (int64_t i = 0; i < n; i++)
        bytes +=
            fsdp_embedding_add(f, index + i * embedding_index_size(rows / n), dx + i * (rows / n) * C, rows / n, C, i);
    return bytes;
}

// Computes the gradient of the whole table in the buffer of the root's gradient. If the embedding is tied, adds it to
// lm_head's gradient in that buffer. Returns the bytes moved, as embedding_backward counts them.
static inline int64_t fsdp_embedding_whole(Fsdp *f, const int32_t *index, const bf16 *dx, int64_t rows, int64_t C) {
    const EmbeddingPart part = fsdp_embedding_part(f);
    const GradientSum nearest = {};
    bf16 *gradient = fsdp_gradients(f, ROOT).embedding;
    if (fsdp_embedding_is_untied(f))
        CUDA_CHECK(cudaMemsetAsync(gradient, 0, (size_t)part.count * sizeof(bf16), f->transport.compute));
    return embedding_backward(gradient, part, dx, index, rows, C, nearest, false, f->transport.compute);
}

// Computes the embedding's gradient from this rank's input gradients dx [R, C] and, if fsdp_input_ranks > 1, those of
// the other ranks of the shard group, which it gathers. `index`: fsdp_embedding_indexes, which sort their tokens.
// Returns the bytes moved, as embedding_backward counts them.
static inline int64_t fsdp_embedding_backward(Fsdp *f, const int32_t *index, const bf16 *dx, int64_t R, int64_t C) {
    const bf16 *all = fsdp_gather_input_gradients(f, dx);
    if (fsdp_embedding_joins(f)) return fsdp_embedding_join(f, index, all, fsdp_input_ranks(f) * R, C);
    return fsdp_embedding_whole(f, index, all, R, C);
}

#endif
