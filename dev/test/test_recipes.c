// Tests recipes.h, delayed.h, quantize_reference.h and the scales of fp8.h. FP8 codes and scales must equal those of
// torchao and Transformer Engine (goldens of dev/reference), and so must the scales of delayed scaling. Also tests the
// layout of scales, and the rounding and special values of casts. Run it from the root of the repository.
#include "../../llmc/reference/delayed.h"
#include "../../llmc/reference/quantize_reference.h"
#include "../../llmc/base/rng.h"
#include "lib/check.h"
#include "lib/fp8_golden.h"

// ---- FP8 data against its golden.

typedef struct {
    float *x;  // [R, C]
    int64_t R, C;
} Matrix;

static Matrix golden_matrix(const Safetensors *st, const char *name) {
    bf16_bits *bits = (bf16_bits *)fp8_golden_bytes(st, name, ST_BF16, -1);
    const Safetensor *t = safetensors_find(st, name);
    Matrix m = {(float *)xcalloc((size_t)t->elements, sizeof(float)), t->shape[0], t->shape[1]};
    for (int64_t i = 0; i < t->elements; i++) m.x[i] = bf16_to_float(bits[i]);
    free(bits);
    return m;
}

// Rowwise or columnwise FP8 data of a matrix: codes [outer, depth] and scales.
typedef struct {
    int64_t outer, depth;
    uint8_t *codes;
    void *scales;
} Copy;

static Copy copy_make(const Matrix *m, TensorUsage kind, ScaleGranularity granularity, ScaleRule rule, Fp8Format format,
                      float scale) {
    const UsageShape shape = usage_shape(m->R, m->C, kind);
    Copy c = {shape.outer, shape.depth, NULL, NULL};
    c.codes = (uint8_t *)xcalloc((size_t)(c.outer * c.depth), 1);
    c.scales = xcalloc((size_t)scale_bytes(granularity, c.outer, c.depth), 1);
    memset(c.scales, 0xa5, (size_t)scale_bytes(granularity, c.outer, c.depth));
    quantize_copy(c.codes, c.scales, m->x, shape, granularity, rule, format, scale);
    return c;
}

static void copy_free(Copy *c) {
    free(c->codes);
    free(c->scales);
}

static bool same_float(float a, float b) { return float_bits(a) == float_bits(b) || (isnan(a) && isnan(b)); }

// Returns the place of element (i, k)'s scale_inv in a golden, whose scales are row-major: [outer / height, depth /
// width].
static int64_t natural_place(const Copy *c, ScaleGranularity granularity, int64_t width, int64_t i, int64_t k) {
    const int64_t height = granularity == BLOCK_128X128 ? 128 : 1;
    return is_per_tensor(granularity) ? 0 : i / height * ceil_div(c->depth, width) + k / width;
}

// Counts the elements whose scale is not the expected one, and the bytes of padding between scales that are not zero.
static int64_t wrong_scales(const Copy *c, const void *expected, ScaleGranularity granularity, int64_t width) {
    const int64_t size = granularity == BLOCK_1X32 ? 1 : 4;
    uint8_t *left = (uint8_t *)xcalloc((size_t)scale_bytes(granularity, c->outer, c->depth), 1);
    memcpy(left, c->scales, (size_t)scale_bytes(granularity, c->outer, c->depth));
    int64_t wrong = 0;
    for (int64_t i = 0; i < c->outer; i++)
        for (int64_t k = 0; k < c->depth; k++) {
            const int64_t place = scale_index(granularity, i, k, c->outer, c->depth),
                          natural = natural_place(c, granularity, width, i, k);
            memset(left + place * size, 0, (size_t)size);
            if (granularity == BLOCK_1X32)
                wrong += ((const uint8_t *)c->scales)[place] != ((const uint8_t *)expected)[natural];
            else wrong += !same_float(((const float *)c->scales)[place], ((const float *)expected)[natural]);
        }
    for (int64_t b = 0; b < scale_bytes(granularity, c->outer, c->depth); b++) wrong += left[b] != 0;
    free(left);
    return wrong;
}

// Counts the values of a GEMM's operand that are not the golden's codes times its scale_inv. GEMMs apply a scale of the
// whole tensor later, so it is left out.
static int64_t wrong_values(const Copy *c, const uint8_t *codes, const void *inverse, ScaleGranularity granularity,
                            int64_t width, Fp8Format format) {
    float *values = (float *)xcalloc((size_t)(c->outer * c->depth), sizeof(float));
    dequantize_copy(values, c->codes, c->scales, c->outer, c->depth, granularity, format);
    int64_t wrong = 0;
    for (int64_t i = 0; i < c->outer; i++)
        for (int64_t k = 0; k < c->depth; k++) {
            const int64_t natural = natural_place(c, granularity, width, i, k);
            double factor = 1;
            if (granularity == BLOCK_1X32)
                factor = ((const uint8_t *)inverse)[natural] == 0xff
                             ? NAN
                             : ldexp(1, ((const uint8_t *)inverse)[natural] - 127);
            else if (!is_per_tensor(granularity)) factor = ((const float *)inverse)[natural];
            wrong +=
                !same_float(values[i * c->depth + k], (float)(fp8_to_float(codes[i * c->depth + k], format) * factor));
        }
    free(values);
    return wrong;
}

