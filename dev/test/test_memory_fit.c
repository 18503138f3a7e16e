// Tests the advice of memory_fit.h with a stand-in for the memory plan: the cheapest options that fit are named.
#include "../../llmc/base/rng.h"
#include "../../llmc/run/memory_fit.h"
#include "lib/check.h"

#define GIB ((int64_t)1 << 30)

// A stand-in for the memory plan. Its numbers are GiB. Weights, gradients and moments take 40. fp32 moments add 4, fp32
// masters 8, FP16 masters 4. coat-stochastic moments take away 8, --offload moments 3, --offload master 6, and the
// option --optimizer-in-backward 2. With --sharding full, this sum is divided by the ranks of a shard group. Each
// sequence of a batch takes 10, or 9, 7, 5 and 1 with --recompute norm, attention, mlp and layer; --fp8-activations
// takes away 3 from each. FP8 weights that AdamW writes take 5.
static int64_t needed(const Options *o, const ModelConfig *m, const Comm *c) {
    static const int64_t sequence[] = {10, 9, 7, 5, 1};  // indexed by o->recompute
    (void)m;
    int64_t gib = 40 + (o->optimizer_state == MOMENTS_FP32 ? 4 : 0) + (o->master_weights == STORAGE_FP32 ? 8 : 0) +
                  (o->master_weights == STORAGE_FP16 ? 4 : 0) - (o->optimizer_in_backward ? 2 : 0) -
                  (o->optimizer_state == MOMENTS_COAT_STOCHASTIC ? 8 : 0);
    gib -= (options_offloaded(o).moments ? 3 : 0) + (options_offloaded(o).master ? 6 : 0);
    if (o->sharding == SHARDING_FULL) gib /= c->shard_size;
    gib += options_recipe(o)->bounded ? 5 : 0;
    gib += o->batch_size * (sequence[o->recompute] - (options_keeps_fp8(o) ? 3 : 0));
    return gib * GIB;
}

typedef struct {
    Options options;
    Comm comm;
    int64_t available;  // GiB
    bool ranks_help;
} Case;

static void require_action(void *context) {
    Case *c = (Case *)context;
    ModelConfig m;
    model_config_preset(&m, "llama3.2-1b");
    const MemoryFit fit = {&c->options, &m, &c->comm, GPU_TRAINER, needed, c->available * GIB, c->ranks_help};
    memory_fit_require(&fit, needed(&c->options, &m, &c->comm), "the limit is");
}

static Case case_of(int64_t batch, int64_t available) {
    Case c;
    c.options = options_default();
    c.options.model = "tiny";
    options_resolve(&c.options);
    c.options.batch_size = batch;
    c.comm = comm_one();
    c.available = available, c.ranks_help = true;
    return c;
}

static void check_says(const char *label, Case *c, const char *expected) {
    CHECK_DIES(require_action, c, expected, "%s: the message says \"%s\"; found", label, expected);
}

static void test_single(void) {
    Case c = case_of(1, 50);
    require_action(&c);
    CHECK(true, "a run that fits goes on");
    c = case_of(1, 45), c.options.grad_clip = 1;
    check_says("recompute", &c,
               "needs 50.0 GiB of memory for each rank, and the limit is 45.0 GiB; with --recompute mlp it needs "
               "45.0 GiB, and a step on a GPU takes about 13% longer; or use 2 ranks (mpirun -np 2)");
    c.available = 44;
    check_says("recompute all", &c,
               "with --recompute layer it needs 41.0 GiB, and a step on a GPU takes about 20% longer");
    c.options.recompute = RECOMPUTE_MLP;
    check_says(
        "recompute more", &c,
        "and the limit is 44.0 GiB; with --recompute layer it needs 41.0 GiB, and a step on a GPU takes about 7% "
        "longer");
    c = case_of(1, 49);
    check_says("optimizer in the backward pass", &c, "with --optimizer-in-backward it needs 48.0 GiB");
    c.options.grad_clip = 1;
    check_says("recompute the norms", &c,
               "with --recompute norm it needs 49.0 GiB, and a step on a GPU takes about 2% longer");
    c = case_of(2, 50);
    check_says("recompute before batch 1", &c,
               "with --recompute mlp it needs 50.0 GiB, and a step on a GPU takes about 13% longer");
    c = case_of(2, 41), c.options.recompute = RECOMPUTE_LAYER, c.options.grad_clip = 1;
    check_says("batch 1", &c,
               "with --batch-size 1 --grad-accumulation-steps 2 it needs 41.0 GiB, and a step on a GPU takes about 28% "
               "longer");
    c.options.grad_accumulation_steps = 3;
    check_says("the global batch stays", &c, "with --batch-size 1 --grad-accumulation-steps 6 it");
    c = case_of(1, 50), c.options.optimizer_state = MOMENTS_FP32;
    check_says("moments", &c, "with --optimizer-state bf16 it needs 50.0 GiB; or use 2 ranks");
    c.options.master_weights = STORAGE_FP32;
    c.available = 54;
    check_says("masters alone suffice", &c, "with --master-weights bf16 it needs 54.0 GiB");
    c = case_of(1, 50), c.options.master_weights = STORAGE_FP16;
    check_says("FP16 masters", &c, "with --master-weights bf16 it needs 50.0 GiB");
}

