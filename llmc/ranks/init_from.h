// Finds out a process's rank, the number of ranks, and how to reach the other ranks (--init-from).
// By default MPI connects the ranks that mpirun or srun --mpi=pmix starts. Other launchers only set environment
// variables: then the ranks meet at a TCP address or through a shared file (rendezvous.h).
#ifndef LLMC_INIT_FROM_H
#define LLMC_INIT_FROM_H

#include "../base/file_io.h"

#define INIT_TIMEOUT_SECONDS 300  // default of --init-timeout

typedef enum { INIT_ONE, INIT_MPI, INIT_FILE, INIT_TCP } InitKind;

typedef struct {
    InitKind kind;  // INIT_ONE: a single rank
    int64_t world, rank;
    double timeout;             // seconds until all ranks must have come
    char place[PATH_CAPACITY];  // INIT_FILE: the file; INIT_TCP: the host of rank 0
    int port;                   // INIT_TCP
    int64_t launched;           // ranks that the variables of a launcher speak of; 0: there are none
    bool speaks;                // this rank prints the error, not another of those
    char launcher[64];          // the variable that says so
    char job[64];               // names job and step of Slurm, to tell apart the jobs of one cluster; "" without Slurm
} InitFrom;

// Returns the value of --NAME in the command line, the last one if there are several, or NULL. The options themselves
// are read later, when errors can name the rank.
static inline const char *init_argument(int argc, char **argv, const char *name) {
    const size_t length = strlen(name);
    const char *value = NULL;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (strncmp(a, "--", 2) || strncmp(a + 2, name, length)) continue;
        if (a[2 + length] == '=') value = a + 3 + length;
        else if (!a[2 + length] && i + 1 < argc) value = argv[++i];
    }
    return value;
}

// Reads a whole number in [low, high]. Returns false if the text is something else.
static inline bool init_number(const char *text, int64_t low, int64_t high, int64_t *out) {
    char *end;
    errno = 0;
    const long long n = strtoll(text, &end, 10);
    *out = n;
    return *text && !*end && !errno && n >= low && n <= high;
}

// Reads rank and number of ranks from two variables. Returns false if one of them is not set. Dies if they are wrong.
static inline bool init_rank(InitFrom *init, const char *rank_name, const char *world_name) {
    const char *rank = getenv(rank_name), *world = getenv(world_name);
    if (!rank || !world) return false;
    if (!init_number(world, 1, 1 << 20, &init->world) || !init_number(rank, 0, init->world - 1, &init->rank))
        die_with(EXIT_USAGE,
                 "%s is \"%s\" and %s is \"%s\": the rank must be a number from 0 to the number of ranks - 1, and the "
                 "number of ranks one from 1 to 1048576",
                 rank_name, rank, world_name, world);
    return true;
}

// Writes the first host of a Slurm node list: "gpu[03-05,9]x,login" begins with gpu03x.
static inline void init_first_host(const char *list, char *out, size_t capacity) {
    size_t n = 0;
    bool inside = false, first = true;
    for (; *list && n + 1 < capacity; list++) {
        if (*list == ',' && !inside) break;
        if (*list == '[') inside = first = true;
        else if (*list == ']') inside = false;
        else if (inside && (*list == '-' || *list == ',')) first = false;
        else if (!inside || first) out[n++] = *list;
    }
    out[n] = 0;
}

// True if Slurm has started this process in a step (srun). A batch script has SLURM_PROCID too, but is no step.
static inline bool init_in_slurm_step(void) { return getenv("SLURM_PROCID") && getenv("SLURM_STEP_NUM_TASKS"); }

// Sets init->job if Slurm's variables have a job and a step. A job that Slurm has requeued keeps its number, so the
// name has the restart count too.
static inline void init_slurm_job(InitFrom *init) {
    const char *job = getenv("SLURM_JOB_ID"), *step = getenv("SLURM_STEP_ID"), *starts = getenv("SLURM_RESTART_COUNT");
    if (job && step)
        format_checked(init->job, sizeof init->job, "slurm %.20s.%.12s.%.8s", job, step, starts ? starts : "0");
}

