// Reads and writes Hugging Face's config.json of Llama, Mistral, Qwen2 and Qwen3 models (ForCausalLM).
//
// RoPE settings are read in both styles: `rope_theta` and `rope_scaling` (transformers 4), `rope_parameters`
// (transformers 5). A model that was read is written with the text that it was read from (hf_config_source_text), a
// preset in the style of transformers 4, which both versions read.
//
// A missing size (vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads) ends the run. So
// does a file with neither architectures nor model_type, or rope_type llama3 without one of its values. Any other
// missing value gets transformers' default of the class. Unsupported values end the run (hf_refuse_unsupported,
// hf_refuse_variants, hf_read_rope, model_config_check).
#ifndef LLMC_HF_CONFIG_H
#define LLMC_HF_CONFIG_H

#include "../base/json.h"
#include "model_config.h"

// Names and transformers' defaults that differ between the classes.
typedef struct {
    ModelFamily family;
    const char *architecture, *model_type;
    int64_t num_kv_heads;  // 0: as many as attention heads
    int64_t head_dim;      // 0: hidden_size / num_attention_heads
    int64_t max_position_embeddings;
    int64_t bos_token_id, eos_token_id;
} HfClass;

static inline const HfClass *hf_classes(void) {
    static const HfClass classes[] = {{FAMILY_LLAMA, "LlamaForCausalLM", "llama", 0, 0, 2048, 1, 2},
                                      {FAMILY_LLAMA, "MistralForCausalLM", "mistral", 8, 0, 131072, 1, 2},
                                      {FAMILY_QWEN2, "Qwen2ForCausalLM", "qwen2", 32, 0, 32768, -1, -1},
                                      {FAMILY_QWEN3, "Qwen3ForCausalLM", "qwen3", 32, 128, 32768, -1, -1},
                                      {FAMILY_LLAMA, NULL, NULL, 0, 0, 0, 0, 0}};
    return classes;
}

// ---- reading: a value that is wrong or not supported ends the run

// Returns the member `key` of `object`; NULL if it is missing or null.
static inline const JsonNode *hf_member(const Json *json, const JsonNode *object, const char *key) {
    const JsonNode *node = json_member(json, object, key);
    return node && node->type != JSON_NULL ? node : NULL;
}

static inline int64_t hf_int(const Json *json, const JsonNode *object, const char *key, int64_t fallback) {
    Failure failure;
    int64_t value = fallback;
    const JsonNode *node = hf_member(json, object, key);
    if (node && !json_int(json, node, 1, (int64_t)1 << 40, &value, &failure)) die("%s", failure.text);
    return value;
}

static inline int64_t hf_required_int(const Json *json, const char *key) {
    if (!hf_member(json, json_root(json), key)) die("%s has no value for \"%s\"", json->source, key);
    return hf_int(json, json_root(json), key, 0);
}

static inline double hf_real(const Json *json, const JsonNode *object, const char *key, double fallback) {
    Failure failure;
    double value = fallback;
    const JsonNode *node = hf_member(json, object, key);
    if (node && !json_real(json, node, &value, &failure)) die("%s", failure.text);
    return value;
}

static inline bool hf_bool(const Json *json, const char *key, bool fallback) {
    Failure failure;
    bool value = fallback;
    const JsonNode *node = hf_member(json, json_root(json), key);
    if (node && !json_bool(json, node, &value, &failure)) die("%s", failure.text);
    return value;
}

static inline const char *hf_text(const Json *json, const JsonNode *object, const char *key, const char *fallback) {
    Failure failure;
    const JsonNode *node = hf_member(json, object, key);
    if (node && node->type != JSON_STRING) {
        json_expected(json, node, "a string", &failure);
        die("%s", failure.text);
    }
    return node ? node->text : fallback;
}

