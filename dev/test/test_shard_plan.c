// Tests shard_plan.h. The slices of a group must cover every parameter once, fit their arrays, and gather back to the
// segments of the flat array. A rank's elements, sorted by position, must follow the backward pass.
#include "../../llmc/config/shard_plan.h"
#include "lib/check.h"

static ModelConfig model(ModelFamily family, bool tied) {
    ModelConfig m;
    model_config_preset(&m, "tiny");
    m.family = family, m.qkv_bias = family == FAMILY_QWEN2, m.qk_norm = family == FAMILY_QWEN3,
    m.tie_word_embeddings = tied;
    m.vocab_size = 101, m.hidden_size = 20, m.intermediate_size = 36, m.num_layers = 3, m.num_heads = 6,
    m.num_kv_heads = 2, m.head_dim = 10;
    return m;
}

// Checks sizes and offsets. It allocates no memory, so it can check the largest models too.
static void check_sizes(const ParameterTable *t, int64_t group) {
    const ShardPlan s = shard_plan(t, group, group - 1);
    int64_t end = 0;
    for (int64_t l = ROOT; l < t->num_layers; l++) {
        CHECK(shard_begin(&s, l) == end, "the slices of layer %lld start where those before end; found %lld",
              (long long)l, (long long)shard_begin(&s, l));
        int64_t flat = layer_offset(t, l), gathered = 0;
        for (int k = 0; k < NUM_SEGMENTS; k++) {
            const ShardSegment g = segment_slice(t, &s, l, k);
            CHECK(g.shard == end && g.flat == flat && g.gathered == gathered,
                  "layer %lld, segment %d follows the one before it in the shard, the flat array and the gathered unit",
                  (long long)l, k);
            CHECK(g.slice % PARAMETER_ALIGNMENT == 0 && group * g.slice >= g.size &&
                      group * g.slice - g.size < group * PARAMETER_ALIGNMENT,
                  "layer %lld, segment %d has aligned slices with no more padding than needed; found %lld elements",
                  (long long)l, k, (long long)g.slice);
            end += g.slice, flat += g.size, gathered += group * g.slice;
        }
        CHECK(gathered_elements(&s, l) == gathered && shard_elements(&s, l) * group == gathered,
              "gathered and kept elements of layer %lld are sums over its segments", (long long)l);
    }
    CHECK(end == s.total, "all slices have %lld elements; the plan says %lld", (long long)end, (long long)s.total);
}

// Checks the layout of the array of bf16 weights: without the layers' matrices if masters_alone, else with them.
static void check_weights(const ParameterTable *t, int64_t group, bool masters_alone) {
    ShardPlan s = shard_plan(t, group, group - 1);
    s.masters_alone = masters_alone;
    int64_t end = 0, matrices = 0;
    for (int64_t l = ROOT; l < t->num_layers; l++)
        for (int k = 0; k < NUM_SEGMENTS; k++) {
            const ShardSegment g = segment_slice(t, &s, l, k);
            const bool absent = masters_alone && l != ROOT && k == SEGMENT_MATRICES;
            CHECK(weights_have(&s, l, k) == !absent,
                  "layer %lld, segment %d: the array lacks the segment exactly if masters stand alone and the segment "
                  "has a layer's matrices",
                  (long long)l, k);
            if (absent) matrices += g.slice;
            if (absent || !g.slice) continue;
            CHECK(weights_place(&s, l, g.shard) == end,
                  "layer %lld, segment %d: its weights begin at element %lld; expected %lld", (long long)l, k,
                  (long long)weights_place(&s, l, g.shard), (long long)end);
            end += g.slice;
        }
    CHECK(weights_begin(&s, t->num_layers) == end && end == s.total - matrices && (matrices > 0) == masters_alone,
          "the array has %lld elements; expected the shard's %lld minus %lld of the layers' matrices", (long long)end,
          (long long)s.total, (long long)matrices);
}

// Numbers every element by its flat index, takes each rank's share of all parameters, and gathers the shares.
static void check_cover(const ParameterTable *t, int64_t group) {
    int64_t *seen = (int64_t *)xcalloc((size_t)t->total, sizeof *seen), parts = 0;
    ShardPlan s = shard_plan(t, group, 0);
    int64_t *shards = (int64_t *)xcalloc((size_t)(group * s.total), sizeof *shards);
    bool once = true, whole = true;
    for (int64_t place = 0; place < group; place++) {
        s = shard_plan(t, group, place);
        for (int64_t i = 0; i < t->count; i++) {
            const Parameter *p = &t->entries[i];
            const ShardRange r = shard_parameter(t, &s, p);
            if (r.count == 0) continue;
            parts++;
            once = once && shard_parameter_at(t, &s, r.shard) == i &&
                   shard_parameter_at(t, &s, r.shard + r.count - 1) == i;
            CHECK(r.count > 0 && r.first >= 0 && r.first + r.count <= parameter_elements(p) && r.shard >= 0 &&
                      r.shard + r.count <= s.total,
                  "%s, shard_rank %lld: the range lies in the parameter and in the shard", p->name, (long long)place);
            for (int64_t e = 0; e < r.count; e++) {
                seen[p->offset + r.first + e]++;
                once = once && shard_to_flat(t, &s, r.shard + e) == p->offset + r.first + e;
                shards[place * s.total + r.shard + e] = p->offset + r.first + e;
            }
        }
    }
    CHECK(once, "shard_to_flat and shard_parameter_at agree with shard_parameter");
    for (int64_t i = 0; i < t->count; i++)
        for (int64_t e = 0; e < parameter_elements(&t->entries[i]); e++)
            once = once && seen[t->entries[i].offset + e] == 1;
    CHECK(once && parts >= t->count, "each element is kept by exactly one rank");
    for (int64_t i = 0; i < t->count; i++) {  // checks that the gathered unit has every element in its place
        const Parameter *p = &t->entries[i];
        const ShardSegment g = segment_slice(t, &s, p->layer, parameter_segment(p));
        const int64_t offset = p->offset - layer_offset(t, p->layer);
        const int64_t at = gathered_offset(t, &s, p->layer, offset) - g.gathered;
        for (int64_t e = 0; e < parameter_elements(p); e++)
            whole = whole && shards[(at + e) / g.slice * s.total + g.shard + (at + e) % g.slice] == p->offset + e;
    }
    CHECK(whole, "gathered slices are the segments, followed by padding");
    free(seen);
    free(shards);
}

