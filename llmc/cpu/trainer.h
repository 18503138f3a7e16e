// The CPU trainer's state: weights and their shards, gradients, scales, activations; and the plan of their memory.
#ifndef LLMC_CPU_TRAINER_H
#define LLMC_CPU_TRAINER_H

#include "../base/arena.h"
#include "../base/cgroup.h"
#include "../checkpoint/tensors.h"
#include "../config/options.h"
#include "../config/parameters.h"
#include "../config/precision.h"
#include "../config/shard_plan.h"
#include "../data/dataloader.h"
#include "../ranks/comm.h"
#include "../reference/adamw.h"
#include "../reference/adamw_msamp.h"
#include "../reference/audit.h"
#include "../reference/delayed.h"
#include "../run/audit_report.h"
#include "../run/logger.h"
#include "../run/memory_fit.h"
#include "../run/nonfinite.h"
#include "../run/replay.h"

// Largest number of gradients, or of their FP8 codes, that the replicas exchange at a time.
#define REPLICA_CHUNK ((int64_t)1 << 16)

// A value that is bf16 on the GPU. Here it is an fp32 number, rounded to bf16 with --precision bf16 and fp8.
typedef float Real;

// A tensor of a linear layer: its input, its output's gradient, its weight or the weight's gradient. Each GEMM that
// reads it casts it anew, by the recipe of the linear layer, unless it is a weight that was cast ahead.
typedef struct {
    Real *data;            // [rows, cols]; NULL if only codes are here
    const uint8_t *codes;  // FP8 codes of a weight that was cast ahead (cast_ahead); else NULL
    int64_t layer;
    TensorRole role;
    LinearId linear;
} QTensor;

// One layer's weights, or their gradients.
typedef struct {
    Real *norm1, *norm2;              // [C]
    Real *q_norm, *k_norm;            // [HD], NULL without QK-norm
    Real *qkv_bias;                   // [QKV], NULL without bias
    QTensor qkv, out, gate_up, down;  // [QKV, C], [C, ATT], [2F, C], [C, F]
} Layer;

// The root's weights, or their gradients.
typedef struct {
    Real *embedding, *lm_head;  // [V, C]; one tensor if they are tied
    Real *norm;                 // [C]
} Root;

// Activations that one layer's forward pass leaves for its backward pass. Layers may share memory (place_layer).
typedef struct {
    Real *x;        // [R, C] residual stream that enters the layer
    QTensor norm1;  // [R, C] RMSNorm of x
    float *rstd1;   // [R]
    Real *qkv;      // [R, QKV] as the linear layer leaves it
    Real *rotated;  // [R, QKV] after QK-norm and RoPE
    QTensor att;    // [R, ATT]
    float *lse;     // [B, NH, T]
    Real *x_mid;    // [R, C] residual stream between attention and MLP
    QTensor norm2;  // [R, C] RMSNorm of x_mid
    float *rstd2;   // [R]
    Real *gate_up;  // [R, 2F]
    QTensor h;      // [R, F] silu(gate) * up
} LayerActs;

// Gradients of the outputs of a layer's four linear layers.
typedef struct {
    QTensor qkv, out, gate_up, down;
} OutputGradients;

// Activations of a micro-step and their gradients.
typedef struct {
    LayerActs *layer;         // [L]
    bool rotated_is_shared;   // as in train_fp8.cu (activations.cuh); always false here
    Real *branch;             // [R, C] output of attention or MLP before it joins the residual stream
    Real *x_final, *y_final;  // [R, C] residual stream after the last layer, and its RMSNorm
    float *rstd_final;        // [R]
    Real *logits;             // [R, V], overwritten by their gradient
    float *losses;            // [R]
    Real *dx;                 // [R, C] gradient of the residual stream
    Real *dbranch;            // [R, C] gradient of a norm's output
    Real *dh, *dgate_up;      // [R, F], [R, 2F] gradients inside the current layer
    Real *datt, *dqkv;        // [R, ATT], [R, QKV]
    float *rope_table;        // [T, HD/2] (cosine, sine)
} Activations;

