// Moves weights and gradients between ranks, by NCCL or by copy engines, with kernels that sum gradients.
//
// This file moves arrays; fsdp.cuh knows which layer they belong to and when they move. Within a shard group it
// all-gathers weights and reduce-scatters gradients. Over replicas it all-reduces the sums that a rank keeps.
//
// Unless --copy-engines is off, copy engines move the data within shard groups if the GPUs of each group can read each
// other's memory (peer_memory.cuh): each rank copies the parts of the other ranks, and a kernel then sums the gradients
// in fp32, in the order of ranks. Otherwise NCCL moves the data and sums gradients in bf16 or fp32 (--reduce-dtype).
// FP8 codes of gradients are summed by kernels in any case (fsdp_gradient_fp8.cuh). Between replicas NCCL moves the
// data.
//
// If options_any_ranks, gradients are `ordered`: a kernel adds those of one rank after the other to the sums of earlier
// micro-steps, which is the order of the samples, and rounds bf16 sums after each addition, as one rank alone does in
// as many micro-steps. NCCL then only sends each rank the gradients of its slices.
#ifndef LLMC_TRANSPORT_CUH
#define LLMC_TRANSPORT_CUH

#include "../base/arena.h"
#include "../config/options.h"
#include "../config/parameters.h"
#include "comm_nccl.cuh"
#include "../gpu/gradient_sum.cuh"
#include "../memory/step_stats.cuh"
#include "peer_memory.cuh"

// Most elements of `staging`, the fp32 buffer of NCCL's reductions: 256 MiB reach most of the bandwidth.
#define TRANSPORT_STAGING_ELEMENTS (64ll << 20)

enum { TRANSPORT_THREADS = 256 };

// The way in which weights and gradients move within a shard group.
typedef enum {
    TRANSPORT_NONE,  // nothing moves: there is one rank
    TRANSPORT_NCCL,
    TRANSPORT_COPY_ENGINES
} TransportKind;

// Keys of the random bits that round sums with the gradients of the ranks of a shard group: rank r of it has the key
// rng_key(step_key, part + 2 r) (gradient_sum_key).
typedef struct {
    uint64_t step_key;
    int64_t part;
} RankKeys;

typedef struct {
    TransportKind kind;  // COPY_ENGINES before transport_open_peers: they will be tried, and else NCCL is used
    int reduce_dtype;    // --reduce-dtype: the dtype in which NCCL sums; after copies by copy engines, kernels sum in
                         // fp32. REDUCE_FP8: as REDUCE_BF16, except for the layers' matrices, which are sent in FP8
    bool ordered;
    RankKeys keys;  // if ordered: this micro-step's
    int64_t shard_size, shard_rank;
    Nccl *nccl;            // communicators and their stream; NULL if there is one rank
    PeerMemory peers;      // memory of the shard group's ranks, with copy engines
    uint32_t *arrivals;    // [PEER_MAX_RANKS] number of barriers that each rank of the shard group has reached
    cudaStream_t compute;  // the compute stream
    StepLog *log;          // measures how long the compute stream waits
    cudaEvent_t handover;  // recorded on one stream; the other waits for it, and so for all work before it
    cudaEvent_t idle;      // for transport_wait_all

    bool fp32_sums;         // true: the sums of gradients are in sums_fp32; false: in `sums`
    bf16 *sums;             // this rank's sums of gradients over micro-steps and ranks; NULL if they are fp32
    float *sums_fp32;       // the sums if they are fp32, else NULL
    float *staging;         // [shard_size][staging_slice] buffer in which NCCL sums bf16 gradients in fp32
    int64_t staging_slice;  // elements per rank in `staging`
    // [shard_size - 1][received_slice] with copy engines, or if ordered: other ranks' gradients of this rank's slice
    bf16 *received;
    int64_t received_slice;
} Transport;

