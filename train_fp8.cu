// train_fp8cu: pre-trains Llama and Qwen models on NVIDIA GPUs, in BF16 or by the FP8 recipes of llmc/config/recipes.h. One process a GPU:
// `mpirun -np N ./train_fp8cu ...` shards one model over N of them (llmc/dist/fsdp.cuh).
//
// From top to bottom: sizes and storage, the linear layer, the model's forward pass, its backward pass, the optimizer, the step, validation
// and samples, checkpoints, and main. train_fp8.c is the same model in plain C on the CPU.

#include <cuda_runtime.h>

#include "llmc/cuda/adamw.cuh"
#include "llmc/base/arena.h"
#include "llmc/cuda/attention.cuh"
#include "llmc/run/audit_report.h"
#include "llmc/cuda/auto_filter.cuh"
#include "llmc/cuda/column_sums.cuh"
#include "llmc/cuda/cross_entropy.cuh"
#include "llmc/cuda/cuda_utils.cuh"
#include "llmc/cuda/delayed.cuh"
#include "llmc/cuda/embedding.cuh"
#include "llmc/dist/fsdp.cuh"
#include "llmc/cuda/gemm.cuh"
#include "llmc/cuda/initialize.cuh"
#include "llmc/run/logger.h"
#include "llmc/config/model_config.h"
#include "llmc/run/nonfinite.h"
#include "llmc/config/options.h"
#include "llmc/config/parameters.h"
#include "llmc/config/precision.h"
#include "llmc/cuda/profile.cuh"
#include "llmc/cuda/quantize.cuh"
#include "llmc/cuda/rmsnorm.cuh"
#include "llmc/cuda/rope.cuh"
#include "llmc/run/run.h"
#include "llmc/run/sampler.h"
#include "llmc/config/schedule.h"
#include "llmc/run/stop.h"
#include "llmc/cuda/swiglu.cuh"
#include "llmc/base/utils.h"
#include "llmc/dist/watch.h"

// ---------------------------------------------------------------------------------------------------------------------
// Sizes and storage

// Rows of logits that exist at a time, and how many where memory is dearer: large enough to keep the products efficient, small beside T x V. Each time
// lm_head's gradient is read and written.
#define LOGITS_ROWS 4096
#define LOGITS_FEW_ROWS 2048

// Batches of tokens on their way to the GPU.
#define TOKEN_SLOTS 4

// Steps whose statistics and end events are kept: the one that runs, the one that is reported, and the one before, from whose end it is timed.
#define STEP_SLOTS 3

// What cudaMemGetInfo shows beside our arena: context, kernels, cuBLASLt. Measured on H200, CUDA 13.0.
#define CUDA_OVERHEAD_BYTES (640ll << 20)

// The quantized tensors of a layer: its weights, the inputs of its products, the gradients of their outputs.
typedef enum {
    SCALE_WEIGHT,                                // + LinearId
    SCALE_INPUT = SCALE_WEIGHT + NUM_LINEARS,    // + LinearId
    SCALE_GRADIENT = SCALE_INPUT + NUM_LINEARS,  // + LinearId
    NUM_SCALES = SCALE_GRADIENT + NUM_LINEARS
} ScaleId;

// The products of a linear layer, in bf16 and in the run's recipe: layers may differ (--fp8-filter).
typedef struct {
    const LinearShape *shape;
    GemmPlan bf16[NUM_GEMMS], fp8[NUM_GEMMS];
} Linear;

// A matrix that products read: a bf16 copy; a row-major and a transposed FP8 copy with their scales (those of whole tensors are in t->inverse_scale).
// NULL: not kept.
typedef struct {
    bf16 *bf16_data;
    uint8_t *row, *col;
    void *row_scales, *col_scales;
} GemmInput;

// What a layer keeps for its backward pass.
typedef struct {
    bf16 *x_in, *x_mid;            // [R, C] residual stream before attention and before the MLP
    float *rstd1, *rstd2;          // [R]
    GemmInput input[NUM_LINEARS];  // of QKV_PROJ [R, C], OUT_PROJ [R, ATT], GATE_UP_PROJ [R, C], DOWN_PROJ [R, F]
    bf16 *qkv;                     // [R, QKV]; rotated in place, but with QK-norm as the product left it
    bf16 *att;                     // [R, ATT]
    float *lse;                    // [B, NH, T]
    bf16 *gate_up;                 // [R, 2F]
} LayerActs;

// Of one step; written on the device.
typedef struct {
    float loss;             // mean over the step's tokens
    uint32_t bad_norm;      // the first norm whose input was not finite (nonfinite.h), on this rank; UINT32_MAX: none
    AdamwControl control;   // gradient norm, and whether it is finite
} StepStats;

// One batch in flight: pinned host memory and its copy on the GPU.
typedef struct {
    int32_t *host, *device;    // inputs [R], targets [R], then the sorted index of the inputs that make the embedding's gradient
    cudaEvent_t copied;
} TokenSlot;

typedef struct {
    const Options *o;
    const Comm *comm;
    ModelConfig m;
    ParameterTable table;
    Precision precision;              // which linear layer runs in what
    Dims d;
    int64_t chunk;                    // rows of logits at a time
    cudaStream_t stream;
    Nccl nccl;                        // with several ranks
    Fsdp fsdp;
    Gemm gemm;
    Linear linear[NUM_LINEARS];
    Linear lm_head, lm_head_tail;     // for a full chunk of rows and for what is left
    char *memory;                     // the arena

    bf16 *weights, *grads;            // [total] this rank's flat shard arrays (shard_plan.h); grads NULL: they are fp32, in fsdp.grads_fp32
    float *master;                    // [total] fp32 masters, or NULL
    void *exp_avg, *exp_avg_sq;       // [total] bf16 or fp32
    uint32_t *amax;                   // [L, amaxes]: those of tensor i of a layer from amax_at[i] on
    int64_t amaxes, amax_at[NUM_SCALES];
    float *inverse_scale;             // [L, NUM_SCALES, 4] of whole tensors; cuBLASLt wants 16-byte alignment
    // [L, NUM_SCALES, window], [L, NUM_SCALES] of the delayed recipe, one behind the other
    float *amax_history, *delayed_scale;
    float *delayed_before;            // the same before the step under way, where it may be left out; else NULL
    DelayedState delayed_state;       // the same on the host, for checkpoints
    // every tensor has been cast once: its delayed scale is known. False also where that is not certain, which costs a
    // pass over each tensor
    bool has_history;
    AuditSums *audit;                 // [L, NUM_LINEARS, NUM_TENSORS, 2] on the device
    bool auditing;                    // the casts of this step

    LayerActs *acts;                  // [L] on the host
    bf16 *x_final, *y_final;          // [R, C] residual stream after the last layer, and its norm
    float *rstd_final;                // [R]
    bf16 *branch;                     // [R, C] output of attention or MLP before it joins the residual stream
    bf16 *qkv_rotated;                // [R, QKV] with QK-norm only
    bf16 *logits;                     // [chunk, V], overwritten by their gradient
    float *row_losses;                // [R]
    bf16 *dx;                         // [R, C] gradient of the residual stream
    bf16 *dbranch, *dh, *dgate_up, *datt, *dqkv;  // gradients of the current layer
    GemmInput dy[NUM_LINEARS];        // gradients as the products read them
    void *attention_workspace, *norm_workspace;
    void *attention_sums;             // partial sums of the gradients of QK-norm, and of the biases
    float *rope_table;                // [T, HD] cos, sin
    double *squares;                  // sum of squares of the gradient
    StepStats *stats;                 // on the device
    StepStats *host_stats;            // [STEP_SLOTS] pinned
    cudaEvent_t step_done[STEP_SLOTS];
    cudaEvent_t idle;                 // for trainer_wait_all
    TokenSlot tokens[TOKEN_SLOTS];
    int32_t *shared_tokens;           // host: inputs, then targets, of all ranks whose inputs make it
    int64_t batches_sent;
    float *sample_logits;             // host: [V] of next_logits
    Profile profile;
} Trainer;

// Rows of logits that exist at a time: few if that saves memory, since they then fit where others lie at other times.
static int64_t logits_rows(const Trainer *t) {
    const int64_t room = fsdp_loss_room(&t->fsdp), many = min_i64(t->d.R, LOGITS_ROWS);
    return room && many * t->d.V > room ? min_i64(t->d.R, LOGITS_FEW_ROWS) : many;
}

// Bytes of a TokenSlot's memory.
static int64_t batch_bytes(const Trainer *t) { return (2 * t->d.R + embedding_index_size(t->fsdp.embedding_ranks * t->d.R)) * (int64_t)sizeof(int32_t); }

static bf16 *take_bf16(Arena *a, int64_t n) { return (bf16 *)arena_take(a, n * (int64_t)sizeof(bf16)); }
static float *take_float(Arena *a, int64_t n) { return (float *)arena_take(a, n * (int64_t)sizeof(float)); }
static uint8_t *take_bytes(Arena *a, int64_t n) { return (uint8_t *)arena_take(a, n); }

static const Recipe *recipe_of(const Trainer *t, int64_t l, LinearId id) { return precision_of(&t->precision, l, id); }
static bool is_fp8(const Trainer *t, int64_t l, LinearId id) { return recipe_is_fp8(recipe_of(t, l, id), GEMM_FPROP); }

// Whether amaxes come from the kernels that make the tensors: one scale a tensor, of the present.
static bool current_tensor_scales(const Trainer *t) { return recipe_grain(t->precision.recipe, TENSOR_X, COPY_ROW) == GRAIN_TENSOR && !t->precision.recipe->delayed; }

// One FP8 tensor of layer l as casts and products take it. `x` has its copies.
static Fp8Tensor fp8_tensor(const Trainer *t, int64_t l, int scale, const GemmInput *x) {
    const TensorRole role = (TensorRole)(scale / NUM_LINEARS);
    const Recipe *r = t->precision.recipe;
    const int64_t number = l * NUM_SCALES + scale;
    Fp8Tensor q = recipe_tensor(r, role, precision_format(&t->precision, role));
    q.row = x->row, q.col = x->col;
    q.amax = t->amax + l * t->amaxes + t->amax_at[scale];
    q.delayed_scale = r->delayed ? t->delayed_scale + number : NULL;
    q.row_scales = q.row_grain == GRAIN_TENSOR ? t->inverse_scale + number * 4 : x->row_scales;
    q.col_scales = q.col_grain == GRAIN_TENSOR ? t->inverse_scale + number * 4 : x->col_scales;
    for (int copy = 0; copy < 2 && t->auditing; copy++) q.audit[copy] = t->audit + audit_index(l, scale % NUM_LINEARS, role, (CopyKind)copy);
    return q;
}

static Fp8Tensor input_fp8(const Trainer *t, int64_t l, LinearId id) { return fp8_tensor(t, l, SCALE_INPUT + id, &t->acts[l].input[id]); }
static Fp8Tensor gradient_fp8(const Trainer *t, int64_t l, LinearId id) { return fp8_tensor(t, l, SCALE_GRADIENT + id, &t->dy[id]); }

// Where the kernel that makes a tensor leaves its amax; NULL: nobody asks for it there.
static uint32_t *fused_amax(const Trainer *t, int64_t l, int scale) {
    return l >= 0 && current_tensor_scales(t) && is_fp8(t, l, (LinearId)(scale % NUM_LINEARS)) ? t->amax + l * t->amaxes + t->amax_at[scale] : NULL;
}

// Whether the gradients of layers take the place of activations that backward has done with. Not where they must outlive the next forward pass, nor where
// they are a rank's part of what is computed elsewhere.
static bool gradients_follow_activations(const Trainer *t) { return !t->fsdp.sharded && !t->fsdp.buffered; }

static void place_parameters(Trainer *t, Arena *a) {
    const int64_t n = t->fsdp.plan.total, state_bytes = storage_bytes(t->o->optimizer_state);
    arena_group(a, "weights (bf16)");
    t->weights = take_bf16(a, n);
    arena_group(a, "master weights (fp32)");
    t->master = t->o->master_weights == STORAGE_FP32 ? take_float(a, n) : NULL;
    arena_group(a, t->o->optimizer_state == STORAGE_FP32 ? "optimizer state (fp32)" : "optimizer state (bf16)");
    t->exp_avg = arena_take(a, n * state_bytes);
    t->exp_avg_sq = arena_take(a, n * state_bytes);
    fsdp_place(&t->fsdp, a);
    t->fsdp.weights = t->weights;
}

// Which copies layers [first, last) need of a tensor of linear layer `id`.
typedef struct {
    bool bf16, fp8_row, fp8_col;
} Copies;

static Copies copies_needed(const Trainer *t, int64_t first, int64_t last, LinearId id, TensorRole tensor) {
    Copies c = {false, false, false};
    for (int64_t l = first; l < last; l++) {
        const Recipe *r = recipe_of(t, l, id);
        c.bf16 = c.bf16 || recipe_needs_bf16(r, tensor);
        c.fp8_row = c.fp8_row || recipe_grain(r, tensor, COPY_ROW) != GRAIN_BF16;
        c.fp8_col = c.fp8_col || recipe_grain(r, tensor, COPY_COL) != GRAIN_BF16;
    }
    return c;
}

