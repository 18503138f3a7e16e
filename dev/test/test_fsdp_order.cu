// Tests the order of the GPU trainer's streams on all ranks, without a GPU. train_fp8.cu itself enqueues some optimizer
// steps, a sample and a validation for one rank after the other, with copy engines and with NCCL, with --offload and
// without. This file answers its calls: the linker puts functions of this file in place of those of CUDA, NCCL and MPI
// (--wrap, see the Makefile), and macros replace launchers, functions of Fsdp and others that train_fp8.cu and its
// headers call. The replacements record the operations of all streams of each rank. Then the streams of all ranks run
// in a model of streams (order_model.h). Operations on the same memory must be ordered by events, barriers and
// collectives, a read must find the content that the trainer needs there, and no stream may wait for ever.
// check_omissions() and check_fp8_gradient_omissions() repeat this, each time without one kind of barrier, collective,
// wait for an event or call of the trainer. The test must detect each omission. Other checks are of fsdp_input_ranks(),
// of the watcher thread, and of copy engines: when they are used, and their self-test (peer_memory.cuh).
//
// linear.cuh, batches.cuh, fsdp_report.cuh, train.h and some other headers come behind the macros, with train_fp8.cu.
#define TESTING
#include <malloc.h>

#include "../../llmc/memory/activations.cuh"
#include "../../llmc/optimizer/adamw.cuh"
#include "../../llmc/kernels/attention.cuh"
#include "../../llmc/fp8/auto_filter.cuh"
#include "../../llmc/gpu/column_sums.cuh"
#include "../../llmc/kernels/cross_entropy.cuh"
#include "../../llmc/kernels/embedding.cuh"
#include "../../llmc/fp8/gemm.cuh"
#include "../../llmc/kernels/initialize.cuh"
#include "../../llmc/gpu/profile.cuh"
#include "../../llmc/kernels/rmsnorm.cuh"
#include "../../llmc/kernels/rope.cuh"
#include "../../llmc/kernels/swiglu.cuh"
#include "../../llmc/shard/fsdp.cuh"
#include "../../llmc/run/audit_report.h"
#include "../../llmc/run/run.h"
#include "../../llmc/run/sampler.h"
#include "../../llmc/run/stop.h"

#include "lib/check.h"
#include "lib/order_model.h"

enum { COMPUTE, COMMUNICATION, TO_GPU, TO_HOST, KEPT_COPIES, MAX_EVENTS = 1 << 14, HOST_BYTES = 1 << 24 };
static const char *const stream_names[ORDER_STREAMS] = {"compute", "communication", "to the GPU", "to the host",
                                                        "copies of activations"};

// A rank's memory: its GPU's from 0 to PINNED_BEGIN, pinned memory for offloading from there to PINNED_END.
#define PINNED_BEGIN (ORDER_MEMORY_STRIDE / 4)
#define PINNED_END (ORDER_MEMORY_STRIDE / 2)

// Facts about a rank's trainer that this file needs.
typedef struct {
    Fsdp *f;
    Nccl *nccl;
    bf16 *logits;  // [chunk, V]
    double *squares, *losses;
    float *loss;
    const struct Offload *offload;
    const KeptSpan *slots;  // [L] activations in slots; NULL without --offload activations
    bool copies_kept;       // some layers' activations leave the GPU
    int64_t kept_layer;     // the layer whose forward or backward pass is being enqueued
    bool kept_backward;     // it is the backward pass
    int streams;            // created so far
    int64_t pinned;         // bytes of pinned memory for offloading
    Comm comm;
    int64_t step;                  // version of the weights
    int64_t gradient_step, micro;  // weights' version, and micro-step, from which the gradients come
    int64_t operation, barriers;   // numbers of the operation being enqueued and of the barrier in it
    // unit: its gradient is being reduced, or was reduced last. call: number of the first operation of the reduction
    // that is being enqueued; -1: none is.
    int64_t unit, call;
    bool to_replicas;     // the sum over replicas is being enqueued
    int64_t amaxes_over;  // number of ranks in the content of the amaxes of the FP8 cast that was enqueued last
} Rank;

// An omission: a barrier, a collective, a wait for an event, or a call is left out each time it comes.
typedef struct {
    const char *what;  // name of the event or call, or of the operation that has the barrier or collective
    // Events and calls: 0. Else which barrier, or which collective, is left out, counted from 0: within the operation
    // or, if the operation is part of the reduction of a gradient, within all operations of this name in that
    // reduction. Each reduction (of a unit, in a micro-step) counts anew and leaves it out.
    int64_t number;
    int64_t rank;  // that leaves it out; -1: all ranks do
} Omission;

static Rank ranks[ORDER_MAX_RANKS], *now;             // the rank whose trainer runs
static bool creating;                                 // a trainer is being created or destroyed: nothing is recorded
static int groups[COMM_NUM_GROUPS][ORDER_MAX_RANKS];  // number of ranks of each communicator
static int64_t events[MAX_EVENTS];                    // number of each event's last record, -1: none
static int64_t num_events, copied;
static void *zeroed;  // memory that cudaMemsetAsync cleared last
static int64_t zeroed_bytes;
static int64_t left_group;  // copies and signals between ranks of different shard groups, which may be on other hosts
static size_t host_used;    // bytes that cudaMallocHost has given
static int64_t first_pending = INT64_MAX;  // events from this one on have not happened
static Omission omission;
static bool acts;                                         // calls take effect at once, on host memory
static CUstreamBatchMemOpParams awaited[PEER_MAX_RANKS];  // with acts: values that streams wait for
static int64_t num_awaited;

// Messages of a group of NCCL calls.
typedef struct {
    cudaStream_t stream;
    ncclComm_t communicator;
    bool sends;
    const char *at;
    int64_t bytes, rank;  // rank: the receiver of a sent message, the sender of a received one
} Message;

static Message messages[2 * ORDER_MAX_RANKS];
static int num_messages;

// Returns the content that stands for the weights of a layer or ROOT, of version `step`.
static int64_t weights_of(int64_t step, int64_t l) { return order_content(2 + step * 1000 + l, 0); }

// Numbers that gradients_of takes in place of a layer's: for gradients of logits, for gradients of inputs, and for the
// loss and norm of a step.
enum { LOGITS = 996, INPUTS = 997, STATISTICS = 998 };
// Returns the content that stands for gradients of a layer or ROOT in a micro-step, summed over `over` ranks.
static int64_t gradients_of(int64_t step, int64_t micro, int64_t l, int64_t over) {
    return order_content((step * 100 + micro) * 1000 + 1 + l, over);
}

// Returns the content that stands for a part of an offloaded array, after the update that made the weights of version
// `step`. The part begins at `element` of the shard. No update makes version 1: its weights are loaded.
static int64_t offloaded_of(int64_t step, int array, int64_t element) {
    return step == 1 ? ORDER_UNWRITTEN
                     : order_content((1ll << 46) + (step << 40) + ((int64_t)array << 38) + element, 0);
}

// Returns the content that stands for a layer's activations, from its forward pass in a micro-step.
static int64_t activations_of(int64_t step, int64_t micro, int64_t l) {
    return order_content((1ll << 47) + (step * 100 + micro) * 1000 + l, 0);
}

// ---- Recording

static cudaStream_t stream_handle(int64_t rank, int stream) {
    return (cudaStream_t)(intptr_t)(1 + rank * ORDER_STREAMS + stream);
}
static bool is_pinned(const void *p) { return (int64_t)((uintptr_t)p % ORDER_MEMORY_STRIDE) >= PINNED_BEGIN; }
static int number_of(cudaStream_t s) { return (int)(intptr_t)s - 1; }
static Rank *rank_of(cudaStream_t s) { return &ranks[number_of(s) / ORDER_STREAMS]; }

static void note_read(cudaStream_t s, const void *from, int64_t bytes, int64_t content) {
    order_read(number_of(s), from, bytes, content);
}
static OrderOperation *note_write(cudaStream_t s, const void *to, int64_t bytes, int64_t content) {
    return order_write(number_of(s), to, bytes, content);
}

static bool in_memory(const void *p) {
    const int64_t rank = (int64_t)((uintptr_t)p / ORDER_MEMORY_STRIDE) - 1;
    return rank >= 0 && rank < order.ranks;
}

// Counts an access of a stream's rank to memory of another shard group.
static void note_access(cudaStream_t s, const void *p) {
    const int64_t owner = (int64_t)((uintptr_t)p / ORDER_MEMORY_STRIDE) - 1;
    left_group += owner / rank_of(s)->comm.shard_size != rank_of(s)->comm.replica;
}

// Records a read of the loss of the latest micro-step, summed over all ranks.
static void note_statistics(cudaStream_t s) {
    note_read(s, now->loss, sizeof *now->loss,
              gradients_of(now->gradient_step, now->micro, STATISTICS, now->comm.world));
}

static bool is_omitted(cudaStream_t s, const char *what, int64_t number) {
    return omission.what && what && strcmp(omission.what, what) == 0 && omission.number == number &&
           (omission.rank < 0 || rank_of(s) == &ranks[omission.rank]);
}

// Returns the name of the operation, by NCCL or copy engines, that is being enqueued.
static const char *operation_name(const Rank *r) {
    const char *what = r->nccl->operations[r->nccl->enqueued % NCCL_PENDING].what;
    const bool amaxes = what && strcmp(what, "all-reduce of the amaxes of gradients") == 0;
    return amaxes && r->to_replicas ? "all-reduce of the amaxes of gradients, for replicas" : what;
}

// Returns how many earlier operations of this reduction of a gradient have the name of the one that is being enqueued.
static int64_t repetitions(const Rank *r) {
    int64_t count = 0;
    for (int64_t i = r->call; omission.what && i >= 0 && i < r->nccl->enqueued; i++)
        count += strcmp(r->nccl->operations[i % NCCL_PENDING].what,
                        r->nccl->operations[r->nccl->enqueued % NCCL_PENDING].what) == 0;
    return count;
}

// True if this rank leaves out its part in the collective or messages that are being enqueued.
static bool collective_is_omitted(cudaStream_t s) {
    return is_omitted(s, operation_name(rank_of(s)), repetitions(rank_of(s)));
}

static const char *offload_event_name(const Rank *r, cudaEvent_t e);

static const char *event_name(const Rank *r, cudaEvent_t e) {
    const Fsdp *f = r->f;
    if (e == f->transport.handover) return r->to_replicas ? "handover to the replicas" : "handover";
    for (int i = 0; i < 1 + FSDP_GRADIENT_BUFFERS; i++)
        if (e == f->gradients.reduced[i]) return "reduced";
    for (int i = 0; i < FSDP_GRADIENT_BUFFERS; i++)
        if (e == f->gradients.summed[i]) return "summed";
    for (int64_t i = 0; i < f->weights.num_slots; i++) {
        if (e == f->weights.slot[i].arrived) return "arrived";
        if (e == f->weights.slot[i].released) return "released";
    }
    return offload_event_name(r, e);
}

static int64_t nccl_element(ncclDataType_t type) {
    return type == ncclUint8 ? 1 : type == ncclBfloat16 ? 2 : type == ncclFloat64 ? 8 : 4;
}

// Returns the group of a communicator: a pointer to its number of ranks.
static const int *group_of(ncclComm_t communicator) {
    if (!communicator) die("a collective in a group of one rank");
    return (const int *)communicator;
}

static ncclResult_t note_collective(const char *name, bool sums, cudaStream_t s, ncclComm_t communicator,
                                    const void *from, int64_t bytes, void *to, int64_t to_bytes) {
    const int *group = group_of(communicator);
    if (collective_is_omitted(s)) {
        note_read(s, from, bytes, ORDER_CARRIED);
        note_write(s, to, to_bytes, ORDER_CARRIED);
    } else {
        order_collective(number_of(s), name, group, from, bytes, to, to_bytes, sums ? *group : 0);
    }
    return ncclSuccess;
}

// Returns which rank of the run has number `index` in one of this rank's communicators.
static int64_t rank_in(const Rank *r, ncclComm_t communicator, int64_t index) {
    const Comm *c = &r->comm;
    if (communicator == r->nccl->comms[COMM_WORLD]) return index;
    return communicator == r->nccl->comms[COMM_SHARD] ? c->replica * c->shard_size + index
                                                      : index * c->shard_size + c->shard_rank;
}

static ncclResult_t note_message(cudaStream_t s, ncclComm_t communicator, bool sends, const void *at, int64_t bytes,
                                 int index) {
    const Message m = {s, communicator, sends, (const char *)at, bytes, rank_in(rank_of(s), communicator, index)};
    if (collective_is_omitted(s)) return ncclSuccess;
    if (num_messages == (int)(sizeof messages / sizeof *messages)) die("too many messages in a group of NCCL calls");
    messages[num_messages++] = m;
    return ncclSuccess;
}

static bool messages_overlap(const Message *a, const Message *b) {
    return a != b && a->at < b->at + b->bytes && b->at < a->at + a->bytes;
}

// Records the messages of a group of NCCL calls, which move at the same time.
static void note_messages(void) {
    for (const Message *m = messages; m < messages + num_messages; m++) {
        for (const Message *other = messages; !m->sends && other < messages + num_messages; other++)
            if (messages_overlap(m, other)) die("a group of NCCL calls receives into memory that it also uses");
        if (m->sends) order_send(number_of(m->stream), group_of(m->communicator), m->at, m->bytes, m->rank);
    }
    for (const Message *m = messages; m < messages + num_messages; m++)
        if (!m->sends)
            order_receive(number_of(m->stream), group_of(m->communicator), (void *)(intptr_t)m->at, m->bytes, m->rank);
    for (const Message *m = messages; m < messages + num_messages; m++)
        if (m->sends) order_sent(number_of(m->stream), m->rank);
    num_messages = 0;
}

