// Tests precision.h: which layers each word of --fp8-filter keeps in bf16, the rule of sizes, fast accumulation, casts
// from FP16 masters, and the printed table for every preset and recipe.
#include "../../llmc/config/precision.h"
#include "lib/check.h"

typedef struct {
    Options o;
    ModelConfig m;
    ParameterTable t;
    Precision p;
} Plan;

// Returns the plan of a preset (vocabulary 320 if it has none) for one recipe. RECIPE_BF16 means --precision bf16.
static Plan make_plan(const char *model, int recipe, const char *filter) {
    Plan x;
    memset(&x, 0, sizeof x);
    x.o = options_default();
    x.o.model = model, x.o.fp8_filter = filter;
    x.o.precision = recipe == RECIPE_BF16 ? PRECISION_BF16 : PRECISION_FP8;
    if (recipe != RECIPE_BF16) x.o.fp8_recipe = recipe;
    options_resolve(&x.o);
    if (!model_config_preset(&x.m, model)) die("no preset %s", model);
    if (!x.m.vocab_size) x.m.vocab_size = 320;
    x.t = parameter_table(&x.m);
    x.p = precision_plan(&x.o, x.o.fp8_filter, &x.m, &x.t, true);
    return x;
}

static void free_plan(Plan *x) {
    precision_free(&x->p);
    parameter_table_free(&x->t);
}

// One character per linear layer: '8' is FP8, '-' is bf16. Blanks separate layers.
static void describe(const Precision *p, char *out) {
    for (int64_t l = 0; l < p->num_layers; l++) {
        for (int id = 0; id < NUM_LINEARS; id++) *out++ = precision_of(p, l, id) == p->recipe ? '8' : '-';
        *out++ = l + 1 < p->num_layers ? ' ' : 0;
    }
}

