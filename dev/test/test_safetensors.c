// Tests safetensors.h, safetensors_writer.h, file_io.h and xxhash64.h: round trips, hostile and damaged files, sharded
// sets, failing disks, folders and links, and text that is safe to print.
#include <sys/resource.h>
#include <signal.h>

#include "lib/failing_readdir.h"

#include "../../llmc/base/rng.h"
#include "../../llmc/checkpoint/safetensors_writer.h"
#include "lib/check.h"
#include "lib/scratch.h"

static void write_bytes(const char *name, const void *data, size_t size) {
    const char *path = scratch_path("%s", name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f)) die("cannot write %s", path);
}

// Writes a file with this header and `data` zero bytes after it.
static void write_header(const char *name, const char *header, size_t data) {
    const uint64_t length = strlen(header);
    char *bytes = (char *)xcalloc(8 + length + data, 1);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, length);
    write_bytes(name, bytes, 8 + length + data);
    free(bytes);
}

static void test_hash(void) {
    // Published values of XXH64 with seed 0.
    CHECK(xxhash64("", 0) == 0xef46db3751d8e999ull, "the hash of an empty text is the published one; found %016llx",
          (unsigned long long)xxhash64("", 0));
    CHECK(xxhash64("a", 1) == 0xd24ec4f1a98c6e5bull, "the hash of \"a\" is the published one; found %016llx",
          (unsigned long long)xxhash64("a", 1));
    CHECK(xxhash64("abc", 3) == 0x44bc2cf5ad770999ull, "the hash of \"abc\" is the published one; found %016llx",
          (unsigned long long)xxhash64("abc", 3));
    const char *text = "Nobody inspects the spammish repetition";
    CHECK(xxhash64(text, 39) == 0xfbcea83c8a378bf1ull, "the hash of 39 bytes is the published one; found %016llx",
          (unsigned long long)xxhash64(text, 39));
    unsigned char data[1000];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)rng_u64(1, i);
    int same = 0, changed = 0, splits = 0;
    for (size_t n = 0; n < sizeof data; n += 7, splits++) {
        XxHash64 h = xxhash64_begin();
        xxhash64_add(&h, data, n / 3);
        xxhash64_add(&h, data + n / 3, 0);
        for (size_t i = n / 3; i < n; i++) xxhash64_add(&h, data + i, 1);
        same += xxhash64_end(&h) == xxhash64(data, n);
        const uint64_t before = xxhash64(data, sizeof data);
        data[n] ^= 0x10;
        changed += xxhash64(data, sizeof data) != before;
        data[n] ^= 0x10;
    }
    CHECK(same == splits && changed == splits,
          "%d hashes of pieces equal the hash of the whole, and %d flipped bits change the hash; expected %d of each",
          same, changed, splits);
}

// ---- Round trips of one file and of several with an index, and bad indexes.

#define NUM_TENSORS 5
static const SafetensorSpec specs[NUM_TENSORS] = {{"a.weight", ST_F32, 4, 3},
                                                  {"b.bias", ST_BF16, 7, 0},
                                                  {"c \"quoted\"", ST_BF16, 2, 5},
                                                  {"one", ST_F32, 1, 0},
                                                  {"d.weight", ST_BF16, 8, 8}};

static float value_of(int64_t tensor, int64_t i) { return bf16_round(rng_normal(77, (uint64_t)(tensor * 1000 + i))); }

static bool source(void *context, int64_t tensor, int64_t offset, int64_t count, void *out, Failure *failure) {
    ++*(int *)context;
    (void)failure;
    for (int64_t i = 0; i < count; i++) {
        if (specs[tensor].type == ST_F32) ((float *)out)[i] = value_of(tensor, offset + i);
        else ((bf16_bits *)out)[i] = bf16_from_float(value_of(tensor, offset + i));
    }
    return true;
}

