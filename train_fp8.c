// train_fp8: pre-trains Llama and Qwen models on the CPU. It is the readable reference for train_fp8cu: it has the same
// model and FP8 recipes, and casts equal values to equal FP8 bits. With --precision bf16 or fp8 it rounds to bf16 and
// FP8 wherever the GPU does. Exceptions are sums that the GPU computes in parts: lm_head's weight gradient, in chunks
// of rows; the embedding's gradient, which the GPU may add directly to lm_head's (if they are tied) and to the sums of
// earlier micro-steps; and sums over ranks.
//
// From top to bottom: the trainer and its memory, gathering and reducing over ranks, quantized tensors and linear
// layers, the model's operations, one layer, the whole model, the optimizer, the step, validation and samples,
// checkpoints, the run. The arithmetic of each operation is in llmc/reference/.
//
// The functions of one layer, forward and backward, are the same text in train_fp8.cu (dev/test/test_twins.py).
//
// `mpirun -np N ./train_fp8 ...` trains one model with N ranks, sharded as llmc/config/shard_plan.h says. Every rank
// runs the same program on its own sequences of each batch.

#include <omp.h>
#include <sys/resource.h>

#include "llmc/base/arena.h"
#include "llmc/base/cgroup.h"
#include "llmc/base/openmp.h"

#include "llmc/config/options.h"
#include "llmc/config/parameters.h"
#include "llmc/config/precision.h"
#include "llmc/config/schedule.h"
#include "llmc/config/shard_plan.h"

#include "llmc/data/dataloader.h"

#include "llmc/reference/adamw.h"
#include "llmc/reference/adamw_msamp.h"
#include "llmc/reference/attention.h"
#include "llmc/reference/cross_entropy.h"
#include "llmc/reference/delayed.h"
#include "llmc/reference/embedding.h"
#include "llmc/reference/fp8_group.h"
#include "llmc/reference/gradient_fp8.h"
#include "llmc/reference/gradient_sum.h"
#include "llmc/reference/initialize.h"
#include "llmc/reference/linear.h"
#include "llmc/reference/rmsnorm.h"
#include "llmc/reference/rope.h"
#include "llmc/reference/swiglu.h"

#include "llmc/ranks/comm.h"

#include "llmc/checkpoint/tensors.h"

#include "llmc/run/nonfinite.h"
#include "llmc/run/train.h"

// Largest number of gradients, or of their FP8 codes, that the replicas exchange at a time.
#define REPLICA_CHUNK ((int64_t)1 << 16)

// ---------------------------------------------------------------------------------------------------------------------
// The trainer and its memory

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
    GradientSum sum;         // how this micro-step's gradients are added to params.gradients
    float *received;         // [ranks, slice] gradients, or their FP8 codes, from all ranks of a group
} Units;

