// Reads config.json, lays out its parameter table (up to 8 layers), writes config.json and reads it again.
#include "fuzz.h"

static void config_check_table(const ModelConfig *m) {
    ParameterTable t = parameter_table(m);
    int64_t end = 0, sum = 0;
    for (int64_t i = 0; i < t.count; i++) {
        const Parameter *p = &t.entries[i];
        FUZZ_CHECK(p->rows > 0 && p->cols >= 0 && p->offset >= 0 && parameter_find(&t, p->name) == p);
        end = max_i64(end, p->offset + parameter_elements(p));
        sum += parameter_elements(p);
    }
    FUZZ_CHECK(end <= t.total && sum == t.num_parameters && sum <= t.total);
    parameter_table_free(&t);
}

static void config_check_same(const ModelConfig *a, const ModelConfig *b) {
    JsonText differs = checkpoint_model_mismatch(a, b);
    FUZZ_CHECK(differs.size == 0 && strcmp(a->name, b->name) == 0 && a->initializer_range == b->initializer_range);
    FUZZ_CHECK(a->qkv_bias == b->qkv_bias && a->qk_norm == b->qk_norm);
    FUZZ_CHECK(a->max_position_embeddings == b->max_position_embeddings);
    FUZZ_CHECK(a->bos_token_id == b->bos_token_id && a->eos_token_id == b->eos_token_id);
    json_text_free(&differs);
}

static void config_run(const uint8_t *data, size_t size) {
    ModelConfig m, again;
    Failure failure;
    FileList list = {NULL, 0};
    fuzz_write("config.json", data, size);
    hf_config_read(&m, fuzz()->folder);
    if (m.num_layers <= 8) config_check_table(&m);
    const double frequency = rope_inverse_frequency(&m, m.head_dim / 2 - 1);
    FUZZ_CHECK(!isnan(frequency));
    FUZZ_CHECK(hf_config_write(&m, fuzz()->folder, "bfloat16", &list, &failure));
    hf_config_read(&again, fuzz()->folder);
    config_check_same(&m, &again);
    file_list_free(&list);
    fuzz_free(m.source), fuzz_free(again.source);
}

static size_t config_seed(int i, uint8_t *out) {
    static const char *const seeds[] = {
        ("{'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'vocab_size': 643, 'hidden_size': 32,"
         " 'intermediate_size': 48, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'num_key_value_heads': 2,"
         " 'head_dim': 16, 'hidden_act': 'silu', 'rms_norm_eps': 1e-5, 'rope_theta': 10000.0,"
         " 'max_position_embeddings': 512, 'tie_word_embeddings': true, 'initializer_range': 0.05,"
         " 'torch_dtype': 'float32', 'bos_token_id': 1, 'eos_token_id': [2, 3],"
         " 'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,"
         " 'original_max_position_embeddings': 8192}}"),
        ("{'architectures': ['Qwen3ForCausalLM'], 'vocab_size': 1000, 'hidden_size': 64, 'intermediate_size': 128,"
         " 'num_hidden_layers': 3, 'num_attention_heads': 8, 'num_key_value_heads': null, 'attention_bias': false,"
         " 'use_sliding_window': false, 'layer_types': ['full_attention'], 'attention_dropout': 0.0,"
         " 'rope_parameters': {'rope_theta': 1000000, 'type': 'default', 'partial_rotary_factor': 1}}"),
        ("{'model_type': 'qwen2', 'vocab_size': 1000, 'hidden_size': 64, 'intermediate_size': 128,"
         " 'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 1, 'bos_token_id': null,"
         " 'mlp_bias': false}")};
    return i < (int)(sizeof seeds / sizeof seeds[0]) ? fuzz_text(out, seeds[i]) : 0;
}

FUZZ_TARGET(config)
