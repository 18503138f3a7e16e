// Batches of tokens on their way to the GPU: slots of pinned host memory, each with its copy on the device.
#ifndef LLMC_BATCHES_CUH
#define LLMC_BATCHES_CUH

#include "../base/arena.h"
#include "../data/dataloader.h"
#include "../kernels/embedding.cuh"

#define TOKEN_SLOTS 4

typedef struct {
    Batch host, device;
    cudaEvent_t copied;  // recorded after the copy to the device
} TokenSlot;

typedef struct {
    int64_t rows, ranks;  // tokens in this rank's batch; number of ranks whose inputs the embedding indexes cover
    bool documents;       // slots have memory for them (--document-mask)
    int64_t indexes;      // 1: one index covers all these ranks; else each has one
    int64_t sent;         // slots that batches_next has returned so far
    TokenSlot slots[TOKEN_SLOTS];
    // Inputs of all these ranks, in host memory [ranks, rows]; NULL if the index covers one rank.
    int32_t *group_inputs;
} Batches;

// Bytes of one slot. The arrays of a Batch are contiguous, so that one copy moves all of them.
static inline int64_t batches_slot_bytes(const Batches *b) {
    return ((b->documents ? 4 : 2) * b->rows + b->indexes * embedding_index_size(b->ranks / b->indexes * b->rows)) *
           (int64_t)sizeof(int32_t);
}

static inline Batch batches_arrays(const Batches *b, void *memory) {
    int32_t *inputs = (int32_t *)memory;
    Batch arrays = {inputs, inputs + b->rows, {}, inputs + 2 * b->rows};
    if (b->documents) {
        arrays.documents = Documents{inputs + 2 * b->rows, inputs + 3 * b->rows};
        arrays.index = inputs + 4 * b->rows;
    }
    return arrays;
}

// Places the slots' device memory.
static inline void batches_place(Batches *b, Arena *a, int64_t rows, int64_t ranks, int64_t indexes, bool documents) {
    b->rows = rows, b->ranks = ranks, b->indexes = indexes, b->documents = documents;
    for (int i = 0; i < TOKEN_SLOTS; i++) b->slots[i].device = batches_arrays(b, arena_take(a, batches_slot_bytes(b)));
}

// Allocates the pinned host memory. Call it after batches_place.
static inline void batches_create(Batches *b) {
    for (int i = 0; i < TOKEN_SLOTS; i++) {
        void *memory = NULL;
        CUDA_CHECK(cudaMallocHost(&memory, (size_t)batches_slot_bytes(b)));
        b->slots[i].host = batches_arrays(b, memory);
        CUDA_CHECK(cudaEventCreateWithFlags(&b->slots[i].copied, cudaEventDisableTiming));
    }
    if (b->ranks > 1) b->group_inputs = (int32_t *)xcalloc((size_t)(b->ranks * b->rows), sizeof *b->group_inputs);
}

static inline void batches_destroy(Batches *b) {
    for (int i = 0; i < TOKEN_SLOTS; i++) {
        CUDA_CHECK(cudaFreeHost(b->slots[i].host.inputs));
        CUDA_CHECK(cudaEventDestroy(b->slots[i].copied));
    }
    free(b->group_inputs);
}

// Returns the slot of the next batch. The host may overwrite it once its `copied` event has completed.
static inline TokenSlot *batches_next(Batches *b) { return &b->slots[b->sent++ % TOKEN_SLOTS]; }

// Returns the inputs [ranks, rows] that the index covers: this rank's from the slot, the other ranks' read from `data`.
// first_sample is the number of the first sample (dataloader.h) of the first of these ranks; `rank` is this rank's
// index among them. The result is valid until the next call, or until the slot is overwritten.
static inline const int32_t *batches_group_inputs(Batches *b, const TokenSlot *slot, DataLoader *data,
                                                  int64_t first_sample, int64_t rank) {
    const int64_t B = b->rows / data->T;
    if (b->ranks == 1) return slot->host.inputs;
    for (int64_t r = 0; r < b->ranks; r++) {
        int32_t *inputs = b->group_inputs + r * b->rows;
        if (r == rank) memcpy(inputs, slot->host.inputs, (size_t)b->rows * sizeof *inputs);
        else dataloader_batch(data, first_sample + r * B, B, inputs, NULL);
    }
    return b->group_inputs;
}

// Fills the slot's embedding indexes from the tokens `inputs` [ranks, rows]. part: of the table of C columns.
static inline void batches_sort(const Batches *b, const TokenSlot *slot, const int32_t *inputs, int64_t C,
                                EmbeddingPart part) {
    const int64_t rows = b->ranks / b->indexes * b->rows;
    for (int64_t i = 0; i < b->indexes; i++)
        embedding_sort(slot->host.index + i * embedding_index_size(rows), inputs + i * rows, rows, C, part);
}

// Enqueues the copy of a slot to the device, and records its event `copied`.
static inline void batches_send(const Batches *b, TokenSlot *slot, cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(slot->device.inputs, slot->host.inputs, (size_t)batches_slot_bytes(b),
                               cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaEventRecord(slot->copied, stream));
}

#endif
