// Tests hf_config.h: config.json of Llama, Qwen2 and Qwen3 models in both RoPE styles, defaults, refusals, and the
// round trip of every preset.
#include "../../llmc/config/hf_config.h"
#include "../../llmc/config/supported.h"
#include "lib/check.h"
#include "lib/scratch.h"

static void write_config(const char *text) { scratch_file(scratch, "config.json", text); }

#define SIZES                                                                                            \
    "\"vocab_size\": 1000, \"hidden_size\": 128, \"intermediate_size\": 256, \"num_hidden_layers\": 2, " \
    "\"num_attention_heads\": 4"
#define LLAMA "{\"architectures\": [\"LlamaForCausalLM\"], " SIZES
#define QWEN2 "{\"architectures\": [\"Qwen2ForCausalLM\"], \"model_type\": \"qwen2\", " SIZES
#define QWEN3 "{\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"qwen3\", " SIZES
#define MISTRAL "{\"architectures\": [\"MistralForCausalLM\"], \"model_type\": \"mistral\", " SIZES
#define LLAMA3_ROPE \
    "\"factor\": 8.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 8192"

static ModelConfig read_text(const char *text) {
    ModelConfig m;
    write_config(text);
    hf_config_read(&m, scratch);
    return m;
}

static void read_action(void *text) { read_text((const char *)text); }

// True if two models have the same values, whatever their names and files.
static bool same_model(ModelConfig a, const ModelConfig *b) {
    memcpy(a.name, b->name, sizeof a.name);
    a.source = b->source;
    return memcmp(&a, b, sizeof a) == 0;
}

static void test_published_llama(void) {
    // The config.json of meta-llama/Llama-3.2-1B (transformers 4).
    ModelConfig preset,
        m = read_text("{\"architectures\": [\"LlamaForCausalLM\"], \"attention_bias\": false, \"attention_dropout\": "
                      "0.0, \"bos_token_id\": 128000, \"eos_token_id\": 128001, \"head_dim\": 64,"
                      "\"hidden_act\": \"silu\", \"hidden_size\": 2048, \"initializer_range\": 0.02, "
                      "\"intermediate_size\": 8192, \"max_position_embeddings\": 131072, \"mlp_bias\": false,"
                      "\"model_type\": \"llama\", \"num_attention_heads\": 32, \"num_hidden_layers\": 16, "
                      "\"num_key_value_heads\": 8, \"pretraining_tp\": 1, \"rms_norm_eps\": 1e-05,"
                      "\"rope_scaling\": {\"factor\": 32.0, \"high_freq_factor\": 4.0, \"low_freq_factor\": 1.0, "
                      "\"original_max_position_embeddings\": 8192, \"rope_type\": \"llama3\"},"
                      "\"rope_theta\": 500000.0, \"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\", "
                      "\"transformers_version\": \"4.45.0.dev0\", \"use_cache\": true, \"vocab_size\": 128256}");
    model_config_preset(&preset, "llama3.2-1b");
    CHECK(same_model(m, &preset), "the config equals the preset");
    const char *name = strrchr(scratch, '/') + 1;
    CHECK(strcmp(m.name, name) == 0, "the model has the name of its folder; found %s", m.name);
    char out[128];
    hf_folder_name(scratch_path("/"), out, sizeof out);
    CHECK(strcmp(out, name) == 0, "slashes at the end of a path do not count; found %s", out);
}

static void test_defaults(void) {
    ModelConfig m = read_text(LLAMA "}");
    CHECK(m.family == FAMILY_LLAMA && m.num_kv_heads == 4 && m.head_dim == 32 && !m.tie_word_embeddings &&
              !m.qkv_bias && !m.qk_norm,
          "a Llama config that states only its sizes gets transformers' defaults: shape of the heads, no biases, no "
          "QK-norm, not tied");
    CHECK(m.rms_norm_eps == 1e-6 && m.rope_theta == 10000 && m.rope_scaling.factor == 0 &&
              m.initializer_range == 0.02 && m.max_position_embeddings == 2048,
          "a Llama config that states only its sizes gets transformers' defaults: RoPE, norms, initial weights, "
          "positions");
    CHECK(m.bos_token_id == 1 && m.eos_token_id == 2, "a Llama config without token ids gets transformers' defaults");
    m = read_text("{\"model_type\": \"qwen2\", " SIZES ", \"num_key_value_heads\": null}");
    CHECK(m.family == FAMILY_QWEN2 && m.qkv_bias && !m.qk_norm && m.num_kv_heads == 4 && m.head_dim == 32 &&
              m.bos_token_id == -1 && m.max_position_embeddings == 32768,
          "a Qwen2 config has biases, and transformers' defaults for fields that are missing or null");
    m = read_text(QWEN3 ", \"num_key_value_heads\": 2, \"tie_word_embeddings\": true, \"eos_token_id\": [7, 8], "
                        "\"bos_token_id\": 1000}");
    CHECK(m.family == FAMILY_QWEN3 && !m.qkv_bias && m.qk_norm && m.num_kv_heads == 2 && m.head_dim == 128 &&
              m.tie_word_embeddings,
          "a Qwen3 config has QK-norm, head_dim 128 by default, and the heads and tying that it states");
    CHECK(m.eos_token_id == 7 && m.bos_token_id == -1,
          "eos is the first of a list, and a bos outside the vocabulary is -1");
    m = read_text(QWEN2 ", \"num_key_value_heads\": 2, \"head_dim\": 64, \"sliding_window\": 4096, "
                        "\"use_sliding_window\": false, \"layer_types\": [\"full_attention\"], \"eos_token_id\": []}");
    CHECK(m.head_dim == 64 && m.eos_token_id == -1,
          "a Qwen2 config may state head_dim, and an empty list of eos tokens gives -1");
}

