// Order of llmc/dist/fsdp.cuh's streams on all ranks, without a GPU. The trainer's schedule is enqueued for one rank after the other, with copy engines and with NCCL.
// The linker puts this file's functions in the place of the CUDA and NCCL calls (--wrap, see the Makefile); they note what each of a rank's two streams is to
// do. Then all ranks' streams run (order_model.h): whatever touches the same memory must be ordered by events, barriers and collectives, what is read must
// be what the schedule wants there, and no stream may wait for ever. The last checks leave out one barrier, collective or event at a time, which must be noticed.
#include "../../llmc/dist/fsdp.cuh"

#include "lib/check.h"
#include "lib/order_model.h"

enum { COMPUTE, COMMUNICATION, MAX_EVENTS = 1 << 12 };
static const char *const stream_names[ORDER_STREAMS] = {"compute", "communication"};

typedef struct {
    Fsdp f;
    FsdpInputs in;
    Nccl nccl;
    double *squares;
    float *loss;
    bf16 *dx;                     // gradient of the inputs
    int64_t step, micro;          // weights are of `step`, gradients of its micro-step `micro`
    int64_t operation, barriers;  // that are being enqueued: number of the NCCL or copying operation, and of the barrier in it
    bool to_replicas;             // the sum over replicas is being enqueued
} Rank;

// Something that the schedule leaves out, to see that it is noticed.
typedef struct {
    const char *what;  // a barrier or collective by the name of the operation that it is part of, or an event
    int64_t number;    // of the barrier in the operation
    int64_t rank;      // -1: all
} Omission;

static Rank ranks[ORDER_MAX_RANKS];
static int groups[COMM_NUM_GROUPS][ORDER_MAX_RANKS];  // communicators: ranks in them
static int64_t events[MAX_EVENTS];                    // number of the last record, -1: none
static int64_t num_events, copied;
static int64_t first_pending = INT64_MAX;             // events from this one on have not happened
static Omission omission;
static bool acts;                                     // calls do at once, to the host's memory, what they are to do
static CUstreamBatchMemOpParams awaited[PEER_MAX_RANKS];  // where calls act: values that streams wait for
static int64_t num_awaited;

// Weights of a step: of a layer, or ROOT.
static int64_t weights_of(int64_t step, int64_t l) { return order_content(2 + step * 1000 + l, 0); }

// Gradients of a layer or ROOT, of the logits or inputs, or the statistics of a step, summed over a number of ranks.
enum { LOGITS = 996, INPUTS = 997, STATISTICS = 998 };
static int64_t gradients_of(int64_t step, int64_t micro, int64_t l, int64_t over) {
    return order_content((step * 100 + micro) * 1000 + 1 + l, over);
}

// ---------------------------------------------------------------------------------------------------------------------
// Noting

static cudaStream_t stream_handle(int64_t rank, int stream) { return (cudaStream_t)(intptr_t)(1 + rank * ORDER_STREAMS + stream); }
static int number_of(cudaStream_t s) { return (int)(intptr_t)s - 1; }
static Rank *rank_of(cudaStream_t s) { return &ranks[number_of(s) / ORDER_STREAMS]; }

static void note_read(cudaStream_t s, const void *from, int64_t bytes, int64_t content) { order_read(number_of(s), from, bytes, content); }
static OrderOperation *note_write(cudaStream_t s, const void *to, int64_t bytes, int64_t content) { return order_write(number_of(s), to, bytes, content); }

static bool is_omitted(cudaStream_t s, const char *what, int64_t number) {
    return omission.what && what && strcmp(omission.what, what) == 0 && omission.number == number && (omission.rank < 0 || rank_of(s) == &ranks[omission.rank]);
}

// The name of the NCCL or copying operation that is being enqueued.
static const char *operation_name(const Rank *r) { return r->nccl.operations[r->nccl.enqueued % NCCL_PENDING].what; }

static const char *event_name(const Rank *r, cudaEvent_t e) {
    const Fsdp *f = &r->f;
    if (e == f->transport.handover) return r->to_replicas ? "handover to the replicas" : "handover";
    for (int i = 0; i < 1 + FSDP_GRADIENT_BUFFERS; i++)
        if (e == f->reduced[i]) return "reduced";
    for (int64_t i = 0; i < f->num_slots; i++) {
        if (e == f->slot[i].arrived) return "arrived";
        if (e == f->slot[i].released) return "released";
    }
    return NULL;
}

static int64_t nccl_element(ncclDataType_t type) { return type == ncclUint8 ? 1 : type == ncclBfloat16 ? 2 : type == ncclFloat64 ? 8 : 4; }

// The communicator's ranks.
static const int *group_of(ncclComm_t communicator) {
    if (!communicator) die("a collective in a group of one rank");
    return (const int *)communicator;
}

static ncclResult_t note_collective(const char *name, bool sums, cudaStream_t s, ncclComm_t communicator, const void *from, int64_t bytes, void *to, int64_t to_bytes) {
    const int *group = group_of(communicator);
    if (is_omitted(s, operation_name(rank_of(s)), 0)) {  // this rank's part alone, in time with nobody
        note_read(s, from, bytes, ORDER_CARRIED);
        note_write(s, to, to_bytes, ORDER_CARRIED);
    } else {
        order_collective(number_of(s), name, group, from, bytes, to, to_bytes, sums ? *group : 0);
    }
    return ncclSuccess;
}

// Whether an address is one of the arrivals in any rank's memory: they lie at the same place in all.
static bool is_arrival(const Rank *r, const char *at) {
    const int64_t offset = (int64_t)((uintptr_t)at % ORDER_MEMORY_STRIDE) - (int64_t)((uintptr_t)r->f.transport.arrivals % ORDER_MEMORY_STRIDE);
    return offset >= 0 && offset % (int64_t)sizeof(uint32_t) == 0 && offset < r->f.transport.peers.ranks * (int64_t)sizeof(uint32_t);
}

