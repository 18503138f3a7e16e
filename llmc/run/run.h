// Prints the settings of a dry run, saves and loads checkpoints, exports the weights and ends a run, for both trainers.
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include "plan_json.h"
#include "stop.h"

// Prints the settings of a dry run and the sizes that follow from them. For people: programs read --dry-run --json.
static inline void run_print(const RunSetup *s, const Options *o, const Comm *c, const ParameterTable *t,
                             const ShardPlan *plan, const Precision *p) {
    options_print(o);
    printf("%-26s %lld\n", "parameters", (long long)t->num_parameters);
    printf("%-26s %lld\n", "checkpoint-bytes", (long long)run_setup_checkpoint_bytes(t, o));
    printf("%-26s %lld\n", "vocab-size", (long long)s->model.vocab_size);
    printf("%-26s %.0f\n", "model-flops-per-token", flops_total(flops_per_token(t, &s->model, o->sequence_length, p)));
    if (s->train.num_shards)
        printf("%-26s %lld tokens, %lld sequences in %lld shards\n", "training data", (long long)s->train.num_tokens,
               (long long)s->train.num_sequences, (long long)s->train.num_shards);
    if (c->world == 1) return;
    printf("%-26s %lld: %lld replica%s of %lld\n", "ranks", (long long)c->world, (long long)c->replicas,
           c->replicas == 1 ? "" : "s", (long long)c->shard_size);
    printf("%-26s %lld x %lld sequences of %lld tokens\n", "global batch", (long long)c->world,
           (long long)(o->batch_size * o->grad_accumulation_steps), (long long)o->sequence_length);
    printf("%-26s %lld elements, padding included\n", "shard of a rank", (long long)plan->total);
}

// Reports a failed save, which took `seconds`, on stderr and in the log. `next`: the end of the message on stderr.
static inline void run_warn_of_save(Logger *log, const TrainerState *state, int64_t step, double seconds,
                                    const Failure *failure, const char *next) {
    if (checkpoint_is_leader(state->comm)) warn("%s; %s", failure->text, next);
    logger_save(log, step, seconds, failure->text);
}

// Saves a checkpoint in --checkpoint-dir. `last`: this is the run's last save. Retries a failed save once. If the retry
// fails too, the run goes on to its next save; after the last save run_end dies. Dies at once if the save fails with
// --on-save-error stop, or because of a value that must not be saved (Failure.lasting). All ranks call, with equal
// results.
static inline void run_save(RunSetup *s, const Options *o, const TrainerProgress *progress, const ParameterTable *t,
                            const TrainerState *state, bool last, Logger *log) {
    const CheckpointRun run = run_setup_checkpoint(s, o);
    Failure *failure = &s->save_failure;
    activity_phase(PHASE_SAVING, progress->step);
    s->save_failed = true;
    double start = seconds_now();
    for (int attempt = 0; attempt < 2 && s->save_failed; attempt++) {
        s->save_failed = !checkpoint_save(o->checkpoint_dir, o->keep_checkpoints, progress, &run, t, state, failure);
        if (s->save_failed && failure->lasting) die_with(EXIT_NONFINITE, "%s", failure->text);
        if (s->save_failed && o->on_save_error == SAVE_ERROR_STOP) die("%s", failure->text);
        if (!s->save_failed || attempt > 0) continue;
        run_warn_of_save(log, state, progress->step, seconds_now() - start, failure, "the save is tried again");
        start = seconds_now();
    }
    if (!s->save_failed) {
        s->saved_step = progress->step;
        logger_save(log, progress->step, seconds_now() - start, NULL);
        printf("saved checkpoint after step %lld in %s\n", (long long)progress->step, o->checkpoint_dir);
        return;
    }
    char next[256], since[64] = "all steps";
    if (s->saved_step) format_checked(since, sizeof since, "the steps after step %lld", (long long)s->saved_step);
    format_checked(next, sizeof next, "the second try failed too. Still unsaved: %s%s", since,
                   last ? "" : "; the run goes on, and tries again at its next save");
    run_warn_of_save(log, state, progress->step, seconds_now() - start, failure, next);
}

// Loads the weights and optimizer state of the checkpoint, or the weights of the model's folder. False if the run has
// neither.
static inline bool run_load(const RunSetup *s, const ParameterTable *t, const TrainerState *state) {
    if (*s->checkpoint || s->load_weights) activity_phase(PHASE_LOADING, s->start.step);
    TrainerState loaded = *state;
    if (s->fresh_scales) loaded.delayed_tensors = 0;
    if (*s->checkpoint) checkpoint_load(s->checkpoint, &s->model, t, &loaded);
    else if (s->load_weights) model_load_weights(s->model_folder, &s->model, t, state);
    return *s->checkpoint || s->load_weights;
}

// Prints where the export is, and which tokenizer it has, or how it gets one.
static inline void run_print_export(const RunSetup *s, const Options *o) {
    char repository[128];
    printf("exported the weights to %s", o->export_hf);
    if (tokenizer_is_known(&s->tokenizer_files)) printf(", with the tokenizer of %s\n", s->tokenizer_files.folder);
    else if (s->tokenizer_files.data[TOKENIZER_TABLE])
        printf(", without a tokenizer for transformers: copy the tokenizer.json that made the shards there; for bytes, "
               "llama3 and qwen data/export_tokenizer.py %s makes it\n",
               o->export_hf);
    else if (s->model_folder || !model_config_repository(s->model.name, repository, sizeof repository))
        printf(", without a tokenizer: none is %s; if there is one, copy its tokenizer.json there\n",
               s->model_folder ? "in MODEL's folder" : "beside the shards");
    else
        printf(", without a tokenizer: none is beside the shards; if they were made with that of %s, copy its "
               "tokenizer.json and tokenizer_config.json there\n",
               repository);
}

// Exports the weights. Retries a failed export once, unless a retry cannot help (Failure.lasting). Dies on failure.
static inline void run_export(const RunSetup *s, const Options *o, int64_t steps_done, const ParameterTable *t,
                              const TrainerState *state) {
    Failure failure;
    activity_phase(PHASE_EXPORT, steps_done);
    bool ok = model_export_hf(o->export_hf, &s->model, t, state, &s->tokenizer_files, &failure);
    if (!ok && !failure.lasting) {
        if (checkpoint_is_leader(state->comm)) warn("%s; the export is tried again", failure.text);
        ok = model_export_hf(o->export_hf, &s->model, t, state, &s->tokenizer_files, &failure);
    }
    if (!ok) die("%s", failure.text);
    run_print_export(s, o);
    activity_phase(PHASE_END, steps_done);
}

// Ends a run after its last step. If a signal (stop; 0: none) stopped the run before --num-steps, exports nothing, and
// prints the signal unless the last save failed. Else exports the weights with --export-hf. Dies if the export fails,
// and after it if the last save failed.
static inline void run_end(const RunSetup *s, const Options *o, int stop, int64_t steps_done, const ParameterTable *t,
                           const TrainerState *state) {
    const bool early = stop && steps_done < o->num_steps;
    activity_phase(PHASE_END, steps_done);
    if (early && !s->save_failed) return stop_print(o, stop, steps_done);
    if (!early && *o->export_hf) run_export(s, o, steps_done, t, state);
    if (s->save_failed && s->saved_step)
        die("%s. No other save follows: no checkpoint has the steps after step %lld, and --resume continues from there",
            s->save_failure.text, (long long)s->saved_step);
    if (s->save_failed) die("%s. No other save follows: no checkpoint has a step of this run", s->save_failure.text);
}

#endif
