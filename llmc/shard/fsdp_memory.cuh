// Memory of FSDP: places its arrays, and shares some of their memory with activations.
#ifndef LLMC_FSDP_MEMORY_CUH
#define LLMC_FSDP_MEMORY_CUH

#include "../memory/activations.cuh"
#include "fsdp_norm.cuh"

// Places the FP8 weights that this rank casts or transposes. If they are transient and backward repeats no GEMM, a
// pass reads either rowwise or columnwise data, so the two share memory, unless rowwise data is resident.
static inline void fsdp_place_casts(Fsdp *f, Arena *a) {
    FsdpWeights *w = &f->weights;
    const int64_t matrices = fsdp_layer_matrices(f);
    const bool shared = fsdp_casts_are_transient(f) && !f->plan.recomputes_gemms && w->num_rowwise;
    if (w->num_rowwise) w->rowwise = (uint8_t *)arena_take(a, w->num_rowwise * matrices);
    if (w->num_columnwise) w->columnwise = shared ? w->rowwise : (uint8_t *)arena_take(a, w->num_columnwise * matrices);
    if (w->rowwise_scale_bytes) w->rowwise_scales = (char *)arena_take(a, w->num_rowwise * w->rowwise_scale_bytes);
    if (w->columnwise_scale_bytes)
        w->columnwise_scales = (char *)arena_take(a, w->num_columnwise * w->columnwise_scale_bytes);
}

static inline void fsdp_place_gathered(Fsdp *f, Arena *a) {
    const FsdpPlan *plan = &f->plan;
    FsdpWeights *w = &f->weights;
    const int segments = plan->embedding_is_transient ? SEGMENT_EMBEDDING : NUM_SEGMENTS;
    const int64_t root = plan->shard.shard_size * segment_begin(plan->shard.root_slices, segments);
    const int64_t L = plan->table->num_layers, element = (int64_t)sizeof(bf16);
    w->root = (bf16 *)arena_take(a, root * element);
    w->vectors = (bf16 *)arena_take(a, L * fsdp_layer_vectors(f) * element);
    w->slots = (char *)arena_take(a, w->num_slots * fsdp_layer_matrices(f) * fsdp_slot_element(f));
}

static inline void fsdp_place_gradient_buffers(Fsdp *f, Arena *a) {
    const FsdpPlan *plan = &f->plan;
    FsdpGradients *g = &f->gradients;
    const int64_t element = (int64_t)sizeof(bf16), layer = gathered_elements(&plan->shard, 0);
    const int64_t inputs = plan->embedding == FSDP_EMBEDDING_FROM_INPUTS ? plan->input_elements : 0;
    const int64_t embedding = plan->embedding_is_transient ? plan->shard.root_slices[SEGMENT_EMBEDDING] : 0;
    const int64_t root = max_i64(fsdp_root_gradient(f), plan->shard.shard_size * max_i64(inputs, embedding));
    g->root_buffer = (bf16 *)arena_take(a, root * element);
    g->layer_buffer[0] = (bf16 *)arena_take(a, FSDP_GRADIENT_BUFFERS * layer * element);
    for (int i = 1; i < FSDP_GRADIENT_BUFFERS; i++) g->layer_buffer[i] = g->layer_buffer[i - 1] + layer;
}

// Places the factors of FP16 masters.
static inline void fsdp_place_factors(Fsdp *f, Arena *a) {
    const int64_t tensors = f->plan.precision->casts_masters ? f->plan.table->num_layers * FP16_TENSORS : 0;
    arena_group(a, "amaxes, scales, audit");
    f->weights.masters.factors = (Fp16Factors *)arena_take(a, tensors * (int64_t)sizeof(Fp16Factors));
}