static void check_set(const Safetensors *st, int64_t tensors) {
    Failure failure = {"", false};
    CHECK(st->count == tensors, "all tensors are found; found %lld", (long long)st->count);
    for (int64_t s = 0; s < tensors; s++) {
        const Safetensor *t = safetensors_require(st, specs[s].name, specs[s].rows, specs[s].cols, &failure);
        CHECK(t && t->type == specs[s].type && t->elements == safetensors_spec_elements(&specs[s]),
              "%s has its dtype and number of elements: %s", specs[s].name, failure.text);
        if (!t) continue;
        float whole[64], part[64];
        bf16_bits bf16[64];
        bool read = safetensors_read(st, t, 0, t->elements, true, whole, &failure) &&
                    safetensors_read(st, t, 0, t->elements, false, bf16, &failure) &&
                    safetensors_read(st, t, t->elements / 3, t->elements - t->elements / 3, true, part, &failure);
        CHECK(read, "the whole tensor and its end can be read: %s", failure.text);
        int wrong = 0;
        for (int64_t i = 0; i < t->elements; i++)
            wrong += whole[i] != value_of(s, i) || bf16_to_float(bf16[i]) != value_of(s, i) ||
                     (i >= t->elements / 3 && part[i - t->elements / 3] != value_of(s, i));
        CHECK(wrong == 0, "%s: all values are those that were written; %d are not", specs[s].name, wrong);
        CHECK_FAILS(safetensors_read(st, t, 1, t->elements, true, whole, &failure), "cannot read",
                    "a read beyond the end is refused");
        CHECK(!safetensors_read(st, t, -1, 1, true, whole, &failure) &&
                  !safetensors_read(st, t, 0, -1, true, whole, &failure),
              "a negative offset or count is refused: %s", failure.text);
    }
}

static void test_round_trip(void) {
    Safetensors st;
    Failure failure = {"", false};
    FileList list = {NULL, 0};
    int calls = 0;
    CHECK(safetensors_save(scratch, "model", specs, NUM_TENSORS, SAFETENSORS_SHARD_BYTES, source, &calls, &list,
                           &failure),
          "the file is written: %s", failure.text);
    CHECK(list.count == 1 && strcmp(list.records[0].name, "model.safetensors") == 0 && calls == NUM_TENSORS,
          "there is one file, whose source was called once per tensor; found %lld files", (long long)list.count);
    int64_t bytes = 0;
    uint64_t hash = 0;
    CHECK(file_size(scratch_path("model.safetensors"), &bytes, &failure) && bytes == list.records[0].bytes,
          "the file has the size of its record: %s", failure.text);
    CHECK(file_hash(scratch_path("model.safetensors"), bytes, &hash, &failure) && hash == list.records[0].hash,
          "the file has the hash of its record: %s", failure.text);
    CHECK(safetensors_open_folder(&st, scratch, "model", &failure), "the file is opened: %s", failure.text);
    check_set(&st, NUM_TENSORS);
    CHECK(st.tensors[0].offset % 8 == 0, "the data starts at a multiple of 8 bytes; found byte %lld",
          (long long)st.tensors[0].offset);

    CHECK_FAILS(safetensors_require(&st, "absent", 4, 3, &failure), "model.safetensors has no tensor absent",
                "a missing tensor is an error");
    CHECK_FAILS(safetensors_require(&st, "model.bias", 7, 0, &failure),
                "has no tensor model.bias, but b.bias: its names have another prefix",
                "an error names the look-alike of a missing tensor");
    CHECK_FAILS(safetensors_require(&st, "weight", 3, 4, &failure), "but a.weight: its",
                "an error names the look-alike with another prefix");
    CHECK(!safetensors_require(&st, "model.a", 4, 3, &failure) && !strstr(failure.text, "but"),
          "part of a name is no look-alike: %s", failure.text);
    CHECK_FAILS(safetensors_require(&st, "a.weight", 3, 4, &failure),
                "tensor a.weight has shape [4, 3]; the model needs [3, 4]", "another shape is an error");
    CHECK_FAILS(safetensors_require(&st, "a.weight", 12, 0, &failure), "needs [12]",
                "a matrix where the model needs a vector is an error");
    CHECK_FAILS(safetensors_require(&st, "one", 1, 1, &failure), "has shape [1]",
                "a vector where the model needs a matrix is an error");
    safetensors_close(&st);
    file_list_free(&list);
    unlink(scratch_path("model.safetensors"));
}

