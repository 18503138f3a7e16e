// Tests checkpoints and exports: save and load bit for bit, removal of old checkpoints, refusals to resume, damaged
// files, saves that fail, and weights of other programs.
#include <signal.h>
#include <sys/resource.h>

#define IO_CHUNK_BYTES ((int64_t)100)  // small, so that matrices of the small models here take several chunks
#define FOLDER_LOCK_SECONDS 0.3
#include "lib/failing_readdir.h"

#include "../../llmc/base/rng.h"
#include "../../llmc/run/run.h"
#include "lib/check.h"
#include "lib/scratch.h"

// ---- A trainer's state in host memory, and helpers.

typedef struct {
    ModelConfig model;
    ParameterTable table;
    Options options;
    CheckpointRun run;  // what a checkpoint records of the run, and --resume checks
    TrainerState state;
    char *arrays[STATE_SCALES + 1];  // NULL if the options have none; of delayed scaling, NULL without add_delayed()
} Trainer;

static int64_t element_bytes(const Trainer *t, StateKind kind) { return safetensors_type_bytes(t->state.types[kind]); }

static int64_t array_elements(const Trainer *t, StateKind kind) {
    if (kind >= STATE_AMAX_HISTORY)
        return t->state.delayed_tensors * (kind == STATE_SCALES ? 1 : t->state.delayed_window);
    if (state_is_scale(kind)) return t->table.count;
    return state_is_groups(kind) ? t->table.total / COAT_GROUP : t->table.total;
}

static char *element(Trainer *t, StateKind kind, int64_t offset, int64_t count) {
    if (offset < 0 || count < 0 || offset > array_elements(t, kind) - count)
        die("range %lld + %lld is outside", (long long)offset, (long long)count);
    return t->arrays[kind] + offset * element_bytes(t, kind);
}

// Allocates amax histories and scales, all 0. trainer_free() frees them.
static void add_delayed(Trainer *t, int64_t window) {
    t->state.delayed_tensors = tensor_count(t->model.num_layers), t->state.delayed_window = window;
    for (int kind = STATE_AMAX_HISTORY; kind <= STATE_SCALES; kind++)
        t->arrays[kind] = (char *)xcalloc((size_t)array_elements(t, (StateKind)kind), sizeof(float));
}

static void state_read(void *context, StateKind kind, int64_t offset, int64_t count, void *host) {
    Trainer *t = (Trainer *)context;
    memcpy(host, element(t, kind, offset, count), (size_t)(count * element_bytes(t, kind)));
}

static void state_write(void *context, StateKind kind, int64_t offset, int64_t count, const void *host) {
    Trainer *t = (Trainer *)context;
    memcpy(element(t, kind, offset, count), host, (size_t)(count * element_bytes(t, kind)));
}

// Fills the arrays of every parameter with random finite values, at most 2 in magnitude, of either sign where they may
// be below zero, and random scales above zero. The padding stays zero.
static void trainer_fill(Trainer *t, uint64_t seed) {
    for (int kind = 0; kind < STATE_AMAX_HISTORY; kind++)
        for (int64_t i = 0; t->arrays[kind] && i < t->table.count; i++) {
            const ShardRange r = state_range(&t->table, &t->state, &t->table.entries[i], (StateKind)kind);
            char *at = element(t, (StateKind)kind, r.shard, r.count);
            const int64_t width = element_bytes(t, (StateKind)kind);
            for (int64_t b = 0; b < r.count * width; b++) {
                at[b] = (char)rng_u64(seed, (uint64_t)(kind * 100000000 + i * 1000000 + b));
                if (b % width == width - 1) at[b] &= (char)0xbf;  // clears the highest bit of the exponent
                if (b % width == width - 1 && state_is_unsigned((StateKind)kind)) at[b] &= 0x7f;
                if (b == 3 && state_is_scale((StateKind)kind)) at[b] = (char)((at[b] & 0x7f) | 0x20);
            }
        }
}

// With fp32_weights, files hold fp32 weights: the run has fp32 master weights, or FP16 ones if it has MS-AMP's moments.
static Trainer *trainer_new(ModelFamily family, bool tied, bool fp32_weights, int moments) {
    Trainer *t = (Trainer *)xcalloc(1, sizeof *t);
    model_config_preset(&t->model, "tiny");
    t->model.family = family, t->model.qkv_bias = family == FAMILY_QWEN2, t->model.qk_norm = family == FAMILY_QWEN3;
    t->model.tie_word_embeddings = tied;
    t->model.vocab_size = 33, t->model.hidden_size = 16, t->model.intermediate_size = 24, t->model.head_dim = 8;
    t->table = parameter_table(&t->model);
    t->options = options_default();
    t->options.model = "tiny";
    t->options.train_data = "shards/*.bin";
    t->options.master_weights = !fp32_weights ? STORAGE_BF16 : moments == MOMENTS_MSAMP ? STORAGE_FP16 : STORAGE_FP32;
    t->options.optimizer_state = moments;
    t->run.model = &t->model, t->run.options = &t->options;
    t->state.context = t;
    for (int kind = 0; kind < NUM_STATE_KINDS; kind++) t->state.types[kind] = state_type(&t->options, (StateKind)kind);
    t->state.read = state_read, t->state.write = state_write;
    for (int kind = 0; kind < STATE_AMAX_HISTORY; kind++) {
        if (t->state.types[kind] == ST_NUM_TYPES) continue;
        t->arrays[kind] =
            (char *)xcalloc((size_t)array_elements(t, (StateKind)kind), (size_t)element_bytes(t, (StateKind)kind));
    }
    return t;
}

static void trainer_free(Trainer *t) {
    for (int kind = 0; kind <= STATE_SCALES; kind++) free(t->arrays[kind]);
    parameter_table_free(&t->table);
    free(t);
}

static bool same_state(const Trainer *a, const Trainer *b) {
    for (int kind = 0; kind <= STATE_SCALES; kind++)
        if (a->arrays[kind] &&
            memcmp(a->arrays[kind], b->arrays[kind],
                   (size_t)(array_elements(a, (StateKind)kind) * element_bytes(a, (StateKind)kind))) != 0)
            return false;
    return true;
}

static bool prepares(const char *dir);

static bool try_save(const Trainer *t, const char *dir, const TrainerProgress *progress, int64_t keep,
                     Failure *failure) {
    return checkpoint_save(dir, keep, progress, &t->run, &t->table, &t->state, failure);
}

static bool try_export(const Trainer *t, const char *dir, Failure *failure) {
    return model_export_hf(dir, &t->model, &t->table, &t->state, NULL, failure);
}

static void save(Trainer *t, const char *dir, int64_t step, int64_t keep) {
    Failure failure;
    const TrainerProgress progress = {step, step * 3, step / 2};
    if (!try_save(t, dir, &progress, keep, &failure)) die("%s", failure.text);
}

// Lists the steps of entries in a folder that have a checkpoint's name, newest first, as "300 200", or as "300 200+1"
// if the folder also has one other entry that does not begin with a dot. Returns "" if there is no such folder, and
// "cannot list" if it cannot be read.
static const char *listing(const char *dir) {
    static char text[256];
    CheckpointSteps list;
    Failure failure;
    size_t n = 0;
    text[0] = 0;
    if (!checkpoint_list(dir, &list, &failure)) return failure.text[0] ? "cannot list" : "";
    for (int64_t i = 0; i < list.count; i++)
        format_checked(text + n, sizeof text - n, "%s%lld", i ? " " : "", (long long)list.steps[i]), n = strlen(text);
    free(list.steps);
    int others = 0;
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d)) != NULL;)
        others += e->d_name[0] != '.' && checkpoint_step_of(e->d_name, "") < 0;
    if (d) closedir(d);
    if (others) format_checked(text + n, sizeof text - n, "+%d", others);
    return text;
}

#define CHECK_LISTING(dir, want, what) CHECK(strcmp(listing(dir), want) == 0, "%s; found %s", what, listing(dir))

static void flip_byte(const char *path, int64_t at) {
    FILE *f = fopen(path, "r+b");
    if (!f) die("cannot open %s", path);
    fseek(f, (long)at, SEEK_SET);
    const int c = fgetc(f);
    fseek(f, (long)at, SEEK_SET);
    fputc(c ^ 0x04, f);
    if (fclose(f)) die("cannot write %s", path);
}

// Returns the offset of a tensor's first byte in a file.
static int64_t safetensors_data(const char *path, const char *tensor) {
    Safetensors st;
    Failure failure;
    if (!safetensors_open(&st, path, &failure) || !safetensors_find(&st, tensor)) die("%s has no %s", path, tensor);
    const int64_t at = safetensors_find(&st, tensor)->offset;
    safetensors_close(&st);
    return at;
}

static void write_float(const char *path, int64_t at, float value) {
    const int fd = open(path, O_WRONLY);
    Failure failure;
    if (fd < 0 || !file_write_at(fd, path, at, &value, sizeof value, &failure) || close(fd))
        die("cannot write %s", path);
}

typedef struct {
    Trainer *trainer;
    const char *path;
} Action;

// Loads a checkpoint, as a run does that resumes.
static void resume_action(void *context) {
    Action *a = (Action *)context;
    checkpoint_load(a->path, &a->trainer->model, &a->trainer->table, &a->trainer->state);
}

// ---- Save, load, and removal of old checkpoints.

// Checks, for one parameter, that a checkpoint has scales of moments exactly if the moments are MS-AMP's, and a scale
// of weights exactly if the master weights are FP16.
static void check_scales(const char *folder, int moments, bool fp32_weights) {
    static const char *const names[] = {"exp_avg_scale.model.norm.weight", "exp_avg_sq_scale.model.norm.weight",
                                        "master_scale.model.norm.weight"};
    Safetensors st;
    Failure failure = {"", false};
    CHECK(safetensors_open_folder(&st, folder, "optimizer", &failure), "the optimizer state can be opened: %s",
          failure.text);
    for (int i = 0; i < 3; i++) {
        const bool expected = moments == MOMENTS_MSAMP && (i < 2 || fp32_weights);
        const Safetensor *scale = safetensors_find(&st, names[i]);
        CHECK(expected ? scale && scale->type == ST_F32 && scale->rank == 1 && scale->elements == 1 : !scale,
              "%s is in the checkpoint exactly if the run has that scale", names[i]);
    }
    safetensors_close(&st);
}

