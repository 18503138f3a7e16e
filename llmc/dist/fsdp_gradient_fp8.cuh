// Reduces gradients in FP8 over ranks (--reduce-dtype fp8), and keeps reduced gradients in FP8, by gradient_fp8.h.
//
// Only gradients of the layers' matrices are FP8. All work here runs on the communication stream. With --reduce-dtype
// fp8 each rank casts its whole gradient of a layer's matrices, with scales common to the shard group, and receives the
// other ranks' codes of its slice; a kernel adds them in the order of ranks. Over replicas, with scales common to all
// ranks, each rank sums one part of its slice and then sends that part to the other replicas. So copy engines and NCCL
// give these gradients equal bits. With --reduce-dtype bf16, these gradients are reduced to bf16 and then cast.
#ifndef LLMC_FSDP_GRADIENT_FP8_CUH
#define LLMC_FSDP_GRADIENT_FP8_CUH

#include "fsdp_weights.cuh"

// Replaces the amaxes of layer l's gradients by their maxima over a group.
static inline void fsdp_reduce_gradient_amaxes(Fsdp *f, CommGroup group, GradientFp8 layer, int64_t l) {
    if (group == COMM_SHARD && !fsdp_is_sharded(f)) return;
    nccl_begin(f->in.nccl, "all-reduce of the amaxes of gradients", l);
    nccl_all_reduce(f->in.nccl, group, layer.amaxes, f->fp8_layout.entries, ncclUint32, ncclMax);
    nccl_end(f->in.nccl);
}

// Stores this rank's slice of layer l's reduced gradients, or adds it to those of earlier micro-steps.
static inline void fsdp_join_reduced_fp8(Fsdp *f, int64_t l, GradientFp8Source from, bool add) {
    const cudaStream_t stream = f->transport.nccl->stream;
    const GradientFp8 to = gradient_fp8_of_layer(f->fp8_sums, &f->fp8_layout, l);
    gradient_fp8_amaxes(to, &f->fp8_layout, from, add, stream);
    fsdp_reduce_gradient_amaxes(f, COMM_SHARD, to, l);
    gradient_fp8_cast(to, &f->fp8_layout, from, add, 1, stream);
}

// Sums the gradients of layer l's matrices over the shard group in FP8, and adds this rank's slice to its FP8 sums; the
// first micro-step stores the slice there instead. `whole` is this rank's gradient of the layer's matrices.
static inline void fsdp_reduce_scatter_codes(Fsdp *f, int64_t l, const bf16 *whole) {
    Transport *t = &f->transport;
    const cudaStream_t stream = t->nccl->stream;
    const GradientFp8 sent = f->fp8_sent, to = gradient_fp8_of_layer(f->fp8_sums, &f->fp8_layout, l);
    const GradientFp8Source computed = {whole, NULL, NULL};
    const int64_t slice = f->fp8_layout.matrices;
    uint8_t *own = sent.codes + t->shard_rank * slice, *sum = f->sum.add ? own : to.codes;
    gradient_fp8_amaxes(sent, &f->fp8_whole, computed, false, stream);
    fsdp_reduce_gradient_amaxes(f, COMM_SHARD, sent, l);
    gradient_fp8_cast(sent, &f->fp8_whole, computed, false, 1, stream);
    transport_exchange_codes(t, sent.codes, f->fp8_received, slice, l);
    gradient_fp8_sum_ranks(sum, own, f->fp8_received, slice, t->shard_size, t->shard_rank, slice, stream);
    if (f->sum.add) {
        const GradientFp8Source summed = {NULL, own, sent.scale_inv};
        fsdp_join_reduced_fp8(f, l, summed, true);
    } else {
        CUDA_CHECK(cudaMemcpyAsync(to.scale_inv, sent.scale_inv, (size_t)f->fp8_layout.entries * sizeof(float),
                                   cudaMemcpyDeviceToDevice, stream));
    }
}

// Reduce-scatters the gradients of layer l's matrices over the shard group, and adds this rank's slice to its FP8 sums;
// the first micro-step stores the slice there instead. `whole` is this rank's gradient, and may be overwritten.
static inline void fsdp_reduce_scatter_fp8(Fsdp *f, int64_t l, bf16 *whole) {
    const int64_t slice = f->fp8_layout.matrices;
    if (f->transport.reduce_dtype == REDUCE_FP8) return fsdp_reduce_scatter_codes(f, l, whole);
    transport_reduce_scatter_in_place(&f->transport, whole, slice, l);
    const GradientFp8Source reduced = {whole + f->transport.shard_rank * slice, NULL, NULL};
    fsdp_join_reduced_fp8(f, l, reduced, f->sum.add);
}

// Replaces this rank's FP8 sums of layer l by the sums over replicas, added in FP8. The scales are common to all ranks
// and leave room for the sum (gradient_fp8_headroom).
static inline void fsdp_reduce_replica_codes(Fsdp *f, int64_t l) {
    const cudaStream_t stream = f->transport.nccl->stream;
    const GradientFp8Layout *a = &f->fp8_layout;
    const GradientFp8 to = gradient_fp8_of_layer(f->fp8_sums, a, l);
    const GradientFp8Source stored = {NULL, to.codes, to.scale_inv};
    const CodeParts p = code_parts(a->matrices, f->replicas);
    uint8_t *own = to.codes + code_part_begin(&p, f->replica);
    gradient_fp8_amaxes(to, a, stored, false, stream);
    fsdp_reduce_gradient_amaxes(f, COMM_WORLD, to, l);
    gradient_fp8_cast(to, a, stored, false, gradient_fp8_headroom(f->replicas), stream);
    nccl_begin(f->in.nccl, "reduce-scatter of the gradients over replicas", l);
    nccl_scatter_codes(f->in.nccl, COMM_REPLICAS, &p, f->replica, to.codes, f->fp8_received);
    nccl_end(f->in.nccl);
    gradient_fp8_sum_ranks(own, own, f->fp8_received, p.part, f->replicas, f->replica, code_part_size(&p, f->replica),
                           stream);
    nccl_begin(f->in.nccl, "all-gather of the gradients over replicas", l);
    nccl_gather_codes(f->in.nccl, COMM_REPLICAS, &p, f->replica, to.codes);
    nccl_end(f->in.nccl);
}

// Replaces this rank's FP8 sums of layer l by the sums over replicas, after the last micro-step.
static inline void fsdp_reduce_replicas_fp8(Fsdp *f, int64_t l) {
    const GradientFp8Layout *a = &f->fp8_layout;
    if (f->transport.reduce_dtype == REDUCE_FP8) return fsdp_reduce_replica_codes(f, l);
    gradient_fp8_to_bf16(f->fp8_reduced, gradient_fp8_of_layer(f->fp8_sums, a, l), a, f->transport.nccl->stream);
    nccl_begin(f->in.nccl, "all-reduce of the gradients", l);
    nccl_all_reduce(f->in.nccl, COMM_REPLICAS, f->fp8_reduced, a->matrices, ncclBfloat16, ncclSum);
    nccl_end(f->in.nccl);
    const GradientFp8Source reduced = {f->fp8_reduced, NULL, NULL};
    fsdp_join_reduced_fp8(f, l, reduced, false);
}

#endif
