// --replay-every on GPUs (replay.h): hashes of the gradients that this rank computes, before they are reduced.
#ifndef LLMC_FSDP_REPLAY_CUH
#define LLMC_FSDP_REPLAY_CUH

#include "../gpu/receipt.cuh"
#include "fsdp_embedding.cuh"

// A rank's replay on the GPU.
typedef struct {
    bool hashes, again;  // as in Replay
    uint64_t *sums;      // device memory: [count] hashes of this micro-step
    int64_t count;       // replay_count
} GpuReplay;

static inline void fsdp_replay_begin(const Fsdp *f, GpuReplay *r, bool again) {
    r->hashes = true, r->again = again;
    CUDA_CHECK(cudaMemsetAsync(r->sums, 0, (size_t)r->count * sizeof *r->sums, f->transport.compute));
}

// Hashes the gradients of the tensors of unit l, which must be complete.
static inline void fsdp_replay_unit(const Fsdp *f, const GpuReplay *r, int64_t l) {
    const FsdpUnit g = fsdp_gradients(f, l);
    const ParameterTable *t = f->plan.table;
    bf16 *const arrays[NUM_SEGMENTS] = {g.vectors, g.matrices, g.embedding};
    for (int64_t i = 0; r->hashes && i < t->count; i++) {
        const Parameter *p = &t->entries[i];
        const int k = parameter_segment(p);
        if (p->layer != l || k >= fsdp_reduced_segments(f) || !arrays[k]) continue;
        const int64_t at = p->offset - fsdp_segment(f, l, k).flat;
        receipt_add(&r->sums[i], arrays[k], sizeof(bf16), ReceiptPart{at, parameter_elements(p), at},
                    f->transport.compute);
    }
}

// Hashes the gradients of the embedding's output, dx [n].
static inline void fsdp_replay_inputs(const Fsdp *f, const GpuReplay *r, const bf16 *dx, int64_t n) {
    if (r->hashes) receipt_add(&r->sums[r->count - 1], dx, sizeof(bf16), ReceiptPart{0, n, 0}, f->transport.compute);
}

// Ends the hashing, waits, and sets hashes [count], in host memory.
static inline void fsdp_replay_end(Fsdp *f, GpuReplay *r, uint64_t *hashes) {
    r->hashes = r->again = false;
    transport_wait_all(&f->transport);
    CUDA_CHECK(cudaMemcpy(hashes, r->sums, (size_t)r->count * sizeof *hashes, cudaMemcpyDeviceToHost));
}

#endif
