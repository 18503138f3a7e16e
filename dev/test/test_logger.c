// Tests the step line, progress of an evaluation, lines of log.jsonl (read back with the JSON reader), the summary, and
// files that cannot be written.
#include <signal.h>
#include <sys/resource.h>

#include "../../llmc/run/evaluate.h"
#include "lib/check.h"
#include "lib/json_check.h"
#include "lib/scratch.h"

typedef struct {
    Options o;
    ModelConfig m;
    ParameterTable t;
    Precision p;
    RunInfo run;
} Run;

static Run make_run(double peak) {
    Run r;
    r.o = options_default();
    r.o.model = "llama3.1-8b", r.o.sequence_length = 2048, r.o.num_steps = 1000, r.o.precision = PRECISION_FP8,
    r.o.log_dir = scratch;
    r.o.train_data = "a \"quoted\" \\ path";
    options_resolve(&r.o);
    model_config_preset(&r.m, r.o.model);
    r.t = parameter_table(&r.m);
    r.p = precision_plan(&r.o, r.o.fp8_filter, &r.m, &r.t, true);
    const RunInfo info = {"train_fp8cu", "NVIDIA H200", "test", 4, peak, false, 1 << 30, NULL};
    r.run = info;
    return r;
}

static void free_run(Run *r) {
    precision_free(&r->p);
    parameter_table_free(&r->t);
}

static StepRecord make_step(int64_t step, double seconds) {
    static const GpuReading gpus[4] = {{true, 1, 700, 1980, 50, 0},
                                       {true, 2, 650.5, 1755, 61, 1 | 4 | 0x20},
                                       {true, 3, (double)NAN, 1980, 50, 1},
                                       {true, 4, 700, 1980, 50, 8}};
    StepRecord s;
    memset(&s, 0, sizeof s);
    s.step = step, s.loss = 9.123456, s.norm = 1.2345, s.learning_rate = 1e-5, s.seconds = seconds;
    s.memory = (int64_t)(59.9 * 1073741824);
    s.times.seconds[TIME_DATA] = 0.01 * seconds, s.times.seconds[TIME_COMMUNICATION] = 0.02 * seconds;
    s.times.seconds[TIME_OPTIMIZER] = 0.07 * seconds, s.times.seconds[TIME_COMPUTE] = 0.9 * seconds;
    s.gpus = gpus, s.joules = 2800 * seconds;
    return s;
}

// Returns the text that `action` prints on stdout.
static char *captured(void (*action)(Logger *, void *), Logger *l, void *context) {
    const CheckCapture capture = check_capture();
    action(l, context);
    return check_captured(capture);
}

static void log_step(Logger *l, void *step) { logger_step(l, (const StepRecord *)step); }
static void log_validation(Logger *l, void *unused) {
    (void)unused;
    const double losses[] = {1, 2, 1.5};
    logger_validation(l, 31, losses, 3, 0.25);
}
static void log_close(Logger *l, void *unused) {
    (void)unused;
    logger_close(l);
}

static void test_step_line(void) {
    Run r = make_run(989.5e12);
    r.o.log_dir = "";
    Logger l = logger_open(&r.o, &r.m, &r.t, &r.p, r.run);
    StepRecord s = make_step(12, 0.20512);
    char *line = captured(log_step, &l, &s);
    // 2048 tokens on a GPU in 205.12 ms are 9984 tok/s. 46.639 GFLOP per token give 465.7 TFLOP/s, 47.1% of 989.5. In
    // sol, FP8 GEMMs count half, because their peak is twice as high.
    const char *expected = "step   12/1000 | loss 9.123456 | norm 1.2345 | lr 1.000e-05 | 205.12 ms | 9984 tok/s/gpu | "
                           "39938 tok/s | 465.7 TFLOP/s/gpu | mfu 47.1% | sol 25.9% | mem 59.9 GiB\n";
    CHECK(strcmp(line, expected) == 0, "the step line is\n%sexpected\n%s", line, expected);
    free(line);
    l.times.began = seconds_now() - 730, l.times.start = 10;  // two steps of 360 s: 988 take 98.8 hours
    l.run.peak_bf16 = 0, s.skipped = true, s.norm = (double)INFINITY;
    line = captured(log_step, &l, &s);
    CHECK(strstr(line, "norm inf") && strstr(line, "| mfu n/a | sol n/a | mem") && strstr(line, "SKIPPED"),
          "mfu and sol are n/a on a GPU of unknown peak, and a skipped step says so: %s", line);
    CHECK(!strstr(line, "%"), "a GPU of unknown peak has neither mfu nor sol: %s", line);
    CHECK(strstr(line, " GiB | 98.8 h left, until "), "a step says how long the run will take: %s", line);
    free(line);
    free(captured(log_close, &l, NULL));
    free_run(&r);
}

