// Sets up a run of either trainer: its model, data and vocabulary. Checks the input before any work.
#ifndef LLMC_RUN_SETUP_H
#define LLMC_RUN_SETUP_H

#include "../config/hf_config.h"
#include "../checkpoint/hf_export.h"
#include "logger.h"
#include "../config/supported.h"
#include "separator.h"
#include "use.h"

#define VOCABULARY_MULTIPLE 64

// Where hashes of MODEL's folder are checked, every rank checks files up to this size before it reads them
// (run_setup_model). One rank of each host checks larger files too (run_setup_verify_weights).
#define SMALL_FILE_BYTES ((int64_t)1 << 20)

// A model's vocabulary may have padding: rows that stand for no token. As many such rows as this, or more, give a
// warning.
#define VOCABULARY_PADDING 1024

// Bytes hashed at the beginning of each weights file, to compare the files of all ranks.
#define WEIGHTS_FINGERPRINT_BYTES (1 << 20)

typedef struct {
    ModelConfig model;
    bool continues;  // the run continues from a checkpoint (or dies), not from MODEL's weights: --resume or --branch
    bool branches;   // that checkpoint is the one of --branch: --resume finds none, or is not given
    const char *model_folder;  // NULL: a preset
    bool load_weights;         // the folder has weights to start from
    DataLoader train, val;     // num_shards 0: not opened (a dry run that knows the vocabulary; options_uses_model)
    DataIdentity data;         // identity of `train`
    DataIdentity val_data;     // identity of `val`
    char checkpoint[PATH_CAPACITY];  // to continue from; "": none
    TrainerProgress start;           // that checkpoint's progress, or 0
    const char *rate_reason;         // how --learning-rate was chosen, in parentheses, or ""
    bool fresh_scales;               // the state of delayed scaling in it is not that of this run
    Lineage lineage;
    JsonText told;  // settings of the checkpoint that differ from the run's, as members of a JSON object
    // checkpoints that checkpoint_prune keeps: those of higher steps that --resume skipped, and old ones that this
    // program may not remove
    CheckpointSteps passed_over;
    int64_t betas_since;  // CheckpointRun.betas_since
    int64_t saved_step;   // the latest step of the run with a checkpoint; 0: none
    bool save_failed;     // the latest save failed, for this reason:
    Failure save_failure;
    bool filter_decided;             // --fp8-filter was auto, and is now fp8_filter
    char fp8_filter[1024];           // the filter that auto stands for
    Tokenizer tokenizer;             // count 0: there is none beside the first training shard, or data is not opened
    TokenizerFiles tokenizer_files;  // for checkpoints and exports; empty on ranks other than 0
    int32_t *prompt;                 // [prompt_length] --generate: a separator and the text; else NULL
    int64_t prompt_length;
} RunSetup;

// True if --resume finds checkpoints, whole or damaged. `checkpoint` becomes the newest.
static inline bool run_setup_continues(RunSetup *s, const Options *o) {
    CheckpointSteps list = {NULL, 0};
    Failure failure;
    if (!o->resume || !folder_exists(o->checkpoint_dir)) return false;
    if (!checkpoint_list(o->checkpoint_dir, &list, &failure)) die("--resume: %s", failure.text);
    if (list.count) checkpoint_name(o->checkpoint_dir, list.steps[0], "", s->checkpoint, sizeof s->checkpoint);
    free(list.steps);
    return list.count > 0;
}

// Decides if the run continues from a checkpoint, and if that is the one of --branch: on all ranks as on rank 0. Dies
// if it cannot branch.
static inline void run_setup_find_start(RunSetup *s, const Options *o, const Comm *c) {
    s->continues = run_setup_continues(s, o);
    if (!*o->branch) return;
    s->branches = !s->continues, s->continues = true;
    if (!o->dry_run && c->rank == 0) checkpoint_check_branch(o->branch, o->checkpoint_dir, s->branches);
    comm_broadcast(c, COMM_WORLD, 0, &s->branches, sizeof s->branches);
}

