// Checkpoints in --checkpoint-dir: saves them, removes old ones, finds the newest and loads it.
//
// A checkpoint is a folder CHECKPOINT_DIR/step-00000123:
//   config.json, model*.safetensors   as transformers reads them; FP16 masters are written as fp32
//   optimizer*.safetensors            exp_avg.NAME and exp_avg_sq.NAME of every parameter; COAT's moments also have
//                                     exp_avg_groups.NAME and exp_avg_sq_groups.NAME: the words of the groups (coat.h)
//                                     that hold the parameter's elements; MS-AMP's have exp_avg_scale.NAME and
//                                     exp_avg_sq_scale.NAME, and FP16 masters master_scale.NAME, one number each
//   *.safetensors.index.json          of model or optimizer, if its tensors are in several files
//   fp8_state.safetensors             with delayed scaling only: amax_history [tensors, window] and scale [tensors],
//                                     tensors numbered by tensor_index(); with tensorwise_bounded only scale
//   tokenizer.json and others         the tokenizer's files, if the run knows them (tokenizer_files.h)
//   trainer.json                      the manifest (manifest.h); written last; "clip_norms" is there only if the run
//                                     clips gradients in the backward pass
//   .train_fp8                        the marker file (file_io.h), written first; a folder without it is removed
//                                     only if it is empty or has an undamaged trainer.json
// Several ranks write one checkpoint together (tensors.h), and any number of ranks can resume it.
// A checkpoint is written as step-00000123.tmp, synced to disk (fsync), then renamed: a folder without ".tmp" was
// complete when it was renamed. A link to such a folder counts as a checkpoint too: a run can resume from it, and never
// removes the link or the folder.
#ifndef LLMC_STORE_H
#define LLMC_STORE_H

#include "manifest.h"
#include "weights.h"

// ---- names, lists and removal

static inline void checkpoint_name(const char *dir, int64_t step, const char *suffix, char *out, size_t capacity) {
    format_checked(out, capacity, "%s/step-%08lld%s", dir, (long long)step, suffix);
}

