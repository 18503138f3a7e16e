// train_fp8: pre-trains Llama and Qwen models on the CPU. The readable reference for train_fp8cu: the same model, the
// same FP8 recipes, every one of them emulated bit for bit, and with --precision bf16 or fp8 it rounds wherever the GPU
// rounds (--precision fp32 rounds nowhere), but for sums that the GPU takes in parts: lm_head's weight gradient over
// chunks of rows, and an embedding's gradient that joins a sum after lm_head's.
//
// From top to bottom: sizes and storage, gathering and reducing over ranks, linear layers, the model's forward pass, its backward pass, the optimizer, the
// step, validation and samples, checkpoints, the run. The arithmetic of each operation is in llmc/reference/reference.h.
//
// `mpirun -np N ./train_fp8 ...` trains one model with N ranks, sharded as llmc/config/shard_plan.h says. Every rank runs the same program on its own sequences of each batch.

#include <omp.h>
#include <sys/resource.h>

#include "llmc/base/arena.h"
#include "llmc/run/audit_report.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/dist/comm.h"
#include "llmc/data/dataloader.h"
#include "llmc/reference/delayed.h"
#include "llmc/config/flops.h"
#include "llmc/reference/gradient_sum.h"
#include "llmc/reference/initialize.h"
#include "llmc/run/logger.h"
#include "llmc/run/nonfinite.h"
#include "llmc/config/options.h"
#include "llmc/config/parameters.h"
#include "llmc/config/precision.h"
#include "llmc/reference/reference.h"
#include "llmc/run/run.h"
#include "llmc/run/sampler.h"
#include "llmc/config/schedule.h"
#include "llmc/config/shard_plan.h"
#include "llmc/run/stop.h"
#include "llmc/data/tokenizer.h"
#include "llmc/dist/watch.h"

// Elements that replicas reduce at once.
#define REPLICA_CHUNK ((int64_t)1 << 16)

// ---------------------------------------------------------------------------------------------------------------------
// Sizes and storage

// What a layer keeps for its backward pass. With --recompute layer all layers share everything but x.
typedef struct {
    float *x;             // [R, C] residual stream that enters the layer
    float *norm1;         // [R, C] its RMSNorm
    float *rstd1;         // [R]
    float *qkv;           // [R, QKV] as the product leaves it
    float *rotated;       // [R, QKV] after QK-norm and RoPE
    float *att;           // [R, ATT]
    float *lse;           // [B, NH, T]
    float *x_mid;         // [R, C] residual stream between attention and MLP
    float *norm2, *rstd2;  // [R, C], [R]
    float *gate_up;       // [R, 2F]
    float *h;             // [R, F] silu(gate) * up
} LayerActs;

// A whole layer's weights, gathered from the shard group: segments as shard_segment() places them.
typedef struct {
    float *values;   // vectors, then matrices if they travel as numbers
    uint8_t *codes;  // matrices, if they travel as FP8; else NULL
    int64_t layer;   // whose; -1: nobody's
} GatheredLayer;

typedef struct {
    const Options *o;
    ModelConfig m;
    ParameterTable table;
    Dims d;                       // of the batch; forward() narrows B, T and R for samples
    Rounding rounding;            // of every tensor that is bf16 on the GPU
    Precision precision;          // what each linear layer runs in
    void *memory;                 // the arena
    int64_t memory_bytes;

    const Comm *comm;
    ShardPlan plan;               // with one rank in a shard group its arrays are the flat arrays of parameters.h

    // flat shard arrays, [plan.total] each; bf16 storage is emulated: floats that hold bf16 values
    float *master;                // what the optimizer updates
    float *weights;               // what the model computes with: master, or its bf16 rounding
    float *gradients;             // summed over the micro-steps so far
    float *exp_avg, *exp_avg_sq;

    // with more ranks in a shard group: whole units
    bool gather_fp8;              // matrices of layers whose linear layers are all FP8 travel as codes
    float *root_weights;          // gathered
    GatheredLayer *slots;         // [num_slots] 1, or one for each layer (grad_op)
    int64_t num_slots;
    bool root_held;
    uint8_t *codes;               // [L, slice of matrices] this rank's, made once a step
    bool fp32_sums;               // t->gradients are fp32, else bf16
    bool buffered;                // gradients are computed in these, of the unit that the backward pass is in, and then join t->gradients
    float *root_gradients, *layer_gradients;
    float *received;              // [ranks][slice] gradients on their way

    // of recipes that give a tensor one scale; tensors as delayed.h counts them
    uint32_t *amax;               // [tensors] largest magnitudes, as bits: of whole weights; with delayed scaling also of the micro-step under way
    DelayedState delayed;         // the same on all ranks; the scales lie behind the histories
    float *delayed_before;        // both before the step under way, where it may be left out; else NULL
    // in a micro-step: casts leave their largest magnitudes in amax, norms their number in bad_norm
    bool training;
    int64_t bad_norm;             // of this step: the first norm whose input was not finite (nonfinite.h)
    bool auditing;                // and this is a step of --fp8-audit
    AuditSums *step_audit, *run_audit;  // [audit_count] of this step's casts, on this rank; of all audits, over all ranks

    LayerActs *acts;              // [L + 1]; of the last only x, the final residual stream
    float *branch;                // [R, C] output of attention or MLP before it joins the residual stream
    float *y_final, *rstd_final;  // [R, C], [R] final norm
    float *logits;                // [R, V], overwritten by their gradient
    float *losses;                // [R]
    float *dx;                    // [R, C] gradient of the residual stream
    float *dbranch, *dh, *dgate_up, *datt, *dqkv;  // gradients inside the current layer
    float *rope_table;            // [T, HD/2] (cosine, sine)
    int32_t *inputs, *targets;    // [R]
} Trainer;

static float *take(Arena *a, int64_t n) { return (float *)arena_take(a, n * (int64_t)sizeof(float)); }

static void place_parameters(Trainer *t, Arena *a) {
    const bool copy = t->rounding != ROUND_NONE && t->o->master_weights == STORAGE_FP32;
    arena_group(a, copy ? "weights and fp32 masters" : "weights");
    t->master = take(a, t->plan.total);
    t->weights = copy ? take(a, t->plan.total) : t->master;
    arena_group(a, "gradients");
    t->gradients = take(a, t->plan.total);
    arena_group(a, "optimizer state");
    t->exp_avg = take(a, t->plan.total);
    t->exp_avg_sq = take(a, t->plan.total);
}