// Mistral's block is Llama's. A missing sliding_window is transformers' default, null is none.
static void test_mistral(void) {
    ModelConfig m = read_text(MISTRAL ", \"num_key_value_heads\": 2, \"hidden_act\": \"silu\", \"sliding_window\": "
                                      "null, \"rope_theta\": 1000000.0}");
    CHECK(m.family == FAMILY_LLAMA && m.num_kv_heads == 2 && m.head_dim == 32 && m.sliding_window == 0 && !m.qkv_bias &&
              m.rope_theta == 1e6 && m.max_position_embeddings == 131072,
          "a Mistral config is a Llama model, without a window if that is null");
    Failure failure;
    CHECK(hf_config_write(&m, scratch, "float32", NULL, &failure), "it can be written");
    char text[1024];
    size_t size;
    char *file = read_file(scratch_path("config.json"), &size);
    format_checked(text, sizeof text, "%s", file);
    free(file);
    CHECK(strstr(text, "MistralForCausalLM") && strstr(text, "\"model_type\": \"mistral\""), "as Mistral's: %s", text);
    m = read_text(MISTRAL ", \"num_key_value_heads\": 2}");
    CHECK(m.sliding_window == 4096, "a missing sliding_window is 4096");
    char message[768];
    Options o = options_default();
    o.sequence_length = 4096;
    CHECK(supported(CPU_TRAINER, &m, &o, 1, message, sizeof message) == 0, "a sequence within the window: %s", message);
    o.sequence_length = 4097;
    CHECK(supported(CPU_TRAINER, &m, &o, 1, message, sizeof message) == EXIT_UNSUPPORTED &&
              strstr(message, "a window of 4096 tokens (sliding_window)"),
          "a sequence past the window is refused: %s", message);
}

static void test_rope_styles(void) {
    static const char *const same[] = {
        LLAMA ", \"rope_theta\": 500000, \"rope_scaling\": {\"rope_type\": \"llama3\", " LLAMA3_ROPE "}}",
        LLAMA ", \"rope_theta\": 500000, \"rope_scaling\": {\"type\": \"llama3\", " LLAMA3_ROPE "}}",
        LLAMA ", \"rope_parameters\": {\"rope_theta\": 500000.0, \"rope_type\": \"llama3\", " LLAMA3_ROPE "}}",
        LLAMA ", \"rope_theta\": 500000.0, \"rope_scaling\": null, \"rope_parameters\": {\"rope_theta\": 500000.0, "
              "\"rope_type\": \"llama3\", " LLAMA3_ROPE "}}",
        LLAMA ", \"rope_parameters\": {\"full_attention\": {\"rope_theta\": 500000.0, \"rope_type\": \"llama3\", "
              "\"type\": \"llama3\", \"beta_fast\": null, " LLAMA3_ROPE "}, \"sliding_attention\": null}}"};
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        ModelConfig m = read_text(same[i]);
        const RopeScaling *s = &m.rope_scaling;
        CHECK(m.rope_theta == 500000 && s->factor == 8 && s->low_freq_factor == 1 && s->high_freq_factor == 4 &&
                  s->original_max_position_embeddings == 8192,
              "all styles give the same RoPE; this one is %s", same[i]);
    }
    ModelConfig m = read_text(LLAMA ", \"rope_parameters\": {\"rope_theta\": 1e6, \"rope_type\": \"default\"}}");
    CHECK(m.rope_theta == 1e6 && m.rope_scaling.factor == 0,
          "rope_parameters give rope_theta, and their type default means no scaling");
    m = read_text(LLAMA ", \"rope_theta\": 1e6, \"rope_scaling\": null}");
    CHECK(m.rope_theta == 1e6 && m.rope_scaling.factor == 0,
          "rope_theta may stand alone, and a rope_scaling of null means no scaling");
}

