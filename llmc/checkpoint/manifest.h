// trainer.json, the manifest of a checkpoint: progress, settings, identity of the data, and each file's size and hash.
//
// It is written after all files that it lists. Its last lines hold a hash of all bytes before them. An export has a
// similar list of files, train_fp8.json.
#ifndef LLMC_MANIFEST_H
#define LLMC_MANIFEST_H

#include <float.h>
#include <fnmatch.h>

#include "../base/file_io.h"
#include "../base/json.h"
#include "../config/defaults.h"
#include "../config/hf_config.h"
#include "../config/schedule.h"
#include "../config/weight_bound.h"
#include "../data/dataloader.h"
#include "lineage.h"
#include "tokenizer_files.h"

#define CHECKPOINT_FORMAT_VERSION 1
#define FINGERPRINT_FORMAT "%016llx"

// The progress of a run. A resumed run continues from it.
typedef struct {
    int64_t step;     // optimizer steps done
    int64_t samples;  // sequences seen: the data cursor
    int64_t skipped;  // how many of these steps were skipped; they do not count in AdamW's bias corrections
} TrainerProgress;

// Steps of checkpoints in a folder.
typedef struct {
    int64_t *steps;  // checkpoint_list: highest first
    int64_t count;
} CheckpointSteps;

// A run, as far as checkpoints need to know it. A checkpoint stores the model and options of its run, and a fingerprint
// of its training data. In a resumed run the model, the MUST_MATCH and BRANCHES settings and the training data must be
// equal; in a run that branches, the BRANCHES settings need not.
typedef struct {
    const ModelConfig *model;
    const Options *options;  // with `auto` values resolved
    DataIdentity data;
    // checkpoints that this run never removes: it skipped them when it resumed, or this program may not remove them;
    // may be NULL; not stored
    CheckpointSteps *skipped;
    const TokenizerFiles *tokenizer;  // rank 0 writes them into each checkpoint; NULL: none
    const Lineage *lineage;           // NULL: none
    bool branches;                    // the checkpoint that the run continues from is that of --branch; not stored
    // gets the settings that differ from the checkpoint's, with its values, as members of a JSON object; may be NULL
    JsonText *told;
    int64_t *betas_since;  // AdamW's steps when --beta1 or --beta2 last changed; checkpoint_check sets it; NULL: 0
} CheckpointRun;

// ---- manifests: writing and checking

// File name of an export's manifest.
#define EXPORT_HASHES "train_fp8.json"

// The last lines of a manifest: a hash of all bytes before these lines.
#define CHECKPOINT_SEAL_FORMAT ",\n  \"xxh64\": \"%016llx\"\n}\n"
#define CHECKPOINT_SEAL_BYTES 34
static_assert(sizeof CHECKPOINT_SEAL_FORMAT - sizeof "%016llx" + 16 == CHECKPOINT_SEAL_BYTES,
              "%016llx prints 16 digits");

// Appends the list of files and the hash to *out, writes *out to FOLDER/NAME, and frees *out.
static inline bool checkpoint_write_sealed(const char *folder, const char *name, JsonText *out, const FileList *files,
                                           Failure *failure) {
    json_text_add(out, ",\n  \"files\": [");
    for (int64_t i = 0; i < files->count; i++) {
        const FileRecord *f = &files->records[i];
        json_text_add(out, "%s\n    {\"name\": \"%s\", \"bytes\": %lld, \"xxh64\": \"%016llx\"}", i ? "," : "", f->name,
                      (long long)f->bytes, (unsigned long long)f->hash);
    }
    json_text_add(out, "\n  ]");
    json_text_add(out, CHECKPOINT_SEAL_FORMAT, (unsigned long long)xxhash64(out->data, out->size));
    const bool ok = file_write(folder, name, out->data, (int64_t)out->size, NULL, failure);
    json_text_free(out);
    return ok;
}

// Appends the norms by which the next step clips in the backward pass (STATE_CLIP_NORMS); nothing if there are none.
// Every fp32 number reads back as it was. Fails if one is not finite.
static inline bool checkpoint_add_clip_norms(JsonText *out, const float *norms, int64_t count, Failure *failure) {
    if (!count) return true;
    for (int64_t i = 0; i < count; i++) {
        if (!isfinite(norms[i])) return fail(failure, "a gradient norm of the last step is %g", (double)norms[i]);
        json_text_add(out, "%s%.9g", i ? ", " : ",\n  \"clip_norms\": [", (double)norms[i]);
    }
    json_text_add(out, "]");
    return true;
}

