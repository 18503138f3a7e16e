// Runs a trainer from the command line to its end: set-up, steps, and what happens between steps.
// Both trainers fill TrainerOps; everything around the model is here, in one order and in the same words.
#ifndef LLMC_TRAIN_H
#define LLMC_TRAIN_H

#include "../config/schedule.h"
#include "../dist/watch.h"
#include "audit_report.h"
#include "nonfinite.h"
#include "plan_json.h"
#include "run.h"
#include "sampler.h"

// Facts about a trainer that a run needs, once its sizes are known. Pointers stay valid as long as the trainer.
typedef struct {
    const ParameterTable *table;
    const Precision *precision;
    TrainerState state;
    Arena memory;             // the memory plan
    int64_t memory_overhead;  // bytes of GPU memory that the plan does not hold
    int64_t rows, head_rows;  // of the linear layers' GEMMs, and of lm_head's
} TrainerParts;

// A trainer's operations, in the order in which a run calls them. `t` is the trainer. All ranks call each of them,
// unless it says otherwise. An operation that may be NULL is left out.
typedef struct {
    const char *program;  // "train_fp8", "train_fp8cu"
    int64_t steps_ahead;  // steps that are started before the one before them is reported

    // Called in run_setup, and again when --fp8-filter auto is decided.
    CheckSupported check_supported;
    // Takes the rank's device. Not called by a dry run; may be NULL.
    void (*open_device)(const Options *o, const Comm *c);
    // Writes the --fp8-filter that is fastest here. Called by rank 0 alone; NULL if check_supported refuses auto.
    void (*find_filter)(const Options *o, const ModelConfig *m, char *filter, size_t capacity);
    // Sizes and the memory plan; takes no memory of the device. The trainer keeps the pointers.
    TrainerParts (*describe)(void *t, const Options *o, const ModelConfig *m, const Comm *c);
    void (*print_settings)(const void *t);         // lines after the settings; may be NULL
    void (*print_gemms)(const void *t);            // the table of what each GEMM runs in
    void (*create)(void *t, const Arena *memory);  // takes the memory that describe planned, and clears it
    void (*initialize)(void *t);                   // random weights, by --seed
    void (*weights_changed)(void *t);              // after initialize, or after TrainerState.write
    DeviceInfo (*device)(const Options *o);

    // Starts optimizer step `step` (counted from 0) on the samples from first_sample on. after_pause: the first step,
    // or something else ran since the step before.
    void (*start_step)(void *t, DataLoader *data, int64_t step, int64_t first_sample, bool after_pause);
    // Waits for the step. Sets loss, norm, seconds, memory and skipped; the same on all ranks.
    StepRecord (*finish_step)(void *t, int64_t step);
    // This rank's knowledge of a step that was skipped, after finish_step.
    NonfiniteStep (*nonfinite)(void *t, const StepRecord *s);
    // This rank's sums of the casts of the step started last, which --fp8-audit is due after.
    void (*read_audit)(void *t, AuditSums *sums);

    // The sum of losses of sequences: cleared; joined by those of the rank's first `rows` sequences of batch number
    // `batch`, divided by `tokens`; read, over all ranks.
    void (*clear_loss)(void *t);
    void (*add_loss)(void *t, DataLoader *data, int64_t batch, int64_t rows, int64_t tokens);
    double (*read_loss)(void *t);
    NextLogits next_logits;
    void (*settle)(void *t);  // waits for all that is started, and forgets what passes outside steps left; may be NULL
    void (*print_profile)(void *t, double peak_bf16);  // after the last step; may be NULL
    void (*destroy)(void *t);
} TrainerOps;

typedef struct {
    const TrainerOps *ops;
    void *trainer;
    Options options;
    Comm comm;
    RunSetup setup;
    TrainerParts parts;
    DeviceInfo device;
    Logger logger;
    int64_t skipped_in_a_row;
    AuditSums *step_audit, *audit;  // [audit_count] of one step, and of all audits; NULL: no --fp8-audit
} Run;

// ---- steps

// Sequences seen when `steps_done` steps are done. Counted from where the run was resumed: batch size and accumulation
// may differ from then on.
static inline int64_t run_samples_seen(const Run *run, int64_t steps_done) {
    const Options *o = &run->options;
    const int64_t per_step = o->grad_accumulation_steps * run->comm.world * o->batch_size;
    return run->setup.start.samples + (steps_done - run->setup.start.step) * per_step;
}

