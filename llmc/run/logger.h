// Writes the records of log.jsonl, and prints the lines of steps and validations and the summary.
// A run that continues from a checkpoint appends to the file, with a settings record of its own. Any other run first
// renames an earlier file. logger_open and logger_step_aside have the exceptions.
#ifndef LLMC_LOGGER_H
#define LLMC_LOGGER_H

#include "../config/flops.h"
#include "../base/json.h"
#include "../base/file_io.h"
#include "../config/options.h"
#include "../ranks/gpu_monitor.h"
#include "goodput.h"

#define TRAINER_VERSION "0.2"

// A name of the trainers' sources, which the Makefile makes.
#ifndef TRAINER_BUILD
#define TRAINER_BUILD "unknown"
#endif

// The summary's speed and joules per token leave out this many first steps of the process, in which clocks and caches
// settle. With fewer than twice as many steps, they leave out half of the steps, rounded down.
#define SUMMARY_WARMUP_STEPS 10
#define SUMMARY_ENERGY_SETTLE_SECONDS 2.0  // an H200's energy counter lags by 0.5 s, its power is the mean of 1 s

// The summary's last loss is the mean over this many last steps of the process that were taken, or over all of these if
// there are fewer: one batch is noisy.
#define SUMMARY_LOSS_STEPS 20

// The summary says that the run diverged if its last loss is above one of these limits. A uniform guess has the loss
// ln(vocabulary), a new model at most a few tenths more. From its lowest mean over SUMMARY_LOSS_STEPS steps, or its
// first loss, a loss rises by less than this through noise: the first loss is that of one batch.
#define DIVERGED_ABOVE_UNIFORM 1.0
#define DIVERGED_TIMES_LOWEST 1.5
#define DIVERGED_ABOVE_LOWEST 1.0

// Facts about a run that its options do not say.
typedef struct {
    const char *program;   // "train_fp8", "train_fp8cu"
    const char *device;    // GPU's name, or "CPU, 2 threads"
    const char *versions;  // CUDA and its libraries, or the CPU's compiler, as free text
    int64_t world_size;    // number of ranks
    double peak_bf16;      // dense FLOP/s of one GPU; 0: unknown, mfu and sol are n/a
    bool resumed;          // the run continues from a checkpoint
    int64_t memory_plan;   // bytes of a rank, without those of CUDA and the libraries
    const char *plan;      // more members of the settings record, as JSON, each after a comma; NULL: none
} RunInfo;

typedef struct {
    int64_t step;       // steps done: 1 after the first
    double loss, norm;  // mean loss over the step's tokens; global gradient norm before clipping
    double learning_rate;
    double seconds;          // time of the whole step
    int64_t memory;          // GPU: bytes in use after the first step, measured once; CPU: peak of the largest process
    bool skipped;            // loss or gradient norm was not finite, or the norm too large (adamw_takes)
    StepTimes times;         // parts of `seconds` on this rank; when the step is logged, their means over all ranks
    const GpuReading *gpus;  // [world_size] readings at the time of logging; NULL: not all GPUs can be read
    double joules;           // energy of all GPUs in this step; NAN: not known
} StepRecord;

typedef struct {
    FILE *file;  // unbuffered, open for appending; NULL: this rank has no log, or the log was closed after an error
    char path[PATH_CAPACITY];
    int64_t end;      // bytes of the whole lines in it
    bool lines_lost;  // some lines could not be written
    RunInfo run;
    TokenFlops flops;
    int64_t num_steps, tokens_per_step;
    int64_t log_every;           // steps between printed lines; 0, 1: every step has one
    char unprinted[512];         // the line of the latest step if it was not printed, else ""
    double *seconds, *joules;    // one for each step of this process
    double *losses;              // one for each of these steps that was taken
    double uniform_loss;         // ln(vocabulary)
    double lowest_loss, window;  // the first loss, or a lower mean of SUMMARY_LOSS_STEPS; the sum of the next mean
    double run_joules;           // energy of all GPUs from this process's first step to its end; NAN: not known
    RunTimes times;
    int64_t count, capacity, skipped;
    int64_t memory;  // largest StepRecord.memory so far
} Logger;

