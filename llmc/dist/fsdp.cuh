// Fully sharded data parallelism: where each layer's weights and gradients are, and when they are communicated.
//
// With one rank in the shard group (a single GPU, or --sharding none) the shard is the whole: units are views of the
// flat arrays, FP8 weights are made in each pass as a gathered layer's are (or, with --fp8-weight-cache on, stay on the
// GPU with their transposes), nothing is gathered, and with several ranks each unit's gradient is all-reduced after its
// last micro-step. A single micro-step writes its gradient where it stays. Of several, the first does so too, if the
// sums are bf16; each other one, and each one where the sums are fp32, is computed in a buffer of one unit and then
// joins the sum (gradient_sum.h).
//
// Else a layer's matrices are gathered into one of `num_slots` slots (2, or one a layer when they are kept for the whole step) while the layer before
// it computes. In FP8 runs with tensor scales bytes travel, cast once a step from the shard with scales that hold for all ranks; or, without FP8
// all-gather, bf16 travels and is cast by the same scales on arrival, to the same bytes. Forward reads the rows; backward reads transposes made here
// from the rows. Recipes with scales of rows or blocks cast on arrival too, rows for the forward pass, columns for the backward pass. A layer that has
// a linear layer in bf16 travels in bf16, and stays readable as such.
// The root unit, which has no FP8 weights, and all vectors are gathered once a step, as soon as the optimizer has changed them.
// Backward writes a layer's gradient whole into one of two buffers; its reduce-scatter runs beside the backward pass of the layer below. The root's
// has a buffer of its own. A batch touches few rows of the embedding. Where the gradients of all ranks' inputs are smaller than its table, they are gathered at the
// end of the way back, and each rank adds those of its own part of the table: then an embedding of its own has no gradient that exists whole, and lm_head's is on
// its way as soon as the loss has been. Else the root's gradient is reduced at the end.
//
// Where the GPUs of a shard group can read each other's memory (peer_memory.cuh), weights are gathered and gradients reduced by copy engines, each rank
// reading the others' parts; a kernel then adds up the gradients in fp32, in the order of the ranks. Else NCCL does both; it always moves what is small.
// When a layer's weights are gathered, the others' parts are there, because fsdp_gather_vectors, which comes before, waits for every rank to have made its
// own. And weights stay until all have read them, because no optimizer runs before the first layer's gradient is reduced, which waits for every rank's last
// gather.
//
// Order between the compute stream and the communication stream is kept by events alone; the host never waits:
//   arrived    of a slot: computing waits for it before it reads the slot
//   released   of a slot: a gather into the slot waits for it
//   reduced    of a gradient buffer: computing waits for it before it writes the buffer again
//   handover   passes everything that one stream has been given so far to the other: gradients to their reduction, new weights to their gather
#ifndef LLMC_FSDP_CUH
#define LLMC_FSDP_CUH

#include "../base/arena.h"
#include "comm_nccl.cuh"
#include "../cuda/gradient_sum.cuh"
#include "peer_memory.cuh"
#include "../config/precision.h"
#include "../cuda/quantize.cuh"
#include "../config/shard_plan.h"

enum { FSDP_GRADIENT_BUFFERS = 2 };

// fp32 elements that are reduced at a time with --reduce-dtype fp32: messages of 256 MiB have most of the bandwidth.
#define FSDP_STAGING_ELEMENTS (64ll << 20)

// Where to find a unit's tensors: offsets count from the start of a segment. `matrices` is NULL for layers whose weights are only there as FP8.
typedef struct {
    bf16 *vectors, *matrices;
    bf16 *embedding;  // of the root: lm_head's too, if the two are tied. Gradients: NULL where it never exists but as part of the sum (fsdp_embedding_joins)
} FsdpUnit;

// Where the scales of a linear layer's weight are among those of a layer's row or col copies, and its first amax among a layer's.
typedef struct {
    int64_t row_scales, col_scales, amax;
} FsdpScales;

typedef struct {
    int64_t unit;           // held; -1: none, or weights of an earlier step
    cudaEvent_t arrived, released;
} FsdpSlot;

typedef struct {
    const ParameterTable *table;
    ShardPlan plan;
    int64_t world, replicas;
    bool sharded;           // several ranks share one copy of the weights
    bool keep_units;        // gathered layers stay for the whole step
    bool fp8, fp8_gather, fp32_reduce;
    bool copies;            // copy engines are to be tried
    bool rows_in_backward;  // layers are computed again there
    bool fp32_grads;        // gradients end as fp32 sums
    bool buffered;          // not sharded, but gradients of some micro-steps are computed in buffers
    int64_t embedding_ranks;  // whose inputs' gradients make this rank's part of the embedding's gradient; 1: its own, and the parts of several are reduced
    bool embedding_passes;  // its gathered weights give way to the root's gradient, since one forward pass a step reads them
    bool cached;            // FP8 weights of all layers are made as soon as the weights change
    const Precision *precision;
    FsdpScales scales[NUM_LINEARS];
    int64_t row_scale_bytes, col_scale_bytes;  // of a layer
    Nccl *nccl;             // NULL: one rank
    PeerMemory peers;       // of the shard group; without ranks: NCCL moves all
    uint32_t *arrivals;     // its
    cudaStream_t stream;    // of the computing
    cudaEvent_t handover;

    bf16 *weights, *grads;  // [plan.total] this rank's shard; grads are sums over the micro-steps so far
    float *grads_fp32;      // [plan.total] which are here instead if they are fp32
    uint64_t seed;
    int64_t replica;
    GradientSum sum;        // how gradients of this micro-step join `grads`: set by fsdp_begin_micro_step
    uint64_t embedding_key;  // of the rounding bits where an embedding's gradient joins a sum that lm_head's has joined before
    uint8_t *shard_fp8;     // [L, slice] of the matrices, cast
    uint32_t *amax;         // weight of linear layer j of layer l: from amax[l * amax_stride + scales[j].amax] on
    int64_t amax_stride;
    bool *amaxes_known;     // [units]: those of the layer's weights have been found since these changed; not of tensor scales, whose amaxes come with the change
    float *inverse_scale;   // of tensor scales: of number l * scale_stride + j, 4 floats apart
    const float *delayed_scale;  // the same, 1 float apart; NULL: current scaling
    int64_t scale_stride;
    AuditSums *audit;       // [L, NUM_LINEARS, NUM_TENSORS, 2] where casts are being audited, else NULL

    bf16 *root, *vectors;   // gathered: the root unit; the vectors [L, group * slice]
    char *slots;            // [num_slots] gathered matrices of a layer, bf16 or bytes
    FsdpSlot *slot;
    int64_t num_slots;
    uint8_t *rows, *cols;   // [num_rows], [num_cols] FP8 matrices of a layer
    char *row_scales, *col_scales;  // their scales, unless they are of tensors
    int64_t num_rows, num_cols, *row_unit, *col_unit;  // unit held, -1: none
    bf16 *root_grads, *layer_grads[FSDP_GRADIENT_BUFFERS];  // in turn in the root's: the gathered embedding, if it passes; the gradient; the gathered gradients of inputs
    int64_t root_elements[NUM_SEGMENTS], layer_elements[NUM_SEGMENTS];  // of a unit's parameters, without what is left out between and behind them
    int64_t input_elements;  // of the gradient of a rank's inputs
    cudaEvent_t reduced[1 + FSDP_GRADIENT_BUFFERS];    // of the root's buffer and the layers'
    float *staging;         // for reductions in fp32 by NCCL
    int64_t staging_slice;  // elements of each rank in it
    bf16 *received;         // [ranks - 1][received_slice] the others' gradients of this rank's slice, as they were copied
    int64_t received_slice;
} Fsdp;

