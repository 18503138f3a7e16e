// The ranks of a run on the host side: groups of ranks, small collectives, and ending all ranks together.
// MPI carries the collectives if it started the ranks, and else the TCP connections of mesh.h (--init-from).
// In a group of one rank, a collective uses neither.
//
// There are three groups of ranks: all ranks; the shard group, whose ranks split one replica of the parameters
// (shard_plan.h); and the replica group, which has one rank of each shard group, all with the same slices. With
// shard_size S, rank r has shard_rank r % S in shard group r / S.
// Every function that communicates in a group is collective: all ranks of the group call it, in the same order. Sums
// add the ranks' values in the order of ranks, so that all ranks get the same bits.
#ifndef LLMC_COMM_H
#define LLMC_COMM_H

#define OMPI_SKIP_MPICXX 1  // only the C interface, also in CUDA C++
#include <mpi.h>
#include <unistd.h>

#include "mesh.h"

// In die(), a rank other than 0 waits at least this long before it prints its error. If rank 0 has the same error, for
// example a wrong option, rank 0 prints it and ends all ranks in that time. So the error is printed once.
// Without this wait, ranks print errors that they meet before they have found each other (--init-from), and options in
// which they differ from rank 0.
#define COMM_SILENCE_SECONDS 5

// mpirun kills the ranks that are left about a second after one has ended with an error.
#define COMM_KILL_SECONDS 3

typedef enum { COMM_WORLD, COMM_SHARD, COMM_REPLICAS, COMM_NUM_GROUPS } CommGroup;

typedef struct {
    int64_t world, rank;              // number of all ranks, and this rank's index
    int64_t local_world, local_rank;  // ranks on this host, and this rank's index among them: it picks the GPU
    int64_t shard_size, shard_rank;   // ranks of the shard group, and this rank's index; 1 and 0 before comm_split
    int64_t replicas, replica;        // ranks of the replica group, and this rank's index; 1 and 0 before comm_split
    char host[64];
    MPI_Comm comms[COMM_NUM_GROUPS];  // MPI_COMM_NULL without MPI; before comm_split only COMM_WORLD has one
    Mesh *mesh;                       // NULL if MPI started the ranks, or if there is a single rank
} Comm;

static inline void comm_check(int status, const char *call) {
    if (status == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(status, text, &length);
    die("%s: %s", call, text);
}

#define COMM_CHECK(call) comm_check(call, #call)

// Seconds that this rank has spent in calls that wait for other ranks (COMM_WAIT).
static inline double *comm_seconds(void) {
    static double seconds;
    return &seconds;
}

// COMM_CHECK for a call that waits for other ranks: its time counts in comm_seconds. `what` names the call in messages
// of the watcher (activity.h).
#define COMM_WAIT(what, call)                       \
    do {                                            \
        const double start_ = seconds_now();        \
        activity_begin(ACTIVITY_WAITING, what, ""); \
        COMM_CHECK(call);                           \
        activity_end();                             \
        *comm_seconds() += seconds_now() - start_;  \
    } while (0)

// The mesh of this process, for die(); NULL if there is none.
static inline Mesh **comm_mesh(void) {
    static Mesh *mesh;
    return &mesh;
}

// Called by die() before it prints the error (die_hook()->before) if MPI started the ranks. Rank 0 does not wait.
static inline void comm_wait_before_dying(void) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const double start = seconds_now();
    while (rank > 0 && seconds_now() - start < COMM_SILENCE_SECONDS) usleep(50000);  // a signal may interrupt usleep
}

// Call it before an error that may only show that other ranks have ended. If one of them has reported the cause, mpirun
// kills this rank meanwhile, also rank 0: this kill continues a rank 0 that was stopped, which then meets the loss.
static inline void comm_wait_for_kill(void) {
    const double start = seconds_now();
    while (!*comm_mesh() && seconds_now() - start < COMM_KILL_SECONDS) usleep(50000);  // a signal may interrupt usleep
}

