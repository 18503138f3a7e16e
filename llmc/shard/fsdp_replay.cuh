// --replay-every on GPUs (replay.h): hashes of the gradients that this rank computes, before they are reduced.
#ifndef LLMC_FSDP_REPLAY_CUH
#define LLMC_FSDP_REPLAY_CUH

#include "../gpu/receipt.cuh"
#include "fsdp_embedding.cuh"

// A rank's replay on the GPU.
typedef struct {
    bool hashes, again;  // as in Replay
    uint64_t *sums;      // device memory: [units] hashes of this micro-step
    int64_t units;
} GpuReplay;

static inline void fsdp_replay_begin(const Fsdp *f, GpuReplay *r, bool again) {
    r->hashes = true, r->again = again;
    CUDA_CHECK(cudaMemsetAsync(r->sums, 0, (size_t)r->units * sizeof *r->sums, f->transport.compute));
}

// Hashes the gradients of unit l, which must be complete. Padding in them is zero.
static inline void fsdp_replay_unit(const Fsdp *f, const GpuReplay *r, int64_t l) {
    const FsdpUnit g = fsdp_gradients(f, l);
    const int64_t *slices = slice_sizes(&f->plan.shard, l), ranks = f->plan.shard.shard_size;
    bf16 *const arrays[NUM_SEGMENTS] = {g.vectors, g.matrices, g.embedding};
    for (int k = 0; r->hashes && k < fsdp_reduced_segments(f); k++)
        if (slices[k] && arrays[k])
            receipt_add(&r->sums[l + 1], arrays[k], sizeof(bf16), ranks * slices[k], f->transport.compute);
}

// Hashes the gradients of the embedding's outputs, dx [n].
static inline void fsdp_replay_inputs(const Fsdp *f, const GpuReplay *r, const bf16 *dx, int64_t n) {
    if (r->hashes) receipt_add(&r->sums[r->units - 1], dx, sizeof(bf16), n, f->transport.compute);
}

// Ends the hashing, waits, and sets hashes [units], in host memory.
static inline void fsdp_replay_end(Fsdp *f, GpuReplay *r, uint64_t *hashes) {
    r->hashes = r->again = false;
    transport_wait_all(&f->transport);
    CUDA_CHECK(cudaMemcpy(hashes, r->sums, (size_t)r->units * sizeof *hashes, cudaMemcpyDeviceToHost));
}

#endif