// Bytes of the scales of an FP8 copy of a tensor [R, columns].
static int64_t copy_scale_bytes(const Trainer *t, TensorRole tensor, CopyKind copy, int64_t columns) {
    const Grain g = recipe_grain(t->precision.recipe, tensor, copy);
    const CopyShape s = copy_shape(t->d.R, columns, copy);
    return g == GRAIN_TENSOR ? 0 : scale_bytes(g, s.outer, s.depth);
}

// The input of linear layer `id`, [R, K], for layers [first, last). Row-major FP8 copies die after the forward product, so layers share one, in `row`.
static GemmInput place_input(Trainer *t, Arena *a, LinearId id, int64_t first, int64_t last, const GemmInput *row) {
    GemmInput input;
    memset(&input, 0, sizeof input);
    const int64_t R = t->d.R, K = t->precision.linear[id].K;
    const Copies need = copies_needed(t, first, last, id, TENSOR_X);
    if (need.fp8_row) input.row = row->row, input.row_scales = row->row_scales;
    if (need.fp8_col) input.col = take_bytes(a, R * K), input.col_scales = take_bytes(a, copy_scale_bytes(t, TENSOR_X, COPY_COL, K));
    if (need.bf16 && id != OUT_PROJ) input.bf16_data = take_bf16(a, R * K);  // OUT_PROJ's is the attention's output
    return input;
}

// What layers [first, last) keep, each or together, but their input x_in and the input of the down projection, which backward makes again from gate_up.
static void place_layer_acts(Trainer *t, Arena *a, LayerActs *acts, int64_t first, int64_t last, const GemmInput *row) {
    const Dims *d = &t->d;
    acts->x_mid = take_bf16(a, d->R * d->C);
    acts->rstd1 = take_float(a, d->R);
    acts->rstd2 = take_float(a, d->R);
    acts->qkv = take_bf16(a, d->R * d->QKV);
    acts->att = take_bf16(a, d->R * d->ATT);
    acts->lse = take_float(a, d->R * d->NH);
    acts->gate_up = take_bf16(a, d->R * 2 * d->F);
    for (int id = QKV_PROJ; id <= GATE_UP_PROJ; id++) acts->input[id] = place_input(t, a, (LinearId)id, first, last, row);
    acts->input[OUT_PROJ].bf16_data = acts->att;
}

// What backward reads of one layer. `shared`: what all layers share when they are computed again.
static void place_kept(Trainer *t, Arena *a, int64_t l, const LayerActs *shared, const GemmInput *row) {
    LayerActs *acts = &t->acts[l];
    const GemmInput down_input = acts->input[DOWN_PROJ];
    if (shared) *acts = *shared;
    else place_layer_acts(t, a, acts, l, l + 1, row);
    acts->x_in = take_bf16(a, t->d.R * t->d.C);
    acts->input[DOWN_PROJ] = down_input;
}

// How many layers keep their activations elsewhere than where gradients will be. Backward goes from the last layer to the first: when it writes the gradient
// of layer l, the activations of the layers above are done with. So layer l's gradient may begin where the activations of layer l + 1 do, or later. The others'
// lie there one behind the other, from the first layer's gradient on, and the fewer they are, the sooner they give way; this is the fewest of the first layers
// without which they do. sizes [L]: bytes of each layer's activations.
static int64_t layers_in_front(const Trainer *t, const int64_t *sizes) {
    const int64_t L = t->d.L, gradient = t->table.layer_size * (int64_t)sizeof(bf16);
    for (int64_t front = 1; front < L; front++) {
        int64_t begin = 0;  // of layer l + 1's activations, counted from the first layer's gradient
        bool fits = true;
        for (int64_t l = front; l < L && fits; l++) {
            begin += sizes[l];
            fits = begin <= l * gradient;
        }
        if (fits) return front;
    }
    return L;
}

// The same for the activations as they are. `shared`, `row`: of place_kept.
static int64_t count_layers_in_front(Trainer *t, const LayerActs *shared, const GemmInput *row) {
    int64_t *sizes = (int64_t *)xcalloc((size_t)t->d.L, sizeof *sizes);
    for (int64_t l = 0; l < t->d.L; l++) {
        Arena count;
        memset(&count, 0, sizeof count);
        arena_group(&count, "");
        place_kept(t, &count, l, shared, row);
        sizes[l] = count.used;
    }
    const int64_t front = layers_in_front(t, sizes);
    free(sizes);
    return front;
}

// Where gradients will be once they are written, if they follow activations: the layers' one by one, the embedding's last of all (empty where it is lm_head's too).
typedef struct {
    ArenaRange embedding, layers;
} GradientRoom;

static GradientRoom place_gradients(Trainer *t, Arena *a) {
    GradientRoom room;
    memset(&room, 0, sizeof room);
    const bool fp32 = t->fsdp.fp32_grads;
    arena_group(a, fp32 ? "gradients (fp32)" : "gradients (bf16)");
    t->fsdp.grads_fp32 = fp32 ? take_float(a, t->fsdp.plan.total) : NULL;
    t->fsdp.grads = t->grads = fp32 ? NULL : take_bf16(a, t->fsdp.plan.total);
    if (!gradients_follow_activations(t)) return room;
    room.layers.end = a->used;
    room.layers.begin = room.embedding.end = a->used - t->d.L * t->table.layer_size * (int64_t)sizeof(bf16);
    room.embedding.begin = room.embedding.end - fsdp_loss_room(&t->fsdp) * (int64_t)sizeof(bf16);
    if (room.layers.begin % ARENA_ALIGNMENT || room.embedding.begin % ARENA_ALIGNMENT) die("gradients do not begin where activations can");  // parameters.h: multiples of 128 elements
    return room;
}

// FP8 copies of the gradients [R, columns] of linear layers, one at a time.
static GemmInput place_gradient_copies(Trainer *t, Arena *a, int64_t columns) {
    const int64_t R = t->d.R;
    const bool col = recipe_grain(t->precision.recipe, TENSOR_DY, COPY_COL) != GRAIN_BF16;
    GemmInput dy;
    memset(&dy, 0, sizeof dy);
    dy.row = take_bytes(a, R * columns), dy.row_scales = take_bytes(a, copy_scale_bytes(t, TENSOR_DY, COPY_ROW, columns));
    if (col) dy.col = take_bytes(a, R * columns), dy.col_scales = take_bytes(a, copy_scale_bytes(t, TENSOR_DY, COPY_COL, columns));
    return dy;
}

// Gradients inside a layer.
static void place_layer_gradients(Trainer *t, Arena *a) {
    const Dims *d = &t->d;
    arena_group(a, "gradients of activations");
    t->dh = take_bf16(a, d->R * d->F);
    t->datt = take_bf16(a, d->R * d->ATT);
    t->dqkv = take_bf16(a, d->R * d->QKV);
    memset(t->dy, 0, sizeof t->dy);
    if (t->precision.any_fp8) {
        const GemmInput narrow = place_gradient_copies(t, a, max_i64(d->C, d->QKV)), wide = place_gradient_copies(t, a, 2 * d->F);
        for (int i = 0; i < NUM_LINEARS; i++) t->dy[i] = i == GATE_UP_PROJ ? wide : narrow;
    }
    t->dgate_up = copies_needed(t, 0, d->L, GATE_UP_PROJ, TENSOR_DY).bf16 ? take_bf16(a, d->R * 2 * d->F) : NULL;
    t->dy[QKV_PROJ].bf16_data = t->dqkv;
    t->dy[OUT_PROJ].bf16_data = t->dx;
    t->dy[GATE_UP_PROJ].bf16_data = t->dgate_up;
    t->dy[DOWN_PROJ].bf16_data = t->dx;
}

static void place_norm_workspace(Trainer *t, Arena *a) {
    arena_group(a, "workspaces");
    t->norm_workspace = arena_take(a, (int64_t)rmsnorm_workspace_bytes(t->d.R, t->d.C));
}

// What one layer at a time needs, forward or backward, and nobody during the loss.
static void place_layer_memory(Trainer *t, Arena *a, LayerActs *shared, GemmInput *row) {
    const Dims *d = &t->d;
    const int64_t widest = max_i64(max_i64(d->C, d->ATT), d->F);
    arena_group(a, "FP8 weights of one layer at a time");
    if (fsdp_copies_pass(&t->fsdp)) fsdp_place_copies(&t->fsdp, a);
    arena_group(a, "activations of one layer at a time");
    if (t->precision.any_fp8) row->row = take_bytes(a, d->R * widest), row->row_scales = take_bytes(a, copy_scale_bytes(t, TENSOR_X, COPY_ROW, widest));
    const GemmInput down_input = place_input(t, a, DOWN_PROJ, 0, d->L, row);
    for (int64_t l = 0; l < d->L; l++) t->acts[l].input[DOWN_PROJ] = down_input;
    if (t->o->recompute == RECOMPUTE_LAYER) place_layer_acts(t, a, shared, 0, d->L, row);
    t->branch = take_bf16(a, d->R * d->C);
    t->qkv_rotated = t->m.qk_norm ? take_bf16(a, d->R * d->QKV) : NULL;
    place_layer_gradients(t, a);
    arena_group(a, "workspaces");
    t->attention_workspace = arena_take(a, (int64_t)attention_workspace_bytes(d->B, d->T, d->NH, d->NKV, d->HD));
    if (!t->fsdp.buffered) place_norm_workspace(t, a);
    t->attention_sums = arena_take(a, max_i64((int64_t)rope_workspace_bytes(d->HD), (int64_t)bias_workspace_bytes(d->R, d->QKV)));
    if (t->fsdp.buffered) fsdp_place_layer_buffer(&t->fsdp, a);
}

// The logits (with the buffer of the root's gradient) and the layers' memory: never alive together, they lie in the
// same place, which is `room` if the logits fit there. Returns what they leave of it.
static ArenaRange place_logits_and_layer_memory(Trainer *t, Arena *a, ArenaRange room, LayerActs *shared, GemmInput *row) {
    const int64_t n = t->chunk * t->d.V, used = a->used;
    const ArenaRange nowhere = {0, 0};
    if (t->fsdp.sharded && n <= fsdp_loss_room(&t->fsdp)) {
        t->logits = fsdp_loss_memory(&t->fsdp);
        place_layer_memory(t, a, shared, row);
        return nowhere;
    }
    arena_group(a, "logits of one chunk");
    arena_reuse(a, room);
    t->logits = take_bf16(a, n);
    if (t->fsdp.buffered) fsdp_place_root_buffer(&t->fsdp, a);
    const ArenaRange logits = {used, a->used};
    const bool in_room = logits.begin == logits.end;
    const ArenaRange after_logits = arena_reuse(a, in_room ? room : logits);
    place_layer_memory(t, a, shared, row);
    const ArenaRange after_layers = arena_reuse(a, nowhere), left = {max_i64(after_logits.begin, after_layers.begin), room.end};
    return in_room ? left : room;
}

// Gradients, activations and logits. The last layers' activations lie where the layers' gradients will be; in what logits and layers leave of the embedding's,
// which is written last, those of the first layers and of the loss, as far as they fit.
static void place_activations(Trainer *t, Arena *a) {
    const Dims *d = &t->d;
    const GradientRoom room = place_gradients(t, a);
    const ArenaRange nowhere = {0, 0};
    LayerActs one_at_a_time;
    GemmInput row;
    memset(&one_at_a_time, 0, sizeof one_at_a_time);
    memset(&row, 0, sizeof row);
    arena_group(a, "gradients of activations");
    t->dx = take_bf16(a, d->R * d->C);
    if (t->fsdp.buffered)
        place_norm_workspace(t, a);  // the final norm's backward pass needs it beside the root's gradient
    const ArenaRange left = place_logits_and_layer_memory(t, a, room.embedding, &one_at_a_time, &row);
    const LayerActs *shared = t->o->recompute == RECOMPUTE_LAYER ? &one_at_a_time : NULL;
    const int64_t front = gradients_follow_activations(t) ? count_layers_in_front(t, shared, &row) : d->L;
    arena_group(a, "activations kept for backward");
    arena_reuse(a, room.layers);
    for (int64_t l = front; l < d->L; l++) place_kept(t, a, l, shared, &row);
    arena_reuse(a, left);
    for (int64_t l = 0; l < front; l++) place_kept(t, a, l, shared, &row);
    t->x_final = take_bf16(a, d->R * d->C);
    t->y_final = take_bf16(a, d->R * d->C);
    t->rstd_final = take_float(a, d->R);
    t->dbranch = take_bf16(a, d->R * d->C);
    arena_reuse(a, nowhere);
}

// Histories and scales of the delayed recipe.
static int64_t delayed_elements(const Trainer *t) { return t->d.L * NUM_SCALES * (t->o->fp8_amax_history + 1); }

