// Memory of a step's activations and of their gradients.
// It holds what each layer keeps for backward, what one layer at a time needs, and the logits. Many buffers whose
// lifetimes do not overlap share memory. Letters such as R, C and F are sizes in Dims (model_config.h).
//
// The placement is a function of an ActivationsLayout and an arena. dev/test/test_placement.cu checks that no buffer
// overwrites one that is still needed.
#ifndef LLMC_ACTIVATIONS_CUH
#define LLMC_ACTIVATIONS_CUH

#include "../kernels/attention.cuh"
#include "../gpu/column_sums.cuh"
#include "../fp8/fp8_group.cuh"
#include "../kernels/rmsnorm.cuh"
#include "../kernels/rope.cuh"
#include "../fp8/tensor_scales.cuh"

// The type of a layer's unquantized weights, activations and gradients. In train_fp8.c it is float.
typedef bf16 Real;

// Activations of one layer that its backward pass reads. Its forward pass leaves them in memory, except those that
// backward computes again: h always, `rotated` with QK-norm, and what --recompute asks for (Recomputed). If gate and up
// are kept in FP8 (--fp8-activations), backward decodes them into gate_up. With --offload activations, what a layer
// keeps may be in host memory between its passes. Some members share memory with those of other layers.
typedef struct {
    Real *x;        // [R, C] residual stream that enters the layer
    QTensor norm1;  // [R, C] RMSNorm of x
    float *rstd1;   // [R]
    Real *qkv;      // [R, QKV] output of the linear layer
    Real *rotated;  // [R, QKV] after QK-norm and RoPE; without QK-norm the same memory as qkv
    QTensor att;    // [R, ATT]
    float *lse;     // [B, NH, T]
    Real *x_mid;    // [R, C] residual stream between attention and MLP
    QTensor norm2;  // [R, C] RMSNorm of x_mid
    float *rstd2;   // [R]
    Real *gate_up;  // [R, 2F]
    QTensor h;      // [R, F] silu(gate) * up; backward recomputes it from gate_up
} LayerActs;

// Gradients of the outputs of a layer's four linear layers, as GEMMs read them.
typedef struct {
    QTensor qkv, out, gate_up, down;  // [R, QKV], [R, C], [R, 2F], [R, C]
} OutputGradients;

// --offload activations: layer l keeps its activations in slot l % KEPT_SLOTS (offload_kept.cuh).
enum { KEPT_SLOTS = 3 };

// The activations that a layer keeps, inside its slot.
typedef struct {
    char *begin;
    int64_t bytes;
} KeptSpan;

typedef struct {
    LayerActs *layer;           // [L]
    KeptSpan *kept;             // [L], set with --offload activations
    Fp8Groups *gate_up_fp8;     // [L], set if fp8_kept: gate and up for backward; all layers share one bf16 gate_up
    bool rotated_is_shared;     // with QK-norm: all layers share one `rotated`, which backward recomputes
    bf16 *branch;               // [R, C] output of attention or MLP before the residual add
    bf16 *x_final, *y_final;    // [R, C] residual stream after the last layer, and its RMSNorm
    float *rstd_final;          // [R]
    bf16 *logits;               // [chunk, VP]; overwritten by their gradient (not by its codes)
    float *losses;              // [R]
    float *rope_table;          // [T, HD] cosines and sines (rope_table_fill)
    bf16 *dx;                   // [R, C] gradient of the residual stream
    bf16 *dbranch, *dh, *datt;  // [R, C], [R, F], [R, ATT] gradients inside a layer; dbranch also holds that of y_final
    OutputGradients dy;         // only memory: activations_output_gradients adds a layer's amaxes and scales
    void *attention_workspace, *norm_workspace;
    void *reduce_workspace;  // for sums over rows: gradients of QK-norm and of biases
} Activations;

// A buffer of another module inside the activations' memory. `place` takes it from the arena.
typedef struct {
    void (*place)(void *context, Arena *a);
    void *context;
} ArenaGuest;

