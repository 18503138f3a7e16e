// Runs a trainer from the command line to its end: set-up, steps, and what happens between steps.
// Each trainer fills TrainerOps with its operations, which this file calls.
#ifndef LLMC_TRAIN_H
#define LLMC_TRAIN_H

#include "../config/schedule.h"
#include "../ranks/check_links.h"
#include "../ranks/watch.h"
#include "../reference/rounding.h"
#include "audit_report.h"
#include "evaluate.h"
#include "memory_fit.h"
#include "nonfinite.h"
#include "plan_json.h"
#include "receipt_report.h"
#include "run.h"
#include "slow_ranks.h"
#include "sampler.h"
#include "start.h"

// Facts about a trainer that a run needs, after describe. Pointers are valid as long as the trainer.
typedef struct {
    const ParameterTable *table;
    const Precision *precision;
    TrainerState state;
    Arena memory;             // the memory plan
    int64_t memory_overhead;  // bytes of GPU memory outside the plan
    int64_t rows, head_rows;  // rows of activations in the linear layers' GEMMs, and in lm_head's
} TrainerParts;

// A trainer's operations, about in the order in which a run calls them. `t` is the trainer. All ranks call each
// operation, except where a comment says otherwise.
typedef struct {
    const char *program;  // "train_fp8", "train_fp8cu"
    int64_t steps_ahead;  // how many later steps may start before a step is reported

    TrainerKind kind;
    // Opens the rank's device. Not called by a dry run; may be NULL.
    void (*open_device)(const Options *o, const Comm *c);
    // Writes the fastest --fp8-filter on this device, with shard_size ranks per replica. Rank 0 alone calls; NULL if
    // supported() refuses auto.
    void (*find_filter)(const Options *o, const ModelConfig *m, int64_t shard_size, char *filter, size_t capacity);
    // Computes sizes and the memory plan; takes no device memory. Its arguments must live as long as the trainer.
    TrainerParts (*describe)(void *t, const Options *o, const ModelConfig *m, const Comm *c);
    MemoryNeeded memory_needed;
    // Returns the bytes of memory that this rank may take, after open_device. The run's memory_needed must not exceed
    // them.
    int64_t (*memory_available)(const Comm *c);
    // Only a dry run calls these two. print_settings prints settings of this trainer; may be NULL. print_gemms prints
    // the GEMM table.
    void (*print_settings)(const void *t);
    void (*print_gemms)(const void *t);
    // Takes the memory that describe planned, and makes it ready: zeros, except tables and scales. Prints at most 3
    // lines (start.h).
    void (*create)(void *t, const Arena *memory);
    // Returns what --check-links needs. Called after create, only with --check-links. The measurements find and leave
    // weights and gradients zero.
    LinkOps (*links)(void *t);
    void (*initialize)(void *t);       // random weights, by --seed
    void (*weights_changed)(void *t);  // after initialize, or after TrainerState.write
    DeviceInfo (*device)(const Options *o);

    // Starts optimizer step `step` (counted from 0) on the samples from first_sample on. after_pause: the first step,
    // or something else ran since the step before. skipped: how many of the steps before it were skipped; unless
    // after_pause, the last steps_ahead of them have not been reported, and do not count yet.
    void (*start_step)(void *t, DataLoader *data, int64_t step, int64_t skipped, int64_t first_sample,
                       bool after_pause);
    // Waits for the step. Sets loss, norm and skipped, equal on all ranks, this rank's seconds and times, and memory.
    StepRecord (*finish_step)(void *t, int64_t step);
    // Returns what this rank knows of a step that was not taken, after finish_step.
    NonfiniteStep (*nonfinite)(void *t, const StepRecord *s);
    // Reads this rank's audit sums of the latest step. Called only if --fp8-audit was due in it.
    void (*read_audit)(void *t, AuditSums *sums);

    // Runs the forward pass on this rank's part of batch number `batch`. Returns the loss of each token [B][T].
    TokenLosses token_losses;
    NextLogits next_logits;
    // Waits for all started work. May also drop delayed scales that validation or samples made (train_fp8.cu). May be
    // NULL.
    void (*settle)(void *t);
    // Prints the profile of the last step, if there is one, and adds its rows to a JSON array. May be NULL.
    void (*print_profile)(void *t, double peak_bf16, JsonText *parts);
    void (*destroy)(void *t);
} TrainerOps;

