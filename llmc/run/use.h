// Prepares --generate and --evaluate before a run: its options, the tokenizer table that it reads, and its prompt.
#ifndef LLMC_USE_H
#define LLMC_USE_H

#include <glob.h>

#include "../checkpoint/store.h"
#include "../config/options_rules.h"
#include "../data/encode.h"

// With --generate or --evaluate: checks the options, takes --resume's checkpoint as MODEL, and plans no memory for what
// only training needs. Dies if one of the two is given without a text. All ranks call.
static inline void use_set_options(Options *o, const Comm *c) {
    static char checkpoint[PATH_CAPACITY];
    char message[512] = "";
    if (!*o->generate && options_give(o, "generate")) die_with(EXIT_USAGE, "--generate is given without a text");
    if (!*o->evaluate && options_give(o, "evaluate")) die_with(EXIT_USAGE, "--evaluate is given without shards");
    if (!options_uses_model(o)) return;
    options_use_conflict(o, message, sizeof message);
    if (*message) die_with(EXIT_USAGE, "%s", message);
    if (o->resume) {
        if (!checkpoint_find_together(c, o->checkpoint_dir, NULL, checkpoint, sizeof checkpoint))
            die("--resume: there is no checkpoint in %s to use", o->checkpoint_dir);
        o->model = checkpoint, o->no_verify = true;  // its files are compared with their hashes by now
        o->checkpoint_dir = "", o->resume = false;
    }
    o->val_data = o->evaluate;
    if (*o->generate) o->document_mask = "off";  // there is one document
    if (!options_give(o, "val-steps")) o->val_steps = INT64_MAX;
    o->grad_accumulation_steps = 1, o->optimizer_in_backward = !options_fp8_gradients(o);
    if (o->fp8_activations == OFF) o->recompute = RECOMPUTE_LAYER;
}

static inline void use_require_weights(const Options *o) {
    if (!model_has_weights(o->model))
        die_with(EXIT_USAGE,
                 "--%s: MODEL %s has no weights; give a checkpoint, an export or another folder with weights, or "
                 "--checkpoint-dir DIR --resume to take the newest checkpoint in DIR",
                 *o->generate ? "generate" : "evaluate", o->model);
}

// Returns the tokenizer table for a model's folder: that in it, else that beside the first shard of --train-data. With
// --evaluate (`shard`: its first shard) it is that beside the shard, which must equal the folder's, else the folder's.
// Dies if --generate finds none.
static inline Tokenizer use_find_table(const Options *o, const char *folder, const char *shard) {
    char path[PATH_CAPACITY], first[PATH_CAPACITY];
    glob_t named;
    format_checked(path, sizeof path, "%s/%s", folder, tokenizer_file_names()[TOKENIZER_TABLE]);
    Tokenizer own = tokenizer_open(path), beside = tokenizer_open_beside(shard ? shard : "");
    if (own.count && beside.count && !tokenizer_same(&own, &beside))
        die("--evaluate: %s has another tokenizer table than MODEL, %s; use shards made with the model's tokenizer",
            shard, path);
    if (own.count) tokenizer_close(&beside);
    if (own.count || shard) return own.count ? own : beside;
    format_checked(first, sizeof first, "%.*s", (int)strcspn(o->train_data, ","), o->train_data);
    if (glob(first, 0, NULL, &named) == 0) beside = tokenizer_open_beside(named.gl_pathv[0]), globfree(&named);
    if (!beside.count)
        die("--generate finds no tokenizer table: there is no %s, which checkpoints and exports of training have, and "
            "none beside the first shard of --train-data %s; data/prepare.py --tokenizer writes shards with one",
            path, o->train_data);
    return beside;
}

// Warns if the table in the folder of MODEL differs from that of the shards: the weights know other texts by their ids.
static inline void use_warn_of_table(const char *folder, const Tokenizer *shards) {
    char path[PATH_CAPACITY];
    format_checked(path, sizeof path, "%s/%s", folder, tokenizer_file_names()[TOKENIZER_TABLE]);
    Tokenizer own = tokenizer_open(path);
    if (own.count && shards->count && !tokenizer_same(&own, shards))
        warn("the shards have another tokenizer table than MODEL, %s: its weights know other tokens by their ids",
             path);
    tokenizer_close(&own);
}

// False if the files make no tokenizer or, with a warning, one with another id for the separator of the shards' table.
static inline bool use_takes_tokenizer(const TokenizerFiles *f, const Tokenizer *shards) {
    Json json;
    Failure failure;
    size_t n;
    const char *name = tokenizer_decode(shards, shards->separator, &n);
    if (!name || !f->data[0] || !json_parse(&json, "", f->data[0], f->sizes[0], &failure)) return tokenizer_is_known(f);
    bool fits = !json_member(&json, json_root(&json), "added_tokens");
    for (const JsonNode *at = json.nodes + 1; !fits && at < json.nodes + json.count; at++) {
        const bool added = at->key && strcmp(at->key, "content") == 0;
        const JsonNode *id = added ? json_member(&json, &json.nodes[at->parent], "id") : at;
        const char *token = added ? at->text : at->key;
        fits = id && token && strncmp(token, name, n) == 0 && !token[n] && atoll(id->text) == shards->separator;
    }
    json_free(&json);
    if (!fits) warn("%s/tokenizer.json is not that of the shards; checkpoints and exports get no copy", f->folder);
    return fits;
}

// --generate: returns the text as tokens [*length] after a separator, and makes the sequence as long as it and
// --max-tokens: rounded up, since FP8 GEMMs need multiples of up to 128 rows. Attention does not see the padding.
static inline int32_t *use_encode(Options *o, const ModelConfig *m, const Tokenizer *tokenizer, int64_t *length) {
    const size_t n = strlen(o->generate);
    int32_t *tokens = (int32_t *)xcalloc(n + 1, sizeof *tokens);
    const int64_t count = tokenizer_encode(tokenizer, o->generate, n, tokens + 1);
    tokens[0] = (int32_t)tokenizer->separator;
    *length = 1 + count;
    if (count < 0)
        die_with(EXIT_USAGE, "--generate: the tokenizer table has no token for byte %lld of the text, 0x%02x",
                 (long long)-count, (unsigned char)o->generate[-1 - count]);
    if (*length + o->max_tokens > m->max_position_embeddings)
        die_with(EXIT_USAGE,
                 "--generate: the text has %lld tokens with its separator, and --max-tokens is %lld, but model %s has "
                 "%lld positions; give less of one of the two",
                 (long long)*length, (long long)o->max_tokens, m->name, (long long)m->max_position_embeddings);
    o->sequence_length = round_up(*length + o->max_tokens, 128);
    return tokens;
}

#endif
