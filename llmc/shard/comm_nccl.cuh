// NCCL for the GPU trainer: communicators for the groups of ranks, one stream, and checks for errors.
//
// All collectives of an Nccl run on its one stream, of high priority, in the order of the calls. The order is the same
// on every rank, so no two communicators can deadlock. Collectives are enqueued and finish like kernels; events order
// them with the compute stream (fsdp.cuh).
//
// The communicators are non-blocking: no NCCL call waits for another rank. Code that waits for collectives calls
// nccl_watch, which ends the run when NCCL reports an error; the message names rank, step and, if there is one, the
// oldest pending operation. nccl_watch also reports pending operations to the watcher thread (watch.h), which ends the
// run if all ranks wait and none makes progress for --stall-timeout seconds. Nothing calls ncclCommAbort: it may wait
// for a rank that is gone, and kernels end with their process anyway.
#ifndef LLMC_COMM_NCCL_CUH
#define LLMC_COMM_NCCL_CUH

#include <nccl.h>
#include <sched.h>

#include "../ranks/comm.h"
#include "../config/parameters.h"
#include "../gpu/cuda_utils.cuh"

// Largest number of multiprocessors (SMs) for a collective. Each block of NCCL occupies one SM, also while it waits for
// data; GEMMs that run at the same time cannot use that SM. More blocks move data faster. 16 are about an eighth of an
// H200's SMs; NCCL's own limit is higher.
#define NCCL_MAX_CTAS 16

// Largest number of pending operations (collectives or copies); the host waits before it enqueues more.
#define NCCL_PENDING 256

// Assumed GPU memory of one communicator, outside the arena: channels and their buffers. NCCL allocates most of it at
// first use.
#define NCCL_OVERHEAD_BYTES (512ll << 20)

typedef struct {
    cudaEvent_t begun, done;
    const char *what;
    int64_t layer, step;  // layer is ROOT for the root unit, NO_LAYER for no unit; step: Nccl.step at that time
} NcclOperation;

typedef struct {
    const Comm *host;
    ncclComm_t comms[COMM_NUM_GROUPS];  // NULL for a group of one rank. Groups with the same ranks share one
    cudaStream_t stream;
    NcclOperation operations[NCCL_PENDING];
    int64_t step;                // current step of the trainer, counted from 0, for messages; -1 before the first
    int64_t enqueued, finished;  // numbers of operations that are enqueued, and known to have finished
} Nccl;

// Returns the exit status for an error of NCCL. Only the text of NCCL's message shows that memory was the reason.
static inline int nccl_exit_code(ncclResult_t result) {
    const char *error = ncclGetLastError(NULL);
    if (result == ncclRemoteError) return EXIT_LOST;
    return error && strstr(error, "out of memory") ? EXIT_MEMORY : EXIT_OTHER;
}

static inline void nccl_check(ncclResult_t result, const char *call, const char *file, int line) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    comm_wait_for_kill();
    die_with(nccl_exit_code(result), "%s:%d: %s: %s (%s)", file, line, call, ncclGetErrorString(result),
             ncclGetLastError(NULL));
}
#define NCCL_CHECK(call) nccl_check((call), #call, __FILE__, __LINE__)

// Ends the run with status `code`. The message names the reason, and the oldest unfinished operation if there is one.
__attribute__((noreturn)) static inline void nccl_die(const Nccl *n, int code, const char *reason) {
    const NcclOperation *o = &n->operations[n->finished % NCCL_PENDING];
    if (n->finished == n->enqueued)
        die_with(code, "step %lld (0: before the first), between collectives or at the start of one: %s",
                 (long long)n->step + 1, reason);
    char of[64] = "";
    if (o->layer == ROOT) format_checked(of, sizeof of, " of the root unit");
    if (o->layer >= 0) format_checked(of, sizeof of, " of layer %lld", (long long)o->layer);
    die_with(code, "step %lld (0: before the first), %s%s: %s", (long long)o->step + 1, o->what, of, reason);
}

// Returns an error of any communicator, or ncclInProgress while one still executes a call, or ncclSuccess.
static inline ncclResult_t nccl_state(const Nccl *n) {
    ncclResult_t worst = ncclSuccess;
    for (int g = 0; g < COMM_NUM_GROUPS; g++) {
        ncclResult_t state = ncclSuccess;
        if (n->comms[g]) NCCL_CHECK(ncclCommGetAsyncError(n->comms[g], &state));
        if (worst == ncclSuccess || (state != ncclSuccess && state != ncclInProgress)) worst = state;
    }
    return worst;
}

// True if the event has completed.
static inline bool nccl_has_happened(cudaEvent_t event) {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) return false;
    CUDA_CHECK(status);
    return true;
}

// Tells the watcher thread how many operations are pending, and the oldest of them. `finished` is true if an operation
// has just finished.
static inline void nccl_publish(const Nccl *n, bool finished) {
    const NcclOperation *o = &n->operations[n->finished % NCCL_PENDING];
    activity_operation(n->enqueued - n->finished, o->what, o->layer, finished);
}

