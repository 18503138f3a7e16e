// train_fp8cu: pre-trains Llama and Qwen models on one GPU, in BF16 or FP8 (E4M3/E5M2, tensorwise current scaling).
//
// From top to bottom: sizes and storage, the linear layer, the model's forward pass, its backward pass, the optimizer, the step, validation
// and samples, checkpoints, and main. train_fp8.c is the same model in plain C on the CPU.

#include <cuda_runtime.h>
#include <signal.h>

#include "llmc/adamw.cuh"
#include "llmc/arena.h"
#include "llmc/attention.cuh"
#include "llmc/cross_entropy.cuh"
#include "llmc/cuda_utils.cuh"
#include "llmc/embedding.cuh"
#include "llmc/gemm.cuh"
#include "llmc/initialize.cuh"
#include "llmc/logger.h"
#include "llmc/model_config.h"
#include "llmc/options.h"
#include "llmc/parameters.h"
#include "llmc/quantize.cuh"
#include "llmc/rmsnorm.cuh"
#include "llmc/rope.cuh"
#include "llmc/run_setup.h"
#include "llmc/sampler.h"
#include "llmc/schedule.h"
#include "llmc/swiglu.cuh"
#include "llmc/utils.h"

// ---------------------------------------------------------------------------------------------------------------------
// Sizes and storage

// Rows of logits that exist at a time: large enough to keep the products efficient, small beside T x V.
#define LOGITS_CHUNK_ROWS 2048

// Batches of tokens on their way to the GPU.
#define TOKEN_SLOTS 4

// Steps whose statistics and end events are kept: the one that runs, the one that is reported, and the one before, from whose end it is timed.
#define STEP_SLOTS 3

// What cudaMemGetInfo shows beside our arena: context, kernels, cuBLASLt. Measured on H200, CUDA 13.0.
#define CUDA_OVERHEAD_BYTES (640ll << 20)

typedef struct {
    int64_t B, T, R;       // sequences, tokens each, rows R = B*T
    int64_t V, C, F, L;    // vocabulary, hidden, intermediate, layers
    int64_t NH, NKV, HD;   // heads
    int64_t QKV, ATT;      // columns of the packed q, k, v and of the attention output
    int64_t chunk;         // rows of logits at a time
} Dims;

// The four linear layers of a block.
typedef enum { QKV_PROJ, OUT_PROJ, GATE_UP_PROJ, DOWN_PROJ, NUM_LINEARS } LinearId;

// One FP8 scale per quantized tensor of a layer: its weights, the inputs of its products, the gradients of their outputs.
typedef enum {
    SCALE_WEIGHT,                                // + LinearId
    SCALE_INPUT = SCALE_WEIGHT + NUM_LINEARS,    // + LinearId
    SCALE_GRADIENT = SCALE_INPUT + NUM_LINEARS,  // + LinearId
    NUM_SCALES = SCALE_GRADIENT + NUM_LINEARS
} ScaleId;

typedef struct {
    const char *name;
    int64_t N, K;       // weight [N, K]
    int64_t offset;     // of the weight in the layer's unit
    GemmPlan fprop, dgrad, wgrad;
} Linear;

// A matrix that matrix products read: in BF16 runs one bf16 copy, in FP8 runs a row-major and a transposed FP8 copy.
typedef struct {
    bf16 *bf16_data;
    Fp8Tensor fp8;
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
    AdamwControl control;   // gradient norm, and whether the step was applied
} StepStats;

// One batch in flight: pinned host memory and its copy on the GPU.
typedef struct {
    int32_t *host, *device;    // inputs [R], targets [R], then the embedding's sorted index
    cudaEvent_t copied;
} TokenSlot;

typedef struct {
    const Options *o;
    ModelConfig m;
    ParameterTable table;
    Dims d;
    bool fp8;
    cudaStream_t stream;
    Gemm gemm;
    Linear linear[NUM_LINEARS];
    Linear lm_head, lm_head_tail;     // for a full chunk of rows and for what is left
    char *memory;                     // the arena

    bf16 *weights, *grads;            // [total] flat arrays of parameters.h
    float *master;                    // [total] fp32 masters, or NULL
    void *exp_avg, *exp_avg_sq;       // [total] bf16 or fp32
    uint8_t *weights_fp8, *weights_fp8_t;  // per layer and linear layer, [N, K] and [K, N]
    uint32_t *amax;                   // [L, NUM_SCALES]
    float *inverse_scale;             // [L, NUM_SCALES, 4]; cuBLASLt wants 16-byte alignment

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
    void *attention_workspace, *norm_workspace, *rope_workspace, *adamw_workspace;
    float *rope_table;                // [T, HD] cos, sin
    StepStats *stats;                 // on the device
    StepStats *host_stats;            // [STEP_SLOTS] pinned
    cudaEvent_t step_done[STEP_SLOTS];
    TokenSlot tokens[TOKEN_SLOTS];
    int64_t batches_sent;
} Trainer;

static Dims make_dims(const ModelConfig *m, const Options *o) {
    Dims d;
    d.B = o->batch_size, d.T = o->sequence_length, d.R = d.B * d.T;
    d.V = m->vocab_size, d.C = m->hidden_size, d.F = m->intermediate_size, d.L = m->num_layers;
    d.NH = m->num_heads, d.NKV = m->num_kv_heads, d.HD = m->head_dim;
    d.QKV = model_qkv_size(m), d.ATT = d.NH * d.HD;
    d.chunk = min_i64(d.R, LOGITS_CHUNK_ROWS);
    return d;
}

static bf16 *take_bf16(Arena *a, int64_t n) { return (bf16 *)arena_take(a, n * (int64_t)sizeof(bf16)); }
static float *take_float(Arena *a, int64_t n) { return (float *)arena_take(a, n * (int64_t)sizeof(float)); }
static uint8_t *take_bytes(Arena *a, int64_t n) { return (uint8_t *)arena_take(a, n); }

static Fp8Tensor fp8_tensor(const Trainer *t, int64_t l, int scale, Fp8Format format, uint8_t *row, uint8_t *col) {
    Fp8Tensor q;
    q.row = row, q.col = col, q.format = format;
    q.amax = t->amax + l * NUM_SCALES + scale;
    q.inverse_scale = t->inverse_scale + (l * NUM_SCALES + scale) * 4;
    return q;
}

// The bf16 weight of a linear layer and its FP8 copies.
static bf16 *linear_weight(const Trainer *t, const Linear *linear, int64_t l) { return t->weights + layer_offset(&t->table, l) + linear->offset; }

static Fp8Tensor linear_weight_fp8(const Trainer *t, LinearId id, int64_t l) {
    int64_t elements = 0, before = 0;
    for (int i = 0; i < NUM_LINEARS; i++) {
        if (i == id) before = elements;
        elements += t->linear[i].N * t->linear[i].K;
    }
    return fp8_tensor(t, l, SCALE_WEIGHT + id, FP8_E4M3, t->weights_fp8 + l * elements + before, t->weights_fp8_t + l * elements + before);
}

