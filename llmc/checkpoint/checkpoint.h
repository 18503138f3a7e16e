// Checkpoints and loading of weights, for both trainers (they give access to their arrays by TrainerState).
//
// A checkpoint is a folder CHECKPOINT_DIR/step-00000123:
//   config.json, model*.safetensors           as transformers reads them
//   optimizer*.safetensors                    exp_avg.NAME and exp_avg_sq.NAME of every parameter
//   fp8_state.safetensors                     with delayed scaling alone: amax_history [tensors, window] and scale [tensors], as delayed.h counts them
//   trainer.json                              step, samples seen, settings, what the training data is known by, and size and XXH64 of each file above; written last, ends with its own hash
//   .train_fp8                                this program's mark (file_io.h), written first: a folder without it is
//                                             removed only if it has a sound trainer.json
// Several ranks write one checkpoint together, each what it keeps of every tensor (shard_plan.h), at the same places as one rank would: how a run is
// split does not show in its checkpoints, and it can be resumed by any number of ranks. Functions that take a TrainerState are called by all ranks.
// It is written as step-00000123.tmp, brought to disk, then renamed: a folder without ".tmp" was whole when it got its
// name. No value in it is NaN or infinite. A checkpoint may be a link to a folder elsewhere: it is resumed from and
// counts as kept, and neither the link nor the folder is ever removed.
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include <fnmatch.h>

#include "../dist/comm.h"
#include "../data/dataloader.h"
#include "../reference/delayed.h"
#include "../config/hf_config.h"
#include "../config/options.h"
#include "safetensors.h"
#include "../config/shard_plan.h"

#define CHECKPOINT_FORMAT_VERSION 1
#define FINGERPRINT_FORMAT "%016llx"

typedef enum { STATE_WEIGHTS, STATE_EXP_AVG, STATE_EXP_AVG_SQ } StateKind;

// Access to the trainer's flat arrays, of which `plan` says what they hold. Ranges are elements of the rank's flat shard arrays; `host` holds them
// in the array's storage type (fp32 if is_fp32[kind], else bf16). Calls come from one thread and have finished with `host` when they return.
typedef struct {
    void *context;
    bool is_fp32[3];  // by StateKind
    void (*read)(void *context, StateKind kind, int64_t offset, int64_t count, void *host);
    void (*write)(void *context, StateKind kind, int64_t offset, int64_t count, const void *host);
    const ShardPlan *plan;  // NULL: one rank, the arrays are the flat arrays of parameters.h
    const Comm *comm;       // NULL: one rank
    DelayedState *delayed;  // NULL: not delayed scaling; else the same on all ranks
} TrainerState;

// How far a run has come: what a resumed run continues from.
typedef struct {
    int64_t step;     // optimizer steps done
    int64_t samples;  // sequences seen: the data cursor
} TrainerProgress;

// Checkpoints of a folder, by their steps.
typedef struct {
    int64_t *steps;  // newest first
    int64_t count;
} CheckpointSteps;

// What a checkpoint says of the run that wrote it, and a resumed run must share: the model, the settings that are MUST_MATCH, the training data.
typedef struct {
    const ModelConfig *model;
    const Options *options;  // their `auto` values resolved
    DataIdentity data;
    CheckpointSteps *passed_over;  // by this run, when it was resumed; NULL: none
} CheckpointRun;

// ---- writing tensors

// All ranks learn whether one failed: false on all of them, with the text of the first that did, which is named. `failure` was set where !ok.
static inline bool checkpoint_agree(const Comm *c, bool ok, Failure *failure) {
    if (!c || c->world == 1) return ok;
    const double first = comm_min(c, COMM_WORLD, ok ? (double)c->world : (double)c->rank);
    if (first == (double)c->world) return true;
    if ((double)c->rank == first && strncmp(failure->text, "rank ", 5) != 0) {  // else named in an agreement before this one
        const Failure own = *failure;
        fail(failure, "rank %lld on %s: %.1900s", (long long)c->rank, c->host, own.text);
        failure->lasting = own.lasting;
    }
    comm_broadcast(c, COMM_WORLD, (int64_t)first, failure, sizeof *failure);
    return false;
}

static inline bool checkpoint_is_leader(const Comm *c) { return !c || c->rank == 0; }

// What safetensors_save asks checkpoint_fetch for: entry i of `specs` is parameter i % count of kind kinds[i / count].
typedef struct {
    const ParameterTable *table;
    const TrainerState *state;
    StateKind kinds[2];
} CheckpointSource;

static inline ShardRange checkpoint_range(const ParameterTable *t, const TrainerState *s, const Parameter *p) {
    ShardRange whole = {0, parameter_elements(p), p->offset};
    return s->plan ? shard_parameter(t, s->plan, p) : whole;
}

static inline const char *state_prefix(StateKind kind) {
    return kind == STATE_WEIGHTS ? "" : kind == STATE_EXP_AVG ? "exp_avg." : "exp_avg_sq.";
}

// True if none of n floats, or bf16 values, has an exponent of ones.
static inline bool all_finite(const void *values, int64_t n, bool fp32) {
    uint32_t bad = 0;
    if (fp32)
        for (int64_t i = 0; i < n; i++) bad |= (((const uint32_t *)values)[i] & 0x7f800000) == 0x7f800000;
    else
        for (int64_t i = 0; i < n; i++) bad |= (((const uint16_t *)values)[i] & 0x7f80) == 0x7f80;
    return !bad;
}

// A value that is not finite never reaches a file: nothing could be trained from it. `lasting`, since it stays so.
static inline bool checkpoint_check_finite(const char *prefix, const char *name, const void *values, int64_t n,
                                           bool fp32, Failure *failure) {
    if (all_finite(values, n, fp32)) return true;
    fail(failure, "tensor %s%.200s holds a value that is not finite, with which nothing can be trained; nothing was "
         "saved", prefix, name);
    failure->lasting = true;
    return false;
}

static inline bool checkpoint_fetch(void *context, int64_t tensor, int64_t offset, int64_t count, void *out,
                                    Failure *failure) {
    const CheckpointSource *source = (const CheckpointSource *)context;
    const Parameter *p = &source->table->entries[tensor % source->table->count];
    const StateKind kind = source->kinds[tensor / source->table->count];
    const ShardRange r = checkpoint_range(source->table, source->state, p);
    source->state->read(source->state->context, kind, r.shard + offset - r.first, count, out);
    return checkpoint_check_finite(state_prefix(kind), p->name, out, count, source->state->is_fp32[kind], failure);
}