// Places the memory in which FP8 gradients are reduced over ranks.
static inline void fsdp_place_fp8_reduction(Fsdp *f, Arena *a) {
    const FsdpPlan *plan = &f->plan;
    FsdpGradients *g = &f->gradients;
    const GradientFp8Layout *kept = &g->fp8_layout;
    const bool codes = f->transport.reduce_dtype == REDUCE_FP8, shards = codes && fsdp_is_sharded(f);
    const int64_t others = shards ? (plan->shard.shard_size - 1) * kept->matrices : 0;
    const int64_t replicas = codes ? (plan->replicas - 1) * code_parts(kept->matrices, plan->replicas).part : 0;
    if (!plan->fp8_gradients || plan->world == 1) return;
    if (shards) {
        g->fp8_sent.codes = (uint8_t *)arena_take(a, g->fp8_whole.matrices);
        g->fp8_sent.scale_inv = (float *)arena_take(a, kept->entries * (int64_t)sizeof(float));
        g->fp8_sent.amaxes = (uint32_t *)arena_take(a, kept->entries * (int64_t)sizeof(uint32_t));
    }
    if (codes) g->fp8_received = (uint8_t *)arena_take(a, max_i64(others, replicas));
    else if (plan->replicas > 1) g->fp8_reduced = (bf16 *)arena_take(a, kept->matrices * (int64_t)sizeof(bf16));
}

// Places the gradient buffer of the root unit for FSDP_GRADIENTS_BUFFERED.
static inline void fsdp_place_root_buffer(Fsdp *f, Arena *a) {
    arena_group(a, "gradient buffers");
    f->gradients.root_buffer = (bf16 *)arena_take(a, fsdp_root_gradient(f) * (int64_t)sizeof(bf16));
}

// Places the memory of FSDP except this rank's shard and sums, transient casts (fsdp_place_casts), and, without
// sharding, buffers of gradients (fsdp_place_root_buffer, fsdp_place_layer_buffer).
static inline void fsdp_place(Fsdp *f, Arena *a) {
    const FsdpPlan *plan = &f->plan;
    const int64_t *slices = plan->shard.layer_slices, L = plan->table->num_layers;
    arena_group(a, fsdp_is_sharded(f) ? "FP8 weights (shard and layers)" : "FP8 weights and their transposes");
    if (fsdp_keeps_codes(f)) f->weights.shard_fp8 = (uint8_t *)arena_take(a, L * slices[SEGMENT_MATRICES]);
    if (!fsdp_casts_are_transient(f)) fsdp_place_casts(f, a);
    fsdp_place_factors(f, a);
    arena_group(a, "gathered weights");
    if (fsdp_is_sharded(f)) fsdp_place_gathered(f, a);
    arena_group(a, "gradient buffers");
    if (fsdp_is_sharded(f)) fsdp_place_gradient_buffers(f, a);
    if (fsdp_root_buffer_stays(f)) fsdp_place_root_buffer(f, a);
    transport_place_buffers(&f->transport, a,
                            max_i64(shard_elements(&plan->shard, ROOT), shard_elements(&plan->shard, 0)),
                            max_i64(slices[SEGMENT_VECTORS], slices[SEGMENT_MATRICES]));
    fsdp_place_fp8_reduction(f, a);
}

// Places the gradient buffer that the layers use one after another, for FSDP_GRADIENTS_BUFFERED and
// FSDP_GRADIENTS_CAST.
static inline void fsdp_place_layer_buffer(Fsdp *f, Arena *a) {
    arena_group(a, "gradient buffers");
    f->gradients.layer_buffer[0] = (bf16 *)arena_take(a, gathered_elements(&f->plan.shard, 0) * (int64_t)sizeof(bf16));
    for (int i = 1; i < FSDP_GRADIENT_BUFFERS; i++) f->gradients.layer_buffer[i] = f->gradients.layer_buffer[0];
}

// Elements of gradient memory that the loss may use for its logits, since gradients are computed there later: the
// layers' buffers if sharded, else an untied embedding's gradient if it is computed in place.
static inline int64_t fsdp_loss_span(const Fsdp *f) {
    if (fsdp_is_sharded(f)) return FSDP_GRADIENT_BUFFERS * gathered_elements(&f->plan.shard, 0);
    return f->plan.gradient_place == FSDP_GRADIENTS_BUFFERED ? 0 : f->plan.shard.root_slices[SEGMENT_EMBEDDING];
}

