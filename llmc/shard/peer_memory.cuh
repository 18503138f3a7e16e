// GPUs of one host read each other's memory with their copy engines (CUDA IPC over NVLink or PCIe).
// NCCL's kernels take multiprocessors (SMs) from GEMMs that run at the same time, and a GEMM that fills the GPU then
// takes up to twice as long. Copies by copy engines take no SMs.
//
// A barrier (peer_barrier, or an NCCL collective that waits for all ranks) must come between a rank's write and another
// rank's read of it, and again between that read and the next write.
//
// On some hosts peer access can be opened but reads or writes wrong data (PCIe behind an IOMMU, or in a virtual
// machine). So before the first use each rank checks a pattern that every other rank of its group wrote, and one
// barrier must complete within PEER_PROOF_SECONDS.
#ifndef LLMC_PEER_MEMORY_CUH
#define LLMC_PEER_MEMORY_CUH

#include <cuda.h>
#include <sched.h>

#include "../ranks/comm.h"
#include "../gpu/cuda_utils.cuh"

enum { PEER_MAX_RANKS = 64 };

// For the check at start: the most bytes of a rank's pattern, and the timeout of the barrier in seconds. The barrier
// takes microseconds; ranks reach it some milliseconds apart.
#define PEER_PROOF_BYTES (2ll << 20)
#define PEER_PROOF_SECONDS 5

typedef CUresult (*StreamMemoryOperations)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned);

// The memory of all ranks of a group, mapped into this process. An array has the same offset in each rank's memory.
typedef struct {
    int64_t ranks, rank;         // size of the group and this rank's index in it; ranks is 0 if peers are not open
    char *base[PEER_MAX_RANKS];  // start of each rank's memory; base[rank] is this rank's own
    uint32_t *arrivals;          // [PEER_MAX_RANKS] in own memory: barriers that each rank has reached; peers write it
    uint32_t barriers;           // number of barriers enqueued
    StreamMemoryOperations enqueue;
} PeerMemory;

// Each rank sends this description of its memory to the ranks of its group.
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
    o.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;  // a cyclic comparison: the counter may overflow
    return o;
}

// Enqueues a barrier of the group, which takes no SM. Later work on `stream` runs once the stream of each rank of the
// group has reached the barrier.
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

// to [bytes] = bytes of rank `from` of the group. Their offset in its memory is that of `part` in this rank's memory.
static inline cudaError_t peer_copy(const PeerMemory *p, int64_t from, const void *part, void *to, int64_t bytes,
                                    cudaStream_t stream) {
    const int64_t offset = (const char *)part - p->base[p->rank];
    return cudaMemcpyAsync(to, p->base[from] + offset, (size_t)bytes, cudaMemcpyDeviceToDevice, stream);
}

// to [ranks][bytes] = the bytes of each rank at the offset of `part`, in the order of ranks. Without with_own, this
// rank is skipped: to [ranks - 1][bytes].
static inline void peer_read(const PeerMemory *p, const void *part, void *to, int64_t bytes, bool with_own,
                             cudaStream_t stream) {
    for (int64_t i = !with_own; i < p->ranks; i++) {
        const int64_t from = (p->rank + i) % p->ranks;  // in each turn all ranks read from different peers
        const int64_t index = with_own || from < p->rank ? from : from - 1;
        CUDA_CHECK(peer_copy(p, from, part, (char *)to + index * bytes, bytes, stream));
    }
}

static inline void peer_memory_close(PeerMemory *p) {
    for (int64_t i = 0; i < p->ranks; i++)
        if (i != p->rank && p->base[i]) CUDA_CHECK(cudaIpcCloseMemHandle(p->base[i]));
    memset(p, 0, sizeof *p);
}

// True if streams on this GPU can wait for values in memory and write values to peers. Tries it with zeros, which
// change nothing. Sets p->enqueue.
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
        operations[i] = peer_write((uint32_t *)(p->base[i] + offset), 0);  // it is 0 already
    operations[p->ranks] = peer_wait(p->arrivals + p->rank, 0);
    return p->enqueue((CUstream)stream, (unsigned)p->ranks + 1, operations, 0) == CUDA_SUCCESS;
}