// What this rank writes of a tensor. Replicas, which all have the same, take turns.
static inline void checkpoint_part(void *context, int64_t tensor, int64_t *first, int64_t *count) {
    const CheckpointSource *source = (const CheckpointSource *)context;
    const Comm *c = source->state->comm;
    const ShardRange r = checkpoint_range(source->table, source->state, &source->table->entries[tensor % source->table->count]);
    *first = r.first, *count = tensor % c->replicas == c->replica ? r.count : 0;
}

// safetensors_save by several ranks: rank 0 creates the files, all fill in their parts, then each hashes its share of the files.
static inline bool checkpoint_write_together(const SafetensorsSet *set, const CheckpointSource *source, FileList *list, Failure *failure) {
    const Comm *c = source->state->comm;
    bool ok = true;
    for (int64_t f = 0; ok && c->rank == 0 && f < set->num_files; f++) ok = safetensors_create_file(set, f, failure);
    if (!checkpoint_agree(c, ok, failure)) return false;
    for (int64_t f = 0; ok && f < set->num_files; f++) ok = safetensors_fill_file(set, f, checkpoint_part, checkpoint_fetch, (void *)source, failure);
    if (!checkpoint_agree(c, ok, failure)) return false;
    FileRecord *records = (FileRecord *)xcalloc((size_t)set->num_files, sizeof *records);
    for (int64_t f = c->rank; ok && f < set->num_files; f += c->world) {
        char path[PATH_CAPACITY];
        safetensors_set_name(set, f, records[f].name, sizeof records[f].name);
        format_checked(path, sizeof path, "%s/%s", set->folder, records[f].name);
        ok = file_size(path, &records[f].bytes, failure) && file_hash(path, records[f].bytes, &records[f].hash, failure);
    }
    ok = checkpoint_agree(c, ok, failure);
    for (int64_t f = 0; ok && f < set->num_files; f++) {
        comm_broadcast(c, COMM_WORLD, f % c->world, &records[f], sizeof records[f]);
        file_list_add(list, records[f].name, records[f].bytes, records[f].hash);
    }
    free(records);
    return checkpoint_agree(c, ok && (c->rank > 0 || safetensors_write_index(set, list, failure)), failure);
}

// Writes the arrays `kinds` as STEM*.safetensors.
static inline bool checkpoint_write_tensors(const char *folder, const char *stem, const ParameterTable *t, const TrainerState *s,
                                            const StateKind *kinds, int num_kinds, int64_t shard_bytes, FileList *list, Failure *failure) {
    CheckpointSource source = {t, s, {kinds[0], kinds[num_kinds - 1]}};
    SafetensorSpec *specs = (SafetensorSpec *)xcalloc((size_t)(num_kinds * t->count), sizeof *specs);
    for (int64_t i = 0; i < num_kinds * t->count; i++) {
        const Parameter *p = &t->entries[i % t->count];
        const StateKind kind = kinds[i / t->count];
        format_checked(specs[i].name, sizeof specs[i].name, "%s%s", state_prefix(kind), p->name);
        specs[i].type = s->is_fp32[kind] ? ST_F32 : ST_BF16;
        specs[i].rows = p->rows, specs[i].cols = p->cols;
    }
    bool ok;
    if (s->comm && s->comm->world > 1) {
        SafetensorsSet set = safetensors_set(folder, stem, specs, num_kinds * t->count, shard_bytes);
        ok = checkpoint_write_together(&set, &source, list, failure);
        safetensors_set_free(&set);
    } else {
        ok = safetensors_save(folder, stem, specs, num_kinds * t->count, shard_bytes, checkpoint_fetch, &source, list, failure);
    }
    free(specs);
    return ok;
}

// config.json and model*.safetensors.
static inline bool checkpoint_write_model(const char *folder, const ModelConfig *m, const ParameterTable *t, const TrainerState *s,
                                          int64_t shard_bytes, FileList *list, Failure *failure) {
    const StateKind weights[] = {STATE_WEIGHTS};
    const bool ok = !checkpoint_is_leader(s->comm) || hf_config_write(m, folder, s->is_fp32[STATE_WEIGHTS] ? "float32" : "bfloat16", list, failure);
    return checkpoint_agree(s->comm, ok, failure) && checkpoint_write_tensors(folder, "model", t, s, weights, 1, shard_bytes, list, failure);
}

// ---- delayed scaling

static inline bool checkpoint_fetch_delayed(void *context, int64_t tensor, int64_t offset, int64_t count, void *out,
                                            Failure *failure) {
    const DelayedState *d = (const DelayedState *)context;
    memcpy(out, (tensor ? d->scale : d->history) + offset, (size_t)count * sizeof(float));
    return checkpoint_check_finite("", tensor ? "scale" : "amax_history", out, count, true, failure);
}

// fp8_state.safetensors, by rank 0; nothing to do without delayed scaling.
static inline bool checkpoint_write_delayed(const char *folder, const TrainerState *s, FileList *list, Failure *failure) {
    if (!s->delayed) return true;
    bool ok = true;
    if (checkpoint_is_leader(s->comm)) {
        SafetensorSpec specs[2];
        memset(specs, 0, sizeof specs);
        format_checked(specs[0].name, sizeof specs[0].name, "amax_history");
        format_checked(specs[1].name, sizeof specs[1].name, "scale");
        specs[0].type = specs[1].type = ST_F32;
        specs[0].rows = specs[1].rows = s->delayed->tensors, specs[0].cols = s->delayed->window;
        ok = safetensors_save(folder, "fp8_state", specs, 2, INT64_MAX, checkpoint_fetch_delayed, s->delayed, list, failure);
    }
    return checkpoint_agree(s->comm, ok, failure);
}

// A loaded history may hold an infinity, which older versions saved when a step had met it, but no NaN. Scales are
// finite.
static inline bool checkpoint_check_history(const DelayedState *d, const char *path, Failure *failure) {
    for (int64_t i = 0; i < d->tensors * d->window; i++)
        if (!(d->history[i] >= 0))
            return fail(failure, "%s: amax_history holds %g, which is no magnitude", path, (double)d->history[i]);
    return all_finite(d->scale, d->tensors, true) || fail(failure, "%s: scale holds a value that is not finite", path);
}