// Flat shard arrays, most of them [plan.total]. bf16 storage is emulated: floats that hold bf16 values. FP16 is stored
// as such: a step decodes FP16 masters into `master` and updates them there in fp32. With FP16 masters `weights` is the
// same array as `master`. Between steps this array holds the masters' values, rounded to bf16. The layers' matrices are
// not rounded if they are cast to FP8 from the masters (precision_casts_masters). FP8 gradients are emulated too:
// floats that are the values of codes with a scale.
typedef struct {
    float *master;                     // master weights, which the optimizer updates
    fp16_bits *fp16_master;            // FP16 masters, else NULL
    float *weights;                    // weights that the model computes with: `master`, or a bf16 copy of it
    float *gradients;                  // summed over the micro-steps so far (gradients_at)
    float *exp_avg, *exp_avg_sq;       // moments in fp32 or bf16, else NULL
    CoatMoment coat_avg, coat_avg_sq;  // COAT's moments, else NULL
    MsampArrays msamp;                 // MS-AMP's moments, else NULL
    float *scales;                     // with MS-AMP's moments or FP16 masters: their scales (tensor_scale); else NULL
    uint32_t *amaxes;  // amaxes of the arrays that have `scales`, as bits of fp32 (tensor_amax); else NULL
} Params;

// The number of arrays that have a scale for each parameter: both moments of MS-AMP, and FP16 masters.
enum { TENSOR_SCALES = STATE_MASTER_SCALE - STATE_EXP_AVG_SCALE + 1 };

// --optimizer-in-backward: the current optimizer step so far.
typedef struct {
    int64_t step;         // its number, counted from 0
    double squares;       // sum of squares of the gradients
    float *norms;         // with --grad-clip: STATE_CLIP_NORMS, else NULL
    NonfiniteStep large;  // magnitude and position from find_large, over units that could make the norm too large
} BackwardUpdate;

// A whole layer's weights, gathered from the shard group. Its segments lie where ShardSegment.gathered says.
typedef struct {
    float *values;   // vectors, then matrices unless they were cast ahead
    uint8_t *codes;  // matrices that were cast ahead
    int64_t layer;   // the layer that it holds; -1: none
} GatheredLayer;

// Whole FSDP units (the root, and each layer): weights as the model computes with them, and gradients before they are
// reduced over ranks.
typedef struct {
    bool casts_ahead;        // weights are cast to FP8 when they change, in layers whose linear layers are all FP8
    bool root_held;          // `root` has been gathered since the weights changed
    float *root;             // the root's weights, gathered
    GatheredLayer *slots;    // [num_slots]
    int64_t num_slots;       // 1; with --sharding grad_op one for each layer
    uint8_t *codes;          // [L, slice of matrices] with casts_ahead: this rank's part of the FP8 codes
    bool fp32_sums;          // true: params.gradients, except FP8 ones, are fp32; false: bf16
    bool fp8_sums;           // params.gradients of the layers' matrices are FP8 (gradient_fp8.h)
    uint32_t *amaxes;        // [entries of the parameter table] fp32 bits: amaxes of FP8 gradients
    bool buffered;           // backward writes gradients to the next two arrays, which then go to params.gradients
    float *root_gradients;   // the root's
    float *layer_gradients;  // one layer's
    int64_t step, micro;     // the optimizer step and micro-step, counted from 0 (micro_sum)
    int64_t targets;         // that count in the step, of all ranks
    Replay replay;           // --replay-every
    float *received;         // [ranks, slice] gradients, or their FP8 codes, from all ranks of a group
} Units;

// Scales of recipes with one scale per tensor, and the results of --fp8-audit. tensor_index() numbers the tensors.
typedef struct {
    uint32_t *amax;  // [tensors] fp32 bits: amaxes of whole weights; delayed scaling: also of x and dy
    // Equal on all ranks; the scales lie behind the histories. With recipe tensorwise_bounded it has no histories, and
    // scales of weights alone.
    DelayedState delayed;
    float *delayed_before;  // histories and scales before this step, if it may be skipped; else NULL
    bool auditing;          // this is a step of --fp8-audit
    AuditSums *step_audit;  // [audit_count] of this step's casts, on this rank
} Scales;

typedef struct {
    const Options *o;
    const Comm *comm;
    ModelConfig m;
    ParameterTable table;
    ShardPlan plan;       // with shard_size 1, shards are the flat arrays of parameters.h
    Precision precision;  // precision of each linear layer
    Rounding rounding;    // applied to every tensor that is bf16 on the GPU
    Dims d;               // sizes of a batch; during next_logits, of one sequence
    Params params;
    Units units;
    Scales scales;
    Activations acts;
    Batch batch;           // the current micro-step's
    bool training;         // true in a micro-step: casts write scales.amax and step_audit, and norms bad_norm
    int64_t bad_norm;      // number of this step's first RMSNorm with a bad input (NonfiniteStep.forward)
    BackwardUpdate early;  // with --optimizer-in-backward
    int64_t skipped;       // how many steps before this one were skipped
    StepRecord last_step;  // the latest step
    void *memory;          // the arena
    int64_t memory_bytes;
} Trainer;

