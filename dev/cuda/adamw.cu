// Checks llmc/optimizer/adamw.cuh and llmc/kernels/initialize.cuh against the CPU's functions: sums of squares within a
// tolerance, weights and moments bit for bit. Times the gradient norm and AdamW's update.
// Build and run: make build/bench_adamw && build/bench_adamw
#include "../../llmc/optimizer/adamw.cuh"
#include "../../llmc/kernels/initialize.cuh"
#include "../../llmc/reference/adamw.h"
#include "../../llmc/reference/quantize_reference.h"
#include "../../llmc/reference/rounding.h"
#include "bench.cuh"

// Returns a small model with the same kinds of parameters as the preset. Hidden size 40 leaves padding behind some
// tensors.
static ModelConfig small_model(const char *preset) {
    ModelConfig m;
    if (!model_config_preset(&m, preset)) die("no preset %s", preset);
    m.vocab_size = 320, m.hidden_size = 40, m.intermediate_size = 72, m.num_layers = 3, m.num_heads = 4,
    m.num_kv_heads = 2, m.head_dim = 16;
    return m;
}

// The optimizer's arrays on the host: floats, rounded to bf16 where the GPU has no fp32 array. With fp32 master
// weights, `weights` are those.
typedef struct {
    int64_t n;
    float *weights, *exp_avg, *exp_avg_sq, *gradients;
} State;

// Returns a factor, a power of two from 2^-low to 1. It makes values very small, so that denormals occur too.
static float spread(uint64_t key, int64_t i, int low) {
    return ldexpf(1, -(int)(rng_u64(key, (uint64_t)i) % (uint64_t)(low + 1)));
}

// A thread of the kernel takes its branch-free path only if all of its 8 elements are common (adamw_is_common). So only
// every fourth stretch of 64 elements has rare ones.
static State make_state(const ParameterTable *t, uint64_t seed, bool fp32_weights, bool fp32_moments) {
    State s;
    s.n = t->total;
    float **arrays[] = {&s.weights, &s.exp_avg, &s.exp_avg_sq, &s.gradients};
    for (float **a : arrays) *a = (float *)xcalloc((size_t)s.n, sizeof(float));
    for (int64_t k = 0; k < t->count; k++) {
        const Parameter *p = &t->entries[k];
        for (int64_t j = 0; j < parameter_elements(p); j++) {
            const int64_t i = p->offset + j;
            const bool rare = i / 64 % 4 == 3;
            const uint64_t key = rng_key(seed, 1), u = (uint64_t)i;
            s.weights[i] = rng_normal(key, 4 * u) * 0.02f * (rare ? spread(key, i, 60) : 1);
            s.gradients[i] = rng_normal(key, 4 * u + 1) * 1e-3f * (rare ? spread(key, i + 1, 120) : 1);
            s.exp_avg[i] = rng_normal(key, 4 * u + 2) * 1e-3f * (rare ? spread(key, i + 2, 130) : 1);
            s.exp_avg_sq[i] = rng_uniform(key, 4 * u + 3) * 1e-6f * (rare ? spread(key, i + 3, 130) : 1);
            if (rare && i % 5 == 0) s.gradients[i] = s.exp_avg[i] = s.exp_avg_sq[i] = 0;
            if (rare && i % 11 == 0) s.weights[i] = 0;
            if (rare && i % 7 == 0) s.exp_avg[i] = -0.0f;
        }
    }
    round_array(s.gradients, s.n, ROUND_BF16);
    if (!fp32_weights) round_array(s.weights, s.n, ROUND_BF16);
    if (!fp32_moments) round_array(s.exp_avg, s.n, ROUND_BF16), round_array(s.exp_avg_sq, s.n, ROUND_BF16);
    return s;
}

static void free_state(State *s) { free(s->weights), free(s->exp_avg), free(s->exp_avg_sq), free(s->gradients); }

static void *upload(const float *x, int64_t n, bool fp32) {
    if (fp32) return bench_upload(x, n * 4);
    bf16_bits *bits = bf16_from_floats(x, n);
    void *p = bench_upload(bits, n * 2);
    free(bits);
    return p;
}

static void check_array(const char *label, const char *array, const void *device, const float *want, int64_t n,
                        bool fp32) {
    char text[160];
    format_checked(text, sizeof text, "%s: %s", label, array);
    void *got = bench_download(device, n * (fp32 ? 4 : 2), text);
    bf16_bits *bits = bf16_from_floats(want, n);
    check_bytes(text, got, fp32 ? (const void *)want : bits, n * (fp32 ? 4 : 2), fp32 ? 4 : 2);
    free(got), free(bits);
}

// Checks the amax slots of the fused FP8 weights against `weights`, rounded to bf16.
static void check_amax(const char *label, const ParameterTable *t, const uint32_t *slots, int64_t stride,
                       const float *weights) {
    int64_t slot = 0, layer = -1;
    for (int64_t k = 0; k < t->count; k++) {
        const Parameter *p = &t->entries[k];
        if (!(p->flags & PARAM_FP8) || (p->flags & PARAM_JOINED)) continue;
        slot = p->layer == layer ? slot + 1 : p->layer * stride;
        layer = p->layer;
        int64_t n = parameter_elements(p);
        const unsigned joined = PARAM_JOINED | PARAM_FP8;
        for (int64_t j = k + 1; j < t->count && (t->entries[j].flags & joined) == joined; j++)
            n += parameter_elements(&t->entries[j]);
        float *rounded = (float *)xcalloc((size_t)n, sizeof(float));
        memcpy(rounded, weights + p->offset, (size_t)n * sizeof(float));
        round_array(rounded, n, ROUND_BF16);
        const uint32_t want = quantize_tensor_amax(rounded, n, SCALE_TORCHAO);
        CHECK(slots[slot] == want, "%s: the amax of %s is 0x%08x, want 0x%08x", label, p->name, slots[slot], want);
        free(rounded);
    }
}