static void test_sharded(void) {
    Safetensors st;
    Failure failure = {"", false};
    FileList list = {NULL, 0};
    int calls = 0;
    // The files get 48 + 14, 20 + 4 and 128 bytes of data. A tensor larger than the limit gets a file of its own.
    CHECK(safetensors_save(scratch, "set", specs, NUM_TENSORS, 64, source, &calls, &list, &failure),
          "the files are written: %s", failure.text);
    CHECK(list.count == 4 && strcmp(list.records[0].name, "set-00001-of-00003.safetensors") == 0 &&
              strcmp(list.records[3].name, "set.safetensors.index.json") == 0,
          "three files and an index are written; found %lld", (long long)list.count);
    CHECK(list.records[2].bytes > list.records[1].bytes,
          "the file of the large tensor is larger than the file before it");
    file_list_free(&list);
    // The third tensor's name has quotes. They must be escaped in the index, as they are in the header of a file.
    CHECK(safetensors_open_folder(&st, scratch, "set", &failure), "the files are opened by their index: %s",
          failure.text);
    CHECK(st.num_files == 3, "the index names 3 files; found %d", st.num_files);
    check_set(&st, NUM_TENSORS);
    CHECK_FAILS(safetensors_require(&st, "absent", 1, 0, &failure), "and the files beside it has no tensor",
                "a missing tensor is an error");
    safetensors_close(&st);

    static const char *const bad[][2] = {
        {"[]", "expected an object"},
        {"{}", "has no \"weight_map\""},
        {"{\"weight_map\": []}", "expected an object"},
        {"{\"weight_map\": {\"a.weight\": 3}}", "name of a file in the same folder"},
        {"{\"weight_map\": {\"a.weight\": \"../x.safetensors\"}}", "name of a file in the same folder"},
        {"{\"weight_map\": {\"a.weight\": \"/etc/passwd\"}}", "name of a file in the same folder"},
        {"{\"weight_map\": {\"a.weight\": \"..\"}}", "name of a file in the same folder"},
        {"{\"weight_map\": {\"a.weight\": \"\"}}", "name of a file in the same folder"},
        {"{\"weight_map\": {\"a.weight\": \"none.safetensors\"}}", "No such file"},
        {"{\"weight_map\": {\"a.weight\": \"set-00002-of-00003.safetensors\"}}",
         "puts tensor a.weight in set-00002-of-00003.safetensors, which does not hold it"},
        {"{\"weight_map\": {\"zzz\": \"set-00001-of-00003.safetensors\"}}",
         "puts tensor zzz in set-00001-of-00003.safetensors, which does not hold it"},
        {"{\"weight_map\"", "expected ':'"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        write_bytes("bad.safetensors.index.json", bad[i][0], strlen(bad[i][0]));
        bool ok = safetensors_open_folder(&st, scratch, "bad", &failure);
        CHECK(!ok && strstr(failure.text, bad[i][1]), "%s is refused: %s", bad[i][0], ok ? "accepted" : failure.text);
    }
    // Tensor b.bias is in two files.
    size_t size;
    char *copy = read_file(scratch_path("set-00001-of-00003.safetensors"), &size);
    write_bytes("copy.safetensors", copy, size);
    free(copy);
    const char *twice =
        "{\"weight_map\": {\"a.weight\": \"copy.safetensors\", \"b.bias\": \"set-00001-of-00003.safetensors\"}}";
    write_bytes("bad.safetensors.index.json", twice, strlen(twice));
    CHECK_FAILS(safetensors_open_folder(&st, scratch, "bad", &failure), "is in both",
                "a tensor in two files is refused");
    CHECK_FAILS(safetensors_open_folder(&st, scratch, "nothing", &failure), "has neither nothing.safetensors nor",
                "a folder without weights is refused");
}

// ---- Hostile, foreign and damaged files, and conversions of dtypes.

static void test_hostile_headers(void) {
    static const struct {
        const char *header;
        size_t data;
        const char *reason;
    } cases[] = {
        {"", 0, "expected a value"},
        {"[]", 0, "expected an object"},
        {"{", 0, "expected a string"},
        {"{\"a\":1}", 0, "has no \"dtype\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "a has no \"data_offsets\""},
        {"{\"a\":{\"dtype\":1,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "a.dtype: expected a string"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
         "expected a known dtype (F32, BF16, F16, ...), found \"F31\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, "a.shape[0]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.5],\"data_offsets\":[0,8]}}", 8, "a.shape[0]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[\"2\"],\"data_offsets\":[0,8]}}", 8, "a.shape[0]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296,2],\"data_offsets\":[0,8]}}", 8, "overflows"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0, "overflows"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4, "9 dimensions"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "[begin, end]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]}}", 8, "[begin, end]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8, "a.data_offsets[1]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,12]}}", 8,
         "truncated: tensor a ends at byte 12 of the data, but the file has 8 of data"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[9223372036854775800,9223372036854775807]}}", 8,
         "truncated: tensor a ends at byte 9223372036854775807"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", 8, "a.data_offsets[0]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 8,
         "which are 4 bytes, but its shape and dtype need 8"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[4,8]}}", 8,
         "past the end of the tensor or header before it"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 12, "the tensors end at byte"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],"
         "\"data_offsets\":[0,4]}}",
         4, "before the end of the tensor or header before it"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],"
         "\"data_offsets\":[4,8]}}",
         8, "before the end of the tensor or header before it"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"F32\",\"shape\":[1],"
         "\"data_offsets\":[4,8]}}",
         8, "appears twice"}};
    Safetensors st;
    Failure failure;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_header("x.safetensors", cases[i].header, cases[i].data);
        bool ok = safetensors_open(&st, scratch_path("x.safetensors"), &failure);
        CHECK(!ok && strstr(failure.text, cases[i].reason) && strstr(failure.text, "x.safetensors"),
              "%s is refused: %s", cases[i].header, ok ? "accepted" : failure.text);
        if (ok) safetensors_close(&st);
    }
    static const char *const foreign[][2] = {
        {"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"},
        {"<!DOCTYPE html>", "a web page"},
        {"\n<html></html>", "a web page"},
        {"PK\x03\x04 archive", "a zip archive"},
        {"{\"error\": 404}", "JSON text"}};
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++) {
        write_bytes("x.safetensors", foreign[i][0], strlen(foreign[i][0]));
        write_bytes("x.safetensors.index.json", foreign[0][0], strlen(foreign[0][0]));
        CHECK(!safetensors_open(&st, scratch_path("x.safetensors"), &failure) &&
                  strstr(failure.text, "not a safetensors file, but ") && strstr(failure.text, foreign[i][1]),
              "the error says what the file is: %s", failure.text);
    }
    unlink(scratch_path("x.safetensors"));
    CHECK_FAILS(safetensors_open_folder(&st, scratch, "x", &failure), "JSON is expected, but this is",
                "the error says what the index is");
    static const unsigned char lengths[][8] = {
        {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, {0, 0, 0, 0, 0, 0, 0, 0x80}, {0, 0, 0, 0, 1}, {9}};
    static const char *const reasons[] = {"not a safetensors file", "not a safetensors file", "not a safetensors file",
                                          "cut short"};
    for (int i = 0; i < 4; i++) {
        write_bytes("x.safetensors", lengths[i], 8);
        CHECK_FAILS(safetensors_open(&st, scratch_path("x.safetensors"), &failure), reasons[i],
                    "a wrong length of the header is refused");
    }
    CHECK_FAILS(safetensors_open(&st, scratch, &failure), "is not a file", "a folder in place of the file is refused");
    CHECK_FAILS(safetensors_open(&st, scratch_path("none"), &failure), "No such file", "a missing file is refused");
}

