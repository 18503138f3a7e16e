// Norms of gradients over all ranks: of a step, and of each unit with --optimizer-in-backward and --grad-clip.
#ifndef LLMC_FSDP_NORM_CUH
#define LLMC_FSDP_NORM_CUH

#include "../optimizer/adamw.cuh"
#include "fsdp_plan.cuh"

// If the plan is in_blocks, each block of a rank's shard has a sum of squares, and so has each block of the whole
// model. Returns how many sums unit l has together: those of this rank's shard, with several ranks those of the whole
// unit, and the numbers that adamw_sum needs.
static inline int64_t fsdp_unit_sums(const Fsdp *f, int64_t l) {
    const ShardPlan whole = shard_plan_of(f->plan.table, 1, 0, true);
    return adamw_unit_blocks(&f->plan.shard, l) + (fsdp_is_sharded(f) ? adamw_unit_blocks(&whole, l) : 0) +
           ADAMW_SUM_BLOCKS;
}

// Writes the sums of the blocks of unit l, a layer or ROOT, and of the count - 1 layers that follow it to `blocks`.
// Returns the bytes that the kernels move.
static inline int64_t fsdp_block_squares(const Fsdp *f, double *blocks, int64_t l, int64_t count, cudaStream_t stream) {
    const Transport *t = &f->transport;
    const ShardPlan *plan = &f->plan.shard;
    AdamwGradients sums = {};
    sums.bf16_data = t->sums, sums.fp32_data = t->sums_fp32;
    for (int k = 0; k < NUM_SEGMENTS; k++)
        if (slice_sizes(plan, l)[k])
            adamw_block_squares(blocks + adamw_blocks_before(plan, l, k), sums,
                                fsdp_sums_begin(f, l) + segment_begin(slice_sizes(plan, l), k), slice_sizes(plan, l)[k],
                                count, shard_elements(plan, l), adamw_unit_blocks(plan, l), stream);
    return count * shard_elements(plan, l) * (t->fp32_sums ? 4 : 2);
}

// Copies the sums of this rank's blocks of unit l and of the count - 1 layers that follow it to their places among
// those of all ranks. Blocks of padding behind a segment have no place.
static inline void fsdp_place_blocks(const Fsdp *f, double *all, const double *blocks, int64_t l, int64_t count,
                                     cudaStream_t stream) {
    const ShardPlan *plan = &f->plan.shard, whole = shard_plan_of(f->plan.table, 1, 0, true);
    const size_t number = sizeof *all;
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const int64_t own = slice_sizes(plan, l)[k] / SHARD_BLOCK, first = plan->shard_rank * own,
                      end = adamw_blocks_before(&whole, l, k + 1) - adamw_blocks_before(&whole, l, k),
                      n = min_i64(own, end - first);
        if (n > 0)
            CUDA_CHECK(cudaMemcpy2DAsync(
                all + adamw_blocks_before(&whole, l, k) + first, (size_t)adamw_unit_blocks(&whole, l) * number,
                blocks + adamw_blocks_before(plan, l, k), (size_t)adamw_unit_blocks(plan, l) * number,
                (size_t)n * number, (size_t)count, cudaMemcpyDeviceToDevice, stream));
    }
}

// Replaces the sums of the blocks of all ranks [n] by their sums over ranks: one rank has each, and the others have 0.
static inline void fsdp_reduce_blocks(Fsdp *f, double *all, int64_t n) {
    nccl_all_reduce(f->in.nccl, COMM_WORLD, all, n, ncclFloat64, ncclSum);
}

// True if the gradient norm is computed before the update: to clip by it, to skip a step, or because gradients are FP8,
// which are cheap to read. Otherwise AdamW sums the squares in its update, and a loss or norm that is not accepted
// (adamw_takes) ends the run before anything of the step is saved.
static inline bool fsdp_norm_first(const Options *o) {
    if (o->optimizer_in_backward) return false;
    return o->grad_clip > 0 || o->on_nonfinite == NONFINITE_SKIP || options_fp8_gradients(o) ||
           (options_any_ranks(o) && options_offloads_state(o));
}

// Sums the squares of this rank's gradients, into *squares or, if the plan is in_blocks, into the sums of its blocks.
// `blocks` has adamw_workspace_bytes. Returns the bytes moved.
static inline int64_t fsdp_squares(const Fsdp *f, double *squares, double *blocks, AdamwGradients gradients) {
    const ShardPlan *plan = &f->plan.shard;
    const cudaStream_t stream = f->transport.compute;
    if (!f->plan.any_ranks) return adamw_squares(squares, gradients, plan->total, blocks, stream);
    return fsdp_block_squares(f, blocks, ROOT, 1, stream) +
           fsdp_block_squares(f, blocks + adamw_first_block(plan, 0), 0, f->plan.table->num_layers, stream);
}

