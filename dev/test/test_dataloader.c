// Tests the token loader: formats, windows, order, ranks, the fingerprint of the data, --mix, wrong input, and files
// that change during a run.
#include "../../llmc/data/sources.h"

#include "lib/check.h"
#include "lib/scratch.h"

#define MAX_N 4096

// Writes a shard with a header that may be right or wrong, and `count` tokens after it. Token i is base + i.
static void write_shard(const char *name, int32_t magic, int32_t version, int64_t count_in_header, int64_t count,
                        uint32_t base) {
    const char *path = scratch_path("%s", name);
    FILE *f = fopen(path, "wb");
    if (!f) die("%s: %s", path, strerror(errno));
    int32_t header[SHARD_HEADER_INTS] = {0};
    header[0] = magic;
    header[1] = version;
    if (version >= 8) memcpy(header + 2, &count_in_header, sizeof count_in_header);
    else header[2] = (int32_t)count_in_header;
    fwrite(header, 1, sizeof header, f);
    for (int64_t i = 0; i < count; i++) {
        uint32_t token = base + (uint32_t)i;
        uint16_t narrow = (uint16_t)token;
        if (magic == SHARD_MAGIC_U16) fwrite(&narrow, sizeof narrow, 1, f);
        else fwrite(&token, sizeof token, 1, f);
    }
    if (fclose(f) != 0) die("%s: %s", path, strerror(errno));
}

static DataLoader open_loader(const char *name, int64_t T, bool shuffle, uint64_t seed) {
    return dataloader_open(scratch_path("%s", name), T, shuffle, seed);
}

// Each format gives equal windows: their stride is T, targets are shifted by one token, and the last whole window is
// included. After the last window, dataloader_batch begins again with the first.
static void test_formats_and_windows(void) {
    static const struct {
        const char *name;
        int32_t magic, version;
    } formats[] = {{"u32.bin", SHARD_MAGIC_U32, 7},
                   {"u64count.bin", SHARD_MAGIC_U32, 8},
                   {"u16.bin", SHARD_MAGIC_U16, 1},
                   {"mask.bin", SHARD_MAGIC_U32, SHARD_MASKED}};
    const int64_t T = 8;
    for (int f = 0; f < 4; f++) {
        // 81 tokens hold 10 windows and the last target. 80 tokens hold 9, because the tenth window lacks its last
        // target.
        for (int64_t count = 80; count <= 81; count++) {
            write_shard(formats[f].name, formats[f].magic, formats[f].version, count, count, 1000);
            DataLoader dl = open_loader(formats[f].name, T, false, 1);
            int64_t expected = count == 81 ? 10 : 9, wrong = 0;
            CHECK(dl.num_sequences == expected,
                  "%s: every window with all its targets counts as a sequence; found %lld", formats[f].name,
                  (long long)dl.num_sequences);
            CHECK(dl.num_tokens == count, "%s: the number of tokens is that of the header; found %lld", formats[f].name,
                  (long long)dl.num_tokens);
            int32_t inputs[3 * 8], targets[3 * 8];
            for (int64_t g = 0; g < expected; g += 3) {
                dataloader_batch(&dl, g, 3, inputs, targets);
                for (int64_t i = 0; i < 3 * T; i++) {
                    int64_t place = (g + i / T) % expected * T + i % T;
                    wrong += inputs[i] != 1000 + place || targets[i] != 1000 + place + 1;
                }
            }
            CHECK(wrong == 0, "%s: all inputs and targets are right; %lld are not", formats[f].name, (long long)wrong);
            CHECK(dataloader_max_token(&dl) == 1000 + count - 1, "%s: the last token has the largest id; found %lld",
                  formats[f].name, (long long)dataloader_max_token(&dl));
            dataloader_close(&dl);
        }
    }
}

// One pattern matches several shards of uint16 and uint32 tokens. The shards are sorted by name, no window crosses from
// one shard into the next, and every window is found.
static void test_many_shards(void) {
    const int64_t T = 4, counts[3] = {9, 5, 14}, windows[3] = {2, 1, 3};
    write_shard("many_2.bin", SHARD_MAGIC_U32, 7, counts[2], counts[2], 3000);
    write_shard("many_0.bin", SHARD_MAGIC_U32, 7, counts[0], counts[0], 1000);
    write_shard("many_1.bin", SHARD_MAGIC_U16, 1, counts[1], counts[1], 2000);
    DataLoader dl = open_loader("many_*.bin", T, false, 1);
    CHECK(dl.num_shards == 3 && dl.num_sequences == 6, "three shards hold six sequences; found %lld and %lld",
          (long long)dl.num_shards, (long long)dl.num_sequences);
    int32_t inputs[4], targets[4];
    int64_t g = 0;
    for (int s = 0; s < 3; s++) {
        for (int64_t w = 0; w < windows[s]; w++, g++) {
            dataloader_batch(&dl, g, 1, inputs, targets);
            int32_t first = (int32_t)(1000 * (s + 1) + w * T);
            CHECK(inputs[0] == first && inputs[3] == first + 3 && targets[0] == first + 1 && targets[3] == first + 4,
                  "sequence %lld is read from its place in its shard, and targets are one token ahead; it starts with "
                  "%d",
                  (long long)g, inputs[0]);
        }
    }
    dataloader_close(&dl);
}

