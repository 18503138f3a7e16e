// The ranks of a run on the host side (MPI): who is here, small reductions, and ending all of them together.
// MPI does it. A program that mpirun (or srun) did not start is one rank and never touches MPI.
//
// Groups: all ranks; the shard group, whose ranks hold one copy of the parameters between them (shard_plan.h); and the
// replica group, the ranks that hold the same slices, one in each shard group. With shard_size S, rank r has shard_rank
// r % S in shard group r / S.
// Every function that names a group is collective: all its ranks call it, in the same order. Sums are taken in the
// order of ranks, so that all ranks have the same bits.
#ifndef LLMC_COMM_H
#define LLMC_COMM_H

#define OMPI_SKIP_MPICXX 1  // the C interface alone, also in CUDA C++
#include <mpi.h>
#include <unistd.h>

#include "../base/utils.h"

// Seconds for which a dying rank other than 0 keeps silent: what ends all ranks alike, such as a wrong option, is then
// said once, by rank 0.
#define COMM_SILENCE_SECONDS 5

typedef enum { COMM_WORLD, COMM_SHARD, COMM_REPLICAS, COMM_NUM_GROUPS } CommGroup;

typedef struct {
    int64_t world, rank;              // of all ranks
    int64_t local_world, local_rank;  // of the ranks on this host: picks the GPU
    int64_t shard_size, shard_rank;   // ranks of the shard group, number in it; 1, 0 before comm_split
    int64_t replicas, replica;        // of the replica group
    char host[64];
    MPI_Comm comms[COMM_NUM_GROUPS];  // MPI_COMM_NULL: one rank
} Comm;

static inline void comm_check(int status, const char *call) {
    if (status == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(status, text, &length);
    die("%s: %s", call, text);
}

#define COMM_CHECK(call) comm_check(call, #call)

// As COMM_CHECK, for a call that waits for other ranks. `what`: what the ranks do together.
#define COMM_WAIT(what, call)                       \
    do {                                            \
        activity_begin(ACTIVITY_WAITING, what, ""); \
        COMM_CHECK(call);                           \
        activity_end();                             \
    } while (0)

// die_hook()->before
static inline void comm_wait_before_dying(void) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const double start = seconds_now();
    while (rank > 0 && seconds_now() - start < COMM_SILENCE_SECONDS) usleep(50000);  // a signal may cut one sleep short
}

// die_hook()->end
static inline void comm_abort(int code) {
    fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, code);  // mpirun ends with the first rank's code
}

// At exit without die (--help): MPI wants its farewell from each rank.
static inline void comm_finalize(void) {
    int done = 1;
    MPI_Finalized(&done);
    if (done) return;
    activity_begin(ACTIVITY_WAITING, "MPI_Finalize", "");
    MPI_Finalize();
    activity_end();
}

static inline void comm_rank_of(MPI_Comm comm, int64_t *size, int64_t *rank) {
    int n = 1, r = 0;
    COMM_CHECK(MPI_Comm_size(comm, &n));
    COMM_CHECK(MPI_Comm_rank(comm, &r));
    *size = n, *rank = r;
}

// One rank, without MPI.
static inline Comm comm_one(void) {
    Comm c;
    memset(&c, 0, sizeof c);
    c.world = c.local_world = c.shard_size = c.replicas = 1;
    for (int g = 0; g < COMM_NUM_GROUPS; g++) c.comms[g] = MPI_COMM_NULL;
    if (gethostname(c.host, sizeof c.host - 1)) format_checked(c.host, sizeof c.host, "unknown host");
    return c;
}

// First call of main. From here on die() names the rank and ends all ranks, and ranks other than 0 print nothing on
// stdout.
static inline Comm comm_open(int *argc, char ***argv) {
    Comm c = comm_one();
    if (!getenv("OMPI_COMM_WORLD_SIZE") && !getenv("PMIX_RANK") && !getenv("PMI_RANK")) return c;
    int provided;
    COMM_CHECK(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided));
    if (atexit(comm_finalize)) die("atexit failed");
    c.comms[COMM_WORLD] = MPI_COMM_WORLD;
    comm_rank_of(MPI_COMM_WORLD, &c.world, &c.rank);
    MPI_Comm host;
    COMM_CHECK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, (int)c.rank, MPI_INFO_NULL, &host));
    comm_rank_of(host, &c.local_world, &c.local_rank);
    COMM_CHECK(MPI_Comm_free(&host));
    DieHook *hook = die_hook();
    if (c.world > 1) format_checked(hook->prefix, sizeof hook->prefix, "rank %lld on %s: ", (long long)c.rank, c.host);
    hook->before = comm_wait_before_dying;
    hook->end = comm_abort;
    if (c.rank > 0 && !freopen("/dev/null", "w", stdout)) die("cannot open /dev/null: %s", strerror(errno));
    return c;
}

// Makes the shard groups of `group` ranks (a divisor of the ranks: options_shard_group) and the replica groups.
static inline void comm_split(Comm *c, int64_t group) {
    c->shard_size = group, c->shard_rank = c->rank % group;
    c->replicas = c->world / group, c->replica = c->rank / group;
    if (c->comms[COMM_WORLD] == MPI_COMM_NULL) return;
    const int shard_rank = (int)c->shard_rank, replica = (int)c->replica;
    MPI_Comm *shard = &c->comms[COMM_SHARD], *replicas = &c->comms[COMM_REPLICAS];
    COMM_WAIT("making of groups", MPI_Comm_split(MPI_COMM_WORLD, replica, shard_rank, shard));
    COMM_WAIT("making of groups", MPI_Comm_split(MPI_COMM_WORLD, shard_rank, replica, replicas));
}