static void test_round_trip(void) {
    const char *dir = scratch_path("round");
    for (int variant = 0; variant < 36; variant++) {
        const ModelFamily family = (ModelFamily)(variant % 3);
        const bool tied = variant & 1, fp32_weights = variant % 12 >= 6;
        const int moments = variant >= 24      ? MOMENTS_MSAMP
                            : variant >= 12    ? MOMENTS_COAT
                            : variant % 4 >= 2 ? MOMENTS_FP32
                                               : MOMENTS_BF16;
        Trainer *a = trainer_new(family, tied, fp32_weights, moments),
                *b = trainer_new(family, tied, fp32_weights, moments);
        trainer_fill(a, (uint64_t)variant);
        save(a, dir, 7, 1);
        char found[PATH_CAPACITY];
        CHECK(checkpoint_find_newest(dir, found, sizeof found) && strcmp(strrchr(found, '/') + 1, "step-00000007") == 0,
              "the newest checkpoint is step-00000007; found %s", found);
        const TrainerProgress p = checkpoint_check(found, &b->run);
        checkpoint_load(found, &b->model, &b->table, &b->state);
        CHECK(p.step == 7 && p.samples == 21 && p.skipped == 3,
              "the checkpoint was saved after step 7, 3 of them skipped, and 21 samples; found %lld, %lld and %lld",
              (long long)p.step, (long long)p.skipped, (long long)p.samples);
        CHECK(same_state(a, b), "variant %d: the loaded state is the saved one", variant);

        // transformers sees config.json, and each weight once under its Hugging Face name.
        Safetensors st;
        Failure failure = {"", false};
        CHECK(safetensors_open_folder(&st, found, "model", &failure), "the weights can be opened: %s", failure.text);
        CHECK(st.count == a->table.count && !safetensors_find(&st, "lm_head.weight") == tied,
              "each parameter is one tensor, and lm_head is absent exactly if it is tied; found %lld tensors",
              (long long)st.count);
        CHECK(st.tensors[0].type == (fp32_weights ? ST_F32 : ST_BF16),
              "the first tensor is fp32 if the run has fp32 or FP16 master weights (FP16 ones are saved in fp32), else "
              "bf16");
        safetensors_close(&st);
        char *text = read_file(scratch_path("round/step-00000007/config.json"), NULL);
        CHECK(text && strstr(text, fp32_weights ? "\"float32\"" : "\"bfloat16\""),
              "config.json has the dtype of the weights");
        free(text);
        check_scales(found, moments, fp32_weights);
        trainer_free(a);
        trainer_free(b);
    }
    CHECK_LISTING(dir, "7", "a save of the same step replaces its checkpoint");
}

// The state of delayed scaling is in a checkpoint, and not in an export. A load refuses a state that does not fit.
static void test_delayed(void) {
    Trainer *a = trainer_new(FAMILY_QWEN3, true, false, MOMENTS_BF16),
            *b = trainer_new(FAMILY_QWEN3, true, false, MOMENTS_BF16);
    const char *dir = scratch_path("delayed");
    char found[PATH_CAPACITY];
    Failure failure = {"", false};
    trainer_fill(a, 6);
    add_delayed(a, 7), add_delayed(b, 7);
    const int64_t tensors = a->state.delayed_tensors;
    float *history = (float *)a->arrays[STATE_AMAX_HISTORY], *scales_of_a = (float *)a->arrays[STATE_SCALES],
          *loaded = (float *)b->arrays[STATE_AMAX_HISTORY];
    for (int64_t i = 0; i < tensors * 7; i++) history[i] = (float)i / 3;
    for (int64_t i = 0; i < tensors; i++) scales_of_a[i] = i % 5 ? (float)i * 0.7f : 0;
    save(a, dir, 9, 1);
    CHECK(checkpoint_find_newest(dir, found, sizeof found), "the newest checkpoint is found");
    Action load = {b, found};
    checkpoint_load(found, &b->model, &b->table, &b->state);
    CHECK(same_state(a, b), "the loaded state is the saved one, with amax history and scales");
    b->state.delayed_window = 6;
    CHECK_DIES(resume_action, &load, "tensor amax_history has shape [24, 7]; the model needs [24, 6]",
               "a checkpoint with another window of the amax history is refused");
    CHECK(try_export(a, scratch_path("delayed-export"), &failure), "the export is made: %s", failure.text);
    CHECK(!path_exists(scratch_path("delayed-export/fp8_state.safetensors")), "an export has no fp8_state.safetensors");
    // No checkpoint is saved if a history or a scale holds a value that is not finite or is below zero. Older versions
    // saved such values. A load takes an infinity in a history as 0, so that it can be saved. It refuses a NaN or a
    // value below zero in a history or a scale, and an infinite scale.
    const TrainerProgress progress = {9, 9, 0};
    static const struct {
        float amax, scale;
        const char *problem;
    } refused[] = {{INFINITY, 1, "tensor amax_history holds a value that is not finite or is below zero"},
                   {-1, 1, "tensor amax_history holds a value that is not finite or is below zero"},
                   {1, INFINITY, "tensor scale holds a value"},
                   {1, -1, "tensor scale holds a value"}};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        history[3] = refused[i].amax, scales_of_a[2] = refused[i].scale;
        CHECK(!try_save(a, dir, &progress, 1, &failure) && failure.lasting && strstr(failure.text, refused[i].problem),
              "an amax of %g and a scale of %g are not saved: %s", (double)history[3], (double)scales_of_a[2],
              failure.text);
    }
    history[3] = 1, scales_of_a[2] = 1;
    const char *state = scratch_path("delayed/step-00000009/fp8_state.safetensors");
    const int64_t data = safetensors_data(state, "amax_history"), scales = safetensors_data(state, "scale");
    b->state.delayed_window = 7;
    write_float(state, data + 12, INFINITY);
    checkpoint_load(found, &b->model, &b->table, &b->state);
    CHECK(loaded[3] == 0, "an infinity in the amax history is loaded as 0; found %g", (double)loaded[3]);
    CHECK(try_save(b, dir, &progress, 2, &failure), "what was loaded can be saved: %s", failure.text);
    write_float(state, data + 12, NAN);
    CHECK_DIES(resume_action, &load, "amax_history holds nan, which is not an amax; move this checkpoint away",
               "a NaN in the amax history is refused");
    write_float(state, data + 12, 1), write_float(state, scales, INFINITY);
    CHECK_DIES(resume_action, &load, "scale holds inf, which is not a scale", "an infinite scale is refused");
    write_float(state, scales, -2);
    CHECK_DIES(resume_action, &load, "scale holds -2, which is not a scale", "a negative scale is refused");
    write_float(state, scales, 1);
    flip_byte(state, data + 3);
    CHECK_FAILS(checkpoint_is_whole(found, true, &failure), "fp8_state.safetensors is damaged",
                "a changed byte is detected");
    a->state.delayed_tensors = 0;
    save(a, dir, 10, 1);
    load.path = scratch_path("delayed/step-00000010");
    CHECK_DIES(resume_action, &load, "has neither fp8_state.safetensors",
               "a checkpoint without the state of delayed scaling is refused");
    trainer_free(a);
    trainer_free(b);
}

// Tests sets of several files, with an index.
static void test_sharded(void) {
    Trainer *a = trainer_new(FAMILY_LLAMA, false, false, MOMENTS_FP32),
            *b = trainer_new(FAMILY_LLAMA, false, false, MOMENTS_FP32);
    Failure failure = {"", false};
    const char *dir = scratch_path("sharded");
    const TrainerProgress progress = {1, 2, 0};
    trainer_fill(a, 5);
    CHECK(checkpoint_save_sharded(dir, 1, &progress, &a->run, &a->table, &a->state, 1500, &failure),
          "the checkpoint is saved: %s", failure.text);
    char found[PATH_CAPACITY], index[PATH_CAPACITY];
    CHECK(checkpoint_find_newest(dir, found, sizeof found), "the newest checkpoint is found");
    format_checked(index, sizeof index, "%s/model.safetensors.index.json", found);
    CHECK(path_exists(index) && model_has_weights(found), "the weights have the index %s", index);
    checkpoint_load(found, &b->model, &b->table, &b->state);
    CHECK(same_state(a, b), "the loaded state is the saved one");
    // A missing shard is detected, although the index is complete.
    format_checked(index, sizeof index, "%s/optimizer-00002-of-", found);
    DIR *d = opendir(found);
    for (struct dirent *e; (e = readdir(d)) != NULL;)
        if (strncmp(e->d_name, "optimizer-00002-of-", 19) == 0)
            format_checked(index, sizeof index, "%s/%s", found, e->d_name);
    closedir(d);
    CHECK(unlink(index) == 0 && !checkpoint_is_whole(found, true, &failure) && strstr(failure.text, "optimizer-00002"),
          "the missing file is named: %s", failure.text);
    trainer_free(a);
    trainer_free(b);
}

static void list_unreadable(void *dir) {
    readable_entries = 3;
    char name[64];
    if (model_finds_other_weights((const char *)dir, name, sizeof name)) die("found %s", name);
}

// A folder that the disk can list only in part is an error. It must not pass for a folder with fewer entries.
static void test_unreadable_folders(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    const char *dir = scratch_path("unreadable"), *words = "cannot read folder";
    CheckpointSteps list;
    Failure failure = {"", false};
    trainer_fill(t, 1);
    save(t, dir, 1, 2), save(t, dir, 2, 2);
    for (int entries = 0; entries <= 3; entries++) {  // the folder has four: ".", ".." and two checkpoints
        readable_entries = entries;
        CHECK(!checkpoint_list(dir, &list, &failure) && !list.count && !list.steps && strstr(failure.text, words),
              "with %d entries read, the list of checkpoints fails: %s", entries, failure.text);
        readable_entries = entries;
        CHECK(!checkpoint_remove_leftovers(dir, true, &failure) && strstr(failure.text, words),
              "with %d entries read, the search for leftovers fails: %s", entries, failure.text);
    }
    readable_entries = -1;
    CHECK_DIES(list_unreadable, (void *)dir, words, "the search for weights of other formats fails");
    const char *export = scratch_path("unreadable-export");
    CHECK(try_export(t, export, &failure), "the export is made: %s", failure.text);
    CHECK(export_may_replace(export, &failure), "an export may be replaced: %s", failure.text);
    scratch_file(export, "thesis", "x");
    for (int entries = 0; entries <= 6; entries++) {
        readable_entries = entries;
        CHECK(!export_may_replace(export, &failure), "with %d entries read, an export may not be replaced", entries);
    }
    readable_entries = -1;
    CHECK_FAILS(export_may_replace(export, &failure), "holds thesis",
                "an export with a foreign file may not be replaced");
    trainer_free(t);
}

