// Receipts (--receipt): the hash of each tensor's weights, moments, scales and gradients, chained, in log.jsonl.
#ifndef LLMC_RECEIPT_REPORT_H
#define LLMC_RECEIPT_REPORT_H

#include "../checkpoint/tensors.h"
#include "logger.h"

// The receipts of a run. A line's chain holds the values of all lines since the start of this process.
typedef struct {
    const ParameterTable *table;
    const TrainerState *state;
    Logger *logger;
    uint64_t chain;
    bool begun;  // the first line is written: it names the tensors, and has no gradients
} Receipts;

// The names of arrays in a receipt, by StateKind.
static inline const char *receipt_name(int kind) {
    static const char *const names[] = {"weights",           "exp_avg",       "exp_avg_sq",       "exp_avg_groups",
                                        "exp_avg_sq_groups", "exp_avg_scale", "exp_avg_sq_scale", "master_scale",
                                        "amax_history",      "scales",        "clip_norms",       "gradients"};
    static_assert(sizeof names / sizeof *names == NUM_STATE_KINDS, "a name for each array");
    return names[kind];
}

// Arrays that are no tensors' but the run's: each rank has them whole.
static inline int64_t receipt_whole(const TrainerState *s, int kind) {
    return kind == STATE_AMAX_HISTORY ? s->delayed_tensors * s->delayed_window
           : kind == STATE_SCALES     ? s->delayed_tensors
           : kind == STATE_CLIP_NORMS ? s->clip_norms
                                      : 0;
}

static inline bool receipt_is_whole(int kind) { return kind >= STATE_AMAX_HISTORY && kind <= STATE_CLIP_NORMS; }

// How many hashes a receipt has of an array.
static inline int64_t receipt_count(const Receipts *r, int kind) {
    if (receipt_is_whole(kind)) return receipt_whole(r->state, kind) > 0;
    const bool has = kind == STATE_GRADIENTS ? r->begun : true;
    return !has || r->state->types[kind] == ST_NUM_TYPES ? 0 : r->table->count;
}

// The part of tensor i that this rank hashes. Only a replica's first rank hashes what all ranks have.
static inline ReceiptPart receipt_part(const Receipts *r, StateKind kind, int64_t i) {
    const TrainerState *s = r->state;
    const ReceiptPart none = {0, 0, 0};
    if ((receipt_is_whole(kind) || state_is_scale(kind)) && s->comm->shard_rank) return none;
    if (receipt_is_whole(kind)) return (ReceiptPart){0, receipt_whole(s, kind), 0};
    const Parameter *p = &r->table->entries[i];
    const ShardRange range = state_range(r->table, s, p, kind);
    if (state_is_scale(kind)) return (ReceiptPart){range.shard, range.count, range.shard};
    const int64_t before = state_is_groups(kind) ? p->offset / COAT_GROUP : p->offset;
    return (ReceiptPart){before + range.first, range.count, range.shard};
}

// Hashes a part through TrainerState.read.
static inline uint64_t receipt_read(const TrainerState *s, StateKind kind, ReceiptPart p) {
    static uint64_t buffer[8192 + 1];
    const int64_t bytes = safetensors_type_bytes(s->types[kind]), e = receipt_per_word(bytes);
    uint64_t sum = 0;
    while (p.count) {
        ReceiptPart chunk = {p.flat, min_i64(p.count, 8192 * e - p.flat % e), p.flat % e};
        s->read(s->context, kind, p.shard, chunk.count, (char *)buffer + chunk.shard * bytes);
        sum += receipt_sum(buffer, bytes, chunk);
        p.flat += chunk.count, p.shard += chunk.count, p.count -= chunk.count;
    }
    return sum;
}

// Hashes this rank's parts of all arrays into sums, array by array.
static inline void receipt_hash(const Receipts *r, uint64_t *sums) {
    const TrainerState *s = r->state;
    ReceiptPart *parts = (ReceiptPart *)xcalloc((size_t)r->table->count, sizeof *parts);
    for (int kind = 0; kind < NUM_STATE_KINDS; kind++) {
        const int64_t n = receipt_count(r, kind);
        for (int64_t i = 0; i < n; i++) parts[i] = receipt_part(r, (StateKind)kind, i);
        const bool small = receipt_is_whole(kind) || state_is_scale((StateKind)kind);
        if (n && s->hash && !small) s->hash(s->context, (StateKind)kind, parts, n, sums);
        else
            for (int64_t i = 0; i < n; i++) sums[i] = receipt_read(s, (StateKind)kind, parts[i]);
        sums += n;
    }
    free(parts);
}