static void check_copy(const Safetensors *st, const char *key, const Matrix *m, TensorUsage kind,
                       ScaleGranularity granularity, ScaleRule rule, Fp8Format format) {
    char name[160];
    Copy c = copy_make(m, kind, granularity, rule, format, 0);
    const bool by_128 = granularity == BLOCK_1X128 || granularity == BLOCK_128X128;
    const int64_t width = granularity == BLOCK_1X32 ? 32 : by_128 ? 128 : c.depth;
    uint8_t *codes = (uint8_t *)fp8_golden_bytes(st, key, ST_U8, c.outer * c.depth);
    const int64_t bands = granularity == BLOCK_128X128 ? ceil_div(c.outer, 128) : c.outer;
    const int64_t rows = is_per_tensor(granularity) ? 1 : bands;
    format_checked(name, sizeof name, "%s_inverse", key);
    const SafetensorsType type = granularity == BLOCK_1X32 ? ST_U8 : ST_F32;
    void *inverse = fp8_golden_bytes(st, name, type, rows * ceil_div(c.depth, width));
    int64_t wrong = 0, first = -1;
    for (int64_t i = 0; i < c.outer * c.depth; i++)
        if (!fp8_same(c.codes[i], codes[i], format) && wrong++ == 0) first = i;
    CHECK(wrong == 0, "%s: all codes equal the golden's; %lld of %lld differ, the first at (%lld, %lld)", key,
          (long long)wrong, (long long)(c.outer * c.depth), (long long)(first / c.depth), (long long)(first % c.depth));
    wrong = wrong_scales(&c, inverse, granularity, width);
    CHECK(wrong == 0, "%s: all scales equal the golden's, and padding is zero; %lld elements or bytes are wrong", key,
          (long long)wrong);
    wrong = wrong_values(&c, codes, inverse, granularity, width, format);
    CHECK(wrong == 0, "%s: all values equal the golden's; %lld differ", key, (long long)wrong);
    copy_free(&c);
    free(codes);
    free(inverse);
}

// Tests every tensor CASE.GRAIN.USAGE.FORMAT in a file of make_recipe_goldens.py.
static void test_golden_copies(const char *path, int expected) {
    static const struct {
        const char *name;
        ScaleGranularity granularity;
        ScaleRule rule;
    } kinds[] = {{"rows", PER_ROW, SCALE_TORCHAO_POW2},
                 {"mx", BLOCK_1X32, SCALE_MX},
                 {"1x128", BLOCK_1X128, SCALE_TE_POW2},
                 {"128x128", BLOCK_128X128, SCALE_TE_POW2}};
    Safetensors st = fp8_golden_open(path);
    int seen = 0;
    for (int64_t t = 0; t < st.count; t++) {
        char name[40], granularity[40], copy[40], format[40];
        const char *pattern = "%39[^.].%39[^.].%39[^.].%39[^.]";
        if (sscanf(st.tensors[t].name, pattern, name, granularity, copy, format) != 4) continue;
        for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
            for (int f = 0; f < 2; f++) {
                if (strcmp(granularity, kinds[k].name) != 0) continue;
                if (strcmp(format, fp8_format_name((Fp8Format)f)) != 0) continue;
                strcat(name, ".x");
                Matrix m = golden_matrix(&st, name);
                check_copy(&st, st.tensors[t].name, &m, strcmp(copy, "row") == 0 ? ROWWISE : COLUMNWISE,
                           kinds[k].granularity, kinds[k].rule, (Fp8Format)f);
                free(m.x);
                seen++;
            }
    }
    CHECK(seen == expected, "%s has %d cases; expected %d", path, seen, expected);
    safetensors_close(&st);
}

// Tests data with one scale for the whole tensor against torchao's tensorwise goldens: rowwise, columnwise, and with a
// given scale.
static void test_golden_tensors(void) {
    Safetensors st = fp8_golden_open("dev/reference/goldens/fp8_tensors.safetensors");
    int seen = 0;
    for (int64_t t = 0; t < st.count; t++) {
        char name[40], part[40];
        if (sscanf(st.tensors[t].name, "%39[^.].%39s", name, part) != 2 || strcmp(part, "x") != 0) continue;
        Matrix m = golden_matrix(&st, st.tensors[t].name);
        seen++;
        for (int f = 0; f < 2; f++) {
            char key[128];
            format_checked(key, sizeof key, "%s.%s", name, fp8_format_name((Fp8Format)f));
            uint8_t *codes = (uint8_t *)fp8_golden_bytes(&st, key, ST_U8, m.R * m.C);
            format_checked(key, sizeof key, "%s.%s_scale", name, fp8_format_name((Fp8Format)f));
            float *scale = (float *)fp8_golden_bytes(&st, key, ST_F32, 1);
            Copy row = copy_make(&m, ROWWISE, PER_TENSOR, SCALE_TORCHAO, (Fp8Format)f, 0),
                 col = copy_make(&m, COLUMNWISE, PER_TENSOR, SCALE_TORCHAO, (Fp8Format)f, 0);
            Copy given = copy_make(&m, COLUMNWISE, PER_TENSOR_BROADCAST, SCALE_TORCHAO, (Fp8Format)f, scale[0]);
            int64_t wrong =
                !same_float(*(float *)row.scales, 1 / scale[0]) + !same_float(*(float *)col.scales, 1 / scale[0]);
            for (int64_t i = 0; i < m.R * m.C; i++) {
                const int64_t transposed = i % m.C * m.R + i / m.C;
                wrong += !fp8_same(row.codes[i], codes[i], (Fp8Format)f) +
                         !fp8_same(col.codes[transposed], codes[i], (Fp8Format)f);
                wrong += !fp8_same(given.codes[transposed], codes[i], (Fp8Format)f);
            }
            for (int64_t i = 0; i < m.C; i++) wrong += !same_float(((float *)given.scales)[i], 1 / scale[0]);
            CHECK(wrong == 0, "%s: all codes and scales equal the golden's; %lld differ", key, (long long)wrong);
            copy_free(&row), copy_free(&col), copy_free(&given);
            free(codes), free(scale);
        }
        free(m.x);
    }
    CHECK(seen == 10, "there are 10 cases; found %d", seen);
    safetensors_close(&st);
}

