// Keeps AdamW's moments, fp32 master weights or both in pinned host memory (--offload moments,master).
// The member `kept` of Offload does the same with activations (offload_kept.cuh).
//
// The update takes a rank's shard in parts. A part is copied to a slot of GPU memory, updated there, and copied back.
// Each direction of copies has a stream of its own. While one slot's part is updated, every other slot gets one of the
// parts that follow in the order of updates. With --optimizer-in-backward, parts are copied while backward computes.
// Only the codes of COAT's moments are offloaded; the words of its groups (coat.h) stay on the GPU. Results do not
// depend on offloading.
#ifndef LLMC_OFFLOAD_CUH
#define LLMC_OFFLOAD_CUH

#include "../optimizer/adamw.cuh"
#include "../optimizer/adamw_state.cuh"
#include "offload_kept.cuh"

enum { OFFLOAD_PART = 1024 * ADAMW_BLOCK, OFFLOAD_MAX_SLOTS = 64 };  // elements of a part: at most 16 Mi

// The arrays that may be offloaded.
enum { OFFLOAD_EXP_AVG, OFFLOAD_EXP_AVG_SQ, OFFLOAD_MASTER, OFFLOAD_ARRAYS };

// A place for a part on the GPU.
typedef struct {
    int64_t part;                 // index of the part that it holds or gets; -1: none
    char *array[OFFLOAD_ARRAYS];  // NULL for arrays that stay on the GPU
    cudaEvent_t loaded, updated, stored;
} OffloadSlot;

typedef struct Offload {
    int64_t bytes[OFFLOAD_ARRAYS];  // bytes of an element; 0: the array stays on the GPU
    int64_t element;                // sum of `bytes`; 0: neither moments nor masters are offloaded
    const ShardPlan *plan;
    int64_t layers;
    bool backwards;              // true: the layers are updated from the last to the first, and the root after them
    char *host[OFFLOAD_ARRAYS];  // pinned host memory, one number for each element of the shard
    OffloadSlot slots[OFFLOAD_MAX_SLOTS];
    int64_t num_slots, next_slot;
    cudaStream_t in, out;
    KeptOffload kept;
} Offload;

static inline int64_t offload_unit_parts(const Offload *f, int64_t l) {
    return ceil_div(shard_elements(f->plan, l), OFFLOAD_PART);
}

// Returns the index of part p of unit l: ROOT's parts come first.
static inline int64_t offload_index(const Offload *f, int64_t l, int64_t p) {
    return l == ROOT ? p : offload_unit_parts(f, ROOT) + l * offload_unit_parts(f, 0) + p;
}

// Returns the unit of a part.
static inline int64_t offload_unit(const Offload *f, int64_t index) {
    const int64_t root = offload_unit_parts(f, ROOT);
    return index < root ? (int64_t)ROOT : (index - root) / offload_unit_parts(f, 0);
}

// Returns the part that is updated after this one; after a step's last, the first of the next step.
static inline int64_t offload_following(const Offload *f, int64_t index) {
    int64_t l = offload_unit(f, index), step = f->backwards ? -1 : 1;
    if (index + 1 < offload_index(f, l, offload_unit_parts(f, l))) return index + 1;
    l += step;  // ROOT is -1
    if (l < ROOT) l = f->layers - 1;
    if (l == f->layers) l = ROOT;
    return offload_index(f, l, 0);
}

// Describes the parts of a rank's shard. The slots hold a layer's parts and two more, but at most OFFLOAD_MAX_SLOTS. If
// the shard has at most twice as many parts as that, there is only one slot: then a part is copied to the GPU after the
// part before it is back in host memory.
static inline void offload_describe(Offload *f, const Options *o, const ShardPlan *plan, const KeptSpan *kept,
                                    int64_t layers) {
    const Offloaded offloaded = options_offloaded(o);
    const AdamwMoments moments = adamw_moments_of(o);
    const int64_t first = adamw_moment_bytes(moments), second = adamw_moments_bytes(moments) - first;
    f->bytes[OFFLOAD_EXP_AVG] = offloaded.moments ? first : 0;
    f->bytes[OFFLOAD_EXP_AVG_SQ] = offloaded.moments ? second : 0;
    f->bytes[OFFLOAD_MASTER] = offloaded.master ? (int64_t)sizeof(float) : 0;
    f->element = 0;
    f->kept = KeptOffload{};
    f->kept.kept = offloaded.activations ? kept : NULL, f->kept.layers = layers;
    for (int k = 0; k < OFFLOAD_ARRAYS; k++) f->element += f->bytes[k];
    f->plan = plan, f->layers = layers, f->backwards = o->optimizer_in_backward;
    const int64_t wanted = min_i64(offload_unit_parts(f, 0) + 2, OFFLOAD_MAX_SLOTS);
    const int64_t parts = offload_index(f, layers, 0);
    f->num_slots = !f->element ? 0 : parts > 2 * wanted ? wanted : 1;
}