typedef struct {
    const TrainerOps *ops;
    void *trainer;
    double began;            // seconds_now() at the start of the process
    Options given, options;  // as the command line gives them, and with their `auto` values replaced step by step
    Comm comm;
    RunSetup setup;
    TrainerParts parts;
    DeviceInfo device;
    Logger logger;
    GpuMonitor monitor;
    // Energy counter of this rank's GPU: before the first step; and at the latest report of a step or, if that came
    // later, at the end of the latest pause.
    double joules_at_first_step, joules_at_step;
    GpuReading *gpus;  // [world] the latest readings of all ranks' GPUs
    int64_t skipped_in_a_row;
    JsonText links;  // the report of --check-links
    Receipts receipts;
    SlowRank slow;
    AuditSums *step_audit, *audit;  // [audit_count] sums of one step, and of all audits; NULL: no --fp8-audit
} Run;

// ---- steps

// Returns the number of sequences that all ranks together have seen after `steps_done` steps. The checkpoint that the
// run continues from says how many came before it: ranks, batch size and accumulation may have been different then.
static inline int64_t run_samples_seen(const Run *run, int64_t steps_done) {
    const Options *o = &run->options;
    const int64_t per_step = o->grad_accumulation_steps * run->comm.world * o->batch_size;
    return run->setup.start.samples + (steps_done - run->setup.start.step) * per_step;
}

// Returns how many steps were skipped, of those that the checkpoint counts and those that this process has reported.
static inline int64_t run_skipped(const Run *run) { return run->setup.start.skipped + run->logger.skipped; }

// Each rank sends this about a step to all ranks.
typedef struct {
    StepTimes times;
    GpuReading gpu;
    double joules;  // that the rank's GPU used in this step
} RankStep;

// Warns if this rank has been slow for a while. ranks: [world] what the ranks sent about the step.
static inline void run_watch_speed(Run *run, const RankStep *ranks) {
    const Comm *c = &run->comm;
    const RankStep *own = &ranks[c->rank];
    double *values = (double *)xcalloc((size_t)c->world, sizeof *values);
    for (int64_t r = 0; r < c->world; r++) values[r] = slow_rank_work(&ranks[r].times);
    if (slow_rank_count(&run->slow, slow_rank_work(&own->times), slow_rank_median(values, c->world))) {
        for (int64_t r = 0; r < c->world; r++) values[r] = ranks[r].gpu.sm_mhz;
        slow_rank_warn(&run->slow, c->rank, c->host, &own->gpu, slow_rank_median(values, c->world));
    }
    free(values);
}

// Replaces the parts of the step's time by their mean over all ranks. Sets the readings of all GPUs and the sum of
// their energy.
static inline void run_gather_step(Run *run, StepRecord *s) {
    const int64_t world = run->comm.world;
    RankStep *ranks = (RankStep *)xcalloc((size_t)world, sizeof *ranks), *own = &ranks[run->comm.rank];
    own->times = s->times, own->gpu = gpu_monitor_read(&run->monitor);
    own->joules = own->gpu.joules - run->joules_at_step;
    run->joules_at_step = own->gpu.joules;
    comm_all_gather(&run->comm, COMM_WORLD, own, ranks, (int64_t)sizeof *own);
    run_watch_speed(run, ranks);
    bool present = true;
    memset(&s->times, 0, sizeof s->times);
    s->joules = 0;
    for (int64_t r = 0; r < world; r++) {
        for (int i = 0; i < NUM_STEP_TIMES; i++) s->times.seconds[i] += ranks[r].times.seconds[i] / (double)world;
        run->gpus[r] = ranks[r].gpu;
        s->joules += ranks[r].joules;
        present = present && ranks[r].gpu.present;
    }
    s->gpus = present ? run->gpus : NULL;
    if (!present) s->joules = (double)NAN;
    free(ranks);
}

