// An estimate of a step's time on paper: of a rank's own work on an H100 or H200, and of what communication adds.
//
// The rank's work is a sum of times at the peak of the hardware, each multiplied by a factor above 1. The five factors
// were fitted to 29 measured steps on one H200, BF16 and FP8 tensorwise (dev/reference/fit_step_estimate.py). For these
// steps the estimate is off by at most 5%. Steps of a model that is left out of the fit are off by at most 17%, and
// steps on one H100 by at most 7%. Most other recipes take longer than estimated. With COAT's moments, AdamW takes the
// time of its arithmetic if that is longer than the time of its memory traffic (ESTIMATE_COAT). The copies of --offload
// are not counted. With --step-ms the passes take a measured time (estimate_work).
//
// A pass takes the longer of two times: that of its communication alone, and that of its computation plus 35% of the
// communication that overlaps with it, because copies and collectives take memory bandwidth and SMs from the GEMMs. The
// 35% were fitted to steps on 4 H200. Steps on 2 and 4 H100 or H200 are off by at most 7%. On CPUs nothing overlaps.
#ifndef LLMC_STEP_ESTIMATE_H
#define LLMC_STEP_ESTIMATE_H

#include "flops.h"
#include "traffic.h"

// Times at the hardware's peak are multiplied by the first five factors.
#define ESTIMATE_BF16_GEMM 1.414
#define ESTIMATE_FP8_GEMM 1.518
#define ESTIMATE_ATTENTION 1.945  // at head_dim 128; smaller heads take longer
#define ESTIMATE_ELEMENTWISE 3.039
#define ESTIMATE_OPTIMIZER 1.348
#define ESTIMATE_INTERFERENCE 0.35     // share of overlapped communication that adds to the computation
#define ESTIMATE_LINK_EFFICIENCY 0.73  // copy engines over NVLink: 330 of 450 GB/s
// Seconds per parameter of the arithmetic of AdamW with COAT's FP8 moments. Fitted to four steps on one H200.
#define ESTIMATE_COAT 4.6e-12
#define ESTIMATE_COAT_STOCHASTIC 5.7e-12

typedef struct {
    double bf16_flops, bytes_per_second;  // dense BF16 peak; bandwidth of the GPU's memory
    double link_bytes_per_second;         // to each GPU from the others of its host
} EstimateGpu;

static inline EstimateGpu estimate_gpu(int gpu) {
    static const EstimateGpu gpus[] = {{989.5e12, 4.8e12, 450e9}, {989.5e12, 3.35e12, 450e9}};  // in the order of GPUS
    return gpus[gpu];
}

// Seconds of a rank's own work in an optimizer step.
typedef struct {
    double passes, optimizer;  // forward and backward of all micro-steps; AdamW
} EstimateWork;

// A rough count of the bytes that elementwise kernels and casts move in a layer for each row. In FP8 they move more;
// ESTIMATE_ELEMENTWISE was fitted to this count.
static inline double estimate_row_bytes(const ModelConfig *m, bool fp8) {
    return 2.0 * ((double)m->hidden_size * (fp8 ? 18 : 14) + (double)m->intermediate_size * (fp8 ? 9 : 8));
}

// Seconds of AdamW on n parameters.
static inline double estimate_optimizer(const Options *o, const Precision *p, int64_t world, int64_t n) {
    const double moments = 2 * (double)options_moment_bytes(o, n), gradients = options_fp32_gradients(o, world) ? 4 : 2;
    const bool fp16 = options_fp16_weights(o);
    double bytes = (double)n * (gradients + (o->master_weights == STORAGE_FP32 ? 10
                                             : fp16 && !p->casts_masters       ? 6
                                                                               : 4)) +
                   moments;
    if (options_tensor_scales(o)) bytes += (double)n * (gradients + (fp16 ? 2 : 0)) + moments / 2;  // pass 1 of msamp.h
    const double arithmetic = !options_coat(o)                     ? 0
                              : o->optimizer_state == MOMENTS_COAT ? ESTIMATE_COAT
                                                                   : ESTIMATE_COAT_STOCHASTIC;
    return fmax(bytes * ESTIMATE_OPTIMIZER / estimate_gpu(o->gpu).bytes_per_second, (double)n * arithmetic);
}

// Returns the share that linear layer `id`, summed over the model's layers, has of all_layers, the FLOPs per row of all
// linear layers but lm_head.
static inline double estimate_share(const Precision *p, const ModelConfig *m, LinearId id, double all_layers) {
    return (double)(p->linear[id].N * p->linear[id].K * m->num_layers) * 6 / all_layers;
}

