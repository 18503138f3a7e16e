// Says if a run fits its memory, and if not, which options would make it fit at the lowest price.
// It also finds the choice of --recompute that auto stands for.
#ifndef LLMC_MEMORY_FIT_H
#define LLMC_MEMORY_FIT_H

#include "../config/supported.h"
#include "../ranks/comm.h"

// Returns the bytes that a run with these options needs on one rank, including memory outside the memory plan. It need
// not free what it allocates: --recompute auto calls it a few times; the advice calls it often, but then the process
// ends.
typedef int64_t (*MemoryNeeded)(const Options *o, const ModelConfig *m, const Comm *c);

// A run, and the memory that it may use.
typedef struct {
    const Options *options;
    const ModelConfig *model;
    const Comm *comm;
    TrainerKind kind;
    MemoryNeeded needed;
    int64_t available;  // bytes that one rank may use
    bool ranks_help;    // true: each rank has `available` bytes, however many there are; false: ranks share the memory
} MemoryFit;

// The changes of options that may make a run fit, in the order in which a combination makes them.
enum {
    FIT_FULL_SHARDING,
    FIT_TENSORWISE,
    FIT_COAT,
    FIT_BF16_MOMENTS,
    FIT_BF16_WEIGHTS,
    FIT_BATCH_1,
    FIT_RECOMPUTE,  // the first of four: --recompute norm, attention, mlp, layer
    FIT_IN_BACKWARD = FIT_RECOMPUTE + RECOMPUTE_LAYER,
    FIT_FP8_ACTIVATIONS,  // follows the changes to --recompute, some of which rule it out
    FIT_OFFLOAD,
    FIT_CHANGES,
    FIT_MOST_RANKS = 1024
};

static inline bool memory_fit_set_recompute(Options *o, int choice, char *words, size_t capacity) {
    static const char *const names[] = {RECOMPUTES(CHOICE_WORD_ALONE)};
    if (o->recompute >= choice) return false;
    o->recompute = choice;
    return format_checked(words, capacity, " --recompute %s", names[choice]), true;
}

// Does the part of memory_fit_change that changes the dtype of the moments or of the master weights.
static inline bool memory_fit_change_states(Options *o, int change, char *words, size_t capacity) {
    switch (change) {
    case FIT_COAT:
        if (o->optimizer_state != MOMENTS_BF16 && o->optimizer_state != MOMENTS_FP32) return false;
        o->optimizer_state = MOMENTS_COAT_STOCHASTIC;
        return format_checked(words, capacity, " --optimizer-state coat-stochastic"), true;
    case FIT_BF16_MOMENTS:
        if (o->optimizer_state != MOMENTS_FP32) return false;
        o->optimizer_state = MOMENTS_BF16;
        return format_checked(words, capacity, " --optimizer-state bf16"), true;
    default:
        if (options_bf16_weights(o) || options_offloaded(o).master) return false;
        o->master_weights = STORAGE_BF16;
        return format_checked(words, capacity, " --master-weights bf16"), true;
    }
}

// Makes one of the changes above, and writes its options as a user gives them. False if the run has them already, or if
// they would save nothing or change how --grad-clip acts. If the run can have them, supported() says.
static inline bool memory_fit_change(Options *o, const Comm *c, int change, char *words, size_t capacity) {
    static const char *const with_moments[2][2] = {{"moments", "moments,activations"},
                                                   {"moments,master", "moments,master,activations"}};
    const Offloaded out = options_offloaded(o);
    switch (change) {
    case FIT_FULL_SHARDING:
        if (c->world == 1 || o->sharding == SHARDING_FULL) return false;
        format_checked(words, capacity, " --sharding full%s", o->shard_size ? " --shard-size 0" : "");
        o->sharding = SHARDING_FULL, o->shard_size = 0;
        return true;
    case FIT_TENSORWISE:
        if (!options_recipe(o)->bounded) return false;
        o->fp8_recipe = RECIPE_TENSORWISE;
        return format_checked(words, capacity, " --fp8-recipe tensorwise"), true;
    case FIT_COAT:
    case FIT_BF16_MOMENTS:
    case FIT_BF16_WEIGHTS: return memory_fit_change_states(o, change, words, capacity);
    case FIT_BATCH_1:
        if (o->batch_size == 1) return false;
        o->grad_accumulation_steps *= o->batch_size, o->batch_size = 1;
        return format_checked(words, capacity, " --batch-size 1 --grad-accumulation-steps %lld",
                              (long long)o->grad_accumulation_steps),
               true;
    case FIT_IN_BACKWARD:
        if (o->optimizer_in_backward || o->grad_clip > 0) return false;
        o->optimizer_in_backward = true;
        return format_checked(words, capacity, " --optimizer-in-backward"), true;
    case FIT_FP8_ACTIVATIONS:
        if (o->fp8_activations == ON) return false;
        o->fp8_activations = ON;
        return format_checked(words, capacity, " --fp8-activations on"), true;
    case FIT_OFFLOAD:
        if (out.moments) return false;
        o->offload = with_moments[out.master][out.activations];
        return format_checked(words, capacity, " --offload %s", o->offload), true;
    default: return memory_fit_set_recompute(o, RECOMPUTE_NORM + change - FIT_RECOMPUTE, words, capacity);
    }
}

