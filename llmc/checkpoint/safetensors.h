// Reads safetensors files (https://huggingface.co/docs/safetensors): one file, or several with an index.
// A set of tensors is one file STEM.safetensors, or several with STEM.safetensors.index.json, like in transformers.
//
// The reader trusts no file: it checks header, names, types, shapes, offsets and file sizes when a set is opened. A
// later read fails if its range is not in the tensor, or if the file has become shorter.
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "../base/fp16.h"
#include "../base/json.h"

#define SAFETENSORS_MAX_HEADER ((int64_t)100000000)  // the limit of the reference implementation
#define SAFETENSORS_MAX_RANK 8
#define SAFETENSORS_SHARD_BYTES ((int64_t)5000000000)  // transformers' "5GB"
#define SAFETENSORS_WRITER "train_fp8"                 // value of "written_by" in the metadata of files we write

//    type     name       bits per element
// clang-format off
#define SAFETENSORS_TYPES(X) \
    X(ST_F4, "F4", 4) X(ST_F6_E2M3, "F6_E2M3", 6) X(ST_F6_E3M2, "F6_E3M2", 6) X(ST_BOOL, "BOOL", 8) X(ST_U8, "U8", 8) X(ST_I8, "I8", 8) \
    X(ST_F8_E5M2, "F8_E5M2", 8) X(ST_F8_E4M3, "F8_E4M3", 8) X(ST_F8_E8M0, "F8_E8M0", 8) \
    X(ST_F8_E5M2FNUZ, "F8_E5M2FNUZ", 8) X(ST_F8_E4M3FNUZ, "F8_E4M3FNUZ", 8) \
    X(ST_I16, "I16", 16) X(ST_U16, "U16", 16) X(ST_F16, "F16", 16) X(ST_BF16, "BF16", 16) X(ST_I32, "I32", 32) X(ST_U32, "U32", 32) \
    X(ST_F32, "F32", 32) X(ST_F64, "F64", 64) X(ST_I64, "I64", 64) X(ST_U64, "U64", 64) X(ST_C64, "C64", 64)
// clang-format on

#define SAFETENSORS_TYPE_ID(type, name, bits) type,
#define SAFETENSORS_TYPE_NAME(type, name, bits) name,
#define SAFETENSORS_TYPE_BITS(type, name, bits) bits,
typedef enum { SAFETENSORS_TYPES(SAFETENSORS_TYPE_ID) ST_NUM_TYPES } SafetensorsType;

static inline const char *safetensors_type_name(SafetensorsType type) {
    static const char *const names[] = {SAFETENSORS_TYPES(SAFETENSORS_TYPE_NAME) "?"};
    return names[type];
}

static inline int64_t safetensors_type_bits(SafetensorsType type) {
    static const int bits[] = {SAFETENSORS_TYPES(SAFETENSORS_TYPE_BITS) 0};
    return bits[type];
}

// Bytes of an element of a type with whole bytes.
static inline int64_t safetensors_type_bytes(SafetensorsType type) { return safetensors_type_bits(type) / 8; }

// True for the types of weights.
static inline bool safetensors_is_float(SafetensorsType type) {
    return type == ST_F32 || type == ST_BF16 || type == ST_F16;
}

// Returns ST_NUM_TYPES if no type has that name.
static inline SafetensorsType safetensors_type_find(const char *name) {
    int type = 0;
    while (type < ST_NUM_TYPES && strcmp(name, safetensors_type_name((SafetensorsType)type)) != 0) type++;
    return (SafetensorsType)type;
}

typedef struct {
    char *name;
    SafetensorsType type;
    int rank;
    int64_t shape[SAFETENSORS_MAX_RANK];
    int64_t elements, bytes;
    int64_t offset;  // file offset of the first byte
    int file;        // index into Safetensors.files
} Safetensor;

typedef struct {
    char *path;
    int fd;
    int64_t bytes;
} SafetensorsFile;

