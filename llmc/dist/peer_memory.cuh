// GPUs of one host read each other's memory with their copy engines (CUDA IPC over NVLink or PCIe).
// NCCL's kernels take multiprocessors from the matrix products beside them, and a product that fills the GPU then
// takes up to twice as long; copies take none.
//
// A rank may read what the others have written before a barrier (peer_barrier, or a collective of NCCL that waits for
// all of them), and must be done, as another barrier tells them, before they write there again.
//
// Some hosts open such memory and then read or write it wrong (PCIe peer access behind an IOMMU or in a virtual
// machine). So before the first use each rank reads a pattern that the others have written, and one barrier is timed.
#ifndef LLMC_PEER_MEMORY_CUH
#define LLMC_PEER_MEMORY_CUH

#include <cuda.h>
#include <sched.h>

#include "comm.h"
#include "../cuda/cuda_utils.cuh"

enum { PEER_MAX_RANKS = 64 };

// The proof at start: most bytes of a rank's pattern, and seconds within which a barrier must come. It takes
// microseconds; hosts come to it some milliseconds apart.
#define PEER_PROOF_BYTES (2ll << 20)
#define PEER_PROOF_SECONDS 5

typedef CUresult (*StreamMemoryOperations)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned);

// The memory of all ranks of a group, as this process sees it. The same thing lies at the same place in all.
typedef struct {
    int64_t ranks, rank;         // size of the group and number in it; ranks 0: not available
    char *base[PEER_MAX_RANKS];  // base[rank] is this rank's own
    uint32_t *arrivals;          // [PEER_MAX_RANKS] in it: how many barriers each rank has reached; the ranks write it
    uint32_t barriers;           // enqueued
    StreamMemoryOperations enqueue;
} PeerMemory;

// What a rank tells the others of its memory.
typedef struct {
    char host[64];
    cudaIpcMemHandle_t handle;
    int64_t bytes;
    cudaError_t status;
} PeerOffer;

static inline CUstreamBatchMemOpParams peer_write(uint32_t *to, uint32_t value) {
    CUstreamBatchMemOpParams o;
    memset(&o, 0, sizeof o);
    o.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    o.writeValue.address = (CUdeviceptr)to;
    o.writeValue.value = value;
    return o;
}

static inline CUstreamBatchMemOpParams peer_wait(const uint32_t *at, uint32_t value) {
    CUstreamBatchMemOpParams o;
    memset(&o, 0, sizeof o);
    o.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    o.waitValue.address = (CUdeviceptr)at;
    o.waitValue.value = value;
    o.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;  // in cyclic order
    return o;
}

// What follows on `stream` runs when every rank's stream has come to its call. Takes no multiprocessor.
static inline void peer_barrier(PeerMemory *p, cudaStream_t stream) {
    CUstreamBatchMemOpParams operations[2 * PEER_MAX_RANKS];
    unsigned count = 0;
    p->barriers++;
    const int64_t offset = (char *)(p->arrivals + p->rank) - p->base[p->rank];
    for (int64_t i = 0; i < p->ranks; i++)
        if (i != p->rank) operations[count++] = peer_write((uint32_t *)(p->base[i] + offset), p->barriers);
    for (int64_t i = 0; i < p->ranks; i++)
        if (i != p->rank) operations[count++] = peer_wait(p->arrivals + i, p->barriers);
    const CUresult status = p->enqueue((CUstream)stream, count, operations, 0);
    if (status != CUDA_SUCCESS) die("cuStreamBatchMemOp failed with CUresult %d", (int)status);
}

// to [bytes] = what lies at `part` in the memory of rank `from` of the group.
static inline cudaError_t peer_copy(const PeerMemory *p, int64_t from, const void *part, void *to, int64_t bytes,
                                    cudaStream_t stream) {
    const int64_t offset = (const char *)part - p->base[p->rank];
    return cudaMemcpyAsync(to, p->base[from] + offset, (size_t)bytes, cudaMemcpyDeviceToDevice, stream);
}

