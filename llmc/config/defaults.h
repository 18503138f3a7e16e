// Chooses the learning rate, and with it the schedule and the optimizer's values, where none is given.
#ifndef LLMC_DEFAULTS_H
#define LLMC_DEFAULTS_H

#include "options.h"

// From weights that are trained already: the rate at which Llama 3 is fine-tuned ("The Llama 3 Herd of Models", 2024,
// section 4.1.3).
#define DEFAULTS_TRAINED_RATE 1e-5

// The options that are chosen with the rate if they are not given; all others keep their defaults.
static inline const char *const *defaults_names(void) {
    static const char *const names[] = {"learning-rate", "lr-schedule", "min-lr-ratio", "warmup-steps",
                                        "weight-decay",  "beta2",       "grad-clip",    NULL};
    return names;
}

// The rate from random weights: a line through the eight models of GPT-3 (Brown et al. 2020, Table 2.1: 6e-4 for 125 M
// parameters to 0.6e-4 for 175 B), by least squares of the logarithms, rounded to two digits.
static inline double defaults_rate(int64_t parameters) {
    const double rate = 0.1325 * pow((double)parameters, -0.305), digit = pow(10, floor(log10(rate)) - 1);
    return round(rate / digit) * digit;
}

// True if the run chooses the option.
static inline bool defaults_choose(const Options *given, const char *name) {
    return given->learning_rate == -1 && (strcmp(name, "learning-rate") == 0 || !options_give(given, name));
}

// Replaces --learning-rate -1, and the options that it chooses with it: cosine to a tenth, warm-up, clipping at 1,
// decay 0.1 and beta2 0.95 as for GPT-3 and Llama 2 (Touvron et al. 2023, section 2.2: 2,000 steps of warm-up).
static inline void defaults_set(Options *o, int64_t parameters, bool trained) {
    const Options given = *o;
    if (given.learning_rate != -1) return;
    o->learning_rate = trained ? DEFAULTS_TRAINED_RATE : defaults_rate(parameters);
    if (defaults_choose(&given, "lr-schedule")) o->lr_schedule = SCHEDULE_COSINE;
    if (defaults_choose(&given, "min-lr-ratio") && o->lr_schedule != SCHEDULE_CONSTANT) o->min_lr_ratio = 0.1;
    if (defaults_choose(&given, "warmup-steps"))
        o->warmup_steps = min_i64(2000, min_i64(ceil_div(o->num_steps, 20), o->num_steps - o->decay_steps));
    if (defaults_choose(&given, "weight-decay")) o->weight_decay = 0.1;
    if (defaults_choose(&given, "beta2")) o->beta2 = 0.95;
    if (defaults_choose(&given, "grad-clip")) o->grad_clip = 1;
}

#endif