// Every rank reads all of it.
static inline bool checkpoint_read_delayed(const char *checkpoint, const TrainerState *s, Failure *failure) {
    DelayedState *d = s->delayed;
    Safetensors st;
    if (!d) return true;
    if (!safetensors_open_folder(&st, checkpoint, "fp8_state", failure)) return false;
    const Safetensor *history = safetensors_require(&st, "amax_history", d->tensors, d->window, failure);
    const Safetensor *scale = history ? safetensors_require(&st, "scale", d->tensors, 0, failure) : NULL;
    const bool ok = scale && safetensors_read(&st, history, 0, d->tensors * d->window, true, d->history, failure) &&
                    safetensors_read(&st, scale, 0, d->tensors, true, d->scale, failure) &&
                    checkpoint_check_history(d, st.files[0].path, failure);
    safetensors_close(&st);
    return ok;
}

// ---- trainer.json, and what else lists the files of a folder with their hashes

// The file of an export that does.
#define EXPORT_HASHES "train_fp8.json"

// Their last lines hold the hash of all bytes before them.
#define CHECKPOINT_SEAL_FORMAT ",\n  \"xxh64\": \"%016llx\"\n}\n"
#define CHECKPOINT_SEAL_BYTES 34

// Appends the list of files and the hash of all this, and writes FOLDER/NAME. Frees *out.
static inline bool checkpoint_write_sealed(const char *folder, const char *name, JsonText *out, const FileList *files,
                                           Failure *failure) {
    json_text_add(out, ",\n  \"files\": [");
    for (int64_t i = 0; i < files->count; i++) {
        const FileRecord *f = &files->records[i];
        json_text_add(out, "%s\n    {\"name\": \"%s\", \"bytes\": %lld, \"xxh64\": \"%016llx\"}", i ? "," : "",
                      f->name, (long long)f->bytes, (unsigned long long)f->hash);
    }
    json_text_add(out, "\n  ]");
    json_text_add(out, CHECKPOINT_SEAL_FORMAT, (unsigned long long)xxhash64(out->data, out->size));
    const bool ok = file_write(folder, name, out->data, (int64_t)out->size, NULL, failure);
    json_text_free(out);
    return ok;
}

static inline bool checkpoint_write_trainer(const char *folder, const TrainerProgress *progress, const CheckpointRun *run,
                                            const FileList *files, Failure *failure) {
    JsonText out = {NULL, 0, 0};
    json_text_add(&out, "{\n  \"format_version\": %d,\n  \"step\": %lld,\n  \"samples\": %lld,\n  \"model\": ", CHECKPOINT_FORMAT_VERSION, (long long)progress->step, (long long)progress->samples);
    json_text_add_string(&out, run->model->name);
    json_text_add(&out, ",\n  \"training_data\": {\"tokens\": %lld, \"shards\": %lld, \"fingerprint\": \"" FINGERPRINT_FORMAT "\"}", (long long)run->data.tokens,
                  (long long)run->data.shards, (unsigned long long)run->data.fingerprint);
    json_text_add(&out, ",\n  \"settings\": {");
    const char *separator = "\n    ";
    for (const OptionRow *row = option_rows(); row->name; row++) {
        if (row->kind == OPTION_GROUP) continue;
        char value[PATH_CAPACITY];
        option_format(run->options, row, value, sizeof value);
        json_text_add(&out, "%s\"%s\": ", separator, row->name);
        json_text_add_string(&out, value);
        separator = ",\n    ";
    }
    json_text_add(&out, "\n  }");
    return checkpoint_write_sealed(folder, "trainer.json", &out, files, failure);
}

static inline bool checkpoint_check_seal(const char *path, const char *text, size_t size, Failure *failure) {
    if (size < CHECKPOINT_SEAL_BYTES) return fail(failure, "%s was cut short", path);
    char seal[CHECKPOINT_SEAL_BYTES + 1];
    const size_t sealed = size - CHECKPOINT_SEAL_BYTES;
    format_checked(seal, sizeof seal, CHECKPOINT_SEAL_FORMAT, (unsigned long long)xxhash64(text, sealed));
    if (memcmp(text + sealed, seal, CHECKPOINT_SEAL_BYTES) != 0) return fail(failure, "%s is damaged: it does not have the hash it ends with", path);
    return true;
}

// Parses FOLDER/NAME if it is undamaged and of a version this program reads. The caller frees *json on success.
static inline bool checkpoint_open_sealed(const char *folder, const char *name, Json *json, Failure *failure) {
    char path[PATH_CAPACITY];
    format_checked(path, sizeof path, "%s/%s", folder, name);
    size_t size;
    char *text = read_file(path, &size);
    if (!text) {
        const int error = errno;
        if (folder_exists(folder)) return fail(failure, "cannot read %s: %s", path, strerror(error));
        return fail(failure, "cannot read %s: %s is %s", path, folder, path_words(folder).text);
    }
    bool ok = checkpoint_check_seal(path, text, size, failure) && json_parse(json, path, text, size, failure);
    free(text);
    if (!ok) return false;
    int64_t version = 0;
    const JsonNode *node = json_require(json, json_root(json), "format_version", JSON_NUMBER, failure);
    ok = node && json_int(json, node, 1, INT32_MAX, &version, failure);
    if (ok && version != CHECKPOINT_FORMAT_VERSION)
        ok = fail(failure, "%s has format version %lld; this program reads version %d", path, (long long)version, CHECKPOINT_FORMAT_VERSION);
    if (!ok) json_free(json);
    return ok;
}

static inline bool checkpoint_open_trainer(const char *checkpoint, Json *json, Failure *failure) {
    return checkpoint_open_sealed(checkpoint, "trainer.json", json, failure);
}

// Checks one entry of "files": the file's size and, if it has at most `largest` bytes, its content.
static inline bool checkpoint_check_file(const char *checkpoint, const Json *json, const JsonNode *entry,
                                         int64_t largest, Failure *failure) {
    const JsonNode *name = json_require(json, entry, "name", JSON_STRING, failure);
    const JsonNode *bytes = name ? json_require(json, entry, "bytes", JSON_NUMBER, failure) : NULL;
    const JsonNode *expected = bytes ? json_require(json, entry, "xxh64", JSON_STRING, failure) : NULL;
    int64_t want = 0, have = 0;
    if (!expected || !json_int(json, bytes, 0, INT64_MAX, &want, failure)) return false;
    if (strchr(name->text, '/')) return json_expected(json, name, "the name of a file in the same folder", failure);
    char path[PATH_CAPACITY], found[32];
    format_checked(path, sizeof path, "%s/%s", checkpoint, name->text);
    if (!file_size(path, &have, failure)) return false;
    if (have != want) return fail(failure, "%s has %lld bytes; it was written with %lld", path, (long long)have, (long long)want);
    if (want > largest) return true;
    uint64_t value = 0;
    if (!file_hash(path, want, &value, failure)) return false;
    format_checked(found, sizeof found, "%016llx", (unsigned long long)value);
    return strcmp(found, expected->text) == 0 || fail(failure, "%s is damaged: its XXH64 is %s; it was written with %s", path, found, expected->text);
}