// ---------------------------------------------------------------------------------------------------------------------
// Memory

// True if the embedding's gradient, of few rows, is added to this rank's part of the sum as it is computed, after the
// rest of the root's has joined it.
static inline bool fsdp_embedding_joins(const Fsdp *f) { return f->embedding_ranks > 1 || !f->sharded; }

// Segments of a gradient that are computed whole and reduced: all, or those before an embedding of its own.
static inline int fsdp_reduced_segments(const Fsdp *f) {
    return fsdp_embedding_joins(f) ? SEGMENT_EMBEDDING : NUM_SEGMENTS;
}

// Elements of the root's gradient as it is computed.
static inline int64_t fsdp_root_gradient(const Fsdp *f) { return f->plan.group * segment_begin(f->plan.root_slices, fsdp_reduced_segments(f)); }

// Elements of a layer's matrices as they lie on the GPU when whole.
static inline int64_t fsdp_layer_matrices(const Fsdp *f) { return f->plan.group * f->plan.layer_slices[SEGMENT_MATRICES]; }
static inline int64_t fsdp_layer_vectors(const Fsdp *f) { return f->plan.group * f->plan.layer_slices[SEGMENT_VECTORS]; }

// Whether the recipe has one scale a weight: then the transposed copy has the bytes of the row copy, and travels as they do.
static inline bool fsdp_tensor_scales(const Fsdp *f) { return f->precision->recipe->gathers_fp8; }

// Whether a layer travels as FP8.
static inline bool fsdp_gathers_fp8(const Fsdp *f, int64_t unit) { return f->fp8_gather && precision_layer_is_fp8(f->precision, unit - 1); }

// Places of the scales of a layer's weights in their buffers.
static inline void fsdp_describe_scales(Fsdp *f) {
    const Recipe *r = f->precision->recipe;
    const Grain row = recipe_grain(r, TENSOR_W, COPY_ROW), col = recipe_grain(r, TENSOR_W, COPY_COL);
    int64_t amaxes = 0;
    for (int j = 0; j < NUM_LINEARS; j++) {
        const LinearShape *s = &f->precision->linear[j];
        const FsdpScales at = {f->row_scale_bytes, f->col_scale_bytes, amaxes};
        f->scales[j] = at;
        amaxes += tensor_amaxes(row, col, s->N, s->K);
        if (fsdp_tensor_scales(f)) continue;
        f->row_scale_bytes += round_up(scale_bytes(row, s->N, s->K), ARENA_ALIGNMENT);
        f->col_scale_bytes += round_up(scale_bytes(col, s->K, s->N), ARENA_ALIGNMENT);
    }
}

// What the options make of `world` ranks. The caller fills `nccl`, `stream`, amaxes and scales.
static inline void fsdp_describe(Fsdp *f, const ParameterTable *table, const Precision *precision, const Options *o, int64_t world, int64_t rank) {
    memset(f, 0, sizeof *f);
    const int64_t group = options_shard_group(o, world);
    f->table = table;
    f->plan = shard_plan(table, group, rank % group);
    f->world = world, f->replicas = world / group;
    f->sharded = group > 1;
    f->keep_units = o->sharding == SHARDING_GRAD_OP;
    f->precision = precision;
    for (int64_t i = 0; i < table->count; i++) {
        const Parameter *p = &table->entries[i];
        if (p->layer <= 0) (p->layer < 0 ? f->root_elements : f->layer_elements)[parameter_segment(p)] += parameter_elements(p);
    }
    const bool one_pass = o->grad_accumulation_steps == 1;  // forward and backward a step
    f->fp32_grads = options_fp32_gradients(o, world);
    f->buffered = !f->sharded && (!one_pass || f->fp32_grads);
    f->seed = (uint64_t)o->seed, f->replica = rank / group;
    f->input_elements = o->batch_size * o->sequence_length * precision->linear[GATE_UP_PROJ].K;
    f->embedding_ranks = group * f->input_elements <= table->root_segments[embedding_segment(table)] ? group : 1;
    f->fp8 = precision->any_fp8;
    f->fp8_gather = f->fp8 && o->fp8_all_gather == ON;
    f->fp32_reduce = world > 1 && o->reduce_dtype == REDUCE_FP32;
    f->copies = f->sharded && o->copy_engines != OFF;
    f->rows_in_backward = o->recompute == RECOMPUTE_LAYER;
    f->embedding_passes = f->sharded && one_pass && embedding_segment(table) == SEGMENT_EMBEDDING;
    f->cached = !f->sharded && o->fp8_weight_cache == ON;
    if (f->fp8) fsdp_describe_scales(f);
    const int64_t L = table->num_layers, few = min_i64(2, L);
    const bool bf16_is_passing = f->fp8 && !precision->any_bf16 && fsdp_tensor_scales(f) && !f->fp8_gather;  // once cast, nobody reads it
    f->num_slots = !f->sharded ? 0 : f->keep_units && !bf16_is_passing ? L : few;
    f->num_cols = !f->fp8 ? 0 : f->cached || (f->sharded && f->keep_units) ? L : 1;
    f->num_rows = f->fp8_gather && f->sharded && !precision->any_bf16 ? 0 : f->num_cols;  // where all travel as FP8, the slots hold the rows
    f->slot = (FsdpSlot *)xcalloc((size_t)f->num_slots, sizeof *f->slot);
    f->amaxes_known = (bool *)xcalloc((size_t)unit_count(table), sizeof *f->amaxes_known);
    f->row_unit = (int64_t *)xcalloc((size_t)f->num_rows, sizeof *f->row_unit);
    f->col_unit = (int64_t *)xcalloc((size_t)f->num_cols, sizeof *f->col_unit);
}