// Called instead of comm_wait_before_dying if there is a mesh. If a rank other than 0 gets another rank's notice of an
// error meanwhile, it ends and does not print its own. Higher ranks wait longer, up to a limit: if rank 0 was lost and
// several ranks die because of that, the lowest of them prints first.
static inline void comm_wait_for_notice(void) {
    Mesh *m = *comm_mesh();
    if (m->rank > 0) mesh_await_notice(m, COMM_SILENCE_SECONDS + 0.25 * (double)min_i64(m->rank - 1, 40));
}

// Open MPI's own function behind MPI_Abort, in versions 4 and 5; NULL in another MPI. It ends all ranks like MPI_Abort,
// but does not print a paragraph about MPI_ABORT after our error line.
#ifdef __cplusplus
extern "C" int ompi_mpi_abort(MPI_Comm comm, int code) __attribute__((weak));
#else
int ompi_mpi_abort(MPI_Comm comm, int code) __attribute__((weak));
#endif

// Ends all ranks. Under mpirun, mpirun exits with the `code` of the first rank that calls this function. The caller
// must exit afterwards: over a mesh this function only tells the other ranks to end, and Open MPI's function returns if
// another thread has called it before.
static inline void comm_end_all(int code) {
    if (*comm_mesh()) mesh_end_all(*comm_mesh(), code);
    else if (ompi_mpi_abort) ompi_mpi_abort(MPI_COMM_WORLD, code);
    else MPI_Abort(MPI_COMM_WORLD, code);
}

// Called by die() after it printed the error (die_hook()->end).
static inline void comm_abort(int code) {
    fflush(stderr);
    comm_end_all(code);
    if (*comm_mesh()) _exit(code);  // functions of atexit would wait for other ranks
}

// Called by comm_close and at exit, for example after --help: MPI requires MPI_Finalize of each rank. Does nothing
// after MPI_Finalize.
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

// Returns the Comm of a single rank without MPI.
static inline Comm comm_one(void) {
    Comm c = {};
    c.world = c.local_world = c.shard_size = c.replicas = 1;
    for (int g = 0; g < COMM_NUM_GROUPS; g++) c.comms[g] = MPI_COMM_NULL;
    if (gethostname(c.host, sizeof c.host - 1)) format_checked(c.host, sizeof c.host, "unknown host");
    return c;
}

// If there are several ranks, die() names the rank from now on.
static inline void comm_name_rank(const Comm *c) {
    char *prefix = die_hook()->prefix;
    if (c->world > 1)
        format_checked(prefix, sizeof die_hook()->prefix, "rank %lld on %s: ", (long long)c->rank, c->host);
}

// Joins the ranks that MPI has started.
static inline void comm_open_mpi(Comm *c, const InitFrom *init, int *argc, char ***argv) {
    int provided;
    COMM_CHECK(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided));
    if (atexit(comm_finalize)) die("atexit failed");
    c->comms[COMM_WORLD] = MPI_COMM_WORLD;
    comm_rank_of(MPI_COMM_WORLD, &c->world, &c->rank);
    init_require_world(init, c->world, c->rank);
    MPI_Comm host;
    COMM_CHECK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, (int)c->rank, MPI_INFO_NULL, &host));
    comm_rank_of(host, &c->local_world, &c->local_rank);
    COMM_CHECK(MPI_Comm_free(&host));
    comm_name_rank(c);
    die_hook()->before = comm_wait_before_dying;
    die_hook()->end = comm_abort;
}

// Joins ranks that MPI has not started: each knows its number, the number of ranks, and where they meet (--init-from).
static inline void comm_open_mesh(Comm *c, const InitFrom *init) {
    c->world = init->world, c->rank = init->rank;
    comm_name_rank(c);
    Meeting meeting = meet(init);
    c->local_world = 0;
    for (int64_t r = 0; r < c->world; r++) {
        const bool here = card_same_host(&meeting.cards[r], &meeting.cards[c->rank]);
        c->local_world += here, c->local_rank += here && r < c->rank;
    }
    *comm_mesh() = c->mesh = mesh_new(&meeting);
    die_hook()->before = comm_wait_for_notice;
    die_hook()->end = comm_abort;
    mesh_open(c->mesh, &meeting);
    free(meeting.cards);
}

