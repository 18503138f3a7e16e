// The first steps of both trainers: which model, which data, which vocabulary; all input is checked here, before any
// work.
#ifndef LLMC_RUN_SETUP_H
#define LLMC_RUN_SETUP_H

#include "../config/hf_config.h"
#include "../checkpoint/hf_export.h"
#include "../checkpoint/store.h"
#include "logger.h"
#include "../config/options.h"
#include "../data/tokenizer.h"

#define VOCABULARY_MULTIPLE 64

// Files of MODEL's folder up to this size are checked by every rank before they are read, larger ones by one rank of
// each host.
#define SMALL_FILE_BYTES ((int64_t)1 << 20)

// Models pad their vocabularies by fewer rows than this (Qwen 2.5 and 3: by up to 395).
#define VOCABULARY_PADDING 1024

// Bytes hashed of each file of a model's weights: its header and the first tensor's beginning.
#define WEIGHTS_FINGERPRINT_BYTES (1 << 20)

typedef struct {
    ModelConfig model;
    bool continues;  // --resume finds checkpoints: the run goes on from the newest, whatever MODEL's folder holds
    const char *model_folder;  // NULL: a preset
    bool load_weights;         // the folder has weights to start from
    DataLoader train, val;     // not opened (num_shards 0): dry run of a model whose vocabulary is known; no --val-data
    DataIdentity data;         // of train
    char checkpoint[PATH_CAPACITY];  // to continue from; "": none
    TrainerProgress start;           // of that checkpoint, or 0
    CheckpointSteps passed_over;     // later ones, which are damaged; and older ones that may not be removed
    int64_t saved_step;              // the last one of which there is a checkpoint; 0: none
    bool save_failed;                // the last one that was tried, and why
    Failure save_failure;
    bool filter_decided;    // --fp8-filter was auto, and the options now hold fp8_filter
    char fp8_filter[1024];  // what auto stands for
    Tokenizer tokenizer;    // count 0: none beside the shards
} RunSetup;

// Whether --resume finds checkpoints, whole or not.
static inline bool run_setup_continues(const Options *o) {
    CheckpointSteps list = {NULL, 0};
    Failure failure;
    if (!o->resume || !folder_exists(o->checkpoint_dir)) return false;
    if (!checkpoint_list(o->checkpoint_dir, &list, &failure)) die("--resume: %s", failure.text);
    free(list.steps);
    return list.count > 0;
}

__attribute__((noreturn)) static inline void run_setup_die_damaged(const Options *o, const Failure *failure) {
    die("MODEL %s: %s. Copy it again, or give --no-verify to start from it as it is", o->model, failure->text);
}

// The large files of MODEL's folder against the hashes saved with them, by one rank of each host; all learn the answer.
// Dies where one is damaged.
static inline void run_setup_verify_weights(const RunSetup *s, const Options *o, const Comm *c) {
    Failure failure;
    if (!s->load_weights || s->continues || o->no_verify) return;
    const bool ok = c->local_rank > 0 || model_verify(s->model_folder, INT64_MAX, &failure);
    if (!checkpoint_agree(c, ok, &failure)) run_setup_die_damaged(o, &failure);
}

static inline void run_setup_model(RunSetup *s, const Options *o) {
    char presets[1024];
    if (model_config_preset(&s->model, o->model)) return;
    model_config_preset_names(presets, sizeof presets);
    if (!folder_exists(o->model))
        die_with(EXIT_USAGE, "MODEL \"%s\" is neither a folder nor one of: %s", o->model, presets);
    Failure failure;
    const bool verify = !s->continues && !o->no_verify;
    if (verify && !model_verify(o->model, SMALL_FILE_BYTES, &failure)) run_setup_die_damaged(o, &failure);
    hf_config_read(&s->model, o->model);
    s->model_folder = o->model;
    s->load_weights = model_has_weights(o->model);
    char name[PATH_CAPACITY];
    if (!s->load_weights && !s->continues && model_finds_other_weights(o->model, name, sizeof name))
        die("MODEL %s holds %s, but weights are read from model.safetensors or the files that "
            "model.safetensors.index.json names; give them these names or convert them "
            "(save_pretrained of transformers writes them so), or give a folder with config.json alone to start from "
            "random weights",
            o->model, name);
}

