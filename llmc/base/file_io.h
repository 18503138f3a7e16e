// Files and folders. Failed reads and writes return to the caller: a failed save must keep the last checkpoint.
#ifndef LLMC_FILE_IO_H
#define LLMC_FILE_IO_H

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "xxhash64.h"

#define PATH_CAPACITY 4096

// The most bytes that one call of write, pread or pwrite moves; tests make it small.
#ifndef IO_CHUNK_BYTES
#define IO_CHUNK_BYTES ((int64_t)64 << 20)
#endif

// The reason why a call failed. Long texts are cut, and control characters are shown as \xNN (text_printable).
typedef struct {
    char text[2048];
    bool lasting;  // a retry cannot help
} Failure;

// Sets the text and clears `lasting`. Always returns false, so that a failing function can end with `return fail(...)`.
UTILS_PRINTF(2, 3) static inline bool fail(Failure *failure, const char *format, ...) {
    char text[sizeof failure->text];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    text_printable(text, failure->text, sizeof failure->text);
    failure->lasting = false;
    return false;
}

// A short text for a message, made as by printf.
typedef struct {
    char text[512];
} Words;

// Returns the reason (errno) of the call that has just failed. If the file is too large or too many files are open, the
// text also names this process's limit (ulimit).
static inline Words error_words(void) {
    Words w;
    struct rlimit limit;
    const int error = errno;
    snprintf(w.text, sizeof w.text, "%s", strerror(error));
    if (error == EFBIG && getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        snprintf(w.text, sizeof w.text,
                 "%s: this process may write files of %llu bytes at most; raise that limit with ulimit -f",
                 strerror(error), (unsigned long long)limit.rlim_cur);
    if (error == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0)
        snprintf(w.text, sizeof w.text, "%s: this process may hold %llu files open; raise that limit with ulimit -n",
                 strerror(error), (unsigned long long)limit.rlim_cur);
    return w;
}

#define STACK_LEAST_KIB 1024  // this program takes 150, and libraries take more

// Call it first in main. It opens /dev/null for closed standard streams, so that no file or socket gets one of their
// descriptors. It dies if the stack is too small: without that, a signal would end the run without a word. It raises
// the limit of open files to the hard limit, since each shard is an open file. It also ignores the signal SIGXFSZ: a
// write past `ulimit -f` then fails with EFBIG, and does not kill the process.
static inline void process_prepare(void) {
    struct rlimit limit;
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
            die("cannot open /dev/null: %s", strerror(errno));
    if (getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur / 1024 < STACK_LEAST_KIB)
        die("the stack of this process may have %llu KiB (ulimit -s), and %d are needed; give it the usual size with "
            "ulimit -s 8192",
            (unsigned long long)limit.rlim_cur / 1024, STACK_LEAST_KIB);
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &limit)) warn("cannot raise the limit of open files: %s", strerror(errno));
    }
    signal(SIGXFSZ, SIG_IGN);
}

// One written file of a checkpoint or export, as the manifest lists it (manifest.h).
typedef struct {
    char name[64];
    int64_t bytes;
    uint64_t hash;
} FileRecord;

typedef struct {
    FileRecord *records;
    int64_t count;
} FileList;

static inline void file_list_add(FileList *list, const char *name, int64_t bytes, uint64_t hash) {
    list->records = (FileRecord *)xrealloc(list->records, (size_t)(list->count + 1) * sizeof *list->records);
    FileRecord *record = &list->records[list->count++];
    memset(record, 0, sizeof *record);
    format_checked(record->name, sizeof record->name, "%s", name);
    record->bytes = bytes;
    record->hash = hash;
}

static inline void file_list_free(FileList *list) {
    free(list->records);
    list->records = NULL;
    list->count = 0;
}

// A new file, hashed as it is written.
typedef struct {
    int fd;  // -1: closed
    char path[PATH_CAPACITY];
    XxHash64 hash;
} OutputFile;