// Memory that a rank needs beside its shards to work with whole units, and to add up gradients.
static void place_units(Trainer *t, Arena *a) {
    const ShardPlan *p = &t->plan;
    const int64_t root = shard_gathered_size(p, 0), layer = shard_gathered_size(p, 1), matrices = p->layer_slices[SEGMENT_MATRICES];
    if (p->group > 1) {
        arena_group(a, "gathered weights");
        t->root_weights = take(a, root);
        for (int64_t i = 0; i < t->num_slots; i++) {
            t->slots[i].layer = -1;
            t->slots[i].values = take(a, t->gather_fp8 && !t->precision.any_bf16 ? p->group * p->layer_slices[SEGMENT_VECTORS] : layer);
            t->slots[i].codes = t->gather_fp8 ? (uint8_t *)arena_take(a, p->group * matrices) : NULL;
        }
        if (t->gather_fp8) t->codes = (uint8_t *)arena_take(a, t->d.L * matrices);
    }
    if (t->buffered) {
        arena_group(a, "gradients of whole units");
        t->root_gradients = take(a, root), t->layer_gradients = take(a, layer);
    }
    if (t->comm->world > 1) {
        arena_group(a, "gradients on their way");
        t->received = take(a, max_i64(p->group > 1 ? p->group * shard_largest_slice(p) : 0, t->comm->replicas > 1 ? t->comm->replicas * REPLICA_CHUNK : 0));
    }
}

// Histories and scales of delayed scaling.
static int64_t delayed_elements(const Trainer *t) { return tensor_count(t->d.L) * (t->o->fp8_amax_history + 1); }

static void place_scales(Trainer *t, Arena *a) {
    const Recipe *r = t->precision.recipe;
    const int64_t tensors = tensor_count(t->d.L), window = t->o->fp8_amax_history;
    arena_group(a, "amaxes, histories, audit");
    if (r->gathers_fp8) t->amax = (uint32_t *)arena_take(a, tensors * (int64_t)sizeof(uint32_t));
    if (r->delayed) {
        t->delayed.tensors = tensors, t->delayed.window = window;
        t->delayed.history = take(a, delayed_elements(t)), t->delayed.scale = t->delayed.history + tensors * window;
        t->delayed_before = t->o->on_nonfinite == NONFINITE_SKIP ? take(a, delayed_elements(t)) : NULL;
    }
    if (t->o->fp8_audit) {
        const int64_t bytes = audit_count(&t->precision) * (int64_t)sizeof(AuditSums);
        t->step_audit = (AuditSums *)arena_take(a, bytes), t->run_audit = (AuditSums *)arena_take(a, bytes);
    }
}

static LayerActs place_layer(const Dims *d, Arena *a) {
    LayerActs acts;
    acts.x = NULL;
    acts.norm1 = take(a, d->R * d->C), acts.rstd1 = take(a, d->R);
    acts.qkv = take(a, d->R * d->QKV), acts.rotated = take(a, d->R * d->QKV);
    acts.att = take(a, d->R * d->ATT), acts.lse = take(a, d->R * d->NH);
    acts.x_mid = take(a, d->R * d->C);
    acts.norm2 = take(a, d->R * d->C), acts.rstd2 = take(a, d->R);
    acts.gate_up = take(a, d->R * 2 * d->F);
    acts.h = take(a, d->R * d->F);
    return acts;
}

static void place_activations(Trainer *t, Arena *a) {
    const Dims *d = &t->d;
    arena_group(a, "activations kept for backward");
    for (int64_t l = 0; l < d->L; l++) t->acts[l] = l && t->o->recompute == RECOMPUTE_LAYER ? t->acts[0] : place_layer(d, a);
    for (int64_t l = 0; l <= d->L; l++) t->acts[l].x = take(a, d->R * d->C);
    t->branch = take(a, d->R * d->C);
    t->y_final = take(a, d->R * d->C), t->rstd_final = take(a, d->R);
    arena_group(a, "logits");
    t->logits = take(a, d->R * d->V);
    arena_group(a, "gradients of activations");
    t->dx = take(a, d->R * d->C), t->dbranch = take(a, d->R * d->C);
    t->dh = take(a, d->R * d->F), t->dgate_up = take(a, d->R * 2 * d->F);
    t->datt = take(a, d->R * d->ATT), t->dqkv = take(a, d->R * d->QKV);
    arena_group(a, "tokens, losses, RoPE table");
    t->losses = take(a, d->R);
    t->inputs = (int32_t *)arena_take(a, d->R * (int64_t)sizeof(int32_t)), t->targets = (int32_t *)arena_take(a, d->R * (int64_t)sizeof(int32_t));
    t->rope_table = take(a, d->T * d->HD);
}

// Lays out everything on an arena without memory: the memory plan. trainer_allocate then gives each pointer its place.
static Arena trainer_plan(Trainer *t, const Options *o, const ModelConfig *m, const Comm *comm) {
    memset(t, 0, sizeof *t);
    t->o = o, t->m = *m, t->comm = comm;
    t->table = parameter_table(m);
    t->plan = shard_plan(&t->table, comm->group, comm->place);
    t->d = model_dims(m, o->batch_size, o->sequence_length);
    t->rounding = o->precision == PRECISION_FP32 ? ROUND_NONE : ROUND_BF16;
    t->fp32_sums = options_fp32_gradients(o, comm->world);
    t->buffered = comm->group > 1 || o->grad_accumulation_steps > 1;
    t->precision = precision_plan(o, o->fp8_filter, m, &t->table);
    t->precision.fast_accum = FAST_ACCUM_NONE;  // a GPU's alone
    t->acts = (LayerActs *)xcalloc((size_t)(t->d.L + 1), sizeof(LayerActs));
    for (int64_t l = 0; l < t->d.L && comm->group > 1; l++)
        if (o->fp8_all_gather == ON && t->precision.recipe->gathers_fp8 && precision_layer_is_fp8(&t->precision, l)) t->gather_fp8 = true;
    t->num_slots = o->sharding == SHARDING_GRAD_OP ? t->d.L : 1;
    t->slots = (GatheredLayer *)xcalloc((size_t)t->num_slots, sizeof(GatheredLayer));
    Arena plan;
    memset(&plan, 0, sizeof plan);
    place_parameters(t, &plan);
    place_units(t, &plan);
    place_scales(t, &plan);
    place_activations(t, &plan);
    t->memory_bytes = plan.used;
    return plan;
}

