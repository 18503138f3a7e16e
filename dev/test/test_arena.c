// Tests the arena: the plan and the allocation agree, a buffer lies in memory given for reuse if it fits there, bytes
// count under their headings, and a plan of 2^63 bytes or more is refused.
#include "../../llmc/base/arena.h"
#include "lib/check.h"

// Takes six buffers, some of them in memory of earlier ones. Sets at[i] to buffer i's offset from `base`, or to -1 if
// the arena has no memory.
static void take_some(Arena *a, int64_t at[6]) {
    const ArenaRange nowhere = {0, 0};
    const char *start = a->base ? a->base : (char *)0;
    void *p[6];
    arena_group(a, "first");
    p[0] = arena_take(a, 1000);
    const ArenaRange room = {0, 1024};
    arena_group(a, "second");
    p[1] = arena_take(a, 1);
    arena_reuse(a, room);
    p[2] = arena_take(a, 600);  // takes 768 of the 1024 bytes of `room`
    p[3] = arena_take(a, 300);  // takes 512 bytes, which do not fit into the last 256 bytes of `room`
    p[4] = arena_take(a, 256);  // takes the last 256 bytes of `room`
    const ArenaRange left = arena_reuse(a, nowhere);
    CHECK(left.begin == 1024 && left.end == 1024,
          "nothing is left of the reused range: it is [%lld, %lld), expected [1024, 1024)", (long long)left.begin,
          (long long)left.end);
    arena_group(a, "first");
    p[5] = arena_take(a, 0);
    for (int i = 0; i < 6; i++) at[i] = p[i] ? (char *)p[i] - start : -1;
}

static void test_places(void) {
    Arena plan, real;
    memset(&plan, 0, sizeof plan);
    memset(&real, 0, sizeof real);
    int64_t at[6];
    take_some(&plan, at);
    for (int i = 0; i < 6; i++)
        CHECK(at[i] == -1, "in an arena without memory, buffer %d has no offset; found %lld", i, (long long)at[i]);
    CHECK(plan.used == 1024 + 256 + 512, "the plan uses 1792 bytes; found %lld", (long long)plan.used);
    real.base = (char *)xcalloc((size_t)plan.used, 1);
    take_some(&real, at);
    const int64_t want[6] = {0, 1024, 0, 1280, 768, 1792};
    for (int i = 0; i < 6; i++)
        CHECK(at[i] == want[i], "buffer %d lies at byte %lld; expected %lld", i, (long long)at[i], (long long)want[i]);
    CHECK(real.used == plan.used, "plan and allocation use equally many bytes; found %lld and %lld",
          (long long)plan.used, (long long)real.used);
    free(real.base);
}

static void test_headings(void) {
    Arena a;
    memset(&a, 0, sizeof a);
    int64_t at[6];
    take_some(&a, at);
    CHECK(a.num_groups == 2, "the plan has two headings, though one of them is named twice; found %d", a.num_groups);
    CHECK(a.reused == 768 + 256, "1024 bytes are handed out a second time; found %lld", (long long)a.reused);
    CHECK(a.groups[0].bytes == 1024 && a.groups[1].bytes == 256 + 512,
          "the first heading has 1024 bytes and the second 768; found %lld and %lld", (long long)a.groups[0].bytes,
          (long long)a.groups[1].bytes);
}

// Takes two buffers of *bytes bytes each from an arena without memory.
static void take_twice(void *bytes) {
    Arena a;
    memset(&a, 0, sizeof a);
    arena_group(&a, "all");
    arena_take(&a, *(const int64_t *)bytes);
    arena_take(&a, *(const int64_t *)bytes);
}

// A plan is refused if a signed 64-bit number cannot hold its size, or if a size is negative, as after an overflow.
static void test_overflow(void) {
    static const int64_t refused[] = {INT64_MAX, INT64_MAX - ARENA_ALIGNMENT, INT64_MAX / 2 + 1, -1000};
    for (int i = 0; i < 4; i++)
        CHECK_DIES(take_twice, (void *)&refused[i], "the memory plan has 2^63 bytes or more",
                   "two buffers of %lld bytes are refused", (long long)refused[i]);
    int64_t most = INT64_MAX / 2 - ARENA_ALIGNMENT;
    take_twice(&most);
}

int main(void) {
    test_places();
    test_headings();
    test_overflow();
    return check_report();
}
