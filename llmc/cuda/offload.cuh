// Keeps AdamW's moments in pinned host memory (--offload moments).
//
// The update takes a rank's shard in parts. A part's moments are copied to a slot of GPU memory, updated there, and
// copied back. Copies in both directions have streams of their own, and begin before the update needs them: the order
// of parts is known, so as many of the next parts are on their way as there are other slots. With
// --optimizer-in-backward the slots hold a whole layer, whose moments travel while backward computes. The words of FP8
// moments stay on the GPU. Results do not depend on offloading.
#ifndef LLMC_OFFLOAD_CUH
#define LLMC_OFFLOAD_CUH

#include "adamw.cuh"
#include "adamw_state.cuh"

enum { OFFLOAD_PART = 1024 * ADAMW_BLOCK, OFFLOAD_MAX_SLOTS = 64 };  // elements of a part: 16 Mi

// A place for a part on the GPU.
typedef struct {
    int64_t part;  // index of the part that it holds or gets; -1: none
    char *exp_avg, *exp_avg_sq;
    cudaEvent_t loaded, updated, stored;
} OffloadSlot;

typedef struct {
    bool on;
    int64_t moment_bytes;  // bytes of one moment of an element
    const ShardPlan *plan;
    int64_t layers;
    bool backwards;              // true: the layers are updated from the last to the first, and the root after them
    char *exp_avg, *exp_avg_sq;  // pinned host memory, one moment for each element of the shard
    OffloadSlot slots[OFFLOAD_MAX_SLOTS];
    int64_t num_slots, next_slot;
    cudaStream_t in, out;
} Offload;

static inline int64_t offload_parts(int64_t elements) { return ceil_div(elements, OFFLOAD_PART); }