typedef struct {
    bool master, fp32_moments;
    float clip;
    double eps, learning_rate;
    // Index of the gradient that becomes bad_value; -1: none. If bad_value is NaN, the last gradient becomes infinite.
    int64_t bad_element;
    bool nearest;
    float bad_value;
    bool fp32_gradients;
} Variant;

// True if adamw_accepts refuses the norm of the step. The other gradients are small beside bad_value, so the norm is at
// least |bad_value|, or NaN if bad_value is NaN.
static bool is_refused(Variant v) { return v.bad_element >= 0 && !adamw_accepts(fabs(v.bad_value)); }

enum { AMAX_STRIDE = 12 };

static AdamwGradients gradients_upload(const float *x, int64_t n, bool fp32) {
    AdamwGradients g = {};
    if (fp32) g.fp32_data = (const float *)upload(x, n, true);
    else g.bf16_data = (const bf16 *)upload(x, n, false);
    return g;
}

static void *gradients_memory(AdamwGradients g) { return g.fp32_data ? (void *)g.fp32_data : (void *)g.bf16_data; }

// Returns a rank's shard of the flat arrays; padding is 0.
static State shard_state(const ParameterTable *t, const ShardPlan *plan, const State *flat) {
    State s;
    s.n = plan->total;
    float **to[] = {&s.weights, &s.exp_avg, &s.exp_avg_sq, &s.gradients}, *const from[] = {flat->weights, flat->exp_avg,
                                                                                           flat->exp_avg_sq,
                                                                                           flat->gradients};
    for (int a = 0; a < 4; a++) {
        *to[a] = (float *)xcalloc((size_t)s.n, sizeof(float));
        for (int64_t l = ROOT; l < t->num_layers; l++)
            for (int k = 0; k < NUM_SEGMENTS; k++) {
                const ShardSegment g = segment_slice(t, plan, l, k);
                const ShardRange r = segment_range(t, plan, l, k, g.flat, g.size);
                memcpy(*to[a] + r.shard, from[a] + g.flat + r.first, (size_t)r.count * sizeof(float));
            }
    }
    return s;
}

static AdamwArrays arrays_upload(const State *s, Variant v) {
    AdamwArrays a = {};
    a.weights = (bf16 *)upload(s->weights, s->n, false),
    a.master = v.master ? (float *)upload(s->weights, s->n, true) : NULL;
    a.exp_avg = upload(s->exp_avg, s->n, v.fp32_moments), a.exp_avg_sq = upload(s->exp_avg_sq, s->n, v.fp32_moments);
    a.moments = v.fp32_moments ? ADAMW_FP32 : ADAMW_BF16,
    a.gradients = gradients_upload(s->gradients, s->n, v.fp32_gradients);
    return a;
}

static void arrays_check(const char *label, const AdamwArrays *a, Variant v, const State *want) {
    check_array(label, "weights", a->weights, want->weights, want->n, false);
    if (v.master) check_array(label, "master weights", a->master, want->weights, want->n, true);
    check_array(label, "exp_avg", a->exp_avg, want->exp_avg, want->n, v.fp32_moments);
    check_array(label, "exp_avg_sq", a->exp_avg_sq, want->exp_avg_sq, want->n, v.fp32_moments);
}

static void arrays_free(AdamwArrays *a) {
    void *device[] = {a->weights, a->master, a->exp_avg, a->exp_avg_sq, gradients_memory(a->gradients)};
    for (void *p : device)
        if (p) bench_free(p);
}

// Returns codes of a rank's slices of matrices, all of which are NaN at first, and scales of the FP8 weights.
static AdamwCodes codes_create(const ParameterTable *t, const ShardPlan *plan) {
    const int64_t slice = plan->layer_slices[SEGMENT_MATRICES], tensors = t->num_layers * TENSORS_PER_LAYER;
    float *scales = (float *)xcalloc((size_t)tensors, sizeof *scales);
    for (int64_t i = 0; i < tensors; i++) scales[i] = 4000 + 70 * (float)i;
    const AdamwCodes c = {(uint8_t *)bench_alloc(t->num_layers * slice),
                          (const float *)bench_upload(scales, tensors * (int64_t)sizeof *scales), slice,
                          TENSORS_PER_LAYER};
    CUDA_CHECK(cudaMemset(c.codes, 0xff, (size_t)(t->num_layers * slice)));
    free(scales);
    return c;
}

static void codes_free(AdamwCodes *c) { bench_free(c->codes), bench_free((void *)c->scale); }