static void test_foreign_files(void) {
    Safetensors st;
    Failure failure = {"", false};
    static const char *const types[] = {"F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "C64"};
    static const int bytes[] = {4, 6, 6, 8, 8, 8, 64};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        char header[256];
        format_checked(header, sizeof header, "{\"a\":{\"dtype\":\"%s\",\"shape\":[2,4],\"data_offsets\":[0,%d]}}",
                       types[i], bytes[i]);
        write_header("x.safetensors", header, (size_t)bytes[i]);
        bool ok = safetensors_open(&st, scratch_path("x.safetensors"), &failure);
        float out[8];
        CHECK(ok && !safetensors_read(&st, &st.tensors[0], 0, 8, true, out, &failure) &&
                  strstr(failure.text, "has dtype") && strstr(failure.text, types[i]),
              "a tensor of a dtype that is not read is known by its name: %s", failure.text);
        if (ok) safetensors_close(&st);
    }
    // Valid: metadata, an empty tensor, a scalar, tensors out of order in the header, spaces at its end.
    write_header("x.safetensors",
                 "{\"__metadata__\":{\"format\":\"pt\"},\"h\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[8,16]}"
                 ",\"e\":{\"dtype\":\"F32\",\"shape\":[0,5],\"data_offsets\":[8,8]},"
                 "\"s\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]}}   ",
                 0);
    const uint16_t half[8] = {7, 0, 0, 0, 0x3c00, 0xc100, 0x0001, 0x7bff};
    FILE *f = fopen(scratch_path("x.safetensors"), "ab");
    fwrite(half, 2, 8, f);
    fclose(f);
    CHECK(safetensors_open(&st, scratch_path("x.safetensors"), &failure), "the file is opened: %s", failure.text);
    float out[4] = {0};
    const Safetensor *h = safetensors_find(&st, "h"), *s = safetensors_find(&st, "s");
    CHECK(st.count == 3 && h && s && s->rank == 0 && s->elements == 1 && !safetensors_find(&st, "__metadata__"),
          "three tensors are found, one of them a scalar, and no __metadata__; found %lld", (long long)st.count);
    CHECK(safetensors_read(&st, h, 0, 4, true, out, &failure) && out[0] == 1 && out[1] == -2.5f && out[2] == 0x1p-24f &&
              out[3] == 65504,
          "FP16 values are read; found %g %g %g %g", out[0], out[1], out[2], out[3]);
    CHECK_FAILS(safetensors_read(&st, s, 0, 1, true, out, &failure),
                "tensor s has dtype I64; it must be F32, BF16 or F16", "an integer tensor is not read as weights");
    safetensors_close(&st);
}