// The step of a folder name "step-00000123" followed by `suffix`; -1 if it is no such name.
static inline int64_t checkpoint_step_of(const char *name, const char *suffix) {
    if (strncmp(name, "step-", 5) != 0) return -1;
    const char *digits = name + 5;
    const size_t n = strspn(digits, "0123456789");
    if (n < 8 || n > 18 || strcmp(digits + n, suffix) != 0) return -1;
    return strtoll(digits, NULL, 10);
}

// A folder that was renamed would continue another step, and stand before newer ones.
static inline bool checkpoint_check_name(const char *checkpoint, const Json *json, Failure *failure) {
    const char *slash = strrchr(checkpoint, '/');
    const int64_t named = checkpoint_step_of(slash ? slash + 1 : checkpoint, "");
    if (named < 0) return true;
    int64_t step = 0;
    const JsonNode *node = json_require(json, json_root(json), "step", JSON_NUMBER, failure);
    if (!node || !json_int(json, node, 0, INT64_MAX, &step, failure)) return false;
    return step == named || fail(failure, "%s was renamed: it was saved after step %lld; give it the name step-%08lld again", checkpoint, (long long)step, (long long)step);
}

// Whether a checkpoint is whole: it has its own name, and every file that trainer.json lists has its size and, if `hash`, its hash.
static inline bool checkpoint_is_whole(const char *checkpoint, bool hash, Failure *failure) {
    Json json;
    if (!checkpoint_open_trainer(checkpoint, &json, failure)) return false;
    const JsonNode *files = checkpoint_check_name(checkpoint, &json, failure) ? json_require(&json, json_root(&json), "files", JSON_ARRAY, failure) : NULL;
    bool ok = files != NULL;
    for (const JsonNode *entry = ok ? json_first(&json, files) : NULL; ok && entry; entry = json_next(&json, entry))
        ok = checkpoint_check_file(checkpoint, &json, entry, hash ? INT64_MAX : -1, failure);
    json_free(&json);
    return ok;
}

// Compares the files that a start from a folder as MODEL reads with the hashes that this program saved beside them: all
// files of an export, config.json and weights of a checkpoint. A file of more than `largest` bytes is compared by size
// alone. A folder from elsewhere has no hashes and is taken as it is. Fails with the file that differs.
static inline bool model_verify(const char *folder, int64_t largest, Failure *failure) {
    static const char *const lists[] = {"trainer.json", EXPORT_HASHES};
    for (int i = 0; i < 2; i++) {
        char path[PATH_CAPACITY];
        Json json;
        format_checked(path, sizeof path, "%s/%s", folder, lists[i]);
        if (!path_exists(path)) continue;
        if (!checkpoint_open_sealed(folder, lists[i], &json, failure)) return false;
        const JsonNode *files = json_require(&json, json_root(&json), "files", JSON_ARRAY, failure);
        bool ok = files != NULL;
        for (const JsonNode *entry = ok ? json_first(&json, files) : NULL; ok && entry;
             entry = json_next(&json, entry)) {
            const JsonNode *name = json_member(&json, entry, "name");
            const bool state = name && (fnmatch("optimizer*", name->text, 0) == 0 ||
                                        fnmatch("fp8_state*", name->text, 0) == 0);
            if (!state) ok = checkpoint_check_file(folder, &json, entry, largest, failure);
        }
        json_free(&json);
        return ok;
    }
    return true;
}

// ---- the folder of checkpoints

static inline void checkpoint_name(const char *dir, int64_t step, const char *suffix, char *out, size_t capacity) {
    format_checked(out, capacity, "%s/step-%08lld%s", dir, (long long)step, suffix);
}