// Counts the operations that have finished. Ends the run if NCCL reports an error.
static inline void nccl_watch(Nccl *n) {
    while (n->finished < n->enqueued && nccl_has_happened(n->operations[n->finished % NCCL_PENDING].done)) {
        n->finished++;
        nccl_publish(n, true);
    }
    if (n->finished < n->enqueued && !nccl_has_happened(n->operations[n->finished % NCCL_PENDING].begun))
        activity_moved();  // the oldest operation waits for this rank's own earlier work: that counts as progress
    const ncclResult_t state = nccl_state(n);
    if (state == ncclSuccess || state == ncclInProgress) return;
    comm_wait_for_kill();
    char reason[512];
    snprintf(reason, sizeof reason, "NCCL reports \"%s\" (%.300s)", ncclGetErrorString(state), ncclGetLastError(NULL));
    nccl_die(n, nccl_exit_code(state), reason);
}

// Blocks the host until the event, of any stream, has completed.
static inline void nccl_wait(Nccl *n, cudaEvent_t event) {
    while (!nccl_has_happened(event)) {
        nccl_watch(n);
        sched_yield();
    }
    nccl_watch(n);
}

// Blocks the host until NCCL has executed the last call, whose work on the GPU may still run. `what` is static text.
static inline void nccl_settle(Nccl *n, const char *what) {
    if (nccl_state(n) == ncclInProgress) {
        activity_begin(ACTIVITY_WAITING, what, "");
        while (nccl_state(n) == ncclInProgress) sched_yield();
        activity_end();
    }
    nccl_watch(n);
}

// Work enqueued on n->stream between nccl_begin_operation and nccl_end_operation is one operation for nccl_watch.
// `layer` may be ROOT or NO_LAYER.
static inline void nccl_begin_operation(Nccl *n, const char *what, int64_t layer) {
    nccl_watch(n);  // nccl_end watches too, but operations that are copies do not call it
    if (n->enqueued - n->finished == NCCL_PENDING) nccl_wait(n, n->operations[n->finished % NCCL_PENDING].done);
    NcclOperation *o = &n->operations[n->enqueued % NCCL_PENDING];
    o->what = what, o->layer = layer, o->step = n->step;
    CUDA_CHECK(cudaEventRecord(o->begun, n->stream));
}

static inline void nccl_end_operation(Nccl *n) {
    CUDA_CHECK(cudaEventRecord(n->operations[n->enqueued % NCCL_PENDING].done, n->stream));
    n->enqueued++;
    nccl_publish(n, false);
}

// Collectives called between nccl_begin and nccl_end are one group for NCCL (ncclGroupStart, ncclGroupEnd).
static inline void nccl_begin(Nccl *n, const char *what, int64_t layer) {
    nccl_begin_operation(n, what, layer);
    NCCL_CHECK(ncclGroupStart());
}

static inline void nccl_end(Nccl *n) {
    NCCL_CHECK(ncclGroupEnd());
    nccl_settle(n, n->operations[n->enqueued % NCCL_PENDING].what);
    nccl_end_operation(n);
}

// all [ranks of the group][count] = each rank's part [count].
static inline void nccl_all_gather(Nccl *n, CommGroup g, const void *part, void *all, int64_t count,
                                   ncclDataType_t type) {
    NCCL_CHECK(ncclAllGather(part, all, (size_t)count, type, n->comms[g], n->stream));
}

// part [count] = this rank's piece of the sum over ranks of all [ranks of the group][count]. `part` may be this rank's
// piece of `all`.
static inline void nccl_reduce_scatter(Nccl *n, CommGroup g, const void *all, void *part, int64_t count,
                                       ncclDataType_t type) {
    NCCL_CHECK(ncclReduceScatter(all, part, (size_t)count, type, ncclSum, n->comms[g], n->stream));
}

// Replaces values [count] by their reduction over the group.
static inline void nccl_all_reduce(Nccl *n, CommGroup g, void *values, int64_t count, ncclDataType_t type,
                                   ncclRedOp_t op) {
    NCCL_CHECK(ncclAllReduce(values, values, (size_t)count, type, op, n->comms[g], n->stream));
}

// `total` codes of one byte, cut into a part for each rank of a group. The last parts may be shorter, or empty.
typedef struct {
    int64_t part, total, ranks;
} CodeParts;

// Cuts `total` codes into parts of `part` codes, a multiple of 16.
static inline CodeParts code_parts(int64_t total, int64_t ranks) {
    return CodeParts{round_up((total + ranks - 1) / ranks, 16), total, ranks};
}

static inline int64_t code_part_begin(const CodeParts *p, int64_t rank) { return min_i64(rank * p->part, p->total); }

static inline int64_t code_part_size(const CodeParts *p, int64_t rank) {
    return code_part_begin(p, rank + 1) - code_part_begin(p, rank);
}