// One segment of a gradient that is to be reduced.
typedef struct {
    bf16 *whole;      // [shard_size][slice] this rank's gradient; the reduction may overwrite this rank's slice
    int64_t slice;    // elements that each rank keeps; 0: the segment is empty
    int64_t at;       // index in Transport.sums (or sums_fp32) of the slice's first element
    GradientSum how;  // how the reduced slice is added to the sums, or replaces them
} TransportSegment;

// ---- memory, streams, peers

// Chooses the transport for `world` ranks in shard groups of `shard_size`, by the options.
static inline void transport_describe(Transport *t, const Options *o, int64_t world, int64_t shard_size,
                                      int64_t shard_rank) {
    const bool copy_engines = shard_size > 1 && o->copy_engines != OFF;
    memset(t, 0, sizeof *t);
    t->kind = world == 1 ? TRANSPORT_NONE : copy_engines ? TRANSPORT_COPY_ENGINES : TRANSPORT_NCCL;
    t->reduce_dtype = o->reduce_dtype;
    t->fp32_sums = options_fp32_gradients(o, world);
    t->ordered = shard_size > 1 && options_any_ranks(o);
    t->shard_size = shard_size, t->shard_rank = shard_rank;
}

// True if `staging` is needed: NCCL may have to sum bf16 gradients in fp32.
static inline bool transport_is_staged(const Transport *t) {
    return t->kind != TRANSPORT_NONE && t->reduce_dtype == REDUCE_FP32 && !t->ordered &&
           !(t->fp32_sums && t->shard_size == 1);
}

// Places the sums of gradients, `n` elements.
static inline void transport_place_sums(Transport *t, Arena *a, int64_t n) {
    t->sums_fp32 = t->fp32_sums ? (float *)arena_take(a, n * (int64_t)sizeof(float)) : NULL;
    t->sums = t->fp32_sums ? NULL : (bf16 *)arena_take(a, n * (int64_t)sizeof(bf16));
}

// Places the buffers of reductions. largest_unit is the largest number of elements that a rank keeps of a unit;
// largest_slice is the largest number of elements that are received from another rank at a time.
static inline void transport_place_buffers(Transport *t, Arena *a, int64_t largest_unit, int64_t largest_slice) {
    if (transport_is_staged(t)) {
        const int64_t at_a_time = TRANSPORT_STAGING_ELEMENTS / t->shard_size / PARAMETER_ALIGNMENT;
        t->staging_slice = min_i64(largest_unit, max_i64(1, at_a_time) * PARAMETER_ALIGNMENT);
        t->staging = (float *)arena_take(a, t->shard_size * t->staging_slice * (int64_t)sizeof(float));
    }
    if (t->kind == TRANSPORT_COPY_ENGINES || t->ordered) {
        t->received_slice = largest_slice;
        t->received = (bf16 *)arena_take(a, (t->shard_size - 1) * t->received_slice * (int64_t)sizeof(bf16));
    }
    if (t->kind == TRANSPORT_COPY_ENGINES)
        t->arrivals = (uint32_t *)arena_take(a, PEER_MAX_RANKS * (int64_t)sizeof(uint32_t));
}

static inline void event_create(cudaEvent_t *event) {
    CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
}

// nccl is NULL for one rank, else connected (nccl_open). log->stream is the compute stream; `log` measures its waits.
static inline void transport_create(Transport *t, Nccl *nccl, StepLog *log) {
    t->nccl = nccl, t->log = log, t->compute = log->stream;
    event_create(&t->idle);
    if (nccl) event_create(&t->handover);
}

// Does nothing if transport_create was not called.
static inline void transport_destroy(Transport *t) {
    if (t->idle) CUDA_CHECK(cudaEventDestroy(t->idle));
    if (t->nccl) CUDA_CHECK(cudaEventDestroy(t->handover));
}