// Reads what checkpoint_add_clip_norms has written. Sets zeros if a checkpoint has no norms: its run did not clip in
// the backward pass. Fails if their number is not `count`, or if one is below zero or too large for fp32.
static inline bool checkpoint_read_clip_norms(const Json *json, float *norms, int64_t count, Failure *failure) {
    const JsonNode *list = json_member(json, json_root(json), "clip_norms");
    memset(norms, 0, (size_t)count * sizeof *norms);
    if (!list) return true;
    if (list->type != JSON_ARRAY) return json_expected(json, list, json_type_name(JSON_ARRAY), failure);
    int64_t found = 0;
    for (const JsonNode *node = json_first(json, list); node; node = json_next(json, node), found++) {
        double norm = 0;
        if (!json_real(json, node, &norm, failure)) return false;
        if (!(norm >= 0 && norm <= FLT_MAX)) return json_expected(json, node, "a gradient norm", failure);
        if (found < count) norms[found] = (float)norm;
    }
    return found == count ||
           fail(failure, "%s has %lld clip_norms instead of %lld", json->source, (long long)found, (long long)count);
}

// Writes trainer.json. clip_norms: [num_clip_norms] STATE_CLIP_NORMS.
static inline bool checkpoint_write_trainer(const char *folder, const TrainerProgress *progress,
                                            const CheckpointRun *run, const float *clip_norms, int64_t num_clip_norms,
                                            const FileList *files, Failure *failure) {
    JsonText out = {NULL, 0, 0};
    json_text_add(&out,
                  "{\n  \"format_version\": %d,\n  \"step\": %lld,\n  \"samples\": %lld,\n  \"skipped\": %lld,\n  "
                  "\"model\": ",
                  CHECKPOINT_FORMAT_VERSION, (long long)progress->step, (long long)progress->samples,
                  (long long)progress->skipped);
    json_text_add_string(&out, run->model->name);
    json_text_add(&out,
                  ",\n  \"training_data\": {\"tokens\": %lld, \"shards\": %lld, \"fingerprint\": \"" FINGERPRINT_FORMAT
                  "\"}",
                  (long long)run->data.tokens, (long long)run->data.shards, (unsigned long long)run->data.fingerprint);
    if (!checkpoint_add_clip_norms(&out, clip_norms, num_clip_norms, failure)) return json_text_free(&out), false;
    if (run->lineage && run->lineage->count) {
        json_text_add(&out, ",\n  \"branches\": ");
        lineage_json(&out, run->lineage);
    }
    if (run->betas_since && *run->betas_since)
        json_text_add(&out, ",\n  \"betas_since\": %lld", (long long)*run->betas_since);
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
    if (size < CHECKPOINT_SEAL_BYTES) return fail(failure, "%s was cut short, or another program wrote it", path);
    char seal[CHECKPOINT_SEAL_BYTES + 1];
    const size_t sealed = size - CHECKPOINT_SEAL_BYTES;
    format_checked(seal, sizeof seal, CHECKPOINT_SEAL_FORMAT, (unsigned long long)xxhash64(text, sealed));
    if (memcmp(text + sealed, seal, CHECKPOINT_SEAL_BYTES) != 0)
        return fail(failure, "%s is damaged, or another program wrote it: it does not end with the hash of its content",
                    path);
    return true;
}

// Parses the manifest FOLDER/NAME. Fails if it cannot be read, is damaged, or is of a version that this program does
// not read. The caller frees *json on success.
static inline bool checkpoint_open_sealed(const char *folder, const char *name, Json *json, Failure *failure) {
    char path[PATH_CAPACITY];
    format_checked(path, sizeof path, "%s/%s", folder, name);
    size_t size;
    char *text = read_file(path, &size);
    if (!text) {
        const char *reason = read_words();
        if (folder_exists(folder)) return fail(failure, "cannot read %s: %s", path, reason);
        return fail(failure, "cannot read %s: %s is %s", path, folder, path_words(folder).text);
    }
    bool ok = checkpoint_check_seal(path, text, size, failure) && json_parse(json, path, text, size, failure);
    free(text);
    if (!ok) return false;
    int64_t version = 0;
    const JsonNode *node = json_require(json, json_root(json), "format_version", JSON_NUMBER, failure);
    ok = node && json_int(json, node, 1, INT32_MAX, &version, failure);
    if (ok && version != CHECKPOINT_FORMAT_VERSION)
        ok = fail(failure, "%s has format version %lld; this program reads version %d", path, (long long)version,
                  CHECKPOINT_FORMAT_VERSION);
    if (!ok) json_free(json);
    return ok;
}

