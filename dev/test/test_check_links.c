// Tests --check-links with made-up rates: which ranks meet in which round, what is called slow, the bus bandwidth, and
// the JSON report of one rank. dev/test/test_hosts.sh runs --check-links between network namespaces.
#include "../../llmc/ranks/check_links.h"
#include "lib/check.h"

enum { MOST = 12 };

// Each pair of members meets in exactly one round. If i meets j in a round, j meets i in that round.
static void test_rounds(void) {
    for (int64_t n = 1; n <= MOST; n++) {
        int64_t met[MOST][MOST] = {{0}};
        for (int64_t round = 0; round < links_rounds(n); round++)
            for (int64_t i = 0; i < n; i++) {
                const int64_t j = links_partner(n, round, i);
                CHECK(j >= -1 && j < n && j != i,
                      "%lld members, round %lld: %lld meets another member, or -1 for none; found %lld", (long long)n,
                      (long long)round, (long long)i, (long long)j);
                if (j < 0) continue;
                met[i][j]++;
                CHECK(links_partner(n, round, j) == i, "%lld members: if %lld meets %lld, the latter meets the former",
                      (long long)n, (long long)i, (long long)j);
            }
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++)
                CHECK(met[i][j] == (i != j),
                      "%lld members: %lld and %lld meet once, unless they are one member; found %lld times",
                      (long long)n, (long long)i, (long long)j, (long long)met[i][j]);
        CHECK(links_partner(n, links_rounds(n), 0) == -1, "%lld members: after the last round, member 0 meets none",
              (long long)n);
    }
}

// Hosts a, b and c have 3, 1 and 2 ranks, and no host has two ranks in a row. A rank meets each other rank of its host
// once. If the rank is number k of its host, it also meets, once, number k of each other host that has a number k.
static void test_hosts(void) {
    const LinkHost hosts[] = {"a", "c", "a", "b", "c", "a"};
    int met[6][6] = {{0}};
    for (int64_t round = 0; round < 3; round++)
        for (int64_t r = 0; r < 6; r++) {
            const int64_t here = links_partner_here(hosts, 6, r, round),
                          there = links_partner_there(hosts, 6, r, round);
            if (here >= 0) met[r][here]++;
            if (there >= 0) met[r][there]++;
        }
    const int expected[6][6] = {{0, 1, 1, 1, 0, 1}, {1, 0, 0, 1, 1, 0}, {1, 0, 0, 0, 1, 1},
                                {1, 1, 0, 0, 0, 0}, {0, 1, 1, 0, 0, 0}, {1, 0, 1, 0, 0, 0}};
    CHECK(memcmp(met, expected, sizeof met) == 0, "the expected ranks meet, once each");
    CHECK(links_count_hosts(hosts, 6) == 3, "there are 3 hosts; found %lld", (long long)links_count_hosts(hosts, 6));
}

// Returns a report of `world` ranks, two on each host. All pairs have `rate`, over NVLink within a host and over the
// network between hosts.
static LinkReport report_of(int64_t world, double rate) {
    LinkReport r;
    memset(&r, 0, sizeof r);
    r.world = world;
    r.hosts = (LinkHost *)xcalloc((size_t)world, sizeof *r.hosts);
    r.rates = (double *)xcalloc((size_t)(world * world), sizeof *r.rates);
    r.paths = (double *)xcalloc((size_t)(world * world), sizeof *r.paths);
    r.gpus = (LinkGpu *)xcalloc((size_t)world, sizeof *r.gpus);
    for (int64_t i = 0; i < world; i++) {
        format_checked(r.hosts[i], sizeof r.hosts[i], "node%lld", (long long)i / 2);
        r.gpus[i].copy = 4e12, r.gpus[i].gemm = 7e14;
        for (int64_t j = 0; j < world; j++) {
            r.rates[i * world + j] = i == j ? 0 : rate;
            r.paths[i * world + j] = i / 2 == j / 2 ? LINK_NVLINK : LINK_NETWORK;
        }
    }
    return r;
}

static void set_rate(LinkReport *r, int64_t i, int64_t j, double rate) {
    r->rates[i * r->world + j] = r->rates[j * r->world + i] = rate;
}

// Checks that the report names the faults `first` and `second`, in this order, and no other. NULL: no such fault. Frees
// the report.
static void expect(LinkReport *r, const char *title, const char *first, const char *second) {
    links_name_slow(r);
    const int64_t count = (first != NULL) + (second != NULL);
    CHECK(r->faults.count == count, "%s: the report has %lld faults instead of %lld; the first is \"%s\"", title,
          (long long)r->faults.count, (long long)count, r->faults.text[0]);
    if (first) CHECK(strcmp(r->faults.text[0], first) == 0, "%s: the first fault is \"%s\"", title, r->faults.text[0]);
    if (second)
        CHECK(strcmp(r->faults.text[1], second) == 0, "%s: the second fault is \"%s\"", title, r->faults.text[1]);
    link_report_free(r);
}

