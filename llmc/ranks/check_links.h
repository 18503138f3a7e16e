// Measures at the start of a run how fast the ranks reach each other, and names slow links and ranks (--check-links).
//
// Up to three collectives move weights or gradients of one layer, by the functions that the steps call. Their bus
// bandwidth is defined as in NVIDIA's nccl-tests. With n ranks, and `bytes` of the array that is gathered or reduced:
//   all-gather, reduce-scatter   bytes / seconds * (n - 1) / n
//   all-reduce                   bytes / seconds * 2 (n - 1) / n
// So a bus bandwidth can be compared with the rate of a rank's link, for any n. The time is that of the slowest rank.
// It includes the run's work on data that has arrived, for example sums of gradients.
//
// Then ranks exchange data in pairs, several pairs at once. Rank number k of a host (k is its place) meets the other
// ranks of its host, and rank number k of each other host that has one. With many ranks or hosts it meets only some of
// them, at most LINKS_PARTNERS on its host and as many on other hosts. A rank is slow over a path (NVLink, PCIe, ...)
// if its best pair over that path is below LINKS_SLOW times the median of the other ranks' best pairs over it. A pair
// of two ranks that are not slow is slow if it is below LINKS_SLOW times the median of all pairs over its path. A path
// with one pair has no slow rank and no slow pair. A rank is also slow if its GPU copies or computes GEMMs at less than
// LINKS_SLOW_GPU times the median of the other ranks.
#ifndef LLMC_CHECK_LINKS_H
#define LLMC_CHECK_LINKS_H

#include <math.h>

#include "../base/json.h"
#include "comm.h"

#define LINKS_SLOW 0.5                 // share of the median below which a rank or a pair is slow over a path
#define LINKS_SLOW_GPU 0.8             // share for a GPU's copies and GEMMs: GPUs of one kind differ by a few percent
#define LINKS_SECONDS 0.3              // time for the repetitions of a collective (links_runs)
#define LINKS_PAIR_SECONDS 0.1         // time for the repetitions of a pair's exchange (links_runs)
#define LINKS_LEAST_BYTES (1ll << 20)  // smallest message of a pair in the CPU trainer
#define LINKS_MOST_BYTES (64ll << 20)  // largest message of a pair in both trainers

enum {
    LINKS_RUNS = 50,      // the most repetitions
    LINKS_PARTNERS = 31,  // the most partners of a rank on its own host; and the most on other hosts
    LINKS_FAULTS = 16     // the most slow ranks and pairs that are named; more are only counted
};

typedef enum { LINK_GATHER, LINK_REDUCE, LINK_REPLICAS, NUM_LINK_COLLECTIVES } LinkCollective;

// The path between two ranks. Between two GPUs of a host, it is the host's memory if they cannot reach each other
// directly, or must not (NCCL_P2P_DISABLE).
#define LINK_PATHS(X)                     \
    X(LINK_NVLINK, "NVLink")              \
    X(LINK_PCIE, "PCIe")                  \
    X(LINK_HOST_MEMORY, "host memory")    \
    X(LINK_LOOPBACK, "TCP within a host") \
    X(LINK_UNKNOWN, "an unknown path within a host") X(LINK_NETWORK, "network")
#define LINK_PATH_ID(id, name) id,
#define LINK_PATH_NAME(id, name) name,
typedef enum { LINK_PATHS(LINK_PATH_ID) NUM_LINK_PATHS } LinkPath;

static inline const char *link_path_name(LinkPath path) {
    static const char *const names[NUM_LINK_PATHS] = {LINK_PATHS(LINK_PATH_NAME)};
    return names[path];
}

// Rates of one GPU, without communication. All GPUs are measured at once.
typedef struct {
    double copy;  // bytes per second of a copy in its memory, read plus written; 0: not measured
    double gemm;  // FLOP/s of a BF16 GEMM; 0: not measured
} LinkGpu;

