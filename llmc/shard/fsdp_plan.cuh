// Plans FSDP for a run: the strategy that follows from options and number of ranks, and its sizes.
//
// fsdp.cuh explains the strategies and executes them. Layers are numbered from 0; ROOT is the root unit.
#ifndef LLMC_FSDP_PLAN_CUH
#define LLMC_FSDP_PLAN_CUH

#include "../base/arena.h"
#include "../config/precision.h"
#include "../config/shard_plan.h"
#include "../optimizer/adamw_norm.cuh"
#include "../optimizer/adamw_update.cuh"
#include "../optimizer/fp16_weights.cuh"
#include "../optimizer/gradient_fp8.cuh"
#include "../fp8/quantize.cuh"
#include "../fp8/tensor_scales.cuh"
#include "transport.cuh"

enum { FSDP_GRADIENT_BUFFERS = 2 };

// AdamW's amax slots, Fp8Slices.ends and LinearId use the order of parameters.h for the FP8 weights of a layer.
static_assert(QKV_PROJ == 0 && OUT_PROJ == 1 && GATE_UP_PROJ == 2 && DOWN_PROJ == 3 && NUM_LINEARS == 4, "LinearId");
static_assert(offsetof(LayerOffsets, wq) < offsetof(LayerOffsets, wk) &&
                  offsetof(LayerOffsets, wk) < offsetof(LayerOffsets, wv) &&
                  offsetof(LayerOffsets, wv) < offsetof(LayerOffsets, wo) &&
                  offsetof(LayerOffsets, wo) < offsetof(LayerOffsets, wgate) &&
                  offsetof(LayerOffsets, wgate) < offsetof(LayerOffsets, wup) &&
                  offsetof(LayerOffsets, wup) < offsetof(LayerOffsets, wdown),
              "LinearId numbers the weights in the order of parameters.h");
static_assert((int)ADAMW_CLIP_SLOTS >= (int)FSDP_GRADIENT_BUFFERS,
              "each place of a layer's sums needs a slot of squares");
static_assert(TENSOR_W == 0, "a layer's weights are first among its amaxes and scales");
static_assert((int)NUM_LINEARS <= (int)SLICE_MAX_TENSORS, "quantize_slices takes all FP8 weights of a layer");

// The source of the weights that a GEMM reads.
typedef enum {
    FSDP_WEIGHTS_RESIDENT,     // this rank has all weights; FP8 weights are cast for each layer and pass, or resident
    FSDP_WEIGHTS_GATHER_BF16,  // all-gather in bf16 over the shard group; FP8 weights are cast after it
    FSDP_WEIGHTS_GATHER_FP8  // all-gather in FP8 over the shard group; in bf16 for layers that have a bf16 linear layer
} FsdpWeightSource;

// The memory in which backward computes gradients.
typedef enum {
    FSDP_GRADIENTS_IN_PLACE,  // the gradient array itself
    FSDP_GRADIENTS_CAST,      // the root: in place; a layer: a buffer, whose matrices are then cast to FP8 sums
    FSDP_GRADIENTS_BUFFERED,  // a buffer, which is then added to this rank's sums (exception: fsdp_in_place)
    FSDP_GRADIENTS_SCATTERED  // a buffer, which is then reduce-scattered over the shard group
} FsdpGradientPlace;

// The way in which the embedding's gradient is computed.
typedef enum {
    FSDP_EMBEDDING_OWN,         // this rank adds the embedding's gradient to its sums, which hold the whole table
    FSDP_EMBEDDING_REDUCED,     // this rank computes the whole gradient, which is reduced with the rest of the root
    FSDP_EMBEDDING_FROM_INPUTS  // this rank adds the input gradients of its shard group to its part of the sums
} FsdpEmbedding;

// The time for which gathered layers are kept.
typedef enum {
    FSDP_KEPT_LAYER,  // until another layer needs the slot
    FSDP_KEPT_STEP    // until the weights change; each layer has a slot or FP8 data of its own
} FsdpKept;

// The segments of a unit's weights or gradients, which need not lie in one array.
typedef struct {
    bf16 *vectors, *matrices;  // matrices is NULL for weights of a layer whose matrices are in FP8 only
    bf16 *embedding;  // only in the root; also lm_head if tied. NULL in a buffer that the embedding's gradient bypasses
} FsdpUnit;

// Byte offsets of a weight's scales in the rowwise and in the columnwise scales of its layer.
typedef struct {
    int64_t rowwise_scales, columnwise_scales;
} FsdpScales;

