// Says for each step its learning rate, and if an audit, validation, samples or a save belong to it.
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

#include "options.h"

// Learning rate of optimizer step `step`, counted from 0. Linear warm-up reaches --learning-rate at its last step.
// After warm-up, cosine and linear fall at step --num-steps to --min-lr-ratio of it. That is one after the last step,
// so that the last step has a rate above 0. wsd stays constant, then falls linearly to the same rate at the same step:
// over the last --decay-steps steps; if that is 0, over the last fifth of the steps (rounded down to whole steps), or
// from the end of warm-up if that is later.
static inline double schedule_learning_rate(const Options *o, int64_t step) {
    const double pi = 3.14159265358979323846;
    if (step < o->warmup_steps) return o->learning_rate * (double)(step + 1) / (double)o->warmup_steps;
    int64_t decay_start = o->warmup_steps;
    const int64_t decay_steps = o->decay_steps ? o->decay_steps : o->num_steps / 5;
    if (o->lr_schedule == SCHEDULE_WSD) decay_start = max_i64(o->warmup_steps, o->num_steps - decay_steps);
    if (o->lr_schedule == SCHEDULE_CONSTANT || step < decay_start) return o->learning_rate;
    if (step >= o->num_steps) return o->learning_rate * o->min_lr_ratio;
    const double progress = (double)(step - decay_start) / (double)(o->num_steps - decay_start),
                 share = o->lr_schedule == SCHEDULE_COSINE ? 0.5 * (1 + cos(pi * progress)) : 1 - progress;
    return o->learning_rate * (o->min_lr_ratio + (1 - o->min_lr_ratio) * share);
}

// True if an event that comes every `every` steps (0: never) comes after `steps_done` steps.
static inline bool is_due(int64_t every, int64_t steps_done) { return every && steps_done % every == 0; }

// True if --checkpoint-every asks for a save.
static inline bool schedule_saves(const Options *o, int64_t steps_done) {
    if (checkpoint_every(o).list) return options_names_save(o, steps_done);
    return is_due(options_last_save(o), steps_done);
}

// Events that belong to the step just done. Validation, samples and saves come after the step. They also come after the
// last step: validation with --val-data, samples with --sample-every, a save with --checkpoint-dir, and before a save a
// receipt with --receipt. An audit reads the
// step's casts while the step runs; the last step is audited only if its number is a multiple of --fp8-audit.
typedef struct {
    bool last, audit, receipt, validate, sample, save;
} Due;

static inline Due schedule_due(const Options *o, int64_t steps_done) {
    const bool last = steps_done == o->num_steps;
    const bool save = *o->checkpoint_dir && (last || schedule_saves(o, steps_done)),
               receipt = o->receipt && (last || save || is_due(o->receipt, steps_done));
    return (Due){last,
                 is_due(o->fp8_audit, steps_done),
                 receipt,
                 *o->val_data && (last || is_due(o->val_every, steps_done)),
                 o->sample_every && (last || is_due(o->sample_every, steps_done)),
                 save};
}

#endif