// The functions and sizes that a trainer gives to links_measure. `context` is the first argument of each function. A
// function returns when this rank's part of the work is done.
typedef struct {
    void *context;
    const char *within, *across;         // what moves data within shard groups, and over replicas: "copy engines",
                                         // "NCCL", "TCP" or "MPI"
    double bytes[NUM_LINK_COLLECTIVES];  // size of the array that a collective gathers or reduces; 0: the run has no
                                         // such collective
    int64_t pair_bytes;                  // the message of a pair, each way
    // Runs a collective `runs` times, with all ranks of its group. Returns the seconds of all runs together.
    double (*collective)(void *context, LinkCollective c, int64_t runs);
    // Exchanges messages with rank `peer` `runs` times. With copy engines, each of the two ranks reads the other's
    // memory. Returns the seconds of all runs together.
    double (*pair)(void *context, int64_t peer, int64_t runs);
    LinkPath (*path)(void *context, int64_t peer, bool same_host);
    // Prepares the pairs. All ranks call it. If a rank cannot, it returns false with the reason on all ranks. NULL:
    // nothing must be prepared.
    bool (*open_pairs)(void *context, char *reason, size_t capacity);
    LinkGpu (*gpu)(void *context);  // measures this rank's GPU alone; NULL: the CPU trainer
    void (*close)(void *context);   // frees the context
} LinkOps;

typedef char LinkHost[64];

typedef struct {
    int64_t count;  // number of faults, also of those for which `text` has no room
    char text[LINKS_FAULTS][256];
} LinkFaults;

typedef struct {
    int64_t world;
    LinkHost *hosts;                       // [world]
    double seconds[NUM_LINK_COLLECTIVES];  // for one collective; 0: not measured
    double *rates;                         // [world][world] measured by rank i with rank j: bytes per second in one
                                           // direction, while both directions are used; 0: not measured
    double *paths;                         // [world][world] LinkPath, as numbers
    LinkGpu *gpus;                         // [world]
    char no_pairs[256];                    // the reason why a rank could not open its pairs; else ""
    LinkFaults faults;
} LinkReport;

// ---- which ranks exchange data in which round

// Rounds in which n members meet each other once.
static inline int64_t links_rounds(int64_t n) { return n < 2 ? 0 : n % 2 ? n : n - 1; }

// Returns the partner of member i of n in a round, or -1 if there is none. In round k members i and k - i meet, modulo
// the odd number among n - 1 and n. The member that would meet itself meets the last one if n is even, else none.
static inline int64_t links_partner(int64_t n, int64_t round, int64_t i) {
    const int64_t even = n + n % 2, odd = even - 1;
    if (round >= links_rounds(n)) return -1;
    if (i == odd) return round * (even / 2) % odd;
    const int64_t partner = (round - i + odd) % odd == i ? odd : (round - i + odd) % odd;
    return partner < n ? partner : -1;
}

// Returns the rank with the number `place` among those of a host, or -1.
static inline int64_t links_rank_at(const LinkHost *hosts, int64_t world, const char *host, int64_t place) {
    for (int64_t r = 0; r < world; r++)
        if (strcmp(hosts[r], host) == 0 && place-- == 0) return r;
    return -1;
}

// Number of ranks before `rank` that are on its host.
static inline int64_t links_place(const LinkHost *hosts, int64_t rank) {
    int64_t place = 0;
    for (int64_t r = 0; r < rank; r++) place += strcmp(hosts[r], hosts[rank]) == 0;
    return place;
}

// Number of different hosts that the first `ranks` ranks are on.
static inline int64_t links_count_hosts(const LinkHost *hosts, int64_t ranks) {
    int64_t count = 0;
    for (int64_t r = 0; r < ranks; r++) count += links_place(hosts, r) == 0;
    return count;
}

// Returns the partner of a rank on its own host in a round, or -1.
static inline int64_t links_partner_here(const LinkHost *hosts, int64_t world, int64_t rank, int64_t round) {
    int64_t here = 0;
    for (int64_t r = 0; r < world; r++) here += strcmp(hosts[r], hosts[rank]) == 0;
    const int64_t place = links_partner(here, round, links_place(hosts, rank));
    return place < 0 ? -1 : links_rank_at(hosts, world, hosts[rank], place);
}

