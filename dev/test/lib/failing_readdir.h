// A readdir that can fail, for tests of folders on a failing disk. Include it before the headers that read folders.
#ifndef DEV_TEST_FAILING_READDIR_H
#define DEV_TEST_FAILING_READDIR_H

#include <dirent.h>
#include <errno.h>

static int readable_entries = -1;  // readdir() fails after this many entries; -1: it does not

static inline struct dirent *readdir_or_fail(DIR *dir) {
    if (readable_entries < 0) return readdir(dir);
    if (readable_entries > 0) return readable_entries--, readdir(dir);
    errno = EIO;
    return 0;
}
#define readdir readdir_or_fail

#endif