// Joins the run, or returns the Comm of a single rank. Call it at the start of main, after process_prepare. With
// several ranks, die() then names the rank and ends all ranks, and ranks other than 0 print nothing on stdout. Dies if
// --init-from or its variables are wrong, or if the ranks cannot find each other.
static inline Comm comm_open(int *argc, char ***argv) {
    Comm c = comm_one();
    const InitFrom init = init_from(*argc, *argv);
    if (init.kind == INIT_MPI) comm_open_mpi(&c, &init, argc, argv);
    else if (init.kind != INIT_ONE) comm_open_mesh(&c, &init);
    else init_require_world(&init, 1, 0);
    if (c.rank > 0 && !freopen("/dev/null", "w", stdout)) die("cannot open /dev/null: %s", strerror(errno));
    return c;
}

// Makes the shard groups of `shard_size` ranks and the replica groups. shard_size divides the number of ranks
// (options_shard_group).
static inline void comm_split(Comm *c, int64_t shard_size) {
    c->shard_size = shard_size, c->shard_rank = c->rank % shard_size;
    c->replicas = c->world / shard_size, c->replica = c->rank / shard_size;
    if (c->comms[COMM_WORLD] == MPI_COMM_NULL) return;
    const int shard_rank = (int)c->shard_rank, replica = (int)c->replica;
    MPI_Comm *shard = &c->comms[COMM_SHARD], *replicas = &c->comms[COMM_REPLICAS];
    COMM_WAIT("MPI_Comm_split", MPI_Comm_split(MPI_COMM_WORLD, replica, shard_rank, shard));
    COMM_WAIT("MPI_Comm_split", MPI_Comm_split(MPI_COMM_WORLD, shard_rank, replica, replicas));
}

// Makes *c the Comm of rank 0 among `world` ranks, for plans and estimates. It must not be used to communicate.
static inline void comm_assume(Comm *c, int64_t world) {
    *c = comm_one();
    c->world = world;
}

// Must be the last call of main on every rank of a run without errors.
static inline void comm_close(Comm *c) {
    if (c->comms[COMM_WORLD] == MPI_COMM_NULL) return;
    for (int g = COMM_SHARD; g < COMM_NUM_GROUPS; g++)
        if (c->comms[g] != MPI_COMM_NULL) COMM_WAIT("MPI_Comm_free", MPI_Comm_free(&c->comms[g]));
    comm_finalize();
}

static inline int64_t comm_size(const Comm *c, CommGroup g) {
    return g == COMM_WORLD ? c->world : g == COMM_SHARD ? c->shard_size : c->replicas;
}

static inline MeshGroup comm_members(const Comm *c, CommGroup g) {
    const MeshGroup world = {0, 1, c->world, c->rank};
    const MeshGroup shard = {c->replica * c->shard_size, 1, c->shard_size, c->shard_rank};
    const MeshGroup replicas = {c->shard_rank, c->shard_size, c->replicas, c->replica};
    return g == COMM_WORLD ? world : g == COMM_SHARD ? shard : replicas;
}

static inline void comm_barrier(const Comm *c, CommGroup g) {
    if (comm_size(c, g) == 1) return;
    COMM_WAIT("barrier", c->mesh ? mesh_barrier(c->mesh, comm_members(c, g)) : MPI_Barrier(c->comms[g]));
}

// MPI counts in int, so data of 2 GiB or more is sent as blocks of 128 bytes: `bytes` must then be a multiple of 128.
// Makes the block type, which the caller frees, and returns the number of blocks.
static inline int comm_blocks(int64_t bytes, MPI_Datatype *type) {
    const int64_t block = bytes <= INT32_MAX ? 1 : 128;
    if (bytes % block || bytes / block > INT32_MAX) die("MPI cannot send %lld bytes at once", (long long)bytes);
    COMM_CHECK(MPI_Type_contiguous((int)block, MPI_BYTE, type));
    COMM_CHECK(MPI_Type_commit(type));
    return (int)(bytes / block);
}

// Copies data [bytes] of rank `root` of the group to all ranks of the group. Less than 2 GiB.
static inline void comm_broadcast(const Comm *c, CommGroup g, int64_t root, void *data, int64_t bytes) {
    if (comm_size(c, g) == 1) return;
    COMM_WAIT("broadcast", c->mesh ? mesh_broadcast(c->mesh, comm_members(c, g), root, data, bytes)
                                   : MPI_Bcast(data, (int)bytes, MPI_BYTE, (int)root, c->comms[g]));
}

