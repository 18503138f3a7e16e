// Checks gradients in FP8 (llmc/optimizer/gradient_fp8.cuh) byte for byte against the CPU's functions, over several
// micro-steps, whose sums are rounded stochastically, and over ranks that share this GPU. The search for large
// gradients and AdamW must give the results that they give for the decoded values in fp32; the gradient norm has a
// tolerance. Times the casts, the sums over ranks, the norm and the update. Build and run: make
// build/bench_gradient_fp8 && build/bench_gradient_fp8
#include "../../llmc/optimizer/adamw_msamp.cuh"
#include "../../llmc/reference/adamw.h"
#include "adamw_parts.cuh"

enum { MICRO_STEPS = 3, KINDS = 8, RANDOM_WEIGHTS = 1 << 20 };

// How the gradients of a micro-step join the sums, from element `flat` of the flat array on. The first ones replace
// them.
static GradientSum how_of(int micro, int64_t flat) {
    return GradientSum{micro > 0, micro > 0, gradient_sum_key(42, 3, micro), flat};
}

// The bf16 gradients of one micro-step, and FP8 gradients on the GPU and on the host.
typedef struct {
    ParameterTable t;
    ShardPlan plan;
    GradientFp8Layout layout;
    float *gradients;         // [total] in the flat order, of the current micro-step
    uint8_t *codes;           // [layers, matrices]
    float *scale_inv, *sums;  // [entries]; [total] decoded codes, and the gradients that are not FP8
    GradientFp8 device;       // FP8 gradients on the GPU
    bf16 *others;             // device: [root + layers * vectors] the gradients that are not FP8
} Gradients;

// Returns a model with some matrices that do not fill the last thread block of a cast.
static ModelConfig model_of(int large) {
    ModelConfig m;
    if (!model_config_preset(&m, "qwen2.5-0.5b")) die("no preset");
    m.vocab_size = 320, m.hidden_size = large ? 272 : 48, m.intermediate_size = large ? 1008 : 80, m.num_layers = 3;
    m.num_heads = 4, m.num_kv_heads = 2, m.head_dim = large ? 64 : 16;
    return m;
}

static Gradients gradients_create(const ModelConfig *m) {
    Gradients g = {};
    g.t = parameter_table(m);
    g.plan = shard_plan(&g.t, 1, 0);
    g.layout = gradient_fp8_layout(&g.t, &g.plan, false);
    const int64_t codes = g.layout.layers * g.layout.matrices;
    g.gradients = (float *)xcalloc((size_t)g.t.total, sizeof(float));
    g.sums = (float *)xcalloc((size_t)g.t.total, sizeof(float));
    g.codes = (uint8_t *)xcalloc((size_t)codes, 1);
    g.scale_inv = (float *)xcalloc((size_t)g.t.count, sizeof(float));
    g.device.codes = (uint8_t *)bench_alloc(codes);
    g.device.scale_inv = (float *)bench_zeros(g.t.count * 4), g.device.amaxes = (uint32_t *)bench_zeros(g.t.count * 4);
    return g;
}

static void gradients_free(Gradients *g) {
    void *device[] = {g->device.codes, g->device.scale_inv, g->device.amaxes, g->others};
    for (void *p : device) bench_free(p);
    free(g->gradients), free(g->sums), free(g->codes), free(g->scale_inv);
    parameter_table_free(&g->t);
}

// Returns a gradient of a tensor of this kind: common, spread over a factor of 2^79, about half zero, all zero, equal,
// denormal, huge beside tiny, or with outliers.
static float gradient_of(int64_t kind, uint64_t key, int64_t i) {
    const uint64_t u = rng_u64(key, (uint64_t)(i + (1ll << 40)));
    const float g = rng_normal(key, (uint64_t)i) * 1e-3f;
    switch (kind) {
    case 1: return ldexpf(g, -(int)(u % 80));
    case 2: return u & 1 ? g : 0;
    case 3: return 0;
    case 4: return 0.0371f;
    case 5: return g * 1e-36f;
    case 6: return u & 1 ? g * 1e20f : g * 1e-16f;
    case 7: return u % 100 == 0 ? g * 1e4f : g;
    default: return g;
    }
}

