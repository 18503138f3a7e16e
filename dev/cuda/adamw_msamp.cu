// Checks AdamW with one scale for each tensor (llmc/optimizer/adamw_msamp.cuh, fp16_masters.cuh) byte for byte against
// the CPU's functions, over several steps of 1 to 3 ranks that share this GPU. Sums of squares have a tolerance. Times
// the update. Build and run: make build/bench_adamw_msamp && build/bench_adamw_msamp
#include "../../llmc/optimizer/fp16_masters.cuh"
#include "../../llmc/reference/adamw.h"
#include "adamw_parts.cuh"

enum { STEPS = 5, SKIPPED_STEP = 2, MAX_RANKS = 3 };

typedef struct {
    MsampWeights weights;
    bool fp32_moments, fp32_gradients;
    bool alone;    // FP16 masters without bf16 weights of the layers' matrices (ShardPlan.masters_alone)
    bool nearest;  // FP16 masters are rounded to nearest
} Variant;

// A rank's optimizer on the host, or the whole model's (n: elements of the flat arrays). exp_avg and exp_avg_sq have
// the format of the GPU's arrays: fp32 numbers, or FP8 codes (exp_avg) and FP16 codes (exp_avg_sq).
typedef struct {
    int64_t n, tensors;
    float *weights;     // what the masters stand for, or the bf16 weights if there are no masters
    fp16_bits *master;  // FP16 codes of the masters
    char *exp_avg, *exp_avg_sq;
    float *scales;  // [MSAMP_STATES, tensors]
    float *gradients[STEPS];
} State;

static State state_create(int64_t n, int64_t tensors) {
    State s = {};
    s.n = n, s.tensors = tensors;
    s.weights = (float *)xcalloc((size_t)n, sizeof(float));
    s.master = (fp16_bits *)xcalloc((size_t)n, sizeof(fp16_bits));
    s.exp_avg = (char *)xcalloc((size_t)n, sizeof(float)), s.exp_avg_sq = (char *)xcalloc((size_t)n, sizeof(float));
    s.scales = (float *)xcalloc((size_t)(MSAMP_STATES * tensors), sizeof(float));
    for (int64_t i = 0; i < MSAMP_MASTER * tensors; i++) s.scales[i] = 1;
    for (float *&g : s.gradients) g = (float *)xcalloc((size_t)n, sizeof(float));
    return s;
}

static void state_free(State *s) {
    free(s->weights), free(s->master), free(s->exp_avg), free(s->exp_avg_sq), free(s->scales);
    for (float *g : s->gradients) free(g);
}

// Returns a gradient of a tensor of this kind: common, spread over a factor of 2^79, about half zero, all zero, equal,
// denormal, or huge beside tiny.
static float gradient_of(int64_t kind, uint64_t key, int64_t i) {
    const uint64_t u = rng_u64(key, (uint64_t)(i + (1ll << 40)));
    const float g = rng_normal(key, (uint64_t)i) * 1e-3f;
    switch (kind) {
    case 1: return ldexpf(g, -(int)(u % 80));
    case 2: return u & 1 ? g : 0;
    case 3: return 0;
    case 4: return 0.0371f;
    case 5: return g * 1e-36f;
    case 6: return u & 1 ? g * 1e16f : g * 1e-16f;
    default: return g;
    }
}

static State state_fill(const ParameterTable *t, Variant v) {
    State s = state_create(t->total, t->count);
    for (int64_t k = 0; k < t->count; k++) {
        const Parameter *p = &t->entries[k];
        const float size = k % 5 == 0 ? 30.0f : k % 5 == 1 ? 1e-37f : k % 5 == 2 ? 0 : 0.02f;
        for (int64_t i = p->offset; i < p->offset + parameter_elements(p); i++) {
            s.weights[i] = rng_normal(rng_key(3, 0), (uint64_t)i) * size;
            if (v.weights == MSAMP_WEIGHTS_BF16) s.weights[i] = bf16_round(s.weights[i]);
            for (int step = 0; step < STEPS; step++) {
                const float g = gradient_of(k % 7, rng_key(3, 1 + (uint64_t)step), i);
                s.gradients[step][i] = v.fp32_gradients ? g : bf16_round(g);
            }
        }
    }
    return s;
}

