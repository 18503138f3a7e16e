// Reads the golden values that dev/reference/make_goldens.py made with transformers.
#ifndef DEV_TEST_GOLDEN_H
#define DEV_TEST_GOLDEN_H

#include "../../../llmc/config/hf_config.h"
#include "../../../llmc/checkpoint/safetensors.h"

// One golden model: its configuration and its file of tensors. make_goldens.py says which tensors that file has.
typedef struct {
    Safetensors st;
    ModelConfig m;
    int64_t B, T;  // tokens are [B, T + 1]
    int32_t *tokens;
} Golden;

static inline const Safetensor *golden_tensor(const Golden *g, const char *prefix, const char *name) {
    char full[160];
    format_checked(full, sizeof full, "%s%s", prefix, name);
    const Safetensor *t = safetensors_find(&g->st, full);
    if (!t) die("the golden has no tensor %s", full);
    return t;
}

// Returns the tensor PREFIX + NAME as fp32, which the caller frees. Sets *count to its number of elements, unless
// `count` is NULL.
static inline float *golden_values(const Golden *g, const char *prefix, const char *name, int64_t *count) {
    Failure failure;
    const Safetensor *t = golden_tensor(g, prefix, name);
    float *values = (float *)xcalloc((size_t)t->elements, sizeof(float));
    if (!safetensors_read(&g->st, t, 0, t->elements, true, values, &failure)) die("%s", failure.text);
    if (count) *count = t->elements;
    return values;
}

static inline float golden_number(const Golden *g, const char *name) {
    float *values = golden_values(g, "", name, NULL), number = values[0];
    free(values);
    return number;
}

// Opens GOLDENS/NAME.safetensors and reads the model from GOLDENS/NAME.config.json. Copies that file to
// SCRATCH/NAME/config.json, since hf_config_read reads a folder.
static inline Golden golden_open(const char *goldens, const char *scratch, const char *name) {
    Golden g;
    Failure failure;
    char path[PATH_CAPACITY], folder[PATH_CAPACITY];
    memset(&g, 0, sizeof g);
    format_checked(path, sizeof path, "%s/%s.safetensors", goldens, name);
    if (!safetensors_open(&g.st, path, &failure)) die("%s", failure.text);
    format_checked(path, sizeof path, "%s/%s.config.json", goldens, name);
    format_checked(folder, sizeof folder, "%s/%s", scratch, name);
    size_t size;
    char *config = read_file(path, &size);
    if (!config || !folder_create(folder, true, &failure) ||
        !file_write(folder, "config.json", config, (int64_t)size, NULL, &failure))
        die("golden %s: its config cannot be copied", name);
    free(config);
    hf_config_read(&g.m, folder);
    const Safetensor *t = golden_tensor(&g, "", "tokens");
    const SafetensorsFile *file = &g.st.files[t->file];
    g.tokens = (int32_t *)xcalloc((size_t)t->elements, sizeof(int32_t));
    if (t->type != ST_I32 || !file_read_at(file->fd, file->path, t->offset, g.tokens, t->elements * 4, &failure))
        die("golden %s: its tokens are not int32, or cannot be read", name);
    g.B = t->shape[0], g.T = t->shape[1] - 1;
    return g;
}

static inline void golden_close(Golden *g) {
    safetensors_close(&g->st);
    free(g->tokens);
}

// Fills inputs and targets, each [B, T].
static inline void golden_batch(const Golden *g, int32_t *inputs, int32_t *targets) {
    for (int64_t b = 0; b < g->B; b++)
        for (int64_t i = 0; i < g->T; i++) {
            inputs[b * g->T + i] = g->tokens[b * (g->T + 1) + i];
            targets[b * g->T + i] = g->tokens[b * (g->T + 1) + i + 1];
        }
}

#endif
