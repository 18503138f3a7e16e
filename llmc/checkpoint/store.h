// The folder of checkpoints: their names, saving, removing old ones, finding the newest, and loading it.
//
// A checkpoint is a folder CHECKPOINT_DIR/step-00000123:
//   config.json, model*.safetensors   as transformers reads them
//   optimizer*.safetensors            exp_avg.NAME and exp_avg_sq.NAME of every parameter
//   fp8_state.safetensors             with delayed scaling only: amax_history [tensors, window] and scale [tensors],
//                                     numbered as tensor_index() does
//   trainer.json                      manifest.h; written last
//   .train_fp8                        this program's mark (file_io.h), written first: a folder without it is
//                                     removed only if it has a sound trainer.json
// Several ranks write one checkpoint together (tensors.h), and any number of ranks can resume it.
// It is written as step-00000123.tmp, brought to disk, then renamed: a folder without ".tmp" was whole when it got its
// name. A checkpoint may be a link to a folder elsewhere: it is resumed from and counts as kept, and neither the link
// nor the folder is ever removed.
#ifndef LLMC_STORE_H
#define LLMC_STORE_H

#include "manifest.h"
#include "weights.h"

// ---- names and lists

static inline void checkpoint_name(const char *dir, int64_t step, const char *suffix, char *out, size_t capacity) {
    format_checked(out, capacity, "%s/step-%08lld%s", dir, (long long)step, suffix);
}