// Waits for step `step`, counted from 0, and prints its line. A step that was skipped is reported, and may end the run.
static inline StepRecord run_report_step(Run *run, int64_t step) {
    StepRecord s = run->ops->finish_step(run->trainer, step);
    s.step = step + 1;
    s.learning_rate = schedule_learning_rate(&run->options, step);
    run->skipped_in_a_row = s.skipped ? run->skipped_in_a_row + 1 : 0;
    if (s.skipped) {
        const NonfiniteStep what = run->ops->nonfinite(run->trainer, &s);
        nonfinite_report(&run->options, run->parts.table, &run->parts.state, &what, step, run->skipped_in_a_row);
    }
    logger_step(&run->logger, &s);
    return s;
}

static inline void run_settle(Run *run) {
    if (run->ops->settle) run->ops->settle(run->trainer);
}

// Mean loss of the first --val-steps sequences of the validation data. Ranks whose rows of the last batch are beyond
// them compute as the others do, and count nothing. NAN if a stop was requested meanwhile.
static inline double run_validate(Run *run) {
    const TrainerOps *ops = run->ops;
    const int64_t B = run->options.batch_size, T = run->options.sequence_length, world = run->comm.world,
                  sequences = min_i64(run->options.val_steps, run->setup.val.num_sequences);
    ops->clear_loss(run->trainer);
    for (int64_t i = 0; i * world * B < sequences; i++) {
        if (stop_requested(&run->comm)) {
            run_settle(run);
            return (double)NAN;
        }
        const int64_t first = dataloader_sample_index(0, i, world, run->comm.rank, B);
        ops->add_loss(run->trainer, &run->setup.val, i, dataloader_rows_before(first, B, sequences), sequences * T);
    }
    return ops->read_loss(run->trainer);
}

// The audit of the step done last, of all ranks, to the log and to the sums of the run.
static inline void run_report_audit(Run *run, int64_t done) {
    run->ops->read_audit(run->trainer, run->step_audit);
    audit_finish(&run->comm, &run->logger, done, run->step_audit, run->audit, run->parts.precision);
}

// Does everything that is due after `done` steps. `stop`: the signal that ends the run here, 0: none. Returns that
// signal, or one that has come meanwhile.
static inline int run_between_steps(Run *run, int64_t done, Due due, int stop) {
    const Options *o = &run->options;
    const Comm *c = &run->comm;
    if (due.audit) run_report_audit(run, done);
    if (!stop && due.validate) {
        activity_phase(PHASE_VALIDATION, done);
        const double loss = run_validate(run);
        stop = stop_requested(c);
        if (!isnan(loss) || !stop) logger_validation(&run->logger, done, loss);
    }
    if (!stop && due.sample)
        sampler_print(o, c, &run->setup.model, &run->setup.tokenizer, done, run->ops->next_logits, run->trainer);
    run_settle(run);
    if (!stop) stop = stop_requested(c);
    if (due.save || (stop && *o->checkpoint_dir)) {
        const TrainerProgress progress = {done, run_samples_seen(run, done)};
        run_save(&run->setup, o, &progress, run->parts.table, &run->parts.state, due.last || stop, &run->logger);
    }
    return stop;
}

// Steps until --num-steps or a stop signal. Returns how many are done, and in *stop that signal, 0 for none.
static inline int64_t run_steps(Run *run, int *stop) {
    const Options *o = &run->options;
    const TrainerOps *ops = run->ops;
    int64_t done = run->setup.start.step, reported = done;
    bool after_pause = true;
    *stop = stop_requested(&run->comm);
    while (done < o->num_steps && !*stop) {
        activity_phase(PHASE_TRAINING, done + 1);
        ops->start_step(run->trainer, &run->setup.train, done, run_samples_seen(run, done), after_pause);
        const Due due = schedule_due(o, ++done);
        *stop = stop_requested(&run->comm);
        // A GPU never waits for the host: the line of a step is printed while the next one runs. Before anything else
        // happens, all lines are.
        const bool pause = *stop || due.last || due.audit || due.validate || due.sample || due.save;
        while (reported < (pause ? done : done - ops->steps_ahead)) run_report_step(run, reported++);
        if (pause) *stop = run_between_steps(run, done, due, *stop);
        after_pause = pause;
    }
    return done;
}

// ---- from the command line to the first step

// --fp8-filter auto becomes what rank 0 finds to be fastest, unless the checkpoint of a resumed run says it.
static inline void run_find_filter(Run *run, int64_t shard_size) {
    Options *o = &run->options;
    RunSetup *s = &run->setup;
    if (strcmp(o->fp8_filter, "auto") == 0) {
        if (run->comm.rank == 0) run->ops->find_filter(o, &s->model, s->fp8_filter, sizeof s->fp8_filter);
        comm_broadcast(&run->comm, COMM_WORLD, 0, s->fp8_filter, sizeof s->fp8_filter);
        run_setup_decide_filter(s, o);
    }
    if (!s->filter_decided) return;
    const char *words = *o->fp8_filter ? "the same as --fp8-filter " : "nothing stays bf16";
    printf("--fp8-filter auto: %s%s\n", words, o->fp8_filter);
    run->ops->check_supported(&s->model, o, shard_size);
}

