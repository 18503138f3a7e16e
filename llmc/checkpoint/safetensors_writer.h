// Writes safetensors files: one file, or several with an index, by one process or by several.
//
// The writer computes the header from the specifications, then fetches and writes each tensor in chunks.
#ifndef LLMC_SAFETENSORS_WRITER_H
#define LLMC_SAFETENSORS_WRITER_H

#include "safetensors.h"

typedef struct {
    char name[128];
    SafetensorsType type;
    int64_t rows, cols;  // cols = 0: a vector of `rows` elements
} SafetensorSpec;

// Fetches `count` elements from element `offset` on, of the tensor with specification number `tensor`, in that tensor's
// type. Returns false, with the reason, if these elements must not be written.
typedef bool (*SafetensorsSource)(void *context, int64_t tensor, int64_t offset, int64_t count, void *out,
                                  Failure *failure);

static inline int64_t safetensors_spec_elements(const SafetensorSpec *spec) {
    return spec->cols ? spec->rows * spec->cols : spec->rows;
}

static inline int64_t safetensors_spec_bytes(const SafetensorSpec *spec) {
    return safetensors_spec_elements(spec) * safetensors_type_bytes(spec->type);
}

// Returns the length word and the header of a file with these tensors. Spaces pad it, so that the data starts at a
// multiple of 8 bytes.
static inline JsonText safetensors_header(const SafetensorSpec *specs, int64_t count) {
    JsonText out = {NULL, 0, 0};
    json_text_add(&out, "%8s{\"__metadata__\":{\"format\":\"pt\",\"written_by\":\"%s\"}", "",
                  SAFETENSORS_WRITER);  // transformers requires "format"
    int64_t end = 0;
    for (int64_t i = 0; i < count; i++) {
        const SafetensorSpec *s = &specs[i];
        json_text_add(&out, ",");
        json_text_add_string(&out, s->name);
        json_text_add(&out, ":{\"dtype\":\"%s\",\"shape\":[%lld", safetensors_type_name(s->type), (long long)s->rows);
        if (s->cols) json_text_add(&out, ",%lld", (long long)s->cols);
        const int64_t begin = end;
        end += safetensors_spec_bytes(s);
        json_text_add(&out, "],\"data_offsets\":[%lld,%lld]}", (long long)begin, (long long)end);
    }
    json_text_add(&out, "}");
    while (out.size % 8) json_text_add(&out, " ");
    const uint64_t length = out.size - 8;
    memcpy(out.data, &length, 8);
    return out;
}

// Writes tensors first .. first + count - 1 of `specs` to one file, syncs it to disk and adds it to `list`.
static inline bool safetensors_write_file(const char *folder, const char *name, const SafetensorSpec *specs,
                                          int64_t first, int64_t count, SafetensorsSource source, void *context,
                                          FileList *list, Failure *failure) {
    char path[PATH_CAPACITY];
    OutputFile file;
    Failure ignored;
    format_checked(path, sizeof path, "%s/%s", folder, name);
    if (!output_file_open(&file, path, failure)) return false;
    JsonText header = safetensors_header(specs + first, count);
    bool ok = output_file_write(&file, header.data, (int64_t)header.size, failure);
    json_text_free(&header);
    int64_t largest = 1;
    for (int64_t i = first; i < first + count; i++) largest = max_i64(largest, safetensors_spec_bytes(&specs[i]));
    void *buffer = xcalloc((size_t)min_i64(largest, IO_CHUNK_BYTES), 1);
    for (int64_t i = first; ok && i < first + count; i++) {
        const int64_t element = safetensors_type_bytes(specs[i].type), elements = safetensors_spec_elements(&specs[i]),
                      chunk = IO_CHUNK_BYTES / element;
        for (int64_t done = 0; ok && done < elements; done += chunk) {
            const int64_t n = min_i64(chunk, elements - done);
            ok = source(context, i, done, n, buffer, failure) && output_file_write(&file, buffer, n * element, failure);
        }
    }
    free(buffer);
    ok = output_file_close(&file, ok ? failure : &ignored) && ok;
    if (ok) file_list_add(list, name, (int64_t)file.hash.length, xxhash64_end(&file.hash));
    return ok;
}

