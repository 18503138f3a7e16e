// Tests how stuck ranks are found (llmc/ranks/watch.h), with tables of what ranks report, what a rank reports of
// itself, and die() while another thread holds stdout.
#include "../../llmc/base/file_io.h"
#include "../../llmc/ranks/watch.h"
#include "lib/check.h"
#include "lib/scratch.h"

enum { WORLD = 4, TIMEOUT = 90, SILENCE = 15 };  // SILENCE: a sixth of TIMEOUT

static WatchRank ranks[WORLD];

// Returns the table of rank `self`. All ranks were just heard, are in step 12 of training, and wait for each other.
static WatchTable table_of(int64_t self) {
    WatchTable t;
    memset(&t, 0, sizeof t);
    memset(ranks, 0, sizeof ranks);
    t.ranks = ranks, t.world = WORLD, t.self = self, t.timeout = TIMEOUT;
    for (int64_t r = 0; r < WORLD; r++) {
        WatchRow *row = &ranks[r].row;
        row->phase = PHASE_TRAINING, row->kind = ACTIVITY_WAITING, row->step = 12, row->speaker = -1;
        row->changes = row->collectives = 100;
        format_checked(row->doing, sizeof row->doing, "all-to-all");
        format_checked(ranks[r].host, sizeof ranks[r].host, "host%lld", (long long)r);
    }
    watch_age(&t, 0);
    return t;
}

// Lets `seconds` pass, one at a time. Ranks whose bit is set in `heard` are heard each second, and ranks in `moving`
// make progress.
static void pass(WatchTable *t, int seconds, unsigned heard, unsigned moving) {
    for (int s = 0; s < seconds; s++) {
        watch_age(t, 1);
        for (int64_t r = 0; r < WORLD; r++) {
            ranks[r].row.idle = moving >> r & 1 ? 0 : ranks[r].row.idle + 1;
            ranks[r].row.changes += moving >> r & 1;
            if (heard >> r & 1) ranks[r].silence = 0;
        }
    }
}

static void check_verdict(const WatchTable *t, WatchFinding finding, int64_t rank, int64_t speaker, const char *name) {
    const WatchVerdict v = watch_verdict(t);
    const bool same = v.finding == finding && (finding == WATCH_GOOD || (v.rank == rank && v.speaker == speaker));
    CHECK(same, "%s: the verdict is as expected; found finding %d, rank %d, speaker %d", name, v.finding, (int)v.rank,
          (int)v.speaker);
}

static void check_silent(void) {
    WatchTable t = table_of(0);
    pass(&t, SILENCE - 1, 0xb, 0);
    check_verdict(&t, WATCH_GOOD, 0, 0, "rank 2 is silent for almost the limit");
    pass(&t, 1, 0xb, 0);
    check_verdict(&t, WATCH_SILENT, 2, 0, "rank 2 is silent, and all stand still");
    char text[1024];
    watch_message(&t, watch_verdict(&t), text, sizeof text);
    CHECK(
        strcmp(text,
               "rank 2 on host2 has not responded for 15 s (limit 15 s, from --stall-timeout 90); it was last seen in "
               "step 12, training: all-to-all; rank 0 waits in step 12, training: all-to-all") == 0,
        "the message names the silent rank and what was last seen of it: %s", text);
    pass(&t, SILENCE, 0x3, 0);
    check_verdict(&t, WATCH_SILENT, 2, 0, "ranks 2 and 3 are silent");
    watch_message(&t, watch_verdict(&t), text, sizeof text);
    CHECK(strstr(text, "like 1 more rank") != NULL, "the message says how many more ranks are silent: %s", text);
    for (int phase = 0; phase < NUM_PHASES; phase++)
        for (int kind = ACTIVITY_COMPUTING; kind <= ACTIVITY_FILE; kind++) {
            t = table_of(0);
            ranks[1].row.phase = phase, ranks[1].row.kind = kind;
            pass(&t, SILENCE, 0xd, 0xd);
            check_verdict(&t, WATCH_SILENT, 1, 0, "a rank is silent, whatever it did");
        }
}

// Each case: --stall-timeout, and the limit for a rank that does not respond, in seconds.
static void check_silence_limit(void) {
    const int64_t cases[][2] = {{5, 5}, {10, 10}, {30, 10}, {60, 10}, {120, 20}, {300, 50}, {86400, 14400}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        WatchTable t = table_of(0);
        t.timeout = cases[i][0];
        CHECK(watch_silence_limit(&t) == (double)cases[i][1], "--stall-timeout %lld gives a limit of %lld s; found %g",
              (long long)cases[i][0], (long long)cases[i][1], watch_silence_limit(&t));
    }
}