// Numbers that sums of squares of one unit need with grad_clip.
static inline int64_t fsdp_clip_workspace(const Fsdp *f) {
    return f->plan.any_ranks ? max_i64(fsdp_unit_sums(f, ROOT), fsdp_unit_sums(f, 0)) : (int64_t)ADAMW_NORM_BLOCKS;
}

// Places this rank's sums of gradients, of the root and of sum_layers layers. FP8 codes come last.
static inline void fsdp_place_gradients(Fsdp *f, Arena *a) {
    const FsdpPlan *plan = &f->plan;
    FsdpGradients *g = &f->gradients;
    const int64_t element = (int64_t)sizeof(bf16), tensors = plan->table->count;
    const bool fp8 = plan->fp8_gradients, all = plan->sum_layers == plan->table->num_layers;
    arena_group(a, fp8 ? "gradients (FP8, bf16)" : f->transport.fp32_sums ? "gradients (fp32)" : "gradients (bf16)");
    if (f->clip.grad_clip > 0) f->clip.adamw = adamw_clip_place(plan->table->num_layers, fsdp_clip_workspace(f), a);
    if (fp8) g->fp8_sums.scale_inv = (float *)arena_take(a, tensors * (int64_t)sizeof(float));
    if (fp8) g->fp8_sums.amaxes = (uint32_t *)arena_take(a, tensors * (int64_t)sizeof(uint32_t));
    const int64_t layers = a->used + fsdp_sums_begin(f, 0) * element;
    transport_place_sums(&f->transport, a, fsdp_sums_elements(f));
    const int64_t codes = a->used;
    if (fp8) g->fp8_sums.codes = (uint8_t *)arena_take(a, g->fp8_layout.layers * g->fp8_layout.matrices);
    if (plan->gradient_place != FSDP_GRADIENTS_IN_PLACE && plan->gradient_place != FSDP_GRADIENTS_CAST) return;
    const ArenaRange of_embedding = {layers - fsdp_loss_span(f) * element, layers},
                     of_layers = {fp8 ? codes : layers, fp8 || all ? a->used : layers};
    g->late_embedding = of_embedding, g->late_layers = of_layers;
    g->late_layer_bytes = fp8 ? g->fp8_layout.matrices : plan->table->layer_size * element;
    if (of_layers.begin % ARENA_ALIGNMENT || of_embedding.begin % ARENA_ALIGNMENT)
        die("the memory of gradients is not aligned for activations");  // parameters.h aligns all parameters
}

static inline void fsdp_guest_casts(void *f, Arena *a) { fsdp_place_casts((Fsdp *)f, a); }
static inline void fsdp_guest_root_buffer(void *f, Arena *a) { fsdp_place_root_buffer((Fsdp *)f, a); }
static inline void fsdp_guest_layer_buffer(void *f, Arena *a) { fsdp_place_layer_buffer((Fsdp *)f, a); }

// Sets in *layout what FSDP and activations share: the buffers that FSDP places inside the activations' memory, and the
// memory of gradients that logits and activations may use. Call it after fsdp_place and fsdp_place_gradients, with
// dims and chunk of *layout set.
static inline void fsdp_share_memory(Fsdp *f, ActivationsLayout *layout) {
    const ArenaGuest none = {NULL, NULL}, casts = {fsdp_guest_casts, f};
    const ArenaGuest root = {fsdp_guest_root_buffer, f}, layer = {fsdp_guest_layer_buffer, f};
    const bool buffered = f->plan.gradient_place == FSDP_GRADIENTS_BUFFERED;
    layout->fp8_weights = fsdp_casts_are_transient(f) ? casts : none;
    layout->root_gradient = buffered && !fsdp_root_buffer_stays(f) ? root : none;
    layout->layer_gradient = buffered || f->plan.gradient_place == FSDP_GRADIENTS_CAST ? layer : none;
    layout->has_logits = fsdp_is_sharded(f) && layout->chunk * layout->dims->VP <= fsdp_loss_span(f);
    layout->logits = f->gradients.layer_buffer[0];  // has fsdp_loss_span; without sharding the trainer places it
    layout->layer_gradients = f->gradients.late_layers, layout->embedding_gradient = f->gradients.late_embedding;
    layout->layer_gradient_bytes = f->gradients.late_layer_bytes;
}

#endif