// The advice prefers --fp8-activations to recomputation that saves as much memory: FP8 activations add less time to a
// step.
static void test_fp8_activations(void) {
    Case c = case_of(1, 47);
    c.options.precision = PRECISION_FP8, c.options.grad_clip = 1;
    check_says("FP8 activations suffice", &c,
               "with --fp8-activations on it needs 47.0 GiB, and a step on a GPU takes about 3%");
    c.available = 46;
    check_says("with norms", &c, "with --recompute norm --fp8-activations on it needs 46.0 GiB");
    c.available = 41;
    check_says("recompute all, instead of FP8 activations", &c, "with --recompute layer it needs 41.0 GiB");
    c.options.fp8_activations = ON, c.available = 46;
    check_says("FP8 activations are on", &c, "with --recompute norm it needs 46.0 GiB");
    c.options.precision = PRECISION_BF16, c.options.fp8_activations = OFF, c.available = 47;
    check_says("not in bf16", &c, "with --recompute attention it needs 47.0 GiB");
    c.options.precision = PRECISION_FP8, c.options.fp8_recipe = RECIPE_BOUNDED, c.available = 50;
    check_says("without FP8 weights that AdamW writes", &c,
               "with --fp8-recipe tensorwise it needs 50.0 GiB, and a step on a GPU takes about 4% longer");
    c.options.grad_clip = 0, c.available = 37;
    check_says("FP8 moments need another recipe", &c,
               "with --fp8-recipe tensorwise --optimizer-state coat-stochastic ");
}

static void test_combinations(void) {
    Case c = case_of(1, 41);
    c.options.optimizer_state = MOMENTS_FP32, c.options.master_weights = STORAGE_FP32;
    check_says("all of them", &c,
               "with --optimizer-state bf16 --master-weights bf16 --recompute layer it needs 41.0 GiB, and a step on a "
               "GPU takes about 20% longer");
    c.available = 30;
    check_says(
        "the last resort", &c,
        "--master-weights bf16 --recompute layer --offload moments it needs 30.0 GiB, and a step on a GPU takes about "
        "23% longer, and each step copies the offloaded data to the GPU and back");
    c.available = 27;
    check_says("nothing fits", &c,
               "with --optimizer-state coat-stochastic --master-weights bf16 --recompute layer --optimizer-in-backward "
               "--offload moments it still needs 28.0 GiB; use a shorter --sequence-length or a smaller model");
    c = case_of(1, 34);
    c.options.master_weights = STORAGE_FP32, c.options.offload = "master", c.options.recompute = RECOMPUTE_LAYER;
    c.options.grad_clip = 1, c.options.optimizer_state = MOMENTS_COAT_STOCHASTIC;
    check_says("masters stay offloaded", &c, "with --offload moments,master it needs 32.0 GiB");
    c.options.offload = "activations,master";
    check_says("activations stay offloaded", &c, "with --offload moments,master,activations it needs 32.0 GiB");
    c = case_of(1, 30);
    c.options.recompute = RECOMPUTE_LAYER, c.options.optimizer_in_backward = true;
    c.options.optimizer_state = MOMENTS_COAT_STOCHASTIC, c.options.offload = "moments";
    c.available = 27;
    check_says("no option is left", &c, "the limit is 27.0 GiB; use a shorter --sequence-length");
    c.available = 0;
    char output[4096];
    CHECK(check_dies(require_action, &c, "smaller model", output, sizeof output) && !strstr(output, "ranks (mpirun"),
          "if no number of ranks up to 1024 is enough, the message advises none: %s", output);
}