static void place_scales(Trainer *t, Arena *a) {
    Fsdp *f = &t->fsdp;
    const int64_t tensors = t->d.L * NUM_SCALES;
    arena_group(a, "amaxes, scales, audit");
    t->amax = (uint32_t *)arena_take(a, t->d.L * t->amaxes * (int64_t)sizeof(uint32_t));
    t->inverse_scale = take_float(a, tensors * 4);
    t->amax_history = t->precision.recipe->delayed ? take_float(a, delayed_elements(t)) : NULL;
    t->delayed_scale = t->precision.recipe->delayed ? t->amax_history + tensors * t->o->fp8_amax_history : NULL;
    const bool may_skip = t->precision.recipe->delayed && t->o->on_nonfinite == NONFINITE_SKIP;
    t->delayed_before = may_skip ? take_float(a, delayed_elements(t)) : NULL;
    t->audit = t->o->fp8_audit ? (AuditSums *)arena_take(a, audit_count(&t->precision) * (int64_t)sizeof(AuditSums)) : NULL;
    f->amax = t->amax, f->amax_stride = t->amaxes;
    f->inverse_scale = t->inverse_scale, f->delayed_scale = t->delayed_scale, f->scale_stride = NUM_SCALES;
}

// Elements of dequantized operands that emulated products need at a time.
static int64_t emulation_elements(const Trainer *t) {
    int64_t most = 0;
    for (int i = 0; i < NUM_LINEARS && t->precision.emulated; i++) {
        const LinearShape *s = &t->precision.linear[i];
        most = max_i64(most, max_i64(t->d.R * (s->N + s->K), s->N * s->K + t->d.R * max_i64(s->N, s->K)));
    }
    return most;
}

