// Places a rank's weights and AdamW's state in GPU memory.
#ifndef LLMC_ADAMW_STATE_CUH
#define LLMC_ADAMW_STATE_CUH

#include "../base/arena.h"
#include "../config/options.h"
#include "adamw_update.cuh"

static inline AdamwMoments adamw_moments_of(const Options *o) {
    switch (o->optimizer_state) {
    case MOMENTS_FP32: return ADAMW_FP32;
    case MOMENTS_COAT: return ADAMW_COAT;
    case MOMENTS_COAT_STOCHASTIC: return ADAMW_COAT_STOCHASTIC;
    default: return ADAMW_BF16;
    }
}

// Places what FP8 moments of n elements need in addition to their codes.
static inline void adamw_place_coat(AdamwCoat *coat, int64_t n, Arena *a) {
    const int64_t words = n / COAT_GROUP * (int64_t)sizeof(uint32_t);
    coat->exp_avg_groups = (uint32_t *)arena_take(a, words);
    coat->exp_avg_sq_groups = (uint32_t *)arena_take(a, words);
    coat->tables = (CoatTables *)arena_take(a, sizeof(CoatTables));
}

// Places weights, moments and, if the run has them, fp32 masters of n elements. The pointer to the gradients stays
// NULL. With --offload moments, the pointers to the moments also stay NULL.
static inline void adamw_place(AdamwArrays *p, const Options *o, int64_t n, Arena *a) {
    static const char *const names[] = {"optimizer state (bf16)", "optimizer state (fp32)", "optimizer state (FP8)",
                                        "optimizer state (FP8)"};
    memset(p, 0, sizeof *p);
    p->moments = adamw_moments_of(o);
    arena_group(a, "weights (bf16)");
    p->weights = (bf16 *)arena_take(a, n * (int64_t)sizeof(bf16));
    arena_group(a, "master weights (fp32)");
    if (o->master_weights == STORAGE_FP32) p->master = (float *)arena_take(a, n * (int64_t)sizeof(float));
    arena_group(a, names[p->moments]);
    if (o->offload != OFFLOAD_MOMENTS) {
        p->exp_avg = arena_take(a, n * adamw_moment_bytes(p->moments));
        p->exp_avg_sq = arena_take(a, n * adamw_moment_bytes(p->moments));
    }
    if (adamw_is_coat(p->moments)) adamw_place_coat(&p->coat, n, a);
}

// Fills the tables of FP8 moments, which adamw_place has placed. Does nothing for other moments.
static inline void adamw_fill_tables(const AdamwArrays *p, cudaStream_t stream) {
    if (!adamw_is_coat(p->moments)) return;
    CoatTables *tables = (CoatTables *)xcalloc(1, sizeof *tables);
    coat_tables_fill(tables);
    CUDA_CHECK(cudaMemcpyAsync(p->coat.tables, tables, sizeof *tables, cudaMemcpyDefault, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    free(tables);
}

#endif