static State state_part(const ParameterTable *t, const ShardPlan *plan, const State *flat, Variant v) {
    State s = state_create(plan->total, flat->tensors);
    copy_part(t, plan, flat->weights, s.weights, 4, 1);
    copy_part(t, plan, flat->master, s.master, 2, 1);
    copy_part(t, plan, flat->exp_avg, s.exp_avg, v.fp32_moments ? 4 : 1, 1);
    copy_part(t, plan, flat->exp_avg_sq, s.exp_avg_sq, v.fp32_moments ? 4 : 2, 1);
    memcpy(s.scales, flat->scales, (size_t)(MSAMP_STATES * flat->tensors) * sizeof(float));
    for (int step = 0; step < STEPS; step++) copy_part(t, plan, flat->gradients[step], s.gradients[step], 4, 1);
    return s;
}

static AdamwStep step_of(Variant v, int step) {
    return adamw_step(step + 1, 1e-3, 0.9, 0.95, 1e-8, 0.1, v.nearest, 42);
}
static MsampStep msamp_of(int step) { return msamp_step(step + 1, 1e-3, 0.9, 0.95, 1e-8, 0.1); }

// Gives tensor k a new scale, encodes its n masters with it (fp16_weights_round), and sets the weights to what the
// codes stand for.
static void encode_on_cpu(State *s, int64_t k, int64_t first, int64_t n, const AdamwStep *rounding) {
    float *scale = &s->scales[MSAMP_MASTER * s->tensors + k], amax = 0;
    for (int64_t i = first; i < first + n; i++) amax = fmaxf(amax, fabsf(s->weights[i]));
    *scale = msamp_scale(amax, *scale == 0 ? 1 : *scale, FP16_MAX);
    fp16_weights_round(s->master + first, s->weights + first, *scale, first, n, rounding);
    fp16_weights_decode(s->weights + first, s->master + first, *scale, n);
}

static void tensor_step_on_cpu(State *s, int64_t k, const Parameter *p, Variant v, int step) {
    const AdamwStep a = step_of(v, step);
    const MsampStep m = msamp_of(step);
    const int64_t first = p->offset, n = parameter_elements(p);
    const float *gradients = s->gradients[step] + first;
    const bool decay = p->flags & PARAM_DECAY;
    float *scale_m = &s->scales[MSAMP_EXP_AVG * s->tensors + k],
          *scale_v = &s->scales[MSAMP_EXP_AVG_SQ * s->tensors + k];
    if (v.fp32_moments) {
        adamw_reference(s->weights + first, (float *)s->exp_avg + first, (float *)s->exp_avg_sq + first, gradients,
                        first, n, decay, 1, false, false, &a);
    } else {
        const MsampArrays moments = {(uint8_t *)s->exp_avg + first, (fp16_bits *)s->exp_avg_sq + first};
        const MsampPair old = {*scale_m, *scale_v};
        const MsampPair amax = adamw_msamp_weights(s->weights + first, moments, old, gradients, first, n, decay, 1,
                                                   v.weights == MSAMP_WEIGHTS_BF16, &m, &a);
        const MsampPair scale = {msamp_scale(amax.exp_avg, 1, FP8_E4M3_MAX), msamp_scale(amax.exp_avg_sq, 1, FP16_MAX)};
        adamw_msamp_moments(moments, old, scale, gradients, n, 1, &m);
        *scale_m = scale.exp_avg, *scale_v = scale.exp_avg_sq;
    }
    if (v.weights == MSAMP_WEIGHTS_FP16) encode_on_cpu(s, k, first, n, &a);
}