static void test_keep(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    const char *dir = scratch_path("keep");
    for (int64_t step = 10; step <= 40; step += 10) save(t, dir, step, 2);
    CHECK_LISTING(dir, "40 30", "two checkpoints are kept");
    save(t, dir, 40, 2);  // saves the step again
    CHECK_LISTING(dir, "40 30", "saving a step again removes no other checkpoint");
    // A checkpoint that lacks bytes does not count as kept, so an older complete one stays.
    CHECK(truncate(scratch_path("keep/step-00000040/optimizer.safetensors"), 100) == 0, "the file is truncated: %s",
          strerror(errno));
    save(t, dir, 50, 2);
    CHECK_LISTING(dir, "50 40 30", "a checkpoint with a truncated file does not count as kept");
    save(t, dir, 60, 1);
    CHECK_LISTING(dir, "60", "with keep 1 all older checkpoints are removed");
    // A checkpoint that the run skipped when it resumed does not count as kept either, even if it looks complete, until
    // the run saves that step itself.
    int64_t steps[] = {66, 64};
    CheckpointSteps passed_over = {steps, 2};
    save(t, dir, 64, 9), save(t, dir, 66, 9);
    t->run.skipped = &passed_over;
    save(t, dir, 65, 2);
    CHECK_LISTING(dir, "66 65 64 60", "steps 65 and 60 are kept, and the skipped ones stay");
    save(t, dir, 66, 2);
    CHECK_LISTING(dir, "66 65 64", "steps 66 and 65 are kept, and the skipped step 64 stays");
    save(t, dir, 68, 2);
    CHECK_LISTING(dir, "68 66 64", "steps 68 and 66 are kept, and the skipped step 64 stays");
    t->run.skipped = NULL;
    save(t, dir, 69, 1);
    CHECK_LISTING(dir, "69", "if the run has skipped none, keep 1 leaves only step 69");
    // A checkpoint of a later step than the saved one stays.
    save(t, dir, 90, 9);
    save(t, dir, 70, 1);
    CHECK_LISTING(dir, "90 70", "step 90, which is later than the saved step 70, stays");
    // Leftovers of interrupted saves are removed. Folders with other names or without the marker file stay.
    Failure failure;
    static const char *const names[] = {
        "step-00000080.tmp", "step-00000020.old.tmp", "step-00000030.2.tmp", "step-80.tmp", "notes",
        "step-00000081.tmp"};
    for (int i = 0; i < 6; i++) {
        const char *path = scratch_path("keep/%s", names[i]);
        if (i < 5 && !folder_begin(path, &failure)) die("%s", failure.text);
        scratch_file(path, "model.safetensors", "x");
    }
    save(t, dir, 95, 1);
    CHECK_LISTING(dir, "95+3", "three leftovers are removed, and three other folders stay");
    // A folder of another program stays, even if it has the name of a checkpoint or of a temporary folder.
    save(t, dir, 81, 9);
    CHECK(strcmp(listing(dir), "95 81+3") == 0,
          "three other folders are still there, so step-00000081.tmp, which has no marker file, was not removed; found "
          "%s",
          listing(dir));
    scratch_file(scratch_path("keep/step-00000096"), "thesis", "x");
    save(t, dir, 96, 9);
    CHECK_LISTING(dir, "96 95 81+4",
                  "step 96 is saved, and the folder that had its name is there as a fourth other folder");
    static const char *const others[] = {"step-00000030.2.tmp", "step-80.tmp", "notes", "step-00000081.tmp",
                                         "step-00000096.1"};
    static const bool stays[] = {false, true, true, true, true};
    for (int i = 0; i < 5; i++)
        CHECK(path_exists(scratch_path("keep/%s", others[i])) == stays[i], "%s %s", others[i],
              stays[i] ? "stays" : "is removed");
    const char *path = scratch_path("keep/step-00000096.1/thesis");
    CHECK(path_exists(path) && checkpoint_is_leftover("step-00000096.1") == false,
          "step-00000096.1 is no leftover and keeps its file %s", path);
    CHECK(checkpoint_step_of("step-00000123", "") == 123 && checkpoint_step_of("step-123456789", "") == 123456789 &&
              checkpoint_step_of("step-000000123", "") == -1 && checkpoint_step_of("step-0000123", "") == -1,
          "only names that a save gives are names of checkpoints");
    trainer_free(t);
}

// A run can resume from a checkpoint that was moved away and linked back. It counts as kept, and saves do not remove
// it. Other links have the names of checkpoints and leftovers and lead to a folder, a file, nothing or themselves.
// Saves do not follow or remove them.
static void test_links(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    Failure failure = {"", false};
    const char *dir = scratch_path("links"), *archive = scratch_path("archive"),
               *saved = scratch_path("links/step-00000002");
    char found[PATH_CAPACITY];
    CheckpointSteps passed_over = {NULL, 0};
    save(t, dir, 2, 1);
    if (rename(saved, archive) || symlink("../archive", saved)) die("%s", strerror(errno));
    static const struct {
        const char *name, *to;
    } links[] = {{"step-00000001.tmp", "../user"}, {"step-00000003.tmp", "../user/thesis"},
                 {"step-00000005.tmp", "none"},    {"step-00000006.old.tmp", "step-00000006.old.tmp"},
                 {"step-00000007", "../user"},     {"step-00000008", "../user/thesis"},
                 {"step-00000009", "none"},        {"step-00000010", "step-00000010"}};
    scratch_file(scratch_path("user"), "thesis", "x");
    for (size_t i = 0; i < sizeof links / sizeof links[0]; i++)
        if (symlink(links[i].to, scratch_path("links/%s", links[i].name))) die("%s", strerror(errno));
    CHECK(prepares(dir), "a run can resume in a checkpoint folder that holds links");
    CHECK(checkpoint_find_newest(dir, found, sizeof found) && strstr(found, "step-00000002"),
          "the newest checkpoint is the linked one, of step 2; found %s", found);
    t->run.skipped = &passed_over;
    save(t, dir, 5, 2);
    CHECK_LISTING(dir, "10 9 8 7 5 2+4", "the linked checkpoint counts as kept, and no link is removed");
    save(t, dir, 6, 1);
    CHECK(strcmp(listing(dir), "10 9 8 7 6 2+4") == 0 && passed_over.count == 1 && passed_over.steps[0] == 2,
          "the linked checkpoint stays when it is due to be removed, and then counts as skipped; found %s",
          listing(dir));
    save(t, dir, 8, 1);  // saves over a link
    save(t, dir, 11, 2);
    CHECK_LISTING(dir, "11 10 9 8 7 2+5", "steps 11 and 8 are kept, and no link is removed");
    CHECK(checkpoint_is_whole(archive, true, &failure) && path_exists(scratch_path("user/thesis")),
          "the linked checkpoint is whole, and the file user/thesis is still there: %s", failure.text);
    for (size_t i = 0; i < sizeof links / sizeof links[0]; i++) {
        struct stat s;
        const char *at = scratch_path("links/%s%s", links[i].name, i == 5 ? ".1" : "");
        CHECK(lstat(at, &s) == 0 && S_ISLNK(s.st_mode), "the link %s is still there", at);
    }
    free(passed_over.steps);
    trainer_free(t);
}

// Checkpoints of older versions have no marker file. A run can resume from them. When one is due to be removed, it is
// removed only if its trainer.json is valid.
static void test_unmarked(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    const char *dir = scratch_path("unmarked");
    char found[PATH_CAPACITY];
    for (int step = 1; step <= 3; step++) {
        save(t, dir, step, 9);
        const char *path = scratch_path("unmarked/step-%08d/" FOLDER_MARKER, step);
        CHECK(unlink(path) == 0, "the marker file %s is removed", path);
    }
    flip_byte(scratch_path("unmarked/step-00000002/trainer.json"), 10);
    CHECK(checkpoint_find_newest(dir, found, sizeof found) && strstr(found, "step-00000003"),
          "the newest checkpoint is step 3; found %s", found);
    save(t, dir, 4, 1);
    CHECK_LISTING(dir, "4 2",
                  "checkpoints without the marker file are removed, except step 2, whose trainer.json is damaged");
    trainer_free(t);
}

// ---- Two ranks. This process is rank 0. Stand-ins for MPI functions take the place of rank 1.

static const char *at_barrier;  // the folder to list when all ranks wait at a barrier
static char listed_at_barrier[256];

int MPI_Barrier(MPI_Comm comm) {
    (void)comm;
    format_checked(listed_at_barrier, sizeof listed_at_barrier, "%s", listing(at_barrier));
    return MPI_SUCCESS;
}

int MPI_Allreduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
    (void)from, (void)to, (void)count, (void)type, (void)op,
        (void)comm;  // nothing to do: the other rank has equal values
    return MPI_SUCCESS;
}

int MPI_Bcast(void *data, int count, MPI_Datatype type, int root, MPI_Comm comm) {
    (void)data, (void)count, (void)type, (void)root, (void)comm;
    return MPI_SUCCESS;
}

// No rank starts the next step before rank 0 has removed old checkpoints.
static void test_prune_together(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    const char *dir = scratch_path("together");
    Comm two = comm_one();
    two.world = 2;
    save(t, dir, 1, 1);
    t->state.comm = &two, at_barrier = dir;
    save(t, dir, 2, 1);
    CHECK(strcmp(listed_at_barrier, "2") == 0, "rank 0 removes old checkpoints before the barrier; found \"%s\" there",
          listed_at_barrier);
    trainer_free(t);
}

// ---- Checks before a run starts or resumes.

static void check_action(void *context) {
    Action *a = (Action *)context;
    checkpoint_check(a->path, &a->trainer->run);
}

static void find_action(void *context) {
    char found[PATH_CAPACITY];
    fclose(stdout);
    checkpoint_find_newest((const char *)context, found, sizeof found);
}

static void prepare_action(void *context) { checkpoint_prepare((const char *)context, false); }

// A run with bounded scales is refused while moments of other betas count, here for 102 steps. Skipped steps do not
// age them.
static void test_betas_since(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    const char *dir = scratch_path("betas");
    Action action = {t, scratch_path("betas/step-00000010")}, later = {t, scratch_path("betas/step-00000112")};
    const TrainerProgress first = {10, 30, 0}, skipped = {112, 336, 1}, taken = {112, 336, 0};
    int64_t since = 0;
    Failure failure;
    t->run.betas_since = &since, t->run.branches = true;
    t->options.precision = PRECISION_FP8;
    if (!try_save(t, dir, &first, 9, &failure)) die("%s", failure.text);
    t->options.beta2 = 0.95;
    checkpoint_check(action.path, &t->run);
    CHECK(since == 10, "the betas changed after step 10; found %lld", (long long)since);
    if (!try_save(t, dir, &skipped, 9, &failure)) die("%s", failure.text);
    t->options.fp8_recipe = RECIPE_BOUNDED;
    CHECK_DIES(check_action, &later, "changed 101 steps ago, and until step 113", "101 steps are too few");
    if (!try_save(t, dir, &taken, 9, &failure)) die("%s", failure.text);
    CHECK(checkpoint_check(later.path, &t->run).step == 112 && since == 10, "102 steps are enough");
    trainer_free(t);
}

