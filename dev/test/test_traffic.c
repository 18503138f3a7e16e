// Tests the traffic of a step against counts by hand, and the estimate of its time against measured steps
// (dev/results/). dev/test/test_hosts.sh counts the bytes of the CPU trainer.
#include "../../llmc/config/step_estimate.h"
#include "lib/check.h"

typedef struct {
    ModelConfig model;
    Options options;
    ParameterTable table;
    Precision precision;
} Plan;

static Plan plan_of(const char *name, bool fp8, int64_t T, int64_t batch) {
    Plan p;
    if (!model_config_preset(&p.model, name)) die("no preset %s", name);
    p.options = options_default();
    p.options.precision = fp8 ? PRECISION_FP8 : PRECISION_BF16;
    p.options.sequence_length = T, p.options.batch_size = batch;
    options_resolve(&p.options);
    p.table = parameter_table(&p.model);
    p.precision = precision_plan(&p.options, "", &p.model, &p.table, true);
    return p;
}

static void plan_free(Plan *p) {
    precision_free(&p->precision);
    parameter_table_free(&p->table);
}

static Traffic traffic_for(Plan *p, bool cpu, int64_t world, int64_t shard_size, int64_t host_ranks) {
    const TrafficRanks r = {
        cpu, world, shard_size, host_ranks, p->table.num_layers, p->options.grad_accumulation_steps};
    return traffic_of(&r, &p->options, &p->table, &p->precision);
}

static void check_bytes(const char *what, double got, double want) {
    CHECK(fabs(got / want - 1) < 1e-9 || got == want, "%s: %.0f bytes, expected %.0f", what, got, want);
}

// llama3.1-8b has 32 layers, each with 218,103,808 weights in matrices and 8,192 in norms. Embedding and lm_head have
// 128256 x 4096 weights each, and the final norm has 4096.
static void test_full(void) {
    const double matrices = 218103808, norms = 8192, table = 128256 * 4096.0, inputs = 8192 * 4096.0;
    Plan p = plan_of("llama3.1-8b", true, 8192, 1);
    Traffic t = traffic_for(&p, false, 8, 8, 8);
    const double part = 7.0 / 8;  // share of all bytes that a rank receives
    check_bytes("FP8 forward", t.received[TRAFFIC_FORWARD], part * 32 * matrices);
    check_bytes("FP8 backward: two layers are still gathered", t.received[TRAFFIC_BACKWARD], part * 30 * matrices);
    check_bytes("root and norms", t.received[TRAFFIC_ROOT], part * 2 * (2 * table + 4096 + 32 * norms));
    check_bytes("gradients without the embedding's", t.received[TRAFFIC_GRADIENTS],
                part * 2 * (32 * (matrices + norms) + table + 4096));
    check_bytes("inputs of the embedding's gradient", t.received[TRAFFIC_INPUTS], 7 * inputs * 2);
    check_bytes("one host has no network", traffic_sum(t.network), 0);
    CHECK(t.received[TRAFFIC_REPLICAS] == 0, "with one replica there is no all-reduce over replicas");
    t = traffic_for(&p, false, 16, 16, 8);
    check_bytes("two hosts: a ring brings all into each host once", t.network[TRAFFIC_FORWARD],
                15.0 / 16 * 32 * matrices);
    p.options.reduce_dtype = REDUCE_FP8;
    t = traffic_for(&p, false, 8, 8, 8);
    check_bytes("gradients of matrices in FP8", t.received[TRAFFIC_GRADIENTS],
                part * (32 * (matrices + 2 * norms) + 2 * (table + 4096)));
    p.options.reduce_dtype = REDUCE_BF16;
    p.options.grad_accumulation_steps = 3;
    t = traffic_for(&p, false, 8, 8, 8);
    check_bytes("three micro-steps, forward", t.received[TRAFFIC_FORWARD], part * (3 * 32 - 2 * 2) * matrices);
    check_bytes("three micro-steps, backward", t.received[TRAFFIC_BACKWARD], part * 3 * 30 * matrices);
    p.options.sharding = SHARDING_GRAD_OP;
    t = traffic_for(&p, false, 8, 8, 8);
    check_bytes("grad_op gathers once", t.received[TRAFFIC_FORWARD], part * 32 * matrices);
    check_bytes("grad_op keeps layers for backward", t.received[TRAFFIC_BACKWARD], 0);
    p.options.fp8_all_gather = OFF;
    t = traffic_for(&p, false, 8, 8, 8);
    check_bytes("bf16 all-gather", t.received[TRAFFIC_FORWARD], part * 2 * 32 * matrices);
    plan_free(&p);
}

