// Places a rank's weights, and AdamW's state unless it is offloaded, in GPU memory.
#ifndef LLMC_ADAMW_STATE_CUH
#define LLMC_ADAMW_STATE_CUH

#include "../base/arena.h"
#include "../config/options.h"
#include "../config/shard_plan.h"
#include "adamw_update.cuh"

static inline AdamwMoments adamw_moments_of(const Options *o) {
    switch (o->optimizer_state) {
    case MOMENTS_FP32: return ADAMW_FP32;
    case MOMENTS_COAT: return ADAMW_COAT;
    case MOMENTS_COAT_STOCHASTIC: return ADAMW_COAT_STOCHASTIC;
    case MOMENTS_MSAMP: return ADAMW_MSAMP;
    default: return ADAMW_BF16;
    }
}

// Places what COAT's moments of n elements need in addition to their codes.
static inline void adamw_place_coat(AdamwCoat *coat, int64_t n, Arena *a) {
    const int64_t words = n / COAT_GROUP * (int64_t)sizeof(uint32_t);
    coat->exp_avg_groups = (uint32_t *)arena_take(a, words);
    coat->exp_avg_sq_groups = (uint32_t *)arena_take(a, words);
    coat->tables = (CoatTables *)arena_take(a, sizeof(CoatTables));
}

// Places the scales and amaxes of `tensors` tensors.
static inline void adamw_place_scales(AdamwScaled *s, int64_t tensors, Arena *a) {
    const int64_t n = tensors * MSAMP_STATES;
    s->tensors = tensors;
    s->scales = (float *)arena_take(a, n * (int64_t)sizeof(float));
    s->new_scales = (float *)arena_take(a, n * (int64_t)sizeof(float));
    s->amaxes = (uint32_t *)arena_take(a, n * (int64_t)sizeof(uint32_t));
}

// Places a rank's weights, moments and, if the run has them, masters. The pointer to the gradients stays NULL, and so
// do pointers to what is offloaded.
static inline void adamw_place(AdamwArrays *p, const Options *o, const ParameterTable *t, const ShardPlan *plan,
                               Arena *a) {
    static const char *const names[] = {"optimizer state (bf16)", "optimizer state (fp32)", "optimizer state (FP8)",
                                        "optimizer state (FP8)", "optimizer state (FP8, FP16)"};
    const bool fp16 = options_fp16_weights(o), fp32 = o->master_weights == STORAGE_FP32;
    const Offloaded offloaded = options_offloaded(o);
    const int64_t n = plan->total, m = options_uses_model(o) ? 0 : n;
    memset(p, 0, sizeof *p);
    p->moments = adamw_moments_of(o);
    const int64_t first = adamw_moment_bytes(p->moments), second = adamw_moments_bytes(p->moments) - first;
    arena_group(a, "weights (bf16)");
    p->weights = (bf16 *)arena_take(a, weights_begin(plan, t->num_layers) * (int64_t)sizeof(bf16));
    arena_group(a, fp16 ? "master weights (FP16)" : "master weights (fp32)");
    if (fp32 && !offloaded.master) p->master = (float *)arena_take(a, n * (int64_t)sizeof(float));
    if (fp16) p->scaled.master = (fp16_bits *)arena_take(a, n * (int64_t)sizeof(fp16_bits));
    arena_group(a, names[p->moments]);
    if (!offloaded.moments) p->exp_avg = arena_take(a, m * first), p->exp_avg_sq = arena_take(a, m * second);
    if (adamw_is_coat(p->moments)) adamw_place_coat(&p->coat, m, a);
    if (options_tensor_scales(o)) adamw_place_scales(&p->scaled, t->count, a);
}

// Sets what states need before the first step, in memory that adamw_place has placed: the tables of COAT's moments, and
// scales of 1 for MS-AMP's. Masters get their scales later (fp16_masters.cuh).
static inline void adamw_begin_states(const AdamwArrays *p, cudaStream_t stream) {
    const int64_t ones = 2 * p->scaled.tensors;
    CoatTables *tables = (CoatTables *)xcalloc(1, sizeof *tables);
    float *one = (float *)xcalloc((size_t)ones + 1, sizeof *one);
    for (int64_t i = 0; i < ones; i++) one[i] = 1;
    if (adamw_is_coat(p->moments)) {
        coat_tables_fill(tables);
        CUDA_CHECK(cudaMemcpyAsync(p->coat.tables, tables, sizeof *tables, cudaMemcpyDefault, stream));
    }
    if (ones) CUDA_CHECK(cudaMemcpyAsync(p->scaled.scales, one, (size_t)ones * sizeof *one, cudaMemcpyDefault, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    free(tables), free(one);
}

#endif