// Checks that AdamW has written the codes of the weights in `want`, or none if the step is skipped.
static void codes_check(const char *label, const ParameterTable *t, const ShardPlan *plan, const AdamwCodes *c,
                        const State *want, bool skipped) {
    uint8_t *codes = (uint8_t *)bench_download(c->codes, t->num_layers * c->stride, label);
    float *scales = (float *)bench_download(c->scale, t->num_layers * c->scale_stride * 4, label);
    int64_t wrong = 0, slot = -1, layer = ROOT;
    for (int64_t k = 0; k < t->count; k++) {
        const Parameter *p = &t->entries[k];
        if (!(p->flags & PARAM_FP8)) continue;
        if (p->layer != layer) layer = p->layer, slot = -1;
        slot += !(p->flags & PARAM_JOINED);
        const ShardRange r = shard_parameter(t, plan, p);
        const int64_t at = layer * c->stride + r.shard - segment_slice(t, plan, layer, SEGMENT_MATRICES).shard;
        for (int64_t i = 0; i < r.count; i++) {
            const float x = bf16_round(want->weights[r.shard + i]) * scales[layer * c->scale_stride + slot];
            wrong += codes[at + i] != (skipped ? 0xff : fp8_from_float(x, FP8_E4M3));
        }
    }
    CHECK(wrong == 0, "%s: AdamW's codes are those of the CPU's cast; %lld are not", label, (long long)wrong);
    free(codes), free(scales);
}

// Runs the step of the rank at plan->shard_rank. Its new arrays must equal `want`, which holds the old arrays if the
// step is skipped. `coded`: the update must also write codes. Also checks `nonfinite`, the largest gradient, and the
// position of the first large one.
static void check_rank(const char *label, const ParameterTable *t, const ShardPlan *plan, Variant v,
                       const State *before, const State *want, const double *squares, AdamwStep step, uint32_t *amax,
                       bool coded) {
    AdamwCodes codes = codes_create(t, plan);
    AdamwArrays a = arrays_upload(before, v);
    AdamwControl *control = (AdamwControl *)bench_alloc(sizeof(AdamwControl));
    const BackwardOrder order = shard_backward_order(t, plan);
    const AdamwUpdate update = {a, step, control, NULL, amax, AMAX_STRIDE, {}};
    adamw_norm(control, squares, NULL, 1, v.clip, 0);
    adamw_locate(control, a.gradients, order, 0);
    adamw_update_units(&update, t, plan, ROOT, 1, 0, 0);
    if (coded) adamw_update_coded(&update, &codes, t, plan, 0, t->num_layers, shard_begin(plan, 0), 0);
    else adamw_update_units(&update, t, plan, 0, t->num_layers, shard_begin(plan, 0), 0);
    AdamwControl *c = (AdamwControl *)bench_download(control, sizeof *c, label);
    unsigned long long first_large = ADAMW_NONE;
    uint32_t largest = 0;
    for (int64_t i = 0; is_refused(v) && i < before->n; i++) {
        const uint32_t magnitude = adamw_magnitude(before->gradients[i]);
        if (magnitude > largest) largest = magnitude;
    }
    for (int64_t position = before->n - 1; is_refused(v) && position >= 0; position--) {
        const float gradient = before->gradients[backward_position(order, position)];
        if (adamw_magnitude(gradient) >= adamw_large(largest)) first_large = (unsigned long long)position;
    }
    CHECK(c->nonfinite == is_refused(v) && c->largest == largest && c->position == first_large,
          "%s: flag, largest and first large position are as on the CPU: got %u, %08x, %llu, want largest %08x, "
          "position %llu",
          label, c->nonfinite, c->largest, c->position, largest, first_large);
    arrays_check(label, &a, v, want);
    if (coded) codes_check(label, t, plan, &codes, want, is_refused(v));
    free(c), bench_free(control);
    arrays_free(&a), codes_free(&codes);
}

// Updates all units of a rank: one call for the root (the parameters outside layers), and one for all layers. With
// by_unit each layer has its own call, as with --optimizer-in-backward: the last layer first, the root at the end. The
// layers' gradients then take turns in one place, behind the root's gradient.
static void update_all(const AdamwUpdate *whole, const ParameterTable *t, const ShardPlan *plan, bool by_unit) {
    const int64_t element = whole->arrays.gradients.fp32_data ? 4 : 2, layer = shard_elements(plan, 0);
    const char *all = (const char *)gradients_memory(whole->arrays.gradients);
    if (!by_unit) {
        adamw_update_units(whole, t, plan, ROOT, 1, 0, 0);
        adamw_update_units(whole, t, plan, 0, t->num_layers, shard_begin(plan, 0), 0);
        return;
    }
    AdamwUpdate w = *whole;
    char *place = (char *)bench_alloc(shard_begin(plan, 1) * element);
    if (element == 4) w.arrays.gradients.fp32_data = (const float *)place;
    else w.arrays.gradients.bf16_data = (const bf16 *)place;
    CUDA_CHECK(cudaMemcpy(place, all, (size_t)(shard_begin(plan, 0) * element), cudaMemcpyDeviceToDevice));
    for (int64_t l = t->num_layers - 1; l >= 0; l--) {
        CUDA_CHECK(cudaMemcpyAsync(place + shard_begin(plan, 0) * element, all + shard_begin(plan, l) * element,
                                   (size_t)(layer * element), cudaMemcpyDeviceToDevice, 0));
        adamw_update_units(&w, t, plan, l, 1, shard_begin(plan, 0), 0);
    }
    adamw_update_units(&w, t, plan, ROOT, 1, 0, 0);
    bench_free(place);
}

