// Rules between options: combinations that both trainers refuse, with the reason and mostly a fix.
#ifndef LLMC_OPTIONS_RULES_H
#define LLMC_OPTIONS_RULES_H

#include "mix.h"
#include "weight_bound.h"

// The first option for FP8 that does not have its default; NULL if all have it. --fp8-all-gather off counts as default.
// Runs without FP8 refuse such an option.
static inline const OptionRow *options_stray_fp8(const Options *o) {
    const Options initial = options_default();
    for (const OptionRow *row = option_rows(); row->name; row++) {
        char now[4096], then[64];
        if (!option_is_fp8(row) || (row->field == offsetof(Options, fp8_all_gather) && o->fp8_all_gather == OFF))
            continue;
        option_format(o, row, now, sizeof now);
        option_format(&initial, row, then, sizeof then);
        if (strcmp(now, then) != 0) return row;
    }
    return NULL;
}

// Rules of --fp8-filter auto.
static inline void options_filter_conflict(const Options *o, char *message, size_t capacity) {
    if (strcmp(o->fp8_filter, "auto") != 0) return;
    if (o->fp8_emulate)
        format_checked(
            message, capacity,
            "--fp8-filter auto keeps in FP8 only layers that run faster in FP8, and with --fp8-emulate none does; "
            "name the layers that stay bf16, or leave out one of the two");
    else if (o->deterministic)
        format_checked(message, capacity,
                       "--fp8-filter auto depends on measured times, which differ from run to run, and --deterministic "
                       "promises the same bits; name the layers that stay bf16");
}

// Rules of --fp8-lm-head.
static inline void options_head_conflict(const Options *o, char *message, size_t capacity) {
    const Recipe *r = options_recipe(o);
    const bool e4m3 = o->fp8_format == FP8_FORMAT_AUTO ? r->dy_format == FP8_E4M3 : o->fp8_format == FP8_FORMAT_E4M3,
               blocks = granularity_traits(r->granularity[GEMM_DGRAD][1])->cols != WHOLE;
    if (o->fp8_lm_head != LM_HEAD_OFF && r->delayed)
        format_checked(message, capacity,
                       "--fp8-lm-head scales lm_head's tensors by current amaxes, and recipe delayed by past ones, of "
                       "which it has none for lm_head; use another --fp8-recipe, or --fp8-lm-head off");
    else if (o->fp8_lm_head == LM_HEAD_ALL && r->granularity[GEMM_WGRAD][1] == PER_ROW)
        format_checked(
            message, capacity,
            "--fp8-lm-head all: recipe %s would scale columns of a chunk of rows, and gradients would depend "
            "on its size; use --fp8-lm-head on with --fp8-format hybrid, or another --fp8-recipe",
            r->name);
    else if (o->fp8_lm_head > LM_HEAD_FORWARD && e4m3 && !blocks)
        format_checked(message, capacity,
                       "--fp8-lm-head: e4m3 with one scale for a row or tensor (recipe %s) rounds small probabilities "
                       "of a large vocabulary to 0; add --fp8-format hybrid, or use --fp8-lm-head forward",
                       r->name);
    else if (o->fp8_lm_head != LM_HEAD_OFF && strstr(o->fp8_filter, "lm_head"))
        format_checked(message, capacity,
                       "--fp8-filter: lm_head stays bf16, but --fp8-lm-head wants it in FP8; leave out one of them");
}