// A list names paths and patterns, with commas between. A path that has a comma itself is no list.
static void test_list(void) {
    char list[4096];
    write_shard("list_a1.bin", SHARD_MAGIC_U32, 7, 9, 9, 1000);
    write_shard("list_a0.bin", SHARD_MAGIC_U32, 7, 9, 9, 2000);
    write_shard("list_b,c.bin", SHARD_MAGIC_U16, 1, 9, 9, 3000);
    static const char *const order[] = {"list_b,c.bin", "list_a0.bin", "list_a1.bin"};
    DataLoader dl = open_loader(order[0], 4, false, 1);
    CHECK(dl.num_shards == 1, "the path of a shard may hold a comma; found %lld shards", (long long)dl.num_shards);
    dataloader_close(&dl);
    format_checked(list, sizeof list, "%s/list_b?c.bin, %s/list_a*.bin", scratch, scratch);
    dl = dataloader_open(list, 4, false, 1);
    CHECK(dl.num_shards == 3 && dl.num_sequences == 6, "a list names three shards; found %lld",
          (long long)dl.num_shards);
    for (int64_t i = 0; i < 3 && i < dl.num_shards; i++)
        CHECK(strcmp(dl.shards[i].path, scratch_path("%s", order[i])) == 0,
              "shards have the order of the list, and of their names in a part of it; shard %lld is %s", (long long)i,
              dl.shards[i].path);
    dataloader_close(&dl);
}

// Shards without a whole sequence are left out and counted, also an empty one.
static void test_short_shards(void) {
    for (int64_t i = 0; i < 4; i++) {
        char name[32];
        format_checked(name, sizeof name, "some_%lld.bin", (long long)i);
        write_shard(name, SHARD_MAGIC_U16, 1, i * 7, i * 7, (uint32_t)(1000 * i));
    }
    DataLoader dl = open_loader("some_*.bin", 14, false, 1);
    int32_t inputs[14];
    dataloader_batch(&dl, 0, 1, inputs, NULL);
    CHECK(dl.num_shards == 1 && dl.num_sequences == 1 && dl.num_tokens == 21 && inputs[0] == 3000,
          "the shard with a whole sequence is read; found %lld shards, %lld tokens", (long long)dl.num_shards,
          (long long)dl.num_tokens);
    CHECK(dl.num_left_out == 3 && dl.left_out.num_tokens == 14 && strstr(dl.left_out.path, "some_2.bin"),
          "three are left out, and the longest of them is known; found %lld, %s", (long long)dl.num_left_out,
          dl.left_out.path);
    dataloader_close(&dl);
    dl = open_loader("some_*.bin", 1, false, 1);
    CHECK(dl.num_shards == 3 && dl.num_left_out == 1, "a shard without tokens holds no sequence of one token");
    dataloader_close(&dl);
}

// A shard that data/prepare.py wrote when the first was full is missed where the first is named alone.
static void test_unread_shards(void) {
    static const char *const named[] = {"full*.bin", "full_000002.bin", "some_3.bin", "full.bin"};
    char path[4096 + 16];
    write_shard("full.bin", SHARD_MAGIC_U16, 1, 9, 9, 0);
    write_shard("full_000002.bin", SHARD_MAGIC_U16, 1, 9, 9, 0);
    for (int i = 0; i < 4; i++) {
        DataLoader dl = open_loader(named[i], 4, false, 1);
        CHECK(dataloader_unread(&dl, path, sizeof path) == (i == 3), "only full.bin alone misses one; not %s",
              named[i]);
        dataloader_close(&dl);
    }
    CHECK(strcmp(path, scratch_path("full_000002.bin")) == 0, "the shard that is not read is named; found %s", path);
}

// Lists the order of one epoch in `order`. Returns 0 if each sequence occurs exactly once.
static int64_t read_epoch(const DataLoader *dl, int64_t epoch, int64_t *order) {
    static int64_t seen[MAX_N];
    int64_t n = dl->num_sequences, wrong = 0;
    memset(seen, 0, sizeof seen);
    for (int64_t i = 0; i < n; i++) {
        order[i] = dataloader_sequence(dl, epoch * n + i);
        if (order[i] < 0 || order[i] >= n) wrong++;
        else seen[order[i]]++;
    }
    for (int64_t i = 0; i < n; i++) wrong += seen[i] != 1;
    return wrong;
}

static int64_t count_equal(const int64_t *a, const int64_t *b, int64_t n) {
    int64_t equal = 0;
    for (int64_t i = 0; i < n; i++) equal += a[i] == b[i];
    return equal;
}

// Each epoch is a permutation, also for sizes near powers of two and four. Other epochs and seeds give other
// permutations. An equal seed and epoch give an equal one.
static void test_permutation(void) {
    static int64_t first[MAX_N], second[MAX_N], other_seed[MAX_N], again[MAX_N], in_order[MAX_N];
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 100, 1000, 1023, 1024, 1025, 4096};
    DataLoader dl = {.shuffle = true};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        dl.num_sequences = sizes[s];
        for (uint64_t seed = 0; seed < 3; seed++) {
            dl.seed = seed;
            for (int64_t epoch = 0; epoch < 3; epoch++)
                CHECK(read_epoch(&dl, epoch, first) == 0,
                      "%lld sequences, seed %d, epoch %lld: each sequence occurs once", (long long)sizes[s], (int)seed,
                      (long long)epoch);
        }
    }
    const int64_t n = dl.num_sequences = 1000;
    for (int64_t i = 0; i < n; i++) in_order[i] = i;
    dl.seed = 42;
    read_epoch(&dl, 0, first);
    read_epoch(&dl, 1, second);
    read_epoch(&dl, 0, again);
    dl.seed = 43;
    read_epoch(&dl, 0, other_seed);
    CHECK(count_equal(first, again, n) == n, "equal seed and epoch give an equal order");
    // Two random permutations agree in one place on average (Poisson). More than 10 has a probability of 1e-8.
    CHECK(count_equal(first, second, n) <= 10, "epochs 0 and 1 agree in at most 10 places; found %lld",
          (long long)count_equal(first, second, n));
    CHECK(count_equal(first, other_seed, n) <= 10, "seeds 42 and 43 agree in at most 10 places; found %lld",
          (long long)count_equal(first, other_seed, n));
    CHECK(count_equal(first, in_order, n) <= 10, "at most 10 sequences stay in their places; found %lld",
          (long long)count_equal(first, in_order, n));
    int64_t neighbours = 0;
    for (int64_t i = 1; i < n; i++) neighbours += first[i] == first[i - 1] + 1;
    CHECK(neighbours <= 10, "at most 10 neighbours stay neighbours; found %lld", (long long)neighbours);
    dl.shuffle = false;
    CHECK(read_epoch(&dl, 5, again) == 0 && count_equal(again, in_order, n) == n,
          "without shuffling the order is file order");
}