static void trainer_allocate(Trainer *t) {
    const int64_t available = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    const int64_t needed = t->memory_bytes * t->comm->local_world;
    if (needed > available)
        die("this run needs %.1f GiB and the machine has %.1f GiB; a smaller --batch-size or --sequence-length, --recompute layer or a smaller model would help",
            (double)needed / 1073741824.0, (double)available / 1073741824.0);
    Arena a;
    memset(&a, 0, sizeof a);
    a.base = (char *)(t->memory = xcalloc((size_t)t->memory_bytes, 1));
    place_parameters(t, &a);
    place_units(t, &a);
    place_scales(t, &a);
    place_activations(t, &a);
    rope_table_fill(t->rope_table, &t->m, t->d.T);
}

static void trainer_free(Trainer *t) {
    parameter_table_free(&t->table);
    precision_free(&t->precision);
    free(t->acts);
    free(t->slots);
    free(t->memory);
    memset(t, 0, sizeof *t);
}

// ---------------------------------------------------------------------------------------------------------------------
// Whole units: weights gathered from the shard group, gradients reduced into it

// Fills a gathered segment of unit `unit` from the slices of the shard group.
static void gather_segment(Trainer *t, float *unit_values, int64_t unit, int segment) {
    const ShardSegment g = shard_segment(&t->table, &t->plan, unit, segment);
    comm_all_gather(t->comm, COMM_SHARD, t->weights + g.shard, unit_values + g.gathered, g.slice * (int64_t)sizeof(float));
}

// The root's weights: the unit in the flat array, or gathered; they stay until the weights change.
static float *root_weights(Trainer *t) {
    if (t->plan.group == 1) return t->weights;
    for (int k = 0; k < NUM_SEGMENTS && !t->root_held; k++) gather_segment(t, t->root_weights, 0, k);
    t->root_held = true;
    return t->root_weights;
}

// Whether layer l's matrices travel as FP8 codes.
static bool travels_fp8(const Trainer *t, int64_t l) { return t->gather_fp8 && precision_layer_is_fp8(&t->precision, l); }

// Layer l's weights, gathered unless its slot holds them still: with --sharding full a layer gives way to the next one.
static GatheredLayer layer_weights(Trainer *t, int64_t l) {
    if (t->plan.group == 1) {
        GatheredLayer whole = {t->weights + layer_offset(&t->table, l), NULL, l};
        return whole;
    }
    GatheredLayer *slot = &t->slots[t->num_slots > 1 ? l : 0];
    const GatheredLayer gathered = {slot->values, travels_fp8(t, l) ? slot->codes : NULL, l};
    if (slot->layer == l) return gathered;
    const int64_t matrices = t->plan.layer_slices[SEGMENT_MATRICES];
    gather_segment(t, slot->values, 1 + l, SEGMENT_VECTORS);
    if (gathered.codes) comm_all_gather(t->comm, COMM_SHARD, t->codes + l * matrices, gathered.codes, matrices);
    else gather_segment(t, slot->values, 1 + l, SEGMENT_MATRICES);
    slot->layer = l;
    return gathered;
}

// Where the backward pass writes a unit's gradients.
static float *unit_gradients(const Trainer *t, int64_t unit) {
    if (!t->buffered) return t->gradients + unit_offset(&t->table, unit);
    return unit ? t->layer_gradients : t->root_gradients;
}

// mean[i] of `ranks` arrays that stand `stride` apart, in the order of ranks.
static float rank_mean(const float *arrays, int64_t ranks, int64_t stride, int64_t i) {
    double sum = 0;
    for (int64_t r = 0; r < ranks; r++) sum += arrays[r * stride + i];
    return (float)(sum / (double)ranks);
}

// How gradients of micro-step `micro` of optimizer step `step`, both counted from 0, join the sum. Replicas round by
// other bits than each other, so that their noise is not the same.
static GradientSum micro_sum(const Trainer *t, int64_t step, int64_t micro) {
    const int64_t part = 2 * (micro * t->comm->replicas + t->comm->replica);  // the GPU has two parts to a micro-step
    const GradientSum s = {micro > 0, micro > 0, gradient_sum_key((uint64_t)t->o->seed, step, part), 0};
    return s;
}

// After the backward pass through a unit: the mean of its gradients over the shard group joins this rank's slices in
// t->gradients.
static void reduce_unit(Trainer *t, int64_t unit, GradientSum sum) {
    if (!t->buffered) return;
    const float *whole = unit_gradients(t, unit);
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = shard_segment(&t->table, &t->plan, unit, k);
        const float *from = whole + g.gathered;
        if (t->plan.group > 1) {
            comm_all_to_all(t->comm, COMM_SHARD, from, t->received, g.slice * (int64_t)sizeof(float));
            for (int64_t i = 0; i < g.slice; i++) {  // into the first rank's part, of which element i has been read
                const float mean = rank_mean(t->received, t->plan.group, g.slice, i);
                t->received[i] = t->o->reduce_dtype == REDUCE_BF16 ? bf16_round(mean) : mean;
            }
            from = t->received;
        }
        sum.flat = g.flat + t->plan.place * g.slice;
        gradient_sum_reference(t->gradients + g.shard, from, 0, g.slice, t->fp32_sums, &sum);
    }
}

// After the last micro-step: the mean of t->gradients over the replicas.
static void reduce_replicas(Trainer *t) {
    const int64_t replicas = t->comm->replicas;
    for (int64_t first = 0; replicas > 1 && first < t->plan.total; first += REPLICA_CHUNK) {
        const int64_t n = min_i64(REPLICA_CHUNK, t->plan.total - first);
        comm_all_gather(t->comm, COMM_REPLICAS, t->gradients + first, t->received, n * (int64_t)sizeof(float));
        for (int64_t i = 0; i < n; i++) {
            const float mean = rank_mean(t->received, replicas, n, i);
            t->gradients[first + i] = t->fp32_sums ? mean : bf16_round(mean);
        }
    }
}