// The summary says that the run diverged if its last losses are far above earlier ones, or above ln(128256) = 11.76.
static void test_diverged(void) {
    static const struct {
        int64_t steps;
        double first, middle, last;  // losses of step 1, of the steps after it, and of the last 20
        const char *says;
    } cases[] = {{60, 11.9, 3, 2.9, ""},
                 {60, 11.9, 3, 5.9, "5.9, is far above 3, which this run had before"},
                 {60, 2, 2.2, 2.4, ""},
                 {60, 2, 9, 9, "9, is far above 2, which this run had"},
                 {60, 12.1, 11.8, 12.5, ""},
                 {60, 11.9, 50, 43279, "43279, is far above 11.9"},
                 {60, 43000, 43000, 43000, "43000, is far above 11.7618, the loss of a model that has learned nothing"},
                 {5, 11.9, 0, 11.6, ""},
                 {5, 10, 0, 100, "82, is far above 10"},
                 {60, 11.9, 3, (double)NAN, ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Run r = make_run(989.5e12);
        Logger l = logger_open(&r.o, &r.m, &r.t, &r.p, r.run);
        for (int64_t step = 1; step <= cases[i].steps; step++) {
            StepRecord s = make_step(step, 0.1);
            s.loss = step > max_i64(1, cases[i].steps - 20) ? cases[i].last : cases[i].middle;
            if (step == 1) s.loss = cases[i].first;
            free(captured(log_step, &l, &s));
        }
        char *printed = captured(log_close, &l, NULL), *text = read_file(scratch_path("log.jsonl"), NULL);
        CHECK(!strstr(printed, "DIVERGED") == !*cases[i].says && strstr(printed, cases[i].says),
              "a run with losses %g, %g, %g: %s", cases[i].first, cases[i].middle, cases[i].last, printed);
        CHECK(strstr(text, *cases[i].says ? "\"diverged\": true" : "\"diverged\": false"),
              "the log says if the run diverged: %s", printed);
        free(printed), free(text), free_run(&r);
        unlink(scratch_path("log.jsonl"));
    }
}

// The summary's losses are those of the steps that were taken.
static void test_skipped_losses(void) {
    Run r = make_run(989.5e12);
    r.o.log_dir = "";
    for (int taken = 0; taken <= 2; taken += 2) {
        Logger l = logger_open(&r.o, &r.m, &r.t, &r.p, r.run);
        for (int64_t step = 1; step <= 4; step++) {
            StepRecord s = make_step(step, 0.1);
            s.skipped = step % 2 == 1 || !taken, s.loss = s.skipped ? (double)NAN : (double)step;
            free(captured(log_step, &l, &s));
        }
        char *printed = captured(log_close, &l, NULL);
        CHECK(strstr(printed,
                     taken ? "4 steps, 2 skipped | loss of the first step 2.000000, mean of the last 2 3.000000\n"
                           : "4 steps, 4 skipped | loss of the first step nan, mean of the last 0 nan\n"),
              "steps with a loss of NaN that were skipped do not count: %s", printed);
        free(printed);
    }
    free_run(&r);
}

// Joules per token count neither warm-up steps, nor those that begin in the first 2 s, nor the last: here, such steps
// have wrong energies. If the steps take less than 2 s, there is no energy.
static void test_joules_per_token(void) {
    static const struct {
        int64_t steps, counted;  // counted: the first step that counts, from 0
        double seconds;          // each step takes as long
        const char *says;
    } cases[] = {{30, 10, 0.5, "0.1709 J/token"},  // 2800 W x 0.5 s / (4 x 2048)
                 {30, 16, 0.125, "0.04272 J/token"},
                 {3, 1, 2, "0.6836 J/token"},
                 {17, 16, 0.125, "too few steps for J/token"},
                 {2, 1, 2, "too few steps for J/token"},
                 {15, 15, 0.125, ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Run r = make_run(989.5e12);
        Logger l = logger_open(&r.o, &r.m, &r.t, &r.p, r.run);
        for (int64_t step = 0; step < cases[i].steps; step++) {
            StepRecord s = make_step(step + 1, cases[i].seconds);
            if (step < cases[i].counted || step == cases[i].steps - 1) s.joules = 9;
            free(captured(log_step, &l, &s));
        }
        l.run_joules = 3.6e6;
        char *printed = captured(log_close, &l, NULL), *text = read_file(scratch_path("log.jsonl"), NULL);
        const char *said = strstr(printed, "energy: ");
        CHECK(said ? strstr(said, cases[i].says) == said + 8 && *cases[i].says : !*cases[i].says,
              "\"%s\" is expected of %lld steps: %s", cases[i].says, (long long)cases[i].steps, printed);
        CHECK(!strstr(text, "joules_per_token") == (cases[i].says[0] != '0') && !strstr(text, "\"kwh\"") == !said,
              "the log has the energies that are printed: %s", printed);
        free(printed), free(text), free_run(&r);
        unlink(scratch_path("log.jsonl"));
    }
}

static void test_file(void) {
    Run r = make_run(989.5e12);
    Logger l = logger_open(&r.o, &r.m, &r.t, &r.p, r.run);
    char *printed;
    for (int64_t step = 1; step <= 31; step++) {  // slow at first, then 100, 101, ... 120 ms in a shuffled order
        StepRecord s = make_step(step, step <= 10 ? 5.0 : 0.1 + 0.001 * (double)(step * 8 % 21));
        s.loss = step <= 11 ? 50 : 2;
        s.skipped = step == 4;
        s.norm = step == 4 ? (double)NAN : 1;
        s.joules *= step < 31;  // joules per token leave out the last step
        free(captured(log_step, &l, &s));
    }
    const double before = l.times.began = seconds_now() - 100;  // the process began 100 s ago
    l.times.start = 30, l.times.sampling = 2, l.run_joules = 3.6e6;
    logger_save(&l, 31, 0.8, NULL);
    printed = captured(log_validation, &l, NULL);
    CHECK(strcmp(printed, "validation after step 31 | loss 1.500000\n") == 0,
          "the validation is printed with its mean loss; found %s", printed);
    free(printed);
    printed = captured(log_close, &l, NULL);
    CHECK(strstr(printed, "31 steps, 1 skipped") && strstr(printed, "median of the last 21 steps: 110.00 ms") &&
              strstr(printed, "mean of the last 20 2.000000"),
          "the summary counts all steps, and has median time and mean loss of the last ones: %s", printed);
    // 10 steps take 5 s each, and 21 steps take 2.31 s together: 52.31 s. One step of 5 s was skipped. Of the other
    // 47.31 s, 97% (compute and optimizer) count as goodput.
    CHECK(strstr(printed, "time: 100.0 s, goodput 45.9%: compute 47.1%, data 0.5%, communication 1.0%, "
                          "optimizer 3.7%, start 30.0%, validation 0.2%, sampling 2.0%, saving 0.8%, other 14.6%\n") &&
              seconds_now() - before < 100.05,
          "the time is split by purpose: %s", printed);
    // 2800 W for 2.193 s, 20 steps of 4 x 2048 tokens
    CHECK(strstr(printed, "energy: 0.03748 J/token, 1 kWh of 4 GPUs since the first step\n"),
          "energy per token and of the whole run are printed: %s", printed);
    free(printed);

    const char *path = scratch_path("log.jsonl");
    char *save = NULL, *text = read_file(path, NULL);
    int lines = 0;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save), lines++) {
        Json json;
        Failure failure;
        if (!json_parse(&json, "log.jsonl", line, strlen(line), &failure)) {
            CHECK(false, "line %d is JSON: %s", lines + 1, failure.text);
            continue;
        }
        const char *type = json_member(&json, json_root(&json), "type")->text;
        if (lines == 0) {
            const JsonNode *settings = json_member(&json, json_root(&json), "settings");
            CHECK(strcmp(type, "settings") == 0 && settings, "the first line has the settings: %s", line);
            int64_t options = 0, logged = 0;
            for (const OptionRow *row = option_rows(); row->name; row++) options += option_is_setting(row);
            for (const JsonNode *node = json_first(&json, settings); node; node = json_next(&json, node)) logged++;
            CHECK(logged == options, "all settings are logged; found %lld of %lld", (long long)logged,
                  (long long)options);
            CHECK(strcmp(json_member(&json, settings, "train-data")->text, r.o.train_data) == 0,
                  "quotes in a setting are read back: %s", line);
            CHECK(member(&json, "world_size") == 4 && member(&json, "parameters") == 8030261248.0,
                  "the first line has the number of ranks and of parameters: %s", line);
        }
        if (lines == 1) {
            CHECK(strcmp(type, "step") == 0 && member(&json, "step") == 1 && member(&json, "loss") == 50 &&
                      member(&json, "ms") == 5000,
                  "the line of step 1 has its loss and time: %s", line);
            CHECK(fabs(member(&json, "mfu") - 46.639e9 * 2048 / 5 / 989.5e12) < 1e-4,
                  "the line of step 1 has its mfu: %s", line);
        }
        if (lines == 4)
            CHECK(json_member(&json, json_root(&json), "norm")->type == JSON_NULL && strstr(line, "\"skipped\": true"),
                  "a norm of NaN is written as null, and the step as skipped: %s", line);
        if (lines == 1)
            CHECK(strstr(line, "\"data_ms\": 5e+01, \"communication_ms\": 1e+02, \"optimizer_ms\": 350.0") &&
                      member(&json, "joules") == 14000 && strstr(line, "\"watts\": [7e+02, 650.5, null, 7e+02]") &&
                      strstr(line, "\"sm_mhz\": [1.98e+03, 1755.0, 1.98e+03, 1.98e+03]") &&
                      strstr(line, "\"celsius\": [5e+01, 61.0, 5e+01, 5e+01]") &&
                      strstr(line, "\"throttle\": [\"\", \"power cap, thermal\", \"\", \"hardware slowdown\"]"),
                  "the line of step 1 has parts of its time, energy, and readings of each GPU: %s", line);
        if (lines == 32)
            CHECK(strcmp(type, "save") == 0 && member(&json, "seconds") == 0.8 && !strstr(line, "error"),
                  "the save has its time and no error: %s", line);
        if (lines == 33)
            CHECK(strcmp(type, "validation") == 0 && member(&json, "loss") == 1.5 &&
                      strstr(line, "\"losses\": [1.0, 2.0, 1.5], \"seconds\": 0.25}"),
                  "the validation has all its losses and its time: %s", line);
        if (lines == 34)
            CHECK(strcmp(type, "summary") == 0 && fabs(member(&json, "median_ms") - 110) < 1e-9 &&
                      member(&json, "steps") == 31 && member(&json, "kwh") == 1 &&
                      fabs(member(&json, "joules") - 2800 * 52.193) < 1e-6,
                  "the summary has steps, median time and energy: %s", line);
        json_free(&json);
    }
    CHECK(lines == 35, "log.jsonl has 35 lines; found %d", lines);
    free(text);

    // A resumed run continues the file after its last complete line. Other runs start a new file, also if --resume
    // found no checkpoint.
    FILE *file = fopen(path, "a");
    if (!file || fputs("{\"type\": \"step\", \"loss\": 5.68", file) < 0 || fclose(file))
        die("%s: %s", path, strerror(errno));
    r.run.resumed = true;
    l = logger_open(&r.o, &r.m, &r.t, &r.p, r.run);
    logger_close(&l);
    text = read_file(path, NULL);
    const char *appended = strstr(text + 1, "{\"type\": \"settings\"");
    CHECK(appended && appended[-1] == '\n' && appended[-2] == '}' && !strstr(text, "5.68"),
          "a resumed run appends its settings, and drops the line that was cut: %s", appended ? appended - 40 : "none");
    free(text);
    r.run.resumed = false;
    r.o.resume = true;
    l = logger_open(&r.o, &r.m, &r.t, &r.p, r.run);
    logger_close(&l);
    text = read_file(path, NULL);
    CHECK(strncmp(text, "{\"type\": \"settings\"", 19) == 0 && !strstr(text + 1, "{\"type\":"),
          "a new run starts a new log");
    free(text);
    unlink(path);
    free_run(&r);
}