static inline int checkpoint_compare_steps(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

// Lists the checkpoints in `dir`, whole or not. A folder that does not exist has none.
static inline bool checkpoint_list(const char *dir, CheckpointSteps *list, Failure *failure) {
    memset(list, 0, sizeof *list);
    DIR *d = opendir(dir);
    if (!d) return errno == ENOENT || fail(failure, "cannot open folder %s: %s", dir, strerror(errno));
    for (struct dirent *entry; (entry = readdir(d)) != NULL;) {
        const int64_t step = checkpoint_step_of(entry->d_name, "");
        if (step < 0) continue;
        list->steps = (int64_t *)xrealloc(list->steps, (size_t)(list->count + 1) * sizeof *list->steps);
        list->steps[list->count++] = step;
    }
    closedir(d);
    if (list->count) qsort(list->steps, (size_t)list->count, sizeof *list->steps, checkpoint_compare_steps);
    return true;
}

// True for the name of a checkpoint that is being written or removed: step-NNNNNNNN and something that ends in ".tmp".
static inline bool checkpoint_is_leftover(const char *name) {
    const char *suffix = strchr(name, '.');
    return suffix && checkpoint_step_of(name, suffix) >= 0 && fnmatch("*" FOLDER_TEMPORARY, suffix, 0) == 0;
}

// True if this program may remove a folder: it has the mark. A version that set no mark left a trainer.json with its
// hash: such a folder gets the mark here.
static inline bool checkpoint_is_own(const char *path) {
    struct stat s;
    Json json;
    Failure ignored;
    if (folder_kind(path) != FOLDER_FOREIGN) return true;
    if (lstat(path, &s) || !S_ISDIR(s.st_mode) || !checkpoint_open_trainer(path, &json, &ignored)) return false;
    json_free(&json);
    return folder_mark(path, &ignored);
}

// Removes what interrupted saves and removals left. What cannot be removed stays, with a warning; for what this program
// may not have written only if `tell`.
static inline bool checkpoint_remove_leftovers(const char *dir, bool tell, Failure *failure) {
    DIR *d = opendir(dir);
    if (!d) return fail(failure, "cannot open folder %s: %s", dir, strerror(errno));
    for (struct dirent *entry; (entry = readdir(d)) != NULL;) {
        char path[PATH_CAPACITY];
        Failure cause;
        if (!checkpoint_is_leftover(entry->d_name)) continue;
        format_checked(path, sizeof path, "%s/%s", dir, entry->d_name);
        if ((checkpoint_is_own(path) || tell) && !folder_remove(path, &cause))
            warn("what may be left of an interrupted checkpoint stays: %s", cause.text);
    }
    closedir(d);
    return true;
}

// A name under which step `step` can be written: step-NNNNNNNN.tmp or, where something stands that cannot be removed,
// step-NNNNNNNN.2.tmp and so on.
static inline void checkpoint_temporary(const char *dir, int64_t step, char *path, size_t capacity) {
    Failure ignored;
    char suffix[32] = FOLDER_TEMPORARY;
    for (int64_t n = 2;; n++) {
        checkpoint_name(dir, step, suffix, path, capacity);
        if (!path_exists(path) || folder_remove(path, &ignored)) return;
        format_checked(suffix, sizeof suffix, ".%lld" FOLDER_TEMPORARY, (long long)n);
    }
}

// Before a checkpoint takes a name: what has it and is not this program's, a link for example, becomes NAME.1, or the
// next that is free.
static inline bool checkpoint_make_way(const char *path, Failure *failure) {
    char aside[PATH_CAPACITY];
    int64_t n = 0;
    if (checkpoint_is_own(path)) return true;
    const Words why = folder_foreign_words(path);
    do format_checked(aside, sizeof aside, "%s.%lld", path, (long long)++n);
    while (path_exists(aside));
    if (rename(path, aside)) return fail(failure, "cannot rename %s to %s: %s", path, aside, strerror(errno));
    warn("a checkpoint takes the name %s; what had it is now %s, and stays: %s", path, aside, why.text);
    return true;
}

// Removes a checkpoint of this program. It loses its name first, so that none is ever there in part.
static inline bool checkpoint_remove(const char *dir, int64_t step, Failure *failure) {
    char path[PATH_CAPACITY], temporary[PATH_CAPACITY];
    checkpoint_name(dir, step, "", path, sizeof path);
    checkpoint_temporary(dir, step, temporary, sizeof temporary);
    if (FILE_WORK("rename", path, rename(path, temporary))) return fail(failure, "cannot rename %s to %s: %s", path, temporary, strerror(errno));
    return folder_remove(temporary, failure);
}

static inline bool checkpoint_was_passed_over(const CheckpointSteps *passed_over, int64_t step) {
    for (int64_t i = 0; passed_over && i < passed_over->count; i++)
        if (passed_over->steps[i] == step) return true;
    return false;
}

// An older checkpoint that is due to be removed and is not this program's to remove, a link for example: stays, and the
// run says so once.
static inline void checkpoint_leave(const char *path, int64_t step, CheckpointSteps *passed_over) {
    warn("%s is older than the checkpoints that are kept, and stays: %s", path, folder_foreign_words(path).text);
    if (!passed_over) return;
    passed_over->steps = (int64_t *)xrealloc(passed_over->steps,
                                             (size_t)(passed_over->count + 1) * sizeof *passed_over->steps);
    passed_over->steps[passed_over->count++] = step;
}

// After step `newest` was saved: keeps it and the keep - 1 whole ones before it, removes those older still. A folder that is not whole is
// not counted. One that the run passed over when it was resumed, or of a later step, is left alone.
static inline bool checkpoint_prune(const char *dir, int64_t newest, int64_t keep, CheckpointSteps *passed_over, Failure *failure) {
    CheckpointSteps list;
    Failure ignored;
    for (int64_t i = 0; passed_over && i < passed_over->count; i++)
        if (passed_over->steps[i] == newest) passed_over->steps[i] = -1;  // another is in its place
    if (!checkpoint_list(dir, &list, failure)) return false;
    int64_t kept = 1;
    bool ok = true;
    for (int64_t i = 0; ok && i < list.count; i++) {
        char path[PATH_CAPACITY];
        checkpoint_name(dir, list.steps[i], "", path, sizeof path);
        if (list.steps[i] >= newest || checkpoint_was_passed_over(passed_over, list.steps[i])) continue;
        if (kept < keep) kept += checkpoint_is_whole(path, false, &ignored);
        else if (checkpoint_is_own(path)) ok = checkpoint_remove(dir, list.steps[i], failure);
        else checkpoint_leave(path, list.steps[i], passed_over);
    }
    free(list.steps);
    return ok;
}

// ---- saving

static inline bool checkpoint_write(const char *folder, const TrainerProgress *progress, const CheckpointRun *run,
                                    const ParameterTable *t, const TrainerState *s, int64_t shard_bytes, Failure *failure) {
    const StateKind moments[] = {STATE_EXP_AVG, STATE_EXP_AVG_SQ};
    const bool leader = checkpoint_is_leader(s->comm);
    FileList files = {NULL, 0};
    bool ok = checkpoint_agree(s->comm, !leader || folder_begin(folder, failure), failure) &&
              checkpoint_write_model(folder, run->model, t, s, shard_bytes, &files, failure) &&
              checkpoint_write_tensors(folder, "optimizer", t, s, moments, 2, shard_bytes, &files, failure) &&
              checkpoint_write_delayed(folder, s, &files, failure);
    ok = ok && (!leader || (checkpoint_write_trainer(folder, progress, run, &files, failure) && folder_sync(folder, failure)));
    file_list_free(&files);
    return ok;  // of the last steps rank 0 alone knows
}

// Saves CHECKPOINT_DIR/step-NNNNNNNN as the head of this file says, then removes all but the newest `keep`.
// On failure, on all ranks alike, nothing new stays, the checkpoints before are untouched, and the failure says what
// went wrong.
static inline bool checkpoint_save_sharded(const char *dir, int64_t keep, const TrainerProgress *progress, const CheckpointRun *run,
                                           const ParameterTable *t, const TrainerState *s, int64_t shard_bytes, Failure *failure) {
    char temporary[PATH_CAPACITY] = "", path[PATH_CAPACITY];
    checkpoint_name(dir, progress->step, "", path, sizeof path);
    Failure cause, ignored;
    const bool leader = checkpoint_is_leader(s->comm);
    bool ok = checkpoint_agree(s->comm, !leader || (folder_create(dir, true, &cause) &&
                                                    checkpoint_remove_leftovers(dir, false, &cause)), &cause);
    if (ok && leader) checkpoint_temporary(dir, progress->step, temporary, sizeof temporary);
    if (ok && s->comm) comm_broadcast(s->comm, COMM_WORLD, 0, temporary, sizeof temporary);
    ok = ok && checkpoint_write(temporary, progress, run, t, s, shard_bytes, &cause);
    ok = ok && (!leader || (checkpoint_make_way(path, &cause) && folder_replace(temporary, path, &cause) &&
                            folder_sync(dir, &cause)));
    if (checkpoint_agree(s->comm, ok, &cause)) {
        if (leader && !checkpoint_prune(dir, progress->step, keep, run->passed_over, &cause)) warn("checkpoint %s is saved, but an older one could not be removed: %s", path, cause.text);
        if (s->comm) comm_barrier(s->comm, COMM_WORLD);  // removing may take minutes: the others wait here, not in a kernel of NCCL
        return true;
    }
    if (leader && path_exists(temporary)) folder_remove(temporary, &ignored);
    fail(failure, "saving checkpoint %s failed: %.1500s; earlier checkpoints are untouched", path, cause.text);
    failure->lasting = cause.lasting;
    return false;
}

static inline bool checkpoint_save(const char *dir, int64_t keep, const TrainerProgress *progress, const CheckpointRun *run,
                                   const ParameterTable *t, const TrainerState *s, Failure *failure) {
    return checkpoint_save_sharded(dir, keep, progress, run, t, s, SAFETENSORS_SHARD_BYTES, failure);
}

// Before any work: makes the folder, and finds out now rather than after hours whether it can be written. A run that does not resume must not
// mix its checkpoints with another's: the newest by step would not be the newest by time. Nor may two runs at once: what one is saving is a leftover to
// the other, so the folder is locked to the end of the process. Dies with the reason.
static inline void checkpoint_prepare(const char *dir, bool resume) {
    Failure failure;
    CheckpointSteps list;
    char probe[PATH_CAPACITY];
    if (!folder_create(dir, true, &failure) || !folder_lock(dir, FOLDER_LOCK_SECONDS, &failure) ||
        !checkpoint_remove_leftovers(dir, true, &failure))
        die("--checkpoint-dir %s: %s", dir, failure.text);
    checkpoint_temporary(dir, 0, probe, sizeof probe);
    if (!folder_begin(probe, &failure) || !folder_remove(probe, &failure) || !checkpoint_list(dir, &list, &failure))
        die("--checkpoint-dir %s: %s", dir, failure.text);
    if (list.count && !resume)
        die("--checkpoint-dir %s already holds step-%08lld; add --resume to continue from it, or give another folder", dir, (long long)list.steps[0]);
    free(list.steps);
}

// ---- resuming

// The newest checkpoint in `dir` whose files all have their hashes. Prints which it passes over and why, and what it found. False if there is
// no checkpoint at all: the run starts afresh. Dies if there are some and none is whole, since starting afresh among them is not what anyone wants.
static inline bool checkpoint_find_newest(const char *dir, char *path, size_t capacity) {
    CheckpointSteps list;
    Failure failure;
    bool found = false;
    if (!checkpoint_list(dir, &list, &failure)) die("--resume: %s", failure.text);
    for (int64_t i = 0; i < list.count && !found; i++) {
        checkpoint_name(dir, list.steps[i], "", path, capacity);
        found = checkpoint_is_whole(path, true, &failure);
        if (!found) printf("resume: passed over %s: %s\n", path, failure.text);
    }
    free(list.steps);
    if (found) printf("resume: continuing from %s\n", path);
    else if (list.count) die("--resume: none of the %lld checkpoints in %s is whole; move them away to start afresh", (long long)list.count, dir);
    else printf("resume: no checkpoint in %s, starting from step 0\n", dir);
    return found;
}

// checkpoint_find_newest for all ranks: rank 0 looks, and all get the same answer. `path` is "" where there is none.
static inline bool checkpoint_find_together(const Comm *c, const char *dir, char *path, size_t capacity) {
    path[0] = 0;
    if (c->rank == 0 && !checkpoint_find_newest(dir, path, capacity)) path[0] = 0;
    comm_broadcast(c, COMM_WORLD, 0, path, (int64_t)capacity);
    return *path;
}

// The settings of the checkpoint that may not differ now but do, one a line "--name is A in the checkpoint, B now"; empty if none. A setting that the
// checkpoint lacks did not exist when it was written: that run did what is the default today.
static inline JsonText checkpoint_settings_mismatch(const Json *json, const Options *o) {
    JsonText out = {NULL, 0, 0};
    json_text_add(&out, "%s", "");
    const JsonNode *settings = json_member(json, json_root(json), "settings");
    const JsonNode *precision = settings ? json_member(json, settings, "precision") : NULL;
    Options initial = options_default();
    initial.precision = o->precision;  // which some `auto` stand for; if the checkpoint's is another one, that is a line of its own, and those of FP8 say nothing
    options_resolve(&initial);
    char precision_now[64];
    option_format(o, option_find("precision", strlen("precision")), precision_now, sizeof precision_now);
    const bool other_precision = precision && strcmp(precision->text, precision_now) != 0;
    for (const OptionRow *row = option_rows(); row->name; row++) {
        if (row->kind == OPTION_GROUP || row->match != MUST_MATCH || (other_precision && option_is_fp8(row))) continue;
        char now[PATH_CAPACITY], absent[PATH_CAPACITY];
        option_format(o, row, now, sizeof now);
        option_format(&initial, row, absent, sizeof absent);
        const JsonNode *node = settings ? json_member(json, settings, row->name) : NULL;
        const char *then = node ? node->text : absent;
        if (strcmp(then, now) != 0) json_text_add(&out, "\n  --%s is %s in the checkpoint, %s now", row->name, *then ? then : "\"\"", *now ? now : "\"\"");
    }
    return out;
}

// The same of what --train-data holds: other data would be read from the old cursor on. Its path is free, so that data can be moved. A checkpoint that
// does not say had any.
static inline void checkpoint_data_mismatch(const Json *json, const DataIdentity *now, JsonText *out) {
    const JsonNode *data = json_member(json, json_root(json), "training_data");
    const struct { const char *name; int64_t now; } rows[] = {{"tokens", now->tokens}, {"shards", now->shards}};
    bool same = true;
    for (size_t i = 0; data && i < sizeof rows / sizeof rows[0]; i++) {
        const JsonNode *node = json_member(json, data, rows[i].name);
        int64_t then = rows[i].now;
        Failure ignored;
        if (!node || !json_int(json, node, 0, INT64_MAX, &then, &ignored) || then == rows[i].now) continue;
        json_text_add(out, "\n  --train-data has %lld %s in the checkpoint, %lld now", (long long)then, rows[i].name, (long long)rows[i].now);
        same = false;
    }
    char fingerprint[32];
    const JsonNode *node = data ? json_member(json, data, "fingerprint") : NULL;
    format_checked(fingerprint, sizeof fingerprint, FINGERPRINT_FORMAT, (unsigned long long)now->fingerprint);
    if (same && node && strcmp(node->text, fingerprint) != 0)
        json_text_add(out, "\n  --train-data has as many tokens as in the checkpoint, but other ones, or its shards in another order");
}

// The setting --name of the run that wrote the checkpoint, as text; "" if it has none. Dies if trainer.json cannot be read.
static inline void checkpoint_read_setting(const char *checkpoint, const char *name, char *out, size_t capacity) {
    Json json;
    Failure failure;
    if (!checkpoint_open_trainer(checkpoint, &json, &failure)) die("%s", failure.text);
    const JsonNode *settings = json_member(&json, json_root(&json), "settings"), *node = settings ? json_member(&json, settings, name) : NULL;
    format_checked(out, capacity, "%s", node ? node->text : "");
    json_free(&json);
}

// Appends "\n  NAME is A in the checkpoint, B now" for each number of the model that differs.
static inline JsonText checkpoint_model_mismatch(const ModelConfig *then, const ModelConfig *now) {
    const struct { const char *name; double then, now; } rows[] = {
        {"family (0 Llama, 1 Qwen2, 2 Qwen3)", (double)then->family, (double)now->family},
        {"vocab_size", (double)then->vocab_size, (double)now->vocab_size},
        {"hidden_size", (double)then->hidden_size, (double)now->hidden_size},
        {"intermediate_size", (double)then->intermediate_size, (double)now->intermediate_size},
        {"num_hidden_layers", (double)then->num_layers, (double)now->num_layers},
        {"num_attention_heads", (double)then->num_heads, (double)now->num_heads},
        {"num_key_value_heads", (double)then->num_kv_heads, (double)now->num_kv_heads},
        {"head_dim", (double)then->head_dim, (double)now->head_dim},
        {"tie_word_embeddings", then->tie_word_embeddings ? 1.0 : 0.0, now->tie_word_embeddings ? 1.0 : 0.0},
        {"rms_norm_eps", then->rms_norm_eps, now->rms_norm_eps},
        {"rope_theta", then->rope_theta, now->rope_theta},
        {"rope_scaling.factor", then->rope_scaling.factor, now->rope_scaling.factor},
        {"rope_scaling.low_freq_factor", then->rope_scaling.low_freq_factor, now->rope_scaling.low_freq_factor},
        {"rope_scaling.high_freq_factor", then->rope_scaling.high_freq_factor, now->rope_scaling.high_freq_factor},
        {"rope_scaling.original_max_position_embeddings", (double)then->rope_scaling.original_max_position_embeddings, (double)now->rope_scaling.original_max_position_embeddings}};
    JsonText out = {NULL, 0, 0};
    json_text_add(&out, "%s", "");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].then != rows[i].now) json_text_add(&out, "\n  %s is %.17g in the checkpoint, %.17g now", rows[i].name, rows[i].then, rows[i].now);
    return out;
}