// Rules of recipe tensorwise_bounded.
static inline void options_bounded_conflict(const Options *o, char *message, size_t capacity) {
    const bool moments =
        o->optimizer_state == MOMENTS_AUTO || o->optimizer_state == MOMENTS_BF16 || o->optimizer_state == MOMENTS_FP32;
    const double least = o->beta1 * o->beta1 * weight_bound_growth(o);  // --beta2 must be above it
    Options fp32 = *o;
    fp32.optimizer_state = MOMENTS_FP32;
    if (!options_recipe(o)->bounded) return;
    if (!moments || options_fp16_weights(o))
        format_checked(message, capacity,
                       "--fp8-recipe tensorwise_bounded needs a bound on AdamW's step, which it has for bf16 and fp32 "
                       "moments and bf16 and fp32 weights; use these, or --fp8-recipe tensorwise");
    else if (!weight_bound_exists(o))
        format_checked(message, capacity,
                       "--fp8-recipe tensorwise_bounded: AdamW's step has no bound with --beta1 %g and --beta2 %g; it "
                       "has one if %s %.4g%s, or take --fp8-recipe tensorwise",
                       o->beta1, o->beta2, least < 1 ? "--beta2 is above" : "--beta1 is below",
                       least < 1 ? least : sqrt(o->beta2 / weight_bound_growth(o)),
                       weight_bound_exists(&fp32) ? ", or with --optimizer-state fp32" : "");
    else if (o->eps < WEIGHT_BOUND_LEAST_EPS)
        format_checked(message, capacity,
                       "--fp8-recipe tensorwise_bounded needs --eps of at least %g, not %g: rounded moments that are "
                       "smaller still have no bound",
                       WEIGHT_BOUND_LEAST_EPS, o->eps);
}

// Rules of --precision fp8.
static inline void options_fp8_conflict(const Options *o, char *message, size_t capacity) {
    const Options initial = options_default();
    const Recipe *recipe = options_recipe(o);
    int64_t length = o->sequence_length;
    while (o->batch_size * length % recipe->multiple) length++;
    if (length != o->sequence_length)
        format_checked(message, capacity,
                       "--precision fp8 (recipe %s) needs batch-size x sequence-length in multiples of %d (FP8 GEMMs), "
                       "not %lld x %lld; --sequence-length %lld would do",
                       recipe->name, recipe->multiple, (long long)o->batch_size, (long long)o->sequence_length,
                       (long long)length);
    else if (o->fp8_all_gather == ON && !recipe_has_tensor_scales(recipe))
        format_checked(message, capacity,
                       "--fp8-all-gather on: recipe %s has one scale for each row or block of a weight, so weights "
                       "are gathered in bf16; leave it at auto",
                       recipe->name);
    else if (o->fp8_activations == ON && (o->recompute == RECOMPUTE_MLP || o->recompute == RECOMPUTE_LAYER))
        format_checked(
            message, capacity,
            "--fp8-activations on: with --recompute %s backward computes gate and up again, so that there is "
            "nothing to keep in FP8; leave out one of the two",
            o->recompute == RECOMPUTE_MLP ? "mlp" : "layer");
    else if (o->fp8_fast_accum == FAST_ACCUM_ALL && !recipe->fast_accum)
        format_checked(message, capacity,
                       "--fp8-fast-accum all: the GEMMs of recipe %s have no fast accumulation; use none",
                       recipe->name);
    else if (!recipe->delayed && o->fp8_amax_history != initial.fp8_amax_history)
        format_checked(message, capacity,
                       "--fp8-amax-history %lld is for --fp8-recipe delayed; recipe %s scales by current amaxes",
                       (long long)o->fp8_amax_history, recipe->name);
    else if (!recipe->delayed && o->fp8_margin != initial.fp8_margin)
        format_checked(
            message, capacity,
            "--fp8-margin %lld is for --fp8-recipe delayed; recipe %s scales by current amaxes and needs none",
            (long long)o->fp8_margin, recipe->name);
    else options_filter_conflict(o, message, capacity);
    if (!*message) options_bounded_conflict(o, message, capacity);
}

// Rules of --sharding, --shard-size, --copy-engines, --world-size, --network-gbps and --step-ms.
static inline void options_rank_conflict(const Options *o, char *message, size_t capacity) {
    const bool alone = o->sharding == SHARDING_NONE || (o->sharding == SHARDING_HYBRID && o->shard_size == 1);
    if (o->sharding == SHARDING_HYBRID && !o->shard_size && o->world_size)
        format_checked(message, capacity,
                       "--world-size with --sharding hybrid needs --shard-size, the number of ranks that share one "
                       "replica of the model; with --world-size it has no default");
    else if (o->sharding != SHARDING_HYBRID && o->shard_size)
        format_checked(message, capacity, "--shard-size is for --sharding hybrid");
    else if (o->copy_engines == ON && alone)
        format_checked(message, capacity,
                       "--copy-engines on: with --sharding none, or hybrid with --shard-size 1, no weights are "
                       "gathered, and copy engines do not reduce gradients over replicas; leave it at auto");
    else if (o->world_size && !o->dry_run)
        format_checked(message, capacity, "--world-size is for --dry-run; a run has the ranks that were started");
    else if ((o->network_gbps > 0 || o->step_ms > 0) && !o->dry_run)
        format_checked(message, capacity, "--%s is for --dry-run, which estimates the time of a step; leave it out",
                       o->network_gbps > 0 ? "network-gbps" : "step-ms");
}