// Of the whole model's gradient, which the shard group holds between its ranks.
static double gradient_norm(const Trainer *t) {
    const double norm = global_norm(t->gradients, t->plan.total);
    double squares = norm * norm;
    if (t->plan.group == 1) return norm;
    comm_sum(t->comm, COMM_SHARD, &squares, 1);
    return sqrt(squares);
}

// ---------------------------------------------------------------------------------------------------------------------
// The weights of one layer, and its linear layers

// A fused weight [N, K] as numbers or as FP8 codes.
typedef struct {
    float *values;
    const uint8_t *codes;
} Weight;

// Views of one layer's weights or gradients. The fused products read neighbours as one matrix.
typedef struct {
    float *norm1, *norm2;    // [C]
    float *bqkv;             // [QKV] or NULL
    float *q_norm, *k_norm;  // [HD] or NULL
    Weight linear[NUM_LINEARS];
} Block;

// The scale that a tensor with one scale is cast with; `amax`: the bits of its own largest magnitude.
static float cast_scale(const Trainer *t, int64_t l, int id, TensorRole tensor, uint32_t amax) {
    const Recipe *r = precision_of(&t->precision, l, id);
    const Fp8Format format = precision_format(&t->precision, tensor);
    if (!r->delayed) return fp8_rule_scale(r->rule, float_from_bits(amax), format);
    const float known = t->delayed.scale[tensor_index(l, tensor, id)];
    return known > 0 ? known : fp8_scale_te(float_from_bits(amax), format, (int)t->o->fp8_margin);
}

// The same of a whole weight, whose largest magnitude was found when the weights changed.
static float weight_scale(const Trainer *t, int64_t l, int id) { return cast_scale(t, l, id, TENSOR_W, t->amax[tensor_index(l, TENSOR_W, id)]); }

static Block block(const Trainer *t, GatheredLayer layer) {
    const LayerOffsets *at = &t->table.layer;
    const int64_t l = layer.layer, matrices = t->table.layer_segments[SEGMENT_VECTORS];
    float *unit = layer.values;
    Block b;
    memset(&b, 0, sizeof b);
    b.norm1 = unit + at->norm1, b.norm2 = unit + at->norm2;  // vectors stand at the head of a unit, gathered or not
    b.bqkv = t->m.qkv_bias ? unit + at->bq : NULL;
    b.q_norm = t->m.qk_norm ? unit + at->q_norm : NULL, b.k_norm = t->m.qk_norm ? unit + at->k_norm : NULL;
    for (int id = 0; id < NUM_LINEARS; id++) {
        const int64_t offset = t->precision.linear[id].offset;
        if (layer.codes) b.linear[id].codes = layer.codes + offset;
        else b.linear[id].values = unit + shard_gathered_offset(&t->table, &t->plan, 1 + l, matrices + offset);
    }
    return b;
}

static Block gradient_block(const Trainer *t, int64_t l) {
    GatheredLayer gradients = {unit_gradients(t, 1 + l), NULL, l};
    return block(t, gradients);
}

// A tensor of the root unit, by its offset in RootOffsets.
static float *root_tensor(const Trainer *t, float *unit, int64_t offset) { return unit + shard_gathered_offset(&t->table, &t->plan, 0, offset); }

static float *lm_head(const Trainer *t, float *unit) { return root_tensor(t, unit, t->m.tie_word_embeddings ? t->table.root.embedding : t->table.root.lm_head); }

// Adds what a cast did to its operand to this step's audit.
static void audit_cast(Trainer *t, int64_t l, int id, TensorRole tensor, CopyKind copy, const float *x, const LinearOperand *q) {
    if (t->training && t->auditing && q->codes)
        audit_copy(&t->step_audit[audit_index(l, id, tensor, copy)], x, q->codes, q->scales, q->shape,
                   recipe_grain(precision_of(&t->precision, l, id), tensor, copy), precision_format(&t->precision, tensor));
}

// A copy of the input x [R, K] of a linear layer, or of its output's gradient [R, N], as its recipe wants it.
static LinearOperand operand(Trainer *t, int64_t l, LinearId id, TensorRole tensor, CopyKind copy, const float *x) {
    const Recipe *r = precision_of(&t->precision, l, id);
    const LinearShape *s = &t->precision.linear[id];
    const int64_t cols = tensor == TENSOR_DY ? s->N : s->K;
    float scale = 0;
    if (r->delayed) {
        const uint32_t amax = quantize_tensor_amax(x, t->d.R * cols, r->rule);
        uint32_t *largest = &t->amax[tensor_index(l, tensor, id)];
        if (t->training && amax > *largest) *largest = amax;
        scale = cast_scale(t, l, id, tensor, amax);
    }
    const LinearOperand q = linear_operand(x, t->d.R, cols, copy, recipe_grain(r, tensor, copy), r->rule, precision_format(&t->precision, tensor), scale);
    audit_cast(t, l, id, tensor, copy, x, &q);
    return q;
}

static LinearOperand weight_operand(Trainer *t, int64_t l, LinearId id, CopyKind copy, Weight w) {
    const Recipe *r = precision_of(&t->precision, l, id);
    const LinearShape *s = &t->precision.linear[id];
    const float scale = r->gathers_fp8 ? weight_scale(t, l, id) : 0;  // 0: the cast finds its own
    if (w.codes) return linear_operand_of_codes(w.codes, s->N, s->K, copy, FP8_E4M3, scale);
    const LinearOperand q = linear_operand(w.values, s->N, s->K, copy, recipe_grain(r, TENSOR_W, copy), r->rule, FP8_E4M3, scale);
    audit_cast(t, l, id, TENSOR_W, copy, w.values, &q);
    return q;
}

// y [R, N] = x [R, K] w^T + bias by linear layer `id` of layer l. Operands are decoded and multiplied with fp32 sums: --fp8-emulate and --fp8-fast-accum
// change nothing on the CPU.
static void linear(Trainer *t, int64_t l, LinearId id, float *y, const float *x, Weight w, const float *bias) {
    const LinearShape *s = &t->precision.linear[id];
    LinearOperand qx = operand(t, l, id, TENSOR_X, COPY_ROW, x), qw = weight_operand(t, l, id, COPY_ROW, w);
    linear_product(y, qx, qw, t->d.R, s->N, s->K, bias, t->rounding);
    linear_operand_free(&qx), linear_operand_free(&qw);
}

