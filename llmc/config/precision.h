// Decides the recipe of each linear layer from the options and the layer's sizes; prints the GEMM table.
#ifndef LLMC_PRECISION_H
#define LLMC_PRECISION_H

#include "options.h"
#include "parameters.h"

typedef struct {
    const char *name;
    int64_t N, K;    // weight [N, K]
    int64_t offset;  // first element of the weight in the layer's matrices
} LinearShape;

typedef struct {
    const Recipe *recipe;  // for layers that nothing keeps in bf16; without --precision fp8 the bf16 row
    Fp8Format dy_format;
    int64_t num_layers;
    bool *keeps_bf16;        // [num_layers, NUM_LINEARS]
    bool any_bf16, any_fp8;  // at least one of these linear layers is not FP8; at least one is FP8
    bool casts_masters;      // precision_casts_masters
    bool emulated;           // --fp8-emulate: FP8 operands, multiplied in bf16
    bool filter_open;        // --fp8-filter auto, and the run has not decided yet
    int fast_accum;          // --fp8-fast-accum, but FAST_ACCUM_NONE if emulated or on a CPU
    LinearShape linear[NUM_LINEARS], lm_head;
    Recipe head;  // lm_head's: without --fp8-lm-head the bf16 row, else the run's recipe, perhaps with bf16 GEMMs
} Precision;

// True with --precision fp8, even if a filter keeps all layers in bf16.
static inline bool precision_is_fp8(const Precision *p) { return p->recipe != recipe_row(RECIPE_BF16); }

// True if the sizes of the weight fit the recipe's GEMMs.
static inline bool linear_fits(const LinearShape *s, const Recipe *r) {
    return s->N % r->multiple == 0 && s->K % r->multiple == 0;
}

// LINEAR_OF_field is the number of FP8 weights before a field in the table of parameters. A fused weight counts once:
// PARAM_JOINED continues it. So the number of a weight's first tensor is its LinearId. AdamW numbers the amaxes of
// weights in the same way.
enum {
#define X(field, name, rows, cols, present, flags) \
    LINEAR_OF_##field,                             \
        LINEARS_UNTIL_##field = LINEAR_OF_##field - (((flags) & (PARAM_FP8 | PARAM_JOINED)) != PARAM_FP8),
    LAYER_PARAMETERS(X)
#undef X
        LINEARS_OF_LAYER
};
static_assert((int)LINEARS_OF_LAYER == (int)NUM_LINEARS,
              "parameters.h has as many FP8 weights per layer as LinearId has values");
static_assert((int)LINEAR_OF_wq == (int)QKV_PROJ && (int)LINEAR_OF_wo == (int)OUT_PROJ &&
                  (int)LINEAR_OF_wgate == (int)GATE_UP_PROJ && (int)LINEAR_OF_wdown == (int)DOWN_PROJ,
              "FP8 weights stand in the order of LinearId in parameters.h");

static inline void linear_shapes(LinearShape out[NUM_LINEARS], const ModelConfig *m, const ParameterTable *t) {
    const int64_t C = m->hidden_size, F = m->intermediate_size, ATT = m->num_heads * m->head_dim;
    const int64_t matrices = t->layer_segments[SEGMENT_VECTORS];
    const LinearShape qkv = {"qkv", model_qkv_size(m), C, t->layer.wq - matrices};
    const LinearShape attn_out = {"attn_out", C, ATT, t->layer.wo - matrices};
    const LinearShape gate_up = {"gate_up", 2 * F, C, t->layer.wgate - matrices};
    const LinearShape down = {"down", C, F, t->layer.wdown - matrices};
    static_assert(NUM_LINEARS == 4, "linear_shapes fills in every linear layer");
    out[QKV_PROJ] = qkv, out[OUT_PROJ] = attn_out, out[GATE_UP_PROJ] = gate_up, out[DOWN_PROJ] = down;
}

