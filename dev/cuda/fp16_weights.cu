// Checks casts of FP16 master weights to FP8 (llmc/optimizer/fp16_weights.cuh) byte for byte against the CPU's
// functions, for 1, 2, 3 and 8 ranks, one after the other on this GPU. Also checks the audits of these casts. Times the
// casts. Build and run: make build/bench_fp16_weights && build/bench_fp16_weights
#include "../../llmc/optimizer/fp16_weights.cuh"
#include "../../llmc/config/precision.h"
#include "../../llmc/reference/adamw_msamp.h"
#include "../../llmc/reference/quantize_reference.h"
#include "bench.cuh"

// A model's masters and FP8 weights on the host. `codes` has the layout of the flat parameter array.
typedef struct {
    ParameterTable t;
    Fp16Tensors tensors;
    LinearShape linear[NUM_LINEARS];
    fp16_bits *masters;  // [total]
    float *scales;       // [entries of the table]
    uint32_t *amaxes;    // [layers, NUM_LINEARS]
    float *fp8_scales;   // [layers, NUM_LINEARS]
    uint8_t *codes;
} Model;

// Returns a model of these sizes. The casts need a multiple of 4 rows and of 16 columns in each weight.
static ModelConfig odd_model(int64_t C, int64_t F, int64_t HD, int64_t L) {
    ModelConfig m;
    if (!model_config_preset(&m, "qwen2.5-0.5b")) die("no preset qwen2.5-0.5b");
    m.vocab_size = 64, m.hidden_size = C, m.intermediate_size = F, m.num_layers = L, m.num_heads = 4,
    m.num_kv_heads = 1, m.head_dim = HD;
    return m;
}

// Returns a number of a tensor of this kind: common, with outliers, about half zero, all zero, tiny, denormal, or huge.
static float weight_of(int64_t kind, uint64_t key, int64_t i) {
    const uint64_t u = rng_u64(key, (uint64_t)(i + (1ll << 40)));
    const float x = rng_normal(key, (uint64_t)i);
    switch (kind) {
    case 1: return u % 97 == 0 ? x * 1e4f : x * 0.02f;
    case 2: return u & 1 ? x : 0;
    case 3: return 0;
    case 4: return x * 1e-37f;
    case 5: return x * 1e-41f;
    case 6: return x * 1e30f;
    default: return x * 0.02f;
    }
}

// Stores the masters of entry i as FP16, and raises the amax of its fused weight.
static void model_encode(Model *m, int64_t i, int linear, uint64_t seed) {
    const Parameter *p = &m->t.entries[i];
    const int64_t n = parameter_elements(p), kind = rng_u64(rng_key(seed, 1), (uint64_t)i) % 8;
    float *x = (float *)xcalloc((size_t)n, sizeof *x);
    for (int64_t e = 0; e < n; e++) x[e] = weight_of(kind, rng_key(seed, 2 + (uint64_t)i), e);
    m->scales[i] = msamp_scale(float_from_bits(quantize_tensor_amax(x, n, SCALE_TORCHAO)), 1, FP16_MAX);
    fp16_weights_encode(m->masters + p->offset, x, m->scales[i], n);
    fp16_weights_decode(x, m->masters + p->offset, m->scales[i], n);
    uint32_t *amax = &m->amaxes[p->layer * NUM_LINEARS + linear];
    const uint32_t own = quantize_tensor_amax(x, n, SCALE_TORCHAO);
    *amax = own > *amax ? own : *amax;
    free(x);
}

static Model model_create(const ModelConfig *config, uint64_t seed) {
    Model m = {};
    m.t = parameter_table(config);
    m.tensors = fp16_tensors(&m.t);
    linear_shapes(m.linear, config, &m.t);
    const int64_t L = config->num_layers, weights = L * NUM_LINEARS;
    m.masters = (fp16_bits *)xcalloc((size_t)m.t.total, sizeof *m.masters);
    m.codes = (uint8_t *)xcalloc((size_t)m.t.total, 1);
    m.scales = (float *)xcalloc((size_t)m.t.count, sizeof *m.scales);
    m.amaxes = (uint32_t *)xcalloc((size_t)weights, sizeof *m.amaxes);
    m.fp8_scales = (float *)xcalloc((size_t)weights, sizeof *m.fp8_scales);
    for (int64_t l = 0; l < L; l++)
        for (int k = 0; k < m.tensors.count; k++)
            model_encode(&m, m.tensors.entries[k] + l * m.tensors.layer_entries, m.tensors.linears[k], seed);
    for (int64_t i = 0; i < weights; i++) m.fp8_scales[i] = fp16_weights_fp8_scale(float_from_bits(m.amaxes[i]));
    for (int64_t l = 0; l < L; l++)
        for (int k = 0; k < m.tensors.count; k++) {
            const int64_t i = m.tensors.entries[k] + l * m.tensors.layer_entries;
            const Parameter *p = &m.t.entries[i];
            fp16_weights_cast(m.codes + p->offset, m.masters + p->offset, m.scales[i],
                              m.fp8_scales[l * NUM_LINEARS + m.tensors.linears[k]], parameter_elements(p));
        }
    return m;
}

