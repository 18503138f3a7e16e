// Reduces gradients in FP8 over ranks (--reduce-dtype fp8), and keeps reduced gradients in FP8, by gradient_fp8.h.
//
// Only gradients of the layers' matrices are FP8. All work here runs on the communication stream. With --reduce-dtype
// fp8 each rank casts its whole gradient of a layer's matrices, with scales common to the shard group, and receives the
// other ranks' codes of its slice. It adds them in fp32, in the order of ranks, and casts the sum with new scales. Over
// replicas, with scales common to all ranks, each rank does this for one part of its slice, and then sends that part to
// the other replicas. So copy engines and NCCL give these gradients equal bits. With --reduce-dtype bf16, these
// gradients are reduced to bf16 and then cast.
#ifndef LLMC_FSDP_GRADIENT_FP8_CUH
#define LLMC_FSDP_GRADIENT_FP8_CUH

#include "fsdp_weights.cuh"

// Replaces the amaxes of layer l's gradients by their maxima over a group.
static inline void fsdp_reduce_gradient_amaxes(Fsdp *f, CommGroup group, GradientFp8 layer, int64_t l) {
    if (group == COMM_SHARD && !fsdp_is_sharded(f)) return;
    nccl_begin(f->in.nccl, "all-reduce of the amaxes of gradients", l);
    nccl_all_reduce(f->in.nccl, group, layer.amaxes, f->gradients.fp8_layout.entries, ncclUint32, ncclMax);
    nccl_end(f->in.nccl);
}

// Stores this rank's slice of layer l's reduced gradients, or adds it to those of earlier micro-steps.
static inline void fsdp_join_reduced_fp8(Fsdp *f, int64_t l, GradientFp8Source from, GradientSum how) {
    const FsdpGradients *g = &f->gradients;
    const cudaStream_t stream = f->transport.nccl->stream;
    const GradientFp8 to = gradient_fp8_of_layer(g->fp8_sums, &g->fp8_layout, l);
    gradient_fp8_amaxes(to, &g->fp8_layout, from, how.add, stream);
    fsdp_reduce_gradient_amaxes(f, COMM_SHARD, to, l);
    gradient_fp8_cast(to, &g->fp8_layout, from, how, stream);
}

// Returns how reduced gradients replace the sums.
static inline GradientSum fsdp_replaces(void) { return GradientSum{false, false, 0, 0}; }

// Sends this rank's gradients of layer l's matrices, `whole`, in FP8 to the ranks of the shard group. Returns all
// ranks' codes of this rank's slice.
static inline GradientFp8Source fsdp_exchange_codes(Fsdp *f, int64_t l, const bf16 *whole) {
    const FsdpGradients *g = &f->gradients;
    Transport *t = &f->transport;
    const GradientFp8 sent = g->fp8_sent;
    const int64_t slice = g->fp8_layout.matrices;
    gradient_fp8_amaxes(sent, &g->fp8_whole, gradient_fp8_of_bf16(whole), false, t->nccl->stream);
    fsdp_reduce_gradient_amaxes(f, COMM_SHARD, sent, l);
    gradient_fp8_cast(sent, &g->fp8_whole, gradient_fp8_of_bf16(whole), fsdp_replaces(), t->nccl->stream);
    transport_exchange_codes(t, sent.codes, g->fp8_received, slice, l);
    return GradientFp8Source{
        NULL,         sent.codes + t->shard_rank * slice, sent.scale_inv, g->fp8_received, slice, 0, t->shard_size,
        t->shard_rank};
}

// Reduce-scatters the gradients of layer l's matrices over the shard group, and adds this rank's slice to its FP8 sums;
// if !how.add, stores the slice there instead. `whole` is this rank's gradient, and may be overwritten.
static inline void fsdp_reduce_scatter_fp8(Fsdp *f, int64_t l, bf16 *whole, GradientSum how) {
    const int64_t slice = f->gradients.fp8_layout.matrices;
    if (f->transport.reduce_dtype == REDUCE_FP8)
        return fsdp_join_reduced_fp8(f, l, fsdp_exchange_codes(f, l, whole), how);
    transport_reduce_scatter_in_place(&f->transport, whole, slice, l);
    fsdp_join_reduced_fp8(f, l, gradient_fp8_of_bf16(whole + f->transport.shard_rank * slice), how);
}

// Replaces this rank's FP8 sums of layer l by the sums over replicas, sent in FP8. The scales are common to all ranks.
static inline void fsdp_reduce_replica_codes(Fsdp *f, int64_t l) {
    const FsdpPlan *plan = &f->plan;
    const FsdpGradients *g = &f->gradients;
    const cudaStream_t stream = f->transport.nccl->stream;
    const GradientFp8Layout *a = &g->fp8_layout;
    const GradientFp8 to = gradient_fp8_of_layer(g->fp8_sums, a, l);
    const CodeParts p = code_parts(a->matrices, plan->replicas);
    const int64_t begin = code_part_begin(&p, plan->replica);
    const GradientFp8Layout part = gradient_fp8_part(a, begin, begin + code_part_size(&p, plan->replica));
    GradientFp8Source from = gradient_fp8_of_codes(to);
    gradient_fp8_amaxes(to, a, from, false, stream);
    fsdp_reduce_gradient_amaxes(f, COMM_WORLD, to, l);
    gradient_fp8_cast(to, a, from, fsdp_replaces(), stream);
    nccl_begin(f->in.nccl, "reduce-scatter of the gradients over replicas", l);
    nccl_scatter_codes(f->in.nccl, COMM_REPLICAS, &p, plan->replica, to.codes, g->fp8_received);
    nccl_end(f->in.nccl);
    from.others = g->fp8_received, from.stride = p.part, from.begin = begin;
    from.ranks = plan->replicas, from.rank = plan->replica;
    gradient_fp8_amaxes(to, &part, from, false, stream);
    fsdp_reduce_gradient_amaxes(f, COMM_WORLD, to, l);
    gradient_fp8_cast(to, &part, from, fsdp_replaces(), stream);
    nccl_begin(f->in.nccl, "all-gather of the gradients over replicas", l);
    nccl_gather_codes(f->in.nccl, COMM_REPLICAS, &p, plan->replica, to.codes);
    nccl_end(f->in.nccl);
}

// Replaces this rank's FP8 sums of layer l by the sums over replicas, after the last micro-step.
static inline void fsdp_reduce_replicas_fp8(Fsdp *f, int64_t l) {
    const FsdpGradients *g = &f->gradients;
    const GradientFp8Layout *a = &g->fp8_layout;
    if (f->transport.reduce_dtype == REDUCE_FP8) return fsdp_reduce_replica_codes(f, l);
    gradient_fp8_to_bf16(g->fp8_reduced, gradient_fp8_of_layer(g->fp8_sums, a, l), a, f->transport.nccl->stream);
    nccl_begin(f->in.nccl, "all-reduce of the gradients", l);
    nccl_all_reduce(f->in.nccl, COMM_REPLICAS, g->fp8_reduced, a->matrices, ncclBfloat16, ncclSum);
    nccl_end(f->in.nccl);
    fsdp_join_reduced_fp8(f, l, gradient_fp8_of_bf16(g->fp8_reduced), fsdp_replaces());
}

#endif