static void test_backward(void) {
    Case c = case_of(1, 48);
    check_says("the optimizer in the backward pass", &c,
               "with --optimizer-in-backward it needs 48.0 GiB, and a step on a GPU takes about 1% longer");
    c.options.grad_clip = 1;
    check_says("not with clipping", &c, "with --recompute attention it needs 47.0 GiB");
    c = case_of(1, 48), c.options.on_nonfinite = NONFINITE_SKIP;
    check_says("not with skipped steps", &c, "with --recompute attention it needs 47.0 GiB");
    c = case_of(1, 48), c.options.grad_accumulation_steps = 2;
    check_says("not with several micro-steps", &c, "with --recompute attention it needs 47.0 GiB");
    c = case_of(2, 48);
    check_says("two changes", &c, "with --recompute mlp --optimizer-in-backward it needs 48.0 GiB");
    c.options.grad_clip = 1;
    check_says("not with the micro-steps of a smaller batch", &c, "with --recompute layer it needs 42.0 GiB");
    c = case_of(1, 31);
    check_says("FP8 moments are the last resort", &c,
               "with --optimizer-state coat-stochastic --recompute layer --optimizer-in-backward it needs 31.0 GiB");
}

// --recompute auto takes the cheapest choice that fits, or layer if none does.
static void test_auto(void) {
    static const int64_t available[] = {50, 49, 47, 46, 45, 41, 40};
    static const int expected[] = {RECOMPUTE_NONE, RECOMPUTE_NORM,  RECOMPUTE_ATTENTION, RECOMPUTE_MLP,
                                   RECOMPUTE_MLP,  RECOMPUTE_LAYER, RECOMPUTE_LAYER};
    for (int i = 0; i < 7; i++) {
        Case c = case_of(1, available[i]);
        ModelConfig m;
        model_config_preset(&m, "llama3.2-1b");
        c.options.recompute = RECOMPUTE_AUTO;
        const MemoryFit fit = {&c.options, &m, &c.comm, GPU_TRAINER, needed, c.available * GIB, true};
        const int got = memory_fit_recompute(&fit);
        CHECK(got == expected[i],
              "%lld GiB: --recompute auto takes the cheapest choice that fits, or layer if none does; found %d",
              (long long)available[i], got);
    }
}

static void test_ranks(void) {
    Case c = case_of(1, 31);
    comm_assume(&c.comm, 2);
    comm_split(&c.comm, 2);
    require_action(&c);
    c.options.sharding = SHARDING_NONE;
    comm_split(&c.comm, 1);
    check_says("sharding", &c, "with --sharding full it needs 30.0 GiB");
    c = case_of(1, 12);
    check_says("the smallest power of two", &c, "or use 16 ranks (mpirun -np 16)");
    char output[4096];
    c.ranks_help = false;
    CHECK(check_dies(require_action, &c, "smaller model", output, sizeof output) && !strstr(output, "ranks (mpirun"),
          "if more ranks do not help, the message advises no number of ranks: %s", output);
}

// Checks that the advice does not contain `words`.
static void check_lacks(const char *label, Case *c, const char *words) {
    char output[4096];
    CHECK(check_dies(require_action, c, "the limit is", output, sizeof output) && !strstr(output, words),
          "%s: the message lacks \"%s\"; found: %s", label, words, output);
}

// The advice names no option, and no number of ranks, that the trainers refuse with the run's other options.
static void test_refused(void) {
    Case c = case_of(1, 45);
    c.options.master_weights = STORAGE_FP16, c.options.optimizer_state = MOMENTS_FP32;
    check_says("bf16 moments only without FP16 master weights", &c,
               "with --optimizer-state bf16 --master-weights bf16 --recompute attention --optimizer-in-backward");
    c = case_of(4, 42);
    c.options.recompute = RECOMPUTE_LAYER, c.options.grad_clip = 1;
    check_says("several sequences", &c, "--batch-size 1 --grad-accumulation-steps 4");
    c.options.precision = PRECISION_FP8;
    check_says("several sequences in FP8", &c, "--batch-size 1 --grad-accumulation-steps 4");
    c.options.sequence_length = 1000;
    check_lacks("FP8 GEMMs need multiples of 16 tokens", &c, "--batch-size");
    c.options.sequence_length = 1024, c.options.optimizer_in_backward = true, c.available = 40;
    check_lacks("--optimizer-in-backward allows one micro-step", &c, "--batch-size");
    c = case_of(1, 12);
    c.options.grad_accum_dtype = SUM_FP8, c.options.reduce_dtype = REDUCE_FP32;
    check_lacks("FP8 gradients are not reduced in fp32 over several ranks", &c, "ranks (mpirun");
}