// Scales of recipes with one scale per tensor, and the results of --fp8-audit. tensor_index() numbers the tensors.
typedef struct {
    uint32_t *amax;         // [tensors] fp32 bits: amaxes of whole weights; delayed scaling: also of x and dy
    DelayedState delayed;   // equal on all ranks; the scales lie behind the histories
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

static float *take(Arena *a, int64_t n) { return (float *)arena_take(a, n * (int64_t)sizeof(float)); }

static CoatMoment take_coat(Arena *a, int64_t n) {
    CoatMoment moment;
    moment.codes = (uint8_t *)arena_take(a, n);
    moment.groups = (uint32_t *)arena_take(a, n / COAT_GROUP * (int64_t)sizeof *moment.groups);
    return moment;
}

// Returns where unit l's part of params.gradients begins. With --optimizer-in-backward all layers share one place.
static int64_t gradients_begin(const Trainer *t, int64_t l) {
    return shard_begin(&t->plan, l == ROOT || !t->o->optimizer_in_backward ? l : 0);
}

// Returns where the gradient of element `shard` of the flat shard arrays is. The element is in unit l.
static float *gradients_at(const Trainer *t, int64_t l, int64_t shard) {
    return t->params.gradients + gradients_begin(t, l) + shard - shard_begin(&t->plan, l);
}

static void place_parameters(Trainer *t, Arena *a) {
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
    if (options_coat(t->o)) {
        p->coat_avg = take_coat(a, t->plan.total), p->coat_avg_sq = take_coat(a, t->plan.total);
    } else if (t->o->optimizer_state == MOMENTS_MSAMP) {
        p->msamp.exp_avg = (uint8_t *)arena_take(a, t->plan.total);
        p->msamp.exp_avg_sq = (fp16_bits *)arena_take(a, t->plan.total * (int64_t)sizeof(fp16_bits));
    } else {
        p->exp_avg = take(a, t->plan.total), p->exp_avg_sq = take(a, t->plan.total);
    }
    if (options_tensor_scales(t->o)) {
        p->scales = take(a, TENSOR_SCALES * t->table.count);
        p->amaxes = (uint32_t *)arena_take(a, TENSOR_SCALES * t->table.count * (int64_t)sizeof *p->amaxes);
    }
    t->early.norms = options_clips_in_backward(t->o) ? take(a, t->d.L + 1) : NULL;
}

// Places the arrays of Units.
static void place_units(Trainer *t, Arena *a) {
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
static int64_t delayed_elements(const Trainer *t) { return tensor_count(t->d.L) * (t->o->fp8_amax_history + 1); }

static void place_scales(Trainer *t, Arena *a) {
    const Recipe *r = t->precision.recipe;
    Scales *s = &t->scales;
    const int64_t tensors = tensor_count(t->d.L), window = t->o->fp8_amax_history;
    arena_group(a, "amaxes, histories, audit");
    if (recipe_has_tensor_scales(r)) s->amax = (uint32_t *)arena_take(a, tensors * (int64_t)sizeof(uint32_t));
    if (r->delayed) {
        s->delayed.tensors = tensors, s->delayed.window = window;
        s->delayed.history = take(a, delayed_elements(t)), s->delayed.scale = s->delayed.history + tensors * window;
        s->delayed_before = t->o->on_nonfinite == NONFINITE_SKIP ? take(a, delayed_elements(t)) : NULL;
    }
    if (t->o->fp8_audit)
        s->step_audit = (AuditSums *)arena_take(a, audit_count(&t->precision) * (int64_t)sizeof(AuditSums));
}

// Places layer l's activations, except x. With --recompute all layers share the arrays of layer 0 for what backward
// computes again.
static void place_layer(Trainer *t, int64_t l, Arena *a) {
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
static void name_inputs(LayerActs *acts, int64_t l) {
    QTensor *inputs[NUM_LINEARS] = {&acts->norm1, &acts->att, &acts->norm2, &acts->h};  // in the order of LinearId
    for (int id = 0; id < NUM_LINEARS; id++)
        inputs[id]->layer = l, inputs[id]->role = TENSOR_X, inputs[id]->linear = (LinearId)id;
}

static void place_activations(Trainer *t, Arena *a) {
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
    acts->rope_table = take(a, d->T * d->HD);
}

// Places everything on an arena. An arena without memory only counts bytes.
static void place_all(Trainer *t, Arena *a) {
    place_parameters(t, a);
    place_units(t, a);
    place_scales(t, a);
    place_activations(t, a);
}

// Fills *t, except for its pointers into the arena, and returns the memory plan: the arena, laid out without memory.
// trainer_allocate then sets the pointers.
static Arena trainer_plan(Trainer *t, const Options *o, const ModelConfig *m, const Comm *comm) {
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
    Arena plan;
    memset(&plan, 0, sizeof plan);
    place_all(t, &plan);
    t->memory_bytes = plan.used;
    return plan;
}

// Returns the bytes of memory that a rank needs.
static int64_t memory_needed(const Options *o, const ModelConfig *m, const Comm *comm) {
    Trainer t;
    return trainer_plan(&t, o, m, comm).used;
}

// Returns where the scale of parameter i is: that of a moment (STATE_EXP_AVG_SCALE, STATE_EXP_AVG_SQ_SCALE) or of its
// FP16 master (STATE_MASTER_SCALE).
static float *tensor_scale(const Trainer *t, StateKind kind, int64_t i) {
    return &t->params.scales[(kind - STATE_EXP_AVG_SCALE) * t->table.count + i];
}

static uint32_t *tensor_amax(const Trainer *t, StateKind kind, int64_t i) {
    return &t->params.amaxes[i * TENSOR_SCALES + (kind - STATE_EXP_AVG_SCALE)];
}

// Returns the bytes that this rank may take: its part of the host's memory, or of its control group's if that is less.
static int64_t memory_available(const Comm *comm) {
    const int64_t host = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    return min_i64(host, cgroup_memory_limit("/proc/self/cgroup", "/sys/fs/cgroup")) / comm->local_world;
}

static void trainer_allocate(Trainer *t) {
    const MemoryFit fit = {t->o, &t->m, t->comm, CPU_TRAINER, memory_needed, memory_available(t->comm), false};
    memory_fit_require(&fit, t->memory_bytes,
                       t->comm->local_world > 1 ? "each rank's part of what this machine or its cgroup allows is"
                                                : "this machine or its cgroup allows");
    Arena a;
    memset(&a, 0, sizeof a);
    a.base = (char *)(t->memory = xcalloc((size_t)t->memory_bytes, 1));
    place_all(t, &a);
    rope_table_fill(t->acts.rope_table, &t->m, t->d.T);
    for (int64_t i = 0; t->params.scales && i < t->table.count; i++)
        *tensor_scale(t, STATE_EXP_AVG_SCALE, i) = *tensor_scale(t, STATE_EXP_AVG_SQ_SCALE, i) = 1;
}

static void trainer_free(Trainer *t) {
    parameter_table_free(&t->table);
    precision_free(&t->precision);
    free(t->acts.layer);
    free(t->units.slots);
    free(t->memory);
    memset(t, 0, sizeof *t);
}

// ---------------------------------------------------------------------------------------------------------------------
// Whole units: weights gathered from the shard group, gradients reduced into it

// Fills a segment of the root or of layer l in `unit` from the slices of the shard group.
static void gather_segment(Trainer *t, float *unit, int64_t l, int segment) {
    const ShardSegment g = segment_slice(&t->table, &t->plan, l, segment);
    comm_all_gather(t->comm, COMM_SHARD, t->params.weights + g.shard, unit + g.gathered,
                    g.slice * (int64_t)sizeof(float));
}

// True if layer l's matrices are cast to FP8 codes when they change. A shard group then gathers codes, not values.
static bool cast_ahead(const Trainer *t, int64_t l) {
    return t->units.casts_ahead && precision_layer_is_fp8(&t->precision, l);
}

static GatheredLayer *layer_slot(const Trainer *t, int64_t l) {
    return &t->units.slots[t->units.num_slots > 1 ? l : 0];
}

// Gathers layer l's weights if they are sharded and its slot does not hold them yet. `backward` changes nothing: both
// passes read the same values.
static void unshard(Trainer *t, int64_t l, bool backward) {
    (void)backward;
    GatheredLayer *slot = layer_slot(t, l);
    if (t->plan.shard_size == 1 || slot->layer == l) return;
    const int64_t matrices = t->plan.layer_slices[SEGMENT_MATRICES];
    gather_segment(t, slot->values, l, SEGMENT_VECTORS);
    if (cast_ahead(t, l)) comm_all_gather(t->comm, COMM_SHARD, t->units.codes + l * matrices, slot->codes, matrices);
    else gather_segment(t, slot->values, l, SEGMENT_MATRICES);
    slot->layer = l;
}

// Called when a pass has no more use for layer l's weights. Does nothing here: they stay until another layer needs the
// slot.
static void reshard(Trainer *t, int64_t l) { (void)t, (void)l; }

// Returns where the backward pass writes the gradients of the root or of layer l.
static float *unit_gradients(const Trainer *t, int64_t l) {
    if (!t->units.buffered) return t->params.gradients + gradients_begin(t, l);
    return l == ROOT ? t->units.root_gradients : t->units.layer_gradients;
}

static QTensor qtensor(Real *data, int64_t l, TensorRole role, LinearId id) {
    const QTensor q = {data, NULL, l, role, id};
    return q;
}

// Returns linear layer `id`'s weight, or its gradient, in layer l's `unit`. If `codes` is not NULL, returns the FP8
// codes of the weight instead.
static QTensor unit_matrix(const Trainer *t, int64_t l, LinearId id, float *unit, const uint8_t *codes) {
    const int64_t offset = t->precision.linear[id].offset, vectors = t->table.layer_segments[SEGMENT_VECTORS];
    QTensor w = qtensor(NULL, l, TENSOR_W, id);
    if (codes) w.codes = codes + offset;
    else w.data = unit + gathered_offset(&t->table, &t->plan, l, vectors + offset);
    return w;
}

// Returns views of layer l's unit, whose vectors come first. GEMMs read fused weights as one matrix.
static Layer unit_layer(const Trainer *t, int64_t l, float *unit, const uint8_t *codes) {
    const LayerOffsets *at = &t->table.layer;
    Layer v;
    v.norm1 = unit + at->norm1, v.norm2 = unit + at->norm2;
    v.q_norm = t->m.qk_norm ? unit + at->q_norm : NULL, v.k_norm = t->m.qk_norm ? unit + at->k_norm : NULL;
    v.qkv_bias = t->m.qkv_bias ? unit + at->bq : NULL;
    v.qkv = unit_matrix(t, l, QKV_PROJ, unit, codes), v.out = unit_matrix(t, l, OUT_PROJ, unit, codes);
    v.gate_up = unit_matrix(t, l, GATE_UP_PROJ, unit, codes), v.down = unit_matrix(t, l, DOWN_PROJ, unit, codes);
    return v;
}

// Returns layer l's weights. Call it between unshard and reshard.
static Layer layer_weights(Trainer *t, int64_t l) {
    const bool whole = t->plan.shard_size == 1;
    const GatheredLayer *slot = layer_slot(t, l);
    const uint8_t *codes = whole ? t->units.codes + l * t->plan.layer_slices[SEGMENT_MATRICES] : slot->codes;
    float *values = whole ? t->params.weights + layer_offset(&t->table, l) : slot->values;
    return unit_layer(t, l, values, cast_ahead(t, l) ? codes : NULL);
}

static Layer layer_gradients(Trainer *t, int64_t l) { return unit_layer(t, l, unit_gradients(t, l), NULL); }

static Root unit_root(const Trainer *t, float *unit) {
    const RootOffsets *at = &t->table.root;
    const int64_t lm_head = t->m.tie_word_embeddings ? at->embedding : at->lm_head;
    const Root r = {unit + gathered_offset(&t->table, &t->plan, ROOT, at->embedding),
                    unit + gathered_offset(&t->table, &t->plan, ROOT, lm_head),
                    unit + gathered_offset(&t->table, &t->plan, ROOT, at->norm)};
    return r;
}

// Returns the root's weights. Once gathered they stay until the weights change.
static Root root_weights(Trainer *t) {
    if (t->plan.shard_size == 1) return unit_root(t, t->params.weights);
    for (int k = 0; k < NUM_SEGMENTS && !t->units.root_held; k++) gather_segment(t, t->units.root, ROOT, k);
    t->units.root_held = true;
    return unit_root(t, t->units.root);
}

static Root root_gradients(Trainer *t) { return unit_root(t, unit_gradients(t, ROOT)); }

// Returns the mean of element i over `ranks` arrays, `stride` elements apart. Sums in the order of ranks.
static float rank_mean(const float *arrays, int64_t ranks, int64_t stride, int64_t i) {
    double sum = 0;
    for (int64_t r = 0; r < ranks; r++) sum += arrays[r * stride + i];
    return (float)(sum / (double)ranks);
}

// Returns how the gradients of micro-step `micro` of optimizer step `step`, both counted from 0, are added to the sum.
// Each replica rounds with its own random bits.
static GradientSum micro_sum(const Trainer *t, int64_t step, int64_t micro) {
    const int64_t part = 2 * (micro * t->comm->replicas + t->comm->replica);  // part + 1: FsdpGradients.embedding_key
    const GradientSum s = {micro > 0, micro > 0, gradient_sum_key((uint64_t)t->o->rounding_seed, step, part), 0};
    return s;
}

// The entries [begin, end) of the parameter table that are in one unit.
typedef struct {
    int64_t begin, end;
} UnitEntries;

static UnitEntries unit_entries(const Trainer *t, int64_t l) {
    UnitEntries u = {0, 0};
    while (t->table.entries[u.begin].layer != l) u.begin++;
    for (u.end = u.begin; u.end < t->table.count && t->table.entries[u.end].layer == l;) u.end++;
    return u;
}

// Returns this rank's part of entry i of the table. Its count is 0 if the gradient of the entry is not FP8, or if this
// rank has no part of it.
static ShardRange fp8_gradient_part(const Trainer *t, int64_t i) {
    const Parameter *p = &t->table.entries[i];
    const ShardRange none = {0, 0, 0};
    return p->flags & PARAM_FP8 ? shard_parameter(&t->table, &t->plan, p) : none;
}

// Returns the scale of an FP8 gradient from its amax, which units.amaxes has.
static float fp8_gradient_scale(const Trainer *t, int64_t i) { return gradient_fp8_scale(t->units.amaxes[i]); }

// Finds the amaxes of layer l's FP8 gradients in params.gradients, over all ranks of `group`.
static void fp8_gradient_amaxes(Trainer *t, int64_t l, CommGroup group) {
    const UnitEntries u = unit_entries(t, l);
    for (int64_t i = u.begin; i < u.end; i++) {
        const ShardRange r = fp8_gradient_part(t, i);
        t->units.amaxes[i] = r.count ? gradient_fp8_amax(gradients_at(t, l, r.shard), r.count) : 0;
    }
    comm_max_u32(t->comm, group, t->units.amaxes + u.begin, u.end - u.begin);
}

// Rounds layer l's gradients of matrices, in params.gradients, to FP8. `sum`: how they have joined these. The segment
// of matrices begins at `begin` in the rank's shard.
static void round_gradients(Trainer *t, int64_t l, const GradientSum *sum, int64_t begin) {
    const UnitEntries u = unit_entries(t, l);
    fp8_gradient_amaxes(t, l, COMM_SHARD);
    for (int64_t i = u.begin; i < u.end; i++) {
        const ShardRange r = fp8_gradient_part(t, i);
        if (r.count)
            gradient_fp8_round(gradients_at(t, l, r.shard), fp8_gradient_scale(t, i), r.shard - begin, r.count, sum);
    }
}

// Returns this rank's slice of the mean of layer l's gradients of matrices over the shard group, sent in FP8. `whole`
// is this rank's gradient of the segment. units.received has three parts, one behind the other: the codes from all
// ranks, this rank's codes, and the result.
static const float *reduce_scatter_fp8(Trainer *t, int64_t l, const float *whole) {
    const int64_t ranks = t->plan.shard_size;
    const ShardSegment g = segment_slice(&t->table, &t->plan, l, SEGMENT_MATRICES);
    const UnitEntries u = unit_entries(t, l);
    uint8_t *received = (uint8_t *)t->units.received, *codes = received + ranks * g.slice;
    float *mean = (float *)(codes + ranks * g.slice);
    memset(codes, 0, (size_t)(ranks * g.slice));
    for (int64_t i = u.begin; i < u.end; i++) {
        const Parameter *p = &t->table.entries[i];
        const int64_t at = p->offset - g.flat, n = p->flags & PARAM_FP8 ? parameter_elements(p) : 0;
        t->units.amaxes[i] = n ? gradient_fp8_amax(whole + at, n) : 0;
    }
    comm_max_u32(t->comm, COMM_SHARD, t->units.amaxes + u.begin, u.end - u.begin);
    for (int64_t i = u.begin; i < u.end; i++) {
        const Parameter *p = &t->table.entries[i];
        const int64_t at = p->offset - g.flat;
        if (p->flags & PARAM_FP8)
            gradient_fp8_encode(codes + at, whole + at, fp8_gradient_scale(t, i), parameter_elements(p));
    }
    comm_all_to_all(t->comm, COMM_SHARD, codes, received, g.slice);
    memset(mean, 0, (size_t)g.slice * sizeof *mean);
    for (int64_t i = u.begin; i < u.end; i++) {
        const ShardRange r = fp8_gradient_part(t, i);
        const int64_t at = r.shard - g.shard;
        const float scale_inv = 1 / fp8_gradient_scale(t, i) / (float)ranks;
        if (r.count) gradient_fp8_sum(mean + at, received + at, ranks, g.slice, scale_inv, r.count);
    }
    return mean;
}

// Returns this rank's slice of the mean of a segment's gradients over the shard group, rounded to bf16 unless
// --reduce-dtype is fp32. `whole` is this rank's gradient of the segment.
static const float *reduce_scatter_segment(Trainer *t, const ShardSegment *g, const float *whole) {
    float *received = t->units.received;
    comm_all_to_all(t->comm, COMM_SHARD, whole, received, g->slice * (int64_t)sizeof(float));
    for (int64_t i = 0; i < g->slice; i++) {  // into the first rank's part, whose element i was read
        const float mean = rank_mean(received, t->plan.shard_size, g->slice, i);
        received[i] = t->o->reduce_dtype == REDUCE_FP32 ? mean : bf16_round(mean);
    }
    return received;
}

// Called after the backward pass of the root or of layer l. Does nothing unless gradients are computed in buffers. Adds
// their mean over the shard group to this rank's slices in params.gradients; the first micro-step replaces these
// (units.sum). Then rounds FP8 gradients.
static void reduce_scatter_gradients(Trainer *t, int64_t l) {
    if (!t->units.buffered) return;
    const float *whole = unit_gradients(t, l);
    GradientSum sum = t->units.sum;
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = segment_slice(&t->table, &t->plan, l, k);
        const bool fp8 = t->units.fp8_sums && l != ROOT && k == SEGMENT_MATRICES;
        const float *from = whole + g.gathered;
        if (t->plan.shard_size > 1)
            from = fp8 && t->o->reduce_dtype == REDUCE_FP8 ? reduce_scatter_fp8(t, l, from)
                                                           : reduce_scatter_segment(t, &g, from);
        sum.flat = g.flat + t->plan.shard_rank * g.slice;
        gradient_sum_reference(gradients_at(t, l, g.shard), from, 0, g.slice, t->units.fp32_sums || fp8, &sum);
        if (fp8) round_gradients(t, l, &sum, g.shard);
    }
}

// Replaces each of `count` gradients by its mean over the replicas, after the last micro-step.
static void reduce_replicas(Trainer *t, float *gradients, int64_t count) {
    const int64_t replicas = t->comm->replicas;
    float *received = t->units.received;
    for (int64_t first = 0; replicas > 1 && first < count; first += REPLICA_CHUNK) {
        const int64_t n = min_i64(REPLICA_CHUNK, count - first);
        comm_all_gather(t->comm, COMM_REPLICAS, gradients + first, received, n * (int64_t)sizeof(float));
        for (int64_t i = 0; i < n; i++) {
            const float mean = rank_mean(received, replicas, n, i);
            gradients[first + i] = t->units.fp32_sums ? mean : bf16_round(mean);
        }
    }
}

// Replaces layer l's gradients of matrices by their mean over the replicas, sent in FP8. The amaxes are over all ranks,
// because the ranks of a shard group have parts of the same tensors. This rank's codes are, for one tensor at a time,
// where backward computes the gradients of matrices.
static void reduce_replicas_fp8(Trainer *t, int64_t l) {
    const int64_t replicas = t->comm->replicas;
    const UnitEntries u = unit_entries(t, l);
    uint8_t *codes = (uint8_t *)(t->units.layer_gradients +
                                 segment_slice(&t->table, &t->plan, l, SEGMENT_MATRICES).gathered),
            *received = (uint8_t *)t->units.received;
    fp8_gradient_amaxes(t, l, COMM_WORLD);
    for (int64_t i = u.begin; i < u.end; i++) {
        const ShardRange r = fp8_gradient_part(t, i);
        const float scale = fp8_gradient_scale(t, i), scale_inv = 1 / scale / (float)replicas;
        float *gradients = r.count ? gradients_at(t, l, r.shard) : NULL;
        gradient_fp8_encode(codes, gradients, scale, r.count);
        for (int64_t first = 0; first < r.count; first += REPLICA_CHUNK) {
            const int64_t n = min_i64(REPLICA_CHUNK, r.count - first);
            comm_all_gather(t->comm, COMM_REPLICAS, codes + first, received, n);
            gradient_fp8_sum(gradients + first, received, replicas, n, scale_inv, n);
        }
    }
}

// With FP8 gradients: replaces all gradients by their means over the replicas, after the last micro-step. The means of
// FP8 gradients are FP8 again.
static void reduce_replicas_of_units(Trainer *t) {
    const GradientSum replaces = {false, false, 0, 0};
    if (t->comm->replicas == 1) return;
    reduce_replicas(t, t->params.gradients, shard_elements(&t->plan, ROOT));
    for (int64_t l = 0; l < t->d.L; l++) {
        const ShardSegment vectors = segment_slice(&t->table, &t->plan, l, SEGMENT_VECTORS),
                           matrices = segment_slice(&t->table, &t->plan, l, SEGMENT_MATRICES);
        reduce_replicas(t, gradients_at(t, l, vectors.shard), vectors.slice);
        if (t->o->reduce_dtype == REDUCE_FP8) reduce_replicas_fp8(t, l);
        else reduce_replicas(t, gradients_at(t, l, matrices.shard), matrices.slice);
        round_gradients(t, l, &replaces, matrices.shard);
    }
}

// Returns the norm of n gradients of this rank and of the n gradients of each other rank of the shard group.
static double gradient_norm(const Trainer *t, const float *gradients, int64_t n) {
    const double norm = global_norm(gradients, n);
    double squares = norm * norm;
    if (t->plan.shard_size == 1) return norm;
    comm_sum(t->comm, COMM_SHARD, &squares, 1);
    return sqrt(squares);
}

// ---------------------------------------------------------------------------------------------------------------------
// Quantized tensors and linear layers

// Returns the scale of a tensor with one scale, given the fp32 bits of its own amax: by the rule of the recipe, or of
// weights that are cast from FP16 masters. Delayed scaling uses the scale made from earlier amaxes, if there is one.
static float cast_scale(const Trainer *t, int64_t l, int id, TensorRole role, uint32_t amax) {
    const Recipe *r = precision_of(&t->precision, l, id);
    const Fp8Format format = precision_format(&t->precision, role);
    if (role == TENSOR_W && t->precision.casts_masters) return fp16_weights_fp8_scale(float_from_bits(amax));
    if (!r->delayed) return fp8_rule_scale(r->rule, float_from_bits(amax), format);
    const float known = t->scales.delayed.scale[tensor_index(l, role, id)];
    return known > 0 ? known : fp8_scale_te(float_from_bits(amax), format, (int)t->o->fp8_margin);
}

// Returns the scale of a whole weight, whose amax was found when the weights changed.
static float weight_scale(const Trainer *t, int64_t l, int id) {
    return cast_scale(t, l, id, TENSOR_W, t->scales.amax[tensor_index(l, TENSOR_W, id)]);
}

// Returns the scale to cast a tensor of n elements with. 0: the cast computes its scales, or the tensor is not cast. In
// a micro-step with delayed scaling, also records the amax of an input or a gradient.
static float qtensor_scale(Trainer *t, const QTensor *q, int64_t n) {
    const Recipe *r = precision_of(&t->precision, q->layer, q->linear);
    if (q->role == TENSOR_W) return recipe_has_tensor_scales(r) ? weight_scale(t, q->layer, q->linear) : 0;
    if (!r->delayed) return 0;
    const uint32_t amax = quantize_tensor_amax(q->data, n, r->rule);
    uint32_t *largest = &t->scales.amax[tensor_index(q->layer, q->role, q->linear)];
    if (t->training && amax > *largest) *largest = amax;
    return cast_scale(t, q->layer, q->linear, q->role, amax);
}

// Returns a tensor as a GEMM reads it: cast by the recipe of its linear layer. In an audited step, adds an FP8 cast to
// the audit. A weight that was cast ahead is not cast again.
static LinearOperand qtensor_operand(Trainer *t, const QTensor *q, TensorUsage copy) {
    const Recipe *r = precision_of(&t->precision, q->layer, q->linear);
    const LinearShape *s = &t->precision.linear[q->linear];
    const int64_t rows = q->role == TENSOR_W ? s->N : t->d.R, cols = q->role == TENSOR_DY ? s->N : s->K;
    const Fp8Format format = precision_format(&t->precision, q->role);
    const ScaleGranularity granularity = recipe_granularity(r, q->role, copy);
    const float scale = qtensor_scale(t, q, rows * cols);
    if (q->codes) return linear_operand_of_codes(q->codes, rows, cols, copy, format, scale);
    const LinearOperand x = linear_operand(q->data, rows, cols, copy, granularity, r->rule, format, scale);
    if (t->training && t->scales.auditing && x.codes)
        audit_copy(&t->scales.step_audit[audit_index(q->layer, q->linear, q->role, copy)], q->data, x.codes, x.scales,
                   x.shape, granularity, format);
    return x;
}

// c [M, N] = a b^T + bias, with a [M, depth] and b [N, depth]. copy_a, copy_b: rowwise or columnwise data. Operands are
// decoded and multiplied with fp32 sums: --fp8-emulate and --fp8-fast-accum change nothing on the CPU.
static void gemm(Trainer *t, Real *c, const QTensor *a, TensorUsage copy_a, const QTensor *b, TensorUsage copy_b,
                 int64_t M, int64_t N, int64_t depth, const Real *bias) {
    LinearOperand qa = qtensor_operand(t, a, copy_a), qb = qtensor_operand(t, b, copy_b);
    linear_product(c, qa, qb, M, N, depth, bias, t->rounding);
    linear_operand_free(&qa), linear_operand_free(&qb);
}

// y [R, N] = x [R, K] w^T + bias
static void linear(Trainer *t, Real *y, const QTensor *x, const QTensor *w, const Real *bias) {
    const LinearShape *s = &t->precision.linear[w->linear];
    gemm(t, y, x, ROWWISE, w, ROWWISE, t->d.R, s->N, s->K, bias);
}

// dx [R, K] = dy [R, N] w
static void linear_dgrad(Trainer *t, Real *dx, const QTensor *dy, const QTensor *w) {
    const LinearShape *s = &t->precision.linear[w->linear];
    gemm(t, dx, dy, ROWWISE, w, COLUMNWISE, t->d.R, s->K, s->N, NULL);
}

// dw [N, K] = dy^T x
static void linear_wgrad(Trainer *t, const QTensor *dw, const QTensor *dy, const QTensor *x) {
    const LinearShape *s = &t->precision.linear[dw->linear];
    gemm(t, dw->data, dy, COLUMNWISE, x, COLUMNWISE, s->N, s->K, t->d.R, NULL);
}

// Called when a tensor's data is complete. Does nothing here: GEMMs cast a tensor when they read it.
static void qtensor_ready(Trainer *t, QTensor *q) { (void)t, (void)q; }

// ---------------------------------------------------------------------------------------------------------------------
// The model's operations

// In a micro-step: records the number of a norm (nonfinite_norm) if its input is bad (NonfiniteStep.forward).
static void watch_norm(Trainer *t, int64_t norm, const float *rstd) {
    for (int64_t i = 0; t->training && i < t->d.R; i++)
        if (!float_is_positive(rstd[i])) t->bad_norm = min_i64(t->bad_norm, norm);
}

// Returns the number of the norm whose output is the input y of a linear layer.
static int64_t norm_number(const QTensor *y) { return nonfinite_norm(y->layer, y->linear == GATE_UP_PROJ); }

// y [R, C] = RMSNorm(x) w
static void rmsnorm(Trainer *t, QTensor *y, float *rstd, const Real *x, const Real *w) {
    rmsnorm_forward_reference(y->data, rstd, x, w, t->d.R, t->d.C, t->m.rms_norm_eps, t->rounding);
    watch_norm(t, norm_number(y), rstd);
}

// sum [R, C] = residual + delta, y [R, C] = RMSNorm(sum) w
static void add_rmsnorm(Trainer *t, QTensor *y, float *rstd, Real *sum, const Real *residual, const Real *delta,
                        const Real *w) {
    residual_rmsnorm_forward_reference(y->data, rstd, sum, residual, delta, w, t->d.R, t->d.C, t->m.rms_norm_eps,
                                       t->rounding);
    watch_norm(t, norm_number(y), rstd);
}

// Adds the gradient through the norm to dx, and computes dweight. Before the call dx is the gradient that reaches x on
// the residual path around the norm; after it, the whole gradient of x.
static void rmsnorm_backward(Trainer *t, QTensor *dx, Real *dweight, const Real *dy, const Real *x, const float *rstd,
                             const Real *w) {
    rmsnorm_backward_reference(dx->data, dweight, dx->data, dy, x, rstd, w, t->d.R, t->d.C, t->rounding);
}

static void qknorm_rope(Trainer *t, Real *rotated, const Real *qkv, const Real *q_norm, const Real *k_norm) {
    qknorm_rope_forward_reference(rotated, qkv, q_norm, k_norm, t->acts.rope_table, &t->d, t->m.rms_norm_eps,
                                  t->rounding);
}

// Turns dqkv, the gradient of the rotated q, k, v, into the gradient of the projection's output, in place.
static void qknorm_rope_backward(Trainer *t, QTensor *dqkv, Real *dq_norm, Real *dk_norm, const Real *qkv,
                                 const Real *q_norm, const Real *k_norm) {
    qknorm_rope_backward_reference(dqkv->data, dq_norm, dk_norm, dqkv->data, qkv, q_norm, k_norm, t->acts.rope_table,
                                   &t->d, t->m.rms_norm_eps, t->rounding);
}

// dbias [QKV] = column sums of dy. Does nothing without a bias.
static void bias_backward(Trainer *t, Real *dbias, const QTensor *dy) {
    if (dbias) bias_backward_reference(dbias, dy->data, t->d.R, t->precision.linear[dy->linear].N, t->rounding);
}

static void attention(Trainer *t, QTensor *att, float *lse, const Real *rotated) {
    attention_forward_reference(att->data, lse, rotated, &t->d, t->rounding);
}

static void attention_backward(Trainer *t, QTensor *dqkv, const Real *datt, const Real *rotated, const QTensor *att,
                               const float *lse) {
    attention_backward_reference(dqkv->data, datt, rotated, att->data, lse, &t->d, t->rounding);
}

static void swiglu(Trainer *t, QTensor *h, const Real *gate_up) {
    swiglu_forward_reference(h->data, gate_up, t->d.R, t->d.F, t->rounding);
}

// If options_keeps_fp8: keeps gate and up for backward in FP8, which here means rounded to the values of FP8 codes.
static void keep_gate_up(Trainer *t, int64_t l) {
    if (options_keeps_fp8(t->o)) fp8_group_round(t->acts.layer[l].gate_up, t->d.R * 2 * t->d.F);
}

// Does nothing here: gate_up has the kept values already.
static void restore_gate_up(Trainer *t, int64_t l) { (void)t, (void)l; }

// Computes dgate_up from dh. Computes h again if it may hold another layer's values, or if gate_up was rounded to FP8.
static void swiglu_backward(Trainer *t, QTensor *dgate_up, QTensor *h, const Real *dh, const Real *gate_up) {
    if (options_recomputed(t->o).mlp || options_keeps_fp8(t->o)) swiglu(t, h, gate_up);
    swiglu_backward_reference(dgate_up->data, dh, gate_up, t->d.R, t->d.F, t->rounding);
}

// Returns the gradients of the outputs of layer l's linear layers. `out` and `down` are the gradient of the residual
// stream. For l = -1 `down` is the gradient of the embedding's output.
static OutputGradients layer_output_gradients(Trainer *t, int64_t l) {
    const Activations *a = &t->acts;
    const OutputGradients dy = {qtensor(a->dqkv, l, TENSOR_DY, QKV_PROJ), qtensor(a->dx, l, TENSOR_DY, OUT_PROJ),
                                qtensor(a->dgate_up, l, TENSOR_DY, GATE_UP_PROJ),
                                qtensor(a->dx, l, TENSOR_DY, DOWN_PROJ)};
    return dy;
}

// ---------------------------------------------------------------------------------------------------------------------
// One layer: the same text as in train_fp8.cu

// Computes q, k, v and attention from the first norm's output, without the output projection.
static void layer_attention(Trainer *t, int64_t l) {
    const Layer w = layer_weights(t, l);
    LayerActs *a = &t->acts.layer[l];
    linear(t, a->qkv, &a->norm1, &w.qkv, w.qkv_bias);
    qknorm_rope(t, a->rotated, a->qkv, w.q_norm, w.k_norm);
    attention(t, &a->att, a->lse, a->rotated);
}

// Computes one layer. Its input a->x is x_mid + branch of the layer below, which the first norm adds; in layer 0 it is
// the embedding. Its output is a->x_mid + t->acts.branch: the next norm adds them.
static void layer_forward(Trainer *t, int64_t l) {
    const Layer w = layer_weights(t, l);
    LayerActs *a = &t->acts.layer[l];
    if (l == 0) rmsnorm(t, &a->norm1, a->rstd1, a->x, w.norm1);
    else add_rmsnorm(t, &a->norm1, a->rstd1, a->x, t->acts.layer[l - 1].x_mid, t->acts.branch, w.norm1);
    layer_attention(t, l);
    linear(t, t->acts.branch, &a->att, &w.out, NULL);
    add_rmsnorm(t, &a->norm2, a->rstd2, a->x_mid, a->x, t->acts.branch, w.norm2);
    linear(t, a->gate_up, &a->norm2, &w.gate_up, NULL);
    swiglu(t, &a->h, a->gate_up);
    keep_gate_up(t, l);
    linear(t, t->acts.branch, &a->h, &w.down, NULL);
}

// Computes again what backward reads of a layer and forward did not keep (--recompute), except SwiGLU's output.
static void layer_recompute(Trainer *t, int64_t l) {
    const Layer w = layer_weights(t, l);
    const Recomputed again = options_recomputed(t->o);
    LayerActs *a = &t->acts.layer[l];
    if (again.norms) rmsnorm(t, &a->norm1, a->rstd1, a->x, w.norm1);
    if (again.attention) layer_attention(t, l);
    if (again.stream) linear(t, t->acts.branch, &a->att, &w.out, NULL);
    if (again.stream) add_rmsnorm(t, &a->norm2, a->rstd2, a->x_mid, a->x, t->acts.branch, w.norm2);
    else if (again.norms) rmsnorm(t, &a->norm2, a->rstd2, a->x_mid, w.norm2);
    if (again.mlp) linear(t, a->gate_up, &a->norm2, &w.gate_up, NULL);
}

// Turns t->acts.dx, the gradient of layer l's output, into that of its input. Computes the gradients of its weights.
static void layer_backward(Trainer *t, int64_t l) {
    const Layer w = layer_weights(t, l), dw = layer_gradients(t, l);
    LayerActs *a = &t->acts.layer[l];
    OutputGradients dy = layer_output_gradients(t, l), below = layer_output_gradients(t, l - 1);
    Real *dbranch = t->acts.dbranch;
    layer_recompute(t, l);
    restore_gate_up(t, l);

    qtensor_ready(t, &dy.down);
    linear_dgrad(t, t->acts.dh, &dy.down, &w.down);
    swiglu_backward(t, &dy.gate_up, &a->h, t->acts.dh, a->gate_up);
    linear_wgrad(t, &dw.down, &dy.down, &a->h);
    linear_dgrad(t, dbranch, &dy.gate_up, &w.gate_up);
    linear_wgrad(t, &dw.gate_up, &dy.gate_up, &a->norm2);
    rmsnorm_backward(t, &dy.out, dw.norm2, dbranch, a->x_mid, a->rstd2, w.norm2);

    qtensor_ready(t, &dy.out);
    linear_dgrad(t, t->acts.datt, &dy.out, &w.out);
    linear_wgrad(t, &dw.out, &dy.out, &a->att);
    if (t->acts.rotated_is_shared) qknorm_rope(t, a->rotated, a->qkv, w.q_norm, w.k_norm);
    attention_backward(t, &dy.qkv, t->acts.datt, a->rotated, &a->att, a->lse);
    qknorm_rope_backward(t, &dy.qkv, dw.q_norm, dw.k_norm, a->qkv, w.q_norm, w.k_norm);
    bias_backward(t, dw.qkv_bias, &dy.qkv);
    qtensor_ready(t, &dy.qkv);
    linear_dgrad(t, dbranch, &dy.qkv, &w.qkv);
    linear_wgrad(t, &dw.qkv, &dy.qkv, &a->norm1);
    rmsnorm_backward(t, &below.down, dw.norm1, dbranch, a->x, a->rstd1, w.norm1);
}

// ---------------------------------------------------------------------------------------------------------------------
// The whole model

// Runs the embedding, all layers and the final norm: batch->inputs -> acts.y_final [R, C].
static void model_forward(Trainer *t, const Batch *batch) {
    const Dims *d = &t->d;
    Activations *a = &t->acts;
    const Root w = root_weights(t);
    embedding_forward_reference(a->layer[0].x, w.embedding, batch->inputs, d->R, d->C);
    for (int64_t l = 0; l < d->L; l++) {
        unshard(t, l, false);
        layer_forward(t, l);
        reshard(t, l);
    }
    residual_rmsnorm_forward_reference(a->y_final, a->rstd_final, a->x_final, a->layer[d->L - 1].x_mid, a->branch,
                                       w.norm, d->R, d->C, t->m.rms_norm_eps, t->rounding);
    watch_norm(t, nonfinite_norm(d->L, false), a->rstd_final);
}

// Computes acts.logits [R, V] from acts.y_final.
static void logits_forward(Trainer *t) {
    linear_forward_reference(t->acts.logits, t->acts.y_final, root_weights(t).lm_head, NULL, t->d.R, t->d.C, t->d.V,
                             t->rounding);
}

// Computes the cross-entropy of every row into acts.losses, after model_forward.
static void loss_forward(Trainer *t, const Batch *batch) {
    logits_forward(t);
    cross_entropy_forward(t->acts.losses, t->acts.logits, batch->targets, t->d.R, t->d.V);
}

// After model_forward: computes the loss of every row and, back through lm_head and the final norm, acts.dx and the
// gradients of lm_head's and the final norm's weights.
static void loss_forward_backward(Trainer *t, const Batch *batch, float grad_scale) {
    const Dims *d = &t->d;
    const Activations *a = &t->acts;
    const Root w = root_weights(t), dw = root_gradients(t);
    loss_forward(t, batch);
    cross_entropy_backward(a->logits, a->logits, batch->targets, d->R, d->V, grad_scale, t->rounding);
    linear_dgrad_reference(a->dbranch, a->logits, w.lm_head, d->R, d->C, d->V, t->rounding);
    linear_wgrad_reference(dw.lm_head, a->logits, a->y_final, d->R, d->C, d->V, t->rounding);
    rmsnorm_backward_reference(a->dx, dw.norm, NULL, a->dbranch, a->x_final, a->rstd_final, w.norm, d->R, d->C,
                               t->rounding);
}

// Computes the embedding's gradient from acts.dx. If the embedding is tied, adds the gradient to lm_head's, which is
// there already.
static void embedding_backward(Trainer *t, const Batch *batch) {
    embedding_backward_reference(root_gradients(t).embedding, t->acts.dx, batch->inputs, t->d.R, t->d.C, t->d.V,
                                 t->m.tie_word_embeddings, t->rounding);
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights and optimizer

// Returns this rank's part of the weight of linear layer `id` in layer l.
static ShardRange linear_range(const Trainer *t, int64_t l, int id) {
    const LinearShape *s = &t->precision.linear[id];
    return shard_matrix(&t->table, &t->plan, l, s->offset, s->N * s->K);
}

// Returns where this rank keeps the FP8 codes of its part `r` of a weight.
static uint8_t *linear_codes(const Trainer *t, int64_t l, ShardRange r) {
    const ShardSegment g = segment_slice(&t->table, &t->plan, l, SEGMENT_MATRICES);
    return t->units.codes + l * g.slice + r.shard - g.shard;
}

// Casts this rank's part `r` of a linear layer's weight to FP8 with one scale. If the weight is cast from FP16 masters,
// each of its tensors, such as q, k and v, is decoded with a scale of its own.
static void weight_cast(Trainer *t, int64_t l, int id, ShardRange r) {
    const float scale = weight_scale(t, l, id);
    uint8_t *codes = linear_codes(t, l, r);
    if (!t->precision.casts_masters) {
        for (int64_t e = 0; e < r.count; e++)
            codes[e] = fp8_from_float(t->params.weights[r.shard + e] * scale, FP8_E4M3);
        return;
    }
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        if (p->layer != l || parameter_segment(p) != SEGMENT_MATRICES) continue;
        const ShardRange part = shard_parameter(&t->table, &t->plan, p);
        if (part.count && part.shard >= r.shard && part.shard < r.shard + r.count)
            fp16_weights_cast(codes + part.shard - r.shard, t->params.fp16_master + part.shard,
                              *tensor_scale(t, STATE_MASTER_SCALE, i), scale, part.count);
    }
}

// Finds the amaxes of whole weights, by one reduction over the shard group. Casts this rank's slices of layers that are
// cast ahead.
static void weights_quantize(Trainer *t) {
    for (int64_t i = 0; i < t->d.L * NUM_LINEARS; i++) {
        const int64_t l = i / NUM_LINEARS;
        const int id = (int)(i % NUM_LINEARS);
        const ShardRange r = linear_range(t, l, id);
        t->scales.amax[tensor_index(l, TENSOR_W, id)] =
            quantize_tensor_amax(t->params.weights + r.shard, r.count, t->precision.recipe->rule);
    }
    // also reduces the amaxes of inputs and gradients, which are zero between micro-steps
    comm_max_u32(t->comm, COMM_SHARD, t->scales.amax, tensor_count(t->d.L));
    for (int64_t i = 0; i < t->d.L * NUM_LINEARS; i++) {
        const int64_t l = i / NUM_LINEARS;
        const int id = (int)(i % NUM_LINEARS);
        if (cast_ahead(t, l)) weight_cast(t, l, id, linear_range(t, l, id));
    }
}

// Fills params.master with the values of the FP16 masters, for entries [begin, end) of the parameter table.
static void masters_decode(Trainer *t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        const ShardRange r = shard_parameter(&t->table, &t->plan, &t->table.entries[i]);
        fp16_weights_decode(t->params.master + r.shard, t->params.fp16_master + r.shard,
                            *tensor_scale(t, STATE_MASTER_SCALE, i), r.count);
    }
}

// Finds the amaxes of whole tensors, entries [begin, end) of the parameter table, by one reduction over the shard
// group. This rank's amaxes of MS-AMP's moments, if it has these, are in params.amaxes already. This function computes
// those of FP16 masters from params.master.
static void reduce_tensor_amaxes(Trainer *t, int64_t begin, int64_t end) {
    for (int64_t i = begin; t->params.fp16_master && i < end; i++) {
        const ShardRange r = shard_parameter(&t->table, &t->plan, &t->table.entries[i]);
        *tensor_amax(t, STATE_MASTER_SCALE, i) =
            quantize_tensor_amax(t->params.master + r.shard, r.count, SCALE_TORCHAO);
    }
    comm_max_u32(t->comm, COMM_SHARD, t->params.amaxes + begin * TENSOR_SCALES, TENSOR_SCALES * (end - begin));
}

// Stores params.master, whose amaxes are known, as the FP16 masters, for entries [begin, end) of the parameter table.
// A scale of 0 is set from the amax alone. rounding: of the step that computed them. NULL: they are initial or loaded;
// all other scales, which a checkpoint brought, stay as they are.
static void masters_encode(Trainer *t, int64_t begin, int64_t end, const AdamwStep *rounding) {
    for (int64_t i = begin; i < end; i++) {
        const Parameter *p = &t->table.entries[i];
        const ShardRange r = shard_parameter(&t->table, &t->plan, p);
        const float amax = float_from_bits(*tensor_amax(t, STATE_MASTER_SCALE, i));
        float *scale = tensor_scale(t, STATE_MASTER_SCALE, i);
        if (*scale == 0) *scale = msamp_scale(amax, 1, FP16_MAX);
        else if (rounding) *scale = msamp_scale(amax, *scale, FP16_MAX);
        fp16_weights_round(t->params.fp16_master + r.shard, t->params.master + r.shard, *scale, p->offset + r.first,
                           r.count, rounding);
    }
}

// Called when the master weights have changed: makes the weights from them, invalidates all gathered weights, and, for
// recipes with one scale per tensor, finds the amaxes of weights and casts those that are cast ahead.
static void weights_refresh(Trainer *t) {
    const bool copy = t->params.weights != t->params.master;
    if (t->params.fp16_master) masters_decode(t, 0, t->table.count);
    if (copy) memcpy(t->params.weights, t->params.master, (size_t)t->plan.total * sizeof(float));
    for (int64_t l = ROOT; (copy || t->params.fp16_master) && l < t->d.L; l++)
        for (int k = 0; k < NUM_SEGMENTS; k++) {
            const ShardSegment g = segment_slice(&t->table, &t->plan, l, k);
            if (l == ROOT || k != SEGMENT_MATRICES || !t->precision.casts_masters)
                round_array(t->params.weights + g.shard, g.slice, t->rounding);
        }
    t->units.root_held = false;
    for (int64_t i = 0; i < t->units.num_slots; i++) t->units.slots[i].layer = -1;
    if (recipe_has_tensor_scales(t->precision.recipe)) weights_quantize(t);
}

// Sets params.master to the initial weights. weights_changed must follow.
static void weights_initialize(Trainer *t) {
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        const ShardRange r = shard_parameter(&t->table, &t->plan, p);
        float *w = t->params.master + r.shard;
        for (int64_t e = 0; e < r.count; e++)
            w[e] =
                parameter_initial_value(p->flags, (float)t->m.initializer_range, (uint64_t)t->o->seed, i, r.first + e);
        if (options_bf16_weights(t->o)) round_array(w, r.count, ROUND_BF16);
    }
}