// Compares every FP16 value with the definition of the format.
static void test_half(void) {
    int wrong = 0;
    for (uint32_t code = 0; code < 65536; code++) {
        const int exponent = (int)(code >> 10 & 31), fraction = (int)(code & 1023);
        const double magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                                 : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                                : ldexp(fraction, -24);
        const float expected = (float)(code & 0x8000 ? -magnitude : magnitude), got = fp16_to_float((fp16_bits)code);
        wrong += isnan(expected) ? !isnan(got) : float_bits(got) != float_bits(expected);
    }
    CHECK(wrong == 0, "all FP16 values are converted; %d of 65536 differ", wrong);
}

static void test_rounding(void) {
    // fp32 to bf16 with ties to even: 1 + 2^-8 is a tie and rounds down to 1; 1 + 3 * 2^-8 is a tie and rounds up.
    const float in[3] = {1.00390625f, 1.01171875f, 1e38f};
    bf16_bits out[3];
    safetensors_convert(ST_F32, in, 3, false, out);
    CHECK(out[0] == 0x3f80 && out[1] == 0x3f82 && out[2] == bf16_from_float(1e38f),
          "ties go to the even bf16 number; found %x and %x", out[0], out[1]);
}

// A valid file that is cut (to any of many lengths) is refused. If one random byte of the first 560 is changed, the
// file is refused or read within bounds.
static void test_damage(void) {
    Safetensors st;
    Failure failure;
    FileList list = {NULL, 0};
    int calls = 0;
    CHECK(safetensors_save(scratch, "whole", specs, NUM_TENSORS, SAFETENSORS_SHARD_BYTES, source, &calls, &list,
                           &failure),
          "the file is written: %s", failure.text);
    file_list_free(&list);
    size_t size;
    char *data = read_file(scratch_path("whole.safetensors"), &size);
    int accepted = 0;
    for (size_t n = 0; n < size; n += n < 600 ? 3 : 11) {
        write_bytes("cut.safetensors", data, n);
        if (safetensors_open(&st, scratch_path("cut.safetensors"), &failure)) accepted++, safetensors_close(&st);
    }
    CHECK(accepted == 0, "no cut file is accepted; %d were", accepted);
    write_bytes("cut.safetensors", data, size + 1);  // one byte too many: read_file adds a zero byte
    CHECK_FAILS(safetensors_open(&st, scratch_path("cut.safetensors"), &failure), "the tensors end at byte",
                "a file with one more byte is refused");
    float values[64];
    for (uint64_t round = 0; round < 1500; round++) {
        const size_t at = (size_t)(rng_u64(5, round) % 560);
        const char before = data[at];
        data[at] = (char)rng_u64(6, round);
        write_bytes("cut.safetensors", data, size);
        data[at] = before;
        if (!safetensors_open(&st, scratch_path("cut.safetensors"), &failure)) continue;
        for (int64_t i = 0; i < st.count; i++)
            safetensors_read(&st, &st.tensors[i], 0, min_i64(64, st.tensors[i].elements), true, values, &failure);
        safetensors_close(&st);
    }
    // A file that shrinks after it was opened.
    write_bytes("cut.safetensors", data, size);
    CHECK(safetensors_open(&st, scratch_path("cut.safetensors"), &failure), "the whole file is opened: %s",
          failure.text);
    CHECK(truncate(scratch_path("cut.safetensors"), (off_t)size - 100) == 0, "the file is truncated: %s",
          strerror(errno));
    const Safetensor *last = safetensors_find(&st, "d.weight");
    CHECK_FAILS(safetensors_read(&st, last, 0, 64, true, values, &failure), "; 128 bytes were wanted",
                "a file that shrinks after it was opened is an error");
    safetensors_close(&st);
    free(data);
}

