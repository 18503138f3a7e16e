// The GPU trainer's arrays for checkpoints: copies them between the GPU, or pinned memory, and host memory.
#ifndef LLMC_GPU_STATE_CUH
#define LLMC_GPU_STATE_CUH

#include "../gpu/receipt.cuh"
#include "../reference/delayed.h"
#include "../optimizer/fp16_masters.cuh"
#include "../fp8/gemm.cuh"
#include "../fp8/tensor_scales.cuh"
#include "../memory/offload.cuh"
#include "../shard/fsdp_plan.cuh"
#include "tensors.h"

typedef struct {
    const Options *o;
    const AdamwArrays *params;
    const TensorScales *scales;
    const Offload *offload;
    const Fsdp *fsdp;
    void *const *scratch;  // device memory of GEMM_WORKSPACE_BYTES, for receipts
} GpuState;

// Copies between pageable host memory and the arrays of the trainer, after all work in the compute stream, and waits
// for the copy. A copy in the default stream would not wait for the compute stream.
static inline void gpu_state_copy(const GpuState *s, void *to, const void *from, size_t bytes) {
    const cudaStream_t stream = s->fsdp->transport.compute;
    offload_wait(s->offload, stream);
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

static inline char *gpu_state_array(const GpuState *s, StateKind kind) {
    const AdamwArrays *p = s->params;
    void *const arrays[] = {p->master ? (void *)p->master : (void *)p->weights, p->exp_avg, p->exp_avg_sq,
                            p->coat.exp_avg_groups, p->coat.exp_avg_sq_groups};
    if (state_is_scale(kind)) return (char *)(p->scaled.scales + (kind - STATE_EXP_AVG_SCALE) * p->scaled.tensors);
    if (kind == STATE_AMAX_HISTORY) return (char *)s->scales->history;
    if (kind == STATE_SCALES) return (char *)tensor_scales_known(s->scales);
    if (kind == STATE_CLIP_NORMS) return (char *)s->fsdp->clip.adamw.norms;
    if (kind == STATE_GRADIENTS)
        return p->gradients.fp32_data ? (char *)p->gradients.fp32_data : (char *)p->gradients.bf16_data;
    return (char *)arrays[kind];
}

// TrainerState.read. The context is a GpuState.
static inline void gpu_state_read(void *context, StateKind kind, int64_t offset, int64_t count, void *host) {
    const GpuState *s = (const GpuState *)context;
    const FsdpPlan *plan = &s->fsdp->plan;
    const int64_t bytes = safetensors_type_bytes(state_type(s->o, kind));
    if (kind == STATE_WEIGHTS && s->params->scaled.master)
        return fp16_masters_read(s->params, shard_parameter_at(plan->table, &plan->shard, offset), offset, count,
                                 (float *)host, s->fsdp->transport.compute);
    gpu_state_copy(s, host, gpu_state_array(s, kind) + offset * bytes, (size_t)(count * bytes));
}

// TrainerState.write. The context is a GpuState.
static inline void gpu_state_write(void *context, StateKind kind, int64_t offset, int64_t count, const void *host) {
    const GpuState *s = (const GpuState *)context;
    const FsdpPlan *plan = &s->fsdp->plan;
    const int64_t bytes = safetensors_type_bytes(state_type(s->o, kind));
    if (kind == STATE_WEIGHTS && s->params->scaled.master)
        return fp16_masters_write(s->params, shard_parameter_at(plan->table, &plan->shard, offset), offset, count,
                                  (const float *)host, s->fsdp->transport.compute);
    gpu_state_copy(s, gpu_state_array(s, kind) + offset * bytes, host, (size_t)(count * bytes));
}

// TrainerState.hash. The context is a GpuState. FP16 masters are hashed as they are stored.
static inline void gpu_state_hash(void *context, StateKind kind, const ReceiptPart *parts, int64_t n, uint64_t *sums) {
    const GpuState *s = (const GpuState *)context;
    const cudaStream_t stream = s->fsdp->transport.compute;
    const fp16_bits *masters = kind == STATE_WEIGHTS ? s->params->scaled.master : NULL;
    const int64_t bytes = masters ? (int64_t)sizeof *masters : safetensors_type_bytes(state_type(s->o, kind));
    if (receipt_scratch_bytes(n) > GEMM_WORKSPACE_BYTES) die("receipts: no room for %lld tensors", (long long)n);
    offload_wait(s->offload, stream);
    receipt_sums(sums, masters ? (const char *)masters : gpu_state_array(s, kind), bytes, parts, n, *s->scratch,
                 stream);
}

// Returns the access to these arrays. The plan must be complete (fsdp_describe). The arrays are needed only for `read`
// and `write`.
static inline TrainerState gpu_state_access(GpuState *s, const Comm *comm) {
    const FsdpPlan *plan = &s->fsdp->plan;
    const int64_t L = plan->table->num_layers;
    TrainerState access;
    access.context = s;
    for (int kind = 0; kind < NUM_STATE_KINDS; kind++) access.types[kind] = state_type(s->o, (StateKind)kind);
    access.read = gpu_state_read, access.write = gpu_state_write, access.hash = gpu_state_hash;
    access.plan = &plan->shard, access.comm = comm;
    const Recipe *r = plan->precision->recipe;
    access.delayed_tensors = r->delayed || r->bounded ? tensor_count(L) : 0;
    access.delayed_window = r->delayed ? s->o->fp8_amax_history : 0,
    access.clip_norms = s->fsdp->clip.grad_clip > 0 ? L + 1 : 0;
    return access;
}

// True if the delayed recipe has a scale for every tensor, for example from a checkpoint.
static inline bool gpu_state_has_delayed_scales(GpuState *s) {
    if (!s->scales->delayed_scale) return false;
    const int64_t tensors = tensor_count(s->fsdp->plan.table->num_layers);
    float *scales = (float *)xcalloc((size_t)tensors, sizeof *scales);
    gpu_state_read(s, STATE_SCALES, 0, tensors, scales);
    const bool known = delayed_is_complete(scales, tensors);
    free(scales);
    return known;
}

#endif
