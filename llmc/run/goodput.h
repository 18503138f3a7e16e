// Splits the time of a run by purpose, and computes its goodput, for the summary.
#ifndef LLMC_GOODPUT_H
#define LLMC_GOODPUT_H

#include "../base/json.h"
#include "../base/step_times.h"

// How this process has spent its time, in seconds. `steps`: the parts of the time of all steps, each a mean over all
// ranks.
typedef struct {
    double began;    // seconds_now() at the start of the process
    double start;    // from there to the first step: reading files, loading weights, planning GEMMs
    double skipped;  // in steps whose update was skipped (nonfinite.h); `steps` includes them
    double validation, sampling, saving;
    StepTimes steps;
} RunTimes;

static inline double run_times_steps(const RunTimes *t) {
    double sum = 0;
    for (int i = 0; i < NUM_STEP_TIMES; i++) sum += t->steps.seconds[i];
    return sum;
}

// Returns the goodput: the share of `wall`, the seconds since the process began, in which the run computed steps that
// count. Skipped steps do not count, nor does the time in which steps waited for data or for other ranks.
static inline double run_times_goodput(const RunTimes *t, double wall) {
    const double *s = t->steps.seconds, all = run_times_steps(t);
    const double useful = all > 0 ? (s[TIME_COMPUTE] + s[TIME_OPTIMIZER]) / all : 0;
    return (all - t->skipped) * useful / wall;
}

enum { RUN_TIMES_ROWS = NUM_STEP_TIMES + 5 };

typedef struct {
    const char *name;
    double seconds;
} RunTimesRow;

// Writes the parts of steps and the other purposes, with their seconds. "other" is the rest of `wall`, or 0 if nothing
// is left.
static inline void run_times_rows(const RunTimes *t, double wall, RunTimesRow rows[RUN_TIMES_ROWS]) {
    const double known = run_times_steps(t) + t->start + t->validation + t->sampling + t->saving,
                 *steps = t->steps.seconds;
    const RunTimesRow all[RUN_TIMES_ROWS] = {{"compute", steps[TIME_COMPUTE]},
                                             {"data", steps[TIME_DATA]},
                                             {"communication", steps[TIME_COMMUNICATION]},
                                             {"optimizer", steps[TIME_OPTIMIZER]},
                                             {"start", t->start},
                                             {"validation", t->validation},
                                             {"sampling", t->sampling},
                                             {"saving", t->saving},
                                             {"other", wall > known ? wall - known : 0}};
    memcpy(rows, all, sizeof all);
}

// Prints `wall`, the goodput, and the share of each purpose that takes at least 0.05% of `wall`.
static inline void run_times_print(const RunTimes *t, double wall) {
    RunTimesRow rows[RUN_TIMES_ROWS];
    run_times_rows(t, wall, rows);
    printf("time: %.1f s, goodput %.1f%%:", wall, 100 * run_times_goodput(t, wall));
    const char *separator = " ";
    for (int i = 0; i < RUN_TIMES_ROWS; i++) {
        if (rows[i].seconds < 0.0005 * wall) continue;
        printf("%s%s %.1f%%", separator, rows[i].name, 100 * rows[i].seconds / wall);
        separator = ", ";
    }
    printf("\n");
}

// Adds the members "seconds" and "goodput".
static inline void run_times_json(JsonText *line, const RunTimes *t, double wall) {
    RunTimesRow rows[RUN_TIMES_ROWS];
    run_times_rows(t, wall, rows);
    json_text_add(line, ", \"seconds\": {\"wall\": ");
    json_text_add_real(line, wall);
    for (int i = 0; i < RUN_TIMES_ROWS; i++) {
        json_text_add(line, ", \"%s\": ", rows[i].name);
        json_text_add_real(line, rows[i].seconds);
    }
    json_text_add(line, "}, \"goodput\": ");
    json_text_add_real(line, run_times_goodput(t, wall));
}

#endif