static void open_log(void *options) {
    Run r = make_run(0);
    r.o.log_dir = (const char *)options;
    Logger l = logger_open(&r.o, &r.m, &r.t, &r.p, r.run);
    logger_close(&l);
}

static void test_failures(void) {
    const char *path = scratch_path("log.jsonl");
    CHECK_DIES(open_log, (void *)"/proc/no/such", "--log-dir", "logger_open() refuses a folder that does not exist");
    if (mkdir(path, 0777)) die("mkdir: %s", strerror(errno));
    CHECK_DIES(open_log, scratch, "cannot write", "logger_open() refuses a log.jsonl that is a folder");
    rmdir(path);
    // A log that can neither be written nor cut is given up, and the run goes on.
    if (symlink("/dev/full", path)) die("symlink: %s", strerror(errno));
    Run r = make_run(0);
    fflush(stderr);
    const int saved = dup(2), null = open("/dev/null", O_WRONLY);
    dup2(null, 2);
    Logger l = logger_open(&r.o, &r.m, &r.t, &r.p, r.run);
    dup2(saved, 2);
    close(saved), close(null);
    StepRecord s = make_step(1, 1);
    s.gpus = NULL, s.joules = (double)NAN;  // a summary without energy
    free(captured(log_step, &l, &s));
    CHECK(l.file == NULL, "a log that leads to /dev/full is given up");
    char *printed = captured(log_close, &l, NULL);
    CHECK(strstr(printed, "time:") && !strstr(printed, "energy"), "the summary is printed, without energy: %s",
          printed);
    free(printed);
    unlink(path);
    free_run(&r);
}