__attribute__((noreturn)) static inline void run_setup_die_damaged(const Options *o, const Failure *failure) {
    die("MODEL %s: %s. Copy it again, or give --no-verify to start from it as it is", o->model, failure->text);
}

// If the run starts from the weights in MODEL's folder, without --no-verify: one rank of each host compares the
// folder's files with the hashes that were saved there, if there are any (model_verify). If a file is damaged, all
// ranks die.
static inline void run_setup_verify_weights(const RunSetup *s, const Options *o, const Comm *c) {
    Failure failure;
    if (!s->load_weights || s->continues || o->no_verify) return;
    const bool ok = c->local_rank > 0 || model_verify(s->model_folder, INT64_MAX, &failure);
    if (!checkpoint_agree(c, ok, &failure)) run_setup_die_damaged(o, &failure);
}

static inline void run_setup_model(RunSetup *s, const Options *o) {
    char presets[1024];
    if (options_uses_model(o)) use_require_weights(o);
    if (model_config_preset(&s->model, o->model)) return;
    model_config_preset_names(presets, sizeof presets);
    const char *nearest = model_config_nearest(o->model);
    if (!folder_exists(o->model))
        die_with(EXIT_USAGE, "MODEL \"%s\" is neither a folder nor one of: %s%s%s%s", o->model, presets,
                 nearest ? "; the nearest is " : "", nearest ? nearest : "",
                 nearest && strchr(o->model, '/') ? ", with random weights; for its weights download the folder" : "");
    checkpoint_refuse_model(o->model);
    Failure failure;
    const bool verify = !s->continues && !o->no_verify;
    if (verify && !model_verify(o->model, SMALL_FILE_BYTES, &failure)) run_setup_die_damaged(o, &failure);
    hf_config_read(&s->model, o->model);
    s->model_folder = o->model;
    s->load_weights = model_has_weights(o->model);
    char name[PATH_CAPACITY];
    if (!s->load_weights && !s->continues && model_finds_other_weights(o->model, name, sizeof name))
        die("MODEL %s holds %s, but weights are read from model.safetensors or the files that "
            "model.safetensors.index.json names; give them these names or convert them (save_pretrained of "
            "transformers writes them so), or give a folder with config.json alone to start from random weights",
            o->model, name);
}

// Dies if a shard of `dl` has a tokenizer table that differs from the first training shard's: ids would mean different
// texts.
static inline void run_setup_check_tables(const RunSetup *s, const DataLoader *dl) {
    char first[PATH_CAPACITY], path[PATH_CAPACITY], known[PATH_CAPACITY];
    if (!dl->num_shards) return;
    tokenizer_path(first, sizeof first, (s->train.num_shards ? &s->train : &s->val)->shards[0].path);
    format_checked(known, sizeof known, "%s", first);
    for (int64_t i = 0; i < dl->num_shards; i++) {
        tokenizer_path(path, sizeof path, dl->shards[i].path);
        if (strcmp(path, known) == 0) continue;  // its table was checked before
        Tokenizer tok = tokenizer_open(path);
        if (tok.count && !tokenizer_same(&tok, &s->tokenizer))
            die("%s belongs to the tokenizer table %s (%lld tokens, separator %lld), but the first training shard "
                "belongs to %s (%lld tokens, separator %lld), which differs; use shards made with one tokenizer",
                dl->shards[i].path, path, (long long)tok.count, (long long)tok.separator, first,
                (long long)s->tokenizer.count, (long long)s->tokenizer.separator);
        tokenizer_close(&tok);
        format_checked(known, sizeof known, "%s", path);
    }
}

// Appends a name and a value, each ended by a zero byte, to a description of the run for run_setup_compare.
static inline void run_setup_describe(JsonText *text, const char *name, const char *value) {
    json_text_add(text, "%s%c%s%c", name, 0, value, 0);
}

// Writes to `out` the first value in which two descriptions differ. If a name differs before that, or one description
// is the beginning of the other, writes that the program or MODEL differs.
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
    format_checked(out, capacity, "the program or MODEL differs here from rank 0");
}