static inline float *take(Arena *a, int64_t n) { return (float *)arena_take(a, n * (int64_t)sizeof(float)); }

static inline CoatMoment take_coat(Arena *a, int64_t n) {
    CoatMoment moment;
    moment.codes = (uint8_t *)arena_take(a, n);
    moment.groups = (uint32_t *)arena_take(a, n / COAT_GROUP * (int64_t)sizeof *moment.groups);
    return moment;
}

// Returns where unit l's part of params.gradients begins. With --optimizer-in-backward all layers share one place.
static inline int64_t gradients_begin(const Trainer *t, int64_t l) {
    return shard_begin(&t->plan, l == ROOT || !t->o->optimizer_in_backward ? l : 0);
}

// Returns where the gradient of element `shard` of the flat shard arrays is. The element is in unit l.
static inline float *gradients_at(const Trainer *t, int64_t l, int64_t shard) {
    return t->params.gradients + gradients_begin(t, l) + shard - shard_begin(&t->plan, l);
}

static inline void place_parameters(Trainer *t, Arena *a) {
    const bool copy = t->rounding != ROUND_NONE && t->o->master_weights == STORAGE_FP32,
               fp16 = options_fp16_weights(t->o);
    Params *p = &t->params;
    arena_group(a, copy ? "weights and fp32 masters" : fp16 ? "weights and FP16 masters" : "weights");
    p->master = take(a, t->plan.total);
    p->weights = copy ? take(a, t->plan.total) : p->master;
    p->fp16_master = fp16 ? (fp16_bits *)arena_take(a, t->plan.total * (int64_t)sizeof(fp16_bits)) : NULL;
    arena_group(a, "gradients");
    p->gradients = take(a, t->o->optimizer_in_backward ? shard_begin(&t->plan, 1) : t->plan.total);
    arena_group(a, "optimizer state");
    const int64_t moments = options_uses_model(t->o) ? 0 : t->plan.total;
    if (options_coat(t->o)) {
        p->coat_avg = take_coat(a, moments), p->coat_avg_sq = take_coat(a, moments);
    } else if (t->o->optimizer_state == MOMENTS_MSAMP) {
        p->msamp.exp_avg = (uint8_t *)arena_take(a, moments);
        p->msamp.exp_avg_sq = (fp16_bits *)arena_take(a, moments * (int64_t)sizeof(fp16_bits));
    } else {
        p->exp_avg = take(a, moments), p->exp_avg_sq = take(a, moments);
    }
    if (options_tensor_scales(t->o)) {
        p->scales = take(a, TENSOR_SCALES * t->table.count);
        p->amaxes = (uint32_t *)arena_take(a, TENSOR_SCALES * t->table.count * (int64_t)sizeof *p->amaxes);
    }
    t->early.norms = options_clips_in_backward(t->o) ? take(a, t->d.L + 1) : NULL;
}

// Places the arrays of Units.
static inline void place_units(Trainer *t, Arena *a) {
    const ShardPlan *p = &t->plan;
    Units *u = &t->units;
    const int64_t root = gathered_elements(p, ROOT), layer = gathered_elements(p, 0);
    const int64_t vectors = p->layer_slices[SEGMENT_VECTORS], matrices = p->layer_slices[SEGMENT_MATRICES];
    if (p->shard_size > 1) {
        arena_group(a, "gathered weights");
        u->root = take(a, root);
        for (int64_t i = 0; i < u->num_slots; i++) {
            u->slots[i].layer = -1;
            u->slots[i].values = take(a, u->casts_ahead && !t->precision.any_bf16 ? p->shard_size * vectors : layer);
            u->slots[i].codes = u->casts_ahead ? (uint8_t *)arena_take(a, p->shard_size * matrices) : NULL;
        }
    }
    arena_group(a, "FP8 weights");
    if (u->casts_ahead) u->codes = (uint8_t *)arena_take(a, t->d.L * matrices);
    if (u->buffered) {
        arena_group(a, "gradients of whole units");
        u->root_gradients = take(a, root), u->layer_gradients = take(a, layer);
    }
    if (u->fp8_sums) u->amaxes = (uint32_t *)arena_take(a, t->table.count * (int64_t)sizeof *u->amaxes);
    if (t->comm->world > 1) {
        arena_group(a, "received gradients");
        u->received = take(a, max_i64(p->shard_size > 1 ? p->shard_size * shard_largest_slice(p) : 0,
                                      t->comm->replicas > 1 ? t->comm->replicas * REPLICA_CHUNK : 0));
    }
}

