// The one table of parameters. Initialization, memory, the optimizer, checkpoints and sharding all walk it.
//
// All parameters lie in one flat array of `total` elements. The root unit (embedding, final norm, lm_head) comes first,
// then one unit of equal size for each layer. A unit has segments, each padded to a multiple of PARAMETER_ALIGNMENT
// elements:
//   - its vectors (norms, biases);
//   - its matrices (those of a layer can be all-gathered in FP8);
//   - in the root, an embedding that is not tied to lm_head. Few rows of its gradient are not zero, so GPUs may
//     exchange that gradient in another way (fsdp_embedding.cuh).
// Within a segment, table order is memory order. The root's matrices are padded to model_padded_vocabulary() rows. A
// tensor with PARAM_JOINED follows the tensor before it without a gap,
// so that the weight (or bias) of a fused linear layer (q, k, v, or gate, up) is a view. All tensors without
// PARAM_JOINED start at a multiple of PARAMETER_ALIGNMENT elements.
#ifndef LLMC_PARAMETERS_H
#define LLMC_PARAMETERS_H

#include "../base/coat.h"
#include "model_config.h"

#define PARAMETER_ALIGNMENT 128
static_assert(PARAMETER_ALIGNMENT % COAT_GROUP == 0, "each group of moments lies in one rank's slice: shard_plan.h");

enum {
    PARAM_DECAY = 1,       // weight decay applies (matrices; not norms and biases)
    PARAM_FP8 = 2,         // weight of a linear layer that FP8 recipes quantize
    PARAM_JOINED = 4,      // follows the tensor before it without a gap: both belong to one fused linear layer
    PARAM_INIT_ONE = 8,    // starts at 1 (norms)
    PARAM_INIT_ZERO = 16,  // starts at 0 (biases); without either PARAM_INIT_ flag: normal, std = initializer_range
    PARAM_LOOKUP = 32      // no GEMM reads it: an embedding that is not tied to lm_head
};

// The segments of a unit (see above), in memory order.
enum { SEGMENT_VECTORS, SEGMENT_MATRICES, SEGMENT_EMBEDDING, NUM_SEGMENTS };

//    field      Hugging Face name                      rows         cols  present       flags
// clang-format off
#define ROOT_PARAMETERS(X) \
    X(embedding, "model.embed_tokens.weight",           V,           C,    true,         PARAM_DECAY | (m->tie_word_embeddings ? 0 : PARAM_LOOKUP)) \
    X(lm_head,   "lm_head.weight",                      V,           C,    !m->tie_word_embeddings, PARAM_DECAY) \
    X(norm,      "model.norm.weight",                   C,           0,    true,         PARAM_INIT_ONE)
// clang-format on

// clang-format off
#define LAYER_PARAMETERS(X) \
    X(norm1,     "input_layernorm.weight",              C,           0,    true,         PARAM_INIT_ONE) \
    X(wq,        "self_attn.q_proj.weight",             NH * HD,     C,    true,         PARAM_DECAY | PARAM_FP8) \
    X(wk,        "self_attn.k_proj.weight",             NKV * HD,    C,    true,         PARAM_DECAY | PARAM_FP8 | PARAM_JOINED) \
    X(wv,        "self_attn.v_proj.weight",             NKV * HD,    C,    true,         PARAM_DECAY | PARAM_FP8 | PARAM_JOINED) \
    X(bq,        "self_attn.q_proj.bias",               NH * HD,     0,    m->qkv_bias,  PARAM_INIT_ZERO) \
    X(bk,        "self_attn.k_proj.bias",               NKV * HD,    0,    m->qkv_bias,  PARAM_INIT_ZERO | PARAM_JOINED) \
    X(bv,        "self_attn.v_proj.bias",               NKV * HD,    0,    m->qkv_bias,  PARAM_INIT_ZERO | PARAM_JOINED) \
    X(q_norm,    "self_attn.q_norm.weight",             HD,          0,    m->qk_norm,   PARAM_INIT_ONE) \
    X(k_norm,    "self_attn.k_norm.weight",             HD,          0,    m->qk_norm,   PARAM_INIT_ONE) \
    X(wo,        "self_attn.o_proj.weight",             C,           NH * HD, true,      PARAM_DECAY | PARAM_FP8) \
    X(norm2,     "post_attention_layernorm.weight",     C,           0,    true,         PARAM_INIT_ONE) \
    X(wgate,     "mlp.gate_proj.weight",                F,           C,    true,         PARAM_DECAY | PARAM_FP8) \
    X(wup,       "mlp.up_proj.weight",                  F,           C,    true,         PARAM_DECAY | PARAM_FP8 | PARAM_JOINED) \
    X(wdown,     "mlp.down_proj.weight",                C,           F,    true,         PARAM_DECAY | PARAM_FP8)
