// Places of a GPU trainer where tests flip bits. Include it after train_fp8.cu.
#ifndef FLIPS_CUH
#define FLIPS_CUH

typedef struct {
    const char *name;
    void *begin;  // device memory
    int64_t bytes;
    bool passing;  // it is written anew in each step, so that a bit is flipped at a random time within one
} FlipPlace;

enum { FLIP_PLACES = 6 };

static inline void flip_places(FlipPlace places[FLIP_PLACES], const Trainer *t) {
    const AdamwArrays *p = &t->params;
    const FsdpWeights *w = &t->fsdp.weights;
    // a layer has no padding in its matrices
    const int64_t first = t->table.root_size, layer = layer_offset(&t->table, 1) - layer_offset(&t->table, 0);
    const FlipPlace all[FLIP_PLACES] = {
        {"weights", p->weights + first, layer * 2, false},
        {"first moments", (bf16 *)p->exp_avg + first, layer * 2, false},
        {"second moments", (bf16 *)p->exp_avg_sq + first, layer * 2, false},
        {"gradients", t->fsdp.transport.sums, t->table.total * 2, true},
        {"FP8 weights", w->rowwise, w->num_rowwise * fsdp_layer_matrices(&t->fsdp), true},
        {"activations", t->acts.layer[0].x, t->d.R * t->d.C * 2, true},
    };
    memcpy(places, all, sizeof all);
}

// Waits, then flips one bit, while the trainer works on another stream.
static __global__ void flip_kernel(unsigned char *at, int bit, int64_t cycles) {
    const int64_t start = clock64();
    while (clock64() - start < cycles) continue;
    *at ^= (unsigned char)(1 << bit);
}

// Flips bit number `random` of a place. Returns when that is done, or at once if it happens within the next step.
static inline void flip_bit(const FlipPlace *p, uint64_t random, cudaStream_t stream) {
    const uint64_t key = rng_key(31, random);
    unsigned char *at = (unsigned char *)p->begin + rng_u64(key, 0) % (uint64_t)p->bytes;
    CUDA_LAUNCH(flip_kernel, 1, 1, 0, stream, at, (int)(rng_u64(key, 1) % 8),
                p->passing ? (int64_t)(rng_u64(key, 2) % 4000000) : 0);
    if (!p->passing) CUDA_CHECK(cudaStreamSynchronize(stream));
}

#endif