// Reads and checks everything that options name. Then, but for a dry run, takes the device, and finds out what must be
// known before anything is planned: the checkpoint to continue from, and what --fp8-filter auto stands for.
static inline void run_begin(Run *run, int argc, char **argv) {
    char presets[1024];
    Options *o = &run->options;
    Comm *c = &run->comm;
    process_prepare();
    *c = comm_open(&argc, &argv);
    *o = options_parse(argc, argv);
    watch_open(c, o->stall_timeout);
    output_survive(o);
    run_setup_same_options(c, o, run->ops->program);
    model_config_preset_names(presets, sizeof presets);
    options_require_model(o, argc, argv, presets);
    run->setup = run_setup(o, c, run->ops->check_supported);
    if (o->world_size) comm_assume(c, o->world_size);
    const int64_t shard_size = options_shard_group(o, c->world);
    comm_split(c, shard_size);
    if (o->dry_run) return;
    if (run->ops->open_device) run->ops->open_device(o, c);
    run_setup_resume(&run->setup, o, c);
    run_setup_check_room(&run->setup, o, c);
    run_find_filter(run, shard_size);
}

// The memory plan, and the settings in print.
static inline void run_plan(Run *run) {
    const TrainerOps *ops = run->ops;
    TrainerParts *p = &run->parts;
    *p = ops->describe(run->trainer, &run->options, &run->setup.model, &run->comm);
    const PlanFacts facts = {ops->program, &run->setup, &run->options,      &run->comm, p->table,
                             p->precision, &p->memory,  p->memory_overhead, p->rows,    p->head_rows};
    if (run->options.json) return plan_json_print(&facts);
    run_print(&run->setup, &run->options, &run->comm, p->table, p->state.plan, p->precision);
    if (ops->print_settings) ops->print_settings(run->trainer);
    arena_print_plan(&p->memory, p->memory_overhead);
}

// The trainer with the weights that the first step starts from, and the log.
static inline void run_create(Run *run) {
    const TrainerOps *ops = run->ops;
    const TrainerParts *p = &run->parts;
    DeviceInfo *d = &run->device;
    stop_catch();
    ops->create(run->trainer, &p->memory);
    ops->print_gemms(run->trainer);
    if (!run_load(&run->setup, p->table, &p->state)) ops->initialize(run->trainer);
    comm_barrier(&run->comm, COMM_WORLD);  // some take long to read: the others wait here, not in a kernel of NCCL
    ops->weights_changed(run->trainer);
    *d = ops->device(&run->options);
    const RunInfo info = {ops->program,  d->name, d->versions, run->comm.world, d->peak_bf16, run->setup.start.step > 0,
                          p->memory.used};
    run->logger = logger_open(&run->options, &run->setup.model, p->table, p->precision, info);
    if (run->options.fp8_audit) {
        const size_t count = (size_t)audit_count(p->precision);
        run->step_audit = (AuditSums *)xcalloc(count, sizeof *run->step_audit);
        run->audit = (AuditSums *)xcalloc(count, sizeof *run->audit);
    }
    printf("\n%s, %s\n", d->name, d->versions);
    fflush(stdout);
}

// The tables and the summary at the end of the run, and its export.
static inline void run_close(Run *run, int64_t steps_done, int stop) {
    const TrainerParts *p = &run->parts;
    if (run->audit) audit_print_table(run->audit, p->precision);
    if (run->ops->print_profile) run->ops->print_profile(run->trainer, run->device.peak_bf16);
    logger_close(&run->logger);
    run_end(&run->setup, &run->options, stop, steps_done, p->table, &p->state);
    run->ops->destroy(run->trainer);
    free(run->step_audit);
    free(run->audit);
}

// All of a trainer's main. A dry run ends when the plan is printed.
static inline int run_trainer(int argc, char **argv, const TrainerOps *ops, void *trainer) {
    Run run;
    int stop;
    memset(&run, 0, sizeof run);
    run.ops = ops, run.trainer = trainer;
    run_begin(&run, argc, argv);
    run_plan(&run);
    if (run.options.dry_run) {
        if (!run.options.json) ops->print_gemms(trainer);
    } else {
        run_create(&run);
        const int64_t steps_done = run_steps(&run, &stop);
        run_close(&run, steps_done, stop);
    }
    run_setup_close(&run.setup);
    watch_close();
    comm_close(&run.comm);
    return EXIT_SUCCESS;
}

#endif
