// --replay-every: ranks compute the gradients of each other's micro-batches again, and name the rank whose bits differ.
//
// In the last micro-step of a due step, each rank hashes the gradients that it computes, tensor by tensor, before they
// are added up. Then each rank computes the same of the next rank's micro-batch, from the same weights. If a hash
// differs, the rank after that one computes it a third time (of two ranks, the first one itself), and two against one
// decide.
#ifndef LLMC_REPLAY_H
#define LLMC_REPLAY_H

#include "../config/parameters.h"
#include "../data/dataloader.h"
#include "../ranks/comm.h"

// The CPU trainer's part of a replay.
typedef struct {
    bool hashes;       // gradients of this micro-step are hashed
    bool again;        // it repeats another rank's micro-batch: its gradients are added to nothing
    uint64_t *values;  // [replay_count] hashes of this micro-step
} Replay;

// Hashes of a micro-step: of the gradient of each tensor, in table order, and of the embedding's output.
static inline int64_t replay_count(const ParameterTable *t) { return t->count + 1; }

// The place, among the hashes of a micro-step, of the one that is n-th in the order of the backward pass.
static inline int64_t replay_place(const ParameterTable *t, int64_t n) {
    const int64_t lookup = t->entries[0].flags & PARAM_LOOKUP ? 1 : 0;
    int64_t roots = lookup;
    while (roots < t->count && t->entries[roots].layer == ROOT) roots++;
    if (n < roots - lookup) return n + lookup;
    n -= roots - lookup;
    if (n < t->count - roots) return t->count - 1 - n;
    return lookup && n > t->count - roots ? 0 : t->count;
}

// The step that is replayed, counted from 0, and the first of its samples.
typedef struct {
    DataLoader *data;
    int64_t first_sample, step;
} ReplayedStep;

// Sets hashes [replay_count] of the gradients of the step's last micro-batch. shift: of the rank so far behind this
// one, which it computes again; 0: this rank's own, which it has.
typedef void (*ReplayPass)(void *trainer, const ReplayedStep *step, int64_t shift, uint64_t *hashes);

// Each rank sends this about itself.
typedef struct {
    char host[128], device[64];
} ReplayRank;

// The hashes that all ranks have computed in three passes: of pass p, rank r has those of rank (r + p) % world.
typedef struct {
    int64_t world, count;
    uint64_t *pass[3];  // [world][count]
} ReplayHashes;

// Hash number i that pass `pass` has of the micro-batch of rank r.
static inline uint64_t replay_hash(const ReplayHashes *h, int pass, int64_t r, int64_t i) {
    const int64_t by = (r + 2 * h->world - pass) % h->world;
    return h->pass[pass][by * h->count + i];
}

// Finds, in the order of the backward pass, the first hash that differs in the first two passes, and whose micro-batch
// it is of. Returns false if none differs.
static inline bool replay_find(const ReplayHashes *h, const ParameterTable *t, int64_t *rank, int64_t *place) {
    for (int64_t n = 0; n < h->count; n++)
        for (int64_t r = 0; r < h->world; r++) {
            const int64_t i = replay_place(t, n);
            if (replay_hash(h, 0, r, i) == replay_hash(h, 1, r, i)) continue;
            *rank = r, *place = i;
            return true;
        }
    return false;
}

// Returns the rank that is alone with its hash i of rank r's micro-batch; -1 if all three differ, or if of two
// ranks the first one repeats itself, so that the fault may be in either.
static inline int64_t replay_judge(const ReplayHashes *h, int64_t r, int64_t i) {
    const uint64_t first = replay_hash(h, 0, r, i), second = replay_hash(h, 1, r, i), third = replay_hash(h, 2, r, i);
    if (second == third) return r;
    return first == third && h->world > 2 ? (r + h->world - 1) % h->world : -1;
}

// Ends the run, on the rank that is to blame or, if none is known, on the one whose micro-batch it is. what: whose
// gradients differ, hash number i. A wrong forward pass shows in the head's.
static inline void replay_blame(const Comm *c, const ReplayHashes *h, const char *device, int64_t step, int64_t r,
                                int64_t i, const char *what) {
    const int64_t judged = replay_judge(h, r, i), other = (r + h->world - 1) % h->world,
                  blamed = judged >= 0 ? judged : r;
    ReplayRank *ranks = (ReplayRank *)xcalloc((size_t)c->world, sizeof *ranks), *mine = &ranks[c->rank];
    format_checked(mine->host, sizeof mine->host, "%.127s", c->host);
    format_checked(mine->device, sizeof mine->device, "%.63s", device);
    comm_all_gather(c, COMM_WORLD, mine, ranks, (int64_t)sizeof *mine);
    char more[512] = "";
    if (judged < 0)
        format_checked(more, sizeof more, ", or rank %lld on %s (%s) did", (long long)other, ranks[other].host,
                       ranks[other].device);
    if (c->rank == blamed)
        die("step %lld: rank %lld on %s (%s) computed wrongly%s: other ranks get other gradients for the same "
            "micro-batch, first of %s. Test that GPU, and continue from the last checkpoint without it",
            (long long)step, (long long)blamed, ranks[blamed].host, ranks[blamed].device, more, what);
    comm_barrier(c, COMM_WORLD);  // the blamed rank ends this one
}

// Compares the gradients of each rank's last micro-batch with those that another rank gets. Ends the run if they
// differ. All ranks call, after the step has computed its gradients and before it changes a weight. `device`: this
// rank's, for the message.
static inline void replay_check(const Comm *c, const ParameterTable *t, ReplayPass pass, void *trainer,
                                const ReplayedStep *step, const char *device) {
    const int64_t count = replay_count(t), bytes = count * (int64_t)sizeof(uint64_t);
    uint64_t *memory = (uint64_t *)xcalloc((size_t)((3 * c->world + 1) * count), sizeof *memory);
    ReplayHashes h = {c->world, count, {memory, memory + c->world * count, memory + 2 * c->world * count}};
    uint64_t *mine = memory + 3 * c->world * count;
    int64_t rank, i;
    for (int64_t shift = 0; shift < 3; shift++) {
        if (shift == 2 && !replay_find(&h, t, &rank, &i)) break;
        pass(trainer, step, shift, mine);
        comm_all_gather(c, COMM_WORLD, mine, h.pass[shift], bytes);
        if (shift == 2)
            replay_blame(c, &h, device, step->step + 1, rank, i,
                         i < t->count ? t->entries[i].name : "the embedding's output");
    }
    free(memory);
}

#endif