// Delayed scaling: moves amaxes to the histories and makes the next scales. `weights`: the amaxes of the weights that
// the step used; else those of a micro-step's inputs and gradients.
static void histories_update(Trainer *t, bool weights) {
    const DelayedState *d = &t->scales.delayed;
    for (int64_t l = 0; l < t->d.L; l++)
        for (int role = 0; role < NUM_TENSORS; role++)
            for (int id = 0; id < NUM_LINEARS; id++) {
                if ((role == TENSOR_W) != weights || !precision_of(&t->precision, l, id)->delayed) continue;
                const int64_t i = tensor_index(l, (TensorRole)role, id);
                const Fp8Format format = precision_format(&t->precision, (TensorRole)role);
                delayed_update(d->history + i * d->window, d->window, &d->scale[i], t->scales.amax[i], format,
                               (int)t->o->fp8_margin);
                t->scales.amax[i] = 0;
            }
}

// Saves histories and scales (keep), or restores them. Does nothing without delayed scaling or --on-nonfinite skip.
static void copy_delayed_before(Trainer *t, bool keep) {
    float *kept = t->scales.delayed_before, *current = t->scales.delayed.history;
    if (kept) memcpy(keep ? kept : current, keep ? current : kept, (size_t)delayed_elements(t) * sizeof(float));
}

