// --dry-run: bytes that a step brings to a rank, and over the network to a host; an estimate of the step's time.
//
// The report is printed as text or as JSON.
#ifndef LLMC_TRAFFIC_REPORT_H
#define LLMC_TRAFFIC_REPORT_H

#include "../config/step_estimate.h"
#include "../ranks/comm.h"
#include "logger.h"

// The inputs of the report.
typedef struct {
    bool cpu;  // the CPU trainer
    const Options *options;
    const ModelConfig *model;
    const Comm *comm;
    const ParameterTable *table;
    const Precision *precision;
} TrafficFacts;

static inline Traffic traffic_of_run(const TrafficFacts *f) {
    const Options *o = f->options;
    const int64_t here = o->world_size ? o->ranks_per_host : f->comm->local_world;
    const TrafficRanks ranks = {f->cpu,
                                f->comm->world,
                                f->comm->shard_size,
                                min_i64(f->comm->world, here),
                                f->table->num_layers,
                                o->grad_accumulation_steps};
    return traffic_of(&ranks, o, f->table, f->precision);
}

// True if the traffic can be counted: all hosts have equally many ranks, and a shard group fills whole hosts or a host
// has whole shard groups.
static inline bool traffic_is_regular(const TrafficRanks *r) {
    const int64_t S = r->shard_size, host = r->host_ranks;
    return r->world % host == 0 && (S % host == 0 || host % S == 0);
}

static inline double estimate_tokens(const TrafficRanks *r, const Options *o) {
    return (double)(o->batch_size * o->sequence_length * r->micro);
}

static inline void traffic_print_estimate(const TrafficFacts *f, const Traffic *t) {
    const Options *o = f->options;
    const TrafficRanks *r = &t->ranks;
    if (!estimate_known(t, o)) {
        printf("no estimate of the step's time: it needs %s\n",
               r->cpu && o->step_ms == 0 ? "--step-ms, from a run of one rank" : "--network-gbps");
        return;
    }
    const StepEstimate e = estimate_step(t, o, f->model, f->table, f->precision);
    const double tokens = estimate_tokens(r, o) / e.total;
    const double peak = r->cpu ? 0 : estimate_gpu(o->gpu).bf16_flops;
    const TokenFlops flops = flops_per_token(f->table, f->model, o->sequence_length, f->precision);
    char mfu[32] = "";
    if (peak > 0) format_checked(mfu, sizeof mfu, ", mfu %.1f%%", 100 * flops_mfu(flops, tokens, peak));
    printf("estimate of a step: %.1f ms, %.0f tok/s a rank%s: a rank's computation takes %.1f ms; communication takes "
           "%.1f ms and adds %.1f ms%s\n",
           e.total * 1e3, tokens, mfu, e.work * 1e3, e.exchange * 1e3, (e.total - e.work) * 1e3,
           strcmp(o->offload, "none") == 0 ? "" : "; the copies of --offload are not counted and can take longer");
    printf("estimate of the run: %.3g hours for %lld steps\n", e.total * (double)o->num_steps / 3600,
           (long long)o->num_steps);
}

// Prints the traffic, if there are several ranks, and the estimate of the step's time, or why there is none.
static inline void traffic_print(const TrafficFacts *f) {
    const Traffic t = traffic_of_run(f);
    const TrafficRanks *r = &t.ranks;
    printf("\n");
    if (!traffic_is_regular(r)) {
        printf("no traffic plan and no estimate of a step: hosts of %lld ranks, shard groups of %lld and %lld ranks "
               "in all do not divide evenly\n",
               (long long)r->host_ranks, (long long)r->shard_size, (long long)r->world);
        return;
    }
    if (r->world > 1) {
        printf("traffic of a step, MB              %14s  %18s  moved by\n", "to a rank", "network, to a host");
        for (int kind = 0; kind < NUM_TRAFFIC; kind++)
            if (t.received[kind] > 0)
                printf("  %-32s %14.2f  %18.2f  %s\n", traffic_name((TrafficKind)kind), t.received[kind] * 1e-6,
                       t.network[kind] * 1e-6, traffic_carrier(r, f->options, (TrafficKind)kind));
        printf("  %-32s %14.2f  %18.2f\n", "total", traffic_sum(t.received) * 1e-6, traffic_sum(t.network) * 1e-6);
    }
    traffic_print_estimate(f, &t);
}

// Adds three members: "ranks_per_host"; "traffic", an array with the bytes of each collective; and "estimate". Each of
// the last two may be null.
static inline void traffic_json(JsonText *out, const TrafficFacts *f) {
    const Traffic t = traffic_of_run(f);
    const bool regular = traffic_is_regular(&t.ranks);
    json_text_add(out, ", \"ranks_per_host\": %lld, \"traffic\": %s", (long long)t.ranks.host_ranks,
                  regular ? "[" : "null");
    for (int kind = 0; regular && kind < NUM_TRAFFIC; kind++) {
        json_text_add(out, "%s{\"collective\": ", json_text_comma(out));
        json_text_add_string(out, traffic_name((TrafficKind)kind));
        logger_add(out, "rank_receives_bytes", t.received[kind]);
        logger_add(out, "host_receives_bytes", t.network[kind]);
        logger_add_text(out, "moved_by", traffic_carrier(&t.ranks, f->options, (TrafficKind)kind));
        json_text_add(out, "}");
    }
    json_text_add(out, regular ? "], \"estimate\": " : ", \"estimate\": ");
    if (!regular || !estimate_known(&t, f->options)) {
        json_text_add(out, "null");
        return;
    }
    const StepEstimate e = estimate_step(&t, f->options, f->model, f->table, f->precision);
    json_text_add(out, "{\"step_ms\": %.17g", e.total * 1e3);
    logger_add(out, "work_ms", e.work * 1e3);
    logger_add(out, "communication_ms", e.exchange * 1e3);
    logger_add(out, "tokens_per_second_per_rank", estimate_tokens(&t.ranks, f->options) / e.total);
    json_text_add(out, "}");
}

#endif