static inline bool output_file_open(OutputFile *file, const char *path, Failure *failure) {
    format_checked(file->path, sizeof file->path, "%s", path);
    file->hash = xxhash64_begin();
    file->fd = FILE_WORK("open", path, open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (file->fd < 0) return fail(failure, "cannot create %s: %s", path, error_words().text);
    return true;
}

static inline bool output_file_write(OutputFile *file, const void *data, int64_t bytes, Failure *failure) {
    xxhash64_add(&file->hash, data, (size_t)bytes);
    for (int64_t done = 0; done < bytes;) {
        ssize_t put =
            FILE_WORK("write", file->path,
                      write(file->fd, (const char *)data + done, (size_t)min_i64(bytes - done, IO_CHUNK_BYTES)));
        if (put < 0 && errno == EINTR) continue;
        if (put < 0)
            return fail(failure, "cannot write %s after %lld bytes: %s", file->path,
                        (long long)((int64_t)file->hash.length - bytes + done), error_words().text);
        done += put;
    }
    return true;
}

// Writes the data to disk (fsync) and closes the file, even if fsync fails.
static inline bool output_file_close(OutputFile *file, Failure *failure) {
    bool ok = true;
    if (FILE_WORK("fsync", file->path, fsync(file->fd)))
        ok = fail(failure, "cannot sync %s to disk: %s", file->path, strerror(errno));
    if (FILE_WORK("close", file->path, close(file->fd)) && ok)
        ok = fail(failure, "cannot close %s: %s", file->path, strerror(errno));
    file->fd = -1;
    return ok;
}

// Writes a small file `name` in `folder`, in place of one of that name, and syncs it to disk. Then adds it to `list`,
// unless that is NULL.
static inline bool file_write(const char *folder, const char *name, const void *data, int64_t bytes, FileList *list,
                              Failure *failure) {
    char path[PATH_CAPACITY];
    OutputFile file;
    format_checked(path, sizeof path, "%s/%s", folder, name);
    if (!output_file_open(&file, path, failure)) return false;
    bool ok = output_file_write(&file, data, bytes, failure);
    Failure ignored;
    ok = output_file_close(&file, ok ? failure : &ignored) && ok;
    if (ok && list) file_list_add(list, name, bytes, xxhash64_end(&file.hash));
    return ok;
}

// Reads `bytes` bytes from `offset` on from an open file. Fails if the file ends earlier.
static inline bool file_read_at(int fd, const char *path, int64_t offset, void *out, int64_t bytes, Failure *failure) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t got = FILE_WORK(
            "pread", path,
            pread(fd, (char *)out + done, (size_t)min_i64(bytes - done, IO_CHUNK_BYTES), (off_t)(offset + done)));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return fail(failure, "cannot read %s at byte %lld: %s", path, (long long)(offset + done), strerror(errno));
        if (got == 0)
            return fail(failure, "%s ends before byte %lld; %lld bytes were wanted from byte %lld on", path,
                        (long long)(offset + done), (long long)bytes, (long long)offset);
        done += got;
    }
    return true;
}

// Writes `bytes` bytes at `offset` of an open file.
static inline bool file_write_at(int fd, const char *path, int64_t offset, const void *data, int64_t bytes,
                                 Failure *failure) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t put = FILE_WORK("pwrite", path,
                                pwrite(fd, (const char *)data + done, (size_t)min_i64(bytes - done, IO_CHUNK_BYTES),
                                       (off_t)(offset + done)));
        if (put < 0 && errno == EINTR) continue;
        if (put < 0)
            return fail(failure, "cannot write %s at byte %lld: %s", path, (long long)(offset + done),
                        error_words().text);
        done += put;
    }
    return true;
}

