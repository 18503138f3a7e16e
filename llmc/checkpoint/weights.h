// Weights of a Hugging Face folder: finds their files, checks that they fit the model, and loads them.
#ifndef LLMC_WEIGHTS_H
#define LLMC_WEIGHTS_H

#include <fnmatch.h>

#include "tensors.h"

// Fails unless lm_head in the files of a tied model has the same values as the embedding.
static inline bool checkpoint_check_tied(const Safetensors *st, const ParameterTable *t, const Safetensor *lm_head,
                                         Failure *failure) {
    const Parameter *embedding = parameter_find(t, "model.embed_tokens.weight");
    const Safetensor *tensor = safetensors_require(st, embedding->name, embedding->rows, embedding->cols, failure);
    const int64_t elements = parameter_elements(embedding), chunk = IO_CHUNK_BYTES / 8;
    if (!tensor || !safetensors_require(st, lm_head->name, embedding->rows, embedding->cols, failure)) return false;
    float *a = (float *)xcalloc((size_t)(2 * chunk), sizeof *a), *b = a + chunk;
    bool ok = true;
    for (int64_t done = 0; ok && done < elements; done += chunk) {
        const int64_t n = min_i64(chunk, elements - done);
        ok = safetensors_read(st, tensor, done, n, true, a, failure) &&
             safetensors_read(st, lm_head, done, n, true, b, failure) &&
             (memcmp(a, b, (size_t)n * sizeof *a) == 0 ||
              fail(failure,
                   "%s: config.json ties lm_head.weight to %.200s, but they differ; set \"tie_word_embeddings\": "
                   "false to train both",
                   st->files[lm_head->file].path, embedding->name));
    }
    free(a);
    return ok;
}

// Fails unless the files have the tensor, with its shape, in a dtype that can be read.
static inline bool checkpoint_check_tensor(const Safetensors *st, const Parameter *p, Failure *failure) {
    const Safetensor *tensor = safetensors_require(st, p->name, p->rows, p->cols, failure);
    const char *other = safetensors_tied_name(p->name);
    if (!tensor && other && safetensors_find(st, other) && !safetensors_find(st, p->name)) {
        const Failure cause = *failure;
        return fail(failure,
                    "%.1500s. If it is the same matrix as %s, set \"tie_word_embeddings\": true in config.json",
                    cause.text, other);
    }
    return tensor && (safetensors_is_float(tensor->type) ||
                      fail(failure,
                           "%s: tensor %s has dtype %s; it must be F32, BF16 or F16: use the original model, not "
                           "a quantized one",
                           st->files[tensor->file].path, p->name, safetensors_type_name(tensor->type)));
}

// Fails unless every tensor of the table exists with its shape and there are no other tensors. Exceptions are allowed:
// a tied lm_head that equals the embedding, and the RoPE tables in old Llama files. Call it before anything is loaded.
static inline bool checkpoint_check_tensors(const Safetensors *st, const ModelConfig *m, const ParameterTable *t,
                                            Failure *failure) {
    for (int64_t i = 0; i < t->count; i++)
        if (!checkpoint_check_tensor(st, &t->entries[i], failure)) return false;
    const char *const rope_table = ".rotary_emb.inv_freq";
    for (int64_t i = 0; st->count != t->count && i < st->count; i++) {
        const char *name = st->tensors[i].name;
        const size_t n = strlen(name), suffix = strlen(rope_table);
        if (m->tie_word_embeddings && strcmp(name, "lm_head.weight") == 0) {
            if (!checkpoint_check_tied(st, t, &st->tensors[i], failure)) return false;
            continue;
        }
        if (parameter_find(t, name) || (n > suffix && strcmp(name + n - suffix, rope_table) == 0)) continue;
        return fail(failure, "%s: tensor %.200s does not belong to a model with this config.json",
                    st->files[st->tensors[i].file].path, name);
    }
    return true;
}

// True if a model folder has model.safetensors or its index, from which weights are read.
static inline bool model_has_weights(const char *folder) {
    char path[PATH_CAPACITY];
    format_checked(path, sizeof path, "%s/model.safetensors", folder);
    if (path_exists(path)) return true;
    format_checked(path, sizeof path, "%s/model.safetensors.index.json", folder);
    return path_exists(path);
}

// For folders in which model_has_weights finds none: finds a file that seems to hold weights, in a format or under a
// name that this program does not read, and writes its name. Returns false if there is no such file. Dies if the folder
// cannot be opened or read.
static inline bool model_finds_other_weights(const char *folder, char *name, size_t capacity) {
    static const char *const patterns[] = {
        "*.safetensors",     "*.gguf", "*model*.bin", "*weights*.bin", "*model*.pt", "*weights*.pt", "*model*.pth",
        "consolidated*.pth", NULL};
    DIR *d = opendir(folder);
    if (!d) die("cannot open folder %s: %s", folder, strerror(errno));
    bool found = false;
    for (struct dirent *entry; !found && (entry = folder_next(d)) != NULL;) {
        for (const char *const *pattern = patterns; !found && *pattern; pattern++)
            found = fnmatch(*pattern, entry->d_name, 0) == 0;
        if (found) format_checked(name, capacity, "%s", entry->d_name);
    }
    if (!found && errno) die("cannot read folder %s: %s", folder, strerror(errno));
    closedir(d);
    return found;
}

// Opens the weights of a Hugging Face folder. A tied matrix that is stored as lm_head.weight alone gets the embedding's
// name. The caller closes the set with safetensors_close. On failure nothing stays open.
static inline bool model_open_weights(Safetensors *st, const char *folder, const ModelConfig *m, Failure *failure) {
    static const char *const embedding = "model.embed_tokens.weight";
    if (!safetensors_open_folder(st, folder, "model", failure)) return false;
    const Safetensor *lm_head = safetensors_find(st, safetensors_tied_name(embedding));
    if (!m->tie_word_embeddings || !lm_head || safetensors_find(st, embedding)) return true;
    char **name = &st->tensors[lm_head - st->tensors].name;
    free(*name);
    *name = xstrdup(embedding);
    return safetensors_sort(st, failure);
}

// Dies unless the safetensors of a Hugging Face folder fit the model. Reads only headers (and a tied lm_head with its
// embedding), so it can run before anything is allocated.
static inline void model_check_weights(const char *folder, const ModelConfig *m, const ParameterTable *t) {
    Safetensors st;
    Failure failure;
    if (!model_open_weights(&st, folder, m, &failure) || !checkpoint_check_tensors(&st, m, t, &failure))
        die("%s", failure.text);
    safetensors_close(&st);
}

// Loads the weights of any Hugging Face folder, or of a checkpoint, into the trainer and converts them to its storage
// type (to bf16: rounded to nearest even). Fails if a file cannot be read, or if a tensor does not fit the model or
// holds a value that is not finite.
static inline bool model_read_weights(const char *folder, const ModelConfig *m, const ParameterTable *t,
                                      const TrainerState *s, Failure *failure) {
    Safetensors st;
    if (!model_open_weights(&st, folder, m, failure)) return false;
    const bool ok =
        checkpoint_check_tensors(&st, m, t, failure) && checkpoint_read_array(&st, t, s, STATE_WEIGHTS, failure);
    safetensors_close(&st);
    return ok;
}

static inline void model_load_weights(const char *folder, const ModelConfig *m, const ParameterTable *t,
                                      const TrainerState *s) {
    Failure failure;
    if (!model_read_weights(folder, m, t, s, &failure)) die("%s", failure.text);
}

#endif