// Dies if a rank's description differs from rank 0's. The first such rank prints the first difference and `fix`. Frees
// `mine`. All ranks call.
static inline void run_setup_compare(const Comm *c, JsonText *mine, const char *fix) {
    int64_t size = (int64_t)mine->size;
    comm_broadcast(c, COMM_WORLD, 0, &size, sizeof size);
    char *first = (char *)xcalloc((size_t)size, 1), difference[2200];
    if (c->rank == 0) memcpy(first, mine->data, mine->size);
    comm_broadcast(c, COMM_WORLD, 0, first, size);
    const bool same = size == (int64_t)mine->size && memcmp(first, mine->data, mine->size) == 0;
    const double other = comm_min(c, COMM_WORLD, (double)(same ? c->world : c->rank));
    if (other == (double)c->rank) {
        die_hook()->before = NULL;  // do not wait for rank 0: it prints no error
        run_setup_difference(mine->data, mine->data + mine->size, first, first + size, difference, sizeof difference);
        die_with(EXIT_USAGE, "%s; %s", difference, fix);
    }
    if (other < (double)c->world) comm_barrier(c, COMM_WORLD);  // waits until that rank has ended all ranks
    free(first);
    json_text_free(mine);
}

// Dies if a rank's program or options differ from rank 0's. Must come before communication that depends on the options.
// Paths of data may differ: run_setup_same_data compares data that is opened. All ranks call.
static inline void run_setup_same_options(const Comm *c, const Options *o, const char *program) {
    JsonText text = {NULL, 0, 0};
    run_setup_describe(&text, "the program", program);
    run_setup_describe(&text, "the program's version", TRAINER_VERSION);
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

// Describes the weights of a model's folder, by the sizes and first bytes of their files.
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

// Dies if a rank's model differs from rank 0's: each rank reads a folder given as MODEL from its host's disk.
// from_weights: also compares the weights. All ranks call.
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
    run_setup_describe(&text, "MODEL's folder", from_weights ? "with weights" : "without weights");
    if (from_weights) run_setup_describe_weights(&text, s->model_folder);
    json_free(&json);
    json_text_free(&config);
    run_setup_compare(c, &text, "give all hosts the same model");
}

// Dies if a rank's `data` differs from rank 0's: each rank reads it from its host's disk. All ranks call.
static inline void run_setup_same_data(const DataLoader *data, const char *option, const DataIdentity *mine,
                                       const Comm *c) {
    DataIdentity first = *mine;
    comm_broadcast(c, COMM_WORLD, 0, &first, sizeof first);
    if (memcmp(&first, mine, sizeof first) != 0)
        die("%s: here %s has %lld tokens in %lld shards, on rank 0 it has %lld in %lld, %s; give all hosts the same "
            "files",
            data->shards[0].path, option, (long long)mine->tokens, (long long)mine->shards, (long long)first.tokens,
            (long long)first.shards,
            mine->tokens == first.tokens ? "but the shards differ" : "so the ranks would read different samples");
}

// Adds the shards' tokenizer table, if there is one, to the files that checkpoints and exports get.
static inline void run_setup_keep_table(RunSetup *s) {
    TokenizerFiles *f = &s->tokenizer_files;
    if (!s->tokenizer.count) return;
    free(f->data[TOKENIZER_TABLE]);
    f->sizes[TOKENIZER_TABLE] = s->tokenizer.bytes;
    f->data[TOKENIZER_TABLE] = (char *)xcalloc(s->tokenizer.bytes, 1);
    memcpy(f->data[TOKENIZER_TABLE], s->tokenizer.file, s->tokenizer.bytes);
}

// Reads the tokenizer's files that this run's checkpoints and export get, on rank 0: those of MODEL's folder; for a
// preset those in the folder of the first training shard, if they make a tokenizer. Dies if one cannot be read.
static inline void run_setup_tokenizer_files(RunSetup *s, const Options *o, const Comm *c) {
    char folder[PATH_CAPACITY];
    if (c->rank > 0 || !(*o->checkpoint_dir || *o->export_hf)) return;
    const char *shard = s->train.shards[0].path, *slash = strrchr(shard, '/');
    if (s->model_folder) format_checked(folder, sizeof folder, "%s", s->model_folder);
    else format_checked(folder, sizeof folder, "%.*s", slash ? (int)max_i64(1, slash - shard) : 1, slash ? shard : ".");
    tokenizer_files_read(&s->tokenizer_files, folder);
    if (!s->model_folder && !use_takes_tokenizer(&s->tokenizer_files, &s->tokenizer))
        tokenizer_files_free(&s->tokenizer_files);
    run_setup_keep_table(s);
}