// PeerMemory.enqueue
static CUresult note_memory_operations(CUstream s, unsigned count, CUstreamBatchMemOpParams *operations, unsigned) {
    Rank *r = rank_of(s);
    if (r->operation != r->nccl.enqueued) r->operation = r->nccl.enqueued, r->barriers = 0;
    if (is_omitted(s, operation_name(r), r->barriers++)) return CUDA_SUCCESS;
    for (unsigned i = 0; i < count; i++) {
        const CUstreamBatchMemOpParams *o = &operations[i];
        const bool write = o->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32;
        if (!write && (o->operation != CU_STREAM_MEM_OP_WAIT_VALUE_32 || o->waitValue.flags != CU_STREAM_WAIT_VALUE_GEQ))
            die("a memory operation that this test does not know");
        const char *at = (const char *)(write ? o->writeValue.address : o->waitValue.address);
        if (!is_arrival(r, at)) die("a value at %p, which is no arrival", (const void *)at);
        if (write) order_signal(number_of(s), at, o->writeValue.value);
        else order_await(number_of(s), at, o->waitValue.value);
    }
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

static void note_slices(cudaStream_t s, const Fp8Slices *slices) {
    for (int64_t l = 0; l < slices->count; l++) {
        note_read(s, slices->amax + l * slices->slot_stride, slices->num_tensors * (int64_t)sizeof(uint32_t), ORDER_ANY);
        note_read(s, slices->x + l * slices->x_stride, slices->n * (int64_t)sizeof(bf16), ORDER_CARRIED);
        note_write(s, slices->codes + l * slices->n, slices->n, ORDER_CARRIED);
    }
}

// The amaxes of rows, columns or the tensor, as the granularities of its copies need them.
static void note_amax_pass(cudaStream_t s, const TensorSource *source, const FineAmaxes *to, int64_t R, int64_t C) {
    note_read(s, source->x, R * C * (int64_t)sizeof(bf16), ORDER_CARRIED);
    if (to->rows) note_write(s, to->rows, R * (int64_t)sizeof(uint32_t), ORDER_CARRIED);
    if (to->columns) note_write(s, to->columns, C * (int64_t)sizeof(uint32_t), ORDER_CARRIED);
    if (to->tensor) note_write(s, to->tensor, sizeof(uint32_t), ORDER_CARRIED);
}

// A cast by scales of blocks has no amaxes; those of tensor scales come from elsewhere. All others are of the same weights as what is cast.
static void note_cast(cudaStream_t s, const TensorSource *source, const Fp8Tensor *out, int64_t R, int64_t C) {
    const int64_t of_rows = copy_amaxes(out->row_granularity, R), of_columns = copy_amaxes(out->col_granularity, C);
    if (out->row_granularity == PER_TENSOR) note_read(s, out->amax, sizeof(uint32_t), ORDER_ANY);
    else if (out->row && of_rows) note_read(s, out->amax, of_rows * (int64_t)sizeof(uint32_t), ORDER_CARRIED);
    if (out->col_granularity != PER_TENSOR && out->col && of_columns) note_read(s, out->amax + of_rows, of_columns * (int64_t)sizeof(uint32_t), ORDER_CARRIED);
    note_read(s, source->x, R * C * (int64_t)sizeof(bf16), ORDER_CARRIED);
    if (out->row) note_write(s, out->row, R * C, ORDER_CARRIED);
    if (out->col) note_write(s, out->col, R * C, ORDER_CARRIED);
}

// from [n] joins to [n]. The content is then that of the latest micro-step. to_element, element: bytes of an element of
// each.
static OrderOperation *note_add(cudaStream_t s, const void *to, int64_t to_element, const void *from, int64_t n,
                                int64_t element, const GradientSum *how) {
    note_read(s, from, n * element, ORDER_CARRIED);
    if (how->add) note_read(s, to, n * to_element, ORDER_ANY);
    return note_write(s, to, n * to_element, ORDER_CARRIED);
}

static void note_to_fp32(cudaStream_t s, const float *to, const bf16 *from, int64_t rows, int64_t n, int64_t stride) {
    for (int64_t row = 0; row < rows; row++) note_read(s, from + row * stride, n * (int64_t)sizeof(bf16), ORDER_CARRIED);
    note_write(s, to, rows * n * (int64_t)sizeof(float), ORDER_CARRIED);
}

static void note_transpose(cudaStream_t s, const uint8_t *col, const uint8_t *row, int64_t bytes) {
    note_read(s, row, bytes, ORDER_CARRIED);
    note_write(s, col, bytes, ORDER_CARRIED);
}

// The sum over ranks of what is the rank's own and what it has received.
static void note_rank_sum(cudaStream_t s, const void *to, int64_t to_element, const bf16 *own, const bf16 *others,
                          int64_t summed, int64_t n, const GradientSum *how) {
    note_read(s, others, (summed - 1) * n * (int64_t)sizeof(bf16), ORDER_CARRIED);
    note_add(s, to, to_element, own, n, sizeof(bf16), how)->summed = summed;
}

static bool is_cast(const void *function) {
    return function == (const void *)quantize_transpose_kernel<TensorSource, FP8_E4M3, false> || function == (const void *)quantize_transpose_kernel<TensorSource, FP8_E4M3, true>;
}

static bool is_fine_cast(const void *function) {
    return function == (const void *)quantize_fine_kernel<TensorSource, PER_ROW, FP8_E4M3> || function == (const void *)quantize_fine_kernel<TensorSource, BLOCK_1X32, FP8_E4M3> ||
           function == (const void *)quantize_fine_kernel<TensorSource, BLOCK_1X128, FP8_E4M3> || function == (const void *)quantize_fine_kernel<TensorSource, BLOCK_128X128, FP8_E4M3>;
}

static bool is_amax_pass(const void *function) {
    return function == (const void *)quantize_amax_kernel<TensorSource, true> || function == (const void *)quantize_amax_kernel<TensorSource, false>;
}

// i: of a kernel's arguments.
#define INTEGER(i) (*(int64_t *)arguments[i])
#define POINTER(type, i) (*(type **)arguments[i])

// The kernels by which gradients join sums.
static bool note_sum_kernel(cudaStream_t s, const void *function, void **arguments) {
    for (int fp32 = 0; fp32 < 2; fp32++) {
        const int64_t element = fp32 ? (int64_t)sizeof(float) : (int64_t)sizeof(bf16);
        const void *add_bf16 =
            fp32 ? (const void *)transport_add_kernel<float, bf16> : (const void *)transport_add_kernel<bf16, bf16>;
        const void *add_fp32 =
            fp32 ? (const void *)transport_add_kernel<float, float> : (const void *)transport_add_kernel<bf16, float>;
        const void *rank_sum =
            fp32 ? (const void *)transport_sum_kernel<float> : (const void *)transport_sum_kernel<bf16>;
        void *to = POINTER(void, 0);
        if (function == add_bf16)
            note_add(s, to, element, POINTER(bf16, 1), INTEGER(2), sizeof(bf16), (GradientSum *)arguments[3]);
        else if (function == add_fp32)
            note_add(s, to, element, POINTER(float, 1), INTEGER(2), sizeof(float), (GradientSum *)arguments[3]);
        else if (function == rank_sum)
            note_rank_sum(s, to, element, POINTER(bf16, 1), POINTER(bf16, 2), INTEGER(3), INTEGER(5),
                          (GradientSum *)arguments[6]);
        else continue;
        return true;
    }
    return false;
}

static void note_kernel(cudaStream_t s, const void *function, void **arguments) {
    if (is_cast(function)) note_cast(s, (TensorSource *)arguments[0], (Fp8Tensor *)arguments[1], INTEGER(2), INTEGER(3));
    else if (is_fine_cast(function)) note_cast(s, (TensorSource *)arguments[0], (Fp8Tensor *)arguments[1], INTEGER(3), INTEGER(4));
    else if (is_amax_pass(function)) note_amax_pass(s, (TensorSource *)arguments[0], (FineAmaxes *)arguments[1], INTEGER(2), INTEGER(3));
    else if (function == (const void *)quantize_slices_kernel<FP8_E4M3>) note_slices(s, (Fp8Slices *)arguments[0]);
    else if (function == (const void *)fp8_transpose_kernel) note_transpose(s, POINTER(uint8_t, 0), POINTER(uint8_t, 1), INTEGER(2) * INTEGER(3));
    else if (function == (const void *)transport_to_fp32_kernel) note_to_fp32(s, POINTER(float, 0), POINTER(bf16, 1), INTEGER(2), INTEGER(3), INTEGER(4));
    else if (!note_sum_kernel(s, function, arguments)) die("a kernel that this test does not know");
}

// ---------------------------------------------------------------------------------------------------------------------
// In the place of CUDA and NCCL

extern "C" {
cudaError_t __wrap_cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    if (num_events == MAX_EVENTS) die("more than %d events", MAX_EVENTS);
    events[num_events] = -1;
    *e = (cudaEvent_t)(intptr_t)(++num_events);
    return cudaSuccess;
}
cudaError_t __wrap_cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t __wrap_cudaEventQuery(cudaEvent_t e) { return (intptr_t)e >= first_pending ? cudaErrorNotReady : cudaSuccess; }
cudaError_t __wrap_cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    events[(intptr_t)e - 1] = order_record(number_of(s));
    return cudaSuccess;
}
cudaError_t __wrap_cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    const int64_t record = events[(intptr_t)e - 1];  // what was recorded last when this is called; nothing: no wait
    if (record >= 0 && !is_omitted(s, event_name(rank_of(s), e), 0)) order_wait(number_of(s), record);
    return cudaSuccess;
}
cudaError_t __wrap_cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s) {
    if (acts) return memset(to, value, bytes), cudaSuccess;
    note_write(s, to, (int64_t)bytes, ORDER_UNWRITTEN);
    return cudaSuccess;
}
cudaError_t __wrap_cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t s) {
    if (acts) return memcpy(to, from, bytes), cudaSuccess;
    note_read(s, from, (int64_t)bytes, ORDER_CARRIED);
    note_write(s, to, (int64_t)bytes, ORDER_CARRIED);
    copied++;
    return cudaSuccess;
}
static bool writes_pending;  // to a peer's memory
static int64_t closed, closed_early;  // mappings of a peer's memory; those that a write may still reach
cudaError_t __wrap_cudaStreamSynchronize(cudaStream_t) {
    writes_pending = false;
    return cudaSuccess;
}
cudaError_t __wrap_cudaIpcGetMemHandle(cudaIpcMemHandle_t *, void *) { return cudaSuccess; }
cudaError_t __wrap_cudaIpcOpenMemHandle(void **memory, cudaIpcMemHandle_t, unsigned) {
    static char peer[1 << 16];
    *memory = peer;
    return cudaSuccess;
}
cudaError_t __wrap_cudaIpcCloseMemHandle(void *) {
    closed++, closed_early += writes_pending;
    return cudaSuccess;
}
static CUresult pend_memory_operations(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned) {
    writes_pending = true;
    return CUDA_SUCCESS;
}
cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult *found) {
    *function = (void *)pend_memory_operations, *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
// Two ranks: the other one has offered what this one has, and cannot open this one's memory.
int __wrap_MPI_Allgather(const void *, int, MPI_Datatype, void *all, int, MPI_Datatype, MPI_Comm) {
    ((PeerOffer *)all)[1] = ((PeerOffer *)all)[0];
    return MPI_SUCCESS;
}
int __wrap_MPI_Allreduce(const void *, void *value, int, MPI_Datatype, MPI_Op, MPI_Comm) {
    *(double *)value = 0;
    return MPI_SUCCESS;
}
int __wrap_MPI_Type_contiguous(int, MPI_Datatype, MPI_Datatype *) { return MPI_SUCCESS; }
int __wrap_MPI_Type_commit(MPI_Datatype *) { return MPI_SUCCESS; }
int __wrap_MPI_Type_free(MPI_Datatype *) { return MPI_SUCCESS; }
cudaError_t __wrap_cudaStreamQuery(cudaStream_t) {
    for (int64_t i = 0; i < num_awaited; i++) {
        const uint32_t there = *(const uint32_t *)(uintptr_t)awaited[i].waitValue.address;
        if ((int32_t)(there - awaited[i].waitValue.value) < 0) return cudaErrorNotReady;
    }
    return cudaSuccess;
}
cudaError_t __wrap_cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) {
    *s = NULL;
    return cudaSuccess;
}
cudaError_t __wrap_cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t __wrap_cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t __wrap_cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
    *value = 1;
    return cudaSuccess;
}
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    note_kernel(config->stream, function, arguments);
    return cudaSuccess;
}
ncclResult_t __wrap_ncclGroupStart(void) { return ncclSuccess; }
ncclResult_t __wrap_ncclGroupEnd(void) { return ncclSuccess; }
ncclResult_t __wrap_ncclCommGetAsyncError(ncclComm_t, ncclResult_t *state) {
    *state = ncclSuccess;
    return ncclSuccess;
}
ncclResult_t __wrap_ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t c, cudaStream_t s) {
    const int64_t bytes = (int64_t)count * nccl_element(type);
    return note_collective("all-gather", false, s, c, from, bytes, to, *group_of(c) * bytes);
}
ncclResult_t __wrap_ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    const int64_t bytes = (int64_t)count * nccl_element(type);
    return note_collective("reduce-scatter", op == ncclSum, s, c, from, *group_of(c) * bytes, to, bytes);
}
ncclResult_t __wrap_ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    const int64_t bytes = (int64_t)count * nccl_element(type);
    return note_collective("all-reduce", op == ncclSum, s, c, from, bytes, to, bytes);
}
}

