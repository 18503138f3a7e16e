// Tests model_config.h: presets against published parameter counts, RoPE frequencies against transformers, and checks
// of sizes.
#include "../../llmc/config/model_config.h"
#include "../../llmc/config/parameters.h"
#include "lib/check.h"

// Published numbers of parameters (model cards, safetensors metadata on the hub).
static void test_parameter_counts(void) {
    static const struct {
        const char *name;
        int64_t parameters;
    } published[] = {{"llama3.2-1b", 1235814400},   {"llama3.2-3b", 3212749824},     {"llama3.1-8b", 8030261248},
                     {"llama3.1-70b", 70553706496}, {"llama3.1-405b", 405853388800}, {"qwen3-0.6b", 596049920},
                     {"qwen3-1.7b", 1720574976},    {"qwen3-4b", 4022468096},        {"qwen3-8b", 8190735360},
                     {"qwen3-14b", 14768307200},    {"qwen3-32b", 32762123264},      {"qwen2.5-0.5b", 494032768},
                     {"qwen2.5-1.5b", 1543714304},  {"qwen2.5-7b", 7615616512}};
    for (size_t i = 0; i < sizeof published / sizeof published[0]; i++) {
        ModelConfig m;
        CHECK(model_config_preset(&m, published[i].name), "there is a preset %s", published[i].name);
        model_config_check(&m);
        ParameterTable t = parameter_table(&m);
        CHECK(t.num_parameters == published[i].parameters, "%s has %lld parameters; published are %lld",
              published[i].name, (long long)t.num_parameters, (long long)published[i].parameters);
        parameter_table_free(&t);
    }
}

static void test_presets(void) {
    char names[2048];
    int count = 0;
    model_config_preset_names(names, sizeof names);
    CHECK(strncmp(names, "tiny, small, medium, llama3.2-1b, ", 34) == 0,
          "the list of presets begins with tiny, small, medium, llama3.2-1b; found %s", names);
    for (char *name = strtok(names, ", "); name; name = strtok(NULL, ", "), count++) {
        ModelConfig m;
        CHECK(model_config_preset(&m, name) && strcmp(m.name, name) == 0, "preset %s has its own name", name);
        const bool llama3 = strncmp(name, "llama3", 6) == 0, qwen2 = strncmp(name, "qwen2", 5) == 0,
                   qwen3 = strncmp(name, "qwen3", 5) == 0;
        CHECK(m.family == (qwen2   ? FAMILY_QWEN2
                           : qwen3 ? FAMILY_QWEN3
                                   : FAMILY_LLAMA) &&
                  m.qkv_bias == qwen2 && m.qk_norm == qwen3,
              "%s has the family of its name, with that family's biases and QK-norm", name);
        CHECK((m.rope_scaling.factor > 0) == llama3 && m.initializer_range == 0.02,
              "%s has initializer_range 0.02, and RoPE scaling exactly if it is a llama3", name);
        // Qwen2.5 has 1e-6 up to 7B, and 1e-5 in larger models.
        CHECK((m.rms_norm_eps == 1e-5 && !qwen3) || (m.rms_norm_eps == 1e-6 && (qwen2 || qwen3)),
              "%s has a norm epsilon of its family; found %g", name, m.rms_norm_eps);
        CHECK(m.num_heads % m.num_kv_heads == 0 &&
                  model_qkv_size(&m) == (m.num_heads + 2 * m.num_kv_heads) * m.head_dim,
              "%s: the number of heads is a multiple of that of key/value heads, and qkv has room for all heads", name);
        char repository[128] = "none";
        const bool published = llama3 || qwen2 || qwen3;
        CHECK(model_config_repository(name, repository, sizeof repository) == published &&
                  (!published || strcmp(model_config_nearest(repository), name) == 0),
              "the repository of %s has its name; found %s", name, repository);
        // GPU kernels take head_dim 64 and 128, and need sizes that are multiples of 16 (vocab_size: of 8). Hidden and
        // intermediate sizes of presets are multiples of 64.
        CHECK(m.head_dim == 64 || m.head_dim == 128, "%s: head_dim is 64 or 128; found %lld", name,
              (long long)m.head_dim);
        CHECK(m.hidden_size % 64 == 0 && m.intermediate_size % 64 == 0,
              "%s: hidden size and intermediate size are multiples of 64", name);
    }
#define X(...) +1
    CHECK(count == 0 MODEL_PRESETS(X), "the list names all %d presets; found %d", 0 MODEL_PRESETS(X), count);
#undef X
    ModelConfig m;
    static const char *const near[][2] = {{"llama-3.2-1b", "llama3.2-1b"},
                                          {"meta-llama/Llama-3.2-1B", "llama3.2-1b"},
                                          {"Meta-Llama-3.1-8B", "llama3.1-8b"},
                                          {"./Qwen3-4B-Base", "qwen3-4b"},
                                          {"qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"},
                                          {"tinny", "tiny"},
                                          {"llama3.2_3b", "llama3.2-3b"},
                                          {"qwen3-0.6b", "qwen3-0.6b"}};
    for (size_t i = 0; i < sizeof near / sizeof near[0]; i++) {
        const char *found = model_config_nearest(near[i][0]);
        CHECK(found && strcmp(found, near[i][1]) == 0, "the preset nearest to %s is %s: %s", near[i][0], near[i][1],
              found ? found : "none");
    }
    CHECK(!model_config_nearest("mistral-7b") && !model_config_nearest(""), "no preset is near to another model");
    CHECK(!model_config_preset(&m, "llama") && !model_config_preset(&m, "") && !model_config_preset(&m, "TINY"),
          "unknown presets are refused");
    CHECK(model_config_preset(&m, "tiny") && m.num_layers == 2 && m.hidden_size == 64 && m.vocab_size == 0,
          "preset tiny has 2 layers, hidden size 64, and no vocabulary of its own");
    CHECK(model_config_preset(&m, "small") && m.num_layers == 4 && m.hidden_size == 256 &&
              m.intermediate_size % 128 == 0 && model_qkv_size(&m) % 128 == 0,
          "preset small has 4 layers, hidden size 256, and intermediate and qkv sizes that are multiples of 128");
}