// True if an address is that of an element of `arrivals` in any rank's memory. All ranks have them at equal offsets.
static bool is_arrival(const Rank *r, const char *at) {
    const int64_t offset = (int64_t)((uintptr_t)at % ORDER_MEMORY_STRIDE) -
                           (int64_t)((uintptr_t)r->f->transport.arrivals % ORDER_MEMORY_STRIDE);
    return offset >= 0 && offset % (int64_t)sizeof(uint32_t) == 0 &&
           offset < r->f->transport.peers.ranks * (int64_t)sizeof(uint32_t);
}

// Replaces PeerMemory.enqueue.
static CUresult note_memory_operations(CUstream s, unsigned count, CUstreamBatchMemOpParams *operations, unsigned) {
    Rank *r = rank_of(s);
    if (r->operation != r->nccl->enqueued) r->operation = r->nccl->enqueued, r->barriers = 0;
    const int64_t number = 2 * repetitions(r) + r->barriers++;  // each operation that is repeated has two barriers
    if (is_omitted(s, operation_name(r), number)) return CUDA_SUCCESS;
    for (unsigned i = 0; i < count; i++) {
        const CUstreamBatchMemOpParams *o = &operations[i];
        const bool write = o->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32;
        if (!write &&
            (o->operation != CU_STREAM_MEM_OP_WAIT_VALUE_32 || o->waitValue.flags != CU_STREAM_WAIT_VALUE_GEQ))
            die("a memory operation that this test does not know");
        const char *at = (const char *)(write ? o->writeValue.address : o->waitValue.address);
        if (!is_arrival(r, at)) die("a value at %p, which is no arrival", (const void *)at);
        note_access(s, at);
        if (write) order_signal(number_of(s), at, o->writeValue.value);
        else order_await(number_of(s), at, o->waitValue.value);
    }
    return CUDA_SUCCESS;
}

// ---- Kernels

static void note_slices(cudaStream_t s, const Fp8Slices *slices) {
    for (int64_t l = 0; l < slices->count; l++) {
        note_read(s, slices->amax + l * slices->slot_stride, slices->num_tensors * (int64_t)sizeof(uint32_t),
                  ORDER_ANY);
        note_read(s, slices->x + l * slices->x_stride, slices->n * (int64_t)sizeof(bf16), ORDER_CARRIED);
        note_write(s, slices->codes + l * slices->n, slices->n, ORDER_CARRIED);
    }
}

// Records the amaxes of rows, columns or the tensor, as the granularities of the FP8 data need them.
static void note_amax_pass(cudaStream_t s, const TensorSource *source, const FineAmaxes *to, int64_t R, int64_t C) {
    note_read(s, source->x, R * C * (int64_t)sizeof(bf16), ORDER_CARRIED);
    if (to->rows) note_write(s, to->rows, R * (int64_t)sizeof(uint32_t), ORDER_CARRIED);
    if (to->columns) note_write(s, to->columns, C * (int64_t)sizeof(uint32_t), ORDER_CARRIED);
    if (to->tensor) note_write(s, to->tensor, sizeof(uint32_t), ORDER_CARRIED);
}

// Records a cast. Block scales need no stored amaxes. The scale of a whole tensor may come from an older amax. All
// other amaxes must be of the weights that are cast.
static void note_cast(cudaStream_t s, const TensorSource *source, const QTensor *out, int64_t R, int64_t C) {
    const int64_t of_rows = usage_amaxes(out->row_granularity, R), of_columns = usage_amaxes(out->col_granularity, C);
    if (out->row_granularity == PER_TENSOR) note_read(s, out->amax, sizeof(uint32_t), ORDER_ANY);
    else if (out->rowwise && of_rows) note_read(s, out->amax, of_rows * (int64_t)sizeof(uint32_t), ORDER_CARRIED);
    if (out->col_granularity != PER_TENSOR && out->columnwise && of_columns)
        note_read(s, out->amax + of_rows, of_columns * (int64_t)sizeof(uint32_t), ORDER_CARRIED);
    note_read(s, source->x, R * C * (int64_t)sizeof(bf16), ORDER_CARRIED);
    if (out->rowwise) note_write(s, out->rowwise, R * C, ORDER_CARRIED);
    if (out->columnwise) note_write(s, out->columnwise, R * C, ORDER_CARRIED);
}

// Records that `from` [n] is added to `to` [n], or replaces it. The content of `to` is then that of `from`. to_element,
// element: bytes of an element of `to`, and of `from`.
static OrderOperation *note_add(cudaStream_t s, const void *to, int64_t to_element, const void *from, int64_t n,
                                int64_t element, const GradientSum *how) {
    note_read(s, from, n * element, ORDER_CARRIED);
    if (how->add) note_read(s, to, n * to_element, ORDER_ANY);
    return note_write(s, to, n * to_element, ORDER_CARRIED);
}

static void note_to_fp32(cudaStream_t s, const float *to, const bf16 *from, int64_t rows, int64_t n, int64_t stride) {
    for (int64_t row = 0; row < rows; row++)
        note_read(s, from + row * stride, n * (int64_t)sizeof(bf16), ORDER_CARRIED);
    note_write(s, to, rows * n * (int64_t)sizeof(float), ORDER_CARRIED);
}

static void note_transpose(cudaStream_t s, const uint8_t *col, const uint8_t *row, int64_t bytes) {
    note_read(s, row, bytes, ORDER_CARRIED);
    note_write(s, col, bytes, ORDER_CARRIED);
}

// Records a sum over ranks, of this rank's own values and the received ones.
static void note_rank_sum(cudaStream_t s, const void *to, int64_t to_element, const bf16 *own, const bf16 *others,
                          int64_t summed, int64_t n, const GradientSum *how) {
    note_read(s, others, (summed - 1) * n * (int64_t)sizeof(bf16), ORDER_CARRIED);
    note_add(s, to, to_element, own, n, sizeof(bf16), how)->summed = summed;
}

static bool is_cast(const void *function) {
    return function == (const void *)quantize_transpose_kernel<TensorSource, FP8_E4M3, false> ||
           function == (const void *)quantize_transpose_kernel<TensorSource, FP8_E4M3, true>;
}

static bool is_fine_cast(const void *function) {
    return function == (const void *)quantize_fine_kernel<TensorSource, PER_ROW, FP8_E4M3> ||
           function == (const void *)quantize_fine_kernel<TensorSource, BLOCK_1X32, FP8_E4M3> ||
           function == (const void *)quantize_fine_kernel<TensorSource, BLOCK_1X128, FP8_E4M3> ||
           function == (const void *)quantize_fine_kernel<TensorSource, BLOCK_128X128, FP8_E4M3>;
}

static bool is_amax_pass(const void *function) {
    return function == (const void *)quantize_amax_kernel<TensorSource, true> ||
           function == (const void *)quantize_amax_kernel<TensorSource, false>;
}

// i: index of a kernel's argument.
#define INTEGER(i) (*(int64_t *)arguments[i])
#define POINTER(type, i) (*(type **)arguments[i])

// Records a kernel that adds gradients to sums. Returns false if it is another kernel.
static bool note_sum_kernel(cudaStream_t s, const void *function, void **arguments) {
    for (int fp32 = 0; fp32 < 2; fp32++) {
        const int64_t element = fp32 ? (int64_t)sizeof(float) : (int64_t)sizeof(bf16);
        const void *add_bf16 =
            fp32 ? (const void *)transport_add_kernel<float, bf16> : (const void *)transport_add_kernel<bf16, bf16>;
        const void *add_fp32 =
            fp32 ? (const void *)transport_add_kernel<float, float> : (const void *)transport_add_kernel<bf16, float>;
        const void *rank_sum =
            fp32 ? (const void *)transport_sum_kernel<float> : (const void *)transport_sum_kernel<bf16>;
        const void *ordered =
            fp32 ? (const void *)transport_ordered_kernel<float> : (const void *)transport_ordered_kernel<bf16>;
        void *to = POINTER(void, 0);
        if (function == add_bf16)
            note_add(s, to, element, POINTER(bf16, 1), INTEGER(2), sizeof(bf16), (GradientSum *)arguments[3]);
        else if (function == add_fp32)
            note_add(s, to, element, POINTER(float, 1), INTEGER(2), sizeof(float), (GradientSum *)arguments[3]);
        else if (function == rank_sum || function == ordered)
            note_rank_sum(s, to, element, POINTER(bf16, 1), POINTER(bf16, 2), INTEGER(3), INTEGER(5),
                          (GradientSum *)arguments[6]);
        else continue;
        return true;
    }
    return false;
}

// ---- FP8 gradients. Content includes a number of ranks (gradients_of). Amaxes get the content of their gradients, and
// an all-reduce of amaxes multiplies the number by the ranks of its group. The content of scales is that of their
// gradients, with 0 ranks. Padding counts as gradient.

static int64_t stored_gradients(int64_t micro, int64_t over) {
    return gradients_of(now->gradient_step, micro, now->unit, over);
}

// Returns the number of ranks in the content of the amaxes for a cast: those of the gradients, times those of the
// amaxes' all-reduce.
static int64_t cast_amaxes_over(const GradientFp8 *to, const GradientFp8Source *from) {
    const int64_t shards = now->comm.shard_size, world = now->comm.world;
    if (to->codes == now->f->gradients.fp8_sent.codes) return shards;
    if (!now->to_replicas) return shards * shards;
    return from->data ? world * shards : (from->ranks > 1 ? world : shards) * world;
}

// Returns how many of a rank's elements a pass reads: all, or of codes that replicas have sent one part.
static int64_t pass_elements(const GradientFp8Source *from, const GradientFp8Layout *a) {
    return from->ranks > 1 ? min_i64(from->stride, a->matrices - from->begin) : a->matrices;
}

static void note_scales(cudaStream_t s, const float *scale_inv, const GradientFp8Layout *a, int64_t micro) {
    note_read(s, scale_inv, a->entries * (int64_t)sizeof *scale_inv, stored_gradients(micro, 0));
}

// Records the reads of a pass over gradients. The stored ones are those of earlier micro-steps, over the shard group.
static void note_fp8_source(cudaStream_t s, const GradientFp8 *to, const GradientFp8Source *from,
                            const GradientFp8Layout *a, bool add) {
    if (!from->data) note_scales(s, from->scale_inv, a, now->micro);
    if (add) note_scales(s, to->scale_inv, a, now->micro - 1);
    if (add) note_read(s, to->codes, a->matrices, stored_gradients(now->micro - 1, now->comm.shard_size));
    const int64_t n = pass_elements(from, a);
    if (from->data) note_read(s, from->data, n * (int64_t)sizeof(bf16), ORDER_CARRIED);
    else note_read(s, from->codes + from->begin, n, ORDER_CARRIED);
    for (int64_t i = 0; i < from->ranks - 1; i++) note_read(s, from->others + i * from->stride, n, ORDER_CARRIED);
}

static void note_fp8_scales(cudaStream_t s, const GradientFp8 *to, const GradientFp8Layout *a) {
    note_read(s, to->amaxes, a->entries * (int64_t)sizeof *to->amaxes, stored_gradients(now->micro, now->amaxes_over));
    note_write(s, to->scale_inv, a->entries * (int64_t)sizeof *to->scale_inv, stored_gradients(now->micro, 0));
    note_write(s, to->amaxes, a->entries * (int64_t)sizeof *to->amaxes, ORDER_UNWRITTEN);
}

static void note_fp8_decode(cudaStream_t s, const bf16 *to, const GradientFp8 *from, const GradientFp8Layout *a) {
    note_scales(s, from->scale_inv, a, now->micro);
    note_read(s, from->codes, a->matrices, ORDER_CARRIED);
    note_write(s, to, a->matrices * (int64_t)sizeof *to, ORDER_CARRIED);
}

// Records a kernel that finds amaxes, or one that casts. Returns false if it is another kernel. Amaxes must be zero
// before they are found. The amaxes for a cast must be over all ranks that share its scales.
static bool note_fp8_pass(cudaStream_t s, const void *function, void **arguments) {
    const void *const amaxes[2][2] = {
        {(const void *)gradient_fp8_amax_kernel<false, false>, (const void *)gradient_fp8_amax_kernel<false, true>},
        {(const void *)gradient_fp8_amax_kernel<true, false>, (const void *)gradient_fp8_amax_kernel<true, true>}};
    const void *const casts[2][2] = {
        {(const void *)gradient_fp8_cast_kernel<false, false>, (const void *)gradient_fp8_cast_kernel<false, true>},
        {(const void *)gradient_fp8_cast_kernel<true, false>, (const void *)gradient_fp8_cast_kernel<true, true>}};
    for (int add = 0; add < 2; add++)
        for (int codes = 0; codes < 2; codes++) {
            const bool is_cast = function == casts[add][codes];
            if (!is_cast && function != amaxes[add][codes]) continue;
            const GradientFp8 *to = (const GradientFp8 *)arguments[0];
            const GradientFp8Source *from = (const GradientFp8Source *)arguments[1];
            const GradientFp8Layout *a = (const GradientFp8Layout *)arguments[is_cast ? 3 : 2];
            const int64_t bytes = a->entries * (int64_t)sizeof *to->amaxes;
            if (is_cast) now->amaxes_over = cast_amaxes_over(to, from);
            note_read(s, to->amaxes, bytes, is_cast ? stored_gradients(now->micro, now->amaxes_over) : ORDER_UNWRITTEN);
            note_fp8_source(s, to, from, a, add > 0);
            (is_cast ? note_write(s, to->codes + from->begin, pass_elements(from, a), ORDER_CARRIED)
                     : note_write(s, to->amaxes, bytes, ORDER_CARRIED))
                ->summed = from->ranks;
            return true;
        }
    return false;
}