// Places the slots. In the memory plan they count as optimizer state.
static inline void offload_place(Offload *f, Arena *a) {
    for (int64_t i = 0; i < f->num_slots; i++)
        for (int k = 0; k < OFFLOAD_ARRAYS; k++)
            f->slots[i].array[k] = f->bytes[k] ? (char *)arena_take(a, OFFLOAD_PART * f->bytes[k]) : NULL;
}

// Prints, for a dry run, what offloading of activations, and then of moments and masters, takes and moves.
static inline void offload_print(const Offload *f, KeptPasses passes) {
    const double bytes = (double)(f->plan->total * f->element);
    kept_print(&f->kept, passes);
    if (!f->element) return;
    printf("%-26s %.1f GiB of %s%s%s in host memory; each step copies as much to the GPU and back, which takes %.2f s "
           "at %d GB/s each way (PCIe 5.0 x16)%s\n",
           "offloaded", bytes / (1 << 30), f->bytes[OFFLOAD_EXP_AVG] ? "moments" : "",
           f->bytes[OFFLOAD_EXP_AVG] && f->bytes[OFFLOAD_MASTER] ? " and " : "",
           f->bytes[OFFLOAD_MASTER] ? "master weights" : "", bytes / (OFFLOAD_GB_PER_S * 1e9), OFFLOAD_GB_PER_S,
           f->backwards ? ", while backward computes"
                        : "; with --optimizer-in-backward backward would hide some of it");
}