// Collective over all ranks. Call it only if the kind is TRANSPORT_COPY_ENGINES. Opens memory [bytes] of each rank to
// the other ranks of its shard group. `arrivals` must be zero and `received` unused. Returns false if it fails on any
// rank: NCCL then moves everything, and `reason`, which must be empty before, is set on the ranks on which it failed.
static inline bool transport_open_peers(Transport *t, const Comm *comm, char *memory, int64_t bytes, char *reason,
                                        size_t capacity) {
    const int64_t scratch = (t->shard_size - 1) * t->received_slice * (int64_t)sizeof(bf16);
    if (peer_memory_open(&t->peers, comm, memory, bytes, t->arrivals, t->received, scratch, t->nccl->stream, reason,
                         capacity))
        return true;
    t->kind = TRANSPORT_NCCL;
    return false;
}

// Collective over all ranks. Call it when all streams are idle and before any rank frees its memory.
static inline void transport_close_peers(Transport *t, const Comm *comm) {
    comm_barrier(comm, COMM_WORLD);  // all ranks have finished reading
    peer_memory_close(&t->peers);
    comm_barrier(comm, COMM_WORLD);  // all ranks have closed their peers' memory
}

// Makes later communication wait for all computation enqueued so far. Only with several ranks.
static inline void comm_waits_compute(Transport *t) {
    CUDA_CHECK(cudaEventRecord(t->handover, t->compute));
    CUDA_CHECK(cudaStreamWaitEvent(t->nccl->stream, t->handover, 0));
}

// Makes later computation wait for an event of the communication stream.
static inline void compute_waits_event(const Transport *t, cudaEvent_t event) {
    step_log_mark_wait(t->log, TIME_COMPUTE);
    CUDA_CHECK(cudaStreamWaitEvent(t->compute, event, 0));
    step_log_mark_wait(t->log, TIME_COMMUNICATION);
}

// Makes later computation wait for all communication enqueued so far. Does nothing for one rank.
static inline void compute_waits_comm(Transport *t) {
    if (!t->nccl) return;
    CUDA_CHECK(cudaEventRecord(t->handover, t->nccl->stream));
    compute_waits_event(t, t->handover);
}

// The host waits for an event. With several ranks it meanwhile watches NCCL for errors.
static inline void transport_wait(const Transport *t, cudaEvent_t event) {
    if (t->nccl) nccl_wait(t->nccl, event);
    else CUDA_CHECK(cudaEventSynchronize(event));
}

// The host waits for all computation and communication enqueued so far.
static inline void transport_wait_all(Transport *t) {
    compute_waits_comm(t);
    CUDA_CHECK(cudaEventRecord(t->idle, t->compute));
    transport_wait(t, t->idle);
}

// ---- operations over the shard group

// Begins an operation that copy engines or NCCL do, and that transport_end ends. Error messages name `what` and `l`, a
// layer, ROOT or NO_LAYER (nccl_begin_operation).
static inline void transport_begin(Transport *t, const char *what, int64_t l) {
    if (t->kind == TRANSPORT_COPY_ENGINES) nccl_begin_operation(t->nccl, what, l);
    else nccl_begin(t->nccl, what, l);
}

// Enqueues a barrier of the shard group, with copy engines: later communication waits until all ranks reach it.
// With NCCL it does nothing, since a collective itself waits for all ranks. Call it within an operation.
static inline void transport_barrier(Transport *t) {
    if (t->kind == TRANSPORT_COPY_ENGINES) peer_barrier(&t->peers, t->nccl->stream);
}

static inline void transport_end(Transport *t) {
    if (t->kind == TRANSPORT_COPY_ENGINES) nccl_end_operation(t->nccl);
    else nccl_end(t->nccl);
}

// all [shard_size][slice] = each rank's part [slice], of type ncclUint8 or ncclBfloat16.
static inline void transport_gather(Transport *t, const void *part, void *all, int64_t slice, ncclDataType_t type) {
    const int64_t bytes = slice * (type == ncclUint8 ? 1 : (int64_t)sizeof(bf16));
    if (t->kind == TRANSPORT_COPY_ENGINES) peer_read(&t->peers, part, all, bytes, true, t->nccl->stream);
    else nccl_all_gather(t->nccl, COMM_SHARD, part, all, slice, type);
}