// Waits for step `step`, counted from 0, and logs it. First reports it if its norm is not accepted: that may end the
// run.
static inline StepRecord run_report_step(Run *run, int64_t step) {
    StepRecord s = run->ops->finish_step(run->trainer, step);
    s.step = step + 1;
    s.learning_rate = schedule_learning_rate(&run->options, step);
    run_gather_step(run, &s);
    run->skipped_in_a_row = s.skipped ? run->skipped_in_a_row + 1 : 0;
    if (s.skipped) {
        const NonfiniteStep what = run->ops->nonfinite(run->trainer, &s);
        nonfinite_report(&run->options, run->parts.table, &run->parts.state, &what, step, run->skipped_in_a_row);
    }
    logger_step(&run->logger, &s);
    return s;
}

// Returns how many targets count in a step, over all micro-steps and ranks. Every rank counts all, without
// communication. If none counts, warns and returns 1: then the step's loss and gradient are 0, not NaN.
static inline int64_t step_targets(const Options *o, const Comm *c, DataLoader *data, int64_t step,
                                   int64_t first_sample) {
    const int64_t sequences = o->grad_accumulation_steps * c->world * o->batch_size,
                  counted = dataloader_counted(data, first_sample, sequences);
    if (!counted && c->rank == 0)
        warn("step %lld: all targets of its %lld sequences are context, so its loss and gradient are 0; larger batches "
             "or longer sequences avoid this",
             (long long)step + 1, (long long)sequences);
    return max_i64(1, counted);
}

// Computes the loss of each of the `sequences` validation sequences into losses [sequences], equal on all ranks: its
// sum divided by the mean number of targets that count in a sequence. So their mean is the mean over these targets.
// Some ranks may have fewer sequences than others in the last batch, or none: they compute a whole batch all the same.
// `losses` must be zero at first. Returns false if a stop was requested meanwhile.
static inline bool run_validation_losses(Run *run, int64_t sequences, double *losses) {
    const int64_t B = run->options.batch_size, T = run->options.sequence_length, world = run->comm.world;
    const double counted = (double)max_i64(1, dataloader_counted(&run->setup.val, 0, sequences)) / (double)sequences;
    for (int64_t i = 0; i * world * B < sequences; i++) {
        if (stop_requested(&run->comm)) return false;
        const int64_t first = dataloader_sample_index(0, i, world, run->comm.rank, B),
                      own = dataloader_rows_before(first, B, sequences);
        const float *tokens = run->ops->token_losses(run->trainer, &run->setup.val, i);
        for (int64_t s = 0; s < own; s++) losses[first + s] = array_sum(tokens + s * T, T) / counted;
    }
    comm_sum(&run->comm, COMM_WORLD, losses, sequences);  // one rank has each loss; the others have 0 there
    return true;
}

// Validates on --val-steps sequences, or on all if there are fewer, and logs their losses. Returns a stop
// signal that came meanwhile, or 0. A validation that a signal interrupts is not logged.
static inline int run_validate(Run *run, int64_t done) {
    const int64_t sequences = run->setup.val.spread;
    const double start = seconds_now();
    double *losses = (double *)xcalloc((size_t)sequences, sizeof *losses);
    activity_phase(PHASE_VALIDATION, done);
    if (run_validation_losses(run, sequences, losses))
        logger_validation(&run->logger, done, losses, sequences, seconds_now() - start);
    free(losses);
    return stop_requested(&run->comm);
}

