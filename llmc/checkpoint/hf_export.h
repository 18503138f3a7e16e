// Exports config.json, the weights and the tokenizer's files to a folder that transformers can load.
// An export gets its name only when it is complete; it then replaces an earlier export.
#ifndef LLMC_HF_EXPORT_H
#define LLMC_HF_EXPORT_H

#include "manifest.h"
#include "tensors.h"
#include "tokenizer_files.h"

static inline bool export_is_weights(const char *name) {
    const size_t n = strlen(name);
    return strncmp(name, "model", 5) == 0 && n > 12 && strcmp(name + n - 12, ".safetensors") == 0;
}

// True if an export may contain a file of this name.
static inline bool export_owns(const char *name) {
    static const char *const names[] = {FOLDER_MARKER, EXPORT_HASHES, "config.json", "model.safetensors.index.json"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(name, names[i]) == 0) return true;
    for (int i = 0; i < TOKENIZER_FILES; i++)
        if (strcmp(name, tokenizer_file_names()[i]) == 0) return true;
    return export_is_weights(name);
}

// Fails unless `dir` is missing, empty or an earlier export: an export must not delete anything else. File names alone
// do not show an earlier export, because all models have the same ones: this program must have written the weights.
static inline bool export_may_replace(const char *dir, Failure *failure) {
    if (!path_exists(dir)) return true;
    DIR *d = folder_open(dir);
    if (!d) return fail(failure, "cannot open %s, which is %s: %s", dir, path_words(dir).text, strerror(errno));
    bool ok = true, empty = true, weights = false;
    for (struct dirent *entry; ok && (entry = folder_next(d)) != NULL;) {
        char path[PATH_CAPACITY];
        if (strcmp(entry->d_name, FOLDER_MARKER) == 0) continue;
        format_checked(path, sizeof path, "%s/%s", dir, entry->d_name);
        empty = false, weights = weights || export_is_weights(entry->d_name);
        if (!export_owns(entry->d_name))
            ok = fail(failure, "%s holds %.255s, which is not part of an export; use a new folder", dir, entry->d_name);
        else if (export_is_weights(entry->d_name) && !safetensors_is_own(path))
            ok = fail(failure,
                      "%s may be no earlier export: this program did not write its file %.255s, or cannot read it; use "
                      "a new folder",
                      dir, entry->d_name);
    }
    ok = ok && folder_was_read(dir, failure);
    closedir(d);
    if (ok && !empty && !weights)
        return fail(failure, "%s may be no earlier export: it holds files of a model but no weights; use a new folder",
                    dir);
    return ok;
}

// Resolves links in `dir` and writes its path, the name PATH.tmp of an export that is not complete yet, and the folder
// that holds both.
static inline void export_names(const char *dir, char *path, char *temporary, char *parent, size_t capacity) {
    path_resolve(dir, path, capacity);
    format_checked(temporary, capacity, "%s" FOLDER_TEMPORARY, path);
    format_checked(parent, capacity, "%.*s", (int)max_i64(1, strrchr(path, '/') - path), path);
}

// Removes the leftover of an interrupted export, if there is one. Fails if another program may have made it.
static inline bool export_clear(const char *temporary, Failure *failure) {
    const FolderKind kind = folder_kind(temporary);
    if (kind == FOLDER_FOREIGN)
        return fail(failure, "%s is in the way: %s; move it away, or use another folder", temporary,
                    folder_foreign_words(temporary).text);
    return kind == FOLDER_ABSENT || folder_remove(temporary, failure);
}

// Renames an earlier export from `aside` back to `path`. A run that was killed in export_try or folder_replace may have
// left it there, with an empty folder or nothing at `path`. Does nothing if there is nothing at `aside`, and removes
// `aside` if it is empty. Else fails if `path` holds something, or if `aside` is no export.
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
    printf("renamed %s, an earlier export, back to %s\n", aside, path);
    return true;
}

// Tries with an empty folder, `probe`, the renames that folder_replace will do with the export, and undoes them, so
// that a mount point or a folder of another user is found at the start of the run and not at its end. For a moment the
// earlier export has the name `probe`. `probe` is not PATH.tmp, because a run removes PATH.tmp when it starts. If a
// kill or a failure leaves the earlier export at `probe`, export_restore renames it back, here or at the start of the
// next run.
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
        return export_restore(path, probe, &cause) ||
               fail(failure, "%.1500s; the next run with this --export-hf tries to rename it again", cause.text);
    }
    if (ok) {  // the file system cannot exchange two names: rename the earlier export to `probe` and back
        if (!folder_remove(probe, failure)) return false;
        if (rename(path, probe) == 0) return rename(probe, path) == 0 || export_restore(path, probe, failure);
    }
    fail(failure, "it cannot be replaced: %s", strerror(errno));
    folder_remove(probe, &ignored);
    return false;
}