// --recompute auto drops no other setting: with FP8 activations it takes neither mlp nor layer, whatever fits.
static void test_auto_keeps_settings(void) {
    for (int64_t available = 30; available < 50; available++) {
        Case c = case_of(1, available);
        ModelConfig m;
        model_config_preset(&m, "llama3.2-1b");
        c.options.precision = PRECISION_FP8, c.options.fp8_activations = ON, c.options.recompute = RECOMPUTE_AUTO;
        const MemoryFit fit = {&c.options, &m, &c.comm, GPU_TRAINER, needed, available * GIB, true};
        const int got = memory_fit_recompute(&fit);
        CHECK(got <= RECOMPUTE_ATTENTION, "%lld GiB: --recompute auto keeps --fp8-activations on; found choice %d",
              (long long)available, got);
    }
}

// Reads a command line of words separated by blanks.
static Options parse(char *line) {
    static char *argv[64];
    int argc = 1;
    argv[0] = (char *)"train_fp8cu";
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    return options_parse(argc, argv);
}

// Takes the advice of random runs that do not fit, by its words, and asks again: no trainer refuses the new run.
static void test_random_advice(void) {
    static const char *const words[] = {"--fast",
                                        "--precision fp8",
                                        "--precision fp8 --fp8-recipe rowwise",
                                        "--precision fp8 --fp8-recipe mxfp8",
                                        "--fp8-activations on",
                                        "--recompute attention",
                                        "--recompute mlp",
                                        "--optimizer-in-backward",
                                        "--grad-clip 1",
                                        "--grad-accumulation-steps 2",
                                        "--grad-accum-dtype fp8",
                                        "--grad-accum-dtype fp32",
                                        "--reduce-dtype fp32",
                                        "--optimizer-state fp32",
                                        "--optimizer-state coat",
                                        "--optimizer-state msamp",
                                        "--master-weights fp32",
                                        "--master-weights fp16",
                                        "--offload master",
                                        "--offload activations",
                                        "--offload moments",
                                        "--sharding none",
                                        "--sharding hybrid --shard-size 2",
                                        "--sharding grad_op",
                                        "--on-nonfinite skip",
                                        "--batch-size 4",
                                        "--sequence-length 1000",
                                        "--msamp O2",
                                        "--copy-engines on",
                                        "--fp8-all-gather off",
                                        "--resume --checkpoint-dir c"};
    enum { WORDS = sizeof words / sizeof *words };
    int asked = 0, refused = 0;
    char first[1024] = "", line[1024], again[1024], message[768];
    for (uint64_t trial = 0; asked < 2000 && trial < 200000; trial++) {
        const TrainerKind kind = rng_uniform(0, trial) < 0.8 ? GPU_TRAINER : CPU_TRAINER;
        const int64_t world = 1 << (int)(rng_uniform(1, trial) * 4);
        ModelConfig m;
        Comm c;
        model_config_preset(&m, "llama3.2-1b");
        format_checked(line, sizeof line, "llama3.2-1b");
        for (int w = 0; w < WORDS; w++)
            if (rng_uniform(rng_key(3, trial), w) < 0.12)
                format_checked(line + strlen(line), sizeof line - strlen(line), " %s", words[w]);
        format_checked(again, sizeof again, "%s", line);
        Options o = parse(again);
        if (supported(kind, &m, &o, world, message, sizeof message)) continue;
        options_resolve(&o);
        comm_assume(&c, world);
        comm_split(&c, options_shard_group(&o, world));
        const MemoryFit fit = {&o, &m, &c, kind, needed, (int64_t)(rng_uniform(2, trial) * 50 * GIB), true};
        const MemoryCombination best = memory_fit_search(&fit);
        const int64_t ranks = memory_fit_ranks(&fit);
        if (best.bytes == INT64_MAX) continue;
        format_checked(again, sizeof again, "%s%s", line, best.words);
        format_checked(line, sizeof line, "%s", again);
        const Options advised = parse(again);
        const int status = supported(kind, &m, &advised, world, message, sizeof message);
        const bool more = ranks && supported(kind, &m, &o, ranks, message, sizeof message);
        if ((status || more) && !refused) format_checked(first, sizeof first, "%.600s: %.300s", line, message);
        asked++, refused += status || more;
    }
    CHECK(asked == 2000 && !refused, "%d of %d advices are refused; the first is %s", refused, asked, first);
}

int main(void) {
    test_single();
    test_auto();
    test_auto_keeps_settings();
    test_random_advice();
    test_fp8_activations();
    test_combinations();
    test_backward();
    test_ranks();
    test_refused();
    return check_report();
}