// Reads a token id from -1 to 2^40, or the first id of a list. A missing key means `fallback`. Returns -1, no token,
// for null, an empty list and -1, and also for an id that is not below vocab_size (test models have such ids).
static inline int64_t hf_token_id(const Json *json, const char *key, int64_t fallback, int64_t vocab_size) {
    Failure failure;
    int64_t id = fallback;
    const JsonNode *node = json_member(json, json_root(json), key);
    if (node && node->type == JSON_NULL) return -1;
    if (node && node->type == JSON_ARRAY) {
        if (!node->count) return -1;
        node = json_first(json, node);
    }
    if (node && !json_int(json, node, -1, (int64_t)1 << 40, &id, &failure)) die("%s", failure.text);
    return id < vocab_size ? id : -1;
}

// Dies because config.json does not tell the model's class. `list`: its "architectures"; NULL: it has none.
static inline void hf_refuse_classless(const Json *json, const JsonNode *list) {
    const JsonNode *first = list && list->type == JSON_ARRAY ? json_first(json, list) : NULL;
    if (!list) die("%s has no value for \"architectures\" or \"model_type\"", json->source);
    die("%s: architectures: expected an array that begins with the name of a class, such as [\"LlamaForCausalLM\"], "
        "found %s%s; there is no \"model_type\" that could stand for it",
        json->source, first ? "an array that begins with " : "",
        list->type == JSON_ARRAY && !first ? "an empty array" : json_type_name(first ? first->type : list->type));
}

// Dies because the class is not supported. Says what the trainers lack for the best known ones.
static inline void hf_refuse_class(const Json *json, const char *name) {
    static const char *const lacking[][2] = {
        {"phi3",
         "its q, k, v and its gate, up are one matrix each in the files, and its RoPE may be longrope or partial"},
        {"gemma",
         "it has GELU in the MLP, norms that multiply by 1 + weight, and a scaled embedding; its later versions "
         "also sliding windows, and norms after each block"}};
    const char *reason = "";
    for (size_t i = 0; i < sizeof lacking / sizeof lacking[0]; i++)
        if (strncasecmp(name, lacking[i][0], strlen(lacking[i][0])) == 0) reason = lacking[i][1];
    die_with(EXIT_UNSUPPORTED,
             "%s: %s is not supported%s%s; LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and "
             "Qwen3ForCausalLM are",
             json->source, name, *reason ? ": " : "", reason);
}

static inline const HfClass *hf_class_of(const Json *json) {
    const JsonNode *root = json_root(json), *list = hf_member(json, root, "architectures");
    if (root->type != JSON_OBJECT) die("%s holds %s, not an object", json->source, json_type_name(root->type));
    const JsonNode *first = list && list->type == JSON_ARRAY ? json_first(json, list) : NULL;
    const char *architecture = first && first->type == JSON_STRING ? first->text : NULL;
    const char *model_type = hf_text(json, root, "model_type", NULL);
    if (!architecture && !model_type) hf_refuse_classless(json, list);
    for (const HfClass *c = hf_classes(); c->architecture; c++)
        if (strcmp(architecture ? architecture : model_type, architecture ? c->architecture : c->model_type) == 0) {
            if (model_type && strcmp(model_type, c->model_type) != 0)
                die("%s: architecture %s with model_type \"%s\"; expected \"%s\"", json->source, c->architecture,
                    model_type, c->model_type);
            return c;
        }
    hf_refuse_class(json, architecture ? architecture : model_type);
    return NULL;
}

static inline bool hf_is_mistral(const HfClass *c) { return strcmp(c->model_type, "mistral") == 0; }

