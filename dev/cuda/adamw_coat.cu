// Checks AdamW with FP8 moments (llmc/optimizer/adamw_coat.cuh) byte for byte against the CPU's functions, over several
// steps of 1 to 4 ranks, one after the other on this GPU. Also checks coat_inverse, and coat_expand within a tolerance.
// Times the update.
// Build and run: make build/bench_adamw_coat && build/bench_adamw_coat
#include "../../llmc/reference/adamw.h"
#include "adamw_parts.cuh"

enum { STEPS = 4 };

// A rank's optimizer on the host, or the whole model's (n: elements of the flat arrays).
typedef struct {
    int64_t n;
    float *weights;
    uint8_t *codes[2];    // [n] of exp_avg, exp_avg_sq
    uint32_t *groups[2];  // [n / COAT_GROUP]
    float *gradients[STEPS];
} State;

static State state_create(int64_t n) {
    State s = {};
    s.n = n;
    s.weights = (float *)xcalloc((size_t)n, sizeof(float));
    for (int k = 0; k < 2; k++) {
        s.codes[k] = (uint8_t *)xcalloc((size_t)n, 1);
        s.groups[k] = (uint32_t *)xcalloc((size_t)(n / COAT_GROUP), sizeof(uint32_t));
    }
    for (float *&g : s.gradients) g = (float *)xcalloc((size_t)n, sizeof(float));
    return s;
}

static void state_free(State *s) {
    free(s->weights);
    for (int k = 0; k < 2; k++) free(s->codes[k]), free(s->groups[k]);
    for (float *g : s->gradients) free(g);
}

// Fills the weights and the gradients of all steps. The gradients have groups of several kinds: common, spread over a
// factor of 2^79, about half zero, all zero, equal, and far below COAT_SMALLEST.
static State state_fill(const ParameterTable *t, bool fp32_weights, bool fp32_gradients) {
    State s = state_create(t->total);
    for (int64_t k = 0; k < t->count; k++) {
        const Parameter *p = &t->entries[k];
        for (int64_t i = p->offset; i < p->offset + parameter_elements(p); i++) {
            const int64_t kind = i / COAT_GROUP % 8;
            s.weights[i] = rng_normal(rng_key(3, 0), (uint64_t)i) * 0.02f;
            if (!fp32_weights) s.weights[i] = bf16_round(s.weights[i]);
            for (int step = 0; step < STEPS; step++) {
                const uint64_t key = rng_key(3, 1 + (uint64_t)step), u = rng_u64(key, (uint64_t)(i + (1ll << 40)));
                float g = rng_normal(key, (uint64_t)i) * 1e-3f;
                if (kind == 2) g = ldexpf(g, -(int)(u % 80));
                if (kind == 3 && (u & 1)) g = 0;
                if (kind == 4) g = 0;
                if (kind == 5) g = 0.0371f;
                if (kind == 6) g *= 1e-36f;
                s.gradients[step][i] = fp32_gradients ? g : bf16_round(g);
            }
        }
    }
    return s;
}

static State state_part(const ParameterTable *t, const ShardPlan *plan, const State *flat) {
    State s = state_create(plan->total);
    copy_part(t, plan, flat->weights, s.weights, 4, 1);
    for (int k = 0; k < 2; k++) {
        copy_part(t, plan, flat->codes[k], s.codes[k], 1, 1);
        copy_part(t, plan, flat->groups[k], s.groups[k], 4, COAT_GROUP);
    }
    for (int step = 0; step < STEPS; step++) copy_part(t, plan, flat->gradients[step], s.gradients[step], 4, 1);
    return s;
}

typedef struct {
    bool master, fp32_gradients, stochastic;
    double eps;
} Variant;

static AdamwStep step_of(Variant v, int step) { return adamw_step(step + 1, 1e-3, 0.9, 0.95, v.eps, 0.1, false, 42); }

static void step_on_cpu(const ParameterTable *t, State *s, Variant v, int step) {
    const AdamwStep a = step_of(v, step);
    for (int64_t k = 0; k < t->count; k++) {
        const Parameter *p = &t->entries[k];
        if (p->flags & PARAM_JOINED) continue;
        const CoatMoment m = {s->codes[0] + p->offset, s->groups[0] + p->offset / COAT_GROUP},
                         q = {s->codes[1] + p->offset, s->groups[1] + p->offset / COAT_GROUP};
        adamw_coat_reference(s->weights + p->offset, m, q, s->gradients[step] + p->offset, p->offset,
                             parameter_fused_elements(t, k), p->flags & PARAM_DECAY, 1, !v.master, v.stochastic, &a);
    }
}

static CoatTables *upload_tables(void) { return (CoatTables *)bench_upload(coat_tables(), sizeof(CoatTables)); }