// Reads a number of Slurm's; 0 if the variable is not set. Dies if it is no number that is 0 or more.
static inline void init_slurm_number(const char *name, int64_t *out) {
    const char *text = getenv(name);
    *out = 0;
    if (text && !init_number(text, 0, INT64_MAX, out))
        die_with(EXIT_USAGE,
                 "--init-from slurm: %s is \"%s\", not a whole number from 0; use --init-from tcp:HOST:PORT", name,
                 text);
}

// Reads Slurm's variables; dies without them. Rank 0 is on the first node. Its port follows from the job and step, so
// that jobs that share a node rarely have the same port. These ports are below 32768: from there on Linux by default
// chooses ports for connections.
static inline void init_slurm(InitFrom *init) {
    const char *nodes = getenv("SLURM_STEP_NODELIST");
    int64_t job = 0, step = 0;
    if (!init_in_slurm_step() || !init_rank(init, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS") || !nodes)
        die_with(EXIT_USAGE,
                 "--init-from slurm: SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_STEP_NODELIST are not all "
                 "set; start the ranks with srun");
    init->kind = INIT_TCP;
    init_first_host(nodes, init->place, sizeof init->place);
    init_slurm_number("SLURM_JOB_ID", &job), init_slurm_number("SLURM_STEP_ID", &step);
    init->port = 15000 + (int)((job % 16000 * 31 + step % 16000) % 16000);
}

// Reads rank and number of ranks from the first launcher whose variables are set: PyTorch, Slurm, Open MPI, MPICH. Dies
// if none are.
static inline void init_any_rank(InitFrom *init, const char *from) {
    if (init_rank(init, "RANK", "WORLD_SIZE")) return;
    if (init_in_slurm_step() && init_rank(init, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")) return;
    if (init_rank(init, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE") || init_rank(init, "PMI_RANK", "PMI_SIZE"))
        return;
    die_with(EXIT_USAGE,
             "--init-from %s: this process does not know its rank; set RANK and WORLD_SIZE in the environment of each "
             "process (srun and mpirun set variables of their own)",
             from);
}

// Reads "HOST:PORT"; an IPv6 address may stand in brackets.
static inline void init_tcp(InitFrom *init, const char *from, const char *where) {
    const char *colon = strrchr(where, ':');
    int64_t port;
    if (!colon || colon == where || !init_number(colon + 1, 1, 65535, &port))
        die_with(EXIT_USAGE,
                 "--init-from %s: must be tcp:HOST:PORT, with a port from 1 to 65535 (from the environment: "
                 "MASTER_ADDR:MASTER_PORT)",
                 from);
    const bool brackets = *where == '[' && colon[-1] == ']';
    init->kind = INIT_TCP, init->port = (int)port;
    format_checked(init->place, sizeof init->place, "%.*s", (int)(colon - where) - 2 * brackets, where + brackets);
}

// --init-from auto: uses the first of these whose variables are set: MPI, a Slurm step, PyTorch. If there is none, the
// run has a single rank. PyTorch needs all four variables: MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE.
static inline void init_from_environment(InitFrom *init) {
    const char *address = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    char from[512];
    if (getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMIX_RANK") || getenv("PMI_RANK")) init->kind = INIT_MPI;
    else if (init_in_slurm_step()) init_slurm(init);
    else if (address && port && init_rank(init, "RANK", "WORLD_SIZE")) {
        format_checked(from, sizeof from, "%.400s:%.16s", address, port);
        init_tcp(init, from, from);
    }
}

// Notes one launcher's variables: the larger number of ranks counts.
static inline void init_note_launcher(InitFrom *init, const char *variable, const char *value, int64_t ranks,
                                      bool speaks) {
    if (ranks <= init->launched) return;
    init->launched = ranks, init->speaks = speaks;
    format_checked(init->launcher, sizeof init->launcher, "%s=%.20s", variable, value);
}

// Notes the largest number of ranks that a launcher's variables speak of. Call it before MPI_Init, which sets some of
// them. A rank whose number nobody bounds has company. WORLD_SIZE alone may be any script's. Slurm's count is that of
// its own step, so within a step mpirun's counts; a shell of salloc or sbatch is no step. Dies if a number is none.
static inline void init_read_launchers(InitFrom *init) {
    static const char *const launchers[][2] = {{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                               {"PMI_SIZE", "PMI_RANK"},
                                               {"PMIX_SIZE", "PMIX_RANK"},
                                               {"MPI_LOCALNRANKS", "MPI_LOCALRANKID"},
                                               {"MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"},
                                               {"MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK"},
                                               {"PALS_SIZE", "PALS_RANKID"},
                                               {"FLUX_JOB_SIZE", "FLUX_TASK_RANK"},
                                               {"WORLD_SIZE", "RANK"},
                                               {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}};
    enum { ALL = sizeof launchers / sizeof *launchers, WITH_RANK = ALL - 3 };  // from here on a size needs a rank
    const char *alone = NULL;
    InitFrom sized = *init;
    for (int i = 0; i < ALL - (getenv("OMPI_COMM_WORLD_SIZE") ? 1 : 0); i++) {
        const char *size = getenv(launchers[i][0]), *at = getenv(launchers[i][1]);
        if (at && !size && i < WITH_RANK) alone = launchers[i][1];
        if (!size || (!at && i >= WITH_RANK)) continue;
        sized.rank = 0;
        if (at) init_rank(&sized, launchers[i][1], launchers[i][0]);
        else if (!init_number(size, 1, 1 << 20, &sized.world)) continue;
        init_note_launcher(init, launchers[i][0], size, sized.world, sized.rank == 0);
    }
    int64_t rank = 0;
    if (alone && init_number(getenv(alone), 0, 1 << 20, &rank))
        init_note_launcher(init, alone, getenv(alone), init->launched ? rank + 1 : max_i64(rank + 1, 2), rank == 0);
}

// Dies with EXIT_USAGE if a launcher has started more ranks than the `world` that have met: else its N processes would
// be N runs. Only one rank prints the error.
static inline void init_require_world(const InitFrom *init, int64_t world, int64_t rank) {
    if (init->launched <= world) return;
    if (rank > 0 || !init->speaks) exit(EXIT_USAGE);
    die_with(
        EXIT_USAGE,
        "%s says that a launcher has started %lld ranks or more, but %lld can reach each other, by an MPI that does "
        "not know this launcher; start them with Open MPI's mpirun, let them meet by --init-from slurm or "
        "--init-from file:PATH, or unset this variable for a single rank",
        init->launcher, (long long)init->launched, (long long)world);
}

// Returns how this process joins the run, from --init-from and --init-timeout in the command line and from the
// environment. Dies with EXIT_USAGE if their values are wrong, or if a rank that MPI does not connect cannot find out
// its number.
static inline InitFrom init_from(int argc, char **argv) {
    const char *from = init_argument(argc, argv, "init-from"), *timeout = init_argument(argc, argv, "init-timeout");
    int64_t seconds = INIT_TIMEOUT_SECONDS;
    InitFrom init = {};
    init.world = 1;
    init_read_launchers(&init);
    if (timeout && !init_number(timeout, 1, 86400, &seconds))
        die_with(EXIT_USAGE, "--init-timeout %s: must be a whole number of seconds from 1 to 86400, in digits",
                 timeout);
    init.timeout = (double)seconds;
    if (!from || strcmp(from, "auto") == 0) init_from_environment(&init);
    else if (strcmp(from, "mpi") == 0) init.kind = INIT_MPI;
    else if (strcmp(from, "slurm") == 0) init_slurm(&init);
    else if (strncmp(from, "tcp:", 4) == 0) init_tcp(&init, from, from + 4), init_any_rank(&init, from);
    else if (strncmp(from, "file:", 5) == 0 && from[5]) {
        init.kind = INIT_FILE;
        format_checked(init.place, sizeof init.place, "%s", from + 5);
        init_any_rank(&init, from);
    } else die_with(EXIT_USAGE, "--init-from %s: must be auto, mpi, slurm, file:PATH or tcp:HOST:PORT", from);
    init_slurm_job(&init);
    if (init.kind != INIT_MPI && init.world == 1) init.kind = INIT_ONE;
    return init;
}

#endif