// Dies if config.json has a setting that is not supported. Sizes (model_config_check) and RoPE's base and scaling
// (hf_read_rope) are checked elsewhere.
static inline void hf_refuse_unsupported(const Json *json, const HfClass *c) {
    const JsonNode *root = json_root(json);
    const char *activation = hf_text(json, root, "hidden_act", "silu");
    if (strcmp(activation, "silu") != 0)
        die_with(EXIT_UNSUPPORTED, "%s: hidden_act \"%s\" is not supported; only \"silu\" is", json->source,
                 activation);
    if (c->family != FAMILY_QWEN2 && hf_bool(json, "attention_bias", false))
        die_with(EXIT_UNSUPPORTED, "%s: attention_bias is true; %s is supported without biases only", json->source,
                 c->architecture);
    if (hf_bool(json, "mlp_bias", false))
        die_with(EXIT_UNSUPPORTED, "%s: mlp_bias is true; only models without biases in the MLP are supported",
                 json->source);
    if (hf_bool(json, "use_sliding_window", false))
        die_with(EXIT_UNSUPPORTED, "%s: use_sliding_window is true; only full causal attention is supported",
                 json->source);
    const JsonNode *layer_types = hf_member(json, root, "layer_types");
    if (layer_types && layer_types->type != JSON_ARRAY)
        die("%s: layer_types: expected an array, found %s", json->source, json_type_name(layer_types->type));
    for (const JsonNode *t = layer_types ? json_first(json, layer_types) : NULL; t; t = json_next(json, t))
        if (strcmp(t->text, "full_attention") != 0)
            die_with(EXIT_UNSUPPORTED, "%s: layer_types has \"%s\"; only \"full_attention\" is supported", json->source,
                     t->text);
    if (hf_real(json, root, "attention_dropout", 0) != 0)
        die_with(EXIT_UNSUPPORTED, "%s: attention_dropout is not 0; dropout is not supported", json->source);
    if (hf_real(json, root, "partial_rotary_factor", 1) != 1)
        die_with(EXIT_UNSUPPORTED, "%s: partial_rotary_factor is not 1; only RoPE over whole heads is supported",
                 json->source);
}

// Dies if config.json has a key, other than with null, false, 0 or nothing in it, that says that the weights or the
// attention are not those of the class. transformers ignores some of these keys, and would compute something else too.
static inline void hf_refuse_variants(const Json *json, const HfClass *c) {
    static const char *const keys[] = {"quantization_config", "compression_config",          "quantization",
                                       "sliding_window",      "dual_chunk_attention_config", "attention_chunk_size",
                                       "no_rope_layers",      "attn_logit_softcapping",      "final_logit_softcapping"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const JsonNode *node = hf_member(json, json_root(json), keys[i]);
        const bool scalar = node && node->type != JSON_ARRAY && node->type != JSON_OBJECT;
        if (!node || (scalar ? strcmp(node->text, "false") == 0 || strcmp(node->text, "0") == 0 : !node->count))
            continue;
        if (i < 3)
            die_with(EXIT_UNSUPPORTED,
                     "%s: %s says that the weights are quantized; use the original bf16 or fp32 model", json->source,
                     keys[i]);
        // use_sliding_window decides in Qwen's classes, supported() in Mistral's
        if (i == 3 && (c->family != FAMILY_LLAMA || hf_is_mistral(c))) continue;
        die_with(EXIT_UNSUPPORTED, "%s: %s is not supported, and is no setting of %s; remove it to train without it",
                 json->source, keys[i], c->architecture);
    }
}

// Returns the object that describes RoPE; NULL if there is none. In files of transformers 5 it may be the member
// "full_attention" of rope_parameters. Dies if there are several.
static inline const JsonNode *hf_find_rope(const Json *json) {
    const JsonNode *root = json_root(json);
    const JsonNode *parameters = hf_member(json, root, "rope_parameters"),
                   *scaling = hf_member(json, root, "rope_scaling");
    if (parameters && scaling) die("%s has both rope_parameters and rope_scaling; keep one", json->source);
    const JsonNode *rope = parameters ? parameters : scaling,
                   *nested = rope ? hf_member(json, rope, "full_attention") : NULL;
    for (const JsonNode *other = nested ? json_first(json, rope) : NULL; other; other = json_next(json, other))
        if (other != nested && other->type != JSON_NULL)
            die_with(EXIT_UNSUPPORTED,
                     "%s: %s has \"%s\" beside \"full_attention\"; one RoPE for all layers is supported", json->source,
                     rope->key, other->key);
    if (nested) rope = nested;
    if (rope && rope->type != JSON_OBJECT)
        die("%s: %s is %s, not an object", json->source, rope->key, json_type_name(rope->type));
    return rope;
}

