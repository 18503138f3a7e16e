// One allocation for many buffers: the same code first counts bytes (the memory plan), then hands out addresses.
// The code that takes buffers runs on an arena without memory, which only counts, for the memory plan and --dry-run.
// Then the same code runs on the real arena. So the plan and the allocation cannot differ (except with ARENA_APART).
//
// Buffers that are never in use at the same time may share memory: see arena_reuse().
#ifndef LLMC_ARENA_H
#define LLMC_ARENA_H

#include "utils.h"
#ifdef ARENA_APART
#include <cuda_runtime.h>
#endif

#define ARENA_ALIGNMENT 256
#define ARENA_MAX_GROUPS 17

// Bytes [begin, end) of an arena; empty if begin == end.
typedef struct {
    int64_t begin, end;
} ArenaRange;

typedef struct {
    char *base;  // NULL: count only
    int64_t used;
    ArenaRange reuse;  // rest of the span that arena_take() hands out a second time (arena_reuse)
    int64_t reused;    // bytes handed out a second time
    struct {
        const char *name;
        int64_t bytes;
    } groups[ARENA_MAX_GROUPS];
    int num_groups, group;  // number of headings, and index of the current one
} Arena;

// Later arena_take() calls count under this heading of the memory plan.
static inline void arena_group(Arena *a, const char *name) {
    for (a->group = 0; a->group < a->num_groups; a->group++)
        if (strcmp(a->groups[a->group].name, name) == 0) return;
    if (a->num_groups == ARENA_MAX_GROUPS) die("more than %d memory groups", ARENA_MAX_GROUPS);
    a->groups[a->num_groups].name = name;
    a->groups[a->num_groups++].bytes = 0;
}

// From now on arena_take() hands out memory of `span` a second time, for each buffer that fits into what is left of it.
// Such bytes count under no heading. span.begin is a multiple of ARENA_ALIGNMENT. Returns the unused rest of the
// previous span.
static inline ArenaRange arena_reuse(Arena *a, ArenaRange span) {
    const ArenaRange left = a->reuse;
    a->reuse = span;
    return left;
}

// *sum += size. Dies if the sum overflows, as in the plan of an impossible run, or if `size` is negative: the size then
// overflowed before the call.
static inline void arena_add(int64_t *sum, int64_t size) {
    if (size < 0 || __builtin_add_overflow(*sum, size, sum))
        die_with(EXIT_MEMORY, "the memory plan has 2^63 bytes or more, too many to add up; a smaller --batch-size or "
                              "--sequence-length would help");
}

#ifdef ARENA_APART
// Returns zeroed memory for one buffer. compute-sanitizer only knows the bounds of allocations, so with ARENA_APART
// each buffer is an allocation of its exact size, and no memory is reused. ARENA_APART cannot be used if other GPUs
// read the arena (--copy-engines).
static inline void *arena_apart(int64_t bytes) {
    void *p;
    if (cudaMalloc(&p, (size_t)max_i64(1, bytes)) != cudaSuccess ||
        cudaMemset(p, 0, (size_t)max_i64(1, bytes)) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess)
        die_with(EXIT_MEMORY, "cannot allocate and zero %lld bytes of GPU memory for one buffer", (long long)bytes);
    return p;
}
#endif

// Returns memory of `bytes` bytes, which begins a multiple of ARENA_ALIGNMENT bytes after the arena's start. On an
// arena without memory it counts and returns NULL.
static inline void *arena_take(Arena *a, int64_t bytes) {
    const int64_t size = bytes > INT64_MAX - ARENA_ALIGNMENT ? -1 : round_up(bytes, ARENA_ALIGNMENT);
    const bool again = size > 0 && size <= a->reuse.end - a->reuse.begin;
    int64_t *next = again ? &a->reuse.begin : &a->used;
    void *p = a->base ? a->base + *next : NULL;
    arena_add(next, size);
    arena_add(again ? &a->reused : &a->groups[a->group].bytes, size);
#ifdef ARENA_APART
    if (p) p = arena_apart(bytes);
#endif
    return p;
}

// Prints, in MiB, each heading that has bytes, the reused memory, `other`, and the total. `other` is memory outside the
// arena (CUDA context and libraries). The total includes `other`, but counts reused memory only once.
static inline void arena_print_plan(const Arena *a, int64_t other) {
    printf("\nmemory plan, MiB\n");
    for (int i = 0; i < a->num_groups; i++)
        if (a->groups[i].bytes) printf("  %-34s %12.1f\n", a->groups[i].name, (double)a->groups[i].bytes / 1048576);
    if (a->reused)
        printf("  %-34s %12.1f  overlaps the above, not in the total\n", "reused memory", (double)a->reused / 1048576);
    if (other) printf("  %-34s %12.1f\n", "CUDA context and libraries", (double)other / 1048576);
    printf("  %-34s %12.1f\n", "total", (double)(a->used + other) / 1048576);
}

#endif