// Begins a record of `type`. Members follow (logger_add), then logger_write.
static inline JsonText logger_begin(const char *type) {
    JsonText line = {NULL, 0, 0};
    json_text_add(&line, "{\"type\": \"%s\"", type);
    return line;
}

// Ends a record, writes its line, and frees it. On a full disk the log loses lines and the run goes on: a part of a
// line is cut off again, so that the next record has a line of its own. A file that cannot be cut (a pipe, a failing
// disk) is closed.
static inline void logger_write(Logger *l, JsonText *line) {
    json_text_add(line, "}\n");
    if (l->file && FILE_WORK("write", l->path, fwrite(line->data, 1, line->size, l->file)) == line->size) {
        l->end += (int64_t)line->size;
    } else if (l->file) {
        const int error = errno;
        const bool again = ftruncate(fileno(l->file), (off_t)l->end) == 0;
        if (!l->lines_lost || !again)
            warn("%s: cannot be written (%s); the run goes on without %s", l->path, strerror(error),
                 again ? "the lost lines" : "it");
        l->lines_lost = true;
        if (!again) fclose(l->file), l->file = NULL;
    }
    json_text_free(line);
}

// Appends a number; NaN and infinity, which JSON lacks, become null.
static inline void logger_append_real(JsonText *line, double value) {
    if (isfinite(value)) json_text_add_real(line, value);
    else json_text_add(line, "null");
}

// Adds a number, as logger_append_real writes it.
static inline void logger_add(JsonText *line, const char *key, double value) {
    json_text_add(line, ", \"%s\": ", key);
    logger_append_real(line, value);
}

// Adds n numbers as an array. Each is `stride` bytes behind the one before.
static inline void logger_add_array(JsonText *line, const char *key, const double *first, int64_t n, size_t stride) {
    json_text_add(line, ", \"%s\": [", key);
    for (int64_t i = 0; i < n; i++) {
        json_text_add(line, "%s", json_text_comma(line));
        logger_append_real(line, *(const double *)((const char *)first + (size_t)i * stride));
    }
    json_text_add(line, "]");
}

static inline void logger_add_int(JsonText *line, const char *key, int64_t value) {
    json_text_add(line, ", \"%s\": %lld", key, (long long)value);
}

static inline void logger_add_text(JsonText *line, const char *key, const char *value) {
    json_text_add(line, ", \"%s\": ", key);
    json_text_add_string(line, value);
}

// Adds the settings (option_is_setting) as an object with the key "settings": numbers as numbers, all others as text.
static inline void logger_add_settings(JsonText *line, const Options *o) {
    json_text_add(line, ", \"settings\": {");
    for (const OptionRow *row = option_rows(); row->name; row++) {
        char value[PATH_CAPACITY];
        if (!option_is_setting(row)) continue;
        option_format(o, row, value, sizeof value);
        json_text_add(line, "%s\"%s\": ", json_text_comma(line), row->name);
        if (row->kind == OPTION_INT || row->kind == OPTION_REAL) json_text_add(line, "%s", value);
        else json_text_add_string(line, value);
    }
    json_text_add(line, "}");
}