static void test_replicas(void) {
    Plan p = plan_of("llama3.1-8b", false, 8192, 1);
    const double all = 32 * (218103808.0 + 8192) + 2 * 128256 * 4096.0 + 4096;
    Traffic t = traffic_for(&p, false, 64, 8, 8);  // hybrid: 8 hosts, a replica on each
    check_bytes("all-reduce over 8 replicas", t.received[TRAFFIC_REPLICAS], 2 * 7.0 / 8 * all / 8 * 2);
    check_bytes("8 rings cross the network", t.network[TRAFFIC_REPLICAS], 8 * t.received[TRAFFIC_REPLICAS]);
    CHECK(t.network[TRAFFIC_FORWARD] == 0 && t.received[TRAFFIC_FORWARD] > 0, "gathers stay in a host");
    CHECK(strcmp(traffic_carrier(&t.ranks, &p.options, TRAFFIC_FORWARD), "copy engines") == 0 &&
              strcmp(traffic_carrier(&t.ranks, &p.options, TRAFFIC_REPLICAS), "NCCL") == 0,
          "hybrid: copy engines inside a host, NCCL across");
    const double bf16_sums = t.received[TRAFFIC_GRADIENTS];
    p.options.reduce_dtype = REDUCE_FP32;
    t = traffic_for(&p, false, 64, 8, 8);
    check_bytes("--reduce-dtype fp32: copy engines move bf16", t.received[TRAFFIC_GRADIENTS], bf16_sums);
    check_bytes("--reduce-dtype fp32: NCCL moves fp32", t.received[TRAFFIC_REPLICAS], 2 * 7.0 / 8 * all / 8 * 4);
    p.options.copy_engines = OFF;
    t = traffic_for(&p, false, 64, 8, 8);
    check_bytes("--reduce-dtype fp32 by NCCL", t.received[TRAFFIC_GRADIENTS], 2 * bf16_sums);
    p.options.copy_engines = AUTO;
    t = traffic_for(&p, false, 64, 16, 8);
    check_bytes("--reduce-dtype fp32, shard groups on two hosts", t.network[TRAFFIC_GRADIENTS], 4 * 15.0 / 16 * all);
    CHECK(strcmp(traffic_carrier(&t.ranks, &p.options, TRAFFIC_FORWARD), "NCCL") == 0, "NCCL between two hosts");
    p.options.reduce_dtype = REDUCE_BF16;
    t = traffic_for(&p, false, 4, 1, 4);
    check_bytes("--sharding none on one host", t.received[TRAFFIC_REPLICAS], 2 * 3.0 / 4 * all * 2);
    CHECK(t.network[TRAFFIC_REPLICAS] == 0 && t.received[TRAFFIC_GRADIENTS] == 0,
          "on one host without shards, nothing crosses the network and no gradients are scattered");
    p.options.reduce_dtype = REDUCE_FP8;
    t = traffic_for(&p, true, 4, 1, 4);
    const double in_fp8 = 32 * 218103808.0;
    check_bytes("CPU ranks gather codes of matrices", t.received[TRAFFIC_REPLICAS], 3 * (4 * (all - in_fp8) + in_fp8));
    plan_free(&p);
}

// Measured speed of a run: tokens per second of each GPU.
typedef struct {
    const char *model;
    int64_t T, batch, gpus;
    int gpu;
    double bf16, fp8;  // 0: not measured
} Measured;