// Returns lm_head's recipe. Its wgrad stays bf16 without --fp8-lm-head all, and so does its dgrad with forward.
static inline Recipe precision_head_recipe(const Options *o) {
    Recipe r = *(o->fp8_lm_head == LM_HEAD_OFF ? recipe_row(RECIPE_BF16) : options_recipe(o));
    for (int i = 0; i < 2; i++) {
        if (o->fp8_lm_head != LM_HEAD_ALL) r.granularity[GEMM_WGRAD][i] = NO_SCALE;
        if (o->fp8_lm_head == LM_HEAD_FORWARD) r.granularity[GEMM_DGRAD][i] = NO_SCALE;
    }
    return r;
}

// The amax that the scale of the logits' gradient is made from, if the recipe has one scale for a tensor. So the scale
// is known before the first chunk of rows has logits, and it depends neither on the size of chunks nor on the number of
// ranks. No value of (softmax - onehot) * grad_scale is above grad_scale in bf16. The amax is 1.75, E5M2's largest
// mantissa, times the least power of two with which it is no smaller: so the scale is a power of two.
static inline float precision_dlogits_amax(float grad_scale) {
    int exponent;
    const float fraction = frexpf(bf16_round(grad_scale), &exponent);  // 0.5 to 1
    return ldexpf(1.75f, fraction <= 0.875f ? exponent - 1 : exponent);
}

// The bits of two bf16 mantissas that the FP8 format of the logits' gradient does not have, for cross_entropy_round().
// 0 if no FP8 GEMM reads it.
static inline uint32_t precision_dlogits_dropped(const Precision *p) {
    if (!recipe_is_fp8(&p->head, GEMM_DGRAD)) return 0;
    return p->dy_format == FP8_E5M2 ? 0x001f001f : 0x000f000f;
}

// Marks the linear layers that one word of --fp8-filter keeps in bf16 (none for lm_head, which has no mark). Returns
// false if the word is unknown. Dies if the word names layers that the model does not have, or a range that ends before
// it begins.
static inline bool filter_word(Precision *p, const char *word) {
    const int64_t L = p->num_layers;
    int64_t first = 0, last = L - 1;
    bool linear[NUM_LINEARS] = {true, true, true, true};
    static_assert(QKV_PROJ < OUT_PROJ && OUT_PROJ < GATE_UP_PROJ && OUT_PROJ < DOWN_PROJ && NUM_LINEARS == 4,
                  "linear layers up to OUT_PROJ are attention's, the others the MLP's");
    long long from, to;
    char rest;
    if (strcmp(word, "lm_head") == 0) return true;
    if (strcmp(word, "first") == 0) last = 0;
    else if (strcmp(word, "last") == 0) first = L - 1;
    else if (sscanf(word, "layers=%lld-%lld%c", &from, &to, &rest) == 2) first = from, last = to;
    else if (sscanf(word, "layers=%lld%c", &from, &rest) == 1) first = last = from;
    else {
        const bool attention = strcmp(word, "attention") == 0, mlp = strcmp(word, "mlp") == 0;
        bool known = false;
        for (int i = 0; i < NUM_LINEARS; i++) {
            linear[i] = i <= OUT_PROJ ? attention : mlp;
            if (strcmp(word, p->linear[i].name) == 0) linear[i] = true;
            known = known || linear[i];
        }
        if (!known) return false;
    }
    if (min_i64(first, last) < 0 || max_i64(first, last) >= L)
        die_with(EXIT_USAGE, "--fp8-filter: \"%s\" names layers that the model does not have; it has 0 to %lld", word,
                 (long long)L - 1);
    if (first > last)
        die_with(EXIT_USAGE, "--fp8-filter: \"%s\" begins after its end; layers=%lld-%lld would do", word,
                 (long long)last, (long long)first);
    for (int64_t l = first; l <= last; l++)
        for (int i = 0; i < NUM_LINEARS; i++) p->keeps_bf16[l * NUM_LINEARS + i] |= linear[i];
    return true;
}