// ---------------------------------------------------------------------------------------------------------------------
// The trainer's schedule

static int64_t segment_bytes(const Fsdp *f, int64_t l, int segment) {
    return f->plan.shard_size * slice_sizes(&f->plan, l)[segment] * (int64_t)sizeof(bf16);
}

static void read_linear(Rank *r, int64_t l, int j, bool backward) {
    const Fsdp *f = &r->f;
    const LinearShape *linear = &f->precision->linear[j];
    const int64_t n = linear->N * linear->K, want = weights_of(r->step, l);
    if (!f->precision->any_fp8 || precision_of(f->precision, l, j) != f->precision->recipe) {
        note_read(f->in.stream, fsdp_weights(f, l).matrices + linear->offset, n * (int64_t)sizeof(bf16), want);
        return;
    }
    const Fp8Tensor q = fsdp_weight_fp8(f, l, j);
    if (!backward || f->recompute_layer) note_read(f->in.stream, q.row, n, want);
    if (backward) note_read(f->in.stream, q.col, n, want);
}

static void read_weights(Rank *r, int64_t l, bool backward) {
    const FsdpUnit w = fsdp_weights(&r->f, l);
    note_read(r->f.in.stream, w.vectors, segment_bytes(&r->f, l, SEGMENT_VECTORS), weights_of(r->step, l));
    for (int j = 0; l != ROOT && j < NUM_LINEARS; j++) read_linear(r, l, j, backward);
    if (l == ROOT) note_read(r->f.in.stream, w.matrices, segment_bytes(&r->f, ROOT, SEGMENT_MATRICES), weights_of(r->step, ROOT));
}