// A communicator of all ranks for another thread of each (watch.h), who is to free it; MPI_COMM_NULL where MPI lets
// only one thread call it.
static inline MPI_Comm comm_for_thread(const Comm *c) {
    int provided = MPI_THREAD_SINGLE, lowest = MPI_THREAD_SINGLE;
    MPI_Comm comm = MPI_COMM_NULL;
    COMM_CHECK(MPI_Query_thread(&provided));
    COMM_WAIT("all-reduce", MPI_Allreduce(&provided, &lowest, 1, MPI_INT, MPI_MIN, c->comms[COMM_WORLD]));
    if (lowest >= MPI_THREAD_MULTIPLE) COMM_WAIT("making of groups", MPI_Comm_dup(c->comms[COMM_WORLD], &comm));
    return comm;
}

// For a dry run of `world` ranks: as the first of them sees it. Nothing may be sent.
static inline void comm_assume(Comm *c, int64_t world) {
    *c = comm_one();
    c->world = world;
}

// Last call of main when all went well, by every rank.
static inline void comm_close(Comm *c) {
    if (c->comms[COMM_WORLD] == MPI_COMM_NULL) return;
    for (int g = COMM_SHARD; g < COMM_NUM_GROUPS; g++)
        if (c->comms[g] != MPI_COMM_NULL) COMM_WAIT("freeing of groups", MPI_Comm_free(&c->comms[g]));
    comm_finalize();
}

static inline int64_t comm_size(const Comm *c, CommGroup g) {
    return g == COMM_WORLD ? c->world : g == COMM_SHARD ? c->shard_size : c->replicas;
}

static inline void comm_barrier(const Comm *c, CommGroup g) {
    if (comm_size(c, g) > 1) COMM_WAIT("barrier", MPI_Barrier(c->comms[g]));
}

// MPI counts in int: data of more than 2 GiB is moved in blocks of 128 bytes, of which it must be a multiple.
static inline int comm_blocks(int64_t bytes, MPI_Datatype *type) {
    const int64_t block = bytes <= INT32_MAX ? 1 : 128;
    if (bytes % block || bytes / block > INT32_MAX) die("a message of %lld bytes", (long long)bytes);
    COMM_CHECK(MPI_Type_contiguous((int)block, MPI_BYTE, type));
    COMM_CHECK(MPI_Type_commit(type));
    return (int)(bytes / block);
}

// `bytes` bytes of rank `root` of the group reach all its ranks (at most 2 GiB).
static inline void comm_broadcast(const Comm *c, CommGroup g, int64_t root, void *data, int64_t bytes) {
    if (comm_size(c, g) > 1) COMM_WAIT("broadcast", MPI_Bcast(data, (int)bytes, MPI_BYTE, (int)root, c->comms[g]));
}

// all [ranks of the group][bytes] = each rank's `part`, in their order. `part` may be its own place in `all`.
static inline void comm_all_gather(const Comm *c, CommGroup g, const void *part, void *all, int64_t bytes) {
    if (comm_size(c, g) == 1) {
        if (part != all) memcpy(all, part, (size_t)bytes);
        return;
    }
    const int64_t place = g == COMM_WORLD ? c->rank : g == COMM_SHARD ? c->shard_rank : c->replica;
    const bool in_place = part == (char *)all + place * bytes;
    MPI_Datatype type;
    const int blocks = comm_blocks(bytes, &type);
    COMM_WAIT("all-gather",
              MPI_Allgather(in_place ? MPI_IN_PLACE : part, blocks, type, all, blocks, type, c->comms[g]));
    COMM_CHECK(MPI_Type_free(&type));
}

// to [ranks of the group][bytes]: piece i comes from rank i, which had it at its `from` [ranks][bytes] as the piece for
// this rank.
static inline void comm_all_to_all(const Comm *c, CommGroup g, const void *from, void *to, int64_t bytes) {
    if (comm_size(c, g) == 1) {
        memcpy(to, from, (size_t)bytes);
        return;
    }
    MPI_Datatype type;
    const int blocks = comm_blocks(bytes, &type);
    COMM_WAIT("all-to-all", MPI_Alltoall(from, blocks, type, to, blocks, type, c->comms[g]));
    COMM_CHECK(MPI_Type_free(&type));
}

// Each of n values becomes its sum over the group, added in the order of ranks.
static inline void comm_sum(const Comm *c, CommGroup g, double *values, int64_t n) {
    const int64_t ranks = comm_size(c, g);
    if (ranks == 1) return;
    double *all = (double *)xcalloc((size_t)(ranks * n), sizeof *all);
    comm_all_gather(c, g, values, all, n * (int64_t)sizeof *all);
    for (int64_t i = 0; i < n; i++) {
        values[i] = 0;
        for (int64_t r = 0; r < ranks; r++) values[i] += all[r * n + i];
    }
    free(all);
}

static inline double comm_max(const Comm *c, CommGroup g, double value) {
    if (comm_size(c, g) > 1)
        COMM_WAIT("all-reduce", MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_MAX, c->comms[g]));
    return value;
}

static inline double comm_min(const Comm *c, CommGroup g, double value) { return -comm_max(c, g, -value); }

// Each of n unsigned words becomes its maximum over the group: magnitudes of floats as bits, where NaN is the largest.
static inline void comm_max_u32(const Comm *c, CommGroup g, uint32_t *values, int64_t n) {
    if (comm_size(c, g) > 1)
        COMM_WAIT("all-reduce", MPI_Allreduce(MPI_IN_PLACE, values, (int)n, MPI_UINT32_T, MPI_MAX, c->comms[g]));
}

#endif