// Records a kernel of gradient_fp8.cuh. Returns false if it is another kernel.
static bool note_fp8_kernel(cudaStream_t s, const void *function, void **arguments) {
    if (function == (const void *)gradient_fp8_scales_kernel)
        note_fp8_scales(s, (const GradientFp8 *)arguments[0], (const GradientFp8Layout *)arguments[1]);
    else if (function == (const void *)gradient_fp8_decode_kernel)
        note_fp8_decode(s, POINTER(bf16, 0), (const GradientFp8 *)arguments[1],
                        (const GradientFp8Layout *)arguments[2]);
    else return note_fp8_pass(s, function, arguments);
    return true;
}

// Records a kernel that sums the squares of a unit, or finds the unit's clip factor from them. Returns false if it is
// another kernel. Squares get the content of the gradients. Their all-reduce multiplies its number of ranks again.
static bool note_clip_kernel(cudaStream_t s, const void *function, void **arguments) {
    const bool fp32 = function == (const void *)adamw_squares_kernel<float>;
    if (fp32 || function == (const void *)adamw_squares_kernel<bf16>) {
        note_read(s, POINTER(void, 1), INTEGER(2) * (fp32 ? 4 : 2), ORDER_CARRIED);
        const int64_t sums = now->f->plan.any_ranks ? ceil_div(INTEGER(2), SHARD_BLOCK) : (int64_t)ADAMW_NORM_BLOCKS;
        note_write(s, POINTER(double, 0), sums * (int64_t)sizeof(double), ORDER_CARRIED);
    } else if (function == (const void *)adamw_sum_kernel) {
        const bool first = now->f->plan.any_ranks && POINTER(double, 0) == POINTER(double, 1) + INTEGER(2);
        note_read(s, POINTER(double, 1), INTEGER(2) * (int64_t)sizeof(double), ORDER_CARRIED);
        note_write(s, POINTER(double, 0), (first ? ADAMW_SUM_BLOCKS : 1) * (int64_t)sizeof(double), ORDER_CARRIED);
    } else if (function == (const void *)adamw_clip_kernel) {
        const AdamwClip *clip = (const AdamwClip *)arguments[1];
        const int64_t world = now->f->plan.world, over = fsdp_is_sharded(now->f) ? world * world : world;
        note_read(s, &clip->squares[INTEGER(3)], sizeof(double),
                  gradients_of(now->gradient_step, now->micro, INTEGER(2), over));
    } else {
        return false;
    }
    return true;
}

// Records the kernels that make scales of n weights from their amaxes. The one before a step clears the amaxes too.
static void note_weight_scales(cudaStream_t s, const uint32_t *amax, int64_t n, bool clears) {
    const int64_t bytes = NUM_LINEARS * (int64_t)sizeof *amax;
    for (int64_t i = 0; i < n; i += NUM_LINEARS, amax += TENSORS_PER_LAYER) {
        note_read(s, amax, bytes, ORDER_ANY);
        if (clears) note_write(s, amax, bytes, ORDER_UNWRITTEN);
    }
}

static void note_kernel(cudaStream_t s, const void *function, void **arguments) {
    const TensorSource *source = (const TensorSource *)arguments[0];
    if (is_cast(function)) note_cast(s, source, (const QTensor *)arguments[1], INTEGER(2), INTEGER(3));
    else if (is_fine_cast(function)) note_cast(s, source, (const QTensor *)arguments[1], INTEGER(3), INTEGER(4));
    else if (is_amax_pass(function))
        note_amax_pass(s, source, (const FineAmaxes *)arguments[1], INTEGER(2), INTEGER(3));
    else if (function == (const void *)quantize_slices_kernel<FP8_E4M3>) note_slices(s, (Fp8Slices *)arguments[0]);
    else if (function == (const void *)weight_scales_begin_kernel)
        note_weight_scales(s, POINTER(uint32_t, 1), INTEGER(2), false);
    else if (function == (const void *)weight_scales_bound_kernel)
        note_weight_scales(s, POINTER(uint32_t, 2), INTEGER(3), true);
    else if (function == (const void *)fp8_transpose_kernel)
        note_transpose(s, POINTER(uint8_t, 0), POINTER(uint8_t, 1), INTEGER(2) * INTEGER(3));
    else if (function == (const void *)transport_to_fp32_kernel)
        note_to_fp32(s, POINTER(float, 0), POINTER(bf16, 1), INTEGER(2), INTEGER(3), INTEGER(4));
    else if (!note_sum_kernel(s, function, arguments) && !note_fp8_kernel(s, function, arguments) &&
             !note_clip_kernel(s, function, arguments))
        die("a kernel that this test does not know");
}

// ---- Replacements of CUDA and NCCL

extern "C" {
cudaError_t __wrap_cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    if (num_events == MAX_EVENTS) die("more than %d events", MAX_EVENTS);
    events[num_events] = -1;
    *e = (cudaEvent_t)(intptr_t)(++num_events);
    return cudaSuccess;
}
cudaError_t __wrap_cudaEventCreate(cudaEvent_t *e) { return __wrap_cudaEventCreateWithFlags(e, 0); }
// All cases use this memory in turn and leave it unchanged. Heap memory would have to be cleared for each case.
cudaError_t __wrap_cudaMallocHost(void **memory, size_t bytes) {
    static char all[HOST_BYTES];
    *memory = all + host_used;
    host_used += (bytes + 15) / 16 * 16;
    if (host_used > HOST_BYTES) die("more than %d bytes of pinned memory", HOST_BYTES);
    return cudaSuccess;
}
cudaError_t __wrap_cudaFreeHost(void *) { return cudaSuccess; }
cudaError_t __wrap_cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t __wrap_cudaEventQuery(cudaEvent_t e) {
    return (intptr_t)e >= first_pending ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t __wrap_cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    if (creating) return cudaSuccess;
    events[(intptr_t)e - 1] = order_record(number_of(s));
    return cudaSuccess;
}
cudaError_t __wrap_cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    const int64_t record = events[(intptr_t)e - 1];  // the last record before this call; none: no wait
    if (creating) return cudaSuccess;
    if (record >= 0 && !is_omitted(s, event_name(rank_of(s), e), 0)) order_wait(number_of(s), record);
    return cudaSuccess;
}
cudaError_t __wrap_cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s) {
    if (acts) return memset(to, value, bytes), cudaSuccess;
    if (creating) return cudaSuccess;
    note_write(s, to, (int64_t)bytes, ORDER_UNWRITTEN);
    zeroed = to, zeroed_bytes = (int64_t)bytes;
    return cudaSuccess;
}
// Sums of a rank's blocks go to their places among those of all ranks, which were cleared before. The other ranks'
// places count as written too: they are 0 here, and the all-reduce fills them.
cudaError_t __wrap_cudaMemcpy2DAsync(void *to, size_t, const void *from, size_t pitch, size_t width, size_t height,
                                     cudaMemcpyKind, cudaStream_t s) {
    if ((char *)to < (char *)zeroed || (char *)to >= (char *)zeroed + zeroed_bytes) die("a copy to other memory");
    for (size_t row = 0; row < height; row++)
        note_read(s, (const char *)from + row * pitch, (int64_t)width, ORDER_CARRIED);
    note_write(s, zeroed, zeroed_bytes, ORDER_CARRIED);
    return cudaSuccess;
}
cudaError_t __wrap_cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t s) {
    if (acts) return memcpy(to, from, bytes), cudaSuccess;
    if (creating) return cudaSuccess;
    if (in_memory(from) && in_memory(to)) {
        note_access(s, from);
        note_access(s, to);
        note_read(s, from, (int64_t)bytes, ORDER_CARRIED);
        note_write(s, to, (int64_t)bytes, ORDER_CARRIED);
        copied += order_rank_of((const char *)from) != order_rank_of((const char *)to);
    } else if (in_memory(from))
        note_statistics(s);  // the trainer copies only the loss of a step to the host on a stream
    else note_write(s, to, (int64_t)bytes, ORDER_UNWRITTEN);
    return cudaSuccess;
}
cudaError_t __wrap_cudaMemset2DAsync(void *to, size_t pitch, int, size_t width, size_t height, cudaStream_t s) {
    for (size_t row = 0; row < height; row++) note_write(s, (char *)to + row * pitch, (int64_t)width, ORDER_UNWRITTEN);
    return cudaSuccess;
}
static bool writes_pending;  // true: a stream may still write to the memory of a peer
static int64_t closed,
    closed_early;  // mappings of peer memory that were closed; closed while a write could still use them
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
// The MPI functions act as if there were two ranks: the other one offers memory like this rank's (all-gather), and
// cannot open this rank's memory (all-reduce).
int __wrap_MPI_Allgather(const void *, int, MPI_Datatype, void *all, int, MPI_Datatype, MPI_Comm) {
    ((PeerOffer *)all)[1] = ((PeerOffer *)all)[0];
    return MPI_SUCCESS;
}
int __wrap_MPI_Allreduce(const void *, void *value, int, MPI_Datatype, MPI_Op, MPI_Comm) {
    *(double *)value = 0;
    return MPI_SUCCESS;
}
int __wrap_MPI_Barrier(MPI_Comm) { return MPI_SUCCESS; }
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
    static const int in_order[2][4] = {{COMPUTE, TO_GPU, TO_HOST}, {COMPUTE, KEPT_COPIES, TO_GPU, TO_HOST}};
    *s = creating ? stream_handle(now - ranks, in_order[now->copies_kept][now->streams++]) : NULL;
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
    if (!creating) note_kernel(config->stream, function, arguments);
    return cudaSuccess;
}
ncclResult_t __wrap_ncclGroupStart(void) { return ncclSuccess; }
ncclResult_t __wrap_ncclGroupEnd(void) {
    note_messages();
    return ncclSuccess;
}
ncclResult_t __wrap_ncclCommGetAsyncError(ncclComm_t, ncclResult_t *state) {
    *state = ncclSuccess;
    return ncclSuccess;
}
ncclResult_t __wrap_ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t c,
                                  cudaStream_t s) {
    const int64_t bytes = (int64_t)count * nccl_element(type);
    return note_collective("all-gather", false, s, c, from, bytes, to, *group_of(c) * bytes);
}
ncclResult_t __wrap_ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                      ncclComm_t c, cudaStream_t s) {
    const int64_t bytes = (int64_t)count * nccl_element(type);
    return note_collective("reduce-scatter", op == ncclSum, s, c, from, *group_of(c) * bytes, to, bytes);
}
ncclResult_t __wrap_ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                  ncclComm_t c, cudaStream_t s) {
    const int64_t bytes = (int64_t)count * nccl_element(type);
    const bool amaxes = op == ncclMax && type == ncclUint32;
    return note_collective("all-reduce", op == ncclSum || amaxes, s, c, from, bytes, to, bytes);
}
ncclResult_t __wrap_ncclSend(const void *from, size_t count, ncclDataType_t type, int to, ncclComm_t c,
                             cudaStream_t s) {
    return note_message(s, c, true, from, (int64_t)count * nccl_element(type), to);
}
ncclResult_t __wrap_ncclRecv(void *to, size_t count, ncclDataType_t type, int from, ncclComm_t c, cudaStream_t s) {
    return note_message(s, c, false, to, (int64_t)count * nccl_element(type), from);
}
}

// ---- Tensors that the trainer gets from Fsdp, by address

// Weights and outputs of kernels have separate tables, because a transient embedding lies where the root's gradient
// will be.
typedef enum { WEIGHT, WRITTEN, NUM_TABLES } TensorTable;

// layer: for which layer the trainer got this address last. It expects that layer's content there.
typedef struct {
    const void *at;
    int64_t bytes, layer;  // NO_LAYER: gradient of the inputs
    int64_t trainer;       // number of its trainer
} Tensor;

// Contiguous tensors of a unit. offset: elements from the start of the segment.
typedef struct {
    int segment;
    int64_t offset, elements;
} Part;

enum { MAX_TENSORS = 1 << 10, MAX_PARTS = 16 };
static Tensor tensors[NUM_TABLES][MAX_TENSORS];  // hash tables; entries of earlier trainers are free
static int64_t num_trainers;                     // number of trainers so far, which is the number of the current one
static Part parts[2][MAX_PARTS];                 // parts of the root and of a layer
static int num_parts[2];

// Returns the tensor's entry, or a free one for it.
static Tensor *tensor_place(TensorTable table, const void *at) {
    Tensor *all = tensors[table];
    uint64_t i = ((uint64_t)(uintptr_t)at * 0x9e3779b97f4a7c15ull) >> 54;
    for (int tries = 0; all[i].trainer == num_trainers && all[i].at != at; i = (i + 1) % MAX_TENSORS)
        if (++tries == MAX_TENSORS) die("more than %d tensors", MAX_TENSORS);
    return &all[i];
}

// Returns NULL if the trainer has not got this tensor.
static const Tensor *tensor_find(TensorTable table, const void *at) {
    const Tensor *t = at ? tensor_place(table, at) : NULL;
    return t && t->trainer == num_trainers ? t : NULL;
}

static void tensor_add(TensorTable table, const void *at, int64_t bytes, int64_t layer) {
    const Tensor t = {at, bytes, layer, num_trainers};
    *tensor_place(table, at) = t;
}

static void find_parts(const ParameterTable *table) {
    memset(num_parts, 0, sizeof num_parts);
    for (int64_t i = 0; i < table->count && table->entries[i].layer <= 0; i++) {
        const Parameter *p = &table->entries[i];
        const int unit = p->layer == ROOT ? 0 : 1, segment = parameter_segment(p);
        const int64_t begin = layer_offset(table, p->layer) + segment_begin(segment_sizes(table, p->layer), segment);
        int n = num_parts[unit];
        if (p->flags & PARAM_JOINED)  // joins the latest part of its segment
            while (parts[unit][--n].segment != segment) continue;
        else parts[unit][num_parts[unit]++].offset = p->offset - begin;
        parts[unit][n].segment = segment;
        parts[unit][n].elements = p->offset - begin + parameter_elements(p) - parts[unit][n].offset;
    }
}

