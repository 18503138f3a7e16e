// Runs AdamW under FSDP, and finds the amaxes of tensors that several ranks share.
#ifndef LLMC_FSDP_OPTIMIZER_CUH
#define LLMC_FSDP_OPTIMIZER_CUH

#include "../optimizer/fp16_masters.cuh"
#include "../kernels/initialize.cuh"
#include "../memory/offload.cuh"
#include "fsdp.cuh"

// Replaces the amaxes of the optimizer states of `tensors` by their maxima over the shard group. Messages name `l`.
static inline void fsdp_reduce_state_amaxes(Fsdp *f, const AdamwScaled *s, MsampTensors tensors, int64_t l) {
    if (!fsdp_is_sharded(f)) return;
    comm_waits_compute(&f->transport);
    nccl_begin(f->in.nccl, "all-reduce of the amaxes of optimizer states", l);
    nccl_all_reduce(f->in.nccl, COMM_SHARD, s->amaxes + tensors.first * MSAMP_STATES, tensors.count * MSAMP_STATES,
                    ncclUint32, ncclMax);
    nccl_end(f->in.nccl);
    compute_waits_comm(&f->transport);
}

// Returns this rank's sums of gradients.
static inline AdamwGradients fsdp_sums(const Fsdp *f) {
    const GradientFp8 *fp8 = &f->gradients.fp8_sums;
    return AdamwGradients{f->transport.sums, f->transport.sums_fp32, fp8->codes, fp8->scale_inv,
                          &f->gradients.fp8_layout};
}

// Runs AdamW on layers l to l + count - 1, and lets it write the codes of this rank's slices (tensorwise_bounded).
// Returns their bytes.
static inline int64_t fsdp_update_coded(Fsdp *f, const AdamwUpdate *w, int64_t l, int64_t count) {
    const int64_t slice = f->plan.shard.layer_slices[SEGMENT_MATRICES];
    const AdamwCodes codes = {f->weights.shard_fp8, f->in.scales->weight_scale, slice, TENSORS_PER_LAYER};
    adamw_update_coded(w, &codes, f->plan.table, &f->plan.shard, l, count, fsdp_sums_begin(f, l), f->transport.compute);
    f->weights.update_coded = true;
    return count * slice;
}

// Runs AdamW on this rank's part of unit l, a layer or ROOT, and of the count - 1 layers that follow it. Returns the
// bytes of FP8 codes that it writes.
static inline int64_t fsdp_update_units(Fsdp *f, Offload *offload, const AdamwUpdate *w, int64_t l, int64_t count) {
    const cudaStream_t stream = f->transport.compute;
    const int64_t gradients = fsdp_sums_begin(f, l);
    if (l != ROOT && f->in.scales->weight_scale && fsdp_keeps_codes(f)) return fsdp_update_coded(f, w, l, count);
    if (!w->arrays.scaled.scales) {
        offload_update_units(offload, w, f->plan.table, l, count, gradients, stream);
        return 0;
    }
    adamw_msamp_amaxes(w, f->plan.table, &f->plan.shard, l, count, gradients, stream);
    fsdp_reduce_state_amaxes(f, &w->arrays.scaled, msamp_tensors(f->plan.table, l, count), l);
    adamw_msamp_store(w, f->plan.table, &f->plan.shard, l, count, gradients, stream);
    return 0;
}

// Rounds the bf16 weights from fp32 or FP16 masters. FP16 masters that arrived as fp32 numbers (fp16_masters.cuh) are
// encoded as FP16 before that. Does nothing without such masters. Call it after the weights were initialized or loaded.
static inline void fsdp_masters_changed(Fsdp *f, const AdamwArrays *a) {
    const cudaStream_t stream = f->transport.compute;
    const MsampTensors all = {0, f->plan.table->count};
    if (a->master) round_weights(a->weights, a->master, f->plan.shard.total, stream);
    if (!a->scaled.master) return;
    fp16_masters_amaxes(a, f->plan.table, &f->plan.shard, stream);
    fsdp_reduce_state_amaxes(f, &a->scaled, all, ROOT);
    fp16_masters_encode(a, f->plan.table, &f->plan.shard, stream);
}

// Finds the amaxes of this rank's parts of all FP8 weights that are cast from FP16 masters.
static inline void fsdp_find_master_amaxes(Fsdp *f) {
    const Fp16Weights *m = &f->weights.masters;
    const AdamwScaled *s = f->in.masters;
    for (int64_t l = 0; l < f->plan.table->num_layers; l++)
        for (int k = 0; k < m->tensors.count; k++) {
            const int64_t i = m->tensors.entries[k] + l * m->tensors.layer_entries;
            const LinearId id = (LinearId)m->tensors.linears[k];
            const ShardRange r = shard_parameter(f->plan.table, &f->plan.shard, &f->plan.table->entries[i]);
            if (r.count)
                fp16_amax(tensor_scales_amax(f->in.scales, l, TENSOR_W, id), s->master + r.shard, r.count,
                          s->scales + MSAMP_MASTER * s->tensors + i, f->transport.compute);
        }
}

// Finds the amaxes of this rank's parts of the linear layers' weights, for recipes with one scale per tensor; clears
// them for other recipes. Call it after a load or initialization: later AdamW's update of the weights finds them.
static inline void fsdp_find_weight_amaxes(Fsdp *f) {
    const int64_t layers = f->plan.table->num_layers;
    tensor_scales_clear_amaxes(f->in.scales, 0, layers, TENSOR_W, TENSOR_W);
    for (int64_t i = 0; fsdp_tensor_scales(f) && i < layers * NUM_LINEARS; i++) {
        const int64_t l = i / NUM_LINEARS;
        const LinearId id = (LinearId)(i % NUM_LINEARS);
        const LinearShape *s = &f->plan.precision->linear[id];
        const ShardRange r = shard_matrix(f->plan.table, &f->plan.shard, l, s->offset, s->N * s->K);
        if (r.count && !f->plan.precision->casts_masters)
            tensor_amax(tensor_scales_amax(f->in.scales, l, TENSOR_W, id), f->in.weights + r.shard, r.count,
                        f->transport.compute);
    }
    if (f->plan.precision->casts_masters) fsdp_find_master_amaxes(f);
}

#endif