static void model_free(Model *m) {
    free(m->masters), free(m->codes), free(m->scales), free(m->amaxes), free(m->fp8_scales);
    parameter_table_free(&m->t);
}

// A rank's shard of the masters, with the scales of all tensors, on the GPU.
typedef struct {
    ShardPlan plan;
    Fp16Weights w;
    fp16_bits *masters;  // [plan.total]
    float *scales, *scale_inv;
    uint32_t *amax;
    int64_t first, n;  // this rank's slice of a layer's matrices: its first element, and how many it has
} Rank;

static Rank rank_create(const Model *m, int64_t ranks, int64_t rank) {
    Rank r = {};
    const int64_t L = m->t.num_layers;
    r.plan = shard_plan(&m->t, ranks, rank);
    fp16_bits *part = (fp16_bits *)xcalloc((size_t)r.plan.total, sizeof *part);
    for (int64_t i = 0; i < m->t.count; i++) {
        const ShardRange s = shard_parameter(&m->t, &r.plan, &m->t.entries[i]);
        memcpy(part + s.shard, m->masters + m->t.entries[i].offset + s.first, (size_t)s.count * sizeof *part);
    }
    const ShardSegment g = segment_slice(&m->t, &r.plan, 0, SEGMENT_MATRICES);
    r.masters = (fp16_bits *)bench_upload(part, r.plan.total * 2);
    r.scales = (float *)bench_upload(m->scales, m->t.count * 4);
    r.scale_inv = (float *)bench_zeros(L * NUM_LINEARS * 16);
    r.amax = (uint32_t *)bench_zeros(L * NUM_LINEARS * 4);
    r.first = rank * g.slice, r.n = g.slice;
    r.w.tensors = m->tensors, r.w.masters = r.masters + g.shard, r.w.stride = shard_elements(&r.plan, 0);
    r.w.first = r.first, r.w.factors = (Fp16Factors *)bench_zeros(L * FP16_TENSORS * (int64_t)sizeof(Fp16Factors));
    free(part);
    return r;
}

static void rank_free(Rank *r) {
    bench_free(r->masters), bench_free(r->scales), bench_free(r->scale_inv), bench_free(r->amax);
    bench_free(r->w.factors);
}

// Finds the rank's amaxes in a pass over its masters, and raises those in `all`.
static void rank_amaxes(const Model *m, const Rank *r, uint32_t *all) {
    const int64_t n = m->t.num_layers * NUM_LINEARS;
    for (int64_t l = 0; l < m->t.num_layers; l++)
        for (int k = 0; k < m->tensors.count; k++) {
            const int64_t i = m->tensors.entries[k] + l * m->tensors.layer_entries;
            const ShardRange s = shard_parameter(&m->t, &r->plan, &m->t.entries[i]);
            if (s.count)
                fp16_amax(r->amax + l * NUM_LINEARS + m->tensors.linears[k], r->masters + s.shard, s.count,
                          r->scales + i, 0);
        }
    uint32_t *own = (uint32_t *)bench_download(r->amax, n * 4, "amaxes");
    for (int64_t i = 0; i < n; i++) all[i] = own[i] > all[i] ? own[i] : all[i];
    free(own);
}

static void check_bytes_of(const char *label, const char *what, const void *device, const void *want, int64_t bytes,
                           int64_t element) {
    char text[160];
    format_checked(text, sizeof text, "%s: %s", label, what);
    void *got = bench_download(device, bytes, text);
    check_bytes(text, got, want, bytes, element);
    free(got);
}

// Compares the cast of the rank's slices. Padding must be 0.
static void check_slices(const char *label, const Model *m, const Rank *r) {
    const int64_t L = m->t.num_layers, matrices = m->t.layer_segments[SEGMENT_MATRICES];
    uint8_t *want = (uint8_t *)xcalloc((size_t)(L * r->n), 1);
    for (int64_t l = 0; l < L; l++)
        memcpy(want + l * r->n, m->codes + segment_slice(&m->t, &r->plan, l, SEGMENT_MATRICES).flat + r->first,
               (size_t)max_i64(0, min_i64(r->n, matrices - r->first)));
    uint8_t *codes = (uint8_t *)bench_upload(want, L * r->n);
    CUDA_CHECK(cudaMemset(codes, 0x55, (size_t)(L * r->n)));
    fp16_cast_slices(codes, &r->w, L, r->n, 0);
    check_bytes_of(label, "codes of slices", codes, want, L * r->n, 1);
    bench_free(codes);
    free(want);
}