static inline void logger_write_settings(Logger *l, const Options *o, const ModelConfig *m, const ParameterTable *t,
                                         const Precision *p) {
    JsonText line = logger_begin("settings");
    logger_add_text(&line, "version", TRAINER_VERSION);
    logger_add_text(&line, "build", TRAINER_BUILD);
    logger_add_text(&line, "program", l->run.program);
    logger_add_text(&line, "versions", l->run.versions);
    logger_add_text(&line, "device", l->run.device);
    logger_add_int(&line, "world_size", l->run.world_size);
    logger_add_text(&line, "model", m->name);
    if (m->source) logger_add_text(&line, "model_folder", o->model);
    logger_add_int(&line, "parameters", t->num_parameters);
    logger_add_int(&line, "vocab_size", m->vocab_size);
    logger_add(&line, "model_flops_per_token", flops_total(l->flops));
    logger_add(&line, "peak_bf16_flops", l->run.peak_bf16 > 0 ? l->run.peak_bf16 : (double)NAN);
    logger_add_int(&line, "fp8_gemms", precision_fp8_gemms(p));
    logger_add_int(&line, "memory_plan_bytes", l->run.memory_plan);
    if (l->run.plan) json_text_add(&line, "%s", l->run.plan);
    logger_add_settings(&line, o);
    logger_write(l, &line);
}

// Opens the log and cuts off a last line that a full disk or a power failure left incomplete. *end: bytes of its whole
// lines; 0 for a pipe. Returns NULL on failure, with errno set.
static inline FILE *logger_append(const char *path, int64_t *end) {
    FILE *file = FILE_WORK("fopen", path, fopen(path, "a+"));
    *end = 0;
    if (!file || setvbuf(file, NULL, _IONBF, 0) || fseeko(file, 0, SEEK_END)) return file;  // a pipe cannot seek
    const off_t size = ftello(file);
    *end = size;
    int last = EOF;
    while (*end > 0 && !fseeko(file, (off_t)*end - 1, SEEK_SET) && (last = fgetc(file)) != '\n' && last != EOF)
        (*end)--;
    if (*end < size && (ferror(file) || ftruncate(fileno(file), (off_t)*end))) {
        fclose(file);
        return NULL;
    }
    fseeko(file, 0, SEEK_END);
    return file;
}

// Makes the folder `dir` of the log, and checks that the log can be written there, before any work. Locks the folder
// until the process ends (folder_lock), so that two runs do not write to one log. Dies with the reason.
static inline void logger_prepare(const char *dir) {
    Failure failure;
    char path[PATH_CAPACITY];
    if (!folder_create(dir, true, &failure) || !folder_lock(dir, FOLDER_LOCK_SECONDS, &failure))
        die("--log-dir %s: %s", dir, failure.text);
    format_checked(path, sizeof path, "%s/log.jsonl", dir);
    if (access(access(path, F_OK) == 0 ? path : dir, W_OK))
        die("--log-dir: cannot write %s: %s", path, strerror(errno));
}

// True if the log's name is a link without a target, or to a folder. The log is then not written through the link.
static inline bool logger_is_lost_link(const char *path) {
    struct stat link, target;
    return lstat(path, &link) == 0 && S_ISLNK(link.st_mode) && (stat(path, &target) || S_ISDIR(target.st_mode));
}

// Renames an earlier log.jsonl to the first free name of log.1.jsonl, log.2.jsonl, ... It does so if the log is a file
// that is not empty, or a link that logger_is_lost_link finds. An empty file or a pipe keeps its name. Returns false on
// failure, with errno set.
static inline bool logger_step_aside(const char *dir, const char *path) {
    char aside[PATH_CAPACITY];
    struct stat info;
    if (!logger_is_lost_link(path) && (stat(path, &info) || !S_ISREG(info.st_mode) || info.st_size == 0)) return true;
    int64_t n = 0;
    do format_checked(aside, sizeof aside, "%s/log.%lld.jsonl", dir, (long long)++n);
    while (path_exists(aside));
    if (rename(path, aside)) return false;
    printf("the earlier log.jsonl is now %s\n", aside);
    return true;
}

