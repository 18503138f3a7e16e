// Checks and times llmc/fp8/audit.cuh, and checks the audits that casts of quantize.cuh make.
// Build and run: make build/bench_audit && build/bench_audit
#include "../../llmc/fp8/audit.cuh"
#include "check_quantized.cuh"

typedef enum { FILL_NORMAL, FILL_OUTLIERS, FILL_INFINITY, FILL_NAN, NUM_FILLS } Fill;
static const char *const fill_names[NUM_FILLS] = {"normal", "outliers", "infinity", "NaN"};

// FILL_OUTLIERS has a huge value, a row and a column of zeros (-0 in the column), a denormal, and values far smaller
// than the rest.
static bf16_bits *make_input(Fill fill, int64_t R, int64_t C) {
    bf16_bits *x = bench_normal(23, R * C, 1);
    if (fill == FILL_OUTLIERS) {
        for (int64_t i = 0; i < R * C; i += 7) x[i] = bf16_from_float(1e-7f * bf16_to_float(x[i]));
        for (int64_t c = 0; c < C; c++) x[R / 3 * C + c] = 0;
        for (int64_t r = 0; r < R; r++) x[r * C + C / 2] = 0x8000;
        x[R * C - 1] = bf16_from_float(3e5f);
        x[R * C - 2] = 0x0003;
    }
    if (fill == FILL_INFINITY) x[R * C / 2] = 0xff80;
    if (fill == FILL_NAN) x[R * C / 2] = 0x7fc0;
    return x;
}

// A source with two outputs, like SwiGLU's gradients of gate and up: columns [0, C) and [C, 2C) of a tensor x [R, 2C].
struct PairSource {
    enum { ROLES = 1 << TENSOR_DY, INPUTS = 2, OUTPUTS = 2, MIN_BLOCKS = 2, GROUPS_AHEAD = 1, AMAX = 0 };
    struct Raw {
        Bf16x8 v[2];
    };
    struct Column {};
    const bf16 *x;
    int64_t C;
    __device__ void load_column(Column *, int64_t) const {}
    __device__ void load(Raw *raw, int64_t row, int64_t column) const {
        for (int o = 0; o < 2; o++) raw->v[o] = bf16x8_load(x + (2 * row + o) * C + column);
    }
    __device__ void values(Bf16x8 v[2], const Raw &raw, const Column &, uint32_t *) const {
        v[0] = raw.v[0], v[1] = raw.v[1];
    }
};

// Signal and noise are sums of doubles that are not negative. GPU and host add them in different orders. No number
// passes through more than 4e6 additions. Each addition rounds by 2^-53 of its result at most, so the GPU's sum and the
// host's are each off by 4.5e-10 of their value at most.
static bool sum_is_close(double got, double want) { return got == want || fabs(got - want) <= 1e-9 * want; }

static void check_sums(const char *label, const AuditSums *got, const AuditSums *want) {
    CHECK(got->count == want->count && got->flushed == want->flushed && got->saturated == want->saturated,
          "%s: got %.0f elements, %.0f flushed, %.0f saturated; want %.0f, %.0f, %.0f", label, got->count, got->flushed,
          got->saturated, want->count, want->flushed, want->saturated);
    CHECK(sum_is_close(got->signal, want->signal) && sum_is_close(got->noise, want->noise),
          "%s: got signal %.17g, noise %.17g; want %.17g, %.17g", label, got->signal, got->noise, want->signal,
          want->noise);
    CHECK(same_or_nan(got->amax, want->amax) && same_or_nan(got->scale_max, want->scale_max) &&
              same_or_nan(got->scale_inv_max, want->scale_inv_max),
          "%s: got amax 0x%08x, scale 0x%08x, inverse 0x%08x; want 0x%08x, 0x%08x, 0x%08x", label, got->amax,
          got->scale_max, got->scale_inv_max, want->amax, want->scale_max, want->scale_inv_max);
}

// ---------------------------------------------------------------------------------------------------------------------
// Audits of FP8 data that the host has made

typedef struct {
    int64_t R, C;
    ScaleGranularity row, col;
    ScaleRule rule;
    Fp8Format format;
    Fill fill;
    float scale;  // 0: scale from the amax
} Case;