// Reads how far the checkpoint's run had come, and dies unless the model and every MUST_MATCH setting are those of now. Needs no trainer
// state, so it can run before anything is allocated.
static inline TrainerProgress checkpoint_check(const char *checkpoint, const CheckpointRun *run) {
    Failure failure;
    Json json;
    TrainerProgress progress = {0, 0};
    if (!checkpoint_open_trainer(checkpoint, &json, &failure)) die("%s", failure.text);
    const JsonNode *step = json_require(&json, json_root(&json), "step", JSON_NUMBER, &failure);
    const JsonNode *samples = step ? json_require(&json, json_root(&json), "samples", JSON_NUMBER, &failure) : NULL;
    if (!samples || !json_int(&json, step, 0, INT64_MAX, &progress.step, &failure) || !json_int(&json, samples, 0, INT64_MAX, &progress.samples, &failure))
        die("%s", failure.text);
    ModelConfig then;
    hf_config_read(&then, checkpoint);
    JsonText model = checkpoint_model_mismatch(&then, run->model), settings = checkpoint_settings_mismatch(&json, run->options);
    checkpoint_data_mismatch(&json, &run->data, &settings);
    json_free(&json);
    if (model.size) die("cannot resume from %s, a checkpoint of another model:%s", checkpoint, model.data);
    if (settings.size) die("cannot resume from %s with other settings:%s\ngive the checkpoint's values, or start from its weights alone in another --checkpoint-dir, with MODEL %s", checkpoint, settings.data,
                           checkpoint);
    json_text_free(&model);
    json_text_free(&settings);
    return progress;
}