// Compares the cast of one weight. `kinds`: 1 rowwise data, 2 columnwise data, 3 both.
static void check_weight(const char *label, const Model *m, const Rank *r, int64_t l, int id, int kinds) {
    const LinearShape *s = &m->linear[id];
    const int64_t n = s->N * s->K;
    const uint8_t *row = m->codes + segment_slice(&m->t, &r->plan, l, SEGMENT_MATRICES).flat + s->offset;
    uint8_t *col = (uint8_t *)xcalloc((size_t)n, 1);
    for (int64_t i = 0; i < n; i++) col[i % s->K * s->N + i / s->K] = row[i];
    QTensor out = {};
    if (kinds & 1) out.rowwise = (uint8_t *)bench_zeros(n);
    if (kinds & 2) out.columnwise = (uint8_t *)bench_zeros(n);
    fp16_cast(out, &r->w, l, s->offset, s->N, s->K, 0);
    if (out.rowwise) check_bytes_of(label, s->name, out.rowwise, row, n, 1);
    if (out.columnwise) check_bytes_of(label, "transposed", out.columnwise, col, n, 1);
    if (out.rowwise) bench_free(out.rowwise);
    if (out.columnwise) bench_free(out.columnwise);
    free(col);
}

// Compares the audit of a cast with the sums that the CPU adds up.
static void check_audit(const char *label, const Model *m, const Rank *r, int64_t l, int id) {
    const LinearShape *s = &m->linear[id];
    const ShardSegment g = segment_slice(&m->t, &r->plan, l, SEGMENT_MATRICES);
    const ShardRange part = shard_matrix(&m->t, &r->plan, l, s->offset, s->N * s->K);
    AuditSums want = {}, *device = (AuditSums *)bench_zeros(sizeof want);
    for (int k = 0; k < m->tensors.count; k++) {
        const int64_t i = m->tensors.entries[k] + l * m->tensors.layer_entries;
        const Parameter *p = &m->t.entries[i];
        const ShardRange own = shard_parameter(&m->t, &r->plan, p);
        for (int64_t e = p->offset + own.first; m->tensors.linears[k] == id && e < p->offset + own.first + own.count;
             e++)
            audit_add(&want, fp16_to_float(m->masters[e]) * (1 / m->scales[i]), m->codes[e],
                      1 / m->fp8_scales[l * NUM_LINEARS + id], FP8_E4M3);
    }
    uint8_t *codes = (uint8_t *)bench_zeros(m->t.num_layers * r->n);
    fp16_cast_slices(codes, &r->w, m->t.num_layers, r->n, 0);
    fp16_audit(device, &r->w, l, part.shard - g.shard, part.count, codes + l * r->n + part.shard - g.shard,
               r->scale_inv + 4 * (l * NUM_LINEARS + id), 0);
    AuditSums *got = (AuditSums *)bench_download(device, sizeof want, label);
    CHECK(got->count == want.count && got->flushed == want.flushed && got->saturated == want.saturated &&
              got->amax == want.amax && got->scale_max == want.scale_max &&
              fabs(got->signal - want.signal) <= 1e-9 * want.signal &&
              fabs(got->noise - want.noise) <= 1e-9 * want.noise,
          "%s: audit of %s in layer %lld: count, flushed, saturated, signal, noise are %g, %g, %g, %g, %g; want %g, "
          "%g, %g, %g, %g",
          label, s->name, (long long)l, got->count, got->flushed, got->saturated, got->signal, got->noise, want.count,
          want.flushed, want.saturated, want.signal, want.noise);
    free(got), bench_free(codes), bench_free(device);
}

static void check_rank(const char *label, const Model *m, const Rank *r, bool whole) {
    const int64_t L = m->t.num_layers;
    float *want = (float *)xcalloc((size_t)(L * NUM_LINEARS * 4), sizeof *want);
    for (int64_t i = 0; i < L * NUM_LINEARS; i++) want[4 * i] = 1 / m->fp8_scales[i];
    fp16_factors(&r->w, L, r->scales, r->amax, r->scale_inv, NUM_LINEARS, 0);
    check_bytes_of(label, "scale_inv", r->scale_inv, want, L * NUM_LINEARS * 16, 4);
    check_slices(label, m, r);
    for (int64_t i = 0; i < L * NUM_LINEARS; i++) {
        check_audit(label, m, r, i / NUM_LINEARS, (int)(i % NUM_LINEARS));
        for (int kinds = 1; whole && kinds <= 3; kinds++)
            check_weight(label, m, r, i / NUM_LINEARS, (int)(i % NUM_LINEARS), kinds);
    }
    free(want);
}