// What lies behind the parameters of a segment has been cleared (the model's parameters leave nothing out between them).
static void read_gap(Rank *r, const bf16 *segment, int64_t elements, int64_t bytes) {
    const int64_t begin = elements * (int64_t)sizeof(bf16);
    if (begin < bytes) note_read(r->f.in.stream, segment + elements, bytes - begin, ORDER_UNWRITTEN);
}

static void write_gradients(Rank *r, int64_t l) {
    const FsdpUnit g = fsdp_gradients(&r->f, l);
    const int64_t *elements = l == ROOT ? r->f.root_elements : r->f.layer_elements;
    read_gap(r, g.vectors, elements[SEGMENT_VECTORS], segment_bytes(&r->f, l, SEGMENT_VECTORS));
    read_gap(r, g.matrices, elements[SEGMENT_MATRICES], segment_bytes(&r->f, l, SEGMENT_MATRICES));
    const int64_t content = gradients_of(r->step, r->micro, l, 1);
    note_write(r->f.in.stream, g.vectors, segment_bytes(&r->f, l, SEGMENT_VECTORS), content);
    note_write(r->f.in.stream, g.matrices, segment_bytes(&r->f, l, SEGMENT_MATRICES), content);
    note_write(r->f.in.stream, r->dx, r->f.input_elements * (int64_t)sizeof(bf16), gradients_of(r->step, r->micro, INPUTS, 1));
}

// This rank's sums of gradients from element `at` on, and the bytes of one.
static const void *sums_at(const Fsdp *f, int64_t at) {
    return f->transport.fp32_sums ? (const void *)(f->transport.sums_fp32 + at)
                                  : (const void *)(f->transport.sums + at);
}
static int64_t sum_bytes(const Fsdp *f) { return f->transport.fp32_sums ? (int64_t)sizeof(float) : (int64_t)sizeof(bf16); }

static void write_logits(Rank *r) {
    const int64_t room = fsdp_loss_room(&r->f);
    const void *to =
        fsdp_is_sharded(&r->f) ? (const void *)fsdp_loss_memory(&r->f)
                     : sums_at(&r->f, segment_slice(r->f.table, &r->f.plan, ROOT, embedding_segment(r->f.table)).shard);
    if (room) note_write(r->f.in.stream, to, room * (int64_t)sizeof(bf16), gradients_of(r->step, r->micro, LOGITS, 1));
}

// The embedding's gradient, from all ranks' inputs to the rank's part of it, or from its own.
static void write_embedding_gradient(Rank *r) {
    Fsdp *f = &r->f;
    const int segment = embedding_segment(f->table);
    const int64_t ranks = fsdp_input_ranks(f), content = gradients_of(r->step, r->micro, ROOT, ranks);
    note_read(f->in.stream, fsdp_gather_input_gradients(f, r->dx), ranks * f->input_elements * (int64_t)sizeof(bf16), gradients_of(r->step, r->micro, INPUTS, 1));
    const bool joins = fsdp_embedding_joins(f);
    const void *to =
        joins ? sums_at(f, segment_slice(f->table, &f->plan, ROOT, segment).shard) : fsdp_gradients(f, ROOT).embedding;
    const int64_t bytes = joins ? f->plan.root_slices[segment] * sum_bytes(f) : segment_bytes(f, ROOT, segment);
    note_read(f->in.stream, to, bytes, segment == SEGMENT_MATRICES ? content : ORDER_ANY);
    note_write(f->in.stream, to, bytes, content);
}

static void forward(Rank *r) {
    Fsdp *f = &r->f;
    fsdp_prefetch(f, 0);
    note_read(f->in.stream, fsdp_weights(f, ROOT).embedding, segment_bytes(f, ROOT, embedding_segment(f->table)), weights_of(r->step, ROOT));
    for (int64_t l = 0; l < f->table->num_layers; l++) {
        fsdp_prefetch(f, l + 1);
        fsdp_unshard(f, l, false);
        read_weights(r, l, false);
        fsdp_reshard(f, l);
    }
}

static void loss(Rank *r) {
    read_weights(r, ROOT, false);
    write_logits(r);
    note_write(r->f.in.stream, r->loss, sizeof *r->loss, gradients_of(r->step, r->micro, STATISTICS, 1));
}

static void reduce_replicas(Rank *r, int64_t l, bool last) {
    r->to_replicas = true;
    fsdp_reduce_replicas(&r->f, l, last);
    r->to_replicas = false;
}

static void micro_step(Rank *r, bool last) {
    Fsdp *f = &r->f;
    fsdp_begin_micro_step(f, r->micro);
    forward(r);
    fsdp_begin_gradients(f, ROOT);
    loss(r);
    write_gradients(r, ROOT);
    if (fsdp_embedding_joins(f)) fsdp_reduce_scatter(f, ROOT);
    for (int64_t l = f->table->num_layers - 1; l >= 0; l--) {
        fsdp_prefetch(f, l - 1);
        fsdp_unshard(f, l, true);
        fsdp_begin_gradients(f, l);
        read_weights(r, l, true);
        write_gradients(r, l);
        fsdp_reshard(f, l);
        fsdp_reduce_scatter(f, l);
        reduce_replicas(r, l, last);
    }
    write_embedding_gradient(r);
    if (!fsdp_embedding_joins(f)) fsdp_reduce_scatter(f, ROOT);
    reduce_replicas(r, ROOT, last);
}