// Adds the audit of the latest step, over all ranks, to the log and to the sums of the run.
static inline void run_report_audit(Run *run, int64_t done) {
    const Precision *p = run->parts.precision;
    run->ops->read_audit(run->trainer, run->step_audit);
    audit_reduce(&run->comm, run->step_audit, audit_count(p));
    audit_log(&run->logger, done, run->step_audit, p);
    audit_merge_all(run->audit, run->step_audit, audit_count(p));
}

// Reports the audit, validates, samples and saves, as `due` says, after `done` steps. `stop`: the signal that ends the
// run here; 0: none. After a signal, also one that comes meanwhile, this function starts no validation and no sample,
// but saves if --checkpoint-dir is given. Returns the signal, or 0.
static inline int run_between_steps(Run *run, int64_t done, Due due, int stop) {
    const Options *o = &run->options;
    const Comm *c = &run->comm;
    if (due.audit) run_report_audit(run, done);
    if (due.receipt || (stop && o->receipt)) receipt_take(&run->receipts, done, run_samples_seen(run, done));
    if (!stop && due.validate) stop = run_validate(run, done);
    if (!stop && due.sample) {
        const double start = seconds_now();
        sampler_print(o, c, &run->setup.model, &run->setup.tokenizer,
                      separator_of(o, &run->setup.tokenizer, &run->setup.model), done, run->ops->next_logits,
                      run->trainer);
        run->logger.times.sampling += seconds_now() - start;
    }
    if (run->ops->settle) run->ops->settle(run->trainer);
    if (!stop) stop = stop_requested(c);
    if (stop) logger_print_line(&run->logger);
    if (due.save || (stop && *o->checkpoint_dir)) {
        const TrainerProgress progress = {done, run_samples_seen(run, done), run_skipped(run)};
        run_save(&run->setup, o, &progress, run->parts.table, &run->parts.state, due.last || stop, &run->logger);
    }
    return stop;
}

// Trains until --num-steps or a stop signal. Returns how many steps are done, with those before a --resume. *stop: the
// signal (stop_requested), 0 for none.
static inline int64_t run_steps(Run *run, int *stop) {
    const Options *o = &run->options;
    const TrainerOps *ops = run->ops;
    int64_t done = run->setup.start.step, reported = done;
    bool after_pause = true;
    *stop = stop_requested(&run->comm);
    run->logger.times.start = seconds_now() - run->logger.times.began;
    run->joules_at_first_step = gpu_monitor_read(&run->monitor).joules;
    while (done < o->num_steps && !*stop) {
        activity_phase(PHASE_TRAINING, done + 1);
        if (after_pause) run->joules_at_step = gpu_monitor_read(&run->monitor).joules;
        ops->start_step(run->trainer, &run->setup.train, done, run_skipped(run), run_samples_seen(run, done),
                        after_pause);
        const Due due = schedule_due(o, ++done);
        *stop = stop_requested(&run->comm);
        // On the GPU, a step is reported while the next step runs, so that the GPU does not wait for the host. Before a
        // pause, all steps are reported.
        const bool pause = *stop || due.last || due.audit || due.receipt || due.validate || due.sample || due.save;
        for (; reported < (pause ? done : done - ops->steps_ahead); reported++) run_report_step(run, reported);
        if (pause) *stop = run_between_steps(run, done, due, *stop);
        after_pause = pause;
    }
    return done;
}

// Does what --generate or --evaluate asks for.
static inline void run_use(Run *run) {
    RunSetup *s = &run->setup;
    const Options *o = &run->options;
    if (*o->evaluate)
        evaluation_run(o, &run->comm, &s->val, &s->tokenizer, run->ops->token_losses, run->trainer, &run->logger);
    else
        sampler_generate(o, &run->comm, &s->model, &s->tokenizer, s->prompt, s->prompt_length, run->ops->next_logits,
                         run->trainer);
}

// ---- from the command line to the first step