// A rank's optimizer on the GPU.
typedef struct {
    ShardPlan plan;
    AdamwArrays a;
    AdamwControl *control;
    uint32_t *amax;   // [layers, AMAX_STRIDE]
    double *squares;  // workspace, and behind it the sum of squares
} Rank;

// Writes a rank's masters as the load of a checkpoint does: as codes if their tensor has a scale, else as fp32 numbers
// in two halves (fp16_masters.cuh).
static void write_masters(const ParameterTable *t, Rank *r, const float *weights) {
    for (int64_t k = 0; k < t->count; k++) {
        const ShardRange part = shard_parameter(t, &r->plan, &t->entries[k]);
        if (part.count) fp16_masters_write(&r->a, k, part.shard, part.count, weights + part.shard, 0);
    }
}

// Uploads a rank's weights and scales. Its moments are zero.
static Rank rank_create(const ParameterTable *t, const ShardPlan *plan, Variant v, const State *s) {
    Rank r = {};
    const int64_t n = plan->total, scales = MSAMP_STATES * t->count;
    r.plan = *plan;
    AdamwArrays *a = &r.a;
    a->weights =
        (bf16 *)(v.alone ? bench_zeros(weights_begin(plan, t->num_layers) * 2) : upload_floats(s->weights, n, false));
    if (v.weights == MSAMP_WEIGHTS_FP32) a->master = (float *)upload_floats(s->weights, n, true);
    if (v.weights == MSAMP_WEIGHTS_FP16) a->scaled.master = (fp16_bits *)bench_zeros(n * 2);
    a->moments = v.fp32_moments ? ADAMW_FP32 : ADAMW_MSAMP;
    a->exp_avg = bench_zeros(n * (v.fp32_moments ? 4 : 1)), a->exp_avg_sq = bench_zeros(n * (v.fp32_moments ? 4 : 2));
    a->scaled.scales = (float *)bench_upload(s->scales, scales * 4);
    a->scaled.new_scales = (float *)bench_alloc(scales * 4), a->scaled.amaxes = (uint32_t *)bench_alloc(scales * 4);
    a->scaled.tensors = t->count;
    r.control = (AdamwControl *)bench_alloc(sizeof *r.control);
    r.amax = (uint32_t *)bench_zeros(t->num_layers * AMAX_STRIDE * 4);
    r.squares = (double *)bench_alloc(adamw_workspace_bytes(t, plan) + (int64_t)sizeof(double));
    if (v.weights == MSAMP_WEIGHTS_FP16) write_masters(t, &r, s->weights);
    return r;
}

static void rank_free(Rank *r) {
    AdamwArrays *a = &r->a;
    void *device[] = {
        a->weights,           a->master,        a->scaled.master, a->exp_avg, a->exp_avg_sq, a->scaled.scales,
        a->scaled.new_scales, a->scaled.amaxes, r->control,       r->amax,    r->squares};
    for (void *p : device) bench_free(p);
}

// Replaces the amaxes of all ranks by their maxima, as an all-reduce does.
static void reduce_amaxes(Rank *ranks, int64_t n) {
    const int64_t count = MSAMP_STATES * ranks[0].a.scaled.tensors;
    uint32_t *all = (uint32_t *)xcalloc((size_t)count, sizeof *all);
    for (int64_t r = 0; r < n; r++) {
        uint32_t *own = (uint32_t *)bench_download(ranks[r].a.scaled.amaxes, count * 4, "amaxes");
        for (int64_t i = 0; i < count; i++) all[i] = all[i] > own[i] ? all[i] : own[i];
        free(own);
    }
    for (int64_t r = 0; r < n; r++)
        CUDA_CHECK(cudaMemcpy(ranks[r].a.scaled.amaxes, all, (size_t)count * 4, cudaMemcpyHostToDevice));
    free(all);
}

static AdamwUpdate update_of(Rank *r, Variant v, int step, bool with_control) {
    const AdamwControl control = {1, 0, step == SKIPPED_STEP, 0, 0};
    CUDA_CHECK(cudaMemcpy(r->control, &control, sizeof control, cudaMemcpyHostToDevice));
    const AdamwUpdate update = {r->a,        step_of(v, step), with_control ? r->control : NULL, r->squares, r->amax,
                                AMAX_STRIDE, msamp_of(step)};
    return update;
}