// Takes a step of one rank on the GPU, or skips it. Both must find the sum of squares of `gradients`.
static void step_on_gpu(const char *label, const ParameterTable *t, const ShardPlan *plan, Variant v, AdamwArrays a,
                        const float *gradients, int step, bool skipped, uint32_t *amax) {
    const AdamwControl control = {1, 0, skipped, 0, 0};
    AdamwControl *on_gpu = (AdamwControl *)bench_upload(&control, sizeof control);
    double *squares = (double *)bench_alloc(sizeof *squares), want = 0;
    void *uploaded = upload_floats(gradients, plan->total, v.fp32_gradients);
    if (v.fp32_gradients) a.gradients.fp32_data = (const float *)uploaded;
    else a.gradients.bf16_data = (const bf16 *)uploaded;
    const AdamwUpdate update = {a,
                                step_of(v, step),
                                skipped ? on_gpu : NULL,
                                (double *)bench_alloc(adamw_workspace_bytes(t, plan)),
                                amax,
                                AMAX_STRIDE,
                                {}};
    adamw_update_units(&update, t, plan, ROOT, 1, 0, 0);
    adamw_update_units(&update, t, plan, 0, t->num_layers, shard_begin(plan, 0), 0);
    adamw_updated_squares(squares, &update, t, plan, 0);
    double *got = (double *)bench_download(squares, sizeof *got, label);
    for (int64_t i = 0; i < plan->total; i++) want += (double)gradients[i] * (double)gradients[i];
    CHECK(fabs(*got - want) <= 1e-5 * want, "%s: step %d, skipped %d: the sum of squares is %g, want %g", label, step,
          skipped, *got, want);
    free(got);
    void *device[] = {on_gpu, squares, uploaded, update.squares};
    for (void *p : device) bench_free(p);
}

// Takes all steps of one rank on the GPU, and skips one more. The rank's arrays must then equal `want`.
static void check_rank(const char *label, const ParameterTable *t, const ShardPlan *plan, Variant v,
                       const State *before, const State *want) {
    const int64_t n = before->n, words = n / COAT_GROUP * 4;
    uint32_t *amax = (uint32_t *)bench_zeros(t->num_layers * AMAX_STRIDE * 4);
    AdamwArrays a = {};
    a.weights = (bf16 *)upload_floats(before->weights, n, false);
    a.master = v.master ? (float *)upload_floats(before->weights, n, true) : NULL;
    a.exp_avg = bench_zeros(n), a.exp_avg_sq = bench_zeros(n);
    a.moments = v.stochastic ? ADAMW_COAT_STOCHASTIC : ADAMW_COAT;
    a.coat.exp_avg_groups = (uint32_t *)bench_zeros(words), a.coat.exp_avg_sq_groups = (uint32_t *)bench_zeros(words);
    a.coat.tables = upload_tables();
    for (int step = 0; step <= STEPS; step++)
        step_on_gpu(label, t, plan, v, a, before->gradients[step % STEPS], step, step == STEPS, amax);
    bf16_bits *weights = bf16_from_floats(want->weights, n);
    check_device(label, "weights", a.weights, weights, n * 2, 2);
    if (v.master) check_device(label, "master weights", a.master, want->weights, n * 4, 4);
    check_device(label, "codes of exp_avg", a.exp_avg, want->codes[0], n, 1);
    check_device(label, "codes of exp_avg_sq", a.exp_avg_sq, want->codes[1], n, 1);
    check_device(label, "groups of exp_avg", a.coat.exp_avg_groups, want->groups[0], words, 4);
    check_device(label, "groups of exp_avg_sq", a.coat.exp_avg_sq_groups, want->groups[1], words, 4);
    free(weights);
    void *device[] = {a.weights,     a.exp_avg, a.exp_avg_sq, a.coat.exp_avg_groups, a.coat.exp_avg_sq_groups,
                      a.coat.tables, amax};
    for (void *p : device) bench_free(p);
    if (a.master) bench_free(a.master);
}

static void check_steps(const char *preset, Variant v, int64_t shard_size) {
    const ModelConfig m = small_model(preset);
    ParameterTable t = parameter_table(&m);
    State flat = state_fill(&t, v.master, v.fp32_gradients);
    State *before = (State *)xcalloc((size_t)shard_size, sizeof *before);
    char label[128];
    format_checked(label, sizeof label, "%s, fp32 master %d, fp32 gradients %d, stochastic %d, eps %g, %lld ranks",
                   preset, v.master, v.fp32_gradients, v.stochastic, v.eps, (long long)shard_size);
    for (int64_t rank = 0; rank < shard_size; rank++) {
        const ShardPlan plan = shard_plan(&t, shard_size, rank);
        before[rank] = state_part(&t, &plan, &flat);
    }
    for (int step = 0; step < STEPS; step++) step_on_cpu(&t, &flat, v, step);
    for (int64_t rank = 0; rank < shard_size; rank++) {
        const ShardPlan plan = shard_plan(&t, shard_size, rank);
        State want = state_part(&t, &plan, &flat);
        check_rank(label, &t, &plan, v, &before[rank], &want);
        state_free(&want), state_free(&before[rank]);
    }
    free(before);
    state_free(&flat);
    parameter_table_free(&t);
}