// The cost of each change. `percent` is an estimate of the time that the change adds to a step. Most of them come from
// llama3.1-8b in FP8 on one H200 (docs/RESULTS.md): batch 1 takes 28% more time per token than batch 4, --recompute
// norm, attention, mlp and layer add 1%, 9%, 10% and 20% at T 8192 and 2%, 6%, 13% and 17% at T 2048,
// --optimizer-in-backward adds 2% at most, and coat-stochastic 3% at T 8192; tensorwise takes 4% more than
// tensorwise_bounded at T 2048. --fp8-activations adds 3% at most on one H100. For --sharding full there is no
// measurement. Offloading has 0, because the time of its copies depends on much. `price` orders the combinations. bf16
// moments and weights cost no time but change how numbers are rounded, so their price is above that of changes with 1%.
// FP8 moments have a high price, and offloading has the highest. No change offloads master weights, because bf16
// masters cost less time and need less memory.
static const struct {
    int price, percent;
} memory_fit_costs[FIT_CHANGES] = {
    {1, 1},     // FIT_FULL_SHARDING
    {3, 4},     // FIT_TENSORWISE
    {100, 3},   // FIT_COAT
    {2, 0},     // FIT_BF16_MOMENTS
    {3, 0},     // FIT_BF16_WEIGHTS
    {28, 28},   // FIT_BATCH_1
    {2, 2},     // FIT_RECOMPUTE: norm
    {9, 9},     // attention
    {13, 13},   // mlp
    {20, 20},   // layer
    {1, 1},     // FIT_IN_BACKWARD
    {4, 3},     // FIT_FP8_ACTIVATIONS
    {1000, 0},  // FIT_OFFLOAD
};

// True if the run can have these options: the trainer supports them, and the checkpoint that the run continues from
// does not hold it to those that it has.
static inline bool memory_fit_allows(const MemoryFit *f, const Options *o, int64_t world) {
    char message[768], then[PATH_CAPACITY], now[PATH_CAPACITY];
    const bool continues = f->options->resume || *f->options->branch;
    for (const OptionRow *row = option_rows(); continues && row->name; row++) {
        if (row->match != MUST_MATCH && row->match != BRANCHES) continue;
        option_format(f->options, row, then, sizeof then), option_format(o, row, now, sizeof now);
        if (strcmp(then, now)) return false;
    }
    return supported(f->kind, f->model, o, world, message, sizeof message) == 0;
}

// Returns the bytes that each of `world` ranks needs with these options.
static inline int64_t memory_fit_bytes(const MemoryFit *f, const Options *o, int64_t world) {
    Comm c;
    comm_assume(&c, world);
    comm_split(&c, options_shard_group(o, world));
    return f->needed(o, f->model, &c);
}

// A combination of changes.
typedef struct {
    char words[256];  // its options
    int price, percent;
    int64_t bytes;  // that a rank then needs
} MemoryCombination;

// Applies the changes in `set`, a bit for each. False if one is not possible, if several set --recompute, or if the run
// cannot have them all.
static inline bool memory_fit_combine(const MemoryFit *f, int set, MemoryCombination *out) {
    Options o = *f->options;
    const int recomputes = set >> FIT_RECOMPUTE & ((1 << RECOMPUTE_LAYER) - 1);
    memset(out, 0, sizeof *out);
    if (recomputes & (recomputes - 1)) return false;
    for (int i = 0; i < FIT_CHANGES; i++) {
        const size_t used = strlen(out->words);
        if (!(set >> i & 1)) continue;
        if (!memory_fit_change(&o, f->comm, i, out->words + used, sizeof out->words - used)) return false;
        out->price += memory_fit_costs[i].price, out->percent += memory_fit_costs[i].percent;
    }
    if (recomputes && f->options->recompute != RECOMPUTE_NONE)  // this time is spent already
        out->percent -= memory_fit_costs[FIT_RECOMPUTE + (int)f->options->recompute - 1].percent;
    if (!memory_fit_allows(f, &o, f->comm->world)) return false;
    out->bytes = memory_fit_bytes(f, &o, f->comm->world);
    return true;
}