// to [ranks][bytes] = what lies at `part` in each rank's memory, in their order; not with_own: [ranks - 1][bytes], the
// others' alone.
static inline void peer_read(const PeerMemory *p, const void *part, void *to, int64_t bytes, bool with_own,
                             cudaStream_t stream) {
    for (int64_t i = !with_own; i < p->ranks; i++) {
        const int64_t from = (p->rank + i) % p->ranks;  // no two ranks read the same one at a time
        const int64_t index = with_own || from < p->rank ? from : from - 1;
        CUDA_CHECK(peer_copy(p, from, part, (char *)to + index * bytes, bytes, stream));
    }
}

static inline void peer_memory_close(PeerMemory *p) {
    for (int64_t i = 0; i < p->ranks; i++)
        if (i != p->rank && p->base[i]) CUDA_CHECK(cudaIpcCloseMemHandle(p->base[i]));
    memset(p, 0, sizeof *p);
}

// Whether streams can wait for values in memory here, and write them to the others.
static inline bool peer_can_wait(PeerMemory *p, cudaStream_t stream) {
    void *function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || !function) return false;
    p->enqueue = (StreamMemoryOperations)function;
    CUstreamBatchMemOpParams operations[PEER_MAX_RANKS + 1];
    const int64_t offset = (char *)(p->arrivals + p->rank) - p->base[p->rank];
    for (int64_t i = 0; i < p->ranks; i++)
        operations[i] = peer_write((uint32_t *)(p->base[i] + offset), 0);  // as it is already
    operations[p->ranks] = peer_wait(p->arrivals + p->rank, 0);
    return p->enqueue((CUstream)stream, (unsigned)p->ranks + 1, operations, 0) == CUDA_SUCCESS;
}