// all [ranks of the group][bytes] = each rank's part [bytes], in the order of ranks. `part` may lie in `all`, as this
// rank's part of it.
static inline void comm_all_gather(const Comm *c, CommGroup g, const void *part, void *all, int64_t bytes) {
    if (comm_size(c, g) == 1) {
        if (part != all) memcpy(all, part, (size_t)bytes);
        return;
    }
    if (c->mesh) {
        COMM_WAIT("all-gather", mesh_all_gather(c->mesh, comm_members(c, g), part, all, bytes));
        return;
    }
    const bool in_place = part == (char *)all + comm_members(c, g).self * bytes;
    MPI_Datatype type;
    const int blocks = comm_blocks(bytes, &type);
    COMM_WAIT("all-gather",
              MPI_Allgather(in_place ? MPI_IN_PLACE : part, blocks, type, all, blocks, type, c->comms[g]));
    COMM_CHECK(MPI_Type_free(&type));
}

// to [ranks of the group][bytes]: piece i is the piece that rank i had for this rank in its own `from` [ranks][bytes].
static inline void comm_all_to_all(const Comm *c, CommGroup g, const void *from, void *to, int64_t bytes) {
    if (comm_size(c, g) == 1) {
        memcpy(to, from, (size_t)bytes);
        return;
    }
    if (c->mesh) {
        COMM_WAIT("all-to-all", mesh_all_to_all(c->mesh, comm_members(c, g), from, to, bytes));
        return;
    }
    MPI_Datatype type;
    const int blocks = comm_blocks(bytes, &type);
    COMM_WAIT("all-to-all", MPI_Alltoall(from, blocks, type, to, blocks, type, c->comms[g]));
    COMM_CHECK(MPI_Type_free(&type));
}

// Sends `out` [bytes] to another rank, and receives `in` [bytes] from it. Only that rank must call it too. Less than 2
// GiB.
static inline void comm_exchange(const Comm *c, int64_t rank, const void *out, void *in, int64_t bytes) {
    COMM_WAIT("exchange", c->mesh ? mesh_exchange_with(c->mesh, rank, out, in, bytes)
                                  : MPI_Sendrecv(out, (int)bytes, MPI_BYTE, (int)rank, 0, in, (int)bytes, MPI_BYTE,
                                                 (int)rank, 0, c->comms[COMM_WORLD], MPI_STATUS_IGNORE));
}

// Replaces each of n values by its sum over the group, added in the order of ranks.
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

// Returns the maximum of `value` over the group.
static inline double comm_max(const Comm *c, CommGroup g, double value) {
    const int64_t ranks = comm_size(c, g);
    if (ranks == 1) return value;
    if (!c->mesh) {
        COMM_WAIT("all-reduce", MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_MAX, c->comms[g]));
        return value;
    }
    double *all = (double *)xcalloc((size_t)ranks, sizeof *all);
    comm_all_gather(c, g, &value, all, (int64_t)sizeof *all);
    for (int64_t r = 0; r < ranks; r++) value = all[r] > value ? all[r] : value;
    free(all);
    return value;
}

static inline double comm_min(const Comm *c, CommGroup g, double value) { return -comm_max(c, g, -value); }

// Replaces each of n words by its maximum over the group. If the words are the bits of floats with sign bit 0, that is
// the largest float, and a NaN counts as larger than infinity.
static inline void comm_max_u32(const Comm *c, CommGroup g, uint32_t *values, int64_t n) {
    const int64_t ranks = comm_size(c, g);
    if (ranks == 1) return;
    if (!c->mesh) {
        COMM_WAIT("all-reduce", MPI_Allreduce(MPI_IN_PLACE, values, (int)n, MPI_UINT32_T, MPI_MAX, c->comms[g]));
        return;
    }
    uint32_t *all = (uint32_t *)xcalloc((size_t)(ranks * n), sizeof *all);
    comm_all_gather(c, g, values, all, n * (int64_t)sizeof *all);
    for (int64_t i = 0; i < ranks * n; i++) values[i % n] = all[i] > values[i % n] ? all[i] : values[i % n];
    free(all);
}

#endif