// Replaces the sums of losses [n], of the micro-steps of all ranks, by their sums over ranks: one rank has each, and
// the others have 0. If gradients are sharded, also makes *squares, the sum of squares of this rank's gradients, the
// sum over all ranks. Without sharding every rank has the same gradients. If the plan is in_blocks, computes *squares
// from the sums of this rank's blocks instead: adds those of all ranks in the order of the flat array.
static inline void fsdp_reduce_step_stats(Fsdp *f, double *losses, int64_t n, double *squares, double *blocks) {
    const cudaStream_t compute = f->transport.compute;
    const ShardPlan *plan = &f->plan.shard, whole = shard_plan_of(f->plan.table, 1, 0, true);
    const int64_t own = adamw_update_sums(f->plan.table, plan), count = adamw_sums_of_ranks(f->plan.table, plan);
    double *all = blocks + own;
    if (count) {
        CUDA_CHECK(cudaMemsetAsync(all, 0, (size_t)count * sizeof *all, compute));
        fsdp_place_blocks(f, all, blocks, ROOT, 1, compute);
        fsdp_place_blocks(f, all + adamw_first_block(&whole, 0), blocks + adamw_first_block(plan, 0), 0,
                          f->plan.table->num_layers, compute);
    }
    if (f->in.nccl) {
        comm_waits_compute(&f->transport);
        nccl_begin(f->in.nccl, "all-reduce of loss and gradient norm", NO_LAYER);
        nccl_all_reduce(f->in.nccl, COMM_WORLD, losses, n, ncclFloat64, ncclSum);
        if (count) fsdp_reduce_blocks(f, all, count);
        else if (fsdp_is_sharded(f)) nccl_all_reduce(f->in.nccl, COMM_WORLD, squares, 1, ncclFloat64, ncclSum);
        nccl_end(f->in.nccl);
        compute_waits_comm(&f->transport);
    }
    if (f->plan.any_ranks) adamw_sum(squares, all + count, count ? all : blocks, count ? count : own, compute);
}

// Returns how often each gradient is counted in the sum of squares: with sharding, that sum is over all ranks, and each
// replica counts the gradient once.
static inline int64_t fsdp_times_counted(const Fsdp *f) { return fsdp_is_sharded(f) ? f->plan.replicas : 1; }

// Returns the slot of unit l's sum of squares.
static inline int64_t fsdp_clip_slot(const Fsdp *f, int64_t l) { return l == ROOT ? 0 : l % f->plan.sum_layers; }

// Does fsdp_sum_squares if the plan is in_blocks.
static inline int64_t fsdp_sum_blocks(Fsdp *f, double *squares, int64_t l, cudaStream_t stream) {
    const ShardPlan whole = shard_plan_of(f->plan.table, 1, 0, true);
    double *blocks = f->clip.adamw.workspace, *all = blocks + adamw_unit_blocks(&f->plan.shard, l);
    const int64_t bytes = fsdp_block_squares(f, blocks, l, 1, stream), n = adamw_unit_blocks(&whole, l);
    if (!fsdp_is_sharded(f)) {
        adamw_sum(squares, all, blocks, n, stream);
        return bytes;
    }
    CUDA_CHECK(cudaMemsetAsync(all, 0, (size_t)n * sizeof *all, stream));
    fsdp_place_blocks(f, all, blocks, l, 1, stream);
    nccl_begin(f->in.nccl, "all-reduce of a unit's gradient norm", l);
    fsdp_reduce_blocks(f, all, n);
    nccl_end(f->in.nccl);
    adamw_sum(squares, all + n, all, n, stream);
    return bytes;
}

// Only with grad_clip: computes the sum of squares of unit l's gradients, which must be complete in `stream`. If
// gradients are sharded, sums it over all ranks; `stream` must then be the communication stream. Returns the bytes that
// this rank's kernel moves.
static inline int64_t fsdp_sum_squares(Fsdp *f, int64_t l, cudaStream_t stream) {
    const Transport *t = &f->transport;
    const int64_t at = fsdp_sums_begin(f, l);
    double *squares = &f->clip.adamw.squares[fsdp_clip_slot(f, l)];
    AdamwGradients sums = {};
    if (f->plan.any_ranks) return fsdp_sum_blocks(f, squares, l, stream);
    if (t->fp32_sums) sums.fp32_data = t->sums_fp32 + at;
    else sums.bf16_data = t->sums + at;
    const int64_t bytes =
        adamw_squares(squares, sums, shard_elements(&f->plan.shard, l), f->clip.adamw.workspace, stream);
    if (!fsdp_is_sharded(f)) return bytes;
    nccl_begin(f->in.nccl, "all-reduce of a unit's gradient norm", l);
    nccl_all_reduce(f->in.nccl, COMM_WORLD, squares, 1, ncclFloat64, ncclSum);
    nccl_end(f->in.nccl);
    return bytes;
}

// Only with grad_clip: sets the clip factor of unit l and whether its update is skipped. The unit's gradient must be
// complete in the compute stream. With several ranks, a layer's sum of squares is already there (fsdp_complete_sums).
// Returns the bytes that the compute stream moves.
static inline int64_t fsdp_clip_unit(Fsdp *f, AdamwControl *control, int64_t l) {
    Transport *t = &f->transport;
    int64_t bytes = 0;
    if (!f->in.nccl) {
        bytes = fsdp_sum_squares(f, l, t->compute);
    } else if (l == ROOT) {
        comm_waits_compute(t);
        fsdp_sum_squares(f, l, t->nccl->stream);
        compute_waits_comm(t);
    }
    adamw_clip(control, &f->clip.adamw, l, fsdp_clip_slot(f, l), l == f->plan.table->num_layers - 1,
               fsdp_times_counted(f), (float)f->clip.grad_clip, t->compute);
    return bytes;
}

#endif
