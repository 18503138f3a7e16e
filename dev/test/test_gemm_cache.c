// Tests gemm_cache.h: what a start writes a later one reads, damaged files, several writers, and no place for a file.
#include "../../llmc/base/rng.h"
#include "../../llmc/fp8/gemm_cache.h"
#include "lib/check.h"
#include "lib/scratch.h"

static const char *file_path(void) { return scratch_path("train_fp8cu/" GEMM_CACHE_FILE); }

// Returns entry i, as if this process had timed it. Its algorithm follows from i alone; `other` gives another one.
static GemmCacheEntry entry(int i, bool other) {
    GemmCacheEntry e;
    memset(&e, 0, sizeof e);
    snprintf(e.key, sizeof e.key, "NVIDIA H200, 132 SMs, cuBLASLt 130100: fprop %d x 4096 x 4096, bf16/0 x bf16/0", i);
    for (int k = 0; k < GEMM_CACHE_WORDS; k++) e.algorithm[k] = rng_key(7 + other, (uint64_t)(8 * i + k));
    e.timed = true;
    return e;
}

static bool is_entry(const GemmCacheEntry *e, int i, bool other) {
    const GemmCacheEntry want = entry(i, other);
    return strcmp(e->key, want.key) == 0 && memcmp(e->algorithm, want.algorithm, sizeof e->algorithm) == 0;
}

// Writes entries first to first + n - 1 as one start does. Returns what gemm_cache_write returns.
static bool start(int first, int n, bool other) {
    GemmCache c = gemm_cache_read();
    for (int i = first; i < first + n; i++) {
        const GemmCacheEntry e = entry(i, other);
        gemm_cache_put(&c, &e);
    }
    const bool ok = gemm_cache_write(&c);
    gemm_cache_free(&c);
    return ok;
}

static void put(const void *text, size_t n) {
    FILE *f = fopen(file_path(), "wb");
    if (!f || fwrite(text, 1, n, f) != n || fclose(f)) die("cannot write %s", file_path());
}

// Returns how many of the entries 0 to n - 1 are read; -1 if anything else is read, too.
static int found(int n) {
    GemmCache c = gemm_cache_read();
    int all = 0;
    for (int64_t e = 0; e < c.count; e++) {
        bool known = false;
        for (int i = 0; i < n; i++) known = known || is_entry(&c.entries[e], i, false);
        all = known && all >= 0 ? all + 1 : -1;
    }
    gemm_cache_free(&c);
    return all;
}

// True if the file has its title, `lines` lines of entries and nothing else.
static bool is_whole(int lines) {
    size_t size = 0;
    char *text = read_file(file_path(), &size);
    if (!text) return false;
    bool ok = strncmp(text, GEMM_CACHE_TITLE, strlen(GEMM_CACHE_TITLE)) == 0;
    char *line = text + strlen(GEMM_CACHE_TITLE);
    for (char *end; ok && (end = strchr(line, '\n')); line = end + 1, lines--) {
        GemmCacheEntry e;
        ok = gemm_cache_parse(line, (size_t)(end + 1 - line), &e);
    }
    ok = ok && line == text + size && lines == 0;
    free(text);
    return ok;
}

static void test_round_trip(void) {
    CHECK(found(0) == 0, "without a file the cache is empty");
    CHECK(start(0, 30, false) && found(30) == 30 && is_whole(30), "a second start finds what the first one timed");
    CHECK(start(20, 20, false) && found(40) == 40 && is_whole(40), "another start adds to them");
    CHECK(start(3, 1, true) && found(40) == -1 && is_whole(40), "a new algorithm replaces that of its key");
    CHECK(start(3, 1, false) && found(40) == 40, "and back");
    GemmCache old = gemm_cache_read();
    CHECK(start(40, 1, false) && gemm_cache_write(&old) && found(41) == 41, "what others wrote since a read stays");
    CHECK(start(3, 1, true) && gemm_cache_write(&old) && found(41) == -1, "also in place of a line that was read");
    gemm_cache_free(&old);
    CHECK(start(100, GEMM_CACHE_MOST - 1, false) && is_whole(GEMM_CACHE_MOST), "a full file");
    GemmCache c = gemm_cache_read();
    CHECK(is_entry(&c.entries[0], 40, false) && is_entry(&c.entries[1], 100, false), "has lost its oldest lines");
    gemm_cache_free(&c);
}