static void test_mismatch(void) {
    Trainer *t = trainer_new(FAMILY_QWEN3, true, false, MOMENTS_BF16), *other;
    char output[8192];
    t->run.data.tokens = 1000, t->run.data.shards = 2, t->run.data.fingerprint = 0x123;
    save(t, scratch_path("mismatch"), 3, 1);
    Action action = {t, scratch_path("mismatch/step-00000003")};
    char *text = read_file(scratch_path("mismatch/step-00000003/trainer.json"), NULL);
    CHECK(text && strstr(text,
                         "\"training_data\": {\"tokens\": 1000, \"shards\": 2, \"fingerprint\": \"0000000000000123\"}"),
          "trainer.json records the training data: %s", text);
    free(text);
    const TrainerProgress p = checkpoint_check(action.path, &t->run);
    CHECK(p.step == 3, "an unchanged run resumes after step 3; found %lld", (long long)p.step);
    // Some settings may differ and others must match. The error names every setting that differs but must match.
    t->options.num_steps = 5, t->options.learning_rate = 1, t->options.batch_size = 7,
    t->options.checkpoint_every = "3", t->options.train_data = "moved/*.bin";
    checkpoint_check(action.path, &t->run);
    t->options.sequence_length = 1024, t->options.seed = 43, t->options.shuffle = OFF,
    t->options.precision = PRECISION_FP8;
    t->run.data.tokens++, t->run.data.shards = 4, t->run.data.fingerprint++;
    CHECK(check_dies(check_action, &action, "--sequence-length is 2048 in the checkpoint, 1024 now", output,
                     sizeof output),
          "another --sequence-length is refused: %s", output);
    CHECK(strstr(output, "--seed is 42 in the checkpoint, 43 now") &&
              strstr(output, "--shuffle is on in the checkpoint, off now") &&
              strstr(output, "--precision is bf16 in the checkpoint, fp8 now"),
          "the error also names seed, shuffle and precision: %s", output);
    CHECK(strstr(output, "--train-data has 1000 tokens in the checkpoint, 1001 now\n  --train-data has 2 shards in the "
                         "checkpoint, 4 now") &&
              !strstr(output, "but its shards"),
          "the error names the numbers of tokens and shards, and does not say that the shards' contents differ: %s",
          output);
    CHECK(!strstr(output, "learning-rate") && !strstr(output, "moved"),
          "the error names neither the learning rate nor the path of the training data, which may differ: %s", output);
    t->run.data.tokens--, t->run.data.shards = 2;
    CHECK_DIES(check_action, &action, "--train-data has as many tokens as in the checkpoint, but its shards",
               "training data with as many tokens, but other tokens, is refused");

    other = trainer_new(FAMILY_LLAMA, false, false, MOMENTS_BF16);
    other->model.hidden_size = 32, other->model.rope_theta = 5e5, other->model.rope_scaling.factor = 8;
    action.trainer = other;
    CHECK(check_dies(check_action, &action, "a checkpoint of another model:", output, sizeof output),
          "another model is refused: %s", output);
    CHECK(strstr(output, "hidden_size is 16 in the checkpoint, 32 now") && strstr(output, "family") &&
              strstr(output, "tie_word_embeddings is 1 in the checkpoint, 0 now"),
          "the error names family, hidden_size and tie_word_embeddings: %s", output);
    CHECK(strstr(output, "rope_theta is 10000 in the checkpoint, 500000 now") &&
              strstr(output, "rope_scaling.factor is 0 in the checkpoint, 8 now") && !strstr(output, "head_dim"),
          "the error names rope_theta and rope_scaling, but not the equal head_dim: %s", output);
    trainer_free(t);
    trainer_free(other);
}

// Returns the message of checkpoint_settings_mismatch for the settings `text` (of trainer.json) against `o`. The caller
// frees it.
static char *mismatch_of(const char *text, Options o) {
    Json json;
    Failure failure;
    options_resolve(&o);
    if (!json_parse(&json, "trainer.json", text, strlen(text), &failure)) die("%s", failure.text);
    JsonText out = checkpoint_settings_mismatch(&json, &o, false);
    json_free(&json);
    return out.data;
}

// Checkpoints of older versions lack newer options. A missing option counts as today's default, with `auto` resolved.
// An option that has been removed since counts for nothing.
static void test_older_settings(void) {
    static const char older[] =
        "{\"settings\": {\"precision\": \"fp8\", \"seed\": \"42\", \"master-weights\": \"bf16\"}}";
    static const struct {
        const char *text;
        int precision, recipe, format;
        const char *filter, *expected;
    } cases[] = {
        {older, PRECISION_FP8, RECIPE_TENSORWISE, FP8_FORMAT_AUTO, "", ""},
        {older, PRECISION_FP8, RECIPE_TENSORWISE, FP8_FORMAT_HYBRID, "", ""},
        {older, PRECISION_FP8, RECIPE_TENSORWISE, FP8_FORMAT_E4M3, "",
         "\n  --fp8-format is hybrid in the checkpoint, e4m3 now"},
        {older, PRECISION_FP8, RECIPE_DELAYED, FP8_FORMAT_AUTO, "",
         "\n  --fp8-recipe is tensorwise in the checkpoint, delayed now"},
        {older, PRECISION_FP8, RECIPE_TENSORWISE, FP8_FORMAT_AUTO, "first",
         "\n  --fp8-filter is \"\" in the checkpoint, first now"},
        {older, PRECISION_BF16, RECIPE_TENSORWISE, FP8_FORMAT_AUTO, "",
         "\n  --precision is fp8 in the checkpoint, bf16 now"},
        {"{\"settings\": {\"precision\": \"bf16\"}}", PRECISION_BF16, RECIPE_TENSORWISE, FP8_FORMAT_AUTO, "", ""},
        {"{\"settings\": {\"precision\": \"bf16\", \"seed\": \"7\"}}", PRECISION_BF16, RECIPE_TENSORWISE,
         FP8_FORMAT_AUTO, "", "\n  --seed is 7 in the checkpoint, 42 now"},
        {"{\"settings\": {\"precision\": \"fp8\", \"fp8-weight-cache\": \"on\"}}", PRECISION_FP8, RECIPE_TENSORWISE,
         FP8_FORMAT_AUTO, "", ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options o = options_default();
        o.precision = cases[i].precision, o.fp8_recipe = cases[i].recipe, o.fp8_format = cases[i].format,
        o.fp8_filter = cases[i].filter;
        char *said = mismatch_of(cases[i].text, o);
        CHECK(strcmp(said, cases[i].expected) == 0, "case %zu: the message is \"%s\"; expected \"%s\"", i, said,
              cases[i].expected);
        free(said);
    }
}

// A checkpoint of an older version may have the setting of an option that was removed since. A run resumes from it.
static void test_removed_option(void) {
    static const char settings[] = "\"settings\": {";
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    char text[16384];
    Failure failure = {"", false};
    save(t, scratch_path("removed"), 3, 1);
    const char *folder = scratch_path("removed/step-00000003");
    char *now = read_file(scratch_path("removed/step-00000003/trainer.json"), NULL), *at = strstr(now, settings);
    if (!at) die("trainer.json has no %s", settings);
    at += strlen(settings);
    format_checked(text, sizeof text, "%.*s\"fp8-weight-cache\": \"off\", %.*s", (int)(at - now), now,
                   (int)(strlen(at) - CHECKPOINT_SEAL_BYTES), at);
    const uint64_t hash = xxhash64(text, strlen(text));
    format_checked(text + strlen(text), sizeof text - strlen(text), CHECKPOINT_SEAL_FORMAT, (unsigned long long)hash);
    scratch_file(folder, "trainer.json", text);
    CHECK(checkpoint_is_whole(folder, true, &failure), "a checkpoint with --fp8-weight-cache is whole: %s",
          failure.text);
    CHECK(checkpoint_check(folder, &t->run).step == 3, "a run resumes from it after step 3");
    free(now);
    trainer_free(t);
}

// Runs checkpoint_prepare in a child process and returns its process id. The child releases the folder when it ends. If
// `hold` is not -1, the child writes a byte to this pipe and waits until it is killed.
static pid_t prepare_child(const char *dir, int hold) {
    const pid_t child = fork();
    if (child < 0) die("fork: %s", strerror(errno));
    if (child > 0) return child;
    checkpoint_prepare(dir, true);
    if (hold >= 0 && write(hold, "x", 1) == 1) pause();
    _exit(0);
}

static bool prepares(const char *dir) {
    int status = -1;
    waitpid(prepare_child(dir, -1), &status, 0);
    return status == 0;
}

// Only one run at a time may use a folder. A second one is refused, unless the first ends within FOLDER_LOCK_SECONDS.
static void test_lock(void) {
    const char *dir = scratch_path("locked");
    char output[4096];
    int fds[2];
    if (pipe(fds)) die("pipe: %s", strerror(errno));
    const pid_t holder = prepare_child(dir, fds[1]);
    CHECK(read(fds[0], output, 1) == 1, "the first run locks the folder");
    CHECK_DIES(prepare_action, (void *)dir,
               "another run is using it; wait until that run has ended, or give another folder",
               "a second run is refused");
    kill(holder, SIGKILL);
    CHECK(prepares(dir), "a run may use the folder of a run that was killed");
    waitpid(holder, NULL, 0);
    close(fds[0]), close(fds[1]);
}

static void test_prepare(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    const char *dir = scratch_path("fresh");
    char found[PATH_CAPACITY];
    CHECK(prepares(dir), "a run prepares a new folder");
    CHECK(folder_exists(dir) && strcmp(listing(dir), "") == 0, "the new folder exists and is empty; found %s",
          listing(dir));
    CHECK(!checkpoint_find_newest(dir, found, sizeof found), "an empty folder has no newest checkpoint");
    CHECK(!checkpoint_find_newest(scratch_path("never"), found, sizeof found),
          "a missing folder has no newest checkpoint");
    save(t, dir, 12, 1);
    CHECK_DIES(prepare_action, (void *)dir, "already holds step-00000012; add --resume",
               "without --resume, a folder that holds a checkpoint is refused");
    CHECK(prepares(dir), "a run that resumes prepares its folder");
    CHECK_DIES(prepare_action, (void *)"/dev/null/parent", "cannot make folder /dev/null/parent",
               "a folder below a file is refused");
    // Even root cannot make a folder in /proc or in place of a file.
    CHECK_DIES(prepare_action, (void *)"/proc/checkpoints", "cannot make folder /proc/checkpoints",
               "a folder in /proc is refused");
    CHECK_DIES(prepare_action, (void *)"/proc/self", "cannot make folder /proc/self/step-00000000.tmp",
               "a folder in which no folder can be made is refused");
    CHECK_DIES(prepare_action, (void *)"/dev/null", "cannot make folder /dev/null",
               "a file in place of the folder is refused");
    trainer_free(t);
}

// ---- Damaged files: the reason is given. A resumed run takes the newest undamaged checkpoint, or dies if there is
// none.

static void damage_truncate(const char *path, int64_t bytes) {
    if (truncate(path, (off_t)bytes)) die("truncate %s: %s", path, strerror(errno));
}

static void damage_remove(const char *path, int64_t unused) {
    (void)unused;
    if (unlink(path)) die("unlink %s: %s", path, strerror(errno));
}

static void test_damage(void) {
    Trainer *t = trainer_new(FAMILY_QWEN2, false, false, MOMENTS_FP32);
    const char *dir = scratch_path("damage");
    static const struct {
        const char *file;
        void (*damage)(const char *, int64_t);
        int64_t at;
        const char *reason;
    } cases[] = {{"trainer.json", damage_remove, 0, "No such file"},
                 {"trainer.json", damage_truncate, 0, "cut short"},
                 {"trainer.json", damage_truncate, 200, "is damaged"},
                 {"trainer.json", flip_byte, 30, "is damaged"},
                 {"trainer.json", flip_byte, 500, "is damaged"},
                 {"config.json", damage_remove, 0, "No such file"},
                 {"config.json", flip_byte, 100, "is damaged: its XXH64 hash is"},
                 {"model.safetensors", damage_remove, 0, "No such file"},
                 {"model.safetensors", damage_truncate, 0, "has 0 bytes instead of"},
                 {"model.safetensors", damage_truncate, 4000, "has 4000 bytes"},
                 {"model.safetensors", flip_byte, 3, "is damaged"},
                 {"model.safetensors", flip_byte, 9000, "is damaged"},
                 {"optimizer.safetensors", damage_truncate, 7, "has 7 bytes"},
                 {"optimizer.safetensors", flip_byte, 20000, "is damaged"},
                 {"optimizer.safetensors", damage_remove, 0, "No such file"}};
    char found[PATH_CAPACITY];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Failure failure = {"", false};
        save(t, dir, 1, 2);
        save(t, dir, 2, 2);
        cases[i].damage(scratch_path("damage/step-00000002/%s", cases[i].file), cases[i].at);
        CHECK(!checkpoint_is_whole(scratch_path("damage/step-00000002"), true, &failure) &&
                  strstr(failure.text, cases[i].reason) && strstr(failure.text, cases[i].file),
              "case %zu: the reason names the file and its damage: \"%s\"", i, failure.text);
        CHECK(checkpoint_find_newest(dir, found, sizeof found) && strstr(found, "step-00000001"),
              "case %zu: the checkpoint of step 1 is taken; found %s", i, found);
    }
    damage_remove(scratch_path("damage/step-00000001/trainer.json"), 0);
    CHECK_DIES(find_action, (void *)dir, "can be resumed (2 skipped",
               "a folder with two damaged checkpoints and no other is refused");

    // A checkpoint in a folder that was renamed to another step is refused.
    save(t, dir, 6, 1);
    const char *named = scratch_path("damage/step-00000006"), *renamed = scratch_path("damage/step-00000099");
    Failure moved = {"", false};
    CHECK(rename(named, renamed) == 0 && !checkpoint_is_whole(renamed, true, &moved) &&
              strstr(moved.text, "has a wrong name: it was saved after step 6"),
          "a renamed checkpoint is refused: %s", moved.text);
    CHECK_DIES(find_action, (void *)dir, "can be resumed (1 skipped",
               "a folder with a renamed checkpoint and no other is refused");
    CHECK(rename(renamed, named) == 0 && checkpoint_find_newest(dir, found, sizeof found) &&
              strstr(found, "step-00000006"),
          "after its name is restored, the checkpoint is taken; found %s", found);

    // A changed bit in any byte of trainer.json is detected.
    save(t, dir, 3, 1);
    const char *checkpoint = scratch_path("damage/step-00000003"),
               *path = scratch_path("damage/step-00000003/trainer.json");
    int64_t size = 0;
    Failure failure;
    int unseen = 0;
    CHECK(file_size(path, &size, &failure) && checkpoint_is_whole(checkpoint, true, &failure),
          "the undamaged checkpoint is whole: %s", failure.text);
    for (int64_t at = 0; at < size; at++) {
        flip_byte(path, at);
        unseen += checkpoint_is_whole(checkpoint, false, &failure);
        flip_byte(path, at);
    }
    CHECK(unseen == 0, "a changed bit is detected in each byte of trainer.json; %d of %lld were not", unseen,
          (long long)size);
    CHECK(checkpoint_is_whole(checkpoint, true, &failure), "the repaired checkpoint is whole: %s", failure.text);
    trainer_free(t);
}