static void test_refused(void) {
    static const char *const cases[][2] = {
        {"", "expected a value"},
        {"[]", "not an object"},
        {"{}", "has no value for"},
        {LLAMA, "expected ',' or '}'"},
        {"{\"architectures\": [\"LlamaForCausalLM\"]}", "has no value for \"vocab_size\""},
        {"{\"architectures\": [\"LlamaForCausalLM\"], \"vocab_size\": null}", "has no value for \"vocab_size\""},
        {"{\"architectures\": [\"MixtralForCausalLM\"], " SIZES "}",
         "MixtralForCausalLM is not supported; LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and "
         "Qwen3ForCausalLM are"},
        {"{\"architectures\": [\"Phi3ForCausalLM\"], \"model_type\": \"phi3\", " SIZES "}",
         "Phi3ForCausalLM is not supported: its q, k, v and its gate, up are one matrix each"},
        {"{\"model_type\": \"gemma2\", " SIZES "}", "gemma2 is not supported: it has GELU in the MLP, norms that"},
        {"{\"architectures\": [\"Gemma3ForCausalLM\"], " SIZES "}", "Gemma3ForCausalLM is not supported: it has GELU"},
        {MISTRAL ", \"num_key_value_heads\": 4, \"layer_types\": [\"sliding_attention\"]}", "sliding_attention"},
        {MISTRAL ", \"num_key_value_heads\": 4, \"sliding_window\": 1.5}", "sliding_window: expected a whole number"},
        {"{\"architectures\": [\"Qwen3MoeForCausalLM\"], " SIZES "}", "Qwen3MoeForCausalLM is not supported"},
        {"{\"model_type\": \"gpt2\", " SIZES "}", "gpt2 is not supported"},
        {"{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"qwen2\", " SIZES "}", "expected \"llama\""},
        {"{\"model_type\": 3, " SIZES "}", "model_type: expected a string, found 3"},
        {"{\"architectures\": \"LlamaForCausalLM\", " SIZES "}",
         "architectures: expected an array that begins with the name of a class, such as [\"LlamaForCausalLM\"], found "
         "a string; there is no \"model_type\""},
        {"{\"architectures\": [], " SIZES "}", "found an empty array; there is no \"model_type\""},
        {"{\"architectures\": [3], " SIZES "}", "found an array that begins with a number; there is no"},
        {"{\"architectures\": null, " SIZES "}", "has no value for \"architectures\" or \"model_type\""},
        {LLAMA ", \"hidden_act\": \"gelu\"}", "hidden_act \"gelu\""},
        {LLAMA ", \"attention_bias\": true}", "attention_bias"},
        {QWEN3 ", \"attention_bias\": true}", "attention_bias"},
        {LLAMA ", \"mlp_bias\": true}", "mlp_bias"},
        {QWEN2 ", \"num_key_value_heads\": 2, \"use_sliding_window\": true}", "use_sliding_window"},
        {QWEN3 ", \"layer_types\": [\"full_attention\", \"sliding_attention\"]}", "sliding_attention"},
        {QWEN3 ", \"layer_types\": \"sliding_attention\"}", "layer_types: expected an array, found a string"},
        {LLAMA ", \"quantization_config\": {\"quant_method\": \"fp8\"}}", "quantization_config"},
        {LLAMA ", \"attention_dropout\": 0.1}", "attention_dropout"},
        {LLAMA ", \"partial_rotary_factor\": 0.5}", "partial_rotary_factor"},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0}}",
         "rope_type \"yarn\" is not supported; \"default\" and \"llama3\" are"},
        {LLAMA ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 4.0}}", "rope_type \"linear\""},
        {LLAMA ", \"rope_scaling\": 3}", "rope_scaling is a number"},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0}}",
         "has no value for \"low_freq_factor\""},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 4, "
               "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 8192}}",
         "low_freq_factor < high_freq_factor"},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": \"8\", \"low_freq_factor\": 1, "
               "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 8192}}",
         "rope_scaling.factor: expected a number, found \"8\""},
        {LLAMA ", \"rope_theta\": 10000, \"rope_parameters\": {\"rope_theta\": 500000}}",
         "rope_theta is 10000, but 500000"},
        {LLAMA ", \"rope_parameters\": {\"rope_theta\": 1e4}, \"rope_scaling\": {\"rope_type\": \"default\"}}",
         "both rope_parameters and rope_scaling"},
        {LLAMA ", \"rope_parameters\": {\"partial_rotary_factor\": 0.5}}", "partial_rotary_factor"},
        {LLAMA ", \"rope_scaling\": {\"factor\": 8.0}}",
         "rope_scaling.factor is not a value that rope_type \"default\""},
        {LLAMA ", \"rope_parameters\": {\"rope_type\": \"default\", \"mrope_section\": [16, 24, 24]}}",
         "rope_parameters.mrope_section is not a value that rope_type \"default\" uses"},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"attention_factor\": 1.2, " LLAMA3_ROPE "}}",
         "rope_scaling.attention_factor is not a value that rope_type \"llama3\" uses"},
        {LLAMA ", \"rope_scaling\": {\"rope_type\": \"default\", \"type\": \"yarn\"}}",
         "rope_scaling has rope_type \"default\" and type \"yarn\""},
        {LLAMA ", \"rope_parameters\": {\"full_attention\": {\"rope_type\": \"yarn\"}}}", "rope_type \"yarn\""},
        {LLAMA ", \"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\", \"factor\": 2}}}",
         "rope_parameters.full_attention.factor is not"},
        {LLAMA ", \"rope_parameters\": {\"full_attention\": {\"rope_theta\": 1e4}, \"sliding_attention\": {}}}",
         "rope_parameters has \"sliding_attention\" beside \"full_attention\""},
        {LLAMA ", \"rope_parameters\": {\"rope_theta\": 5e5, \"full_attention\": {}}}", "has \"rope_theta\" beside"},
        {LLAMA ", \"rope_parameters\": {\"full_attention\": 3}}", "full_attention is a number"},
        {LLAMA ", \"rope_parameters\": {\"layers_0\": {\"rope_theta\": 1e4}}}", "rope_parameters.layers_0 is not"},
        {LLAMA ", \"compression_config\": {\"format\": \"pack-quantized\"}}", "compression_config says that"},
        {LLAMA ", \"quantization\": {\"bits\": 4}}", "quantization says that"},
        {LLAMA ", \"sliding_window\": 4096}", "sliding_window is not supported"},
        {LLAMA ", \"use_sliding_window\": true}", "use_sliding_window is true"},
        {QWEN3 ", \"dual_chunk_attention_config\": {\"chunk_size\": 262144}}",
         "dual_chunk_attention_config is not supported, and is no setting of Qwen3ForCausalLM"},
        {QWEN3 ", \"no_rope_layers\": [1, 0]}", "no_rope_layers is not supported"},
        {LLAMA ", \"rope_theta\": Infinity}", "rope_theta: expected a number, found Infinity"},
        {LLAMA ", \"rope_theta\": -1}", "must be above 0"},
        {LLAMA ", \"rms_norm_eps\": 0}", "must be above 0"},
        {LLAMA ", \"rms_norm_eps\": \"1e-5\"}", "rms_norm_eps: expected a number"},
        {LLAMA ", \"tie_word_embeddings\": 1}", "tie_word_embeddings: expected true or false, found 1"},
        {LLAMA ", \"num_key_value_heads\": 3}", "not a multiple"},
        {LLAMA ", \"num_key_value_heads\": 0}", "num_key_value_heads"},
        {LLAMA ", \"head_dim\": 33}", "odd"},
        {"{\"architectures\": [\"LlamaForCausalLM\"], \"vocab_size\": 1000, \"hidden_size\": 130, "
         "\"intermediate_size\": 256, \"num_hidden_layers\": 2, \"num_attention_heads\": 4}",
         "hidden_size = 130 is not a multiple"},
        {"{\"architectures\": [\"LlamaForCausalLM\"], \"vocab_size\": 1e15}", "vocab_size: expected a whole number"},
        {"{\"architectures\": [\"LlamaForCausalLM\"], \"vocab_size\": 12.5}", "vocab_size: expected a whole number"},
        {"{\"architectures\": [\"LlamaForCausalLM\"], \"vocab_size\": 99999999, \"hidden_size\": 128, "
         "\"intermediate_size\": 256, \"num_hidden_layers\": 2, \"num_attention_heads\": 4}",
         "vocab_size = 99999999 is outside"},
        {QWEN2 "}", "not a multiple"}};  // 4 heads, and transformers' default of 32 key/value heads
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK_DIES(read_action, (void *)cases[i][0], cases[i][1], "%s is refused", cases[i][0]);
}