// Opens log.jsonl in --log-dir, if that is given, and writes the settings. A log that is a lost link is renamed even if
// the run continues from a checkpoint. Dies if the file cannot be opened. logger_prepare and options_resolve come
// first. `p`: the precision of the GEMMs, for the settings and for sol.
static inline Logger logger_open(const Options *o, const ModelConfig *m, const ParameterTable *t, const Precision *p,
                                 RunInfo run) {
    Logger l = {};
    l.run = run;
    l.flops = flops_per_token(t, m, o->sequence_length, p);
    l.num_steps = o->num_steps;
    l.log_every = o->log_every;
    l.run_joules = (double)NAN;
    l.uniform_loss = log((double)m->vocab_size);
    l.tokens_per_step = run.world_size * o->batch_size * o->sequence_length * o->grad_accumulation_steps;
    if (!*o->log_dir) return l;
    format_checked(l.path, sizeof l.path, "%s/log.jsonl", o->log_dir);
    const bool goes_on = run.resumed && !logger_is_lost_link(l.path);
    l.file = goes_on || logger_step_aside(o->log_dir, l.path) ? logger_append(l.path, &l.end) : NULL;
    if (!l.file) die("--log-dir: cannot write %s: %s", l.path, strerror(errno));
    logger_write_settings(&l, o, m, t, p);
    return l;
}

// Formats a share as "47.0%", or "n/a".
static inline void logger_percent(char *out, size_t capacity, double share) {
    if (isfinite(share)) format_checked(out, capacity, "%.1f%%", 100 * share);
    else format_checked(out, capacity, "n/a");
}

typedef struct {
    double tokens, tokens_per_gpu, tflops_per_gpu;  // per second
    double mfu, sol;                                // shares, as flops.h defines them
} Throughput;

static inline Throughput logger_throughput(const Logger *l, double seconds) {
    Throughput r;
    r.tokens = (double)l->tokens_per_step / seconds;
    r.tokens_per_gpu = r.tokens / (double)l->run.world_size;
    r.tflops_per_gpu = flops_total(l->flops) * r.tokens_per_gpu * 1e-12;
    r.mfu = flops_mfu(l->flops, r.tokens_per_gpu, l->run.peak_bf16);
    r.sol = flops_sol(l->flops, r.tokens_per_gpu, l->run.peak_bf16);
    return r;
}

// Formats "205.12 ms | 9984 tok/s/gpu | ... | sol 61.3% | mem 59.9 GiB"
static inline void logger_format_speed(char *out, size_t capacity, const Throughput *r, double seconds,
                                       int64_t memory) {
    char mfu[32], sol[32];
    logger_percent(mfu, sizeof mfu, r->mfu);
    logger_percent(sol, sizeof sol, r->sol);
    format_checked(out, capacity,
                   "%.2f ms | %.0f tok/s/gpu | %.0f tok/s | %.*f TFLOP/s/gpu | mfu %s | sol %s | mem %.*f GiB",
                   seconds * 1e3, r->tokens_per_gpu, r->tokens, r->tflops_per_gpu < 1 ? 4 : 1, r->tflops_per_gpu, mfu,
                   sol, memory < 1 << 30 ? 3 : 1, (double)memory / 1073741824.0);
}

static inline void logger_add_throughput(JsonText *line, const Throughput *r) {
    logger_add(line, "tokens_per_second_per_gpu", r->tokens_per_gpu);
    logger_add(line, "tokens_per_second", r->tokens);
    logger_add(line, "tflops_per_gpu", r->tflops_per_gpu);
    logger_add(line, "mfu", r->mfu);
    logger_add(line, "sol", r->sol);
}

static inline void logger_print_line(Logger *l) {
    activity_begin(ACTIVITY_FILE, "write", "stdout");
    printf("%s", l->unprinted);
    fflush(stdout);
    activity_end();
    l->unprinted[0] = 0;
}

// Formats " | 12 min left, until 14:03".
static inline void logger_format_left(double left, char *out, size_t capacity) {
    const time_t end = time(NULL) + (time_t)left;
    struct tm local;
    char at[32];
    strftime(at, sizeof at, left < 20 * 3600 ? "%H:%M" : "%b %d, %H:%M", localtime_r(&end, &local));
    const char *unit = left < 90 ? "s" : left < 5400 ? "min" : "h";
    const double unit_seconds = left < 90 ? 1 : left < 5400 ? 60 : 3600;
    format_checked(out, capacity, " | %.*f %s left, until %s", left < 5400 ? 0 : 1, left / unit_seconds, unit, at);
}