// Rank 0 reports the lowest rank whose connection is broken. A rank above 0 reports a broken connection only if no
// notice of another rank's report comes first.
static void check_lost(void) {
    char text[1024];
    WatchTable t = table_of(0);
    pass(&t, 100, 0xf, 0xf);
    ranks[3].broken = ranks[2].broken = true;
    pass(&t, WATCH_LOST_SECONDS - 1, 0xf, 0xf);
    check_verdict(&t, WATCH_GOOD, 0, 0, "a connection is broken; the main thread may report it");
    pass(&t, 1, 0xf, 0xf);
    check_verdict(&t, WATCH_LOST, 2, 0, "connections are broken, and no main thread has reported it");
    watch_message(&t, watch_verdict(&t), text, sizeof text);
    CHECK(strcmp(text, "rank 2 on host2 was killed, has crashed or cannot be reached any more; it was last seen in "
                       "step 12, training: all-to-all; rank 0 is in step 12, training: all-to-all") == 0,
          "the message names the lost rank and what was last seen of it: %s", text);
    for (int64_t self = 1; self < 3; self++) {
        t = table_of(self);
        ranks[0].broken = true;
        pass(&t, WATCH_LOST_SECONDS + 2 * COMM_SILENCE_SECONDS, 0xf, 0xf);
        check_verdict(&t, WATCH_GOOD, 0, 0, "ranks above 0 wait for a notice");
        pass(&t, 1, 0xf, 0xf);
        check_verdict(&t, WATCH_LOST, 0, self, "no notice has come");
        t.alone = true;
        check_verdict(&t, WATCH_GOOD, 0, 0, "connections close at the end of a run");
    }
}

static void check_rank0_silent(void) {
    WatchTable t = table_of(1);  // hears only rank 0, until ranks call each other
    pass(&t, 10 * TIMEOUT, 0x3, 0x3);
    check_verdict(&t, WATCH_GOOD, 0, 0, "rank 1 hears rank 0");
    pass(&t, SILENCE, 0x2, 0);
    check_verdict(&t, WATCH_GOOD, 0, 0, "rank 0 is silent; the others begin to call");
    pass(&t, 2, 0xe, 0);
    check_verdict(&t, WATCH_SILENT, 0, 1, "rank 0 is silent");
    t = table_of(3);
    pass(&t, SILENCE, 0x8, 0);
    pass(&t, 2, 0xe, 0);
    check_verdict(&t, WATCH_SILENT, 0, 1, "rank 0 is silent: rank 3 leaves the report to rank 1");
    t = table_of(3);
    pass(&t, SILENCE, 0x8, 0);
    pass(&t, 2, 0xc, 0);
    check_verdict(&t, WATCH_SILENT, 0, 2, "ranks 0 and 1 are silent: rank 3 leaves the report to rank 2");
    pass(&t, 1, 0x9, 0);
    check_verdict(&t, WATCH_GOOD, 0, 0, "rank 0 is there again");
}

static void check_file(void) {
    const struct {
        Phase phase;
        int limit;
    } cases[] = {{PHASE_START, TIMEOUT},      {PHASE_LOADING, 4 * TIMEOUT}, {PHASE_TRAINING, TIMEOUT},
                 {PHASE_VALIDATION, TIMEOUT}, {PHASE_SAMPLING, TIMEOUT},    {PHASE_SAVING, 4 * TIMEOUT},
                 {PHASE_EXPORT, 4 * TIMEOUT}, {PHASE_END, TIMEOUT}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        WatchTable t = table_of(0);
        ranks[2].row.phase = cases[i].phase, ranks[2].row.kind = ACTIVITY_FILE;
        format_checked(ranks[2].row.doing, sizeof ranks[2].row.doing, "pread of /data/a.bin");
        pass(&t, cases[i].limit - 1, 0xf, 0);
        check_verdict(&t, WATCH_GOOD, 0, 0, "a call on a file is slow");
        pass(&t, 1, 0xf, 0);
        check_verdict(&t, WATCH_FILE, 2, 2, "a call on a file does not return");
        char text[1024];
        watch_message(&t, watch_verdict(&t), text, sizeof text);
        CHECK(strstr(text, "rank 2 on host2: a call on a file has not returned for "),
              "the message names rank and host: %s", text);
        CHECK(strstr(text, "step 12, ") && strstr(text, "pread of /data/a.bin"),
              "the message names the step and the call: %s", text);
        CHECK(!strstr(text, "4 times") == (cases[i].limit == TIMEOUT),
              "the message names a limit of 4 times --stall-timeout exactly if that is the limit: %s", text);
        ranks[2].row.kind = ACTIVITY_WAITING;
        pass(&t, TIMEOUT - 1, 0xf, 0);
        check_verdict(&t, WATCH_GOOD, 0, 0, "the call has returned, and all begin to wait anew");
    }
    // Rank 2 reports its own call when rank 0 tells it to, unless the call has returned meanwhile.
    WatchTable t = table_of(2);
    ranks[2].row.kind = ACTIVITY_FILE;
    pass(&t, TIMEOUT, 0x5, 0);
    check_verdict(&t, WATCH_GOOD, 0, 0, "rank 0 has not asked rank 2 to speak");
    ranks[0].row.speaker = 2;
    check_verdict(&t, WATCH_FILE, 2, 2, "rank 0 has asked rank 2 to speak");
    ranks[2].row.idle = 0;
    check_verdict(&t, WATCH_GOOD, 0, 0, "the call has returned meanwhile");
}

