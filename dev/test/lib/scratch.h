// A folder of the test program's own, for all that it writes: scratch_create at the start, scratch_remove at the end.
#ifndef DEV_TEST_SCRATCH_H
#define DEV_TEST_SCRATCH_H

#include "../../../llmc/base/file_io.h"

static char scratch[] = "/tmp/train_fp8_test_XXXXXX";

static inline void scratch_create(void) {
    if (!mkdtemp(scratch)) die("cannot make %s: %s", scratch, strerror(errno));
}

// Returns the path of a name in the scratch folder. The text stays valid during the next seven calls.
static inline const char *scratch_path(const char *name) {
    static char paths[8][PATH_CAPACITY];
    static int next;
    char *path = paths[next++ % 8];
    format_checked(path, PATH_CAPACITY, "%s/%s", scratch, name);
    return path;
}

// Removes a folder, which may be absent, with everything in it.
static inline void remove_tree(const char *folder) {
    DIR *d = opendir(folder);
    if (!d) return;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        char path[PATH_CAPACITY];
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        format_checked(path, sizeof path, "%s/%s", folder, e->d_name);
        if (unlink(path) && errno != ENOENT) remove_tree(path);
    }
    closedir(d);
    if (rmdir(folder)) die("cannot remove %s: %s", folder, strerror(errno));
}

static inline void scratch_remove(void) { remove_tree(scratch); }

#endif