static void place_parameters(Trainer *t, Arena *a) {
    const int64_t n = t->table.total, state_bytes = t->o->optimizer_state == STORAGE_FP32 ? 4 : 2;
    arena_group(a, "weights (bf16)");
    t->weights = take_bf16(a, n);
    arena_group(a, "master weights (fp32)");
    t->master = t->o->master_weights == STORAGE_FP32 ? take_float(a, n) : NULL;
    arena_group(a, t->o->optimizer_state == STORAGE_FP32 ? "optimizer state (fp32)" : "optimizer state (bf16)");
    t->exp_avg = arena_take(a, n * state_bytes);
    t->exp_avg_sq = arena_take(a, n * state_bytes);
    arena_group(a, "gradients (bf16)");
    t->grads = take_bf16(a, n);
    arena_group(a, "FP8 weights and their transposes");
    if (t->fp8) {
        int64_t elements = 0;
        for (int i = 0; i < NUM_LINEARS; i++) elements += t->linear[i].N * t->linear[i].K;
        t->weights_fp8 = take_bytes(a, t->d.L * elements);
        t->weights_fp8_t = take_bytes(a, t->d.L * elements);
    }
}

// The input of linear layer `id`, [R, linear.K]. The row-major FP8 copy dies after the forward product, so layers share one (`row`).
static GemmInput place_input(Trainer *t, Arena *a, LinearId id, uint8_t *row) {
    GemmInput input;
    memset(&input, 0, sizeof input);
    const int64_t n = t->d.R * t->linear[id].K;
    if (t->fp8) {
        input.fp8.row = row;
        input.fp8.col = take_bytes(a, n);
    } else {
        input.bf16_data = take_bf16(a, n);
    }
    return input;
}

// What one layer keeps, but its input x_in and the input of its down projection, which backward makes again from gate_up.
static void place_layer_acts(Trainer *t, Arena *a, LayerActs *acts, uint8_t *row) {
    const Dims *d = &t->d;
    acts->x_mid = take_bf16(a, d->R * d->C);
    acts->rstd1 = take_float(a, d->R);
    acts->rstd2 = take_float(a, d->R);
    acts->qkv = take_bf16(a, d->R * d->QKV);
    acts->att = take_bf16(a, d->R * d->ATT);
    acts->lse = take_float(a, d->R * d->NH);
    acts->gate_up = take_bf16(a, d->R * 2 * d->F);
    acts->input[QKV_PROJ] = place_input(t, a, QKV_PROJ, row);
    acts->input[GATE_UP_PROJ] = place_input(t, a, GATE_UP_PROJ, row);
    acts->input[OUT_PROJ] = place_input(t, a, OUT_PROJ, row);
    if (!t->fp8) acts->input[OUT_PROJ].bf16_data = acts->att;
}

static void place_activations(Trainer *t, Arena *a) {
    const Dims *d = &t->d;
    const bool recompute = t->o->recompute == RECOMPUTE_LAYER;
    arena_group(a, "activations of one layer at a time");
    uint8_t *row = t->fp8 ? take_bytes(a, d->R * max_i64(max_i64(d->C, d->ATT), d->F)) : NULL;
    GemmInput down_input = place_input(t, a, DOWN_PROJ, row);
    LayerActs shared;
    memset(&shared, 0, sizeof shared);
    if (recompute) place_layer_acts(t, a, &shared, row);
    t->branch = take_bf16(a, d->R * d->C);
    t->qkv_rotated = t->m.qk_norm ? take_bf16(a, d->R * d->QKV) : NULL;
    arena_group(a, "activations kept for backward");
    for (int64_t l = 0; l < d->L; l++) {
        LayerActs *acts = &t->acts[l];
        if (recompute) *acts = shared;
        else place_layer_acts(t, a, acts, row);
        acts->x_in = take_bf16(a, d->R * d->C);
        acts->input[DOWN_PROJ] = down_input;
        for (int i = 0; i < NUM_LINEARS; i++)
            if (t->fp8) acts->input[i].fp8 = fp8_tensor(t, l, SCALE_INPUT + i, FP8_E4M3, acts->input[i].fp8.row, acts->input[i].fp8.col);
    }
    t->x_final = take_bf16(a, d->R * d->C);
    t->y_final = take_bf16(a, d->R * d->C);
    t->rstd_final = take_float(a, d->R);
}

static void place_backward(Trainer *t, Arena *a) {
    const Dims *d = &t->d;
    arena_group(a, "gradients of activations");
    t->dx = take_bf16(a, d->R * d->C);
    t->dbranch = take_bf16(a, d->R * d->C);
    t->dh = take_bf16(a, d->R * d->F);
    t->datt = take_bf16(a, d->R * d->ATT);
    t->dqkv = take_bf16(a, d->R * d->QKV);
    memset(t->dy, 0, sizeof t->dy);
    if (t->fp8) {
        const int64_t n = d->R * max_i64(d->C, d->QKV), wide = d->R * 2 * d->F;
        uint8_t *row = take_bytes(a, n), *col = take_bytes(a, n), *wide_row = take_bytes(a, wide), *wide_col = take_bytes(a, wide);
        for (int i = 0; i < NUM_LINEARS; i++) {
            t->dy[i].fp8.row = i == GATE_UP_PROJ ? wide_row : row;
            t->dy[i].fp8.col = i == GATE_UP_PROJ ? wide_col : col;
        }
    } else {
        t->dgate_up = take_bf16(a, d->R * 2 * d->F);
        t->dy[QKV_PROJ].bf16_data = t->dqkv;
        t->dy[OUT_PROJ].bf16_data = t->dx;
        t->dy[GATE_UP_PROJ].bf16_data = t->dgate_up;
        t->dy[DOWN_PROJ].bf16_data = t->dx;
    }
}

// Gives every pointer its place. On an arena without memory this is the memory plan.
static void place(Trainer *t, Arena *a) {
    const Dims *d = &t->d;
    place_parameters(t, a);
    arena_group(a, "scales, statistics, tokens");
    t->amax = (uint32_t *)arena_take(a, d->L * NUM_SCALES * (int64_t)sizeof(uint32_t));
    t->inverse_scale = take_float(a, d->L * NUM_SCALES * 4);
    t->stats = (StepStats *)arena_take(a, sizeof(StepStats));
    t->row_losses = take_float(a, d->R);
    t->rope_table = take_float(a, d->T * d->HD);
    for (int i = 0; i < TOKEN_SLOTS; i++) t->tokens[i].device = (int32_t *)arena_take(a, embedding_batch_bytes(d->R));
    place_activations(t, a);
    place_backward(t, a);
    arena_group(a, "logits of one chunk");
    t->logits = take_bf16(a, d->chunk * d->V);
    arena_group(a, "workspaces");
    t->attention_workspace = arena_take(a, (int64_t)attention_workspace_bytes(d->B, d->T, d->NH, d->NKV, d->HD));
    t->norm_workspace = arena_take(a, (int64_t)rmsnorm_workspace_bytes(d->R, d->C));
    t->rope_workspace = arena_take(a, (int64_t)rope_workspace_bytes(d->R, d->NH, d->NKV, d->HD));
    t->adamw_workspace = arena_take(a, (int64_t)adamw_workspace_bytes());
    t->gemm.workspace = arena_take(a, GEMM_WORKSPACE_BYTES);
}

// ---------------------------------------------------------------------------------------------------------------------
// The linear layer