static bf16 *segment_of(FsdpUnit u, int segment) {
    return segment == SEGMENT_VECTORS ? u.vectors : segment == SEGMENT_MATRICES ? u.matrices : u.embedding;
}

static FsdpUnit unit_add(TensorTable table, FsdpUnit u, int64_t l) {
    for (int i = 0; i < num_parts[l != ROOT]; i++) {
        const Part *part = &parts[l != ROOT][i];
        const bf16 *segment = segment_of(u, part->segment);
        if (segment) tensor_add(table, segment + part->offset, part->elements * (int64_t)sizeof(bf16), l);
    }
    return u;
}

static FsdpUnit trainer_weights(const Fsdp *f, int64_t l) { return unit_add(WEIGHT, fsdp_weights(f, l), l); }
static FsdpUnit trainer_gradients(const Fsdp *f, int64_t l) { return unit_add(WRITTEN, fsdp_gradients(f, l), l); }

static QTensor trainer_weight(const Fsdp *f, int64_t l, LinearId id) {
    const QTensor w = fsdp_weight(f, l, id);
    const int64_t elements = f->plan.precision->linear[id].N * f->plan.precision->linear[id].K;
    if (w.data) tensor_add(WEIGHT, w.data, elements * (int64_t)sizeof(bf16), l);
    if (w.rowwise) tensor_add(WEIGHT, w.rowwise, elements, l);
    if (w.columnwise) tensor_add(WEIGHT, w.columnwise, elements, l);
    return w;
}

// ---- Replacements of what train_fp8.cu calls

static cudaStream_t computing(void) { return stream_handle(now - ranks, COMPUTE); }
static int64_t gradients_now(int64_t l, int64_t over) { return gradients_of(now->gradient_step, now->micro, l, over); }

// Returns the bytes from an address to the end of the slot that contains it; 0: no slot does.
static int64_t left_in_slot(const void *at) {
    for (int64_t l = 0; now->slots && l < now->f->plan.table->num_layers; l++) {
        const KeptSpan *slot = &now->slots[l];
        if ((const char *)at >= slot->begin && (const char *)at < slot->begin + slot->bytes)
            return slot->begin + slot->bytes - (const char *)at;
    }
    return 0;
}

// Record an access of a kernel to the first bytes of a tensor, if it is in a slot. So copies that race with the access
// are found.
static void note_kept_read(const void *at) {
    if (left_in_slot(at)) note_read(computing(), at, min_i64(ARENA_ALIGNMENT, left_in_slot(at)), ORDER_ANY);
}
static void note_kept_write(const void *at) {
    if (left_in_slot(at))
        note_write(computing(), at, min_i64(ARENA_ALIGNMENT, left_in_slot(at)),
                   activations_of(now->gradient_step, now->micro, now->kept_layer));
}

// Records that forward of a layer writes all that it keeps, or that backward reads it.
static void note_kept_layer(void) {
    const KeptSpan *slot = &now->slots[now->kept_layer];
    const int64_t content = activations_of(now->gradient_step, now->micro, now->kept_layer);
    if (now->kept_backward) note_read(computing(), slot->begin, slot->bytes, content);
    else note_write(computing(), slot->begin, slot->bytes, content);
}

static void tensor_read(const void *at) {
    note_kept_read(at);
    const Tensor *weight = tensor_find(WEIGHT, at);
    if (weight) note_read(computing(), at, weight->bytes, weights_of(now->step, weight->layer));
}

static void tensor_write(const void *at) {
    note_kept_write(at);
    const Tensor *t = tensor_find(WRITTEN, at);
    if (t) note_write(computing(), at, t->bytes, gradients_now(t->layer == NO_LAYER ? (int64_t)INPUTS : t->layer, 1));
}

// Records what a launcher does with an argument, by its declared type. Activations belong to one stream and are not
// recorded, except in slots.
template <class T>
struct Argument {
    static void read(T) {}
    static void write(T) {}
};
template <class T>
struct Argument<const T *> {
    static void read(const T *p) { tensor_read(p); }
    static void write(const T *) {}
};
template <class T>
struct Argument<T *> {
    static void read(T *) {}
    static void write(T *p) { tensor_write(p); }
};
template <>
struct Argument<cudaStream_t> {
    static void read(cudaStream_t s) {
        if (s != computing()) die("a kernel of the model on another stream");
    }
    static void write(cudaStream_t) {}
};
template <>
struct Argument<RmsnormSource> {
    static void read(RmsnormSource s) { tensor_read(s.weight); }
    static void write(RmsnormSource) {}
};

// Records a launcher's call. Returns 0 in place of bytes moved or FLOPs, which launchers return for the profile.
template <class R, class... P>
static R called(R (*)(P...), typename AsDeclared<P>::type... arguments) {
    (Argument<P>::read(arguments), ...);
    (Argument<P>::write(arguments), ...);
    return R();
}

// Turns an integer back into a pointer: NULL becomes an integer when a template passes it on.
struct GivenInteger {
    long value;
    template <class T>
    operator T() const {
        return (T)value;
    }
};
template <class T>
struct Given {
    typedef T type;
};
template <>
struct Given<long> {
    typedef GivenInteger type;
};

// train_fp8.cu has functions with the names of these launchers too. They take a Trainer *, and no launcher does.
#define LAUNCHER(f)                                                                                         \
    template <class... A>                                                                                   \
    static auto called_##f(A... arguments) -> decltype(called(&f, typename Given<A>::type{arguments}...)) { \
        return called(&f, typename Given<A>::type{arguments}...);                                           \
    }
LAUNCHER(attention_backward)
LAUNCHER(bias_backward)
LAUNCHER(qknorm_rope_backward)
LAUNCHER(rmsnorm_backward)
LAUNCHER(swiglu_backward)

template <class Source>
static int64_t called_source(const char *, const QTensor &, const Source &source, int64_t, int64_t, cudaStream_t s) {
    Argument<Source>::read(source);
    Argument<cudaStream_t>::read(s);
    return 0;
}

// Logits may share memory with weights. In a GEMM of lm_head, an operand at the address of the logits is the logits.
static void called_gemm(const Gemm *, GemmPlan *p, bf16 *d, const QTensor *a, const QTensor *b, const bf16 *bias,
                        bool) {
    const bool head = strcmp(p->layer, "lm_head") == 0;
    const void *data_a = gemm_data(p, 0, a), *data_b = gemm_data(p, 1, b);
    if (p->kind == GEMM_WGRAD ? !tensor_find(WRITTEN, d) : !tensor_find(WEIGHT, data_a))
        die("a GEMM of %s with a weight or a weight gradient that is not Fsdp's", p->layer);
    if (!head || data_a != now->logits) tensor_read(data_a);
    if (!head || data_b != now->logits) tensor_read(data_b);
    tensor_read(bias);
    if (!head || d != now->logits) return tensor_write(d);
    note_write(computing(), d, p->R * p->N * (int64_t)sizeof(bf16), gradients_now(LOGITS, 1));
}

static void called_cross_entropy(float *, bf16 *, const int32_t *, int64_t, int64_t, int64_t, cudaStream_t) {}
static int64_t called_cross_entropy_gradient(float *, bf16 *, const int32_t *, int64_t, int64_t, int64_t, float,
                                             uint32_t, ProducedCodes, cudaStream_t) {
    return 0;
}

// Records that the embedding's gradient is added to what is in its memory. If the embedding is tied, that must be
// lm_head's gradient.
template <class Sum>
static int64_t called_embedding(Sum *to, EmbeddingPart part, const bf16 *dx, const int32_t *, int64_t R, int64_t C,
                                GradientSum, bool, cudaStream_t) {
    const Fsdp *f = now->f;
    const bool tied = embedding_segment(f->plan.table) == SEGMENT_MATRICES;
    // If the embedding joins the sums, `to` is reduced, and its padding counts as gradient. Else `to` is not reduced
    // yet, and the padding behind a tied embedding is zero.
    const int64_t count = tied && !fsdp_embedding_joins(f) ? f->plan.root_elements[SEGMENT_MATRICES] : part.count;
    const int64_t over = fsdp_input_ranks(f), bytes = count * (int64_t)sizeof(Sum);
    note_read(computing(), dx, R * C * (int64_t)sizeof(bf16), gradients_now(INPUTS, 1));
    note_read(computing(), to, bytes, tied ? gradients_now(ROOT, over) : ORDER_ANY);
    note_write(computing(), to, bytes, gradients_now(ROOT, over));
    return 0;
}

// Records that this rank writes its number for the micro-step. The other numbers count as written too: they are 0 here,
// and the all-reduce fills them.
static int64_t losses_bytes(void);
static void called_loss_sum(double *, const float *, int64_t, cudaStream_t) {
    note_write(computing(), now->losses, losses_bytes(), gradients_now(STATISTICS, 1));
}

static void called_loss_mean(float *out, const double *sums, int64_t, double, cudaStream_t) {
    note_read(computing(), sums, losses_bytes(), gradients_now(STATISTICS, now->f->plan.world));
    note_write(computing(), out, sizeof *out, gradients_now(STATISTICS, now->f->plan.world));
}

// Reads this rank's FP8 sums of a layer.
static void read_reduced_codes(int64_t l) {
    const GradientFp8Layout *a = &now->f->gradients.fp8_layout;
    const GradientFp8 sums = gradient_fp8_of_layer(now->f->gradients.fp8_sums, a, l);
    note_read(computing(), sums.codes, a->matrices, gradients_now(l, now->f->plan.world));
    note_read(computing(), sums.scale_inv, a->entries * (int64_t)sizeof *sums.scale_inv, gradients_now(l, 0));
}

// Reads this rank's sums of `count` units from unit l on, which begin at element `at`.
static void read_reduced_gradients(int64_t l, int64_t count, int64_t at) {
    const Transport *t = &now->f->transport;
    const int64_t element = t->fp32_sums ? (int64_t)sizeof(float) : (int64_t)sizeof(bf16);
    char *sums = t->fp32_sums ? (char *)t->sums_fp32 : (char *)t->sums;
    for (const int64_t end = l + count; l < end; l++) {
        const bool fp8 = now->f->plan.fp8_gradients && l != ROOT;
        const int64_t n = fp8 ? now->f->gradients.fp8_layout.vectors : shard_elements(&now->f->plan.shard, l);
        note_read(computing(), sums + at * element, n * element, gradients_now(l, now->f->plan.world));
        if (fp8) read_reduced_codes(l);
        at += n;
    }
}

// Writes the weights of version `step` of `count` units from unit l on.
static void write_weights(int64_t l, int64_t count, int64_t step) {
    const ShardPlan *plan = &now->f->plan.shard;
    for (const int64_t end = l + count; l < end; l++)
        note_write(computing(), now->f->in.weights + shard_begin(plan, l),
                   shard_elements(plan, l) * (int64_t)sizeof(bf16), weights_of(step, l));
}

// Records that the sums of squares of the blocks of `count` units from unit l on are written.
static void write_block_squares(const double *blocks, int64_t l, int64_t count) {
    note_write(computing(), blocks, count * adamw_unit_blocks(&now->f->plan.shard, l) * (int64_t)sizeof *blocks,
               gradients_now(STATISTICS, 1));
}

static int64_t num_units(void) { return now->f->plan.table->num_layers + 1; }

// Reads of weights expect version now->step, which is raised when the root is updated. With --optimizer-in-backward
// that is a step's last update, since backward still reads old weights between the updates of layers. Else it is the
// first.
static void called_update_units(const AdamwUpdate *w, const ParameterTable *, const ShardPlan *, int64_t l,
                                int64_t count, int64_t first_gradient, cudaStream_t) {
    read_reduced_gradients(l, count, first_gradient);
    write_weights(l, count, now->gradient_step + 1);
    if (w->squares && now->f->plan.any_ranks)
        write_block_squares(w->squares + adamw_first_block(&now->f->plan.shard, l), l, count);
    if (l == ROOT) now->step = now->gradient_step + 1;
    for (int64_t i = 0; w->amax && l != ROOT && i < count; i++)
        note_write(computing(), w->amax + (l + i) * w->amax_stride, NUM_LINEARS * (int64_t)sizeof *w->amax,
                   ORDER_UNWRITTEN);
}

// An update that also writes the codes of this rank's slices of matrices.
static void called_update_coded(const AdamwUpdate *w, const AdamwCodes *codes, const ParameterTable *t,
                                const ShardPlan *plan, int64_t l, int64_t count, int64_t first_gradient,
                                cudaStream_t stream) {
    called_update_units(w, t, plan, l, count, first_gradient, stream);
    for (int64_t i = l; i < l + count; i++)
        note_write(computing(), codes->codes + i * codes->stride, codes->stride, weights_of(now->gradient_step + 1, i));
}

// Returns the unit that holds an element of this rank's shard.
static int64_t unit_of(int64_t element) {
    int64_t l = ROOT;
    while (element >= shard_begin(&now->f->plan.shard, l) + shard_elements(&now->f->plan.shard, l)) l++;
    return l;
}

// Records the update of an offloaded array in a slot, which must hold what the last step has left.
static void note_offloaded(const void *slot, int array, int64_t bytes, const AdamwUnits *u) {
    const char *at = (const char *)((intptr_t)slot + u->first * bytes);
    if (is_pinned(at)) die("an update of an array in host memory");
    note_read(computing(), at, u->size * bytes, offloaded_of(now->gradient_step, array, u->first));
    note_write(computing(), at, u->size * bytes, offloaded_of(now->gradient_step + 1, array, u->first));
}

static int64_t offloaded_bytes(int array);