// Returns the partner of a rank on another host in a round, or -1.
static inline int64_t links_partner_there(const LinkHost *hosts, int64_t world, int64_t rank, int64_t round) {
    const int64_t first = links_rank_at(hosts, world, hosts[rank], 0);
    const int64_t other = links_partner(links_count_hosts(hosts, world), round, links_count_hosts(hosts, first));
    int64_t there = 0;
    if (other < 0) return -1;
    while (links_count_hosts(hosts, there + 1) <= other) there++;  // the first rank of that host
    return links_rank_at(hosts, world, hosts[there], links_place(hosts, rank));
}

// ---- measuring

// Returns how often something that takes `seconds` fits `budget` seconds, from 1 to LINKS_RUNS. Equal on all ranks if
// `seconds` is.
static inline int64_t links_runs(double seconds, double budget) {
    return max_i64(1, min_i64(LINKS_RUNS, (int64_t)(budget / fmax(seconds, 1e-9))));
}

static inline int64_t links_ranks(const Comm *c, LinkCollective kind) {
    return kind == LINK_REPLICAS ? c->replicas : c->shard_size;
}

static inline double links_bus_bandwidth(LinkCollective kind, double bytes, int64_t ranks, double seconds) {
    return bytes / seconds * (double)(ranks - 1) / (double)ranks * (kind == LINK_REPLICAS ? 2 : 1);
}

static inline void links_measure_collectives(LinkReport *r, const LinkOps *ops, const Comm *c) {
    for (int i = 0; i < NUM_LINK_COLLECTIVES; i++) {
        const LinkCollective kind = (LinkCollective)i;
        if (ops->bytes[i] == 0) continue;
        ops->collective(ops->context, kind, 1);  // connections are made here
        comm_barrier(c, COMM_WORLD);
        const double once = comm_max(c, COMM_WORLD, ops->collective(ops->context, kind, 1));
        const int64_t runs = links_runs(once, LINKS_SECONDS);
        r->seconds[i] = comm_max(c, COMM_WORLD, ops->collective(ops->context, kind, runs)) / (double)runs;
    }
}

// All ranks call it. A rank without a partner in this round (-1) waits.
static inline void links_measure_pair(LinkReport *r, const LinkOps *ops, const Comm *c, int64_t peer) {
    const bool meets = peer >= 0;
    if (meets) ops->pair(ops->context, peer, 1);  // connections are made here
    comm_barrier(c, COMM_WORLD);
    const double once = comm_max(c, COMM_WORLD, meets ? ops->pair(ops->context, peer, 1) : 0);
    const int64_t runs = links_runs(once, LINKS_PAIR_SECONDS);
    const double seconds = meets ? ops->pair(ops->context, peer, runs) : 0;
    comm_barrier(c, COMM_WORLD);  // the rounds do not mix
    if (!meets) return;
    const int64_t at = c->rank * c->world + peer;
    r->rates[at] = (double)(ops->pair_bytes * runs) / seconds;
    r->paths[at] = ops->path(ops->context, peer, strcmp(r->hosts[peer], r->hosts[c->rank]) == 0);
}

static inline void links_measure_pairs(LinkReport *r, const LinkOps *ops, const Comm *c) {
    int64_t here = 0;
    for (int64_t rank = 0; rank < c->world; rank++) here = max_i64(here, links_rounds(links_place(r->hosts, rank) + 1));
    const int64_t there = links_rounds(links_count_hosts(r->hosts, c->world));
    for (int64_t i = 0, n = min_i64(here, LINKS_PARTNERS); i < n; i++)
        links_measure_pair(r, ops, c, links_partner_here(r->hosts, c->world, c->rank, i * here / n));
    for (int64_t i = 0, n = min_i64(there, LINKS_PARTNERS); i < n; i++)
        links_measure_pair(r, ops, c, links_partner_there(r->hosts, c->world, c->rank, i * there / n));
    const int64_t row = c->world * (int64_t)sizeof *r->rates;  // each rank has filled its own
    comm_all_gather(c, COMM_WORLD, r->rates + c->rank * c->world, r->rates, row);
    comm_all_gather(c, COMM_WORLD, r->paths + c->rank * c->world, r->paths, row);
}

// ---- what is slow

UTILS_PRINTF(2, 3) static inline void links_add_fault(LinkFaults *f, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (f->count < LINKS_FAULTS) vsnprintf(f->text[f->count], sizeof f->text[0], format, arguments);
    va_end(arguments);
    f->count++;
}