static void test_damage(void) {
    size_t size = 0;
    unlink(file_path());
    start(0, 3, false);
    char *text = read_file(file_path(), &size);
    const size_t title = strlen(GEMM_CACHE_TITLE);
    int flips = 0, cuts = 0;
    for (size_t i = 0; i < size; i++)
        for (int bit = 0; bit < 8; bit++) {
            text[i] ^= (char)(1 << bit);
            put(text, size);
            text[i] ^= (char)(1 << bit);
            const int n = found(3), in_title = i + 1 < title;
            flips += in_title ? n != 3 && !(n == 2 && (text[i] ^ 1 << bit) == '\n') : n != 2 && n != 1;
        }
    CHECK(flips == 0, "%d of %zu flipped bits give other entries than those of undamaged lines", flips, 8 * size);
    for (size_t n = 0, lines = 0; n <= size; n++) {
        lines += n > title && text[n - 1] == '\n';
        put(text, n);
        cuts += found(3) != (int)lines;
    }
    CHECK(cuts == 0, "%d of %zu lengths of a file that was cut give other entries than its whole lines", cuts, size);
    put(text, size / 2);
    CHECK(start(2, 1, false) && is_whole(found(3)) && found(3) >= 2, "a write leaves no damaged line");
    free(text);
}

// Adds a line whose hash is right to the file: of n bytes behind the hash and its space, without its line break.
static void add_hashed(const char *rest, size_t n) {
    FILE *f = fopen(file_path(), "ab");
    XxHash64 state = xxhash64_begin();
    xxhash64_add(&state, rest, n), xxhash64_add(&state, "\n", 1);
    fprintf(f, "%016llx ", (unsigned long long)xxhash64_end(&state));
    fwrite(rest, 1, n, f), fputc('\n', f), fclose(f);
}

// Lines of other formats are refused though their hash is right: of another version, for example.
static void test_foreign(void) {
    char line[GEMM_CACHE_LINE], rest[2 * GEMM_CACHE_LINE];
    const GemmCacheEntry e = entry(0, false);
    const size_t head = GEMM_CACHE_HEAD - GEMM_CACHE_HASH, n = gemm_cache_line(&e, line) - GEMM_CACHE_HASH - 1;
    const char *good = line + GEMM_CACHE_HASH;
    put("", 0), add_hashed(good, n);
    CHECK(found(1) == 1, "a line as the program writes it");
    put("", 0), add_hashed(good, head), add_hashed(good, head - 1), add_hashed(good, 0);
    memcpy(rest, good, n), rest[n] = '\r', add_hashed(rest, n + 1);
    memcpy(rest, good, n), rest[head - 1] = '-', add_hashed(rest, n);
    memcpy(rest, good, n), rest[head + 9] = 0, add_hashed(rest, n);
    memcpy(rest, good, n), rest[5] = ' ', add_hashed(rest, n);
    memcpy(rest, good, n), memcpy(rest, "0x00000000000aBc", 16), add_hashed(rest, n);
    memcpy(rest, "2 ", 2), memcpy(rest + 2, good, n), add_hashed(rest, n + 2);
    memset(rest + head, 'k', sizeof rest - head), memcpy(rest, good, head), add_hashed(rest, head + GEMM_CACHE_KEY);
    add_hashed(rest, sizeof rest);
    CHECK(found(1) <= 0, "no line of another format");
    GemmCache c = gemm_cache_read();
    CHECK(c.count == 1 && c.entries[0].key[strlen(e.key)] == '\r', "but a key may end with any character");
    gemm_cache_free(&c);
    put("", 0), add_hashed(rest, head + GEMM_CACHE_KEY - 1);
    c = gemm_cache_read();
    CHECK(c.count == 1 && strlen(c.entries[0].key) == GEMM_CACHE_KEY - 1, "the longest key");
    gemm_cache_free(&c);
}