// ---- Scales from amaxes.

static void test_golden_scales(void) {
    Safetensors torchao = fp8_golden_open("dev/reference/goldens/fp8_scales.safetensors"),
                mx = fp8_golden_open("dev/reference/goldens/recipe_torchao.safetensors");
    Safetensors te = fp8_golden_open("dev/reference/goldens/recipe_te.safetensors");
    for (int f = 0; f < 2; f++) {
        const Fp8Format format = (Fp8Format)f;
        char name[64];
        format_checked(name, sizeof name, "%s_pow2", fp8_format_name(format));
        float *pow2 = (float *)fp8_golden_bytes(&torchao, name, ST_F32, 0x7f80);
        format_checked(name, sizeof name, "mx_bytes.%s", fp8_format_name(format));
        uint8_t *bytes = (uint8_t *)fp8_golden_bytes(&mx, name, ST_U8, 0x7f80);
        int wrong_pow2 = 0, wrong_mx = 0, saturated = 0, unlike = 0;
        for (int i = 0; i < 0x7f80; i++) {
            const float amax = bf16_to_float((bf16_bits)i);
            wrong_pow2 += !same_float(fp8_rule_scale(SCALE_TORCHAO_POW2, amax, format), pow2[i]);
            wrong_mx += e8m0_from_amax(amax, format) != bytes[i];
            saturated += amax * fp8_rule_scale(SCALE_MX, amax, format) > fp8_max(format);
            unlike += amax >= 1e-12f && !same_float(fp8_rule_scale(SCALE_TE, amax, format), fp8_scale(amax, format));
        }
        CHECK(wrong_pow2 == 0 && wrong_mx == 0, "%s: scales equal torchao's; %d powers of two and %d E8M0 bytes differ",
              fp8_format_name(format), wrong_pow2, wrong_mx);
        CHECK(saturated == 0 && unlike == 0,
              "%s: no amax saturates in MX (%d do), and Transformer Engine's scale of each amax of 1e-12 or more is "
              "torchao's (%d are not)",
              fp8_format_name(format), saturated, unlike);
        CHECK(fp8_rule_scale(SCALE_TORCHAO_POW2, INFINITY, format) == 0 &&
                  isnan(fp8_rule_scale(SCALE_TORCHAO_POW2, NAN, format)),
              "torchao's scales of infinity and NaN are 0 and NaN");
        CHECK(e8m0_from_amax(INFINITY, format) == 0xfe && e8m0_from_amax(NAN, format) == 0xff &&
                  isnan(e8m0_to_float(0xff)),
              "E8M0 bytes of infinity and NaN are 0xfe and 0xff");
        float *amax = (float *)fp8_golden_bytes(&te, "scales.amax", ST_F32, -1);
        const int64_t count = safetensors_find(&te, "scales.amax")->elements;
        for (int rule = SCALE_TE; rule <= SCALE_TE_POW2; rule++) {
            format_checked(name, sizeof name, "scales.%s%s", fp8_format_name(format), rule == SCALE_TE ? "" : "_pow2");
            float *expected = (float *)fp8_golden_bytes(&te, name, ST_F32, count);
            int wrong = 0;
            for (int64_t i = 0; i < count; i++)
                wrong += !same_float(fp8_rule_scale((ScaleRule)rule, amax[i], format), expected[i]);
            CHECK(wrong == 0, "%s: all scales equal Transformer Engine's; %d of %lld differ", name, wrong,
                  (long long)count);
            free(expected);
        }
        free(pow2), free(bytes), free(amax);
    }
    safetensors_close(&torchao), safetensors_close(&mx), safetensors_close(&te);
}

// Tests Transformer Engine's E4M3 scales, plain and as powers of two, against values computed by hand.
static void test_te_scales(void) {
    static const uint32_t cases[][3] = {{0, 0x3f800000, 0x3f800000},          {0x7f800000, 0x3f800000, 0x3f800000},
                                        {0x7fc00000, 0x3f800000, 0x3f800000}, {0x00010000, 0x7f7fffff, 0x7f000000},
                                        {0x3f800000, 0x43e00000, 0x43800000}, {0x3fe10000, 0x437edcbb, 0x43000000},
                                        {0x43e10000, 0x3f7edcbb, 0x3f000000}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const float amax = float_from_bits(cases[i][0]);
        const uint32_t plain = float_bits(fp8_rule_scale(SCALE_TE, amax, FP8_E4M3)),
                       pow2 = float_bits(fp8_rule_scale(SCALE_TE_POW2, amax, FP8_E4M3));
        CHECK(plain == cases[i][1] && pow2 == cases[i][2], "amax %g has the expected scales; found %08x and %08x", amax,
              plain, pow2);
    }
    CHECK(fp8_scale_te(1, FP8_E4M3, 1) == 224 && fp8_scale_te(2, FP8_E5M2, 3) == 3584,
          "a margin divides the scale by a power of two");
}