static inline void filter_apply(Precision *p, const char *filter) {
    const char *const between = ", ";
    char word[64];
    for (const char *at = filter + strspn(filter, between); *at;
         at += strcspn(at, between), at += strspn(at, between)) {
        format_checked(word, sizeof word, "%.*s", (int)min_i64(60, (int64_t)strcspn(at, between)), at);
        if (!filter_word(p, word))
            die_with(EXIT_USAGE,
                     "--fp8-filter: \"%s\" is none of first, last, layers=A, layers=A-B, attention, mlp, qkv (q, k "
                     "and v are one GEMM), attn_out, gate_up (one GEMM), down, lm_head; auto stands alone",
                     word);
    }
}

// True if FP8 weights are cast from FP16 masters, as in MS-AMP; the layers' matrices then have no bf16 weights, because
// no GEMM would read them. This needs FP16 master weights, and FP8 in all linear layers, with one scale for each
// tensor, made from its current amax. If all this holds, dies with --fp8-all-gather off, on any number of ranks.
static inline bool precision_casts_masters(const Precision *p, const Options *o) {
    if (!options_fp16_weights(o) || !p->any_fp8 || p->any_bf16 || !recipe_has_current_tensor_scales(p->recipe))
        return false;
    if (o->fp8_all_gather == OFF)
        die_with(EXIT_USAGE,
                 "--fp8-all-gather off gathers bf16 weights of linear layers, but with FP16 master weights recipe %s "
                 "casts FP8 weights from the FP16 masters, and there are none in bf16; leave it out",
                 p->recipe->name);
    return true;
}

// Decides the precision of every linear layer, after options_resolve. `filter`: --fp8-filter, or the filter that auto
// has found; "auto" itself filters nothing. has_fast_accum: true if the trainer's GEMMs have fast accumulation. Dies if
// a word of the filter is unknown or wrong, or where precision_casts_masters dies. The caller frees the result with
// precision_free.
static inline Precision precision_plan(const Options *o, const char *filter, const ModelConfig *m,
                                       const ParameterTable *t, bool has_fast_accum) {
    Precision p = {};
    p.recipe = options_recipe(o);
    p.dy_format = o->fp8_format == FP8_FORMAT_HYBRID ? FP8_E5M2 : FP8_E4M3;
    p.num_layers = m->num_layers;
    p.emulated = o->precision == PRECISION_FP8 && o->fp8_emulate;
    p.keeps_bf16 = (bool *)xcalloc((size_t)(p.num_layers * NUM_LINEARS), sizeof(bool));
    p.fast_accum = p.emulated || !has_fast_accum ? FAST_ACCUM_NONE : o->fp8_fast_accum;
    linear_shapes(p.linear, m, t);
    p.head = precision_head_recipe(o);
    p.lm_head.name = "lm_head", p.lm_head.N = m->vocab_size, p.lm_head.K = m->hidden_size;
    p.filter_open = o->precision == PRECISION_FP8 && strcmp(filter, "auto") == 0;
    if (o->precision == PRECISION_FP8 && !p.filter_open) filter_apply(&p, filter);
    for (int64_t i = 0; i < p.num_layers * NUM_LINEARS; i++) {
        if (o->precision != PRECISION_FP8 || !linear_fits(&p.linear[i % NUM_LINEARS], p.recipe)) p.keeps_bf16[i] = true;
        if (p.keeps_bf16[i]) p.any_bf16 = true;
        else p.any_fp8 = true;
    }
    p.casts_masters = precision_casts_masters(&p, o);
    return p;
}

// True if each FP8 weight is cast once in an optimizer step of the GPU trainer, false if in each pass that reads it:
// once if it is gathered in FP8, or kept after its gather. shard_size: ranks that share one replica of the weights.
static inline bool precision_casts_once(const Options *o, int64_t shard_size) {
    return shard_size > 1 && (o->fp8_all_gather == ON || o->sharding == SHARDING_GRAD_OP);
}

static inline void precision_free(Precision *p) {
    free(p->keeps_bf16);
    p->keeps_bf16 = NULL;
}

// The recipe of linear layer `id` of layer l.
static inline const Recipe *precision_of(const Precision *p, int64_t l, int id) {
    return p->keeps_bf16[l * NUM_LINEARS + id] ? recipe_row(RECIPE_BF16) : p->recipe;
}