typedef struct {
    float *x;
    bf16 *device_x;
    QTensor t;        // device memory
    AuditSums *sums;  // [2] in device memory; t.audit points to them
    AuditSums want[2];
} Audited;

// Casts x to rowwise or columnwise data on the host, uploads codes and scales, and adds the audit sums to *want.
static void make_data(AuditSums *want, uint8_t **codes, void **scales, const Case *c, const float *x,
                      TensorUsage usage) {
    const ScaleGranularity granularity = usage == ROWWISE ? c->row : c->col;
    const UsageShape s = usage_shape(c->R, c->C, usage);
    uint8_t *host = (uint8_t *)xcalloc((size_t)(c->R * c->C), 1);
    void *host_scales = xcalloc((size_t)scale_bytes(granularity, s.outer, s.depth), 1);
    quantize_copy(host, host_scales, x, s, granularity, c->rule, c->format, c->scale);
    audit_copy(want, x, host, host_scales, s, granularity, c->format);
    *codes = (uint8_t *)bench_upload(host, c->R * c->C);
    *scales = bench_upload(host_scales, scale_bytes(granularity, s.outer, s.depth));
    free(host);
    free(host_scales);
}

static Audited audited_create(const Case *c) {
    Audited a = {};
    bf16_bits *bits = make_input(c->fill, c->R, c->C);
    a.x = bf16_to_floats(bits, c->R * c->C);
    a.device_x = (bf16 *)bench_upload(bits, c->R * c->C * 2);
    free(bits);
    make_data(&a.want[ROWWISE], &a.t.rowwise, &a.t.rowwise_scale_inv, c, a.x, ROWWISE);
    make_data(&a.want[COLUMNWISE], &a.t.columnwise, &a.t.columnwise_scale_inv, c, a.x, COLUMNWISE);
    a.t.format = c->format, a.t.rule = c->rule, a.t.row_granularity = c->row, a.t.col_granularity = c->col;
    a.sums = (AuditSums *)bench_zeros(2 * (int64_t)sizeof(AuditSums));
    a.t.audit[ROWWISE] = a.sums, a.t.audit[COLUMNWISE] = a.sums + 1;
    return a;
}

static void audited_free(Audited *a) {
    void *device[] = {a->device_x, a->t.rowwise, a->t.columnwise, a->t.rowwise_scale_inv, a->t.columnwise_scale_inv,
                      a->sums};
    for (void *p : device) bench_free(p);
    free(a->x);
}

static void check_audited(const char *label, Audited *a) {
    AuditSums *got = (AuditSums *)bench_download(a->sums, 2 * (int64_t)sizeof(AuditSums), label);
    for (int usage = 0; usage < 2; usage++) {
        char name[192];
        format_checked(name, sizeof name, "%s, %s data", label, usage ? "columnwise" : "rowwise");
        check_sums(name, &got[usage], &a->want[usage]);
    }
    free(got);
}

static void check_case(Case c) {
    char label[128];
    format_checked(label, sizeof label, "%lld x %lld, granularities %d %d, rule %d, %s, %s", (long long)c.R,
                   (long long)c.C, (int)c.row, (int)c.col, (int)c.rule, c.format == FP8_E4M3 ? "e4m3" : "e5m2",
                   fill_names[c.fill]);
    Audited a = audited_create(&c);
    audit_source(a.t, TensorSource{a.device_x, c.C}, c.R, c.C, 0);
    check_audited(label, &a);
    for (int usage = 0; usage < 2; usage++) {  // a second audit adds to the sums
        const AuditSums once = a.want[usage];
        audit_merge(&a.want[usage], &once);
    }
    if (c.C % 32 == 0) audit_source(a.t, PairSource{a.device_x, c.C / 2}, c.R, c.C / 2, 0);
    else audit_source(a.t, TensorSource{a.device_x, c.C}, c.R, c.C, 0);
    check_audited(label, &a);
    audited_free(&a);
}