// clang-format on

#define OFFSET_FIELD(field, ...) int64_t field;

// Element offsets into the flat array; -1 if the model has no such tensor.
typedef struct {
    ROOT_PARAMETERS(OFFSET_FIELD)
} RootOffsets;

// Element offsets from the start of the layer's unit (layer_offset()); -1 if the model has no such tensor.
typedef struct {
    LAYER_PARAMETERS(OFFSET_FIELD)
} LayerOffsets;

typedef struct {
    char name[96];       // Hugging Face's full name
    int64_t rows, cols;  // cols = 0: a vector of `rows`
    int64_t offset;      // first element in the flat array
    int64_t layer;       // ROOT or a layer's number
    unsigned flags;
} Parameter;

typedef struct {
    Parameter *entries;  // in the order of the tables above, unit by unit; initial values depend on this order
    int64_t count;
    int64_t num_parameters;  // without padding; a tied embedding counts once
    int64_t num_layers;
    int64_t root_segments[NUM_SEGMENTS], layer_segments[NUM_SEGMENTS];  // elements of each, padding included
    int64_t root_size, layer_size;                                      // elements of a unit: the sum of its segments
    int64_t total;                                                      // root_size + L * layer_size
    RootOffsets root;
    LayerOffsets layer;
} ParameterTable;

static inline int64_t parameter_elements(const Parameter *p) { return p->cols ? p->rows * p->cols : p->rows; }

// Elements of entry i and of the entries that are joined to it, with the padding behind them.
static inline int64_t parameter_fused_elements(const ParameterTable *t, int64_t i) {
    int64_t elements = parameter_elements(&t->entries[i]);
    while (++i < t->count && t->entries[i].flags & PARAM_JOINED) elements += parameter_elements(&t->entries[i]);
    return round_up(elements, PARAMETER_ALIGNMENT);
}

// Layers are numbered from 0. In place of a layer's number, ROOT means the root unit, and NO_LAYER means no unit.
enum { ROOT = -1, NO_LAYER = -2 };

// First element of a unit in the flat array.
static inline int64_t layer_offset(const ParameterTable *t, int64_t l) {
    return l == ROOT ? 0 : t->root_size + l * t->layer_size;
}

// Returns the number of elements of each segment of a unit [NUM_SEGMENTS].
static inline const int64_t *segment_sizes(const ParameterTable *t, int64_t l) {
    return l == ROOT ? t->root_segments : t->layer_segments;
}

static inline int parameter_segment(const Parameter *p) {
    return !p->cols ? SEGMENT_VECTORS : p->flags & PARAM_LOOKUP ? SEGMENT_EMBEDDING : SEGMENT_MATRICES;
}

// Offset of a segment in its unit; for NUM_SEGMENTS the unit's size. `sizes`: elements of each segment.
static inline int64_t segment_begin(const int64_t sizes[NUM_SEGMENTS], int segment) {
    int64_t begin = 0;
    for (int k = 0; k < segment; k++) begin += sizes[k];
    return begin;
}

// Appends one tensor to its segment, which has ends[segment] elements so far. The offset is counted from the segment's
// start until parameter_place adds the rest.
static inline void parameter_add(ParameterTable *t, const char *prefix, const char *name, int64_t rows, int64_t cols,
                                 int64_t layer, unsigned flags, int64_t ends[NUM_SEGMENTS]) {
    t->entries = (Parameter *)xrealloc(t->entries, (size_t)(t->count + 1) * sizeof *t->entries);
    Parameter *p = &t->entries[t->count++];
    memset(p, 0, sizeof *p);
    format_checked(p->name, sizeof p->name, "%s%s", prefix, name);
    p->rows = rows, p->cols = cols, p->layer = layer, p->flags = flags;
    int64_t *end = &ends[parameter_segment(p)];
    if (!(flags & PARAM_JOINED)) *end = round_up(*end, PARAMETER_ALIGNMENT);
    p->offset = *end;
    *end += parameter_elements(p);
    t->num_parameters += parameter_elements(p);
}

