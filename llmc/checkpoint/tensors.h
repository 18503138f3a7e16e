// Writes and reads a trainer's arrays as tensors of safetensors files; each rank handles its shard of each tensor.
// Both trainers give access to their arrays by TrainerState. The layout of the files does not depend on the number of
// ranks (shard_plan.h): several ranks write equal values as the same bytes as one rank. Each tensor is written by one
// replica. All ranks call the functions that write or read tensors. Writing and reading fail on values that are NaN or
// infinite, on second moments below zero, and on scales of moments and masters that cannot be (state_accepts). An
// infinite amax that is read becomes 0.
#ifndef LLMC_TENSORS_H
#define LLMC_TENSORS_H

#include <float.h>

#include "../base/fp16.h"
#include "../config/hf_config.h"
#include "../config/options.h"
#include "../config/shard_plan.h"
#include "../ranks/comm.h"
#include "../reference/receipt.h"
#include "safetensors_writer.h"

// The arrays of a trainer. STATE_..._GROUPS (words of groups) exist only with COAT's moments (coat.h), scales of the
// moments only with MS-AMP's moments (msamp.h), scales of the master weights only if those are FP16, STATE_AMAX_HISTORY
// and STATE_SCALES only with delayed scaling, and STATE_CLIP_NORMS only with options_clips_in_backward.
// Recipe tensorwise_bounded has STATE_SCALES, of weights, and no histories.
// STATE_GRADIENTS, the sums of the step just done, is for receipts alone.
typedef enum {
    STATE_WEIGHTS,
    STATE_EXP_AVG,
    STATE_EXP_AVG_SQ,
    STATE_EXP_AVG_GROUPS,
    STATE_EXP_AVG_SQ_GROUPS,
    STATE_EXP_AVG_SCALE,
    STATE_EXP_AVG_SQ_SCALE,
    STATE_MASTER_SCALE,
    STATE_AMAX_HISTORY,
    STATE_SCALES,
    STATE_CLIP_NORMS,
    STATE_GRADIENTS,
    NUM_STATE_KINDS
} StateKind;

// Access to the trainer's arrays. Weights and moments are this rank's flat shards, laid out by `plan`; words of groups
// have the same layout, with one word for each 128 elements. Scales of moments and masters are arrays with one number
// for each parameter, in the order of the table, equal on all ranks. `read` copies `count` elements from element
// `offset` on to `host`, `write` copies them from `host`, which has the array's type. One thread calls both, and may
// reuse `host` when they return.
// checkpoint_load passes the scales of masters to `write` before the weights: `write` can then store the weights in
// FP16 at once.
typedef struct {
    void *context;
    SafetensorsType types[NUM_STATE_KINDS];  // see state_type()
    void (*read)(void *context, StateKind kind, int64_t offset, int64_t count, void *host);
    void (*write)(void *context, StateKind kind, int64_t offset, int64_t count, const void *host);
    // Writes the hashes of n parts of an array (receipt.h) to `sums`. NULL: hashed by `read`.
    void (*hash)(void *context, StateKind kind, const ReceiptPart *parts, int64_t n, uint64_t *sums);
    const ShardPlan *plan;  // NULL only with one rank: the arrays are the flat arrays of parameters.h
    const Comm *comm;       // NULL only with one rank
    // STATE_AMAX_HISTORY has shape [tensors, window] and STATE_SCALES [tensors] (delayed.h), with the same values on
    // all ranks; delayed_tensors is 0 without delayed scaling. With recipe tensorwise_bounded the window is 0.
    int64_t delayed_tensors, delayed_window;
    // STATE_CLIP_NORMS has this many numbers, equal on all ranks; 0 without options_clips_in_backward. Number 0 is the
    // norm of all gradients of the newest step, and number 1 + l that of the gradients of layers l, l + 1, ... together
    // in that step. All are 0 before the first step.
    int64_t clip_norms;
} TrainerState;