// Dies if the object that describes RoPE has a key, other than with null, that its type does not use.
static inline void hf_check_rope_keys(const Json *json, const JsonNode *rope, const char *type,
                                      const char *const *used) {
    static const char *const always[] = {"rope_theta", "rope_type", "type", "partial_rotary_factor"};
    for (const JsonNode *node = json_first(json, rope); node; node = json_next(json, node)) {
        bool known = node->type == JSON_NULL;
        for (int i = 0; i < 4; i++) known = known || strcmp(node->key, always[i]) == 0;
        for (int i = 0; used && i < 4; i++) known = known || strcmp(node->key, used[i]) == 0;
        char path[256];
        json_path(json, node, path, sizeof path);
        if (!known)
            die_with(EXIT_UNSUPPORTED,
                     "%s: %s is not a value that rope_type \"%s\" uses; \"default\" and \"llama3\" are supported",
                     json->source, path, type);
    }
}

// Reads the RoPE base and scaling, which config.json holds in either style (head of this file).
static inline void hf_read_rope(const Json *json, ModelConfig *m) {
    const JsonNode *rope = hf_find_rope(json);
    const double outer_theta = hf_real(json, json_root(json), "rope_theta", 0);
    m->rope_theta = outer_theta ? outer_theta : 10000.0;
    if (!rope) return;
    m->rope_theta = hf_real(json, rope, "rope_theta", m->rope_theta);
    if (outer_theta && m->rope_theta != outer_theta)
        die("%s: rope_theta is %g, but %g in %s", json->source, outer_theta, m->rope_theta, rope->key);
    if (hf_real(json, rope, "partial_rotary_factor", 1) != 1)
        die_with(EXIT_UNSUPPORTED, "%s: partial_rotary_factor is not 1; only RoPE over whole heads is supported",
                 json->source);
    const char *old = hf_text(json, rope, "type", "default"), *type = hf_text(json, rope, "rope_type", old);
    if (hf_member(json, rope, "type") && strcmp(type, old) != 0)
        die("%s: %s has rope_type \"%s\" and type \"%s\"; keep one", json->source, rope->key, type, old);
    static const char *const keys[] = {"factor", "low_freq_factor", "high_freq_factor",
                                       "original_max_position_embeddings"};
    if (strcmp(type, "default") == 0) return hf_check_rope_keys(json, rope, type, NULL);
    if (strcmp(type, "llama3") != 0)
        die_with(EXIT_UNSUPPORTED, "%s: rope_type \"%s\" is not supported; \"default\" and \"llama3\" are",
                 json->source, type);
    hf_check_rope_keys(json, rope, type, keys);
    for (int i = 0; i < 4; i++)
        if (!hf_member(json, rope, keys[i]))
            die("%s: %s has no value for \"%s\", which rope_type llama3 needs", json->source, rope->key, keys[i]);
    RopeScaling *s = &m->rope_scaling;
    s->factor = hf_real(json, rope, keys[0], 0);
    s->low_freq_factor = hf_real(json, rope, keys[1], 0);
    s->high_freq_factor = hf_real(json, rope, keys[2], 0);
    s->original_max_position_embeddings = hf_int(json, rope, keys[3], 0);
    if (!(s->factor >= 1) || !(s->low_freq_factor > 0) || !(s->high_freq_factor > s->low_freq_factor))
        die("%s: %s needs factor >= 1 and 0 < low_freq_factor < high_freq_factor; it has %g, %g and %g", json->source,
            rope->key, s->factor, s->low_freq_factor, s->high_freq_factor);
}