// Records the update of a part of a unit.
static void called_launch(const AdamwUpdate *w, const AdamwUnits *u, cudaStream_t) {
    const int64_t l = unit_of(u->first);
    const AdamwGradients g = adamw_shift_gradients(w->arrays.gradients, u->first);
    const void *const arrays[] = {w->arrays.exp_avg, w->arrays.exp_avg_sq, w->arrays.master};
    note_read(computing(), g.fp32_data ? (const void *)g.fp32_data : (const void *)g.bf16_data,
              u->size * (g.fp32_data ? 4 : 2), gradients_now(l, now->f->plan.world));
    for (int k = 0; k < 3; k++)
        if (offloaded_bytes(k)) note_offloaded(arrays[k], k, offloaded_bytes(k), u);
    note_write(computing(), now->f->in.weights + u->first, u->size * (int64_t)sizeof(bf16),
               weights_of(now->gradient_step + 1, l));
    if (l == ROOT) now->step = now->gradient_step + 1;
    if (w->amax && l != ROOT)
        note_write(computing(), w->amax + l * w->amax_stride, NUM_LINEARS * (int64_t)sizeof *w->amax, ORDER_UNWRITTEN);
}

// Records a read of fp32 masters, from which bf16 weights are made. No recorded operation has written them before.
static void called_round(bf16 *, const float *master, int64_t n, cudaStream_t) {
    note_read(computing(), master, n * (int64_t)sizeof *master, ORDER_UNWRITTEN);
}

static void *trainer_pinned(const char *, int64_t bytes) {
    void *memory = order_base(now - ranks) + PINNED_BEGIN + now->pinned;
    now->pinned += round_up(bytes, ARENA_ALIGNMENT);
    return memory;
}

static void squares_computed(void) {
    note_write(computing(), now->squares, sizeof *now->squares, gradients_now(STATISTICS, 1));
}

static int64_t called_squares(const Fsdp *f, double *, double *blocks, AdamwGradients) {
    read_reduced_gradients(ROOT, num_units(), 0);
    if (!f->plan.any_ranks) return squares_computed(), 0;
    write_block_squares(blocks, ROOT, 1);
    write_block_squares(blocks + adamw_first_block(&f->plan.shard, 0), 0, f->plan.table->num_layers);
    return 0;
}

static void called_updated_squares(double *, const AdamwUpdate *, const ParameterTable *, const ShardPlan *,
                                   cudaStream_t) {
    squares_computed();
}

static void called_norm(AdamwControl *, const double *squares, const float *, int64_t, float, cudaStream_t) {
    const int64_t over = fsdp_is_sharded(now->f) ? now->f->plan.world : 1;
    note_read(computing(), squares, sizeof *squares, gradients_now(STATISTICS, over));
}

static void called_locate(AdamwControl *, AdamwGradients, BackwardOrder, cudaStream_t) {
    read_reduced_gradients(ROOT, num_units(), 0);
}

static void trainer_begin_step(Fsdp *f, int64_t step) {
    now->gradient_step = now->step;
    fsdp_begin_step(f, step);
}

static void trainer_begin_micro_step(Fsdp *f, int64_t micro) {
    now->micro = micro;
    fsdp_begin_micro_step(f, micro);
}

// Checks that all of a unit's gradient that is to be reduced has been written in this micro-step, and that its padding
// is zero, except behind an embedding that is not tied. From here on the padding counts as gradient.
static void check_computed(const Fsdp *f, int64_t l) {
    const FsdpUnit u = fsdp_gradients(f, l);
    int64_t end[NUM_SEGMENTS] = {0};
    for (int i = 0; i < num_parts[l != ROOT]; i++) {
        const Part *part = &parts[l != ROOT][i];
        if (part->segment >= fsdp_reduced_segments(f)) continue;
        const bf16 *at = segment_of(u, part->segment) + part->offset;
        const int64_t gap = part->offset - end[part->segment];
        if (gap) note_read(computing(), at - gap, gap * (int64_t)sizeof(bf16), ORDER_UNWRITTEN);
        note_read(computing(), at, part->elements * (int64_t)sizeof(bf16), gradients_now(l, 1));
        end[part->segment] = part->offset + part->elements;
    }
    for (int k = 0; k < fsdp_reduced_segments(f); k++) {
        const int64_t whole = f->plan.shard.shard_size * slice_sizes(&f->plan.shard, l)[k], gap = whole - end[k];
        bf16 *at = segment_of(u, k);
        if (gap && k != SEGMENT_EMBEDDING)
            note_read(computing(), at + end[k], gap * (int64_t)sizeof(bf16), ORDER_UNWRITTEN);
        if (whole) note_write(computing(), at, whole * (int64_t)sizeof(bf16), gradients_now(l, 1));
    }
}

static bool call_is_omitted(const char *name) { return is_omitted(computing(), name, 0); }

static void begin_reduction(int64_t l) { now->unit = l, now->call = now->nccl->enqueued; }

static int64_t trainer_reduce_scatter(Fsdp *f, int64_t l) {
    check_computed(f, l);
    begin_reduction(l);
    const int64_t bytes = call_is_omitted("fsdp_reduce_scatter") ? 0 : fsdp_reduce_scatter(f, l);
    now->call = -1;
    return bytes;
}

static void trainer_reduce_replicas(Fsdp *f, int64_t l, bool last) {
    begin_reduction(l);
    now->to_replicas = true;
    if (!call_is_omitted("fsdp_reduce_replicas")) fsdp_reduce_replicas(f, l, last);
    now->to_replicas = false, now->call = -1;
}

static void trainer_unshard(Fsdp *f, int64_t l, bool backward) {
    now->kept_layer = l, now->kept_backward = backward;
    if (now->slots) note_kept_layer();
    if (!call_is_omitted("fsdp_unshard")) fsdp_unshard(f, l, backward);
}

static void trainer_reshard(Fsdp *f, int64_t l) {
    if (now->slots) note_kept_layer();
    if (!call_is_omitted("fsdp_reshard")) fsdp_reshard(f, l);
}

static void trainer_begin_gradients(Fsdp *f, int64_t l) {
    if (!call_is_omitted("fsdp_begin_gradients")) fsdp_begin_gradients(f, l);
}

static void trainer_publish_root(Fsdp *f) {
    if (!call_is_omitted("fsdp_publish_root")) fsdp_publish_root(f);
}

static void trainer_publish_layers(Fsdp *f) {
    if (!call_is_omitted("fsdp_publish_layers")) fsdp_publish_layers(f);
}

// Creates the communicators of the groups, as nccl_open does: a group of all ranks uses the world's.
static void trainer_nccl_open(Nccl *n, const Comm *c) {
    const int64_t sizes[] = {c->world, c->shard_size, c->replicas}, numbers[] = {0, c->replica, c->shard_rank};
    memset(n, 0, sizeof *n);
    for (int g = 0; g < COMM_NUM_GROUPS; g++) {
        int *group = sizes[g] == c->world ? &groups[COMM_WORLD][0] : &groups[g][numbers[g]];
        *group = (int)sizes[g];
        n->comms[g] = sizes[g] > 1 ? (ncclComm_t)group : NULL;
    }
    n->stream = stream_handle(c->rank, COMMUNICATION);
    for (int i = 0; i < NCCL_PENDING; i++) event_create(&n->operations[i].begun), event_create(&n->operations[i].done);
}

// Replaces transport_open_peers, as on a machine where copy engines work.
static bool trainer_open_peers(Transport *t, const Comm *c, char *, int64_t, char *, size_t) {
    PeerMemory *p = &t->peers;
    p->ranks = c->shard_size, p->rank = c->shard_rank;
    for (int64_t i = 0; i < p->ranks; i++) p->base[i] = order_base(c->rank - p->rank + i);
    p->arrivals = t->arrivals;
    p->enqueue = note_memory_operations;
    return true;
}

static cudaError_t trainer_malloc(void **memory, size_t bytes) {
    *memory = order_base(now - ranks);
    if ((int64_t)bytes > PINNED_BEGIN) die("%lld bytes of GPU memory", (long long)bytes);
    order_memory(now - ranks, PINNED_END);
    return cudaSuccess;
}

static cudaError_t trainer_memory_info(size_t *available, size_t *total) {
    *available = *total = (size_t)ORDER_MEMORY_STRIDE;
    return cudaSuccess;
}

// Replaces cudaMemcpy, by which the trainer copies the loss of a validation, or logits, to the host.
static cudaError_t trainer_memcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    if (from == now->loss) note_statistics(computing());
    memset(to, 0, bytes);
    return cudaSuccess;
}

static GemmPlan trainer_gemm(const char *layer, GemmKind kind, int64_t R, int64_t N, int64_t K, GemmSpec spec, bool) {
    GemmPlan p;
    memset(&p, 0, sizeof p);
    p.layer = layer, p.kind = kind, p.R = R, p.N = N, p.K = K, p.spec = spec;
    return p;
}

// Replacements of functions that do not matter for the order.
template <class... A>
static inline void ignored(A...) {}

static void trainer_batch(DataLoader *, int64_t, int64_t, int32_t *, int32_t *) {}
static void trainer_gemm_choose(const Gemm *, GemmPlan *, bf16 *, const QTensor *, const QTensor *, const bf16 *) {}

#define CALLED(function, ...) called(&(function), __VA_ARGS__)
#define adamw_launch called_launch
#define adamw_locate called_locate
#define adamw_locate_block ignored
#define adamw_norm called_norm
#define adamw_update_coded called_update_coded
#define adamw_update_units called_update_units
#define adamw_updated_squares called_updated_squares
#define attention_backward called_attention_backward
#define attention_forward(...) CALLED(attention_forward, __VA_ARGS__)
#define bias_backward called_bias_backward
#define cross_entropy_loss called_cross_entropy
#define cross_entropy_loss_and_gradient called_cross_entropy_gradient
#define embedding_backward called_embedding
#define embedding_forward(...) CALLED(embedding_forward, __VA_ARGS__)
#define gemm_run called_gemm
#define loss_mean called_loss_mean
#define loss_sum called_loss_sum
#define qknorm_rope_backward called_qknorm_rope_backward
#define qknorm_rope_forward(...) CALLED(qknorm_rope_forward, __VA_ARGS__)
#define quantize_amax_source called_source
#define quantize_source called_source
#define residual_rmsnorm_forward(...) CALLED(residual_rmsnorm_forward, __VA_ARGS__)
#define rmsnorm_backward called_rmsnorm_backward
#define round_weights called_round
#define rmsnorm_forward(...) CALLED(rmsnorm_forward, __VA_ARGS__)
#define swiglu_backward called_swiglu_backward
#define swiglu_backward_amax(...) CALLED(swiglu_backward_amax, __VA_ARGS__)
#define swiglu_forward(...) CALLED(swiglu_forward, __VA_ARGS__)
#define tensor_amax(...) CALLED(tensor_amax, __VA_ARGS__)

#define fsdp_squares called_squares
#define fsdp_begin_gradients trainer_begin_gradients
#define fsdp_begin_micro_step trainer_begin_micro_step
#define fsdp_begin_step trainer_begin_step
#define fsdp_gradients trainer_gradients
#define fsdp_publish_layers trainer_publish_layers
#define fsdp_publish_root trainer_publish_root
#define fsdp_reduce_replicas trainer_reduce_replicas
#define fsdp_reduce_scatter trainer_reduce_scatter
#define fsdp_reshard trainer_reshard
#define fsdp_unshard trainer_unshard
#define fsdp_weight trainer_weight
#define fsdp_weights trainer_weights

#define cublasLtCreate(...) CUBLAS_STATUS_SUCCESS
#define cublasLtDestroy(...) CUBLAS_STATUS_SUCCESS
#define cudaFree(...) cudaSuccess
#define cudaMalloc trainer_malloc
#define cudaMemGetInfo trainer_memory_info
#define cudaMemcpy trainer_memcpy
#define dataloader_batch trainer_batch
#define dataloader_whole_batch ignored
#define embedding_sort ignored
#define gemm_choose trainer_gemm_choose
#define gemm_describe trainer_gemm
#define gemm_open_cache ignored
#define host_memory_pinned trainer_pinned
#define initialize_parameters ignored
#define nccl_close ignored
#define nccl_open trainer_nccl_open
#define rope_table_upload ignored
#define stop_requested(...) 0
#define transport_open_peers trainer_open_peers

#include "../../train_fp8.cu"

// ---- Cases

typedef struct {
    int precision, recipe, sharding, gather, reduce, recompute, copies;
    const char *filter;
    int64_t world, layers, accumulation;
    bool untied, many_tokens, clips, in_backward;
    const char *offload;  // NULL: none
    bool fp8_gradients, any_ranks;
} Case;

static Trainer trainers[ORDER_MAX_RANKS];

static int64_t losses_bytes(void) { return micro_batches(&trainers[now - ranks]) * (int64_t)sizeof(double); }

static int64_t offloaded_bytes(int array) { return now->offload->bytes[array]; }

static const char *offload_event_name(const Rank *r, cudaEvent_t e) {
    for (int i = 0; r->copies_kept && i < KEPT_SLOTS; i++) {
        if (e == r->offload->kept.used[i]) return r->kept_backward ? "used in backward" : "used in forward";
        if (e == r->offload->kept.copied[i]) return r->kept_backward ? "copied in backward" : "copied in forward";
    }
    for (int64_t i = 0; i < r->offload->num_slots; i++) {
        const OffloadSlot *s = &r->offload->slots[i];
        if (e == s->loaded || e == s->updated || e == s->stored)
            return e == s->loaded ? "loaded" : e == s->updated ? "updated" : "stored";
    }
    return NULL;
}