// Early and late sequences are equally likely in the first half of an epoch. Tests the mean of the sequence numbers in
// that half, over 200 seeds.
static void test_permutation_is_even(void) {
    DataLoader dl = {.shuffle = true, .num_sequences = 1500};
    double sum = 0;
    for (dl.seed = 0; dl.seed < 200; dl.seed++)
        for (int64_t g = 0; g < 750; g++) sum += (double)dataloader_sequence(&dl, g);
    // Half of a permutation is drawn without replacement, so the standard deviation of one mean is n / sqrt(12 * 750 *
    // 2) = 11.2, and of 200 means 0.79. The bound is 5 standard deviations.
    double mean = sum / (200 * 750.0);
    CHECK(fabs(mean - 749.5) < 5 * 0.79, "the mean is %f; expected 749.5", mean);
}

static void test_huge_count(void) {
    DataLoader dl = {.shuffle = true, .seed = 42, .num_sequences = 3000000001};  // above INT32_MAX
    int64_t above = 0, wrong = 0;
    for (int64_t g = 0; g < 10000; g++) {
        int64_t sequence = dataloader_sequence(&dl, 5000000000 + g);
        wrong += sequence < 0 || sequence >= dl.num_sequences;
        above += sequence > INT32_MAX;
    }
    // 28.4% of 3000000001 numbers are 2^31 or more: 2840 of 10000, with a standard deviation of 45.
    CHECK(wrong == 0 && above > 2600 && above < 3100,
          "no sequence number is out of range (%lld are), and about 2840 are 2^31 or more; found %lld",
          (long long)wrong, (long long)above);
}

// Counts in `marks` how often a step reads each sequence. The split into accumulation x world x B must not matter.
static void mark_step(const DataLoader *dl, int64_t step, int64_t accumulation, int64_t world, int64_t B,
                      int64_t *marks) {
    memset(marks, 0, (size_t)dl->num_sequences * sizeof *marks);
    for (int64_t micro = 0; micro < accumulation; micro++)
        for (int64_t rank = 0; rank < world; rank++)
            for (int64_t b = 0; b < B; b++)
                marks[dataloader_sequence(
                    dl, dataloader_sample_index(step * accumulation * world * B, micro, world, rank, B) + b)]++;
}

// `spread`: sample i of N is sequence i * num_sequences / N; all of them if N is their number.
static void test_spread(void) {
    DataLoader dl = {0};
    for (dl.num_sequences = 1; dl.num_sequences < 40; dl.num_sequences++)
        for (dl.spread = 1; dl.spread <= dl.num_sequences; dl.spread++)
            for (int64_t i = 0; i < 2 * dl.spread; i++)
                if (dataloader_sequence(&dl, i) != i % dl.spread * dl.num_sequences / dl.spread)
                    CHECK(false, "sample %lld of %lld of %lld is sequence %lld", (long long)i, (long long)dl.spread,
                          (long long)dl.num_sequences, (long long)dataloader_sequence(&dl, i));
    dl.num_sequences = (int64_t)1 << 50, dl.spread = 1000000000;
    CHECK(dataloader_sequence(&dl, 999999999) == 1125899905716724, "a product above 2^63: %lld",
          (long long)dataloader_sequence(&dl, 999999999));
}

static void test_ranks(void) {
    static const int64_t splits[][3] = {{8, 1, 1}, {4, 2, 1}, {2, 4, 1},
                                        {1, 4, 2}, {1, 1, 8}, {2, 2, 2}};  // accumulation, world, B
    static int64_t expected[MAX_N], marks[MAX_N];
    DataLoader dl = {.shuffle = true, .seed = 7, .num_sequences = 100};
    for (int64_t step = 0; step < 40; step++) {  // more than three epochs
        mark_step(&dl, step, splits[0][0], splits[0][1], splits[0][2], expected);
        for (size_t s = 1; s < sizeof splits / sizeof *splits; s++) {
            mark_step(&dl, step, splits[s][0], splits[s][1], splits[s][2], marks);
            CHECK(memcmp(marks, expected, 100 * sizeof *marks) == 0,
                  "step %lld: with %lld ranks the step reads the same sequences as with one rank and 8 micro-steps of "
                  "1 sequence",
                  (long long)step, (long long)splits[s][1]);
        }
    }
    // The ranks of a step read different sequences: 12 steps of 8 within one epoch of 100 read 96 sequences once.
    int64_t total = 0, twice = 0;
    static int64_t sum[MAX_N];
    for (int64_t step = 0; step < 12; step++) {
        mark_step(&dl, step, 2, 4, 1, marks);
        for (int64_t i = 0; i < 100; i++) sum[i] += marks[i];
    }
    for (int64_t i = 0; i < 100; i++) total += sum[i], twice += sum[i] > 1;
    CHECK(total == 96 && twice == 0, "12 steps read 96 sequences, none twice; found %lld, %lld more than once",
          (long long)total, (long long)twice);
}