// True if at least one GEMM of the run has FP8 operands.
static inline bool precision_any_gemm_fp8(const Precision *p) {
    return p->any_fp8 || recipe_is_fp8(&p->head, GEMM_FPROP);
}

// Columns of a tensor of linear layer `id`: x [R, K], dy [R, N], w [N, K].
static inline int64_t precision_columns(const Precision *p, TensorRole tensor, int id) {
    return tensor == TENSOR_DY ? p->linear[id].N : p->linear[id].K;
}

// Number of GEMMs of a micro-step whose operands are FP8. Emulated GEMMs count; those that --recompute repeats do not.
static inline int64_t precision_fp8_gemms(const Precision *p) {
    int64_t n = 0;
    for (int64_t l = 0; l < p->num_layers; l++)
        for (int id = 0; id < NUM_LINEARS; id++)
            for (int gemm = 0; gemm < NUM_GEMMS; gemm++) n += recipe_is_fp8(precision_of(p, l, id), (GemmKind)gemm);
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) n += recipe_is_fp8(&p->head, (GemmKind)gemm);
    return n;
}

static inline Fp8Format precision_format(const Precision *p, TensorRole tensor) {
    return tensor == TENSOR_DY ? p->dy_format : FP8_E4M3;
}

// True if all linear layers of layer l are FP8. An all-gather of the layer's weights in FP8 requires that.
static inline bool precision_layer_is_fp8(const Precision *p, int64_t l) {
    for (int i = 0; i < NUM_LINEARS; i++)
        if (p->keeps_bf16[l * NUM_LINEARS + i]) return false;
    return true;
}

// True if a GEMM in recipe r asks for fast accumulation. gemm_choose falls back to full accumulation if cuBLASLt has no
// fast algorithm. lm_head's dgrad and wgrad never ask: in sums over the vocabulary a target's gradient of about -1
// makes most probabilities vanish (0.9% of llama3.2-1b's loss: dev/LOG.md).
static inline bool precision_fast_accum(const Precision *p, const Recipe *r, GemmKind gemm) {
    if (!r->fast_accum || !recipe_is_fp8(r, gemm)) return false;
    return gemm == GEMM_FPROP ? p->fast_accum != FAST_ACCUM_NONE : p->fast_accum == FAST_ACCUM_ALL && r != &p->head;
}

// ---- the per-GEMM precision table

// The sizes of a GEMM: its result is [rows, columns], and it sums over `depth`.
typedef struct {
    int64_t rows, columns, depth;
} GemmSizes;

static inline GemmSizes precision_sizes(const LinearShape *s, GemmKind gemm, int64_t R) {
    return (GemmSizes){gemm == GEMM_WGRAD ? s->N : R, gemm == GEMM_FPROP ? s->N : s->K,
                       gemm == GEMM_FPROP   ? s->K
                       : gemm == GEMM_DGRAD ? s->N
                                            : R};
}

// Prints one GEMM: sizes, operands with their scales, fast_accum. `plain`: dtype of operands that are not FP8. `note`:
// text of precision_note(); "" for lm_head.
static inline void precision_print_gemm(const Precision *p, const LinearShape *s, const Recipe *r, GemmKind gemm,
                                        int64_t R, const char *plain, const char *note) {
    char operand[2][32];
    for (int i = 0; i < 2; i++) {
        const ScaleGranularity g = r->granularity[gemm][i];
        if (g == NO_SCALE) format_checked(operand[i], sizeof operand[i], "%s", plain);
        else
            format_checked(operand[i], sizeof operand[i], "%s %s",
                           precision_format(p, gemm_tensor(gemm, i)) == FP8_E4M3 ? "e4m3" : "e5m2",
                           granularity_traits(g)->name);
    }
    const GemmSizes sizes = precision_sizes(s, gemm, R);
    const bool fast_accum = precision_fast_accum(p, r, gemm);
    printf("  %-9s %-6s %8lld %8lld %8lld  %-12s x %-*s%s%s%s\n", s->name, gemm_kind_name(gemm), (long long)sizes.rows,
           (long long)sizes.columns, (long long)sizes.depth, operand[1], fast_accum || *note ? 14 : 0, operand[0],
           fast_accum ? "fast_accum" : "", fast_accum && *note ? "  " : "", note);
}