// ---- kernels that sum gradients

// `to` [rows, n] = the first n columns of `from` [rows, stride], as fp32. n and stride must be multiples of 8.
static __global__ void __launch_bounds__(TRANSPORT_THREADS)
    transport_to_fp32_kernel(float *to, const bf16 *from, int64_t rows, int64_t n, int64_t stride) {
    grid_dependency_wait();
    for (int64_t i = (blockIdx.x * (int64_t)TRANSPORT_THREADS + threadIdx.x) * 8; i < rows * n;
         i += (int64_t)gridDim.x * TRANSPORT_THREADS * 8) {
        float x[8];
        bf16x8_unpack(x, bf16x8_load(from + i / n * stride + i % n));
        fp32x8_store(to + i, x);
    }
}

// Adds the gradients `from` [n] to `to` [n], a part of the sums; if !sum.add, stores them there instead. n must be a
// multiple of 8.
template <class Sum, class T>
static __global__ void __launch_bounds__(TRANSPORT_THREADS)
    transport_add_kernel(Sum *to, const T *from, int64_t n, GradientSum sum) {
    grid_dependency_wait();
    for (int64_t i = (blockIdx.x * (int64_t)TRANSPORT_THREADS + threadIdx.x) * 8; i < n;
         i += (int64_t)gridDim.x * TRANSPORT_THREADS * 8) {
        float x[8];
        gradient_load_8(x, from + i);
        gradient_join_8(to + i, x, i, sum);
    }
}

// Sums gradients over `ranks` ranks, in the order of ranks, and adds the result to `to` [n]; if !how.add, stores it
// there instead. `own` [n] holds the gradients of rank `rank`, `others` [ranks - 1][n] those of all other ranks. Adds
// in fp32 and rounds once if `to` is bf16. n must be a multiple of 8.
template <class Sum>
static __global__ void __launch_bounds__(TRANSPORT_THREADS)
    transport_sum_kernel(Sum *to, const bf16 *own, const bf16 *others, int64_t ranks, int64_t rank, int64_t n,
                         GradientSum how) {
    grid_dependency_wait();
    const int64_t i = (blockIdx.x * (int64_t)TRANSPORT_THREADS + threadIdx.x) * 8;
    if (i >= n) return;
    float sum[8], x[8];
    gradient_load_8(sum, rank == 0 ? own + i : others + i);
#pragma unroll 4
    for (int64_t r = 1; r < ranks; r++) {
        gradient_load_8(x, r == rank ? own + i : others + (r - (r > rank)) * n + i);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += x[j];
    }
    gradient_join_8(to + i, sum, i, how);
}

// Adds the gradients of `ranks` ranks, arguments as of transport_sum_kernel, to the sums `to` [n] one after the other;
// if !how.add, those of rank 0 replace the sums. A bf16 sum is rounded after each addition, with the key of the rank.
template <class Sum>
static __global__ void __launch_bounds__(TRANSPORT_THREADS)
    transport_ordered_kernel(Sum *to, const bf16 *own, const bf16 *others, int64_t ranks, int64_t rank, int64_t n,
                             GradientSum how, RankKeys keys) {
    grid_dependency_wait();
    const int64_t i = (blockIdx.x * (int64_t)TRANSPORT_THREADS + threadIdx.x) * 8;
    if (i >= n) return;
    float sum[8], x[8];
    if (how.add) gradient_load_8(sum, to + i);
    else gradient_load_8(sum, rank == 0 ? own + i : others + i);
#pragma unroll 2
    for (int64_t r = how.add ? 0 : 1; r < ranks; r++) {
        gradient_load_8(x, r == rank ? own + i : others + (r - (r > rank)) * n + i);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += x[j];
        if constexpr (sizeof(Sum) == sizeof(bf16)) {
            how.key = rng_key(keys.step_key, (uint64_t)(keys.part + 2 * r));
            bf16x8_unpack(sum, gradient_round_8(sum, i, how));
        }
    }
    const GradientSum exact = {};
    gradient_store_8(to + i, sum, i, exact);
}