// Finds the size of a regular file. Fails if `path` does not name one.
static inline bool file_size(const char *path, int64_t *bytes, Failure *failure) {
    struct stat s;
    if (FILE_WORK("stat", path, stat(path, &s)))
        return fail(failure, "cannot read the size of %s: %s", path, strerror(errno));
    if (!S_ISREG(s.st_mode)) return fail(failure, "%s is not a file", path);
    *bytes = (int64_t)s.st_size;
    return true;
}

static inline bool path_exists(const char *path) {
    struct stat s;
    return lstat(path, &s) == 0;
}

static inline bool folder_exists(const char *path) {
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}

// Names the kind of thing at a path without following a link: "a file", "a link to ../archive", ...
static inline Words path_words(const char *path) {
    Words w;
    struct stat s = {}, target;
    char to[256];
    const bool exists = lstat(path, &s) == 0;
    const char *kind = S_ISDIR(s.st_mode) ? "a folder" : S_ISREG(s.st_mode) ? "a file" : "neither a file nor a folder";
    snprintf(w.text, sizeof w.text, "%s", exists ? kind : "missing or cannot be examined");
    if (!exists || !S_ISLNK(s.st_mode)) return w;
    const ssize_t n = readlink(path, to, sizeof to - 1);
    to[max_i64(0, n)] = 0;
    const bool leads = stat(path, &target) == 0;
    snprintf(w.text, sizeof w.text, "a link to %s%s%s", to,
             leads ? "" : ", which cannot be followed: ", leads ? "" : strerror(errno));
    return w;
}

// Writes the absolute path with links, "." and ".." resolved. The last parts of the path need not exist yet.
static inline void path_resolve(const char *path, char *out, size_t capacity) {
    char longer[PATH_CAPACITY];
    if (*path == '/') format_checked(out, capacity, "/");
    else if (!getcwd(out, capacity)) die("cannot find the folder this program runs in: %s", strerror(errno));
    while (*(path += strspn(path, "/"))) {
        const size_t n = strcspn(path, "/");
        format_checked(longer, sizeof longer, "%s%s%.*s", out, strcmp(out, "/") == 0 ? "" : "/", (int)n, path);
        char *resolved = realpath(longer, NULL), *slash = strrchr(out, '/');
        if (resolved) format_checked(out, capacity, "%s", resolved);
        else if (n == 2 && strncmp(path, "..", n) == 0) slash[slash == out] = 0;
        else if (n > 1 || *path != '.') format_checked(out, capacity, "%s", longer);
        free(resolved);
        path += n;
    }
}

// True if `path` is `folder` or lies in it. Both must be resolved.
static inline bool path_within(const char *path, const char *folder) {
    const size_t n = strlen(folder);
    return strncmp(path, folder, n) == 0 && (!path[n] || path[n] == '/' || strcmp(folder, "/") == 0);
}

// XXH64 of the first `bytes` bytes of a file. Fails if the file is shorter.
static inline bool file_hash(const char *path, int64_t bytes, uint64_t *hash, Failure *failure) {
    int fd = FILE_WORK("open", path, open(path, O_RDONLY | O_CLOEXEC));
    if (fd < 0) return fail(failure, "cannot open %s: %s", path, error_words().text);
    XxHash64 state = xxhash64_begin();
    const int64_t chunk = max_i64(1, min_i64(bytes, IO_CHUNK_BYTES));
    void *buffer = xcalloc((size_t)chunk, 1);
    bool ok = true;
    for (int64_t done = 0; ok && done < bytes;) {
        int64_t n = min_i64(bytes - done, chunk);
        ok = file_read_at(fd, path, done, buffer, n, failure);
        if (ok) xxhash64_add(&state, buffer, (size_t)n);
        done += n;
    }
    free(buffer);
    close(fd);
    *hash = xxhash64_end(&state);
    return ok;
}