static void describe_linears(Trainer *t) {
    const Dims *d = &t->d;
    const LayerOffsets *w = &t->table.layer;
    const Linear linears[NUM_LINEARS] = {{"qkv", d->QKV, d->C, w->wq, {}, {}, {}}, {"attn_out", d->C, d->ATT, w->wo, {}, {}, {}},
                                         {"gate_up", 2 * d->F, d->C, w->wgate, {}, {}, {}}, {"down", d->C, d->F, w->wdown, {}, {}, {}}};
    memcpy(t->linear, linears, sizeof linears);
    t->lm_head.name = t->lm_head_tail.name = "lm_head";
    t->lm_head.N = t->lm_head_tail.N = d->V;
    t->lm_head.K = t->lm_head_tail.K = d->C;
}

static void print_precisions(const Trainer *t) {
    const char *x = t->fp8 ? "e4m3" : "bf16", *dy = t->fp8 ? "e5m2" : "bf16";
    printf("\nmatrix products (row-major; fp32 accumulation, bf16 results)\n  %-10s %-6s %9s %9s %9s  %-12s %s\n", "layer", "pass", "rows", "columns", "depth", "operands", "scales");
    for (int i = 0; i < NUM_LINEARS + 1; i++) {
        const bool head = i == NUM_LINEARS;
        const Linear *linear = head ? &t->lm_head : &t->linear[i];
        const long long R = head ? t->d.chunk : t->d.R, N = linear->N, K = linear->K;
        const char *input = head ? "bf16" : x, *gradient = head ? "bf16" : dy, *scales = t->fp8 && !head ? "tensorwise, current" : "none";
        printf("  %-10s %-6s %9lld %9lld %9lld  %s x %s  %s%s\n", linear->name, "fprop", R, N, K, input, input, scales, t->fp8 && !head ? ", fast accumulation" : "");
        printf("  %-10s %-6s %9lld %9lld %9lld  %s x %s  %s\n", linear->name, "dgrad", R, K, N, gradient, input, scales);
        printf("  %-10s %-6s %9lld %9lld %9lld  %s x %s  %s\n", linear->name, "wgrad", N, K, R, gradient, input, scales);
    }
}

static GemmOperand operand_row(const Trainer *t, const GemmInput *x) {
    GemmOperand o = {t->fp8 ? (const void *)x->fp8.row : (const void *)x->bf16_data, t->fp8 ? x->fp8.inverse_scale : NULL};
    return o;
}

// The operand of a product that contracts over rows: FP8 reads the transposed copy.
static GemmOperand operand_col(const Trainer *t, const GemmInput *x) {
    GemmOperand o = {t->fp8 ? (const void *)x->fp8.col : (const void *)x->bf16_data, t->fp8 ? x->fp8.inverse_scale : NULL};
    return o;
}

static GemmInput weight_input(const Trainer *t, LinearId id, int64_t l) {
    GemmInput w;
    memset(&w, 0, sizeof w);
    if (t->fp8) w.fp8 = linear_weight_fp8(t, id, l);
    else w.bf16_data = linear_weight(t, &t->linear[id], l);
    return w;
}

// y [R, N] = x [R, K] w^T, and for Qwen2's q, k, v: + bias.
static void linear_forward(Trainer *t, LinearId id, int64_t l, bf16 *y, const GemmInput *x) {
    const GemmInput w = weight_input(t, id, l);
    const bf16 *bias = id == QKV_PROJ && t->m.qkv_bias ? t->weights + layer_offset(&t->table, l) + t->table.layer.bq : NULL;
    gemm_run(&t->gemm, &t->linear[id].fprop, y, operand_row(t, &w), operand_row(t, x), bias, false);
}

// dx [R, K] = dy [R, N] w
static void linear_backward_input(Trainer *t, LinearId id, int64_t l, bf16 *dx) {
    const GemmInput w = weight_input(t, id, l);
    gemm_run(&t->gemm, &t->linear[id].dgrad, dx, operand_col(t, &w), operand_row(t, &t->dy[id]), NULL, false);
}

// dw [N, K] = dy^T [N, R] x [R, K], added to what earlier micro-steps left when `accumulate`.
static void linear_backward_weight(Trainer *t, LinearId id, int64_t l, const GemmInput *x, bool accumulate) {
    bf16 *dw = t->grads + layer_offset(&t->table, l) + t->linear[id].offset;
    gemm_run(&t->gemm, &t->linear[id].wgrad, dw, operand_col(t, x), operand_col(t, &t->dy[id]), NULL, accumulate);
}

// Random bytes that are finite numbers of ordinary size in every format, for timing: constant data would run faster than real data.
__global__ static void fill_for_timing_kernel(uint64_t *out, int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        out[i] = (rng_u64(1, (uint64_t)i) & 0x8f8f8f8f8f8f8f8full) | 0x3030303030303030ull;
}

// Chooses a product's algorithm on scratch operands at the start of the arena, which nothing uses yet and which is larger than any product.
static void plan_product(Trainer *t, GemmPlan *p) {
    const int64_t width_a = gemm_is_fp8(p->type_a) ? 1 : 2, width_b = gemm_is_fp8(p->type_b) ? 1 : 2;
    const int64_t bytes_a = width_a * p->K * (p->kind == GEMM_WGRAD ? p->R : p->N);
    const int64_t bytes_b = width_b * p->R * (p->kind == GEMM_FPROP ? p->K : p->N);
    char *a = t->memory, *b = a + round_up(bytes_a, ARENA_ALIGNMENT), *d = b + round_up(bytes_b, ARENA_ALIGNMENT);
    const float *scale = (const float *)a;
    const GemmOperand operand_a = {a, scale}, operand_b = {b, scale};
    fill_for_timing_kernel<<<4 * device_sm_count(), 256, 0, t->stream>>>((uint64_t *)a, (d - a) / 8);
    CUDA_CHECK_LAUNCH();
    gemm_choose(&t->gemm, p, (bf16 *)d, operand_a, operand_b, (const bf16 *)a);
}

// The three products of a linear layer over R rows.
static void plan_linear(Trainer *t, Linear *linear, int64_t R, bool fp8, bool bias) {
    const cudaDataType x = fp8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF, dy = fp8 ? CUDA_R_8F_E5M2 : CUDA_R_16BF;
    linear->fprop = gemm_describe(linear->name, GEMM_FPROP, R, linear->N, linear->K, x, x, bias);
    linear->dgrad = gemm_describe(linear->name, GEMM_DGRAD, R, linear->N, linear->K, x, dy, false);
    linear->wgrad = gemm_describe(linear->name, GEMM_WGRAD, R, linear->N, linear->K, x, dy, false);
    plan_product(t, &linear->fprop);
    plan_product(t, &linear->dgrad);
    plan_product(t, &linear->wgrad);
}