// Adds a fault for each rank i whose values[i] is below `share` times the median of the other ranks' values, and sets
// slow[i] for all ranks. Values of 0 were not measured: such a rank is not slow, and no median counts it. `what` stands
// before the value in the message, for example "computes GEMMs at". `unit` is the value of one `unit_name`.
static inline void links_name_ranks(LinkReport *r, const double *values, double share, const char *what,
                                    const char *unit_name, double unit, bool *slow) {
    double *others = (double *)xcalloc((size_t)r->world, sizeof *others);
    for (int64_t i = 0; i < r->world; i++) {
        int64_t n = 0;
        for (int64_t j = 0; j < r->world; j++)
            if (j != i && values[j] > 0) others[n++] = values[j];
        const double median = median_of(others, n);
        slow[i] = values[i] > 0 && values[i] < share * median;
        if (slow[i])
            links_add_fault(&r->faults, "rank %lld on %s %s %.4g %s; the median of the other ranks is %.4g",
                            (long long)i, r->hosts[i], what, values[i] / unit, unit_name, median / unit);
    }
    free(others);
}

// Returns the rate of a pair, the slower of what its two ranks measured; 0 if it was not measured or has another path.
static inline double links_pair_rate(const LinkReport *r, LinkPath path, int64_t i, int64_t j) {
    const int64_t at = i * r->world + j, back = j * r->world + i;
    if (r->rates[at] == 0 || r->rates[back] == 0 || (LinkPath)r->paths[at] != path) return 0;
    return fmin(r->rates[at], r->rates[back]);
}

// Copies the rates of the measured pairs over a path to `rates`, which has room for all, and returns their number.
static inline int64_t links_pair_rates(const LinkReport *r, LinkPath path, double *rates) {
    int64_t n = 0;
    for (int64_t i = 0; i < r->world; i++)
        for (int64_t j = 0; j < i; j++)
            if (links_pair_rate(r, path, i, j) > 0) rates[n++] = links_pair_rate(r, path, i, j);
    return n;
}

// Adds a fault for each slow rank of a path, then for each slow pair of ranks that are not slow.
static inline void links_name_path(LinkReport *r, LinkPath path) {
    const int64_t W = r->world;
    char what[128];
    double *best = (double *)xcalloc((size_t)(W + W * W), sizeof *best), *all = best + W;
    bool *slow = (bool *)xcalloc((size_t)W, sizeof *slow);
    for (int64_t i = 0; i < W; i++)
        for (int64_t j = 0; j < W; j++) best[i] = fmax(best[i], links_pair_rate(r, path, i, j));
    format_checked(what, sizeof what, "reaches other ranks over %s at", link_path_name(path));
    links_name_ranks(r, best, LINKS_SLOW, what, "GB/s", 1e9, slow);
    const double median = median_of(all, links_pair_rates(r, path, all));
    for (int64_t i = 0; i < W; i++)
        for (int64_t j = i + 1; j < W; j++) {
            const double rate = links_pair_rate(r, path, i, j);
            if (rate > 0 && rate < LINKS_SLOW * median && !slow[i] && !slow[j])
                links_add_fault(&r->faults,
                                "rank %lld on %s and rank %lld on %s reach each other over %s at %.4g GB/s; the median "
                                "of all pairs over it is %.4g",
                                (long long)i, r->hosts[i], (long long)j, r->hosts[j], link_path_name(path), rate * 1e-9,
                                median * 1e-9);
        }
    free(slow);
    free(best);
}

// Fills r->faults.
static inline void links_name_slow(LinkReport *r) {
    double *values = (double *)xcalloc((size_t)r->world, sizeof *values);
    bool *slow = (bool *)xcalloc((size_t)r->world, sizeof *slow);
    for (int path = 0; path < NUM_LINK_PATHS; path++) links_name_path(r, (LinkPath)path);
    for (int64_t i = 0; i < r->world; i++) values[i] = r->gpus[i].copy;
    links_name_ranks(r, values, LINKS_SLOW_GPU, "copies in its GPU's memory at", "GB/s", 1e9, slow);
    for (int64_t i = 0; i < r->world; i++) values[i] = r->gpus[i].gemm;
    links_name_ranks(r, values, LINKS_SLOW_GPU, "computes GEMMs at", "TFLOP/s", 1e12, slow);
    free(slow);
    free(values);
}