static void check_model(ModelConfig config, uint64_t seed, int64_t ranks) {
    Model m = model_create(&config, seed);
    Rank r[8];
    const int64_t n = m.t.num_layers * NUM_LINEARS;
    uint32_t *amaxes = (uint32_t *)xcalloc((size_t)n, sizeof *amaxes);
    for (int64_t i = 0; i < ranks; i++) r[i] = rank_create(&m, ranks, i), rank_amaxes(&m, &r[i], amaxes);
    for (int64_t i = 0; i < ranks; i++) {
        char label[96];
        format_checked(label, sizeof label, "C %lld, seed %llu, rank %lld of %lld", (long long)config.hidden_size,
                       (unsigned long long)seed, (long long)i, (long long)ranks);
        check_bytes(label, amaxes, m.amaxes, n * 4, 4);
        CUDA_CHECK(cudaMemcpy(r[i].amax, amaxes, (size_t)n * 4, cudaMemcpyHostToDevice));
        check_rank(label, &m, &r[i], ranks == 1);
        rank_free(&r[i]);
    }
    free(amaxes);
    model_free(&m);
}

// Times casts of the fused gate and up weight of a real model from FP16 masters, and from bf16 for comparison. Then
// times the cast of a slice that holds all matrices of a layer.
static void bench_casts(Bench *b, const char *preset) {
    ModelConfig config;
    if (!model_config_preset(&config, preset)) die("no preset %s", preset);
    config.num_layers = 1;
    Model m = {};
    m.t = parameter_table(&config);
    linear_shapes(m.linear, &config, &m.t);
    const LinearShape *s = &m.linear[GATE_UP_PROJ];
    const int64_t n = s->N * s->K, matrices = m.t.layer_segments[SEGMENT_MATRICES];
    Fp16Weights w = {};
    w.tensors = fp16_tensors(&m.t), w.stride = matrices;
    w.masters = (const fp16_bits *)bench_random(matrices, 1, 1);
    w.factors = (Fp16Factors *)bench_zeros(FP16_TENSORS * (int64_t)sizeof(Fp16Factors));
    QTensor out = recipe_qtensor(recipe_row(RECIPE_TENSORWISE), TENSOR_W, FP8_E4M3);
    uint8_t *row = (uint8_t *)bench_alloc(matrices), *col = (uint8_t *)bench_alloc(n);
    out.rowwise_scale_inv = out.columnwise_scale_inv = bench_zeros(16), out.amax = (uint32_t *)bench_zeros(16);
    for (int kinds = 1; kinds <= 3; kinds++) {
        static const char *const names[] = {"", "rowwise", "columnwise", "both"};
        char name[64];
        out.rowwise = kinds & 1 ? row : NULL, out.columnwise = kinds & 2 ? col : NULL;
        const double bytes = (double)n * (kinds == 3 ? 4 : 3);
        double us = bench_time_us(b, [&] { fp16_cast(out, &w, 0, s->offset, s->N, s->K, 0); });
        format_checked(name, sizeof name, "gate_up from FP16 to FP8, %s", names[kinds]);
        bench_report(b, name, preset, us, bytes, "a block casts one tile; columnwise codes go through shared memory");
        us = bench_time_us(b, [&] { quantize_transpose(out, (const bf16 *)w.masters, s->N, s->K, 0); });
        format_checked(name, sizeof name, "gate_up from bf16 to FP8, %s", names[kinds]);
        bench_report(b, name, preset, us, bytes, "a block casts one tile; columnwise codes go through shared memory");
    }
    const double us = bench_time_us(b, [&] { fp16_cast_slices(row, &w, 1, matrices, 0); });
    bench_report(b, "FP16 slice to FP8", preset, us, (double)matrices * 3);
    bench_free((void *)w.masters), bench_free(w.factors), bench_free(row), bench_free(col);
    bench_free(out.rowwise_scale_inv), bench_free(out.amax);
    parameter_table_free(&m.t);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        for (uint64_t seed = 1; seed <= 6; seed++)
            for (int64_t ranks = 1; ranks <= 8; ranks += ranks > 2 ? 5 : 1) {
                check_model(odd_model(80, 112, 20, 3), seed, ranks);
                check_model(odd_model(272, 400, 36, 2), seed + 100, ranks);
                check_model(odd_model(256, 512, 64, 2), seed + 200, ranks);
            }
    }
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_casts(&b, "llama3.1-8b");
        bench_destroy(&b);
    }
    return check_report();
}