// All inputs of the placement.
typedef struct {
    const Dims *dims;
    const TensorScales *scales;
    Recomputed recomputed;
    bool fp8_kept;    // gate and up are kept in FP8 (--fp8-activations)
    bool kept_moves;  // layers share slots for what they keep (--offload activations)
    bool qk_norm;
    int64_t chunk;  // rows of logits at a time
    // Memory of the layers' weight gradients. Activations may use it until the gradients are written. If it is empty,
    // they use none.
    ArenaRange layer_gradients;
    // Memory of an untied embedding's gradient, which is written last. Activations may use it until then. If it is
    // empty, they use none.
    ArenaRange embedding_gradient;
    int64_t layer_gradient_bytes;  // bytes per layer
    // True: the logits already have memory, at `logits` (NULL while an arena only counts bytes). False:
    // activations_place places them.
    bool has_logits;
    bf16 *logits;
    ArenaGuest fp8_weights;  // FP8 weights of one layer at a time. If `place` is NULL, this memory holds none.
    ArenaGuest head;         // FP8 tensors of lm_head, in use while the logits are
    // Buffers for the root's and one layer's gradients, which are then added to sums or cast to FP8. If `place` is
    // NULL, this memory holds none.
    ArenaGuest root_gradient, layer_gradient;
} ActivationsLayout;

static inline void arena_take_guest(Arena *a, ArenaGuest guest) {
    if (guest.place) guest.place(guest.context, a);
}

static inline bf16 *take_bf16(Arena *a, int64_t n) { return (bf16 *)arena_take(a, n * (int64_t)sizeof(bf16)); }
static inline float *take_float(Arena *a, int64_t n) { return (float *)arena_take(a, n * (int64_t)sizeof(float)); }

// Returns the input of linear layer `id`.
static inline QTensor *layer_input(LayerActs *acts, LinearId id) {
    QTensor *const inputs[NUM_LINEARS] = {&acts->norm1, &acts->att, &acts->norm2, &acts->h};
    return inputs[id];
}

// Returns the gradient of the output of linear layer `id`.
static inline QTensor *layer_output_gradient(OutputGradients *dy, LinearId id) {
    QTensor *const gradients[NUM_LINEARS] = {&dy->qkv, &dy->out, &dy->gate_up, &dy->down};
    return gradients[id];
}

// ---- the data of a tensor that layers [first, last) need

typedef struct {
    bool bf16, rowwise, columnwise;
} DataNeeded;

static inline DataNeeded data_needed(const Precision *p, int64_t first, int64_t last, LinearId id, TensorRole role) {
    DataNeeded need = {false, false, false};
    for (int64_t l = first; l < last; l++) {
        const Recipe *r = precision_of(p, l, id);
        need.bf16 = need.bf16 || recipe_needs_bf16(r, role);
        need.rowwise = need.rowwise || recipe_granularity(r, role, ROWWISE) != NO_SCALE;
        need.columnwise = need.columnwise || recipe_granularity(r, role, COLUMNWISE) != NO_SCALE;
    }
    return need;
}

// Returns tensor (l, role, id) in the memory of `placed`: its FP8 data and scales, and its bf16 data if a GEMM of layer
// l reads that. A tensor with one scale has it in TensorScales instead.
static inline QTensor tensor_of_layer(const TensorScales *s, const QTensor *placed, int64_t l, TensorRole role,
                                      LinearId id) {
    QTensor q = tensor_scales_of(s, l, role, id);
    const Recipe *r = l < 0 ? recipe_row(RECIPE_BF16) : precision_of(s->precision, l, id);
    if (recipe_needs_bf16(r, role)) q.data = placed->data;
    q.rowwise = placed->rowwise, q.columnwise = placed->columnwise;
    if (!q.rowwise_scale_inv) q.rowwise_scale_inv = placed->rowwise_scale_inv;
    if (!q.columnwise_scale_inv) q.columnwise_scale_inv = placed->columnwise_scale_inv;
    return q;
}