// Replaces --fp8-filter auto by the fastest filter, which rank 0 finds. (In a run that continues from a checkpoint,
// run_setup_resume has replaced it already.) Then checks the options with the new filter.
static inline void run_find_filter(Run *run) {
    Options *o = &run->options;
    RunSetup *s = &run->setup;
    if (strcmp(o->fp8_filter, "auto") == 0) {
        if (run->comm.rank == 0)
            run->ops->find_filter(o, &s->model, run->comm.shard_size, s->fp8_filter, sizeof s->fp8_filter);
        comm_broadcast(&run->comm, COMM_WORLD, 0, s->fp8_filter, sizeof s->fp8_filter);
        run_setup_decide_filter(s, o);
    }
    if (s->filter_decided) supported_require(run->ops->kind, &s->model, o, run->comm.world);
}

static inline void run_set_accumulation(Run *run) {
    Options *o = &run->options;
    char message[512];
    const bool given = options_give(o, "grad-accumulation-steps");
    const int64_t world = o->world_size ? o->world_size : run->comm.world;
    if (*options_set_accumulation(o, world, given, message, sizeof message)) die_with(EXIT_USAGE, "%s", message);
}

// Joins the other ranks, reads the command line, and sets up the run (run_setup). Unless it is a dry run, also opens
// the device, finds the checkpoint to continue from, and resolves --fp8-filter auto.
static inline void run_begin(Run *run, int argc, char **argv) {
    char presets[1024];
    Options *o = &run->options;
    Comm *c = &run->comm;
    *c = comm_open(&argc, &argv);
    *o = run->given = options_parse(argc, argv);
    watch_open(c, o->stall_timeout);
    output_survive(o);
    run_setup_same_options(c, o, run->ops->program);
    model_config_preset_names(presets, sizeof presets);
    options_require_model(o, argc, argv, presets);
    run_set_accumulation(run);
    use_set_options(o, c);
    run->setup = run_setup(o, c, run->ops->kind);
    if (o->world_size) comm_assume(c, o->world_size);
    comm_split(c, options_shard_group(o, c->world));
    if (o->dry_run) return;
    start_print_model(&run->setup, run->ops->program);
    if (*o->val_data)
        printf("validation: %lld of %lld sequences\n", (long long)run->setup.val.spread,
               (long long)run->setup.val.num_sequences);
    start_print_weights(&run->setup, o);
    if (run->ops->open_device) run->ops->open_device(o, c);
    run->device = run->ops->device(o);
    run_setup_resume(&run->setup, o, c);
    run_setup_check_room(&run->setup, o, c);
    run_find_filter(run);
}

static inline PlanFacts run_plan_facts(const Run *run) {
    const TrainerParts *p = &run->parts;
    return (PlanFacts){run->ops->program, &run->setup,  &run->options,       &run->comm,
                       p->table,          p->precision, &p->memory,          p->memory_overhead,
                       p->rows,           p->head_rows, p->state.plan->total};
}

// Prints the whole plan of a dry run: settings, memory, GEMMs and traffic. With --json, prints it as JSON.
static inline void run_print_plan(const Run *run) {
    const TrainerOps *ops = run->ops;
    const TrainerParts *p = &run->parts;
    const PlanFacts facts = run_plan_facts(run);
    if (run->options.json) return plan_json_print(&facts);
    start_print_learning(&run->setup, &run->options, &run->comm);
    run_print(&run->setup, &run->options, &run->comm, p->table, p->state.plan, p->precision);
    if (ops->print_settings) ops->print_settings(run->trainer);
    arena_print_plan(&p->memory, p->memory_overhead);
    ops->print_gemms(run->trainer);
    const TrafficFacts traffic = plan_traffic(&facts);
    traffic_print(&traffic);
}

// Prints device, ranks, data, recipe, options and memory of a run, in a few lines (start.h).
static inline void run_print_start(const Run *run) {
    const Options *o = &run->options;
    start_print_device(&run->device);
    start_print_ranks(o, &run->comm);
    start_print_data(&run->setup, o, &run->comm);
    if (!options_uses_model(o)) start_print_learning(&run->setup, o, &run->comm);
    start_print_recipe(o, run->parts.precision);
    start_print_sums(o);
    if (o->deterministic) printf("%-*s the same %s\n", START_LABEL, "bits", start_same_bits(o, &run->comm));
    const StartOptions options = {o, &run->given, &run->comm};
    start_print_options(&options, false);
    if (!options_uses_model(o)) start_print_options(&options, true);
    start_print_memory(&run->parts.memory, run->parts.memory_overhead);
    fflush(stdout);
}