// Dies if a replica's tensor differs from that of the first replica. sums: [ranks][n].
static inline void receipt_compare_replicas(const Receipts *r, int64_t step, uint64_t *const *sums, int64_t replicas) {
    for (int64_t other = 1; other < replicas; other++) {
        const uint64_t *first = sums[0], *now = sums[other];
        for (int kind = 0; kind < NUM_STATE_KINDS; kind++)
            for (int64_t i = 0, n = receipt_count(r, kind); i < n; i++)
                if (*first++ != *now++)
                    die("step %lld: %s of %s differ between the first replica and replica %lld, ranks %lld to %lld: a "
                        "GPU computed wrongly, or its memory is damaged; continue from an earlier checkpoint",
                        (long long)step, receipt_name(kind),
                        receipt_is_whole(kind) ? "delayed scaling" : r->table->entries[i].name, (long long)other + 1,
                        (long long)(other * r->state->comm->shard_size),
                        (long long)((other + 1) * r->state->comm->shard_size - 1));
    }
}

// Writes the line of a receipt.
static inline void receipt_log(Receipts *r, int64_t step, int64_t samples, const uint64_t *sums, int64_t n,
                               const uint64_t *ranks, int64_t world) {
    JsonText line = logger_begin("receipt");
    r->chain = receipt_chain(receipt_chain(r->chain, (uint64_t)step), (uint64_t)samples);
    for (int64_t i = 0; i < n; i++) r->chain = receipt_chain(r->chain, sums[i]);
    json_text_add(&line, ", \"step\": %lld, \"samples\": %lld, \"chain\": \"%016llx\"", (long long)step,
                  (long long)samples, (unsigned long long)r->chain);
    json_text_add(&line, ", \"ranks\": [");
    for (int64_t i = 0; i < world; i++)
        json_text_add(&line, "%s\"%016llx\"", i ? ", " : "", (unsigned long long)ranks[i]);
    json_text_add(&line, "]");
    for (int64_t i = 0; !r->begun && i < r->table->count; i++) {
        json_text_add(&line, i ? ", " : ", \"tensors\": [");
        json_text_add_string(&line, r->table->entries[i].name);
    }
    if (!r->begun) json_text_add(&line, "]");
    for (int kind = 0; kind < NUM_STATE_KINDS; kind++) {
        const int64_t count = receipt_count(r, kind);
        if (count) json_text_add(&line, ", \"%s\": \"", receipt_name(kind));
        for (int64_t i = 0; i < count; i++) json_text_add(&line, "%016llx", (unsigned long long)*sums++);
        if (count) json_text_add(&line, "\"");
    }
    logger_write(r->logger, &line);
}

// Hashes the state after `step` steps and `samples` sequences, and writes it to the log. Must come before anything that
// runs the model, which uses the memory of gradients. All ranks call.
static inline void receipt_take(Receipts *r, int64_t step, int64_t samples) {
    const Comm *c = r->state->comm;
    int64_t n = 0;
    for (int kind = 0; kind < NUM_STATE_KINDS; kind++) n += receipt_count(r, kind);
    uint64_t *all = (uint64_t *)xcalloc((size_t)((c->world + 1) * (n + 1)), sizeof *all), *own = all + c->world * n;
    uint64_t *ranks = own + n, **replicas = (uint64_t **)xcalloc((size_t)c->world, sizeof *replicas);
    receipt_hash(r, own);
    comm_all_gather(c, COMM_WORLD, own, all, n * (int64_t)sizeof *all);
    for (int64_t rank = 0; rank < c->world; rank++) {
        uint64_t *now = all + rank * n, **replica = &replicas[rank / c->shard_size];
        for (int64_t i = 0; i < n; i++) ranks[rank] = receipt_chain(ranks[rank], now[i]);
        if (rank % c->shard_size == 0) *replica = now;
        else
            for (int64_t i = 0; i < n; i++) (*replica)[i] += now[i];
    }
    receipt_compare_replicas(r, step, replicas, c->world / c->shard_size);
    receipt_log(r, step, samples, replicas[0], n, ranks, c->world);
    r->begun = true;
    free(replicas);
    free(all);
}

#endif