// An opened set. Tensors are sorted by name.
typedef struct {
    SafetensorsFile *files;
    int num_files;
    Safetensor *tensors;
    int64_t count;
} Safetensors;

static inline void safetensors_close(Safetensors *st) {
    for (int64_t i = 0; i < st->count; i++) free(st->tensors[i].name);
    for (int i = 0; i < st->num_files; i++) {
        close(st->files[i].fd);
        free(st->files[i].path);
    }
    free(st->tensors);
    free(st->files);
    memset(st, 0, sizeof *st);
}

// ---- reading: headers, and sets of files

// Reads type, shape and offset of one tensor from its entry in the header, and checks them. `data` is the file offset
// of the first tensor; `limit` is the number of bytes from there to the end of the file.
static inline bool safetensors_read_entry(const Json *json, const JsonNode *entry, int64_t data, int64_t limit,
                                          Safetensor *t, Failure *failure) {
    const JsonNode *dtype = json_require(json, entry, "dtype", JSON_STRING, failure);
    const JsonNode *shape = dtype ? json_require(json, entry, "shape", JSON_ARRAY, failure) : NULL;
    const JsonNode *offsets = shape ? json_require(json, entry, "data_offsets", JSON_ARRAY, failure) : NULL;
    if (!offsets) return false;
    t->type = safetensors_type_find(dtype->text);
    if (t->type == ST_NUM_TYPES) return json_expected(json, dtype, "a known dtype (F32, BF16, F16, ...)", failure);
    if (shape->count > SAFETENSORS_MAX_RANK)
        return fail(failure, "%s: tensor %.200s has %lld dimensions; at most %d are supported", json->source,
                    entry->key, (long long)shape->count, SAFETENSORS_MAX_RANK);
    t->elements = 1;
    bool overflow = false;
    for (const JsonNode *size = json_first(json, shape); size; size = json_next(json, size)) {
        int64_t n = 0;
        if (!json_int(json, size, 0, INT64_MAX, &n, failure)) return false;
        t->shape[t->rank++] = n;
        overflow = overflow || __builtin_mul_overflow(t->elements, n, &t->elements);
    }
    int64_t bits = 0, begin = 0, end = 0;
    overflow = overflow || __builtin_mul_overflow(t->elements, safetensors_type_bits(t->type), &bits);
    t->bytes = bits / 8 + (bits % 8 != 0);
    if (overflow) return fail(failure, "%s: the shape of tensor %.200s overflows int64", json->source, entry->key);
    if (offsets->count != 2) return json_expected(json, offsets, "[begin, end]", failure);
    const JsonNode *first = json_first(json, offsets);
    if (!json_int(json, first, 0, INT64_MAX, &begin, failure) ||
        !json_int(json, json_next(json, first), begin, INT64_MAX, &end, failure))
        return false;
    if (end > limit)
        return fail(failure,
                    "%s: truncated: tensor %.200s ends at byte %lld of the data, but the file has %lld of data; "
                    "copy or download it again",
                    json->source, entry->key, (long long)end, (long long)limit);
    if (end - begin != t->bytes)
        return fail(
            failure,
            "%s: tensor %.200s has data_offsets [%lld, %lld], which are %lld bytes, but its shape and dtype need %lld",
            json->source, entry->key, (long long)begin, (long long)end, (long long)(end - begin), (long long)t->bytes);
    t->offset = data + begin;
    return true;
}

static inline int safetensors_compare_offsets(const void *a, const void *b) {
    const Safetensor *x = (const Safetensor *)a, *y = (const Safetensor *)b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->elements > 0) - (y->elements > 0);  // empty tensors come first
}

static inline int safetensors_compare_names(const void *a, const void *b) {
    return strcmp(((const Safetensor *)a)->name, ((const Safetensor *)b)->name);
}