// Writes the layers in which linear layer `id` is FP8 (fp8 true) or bf16 (fp8 false) as "0,2-5"; long lists end in
// "...". Returns the number of layers.
static inline int64_t precision_layers(const Precision *p, int id, bool fp8, char *out, size_t capacity) {
    int64_t layers = 0;
    out[0] = 0;
    for (int64_t l = 0, first; l < p->num_layers; l++) {
        if (p->keeps_bf16[l * NUM_LINEARS + id] == fp8) continue;
        for (first = l; l + 1 < p->num_layers && p->keeps_bf16[(l + 1) * NUM_LINEARS + id] != fp8;) l++;
        const size_t n = strlen(out);
        if (n < 60)
            format_checked(out + n, capacity - n, first == l ? "%s%lld" : "%s%lld-%lld", layers ? "," : "",
                           (long long)first, (long long)l);
        else if (out[n - 1] != '.') format_checked(out + n, capacity - n, ",...");
        layers += l + 1 - first;
    }
    return layers;
}

// Writes the note of a row of the table. If linear layer `id` is FP8 in some layers and bf16 in others, the note is the
// row's layers. If its sizes keep it in bf16 in all layers, the note says so. Else it is "". Returns false if the row
// has no layer: then it is not printed.
static inline bool precision_note(const Precision *p, int id, bool fp8, char *out, size_t capacity) {
    const LinearShape *s = &p->linear[id];
    char list[128];
    const int64_t layers = precision_layers(p, id, fp8, list, sizeof list);
    out[0] = 0;
    if (layers < p->num_layers) format_checked(out, capacity, "layers %s", list);
    else if (precision_is_fp8(p) && !fp8 && !linear_fits(s, p->recipe))
        format_checked(out, capacity, "[%lld, %lld] are not both multiples of %d", (long long)s->N, (long long)s->K,
                       p->recipe->multiple);
    return layers > 0;
}

// Prints the GEMMs of the linear layers in a micro-step of R rows, and those of lm_head, which takes head_rows rows at
// a time. `plain`: dtype of operands that are not FP8.
static inline void precision_print(const Precision *p, int64_t R, int64_t head_rows, const char *plain) {
    printf("\nGEMMs (fp32 accumulation, %s results)", plain);
    if (precision_any_gemm_fp8(p))
        printf("; recipe %s%s: a scale for each %s", p->recipe->name, p->emulated ? ", emulated by bf16 GEMMs" : "",
               p->recipe->scales);
    printf("\n  %-9s %-6s %8s %8s %8s  operands and their scales\n", "linear", "GEMM", "M", "N", "K");
    for (int id = 0; id < NUM_LINEARS; id++)
        for (int fp8 = 1; fp8 >= 0; fp8--) {
            char note[160];
            if (!precision_note(p, id, fp8 == 1, note, sizeof note)) continue;
            for (int gemm = 0; gemm < NUM_GEMMS; gemm++)
                precision_print_gemm(p, &p->linear[id], fp8 ? p->recipe : recipe_row(RECIPE_BF16), (GemmKind)gemm, R,
                                     plain, note);
        }
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++)
        precision_print_gemm(p, &p->lm_head, &p->head, (GemmKind)gemm, head_rows, plain, "");
    if (p->casts_masters)
        printf("  FP8 weights are cast from the FP16 masters; the layers' matrices have no bf16 weights\n");
    if (precision_is_fp8(p) && !precision_any_gemm_fp8(p))
        printf("  no GEMM runs in FP8: all linear layers are filtered out, or their sizes are not multiples of %d\n",
               p->recipe->multiple);
    if (p->filter_open)
        printf("  --fp8-filter auto measures GEMMs when a new run starts; the table above is without a filter\n");
}

#endif