// Returns the name of the rank's buffer that contains an address.
static const char *buffer_name(int64_t rank, const char *address) {
    const Trainer *t = &trainers[rank];
    const Fsdp *f = &t->fsdp;
    const AdamwArrays *p = &t->params;
    const struct {
        const char *name;
        const void *begin;
    } all[] = {{"weights", p->weights},
               {"master", p->master},
               {"sums", f->transport.sums},
               {"sums_fp32", f->transport.sums_fp32},
               {"amax", t->linears.scales.amax},
               {"squares", t->step.squares},
               {"losses", t->step.losses},
               {"workspace of the GEMMs", t->linears.gemm.workspace},
               {"workspace of a unit's squares", f->clip.adamw.workspace},
               {"squares of a unit", f->clip.adamw.squares},
               {"stats", t->step.stats},
               {"dx", t->acts.dx},
               {"logits", t->acts.logits},
               {"shard_fp8", f->weights.shard_fp8},
               {"rows", f->weights.rowwise},
               {"cols", f->weights.columnwise},
               {"root", f->weights.root},
               {"vectors", f->weights.vectors},
               {"slots", f->weights.slots},
               {"root_buffer", f->gradients.root_buffer},
               {"layer_buffer[0]", f->gradients.layer_buffer[0]},
               {"layer_buffer[1]", f->gradients.layer_buffer[1]},
               {"codes of gradients", f->gradients.fp8_sums.codes},
               {"scales of gradients", f->gradients.fp8_sums.scale_inv},
               {"amaxes of gradients", f->gradients.fp8_sums.amaxes},
               {"codes that are sent", f->gradients.fp8_sent.codes},
               {"scales of codes that are sent", f->gradients.fp8_sent.scale_inv},
               {"amaxes of codes that are sent", f->gradients.fp8_sent.amaxes},
               {"codes that are received", f->gradients.fp8_received},
               {"fp8_reduced", f->gradients.fp8_reduced},
               {"staging", f->transport.staging},
               {"received", f->transport.received},
               {"a slot of offloaded parts", t->offload.slots[0].array[OFFLOAD_EXP_AVG]},
               {"a slot of offloaded parts", t->offload.slots[0].array[OFFLOAD_MASTER]},
               {"a slot of activations", t->acts.kept[0].begin},
               {"offloaded activations", t->offload.kept.host},
               {"an offloaded array", t->offload.host[OFFLOAD_EXP_AVG]},
               {"an offloaded array", t->offload.host[OFFLOAD_MASTER]},
               {"arrivals", f->transport.arrivals}};
    int found = 0;
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++)
        if (all[i].begin && all[i].begin <= address && all[i].begin >= all[found].begin) found = i;
    return all[found].name;
}

static void create_rank(const Options *o, const ModelConfig *m, int64_t world, int64_t rank) {
    Rank *r = now = &ranks[rank];
    Trainer *t = &trainers[rank];
    memset(r, 0, sizeof *r);
    r->operation = r->call = -1;
    r->comm = comm_one();
    r->comm.world = world, r->comm.rank = rank;
    comm_split(&r->comm, options_shard_group(o, world));
    r->f = &t->fsdp, r->nccl = &t->nccl, r->offload = &t->offload;
    creating = true;
    const Arena plan = trainer_describe(t, o, m, &r->comm);
    r->copies_kept = kept_leaving(&t->offload.kept) > 0;
    trainer_create(t, &plan);
    r->slots = t->offload.kept.kept;
    creating = false;
    r->logits = t->acts.logits, r->squares = t->step.squares, r->losses = t->step.losses,
    r->loss = &t->step.stats->loss;
    num_trainers++;
    find_parts(&t->table);
    tensor_add(WRITTEN, t->acts.dx, t->d.R * t->d.C * (int64_t)sizeof(bf16), NO_LAYER);
}

static void destroy_rank(int64_t rank) {
    now = &ranks[rank];
    creating = true;
    trainer_destroy(&trainers[rank]);
    creating = false;
}

// Enqueues a run like the trainer's: loaded weights, three steps, a sample after the first, a validation after the
// second.
static void enqueue_steps(Rank *r, const Options *o) {
    static Run run;
    run.ops = &trainer_ops, run.trainer = &trainers[r - ranks], run.options = *o, run.comm = r->comm;
    DataLoader *data = &run.setup.val;
    data->T = o->sequence_length;
    r->step++;
    write_weights(ROOT, num_units(), r->step);
    run.ops->weights_changed(run.trainer);
    for (int64_t step = 0; step < 3; step++) {
        const int32_t token = 0;
        run.ops->start_step(run.trainer, data, step, 0, 0, true);
        if (step == 0) run.ops->next_logits(run.trainer, &token, 1);
        for (int64_t batch = 0; step == 1 && batch < 2; batch++) run.ops->token_losses(run.trainer, data, batch);
    }
}

// Enqueues the run on all ranks and runs it. `seed` gives the order of streams.
static void run_case(const Case *c, uint64_t seed) {
    ModelConfig m;
    // With this vocabulary, the root's slices are larger than those of a layer of `small`. Layers of llama3.2-1b are so
    // large that a rank of a shard group of at most 3 ranks offloads its slice of a layer in several parts.
    model_config_preset(&m, c->offload ? "llama3.2-1b" : "small");
    m.vocab_size = 8192, m.num_layers = c->layers, m.tie_word_embeddings = !c->untied;
    Options o = options_default();
    o.precision = c->precision, o.fp8_recipe = c->recipe, o.sharding = c->sharding, o.fp8_all_gather = c->gather,
    o.reduce_dtype = c->reduce, o.shard_size = c->sharding == SHARDING_HYBRID ? 2 : 0;
    o.recompute = c->recompute, o.copy_engines = c->copies, o.grad_accumulation_steps = c->accumulation;
    o.batch_size = 1,
    o.sequence_length = c->many_tokens ? m.vocab_size : 512;  // many: a shard group's inputs exceed the embedding
    o.fp8_filter = c->filter, o.grad_clip = c->clips ? 1 : 0, o.optimizer_in_backward = c->in_backward,
    o.val_steps = 2 * c->world;
    o.deterministic = c->any_ranks;
    if (c->fp8_gradients) o.grad_accum_dtype = SUM_FP8;
    if (c->offload) o.offload = c->offload;
    if (options_offloaded(&o).master) o.master_weights = STORAGE_FP32;
    options_resolve(&o);
    num_events = copied = left_group = host_used = 0;
    order_begin(c->world, stream_names, buffer_name);
    for (int64_t rank = 0; rank < c->world; rank++) {
        create_rank(&o, &m, c->world, rank);
        enqueue_steps(now, &o);
    }
    order_run(seed);
    for (int64_t rank = 0; rank < c->world; rank++) destroy_rank(rank);
}

static void check_case(const Case *c) {
    run_case(c, 1);
    CHECK(order.races == 0 && order.wrong == 0 && order.stuck == 0,
          "precision %d, recipe %d, filter \"%s\", sharding %d, gather %d, reduce %d, recompute %d, copies "
          "%d, %lld ranks, %lld layers, accumulation %lld, untied %d, many tokens %d, clips %d, in backward %d, "
          "FP8 gradients %d, any ranks %d: no race, wrong content or stuck stream (found %lld, %lld, %lld); %s",
          c->precision, c->recipe, c->filter, c->sharding, c->gather, c->reduce, c->recompute, c->copies,
          (long long)c->world, (long long)c->layers, (long long)c->accumulation, c->untied, c->many_tokens, c->clips,
          c->in_backward, c->fp8_gradients, c->any_ranks, (long long)order.races, (long long)order.wrong,
          (long long)order.stuck, order.problem);
    if (c->sharding != SHARDING_FULL && c->sharding != SHARDING_HYBRID) return;
    CHECK(left_group == 0, "no copy and no signal leaves a shard group; found %lld", (long long)left_group);
    CHECK((copied > 0) == (c->copies == ON),
          "a rank copies other ranks' memory if and only if --copy-engines is on; it is %d, and there are %lld copies",
          c->copies, (long long)copied);
}

// Returns a case with one micro-step, tensorwise FP8 and no other choice.
static Case fp8_case(int sharding, int copies, int64_t world, int64_t layers) {
    Case c;
    memset(&c, 0, sizeof c);
    c.precision = PRECISION_FP8, c.recipe = RECIPE_TENSORWISE, c.recompute = RECOMPUTE_NONE, c.filter = "";
    c.sharding = sharding, c.gather = ON, c.reduce = REDUCE_BF16, c.copies = copies;
    c.world = world, c.layers = layers, c.accumulation = 1;
    return c;
}

// True if a case is checked. `sum` adds the places of its values in the loops that vary it. Of two cases that differ
// by one step of one loop, one is checked: so each choice of values for all of these loops but one is. ALL=1: every
// case.
static bool is_checked(int64_t sum) { return sum % 2 == 0 || getenv("ALL"); }

// Checks every sharding strategy (hybrid only with 4 ranks) with one precision and filter, with both reduce dtypes bf16
// and fp32, and with several numbers of layers and micro-steps; without copy engines and, unless sharding is none, with
// them. `gather_most`: OFF tests --fp8-all-gather off, ON tests off and on.
static void check_all(int64_t world, int precision, int recipe, const char *filter, int gather_most, int recompute) {
    const int64_t layers[] = {1, 2, 3, 6};
    for (int sharding = SHARDING_FULL; sharding <= (world == 4 ? SHARDING_HYBRID : SHARDING_NONE); sharding++)
        for (int copies = OFF; copies <= (sharding == SHARDING_NONE ? OFF : ON); copies++)
            for (int gather = OFF; gather <= gather_most; gather++)
                for (int reduce = REDUCE_BF16; reduce <= REDUCE_FP32; reduce++)
                    for (int i = 0; i < 4; i++)
                        for (int64_t accumulation = 1; accumulation < 4; accumulation++)
                            for (int ends = 0; ends < 8; ends++) {
                                if (!is_checked(reduce + i + accumulation + __builtin_popcount(ends)) ||
                                    !is_checked(world + (recompute == RECOMPUTE_LAYER) + sharding + copies + gather +
                                                i / 2))
                                    continue;
                                Case c = fp8_case(sharding, copies, world, layers[i]);
                                c.precision = precision, c.recipe = recipe, c.filter = filter, c.gather = gather;
                                c.reduce = reduce, c.recompute = recompute, c.accumulation = accumulation;
                                c.untied = ends % 2 > 0, c.many_tokens = ends / 2 % 2 > 0, c.clips = ends / 4 > 0;
                                check_case(&c);
                                c.in_backward = accumulation == 1;
                                if (c.in_backward) check_case(&c);
                            }
}

// Returns a case in which gradients are added in the order of samples.
static Case ordered_case(int precision, int recipe, int sharding, int copies, int64_t world, int64_t layers) {
    Case c = fp8_case(sharding, copies, world, layers);
    c.precision = precision, c.recipe = recipe;
    c.gather = precision == PRECISION_FP8 && recipe_has_tensor_scales(recipe_row(recipe)) ? ON : OFF;
    c.any_ranks = true;
    return c;
}

// Checks --deterministic with sharding full and grad_op, with copy engines and without.
static void check_ordered(int64_t world, int precision, int recipe) {
    for (int sharding : {SHARDING_FULL, SHARDING_GRAD_OP})
        for (int copies = OFF; copies <= ON; copies++)
            for (int64_t layers : {1, 3, 6})
                for (int64_t accumulation = 1; accumulation < 4; accumulation++)
                    for (int ends = 0; ends < 8; ends++) {
                        Case c = ordered_case(precision, recipe, sharding, copies, world, layers);
                        c.accumulation = accumulation, c.untied = ends % 2 > 0, c.many_tokens = ends / 2 % 2 > 0;
                        c.clips = ends / 4 > 0, c.reduce = ends % 2 ? REDUCE_FP32 : REDUCE_BF16;
                        check_case(&c);
                        c.in_backward = accumulation == 1;
                        if (c.in_backward) check_case(&c);
                    }
}

// Returns a case with FP8 gradients and one micro-step.
static Case fp8_gradient_case(int sharding, int copies, int reduce, int64_t world, int64_t layers) {
    Case c = fp8_case(sharding, copies, world, layers);
    c.reduce = reduce, c.fp8_gradients = true;
    return c;
}

// Checks FP8 gradients with every sharding strategy (hybrid only with 4 ranks), reduced in bf16 and in FP8, without
// copy engines and, unless sharding is none, with them.
static void check_fp8_gradients_of(int64_t world) {
    for (int sharding = SHARDING_FULL; sharding <= (world == 4 ? SHARDING_HYBRID : SHARDING_NONE); sharding++)
        for (int copies = OFF; copies <= (sharding == SHARDING_NONE ? OFF : ON); copies++)
            for (int reduce : {REDUCE_BF16, REDUCE_FP8})
                for (int64_t layers : {1, 2, 3, 6})
                    for (int64_t accumulation = 1; accumulation < 4; accumulation++)
                        for (int ends = 0; ends < 4; ends++) {
                            if (!is_checked(reduce + layers + accumulation + __builtin_popcount(ends))) continue;
                            Case c = fp8_gradient_case(sharding, copies, reduce, world, layers);
                            c.accumulation = accumulation, c.untied = ends % 2 > 0, c.many_tokens = ends / 2 > 0;
                            check_case(&c);
                        }
}

static void check_noticed(const Case *c, Omission left_out, uint64_t seed) {
    omission = left_out;
    run_case(c, seed);
    CHECK(order.races + order.wrong + order.stuck > 0,
          "sharding %d, copies %d: the test notices that \"%s\" %lld is left out", c->sharding, c->copies,
          omission.what, (long long)omission.number);
}

// Checks --offload. For moments and masters there are slots: with 6 layers for the parts of a layer and two more parts,
// with 1 and 2 layers for one part. With 6 layers, 6 - KEPT_SLOTS of them copy their activations to the host; with 1
// and 2, none does.
static void check_offload(int64_t world) {
    for (const char *offload : {"moments", "master", "moments,master", "activations", "moments,activations"})
        for (int sharding = SHARDING_FULL; sharding <= (world == 4 ? SHARDING_HYBRID : SHARDING_NONE); sharding++)
            for (int64_t layers : {1, 2, 6})
                for (int in_backward = 0; in_backward < 2; in_backward++)
                    for (int64_t accumulation = 1; accumulation <= 2 - in_backward; accumulation++) {
                        Case c = fp8_case(sharding, OFF, world, layers);
                        c.accumulation = accumulation, c.untied = layers == 2, c.clips = layers > 1;
                        c.in_backward = in_backward > 0, c.offload = offload;
                        check_case(&c);
                    }
}