// Checks that adamw_locate_block, for a step that is not accepted, gives the first element of the first group of
// ADAMW_BLOCK elements (in the order of backward) that holds a large gradient (here: from 2^60 on, or NaN).
static void check_located(const char *label, const AdamwUpdate *w, const double *squares, const ParameterTable *t,
                          const ShardPlan *plan, Variant v, const State *before) {
    const BackwardOrder order = shard_backward_order(t, plan);
    AdamwControl *control = (AdamwControl *)bench_alloc(sizeof *control);
    adamw_norm(control, squares, NULL, 1, 0, 0);
    adamw_locate_block(control, w, t, plan, 0);
    AdamwControl *c = (AdamwControl *)bench_download(control, sizeof *c, label);
    unsigned long long first = ADAMW_NONE;
    for (int64_t l = ROOT; l < t->num_layers; l++)
        for (int64_t i = 0; i < shard_elements(plan, l); i++) {
            const int64_t in_block = i % ADAMW_BLOCK, element = shard_begin(plan, l) + i;
            if (fabsf(before->gradients[element]) < 0x1p60f) continue;  // false for NaN
            const unsigned long long at = (unsigned long long)backward_position(order, element - in_block);
            if (at < first) first = at;
        }
    const bool here = first != ADAMW_NONE && is_refused(v);
    CHECK(c->nonfinite == here && (!here || c->position == first),
          "%s: got flag %u and position %llu, want flag %d; the first block with a gradient of 2^60 or more, or NaN, "
          "begins "
          "at %llu",
          label, c->nonfinite, c->position, (int)here, first);
    free(c), bench_free(control);
}

// Checks a rank like check_rank, with the norm computed by the update, so that no step is skipped. Returns the rank's
// sum of squares.
static double check_rank_unconditional(const char *label, const ParameterTable *t, const ShardPlan *plan, Variant v,
                                       const State *before, const State *want, AdamwStep step, uint32_t *amax,
                                       bool by_unit) {
    AdamwArrays a = arrays_upload(before, v);
    double *squares = (double *)bench_alloc(sizeof *squares);
    const AdamwUpdate update = {a,    step,        NULL, (double *)bench_alloc(adamw_workspace_bytes(t, plan)),
                                amax, AMAX_STRIDE, {}};
    update_all(&update, t, plan, by_unit);
    adamw_updated_squares(squares, &update, t, plan, 0);
    check_located(label, &update, squares, t, plan, v, before);
    double *got = (double *)bench_download(squares, sizeof *got, label);
    const double sum = *got;
    arrays_check(label, &a, v, want);
    free(got), bench_free(squares), bench_free(update.squares);
    arrays_free(&a);
    return sum;
}

// Returns the sum of the squared gradients of all ranks, in device memory. The kernel computes each rank's sum, and the
// CPU adds them up.
static double *sum_squares(const ParameterTable *t, int64_t shard_size, const State *flat, bool fp32) {
    double *squares = (double *)bench_alloc(sizeof(double)), sum = 0;
    for (int64_t rank = 0; rank < shard_size; rank++) {
        const ShardPlan plan = shard_plan(t, shard_size, rank);
        State s = shard_state(t, &plan, flat);
        const AdamwGradients gradients = gradients_upload(s.gradients, s.n, fp32);
        double *workspace = (double *)bench_alloc(adamw_workspace_bytes(t, &plan));
        adamw_squares(squares, gradients, s.n, workspace, 0);
        double *part = (double *)bench_download(squares, sizeof *part, "squares");
        sum += *part;
        bench_free(gradients_memory(gradients)), bench_free(workspace), free(part), free_state(&s);
    }
    CUDA_CHECK(cudaMemcpy(squares, &sum, sizeof sum, cudaMemcpyHostToDevice));
    return squares;
}

// Gives the elements of `state` with a non-finite gradient their old values: the GPU's unconditional step, unlike the
// CPU's, leaves such elements unchanged.
static void keep_nonfinite(State *state, const State *old) {
    for (int64_t i = 0; i < state->n; i++) {
        if (isfinite(state->gradients[i])) continue;
        state->weights[i] = old->weights[i], state->exp_avg[i] = old->exp_avg[i],
        state->exp_avg_sq[i] = old->exp_avg_sq[i];
    }
}