// Returns the number of elements of delayed scaling's histories and scales.
static inline int64_t delayed_elements(const Trainer *t) {
    return t->scales.delayed.tensors * (t->scales.delayed.window + 1);
}

static inline void place_scales(Trainer *t, Arena *a) {
    const Recipe *r = t->precision.recipe;
    Scales *s = &t->scales;
    const int64_t tensors = tensor_count(t->d.L), window = r->delayed ? t->o->fp8_amax_history : 0;
    arena_group(a, "amaxes, histories, audit");
    if (recipe_has_tensor_scales(r)) s->amax = (uint32_t *)arena_take(a, tensors * (int64_t)sizeof(uint32_t));
    if (r->delayed || r->bounded) {
        s->delayed.tensors = tensors, s->delayed.window = window;
        s->delayed.history = take(a, delayed_elements(t)), s->delayed.scale = s->delayed.history + tensors * window;
        s->delayed_before = r->delayed && t->o->on_nonfinite == NONFINITE_SKIP ? take(a, delayed_elements(t)) : NULL;
    }
    if (t->o->fp8_audit)
        s->step_audit = (AuditSums *)arena_take(a, audit_count(&t->precision) * (int64_t)sizeof(AuditSums));
}

// Places layer l's activations, except x. With --recompute all layers share the arrays of layer 0 for what backward
// computes again.
static inline void place_layer(Trainer *t, int64_t l, Arena *a) {
    const Dims *d = &t->d;
    const Recomputed again = options_recomputed(t->o);
    LayerActs *acts = &t->acts.layer[l];
    *acts = t->acts.layer[0];
    if (l == 0 || !again.norms) acts->norm1.data = take(a, d->R * d->C), acts->norm2.data = take(a, d->R * d->C);
    if (l == 0 || !again.attention) {
        acts->qkv = take(a, d->R * d->QKV), acts->rotated = take(a, d->R * d->QKV);
        acts->att.data = take(a, d->R * d->ATT), acts->lse = take(a, d->R * d->NH);
    }
    if (l == 0 || !again.stream) {
        acts->rstd1 = take(a, d->R), acts->rstd2 = take(a, d->R);
        acts->x_mid = take(a, d->R * d->C);
    }
    if (l == 0 || !again.mlp) acts->gate_up = take(a, d->R * 2 * d->F), acts->h.data = take(a, d->R * d->F);
}

// Sets layer, role and linear layer of the QTensors that layer l's linear layers read.
static inline void name_inputs(LayerActs *acts, int64_t l) {
    QTensor *inputs[NUM_LINEARS] = {&acts->norm1, &acts->att, &acts->norm2, &acts->h};  // in the order of LinearId
    for (int id = 0; id < NUM_LINEARS; id++)
        inputs[id]->layer = l, inputs[id]->role = TENSOR_X, inputs[id]->linear = (LinearId)id;
}

static inline void place_activations(Trainer *t, Arena *a) {
    const Dims *d = &t->d;
    Activations *acts = &t->acts;
    arena_group(a, "activations kept for backward");
    for (int64_t l = 0; l < d->L; l++) {
        place_layer(t, l, a);
        name_inputs(&acts->layer[l], l);
    }
    for (int64_t l = 0; l < d->L; l++) acts->layer[l].x = take(a, d->R * d->C);
    acts->x_final = take(a, d->R * d->C);
    acts->rotated_is_shared = false;
    acts->branch = take(a, d->R * d->C);
    acts->y_final = take(a, d->R * d->C), acts->rstd_final = take(a, d->R);
    arena_group(a, "logits");
    acts->logits = take(a, d->R * d->V);
    arena_group(a, "gradients of activations");
    acts->dx = take(a, d->R * d->C), acts->dbranch = take(a, d->R * d->C);
    acts->dh = take(a, d->R * d->F), acts->dgate_up = take(a, d->R * 2 * d->F);
    acts->datt = take(a, d->R * d->ATT), acts->dqkv = take(a, d->R * d->QKV);
    arena_group(a, "tokens, losses, RoPE table");
    acts->losses = take(a, d->R);
    t->batch.inputs = (int32_t *)arena_take(a, d->R * (int64_t)sizeof(int32_t));
    t->batch.targets = (int32_t *)arena_take(a, d->R * (int64_t)sizeof(int32_t));
    if (options_masks_documents(t->o)) {
        t->batch.documents.starts = (int32_t *)arena_take(a, d->R * (int64_t)sizeof(int32_t));
        t->batch.documents.ends = (int32_t *)arena_take(a, d->R * (int64_t)sizeof(int32_t));
    }
    acts->rope_table = take(a, d->T * d->HD);
}

