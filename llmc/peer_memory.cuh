// The GPUs of one host reading each other's memory with their copy engines (CUDA IPC over NVLink or PCIe). NCCL's kernels take multiprocessors from the
// matrix products beside them, and a product that fills the GPU then takes up to twice as long; copies take none.
//
// A rank may read what the others have written before a barrier (peer_barrier, or a collective of NCCL that waits for all of them), and must be done, as
// another barrier tells them, before they write there again.
#ifndef LLMC_PEER_MEMORY_CUH
#define LLMC_PEER_MEMORY_CUH

#include <cuda.h>

#include "comm.h"
#include "cuda_utils.cuh"

enum { PEER_MAX_RANKS = 64 };

typedef CUresult (*StreamMemoryOperations)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned);

// The memory of all ranks of a group, as this process sees it. The same thing lies at the same place in all.
typedef struct {
    int64_t ranks, place;         // of the group; ranks 0: not available
    char *base[PEER_MAX_RANKS];   // base[place] is this rank's own
    uint32_t *arrivals;           // [PEER_MAX_RANKS] in it: how many barriers each rank has reached; the ranks write it
    uint32_t barriers;            // enqueued
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
    const int64_t offset = (char *)(p->arrivals + p->place) - p->base[p->place];
    for (int64_t i = 0; i < p->ranks; i++)
        if (i != p->place) operations[count++] = peer_write((uint32_t *)(p->base[i] + offset), p->barriers);
    for (int64_t i = 0; i < p->ranks; i++)
        if (i != p->place) operations[count++] = peer_wait(p->arrivals + i, p->barriers);
    const CUresult status = p->enqueue((CUstream)stream, count, operations, 0);
    if (status != CUDA_SUCCESS) die("cuStreamBatchMemOp failed with CUresult %d", (int)status);
}

// to [ranks][bytes] = what lies at `part` in each rank's memory, in their order; not with_own: [ranks - 1][bytes], the others' alone.
static inline void peer_read(const PeerMemory *p, const void *part, void *to, int64_t bytes, bool with_own, cudaStream_t stream) {
    const int64_t offset = (const char *)part - p->base[p->place];
    for (int64_t i = !with_own; i < p->ranks; i++) {
        const int64_t from = (p->place + i) % p->ranks;  // no two ranks read the same one at a time
        const int64_t index = with_own || from < p->place ? from : from - 1;
        CUDA_CHECK(cudaMemcpyAsync((char *)to + index * bytes, p->base[from] + offset, (size_t)bytes, cudaMemcpyDeviceToDevice, stream));
    }
}

static inline void peer_memory_close(PeerMemory *p) {
    for (int64_t i = 0; i < p->ranks; i++)
        if (i != p->place && p->base[i]) CUDA_CHECK(cudaIpcCloseMemHandle(p->base[i]));
    memset(p, 0, sizeof *p);
}

// Whether streams can wait for values in memory here, and write them to the others.
static inline bool peer_can_wait(PeerMemory *p, cudaStream_t stream) {
    void *function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || !function) return false;
    p->enqueue = (StreamMemoryOperations)function;
    CUstreamBatchMemOpParams operations[PEER_MAX_RANKS + 1];
    const int64_t offset = (char *)(p->arrivals + p->place) - p->base[p->place];
    for (int64_t i = 0; i < p->ranks; i++) operations[i] = peer_write((uint32_t *)(p->base[i] + offset), 0);  // as it is already
    operations[p->ranks] = peer_wait(p->arrivals + p->place, 0);
    return p->enqueue((CUstream)stream, (unsigned)p->ranks + 1, operations, 0) == CUDA_SUCCESS;
}

// Opens the others' memory. False, with the reason, where this rank cannot.
static inline bool peer_memory_try(PeerMemory *p, const PeerOffer *offers, cudaStream_t stream, char *reason, size_t capacity) {
    const PeerOffer *own = &offers[p->place];
    for (int64_t i = 0; i < p->ranks; i++) {
        if (offers[i].bytes != own->bytes) die("rank %lld of the shard group has planned %lld bytes, this one %lld", (long long)i, (long long)offers[i].bytes, (long long)own->bytes);
        if (strcmp(offers[i].host, own->host) != 0) {
            format_checked(reason, capacity, "the ranks that share a copy of the weights are on several hosts, %s and %s", own->host, offers[i].host);
            return false;
        }
        cudaError_t status = offers[i].status;
        if (status == cudaSuccess && i != p->place) status = cudaIpcOpenMemHandle((void **)&p->base[i], offers[i].handle, cudaIpcMemLazyEnablePeerAccess);
        if (status == cudaSuccess) continue;
        if (i != p->place) p->base[i] = NULL;
        format_checked(reason, capacity, "the memory of rank %lld's GPU cannot be read from here (%s)", (long long)i, cudaGetErrorString(status));
        return false;
    }
    if (peer_can_wait(p, stream)) return true;
    format_checked(reason, capacity, "the driver cannot let streams wait for memory");
    return false;
}

// Collective over all ranks: opens the ranks' `memory` [bytes], in which `arrivals` [PEER_MAX_RANKS] are zero, to each other within shard groups. False and
// p->ranks 0 unless every rank can; `reason`, empty elsewhere, is filled where one cannot.
static inline bool peer_memory_open(PeerMemory *p, const Comm *c, char *memory, int64_t bytes, uint32_t *arrivals, cudaStream_t stream, char *reason, size_t capacity) {
    PeerOffer offers[PEER_MAX_RANKS];
    memset(p, 0, sizeof *p);
    memset(offers, 0, sizeof offers);
    if (c->group > PEER_MAX_RANKS) {
        format_checked(reason, capacity, "more than %d ranks share one copy of the weights", PEER_MAX_RANKS);
        return false;
    }
    p->ranks = c->group, p->place = c->place;
    p->base[p->place] = memory, p->arrivals = arrivals;
    PeerOffer *own = &offers[c->place];
    memcpy(own->host, c->host, sizeof own->host);
    own->bytes = bytes;
    own->status = cudaIpcGetMemHandle(&own->handle, memory);
    comm_all_gather(c, COMM_SHARD, own, offers, (int64_t)sizeof *own);
    const bool here = peer_memory_try(p, offers, stream, reason, capacity), everywhere = comm_min(c, COMM_WORLD, here) != 0;
    if (!here) (void)cudaGetLastError();  // a refusal is no failure of the run: no later launch may find it
    if (!everywhere) peer_memory_close(p);
    return everywhere;
}

#endif