// A config.json that was read is written again as it was, but for the dtype.
static void test_source(void) {
    static const char *const keys = ", \"tie_word_embeddings\": true,\t\"num_key_value_heads\": 2, \"eos_token_id\": "
                                    "[3, 4, 5], \"use_cache\": false,\n"
                                    "\"mine\": {\"deep\": [1.50, {\"x\": NaN}]}, \"sliding_window\": null, ";
    static const struct {
        const char *start, *before, *after;  // the text is start, keys, before; it becomes start, keys, after
    } cases[] = {{QWEN3, "\"torch_dtype\": \"float32\", \"z\": \"\\u00e9\"}",
                  "\"torch_dtype\": \"bfloat16\", \"z\": \"\\u00e9\"}"},
                 {QWEN3, "\"dtype\": null}\n\n", "\"dtype\": \"bfloat16\"}\n\n"},
                 {QWEN3, "\"dtype\": \"float16\", \"torch_dtype\": \"float16\"}",
                  "\"dtype\": \"bfloat16\", \"torch_dtype\": \"bfloat16\"}"},
                 {QWEN2, "\"z\": 1}", "\"z\": 1,\n  \"torch_dtype\": \"bfloat16\"}"},
                 {LLAMA, "\"dtype\": \"float32\"}", "\"dtype\": \"bfloat16\",\n  \"model_type\": \"llama\"}"}};
    Failure failure = {"", false};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[2048], expected[2048];
        format_checked(text, sizeof text, "%s%s%s%s", i ? "" : "\xef\xbb\xbf", cases[i].start, keys, cases[i].before);
        format_checked(expected, sizeof expected, "%s%s%s", cases[i].start, keys, cases[i].after);
        ModelConfig m = read_text(text), back;
        CHECK(hf_config_write(&m, scratch, "bfloat16", NULL, &failure), "the config is written: %s", failure.text);
        char *found = read_file(scratch_path("config.json"), NULL);
        CHECK(found && strcmp(found, expected) == 0, "a config.json keeps its text but for the dtype: %s", found);
        hf_config_read(&back, scratch);
        CHECK(same_model(m, &back), "the model is the same after writing and reading: %s", found);
        free(found), free(m.source), free(back.source);
    }
}