// Returns the number of blocks of a kernel that converts or adds n elements on the communication stream: at most 128,
// to leave room for GEMMs.
static inline unsigned transport_blocks(int64_t n) {
    return grid_size(min_i64(n, 128 * TRANSPORT_THREADS * 8), TRANSPORT_THREADS * 8);
}

// `staging` [rows, n] = the first n columns of `from` [rows, stride], as fp32.
static inline void transport_to_fp32(Transport *t, const bf16 *from, int64_t rows, int64_t n, int64_t stride) {
    CUDA_LAUNCH(transport_to_fp32_kernel, transport_blocks(rows * n), TRANSPORT_THREADS, 0, t->nccl->stream, t->staging,
                from, rows, n, stride);
}

// Adds the gradients `from` [n] to this rank's sums, from element `at` on; if !how.add, stores them there instead.
template <class T>
static inline void transport_add(Transport *t, int64_t at, const T *from, int64_t n, GradientSum how, unsigned blocks,
                                 cudaStream_t stream) {
    if (t->fp32_sums)
        CUDA_LAUNCH(transport_add_kernel<float, T>, blocks, TRANSPORT_THREADS, 0, stream, t->sums_fp32 + at, from, n,
                    how);
    else CUDA_LAUNCH(transport_add_kernel<bf16, T>, blocks, TRANSPORT_THREADS, 0, stream, t->sums + at, from, n, how);
}

// Does transport_add for gradients that NCCL reduced, on the communication stream, with few blocks (transport_blocks).
template <class T>
static inline void transport_add_reduced(Transport *t, int64_t at, const T *from, int64_t n, GradientSum how) {
    transport_add(t, at, from, n, how, transport_blocks(n), t->nccl->stream);
}

// Sums the gradients own [n] and those received from the other ranks, and adds the result to this rank's sums, from
// element `at` on; if !how.add, stores it there instead.
static inline void transport_add_received(Transport *t, int64_t at, const bf16 *own, int64_t n, GradientSum how) {
    const unsigned blocks = grid_size(n, TRANSPORT_THREADS * 8);
    const cudaStream_t stream = t->nccl->stream;
    if (t->ordered && t->fp32_sums)
        CUDA_LAUNCH(transport_ordered_kernel<float>, blocks, TRANSPORT_THREADS, 0, stream, t->sums_fp32 + at, own,
                    t->received, t->shard_size, t->shard_rank, n, how, t->keys);
    else if (t->ordered)
        CUDA_LAUNCH(transport_ordered_kernel<bf16>, blocks, TRANSPORT_THREADS, 0, stream, t->sums + at, own,
                    t->received, t->shard_size, t->shard_rank, n, how, t->keys);
    else if (t->fp32_sums)
        CUDA_LAUNCH(transport_sum_kernel<float>, blocks, TRANSPORT_THREADS, 0, stream, t->sums_fp32 + at, own,
                    t->received, t->shard_size, t->shard_rank, n, how);
    else
        CUDA_LAUNCH(transport_sum_kernel<bf16>, blocks, TRANSPORT_THREADS, 0, stream, t->sums + at, own, t->received,
                    t->shard_size, t->shard_rank, n, how);
}

// ---- reduce-scatter and all-reduce

static inline GradientSum transport_sum_from(const TransportSegment *s, int64_t first) {
    GradientSum how = s->how;
    how.flat += first;
    return how;
}

