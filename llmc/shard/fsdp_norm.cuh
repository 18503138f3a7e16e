// Norms of gradients over all ranks: of a step, and of each unit with --optimizer-in-backward and --grad-clip.
#ifndef LLMC_FSDP_NORM_CUH
#define LLMC_FSDP_NORM_CUH

#include "fsdp_plan.cuh"

// Replaces *loss by its sum over all ranks. If gradients are sharded, also replaces *squares, the sum of squares of
// this rank's gradients, by its sum over all ranks. Without sharding every rank has the same gradients.
static inline void fsdp_reduce_step_stats(Fsdp *f, float *loss, double *squares) {
    if (!f->in.nccl) return;
    comm_waits_compute(&f->transport);
    nccl_begin(f->in.nccl, "all-reduce of loss and gradient norm", NO_LAYER);
    nccl_all_reduce(f->in.nccl, COMM_WORLD, loss, 1, ncclFloat32, ncclSum);
    if (fsdp_is_sharded(f)) nccl_all_reduce(f->in.nccl, COMM_WORLD, squares, 1, ncclFloat64, ncclSum);
    nccl_end(f->in.nccl);
    compute_waits_comm(&f->transport);
}

// Returns how often each gradient is counted in the sum of squares: with sharding, that sum is over all ranks, and each
// replica counts the gradient once.
static inline int64_t fsdp_times_counted(const Fsdp *f) { return fsdp_is_sharded(f) ? f->plan.replicas : 1; }

// Returns the slot of unit l's sum of squares.
static inline int64_t fsdp_clip_slot(const Fsdp *f, int64_t l) { return l == ROOT ? 0 : l % f->plan.sum_layers; }

// Only with grad_clip: computes the sum of squares of unit l's gradients, which must be complete in `stream`. If
// gradients are sharded, sums it over all ranks; `stream` must then be the communication stream. Returns the bytes that
// this rank's kernel moves.
static inline int64_t fsdp_sum_squares(Fsdp *f, int64_t l, cudaStream_t stream) {
    const Transport *t = &f->transport;
    const int64_t at = fsdp_sums_begin(f, l);
    double *squares = &f->clip.adamw.squares[fsdp_clip_slot(f, l)];
    AdamwGradients sums = {};
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