// Fills the gradients of a micro-step. Without `huge`, tensors of kind 6 (huge beside tiny) get common gradients.
static void fill(Gradients *g, int micro, bool huge) {
    for (int64_t k = 0; k < g->t.count; k++) {
        const Parameter *p = &g->t.entries[k];
        const int64_t kind = (k + micro) % KINDS;
        for (int64_t i = p->offset; i < p->offset + parameter_elements(p); i++)
            g->gradients[i] = bf16_round(gradient_of(kind == 6 && !huge ? 0 : kind, rng_key(7, (uint64_t)micro), i));
    }
}

// Replaces the sum of n gradients by the values of its codes. Returns their scale_inv. The sum begins at element `flat`
// of the flat array.
static float store_on_cpu(uint8_t *codes, float *sum, int64_t n, int micro, int64_t flat) {
    const float scale = gradient_fp8_scale(gradient_fp8_amax(sum, n));
    const GradientSum how = how_of(micro, flat);
    gradient_fp8_round(sum, scale, 0, n, &how);
    gradient_fp8_encode(codes, sum, scale, n);
    return 1 / scale;
}

// Joins the gradients of a micro-step to the FP8 sums on the CPU. Gradients that are not FP8 replace theirs.
static void join_on_cpu(Gradients *g, int micro) {
    for (int64_t k = 0; k < g->t.count; k++) {
        const Parameter *p = &g->t.entries[k];
        const int64_t n = parameter_elements(p);
        float *sum = g->sums + p->offset;
        for (int64_t i = 0; i < n; i++)
            sum[i] = g->gradients[p->offset + i] + (micro > 0 && p->flags & PARAM_FP8 ? sum[i] : -0.0f);
        if (!(p->flags & PARAM_FP8)) continue;
        uint8_t *codes =
            g->codes + p->layer * g->layout.matrices + p->offset - layer_offset(&g->t, p->layer) - g->layout.vectors;
        g->scale_inv[k] = store_on_cpu(codes, sum, n, micro, p->offset);
    }
}

// Joins the gradients of a micro-step to the FP8 sums on the GPU, and uploads the gradients that are not FP8.
static void join_on_gpu(Gradients *g, int micro) {
    const GradientFp8Layout *a = &g->layout;
    bf16 *all = (bf16 *)upload_floats(g->gradients, g->t.total, false);
    for (int64_t l = g->t.num_layers - 1; l >= 0; l--) {
        const int64_t matrices = layer_offset(&g->t, l) + a->vectors;
        gradient_fp8_join(g->device, a, l, all + matrices, how_of(micro, matrices), 0);
    }
    if (!g->others) g->others = (bf16 *)bench_alloc((a->root + a->layers * a->vectors) * 2);
    CUDA_CHECK(cudaMemcpy(g->others, all, (size_t)a->root * 2, cudaMemcpyDefault));
    for (int64_t l = 0; l < a->layers; l++)
        CUDA_CHECK(cudaMemcpy(g->others + a->root + l * a->vectors, all + layer_offset(&g->t, l),
                              (size_t)a->vectors * 2, cudaMemcpyDefault));
    bench_free(all);
}

static void check_codes(const char *label, const Gradients *g) {
    char text[200];
    const int64_t n = g->layout.layers * g->layout.matrices;
    uint8_t *got = (uint8_t *)bench_download(g->device.codes, n, label);
    check_bytes(label, got, g->codes, n, g->layout.matrices);
    free(got);
    uint32_t *zeros = (uint32_t *)xcalloc((size_t)g->t.count, sizeof *zeros);
    format_checked(text, sizeof text, "%s: scales", label);
    check_device(text, "scale_inv", g->device.scale_inv, g->scale_inv, g->t.count * 4, 4);
    check_device(text, "amaxes after the cast", g->device.amaxes, zeros, g->t.count * 4, 4);
    free(zeros);
}

static AdamwGradients fp8_gradients(const Gradients *g) {
    return AdamwGradients{g->others, NULL, g->device.codes, g->device.scale_inv, &g->layout};
}

