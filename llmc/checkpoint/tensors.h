// A trainer's arrays as tensors of safetensors files: each rank writes and reads the part of a tensor that it keeps.
// Both trainers give access to their arrays by TrainerState. Several ranks write the same bytes at the same places as
// one rank would (shard_plan.h): how a run is split does not show in its checkpoints. Functions that take a
// TrainerState are called by all ranks. No value that is written or read is NaN or infinite.
#ifndef LLMC_TENSORS_H
#define LLMC_TENSORS_H

#include "../config/hf_config.h"
#include "../config/shard_plan.h"
#include "../dist/comm.h"
#include "safetensors.h"

// The last two are of delayed scaling.
typedef enum { STATE_WEIGHTS, STATE_EXP_AVG, STATE_EXP_AVG_SQ, STATE_AMAX_HISTORY, STATE_SCALES } StateKind;

// Access to the trainer's arrays. Weights and moments are the rank's flat shard arrays, of which `plan` says what they
// hold; `host` holds them in the array's storage type (fp32 if is_fp32[kind], else bf16). Histories and scales of
// delayed scaling are fp32. Calls come from one thread and have finished with `host` when they return.
typedef struct {
    void *context;
    bool is_fp32[3];  // of weights and moments
    void (*read)(void *context, StateKind kind, int64_t offset, int64_t count, void *host);
    void (*write)(void *context, StateKind kind, int64_t offset, int64_t count, const void *host);
    const ShardPlan *plan;  // NULL: one rank, the arrays are the flat arrays of parameters.h
    const Comm *comm;       // NULL: one rank
    // STATE_AMAX_HISTORY is [tensors, window] and STATE_SCALES [tensors], as delayed.h counts them; the same on all
    // ranks. 0: no delayed scaling
    int64_t delayed_tensors, delayed_window;
} TrainerState;

// ---- writing tensors

// All ranks learn whether one failed: false on all of them, with the text of the first that did, which is named.
// `failure` was set where !ok.
static inline bool checkpoint_agree(const Comm *c, bool ok, Failure *failure) {
    if (!c || c->world == 1) return ok;
    const double first = comm_min(c, COMM_WORLD, ok ? (double)c->world : (double)c->rank);
    if (first == (double)c->world) return true;
    if ((double)c->rank == first &&
        strncmp(failure->text, "rank ", 5) != 0) {  // else named in an agreement before this one
        const Failure own = *failure;
        fail(failure, "rank %lld on %s: %.1900s", (long long)c->rank, c->host, own.text);
        failure->lasting = own.lasting;
    }
    comm_broadcast(c, COMM_WORLD, (int64_t)first, failure, sizeof *failure);
    return false;
}

static inline bool checkpoint_is_leader(const Comm *c) { return !c || c->rank == 0; }

// safetensors_save asks checkpoint_fetch for these: entry i of `specs` is parameter i % count of kind kinds[i / count].
typedef struct {
    const ParameterTable *table;
    const TrainerState *state;
    StateKind kinds[2];
} CheckpointSource;

static inline ShardRange checkpoint_range(const ParameterTable *t, const TrainerState *s, const Parameter *p) {
    ShardRange whole = {0, parameter_elements(p), p->offset};
    return s->plan ? shard_parameter(t, s->plan, p) : whole;
}

static inline const char *state_prefix(StateKind kind) {
    return kind == STATE_WEIGHTS ? "" : kind == STATE_EXP_AVG ? "exp_avg." : "exp_avg_sq.";
}

// True if none of n floats, or bf16 values, has an exponent of ones.
static inline bool all_finite(const void *values, int64_t n, bool fp32) {
    uint32_t bad = 0;
    if (fp32)
        for (int64_t i = 0; i < n; i++) bad |= (((const uint32_t *)values)[i] & 0x7f800000) == 0x7f800000;
    else
        for (int64_t i = 0; i < n; i++) bad |= (((const uint16_t *)values)[i] & 0x7f80) == 0x7f80;
    return !bad;
}

// A value that is not finite never reaches a file: nothing could be trained from it. `lasting`, since it stays so.
static inline bool checkpoint_check_finite(const char *prefix, const char *name, const void *values, int64_t n,
                                           bool fp32, Failure *failure) {
    if (all_finite(values, n, fp32)) return true;
    fail(failure,
         "tensor %s%.200s holds a value that is not finite, with which nothing can be trained; nothing was "
         "saved",
         prefix, name);
    failure->lasting = true;
    return false;
}

static inline bool checkpoint_fetch(void *context, int64_t tensor, int64_t offset, int64_t count, void *out,
                                    Failure *failure) {
    const CheckpointSource *source = (const CheckpointSource *)context;
    const Parameter *p = &source->table->entries[tensor % source->table->count];
    const StateKind kind = source->kinds[tensor / source->table->count];
    const ShardRange r = checkpoint_range(source->table, source->state, p);
    source->state->read(source->state->context, kind, r.shard + offset - r.first, count, out);
    return checkpoint_check_finite(state_prefix(kind), p->name, out, count, source->state->is_fp32[kind], failure);
}

