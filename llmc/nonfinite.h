// What both trainers do about a step whose gradient norm is not finite: end the run before anything of the step is saved, or skip it. A skipped step has
// changed no weight and no state: the optimizers ask first.
#ifndef LLMC_NONFINITE_H
#define LLMC_NONFINITE_H

#include "comm.h"
#include "options.h"
#include "shard_plan.h"

// With --on-nonfinite skip: so many such steps in a row end the run.
#define NONFINITE_MAX_SKIPPED 10

// Past every position in backward order, and exact as a double, in which positions are compared over ranks.
#define NONFINITE_NONE ((int64_t)1 << 53)

// Where the trouble begins, in words. `position`: in backward order (shard_plan.h), of the first gradient element of this rank that is not finite; what
// comes after it may be bad because of it. NONFINITE_NONE: every one is finite. All ranks call.
static inline void nonfinite_place(const ParameterTable *t, const Comm *c, int64_t position, char *out, size_t capacity) {
    const double first = comm_min(c, COMM_WORLD, (double)position);
    const long long holder = (long long)comm_min(c, COMM_WORLD, (double)position == first ? (double)c->rank : (double)c->world);
    char layer[32] = "", rank[48] = "";
    format_checked(out, capacity, "though every gradient is: their squares overflow");
    if (first == (double)NONFINITE_NONE) return;
    const int64_t element = backward_position(backward_order(t), (int64_t)first);
    const Parameter *p = t->entries;
    while (element < p->offset || element >= p->offset + parameter_elements(p)) p++;
    if (p->layer >= 0) format_checked(layer, sizeof layer, " (layer %lld)", (long long)p->layer);
    if (c->world > 1) format_checked(rank, sizeof rank, ", in the part of rank %lld", holder);
    format_checked(out, capacity, "first, in backward order, in %s%s, element %lld%s", p->name, layer, (long long)(element - p->offset), rank);
}

// Says where in step `step` (counted from 0) the gradient was not finite, and goes on or ends the run as the options say. `skipped_in_a_row` counts this
// step. All ranks call.
static inline void nonfinite_report(const Options *o, const Comm *c, const ParameterTable *t, int64_t position, int64_t step, double loss, int64_t skipped_in_a_row) {
    char place[320];
    nonfinite_place(t, c, position, place, sizeof place);
    if (o->on_nonfinite == NONFINITE_STOP)
        die("step %lld: the gradient norm is not finite, %s; the loss is %g. Nothing of this step is saved. A smaller --learning-rate, --grad-clip 1 or more "
            "--warmup-steps may help; --on-nonfinite skip leaves such steps out", (long long)step + 1, place, loss);
    if (skipped_in_a_row >= NONFINITE_MAX_SKIPPED)
        die("step %lld: %lld steps in a row had a gradient norm that is not finite, now %s; the loss is %g. A smaller "
            "--learning-rate may help", (long long)step + 1, (long long)skipped_in_a_row, place, loss);
    if (c->rank == 0) warn("step %lld skipped: the gradient norm is not finite, %s; the loss is %g", (long long)step + 1, place, loss);
}

#endif