// Gives every pointer its place. On an arena without memory this is the memory plan.
static void place(Trainer *t, Arena *a) {
    const Dims *d = &t->d;
    place_parameters(t, a);
    place_scales(t, a);
    arena_group(a, "statistics, tokens");
    t->squares = (double *)arena_take(a, sizeof(double));
    t->stats = (StepStats *)arena_take(a, sizeof(StepStats));
    t->row_losses = take_float(a, d->R);
    t->rope_table = take_float(a, d->T * d->HD);
    for (int i = 0; i < TOKEN_SLOTS; i++) t->tokens[i].device = (int32_t *)arena_take(a, batch_bytes(t));
    place_activations(t, a);
    arena_group(a, "products, optimizer");
    t->gemm.workspace = arena_take(a, max_i64(GEMM_WORKSPACE_BYTES, adamw_workspace_bytes(&t->table, &t->fsdp.plan)));
    t->gemm.scratch = t->precision.emulated ? take_bf16(a, emulation_elements(t)) : NULL;
    t->gemm.alpha = t->precision.emulated ? take_float(a, 1) : NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// The linear layer

static void describe_linears(Trainer *t) {
    const Dims *d = &t->d;
    const Recipe *r = t->precision.recipe;
    t->lm_head.shape = t->lm_head_tail.shape = &t->precision.lm_head;
    for (int i = 0; i < NUM_LINEARS; i++) t->linear[i].shape = &t->precision.linear[i];
    for (int i = 0; i < NUM_SCALES; i++) {
        const LinearShape *s = &t->precision.linear[i % NUM_LINEARS];
        const TensorRole role = (TensorRole)(i / NUM_LINEARS);
        t->amax_at[i] = t->amaxes;
        t->amaxes += tensor_amaxes(recipe_grain(r, role, COPY_ROW), recipe_grain(r, role, COPY_COL), role == TENSOR_W ? s->N : d->R, role == TENSOR_DY ? s->N : s->K);
    }
}

// A tensor as a product reads it: `q` is NULL where it is only there in bf16.
static GemmOperand operand(const GemmPlan *p, const bf16 *data, const Fp8Tensor *q, CopyKind copy) {
    GemmOperand o = {data, NULL};
    if (recipe_is_fp8(p->spec.recipe, p->kind)) o.data = copy == COPY_ROW ? q->row : q->col, o.scales = copy == COPY_ROW ? q->row_scales : q->col_scales;
    return o;
}

static GemmPlan *plan_of(Trainer *t, LinearId id, int64_t l, GemmKind kind) { return is_fp8(t, l, id) ? &t->linear[id].fp8[kind] : &t->linear[id].bf16[kind]; }

// What the products run in; where they are planned, also those whose fast sums cuBLASLt lacks (gemm_choose).
static void print_precisions(const Trainer *t) {
    precision_print(&t->precision, t->d.R, t->chunk, "bf16");
    for (int id = 0; id < NUM_LINEARS; id++)
        for (int kind = 0; kind < NUM_GEMMS; kind++) {
            const GemmPlan *p = &t->linear[id].fp8[kind];
            if (p->matmul && p->native && !p->spec.fast && precision_fast_sums(&t->precision, p->spec.recipe, (GemmKind)kind))
                printf("  %s %s has full sums: cuBLASLt has no fast ones for its sizes\n", p->layer, gemm_kind_name((GemmKind)kind));
        }
}

// --profile: what the operation just enqueued had to do.
static void mark_bytes(Trainer *t, const char *op, int64_t bytes) { profile_mark(&t->profile, op, PROFILE_BYTES, (double)bytes); }

static void mark_product(Trainer *t, const char *op, const GemmPlan *p) { profile_mark(&t->profile, op, p->native ? PROFILE_FLOPS_FP8 : PROFILE_FLOPS_BF16, gemm_flops(p)); }

// Layer l is unit 1 + l of the parameters; unit 0 is the root.
static FsdpUnit layer_weights(const Trainer *t, int64_t l) { return fsdp_weights(&t->fsdp, 1 + l); }
static FsdpUnit layer_gradients(const Trainer *t, int64_t l) { return fsdp_gradients(&t->fsdp, 1 + l); }

static GemmOperand weight_operand(const Trainer *t, LinearId id, int64_t l, const GemmPlan *p, CopyKind copy) {
    const FsdpUnit unit = layer_weights(t, l);
    const bf16 *data = unit.matrices ? unit.matrices + t->precision.linear[id].offset : NULL;
    if (!is_fp8(t, l, id)) return operand(p, data, NULL, copy);
    const Fp8Tensor q = fsdp_weight_fp8(&t->fsdp, 1 + l, id);
    return operand(p, data, &q, copy);
}

// y [R, N] = x [R, K] w^T, and for Qwen2's q, k, v: + bias.
static void linear_forward(Trainer *t, LinearId id, int64_t l, bf16 *y) {
    GemmPlan *p = plan_of(t, id, l, GEMM_FPROP);
    const Fp8Tensor x = input_fp8(t, l, id);
    const bf16 *bias = id == QKV_PROJ && t->m.qkv_bias ? layer_weights(t, l).vectors + t->table.layer.bq : NULL;
    gemm_run(&t->gemm, p, y, weight_operand(t, id, l, p, COPY_ROW), operand(p, t->acts[l].input[id].bf16_data, &x, COPY_ROW), bias, false);
    mark_product(t, "linear layers, fprop", p);
}

// dx [R, K] = dy [R, N] w
static void linear_backward_input(Trainer *t, LinearId id, int64_t l, bf16 *dx) {
    GemmPlan *p = plan_of(t, id, l, GEMM_DGRAD);
    const Fp8Tensor dy = gradient_fp8(t, l, id);
    gemm_run(&t->gemm, p, dx, weight_operand(t, id, l, p, COPY_COL), operand(p, t->dy[id].bf16_data, &dy, COPY_ROW), NULL, false);
    mark_product(t, "linear layers, dgrad", p);
}

// dw [N, K] = dy^T [N, R] x [R, K]
static void linear_backward_weight(Trainer *t, LinearId id, int64_t l) {
    GemmPlan *p = plan_of(t, id, l, GEMM_WGRAD);
    const Fp8Tensor x = input_fp8(t, l, id), dy = gradient_fp8(t, l, id);
    bf16 *dw = layer_gradients(t, l).matrices + t->precision.linear[id].offset;
    gemm_run(&t->gemm, p, dw, operand(p, t->acts[l].input[id].bf16_data, &x, COPY_COL),
             operand(p, t->dy[id].bf16_data, &dy, COPY_COL), NULL, false);
    mark_product(t, "linear layers, wgrad", p);
}

// Random bytes that are finite numbers of ordinary size in every format, for timing: constant data would run faster than real data.
__global__ static void fill_for_timing_kernel(uint64_t *out, int64_t n) {
    grid_dependency_wait();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        out[i] = (rng_u64(1, (uint64_t)i) & 0x8f8f8f8f8f8f8f8full) | 0x3030303030303030ull;
}

// Fills [from, to) for timing.
static void fill_for_timing(Trainer *t, char *from, char *to) {
    CUDA_LAUNCH(fill_for_timing_kernel, 4 * device_sm_count(), 256, 0, t->stream, (uint64_t *)from, (to - from) / 8);
}

// Chooses a product's algorithm on scratch operands at the start of the arena, which nothing uses yet and which is larger than any product.
static void plan_product(Trainer *t, GemmPlan *p) {
    char *a = t->memory, *b = a + round_up(gemm_bytes_a(p), ARENA_ALIGNMENT), *d = b + round_up(gemm_bytes_b(p), ARENA_ALIGNMENT);
    const GemmOperand operand_a = {a, a}, operand_b = {b, b};  // what holds the numbers is larger than their scales
    if (p->emulated) fill_for_timing(t, (char *)t->gemm.scratch, (char *)(t->gemm.scratch + gemm_scratch_elements(p)));
    else fill_for_timing(t, a, d);
    gemm_choose(&t->gemm, p, (bf16 *)d, operand_a, operand_b, (const bf16 *)a);
}

// The three products of a linear layer over R rows, by one recipe.
static void plan_linear(Trainer *t, const LinearShape *s, GemmPlan plans[NUM_GEMMS], const Recipe *recipe, int64_t R, bool bias) {
    for (int kind = 0; kind < NUM_GEMMS; kind++) {
        const GemmSpec spec = gemm_spec(&t->precision, recipe, (GemmKind)kind);
        plans[kind] = gemm_describe(s->name, (GemmKind)kind, R, s->N, s->K, spec, bias && kind == GEMM_FPROP);
        plan_product(t, &plans[kind]);
    }
}

static void plan_products(Trainer *t) {
    const Recipe *bf16_recipe = recipe_row(RECIPE_BF16);
    CUBLAS_CHECK(cublasLtCreate(&t->gemm.handle));
    t->gemm.stream = t->stream;
    t->gemm.deterministic = t->o->deterministic;
    if (t->gemm.alpha) CUDA_CHECK(cudaMemsetAsync(t->gemm.alpha, 0, sizeof(float), t->stream));
    for (int id = 0; id < NUM_LINEARS; id++) {
        const Copies x = copies_needed(t, 0, t->d.L, (LinearId)id, TENSOR_X);
        int64_t fp8_layers = 0;
        for (int64_t l = 0; l < t->d.L; l++) fp8_layers += is_fp8(t, l, (LinearId)id);
        const bool bias = id == QKV_PROJ && t->m.qkv_bias;
        if (x.fp8_row) plan_linear(t, t->linear[id].shape, t->linear[id].fp8, t->precision.recipe, t->d.R, bias);
        if (fp8_layers < t->d.L) plan_linear(t, t->linear[id].shape, t->linear[id].bf16, bf16_recipe, t->d.R, bias);
    }
    plan_linear(t, &t->precision.lm_head, t->lm_head.bf16, bf16_recipe, t->chunk, false);
    if (t->d.R % t->chunk) plan_linear(t, &t->precision.lm_head, t->lm_head_tail.bf16, bf16_recipe, t->d.R % t->chunk, false);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// The weights of one layer that are not linear layers.
typedef struct {
    bf16 *norm1, *norm2, *q_norm, *k_norm;  // q_norm and k_norm: NULL without QK-norm
} LayerNorms;

static LayerNorms layer_norms(const Trainer *t, bf16 *vectors) {
    const LayerOffsets *offset = &t->table.layer;
    LayerNorms w = {vectors + offset->norm1, vectors + offset->norm2, t->m.qk_norm ? vectors + offset->q_norm : NULL, t->m.qk_norm ? vectors + offset->k_norm : NULL};
    return w;
}

// The tensors of the root unit; lm_head is the embedding where the two are tied. Each is the first of its segment.
typedef struct {
    bf16 *embedding, *norm, *lm_head;
} Root;

static Root root_tensors(FsdpUnit unit) {
    Root r = {unit.embedding, unit.vectors, unit.matrices};
    return r;
}

static Root root_weights(const Trainer *t) { return root_tensors(fsdp_weights(&t->fsdp, 0)); }
static Root root_gradients(const Trainer *t) { return root_tensors(fsdp_gradients(&t->fsdp, 0)); }

static AttentionDims attention_dims(const Trainer *t) {
    AttentionDims a = {t->d.B, t->d.T, t->d.NH, t->d.NKV, t->d.HD, t->o->deterministic};
    return a;
}

// Of the causal products with keys and values, forward; backward takes 2.5 times that.
static double attention_flops(const Trainer *t) { return 2.0 * (double)(t->d.R * t->d.NH * t->d.HD) * (double)t->d.T; }

static RopeDims rope_dims(const Trainer *t) {
    RopeDims r = {t->d.B, t->d.T, t->d.NH, t->d.NKV, t->d.HD, (float)t->m.rms_norm_eps};
    return r;
}

static DelayedArrays delayed_arrays(const Trainer *t) {
    const DelayedArrays d = {t->amax_history, t->delayed_scale, t->amax, NUM_SCALES, t->o->fp8_amax_history, (int)t->o->fp8_margin, t->precision.dy_format, SCALE_GRADIENT};
    return d;
}

// Delayed recipe, a tensor's first cast: by its own amax.
static void begin_delayed_scale(Trainer *t, const float *scale) {
    const int64_t number = scale - t->delayed_scale, tensor = number % NUM_SCALES;
    DelayedArrays layer = delayed_arrays(t);
    layer.scale += number - tensor, layer.amax += number - tensor;
    delayed_begin(&layer, 1, tensor, tensor + 1, t->stream);
}

// Bytes that a source (quantize.cuh) reads of a tensor [R, C].
template <class Source>
static int64_t source_bytes(const Source *, int64_t R, int64_t C) {
    return R * C * (int64_t)(sizeof(typename Source::Raw) / sizeof(Bf16x8)) * (int64_t)sizeof(bf16);
}

// Finds the amaxes that the cast of the tensor wants; none for block scales.
template <class Source>
static void amax_pass(Trainer *t, const Fp8Tensor &q, const Source &source, int64_t R, int64_t C) {
    if (!tensor_amaxes(q.row_grain, q.col_grain, R, C)) return;
    quantize_amax_source("quantize", q, source, R, C, t->stream);
    mark_bytes(t, "amax passes", source_bytes(&source, R, C));
}

// Casts a tensor [R, C] that `source` makes, after the amax pass that its recipe may want: `amax_known` says that a kernel before has
// left there what current scaling needs.
template <class Source>
static void quantize(Trainer *t, Fp8Tensor q, Source source, int64_t R, int64_t C, bool amax_known) {
    if (q.delayed_scale ? !t->has_history : !amax_known) amax_pass(t, q, source, R, C);
    if (q.delayed_scale && !t->has_history) begin_delayed_scale(t, q.delayed_scale);
    quantize_source("quantize", q, source, R, C, t->stream);
    mark_bytes(t, "FP8 casts", source_bytes(&source, R, C) + R * C * Source::OUTPUTS * ((q.row != NULL) + (q.col != NULL)));
}

// The norm of that number (nonfinite_norm) leaves it in the step's statistics if its input is not finite. What
// validation and samples leave there is cleared before the next step.
static RmsnormWatch norm_watch(const Trainer *t, int64_t number) {
    const RmsnormWatch watch = {&t->stats->bad_norm, (uint32_t)number};
    return watch;
}

// The input of linear layer `id`: y = RMSNorm(x). With `delta`, first x = residual + delta.
static void norm_forward(Trainer *t, int64_t l, LinearId id, bf16 *x, float *rstd, const bf16 *residual, const bf16 *delta, const bf16 *weight) {
    const Dims *d = &t->d;
    const float eps = (float)t->m.rms_norm_eps;
    bf16 *y = recipe_needs_bf16(recipe_of(t, l, id), TENSOR_X) ? t->acts[l].input[id].bf16_data : NULL;
    uint32_t *amax = fused_amax(t, l, SCALE_INPUT + id);
    const RmsnormWatch watch = norm_watch(t, nonfinite_norm(l, id == GATE_UP_PROJ));
    if (delta) residual_rmsnorm_forward(x, y, rstd, amax, residual, delta, weight, d->R, d->C, eps, watch, t->stream);
    else rmsnorm_forward(y, rstd, amax, x, weight, d->R, d->C, eps, watch, t->stream);
    mark_bytes(t, "RMSNorm, forward", d->R * d->C * ((delta ? 6 : 2) + (y ? 2 : 0)));
    const RmsnormSource source = {x, weight, rstd, d->C};
    if (is_fp8(t, l, id)) quantize(t, input_fp8(t, l, id), source, d->R, d->C, amax != NULL);
}

// q, k, v as attention reads them: rotated in place, or beside the product's result, which QK-norm's backward needs.
static const bf16 *rotate_forward(Trainer *t, LayerActs *a, const LayerNorms *w) {
    bf16 *rotated = t->m.qk_norm ? t->qkv_rotated : a->qkv;
    qknorm_rope_forward(rotated, a->qkv, w->q_norm, w->k_norm, t->rope_table, rope_dims(t), t->stream);
    mark_bytes(t, "RoPE and QK-norm, forward", t->d.R * (t->d.NH + t->d.NKV) * t->d.HD * 4);
    return rotated;
}

// One layer up to its gate and up projections: all that backward needs. acts->x_in = residual + delta, or is there already (delta NULL).
static void layer_forward_until_mlp(Trainer *t, int64_t l, const bf16 *residual, const bf16 *delta) {
    LayerActs *a = &t->acts[l];
    const LayerNorms w = layer_norms(t, layer_weights(t, l).vectors);
    norm_forward(t, l, QKV_PROJ, a->x_in, a->rstd1, residual, delta, w.norm1);
    linear_forward(t, QKV_PROJ, l, a->qkv);
    const bf16 *qkv = rotate_forward(t, a, &w);
    uint32_t *amax = fused_amax(t, l, SCALE_INPUT + OUT_PROJ);
    attention_forward(a->att, a->lse, amax, qkv, attention_dims(t), t->stream);
    profile_mark(&t->profile, "attention, forward", PROFILE_FLOPS_BF16, attention_flops(t));
    const TensorSource att = {a->att, t->d.ATT};
    if (is_fp8(t, l, OUT_PROJ)) quantize(t, input_fp8(t, l, OUT_PROJ), att, t->d.R, t->d.ATT, amax != NULL);
    linear_forward(t, OUT_PROJ, l, t->branch);
    norm_forward(t, l, GATE_UP_PROJ, a->x_mid, a->rstd2, a->x_in, t->branch, w.norm2);
    linear_forward(t, GATE_UP_PROJ, l, a->gate_up);
}

// The rest of the layer; its result t->branch joins the residual stream in the next layer's norm.
static void layer_forward_mlp(Trainer *t, int64_t l) {
    const Dims *d = &t->d;
    LayerActs *a = &t->acts[l];
    const SwigluSource source = {a->gate_up, d->F};
    if (is_fp8(t, l, DOWN_PROJ)) {
        Fp8Tensor h = input_fp8(t, l, DOWN_PROJ);
        if (!h.delayed_scale) amax_pass(t, h, source, d->R, d->F);  // also for the copy that backward makes
        h.col = NULL;  // backward writes it
        quantize(t, h, source, d->R, d->F, true);
    } else {
        swiglu_forward(a->input[DOWN_PROJ].bf16_data, a->gate_up, d->R, d->F, t->stream);
        mark_bytes(t, "SwiGLU, forward", d->R * d->F * 6);
    }
    linear_forward(t, DOWN_PROJ, l, t->branch);
}

// Layers come and go when they are sharded (fsdp.cuh); with one GPU these do nothing.
static void gather_layer(Trainer *t, int64_t l) { fsdp_prefetch(&t->fsdp, 1 + l); }
static void acquire_layer(Trainer *t, int64_t l, bool backward) {
    fsdp_acquire(&t->fsdp, 1 + l, backward);
    if (!t->fsdp.cached) profile_mark(&t->profile, "weights: waiting, casts, transposes", PROFILE_WAIT, 0);
}
static void release_layer(Trainer *t, int64_t l) { fsdp_release(&t->fsdp, 1 + l); }

// Those of tensors [first, last) of every layer.
static void clear_amaxes(Trainer *t, int first, int last) {
    const int64_t begin = t->amax_at[first], end = last < NUM_SCALES ? t->amax_at[last] : t->amaxes;
    CUDA_CHECK(cudaMemset2DAsync(t->amax + begin, (size_t)t->amaxes * sizeof(uint32_t), 0, (size_t)(end - begin) * sizeof(uint32_t), (size_t)t->d.L, t->stream));
}

// Embedding, all layers and the final norm: tokens in `slot` -> t->y_final [R, C].
static void model_forward(Trainer *t, const TokenSlot *slot) {
    const Dims *d = &t->d;
    if (t->amaxes) clear_amaxes(t, SCALE_INPUT, NUM_SCALES);
    const Root root = root_weights(t);
    gather_layer(t, 0);
    embedding_forward(t->acts[0].x_in, root.embedding, slot->device, d->R, d->C, t->stream);
    mark_bytes(t, "embedding", d->R * d->C * 4);
    for (int64_t l = 0; l < d->L; l++) {
        profile_range_begin("forward of layer", l);
        gather_layer(t, l + 1);  // travels while layer l computes
        acquire_layer(t, l, false);
        layer_forward_until_mlp(t, l, l ? t->acts[l - 1].x_mid : NULL, l ? t->branch : NULL);
        layer_forward_mlp(t, l);
        release_layer(t, l);
        profile_range_end();
    }
    residual_rmsnorm_forward(t->x_final, t->y_final, t->rstd_final, NULL, t->acts[d->L - 1].x_mid, t->branch,
                             root.norm, d->R, d->C, (float)t->m.rms_norm_eps, norm_watch(t, nonfinite_norm(d->L, false)), t->stream);
    mark_bytes(t, "RMSNorm, forward", d->R * d->C * 8);
}

// Logits of rows [first, first + rows) into t->logits.
static Linear *logits_forward(Trainer *t, int64_t first, int64_t rows) {
    Linear *head = rows == t->chunk ? &t->lm_head : &t->lm_head_tail;
    const GemmOperand w = {root_weights(t).lm_head, NULL}, y = {t->y_final + first * t->d.C, NULL};
    gemm_run(&t->gemm, &head->bf16[GEMM_FPROP], t->logits, w, y, NULL, false);
    mark_product(t, "lm_head", &head->bf16[GEMM_FPROP]);
    return head;
}

// Cross-entropy of every row into t->row_losses.
static void loss_forward(Trainer *t, const TokenSlot *slot) {
    const Dims *d = &t->d;
    for (int64_t first = 0; first < d->R; first += t->chunk) {
        const int64_t rows = min_i64(t->chunk, d->R - first);
        logits_forward(t, first, rows);
        cross_entropy_loss(t->row_losses + first, t->logits, slot->device + d->R + first, rows, d->V, t->stream);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// Loss of every row, and its way back through lm_head and the final norm: t->dx = gradient of the residual stream.
// Chunk by chunk, so that the logits never exist whole.
static void loss_forward_backward(Trainer *t, const TokenSlot *slot, float grad_scale) {
    const Dims *d = &t->d;
    const Root root = root_weights(t), gradients = root_gradients(t);
    for (int64_t first = 0; first < d->R; first += t->chunk) {
        const int64_t rows = min_i64(t->chunk, d->R - first);
        Linear *head = logits_forward(t, first, rows);
        cross_entropy_loss_and_gradient(t->row_losses + first, t->logits, slot->device + d->R + first, rows, d->V, grad_scale, t->stream);
        mark_bytes(t, "cross-entropy", rows * d->V * 4);
        const GemmOperand w = {root.lm_head, NULL}, y = {t->y_final + first * d->C, NULL}, dlogits = {t->logits, NULL};
        gemm_run(&t->gemm, &head->bf16[GEMM_DGRAD], t->dbranch + first * d->C, w, dlogits, NULL, false);
        mark_product(t, "lm_head", &head->bf16[GEMM_DGRAD]);
        gemm_run(&t->gemm, &head->bf16[GEMM_WGRAD], gradients.lm_head, y, dlogits, NULL, first > 0);
        mark_product(t, "lm_head", &head->bf16[GEMM_WGRAD]);
    }
    rmsnorm_backward(t->dx, gradients.norm, fused_amax(t, d->L - 1, SCALE_GRADIENT + DOWN_PROJ), t->dbranch, t->x_final, t->rstd_final,
                     root.norm, NULL, d->R, d->C, t->norm_workspace, t->stream);
    mark_bytes(t, "RMSNorm, backward", d->R * d->C * 6);
}

// The gradient x [R, N] of linear layer `id`'s result is there: as its two products read it.
static void gradient_ready(Trainer *t, LinearId id, int64_t l, const bf16 *x) {
    const int64_t N = t->precision.linear[id].N;
    const TensorSource source = {x, N};
    if (is_fp8(t, l, id)) quantize(t, gradient_fp8(t, l, id), source, t->d.R, N, current_tensor_scales(t));
}

// dh -> gradient of gate and up, and h itself again for the down projection's weight gradient, in bf16 where products read that.
static void swiglu_backward_bf16(Trainer *t, int64_t l) {
    LayerActs *a = &t->acts[l];
    bf16 *h = recipe_is_fp8(recipe_of(t, l, DOWN_PROJ), GEMM_WGRAD) ? NULL : a->input[DOWN_PROJ].bf16_data;
    bf16 *dgate_up = recipe_needs_bf16(recipe_of(t, l, GATE_UP_PROJ), TENSOR_DY) ? t->dgate_up : NULL;
    if (!h && !dgate_up) return;
    swiglu_backward(dgate_up, h, t->dh, a->gate_up, t->d.R, t->d.F, t->stream);
    mark_bytes(t, "SwiGLU, backward", t->d.R * t->d.F * (6 + (h ? 2 : 0) + (dgate_up ? 4 : 0)));
}

// The same for FP8. With current tensor scales the pass that finds the gradient's amax writes h on its way.
static void swiglu_backward_fp8(Trainer *t, int64_t l) {
    const Dims *d = &t->d;
    LayerActs *a = &t->acts[l];
    const SwigluSource source = {a->gate_up, d->F};
    const SwigluGradientSource gradient = {t->dh, a->gate_up, d->F};
    const bool h_fp8 = recipe_is_fp8(recipe_of(t, l, DOWN_PROJ), GEMM_WGRAD);
    uint32_t *amax = fused_amax(t, l, SCALE_GRADIENT + GATE_UP_PROJ);
    Fp8Tensor h = input_fp8(t, l, DOWN_PROJ);
    h.row = NULL;
    if (amax) {
        if (!h_fp8) h.col = NULL;
        swiglu_backward_amax(amax, h, t->dh, a->gate_up, d->R, d->F, t->stream);
        mark_bytes(t, "amax passes", d->R * d->F * (6 + (h.col ? 1 : 0)));
    } else if (h_fp8) {
        quantize(t, h, source, d->R, d->F, true);
    }
    if (is_fp8(t, l, GATE_UP_PROJ)) quantize(t, gradient_fp8(t, l, GATE_UP_PROJ), gradient, d->R, d->F, amax != NULL);
}

// t->dx: from the gradient of the layer's output to that of its input. Weight gradients go where fsdp_gradients says.
static void layer_backward(Trainer *t, int64_t l) {
    const Dims *d = &t->d;
    LayerActs *a = &t->acts[l];
    const FsdpUnit gradients = layer_gradients(t, l);
    const LayerNorms w = layer_norms(t, layer_weights(t, l).vectors), dw = layer_norms(t, gradients.vectors);
    if (t->o->recompute == RECOMPUTE_LAYER) layer_forward_until_mlp(t, l, NULL, NULL);

    gradient_ready(t, DOWN_PROJ, l, t->dx);
    linear_backward_input(t, DOWN_PROJ, l, t->dh);
    swiglu_backward_bf16(t, l);
    swiglu_backward_fp8(t, l);
    linear_backward_weight(t, DOWN_PROJ, l);
    linear_backward_input(t, GATE_UP_PROJ, l, t->dbranch);
    linear_backward_weight(t, GATE_UP_PROJ, l);
    rmsnorm_backward(t->dx, dw.norm2, fused_amax(t, l, SCALE_GRADIENT + OUT_PROJ), t->dbranch, a->x_mid, a->rstd2,
                     w.norm2, t->dx, d->R, d->C, t->norm_workspace, t->stream);
    mark_bytes(t, "RMSNorm, backward", d->R * d->C * 8);

    gradient_ready(t, OUT_PROJ, l, t->dx);
    linear_backward_input(t, OUT_PROJ, l, t->datt);
    linear_backward_weight(t, OUT_PROJ, l);
    const bf16 *qkv = t->m.qk_norm ? rotate_forward(t, a, &w) : a->qkv;
    attention_backward(t->dqkv, t->datt, qkv, a->att, a->lse, t->attention_workspace, attention_dims(t), t->stream);
    profile_mark(&t->profile, "attention, backward", PROFILE_FLOPS_BF16, 2.5 * attention_flops(t));
    qknorm_rope_backward(t->dqkv, dw.q_norm, dw.k_norm, fused_amax(t, l, SCALE_GRADIENT + QKV_PROJ), t->m.qk_norm ? a->qkv : NULL, w.q_norm, w.k_norm, t->rope_table,
                         rope_dims(t), t->attention_sums, t->stream);
    mark_bytes(t, "RoPE and QK-norm, backward", d->R * (d->NH + d->NKV) * d->HD * (t->m.qk_norm ? 6 : 4));
    if (t->m.qkv_bias)
        bias_backward(gradients.vectors + t->table.layer.bq, t->dqkv, d->R, d->QKV, t->attention_sums, t->stream);
    gradient_ready(t, QKV_PROJ, l, t->dqkv);
    linear_backward_input(t, QKV_PROJ, l, t->dbranch);
    linear_backward_weight(t, QKV_PROJ, l);
    rmsnorm_backward(t->dx, dw.norm1, fused_amax(t, l - 1, SCALE_GRADIENT + DOWN_PROJ), t->dbranch, a->x_in, a->rstd1,
                     w.norm1, t->dx, d->R, d->C, t->norm_workspace, t->stream);
    mark_bytes(t, "RMSNorm, backward", d->R * d->C * 8);
}

// The part of the embedding's gradient that this rank makes of inputs' gradients, of other ranks' too or of its own alone.
static EmbeddingPart embedding_part(const Trainer *t) {
    const Fsdp *f = &t->fsdp;
    const ShardSegment g = shard_segment(&t->table, &f->plan, 0, embedding_segment(&t->table));
    const EmbeddingPart kept = {f->plan.place * g.slice, g.slice}, whole = {0, f->plan.group * g.slice};
    return f->embedding_ranks > 1 ? kept : whole;
}

// The embedding's gradient joins this rank's part of the sum. Where it is lm_head's too, that one has joined before;
// else the first micro-step clears the part.
static void embedding_join(Trainer *t, const TokenSlot *slot, const bf16 *dx) {
    Fsdp *f = &t->fsdp;
    const ShardSegment g = shard_segment(&t->table, &f->plan, 0, embedding_segment(&t->table));
    const EmbeddingPart part = embedding_part(t);
    const bool clear = !t->m.tie_word_embeddings && !f->sum.add;
    const int64_t rows = f->embedding_ranks * t->d.R,
                  element = f->fp32_grads ? (int64_t)sizeof(float) : (int64_t)sizeof(bf16);
    void *sum = f->fp32_grads ? (void *)(f->grads_fp32 + g.shard) : (void *)(f->grads + g.shard);
    GradientSum rounding = fsdp_sum_of(f, g, 0);
    rounding.key = f->embedding_key;
    if (clear) CUDA_CHECK(cudaMemsetAsync(sum, 0, (size_t)(part.count * element), t->stream));
    if (f->fp32_grads)
        embedding_backward((float *)sum, part, dx, slot->device + 2 * t->d.R, rows, t->d.C, rounding, t->stream);
    else embedding_backward((bf16 *)sum, part, dx, slot->device + 2 * t->d.R, rows, t->d.C, rounding, t->stream);
}

// Gradient of the embedding, at the end of the way back.
static void embedding_backward_all(Trainer *t, const TokenSlot *slot) {
    const Dims *d = &t->d;
    Fsdp *f = &t->fsdp;
    const EmbeddingPart part = embedding_part(t);
    const GradientSum nearest = {};
    const bf16 *dx = fsdp_gather_inputs(f, t->dx);
    if (fsdp_embedding_joins(f)) embedding_join(t, slot, dx);
    else {
        bf16 *gradient = root_gradients(t).embedding;  // a tied embedding's already holds lm_head's
        if (!t->m.tie_word_embeddings)
            CUDA_CHECK(cudaMemsetAsync(gradient, 0, (size_t)part.count * sizeof(bf16), t->stream));
        embedding_backward(gradient, part, dx, slot->device + 2 * d->R, d->R, d->C, nearest, t->stream);
    }
    mark_bytes(t, "embedding", f->embedding_ranks * d->R * d->C * 6);
}

// A unit's gradient is computed: it joins the sum of the micro-steps before, of all ranks of the
// shard group.
static void gradients_computed(Trainer *t, int64_t unit) {
    const Fsdp *f = &t->fsdp;
    fsdp_reduce_scatter(&t->fsdp, unit);  // travels while the layer below computes
    const int64_t elements = segment_begin(shard_slices(&f->plan, unit), fsdp_reduced_segments(f));
    const int64_t bytes = 2 + (f->sum.add + 1) * (f->fp32_grads ? 4 : 2);
    if (!f->sharded && !fsdp_in_place(f)) mark_bytes(t, "sums over micro-steps", elements * bytes);
}

// Delayed recipe: the amaxes of this micro-step's inputs and gradients, over all ranks, enter their histories.
static void update_delayed_scales(Trainer *t) {
    fsdp_reduce_amaxes(&t->fsdp, COMM_WORLD);
    const DelayedArrays d = delayed_arrays(t);
    delayed_update_all(&d, t->d.L, SCALE_INPUT, NUM_SCALES, t->stream);
    if (!t->delayed_before) t->has_history = true;  // else when a step is known to stay
}

// Forward and backward of a micro-step on one batch, after fsdp_begin_micro_step. Gradients of the loss times
// grad_scale replace those that were there, or join those of the micro-steps before; after the last one, and
// fsdp_compute_after, the gradients are their sum over all ranks.
static void model_forward_backward(Trainer *t, const TokenSlot *slot, float grad_scale, bool last) {
    Fsdp *f = &t->fsdp;
    model_forward(t, slot);
    fsdp_begin_loss(f);
    profile_range_begin("loss", -1);
    loss_forward_backward(t, slot, grad_scale);
    if (fsdp_embedding_joins(f)) gradients_computed(t, 0);
    profile_range_end();
    for (int64_t l = t->d.L - 1; l >= 0; l--) {
        profile_range_begin("backward of layer", l);
        gather_layer(t, l - 1);
        acquire_layer(t, l, true);
        fsdp_begin_gradients(f, 1 + l);
        layer_backward(t, l);
        release_layer(t, l);
        gradients_computed(t, 1 + l);
        fsdp_reduce_replicas(f, 1 + l, last);
        profile_range_end();
    }
    embedding_backward_all(t, slot);
    if (!fsdp_embedding_joins(f)) gradients_computed(t, 0);
    fsdp_reduce_replicas(f, 0, last);
    if (t->delayed_scale) update_delayed_scales(t);
}

// ---------------------------------------------------------------------------------------------------------------------
// Optimizer

// The weights have changed: their FP8 copies follow, and what is gathered. Amaxes of this rank's part of each weight are known where scales are of tensors.
static void layers_changed(Trainer *t) {
    Fsdp *f = &t->fsdp;
    if (f->fp8 && fsdp_tensor_scales(f)) fsdp_reduce_amaxes(f, COMM_SHARD);
    if (t->delayed_scale && !t->has_history) {
        const DelayedArrays d = delayed_arrays(t);
        delayed_begin(&d, t->d.L, SCALE_WEIGHT, SCALE_INPUT, t->stream);
    }
    fsdp_layers_changed(f);
}

// Whether the update hangs on the gradient norm: to clip by it, or to leave a step out. Otherwise AdamW takes the norm along, and a step whose norm is not
// finite ends the run before anything of it is saved.
static bool norm_comes_first(const Options *o) { return o->grad_clip > 0 || o->on_nonfinite == NONFINITE_SKIP; }

// This rank's gradients as AdamW reads them.
static AdamwGradients gradient_array(const Trainer *t) {
    const AdamwGradients g = {t->grads, t->fsdp.grads_fp32};
    return g;
}

// t->squares of this rank's gradients -> the norm over all ranks, and what follows from it. Stays on the device, and is the same on all ranks.
static void finish_norm(Trainer *t) {
    Fsdp *f = &t->fsdp;
    fsdp_reduce_statistics(f, &t->stats->loss, t->squares);
    adamw_norm(&t->stats->control, t->squares, fsdp_gradient_copies(f), gradient_array(t),
               shard_backward_order(&t->table, &f->plan), (float)t->o->grad_clip, t->stream);
}

// AdamW on this rank's shard, and the FP8 weights that follow from it.
static void optimizer_step(Trainer *t, int64_t step) {
    const Options *o = t->o;
    Fsdp *f = &t->fsdp;
    const ShardPlan *plan = &f->plan;
    const bool norm_first = norm_comes_first(o);
    double *workspace = (double *)t->gemm.workspace;  // no product runs beside the optimizer
    const AdamwStep s = adamw_step(step + 1, schedule_learning_rate(o, step), o->beta1, o->beta2, o->eps, o->weight_decay, o->master_weights == STORAGE_BF16_NEAREST,
                                     (uint64_t)o->seed);
    const AdamwArrays arrays = {
        t->weights, t->master, t->exp_avg, t->exp_avg_sq, o->optimizer_state == STORAGE_FP32, gradient_array(t)};
    const AdamwUpdate update = {arrays, s, norm_first ? &t->stats->control : NULL, norm_first ? NULL : workspace};
    fsdp_compute_after(f);
    profile_mark(&t->profile, "gradients: waiting", PROFILE_WAIT, 0);
    if (norm_first) {
        adamw_squares(t->squares, gradient_array(t), plan->total, workspace, t->stream);
        mark_bytes(t, "gradient norm", plan->total * (f->fp32_grads ? 4 : 2));
        finish_norm(t);
    }
    adamw_update_root(&update, &t->table, plan, t->stream);
    fsdp_root_changed(f);
    if (t->delayed_scale) {  // the amaxes of the weights' last cast enter their histories
        const DelayedArrays d = delayed_arrays(t);
        delayed_update_all(&d, t->d.L, SCALE_WEIGHT, SCALE_INPUT, t->stream);
    }
    if (t->delayed_before) delayed_restore(t->amax_history, t->delayed_before, delayed_elements(t),
                                           &t->stats->control.nonfinite, t->stream);
    if (t->amaxes) clear_amaxes(t, SCALE_WEIGHT, SCALE_INPUT);
    adamw_update_layers(&update, &t->table, plan, f->fp8 && fsdp_tensor_scales(f) ? t->amax + t->amax_at[SCALE_WEIGHT] : NULL, t->amaxes, t->stream);
    if (!norm_first) {
        adamw_updated_squares(t->squares, &update, &t->table, plan, t->stream);
        finish_norm(t);
    }
    mark_bytes(t, "AdamW",
               plan->total *
                   ((f->fp32_grads ? 4 : 2) + 2 * 2 * storage_bytes(o->optimizer_state) + (t->master ? 10 : 4)));
    layers_changed(t);
    profile_mark(&t->profile, "weights: FP8 casts, gathers", PROFILE_WAIT, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// One step

// The host waits for an event. With several ranks it watches over them meanwhile.
static void trainer_wait(Trainer *t, cudaEvent_t event) {
    if (t->fsdp.nccl) nccl_wait(t->fsdp.nccl, event);
    else CUDA_CHECK(cudaEventSynchronize(event));
}

// The same for all that has been enqueued.
static void trainer_wait_all(Trainer *t) {
    fsdp_compute_after(&t->fsdp);
    CUDA_CHECK(cudaEventRecord(t->idle, t->stream));
    trainer_wait(t, t->idle);
}

// Sends B sequences from sample number `first` to the GPU and returns where they will be; the ranks of the shard group have the samples next to these.
// The host waits only when all slots are in flight.
static TokenSlot *send_batch(Trainer *t, DataLoader *data, int64_t first) {
    const Dims *d = &t->d;
    const int64_t ranks = t->fsdp.embedding_ranks, place = ranks > 1 ? t->fsdp.plan.place : 0;
    TokenSlot *slot = &t->tokens[t->batches_sent++ % TOKEN_SLOTS];
    int32_t *inputs = t->shared_tokens, *targets = inputs + ranks * d->R;
    trainer_wait(t, slot->copied);
    dataloader_batch(data, first - place * d->B, ranks * d->B, inputs, targets);
    memcpy(slot->host, inputs + place * d->R, (size_t)d->R * sizeof(int32_t));
    memcpy(slot->host + d->R, targets + place * d->R, (size_t)d->R * sizeof(int32_t));
    embedding_sort(slot->host + 2 * d->R, inputs, ranks * d->R, d->C, embedding_part(t));
    CUDA_CHECK(cudaMemcpyAsync(slot->device, slot->host, (size_t)batch_bytes(t), cudaMemcpyHostToDevice, t->stream));
    CUDA_CHECK(cudaEventRecord(slot->copied, t->stream));
    return slot;
}

// Delayed recipe with --on-nonfinite skip: keeps histories and scales as they are before a step, or brings them back.
static void copy_delayed_before(Trainer *t, bool keep) {
    float *to = keep ? t->delayed_before : t->amax_history, *from = keep ? t->amax_history : t->delayed_before;
    if (t->delayed_before) CUDA_CHECK(cudaMemcpyAsync(to, from, (size_t)delayed_elements(t) * sizeof(float),
                                                      cudaMemcpyDeviceToDevice, t->stream));
}

// Enqueues a whole optimizer step, of all ranks on the samples from first_sample on; its statistics arrive in t->host_stats when t->step_done has happened.
static void enqueue_step(Trainer *t, DataLoader *data, int64_t step, int64_t first_sample) {
    const Options *o = t->o;
    const double tokens = (double)(t->comm->world * t->d.R * o->grad_accumulation_steps);
    t->nccl.step = step;
    activity_phase(PHASE_TRAINING, step + 1);
    profile_range_begin("step", step + 1);
    if (o->profile && step + 1 == o->num_steps) profile_begin(&t->profile, t->stream);
    t->fsdp.audit = t->auditing ? t->audit : NULL;
    CUDA_CHECK(cudaMemsetAsync(&t->stats->loss, 0, sizeof t->stats->loss, t->stream));
    CUDA_CHECK(cudaMemsetAsync(&t->stats->bad_norm, 0xff, sizeof t->stats->bad_norm, t->stream));
    copy_delayed_before(t, true);
    for (int64_t micro = 0; micro < o->grad_accumulation_steps; micro++) {
        const TokenSlot *slot = send_batch(t, data, dataloader_sample_index(first_sample, micro, t->comm->world, t->comm->rank, t->d.B));
        fsdp_begin_micro_step(&t->fsdp, step, micro);
        model_forward_backward(t, slot, (float)(1 / tokens), micro + 1 == o->grad_accumulation_steps);
        loss_accumulate(&t->stats->loss, t->row_losses, t->d.R, 1 / tokens, t->stream);
    }
    profile_range_begin("optimizer", -1);
    optimizer_step(t, step);
    profile_range_end();
    t->fsdp.audit = NULL;
    profile_end(&t->profile);
    CUDA_CHECK(cudaMemcpyAsync(&t->host_stats[step % STEP_SLOTS], t->stats, sizeof(StepStats), cudaMemcpyDeviceToHost, t->stream));
    CUDA_CHECK(cudaEventRecord(t->step_done[step % STEP_SLOTS], t->stream));
    profile_range_end();
}

// ---------------------------------------------------------------------------------------------------------------------
// Validation and samples

// Mean loss of the first --val-steps sequences of the validation data. Ranks whose rows of the last batch are beyond
// them compute as the others do, and count nothing. NAN if a stop was requested meanwhile.
static double validation_loss(Trainer *t, DataLoader *data) {
    const int64_t world = t->comm->world, sequences = min_i64(t->o->val_steps, data->num_sequences);
    CUDA_CHECK(cudaMemsetAsync(&t->stats->loss, 0, sizeof t->stats->loss, t->stream));
    for (int64_t i = 0; i * world * t->d.B < sequences; i++) {
        if (stop_requested(t->comm)) {
            trainer_wait_all(t);  // what comes next may take long and not look at NCCL
            return (double)NAN;
        }
        const int64_t first = dataloader_sample_index(0, i, world, t->comm->rank, t->d.B),
                      rows = dataloader_rows_before(first, t->d.B, sequences);
        const TokenSlot *slot = send_batch(t, data, first);
        model_forward(t, slot);
        loss_forward(t, slot);
        if (rows)
            loss_accumulate(&t->stats->loss, t->row_losses, rows * t->d.T, 1 / (double)(sequences * t->d.T), t->stream);
    }
    fsdp_reduce_statistics(&t->fsdp, &t->stats->loss, NULL);
    trainer_wait_all(t);
    float loss;
    CUDA_CHECK(cudaMemcpy(&loss, &t->stats->loss, sizeof loss, cudaMemcpyDeviceToHost));
    return loss;
}

// Logits of the last of `length` tokens, which stand first among those that the model runs over: causal attention sees nothing of what follows.
static const float *next_logits(void *context, const int32_t *tokens, int64_t length) {
    Trainer *t = (Trainer *)context;
    const Dims *d = &t->d;
    TokenSlot *slot = &t->tokens[0];
    trainer_wait_all(t);
    memset(slot->host, 0, (size_t)d->R * sizeof(int32_t));
    memcpy(slot->host, tokens, (size_t)length * sizeof(int32_t));
    CUDA_CHECK(cudaMemcpyAsync(slot->device, slot->host, (size_t)d->R * sizeof(int32_t), cudaMemcpyHostToDevice, t->stream));
    model_forward(t, slot);
    const int64_t last = length - 1, first = last / t->chunk * t->chunk;
    logits_forward(t, first, min_i64(t->chunk, d->R - first));
    trainer_wait_all(t);
    bf16_bits *row = (bf16_bits *)xcalloc((size_t)d->V, sizeof *row);
    CUDA_CHECK(cudaMemcpy(row, t->logits + (last - first) * d->V, (size_t)d->V * sizeof *row, cudaMemcpyDeviceToHost));
    for (int64_t v = 0; v < d->V; v++) t->sample_logits[v] = bf16_to_float(row[v]);
    free(row);
    return t->sample_logits;
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints

// Between ordinary host memory and the GPU, behind what has been enqueued; done on return. (The default stream waits for no other.)
static void copy_in_order(const Trainer *t, void *to, const void *from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, t->stream));
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
}

static int64_t state_element_bytes(const Trainer *t, StateKind kind) {
    return storage_bytes(kind == STATE_WEIGHTS ? t->o->master_weights : t->o->optimizer_state);
}

static char *state_array(const Trainer *t, StateKind kind) {
    return (char *)(kind == STATE_EXP_AVG ? t->exp_avg : kind == STATE_EXP_AVG_SQ ? t->exp_avg_sq : t->master ? (void *)t->master : (void *)t->weights);
}

static void state_read(void *context, StateKind kind, int64_t offset, int64_t count, void *host) {
    const Trainer *t = (const Trainer *)context;
    const int64_t bytes = state_element_bytes(t, kind);
    copy_in_order(t, host, state_array(t, kind) + offset * bytes, (size_t)(count * bytes));
}

static void state_write(void *context, StateKind kind, int64_t offset, int64_t count, const void *host) {
    const Trainer *t = (const Trainer *)context;
    const int64_t bytes = state_element_bytes(t, kind);
    copy_in_order(t, state_array(t, kind) + offset * bytes, host, (size_t)(count * bytes));
}

static TrainerState trainer_state(Trainer *t) {
    TrainerState s;
    s.context = t;
    for (int kind = 0; kind < 3; kind++) s.is_fp32[kind] = state_element_bytes(t, (StateKind)kind) == 4;
    s.read = state_read, s.write = state_write;
    s.plan = &t->fsdp.plan, s.comm = t->comm;
    s.delayed = t->delayed_scale ? &t->delayed_state : NULL;
    return s;
}

// Delayed recipe: histories and scales to the host, or from it.
static void copy_delayed_state(Trainer *t, bool to_host) {
    DelayedState *d = &t->delayed_state;
    if (!t->delayed_scale) return;
    const size_t history = (size_t)(d->tensors * d->window) * sizeof(float), scale = (size_t)d->tensors * sizeof(float);
    copy_in_order(t, to_host ? d->history : t->amax_history, to_host ? t->amax_history : d->history, history);
    copy_in_order(t, to_host ? d->scale : t->delayed_scale, to_host ? t->delayed_scale : d->scale, scale);
}

// ---------------------------------------------------------------------------------------------------------------------
// Setting up

// What this trainer cannot do, whatever the GPU.
static void check_supported(const ModelConfig *m, const Options *o) {
    if (o->precision == PRECISION_FP32) die("--precision fp32 is the CPU trainer's (train_fp8); give bf16 or fp8 here");
    if (m->head_dim != 64 && m->head_dim != 128)
        die("model %s: head_dim = %lld; attention here takes 64 and 128 (the CPU trainer, train_fp8, takes any)", m->name, (long long)m->head_dim);
    if (m->hidden_size > RMSNORM_MAX_C) die("model %s: hidden_size = %lld; RMSNorm here takes up to %d", m->name, (long long)m->hidden_size, RMSNORM_MAX_C);
    const struct { const char *name; int64_t value; } sizes[] = {{"hidden_size", m->hidden_size}, {"intermediate_size", m->intermediate_size}, {"vocab_size", m->vocab_size}};
    for (int i = 0; i < 3; i++) {
        const int multiple = i == 2 ? 8 : 16;
        if (sizes[i].value % multiple)
            die("model %s: %s = %lld is not a multiple of %d, which the GPU's matrix products need", m->name, sizes[i].name, (long long)sizes[i].value, multiple);
    }
}

// The cast of SwiGLU's gradient in blocks walks whole tiles of the intermediate size.
static void check_casts(const Trainer *t) {
    const Recipe *r = t->precision.recipe;
    const Grain gradient = recipe_grain(r, TENSOR_DY, COPY_ROW);
    if (gradient == GRAIN_BF16 || copy_amaxes(gradient, 1) || t->d.F % CAST_TILE == 0) return;
    for (int64_t l = 0; l < t->d.L; l++)
        if (is_fp8(t, l, GATE_UP_PROJ))
            die("model %s: intermediate_size = %lld is not a multiple of %d, which the cast of SwiGLU's gradient by --fp8-recipe %s needs; take another recipe, or --fp8-filter gate_up",
                t->m.name, (long long)t->d.F, CAST_TILE, r->name);
}

// A rank's GPU, as it tells the others.
typedef struct {
    char host[64];
    cudaUUID_t uuid;
    int visible;  // GPUs from which it has taken this one
} RankGpu;

// Finds the first two ranks i < j of a host that have the same GPU. False: there are none.
static bool find_shared_gpu(const RankGpu *gpus, int64_t world, int64_t *i, int64_t *j) {
    for (*j = 1; *j < world; ++*j)
        for (*i = 0; *i < *j; ++*i)
            if (strcmp(gpus[*i].host, gpus[*j].host) == 0 &&
                memcmp(&gpus[*i].uuid, &gpus[*j].uuid, sizeof gpus[*i].uuid) == 0) return true;
    return false;
}

// As nvidia-smi -L prints it.
static void format_uuid(char *out, size_t capacity, const cudaUUID_t *uuid) {
    const unsigned char *b = (const unsigned char *)uuid->bytes;
    format_checked(out, capacity, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                   b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

// Dies if two ranks of a host have the same GPU.
static void require_own_gpus(const RankGpu *gpus, int64_t world) {
    char uuid[64];
    int64_t i, j;
    if (!find_shared_gpu(gpus, world, &i, &j)) return;
    format_uuid(uuid, sizeof uuid, &gpus[j].uuid);
    die("ranks %lld and %lld on %s have the same GPU, %s: rank %lld sees %d there and rank %lld sees %d; every rank "
        "needs one of its own: mpirun -np %d, or a CUDA_VISIBLE_DEVICES for each rank that names another GPU",
        (long long)i, (long long)j, gpus[j].host, uuid, (long long)i, gpus[i].visible, (long long)j, gpus[j].visible,
        gpus[j].visible);
}

// The ranks of a host take the GPUs that they see in turn. A rank that sees one alone takes that.
static void choose_device(const Comm *comm, cudaDeviceProp *device) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0)
        die("no usable GPU (%s); the CPU trainer is train_fp8, and --dry-run needs no GPU", error != cudaSuccess ? cudaGetErrorString(error) : "none found");
    const int index = (int)(comm->local_rank % count);
    CUDA_CHECK(cudaGetDeviceProperties(device, index));
    RankGpu *gpus = (RankGpu *)xcalloc((size_t)comm->world, sizeof *gpus), *own = &gpus[comm->rank];
    memcpy(own->host, comm->host, sizeof own->host);
    own->uuid = device->uuid, own->visible = count;
    comm_all_gather(comm, COMM_WORLD, own, gpus, (int64_t)sizeof *own);
    require_own_gpus(gpus, comm->world);
    free(gpus);
    CUDA_CHECK(cudaSetDevice(index));
}

// Writes what `make` takes as CUDA_ARCH for GPUs of compute capability major.minor.
static void format_cuda_arch(char *out, size_t capacity, int major, int minor) {
    format_checked(out, capacity, "%d%s", 10 * major + minor, major == 9 ? "a" : "");  // wgmma is of sm_90a alone
}

// Dies unless the program holds code for the GPU.
static void check_architecture(const cudaDeviceProp *device) {
    char arch[16];
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, (const void *)gemm_alpha_kernel);
    if (error == cudaSuccess) return;
    if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction) CUDA_CHECK(error);
    format_cuda_arch(arch, sizeof arch, device->major, device->minor);
    die("this program was built for sm_%s and the GPU is %s with compute capability %d.%d; rebuild with "
        "make CUDA_ARCH=%s", CUDA_ARCH, device->name, device->major, device->minor, arch);
}

static void check_device(const Options *o, const Comm *comm, cudaDeviceProp *device) {
    choose_device(comm, device);
    if (device->major < 8) die("%s has compute capability %d.%d; 8.0 or above is needed", device->name, device->major, device->minor);
    check_architecture(device);
    if (o->precision == PRECISION_FP8 && !o->fp8_emulate) gemm_require_native(options_recipe(o));
}

// GPU memory that NCCL takes beside the arena, and all that is beside it.
static int64_t nccl_overhead(const Comm *comm) {
    return nccl_communicators(comm->world, comm->group) * NCCL_OVERHEAD_BYTES;
}

static int64_t memory_overhead(const Comm *comm) { return CUDA_OVERHEAD_BYTES + nccl_overhead(comm); }

static void check_memory(const Trainer *t, const Arena *plan, size_t available) {
    if ((size_t)plan->used <= available) return;
    die("the run needs %.1f GiB of GPU memory beside CUDA's own, and %.1f GiB are free; what would help: %s%s%s%s%s%sa smaller --batch-size or --sequence-length, or a smaller model",
        (double)plan->used / 1073741824, (double)available / 1073741824, t->comm->world > 1 ? "" : "more GPUs (mpirun -np N), ",
        t->comm->world > 1 && t->o->sharding != SHARDING_FULL ? "--sharding full, " : "", t->o->recompute == RECOMPUTE_LAYER ? "" : "--recompute layer, ",
        t->precision.any_fp8 ? (t->fsdp.cached ? "--fp8-weight-cache off, " : "") : "--precision fp8 (saves activations, costs FP8 weights), ", t->o->master_weights == STORAGE_FP32 ? "--master-weights bf16, " : "",
        t->o->optimizer_state == STORAGE_FP32 ? "--optimizer-state bf16, " : "");
}

// Sizes and the memory plan; touches no GPU.
static Arena trainer_describe(Trainer *t, const Options *o, const ModelConfig *m, const Comm *comm) {
    memset(t, 0, sizeof *t);
    t->o = o, t->m = *m, t->comm = comm;
    t->table = parameter_table(m);
    t->precision = precision_plan(o, o->fp8_filter, m, &t->table);
    fsdp_describe(&t->fsdp, &t->table, &t->precision, o, comm->world, comm->rank);
    if (o->fp8_weight_cache == ON && t->fsdp.sharded)
        die("--fp8-weight-cache on keeps FP8 copies of whole weights, and %lld ranks share them here; leave it off, or give --sharding none", (long long)t->fsdp.plan.group);
    t->d = model_dims(m, o->batch_size, o->sequence_length);
    t->chunk = logits_rows(t);
    t->acts = (LayerActs *)xcalloc((size_t)t->d.L, sizeof(LayerActs));
    describe_linears(t);
    Arena plan;
    memset(&plan, 0, sizeof plan);
    place(t, &plan);
    return plan;
}

static void fill_rope_table(Trainer *t) {
    const size_t bytes = (size_t)(t->d.T * t->d.HD) * sizeof(float);
    float *table = (float *)xcalloc(bytes, 1);
    rope_table_fill(table, &t->m, t->d.T);
    copy_in_order(t, t->rope_table, table, bytes);  // behind the clearing of its memory
    free(table);
}

// Lets the ranks that share a copy of the weights read each other's memory, where they can and may. If not, rank 0 says why for all.
static void open_peers(Trainer *t, int64_t bytes) {
    Fsdp *f = &t->fsdp;
    char reason[256] = "";
    if (!f->copies) return;
    const int64_t room = (f->plan.group - 1) * f->received_slice * (int64_t)sizeof(bf16);  // nothing is received yet
    if (peer_memory_open(&f->peers, t->comm, t->memory, bytes, f->arrivals, f->received, room, f->nccl->stream, reason,
                         sizeof reason)) return;
    const double first = comm_min(t->comm, COMM_WORLD, *reason ? (double)t->comm->rank : INFINITY);
    comm_broadcast(t->comm, COMM_WORLD, (int64_t)first, reason, (int64_t)sizeof reason);
    if (t->o->copy_engines == ON) die("--copy-engines on: %s", reason);
    printf("\nNCCL moves weights and gradients, because %s\n", reason);
}

// Takes the GPU memory, plans the matrix products, initializes weights and clears the rest.
static void trainer_create(Trainer *t, const Arena *plan) {
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking));
    if (t->comm->world > 1) {
        nccl_open(&t->nccl, t->comm);
        t->fsdp.nccl = &t->nccl;
    }
    t->fsdp.stream = t->stream;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    check_memory(t, plan, available - (size_t)min_i64((int64_t)available, nccl_overhead(t->comm)));
    CUDA_CHECK(cudaMalloc((void **)&t->memory, (size_t)plan->used));
    Arena arena;
    memset(&arena, 0, sizeof arena);
    arena.base = t->memory;
    place(t, &arena);
    fsdp_create(&t->fsdp);
    plan_products(t);
    if (t->delayed_scale) t->delayed_state = delayed_new(t->d.L, t->o->fp8_amax_history);
    CUDA_CHECK(cudaMemsetAsync(t->memory, 0, (size_t)plan->used, t->stream));
    initialize_parameters(t->weights, t->master, &t->table, &t->fsdp.plan, (float)t->m.initializer_range, (uint64_t)t->o->seed, t->stream);
    fill_rope_table(t);
    CUDA_CHECK(cudaMallocHost((void **)&t->host_stats, STEP_SLOTS * sizeof(StepStats)));
    for (int i = 0; i < STEP_SLOTS; i++) CUDA_CHECK(cudaEventCreate(&t->step_done[i]));
    CUDA_CHECK(cudaEventCreateWithFlags(&t->idle, cudaEventDisableTiming));
    for (int i = 0; i < TOKEN_SLOTS; i++) {
        CUDA_CHECK(cudaMallocHost((void **)&t->tokens[i].host, (size_t)batch_bytes(t)));
        CUDA_CHECK(cudaEventCreateWithFlags(&t->tokens[i].copied, cudaEventDisableTiming));
    }
    t->shared_tokens = (int32_t *)xcalloc((size_t)(2 * t->fsdp.embedding_ranks * t->d.R), sizeof *t->shared_tokens);
    t->sample_logits = (float *)xcalloc((size_t)t->d.V, sizeof *t->sample_logits);
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    open_peers(t, plan->used);
}

static void trainer_destroy(Trainer *t) {
    trainer_wait_all(t);
    for (int i = 0; i < NUM_LINEARS + 2; i++) {
        Linear *linear = i < NUM_LINEARS ? &t->linear[i] : i == NUM_LINEARS ? &t->lm_head : &t->lm_head_tail;
        for (int kind = 0; kind < NUM_GEMMS; kind++) {
            if (linear->bf16[kind].matmul) gemm_destroy(&linear->bf16[kind]);
            if (linear->fp8[kind].matmul) gemm_destroy(&linear->fp8[kind]);
        }
    }
    CUBLAS_CHECK(cublasLtDestroy(t->gemm.handle));
    for (int i = 0; i < TOKEN_SLOTS; i++) {
        CUDA_CHECK(cudaFreeHost(t->tokens[i].host));
        CUDA_CHECK(cudaEventDestroy(t->tokens[i].copied));
    }
    for (int i = 0; i < STEP_SLOTS; i++) CUDA_CHECK(cudaEventDestroy(t->step_done[i]));
    CUDA_CHECK(cudaEventDestroy(t->idle));
    CUDA_CHECK(cudaFreeHost(t->host_stats));
    free(t->shared_tokens);
    free(t->sample_logits);
    fsdp_destroy(&t->fsdp);
    comm_barrier(t->comm, COMM_WORLD);  // nobody reads from here any more
    peer_memory_close(&t->fsdp.peers);
    comm_barrier(t->comm, COMM_WORLD);  // nobody holds it open
    if (t->fsdp.nccl) nccl_close(t->fsdp.nccl);
    CUDA_CHECK(cudaFree(t->memory));
    CUDA_CHECK(cudaStreamDestroy(t->stream));
    if (t->delayed_scale) delayed_free(&t->delayed_state);
    precision_free(&t->precision);
    parameter_table_free(&t->table);
    free(t->acts);
}

__global__ static void round_weights_kernel(bf16 *weights, const float *master, int64_t n) {
    grid_dependency_wait();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) weights[i] = __float2bfloat16_rn(master[i]);
}