// A set of tensors and its files: STEM.safetensors, or STEM-00001-of-0000N.safetensors and so on if one file would
// exceed a limit. No tensor is split. `folder`, `stem` and `specs` belong to the caller.
typedef struct {
    const char *folder, *stem;
    const SafetensorSpec *specs;
    int64_t count;
    int64_t *starts;  // [num_files + 1] first tensor of each file
    int64_t num_files;
} SafetensorsSet;

// Splits the tensors into files of at most `limit` bytes of data; a larger tensor has a file of its own. The caller
// frees the set with safetensors_set_free.
static inline SafetensorsSet safetensors_set(const char *folder, const char *stem, const SafetensorSpec *specs,
                                             int64_t count, int64_t limit) {
    SafetensorsSet set = {folder, stem, specs, count, (int64_t *)xcalloc((size_t)count + 2, sizeof(int64_t)), 1};
    int64_t size = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t bytes = safetensors_spec_bytes(&specs[i]);
        if (size > 0 && size + bytes > limit) set.starts[set.num_files++] = i, size = 0;
        size += bytes;
    }
    set.starts[set.num_files] = count;
    return set;
}

static inline void safetensors_set_free(SafetensorsSet *set) {
    free(set->starts);
    set->starts = NULL;
}

static inline void safetensors_set_name(const SafetensorsSet *set, int64_t file, char *name, size_t capacity) {
    if (set->num_files == 1) format_checked(name, capacity, "%s.safetensors", set->stem);
    else
        format_checked(name, capacity, "%s-%05lld-of-%05lld.safetensors", set->stem, (long long)file + 1,
                       (long long)set->num_files);
}

// Writes STEM.safetensors.index.json and adds it to `list`, if the set has several files.
static inline bool safetensors_write_index(const SafetensorsSet *set, FileList *list, Failure *failure) {
    if (set->num_files == 1) return true;
    int64_t total = 0;
    for (int64_t i = 0; i < set->count; i++) total += safetensors_spec_bytes(&set->specs[i]);
    JsonText index = {NULL, 0, 0};
    json_text_add(&index, "{\n  \"metadata\": {\"total_size\": %lld},\n  \"weight_map\": {", (long long)total);
    char name[64];
    for (int64_t f = 0; f < set->num_files; f++) {
        safetensors_set_name(set, f, name, sizeof name);
        for (int64_t i = set->starts[f]; i < set->starts[f + 1]; i++) {
            json_text_add(&index, "%s\n    ", i ? "," : "");
            json_text_add_string(&index, set->specs[i].name);
            json_text_add(&index, ": \"%s\"", name);
        }
    }
    json_text_add(&index, "\n  }\n}\n");
    format_checked(name, sizeof name, "%s.safetensors.index.json", set->stem);
    bool ok = file_write(set->folder, name, index.data, (int64_t)index.size, list, failure);
    json_text_free(&index);
    return ok;
}

// Writes all files of a set, and its index if it has several files. Adds them to `list`.
static inline bool safetensors_save(const char *folder, const char *stem, const SafetensorSpec *specs, int64_t count,
                                    int64_t limit, SafetensorsSource source, void *context, FileList *list,
                                    Failure *failure) {
    SafetensorsSet set = safetensors_set(folder, stem, specs, count, limit);
    bool ok = true;
    for (int64_t f = 0; ok && f < set.num_files; f++) {
        char name[64];
        safetensors_set_name(&set, f, name, sizeof name);
        ok = safetensors_write_file(folder, name, specs, set.starts[f], set.starts[f + 1] - set.starts[f], source,
                                    context, list, failure);
    }
    ok = ok && safetensors_write_index(&set, list, failure);
    safetensors_set_free(&set);
    return ok;
}