static inline void hf_read_sizes(const Json *json, const HfClass *c, ModelConfig *m) {
    const JsonNode *root = json_root(json);
    m->vocab_size = hf_required_int(json, "vocab_size");
    m->hidden_size = hf_required_int(json, "hidden_size");
    m->intermediate_size = hf_required_int(json, "intermediate_size");
    m->num_layers = hf_required_int(json, "num_hidden_layers");
    m->num_heads = hf_required_int(json, "num_attention_heads");
    // The value null means as many as attention heads. A missing key means the class's default.
    const bool kv_missing = !json_member(json, root, "num_key_value_heads");
    m->num_kv_heads =
        hf_int(json, root, "num_key_value_heads", kv_missing && c->num_kv_heads ? c->num_kv_heads : m->num_heads);
    m->head_dim = hf_int(json, root, "head_dim", c->head_dim);
    if (m->head_dim == 0) {
        if (m->hidden_size % m->num_heads)
            die("%s: hidden_size = %lld is not a multiple of num_attention_heads = %lld, and there is no head_dim",
                json->source, (long long)m->hidden_size, (long long)m->num_heads);
        m->head_dim = m->hidden_size / m->num_heads;
    }
    m->max_position_embeddings = hf_int(json, root, "max_position_embeddings", c->max_position_embeddings);
    const bool missing = !json_member(json, root, "sliding_window");  // means transformers' default; null means none
    if (hf_is_mistral(c)) m->sliding_window = hf_int(json, root, "sliding_window", missing ? 4096 : 0);
}

// Writes the last part of a path, for messages and logs. A name that does not fit is cut.
static inline void hf_folder_name(const char *folder, char *out, size_t capacity) {
    size_t end = strlen(folder);
    while (end > 1 && folder[end - 1] == '/') end--;
    size_t start = end;
    while (start > 0 && folder[start - 1] != '/') start--;
    snprintf(out, capacity, "%.*s", (int)(end - start), folder + start);
}

// Reads FOLDER/config.json. The caller frees m->source, or keeps *m to the end of the program. Dies if the file cannot
// be read, has a wrong value, or has a model that is not supported.
static inline void hf_config_read(ModelConfig *m, const char *folder) {
    char path[PATH_CAPACITY];
    Failure failure;
    Json json;
    format_checked(path, sizeof path, "%s/config.json", folder);
    if (!json_parse_file(&json, path, &failure)) die("%s", failure.text);
    const HfClass *c = hf_class_of(&json);
    hf_refuse_unsupported(&json, c);
    hf_refuse_variants(&json, c);
    memset(m, 0, sizeof *m);
    hf_folder_name(folder, m->name, sizeof m->name);
    m->family = c->family;
    m->qkv_bias = c->family == FAMILY_QWEN2;
    m->qk_norm = c->family == FAMILY_QWEN3;
    hf_read_sizes(&json, c, m);
    hf_read_rope(&json, m);
    m->tie_word_embeddings = hf_bool(&json, "tie_word_embeddings", false);
    m->rms_norm_eps = hf_real(&json, json_root(&json), "rms_norm_eps", 1e-6);
    m->initializer_range = hf_real(&json, json_root(&json), "initializer_range", 0.02);
    m->bos_token_id = hf_token_id(&json, "bos_token_id", c->bos_token_id, m->vocab_size);
    m->eos_token_id = hf_token_id(&json, "eos_token_id", c->eos_token_id, m->vocab_size);
    m->source = xstrdup(json.file + json_root(&json)->begin);  // without a byte order mark
    json_free(&json);
    model_config_check(m);
}

// ---- writing

static inline void hf_add_token_id(JsonText *out, const char *key, int64_t id) {
    if (id >= 0) json_text_add(out, "  \"%s\": %lld,\n", key, (long long)id);
    else json_text_add(out, "  \"%s\": null,\n", key);
}

static inline void hf_add_real(JsonText *out, const char *indent, const char *key, double value, const char *after) {
    json_text_add(out, "%s\"%s\": ", indent, key);
    json_text_add_real(out, value);
    json_text_add(out, "%s\n", after);
}

static inline void hf_add_rope(JsonText *out, const ModelConfig *m) {
    const RopeScaling *s = &m->rope_scaling;
    hf_add_real(out, "  ", "rope_theta", m->rope_theta, ",");
    if (s->factor <= 0) {
        json_text_add(out, "  \"rope_scaling\": null,\n");
        return;
    }
    json_text_add(out, "  \"rope_scaling\": {\n    \"rope_type\": \"llama3\",\n");
    hf_add_real(out, "    ", "factor", s->factor, ",");
    hf_add_real(out, "    ", "low_freq_factor", s->low_freq_factor, ",");
    hf_add_real(out, "    ", "high_freq_factor", s->high_freq_factor, ",");
    json_text_add(out, "    \"original_max_position_embeddings\": %lld\n  },\n",
                  (long long)s->original_max_position_embeddings);
}