// Returns the part of a tensor that this rank writes. Replicas, which all hold the same values, take turns.
static inline void checkpoint_part(void *context, int64_t tensor, int64_t *first, int64_t *count) {
    const CheckpointSource *source = (const CheckpointSource *)context;
    const Comm *c = source->state->comm;
    const ShardRange r =
        checkpoint_range(source->table, source->state, &source->table->entries[tensor % source->table->count]);
    *first = r.first, *count = tensor % c->replicas == c->replica ? r.count : 0;
}

// safetensors_save by several ranks: rank 0 creates the files, all fill in their parts, then each hashes its share of
// the files.
static inline bool checkpoint_write_together(const SafetensorsSet *set, const CheckpointSource *source, FileList *list,
                                             Failure *failure) {
    const Comm *c = source->state->comm;
    bool ok = true;
    for (int64_t f = 0; ok && c->rank == 0 && f < set->num_files; f++) ok = safetensors_create_file(set, f, failure);
    if (!checkpoint_agree(c, ok, failure)) return false;
    for (int64_t f = 0; ok && f < set->num_files; f++)
        ok = safetensors_fill_file(set, f, checkpoint_part, checkpoint_fetch, (void *)source, failure);
    if (!checkpoint_agree(c, ok, failure)) return false;
    FileRecord *records = (FileRecord *)xcalloc((size_t)set->num_files, sizeof *records);
    for (int64_t f = c->rank; ok && f < set->num_files; f += c->world) {
        char path[PATH_CAPACITY];
        safetensors_set_name(set, f, records[f].name, sizeof records[f].name);
        format_checked(path, sizeof path, "%s/%s", set->folder, records[f].name);
        ok =
            file_size(path, &records[f].bytes, failure) && file_hash(path, records[f].bytes, &records[f].hash, failure);
    }
    ok = checkpoint_agree(c, ok, failure);
    for (int64_t f = 0; ok && f < set->num_files; f++) {
        comm_broadcast(c, COMM_WORLD, f % c->world, &records[f], sizeof records[f]);
        file_list_add(list, records[f].name, records[f].bytes, records[f].hash);
    }
    free(records);
    return checkpoint_agree(c, ok && (c->rank > 0 || safetensors_write_index(set, list, failure)), failure);
}

// Writes the arrays `kinds` as STEM*.safetensors.
static inline bool checkpoint_write_tensors(const char *folder, const char *stem, const ParameterTable *t,
                                            const TrainerState *s, const StateKind *kinds, int num_kinds,
                                            int64_t shard_bytes, FileList *list, Failure *failure) {
    CheckpointSource source = {t, s, {kinds[0], kinds[num_kinds - 1]}};
    SafetensorSpec *specs = (SafetensorSpec *)xcalloc((size_t)(num_kinds * t->count), sizeof *specs);
    for (int64_t i = 0; i < num_kinds * t->count; i++) {
        const Parameter *p = &t->entries[i % t->count];
        const StateKind kind = kinds[i / t->count];
        format_checked(specs[i].name, sizeof specs[i].name, "%s%s", state_prefix(kind), p->name);
        specs[i].type = s->is_fp32[kind] ? ST_F32 : ST_BF16;
        specs[i].rows = p->rows, specs[i].cols = p->cols;
    }
    bool ok;
    if (s->comm && s->comm->world > 1) {
        SafetensorsSet set = safetensors_set(folder, stem, specs, num_kinds * t->count, shard_bytes);
        ok = checkpoint_write_together(&set, &source, list, failure);
        safetensors_set_free(&set);
    } else {
        ok = safetensors_save(folder, stem, specs, num_kinds * t->count, shard_bytes, checkpoint_fetch, &source, list,
                              failure);
    }
    free(specs);
    return ok;
}

// config.json and model*.safetensors.
static inline bool checkpoint_write_model(const char *folder, const ModelConfig *m, const ParameterTable *t,
                                          const TrainerState *s, int64_t shard_bytes, FileList *list,
                                          Failure *failure) {
    const StateKind weights[] = {STATE_WEIGHTS};
    const bool ok = !checkpoint_is_leader(s->comm) ||
                    hf_config_write(m, folder, s->is_fp32[STATE_WEIGHTS] ? "float32" : "bfloat16", list, failure);
    return checkpoint_agree(s->comm, ok, failure) &&
           checkpoint_write_tensors(folder, "model", t, s, weights, 1, shard_bytes, list, failure);
}

// ---- reading tensors