// Opens the memory of the other ranks of the group. Returns false, with the reason, if this rank cannot. Dies if
// another rank has planned another size of memory than this one.
static inline bool peer_memory_try(PeerMemory *p, const Comm *c, const PeerOffer *offers, cudaStream_t stream,
                                   char *reason, size_t capacity) {
    const PeerOffer *own = &offers[p->rank];
    const char *disabled = getenv("NCCL_P2P_DISABLE");
    if (disabled && strtol(disabled, NULL, 0) == 1) {  // NCCL also tests for exactly 1
        format_checked(reason, capacity, "NCCL_P2P_DISABLE=1 forbids GPUs to read each other's memory");
        return false;
    }
    for (int64_t i = 0; i < p->ranks; i++) {
        if (offers[i].bytes != own->bytes)
            die("rank %lld of the shard group has planned %lld bytes of memory, but this rank has planned %lld",
                (long long)i, (long long)offers[i].bytes, (long long)own->bytes);
        if (strcmp(offers[i].host, own->host) != 0) {
            format_checked(reason, capacity, "the ranks of a shard group are on several hosts, %s and %s", own->host,
                           offers[i].host);
            return false;
        }
        cudaError_t status = offers[i].status;
        if (status == cudaSuccess && i != p->rank)
            status = cudaIpcOpenMemHandle((void **)&p->base[i], offers[i].handle, cudaIpcMemLazyEnablePeerAccess);
        if (status == cudaSuccess) continue;
        if (i != p->rank) p->base[i] = NULL;
        format_checked(reason, capacity,
                       "the memory of rank %lld's GPU cannot be opened to other ranks, as rank %lld found (%s)",
                       (long long)(c->rank - c->shard_rank + i), (long long)c->rank, cudaGetErrorString(status));
        return false;
    }
    if (peer_can_wait(p, stream)) return true;
    format_checked(reason, capacity, "cuStreamBatchMemOp does not work here");
    return false;
}

// ---- the check at start

// Returns word i < 2^24 of the pattern of rank `rank` of the run. All words of 256 consecutive ranks differ, and all
// bits vary.
static inline uint32_t peer_pattern(int64_t rank, int64_t i) {
    return ((uint32_t)rank << 24 | (uint32_t)i) * 0x9e3779b1u;
}

// Waits until the stream is idle. After a failure CUDA refuses all later calls, so the run ends.
static inline void peer_finish(cudaStream_t stream) {
    const cudaError_t status = cudaStreamSynchronize(stream);
    if (status != cudaSuccess)
        die("the check of copies between the GPUs failed: %s; --copy-engines off lets NCCL move weights and gradients",
            cudaGetErrorString(status));
}

// scratch [bytes] = the pattern of this rank, which is rank `rank` of the run.
static inline void peer_write_pattern(int64_t rank, char *scratch, int64_t bytes, cudaStream_t stream) {
    const int64_t n = bytes / (int64_t)sizeof(uint32_t);
    uint32_t *words = (uint32_t *)xcalloc((size_t)n, sizeof *words);
    for (int64_t i = 0; i < n; i++) words[i] = peer_pattern(rank, i);
    CUDA_CHECK(cudaMemcpyAsync(scratch, words, (size_t)bytes, cudaMemcpyHostToDevice, stream));
    peer_finish(stream);
    free(words);
}

// Checks the pattern that rank `from` of the group, rank `its_rank` of the run, wrote to its scratch. Copies it to this
// rank's scratch + bytes, and from there to words [bytes] on the host. Returns false, with the reason, if the pattern
// cannot be copied or is wrong.
static inline bool peer_check_pattern(const PeerMemory *p, int64_t from, int64_t its_rank, char *scratch, int64_t bytes,
                                      uint32_t *words, cudaStream_t stream, char *reason, size_t capacity) {
    const cudaError_t status = peer_copy(p, from, scratch, scratch + bytes, bytes, stream);
    if (status != cudaSuccess) {
        (void)cudaGetLastError();  // clears the error: the run goes on without copy engines
        format_checked(reason, capacity, "rank %lld's GPU cannot copy from the memory of rank %lld's GPU (%s)",
                       (long long)(its_rank - from + p->rank), (long long)its_rank, cudaGetErrorString(status));
        return false;
    }
    CUDA_CHECK(cudaMemcpyAsync(words, scratch + bytes, (size_t)bytes, cudaMemcpyDeviceToHost, stream));
    peer_finish(stream);
    const int64_t n = bytes / (int64_t)sizeof *words;
    int64_t i = 0;  // the first word that differs
    while (i < n && words[i] == peer_pattern(its_rank, i)) i++;
    if (i == n) return true;
    format_checked(reason, capacity,
                   "the memory of rank %lld's GPU gives wrong data to rank %lld's GPU, "
                   "first at byte %lld of %lld: 0x%08x instead of 0x%08x",
                   (long long)its_rank, (long long)(its_rank - from + p->rank), (long long)(i * 4), (long long)bytes,
                   words[i], peer_pattern(its_rank, i));
    return false;
}