// Files may not grow past `limit` bytes from now on, as on a disk that is full.
static void limit_files(rlim_t limit) {
    struct rlimit r;
    if (getrlimit(RLIMIT_FSIZE, &r)) die("getrlimit: %s", strerror(errno));
    r.rlim_cur = limit < r.rlim_max ? limit : r.rlim_max;
    if (setrlimit(RLIMIT_FSIZE, &r)) die("setrlimit: %s", strerror(errno));
}

static void log_through_a_full_disk(void *unused) {
    (void)unused;
    if (signal(SIGXFSZ, SIG_IGN) == SIG_ERR || !freopen("/dev/null", "w", stdout)) die("no /dev/null");
    Run r = make_run(0);
    Logger l = logger_open(&r.o, &r.m, &r.t, &r.p, r.run);
    for (int64_t step = 1; step <= 6; step++) {
        if (step == 3) limit_files((rlim_t)l.end + 100);  // part of a line fits
        if (step == 5) limit_files(RLIM_INFINITY);
        const StepRecord s = make_step(step, 1);
        logger_step(&l, &s);
    }
    logger_close(&l);
    free_run(&r);
    die("the run went on");
}

static void test_full_disk(void) {
    char output[1024];
    CHECK(check_dies(log_through_a_full_disk, NULL, "the run went on", output, sizeof output),
          "the run goes on to its end: %s", output);
    CHECK(check_count(output, "cannot be written (File too large); the run goes on without the lost lines") == 1 &&
              check_count(output, "warning") == 1,
          "there is one warning: %s", output);
    char *save = NULL, *text = read_file(scratch_path("log.jsonl"), NULL), steps[64] = "";
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        Json json;
        Failure failure;
        const bool parsed = json_parse(&json, "log.jsonl", line, strlen(line), &failure);
        CHECK(parsed, "each line is JSON: %s", failure.text);
        if (!parsed) continue;
        snprintf(steps + strlen(steps), sizeof steps - strlen(steps), " %.2s%.0f",
                 json_member(&json, json_root(&json), "type")->text, member(&json, "step"));
        json_free(&json);
    }
    CHECK(strcmp(steps, " senan st1 st2 st5 st6 sunan") == 0,
          "the lines of steps 3 and 4 are left out, all others are there; found%s", steps);
    free(text);
    unlink(scratch_path("log.jsonl"));
}