// Tests the scale after each pass of a sequence of passes over one tensor. The scale before the first pass is not
// compared: it is 0 here, and 1 in Transformer Engine.
static void test_golden_delayed(void) {
    Safetensors st = fp8_golden_open("dev/reference/goldens/recipe_te.safetensors");
    int seen = 0;
    for (int64_t t = 0; t < st.count; t++) {
        int window, margin, length = 0;
        char format[8], name[80];
        if (sscanf(st.tensors[t].name, "delayed.h%d_m%d_%4s.amaxes%n", &window, &margin, format, &length) != 3 ||
            length == 0)
            continue;
        const int64_t passes = st.tensors[t].elements;
        format_checked(name, sizeof name, "delayed.h%d_m%d_%s.scales", window, margin, format);
        float *amaxes = (float *)fp8_golden_bytes(&st, st.tensors[t].name, ST_F32, passes),
              *scales = (float *)fp8_golden_bytes(&st, name, ST_F32, passes);
        float *history = (float *)xcalloc((size_t)window, sizeof(float)), scale = 0;
        int64_t wrong = 0;
        for (int64_t i = 0; i < passes; i++) {
            delayed_update(history, window, &scale, float_bits(amaxes[i]),
                           strcmp(format, "e4m3") == 0 ? FP8_E4M3 : FP8_E5M2, margin);
            wrong += !same_float(scale, scales[i]) || history[0] != 0;
        }
        CHECK(wrong == 0, "%s: all scales equal Transformer Engine's; %lld of %lld differ", name, (long long)wrong,
              (long long)passes);
        free(amaxes), free(scales), free(history);
        seen++;
    }
    CHECK(seen == 4, "there are 4 sequences; found %d", seen);
    safetensors_close(&st);
}

// ---- Layout of scales.

static void test_golden_layout(void) {
    static const int64_t sizes[][2] = {{128, 4}, {160, 5}, {96, 9}, {300, 4}};
    Safetensors st = fp8_golden_open("dev/reference/goldens/recipe_torchao.safetensors");
    for (int s = 0; s < 4; s++) {
        const int64_t outer = sizes[s][0], blocks = sizes[s][1], depth = blocks * 32;
        char name[64];
        format_checked(name, sizeof name, "layout.%lldx%lld", (long long)outer, (long long)blocks);
        uint8_t *scales = (uint8_t *)fp8_golden_bytes(&st, name, ST_U8, outer * blocks),
                *placed = (uint8_t *)xcalloc((size_t)scale_bytes(BLOCK_1X32, outer, depth), 1);
        strcat(name, ".tiled");
        uint8_t *tiled = (uint8_t *)fp8_golden_bytes(&st, name, ST_U8, scale_bytes(BLOCK_1X32, outer, depth));
        for (int64_t i = 0; i < outer; i++)
            for (int64_t b = 0; b < blocks; b++)
                placed[scale_index(BLOCK_1X32, i, b * 32 + 31, outer, depth)] = scales[i * blocks + b];
        CHECK(memcmp(placed, tiled, (size_t)scale_bytes(BLOCK_1X32, outer, depth)) == 0,
              "%s: scales lie where torchao puts them", name);
        free(scales), free(placed), free(tiled);
    }
    safetensors_close(&st);
}

// Tests the orders of scales that cuBLASLt's manual gives: those of 1x128 blocks lie column by column, those of 128x128
// blocks row by row, with each row padded to a multiple of 4 scales.
static void test_block_orders(void) {
    CHECK(scale_index(BLOCK_1X128, 5, 300, 200, 640) == 2 * 200 + 5 &&
              scale_bytes(BLOCK_1X128, 200, 640) == 4 * 5 * 200,
          "a scale of 1x128 blocks has its place, and all scales of [200, 640] take 4 x 5 x 200 bytes");
    CHECK(scale_index(BLOCK_128X128, 300, 300, 384, 640) == 2 * 8 + 2 &&
              scale_bytes(BLOCK_128X128, 384, 640) == 4 * 3 * 8,
          "a scale of 128x128 blocks has its place, and all scales of [384, 640] take 4 x 3 x 8 bytes");
}

// Each scale block has its own place within scale_bytes(), and all elements of the block share it.
static void test_places(void) {
    enum { ALL = 1 << 20 };
    static const struct {
        ScaleGranularity granularity;
        int64_t height, width;
    } kinds[] = {{PER_TENSOR, ALL, ALL}, {PER_TENSOR_BROADCAST, 1, ALL}, {PER_ROW, 1, ALL},
                 {BLOCK_1X128, 1, 128},  {BLOCK_128X128, 128, 128},      {BLOCK_1X32, 1, 32}};
    static const int64_t sizes[][2] = {{1, 1}, {16, 48}, {128, 128}, {130, 200}, {384, 640}, {257, 1025}};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            const ScaleGranularity g = kinds[k].granularity;
            const int64_t outer = sizes[s][0], depth = sizes[s][1];
            const int64_t places = scale_bytes(g, outer, depth) / (g == BLOCK_1X32 ? 1 : 4);
            int64_t *owner = (int64_t *)xcalloc((size_t)places, sizeof(int64_t)), wrong = 0;
            for (int64_t i = 0; i < outer; i++)
                for (int64_t c = 0; c < depth; c++) {
                    const int64_t place = scale_index(g, i, c, outer, depth),
                                  block =
                                      1 + i / kinds[k].height * ceil_div(depth, kinds[k].width) + c / kinds[k].width;
                    if (place < 0 || place >= places || (owner[place] && owner[place] != block)) {
                        wrong++;
                        continue;
                    }
                    owner[place] = block;
                }
            int64_t used = 0;
            for (int64_t p = 0; p < places; p++) used += owner[p] != 0;
            CHECK(wrong == 0 && used == ceil_div(outer, kinds[k].height) * ceil_div(depth, kinds[k].width),
                  "granularity %d of [%lld, %lld]: each scale block has one place; %lld elements are wrong, %lld "
                  "places are used",
                  (int)g, (long long)outer, (long long)depth, (long long)wrong, (long long)used);
            free(owner);
        }
}

