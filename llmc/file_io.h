// Files and folders whose failures are reported rather than fatal: a save that fails must clean up and leave the earlier one whole.
#ifndef LLMC_FILE_IO_H
#define LLMC_FILE_IO_H

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "xxhash64.h"

#define PATH_CAPACITY 4096

// Bytes per call when something large is read, written or hashed; tests make it small.
#ifndef IO_CHUNK_BYTES
#define IO_CHUNK_BYTES ((int64_t)64 << 20)
#endif

// Why a call returned false. Long texts are cut.
typedef struct {
    char text[2048];
} Failure;

// Sets the text; always false, so that a failing function can end with `return fail(...)`.
UTILS_PRINTF(2, 3) static inline bool fail(Failure *failure, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(failure->text, sizeof failure->text, format, args);
    va_end(args);
    return false;
}

// One file of a folder that was written: what trainer.json lists.
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
    file->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file->fd < 0) return fail(failure, "cannot create %s: %s", path, strerror(errno));
    return true;
}

static inline bool output_file_write(OutputFile *file, const void *data, int64_t bytes, Failure *failure) {
    xxhash64_add(&file->hash, data, (size_t)bytes);
    for (int64_t done = 0; done < bytes;) {
        ssize_t put = write(file->fd, (const char *)data + done, (size_t)min_i64(bytes - done, IO_CHUNK_BYTES));
        if (put < 0 && errno == EINTR) continue;
        if (put < 0)
            return fail(failure, "cannot write %s after %lld bytes: %s", file->path, (long long)((int64_t)file->hash.length - bytes + done), strerror(errno));
        done += put;
    }
    return true;
}

// Brings the data to the disk and closes; the file is closed on failure, too.
static inline bool output_file_close(OutputFile *file, Failure *failure) {
    bool ok = true;
    if (fsync(file->fd)) ok = fail(failure, "cannot bring %s to disk: %s", file->path, strerror(errno));
    if (close(file->fd) && ok) ok = fail(failure, "cannot close %s: %s", file->path, strerror(errno));
    file->fd = -1;
    return ok;
}

// Writes a small file `name` in `folder` in one go and adds it to `list`.
static inline bool file_write(const char *folder, const char *name, const void *data, int64_t bytes, FileList *list, Failure *failure) {
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

// Fills `bytes` bytes from `offset` of an open file. A file that ends before is an error.
static inline bool file_read_at(int fd, const char *path, int64_t offset, void *out, int64_t bytes, Failure *failure) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t got = pread(fd, (char *)out + done, (size_t)min_i64(bytes - done, IO_CHUNK_BYTES), (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail(failure, "cannot read %s at byte %lld: %s", path, (long long)(offset + done), strerror(errno));
        if (got == 0) return fail(failure, "%s ends at byte %lld, before the %lld bytes wanted from byte %lld", path, (long long)(offset + done), (long long)bytes, (long long)offset);
        done += got;
    }
    return true;
}

// Writes `bytes` bytes at `offset` of an open file.
static inline bool file_write_at(int fd, const char *path, int64_t offset, const void *data, int64_t bytes, Failure *failure) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t put = pwrite(fd, (const char *)data + done, (size_t)min_i64(bytes - done, IO_CHUNK_BYTES), (off_t)(offset + done));
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return fail(failure, "cannot write %s at byte %lld: %s", path, (long long)(offset + done), strerror(errno));
        done += put;
    }
    return true;
}

// Size of a regular file; fails if there is none of that name.
static inline bool file_size(const char *path, int64_t *bytes, Failure *failure) {
    struct stat s;
    if (stat(path, &s)) return fail(failure, "cannot open %s: %s", path, strerror(errno));
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

// Writes the absolute path without links, "." and "..", of a path of which the last parts may not exist yet.
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

// Whether a resolved path is `folder` or lies in it.
static inline bool path_within(const char *path, const char *folder) {
    const size_t n = strlen(folder);
    return strncmp(path, folder, n) == 0 && (!path[n] || path[n] == '/' || strcmp(folder, "/") == 0);
}

// XXH64 of a whole file of `bytes` bytes.
static inline bool file_hash(const char *path, int64_t bytes, uint64_t *hash, Failure *failure) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail(failure, "cannot open %s: %s", path, strerror(errno));
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
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fail(failure, "cannot open folder %s: %s", folder, strerror(errno));
    bool ok = true;
    if (fsync(fd)) ok = fail(failure, "cannot bring folder %s to disk: %s", folder, strerror(errno));
    close(fd);
    return ok;
}

// A new folder. If `may_exist`, one that is there already is fine, and missing parents are made too.
static inline bool folder_create(const char *folder, bool may_exist, Failure *failure) {
    char parent[PATH_CAPACITY];
    for (const char *slash = strchr(folder + 1, '/'); may_exist && *folder && slash; slash = strchr(slash + 1, '/')) {
        format_checked(parent, sizeof parent, "%.*s", (int)(slash - folder), folder);
        if (mkdir(parent, 0777) && errno != EEXIST) return fail(failure, "cannot make folder %s: %s", parent, strerror(errno));
    }
    if (mkdir(folder, 0777) == 0) return true;
    int error = errno;
    if (error == EEXIST && may_exist && folder_exists(folder)) return true;
    return fail(failure, "cannot make folder %s: %s%s", folder, strerror(error), error == ENOENT ? " (its parent folder must exist)" : "");
}