// Runs one step of every rank of a shard group, one after the other on this GPU, and checks it against the CPU's step
// on the flat arrays.
static void check_step(const char *preset, Variant v, int64_t step_number, int64_t shard_size) {
    const ModelConfig m = small_model(preset);
    ParameterTable t = parameter_table(&m);
    State flat = make_state(&t, 17 + (uint64_t)step_number, v.master, v.fp32_moments);
    const bool bad = is_refused(v);
    char label[160];
    format_checked(
        label, sizeof label,
        "%s fp32 master %d moments %d clip %g eps %g lr %g bad %lld (%g) nearest %d, %s gradients, %lld ranks", preset,
        v.master, v.fp32_moments, v.clip, v.eps, v.learning_rate, (long long)v.bad_element, v.bad_value, v.nearest,
        v.fp32_gradients ? "fp32" : "bf16", (long long)shard_size);
    for (int64_t i = 0; v.fp32_gradients && i < flat.n; i++)
        flat.gradients[i] *= 1.0009765f;  // values that bf16 cannot represent
    if (v.bad_element >= 0) flat.gradients[v.bad_element] = v.bad_value;
    if (isnan(v.bad_value)) flat.gradients[flat.n - 1] = INFINITY;
    const ShardPlan whole = shard_plan(&t, 1, 0);
    State old = shard_state(&t, &whole, &flat);
    const AdamwStep step = adamw_step(step_number, v.learning_rate, 0.9, 0.999, v.eps, 0.1, v.nearest, 42);
    double *squares = sum_squares(&t, shard_size, &flat, v.fp32_gradients);
    uint32_t *amax = (uint32_t *)bench_zeros(m.num_layers * AMAX_STRIDE * 4),
             *amax_unconditional = (uint32_t *)bench_zeros(m.num_layers * AMAX_STRIDE * 4);
    double *sum = (double *)bench_download(squares, sizeof *sum, label);
    const float norm = (float)sqrt(*sum), want_norm = (float)sqrt(squares_sum(flat.gradients, flat.n)),
                factor = clip_factor(sqrt(*sum), v.clip);
    if (!bad) check_close(label, &norm, &want_norm, 1, 1, 1e-6, 0);  // the kernel adds up 32 squares in fp32
    State *before = (State *)xcalloc((size_t)shard_size, sizeof *before);
    for (int64_t rank = 0; rank < shard_size; rank++) {
        const ShardPlan plan = shard_plan(&t, shard_size, rank);
        before[rank] = shard_state(&t, &plan, &flat);
    }
    for (int64_t k = 0; k < t.count; k++) {
        const Parameter *p = &t.entries[k];
        adamw_reference(flat.weights + p->offset, flat.exp_avg + p->offset, flat.exp_avg_sq + p->offset,
                        flat.gradients + p->offset, p->offset, parameter_elements(p), p->flags & PARAM_DECAY, factor,
                        !v.master, !v.fp32_moments, &step);
    }
    keep_nonfinite(&flat, &old);
    double taken_along = 0;
    for (int64_t rank = 0; rank < shard_size; rank++) {
        const ShardPlan plan = shard_plan(&t, shard_size, rank);
        State want = shard_state(&t, &plan, &flat);
        for (int coded = 0; coded < 2; coded++)
            check_rank(label, &t, &plan, v, &before[rank], bad ? &before[rank] : &want, squares, step, amax, coded);
        for (int by_unit = 0; v.clip == 0 && by_unit < 2; by_unit++) {
            const double part =
                check_rank_unconditional(label, &t, &plan, v, &before[rank], &want, step, amax_unconditional, by_unit);
            if (!by_unit) taken_along += part;
        }
        free_state(&want), free_state(&before[rank]);
    }
    if (v.clip == 0)
        CHECK(bad ? !adamw_accepts(sqrt(taken_along)) : fabs(taken_along / *sum - 1) < 1e-6,
              "%s: the update's sum of squares %.9g is close to that of adamw_squares, %.9g, or both refuse the step",
              label, taken_along, *sum);
    uint32_t *slots = (uint32_t *)bench_download(amax, m.num_layers * AMAX_STRIDE * 4, label),
             *slots_unconditional =
                 (uint32_t *)bench_download(amax_unconditional, m.num_layers * AMAX_STRIDE * 4, label);
    check_amax(label, &t, slots, AMAX_STRIDE, bad ? old.weights : flat.weights);
    if (v.clip == 0) check_amax(label, &t, slots_unconditional, AMAX_STRIDE, flat.weights);
    free(before), free(sum), free(slots), free(slots_unconditional), bench_free(squares), bench_free(amax),
        bench_free(amax_unconditional);
    free_state(&flat), free_state(&old);
    parameter_table_free(&t);
}

static __global__ void random_kernel(AdamwRandom *random, AdamwStep step, int64_t first) {
    random[threadIdx.x] = adamw_random(&step, first + threadIdx.x);
}

// Checks the random bits for stochastic rounding of elements with flat indices around 2^8, 2^9, ... 2^44.
static void check_random(void) {
    enum { N = 256 };
    const AdamwStep step = adamw_step(9, 1e-3, 0.9, 0.999, 1e-8, 0.1, false, 42);
    AdamwRandom *random = (AdamwRandom *)bench_alloc(N * sizeof *random), want[N];
    for (int bit = 8; bit < 45; bit++) {
        const int64_t first = (1ll << bit) - N / 2;
        random_kernel<<<1, N>>>(random, step, first);
        CUDA_CHECK_LAUNCH();
        AdamwRandom *got = (AdamwRandom *)bench_download(random, N * sizeof *random, "rounding bits");
        for (int i = 0; i < N; i++) want[i] = adamw_random(&step, first + i);
        check_bytes("rounding bits", got, want, sizeof want, sizeof *want);
        free(got);
    }
    bench_free(random);
}