// ---- Disks that fail.

static void test_failing_writes(void) {
    OutputFile file;
    Failure failure = {"", false};
    FileList list = {NULL, 0};
    int calls = 0;
    CHECK(output_file_open(&file, "/dev/full", &failure), "/dev/full is opened: %s", failure.text);
    CHECK_FAILS(output_file_write(&file, "abc", 3, &failure),
                "cannot write /dev/full after 0 bytes: No space left on device", "a full disk is an error");
    close(file.fd);
    CHECK_FAILS(output_file_open(&file, scratch_path("no/such/file"), &failure), "cannot create",
                "a file in a missing folder is an error");

    // A limit on file sizes stands in for a disk that gets full in the middle of a file.
    struct rlimit before, small = {300, RLIM_INFINITY};
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before);
    small.rlim_max = before.rlim_max;
    setrlimit(RLIMIT_FSIZE, &small);
    bool ok =
        safetensors_save(scratch, "full", specs, NUM_TENSORS, SAFETENSORS_SHARD_BYTES, source, &calls, &list, &failure);
    setrlimit(RLIMIT_FSIZE, &before);
    CHECK(!ok &&
              strstr(failure.text, "full.safetensors after 300 bytes: File too large: this process may write files "
                                   "of 300 bytes at most") &&
              list.count == 0,
          "a file that reaches the limit is an error: %s", failure.text);
}