// Audits tensors whose rowwise or columnwise data is not cast, or is cast but not audited.
static void check_missing(void) {
    const Case c = {200, 272, PER_TENSOR, PER_TENSOR, SCALE_TORCHAO, FP8_E4M3, FILL_NORMAL, 0};
    for (int without = 0; without < 4; without++) {
        Audited a = audited_create(&c);
        QTensor t = a.t;
        const int usage = without % 2;
        if (without >= 2) t.audit[usage] = NULL;
        else if (usage == ROWWISE) t.rowwise = NULL;
        else t.columnwise = NULL;
        a.want[usage] = AuditSums{};
        audit_source(t, TensorSource{a.device_x, c.C}, c.R, c.C, 0);
        check_audited(without >= 2 ? "only one usage audited" : "only one usage cast", &a);
        audited_free(&a);
    }
}

// Checks that auditing a tensor in parts of uneven length gives the sums of the whole.
static void check_parts(void) {
    const Case c = {320, 528, PER_TENSOR, PER_TENSOR, SCALE_TORCHAO, FP8_E4M3, FILL_OUTLIERS, 0};
    Audited a = audited_create(&c);
    const int64_t ends[] = {0, 16, 16, 4112, 100000, c.R * c.C};
    for (int i = 1; i < 6; i++)
        audit_part(a.sums, a.device_x + ends[i - 1], a.t.rowwise + ends[i - 1], (const float *)a.t.rowwise_scale_inv,
                   ends[i] - ends[i - 1], c.format, 0);
    a.want[COLUMNWISE] = AuditSums{};
    check_audited("parts", &a);
    audited_free(&a);
}

// ---------------------------------------------------------------------------------------------------------------------
// Audits after casts: a cast of quantize.cuh audits the data that it wrote if the QTensor has audit sums

// Returns a tensor with the rowwise and columnwise data of a recipe, not cast yet.
static QTensor recipe_data(const Recipe *r, TensorRole tensor, int64_t R, int64_t C) {
    return qtensor_of(R, C, recipe_granularity(r, tensor, ROWWISE), recipe_granularity(r, tensor, COLUMNWISE), r->rule,
                      tensor == TENSOR_DY ? r->dy_format : FP8_E4M3);
}

static void check_cast(int recipe, TensorRole tensor) {
    const int64_t R = 384, C = 272;
    const Recipe *r = recipe_row(recipe);
    char label[96];
    bf16_bits *bits = make_input(FILL_OUTLIERS, R, C);
    float *x = bf16_to_floats(bits, R * C);
    bf16 *device_x = (bf16 *)bench_upload(bits, R * C * 2);
    AuditSums *sums = (AuditSums *)bench_zeros(2 * (int64_t)sizeof(AuditSums));
    QTensor t = recipe_data(r, tensor, R, C);
    t.audit[ROWWISE] = sums, t.audit[COLUMNWISE] = sums + 1;
    tensor_quantize(t, device_x, R, C, 0);
    AuditSums *got = (AuditSums *)bench_download(sums, 2 * (int64_t)sizeof(AuditSums), r->name);
    for (int usage = 0; usage < 2; usage++) {
        format_checked(label, sizeof label, "cast of %s, tensor %d, %s data", r->name, (int)tensor,
                       usage ? "columnwise" : "rowwise");
        AuditSums want = {};
        const ScaleGranularity granularity = usage ? t.col_granularity : t.row_granularity;
        const UsageShape s = usage_shape(R, C, (TensorUsage)usage);
        if (granularity != NO_SCALE) {
            uint8_t *codes = (uint8_t *)bench_download(usage ? t.columnwise : t.rowwise, R * C, label);
            void *scales = bench_download(usage ? t.columnwise_scale_inv : t.rowwise_scale_inv,
                                          scale_bytes(granularity, s.outer, s.depth), label);
            audit_copy(&want, x, codes, scales, s, granularity, t.format);
            free(codes);
            free(scales);
        }
        check_sums(label, &got[usage], &want);
    }
    qtensor_free(t);
    bench_free(device_x), bench_free(sums);
    free(got), free(bits), free(x);
}