// Host only: checks adamw_units for every element of every rank's shard against the parameter table.
static void check_units(const char *preset, int64_t shard_size) {
    const ModelConfig m = small_model(preset);
    ParameterTable t = parameter_table(&m);
    int64_t seen = 0, wrong = 0;
    for (int64_t rank = 0; rank < shard_size; rank++) {
        const ShardPlan plan = shard_plan(&t, shard_size, rank);
        for (int64_t first = ROOT; first <= 0; first++) {  // the root alone, and all layers
            const AdamwUnits u = adamw_units(&t, &plan, first, first == ROOT ? 1 : t.num_layers, false);
            for (int64_t unit = 0; unit < u.count; unit++) {
                int64_t slot = -1;
                for (int64_t k = 0; k < t.count; k++) {
                    const Parameter *p = &t.entries[k];
                    if (p->layer != first + unit) continue;
                    if (p->flags & PARAM_FP8 && !(p->flags & PARAM_JOINED)) slot++;
                    const ShardRange r = shard_parameter(&t, &plan, p);
                    for (int64_t i = 0; i < r.count; i++) {
                        const int64_t e = r.shard + i - u.first - unit * u.size;
                        int at = 0;
                        while (at < u.num_runs - 1 && e / PARAMETER_ALIGNMENT >= u.runs[at].end) at++;
                        const AdamwRun *run = &u.runs[at];
                        // flat + e must be the element's flat index. The kernel divides `flat` by 8, so `flat` must be
                        // a multiple of 8.
                        const int64_t flat = u.flat + unit * u.flat_size + run->shift;
                        wrong += flat + e != p->offset + r.first + i || flat % 8 != 0 || e < 0 || e >= u.size ||
                                 e / PARAMETER_ALIGNMENT >= run->end || run->decay != ((p->flags & PARAM_DECAY) != 0) ||
                                 run->amax_slot != (p->flags & PARAM_FP8 ? (int)slot : -1);
                    }
                    seen += r.count;
                }
            }
            wrong += u.runs[u.num_runs - 1].end * (int64_t)PARAMETER_ALIGNMENT != u.size;
        }
    }
    CHECK(wrong == 0 && seen == t.num_parameters,
          "%s, %lld ranks: AdamwRuns have each element's index, decay and amax slot; %lld errors in %lld elements; "
          "shards "
          "have %lld",
          preset, (long long)shard_size, (long long)wrong, (long long)t.num_parameters, (long long)seen);
    parameter_table_free(&t);
}

static void check_initialize(const char *preset, bool with_master, int64_t shard_size) {
    const ModelConfig m = small_model(preset);
    ParameterTable t = parameter_table(&m);
    State flat = make_state(&t, 1, true, true);
    memset(flat.weights, 0, (size_t)t.total * sizeof(float));
    for (int64_t k = 0; k < t.count; k++)
        for (int64_t i = 0; i < parameter_elements(&t.entries[k]); i++)
            flat.weights[t.entries[k].offset + i] = parameter_initial_value(t.entries[k].flags, 0.02f, 1234, k, i);
    for (int64_t rank = 0; rank < shard_size; rank++) {
        const ShardPlan plan = shard_plan(&t, shard_size, rank);
        State want = shard_state(&t, &plan, &flat);
        bf16 *weights = (bf16 *)bench_alloc(plan.total * 2);
        float *master = with_master ? (float *)bench_alloc(plan.total * 4) : NULL;
        initialize_parameters(InitialWeights{weights, master, NULL}, &t, &plan, 0.02f, 1234, 0);
        check_array("initialize", "weights", weights, want.weights, want.n, false);
        if (master) check_array("initialize", "master weights", master, want.weights, want.n, true);
        bench_free(weights);
        if (master) bench_free(master);
        free_state(&want);
    }
    free_state(&flat);
    parameter_table_free(&t);
}

// Checks clip factors and norms of four steps that are clipped in the backward pass: they must equal those of
// adamw_math.h. The sums of squares of the second step have a factor of 100. In the fourth step the norm becomes
// infinite at layer 1. `nonfinite`, by which updates are skipped, must be set from then on.
static void check_clip_in_backward(void) {
    enum { LAYERS = 3, REPLICAS = 2 };
    const float clip_value = 0.5f;
    AdamwControl *control = (AdamwControl *)bench_alloc(sizeof *control);
    const AdamwClip clip = {(double *)bench_alloc(ADAMW_NORM_BLOCKS * sizeof(double)),
                            (double *)bench_alloc(ADAMW_CLIP_SLOTS * sizeof(double)),
                            (double *)bench_alloc(sizeof(double)), (float *)bench_zeros((1 + LAYERS) * 4)};
    float norms[1 + LAYERS] = {0};
    for (int step = 0; step < 4; step++) {
        double so_far = 0;
        for (int64_t l = LAYERS - 1; l >= ROOT; l--) {
            const int64_t slot = l == ROOT ? 0 : l % ADAMW_CLIP_SLOTS;
            double squares = (step == 1 ? 100 : 1) * rng_normal(3, (uint64_t)(10 * step + l + 1));
            squares = step == 3 && l == 1 ? (double)INFINITY : fabs(squares);
            CUDA_CHECK(cudaMemcpy(clip.squares + slot, &squares, sizeof squares, cudaMemcpyHostToDevice));
            adamw_clip(control, &clip, l, slot, l == LAYERS - 1, REPLICAS, clip_value, 0);
            AdamwControl *got = (AdamwControl *)bench_download(control, sizeof *got, "control");
            so_far += squares / REPLICAS;
            const float norm = (float)sqrt(so_far);
            const float want = clip_factor(clip_norm_so_far(norm, norms[1 + l], norms[0]), clip_value);
            norms[1 + l] = norm;
            CHECK(got->gradient_factor == want && got->nonfinite == !isfinite(norm),
                  "step %d, unit %lld: factor %.9g, want %.9g, flag %u", step, (long long)l,
                  (double)got->gradient_factor, (double)want, got->nonfinite);
            free(got);
        }
        float *got = (float *)bench_download(clip.norms, sizeof norms, "norms");
        CHECK(memcmp(got, norms, sizeof norms) == 0, "step %d: the norms are those of the CPU", step);
        free(got);
    }
    void *device[] = {control, clip.workspace, clip.squares, clip.so_far, clip.norms};
    for (void *p : device) bench_free(p);
}

// The flat arrays of a real model on the device.
typedef struct {
    ModelConfig m;
    ParameterTable t;
    ShardPlan plan;
    AdamwArrays a;
    AdamwControl *control;
    uint32_t *amax;
    double *squares, *workspace;
} Model;