// Prepares the export to `dir` before any work: renames an earlier export back, removes leftovers, makes the parent
// folder. Dies if the export could not take its place at `dir`, or would replace the folder that the program runs in or
// MODEL's. `model_folder` is the folder given as MODEL (NULL for a preset).
static inline void model_export_prepare(const char *dir, const char *model_folder) {
    char path[PATH_CAPACITY], temporary[PATH_CAPACITY], aside[PATH_CAPACITY], parent[PATH_CAPACITY],
        other[PATH_CAPACITY];
    Failure failure;
    export_names(dir, path, temporary, parent, sizeof path);
    format_checked(aside, sizeof aside, "%s" FOLDER_ASIDE, path);
    path_resolve(".", other, sizeof other);
    if (path_within(other, path))
        die("--export-hf %s would be replaced, but this program runs in it; use a new folder", dir);
    if (model_folder) path_resolve(model_folder, other, sizeof other);
    if (model_folder && (strcmp(other, path) == 0 || strcmp(other, temporary) == 0 || strcmp(other, aside) == 0))
        die("--export-hf %s would replace or remove %s, the folder of MODEL; use a new folder", dir, other);
    if (!export_restore(path, aside, &failure) || !export_may_replace(path, &failure) ||
        !export_clear(temporary, &failure) || !folder_create(parent, true, &failure) ||
        !export_try(path, aside, &failure))
        die("--export-hf %s: %s", dir, failure.text);
}

// Dies, on all ranks, if a rank does not see the folder PATH.tmp that rank 0 makes here for a test. All ranks call it,
// after model_export_prepare.
static inline void model_export_check_shared(const Comm *c, const char *dir) {
    char path[PATH_CAPACITY], temporary[PATH_CAPACITY], parent[PATH_CAPACITY];
    export_names(dir, path, temporary, parent, sizeof path);
    checkpoint_require_shared(c, "--export-hf", dir, temporary);
}

static inline bool export_write(const char *folder, const ModelConfig *m, const ParameterTable *t,
                                const TrainerState *s, const TokenizerFiles *tokenizer, Failure *failure) {
    const bool leader = checkpoint_is_leader(s->comm);
    FileList files = {NULL, 0};
    bool ok = checkpoint_agree(s->comm, !leader || folder_begin(folder, failure), failure) &&
              checkpoint_write_model(folder, m, t, s, SAFETENSORS_SHARD_BYTES, &files, failure) &&
              (!leader || tokenizer_files_write(tokenizer, folder, &files, failure));
    JsonText hashes = {NULL, 0, 0};
    json_text_add(&hashes, "{\n  \"format_version\": %d", CHECKPOINT_FORMAT_VERSION);
    if (!ok || !leader) json_text_free(&hashes);
    else ok = checkpoint_write_sealed(folder, EXPORT_HASHES, &hashes, &files, failure) && folder_sync(folder, failure);
    file_list_free(&files);
    return ok;  // if rank 0 failed after the last checkpoint_agree, the other ranks return true here
}

// Renames a complete export from `temporary` to `path`, in place of an earlier export, and syncs `parent`. If that sync
// fails, the export is at `path`; after any other failure it is still at `temporary`.
static inline bool export_publish(const char *temporary, const char *path, const char *parent, Failure *failure) {
    Failure cause;
    bool ok = export_may_replace(path, &cause);
    const bool unmarked = ok && folder_kind(path) == FOLDER_FOREIGN;  // an old version wrote no marker file
    if (unmarked) ok = folder_mark(path, &cause);
    if (ok && folder_replace(temporary, path, &cause)) return folder_sync(parent, failure);
    return fail(failure, "%.900s; the complete export is %.500s: move it away before another run exports here",
                cause.text, temporary);
}

// Writes config.json, the weights (bf16 or fp32, as state_type says) and rank 0's `tokenizer` (NULL for none) to `dir`
// for transformers. All ranks call it. On failure it returns false on all ranks. An earlier
// export is then kept, unless only the last sync failed (export_publish): then the new export has replaced it.
static inline bool model_export_hf(const char *dir, const ModelConfig *m, const ParameterTable *t,
                                   const TrainerState *s, const TokenizerFiles *tokenizer, Failure *failure) {
    char path[PATH_CAPACITY], temporary[PATH_CAPACITY], parent[PATH_CAPACITY];
    Failure cause, ignored;
    const bool leader = checkpoint_is_leader(s->comm);
    export_names(dir, path, temporary, parent, sizeof path);
    const bool clear = checkpoint_agree(s->comm, !leader || export_clear(temporary, &cause), &cause);
    const bool written =
        checkpoint_agree(s->comm, clear && export_write(temporary, m, t, s, tokenizer, &cause), &cause);
    if (clear && !written && leader && path_exists(temporary)) folder_remove(temporary, &ignored);
    if (written && checkpoint_agree(s->comm, !leader || export_publish(temporary, path, parent, &cause), &cause))
        return true;
    fail(failure, "export to %.300s failed: %.1600s", path, cause.text);
    failure->lasting = cause.lasting || written;
    return false;
}

#endif
