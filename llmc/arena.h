// One allocation for everything. The same placing code runs twice: on an arena without memory, which only counts (the memory plan and
// --dry-run), and on the real one, which hands out addresses. So the plan and the allocation cannot differ.
#ifndef LLMC_ARENA_H
#define LLMC_ARENA_H

#include "utils.h"

#define ARENA_ALIGNMENT 256
#define ARENA_MAX_GROUPS 16

typedef struct {
    char *base;  // NULL: count only
    int64_t used;
    struct { const char *name; int64_t bytes; } groups[ARENA_MAX_GROUPS];
    int num_groups;
} Arena;

// Later arena_take() calls count under this heading of the memory plan.
static inline void arena_group(Arena *a, const char *name) {
    if (a->num_groups == ARENA_MAX_GROUPS) die("more than %d memory groups", ARENA_MAX_GROUPS);
    a->groups[a->num_groups].name = name;
    a->groups[a->num_groups++].bytes = 0;
}

// The next `bytes` bytes, 256-byte aligned. On an arena without memory the result must not be read or written.
static inline void *arena_take(Arena *a, int64_t bytes) {
    int64_t size = round_up(bytes, ARENA_ALIGNMENT);
    void *p = a->base ? a->base + a->used : NULL;
    a->used += size;
    a->groups[a->num_groups - 1].bytes += size;
    return p;
}

// Prints MiB per group and the sum. `other` is memory outside the arena (CUDA context and libraries).
static inline void arena_print_plan(const Arena *a, int64_t other) {
    printf("\nmemory plan, MiB\n");
    for (int i = 0; i < a->num_groups; i++)
        if (a->groups[i].bytes) printf("  %-34s %12.1f\n", a->groups[i].name, (double)a->groups[i].bytes / 1048576);
    if (other) printf("  %-34s %12.1f\n", "CUDA context and libraries", (double)other / 1048576);
    printf("  %-34s %12.1f\n", "total", (double)(a->used + other) / 1048576);
}

#endif