// Checks the norm. If it is not accepted, the search in FP8 gradients must find the gradient that it finds in their
// fp32 values.
static void check_norm(const char *label, const Gradients *g) {
    double *workspace = (double *)bench_alloc(adamw_workspace_bytes(&g->t, &g->plan));
    double *squares = (double *)bench_alloc(sizeof(double));
    AdamwGradients fp32 = {};
    fp32.fp32_data = (const float *)bench_upload(g->sums, g->t.total * 4);
    AdamwControl *control = (AdamwControl *)bench_alloc(sizeof *control), found[2];
    for (int i = 0; i < 2; i++) {
        const AdamwGradients which = i ? fp32 : fp8_gradients(g);
        adamw_squares(squares, which, g->t.total, workspace, 0);
        adamw_norm(control, squares, NULL, 1, 0, 0);
        adamw_locate(control, which, backward_order(&g->t), 0);
        CUDA_CHECK(cudaMemcpy(&found[i], control, sizeof *control, cudaMemcpyDefault));
    }
    const double norm = sqrt(squares_sum(g->sums, g->t.total)), got = (double)found[0].gradient_norm;
    CHECK(adamw_accepts(norm) ? fabs(got - norm) <= 2e-6 * norm : !adamw_accepts(got), "%s: the norm is %g, want %g",
          label, got, norm);
    CHECK(
        found[0].nonfinite == found[1].nonfinite && found[0].largest == found[1].largest &&
            found[0].position == found[1].position && found[0].nonfinite == !adamw_accepts(norm),
        "%s: the search finds in FP8 gradients (nonfinite %u, largest %08x, position %llu) what it finds in their fp32 "
        "values (nonfinite %u, largest %08x, position %llu)",
        label, found[0].nonfinite, found[0].largest, found[0].position, found[1].nonfinite, found[1].largest,
        found[1].position);
    void *device[] = {workspace, squares, control, (void *)fp32.fp32_data};
    for (void *p : device) bench_free(p);
}