// True if this rank, rank `rank` of the run, reads the right pattern from every other rank of the group. The first half
// of scratch [2][bytes] must hold this rank's own pattern.
static inline bool peer_check_patterns(const PeerMemory *p, int64_t rank, char *scratch, int64_t bytes,
                                       cudaStream_t stream, char *reason, size_t capacity) {
    uint32_t *words = (uint32_t *)xcalloc((size_t)bytes, 1);
    bool right = true;
    for (int64_t i = 1; i < p->ranks && right; i++) {
        const int64_t from = (p->rank + i) % p->ranks;
        right = peer_check_pattern(p, from, rank - p->rank + from, scratch, bytes, words, stream, reason, capacity);
    }
    free(words);
    return right;
}

// True if the stream becomes idle within `seconds`. Dies if work on it fails.
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

// Releases this rank's stream from the last barrier: another stream writes the values that the barrier waits for.
static inline void peer_release(const PeerMemory *p) {
    CUstreamBatchMemOpParams operations[PEER_MAX_RANKS];
    cudaStream_t other;
    CUDA_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (int64_t i = 0; i < p->ranks; i++) operations[i] = peer_write(p->arrivals + i, p->barriers);
    const CUresult status = p->enqueue((CUstream)other, (unsigned)p->ranks, operations, 0);
    if (status != CUDA_SUCCESS) die("cuStreamBatchMemOp failed with CUresult %d", (int)status);
    CUDA_CHECK(cudaStreamDestroy(other));  // work enqueued on it still runs
}

// Runs one barrier, which all ranks reach at about the same time. Returns false, with the reason, if it does not
// complete within `seconds`; the stream is then released. Dies if it cannot be released.
static inline bool peer_prove_barrier(PeerMemory *p, int64_t rank, double seconds, cudaStream_t stream, char *reason,
                                      size_t capacity) {
    peer_barrier(p, stream);
    if (peer_ends(stream, seconds)) return true;
    peer_release(p);
    if (!peer_ends(stream, seconds))
        die_with(EXIT_LOST,
                 "a barrier between the GPUs did not complete within %g s, and the stream that waits for it "
                 "cannot be released; --copy-engines off lets NCCL move weights and gradients",
                 seconds);
    format_checked(reason, capacity, "a barrier between the GPUs did not complete on rank %lld within %g s",
                   (long long)rank, seconds);
    return false;
}

// Collective over all ranks. True if reads and barriers work on every rank; all ranks have then passed one barrier.
// scratch [scratch_bytes] has the same offset in each rank's memory and must not be in use. The bytes of it that the
// check writes are zero afterwards.
static inline bool peer_memory_prove(PeerMemory *p, const Comm *c, char *scratch, int64_t scratch_bytes,
                                     cudaStream_t stream, char *reason, size_t capacity) {
    const int64_t bytes = min_i64(PEER_PROOF_BYTES, scratch_bytes / 32 * 16);
    peer_write_pattern(c->rank, scratch, bytes, stream);
    comm_barrier(c, COMM_SHARD);  // all ranks of the group have written
    const bool reads = peer_check_patterns(p, c->rank, scratch, bytes, stream, reason, capacity);
    const bool all_read = comm_min(c, COMM_WORLD, reads) != 0;
    CUDA_CHECK(cudaMemsetAsync(scratch, 0, (size_t)(2 * bytes), stream));
    peer_finish(stream);
    if (!all_read) return false;
    const bool waits = peer_prove_barrier(p, c->rank, PEER_PROOF_SECONDS, stream, reason, capacity);
    return comm_min(c, COMM_WORLD, waits) != 0;
}

// ---------------------------------------------------------------------------------------------------------------------

// Collective over all ranks. Opens memory [bytes] of each rank to the other ranks of its shard group, and checks reads
// and barriers in `scratch` (peer_memory_prove). `arrivals` [PEER_MAX_RANKS] and `scratch` are parts of `memory`, and
// `arrivals` is zero. Returns true if everything works on every rank. Else returns false, sets p->ranks to 0, and sets
// `reason` on the ranks on which something failed.
static inline bool peer_memory_open(PeerMemory *p, const Comm *c, char *memory, int64_t bytes, uint32_t *arrivals,
                                    void *scratch, int64_t scratch_bytes, cudaStream_t stream, char *reason,
                                    size_t capacity) {
    PeerOffer offers[PEER_MAX_RANKS];
    memset(p, 0, sizeof *p);
    memset(offers, 0, sizeof offers);
    if (c->shard_size > PEER_MAX_RANKS) {
        format_checked(reason, capacity, "a shard group has more than %d ranks", PEER_MAX_RANKS);
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
    if (!here) (void)cudaGetLastError();  // clears the error: the run goes on without copy engines
    peer_finish(stream);                  // no rank may close memory that the stream still writes to
    const bool everywhere = comm_min(c, COMM_WORLD, here) != 0 &&
                            peer_memory_prove(p, c, (char *)scratch, scratch_bytes, stream, reason, capacity);
    if (!everywhere) peer_memory_close(p);
    return everywhere;
}

#endif