static void plan_products(Trainer *t) {
    CUBLAS_CHECK(cublasLtCreate(&t->gemm.handle));
    t->gemm.stream = t->stream;
    t->gemm.deterministic = t->o->deterministic;
    for (int i = 0; i < NUM_LINEARS; i++) plan_linear(t, &t->linear[i], t->d.R, t->fp8, i == QKV_PROJ && t->m.qkv_bias);
    plan_linear(t, &t->lm_head, t->d.chunk, false, false);
    if (t->d.R % t->d.chunk) plan_linear(t, &t->lm_head_tail, t->d.R % t->d.chunk, false, false);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// The weights of one layer that are not linear layers.
typedef struct {
    bf16 *norm1, *norm2, *q_norm, *k_norm;  // q_norm and k_norm: NULL without QK-norm
} LayerNorms;

static LayerNorms layer_norms(const Trainer *t, bf16 *flat, int64_t l) {
    const LayerOffsets *offset = &t->table.layer;
    bf16 *unit = flat + layer_offset(&t->table, l);
    LayerNorms w = {unit + offset->norm1, unit + offset->norm2, t->m.qk_norm ? unit + offset->q_norm : NULL, t->m.qk_norm ? unit + offset->k_norm : NULL};
    return w;
}

static AttentionDims attention_dims(const Trainer *t) {
    AttentionDims a = {t->d.B, t->d.T, t->d.NH, t->d.NKV, t->d.HD, t->o->deterministic};
    return a;
}

static RopeDims rope_dims(const Trainer *t) {
    RopeDims r = {t->d.B, t->d.T, t->d.NH, t->d.NKV, t->d.HD, (float)t->m.rms_norm_eps};
    return r;
}

// y = RMSNorm(x) as the next product reads it. With `delta`, first x = residual + delta.
static void norm_forward(Trainer *t, GemmInput *y, bf16 *x, float *rstd, const bf16 *residual, const bf16 *delta, const bf16 *weight) {
    const float eps = (float)t->m.rms_norm_eps;
    uint32_t *amax = t->fp8 ? y->fp8.amax : NULL;
    if (delta) residual_rmsnorm_forward(x, y->bf16_data, rstd, amax, residual, delta, weight, t->d.R, t->d.C, eps, t->stream);
    else rmsnorm_forward(y->bf16_data, rstd, amax, x, weight, t->d.R, t->d.C, eps, t->stream);
    if (t->fp8) rmsnorm_quantize_transpose(y->fp8, x, rstd, weight, t->d.R, t->d.C, t->stream);
}

// q, k, v as attention reads them: rotated in place, or beside the product's result, which QK-norm's backward needs.
static const bf16 *rotate_forward(Trainer *t, LayerActs *a, const LayerNorms *w) {
    bf16 *rotated = t->m.qk_norm ? t->qkv_rotated : a->qkv;
    qknorm_rope_forward(rotated, a->qkv, w->q_norm, w->k_norm, t->rope_table, rope_dims(t), t->stream);
    return rotated;
}

// One layer up to its gate and up projections: all that backward needs. acts->x_in = residual + delta, or is there already (delta NULL).
static void layer_forward_until_mlp(Trainer *t, int64_t l, const bf16 *residual, const bf16 *delta) {
    LayerActs *a = &t->acts[l];
    const LayerNorms w = layer_norms(t, t->weights, l);
    norm_forward(t, &a->input[QKV_PROJ], a->x_in, a->rstd1, residual, delta, w.norm1);
    linear_forward(t, QKV_PROJ, l, a->qkv, &a->input[QKV_PROJ]);
    const bf16 *qkv = rotate_forward(t, a, &w);
    attention_forward(a->att, a->lse, qkv, attention_dims(t), t->stream);
    if (t->fp8) tensor_quantize(a->input[OUT_PROJ].fp8, a->att, t->d.R, t->d.ATT, t->stream);
    linear_forward(t, OUT_PROJ, l, t->branch, &a->input[OUT_PROJ]);
    norm_forward(t, &a->input[GATE_UP_PROJ], a->x_mid, a->rstd2, a->x_in, t->branch, w.norm2);
    linear_forward(t, GATE_UP_PROJ, l, a->gate_up, &a->input[GATE_UP_PROJ]);
}

// The rest of the layer; its result t->branch joins the residual stream in the next layer's norm.
static void layer_forward_mlp(Trainer *t, int64_t l) {
    LayerActs *a = &t->acts[l];
    GemmInput *h = &a->input[DOWN_PROJ];
    if (t->fp8) {
        Fp8Tensor row_only = h->fp8;
        row_only.col = NULL;  // backward writes it
        swiglu_amax(h->fp8.amax, a->gate_up, t->d.R, t->d.F, t->stream);
        swiglu_quantize_transpose(row_only, a->gate_up, t->d.R, t->d.F, t->stream);
    } else {
        swiglu_forward(h->bf16_data, a->gate_up, t->d.R, t->d.F, t->stream);
    }
    linear_forward(t, DOWN_PROJ, l, t->branch, h);
}

// Embedding, all layers and the final norm: tokens in `slot` -> t->y_final [R, C].
static void model_forward(Trainer *t, const TokenSlot *slot) {
    const Dims *d = &t->d;
    if (t->fp8) CUDA_CHECK(cudaMemset2DAsync(t->amax + SCALE_INPUT, NUM_SCALES * sizeof(uint32_t), 0, (NUM_SCALES - SCALE_INPUT) * sizeof(uint32_t), (size_t)d->L, t->stream));
    embedding_forward(t->acts[0].x_in, t->weights + t->table.root.embedding, slot->device, d->R, d->C, t->stream);
    for (int64_t l = 0; l < d->L; l++) {
        layer_forward_until_mlp(t, l, l ? t->acts[l - 1].x_mid : NULL, l ? t->branch : NULL);
        layer_forward_mlp(t, l);
    }
    residual_rmsnorm_forward(t->x_final, t->y_final, t->rstd_final, NULL, t->acts[d->L - 1].x_mid, t->branch, t->weights + t->table.root.norm, d->R, d->C,
                             (float)t->m.rms_norm_eps, t->stream);
}

static int64_t lm_head_offset(const Trainer *t) { return t->m.tie_word_embeddings ? t->table.root.embedding : t->table.root.lm_head; }

// Logits of rows [first, first + rows) into t->logits.
static Linear *logits_forward(Trainer *t, int64_t first, int64_t rows) {
    Linear *head = rows == t->d.chunk ? &t->lm_head : &t->lm_head_tail;
    const GemmOperand w = {t->weights + lm_head_offset(t), NULL}, y = {t->y_final + first * t->d.C, NULL};
    gemm_run(&t->gemm, &head->fprop, t->logits, w, y, NULL, false);
    return head;
}

// Cross-entropy of every row into t->row_losses.
static void loss_forward(Trainer *t, const TokenSlot *slot) {
    const Dims *d = &t->d;
    for (int64_t first = 0; first < d->R; first += d->chunk) {
        const int64_t rows = min_i64(d->chunk, d->R - first);
        logits_forward(t, first, rows);
        cross_entropy_loss(t->row_losses + first, t->logits, slot->device + d->R + first, rows, d->V, t->stream);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// Loss of every row, and its way back through lm_head and the final norm: t->dx = gradient of the residual stream.
// Chunk by chunk, so that the logits never exist whole.
static void loss_forward_backward(Trainer *t, const TokenSlot *slot, float grad_scale, bool accumulate) {
    const Dims *d = &t->d;
    bf16 *dw = t->grads + lm_head_offset(t);
    for (int64_t first = 0; first < d->R; first += d->chunk) {
        const int64_t rows = min_i64(d->chunk, d->R - first);
        Linear *head = logits_forward(t, first, rows);
        cross_entropy_loss_and_gradient(t->row_losses + first, t->logits, slot->device + d->R + first, rows, d->V, grad_scale, t->stream);
        const GemmOperand w = {t->weights + lm_head_offset(t), NULL}, y = {t->y_final + first * d->C, NULL}, dlogits = {t->logits, NULL};
        gemm_run(&t->gemm, &head->dgrad, t->dbranch + first * d->C, w, dlogits, NULL, false);
        gemm_run(&t->gemm, &head->wgrad, dw, y, dlogits, NULL, accumulate || first > 0);
    }
    rmsnorm_backward(t->dx, t->grads + t->table.root.norm, t->fp8 ? t->amax + (d->L - 1) * NUM_SCALES + SCALE_GRADIENT + DOWN_PROJ : NULL, t->dbranch, t->x_final,
                     t->rstd_final, t->weights + t->table.root.norm, NULL, d->R, d->C, accumulate, t->norm_workspace, t->stream);
}

// The gradient x [R, N] of linear layer `id`'s result, as its two products read it. Its amax is known already.
static void gradient_ready(Trainer *t, LinearId id, int64_t l, const bf16 *x) {
    if (!t->fp8) return;
    GemmInput *dy = &t->dy[id];
    dy->fp8 = fp8_tensor(t, l, SCALE_GRADIENT + id, FP8_E5M2, dy->fp8.row, dy->fp8.col);
    if (x) quantize_transpose(dy->fp8, x, t->d.R, t->linear[id].N, t->stream);
}

// dh -> gradient of gate and up, and h itself again for the down projection's weight gradient.
static void swiglu_backward_all(Trainer *t, int64_t l) {
    const Dims *d = &t->d;
    LayerActs *a = &t->acts[l];
    GemmInput *h = &a->input[DOWN_PROJ];
    if (t->fp8) {
        Fp8Tensor col_only = h->fp8;
        col_only.row = NULL;
        gradient_ready(t, GATE_UP_PROJ, l, NULL);
        swiglu_backward_amax(t->dy[GATE_UP_PROJ].fp8.amax, col_only, t->dh, a->gate_up, d->R, d->F, t->stream);
        swiglu_backward_quantize_transpose(t->dy[GATE_UP_PROJ].fp8, t->dh, a->gate_up, d->R, d->F, t->stream);
    } else {
        swiglu_backward(t->dgate_up, h->bf16_data, t->dh, a->gate_up, d->R, d->F, t->stream);
    }
}

// t->dx: from the gradient of the layer's output to that of its input. Weight gradients go to t->grads.
static void layer_backward(Trainer *t, int64_t l, bool accumulate) {
    const Dims *d = &t->d;
    LayerActs *a = &t->acts[l];
    const LayerNorms w = layer_norms(t, t->weights, l), dw = layer_norms(t, t->grads, l);
    uint32_t *amax = t->amax + l * NUM_SCALES + SCALE_GRADIENT, *amax_below = l ? amax - NUM_SCALES : NULL;
    if (t->o->recompute == RECOMPUTE_LAYER) layer_forward_until_mlp(t, l, NULL, NULL);

    gradient_ready(t, DOWN_PROJ, l, t->dx);
    linear_backward_input(t, DOWN_PROJ, l, t->dh);
    swiglu_backward_all(t, l);
    linear_backward_weight(t, DOWN_PROJ, l, &a->input[DOWN_PROJ], accumulate);
    linear_backward_input(t, GATE_UP_PROJ, l, t->dbranch);
    linear_backward_weight(t, GATE_UP_PROJ, l, &a->input[GATE_UP_PROJ], accumulate);
    rmsnorm_backward(t->dx, dw.norm2, t->fp8 ? amax + OUT_PROJ : NULL, t->dbranch, a->x_mid, a->rstd2, w.norm2, t->dx, d->R, d->C, accumulate, t->norm_workspace, t->stream);

    gradient_ready(t, OUT_PROJ, l, t->dx);
    linear_backward_input(t, OUT_PROJ, l, t->datt);
    linear_backward_weight(t, OUT_PROJ, l, &a->input[OUT_PROJ], accumulate);
    const bf16 *qkv = t->m.qk_norm ? rotate_forward(t, a, &w) : a->qkv;
    attention_backward(t->dqkv, t->datt, qkv, a->att, a->lse, t->attention_workspace, attention_dims(t), t->stream);
    qknorm_rope_backward(t->dqkv, dw.q_norm, dw.k_norm, t->fp8 ? amax + QKV_PROJ : NULL, t->m.qk_norm ? a->qkv : NULL, w.q_norm, w.k_norm, t->rope_table, rope_dims(t),
                         accumulate, t->rope_workspace, t->stream);
    if (t->m.qkv_bias)
        bias_backward(t->grads + layer_offset(&t->table, l) + t->table.layer.bq, t->dqkv, d->R, d->QKV, accumulate, t->rope_workspace, t->stream);
    gradient_ready(t, QKV_PROJ, l, t->dqkv);
    linear_backward_input(t, QKV_PROJ, l, t->dbranch);
    linear_backward_weight(t, QKV_PROJ, l, &a->input[QKV_PROJ], accumulate);
    rmsnorm_backward(t->dx, dw.norm1, t->fp8 && l ? amax_below + DOWN_PROJ : NULL, t->dbranch, a->x_in, a->rstd1, w.norm1, t->dx, d->R, d->C, accumulate, t->norm_workspace,
                     t->stream);
}

// Forward and backward of one batch. Gradients of the loss times grad_scale replace t->grads, or join it when `accumulate`.
static void model_forward_backward(Trainer *t, const TokenSlot *slot, float grad_scale, bool accumulate) {
    const Dims *d = &t->d;
    model_forward(t, slot);
    loss_forward_backward(t, slot, grad_scale, accumulate);
    for (int64_t l = d->L - 1; l >= 0; l--) layer_backward(t, l, accumulate);
    bf16 *dembedding = t->grads + t->table.root.embedding;
    const bool onto_lm_head = t->m.tie_word_embeddings;  // a tied embedding's gradient already holds lm_head's
    if (!onto_lm_head && !accumulate) CUDA_CHECK(cudaMemsetAsync(dembedding, 0, (size_t)(d->V * d->C) * sizeof(bf16), t->stream));
    embedding_backward(dembedding, t->dx, slot->device + 2 * d->R, d->R, d->C, t->stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Optimizer

// Casts every linear layer's weight to FP8 with its amax. Once a step, whatever the number of micro-steps.
static void cast_weights(Trainer *t) {
    for (int64_t l = 0; l < t->d.L; l++)
        for (int i = 0; i < NUM_LINEARS; i++)
            quantize_transpose(linear_weight_fp8(t, (LinearId)i, l), linear_weight(t, &t->linear[i], l), t->linear[i].N, t->linear[i].K, t->stream);
}

static void clear_weight_amax(Trainer *t) {
    CUDA_CHECK(cudaMemset2DAsync(t->amax, NUM_SCALES * sizeof(uint32_t), 0, NUM_LINEARS * sizeof(uint32_t), (size_t)t->d.L, t->stream));
}

// AdamW on the whole flat array, and the FP8 weights that follow from it. The gradient norm, the clip factor and the decision to skip a
// non-finite step stay on the device.
static void optimizer_step(Trainer *t, int64_t step) {
    const Options *o = t->o;
    const AdamwStep s = adamw_step(step + 1, schedule_learning_rate(o, step), o->beta1, o->beta2, o->eps, o->weight_decay, o->master_weights == STORAGE_BF16_NEAREST,
                                     (uint64_t)o->seed);
    const AdamwArrays arrays = {t->weights, t->master, t->exp_avg, t->exp_avg_sq, o->optimizer_state == STORAGE_FP32, t->grads};
    adamw_prepare(&t->stats->control, t->grads, t->table.total, s, (float)o->grad_clip, t->adamw_workspace, t->stream);
    if (t->fp8) clear_weight_amax(t);
    adamw_update_parameters(&arrays, &t->table, t->fp8 ? t->amax + SCALE_WEIGHT : NULL, NUM_SCALES, &t->stats->control, t->stream);
    if (t->fp8) cast_weights(t);
}

// ---------------------------------------------------------------------------------------------------------------------
// One step

// Sends B sequences from sample number `first` to the GPU and returns where they will be. The host waits only when all slots are in flight.
static TokenSlot *send_batch(Trainer *t, DataLoader *data, int64_t first) {
    const Dims *d = &t->d;
    TokenSlot *slot = &t->tokens[t->batches_sent++ % TOKEN_SLOTS];
    CUDA_CHECK(cudaEventSynchronize(slot->copied));
    dataloader_batch(data, first, d->B, slot->host, slot->host + d->R);
    embedding_sort(slot->host + 2 * d->R, slot->host, d->R);
    CUDA_CHECK(cudaMemcpyAsync(slot->device, slot->host, (size_t)embedding_batch_bytes(d->R), cudaMemcpyHostToDevice, t->stream));
    CUDA_CHECK(cudaEventRecord(slot->copied, t->stream));
    return slot;
}

// Enqueues a whole optimizer step on the samples from first_sample on; its statistics arrive in t->host_stats when t->step_done has happened.
static void enqueue_step(Trainer *t, DataLoader *data, int64_t step, int64_t first_sample) {
    const Options *o = t->o;
    const double tokens = (double)(t->d.R * o->grad_accumulation_steps);
    CUDA_CHECK(cudaMemsetAsync(&t->stats->loss, 0, sizeof t->stats->loss, t->stream));
    for (int64_t micro = 0; micro < o->grad_accumulation_steps; micro++) {
        const TokenSlot *slot = send_batch(t, data, first_sample + micro * t->d.B);
        model_forward_backward(t, slot, (float)(1 / tokens), micro > 0);
        loss_accumulate(&t->stats->loss, t->row_losses, t->d.R, 1 / tokens, t->stream);
    }
    optimizer_step(t, step);
    CUDA_CHECK(cudaMemcpyAsync(&t->host_stats[step % STEP_SLOTS], t->stats, sizeof(StepStats), cudaMemcpyDeviceToHost, t->stream));
    CUDA_CHECK(cudaEventRecord(t->step_done[step % STEP_SLOTS], t->stream));
}

// ---------------------------------------------------------------------------------------------------------------------
// Validation and samples

// Mean loss of the first --val-steps batches of the validation shards.
static float validation_loss(Trainer *t, DataLoader *data) {
    const int64_t batches = min_i64(t->o->val_steps, max_i64(1, dataloader_num_sequences(data) / t->d.B));
    CUDA_CHECK(cudaMemsetAsync(&t->stats->loss, 0, sizeof t->stats->loss, t->stream));
    for (int64_t i = 0; i < batches; i++) {
        const TokenSlot *slot = send_batch(t, data, i * t->d.B);
        model_forward(t, slot);
        loss_forward(t, slot);
        loss_accumulate(&t->stats->loss, t->row_losses, t->d.R, 1 / (double)(batches * t->d.R), t->stream);
    }
    float loss;
    CUDA_CHECK(cudaMemcpyAsync(&loss, &t->stats->loss, sizeof loss, cudaMemcpyDeviceToHost, t->stream));
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    return loss;
}

// Logits of position `position` of sequence 0, for the tokens in slot->host, as floats on the host.
static void position_logits(Trainer *t, TokenSlot *slot, int64_t position, float *logits) {
    const Dims *d = &t->d;
    CUDA_CHECK(cudaMemcpyAsync(slot->device, slot->host, (size_t)d->R * sizeof(int32_t), cudaMemcpyHostToDevice, t->stream));
    model_forward(t, slot);
    const int64_t first = position / d->chunk * d->chunk;
    logits_forward(t, first, min_i64(d->chunk, d->R - first));
    bf16_bits *row = (bf16_bits *)xcalloc((size_t)d->V, sizeof *row);
    CUDA_CHECK(cudaMemcpyAsync(row, t->logits + (position - first) * d->V, (size_t)d->V * sizeof *row, cudaMemcpyDeviceToHost, t->stream));
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    for (int64_t v = 0; v < d->V; v++) logits[v] = bf16_to_float(row[v]);
    free(row);
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints

static int64_t state_element_bytes(const Trainer *t, StateKind kind) {
    return kind == STATE_WEIGHTS ? (t->master ? 4 : 2) : (t->o->optimizer_state == STORAGE_FP32 ? 4 : 2);
}

static char *state_array(const Trainer *t, StateKind kind) {
    return (char *)(kind == STATE_EXP_AVG ? t->exp_avg : kind == STATE_EXP_AVG_SQ ? t->exp_avg_sq : t->master ? (void *)t->master : (void *)t->weights);
}

static void state_read(void *context, StateKind kind, int64_t offset, int64_t count, void *host) {
    const Trainer *t = (const Trainer *)context;
    const int64_t bytes = state_element_bytes(t, kind);
    CUDA_CHECK(cudaMemcpy(host, state_array(t, kind) + offset * bytes, (size_t)(count * bytes), cudaMemcpyDeviceToHost));
}

static void state_write(void *context, StateKind kind, int64_t offset, int64_t count, const void *host) {
    const Trainer *t = (const Trainer *)context;
    const int64_t bytes = state_element_bytes(t, kind);
    CUDA_CHECK(cudaMemcpy(state_array(t, kind) + offset * bytes, host, (size_t)(count * bytes), cudaMemcpyHostToDevice));
}

static TrainerState trainer_state(Trainer *t) {
    TrainerState s;
    s.context = t;
    for (int kind = 0; kind < 3; kind++) s.is_fp32[kind] = state_element_bytes(t, (StateKind)kind) == 4;
    s.read = state_read, s.write = state_write;
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// Setting up

// What this trainer cannot do, whatever the GPU.
static void check_supported(const ModelConfig *m, const Options *o) {
    if (o->precision == PRECISION_FP32) die("--precision fp32 is the CPU trainer's (train_fp8); give bf16 or fp8 here");
    if (m->head_dim != 64 && m->head_dim != 128)
        die("model %s: head_dim = %lld; attention here takes 64 and 128 (the CPU trainer, train_fp8, takes any)", m->name, (long long)m->head_dim);
    const struct { const char *name; int64_t value; } sizes[] = {{"hidden_size", m->hidden_size}, {"intermediate_size", m->intermediate_size}, {"vocab_size", m->vocab_size}};
    for (int i = 0; i < 3; i++) {
        const int multiple = i == 2 ? 8 : 16;
        if (sizes[i].value % multiple)
            die("model %s: %s = %lld is not a multiple of %d, which the GPU's matrix products need", m->name, sizes[i].name, (long long)sizes[i].value, multiple);
    }
}

static void check_device(const Options *o, cudaDeviceProp *device) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0)
        die("no usable GPU (%s); the CPU trainer is train_fp8, and --dry-run needs no GPU", error != cudaSuccess ? cudaGetErrorString(error) : "none found");
    CUDA_CHECK(cudaSetDevice(0));
    CUDA_CHECK(cudaGetDeviceProperties(device, 0));
    if (device->major < 8) die("%s has compute capability %d.%d; 8.0 or above is needed", device->name, device->major, device->minor);
    if (o->precision == PRECISION_FP8 && device->major * 10 + device->minor < 89)
        die("%s has compute capability %d.%d and no FP8 matrix products (8.9 or above has); use --precision bf16", device->name, device->major, device->minor);
}

static void check_memory(const Trainer *t, const Arena *plan, size_t available) {
    if ((size_t)plan->used <= available) return;
    arena_print_plan(plan, CUDA_OVERHEAD_BYTES);
    die("the run needs %.1f GiB of GPU memory beside CUDA's own, and %.1f GiB are free; what would help: %s%s%s%sa smaller --batch-size or --sequence-length, or a smaller model",
        (double)plan->used / 1073741824, (double)available / 1073741824, t->o->recompute == RECOMPUTE_LAYER ? "" : "--recompute layer, ",
        t->fp8 ? "" : "--precision fp8 (saves activations, costs FP8 weights), ", t->o->master_weights == STORAGE_FP32 ? "--master-weights bf16, " : "",
        t->o->optimizer_state == STORAGE_FP32 ? "--optimizer-state bf16, " : "");
}

// Sizes and the memory plan; touches no GPU.
static Arena trainer_describe(Trainer *t, const Options *o, const ModelConfig *m) {
    memset(t, 0, sizeof *t);
    t->o = o, t->m = *m;
    t->table = parameter_table(m);
    t->d = make_dims(m, o);
    t->fp8 = o->precision == PRECISION_FP8;
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
    CUDA_CHECK(cudaMemcpy(t->rope_table, table, bytes, cudaMemcpyHostToDevice));
    free(table);
}

// Takes the GPU memory, plans the matrix products, initializes weights and clears the rest.
static void trainer_create(Trainer *t, const Arena *plan) {
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    check_memory(t, plan, available);
    CUDA_CHECK(cudaMalloc((void **)&t->memory, (size_t)plan->used));
    Arena arena;
    memset(&arena, 0, sizeof arena);
    arena.base = t->memory;
    place(t, &arena);
    plan_products(t);
    CUDA_CHECK(cudaMemsetAsync(t->memory, 0, (size_t)plan->used, t->stream));
    initialize_parameters(t->weights, t->master, &t->table, (float)t->m.initializer_range, (uint64_t)t->o->seed, t->stream);
    fill_rope_table(t);
    CUDA_CHECK(cudaMallocHost((void **)&t->host_stats, STEP_SLOTS * sizeof(StepStats)));
    for (int i = 0; i < STEP_SLOTS; i++) CUDA_CHECK(cudaEventCreate(&t->step_done[i]));
    for (int i = 0; i < TOKEN_SLOTS; i++) {
        CUDA_CHECK(cudaMallocHost((void **)&t->tokens[i].host, (size_t)embedding_batch_bytes(t->d.R)));
        CUDA_CHECK(cudaEventCreateWithFlags(&t->tokens[i].copied, cudaEventDisableTiming));
    }
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
}

static void trainer_destroy(Trainer *t) {
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < NUM_LINEARS + 2; i++) {
        Linear *linear = i < NUM_LINEARS ? &t->linear[i] : i == NUM_LINEARS ? &t->lm_head : &t->lm_head_tail;
        if (!linear->fprop.matmul) continue;
        gemm_destroy(&linear->fprop);
        gemm_destroy(&linear->dgrad);
        gemm_destroy(&linear->wgrad);
    }
    CUBLAS_CHECK(cublasLtDestroy(t->gemm.handle));
    for (int i = 0; i < TOKEN_SLOTS; i++) {
        CUDA_CHECK(cudaFreeHost(t->tokens[i].host));
        CUDA_CHECK(cudaEventDestroy(t->tokens[i].copied));
    }
    for (int i = 0; i < STEP_SLOTS; i++) CUDA_CHECK(cudaEventDestroy(t->step_done[i]));
    CUDA_CHECK(cudaFreeHost(t->host_stats));
    CUDA_CHECK(cudaFree(t->memory));
    CUDA_CHECK(cudaStreamDestroy(t->stream));
    parameter_table_free(&t->table);
    free(t->acts);
}

__global__ static void round_weights_kernel(bf16 *weights, const float *master, int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) weights[i] = __float2bfloat16_rn(master[i]);
}

// After the weights changed by other means than the optimizer: the bf16 copies of fp32 masters and the FP8 weights follow.
static void weights_changed(Trainer *t) {
    if (t->master) round_weights_kernel<<<8 * device_sm_count(), 256, 0, t->stream>>>(t->weights, t->master, t->table.total);
    CUDA_CHECK_LAUNCH();
    if (t->fp8) {
        clear_weight_amax(t);
        for (int64_t l = 0; l < t->d.L; l++)
            for (int i = 0; i < NUM_LINEARS; i++)
                tensor_amax(t->amax + l * NUM_SCALES + SCALE_WEIGHT + i, linear_weight(t, &t->linear[i], l), t->linear[i].N * t->linear[i].K, t->stream);
        cast_weights(t);
    }
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

static volatile sig_atomic_t stop_signal;

static void request_stop(int signal_number) { stop_signal = signal_number; }

static void catch_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = request_stop;
    const int signals[] = {SIGTERM, SIGINT, SIGUSR1};
    for (int i = 0; i < 3; i++)
        if (sigaction(signals[i], &action, NULL)) die("sigaction: %s", strerror(errno));
}

typedef struct {
    Trainer t;
    RunSetup setup;
    Logger logger;
    cudaEvent_t begin;        // of the first step that this process times
    TrainerProgress start;    // where this process begins
    int64_t saved_step;
    int64_t skipped_in_a_row;
    int64_t memory;           // bytes in use on the GPU
    bool timing_broken;       // something other than steps ran since the last step: the next one is timed from `begin`
} Run;

static void print_sample(Run *run, int64_t step) {
    Trainer *t = &run->t;
    const Tokenizer *tokenizer = &run->setup.tokenizer;
    TokenSlot *slot = &t->tokens[0];
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    memset(slot->host, 0, (size_t)t->d.R * sizeof(int32_t));
    const int64_t separator = tokenizer->count ? tokenizer->separator : max_i64(0, t->m.bos_token_id), count = min_i64(t->o->sample_tokens, t->d.T - 1);
    float *logits = (float *)xcalloc((size_t)t->d.V, sizeof *logits);
    slot->host[0] = (int32_t)separator;
    printf("sample after step %lld: ", (long long)step);
    for (int64_t i = 0; i < count; i++) {
        position_logits(t, slot, i, logits);
        slot->host[i + 1] = sampler_choose(logits, tokenizer->count ? tokenizer->count : t->d.V, (uint64_t)t->o->seed, step, i);
        if (slot->host[i + 1] == separator) break;
        tokenizer_print(tokenizer, slot->host[i + 1], stdout);
    }
    printf("\n");
    fflush(stdout);
    free(logits);
}

// Names the first non-finite gradient and ends the run. The weights are those before that step.
static void die_nonfinite(const Trainer *t, const StepStats *stats, int64_t step) {
    const Parameter *bad = NULL;
    for (int64_t i = 0; i < t->table.count; i++) {
        const Parameter *p = &t->table.entries[i];
        if ((int64_t)stats->control.first_nonfinite >= p->offset && (int64_t)stats->control.first_nonfinite < p->offset + parameter_elements(p)) bad = p;
    }
    if (!bad) die("step %lld: the gradient norm is not finite (%g), though every gradient is: their squares overflow; rank 0, loss %g", (long long)step + 1, stats->control.gradient_norm, stats->loss);
    die("step %lld: the gradient is not finite: first in %s, layer %lld, element %lld, rank 0; loss %g; the weights have not been changed by it (--on-nonfinite skip goes on)",
        (long long)step + 1, bad->name, (long long)bad->layer, (long long)(stats->control.first_nonfinite - (unsigned long long)bad->offset), stats->loss);
}

// Waits for step `step` and prints its line.
static void report_step(Run *run, int64_t step) {
    Trainer *t = &run->t;
    CUDA_CHECK(cudaEventSynchronize(t->step_done[step % STEP_SLOTS]));
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
    logger_step(&run->logger, &record);
    run->skipped_in_a_row = stats.control.nonfinite ? run->skipped_in_a_row + 1 : 0;
    if (stats.control.nonfinite && (t->o->on_nonfinite == NONFINITE_STOP || run->skipped_in_a_row == 10)) die_nonfinite(t, &stats, step);
}

// Sequences seen when `steps_done` steps are done. Counted on from where the run was resumed: batch size and accumulation may differ from then on.
static int64_t samples_seen(const Run *run, int64_t steps_done) {
    return run->start.samples + (steps_done - run->start.step) * run->t.o->grad_accumulation_steps * run->t.d.B;
}

static void save_checkpoint(Run *run, int64_t steps_done) {
    Trainer *t = &run->t;
    if (!*t->o->checkpoint_dir || run->saved_step == steps_done) return;
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    const TrainerProgress progress = {steps_done, samples_seen(run, steps_done)};
    const TrainerState state = trainer_state(t);
    Failure failure;
    if (!checkpoint_save(t->o->checkpoint_dir, t->o->keep_checkpoints, &progress, &t->m, t->o, &t->table, &state, &failure)) die("%s", failure.text);
    printf("saved checkpoint of step %lld in %s\n", (long long)steps_done, t->o->checkpoint_dir);
    run->saved_step = steps_done;
}

static bool is_due(int64_t every, int64_t steps_done) { return every && steps_done % every == 0; }

// Everything that happens between steps. `last`: the run ends here.
static void between_steps(Run *run, int64_t done, bool last) {
    const Options *o = run->t.o;
    if (*o->val_data && (last || is_due(o->val_every, done))) logger_validation(&run->logger, done, validation_loss(&run->t, &run->setup.val));
    if (is_due(o->sample_every, done)) print_sample(run, done);
    if (is_due(o->checkpoint_every, done) || last) save_checkpoint(run, done);
}

static void train(Run *run) {
    Trainer *t = &run->t;
    const Options *o = t->o;
    CUDA_CHECK(cudaEventCreate(&run->begin));
    run->timing_broken = true;
    CUDA_CHECK(cudaEventRecord(run->begin, t->stream));
    for (int64_t step = run->start.step, reported = step; step < o->num_steps; step++) {
        enqueue_step(t, &run->setup.train, step, samples_seen(run, step));
        // The line of a step is printed while the next one runs, so that the GPU never waits for the host; before anything else happens, all are.
        const int64_t done = step + 1;
        const int signal_number = (int)stop_signal;
        const bool last = done == o->num_steps || signal_number;
        const bool pause = last || is_due(o->val_every, done) || is_due(o->sample_every, done) || is_due(o->checkpoint_every, done);
        while (reported < (pause ? done : step)) report_step(run, reported++);
        if (!pause) continue;
        between_steps(run, done, last);
        if (signal_number) {
            printf("stopped by signal %d after step %lld\n", signal_number, (long long)done);
            break;
        }
        run->timing_broken = true;
        CUDA_CHECK(cudaEventRecord(run->begin, t->stream));
    }
    CUDA_CHECK(cudaEventDestroy(run->begin));
}

#ifndef TESTING

static void load_start(Run *run, const char *checkpoint) {
    Trainer *t = &run->t;
    const TrainerState state = trainer_state(t);
    if (checkpoint) run->start = checkpoint_load(checkpoint, &t->m, t->o, &t->table, &state);
    else if (run->setup.load_weights) model_load_weights(run->setup.model_folder, &t->m, &t->table, &state);
    run->saved_step = checkpoint ? run->start.step : -1;
    weights_changed(t);
}

int main(int argc, char **argv) {
    char presets[1024], checkpoint[PATH_CAPACITY], versions[256];
    model_config_preset_names(presets, sizeof presets);
    Options o = options_parse(argc, argv, presets);
    Run run;
    memset(&run, 0, sizeof run);
    run.setup = run_setup(&o);
    check_supported(&run.setup.model, &o);
    options_print(&o);
    const Arena plan = trainer_describe(&run.t, &o, &run.setup.model);
    printf("\n%s: %lld parameters\n", run.setup.model.name, (long long)run.t.table.num_parameters);
    if (o.dry_run) {
        arena_print_plan(&plan, CUDA_OVERHEAD_BYTES);
        print_precisions(&run.t);
        return 0;
    }
    cudaDeviceProp device;
    check_device(&o, &device);
    const bool resume = o.resume && checkpoint_find_newest(o.checkpoint_dir, checkpoint, sizeof checkpoint);
    if (resume) checkpoint_check(checkpoint, &run.setup.model, &o);
    catch_signals();
    trainer_create(&run.t, &plan);
    arena_print_plan(&plan, CUDA_OVERHEAD_BYTES);
    print_precisions(&run.t);
    load_start(&run, resume ? checkpoint : NULL);
    format_checked(versions, sizeof versions, "CUDA %d, cuBLASLt %zu", CUDART_VERSION, cublasLtGetVersion());
    const RunInfo info = {"train_fp8cu", device.name, versions, 1, o.peak_tflops > 0 ? o.peak_tflops * 1e12 : flops_peak_bf16(device.major, device.minor, device.name)};
    run.logger = logger_open(&o, &run.setup.model, &run.t.table, info);
    printf("\n%s, %s\n", device.name, versions);
    train(&run);
    logger_close(&run.logger);
    if (*o.export_hf) {
        const TrainerState state = trainer_state(&run.t);
        Failure failure;
        if (!model_export_hf(o.export_hf, &run.t.m, &run.t.table, &state, run.setup.model_folder, &failure)) die("%s", failure.text);
        printf("exported the model to %s\n", o.export_hf);
    }
    trainer_destroy(&run.t);
    run_setup_close(&run.setup);
    return 0;
}

#endif