static void log_progress(Logger *l, void *evaluation) {
    evaluation_progress((Evaluation *)evaluation, l, 40, 120);
    evaluation_progress((Evaluation *)evaluation, l, 60, 120);  // too soon
}

static void test_evaluation_progress(void) {
    const double now = seconds_now();
    Evaluation e = {.loss = 90, .tokens = 50, .unit_loss = 10, .unit_tokens = 50, .began = now - 30, .shown = now - 11};
    Logger l = {0};
    const char *expected = "evaluated 40 of 120 sequences, 100 tokens | loss 1.000000 | 60 s left, until ";
    char *printed = captured(log_progress, &l, &e);
    CHECK(strncmp(printed, expected, strlen(expected)) == 0 && strlen(printed) == strlen(expected) + strlen("14:03\n"),
          "progress of an evaluation comes once in ten seconds: %s", printed);
    free(printed);
}

int main(void) {
    scratch_create();
    test_evaluation_progress();
    test_step_line();
    test_diverged();
    test_skipped_losses();
    test_joules_per_token();
    test_file();
    test_failures();
    test_full_disk();
    double odd[] = {3, 1, 2}, even[] = {4, 1, 3, 2};
    CHECK(median_of(odd, 3) == 2 && median_of(even, 4) == 2.5, "the medians of an odd and of an even count are right");
    scratch_remove();
    return check_report();
}