// Tests trainer.json files that have a correct hash, but another version, missing or hostile entries, or bad syntax.
static void test_sealed(void) {
    static const char *const cases[][2] = {
        {"{\n  \"format_version\": 2, \"files\": []", "has format version 2; this program reads version 1"},
        {"{\n  \"files\": []", "has no \"format_version\""},
        {"{\n  \"format_version\": 1", "has no \"files\""},
        {"{\n  \"format_version\": 1, \"files\": [3]", "files[0] has no \"name\""},
        {"{\n  \"format_version\": 1, \"files\": [{\"name\": \"../../etc/passwd\", \"bytes\": 3, \"xxh64\": \"0\"}]",
         "name of a file in the same folder"},
        {"{\n  \"format_version\": 1, \"files\": [{\"name\": \"x\", \"bytes\": -3, \"xxh64\": \"0\"}]",
         "files[0].bytes"},
        {"{\n  \"format_version\": 1,, ", "expected a string"}};
    const char *folder = scratch_path("sealed");
    char text[1024];
    Failure failure = {"", false};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const size_t n = strlen(cases[i][0]);
        format_checked(text, sizeof text, "%s" CHECKPOINT_SEAL_FORMAT, cases[i][0],
                       (unsigned long long)xxhash64(cases[i][0], n));
        scratch_file(folder, "trainer.json", text);
        CHECK(!checkpoint_is_whole(folder, true, &failure) && strstr(failure.text, cases[i][1]), "%s is refused: %s",
              cases[i][0], failure.text);
    }
}

// ---- Saves that fail, and values from which training cannot continue.

// A failed save leaves the earlier checkpoint and nothing else.
static void test_failing_save(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, false, true, MOMENTS_FP32);
    const char *dir = scratch_path("failing");
    char found[PATH_CAPACITY];
    Failure failure = {"", false};
    trainer_fill(t, 9);
    save(t, dir, 1, 1);
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    // The four limits on file sizes are reached in config.json, in the weights' header, in the weights and in the
    // optimizer state.
    static const rlim_t limits[] = {100, 1000, 5000, 40000};
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        const TrainerProgress progress = {2, 2, 0};
        small = before, small.rlim_cur = limits[i];
        setrlimit(RLIMIT_FSIZE, &small);
        bool ok = try_save(t, dir, &progress, 1, &failure);
        setrlimit(RLIMIT_FSIZE, &before);
        CHECK(!ok && strstr(failure.text, "File too large") && strstr(failure.text, "step-00000002 failed") &&
                  strstr(failure.text, "untouched"),
              "file limit %d: the error says why, and that checkpoints of earlier steps are untouched: %s",
              (int)limits[i], failure.text);
        CHECK(strcmp(listing(dir), "1") == 0, "file limit %d: only the earlier checkpoint is left; found %s",
              (int)limits[i], listing(dir));
    }
    // If saving a step again fails, its earlier checkpoint stays.
    const TrainerProgress progress = {1, 1, 0};
    small.rlim_cur = 40000;
    setrlimit(RLIMIT_FSIZE, &small);
    CHECK(!try_save(t, dir, &progress, 1, &failure), "a save past the limit of the file size fails");
    setrlimit(RLIMIT_FSIZE, &before);
    Trainer *b = trainer_new(FAMILY_LLAMA, false, true, MOMENTS_FP32);
    CHECK(checkpoint_find_newest(dir, found, sizeof found), "the newest checkpoint is found");
    checkpoint_load(found, &b->model, &b->table, &b->state);
    CHECK(same_state(t, b), "the earlier checkpoint keeps its state");

    static const char *const nowhere[] = {"/proc/checkpoints", "/proc/self", "/dev/null"};
    for (int i = 0; i < 3; i++) {
        CHECK_FAILS(try_save(t, nowhere[i], &progress, 1, &failure), "cannot make folder",
                    "a folder that cannot be made fails the save");
        CHECK_FAILS(try_export(t,
                               i == 1   ? "/proc/self/out"
                               : i == 2 ? "/dev/null/parent"
                                        : nowhere[i],
                               &failure),
                    "export to", "a folder that cannot be made fails the export");
    }
    CHECK_FAILS(try_save(t, "/dev/null/parent", &progress, 1, &failure), "cannot make folder /dev/null/parent",
                "a checkpoint folder below a file fails the save");
    trainer_free(t);
    trainer_free(b);
}

// Tests one value that is not finite, in weights or moments. Nothing is saved, the error names the tensor, and the
// failure counts as lasting, so that no second try follows. An export only needs finite weights.
static void test_nonfinite(void) {
    static const char *const prefixes[] = {"", "exp_avg.", "exp_avg_sq."};
    const TrainerProgress progress = {2, 2, 0};
    for (int variant = 0; variant < 6; variant++) {
        const bool fp32 = variant >= 3;
        const StateKind kind = (StateKind)(variant % 3);
        Trainer *t = trainer_new(FAMILY_LLAMA, true, fp32, fp32 ? MOMENTS_FP32 : MOMENTS_BF16);
        const char *dir = scratch_path("nonfinite");
        const Parameter *p = &t->table.entries[3];
        Failure failure = {"", false};
        char expected[256];
        save(t, dir, 1, 1);
        const int64_t at = p->offset + parameter_elements(p) - 1;
        if (fp32) ((float *)t->arrays[kind])[at] = kind ? INFINITY : NAN;
        else ((bf16_bits *)t->arrays[kind])[at] = bf16_from_float(kind ? INFINITY : NAN);
        format_checked(expected, sizeof expected, "tensor %s%s holds a value that is not finite", prefixes[kind],
                       p->name);
        CHECK(!try_save(t, dir, &progress, 1, &failure) && failure.lasting, "variant %d is not saved", variant);
        CHECK(strstr(failure.text, expected) && strstr(failure.text, "nothing was saved; checkpoints of earlier "
                                                                     "steps are untouched"),
              "the error names the tensor: %s", failure.text);
        CHECK_LISTING(dir, "1", "only the earlier checkpoint is there");
        const bool exported = try_export(t, scratch_path("nonfinite-export"), &failure);
        CHECK(exported == (kind != STATE_WEIGHTS),
              "variant %d is exported exactly if the weights, or their masters, are finite", variant);
        CHECK(exported || (failure.lasting && strstr(failure.text, expected)),
              "variant %d: the failed export names the tensor: %s", variant, failure.text);
        CHECK(path_exists(scratch_path("nonfinite-export")) == exported &&
                  !path_exists(scratch_path("nonfinite-export.tmp")),
              "variant %d: the folder of the export is there exactly if the export was made, and no temporary one is",
              variant);
        remove_tree(scratch_path("nonfinite-export"));
        remove_tree(dir);
        trainer_free(t);
    }
}

