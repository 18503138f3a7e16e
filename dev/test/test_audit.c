// Tests --fp8-audit. Sums and SQNR of small cases are compared with values computed by hand, and sums of FP8 data of
// every granularity with a plain loop. The lines of log.jsonl and the printed table are tested too.
#include "../../llmc/run/audit_report.h"
#include "../../llmc/reference/quantize_reference.h"
#include "../../llmc/base/rng.h"
#include "lib/check.h"
#include "lib/json_check.h"
#include "lib/scratch.h"

static const AuditSums no_sums;

// ---- Small cases, with values computed by hand

static void test_elements(void) {
    // E4M3 with scale_inv 1/2: values are half of the codes' values. The range ends at 224. The smallest code above 0
    // stands for 2^-10, so magnitudes up to 2^-11 round to 0.
    const float x[] = {0.0f, -0.0f, 1.0f, -1.0625f, 300.0f, 0x1p-13f, -0x1p-11f, 224.0f, INFINITY, NAN};
    uint8_t codes[10];
    const float inverse = 0.5f;
    AuditSums s = no_sums;
    for (int i = 0; i < 10; i++) codes[i] = fp8_from_float(2 * x[i], FP8_E4M3);
    audit_copy(&s, x, codes, &inverse, usage_shape(1, 8, ROWWISE), PER_TENSOR, FP8_E4M3);
    // -1.0625 is halfway between -1 and -1.125 and rounds to the even -1. 300 saturates to 224. 2^-13 rounds to 0.
    // 2^-11 x 2 is 2^-10, halfway between 0 and 2^-9, and rounds to 0.
    CHECK(s.count == 8 && s.flushed == 2 && s.saturated == 1,
          "8 elements, 2 flushed to zero, 1 saturated; found %.0f, %.0f and %.0f", s.count, s.flushed, s.saturated);
    CHECK(s.noise == 0.0625 * 0.0625 + 76.0 * 76 + 0x1p-26 + 0x1p-22, "noise is the sum of squared errors; found %.17g",
          s.noise);
    CHECK(s.signal == 1 + 1.0625 * 1.0625 + 9e4 + 0x1p-26 + 0x1p-22 + 224.0 * 224,
          "signal is the sum of squared values; found %.17g", s.signal);
    CHECK(s.amax == float_bits(300) && audit_scale_min(&s) == 2 && audit_scale_max(&s) == 2,
          "amax is 300, the smallest and the largest scale are 2; found amax 0x%08x, scales %g to %g", s.amax,
          (double)audit_scale_min(&s), (double)audit_scale_max(&s));
    CHECK(audit_sqnr_db(&s) == 10 * log10(s.signal / s.noise), "SQNR follows from signal and noise; found %g dB",
          audit_sqnr_db(&s));
    // An infinity counts as saturated, a NaN does not. Neither adds to signal or noise.
    AuditSums odd = no_sums;
    audit_copy(&odd, x + 8, codes + 8, &inverse, usage_shape(1, 2, ROWWISE), PER_TENSOR, FP8_E4M3);
    CHECK(odd.count == 2 && odd.flushed == 0 && odd.saturated == 1 && odd.signal == 0 && odd.noise == 0,
          "2 elements, 1 saturated, no signal or noise; found %.0f elements, %.0f flushed, %.0f saturated, signal %g, "
          "noise %g",
          odd.count, odd.flushed, odd.saturated, odd.signal, odd.noise);
    CHECK(isnan(float_from_bits(odd.amax)) && isnan(audit_sqnr_db(&odd)),
          "a NaN makes the amax NaN, and without finite values SQNR is NaN; found amax 0x%08x, SQNR %g", odd.amax,
          audit_sqnr_db(&odd));
    AuditSums all = no_sums;
    audit_copy(&all, x, codes, &inverse, usage_shape(1, 10, ROWWISE), PER_TENSOR, FP8_E4M3);
    audit_merge(&s, &odd);
    CHECK(s.count == 10 && s.flushed == all.flushed && s.saturated == all.saturated && s.signal == all.signal &&
              s.noise == all.noise && s.amax == all.amax && s.scale_max == all.scale_max &&
              s.scale_inv_max == all.scale_inv_max,
          "merged sums equal the audit of all ten values");
}