// Allocates the host memory, and sets the pointers of offloaded arrays in `params` to it. Dies if the memory cannot be
// pinned. The GPU reads and writes this memory directly when weights are initialized or loaded.
static inline void offload_create(Offload *f, AdamwArrays *params) {
    kept_create(&f->kept);
    if (!f->element) return;
    CUDA_CHECK(cudaStreamCreateWithFlags(&f->in, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&f->out, cudaStreamNonBlocking));
    for (int64_t i = 0; i < f->num_slots; i++) {
        OffloadSlot *s = &f->slots[i];
        s->part = -1;
        for (cudaEvent_t *event : {&s->loaded, &s->updated, &s->stored})
            CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    for (int k = 0; k < OFFLOAD_ARRAYS; k++)
        if (f->bytes[k]) f->host[k] = (char *)host_memory_pinned("--offload", f->plan->total * f->bytes[k]);
    if (f->bytes[OFFLOAD_EXP_AVG])
        params->exp_avg = f->host[OFFLOAD_EXP_AVG], params->exp_avg_sq = f->host[OFFLOAD_EXP_AVG_SQ];
    if (f->bytes[OFFLOAD_MASTER]) params->master = (float *)f->host[OFFLOAD_MASTER];
}

static inline void offload_destroy(Offload *f) {
    kept_destroy(&f->kept);
    if (!f->element) return;
    for (int64_t i = 0; i < f->num_slots; i++)
        for (cudaEvent_t event : {f->slots[i].loaded, f->slots[i].updated, f->slots[i].stored})
            CUDA_CHECK(cudaEventDestroy(event));
    CUDA_CHECK(cudaStreamDestroy(f->in));
    CUDA_CHECK(cudaStreamDestroy(f->out));
    for (int k = 0; k < OFFLOAD_ARRAYS; k++)
        if (f->bytes[k]) CUDA_CHECK(cudaFreeHost(f->host[k]));
}

// Makes the stream wait for all copies of parts to the host that have been enqueued.
static inline void offload_wait(const Offload *f, cudaStream_t stream) {
    for (int64_t i = 0; i < f->num_slots; i++) CUDA_CHECK(cudaStreamWaitEvent(stream, f->slots[i].stored));
}

// The elements of a part.
typedef struct {
    int64_t unit, begin, size;  // begin: counted from the unit's start
} OffloadSpan;

static inline OffloadSpan offload_span(const Offload *f, int64_t index) {
    const int64_t l = offload_unit(f, index), begin = (index - offload_index(f, l, 0)) * OFFLOAD_PART;
    return OffloadSpan{l, begin, min_i64(shard_elements(f->plan, l) - begin, OFFLOAD_PART)};
}

// Copies elements of the shard from host memory to a slot, or back.
static inline void offload_copy(const Offload *f, const OffloadSlot *s, int64_t first, int64_t count, bool back) {
    for (int k = 0; k < OFFLOAD_ARRAYS; k++) {
        const size_t bytes = (size_t)(count * f->bytes[k]);
        char *host = f->host[k] + first * f->bytes[k];
        if (bytes && back) CUDA_CHECK(cudaMemcpyAsync(host, s->array[k], bytes, cudaMemcpyDefault, f->out));
        else if (bytes) CUDA_CHECK(cudaMemcpyAsync(s->array[k], host, bytes, cudaMemcpyDefault, f->in));
    }
}

// Returns the slot of part `index`. If no slot has the part, takes the next slot and enqueues the part's copy to the
// GPU. This copy waits until the part that was in the slot before is back in host memory, and with it each part that
// was copied back earlier.
static inline OffloadSlot *offload_fetch(Offload *f, int64_t index) {
    const OffloadSpan span = offload_span(f, index);
    for (int64_t i = 0; i < f->num_slots; i++)
        if (f->slots[i].part == index) return &f->slots[i];
    OffloadSlot *s = &f->slots[f->next_slot++ % f->num_slots];
    CUDA_CHECK(cudaStreamWaitEvent(f->in, s->stored));
    offload_copy(f, s, shard_begin(f->plan, span.unit) + span.begin, span.size, false);
    CUDA_CHECK(cudaEventRecord(s->loaded, f->in));
    s->part = index;
    return s;
}

// Updates part `index`. w and `unit` are what adamw_update_of gives for the part's unit.
static inline void offload_update_part(Offload *f, const AdamwUpdate *w, const AdamwUnits *unit, int64_t index,
                                       cudaStream_t stream) {
    const OffloadSpan span = offload_span(f, index);
    OffloadSlot *s = offload_fetch(f, index);
    AdamwUpdate update = *w;
    const AdamwUnits u = adamw_part(unit, span.begin, span.size);
    void *at[OFFLOAD_ARRAYS];
    for (int k = 0; k < OFFLOAD_ARRAYS; k++) at[k] = (void *)((intptr_t)s->array[k] - u.first * f->bytes[k]);
    if (s->array[OFFLOAD_EXP_AVG])
        update.arrays.exp_avg = at[OFFLOAD_EXP_AVG], update.arrays.exp_avg_sq = at[OFFLOAD_EXP_AVG_SQ];
    if (s->array[OFFLOAD_MASTER]) update.arrays.master = (float *)at[OFFLOAD_MASTER];
    CUDA_CHECK(cudaStreamWaitEvent(stream, s->loaded));
    adamw_launch(&update, &u, stream);
    CUDA_CHECK(cudaEventRecord(s->updated, stream));
    CUDA_CHECK(cudaStreamWaitEvent(f->out, s->updated));
    offload_copy(f, s, u.first, span.size, true);
    CUDA_CHECK(cudaEventRecord(s->stored, f->out));
    s->part = -1;
}

// Does what adamw_update_units does, with arrays that may be in host memory.
static inline void offload_update_units(Offload *f, const AdamwUpdate *w, const ParameterTable *t, int64_t l,
                                        int64_t count, int64_t first_gradient, cudaStream_t stream) {
    if (!f->element) return adamw_update_units(w, t, f->plan, l, count, first_gradient, stream);
    for (int64_t unit = l; unit < l + count; unit++) {
        AdamwUnits u;
        const int64_t gradient = first_gradient + shard_begin(f->plan, unit) - shard_begin(f->plan, l);
        const AdamwUpdate update = adamw_update_of(w, t, f->plan, unit, 1, gradient, &u);
        for (int64_t p = 0; p < offload_unit_parts(f, unit); p++) {
            const int64_t index = offload_index(f, unit, p);
            offload_update_part(f, &update, &u, index, stream);
            int64_t ahead = index;
            for (int64_t i = 1; i < f->num_slots; i++) offload_fetch(f, ahead = offload_following(f, ahead));
        }
    }
}

#endif