// Seconds that a rank waits for a shared disk to show a folder that rank 0 has made.
#define CHECKPOINT_SEEN_SECONDS 10

// ---- writing tensors

// Tells all ranks if any rank failed. If so, returns false on all ranks, with `failure` of the lowest rank that failed;
// among several ranks the text begins with that rank. A rank that passes ok = false must have set `failure`.
static inline bool checkpoint_agree(const Comm *c, bool ok, Failure *failure) {
    if (!c || c->world == 1) return ok;
    const double first = comm_min(c, COMM_WORLD, ok ? (double)c->world : (double)c->rank);
    if (first == (double)c->world) return true;
    if ((double)c->rank == first &&
        strncmp(failure->text, "rank ", 5) != 0) {  // an earlier call may have named the rank already
        const Failure own = *failure;
        fail(failure, "rank %lld on %s: %.1900s", (long long)c->rank, c->host, own.text);
        failure->lasting = own.lasting;
    }
    comm_broadcast(c, COMM_WORLD, (int64_t)first, failure, sizeof *failure);
    return false;
}

static inline bool checkpoint_is_leader(const Comm *c) { return !c || c->rank == 0; }

// Dies, on all ranks, if a rank does not see a folder that rank 0 makes: the ranks write one checkpoint or export
// together. `probe`, of rank 0: a path where it can make a folder, which it then removes. `option` gives `dir`. All
// ranks call.
static inline void checkpoint_require_shared(const Comm *c, const char *option, const char *dir, const char *probe) {
    Failure failure;
    char path[PATH_CAPACITY] = "";
    if (c->world == 1) return;
    if (c->rank == 0) format_checked(path, sizeof path, "%s", probe);
    if (c->rank == 0 && !folder_begin(path, &failure)) die("%s %s: %s", option, dir, failure.text);
    comm_broadcast(c, COMM_WORLD, 0, path, sizeof path);
    const double start = seconds_now();
    bool seen = path_exists(path);
    for (; !seen && seconds_now() - start < CHECKPOINT_SEEN_SECONDS; seen = path_exists(path)) usleep(100000);
    if (!seen)
        fail(&failure, "it does not see what rank 0 writes there; all ranks write parts of the same files, so give a "
                       "folder on a disk that all hosts share");
    seen = checkpoint_agree(c, seen, &failure);
    const Failure blind = failure;
    if (c->rank == 0 && !folder_remove(path, &failure)) die("%s %s: %s", option, dir, failure.text);
    if (!seen) die_with(EXIT_USAGE, "%s %s: %s", option, dir, blind.text);
}

// Context of checkpoint_fetch and checkpoint_part: specification i is parameter i % table->count of array kinds[i /
// table->count].
typedef struct {
    const ParameterTable *table;
    const TrainerState *state;
    StateKind kinds[NUM_STATE_KINDS];
} CheckpointSource;

static inline StateKind checkpoint_kind(const CheckpointSource *source, int64_t tensor) {
    return source->kinds[tensor / source->table->count];
}

static inline const char *state_prefix(StateKind kind) {
    static const char *const prefixes[] = {"",
                                           "exp_avg.",
                                           "exp_avg_sq.",
                                           "exp_avg_groups.",
                                           "exp_avg_sq_groups.",
                                           "exp_avg_scale.",
                                           "exp_avg_sq_scale.",
                                           "master_scale."};
    return prefixes[kind];
}

static inline bool state_is_groups(StateKind kind) {
    return kind == STATE_EXP_AVG_GROUPS || kind == STATE_EXP_AVG_SQ_GROUPS;
}

static inline bool state_is_scale(StateKind kind) { return kind >= STATE_EXP_AVG_SCALE && kind <= STATE_MASTER_SCALE; }