static Model model_create(const char *preset, bool master, bool fp32_moments, bool fp32_gradients) {
    Model x = {};
    if (!model_config_preset(&x.m, preset)) die("no preset %s", preset);
    x.t = parameter_table(&x.m);
    x.plan = shard_plan(&x.t, 1, 0);
    const int64_t n = x.t.total, moment = fp32_moments ? 4 : 2;
    x.a.weights = (bf16 *)bench_alloc(n * 2), x.a.master = master ? (float *)bench_alloc(n * 4) : NULL;
    x.a.exp_avg = bench_zeros(n * moment), x.a.exp_avg_sq = bench_zeros(n * moment),
    x.a.moments = fp32_moments ? ADAMW_FP32 : ADAMW_BF16;
    if (fp32_gradients) x.a.gradients.fp32_data = (float *)bench_zeros(n * 4);
    else x.a.gradients.bf16_data = bench_random(n, 5, 1e-3f);
    initialize_parameters(InitialWeights{x.a.weights, x.a.master, NULL}, &x.t, &x.plan, 0.02f, 1, 0);
    x.control = (AdamwControl *)bench_alloc(sizeof(AdamwControl)),
    x.workspace = (double *)bench_alloc(adamw_workspace_bytes(&x.t, &x.plan));
    x.amax = (uint32_t *)bench_zeros(x.m.num_layers * AMAX_STRIDE * 4),
    x.squares = (double *)bench_alloc(sizeof(double));
    return x;
}

static void model_norm(const Model *x, float clip) {
    adamw_squares(x->squares, x->a.gradients, x->t.total, x->workspace, 0);
    adamw_norm(x->control, x->squares, NULL, 1, clip, 0);
    adamw_locate(x->control, x->a.gradients, backward_order(&x->t), 0);
}

// Runs the update. norm_first: the caller has called model_norm, and the update is skipped if that norm is refused.
// codes: to write; NULL: none.
static void model_update(const Model *x, AdamwStep step, bool norm_first, const AdamwCodes *codes) {
    const AdamwUpdate update = {
        x->a, step, norm_first ? x->control : NULL, norm_first ? NULL : x->workspace, x->amax, AMAX_STRIDE, {}};
    adamw_update_units(&update, &x->t, &x->plan, ROOT, 1, 0, 0);
    const int64_t L = x->t.num_layers, first = shard_begin(&x->plan, 0);
    if (codes) adamw_update_coded(&update, codes, &x->t, &x->plan, 0, L, first, 0);
    else adamw_update_units(&update, &x->t, &x->plan, 0, L, first, 0);
    if (!norm_first) adamw_updated_squares(x->squares, &update, &x->t, &x->plan, 0);
}

static void model_free(Model *x) {
    void *device[] = {x->a.weights, x->a.master, x->a.exp_avg, x->a.exp_avg_sq, gradients_memory(x->a.gradients),
                      x->control,   x->amax,     x->squares,   x->workspace};
    for (void *p : device)
        if (p) bench_free(p);
    parameter_table_free(&x->t);
}

// Runs one step of 8 billion parameters. Checks the norm. Compares the last WINDOW new weights of every tensor with the
// CPU's.
static void check_large(void) {
    Model x = model_create("llama3.1-8b", false, false, false);
    const AdamwStep step = adamw_step(1, 1e-3, 0.9, 0.95, 1e-8, 0.1, false, 7);
    enum { WINDOW = 1024 };
    model_norm(&x, 0);
    AdamwControl *c = (AdamwControl *)bench_download(x.control, sizeof *c, "control");
    // The tolerance is more than ten standard deviations of the norm of independent normal values, 1 / sqrt(2 n) each.
    const float want_norm = (float)(1e-3 * sqrt((double)x.t.total));
    check_close("norm of 8e9 values", &c->gradient_norm, &want_norm, 1, 1, 1e-4, 0);
    bf16_bits(*before)[2][WINDOW] = (bf16_bits(*)[2][WINDOW])xcalloc((size_t)x.t.count, sizeof *before);
    for (int run = 0; run < 2; run++) {
        if (run) model_update(&x, step, false, NULL);
        for (int64_t k = 0; k < x.t.count; k++) {
            const Parameter *p = &x.t.entries[k];
            // `first` begins the tensor's last n elements.
            const int64_t n = min_i64(WINDOW, parameter_elements(p)), first = p->offset + parameter_elements(p) - n;
            if (!run) {
                CUDA_CHECK(cudaMemcpy(before[k][0], x.a.weights + first, (size_t)n * 2, cudaMemcpyDeviceToHost));
                CUDA_CHECK(
                    cudaMemcpy(before[k][1], x.a.gradients.bf16_data + first, (size_t)n * 2, cudaMemcpyDeviceToHost));
                continue;
            }
            bf16_bits got[WINDOW];
            float *w = bf16_to_floats(before[k][0], n), *g = bf16_to_floats(before[k][1], n), m[WINDOW] = {0},
                  v[WINDOW] = {0};
            adamw_reference(w, m, v, g, first, n, p->flags & PARAM_DECAY, c->gradient_factor, true, true, &step);
            CUDA_CHECK(cudaMemcpy(got, x.a.weights + first, (size_t)n * 2, cudaMemcpyDeviceToHost));
            bf16_bits *want = bf16_from_floats(w, n);
            check_bytes(p->name, got, want, n * 2, 2);
            free(w), free(g), free(want);
        }
    }
    double *squares = (double *)bench_download(x.squares, sizeof *squares, "squares");
    const float norm = (float)sqrt(*squares);
    check_close("norm of 8e9 values, computed by the update", &norm, &c->gradient_norm, 1, 1, 1e-6, 0);
    free(before), free(c), free(squares);
    model_free(&x);
}

