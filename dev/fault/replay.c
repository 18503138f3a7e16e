// Runs the fuzz targets without libFuzzer, on mutations of their seeds or on a file. A run number always has the same
// input.
//
//   replay TARGET RUNS [FIRST]   RUNS runs from number FIRST [0] on; the lowest numbers use the unchanged seeds
//   replay TARGET seeds FOLDER   writes the seeds to files, as the initial corpus of libFuzzer
//   replay TARGET FILE           one run on the bytes of a file, for example one that libFuzzer wrote after a failure
#define FUZZ_REPLAY
#include "fuzz_config.c"
#include "fuzz_index.c"
#include "fuzz_json.c"
#include "fuzz_log.c"
#include "fuzz_options.c"
#include "fuzz_safetensors.c"
#include "fuzz_shard.c"
#include "fuzz_tokenizer.c"
#include "fuzz_trainer.c"

#include <sanitizer/common_interface_defs.h>
#include <signal.h>

#define REPLAY_CAPACITY (2 * FUZZ_SEED_CAPACITY)
#define REPLAY_HANG_SECONDS 60
#define REPLAY_MAX_SEEDS 16

typedef struct {
    const FuzzTarget *target;
    const char *file;  // the input's path; NULL: inputs come from seeds
    uint64_t run;
    int num_seeds;
    uint8_t seeds[REPLAY_MAX_SEEDS][FUZZ_SEED_CAPACITY];
    size_t sizes[REPLAY_MAX_SEEDS];
} Replay;

static Replay *replay(void) {
    static Replay state;
    return &state;
}

static const FuzzTarget *replay_target(const char *name) {
    static const FuzzTarget *const targets[] = {&fuzz_config, &fuzz_index,     &fuzz_json,
                                                &fuzz_log,    &fuzz_options,   &fuzz_safetensors,
                                                &fuzz_shard,  &fuzz_tokenizer, &fuzz_trainer};
    for (size_t i = 0; i < sizeof targets / sizeof targets[0]; i++)
        if (strcmp(targets[i]->name, name) == 0) return targets[i];
    fprintf(stderr, "there is no fuzz target %s\n", name);
    _exit(2);
}

static void replay_open(const char *name) {
    Replay *r = replay();
    r->target = replay_target(name);
    for (int i = 0; i < REPLAY_MAX_SEEDS; i++) {
        r->sizes[i] = r->target->seed(i, r->seeds[i]);
        if (!r->sizes[i]) break;
        r->num_seeds++;
    }
}

// ---- mutations: the k-th random number of a run is rng_u64(key, k)

typedef struct {
    uint64_t key, next;
} Chance;

static uint64_t chance_below(Chance *c, uint64_t n) { return rng_u64(c->key, c->next++) % n; }

// Replaces `cut` bytes at `at` by `n` bytes, unless the result would be larger than REPLAY_CAPACITY. Returns the size.
static size_t mutate_splice(uint8_t *data, size_t size, size_t at, size_t cut, const void *bytes, size_t n) {
    if (size - cut + n > REPLAY_CAPACITY) return size;
    memmove(data + at + n, data + at + cut, size - at - cut);
    memcpy(data + at, bytes, n);
    return size - cut + n;
}

static size_t mutate_once(uint8_t *data, size_t size, Chance *c) {
    static const char *const words[] = {"{",
                                        "}",
                                        "[",
                                        "]",
                                        ",",
                                        ":",
                                        "\"",
                                        "\"\":",
                                        "\\u0000",
                                        "\\ud800",
                                        "null",
                                        "true",
                                        "-1",
                                        "0",
                                        "0.5",
                                        "1e999",
                                        "nan",
                                        "9223372036854775807",
                                        "18446744073709551616",
                                        "../",
                                        "/",
                                        "%s%n",
                                        "--",
                                        "=",
                                        "\n",
                                        "\xff",
                                        "\xc3\xa4",
                                        "__metadata__"};
    static const uint64_t numbers[] = {
        0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0xffffffff, 0x100000000, 0x7fffffffffffffff, 0xffffffffffffffff};
    uint8_t other[16];  // holds the bytes that case 6 repeats
    const size_t at = chance_below(c, size + 1), most = size - at, cut = chance_below(c, most < 16 ? most + 1 : 17);
    const char *word = words[chance_below(c, sizeof words / sizeof words[0])];
    const uint64_t number = numbers[chance_below(c, sizeof numbers / sizeof numbers[0])];
    const uint64_t random = rng_u64(c->key, c->next++);
    const size_t width = (size_t)1 << chance_below(c, 4);
    switch (chance_below(c, 9)) {
    case 0:
        if (most) data[at] ^= (uint8_t)(1u << random % 8);
        return size;
    case 1:
        if (most) data[at] = (uint8_t)random;
        return size;
    case 2: return mutate_splice(data, size, at, cut, "", 0);
    case 3: return mutate_splice(data, size, at, 0, &random, cut < 8 ? cut : 8);
    case 4: return mutate_splice(data, size, at, random % 2 ? cut : 0, word, strlen(word));
    case 5: return mutate_splice(data, size, at, most < width ? most : width, &number, width);
    case 6: memcpy(other, data + at, cut); return mutate_splice(data, size, chance_below(c, size + 1), 0, other, cut);
    case 7: return random % 8 ? size : at;  // one time in eight, the input ends at `at`
    default: {
        const uint64_t seed = chance_below(c, (uint64_t)replay()->num_seeds), n = replay()->sizes[seed];
        const uint64_t from = chance_below(c, n);
        return mutate_splice(data, size, at, cut, replay()->seeds[seed] + from, chance_below(c, n - from + 1));
    }
    }
}