// Adds where the run comes from: the stretches before it, the sequences that they have read, the checkpoint that it
// branches from, and which settings of the checkpoint that it continues from differ from its own.
static inline void run_add_branches(JsonText *out, const RunSetup *s) {
    json_text_add(out, ", \"first_sample\": %lld, \"branches\": ", (long long)s->start.samples);
    lineage_json(out, &s->lineage);
    if (s->branches) logger_add_text(out, "branched_from", s->checkpoint);
    if (s->told.size) json_text_add(out, ", \"checkpoint_settings\": {%s}", s->told.data);
}

// Opens the log. Its settings record holds what --dry-run --json says of data, sizes, memory and GEMMs
// (plan_json_derived), and the host's name.
static inline Logger run_open_log(const Run *run) {
    const TrainerParts *p = &run->parts;
    const DeviceInfo *d = &run->device;
    const PlanFacts facts = run_plan_facts(run);
    JsonText plan = {NULL, 0, 0};
    plan_json_derived(&plan, &facts);
    logger_add_text(&plan, "host", run->comm.host);
    if (run->options.deterministic) logger_add_text(&plan, "same_bits", start_same_bits(&run->options, &run->comm));
    run_add_branches(&plan, &run->setup);
    const RunInfo info = {run->ops->program, d->name,      d->versions,
                          run->comm.world,   d->peak_bf16, run->setup.start.step > 0 && !run->setup.branches,
                          p->memory.used,    plan.data};
    Logger logger = logger_open(&run->options, &run->setup.model, p->table, p->precision, info);
    json_text_free(&plan);
    logger.run.plan = NULL;
    return logger;
}

// With --check-links: measures, and prints the report. Keeps the report for the log, which is not open yet. The trainer
// must have no weights yet.
static inline void run_check_links(Run *run) {
    if (!run->options.check_links) return;
    const LinkOps links = run->ops->links(run->trainer);
    LinkReport report = links_measure(&links, &run->comm);
    links_print(&report, &links, &run->comm);
    links_json(&run->links, &report, &links, &run->comm);
    link_report_free(&report);
    links.close(links.context);
}

// Makes the trainer, with the weights that the first step starts from, and the log. From now on signals ask the run to
// stop (stop.h).
static inline void run_create(Run *run) {
    const TrainerOps *ops = run->ops;
    const TrainerParts *p = &run->parts;
    stop_catch();
    ops->create(run->trainer, &p->memory);
    run_check_links(run);
    if (!run_load(&run->setup, p->table, &p->state)) ops->initialize(run->trainer);
    comm_barrier(&run->comm, COMM_WORLD);  // ranks that have read wait here, not in an NCCL kernel
    ops->weights_changed(run->trainer);
    run->logger = run_open_log(run);
    run->logger.times.began = run->began;
    if (run->links.size) {
        JsonText line = logger_begin("links");
        json_text_add(&line, ", %s", run->links.data);
        logger_write(&run->logger, &line);
    }
    json_text_free(&run->links);
    gpu_monitor_open(&run->monitor, run->device.pci_bus_id);
    run->gpus = (GpuReading *)xcalloc((size_t)run->comm.world, sizeof *run->gpus);
    run->receipts = (Receipts){p->table, &p->state, &run->logger, 0, false};
    if (run->options.receipt) receipt_take(&run->receipts, run->setup.start.step, run->setup.start.samples);
    if (run->options.fp8_audit) {
        const size_t count = (size_t)audit_count(p->precision);
        run->step_audit = (AuditSums *)xcalloc(count, sizeof *run->step_audit);
        run->audit = (AuditSums *)xcalloc(count, sizeof *run->audit);
    }
    printf("\n");
    fflush(stdout);
}