// Values of transformers 5.17 (ROPE_INIT_FUNCTIONS["llama3"], float32): kept, interpolated and divided frequencies.
static void test_rope(void) {
    static const struct {
        const char *model;
        int pair;
        double frequency;
    } expected[] = {{"llama3.2-1b", 0, 1.0},
                    {"llama3.2-1b", 5, 0.12868738174438477},
                    {"llama3.2-1b", 14, 0.0032114461064338684},
                    {"llama3.2-1b", 15, 0.0012905480107292533},
                    {"llama3.2-1b", 16, 0.000429556705057621},
                    {"llama3.2-1b", 17, 9.708286233944818e-05},
                    {"llama3.2-1b", 18, 1.9461638657958247e-05},
                    {"llama3.2-1b", 20, 8.570255886297673e-06},
                    {"llama3.2-1b", 31, 9.418306490260875e-08},
                    {"llama3.1-8b", 1, 0.8146172165870667},
                    {"llama3.1-8b", 28, 0.0032114461064338684},
                    {"llama3.1-8b", 29, 0.0021665706299245358},
                    {"llama3.1-8b", 32, 0.0005248460220173001},
                    {"llama3.1-8b", 35, 9.556212171446532e-05},
                    {"llama3.1-8b", 36, 7.784655463183299e-05},
                    {"llama3.1-8b", 50, 4.411534519022098e-06},
                    {"llama3.1-8b", 63, 3.068925877869333e-07}};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        ModelConfig m;
        model_config_preset(&m, expected[i].model);
        const double got = rope_inverse_frequency(&m, expected[i].pair);
        // transformers computes in float32: a few roundings of 6e-8, and the interpolation cancels one digit.
        CHECK(fabs(got / expected[i].frequency - 1) < 2e-6,
              "%s, pair %d: the inverse frequency is %.10g; expected %.10g", expected[i].model, expected[i].pair, got,
              expected[i].frequency);
    }
    ModelConfig m;
    model_config_preset(&m, "qwen3-4b");
    CHECK(fabs(rope_inverse_frequency(&m, 32) - 1e-3) < 1e-15 && rope_inverse_frequency(&m, 0) == 1,
          "with theta 1e6, the middle inverse frequency is 1e-3 and the first is 1");
}

static void check_action(void *model) { model_config_check((const ModelConfig *)model); }

static void test_check(void) {
    ModelConfig good;
    model_config_preset(&good, "llama3.1-8b");
    model_config_check(&good);
#define BAD(change, message)                                             \
    {                                                                    \
        ModelConfig m = good;                                            \
        change;                                                          \
        CHECK_DIES(check_action, &m, message, "%s is refused", #change); \
    }
    BAD(m.vocab_size = 0, "vocab_size = 0 is outside 1..16777216")
    BAD(m.hidden_size = -1, "hidden_size = -1 is outside")
    BAD(m.intermediate_size = (int64_t)1 << 40, "intermediate_size = 1099511627776 is outside")
    BAD(m.num_layers = 0, "num_hidden_layers = 0")
    BAD(m.num_heads = 5000, "num_attention_heads = 5000")
    BAD(m.num_kv_heads = 0, "num_key_value_heads = 0")
    BAD(m.num_kv_heads = 5, "num_attention_heads = 32 is not a multiple of num_key_value_heads = 5")
    BAD(m.head_dim = 63, "head_dim = 63 is odd")
    BAD(m.head_dim = 2048, "head_dim = 2048 is outside")
    BAD(m.rms_norm_eps = 0, "must be above 0")
    BAD(m.rms_norm_eps = NAN, "must be above 0")
    BAD(m.rope_theta = -1, "must be above 0")
    BAD(m.initializer_range = 0, "must be above 0")
#undef BAD
}

int main(void) {
    test_parameter_counts();
    test_presets();
    test_rope();
    test_check();
    return check_report();
}