// The largest magnitude of this rank's part of linear layer i of layer l.
static void shard_amax(Trainer *t, int64_t l, int i) {
    const LinearShape *s = &t->precision.linear[i];
    const ShardRange r = shard_matrix(&t->table, &t->fsdp.plan, l, s->offset, s->N * s->K);
    if (r.count) tensor_amax(t->amax + l * t->amaxes + t->amax_at[SCALE_WEIGHT + i], t->weights + r.shard, r.count, t->stream);
}

// After the weights changed by other means than the optimizer: the bf16 copies of fp32 masters, the FP8 weights and what is gathered follow.
static void weights_changed(Trainer *t) {
    if (t->master) CUDA_LAUNCH(round_weights_kernel, 8 * device_sm_count(), 256, 0, t->stream, t->weights, t->master, t->fsdp.plan.total);
    fsdp_root_changed(&t->fsdp);
    if (t->amaxes) clear_amaxes(t, SCALE_WEIGHT, SCALE_INPUT);
    for (int64_t l = 0; t->fsdp.fp8 && fsdp_tensor_scales(&t->fsdp) && l < t->d.L; l++)
        for (int i = 0; i < NUM_LINEARS; i++) shard_amax(t, l, i);
    layers_changed(t);
    trainer_wait_all(t);
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

typedef struct {
    Trainer t;
    RunSetup setup;
    Logger logger;
    cudaEvent_t begin;        // of the first step that this process times
    int64_t skipped_in_a_row;
    int64_t memory;           // bytes in use on the GPU
    AuditSums *audit;         // [L, NUM_LINEARS, NUM_TENSORS, 2] sums of all audits; NULL: none
    bool timing_broken;       // something other than steps ran since the last step: the next one is timed from `begin`
} Run;

// Where element i of this rank's shard stands in the flat array of parameters.h.
static int64_t shard_to_flat(const Trainer *t, int64_t i) {
    for (int64_t unit = unit_count(&t->table) - 1;; unit--)
        for (int k = NUM_SEGMENTS - 1; k >= 0; k--) {
            const ShardSegment g = shard_segment(&t->table, &t->fsdp.plan, unit, k);
            if (i >= g.shard) return g.flat + t->fsdp.plan.place * g.slice + i - g.shard;
        }
}

// This rank's knowledge of a step that was not taken.
static NonfiniteStep nonfinite_step(const Trainer *t, const StepStats *stats) {
    const AdamwControl *c = &stats->control;
    const int64_t element = backward_position(shard_backward_order(&t->table, &t->fsdp.plan), (int64_t)c->position);
    const int64_t forward = stats->bad_norm == UINT32_MAX ? NONFINITE_NONE : (int64_t)stats->bad_norm;
    const NonfiniteStep s = {stats->loss, c->gradient_norm, forward, c->largest,
                             backward_position(backward_order(&t->table), shard_to_flat(t, element))};
    return s;
}

// The verdict on step `step`, counted from 0, is known.
static void report_verdict(Run *run, const StepStats *stats, int64_t step) {
    Trainer *t = &run->t;
    run->skipped_in_a_row = stats->control.nonfinite ? run->skipped_in_a_row + 1 : 0;
    if (!stats->control.nonfinite) {
        t->has_history = t->delayed_scale != NULL;
        return;
    }
    const TrainerState state = trainer_state(t);
    const NonfiniteStep what = nonfinite_step(t, stats);
    trainer_wait_all(t);  // weights are read now, which may take long and does not watch over NCCL
    nonfinite_report(t->o, &t->table, &state, &what, step, run->skipped_in_a_row);
}

// Waits for step `step` and prints its line.
static void report_step(Run *run, int64_t step) {
    Trainer *t = &run->t;
    trainer_wait(t, t->step_done[step % STEP_SLOTS]);
    const StepStats stats = t->host_stats[step % STEP_SLOTS];
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, run->timing_broken ? run->begin : t->step_done[(step + STEP_SLOTS - 1) % STEP_SLOTS], t->step_done[step % STEP_SLOTS]));
    run->timing_broken = false;
    if (!run->memory) {
        size_t available = 0, total = 0;
        CUDA_CHECK(cudaMemGetInfo(&available, &total));
        run->memory = (int64_t)(total - available);
    }
    const StepRecord record = {step + 1, stats.loss, stats.control.gradient_norm, schedule_learning_rate(t->o, step), ms * 1e-3, run->memory, stats.control.nonfinite != 0};
    report_verdict(run, &stats, step);
    logger_step(&run->logger, &record);
}