// An amax of at least 1e-12 that was cast with its own scale does not count as saturated, whether that scale was
// rounded up or down. The next larger bf16 number, cast with that scale, does.
static void test_edge(void) {
    int wrong = 0, missed = 0;
    for (int format = 0; format < 2; format++)
        for (int rule = 0; rule < 2; rule++)
            for (uint32_t bits = 0x0080; bits < 0x7f00; bits++) {
                const float amax = bf16_to_float((bf16_bits)bits), next = bf16_to_float((bf16_bits)(bits + 1));
                const float scale = fp8_rule_scale(rule ? SCALE_TE : SCALE_TORCHAO, amax, (Fp8Format)format),
                            inverse = 1 / scale;
                if (amax < 1e-12f) continue;  // torchao raises smaller amaxes to 1e-12
                AuditSums s = no_sums;
                audit_add(&s, amax, fp8_from_float(amax * scale, (Fp8Format)format), inverse, (Fp8Format)format);
                wrong += s.saturated != 0;
                audit_add(&s, next, fp8_from_float(next * scale, (Fp8Format)format), inverse, (Fp8Format)format);
                missed += s.saturated != 1;
            }
    CHECK(wrong == 0 && missed == 0,
          "no amax counts as saturated (%d do), and the next larger bf16 number always does (%d do not)", wrong,
          missed);
}

// Casts all 128 bf16 numbers of [1, 2), at scale 1. E4M3 keeps 3 of their 7 fraction bits. So from each of 8 codes to
// the next there are 16 numbers, with errors of 0, 1, ..., 7, 8 (a tie), 7, ..., 1 in units of 1/128. The errors'
// squares sum to (2 (1 + 4 + ... + 49) + 64) / 128^2 = 344 / 2^14. E5M2 keeps 2 bits: from each of 4 codes to the next
// the sum is (2 (1 + ... + 225) + 256) / 2^14 = 2736 / 2^14. Values and errors from continuous uniform distributions
// would give 10 log10((7/3) / (spacing^2 / 12)), which is 32.53 dB for E4M3 and 26.51 dB for E5M2. The 128 numbers
// come near that.
static void test_uniform(void) {
    const double squares[] = {8 * 344.0 / 16384, 4 * 2736.0 / 16384}, spacing[] = {0.125, 0.25};
    double signal = 0;
    float x[128];
    for (int i = 0; i < 128; i++) x[i] = 1 + (float)i / 128, signal += (double)x[i] * (double)x[i];
    for (int format = 0; format < 2; format++) {
        uint8_t codes[128];
        const float one = 1;
        AuditSums s = no_sums;
        for (int i = 0; i < 128; i++) codes[i] = fp8_from_float(x[i], (Fp8Format)format);
        audit_copy(&s, x, codes, &one, usage_shape(8, 16, ROWWISE), PER_TENSOR, (Fp8Format)format);
        CHECK(s.noise == squares[format] && s.signal == signal,
              "format %d: noise is %.17g, expected %.17g; signal is %.17g, expected %.17g", format, s.noise,
              squares[format], s.signal, signal);
        const double ideal = 10 * log10(7.0 / 3 * 12 / (spacing[format] * spacing[format]));
        CHECK(fabs(audit_sqnr_db(&s) - ideal) < 0.08,
              "format %d: SQNR is %.3f dB; expected %.3f dB (that of uniform errors), within 0.08 dB", format,
              audit_sqnr_db(&s), ideal);
    }
}

static void test_sqnr_limits(void) {
    AuditSums s = no_sums;
    CHECK(isnan(audit_sqnr_db(&s)), "SQNR of no values is NaN; found %g dB", audit_sqnr_db(&s));
    audit_add(&s, 0, 0, 1, FP8_E4M3);
    CHECK(audit_sqnr_db(&s) == (double)INFINITY, "SQNR of a zero is infinite; found %g dB", audit_sqnr_db(&s));
    audit_add(&s, 1.5f, fp8_from_float(1.5f, FP8_E4M3), 1, FP8_E4M3);
    CHECK(audit_sqnr_db(&s) == (double)INFINITY, "SQNR of exact values is infinite; found %g dB", audit_sqnr_db(&s));
    // If scale_inv is infinite or NaN, a finite value comes back as NaN.
    const float spoiled[] = {INFINITY, NAN};
    for (int i = 0; i < 2; i++) {
        AuditSums t = s;
        audit_add(&t, 1, fp8_from_float(1 / spoiled[i], FP8_E4M3), spoiled[i], FP8_E4M3);
        CHECK(audit_sqnr_db(&t) == -(double)INFINITY && t.saturated == 0,
              "scale_inv %g: SQNR is minus infinity, nothing saturated; found %g dB, %.0f saturated",
              (double)spoiled[i], audit_sqnr_db(&t), t.saturated);
    }
}