static CoatMoment coat_from(CoatMoment m, int64_t element) {
    const CoatMoment from = {m.codes + element, m.groups + element / COAT_GROUP};
    return from;
}

static MsampArrays msamp_from(MsampArrays m, int64_t element) {
    const MsampArrays from = {m.exp_avg + element, m.exp_avg_sq + element};
    return from;
}

static MsampPair moment_scales(const Trainer *t, int64_t i) {
    const MsampPair scale = {*tensor_scale(t, STATE_EXP_AVG_SCALE, i), *tensor_scale(t, STATE_EXP_AVG_SQ_SCALE, i)};
    return scale;
}

// The first pass of MS-AMP's AdamW, on entry i of the parameter table: updates its weights, and finds the amaxes of its
// new moments.
static void msamp_update(Trainer *t, int64_t i, float factor, const MsampStep *s, const AdamwStep *rounding) {
    const Params *all = &t->params;
    const Parameter *p = &t->table.entries[i];
    const ShardRange r = shard_parameter(&t->table, &t->plan, p);
    const MsampPair amax = adamw_msamp_weights(
        all->master + r.shard, msamp_from(all->msamp, r.shard), moment_scales(t, i), gradients_at(t, p->layer, r.shard),
        p->offset + r.first, r.count, p->flags & PARAM_DECAY, factor, options_bf16_weights(t->o), s, rounding);
    *tensor_amax(t, STATE_EXP_AVG_SCALE, i) = float_bits(amax.exp_avg);
    *tensor_amax(t, STATE_EXP_AVG_SQ_SCALE, i) = float_bits(amax.exp_avg_sq);
}