// The table of granularities agrees with the functions that kernels call.
static void test_granularities(void) {
    uint8_t scales[8] = {0, 0, 0x80, 0x3f, 0, 0, 0x80, 0x3f};  // two floats of 1; as E8M0, 2^-127 first
    for (int number = 0; number < NUM_GRANULARITIES; number++) {
        const ScaleGranularity g = (ScaleGranularity)number;
        const GranularityTraits *r = granularity_traits(g);
        CHECK(is_per_tensor(g) == (r->amaxes == AMAX_ONE), "%s: is_per_tensor agrees with the table", r->name);
        CHECK((g == NO_SCALE) == (r->type == SCALE_TYPE_NONE) && (g == NO_SCALE) == !*r->name,
              "granularity %d: exactly NO_SCALE has no type of scales and no name", number);
        CHECK(scale_load(g, scales, 0) == (r->type == SCALE_TYPE_E8M0 ? 0x1p-127f : 1),
              "%s: scale_load reads the table's type of scales", r->name);
        for (int64_t i = 0; r->type != SCALE_TYPE_NONE && i < 300; i++)
            for (int64_t k = 0; k < 300; k++) {
                const int64_t row = r->rows == WHOLE ? 0 : i / r->rows * r->rows;
                const int64_t col = r->cols == WHOLE ? 0 : k / r->cols * r->cols;
                if (scale_index(g, i, k, 300, 300) == scale_index(g, row, col, 300, 300)) continue;
                CHECK(false, "%s: [%lld, %lld] has the scale of its own block", r->name, (long long)i, (long long)k);
                return;
            }
    }
    CHECK(scale_bytes(NO_SCALE, 30, 50) == 0 && scale_bytes(PER_TENSOR, 30, 50) == 4,
          "NO_SCALE takes 0 bytes, and one scale for the tensor takes 4");
    CHECK(scale_bytes(PER_TENSOR_BROADCAST, 30, 50) == 120 && scale_bytes(PER_ROW, 30, 50) == 120,
          "scales of 30 rows take 120 bytes");
    CHECK(scale_bytes(BLOCK_1X32, 129, 129) == 2 * 2 * 512, "scales of 1x32 blocks fill whole tiles of 512 bytes");
}

// ---- Linear layers of torchao.

// Checks a golden [rows, cols] against factor * a b^T, computed in double, with a [rows, depth] and b [cols, depth]. A
// part of the tolerance is proportional to the sum of the terms' magnitudes.
static void check_product(const Safetensors *st, const char *key, const float *a, const float *b, int64_t rows,
                          int64_t cols, int64_t depth, double factor) {
    Matrix golden = golden_matrix(st, key);
    double worst = 0;
    CHECK(golden.R == rows && golden.C == cols, "%s has the expected shape", key);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < depth; k++)
                sum += (double)a[i * depth + k] * b[j * depth + k],
                    size += fabs((double)a[i * depth + k] * b[j * depth + k]);
            // Rounding to bfloat16 (8 significant bits) changes a value by less than 2^-8 of it. Sums in float32 are
            // off by far less than 1e-5 of the sum of magnitudes.
            const double error = fabs(golden.x[i * cols + j] - sum * factor) /
                                 (0x1p-8 * 1.01 * fabs(sum * factor) + 1e-5 * size * factor + 1e-300);
            worst = error > worst ? error : worst;
        }
    CHECK(worst <= 1, "%s: the largest error is %.3f of the allowed one", key, worst);
    free(golden.x);
}

// Returns an operand of a GEMM as values [outer, depth]. A scale_inv of the whole tensor is left out: *factor is
// multiplied by it, and the caller multiplies the GEMM's result by *factor. Checks FP8 codes and scales against
// torchao's.
static float *linear_operand(const Safetensors *st, const Recipe *r, const Matrix *m, TensorRole tensor,
                             TensorUsage kind, double *factor) {
    static const char *const names[NUM_TENSORS] = {"w", "x", "dy"};
    const ScaleGranularity granularity = recipe_granularity(r, tensor, kind);
    const Fp8Format format = tensor == TENSOR_DY ? r->dy_format : FP8_E4M3;
    float *values = (float *)xcalloc((size_t)(m->R * m->C), sizeof(float));
    if (granularity == NO_SCALE) {
        for (int64_t i = 0; i < m->R * m->C; i++)
            values[i] = kind == ROWWISE ? m->x[i] : m->x[i % m->R * m->C + i / m->R];
        return values;
    }
    char key[80];
    format_checked(key, sizeof key, "%s.%s_%s", r->name, names[tensor], kind == ROWWISE ? "row" : "col");
    check_copy(st, key, m, kind, granularity, r->rule, format);
    Copy c = copy_make(m, kind, granularity, r->rule, format, 0);
    dequantize_copy(values, c.codes, c.scales, c.outer, c.depth, granularity, format);
    if (is_per_tensor(granularity)) *factor *= *(float *)c.scales;
    copy_free(&c);
    return values;
}

