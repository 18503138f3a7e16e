// Opens a safetensors file and reads the first and the last elements of every tensor (at most 4096), as they are stored
// and as fp32. Reads outside a tensor must fail, and reads of types other than F32, BF16 and F16.
#include "fuzz.h"

static void safetensors_try(const Safetensors *st, const Safetensor *t) {
    Failure failure;
    static float out[4096];
    FUZZ_CHECK(t->file >= 0 && t->file < st->num_files && t->elements >= 0 && t->rank <= SAFETENSORS_MAX_RANK);
    FUZZ_CHECK(t->offset >= 8 && t->offset + t->bytes <= st->files[t->file].bytes);
    const bool floats = t->type == ST_F32 || t->type == ST_BF16 || t->type == ST_F16;
    const int64_t n = min_i64(t->elements, 4096);
    for (int fp32 = 0; fp32 < 2; fp32++) {
        FUZZ_CHECK(safetensors_read(st, t, 0, n, fp32, out, &failure) == floats);
        FUZZ_CHECK(safetensors_read(st, t, t->elements - n, n, fp32, out, &failure) == floats);
        FUZZ_CHECK(!safetensors_read(st, t, t->elements, 1, fp32, out, &failure));
        FUZZ_CHECK(!safetensors_read(st, t, -1, 1, fp32, out, &failure));
        FUZZ_CHECK(!safetensors_read(st, t, 0, t->elements + 1, fp32, out, &failure));
        FUZZ_CHECK(!safetensors_read(st, t, INT64_MAX, 1, fp32, out, &failure));
    }
    const Safetensor *found = safetensors_require(st, t->name, t->shape[0], t->shape[1], &failure);
    FUZZ_CHECK(!found || found == t);
    FUZZ_CHECK(safetensors_find(st, t->name) == t);
}

// If the first byte is odd, the header's length is corrected: the header ends at the last "}".
static void safetensors_run(const uint8_t *data, size_t size) {
    static uint8_t file[1 << 16];
    const uint8_t choice = fuzz_byte(&data, &size);
    if (size > sizeof file) return;
    if (size) memcpy(file, data, size);
    size_t end = size;
    while (end > 8 && file[end - 1] != '}') end--;
    if (choice % 2 && end > 8) memcpy(file, &(uint64_t){end - 8}, 8);
    fuzz_write("t.safetensors", file, size);
    Safetensors st;
    Failure failure;
    safetensors_is_own(fuzz_path("t.safetensors"));
    if (!safetensors_open(&st, fuzz_path("t.safetensors"), &failure)) return;
    for (int64_t i = 0; i < st.count; i++) safetensors_try(&st, &st.tensors[i]);
    safetensors_require(&st, "no such name", 1, 0, &failure);
    safetensors_close(&st);
}

static size_t safetensors_seed(int i, uint8_t *out) {
    static const struct {
        const char *header;
        size_t data;
    } seeds[] = {{"{'__metadata__':{'format':'pt','written_by':'train_fp8'},'a':{'dtype':'F32','shape':[2,3],"
                  "'data_offsets':[0,24]},'b':{'dtype':'BF16','shape':[4],'data_offsets':[24,32]}}",
                  32},
                 {"{'h':{'dtype':'F16','shape':[],'data_offsets':[0,2]},"
                  "'e':{'dtype':'F32','shape':[0,9223372036854775807],'data_offsets':[2,2]}}",
                  2},
                 {"{'q':{'dtype':'F8_E4M3','shape':[2,2,2,1,1,1,1,1],'data_offsets':[0,8]},"
                  "'i':{'dtype':'I64','shape':[1],'data_offsets':[8,16]}}",
                  16},
                 {"{}", 0}};
    if (i >= 2 * (int)(sizeof seeds / sizeof seeds[0])) return 0;
    const uint64_t length = fuzz_text(out + 9, seeds[i / 2].header);
    out[0] = (uint8_t)(i % 2);
    memcpy(out + 1, &length, 8);
    for (size_t k = 0; k < seeds[i / 2].data; k++) out[9 + length + k] = (uint8_t)(37 * k);
    return 9 + length + seeds[i / 2].data;
}

FUZZ_TARGET(safetensors)