// Checks that the test detects each of these omissions in each of three orders in which the streams run.
static void check_omissions(void) {
    const struct {
        Omission omission;
        int sharding, copies;
        bool in_backward;
        const char *offload;
    } all[] = {
        {{"reduce-scatter of the gradients", 0, -1}, SHARDING_FULL, ON, false, NULL},  // 0, 1: its two barriers
        {{"reduce-scatter of the gradients", 1, -1}, SHARDING_FULL, ON, false, NULL},
        {{"reduce-scatter of the gradients", 1, 0}, SHARDING_FULL, ON, false, NULL},
        {{"all-gather of the embedding's output gradients", 0, -1}, SHARDING_FULL, ON, false, NULL},
        {{"all-gather of the embedding's output gradients", 0, 2}, SHARDING_FULL, OFF, false, NULL},
        // the barrier before the root's all-gather
        {{"all-gather of the weights", 0, -1}, SHARDING_FULL, ON, false, NULL},
        {{"all-gather of the weights", 0, 1}, SHARDING_FULL, ON, false, NULL},
        // orders the layers' all-gathers too
        {{"all-gather of norms and biases", 0, -1}, SHARDING_FULL, ON, false, NULL},
        {{"reduce-scatter of the gradients", 0, -1}, SHARDING_HYBRID, ON, false, NULL},  // 4 ranks as 2 groups of 2
        {{"reduce-scatter of the gradients", 1, 3}, SHARDING_HYBRID, ON, false, NULL},
        {{"reduce-scatter of the gradients", 0, 1}, SHARDING_HYBRID, OFF, false, NULL},
        {{"all-reduce of the gradients", 0, -1}, SHARDING_HYBRID, ON, false, NULL},
        {{"all-reduce of the gradients", 0, 2}, SHARDING_HYBRID, ON, false, NULL},
        {{"all-reduce of the gradients", 0, -1}, SHARDING_HYBRID, OFF, false, NULL},
        {{"all-reduce of the gradients", 0, -1}, SHARDING_NONE, OFF, false, NULL},
        {{"all-reduce of loss and gradient norm", 0, -1}, SHARDING_FULL, ON, false, NULL},
        {{"all-reduce of loss and gradient norm", 0, 2}, SHARDING_FULL, OFF, false, NULL},
        {{"arrived", 0, -1}, SHARDING_FULL, OFF, false, NULL},
        {{"arrived", 0, 3}, SHARDING_FULL, ON, false, NULL},
        {{"released", 0, -1}, SHARDING_FULL, OFF, false, NULL},
        {{"released", 0, 3}, SHARDING_FULL, ON, false, NULL},
        {{"reduced", 0, -1}, SHARDING_GRAD_OP, OFF, false, NULL},
        // with --sharding full, arrivals in the backward pass order these accesses too
        {{"reduced", 0, 3}, SHARDING_GRAD_OP, ON, false, NULL},
        {{"handover", 0, -1}, SHARDING_FULL, OFF, false, NULL},
        {{"handover", 0, 3}, SHARDING_HYBRID, ON, false, NULL},
        {{"handover", 0, 0}, SHARDING_HYBRID, OFF, false, NULL},
        {{"handover to the replicas", 0, -1}, SHARDING_HYBRID, ON, false, NULL},
        {{"handover to the replicas", 0, 1}, SHARDING_HYBRID, OFF, false, NULL},
        {{"handover to the replicas", 0, -1}, SHARDING_NONE, OFF, false, NULL},
        {{"fsdp_unshard", 0, -1}, SHARDING_FULL, ON, false, NULL},
        {{"fsdp_unshard", 0, 3}, SHARDING_GRAD_OP, OFF, false, NULL},  // fsdp_...: a call of the trainer
        {{"fsdp_reshard", 0, -1}, SHARDING_FULL, ON, false, NULL},
        {{"fsdp_reshard", 0, 2}, SHARDING_FULL, OFF, false, NULL},
        {{"fsdp_begin_gradients", 0, -1}, SHARDING_FULL, OFF, false, NULL},
        {{"fsdp_begin_gradients", 0, 1}, SHARDING_GRAD_OP, ON, false, NULL},
        {{"fsdp_reduce_scatter", 0, -1}, SHARDING_FULL, ON, false, NULL},
        {{"fsdp_reduce_replicas", 0, -1}, SHARDING_HYBRID, ON, false, NULL},
        {{"fsdp_publish_root", 0, -1}, SHARDING_FULL, OFF, false, NULL},
        {{"fsdp_publish_layers", 0, -1}, SHARDING_FULL, ON, false, NULL},
        {{"summed", 0, -1}, SHARDING_FULL, ON, true, NULL},
        {{"summed", 0, 2}, SHARDING_FULL, OFF, true, NULL},
        {{"summed", 0, 1}, SHARDING_HYBRID, ON, true, NULL},
        {{"summed", 0, 0}, SHARDING_NONE, OFF, true, NULL},
        {{"reduce-scatter of the gradients", 1, 1}, SHARDING_FULL, ON, true, NULL},
        {{"all-reduce of a unit's gradient norm", 0, -1}, SHARDING_FULL, ON, true, NULL},
        {{"all-reduce of a unit's gradient norm", 0, 2}, SHARDING_HYBRID, OFF, true, NULL},
        {{"loaded", 0, -1}, SHARDING_FULL, OFF, true, "moments"},
        {{"loaded", 0, 1}, SHARDING_FULL, OFF, false, "moments,master"},
        {{"updated", 0, -1}, SHARDING_FULL, OFF, true, "master"},
        {{"updated", 0, 2}, SHARDING_NONE, OFF, false, "moments"},
        {{"stored", 0, -1}, SHARDING_FULL, OFF, true, "moments"},
        {{"stored", 0, 3}, SHARDING_FULL, OFF, false, "moments,master"},
        {{"used in forward", 0, -1}, SHARDING_FULL, OFF, false, "activations"},
        {{"used in forward", 0, 1}, SHARDING_NONE, OFF, true, "moments,activations"},
        {{"used in backward", 0, -1}, SHARDING_FULL, ON, true, "activations"},
        {{"used in backward", 0, 0}, SHARDING_HYBRID, OFF, false, "activations"},
        {{"copied in forward", 0, -1}, SHARDING_FULL, ON, false, "activations"},
        {{"copied in forward", 0, 2}, SHARDING_HYBRID, OFF, true, "activations"},
        {{"copied in backward", 0, -1}, SHARDING_NONE, OFF, false, "moments,activations"},
        {{"copied in backward", 0, 3}, SHARDING_FULL, OFF, true, "activations"}};
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++)
        for (uint64_t seed = 1; seed < 4; seed++) {
            const char *offload = all[i].offload, *what = all[i].omission.what;
            Case c = fp8_case(all[i].sharding, all[i].copies, 4, offload && strstr(offload, "activations") ? 6 : 3);
            c.accumulation = all[i].in_backward ? 1 : 2, c.untied = true, c.in_backward = all[i].in_backward;
            c.clips = seed % 2 > 0 || strstr(what, "a unit's"), c.offload = offload;
            check_noticed(&c, all[i].omission, seed);
        }
    memset(&omission, 0, sizeof omission);
}

// check_omissions with gradients that are added in the order of samples.
static void check_ordered_omissions(void) {
    static const struct {
        Omission omission;
        int sharding, copies;
        bool in_backward;
    } all[] = {{{"reduce-scatter of the gradients", 0, -1}, SHARDING_FULL, OFF, false},  // messages
               {{"reduce-scatter of the gradients", 0, 1}, SHARDING_FULL, OFF, false},
               {{"reduce-scatter of the gradients", 0, -1}, SHARDING_FULL, ON, false},  // 0, 1: its two barriers
               {{"reduce-scatter of the gradients", 1, -1}, SHARDING_FULL, ON, false},
               {{"reduce-scatter of the gradients", 1, 0}, SHARDING_FULL, ON, false},
               {{"all-reduce of loss and gradient norm", 0, -1}, SHARDING_FULL, OFF, false},
               {{"all-reduce of loss and gradient norm", 0, 2}, SHARDING_FULL, ON, false},
               {{"all-reduce of a unit's gradient norm", 0, -1}, SHARDING_FULL, OFF, true},
               {{"handover", 0, -1}, SHARDING_FULL, OFF, false},
               {{"handover", 0, 1}, SHARDING_FULL, ON, false},
               {{"reduced", 0, -1}, SHARDING_GRAD_OP, OFF, false},
               {{"reduced", 0, 3}, SHARDING_GRAD_OP, ON, false},
               {{"fsdp_begin_gradients", 0, -1}, SHARDING_FULL, OFF, false},
               {{"fsdp_reduce_scatter", 0, -1}, SHARDING_FULL, OFF, false}};
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++)
        for (uint64_t seed = 1; seed < 4; seed++) {
            Case c = ordered_case(PRECISION_BF16, RECIPE_TENSORWISE, all[i].sharding, all[i].copies, 4, 3);
            c.in_backward = c.clips = all[i].in_backward, c.untied = true;
            c.accumulation = all[i].in_backward ? 1 : 2;
            check_noticed(&c, all[i].omission, seed);
        }
    memset(&omission, 0, sizeof omission);
}

// check_omissions with gradients kept in FP8 (--grad-accum-dtype fp8). Some barriers of copy engines are not needed,
// because other waits give the same order. The list does not omit these on all ranks. Barriers 1 and 3 come after reads
// of gradients: an all-reduce of amaxes waits for all ranks before the gradients are overwritten. With REDUCE_BF16
// barrier 2 is not needed, since barrier 0 has waited for the matrices too.
static void check_fp8_gradient_omissions(void) {
    const struct {
        Omission omission;
        int sharding, copies, reduce;
        int64_t accumulation;
    } all[] = {{{"reduce-scatter of the gradients", 0, -1}, SHARDING_FULL, ON, REDUCE_FP8, 1},  // of vectors
               {{"reduce-scatter of the gradients", 2, -1}, SHARDING_FULL, ON, REDUCE_FP8, 1},  // of matrices
               {{"reduce-scatter of the gradients", 2, -1}, SHARDING_FULL, ON, REDUCE_FP8, 2},
               {{"reduce-scatter of the gradients", 2, 1}, SHARDING_HYBRID, ON, REDUCE_FP8, 1},
               {{"reduce-scatter of the gradients", 0, -1}, SHARDING_FULL, ON, REDUCE_BF16, 1},
               {{"reduce-scatter of the gradients", 3, 1}, SHARDING_FULL, ON, REDUCE_BF16, 1},
               {{"reduce-scatter of the gradients", 0, -1}, SHARDING_FULL, OFF, REDUCE_FP8, 1},
               {{"reduce-scatter of the gradients", 1, -1}, SHARDING_FULL, OFF, REDUCE_FP8, 1},
               {{"reduce-scatter of the gradients", 1, 2}, SHARDING_FULL, OFF, REDUCE_FP8, 2},
               {{"reduce-scatter of the gradients", 1, 3}, SHARDING_HYBRID, OFF, REDUCE_FP8, 1},
               {{"reduce-scatter of the gradients", 1, -1}, SHARDING_FULL, OFF, REDUCE_BF16, 1},
               {{"reduce-scatter of the gradients", 1, 0}, SHARDING_HYBRID, OFF, REDUCE_BF16, 1},
               {{"all-reduce of the amaxes of gradients", 0, -1}, SHARDING_FULL, ON, REDUCE_FP8, 1},
               {{"all-reduce of the amaxes of gradients", 0, 2}, SHARDING_FULL, OFF, REDUCE_FP8, 1},
               {{"all-reduce of the amaxes of gradients", 0, -1}, SHARDING_FULL, OFF, REDUCE_BF16, 1},
               {{"all-reduce of the amaxes of gradients", 0, 1}, SHARDING_HYBRID, ON, REDUCE_BF16, 2},
               {{"all-reduce of the amaxes of gradients", 1, -1}, SHARDING_FULL, ON, REDUCE_FP8, 1},
               {{"all-reduce of the amaxes of gradients", 1, 3}, SHARDING_FULL, OFF, REDUCE_FP8, 2},
               {{"all-reduce of the amaxes of gradients, for replicas", 0, -1}, SHARDING_HYBRID, ON, REDUCE_FP8, 1},
               {{"all-reduce of the amaxes of gradients, for replicas", 0, 1}, SHARDING_NONE, OFF, REDUCE_FP8, 2},
               {{"all-reduce of the amaxes of gradients, for replicas", 1, -1}, SHARDING_NONE, OFF, REDUCE_FP8, 1},
               {{"all-reduce of the amaxes of gradients, for replicas", 1, 2}, SHARDING_HYBRID, OFF, REDUCE_FP8, 2},
               {{"all-reduce of the amaxes of gradients, for replicas", 0, -1}, SHARDING_HYBRID, OFF, REDUCE_BF16, 1},
               {{"reduce-scatter of the gradients over replicas", 0, -1}, SHARDING_HYBRID, ON, REDUCE_FP8, 1},
               {{"reduce-scatter of the gradients over replicas", 0, 3}, SHARDING_HYBRID, OFF, REDUCE_FP8, 2},
               {{"reduce-scatter of the gradients over replicas", 0, -1}, SHARDING_NONE, OFF, REDUCE_FP8, 1},
               {{"all-gather of the gradients over replicas", 0, -1}, SHARDING_HYBRID, ON, REDUCE_FP8, 1},
               {{"all-gather of the gradients over replicas", 0, 0}, SHARDING_NONE, OFF, REDUCE_FP8, 2},
               {{"all-gather of the gradients over replicas", 0, -1}, SHARDING_NONE, OFF, REDUCE_FP8, 1},
               {{"all-reduce of the gradients", 0, -1}, SHARDING_HYBRID, ON, REDUCE_FP8, 1},   // of vectors
               {{"all-reduce of the gradients", 1, -1}, SHARDING_HYBRID, ON, REDUCE_BF16, 1},  // of matrices
               {{"all-reduce of the gradients", 1, 2}, SHARDING_NONE, OFF, REDUCE_BF16, 2},
               {{"handover", 0, -1}, SHARDING_FULL, OFF, REDUCE_FP8, 1},
               {{"handover", 0, 1}, SHARDING_FULL, ON, REDUCE_BF16, 2},
               {{"handover to the replicas", 0, -1}, SHARDING_NONE, OFF, REDUCE_FP8, 1},
               {{"handover to the replicas", 0, 2}, SHARDING_NONE, OFF, REDUCE_BF16, 2},
               {{"reduced", 0, -1}, SHARDING_GRAD_OP, OFF, REDUCE_FP8, 1},
               {{"reduced", 0, 3}, SHARDING_GRAD_OP, ON, REDUCE_BF16, 1}};
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++)
        for (uint64_t seed = 1; seed < 4; seed++) {
            Case c = fp8_gradient_case(all[i].sharding, all[i].copies, all[i].reduce, 4, 3);
            c.accumulation = all[i].accumulation, c.untied = true;
            check_noticed(&c, all[i].omission, seed);
        }
    memset(&omission, 0, sizeof omission);
}

