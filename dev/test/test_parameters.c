// Tests parameters.h: flags and the layout of the flat array for every model family, and shapes of a Qwen2 and a Qwen3
// model.
#include "../../llmc/config/parameters.h"
#include "lib/check.h"

static ModelConfig model(ModelFamily family, bool tied) {
    ModelConfig m;
    model_config_preset(&m, "tiny");
    m.family = family, m.qkv_bias = family == FAMILY_QWEN2, m.qk_norm = family == FAMILY_QWEN3,
    m.tie_word_embeddings = tied;
    m.vocab_size = 101, m.hidden_size = 20, m.intermediate_size = 36, m.num_layers = 3, m.num_heads = 6,
    m.num_kv_heads = 2, m.head_dim = 10;  // no size is a multiple of 128
    return m;
}

static void test_layout(const ModelConfig *m) {
    ParameterTable t = parameter_table(m);
    int64_t sum = 0, last_layer = -1;
    int64_t begin = 0, ends[NUM_SEGMENTS];  // start of the unit, and end of each of its segments so far
    for (int64_t i = 0; i < t.count; i++) {
        const Parameter *p = &t.entries[i];
        const int64_t *sizes = segment_sizes(&t, p->layer);
        if (i == 0 || p->layer > last_layer) begin = layer_offset(&t, p->layer);
        for (int k = 0; k < NUM_SEGMENTS && (i == 0 || p->layer > last_layer); k++)
            ends[k] = begin + segment_begin(sizes, k);
        const int segment = parameter_segment(p);
        const int64_t end = ends[segment];
        CHECK(segment == (!p->cols                                                     ? SEGMENT_VECTORS
                          : strstr(p->name, "embed_tokens") && !m->tie_word_embeddings ? SEGMENT_EMBEDDING
                                                                                       : SEGMENT_MATRICES),
              "%s is in the segment of its kind", p->name);
        CHECK(p->offset >= end, "%s begins where the tensor before it in its segment ends, or later", p->name);
        if (p->flags & PARAM_JOINED)
            CHECK(i > 0 && p->offset == end && p->layer == p[-1].layer && p->cols == p[-1].cols,
                  "%s follows the tensor before it without a gap", p->name);
        else
            CHECK(p->offset % PARAMETER_ALIGNMENT == 0 && p->offset - end < PARAMETER_ALIGNMENT,
                  "%s starts at the next multiple of PARAMETER_ALIGNMENT; found %lld", p->name, (long long)p->offset);
        const bool padded = p->layer == ROOT && p->cols;
        ends[segment] = p->offset + (padded ? round_up(m->vocab_size, 8) * p->cols : parameter_elements(p));
        CHECK(ends[segment] <= begin + segment_begin(sizes, segment + 1), "%s ends within its segment", p->name);
        for (int k = 0; k < NUM_SEGMENTS && !(i + 1 < t.count && p[1].layer == p->layer); k++)
            CHECK(begin + segment_begin(sizes, k + 1) - ends[k] < PARAMETER_ALIGNMENT,
                  "%s: the segments of its unit have no more padding than needed", p->name);
        CHECK(p->layer == last_layer || p->layer == last_layer + 1,
              "%s: layers are in order; found layer %lld after %lld", p->name, (long long)p->layer,
              (long long)last_layer);
        if (p->layer >= 0)
            CHECK(p->offset >= layer_offset(&t, p->layer) &&
                      p->offset + parameter_elements(p) <= layer_offset(&t, p->layer) + t.layer_size,
                  "%s lies in its layer's unit", p->name);
        else CHECK(p->offset + parameter_elements(p) <= t.root_size, "%s lies in the root unit", p->name);
        CHECK(p->rows > 0 && parameter_elements(p) == p->rows * (p->cols ? p->cols : 1),
              "%s has the number of elements of its shape", p->name);
        CHECK(!(p->flags & PARAM_DECAY) == (p->cols == 0), "%s has weight decay exactly if it is a matrix", p->name);
        CHECK(!(p->flags & PARAM_INIT_ONE) == !strstr(p->name, "norm") &&
                  !(p->flags & PARAM_INIT_ZERO) == !strstr(p->name, "bias"),
              "%s starts at 1 exactly if it is a norm's weight, and at 0 exactly if it is a bias", p->name);
        CHECK(!(p->flags & PARAM_FP8) == !strstr(p->name, "_proj.weight"),
              "%s may be quantized exactly if it is a weight of a layer's linear layers", p->name);
        CHECK(parameter_find(&t, p->name) == p, "%s is found by its name, so no other tensor has that name", p->name);
        sum += parameter_elements(p);
        last_layer = p->layer;
    }
    CHECK(last_layer == m->num_layers - 1 && sum == t.num_parameters && t.num_layers == m->num_layers,
          "the last tensor is in the last layer, and all elements add up to the model's number of parameters");
    for (int k = 0; k < NUM_SEGMENTS; k++)
        CHECK(t.root_segments[k] % PARAMETER_ALIGNMENT == 0 && t.layer_segments[k] % PARAMETER_ALIGNMENT == 0,
              "the size of segment %d is a multiple of PARAMETER_ALIGNMENT", k);
    CHECK(t.root_segments[0] + t.root_segments[1] + t.root_segments[2] == t.root_size &&
              t.layer_segments[0] + t.layer_segments[1] == t.layer_size,
          "the segments of a unit add up to its size");
    CHECK(t.layer_segments[SEGMENT_EMBEDDING] == 0 &&
              (t.root_segments[SEGMENT_EMBEDDING] > 0) == !m->tie_word_embeddings,
          "only the root unit has an embedding segment, and only if the embedding is not tied");
    CHECK(embedding_segment(&t) == parameter_segment(parameter_find(&t, "model.embed_tokens.weight")),
          "embedding_segment() is the segment of embed_tokens");
    CHECK(t.root_size % PARAMETER_ALIGNMENT == 0 && t.layer_size % PARAMETER_ALIGNMENT == 0 &&
              t.total == t.root_size + m->num_layers * t.layer_size,
          "unit sizes are aligned and add up to the total");
    CHECK(!parameter_find(&t, "") && !parameter_find(&t, "model.layers.4000.mlp.up_proj.weight") &&
              !parameter_find(&t, "model.norm"),
          "unknown names are not found");
    parameter_table_free(&t);
}