// ---- loading tensors

// Copies what this rank keeps of one array from an opened set, converting to its storage type. Fails for a missing or
// misshapen tensor, and for values that are not finite.
static inline bool checkpoint_read_array(const Safetensors *st, const ParameterTable *t, const TrainerState *s,
                                         StateKind kind, Failure *failure) {
    const bool fp32 = s->is_fp32[kind];
    const int64_t chunk = IO_CHUNK_BYTES / 4;
    int64_t largest = 1;
    for (int64_t i = 0; i < t->count; i++) largest = max_i64(largest, parameter_elements(&t->entries[i]));
    void *buffer = xcalloc((size_t)min_i64(chunk, largest), fp32 ? 4 : 2);
    bool ok = true;
    for (int64_t i = 0; ok && i < t->count; i++) {
        const Parameter *p = &t->entries[i];
        char name[128];
        format_checked(name, sizeof name, "%s%s", state_prefix(kind), p->name);
        const Safetensor *tensor = safetensors_require(st, name, p->rows, p->cols, failure);
        ok = tensor != NULL;
        const ShardRange r = checkpoint_range(t, s, p);
        for (int64_t done = 0; ok && done < r.count; done += chunk) {
            const int64_t n = min_i64(chunk, r.count - done);
            ok = safetensors_read(st, tensor, r.first + done, n, fp32, buffer, failure) &&
                 (all_finite(buffer, n, fp32) ||
                  fail(failure, "%s: %.200s holds a value that is not finite, with which nothing can be trained",
                       st->files[tensor->file].path, name));
            if (ok) s->write(s->context, kind, r.shard + done, n, buffer);
        }
    }
    free(buffer);
    return ok;
}

