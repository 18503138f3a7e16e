// The shape of a model: presets, derived sizes and the checks that hold for every model.
// It also has the frequencies of RoPE. Reading and writing a Hugging Face config.json is in hf_config.h.
#ifndef LLMC_MODEL_CONFIG_H
#define LLMC_MODEL_CONFIG_H

#include <math.h>

#include "../base/documents.h"
#include "../base/utils.h"

#define VOCABULARY_LARGEST (1 << 24)  // tokens

typedef enum { FAMILY_LLAMA, FAMILY_QWEN2, FAMILY_QWEN3 } ModelFamily;

// The "llama3" RoPE scaling of Llama 3.1 and later; factor 0 means none.
typedef struct {
    double factor, low_freq_factor, high_freq_factor;
    int64_t original_max_position_embeddings;
} RopeScaling;

typedef struct {
    char name[128];
    ModelFamily family;
    int64_t vocab_size;         // V; 0 until the shard's vocabulary is known (presets tiny, small and medium)
    int64_t hidden_size;        // C
    int64_t intermediate_size;  // F
    int64_t num_layers;         // L
    int64_t num_heads;          // NH
    int64_t num_kv_heads;       // NKV
    int64_t head_dim;           // HD
    bool tie_word_embeddings;   // lm_head shares the embedding's weight
    bool qkv_bias;              // Qwen2
    bool qk_norm;               // Qwen3: RMSNorm of each query and key head before RoPE
    double rms_norm_eps, rope_theta;
    RopeScaling rope_scaling;
    double initializer_range;  // standard deviation of the initial weights
    int64_t max_position_embeddings;
    int64_t sliding_window;              // Mistral: each token sees so many, itself included; 0: all
    int64_t bos_token_id, eos_token_id;  // -1: none
    char *source;                        // the JSON text of the config.json that it was read from; NULL: a preset
} ModelConfig;

// Rows of the fused q, k, v weight.
static inline int64_t model_qkv_size(const ModelConfig *m) {
    return (m->num_heads + 2 * m->num_kv_heads) * m->head_dim;
}

// The presets, one line a model: tiny, small and medium, which take the shard's vocabulary, and published
// configurations. The family decides qkv_bias and qk_norm. scale: factor of Llama 3's RoPE scaling; 0: none. bos, eos
// -1: no such token.
//    name              family  V       C      F      L    NH   NKV HD   tied  eps   theta     scale max_pos  bos eos
// clang-format off
#define MODEL_PRESETS(X) \
    X("tiny",           LLAMA, 0,      64,    192,   2,   2,   1,  64,  true,  1e-5, 10000.0,   0,  8192,   -1,     -1) \
    X("small",          LLAMA, 0,      256,   768,   4,   4,   2,  64,  true,  1e-5, 10000.0,   0,  8192,   -1,     -1) \
    X("medium",         LLAMA, 0,      768,   2048,  12,  12,  12, 64,  true,  1e-5, 10000.0,   0,  8192,   -1,     -1) \
    X("llama3.2-1b",    LLAMA, 128256, 2048,  8192,  16,  32,  8,  64,  true,  1e-5, 500000.0,  32, 131072, 128000, 128001) \
    X("llama3.2-3b",    LLAMA, 128256, 3072,  8192,  28,  24,  8,  128, true,  1e-5, 500000.0,  32, 131072, 128000, 128001) \
    X("llama3.1-8b",    LLAMA, 128256, 4096,  14336, 32,  32,  8,  128, false, 1e-5, 500000.0,  8,  131072, 128000, 128001) \
    X("llama3.1-70b",   LLAMA, 128256, 8192,  28672, 80,  64,  8,  128, false, 1e-5, 500000.0,  8,  131072, 128000, 128001) \
    X("llama3.1-405b",  LLAMA, 128256, 16384, 53248, 126, 128, 8,  128, false, 1e-5, 500000.0,  8,  131072, 128000, 128001) \
    X("qwen3-0.6b",     QWEN3, 151936, 1024,  3072,  28,  16,  8,  128, true,  1e-6, 1000000.0, 0,  40960,  151643, 151645) \
    X("qwen3-1.7b",     QWEN3, 151936, 2048,  6144,  28,  16,  8,  128, true,  1e-6, 1000000.0, 0,  40960,  151643, 151645) \
    X("qwen3-4b",       QWEN3, 151936, 2560,  9728,  36,  32,  8,  128, true,  1e-6, 1000000.0, 0,  40960,  151643, 151645) \
    X("qwen3-8b",       QWEN3, 151936, 4096,  12288, 36,  32,  8,  128, false, 1e-6, 1000000.0, 0,  40960,  151643, 151645) \
    X("qwen3-14b",      QWEN3, 151936, 5120,  17408, 40,  40,  8,  128, false, 1e-6, 1000000.0, 0,  40960,  151643, 151645) \
    X("qwen3-32b",      QWEN3, 151936, 5120,  25600, 64,  64,  8,  128, false, 1e-6, 1000000.0, 0,  40960,  151643, 151645) \
    X("qwen2.5-0.5b",   QWEN2, 151936, 896,   4864,  24,  14,  2,  64,  true,  1e-6, 1000000.0, 0,  32768,  151643, 151643) \
    X("qwen2.5-1.5b",   QWEN2, 151936, 1536,  8960,  28,  12,  2,  128, true,  1e-6, 1000000.0, 0,  131072, 151643, 151643) \
    X("qwen2.5-7b",     QWEN2, 152064, 3584,  18944, 28,  28,  4,  128, false, 1e-6, 1000000.0, 0,  131072, 151643, 151643)