// Counts the tested maxima for which coat_inverse is not 1 / max. Tested are all exponents from 2^-100 on, and every
// 256th mantissa.
static __global__ void count_inverses(int *wrong) {
    const uint32_t bits = (uint32_t)(27 + blockIdx.y) << 23 | (blockIdx.x * blockDim.x + threadIdx.x) << 8;
    const float max = float_from_bits(bits);
    if (coat_inverse(max) != 1 / max) atomicAdd(wrong, 1);
}

// Writes the largest relative error of coat_expand for k = (row + 1) / 16, over every 7th fp32 number from
// 2^(-COAT_SPAN / k) to 1.
static __global__ void find_expand_error(double *worst, int row) {
    const float k = (float)(row + 1) * 0.0625f, smallest = exp2f(-(float)COAT_SPAN / k);
    double error = 0;
    for (uint32_t bits = float_bits(smallest) + 7 * (blockIdx.x * blockDim.x + threadIdx.x); bits <= float_bits(1.0f);
         bits += 7 * gridDim.x * blockDim.x) {
        const double part = (double)float_from_bits(bits), want = 448 * exp2(log2(part) * (double)k);
        error = fmax(error, fabs((double)coat_expand((float)part, k) / want - 1));
    }
    atomicMax((unsigned long long *)worst, (unsigned long long)__double_as_longlong(error));
}

static void check_powers(void) {
    int *wrong = (int *)bench_zeros(sizeof *wrong);
    count_inverses<<<dim3((1 << 15) / 256, 228), 256>>>(wrong);
    int *count = (int *)bench_download(wrong, sizeof *wrong, "inverses");
    CHECK(*count == 0, "coat_inverse is 1 / max for the tested maxima; it is not for %d of %d", *count, 228 << 15);
    free(count), bench_free(wrong);
    for (int row = 2; row < COAT_POWERS; row = row < 16 ? row + 1 : row + 29) {
        double *worst = (double *)bench_zeros(sizeof *worst);
        find_expand_error<<<1056, 256>>>(worst, row);
        double *error = (double *)bench_download(worst, sizeof *worst, "errors of powers");
        CHECK(*error > 0 && *error < 0x1p-18, "k = %d / 16: the relative error of coat_expand is below 2^-18; found %g",
              row + 1, *error);
        free(error), bench_free(worst);
    }
}

// Times the update of a real model with random gradients.
static void bench_model(Bench *b, const char *preset, bool stochastic) {
    ModelConfig m;
    if (!model_config_preset(&m, preset)) die("no preset %s", preset);
    ParameterTable t = parameter_table(&m);
    const ShardPlan plan = shard_plan(&t, 1, 0);
    const int64_t n = t.total, words = n / COAT_GROUP * 4;
    uint32_t *amax = (uint32_t *)bench_zeros(m.num_layers * AMAX_STRIDE * 4);
    AdamwArrays a = {};
    a.weights = (bf16 *)bench_alloc(n * 2), a.exp_avg = bench_zeros(n), a.exp_avg_sq = bench_zeros(n);
    a.moments = stochastic ? ADAMW_COAT_STOCHASTIC : ADAMW_COAT, a.coat.tables = upload_tables();
    a.coat.exp_avg_groups = (uint32_t *)bench_zeros(words), a.coat.exp_avg_sq_groups = (uint32_t *)bench_zeros(words);
    a.gradients.bf16_data = bench_random(n, 5, 1e-3f);
    initialize_parameters(InitialWeights{a.weights, NULL, NULL}, &t, &plan, 0.02f, 1, 0);
    const AdamwUpdate update = {a, adamw_step(3, 1e-5, 0.9, 0.999, 1e-8, 0.01, false, 7), NULL, NULL, amax, AMAX_STRIDE,
                                {}};
    const double us = bench_time_us(b, [&] {
        adamw_update_units(&update, &t, &plan, ROOT, 1, 0, 0);
        adamw_update_units(&update, &t, &plan, 0, t.num_layers, shard_begin(&plan, 0), 0);
    });
    bench_report(b, stochastic ? "AdamW, moments coat-stochastic" : "AdamW, moments coat", preset, us,
                 (double)n * (2 + 4 + 4 + 16.0 / COAT_GROUP),
                 "arithmetic besides memory traffic: powers and table lookups for every moment");
    void *device[] = {a.weights,
                      a.exp_avg,
                      a.exp_avg_sq,
                      a.coat.exp_avg_groups,
                      a.coat.exp_avg_sq_groups,
                      a.coat.tables,
                      amax,
                      (void *)a.gradients.bf16_data};
    for (void *p : device) bench_free(p);
    parameter_table_free(&t);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        check_powers();
        for (const char *preset : {"llama3.1-8b", "qwen2.5-0.5b", "qwen3-8b"})
            for (int kind = 0; kind < 16; kind++) {
                const Variant v = {(kind & 1) != 0, (kind & 2) != 0, (kind & 4) != 0, kind & 8 ? 1e-15 : 1e-8};
                check_steps(preset, v, 1 + kind % 3 + kind / 8);
            }
    }
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_model(&b, "llama3.1-8b", false);
        bench_model(&b, "llama3.1-8b", true);
        bench_model(&b, "llama3.2-1b", false);
        bench_destroy(&b);
    }
    return check_report();
}