static inline int checkpoint_compare_steps(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

// Lists the steps of everything in `dir` that has a checkpoint's name, whole or not, highest step first. The list is
// empty if `dir` does not exist. The caller frees list->steps on success.
static inline bool checkpoint_list(const char *dir, CheckpointSteps *list, Failure *failure) {
    memset(list, 0, sizeof *list);
    DIR *d = opendir(dir);
    if (!d) return errno == ENOENT || fail(failure, "cannot open folder %s: %s", dir, strerror(errno));
    for (struct dirent *entry; (entry = folder_next(d)) != NULL;) {
        const int64_t step = checkpoint_step_of(entry->d_name, "");
        if (step < 0) continue;
        list->steps = (int64_t *)xrealloc(list->steps, (size_t)(list->count + 1) * sizeof *list->steps);
        list->steps[list->count++] = step;
    }
    const bool ok = folder_was_read(dir, failure);
    closedir(d);
    if (!ok) free(list->steps), memset(list, 0, sizeof *list);
    if (list->count) qsort(list->steps, (size_t)list->count, sizeof *list->steps, checkpoint_compare_steps);
    return ok;
}

// True for the name of a checkpoint that is being written or removed: step-NNNNNNNN with a suffix that ends in ".tmp".
static inline bool checkpoint_is_leftover(const char *name) {
    const char *suffix = strchr(name, '.');
    return suffix && checkpoint_step_of(name, suffix) >= 0 && fnmatch("*" FOLDER_TEMPORARY, suffix, 0) == 0;
}

// True if this program may remove the folder: it has the marker file, or is empty or absent. Old versions wrote no
// marker file: a folder with an undamaged trainer.json gets one here.
static inline bool checkpoint_is_own(const char *path) {
    struct stat s;
    Json json;
    Failure ignored;
    if (folder_kind(path) != FOLDER_FOREIGN) return true;
    if (lstat(path, &s) || !S_ISDIR(s.st_mode) || !checkpoint_open_trainer(path, &json, &ignored)) return false;
    json_free(&json);
    return folder_mark(path, &ignored);
}

// Removes the leftovers of interrupted saves and removals, and warns about each that cannot be removed. A folder of
// another program always stays; the warning about it comes only with `tell`.
static inline bool checkpoint_remove_leftovers(const char *dir, bool tell, Failure *failure) {
    DIR *d = opendir(dir);
    if (!d) return fail(failure, "cannot open folder %s: %s", dir, strerror(errno));
    for (struct dirent *entry; (entry = folder_next(d)) != NULL;) {
        char path[PATH_CAPACITY];
        Failure cause;
        if (!checkpoint_is_leftover(entry->d_name)) continue;
        format_checked(path, sizeof path, "%s/%s", dir, entry->d_name);
        if ((checkpoint_is_own(path) || tell) && !folder_remove(path, &cause))
            warn("cannot remove a possible leftover of an interrupted save or removal: %s", cause.text);
    }
    const bool ok = folder_was_read(dir, failure);
    closedir(d);
    return ok;
}

// Finds a name for writing step `step`: step-NNNNNNNN.tmp, or step-NNNNNNNN.2.tmp and so on. Removes what has that
// name; if that fails, goes on to the next name.
static inline void checkpoint_temporary(const char *dir, int64_t step, char *path, size_t capacity) {
    Failure ignored;
    char suffix[32] = FOLDER_TEMPORARY;
    for (int64_t n = 2;; n++) {
        checkpoint_name(dir, step, suffix, path, capacity);
        if (!path_exists(path) || folder_remove(path, &ignored)) return;
        format_checked(suffix, sizeof suffix, ".%lld" FOLDER_TEMPORARY, (long long)n);
    }
}

// Prepares the name `path` for a new checkpoint. If a link or something of another program has that name, renames it to
// PATH.1, or the next free number. A checkpoint of this program stays, and folder_replace replaces it.
static inline bool checkpoint_make_way(const char *path, Failure *failure) {
    char aside[PATH_CAPACITY];
    int64_t n = 0;
    if (checkpoint_is_own(path)) return true;
    const Words why = folder_foreign_words(path);
    do format_checked(aside, sizeof aside, "%s.%lld", path, (long long)++n);
    while (path_exists(aside));
    if (rename(path, aside)) return fail(failure, "cannot rename %s to %s: %s", path, aside, strerror(errno));
    warn("a checkpoint needs the name %s; what was at %s is now at %s and is kept: %s", path, path, aside, why.text);
    return true;
}

// Removes a checkpoint of this program. Renames it first, so that no incomplete folder ever has a checkpoint's name.
static inline bool checkpoint_remove(const char *dir, int64_t step, Failure *failure) {
    char path[PATH_CAPACITY], temporary[PATH_CAPACITY];
    checkpoint_name(dir, step, "", path, sizeof path);
    checkpoint_temporary(dir, step, temporary, sizeof temporary);
    if (FILE_WORK("rename", path, rename(path, temporary)))
        return fail(failure, "cannot rename %s to %s: %s", path, temporary, strerror(errno));
    return folder_remove(temporary, failure);
}

static inline bool checkpoint_was_skipped(const CheckpointSteps *skipped, int64_t step) {
    for (int64_t i = 0; skipped && i < skipped->count; i++)
        if (skipped->steps[i] == step) return true;
    return false;
}

// Keeps an old checkpoint that this program may not remove, for example a link, or one with a folder in it, and warns.
// Adds it to `skipped`, so that the warning comes once in a run.
static inline void checkpoint_leave(const char *path, int64_t step, CheckpointSteps *skipped) {
    const Words nested = folder_nested_words(path);
    warn("%s is older than the checkpoints to keep, but is not removed: %s", path,
         *nested.text ? nested.text : folder_foreign_words(path).text);
    if (!skipped) return;
    skipped->steps = (int64_t *)xrealloc(skipped->steps, (size_t)(skipped->count + 1) * sizeof *skipped->steps);
    skipped->steps[skipped->count++] = step;
}

// Keeps checkpoint `newest`, which was just saved, and the keep - 1 complete ones before it, and removes older ones.
// Incomplete checkpoints do not count, and stay until `keep` complete ones are newer. Checkpoints of higher steps,
// checkpoints that --checkpoint-every names, that the run skipped when it resumed, and that this program may not
// remove are kept too.
static inline bool checkpoint_prune(const char *dir, int64_t newest, int64_t keep, const CheckpointRun *run,
                                    Failure *failure) {
    CheckpointSteps list, *skipped = run->skipped;
    Failure ignored;
    for (int64_t i = 0; skipped && i < skipped->count; i++)
        if (skipped->steps[i] == newest) skipped->steps[i] = -1;  // the new checkpoint replaced it
    if (!checkpoint_list(dir, &list, failure)) return false;
    int64_t kept = 1;
    bool ok = true;
    for (int64_t i = 0; ok && i < list.count; i++) {
        char path[PATH_CAPACITY];
        checkpoint_name(dir, list.steps[i], "", path, sizeof path);
        if (list.steps[i] >= newest || checkpoint_was_skipped(skipped, list.steps[i]) ||
            options_names_save(run->options, list.steps[i]))
            continue;
        if (kept < keep) kept += checkpoint_is_whole(path, false, &ignored);
        else if (checkpoint_is_own(path) && !*folder_nested_words(path).text)
            ok = checkpoint_remove(dir, list.steps[i], failure);
        else checkpoint_leave(path, list.steps[i], skipped);
    }
    free(list.steps);
    return ok;
}

// ---- saving

// Writes trainer.json.
static inline bool checkpoint_write_manifest(const char *folder, const TrainerProgress *progress,
                                             const CheckpointRun *run, const TrainerState *s, const FileList *files,
                                             Failure *failure) {
    const int64_t n = s->clip_norms;
    float *norms = (float *)xcalloc((size_t)n + 1, sizeof *norms);
    if (n) s->read(s->context, STATE_CLIP_NORMS, 0, n, norms);
    const bool ok = checkpoint_write_trainer(folder, progress, run, norms, n, files, failure);
    free(norms);
    return ok;
}

static inline bool checkpoint_write(const char *folder, const TrainerProgress *progress, const CheckpointRun *run,
                                    const ParameterTable *t, const TrainerState *s, int64_t shard_bytes,
                                    Failure *failure) {
    const bool leader = checkpoint_is_leader(s->comm);
    FileList files = {NULL, 0};
    bool ok = checkpoint_agree(s->comm, !leader || folder_begin(folder, failure), failure) &&
              checkpoint_write_model(folder, run->model, t, s, shard_bytes, &files, failure) &&
              checkpoint_write_tensors(folder, "optimizer", t, s, STATE_EXP_AVG, STATE_MASTER_SCALE, shard_bytes,
                                       &files, failure) &&
              checkpoint_write_delayed(folder, s, &files, failure);
    ok = ok && (!leader ||
                (tokenizer_files_write(run->tokenizer, folder, &files, failure) &&
                 checkpoint_write_manifest(folder, progress, run, s, &files, failure) && folder_sync(folder, failure)));
    file_list_free(&files);
    return ok;  // if rank 0 failed after the last checkpoint_agree, the other ranks return true here
}

// Saves CHECKPOINT_DIR/step-NNNNNNNN (see the head of this file), then removes older checkpoints (checkpoint_prune); if
// the removal fails, only warns. All ranks call it. shard_bytes: the limit of safetensors_set. If the save fails,
// returns false on all ranks, with the reason; checkpoints of earlier steps are untouched.
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
        if (leader && !checkpoint_prune(dir, progress->step, keep, run, &cause))
            warn("checkpoint %s is saved, but the removal of older ones failed: %s", path, cause.text);
        // rank 0 may take minutes to remove folders: the other ranks wait here, not in an NCCL kernel
        if (s->comm) comm_barrier(s->comm, COMM_WORLD);
        return true;
    }
    if (leader && path_exists(temporary)) folder_remove(temporary, &ignored);
    fail(failure, "saving checkpoint %s failed: %.1500s; checkpoints of earlier steps are untouched", path, cause.text);
    failure->lasting = cause.lasting;
    return false;
}

