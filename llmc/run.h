// What both trainers print, save and export, in the same words.
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include "run_setup.h"
#include "stop.h"

// The settings, and what follows from them, before any work. Scripts read these lines from --dry-run: a name, and its value in the next word.
static inline void run_print(const RunSetup *s, const Options *o, const Comm *c, const ParameterTable *t, const ShardPlan *plan, const Precision *p) {
    options_print(o);
    printf("%-26s %lld\n", "parameters", (long long)t->num_parameters);
    printf("%-26s %lld\n", "checkpoint_bytes", (long long)run_setup_checkpoint_bytes(t, o));
    printf("%-26s %lld\n", "vocab_size", (long long)s->model.vocab_size);
    printf("%-26s %.0f\n", "model_flops_per_token", flops_total(flops_per_token(t, &s->model, o->sequence_length, p)));
    if (s->train.num_shards)
        printf("%-26s %lld tokens, %lld sequences in %lld shards\n", "training data", (long long)s->train.num_tokens, (long long)s->train.num_sequences, (long long)s->train.num_shards);
    if (c->world == 1) return;
    printf("%-26s %lld, of which %lld share one copy of the model; %lld cop%s\n", "ranks", (long long)c->world, (long long)c->group, (long long)c->replicas, c->replicas == 1 ? "y" : "ies");
    printf("%-26s %lld x %lld sequences of %lld tokens\n", "global batch", (long long)c->world, (long long)(o->batch_size * o->grad_accumulation_steps), (long long)o->sequence_length);
    printf("%-26s %lld elements, each unit's padding included\n", "shard of a rank", (long long)plan->total);
}

// Saves a checkpoint in --checkpoint-dir. Dies if that fails.
static inline void run_save(RunSetup *s, const Options *o, const TrainerProgress *progress, const ParameterTable *t, const TrainerState *state) {
    const CheckpointRun run = run_setup_checkpoint(s, o);
    Failure failure;
    if (!checkpoint_save(o->checkpoint_dir, o->keep_checkpoints, progress, &run, t, state, &failure)) die("%s", failure.text);
    printf("saved checkpoint after step %lld in %s\n", (long long)progress->step, o->checkpoint_dir);
}

// Loads weights and optimizer state of the checkpoint, or the weights of the model's folder; false if there are neither.
static inline bool run_load(const RunSetup *s, const ParameterTable *t, const TrainerState *state) {
    if (*s->checkpoint) checkpoint_load(s->checkpoint, &s->model, t, state);
    else if (s->load_weights) model_load_weights(s->model_folder, &s->model, t, state);
    return *s->checkpoint || s->load_weights;
}

// After the last step: says after which one a signal (0: none) ended the run early, or exports the weights if that is asked for. Dies if it fails.
static inline void run_end(const RunSetup *s, const Options *o, int stop, int64_t steps_done, const ParameterTable *t, const TrainerState *state) {
    Failure failure;
    if (stop && steps_done < o->num_steps) return stop_print(o, stop, steps_done);
    if (!*o->export_hf) return;
    if (!model_export_hf(o->export_hf, &s->model, t, state, s->model_folder, &failure)) die("%s", failure.text);
    printf("exported the weights to %s\n", o->export_hf);
}

#endif
