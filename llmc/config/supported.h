// Answers whether a trainer can run a model with a set of options, and if not, why not: the one place that all ask, the
// start of a run, the advice of "does not fit", --recompute auto and --fp8-filter auto.
#ifndef LLMC_SUPPORTED_H
#define LLMC_SUPPORTED_H

#include "options_rules.h"
#include "precision.h"

typedef enum { CPU_TRAINER, GPU_TRAINER } TrainerKind;

// Limits of kernels: the tile of casts with block scales, and the largest hidden_size of RMSNorm.
enum { SUPPORTED_CAST_TILE = 128, SUPPORTED_NORM_COLUMNS = 16384 };

// Writes the reason if SwiGLU's gradient would be cast with block scales (blockwise, mxfp8), but intermediate_size is
// not a multiple of the tile. With --fp8-filter auto, says nothing until the run has decided on a filter.
static inline void supported_casts(const ModelConfig *m, const Options *o, char *message, size_t capacity) {
    const Recipe *r = options_recipe(o);
    const ScaleGranularity gradient = recipe_granularity(r, TENSOR_DY, ROWWISE);
    if (gradient == NO_SCALE || usage_amaxes(gradient, 1) || m->intermediate_size % SUPPORTED_CAST_TILE == 0) return;
    ParameterTable table = parameter_table(m);
    Precision p = precision_plan(o, o->fp8_filter, m, &table, true);
    for (int64_t l = 0; l < p.num_layers && !p.filter_open && !*message; l++)
        if (recipe_is_fp8(precision_of(&p, l, GATE_UP_PROJ), GEMM_FPROP))
            format_checked(
                message, capacity,
                "model %s: intermediate_size = %lld is not a multiple of %d, as --fp8-recipe %s needs for the cast of "
                "SwiGLU's gradient; use another recipe, or --fp8-filter gate_up",
                m->name, (long long)m->intermediate_size, SUPPORTED_CAST_TILE, r->name);
    precision_free(&p);
    parameter_table_free(&table);
}

// Writes the reason if the rows of lm_head in memory, or its columns, do not fit the recipe's GEMMs (--fp8-lm-head).
static inline void supported_lm_head(const ModelConfig *m, const Options *o, char *message, size_t capacity) {
    const LinearShape s = {"lm_head", model_padded_vocabulary(m), m->hidden_size, 0};
    const Recipe *r = options_recipe(o);
    if (o->fp8_lm_head == LM_HEAD_OFF || linear_fits(&s, r)) return;
    format_checked(message, capacity,
                   "model %s: --fp8-lm-head: lm_head is [%lld, %lld], and --fp8-recipe %s needs multiples of %d; use "
                   "--fp8-lm-head off (the CPU trainer, train_fp8, takes any sizes)",
                   m->name, (long long)s.N, (long long)s.K, r->name, r->multiple);
}

// Writes the reason if the GPU trainer's kernels cannot run the model, whatever the GPU.
static inline void supported_gpu_model(const ModelConfig *m, char *message, size_t capacity) {
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {{"hidden_size", m->hidden_size}, {"intermediate_size", m->intermediate_size}};
    for (int i = 0; i < 2; i++)
        if (sizes[i].value % 16)
            format_checked(message, capacity, "model %s: %s = %lld is not a multiple of 16, as kernels on the GPU need",
                           m->name, sizes[i].name, (long long)sizes[i].value);
    if (m->hidden_size > SUPPORTED_NORM_COLUMNS)
        format_checked(message, capacity, "model %s: hidden_size = %lld; RMSNorm on the GPU supports up to %d", m->name,
                       (long long)m->hidden_size, SUPPORTED_NORM_COLUMNS);
    if (m->head_dim != 64 && m->head_dim != 128)
        format_checked(message, capacity,
                       "model %s: head_dim = %lld; attention on the GPU supports 64 and 128 (the CPU trainer, "
                       "train_fp8, supports this one too)",
                       m->name, (long long)m->head_dim);
}