// Returns the energy of all GPUs since the first step; NAN if a GPU does not report it.
static inline double run_joules(Run *run) {
    const GpuReading r = gpu_monitor_read(&run->monitor);
    double joules = r.present ? r.joules - run->joules_at_first_step : (double)NAN;
    comm_sum(&run->comm, COMM_WORLD, &joules, 1);
    return joules;
}

// Prints the tables and the summary at the end of the run, ends it (run_end), and frees the trainer.
static inline void run_close(Run *run, int64_t steps_done, int stop) {
    const TrainerParts *p = &run->parts;
    if (run->audit) audit_print_table(run->audit, p->precision);
    JsonText profile = {NULL, 0, 0};
    if (run->ops->print_profile) run->ops->print_profile(run->trainer, run->device.peak_bf16, &profile);
    if (profile.size) logger_profile(&run->logger, steps_done, profile.data);
    json_text_free(&profile);
    run->logger.run_joules = run_joules(run);
    gpu_monitor_close(&run->monitor);
    logger_close(&run->logger);
    run_end(&run->setup, &run->options, stop, steps_done, p->table, &p->state);
    run->ops->destroy(run->trainer);
    free(run->gpus);
    free(run->step_audit);
    free(run->audit);
}

// With --recompute auto: replaces auto by the first choice that the other options allow and that fits on all ranks, or
// by the last that they allow if none fits. A dry run without --memory-limit dies, because it does not know how much
// memory there is.
static inline void run_choose_recompute(Run *run) {
    Options *o = &run->options;
    const Comm *c = &run->comm;
    if (o->recompute != RECOMPUTE_AUTO) return;
    if (o->dry_run && o->memory_limit == 0)
        die_with(EXIT_USAGE, "--recompute auto: a dry run does not know how much memory there is; give --memory-limit");
    const double available = o->memory_limit > 0 ? o->memory_limit * 1073741824 : (double)run->ops->memory_available(c);
    const MemoryFit fit = {o, &run->setup.model, c, run->ops->kind, run->ops->memory_needed, (int64_t)available, true};
    const int mine = memory_fit_recompute(&fit);
    o->recompute = o->dry_run ? mine : -(int)comm_min(c, COMM_WORLD, -(double)mine);
}

// Dies if the run needs more than --memory-limit.
static inline void run_check_limit(const Run *run) {
    const Options *o = &run->options;
    const int64_t limit = (int64_t)(o->memory_limit * 1073741824);
    const MemoryFit fit = {o, &run->setup.model, &run->comm, run->ops->kind, run->ops->memory_needed, limit, true};
    if (o->memory_limit > 0)
        memory_fit_require(&fit, run->parts.memory.used + run->parts.memory_overhead, "--memory-limit is");
}

// Runs a trainer: the whole of its main. A dry run ends when it has printed the plan.
static inline int run_trainer(int argc, char **argv, const TrainerOps *ops, void *trainer) {
    static Run run;  // not on the stack, which process_prepare has not checked yet
    int stop = 0;
    process_prepare();
    run.began = seconds_now();
    run.ops = ops, run.trainer = trainer;
    run_begin(&run, argc, argv);
    run_choose_recompute(&run);
    run.parts = ops->describe(trainer, &run.options, &run.setup.model, &run.comm);
    run_check_limit(&run);
    if (run.options.dry_run) {
        run_print_plan(&run);
    } else {
        run_print_start(&run);
        run_create(&run);
        const bool uses = options_uses_model(&run.options);
        if (uses) run_use(&run);
        const int64_t steps_done = uses ? 0 : run_steps(&run, &stop);
        run_close(&run, steps_done, stop);
    }
    run_setup_close(&run.setup);
    watch_close();
    comm_close(&run.comm);
    return EXIT_SUCCESS;
}

#endif