// A loader that starts in the middle of a run reads what the first loader read there, also across the end of an epoch.
static void test_resume(void) {
    const int64_t T = 16, B = 3;
    write_shard("resume.bin", SHARD_MAGIC_U32, 7, 700, 700, 0);
    DataLoader whole = open_loader("resume.bin", T, true, 9), resumed = open_loader("resume.bin", T, true, 9);
    int32_t a[48], b[48], ta[48], tb[48];
    int64_t wrong = 0;
    for (int64_t step = 0; step < 40; step++) {
        dataloader_batch(&whole, dataloader_sample_index(step * B, 0, 1, 0, B), B, a, ta);
        if (step < 13) continue;
        dataloader_batch(&resumed, dataloader_sample_index(step * B, 0, 1, 0, B), B, b, tb);
        wrong += memcmp(a, b, sizeof a) != 0 || memcmp(ta, tb, sizeof ta) != 0;
    }
    CHECK(wrong == 0, "all batches after resuming are equal; %lld are not", (long long)wrong);
    dataloader_close(&whole);
    dataloader_close(&resumed);
}

// The scan reads SHARD_SCAN_TOKENS tokens at a time, and finds the largest id in any of these parts.
static void test_scan(void) {
    const int64_t count = SHARD_SCAN_TOKENS + 1000;
    write_shard("scan_0.bin", SHARD_MAGIC_U32, 7, count, count, 5);
    write_shard("scan_1.bin", SHARD_MAGIC_U32, 7, 100, 100, 0);
    DataLoader dl = open_loader("scan_*.bin", 8, true, 1);
    CHECK(dataloader_max_token(&dl) == count + 4,
          "the largest id is that of the last token of the first shard; found %lld",
          (long long)dataloader_max_token(&dl));
    dataloader_check_vocabulary(&dl, count + 5);
    TokenPlace place = dataloader_scan(&dl, SHARD_SCAN_TOKENS + 500);
    CHECK(place.shard == 0 && place.position == SHARD_SCAN_TOKENS + 495 && place.token == SHARD_SCAN_TOKENS + 500,
          "the scan stops at the first id that is not below the limit; found shard %lld, position %lld, id %lld",
          (long long)place.shard, (long long)place.position, (long long)place.token);
    dataloader_close(&dl);
    write_shard("scan_top.bin", SHARD_MAGIC_U32, 7, 20, 20, 4294967270u);  // ids past int32
    dl = open_loader("scan_top.bin", 8, true, 1);
    CHECK(dataloader_max_token(&dl) == 4294967289, "the largest id may be above int32; found %lld",
          (long long)dataloader_max_token(&dl));
    dataloader_close(&dl);
}

// The fingerprint of data does not depend on the names of files, T or shuffling. It changes if every token is another
// one, if there is one more token, if there are fewer shards, or if two shards are exchanged.
static void test_identity(void) {
    enum { KINDS = 7 };
    static const struct {
        const char *name;
        int64_t T;
        bool shuffle;
    } opened[KINDS] = {{"id_a.bin", 8, false},   {"moved_a.bin", 64, true}, {"id_b.bin", 8, false},
                       {"id_c.bin", 8, false},   {"id_?.bin", 8, false},    {"turned_?.bin", 8, false},
                       {"moved_?.bin", 16, true}};
    DataIdentity found[KINDS];
    const int64_t count = 40000;
    static const struct {
        const char *names[3];
        int32_t more;
        uint32_t base;
    } shards[] = {{{"id_a.bin", "moved_a.bin", "turned_b.bin"}, 0, 0},
                  {{"id_b.bin", "moved_b.bin", "turned_a.bin"}, 0, 1},
                  {{"id_c.bin", "moved_c.bin", "turned_c.bin"}, 1, 0}};
    for (size_t i = 0; i < sizeof shards / sizeof shards[0]; i++)
        for (int k = 0; k < 3; k++)
            write_shard(shards[i].names[k], SHARD_MAGIC_U32, 7, count + shards[i].more, count + shards[i].more,
                        shards[i].base);
    for (int i = 0; i < KINDS; i++) {
        DataLoader dl = open_loader(opened[i].name, opened[i].T, opened[i].shuffle, (uint64_t)i);
        found[i] = dataloader_identity(&dl);
        dataloader_close(&dl);
    }
    CHECK(found[0].tokens == count && found[0].shards == 1 && found[4].tokens == 3 * count + 1 && found[4].shards == 3,
          "the identity counts tokens and shards; found %lld and %lld tokens", (long long)found[0].tokens,
          (long long)found[4].tokens);
    for (int i = 0; i < KINDS; i++)
        for (int k = 0; k < i; k++) {
            const bool same = (k == 0 && i == 1) || (k == 4 && i == 6);
            CHECK((found[i].fingerprint == found[k].fingerprint) == same,
                  "fingerprints of %s and %s are equal exactly if their data are equal", opened[i].name,
                  opened[k].name);
        }
    write_shard("id_short.bin", SHARD_MAGIC_U16, 1, 2, 2, 0);  // fewer tokens than one block of the fingerprint
    DataLoader dl = open_loader("id_short.bin", 1, false, 0);
    CHECK(dataloader_identity(&dl).tokens == 2, "the identity counts the tokens of a short shard");
    dataloader_close(&dl);
}

static DataLoader open_mix(const char *parts, bool shuffle, uint64_t seed) {
    char text[4096];
    const char *at = parts, *comma = strchr(parts, ',');
    int n = 0;
    for (; comma; at = comma + 1, comma = strchr(at, ','))
        n += snprintf(text + n, sizeof text - (size_t)n, "%s/%.*s,", scratch, (int)(comma - at), at);
    format_checked(text + n, sizeof text - (size_t)n, "%s/%s", scratch, at);
    return sources_open(text, 4, shuffle, seed);
}