// Fails unless the tensors of one file follow each other without gap or overlap, to the end of the file. Sorts them by
// offset.
static inline bool safetensors_check_offsets(Safetensor *tensors, int64_t count, int64_t data,
                                             const SafetensorsFile *file, Failure *failure) {
    qsort(tensors, (size_t)count, sizeof *tensors, safetensors_compare_offsets);
    int64_t end = data;
    for (int64_t i = 0; i < count; i++) {
        const Safetensor *t = &tensors[i];
        if (t->offset != end)
            return fail(
                failure,
                "%s: tensor %.200s starts at byte %lld, %s the end of the tensor or header before it, byte %lld",
                file->path, t->name, (long long)t->offset, t->offset < end ? "before" : "past", (long long)end);
        end = t->offset + t->bytes;
    }
    if (end != file->bytes)
        return fail(failure, "%s: the tensors end at byte %lld, the file at %lld", file->path, (long long)end,
                    (long long)file->bytes);
    return true;
}

// Reads the header's JSON of an opened file; the data starts at byte *data. The caller frees *json on success.
static inline bool safetensors_read_header(const SafetensorsFile *file, Json *json, int64_t *data, Failure *failure) {
    uint64_t length = 0;
    if (file->bytes < 8)
        return fail(failure, "%s: %lld bytes are too few for a safetensors file", file->path, (long long)file->bytes);
    char head[64];
    const int64_t n = min_i64(file->bytes, sizeof head);
    if (!file_read_at(file->fd, file->path, 0, head, n, failure)) return false;
    memcpy(&length, head, 8);
    const char *words = file_look_alike(head, (size_t)n);
    if (length > (uint64_t)SAFETENSORS_MAX_HEADER && words)
        return fail(failure, "%s: this is not a safetensors file, but %s", file->path, words);
    if (length > (uint64_t)SAFETENSORS_MAX_HEADER)
        return fail(failure, "%s: the header would have %llu bytes, so this is not a safetensors file", file->path,
                    (unsigned long long)length);
    if ((int64_t)length > file->bytes - 8)
        return fail(failure,
                    "%s: the header has %llu bytes from byte 8 on, but the file has only %lld; it was cut short, or is "
                    "no safetensors file",
                    file->path, (unsigned long long)length, (long long)file->bytes);
    char *text = (char *)xcalloc((size_t)length + 1, 1);
    bool ok = file_read_at(file->fd, file->path, 8, text, (int64_t)length, failure) &&
              json_parse(json, file->path, text, (size_t)length, failure);
    free(text);
    *data = 8 + (int64_t)length;
    if (ok && json_root(json)->type != JSON_OBJECT) {
        ok = json_expected(json, json_root(json), "an object", failure);
        json_free(json);
    }
    return ok;
}

// True if the file's header says that this program wrote it. (Another program that changes the file writes its own
// header.)
static inline bool safetensors_is_own(const char *path) {
    SafetensorsFile file = {(char *)path, -1, 0};
    Failure ignored;
    Json json;
    int64_t data;
    if (!file_size(path, &file.bytes, &ignored) ||
        (file.fd = FILE_WORK("open", path, open(path, O_RDONLY | O_CLOEXEC))) < 0)
        return false;
    const bool read = safetensors_read_header(&file, &json, &data, &ignored);
    close(file.fd);
    if (!read) return false;
    const JsonNode *metadata = json_member(&json, json_root(&json), "__metadata__"),
                   *writer = json_member(&json, metadata, "written_by");
    const bool own = writer && writer->type == JSON_STRING && strcmp(writer->text, SAFETENSORS_WRITER) == 0;
    json_free(&json);
    return own;
}