// The second pass: stores the moments of entry i with their new scales.
static void msamp_store(Trainer *t, int64_t i, float factor, const MsampStep *s) {
    const Parameter *p = &t->table.entries[i];
    const ShardRange r = shard_parameter(&t->table, &t->plan, p);
    const float amax = float_from_bits(*tensor_amax(t, STATE_EXP_AVG_SCALE, i)),
                amax_sq = float_from_bits(*tensor_amax(t, STATE_EXP_AVG_SQ_SCALE, i));
    const MsampPair scale = {msamp_scale(amax, 1, FP8_E4M3_MAX), msamp_scale(amax_sq, 1, FP16_MAX)};
    adamw_msamp_moments(msamp_from(t->params.msamp, r.shard), moment_scales(t, i), scale,
                        gradients_at(t, p->layer, r.shard), r.count, factor, s);
    *tensor_scale(t, STATE_EXP_AVG_SCALE, i) = scale.exp_avg;
    *tensor_scale(t, STATE_EXP_AVG_SQ_SCALE, i) = scale.exp_avg_sq;
}

// Updates entry i of the parameter table. With COAT's moments, the entries that are joined to entry i (PARAM_JOINED)
// share groups with it, and are updated together with it. If entry i itself is joined to an earlier one, does nothing.
static void parameter_update(Trainer *t, int64_t i, float factor, const AdamwStep *s) {
    const Options *o = t->o;
    const Params *all = &t->params;
    const Parameter *p = &t->table.entries[i];
    const bool decay = p->flags & PARAM_DECAY, bf16_weights = options_bf16_weights(o);
    if (!options_coat(o)) {
        const ShardRange r = shard_parameter(&t->table, &t->plan, p);
        adamw_reference(all->master + r.shard, all->exp_avg + r.shard, all->exp_avg_sq + r.shard,
                        gradients_at(t, p->layer, r.shard), p->offset + r.first, r.count, decay, factor, bf16_weights,
                        o->optimizer_state == MOMENTS_BF16, s);
    } else if (!(p->flags & PARAM_JOINED)) {
        const ShardRange r = segment_range(&t->table, &t->plan, p->layer, parameter_segment(p), p->offset,
                                           parameter_fused_elements(&t->table, i));
        adamw_coat_reference(all->master + r.shard, coat_from(all->coat_avg, r.shard),
                             coat_from(all->coat_avg_sq, r.shard), gradients_at(t, p->layer, r.shard),
                             p->offset + r.first, r.count, decay, factor, bf16_weights,
                             o->optimizer_state == MOMENTS_COAT_STOCHASTIC, s);
    }
}