// Returns the part of the backward pass that makes the tensor's gradient: 0 is the part before the layers, then each
// layer is a part, and the embedding is the last one.
static int64_t backward_turn(const ParameterTable *t, const Parameter *p) {
    return p->layer >= 0 ? t->num_layers - p->layer : p->offset == t->root.embedding ? t->num_layers + 1 : 0;
}

// Sorted by position, a rank's elements are in the order in which the parts of the backward pass make their gradients.
// Every element has one position, and every position has one element.
static void check_backward_order(const ParameterTable *t, int64_t group, int64_t place) {
    const ShardPlan s = shard_plan(t, group, place);
    const BackwardOrder order = shard_backward_order(t, &s);
    int64_t *turn = (int64_t *)xcalloc((size_t)s.total, sizeof *turn), last = 0;
    bool own = true, forward = true;
    memset(turn, -1, (size_t)s.total * sizeof *turn);  // padding
    for (int64_t i = 0; i < t->count; i++) {
        const ShardRange r = shard_parameter(t, &s, &t->entries[i]);
        for (int64_t e = 0; e < r.count; e++) turn[r.shard + e] = backward_turn(t, &t->entries[i]);
    }
    for (int64_t position = 0; position < s.total; position++) {
        const int64_t i = backward_position(order, position);
        own = own && i >= 0 && i < s.total && backward_position(order, i) == position;
        if (!own || turn[i] < 0) continue;
        forward = forward && turn[i] >= last;
        last = turn[i];
    }
    CHECK(own, "group of %lld, shard_rank %lld: positions and elements are a bijection", (long long)group,
          (long long)place);
    CHECK(forward,
          "group of %lld, shard_rank %lld: elements are in the order in which the backward pass makes gradients",
          (long long)group, (long long)place);
    free(turn);
}

static void bad_range(void *context) {
    const ParameterTable *t = (const ParameterTable *)context;
    const ShardPlan s = shard_plan(t, 2, 0);
    segment_range(t, &s, 0, SEGMENT_MATRICES, layer_offset(t, 0), 1);
}

static void bad_place(void *context) { shard_plan((const ParameterTable *)context, 2, 2); }

int main(void) {
    for (int family = FAMILY_LLAMA; family <= FAMILY_QWEN3; family++)
        for (int tied = 0; tied < 2; tied++) {
            ModelConfig m = model((ModelFamily)family, tied);
            ParameterTable t = parameter_table(&m);
            const int64_t groups[] = {1, 2, 3, 4, 7, 64};  // with 64, most slices of vectors are only padding
            for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
                check_sizes(&t, groups[i]), check_cover(&t, groups[i]);
                check_weights(&t, groups[i], false), check_weights(&t, groups[i], true);
                for (int64_t place = 0; place < groups[i]; place += 3) check_backward_order(&t, groups[i], place);
            }
            const ShardPlan one = shard_plan(&t, 1, 0);
            CHECK(one.total == t.total, "one rank keeps as many elements as the flat array has");
            CHECK(shard_backward_order(&t, &one).embedding == backward_order(&t).embedding &&
                      backward_order(&t).total == t.total,
                  "one rank's backward order is that of the flat array");
            for (int64_t i = 0; i < t.count; i++)
                CHECK(shard_parameter(&t, &one, &t.entries[i]).shard == t.entries[i].offset,
                      "with one rank, %s keeps its offset", t.entries[i].name);
            CHECK_DIES(bad_range, &t, "do not all lie in segment", "a range outside its segment dies");
            CHECK_DIES(bad_place, &t, "no shard_rank 2 in a shard group of 2", "a shard_rank outside its group dies");
            parameter_table_free(&t);
        }
    ModelConfig large;
    model_config_preset(&large, "llama3.1-405b");
    ParameterTable t = parameter_table(&large);
    check_sizes(&t, 1), check_sizes(&t, 512), check_sizes(&t, 1000);
    parameter_table_free(&t);
    return check_report();
}