// clang-format on

// Sets *m to the preset of that name. Returns false if there is none.
static inline bool model_config_preset(ModelConfig *m, const char *name) {
#define X(preset, fam, v, c, f, l, nh, nkv, hd, tied, eps, theta, scale, max_pos, bos, eos)        \
    if (strcmp(name, preset) == 0) {                                                               \
        memset(m, 0, sizeof *m);                                                                   \
        format_checked(m->name, sizeof m->name, "%s", preset);                                     \
        m->family = FAMILY_##fam;                                                                  \
        m->vocab_size = v, m->hidden_size = c, m->intermediate_size = f, m->num_layers = l;        \
        m->num_heads = nh, m->num_kv_heads = nkv, m->head_dim = hd, m->tie_word_embeddings = tied; \
        m->rms_norm_eps = eps, m->rope_theta = theta, m->rope_scaling.factor = scale;              \
        m->max_position_embeddings = max_pos, m->bos_token_id = bos, m->eos_token_id = eos;        \
    } else
    MODEL_PRESETS(X) { return false; }
#undef X
    m->qkv_bias = m->family == FAMILY_QWEN2;
    m->qk_norm = m->family == FAMILY_QWEN3;
    m->initializer_range = 0.02;
    if (m->rope_scaling.factor > 0) {
        m->rope_scaling.low_freq_factor = 1;
        m->rope_scaling.high_freq_factor = 4;
        m->rope_scaling.original_max_position_embeddings = 8192;
    }
    return true;
}

// The preset whose name, but for case and punctuation, is part of `name`: llama3.2-1b for meta-llama/Llama-3.2-1B. If
// there is none, the one at the least edit distance, if that is at most 2. NULL if none is near.
static inline const char *model_config_nearest(const char *name) {
    static const char *const presets[] = {
#define X(preset, ...) preset,
        MODEL_PRESETS(X)
#undef X
    };
    const char *slash = strrchr(name, '/'), *nearest = NULL;
    char given[128], known[128];
    int nearest_distance = 3;
    text_letters(slash ? slash + 1 : name, given, sizeof given);
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        text_letters(presets[i], known, sizeof known);
        const int distance = strstr(given, known) ? 0 : text_edit_distance(given, known);
        if (distance < nearest_distance) nearest = presets[i], nearest_distance = distance;
    }
    return nearest;
}

// Writes the names of all presets, separated by ", ".
static inline void model_config_preset_names(char *out, size_t capacity) {
    size_t n = 0;
    out[0] = 0;
#define X(preset, ...)                                                    \
    format_checked(out + n, capacity - n, "%s%s", n ? ", " : "", preset); \
    n += strlen(out + n);
    MODEL_PRESETS(X)
#undef X
}

// Writes the repository on the Hugging Face hub of the model that a preset is shaped like, "Qwen/Qwen3-0.6B", whose
// tokenizer has the preset's vocabulary. Returns false for tiny, small and medium: there is none.
static inline bool model_config_repository(const char *preset, char *out, size_t capacity) {
    static const char *const families[][2] = {{"llama", "meta-llama/Llama-"}, {"qwen", "Qwen/Qwen"}};
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++) {
        const size_t n = strlen(families[i][0]), length = strlen(preset);
        if (strncmp(preset, families[i][0], n) != 0) continue;
        format_checked(out, capacity, "%s%.*sB", families[i][1], (int)(length - n - 1), preset + n);
        return true;
    }
    return false;
}