static void test_golden_linear(void) {
    Safetensors st = fp8_golden_open("dev/reference/goldens/recipe_linear.safetensors");
    Matrix m[NUM_TENSORS] = {golden_matrix(&st, "w"), golden_matrix(&st, "x"), golden_matrix(&st, "dy")};
    static const struct {
        const char *result;
        TensorRole a, b;
        TensorUsage copy_a, copy_b;
    } products[NUM_GEMMS] = {{"y", TENSOR_X, TENSOR_W, ROWWISE, ROWWISE},
                             {"dx", TENSOR_DY, TENSOR_W, ROWWISE, COLUMNWISE},
                             {"dw", TENSOR_DY, TENSOR_X, COLUMNWISE, COLUMNWISE}};
    for (int recipe = 0; recipe < NUM_RECIPES; recipe++)
        for (int g = 0; g < NUM_GEMMS; g++) {
            const Recipe *r = recipe_row(recipe);
            if (r->rule == SCALE_TE || r->rule == SCALE_TE_POW2 || r->bounded) continue;  // torchao has no such layer
            const Matrix *a = &m[products[g].a], *b = &m[products[g].b];
            double factor = 1;
            char key[80];
            float *left = linear_operand(&st, r, a, products[g].a, products[g].copy_a, &factor);
            float *right = linear_operand(&st, r, b, products[g].b, products[g].copy_b, &factor);
            format_checked(key, sizeof key, "%s.%s", r->name, products[g].result);
            const bool a_row = products[g].copy_a == ROWWISE, b_row = products[g].copy_b == ROWWISE;
            check_product(&st, key, left, right, a_row ? a->R : a->C, b_row ? b->R : b->C, a_row ? a->C : a->R, factor);
            free(left), free(right);
        }
    for (int t = 0; t < NUM_TENSORS; t++) free(m[t].x);
    safetensors_close(&st);
}

// ---- Casts of random matrices.

static Matrix random_matrix(uint64_t seed, int64_t R, int64_t C) {
    Matrix m = {(float *)xcalloc((size_t)(R * C), sizeof(float)), R, C};
    for (int64_t i = 0; i < R * C; i++)
        m.x[i] = bf16_round(rng_normal(seed, (uint64_t)i) * expf(2 * rng_normal(seed + 1, (uint64_t)(i / 16))));
    return m;
}

// True if the codes of `col` are those of `row`, transposed.
static bool transposed(const Copy *row, const Copy *col) {
    for (int64_t i = 0; i < row->outer; i++)
        for (int64_t k = 0; k < row->depth; k++)
            if (row->codes[i * row->depth + k] != col->codes[k * row->outer + i]) return false;
    return true;
}

static void test_transposes(void) {
    static const struct {
        ScaleGranularity granularity;
        ScaleRule rule;
        bool same;
    } kinds[] = {{PER_TENSOR, SCALE_TORCHAO, true},
                 {BLOCK_128X128, SCALE_TE_POW2, true},
                 {BLOCK_1X128, SCALE_TE_POW2, false},
                 {PER_ROW, SCALE_TORCHAO_POW2, false},
                 {BLOCK_1X32, SCALE_MX, false}};
    Matrix m = random_matrix(11, 200, 330);
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        Copy row = copy_make(&m, ROWWISE, kinds[k].granularity, kinds[k].rule, FP8_E4M3, 0),
             col = copy_make(&m, COLUMNWISE, kinds[k].granularity, kinds[k].rule, FP8_E4M3, 0);
        CHECK(transposed(&row, &col) == kinds[k].same,
              "granularity %d: columnwise codes are the rowwise ones, transposed, exactly if both have the same scales",
              (int)kinds[k].granularity);
        if (kinds[k].granularity == BLOCK_128X128)
            for (int64_t i = 0; i < 200; i += 128)
                for (int64_t c = 0; c < 330; c += 128) {
                    const int64_t in_row = scale_index(BLOCK_128X128, i, c, 200, 330),
                                  in_col = scale_index(BLOCK_128X128, c, i, 330, 200);
                    const float a = scale_load(BLOCK_128X128, row.scales, in_row),
                                b = scale_load(BLOCK_128X128, col.scales, in_col);
                    CHECK(a == b, "square (%lld, %lld) has the same scale rowwise and columnwise: %g and %g",
                          (long long)i, (long long)c, a, b);
                }
        copy_free(&row), copy_free(&col);
    }
    free(m.x);
}