static void check_standing(void) {
    WatchTable t = table_of(0);
    ranks[1].row.kind = ACTIVITY_COMPUTING;
    pass(&t, 100 * TIMEOUT, 0xf, 0);
    check_verdict(&t, WATCH_GOOD, 0, 0, "a rank that is heard computes for long");
    ranks[1].row.waits_for_nccl = 1, ranks[1].row.collectives = 99;
    pass(&t, TIMEOUT - 1, 0xf, 0);
    check_verdict(&t, WATCH_GOOD, 0, 0, "all wait, one for NCCL, for almost the timeout");
    pass(&t, 1, 0xf, 0x8);
    pass(&t, TIMEOUT - 1, 0xf, 0);
    check_verdict(&t, WATCH_GOOD, 0, 0, "rank 3 has made progress");
    pass(&t, 2, 0xf, 0);
    check_verdict(&t, WATCH_STANDING, 1, 0, "all wait, one for NCCL");
    char text[1024];
    watch_message(&t, watch_verdict(&t), text, sizeof text);
    CHECK(strstr(text, "rank 1 on host1 has finished the fewest collectives: it is in step 12, "),
          "the message names the rank that has finished the fewest collectives: %s", text);
    ranks[1].row.kind = ACTIVITY_FILE, ranks[1].row.idle = 0;
    pass(&t, TIMEOUT - 1, 0xf, 0);
    check_verdict(&t, WATCH_GOOD, 0, 0, "rank 1 reads a file, and others wait for it");
    watch_age(&t, WATCH_SUSPENDED_SECONDS + TIMEOUT);
    ranks[1].row.idle = 0;
    check_verdict(&t, WATCH_GOOD, 0, 0, "this process itself was stopped");
    CHECK(t.standing == 0 && ranks[3].silence == 0, "after a stop the timeout begins anew for all ranks");
}

static void check_alone(void) {
    for (int64_t self = 0; self < 2; self++) {
        const int patience = TIMEOUT + (self ? COMM_SILENCE_SECONDS : 0);
        WatchTable t = table_of(self);
        t.alone = true;
        pass(&t, patience - 1, 0, 0);
        check_verdict(&t, WATCH_GOOD, 0, 0, "alone, waits");
        pass(&t, 1, 0, 0);
        check_verdict(&t, WATCH_ALONE, self, self, "alone, has waited too long");
        ranks[self].row.kind = ACTIVITY_COMPUTING;
        check_verdict(&t, WATCH_GOOD, 0, 0, "alone, computes");
        ranks[self].row.kind = ACTIVITY_FILE;
        check_verdict(&t, WATCH_FILE, self, self, "alone, in a call on a file");
    }
}

