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

// Adds the embedding's gradient to this rank's sums (fsdp_embedding_joins). If the embedding is untied, the first
// micro-step zeroes the embedding's sums before that. Returns the bytes moved, as embedding_backward counts them.
static inline int64_t fsdp_embedding_join(Fsdp *f, const int32_t *index, const bf16 *dx, int64_t rows, int64_t C) {
    const ShardSegment g = fsdp_segment(f, ROOT, embedding_segment(f->plan.table));
    const EmbeddingPart part = fsdp_embedding_part(f);
    const GradientSum rounding = fsdp_embedding_sum(f);
    const cudaStream_t stream = f->transport.compute;
    const bool fp32 = f->transport.fp32_sums, clear = fsdp_embedding_is_untied(f) && !f->gradients.sum.add;
    const int64_t element = fp32 ? (int64_t)sizeof(float) : (int64_t)sizeof(bf16);
    void *sum = fp32 ? (void *)(f->transport.sums_fp32 + g.shard) : (void *)(f->transport.sums + g.shard);
    if (clear) CUDA_CHECK(cudaMemsetAsync(sum, 0, (size_t)(part.count * element), stream));
    return fp32 ? embedding_backward((float *)sum, part, dx, index, rows, C, rounding, stream)
                : embedding_backward((bf16 *)sum, part, dx, index, rows, C, rounding, stream);
}

// Computes the gradient of the whole table in the buffer of the root's gradient. If the embedding is tied, adds it to
// lm_head's gradient in that buffer. Returns the bytes moved, as embedding_backward counts them.
static inline int64_t fsdp_embedding_whole(Fsdp *f, const int32_t *index, const bf16 *dx, int64_t rows, int64_t C) {
    const EmbeddingPart part = fsdp_embedding_part(f);
    const GradientSum nearest = {};
    bf16 *gradient = fsdp_gradients(f, ROOT).embedding;
    if (fsdp_embedding_is_untied(f))
        CUDA_CHECK(cudaMemsetAsync(gradient, 0, (size_t)part.count * sizeof(bf16), f->transport.compute));
    return embedding_backward(gradient, part, dx, index, rows, C, nearest, f->transport.compute);
}

// Computes the embedding's gradient from this rank's input gradients dx [R, C] and, if fsdp_input_ranks > 1, those of
// the other ranks of the shard group, which it gathers. `index` sorts the tokens of all these ranks (embedding_sort).
// Returns the bytes moved, as embedding_backward counts them.
static inline int64_t fsdp_embedding_backward(Fsdp *f, const int32_t *index, const bf16 *dx, int64_t R, int64_t C) {
    const bf16 *all = fsdp_gather_input_gradients(f, dx);
    if (fsdp_embedding_joins(f)) return fsdp_embedding_join(f, index, all, fsdp_input_ranks(f) * R, C);
    return fsdp_embedding_whole(f, index, all, R, C);
}

#endif