// Adds one file and its tensors to the set. On failure the set can still be closed.
static inline bool safetensors_add_file(Safetensors *st, const char *path, Failure *failure) {
    int64_t bytes = 0;
    if (!file_size(path, &bytes, failure)) return false;
    int fd = FILE_WORK("open", path, open(path, O_RDONLY | O_CLOEXEC));
    if (fd < 0) return fail(failure, "cannot open %s: %s", path, strerror(errno));
    st->files = (SafetensorsFile *)xrealloc(st->files, (size_t)(st->num_files + 1) * sizeof *st->files);
    const int index = st->num_files++;
    SafetensorsFile *file = &st->files[index];
    file->path = xstrdup(path), file->fd = fd, file->bytes = bytes;

    Json json;
    int64_t data = 0;
    if (!safetensors_read_header(file, &json, &data, failure)) return false;
    const int64_t before = st->count;
    st->tensors = (Safetensor *)xrealloc(st->tensors, (size_t)(before + json_root(&json)->count) * sizeof *st->tensors);
    bool ok = true;
    for (const JsonNode *entry = json_first(&json, json_root(&json)); ok && entry; entry = json_next(&json, entry)) {
        if (strcmp(entry->key, "__metadata__") == 0) continue;
        Safetensor *t = &st->tensors[st->count++];
        memset(t, 0, sizeof *t);
        t->name = xstrdup(entry->key);
        t->file = index;
        ok = safetensors_read_entry(&json, entry, data, bytes - data, t, failure);
    }
    json_free(&json);
    return ok && safetensors_check_offsets(st->tensors + before, st->count - before, data, file, failure);
}

static inline bool safetensors_sort(Safetensors *st, Failure *failure) {
    if (st->count) qsort(st->tensors, (size_t)st->count, sizeof *st->tensors, safetensors_compare_names);
    for (int64_t i = 1; i < st->count; i++)
        if (strcmp(st->tensors[i - 1].name, st->tensors[i].name) == 0)
            return fail(failure, "tensor %.200s is in both %s and %s", st->tensors[i].name,
                        st->files[st->tensors[i - 1].file].path, st->files[st->tensors[i].file].path);
    return true;
}

// Opens one file as a set. The caller closes it with safetensors_close. On failure nothing stays open.
static inline bool safetensors_open(Safetensors *st, const char *path, Failure *failure) {
    memset(st, 0, sizeof *st);
    if (safetensors_add_file(st, path, failure) && safetensors_sort(st, failure)) return true;
    safetensors_close(st);
    return false;
}

