// Reads goldens of dev/reference that are arrays of bytes and numbers, and compares FP8 codes. Paths are relative to
// the root of the repository.
#ifndef DEV_TEST_FP8_GOLDEN_H
#define DEV_TEST_FP8_GOLDEN_H

#include "../../../llmc/base/fp8.h"
#include "../../../llmc/checkpoint/safetensors.h"
#include "check.h"

static inline Safetensors fp8_golden_open(const char *path) {
    Safetensors st;
    Failure failure;
    if (!safetensors_open(&st, path, &failure)) die("%s (run from the root of the repository)", failure.text);
    return st;
}

// Returns a whole tensor's bytes, which the caller frees. Dies if the tensor is missing, or if its type or its number
// of elements is another one. A negative `elements` allows any number.
static inline void *fp8_golden_bytes(const Safetensors *st, const char *name, SafetensorsType type, int64_t elements) {
    Failure failure;
    const Safetensor *t = safetensors_find(st, name);
    if (!t || t->type != type || (elements >= 0 && t->elements != elements))
        die("golden %s is missing, or of another type or size", name);
    const int64_t bytes = t->elements * safetensors_type_bytes(type);
    void *data = xcalloc((size_t)bytes, 1);
    if (!file_read_at(st->files[t->file].fd, st->files[t->file].path, t->offset, data, bytes, &failure))
        die("%s", failure.text);
    return data;
}

// Compares an array [elements], byte by byte, with row `step` of the tensor PREFIX + NAME [steps, elements].
static inline void fp8_golden_check(const Safetensors *st, const char *prefix, const char *name, SafetensorsType type,
                                    int64_t steps, int64_t step, const void *got, int64_t elements) {
    char full[64];
    format_checked(full, sizeof full, "%s%s", prefix, name);
    const int64_t bytes = elements * safetensors_type_bytes(type);
    char *want = (char *)fp8_golden_bytes(st, full, type, steps * elements);
    int64_t differ = 0;
    for (int64_t i = 0; i < bytes; i++) differ += ((const char *)got)[i] != want[step * bytes + i];
    CHECK(differ == 0, "after step %lld, %lld of %lld bytes of %s differ from the golden; expected none",
          (long long)step + 1, (long long)differ, (long long)bytes, full);
    free(want);
}

static inline bool fp8_is_nan(uint8_t code, Fp8Format format) {
    return format == FP8_E4M3 ? (code & 0x7f) == 0x7f : (code & 0x7f) > 0x7c;
}

// True if the codes are equal or both are NaN. torch writes different NaN codes on CPU and GPU.
static inline bool fp8_same(uint8_t a, uint8_t b, Fp8Format format) {
    return fp8_is_nan(b, format) ? fp8_is_nan(a, format) : a == b;
}

static inline const char *fp8_format_name(Fp8Format format) { return format == FP8_E4M3 ? "e4m3" : "e5m2"; }

#endif