// ---- FP8 data of every granularity

// Returns the sums of an audit of x's FP8 data, with `saturated` 0. Finds the amax and the scale of each block of
// values that share a scale, and casts the values again.
static AuditSums plain_sums(const float *x, UsageShape shape, ScaleGranularity g, ScaleRule rule, Fp8Format format) {
    AuditSums s = no_sums;
    const int64_t outer = shape.outer, depth = shape.depth, outer_stride = shape.outer_stride,
                  depth_stride = shape.depth_stride;
    const int64_t height = g == BLOCK_128X128 ? 128
                           : is_per_tensor(g) ? outer
                                              : 1,
                  width = g == BLOCK_1X128 || g == BLOCK_128X128 ? 128
                          : g == BLOCK_1X32                      ? 32
                                                                 : depth;
    float scale_max = 0, inverse_max = 0, largest = 0;
    for (int64_t i0 = 0; i0 < outer; i0 += height)
        for (int64_t k0 = 0; k0 < depth; k0 += width) {
            float amax = 0;
            for (int64_t i = i0; i < min_i64(outer, i0 + height); i++)
                for (int64_t k = k0; k < min_i64(depth, k0 + width); k++)
                    amax = fmaxf(amax, fabsf(x[i * outer_stride + k * depth_stride]));
            const float scale = fp8_rule_scale(rule, amax, format), inverse = 1 / scale;
            for (int64_t i = i0; i < min_i64(outer, i0 + height); i++)
                for (int64_t k = k0; k < min_i64(depth, k0 + width); k++) {
                    const float value = x[i * outer_stride + k * depth_stride],
                                back = fp8_to_float(fp8_from_float(value * scale, format), format);
                    const double change = (double)back * (double)inverse - (double)value;
                    s.count++, s.flushed += value != 0 && back == 0, s.signal += (double)value * (double)value,
                        s.noise += change * change;
                }
            scale_max = fmaxf(scale_max, 1 / inverse), inverse_max = fmaxf(inverse_max, inverse),
            largest = fmaxf(largest, amax);
        }
    s.scale_max = float_bits(scale_max), s.scale_inv_max = float_bits(inverse_max), s.amax = float_bits(largest);
    return s;
}

static void check_granularity(int64_t R, int64_t C, TensorUsage copy, ScaleGranularity g, ScaleRule rule,
                              Fp8Format format) {
    const UsageShape shape = usage_shape(R, C, copy);
    float *x = (float *)xcalloc((size_t)(R * C), sizeof(float));
    uint8_t *codes = (uint8_t *)xcalloc((size_t)(R * C), 1);
    void *scales = xcalloc((size_t)scale_bytes(g, shape.outer, shape.depth), 1);
    for (int64_t i = 0; i < R * C; i++)
        x[i] = bf16_round(rng_normal(rng_key(3, 0), (uint64_t)i) * (i % 97 ? 1 : 3000) * (i % 5 ? 1 : 1e-4f));
    quantize_copy(codes, scales, x, shape, g, rule, format, 0);
    AuditSums s = no_sums;
    const AuditSums want = plain_sums(x, shape, g, rule, format);
    audit_copy(&s, x, codes, scales, shape, g, format);
    char what[64];
    format_checked(what, sizeof what, "granularity %d, rule %d, format %d, %s data", (int)g, (int)rule, (int)format,
                   copy == COLUMNWISE ? "columnwise" : "rowwise");
    CHECK(s.count == want.count && s.flushed == want.flushed && s.saturated == 0,
          "%s: found %.0f elements, %.0f flushed, %.0f saturated; expected %.0f, %.0f, 0", what, s.count, s.flushed,
          s.saturated, want.count, want.flushed);
    CHECK(s.flushed > 0 || format == FP8_E5M2, "%s: in E4M3, at least one value is flushed to zero", what);
    // Sums are taken in different orders: at most 52,800 additions, each with a relative error of at most 2^-53.
    CHECK(fabs(s.signal - want.signal) <= 6e-12 * want.signal && fabs(s.noise - want.noise) <= 6e-12 * want.noise,
          "%s: signal is %.17g, noise %.17g; expected %.17g, %.17g", what, s.signal, s.noise, want.signal, want.noise);
    CHECK(s.amax == want.amax && s.scale_max == want.scale_max && s.scale_inv_max == want.scale_inv_max,
          "%s: amax and largest scales are as expected", what);
    free(x);
    free(codes);
    free(scales);
}