// Runs AdamW on entries [begin, end) of the parameter table, which are whole units, in optimizer step `step`, counted
// from 0. factor: scales the gradients.
static void parameters_update(Trainer *t, int64_t begin, int64_t end, int64_t step, float factor) {
    const AdamwStep s = adamw_step_of(t->o, step, t->skipped);
    const MsampStep msamp_s = msamp_step_of(t->o, step, t->skipped);
    const bool msamp = t->o->optimizer_state == MOMENTS_MSAMP;
    if (t->params.fp16_master) masters_decode(t, begin, end);
    for (int64_t i = begin; i < end; i++) {
        if (msamp) msamp_update(t, i, factor, &msamp_s, &s);
        else parameter_update(t, i, factor, &s);
    }
    if (options_tensor_scales(t->o)) reduce_tensor_amaxes(t, begin, end);
    for (int64_t i = begin; msamp && i < end; i++) msamp_store(t, i, factor, &msamp_s);
    if (t->params.fp16_master) masters_encode(t, begin, end, &s);
}

// Ends an optimizer step. With delayed scaling adds the amaxes of the old weights, which scales.amax still has, to
// their histories. Then makes all later work read the new weights.
static void finish_update(Trainer *t) {
    if (t->precision.recipe->delayed) histories_update(t, true);
    weights_refresh(t);
}

// Takes optimizer step `step`, counted from 0, with params.gradients, whose norm is given.
static void weights_update(Trainer *t, int64_t step, double norm) {
    parameters_update(t, 0, t->table.count, step, clip_factor(norm, t->o->grad_clip));
    finish_update(t);
}