// Nothing is saved if an FP8 or FP16 moment or a COAT group's word is not finite, or if a scale is zero, negative or
// not finite: a load would refuse it.
static void test_nonfinite_groups(void) {
    static const struct {
        int moments;
        StateKind kind;
        uint32_t value;
        const char *tensor;
    } cases[] = {{MOMENTS_COAT, STATE_EXP_AVG, 0x7f, "exp_avg."},
                 {MOMENTS_COAT, STATE_EXP_AVG_SQ, 0xff, "exp_avg_sq."},
                 {MOMENTS_COAT, STATE_EXP_AVG_GROUPS, 0x7f800000, "exp_avg_groups."},
                 {MOMENTS_COAT, STATE_EXP_AVG_SQ_GROUPS, 0x7fc000ff, "exp_avg_sq_groups."},
                 {MOMENTS_MSAMP, STATE_EXP_AVG, 0xff, "exp_avg."},
                 {MOMENTS_MSAMP, STATE_EXP_AVG_SQ, 0x7c00, "exp_avg_sq."},
                 {MOMENTS_MSAMP, STATE_EXP_AVG_SCALE, 0x7f800000, "exp_avg_scale."},
                 {MOMENTS_MSAMP, STATE_MASTER_SCALE, 0x7fc00000, "master_scale."},
                 {MOMENTS_MSAMP, STATE_EXP_AVG_SQ_SCALE, 0, "exp_avg_sq_scale."},
                 {MOMENTS_MSAMP, STATE_MASTER_SCALE, 0xbf800000, "master_scale."}};
    const TrainerProgress progress = {2, 2, 0};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Trainer *t = trainer_new(FAMILY_LLAMA, true, true, cases[i].moments);
        const Parameter *p = &t->table.entries[3];
        const ShardRange r = state_range(&t->table, &t->state, p, cases[i].kind);
        Failure failure = {"", false};
        char expected[256];
        trainer_fill(t, i);
        const int64_t bytes = element_bytes(t, cases[i].kind);
        memcpy(element(t, cases[i].kind, r.shard + r.count - 1, 1), &cases[i].value, (size_t)bytes);
        format_checked(expected, sizeof expected, "tensor %s%s holds %s", cases[i].tensor, p->name,
                       state_refused(cases[i].kind));
        CHECK(!try_save(t, scratch_path("groups"), &progress, 1, &failure) && failure.lasting &&
                  strstr(failure.text, expected),
              "0x%x in %s is not saved: %s", cases[i].value, cases[i].tensor, failure.text);
        remove_tree(scratch_path("groups"));
        trainer_free(t);
    }
}

// Checkpoints of older versions may hold infinite weights or moments. A run does not resume from them.
static void test_load_nonfinite(void) {
    static const struct {
        const char *file, *tensor;
    } cases[] = {{"model", "model.norm.weight"},
                 {"optimizer", "exp_avg.model.norm.weight"},
                 {"optimizer", "exp_avg_sq.model.norm.weight"}};
    Trainer *t = trainer_new(FAMILY_LLAMA, true, true, MOMENTS_FP32);
    char output[4096];
    Action action = {t, scratch_path("infinite/step-00000001")};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        save(t, scratch_path("infinite"), 1, 1);
        const char *file = scratch_path("infinite/step-00000001/%s.safetensors", cases[i].file);
        write_float(file, safetensors_data(file, cases[i].tensor) + 8, INFINITY);
        CHECK(check_dies(resume_action, &action, "so nothing can be trained from it; move this checkpoint away", output,
                         sizeof output) &&
                  strstr(output, "holds a value that is not finite"),
              "a checkpoint that holds an infinite weight or moment is refused: %s", output);
        CHECK(strstr(output, cases[i].tensor), "the error names the tensor: %s", output);
    }
    trainer_free(t);
}

// A run does not resume from a checkpoint with a scale that is zero or negative. A scale of zero would make its tensor
// infinite.
static void test_load_scale(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, true, MOMENTS_MSAMP);
    const char *file = scratch_path("scale/step-00000001/optimizer.safetensors");
    Action action = {t, scratch_path("scale/step-00000001")};
    trainer_fill(t, 4);
    for (int i = 0; i < 2; i++) {
        save(t, scratch_path("scale"), 1, 1);
        write_float(file, safetensors_data(file, "exp_avg_sq_scale.model.norm.weight"), i ? -1 : 0);
        CHECK_DIES(resume_action, &action,
                   "tensor exp_avg_sq_scale.model.norm.weight holds a scale that is not a number from 2^-126 to "
                   "2^126, so nothing can be trained from it; move this checkpoint away",
                   "a scale that is not above zero is refused");
    }
    trainer_free(t);
}

// ---- A run whose save fails or is killed.

static int failing_saves;