// Sequences seen when `steps_done` steps are done. Counted on from where the run was resumed: batch size and accumulation may differ from then on.
static int64_t samples_seen(const Run *run, int64_t steps_done) {
    return run->setup.start.samples + (steps_done - run->setup.start.step) * run->t.o->grad_accumulation_steps * run->t.comm->world * run->t.d.B;
}

static void save_checkpoint(Run *run, int64_t steps_done, bool last) {
    Trainer *t = &run->t;
    trainer_wait_all(t);
    const TrainerProgress progress = {steps_done, samples_seen(run, steps_done)};
    const TrainerState state = trainer_state(t);
    copy_delayed_state(t, true);
    run_save(&run->setup, t->o, &progress, &t->table, &state, last, &run->logger);
}

// What the casts of the last step did to their tensors, on all ranks, to the log and the run's sums.
static void report_audit(Run *run, int64_t steps_done) {
    Trainer *t = &run->t;
    const int64_t count = audit_count(&t->precision);
    AuditSums *sums = (AuditSums *)xcalloc((size_t)count, sizeof *sums);
    trainer_wait_all(t);
    CUDA_CHECK(cudaMemcpy(sums, t->audit, (size_t)count * sizeof *sums, cudaMemcpyDeviceToHost));
    audit_finish(t->comm, &run->logger, steps_done, sums, run->audit, &t->precision);
    free(sums);
}