// Bytes of an element in the slots.
static inline int64_t fsdp_slot_element(const Fsdp *f) { return f->fp8_gather && !f->precision->any_bf16 ? 1 : (int64_t)sizeof(bf16); }

// Whether FP8 weights are made of one layer at a time, and nobody counts on them any more once it is released.
static inline bool fsdp_copies_pass(const Fsdp *f) { return !f->sharded && !f->cached; }

// Places the FP8 weights that are cast here, or transposed. Of those that pass, a pass reads the rows or the columns; to compute layers again takes both.
static inline void fsdp_place_copies(Fsdp *f, Arena *a) {
    const int64_t matrices = fsdp_layer_matrices(f);
    if (f->num_rows) f->rows = (uint8_t *)arena_take(a, f->num_rows * matrices);
    if (f->num_cols) f->cols = fsdp_copies_pass(f) && !f->rows_in_backward ? f->rows : (uint8_t *)arena_take(a, f->num_cols * matrices);
    if (f->row_scale_bytes) f->row_scales = (char *)arena_take(a, f->num_rows * f->row_scale_bytes);
    if (f->col_scale_bytes) f->col_scales = (char *)arena_take(a, f->num_cols * f->col_scale_bytes);
}

// Places all but the shard arrays, and copies that pass (fsdp_place_copies).
static inline void fsdp_place(Fsdp *f, Arena *a) {
    const int64_t L = f->table->num_layers, matrices = fsdp_layer_matrices(f), element = (int64_t)sizeof(bf16);
    arena_group(a, f->sharded ? "FP8 weights of shard and layers" : "FP8 weights and their transposes");
    if (f->sharded && f->fp8_gather) f->shard_fp8 = (uint8_t *)arena_take(a, L * f->plan.layer_slices[SEGMENT_MATRICES]);
    if (!fsdp_copies_pass(f)) fsdp_place_copies(f, a);
    arena_group(a, "gathered weights");
    if (f->sharded) {
        f->root = (bf16 *)arena_take(a, f->plan.group * segment_begin(f->plan.root_slices, f->embedding_passes ? SEGMENT_EMBEDDING : NUM_SEGMENTS) * element);
        f->vectors = (bf16 *)arena_take(a, L * fsdp_layer_vectors(f) * element);
        f->slots = (char *)arena_take(a, f->num_slots * matrices * fsdp_slot_element(f));
    }
    arena_group(a, "gradients before they are added up");
    if (f->sharded) {
        const int64_t inputs = f->embedding_ranks > 1 ? f->input_elements : 0, embedding = f->embedding_passes ? f->plan.root_slices[SEGMENT_EMBEDDING] : 0;
        f->root_grads = (bf16 *)arena_take(a, max_i64(fsdp_root_gradient(f), f->plan.group * max_i64(inputs, embedding)) * element);
        f->layer_grads[0] = (bf16 *)arena_take(a, FSDP_GRADIENT_BUFFERS * shard_gathered_size(&f->plan, 1) * element);
        for (int i = 1; i < FSDP_GRADIENT_BUFFERS; i++) f->layer_grads[i] = f->layer_grads[i - 1] + shard_gathered_size(&f->plan, 1);
    }
    if (f->fp32_reduce && !(f->fp32_grads && f->buffered)) {
        const int64_t largest = max_i64(shard_unit_size(&f->plan, 0), shard_unit_size(&f->plan, 1)), at_a_time = FSDP_STAGING_ELEMENTS / f->plan.group;
        f->staging_slice = min_i64(largest, max_i64(PARAMETER_ALIGNMENT, at_a_time / PARAMETER_ALIGNMENT * PARAMETER_ALIGNMENT));
        f->staging = (float *)arena_take(a, f->plan.group * f->staging_slice * (int64_t)sizeof(float));
    }
    if (f->copies) {
        f->received_slice = max_i64(f->plan.layer_slices[SEGMENT_VECTORS], f->plan.layer_slices[SEGMENT_MATRICES]);
        f->received = (bf16 *)arena_take(a, (f->plan.group - 1) * f->received_slice * element);
        f->arrivals = (uint32_t *)arena_take(a, PEER_MAX_RANKS * (int64_t)sizeof(uint32_t));
    }
}

// Place the buffers in which gradients are computed before they join the sums, of the root unit and of one layer at a
// time.
static inline void fsdp_place_root_buffer(Fsdp *f, Arena *a) {
    arena_group(a, "gradients before they are added up");
    f->root_grads = (bf16 *)arena_take(a, fsdp_root_gradient(f) * (int64_t)sizeof(bf16));
}

static inline void fsdp_place_layer_buffer(Fsdp *f, Arena *a) {
    arena_group(a, "gradients before they are added up");
    f->layer_grads[0] = (bf16 *)arena_take(a, shard_gathered_size(&f->plan, 1) * (int64_t)sizeof(bf16));
    for (int i = 1; i < FSDP_GRADIENT_BUFFERS; i++) f->layer_grads[i] = f->layer_grads[0];
}

// Whatever was gathered or cast is of an earlier step.
static inline void fsdp_forget(Fsdp *f) {
    for (int64_t i = 0; i < f->num_slots; i++) f->slot[i].unit = -1;
    for (int64_t i = 0; i < f->num_rows; i++) f->row_unit[i] = -1;
    for (int64_t i = 0; i < f->num_cols; i++) f->col_unit[i] = -1;
}

static inline void fsdp_event(cudaEvent_t *event) { CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming)); }

static inline void fsdp_create(Fsdp *f) {
    fsdp_forget(f);
    if (!f->nccl) return;
    fsdp_event(&f->handover);
    for (int i = 0; i < 1 + FSDP_GRADIENT_BUFFERS; i++) fsdp_event(&f->reduced[i]);
    for (int64_t i = 0; i < f->num_slots; i++) {
        fsdp_event(&f->slot[i].arrived);
        fsdp_event(&f->slot[i].released);
    }
}