// Returns the combination of changes that fits at the lowest price, else the combination that needs the fewest bytes.
// `bytes` is INT64_MAX if no change is possible.
static inline MemoryCombination memory_fit_search(const MemoryFit *f) {
    MemoryCombination best = {}, other;
    best.bytes = INT64_MAX;
    for (int set = 1; set < 1 << FIT_CHANGES; set++) {
        if (!memory_fit_combine(f, set, &other)) continue;
        const bool fits = other.bytes <= f->available, best_fits = best.bytes <= f->available;
        if (fits && best_fits ? other.price < best.price : other.bytes < best.bytes) best = other;
    }
    return best;
}

// Returns the smallest power of two, above the run's number of ranks, with which the run fits without other changes. 0:
// none up to FIT_MOST_RANKS; or none is tried, with --sharding hybrid, or if more ranks bring no memory.
static inline int64_t memory_fit_ranks(const MemoryFit *f) {
    if (f->options->sharding == SHARDING_HYBRID || !f->ranks_help) return 0;
    for (int64_t world = 2; world <= FIT_MOST_RANKS; world *= 2) {
        if (world <= f->comm->world || !memory_fit_allows(f, f->options, world)) continue;
        if (memory_fit_bytes(f, f->options, world) <= f->available) return world;
    }
    return 0;
}

// Returns the first of none, norm, attention, mlp and layer, as --recompute, that the other options allow and with
// which the run fits; the last that they allow if none does.
static inline int memory_fit_recompute(const MemoryFit *f) {
    Options o = *f->options;
    int last = RECOMPUTE_NONE;
    for (o.recompute = RECOMPUTE_NONE; o.recompute <= RECOMPUTE_LAYER; o.recompute++) {
        if (!memory_fit_allows(f, &o, f->comm->world)) continue;
        last = o.recompute;
        if (f->needed(&o, f->model, f->comm) <= f->available) break;
    }
    return last;
}

// Writes which options would make the run fit, or at least need fewer bytes.
static inline void memory_fit_advice(const MemoryFit *f, char *out, size_t capacity) {
    const double GiB = 1024.0 * 1024 * 1024;
    const MemoryCombination best = memory_fit_search(f);
    const int64_t ranks = memory_fit_ranks(f);
    const bool copies = best.price >= memory_fit_costs[FIT_OFFLOAD].price;
    char longer[64] = "";
    if (best.percent)
        format_checked(longer, sizeof longer, ", and a step on a GPU takes about %d%% longer", best.percent);
    if (best.bytes <= f->available)
        format_checked(out, capacity, "with%s it needs %.1f GiB%s%s", best.words, (double)best.bytes / GiB, longer,
                       copies ? ", and each step copies the offloaded data to the GPU and back" : "");
    else if (best.bytes < INT64_MAX)
        format_checked(out, capacity,
                       "with%s it still needs %.1f GiB; use a shorter --sequence-length or a smaller model", best.words,
                       (double)best.bytes / GiB);
    else format_checked(out, capacity, "use a shorter --sequence-length or a smaller model");
    const size_t used = strlen(out);
    if (ranks)
        format_checked(out + used, capacity - used, "; or use %lld ranks (mpirun -np %lld)", (long long)ranks,
                       (long long)ranks);
}

// Dies unless the run, which needs `bytes`, fits. `limit`: the words before the available GiB, such as "--memory-limit
// is".
static inline void memory_fit_require(const MemoryFit *f, int64_t bytes, const char *limit) {
    const double GiB = 1024.0 * 1024 * 1024;
    char advice[768];
    if (bytes <= f->available) return;
    memory_fit_advice(f, advice, sizeof advice);
    die_with(EXIT_MEMORY, "this run needs %.1f GiB of memory for each rank, and %s %.1f GiB; %s", (double)bytes / GiB,
             limit, (double)f->available / GiB, advice);
}

#endif
