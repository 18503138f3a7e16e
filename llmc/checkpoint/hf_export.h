// Exports: a folder of config.json, weights and tokenizer files that transformers loads.
// It appears whole, in place of an earlier export or of nothing.
#ifndef LLMC_HF_EXPORT_H
#define LLMC_HF_EXPORT_H

#include "manifest.h"
#include "tensors.h"

// Files beside the weights that an export takes over from the folder the run started from.
static inline const char *const *export_copied_files(void) {
    static const char *const names[] = {"generation_config.json",
                                        "tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "added_tokens.json",
                                        "vocab.json",
                                        "merges.txt",
                                        "tokenizer.model",
                                        "chat_template.jinja",
                                        "chat_template.json",
                                        NULL};
    return names;
}

static inline bool export_is_weights(const char *name) {
    const size_t n = strlen(name);
    return strncmp(name, "model", 5) == 0 && n > 12 && strcmp(name + n - 12, ".safetensors") == 0;
}

// Whether an export may have written a file of this name.
static inline bool export_owns(const char *name) {
    static const char *const names[] = {FOLDER_MARKER, EXPORT_HASHES, "config.json", "model.safetensors.index.json"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(name, names[i]) == 0) return true;
    for (const char *const *copied = export_copied_files(); *copied; copied++)
        if (strcmp(name, *copied) == 0) return true;
    return export_is_weights(name);
}

// An export may make a new folder, fill an empty one, or replace an earlier export; it must not delete anything else.
// The names are those of every model, and another program may have written weights into an export: an earlier export
// has weights that this program wrote.
static inline bool export_may_replace(const char *dir, Failure *failure) {
    if (!path_exists(dir)) return true;
    DIR *d = folder_open(dir);
    if (!d) return fail(failure, "cannot open folder %s: it is %s", dir, path_words(dir).text);
    bool ok = true, empty = true, weights = false;
    for (struct dirent *entry; ok && (entry = readdir(d)) != NULL;) {
        char path[PATH_CAPACITY];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 ||
            strcmp(entry->d_name, FOLDER_MARKER) == 0)
            continue;
        format_checked(path, sizeof path, "%s/%s", dir, entry->d_name);
        empty = false, weights = weights || export_is_weights(entry->d_name);
        if (!export_owns(entry->d_name))
            ok =
                fail(failure, "%s holds %.255s, which is not part of an export; give a new folder", dir, entry->d_name);
        else if (export_is_weights(entry->d_name) && !safetensors_is_own(path))
            ok = fail(failure,
                      "%s holds %.255s, which is no earlier export: this program did not write it; give a new folder",
                      dir, entry->d_name);
    }
    closedir(d);
    if (ok && !empty && !weights)
        return fail(failure, "%s holds files of a model but no weights, so it is no earlier export; give a new folder",
                    dir);
    return ok;
}

// Of the folder `dir`, without links: its path, the name "DIR.tmp" that an export is written under until it is whole,
// and the folder that holds both.
static inline void export_names(const char *dir, char *path, char *temporary, char *parent, size_t capacity) {
    path_resolve(dir, path, capacity);
    format_checked(temporary, capacity, "%s" FOLDER_TEMPORARY, path);
    format_checked(parent, capacity, "%.*s", (int)max_i64(1, strrchr(path, '/') - path), path);
}

// Removes what an export that was interrupted left.
static inline bool export_clear(const char *temporary, Failure *failure) {
    const FolderKind kind = folder_kind(temporary);
    if (kind == FOLDER_FOREIGN)
        return fail(failure, "%s is in the way: %s; move it away, or give another folder", temporary,
                    folder_foreign_words(temporary).text);
    return kind == FOLDER_ABSENT || folder_remove(temporary, failure);
}

// After a kill in export_try or folder_replace `aside` may be the earlier export, and `path` an empty folder or
// nothing: gives it its name again.
static inline bool export_restore(const char *path, const char *aside, Failure *failure) {
    char mark[PATH_CAPACITY];
    Failure why;
    const FolderKind kind = folder_kind(aside), here = folder_kind(path);
    if (kind == FOLDER_ABSENT) return true;
    if (kind == FOLDER_EMPTY) return folder_remove(aside, failure);
    if (here != FOLDER_ABSENT && here != FOLDER_EMPTY)
        return fail(failure, "%s is in the way: it may be an earlier export; move it away, or remove it", aside);
    if (!export_may_replace(aside, &why))
        return fail(failure, "%s is in the way: %.1500s; move it away", aside, why.text);
    format_checked(mark, sizeof mark, "%s/" FOLDER_MARKER, path);
    if ((unlink(mark) && errno != ENOENT) || rename(aside, path))
        return fail(failure, "cannot rename %s, which is the earlier export, back to %s: %s", aside, path,
                    strerror(errno));
    printf("the earlier export, which a run that was interrupted had left as %s, is %s again\n", aside, path);
    return true;
}