static inline int checkpoint_compare_steps(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

// Lists the checkpoints in `dir`, whole or not. A folder that does not exist has none.
static inline bool checkpoint_list(const char *dir, CheckpointSteps *list, Failure *failure) {
    memset(list, 0, sizeof *list);
    DIR *d = opendir(dir);
    if (!d) return errno == ENOENT || fail(failure, "cannot open folder %s: %s", dir, strerror(errno));
    for (struct dirent *entry; (entry = readdir(d)) != NULL;) {
        const int64_t step = checkpoint_step_of(entry->d_name, "");
        if (step < 0) continue;
        list->steps = (int64_t *)xrealloc(list->steps, (size_t)(list->count + 1) * sizeof *list->steps);
        list->steps[list->count++] = step;
    }
    closedir(d);
    if (list->count) qsort(list->steps, (size_t)list->count, sizeof *list->steps, checkpoint_compare_steps);
    return true;
}

// True for the name of a checkpoint that is being written or removed: step-NNNNNNNN and something that ends in ".tmp".
static inline bool checkpoint_is_leftover(const char *name) {
    const char *suffix = strchr(name, '.');
    return suffix && checkpoint_step_of(name, suffix) >= 0 && fnmatch("*" FOLDER_TEMPORARY, suffix, 0) == 0;
}

// True if this program may remove a folder: it has the mark. A version that set no mark left a trainer.json with its
// hash: such a folder gets the mark here.
static inline bool checkpoint_is_own(const char *path) {
    struct stat s;
    Json json;
    Failure ignored;
    if (folder_kind(path) != FOLDER_FOREIGN) return true;
    if (lstat(path, &s) || !S_ISDIR(s.st_mode) || !checkpoint_open_trainer(path, &json, &ignored)) return false;
    json_free(&json);
    return folder_mark(path, &ignored);
}

// Removes what interrupted saves and removals left. What cannot be removed stays, with a warning; for what this program
// may not have written only if `tell`.
static inline bool checkpoint_remove_leftovers(const char *dir, bool tell, Failure *failure) {
    DIR *d = opendir(dir);
    if (!d) return fail(failure, "cannot open folder %s: %s", dir, strerror(errno));
    for (struct dirent *entry; (entry = readdir(d)) != NULL;) {
        char path[PATH_CAPACITY];
        Failure cause;
        if (!checkpoint_is_leftover(entry->d_name)) continue;
        format_checked(path, sizeof path, "%s/%s", dir, entry->d_name);
        if ((checkpoint_is_own(path) || tell) && !folder_remove(path, &cause))
            warn("what may be left of an interrupted checkpoint stays: %s", cause.text);
    }
    closedir(d);
    return true;
}

// A name under which step `step` can be written: step-NNNNNNNN.tmp or, where something stands that cannot be removed,
// step-NNNNNNNN.2.tmp and so on.
static inline void checkpoint_temporary(const char *dir, int64_t step, char *path, size_t capacity) {
    Failure ignored;
    char suffix[32] = FOLDER_TEMPORARY;
    for (int64_t n = 2;; n++) {
        checkpoint_name(dir, step, suffix, path, capacity);
        if (!path_exists(path) || folder_remove(path, &ignored)) return;
        format_checked(suffix, sizeof suffix, ".%lld" FOLDER_TEMPORARY, (long long)n);
    }
}

// Before a checkpoint takes a name: what has it and is not this program's, a link for example, becomes NAME.1, or the
// next that is free.
static inline bool checkpoint_make_way(const char *path, Failure *failure) {
    char aside[PATH_CAPACITY];
    int64_t n = 0;
    if (checkpoint_is_own(path)) return true;
    const Words why = folder_foreign_words(path);
    do format_checked(aside, sizeof aside, "%s.%lld", path, (long long)++n);
    while (path_exists(aside));
    if (rename(path, aside)) return fail(failure, "cannot rename %s to %s: %s", path, aside, strerror(errno));
    warn("a checkpoint takes the name %s; what had it is now %s, and stays: %s", path, aside, why.text);
    return true;
}

// Removes a checkpoint of this program. It loses its name first, so that none is ever there in part.
static inline bool checkpoint_remove(const char *dir, int64_t step, Failure *failure) {
    char path[PATH_CAPACITY], temporary[PATH_CAPACITY];
    checkpoint_name(dir, step, "", path, sizeof path);
    checkpoint_temporary(dir, step, temporary, sizeof temporary);
    if (FILE_WORK("rename", path, rename(path, temporary)))
        return fail(failure, "cannot rename %s to %s: %s", path, temporary, strerror(errno));
    return folder_remove(temporary, failure);
}

static inline bool checkpoint_was_passed_over(const CheckpointSteps *passed_over, int64_t step) {
    for (int64_t i = 0; passed_over && i < passed_over->count; i++)
        if (passed_over->steps[i] == step) return true;
    return false;
}

// An older checkpoint that is due to be removed and is not this program's to remove, a link for example: stays, and the
// run says so once.
static inline void checkpoint_leave(const char *path, int64_t step, CheckpointSteps *passed_over) {
    warn("%s is older than the checkpoints that are kept, and stays: %s", path, folder_foreign_words(path).text);
    if (!passed_over) return;
    passed_over->steps =
        (int64_t *)xrealloc(passed_over->steps, (size_t)(passed_over->count + 1) * sizeof *passed_over->steps);
    passed_over->steps[passed_over->count++] = step;
}

// After step `newest` was saved: keeps it and the keep - 1 whole ones before it, removes those older still. A folder
// that is not whole is not counted. One that the run passed over when it was resumed, or of a later step, is left
// alone.
static inline bool checkpoint_prune(const char *dir, int64_t newest, int64_t keep, CheckpointSteps *passed_over,
                                    Failure *failure) {
    CheckpointSteps list;
    Failure ignored;
    for (int64_t i = 0; passed_over && i < passed_over->count; i++)
        if (passed_over->steps[i] == newest) passed_over->steps[i] = -1;  // another is in its place
    if (!checkpoint_list(dir, &list, failure)) return false;
    int64_t kept = 1;
    bool ok = true;
    for (int64_t i = 0; ok && i < list.count; i++) {
        char path[PATH_CAPACITY];
        checkpoint_name(dir, list.steps[i], "", path, sizeof path);
        if (list.steps[i] >= newest || checkpoint_was_passed_over(passed_over, list.steps[i])) continue;
        if (kept < keep) kept += checkpoint_is_whole(path, false, &ignored);
        else if (checkpoint_is_own(path)) ok = checkpoint_remove(dir, list.steps[i], failure);
        else checkpoint_leave(path, list.steps[i], passed_over);
    }
    free(list.steps);
    return ok;
}

// ---- saving

static inline bool checkpoint_write(const char *folder, const TrainerProgress *progress, const CheckpointRun *run,
                                    const ParameterTable *t, const TrainerState *s, int64_t shard_bytes,
                                    Failure *failure) {
    const StateKind moments[] = {STATE_EXP_AVG, STATE_EXP_AVG_SQ};
    const bool leader = checkpoint_is_leader(s->comm);
    FileList files = {NULL, 0};
    bool ok = checkpoint_agree(s->comm, !leader || folder_begin(folder, failure), failure) &&
              checkpoint_write_model(folder, run->model, t, s, shard_bytes, &files, failure) &&
              checkpoint_write_tensors(folder, "optimizer", t, s, moments, 2, shard_bytes, &files, failure) &&
              checkpoint_write_delayed(folder, s, &files, failure);
    ok = ok && (!leader ||
                (checkpoint_write_trainer(folder, progress, run, &files, failure) && folder_sync(folder, failure)));
    file_list_free(&files);
    return ok;  // of the last steps rank 0 alone knows
}

// Saves CHECKPOINT_DIR/step-NNNNNNNN as the head of this file says, then removes all but the newest `keep`.
// On failure, on all ranks alike, nothing new stays, the checkpoints before are untouched, and the failure says what
// went wrong.
static inline bool checkpoint_save_sharded(const char *dir, int64_t keep, const TrainerProgress *progress,
                                           const CheckpointRun *run, const ParameterTable *t, const TrainerState *s,
                                           int64_t shard_bytes, Failure *failure) {
    char temporary[PATH_CAPACITY] = "", path[PATH_CAPACITY];
    checkpoint_name(dir, progress->step, "", path, sizeof path);
    Failure cause, ignored;
    const bool leader = checkpoint_is_leader(s->comm);
    bool ok = checkpoint_agree(
        s->comm, !leader || (folder_create(dir, true, &cause) && checkpoint_remove_leftovers(dir, false, &cause)),
        &cause);
    if (ok && leader) checkpoint_temporary(dir, progress->step, temporary, sizeof temporary);
    if (ok && s->comm) comm_broadcast(s->comm, COMM_WORLD, 0, temporary, sizeof temporary);
    ok = ok && checkpoint_write(temporary, progress, run, t, s, shard_bytes, &cause);
    ok = ok && (!leader || (checkpoint_make_way(path, &cause) && folder_replace(temporary, path, &cause) &&
                            folder_sync(dir, &cause)));
    if (checkpoint_agree(s->comm, ok, &cause)) {
        if (leader && !checkpoint_prune(dir, progress->step, keep, run->passed_over, &cause))
            warn("checkpoint %s is saved, but an older one could not be removed: %s", path, cause.text);
        if (s->comm)
            comm_barrier(s->comm,
                         COMM_WORLD);  // removing may take minutes: the others wait here, not in a kernel of NCCL
        return true;
    }
    if (leader && path_exists(temporary)) folder_remove(temporary, &ignored);
    fail(failure, "saving checkpoint %s failed: %.1500s; earlier checkpoints are untouched", path, cause.text);
    failure->lasting = cause.lasting;
    return false;
}

static inline bool checkpoint_save(const char *dir, int64_t keep, const TrainerProgress *progress,
                                   const CheckpointRun *run, const ParameterTable *t, const TrainerState *s,
                                   Failure *failure) {
    return checkpoint_save_sharded(dir, keep, progress, run, t, s, SAFETENSORS_SHARD_BYTES, failure);
}

// Before any work: makes the folder, and finds out now rather than after hours whether it can be written. A run that
// does not resume must not mix its checkpoints with another's: the newest by step would not be the newest by time. Nor
// may two runs at once: what one is saving is a leftover to the other, so the folder is locked to the end of the
// process. Dies with the reason.
static inline void checkpoint_prepare(const char *dir, bool resume) {
    Failure failure;
    CheckpointSteps list;
    char probe[PATH_CAPACITY];
    if (!folder_create(dir, true, &failure) || !folder_lock(dir, FOLDER_LOCK_SECONDS, &failure) ||
        !checkpoint_remove_leftovers(dir, true, &failure))
        die("--checkpoint-dir %s: %s", dir, failure.text);
    checkpoint_temporary(dir, 0, probe, sizeof probe);
    if (!folder_begin(probe, &failure) || !folder_remove(probe, &failure) || !checkpoint_list(dir, &list, &failure))
        die("--checkpoint-dir %s: %s", dir, failure.text);
    if (list.count && !resume)
        die("--checkpoint-dir %s already holds step-%08lld; add --resume to continue from it, or give another folder",
            dir, (long long)list.steps[0]);
    free(list.steps);
}

// ---- resuming

// The newest checkpoint in `dir` whose files all have their hashes. Prints which it passes over and why, and what it
// found. False if there is no checkpoint at all: the run starts afresh. Dies if there are some and none is whole, since
// starting afresh among them is not what anyone wants.
static inline bool checkpoint_find_newest(const char *dir, char *path, size_t capacity) {
    CheckpointSteps list;
    Failure failure;
    bool found = false;
    if (!checkpoint_list(dir, &list, &failure)) die("--resume: %s", failure.text);
    for (int64_t i = 0; i < list.count && !found; i++) {
        checkpoint_name(dir, list.steps[i], "", path, capacity);
        found = checkpoint_is_whole(path, true, &failure);
        if (!found) printf("resume: passed over %s: %s\n", path, failure.text);
    }
    free(list.steps);
    if (found) printf("resume: continuing from %s\n", path);
    else if (list.count)
        die("--resume: none of the %lld checkpoints in %s is whole; move them away to start afresh",
            (long long)list.count, dir);
    else printf("resume: no checkpoint in %s, starting from step 0\n", dir);
    return found;
}

// checkpoint_find_newest for all ranks: rank 0 looks, and all get the same answer. `path` is "" where there is none.
static inline bool checkpoint_find_together(const Comm *c, const char *dir, char *path, size_t capacity) {
    path[0] = 0;
    if (c->rank == 0 && !checkpoint_find_newest(dir, path, capacity)) path[0] = 0;
    comm_broadcast(c, COMM_WORLD, 0, path, (int64_t)capacity);
    return *path;
}

// Loads weights, optimizer state and the state of delayed scaling of a checkpoint that passed checkpoint_check. Dies if
// something does not fit.
static inline void checkpoint_load(const char *checkpoint, const ModelConfig *m, const ParameterTable *t,
                                   const TrainerState *s) {
    Safetensors st;
    Failure failure;
    if (!model_read_weights(checkpoint, m, t, s, &failure) ||
        !safetensors_open_folder(&st, checkpoint, "optimizer", &failure) ||
        !checkpoint_read_array(&st, t, s, STATE_EXP_AVG, &failure) ||
        !checkpoint_read_array(&st, t, s, STATE_EXP_AVG_SQ, &failure) ||
        !checkpoint_read_delayed(checkpoint, s, &failure))
        die("cannot resume from %s: %s; move this checkpoint away to resume from the one before it", checkpoint,
            failure.text);
    safetensors_close(&st);
}

#endif