static void test_recipe_granularities(void) {
    const struct {
        ScaleGranularity granularity;
        ScaleRule rule;
    } of[] = {{PER_TENSOR, SCALE_TORCHAO},   {PER_TENSOR, SCALE_TE},       {PER_TENSOR_BROADCAST, SCALE_TORCHAO_POW2},
              {PER_ROW, SCALE_TORCHAO_POW2}, {BLOCK_1X128, SCALE_TE_POW2}, {BLOCK_128X128, SCALE_TE_POW2},
              {BLOCK_1X32, SCALE_MX}};
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i++)
        for (int format = 0; format < 2; format++)
            for (int copy = 0; copy < 2; copy++)
                check_granularity(200, 264, (TensorUsage)copy, of[i].granularity, of[i].rule, (Fp8Format)format);
    CHECK(audit_shares_codes(PER_TENSOR, PER_TENSOR) && audit_shares_codes(BLOCK_128X128, BLOCK_128X128),
          "scales of tensors and of 128x128 blocks give equal rowwise and columnwise codes");
    CHECK(!audit_shares_codes(PER_ROW, PER_ROW) && !audit_shares_codes(BLOCK_1X128, BLOCK_1X128) &&
              !audit_shares_codes(NO_SCALE, NO_SCALE) && !audit_shares_codes(PER_ROW, PER_TENSOR_BROADCAST),
          "rowwise and columnwise codes are not equal with scales of rows or of 1x128 blocks, if rows and columns have "
          "different kinds of scales, or for bf16 data");
}

// ---- Reports: lines of log.jsonl, and the printed table

typedef struct {
    Options o;
    ModelConfig m;
    ParameterTable t;
    Precision p;
    AuditSums *sums;
} Run;

static Run run_create(int recipe, const char *filter) {
    Run r;
    memset(&r, 0, sizeof r);
    r.o = options_default();
    r.o.model = "llama3.2-1b", r.o.precision = PRECISION_FP8, r.o.fp8_recipe = recipe, r.o.log_dir = scratch;
    options_resolve(&r.o);
    model_config_preset(&r.m, r.o.model);
    r.t = parameter_table(&r.m);
    r.p = precision_plan(&r.o, filter, &r.m, &r.t, true);
    r.sums = (AuditSums *)xcalloc((size_t)audit_count(&r.p), sizeof *r.sums);
    return r;
}

static void run_free(Run *r) {
    free(r->sums);
    precision_free(&r->p);
    parameter_table_free(&r->t);
}

// Makes sums of 1000 elements with a given SQNR: 10 elements flushed, 5 saturated, scales from 2 to 64.
static AuditSums sums_of(double db, float amax) {
    return (AuditSums){1000, 10, 5, 100, 100 / pow(10, db / 10), float_bits(amax), float_bits(64), float_bits(0.5f)};
}

// Gives w data an SQNR of 32 dB and x and dy data 30 dB, except: layer 7's down x has 20 dB rowwise and 21 dB
// columnwise, and layer 3's qkv dy has 25 dB rowwise.
static void fill_sums(Run *r) {
    for (int64_t i = 0; i < audit_count(&r->p); i++) r->sums[i] = sums_of(i / 2 % NUM_TENSORS == TENSOR_W ? 32 : 30, 1);
    r->sums[audit_index(7, DOWN_PROJ, TENSOR_X, ROWWISE)] = sums_of(20, 12.5f);
    r->sums[audit_index(7, DOWN_PROJ, TENSOR_X, COLUMNWISE)] = sums_of(21, 12.5f);
    r->sums[audit_index(3, QKV_PROJ, TENSOR_DY, ROWWISE)] = sums_of(25, 2);
}

static char *printed_table(const Run *r) {
    const CheckCapture capture = check_capture();
    audit_print_table(r->sums, &r->p);
    return check_captured(capture);
}

static bool text_is(const Json *json, const char *key, const char *want) {
    const JsonNode *node = json_member(json, json_root(json), key);
    return node && node->type == JSON_STRING && strcmp(node->text, want) == 0;
}