// Tests the filter's words on a model of 4 layers. Each layer has a character for qkv, attn_out, gate_up and down.
static void test_filters(void) {
    static const char *const cases[][2] = {{"", "8888 8888 8888 8888"},
                                           {"first", "---- 8888 8888 8888"},
                                           {"last", "8888 8888 8888 ----"},
                                           {"first,last", "---- 8888 8888 ----"},
                                           {"layers=1-2", "8888 ---- ---- 8888"},
                                           {"layers=0-3", "---- ---- ---- ----"},
                                           {"layers=2", "8888 8888 ---- 8888"},
                                           {"layers=2-2", "8888 8888 ---- 8888"},
                                           {"attention", "--88 --88 --88 --88"},
                                           {"mlp", "88-- 88-- 88-- 88--"},
                                           {"qkv", "-888 -888 -888 -888"},
                                           {"attn_out", "8-88 8-88 8-88 8-88"},
                                           {"gate_up", "88-8 88-8 88-8 88-8"},
                                           {"down", "888- 888- 888- 888-"},
                                           {"lm_head", "8888 8888 8888 8888"},
                                           {"attention,mlp", "---- ---- ---- ----"},
                                           {"first,mlp", "---- 88-- 88-- 88--"},
                                           {"down,last", "888- 888- 888- ----"},
                                           {"layers=0,layers=3", "---- 8888 8888 ----"},
                                           {"first,first", "---- 8888 8888 8888"},
                                           {"lm_head,qkv,down", "-88- -88- -88- -88-"},
                                           {"first, last", "---- 8888 8888 ----"},
                                           {" first,,last,", "---- 8888 8888 ----"},
                                           {",", "8888 8888 8888 8888"},
                                           {"auto", "8888 8888 8888 8888"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[64];
        Plan x = make_plan("small", RECIPE_TENSORWISE, cases[i][0]);
        describe(&x.p, text);
        CHECK(strcmp(text, cases[i][1]) == 0, "--fp8-filter \"%s\" gives %s; expected %s", cases[i][0], text,
              cases[i][1]);
        CHECK(x.p.any_fp8 == (strchr(text, '8') != NULL) && x.p.any_bf16 == (strchr(text, '-') != NULL),
              "\"%s\": any_fp8 and any_bf16 tell if there are FP8 and bf16 layers; found %d and %d", cases[i][0],
              x.p.any_fp8, x.p.any_bf16);
        CHECK(x.p.filter_open == (strcmp(cases[i][0], "auto") == 0), "\"%s\": only auto leaves the filter open",
              cases[i][0]);
        for (int64_t l = 0; l < 4; l++)
            CHECK(precision_layer_is_fp8(&x.p, l) == (strncmp(text + 5 * l, "8888", 4) == 0),
                  "\"%s\": precision_layer_is_fp8 is true exactly if all of layer %lld is FP8", cases[i][0],
                  (long long)l);
        free_plan(&x);
    }
    // auto has found a filter, while the option still is auto.
    Plan x = make_plan("small", RECIPE_TENSORWISE, "auto");
    Precision found = precision_plan(&x.o, "attn_out,down", &x.m, &x.t, true);
    char text[64];
    describe(&found, text);
    CHECK(strcmp(text, "8-8- 8-8- 8-8- 8-8-") == 0 && !found.filter_open,
          "the filter that auto has found is used; found %s", text);
    precision_free(&found);
    free_plan(&x);
}

static void plan_action(void *filter) { make_plan("small", RECIPE_TENSORWISE, (const char *)filter); }

static void test_refused(void) {
    static const char *const cases[][2] = {
        {"q_proj", "\"q_proj\" is none of first, last, layers=A, layers=A-B, attention, mlp, qkv (q, k and v are"},
        {"First", "\"First\" is none of"},
        {"embedding", "\"embedding\" is none of"},
        {"first;last", "\"first;last\" is none of"},
        {"auto,first", "\"auto\" is none of"},
        {"auto,first", "auto stands alone"},
        {"mlp2", "\"mlp2\" is none of"},
        {"layers=", "\"layers=\" is none of"},
        {"layers=a-b", "is none of"},
        {"layers=1-", "\"layers=1-\" is none of"},
        {"layers=1-2x", "is none of"},
        {"layers", "\"layers\" is none of"},
        {"layers=4", "\"layers=4\" names layers that the model does not have; it has 0 to 3"},
        {"layers=0-4", "it has 0 to 3"},
        {"layers=-1", "\"layers=-1\" names layers"},
        {"layers=99999999999999999999999", "it has 0 to 3"},
        {"first,layers=3-1", "\"layers=3-1\" begins after its end; layers=1-3 would do"},
        {"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
         "aaaa\" is none of"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK_DIES(plan_action, (void *)cases[i][0], cases[i][1], "--fp8-filter %s is refused", cases[i][0]);
}

// `tiny` has hidden size 64 and intermediate size 192. N and K of every linear layer are multiples of 64, but not both
// of 128.
static void test_sizes(void) {
    for (int recipe = 0; recipe < NUM_RECIPES; recipe++) {
        const char *expected = 64 % recipe_row(recipe)->multiple ? "---- ----" : "8888 8888";
        char text[64];
        Plan x = make_plan("tiny", recipe, "");
        describe(&x.p, text);
        CHECK(strcmp(text, expected) == 0, "tiny, %s: the sizes decide which layers are FP8; found %s",
              x.p.recipe->name, text);
        free_plan(&x);
    }
    // If the intermediate size does not fit the recipe, down is bf16. The fused gate_up has twice as many rows, so it
    // may fit nevertheless: 1552 = 16 x 97 fits, though 776 does not.
    static const struct {
        int64_t intermediate;
        const char *expected;
    } odd[] = {{776, "888- 888- 888- 888-"}, {772, "88-- 88-- 88-- 88--"}, {784, "8888 8888 8888 8888"}};
    Plan x = make_plan("small", RECIPE_TENSORWISE, "");
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        char text[64];
        x.m.intermediate_size = odd[i].intermediate;
        ParameterTable t = parameter_table(&x.m);
        Precision p = precision_plan(&x.o, "", &x.m, &t, true);
        describe(&p, text);
        CHECK(strcmp(text, odd[i].expected) == 0, "intermediate size %lld decides which layers are FP8; found %s",
              (long long)odd[i].intermediate, text);
        precision_free(&p);
        parameter_table_free(&t);
    }
    free_plan(&x);
    // With --precision bf16 the plan has the row of bf16.
    x = make_plan("small", RECIPE_BF16, "");
    CHECK(!x.p.any_fp8 && x.p.any_bf16 && precision_of(&x.p, 0, DOWN_PROJ) == recipe_row(RECIPE_BF16) &&
              !precision_layer_is_fp8(&x.p, 0),
          "a bf16 run has no FP8 layer");
    free_plan(&x);
}

// Tests the shape of each linear layer's weight and where it begins: a fused weight begins at the first of its tensors
// in the parameter table. Also tests to which FP8 format a recipe casts x, w and gradients.
static void test_shapes_and_formats(void) {
    Plan x = make_plan("llama3.1-8b", RECIPE_TENSORWISE, "");
    static const struct {
        const char *first;
        int64_t N, K;
    } parts[NUM_LINEARS] = {{"model.layers.0.self_attn.q_proj.weight", 6144, 4096},
                            {"model.layers.0.self_attn.o_proj.weight", 4096, 4096},
                            {"model.layers.0.mlp.gate_proj.weight", 28672, 4096},
                            {"model.layers.0.mlp.down_proj.weight", 4096, 14336}};
    for (int id = 0; id < NUM_LINEARS; id++) {
        const LinearShape *s = &x.p.linear[id];
        const int64_t matrices = layer_offset(&x.t, 0) + x.t.layer_segments[SEGMENT_VECTORS];
        CHECK(s->N == parts[id].N && s->K == parts[id].K &&
                  parameter_find(&x.t, parts[id].first)->offset == matrices + s->offset,
              "%s has the expected N and K, and begins at its first tensor; found [%lld, %lld] at %lld", s->name,
              (long long)s->N, (long long)s->K, (long long)s->offset);
    }
    CHECK(precision_format(&x.p, TENSOR_X) == FP8_E4M3 && precision_format(&x.p, TENSOR_W) == FP8_E4M3 &&
              precision_format(&x.p, TENSOR_DY) == FP8_E5M2,
          "tensorwise casts gradients to e5m2, x and w to e4m3");
    free_plan(&x);
    x = make_plan("small", RECIPE_BLOCKWISE, "");
    CHECK(precision_format(&x.p, TENSOR_DY) == FP8_E4M3, "blockwise casts gradients to e4m3");
    x.o.fp8_format = FP8_FORMAT_HYBRID;
    Precision hybrid = precision_plan(&x.o, "", &x.m, &x.t, true);
    CHECK(precision_format(&hybrid, TENSOR_DY) == FP8_E5M2 && precision_format(&hybrid, TENSOR_X) == FP8_E4M3,
          "blockwise with --fp8-format hybrid casts gradients to e5m2");
    precision_free(&hybrid);
    free_plan(&x);
}

// Tests --fp8-fast-accum with a recipe that has fast_accum, with one that has not, with one that has a bf16 GEMM, and
// with emulation.
static void test_fast_sums(void) {
    static const struct {
        int recipe, option;
        bool emulate, expected[NUM_GEMMS];
    } cases[] = {{RECIPE_TENSORWISE, FAST_ACCUM_FPROP, false, {true, false, false}},
                 {RECIPE_TENSORWISE, FAST_ACCUM_ALL, false, {true, true, true}},
                 {RECIPE_TENSORWISE, FAST_ACCUM_NONE, false, {false, false, false}},
                 {RECIPE_BLOCKWISE, FAST_ACCUM_FPROP, false, {false, false, false}},
                 {RECIPE_MXFP8, FAST_ACCUM_FPROP, false, {false, false, false}},
                 {RECIPE_ROWWISE_GW_HP, FAST_ACCUM_ALL, false, {true, true, false}},
                 {RECIPE_ROWWISE, FAST_ACCUM_ALL, true, {false, false, false}}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options o = options_default();
        ModelConfig m;
        model_config_preset(&m, "llama3.2-1b");
        ParameterTable t = parameter_table(&m);
        o.precision = PRECISION_FP8, o.fp8_recipe = cases[i].recipe, o.fp8_fast_accum = cases[i].option,
        o.fp8_emulate = cases[i].emulate, o.fp8_lm_head = LM_HEAD_ALL;
        Precision p = precision_plan(&o, "", &m, &t, true);
        for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
            CHECK(precision_fast_accum(&p, p.recipe, (GemmKind)gemm) == cases[i].expected[gemm],
                  "%s, option %d, GEMM %d: fast_accum is as recipe, option and emulation say",
                  recipe_row(cases[i].recipe)->name, cases[i].option, gemm);
            CHECK(precision_fast_accum(&p, &p.head, (GemmKind)gemm) == (gemm == GEMM_FPROP && cases[i].expected[gemm]),
                  "%s, option %d, GEMM %d: lm_head has fast_accum in fprop alone", recipe_row(cases[i].recipe)->name,
                  cases[i].option, gemm);
        }
        precision_free(&p);
        parameter_table_free(&t);
    }
}

// Returns the text of precision_print for 2048 rows, and 1024 rows of lm_head.
static char *printed(const Plan *x) {
    const CheckCapture capture = check_capture();
    precision_print(&x->p, 2048, 1024, "bf16");
    char *text = check_captured(capture);
    CHECK(strlen(text) < (1 << 16) - 1, "the table has less than 64 KiB; found %zu bytes", strlen(text));
    return text;
}

static void test_golden_table(void) {
    static const char expected[] =
        "\nGEMMs (fp32 accumulation, bf16 results); recipe rowwise_with_gw_hp: a scale for each row (dgrad: "
        "w tensor), power of 2\n"
        "  linear    GEMM          M        N        K  operands and their scales\n"
        "  qkv       fprop      2048     6144     4096  e4m3 row     x e4m3 row      fast_accum  layers 1-4,6,8-31\n"
        "  qkv       dgrad      2048     4096     6144  e4m3 row     x e4m3 tensor   layers 1-4,6,8-31\n"
        "  qkv       wgrad      6144     4096     2048  bf16         x bf16          layers 1-4,6,8-31\n"
        "  qkv       fprop      2048     6144     4096  bf16         x bf16          layers 0,5,7\n"
        "  qkv       dgrad      2048     4096     6144  bf16         x bf16          layers 0,5,7\n"
        "  qkv       wgrad      6144     4096     2048  bf16         x bf16          layers 0,5,7\n"
        "  attn_out  fprop      2048     4096     4096  e4m3 row     x e4m3 row      fast_accum  layers 1-4,6,8-31\n"
        "  attn_out  dgrad      2048     4096     4096  e4m3 row     x e4m3 tensor   layers 1-4,6,8-31\n"
        "  attn_out  wgrad      4096     4096     2048  bf16         x bf16          layers 1-4,6,8-31\n"
        "  attn_out  fprop      2048     4096     4096  bf16         x bf16          layers 0,5,7\n"
        "  attn_out  dgrad      2048     4096     4096  bf16         x bf16          layers 0,5,7\n"
        "  attn_out  wgrad      4096     4096     2048  bf16         x bf16          layers 0,5,7\n"
        "  gate_up   fprop      2048    28672     4096  bf16         x bf16\n"
        "  gate_up   dgrad      2048     4096    28672  bf16         x bf16\n"
        "  gate_up   wgrad     28672     4096     2048  bf16         x bf16\n"
        "  down      fprop      2048     4096    14336  bf16         x bf16\n"
        "  down      dgrad      2048    14336     4096  bf16         x bf16\n"
        "  down      wgrad      4096    14336     2048  bf16         x bf16\n"
        "  lm_head   fprop      1024   128256     4096  bf16         x bf16\n"
        "  lm_head   dgrad      1024     4096   128256  bf16         x bf16\n"
        "  lm_head   wgrad    128256     4096     1024  bf16         x bf16\n";
    Plan x = make_plan("llama3.1-8b", RECIPE_ROWWISE_GW_HP, "first,layers=5,layers=7,mlp");
    char *text = printed(&x);
    CHECK(strcmp(text, expected) == 0, "the table is\n%sexpected\n%s", text, expected);
    free(text);
    free_plan(&x);
}

// An operand of a GEMM as the table shall show it: the format, and by what the values are scaled.
static const char *operand_words(const Recipe *r, GemmKind gemm, int operand, char words[16]) {
    const GranularityTraits *traits = granularity_traits(r->granularity[gemm][operand]);
    const bool e5m2 = gemm_tensor(gemm, operand) == TENSOR_DY && r->dy_format == FP8_E5M2;
    if (traits->type == SCALE_TYPE_NONE) return "bf16";
    format_checked(words, 16, "%s %s", e5m2 ? "e5m2" : "e4m3", traits->name);
    return words;
}

// For every preset and recipe, the table has each GEMM once, with the operands and scales of the recipe
// (test_recipes.c has them).
static void test_tables(void) {
    static const char *const presets[] = {
#define X(preset, ...) preset,
        MODEL_PRESETS(X)
#undef X
    };
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++)
        for (int recipe = 0; recipe <= NUM_RECIPES; recipe++) {
            Plan x = make_plan(presets[i], recipe, "");
            const bool unfit = i == 0 && recipe_row(recipe)->multiple == 128;  // no linear layer of tiny
            const Recipe *shown = recipe_row(x.p.any_fp8 ? recipe : RECIPE_BF16);
            CHECK(x.p.any_fp8 == (recipe != RECIPE_BF16 && !unfit) && !(x.p.any_fp8 && x.p.any_bf16),
                  "%s, %s: all layers are FP8, or all are bf16; found any_fp8 %d, any_bf16 %d", presets[i],
                  recipe_row(recipe)->name, x.p.any_fp8, x.p.any_bf16);
            char *text = printed(&x), line[128], passes[64], first[16], second[16];
            for (int gemm = 0; gemm < NUM_GEMMS; gemm++)
                for (int id = 0; id < NUM_LINEARS; id++) {
                    format_checked(passes, sizeof passes, "%-12s x %s", operand_words(shown, (GemmKind)gemm, 1, first),
                                   operand_words(shown, (GemmKind)gemm, 0, second));
                    format_checked(line, sizeof line, "\n  %-9s %s ", x.p.linear[id].name,
                                   gemm_kind_name((GemmKind)gemm));
                    const char *at = strstr(text, line), *end = at ? strchr(at + 1, '\n') : NULL,
                               *found = at ? strstr(at, passes) : NULL;
                    CHECK(check_count(text, line) == 1 && found && found < end,
                          "%s, %s, %s %s has one line, with the recipe's operands, in\n%s", presets[i],
                          recipe_row(recipe)->name, x.p.linear[id].name, gemm_kind_name((GemmKind)gemm), text);
                }
            CHECK(check_count(text, "\n") == 18 + unfit, "%s, %s: there is a line for each GEMM in\n%s", presets[i],
                  recipe_row(recipe)->name, text);
            CHECK(check_count(text, "fast_accum") == (x.p.any_fp8 && x.p.recipe->fast_accum ? NUM_LINEARS : 0),
                  "%s, %s: fast_accum stands in 4 lines if the recipe has it, else in none, in\n%s", presets[i],
                  recipe_row(recipe)->name, text);
            free(text);
            free_plan(&x);
        }
}