// Memory for one gathered layer.
typedef struct {
    int64_t layer;  // the layer that it holds or will hold; NO_LAYER if its data is not valid
    cudaEvent_t arrived, released;
} FsdpSlot;

// The trainer passes these to fsdp_create.
typedef struct {
    bf16 *weights;               // this rank's shard (weights_begin)
    TensorScales *scales;        // amaxes and scales of the weights
    Nccl *nccl;                  // connected; NULL if there is one rank
    StepLog *log;                // the compute stream's
    const AdamwScaled *masters;  // with precision->casts_masters: FP16 masters, from which FP8 weights are cast
} FsdpInputs;

// The strategy and its sizes. They follow from the options, the model and the number of ranks, and do not change.
typedef struct {
    const ParameterTable *table;
    const Precision *precision;
    ShardPlan shard;
    int64_t world, replicas, replica;
    FsdpWeightSource weight_source;
    FsdpGradientPlace gradient_place;
    FsdpEmbedding embedding;
    FsdpKept kept;
    bool recomputes_gemms;        // backward repeats GEMMs of a layer's forward pass, so it reads rowwise data too
    bool embedding_is_transient;  // the gathered embedding is in gradients.root_buffer, until backward writes there
    bool optimizer_in_backward;
    bool any_ranks;  // options_any_ranks
    // Number of layers whose sums of gradients have memory: all, or with optimizer_in_backward one with one rank, and
    // at most two with several ranks. Layer l uses place l % sum_layers.
    int64_t sum_layers;
    uint64_t rounding_seed;
    bool fp8_gradients;  // matrices of layers have FP8 gradients; transport.sums has the others (gradient_fp8.cuh)
    int64_t root_elements[NUM_SEGMENTS], layer_elements[NUM_SEGMENTS];  // number of parameters, without padding
    int64_t input_elements;  // elements of a rank's input gradients: dx [R, C], the gradient of the embedding's output
} FsdpPlan;

// Weights that were gathered or cast, and the FP16 masters from which FP8 weights may be cast.
typedef struct {
    Fp16Weights masters;   // with precision->casts_masters
    uint8_t *shard_fp8;    // [L, slice] FP8 codes of this rank's slices of the matrices (fsdp_keeps_codes)
    bool update_coded;     // AdamW has written shard_fp8 since the last fsdp_publish_layers
    bf16 *root, *vectors;  // gathered root unit; gathered vectors [L, shard_size * slice]
    char *slots;           // [num_slots] each holds the gathered matrices of one layer, in bf16 or FP8
    FsdpSlot *slot;
    int64_t num_slots;
    uint8_t *rowwise;           // [num_rowwise] each holds the rowwise FP8 data of one layer's matrices
    uint8_t *columnwise;        // [num_columnwise] each holds the columnwise FP8 data of one layer's matrices
    char *rowwise_scales;       // [num_rowwise] the scales of `rowwise`; unused with one scale per tensor
    char *columnwise_scales;    // [num_columnwise] the scales of `columnwise`; unused with one scale per tensor
    int64_t *rowwise_layer;     // [num_rowwise] the layers in `rowwise`; NO_LAYER: none
    int64_t *columnwise_layer;  // [num_columnwise] the layers in `columnwise`; NO_LAYER: none
    int64_t num_rowwise, num_columnwise;
    FsdpScales scales[NUM_LINEARS];
    int64_t rowwise_scale_bytes, columnwise_scale_bytes;  // bytes of a layer's scales
    bool *amaxes_known;  // [L] true if the amaxes of the layer's weights are known (scales finer than per tensor)
} FsdpWeights;