// Writes an audit of step 40 to a new log and returns the lines after the settings. The caller frees them.
static char *logged(const Run *r) {
    const char *path = scratch_path("log.jsonl");
    const RunInfo run = {"train_fp8", "CPU", "test", 1, 0, false, 0, NULL};
    Logger l = logger_open(&r->o, &r->m, &r->t, &r->p, run);
    audit_log(&l, 40, r->sums, &r->p);
    logger_close(&l);
    char *text = read_file(path, NULL), *lines = xstrdup(strchr(text, '\n') + 1);
    free(text);
    unlink(path);
    return lines;
}

// Parses the log's line for an operand into *json, which the caller frees. Returns false if there is no such line, and
// at a line that is not JSON.
static bool find_line(Json *json, const char *lines, int64_t layer, const char *linear, const char *gemm,
                      const char *operand) {
    for (const char *line = lines; *line; line = strchr(line, '\n') + 1) {
        Failure failure;
        if (!json_parse(json, "log.jsonl", line, strcspn(line, "\n"), &failure)) {
            CHECK(false, "each line is JSON: %s", failure.text);
            return false;
        }
        if (member(json, "layer") == (double)layer && text_is(json, "linear", linear) && text_is(json, "gemm", gemm) &&
            text_is(json, "operand", operand))
            return true;
        json_free(json);
    }
    return false;
}

static void test_log(void) {
    Json json;
    Run r = run_create(RECIPE_ROWWISE, "");
    fill_sums(&r);
    r.sums[audit_index(2, OUT_PROJ, TENSOR_W, COLUMNWISE)].noise = 0;
    r.sums[audit_index(4, OUT_PROJ, TENSOR_W, COLUMNWISE)].count = 0;  // never cast
    char *lines = logged(&r);
    CHECK(check_count(lines, "\n") == 16 * 4 * 6 - 1,
          "there is a line for each operand that was cast: 383 in all; found %d", check_count(lines, "\n"));
    const char *want =
        "{\"type\": \"fp8_audit\", \"step\": 40, \"layer\": 0, \"linear\": \"qkv\", \"gemm\": \"fprop\", \"operand\": "
        "\"x\", \"amax\": 1.0, "
        "\"scale_min\": 2.0, \"scale_max\": 64.0, \"flushed\": 0.01, \"saturated\": 0.005, \"sqnr_db\": 3e+01}\n";
    CHECK(strncmp(lines, want, strlen(want)) == 0, "the first line is\n%.*s\nexpected\n%s", (int)strcspn(lines, "\n"),
          lines, want);
    if (find_line(&json, lines, 7, "down", "wgrad", "x")) {
        CHECK(fabs(member(&json, "sqnr_db") - 21) < 1e-9 && member(&json, "amax") == 12.5,
              "down wgrad x has the SQNR 21 dB and the amax 12.5; found %g dB and %g", member(&json, "sqnr_db"),
              member(&json, "amax"));
        json_free(&json);
    } else {
        CHECK(false, "there is a line for down wgrad x");
    }
    if (find_line(&json, lines, 2, "attn_out", "dgrad", "w")) {
        CHECK(json_member(&json, json_root(&json), "sqnr_db")->type == JSON_NULL,
              "an infinite SQNR is written as null");
        json_free(&json);
    } else {
        CHECK(false, "there is a line for attn_out dgrad w");
    }
    CHECK(!find_line(&json, lines, 4, "attn_out", "dgrad", "w"), "there is no line for an operand that was never cast");
    free(lines);
    run_free(&r);

    // bf16 operands have no lines: all of layers 0 and 5, all of down, and wgrad, which is in bf16 with this recipe.
    r = run_create(RECIPE_ROWWISE_GW_HP, "first, layers=5, down");
    fill_sums(&r);
    lines = logged(&r);
    CHECK(check_count(lines, "\n") == 14 * 3 * 4, "14 layers, 3 linears and 4 operands each give 168 lines; found %d",
          check_count(lines, "\n"));
    CHECK(!strstr(lines, "wgrad") && !strstr(lines, "down") && !strstr(lines, "\"layer\": 0,") &&
              !strstr(lines, "\"layer\": 5,"),
          "there is no line of a bf16 operand in\n%s", lines);
    free(lines);
    run_free(&r);

    // With tensorwise, both GEMMs that read a tensor read the same codes. Sums of rowwise and columnwise data are
    // merged, also if only rowwise data was audited.
    r = run_create(RECIPE_TENSORWISE, "");
    r.sums[audit_index(1, GATE_UP_PROJ, TENSOR_W, ROWWISE)] = sums_of(30, 1);
    lines = logged(&r);
    CHECK(check_count(lines, "\n") == 2, "a weight whose codes two GEMMs read has two lines; found %d",
          check_count(lines, "\n"));
    for (int gemm = 0; gemm < 2; gemm++) {
        if (find_line(&json, lines, 1, "gate_up", gemm ? "dgrad" : "fprop", "w")) {
            CHECK(fabs(member(&json, "sqnr_db") - 30) < 1e-9, "both lines have 30 dB; found %g dB",
                  member(&json, "sqnr_db"));
            json_free(&json);
        } else {
            CHECK(false, "there is a line for GEMM %d of gate_up w", gemm);
        }
    }
    free(lines);
    run_free(&r);
}