// Everything that happens between steps. `stop`: the signal that ends the run here, 0: none. Returns that, or one that has come meanwhile.
static int between_steps(Run *run, int64_t done, Due due, int stop) {
    const Options *o = run->t.o;
    if (due.audit) report_audit(run, done);
    if (!stop && due.validate) {
        activity_phase(PHASE_VALIDATION, done);
        const double loss = validation_loss(&run->t, &run->setup.val);
        stop = stop_requested(run->t.comm);
        if (!isnan(loss) || !stop) logger_validation(&run->logger, done, loss);
    }
    if (!stop && due.sample) sampler_print(o, run->t.comm, &run->t.m, &run->setup.tokenizer, done, next_logits, &run->t);
    // all steps were skipped, and these passes gave tensors their first scales
    if (!run->t.has_history) copy_delayed_before(&run->t, false);
    if (!stop) stop = stop_requested(run->t.comm);
    if (due.save || (stop && *o->checkpoint_dir)) save_checkpoint(run, done, due.last || stop);
    return stop;
}

// Steps until --num-steps or a stop signal. Returns how many are done, and in *stop that signal, 0 for none.
static int64_t train(Run *run, int *stop) {
    Trainer *t = &run->t;
    const Options *o = t->o;
    CUDA_CHECK(cudaEventCreate(&run->begin));
    run->timing_broken = true;
    CUDA_CHECK(cudaEventRecord(run->begin, t->stream));
    int64_t step = run->setup.start.step, reported = step;
    for (*stop = 0; step < o->num_steps && !*stop; step++) {
        t->auditing = is_due(o->fp8_audit, step + 1);
        if (t->auditing) CUDA_CHECK(cudaMemsetAsync(t->audit, 0, (size_t)audit_count(&t->precision) * sizeof(AuditSums), t->stream));
        enqueue_step(t, &run->setup.train, step, samples_seen(run, step));
        t->auditing = false;
        // The line of a step is printed while the next one runs, so that the GPU never waits for the host; before anything else happens, all are.
        const int64_t done = step + 1;
        const Due due = schedule_due(o, done);
        *stop = stop_requested(t->comm);
        const bool pause = *stop || due.last || due.audit || due.validate || due.sample || due.save;
        while (reported < (pause ? done : step)) report_step(run, reported++);
        if (!pause) continue;
        *stop = between_steps(run, done, due, *stop);
        run->timing_broken = true;
        CUDA_CHECK(cudaEventRecord(run->begin, t->stream));
    }
    CUDA_CHECK(cudaEventDestroy(run->begin));
    return step;
}