// --fp8-lm-head: the table's rows of lm_head, and the number of FP8 GEMMs.
static void test_lm_head(void) {
    static const char *const tables[2][NUM_GEMMS] = {
        {"fprop      1024   128256     4096  e4m3 row     x e4m3 row      fast_accum\n",
         "dgrad      1024     4096   128256  e4m3 row     x e4m3 tensor\n",
         "wgrad    128256     4096     1024  bf16         x bf16\n"},
        {"fprop      1024   128256     4096  e4m3 tensor  x e4m3 tensor   fast_accum\n",
         "dgrad      1024     4096   128256  e5m2 tensor  x e4m3 tensor\n",
         "wgrad    128256     4096     1024  e5m2 tensor  x e4m3 tensor\n"}};
    for (int i = 0; i < 2 * (LM_HEAD_ALL + 1); i++) {
        const bool tensorwise = i % 2;
        const char *const *rows = tables[tensorwise];
        const int head = i / 2, count = tensorwise || head < LM_HEAD_ALL ? head : LM_HEAD_ON;
        Plan x = make_plan("llama3.1-8b", tensorwise ? RECIPE_TENSORWISE : RECIPE_ROWWISE_GW_HP, "");
        const int64_t gemms = precision_fp8_gemms(&x.p);
        precision_free(&x.p);
        x.o.fp8_lm_head = head;
        x.p = precision_plan(&x.o, "", &x.m, &x.t, true);
        char *text = printed(&x), line[128];
        for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
            const bool shown = count > gemm || (gemm == GEMM_WGRAD && !tensorwise);
            format_checked(line, sizeof line, "\n  lm_head   %s", rows[gemm]);
            CHECK(check_count(text, line) == shown, "--fp8-lm-head %d: the row %s is%s in\n%s", head, rows[gemm],
                  shown ? "" : " not", text);
        }
        CHECK(precision_fp8_gemms(&x.p) == gemms + count, "--fp8-lm-head %d has as many FP8 GEMMs more; found %lld",
              head, (long long)(precision_fp8_gemms(&x.p) - gemms));
        free(text), free_plan(&x);
    }
}