// Writes the reason if the GPU trainer does not support the options or the model on any GPU.
static inline void supported_gpu(const ModelConfig *m, const Options *o, int64_t world, char *message,
                                 size_t capacity) {
    const bool fp8 = options_fp8_gradients(o);
    if (o->precision == PRECISION_FP32)
        format_checked(message, capacity,
                       "--precision fp32 runs only in the CPU trainer (train_fp8); use bf16 or fp8 here");
    else if (options_fp16_weights(o) && o->optimizer_state != MOMENTS_MSAMP && o->optimizer_state != MOMENTS_FP32)
        format_checked(message, capacity,
                       "--master-weights fp16 on the GPU goes with --optimizer-state msamp or fp32; the CPU trainer "
                       "(train_fp8) supports the others too");
    else if (options_offloads_state(o) && options_tensor_scales(o))
        format_checked(message, capacity,
                       "--offload %s does not go with --optimizer-state msamp or --master-weights fp16, whose update "
                       "reads weights and moments twice; use --optimizer-state coat-stochastic without FP16 master "
                       "weights, or leave --offload out",
                       o->offload);
    else if (options_offloads_state(o) && options_recipe(o)->bounded)
        format_checked(
            message, capacity,
            "--offload %s does not go with --fp8-recipe tensorwise_bounded, whose update writes FP8 weights; "
            "use --fp8-recipe tensorwise, or leave --offload out",
            o->offload);
    else if (fp8 && world > 1 && o->reduce_dtype == REDUCE_FP32)
        format_checked(
            message, capacity,
            "--grad-accum-dtype fp8 over several GPUs reduces gradients in bf16 or fp8; use --reduce-dtype bf16 or "
            "fp8, or the CPU trainer (train_fp8), which also reduces in fp32 before it casts");
    else if (fp8 && options_offloads_state(o))
        format_checked(message, capacity,
                       "--offload %s does not go with FP8 gradients (--grad-accum-dtype fp8 or --reduce-dtype fp8), "
                       "whose update takes vectors and matrices one after the other; leave out one of the two",
                       o->offload);
    else supported_gpu_model(m, message, capacity);
    if (!*message) supported_casts(m, o, message, capacity);
    if (!*message) supported_lm_head(m, o, message, capacity);
}

// Writes the reason if the CPU trainer does not support the options.
static inline void supported_cpu(const Options *o, char *message, size_t capacity) {
    static const char *const needs = "needs the GPU trainer (train_fp8cu)";
    if (strcmp(o->fp8_filter, "auto") == 0)
        format_checked(message, capacity,
                       "--fp8-filter auto times GEMMs on a GPU; on the CPU name the layers that stay bf16, or leave it "
                       "out");
    else if (o->profile) format_checked(message, capacity, "--profile %s; leave it out", needs);
    else if (o->copy_engines == ON)
        format_checked(message, capacity, "--copy-engines on %s: this one uses MPI or TCP; leave it out", needs);
    else if (options_offloads_state(o) || options_offloaded(o).activations)
        format_checked(message, capacity, "--offload %s %s: this one keeps everything in host memory; leave it out",
                       o->offload, needs);
}

// Returns 0 if the trainer can run the model with these options on `world` ranks, before or after options_resolve; else
// the exit status, and writes the reason, mostly with a fix, to `message`.
static inline int supported(TrainerKind kind, const ModelConfig *m, const Options *o, int64_t world, char *message,
                            size_t capacity) {
    if (*options_conflict(o, message, capacity)) return EXIT_USAGE;
    if (o->sharding == SHARDING_HYBRID && o->shard_size && world % o->shard_size) {
        format_checked(message, capacity, "--shard-size %lld does not divide the %lld ranks", (long long)o->shard_size,
                       (long long)world);
        return EXIT_USAGE;
    }
    if (o->replay_every && world == 1) {
        format_checked(message, capacity,
                       "--replay-every compares ranks, and there is one; start more, or leave it out");
        return EXIT_USAGE;
    }
    if (kind == GPU_TRAINER) supported_gpu(m, o, world, message, capacity);
    else supported_cpu(o, message, capacity);
    options_tell_shorthands(o, message, capacity);
    if (m->sliding_window && o->sequence_length > m->sliding_window)
        format_checked(message, capacity,
                       "model %s: each token attends to a window of %lld tokens (sliding_window), which only full "
                       "attention over --sequence-length %lld or less equals, not over %lld",
                       m->name, (long long)m->sliding_window, (long long)m->sliding_window,
                       (long long)o->sequence_length);
    return *message ? EXIT_UNSUPPORTED : 0;
}

// Dies if the trainer cannot run the model with these options.
static inline void supported_require(TrainerKind kind, const ModelConfig *m, const Options *o, int64_t world) {
    char message[768];
    const int status = supported(kind, m, o, world, message, sizeof message);
    if (status) die_with(status, "%s", message);
}

#endif