// Dies if the table beside one of the shards is not that of the first training shard: an id would mean another text in
// each.
static inline void run_setup_check_tables(const RunSetup *s, const DataLoader *dl) {
    char first[PATH_CAPACITY], path[PATH_CAPACITY], known[PATH_CAPACITY];
    tokenizer_path(first, sizeof first, s->train.shards[0].path);
    format_checked(known, sizeof known, "%s", first);
    for (int64_t i = 0; i < dl->num_shards; i++) {
        tokenizer_path(path, sizeof path, dl->shards[i].path);
        if (strcmp(path, known) == 0) continue;  // shards of one name share a table
        Tokenizer tok = tokenizer_open(path);
        if (tok.count && !tokenizer_same(&tok, &s->tokenizer))
            die("%s belongs to the tokenizer table %s (%lld tokens, separator %lld), but the first training shard to "
                "%s (%lld tokens, separator %lld), which differs; "
                "use shards made with one tokenizer",
                dl->shards[i].path, path, (long long)tok.count, (long long)tok.separator, first,
                (long long)s->tokenizer.count, (long long)s->tokenizer.separator);
        tokenizer_close(&tok);
        format_checked(known, sizeof known, "%s", path);
    }
}

// Appends a name and a value to a description of the run, which run_setup_compare compares: each ends in a zero byte.
static inline void run_setup_describe(JsonText *text, const char *name, const char *value) {
    json_text_add(text, "%s%c%s%c", name, 0, value, 0);
}

// The first pair in which two descriptions differ, in words.
static inline void run_setup_difference(const char *here, const char *here_end, const char *first,
                                        const char *first_end, char *out, size_t capacity) {
    for (const char *a = here, *b = first; a < here_end && b < first_end;) {
        const char *value_a = a + strlen(a) + 1, *value_b = b + strlen(b) + 1;
        if (strcmp(a, b) != 0) break;
        if (strcmp(value_a, value_b) != 0) {
            format_checked(out, capacity, "%s is %.1000s here, %.1000s on rank 0", a, *value_a ? value_a : "not given",
                           *value_b ? value_b : "not given");
            return;
        }
        a = value_a + strlen(value_a) + 1, b = value_b + strlen(value_b) + 1;
    }
    format_checked(out, capacity, "the program knows other settings here than on rank 0");
}

// Dies, at once and on the first such rank alone, if a rank's description differs from rank 0's, with the first
// difference and `fix`. All ranks call; frees.
static inline void run_setup_compare(const Comm *c, JsonText *mine, const char *fix) {
    int64_t size = (int64_t)mine->size;
    comm_broadcast(c, COMM_WORLD, 0, &size, sizeof size);
    char *first = (char *)xcalloc((size_t)size, 1), difference[2200];
    if (c->rank == 0) memcpy(first, mine->data, mine->size);
    comm_broadcast(c, COMM_WORLD, 0, first, size);
    const bool same = size == (int64_t)mine->size && memcmp(first, mine->data, mine->size) == 0;
    const double other = comm_min(c, COMM_WORLD, (double)(same ? c->world : c->rank));
    if (other == (double)c->rank) {
        die_hook()->before = NULL;  // no rank says it before this one
        run_setup_difference(mine->data, mine->data + mine->size, first, first + size, difference, sizeof difference);
        die_with(EXIT_USAGE, "%s; %s", difference, fix);
    }
    if (other < (double)c->world) comm_barrier(c, COMM_WORLD);  // until that rank has ended all
    free(first);
    json_text_free(mine);
}