static void read_reduced_gradients(Rank *r, int64_t step) {
    const Fsdp *f = &r->f;
    for (int64_t l = ROOT; l < f->table->num_layers; l++)
        note_read(f->in.stream, sums_at(f, shard_begin(&f->plan, l)),
                  shard_elements(&f->plan, l) * sum_bytes(f), gradients_of(step, r->micro, l, f->world));
}

static void write_weights(Rank *r, int64_t l) {
    const Fsdp *f = &r->f;
    note_write(f->in.stream, f->in.weights + shard_begin(&f->plan, l), shard_elements(&f->plan, l) * (int64_t)sizeof(bf16), weights_of(r->step, l));
}

static void update_weights(Rank *r) {
    Fsdp *f = &r->f;
    r->step++;
    write_weights(r, ROOT);
    fsdp_publish_root(f);
    note_write(f->in.stream, f->in.amax, f->table->num_layers * f->in.amax_stride * (int64_t)sizeof(uint32_t), ORDER_UNWRITTEN);
    for (int64_t l = 0; l < f->table->num_layers; l++) write_weights(r, l);
}

static void weights_updated(Rank *r) {
    Fsdp *f = &r->f;
    fsdp_publish_layers(f, NULL);
}

// Of the gradients of step `step`, which the weights may be ahead of.
static void reduce_norm(Rank *r, int64_t step) {
    Fsdp *f = &r->f;
    note_write(f->in.stream, r->squares, sizeof *r->squares, gradients_of(step, r->micro, STATISTICS, 1));
    fsdp_reduce_step_stats(f, r->loss, r->squares);
    note_read(f->in.stream, r->squares, sizeof *r->squares, gradients_of(step, r->micro, STATISTICS, fsdp_is_sharded(f) ? f->world : 1));
    note_read(f->in.stream, r->loss, sizeof *r->loss, gradients_of(step, r->micro, STATISTICS, f->world));
    read_reduced_gradients(r, step);
}

static void optimizer(Rank *r, bool norm_first) {
    Fsdp *f = &r->f;
    compute_waits_comm(&f->transport);
    read_reduced_gradients(r, r->step);
    if (norm_first) reduce_norm(r, r->step);
    update_weights(r);
    if (!norm_first) reduce_norm(r, r->step - 1);
    weights_updated(r);
}

static void validation(Rank *r) {
    for (int batch = 0; batch < 2; batch++) forward(r), loss(r);
    fsdp_reduce_step_stats(&r->f, r->loss, NULL);
    note_read(r->f.in.stream, r->loss, sizeof *r->loss, gradients_of(r->step, r->micro, STATISTICS, r->f.world));
}

// ---------------------------------------------------------------------------------------------------------------------
// Cases

typedef struct {
    int precision, recipe, sharding, gather, reduce, recompute, cache, copies;
    const char *filter;
    int64_t world, layers, accumulation;
    bool untied, many_tokens, norm_first;
} Case;

// The buffer of a rank that an address is in.
static const char *buffer_name(int64_t rank, const char *address) {
    const Rank *r = &ranks[rank];
    const Fsdp *f = &r->f;
    const struct { const char *name; const void *begin; } all[] = {
        {"weights", f->in.weights}, {"grads", f->transport.sums}, {"amax", f->in.amax}, {"squares", r->squares}, {"loss", r->loss}, {"dx", r->dx}, {"shard_fp8", f->shard_fp8}, {"rows", f->rows}, {"cols", f->cols},
        {"root", f->root}, {"vectors", f->vectors}, {"slots", f->slots}, {"root_grads", f->root_grads}, {"layer_grads[0]", f->layer_grads[0]}, {"layer_grads[1]", f->layer_grads[1]},
        {"staging", f->transport.staging}, {"received", f->transport.received},
        {"arrivals", f->transport.arrivals}, {"grads_fp32", f->transport.sums_fp32}};
    int found = 0;
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++)
        if (all[i].begin && all[i].begin <= address && all[i].begin >= all[found].begin) found = i;
    return all[found].name;
}

// The groups' communicators, shared where nccl_open shares them.
static void connect(Rank *r, int64_t rank) {
    const Fsdp *f = &r->f;
    const int64_t sizes[] = {f->world, f->plan.shard_size, f->replicas}, numbers[] = {0, rank / f->plan.shard_size, f->plan.shard_rank};
    memset(&r->nccl, 0, sizeof r->nccl);
    for (int g = 0; g < COMM_NUM_GROUPS; g++) {
        int *group = sizes[g] == f->world ? &groups[COMM_WORLD][0] : &groups[g][numbers[g]];
        *group = (int)sizes[g];
        r->nccl.comms[g] = sizes[g] > 1 ? (ncclComm_t)group : NULL;
    }
    r->nccl.stream = stream_handle(rank, COMMUNICATION);
    for (int i = 0; i < NCCL_PENDING; i++) {
        event_create(&r->nccl.operations[i].begun);
        event_create(&r->nccl.operations[i].done);
    }
}

// What peer_memory_open finds.
static void open_peers(Rank *r, int64_t rank) {
    PeerMemory *p = &r->f.transport.peers;
    p->ranks = r->f.plan.shard_size, p->rank = r->f.plan.shard_rank;
    for (int64_t i = 0; i < p->ranks; i++) p->base[i] = order_base(rank - p->rank + i);
    p->arrivals = r->f.transport.arrivals;
    p->enqueue = note_memory_operations;
}

static void place_memory(Rank *r, int64_t rank) {
    Fsdp *f = &r->f;
    Arena arena;
    memset(&arena, 0, sizeof arena);
    arena.base = order_base(rank);
    arena_group(&arena, "shard");
    r->in.weights = (bf16 *)arena_take(&arena, f->plan.total * (int64_t)sizeof(bf16));
    fsdp_place_gradients(f, &arena);
    if (f->gradients == FSDP_GRADIENTS_BUFFERED) {
        fsdp_place_root_buffer(f, &arena);
        fsdp_place_layer_buffer(f, &arena);
    }
    r->in.amax_stride = fsdp_tensor_scales(f) ? NUM_TENSORS * NUM_LINEARS : 1 << 16;
    const int64_t amaxes = f->table->num_layers * r->in.amax_stride;
    r->in.amax = (uint32_t *)arena_take(&arena, amaxes * (int64_t)sizeof(uint32_t));
    r->in.scale_inv = (float *)arena_take(&arena, 4096);
    r->squares = (double *)arena_take(&arena, sizeof *r->squares);
    r->loss = (float *)arena_take(&arena, sizeof *r->loss);
    r->dx = (bf16 *)arena_take(&arena, f->input_elements * (int64_t)sizeof(bf16));
    fsdp_place(f, &arena);
    if (fsdp_casts_are_transient(f)) fsdp_place_casts(f, &arena);
    order_memory(rank, arena.used);
}