// Buffers in which gradients are computed, and the sums of FP8 gradients. All other sums are in the transport.
typedef struct {
    GradientSum sum;               // how gradients of this micro-step are added to the sums
    uint64_t embedding_key;        // key of the random bits when the embedding's gradient joins the sums directly
                                   // (fsdp_embedding_joins); all other gradients: sum.key
    GradientFp8Layout fp8_layout;  // this rank's slices
    GradientFp8Layout fp8_whole;   // whole layers, as backward computes them
    GradientFp8 fp8_sums;
    GradientFp8 fp8_sent;   // one whole layer's gradients in FP8; only if they are reduced in FP8 over a shard group
    uint8_t *fp8_received;  // codes of other ranks, of the shard group or of the replicas
    bf16 *fp8_reduced;      // a layer's gradients while replicas sum them in bf16
    // Memory of the layers' and the embedding's gradients that activations may use until backward writes gradients
    // there. Backward writes each place once a step, the embedding's last. Empty if activations may not use it.
    ArenaRange late_layers, late_embedding;
    int64_t late_layer_bytes;  // bytes of one layer in late_layers
    // Holds in turn: the gathered embedding (embedding_is_transient), the root's gradient (without the embedding's if
    // that bypasses it), and with FSDP_EMBEDDING_FROM_INPUTS the shard group's input gradients.
    bf16 *root_buffer;
    bf16 *layer_buffer[FSDP_GRADIENT_BUFFERS];
    cudaEvent_t reduced[1 + FSDP_GRADIENT_BUFFERS];  // one of root_buffer, one of each layer_buffer
    cudaEvent_t summed[FSDP_GRADIENT_BUFFERS];       // with optimizer_in_backward: [l % sum_layers] layer l's sums
} FsdpGradients;

typedef struct {
    double grad_clip;  // above 0 only with optimizer_in_backward: gradients are then clipped unit by unit
    AdamwClip adamw;   // for grad_clip
} FsdpClip;

typedef struct {
    FsdpPlan plan;
    FsdpWeights weights;
    FsdpGradients gradients;
    FsdpClip clip;
    Transport transport;
    FsdpInputs in;
    int64_t step;
} Fsdp;

// ---- sizes

// True if several ranks shard one replica of the weights.
static inline bool fsdp_is_sharded(const Fsdp *f) { return f->plan.shard.shard_size > 1; }

// Number of ranks whose input gradients are summed into the embedding's gradient on this rank.
static inline int64_t fsdp_input_ranks(const Fsdp *f) {
    return f->plan.embedding == FSDP_EMBEDDING_FROM_INPUTS ? f->plan.shard.shard_size : 1;
}

// True if the embedding's gradient is added directly to this rank's sums, after the rest of the root's gradient.
static inline bool fsdp_embedding_joins(const Fsdp *f) { return f->plan.embedding != FSDP_EMBEDDING_REDUCED; }

// Number of segments of a gradient that are computed in a buffer: all, or all before an embedding whose gradient is
// added directly to the sums.
static inline int fsdp_reduced_segments(const Fsdp *f) {
    return fsdp_embedding_joins(f) ? SEGMENT_EMBEDDING : NUM_SEGMENTS;
}

// Elements of the buffer in which the root's gradient is computed.
static inline int64_t fsdp_root_gradient(const Fsdp *f) {
    return f->plan.shard.shard_size * segment_begin(f->plan.shard.root_slices, fsdp_reduced_segments(f));
}

// True if the buffer of the root's gradient must stay until the end of backward, where a tied embedding's gradient
// joins it. Else, without sharding, activations use its memory in backward.
static inline bool fsdp_root_buffer_stays(const Fsdp *f) {
    return !fsdp_is_sharded(f) && f->plan.gradient_place == FSDP_GRADIENTS_BUFFERED && !fsdp_embedding_joins(f);
}

// First element of unit l's sums of gradients in transport.sums or sums_fp32. The root's sums come first.
static inline int64_t fsdp_sums_begin(const Fsdp *f, int64_t l) {
    if (f->plan.fp8_gradients && l != ROOT) return f->gradients.fp8_layout.root + l * f->gradients.fp8_layout.vectors;
    return shard_begin(&f->plan.shard, l == ROOT ? l : l % f->plan.sum_layers);
}

// Elements that a layer has in transport.sums or sums_fp32: its shard, or with FP8 gradients only its shard of the
// vectors.
static inline int64_t fsdp_sum_elements(const Fsdp *f) {
    return f->plan.fp8_gradients ? f->gradients.fp8_layout.vectors : shard_elements(&f->plan.shard, 0);
}

// Elements of transport.sums or sums_fp32.
static inline int64_t fsdp_sums_elements(const Fsdp *f) {
    return fsdp_sums_begin(f, 0) + f->plan.sum_layers * fsdp_sum_elements(f);
}

// Elements of a gathered layer's matrices and vectors, with padding.
static inline int64_t fsdp_layer_matrices(const Fsdp *f) {
    return f->plan.shard.shard_size * f->plan.shard.layer_slices[SEGMENT_MATRICES];
}
static inline int64_t fsdp_layer_vectors(const Fsdp *f) {
    return f->plan.shard.shard_size * f->plan.shard.layer_slices[SEGMENT_VECTORS];
}