// ---- the report

static inline void link_report_free(LinkReport *r) {
    free(r->hosts);
    free(r->rates);
    free(r->paths);
    free(r->gpus);
}

// Measures on all ranks. Every rank gets the whole report.
static inline LinkReport links_measure(const LinkOps *ops, const Comm *c) {
    const int64_t W = c->world;
    LinkReport r = {};
    r.world = W;
    r.hosts = (LinkHost *)xcalloc((size_t)W, sizeof *r.hosts);
    r.rates = (double *)xcalloc((size_t)(W * W), sizeof *r.rates);
    r.paths = (double *)xcalloc((size_t)(W * W), sizeof *r.paths);
    r.gpus = (LinkGpu *)xcalloc((size_t)W, sizeof *r.gpus);
    comm_all_gather(c, COMM_WORLD, c->host, r.hosts, (int64_t)sizeof *r.hosts);
    links_measure_collectives(&r, ops, c);
    const bool ready = W > 1 && (!ops->open_pairs || ops->open_pairs(ops->context, r.no_pairs, sizeof r.no_pairs));
    if (ready) links_measure_pairs(&r, ops, c);
    if (ops->gpu) r.gpus[c->rank] = ops->gpu(ops->context);
    comm_all_gather(c, COMM_WORLD, &r.gpus[c->rank], r.gpus, (int64_t)sizeof *r.gpus);
    links_name_slow(&r);
    return r;
}

static inline const char *links_collective_name(LinkCollective kind) {
    static const char *const names[NUM_LINK_COLLECTIVES] = {"all-gather", "reduce-scatter", "all-reduce"};
    return names[kind];
}

static inline void links_print_collectives(const LinkReport *r, const LinkOps *ops, const Comm *c) {
    for (int i = 0; i < NUM_LINK_COLLECTIVES; i++) {
        const LinkCollective kind = (LinkCollective)i;
        if (r->seconds[i] == 0) continue;
        printf("  %s of a layer's %s over %lld %s, %s: %.4g MB in %.4g ms, bus bandwidth %.4g GB/s\n",
               links_collective_name(kind), kind == LINK_GATHER ? "weights" : "gradients",
               (long long)links_ranks(c, kind), kind == LINK_REPLICAS ? "replicas" : "ranks",
               kind == LINK_REPLICAS ? ops->across : ops->within, ops->bytes[i] * 1e-6, r->seconds[i] * 1e3,
               links_bus_bandwidth(kind, ops->bytes[i], links_ranks(c, kind), r->seconds[i]) * 1e-9);
    }
}

static inline void links_print_pairs(const LinkReport *r) {
    double *rates = (double *)xcalloc((size_t)(r->world * r->world), sizeof *rates);
    for (int path = 0; path < NUM_LINK_PATHS; path++) {
        const int64_t n = links_pair_rates(r, (LinkPath)path, rates);
        const double median = median_of(rates, n);
        if (!n) continue;
        printf("  pairs over %s: %lld, at %.4g to %.4g GB/s each way, median %.4g\n", link_path_name((LinkPath)path),
               (long long)n, rates[0] * 1e-9, rates[n - 1] * 1e-9, median * 1e-9);
    }
    free(rates);
    if (*r->no_pairs) printf("  pairs are not measured: %s\n", r->no_pairs);
}

static inline void links_print_gpus(const LinkReport *r) {
    LinkGpu least = r->gpus[0], most = r->gpus[0];
    for (int64_t i = 1; i < r->world; i++) {
        least.copy = fmin(least.copy, r->gpus[i].copy), most.copy = fmax(most.copy, r->gpus[i].copy);
        least.gemm = fmin(least.gemm, r->gpus[i].gemm), most.gemm = fmax(most.gemm, r->gpus[i].gemm);
    }
    char copies[64] = "no copies (a rank's gradients take too little memory)",
         gemms[64] = "no GEMMs (a rank's gradients take too little memory)";
    if (least.copy > 0)
        format_checked(copies, sizeof copies, "copies in their memory at %.4g to %.4g GB/s", least.copy * 1e-9,
                       most.copy * 1e-9);
    if (least.gemm > 0)
        format_checked(gemms, sizeof gemms, "GEMMs at %.4g to %.4g TFLOP/s", least.gemm * 1e-12, most.gemm * 1e-12);
    printf("  GPUs measured: %s, %s\n", copies, gemms);
}