// Places everything on an arena. An arena without memory only counts bytes.
static inline void place_all(Trainer *t, Arena *a) {
    place_parameters(t, a);
    place_units(t, a);
    place_scales(t, a);
    place_activations(t, a);
}

// Fills *t, except for its pointers into the arena, and returns the memory plan: the arena, laid out without memory.
// trainer_allocate then sets the pointers.
static inline Arena trainer_plan(Trainer *t, const Options *o, const ModelConfig *m, const Comm *comm) {
    memset(t, 0, sizeof *t);
    Units *u = &t->units;
    t->o = o, t->m = *m, t->comm = comm;
    t->table = parameter_table(m);
    t->plan = shard_plan(&t->table, comm->shard_size, comm->shard_rank);
    t->d = model_dims(m, o->batch_size, o->sequence_length);
    t->rounding = o->precision == PRECISION_FP32 ? ROUND_NONE : ROUND_BF16;
    t->precision = precision_plan(o, o->fp8_filter, m, &t->table, false);
    t->acts.layer = (LayerActs *)xcalloc((size_t)t->d.L, sizeof(LayerActs));
    u->fp32_sums = options_fp32_gradients(o, comm->world);
    u->fp8_sums = options_fp8_gradients(o);
    u->buffered = comm->shard_size > 1 || o->grad_accumulation_steps > 1 || u->fp8_sums;
    u->casts_ahead = t->precision.casts_masters;
    for (int64_t l = 0; l < t->d.L && comm->shard_size > 1; l++)
        if (o->fp8_all_gather == ON && recipe_has_tensor_scales(t->precision.recipe) &&
            precision_layer_is_fp8(&t->precision, l))
            u->casts_ahead = true;
    u->num_slots = o->sharding == SHARDING_GRAD_OP ? t->d.L : 1;
    u->slots = (GatheredLayer *)xcalloc((size_t)u->num_slots, sizeof(GatheredLayer));
    Arena plan = {};
    place_all(t, &plan);
    t->memory_bytes = plan.used;
    return plan;
}

// Returns the bytes of memory that a rank needs.
static inline int64_t memory_needed(const Options *o, const ModelConfig *m, const Comm *comm) {
    Trainer t;
    return trainer_plan(&t, o, m, comm).used;
}

// Returns where the scale of parameter i is: that of a moment (STATE_EXP_AVG_SCALE, STATE_EXP_AVG_SQ_SCALE) or of its
// FP16 master (STATE_MASTER_SCALE).
static inline float *tensor_scale(const Trainer *t, StateKind kind, int64_t i) {
    return &t->params.scales[(kind - STATE_EXP_AVG_SCALE) * t->table.count + i];
}

static inline uint32_t *tensor_amax(const Trainer *t, StateKind kind, int64_t i) {
    return &t->params.amaxes[i * TENSOR_SCALES + (kind - STATE_EXP_AVG_SCALE)];
}

// Returns the bytes that this rank may take: its part of the host's memory, or of its control group's if that is less.
static inline int64_t memory_available(const Comm *comm) {
    const int64_t host = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    return min_i64(host, cgroup_memory_limit("/proc/self/cgroup", "/sys/fs/cgroup")) / comm->local_world;
}

static inline void trainer_allocate(Trainer *t) {
    const MemoryFit fit = {t->o, &t->m, t->comm, CPU_TRAINER, memory_needed, memory_available(t->comm), false};
    memory_fit_require(&fit, t->memory_bytes,
                       t->comm->local_world > 1 ? "each rank's part of what this machine or its cgroup allows is"
                                                : "this machine or its cgroup allows");
    Arena a = {};
    a.base = (char *)(t->memory = xcalloc((size_t)t->memory_bytes, 1));
    place_all(t, &a);
    rope_table_fill(t->acts.rope_table, &t->m, t->d.T);
    t->units.replay.values = (uint64_t *)xcalloc((size_t)replay_count(&t->table), sizeof(uint64_t));
    for (int64_t i = 0; t->params.scales && i < t->table.count; i++)
        *tensor_scale(t, STATE_EXP_AVG_SCALE, i) = *tensor_scale(t, STATE_EXP_AVG_SQ_SCALE, i) = 1;
}

static inline void trainer_free(Trainer *t) {
    parameter_table_free(&t->table);
    precision_free(&t->precision);
    free(t->acts.layer);
    free(t->units.slots);
    free(t->units.replay.values);
    free(t->memory);
    memset(t, 0, sizeof *t);
}

#endif