static inline const Safetensor *safetensors_find(const Safetensors *st, const char *name) {
    int64_t low = 0, high = st->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        int order = strcmp(st->tensors[middle].name, name);
        if (order == 0) return &st->tensors[middle];
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

// The other name of the matrix that a tied model has under two names; NULL for other tensors.
static inline const char *safetensors_tied_name(const char *name) {
    static const char *const names[] = {"model.embed_tokens.weight", "lm_head.weight"};
    for (int i = 0; i < 2; i++)
        if (strcmp(name, names[i]) == 0) return names[1 - i];
    return NULL;
}

// Opens the files that the weight_map of an index names. Fails if a file is not in the folder of the index, or lacks a
// tensor of the map; the other name of a tied matrix will do.
static inline bool safetensors_add_indexed(Safetensors *st, const char *folder, const Json *index, Failure *failure) {
    const JsonNode *map = json_root(index)->type == JSON_OBJECT
                              ? json_require(index, json_root(index), "weight_map", JSON_OBJECT, failure)
                              : NULL;
    if (json_root(index)->type != JSON_OBJECT) json_expected(index, json_root(index), "an object", failure);
    if (!map) return false;
    char path[PATH_CAPACITY];
    for (const JsonNode *entry = json_first(index, map); entry; entry = json_next(index, entry)) {
        if (entry->type != JSON_STRING || !*entry->text || strchr(entry->text, '/') || entry->text[0] == '.' ||
            strlen(entry->text) > 255)
            return json_expected(index, entry, "the name of a file in the same folder", failure);
        format_checked(path, sizeof path, "%s/%s", folder, entry->text);
        bool open = false;
        for (int i = 0; i < st->num_files && !open; i++) open = strcmp(st->files[i].path, path) == 0;
        if (!open && !safetensors_add_file(st, path, failure)) return false;
    }
    if (!safetensors_sort(st, failure)) return false;
    for (const JsonNode *entry = json_first(index, map); entry; entry = json_next(index, entry)) {
        const Safetensor *t = safetensors_find(st, entry->key);
        const char *other = safetensors_tied_name(entry->key);
        if (!t && other && safetensors_find(st, other)) continue;
        format_checked(path, sizeof path, "%s/%s", folder, entry->text);
        if (!t || strcmp(st->files[t->file].path, path) != 0)
            return fail(failure, "%s: weight_map puts tensor %.200s in %s, which does not hold it", index->source,
                        entry->key, entry->text);
    }
    return true;
}

// Opens FOLDER/STEM.safetensors or, if that is missing, the files of FOLDER/STEM.safetensors.index.json. The caller
// closes the set with safetensors_close. On failure nothing stays open.
static inline bool safetensors_open_folder(Safetensors *st, const char *folder, const char *stem, Failure *failure) {
    char single[PATH_CAPACITY], index_path[PATH_CAPACITY];
    format_checked(single, sizeof single, "%s/%s.safetensors", folder, stem);
    format_checked(index_path, sizeof index_path, "%s/%s.safetensors.index.json", folder, stem);
    if (path_exists(single)) return safetensors_open(st, single, failure);
    memset(st, 0, sizeof *st);
    if (!path_exists(index_path))
        return fail(failure, "%s has neither %s.safetensors nor %s.safetensors.index.json", folder, stem, stem);
    Json index;
    if (!json_parse_file(&index, index_path, failure)) return false;
    bool ok = safetensors_add_indexed(st, folder, &index, failure);
    json_free(&index);
    if (!ok) safetensors_close(st);
    return ok;
}

// ---- reading: the tensors

// Writes a shape as text, for example "[64, 32]".
static inline void safetensors_shape_text(const int64_t *shape, int rank, char *out, size_t capacity) {
    snprintf(out, capacity, rank ? "[" : "[]");
    for (int i = 0; i < rank; i++) {
        const size_t n = strlen(out);
        snprintf(out + n, capacity - n, "%lld%s", (long long)shape[i], i + 1 < rank ? ", " : "]");
    }
}

// Returns the name of a tensor that has the same name but for what stands before it, with or without the "model." of
// `name`; NULL if there is none.
static inline const char *safetensors_look_alike(const Safetensors *st, const char *name) {
    const char *core = strncmp(name, "model.", 6) == 0 ? name + 6 : name;
    const size_t k = strlen(core);
    for (int64_t i = 0; i < st->count; i++) {
        const char *other = st->tensors[i].name;
        const size_t n = strlen(other);
        if (n >= k && strcmp(other + n - k, core) == 0 && (n == k || other[n - k - 1] == '.')) return other;
    }
    return NULL;
}

// Returns the tensor of that name if it has shape [rows, cols], or [rows] with cols = 0. Else returns NULL, and
// `failure` says that there is no such tensor, or names the file, the expected shape and the shape found.
static inline const Safetensor *safetensors_require(const Safetensors *st, const char *name, int64_t rows, int64_t cols,
                                                    Failure *failure) {
    const int64_t expected[2] = {rows, cols};
    const int rank = cols ? 2 : 1;
    const Safetensor *t = safetensors_find(st, name);
    if (!t) {
        const char *other = safetensors_look_alike(st, name);
        fail(failure, "%s%s has no tensor %s%s%.200s%s", st->num_files ? st->files[0].path : "(no file)",
             st->num_files > 1 ? " and the files beside it" : "", name, other ? ", but " : "", other ? other : "",
             other ? ": its names have another prefix; save the model itself, not one that torch.compile, DataParallel "
                     "or PEFT wraps, or rename its tensors"
                   : "");
        return NULL;
    }
    bool same = t->rank == rank;
    for (int i = 0; same && i < rank; i++) same = t->shape[i] == expected[i];
    if (same) return t;
    char want[96], have[256];
    safetensors_shape_text(expected, rank, want, sizeof want);
    safetensors_shape_text(t->shape, t->rank, have, sizeof have);
    fail(failure, "%s: tensor %s has shape %s; the model needs %s", st->files[t->file].path, name, have, want);
    return NULL;
}

// Converts n elements of an F32, BF16 or F16 tensor to fp32, or to bf16 with rounding to nearest even.
static inline void safetensors_convert(SafetensorsType type, const void *in, int64_t n, bool to_fp32, void *out) {
    for (int64_t i = 0; i < n; i++) {
        float x = type == ST_F32    ? ((const float *)in)[i]
                  : type == ST_BF16 ? bf16_to_float(((const bf16_bits *)in)[i])
                                    : fp16_to_float(((const fp16_bits *)in)[i]);
        if (to_fp32) ((float *)out)[i] = x;
        else ((bf16_bits *)out)[i] = bf16_from_float(x);
    }
}

static inline bool safetensors_in_range(const Safetensors *st, const Safetensor *t, int64_t offset, int64_t count,
                                        Failure *failure) {
    return (offset >= 0 && count >= 0 && offset <= t->elements - count) ||
           fail(failure, "%s: tensor %s has %lld elements; cannot read %lld from element %lld on",
                st->files[t->file].path, t->name, (long long)t->elements, (long long)count, (long long)offset);
}

// Reads `count` elements of a tensor from element `offset` on, as fp32 or bf16. The tensor must be F32, BF16 or F16.
static inline bool safetensors_read(const Safetensors *st, const Safetensor *t, int64_t offset, int64_t count,
                                    bool to_fp32, void *out, Failure *failure) {
    const SafetensorsFile *file = &st->files[t->file];
    if (!safetensors_is_float(t->type))
        return fail(failure, "%s: tensor %s has dtype %s; it must be F32, BF16 or F16", file->path, t->name,
                    safetensors_type_name(t->type));
    if (!safetensors_in_range(st, t, offset, count, failure)) return false;
    const int64_t element = safetensors_type_bytes(t->type), out_element = to_fp32 ? 4 : 2;
    const int64_t start = t->offset + offset * element;
    if (t->type == (to_fp32 ? ST_F32 : ST_BF16))
        return file_read_at(file->fd, file->path, start, out, count * element, failure);
    const int64_t chunk = max_i64(1, min_i64(count, IO_CHUNK_BYTES / 64));  // small enough for the cache
    void *raw = xcalloc((size_t)chunk, (size_t)element);
    bool ok = true;
    for (int64_t done = 0; ok && done < count; done += chunk) {
        const int64_t n = min_i64(chunk, count - done);
        ok = file_read_at(file->fd, file->path, start + done * element, raw, n * element, failure);
        if (ok) safetensors_convert(t->type, raw, n, to_fp32, (char *)out + done * out_element);
    }
    free(raw);
    return ok;
}

// Reads elements like safetensors_read, but as `type`. F32 and BF16: from an F32, BF16 or F16 tensor, with conversion.
// Any other `type`: only from a tensor of that type.
static inline bool safetensors_read_as(const Safetensors *st, const Safetensor *t, int64_t offset, int64_t count,
                                       SafetensorsType type, void *out, Failure *failure) {
    const SafetensorsFile *file = &st->files[t->file];
    if (type == ST_F32 || type == ST_BF16) return safetensors_read(st, t, offset, count, type == ST_F32, out, failure);
    if (t->type != type)
        return fail(failure, "%s: tensor %s has dtype %s; it must be %s", file->path, t->name,
                    safetensors_type_name(t->type), safetensors_type_name(type));
    const int64_t element = safetensors_type_bytes(type);
    return safetensors_in_range(st, t, offset, count, failure) &&
           file_read_at(file->fd, file->path, t->offset + offset * element, out, count * element, failure);
}

#endif