// A file of a tied model may hold lm_head as well: then the same values, or it is not tied.
static inline bool checkpoint_check_tied(const Safetensors *st, const ParameterTable *t, const Safetensor *lm_head, Failure *failure) {
    const Parameter *embedding = parameter_find(t, "model.embed_tokens.weight");
    const Safetensor *tensor = safetensors_require(st, embedding->name, embedding->rows, embedding->cols, failure);
    const int64_t elements = parameter_elements(embedding), chunk = IO_CHUNK_BYTES / 8;
    if (!tensor || !safetensors_require(st, lm_head->name, embedding->rows, embedding->cols, failure)) return false;
    float *a = (float *)xcalloc((size_t)(2 * chunk), sizeof *a), *b = a + chunk;
    bool ok = true;
    for (int64_t done = 0; ok && done < elements; done += chunk) {
        const int64_t n = min_i64(chunk, elements - done);
        ok = safetensors_read(st, tensor, done, n, true, a, failure) && safetensors_read(st, lm_head, done, n, true, b, failure) &&
             (memcmp(a, b, (size_t)n * sizeof *a) == 0 || fail(failure, "%s: config.json ties lm_head.weight to %.200s, but they differ; with \"tie_word_embeddings\": false both are trained",
                                                               st->files[lm_head->file].path, embedding->name));
    }
    free(a);
    return ok;
}

// Before anything is copied: every tensor of the table is there with its shape, and no other but a tied lm_head (the embedding stands in for it)
// and the RoPE tables that old Llama files carry.
static inline bool checkpoint_check_tensors(const Safetensors *st, const ModelConfig *m, const ParameterTable *t, Failure *failure) {
    for (int64_t i = 0; i < t->count; i++)
        if (!safetensors_require(st, t->entries[i].name, t->entries[i].rows, t->entries[i].cols, failure)) return false;
    const char *const rope_table = ".rotary_emb.inv_freq";
    for (int64_t i = 0; st->count != t->count && i < st->count; i++) {
        const char *name = st->tensors[i].name;
        const size_t n = strlen(name), suffix = strlen(rope_table);
        if (m->tie_word_embeddings && strcmp(name, "lm_head.weight") == 0) {
            if (!checkpoint_check_tied(st, t, &st->tensors[i], failure)) return false;
            continue;
        }
        if (parameter_find(t, name) || (n > suffix && strcmp(name + n - suffix, rope_table) == 0)) continue;
        return fail(failure, "%s: tensor %.200s has no place in a model with this config.json", st->files[st->tensors[i].file].path, name);
    }
    return true;
}

// Whether a model folder has weights to start from.
static inline bool model_has_weights(const char *folder) {
    char path[PATH_CAPACITY];
    format_checked(path, sizeof path, "%s/model.safetensors", folder);
    if (path_exists(path)) return true;
    format_checked(path, sizeof path, "%s/model.safetensors.index.json", folder);
    return path_exists(path);
}

// Whether a folder that model_has_weights denies holds weights after all, in a file that is not read: its name.
static inline bool model_finds_other_weights(const char *folder, char *name, size_t capacity) {
    static const char *const patterns[] = {"*.safetensors", "*.gguf", "*model*.bin", "*weights*.bin", "*model*.pt", "*weights*.pt", "*model*.pth", "consolidated*.pth", NULL};
    DIR *d = opendir(folder);
    if (!d) die("cannot open folder %s: %s", folder, strerror(errno));
    bool found = false;
    for (struct dirent *entry; !found && (entry = readdir(d)) != NULL;) {
        for (const char *const *pattern = patterns; !found && *pattern; pattern++) found = fnmatch(*pattern, entry->d_name, 0) == 0;
        if (found) format_checked(name, capacity, "%s", entry->d_name);
    }
    closedir(d);
    return found;
}

// Dies unless the safetensors of a Hugging Face folder fit the model. Reads headers only: for before anything is allocated.
static inline void model_check_weights(const char *folder, const ModelConfig *m, const ParameterTable *t) {
    Safetensors st;
    Failure failure;
    if (!safetensors_open_folder(&st, folder, "model", &failure) || !checkpoint_check_tensors(&st, m, t, &failure)) die("%s", failure.text);
    safetensors_close(&st);
}

// Loads the weights of any Hugging Face folder into the trainer, converted to its storage type (to bf16: nearest even).
// Fails with file, tensor, expected and found, and where a value is not finite.
static inline bool model_read_weights(const char *folder, const ModelConfig *m, const ParameterTable *t,
                                      const TrainerState *s, Failure *failure) {
    Safetensors st;
    if (!safetensors_open_folder(&st, folder, "model", failure)) return false;
    const bool ok = checkpoint_check_tensors(&st, m, t, failure) &&
                    checkpoint_read_array(&st, t, s, STATE_WEIGHTS, failure);
    safetensors_close(&st);
    return ok;
}

static inline void model_load_weights(const char *folder, const ModelConfig *m, const ParameterTable *t,
                                      const TrainerState *s) {
    Failure failure;
    if (!model_read_weights(folder, m, t, s, &failure)) die("%s", failure.text);
}

// Loads weights, optimizer state and the state of delayed scaling of a checkpoint that passed checkpoint_check. Dies if something does not fit.
static inline void checkpoint_load(const char *checkpoint, const ModelConfig *m, const ParameterTable *t, const TrainerState *s) {
    Safetensors st;
    Failure failure;
    if (!model_read_weights(checkpoint, m, t, s, &failure) ||
        !safetensors_open_folder(&st, checkpoint, "optimizer", &failure) ||
        !checkpoint_read_array(&st, t, s, STATE_EXP_AVG, &failure) ||
        !checkpoint_read_array(&st, t, s, STATE_EXP_AVG_SQ, &failure) ||
        !checkpoint_read_delayed(checkpoint, s, &failure))
        die("cannot resume from %s: %s; move this checkpoint away to resume from the one before it",
            checkpoint, failure.text);
    safetensors_close(&st);
}

#endif
