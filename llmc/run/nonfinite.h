// Finds where a loss or gradient norm that is not finite comes from; ends the run, or warns of the skipped step.
// A norm that is too large counts as not finite. With --on-nonfinite skip, a step that is skipped changes no weight and
// no state: the optimizer checks loss and norm first, and delayed scaling restores its histories. Nor does the step
// count in AdamW's bias corrections.
#ifndef LLMC_NONFINITE_H
#define LLMC_NONFINITE_H

#include "../reference/adamw_math.h"
#include "../checkpoint/tensors.h"
#include "../config/options.h"

// With --on-nonfinite skip, this many skipped steps in a row end the run.
#define NONFINITE_MAX_SKIPPED 10

// Means "none", for a position or for the number of an RMSNorm (nonfinite_norm). It is larger than all positions and
// numbers. A double holds it exactly: ranks compare positions and numbers as doubles.
#define NONFINITE_NONE ((int64_t)1 << 53)

// One rank's findings about a step that was not taken (adamw_takes).
typedef struct {
    double loss, norm;  // over all ranks
    // lowest number (nonfinite_norm) of an RMSNorm whose input was bad on this rank: not finite or, on a GPU, so large
    // that the sum of its squares overflowed fp32. NONFINITE_NONE: there is none
    int64_t forward;
    uint32_t magnitude;  // this rank's largest gradient (adamw_magnitude)
    int64_t position;    // this rank's first large gradient (adamw_large): its place in the backward order of the shard
    // 1: magnitude and position are those of single gradients. Larger: only norms of blocks of `span` gradients are
    // known. Then magnitude is the largest such norm, and position is that of the element with the lowest index in the
    // first block, in backward order, whose norm is large
    int64_t span;
} NonfiniteStep;

// Numbers a model's RMSNorms over [R, C] in the order of the forward pass: two in each layer, then the final norm, with
// `second` = false and layer L. QK-norms have no number. The first norm whose input is bad (NonfiniteStep.forward)
// tells which block of the model, before that norm, went wrong.
static inline int64_t nonfinite_norm(int64_t layer, bool second) { return 2 * layer + second; }

// Returns the number of the last block. A block has the number of the norm that reads its result: the embedding is 0,
// then come attention and MLP of each layer. The last block is the final norm and lm_head; its result is the loss, and
// its number is one above the final norm's.
static inline int64_t nonfinite_last_block(const ParameterTable *t) { return nonfinite_norm(t->num_layers, true); }

static inline int64_t nonfinite_block(const ParameterTable *t, const Parameter *p) {
    const int64_t in_unit = p->offset - layer_offset(t, p->layer);
    const LayerOffsets *at = &t->layer;
    if (p->layer < 0) return in_unit == t->root.embedding ? 0 : nonfinite_last_block(t);
    const bool mlp = in_unit == at->norm2 || in_unit == at->wgate || in_unit == at->wup || in_unit == at->wdown;
    return nonfinite_norm(p->layer, true) + mlp;
}

// True if the block reads the parameter. A tied embedding is read by two blocks, the first and the last.
static inline bool nonfinite_block_reads(const ParameterTable *t, int64_t block, const Parameter *p) {
    const bool tied = t->root.lm_head < 0 && p->layer < 0 && p->offset == t->root.embedding;
    return nonfinite_block(t, p) == block || (tied && block == nonfinite_last_block(t));
}

static inline void nonfinite_block_name(const ParameterTable *t, int64_t block, char *out, size_t capacity) {
    const bool attention = block % 2 == 1;
    if (block == 0) format_checked(out, capacity, "the embedding");
    else if (block == nonfinite_last_block(t)) format_checked(out, capacity, "the final norm or lm_head");
    else
        format_checked(out, capacity, "the %s of layer %lld", attention ? "attention block" : "MLP",
                       (long long)((block - 1) / 2));
}

// One element of a parameter.
typedef struct {
    int64_t parameter, element;  // index in the table; index in the parameter
    int64_t magnitude;           // bits of |value|: they order as values do, with NaN the largest; -1: no element
    float value;
} NonfiniteWeight;

// Updates *largest with the largest weight of n stored values; the first is element `first` of the parameter.
static inline void nonfinite_scan(NonfiniteWeight *largest, const void *values, bool fp32, int64_t n, int64_t parameter,
                                  int64_t first) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = fp32 ? ((const uint32_t *)values)[i] : (uint32_t)((const bf16_bits *)values)[i] << 16;
        const int64_t magnitude = bits & 0x7fffffffu;
        if (magnitude <= largest->magnitude) continue;
        const NonfiniteWeight found = {parameter, first + i, magnitude, float_from_bits(bits)};
        *largest = found;
    }
}

// Returns the weight of largest magnitude that a block reads; NaN counts as the largest. Each rank reads its own part.
// All ranks call, and get one answer.
static inline NonfiniteWeight nonfinite_largest_weight(const ParameterTable *t, const TrainerState *s, int64_t block) {
    const Comm *c = s->comm;
    const bool fp32 = s->types[STATE_WEIGHTS] == ST_F32;
    const int64_t chunk = IO_CHUNK_BYTES / 4;
    NonfiniteWeight largest = {0, 0, -1, 0};
    void *buffer = xcalloc((size_t)chunk, fp32 ? 4 : 2);
    for (int64_t i = 0; i < t->count; i++) {
        if (!nonfinite_block_reads(t, block, &t->entries[i])) continue;
        const ShardRange r = state_range(t, s, &t->entries[i], STATE_WEIGHTS);
        for (int64_t done = 0; done < r.count; done += chunk) {
            const int64_t n = min_i64(chunk, r.count - done);
            s->read(s->context, STATE_WEIGHTS, r.shard + done, n, buffer);
            nonfinite_scan(&largest, buffer, fp32, n, i, r.first + done);
        }
    }
    free(buffer);
    const bool mine = comm_max(c, COMM_WORLD, (double)largest.magnitude) == (double)largest.magnitude;
    const double holder = comm_min(c, COMM_WORLD, (double)(mine ? c->rank : c->world));
    comm_broadcast(c, COMM_WORLD, (int64_t)holder, &largest, sizeof largest);
    return largest;
}