static void create_rank(const Case *c, const ParameterTable *table, const Precision *precision, const Options *o, int64_t rank) {
    Rank *r = &ranks[rank];
    r->step = r->micro = 0, r->operation = -1;
    fsdp_describe(&r->f, table, precision, o, c->world, rank);
    place_memory(r, rank);
    connect(r, rank);
    if (r->f.transport.kind == TRANSPORT_COPY_ENGINES) open_peers(r, rank);
    r->in.nccl = &r->nccl, r->in.stream = stream_handle(rank, COMPUTE);
    fsdp_create(&r->f, &r->in);
}

static void enqueue_steps(Rank *r, int64_t accumulation, bool norm_first) {
    update_weights(r);
    weights_updated(r);
    for (int step = 0; step < 3; step++) {
        fsdp_begin_step(&r->f, r->step, NULL);
        for (r->micro = 0; r->micro < accumulation; r->micro++) micro_step(r, r->micro + 1 == accumulation);
        r->micro--;
        optimizer(r, norm_first);
        if (step == 0) forward(r), loss(r);  // a sample
        if (step == 1) validation(r);
    }
}

// Enqueues and runs it. `seed`: of the order.
static void run_case(const Case *c, uint64_t seed) {
    ModelConfig m;
    model_config_preset(&m, "small");
    m.vocab_size = 8192, m.num_layers = c->layers, m.tie_word_embeddings = !c->untied;  // the root's slices are larger than a layer's
    ParameterTable table = parameter_table(&m);
    Options o = options_default();
    o.precision = c->precision, o.fp8_recipe = c->recipe, o.sharding = c->sharding, o.fp8_all_gather = c->gather, o.reduce_dtype = c->reduce, o.shard_size = c->sharding == SHARDING_HYBRID ? 2 : 0;
    o.recompute = c->recompute, o.fp8_weight_cache = c->cache, o.copy_engines = c->copies, o.grad_accumulation_steps = c->accumulation;
    options_resolve(&o);
    if (c->many_tokens) o.sequence_length = m.vocab_size;  // of all ranks together more than the embedding has rows
    Precision precision = precision_plan(&o, c->filter, &m, &table, true);
    num_events = copied = 0;
    order_begin(c->world, stream_names, buffer_name);
    for (int64_t rank = 0; rank < c->world; rank++) {
        create_rank(c, &table, &precision, &o, rank);
        enqueue_steps(&ranks[rank], c->accumulation, c->norm_first);
    }
    order_run(seed);
    for (int64_t rank = 0; rank < c->world; rank++) fsdp_destroy(&ranks[rank].f);
    precision_free(&precision);
    parameter_table_free(&table);
}

static void check_case(const Case *c) {
    run_case(c, 1);
    CHECK(order.races == 0 && order.wrong == 0 && order.stuck == 0,
          "precision %d, recipe %d, filter \"%s\", sharding %d, gather %d, reduce %d, recompute %d, cache %d, copies %d, %lld ranks, %lld layers, accumulation %lld, untied %d, many tokens %d, norm first %d: "
          "%lld races, %lld wrong contents, %lld streams stuck; %s",
          c->precision, c->recipe, c->filter, c->sharding, c->gather, c->reduce, c->recompute, c->cache, c->copies, (long long)c->world, (long long)c->layers,
          (long long)c->accumulation, c->untied, c->many_tokens, c->norm_first, (long long)order.races, (long long)order.wrong, (long long)order.stuck, order.problem);
    if (c->sharding != SHARDING_FULL && c->sharding != SHARDING_HYBRID) return;
    CHECK((copied > 0) == (c->copies == ON), "copies %d, and %lld copies", c->copies, (long long)copied);
}

// Every way to split, of one precision. `gather_most`: of --fp8-all-gather, off or on.
static void check_all(int64_t world, int precision, int recipe, const char *filter, int gather_most, int recompute, int cache) {
    const int64_t layers[] = {1, 2, 3, 6};
    for (int sharding = SHARDING_FULL; sharding <= (world == 4 ? SHARDING_HYBRID : SHARDING_NONE); sharding++)
        for (int copies = OFF; copies <= (sharding == SHARDING_NONE ? OFF : ON); copies++)
            for (int gather = OFF; gather <= gather_most; gather++)
                for (int reduce = REDUCE_BF16; reduce <= REDUCE_FP32; reduce++)
                    for (int i = 0; i < 4; i++)
                        for (int64_t accumulation = 1; accumulation < 4; accumulation++)
                            for (int ends = 0; ends < 8; ends++) {
                                const Case c = {precision, recipe, sharding, gather, reduce, recompute, cache, copies, filter, world, layers[i], accumulation, ends % 2 > 0, ends / 2 % 2 > 0,
                                                ends / 4 > 0};
                                check_case(&c);
                            }
}

// What is left out is noticed, in any order of running.
static void check_omissions(void) {
    const struct { Omission omission; int sharding, copies; } all[] = {
        {{"reduce-scatter of the gradients", 0, -1}, SHARDING_FULL, ON},  // its two barriers
        {{"reduce-scatter of the gradients", 1, -1}, SHARDING_FULL, ON},
        {{"reduce-scatter of the gradients", 1, 0}, SHARDING_FULL, ON},
        {{"all-gather of the inputs' gradients", 0, -1}, SHARDING_FULL, ON},
        {{"all-gather of the inputs' gradients", 0, 2}, SHARDING_FULL, OFF},
        {{"all-gather of the weights", 0, -1}, SHARDING_FULL, ON},  // the barrier before the root's
        {{"all-gather of the weights", 0, 1}, SHARDING_FULL, ON},
        {{"all-gather of norms and biases", 0, -1}, SHARDING_FULL, ON},  // which orders the layers' too
        {{"reduce-scatter of the gradients", 0, -1}, SHARDING_HYBRID, ON},  // 4 ranks as 2 groups of 2
        {{"reduce-scatter of the gradients", 1, 3}, SHARDING_HYBRID, ON},
        {{"reduce-scatter of the gradients", 0, 1}, SHARDING_HYBRID, OFF},
        {{"all-reduce of the gradients", 0, -1}, SHARDING_HYBRID, ON},
        {{"all-reduce of the gradients", 0, 2}, SHARDING_HYBRID, ON},
        {{"all-reduce of the gradients", 0, -1}, SHARDING_HYBRID, OFF},
        {{"all-reduce of the gradients", 0, -1}, SHARDING_NONE, OFF},
        {{"all-reduce of loss and gradient norm", 0, -1}, SHARDING_FULL, ON},
        {{"all-reduce of loss and gradient norm", 0, 2}, SHARDING_FULL, OFF},
        {{"arrived", 0, -1}, SHARDING_FULL, OFF}, {{"arrived", 0, 3}, SHARDING_FULL, ON},
        {{"released", 0, -1}, SHARDING_FULL, OFF}, {{"released", 0, 3}, SHARDING_FULL, ON},
        {{"reduced", 0, -1}, SHARDING_GRAD_OP, OFF}, {{"reduced", 0, 3}, SHARDING_GRAD_OP, ON},  // with --sharding full, arrivals in backward say as much
        {{"handover", 0, -1}, SHARDING_FULL, OFF}, {{"handover", 0, 3}, SHARDING_HYBRID, ON},
        {{"handover", 0, 0}, SHARDING_HYBRID, OFF}, {{"handover to the replicas", 0, -1}, SHARDING_HYBRID, ON},
        {{"handover to the replicas", 0, 1}, SHARDING_HYBRID, OFF},
        {{"handover to the replicas", 0, -1}, SHARDING_NONE, OFF}};
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++)
        for (uint64_t seed = 1; seed < 4; seed++) {
            const Case c = {PRECISION_FP8, RECIPE_TENSORWISE, all[i].sharding, ON, REDUCE_BF16, RECOMPUTE_NONE, ON, all[i].copies, "", 4, 3, 2, true, false, seed % 2 > 0};
            omission = all[i].omission;
            run_case(&c, seed);
            CHECK(order.races + order.wrong + order.stuck > 0, "sharding %d, copies %d: it is not noticed that \"%s\" %lld is left out", c.sharding, c.copies, omission.what,
                  (long long)omission.number);
        }
    memset(&omission, 0, sizeof omission);
}