// True if each FP8 weight has one scale. Columnwise data is then the transpose of rowwise data, so FP8 data can be
// gathered. The amaxes of changed weights must then be in in.scales before fsdp_publish_layers.
static inline bool fsdp_tensor_scales(const Fsdp *f) {
    return f->plan.precision->any_fp8 && recipe_has_tensor_scales(f->plan.precision->recipe);
}

// True if layer l is gathered in FP8.
static inline bool fsdp_gathers_fp8(const Fsdp *f, int64_t l) {
    return f->plan.weight_source == FSDP_WEIGHTS_GATHER_FP8 && precision_layer_is_fp8(f->plan.precision, l);
}

// True if a rank with all weights has the rowwise codes of all FP8 weights in shard_fp8 too: AdamW writes them there.
static inline bool fsdp_codes_are_resident(const Fsdp *f) {
    return f->plan.weight_source == FSDP_WEIGHTS_RESIDENT && f->plan.precision->any_fp8 &&
           f->plan.precision->recipe->bounded;
}

// True if this rank keeps FP8 codes of its slices.
static inline bool fsdp_keeps_codes(const Fsdp *f) {
    return f->plan.weight_source == FSDP_WEIGHTS_GATHER_FP8 || fsdp_codes_are_resident(f);
}

// True if FP8 weights are cast for one layer at a time, and fsdp_reshard invalidates them.
static inline bool fsdp_casts_are_transient(const Fsdp *f) { return f->plan.weight_source == FSDP_WEIGHTS_RESIDENT; }

// Bytes of one element in the slots.
static inline int64_t fsdp_slot_element(const Fsdp *f) {
    return f->plan.weight_source == FSDP_WEIGHTS_GATHER_FP8 && !f->plan.precision->any_bf16 ? 1 : (int64_t)sizeof(bf16);
}

// ---- the strategy

// Chooses the strategy. f->plan.shard, f->transport, fp8_gradients and input_elements must be set.
static inline void fsdp_describe_strategy(Fsdp *f, const Options *o) {
    FsdpPlan *plan = &f->plan;
    const bool sharded = fsdp_is_sharded(f), one_pass = o->grad_accumulation_steps == 1;
    const int64_t table = plan->table->root_segments[embedding_segment(plan->table)];
    if (!sharded) plan->weight_source = FSDP_WEIGHTS_RESIDENT;
    else if (plan->precision->any_fp8 && o->fp8_all_gather == ON) plan->weight_source = FSDP_WEIGHTS_GATHER_FP8;
    else plan->weight_source = FSDP_WEIGHTS_GATHER_BF16;
    if (sharded) plan->gradient_place = FSDP_GRADIENTS_SCATTERED;
    else if (!one_pass || f->transport.fp32_sums) plan->gradient_place = FSDP_GRADIENTS_BUFFERED;
    else plan->gradient_place = plan->fp8_gradients ? FSDP_GRADIENTS_CAST : FSDP_GRADIENTS_IN_PLACE;
    // any_ranks: all ways give the same bits, if a tied embedding's gradient joins lm_head's before it is reduced.
    if (plan->any_ranks && embedding_segment(plan->table) != SEGMENT_EMBEDDING)
        plan->embedding = FSDP_EMBEDDING_REDUCED;
    else if (!sharded) plan->embedding = FSDP_EMBEDDING_OWN;
    else if (plan->shard.shard_size * plan->input_elements <= table) plan->embedding = FSDP_EMBEDDING_FROM_INPUTS;
    else plan->embedding = FSDP_EMBEDDING_REDUCED;
    plan->kept = o->sharding == SHARDING_GRAD_OP ? FSDP_KEPT_STEP : FSDP_KEPT_LAYER;
    plan->recomputes_gemms = options_recomputed(o).attention || options_recomputed(o).mlp;
    plan->embedding_is_transient = sharded && one_pass && embedding_segment(plan->table) == SEGMENT_EMBEDDING;
}