// Prints the report, with a line for each slow rank or pair that is named.
static inline void links_print(const LinkReport *r, const LinkOps *ops, const Comm *c) {
    const int64_t hosts = links_count_hosts(r->hosts, r->world);
    if (r->world == 1) printf("links: there is one rank, and so no link\n");
    else
        printf("links between %lld ranks on %lld host%s:\n", (long long)r->world, (long long)hosts,
               hosts == 1 ? "" : "s");
    links_print_collectives(r, ops, c);
    links_print_pairs(r);
    if (ops->gpu) links_print_gpus(r);
    const int64_t named = min_i64(r->faults.count, LINKS_FAULTS);
    for (int64_t i = 0; i < named; i++) printf("  slow: %s\n", r->faults.text[i]);
    if (r->faults.count > named) printf("  slow: %lld more\n", (long long)(r->faults.count - named));
    if (r->world > 1 && !r->faults.count && !*r->no_pairs) printf("  no rank and no link was found slow\n");
    fflush(stdout);
}

static inline void links_json_collectives(JsonText *out, const LinkReport *r, const LinkOps *ops, const Comm *c) {
    json_text_add(out, "\"collectives\": [");
    for (int i = 0; i < NUM_LINK_COLLECTIVES; i++) {
        const LinkCollective kind = (LinkCollective)i;
        if (r->seconds[i] == 0) continue;
        json_text_add(out,
                      "%s{\"collective\": \"%s\", \"by\": \"%s\", \"ranks\": %lld, \"bytes\": ", json_text_comma(out),
                      links_collective_name(kind), kind == LINK_REPLICAS ? ops->across : ops->within,
                      (long long)links_ranks(c, kind));
        json_text_add_real(out, ops->bytes[i]);
        json_text_add(out, ", \"seconds\": ");
        json_text_add_real(out, r->seconds[i]);
        json_text_add(out, ", \"bus_bytes_per_second\": ");
        json_text_add_real(out, links_bus_bandwidth(kind, ops->bytes[i], links_ranks(c, kind), r->seconds[i]));
        json_text_add(out, "}");
    }
    json_text_add(out, "]");
}

// Adds the measured pairs of ranks, with path and rate.
static inline void links_json_pairs(JsonText *out, const LinkReport *r) {
    json_text_add(out, ", \"pairs\": [");
    for (int64_t i = 0; i < r->world; i++)
        for (int64_t j = i + 1; j < r->world; j++) {
            const LinkPath path = (LinkPath)r->paths[i * r->world + j];
            const double rate = links_pair_rate(r, path, i, j);
            if (rate == 0) continue;
            json_text_add(out,
                          "%s{\"ranks\": [%lld, %lld], \"path\": \"%s\", \"bytes_per_second\": ", json_text_comma(out),
                          (long long)i, (long long)j, link_path_name(path));
            json_text_add_real(out, rate);
            json_text_add(out, "}");
        }
    json_text_add(out, "]");
}

// Writes the report as members of a JSON object.
static inline void links_json(JsonText *out, const LinkReport *r, const LinkOps *ops, const Comm *c) {
    links_json_collectives(out, r, ops, c);
    links_json_pairs(out, r);
    for (int gemm = 0; ops->gpu && gemm < 2; gemm++) {
        json_text_add(out, gemm ? ", \"gemm_flops_per_second\": [" : ", \"copy_bytes_per_second\": [");
        for (int64_t i = 0; i < r->world; i++) {
            if (i) json_text_add(out, ", ");
            json_text_add_real(out, gemm ? r->gpus[i].gemm : r->gpus[i].copy);
        }
        json_text_add(out, "]");
    }
    json_text_add(out, ", \"slow\": [");
    for (int64_t i = 0; i < min_i64(r->faults.count, LINKS_FAULTS); i++) {
        if (i) json_text_add(out, ", ");
        json_text_add_string(out, r->faults.text[i]);
    }
    json_text_add(out, "]");
}

#endif