// Opens the others' memory. False, with the reason, where this rank cannot.
static inline bool peer_memory_try(PeerMemory *p, const Comm *c, const PeerOffer *offers, cudaStream_t stream,
                                   char *reason, size_t capacity) {
    const PeerOffer *own = &offers[p->rank];
    const char *disabled = getenv("NCCL_P2P_DISABLE");
    if (disabled && strtol(disabled, NULL, 0) == 1) {  // NCCL takes no other value for yes
        format_checked(reason, capacity, "NCCL_P2P_DISABLE=1 says that the GPUs here cannot read each other's memory");
        return false;
    }
    for (int64_t i = 0; i < p->ranks; i++) {
        if (offers[i].bytes != own->bytes)
            die("rank %lld of the shard group has planned %lld bytes, this one %lld", (long long)i,
                (long long)offers[i].bytes, (long long)own->bytes);
        if (strcmp(offers[i].host, own->host) != 0) {
            format_checked(reason, capacity,
                           "the ranks that share a copy of the weights are on several hosts, %s and %s", own->host,
                           offers[i].host);
            return false;
        }
        cudaError_t status = offers[i].status;
        if (status == cudaSuccess && i != p->rank)
            status = cudaIpcOpenMemHandle((void **)&p->base[i], offers[i].handle, cudaIpcMemLazyEnablePeerAccess);
        if (status == cudaSuccess) continue;
        if (i != p->rank) p->base[i] = NULL;
        format_checked(reason, capacity, "the memory of rank %lld's GPU cannot be read from rank %lld's (%s)",
                       (long long)(c->rank - c->shard_rank + i), (long long)c->rank, cudaGetErrorString(status));
        return false;
    }
    if (peer_can_wait(p, stream)) return true;
    format_checked(reason, capacity, "the driver cannot let streams wait for memory");
    return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// The proof

// Word i < 2^24 of the pattern of a rank of the run: no two words of 256 ranks in a row are alike, and all bits change.
static inline uint32_t peer_pattern(int64_t rank, int64_t i) {
    return ((uint32_t)rank << 24 | (uint32_t)i) * 0x9e3779b1u;
}

// The first of n words that is not the rank's pattern; -1: all are.
static inline int64_t peer_pattern_differs(const uint32_t *words, int64_t n, int64_t rank) {
    for (int64_t i = 0; i < n; i++)
        if (words[i] != peer_pattern(rank, i)) return i;
    return -1;
}

// Waits until the stream has nothing left to do. After a failure there CUDA refuses all later calls, so the run ends.
static inline void peer_finish(cudaStream_t stream) {
    const cudaError_t status = cudaStreamSynchronize(stream);
    if (status != cudaSuccess)
        die("a first copy between the GPUs failed: %s; --copy-engines off lets NCCL move weights and gradients",
            cudaGetErrorString(status));
}

// room [bytes] = the pattern of this rank, which is number `rank` of the run.
static inline void peer_write_pattern(int64_t rank, char *room, int64_t bytes, cudaStream_t stream) {
    const int64_t n = bytes / (int64_t)sizeof(uint32_t);
    uint32_t *words = (uint32_t *)xcalloc((size_t)n, sizeof *words);
    for (int64_t i = 0; i < n; i++) words[i] = peer_pattern(rank, i);
    CUDA_CHECK(cudaMemcpyAsync(room, words, (size_t)bytes, cudaMemcpyHostToDevice, stream));
    peer_finish(stream);
    free(words);
}

// Reads the pattern of rank `from` of the group, which is number `its_rank` of the run and wrote it to its own room, by
// way of this rank's room + bytes, to words [bytes] on the host. False, with the reason, if it is not what was written.
static inline bool peer_check_pattern(const PeerMemory *p, int64_t from, int64_t its_rank, char *room, int64_t bytes,
                                      uint32_t *words, cudaStream_t stream, char *reason, size_t capacity) {
    const cudaError_t status = peer_copy(p, from, room, room + bytes, bytes, stream);
    if (status != cudaSuccess) {
        (void)cudaGetLastError();  // as of other refusals: peer_memory_open
        format_checked(reason, capacity, "the memory of rank %lld's GPU cannot be copied from another GPU (%s)",
                       (long long)its_rank, cudaGetErrorString(status));
        return false;
    }
    CUDA_CHECK(cudaMemcpyAsync(words, room + bytes, (size_t)bytes, cudaMemcpyDeviceToHost, stream));
    peer_finish(stream);
    const int64_t i = peer_pattern_differs(words, bytes / (int64_t)sizeof *words, its_rank);
    if (i < 0) return true;
    format_checked(reason, capacity,
                   "the memory of rank %lld's GPU reads wrong from rank %lld's, "
                   "first at byte %lld of %lld: 0x%08x, and 0x%08x was written",
                   (long long)its_rank, (long long)(its_rank - from + p->rank), (long long)(i * 4), (long long)bytes,
                   words[i], peer_pattern(its_rank, i));
    return false;
}

// True if this rank, number `rank` of the run, reads the others' patterns right. room [2][bytes] begins with its own.
static inline bool peer_check_patterns(const PeerMemory *p, int64_t rank, char *room, int64_t bytes,
                                       cudaStream_t stream, char *reason, size_t capacity) {
    uint32_t *words = (uint32_t *)xcalloc((size_t)bytes, 1);
    bool right = true;
    for (int64_t i = 1; i < p->ranks && right; i++) {
        const int64_t from = (p->rank + i) % p->ranks;
        right = peer_check_pattern(p, from, rank - p->rank + from, room, bytes, words, stream, reason, capacity);
    }
    free(words);
    return right;
}

// True if the stream comes to its end within so many seconds.
static inline bool peer_ends(cudaStream_t stream, double seconds) {
    const double start = seconds_now();
    for (;;) {
        const cudaError_t status = cudaStreamQuery(stream);
        if (status == cudaSuccess) return true;
        if (status != cudaErrorNotReady) peer_finish(stream);
        if (seconds_now() - start > seconds) return false;
        sched_yield();
    }
}

// Another stream writes the values that the last barrier waits for, so that its stream goes on without the other ranks.
static inline void peer_release(const PeerMemory *p) {
    CUstreamBatchMemOpParams operations[PEER_MAX_RANKS];
    cudaStream_t other;
    CUDA_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (int64_t i = 0; i < p->ranks; i++) operations[i] = peer_write(p->arrivals + i, p->barriers);
    const CUresult status = p->enqueue((CUstream)other, (unsigned)p->ranks, operations, 0);
    if (status != CUDA_SUCCESS) die("cuStreamBatchMemOp failed with CUresult %d", (int)status);
    CUDA_CHECK(cudaStreamDestroy(other));  // what it has to do is done all the same
}

// One barrier, which all ranks come to at about the same time. False, with the reason, where it does not come within so
// many seconds; the stream goes on all the same. Dies if it cannot.
static inline bool peer_prove_barrier(PeerMemory *p, int64_t rank, double seconds, cudaStream_t stream, char *reason,
                                      size_t capacity) {
    peer_barrier(p, stream);
    if (peer_ends(stream, seconds)) return true;
    peer_release(p);
    if (!peer_ends(stream, seconds))
        die_with(EXIT_LOST,
                 "a barrier between the GPUs did not come within %g s, and the stream that waits for it "
                 "cannot be released; --copy-engines off lets NCCL move weights and gradients",
                 seconds);
    format_checked(reason, capacity, "a barrier between the GPUs did not come to rank %lld within %g s",
                   (long long)rank, seconds);
    return false;
}

// Collective over all ranks: whether reads and barriers work on every rank. `room`: room_bytes at the same place in
// each rank's memory, zero before and after, which nothing else uses meanwhile. If so, all have come to one barrier.
static inline bool peer_memory_prove(PeerMemory *p, const Comm *c, char *room, int64_t room_bytes, cudaStream_t stream,
                                     char *reason, size_t capacity) {
    const int64_t bytes = min_i64(PEER_PROOF_BYTES, room_bytes / 32 * 16);
    peer_write_pattern(c->rank, room, bytes, stream);
    comm_barrier(c, COMM_SHARD);  // all have written
    const bool reads = peer_check_patterns(p, c->rank, room, bytes, stream, reason, capacity);
    const bool all_read = comm_min(c, COMM_WORLD, reads) != 0;
    CUDA_CHECK(cudaMemsetAsync(room, 0, (size_t)(2 * bytes), stream));
    peer_finish(stream);
    if (!all_read) return false;
    const bool waits = peer_prove_barrier(p, c->rank, PEER_PROOF_SECONDS, stream, reason, capacity);
    return comm_min(c, COMM_WORLD, waits) != 0;
}

// ---------------------------------------------------------------------------------------------------------------------

// Collective over all ranks: opens the ranks' `memory` [bytes], in which `arrivals` [PEER_MAX_RANKS] are zero, to each
// other within shard groups, and proves it in `room` (peer_memory_prove). False and p->ranks 0 unless all of that works
// on every rank; `reason`, empty elsewhere, is filled where it does not.
static inline bool peer_memory_open(PeerMemory *p, const Comm *c, char *memory, int64_t bytes, uint32_t *arrivals,
                                    void *room, int64_t room_bytes, cudaStream_t stream, char *reason,
                                    size_t capacity) {
    PeerOffer offers[PEER_MAX_RANKS];
    memset(p, 0, sizeof *p);
    memset(offers, 0, sizeof offers);
    if (c->shard_size > PEER_MAX_RANKS) {
        format_checked(reason, capacity, "more than %d ranks share one copy of the weights", PEER_MAX_RANKS);
        return false;
    }
    p->ranks = c->shard_size, p->rank = c->shard_rank;
    p->base[p->rank] = memory, p->arrivals = arrivals;
    PeerOffer *own = &offers[c->shard_rank];
    memcpy(own->host, c->host, sizeof own->host);
    own->bytes = bytes;
    own->status = cudaIpcGetMemHandle(&own->handle, memory);
    comm_all_gather(c, COMM_SHARD, own, offers, (int64_t)sizeof *own);
    const bool here = peer_memory_try(p, c, offers, stream, reason, capacity);
    if (!here) (void)cudaGetLastError();  // a refusal is no failure of the run: no later launch may find it
    peer_finish(stream);                  // before any rank closes what the stream still writes to
    const bool everywhere = comm_min(c, COMM_WORLD, here) != 0 &&
                            peer_memory_prove(p, c, (char *)room, room_bytes, stream, reason, capacity);
    if (!everywhere) peer_memory_close(p);
    return everywhere;
}

#endif