// Tests what a rank reports of itself, in marked calls and between them.
static void check_activity(void) {
    WatchRow row;
    memset(&row, 0, sizeof row);
    activity_phase(PHASE_SAVING, 7);
    watch_note_activity(&row, 1);
    CHECK(row.phase == PHASE_SAVING && row.step == 7 && row.kind == ACTIVITY_COMPUTING && row.idle == 0,
          "a rank reports its phase and step");
    CHECK(strcmp(row.doing, "computing") == 0, "between marked calls a rank reports that it computes: %s", row.doing);
    char path[2 * ACTIVITY_DETAIL];
    for (size_t i = 0; i < sizeof path - 1; i++) path[i] = (char)('a' + i % 23);
    memset(path, '/', ACTIVITY_DETAIL);
    path[sizeof path - 1] = 0;
    activity_begin(ACTIVITY_FILE, "pread", path);
    for (int i = 0; i < 3; i++) watch_note_activity(&row, 1);
    const char *end = path + strlen(path) - (ACTIVITY_DETAIL - 1);
    CHECK(strncmp(row.doing, "pread of ", 9) == 0 && strcmp(row.doing + 9, end) == 0,
          "the end of a path that is too long is kept: %s", row.doing);
    CHECK(row.kind == ACTIVITY_FILE && row.idle == 2, "a call on a file counts as idle from its begin; found %g s",
          row.idle);
    watch_note_activity(&row, WATCH_SUSPENDED_SECONDS + 1);
    CHECK(row.idle == 0, "idle time begins anew if this process itself was stopped; found %g s", row.idle);
    errno = 28;
    activity_end();
    CHECK(errno == 28, "activity_end does not change errno");
    const int64_t collectives = row.collectives;
    activity_begin(ACTIVITY_WAITING, "all-to-all", "");
    watch_note_activity(&row, 1);
    CHECK(row.kind == ACTIVITY_WAITING && row.collectives == collectives,
          "a collective that waits is reported as waiting");
    CHECK(strcmp(row.doing, "all-to-all") == 0, "a rank reports the collective in which it waits: %s", row.doing);
    activity_end();
    activity_operation(2, "all-gather of the weights", 4, false);
    watch_note_activity(&row, 1);
    CHECK(watch_waits(&row) && row.collectives == collectives + 1, "a pending NCCL operation counts as waiting");
    CHECK(strcmp(row.doing, "all-gather of the weights of layer 4") == 0,
          "a rank reports the pending NCCL operation and its layer: %s", row.doing);
    activity_operation(0, "", NO_LAYER, true);
    watch_note_activity(&row, 1);
    CHECK(!watch_waits(&row) && row.collectives == collectives + 2,
          "a finished NCCL operation does not count as waiting");
}

// After file_write and read_file the rank is computing again. Each call on a file changes its activity twice.
static void check_files(void) {
    WatchRow row;
    Failure failure;
    size_t size;
    memset(&row, 0, sizeof row);
    scratch_create();
    watch_note_activity(&row, 0);
    const int64_t before = row.changes;
    CHECK(file_write(scratch, "a", "text", 4, NULL, &failure), "the file is written: %s", failure.text);
    watch_note_activity(&row, 0);
    const int changes = (int)(row.changes - before);
    CHECK(row.kind == ACTIVITY_COMPUTING && changes == 8,
          "the rank computes again, after 8 changes in open, write, fsync and close; found %d", changes);
    char *text = read_file(scratch_path("a"), &size);
    CHECK(text && strcmp(text, "text") == 0, "read_file returns the text");
    free(text);
    CHECK(!read_file(scratch_path("none"), &size) && errno == ENOENT, "read_file of a missing file gives ENOENT: %s",
          strerror(errno));
    watch_note_activity(&row, 0);
    CHECK(row.kind == ACTIVITY_COMPUTING, "the activity is computing after read_file");
    scratch_remove();
}

// Holds stdout, as printf does while a full pipe blocks it. Another thread then calls die().
static void *hold_stdout(void *context) {
    flockfile(stdout);
    *(volatile bool *)context = true;
    sleep(30);
    return NULL;
}

static void end_at_once(int code) { _exit(code); }

static void die_beside_printf(void *context) {
    (void)context;
    volatile bool held = false;
    pthread_t thread;
    die_hook()->end = end_at_once;
    alarm(10);
    if (pthread_create(&thread, NULL, hold_stdout, (void *)&held)) return;
    while (!held) usleep(1000);
    die("stdout is held");
}

// Rows with numbers outside their tables, or with a text without an end, are not taken.
static void test_foreign_rows(void) {
    WatchRow good, bad;
    memset(&good, 0, sizeof good);
    good.phase = NUM_PHASES - 1, good.kind = ACTIVITY_FILE;
    CHECK(watch_is_row(&good), "a row with the largest numbers is taken");
    bad = good, bad.phase = NUM_PHASES;
    CHECK(!watch_is_row(&bad), "an unknown phase is not");
    bad = good, bad.kind = -1;
    CHECK(!watch_is_row(&bad), "an unknown kind is not");
    bad = good, memset(bad.doing, 'x', sizeof bad.doing);
    CHECK(!watch_is_row(&bad), "a text without an end is not");
}

int main(void) {
    check_silent();
    check_silence_limit();
    check_lost();
    check_rank0_silent();
    check_file();
    check_standing();
    check_alone();
    check_activity();
    check_files();
    CHECK_DIES(die_beside_printf, NULL, "stdout is held", "die() ends the process while another thread holds stdout");
    test_foreign_rows();
    return check_report();
}