static inline bool checkpoint_save(const char *dir, int64_t keep, const TrainerProgress *progress,
                                   const CheckpointRun *run, const ParameterTable *t, const TrainerState *s,
                                   Failure *failure) {
    return checkpoint_save_sharded(dir, keep, progress, run, t, s, SAFETENSORS_SHARD_BYTES, failure);
}

// Makes the folder, removes leftovers in it, and checks before any work that checkpoints can be written there. Locks
// the folder until the process ends (folder_lock): of two runs, each would remove what the other is saving. Dies with
// the reason if any of this fails, or if the folder holds checkpoints and the run does not resume: the newest by step
// might then not be the newest by time.
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
        die("--checkpoint-dir %s already holds step-%08lld; add --resume to continue from a checkpoint in it, or give "
            "another folder",
            dir, (long long)list.steps[0]);
    free(list.steps);
}

// checkpoint_require_shared for the folder of checkpoints, after checkpoint_prepare.
static inline void checkpoint_check_shared(const Comm *c, const char *dir) {
    char probe[PATH_CAPACITY] = "";
    if (c->rank == 0) checkpoint_temporary(dir, 0, probe, sizeof probe);
    checkpoint_require_shared(c, "--checkpoint-dir", dir, probe);
}

// ---- resuming

// Finds the checkpoint of the highest step in `dir` that is whole, by the hash of every file. Prints its name. Also
// prints the name of each checkpoint of a higher step, which it skips, and the reason, such as damage, a wrong name or
// another format version. `verb`: the option's name. Returns false if none is whole. *count: how many there are.
static inline bool checkpoint_find_whole(const char *dir, const char *verb, char *path, size_t capacity,
                                         int64_t *count) {
    CheckpointSteps list;
    Failure failure;
    bool found = false;
    if (!checkpoint_list(dir, &list, &failure)) die("--%s: %s", verb, failure.text);
    for (int64_t i = 0; i < list.count && !found; i++) {
        checkpoint_name(dir, list.steps[i], "", path, capacity);
        found = checkpoint_is_whole(path, true, &failure);
        if (!found) printf("%s: skipping %s: %s\n", verb, path, failure.text);
    }
    free(list.steps);
    *count = list.count;
    if (found) printf("%s: continuing from %s\n", verb, path);
    return found;
}