// Formats the time left, validation and saves counted in; "" after the run's first and last step.
static inline void logger_format_run_left(const Logger *l, int64_t step, char *out, size_t capacity) {
    *out = '\0';
    if (l->count < 2 || step >= l->num_steps) return;
    const double passed = seconds_now() - l->times.began - l->times.start;
    logger_format_left(passed / (double)l->count * (double)(l->num_steps - step), out, capacity);
}

// Formats one step's line, and prints it unless --log-every leaves it out. This process's first step, step --num-steps
// and the multiples of --log-every are printed. If a signal ends the run, run_between_steps prints the run's last step.
static inline void logger_print_step(Logger *l, const StepRecord *s, const Throughput *r) {
    char speed[256], width[32], left[64];
    format_checked(width, sizeof width, "%lld", (long long)l->num_steps);
    logger_format_speed(speed, sizeof speed, r, s->seconds, s->memory);
    logger_format_run_left(l, s->step, left, sizeof left);
    format_checked(l->unprinted, sizeof l->unprinted, "step %*lld/%s | loss %.6f | norm %.4f | lr %.3e | %s%s%s\n",
                   (int)strlen(width), (long long)s->step, width, s->loss, s->norm, s->learning_rate, speed, left,
                   s->skipped ? " | SKIPPED: loss or gradient norm not finite, or norm too large" : "");
    const bool due = l->log_every <= 1 || s->step % l->log_every == 0;
    if (due || l->count <= 1 || s->step == l->num_steps) logger_print_line(l);
}

// Keeps what the summary needs of a step.
static inline void logger_keep(Logger *l, const StepRecord *s) {
    if (l->count == l->capacity) {
        l->capacity = max_i64(1024, 2 * l->capacity);
        l->seconds = (double *)xrealloc(l->seconds, (size_t)l->capacity * sizeof(double));
        l->losses = (double *)xrealloc(l->losses, (size_t)l->capacity * sizeof(double));
        l->joules = (double *)xrealloc(l->joules, (size_t)l->capacity * sizeof(double));
    }
    l->seconds[l->count] = s->seconds;
    l->joules[l->count] = s->joules;
    const int64_t taken = l->count - l->skipped;
    if (!s->skipped) {
        if (!taken) l->lowest_loss = s->loss;
        l->losses[taken] = s->loss;
        l->window += s->loss / SUMMARY_LOSS_STEPS;
        if ((taken + 1) % SUMMARY_LOSS_STEPS == 0) l->lowest_loss = fmin(l->lowest_loss, l->window), l->window = 0;
    }
    l->count++;
    l->skipped += s->skipped;
    l->memory = max_i64(l->memory, s->memory);
    for (int i = 0; i < NUM_STEP_TIMES; i++) l->times.steps.seconds[i] += s->times.seconds[i];
    if (s->skipped) l->times.skipped += s->seconds;
}

// Adds the throttle reasons of each GPU: "", or their names separated by commas.
static inline void logger_add_throttle(JsonText *line, const GpuReading *gpus, int64_t n) {
    json_text_add(line, ", \"throttle\": [");
    for (int64_t i = 0; i < n; i++) {
        char reasons[128];
        gpu_throttle_text(reasons, sizeof reasons, gpus[i].throttle);
        json_text_add(line, "%s\"%s\"", i ? ", " : "", reasons);
    }
    json_text_add(line, "]");
}