// Converts a position in the backward order of a rank's shard to one of the whole model.
static inline int64_t nonfinite_position(const ParameterTable *t, const ShardPlan *s, int64_t position) {
    const int64_t element = backward_position(shard_backward_order(t, s), position);
    return backward_position(backward_order(t), shard_to_flat(t, s, element));
}

// Describes the first large gradient, in backward order, of all ranks, and returns its parameter. All ranks call.
static inline const Parameter *nonfinite_gradient(const ParameterTable *t, const TrainerState *s,
                                                  const NonfiniteStep *step, char *out, size_t capacity) {
    const Comm *c = s->comm;
    const uint32_t largest = (uint32_t)comm_max(c, COMM_WORLD, (double)step->magnitude);
    const bool large = step->magnitude >= adamw_large(largest);
    const double own = (double)(large ? nonfinite_position(t, s->plan, step->position) : NONFINITE_NONE);
    const double first = comm_min(c, COMM_WORLD, own);
    const double holder = comm_min(c, COMM_WORLD, (double)(own == first ? c->rank : c->world));
    const int64_t element = backward_position(backward_order(t), (int64_t)first);
    const Parameter *p = t->entries, *last = t->entries + t->count - 1;
    while (p < last && (element < p->offset || element >= p->offset + parameter_elements(p))) p++;
    char rank[48] = "", which[192] = "the first gradient that is not finite", part[96] = "";
    const float value = float_from_bits(largest);
    if (step->span > 1)
        format_checked(part, sizeof part, " or one of the %lld after it%s", (long long)(step->span - 1),
                       element + step->span > p->offset + parameter_elements(p) ? ", maybe in another tensor" : "");
    if (isfinite(value) && step->span > 1)
        format_checked(which, sizeof which, "norms of blocks of %lld gradients reach %g, and the first large gradient",
                       (long long)step->span, (double)value);
    else if (isfinite(value))
        format_checked(which, sizeof which, "gradients reach %g, and the first large one", (double)value);
    if (c->world > 1) format_checked(rank, sizeof rank, ", in the shard of rank %lld", (long long)holder);
    format_checked(out, capacity, ": %s, in backward order, is in %s, element %lld%s%s", which, p->name,
                   (long long)(element - p->offset), part, rank);
    return p;
}

// Describes where the first bad value appears: the block of the model, and the block's largest weight, which is often
// the cause. Bad values in other blocks may only follow from the first. All ranks call.
static inline void nonfinite_place(const ParameterTable *t, const TrainerState *s, const NonfiniteStep *step, char *out,
                                   size_t capacity) {
    char name[64], gradient[320] = "";
    int64_t block = (int64_t)comm_min(s->comm, COMM_WORLD, (double)step->forward);
    if (block == NONFINITE_NONE && !isfinite(step->loss)) block = nonfinite_last_block(t);
    const bool forward = block != NONFINITE_NONE;
    if (!forward) block = nonfinite_block(t, nonfinite_gradient(t, s, step, gradient, sizeof gradient));
    nonfinite_block_name(t, block, name, sizeof name);
    const NonfiniteWeight w = nonfinite_largest_weight(t, s, block);
    format_checked(out, capacity,
                   "The problem begins in %s, in the %s pass%s; the largest weight there is %g, in %s, element %lld",
                   name, forward ? "forward" : "backward", gradient, (double)w.value, t->entries[w.parameter].name,
                   (long long)w.element);
}

// Reports where step `step` (counted from 0) went wrong. Ends the run, but returns with --on-nonfinite skip if fewer
// than NONFINITE_MAX_SKIPPED steps in a row were skipped. `skipped_in_a_row` includes this step. All ranks call.
static inline void nonfinite_report(const Options *o, const ParameterTable *t, const TrainerState *s,
                                    const NonfiniteStep *what, int64_t step, int64_t skipped_in_a_row) {
    char place[640], norm[128] = "the gradient norm is not finite";
    const long long number = (long long)step + 1;
    const double loss = isnan(what->loss) ? (double)NAN : what->loss;  // prints nan, never -nan
    nonfinite_place(t, s, what, place, sizeof place);
    if (adamw_accepts(what->norm))
        format_checked(norm, sizeof norm, "the loss is not finite, though the gradient norm is %g", what->norm);
    else if (isfinite(what->norm))
        format_checked(norm, sizeof norm,
                       "the gradient norm is %g, and above %g, where squares may overflow, it counts as not finite",
                       what->norm, ADAMW_LARGEST_NORM);
    if (o->on_nonfinite == NONFINITE_STOP)
        die_with(EXIT_NONFINITE,
                 "step %lld: %s. %s. The loss is %g. Nothing of this step is saved. A smaller --learning-rate, "
                 "--grad-clip 1 or more --warmup-steps may help; --on-nonfinite skip leaves such steps out",
                 number, norm, place, loss);
    if (skipped_in_a_row >= NONFINITE_MAX_SKIPPED)
        die_with(EXIT_NONFINITE,
                 "step %lld: %lld steps in a row were skipped, now because %s. %s. The loss is %g. A smaller "
                 "--learning-rate may help",
                 number, (long long)skipped_in_a_row, norm, place, loss);
    if (s->comm->rank == 0) warn("step %lld skipped: %s. %s. The loss is %g", number, norm, place, loss);
}

#endif