// A value whose code is a normal number of the format comes back within half a step: at most 2^-4 of the value in E4M3
// (3 bits of mantissa), 2^-3 in E5M2. Below the smallest normal number (times scale_inv 2^-6 in E4M3, 2^-14 in E5M2)
// all steps are equal, and half a step is 2^-10 (E4M3) or 2^-17 (E5M2) times scale_inv.
static void test_error_bounds(void) {
    static const struct {
        ScaleGranularity granularity;
        ScaleRule rule;
    } kinds[] = {{PER_ROW, SCALE_TORCHAO_POW2},
                 {BLOCK_1X128, SCALE_TE_POW2},
                 {BLOCK_128X128, SCALE_TE_POW2},
                 {BLOCK_1X32, SCALE_MX}};
    Matrix m = random_matrix(21, 150, 290);
    float *values = (float *)xcalloc((size_t)(m.R * m.C), sizeof(float));
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
        for (int f = 0; f < 2; f++) {
            const ScaleGranularity g = kinds[k].granularity;
            Copy c = copy_make(&m, COLUMNWISE, g, kinds[k].rule, (Fp8Format)f, 0);
            dequantize_copy(values, c.codes, c.scales, c.outer, c.depth, g, (Fp8Format)f);
            int beyond = 0;
            for (int64_t i = 0; i < c.outer; i++)
                for (int64_t j = 0; j < c.depth; j++) {
                    const double x = m.x[j * m.C + i],
                                 unit = scale_load(g, c.scales, scale_index(g, i, j, c.outer, c.depth));
                    const double relative = (f ? 0x1p-3 : 0x1p-4) * fabs(x), absolute = (f ? 0x1p-17 : 0x1p-10) * unit;
                    beyond += fabs(values[i * c.depth + j] - x) > (relative > absolute ? relative : absolute);
                }
            CHECK(beyond == 0, "granularity %d, %s: no value is off by more than half a step; %d of %lld are", (int)g,
                  fp8_format_name((Fp8Format)f), beyond, (long long)(m.R * m.C));
            copy_free(&c);
        }
    free(values);
    free(m.x);
}

// A scale from earlier amaxes is used unchanged: larger values saturate, and neither NaN nor infinity changes it.
static void test_given_scale(void) {
    Matrix m = random_matrix(31, 7, 40);
    m.x[3] = 1000, m.x[4] = -1000, m.x[5] = INFINITY, m.x[6] = NAN;
    Copy c = copy_make(&m, ROWWISE, PER_TENSOR, SCALE_TE, FP8_E4M3, 2.5f);
    int wrong = 0;
    for (int64_t i = 0; i < m.R * m.C; i++) wrong += c.codes[i] != fp8_from_float(m.x[i] * 2.5f, FP8_E4M3);
    CHECK(wrong == 0 && *(float *)c.scales == 1 / 2.5f, "all codes are cast with the given scale; %d are not", wrong);
    CHECK(c.codes[3] == 0x7e && c.codes[4] == 0xfe && c.codes[5] == 0x7e && c.codes[6] == 0x7f,
          "values beyond the range saturate and NaN stays NaN");
    copy_free(&c);
    free(m.x);
}

// A NaN among the values makes torchao's scale of its row NaN. Transformer Engine's scale of its block ignores it.
static void test_nan_rules(void) {
    Matrix m = random_matrix(41, 4, 128);
    m.x[128 + 7] = NAN;
    Copy kept = copy_make(&m, ROWWISE, PER_ROW, SCALE_TORCHAO_POW2, FP8_E4M3, 0),
         dropped = copy_make(&m, ROWWISE, BLOCK_1X128, SCALE_TE_POW2, FP8_E4M3, 0);
    int nans[2] = {0, 0};
    for (int64_t i = 0; i < 4 * 128; i++)
        nans[0] += fp8_is_nan(kept.codes[i], FP8_E4M3), nans[1] += fp8_is_nan(dropped.codes[i], FP8_E4M3);
    CHECK(nans[0] == 128 && isnan(((float *)kept.scales)[1]),
          "torchao's rule makes all 128 values of the row NaN; found %d", nans[0]);
    CHECK(nans[1] == 1 && fp8_is_nan(dropped.codes[128 + 7], FP8_E4M3) && isfinite(((float *)dropped.scales)[1]),
          "Transformer Engine's rule leaves one NaN; found %d", nans[1]);
    copy_free(&kept), copy_free(&dropped);
    free(m.x);
}

// ---- The table of recipes.

// Granularities of one family can be mixed in one cast, and be operands of one GEMM.
enum { FAMILY_NONE, FAMILY_TENSOR, FAMILY_ROW, FAMILY_1X128, FAMILY_128X128, FAMILY_1X32 };
static const int families[NUM_GRANULARITIES] = {
    [PER_TENSOR] = FAMILY_TENSOR, [PER_TENSOR_BROADCAST] = FAMILY_ROW, [PER_ROW] = FAMILY_ROW,
    [BLOCK_1X128] = FAMILY_1X128, [BLOCK_128X128] = FAMILY_128X128,    [BLOCK_1X32] = FAMILY_1X32};

// True if kernels cast this granularity of tensor t by the recipe's rule (quantize.cuh).
static bool can_cast(const Recipe *r, int t, ScaleGranularity g) {
    switch (families[g]) {
    case FAMILY_TENSOR: return r->rule == SCALE_TORCHAO || r->rule == SCALE_TE;
    case FAMILY_ROW: return r->rule == SCALE_TORCHAO_POW2;
    case FAMILY_1X128: return r->rule == SCALE_TE_POW2;
    case FAMILY_128X128: return r->rule == SCALE_TE_POW2 && t == TENSOR_W;
    case FAMILY_1X32: return r->rule == SCALE_MX;
    default: return true;
    }
}