// Returns the type of an array's elements, in files and in `read` and `write` of TrainerState. Call it after
// options_resolve. For an array that the run does not have it returns ST_NUM_TYPES, but for STATE_AMAX_HISTORY and
// kinds up to STATE_CLIP_NORMS always ST_F32. FP16 masters count as ST_F32: the numbers that they stand for.
static inline SafetensorsType state_type(const Options *o, StateKind kind) {
    const bool msamp = o->optimizer_state == MOMENTS_MSAMP;
    if (kind == STATE_WEIGHTS) return options_bf16_weights(o) ? ST_BF16 : ST_F32;
    if (state_is_groups(kind)) return options_coat(o) ? ST_U32 : ST_NUM_TYPES;
    if (kind == STATE_MASTER_SCALE) return options_fp16_weights(o) ? ST_F32 : ST_NUM_TYPES;
    if (state_is_scale(kind)) return msamp ? ST_F32 : ST_NUM_TYPES;
    if (kind == STATE_GRADIENTS && (o->optimizer_in_backward || o->grad_accum_dtype == SUM_FP8)) return ST_NUM_TYPES;
    if (kind == STATE_GRADIENTS) return o->grad_accum_dtype == SUM_FP32 ? ST_F32 : ST_BF16;
    if (kind >= STATE_AMAX_HISTORY) return ST_F32;
    if (msamp) return kind == STATE_EXP_AVG ? ST_F8_E4M3 : ST_F16;
    if (options_coat(o)) return ST_F8_E4M3;
    return o->optimizer_state == MOMENTS_FP32 ? ST_F32 : ST_BF16;
}

// Lists the arrays that the run has, among those from `first` to `last`. Returns their number.
static inline int state_kinds(const TrainerState *s, StateKind first, StateKind last, StateKind *kinds) {
    int n = 0;
    for (int kind = first; kind <= (int)last; kind++)
        if (s->types[kind] != ST_NUM_TYPES) kinds[n++] = (StateKind)kind;
    return n;
}

// True if none of n values is NaN or infinite. A word of a group is checked as fp32: its upper bits are an fp32 number
// (coat.h).
static inline bool all_finite(const void *values, int64_t n, SafetensorsType type) {
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; i++)
        bad |= type == ST_F8_E4M3 ? (((const uint8_t *)values)[i] & 0x7f) == 0x7f
               : type == ST_F16   ? (((const uint16_t *)values)[i] & 0x7c00) == 0x7c00
               : type == ST_BF16  ? (((const uint16_t *)values)[i] & 0x7f80) == 0x7f80
                                  : (((const uint32_t *)values)[i] & 0x7f800000) == 0x7f800000;
    return !bad;
}

// True if none of n values is below zero. Values may be -0.
static inline bool none_negative(const void *values, int64_t n, SafetensorsType type) {
    const int64_t bytes = safetensors_type_bytes(type);
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; i++)
        bad |= bytes == 1   ? ((const uint8_t *)values)[i] > 0x80
               : bytes == 2 ? ((const uint16_t *)values)[i] > 0x8000
                            : ((const uint32_t *)values)[i] > 0x80000000;
    return !bad;
}

// True for arrays whose numbers are never below zero: second moments, and words of groups, which hold magnitudes.
static inline bool state_is_unsigned(StateKind kind) { return kind == STATE_EXP_AVG_SQ || state_is_groups(kind); }

// True if training can continue from n values of an array. A scale and its inverse must be normal fp32 numbers, as
// those of msamp.h are.
static inline bool state_accepts(StateKind kind, const void *values, int64_t n, SafetensorsType type) {
    if (state_is_scale(kind)) return *(const float *)values >= 0x1p-126f && *(const float *)values <= 0x1p126f;
    return all_finite(values, n, type) && (!state_is_unsigned(kind) || none_negative(values, n, type));
}

// Says what state_accepts refuses in an array.
static inline const char *state_refused(StateKind kind) {
    return state_is_scale(kind)      ? "a scale that is not a number from 2^-126 to 2^126"
           : state_is_unsigned(kind) ? "a value that is not finite or is below zero"
                                     : "a value that is not finite";
}