// Opens shards, or the sources of --mix, for sequences of T tokens. Dies if other ranks have other data. `option` names
// them by `text`.
static inline DataLoader run_setup_open(const char *text, const char *option, const Options *o, bool shuffle,
                                        const Comm *c, DataIdentity *identity) {
    DataLoader data =
        (text == o->mix ? sources_open : dataloader_open)(text, o->sequence_length, shuffle, (uint64_t)o->seed);
    *identity = dataloader_identity(&data);
    run_setup_same_data(&data, option, identity, c);
    if (c->rank == 0) dataloader_warn(&data, option);
    return data;
}

// Opens the shards, and the tokenizer table beside the first training shard. Dies if shards have different tables.
static inline void run_setup_data(RunSetup *s, const Options *o, const Comm *c) {
    const char *val = *o->evaluate ? "--evaluate" : "--val-data";
    if (!options_uses_model(o))
        s->train = run_setup_open(*o->mix ? o->mix : o->train_data, *o->mix ? "--mix" : "--train-data", o,
                                  o->shuffle == ON, c, &s->data);
    if (*o->val_data) s->val = run_setup_open(o->val_data, val, o, false, c, &s->val_data);
    s->val.spread = min_i64(o->val_steps, s->val.num_sequences);
    if (options_uses_model(o))
        s->tokenizer = use_find_table(o, s->model_folder, *o->evaluate ? s->val.shards[0].path : NULL);
    else s->tokenizer = tokenizer_open_beside(s->train.shards[0].path);
    if (!s->tokenizer.count) return;
    run_setup_check_tables(s, &s->train);
    run_setup_check_tables(s, &s->val);
}

// Returns the largest token id of all shards of `dl`. Dies if every possible vocabulary is too small for it.
static inline int64_t run_setup_largest_token(DataLoader *dl) {
    const int64_t largest = dataloader_max_token(dl);
    if (largest < VOCABULARY_LARGEST) return largest;
    const TokenPlace place = dataloader_scan(dl, VOCABULARY_LARGEST);
    die("%s: token %lld has id %lld, but a vocabulary has at most %d tokens, with ids from 0; make the shard again",
        dl->shards[place.shard].path, (long long)place.position, (long long)place.token, VOCABULARY_LARGEST);
}

// Sets the vocabulary of the presets tiny, small and medium, which comes from the data, and the token around documents.
// Dies if the model's sizes are wrong, or if data with a tokenizer table is open and its separator is not in the
// vocabulary.
static inline void run_setup_vocabulary(RunSetup *s) {
    if (s->model.vocab_size == 0) {
        const int64_t count = s->tokenizer.count ? s->tokenizer.count : run_setup_largest_token(&s->train) + 1;
        if (s->tokenizer.count) s->model.bos_token_id = s->model.eos_token_id = s->tokenizer.separator;
        s->model.vocab_size = round_up(count, VOCABULARY_MULTIPLE);
    }
    model_config_check(&s->model);
    s->train.vocabulary = s->val.vocabulary = s->model.vocab_size;
    if (s->tokenizer.count && s->tokenizer.separator >= s->model.vocab_size)
        die("the separator of the shard's tokenizer is token %lld, but the model's vocabulary is %lld; use a shard "
            "made with the model's own tokenizer",
            (long long)s->tokenizer.separator, (long long)s->model.vocab_size);
}