// Checks that all ranks run the same program with the same options, which decide what they send each other: must come
// before anything that is sent. Folders of data may be others, as long as the data are the same: run_setup_same_data.
// Dies on a rank that differs from rank 0. All ranks call.
static inline void run_setup_same_options(const Comm *c, const Options *o, const char *program) {
    JsonText text = {NULL, 0, 0};
    run_setup_describe(&text, "the program", program);
    run_setup_describe(&text, "its version", TRAINER_VERSION);
    run_setup_describe(&text, "MODEL", o->model);
    for (const OptionRow *row = option_rows(); row->name; row++) {
        char name[64], value[PATH_CAPACITY];
        if (row->kind == OPTION_GROUP) continue;
        format_checked(name, sizeof name, "--%s", row->name);
        option_format(o, row, value, sizeof value);
        if (*value && (row->field == offsetof(Options, train_data) || row->field == offsetof(Options, val_data)))
            format_checked(value, sizeof value, "given");
        run_setup_describe(&text, name, value);
    }
    run_setup_compare(c, &text, "start all ranks with the same program, model and options");
}

// Tells the weights of a model's folder from others, by the sizes and first bytes of their files.
static inline void run_setup_describe_weights(JsonText *text, const char *folder) {
    Safetensors st;
    Failure failure;
    if (!safetensors_open_folder(&st, folder, "model", &failure)) die("%s", failure.text);
    for (int i = 0; i < st.num_files; i++) {
        char name[64], value[96];
        uint64_t hash = 0;
        if (!file_hash(st.files[i].path, min_i64(st.files[i].bytes, WEIGHTS_FINGERPRINT_BYTES), &hash, &failure))
            die("%s", failure.text);
        format_checked(name, sizeof name, "file %d of MODEL's weights", i + 1);
        format_checked(value, sizeof value, "%lld bytes with fingerprint %016llx", (long long)st.files[i].bytes,
                       (unsigned long long)hash);
        run_setup_describe(text, name, value);
    }
    safetensors_close(&st);
}

// Checks that all ranks have read the same model: each reads it from its own host's disk. Dies on a rank that differs
// from rank 0. All ranks call.
static inline void run_setup_same_model(const RunSetup *s, const Comm *c, bool from_weights) {
    if (c->world == 1) return;
    JsonText text = {NULL, 0, 0}, config = hf_config_text(&s->model, "");
    Json json;
    Failure failure;
    if (!json_parse(&json, "config.json", config.data, config.size, &failure)) die("%s", failure.text);
    for (int64_t i = 0; i < json.count; i++) {
        char path[128], name[256];
        if (json.nodes[i].type == JSON_ARRAY || json.nodes[i].type == JSON_OBJECT) continue;
        json_path(&json, &json.nodes[i], path, sizeof path);
        format_checked(name, sizeof name, "MODEL's %s", path);
        run_setup_describe(&text, name, json.nodes[i].text);
    }
    run_setup_describe(&text, "what MODEL's folder holds", from_weights ? "weights" : "no weights");
    if (from_weights) run_setup_describe_weights(&text, s->model_folder);
    json_free(&json);
    json_text_free(&config);
    run_setup_compare(c, &text, "give all hosts the same model");
}

// Each rank reads its own part of the data, on each host from its own disks maybe: dies on a rank whose `data` is other
// than rank 0's. All ranks call.
static inline void run_setup_same_data(const DataLoader *data, const char *option, const DataIdentity *mine,
                                       const Comm *c) {
    DataIdentity first = *mine;
    comm_broadcast(c, COMM_WORLD, 0, &first, sizeof first);
    if (memcmp(&first, mine, sizeof first) != 0)
        die("%s: here %s has %lld tokens in %lld shards, for rank 0 %lld in %lld, %s; give all hosts the same files",
            data->shards[0].path, option, (long long)mine->tokens, (long long)mine->shards, (long long)first.tokens,
            (long long)first.shards,
            mine->tokens == first.tokens ? "but other ones or in another order" : "so ranks would read other samples");
}