// Returns the range of the groups that hold a range of the parameter's elements. Groups are numbered from the one that
// holds the parameter's first element; joined parameters may share one.
static inline ShardRange state_groups(const Parameter *p, ShardRange r) {
    const int64_t begin = (p->offset + r.first) / COAT_GROUP, end = ceil_div(p->offset + r.first + r.count, COAT_GROUP);
    return (ShardRange){begin - p->offset / COAT_GROUP, r.count ? end - begin : 0, r.shard / COAT_GROUP};
}

// Returns the part of a parameter that this rank has in an array, in elements of that array.
static inline ShardRange state_range(const ParameterTable *t, const TrainerState *s, const Parameter *p,
                                     StateKind kind) {
    const ShardRange scale = {0, 1, p - t->entries}, whole = {0, parameter_elements(p), p->offset};
    if (state_is_scale(kind)) return scale;
    const ShardRange range = s->plan ? shard_parameter(t, s->plan, p) : whole;
    return state_is_groups(kind) ? state_groups(p, range) : range;
}

// Fails if values that are to be saved are not `accepted`: training could not continue from them. `what` says what is
// wrong with them. The failure is `lasting`, because saving again would fail again.
static inline bool checkpoint_check_saved(bool accepted, const char *prefix, const char *name, const char *what,
                                          Failure *failure) {
    if (accepted) return true;
    fail(failure, "tensor %s%.200s holds %s, so training cannot continue from it; nothing was saved", prefix, name,
         what);
    failure->lasting = true;
    return false;
}

static inline bool checkpoint_fetch(void *context, int64_t tensor, int64_t offset, int64_t count, void *out,
                                    Failure *failure) {
    const CheckpointSource *source = (const CheckpointSource *)context;
    const Parameter *p = &source->table->entries[tensor % source->table->count];
    const StateKind kind = checkpoint_kind(source, tensor);
    const ShardRange r = state_range(source->table, source->state, p, kind);
    source->state->read(source->state->context, kind, r.shard + offset - r.first, count, out);
    return checkpoint_check_saved(state_accepts(kind, out, count, source->state->types[kind]), state_prefix(kind),
                                  p->name, state_refused(kind), failure);
}

// Sets the part of a tensor that this rank writes. Replicas hold equal values, so only one of them writes the tensor.
// All ranks of a replica hold equal scales, so only its first rank writes scales.
static inline void checkpoint_part(void *context, int64_t tensor, int64_t *first, int64_t *count) {
    const CheckpointSource *source = (const CheckpointSource *)context;
    const Comm *c = source->state->comm;
    const StateKind kind = checkpoint_kind(source, tensor);
    const ShardRange r =
        state_range(source->table, source->state, &source->table->entries[tensor % source->table->count], kind);
    const bool writes = tensor % c->replicas == c->replica && (!state_is_scale(kind) || c->shard_rank == 0);
    *first = r.first, *count = writes ? r.count : 0;
}

// safetensors_save for several ranks: rank 0 creates the files, and all ranks write their parts. Then each rank hashes
// some of the files, and rank 0 writes the index.
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

// Sets the shape of a parameter's tensor in an array: the parameter's shape, a vector of its groups, or one scale.
static inline void state_shape(const Parameter *p, StateKind kind, int64_t *rows, int64_t *cols) {
    const ShardRange whole = {0, parameter_elements(p), 0};
    const bool like_parameter = !state_is_groups(kind) && !state_is_scale(kind);
    *rows = like_parameter ? p->rows : state_is_scale(kind) ? 1 : state_groups(p, whole).count;
    *cols = like_parameter ? p->cols : 0;
}