static inline bool checkpoint_open_trainer(const char *checkpoint, Json *json, Failure *failure) {
    return checkpoint_open_sealed(checkpoint, "trainer.json", json, failure);
}

// Checks the file of one entry of "files": its size and, if it has at most `largest` bytes, its hash.
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
    if (have != want) return fail(failure, "%s has %lld bytes instead of %lld", path, (long long)have, (long long)want);
    if (want > largest) return true;
    uint64_t value = 0;
    if (!file_hash(path, want, &value, failure)) return false;
    format_checked(found, sizeof found, "%016llx", (unsigned long long)value);
    return strcmp(found, expected->text) == 0 ||
           fail(failure, "%s is damaged: its XXH64 hash is %s instead of %s", path, found, expected->text);
}

// Returns the step in a folder name "step-00000123", as checkpoint_name writes it, followed by `suffix`; -1 for other
// names.
static inline int64_t checkpoint_step_of(const char *name, const char *suffix) {
    if (strncmp(name, "step-", 5) != 0) return -1;
    const char *digits = name + 5;
    const size_t n = strspn(digits, "0123456789");
    if (n < 8 || n > 18 || (n > 8 && *digits == '0') || strcmp(digits + n, suffix) != 0) return -1;
    return strtoll(digits, NULL, 10);
}

// Fails if the folder's name gives another step than trainer.json: a renamed checkpoint could look newer than it is. A
// name that gives no step is accepted.
static inline bool checkpoint_check_name(const char *checkpoint, const Json *json, Failure *failure) {
    const char *slash = strrchr(checkpoint, '/');
    const int64_t named = checkpoint_step_of(slash ? slash + 1 : checkpoint, "");
    if (named < 0) return true;
    int64_t step = 0;
    const JsonNode *node = json_require(json, json_root(json), "step", JSON_NUMBER, failure);
    if (!node || !json_int(json, node, 0, INT64_MAX, &step, failure)) return false;
    return step == named || fail(failure, "%s has a wrong name: it was saved after step %lld; rename it to step-%08lld",
                                 checkpoint, (long long)step, (long long)step);
}

// True if a checkpoint is whole: its name fits its step, trainer.json is undamaged, and every file that it lists has
// the listed size and, with `hash`, the listed hash. Else `failure` says why not.
static inline bool checkpoint_is_whole(const char *checkpoint, bool hash, Failure *failure) {
    Json json;
    if (!checkpoint_open_trainer(checkpoint, &json, failure)) return false;
    const JsonNode *files = checkpoint_check_name(checkpoint, &json, failure)
                                ? json_require(&json, json_root(&json), "files", JSON_ARRAY, failure)
                                : NULL;
    bool ok = files != NULL;
    for (const JsonNode *entry = ok ? json_first(&json, files) : NULL; ok && entry; entry = json_next(&json, entry))
        ok = checkpoint_check_file(checkpoint, &json, entry, hash ? INT64_MAX : -1, failure);
    json_free(&json);
    return ok;
}

// Checks a folder given as MODEL against the hashes in its manifest: all files of an export, or all files of a
// checkpoint except optimizer* and fp8_state*. For files of more than `largest` bytes it checks only the size. A folder
// without a manifest, such as one of another program, is not checked. On failure, `failure` names the damaged file.
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
            const bool state =
                name && (fnmatch("optimizer*", name->text, 0) == 0 || fnmatch("fp8_state*", name->text, 0) == 0);
            if (!state) ok = checkpoint_check_file(folder, &json, entry, largest, failure);
        }
        json_free(&json);
        return ok;
    }
    return true;
}

// ---- a run against the checkpoint that it continues from

static inline const char *checkpoint_verb(const CheckpointRun *run) { return run->branches ? "branch" : "resume"; }

