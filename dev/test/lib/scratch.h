// A folder of the test program's own, for all that it writes: scratch_create at the start, scratch_remove at the end.
#ifndef DEV_TEST_SCRATCH_H
#define DEV_TEST_SCRATCH_H

#include "../../../llmc/base/file_io.h"

static char scratch[] = "/tmp/train_fp8_test_XXXXXX";

static inline void scratch_create(void) {
    if (!mkdtemp(scratch)) die("cannot make %s: %s", scratch, strerror(errno));
}

// Returns a path in the scratch folder; the arguments are printf's. The text stays valid.
UTILS_PRINTF(1, 2) static inline const char *scratch_path(const char *format, ...) {
    static char **paths;  // all that were made: what is in them is no leak
    static size_t count;
    char name[PATH_CAPACITY], path[PATH_CAPACITY];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(name, sizeof name, format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= sizeof name) die("the name \"%s\" is too long", name);
    format_checked(path, sizeof path, "%s/%s", scratch, name);
    paths = (char **)xrealloc(paths, (count + 1) * sizeof *paths);
    return paths[count++] = xstrdup(path);
}

// Writes a text file into a folder, which is made if it is absent.
static inline void scratch_file(const char *folder, const char *name, const char *text) {
    Failure failure;
    if (!folder_create(folder, true, &failure) ||
        !file_write(folder, name, text, (int64_t)strlen(text), NULL, &failure))
        die("%s", failure.text);
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