static const Measured measured[] = {
    {"llama3.2-1b", 2048, 1, 1, GPU_H200, 62427, 75072}, {"llama3.2-1b", 8192, 1, 1, GPU_H200, 59483, 73556},
    {"llama3.2-3b", 2048, 1, 1, GPU_H200, 25047, 31298}, {"llama3.2-3b", 8192, 1, 1, GPU_H200, 24294, 31774},
    {"qwen3-4b", 2048, 1, 1, GPU_H200, 19214, 23631},    {"qwen3-4b", 8192, 1, 1, GPU_H200, 17427, 22195},
    {"llama3.1-8b", 2048, 1, 1, GPU_H200, 11266, 14760}, {"llama3.1-8b", 8192, 1, 1, GPU_H200, 11313, 16012},
    {"llama3.1-8b", 2048, 4, 1, GPU_H200, 12655, 18932}, {"llama3.1-8b", 16384, 1, 1, GPU_H200, 0, 13626},
    {"qwen3-14b", 8192, 1, 1, GPU_H200, 0, 9166},        {"llama3.1-8b", 2048, 1, 1, GPU_H100, 10220, 12714},
    {"llama3.1-8b", 8192, 1, 1, GPU_H100, 11072, 14896}, {"llama3.2-1b", 4096, 1, 1, GPU_H100, 61448, 73180},
    {"llama3.1-8b", 2048, 1, 2, GPU_H200, 0, 15265},     {"llama3.1-8b", 8192, 1, 2, GPU_H200, 0, 15752},
    {"llama3.2-1b", 4096, 1, 2, GPU_H200, 0, 80640},     {"llama3.2-3b", 2048, 1, 2, GPU_H200, 0, 30895},
    {"llama3.2-1b", 2048, 1, 2, GPU_H200, 0, 75575},     {"llama3.2-1b", 8192, 1, 2, GPU_H200, 0, 72455},
    {"llama3.2-3b", 8192, 1, 2, GPU_H200, 0, 30317},     {"llama3.1-8b", 2048, 1, 2, GPU_H100, 0, 13666},
    {"llama3.1-8b", 8192, 1, 2, GPU_H100, 0, 15291},     {"llama3.2-1b", 2048, 1, 4, GPU_H200, 59837, 74897},
    {"llama3.2-1b", 8192, 1, 4, GPU_H200, 56777, 73308}, {"llama3.1-8b", 2048, 1, 4, GPU_H200, 10567, 15539},
    {"llama3.1-8b", 8192, 1, 4, GPU_H200, 11047, 15900}, {"qwen3-14b", 2048, 1, 4, GPU_H200, 5807, 8731},
    {"qwen3-14b", 8192, 1, 4, GPU_H200, 6247, 9073},     {"llama3.2-1b", 2048, 1, 4, GPU_H100, 57403, 70203},
    {"llama3.2-1b", 8192, 1, 4, GPU_H100, 56275, 69012}, {"llama3.1-8b", 2048, 1, 4, GPU_H100, 10015, 14402},
    {"llama3.1-8b", 4096, 1, 4, GPU_H100, 11117, 15856}, {"llama3.1-8b", 8192, 1, 4, GPU_H100, 10864, 15401},
    {"qwen3-14b", 2048, 1, 4, GPU_H100, 5439, 8068},     {"qwen3-14b", 4096, 1, 4, GPU_H100, 6255, 9027},
    {"qwen3-14b", 8192, 1, 4, GPU_H100, 6166, 0}};

// Estimates of times are within 10% of the measured ones.
static void test_estimates(void) {
    double worst = 0;
    for (size_t i = 0; i < sizeof measured / sizeof measured[0]; i++)
        for (int fp8 = 0; fp8 < 2; fp8++) {
            const Measured *m = &measured[i];
            const double tokens = fp8 ? m->fp8 : m->bf16;
            if (tokens == 0) continue;
            Plan p = plan_of(m->model, fp8, m->T, m->batch);
            p.options.gpu = m->gpu;
            const Traffic t = traffic_for(&p, false, m->gpus, m->gpus, m->gpus);
            const StepEstimate e = estimate_step(&t, &p.options, &p.model, &p.table, &p.precision);
            const double want = (double)(m->T * m->batch) / tokens, off = e.total / want - 1;
            CHECK(fabs(off) < 0.1,
                  "%s, T %lld, batch %lld, %lld GPUs, %s: %.1f ms are estimated, %.1f measured (%+.1f%%)", m->model,
                  (long long)m->T, (long long)m->batch, (long long)m->gpus, fp8 ? "FP8" : "BF16", e.total * 1e3,
                  want * 1e3, off * 100);
            worst = fmax(worst, fabs(off));
            plan_free(&p);
        }
    printf("the worst estimate is off by %.1f%%\n", worst * 100);
}

// Measured steps of llama3.1-8b in FP8 with options for memory, on one H200, at T 2048 and 8192, in milliseconds
// (dev/results/).
static const struct {
    int moments, recompute;
    double ms_2048, ms_8192;
} measured_options[] = {
    {MOMENTS_COAT, RECOMPUTE_NONE, 153.3, 537.9}, {MOMENTS_COAT_STOCHASTIC, RECOMPUTE_NONE, 161.9, 545.6},
    {MOMENTS_BF16, RECOMPUTE_NORM, 143.1, 533.2}, {MOMENTS_BF16, RECOMPUTE_ATTENTION, 149.8, 575.6},
    {MOMENTS_BF16, RECOMPUTE_MLP, 158.9, 584.4},  {MOMENTS_BF16, RECOMPUTE_LAYER, 165.4, 634.9}};