// Updates *s with n more gradients, the first of which is element `shard` of the flat shard arrays. Raises s->magnitude
// to their largest magnitude. Sets s->position to the first gradient, in backward order, that is large compared with
// that (adamw_large). Gradients of earlier calls count only if the largest of them is still large.
static void find_large(const Trainer *t, const float *gradients, int64_t shard, int64_t n, NonfiniteStep *s) {
    const BackwardOrder order = shard_backward_order(&t->table, &t->plan);
    const uint32_t before = s->magnitude;
    for (int64_t i = 0; i < n; i++)
        if (adamw_magnitude(gradients[i]) > s->magnitude) s->magnitude = adamw_magnitude(gradients[i]);
    if (before < adamw_large(s->magnitude)) s->position = NONFINITE_NONE;
    for (int64_t i = 0; i < n; i++)
        if (adamw_magnitude(gradients[i]) >= adamw_large(s->magnitude))
            s->position = min_i64(s->position, backward_position(order, shard + i));
}

// Returns the factor that clips the gradient of unit l, and records the norm so far; without --grad-clip returns 1.
// early.squares already includes unit l.
static float clip_in_backward(Trainer *t, int64_t l) {
    float *norms = t->early.norms;
    if (!norms) return 1;
    const float norm = (float)sqrt(t->early.squares);
    const float factor = clip_factor(clip_norm_so_far(norm, norms[1 + l], norms[1 + ROOT]), t->o->grad_clip);
    norms[1 + l] = norm;
    return factor;
}

// --optimizer-in-backward: averages the gradient of unit l, a layer or ROOT, over the replicas, and updates the unit. A
// unit whose gradient norm is not accepted keeps its weights, and the run ends after this step. This function also
// locates gradients that could make the norm of the whole model too large.
static void update_in_backward(Trainer *t, int64_t l) {
    const int64_t n = shard_elements(&t->plan, l), units = t->d.L + 1;
    float *gradients = t->params.gradients + gradients_begin(t, l);
    reduce_replicas(t, gradients, n);
    const double norm = gradient_norm(t, gradients, n);
    t->early.squares += norm * norm;
    if (!adamw_accepts(norm * sqrt((double)units)))
        find_large(t, gradients, shard_begin(&t->plan, l), n, &t->early.large);
    const float factor = clip_in_backward(t, l);
    if (!adamw_accepts(norm)) return;
    const UnitEntries u = unit_entries(t, l);
    parameters_update(t, u.begin, u.end, t->early.step, factor);
}

// Returns what this rank knows of a step that was not taken.
static NonfiniteStep nonfinite_step(const Trainer *t, double loss, double norm) {
    NonfiniteStep s = {loss, norm, t->bad_norm, 0, NONFINITE_NONE, 1};
    if (t->o->optimizer_in_backward) s.magnitude = t->early.large.magnitude, s.position = t->early.large.position;
    else find_large(t, t->params.gradients, 0, t->plan.total, &s);
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// The step

// Computes the gradients of (sum of the rows' losses) * grad_scale and adds their mean over the shard group to
// params.gradients; the first micro-step replaces these. With --optimizer-in-backward also updates the layers, but not
// the root.
static void model_forward_backward(Trainer *t, const Batch *batch, float grad_scale) {
    model_forward(t, batch);
    loss_forward_backward(t, batch, grad_scale);
    for (int64_t l = t->d.L - 1; l >= 0; l--) {
        unshard(t, l, true);
        layer_backward(t, l);
        reshard(t, l);
        reduce_scatter_gradients(t, l);
        if (t->o->optimizer_in_backward) update_in_backward(t, l);
    }
    embedding_backward(t, batch);
    reduce_scatter_gradients(t, ROOT);
}

// Starts the audit of step `step` (counted from 1) if --fp8-audit is due, else turns it off. Adds this rank's casts of
// weights that are cast ahead, which were made before the step.
static void audit_begin(Trainer *t, int64_t step) {
    t->scales.auditing = is_due(t->o->fp8_audit, step);
    if (!t->scales.auditing) return;
    memset(t->scales.step_audit, 0, (size_t)audit_count(&t->precision) * sizeof(AuditSums));
    for (int64_t i = 0; i < t->d.L * NUM_LINEARS; i++) {
        const int64_t l = i / NUM_LINEARS;
        const int id = (int)(i % NUM_LINEARS);
        if (!cast_ahead(t, l)) continue;
        const ShardRange r = linear_range(t, l, id);
        const float scale_inv = 1.0f / weight_scale(t, l, id);
        AuditSums *sums =
            &t->scales.step_audit[audit_index(l, id, TENSOR_W, ROWWISE)];  // rowwise and columnwise codes are equal
        audit_copy(sums, t->params.weights + r.shard, linear_codes(t, l, r), &scale_inv,
                   usage_shape(1, r.count, ROWWISE), PER_TENSOR, FP8_E4M3);
    }
}

// Reads this rank's sequences of micro-step `micro` of the step that begins with first_sample.
static void read_batch(Trainer *t, DataLoader *data, int64_t first_sample, int64_t micro) {
    const int64_t B = t->o->batch_size;
    const int64_t first = dataloader_sample_index(first_sample, micro, t->comm->world, t->comm->rank, B);
    dataloader_batch(data, first, B, t->batch.inputs, t->batch.targets);
}

static int64_t host_memory(void) {
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage)) return 0;
    return (int64_t)usage.ru_maxrss * 1024;
}

// Runs the forward and backward pass over t->batch, for micro-step `micro` of optimizer step `step`, both counted from
// 0. With delayed scaling also updates the histories of inputs and gradients. Returns the mean loss over this rank's
// rows.
static double micro_step(Trainer *t, float grad_scale, int64_t step, int64_t micro) {
    t->training = true;
    t->units.sum = micro_sum(t, step, micro);
    model_forward_backward(t, &t->batch, grad_scale);
    t->training = false;
    if (t->precision.recipe->delayed) {
        comm_max_u32(t->comm, COMM_WORLD, t->scales.amax, t->scales.delayed.tensors);
        histories_update(t, false);
    }
    return array_sum(t->acts.losses, t->d.R) / (double)t->d.R;
}

// Splits the time of a step that began at `start` and whose optimizer began at `optimizer` into its parts. data:
// seconds of reading batches. waited, waited_later: comm_seconds() at `start` and at `optimizer`. Updates in the
// backward pass count as computing.
static StepTimes step_times(double start, double optimizer, double data, double waited, double waited_later) {
    const double now = seconds_now(), waited_now = *comm_seconds();
    StepTimes s;
    s.seconds[TIME_DATA] = data;
    s.seconds[TIME_COMMUNICATION] = waited_now - waited;
    s.seconds[TIME_COMPUTE] = optimizer - start - data - (waited_later - waited);
    s.seconds[TIME_OPTIMIZER] = now - optimizer - (waited_now - waited_later);
    return s;
}