// Offsets by field equal those of the entries by name, in every layer.
static void test_fields(const ModelConfig *m) {
    ParameterTable t = parameter_table(m);
#define X(field, name, ...)                                                                          \
    {                                                                                                \
        const Parameter *p = parameter_find(&t, name);                                               \
        CHECK(p ? t.root.field == p->offset : t.root.field == -1,                                    \
              "root." #field " is its tensor's offset, or -1; found %lld", (long long)t.root.field); \
    }
    ROOT_PARAMETERS(X)
#undef X
    for (int64_t l = 0; l < m->num_layers; l++) {
        char full[128];
#define X(field, name, ...)                                                                                \
    {                                                                                                      \
        format_checked(full, sizeof full, "model.layers.%lld.%s", (long long)l, name);                     \
        const Parameter *p = parameter_find(&t, full);                                                     \
        CHECK(p ? p->layer == l && layer_offset(&t, l) + t.layer.field == p->offset : t.layer.field == -1, \
              "layer." #field " is its tensor's offset, or -1; found %lld", (long long)t.layer.field);     \
    }
        LAYER_PARAMETERS(X)
#undef X
    }
    CHECK((t.root.lm_head < 0) == m->tie_word_embeddings && (t.layer.bq < 0) == !m->qkv_bias &&
              (t.layer.q_norm < 0) == !m->qk_norm,
          "the table has lm_head, biases and QK-norm weights exactly if the model has them");
    parameter_table_free(&t);
}

static void check_shape(const ParameterTable *t, const char *name, int64_t rows, int64_t cols) {
    const Parameter *p = parameter_find(t, name);
    CHECK(p && p->rows == rows && p->cols == cols, "%s has the shape of transformers' module; found %lld x %lld", name,
          p ? (long long)p->rows : -1, p ? (long long)p->cols : -1);
}

// Shapes equal those of transformers' modules.
static void test_shapes(void) {
    ModelConfig m = model(FAMILY_QWEN2, false);
    ParameterTable t = parameter_table(&m);
    check_shape(&t, "model.embed_tokens.weight", 101, 20);
    check_shape(&t, "lm_head.weight", 101, 20);
    check_shape(&t, "model.norm.weight", 20, 0);
    check_shape(&t, "model.layers.0.self_attn.q_proj.weight", 60, 20);
    check_shape(&t, "model.layers.1.self_attn.k_proj.weight", 20, 20);
    check_shape(&t, "model.layers.2.self_attn.v_proj.weight", 20, 20);
    check_shape(&t, "model.layers.0.self_attn.o_proj.weight", 20, 60);
    check_shape(&t, "model.layers.0.self_attn.q_proj.bias", 60, 0);
    check_shape(&t, "model.layers.0.self_attn.v_proj.bias", 20, 0);
    check_shape(&t, "model.layers.0.mlp.gate_proj.weight", 36, 20);
    check_shape(&t, "model.layers.0.mlp.up_proj.weight", 36, 20);
    check_shape(&t, "model.layers.0.mlp.down_proj.weight", 20, 36);
    CHECK(t.count == 3 + 3 * 12, "there are 3 + 3 x 12 tensors; found %lld", (long long)t.count);
    const int64_t layer = 100 * 20 + 60 * 20 + 3 * 36 * 20;
    CHECK(matmul_parameters(&t, &m) == 101 * 20 + 3 * layer,
          "matmul_parameters() counts all matrices that GEMMs read; found %lld", (long long)matmul_parameters(&t, &m));
    parameter_table_free(&t);
    m = model(FAMILY_QWEN3, true);
    t = parameter_table(&m);
    check_shape(&t, "model.layers.0.self_attn.q_norm.weight", 10, 0);
    check_shape(&t, "model.layers.2.self_attn.k_norm.weight", 10, 0);
    CHECK(matmul_parameters(&t, &m) == 101 * 20 + 3 * layer, "matmul_parameters() counts a tied lm_head");
    parameter_table_free(&t);
}

int main(void) {
    for (int family = FAMILY_LLAMA; family <= FAMILY_QWEN3; family++)
        for (int tied = 0; tied < 2; tied++) {
            ModelConfig m = model((ModelFamily)family, tied);
            test_layout(&m);
            test_fields(&m);
        }
    ModelConfig large;
    model_config_preset(&large, "llama3.1-405b");  // needs more than 32 bits
    test_layout(&large);
    test_shapes();
    return check_report();
}