// Returns where the sum of a rank's squares is: behind the workspace.
static double *squares_sum(const Rank *r, const ParameterTable *t) {
    return r->squares + adamw_workspace_bytes(t, &r->plan) / (int64_t)sizeof(double);
}

// Takes a step on all ranks. Step SKIPPED_STEP is skipped.
static void step_on_gpu(const ParameterTable *t, Rank *ranks, State *parts, int64_t n, Variant v, int step) {
    void *gradients[MAX_RANKS];
    for (int64_t r = 0; r < n; r++) {
        gradients[r] = upload_floats(parts[r].gradients[step], parts[r].n, v.fp32_gradients);
        if (v.fp32_gradients) ranks[r].a.gradients.fp32_data = (const float *)gradients[r];
        else ranks[r].a.gradients.bf16_data = (const bf16 *)gradients[r];
        CUDA_CHECK(cudaMemset(ranks[r].amax, 0, (size_t)t->num_layers * AMAX_STRIDE * 4));
    }
    const bool control = step == SKIPPED_STEP;
    for (int64_t r = 0; r < n; r++) {
        const AdamwUpdate w = update_of(&ranks[r], v, step, control);
        adamw_msamp_amaxes(&w, t, &ranks[r].plan, ROOT, 1, 0, 0);
        adamw_msamp_amaxes(&w, t, &ranks[r].plan, 0, t->num_layers, shard_begin(&ranks[r].plan, 0), 0);
    }
    reduce_amaxes(ranks, n);
    for (int64_t r = 0; r < n; r++) {
        const AdamwUpdate w = update_of(&ranks[r], v, step, control);
        adamw_msamp_store(&w, t, &ranks[r].plan, ROOT, 1, 0, 0);
        adamw_msamp_store(&w, t, &ranks[r].plan, 0, t->num_layers, shard_begin(&ranks[r].plan, 0), 0);
        adamw_updated_squares(squares_sum(&ranks[r], t), &w, t, &ranks[r].plan, 0);
        CUDA_CHECK(cudaDeviceSynchronize());
        bench_free(gradients[r]);
    }
}

// Checks the amaxes of the FP8 weights: those of `weights`, in bf16, or with masters_alone those of the numbers that
// the masters stand for. Also checks the sum of squared gradients.
static void check_found(const char *label, const ParameterTable *t, const Rank *r, const State *want,
                        const bf16_bits *weights, int step) {
    uint32_t *got = (uint32_t *)bench_download(r->amax, t->num_layers * AMAX_STRIDE * 4, label);
    uint32_t *amax = (uint32_t *)xcalloc((size_t)(t->num_layers * AMAX_STRIDE), sizeof *amax);
    double *sum = (double *)bench_download(r->squares, adamw_workspace_bytes(t, &r->plan) + 8, label), squares = 0;
    for (int64_t k = 0, slot = -1, layer = ROOT; k < t->count; k++) {
        const Parameter *p = &t->entries[k];
        const ShardRange part = shard_parameter(t, &r->plan, p);
        if (p->layer != layer) slot = -1, layer = p->layer;
        slot += (p->flags & PARAM_FP8) && !(p->flags & PARAM_JOINED);
        for (int64_t i = part.shard; i < part.shard + part.count; i++) {
            const uint32_t bits =
                r->plan.masters_alone ? float_bits(fabsf(want->weights[i])) : (uint32_t)(weights[i] & 0x7fff) << 16;
            squares += (double)want->gradients[step][i] * (double)want->gradients[step][i];
            if (!(p->flags & PARAM_FP8)) continue;
            uint32_t *at = &amax[layer * AMAX_STRIDE + slot];
            *at = *at > bits ? *at : bits;
        }
    }
    check_bytes(label, got, amax, t->num_layers * AMAX_STRIDE * 4, 4);
    const double found = sum[adamw_workspace_bytes(t, &r->plan) / 8];
    CHECK(fabs(found - squares) <= 1e-5 * squares, "%s: the sum of squares is %g, want %g", label, found, squares);
    free(got), free(amax), free(sum);
}