// Returns the output gradients of layer l. All layers share the buffers. l may be -1, as if there were a layer below
// the first: no GEMM reads its output gradients.
static inline OutputGradients activations_output_gradients(const Activations *acts, const TensorScales *s, int64_t l) {
    OutputGradients placed = acts->dy, dy;
    for (int id = 0; id < NUM_LINEARS; id++) {
        const QTensor *from = layer_output_gradient(&placed, (LinearId)id);
        QTensor *to = layer_output_gradient(&dy, (LinearId)id);
        *to = tensor_of_layer(s, from, l, TENSOR_DY, (LinearId)id);
        if (id != GATE_UP_PROJ) to->data = from->data;  // the cast to FP8 reads it, even if no GEMM does
    }
    return dy;
}

// ---- placement

// Places the input of linear layer `id`, [R, K], for layers [first, last). Rowwise data is dead after the forward GEMM,
// so all layers share the buffer `row`.
static inline QTensor place_input(const ActivationsLayout *p, Arena *a, LinearId id, int64_t first, int64_t last,
                                  const QTensor *row) {
    const Precision *precision = p->scales->precision;
    const int64_t R = p->dims->R, K = precision->linear[id].K;
    const DataNeeded need = data_needed(precision, first, last, id, TENSOR_X);
    QTensor x;
    memset(&x, 0, sizeof x);
    if (need.rowwise) x.rowwise = row->rowwise, x.rowwise_scale_inv = row->rowwise_scale_inv;
    if (need.columnwise) {
        x.columnwise = (uint8_t *)arena_take(a, R * K);
        x.columnwise_scale_inv = arena_take(a, tensor_scales_own_bytes(p->scales, TENSOR_X, COLUMNWISE, R, K));
    }
    // The input of OUT_PROJ is attention's output. The caller places its bf16 data, which attention's backward pass
    // reads too.
    if (need.bf16 && id != OUT_PROJ) x.data = take_bf16(a, R * K);
    return x;
}

// Places `parts` of the activations that backward reads, in *acts. Layers [first, last) use this memory: one layer if
// its forward pass leaves these parts, all layers if backward recomputes them. No part includes x, h or `rotated`.
static inline void place_layer_acts(const ActivationsLayout *p, Arena *a, LayerActs *acts, Recomputed parts,
                                    int64_t first, int64_t last, const QTensor *row) {
    const Dims *d = p->dims;
    if (parts.stream) {
        acts->x_mid = take_bf16(a, d->R * d->C);
        acts->rstd1 = take_float(a, d->R);
        acts->rstd2 = take_float(a, d->R);
    }
    if (parts.attention) {
        acts->qkv = take_bf16(a, d->R * d->QKV);
        bf16 *att = take_bf16(a, d->R * d->ATT);
        acts->lse = take_float(a, d->R * d->NH);
        acts->att = place_input(p, a, OUT_PROJ, first, last, row);
        acts->att.data = att;
    }
    if (parts.mlp) acts->gate_up = take_bf16(a, d->R * 2 * d->F);
    if (parts.norms) {
        acts->norm1 = place_input(p, a, QKV_PROJ, first, last, row);
        acts->norm2 = place_input(p, a, GATE_UP_PROJ, first, last, row);
    }
}

// Activations that one layer at a time needs. All layers share them.
typedef struct {
    QTensor row;  // rowwise data of any linear layer's input
    QTensor h;
    bf16 *rotated;    // NULL without QK-norm
    LayerActs layer;  // the parts that backward recomputes or decodes
} OneLayer;