// Checks `samples` samples of a mix against loaders of its sources alone: each source has the order of its own, and a
// multiple of 1000 samples has its share to one in 1000.
static void check_mix(const DataLoader *mix, const DataLoader *alone, const double *shares, int64_t samples) {
    int64_t seen[3] = {0}, wrong = 0;
    for (int64_t g = 0; g < samples; g++) {
        const int64_t sequence = dataloader_sequence(mix, g);
        int i = 2;
        while (sequence < mix->mix.sources[i].first_sequence) i--;
        wrong += sequence - mix->mix.sources[i].first_sequence != dataloader_sequence(&alone[i], seen[i]++);
    }
    CHECK(wrong == 0, "each source is read in its own order, all of it before any repeats; %lld samples are not",
          (long long)wrong);
    for (int i = 0; i < 3; i++)
        CHECK(fabs((double)seen[i] / (double)samples - shares[i]) <= 0.001,
              "source %d has a share of %g; found %lld of %lld", i, shares[i], (long long)seen[i], (long long)samples);
}

// The sources differ in size: the run takes the first for many epochs, the last for less than one. The second has two
// shards of two widths, and a short one that is left out.
static void test_mix(void) {
    static const struct {
        const char *text;
        double shares[3];
    } mixes[] = {{"mix_a.bin=0.5,mix_b*.bin=0.3,mix_c.bin=0.2", {0.5, 0.3, 0.2}},
                 {"mix_a.bin=1,mix_b*.bin=1,mix_c.bin=1", {1.0 / 3, 1.0 / 3, 1.0 / 3}},
                 {"mix_a.bin=998,mix_b*.bin=1e0,mix_c.bin=1.0", {0.998, 0.001, 0.001}}};
    write_shard("mix_a.bin", SHARD_MAGIC_U32, 7, 4 * 300 + 1, 4 * 300 + 1, 0);
    write_shard("mix_b0.bin", SHARD_MAGIC_U16, 1, 4 * 900 + 3, 4 * 900 + 3, 10000);
    write_shard("mix_b1.bin", SHARD_MAGIC_U32, 7, 4 * 800 + 1, 4 * 800 + 1, 20000);
    write_shard("mix_b2.bin", SHARD_MAGIC_U32, 7, 3, 3, 0);
    write_shard("mix_c.bin", SHARD_MAGIC_U32, 7, 4 * 5000 + 1, 4 * 5000 + 1, 30000);
    static const char *const names[] = {"mix_a.bin", "mix_b*.bin", "mix_c.bin"};
    DataLoader alone[3];
    DataIdentity same[3];
    for (size_t m = 0; m < 3; m++)
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            DataLoader mix = open_mix(mixes[m].text, shuffle == 1, 7 + m);
            for (int i = 0; i < 3; i++) alone[i] = open_loader(names[i], 4, shuffle == 1, 7 + m);
            check_mix(&mix, alone, mixes[m].shares, 10000);
            CHECK(mix.num_left_out == 1 && mix.num_shards == 4, "one shard is left out");
            CHECK(sources_lacking(&mix, 5) == 1 && sources_lacking(&alone[1], 5) == 0 &&
                      sources_lacking(&alone[0], 5) == -1,
                  "the first source without a token is found");
            same[m] = dataloader_identity(&mix);
            dataloader_close(&mix);
            for (int i = 0; i < 3; i++) dataloader_close(&alone[i]);
        }
    DataLoader list = open_loader("mix_*.bin", 4, true, 7), moved = open_mix("mix_[ab]*.bin=1,mix_c.bin=1", true, 7);
    CHECK(same[0].fingerprint == same[2].fingerprint, "the fingerprint does not depend on shares");
    CHECK(same[0].fingerprint != dataloader_identity(&list).fingerprint &&
              same[0].fingerprint != dataloader_identity(&moved).fingerprint,
          "it depends on which shards are of one source");
    dataloader_close(&list), dataloader_close(&moved);
}

// A step of 1 rank, of 3 ranks, and of 3 ranks with other batches reads the same samples of a mix, read as tokens.
static void test_mix_ranks(void) {
    static const int64_t splits[][3] = {{6, 1, 1}, {2, 3, 1}, {1, 3, 2}};  // accumulation, world, B
    DataLoader mix = open_mix("mix_a.bin=0.7,mix_b*.bin=0.3", true, 3);
    int32_t tokens[3][6 * 4];
    int64_t wrong = 0;
    for (int64_t step = 0; step < 500; step++) {
        for (int k = 0; k < 3; k++) {
            const int64_t B = splits[k][2];
            int32_t *at = tokens[k];
            for (int64_t micro = 0; micro < splits[k][0]; micro++)
                for (int64_t rank = 0; rank < splits[k][1]; rank++, at += B * 4)
                    dataloader_batch(&mix, dataloader_sample_index(step * 6, micro, splits[k][1], rank, B), B, at,
                                     NULL);
        }
        wrong += memcmp(tokens[0], tokens[1], sizeof tokens[0]) || memcmp(tokens[0], tokens[2], sizeof tokens[0]);
    }
    CHECK(wrong == 0, "all splits of a step read the same samples; %lld steps differ", (long long)wrong);
    dataloader_close(&mix);
}

static void open_bad_mix(void *text) { open_mix((const char *)text, true, 1); }