// checkpoint_find_whole for --resume. Returns false if there is no checkpoint: the run then starts at its first step.
// Dies if there are some but none is whole.
static inline bool checkpoint_find_newest(const char *dir, char *path, size_t capacity) {
    int64_t count;
    if (checkpoint_find_whole(dir, "resume", path, capacity, &count)) return true;
    if (count)
        die("--resume: no checkpoint in %s can be resumed (%lld skipped, for the reasons above); move them away to "
            "start at step 1",
            dir, (long long)count);
    printf("resume: no checkpoint in %s, starting at step 1\n", dir);
    return false;
}

// True if the folder is a checkpoint, whole or not, and not a folder of checkpoints.
static inline bool checkpoint_is_one(const char *folder) {
    char manifest[PATH_CAPACITY];
    const char *slash = strrchr(folder, '/');
    format_checked(manifest, sizeof manifest, "%s/trainer.json", folder);
    return path_exists(manifest) || checkpoint_step_of(slash ? slash + 1 : folder, "") >= 0;
}

// Dies if MODEL is a folder that checkpoints were saved to.
static inline void checkpoint_refuse_model(const char *model) {
    char config[PATH_CAPACITY];
    CheckpointSteps list;
    Failure failure;
    format_checked(config, sizeof config, "%s/config.json", model);
    if (path_exists(config) || !checkpoint_list(model, &list, &failure)) return;
    if (list.count)
        die("MODEL %s is a folder of checkpoints; give one of them, such as %s/step-%08lld", model, model,
            (long long)list.steps[0]);
    free(list.steps);
}

// Finds the checkpoint that --branch names: it, or the newest whole one in it. Dies if there is none.
static inline void checkpoint_find_branch(const char *branch, char *path, size_t capacity) {
    Failure failure;
    int64_t count = 0;
    path_resolve(branch, path, capacity);
    if (checkpoint_is_one(path)) {
        if (!checkpoint_is_whole(path, true, &failure)) die("--branch %s: %s", branch, failure.text);
        printf("branch: continuing from %s\n", path);
        return;
    }
    char dir[PATH_CAPACITY];
    format_checked(dir, sizeof dir, "%s", path);
    if (!checkpoint_find_whole(dir, "branch", path, capacity, &count))
        die("--branch %s: no checkpoint there can be used (%lld skipped%s); give a checkpoint, step-NNNNNNNN, or the "
            "--checkpoint-dir that holds it",
            branch, (long long)count, count ? ", for the reasons above" : "");
}