// Four writers at once: each read finds entries whole and true, and at the end the file is whole.
static void test_writers(void) {
    enum { WRITERS = 4, ROUNDS = 60 };
    int failures = 0, status, files = 0;
    unlink(file_path());
    fflush(stdout);
    for (int w = 0; w < WRITERS; w++)
        if (fork() == 0) {
            bool ok = true;
            for (int i = 0; i < ROUNDS; i++) ok = start(ROUNDS * w + i, 1, false) && found(WRITERS * ROUNDS) > 0 && ok;
            _exit(!ok);
        }
    for (int w = 0; w < WRITERS; w++) failures += wait(&status) < 0 || status != 0;
    const int n = found(WRITERS * ROUNDS);
    CHECK(failures == 0, "%d of %d writers failed, or read an entry that nobody wrote", failures, WRITERS);
    CHECK(n > 0 && is_whole(n), "the file is whole; it has %d lines", n);
    DIR *folder = opendir(scratch_path("train_fp8cu"));
    while (readdir(folder)) files++;
    closedir(folder);
    CHECK(files == 3, "no temporary file is left");  // ".", ".." and the file
}

// Sets both variables, or unsets those that are NULL. Returns the folder, "" if there is none.
static const char *folder_with(const char *cache, const char *home) {
    static char folder[PATH_CAPACITY];
    cache ? setenv("XDG_CACHE_HOME", cache, 1) : unsetenv("XDG_CACHE_HOME");
    home ? setenv("HOME", home, 1) : unsetenv("HOME");
    return gemm_cache_folder(folder) ? folder : "";
}

static void test_places(void) {
    char deep[PATH_CAPACITY];
    memset(deep, 'd', sizeof deep), deep[0] = '/', deep[sizeof deep - 1] = 0;
    CHECK(strcmp(folder_with("/a", "/dev"), "/a/train_fp8cu") == 0, "XDG_CACHE_HOME");
    CHECK(strcmp(folder_with(NULL, "/dev"), "/dev/.cache/train_fp8cu") == 0, "HOME");
    CHECK(strcmp(folder_with("", "/dev"), "/dev/.cache/train_fp8cu") == 0, "an empty XDG_CACHE_HOME is none");
    CHECK(strcmp(folder_with("a", "/dev"), "/dev/.cache/train_fp8cu") == 0, "nor is a relative path");
    const char *const none[][2] = {{NULL, NULL},   {NULL, ""},   {"a", "h"},
                                   {deep, "/dev"}, {NULL, deep}, {NULL, "/no such home"}};
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++)
        CHECK(!*folder_with(none[i][0], none[i][1]) && !start(0, 1, false) && found(1) == 0, "no folder, case %zu", i);
    folder_with("/dev/null", "/dev");
    CHECK(!start(0, 1, false) && found(1) == 0, "a folder that cannot be made");
    folder_with(scratch_path("new/parents"), NULL);
    CHECK(start(0, 1, false) && found(1) == 1, "a folder whose parents are missing");
    folder_with(scratch_path("odd"), NULL);
    if (mkdir(scratch_path("odd"), 0777) || mkdir(scratch_path("odd/train_fp8cu"), 0777) ||
        mkfifo(scratch_path("odd/train_fp8cu/" GEMM_CACHE_FILE), 0666))
        die("mkfifo: %s", strerror(errno));
    CHECK(found(1) == 0, "a pipe is not read");
    unlink(scratch_path("odd/train_fp8cu/" GEMM_CACHE_FILE));
    if (mkdir(scratch_path("odd/train_fp8cu/" GEMM_CACHE_FILE), 0777)) die("mkdir: %s", strerror(errno));
    CHECK(!start(0, 1, false) && found(1) == 0, "a folder in the place of the file stays");
    CHECK(rmdir(scratch_path("odd/train_fp8cu/" GEMM_CACHE_FILE)) == 0 && rmdir(scratch_path("odd/train_fp8cu")) == 0,
          "without a temporary file beside it");
    if (geteuid() == 0) return;  // root may write everywhere
    chmod(scratch_path("odd"), 0555);
    CHECK(!start(0, 1, false), "a folder that must not be written to");
    chmod(scratch_path("odd"), 0777);
}

int main(void) {
    scratch_create();
    folder_with(scratch, NULL);
    test_round_trip();
    test_damage();
    test_foreign();
    test_writers();
    test_places();
    scratch_remove();
    return check_report();
}