// Inputs' gradients are gathered where they are fewer than the embedding's rows, and there alone.
static void check_embedding_ranks(void) {
    static const struct { const char *model; int64_t world, T, ranks; } cases[] = {{"llama3.1-8b", 1, 65536, 1}, {"llama3.1-8b", 4, 8192, 4}, {"llama3.1-8b", 4, 32768, 1}, {"llama3.1-405b", 512, 8192, 1}};
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        ModelConfig m;
        model_config_preset(&m, cases[i].model);
        ParameterTable table = parameter_table(&m);
        Options o = options_default();
        o.sequence_length = cases[i].T;
        Precision precision = precision_plan(&o, "", &m, &table, true);
        Fsdp f;
        fsdp_describe(&f, &table, &precision, &o, cases[i].world, cases[i].world - 1);
        CHECK(fsdp_input_ranks(&f) == cases[i].ranks, "%s, %lld ranks, T %lld: inputs of %lld", cases[i].model, (long long)cases[i].world, (long long)cases[i].T, (long long)fsdp_input_ranks(&f));
        fsdp_destroy(&f);
        precision_free(&precision);
        parameter_table_free(&table);
    }
}

static Activity activity_now(void) {
    const Activity a = *activity_lock();
    activity_unlock();
    return a;
}

// The watching thread is told when an operation is enqueued and when it ends, and while its turn has not come; not
// while it waits for others.
static void check_watch(void) {
    Nccl *n = &ranks[0].nccl;
    memset(n, 0, sizeof *n);
    n->stream = stream_handle(0, COMMUNICATION);
    num_events = 0;
    order_begin(1, stream_names, buffer_name);
    for (int i = 0; i < 2; i++) event_create(&n->operations[i].begun), event_create(&n->operations[i].done);
    const Activity before = activity_now();
    nccl_begin_operation(n, "all-gather of the weights", 1);
    nccl_end_operation(n);
    Activity last = activity_now();
    CHECK(last.changes > before.changes && last.pending == 1 && last.pending_layer == 1, "an operation is enqueued untold");
    CHECK(strcmp(last.pending_what, "all-gather of the weights") == 0, "%s", last.pending_what);
    for (int begun = 0; begun < 2; begun++) {
        first_pending = 1 + begun;  // the first operation's events are numbers 1 and 2
        nccl_watch(n);
        const Activity now = activity_now();
        CHECK(n->finished == 0 && now.pending == 1 && (now.changes > last.changes) == !begun,
              "an operation whose turn has %scome is%s told of", begun ? "" : "not ", begun ? "" : " not");
        last = now;
    }
    first_pending = INT64_MAX;
    nccl_watch(n);
    const Activity now = activity_now();
    CHECK(n->finished == 1 && now.pending == 0 && now.collectives == before.collectives + 1, "an operation ends untold");
}

// ---------------------------------------------------------------------------------------------------------------------
// The proof of peer_memory.cuh, on the host's memory

enum { PROOF_RANKS = 3, PROOF_FIRST = 6, PROOF_BYTES = 4096 };  // ranks 6 to 8 of a run

typedef struct {
    char room[2 * PROOF_BYTES];
    uint32_t arrivals[PEER_MAX_RANKS];
} ProofMemory;

static ProofMemory proof_memory[PROOF_RANKS];