// Checks the rules that every model must keep. Dies with the reason if one is broken.
static inline void model_config_check(const ModelConfig *m) {
    const struct {
        const char *name;
        int64_t value, largest;
    } sizes[] = {{"vocab_size", m->vocab_size, VOCABULARY_LARGEST},
                 {"hidden_size", m->hidden_size, 1 << 20},
                 {"intermediate_size", m->intermediate_size, 1 << 20},
                 {"num_hidden_layers", m->num_layers, 4096},
                 {"num_attention_heads", m->num_heads, 4096},
                 {"num_key_value_heads", m->num_kv_heads, 4096},
                 {"head_dim", m->head_dim, 1024}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        if (sizes[i].value < 1 || sizes[i].value > sizes[i].largest)
            die_with(EXIT_UNSUPPORTED, "model %s: %s = %lld is outside 1..%lld", m->name, sizes[i].name,
                     (long long)sizes[i].value, (long long)sizes[i].largest);
    if (m->num_heads % m->num_kv_heads)
        die_with(EXIT_UNSUPPORTED,
                 "model %s: num_attention_heads = %lld is not a multiple of num_key_value_heads = %lld", m->name,
                 (long long)m->num_heads, (long long)m->num_kv_heads);
    if (m->head_dim % 2)
        die_with(EXIT_UNSUPPORTED, "model %s: head_dim = %lld is odd; RoPE needs pairs", m->name,
                 (long long)m->head_dim);
    if (!(m->rms_norm_eps > 0) || !(m->rope_theta > 0) || !(m->initializer_range > 0))
        die("model %s: rms_norm_eps, rope_theta and initializer_range must be above 0", m->name);
}

// Returns the angle per position, in radians, of RoPE pair i (0 <= i < HD/2). With Llama 3's scaling (Llama 3.1's
// published rule), low frequencies are divided by `factor`, high ones stay, and frequencies between them are
// interpolated.
static inline double rope_inverse_frequency(const ModelConfig *m, int64_t i) {
    const double pi = 3.14159265358979323846;
    double frequency = exp2(-2.0 * (double)i / (double)m->head_dim * log2(m->rope_theta));
    const RopeScaling *s = &m->rope_scaling;
    if (s->factor <= 0) return frequency;
    double original = (double)s->original_max_position_embeddings;
    double wavelength = 2 * pi / frequency;
    if (wavelength < original / s->high_freq_factor) return frequency;
    if (wavelength > original / s->low_freq_factor) return frequency / s->factor;
    double smooth = (original / wavelength - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
    return (1 - smooth) * frequency / s->factor + smooth * frequency;
}

// Fills table [T, HD/2], in host memory, with (cosine, sine) pairs for positions 0 .. T-1. Computes them in double.
static inline void rope_table_fill(float *table, const ModelConfig *m, int64_t T) {
    const int64_t half = m->head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const double frequency = rope_inverse_frequency(m, i);
        for (int64_t t = 0; t < T; t++) {
            table[(t * half + i) * 2] = (float)cos((double)t * frequency);
            table[(t * half + i) * 2 + 1] = (float)sin((double)t * frequency);
        }
    }
}

// Rows of the embedding and of lm_head in memory: the vocabulary and rows of zeros up to a multiple of 8, which GEMMs
// on the GPU need. Checkpoints and exports have only the rows of the vocabulary.
static inline int64_t model_padded_vocabulary(const ModelConfig *m) { return round_up(m->vocab_size, 8); }

// The sizes of one micro-batch of a model, and where its documents lie.
typedef struct {
    int64_t B, T, R;      // sequences, tokens each, rows R = B*T
    int64_t V, C, F, L;   // vocabulary, hidden, intermediate, layers
    int64_t NH, NKV, HD;  // query heads, key/value heads, head dimension
    int64_t QKV, ATT;     // columns of the packed q, k, v and of the attention output
    int64_t VP;           // model_padded_vocabulary()
    Documents documents;
} Dims;

static inline Dims model_dims(const ModelConfig *m, int64_t B, int64_t T) {
    return (Dims){B,
                  T,
                  B * T,
                  m->vocab_size,
                  m->hidden_size,
                  m->intermediate_size,
                  m->num_layers,
                  m->num_heads,
                  m->num_kv_heads,
                  m->head_dim,
                  model_qkv_size(m),
                  m->num_heads * m->head_dim,
                  model_padded_vocabulary(m),
                  {NULL, NULL}};
}

#endif