// ---- Folders, and text that is safe to print.

static void test_folders(void) {
    Failure failure = {"", false};
    const char *a = scratch_path("a"), *b = scratch_path("b");
    CHECK(folder_create(scratch_path("made/with/parents"), true, &failure), "a folder is made with its parents: %s",
          failure.text);
    CHECK(rmdir(scratch_path("made/with/parents")) == 0 && rmdir(scratch_path("made/with")) == 0 &&
              rmdir(scratch_path("made")) == 0,
          "the folder and its parents are removed: %s", strerror(errno));
    CHECK_FAILS(folder_create(scratch_path("x/y/z"), false, &failure), "its parent folder must exist",
                "without `may_exist`, a missing parent is an error");
    CHECK(folder_begin(a, &failure) && folder_create(a, true, &failure) && !folder_create(a, false, &failure),
          "folder_begin makes a folder; folder_create accepts one that exists only with `may_exist`: %s", failure.text);
    CHECK(file_write(a, "new", "1", 1, NULL, &failure) && folder_begin(b, &failure) &&
              file_write(b, "old", "2", 1, NULL, &failure),
          "both folders get a file: %s", failure.text);
    CHECK(folder_replace(a, b, &failure) && !path_exists(a) && path_exists(scratch_path("b/new")) &&
              !path_exists(scratch_path("b/old")),
          "folder_replace puts folder a in place of b: %s", failure.text);
    CHECK(mkdir(scratch_path("b/inner"), 0777) == 0 && !folder_remove(b, &failure) &&
              path_exists(scratch_path("b/inner")),
          "a folder that holds another one is not removed: %s", failure.text);
    CHECK(rmdir(scratch_path("b/inner")) == 0 && folder_remove(b, &failure) && !path_exists(b),
          "a folder with files alone is removed: %s", failure.text);
    CHECK(!folder_remove(b, &failure) && !folder_sync(b, &failure) && folder_sync(scratch, &failure),
          "a missing folder can be neither removed nor synced: %s", failure.text);
}