// Chooses the learning rate, and what goes with it, where the command line leaves that open.
static inline void run_setup_rate(RunSetup *s, Options *o) {
    ParameterTable t = parameter_table(&s->model);
    s->rate_reason = o->learning_rate != -1 ? "" : s->load_weights ? " (for trained weights)" : " (by size)";
    // a dry run does not look for damage: it takes the newest checkpoint's at once
    if (o->dry_run && *s->checkpoint && *s->rate_reason)
        checkpoint_take_rate(s->checkpoint, o), s->rate_reason = " (the checkpoint's)";
    defaults_set(o, t.num_parameters, s->load_weights);
    parameter_table_free(&t);
}

static inline void run_setup_warn_of_length(const RunSetup *s, const Options *o) {
    if (!s->prompt && o->sequence_length > s->model.max_position_embeddings)
        warn("--sequence-length %lld is more than the %lld positions that model %s is made for "
             "(max_position_embeddings)",
             (long long)o->sequence_length, (long long)s->model.max_position_embeddings, s->model.name);
}

// Warns if master weights are rounded to nearest and the learning rate is, or ends, so small that many updates are
// lost: below twice the distance of neighbouring numbers at initializer_range. Updates below half of that distance are
// lost, and AdamW's updates are about as large as the rate.
static inline void run_setup_warn_of_rounding(const RunSetup *s, const Options *o) {
    const bool fp16 = options_fp16_weights(o);
    const double weight = s->model.initializer_range, distance = ldexp(1, ilogb(weight) - (fp16 ? 10 : 7));
    char name[2][32], where[64];
    const double end = o->lr_schedule == SCHEDULE_CONSTANT ? o->learning_rate : o->learning_rate * o->min_lr_ratio;
    if (!options_nearest_weights(o) || end >= 2 * distance) return;
    option_format(o, option_find("master-weights", strlen("master-weights")), name[0], sizeof name[0]);
    option_format(o, option_find("lr-schedule", strlen("lr-schedule")), name[1], sizeof name[1]);
    if (o->learning_rate < 2 * distance) format_checked(where, sizeof where, "--learning-rate %g is", o->learning_rate);
    else format_checked(where, sizeof where, "--lr-schedule %s ends", name[1]);
    warn("--master-weights %s loses updates below %.2g of weights near %g, and AdamW's are about as large as the "
         "learning rate: %s below %.2g, where many are lost; --master-weights %s loses none on average",
         name[0], distance / 2, weight, where, 2 * distance, fp16 ? "fp16-stochastic" : "bf16");
}

// Warns if the model's vocabulary is larger than the tokenizer's by VOCABULARY_PADDING or more. Token ids alone do not
// show this: a larger vocabulary contains all ids of a smaller one.
static inline void run_setup_warn_of_tokenizer(const RunSetup *s) {
    if (s->load_weights) use_warn_of_table(s->model_folder, &s->tokenizer);
    if (s->tokenizer.count && s->model.vocab_size - s->tokenizer.count >= VOCABULARY_PADDING)
        warn(
            "the shard's tokenizer has %lld tokens, the model's vocabulary %lld: was the shard made for another model?",
            (long long)s->tokenizer.count, (long long)s->model.vocab_size);
}

// Dies if the run writes logs or checkpoints into the export's folder or its temporary ones: the export replaces or
// removes these folders.
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
                         "--%s %s is in --export-hf %s%s, which may hold only the export; give a folder outside it",
                         written[i][0], written[i][1], o->export_hf, suffixes[k]);
        }
    }
}

// Sets --shard-size 0 of --sharding hybrid to the number of ranks of one host. Dies if hosts have different numbers of
// ranks, or if ranks of one host do not follow each other: a shard group would span hosts. Also dies if an option
// conflicts with this shard size.
static inline void run_setup_shard_size(Options *o, const Comm *c) {
    if (o->sharding != SHARDING_HYBRID || o->shard_size) return;
    const double least = comm_min(c, COMM_WORLD, (double)c->local_world);
    const double most = comm_max(c, COMM_WORLD, (double)c->local_world);
    if (least != most)
        die_with(EXIT_USAGE,
                 "--sharding hybrid: the hosts have different numbers of ranks, from %.0f to %.0f; give --shard-size",
                 least, most);
    if (comm_max(c, COMM_WORLD, c->local_rank != c->rank % c->local_world) > 0)
        die_with(EXIT_USAGE, "--sharding hybrid: the ranks of a host do not follow each other; start them host by host "
                             "(mpirun --map-by slot, srun --distribution=block), or give --shard-size");
    o->shard_size = c->local_world;
    char message[512] = "";
    options_rank_conflict(o, message, sizeof message);
    if (*message) die_with(EXIT_USAGE, "%s", message);
}