// Opens the shards, and the tokenizer table beside the first.
static inline void run_setup_data(RunSetup *s, const Options *o, const Comm *c) {
    s->train = dataloader_open(o->train_data, o->sequence_length, o->shuffle == ON, (uint64_t)o->seed);
    s->data = dataloader_identity(&s->train);
    run_setup_same_data(&s->train, "--train-data", &s->data, c);
    if (*o->val_data) {
        s->val = dataloader_open(o->val_data, o->sequence_length, false, (uint64_t)o->seed);
        const DataIdentity validation = dataloader_identity(&s->val);
        run_setup_same_data(&s->val, "--val-data", &validation, c);
    }
    s->tokenizer = tokenizer_open_beside(s->train.shards[0].path);
    if (!s->tokenizer.count) return;
    run_setup_check_tables(s, &s->train);
    run_setup_check_tables(s, &s->val);
}

// The largest id of all shards; dies if no vocabulary has as many.
static inline int64_t run_setup_largest_token(DataLoader *dl) {
    const int64_t largest = dataloader_max_token(dl);
    if (largest < VOCABULARY_LARGEST) return largest;
    const TokenPlace place = dataloader_scan(dl, VOCABULARY_LARGEST);
    die("%s: token %lld has id %lld, but a vocabulary has at most %d; make the shard again",
        dl->shards[place.shard].path, (long long)place.position, (long long)place.token, VOCABULARY_LARGEST);
}

// The presets tiny and small take their vocabulary from the data.
static inline void run_setup_vocabulary(RunSetup *s) {
    if (s->model.vocab_size == 0)
        s->model.vocab_size = round_up(s->tokenizer.count ? s->tokenizer.count : run_setup_largest_token(&s->train) + 1,
                                       VOCABULARY_MULTIPLE);
    model_config_check(&s->model);
    s->train.vocabulary = s->val.vocabulary = s->model.vocab_size;
    if (s->tokenizer.count && s->tokenizer.separator >= s->model.vocab_size)
        die("the separator of the shard's tokenizer is token %lld, but the model's vocabulary is %lld; use a shard "
            "made with the model's own tokenizer",
            (long long)s->tokenizer.separator, (long long)s->model.vocab_size);
}

static inline void run_setup_warn_of_length(const RunSetup *s, const Options *o) {
    if (o->sequence_length > s->model.max_position_embeddings)
        warn("--sequence-length %lld is more than the %lld positions that model %s is made for "
             "(max_position_embeddings)",
             (long long)o->sequence_length, (long long)s->model.max_position_embeddings, s->model.name);
}

// Ids of a smaller vocabulary are all valid in a larger one, so a shard made for another model passes the check of ids;
// its table tells.
static inline void run_setup_warn_of_tokenizer(const RunSetup *s) {
    if (s->tokenizer.count && s->model.vocab_size - s->tokenizer.count >= VOCABULARY_PADDING)
        warn(
            "the shard's tokenizer has %lld tokens, the model's vocabulary %lld: was the shard made for another model?",
            (long long)s->tokenizer.count, (long long)s->model.vocab_size);
}

// The folder of an export is replaced as a whole at the end, by way of others of its name: nothing else of the run may
// be in them.
static inline void run_setup_check_export(const Options *o) {
    const char *const written[][2] = {{"log-dir", o->log_dir}, {"checkpoint-dir", o->checkpoint_dir}};
    static const char *const suffixes[] = {"", FOLDER_TEMPORARY, FOLDER_ASIDE};
    char path[PATH_CAPACITY], folder[PATH_CAPACITY], other[PATH_CAPACITY];
    path_resolve(o->export_hf, path, sizeof path);
    for (size_t i = 0; i < sizeof written / sizeof written[0]; i++) {
        if (!*written[i][1]) continue;
        path_resolve(written[i][1], other, sizeof other);
        for (int k = 0; k < 3; k++) {
            format_checked(folder, sizeof folder, "%s%s", path, suffixes[k]);
            if (path_within(other, folder))
                die_with(EXIT_USAGE,
                         "--%s %s is in --export-hf %s%s, which holds the export alone; give folders "
                         "beside each other",
                         written[i][0], written[i][1], o->export_hf, suffixes[k]);
        }
    }
}