// Returns the text of a config.json with all that ModelConfig holds, to be freed with json_text_free. `dtype`:
// transformers' name for the dtype of the weights, such as "bfloat16".
static inline JsonText hf_config_text(const ModelConfig *m, const char *dtype) {
    const HfClass *c = hf_classes();
    while (c->family != m->family) c++;
    const struct {
        const char *key;
        int64_t value;
    } sizes[] = {{"vocab_size", m->vocab_size},
                 {"hidden_size", m->hidden_size},
                 {"intermediate_size", m->intermediate_size},
                 {"num_hidden_layers", m->num_layers},
                 {"num_attention_heads", m->num_heads},
                 {"num_key_value_heads", m->num_kv_heads},
                 {"head_dim", m->head_dim},
                 {"max_position_embeddings", m->max_position_embeddings}};
    JsonText out = {NULL, 0, 0};
    json_text_add(&out, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\",\n", c->architecture,
                  c->model_type);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        json_text_add(&out, "  \"%s\": %lld,\n", sizes[i].key, (long long)sizes[i].value);
    hf_add_rope(&out, m);
    hf_add_real(&out, "  ", "rms_norm_eps", m->rms_norm_eps, ",");
    hf_add_real(&out, "  ", "initializer_range", m->initializer_range, ",");
    hf_add_token_id(&out, "bos_token_id", m->bos_token_id);
    hf_add_token_id(&out, "eos_token_id", m->eos_token_id);
    if (m->family != FAMILY_QWEN2) json_text_add(&out, "  \"attention_bias\": false,\n");
    if (m->family == FAMILY_LLAMA) json_text_add(&out, "  \"mlp_bias\": false,\n");
    else json_text_add(&out, "  \"use_sliding_window\": false,\n");
    json_text_add(&out, "  \"attention_dropout\": 0.0,\n  \"hidden_act\": \"silu\",\n  \"tie_word_embeddings\": %s,\n",
                  m->tie_word_embeddings ? "true" : "false");
    json_text_add(&out, "  \"torch_dtype\": \"%s\",\n  \"use_cache\": true\n}\n", dtype);
    return out;
}

// Returns the text of the config.json that the model was read from, with another dtype of the weights, to be freed with
// json_text_free. All other keys and values stay, also those that this program does not know. transformers 5 calls the
// dtype "dtype", transformers 4 "torch_dtype". transformers needs a model_type.
static inline JsonText hf_config_source_text(const ModelConfig *m, const char *dtype) {
    Json json;
    Failure failure;
    JsonText out = {NULL, 0, 0};
    char quoted[64];
    json_text_add(&out, "%s", m->source);
    if (!json_parse(&json, "config.json", out.data, out.size, &failure)) die("%s", failure.text);
    const HfClass *c = hf_class_of(&json);
    const JsonNode *root = json_root(&json);
    const bool newer = json_member(&json, root, "dtype"), older = json_member(&json, root, "torch_dtype") || !newer;
    format_checked(quoted, sizeof quoted, "\"%s\"", dtype);
    if (newer) json_text_set(&out, "dtype", quoted);
    if (older) json_text_set(&out, "torch_dtype", quoted);
    format_checked(quoted, sizeof quoted, "\"%s\"", c->model_type);
    if (!hf_member(&json, root, "model_type")) json_text_set(&out, "model_type", quoted);
    json_free(&json);
    return out;
}

// Writes FOLDER/config.json and adds it to `list` (which may be NULL). Returns false on failure.
static inline bool hf_config_write(const ModelConfig *m, const char *folder, const char *dtype, FileList *list,
                                   Failure *failure) {
    JsonText text = m->source ? hf_config_source_text(m, dtype) : hf_config_text(m, dtype);
    bool ok = file_write(folder, "config.json", text.data, (int64_t)text.size, list, failure);
    json_text_free(&text);
    return ok;
}

#endif