// Checks the options, resolves them (options_resolve), and opens the model and the data that they name, on every rank.
// A dry run opens data only if the vocabulary comes from it. In any other run one rank of each host reads all data, to
// check the tokens, and rank 0 checks that it can write the run's folders. Dies with the reason. Clears --log-dir on
// all ranks but 0, which writes the log.
static inline RunSetup run_setup(Options *o, const Comm *c, TrainerKind kind) {
    RunSetup s = {};
    char message[512];
    if (*options_conflict(o, message, sizeof message)) die_with(EXIT_USAGE, "%s", message);
    const int64_t world = o->world_size ? o->world_size : c->world;
    options_count_micro_steps(o, world);
    options_resolve(o);
    run_setup_shard_size(o, c);
    if (c->rank > 0) o->log_dir = "";
    run_setup_find_start(&s, o, c);
    run_setup_model(&s, o);
    run_setup_same_model(&s, c, s.load_weights && !o->resume && !*o->branch && !o->dry_run);
    if (!o->dry_run || s.model.vocab_size == 0) run_setup_data(&s, o, c);
    run_setup_vocabulary(&s);
    run_setup_rate(&s, o);
    if (*o->generate) s.prompt = use_encode(o, &s.model, &s.tokenizer, &s.prompt_length);
    supported_require(kind, &s.model, o, world);
    if (c->rank == 0) run_setup_warn_of_length(&s, o), run_setup_warn_of_rounding(&s, o);
    if (o->dry_run) return s;
    if (c->rank == 0) run_setup_warn_of_tokenizer(&s);
    if (c->local_rank == 0) dataloader_check_vocabulary(&s.train, s.model.vocab_size);
    if (c->local_rank == 0) dataloader_check_vocabulary(&s.val, s.model.vocab_size);
    separator_find(o, c, &s.train, &s.val, &s.tokenizer, &s.model);
    if (s.load_weights) {
        ParameterTable t = parameter_table(&s.model);
        model_check_weights(s.model_folder, &s.model, &t);
        parameter_table_free(&t);
    }
    run_setup_tokenizer_files(&s, o, c);
    if (c->rank == 0 && *o->export_hf) run_setup_check_export(o);
    if (c->rank == 0 && *o->log_dir) logger_prepare(o->log_dir);
    if (c->rank == 0 && *o->checkpoint_dir) checkpoint_prepare(o->checkpoint_dir, o->resume);
    if (c->rank == 0 && *o->export_hf) model_export_prepare(o->export_hf, s.model_folder);
    if (*o->checkpoint_dir) checkpoint_check_shared(c, o->checkpoint_dir);
    if (*o->export_hf) model_export_check_shared(c, o->export_hf);
    run_setup_verify_weights(&s, o, c);
    comm_barrier(c, COMM_WORLD);
    return s;
}

// Returns what the functions of checkpoints need to know of a run. The result points into both arguments.
static inline CheckpointRun run_setup_checkpoint(RunSetup *s, const Options *o) {
    return (CheckpointRun){&s->model,   o,           s->data,  &s->passed_over, &s->tokenizer_files,
                           &s->lineage, s->branches, &s->told, &s->betas_since};
}

// Replaces --fp8-filter auto by s->fp8_filter.
static inline void run_setup_decide_filter(RunSetup *s, Options *o) {
    o->fp8_filter = s->fp8_filter;
    s->filter_decided = true;
}