static inline void transport_reduce_scatter_bf16(Transport *t, const TransportSegment *segments, int count, int64_t l) {
    const bool direct = !segments[0].how.add && !t->fp32_sums;  // NCCL writes directly into the sums
    nccl_begin(t->nccl, "reduce-scatter of the gradients", l);
    for (int k = 0; k < count; k++) {
        const TransportSegment *s = &segments[k];
        bf16 *to = direct ? t->sums + s->at : s->whole + t->shard_rank * s->slice;
        if (s->slice) nccl_reduce_scatter(t->nccl, COMM_SHARD, s->whole, to, s->slice, ncclBfloat16);
    }
    nccl_end(t->nccl);
    for (int k = 0; !direct && k < count; k++) {
        const TransportSegment *s = &segments[k];
        if (s->slice) transport_add_reduced(t, s->at, s->whole + t->shard_rank * s->slice, s->slice, s->how);
    }
}

static inline void transport_reduce_scatter_fp32(Transport *t, const TransportSegment *segments, int count, int64_t l) {
    for (const TransportSegment *s = segments; s < segments + count; s++)
        for (int64_t first = 0; first < s->slice; first += t->staging_slice) {
            const int64_t n = min_i64(t->staging_slice, s->slice - first);
            float *part = t->staging + t->shard_rank * n;
            transport_to_fp32(t, s->whole + first, t->shard_size, n, s->slice);
            nccl_begin(t->nccl, "reduce-scatter of the gradients", l);
            nccl_reduce_scatter(t->nccl, COMM_SHARD, t->staging, part, n, ncclFloat32);
            nccl_end(t->nccl);
            transport_add_reduced(t, s->at + first, part, n, transport_sum_from(s, first));
        }
}

// received [shard_size - 1][n] = the gradients that the other ranks have of elements first .. first + n - 1 of this
// rank's slice. With copy engines, barriers must stand before and after.
static inline void transport_receive(Transport *t, const TransportSegment *s, int64_t first, int64_t n, int64_t l) {
    const int64_t bytes = n * (int64_t)sizeof(bf16);
    const bf16 *own = s->whole + t->shard_rank * s->slice + first;
    if (t->kind == TRANSPORT_COPY_ENGINES) return peer_read(&t->peers, own, t->received, bytes, false, t->nccl->stream);
    nccl_begin(t->nccl, "reduce-scatter of the gradients", l);
    for (int64_t r = 0; r < t->shard_size; r++) {
        if (r == t->shard_rank) continue;
        nccl_send(t->nccl, COMM_SHARD, r, (const uint8_t *)(s->whole + r * s->slice + first), bytes);
        nccl_receive(t->nccl, COMM_SHARD, r, (uint8_t *)(t->received + (r - (r > t->shard_rank)) * n), bytes);
    }
    nccl_end(t->nccl);
}

// Each rank copies the gradients of its slice from the other ranks, or receives them by NCCL, and sums them.
static inline void transport_reduce_scatter_received(Transport *t, const TransportSegment *segments, int count,
                                                     int64_t l) {
    const bool copies = t->kind == TRANSPORT_COPY_ENGINES;
    if (copies) nccl_begin_operation(t->nccl, "reduce-scatter of the gradients", l);
    if (copies) peer_barrier(&t->peers, t->nccl->stream);  // all ranks have computed their gradients
    for (const TransportSegment *s = segments; s < segments + count; s++)
        for (int64_t first = 0; first < s->slice; first += t->received_slice) {
            const int64_t n = min_i64(t->received_slice, s->slice - first);
            transport_receive(t, s, first, n, l);
            transport_add_received(t, s->at + first, s->whole + t->shard_rank * s->slice + first, n,
                                   transport_sum_from(s, first));
        }
    if (copies)
        peer_barrier(&t->peers, t->nccl->stream);  // all ranks have finished reading: the buffer may be overwritten
    if (copies) nccl_end_operation(t->nccl);
}