static void check_has(const char *text, const char *part) {
    CHECK(strstr(text, part) != NULL, "there is \"%s\" in\n%s", part, text);
}

static void test_table(void) {
    Run r = run_create(RECIPE_BLOCKWISE, "");
    fill_sums(&r);
    char *text = printed_table(&r);
    CHECK(check_count(text, "\n") == 1 + 2 + 24 + 1, "the table has 28 lines; found %d:\n%s", check_count(text, "\n"),
          text);
    // 15 layers at 30 dB and one at 20 dB have a mean noise of (15 + 10) / 16 times that of 30 dB: 28.06 dB.
    check_has(text,
              "  down      fprop  x   e4m3 1x128      28.06    20.00      7       1.0000%     0.5000%         12.5\n");
    check_has(text,
              "  qkv       dgrad  w   e4m3 128x128    32.00    32.00      0       1.0000%     0.5000%            1\n");
    check_has(text, "  lowest SQNR: layer 7 down x (fprop, 20.00 dB), layer 7 down x (wgrad, 21.00 dB), layer 3 qkv "
                    "dy (dgrad, 25.00 dB)\n");
    free(text);
    // After a second audit, in which layer 0's gate_up dy is worse, sums of both audits are printed.
    AuditSums *second = (AuditSums *)xcalloc((size_t)audit_count(&r.p), sizeof *second);
    memcpy(second, r.sums, (size_t)audit_count(&r.p) * sizeof *second);
    second[audit_index(0, GATE_UP_PROJ, TENSOR_DY, COLUMNWISE)] = sums_of(10, 77);
    audit_merge_all(r.sums, second, audit_count(&r.p));
    text = printed_table(&r);
    check_has(text, "lowest SQNR: layer 0 gate_up dy (wgrad, 12.97 dB), layer 7 down x (fprop, 20.00 dB), layer 7 "
                    "down x (wgrad, 21.00 dB)\n");
    check_has(text, "           77\n");
    free(text);
    free(second);
    run_free(&r);

    r = run_create(RECIPE_TENSORWISE, "first, attention");
    fill_sums(&r);
    r.sums[audit_index(5, GATE_UP_PROJ, TENSOR_DY, ROWWISE)].noise = (double)INFINITY;
    text = printed_table(&r);
    // With tensorwise, both GEMMs that read a tensor read the same codes. Each GEMM has a row. The list of the lowest
    // SQNRs has one entry for both GEMMs, from the merged sums of rowwise and columnwise data: 20 and 21 dB give 20.47.
    check_has(text, "lowest SQNR: layer 5 gate_up dy (both passes, -inf dB), layer 7 down x (both passes, 20.47 "
                    "dB), layer 1 gate_up x (both passes, 30.00 dB)\n");
    // SQNR over all layers, SQNR of the worst layer, and that layer:
    check_has(text, "  gate_up   wgrad  dy  e5m2 tensor      -inf     -inf      5");
    CHECK(!strstr(text, "qkv") && check_count(text, "\n") == 1 + 2 + 12 + 1,
          "the table has no qkv, and 16 lines; found %d:\n%s", check_count(text, "\n"), text);
    free(text);
    memset(r.sums, 0, (size_t)audit_count(&r.p) * sizeof *r.sums);
    text = printed_table(&r);
    check_has(text, "no FP8 operand was cast");
    free(text);
    run_free(&r);
}

int main(void) {
    test_elements();
    test_edge();
    test_uniform();
    test_sqnr_limits();
    test_recipe_granularities();
    scratch_create();
    test_log();
    test_table();
    scratch_remove();
    return check_report();
}