// Tests the notes that the table has in special cases.
static void test_table_notes(void) {
    Plan x = make_plan("tiny", RECIPE_BLOCKWISE, "");
    char *text = printed(&x);
    CHECK(strstr(text, "x bf16          [256, 64] are not both multiples of 128\n") &&
              strstr(text, "no GEMM runs in FP8") && !strstr(text, "recipe"),
          "the table says why no GEMM is FP8: %s", text);
    free(text), free_plan(&x);
    x = make_plan("small", RECIPE_TENSORWISE, "auto");
    text = printed(&x);
    CHECK(strstr(text, "--fp8-filter auto measures GEMMs") && !strstr(text, "no GEMM runs"),
          "the table says that auto measures: %s", text);
    free(text);
    x.o.fp8_emulate = true;
    Precision emulated = precision_plan(&x.o, "first", &x.m, &x.t, true);
    precision_free(&x.p);
    x.p = emulated;
    text = printed(&x);
    CHECK(strstr(text, "recipe tensorwise, emulated by bf16 GEMMs: a scale for each tensor") &&
              !strstr(text, "fast_accum") && strstr(text, "e4m3 tensor   layers 1-3\n"),
          "the table names the emulation and the FP8 layers: %s", text);
    free(text), free_plan(&x);
    // A list of layers that is too long for the line is cut.
    x = make_plan("llama3.1-405b", RECIPE_TENSORWISE, "");
    for (int64_t l = 0; l < x.p.num_layers; l += 2) x.p.keeps_bf16[l * NUM_LINEARS + QKV_PROJ] = true;
    text = printed(&x);
    CHECK(strstr(text, "layers 1,3,5,7") && strstr(text, ",...\n") && !strstr(text, ",...,"),
          "a long list of layers is cut at a comma: %s", text);
    free(text), free_plan(&x);
}