// Compares the bf16 weights that the rank has with `weights`, which has those of all elements of the rank's shard.
static void check_bf16(const char *label, const ParameterTable *t, const Rank *r, const bf16_bits *weights) {
    const int64_t n = weights_begin(&r->plan, t->num_layers);
    bf16_bits *want = (bf16_bits *)xcalloc((size_t)n, sizeof *want);
    for (int64_t l = ROOT; l < t->num_layers; l++)
        for (int k = 0; k < NUM_SEGMENTS; k++) {
            const ShardSegment g = segment_slice(t, &r->plan, l, k);
            if (weights_have(&r->plan, l, k))
                memcpy(want + weights_place(&r->plan, l, g.shard), weights + g.shard, (size_t)g.slice * sizeof *want);
        }
    check_device(label, "weights", r->a.weights, want, n * 2, 2);
    free(want);
}

// Compares a rank's arrays with those of the CPU after `step`; -1: before the first step.
static void check_rank(const char *label, const ParameterTable *t, const Rank *r, const State *want, Variant v,
                       int step) {
    const int64_t n = want->n, scales = MSAMP_STATES * want->tensors;
    bf16_bits *weights = bf16_from_floats(want->weights, n);
    check_bf16(label, t, r, weights);
    if (v.weights == MSAMP_WEIGHTS_FP32) check_device(label, "fp32 masters", r->a.master, want->weights, n * 4, 4);
    if (v.weights == MSAMP_WEIGHTS_FP16)
        check_device(label, "FP16 masters", r->a.scaled.master, want->master, n * 2, 2);
    check_device(label, "exp_avg", r->a.exp_avg, want->exp_avg, n * (v.fp32_moments ? 4 : 1), 1);
    check_device(label, "exp_avg_sq", r->a.exp_avg_sq, want->exp_avg_sq, n * (v.fp32_moments ? 4 : 2), 2);
    const int64_t first = v.fp32_moments ? MSAMP_MASTER * want->tensors : 0,
                  last = v.weights == MSAMP_WEIGHTS_FP16 ? scales : MSAMP_MASTER * want->tensors;
    float *got = (float *)bench_download(r->a.scaled.scales, scales * 4, label);
    char text[160];
    format_checked(text, sizeof text, "%s: scales", label);
    check_bytes(text, got + first, want->scales + first, (last - first) * 4, 4);
    free(got);
    if (step >= 0) check_found(label, t, r, want, weights, step);
    free(weights);
}

// Compares all ranks with the whole model's state `flat`.
static void check_ranks(const char *label, const ParameterTable *t, const Rank *ranks, int64_t n, const State *flat,
                        Variant v, int step) {
    char text[160];
    for (int64_t r = 0; r < n; r++) {
        State want = state_part(t, &ranks[r].plan, flat, v);
        format_checked(text, sizeof text, "%s, rank %lld, step %d", label, (long long)r, step + 1);
        check_rank(text, t, &ranks[r], &want, v, step);
        state_free(&want);
    }
}

// Gives the masters of all ranks that are in halves (write_masters) their scales and FP16 codes.
static void encode_masters(const ParameterTable *t, Rank *ranks, int64_t n) {
    for (int64_t r = 0; r < n; r++) fp16_masters_amaxes(&ranks[r].a, t, &ranks[r].plan, 0);
    reduce_amaxes(ranks, n);
    for (int64_t r = 0; r < n; r++) fp16_masters_encode(&ranks[r].a, t, &ranks[r].plan, 0);
}