// The embedding's output gradients are gathered only if those of a shard group together are not larger than the
// embedding.
static void check_embedding_ranks(void) {
    static const struct {
        const char *model;
        int64_t world, T, ranks;
    } cases[] = {{"llama3.1-8b", 1, 65536, 1},
                 {"llama3.1-8b", 4, 8192, 4},
                 {"llama3.1-8b", 4, 32768, 1},
                 {"llama3.1-405b", 512, 8192, 1}};
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        ModelConfig m;
        model_config_preset(&m, cases[i].model);
        ParameterTable table = parameter_table(&m);
        Options o = options_default();
        o.sequence_length = cases[i].T;
        Precision precision = precision_plan(&o, "", &m, &table, true);
        Fsdp f;
        fsdp_describe(&f, &table, &precision, &o, cases[i].world, cases[i].world - 1);
        CHECK(fsdp_input_ranks(&f) == cases[i].ranks,
              "%s, %lld ranks, T %lld: the embedding's gradient is computed from gradients of %lld ranks",
              cases[i].model, (long long)cases[i].world, (long long)cases[i].T, (long long)fsdp_input_ranks(&f));
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

// The watcher thread is told when an operation is enqueued and when it ends. It is also told again and again while the
// operation has not begun, because the stream is busy with earlier work. It is told nothing while an operation that has
// begun waits for other ranks.
static void check_watch(void) {
    static Nccl nccl;
    Nccl *n = &nccl;
    n->stream = stream_handle(0, COMMUNICATION);
    num_events = 0;
    order_begin(1, stream_names, buffer_name);
    for (int i = 0; i < 2; i++) event_create(&n->operations[i].begun), event_create(&n->operations[i].done);
    const Activity before = activity_now();
    nccl_begin_operation(n, "all-gather of the weights", 1);
    nccl_end_operation(n);
    Activity last = activity_now();
    CHECK(last.changes > before.changes && last.pending == 1 && last.pending_layer == 1,
          "an operation that is enqueued is reported");
    CHECK(strcmp(last.pending_what, "all-gather of the weights") == 0,
          "the watcher learns the name of the operation: %s", last.pending_what);
    for (int begun = 0; begun < 2; begun++) {
        first_pending = 1 + begun;  // the first operation's events are numbers 1 and 2
        nccl_watch(n);
        const Activity now = activity_now();
        CHECK(n->finished == 0 && now.pending == 1 && (now.changes > last.changes) == !begun,
              "an operation that has %sbegun is%s reported", begun ? "" : "not ", begun ? " not" : "");
        last = now;
    }
    first_pending = INT64_MAX;
    nccl_watch(n);
    const Activity now = activity_now();
    CHECK(n->finished == 1 && now.pending == 0 && now.collectives == before.collectives + 1,
          "the end of an operation is reported");
}

// ---- The self-test of peer_memory.cuh, on host memory

enum { PROOF_RANKS = 3, PROOF_FIRST = 6, PROOF_BYTES = 4096 };  // ranks 6 to 8 of a run

typedef struct {
    char room[2 * PROOF_BYTES];
    uint32_t arrivals[PEER_MAX_RANKS];
} ProofMemory;

static ProofMemory proof_memory[PROOF_RANKS];

// Replaces PeerMemory.enqueue: writes take effect at once, waits are kept for cudaStreamQuery.
static CUresult act_memory_operations(CUstream, unsigned count, CUstreamBatchMemOpParams *operations, unsigned) {
    for (unsigned i = 0; i < count; i++) {
        if (operations[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32) awaited[num_awaited++] = operations[i];
        else *(uint32_t *)(uintptr_t)operations[i].writeValue.address = operations[i].writeValue.value;
    }
    return CUDA_SUCCESS;
}

// Replaces PeerMemory.enqueue: writes are lost, waits are kept for cudaStreamQuery.
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

// Returns the error that rank `place` finds, "" if none.
static const char *proof_reads(const PeerMemory *peers, int64_t place) {
    static char reason[256];
    *reason = 0;
    const bool right = peer_check_patterns(&peers[place], PROOF_FIRST + place, proof_memory[place].room, PROOF_BYTES,
                                           NULL, reason, sizeof reason);
    CHECK(right == !*reason, "a proof has a reason exactly if it fails: it %s, with the reason \"%s\"",
          right ? "holds" : "fails", reason);
    return reason;
}

static void check_proof_of_reads(void) {
    PeerMemory peers[PROOF_RANKS];
    proof_begin(peers);
    for (int64_t place = 0; place < PROOF_RANKS; place++)
        CHECK(!*proof_reads(peers, place), "the proof holds for equal patterns: %s", proof_reads(peers, place));
    proof_memory[2].room[PROOF_BYTES - 3] ^= 4;  // one bit of the last word
    CHECK(
        strstr(proof_reads(peers, 0), "rank 8's GPU gives wrong data to rank 6's GPU, first at byte 4092 of 4096: 0x"),
        "a changed bit is reported with its place: %s", proof_reads(peers, 0));
    CHECK(!*proof_reads(peers, 2), "a rank does not check its own memory: %s", proof_reads(peers, 2));
    proof_begin(peers);
    peers[1].base[0] = peers[1].base[2];  // another rank's memory
    CHECK(strstr(proof_reads(peers, 1), "rank 6's GPU gives wrong data to rank 7's GPU, first at byte 0 of"),
          "another rank's memory in place of a peer's is reported: %s", proof_reads(peers, 1));
    proof_begin(peers);
    memset(proof_memory[1].room, 0, 64);  // as it was before the pattern
    CHECK(strstr(proof_reads(peers, 2),
                 "rank 7's GPU gives wrong data to rank 8's GPU, first at byte 0 of 4096: 0x00000000 instead"),
          "memory that lacks the pattern is reported: %s", proof_reads(peers, 2));
}

// NCCL_P2P_DISABLE=1 turns copy engines off. If it is 0 or not set, they are off here only because rank 7's memory
// cannot be read.
static void check_disabled(void) {
    static const struct {
        const char *value, *reason;
    } cases[] = {{"1", "NCCL_P2P_DISABLE=1 forbids"},
                 {"0", "rank 7's GPU cannot be opened to other ranks, as rank 6 found"},
                 {NULL, "rank 7's"}};
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
              "NCCL_P2P_DISABLE=%s gives the expected reason: %s", cases[i].value ? cases[i].value : "(none)", reason);
    }
}

// Only the ranks of a shard group must be on one host: with --sharding hybrid, copy engines work inside each host.
static void check_hosts(void) {
    static char memory[1 << 16];
    for (int apart = 0; apart < 2; apart++) {
        PeerMemory p;
        PeerOffer offers[2];
        Comm comm = comm_one();
        char reason[256] = "";
        memset(&p, 0, sizeof p);
        memset(offers, 0, sizeof offers);
        comm.world = 4, comm.rank = 2;
        comm_split(&comm, 2);  // ranks 2 and 3; ranks 0 and 1 are on host a
        format_checked(offers[0].host, sizeof offers[0].host, "b");
        format_checked(offers[1].host, sizeof offers[1].host, apart ? "c" : "b");
        p.ranks = 2, p.rank = comm.shard_rank, p.base[p.rank] = memory, p.arrivals = (uint32_t *)memory;
        unsetenv("NCCL_P2P_DISABLE");
        CHECK(peer_memory_try(&p, &comm, offers, NULL, reason, sizeof reason) == !apart &&
                  (!apart || strstr(reason, "the ranks of a shard group are on several hosts, b and c")),
              "a shard group on %s: %s", apart ? "two hosts is refused" : "one host of two is accepted", reason);
    }
}

// A rank that falls back because another cannot open its memory closes its mappings only when its stream no longer
// writes to them.
static void check_fallback(void) {
    static char memory[1 << 16];
    Comm comm = comm_one();
    PeerMemory p;
    char reason[256] = "";
    comm.world = comm.shard_size = 2;
    unsetenv("NCCL_P2P_DISABLE");
    uint32_t *arrivals = (uint32_t *)memory;
    closed = closed_early = 0;
    const bool open = peer_memory_open(&p, &comm, memory, sizeof memory, arrivals, memory + 1024, PROOF_BYTES, NULL,
                                       reason, sizeof reason);
    CHECK(!open && p.ranks == 0, "copy engines are not used; open %d, %lld ranks: %s", open, (long long)p.ranks,
          reason);
    CHECK(closed == 1 && closed_early == 0, "one mapping is closed, and none too early; found %lld and %lld",
          (long long)closed, (long long)closed_early);
}

static void prove_lost_barrier(void *context) {
    char reason[256];
    peer_prove_barrier((PeerMemory *)context, PROOF_FIRST, 0.01, NULL, reason, sizeof reason);
}

// The time limit is 0.01 s: the writes of other ranks come at once or never.
static void check_proof_of_barrier(void) {
    PeerMemory peers[PROOF_RANKS];
    char reason[256] = "";
    proof_begin(peers);
    for (int64_t place = 1; place < PROOF_RANKS; place++) peer_barrier(&peers[place], NULL);
    CHECK(peer_prove_barrier(&peers[0], PROOF_FIRST, 0.01, NULL, reason, sizeof reason) && !*reason,
          "a barrier that all ranks reach completes: %s", reason);
    for (int64_t place = 0; place < PROOF_RANKS; place++)
        for (int64_t from = 0; from < PROOF_RANKS; from++)
            CHECK(
                proof_memory[place].arrivals[from] == (from != place) && peers[place].barriers == 1,
                "place %lld has one arrival from each other place, after one barrier; found %u from %lld, %u barriers",
                (long long)place, proof_memory[place].arrivals[from], (long long)from, peers[place].barriers);
    proof_begin(peers);
    peer_barrier(&peers[1], NULL);  // place 2 does not come
    num_awaited = 0;                // from here on, the waits are those of place 0
    CHECK(!peer_prove_barrier(&peers[0], PROOF_FIRST, 0.01, NULL, reason, sizeof reason) &&
              strstr(reason, "did not complete on rank 6 within 0.01 s"),
          "a barrier that one rank misses is reported: %s", reason);
    CHECK(__wrap_cudaStreamQuery(NULL) == cudaSuccess, "the stream goes on after the barrier failed");
    proof_begin(peers);
    peers[0].enqueue = lose_memory_operations;
    CHECK_DIES(prove_lost_barrier, &peers[0], "cannot be released; --copy-engines off",
               "a barrier that cannot be released ends the run");
}

int main(void) {
    mallopt(M_TRIM_THRESHOLD, 1 << 28);           // keeps heap memory between cases
    const int64_t first = getenv("ALL") ? 2 : 3;  // shard groups of 2 are in the cases of 4 ranks, too
    for (int64_t world = first; world <= 4; world++) {
        check_all(world, PRECISION_BF16, RECIPE_TENSORWISE, "", OFF, RECOMPUTE_NONE);
        for (int recompute : {RECOMPUTE_NONE, RECOMPUTE_LAYER}) {  // other choices read weights like one of these
            check_all(world, PRECISION_FP8, RECIPE_TENSORWISE, "", ON, recompute);
            check_all(world, PRECISION_FP8, RECIPE_BOUNDED, "", ON, recompute);
            check_all(world, PRECISION_FP8, RECIPE_TENSORWISE, "first,last", ON, recompute);
            check_all(world, PRECISION_FP8, RECIPE_TENSORWISE, "mlp", ON, recompute);
            check_all(world, PRECISION_FP8, RECIPE_TENSORWISE, "first", ON, recompute);
            check_all(world, PRECISION_FP8, RECIPE_ROWWISE, "", OFF, recompute);
            check_all(world, PRECISION_FP8, RECIPE_ROWWISE_GW_HP, "", OFF, recompute);
            check_all(world, PRECISION_FP8, RECIPE_BLOCKWISE, "last", OFF, recompute);
        }
        check_ordered(world, PRECISION_BF16, RECIPE_TENSORWISE);
        check_ordered(world, PRECISION_FP8, RECIPE_TENSORWISE);
        check_ordered(world, PRECISION_FP8, RECIPE_BOUNDED);
        check_ordered(world, PRECISION_FP8, RECIPE_ROWWISE);
        check_fp8_gradients_of(world);
        check_offload(world);
    }
    check_omissions();
    check_fp8_gradient_omissions();
    check_ordered_omissions();
    check_embedding_ranks();
    check_watch();
    acts = true;
    check_disabled();
    check_hosts();
    check_fallback();
    check_proof_of_reads();
    check_proof_of_barrier();
    return check_report();
}
