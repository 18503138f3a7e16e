// Checks that the kernels support the model and the options, whatever the GPU.
#ifndef LLMC_SUPPORTED_CUH
#define LLMC_SUPPORTED_CUH

#include "../config/precision.h"
#include "quantize.cuh"
#include "rmsnorm.cuh"

// Dies if SwiGLU's gradient would be cast with block scales (blockwise, mxfp8), but intermediate_size is not a multiple
// of CAST_TILE. With --fp8-filter auto, does nothing until the run has decided on a filter.
static inline void check_casts(const ModelConfig *m, const Options *o) {
    const Recipe *r = options_recipe(o);
    const ScaleGranularity gradient = recipe_granularity(r, TENSOR_DY, ROWWISE);
    if (gradient == NO_SCALE || usage_amaxes(gradient, 1) || m->intermediate_size % CAST_TILE == 0) return;
    ParameterTable table = parameter_table(m);
    Precision p = precision_plan(o, o->fp8_filter, m, &table, true);
    for (int64_t l = 0; l < p.num_layers && !p.filter_open; l++)
        if (recipe_is_fp8(precision_of(&p, l, GATE_UP_PROJ), GEMM_FPROP))
            die_with(
                EXIT_UNSUPPORTED,
                "model %s: intermediate_size = %lld is not a multiple of %d, as --fp8-recipe %s needs for the cast of "
                "SwiGLU's gradient; use another recipe, or --fp8-filter gate_up",
                m->name, (long long)m->intermediate_size, CAST_TILE, r->name);
    precision_free(&p);
    parameter_table_free(&table);
}

// Dies if gradients are kept in FP8 and this trainer does not support that with the other options.
static inline void check_fp8_gradients(const Options *o, int64_t world) {
    if (!options_fp8_gradients(o)) return;
    if (world > 1 && o->reduce_dtype == REDUCE_FP32)
        die_with(
            EXIT_UNSUPPORTED,
            "--grad-accum-dtype fp8 over several GPUs reduces gradients in bf16 or fp8; use --reduce-dtype bf16 or "
            "fp8, or the CPU trainer (train_fp8), which also reduces in fp32 before it casts");
    if (options_offloads_state(o))
        die_with(EXIT_UNSUPPORTED,
                 "--offload %s does not go with FP8 gradients (--grad-accum-dtype fp8 or --reduce-dtype fp8), whose "
                 "update takes vectors and matrices one after the other; leave out one of the two",
                 o->offload);
}

// Dies on models and options that this trainer does not support on any GPU.
static inline void check_supported(const ModelConfig *m, const Options *o, int64_t world, int64_t shard_size) {
    const struct {
        const char *name;
        int64_t value, multiple;
    } sizes[] = {{"hidden_size", m->hidden_size, 16}, {"intermediate_size", m->intermediate_size, 16}};
    if (o->precision == PRECISION_FP32)
        die_with(EXIT_UNSUPPORTED, "--precision fp32 runs only in the CPU trainer (train_fp8); use bf16 or fp8 here");
    if (o->master_weights == STORAGE_FP16 && o->optimizer_state != MOMENTS_MSAMP && o->optimizer_state != MOMENTS_FP32)
        die_with(EXIT_UNSUPPORTED,
                 "--master-weights fp16 on the GPU goes with --optimizer-state msamp or fp32; the CPU trainer "
                 "(train_fp8) supports the others too");
    if (options_offloads_state(o) && options_tensor_scales(o))
        die_with(EXIT_UNSUPPORTED,
                 "--offload %s does not go with --optimizer-state msamp or --master-weights fp16, whose update "
                 "reads weights and moments twice; use --optimizer-state coat-stochastic without FP16 master weights, "
                 "or leave --offload out",
                 o->offload);
    check_fp8_gradients(o, world);
    if (m->head_dim != 64 && m->head_dim != 128)
        die_with(EXIT_UNSUPPORTED,
                 "model %s: head_dim = %lld; attention on the GPU supports 64 and 128 (the CPU trainer, train_fp8, "
                 "supports this one too)",
                 m->name, (long long)m->head_dim);
    if (m->hidden_size > RMSNORM_MAX_C)
        die_with(EXIT_UNSUPPORTED, "model %s: hidden_size = %lld; RMSNorm on the GPU supports up to %d", m->name,
                 (long long)m->hidden_size, RMSNORM_MAX_C);
    for (int i = 0; i < 2; i++)
        if (sizes[i].value % sizes[i].multiple)
            die_with(EXIT_UNSUPPORTED, "model %s: %s = %lld is not a multiple of %lld, as kernels on the GPU need",
                     m->name, sizes[i].name, (long long)sizes[i].value, (long long)sizes[i].multiple);
    if (o->fp8_weight_cache == ON && shard_size > 1)
        die_with(EXIT_USAGE,
                 "--fp8-weight-cache on keeps the FP8 data of whole weights, but %lld ranks shard them here; leave it "
                 "off, or use --sharding none",
                 (long long)shard_size);
    check_casts(m, o);
}

#endif