static void check_steps(const char *preset, Variant v, int64_t n) {
    const ModelConfig m = small_model(preset);
    ParameterTable t = parameter_table(&m);
    State flat = state_fill(&t, v), parts[MAX_RANKS];
    Rank ranks[MAX_RANKS];
    char label[128];
    format_checked(label, sizeof label,
                   "%s, MsampWeights %d, fp32 moments %d, fp32 gradients %d, masters alone %d, nearest %d, %lld ranks",
                   preset, v.weights, v.fp32_moments, v.fp32_gradients, v.alone, v.nearest, (long long)n);
    for (int64_t r = 0; r < n; r++) {
        ShardPlan plan = shard_plan(&t, n, r);
        plan.masters_alone = v.alone;
        parts[r] = state_part(&t, &plan, &flat, v);
        ranks[r] = rank_create(&t, &plan, v, &parts[r]);
    }
    if (v.weights == MSAMP_WEIGHTS_FP16) {
        encode_masters(&t, ranks, n);
        for (int64_t k = 0; k < t.count; k++)
            encode_on_cpu(&flat, k, t.entries[k].offset, parameter_elements(&t.entries[k]), NULL);
        check_ranks(label, &t, ranks, n, &flat, v, -1);
    }
    for (int step = 0; step < STEPS; step++) {
        for (int64_t k = 0; step != SKIPPED_STEP && k < t.count; k++)
            tensor_step_on_cpu(&flat, k, &t.entries[k], v, step);
        step_on_gpu(&t, ranks, parts, n, v, step);
        check_ranks(label, &t, ranks, n, &flat, v, step);
    }
    for (int64_t r = 0; r < n; r++) rank_free(&ranks[r]), state_free(&parts[r]);
    state_free(&flat);
    parameter_table_free(&t);
}

// Encodes masters, reads them, and writes and encodes them again. They must get the same codes, because their tensors
// have scales by then. The second moments must be zero at the end: their memory held the upper halves of the masters,
// but only until the first encoding.
static void check_masters_access(void) {
    const ModelConfig m = small_model("qwen3-8b");
    const Variant v = {MSAMP_WEIGHTS_FP16, false, false, false, false};
    ParameterTable t = parameter_table(&m);
    const ShardPlan plan = shard_plan(&t, 1, 0);
    State flat = state_fill(&t, v);
    flat.scales[MSAMP_MASTER * t.count] = 0x1p-3f;  // as from a checkpoint; the amax would give another scale
    Rank r = rank_create(&t, &plan, v, &flat);
    encode_masters(&t, &r, 1);
    float *scales = (float *)bench_download(r.a.scaled.scales, MSAMP_STATES * t.count * 4, "scales");
    CHECK(scales[MSAMP_MASTER * t.count] == 0x1p-3f && scales[MSAMP_MASTER * t.count + 1] > 1,
          "tensor 0 keeps the scale that it had, and tensor 1 gets one from its amax: %g, %g",
          (double)scales[MSAMP_MASTER * t.count], (double)scales[MSAMP_MASTER * t.count + 1]);
    fp16_bits *before = (fp16_bits *)bench_download(r.a.scaled.master, plan.total * 2, "masters");
    for (int64_t k = 0; k < t.count; k++) {
        const int64_t at = t.entries[k].offset, n = parameter_elements(&t.entries[k]);
        fp16_masters_read(&r.a, k, at, n, flat.weights + at, 0);
        CHECK(shard_parameter_at(&t, &plan, at + n - 1) == k, "tensor %lld is found by its last element", (long long)k);
    }
    CUDA_CHECK(cudaMemset(r.a.scaled.master, 0, (size_t)plan.total * 2));
    write_masters(&t, &r, flat.weights);
    encode_masters(&t, &r, 1);
    CUDA_CHECK(cudaMemcpy(flat.master, r.a.exp_avg_sq, (size_t)plan.total * 2, cudaMemcpyDeviceToHost));
    int64_t set = 0;
    for (int64_t i = 0; i < plan.total; i++) set += flat.master[i] != 0;
    CHECK(set == 0, "all second moments are zero after masters are encoded; %lld are not", (long long)set);
    check_device("masters that were read and written", "codes", r.a.scaled.master, before, plan.total * 2, 2);
    free(scales), free(before);
    rank_free(&r), state_free(&flat);
    parameter_table_free(&t);
}