// Dies, before anything is read in it, if `branch` is no folder although the run is to `begin` there, or if the run's
// own checkpoints would go where the run that it branches from keeps its own.
static inline void checkpoint_check_branch(const char *branch, const char *own, bool begin) {
    char from[PATH_CAPACITY], to[PATH_CAPACITY];
    if (begin && !folder_exists(branch)) die("--branch %s: it is %s", branch, path_words(branch).text);
    if (!*own) return;
    path_resolve(branch, from, sizeof from), path_resolve(own, to, sizeof to);
    if (path_within(from, to) || (checkpoint_is_one(from) && path_within(to, from)))
        die_with(EXIT_USAGE,
                 "--branch %s and --checkpoint-dir %s share a folder, where this run would remove checkpoints of the "
                 "run that it branches from; give another --checkpoint-dir",
                 branch, own);
}

// checkpoint_find_branch, or checkpoint_find_newest if `branch` is NULL, for all ranks: rank 0 searches and broadcasts
// the result. `path` is "" if there is none.
static inline bool checkpoint_find_together(const Comm *c, const char *dir, const char *branch, char *path,
                                            size_t capacity) {
    path[0] = 0;
    if (c->rank == 0 && branch) checkpoint_find_branch(branch, path, capacity);
    else if (c->rank == 0 && !checkpoint_find_newest(dir, path, capacity)) path[0] = 0;
    comm_broadcast(c, COMM_WORLD, 0, path, (int64_t)capacity);
    return *path;
}

// Sets STATE_CLIP_NORMS from trainer.json, on every rank, if the run clips in the backward pass.
static inline bool checkpoint_load_clip_norms(const char *checkpoint, const TrainerState *s, Failure *failure) {
    Json json;
    if (!s->clip_norms) return true;
    if (!checkpoint_open_trainer(checkpoint, &json, failure)) return false;
    float *norms = (float *)xcalloc((size_t)s->clip_norms, sizeof *norms);
    const bool ok = checkpoint_read_clip_norms(&json, norms, s->clip_norms, failure);
    if (ok) s->write(s->context, STATE_CLIP_NORMS, 0, s->clip_norms, norms);
    free(norms);
    json_free(&json);
    return ok;
}

// Loads weights, optimizer state, the state of delayed scaling and that of clipping from a checkpoint that passed
// checkpoint_check. Fails if a file cannot be read, or if a tensor does not fit the model or the options, or holds a
// value that training cannot continue from (checkpoint_read_array, checkpoint_check_delayed).
static inline bool checkpoint_read(const char *checkpoint, const ModelConfig *m, const ParameterTable *t,
                                   const TrainerState *s, Failure *failure) {
    Safetensors st;
    StateKind kinds[NUM_STATE_KINDS];
    const int num_kinds = state_kinds(s, STATE_EXP_AVG, STATE_MASTER_SCALE, kinds);
    if (!safetensors_open_folder(&st, checkpoint, "optimizer", failure)) return false;
    bool ok = true;
    for (int i = 0; ok && i < num_kinds; i++) ok = checkpoint_read_array(&st, t, s, kinds[i], failure);
    safetensors_close(&st);
    return ok && model_read_weights(checkpoint, m, t, s, failure) && checkpoint_read_delayed(checkpoint, s, failure) &&
           checkpoint_load_clip_norms(checkpoint, s, failure);
}

// checkpoint_read, which dies on failure.
static inline void checkpoint_load(const char *checkpoint, const ModelConfig *m, const ParameterTable *t,
                                   const TrainerState *s) {
    Failure failure;
    if (!checkpoint_read(checkpoint, m, t, s, &failure))
        die("cannot continue from %s: %s; move this checkpoint away to continue from an earlier one, if any",
            checkpoint, failure.text);
}

#endif