// Makes the input of run number `run`: a seed, or a seed after 1 to 6 mutations. Returns its size.
static size_t mutate(uint64_t run, uint8_t *data) {
    const uint64_t seeds = (uint64_t)replay()->num_seeds;
    Chance c = {rng_key(1, run), 0};
    const uint64_t seed = run < seeds ? run : chance_below(&c, seeds);
    size_t size = replay()->sizes[seed];
    memcpy(data, replay()->seeds[seed], size);
    for (uint64_t n = run < seeds ? 0 : 1 + chance_below(&c, 6); n > 0; n--) size = mutate_once(data, size, &c);
    return size;
}

// ---- failures: a line says how to repeat the run

static void replay_report(void) {
    const unsigned long long run = replay()->run;
    const char *name = replay()->target->name;
    if (replay()->file)
        fprintf(stderr, "%s failed; to repeat it: build/fault/replay %s %s\n", name, name, replay()->file);
    else fprintf(stderr, "run %llu of %s failed; to repeat it: build/fault/replay %s 1 %llu\n", run, name, name, run);
}

static void replay_signal(int number) {
    if (number == SIGALRM) fprintf(stderr, "timeout: at most 256 runs took more than %d s: ", REPLAY_HANG_SECONDS);
    else fprintf(stderr, "signal %d: ", number);
    replay_report();
    _exit(1);
}

// ---- runs and seeds

static void replay_runs(uint64_t runs, uint64_t first) {
    static uint8_t data[REPLAY_CAPACITY];
    for (uint64_t run = first; run < first + runs; run++) {
        replay()->run = run;
        if (run == first || run % 256 == 0) alarm(REPLAY_HANG_SECONDS);
        const size_t size = mutate(run, data);
        uint8_t *exact = (uint8_t *)malloc(size ? size : 1);  // so that the sanitizer finds a read past the end
        memcpy(exact, data, size);
        fuzz_run(replay()->target->run, exact, size);
        free(exact);
    }
}

static void replay_write_seeds(const char *folder) {
    Replay *r = replay();
    for (int i = 0; i < r->num_seeds; i++) {
        char path[PATH_CAPACITY];
        format_checked(path, sizeof path, "%s/seed%d", folder, i);
        FILE *file = fopen(path, "wb");
        if (!file || fwrite(r->seeds[i], 1, r->sizes[i], file) != r->sizes[i] || fclose(file))
            die("cannot write %s", path);
    }
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: replay TARGET RUNS [FIRST] | replay TARGET seeds FOLDER | replay TARGET FILE\n");
        return 2;
    }
    replay_open(argv[1]);
    __sanitizer_set_death_callback(replay_report);
    signal(SIGABRT, replay_signal);
    signal(SIGALRM, replay_signal);
    if (strcmp(argv[2], "seeds") == 0 && argc == 4) {
        replay_write_seeds(argv[3]);
    } else if (argv[2][strspn(argv[2], "0123456789")] == 0) {
        replay_runs(strtoull(argv[2], NULL, 10), argc > 3 ? strtoull(argv[3], NULL, 10) : 0);
    } else {
        size_t size;
        char *file = read_file(argv[2], &size);
        if (!file) die("cannot read %s: %s", argv[2], strerror(errno));
        replay()->file = argv[2];
        alarm(REPLAY_HANG_SECONDS);
        fuzz_run(replay()->target->run, (const uint8_t *)file, size);
        free(file);
    }
    return 0;
}