static inline void nccl_send(Nccl *n, CommGroup g, int64_t to, const uint8_t *bytes, int64_t count) {
    if (count) NCCL_CHECK(ncclSend(bytes, (size_t)count, ncclUint8, (int)to, n->comms[g], n->stream));
}

static inline void nccl_receive(Nccl *n, CommGroup g, int64_t from, uint8_t *bytes, int64_t count) {
    if (count) NCCL_CHECK(ncclRecv(bytes, (size_t)count, ncclUint8, (int)from, n->comms[g], n->stream));
}

// Sends each other rank of the group its part of this rank's codes [total]. received [ranks - 1][part] = the other
// ranks' codes of this rank's part, in the order of ranks. `rank` is this rank's index in the group.
static inline void nccl_scatter_codes(Nccl *n, CommGroup g, const CodeParts *p, int64_t rank, const uint8_t *codes,
                                      uint8_t *received) {
    for (int64_t r = 0; r < p->ranks; r++) {
        if (r == rank) continue;
        nccl_send(n, g, r, codes + code_part_begin(p, r), code_part_size(p, r));
        nccl_receive(n, g, r, received + (r - (r > rank)) * p->part, code_part_size(p, rank));
    }
}

// codes [total]: each rank has the codes of its own part, and receives the codes of the other parts.
static inline void nccl_gather_codes(Nccl *n, CommGroup g, const CodeParts *p, int64_t rank, uint8_t *codes) {
    for (int64_t r = 0; r < p->ranks; r++) {
        if (r == rank) continue;
        nccl_send(n, g, r, codes + code_part_begin(p, rank), code_part_size(p, rank));
        nccl_receive(n, g, r, codes + code_part_begin(p, r), code_part_size(p, r));
    }
}

// Makes the communicator of a group. `rank` is this rank's index in the group.
static inline ncclComm_t nccl_connect(Nccl *n, CommGroup g, int64_t rank) {
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = NCCL_MAX_CTAS;
    memset(&id, 0, sizeof id);
    if (rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    comm_broadcast(n->host, g, 0, &id, (int64_t)sizeof id);
    ncclComm_t comm = NULL;
    NCCL_CHECK(ncclCommInitRankConfig(&comm, (int)comm_size(n->host, g), id, (int)rank, &config));
    n->comms[g] = comm;
    nccl_settle(n, "ncclCommInitRankConfig");
    return comm;
}

// True if a group of `size` ranks has its own communicator. A group of all `world` ranks uses the world's; a group of
// one rank has none.
static inline bool nccl_is_own(int64_t size, int64_t world) { return size > 1 && size < world; }

// Returns the number of communicators that nccl_open makes for `world` ranks in shard groups of `shard_size`.
static inline int64_t nccl_communicators(int64_t world, int64_t shard_size) {
    return (world > 1) + nccl_is_own(shard_size, world) + nccl_is_own(world / shard_size, world);
}

// Connects several ranks. Every rank must have chosen its GPU and called comm_split.
static inline void nccl_open(Nccl *n, const Comm *host) {
    int lowest, highest;
    memset(n, 0, sizeof *n);
    n->host = host, n->step = -1;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&n->stream, cudaStreamNonBlocking, highest));
    for (int i = 0; i < NCCL_PENDING; i++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&n->operations[i].begun, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&n->operations[i].done, cudaEventDisableTiming));
    }
    const ncclComm_t world = nccl_connect(n, COMM_WORLD, host->rank);
    if (nccl_is_own(host->shard_size, host->world)) nccl_connect(n, COMM_SHARD, host->shard_rank);
    else if (host->shard_size > 1) n->comms[COMM_SHARD] = world;
    if (nccl_is_own(host->replicas, host->world)) nccl_connect(n, COMM_REPLICAS, host->replica);
    else if (host->replicas > 1) n->comms[COMM_REPLICAS] = world;
}

// Destroys the communicators, the stream and the events. All ranks call it when their GPU is idle.
static inline void nccl_close(Nccl *n) {
    const ncclComm_t world = n->comms[COMM_WORLD];
    for (int g = COMM_NUM_GROUPS - 1; g >= 0; g--) {
        if (!n->comms[g] || (g != COMM_WORLD && n->comms[g] == world)) continue;
        NCCL_CHECK(ncclCommFinalize(n->comms[g]));
        nccl_settle(n, "ncclCommFinalize");
        NCCL_CHECK(ncclCommDestroy(n->comms[g]));
        for (int same = 0; same < COMM_NUM_GROUPS; same++)
            if (same != g && n->comms[same] == n->comms[g]) n->comms[same] = NULL;
        n->comms[g] = NULL;
    }
    for (int i = 0; i < NCCL_PENDING; i++) {
        CUDA_CHECK(cudaEventDestroy(n->operations[i].begun));
        CUDA_CHECK(cudaEventDestroy(n->operations[i].done));
    }
    CUDA_CHECK(cudaStreamDestroy(n->stream));
}

#endif