// True if cuBLASLt multiplies operands of these granularities (CUDA 13 cuBLAS manual, "cublasLtMatmul").
static bool can_multiply(ScaleGranularity a, ScaleGranularity b) {
    const int low = families[a < b ? a : b], high = families[a < b ? b : a];
    return low == high ? low != FAMILY_128X128 : low == FAMILY_1X128 && high == FAMILY_128X128;
}

static void test_table(void) {
    // Granularities of w, x and dy, rowwise and columnwise.
    static const ScaleGranularity expected[NUM_RECIPES][NUM_TENSORS][2] = {
        [RECIPE_TENSORWISE] = {{PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}},
        [RECIPE_DELAYED] = {{PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}},
        [RECIPE_BOUNDED] = {{PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}},
        [RECIPE_ROWWISE] = {{PER_ROW, PER_ROW}, {PER_ROW, PER_ROW}, {PER_ROW, PER_ROW}},
        [RECIPE_ROWWISE_GW_HP] = {{PER_ROW, PER_TENSOR_BROADCAST}, {PER_ROW, NO_SCALE}, {PER_ROW, NO_SCALE}},
        [RECIPE_BLOCKWISE] = {{BLOCK_128X128, BLOCK_128X128}, {BLOCK_1X128, BLOCK_1X128}, {BLOCK_1X128, BLOCK_1X128}},
        [RECIPE_MXFP8] = {{BLOCK_1X32, BLOCK_1X32}, {BLOCK_1X32, BLOCK_1X32}, {BLOCK_1X32, BLOCK_1X32}}};
    static const ScaleRule rules[NUM_RECIPES] = {[RECIPE_DELAYED] = SCALE_TE,
                                                 [RECIPE_ROWWISE] = SCALE_TORCHAO_POW2,
                                                 [RECIPE_ROWWISE_GW_HP] = SCALE_TORCHAO_POW2,
                                                 [RECIPE_BLOCKWISE] = SCALE_TE_POW2,
                                                 [RECIPE_MXFP8] = SCALE_MX};  // the others: SCALE_TORCHAO
    for (int i = 0; i < NUM_RECIPES; i++) {
        const Recipe *r = recipe_row(i);
        int wrong = 0;
        for (int t = 0; t < NUM_TENSORS; t++)
            for (int copy = 0; copy < 2; copy++)
                wrong += recipe_granularity(r, (TensorRole)t, (TensorUsage)copy) != expected[i][t][copy];
        CHECK(wrong == 0 && r->rule == rules[i], "%s: expected rule and granularities; %d others", r->name, wrong);
        for (int t = 0; t < NUM_TENSORS; t++) {
            const ScaleGranularity row = expected[i][t][ROWWISE], col = expected[i][t][COLUMNWISE];
            CHECK(can_cast(r, t, row) && can_cast(r, t, col) &&
                      (families[row] == families[col] || row == NO_SCALE || col == NO_SCALE),
                  "%s: a kernel casts tensor %d by its granularities and scale rule", r->name, t);
        }
        for (int gemm = 0; gemm < NUM_GEMMS; gemm++)
            CHECK(can_multiply(r->granularity[gemm][0], r->granularity[gemm][1]),
                  "%s: cuBLASLt has a GEMM for the two granularities of its %s", r->name,
                  gemm_kind_name((GemmKind)gemm));
        const bool bf16_wgrad = expected[i][TENSOR_X][COLUMNWISE] == NO_SCALE;
        CHECK(recipe_needs_bf16(r, TENSOR_X) == bf16_wgrad && recipe_needs_bf16(r, TENSOR_DY) == bf16_wgrad &&
                  !recipe_needs_bf16(r, TENSOR_W),
              "%s: x and dy are needed in bf16 exactly if wgrad is a bf16 GEMM, and w never", r->name);
        CHECK(recipe_is_fp8(r, GEMM_FPROP) && recipe_is_fp8(r, GEMM_DGRAD) &&
                  recipe_is_fp8(r, GEMM_WGRAD) != bf16_wgrad,
              "%s: fprop and dgrad are FP8 GEMMs, and wgrad if the recipe says so", r->name);
    }
    CHECK(tensor_amaxes(PER_TENSOR, PER_TENSOR, 30, 50) == 1 && tensor_amaxes(PER_ROW, PER_ROW, 30, 50) == 80,
          "a scale per tensor needs 1 amax, a scale per row 30 + 50");
    CHECK(tensor_amaxes(PER_ROW, PER_TENSOR_BROADCAST, 30, 50) == 31 && tensor_amaxes(PER_ROW, NO_SCALE, 30, 50) == 30,
          "30 rows need 30 amaxes; one scale for all columnwise data needs 1 more, and bf16 columnwise data no more");
    CHECK(tensor_amaxes(BLOCK_1X128, BLOCK_1X128, 30, 50) == 0 &&
              tensor_amaxes(BLOCK_128X128, BLOCK_128X128, 30, 50) == 0,
          "scales of 1x128 and 128x128 blocks need no stored amax");
}

int main(void) {
    test_golden_copies("dev/reference/goldens/recipe_torchao.safetensors", 28);
    test_golden_copies("dev/reference/goldens/recipe_te.safetensors", 9);
    test_golden_tensors();
    test_golden_scales();
    test_te_scales();
    test_golden_delayed();
    test_golden_layout();
    test_block_orders();
    test_places();
    test_granularities();
    test_golden_linear();
    test_transposes();
    test_error_bounds();
    test_given_scale();
    test_nan_rules();
    test_table();
    return check_report();
}