// dx [R, K] = dy [R, N] w and dw [N, K] = dy^T x.
static void linear_backward(Trainer *t, int64_t l, LinearId id, float *dx, Weight dw, const float *dy, const float *x,
                            Weight w) {
    const LinearShape *s = &t->precision.linear[id];
    LinearOperand qdy = operand(t, l, id, TENSOR_DY, COPY_ROW, dy), qw = weight_operand(t, l, id, COPY_COL, w);
    linear_product(dx, qdy, qw, t->d.R, s->K, s->N, NULL, t->rounding);
    linear_operand_free(&qdy), linear_operand_free(&qw);
    LinearOperand turned_dy = operand(t, l, id, TENSOR_DY, COPY_COL, dy), turned_x = operand(t, l, id, TENSOR_X, COPY_COL, x);
    linear_product(dw.values, turned_dy, turned_x, s->N, s->K, t->d.R, NULL, t->rounding);
    linear_operand_free(&turned_dy), linear_operand_free(&turned_x);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

static AttentionDims attention_dims(const Trainer *t) {
    AttentionDims a = {t->d.B, t->d.T, t->d.NH, t->d.NKV, t->d.HD, true};
    return a;
}

static RopeArgs rope_args(const Trainer *t, const Block *w) {
    RopeArgs r = {w->q_norm, w->k_norm, t->m.rms_norm_eps, t->rope_table};
    return r;
}

// y [R, C] = RMSNorm(x): `norm` as nonfinite_norm counts them.
static void norm_forward(Trainer *t, int64_t norm, float *y, float *rstd, const float *x, const float *w) {
    rmsnorm_forward(y, rstd, x, w, t->d.R, t->d.C, t->m.rms_norm_eps, t->rounding);
    for (int64_t i = 0; t->training && i < t->d.R; i++)
        if (!float_is_positive(rstd[i])) t->bad_norm = min_i64(t->bad_norm, norm);
}

// From acts[l].x to acts[l + 1].x.
static void layer_forward(Trainer *t, int64_t l) {
    const Dims *d = &t->d;
    const Block w = block(t, layer_weights(t, l));
    const Rounding r = t->rounding;
    LayerActs *a = &t->acts[l];

    norm_forward(t, nonfinite_norm(l, false), a->norm1, a->rstd1, a->x, w.norm1);
    linear(t, l, QKV_PROJ, a->qkv, a->norm1, w.linear[QKV_PROJ], w.bqkv);
    qknorm_rope_forward(a->rotated, a->qkv, rope_args(t, &w), attention_dims(t), r);
    attention_forward(a->att, a->lse, a->rotated, attention_dims(t), r);
    linear(t, l, OUT_PROJ, t->branch, a->att, w.linear[OUT_PROJ], NULL);
    residual_add(a->x_mid, a->x, t->branch, d->R * d->C, r);

    norm_forward(t, nonfinite_norm(l, true), a->norm2, a->rstd2, a->x_mid, w.norm2);
    linear(t, l, GATE_UP_PROJ, a->gate_up, a->norm2, w.linear[GATE_UP_PROJ], NULL);
    swiglu_forward(a->h, a->gate_up, d->R, d->F, r);
    linear(t, l, DOWN_PROJ, t->branch, a->h, w.linear[DOWN_PROJ], NULL);
    residual_add(t->acts[l + 1].x, a->x_mid, t->branch, d->R * d->C, r);
}

// Logits [R, V] of B sequences of T tokens; B and T are at most the run's.
static void model_forward(Trainer *t, const int32_t *tokens, int64_t B, int64_t T) {
    t->d = model_dims(&t->m, B, T);
    const Dims *d = &t->d;
    float *root = root_weights(t);
    embedding_forward(t->acts[0].x, root_tensor(t, root, t->table.root.embedding), tokens, d->R, d->C);
    for (int64_t l = 0; l < d->L; l++) layer_forward(t, l);
    norm_forward(t, nonfinite_norm(d->L, false), t->y_final, t->rstd_final, t->acts[d->L].x,
                 root_tensor(t, root, t->table.root.norm));
    linear_forward(t->logits, t->y_final, lm_head(t, root), NULL, d->R, d->C, d->V, t->rounding);
}

// Mean cross-entropy of the logits.
static double model_loss(Trainer *t, const int32_t *targets) {
    cross_entropy_forward(t->losses, t->logits, targets, t->d.R, t->d.V);
    return array_sum(t->losses, t->d.R) / (double)t->d.R;
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// t->dx: from the gradient of the layer's output to that of its input. Gradients of weights go to unit_gradients().
static void layer_backward(Trainer *t, int64_t l) {
    const Dims *d = &t->d;
    const Block w = block(t, layer_weights(t, l)), dw = gradient_block(t, l);
    const Rounding r = t->rounding;
    LayerActs *a = &t->acts[l];
    if (t->o->recompute == RECOMPUTE_LAYER) layer_forward(t, l);  // the shared activations hold another layer's

    linear_backward(t, l, DOWN_PROJ, t->dh, dw.linear[DOWN_PROJ], t->dx, a->h, w.linear[DOWN_PROJ]);
    swiglu_backward(t->dgate_up, t->dh, a->gate_up, d->R, d->F, r);
    linear_backward(t, l, GATE_UP_PROJ, t->dbranch, dw.linear[GATE_UP_PROJ], t->dgate_up, a->norm2,
                    w.linear[GATE_UP_PROJ]);
    rmsnorm_backward(t->dx, dw.norm2, t->dx, t->dbranch, a->x_mid, a->rstd2, w.norm2, d->R, d->C, r);

    linear_backward(t, l, OUT_PROJ, t->datt, dw.linear[OUT_PROJ], t->dx, a->att, w.linear[OUT_PROJ]);
    attention_backward(t->dqkv, t->datt, a->rotated, a->att, a->lse, attention_dims(t), r);
    qknorm_rope_backward(t->dqkv, dw.q_norm, dw.k_norm, t->dqkv, a->qkv, rope_args(t, &w), attention_dims(t), r);
    if (dw.bqkv) bias_backward(dw.bqkv, t->dqkv, d->R, d->QKV, r);
    linear_backward(t, l, QKV_PROJ, t->dbranch, dw.linear[QKV_PROJ], t->dqkv, a->norm1, w.linear[QKV_PROJ]);
    rmsnorm_backward(t->dx, dw.norm1, t->dx, t->dbranch, a->x, a->rstd1, w.norm1, d->R, d->C, r);
}

// After model_forward on the same tokens: gradients of (sum of the rows' losses) * grad_scale, as means over the shard
// group, join t->gradients as `sum` says.
static void model_backward(Trainer *t, const int32_t *tokens, const int32_t *targets, float grad_scale,
                           GradientSum sum) {
    const Dims *d = &t->d;
    const Rounding r = t->rounding;
    float *root = root_weights(t), *droot = unit_gradients(t, 0);
    cross_entropy_backward(t->logits, t->logits, targets, d->R, d->V, grad_scale, r);
    linear_backward_input(t->dbranch, t->logits, lm_head(t, root), d->R, d->C, d->V, r);
    linear_backward_weight(lm_head(t, droot), t->logits, t->y_final, d->R, d->C, d->V, r);
    rmsnorm_backward(t->dx, root_tensor(t, droot, t->table.root.norm), NULL, t->dbranch, t->acts[d->L].x, t->rstd_final, root_tensor(t, root, t->table.root.norm),
                     d->R, d->C, r);
    for (int64_t l = d->L - 1; l >= 0; l--) {
        layer_backward(t, l);
        reduce_unit(t, 1 + l, sum);
    }
    // a tied embedding's gradient already holds lm_head's
    embedding_backward(root_tensor(t, droot, t->table.root.embedding), t->dx, tokens, d->R, d->C, d->V,
                       t->m.tie_word_embeddings, r);
    reduce_unit(t, 0, sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights and optimizer

// This rank's part of a fused weight of layer l.
static ShardRange linear_range(const Trainer *t, int64_t l, int id) {
    const LinearShape *s = &t->precision.linear[id];
    return shard_matrix(&t->table, &t->plan, l, s->offset, s->N * s->K);
}

// This rank's codes of it.
static uint8_t *linear_codes(const Trainer *t, int64_t l, ShardRange r) {
    const ShardSegment g = shard_segment(&t->table, &t->plan, 1 + l, SEGMENT_MATRICES);
    return t->codes + l * g.slice + r.shard - g.shard;
}

// Largest magnitudes of whole weights, by one reduction over the shard group for all of them, and FP8 codes of this rank's slices where they travel so.
static void weights_quantize(Trainer *t) {
    for (int64_t i = 0; i < t->d.L * NUM_LINEARS; i++) {
        const int64_t l = i / NUM_LINEARS;
        const int id = (int)(i % NUM_LINEARS);
        const ShardRange r = linear_range(t, l, id);
        t->amax[tensor_index(l, TENSOR_W, id)] = quantize_tensor_amax(t->weights + r.shard, r.count, t->precision.recipe->rule);
    }
    comm_max_u32(t->comm, COMM_SHARD, t->amax, tensor_count(t->d.L));  // those of inputs and gradients are zero between micro-steps
    for (int64_t i = 0; i < t->d.L * NUM_LINEARS; i++) {
        const int64_t l = i / NUM_LINEARS;
        const int id = (int)(i % NUM_LINEARS);
        if (!travels_fp8(t, l)) continue;
        const ShardRange r = linear_range(t, l, id);
        const float scale = weight_scale(t, l, id);
        uint8_t *codes = linear_codes(t, l, r);
        for (int64_t e = 0; e < r.count; e++) codes[e] = fp8_from_float(t->weights[r.shard + e] * scale, FP8_E4M3);
    }
}

// After the masters changed.
static void weights_refresh(Trainer *t) {
    if (t->weights != t->master) {
        memcpy(t->weights, t->master, (size_t)t->plan.total * sizeof(float));
        round_array(t->weights, t->plan.total, t->rounding);
    }
    t->root_held = false;
    for (int64_t i = 0; i < t->num_slots; i++) t->slots[i].layer = -1;
    if (t->precision.recipe->gathers_fp8) weights_quantize(t);
}

static void weights_initialize(Trainer *t) {
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        const ShardRange r = shard_parameter(&t->table, &t->plan, p);
        float *w = t->master + r.shard;
        for (int64_t e = 0; e < r.count; e++) w[e] = parameter_initial_value(p->flags, (float)t->m.initializer_range, (uint64_t)t->o->seed, i, r.first + e);
        if (t->o->master_weights != STORAGE_FP32) round_array(w, r.count, ROUND_BF16);
    }
    weights_refresh(t);
}

// Delayed scaling: the largest magnitudes of the weights as they were cast last, or of the inputs and gradients of a micro-step, enter the histories.
static void histories_update(Trainer *t, bool weights) {
    const DelayedState *d = &t->delayed;
    for (int64_t l = 0; l < t->d.L; l++)
        for (int tensor = 0; tensor < NUM_TENSORS; tensor++)
            for (int id = 0; id < NUM_LINEARS; id++) {
                if ((tensor == TENSOR_W) != weights || !precision_of(&t->precision, l, id)->delayed) continue;
                const int64_t i = tensor_index(l, (TensorRole)tensor, id);
                const Fp8Format format = precision_format(&t->precision, (TensorRole)tensor);
                delayed_update(d->history + i * d->window, d->window, &d->scale[i], t->amax[i], format, (int)t->o->fp8_margin);
                t->amax[i] = 0;
            }
}

// Keeps histories and scales as they are before a step that may be left out, or brings them back.
static void copy_delayed_before(Trainer *t, bool keep) {
    float *to = keep ? t->delayed_before : t->delayed.history, *from = keep ? t->delayed.history : t->delayed_before;
    if (t->delayed_before) memcpy(to, from, (size_t)delayed_elements(t) * sizeof(float));
}

// Optimizer step `step` (counted from 0) with the gradients in t->gradients, whose norm is given.
static void weights_update(Trainer *t, int64_t step, double norm) {
    const Options *o = t->o;
    const AdamwStep s = adamw_step(step + 1, schedule_learning_rate(o, step), o->beta1, o->beta2, o->eps, o->weight_decay, o->master_weights == STORAGE_BF16_NEAREST,
                                     (uint64_t)o->seed);
    const float factor = clip_factor(norm, o->grad_clip);
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        const ShardRange r = shard_parameter(&t->table, &t->plan, p);
        adamw_reference(t->master + r.shard, t->exp_avg + r.shard, t->exp_avg_sq + r.shard, t->gradients + r.shard, p->offset + r.first, r.count, p->flags & PARAM_DECAY,
                        factor, o->master_weights != STORAGE_FP32, o->optimizer_state == STORAGE_BF16, &s);
    }
    // until now the weights were what their scales had cast
    if (t->precision.recipe->delayed) histories_update(t, true);
    weights_refresh(t);
}

// This rank's knowledge of a step that is not taken.
static NonfiniteStep nonfinite_step(const Trainer *t, double loss, double norm) {
    const BackwardOrder order = backward_order(&t->table);
    NonfiniteStep s = {loss, norm, t->bad_norm, 0, NONFINITE_NONE};
    for (int64_t i = 0; i < t->plan.total; i++)
        if (adamw_magnitude(t->gradients[i]) > s.magnitude) s.magnitude = adamw_magnitude(t->gradients[i]);
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        const ShardRange r = shard_parameter(&t->table, &t->plan, p);
        for (int64_t e = 0; e < r.count; e++)
            if (adamw_magnitude(t->gradients[r.shard + e]) >= adamw_large(s.magnitude))
                s.position = min_i64(s.position, backward_position(order, p->offset + r.first + e));
    }
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// The step

// Before step `step` (counted from 1): whether --fp8-audit looks at its casts. Weights that travel as codes were cast before it, slice by slice.
static void audit_begin(Trainer *t, int64_t step) {
    t->auditing = is_due(t->o->fp8_audit, step);
    if (!t->auditing) return;
    memset(t->step_audit, 0, (size_t)audit_count(&t->precision) * sizeof(AuditSums));
    for (int64_t i = 0; i < t->d.L * NUM_LINEARS; i++) {
        const int64_t l = i / NUM_LINEARS;
        const int id = (int)(i % NUM_LINEARS);
        if (!travels_fp8(t, l)) continue;
        const ShardRange r = linear_range(t, l, id);
        const float inverse_scale = 1.0f / weight_scale(t, l, id);
        AuditSums *sums = &t->step_audit[audit_index(l, id, TENSOR_W, COPY_ROW)];  // both copies have the same codes
        audit_copy(sums, t->weights + r.shard, linear_codes(t, l, r), &inverse_scale, copy_shape(1, r.count, COPY_ROW), GRAIN_TENSOR, FP8_E4M3);
    }
}

// After it: the audit of all ranks to the log, and to that of the run.
static void audit_end(Trainer *t, Logger *log, int64_t step) {
    if (t->auditing) audit_finish(t->comm, log, step, t->step_audit, t->run_audit, &t->precision);
}

static int64_t host_memory(void) {
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage)) return 0;
    return (int64_t)usage.ru_maxrss * 1024;
}