// Replaces libc's function: the next `failing_saves` temporary folders cannot be made, as on a disk that fails for a
// while.
int mkdir(const char *path, mode_t mode) {
    if (failing_saves > 0 && strstr(path, FOLDER_TEMPORARY)) {
        failing_saves--;
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

typedef struct {
    Trainer *trainer;
    RunSetup setup;
    Logger log;
} SavingRun;

static void run_save_at(SavingRun *r, int64_t step, bool last, int failing) {
    const TrainerProgress progress = {step, step, 0};
    failing_saves = failing;
    run_save(&r->setup, &r->trainer->options, &progress, &r->trainer->table, &r->trainer->state, last, &r->log);
}

static void save_action(void *context) { run_save_at((SavingRun *)context, 4, false, 1); }

static void end_action(void *context) {
    SavingRun *r = (SavingRun *)context;
    fclose(stdout);
    run_end(&r->setup, &r->trainer->options, r->trainer->options.num_steps > 9 ? SIGTERM : 0, 9, &r->trainer->table,
            &r->trainer->state);
}

static void test_retry(void) {
    SavingRun r;
    const char *log = scratch_path("save.jsonl"), *dir = scratch_path("retry");
    char output[4096];
    memset(&r, 0, sizeof r);
    r.trainer = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    r.setup.model = r.trainer->model;
    r.log.file = logger_append(log, &r.log.end);
    r.trainer->options.checkpoint_dir = dir;
    r.trainer->options.export_hf = scratch_path("retry-export");
    r.trainer->options.keep_checkpoints = 9, r.trainer->options.num_steps = 9;
    run_save_at(&r, 1, false, 2);
    CHECK(r.setup.save_failed && r.setup.saved_step == 0 && strcmp(listing(dir), "") == 0,
          "a save that fails twice leaves nothing, and the run goes on; found \"%s\"", listing(dir));
    run_save_at(&r, 2, false, 1);
    CHECK(!r.setup.save_failed && r.setup.saved_step == 2 && strcmp(listing(dir), "2") == 0,
          "a save that fails once succeeds at its second try; found %s", listing(dir));
    run_save_at(&r, 3, false, 2);
    CHECK(r.setup.save_failed && r.setup.saved_step == 2 && strcmp(listing(dir), "2") == 0,
          "after a failed save the earlier checkpoint stays; found %s", listing(dir));
    CHECK_DIES(end_action, &r,
               "untouched. No other save follows: no checkpoint has the steps after step 2, and "
               "--resume continues from there",
               "the end of the run says which steps no checkpoint has");
    CHECK(path_exists(r.trainer->options.export_hf), "the export is made although saves failed");
    r.trainer->options.num_steps = 10;
    remove_tree(r.trainer->options.export_hf);
    CHECK(check_dies(end_action, &r, "No other save follows", output, sizeof output) &&
              !path_exists(r.trainer->options.export_hf),
          "after a stop signal there is no export: %s", output);
    run_save_at(&r, 4, false, 0);
    CHECK(!r.setup.save_failed && r.setup.saved_step == 4 && !check_dies(end_action, &r, "", output, sizeof output),
          "after a save that succeeds, the run ends without an error: %s", output);
    r.trainer->options.on_save_error = SAVE_ERROR_STOP;
    CHECK(check_dies(save_action, &r, "failed: cannot make folder", output, sizeof output) &&
              strstr(output, "Input/output error") && !strstr(output, "again"),
          "with --on-save-error stop there is no second try: %s", output);
    fclose(r.log.file);
    char *lines = read_file(log, NULL);
    CHECK(check_count(lines, "{\"type\": \"save\", \"step\": ") == 7 &&
              check_count(lines, "\"error\": \"saving checkpoint ") == 5 &&
              check_count(lines, "\"step\": 2, \"error\": \"saving checkpoint ") == 1 &&
              check_count(lines, "{\"type\": \"save\", \"step\": 4, \"seconds\": ") == 1,
          "the log has 7 tries to save, 5 of them failed:\n%s", lines);
    // An export that fails is tried again, too.
    r.trainer->options.num_steps = 9;
    failing_saves = 1;
    run_end(&r.setup, &r.trainer->options, 0, 9, &r.trainer->table, &r.trainer->state);
    CHECK(failing_saves == 0 && path_exists(r.trainer->options.export_hf),
          "an export that failed once is made at the second try");
    remove_tree(r.trainer->options.export_hf);
    failing_saves = 2;
    CHECK_DIES(end_action, &r, "export to", "an export that fails twice is an error");
    failing_saves = 0;
    free(lines);
    trainer_free(r.trainer);
}

// Reads state for a save, and kills the process when it reads exp_avg_sq.
static void kill_in_read(void *context, StateKind kind, int64_t offset, int64_t count, void *host) {
    state_read(context, kind, offset, count, host);
    if (kind == STATE_EXP_AVG_SQ) raise(SIGKILL);
}

// If a process is killed in the middle of a save, the earlier checkpoint stays, and the next save removes the
// leftovers.
static void test_killed(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, false, false, MOMENTS_BF16);
    const char *dir = scratch_path("killed");
    char found[PATH_CAPACITY];
    save(t, dir, 1, 2);
    pid_t child = fork();
    if (child == 0) {
        t->state.read = kill_in_read;
        save(t, dir, 2, 2);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "SIGKILL ends the second save");
    CHECK_LISTING(dir, "1+1", "the earlier checkpoint and one leftover are there");
    CHECK(checkpoint_find_newest(dir, found, sizeof found) && strstr(found, "step-00000001"),
          "the newest checkpoint is step 1; found %s", found);
    save(t, dir, 3, 2);
    CHECK_LISTING(dir, "3 1", "the next save removes the leftover");
    trainer_free(t);
}

// ---- Export, folders, and weights of other programs.

static void test_export(void) {
    Trainer *a = trainer_new(FAMILY_QWEN3, true, true, MOMENTS_BF16),
            *b = trainer_new(FAMILY_QWEN3, true, false, MOMENTS_BF16);
    const char *dir = scratch_path("export"), *trailing = scratch_path("export/"),
               *source_folder = scratch_path("source");
    Failure failure = {"", false};
    model_export_prepare(scratch_path("not/there/yet"), NULL);
    CHECK(folder_exists(scratch_path("not/there")) && !path_exists(scratch_path("not/there/yet")),
          "model_export_prepare makes the folders above the export, but not the export");
    for (int64_t i = 0; i < a->table.total; i++) ((float *)a->arrays[STATE_WEIGHTS])[i] = 0;
    for (int64_t k = 0; k < a->table.count; k++)
        for (int64_t i = 0; i < parameter_elements(&a->table.entries[k]); i++)
            ((float *)a->arrays[STATE_WEIGHTS])[a->table.entries[k].offset + i] = rng_normal((uint64_t)k, (uint64_t)i);
    scratch_file(source_folder, "tokenizer.json", "{}");
    scratch_file(source_folder, "README.md", "x");
    model_export_prepare(dir, source_folder);
    CHECK(!path_exists(dir), "model_export_prepare makes no export");
    CHECK(try_export(a, dir, &failure), "the first export is made: %s", failure.text);
    CHECK(!path_exists(scratch_path("export/tokenizer.json")) && model_has_weights(dir),
          "the first export has weights and no tokenizer.json");
    model_export_prepare(trailing, source_folder);
    TokenizerFiles tokenizer = {0};
    tokenizer_files_read(&tokenizer, source_folder);
    CHECK(model_export_hf(trailing, &a->model, &a->table, &a->state, &tokenizer, &failure),
          "the second export is made: %s", failure.text);
    tokenizer_files_free(&tokenizer);
    CHECK(path_exists(scratch_path("export/tokenizer.json")) && !path_exists(scratch_path("export/README.md")) &&
              !path_exists(scratch_path("export/trainer.json")) && !path_exists(scratch_path("export.tmp")),
          "the second export has tokenizer.json, but neither README.md nor trainer.json, and export.tmp is gone");

    // Weights loaded as bf16 are rounded to nearest even.
    ModelConfig read;
    hf_config_read(&read, dir);
    model_check_weights(dir, &read, &b->table);
    model_load_weights(dir, &read, &b->table, &b->state);
    int64_t wrong = 0;
    for (int64_t i = 0; i < a->table.total; i++)
        wrong += ((bf16_bits *)b->arrays[STATE_WEIGHTS])[i] != bf16_from_float(((float *)a->arrays[STATE_WEIGHTS])[i]);
    CHECK(wrong == 0, "all weights are rounded to nearest even; %lld are not", (long long)wrong);
    free(read.source);

    // A folder with any other file in it is not replaced.
    scratch_file(dir, "thesis.txt", "x");
    CHECK_FAILS(try_export(a, dir, &failure), "holds thesis.txt, which is not part of an export; use a new folder",
                "an export to a folder with another file fails");
    CHECK(path_exists(scratch_path("export/thesis.txt")) && path_exists(scratch_path("export/model.safetensors")),
          "a refused export removes no file");
    CHECK(strstr(failure.text, "export.tmp: move it away") &&
              safetensors_is_own(scratch_path("export.tmp/model.safetensors")),
          "the refused export stays in export.tmp: %s", failure.text);
    trainer_free(a);
    trainer_free(b);
}

static bool zeros(void *context, int64_t tensor, int64_t offset, int64_t count, void *out, Failure *failure) {
    (void)tensor, (void)offset, (void)failure;
    memset(out, 0, (size_t)(count * safetensors_type_bytes(*(SafetensorsType *)context)));
    return true;
}

// Writes a model's tensors, all zero. Leaves out the tensor `skip`, exchanges rows and columns of the tensor
// `misshape`, and adds a tensor `extra`. An empty name changes nothing.
static void write_weights(const char *dir, const ParameterTable *t, const char *skip, const char *misshape,
                          const char *extra, SafetensorsType type) {
    SafetensorSpec *all = (SafetensorSpec *)xcalloc((size_t)t->count + 1, sizeof *all);
    int64_t n = 0;
    for (int64_t i = 0; i < t->count; i++) {
        const Parameter *p = &t->entries[i];
        if (strcmp(p->name, skip) == 0) continue;
        format_checked(all[n].name, sizeof all[n].name, "%s", p->name);
        all[n].type = type;
        all[n].rows = p->rows, all[n].cols = p->cols;
        if (strcmp(p->name, misshape) == 0) all[n].rows = p->cols, all[n].cols = p->rows;
        n++;
    }
    if (*extra) {
        format_checked(all[n].name, sizeof all[n].name, "%s", extra);
        const bool head = strcmp(extra, "lm_head.weight") == 0;
        all[n].type = type, all[n].rows = head ? t->entries[0].rows : 4, all[n].cols = head ? t->entries[0].cols : 0;
        n++;
    }
    FileList list = {NULL, 0};
    Failure failure;
    if (!safetensors_save(dir, "model", all, n, SAFETENSORS_SHARD_BYTES, zeros, &type, &list, &failure))
        die("%s", failure.text);
    file_list_free(&list);
    free(all);
}

typedef struct {
    const char *dir, *model_folder;
    void (*before)(const char *dir);
} Export;

static void export_action(void *context) {
    const Export *e = (const Export *)context;
    if (e->before) e->before(e->dir);
    model_export_prepare(e->dir, e->model_folder);
}

static void refused(const char *dir, const char *model_folder, void (*before)(const char *), const char *message) {
    Export e = {dir, model_folder, before};
    char left[PATH_CAPACITY];
    CHECK_DIES(export_action, &e, message, "%s: the error is \"%s\"; found", dir, message);
    format_checked(left, sizeof left, "%s.old.tmp", dir);
    CHECK(!path_exists(left), "%s does not exist", left);
}

static void be_nobody(const char *dir) {
    (void)dir;
    if (setuid(65534)) die("setuid: %s", strerror(errno));
}

static void run_in(const char *dir) {
    if (chdir(dir)) die("chdir: %s", strerror(errno));
}

// A folder that cannot take the export is refused before the first step.
static void test_export_refusals(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    const char *dir = scratch_path("sticky/export"), *weights = scratch_path("sticky/export/model.safetensors"),
               *link = scratch_path("sticky/link"), *dotted = scratch_path("sticky/./none/../export/.");
    Failure failure = {"", false};
    if (!folder_create(scratch_path("sticky"), false, &failure) || chmod(scratch_path("sticky"), 01777) ||
        chmod(scratch, 0755))
        die("%s", failure.text);
    CHECK(symlink("export", link) == 0, "the link is made: %s", strerror(errno));
    refused(link, NULL, NULL, "which is a link to export, which cannot be followed: ");
    // Rounds 0 to 2: a folder that does not exist, an empty one, and an earlier export can take the export.
    for (int round = 0; round < 3; round++) {
        model_export_prepare(dir, scratch_path("elsewhere"));
        CHECK(path_exists(dir) == (round > 0) && !path_exists(scratch_path("sticky/export.old.tmp")) &&
                  !path_exists(scratch_path("sticky/export.tmp")),
              "round %d: the folder exists if it did before, and no temporary folder is left", round);
        if (round == 0 && !folder_create(dir, false, &failure)) die("%s", failure.text);
        if (round == 1) CHECK(try_export(t, dir, &failure), "the export is made: %s", failure.text);
    }
    CHECK(safetensors_is_own(weights), "the earlier export stays");

    // Paths with dots or through a link mean the same folder. The link then leads to the new export.
    model_export_prepare(dotted, NULL);
    model_export_prepare(link, NULL);
    CHECK(try_export(t, dotted, &failure) && try_export(t, link, &failure), "exports by other paths are made: %s",
          failure.text);
    CHECK(safetensors_is_own(weights) && strcmp(listing(scratch_path("sticky")), "+2") == 0,
          "the folder holds the export and the link only; found %s", listing(scratch_path("sticky")));

    refused(dir, link, NULL, "the folder of MODEL; use a new folder");
    refused(scratch_path("sticky/mod"), scratch_path("sticky/mod.tmp"), NULL, "the folder of MODEL");
    refused(".", NULL, NULL, "this program runs in it");
    Export here = {dir, NULL, run_in};
    CHECK_DIES(export_action, &here, "this program runs in it; use a new folder",
               "the folder in which this program runs is refused");
    if (geteuid() == 0) {
        refused(dir, NULL, be_nobody, "it cannot be replaced: Operation not permitted");
        CHECK(safetensors_is_own(weights), "the earlier export stays");
    } else {
        printf("skipped: an export over a folder of another user: only root can become another user\n");
    }

    // A model that another program wrote is not an earlier export of this program. A folder that has files of a model
    // but no weights is not one either.
    write_weights(dir, &t->table, "", "", "", ST_F32);
    flip_byte(weights, 45);  // changes the key "written_by"
    refused(dir, NULL, NULL, "may be no earlier export: this program did not write its file model.safetensors");
    CHECK(unlink(weights) == 0, "the weights are removed: %s", strerror(errno));
    refused(dir, NULL, NULL, "may be no earlier export: it holds files of a model but no weights");
    CHECK(unlink(link) == 0, "the link is removed: %s", strerror(errno));
    trainer_free(t);
}

// If a run is killed while it renames folders, the earlier export may be left in NAME.old.tmp, while NAME is an empty
// folder, one with only the marker file, or absent. The next start puts the export back. A link, or a folder of another
// program, at NAME.old.tmp or NAME.tmp stays, and the start ends with an error that names it.
static void test_export_restore(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    Failure failure = {"", false};
    const char *dir = scratch_path("out"), *aside = scratch_path("out.old.tmp"),
               *weights = scratch_path("out/model.safetensors");
    char output[4096];
    Export e = {dir, NULL, NULL};
    CHECK(try_export(t, dir, &failure), "the export is made: %s", failure.text);
    // NAME is absent in state 0, an empty folder in state 1, and a folder with only the marker file in states 2 and 3.
    // In state 3 the earlier export has no marker file and no hashes: an older version wrote it.
    for (int state = 0; state < 4; state++) {
        if (rename(dir, aside) || (state == 1 && !folder_create(dir, false, &failure)) ||
            (state >= 2 && !folder_begin(dir, &failure)))
            die("%s", failure.text);
        if (state == 3)
            CHECK(unlink(scratch_path("out.old.tmp/" FOLDER_MARKER)) == 0 &&
                      unlink(scratch_path("out.old.tmp/" EXPORT_HASHES)) == 0,
                  "marker file and hashes are removed: %s", strerror(errno));
        model_export_prepare(dir, NULL);
        CHECK(safetensors_is_own(weights) && !path_exists(aside), "state %d: the earlier export is in its place again",
              state);
        if (state == 3)
            CHECK(try_export(t, dir, &failure) && path_exists(scratch_path("out/" FOLDER_MARKER)),
                  "the next export has the marker file: %s", failure.text);
    }
    // NAME and NAME.old.tmp could both be the earlier export: the user must choose one.
    if (!folder_begin(aside, &failure)) die("%s", failure.text);
    scratch_file(aside, "config.json", "{}");
    CHECK_DIES(export_action, &e, "out.old.tmp is in the way: it may be an earlier export; move it away, or remove it",
               "the folder in the way is named");
    remove_tree(aside);
    // Links are not followed, and a folder of another program stays.
    static const char *const names[] = {"out.tmp", "out.old.tmp"};
    scratch_file(scratch_path("victim"), "config.json", "{}");
    for (int i = 0; i < 4; i++) {
        const char *at = scratch_path("%s", names[i % 2]);
        if (i >= 2) scratch_file(at, "config.json", "{}");
        else if (symlink("victim", at)) die("%s", strerror(errno));
        CHECK(check_dies(export_action, &e, "is in the way: ", output, sizeof output) && strstr(output, "move it away"),
              "case %d: what is in the way is named: %s", i, output);
        CHECK(path_exists(scratch_path("victim/config.json")) && path_exists(at) && safetensors_is_own(weights),
              "case %d: what is in the way, its target and the export stay", i);
        CHECK(i % 2 || (!try_export(t, dir, &failure) && strstr(failure.text, "out.tmp is in the way")),
              "case %d: out.tmp in the way fails the export: %s", i, failure.text);
        if (i < 2 ? unlink(at) : (remove_tree(at), 0)) die("%s", strerror(errno));
    }
    trainer_free(t);
}

// If MODEL is a checkpoint or an export, the files that a run reads there are compared with the hashes beside them. A
// folder of another program has no hashes.
static void test_verify(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    Failure failure = {"", false};
    const char *checkpoint = scratch_path("verify/step-00000001"), *export = scratch_path("verify-export");
    char path[PATH_CAPACITY];
    scratch_file(scratch_path("verify-source"), "tokenizer.json", "{}");
    TokenizerFiles tokenizer = {0};
    tokenizer_files_read(&tokenizer, scratch_path("verify-source"));
    remove_tree(scratch_path("verify-source"));  // the files stay in memory
    t->run.tokenizer = &tokenizer;
    save(t, scratch_path("verify"), 1, 1);
    CHECK(model_export_hf(export, &t->model, &t->table, &t->state, &tokenizer, &failure), "the export is made: %s",
          failure.text);
    static const struct {
        bool exported;
        const char *file;
        bool small;
    } cases[] = {{false, "model.safetensors", false}, {false, "config.json", true},       {false, "trainer.json", true},
                 {false, "tokenizer.json", true},     {true, "model.safetensors", false}, {true, "config.json", true},
                 {true, "tokenizer.json", true},      {true, EXPORT_HASHES, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *folder = cases[i].exported ? export : checkpoint;
        CHECK(model_verify(folder, INT64_MAX, &failure) && model_verify(folder, 1000, &failure),
              "the undamaged folder passes: %s", failure.text);
        format_checked(path, sizeof path, "%s/%s", folder, cases[i].file);
        flip_byte(path, 1);
        CHECK(!model_verify(folder, INT64_MAX, &failure) && strstr(failure.text, cases[i].file) &&
                  strstr(failure.text, "is damaged"),
              "%s: a changed byte is detected: %s", path, failure.text);
        CHECK(model_verify(folder, 1000, &failure) != cases[i].small,
              "%s: with a limit of 1000 bytes, a changed byte is detected exactly in smaller files: %s", path,
              failure.text);
        flip_byte(path, 1);
    }
    // The optimizer state is not read, so it may be missing. A folder without a list of hashes is not checked.
    CHECK(unlink(scratch_path("verify/step-00000001/optimizer.safetensors")) == 0 &&
              model_verify(checkpoint, INT64_MAX, &failure),
          "the optimizer state may be missing: %s", failure.text);
    flip_byte(scratch_path("verify-export/model.safetensors"), 900);
    CHECK(!model_verify(export, INT64_MAX, &failure) && unlink(scratch_path("verify-export/" EXPORT_HASHES)) == 0 &&
              model_verify(export, INT64_MAX, &failure),
          "damage is detected with a list of hashes, and not without: %s", failure.text);
    tokenizer_files_free(&tokenizer);
    trainer_free(t);
}

// folder_replace(new, old) exchanges the names of two folders, then tries to remove the old one, which now has the name
// `new`. Here that fails: the old folder has no marker file in the first round, and a subfolder in both rounds.
static void test_replace(void) {
    const char *old = scratch_path("old"), *new = scratch_path("new");
    Failure failure = {"", false};
    for (int marked = 0; marked < 2; marked++) {
        scratch_file(new, "x", "x");
        if (!folder_create(scratch_path("old/nested"), true, &failure) || (marked && !folder_mark(old, &failure)))
            die("%s", failure.text);
        CHECK(folder_replace(new, old, &failure), "folder_replace succeeds: %s", failure.text);
        CHECK(path_exists(scratch_path("old/x")) && path_exists(scratch_path("new/nested")),
              "the two folders are exchanged");
        remove_tree(old);
        remove_tree(new);
    }
}

static void test_resolve(void) {
    static const char *const cases[][2] = {{"/", "/"},
                                           {"/..", "/"},
                                           {"/no/such//./folder/", "/no/such/folder"},
                                           {"/no/such/../folder/..", "/no"},
                                           {"/no/..", "/"},
                                           {"/proc/../tmp/.", "/tmp"}};
    char out[PATH_CAPACITY], here[PATH_CAPACITY];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        path_resolve(cases[i][0], out, sizeof out);
        CHECK(strcmp(out, cases[i][1]) == 0, "%s resolves to %s; expected %s", cases[i][0], out, cases[i][1]);
    }
    path_resolve("", here, sizeof here);
    path_resolve("no-such/x", out, sizeof out);
    CHECK(path_within(out, here) && strcmp(out + strlen(here), "/no-such/x") == 0,
          "a relative path resolves to one in the current folder: %s", out);
    CHECK(path_within("/a/b", "/a") && path_within("/a", "/a") && path_within("/a", "/") && !path_within("/ab", "/a") &&
              !path_within("/a", "/a/b"),
          "path_within compares whole names of folders");
}

static void load_action(void *context) {
    Action *a = (Action *)context;
    model_load_weights(a->path, &a->trainer->model, &a->trainer->table, &a->trainer->state);
}

static void check_weights_action(void *context) {
    const Action *a = (const Action *)context;
    model_check_weights(a->path, &a->trainer->model, &a->trainer->table);
}

// Sets the last element of DIR/model.safetensors, which belongs to the extra tensor if there is one.
static void write_last(const char *dir, float value) {
    char path[PATH_CAPACITY];
    format_checked(path, sizeof path, "%s/model.safetensors", dir);
    FILE *f = fopen(path, "r+b");
    if (!f || fseek(f, -(long)sizeof value, SEEK_END) || fwrite(&value, sizeof value, 1, f) != 1 || fclose(f))
        die("%s", path);
}

static void test_foreign_weights(void) {
    Trainer *t = trainer_new(FAMILY_LLAMA, true, false, MOMENTS_BF16);
    const char *dir = scratch_path("foreign");
    char output[4096];
    Failure failure;
    if (!folder_create(dir, false, &failure)) die("%s", failure.text);
    Action action = {t, dir};
    CHECK(!model_has_weights(dir) &&
              check_dies(load_action, &action, "has neither model.safetensors nor model.safetensors.index.json", output,
                         sizeof output),
          "a folder without weights is refused: %s", output);
    write_weights(dir, &t->table, "model.layers.1.mlp.up_proj.weight", "", "", ST_BF16);
    CHECK_DIES(load_action, &action, "model.safetensors has no tensor model.layers.1.mlp.up_proj.weight",
               "a missing tensor is refused");
    write_weights(dir, &t->table, "", "model.layers.0.mlp.down_proj.weight", "", ST_BF16);
    CHECK_DIES(load_action, &action,
               "tensor model.layers.0.mlp.down_proj.weight has shape [24, 16]; the model needs [16, 24]",
               "a wrong shape is refused");
    write_weights(dir, &t->table, "", "", "model.layers.0.self_attn.q_proj.bias", ST_BF16);
    CHECK_DIES(load_action, &action,
               "tensor model.layers.0.self_attn.q_proj.bias does not belong to a model with this config.json",
               "a tensor of another model is refused");
    write_weights(dir, &t->table, "", "", "", ST_I32);
    CHECK_DIES(load_action, &action, "has dtype I32; it must be F32, BF16 or F16", "integer weights are refused");
    // Two kinds of extra tensors are allowed: the lm_head of a tied model, if it equals the embedding, and RoPE tables
    // of old files.
    static const char *const allowed[] = {"", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"};
    for (int i = 0; i < 3; i++) {
        trainer_fill(t, 3);
        write_weights(dir, &t->table, "", "", allowed[i], i == 2 ? ST_F16 : ST_F32);
        load_action(&action);
        int64_t nonzero = 0;
        for (int64_t k = 0; k < t->table.total; k++) nonzero += ((bf16_bits *)t->arrays[STATE_WEIGHTS])[k] != 0;
        CHECK(nonzero == 0, "with the extra tensor \"%s\" (\"\": none) all weights are loaded; %lld were not",
              allowed[i], (long long)nonzero);
    }
    // A tied matrix may have either name, in an index too, and an index may have the other one.
    static const char *const indexes[] = {"", "lm_head.weight", "model.embed_tokens.weight"};
    for (int i = 0; i < 3; i++) {
        char index[256];
        write_weights(dir, &t->table, "model.embed_tokens.weight", "", "lm_head.weight", ST_F32);
        write_last(dir, 1);
        format_checked(index, sizeof index, "{\"weight_map\": {\"%s\": \"model-1.safetensors\"}}", indexes[i]);
        if (i) {
            if (rename(scratch_path("foreign/model.safetensors"), scratch_path("foreign/model-1.safetensors")))
                die("%s: %s", dir, strerror(errno));
            scratch_file(dir, "model.safetensors.index.json", index);
        }
        trainer_fill(t, 3);
        model_check_weights(dir, &t->model, &t->table);
        load_action(&action);
        bool ones = false;
        for (int64_t k = 0; k < t->table.total; k++)
            ones = ones || ((bf16_bits *)t->arrays[STATE_WEIGHTS])[k] == bf16_from_float(1);
        CHECK(ones, "a tied matrix stored as lm_head.weight alone becomes the embedding, with index \"%s\"",
              indexes[i]);
    }
    write_weights(dir, &t->table, "", "", "", ST_F8_E4M3);
    CHECK_DIES(check_weights_action, &action, "has dtype F8_E4M3; it must be F32, BF16 or F16: use the original model",
               "quantized weights are refused before any work");
    write_weights(dir, &t->table, "", "", "lm_head.weight", ST_F32);
    write_last(dir, 1);
    CHECK_DIES(load_action, &action, "config.json ties lm_head.weight to model.embed_tokens.weight, but they differ",
               "a tied model whose lm_head differs is refused");
    write_weights(dir, &t->table, "", "", "", ST_F32);
    write_last(dir, INFINITY);
    CHECK_DIES(load_action, &action, "holds a value that is not finite", "an infinite weight is refused");
    Trainer *untied = trainer_new(FAMILY_LLAMA, false, false, MOMENTS_BF16);
    action.trainer = untied;
    write_weights(dir, &t->table, "", "", "", ST_F32);
    CHECK_DIES(load_action, &action,
               "has no tensor lm_head.weight. If it is the same matrix as model.embed_tokens.weight, set "
               "\"tie_word_embeddings\": true in config.json",
               "an untied model without lm_head is refused");
    write_weights(dir, &t->table, "model.embed_tokens.weight", "", "lm_head.weight", ST_F32);
    CHECK_DIES(check_weights_action, &action,
               "has no tensor model.embed_tokens.weight. If it is the same matrix as lm_head.weight, set",
               "an untied model without embedding is refused");
    trainer_free(t);
    trainer_free(untied);
}

int main(void) {
    scratch_create();
    test_round_trip();
    test_delayed();
    test_sharded();
    test_unreadable_folders();
    test_keep();
    test_links();
    test_unmarked();
    test_prune_together();
    test_mismatch();
    test_betas_since();
    test_older_settings();
    test_removed_option();
    test_prepare();
    test_lock();
    test_damage();
    test_sealed();
    test_failing_save();
    test_nonfinite();
    test_nonfinite_groups();
    test_load_nonfinite();
    test_load_scale();
    test_retry();
    test_killed();
    test_export();
    test_export_refusals();
    test_export_restore();
    test_verify();
    test_replace();
    test_resolve();
    test_foreign_weights();
    scratch_remove();
    return check_report();
}