static inline int64_t offload_unit_parts(const Offload *f, int64_t l) {
    return offload_parts(shard_elements(f->plan, l));
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

// Describes the parts of a rank's shard. Slots hold a layer and two more parts; a shard with few parts gets one slot,
// with which every copy waits for the last.
static inline void offload_describe(Offload *f, const Options *o, const ShardPlan *plan, int64_t layers) {
    f->on = o->offload == OFFLOAD_MOMENTS;
    f->moment_bytes = adamw_moment_bytes(adamw_moments_of(o));
    f->plan = plan, f->layers = layers, f->backwards = o->optimizer_in_backward;
    const int64_t wanted = min_i64(offload_unit_parts(f, 0) + 2, OFFLOAD_MAX_SLOTS);
    const int64_t parts = offload_index(f, layers, 0);
    f->num_slots = !f->on ? 0 : parts > 2 * wanted ? wanted : 1;
}

// Places the slots. They belong to the group of the optimizer state.
static inline void offload_place(Offload *f, Arena *a) {
    for (int64_t i = 0; i < f->num_slots; i++) {
        f->slots[i].exp_avg = (char *)arena_take(a, OFFLOAD_PART * f->moment_bytes);
        f->slots[i].exp_avg_sq = (char *)arena_take(a, OFFLOAD_PART * f->moment_bytes);
    }
}

// Prints, in a dry run, what offloading takes and moves.
static inline void offload_print(const Offload *f) {
    const double GiB = 2 * (double)(f->plan->total * f->moment_bytes) / (1 << 30);
    if (f->on)
        printf("%-26s %.1f GiB of moments in host memory; each step copies as much to the GPU and back, which takes "
               "%.2f s "
               "at 47 GB/s each way (PCIe 5.0 x16)%s\n",
               "offloaded", GiB, GiB * 1.073741824 / 47,
               f->backwards ? ", while backward computes"
                            : "; with --optimizer-in-backward backward would hide some of it");
}

static inline char *offload_host_memory(int64_t bytes) {
    void *memory = NULL;
    const cudaError_t status = cudaHostAlloc(&memory, (size_t)bytes, cudaHostAllocDefault);
    if (status != cudaSuccess)
        die_with(EXIT_MEMORY,
                 "--offload moments: cannot pin %.1f GiB of host memory for one of two moments: %s; free host memory, "
                 "or leave out --offload",
                 (double)bytes / (1 << 30), cudaGetErrorString(status));
    memset(memory, 0, (size_t)bytes);
    return (char *)memory;
}

// Takes the host memory, and points the moments at it.
static inline void offload_create(Offload *f, AdamwArrays *params) {
    if (!f->on) return;
    CUDA_CHECK(cudaStreamCreateWithFlags(&f->in, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&f->out, cudaStreamNonBlocking));
    for (int64_t i = 0; i < f->num_slots; i++) {
        OffloadSlot *s = &f->slots[i];
        s->part = -1;
        for (cudaEvent_t *event : {&s->loaded, &s->updated, &s->stored})
            CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    f->exp_avg = offload_host_memory(f->plan->total * f->moment_bytes);
    f->exp_avg_sq = offload_host_memory(f->plan->total * f->moment_bytes);
    params->exp_avg = f->exp_avg, params->exp_avg_sq = f->exp_avg_sq;
}

static inline void offload_destroy(Offload *f) {
    if (!f->on) return;
    for (int64_t i = 0; i < f->num_slots; i++)
        for (cudaEvent_t event : {f->slots[i].loaded, f->slots[i].updated, f->slots[i].stored})
            CUDA_CHECK(cudaEventDestroy(event));
    CUDA_CHECK(cudaStreamDestroy(f->in));
    CUDA_CHECK(cudaStreamDestroy(f->out));
    CUDA_CHECK(cudaFreeHost(f->exp_avg));
    CUDA_CHECK(cudaFreeHost(f->exp_avg_sq));
}

// Makes the stream wait for all copies to the host.
static inline void offload_wait(const Offload *f, cudaStream_t stream) {
    for (int64_t i = 0; i < f->num_slots; i++) CUDA_CHECK(cudaStreamWaitEvent(stream, f->slots[i].stored));
}

// The elements of a part.
typedef struct {
    int64_t unit, begin, size;  // begin: counted from the unit's start
} OffloadSpan;

static inline OffloadSpan offload_span(const Offload *f, int64_t index) {
    const int64_t l = offload_unit(f, index), begin = (index - offload_index(f, l, 0)) * OFFLOAD_PART;
    const OffloadSpan s = {l, begin, min_i64(shard_elements(f->plan, l) - begin, OFFLOAD_PART)};
    return s;
}

// Returns the slot of a part. Starts its copy to the GPU if no slot has it. A slot's last part is back in host memory
// by then, and so is all that was copied before it.
static inline OffloadSlot *offload_fetch(Offload *f, int64_t index) {
    const OffloadSpan span = offload_span(f, index);
    for (int64_t i = 0; i < f->num_slots; i++)
        if (f->slots[i].part == index) return &f->slots[i];
    OffloadSlot *s = &f->slots[f->next_slot++ % f->num_slots];
    const int64_t from = (shard_begin(f->plan, span.unit) + span.begin) * f->moment_bytes;
    const size_t bytes = (size_t)(span.size * f->moment_bytes);
    CUDA_CHECK(cudaStreamWaitEvent(f->in, s->stored));
    CUDA_CHECK(cudaMemcpyAsync(s->exp_avg, f->exp_avg + from, bytes, cudaMemcpyDefault, f->in));
    CUDA_CHECK(cudaMemcpyAsync(s->exp_avg_sq, f->exp_avg_sq + from, bytes, cudaMemcpyDefault, f->in));
    CUDA_CHECK(cudaEventRecord(s->loaded, f->in));
    s->part = index;
    return s;
}

// Updates one part. w and `unit` are those of adamw_update_units for its unit.
static inline void offload_update_part(Offload *f, const AdamwUpdate *w, const AdamwUnits *unit, int64_t index,
                                       cudaStream_t stream) {
    const OffloadSpan span = offload_span(f, index);
    OffloadSlot *s = offload_fetch(f, index);
    AdamwUpdate update = *w;
    const AdamwUnits u = adamw_part(unit, span.begin, span.size);
    update.arrays.exp_avg = (void *)((intptr_t)s->exp_avg - u.first * f->moment_bytes);
    update.arrays.exp_avg_sq = (void *)((intptr_t)s->exp_avg_sq - u.first * f->moment_bytes);
    CUDA_CHECK(cudaStreamWaitEvent(stream, s->loaded));
    adamw_launch(&update, &u, stream);
    CUDA_CHECK(cudaEventRecord(s->updated, stream));
    CUDA_CHECK(cudaStreamWaitEvent(f->out, s->updated));
    const size_t bytes = (size_t)(span.size * f->moment_bytes);
    const int64_t to = u.first * f->moment_bytes;
    CUDA_CHECK(cudaMemcpyAsync(f->exp_avg + to, s->exp_avg, bytes, cudaMemcpyDefault, f->out));
    CUDA_CHECK(cudaMemcpyAsync(f->exp_avg_sq + to, s->exp_avg_sq, bytes, cudaMemcpyDefault, f->out));
    CUDA_CHECK(cudaEventRecord(s->stored, f->out));
    s->part = -1;
}

// adamw_update_units with moments that may be in host memory.
static inline void offload_update_units(Offload *f, const AdamwUpdate *w, const ParameterTable *t, int64_t l,
                                        int64_t count, int64_t first_gradient, cudaStream_t stream) {
    if (!f->on) return adamw_update_units(w, t, f->plan, l, count, first_gradient, stream);
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