// Adds the parts of a step's time except computing, the step's energy, and the readings of all GPUs. Leaves out energy
// that is not known, and all readings if a GPU cannot be read. Any other value that is not known is null.
static inline void logger_add_times(JsonText *line, const StepRecord *s, int64_t world) {
    logger_add(line, "data_ms", s->times.seconds[TIME_DATA] * 1e3);
    logger_add(line, "communication_ms", s->times.seconds[TIME_COMMUNICATION] * 1e3);
    logger_add(line, "optimizer_ms", s->times.seconds[TIME_OPTIMIZER] * 1e3);
    if (isfinite(s->joules)) logger_add(line, "joules", s->joules);
    if (!s->gpus) return;
    logger_add_array(line, "watts", &s->gpus->watts, world, sizeof *s->gpus);
    logger_add_array(line, "sm_mhz", &s->gpus->sm_mhz, world, sizeof *s->gpus);
    logger_add_array(line, "celsius", &s->gpus->celsius, world, sizeof *s->gpus);
    logger_add_throttle(line, s->gpus, world);
}

// Prints a step's line if it is due, and logs the step.
static inline void logger_step(Logger *l, const StepRecord *s) {
    logger_keep(l, s);
    const Throughput r = logger_throughput(l, s->seconds);
    logger_print_step(l, s, &r);
    JsonText line = logger_begin("step");
    logger_add_int(&line, "step", s->step);
    logger_add(&line, "loss", s->loss);
    logger_add(&line, "norm", s->norm);
    logger_add(&line, "lr", s->learning_rate);
    logger_add(&line, "ms", s->seconds * 1e3);
    logger_add_throughput(&line, &r);
    logger_add_int(&line, "memory_bytes", s->memory);
    logger_add_times(&line, s, l->run.world_size);
    json_text_add(&line, ", \"skipped\": %s", s->skipped ? "true" : "false");
    logger_write(l, &line);
}

// Prints and logs a validation. losses [n]: the loss of each sequence, in the order of --val-data. seconds: the time
// that the validation took.
static inline void logger_validation(Logger *l, int64_t step, const double *losses, int64_t n, double seconds) {
    double loss = 0;
    for (int64_t i = 0; i < n; i++) loss += losses[i] / (double)n;
    l->times.validation += seconds;
    activity_begin(ACTIVITY_FILE, "write", "stdout");
    printf("validation after step %lld | loss %.6f\n", (long long)step, loss);
    fflush(stdout);
    activity_end();
    JsonText line = logger_begin("validation");
    logger_add_int(&line, "step", step);
    logger_add(&line, "loss", loss);
    logger_add_array(&line, "losses", losses, n, sizeof *losses);
    logger_add(&line, "seconds", seconds);
    logger_write(l, &line);
}

// Logs a save that took `seconds`. error: the reason if the save failed, else NULL.
static inline void logger_save(Logger *l, int64_t step, double seconds, const char *error) {
    l->times.saving += seconds;
    JsonText line = logger_begin("save");
    logger_add_int(&line, "step", step);
    if (error) logger_add_text(&line, "error", error);
    logger_add(&line, "seconds", seconds);
    logger_write(l, &line);
}

// Logs the profile of the last step. parts: the rows of its table, as the elements of a JSON array.
static inline void logger_profile(Logger *l, int64_t step, const char *parts) {
    JsonText line = logger_begin("profile");
    logger_add_int(&line, "step", step);
    json_text_add(&line, ", \"parts\": [%s]", parts);
    logger_write(l, &line);
}