// Removes a folder that holds files only (what this program writes is flat); a folder within it is left, and is an error.
static inline bool folder_remove(const char *folder, Failure *failure) {
    DIR *dir = opendir(folder);
    if (!dir) return fail(failure, "cannot open folder %s: %s", folder, strerror(errno));
    bool ok = true;
    for (struct dirent *entry; ok && (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0)) ok = fail(failure, "cannot remove %s/%s: %s", folder, entry->d_name, strerror(errno));
    }
    closedir(dir);
    if (ok && rmdir(folder)) ok = fail(failure, "cannot remove folder %s: %s", folder, strerror(errno));
    return ok;
}

// Bytes that may still be written to the file system of a folder that is there.
static inline bool folder_room(const char *folder, int64_t *bytes, Failure *failure) {
    struct statvfs v;
    if (statvfs(folder, &v)) return fail(failure, "cannot find out how much room is in %s: %s", folder, strerror(errno));
    *bytes = (int64_t)v.f_bavail * (int64_t)v.f_frsize;
    return true;
}

// Whether two folders that are there share a file system, and so its room.
static inline bool folders_share_room(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev;
}

// Seconds for which a run waits for the run before it, whose process was killed and is not gone yet; tests make it short.
#ifndef FOLDER_LOCK_SECONDS
#define FOLDER_LOCK_SECONDS 10
#endif

// Holds a folder against other processes of this host to the end of this one: the kernel closes the descriptor, and so lets go, however a process ends.
// Waits up to `seconds` for a process that is just ending. A folder that this process holds already is held once. File systems that do not lock folders
// (NFS) let everyone in, with a warning.
static inline bool folder_lock(const char *folder, double seconds, Failure *failure) {
    static struct stat held[4];
    static int num_held;
    const double start = seconds_now();
    struct stat info;
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info)) return fail(failure, "cannot open folder %s: %s", folder, strerror(errno));
    for (int i = 0; i < num_held; i++)
        if (held[i].st_dev == info.st_dev && held[i].st_ino == info.st_ino) return close(fd) == 0;
    while (flock(fd, LOCK_EX | LOCK_NB)) {
        if (errno != EWOULDBLOCK && errno != EINTR) {
            warn("%s cannot be locked (%s): nothing keeps two runs at once from using it", folder, strerror(errno));
            close(fd);
            return true;
        }
        if (seconds_now() - start >= seconds) {
            close(fd);
            return fail(failure, "another run is using it; wait until that has ended, or give another folder");
        }
        usleep(50000);
    }
    if (num_held == (int)(sizeof held / sizeof held[0])) die("more than %d locked folders", num_held);
    held[num_held++] = info;
    return true;
}

// A folder's name until it is whole, and that of one which makes way for it, where names cannot be exchanged.
#define FOLDER_TEMPORARY ".tmp"
#define FOLDER_ASIDE ".old.tmp"

// Two folders exchange their names in one step. Sets errno on failure; not all file systems can.
static inline bool folder_exchange(const char *a, const char *b) {
    const unsigned exchange = 2;  // RENAME_EXCHANGE of linux/fs.h
    return syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, exchange) == 0;
}

// Gives `temporary` the name `final`. A folder that has this name is exchanged with it in one step, so that the name always means a whole
// folder, and the old one is removed; what cannot be removed stays, with a warning. (File systems that cannot exchange get two renames.)
static inline bool folder_replace(const char *temporary, const char *final, Failure *failure) {
    if (rename(temporary, final) == 0) return true;
    if (errno != EEXIST && errno != ENOTEMPTY) return fail(failure, "cannot rename %s to %s: %s", temporary, final, strerror(errno));
    char old[PATH_CAPACITY];
    Failure left;
    format_checked(old, sizeof old, "%s", temporary);
    if (!folder_exchange(temporary, final)) {
        format_checked(old, sizeof old, "%s" FOLDER_ASIDE, final);
        if (rename(final, old)) return fail(failure, "cannot rename %s to %s: %s", final, old, strerror(errno));
        if (rename(temporary, final)) {
            fail(failure, "cannot rename %s to %s: %s", temporary, final, strerror(errno));
            if (rename(old, final)) fail(failure, "cannot rename %s to %s: %s; what %s was is in %s", temporary, final, strerror(errno), final, old);
            return false;
        }
    }
    if (!folder_remove(old, &left)) warn("%s is in place, but what was there before stays as %s: %s", final, old, left.text);
    return true;
}

// Copies a file of `from_folder` to `to_folder`, where it keeps its name.
static inline bool file_copy(const char *from_folder, const char *to_folder, const char *name, Failure *failure) {
    char path[PATH_CAPACITY];
    format_checked(path, sizeof path, "%s/%s", from_folder, name);
    size_t size;
    char *data = read_file(path, &size);
    if (!data) return fail(failure, "cannot read %s: %s", path, strerror(errno));
    bool ok = file_write(to_folder, name, data, (int64_t)size, NULL, failure);
    free(data);
    return ok;
}

#endif