// Checks two sums over MICRO_STEPS micro-steps, with gradients of all kinds. Only the second has huge gradients, and
// the last micro-step has some that are not finite.
static void check_casts(int large) {
    const ModelConfig m = model_of(large);
    Gradients g = gradients_create(&m);
    char label[160];
    for (int micro = 0; micro < MICRO_STEPS * 2; micro++) {
        fill(&g, micro, micro >= MICRO_STEPS);
        if (micro == MICRO_STEPS * 2 - 1)
            for (int64_t k = 0; k < g.t.count; k++)
                if (g.t.entries[k].flags & PARAM_FP8 && k % 3 == 0)
                    g.gradients[g.t.entries[k].offset + 5 + k] = k % 2 ? -INFINITY : NAN;
        join_on_cpu(&g, micro % MICRO_STEPS), join_on_gpu(&g, micro % MICRO_STEPS);
        format_checked(label, sizeof label, "hidden size %lld, micro-step %d", (long long)m.hidden_size, micro + 1);
        check_codes(label, &g);
        check_norm(label, &g);
    }
    gradients_free(&g);
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums over ranks, of one layer

enum { RANKS_MOST = 5 };
static const int64_t SHARED_FLAT = 3ll << 33;  // index of the layer's first matrix in the flat array

// The ranks that share the layer: its gradients as the ranks compute them, and what each rank keeps.
typedef struct {
    ParameterTable t;
    int64_t ranks, matrices;  // matrices: elements of the layer, padding included
    GradientFp8Layout whole, kept[RANKS_MOST];
    GradientFp8 sent[RANKS_MOST], sums[RANKS_MOST];  // device; of the layer alone
    bf16 *gradients[RANKS_MOST];                     // device: [matrices] of a rank
    float *computed[RANKS_MOST];                     // [matrices] these gradients
    float *values, *scale_inv;                       // [matrices] of the reference, [entries]
    uint8_t *codes;                                  // [matrices] of the reference
} SharedLayer;

static GradientFp8 layer_alloc(int64_t codes, int64_t entries) {
    return GradientFp8{(uint8_t *)bench_zeros(codes), (float *)bench_zeros(entries * 4),
                       (uint32_t *)bench_zeros(entries * 4)};
}

// shard: the ranks keep slices of the layer, else whole replicas.
static SharedLayer shared_create(const ModelConfig *m, int64_t ranks, bool shard) {
    SharedLayer s = {};
    s.t = parameter_table(m), s.ranks = ranks;
    for (int64_t r = 0; r < ranks; r++) {
        const ShardPlan plan = shard_plan(&s.t, shard ? ranks : 1, shard ? r : 0);
        s.kept[r] = gradient_fp8_layout(&s.t, &plan, false), s.whole = gradient_fp8_layout(&s.t, &plan, true);
        s.sent[r] = layer_alloc(s.whole.matrices, s.whole.entries);
        s.sums[r] = layer_alloc(s.kept[r].matrices, s.whole.entries);
        s.computed[r] = (float *)xcalloc((size_t)s.whole.matrices, sizeof(float));
    }
    s.matrices = s.whole.matrices;
    s.values = (float *)xcalloc((size_t)s.matrices, sizeof(float));
    s.scale_inv = (float *)xcalloc((size_t)s.whole.entries, sizeof(float));
    s.codes = (uint8_t *)xcalloc((size_t)s.matrices, 1);
    return s;
}

static void shared_free(SharedLayer *s) {
    for (int64_t r = 0; r < s->ranks; r++) {
        for (const GradientFp8 &g : {s->sent[r], s->sums[r]})
            bench_free(g.codes), bench_free(g.scale_inv), bench_free(g.amaxes);
        bench_free(s->gradients[r]), free(s->computed[r]);
    }
    free(s->values), free(s->scale_inv), free(s->codes);
    parameter_table_free(&s->t);
}

// Gives each rank gradients of its own.
static void shared_fill(SharedLayer *s, int micro) {
    for (int64_t r = 0; r < s->ranks; r++) {
        for (int k = 0; k < s->whole.count; k++)
            for (int64_t i = s->whole.tensors[k].begin; i < s->whole.tensors[k].end; i++)
                s->computed[r][i] =
                    bf16_round(gradient_of((k + micro) % KINDS, rng_key(9, (uint64_t)(micro * 8 + r)), i));
        if (micro == 2) s->computed[r][40 * r] = r == 1 ? NAN : INFINITY;
        bench_free(s->gradients[r]);
        s->gradients[r] = (bf16 *)upload_floats(s->computed[r], s->matrices, false);
    }
}

// Replaces all ranks' amaxes by their maxima.
static void reduce_amaxes(GradientFp8 *layers, int64_t ranks, int64_t entries) {
    uint32_t *most = (uint32_t *)xcalloc((size_t)entries, sizeof *most);
    for (int64_t r = 0; r < ranks; r++) {
        uint32_t *own = (uint32_t *)bench_download(layers[r].amaxes, entries * 4, "amaxes");
        for (int64_t i = 0; i < entries; i++) most[i] = own[i] > most[i] ? own[i] : most[i];
        free(own);
    }
    for (int64_t r = 0; r < ranks; r++)
        CUDA_CHECK(cudaMemcpy(layers[r].amaxes, most, (size_t)entries * 4, cudaMemcpyDefault));
    free(most);
}

// Casts each rank's `from` to its `to`, as gradients of micro-step `micro`. All ranks use the maxima of their amaxes.
// Rank r's matrices begin at element r * slice of the layer's.
static void cast_all(const SharedLayer *s, GradientFp8 *to, const GradientFp8Layout *layouts,
                     const GradientFp8Source *from, int micro, int64_t slice) {
    for (int64_t r = 0; r < s->ranks; r++) gradient_fp8_amaxes(to[r], &layouts[r], from[r], micro > 0, 0);
    reduce_amaxes(to, s->ranks, s->whole.entries);
    for (int64_t r = 0; r < s->ranks; r++)
        gradient_fp8_cast(to[r], &layouts[r], from[r], how_of(micro, SHARED_FLAT + r * slice), 0);
}

// Returns what rank number `rank` reads when it sums elements begin .. begin + n - 1 of all ranks' codes. own: this
// rank's codes, laid out like the codes that it then writes; element `at` of these is `begin`. The caller frees others.
static GradientFp8Source receive(const SharedLayer *s, const GradientFp8 *from, int64_t rank, const uint8_t *own,
                                 int64_t begin, int64_t n, int64_t at) {
    const int64_t stride = round_up(n, 16) + 16;  // longer than n
    uint8_t *received = (uint8_t *)bench_alloc(stride * s->ranks);
    for (int64_t r = 0; r < s->ranks; r++)
        if (r != rank)
            CUDA_CHECK(
                cudaMemcpy(received + (r - (r > rank)) * stride, from[r].codes + begin, (size_t)n, cudaMemcpyDefault));
    return GradientFp8Source{NULL, own, from[rank].scale_inv, received, stride, at, s->ranks, rank};
}

// The reference: joins the sums of the ranks' computed gradients, sent in FP8, to the sums of earlier micro-steps.
static void shared_reference(SharedLayer *s, int micro) {
    for (int k = 0; k < s->whole.count; k++) {
        const GradientFp8Tensor at = s->whole.tensors[k];
        const int64_t n = at.end - at.begin;
        float *x = (float *)xcalloc((size_t)(s->ranks * n), sizeof *x), *values = s->values + at.begin;
        uint8_t *codes = (uint8_t *)xcalloc((size_t)(s->ranks * n), 1);
        for (int64_t r = 0; r < s->ranks; r++) memcpy(x + r * n, s->computed[r] + at.begin, (size_t)n * sizeof *x);
        const float scale = gradient_fp8_scale(gradient_fp8_amax(x, s->ranks * n));
        gradient_fp8_encode(codes, x, scale, s->ranks * n);
        gradient_fp8_sum(x, codes, s->ranks, n, 1 / scale, n);
        for (int64_t i = 0; i < n; i++) values[i] = micro > 0 ? x[i] + values[i] : x[i];
        s->scale_inv[at.entry] = store_on_cpu(s->codes + at.begin, values, n, micro, SHARED_FLAT + at.begin);
        free(x), free(codes);
    }
}

// Checks the codes and scales of all ranks. shard: a rank has a slice.
static void check_shared(const SharedLayer *s, const char *label, bool shard) {
    for (int64_t r = 0; r < s->ranks; r++) {
        const int64_t n = s->kept[r].matrices;
        uint8_t *got = (uint8_t *)bench_download(s->sums[r].codes, n, label);
        check_bytes(label, got, s->codes + (shard ? r * n : 0), n, n);
        free(got);
        check_device(label, "scale_inv", s->sums[r].scale_inv, s->scale_inv, s->whole.entries * 4, 4);
    }
}

// A shard group of `ranks` ranks reduces gradients in FP8 over micro-steps, as fsdp_reduce_scatter_fp8 does.
static void check_shards(int large, int64_t ranks) {
    const ModelConfig m = model_of(large);
    SharedLayer s = shared_create(&m, ranks, true);
    const int64_t slice = s.kept[0].matrices;
    GradientFp8Layout whole[RANKS_MOST];
    char label[120];
    for (int micro = 0; micro < 3; micro++) {
        GradientFp8Source computed[RANKS_MOST], received[RANKS_MOST];
        shared_fill(&s, micro), shared_reference(&s, micro);
        for (int64_t r = 0; r < ranks; r++) computed[r] = gradient_fp8_of_bf16(s.gradients[r]), whole[r] = s.whole;
        cast_all(&s, s.sent, whole, computed, 0, 0);
        for (int64_t r = 0; r < ranks; r++)
            received[r] = receive(&s, s.sent, r, s.sent[r].codes + r * slice, r * slice, slice, 0);
        cast_all(&s, s.sums, s.kept, received, micro, slice);
        format_checked(label, sizeof label, "shard group of %lld, hidden size %lld, micro-step %d", (long long)ranks,
                       (long long)m.hidden_size, micro + 1);
        check_shared(&s, label, true);
        for (int64_t r = 0; r < ranks; r++) bench_free((void *)received[r].others);
    }
    shared_free(&s);
}

// `ranks` replicas reduce their FP8 gradients, as fsdp_reduce_replica_codes does.
static void check_replicas(int large, int64_t ranks) {
    const ModelConfig m = model_of(large);
    SharedLayer s = shared_create(&m, ranks, false);
    char label[120];
    GradientFp8Source stored[RANKS_MOST] = {}, received[RANKS_MOST] = {};
    GradientFp8Layout parts[RANKS_MOST] = {};
    bf16 *rounded = (bf16 *)bench_zeros(s.matrices * 2);
    shared_fill(&s, 1);
    for (int64_t r = 0; r < ranks; r++) {  // the ranks store their own gradients, with scales of their own
        const GradientFp8Source computed = gradient_fp8_of_bf16(s.gradients[r]);
        stored[r] = gradient_fp8_of_codes(s.sums[r]);
        gradient_fp8_amaxes(s.sums[r], &s.whole, computed, false, 0);
        gradient_fp8_cast(s.sums[r], &s.whole, computed, how_of(0, 0), 0);
        for (int k = 0; k < s.whole.count; k++) {
            const GradientFp8Tensor at = s.whole.tensors[k];
            store_on_cpu(s.codes + at.begin, s.computed[r] + at.begin, at.end - at.begin, 0, 0);
        }
        gradient_fp8_to_bf16(rounded, s.sums[r], &s.whole, 0);
        bf16 *want = (bf16 *)upload_floats(s.computed[r], s.matrices, false);
        uint8_t *bytes = (uint8_t *)bench_download(want, s.matrices * 2, "bf16");
        format_checked(label, sizeof label, "codes of replica %lld as bf16", (long long)r);
        check_device(label, "values", rounded, bytes, s.matrices * 2, 2);
        free(bytes), bench_free(want);
        parts[r] = s.whole;
    }
    shared_reference(&s, 0);
    cast_all(&s, s.sums, parts, stored, 0, 0);
    const int64_t part = round_up(ceil_div(s.matrices, ranks), 16);
    for (int64_t r = 0; r < ranks; r++) {  // each sums its part in place, and then sends it
        const int64_t begin = min_i64(r * part, s.matrices), n = min_i64(begin + part, s.matrices) - begin;
        parts[r] = gradient_fp8_part(&s.whole, begin, begin + n);
        received[r] = receive(&s, s.sums, r, s.sums[r].codes, begin, n, begin);
    }
    cast_all(&s, s.sums, parts, received, 0, 0);
    for (int64_t r = 0; r < ranks; r++) {
        const int64_t begin = min_i64(r * part, s.matrices), n = min_i64(begin + part, s.matrices) - begin;
        for (int64_t to = 0; to < ranks; to++)
            if (to != r)
                CUDA_CHECK(cudaMemcpy(s.sums[to].codes + begin, s.sums[r].codes + begin, (size_t)n, cudaMemcpyDefault));
        bench_free((void *)received[r].others);
    }
    format_checked(label, sizeof label, "%lld replicas, hidden size %lld", (long long)ranks, (long long)m.hidden_size);
    check_shared(&s, label, false);
    bench_free(rounded);
    shared_free(&s);
}

typedef struct {
    const char *name;
    AdamwMoments moments;
    bool fp32_masters, fp16_masters;
} Variant;

// The optimizer's arrays of one run.
typedef struct {
    AdamwArrays a;
    uint32_t *amax;
    void *memory[12];
    int64_t bytes[12];
    int count;
} Optimizer;

static void *keep(Optimizer *o, void *memory, int64_t bytes) {
    o->memory[o->count] = memory, o->bytes[o->count++] = bytes;
    return memory;
}

static Optimizer optimizer_create(const Gradients *g, Variant v) {
    Optimizer o = {};
    AdamwArrays *a = &o.a;
    const int64_t n = g->t.total, scales = MSAMP_STATES * g->t.count, first = adamw_moment_bytes(v.moments);
    float *weights = (float *)xcalloc((size_t)n, sizeof *weights),
          *ones = (float *)xcalloc((size_t)scales, sizeof *ones);
    for (int64_t i = 0; i < n; i++)  // the values repeat: random numbers for all of llama3.2-1b take minutes
        weights[i] = i < RANDOM_WEIGHTS ? rng_normal(rng_key(3, 0), (uint64_t)i) * 0.02f : weights[i - RANDOM_WEIGHTS];
    for (int64_t i = 0; i < scales; i++) ones[i] = 1024;
    a->weights = (bf16 *)keep(&o, upload_floats(weights, n, false), n * 2);
    a->moments = v.moments;
    if (v.fp32_masters) a->master = (float *)keep(&o, upload_floats(weights, n, true), n * 4);
    if (v.fp16_masters) a->scaled.master = (fp16_bits *)keep(&o, bench_zeros(n * 2), n * 2);
    a->exp_avg = keep(&o, bench_zeros(n * first), n * first);
    const int64_t second = adamw_moments_bytes(v.moments) - first;
    a->exp_avg_sq = keep(&o, bench_zeros(n * second), n * second);
    if (adamw_is_coat(v.moments)) {
        const int64_t words = n / COAT_GROUP * 4;
        a->coat.exp_avg_groups = (uint32_t *)keep(&o, bench_zeros(words), words);
        a->coat.exp_avg_sq_groups = (uint32_t *)keep(&o, bench_zeros(words), words);
        a->coat.tables = (CoatTables *)keep(&o, bench_upload(coat_tables(), sizeof(CoatTables)), sizeof(CoatTables));
    }
    if (v.moments == ADAMW_MSAMP || v.fp16_masters) {
        a->scaled.tensors = g->t.count;
        a->scaled.scales = (float *)keep(&o, bench_upload(ones, scales * 4), scales * 4);
        a->scaled.new_scales = (float *)keep(&o, bench_zeros(scales * 4), scales * 4);
        a->scaled.amaxes = (uint32_t *)keep(&o, bench_zeros(scales * 4), scales * 4);
    }
    o.amax = (uint32_t *)keep(&o, bench_zeros(g->t.num_layers * AMAX_STRIDE * 4), g->t.num_layers * AMAX_STRIDE * 4);
    free(weights), free(ones);
    return o;
}

// Updates all units. first_layer: index of the layers' first gradient in its array, fp32_data or bf16_data.
static void update(const Optimizer *o, const Gradients *g, AdamwGradients gradients, int64_t first_layer, int step,
                   const AdamwControl *control) {
    AdamwUpdate w = {o->a,
                     adamw_step(step + 1, 1e-3, 0.9, 0.95, 1e-8, 0.1, false, 42),
                     control,
                     NULL,
                     o->amax,
                     AMAX_STRIDE,
                     msamp_step(step + 1, 1e-3, 0.9, 0.95, 1e-8, 0.1)};
    w.arrays.gradients = gradients;
    CUDA_CHECK(cudaMemset(o->amax, 0, (size_t)g->t.num_layers * AMAX_STRIDE * 4));
    for (int64_t l = ROOT; l < 1; l++) {
        const int64_t count = l == ROOT ? 1 : g->t.num_layers, first = l == ROOT ? 0 : first_layer;
        if (!o->a.scaled.scales) {
            adamw_update_units(&w, &g->t, &g->plan, l, count, first, 0);
        } else {
            adamw_msamp_amaxes(&w, &g->t, &g->plan, l, count, first, 0);
            adamw_msamp_store(&w, &g->t, &g->plan, l, count, first, 0);
        }
    }
}

// Updates one optimizer with FP8 gradients, and another with fp32 gradients of equal values. All their arrays must be
// equal, byte for byte.
static void check_update(int large, Variant v) {
    const ModelConfig m = model_of(large);
    Gradients g = gradients_create(&m);
    Optimizer fp8 = optimizer_create(&g, v), fp32 = optimizer_create(&g, v);
    AdamwControl control = {0.37f, 0, 0, 0, 0};
    for (int step = 0; step < 4; step++) {
        control.nonfinite = step == 2;  // a skipped step
        AdamwControl *on_gpu = (AdamwControl *)bench_upload(&control, sizeof control);
        fill(&g, step, false);
        join_on_cpu(&g, 0), join_on_gpu(&g, 0);
        AdamwGradients values = {};
        values.fp32_data = (const float *)bench_upload(g.sums, g.t.total * 4);
        update(&fp8, &g, fp8_gradients(&g), g.layout.root, step, on_gpu);
        update(&fp32, &g, values, shard_begin(&g.plan, 0), step, on_gpu);
        for (int i = 0; i < fp8.count; i++) {
            char label[160];
            format_checked(label, sizeof label, "%s, hidden size %lld, step %d, array %d", v.name,
                           (long long)m.hidden_size, step + 1, i);
            uint8_t *got = (uint8_t *)bench_download(fp8.memory[i], fp8.bytes[i], label),
                    *want = (uint8_t *)bench_download(fp32.memory[i], fp8.bytes[i], label);
            check_bytes(label, got, want, fp8.bytes[i], 8);
            free(got), free(want);
        }
        bench_free((void *)values.fp32_data), bench_free(on_gpu);
    }
    for (int i = 0; i < fp8.count; i++) bench_free(fp8.memory[i]), bench_free(fp32.memory[i]);
    gradients_free(&g);
}

static const Variant variants[] = {{"bf16", ADAMW_BF16, false, false},
                                   {"bf16, fp32 masters", ADAMW_BF16, true, false},
                                   {"fp32", ADAMW_FP32, false, false},
                                   {"fp32, fp32 masters", ADAMW_FP32, true, false},
                                   {"coat", ADAMW_COAT, false, false},
                                   {"coat-stochastic, fp32 masters", ADAMW_COAT_STOCHASTIC, true, false},
                                   {"msamp", ADAMW_MSAMP, false, false},
                                   {"msamp, fp32 masters", ADAMW_MSAMP, true, false},
                                   {"msamp, FP16 masters", ADAMW_MSAMP, false, true},
                                   {"fp32, FP16 masters", ADAMW_FP32, false, true}};

// Times the casts and the sum over 4 ranks for one layer of llama3.1-8b, and norm and update of llama3.2-1b.
static void bench_all(Bench *b) {
    ModelConfig m;
    if (!model_config_preset(&m, "llama3.1-8b")) die("no preset");
    m.num_layers = 1, m.vocab_size = 128;
    Gradients layer = gradients_create(&m);
    const int64_t n = layer.layout.matrices;
    bf16 *x = bench_random(n, 5, 1e-3f);
    for (int add = 0; add < 2; add++) {
        const double us =
            bench_time_us(b, [&] { gradient_fp8_join(layer.device, &layer.layout, 0, x, how_of(add, 0), 0); });
        bench_report(b, add ? "FP8 gradients, added" : "FP8 gradients, first", "a layer of 8b", us,
                     (double)n * (add ? 7 : 5));
    }
    bench_free(x);
    uint8_t *received = (uint8_t *)bench_alloc(3 * n / 4);  // the codes of a slice from 3 other ranks
    const GradientFp8Layout quarter = gradient_fp8_part(&layer.layout, 0, n / 4);
    const GradientFp8 first = gradient_fp8_of_layer(layer.device, &layer.layout, 0);
    const GradientFp8Source from = {NULL, first.codes, first.scale_inv, received, n / 4, 0, 4, 1};
    const double sum_us = bench_time_us(b, [&] {
        gradient_fp8_amaxes(first, &quarter, from, false, 0);
        gradient_fp8_cast(first, &quarter, from, how_of(0, 0), 0);
    });
    bench_report(b, "FP8 gradients, sum of 4 ranks", "a quarter of a layer of 8b", sum_us, (double)n * 9 / 4);
    bench_free(received);
    gradients_free(&layer);
    if (!model_config_preset(&m, "llama3.2-1b")) die("no preset");
    Gradients g = gradients_create(&m);
    const int64_t in_fp8 = g.layout.layers * g.layout.matrices, others = g.t.total - in_fp8;
    g.others = bench_random(others, 6, 1e-3f);
    CUDA_CHECK(cudaMemset(g.device.codes, 0x30, (size_t)in_fp8));
    double *workspace = (double *)bench_alloc(adamw_workspace_bytes(&g.t, &g.plan));
    const double us =
        bench_time_us(b, [&] { adamw_squares(workspace, fp8_gradients(&g), g.t.total, workspace + 1, 0); });
    bench_report(b, "gradient norm, FP8 gradients", "llama3.2-1b", us, (double)(in_fp8 + 2 * others));
    for (const Variant &v : {variants[0], variants[6]}) {
        Optimizer o = optimizer_create(&g, v);
        const double t = bench_time_us(b, [&] { update(&o, &g, fp8_gradients(&g), g.layout.root, 1, NULL); });
        const double gradients = (double)(in_fp8 + 2 * others), state = v.moments == ADAMW_MSAMP ? 13 : 12;
        char name[64];
        format_checked(name, sizeof name, "AdamW, moments %s, FP8 gradients", v.name);
        bench_report(b, name, "llama3.2-1b", t,
                     gradients * (v.moments == ADAMW_MSAMP ? 2 : 1) + state * (double)g.t.total,
                     v.moments == ADAMW_MSAMP ? "square roots and divisions for each element" : NULL);
        for (int i = 0; i < o.count; i++) bench_free(o.memory[i]);
    }
    bench_free(workspace);
    gradients_free(&g);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check"))
        for (int large = 0; large < 2; large++) {
            check_casts(large);
            for (int64_t ranks = 2; ranks <= RANKS_MOST; ranks++)
                check_shards(large, ranks), check_replicas(large, ranks);
            for (const Variant &v : variants) check_update(large, v);
        }
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_all(&b);
        bench_destroy(&b);
    }
    return check_report();
}