// Audits one slice of each of two layers. A slice holds part of tensor 0, nothing of tensor 1, part of tensor 2, and
// padding at its end.
static void check_slices(void) {
    enum { LAYERS = 2, TENSORS = 3, SIZE = 5120 };
    const int64_t ends[TENSORS] = {1040, 1040, 4992};
    bf16_bits *bits = make_input(FILL_OUTLIERS, 2 * LAYERS, SIZE);
    float *x = bf16_to_floats(bits, 2 * LAYERS * SIZE);
    const float amax[LAYERS * TENSORS] = {3, 1, 5, 2, 1, 4e5f};
    bf16 *device_x = (bf16 *)bench_upload(bits, 2 * LAYERS * SIZE * 2);
    float *inverse = (float *)bench_zeros(4 * LAYERS * TENSORS * (int64_t)sizeof(float));
    AuditSums *sums = (AuditSums *)bench_zeros(2 * LAYERS * TENSORS * (int64_t)sizeof(AuditSums));
    Fp8Slices s = {};
    s.count = LAYERS, s.n = SIZE, s.num_tensors = TENSORS, s.x = device_x, s.x_stride = 2 * SIZE,
    s.slot_stride = TENSORS, s.rule = SCALE_TORCHAO;
    for (int j = 0; j < TENSORS; j++) s.ends[j] = ends[j];
    s.codes = (uint8_t *)bench_alloc(LAYERS * SIZE), s.amax = (uint32_t *)bench_upload(amax, (int64_t)sizeof amax),
    s.scale_inv = inverse;
    quantize_slices(&s, 0);
    audit_slices(&s, sums, 2 * TENSORS, 2, 0);
    AuditSums *got = (AuditSums *)bench_download(sums, 2 * LAYERS * TENSORS * (int64_t)sizeof(AuditSums), "slices");
    uint8_t *codes = (uint8_t *)bench_download(s.codes, LAYERS * SIZE, "slices");
    float *scales = (float *)bench_download(inverse, 4 * LAYERS * TENSORS * (int64_t)sizeof(float), "slices");
    for (int i = 0; i < LAYERS * TENSORS; i++) {
        const int l = i / TENSORS, j = i % TENSORS;
        const int64_t first = j ? ends[j - 1] : 0;
        char label[64];
        AuditSums want = {};
        audit_copy(&want, x + 2 * l * SIZE + first, codes + l * SIZE + first, scales + 4 * i,
                   usage_shape(1, ends[j] - first, ROWWISE), PER_TENSOR, FP8_E4M3);
        format_checked(label, sizeof label, "layer %d, part of tensor %d in the slice", l, j);
        check_sums(label, &got[2 * i], &want);
    }
    void *device[] = {device_x, inverse, sums, s.codes, (void *)s.amax};
    for (void *p : device) bench_free(p);
    free(got), free(codes), free(scales), free(x), free(bits);
}

static void run_checks(void) {
    const int64_t shapes[][2] = {{1, 16}, {17, 144}, {129, 128}, {200, 272}, {1000, 160}, {384, 1056}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int recipe = 0; recipe < NUM_RECIPES; recipe++)
            for (int tensor = 0; tensor < NUM_TENSORS; tensor++)
                for (int f = 0; f < 2 * NUM_FILLS; f++) {
                    const Recipe *r = recipe_row(recipe);
                    ScaleGranularity row = recipe_granularity(r, (TensorRole)tensor, ROWWISE),
                                     col = recipe_granularity(r, (TensorRole)tensor, COLUMNWISE);
                    if (row == NO_SCALE) row = PER_TENSOR_BROADCAST;
                    if (col == NO_SCALE) col = PER_TENSOR_BROADCAST;
                    check_case({shapes[i][0], shapes[i][1], row, col, r->rule, (Fp8Format)(f % 2), (Fill)(f / 2), 0});
                }
    check_case({200, 272, PER_TENSOR, PER_TENSOR, SCALE_TE, FP8_E4M3, FILL_NORMAL,
                1000});  // an outdated scale: many values saturate
    check_case(
        {200, 272, PER_TENSOR, PER_TENSOR, SCALE_TE, FP8_E5M2, FILL_NORMAL, 1e-5f});  // most values are flushed to zero
    check_missing();
    check_parts();
    check_slices();
    for (int recipe = 0; recipe < NUM_RECIPES; recipe++)
        for (int tensor = 0; tensor < NUM_TENSORS; tensor++) check_cast(recipe, (TensorRole)tensor);
}