static void test_bad_mix(void) {
    static const char *const cases[][2] = {
        {"mix_a.bin=1,mix_?.bin=1", "mix_a.bin a second time; name each shard once"},
        {"mix_a.bin=1,mix_b2.bin=1", "mix_b2.bin has the 5 tokens that one sequence needs"},
        {"mix_a.bin=1,none.bin=1", "no token shard matches"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK_DIES(open_bad_mix, (void *)cases[i][0], cases[i][1], "%s", cases[i][0]);
}

typedef struct {
    const char *name;
    int64_t T, vocabulary;
} BadInput;

static void open_bad(void *context) {
    const BadInput *bad = (const BadInput *)context;
    DataLoader dl = open_loader(bad->name, bad->T, true, 1);
    if (bad->vocabulary) dataloader_check_vocabulary(&dl, bad->vocabulary);
}

static void check_refused(const char *name, int64_t T, int64_t vocabulary, const char *message) {
    BadInput bad = {name, T, vocabulary};
    CHECK_DIES(open_bad, &bad, message, "%s is refused with \"%s\"; found", name, message);
}

static void cut_file(const char *name, int64_t bytes) {
    const char *path = scratch_path("%s", name);
    if (truncate(path, bytes) != 0) die("%s: %s", path, strerror(errno));
}

static void test_bad_inputs(void) {
    check_refused("no_such_*.bin", 8, 0, "no token shard matches");
    check_refused(".", 8, 0, "is not a regular file");
    if (mkfifo(scratch_path("pipe.bin"), 0666)) die("mkfifo: %s", strerror(errno));
    check_refused("pipe.bin", 8, 0, "is not a regular file; a token shard is expected");

    write_shard("magic.bin", 20240520, 7, 100, 100, 0);
    check_refused("magic.bin", 8, 0,
                  "magic 20240520 version 7 found; 20240801 version 7, 8 or 9 (uint32 tokens) or 20240520 version 1 "
                  "(uint16 tokens) expected");
    write_shard("magic.bin", 1, 1, 100, 100, 0);
    check_refused("magic.bin", 8, 0, "not a token shard: magic 1 version 1 found");
    write_shard("magic.bin", SHARD_MAGIC_U32, 1, 100, 100, 0);
    check_refused("magic.bin", 8, 0, "magic 20240801 version 1 found");

    write_shard("short.bin", SHARD_MAGIC_U32, 7, 100, 99, 0);
    check_refused("short.bin", 8, 0,
                  "truncated: the header promises 100 tokens, so 1424 bytes with the header, but the file has 1420");
    write_shard("short.bin", SHARD_MAGIC_U16, 1, 100, 99, 0);
    check_refused("short.bin", 8, 0,
                  "truncated: the header promises 100 tokens, so 1224 bytes with the header, but the file has 1222");
    write_shard("short.bin", SHARD_MAGIC_U32, 8, 5000000000, 99, 0);
    check_refused("short.bin", 8, 0, "truncated: the header promises 5000000000 tokens, so 20000001024 bytes");
    cut_file("short.bin", 1000);
    check_refused("short.bin", 8, 0, "truncated: 1000 bytes, less than a shard's header of 1024");
    cut_file("short.bin", 0);
    check_refused("short.bin", 8, 0, "truncated: 0 bytes");

    write_shard("long.bin", SHARD_MAGIC_U32, 7, 100, 101, 0);
    check_refused("long.bin", 8, 0, "too long: the header promises 100 tokens");
    write_shard("negative.bin", SHARD_MAGIC_U32, 7, -1, 100, 0);
    check_refused("negative.bin", 8, 0, "impossible token count, -1");
    write_shard("negative.bin", SHARD_MAGIC_U32, 8, INT64_MAX, 100, 0);
    check_refused("negative.bin", 8, 0, "impossible token count, 9223372036854775807");

    write_shard("few.bin", SHARD_MAGIC_U32, 7, 64, 64, 0);
    check_refused("few.bin", 64, 0, "64 tokens, but one sequence of length 64 needs 65");
    check_refused("f[ae]w.bin", 64, 0, "few.bin: 64 tokens, but one sequence of length 64 needs 65");
    write_shard("faw.bin", SHARD_MAGIC_U32, 7, 9, 9, 0);
    check_refused("f[ae]w.bin", 64, 0, "few.bin: 64 tokens, the most of all shards, but one sequence");
    check_refused("few.bin", 0, 0, "sequence length 0");
    check_refused("few.bin,none.bin", 8, 0, "no token shard matches \"none.bin\"");
    check_refused("few.bin,", 8, 0, "no token shard matches \"\"");
    char list[4096];
    format_checked(list, sizeof list, "few.bin,%s/f?w.bin", scratch);
    check_refused(list, 8, 0, "few.bin a second time");
    static const char *const foreign[][2] = {{"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"},
                                             {"\n<!DOCTYPE html>", "a web page"},
                                             {"PAR1", "the file is Parquet data"},
                                             {"{\"text\": \"a\"}", "the file is JSON text"}};
    for (int i = 0; i < 8; i++) {  // in files shorter and longer than a header
        FILE *f = fopen(scratch_path("foreign.bin"), "wb");
        if (!f || fprintf(f, "%s%*s", foreign[i / 2][0], i % 2 * 2000, "") < 0 || fclose(f)) die("cannot write");
        check_refused("foreign.bin", 8, 0, foreign[i / 2][1] + (i / 2 == 2 || i / 2 == 3) * 4);
    }
    DataLoader dl = open_loader("few.bin", 63, true, 1);
    CHECK(dl.num_sequences == 1, "64 tokens hold one sequence of 63; found %lld", (long long)dl.num_sequences);
    dataloader_close(&dl);

    write_shard("vocabulary.bin", SHARD_MAGIC_U32, 7, 100, 100, 200);
    check_refused("vocabulary.bin", 8, 250, "token 50 has id 250, but the model's vocabulary is 250");
    write_shard("vocabulary.bin", SHARD_MAGIC_U32, 7, 100, 100, 3000000000u);
    check_refused("vocabulary.bin", 8, 250, "token 0 has id 3000000000");

    write_shard("unreadable.bin", SHARD_MAGIC_U32, 7, 100, 100, 0);
    if (geteuid() == 0) printf("skipped: a shard without read permission: root may read everything\n");
    else if (chmod(scratch_path("unreadable.bin"), 0) == 0)
        check_refused("unreadable.bin", 8, 0, "cannot be opened: Permission denied");
}

// A shard that shrinks during use ends the run with an error, not with a signal or old data.
static void read_shrunk(void *context) {
    (void)context;
    write_shard("shrinks.bin", SHARD_MAGIC_U32, 7, 100, 100, 0);
    DataLoader dl = open_loader("shrinks.bin", 8, false, 1);
    cut_file("shrinks.bin", SHARD_HEADER_BYTES + 40);
    int32_t inputs[8], targets[8];
    dataloader_batch(&dl, 5, 1, inputs, targets);
}

// A change, in place, of an open shard of 100 ids below 320: token `position` becomes `id`. With `touched` the file's
// modification time changes too.
typedef struct {
    int32_t magic, version;
    int64_t position;
    uint32_t id;
    bool touched;
} Rewrite;

static void rewrite_shard(const char *name, const Rewrite *r) {
    const int64_t width = r->magic == SHARD_MAGIC_U16 ? 2 : 4;
    const char *path = scratch_path("%s", name);
    struct stat before;
    const int fd = open(path, O_WRONLY);
    if (fd < 0 || fstat(fd, &before)) die("%s: %s", path, strerror(errno));
    if (pwrite(fd, &r->id, (size_t)width, SHARD_HEADER_BYTES + r->position * width) != width)
        die("%s: %s", path, strerror(errno));
    const struct timespec later[2] = {before.st_atim,
                                      {before.st_mtim.tv_sec + (r->touched ? 1 : 0), before.st_mtim.tv_nsec}};
    if (futimens(fd, later) || close(fd)) die("%s: %s", path, strerror(errno));
}

// Reads sequences 4 and 5 (tokens 32 to 48) before and after the change.
static void read_rewritten(void *context) {
    const Rewrite *r = (const Rewrite *)context;
    write_shard("rewritten.bin", r->magic, r->version, 100, 100, 200);
    DataLoader dl = open_loader("rewritten.bin", 8, false, 1);
    dl.vocabulary = 320;
    int32_t inputs[16], targets[16];
    dataloader_batch(&dl, 4, 2, inputs, targets);
    rewrite_shard("rewritten.bin", r);
    dataloader_batch(&dl, 4, 2, inputs, targets);
}

// Ids that the vocabulary of 320 lacks are found in every format and at several places of a batch, even if the
// modification time stays. A change to an id below 320 is found by the modification time: the loader has made no
// fingerprint, so it does not ask if the data are still the same.
static void test_rewritten(void) {
    static const Rewrite rewrites[] = {
        {SHARD_MAGIC_U16, 1, 40, 330, false}, {SHARD_MAGIC_U16, 1, 43, 65535, false},
        {SHARD_MAGIC_U32, 7, 48, 320, false}, {SHARD_MAGIC_U32, 8, 35, 4294967295u, true},
        {SHARD_MAGIC_U32, 7, 32, 319, true},  {SHARD_MAGIC_U16, 1, 2, 7, true}};
    char message[256];
    for (size_t i = 0; i < sizeof rewrites / sizeof rewrites[0]; i++) {
        const Rewrite *r = &rewrites[i];
        if (r->id >= 320)
            format_checked(message, sizeof message,
                           "rewritten.bin: token %lld has id %lld, but the model's vocabulary is 320; %s",
                           (long long)r->position, (long long)r->id,
                           r->touched ? "the file changed" : "the run read another id there before");
        else format_checked(message, sizeof message, "rewritten.bin: the file changed after it was opened");
        Rewrite context = *r;
        CHECK_DIES(read_rewritten, &context, message, "the run ends with \"%s\"; found", message);
    }
}

// Reads a shard, writes it again with ids from *context on and a new modification time, and reads again.
static void read_touched(void *context) {
    DataLoader dl = open_loader("touched.bin", 8, false, 1);
    int32_t inputs[8], targets[8];
    dataloader_identity(&dl);
    dataloader_batch(&dl, 3, 1, inputs, targets);
    const uint32_t base = *(uint32_t *)context;
    write_shard("touched.bin", SHARD_MAGIC_U32, 7, 100, 100, base);
    const struct timespec times[2] = {{base, 0}, {base, 0}};
    if (utimensat(AT_FDCWD, scratch_path("touched.bin"), times, 0)) die("utimensat: %s", strerror(errno));
    dataloader_batch(&dl, 4, 1, inputs, targets);
    dataloader_close(&dl);
}

// A shard with a new modification time is accepted if its fingerprint is the same, and refused otherwise.
static void test_touched(void) {
    uint32_t same = 200, other = 201;
    char output[8192];
    write_shard("touched.bin", SHARD_MAGIC_U32, 7, 100, 100, same);
    CHECK(!check_dies(read_touched, &same, "", output, sizeof output), "a new modification time alone is accepted: %s",
          output);
    CHECK_DIES(read_touched, &other, "touched.bin: the file changed after it was opened", "other tokens are refused");
}

// A new file with the shard's name is another file. The run continues with the open one.
static void test_replaced(void) {
    write_shard("stays.bin", SHARD_MAGIC_U32, 7, 100, 100, 200);
    write_shard("new.bin", SHARD_MAGIC_U32, 7, 50, 50, 1000);
    DataLoader dl = open_loader("stays.bin", 8, false, 1);
    dl.vocabulary = 320;
    if (rename(scratch_path("new.bin"), scratch_path("stays.bin"))) die("rename: %s", strerror(errno));
    int32_t inputs[8], targets[8];
    dataloader_batch(&dl, 11, 1, inputs, targets);
    CHECK(
        inputs[0] == 288 && targets[7] == 296,
        "after another file took its name, the open file is still read: first input 288, last target 296; found %d, %d",
        inputs[0], targets[7]);
    dataloader_close(&dl);
}

// A document begins with each sequence and each separator, and ends before the next, or with its sequence.
static void test_documents(void) {
    enum { B = 2, T = 6 };
    // tokens 4 to 16; token 7 is a separator within the first sequence, token 10 the first one of the second
    static const int32_t starts[2][B * T] = {{0, 0, 0, 3, 3, 3, 0, 0, 0, 0, 0, 0},
                                             {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
                                       ends[2][B * T] = {{3, 3, 3, 6, 6, 6, 6, 6, 6, 6, 6, 6},
                                                         {6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6}};
    static const int64_t separators[] = {7, 10};
    int32_t inputs[B * T], targets[B * T], found[2][B * T];
    const Batch batch = {inputs, targets, {found[0], found[1]}, NULL};
    write_shard("documents.bin", SHARD_MAGIC_U16, 1, B * T + 1, B * T + 1, 4);
    DataLoader dl = open_loader("documents.bin", T, false, 1);
    for (int i = 0; i < 2; i++) {
        dl.separator = separators[i];
        dataloader_whole_batch(&dl, 0, B, &batch);
        CHECK(inputs[7] == 11 && targets[7] == 12 && memcmp(found[0], starts[i], sizeof found[0]) == 0 &&
                  memcmp(found[1], ends[i], sizeof found[1]) == 0,
              "documents begin with token %lld; the fourth is found at %d to %d", (long long)dl.separator, found[0][3],
              found[1][3]);
    }
    CHECK(dataloader_holds(&dl, 4) && dataloader_holds(&dl, 16) && !dataloader_holds(&dl, 3) &&
              !dataloader_holds(&dl, 17),
          "the loader knows which tokens its shards hold");
    dataloader_close(&dl);
}

// Tokens with bit 31 are context in a shard that declares a mask: their ids count as inputs and for the vocabulary, but
// as targets they are -1. The loader counts the other targets of any samples. In a shard without a mask all count.
static void test_mask(void) {
    enum { T = 5 };
    static const int64_t counting[] = {5, 10, 11}, counts[] = {1, 1, 1, 0};  // in each of 4 sequences
    int32_t inputs[4 * T], targets[4 * T];
    int64_t wrong = 0;
    write_shard("mask_a.bin", SHARD_MAGIC_U32, SHARD_MASKED, 4 * T + 1, 4 * T + 1, SHARD_CONTEXT | 100);
    for (size_t i = 0; i < 3; i++) {
        const Rewrite r = {SHARD_MAGIC_U32, SHARD_MASKED, counting[i], (uint32_t)(100 + counting[i]), false};
        rewrite_shard("mask_a.bin", &r);
    }
    write_shard("mask_b.bin", SHARD_MAGIC_U16, 1, 2 * T + 1, 2 * T + 1, 100);
    DataLoader dl = open_loader("mask_a.bin", T, false, 1);
    dl.vocabulary = 121;
    dataloader_check_vocabulary(&dl, 121);
    dataloader_batch(&dl, 0, 4, inputs, targets);
    for (int32_t i = 0; i < 4 * T; i++)
        wrong += inputs[i] != 100 + i || targets[i] != (i == 4 || i == 9 || i == 10 ? 101 + i : -1);
    CHECK(!wrong && dl.masked && dataloader_max_token(&dl) == 120 && dataloader_holds(&dl, 103),
          "inputs are ids, and targets are -1 where they are context; %lld are wrong", (long long)wrong);
    for (int64_t i = 0; i < 4; i++)
        CHECK(dataloader_counted(&dl, i, 1) == counts[i], "sequence %lld has %lld targets that count; found %lld",
              (long long)i, (long long)counts[i], (long long)dataloader_counted(&dl, i, 1));
    CHECK(dataloader_counted(&dl, 2, 7) == 5, "7 samples from the third on count 1, 0, 1, 1, 1, 0, 1; found %lld",
          (long long)dataloader_counted(&dl, 2, 7));
    dl.spread = 2;
    CHECK(dataloader_counted(&dl, 0, 2) == 2, "with spread 2, sequences 0 and 2 are counted");
    dataloader_close(&dl);
    dl = open_loader("mask_?.bin", T, false, 1);
    CHECK(dl.masked && dataloader_counted(&dl, 0, 6) == 3 + 2 * T,
          "beside a masked shard, all tokens of another count");
    dataloader_close(&dl);
    dl = open_loader("mask_b.bin", T, false, 1);
    CHECK(!dl.masked && dataloader_counted(&dl, 0, 3) == 3 * T, "without a mask all targets count");
    dataloader_close(&dl);
    check_refused("mask_a.bin", T, 120, "token 20 has id 120, but the model's vocabulary is 120");
    write_shard("mask_a.bin", SHARD_MAGIC_U32, 7, 99, 99, SHARD_CONTEXT);
    check_refused("mask_a.bin", T, 250, "token 0 has id 2147483648");
    write_shard("mask_a.bin", SHARD_MAGIC_U32, 10, 99, 99, 0);
    check_refused("mask_a.bin", T, 0, "version 10 found");
}

int main(void) {
    scratch_create();
    test_formats_and_windows();
    test_many_shards();
    test_list();
    test_short_shards();
    test_unread_shards();
    test_documents();
    test_permutation();
    test_permutation_is_even();
    test_huge_count();
    test_spread();
    test_ranks();
    test_resume();
    test_scan();
    test_identity();
    test_mix();
    test_mix_ranks();
    test_bad_mix();
    test_bad_inputs();
    test_mask();
    test_rewritten();
    test_touched();
    test_replaced();
    CHECK_DIES(read_shrunk, NULL, "the file changed after it was opened",
               "a shard that shrinks ends the run with an error");
    scratch_remove();
    return check_report();
}