// Copies what this rank keeps of one array from an opened set, converting to its storage type. Fails for a missing or
// misshapen tensor, and for values that are not finite.
static inline bool checkpoint_read_array(const Safetensors *st, const ParameterTable *t, const TrainerState *s,
                                         StateKind kind, Failure *failure) {
    const bool fp32 = s->is_fp32[kind];
    const int64_t chunk = IO_CHUNK_BYTES / 4;
    int64_t largest = 1;
    for (int64_t i = 0; i < t->count; i++) largest = max_i64(largest, parameter_elements(&t->entries[i]));
    void *buffer = xcalloc((size_t)min_i64(chunk, largest), fp32 ? 4 : 2);
    bool ok = true;
    for (int64_t i = 0; ok && i < t->count; i++) {
        const Parameter *p = &t->entries[i];
        char name[128];
        format_checked(name, sizeof name, "%s%s", state_prefix(kind), p->name);
        const Safetensor *tensor = safetensors_require(st, name, p->rows, p->cols, failure);
        ok = tensor != NULL;
        const ShardRange r = checkpoint_range(t, s, p);
        for (int64_t done = 0; ok && done < r.count; done += chunk) {
            const int64_t n = min_i64(chunk, r.count - done);
            ok = safetensors_read(st, tensor, r.first + done, n, fp32, buffer, failure) &&
                 (all_finite(buffer, n, fp32) ||
                  fail(failure, "%s: %.200s holds a value that is not finite, with which nothing can be trained",
                       st->files[tensor->file].path, name));
            if (ok) s->write(s->context, kind, r.shard + done, n, buffer);
        }
    }
    free(buffer);
    return ok;
}

// ---- delayed scaling

static inline bool checkpoint_fetch_delayed(void *context, int64_t tensor, int64_t offset, int64_t count, void *out,
                                            Failure *failure) {
    const TrainerState *s = (const TrainerState *)context;
    s->read(s->context, tensor ? STATE_SCALES : STATE_AMAX_HISTORY, offset, count, out);
    return checkpoint_check_finite("", tensor ? "scale" : "amax_history", out, count, true, failure);
}

// fp8_state.safetensors, by rank 0; nothing to do without delayed scaling.
static inline bool checkpoint_write_delayed(const char *folder, const TrainerState *s, FileList *list,
                                            Failure *failure) {
    if (!s->delayed_tensors) return true;
    bool ok = true;
    if (checkpoint_is_leader(s->comm)) {
        SafetensorSpec specs[2];
        memset(specs, 0, sizeof specs);
        format_checked(specs[0].name, sizeof specs[0].name, "amax_history");
        format_checked(specs[1].name, sizeof specs[1].name, "scale");
        specs[0].type = specs[1].type = ST_F32;
        specs[0].rows = specs[1].rows = s->delayed_tensors, specs[0].cols = s->delayed_window;
        ok = safetensors_save(folder, "fp8_state", specs, 2, INT64_MAX, checkpoint_fetch_delayed, (void *)s, list,
                              failure);
    }
    return checkpoint_agree(s->comm, ok, failure);
}

// A loaded history may hold an infinity, which older versions saved when a step had met it, but no NaN. Scales are
// finite.
static inline bool checkpoint_check_delayed(const float *history, const float *scales, const TrainerState *s,
                                            const char *path, Failure *failure) {
    for (int64_t i = 0; i < s->delayed_tensors * s->delayed_window; i++)
        if (!(history[i] >= 0))
            return fail(failure, "%s: amax_history holds %g, which is no magnitude", path, (double)history[i]);
    return all_finite(scales, s->delayed_tensors, true) ||
           fail(failure, "%s: scale holds a value that is not finite", path);
}

// Every rank reads all of it.
static inline bool checkpoint_read_delayed(const char *checkpoint, const TrainerState *s, Failure *failure) {
    const int64_t tensors = s->delayed_tensors, elements = tensors * s->delayed_window;
    Safetensors st;
    if (!tensors) return true;
    if (!safetensors_open_folder(&st, checkpoint, "fp8_state", failure)) return false;
    float *history = (float *)xcalloc((size_t)(elements + tensors), sizeof *history), *scales = history + elements;
    const Safetensor *first = safetensors_require(&st, "amax_history", tensors, s->delayed_window, failure);
    const Safetensor *second = first ? safetensors_require(&st, "scale", tensors, 0, failure) : NULL;
    const bool ok = second && safetensors_read(&st, first, 0, elements, true, history, failure) &&
                    safetensors_read(&st, second, 0, tensors, true, scales, failure) &&
                    checkpoint_check_delayed(history, scales, s, st.files[0].path, failure);
    if (ok) s->write(s->context, STATE_AMAX_HISTORY, 0, elements, history);
    if (ok) s->write(s->context, STATE_SCALES, 0, tensors, scales);
    safetensors_close(&st);
    free(history);
    return ok;
}

#endif