// Makes the names in a folder (new files, renames) durable.
static inline bool folder_sync(const char *folder, Failure *failure) {
    int fd = FILE_WORK("open", folder, open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd < 0) return fail(failure, "cannot open folder %s: %s", folder, strerror(errno));
    bool ok = true;
    if (FILE_WORK("fsync", folder, fsync(fd)))
        ok = fail(failure, "cannot sync folder %s to disk: %s", folder, strerror(errno));
    close(fd);
    return ok;
}

// Makes a folder. With `may_exist`, the folder may be there already, and missing parents are made too.
static inline bool folder_create(const char *folder, bool may_exist, Failure *failure) {
    char parent[PATH_CAPACITY];
    for (const char *slash = *folder ? strchr(folder + 1, '/') : NULL; may_exist && slash;
         slash = strchr(slash + 1, '/')) {
        format_checked(parent, sizeof parent, "%.*s", (int)(slash - folder), folder);
        if (mkdir(parent, 0777) == 0) continue;
        if (errno != EEXIST) return fail(failure, "cannot make folder %s: %s", parent, strerror(errno));
        if (!folder_exists(parent))
            return fail(failure, "cannot make folder %s: %s is %s", folder, parent, path_words(parent).text);
    }
    if (FILE_WORK("mkdir", folder, mkdir(folder, 0777)) == 0) return true;
    int error = errno;
    if (error == EEXIST && may_exist && folder_exists(folder)) return true;
    if (error == EEXIST)
        return fail(failure, "cannot make folder %s: it is there already and is %s", folder, path_words(folder).text);
    return fail(failure, "cannot make folder %s: %s%s", folder, strerror(error),
                error == ENOENT ? " (its parent folder must exist)" : "");
}

// The name of the marker file. Each folder of a checkpoint or export gets this file, which is written first and removed
// last. The program removes no folder without a marker file, except an empty one.
#define FOLDER_MARKER ".train_fp8"

// Writes the marker file into a folder. A crash may leave it empty, so only its name counts.
static inline bool folder_mark(const char *folder, Failure *failure) {
    static const char text[] = "train_fp8 wrote this folder, and may replace or remove it.\n";
    return file_write(folder, FOLDER_MARKER, text, (int64_t)strlen(text), NULL, failure) &&
           folder_sync(folder, failure);
}

// Makes a new folder with the marker file.
static inline bool folder_begin(const char *folder, Failure *failure) {
    return folder_create(folder, false, failure) && folder_mark(folder, failure);
}

typedef enum {
    FOLDER_ABSENT,
    FOLDER_EMPTY,   // has nothing in it, or the marker file alone
    FOLDER_MARKED,  // has the marker file and more
    FOLDER_FOREIGN  // is no folder, or a link, or cannot be read, or has something in it but no marker file
} FolderKind;

// Opens a folder, but no link to one. Returns NULL, with errno set, on failure.
static inline DIR *folder_open(const char *folder) {
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (fd >= 0 && !dir) close(fd);
    return dir;
}

// Returns the next entry of a folder other than "." and "..". NULL: there is none, or, with errno set, it cannot be
// read.
static inline struct dirent *folder_next(DIR *dir) {
    struct dirent *entry;
    do errno = 0, entry = readdir(dir);
    while (entry && (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0));
    return entry;
}

// Call it when folder_next has returned NULL. Fails unless the folder was read to its end.
static inline bool folder_was_read(const char *folder, Failure *failure) {
    return !errno || fail(failure, "cannot read folder %s: %s", folder, strerror(errno));
}