static void missing_action(void *path) {
    ModelConfig m;
    hf_config_read(&m, (const char *)path);
}

static void test_round_trip(void) {
    char names[2048];
    Failure failure = {"", false};
    model_config_preset_names(names, sizeof names);
    int count = 0;
    for (char *name = strtok(names, ", "); name; name = strtok(NULL, ", "), count++) {
        ModelConfig m, back;
        model_config_preset(&m, name);
        if (!m.vocab_size) m.vocab_size = 512;
        CHECK(hf_config_write(&m, scratch, "bfloat16", NULL, &failure), "the config is written: %s", failure.text);
        hf_config_read(&back, scratch);
        CHECK(same_model(m, &back), "%s is the same after writing and reading", name);
    }
#define X(...) +1
    CHECK(count == 0 MODEL_PRESETS(X), "the list names all %d presets; found %d", 0 MODEL_PRESETS(X), count);
#undef X
    CHECK_DIES(missing_action, (void *)"/no/such/folder", "cannot read /no/such/folder/config.json: No such file",
               "a missing folder is refused");
}

// The config.json files of transformers 5 and 4 for the golden models (dev/reference) give equal models. Run the
// test from the root of the repository.
static void test_goldens(void) {
    static const char *const names[] = {"llama_tiny", "llama31_tiny", "qwen2_tiny", "qwen3_tiny"};
    for (int i = 0; i < 4; i++) {
        ModelConfig read[2];
        for (int style = 0; style < 2; style++) {
            char path[PATH_CAPACITY];
            format_checked(path, sizeof path, "dev/reference/goldens/%s.config%s.json", names[i], style ? ".v4" : "");
            char *text = read_file(path, NULL);
            if (!text) die("cannot read %s: %s (run from the root of the repository)", path, strerror(errno));
            read[style] = read_text(text);
            free(text);
        }
        CHECK(same_model(read[0], &read[1]), "%s: both styles give the same model", names[i]);
        CHECK((read[0].rope_scaling.factor > 0) == (i == 1) && read[0].qkv_bias == (i == 2) &&
                  read[0].qk_norm == (i == 3),
              "only llama31_tiny has RoPE scaling, only qwen2_tiny biases and only qwen3_tiny QK-norm; this is %s",
              names[i]);
    }
}

int main(void) {
    scratch_create();
    test_published_llama();
    test_defaults();
    test_mistral();
    test_rope_styles();
    test_refused();
    test_round_trip();
    test_source();
    test_goldens();
    scratch_remove();
    return check_report();
}