// Says over how much of the validation data each validation takes its mean.
static inline void run_setup_print_validation(const RunSetup *s, const Options *o) {
    printf("validation: the first %lld of %lld sequences\n", (long long)min_i64(o->val_steps, s->val.num_sequences),
           (long long)s->val.num_sequences);
}

// Says what the first step starts from. When it is a checkpoint, checkpoint_find_newest says so.
static inline void run_setup_print_start(const RunSetup *s, const Options *o) {
    if (s->continues) return;
    if (s->load_weights) printf("starting weights: those of %s\n", s->model_folder);
    else
        printf("starting weights: random, by --seed %lld%s%s%s\n", (long long)o->seed, s->model_folder ? " (" : "",
               s->model_folder ? s->model_folder : "", s->model_folder ? " holds none)" : "");
}

// Dies if the trainer cannot run the model with these options, on so many ranks to a copy of the model.
typedef void (*CheckSupported)(const ModelConfig *m, const Options *o, int64_t shard_size);

// Opens and checks everything the options name, by every rank; one of each host reads all data once, rank 0 tries the
// folders that will be written. Dies with the reason and a fix. Resolves `auto` in the options, and drops --log-dir on
// the other ranks: rank 0 writes the log.
static inline RunSetup run_setup(Options *o, const Comm *c, CheckSupported check_supported) {
    RunSetup s;
    char message[512];
    memset(&s, 0, sizeof s);
    if (*options_conflict(o, message, sizeof message)) die_with(EXIT_USAGE, "%s", message);
    options_resolve(o);
    if (c->rank > 0) o->log_dir = "";
    const int64_t shard_size = options_shard_group(o, o->world_size ? o->world_size : c->world);
    s.continues = run_setup_continues(o);
    run_setup_model(&s, o);
    run_setup_same_model(&s, c, s.load_weights && !o->resume && !o->dry_run);
    if (!o->dry_run || s.model.vocab_size == 0) run_setup_data(&s, o, c);
    run_setup_vocabulary(&s);
    check_supported(&s.model, o, shard_size);
    if (c->rank == 0) run_setup_warn_of_length(&s, o);
    if (o->dry_run) return s;
    if (c->rank == 0) run_setup_warn_of_tokenizer(&s);
    if (c->local_rank == 0) dataloader_check_vocabulary(&s.train, s.model.vocab_size);
    if (c->local_rank == 0 && *o->val_data) dataloader_check_vocabulary(&s.val, s.model.vocab_size);
    if (s.load_weights) {
        ParameterTable t = parameter_table(&s.model);
        model_check_weights(s.model_folder, &s.model, &t);
        parameter_table_free(&t);
    }
    if (c->rank == 0 && *o->export_hf) run_setup_check_export(o);
    if (c->rank == 0 && *o->log_dir) logger_prepare(o->log_dir);
    if (c->rank == 0 && *o->checkpoint_dir) checkpoint_prepare(o->checkpoint_dir, o->resume);
    if (c->rank == 0 && *o->export_hf) model_export_prepare(o->export_hf, s.model_folder);
    run_setup_verify_weights(&s, o, c);
    if (*o->val_data) run_setup_print_validation(&s, o);
    if (c->rank == 0) run_setup_print_start(&s, o);
    comm_barrier(c, COMM_WORLD);
    return s;
}

// What checkpoints say of the run. It points into both.
static inline CheckpointRun run_setup_checkpoint(RunSetup *s, const Options *o) {
    const CheckpointRun run = {&s->model, o, s->data, &s->passed_over};
    return run;
}