// Sets the offsets of the scales of each weight, and the bytes of a layer's scales.
static inline void fsdp_describe_scales(Fsdp *f) {
    FsdpWeights *w = &f->weights;
    const Recipe *r = f->plan.precision->recipe;
    const ScaleGranularity row = recipe_granularity(r, TENSOR_W, ROWWISE),
                           col = recipe_granularity(r, TENSOR_W, COLUMNWISE);
    for (int j = 0; j < NUM_LINEARS; j++) {
        const LinearShape *s = &f->plan.precision->linear[j];
        const FsdpScales at = {w->rowwise_scale_bytes, w->columnwise_scale_bytes};
        w->scales[j] = at;
        if (fsdp_tensor_scales(f)) continue;
        w->rowwise_scale_bytes += round_up(scale_bytes(row, s->N, s->K), ARENA_ALIGNMENT);
        w->columnwise_scale_bytes += round_up(scale_bytes(col, s->K, s->N), ARENA_ALIGNMENT);
    }
}

// Sets how many layers the slots and the FP8 buffers hold.
static inline void fsdp_describe_buffers(Fsdp *f) {
    const FsdpPlan *plan = &f->plan;
    FsdpWeights *w = &f->weights;
    const int64_t L = plan->table->num_layers;
    const bool fp8 = plan->precision->any_fp8, sharded = fsdp_is_sharded(f),
               keep_gathered = plan->kept == FSDP_KEPT_STEP;
    // bf16 weights that only one cast reads, to rowwise data, need not be kept
    const bool all_fp8 = fp8 && !plan->precision->any_bf16,
               gathers_fp8 = plan->weight_source == FSDP_WEIGHTS_GATHER_FP8;
    const bool bf16_is_cast = all_fp8 && !gathers_fp8 && fsdp_tensor_scales(f),
               codes_are_rowwise = (all_fp8 && gathers_fp8) || fsdp_codes_are_resident(f);
    w->num_slots = !sharded ? 0 : keep_gathered && !bf16_is_cast ? L : min_i64(2, L);
    w->num_columnwise = !fp8 ? 0 : sharded && keep_gathered ? L : 1;
    w->num_rowwise = codes_are_rowwise ? 0 : w->num_columnwise;
    w->slot = (FsdpSlot *)xcalloc((size_t)w->num_slots, sizeof *w->slot);
    w->amaxes_known = (bool *)xcalloc((size_t)L, sizeof *w->amaxes_known);
    w->rowwise_layer = (int64_t *)xcalloc((size_t)w->num_rowwise, sizeof *w->rowwise_layer);
    w->columnwise_layer = (int64_t *)xcalloc((size_t)w->num_columnwise, sizeof *w->columnwise_layer);
}

// Chooses the strategy and sizes of rank `rank` of `world`. Needs no GPU.
static inline void fsdp_describe(Fsdp *f, const ParameterTable *table, const Precision *precision, const Options *o,
                                 int64_t world, int64_t rank) {
    memset(f, 0, sizeof *f);
    FsdpPlan *plan = &f->plan;
    const int64_t shard_size = options_shard_group(o, world);
    plan->table = table, plan->precision = precision;
    plan->any_ranks = options_any_ranks(o);
    plan->shard = shard_plan_of(table, shard_size, rank % shard_size, plan->any_ranks);
    plan->shard.masters_alone = precision->casts_masters;
    plan->world = world, plan->replicas = world / shard_size, plan->replica = rank / shard_size;
    plan->rounding_seed = (uint64_t)o->rounding_seed;
    plan->optimizer_in_backward = o->optimizer_in_backward;
    f->clip.grad_clip = options_clips_in_backward(o) ? o->grad_clip : 0;
    plan->sum_layers = table->num_layers;
    if (plan->optimizer_in_backward)
        plan->sum_layers = min_i64(world > 1 ? FSDP_GRADIENT_BUFFERS : 1, plan->sum_layers);
    plan->input_elements = o->batch_size * o->sequence_length * precision->linear[GATE_UP_PROJ].K;
    for (int64_t i = 0; i < table->count; i++) {
        const Parameter *p = &table->entries[i];
        int64_t *elements = p->layer == ROOT ? plan->root_elements : plan->layer_elements;
        if (p->layer <= 0) elements[parameter_segment(p)] += parameter_elements(p);
    }
    transport_describe(&f->transport, o, world, shard_size, plan->shard.shard_rank);
    plan->fp8_gradients = options_fp8_gradients(o);
    f->gradients.fp8_layout = gradient_fp8_layout(table, &plan->shard, false);
    f->gradients.fp8_whole = gradient_fp8_layout(table, &plan->shard, true);
    fsdp_describe_strategy(f, o);
    if (precision->any_fp8) fsdp_describe_scales(f);
    fsdp_describe_buffers(f);
}

#endif