// Takes one optimizer step, on the samples from first_sample on. Skips the update if loss or gradient norm is not
// accepted (adamw_takes); with --optimizer-in-backward some units may have been updated before, and the run ends.
static StepRecord train_step(Trainer *t, DataLoader *data, int64_t step, int64_t first_sample) {
    const double start = seconds_now(), waited = *comm_seconds();
    const int64_t B = t->o->batch_size, T = t->o->sequence_length, micro_steps = t->o->grad_accumulation_steps;
    const float grad_scale = (float)(1.0 / (double)(B * T * micro_steps));
    const bool in_backward = t->o->optimizer_in_backward;
    double reading = 0;
    StepRecord s;
    memset(&s, 0, sizeof s);
    t->bad_norm = t->early.large.position = NONFINITE_NONE, t->early.large.magnitude = 0;
    t->early.step = step, t->early.squares = 0;
    copy_delayed_before(t, true);
    audit_begin(t, step + 1);
    for (int64_t micro = 0; micro < micro_steps; micro++) {
        const double before = seconds_now();
        read_batch(t, data, first_sample, micro);
        reading += seconds_now() - before;
        s.loss += micro_step(t, grad_scale, step, micro) / (double)micro_steps;
    }
    if (t->units.fp8_sums) reduce_replicas_of_units(t);
    else if (!in_backward) reduce_replicas(t, t->params.gradients, t->plan.total);
    comm_sum(t->comm, COMM_WORLD, &s.loss, 1);
    s.loss /= (double)t->comm->world;
    const double optimizer = seconds_now(), waited_later = *comm_seconds();
    if (in_backward) update_in_backward(t, ROOT);
    s.norm = in_backward ? sqrt(t->early.squares) : gradient_norm(t, t->params.gradients, t->plan.total);
    s.skipped = !adamw_takes(s.loss, s.norm);
    if (s.skipped) copy_delayed_before(t, false);
    else if (in_backward) finish_update(t);
    else weights_update(t, step, s.norm);
    s.times = step_times(start, optimizer, reading, waited, waited_later);
    for (int i = 0; i < NUM_STEP_TIMES; i++) s.seconds += s.times.seconds[i];
    s.memory = (int64_t)comm_max(t->comm, COMM_WORLD, (double)host_memory());
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// Validation and samples

static const float *token_losses(void *context, DataLoader *data, int64_t batch) {
    Trainer *t = (Trainer *)context;
    read_batch(t, data, 0, batch);
    model_forward(t, &t->batch);
    loss_forward(t, &t->batch);
    return t->acts.losses;
}

static const float *next_logits(void *context, const int32_t *tokens, int64_t length) {
    Trainer *t = (Trainer *)context;
    const Dims dims = t->d;
    memcpy(t->batch.inputs, tokens, (size_t)length * sizeof *tokens);
    t->d = model_dims(&t->m, 1, length);
    model_forward(t, &t->batch);
    logits_forward(t);
    t->d = dims;
    return t->acts.logits + (length - 1) * t->m.vocab_size;
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints: access to the flat shard arrays in their storage type

static void *state_array(const Trainer *t, StateKind kind) {
    const Params *p = &t->params;
    const bool coat = options_coat(t->o), msamp = t->o->optimizer_state == MOMENTS_MSAMP;
    if (state_is_scale(kind)) return tensor_scale(t, kind, 0);
    if (kind == STATE_EXP_AVG) return coat ? p->coat_avg.codes : msamp ? p->msamp.exp_avg : (void *)p->exp_avg;
    if (kind == STATE_EXP_AVG_SQ)
        return coat ? p->coat_avg_sq.codes : msamp ? (void *)p->msamp.exp_avg_sq : (void *)p->exp_avg_sq;
    if (state_is_groups(kind)) return kind == STATE_EXP_AVG_GROUPS ? p->coat_avg.groups : p->coat_avg_sq.groups;
    if (kind == STATE_AMAX_HISTORY) return t->scales.delayed.history;
    if (kind == STATE_CLIP_NORMS) return t->early.norms;
    return kind == STATE_SCALES ? t->scales.delayed.scale : p->master;
}

// Reads `count` FP16 masters of one parameter as fp32 values.
static void masters_read(const Trainer *t, int64_t offset, int64_t count, float *out) {
    const int64_t i = shard_parameter_at(&t->table, &t->plan, offset);
    fp16_weights_decode(out, t->params.fp16_master + offset, *tensor_scale(t, STATE_MASTER_SCALE, i), count);
}

// Reads part of an array in the type that checkpoints have (state_type). Arrays of bf16 values are floats here, and
// FP16 masters have fp32 values in checkpoints. All other arrays have that type here too.
static void state_read(void *context, StateKind kind, int64_t offset, int64_t count, void *host) {
    const Trainer *t = (const Trainer *)context;
    const int64_t bytes = safetensors_type_bytes(state_type(t->o, kind));
    const void *array = state_array(t, kind);
    if (kind == STATE_WEIGHTS && t->params.fp16_master) masters_read(t, offset, count, (float *)host);
    else if (state_type(t->o, kind) != ST_BF16)
        memcpy(host, (const char *)array + offset * bytes, (size_t)(count * bytes));
    else
        for (int64_t i = 0; i < count; i++)
            ((bf16_bits *)host)[i] = bf16_from_float(((const float *)array)[offset + i]);
}

static void state_write(void *context, StateKind kind, int64_t offset, int64_t count, const void *host) {
    const Trainer *t = (const Trainer *)context;
    const int64_t bytes = safetensors_type_bytes(state_type(t->o, kind));
    void *array = state_array(t, kind);
    if (state_type(t->o, kind) != ST_BF16) memcpy((char *)array + offset * bytes, host, (size_t)(count * bytes));
    else
        for (int64_t i = 0; i < count; i++) ((float *)array)[offset + i] = bf16_to_float(((const bf16_bits *)host)[i]);
}

static TrainerState trainer_state(Trainer *t) {
    TrainerState s = {t,
                      {ST_F32},
                      state_read,
                      state_write,
                      &t->plan,
                      t->comm,
                      t->scales.delayed.tensors,
                      t->scales.delayed.window,
                      options_clips_in_backward(t->o) ? t->d.L + 1 : 0};
    for (int kind = 0; kind < NUM_STATE_KINDS; kind++) s.types[kind] = state_type(t->o, (StateKind)kind);
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

static TrainerParts describe(void *context, const Options *o, const ModelConfig *m, const Comm *comm) {
    Trainer *t = (Trainer *)context;
    const Arena plan = trainer_plan(t, o, m, comm);
    const TrainerParts parts = {&t->table, &t->precision, trainer_state(t), plan, 0, t->d.R, t->d.R};
    return parts;
}

static void print_gemms(const void *context) {
    const Trainer *t = (const Trainer *)context;
    precision_print(&t->precision, t->d.R, t->d.R, t->rounding == ROUND_NONE ? "fp32" : "bf16");
}

static void create(void *context, const Arena *memory) {
    (void)memory;
    trainer_allocate((Trainer *)context);
}

// --check-links: the context of its functions.
typedef struct {
    Trainer *t;
    char *out, *in;  // [bytes] messages of a pair: the one that this rank sends, and the one that it receives
    int64_t bytes;
} Links;

static double time_collective(void *context, LinkCollective c, int64_t runs) {
    Trainer *t = ((const Links *)context)->t;
    const double start = seconds_now();
    for (int64_t i = 0; i < runs; i++) {
        if (c == LINK_REDUCE) reduce_scatter_gradients(t, 0);
        if (c == LINK_REPLICAS)
            reduce_replicas(t, gradients_at(t, 0, shard_begin(&t->plan, 0)), shard_elements(&t->plan, 0));
        if (c != LINK_GATHER) continue;
        layer_slot(t, 0)->layer = -1;
        unshard(t, 0, false);
    }
    return seconds_now() - start;
}

static double time_pair(void *context, int64_t peer, int64_t runs) {
    const Links *k = (const Links *)context;
    const double start = seconds_now();
    for (int64_t i = 0; i < runs; i++) comm_exchange(k->t->comm, peer, k->out, k->in, k->bytes);
    return seconds_now() - start;
}

static LinkPath path_to(void *context, int64_t peer, bool same_host) {
    (void)peer;
    if (!same_host) return LINK_NETWORK;
    return ((const Links *)context)->t->comm->mesh ? LINK_LOOPBACK : LINK_HOST_MEMORY;
}

static void close_links(void *context) {
    Links *k = (Links *)context;
    free(k->out);
    free(k->in);
    free(k);
}

static LinkOps links(void *context) {
    Links *k = (Links *)xcalloc(1, sizeof *k);
    Trainer *t = k->t = (Trainer *)context;
    const int64_t part = shard_elements(&t->plan, 0), matrices = t->plan.layer_slices[SEGMENT_MATRICES];
    const double whole = (double)t->plan.shard_size * sizeof(float);
    LinkOps ops = {.context = k, .within = t->comm->mesh ? "TCP" : "MPI"};
    ops.across = ops.within;
    ops.collective = time_collective, ops.pair = time_pair, ops.path = path_to, ops.close = close_links;
    if (t->plan.shard_size > 1) {
        ops.bytes[LINK_REDUCE] = (double)part * whole;
        ops.bytes[LINK_GATHER] = (double)(part - (cast_ahead(t, 0) ? matrices : 0)) * whole;
        if (cast_ahead(t, 0)) ops.bytes[LINK_GATHER] += (double)(matrices * t->plan.shard_size);
    }
    if (t->comm->replicas > 1) ops.bytes[LINK_REPLICAS] = (double)part * sizeof(float);
    ops.pair_bytes = k->bytes = max_i64(LINKS_LEAST_BYTES, min_i64(LINKS_MOST_BYTES, part * (int64_t)sizeof(float)));
    k->out = (char *)xcalloc((size_t)k->bytes, 1), k->in = (char *)xcalloc((size_t)k->bytes, 1);
    return ops;
}

static void initialize(void *context) { weights_initialize((Trainer *)context); }

static void weights_changed(void *context) {
    Trainer *t = (Trainer *)context;
    if (t->params.fp16_master) {
        reduce_tensor_amaxes(t, 0, t->table.count);
        masters_encode(t, 0, t->table.count, NULL);
    }
    weights_refresh(t);
}

static void destroy(void *context) { trainer_free((Trainer *)context); }

static DeviceInfo device(const Options *o) {
    DeviceInfo d;
    format_checked(d.name, sizeof d.name, "CPU, %d threads", omp_get_max_threads());
    format_checked(d.versions, sizeof d.versions, "compiler " __VERSION__);
    d.peak_bf16 = o->peak_tflops * 1e12;
    d.pci_bus_id[0] = 0;
    return d;
}

static void start_step(void *context, DataLoader *data, int64_t step, int64_t skipped, int64_t first_sample,
                       bool after_pause) {
    Trainer *t = (Trainer *)context;
    (void)after_pause;
    t->skipped = skipped;
    t->last_step = train_step(t, data, step, first_sample);
}

static StepRecord finish_step(void *context, int64_t step) {
    (void)step;
    return ((const Trainer *)context)->last_step;
}

static NonfiniteStep nonfinite(void *context, const StepRecord *s) {
    return nonfinite_step((const Trainer *)context, s->loss, s->norm);
}

static void read_audit(void *context, AuditSums *sums) {
    const Trainer *t = (const Trainer *)context;
    memcpy(sums, t->scales.step_audit, (size_t)audit_count(&t->precision) * sizeof *sums);
}

static const TrainerOps trainer_ops = {.program = "train_fp8",
                                       .steps_ahead = 0,
                                       .kind = CPU_TRAINER,
                                       .open_device = NULL,
                                       .find_filter = NULL,
                                       .describe = describe,
                                       .memory_needed = memory_needed,
                                       .memory_available = memory_available,
                                       .print_settings = NULL,
                                       .print_gemms = print_gemms,
                                       .create = create,
                                       .links = links,
                                       .initialize = initialize,
                                       .weights_changed = weights_changed,
                                       .device = device,
                                       .start_step = start_step,
                                       .finish_step = finish_step,
                                       .nonfinite = nonfinite,
                                       .read_audit = read_audit,
                                       .token_losses = token_losses,
                                       .next_logits = next_logits,
                                       .settle = NULL,
                                       .print_profile = NULL,
                                       .destroy = destroy};

#ifndef TESTING
int main(int argc, char **argv) {
    static Trainer trainer;
    openmp_spin_briefly(argv);
    return run_trainer(argc, argv, &trainer_ops, &trainer);
}
#endif