// Does with an empty folder what folder_replace will do with the export, and undoes it. A mount point or another's
// folder can then not surprise at the end. The empty folder is not "DIR.tmp", which the next run removes: it bears the
// earlier export's name for a moment, and so the earlier export bears its. export_restore mends what a kill or a
// failure in between leaves, here or when the next run starts.
static inline bool export_try(const char *path, const char *probe, Failure *failure) {
    const bool existed = path_exists(path);
    char mark[PATH_CAPACITY];
    Failure cause, ignored;
    format_checked(mark, sizeof mark, "%s/" FOLDER_MARKER, path);
    if (!folder_begin(probe, failure)) return false;
    if (rename(probe, path) == 0) {
        if (!existed) return folder_remove(path, failure);
        return unlink(mark) == 0 || fail(failure, "cannot remove %s: %s", mark, strerror(errno));
    }
    bool ok = errno == EEXIST || errno == ENOTEMPTY;
    if (ok && folder_exchange(probe, path)) {
        if (folder_exchange(probe, path)) return folder_remove(probe, failure);
        return export_restore(path, probe, &cause) || fail(failure, "%.1500s; the next run tries again", cause.text);
    }
    if (ok) {  // a file system that cannot exchange: the earlier export steps aside
        if (!folder_remove(probe, failure)) return false;
        if (rename(path, probe) == 0) return rename(probe, path) == 0 || export_restore(path, probe, failure);
    }
    fail(failure, "it cannot be replaced: %s", strerror(errno));
    folder_remove(probe, &ignored);
    return false;
}

// Before any work: dies if `dir` could not become an export at the end of the run, which starts from `model_folder`
// (NULL: a preset).
static inline void model_export_prepare(const char *dir, const char *model_folder) {
    char path[PATH_CAPACITY], temporary[PATH_CAPACITY], aside[PATH_CAPACITY], parent[PATH_CAPACITY],
        other[PATH_CAPACITY];
    Failure failure;
    export_names(dir, path, temporary, parent, sizeof path);
    format_checked(aside, sizeof aside, "%s" FOLDER_ASIDE, path);
    path_resolve(".", other, sizeof other);
    if (path_within(other, path))
        die("--export-hf %s is replaced as a whole, but this program runs in it; give a new folder", dir);
    if (model_folder) path_resolve(model_folder, other, sizeof other);
    if (model_folder && (strcmp(other, path) == 0 || strcmp(other, temporary) == 0 || strcmp(other, aside) == 0))
        die("--export-hf %s would replace %s, the model that the run starts from; give a new folder", dir, other);
    if (!export_restore(path, aside, &failure) || !export_may_replace(path, &failure) ||
        !export_clear(temporary, &failure) || !folder_create(parent, true, &failure) ||
        !export_try(path, aside, &failure))
        die("--export-hf %s: %s", dir, failure.text);
}

static inline bool export_write(const char *folder, const ModelConfig *m, const ParameterTable *t,
                                const TrainerState *s, const char *source_folder, Failure *failure) {
    const bool leader = checkpoint_is_leader(s->comm);
    FileList files = {NULL, 0};
    bool ok = checkpoint_agree(s->comm, !leader || folder_begin(folder, failure), failure) &&
              checkpoint_write_model(folder, m, t, s, SAFETENSORS_SHARD_BYTES, &files, failure);
    for (const char *const *name = export_copied_files(); ok && leader && source_folder && *name; name++) {
        char path[PATH_CAPACITY];
        format_checked(path, sizeof path, "%s/%s", source_folder, *name);
        if (path_exists(path)) ok = file_copy(source_folder, folder, *name, &files, failure);
    }
    JsonText hashes = {NULL, 0, 0};
    json_text_add(&hashes, "{\n  \"format_version\": %d", CHECKPOINT_FORMAT_VERSION);
    if (!ok || !leader) json_text_free(&hashes);
    else ok = checkpoint_write_sealed(folder, EXPORT_HASHES, &hashes, &files, failure) && folder_sync(folder, failure);
    file_list_free(&files);
    return ok;  // of the last steps rank 0 alone knows
}

// Gives an export that is whole its name. Where that fails it stays as `temporary`.
static inline bool export_place(const char *temporary, const char *path, const char *parent, Failure *failure) {
    Failure cause;
    bool ok = export_may_replace(path, &cause);
    const bool unmarked = ok && folder_kind(path) == FOLDER_FOREIGN;  // an export of a version that set no mark
    if (unmarked) ok = folder_mark(path, &cause);
    if (ok && folder_replace(temporary, path, &cause)) return folder_sync(parent, failure);
    return fail(failure, "%.900s; the weights are whole in %.500s: move it away before another run exports here",
                cause.text, temporary);
}

// Writes config.json and the weights (in the storage type) to `dir` for transformers, with the tokenizer files of
// `source_folder` (NULL: none). The folder appears whole or not at all. On failure returns false, on all ranks, and
// leaves an earlier export whole.
static inline bool model_export_hf(const char *dir, const ModelConfig *m, const ParameterTable *t,
                                   const TrainerState *s, const char *source_folder, Failure *failure) {
    char path[PATH_CAPACITY], temporary[PATH_CAPACITY], parent[PATH_CAPACITY];
    Failure cause, ignored;
    const bool leader = checkpoint_is_leader(s->comm);
    export_names(dir, path, temporary, parent, sizeof path);
    const bool clear = checkpoint_agree(s->comm, !leader || export_clear(temporary, &cause), &cause);
    const bool written =
        checkpoint_agree(s->comm, clear && export_write(temporary, m, t, s, source_folder, &cause), &cause);
    if (clear && !written && leader && path_exists(temporary)) folder_remove(temporary, &ignored);
    if (written && checkpoint_agree(s->comm, !leader || export_place(temporary, path, parent, &cause), &cause))
        return true;
    fail(failure, "export to %.300s failed: %.1600s", path, cause.text);
    failure->lasting = cause.lasting || written;
    return false;
}

#endif
