// Tests learning rates: where warm-up, constant part and decay begin and end, and at points between.
#include "../../llmc/config/schedule.h"
#include "lib/check.h"

static Options schedule_options(int schedule, int64_t warmup, int64_t steps) {
    Options o = options_default();
    o.learning_rate = 2e-3, o.lr_schedule = schedule, o.warmup_steps = warmup, o.num_steps = steps;
    return o;
}

static void check_at(int schedule, int64_t warmup, int64_t steps, int64_t step, double expected) {
    const Options o = schedule_options(schedule, warmup, steps);
    const double rate = schedule_learning_rate(&o, step);
    CHECK(fabs(rate - expected) < 1e-12,
          "schedule %d, warm-up %lld of %lld steps, step %lld: the rate is %.9g; expected %.9g", schedule,
          (long long)warmup, (long long)steps, (long long)step, rate, expected);
}

// --decay-steps and --min-lr-ratio: where decay begins, and where it ends.
static void check_settings(void) {
    static const struct {
        int schedule;
        int64_t decay, step;
        double ratio, expected;
    } cases[] = {
        {SCHEDULE_WSD, 50, 60, 0, 2e-3},      {SCHEDULE_WSD, 50, 85, 0, 1e-3},
        {SCHEDULE_WSD, 50, 110, 0, 0},        {SCHEDULE_WSD, 100, 10, 0, 2e-3},
        {SCHEDULE_WSD, 100, 11, 0, 1.98e-3},  {SCHEDULE_WSD, 1, 109, 0, 2e-3},
        {SCHEDULE_WSD, 50, 85, 0.1, 1.1e-3},  {SCHEDULE_WSD, 50, 110, 0.1, 2e-4},
        {SCHEDULE_WSD, 0, 99, 0.5, 1.5e-3},   {SCHEDULE_LINEAR, 0, 60, 0.5, 1.5e-3},
        {SCHEDULE_LINEAR, 0, 110, 0.5, 1e-3}, {SCHEDULE_COSINE, 0, 60, 0.2, 1.2e-3},
        {SCHEDULE_COSINE, 0, 10, 0.2, 2e-3},  {SCHEDULE_COSINE, 0, 500, 0.2, 4e-4},
        {SCHEDULE_LINEAR, 0, 60, 1, 2e-3},    {SCHEDULE_LINEAR, 0, 4, 0.5, 1e-3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options o = schedule_options(cases[i].schedule, 10, 110);
        o.decay_steps = cases[i].decay, o.min_lr_ratio = cases[i].ratio;
        const double rate = schedule_learning_rate(&o, cases[i].step);
        CHECK(fabs(rate - cases[i].expected) < 1e-12, "case %zu: the rate is %.9g; expected %.9g", i, rate,
              cases[i].expected);
    }
    Options o = schedule_options(SCHEDULE_WSD, 10, 110), same = o;
    same.decay_steps = 22;
    for (int64_t step = 0; step < 111; step++)
        CHECK(schedule_learning_rate(&o, step) == schedule_learning_rate(&same, step),
              "step %lld: a decay of a fifth has the rate of the default", (long long)step);
}

// Steps of 1 to 6 after which --checkpoint-every saves; the last step always has a save.
static void check_saves(const char *every, const char *expected) {
    Options o = schedule_options(SCHEDULE_CONSTANT, 0, 6);
    char saves[32] = "";
    o.checkpoint_every = every, o.checkpoint_dir = "c";
    for (int step = 1; step <= 6; step++)
        if (schedule_due(&o, step).save) sprintf(saves + strlen(saves), "%d", step);
    CHECK(strcmp(saves, expected) == 0, "--checkpoint-every %s saves after steps %s; expected %s", every, saves,
          expected);
}

int main(void) {
    check_saves("0", "6"), check_saves("2", "246"), check_saves("4", "46"), check_saves("9", "6");
    check_saves("1,2,4", "1246"), check_saves("4,", "46"), check_saves("2,6", "26");
    const int schedules[] = {SCHEDULE_CONSTANT, SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD};
    for (int i = 0; i < 4; i++) {
        check_at(schedules[i], 10, 110, 0, 2e-4);  // warm-up: from a tenth to the full rate
        check_at(schedules[i], 10, 110, 4, 1e-3);
        check_at(schedules[i], 10, 110, 9, 2e-3);
        check_at(schedules[i], 10, 110, 10, 2e-3);  // first step after warm-up
        check_at(schedules[i], 0, 110, 0, 2e-3);    // no warm-up
        check_at(schedules[i], 5, 5, 4, 2e-3);      // only warm-up
        check_at(schedules[i], 0, 1, 0, 2e-3);      // a run of one step
        const Options o = schedule_options(schedules[i], 10, 110);
        for (int64_t step = 10; step < 110; step++) {
            const double rate = schedule_learning_rate(&o, step);
            CHECK(rate > 0 && rate <= 2e-3, "schedule %d, step %lld: the rate is above 0 and at most 2e-3; found %g",
                  schedules[i], (long long)step, rate);
            CHECK(rate >= schedule_learning_rate(&o, step + 1), "schedule %d does not rise after step %lld",
                  schedules[i], (long long)step);
        }
    }
    check_at(SCHEDULE_CONSTANT, 10, 110, 5000, 2e-3);
    check_at(SCHEDULE_LINEAR, 10, 110, 60, 1e-3);  // half of the decay
    check_at(SCHEDULE_LINEAR, 10, 110, 109, 2e-5);
    check_at(SCHEDULE_LINEAR, 10, 110, 110, 0);
    check_at(SCHEDULE_COSINE, 10, 110, 60, 1e-3);
    check_at(SCHEDULE_COSINE, 10, 110, 35, 1e-3 * (1 + sqrt(0.5)));
    check_at(SCHEDULE_COSINE, 10, 110, 110, 0);
    check_at(SCHEDULE_WSD, 10, 110, 87, 2e-3);  // the last fifth is 22 steps
    check_at(SCHEDULE_WSD, 10, 110, 88, 2e-3);
    check_at(SCHEDULE_WSD, 10, 110, 99, 1e-3);
    check_at(SCHEDULE_WSD, 10, 110, 110, 0);
    check_at(SCHEDULE_WSD, 100, 110, 105,
             1e-3);  // warm-up reaches into the last fifth: decay takes the remaining steps
    check_settings();
    return check_report();
}