#ifndef TESTING

static void print_gathers(const Trainer *t) {
    const Fsdp *f = &t->fsdp;
    if (f->sharded) printf("%-26s %s\n", "layers are gathered in", !f->fp8_gather ? "bf16" : t->precision.any_bf16 ? "FP8 where all of them is" : "FP8");
}

// How weights and gradients travel, which is known when the ranks have met.
static void print_transport(const Trainer *t) {
    const Fsdp *f = &t->fsdp;
    if (f->world == 1) return;
    if (f->peers.ranks) printf("\nlayers and gradients travel by the GPUs' copy engines; gradients are added up in fp32%s\n", f->replicas == 1 ? "" : ", over replicas by NCCL");
    else printf("\nlayers and gradients travel by NCCL; gradients are reduced in %s\n", f->fp32_reduce ? "fp32" : "bf16");
}

static void format_versions(char *out, size_t capacity) {
    int nccl = 0;
    NCCL_CHECK(ncclGetVersion(&nccl));
    format_checked(out, capacity, "CUDA %d, cuBLASLt %zu, NCCL %d.%d.%d", CUDART_VERSION, cublasLtGetVersion(), nccl / 10000, nccl / 100 % 100, nccl % 100);
}

// --fp8-filter auto becomes what rank 0 finds to be faster in bf16.
static void find_filter(RunSetup *setup, Options *o, const Comm *comm) {
    ParameterTable table = parameter_table(&setup->model);
    Precision all = precision_plan(o, "", &setup->model, &table);
    if (comm->rank == 0) auto_filter(setup->fp8_filter, sizeof setup->fp8_filter, &all, o, o->batch_size * o->sequence_length, NULL);
    comm_broadcast(comm, COMM_WORLD, 0, setup->fp8_filter, sizeof setup->fp8_filter);
    o->fp8_filter = setup->fp8_filter;
    precision_free(&all);
    parameter_table_free(&table);
}

// Without a checkpoint or a model's weights, those stay that trainer_create has made.
static void load_start(Run *run) {
    Trainer *t = &run->t;
    const TrainerState state = trainer_state(t);
    if (run_load(&run->setup, &t->table, &state) && *run->setup.checkpoint) {
        copy_delayed_state(t, false);
        t->has_history = t->delayed_scale && delayed_is_complete(&t->delayed_state);
    }
    comm_barrier(t->comm, COMM_WORLD);  // some take long to read: the others wait here, not in a kernel of NCCL
    weights_changed(t);
}

// The GPU, and what is to be known of the run before anything is planned: the checkpoint to go on from, and what --fp8-filter auto stands for.
static void prepare(Run *run, Options *o, const Comm *comm, cudaDeviceProp *device) {
    RunSetup *setup = &run->setup;
    check_device(o, comm, device);
    run_setup_resume(setup, o, comm);
    run_setup_check_room(setup, o, comm);
    if (strcmp(o->fp8_filter, "auto") == 0) find_filter(setup, o, comm);
    if (o->fp8_filter == setup->fp8_filter) printf("--fp8-filter auto: %s%s\n", *o->fp8_filter ? "the same as --fp8-filter " : "nothing stays bf16", o->fp8_filter);
}

static void print_plan(const Run *run, const Options *o, const Comm *comm, const Arena *plan) {
    const Trainer *t = &run->t;
    run_print(&run->setup, o, comm, &t->table, &t->fsdp.plan, &t->precision);
    print_gathers(t);
    arena_print_plan(plan, memory_overhead(comm));
}

int main(int argc, char **argv) {
    char presets[1024], versions[256];
    process_prepare();
    Comm comm = comm_open(&argc, &argv);
    model_config_preset_names(presets, sizeof presets);
    Options o = options_parse(argc, argv);
    watch_open(&comm, o.stall_timeout);
    output_survive(&o);
    run_setup_same_options(&comm, &o, "train_fp8cu");
    options_require_model(&o, argc, argv, presets);
    Run run;
    cudaDeviceProp device;
    memset(&run, 0, sizeof run);
    run.setup = run_setup(&o, &comm);
    check_supported(&run.setup.model, &o);
    if (o.world_size) comm_assume(&comm, o.world_size);
    comm_split(&comm, options_shard_group(&o, comm.world));
    if (!o.dry_run) prepare(&run, &o, &comm, &device);
    const Arena plan = trainer_describe(&run.t, &o, &run.setup.model, &comm);
    check_casts(&run.t);
    print_plan(&run, &o, &comm, &plan);
    if (o.dry_run) {
        print_precisions(&run.t);
        return 0;
    }
    stop_catch();
    trainer_create(&run.t, &plan);
    print_transport(&run.t);
    print_precisions(&run.t);
    load_start(&run);
    format_versions(versions, sizeof versions);
    const RunInfo info = {"train_fp8cu", device.name, versions, comm.world, o.peak_tflops > 0 ? o.peak_tflops * 1e12 : flops_peak_bf16(device.major, device.minor, device.name), run.setup.start.step > 0};
    run.logger = logger_open(&o, &run.setup.model, &run.t.table, &run.t.precision, info);
    if (o.fp8_audit) run.audit = (AuditSums *)xcalloc((size_t)audit_count(&run.t.precision), sizeof *run.audit);
    printf("\n%s, %s\n", device.name, versions);
    int stop;
    const int64_t steps_done = train(&run, &stop);
    if (o.fp8_audit) audit_print_table(run.audit, &run.t.precision);
    if (run.t.profile.count) profile_print(&run.t.profile, info.peak_bf16, profile_copy_rate((char *)run.t.logits, run.t.chunk * run.t.d.V, run.t.stream));
    logger_close(&run.logger);
    const TrainerState state = trainer_state(&run.t);
    run_end(&run.setup, &o, stop, steps_done, &run.t.table, &state);
    free(run.audit);
    trainer_destroy(&run.t);
    run_setup_close(&run.setup);
    watch_close();
    comm_close(&comm);
    return 0;
}

#endif