// True if the checkpoint has a setting of this name, with another value. If it is precision, which has a line of its
// own then, lines about FP8 options would not help.
static inline bool checkpoint_other(const Json *json, const Options *o, const char *name) {
    const JsonNode *node = json_member(json, json_member(json, json_root(json), "settings"), name);
    char now[64];
    option_format(o, option_find(name, strlen(name)), now, sizeof now);
    return node && strcmp(node->text, now) != 0;
}

// Sets run->betas_since. Dies if moments of other betas are too young for recipe tensorwise_bounded. Skipped steps do
// not age them.
static inline void checkpoint_check_betas(const Json *json, const char *checkpoint, const CheckpointRun *run,
                                          const TrainerProgress *progress) {
    const Options *o = run->options;
    const int64_t step = progress->step - progress->skipped;
    const JsonNode *node = json_member(json, json_root(json), "betas_since");
    int64_t since = 0;
    Failure failure;
    if (node && !json_int(json, node, 0, step, &since, &failure)) die("%s", failure.text);
    if (checkpoint_other(json, o, "beta1") || checkpoint_other(json, o, "beta2")) since = step;
    if (run->betas_since) *run->betas_since = since;
    if (!since || !options_recipe(o)->bounded || step - since >= weight_bound_forgets(o)) return;
    die("cannot %s from %s: --beta1 or --beta2 changed %lld steps ago, and until step %lld a step of AdamW may be "
        "larger than --fp8-recipe tensorwise_bounded allows for; use --fp8-recipe tensorwise, or a later checkpoint",
        checkpoint_verb(run), checkpoint, (long long)(step - since),
        (long long)(since + progress->skipped + weight_bound_forgets(o)));
}

// Returns the settings that must be the checkpoint's and differ, one per line "--name is A in the checkpoint, B now";
// empty if none differs. The betas must be equal for recipe tensorwise_bounded. A setting that the checkpoint lacks did
// not exist when the checkpoint was written: that run worked as today's default does. `branches`: BRANCHES settings
// need not be the checkpoint's.
static inline JsonText checkpoint_settings_mismatch(const Json *json, const Options *o, bool branches) {
    JsonText out = {NULL, 0, 0};
    json_text_add(&out, "%s", "");
    const JsonNode *settings = json_member(json, json_root(json), "settings");
    Options initial = options_default();
    initial.precision = o->precision, initial.seed = o->seed;  // defaults of other options depend on these
    options_resolve(&initial);
    const bool other_precision = checkpoint_other(json, o, "precision");
    for (const OptionRow *row = option_rows(); row->name; row++) {
        if (row->match != MUST_MATCH && (branches || row->match != BRANCHES) && !weight_bound_needs(o, row)) continue;
        if (other_precision && option_is_fp8(row)) continue;
        char now[PATH_CAPACITY], absent[PATH_CAPACITY];
        option_format(o, row, now, sizeof now);
        option_format(&initial, row, absent, sizeof absent);
        const JsonNode *node = json_member(json, settings, row->name);
        const char *then = node ? node->text : absent;
        if (strcmp(then, now) != 0)
            json_text_add(&out, "\n  --%s is %s in the checkpoint, %s now%s", row->name, *then ? then : "\"\"",
                          *now ? now : "\"\"", row->match == TOLD ? ", with --fp8-recipe tensorwise_bounded" : "");
    }
    return out;
}

// Prints a line for each setting of this run that changes its steps, may differ from the checkpoint's and does so (TOLD
// and, in a run that branches, BRANCHES), and what that does to the learning rate of the next step. `step`: how many
// steps are done.
static inline void checkpoint_tell_settings(const Json *json, const CheckpointRun *run, int64_t step) {
    const JsonNode *settings = json_member(json, json_root(json), "settings");
    const Options *o = run->options;
    Options then = *o;
    const bool other_precision = checkpoint_other(json, o, "precision");
    for (const OptionRow *row = option_rows(); row->name; row++) {
        const bool may_differ = row->match == TOLD || (row->match == BRANCHES && run->branches);
        const JsonNode *node = may_differ ? json_member(json, settings, row->name) : NULL;
        char now[PATH_CAPACITY];
        if (!node || (other_precision && option_is_fp8(row))) continue;
        option_format(o, row, now, sizeof now);
        if (strcmp(node->text, now) == 0) continue;
        printf("%s: --%s is %s in the checkpoint, %s now\n", checkpoint_verb(run), row->name,
               *node->text ? node->text : "\"\"", *now ? now : "\"\"");
        if (run->told) {
            json_text_add(run->told, "%s\"%s\": ", run->told->size ? ", " : "", row->name);
            json_text_add_string(run->told, node->text);
        }
        if (row->match == TOLD) option_set(&then, row, node->text);
    }
    const double before = schedule_learning_rate(&then, step), after = schedule_learning_rate(o, step);
    if (before != after && step < o->num_steps)
        printf("%s: the learning rate of step %lld is %.3e; the checkpoint's settings give %.3e\n",
               checkpoint_verb(run), (long long)step + 1, after, before);
}