// Sets the offsets of a unit's entries, from number `first` on, and the sizes of its segments. The unit begins at
// element `begin`; its segments have `ends` elements before padding.
static inline void parameter_place(ParameterTable *t, int64_t first, int64_t begin, const int64_t ends[NUM_SEGMENTS],
                                   int64_t segments[NUM_SEGMENTS]) {
    for (int k = 0; k < NUM_SEGMENTS; k++) segments[k] = round_up(ends[k], PARAMETER_ALIGNMENT);
    for (int64_t i = first; i < t->count; i++)
        t->entries[i].offset += begin + segment_begin(segments, parameter_segment(&t->entries[i]));
}

// If the model has the tensor (`present`): returns the offset of entry *next in its unit, which begins at element
// `begin`, and advances *next. Else returns -1. Calls come in table order.
static inline int64_t parameter_next(const ParameterTable *t, bool present, int64_t begin, int64_t *next) {
    return present ? t->entries[(*next)++].offset - begin : -1;
}

// Adds a row of the tables above to unit `l`, if the model has the tensor.
#define ADD_PARAMETER(field, name, rows, cols, present, flags) \
    if (present) parameter_add(t, prefix, name, rows, cols, l, flags, ends);

static inline void parameter_table_root(ParameterTable *t, const ModelConfig *m) {
    const int64_t V = m->vocab_size, C = m->hidden_size, l = ROOT;
    const char *prefix = "";
    int64_t ends[NUM_SEGMENTS] = {0}, next = 0;
    ROOT_PARAMETERS(ADD_PARAMETER)
    for (int k = SEGMENT_MATRICES; k < NUM_SEGMENTS; k++)
        ends[k] = ends[k] / max_i64(V, 1) * model_padded_vocabulary(m);  // V is 0 until the data gives it
    parameter_place(t, 0, 0, ends, t->root_segments);
#define ROOT_OFFSET(field, name, rows, cols, present, flags) t->root.field = parameter_next(t, present, 0, &next);
    ROOT_PARAMETERS(ROOT_OFFSET)
    t->root_size = segment_begin(t->root_segments, NUM_SEGMENTS);
}

static inline void parameter_table_layer(ParameterTable *t, const ModelConfig *m, int64_t l) {
    const int64_t C = m->hidden_size, F = m->intermediate_size, NH = m->num_heads, NKV = m->num_kv_heads,
                  HD = m->head_dim;
    const int64_t begin = layer_offset(t, l), first = t->count;
    int64_t ends[NUM_SEGMENTS] = {0}, next = first;
    char prefix[32];
    format_checked(prefix, sizeof prefix, "model.layers.%lld.", (long long)l);
    LAYER_PARAMETERS(ADD_PARAMETER)
    parameter_place(t, first, begin, ends, t->layer_segments);
#define LAYER_OFFSET(field, name, rows, cols, present, flags) t->layer.field = parameter_next(t, present, begin, &next);
    LAYER_PARAMETERS(LAYER_OFFSET)
    t->layer_size = segment_begin(t->layer_segments, NUM_SEGMENTS);
}

// Lays out all parameters of model `m`. The caller frees with parameter_table_free.
static inline ParameterTable parameter_table(const ModelConfig *m) {
    ParameterTable t = {};
    t.num_layers = m->num_layers;
    parameter_table_root(&t, m);
    for (int64_t l = 0; l < m->num_layers; l++) parameter_table_layer(&t, m, l);
    t.total = t.root_size + m->num_layers * t.layer_size;
    return t;
}

static inline void parameter_table_free(ParameterTable *t) {
    free(t->entries);
    t->entries = NULL;
}

// Returns the tensor with that Hugging Face name, or NULL.
static inline const Parameter *parameter_find(const ParameterTable *t, const char *name) {
    for (int64_t i = 0; i < t->count; i++)
        if (strcmp(t->entries[i].name, name) == 0) return &t->entries[i];
    return NULL;
}

// The segment of the root that the embedding is in: a tied embedding is among the matrices.
static inline int embedding_segment(const ParameterTable *t) {
    return t->root_segments[SEGMENT_EMBEDDING] ? SEGMENT_EMBEDDING : SEGMENT_MATRICES;
}

// Number of parameters that GEMMs read for each token: all matrices except an embedding that is not tied to lm_head.
static inline int64_t matmul_parameters(const ParameterTable *t, const ModelConfig *m) {
    int64_t n = m->vocab_size * m->hidden_size;
    for (int64_t i = 0; i < t->count; i++)
        if (t->entries[i].flags & PARAM_FP8) n += parameter_elements(&t->entries[i]);
    return n;
}

#endif