// ---- several processes write one file: one creates it, then each writes its parts

// Creates a file of the set with its header and its full size. The bytes of the tensors are zero.
static inline bool safetensors_create_file(const SafetensorsSet *set, int64_t file, Failure *failure) {
    char name[64], path[PATH_CAPACITY];
    OutputFile output;
    Failure ignored;
    safetensors_set_name(set, file, name, sizeof name);
    format_checked(path, sizeof path, "%s/%s", set->folder, name);
    if (!output_file_open(&output, path, failure)) return false;
    JsonText header = safetensors_header(set->specs + set->starts[file], set->starts[file + 1] - set->starts[file]);
    int64_t bytes = (int64_t)header.size;
    for (int64_t i = set->starts[file]; i < set->starts[file + 1]; i++) bytes += safetensors_spec_bytes(&set->specs[i]);
    bool ok = output_file_write(&output, header.data, (int64_t)header.size, failure);
    if (ok && FILE_WORK("ftruncate", path, ftruncate(output.fd, (off_t)bytes)))
        ok = fail(failure, "cannot make %s %lld bytes long: %s", path, (long long)bytes, error_words().text);
    json_text_free(&header);
    return output_file_close(&output, ok ? failure : &ignored) && ok;
}

// Sets the range of elements of a tensor that this process writes; *count is 0 if it writes none.
typedef void (*SafetensorsPart)(void *context, int64_t tensor, int64_t *first, int64_t *count);

// Writes this process's part of one tensor. The tensor's data begins at byte `begin` of the file.
static inline bool safetensors_fill_tensor(const SafetensorsSet *set, int64_t tensor, int fd, const char *path,
                                           int64_t begin, SafetensorsPart part, SafetensorsSource source, void *context,
                                           Failure *failure) {
    int64_t first = 0, count = 0;
    part(context, tensor, &first, &count);
    const int64_t element = safetensors_type_bytes(set->specs[tensor].type),
                  chunk = max_i64(1, min_i64(count, IO_CHUNK_BYTES / element));
    void *buffer = xcalloc((size_t)chunk, (size_t)element);
    bool ok = true;
    for (int64_t done = 0; ok && done < count; done += chunk) {
        const int64_t n = min_i64(chunk, count - done);
        ok = source(context, tensor, first + done, n, buffer, failure) &&
             file_write_at(fd, path, begin + (first + done) * element, buffer, n * element, failure);
    }
    free(buffer);
    return ok;
}

// Writes this process's parts of a file of the set and calls fsync.
static inline bool safetensors_fill_file(const SafetensorsSet *set, int64_t file, SafetensorsPart part,
                                         SafetensorsSource source, void *context, Failure *failure) {
    char name[64], path[PATH_CAPACITY];
    safetensors_set_name(set, file, name, sizeof name);
    format_checked(path, sizeof path, "%s/%s", set->folder, name);
    const int fd = FILE_WORK("open", path, open(path, O_WRONLY | O_CLOEXEC));
    if (fd < 0) return fail(failure, "cannot open %s for writing: %s", path, strerror(errno));
    JsonText header = safetensors_header(set->specs + set->starts[file], set->starts[file + 1] - set->starts[file]);
    int64_t begin = (int64_t)header.size;
    json_text_free(&header);
    bool ok = true;
    for (int64_t i = set->starts[file]; ok && i < set->starts[file + 1]; i++) {
        ok = safetensors_fill_tensor(set, i, fd, path, begin, part, source, context, failure);
        begin += safetensors_spec_bytes(&set->specs[i]);
    }
    if (ok && FILE_WORK("fsync", path, fsync(fd)))
        ok = fail(failure, "cannot sync %s to disk: %s", path, strerror(errno));
    if (FILE_WORK("close", path, close(fd)) && ok) ok = fail(failure, "cannot close %s: %s", path, strerror(errno));
    return ok;
}

#endif