// PeerMemory.enqueue: writes are done at once, waits are kept for cudaStreamQuery.
static CUresult act_memory_operations(CUstream, unsigned count, CUstreamBatchMemOpParams *operations, unsigned) {
    for (unsigned i = 0; i < count; i++) {
        if (operations[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32) awaited[num_awaited++] = operations[i];
        else *(uint32_t *)(uintptr_t)operations[i].writeValue.address = operations[i].writeValue.value;
    }
    return CUDA_SUCCESS;
}

// PeerMemory.enqueue where no write arrives.
static CUresult lose_memory_operations(CUstream s, unsigned count, CUstreamBatchMemOpParams *operations, unsigned) {
    for (unsigned i = 0; i < count; i++)
        if (operations[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32) act_memory_operations(s, 1, &operations[i], 0);
    return CUDA_SUCCESS;
}

static void proof_begin(PeerMemory peers[PROOF_RANKS]) {
    memset(proof_memory, 0, sizeof proof_memory);
    memset(peers, 0, PROOF_RANKS * sizeof *peers);
    num_awaited = 0;
    for (int64_t place = 0; place < PROOF_RANKS; place++) {
        PeerMemory *p = &peers[place];
        p->ranks = PROOF_RANKS, p->rank = place, p->arrivals = proof_memory[place].arrivals;
        p->enqueue = act_memory_operations;
        for (int64_t i = 0; i < PROOF_RANKS; i++) p->base[i] = (char *)&proof_memory[i];
        peer_write_pattern(PROOF_FIRST + place, proof_memory[place].room, PROOF_BYTES, NULL);
    }
}

// Returns what the rank at `place` finds wrong; "": nothing.
static const char *proof_reads(const PeerMemory *peers, int64_t place) {
    static char reason[256];
    *reason = 0;
    const bool right = peer_check_patterns(&peers[place], PROOF_FIRST + place, proof_memory[place].room, PROOF_BYTES,
                                           NULL, reason, sizeof reason);
    CHECK(right == !*reason, "a proof that %s has the reason \"%s\"", right ? "holds" : "fails", reason);
    return reason;
}

static void check_proof_of_reads(void) {
    PeerMemory peers[PROOF_RANKS];
    proof_begin(peers);
    for (int64_t place = 0; place < PROOF_RANKS; place++)
        CHECK(!*proof_reads(peers, place), "%s", proof_reads(peers, place));
    proof_memory[2].room[PROOF_BYTES - 3] ^= 4;  // one bit of the last word
    CHECK(strstr(proof_reads(peers, 0), "rank 8's GPU reads wrong from rank 6's, first at byte 4092 of 4096: 0x"), "%s",
          proof_reads(peers, 0));
    CHECK(!*proof_reads(peers, 2), "a rank compares what is its own: %s", proof_reads(peers, 2));
    proof_begin(peers);
    peers[1].base[0] = peers[1].base[2];  // another rank's memory
    CHECK(strstr(proof_reads(peers, 1), "rank 6's GPU reads wrong from rank 7's, first at byte 0 of"), "%s",
          proof_reads(peers, 1));
    proof_begin(peers);
    memset(proof_memory[1].room, 0, 64);  // what was there before
    CHECK(strstr(proof_reads(peers, 2), "rank 7's GPU reads wrong from rank 8's, first at byte 0 of 4096: 0x00000000,"),
          "%s", proof_reads(peers, 2));
}

// NCCL's variable turns copy engines off. Without it rank 1 of 2 is asked, whose memory cannot be had here.
static void check_disabled(void) {
    static const struct { const char *value, *reason; } cases[] = {
        {"1", "NCCL_P2P_DISABLE=1 says"}, {"0", "rank 7's GPU cannot be read from rank 6's"}, {NULL, "rank 7's"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        PeerMemory p;
        PeerOffer offers[2];
        Comm comm = comm_one();
        char reason[256] = "";
        memset(&p, 0, sizeof p);
        memset(offers, 0, sizeof offers);
        p.ranks = 2, comm.rank = PROOF_FIRST, offers[1].status = cudaErrorNotSupported;
        if (cases[i].value) setenv("NCCL_P2P_DISABLE", cases[i].value, 1);
        else unsetenv("NCCL_P2P_DISABLE");
        CHECK(!peer_memory_try(&p, &comm, offers, NULL, reason, sizeof reason) && strstr(reason, cases[i].reason),
              "NCCL_P2P_DISABLE=%s: %s", cases[i].value ? cases[i].value : "(none)", reason);
    }
}

// A rank that falls back because another cannot open its memory closes no mapping that its stream still writes to.
static void check_fallback(void) {
    static char memory[1 << 16];
    Comm comm = comm_one();
    PeerMemory p;
    char reason[256] = "";
    comm.world = comm.shard_size = 2;
    unsetenv("NCCL_P2P_DISABLE");
    uint32_t *arrivals = (uint32_t *)memory;
    const bool open = peer_memory_open(&p, &comm, memory, sizeof memory, arrivals, memory + 1024, PROOF_BYTES, NULL,
                                       reason, sizeof reason);
    CHECK(!open && p.ranks == 0, "open %d, %lld ranks: %s", open, (long long)p.ranks, reason);
    CHECK(closed == 1 && closed_early == 0, "%lld mappings closed, %lld too early", (long long)closed,
          (long long)closed_early);
}

static void prove_lost_barrier(void *context) {
    char reason[256];
    peer_prove_barrier((PeerMemory *)context, PROOF_FIRST, 0.01, NULL, reason, sizeof reason);
}

// 0.01 s: what stands in for the other ranks' writes is done before, or never.
static void check_proof_of_barrier(void) {
    PeerMemory peers[PROOF_RANKS];
    char reason[256] = "", output[512];
    proof_begin(peers);
    for (int64_t place = 1; place < PROOF_RANKS; place++) peer_barrier(&peers[place], NULL);
    CHECK(peer_prove_barrier(&peers[0], PROOF_FIRST, 0.01, NULL, reason, sizeof reason) && !*reason, "%s", reason);
    for (int64_t place = 0; place < PROOF_RANKS; place++)
        for (int64_t from = 0; from < PROOF_RANKS; from++)
            CHECK(proof_memory[place].arrivals[from] == (from != place) && peers[place].barriers == 1,
                  "place %lld has %u arrivals of %lld, and %u barriers", (long long)place,
                  proof_memory[place].arrivals[from], (long long)from, peers[place].barriers);
    proof_begin(peers);
    peer_barrier(&peers[1], NULL);  // and place 2 does not come
    num_awaited = 0;                // on the stream of place 0
    CHECK(!peer_prove_barrier(&peers[0], PROOF_FIRST, 0.01, NULL, reason, sizeof reason) &&
              strstr(reason, "did not come to rank 6 within 0.01 s"), "a barrier without one rank: %s", reason);
    CHECK(__wrap_cudaStreamQuery(NULL) == cudaSuccess, "the stream is not released");
    proof_begin(peers);
    peers[0].enqueue = lose_memory_operations;
    CHECK(check_dies(prove_lost_barrier, &peers[0], "cannot be released; --copy-engines off", output, sizeof output),
          "%s", output);
}

int main(void) {
    for (int64_t world = 2; world <= 4; world++) {
        check_all(world, PRECISION_BF16, RECIPE_TENSORWISE, "", OFF, RECOMPUTE_NONE, ON);
        for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_LAYER; recompute++) {
            check_all(world, PRECISION_FP8, RECIPE_TENSORWISE, "", ON, recompute, ON);
            check_all(world, PRECISION_FP8, RECIPE_TENSORWISE, "first,last", ON, recompute, ON);
            check_all(world, PRECISION_FP8, RECIPE_TENSORWISE, "mlp", ON, recompute, ON);
            check_all(world, PRECISION_FP8, RECIPE_TENSORWISE, "first", ON, recompute, OFF);
            check_all(world, PRECISION_FP8, RECIPE_ROWWISE, "", OFF, recompute, OFF);
            check_all(world, PRECISION_FP8, RECIPE_ROWWISE, "", OFF, recompute, ON);
            check_all(world, PRECISION_FP8, RECIPE_ROWWISE_GW_HP, "", OFF, recompute, ON);
            check_all(world, PRECISION_FP8, RECIPE_BLOCKWISE, "last", OFF, recompute, ON);
        }
    }
    check_omissions();
    check_embedding_ranks();
    check_watch();
    acts = true;
    check_disabled();
    check_fallback();
    check_proof_of_reads();
    check_proof_of_barrier();
    return check_report();
}