// Places the activations that layer l keeps for backward. For its other activations *acts points to the memory that all
// layers share, *one.
static inline void place_kept(const ActivationsLayout *p, Arena *a, LayerActs *acts, Fp8Groups *gate_up_fp8, int64_t l,
                              const OneLayer *one) {
    const Recomputed shared = p->recomputed,
                     own = {!shared.stream, !shared.norms, !shared.attention, !shared.mlp && !p->fp8_kept};
    *acts = one->layer;
    place_layer_acts(p, a, acts, own, l, l + 1, &one->row);
    if (p->fp8_kept) *gate_up_fp8 = fp8_group_place(a, p->dims->R * 2 * p->dims->F);
    acts->x = take_bf16(a, p->dims->R * p->dims->C);
    acts->h = one->h;
    acts->rotated = p->qk_norm ? one->rotated : acts->qkv;
    for (int id = 0; id < NUM_LINEARS; id++) {
        QTensor *x = layer_input(acts, (LinearId)id);
        bf16 *data = x->data;
        *x = tensor_of_layer(p->scales, x, l, TENSOR_X, (LinearId)id);
        if (id == OUT_PROJ) x->data = data;
    }
}

// Returns how many of the first layers keep their activations outside the memory of the weight gradients: the smallest
// number for which no gradient overwrites a live activation. sizes [L] are the bytes that each layer keeps.
//
// The activations inside that memory lie one behind the other, starting at the first layer's gradient. Backward goes
// from the last layer to the first. When it writes the gradient of layer l, the activations of the layers above l are
// dead, but those of layer l are not. So layer l's gradient must not begin before layer l's activations end.
static inline int64_t layers_outside(const int64_t *sizes, int64_t L, int64_t gradient_bytes) {
    for (int64_t outside = 1; outside < L; outside++) {
        // End of layer l's activations, where layer l + 1's begin, counted from the first layer's gradient.
        int64_t begin = 0;
        bool fits = true;
        for (int64_t l = outside; l < L && fits; l++) {
            begin += sizes[l];
            fits = begin <= l * gradient_bytes;
        }
        if (fits) return outside;
    }
    return L;
}

// Returns the bytes of the activations that layer l keeps.
static inline int64_t kept_bytes(const ActivationsLayout *p, int64_t l, const OneLayer *one) {
    Arena count;
    LayerActs acts;
    Fp8Groups groups;
    memset(&count, 0, sizeof count);
    arena_group(&count, "");
    place_kept(p, &count, &acts, &groups, l, one);
    return count.used;
}

static inline int64_t count_layers_outside(const ActivationsLayout *p, const OneLayer *one) {
    const int64_t L = p->dims->L;
    if (p->layer_gradients.begin == p->layer_gradients.end) return L;
    int64_t *sizes = (int64_t *)xcalloc((size_t)L, sizeof *sizes);
    for (int64_t l = 0; l < L; l++) sizes[l] = kept_bytes(p, l, one);
    const int64_t outside = layers_outside(sizes, L, p->layer_gradient_bytes);
    free(sizes);
    return outside;
}

// Places the slots, and the activations of each layer in its slot. The slots are in use until backward ends. In a build
// with ARENA_APART each layer's activations lie outside its slot: the slot is still copied to and from the host, but
// nothing reads it.
static inline void place_kept_slots(const ActivationsLayout *p, Activations *acts, Arena *a, const OneLayer *one) {
    const int64_t L = p->dims->L;
    int64_t bytes = 0;
    for (int64_t l = 0; l < L; l++) {
        acts->kept[l].bytes = kept_bytes(p, l, one);
        bytes = max_i64(bytes, acts->kept[l].bytes);
    }
    for (int64_t slot = 0; slot < min_i64(KEPT_SLOTS, L); slot++) {
        char *const begin = (char *)arena_take(a, bytes);
        for (int64_t l = slot; l < L; l += KEPT_SLOTS) {
            Arena in_slot;
            memset(&in_slot, 0, sizeof in_slot);
            arena_group(&in_slot, "");
            in_slot.base = acts->kept[l].begin = begin;
            place_kept(p, &in_slot, &acts->layer[l], &acts->gate_up_fp8[l], l, one);
        }
    }
}

