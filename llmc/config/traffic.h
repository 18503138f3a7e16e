// Bytes that ranks exchange in an optimizer step, and how many of them cross the network between hosts.
//
// All hosts are taken to have equally many ranks, with consecutive numbers on each host. A collective over ranks of
// several hosts is counted as NCCL's rings do it: into each host the ring brings all that a rank receives, once. The
// CPU trainer's ranks send to each other directly, so each rank of a host receives the parts of all other hosts.
// Amaxes, losses and validation are left out: they are small or rare.
#ifndef LLMC_TRAFFIC_H
#define LLMC_TRAFFIC_H

#include "precision.h"
#include "shard_plan.h"

typedef enum {
    TRAFFIC_FORWARD,    // all-gather of layers' weights, forward
    TRAFFIC_BACKWARD,   // all-gather of layers' weights, backward
    TRAFFIC_ROOT,       // all-gather of the root, and on GPUs of all norms and biases
    TRAFFIC_GRADIENTS,  // reduce-scatter of gradients over the shard group
    TRAFFIC_REPLICAS,   // all-reduce of gradients over replicas of the model
    TRAFFIC_INPUTS,     // all-gather of the gradients of the embedding's output
    NUM_TRAFFIC
} TrafficKind;

static inline const char *traffic_name(TrafficKind kind) {
    static const char *const names[NUM_TRAFFIC] = {"all-gather of layers, forward", "all-gather of layers, backward",
                                                   "all-gather of the root, norms", "reduce-scatter of gradients",
                                                   "all-reduce over replicas",      "all-gather of the embedding's dy"};
    return names[kind];
}

typedef struct {
    bool cpu;               // true for the CPU trainer
    int64_t world;          // ranks
    int64_t shard_size;     // ranks of a shard group
    int64_t host_ranks;     // ranks of a host
    int64_t layers, micro;  // layers, micro-steps in an optimizer step
} TrafficRanks;

typedef struct {
    TrafficRanks ranks;
    double received[NUM_TRAFFIC];  // bytes that a rank receives in an optimizer step
    double network[NUM_TRAFFIC];   // bytes that a host receives from other hosts
} Traffic;

// Number of ranks of one host in a group of `size` ranks whose numbers are `stride` apart.
static inline int64_t traffic_host_members(const TrafficRanks *r, int64_t size, int64_t stride) {
    return max_i64(1, min_i64(size, r->host_ranks / stride));
}

// Adds collectives in which each rank of a group receives `bytes` from each other rank of it.
static inline void traffic_add(Traffic *t, TrafficKind kind, int64_t size, int64_t stride, double bytes) {
    const TrafficRanks *r = &t->ranks;
    const int64_t here = traffic_host_members(r, size, stride), groups = r->host_ranks / here;
    t->received[kind] += (double)(size - 1) * bytes;
    if (here == size) return;
    t->network[kind] += (double)groups * bytes * (r->cpu ? (double)(here * (size - here)) : (double)(size - 1));
}

// True if copy engines are expected to move data within shard groups of GPUs: each group has several GPUs of one host,
// and --copy-engines is not off. If GPUs of a host cannot read each other's memory, which only a run can tell, NCCL
// moves the data.
static inline bool traffic_copies(const TrafficRanks *r, const Options *o) {
    const int64_t here = traffic_host_members(r, r->shard_size, 1);
    return !r->cpu && r->shard_size > 1 && here == r->shard_size && o->copy_engines != OFF;
}

// Returns what moves the data of a collective. On GPUs, NCCL gathers norms and biases in any case; this is left out.
static inline const char *traffic_carrier(const TrafficRanks *r, const Options *o, TrafficKind kind) {
    if (r->cpu) return "MPI or TCP";
    return kind != TRAFFIC_REPLICAS && traffic_copies(r, o) ? "copy engines" : "NCCL";
}

// How often a layer is all-gathered in an optimizer step, forward or backward, as a mean over layers. A layer that is
// still in memory is not gathered again. With --sharding grad_op (keeps_all) every layer stays in memory after its
// first gather in the step. Else only the last layers of a pass stay for the next pass: 2 on GPUs, 1 on CPUs.
static inline double traffic_gathers(const TrafficRanks *r, bool keeps_all, bool backward) {
    const int64_t slots = r->cpu ? 1 : 2, kept = min_i64(slots, r->layers);
    if (keeps_all) return backward ? 0 : 1;
    const double all = (double)(r->micro * r->layers);
    return (all - (double)(kept * (backward ? r->micro : r->micro - 1))) / (double)r->layers;
}