// Rules of --optimizer-in-backward.
static inline void options_backward_conflict(const Options *o, char *message, size_t capacity) {
    if (!o->optimizer_in_backward) return;
    if (o->on_nonfinite == NONFINITE_SKIP)
        format_checked(
            message, capacity,
            "--optimizer-in-backward updates the last layer before the gradient of the first layer is computed, and "
            "--on-nonfinite skip must know that all gradients are finite before it changes a weight; "
            "leave out one of the two");
    else if (o->grad_accumulation_steps > 1)
        format_checked(message, capacity,
                       "--optimizer-in-backward keeps no gradients from one micro-step to the next; use "
                       "--grad-accumulation-steps 1, and a larger --batch-size or more ranks");
    else if (options_fp8_gradients(o))
        format_checked(message, capacity,
                       "--optimizer-in-backward keeps the gradients of one or two layers only, so FP8 would save "
                       "little memory; use %s",
                       o->grad_accum_dtype == SUM_FP8 ? "--grad-accum-dtype bf16 and --reduce-dtype bf16"
                                                      : "--reduce-dtype bf16");
}

// Rules of the learning rate's schedule.
static inline void options_schedule_conflict(const Options *o, char *message, size_t capacity) {
    if (o->learning_rate < 0 && o->learning_rate != -1)
        format_checked(message, capacity, "--learning-rate %g is below 0; -1 lets the run choose it", o->learning_rate);
    else if (o->warmup_steps > o->num_steps)
        format_checked(message, capacity, "--warmup-steps %lld is more than --num-steps %lld",
                       (long long)o->warmup_steps, (long long)o->num_steps);
    else if (o->decay_steps && o->lr_schedule != SCHEDULE_WSD)
        format_checked(message, capacity,
                       "--decay-steps is for --lr-schedule wsd; cosine and linear fall from the end of warm-up on");
    else if (o->decay_steps > o->num_steps - o->warmup_steps)
        format_checked(message, capacity,
                       "--decay-steps %lld is more than the %lld steps that follow warm-up (--num-steps %lld, "
                       "--warmup-steps %lld)",
                       (long long)o->decay_steps, (long long)(o->num_steps - o->warmup_steps), (long long)o->num_steps,
                       (long long)o->warmup_steps);
    else if (o->min_lr_ratio > 0 && o->lr_schedule == SCHEDULE_CONSTANT &&
             (o->learning_rate >= 0 || options_give(o, "lr-schedule")))
        format_checked(message, capacity,
                       "--min-lr-ratio is the end of --lr-schedule cosine, linear or wsd, and a constant rate does not "
                       "fall; add one of these or leave it out");
}

// Rules of --grad-accum-dtype and --reduce-dtype.
static inline void options_gradient_conflict(const Options *o, char *message, size_t capacity) {
    if (o->precision == PRECISION_FP32 && o->grad_accum_dtype != SUM_AUTO && o->grad_accum_dtype != SUM_FP32)
        format_checked(message, capacity,
                       "--precision fp32 adds up gradients in fp32; leave --grad-accum-dtype at auto");
    else if (o->precision == PRECISION_FP32 && o->reduce_dtype == REDUCE_FP8)
        format_checked(message, capacity, "--precision fp32 reduces gradients in fp32; leave out --reduce-dtype fp8");
    else if (o->reduce_dtype == REDUCE_FP8 && !options_fp8_gradients(o))
        format_checked(message, capacity,
                       "--reduce-dtype fp8 sums FP8 gradients, but with --grad-accum-dtype %s they are not FP8; leave "
                       "--grad-accum-dtype at auto, or use --reduce-dtype bf16",
                       o->grad_accum_dtype == SUM_FP32 ? "fp32" : "bf16");
}