static inline void fsdp_destroy(Fsdp *f) {
    if (f->nccl) {
        CUDA_CHECK(cudaEventDestroy(f->handover));
        for (int i = 0; i < 1 + FSDP_GRADIENT_BUFFERS; i++) CUDA_CHECK(cudaEventDestroy(f->reduced[i]));
        for (int64_t i = 0; i < f->num_slots; i++) {
            CUDA_CHECK(cudaEventDestroy(f->slot[i].arrived));
            CUDA_CHECK(cudaEventDestroy(f->slot[i].released));
        }
    }
    free(f->slot);
    free(f->amaxes_known);
    free(f->row_unit);
    free(f->col_unit);
}

// ---------------------------------------------------------------------------------------------------------------------
// Order between the streams

// What is enqueued on `later` from now on runs after what is on `earlier` now.
static inline void fsdp_hand_over(Fsdp *f, cudaStream_t earlier, cudaStream_t later) {
    CUDA_CHECK(cudaEventRecord(f->handover, earlier));
    CUDA_CHECK(cudaStreamWaitEvent(later, f->handover, 0));
}

// Collectives see all that has been computed.
static inline void fsdp_communicate_after(Fsdp *f) { fsdp_hand_over(f, f->stream, f->nccl->stream); }

// Computing sees all that has been communicated.
static inline void fsdp_compute_after(Fsdp *f) {
    if (f->nccl) fsdp_hand_over(f, f->nccl->stream, f->stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights

static inline char *fsdp_slot_data(const Fsdp *f, int64_t slot) { return f->slots + slot * fsdp_layer_matrices(f) * fsdp_slot_element(f); }

// The place of layer unit - 1 in a ring of `count`.
static inline int64_t fsdp_ring(int64_t unit, int64_t count) { return (unit - 1) % count; }

static inline uint8_t *fsdp_rows(const Fsdp *f, int64_t unit) {
    const bool in_slot = f->sharded && fsdp_gathers_fp8(f, unit);
    return in_slot ? (uint8_t *)fsdp_slot_data(f, fsdp_ring(unit, f->num_slots)) : f->rows + fsdp_ring(unit, f->num_rows) * fsdp_layer_matrices(f);
}

static inline uint8_t *fsdp_cols(const Fsdp *f, int64_t unit) { return f->cols + fsdp_ring(unit, f->num_cols) * fsdp_layer_matrices(f); }

// A unit whose segments stand from `array` on as they do in a rank's flat arrays, or gathered.
static inline FsdpUnit fsdp_unit(const Fsdp *f, bf16 *array, int64_t unit, bool gathered) {
    bf16 *at[NUM_SEGMENTS];
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = shard_segment(f->table, &f->plan, unit, k);
        at[k] = array + (gathered ? g.gathered : g.shard);
    }
    const FsdpUnit u = {at[SEGMENT_VECTORS], at[SEGMENT_MATRICES], unit ? NULL : at[embedding_segment(f->table)]};
    return u;
}

// The weights of a unit between fsdp_acquire and fsdp_release.
static inline FsdpUnit fsdp_weights(const Fsdp *f, int64_t unit) {
    if (!f->sharded) return fsdp_unit(f, f->weights, unit, false);
    FsdpUnit u = {NULL, NULL, NULL};
    if (unit == 0) {
        u = fsdp_unit(f, f->root, 0, true);
        if (f->embedding_passes) u.embedding = f->root_grads;
    } else {
        u.vectors = f->vectors + (unit - 1) * fsdp_layer_vectors(f);
        if (!fsdp_gathers_fp8(f, unit)) u.matrices = (bf16 *)fsdp_slot_data(f, fsdp_ring(unit, f->num_slots));
    }
    return u;
}

// The FP8 weight of linear layer j of a layer, as casts write it and products read it.
static inline QTensor fsdp_weight_fp8(const Fsdp *f, int64_t unit, int j) {
    const int64_t l = unit - 1, number = l * f->scale_stride + j, offset = f->precision->linear[j].offset;
    QTensor q = recipe_qtensor(f->precision->recipe, TENSOR_W, precision_format(f->precision, TENSOR_W));
    q.rowwise = fsdp_rows(f, unit) + offset, q.columnwise = fsdp_cols(f, unit) + offset;
    q.amax = f->amax + l * f->amax_stride + f->scales[j].amax;
    q.delayed_scale = f->delayed_scale ? f->delayed_scale + number : NULL;
    q.rowwise_scale_inv = q.columnwise_scale_inv = f->inverse_scale + 4 * number;
    if (!fsdp_tensor_scales(f)) {
        q.rowwise_scale_inv = f->row_scales + fsdp_ring(unit, f->num_rows) * f->row_scale_bytes + f->scales[j].row_scales;
        q.columnwise_scale_inv = f->col_scales + fsdp_ring(unit, f->num_cols) * f->col_scale_bytes + f->scales[j].col_scales;
    }
    for (int copy = 0; copy < 2 && f->audit; copy++) q.audit[copy] = f->audit + audit_index(l, j, TENSOR_W, (CopyKind)copy);
    return q;
}

// Casts the layer's FP8 weights to the copies asked for. The first cast since they changed finds the amaxes of both copies.
static inline void fsdp_cast(Fsdp *f, int64_t unit, const bf16 *matrices, bool rows, bool cols) {
    for (int j = 0; j < NUM_LINEARS; j++) {
        const LinearShape *s = &f->precision->linear[j];
        const Recipe *r = precision_of(f->precision, unit - 1, j);
        if (r != f->precision->recipe) continue;
        QTensor q = fsdp_weight_fp8(f, unit, j);
        if (!rows) q.rowwise = NULL;
        if (!cols) q.columnwise = NULL;
        if (!fsdp_tensor_scales(f) && !f->amaxes_known[unit]) tensor_amax_pass(q, matrices + s->offset, s->N, s->K, f->stream);
        quantize_transpose(q, matrices + s->offset, s->N, s->K, f->stream);
    }
    f->amaxes_known[unit] = true;
}

// Whether the FP8 rows of the unit are still there from an earlier pass and are all that anybody reads of it.
static inline bool fsdp_has_rows(const Fsdp *f, int64_t unit) {
    return f->fp8 && fsdp_tensor_scales(f) && !f->fp8_gather && precision_layer_is_fp8(f->precision, unit - 1) && f->row_unit[fsdp_ring(unit, f->num_rows)] == unit;
}

// A gather: fsdp_begin_gather, calls of fsdp_gather_slice, fsdp_end_gather. `what`, `unit`: for messages (nccl_begin_operation).
static inline void fsdp_begin_gather(Fsdp *f, const char *what, int64_t unit) {
    if (f->peers.ranks) nccl_begin_operation(f->nccl, what, unit);
    else nccl_begin(f->nccl, what, unit);
}

// all [ranks][slice] = each rank's part [slice].
static inline void fsdp_gather_slice(Fsdp *f, const void *part, void *all, int64_t slice, ncclDataType_t type) {
    const int64_t element = type == ncclUint8 ? 1 : (int64_t)sizeof(bf16);
    if (f->peers.ranks) peer_read(&f->peers, part, all, slice * element, true, f->nccl->stream);
    else nccl_all_gather(f->nccl, COMM_SHARD, part, all, slice, type);
}

static inline void fsdp_end_gather(Fsdp *f) {
    if (f->peers.ranks) nccl_end_operation(f->nccl);
    else nccl_end(f->nccl);
}

// Starts the gather of a layer, unless it is there or there is no such layer. Call it before the work that it is to hide behind.
static inline void fsdp_prefetch(Fsdp *f, int64_t unit) {
    if (!f->sharded || unit < 1 || unit >= unit_count(f->table) || fsdp_has_rows(f, unit)) return;
    const int64_t index = fsdp_ring(unit, f->num_slots), slice = f->plan.layer_slices[SEGMENT_MATRICES];
    FsdpSlot *slot = &f->slot[index];
    if (slot->unit == unit) return;
    CUDA_CHECK(cudaStreamWaitEvent(f->nccl->stream, slot->released, 0));
    const bool fp8 = fsdp_gathers_fp8(f, unit);
    const void *part = fp8 ? (void *)(f->shard_fp8 + (unit - 1) * slice) : (void *)(f->weights + shard_segment(f->table, &f->plan, unit, SEGMENT_MATRICES).shard);
    fsdp_begin_gather(f, "all-gather of the weights", unit);
    fsdp_gather_slice(f, part, fsdp_slot_data(f, index), slice, fp8 ? ncclUint8 : ncclBfloat16);
    fsdp_end_gather(f);
    CUDA_CHECK(cudaEventRecord(slot->arrived, f->nccl->stream));
    slot->unit = unit;
}

// Makes the FP8 copies that a pass reads of a layer, unless they are there. Where bf16 weights are passing through (no more than the rows may be there in
// backward), the columns are made from the rows.
static inline void fsdp_make_copies(Fsdp *f, int64_t unit, bool backward) {
    const bool transposes = f->sharded && fsdp_tensor_scales(f), in_slot = f->sharded && fsdp_gathers_fp8(f, unit);
    const bool rows = !in_slot && (!backward || transposes || f->rows_in_backward) && f->row_unit[fsdp_ring(unit, f->num_rows)] != unit;
    const bool cols = backward && f->col_unit[fsdp_ring(unit, f->num_cols)] != unit;
    if (rows || (cols && !transposes)) fsdp_cast(f, unit, fsdp_weights(f, unit).matrices, rows, cols && !transposes);
    for (int j = 0; cols && transposes && j < NUM_LINEARS; j++) {
        const QTensor q = fsdp_weight_fp8(f, unit, j);
        fp8_transpose(q.columnwise, q.rowwise, f->precision->linear[j].N, f->precision->linear[j].K, f->stream);
    }
    if (rows) f->row_unit[fsdp_ring(unit, f->num_rows)] = unit;
    if (cols) f->col_unit[fsdp_ring(unit, f->num_cols)] = unit;
}

// What is enqueued from now on may read the layer's weights; with `backward`, the transposed ones too.
static inline void fsdp_acquire(Fsdp *f, int64_t unit, bool backward) {
    if (f->sharded && !fsdp_has_rows(f, unit)) {
        fsdp_prefetch(f, unit);
        CUDA_CHECK(cudaStreamWaitEvent(f->stream, f->slot[fsdp_ring(unit, f->num_slots)].arrived, 0));
    }
    if (f->fp8 && !f->cached) fsdp_make_copies(f, unit, backward);
}

// The layer's weights have had their last reader of this pass.
static inline void fsdp_release(Fsdp *f, int64_t unit) {
    if (f->nccl) nccl_watch(f->nccl);  // a pass may be long, and have no collective of its own
    if (fsdp_copies_pass(f)) fsdp_forget(f);
    if (f->sharded) CUDA_CHECK(cudaEventRecord(f->slot[fsdp_ring(unit, f->num_slots)].released, f->stream));
}

// The optimizer, or whatever else changes weights, has written the shard of the root unit: it travels while the layers are being updated.
static inline void fsdp_root_changed(Fsdp *f) {
    if (!f->sharded) return;
    fsdp_communicate_after(f);
    fsdp_begin_gather(f, "all-gather of the weights", 0);
    if (f->peers.ranks) peer_barrier(&f->peers, f->nccl->stream);
    const FsdpUnit root = fsdp_weights(f, 0);
    bf16 *const to[NUM_SEGMENTS] = {root.vectors, root.matrices, root.embedding};
    for (int k = 0; k < NUM_SEGMENTS; k++) {
        const ShardSegment g = shard_segment(f->table, &f->plan, 0, k);
        if (g.slice) fsdp_gather_slice(f, f->weights + g.shard, to[k], g.slice, ncclBfloat16);
    }
    fsdp_end_gather(f);
}

static inline void fsdp_gather_vectors(Fsdp *f) {
    nccl_begin(f->nccl, "all-gather of norms and biases", -1);
    for (int64_t unit = 1; unit < unit_count(f->table); unit++) {
        const ShardSegment g = shard_segment(f->table, &f->plan, unit, SEGMENT_VECTORS);
        nccl_all_gather(f->nccl, COMM_SHARD, f->weights + g.shard, f->vectors + (unit - 1) * fsdp_layer_vectors(f), g.slice, ncclBfloat16);
    }
    nccl_end(f->nccl);
}

// This rank's slices of all layers' matrices to FP8.
static inline void fsdp_cast_shard(Fsdp *f) {
    const ShardSegment g = shard_segment(f->table, &f->plan, 1, SEGMENT_MATRICES);
    Fp8Slices s;
    memset(&s, 0, sizeof s);
    s.count = f->table->num_layers, s.n = g.slice, s.num_tensors = NUM_LINEARS;
    for (int j = 0; j < NUM_LINEARS; j++) {
        const LinearShape *linear = &f->precision->linear[j];
        s.ends[j] = max_i64(0, min_i64(g.slice, linear->offset + linear->N * linear->K - f->plan.place * g.slice));
    }
    s.x = f->weights + g.shard, s.x_stride = shard_unit_size(&f->plan, 1);
    s.codes = f->shard_fp8;
    s.amax = f->amax, s.inverse_scale = f->inverse_scale, s.slot_stride = f->scale_stride;
    s.rule = f->precision->recipe->rule, s.delayed_scale = f->delayed_scale;
    quantize_slices(&s, f->stream);
    if (f->audit) audit_slices(&s, f->audit + audit_index(0, 0, TENSOR_W, COPY_ROW), AUDIT_LAYER, AUDIT_LINEAR, f->stream);
}

// Amaxes of tensors become those of a group of ranks. The slots that nobody has raised since they were cleared take part.
static inline void fsdp_reduce_amaxes(Fsdp *f, CommGroup group) {
    if (!f->nccl || (group == COMM_SHARD && !f->sharded)) return;
    fsdp_communicate_after(f);
    nccl_begin(f->nccl, "all-reduce of the amaxes", -1);
    nccl_all_reduce(f->nccl, group, f->amax, f->table->num_layers * f->amax_stride, ncclUint32, ncclMax);
    nccl_end(f->nccl);
    fsdp_compute_after(f);
}

// The same for the layers; the amaxes of the whole weights are known where their recipe has tensor scales, and cleared elsewhere. From here on everything
// computes with the new weights.
static inline void fsdp_layers_changed(Fsdp *f) {
    fsdp_forget(f);
    memset(f->amaxes_known, 0, (size_t)unit_count(f->table) * sizeof *f->amaxes_known);
    if (!f->sharded) {
        for (int64_t unit = 1; f->fp8 && f->cached && unit < unit_count(f->table); unit++) fsdp_cast(f, unit, fsdp_weights(f, unit).matrices, true, true);
        return;
    }
    if (f->fp8_gather) fsdp_cast_shard(f);
    fsdp_communicate_after(f);
    fsdp_gather_vectors(f);
    fsdp_compute_after(f);
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients

static inline int fsdp_gradient_buffer(int64_t unit) { return unit ? 1 + (int)((unit - 1) % FSDP_GRADIENT_BUFFERS) : 0; }

// Begins micro-step `micro` of optimizer step `step`, both counted from 0. Replicas round by other bits
// than each other, so that their noise is not the same; an embedding's gradient by other bits than a tied lm_head's.
static inline void fsdp_begin_micro_step(Fsdp *f, int64_t step, int64_t micro) {
    const int64_t part = 2 * (micro * f->replicas + f->replica);
    f->sum.add = f->sum.stochastic = micro > 0;
    f->sum.key = gradient_sum_key(f->seed, step, part), f->embedding_key = gradient_sum_key(f->seed, step, part + 1);
}

// True if gradients of this micro-step are computed where they stay.
static inline bool fsdp_in_place(const Fsdp *f) { return !f->sharded && !f->fp32_grads && !f->sum.add; }

// Where a unit's gradient is computed.
static inline FsdpUnit fsdp_gradients(const Fsdp *f, int64_t unit) {
    if (fsdp_in_place(f)) return fsdp_unit(f, f->grads, unit, false);
    FsdpUnit u = fsdp_unit(f, unit ? f->layer_grads[(unit - 1) % FSDP_GRADIENT_BUFFERS] : f->root_grads, unit, true);
    if (fsdp_embedding_joins(f)) u.embedding = NULL;
    return u;
}

// How this micro-step's gradients join the sum from element `flat` of all parameters on.
static inline GradientSum fsdp_sum_at(const Fsdp *f, int64_t flat) {
    GradientSum s = f->sum;
    s.flat = flat;
    return s;
}

// As above for a segment of a unit, from element `first` of this rank's slice on.
static inline GradientSum fsdp_sum_of(const Fsdp *f, ShardSegment g, int64_t first) {
    return fsdp_sum_at(f, g.flat + f->plan.place * g.slice + first);
}

// What lies between and behind a unit's tensors counts as gradient too, and is zero. Matrices stand without gaps between them.
static inline void fsdp_clear_gaps(Fsdp *f, int64_t unit) {
    const FsdpUnit g = fsdp_gradients(f, unit);
    const int64_t *elements = unit ? f->layer_elements : f->root_elements, *slices = shard_slices(&f->plan, unit);
    const int64_t vectors = f->plan.group * slices[SEGMENT_VECTORS], gap = f->plan.group * slices[SEGMENT_MATRICES] - elements[SEGMENT_MATRICES];
    if (vectors > elements[SEGMENT_VECTORS]) CUDA_CHECK(cudaMemsetAsync(g.vectors, 0, (size_t)vectors * sizeof(bf16), f->stream));
    if (gap) CUDA_CHECK(cudaMemsetAsync(g.matrices + elements[SEGMENT_MATRICES], 0, (size_t)gap * sizeof(bf16), f->stream));
}

// Before the first write to a layer's gradient in a micro-step: what the buffer held is on its way no longer.
static inline void fsdp_begin_gradients(Fsdp *f, int64_t unit) {
    if (f->sharded) CUDA_CHECK(cudaStreamWaitEvent(f->stream, f->reduced[fsdp_gradient_buffer(unit)], 0));
    fsdp_clear_gaps(f, unit);
}

// The same for the root's, before the loss of a micro-step, which may use the layers' buffers too (fsdp_loss_room).
static inline void fsdp_begin_loss(Fsdp *f) {
    for (int i = 0; f->sharded && i < 1 + FSDP_GRADIENT_BUFFERS; i++) CUDA_CHECK(cudaStreamWaitEvent(f->stream, f->reduced[i], 0));
    fsdp_clear_gaps(f, 0);
}

// What is needed during the loss alone lies where gradients are computed later, if it fits: the layers', or on one GPU the embedding's. How many elements do.
static inline int64_t fsdp_loss_room(const Fsdp *f) {
    if (f->sharded) return FSDP_GRADIENT_BUFFERS * shard_gathered_size(&f->plan, 1);
    return f->buffered ? 0 : f->plan.root_slices[SEGMENT_EMBEDDING];
}

// Where that is with several ranks to one copy of the weights; on one GPU the trainer places it.
static inline bf16 *fsdp_loss_memory(const Fsdp *f) { return f->layer_grads[0]; }

enum { FSDP_THREADS = 256 };

// to [rows, n] = from [rows, stride], its first n columns, as fp32. n and stride multiples of 8.
static __global__ void __launch_bounds__(FSDP_THREADS) fsdp_to_fp32_kernel(float *to, const bf16 *from, int64_t rows, int64_t n, int64_t stride) {
    grid_dependency_wait();
    for (int64_t i = (blockIdx.x * (int64_t)FSDP_THREADS + threadIdx.x) * 8; i < rows * n; i += (int64_t)gridDim.x * FSDP_THREADS * 8) {
        float x[8];
        bf16x8_unpack(x, bf16x8_load(from + i / n * stride + i % n));
        *(float4 *)(to + i) = make_float4(x[0], x[1], x[2], x[3]);
        *(float4 *)(to + i + 4) = make_float4(x[4], x[5], x[6], x[7]);
    }
}

// Gradients from [n] join to [n], a part of the sum. n: a multiple of 8.
template <class Sum, class T>
static __global__ void __launch_bounds__(FSDP_THREADS)
    fsdp_add_kernel(Sum *to, const T *from, int64_t n, GradientSum sum) {
    grid_dependency_wait();
    for (int64_t i = (blockIdx.x * (int64_t)FSDP_THREADS + threadIdx.x) * 8; i < n; i += (int64_t)gridDim.x * FSDP_THREADS * 8) {
        float x[8];
        gradient_load_8(x, from + i);
        gradient_join_8(to + i, x, i, sum);
    }
}

// Blocks for n elements on the communication stream: few, so that they leave the matrix products beside them alone.
static inline unsigned fsdp_blocks(int64_t n) { return grid_size(min_i64(n, 128 * FSDP_THREADS * 8), FSDP_THREADS * 8); }

static inline void fsdp_to_fp32(Fsdp *f, const bf16 *from, int64_t rows, int64_t n, int64_t stride) {
    CUDA_LAUNCH(fsdp_to_fp32_kernel, fsdp_blocks(rows * n), FSDP_THREADS, 0, f->nccl->stream, f->staging, from, rows, n, stride);
}

// Gradients from [n] join the sum from element `at` of this rank's arrays on.
template <class T>
static inline void fsdp_add(Fsdp *f, int64_t at, const T *from, int64_t n, GradientSum sum, unsigned blocks,
                            cudaStream_t stream) {
    if (f->fp32_grads)
        CUDA_LAUNCH(fsdp_add_kernel<float, T>, blocks, FSDP_THREADS, 0, stream, f->grads_fp32 + at, from, n, sum);
    else CUDA_LAUNCH(fsdp_add_kernel<bf16, T>, blocks, FSDP_THREADS, 0, stream, f->grads + at, from, n, sum);
}

// Looks at NCCL's errors between collectives.
template <class T>
static inline void fsdp_add_reduced(Fsdp *f, int64_t at, const T *from, int64_t n, GradientSum sum) {
    fsdp_add(f, at, from, n, sum, fsdp_blocks(n), f->nccl->stream);
}

// Elements at .. at + n - 1 of the sum = their sums over the group; in fp32 where they are fp32.
static inline void fsdp_all_reduce(Fsdp *f, CommGroup group, int64_t at, int64_t n, int64_t unit) {
    const GradientSum replace = {};
    const bool staged = f->fp32_reduce && !f->fp32_grads;
    const int64_t at_a_time = staged ? f->plan.group * f->staging_slice : n;
    for (int64_t first = at; first < at + n; first += at_a_time) {
        const int64_t count = min_i64(at_a_time, at + n - first);
        if (staged) fsdp_to_fp32(f, f->grads + first, 1, count, count);
        nccl_begin(f->nccl, "all-reduce of the gradients", unit);
        if (staged) nccl_all_reduce(f->nccl, group, f->staging, count, ncclFloat32, ncclSum);
        else if (f->fp32_grads) nccl_all_reduce(f->nccl, group, f->grads_fp32 + first, count, ncclFloat32, ncclSum);
        else nccl_all_reduce(f->nccl, group, f->grads + first, count, ncclBfloat16, ncclSum);
        nccl_end(f->nccl);
        if (staged) fsdp_add_reduced(f, first, f->staging, count, replace);
    }
}

// Adds the sum of each rank's own slice to the shard.
static inline void fsdp_reduce_scatter_bf16(Fsdp *f, int64_t unit) {
    const FsdpUnit full = fsdp_gradients(f, unit);
    bf16 *const from[NUM_SEGMENTS] = {full.vectors, full.matrices, full.embedding};
    const bool stays = !f->sum.add && !f->fp32_grads;  // what NCCL writes is the sum
    nccl_begin(f->nccl, "reduce-scatter of the gradients", unit);
    for (int k = 0; k < fsdp_reduced_segments(f); k++) {
        const ShardSegment g = shard_segment(f->table, &f->plan, unit, k);
        bf16 *to = stays ? f->grads + g.shard : from[k] + f->plan.place * g.slice;
        if (g.slice) nccl_reduce_scatter(f->nccl, COMM_SHARD, from[k], to, g.slice, ncclBfloat16);
    }
    nccl_end(f->nccl);
    for (int k = 0; !stays && k < fsdp_reduced_segments(f); k++) {
        const ShardSegment g = shard_segment(f->table, &f->plan, unit, k);
        if (g.slice) fsdp_add_reduced(f, g.shard, from[k] + f->plan.place * g.slice, g.slice, fsdp_sum_of(f, g, 0));
    }
}

static inline void fsdp_reduce_scatter_fp32(Fsdp *f, int64_t unit) {
    const FsdpUnit full = fsdp_gradients(f, unit);
    bf16 *const from[NUM_SEGMENTS] = {full.vectors, full.matrices, full.embedding};
    for (int k = 0; k < fsdp_reduced_segments(f); k++) {
        const ShardSegment g = shard_segment(f->table, &f->plan, unit, k);
        for (int64_t first = 0; first < g.slice; first += f->staging_slice) {
            const int64_t count = min_i64(f->staging_slice, g.slice - first);
            float *part = f->staging + f->plan.place * count;
            fsdp_to_fp32(f, from[k] + first, f->plan.group, count, g.slice);
            nccl_begin(f->nccl, "reduce-scatter of the gradients", unit);
            nccl_reduce_scatter(f->nccl, COMM_SHARD, f->staging, part, count, ncclFloat32);
            nccl_end(f->nccl);
            fsdp_add_reduced(f, g.shard + first, part, count, fsdp_sum_of(f, g, first));
        }
    }
}

// The sum over `ranks` ranks, in their order, of each one's n elements joins to [n], a part of the sum over
// micro-steps: those of the rank at `place` are `own`, the others' lie in `others` [ranks - 1][n]. In fp32, with one
// rounding if `to` is bf16. n: a multiple of 8.
template <class Sum>
static __global__ void __launch_bounds__(FSDP_THREADS)
    fsdp_sum_kernel(Sum *to, const bf16 *own, const bf16 *others, int64_t ranks, int64_t place, int64_t n,
                    GradientSum how) {
    grid_dependency_wait();
    const int64_t i = (blockIdx.x * (int64_t)FSDP_THREADS + threadIdx.x) * 8;
    if (i >= n) return;
    float sum[8], x[8];
    gradient_load_8(sum, place == 0 ? own + i : others + i);
#pragma unroll 4
    for (int64_t rank = 1; rank < ranks; rank++) {
        gradient_load_8(x, rank == place ? own + i : others + (rank - (rank > place)) * n + i);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += x[j];
    }
    gradient_join_8(to + i, sum, i, how);
}

// Launches it: `own` and what has been received of the others join the sum from element `at` of this rank's arrays on.
static inline void fsdp_sum_received(Fsdp *f, int64_t at, const bf16 *own, int64_t n, GradientSum how) {
    const unsigned blocks = grid_size(n, FSDP_THREADS * 8);
    const int64_t ranks = f->peers.ranks, place = f->peers.place;
    const cudaStream_t stream = f->nccl->stream;
    if (f->fp32_grads)
        CUDA_LAUNCH(fsdp_sum_kernel<float>, blocks, FSDP_THREADS, 0, stream, f->grads_fp32 + at, own, f->received,
                    ranks, place, n, how);
    else
        CUDA_LAUNCH(fsdp_sum_kernel<bf16>, blocks, FSDP_THREADS, 0, stream, f->grads + at, own, f->received, ranks,
                    place, n, how);
}

// The reduce-scatter by copy engines: every rank reads from the others what belongs to its slice.
static inline void fsdp_reduce_scatter_copies(Fsdp *f, int64_t unit) {
    const FsdpUnit full = fsdp_gradients(f, unit);
    bf16 *const from[NUM_SEGMENTS] = {full.vectors, full.matrices, full.embedding};
    const cudaStream_t stream = f->nccl->stream;
    nccl_begin_operation(f->nccl, "reduce-scatter of the gradients", unit);
    peer_barrier(&f->peers, stream);  // all ranks' gradients are computed
    for (int k = 0; k < fsdp_reduced_segments(f); k++) {
        const ShardSegment g = shard_segment(f->table, &f->plan, unit, k);
        for (int64_t first = 0; first < g.slice; first += f->received_slice) {
            const int64_t count = min_i64(f->received_slice, g.slice - first);
            const bf16 *own = from[k] + f->plan.place * g.slice + first;
            peer_read(&f->peers, own, f->received, count * (int64_t)sizeof(bf16), false, stream);
            fsdp_sum_received(f, g.shard + first, own, count, fsdp_sum_of(f, g, first));
        }
    }
    peer_barrier(&f->peers, stream);  // all ranks have read: the buffer may be written again
    nccl_end_operation(f->nccl);
}

// Without sharding: a unit's gradient joins the sum, unless it has been computed there.
static inline void fsdp_join(Fsdp *f, int64_t unit) {
    if (fsdp_in_place(f)) return;
    const int64_t n = segment_begin(shard_slices(&f->plan, unit), fsdp_reduced_segments(f)),
                  at = shard_unit_offset(&f->plan, unit);
    const bf16 *from = unit ? f->layer_grads[0] : f->root_grads;
    fsdp_add(f, at, from, n, fsdp_sum_at(f, at), grid_size(n, FSDP_THREADS * 8), f->stream);
}

// The unit's gradient of this micro-step is computed: the part that is reduced goes to the ranks that keep it, and
// joins the sum of the micro-steps before. The loss's gradient has been divided by the tokens of all ranks, so that the
// sum is the mean.
static inline void fsdp_reduce_scatter(Fsdp *f, int64_t unit) {
    if (!f->sharded) return fsdp_join(f, unit);
    fsdp_communicate_after(f);
    if (f->peers.ranks) fsdp_reduce_scatter_copies(f, unit);
    else if (f->fp32_reduce) fsdp_reduce_scatter_fp32(f, unit);
    else fsdp_reduce_scatter_bf16(f, unit);
    CUDA_CHECK(cudaEventRecord(f->reduced[fsdp_gradient_buffer(unit)], f->nccl->stream));
}

// The rank's part of a unit's gradient is complete: with the other replicas' it makes the sum over all ranks, after the last micro-step and fsdp_compute_after.
static inline void fsdp_reduce_replicas(Fsdp *f, int64_t unit, bool last) {
    if (!f->nccl || !last || f->replicas == 1) return;
    fsdp_communicate_after(f);
    fsdp_all_reduce(f, COMM_REPLICAS, shard_unit_offset(&f->plan, unit), shard_unit_size(&f->plan, unit), unit);
}

// The gradients of the inputs [embedding_ranks][input_elements], this rank's being `dx`. What is enqueued from now on may read them and write dx, and finds the
// root's gradient reduced. dx was complete when fsdp_reduce_scatter was called last: all ranks' are, once that has waited for them.
static inline const bf16 *fsdp_gather_inputs(Fsdp *f, const bf16 *dx) {
    if (f->embedding_ranks == 1) return dx;
    fsdp_communicate_after(f);
    fsdp_begin_gather(f, "all-gather of the inputs' gradients", -1);
    fsdp_gather_slice(f, dx, f->root_grads, f->input_elements, ncclBfloat16);
    if (f->peers.ranks) peer_barrier(&f->peers, f->nccl->stream);  // all ranks have read
    fsdp_end_gather(f);
    fsdp_compute_after(f);
    return f->root_grads;
}

// Sums over all ranks: of the loss, and of the squares of gradients that are sharded (with S == 1 every rank has all of them, and the same).
static inline void fsdp_reduce_statistics(Fsdp *f, float *loss, double *squares) {
    if (!f->nccl) return;
    fsdp_communicate_after(f);
    nccl_begin(f->nccl, "all-reduce of loss and gradient norm", -1);
    nccl_all_reduce(f->nccl, COMM_WORLD, loss, 1, ncclFloat32, ncclSum);
    if (squares && f->sharded) nccl_all_reduce(f->nccl, COMM_WORLD, squares, 1, ncclFloat64, ncclSum);
    nccl_end(f->nccl);
    fsdp_compute_after(f);
}

// Copies of the gradient in the sum of squares over all ranks.
static inline int64_t fsdp_gradient_copies(const Fsdp *f) { return f->sharded ? f->replicas : 1; }

#endif