static void bench_model(Bench *b, const char *preset, bool master, bool fp32_moments, bool fp32_gradients) {
    Model x = model_create(preset, master, fp32_moments, fp32_gradients);
    const double n = (double)x.t.total, gradient = fp32_gradients ? 4 : 2;
    const AdamwStep step = adamw_step(3, 1e-5, 0.9, 0.999, 1e-8, 0.01, false, 7);
    char shape[64];
    format_checked(shape, sizeof shape, "%s", preset);
    double us = bench_time_us(b, [&] { model_norm(&x, 1.0f); });
    bench_report(b, fp32_gradients ? "gradient norm, fp32" : "gradient norm", shape, us, gradient * n);
    for (int norm_first = 1; norm_first >= 0; norm_first--) {
        us = bench_time_us(b, [&] { model_update(&x, step, norm_first, NULL); });
        char name[64];
        format_checked(name, sizeof name, "AdamW, weights %s, moments %s%s%s", master ? "fp32" : "bf16",
                       fp32_moments ? "fp32" : "bf16", fp32_gradients ? ", gradients fp32" : "",
                       norm_first ? "" : ", norm");
        bench_report(
            b, name, shape, us, n * (gradient + (master ? 10 : 4) + (fp32_moments ? 16 : 8)),
            master && fp32_moments
                ? NULL
                : "arithmetic besides memory traffic: square root, division and stochastic rounding of every element");
    }
    if (!master && !fp32_moments && !fp32_gradients) {
        AdamwCodes codes = codes_create(&x.t, &x.plan);
        us = bench_time_us(b, [&] { model_update(&x, step, false, &codes); });
        bench_report(b, "AdamW, weights bf16, moments bf16, norm, codes", shape, us,
                     n * 14 + (double)(x.t.num_layers * codes.stride), "the same arithmetic, and the casts");
        codes_free(&codes);
    }
    model_free(&x);
}

int main(int argc, char **argv) {
    const char *presets[] = {"llama3.1-8b", "qwen2.5-0.5b", "qwen3-8b"};
    if (bench_part_wanted(argc, argv, "check")) {
        for (const char *preset : presets)
            for (int64_t shard_size = 1; shard_size < 9; shard_size++) check_units(preset, shard_size);
        check_random();
        check_clip_in_backward();
        for (const char *preset : presets)
            for (int kind = 0; kind < 4; kind++) {
                const bool master = kind & 1, moments = kind & 2;
                // Rows 0 to 5 have ordinary gradients. 6 and 7: a NaN and an infinity, with and without clipping.
                // 8: a gradient whose square overflows fp32. 9: one with which the second moment overflows too.
                // 10: one of 7/8 of the largest accepted norm. 11 and 12: ordinary fp32 gradients.
                // 13 and 14: fp32 gradients with a NaN and an infinity.
                const Variant variants[] = {{master, moments, 0, 1e-8, 1e-3, -1, false, 0, false},
                                            {master, moments, 1e-3f, 1e-8, 1e-5, -1, false, 0, false},
                                            {master, moments, 0, 1e-15, 1e-2, -1, false, 0, false},
                                            {master, moments, 1, 1e-8, 0, -1, false, 0, false},
                                            {master, moments, 1, 1e-25, 1e-3, -1, false, 0, false},
                                            {master, moments, 0, 1e-8, 1e-3, -1, true, 0, false},
                                            {master, moments, 1, 1e-8, 1e-3, 12345, false, NAN, false},
                                            {master, moments, 0, 1e-8, 1e-3, 12345, false, NAN, false},
                                            {master, moments, 0, 1e-8, 1e-3, 12346, false, -0x1p64f, false},
                                            {master, moments, 0, 1e-8, 1e-3, 12346, false, 0x1p80f, false},
                                            {master, moments, 0, 1e-8, 1e-3, 12347, false, 0x1.cp62f, false},
                                            {master, moments, 0, 1e-8, 1e-3, -1, false, 0, true},
                                            {master, moments, 1e-3f, 1e-8, 1e-3, -1, false, 0, true},
                                            {master, moments, 1, 1e-8, 1e-3, 12345, false, NAN, true},
                                            {master, moments, 0, 1e-8, 1e-3, 12345, false, NAN, true}};
                for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++)
                    check_step(preset, variants[i], 1 + 100 * (int64_t)i, i == 0 ? 1 : i == 1 ? 5 : 1 + (int64_t)i % 3);
                if (kind < 2) check_initialize(preset, kind, 1 + 2 * kind);
            }
    }
    if (bench_part_wanted(argc, argv, "large")) check_large();
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_model(&b, "llama3.1-8b", false, false, false);
        bench_model(&b, "llama3.2-1b", false, false, false);
        bench_model(&b, "llama3.2-1b", true, false, false);
        bench_model(&b, "llama3.2-1b", false, true, false);
        bench_model(&b, "llama3.2-1b", true, true, false);
        bench_model(&b, "llama3.2-1b", false, false, true);
        bench_model(&b, "llama3.2-1b", true, true, true);
        bench_destroy(&b);
    }
    return check_report();
}