// Rules of --offload.
static inline void options_offload_conflict(const Options *o, char *message, size_t capacity) {
    Offloaded out;
    const char *unknown = options_read_offload(o->offload, &out);
    const bool fp32 =
        o->master_weights == STORAGE_FP32 || (o->master_weights == STORAGE_AUTO && o->precision == PRECISION_FP32);
    if (unknown)
        format_checked(message, capacity,
                       "--offload: \"%.*s\" is not moments, master or activations; \"none\" must stand alone",
                       (int)strcspn(unknown, ", "), unknown);
    else if (out.master && !fp32)
        format_checked(message, capacity,
                       "--offload master keeps fp32 master weights in host memory, and this run has none: add "
                       "--master-weights fp32, or leave master out");
}

// Checks the value of --document-mask.
static inline void options_mask_conflict(const Options *o, char *message, size_t capacity) {
    const char *mask = o->document_mask;
    const size_t digits = strspn(mask, "0123456789");
    if (options_masks_documents(o) && strcmp(mask, "on") != 0 && (!digits || digits > 8 || mask[digits]))
        format_checked(message, capacity, "--document-mask: \"%s\" is neither on, off nor the id of a token", mask);
}

// Rules of --precision fp32, and of options for FP8 without --precision fp8.
static inline void options_precision_conflict(const Options *o, char *message, size_t capacity) {
    const OptionRow *stray = o->precision == PRECISION_FP8 ? NULL : options_stray_fp8(o);
    const bool fp32_state = (o->master_weights == STORAGE_AUTO || o->master_weights == STORAGE_FP32) &&
                            (o->optimizer_state == MOMENTS_AUTO || o->optimizer_state == MOMENTS_FP32);
    if (o->precision == PRECISION_FP32 && !fp32_state)
        format_checked(message, capacity,
                       "--precision fp32 keeps weights and optimizer state in fp32; leave --master-weights and "
                       "--optimizer-state at auto");
    else if (stray)
        format_checked(
            message, capacity,
            "--%s is for --precision fp8, and this run is --precision %s; add --precision fp8 or leave --%s out",
            stray->name, o->precision == PRECISION_FP32 ? "fp32" : "bf16", stray->name);
}

// Sets --grad-accumulation-steps by --tokens-per-step. `given`: the command line has --grad-accumulation-steps too.
// Returns `message`: "" if there is such a number of micro-steps, else the reason and what would do.
static inline const char *options_set_accumulation(Options *o, int64_t world, bool given, char *message,
                                                   size_t capacity) {
    const int64_t micro = world * o->batch_size * o->sequence_length, steps = o->tokens_per_step / micro;
    char lower[64] = "";
    message[0] = 0;
    if (!o->tokens_per_step) return message;
    if (steps) format_checked(lower, sizeof lower, "%lld or ", (long long)(steps * micro));
    if (o->tokens_per_step % micro)
        format_checked(message, capacity,
                       "--tokens-per-step %lld is no multiple of the %lld tokens of a micro-step (%lld ranks x "
                       "--batch-size %lld x --sequence-length %lld); %s%lld would do",
                       (long long)o->tokens_per_step, (long long)micro, (long long)world, (long long)o->batch_size,
                       (long long)o->sequence_length, lower, (long long)((steps + 1) * micro));
    else if (steps > ACCUMULATION_MAX)
        format_checked(message, capacity, "--tokens-per-step %lld needs %lld micro-steps, more than %d; give fewer",
                       (long long)o->tokens_per_step, (long long)steps, ACCUMULATION_MAX);
    else if (given && o->grad_accumulation_steps != steps)
        format_checked(
            message, capacity,
            "--tokens-per-step %lld needs --grad-accumulation-steps %lld here, not %lld; leave one of the two out",
            (long long)o->tokens_per_step, (long long)steps, (long long)o->grad_accumulation_steps);
    else o->grad_accumulation_steps = steps;
    return message;
}

// Rules of --replay-every.
static inline void options_replay_conflict(const Options *o, char *message, size_t capacity) {
    if (!o->deterministic)
        format_checked(message, capacity, "--replay-every needs --deterministic: without it a replay has other bits");
    else if (o->sharding == SHARDING_NONE || o->sharding == SHARDING_HYBRID)
        format_checked(message, capacity,
                       "--replay-every compares ranks of one shard group; use --sharding full or grad_op");
    else if (o->optimizer_in_backward)
        format_checked(message, capacity,
                       "--replay-every needs the weights that a step began with, and --optimizer-in-backward changes "
                       "them within it; leave out one of the two");
}