// Writes those of the arrays `first` to `last` that the run has, as STEM*.safetensors. Adds the files to `list`.
static inline bool checkpoint_write_tensors(const char *folder, const char *stem, const ParameterTable *t,
                                            const TrainerState *s, StateKind first, StateKind last, int64_t shard_bytes,
                                            FileList *list, Failure *failure) {
    CheckpointSource source = {t, s, {first}};
    const int num_kinds = state_kinds(s, first, last, source.kinds);
    SafetensorSpec *specs = (SafetensorSpec *)xcalloc((size_t)(num_kinds * t->count), sizeof *specs);
    for (int64_t i = 0; i < num_kinds * t->count; i++) {
        const Parameter *p = &t->entries[i % t->count];
        const StateKind kind = checkpoint_kind(&source, i);
        format_checked(specs[i].name, sizeof specs[i].name, "%s%s", state_prefix(kind), p->name);
        specs[i].type = s->types[kind];
        state_shape(p, kind, &specs[i].rows, &specs[i].cols);
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

// Writes config.json and model*.safetensors, and adds them to `list`.
static inline bool checkpoint_write_model(const char *folder, const ModelConfig *m, const ParameterTable *t,
                                          const TrainerState *s, int64_t shard_bytes, FileList *list,
                                          Failure *failure) {
    const char *type = s->types[STATE_WEIGHTS] == ST_F32 ? "float32" : "bfloat16";
    const bool ok = !checkpoint_is_leader(s->comm) || hf_config_write(m, folder, type, list, failure);
    return checkpoint_agree(s->comm, ok, failure) &&
           checkpoint_write_tensors(folder, "model", t, s, STATE_WEIGHTS, STATE_WEIGHTS, shard_bytes, list, failure);
}

// ---- reading tensors

// True if n weights of parameter `i` fit FP16 with the scale of its FP16 masters, as all that were saved do. Before a
// checkpoint brings a scale it is 0. Always true for a run without FP16 masters.
static inline bool state_fits_masters(const TrainerState *s, int64_t i, const float *weights, int64_t n) {
    float scale = 0, largest = 0;
    if (s->types[STATE_MASTER_SCALE] == ST_NUM_TYPES) return true;
    s->read(s->context, STATE_MASTER_SCALE, i, 1, &scale);
    for (int64_t k = 0; k < n; k++) largest = fmaxf(largest, fabsf(weights[k]));
    return largest * scale <= FP16_MAX;
}

// Reads this rank's shard of one array from an opened set, as the array's type (safetensors_read_as). Fails if a tensor
// is missing, has another shape or a type that cannot be converted, or holds a value that state_accepts or
// state_fits_masters refuses.
static inline bool checkpoint_read_array(const Safetensors *st, const ParameterTable *t, const TrainerState *s,
                                         StateKind kind, Failure *failure) {
    const SafetensorsType type = s->types[kind];
    const int64_t chunk = IO_CHUNK_BYTES / 4;
    int64_t largest = 1;
    for (int64_t i = 0; i < t->count; i++) largest = max_i64(largest, parameter_elements(&t->entries[i]));
    void *buffer = xcalloc((size_t)min_i64(chunk, largest), (size_t)safetensors_type_bytes(type));
    bool ok = true;
    for (int64_t i = 0; ok && i < t->count; i++) {
        const Parameter *p = &t->entries[i];
        char name[128];
        int64_t rows, cols;
        format_checked(name, sizeof name, "%s%s", state_prefix(kind), p->name);
        state_shape(p, kind, &rows, &cols);
        const Safetensor *tensor = safetensors_require(st, name, rows, cols, failure);
        ok = tensor != NULL;
        const ShardRange r = state_range(t, s, p, kind);
        for (int64_t done = 0; ok && done < r.count; done += chunk) {
            const int64_t n = min_i64(chunk, r.count - done);
            ok = safetensors_read_as(st, tensor, r.first + done, n, type, buffer, failure) &&
                 (state_accepts(kind, buffer, n, type) ||
                  fail(failure, "%s: tensor %.200s holds %s, so nothing can be trained from it",
                       st->files[tensor->file].path, name, state_refused(kind))) &&
                 (kind != STATE_WEIGHTS || state_fits_masters(s, i, (const float *)buffer, n) ||
                  fail(failure, "%s: tensor %.200s holds a value that FP16 cannot hold with its master_scale",
                       st->files[tensor->file].path, name));
            if (ok) s->write(s->context, kind, r.shard + done, n, buffer);
        }
    }
    free(buffer);
    return ok;
}

// ---- delayed scaling

// Returns the first of n values that is NaN, below zero or above `largest`; NULL: there is none.
static inline const float *delayed_refused(const float *values, int64_t n, float largest) {
    for (int64_t i = 0; i < n; i++)
        if (!(values[i] >= 0 && values[i] <= largest)) return &values[i];
    return NULL;
}

static inline bool checkpoint_fetch_delayed(void *context, int64_t tensor, int64_t offset, int64_t count, void *out,
                                            Failure *failure) {
    const TrainerState *s = (const TrainerState *)context;
    const bool scale = tensor || !s->delayed_window;
    s->read(s->context, scale ? STATE_SCALES : STATE_AMAX_HISTORY, offset, count, out);
    return checkpoint_check_saved(!delayed_refused((const float *)out, count, FLT_MAX), "",
                                  scale ? "scale" : "amax_history", "a value that is not finite or is below zero",
                                  failure);
}

// Rank 0 writes fp8_state.safetensors; all ranks get the result. Does nothing without delayed scaling.
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
        const int64_t first = !s->delayed_window;
        ok = safetensors_save(folder, "fp8_state", specs + first, 2 - first, INT64_MAX, checkpoint_fetch_delayed,
                              (void *)s, list, failure);
    }
    return checkpoint_agree(s->comm, ok, failure);
}