// Places the FP8 data of output gradients [R, columns], for one linear layer at a time.
static inline QTensor place_gradient_data(const ActivationsLayout *p, Arena *a, int64_t columns) {
    const int64_t R = p->dims->R;
    QTensor dy;
    memset(&dy, 0, sizeof dy);
    dy.rowwise = (uint8_t *)arena_take(a, R * columns);
    dy.rowwise_scale_inv = arena_take(a, tensor_scales_own_bytes(p->scales, TENSOR_DY, ROWWISE, R, columns));
    if (recipe_granularity(p->scales->precision->recipe, TENSOR_DY, COLUMNWISE) == NO_SCALE) return dy;
    dy.columnwise = (uint8_t *)arena_take(a, R * columns);
    dy.columnwise_scale_inv = arena_take(a, tensor_scales_own_bytes(p->scales, TENSOR_DY, COLUMNWISE, R, columns));
    return dy;
}

// Places the gradients inside a layer, except dbranch. The caller has placed acts->dx.
static inline void place_inner_gradients(const ActivationsLayout *p, Activations *acts, Arena *a) {
    const Dims *d = p->dims;
    const Precision *precision = p->scales->precision;
    OutputGradients *dy = &acts->dy;
    memset(dy, 0, sizeof *dy);
    arena_group(a, "gradients of activations");
    acts->dh = take_bf16(a, d->R * d->F);
    acts->datt = take_bf16(a, d->R * d->ATT);
    bf16 *dqkv = take_bf16(a, d->R * d->QKV);
    if (precision->any_fp8) {
        dy->qkv = dy->out = dy->down = place_gradient_data(p, a, max_i64(d->C, d->QKV));
        dy->gate_up = place_gradient_data(p, a, 2 * d->F);
    }
    if (data_needed(precision, 0, d->L, GATE_UP_PROJ, TENSOR_DY).bf16) dy->gate_up.data = take_bf16(a, d->R * 2 * d->F);
    dy->qkv.data = dqkv;
    dy->out.data = dy->down.data = acts->dx;
}

static inline void place_norm_workspace(const ActivationsLayout *p, Activations *acts, Arena *a) {
    arena_group(a, "workspaces");
    acts->norm_workspace = arena_take(a, (int64_t)rmsnorm_workspace_bytes(p->dims->R, p->dims->C));
}

// Places the buffers that one layer at a time needs, forward or backward, and that nothing needs while the logits are
// in use.
static inline void place_one_layer(const ActivationsLayout *p, Activations *acts, Arena *a, OneLayer *one) {
    const Dims *d = p->dims;
    const int64_t widest = max_i64(max_i64(d->C, d->ATT), d->F);
    arena_group(a, "FP8 weights of one layer at a time");
    arena_take_guest(a, p->fp8_weights);
    arena_group(a, "activations of one layer at a time");
    if (p->scales->precision->any_fp8) {
        one->row.rowwise = (uint8_t *)arena_take(a, d->R * widest);
        one->row.rowwise_scale_inv = arena_take(a, tensor_scales_own_bytes(p->scales, TENSOR_X, ROWWISE, d->R, widest));
    }
    one->h = place_input(p, a, DOWN_PROJ, 0, d->L, &one->row);
    place_layer_acts(p, a, &one->layer, p->recomputed, 0, d->L, &one->row);
    if (p->fp8_kept) one->layer.gate_up = take_bf16(a, d->R * 2 * d->F);
    acts->branch = take_bf16(a, d->R * d->C);
    one->rotated = p->qk_norm ? take_bf16(a, d->R * d->QKV) : NULL;
    place_inner_gradients(p, acts, a);
    arena_group(a, "workspaces");
    acts->attention_workspace = arena_take(a, (int64_t)attention_workspace_bytes(d->B, d->T, d->NH, d->NKV, d->HD));
    if (!p->root_gradient.place) place_norm_workspace(p, acts, a);
    acts->reduce_workspace =
        arena_take(a, max_i64((int64_t)rope_workspace_bytes(d->HD), (int64_t)bias_workspace_bytes(d->R, d->QKV)));
    arena_take_guest(a, p->layer_gradient);
}