static void test_slow(void) {
    LinkReport r = report_of(6, 5e10);
    expect(&r, "equal rates", NULL, NULL);
    r = report_of(6, 5e10);
    for (int64_t j = 0; j < 4; j++) set_rate(&r, 5, j, 2.4e10);
    expect(&r, "a rank with a slow network",
           "rank 5 on node2 reaches other ranks over network at 24 GB/s; the median of the other ranks is 50", NULL);
    r = report_of(6, 5e10);
    for (int64_t j = 0; j < 4; j++) set_rate(&r, 5, j, 2.6e10);
    expect(&r, "a rank above half of the median", NULL, NULL);
    r = report_of(6, 5e10);
    for (int64_t j = 0; j < 4; j++) set_rate(&r, 5, j, 1e10), set_rate(&r, 4, j, 1e10);
    expect(&r, "a host with a slow network",
           "rank 4 on node2 reaches other ranks over network at 10 GB/s; the median of the other ranks is 50",
           "rank 5 on node2 reaches other ranks over network at 10 GB/s; the median of the other ranks is 50");
    r = report_of(6, 5e10);
    set_rate(&r, 2, 3, 1e10);
    expect(&r, "a slow NVLink of one host",
           "rank 2 on node1 reaches other ranks over NVLink at 10 GB/s; the median of the other ranks is 50",
           "rank 3 on node1 reaches other ranks over NVLink at 10 GB/s; the median of the other ranks is 50");
    r = report_of(6, 5e10);
    set_rate(&r, 1, 4, 1e10);
    expect(&r, "one slow pair",
           "rank 1 on node0 and rank 4 on node2 reach each other over network at 10 GB/s; the median of all pairs over "
           "it is 50",
           NULL);
    r = report_of(2, 1e6);
    expect(&r, "two ranks cannot be compared", NULL, NULL);
    r = report_of(6, 5e10);
    r.gpus[3].copy = 3e12, r.gpus[1].gemm = 5e14;
    expect(&r, "slow GPUs",
           "rank 3 on node1 copies in its GPU's memory at 3000 GB/s; the median of the other ranks is 4000",
           "rank 1 on node0 computes GEMMs at 500 TFLOP/s; the median of the other ranks is 700");
    r = report_of(40, 5e10);
    for (int64_t i = 0; i < 40; i++) r.gpus[i].copy = i < 19 ? 1e12 : 4e12;
    links_name_slow(&r);
    CHECK(r.faults.count == 19, "all 19 slow ranks are counted, though fewer are named; found %lld",
          (long long)r.faults.count);
    link_report_free(&r);
}

// doc/PERFORMANCE.md of NVIDIA's nccl-tests defines the bus bandwidth. With 8 ranks it is 7/8 of bytes / seconds for an
// all-gather or a reduce-scatter, and 14/8 for an all-reduce.
static void test_bus_bandwidth(void) {
    CHECK(links_bus_bandwidth(LINK_GATHER, 8e9, 8, 0.5) == 14e9, "the bus bandwidth of an all-gather is 14 GB/s");
    CHECK(links_bus_bandwidth(LINK_REDUCE, 8e9, 8, 0.5) == 14e9, "the bus bandwidth of a reduce-scatter is 14 GB/s");
    CHECK(links_bus_bandwidth(LINK_REPLICAS, 8e9, 8, 0.5) == 28e9, "the bus bandwidth of an all-reduce is 28 GB/s");
    CHECK(links_bus_bandwidth(LINK_REPLICAS, 8e9, 2, 0.5) == 16e9,
          "the bus bandwidth of an all-reduce over 2 ranks is 16 GB/s");
}

static double one_second(void *context, LinkCollective c, int64_t runs) {
    *(int64_t *)context += runs;
    return (void)c, (double)runs;
}

// One rank has no link. Collectives that the run lacks are not measured. A collective that takes a second runs three
// times: to connect, to find how often to repeat it, and to be measured.
static void test_one_rank(void) {
    int64_t calls = 0;
    Comm one = comm_one();
    LinkOps ops;
    JsonText text = {NULL, 0, 0};
    memset(&ops, 0, sizeof ops);
    ops.context = &calls, ops.within = ops.across = "MPI", ops.collective = one_second;
    ops.bytes[LINK_REDUCE] = 1e6;
    LinkReport r = links_measure(&ops, &one);
    CHECK(calls == 3 && r.seconds[LINK_REDUCE] == 1 && r.seconds[LINK_GATHER] == 0,
          "only the reduce-scatter is measured, by 3 runs of 1 s; found %lld runs, %g s", (long long)calls,
          r.seconds[LINK_REDUCE]);
    links_json(&text, &r, &ops, &one);
    CHECK(strcmp(text.data,
                 "\"collectives\": [{\"collective\": \"reduce-scatter\", \"by\": \"MPI\", \"ranks\": 1, \"bytes\": "
                 "1e+06, \"seconds\": 1.0, \"bus_bytes_per_second\": 0.0}], \"pairs\": [], \"slow\": []") == 0,
          "the JSON report has the reduce-scatter and no pairs; found %s", text.data);
    json_text_free(&text);
    link_report_free(&r);
}

int main(void) {
    test_rounds();
    test_hosts();
    test_slow();
    test_bus_bandwidth();
    test_one_rank();
    return check_report();
}