// Seconds that forward and backward of one micro-step compute, without communication. codes: FP8 weights are gathered
// as codes.
static inline double estimate_passes(const Options *o, const ModelConfig *m, const ParameterTable *t,
                                     const Precision *p, bool codes) {
    const EstimateGpu gpu = estimate_gpu(o->gpu);
    const TokenFlops f = flops_per_token(t, m, o->sequence_length, p);
    const double rows = (double)(o->batch_size * o->sequence_length), heads = (double)(m->num_heads * m->head_dim);
    const double all_layers = 6.0 * (double)(matmul_parameters(t, m) - m->vocab_size * m->hidden_size);
    const double head_flops = 6.0 * (double)(m->vocab_size * m->hidden_size), fp8_weights = f.fp8 / 6;
    const double head_fp8 = flops_head_fp8(p), layers_fp8 = f.fp8 - head_fp8;
    const double scores_flops = 6.0 * (double)m->num_layers * heads * (double)o->sequence_length;
    const double at_peak = rows / gpu.bf16_flops;  // seconds for one FLOP of each row
    const double layers =
                     ((all_layers - layers_fp8) * ESTIMATE_BF16_GEMM + layers_fp8 / 2 * ESTIMATE_FP8_GEMM) * at_peak,
                 head = ((head_flops - head_fp8) * ESTIMATE_BF16_GEMM + head_fp8 / 2 * ESTIMATE_FP8_GEMM) * at_peak,
                 scores = scores_flops * ESTIMATE_ATTENTION * sqrt(128 / (double)m->head_dim) * at_peak,
                 elementwise = rows * (double)m->num_layers * estimate_row_bytes(m, p->any_fp8) * ESTIMATE_ELEMENTWISE /
                               gpu.bytes_per_second;
    // Bytes a weight. If codes are gathered, or AdamW writes them: about one for the code, two for a transposed copy.
    const int cast_bytes = codes || p->recipe->bounded ? 3 : 6;
    const double casts = cast_bytes * fp8_weights * ESTIMATE_OPTIMIZER / gpu.bytes_per_second;
    // Work that --recompute adds: forward is a third of the GEMM and elementwise work, and two sevenths
    // of attention's.
    const Recomputed r = options_recomputed(o);
    const double norm_bytes = rows * (double)(m->num_layers * m->hidden_size) * 8;
    const double gemms = (r.attention ? estimate_share(p, m, QKV_PROJ, all_layers) : 0) +
                         (r.stream ? estimate_share(p, m, OUT_PROJ, all_layers) : 0) +
                         (r.mlp ? estimate_share(p, m, GATE_UP_PROJ, all_layers) : 0);
    double again = layers / 3 * gemms + (r.attention ? scores * 2 / 7 : 0);
    if (r.stream) again += elementwise / 3;
    else if (r.norms) again += norm_bytes * ESTIMATE_ELEMENTWISE / gpu.bytes_per_second;
    const double groups = options_keeps_fp8(o) ? rows * (double)(m->num_layers * m->intermediate_size) * 12 : 0;
    again += groups * ESTIMATE_OPTIMIZER / gpu.bytes_per_second;  // --fp8-activations: casts of gate and up, and back
    return layers + head + scores + elementwise + casts + again;
}

// Returns a rank's own work on a GPU. --step-ms is the time of a step on one rank alone. If --step-ms is given, the
// passes take that time minus the estimated time of AdamW on all parameters.
static inline EstimateWork estimate_work(const Options *o, const ModelConfig *m, const ParameterTable *t,
                                         const Precision *p, const TrafficRanks *r) {
    const ShardPlan s = shard_plan(t, r->shard_size, 0);
    EstimateWork w;
    w.passes = (double)r->micro * estimate_passes(o, m, t, p, r->shard_size > 1 && o->fp8_all_gather == ON);
    if (o->step_ms > 0) w.passes = fmax(0, o->step_ms * 1e-3 - estimate_optimizer(o, p, 1, t->total));
    w.optimizer = estimate_optimizer(o, p, r->world, s.total);
    return w;
}

// Seconds of an optimizer step.
typedef struct {
    double total;
    double work;      // the rank's own work
    double exchange;  // communication, if nothing overlapped
} StepEstimate;

static inline double estimate_overlap(double work, double exchange) {
    return fmax(work + ESTIMATE_INTERFERENCE * exchange, exchange);
}

// Sets the seconds of each kind of communication, and returns their sum. A kind takes the longer of its times on links
// and on the network. link: bytes per second that a rank receives from ranks of its host; network: bytes per second
// that a host receives from other hosts.
static inline double estimate_exchange(const Traffic *t, double link, double network, double seconds[NUM_TRAFFIC]) {
    double sum = 0;
    for (int kind = 0; kind < NUM_TRAFFIC; kind++) {
        const double across = t->network[kind] > 0 ? t->network[kind] / network : 0;
        sum += seconds[kind] = fmax(t->received[kind] / link, across);
    }
    return sum;
}

// True if a step can be estimated. If hosts exchange data, --network-gbps must be given. On CPUs, --step-ms must be
// given.
static inline bool estimate_known(const Traffic *t, const Options *o) {
    return (o->network_gbps > 0 || traffic_sum(t->network) == 0) && (!t->ranks.cpu || o->step_ms > 0);
}

static inline StepEstimate estimate_step(const Traffic *t, const Options *o, const ModelConfig *m,
                                         const ParameterTable *table, const Precision *p) {
    const double network = o->network_gbps * 1e9 / 8;
    double seconds[NUM_TRAFFIC];
    StepEstimate e;
    if (t->ranks.cpu) {
        e.exchange = estimate_exchange(t, (double)INFINITY, network, seconds);
        e.work = o->step_ms * 1e-3, e.total = e.work + e.exchange;
        return e;
    }
    const EstimateWork w = estimate_work(o, m, table, p, &t->ranks);
    e.exchange =
        estimate_exchange(t, estimate_gpu(o->gpu).link_bytes_per_second * ESTIMATE_LINK_EFFICIENCY, network, seconds);
    e.work = w.passes + w.optimizer;
    const double forward = estimate_overlap(w.passes / 3, seconds[TRAFFIC_FORWARD]),
                 backward = estimate_overlap(w.passes * 2 / 3, seconds[TRAFFIC_BACKWARD] + seconds[TRAFFIC_GRADIENTS] +
                                                                   seconds[TRAFFIC_REPLICAS]),
                 last = seconds[TRAFFIC_GRADIENTS] / (double)(t->ranks.layers * t->ranks.micro);  // layer 0's reduction
    e.total = forward + backward + last + seconds[TRAFFIC_INPUTS] + fmax(w.optimizer, seconds[TRAFFIC_ROOT]);
    return e;
}

#endif
