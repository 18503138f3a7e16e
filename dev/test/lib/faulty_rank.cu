// The GPU trainer with a rank that flips a bit of the first layer's input or, with FAULTY_WEIGHTS=BIT, of the weights
// that it has gathered (faulty_rank.h), for tests of --replay-every; or bit FAULTY_BIT of FAULTY_PLACE (flips.cuh) in
// step FAULTY_STEP, for tests of receipts.
#define TESTING
#include "faulty_rank.h"

#include "../../../llmc/kernels/embedding.cuh"
#include "../../../llmc/shard/fsdp.cuh"

static __global__ void flip_bit_kernel(unsigned char *at, int bit) { *at ^= 1 << bit; }

static inline int64_t faulty_embedding_forward(bf16 *x, const bf16 *table, const int32_t *tokens, int64_t R, int64_t C,
                                               cudaStream_t stream) {
    const int64_t bytes = embedding_forward(x, table, tokens, R, C, stream);
    if (!getenv("FAULTY_WEIGHTS") && pass_is_faulty())
        CUDA_LAUNCH(flip_bit_kernel, 1, 1, 0, stream, (unsigned char *)(x + R * C / 2), 5);
    return bytes;
}

// Here each layer's forward and each layer's backward is a pass. The bit, counted from the layer's first one, is
// flipped when the layer has arrived, before the pass casts or reads it.
static inline void faulty_unshard(Fsdp *f, int64_t l, bool backward) {
    const char *bit = getenv("FAULTY_WEIGHTS");
    if (bit && pass_is_faulty()) {
        const int64_t slot = l % f->weights.num_slots, at = atoll(bit) % (8 * fsdp_layer_matrices(f));
        fsdp_prefetch(f, l);
        compute_waits_event(&f->transport, f->weights.slot[slot].arrived);
        CUDA_LAUNCH(flip_bit_kernel, 1, 1, 0, f->transport.compute, (unsigned char *)fsdp_slot_data(f, slot) + at / 8,
                    (int)(at % 8));
    }
    fsdp_unshard(f, l, backward);
}

#define embedding_forward faulty_embedding_forward
#define fsdp_unshard faulty_unshard
#include "../../../train_fp8.cu"
#include "flips.cuh"

static void faulty_step(void *context, DataLoader *data, int64_t step, int64_t skipped, int64_t first_sample,
                        bool after_pause) {
    static cudaStream_t stream;
    const char *place = getenv("FAULTY_PLACE"), *faulty = getenv("FAULTY_STEP"), *bit = getenv("FAULTY_BIT");
    FlipPlace places[FLIP_PLACES];
    flip_places(places, (const Trainer *)context);
    if (!stream) CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; place && faulty && bit && i < FLIP_PLACES; i++)
        if (strcmp(places[i].name, place) == 0 && step + 1 == atol(faulty))
            flip_bit(&places[i], (uint64_t)atoll(bit), stream);
    start_step(context, data, step, skipped, first_sample, after_pause);
}

int main(int argc, char **argv) {
    static Trainer trainer;
    TrainerOps ops = trainer_ops;
    ops.start_step = faulty_step;
    return run_trainer(argc, argv, &ops, &trainer);
}