static inline FolderKind folder_kind(const char *folder) {
    if (!path_exists(folder)) return FOLDER_ABSENT;
    DIR *dir = folder_open(folder);
    if (!dir) return FOLDER_FOREIGN;
    struct stat mark;
    const bool marked = fstatat(dirfd(dir), FOLDER_MARKER, &mark, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(mark.st_mode);
    bool more = false;
    for (struct dirent *entry; !more && (entry = folder_next(dir)) != NULL;)
        more = !(marked && strcmp(entry->d_name, FOLDER_MARKER) == 0);
    const bool unreadable = !more && errno;
    closedir(dir);
    if (unreadable) return FOLDER_FOREIGN;
    return !more ? FOLDER_EMPTY : marked ? FOLDER_MARKED : FOLDER_FOREIGN;
}

// The reason why a folder is FOLDER_FOREIGN: "it is a link to ../archive", ...
static inline Words folder_foreign_words(const char *folder) {
    Words w;
    struct stat s;
    const bool is_folder = lstat(folder, &s) == 0 && S_ISDIR(s.st_mode);
    if (is_folder)
        snprintf(w.text, sizeof w.text,
                 "it has no file " FOLDER_MARKER " that can be read, so another program may have written it");
    else snprintf(w.text, sizeof w.text, "it is %.500s", path_words(folder).text);
    return w;
}

// Returns why a folder of this program must not be removed: "it holds the folder X". This program makes no folders in
// its folders. "": it may be.
static inline Words folder_nested_words(const char *folder) {
    Words w = {""};
    struct stat s;
    DIR *dir = folder_open(folder);
    for (struct dirent *entry; dir && !*w.text && (entry = folder_next(dir)) != NULL;)
        if (fstatat(dirfd(dir), entry->d_name, &s, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(s.st_mode))
            snprintf(w.text, sizeof w.text, "it holds the folder %.255s, which another program has made",
                     entry->d_name);
    if (dir) closedir(dir);
    return w;
}

// Removes a folder of this program and the files in it. Fails, and removes nothing, if the folder is FOLDER_FOREIGN or
// FOLDER_ABSENT, or holds a folder. Also fails at a file that it cannot remove; it may then have removed other files.
// Links are not followed. The marker file is removed last, so that a later run can finish a removal that a crash cut
// short.
static inline bool folder_remove(const char *folder, Failure *failure) {
    if (folder_kind(folder) == FOLDER_FOREIGN)
        return fail(failure, "%s is not removed: %s", folder, folder_foreign_words(folder).text);
    const Words nested = folder_nested_words(folder);
    if (*nested.text) return fail(failure, "%s is not removed: %s", folder, nested.text);
    DIR *dir = FILE_WORK("opendir", folder, folder_open(folder));
    if (!dir) return fail(failure, "cannot open folder %s: %s", folder, strerror(errno));
    bool ok = true;
    for (struct dirent *entry; ok && (entry = folder_next(dir)) != NULL;) {
        if (strcmp(entry->d_name, FOLDER_MARKER) == 0) continue;
        if (FILE_WORK("unlinkat", folder, unlinkat(dirfd(dir), entry->d_name, 0)))
            ok = fail(failure, "cannot remove %s/%s: %s", folder, entry->d_name, strerror(errno));
    }
    ok = ok && folder_was_read(folder, failure);
    if (ok && unlinkat(dirfd(dir), FOLDER_MARKER, 0) && errno != ENOENT)
        ok = fail(failure, "cannot remove %s/" FOLDER_MARKER ": %s", folder, strerror(errno));
    closedir(dir);
    if (ok && FILE_WORK("rmdir", folder, rmdir(folder)))
        ok = fail(failure, "cannot remove folder %s: %s", folder, strerror(errno));
    return ok;
}

// Free bytes on the file system of an existing folder.
static inline bool folder_room(const char *folder, int64_t *bytes, Failure *failure) {
    struct statvfs v;
    if (FILE_WORK("statvfs", folder, statvfs(folder, &v)))
        return fail(failure, "cannot find the free space of %s: %s", folder, strerror(errno));
    *bytes = (int64_t)v.f_bavail * (int64_t)v.f_frsize;
    return true;
}

// Seconds to wait for an earlier run that was killed and has not quite ended. Tests make it short.
#ifndef FOLDER_LOCK_SECONDS
#define FOLDER_LOCK_SECONDS 10
#endif

// Locks a folder against other processes of this host until this process ends, however it ends: the kernel then closes
// the descriptor. If another process has the lock, waits up to `seconds` for it, then fails. This process may lock a
// folder twice. File systems that cannot lock folders (NFS) give a warning and no lock; the call then succeeds.
static inline bool folder_lock(const char *folder, double seconds, Failure *failure) {
    static struct stat held[4];
    static int num_held;
    const double start = seconds_now();
    struct stat info;
    const int fd = FILE_WORK("open", folder, open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd < 0 || fstat(fd, &info)) return fail(failure, "cannot open folder %s: %s", folder, strerror(errno));
    for (int i = 0; i < num_held; i++)
        if (held[i].st_dev == info.st_dev && held[i].st_ino == info.st_ino) return close(fd) == 0;
    while (flock(fd, LOCK_EX | LOCK_NB)) {
        if (errno != EWOULDBLOCK && errno != EINTR) {
            warn("%s cannot be locked (%s): two runs could write to it at once", folder, strerror(errno));
            close(fd);
            return true;
        }
        if (seconds_now() - start >= seconds) {
            close(fd);
            return fail(failure, "another run is using it; wait until that run has ended, or give another folder");
        }
        usleep(50000);
    }
    if (num_held == (int)(sizeof held / sizeof held[0])) die("more than %d locked folders", num_held);
    held[num_held++] = info;
    return true;
}

// Suffixes of temporary names. A new folder has .tmp until it is whole. If the file system cannot exchange names, the
// folder that the new one replaces has .old.tmp in between.
#define FOLDER_TEMPORARY ".tmp"
#define FOLDER_ASIDE ".old.tmp"

// Exchanges the names of two folders in one step. Returns false, with errno set, on failure; some file systems cannot
// exchange names.
static inline bool folder_exchange(const char *a, const char *b) {
    const unsigned exchange = 2;  // RENAME_EXCHANGE of linux/fs.h
    return FILE_WORK("renameat2", b, syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, exchange)) == 0;
}

// Gives folder `temporary` the name `final`. If `final` is a folder with something in it, the names are exchanged in
// one step, so that `final` is always a whole folder. If that fails, as on file systems that cannot exchange names, the
// old folder first gets the suffix FOLDER_ASIDE. At the end the old folder is removed; a failure of this removal is
// only a warning.
static inline bool folder_replace(const char *temporary, const char *final, Failure *failure) {
    if (FILE_WORK("rename", final, rename(temporary, final)) == 0) return true;
    if (errno != EEXIST && errno != ENOTEMPTY)
        return fail(failure, "cannot rename %s to %s: %s", temporary, final, strerror(errno));
    char old[PATH_CAPACITY];
    Failure left;
    if (!folder_exchange(temporary, final)) {
        format_checked(old, sizeof old, "%s" FOLDER_ASIDE, final);
        if (rename(final, old)) return fail(failure, "cannot rename %s to %s: %s", final, old, strerror(errno));
        if (rename(temporary, final)) {
            fail(failure, "cannot rename %s to %s: %s", temporary, final, strerror(errno));
            if (rename(old, final))
                fail(failure, "cannot rename %s to %s, nor the earlier folder back: %s; the earlier %s is now %s",
                     temporary, final, strerror(errno), final, old);
            return false;
        }
        if (rename(old, temporary))
            warn("cannot rename %s, which can be removed, to %s: %s", old, temporary, strerror(errno));
    }
    // Sync the names before the old folder's files are removed. A power cut might otherwise restore the old name for a
    // half-removed folder.
    char parent[PATH_CAPACITY];
    format_checked(parent, sizeof parent, "%.*s", (int)max_i64(1, strrchr(final, '/') - final), final);
    if (path_exists(temporary) && (!folder_sync(parent, &left) || !folder_remove(temporary, &left)))
        warn("%s is in place, but the folder that it replaced stays as %s: %s", final, temporary, left.text);
    return true;
}

#endif
