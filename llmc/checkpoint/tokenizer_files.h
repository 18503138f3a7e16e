// Files of a tokenizer, as transformers names them, and its table: they go into checkpoints and exports.
// They are small, and stay in memory because their folder may be gone when a checkpoint or export is written.
#ifndef LLMC_TOKENIZER_FILES_H
#define LLMC_TOKENIZER_FILES_H

#include "../base/file_io.h"

enum { TOKENIZER_FILES = 11, TOKENIZER_SOURCES = 3, TOKENIZER_TABLE = 10 };

typedef struct {
    char *folder;                   // from which they were read; NULL: none
    char *data[TOKENIZER_FILES];    // in the order of tokenizer_file_names(); NULL: the folder lacks the file
    size_t sizes[TOKENIZER_FILES];  // bytes
} TokenizerFiles;

// Returns the names of these files. Each of the first TOKENIZER_SOURCES is enough for a tokenizer.
static inline const char *const *tokenizer_file_names(void) {
    static const char *const names[TOKENIZER_FILES] = {
        "tokenizer.json",         "tokenizer.model",         "vocab.json",        "tokenizer_config.json",
        "generation_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt",
        "chat_template.jinja",    "chat_template.json",      "tokens.tokenizer"};
    return names;
}

// True if the files make a tokenizer.
static inline bool tokenizer_is_known(const TokenizerFiles *f) {
    for (int i = 0; i < TOKENIZER_SOURCES; i++)
        if (f->data[i]) return true;
    return false;
}

static inline void tokenizer_files_free(TokenizerFiles *f) {
    for (int i = 0; i < TOKENIZER_FILES; i++) free(f->data[i]);
    free(f->folder);
    memset(f, 0, sizeof *f);
}

// Reads those files that a folder has, in place of earlier ones. Dies if one is there and cannot be read.
static inline void tokenizer_files_read(TokenizerFiles *f, const char *folder) {
    char path[PATH_CAPACITY];
    tokenizer_files_free(f);
    f->folder = xstrdup(folder);
    for (int i = 0; i < TOKENIZER_FILES; i++) {
        format_checked(path, sizeof path, "%s/%s", folder, tokenizer_file_names()[i]);
        if (!path_exists(path)) continue;
        f->data[i] = read_file(path, &f->sizes[i]);
        if (!f->data[i])
            die("cannot read %s: %s; checkpoints and exports get a copy of it: replace or remove it", path,
                read_words());
    }
}

// Writes the files (NULL: none) to a folder, and adds them to `list`.
static inline bool tokenizer_files_write(const TokenizerFiles *f, const char *folder, FileList *list,
                                         Failure *failure) {
    bool ok = true;
    for (int i = 0; f && ok && i < TOKENIZER_FILES; i++)
        if (f->data[i])
            ok = file_write(folder, tokenizer_file_names()[i], f->data[i], (int64_t)f->sizes[i], list, failure);
    return ok;
}

#endif