// Places the logits (with the buffer of the root's gradient and FP8 tensors of lm_head) and the memory of one layer.
// The two are never in use together, so they share memory: that of the embedding's gradient if the logits fit there,
// else new memory. lm_head's tensors always take new memory, and share it unless the logits have that. Returns
// the part of the embedding's gradient that stays free. If the logits already have memory, the function places only
// lm_head's tensors and the memory of one layer, and returns an empty range.
static inline ArenaRange place_logits_and_one_layer(const ActivationsLayout *p, Activations *acts, Arena *a,
                                                    OneLayer *one) {
    const ArenaRange nowhere = {0, 0}, span = p->embedding_gradient;
    const int64_t begin = a->used;
    arena_take_guest(a, p->head);
    const int64_t used = a->used;
    if (p->has_logits) {
        acts->logits = p->logits;
        arena_reuse(a, ArenaRange{begin, used});
        place_one_layer(p, acts, a, one);
        arena_reuse(a, nowhere);
        return nowhere;
    }
    arena_group(a, "logits of one chunk");
    arena_reuse(a, span);
    acts->logits = take_bf16(a, p->chunk * p->dims->VP);
    arena_take_guest(a, p->root_gradient);
    const bool in_span = used == a->used;
    const ArenaRange logits = {begin, a->used};
    const ArenaRange after_logits = arena_reuse(a, in_span ? span : logits);
    place_one_layer(p, acts, a, one);
    const ArenaRange after_layers = arena_reuse(a, nowhere),
                     left = {max_i64(after_logits.begin, after_layers.begin), span.end};
    return in_span ? left : span;
}

// Places all activations; the caller has allocated acts->layer, kept and gate_up_fp8 [L]. The last layers' activations
// use the memory of the layers' weight gradients, if the layout has any, as far as no gradient overwrites a live
// activation (layers_outside). The activations of the first layers and of the loss use the free part of the embedding's
// gradient, as far as they fit. So do the slots of --offload activations. Slots use no memory of the layers' gradients:
// the first layer still needs its slot after the gradients of all other layers have been written.
static inline void activations_place(Activations *acts, const ActivationsLayout *p, Arena *a) {
    const Dims *d = p->dims;
    const ArenaRange nowhere = {0, 0};
    OneLayer one;
    memset(&one, 0, sizeof one);
    acts->rotated_is_shared = p->qk_norm;
    arena_group(a, "gradients of activations");
    acts->dx = take_bf16(a, d->R * d->C);
    // The final norm uses its workspace while it writes to the root's buffer, so these two cannot share memory.
    if (p->root_gradient.place) place_norm_workspace(p, acts, a);
    const ArenaRange left = place_logits_and_one_layer(p, acts, a, &one);
    const int64_t outside = p->kept_moves ? 0 : count_layers_outside(p, &one);
    arena_group(a, "activations kept for backward");
    arena_reuse(a, p->layer_gradients);
    for (int64_t l = outside; l < d->L && !p->kept_moves; l++)
        place_kept(p, a, &acts->layer[l], &acts->gate_up_fp8[l], l, &one);
    arena_reuse(a, left);
    if (p->kept_moves) place_kept_slots(p, acts, a, &one);
    for (int64_t l = 0; l < outside; l++) place_kept(p, a, &acts->layer[l], &acts->gate_up_fp8[l], l, &one);
    acts->x_final = take_bf16(a, d->R * d->C);
    acts->y_final = take_bf16(a, d->R * d->C);
    acts->rstd_final = take_float(a, d->R);
    acts->dbranch = take_bf16(a, d->R * d->C);
    arena_reuse(a, nowhere);
}

#endif