// Appends lines to *out if --`option` holds other data than in the checkpoint: the data cursor would be wrong. The
// path may differ, so that data can be moved. A checkpoint without a data entry matches any data.
static inline void checkpoint_data_mismatch(const Json *json, const char *option, const DataIdentity *now,
                                            JsonText *out) {
    const JsonNode *data = json_member(json, json_root(json), "training_data");
    const struct {
        const char *name;
        int64_t now;
    } rows[] = {{"tokens", now->tokens}, {"shards", now->shards}};
    bool same = true;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const JsonNode *node = json_member(json, data, rows[i].name);
        int64_t then = rows[i].now;
        Failure ignored;
        if (!node || !json_int(json, node, 0, INT64_MAX, &then, &ignored) || then == rows[i].now) continue;
        json_text_add(out, "\n  --%s has %lld %s in the checkpoint, %lld now", option, (long long)then, rows[i].name,
                      (long long)rows[i].now);
        same = false;
    }
    char fingerprint[32];
    const JsonNode *node = json_member(json, data, "fingerprint");
    format_checked(fingerprint, sizeof fingerprint, FINGERPRINT_FORMAT, (unsigned long long)now->fingerprint);
    if (same && node && strcmp(node->text, fingerprint) != 0)
        json_text_add(out,
                      "\n  --%s has as many tokens as in the checkpoint, but its shards differ or have another order",
                      option);
}

// Reads setting `name` of the run that wrote the checkpoint, as text; "" if the checkpoint lacks it. Dies if
// trainer.json cannot be read.
static inline void checkpoint_read_setting(const char *checkpoint, const char *name, char *out, size_t capacity) {
    Json json;
    Failure failure;
    if (!checkpoint_open_trainer(checkpoint, &json, &failure)) die("%s", failure.text);
    const JsonNode *node = json_member(&json, json_member(&json, json_root(&json), "settings"), name);
    format_checked(out, capacity, "%s", node ? node->text : "");
    json_free(&json);
}

// Takes the learning rate, and what goes with it, from the checkpoint, where the command line leaves it open. A setting
// that the checkpoint lacks did not exist yet: that run worked as its default does.
static inline void checkpoint_take_rate(const char *checkpoint, Options *o) {
    Options given = options_default();
    given.argc = o->argc, given.argv = o->argv;
    for (const char *const *name = defaults_names(); *name; name++) {
        char value[64];
        const OptionRow *row = option_find(*name, strlen(*name));
        if (!defaults_choose(&given, *name)) continue;
        checkpoint_read_setting(checkpoint, *name, value, sizeof value);
        if (!*value) option_format(&given, row, value, sizeof value);
        option_set(o, row, value);
    }
}

// True if a run that branches may take over the checkpoint's state of delayed scaling: that holds amaxes and scales of
// the same casts.
static inline bool checkpoint_has_scales(const char *checkpoint, const Options *o) {
    static const char *const names[] = {"precision",  "fp8-recipe",       "fp8-format",
                                        "fp8-filter", "fp8-amax-history", "fp8-margin"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char then[PATH_CAPACITY], now[PATH_CAPACITY];
        checkpoint_read_setting(checkpoint, names[i], then, sizeof then);
        option_format(o, option_find(names[i], strlen(names[i])), now, sizeof now);
        if (strcmp(then, now) != 0) return false;
    }
    return true;
}