// Compares the GPU's scale rule with the CPU's: random amaxes, and those around 448 and 65504 times powers of two.
static void check_scale_rule(void) {
    enum { N = 1 << 16 };
    AdamwScaled s = {};
    uint32_t *amaxes = (uint32_t *)xcalloc(N * MSAMP_STATES, sizeof *amaxes);
    float *scales = (float *)xcalloc(N * MSAMP_STATES, sizeof *scales);
    for (int64_t i = 0; i < N * MSAMP_STATES; i++) {
        const uint64_t u = rng_u64(rng_key(9, 0), (uint64_t)i);
        const float top = i % MSAMP_STATES == 0 ? FP8_E4M3_MAX : FP16_MAX;
        const uint32_t edge = float_bits(ldexpf(top, (int)(u >> 8 & 255) - 140)) + (uint32_t)(u >> 20 & 7) - 3;
        amaxes[i] = u & 1 ? edge : (uint32_t)(u >> 32) & 0x7fffffff;
        scales[i] = u & 6 ? ldexpf(1, (int)(u >> 3 & 31) - 16) : 0;
    }
    for (int state = 0; state < MSAMP_MASTER; state++)  // a moment always has a scale
        for (int64_t i = 0; i < N; i++) scales[state * N + i] = 1;
    s.tensors = N, s.amaxes = (uint32_t *)bench_upload(amaxes, N * MSAMP_STATES * 4);
    s.scales = (float *)bench_upload(scales, N * MSAMP_STATES * 4);
    s.new_scales = (float *)bench_alloc(N * MSAMP_STATES * 4);
    const MsampTensors all = {0, N};
    msamp_new_scales(&s, all, NULL, false, 0);
    for (int64_t i = 0; i < N; i++)
        for (int state = 0; state < MSAMP_STATES; state++) {
            float *scale = &scales[state * N + i];
            const float amax = float_from_bits(amaxes[i * MSAMP_STATES + state]);
            *scale = msamp_scale(amax, *scale == 0 ? 1 : *scale, state == MSAMP_EXP_AVG ? FP8_E4M3_MAX : FP16_MAX);
        }
    check_device("scale rule", "scales", s.new_scales, scales, N * MSAMP_STATES * 4, 4);
    bench_free(s.amaxes), bench_free(s.scales), bench_free(s.new_scales);
    free(amaxes), free(scales);
}