// Audits 2^31 + 524288 elements: their rowwise data, their columnwise data, and rowwise data by audit_part. The codes
// are equal, so the sums must be.
static void check_large(void) {
    const int64_t R = 524416, C = 4096;
    bf16 *x = bench_random(R * C, 3, 1);
    AuditSums *sums = (AuditSums *)bench_zeros(3 * (int64_t)sizeof(AuditSums));
    QTensor t = recipe_data(recipe_row(RECIPE_TENSORWISE), TENSOR_W, R, C), row = t, col = t;
    tensor_quantize(t, x, R, C, 0);
    row.audit[ROWWISE] = sums, col.audit[COLUMNWISE] = sums + 1;
    audit_source(row, TensorSource{x, C}, R, C, 0);
    audit_source(col, TensorSource{x, C}, R, C, 0);
    audit_part(sums + 2, x, t.rowwise, (const float *)t.rowwise_scale_inv, R * C, t.format, 0);
    AuditSums *got = (AuditSums *)bench_download(sums, 3 * (int64_t)sizeof(AuditSums), "large");
    check_sums("large, rowwise data", &got[0], &got[2]);
    check_sums("large, columnwise data", &got[1], &got[2]);
    CHECK(got[0].count == (double)R * (double)C, "large: all elements are counted; got %.0f", got[0].count);
    qtensor_free(t);
    bench_free(x), bench_free(sums);
    free(got);
}

// ---------------------------------------------------------------------------------------------------------------------

#define AUDIT_REASON "every code is decoded and compared in double precision; audits are meant to be rare"

static void bench_shape(Bench *b, int recipe, TensorRole tensor, int64_t R, int64_t C) {
    char shape[32], name[64];
    format_checked(shape, sizeof shape, "%lld x %lld", (long long)R, (long long)C);
    const Recipe *r = recipe_row(recipe);
    const double n = (double)R * (double)C;
    bf16 *x = bench_random(R * C, 5, 1);
    AuditSums *sums = (AuditSums *)bench_zeros(2 * (int64_t)sizeof(AuditSums));
    QTensor t = recipe_data(r, tensor, R, C);
    tensor_quantize(t, x, R, C, 0);
    const double cast = bench_time_us(b, [&] { quantize_transpose(t, x, R, C, 0); });
    t.audit[ROWWISE] = sums, t.audit[COLUMNWISE] = sums + 1;
    const double audit = bench_time_us(b, [&] { audit_source(t, TensorSource{x, C}, R, C, 0); });
    const bool twice = t.rowwise && t.columnwise && !audit_shares_codes(t.row_granularity, t.col_granularity);
    format_checked(name, sizeof name, "audit, %s (%.1f x the cast)", r->name, audit / cast);
    bench_report(b, name, shape, audit, (twice ? 6 : 3) * n, AUDIT_REASON);
    qtensor_free(t);
    bench_free(x), bench_free(sums);
}

// Times the audit of a rank's slice of a weight.
static void bench_part(Bench *b, int64_t n) {
    char shape[32];
    format_checked(shape, sizeof shape, "%lld", (long long)n);
    bf16 *x = bench_random(n, 5, 1);
    AuditSums *sums = (AuditSums *)bench_zeros((int64_t)sizeof(AuditSums));
    QTensor t = recipe_data(recipe_row(RECIPE_TENSORWISE), TENSOR_W, n / 4096, 4096);
    tensor_quantize(t, x, n / 4096, 4096, 0);
    const double us =
        bench_time_us(b, [&] { audit_part(sums, x, t.rowwise, (const float *)t.rowwise_scale_inv, n, t.format, 0); });
    bench_report(b, "audit of a weight's slice", shape, us, 3.0 * (double)n, AUDIT_REASON);
    qtensor_free(t);
    bench_free(x), bench_free(sums);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) run_checks();
    if (bench_part_wanted(argc, argv, "large")) check_large();
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        for (int recipe = 0; recipe < NUM_RECIPES; recipe++) {
            bench_shape(&b, recipe, TENSOR_X, 8192, 4096);
            bench_shape(&b, recipe, TENSOR_X, 8192, 14336);
        }
        bench_shape(&b, RECIPE_BLOCKWISE, TENSOR_W, 28672, 4096);
        bench_part(&b, 28672 * 1024);
        bench_destroy(&b);
    }
    return check_report();
}