// FP8 weights are cast from FP16 masters if all linear layers are FP8, with tensor scales from current amaxes.
static void test_casts_masters(void) {
    static const struct {
        int recipe, masters;
        const char *model, *filter;
        bool casts;
    } cases[] = {{RECIPE_TENSORWISE, STORAGE_FP16, "tiny", "", true},
                 {RECIPE_TENSORWISE, STORAGE_FP16_STOCHASTIC, "llama3.1-8b", "lm_head", true},
                 {RECIPE_TENSORWISE, STORAGE_FP16, "tiny", "last", false},
                 {RECIPE_TENSORWISE, STORAGE_FP16, "tiny", "attention,mlp", false},
                 {RECIPE_TENSORWISE, STORAGE_FP32, "tiny", "", false},
                 {RECIPE_TENSORWISE, STORAGE_BF16, "tiny", "", false},
                 {RECIPE_DELAYED, STORAGE_FP16, "tiny", "", false},
                 {RECIPE_ROWWISE, STORAGE_FP16, "tiny", "", false},
                 {RECIPE_BLOCKWISE, STORAGE_FP16, "small", "", false},
                 {RECIPE_BF16, STORAGE_FP16, "tiny", "", false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Plan x = make_plan(cases[i].model, cases[i].recipe, cases[i].filter);
        precision_free(&x.p);
        x.o.master_weights = cases[i].masters;
        x.p = precision_plan(&x.o, x.o.fp8_filter, &x.m, &x.t, true);
        CHECK(x.p.casts_masters == cases[i].casts, "case %zu: casts_masters is %d; expected %d", i, x.p.casts_masters,
              cases[i].casts);
        free_plan(&x);
    }
}

// --fp8-filter auto counts the casts of weights that a run makes: in each pass, or once a step.
static void test_casts_once(void) {
    static const struct {
        int64_t shard_size;
        int all_gather, sharding;
        bool once;
    } cases[] = {{1, ON, SHARDING_FULL, false},  {1, OFF, SHARDING_NONE, false},   {4, ON, SHARDING_FULL, true},
                 {4, OFF, SHARDING_FULL, false}, {4, OFF, SHARDING_GRAD_OP, true}, {1, OFF, SHARDING_GRAD_OP, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options o = options_default();
        o.fp8_all_gather = cases[i].all_gather, o.sharding = cases[i].sharding;
        CHECK(precision_casts_once(&o, cases[i].shard_size) == cases[i].once,
              "case %zu: weights are cast once a step: %d expected", i, cases[i].once);
    }
}

static void plan_bf16_gather(void *context) {
    Plan x = make_plan("tiny", RECIPE_TENSORWISE, (const char *)context);
    x.o.master_weights = STORAGE_FP16, x.o.fp8_all_gather = OFF;
    precision_free(&x.p);
    x.p = precision_plan(&x.o, x.o.fp8_filter, &x.m, &x.t, true);
    if (!x.p.casts_masters) die("planned");
}

// --fp8-all-gather off with FP16 masters: ranks cannot gather bf16 weights if there are none.
static void test_bf16_gather(void) {
    char none[] = "", first[] = "first";
    CHECK_DIES(plan_bf16_gather, none, "there are none in bf16; leave it out",
               "without a filter, FP8 weights are cast from the masters, so --fp8-all-gather off is refused");
    CHECK_DIES(plan_bf16_gather, first, "planned",
               "if the filter keeps a layer in bf16, there are bf16 weights, so --fp8-all-gather off is accepted");
}

// With the amax of the logits' gradients the scale is a power of two, and no gradient, rounded up to the mantissas of
// FP8, is above the amax or all below half of it. bf16 has 128 mantissas, and 1 / n has them all.
static void test_dlogits_scale(void) {
    int64_t wrong = 0;
    for (int n = 1; n <= 1 << 16; n++)
        for (uint32_t dropped = 15; dropped <= 31; dropped += 16) {
            const float amax = precision_dlogits_amax(1 / (float)n),
                        scale = fp8_scale(amax, dropped == 15 ? FP8_E4M3 : FP8_E5M2);
            const uint32_t up = ((float_bits(bf16_round(1 / (float)n)) >> 16) + dropped) & ~dropped;
            const float largest = float_from_bits(up << 16);
            wrong += (float_bits(scale) & 0x7fffff) || largest > amax || largest < amax / 2;
        }
    CHECK(wrong == 0, "scales of the gradients of logits are powers of two, without saturation; %lld are not",
          (long long)wrong);
}

int main(void) {
    test_dlogits_scale();
    test_casts_masters();
    test_casts_once();
    test_bf16_gather();
    test_filters();
    test_refused();
    test_sizes();
    test_shapes_and_formats();
    test_fast_sums();
    test_golden_table();
    test_tables();
    test_lm_head();
    test_table_notes();
    return check_report();
}