// Times the update of a real model.
static void bench_model(Bench *b, const char *preset, Variant v, const char *name) {
    ModelConfig m;
    if (!model_config_preset(&m, preset)) die("no preset %s", preset);
    ParameterTable t = parameter_table(&m);
    ShardPlan plan = shard_plan(&t, 1, 0);
    plan.masters_alone = v.alone;
    const int64_t n = t.total, scales = MSAMP_STATES * t.count * 4;
    const bool fp16 = v.weights == MSAMP_WEIGHTS_FP16;
    AdamwArrays a = {};
    uint32_t *amax = (uint32_t *)bench_zeros(m.num_layers * AMAX_STRIDE * 4);
    float *ones = (float *)xcalloc((size_t)scales / 4, sizeof(float));
    for (int64_t i = 0; i < scales / 4; i++) ones[i] = i < MSAMP_MASTER * t.count ? 1 : 0;
    a.weights = (bf16 *)bench_alloc(n * 2), a.scaled.master = fp16 ? (fp16_bits *)bench_alloc(n * 2) : NULL;
    a.moments = v.fp32_moments ? ADAMW_FP32 : ADAMW_MSAMP;
    a.exp_avg = bench_zeros(n * (v.fp32_moments ? 4 : 1)), a.exp_avg_sq = bench_zeros(n * (v.fp32_moments ? 4 : 2));
    a.scaled.tensors = t.count, a.scaled.scales = (float *)bench_upload(ones, scales);
    a.scaled.new_scales = (float *)bench_alloc(scales), a.scaled.amaxes = (uint32_t *)bench_alloc(scales);
    a.gradients.bf16_data = bench_random(n, 5, 1e-3f);
    initialize_parameters(InitialWeights{fp16 ? (bf16 *)a.exp_avg_sq : a.weights, NULL, a.scaled.master}, &t, &plan,
                          0.02f, 1, 0);
    if (fp16) fp16_masters_amaxes(&a, &t, &plan, 0), fp16_masters_encode(&a, &t, &plan, 0);
    const AdamwUpdate w = {a, step_of(v, 2), NULL, NULL, amax, AMAX_STRIDE, msamp_of(2)};
    const double us = bench_time_us(b, [&] {
        for (int64_t l = ROOT; l < 1; l++) {
            const int64_t count = l == ROOT ? 1 : t.num_layers, first = shard_begin(&plan, l);
            adamw_msamp_amaxes(&w, &t, &plan, l, count, first, 0);
            adamw_msamp_store(&w, &t, &plan, l, count, first, 0);
        }
    });
    const double moments = v.fp32_moments ? 8 : 3, first_pass = 2 + moments + (fp16 ? 2 : 0),
                 second_pass = 2 + 2 * moments + (fp16 && !v.alone ? 6 : 4);
    bench_report(b, name, preset, us, (double)n * (first_pass + second_pass),
                 "square roots and divisions for each element");
    void *device[] = {a.weights,           a.scaled.master, a.exp_avg,
                      a.exp_avg_sq,        a.scaled.scales, amax,
                      a.scaled.new_scales, a.scaled.amaxes, (void *)a.gradients.bf16_data};
    for (void *p : device) bench_free(p);
    free(ones);
    parameter_table_free(&t);
}

static const Variant variants[] = {
    {MSAMP_WEIGHTS_BF16, false, false, false, false}, {MSAMP_WEIGHTS_FP32, false, true, false, false},
    {MSAMP_WEIGHTS_FP16, false, false, false, false}, {MSAMP_WEIGHTS_FP16, true, false, false, false},
    {MSAMP_WEIGHTS_BF16, false, true, false, false},  {MSAMP_WEIGHTS_FP32, false, false, false, false},
    {MSAMP_WEIGHTS_FP16, false, true, false, false},  {MSAMP_WEIGHTS_FP16, true, true, false, false},
    {MSAMP_WEIGHTS_FP16, false, false, true, false},  {MSAMP_WEIGHTS_FP16, true, true, true, false},
    {MSAMP_WEIGHTS_FP16, false, false, false, true},  {MSAMP_WEIGHTS_FP16, true, false, false, true},
    {MSAMP_WEIGHTS_FP16, false, true, true, true}};

enum { NUM_VARIANTS = sizeof variants / sizeof *variants };

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        check_scale_rule();
        check_masters_access();
        for (const char *preset : {"llama3.1-8b", "qwen2.5-0.5b", "qwen3-8b"})
            for (int i = 0; i < NUM_VARIANTS; i++) check_steps(preset, variants[i], 1 + i % MAX_RANKS);
        check_steps("llama3.2-1b", variants[2], 3);
        check_steps("llama3.2-1b", variants[8], 2);
        check_steps("llama3.2-1b", variants[10], 3);
    }
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_model(&b, "llama3.1-8b", variants[0], "AdamW, moments msamp");
        bench_model(&b, "llama3.1-8b", variants[2], "AdamW, moments msamp, masters FP16");
        bench_model(&b, "llama3.1-8b", variants[8], "AdamW, moments msamp, masters FP16 alone");
        bench_model(&b, "llama3.1-8b", variants[10], "AdamW, moments msamp, masters FP16 to nearest");
        bench_model(&b, "llama3.2-1b", variants[3], "AdamW, moments fp32, masters FP16");
        bench_destroy(&b);
    }
    return check_report();
}