// Remembers the checkpoints that --resume skipped, and the step of the one that it took.
static inline void run_setup_note_own(RunSetup *s, const Options *o) {
    Failure failure;
    s->saved_step = s->start.step;
    if (!checkpoint_list(o->checkpoint_dir, &s->passed_over, &failure)) die("--resume: %s", failure.text);
    while (s->passed_over.count && s->passed_over.steps[s->passed_over.count - 1] <= s->start.step)
        s->passed_over.count--;
}

// With --resume or --branch, after run_setup: finds the checkpoint to continue from, if there is one, and dies if the
// run that wrote it does not match (checkpoint_check). With --resume, replaces --fp8-filter auto by that run's filter.
// Takes its tokenizer if the run knows none yet. All ranks call.
static inline void run_setup_resume(RunSetup *s, Options *o, const Comm *c) {
    const char *branch = s->branches ? o->branch : NULL;
    if (!branch && !o->resume) return;
    if (!checkpoint_find_together(c, o->checkpoint_dir, branch, s->checkpoint, sizeof s->checkpoint)) return;
    if (!branch && strcmp(o->fp8_filter, "auto") == 0) {
        checkpoint_read_setting(s->checkpoint, "fp8-filter", s->fp8_filter, sizeof s->fp8_filter);
        run_setup_decide_filter(s, o);
    }
    if (*s->rate_reason) checkpoint_take_rate(s->checkpoint, o), s->rate_reason = " (the checkpoint's)";
    const CheckpointRun run = run_setup_checkpoint(s, o);
    s->start = checkpoint_check(s->checkpoint, &run);
    s->fresh_scales = branch && !checkpoint_has_scales(s->checkpoint, o);
    checkpoint_read_lineage(s->checkpoint, s->start.step, s->branches, &s->lineage);
    lineage_print(&s->lineage);
    if (!branch) run_setup_note_own(s, o);
    if (c->rank == 0 && !tokenizer_is_known(&s->tokenizer_files))
        tokenizer_files_read(&s->tokenizer_files, s->checkpoint), run_setup_keep_table(s);
    if (s->start.step >= o->num_steps)
        printf("%s: %lld steps are done and --num-steps is %lld: nothing is left to train\n", checkpoint_verb(&run),
               (long long)s->start.step, (long long)o->num_steps);
}

// Returns the bytes of weights and both moments in a checkpoint. The rest of it is small in comparison.
static inline int64_t run_setup_checkpoint_bytes(const ParameterTable *t, const Options *o) {
    return t->num_parameters * options_weight_bytes(o) + options_moment_bytes(o, t->num_parameters);
}

// Dies, on rank 0, if the disk lacks room for one checkpoint or for the export: otherwise the run would fail after its
// work. Where the room is not known, checks nothing. Call it after run_setup_resume.
static inline void run_setup_check_room(const RunSetup *s, const Options *o, const Comm *c) {
    if (c->rank > 0) return;
    const double GiB = 1024.0 * 1024 * 1024;
    ParameterTable t = parameter_table(&s->model);
    const int64_t checkpoint =
                      *o->checkpoint_dir && s->start.step < o->num_steps ? run_setup_checkpoint_bytes(&t, o) : 0,
                  weights = t.num_parameters * options_weight_bytes(o);
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
    struct stat a, b;
    const bool one_disk = stat(parent, &a) == 0 && stat(o->checkpoint_dir, &b) == 0 && a.st_dev == b.st_dev;
    const int64_t before = one_disk ? checkpoint : 0;
    if (folder_room(parent, &room, &failure) && room < before + weights)
        die("--export-hf %s: the weights take %.*f GiB%s, and %.*f are free there; make room or give a folder on a "
            "larger disk",
            o->export_hf, digits, (double)weights / GiB,
            before ? ", on top of a checkpoint (checkpoint-bytes of --dry-run)" : "", digits, (double)room / GiB);
}

static inline void run_setup_close(RunSetup *s) {
    free(s->passed_over.steps);
    free(s->lineage.stretches);
    json_text_free(&s->told);
    dataloader_close(&s->train);
    dataloader_close(&s->val);
    tokenizer_close(&s->tokenizer);
    tokenizer_files_free(&s->tokenizer_files);
    free(s->prompt);
}

#endif