// Reads the lineage of the checkpoint's run. A run that branches gets the stretch that ends in the checkpoint too. Dies
// if trainer.json cannot be read. `step`: the checkpoint's.
static inline void checkpoint_read_lineage(const char *checkpoint, int64_t step, bool branches, Lineage *out) {
    Json json;
    Failure failure;
    char seed[64];
    if (!checkpoint_open_trainer(checkpoint, &json, &failure) || !lineage_read(&json, out, &failure))
        die("%s", failure.text);
    json_free(&json);
    if (!branches) return;
    Stretch s = {};
    s.step = step;
    checkpoint_read_setting(checkpoint, "precision", s.precision, sizeof s.precision);
    if (strcmp(s.precision, "fp8") == 0) checkpoint_read_setting(checkpoint, "fp8-recipe", s.recipe, sizeof s.recipe);
    checkpoint_read_setting(checkpoint, "rounding-seed", seed, sizeof seed);
    if (!*seed) checkpoint_read_setting(checkpoint, "seed", seed, sizeof seed);
    s.rounding_seed = strtoll(seed, NULL, 10);
    lineage_add(out, &s);
}

// Returns a line "\n  NAME is A in the checkpoint, B now" for each number of the model that must be equal and is not;
// empty if there is none.
static inline JsonText checkpoint_model_mismatch(const ModelConfig *then, const ModelConfig *now) {
    const struct {
        const char *name;
        double then, now;
    } rows[] = {
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
        {"rope_scaling.original_max_position_embeddings", (double)then->rope_scaling.original_max_position_embeddings,
         (double)now->rope_scaling.original_max_position_embeddings}};
    JsonText out = {NULL, 0, 0};
    json_text_add(&out, "%s", "");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].then != rows[i].now)
            json_text_add(&out, "\n  %s is %.17g in the checkpoint, %.17g now", rows[i].name, rows[i].then,
                          rows[i].now);
    return out;
}

// Returns the progress of the checkpoint's run; one without "skipped" counted skipped steps like others. Dies if the
// model, a setting that must match or the training data differs, or if trainer.json or config.json cannot be read.
// Needs no trainer state, so it can run before anything is allocated. Says which other settings differ.
static inline TrainerProgress checkpoint_check(const char *checkpoint, const CheckpointRun *run) {
    Failure failure;
    Json json;
    TrainerProgress progress = {0, 0, 0};
    if (!checkpoint_open_trainer(checkpoint, &json, &failure)) die("%s", failure.text);
    const JsonNode *step = json_require(&json, json_root(&json), "step", JSON_NUMBER, &failure);
    const JsonNode *samples = step ? json_require(&json, json_root(&json), "samples", JSON_NUMBER, &failure) : NULL;
    const JsonNode *skipped = json_member(&json, json_root(&json), "skipped");
    if (!samples || !json_int(&json, step, 0, INT64_MAX, &progress.step, &failure) ||
        !json_int(&json, samples, 0, INT64_MAX, &progress.samples, &failure) ||
        (skipped && !json_int(&json, skipped, 0, progress.step, &progress.skipped, &failure)))
        die("%s", failure.text);
    ModelConfig then;
    hf_config_read(&then, checkpoint);
    free(then.source);
    const char *data = *run->options->mix ? "mix" : "train-data";
    JsonText model = checkpoint_model_mismatch(&then, run->model),
             settings = checkpoint_settings_mismatch(&json, run->options, run->branches);
    checkpoint_data_mismatch(&json, data, &run->data, &settings);
    if (!model.size && !settings.size) {
        checkpoint_check_betas(&json, checkpoint, run, &progress);
        checkpoint_tell_settings(&json, run, progress.step);
    }
    if (model.size)
        die("cannot %s from %s: it is a checkpoint of another model:%s", checkpoint_verb(run), checkpoint, model.data);
    if (settings.size) {
        JsonText still = checkpoint_settings_mismatch(&json, run->options, true);
        checkpoint_data_mismatch(&json, data, &run->data, &still);
        die("cannot %s from %s with other settings:%s\nuse the checkpoint's settings, or %s %s and another "
            "--checkpoint-dir",
            checkpoint_verb(run), checkpoint, settings.data,
            still.size ? "start a new run from its weights, with MODEL" : "go on with these settings by --branch",
            checkpoint);
    }
    json_free(&json);
    json_text_free(&model);
    json_text_free(&settings);
    return progress;
}

#endif