// Elements that a rank keeps of one unit: its slices of all segments.
static inline double traffic_slice(const ShardPlan *s, int64_t l) { return (double)shard_elements(s, l); }

// Adds the bytes that ranks of a shard group exchange.
static inline void traffic_add_sharded(Traffic *t, const Options *o, const ParameterTable *table, const Precision *p,
                                       const ShardPlan *s) {
    const TrafficRanks *r = &t->ranks;
    const int64_t S = r->shard_size, inputs = o->batch_size * o->sequence_length * p->linear[GATE_UP_PROJ].K;
    const int64_t whole_embedding = table->root_segments[embedding_segment(table)];
    const bool copies = traffic_copies(r, o);  // copy engines move bf16, which a kernel sums in fp32
    const double element = r->cpu ? 4 : 2, reduced = r->cpu || (o->reduce_dtype == REDUCE_FP32 && !copies) ? 4 : 2;
    const double vectors = (double)s->layer_slices[SEGMENT_VECTORS],
                 matrices = (double)s->layer_slices[SEGMENT_MATRICES];
    const bool keeps_all = o->sharding == SHARDING_GRAD_OP, from_inputs = !r->cpu && S * inputs <= whole_embedding;
    const bool fp8 = p->any_fp8 && o->fp8_all_gather == ON && recipe_has_tensor_scales(p->recipe);
    const double reduced_matrices = o->reduce_dtype == REDUCE_FP8 ? 1 : reduced;
    for (int64_t l = 0; l < r->layers; l++) {
        const double weights = matrices * (fp8 && precision_layer_is_fp8(p, l) ? 1 : element);
        const double layer = weights + (r->cpu ? vectors * element : 0);
        traffic_add(t, TRAFFIC_FORWARD, S, 1, layer * traffic_gathers(r, keeps_all, false));
        traffic_add(t, TRAFFIC_BACKWARD, S, 1, layer * traffic_gathers(r, keeps_all, true));
        if (!r->cpu) traffic_add(t, TRAFFIC_ROOT, S, 1, vectors * element);
        traffic_add(t, TRAFFIC_GRADIENTS, S, 1, (double)r->micro * (vectors * reduced + matrices * reduced_matrices));
    }
    traffic_add(t, TRAFFIC_ROOT, S, 1, traffic_slice(s, ROOT) * element);
    const double apart = from_inputs ? (double)s->root_slices[SEGMENT_EMBEDDING] : 0;  // 0 if tied to lm_head
    traffic_add(t, TRAFFIC_GRADIENTS, S, 1, (double)r->micro * (traffic_slice(s, ROOT) - apart) * reduced);
    if (from_inputs) traffic_add(t, TRAFFIC_INPUTS, S, 1, (double)(r->micro * inputs) * element);
}

// Returns the traffic of an optimizer step. Call it after options_resolve.
static inline Traffic traffic_of(const TrafficRanks *ranks, const Options *o, const ParameterTable *table,
                                 const Precision *p) {
    Traffic t = {};
    t.ranks = *ranks;
    const int64_t S = ranks->shard_size, replicas = ranks->world / S;
    const ShardPlan s = shard_plan(table, S, 0);
    if (S > 1) traffic_add_sharded(&t, o, table, p, &s);
    if (replicas == 1) return t;
    // A ring all-reduce is a reduce-scatter and an all-gather. The CPU trainer gathers all and adds.
    const double bytes =
        options_fp32_gradients(o, ranks->world) || ranks->cpu || o->reduce_dtype == REDUCE_FP32 ? 4 : 2;
    const double parts = ranks->cpu ? 1 : 2 / (double)replicas;
    const double in_fp8 =
        o->reduce_dtype == REDUCE_FP8 ? (double)(ranks->layers * s.layer_slices[SEGMENT_MATRICES]) : 0;
    traffic_add(&t, TRAFFIC_REPLICAS, replicas, S, (((double)s.total - in_fp8) * bytes + in_fp8) * parts);
    return t;
}

static inline double traffic_sum(const double bytes[NUM_TRAFFIC]) {
    double sum = 0;
    for (int kind = 0; kind < NUM_TRAFFIC; kind++) sum += bytes[kind];
    return sum;
}

#endif