// Forward and backward pass over t->inputs and t->targets, [--batch-size, --sequence-length]. Returns the mean loss;
// gradients as model_backward and micro_sum say.
static double micro_step(Trainer *t, float grad_scale, int64_t step, int64_t micro) {
    t->training = true;
    model_forward(t, t->inputs, t->o->batch_size, t->o->sequence_length);
    const double loss = model_loss(t, t->targets);
    model_backward(t, t->inputs, t->targets, grad_scale, micro_sum(t, step, micro));
    t->training = false;
    if (t->precision.recipe->delayed) {
        comm_max_u32(t->comm, COMM_WORLD, t->amax, t->delayed.tensors);
        histories_update(t, false);
    }
    return loss;
}

// One optimizer step on the samples from progress->samples on. A step whose gradient norm is not accepted changes
// nothing; *skipped_in_a_row counts them.
static StepRecord train_step(Trainer *t, DataLoader *data, TrainerProgress *progress, int64_t *skipped_in_a_row) {
    const double start = seconds_now();
    const int64_t B = t->o->batch_size, T = t->o->sequence_length, micro_steps = t->o->grad_accumulation_steps, world = t->comm->world;
    const float grad_scale = (float)(1.0 / (double)(B * T * micro_steps));
    StepRecord s;
    memset(&s, 0, sizeof s);
    activity_phase(PHASE_TRAINING, progress->step + 1);
    t->bad_norm = NONFINITE_NONE;
    copy_delayed_before(t, true);
    audit_begin(t, progress->step + 1);
    for (int64_t micro = 0; micro < micro_steps; micro++) {
        dataloader_batch(data, dataloader_sample_index(progress->samples, micro, world, t->comm->rank, B), B, t->inputs, t->targets);
        s.loss += micro_step(t, grad_scale, progress->step, micro) / (double)micro_steps;
    }
    reduce_replicas(t);
    comm_sum(t->comm, COMM_WORLD, &s.loss, 1);
    s.loss /= (double)world;
    s.norm = gradient_norm(t);
    s.skipped = !adamw_accepts(s.norm);
    *skipped_in_a_row = s.skipped ? *skipped_in_a_row + 1 : 0;
    if (s.skipped) copy_delayed_before(t, false);
    else weights_update(t, progress->step, s.norm);
    s.learning_rate = schedule_learning_rate(t->o, progress->step);
    s.step = ++progress->step;
    progress->samples += world * B * micro_steps;
    s.seconds = seconds_now() - start;
    s.memory = (int64_t)comm_max(t->comm, COMM_WORLD, (double)host_memory());
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// Validation and samples

// Mean loss of the first --val-steps sequences of the validation data. Ranks whose rows of the last batch are beyond
// them compute as the others do, and count nothing. NAN if a stop was requested meanwhile.
static double validate(Trainer *t, DataLoader *data) {
    const int64_t B = t->o->batch_size, T = t->o->sequence_length, world = t->comm->world,
                  sequences = min_i64(t->o->val_steps, data->num_sequences);
    double loss = 0;
    for (int64_t i = 0; i * world * B < sequences; i++) {
        if (stop_requested(t->comm)) return (double)NAN;
        const int64_t first = dataloader_sample_index(0, i, world, t->comm->rank, B),
                      rows = dataloader_rows_before(first, B, sequences);
        dataloader_batch(data, first, B, t->inputs, t->targets);
        model_forward(t, t->inputs, B, T);
        cross_entropy_forward(t->losses, t->logits, t->targets, t->d.R, t->d.V);
        loss += array_sum(t->losses, rows * T) / (double)(sequences * T);
    }
    comm_sum(t->comm, COMM_WORLD, &loss, 1);
    return loss;
}

static const float *next_logits(void *context, const int32_t *tokens, int64_t length) {
    Trainer *t = (Trainer *)context;
    model_forward(t, tokens, 1, length);
    return t->logits + (length - 1) * t->m.vocab_size;
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints: access to the flat shard arrays in their storage type

static float *state_array(const Trainer *t, StateKind kind) { return kind == STATE_WEIGHTS ? t->master : kind == STATE_EXP_AVG ? t->exp_avg : t->exp_avg_sq; }

static bool state_is_fp32(const Trainer *t, StateKind kind) {
    return (kind == STATE_WEIGHTS ? t->o->master_weights : t->o->optimizer_state) == STORAGE_FP32;
}

static void state_read(void *context, StateKind kind, int64_t offset, int64_t count, void *host) {
    const Trainer *t = (const Trainer *)context;
    const float *from = state_array(t, kind) + offset;
    if (state_is_fp32(t, kind)) memcpy(host, from, (size_t)count * sizeof(float));
    else
        for (int64_t i = 0; i < count; i++) ((bf16_bits *)host)[i] = bf16_from_float(from[i]);
}

static void state_write(void *context, StateKind kind, int64_t offset, int64_t count, const void *host) {
    const Trainer *t = (const Trainer *)context;
    float *to = state_array(t, kind) + offset;
    if (state_is_fp32(t, kind)) memcpy(to, host, (size_t)count * sizeof(float));
    else
        for (int64_t i = 0; i < count; i++) to[i] = bf16_to_float(((const bf16_bits *)host)[i]);
}

static TrainerState trainer_state(Trainer *t) {
    TrainerState s = {t, {state_is_fp32(t, STATE_WEIGHTS), state_is_fp32(t, STATE_EXP_AVG), state_is_fp32(t, STATE_EXP_AVG_SQ)}, state_read, state_write,
                      &t->plan, t->comm, t->precision.recipe->delayed ? &t->delayed : NULL};
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

// Steps, validations, samples and checkpoints until --num-steps or a stop signal, which is returned (0: none).
static int train(Trainer *t, RunSetup *setup, Logger *log, TrainerProgress *progress) {
    const Options *o = t->o;
    const TrainerState state = trainer_state(t);
    int64_t skipped_in_a_row = 0;
    int stop = stop_requested(t->comm);
    while (progress->step < o->num_steps && !stop) {
        const StepRecord s = train_step(t, &setup->train, progress, &skipped_in_a_row);
        if (s.skipped) {
            const NonfiniteStep what = nonfinite_step(t, s.loss, s.norm);
            nonfinite_report(o, &t->table, &state, &what, s.step - 1, skipped_in_a_row);
        }
        logger_step(log, &s);
        audit_end(t, log, s.step);
        const Due due = schedule_due(o, s.step);
        if (due.validate) {
            activity_phase(PHASE_VALIDATION, s.step);
            const double loss = validate(t, &setup->val);
            if (!isnan(loss) || !stop_requested(t->comm)) logger_validation(log, s.step, loss);
        }
        if (due.sample) sampler_print(o, t->comm, &t->m, &setup->tokenizer, s.step, next_logits, t);
        stop = stop_requested(t->comm);
        if (due.save || (stop && *o->checkpoint_dir))
            run_save(setup, o, progress, &t->table, &state, due.last || stop, log);
    }
    return stop;
}

// Dies on what only the GPU trainer can do.
static void check_supported(const Options *o) {
    if (strcmp(o->fp8_filter, "auto") == 0) die("--fp8-filter auto times products on a GPU; for the CPU name what stays bf16, or leave it out");
    if (o->profile) die("--profile is the GPU trainer's (train_fp8cu); leave it out");
    if (o->copy_engines == ON) die("--copy-engines on is the GPU trainer's (train_fp8cu): here MPI moves weights and gradients; leave it out");
    if (o->fp8_weight_cache == ON) die("--fp8-weight-cache on is the GPU trainer's (train_fp8cu): here weights are cast in each pass; leave it out");
}

static int run(int argc, char **argv) {
    char presets[1024], device[64];
    model_config_preset_names(presets, sizeof presets);
    process_prepare();
    Comm comm = comm_open(&argc, &argv);
    Options o = options_parse(argc, argv);
    watch_open(&comm, o.stall_timeout);
    output_survive(&o);
    run_setup_same_options(&comm, &o, "train_fp8");
    options_require_model(&o, argc, argv, presets);
    check_supported(&o);
    RunSetup setup = run_setup(&o, &comm);
    if (o.world_size) comm_assume(&comm, o.world_size);
    comm_split(&comm, options_shard_group(&o, comm.world));
    Trainer t;
    const Arena plan = trainer_plan(&t, &o, &setup.model, &comm);
    run_print(&setup, &o, &comm, &t.table, &t.plan, &t.precision);
    arena_print_plan(&plan, 0);
    precision_print(&t.precision, t.d.R, t.d.R, t.rounding == ROUND_NONE ? "fp32" : "bf16");
    printf("\n");
    fflush(stdout);
    if (!o.dry_run) {
        run_setup_resume(&setup, &o, &comm);
        run_setup_check_room(&setup, &o, &comm);
        trainer_allocate(&t);
        stop_catch();
        const TrainerState state = trainer_state(&t);
        if (!run_load(&setup, &t.table, &state)) weights_initialize(&t);
        weights_refresh(&t);
        TrainerProgress progress = setup.start;
        format_checked(device, sizeof device, "CPU, %d threads", omp_get_max_threads());
        const RunInfo info = {"train_fp8", device, "compiler " __VERSION__, comm.world, o.peak_tflops * 1e12, progress.step > 0};
        Logger log = logger_open(&o, &t.m, &t.table, &t.precision, info);
        const int stop = train(&t, &setup, &log, &progress);
        logger_close(&log);
        if (o.fp8_audit) audit_print_table(t.run_audit, &t.precision);
        run_end(&setup, &o, stop, progress.step, &t.table, &state);
    }
    run_setup_close(&setup);
    trainer_free(&t);
    watch_close();
    comm_close(&comm);
    return EXIT_SUCCESS;
}

#ifndef TESTING
int main(int argc, char **argv) { return run(argc, argv); }
#endif