// Fails if a loaded history or scale holds NaN or a value below zero, or a scale is infinite. A history may hold
// infinity: older versions saved it after a step with an infinite amax. A scale may be 0: its tensor has had no cast.
static inline bool checkpoint_check_delayed(const float *history, const float *scales, const TrainerState *s,
                                            const char *path, Failure *failure) {
    const float *amax = delayed_refused(history, s->delayed_tensors * s->delayed_window, INFINITY);
    const float *scale = delayed_refused(scales, s->delayed_tensors, FLT_MAX);
    if (amax) return fail(failure, "%s: amax_history holds %g, which is not an amax", path, (double)*amax);
    if (scale) return fail(failure, "%s: scale holds %g, which is not a scale", path, (double)*scale);
    return true;
}

// Reads fp8_state.safetensors; every rank reads the whole file. Does nothing without delayed scaling.
static inline bool checkpoint_read_delayed(const char *checkpoint, const TrainerState *s, Failure *failure) {
    const int64_t tensors = s->delayed_tensors, elements = tensors * s->delayed_window;
    Safetensors st;
    if (!tensors) return true;
    if (!safetensors_open_folder(&st, checkpoint, "fp8_state", failure)) return false;
    float *history = (float *)xcalloc((size_t)(elements + tensors), sizeof *history), *scales = history + elements;
    const Safetensor *first =
        elements ? safetensors_require(&st, "amax_history", tensors, s->delayed_window, failure) : NULL;
    const Safetensor *second = first || !elements ? safetensors_require(&st, "scale", tensors, 0, failure) : NULL;
    const bool ok = second && (!first || safetensors_read(&st, first, 0, elements, true, history, failure)) &&
                    safetensors_read(&st, second, 0, tensors, true, scales, failure) &&
                    checkpoint_check_delayed(history, scales, s, st.files[0].path, failure);
    for (int64_t i = 0; i < elements; i++)
        if (isinf(history[i])) history[i] = 0;  // it gives no scale, and a save would refuse it
    if (ok && elements) s->write(s->context, STATE_AMAX_HISTORY, 0, elements, history);
    if (ok) s->write(s->context, STATE_SCALES, 0, tensors, scales);
    safetensors_close(&st);
    free(history);
    return ok;
}

#endif
