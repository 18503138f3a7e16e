// Reads model.safetensors.index.json beside two valid files and a hidden one: no path may leave the folder, or name a
// hidden file.
#include "fuzz.h"

static void index_write_shards(void) {
    static const char *const names[] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                        ".hidden.safetensors"};
    static const char header[] = "{\"%c\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    static bool written;
    for (int i = 0; i < 3 && !written; i++) {
        char file[256] = {0};
        const int n = snprintf(file + 8, sizeof file - 8, header, 'a' + i);
        memcpy(file, &(uint64_t){(uint64_t)n}, 8);
        fuzz_write(names[i], file, 8 + (size_t)n + 4);
    }
    written = true;
}

static void index_run(const uint8_t *data, size_t size) {
    Safetensors st;
    Failure failure;
    index_write_shards();
    fuzz_write("model.safetensors.index.json", data, size);
    if (!safetensors_open_folder(&st, fuzz()->folder, "model", &failure)) return;
    const size_t n = strlen(fuzz()->folder);
    for (int i = 0; i < st.num_files; i++) {
        const char *path = st.files[i].path;
        FUZZ_CHECK(strncmp(path, fuzz()->folder, n) == 0 && path[n] == '/');
        FUZZ_CHECK(!strchr(path + n + 1, '/') && path[n + 1] != '.');
    }
    for (int64_t i = 0; i < st.count; i++) {
        float value;
        FUZZ_CHECK(safetensors_read(&st, &st.tensors[i], 0, 1, true, &value, &failure) && value == 0);
    }
    safetensors_close(&st);
}

static size_t index_seed(int i, uint8_t *out) {
    static const char *const seeds[] = {
        ("{'metadata': {'total_size': 8}, 'weight_map': {'a': 'model-00001-of-00002.safetensors',"
         " 'b': 'model-00002-of-00002.safetensors'}}"),
        "{'weight_map': {'a': 'model-00001-of-00002.safetensors'}}", "{'weight_map': {'c': '.hidden.safetensors'}}",
        ("{'weight_map': {'a': '../model-00001-of-00002.safetensors',"
         " 'b': './model-00002-of-00002.safetensors'}}"),
        ("{'weight_map': {'a': '/etc/passwd', 'b': '', 'c': '..',"
         " 'd': 'model-00001-of-00002.safetensors\\u0000'}}")};
    return i < (int)(sizeof seeds / sizeof seeds[0]) ? fuzz_text(out, seeds[i]) : 0;
}

FUZZ_TARGET(index)
