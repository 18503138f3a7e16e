// The memory that this process's control group (cgroup) may take, as containers and batch systems limit it.
#ifndef LLMC_CGROUP_H
#define LLMC_CGROUP_H

#include "file_io.h"

// Returns the smallest number in the files of that name in `path` and in the folders above it, as far as its first
// `root` characters; INT64_MAX if there is none ("max"). Cuts `path`.
static inline int64_t cgroup_least(char *path, size_t root, const char *name) {
    char file[PATH_CAPACITY];
    int64_t least = INT64_MAX;
    for (char *slash = path; slash; slash = strrchr(path + root, '/')) {
        if (slash > path) *slash = 0;
        if ((size_t)snprintf(file, sizeof file, "%s/%s", path, name) >= sizeof file) continue;
        char *text = read_file(file, NULL);
        const int64_t limit = text ? strtoll(text, NULL, 10) : 0;
        if (limit > 0) least = min_i64(least, limit);
        free(text);
    }
    return least;
}

// Returns the limit in bytes; INT64_MAX if there is none. `groups`: /proc/self/cgroup, whose lines are "0::/group"
// (version 2) and "4:memory:/group" (version 1). `root`: /sys/fs/cgroup. In a container the group may have another path
// there, or be the root itself.
static inline int64_t cgroup_memory_limit(const char *groups, const char *root) {
    char *text = read_file(groups, NULL), *rest = text, path[PATH_CAPACITY];
    int64_t least = INT64_MAX;
    for (char *line; (line = strsep(&rest, "\n")) != NULL;) {
        strsep(&line, ":");
        const char *controller = strsep(&line, ":");
        if (!line || (*controller && strcmp(controller, "memory") != 0)) continue;
        const int n = snprintf(path, sizeof path, "%s%s", root, *controller ? "/memory" : "");
        if ((size_t)snprintf(path + n, sizeof path - (size_t)n, "%s", line) >= sizeof path - (size_t)n) continue;
        const char *name = *controller ? "memory.limit_in_bytes" : "memory.max";
        least = min_i64(least, cgroup_least(path, (size_t)n, name));
    }
    free(text);
    return least;
}

#endif