// Rules of --generate and --evaluate. use_set_options asks for them, before it changes options.
static inline void options_use_conflict(const Options *o, char *message, size_t capacity) {
    const char *name = *o->generate ? "generate" : "evaluate";
    const char *other = *o->generate && *o->evaluate  ? "evaluate"
                        : o->dry_run                  ? "dry-run"
                        : *o->log_dir && *o->generate ? "log-dir"
                        : *o->export_hf               ? "export-hf"
                        : *o->branch                  ? "branch"
                        : *o->val_data                ? "val-data"
                        : *o->mix                     ? "mix"
                                                      : NULL;
    if (!options_uses_model(o)) return;
    if (other) format_checked(message, capacity, "--%s does nothing else; leave --%s out", name, other);
    else if (*o->checkpoint_dir && !o->resume)
        format_checked(message, capacity, "--%s saves nothing; add --resume to take the newest checkpoint in %s", name,
                       o->checkpoint_dir);
}

// Adds to a message about options which of them a shorthand has set: the command line may not name them.
static inline void options_tell_shorthands(const Options *o, char *message, size_t capacity) {
    for (const ShorthandRow *s = shorthand_rows(); *message && s->shorthand; s++) {
        char name[64], now[OPTION_TEXT_CAPACITY];
        format_checked(name, sizeof name, "--%s", s->option);
        option_format(o, option_find(s->option, strlen(s->option)), now, sizeof now);
        if (!shorthand_sets(o, s) || strcmp(now, s->value) != 0 || !strstr(message, name)) continue;
        const size_t n = strlen(message);
        format_checked(message + n, capacity - n, "; --%s sets %s %s: give another value after it, or leave it out",
                       s->shorthand, name, now);
    }
}

// Checks rules between options, before options_resolve. Returns `message`: "" if the rules hold, else the reason and
// mostly a fix.
static inline const char *options_conflict(const Options *o, char *message, size_t capacity) {
    message[0] = 0;
    options_schedule_conflict(o, message, capacity);
    if (*message) return message;
    const int64_t last_save = options_last_save(o);
    if (last_save && !*o->checkpoint_dir)
        format_checked(message, capacity, "--checkpoint-every needs --checkpoint-dir");
    else if (checkpoint_every(o).list && last_save > o->num_steps)
        format_checked(message, capacity, "--checkpoint-every names step %lld, after --num-steps %lld",
                       (long long)last_save, (long long)o->num_steps);
    else if (o->resume && !*o->checkpoint_dir)
        format_checked(message, capacity, "--resume needs --checkpoint-dir, the folder to continue from");
    else if (o->val_every && !*o->val_data) format_checked(message, capacity, "--val-every needs --val-data");
    else options_precision_conflict(o, message, capacity);
    if (!*message) options_gradient_conflict(o, message, capacity);
    if (!*message && o->receipt && !o->deterministic)
        format_checked(message, capacity, "--receipt needs --deterministic: without it a replay has other bits");
    if (!*message && o->replay_every) options_replay_conflict(o, message, capacity);
    if (!*message) options_rank_conflict(o, message, capacity);
    if (!*message) options_backward_conflict(o, message, capacity);
    if (!*message) options_offload_conflict(o, message, capacity);
    if (!*message) options_mask_conflict(o, message, capacity);
    if (!*message && *o->mix) mix_read(o->mix);  // dies if it is wrong
    if (!*message && *o->mix && options_give(o, "train-data"))
        format_checked(message, capacity, "--mix names all training data; leave out --train-data");
    if (!*message && o->json && !o->dry_run)
        format_checked(message, capacity, "--json is for --dry-run; a run writes log.jsonl to --log-dir");
    if (!*message && o->precision == PRECISION_FP8) options_fp8_conflict(o, message, capacity);
    if (!*message) options_head_conflict(o, message, capacity);
    options_tell_shorthands(o, message, capacity);
    return message;
}

#endif