// Estimates with options for memory are within 10% of the measured steps too.
static void test_option_estimates(void) {
    Plan large = plan_of("llama3.1-70b", true, 2048, 1);
    large.options.optimizer_state = MOMENTS_COAT_STOCHASTIC, large.options.optimizer_in_backward = true;
    const Traffic on_four = traffic_for(&large, false, 4, 4, 4);
    const double seconds = estimate_step(&on_four, &large.options, &large.model, &large.table, &large.precision).total;
    CHECK(fabs(seconds / 1.1026 - 1) < 0.1, "llama3.1-70b on 4 H200: %.3f s are estimated, 1.1026 measured", seconds);
    plan_free(&large);
    for (size_t i = 0; i < sizeof measured_options / sizeof measured_options[0]; i++)
        for (int long_steps = 0; long_steps < 2; long_steps++) {
            const double want = long_steps ? measured_options[i].ms_8192 : measured_options[i].ms_2048;
            Plan p = plan_of("llama3.1-8b", true, long_steps ? 8192 : 2048, 1);
            p.options.optimizer_state = measured_options[i].moments;
            p.options.recompute = measured_options[i].recompute;
            const Traffic t = traffic_for(&p, false, 1, 1, 1);
            const double ms = estimate_step(&t, &p.options, &p.model, &p.table, &p.precision).total * 1e3;
            CHECK(fabs(ms / want - 1) < 0.1, "row %d, T %d: %.1f ms are estimated, %.1f measured (%+.1f%%)", (int)i,
                  long_steps ? 8192 : 2048, ms, want, (ms / want - 1) * 100);
            plan_free(&p);
        }
}

// An estimate needs the network's speed if hosts exchange bytes, and --step-ms on CPUs. Communication adds to a rank's
// own work by the rules of step_estimate.h.
static void test_rules(void) {
    Plan p = plan_of("llama3.1-8b", true, 2048, 1);
    Traffic t = traffic_for(&p, false, 16, 16, 8);
    CHECK(!estimate_known(&t, &p.options), "a network of unknown speed gives no estimate");
    p.options.network_gbps = 400;
    CHECK(estimate_known(&t, &p.options), "--network-gbps gives an estimate");
    const StepEstimate fast = estimate_step(&t, &p.options, &p.model, &p.table, &p.precision);
    p.options.network_gbps = 1;
    const StepEstimate slow = estimate_step(&t, &p.options, &p.model, &p.table, &p.precision);
    CHECK(slow.total > traffic_sum(t.network) / 125e6 * 0.9 && slow.total < 1.1 * slow.exchange &&
              fast.total < slow.total / 20,
          "at 1 Gbit/s the network decides the step's time: %g s of %g s", slow.exchange, slow.total);
    p.options.recompute = RECOMPUTE_LAYER;
    p.options.network_gbps = 400;
    const StepEstimate again = estimate_step(&t, &p.options, &p.model, &p.table, &p.precision);
    CHECK(again.work > 1.1 * fast.work && again.work < 1.35 * fast.work,
          "--recompute layer adds 10 to 35 percent of work: %g s, and %g s without", again.work, fast.work);
    p.options.recompute = RECOMPUTE_NONE, p.options.step_ms = 100;
    const StepEstimate given = estimate_step(&t, &p.options, &p.model, &p.table, &p.precision);
    CHECK(given.work < 0.1 && given.work > 0.05,
          "with --step-ms 100 the rank's own work is 0.1 s less what sharding saves of AdamW: 0.05 to 0.1 s; found %g",
          given.work);
    t = traffic_for(&p, true, 2, 2, 1);
    CHECK(estimate_known(&t, &p.options), "with --step-ms CPU ranks have an estimate");
    const StepEstimate cpu = estimate_step(&t, &p.options, &p.model, &p.table, &p.precision);
    CHECK(fabs(cpu.total - 0.1 - traffic_sum(t.network) * 8 / 400e9) < 1e-9,
          "the CPU trainer's communication adds to --step-ms; found %g s", cpu.total);
    p.options.step_ms = 0;
    CHECK(!estimate_known(&t, &p.options), "without --step-ms CPU ranks have no estimate");
    plan_free(&p);
}

int main(void) {
    test_full();
    test_replicas();
    test_estimates();
    test_option_estimates();
    test_rules();
    return check_report();
}