// --fp8-filter auto becomes s->fp8_filter.
static inline void run_setup_decide_filter(RunSetup *s, Options *o) {
    o->fp8_filter = s->fp8_filter;
    s->filter_decided = true;
}

// With --resume, after run_setup: finds the checkpoint to continue from and dies unless it is of such a run.
// --fp8-filter auto becomes what that run found. All ranks call.
static inline void run_setup_resume(RunSetup *s, Options *o, const Comm *c) {
    if (!o->resume || !checkpoint_find_together(c, o->checkpoint_dir, s->checkpoint, sizeof s->checkpoint)) return;
    if (strcmp(o->fp8_filter, "auto") == 0) {
        checkpoint_read_setting(s->checkpoint, "fp8-filter", s->fp8_filter, sizeof s->fp8_filter);
        run_setup_decide_filter(s, o);
    }
    const CheckpointRun run = run_setup_checkpoint(s, o);
    s->start = checkpoint_check(s->checkpoint, &run);
    s->saved_step = s->start.step;
    Failure failure;
    if (!checkpoint_list(o->checkpoint_dir, &s->passed_over, &failure)) die("--resume: %s", failure.text);
    while (s->passed_over.count && s->passed_over.steps[s->passed_over.count - 1] <= s->start.step)
        s->passed_over.count--;
    if (s->start.step >= o->num_steps)
        printf("resume: %lld steps are done and --num-steps is %lld: nothing is left to train\n",
               (long long)s->start.step, (long long)o->num_steps);
}

// Bytes of a checkpoint's tensors: weights and both moments. Its other files are small beside them.
static inline int64_t run_setup_checkpoint_bytes(const ParameterTable *t, const Options *o) {
    return t->num_parameters * (storage_bytes(o->master_weights) + 2 * storage_bytes(o->optimizer_state));
}

// Whether there is room for the first checkpoint to come and for the export, beside all that is there: a full disk
// would show after the work. After run_setup_resume. Dies, on rank 0, with what is missing.
static inline void run_setup_check_room(const RunSetup *s, const Options *o, const Comm *c) {
    if (c->rank > 0) return;
    const double GiB = 1024.0 * 1024 * 1024;
    ParameterTable t = parameter_table(&s->model);
    const int64_t checkpoint =
                      *o->checkpoint_dir && s->start.step < o->num_steps ? run_setup_checkpoint_bytes(&t, o) : 0,
                  weights = t.num_parameters * storage_bytes(o->master_weights);
    parameter_table_free(&t);
    char path[PATH_CAPACITY], temporary[PATH_CAPACITY], parent[PATH_CAPACITY];
    const int digits = weights < (1 << 30) ? 4 : 1;
    int64_t room;
    Failure failure;
    if (checkpoint && folder_room(o->checkpoint_dir, &room, &failure) && room < checkpoint)
        die("--checkpoint-dir %s: a checkpoint of this model takes %.*f GiB, and %.*f are free there; make room or "
            "give a folder on a larger disk",
            o->checkpoint_dir, digits, (double)checkpoint / GiB, digits, (double)room / GiB);
    if (!*o->export_hf) return;
    export_names(o->export_hf, path, temporary, parent, sizeof path);
    const int64_t before = checkpoint && folders_share_room(parent, o->checkpoint_dir) ? checkpoint : 0;
    if (folder_room(parent, &room, &failure) && room < before + weights)
        die("--export-hf %s: the weights take %.*f GiB%s, and %.*f are free there; make room or give a folder on a "
            "larger disk",
            o->export_hf, digits, (double)weights / GiB, before ? " beside a checkpoint" : "", digits,
            (double)room / GiB);
}

static inline void run_setup_close(RunSetup *s) {
    free(s->passed_over.steps);
    dataloader_close(&s->train);
    dataloader_close(&s->val);
    tokenizer_close(&s->tokenizer);
}

#endif