// folder_remove() removes neither a link nor its target, nor a folder that holds files but no marker file (the mark).
// If it cannot read a folder to the end, the mark stays.
static void test_foreign_folders(void) {
    Failure failure = {"", false};
    const char *home = scratch_path("home"), *link = scratch_path("link"), *loop = scratch_path("loop");
    if (!folder_create(home, false, &failure) || symlink("home", link) || symlink("loop", loop))
        die("%s", failure.text);
    CHECK(folder_kind(home) == FOLDER_EMPTY && folder_kind(link) == FOLDER_FOREIGN &&
              folder_kind(loop) == FOLDER_FOREIGN,
          "folder_kind() tells an empty folder from links");
    if (!file_write(home, "thesis", "x", 1, NULL, &failure)) die("%s", failure.text);
    CHECK(folder_kind(home) == FOLDER_FOREIGN, "a folder with a foreign file and no mark is foreign; found %d",
          (int)folder_kind(home));
    CHECK_FAILS(folder_remove(home, &failure), "has no file .train_fp8", "a folder without the mark is not removed");
    CHECK(folder_mark(home, &failure) && folder_kind(home) == FOLDER_MARKED && folder_kind(link) == FOLDER_FOREIGN,
          "a folder with the mark belongs to this program, and a link to it does not: %s", failure.text);
    readable_entries = 0;
    CHECK(folder_kind(home) == FOLDER_FOREIGN, "a folder whose entries cannot be read is foreign; found %d",
          (int)folder_kind(home));
    for (int entries = 0; entries <= 4; entries++) {  // the folder has four: the mark, the file, "." and ".."
        readable_entries = entries;
        const bool removed = folder_remove(home, &failure);
        readable_entries = -1;
        CHECK(!removed && path_exists(scratch_path("home/" FOLDER_MARKER)),
              "a folder keeps its mark if reading it fails after %d entries: %s", entries, failure.text);
        if (!file_write(home, "thesis", "x", 1, NULL, &failure)) die("%s", failure.text);
    }
    CHECK_FAILS(folder_remove(link, &failure), "link is not removed: it is a link to home", "a link is not removed");
    CHECK_FAILS(folder_remove(loop, &failure), "it is a link to loop, which cannot be followed",
                "a link that cannot be followed is not removed");
    CHECK(path_exists(scratch_path("home/thesis")) && path_exists(link) && path_exists(loop),
          "no link or linked file is removed");
    CHECK(!file_write(scratch, "link", "x", 1, NULL, &failure), "a file is not written through a link");

    // The error names what is in the way of a new folder.
    CHECK_FAILS(folder_create(loop, true, &failure), "it is there already and is a link to loop",
                "a link to itself is in the way");
    CHECK_FAILS(folder_create(scratch_path("home/thesis"), true, &failure), "and is a file", "a file is in the way");
    CHECK_FAILS(folder_create(scratch_path("home/thesis/x"), true, &failure), "home/thesis is a file",
                "a file in place of the parent is in the way");
    CHECK(folder_create(link, true, &failure), "a link to a folder counts as the folder: %s", failure.text);

    CHECK(folder_remove(home, &failure) && !path_exists(home), "a folder with the mark is removed: %s", failure.text);
    CHECK_FAILS(folder_create(link, true, &failure), "which cannot be followed",
                "a link that cannot be followed is in the way");
    unlink(link), unlink(loop);
}

// Messages contain no characters that control a terminal, except tab and newline. Text in other languages stays.
static void test_printable(void) {
    static const char *const cases[][2] = {{"plain \t\n", "plain \t\n"},
                                           {"\x1b]0;x\x07", "\\x1b]0;x\\x07"},
                                           {"a\x7f\r", "a\\x7f\\x0d"},
                                           {"\x9b"
                                            "31m",
                                            "\\x9b31m"},
                                           {"\xc2\x9b"
                                            "31m",
                                            "\xc2\\x9b31m"},
                                           {"a\x80\x9b"
                                            "31m",
                                            "a\\x80\\x9b31m"},
                                           {"\xff\x9b"
                                            "31m",
                                            "\xff\\x9b31m"},
                                           {"ü\x9b"
                                            "31m",
                                            "ü\\x9b31m"},
                                           {"Grüße, 你好 😀", "Grüße, 你好 😀"}};
    char out[32], cut[7];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        text_printable(cases[i][0], out, sizeof out);
        CHECK(strcmp(out, cases[i][1]) == 0, "case %zu is printed as expected; found \"%s\"", i, out);
    }
    text_printable("ab\x1b\x1b", cut, sizeof cut);
    CHECK(strcmp(cut, "ab\\x1b") == 0, "a text that is too long is cut before an escape; found \"%s\"", cut);
    Failure failure = {"", false};
    CHECK(!fail(&failure, "tensor %s", "\x1b[2J") && strcmp(failure.text, "tensor \\x1b[2J") == 0,
          "failures are printable; found \"%s\"", failure.text);
}

int main(void) {
    scratch_create();
    test_hash();
    test_round_trip();
    test_sharded();
    test_hostile_headers();
    test_foreign_files();
    test_half();
    test_rounding();
    test_damage();
    test_failing_writes();
    test_folders();
    test_foreign_folders();
    test_printable();
    scratch_remove();
    return check_report();
}