// Reduces gradients `whole` [shard_size][slice] over the shard group: this rank's slice becomes the sum, in bf16. slice
// is at most received_slice.
static inline void transport_reduce_scatter_in_place(Transport *t, bf16 *whole, int64_t slice, int64_t l) {
    bf16 *own = whole + t->shard_rank * slice;
    const GradientSum replace = {};
    const cudaStream_t stream = t->nccl->stream;
    transport_begin(t, "reduce-scatter of the gradients", l);
    transport_barrier(t);  // all ranks have computed their gradients
    if (t->kind == TRANSPORT_COPY_ENGINES) {
        peer_read(&t->peers, own, t->received, slice * (int64_t)sizeof(bf16), false, stream);
        CUDA_LAUNCH(transport_sum_kernel<bf16>, grid_size(slice, TRANSPORT_THREADS * 8), TRANSPORT_THREADS, 0, stream,
                    own, own, t->received, t->shard_size, t->shard_rank, slice, replace);
    } else {
        nccl_reduce_scatter(t->nccl, COMM_SHARD, whole, own, slice, ncclBfloat16);
    }
    transport_barrier(t);  // all ranks have finished reading
    transport_end(t);
}

// received [shard_size - 1][slice] = the other ranks' codes of this rank's slice, in the order of ranks. `codes`
// [shard_size][slice] has this rank's codes of all slices.
static inline void transport_exchange_codes(Transport *t, const uint8_t *codes, uint8_t *received, int64_t slice,
                                            int64_t l) {
    const CodeParts p = {slice, t->shard_size * slice, t->shard_size};
    const uint8_t *own = codes + t->shard_rank * slice;
    transport_begin(t, "reduce-scatter of the gradients", l);
    transport_barrier(t);  // all ranks have cast their gradients
    if (t->kind == TRANSPORT_COPY_ENGINES) peer_read(&t->peers, own, received, slice, false, t->nccl->stream);
    else nccl_scatter_codes(t->nccl, COMM_SHARD, &p, t->shard_rank, codes, received);
    transport_barrier(t);  // all ranks have finished reading
    transport_end(t);
}

// Reduce-scatters segments [count] of a gradient over the shard group and adds this rank's slices to its sums;
// if !how.add, stores them there instead. count > 0, and all segments have the same how.add. Call comm_waits_compute
// first. Error messages name `l`, a layer or ROOT.
static inline void transport_reduce_scatter(Transport *t, const TransportSegment *segments, int count, int64_t l) {
    if (t->kind == TRANSPORT_COPY_ENGINES || t->ordered) transport_reduce_scatter_received(t, segments, count, l);
    else if (t->reduce_dtype == REDUCE_FP32) transport_reduce_scatter_fp32(t, segments, count, l);
    else transport_reduce_scatter_bf16(t, segments, count, l);
}

// All-reduces elements at .. at + n - 1 of this rank's sums over `group`, in fp32 if the sums or --reduce-dtype are
// fp32, else in bf16.
static inline void transport_all_reduce(Transport *t, CommGroup group, int64_t at, int64_t n, int64_t l) {
    const GradientSum replace = {};
    const bool staged = t->reduce_dtype == REDUCE_FP32 && !t->fp32_sums;
    const int64_t at_a_time = staged ? t->shard_size * t->staging_slice : n;
    for (int64_t first = at; first < at + n; first += at_a_time) {
        const int64_t count = min_i64(at_a_time, at + n - first);
        if (staged) transport_to_fp32(t, t->sums + first, 1, count, count);
        nccl_begin(t->nccl, "all-reduce of the gradients", l);
        if (staged) nccl_all_reduce(t->nccl, group, t->staging, count, ncclFloat32, ncclSum);
        else if (t->fp32_sums) nccl_all_reduce(t->nccl, group, t->sums_fp32 + first, count, ncclFloat32, ncclSum);
        else nccl_all_reduce(t->nccl, group, t->sums + first, count, ncclBfloat16, ncclSum);
        nccl_end(t->nccl);
        if (staged) transport_add_reduced(t, first, t->staging, count, replace);
    }
}

#endif