// Prints joules per token and the energy since the first step began, if all GPUs report it and the steps took at least
// SUMMARY_ENERGY_SETTLE_SECONDS; adds these and the steps' energy to `line`. Joules per token leave out `warmup` steps,
// steps that begin too early, and the last: its energy is read at its end, other steps' while the next one runs.
static inline void logger_energy(const Logger *l, JsonText *line, int64_t warmup) {
    double joules = 0, seconds = 0, settled = 0, tokens = 0;
    for (int64_t i = 0; i < l->count; i++) {
        if (i >= warmup && i < l->count - 1 && seconds >= SUMMARY_ENERGY_SETTLE_SECONDS)
            settled += l->joules[i], tokens += (double)l->tokens_per_step;
        joules += l->joules[i], seconds += l->seconds[i];
    }
    if (!isfinite(joules) || !isfinite(l->run_joules) || seconds < SUMMARY_ENERGY_SETTLE_SECONDS) return;
    char per_token[64] = "too few steps for J/token";
    if (tokens > 0) format_checked(per_token, sizeof per_token, "%.4g J/token", settled / tokens);
    printf("energy: %s, %.4g kWh of %lld GPU%s since the first step\n", per_token, l->run_joules / 3.6e6,
           (long long)l->run.world_size, l->run.world_size == 1 ? "" : "s");
    logger_add(line, "joules", joules);
    if (tokens > 0) logger_add(line, "joules_per_token", settled / tokens);
    logger_add(line, "kwh", l->run_joules / 3.6e6);
}

// If the last loss is far above what the model had learned, or what a model knows that has learned nothing: prints it,
// and returns true.
static inline bool logger_diverged(const Logger *l, double loss) {
    const double lowest = l->lowest_loss;
    const bool risen = loss > DIVERGED_TIMES_LOWEST * lowest + DIVERGED_ABOVE_LOWEST;
    if (!risen && !(loss > l->uniform_loss + DIVERGED_ABOVE_UNIFORM)) return false;
    printf(
        "DIVERGED: the last loss, %.6g, is far above %.6g, %s; give a lower --learning-rate or more --warmup-steps, or "
        "look for the step where it rose\n",
        loss, risen ? lowest : l->uniform_loss,
        risen ? "which this run had before" : "the loss of a model that has learned nothing");
    return true;
}

// Prints and writes the summary. The process must have taken at least one step.
static inline void logger_summary(Logger *l) {
    const int64_t warmup = min_i64(SUMMARY_WARMUP_STEPS, l->count / 2), taken = l->count - l->skipped,
                  last = min_i64(SUMMARY_LOSS_STEPS, taken);
    const double wall = seconds_now() - l->times.began;
    const double first = taken ? l->losses[0] : (double)NAN;
    double loss = taken ? 0 : (double)NAN;
    for (int64_t i = taken - last; i < taken; i++) loss += l->losses[i] / (double)last;
    const double seconds = median_of(l->seconds + warmup, l->count - warmup);
    const Throughput r = logger_throughput(l, seconds);
    char speed[256];
    logger_format_speed(speed, sizeof speed, &r, seconds, l->memory);
    printf("\nsummary: %lld steps, %lld skipped | loss of the first step %.6f, mean of the last %lld %.6f\nmedian "
           "of the last %lld steps: %s\n",
           (long long)l->count, (long long)l->skipped, first, (long long)last, loss, (long long)(l->count - warmup),
           speed);
    const bool diverged = logger_diverged(l, loss);
    run_times_print(&l->times, wall);
    JsonText line = logger_begin("summary");
    logger_add_int(&line, "steps", l->count);
    logger_add_int(&line, "skipped", l->skipped);
    logger_add(&line, "first_loss", first);
    logger_add(&line, "last_loss", loss);
    json_text_add(&line, ", \"diverged\": %s", diverged ? "true" : "false");
    logger_add(&line, "median_ms", seconds * 1e3);
    logger_add_throughput(&line, &r);
    logger_add_int(&line, "memory_bytes", l->memory);
    run_times_json(&line, &l->times, wall);
    logger_energy(l, &line, warmup);
    logger_write(l, &line);
}

// Prints and writes the summary, and closes the log. There is no summary if no step was taken.
static inline void logger_close(Logger *l) {
    if (l->count) logger_summary(l);
    if (l->file && FILE_WORK("fclose", l->path, fclose(l->file))) warn("%s: %s", l->path, strerror(errno));
    l->file = NULL;
    free(l->seconds);
    free(l->losses);
    free(l->joules);
    l->seconds = l->losses = l->joules = NULL;
}

#endif
