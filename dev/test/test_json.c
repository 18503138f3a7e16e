// Tests json.h: values that are read, refused input with the error messages, damaged input (under ASan, a read or write
// outside of memory ends the test), and text that is written.
#include "../../llmc/base/json.h"
#include "../../llmc/base/rng.h"
#include "lib/check.h"

static void check_refused(const char *text, size_t size, const char *reason) {
    Json json;
    Failure failure = {"", false};
    bool ok = json_parse(&json, "t.json", text, size, &failure);
    CHECK(!ok && strstr(failure.text, reason) && strncmp(failure.text, "t.json: ", 8) == 0,
          "%.60s gives the error \"%s\"; expected \"%s\"", text, ok ? "accepted" : failure.text, reason);
    if (ok) json_free(&json);
}

static void test_refused(void) {
    static const char *const cases[][2] = {{"", "expected a value (end of text)"},
                                           {"   \n", "line 2, column 1: expected a value"},
                                           {"nul", "expected a value"},
                                           {"True", "expected a value"},
                                           {"nan", "expected a value"},
                                           {"Infinite", "expected a value"},
                                           {"-", "expected a value"},
                                           {"+1", "expected a value"},
                                           {".5", "expected a value"},
                                           {"01", "text after the value"},
                                           {"1.", "digits after the point"},
                                           {"1e", "digits in the exponent"},
                                           {"1e+", "digits in the exponent"},
                                           {"0x10", "text after the value"},
                                           {"1 2", "text after the value"},
                                           {"{}x", "text after the value"},
                                           {"[1,]", "expected a value"},
                                           {"[1 2]", "expected ',' or ']'"},
                                           {"[1", "expected ',' or ']' (end of text)"},
                                           {"[", "expected a value"},
                                           {"{", "expected a string"},
                                           {"{1:2}", "expected a string"},
                                           {"{\"a\" 1}", "expected ':'"},
                                           {"{\"a\":1,}", "expected a string"},
                                           {"{\"a\":1 \"b\":2}", "expected ',' or '}'"},
                                           {"{\"a\":}", "expected a value"},
                                           {"\"abc", "string without an end"},
                                           {"\"a\\", "unknown escape"},
                                           {"\"\\x41\"", "unknown escape"},
                                           {"\"\\u12\"", "four hexadecimal"},
                                           {"\"\\u12g4\"", "four hexadecimal"},
                                           {"\"\\u0000\"", "\\u0000"},
                                           {"\"\\ud800\"", "without the second half"},
                                           {"\"\\ud800\\u0041\"", "without the second half"},
                                           {"\"\\ud800\\n\"", "without the second half"},
                                           {"\"\\udc00\"", "without the first half"},
                                           {"\"a\nb\"", "control character"},
                                           {"{\"a\":1,\"b\":2,\"a\":3}", "key \"a\" appears twice"},
                                           {"{\"x\":{\"a\":1,\"\\u0061\":2}}", "key \"a\" appears twice"},
                                           {"[1,\n [2,\n  !]]", "line 3, column 3"},
                                           {"\xef\xbb{}", "expected a value"},
                                           {"{}\xef\xbb\xbf", "text after the value"},
                                           {"// c\n1", "expected a value"},
                                           {"'a'", "expected a value"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_refused(cases[i][0], strlen(cases[i][0]), cases[i][1]);
    check_refused("\"a\0b\"", 5, "control character");
    check_refused("1\0", 2, "text after the value");
}

// A byte order mark before the text, and Python's NaN and infinities, which are no numbers.
static void test_extensions(void) {
    Json json;
    Failure failure = {"", false};
    const char *text = "\xef\xbb\xbf[NaN, -Infinity, Infinity, 1]";
    bool ok = json_parse(&json, "t.json", text, strlen(text), &failure);
    CHECK(ok && json_root(&json)->count == 4, "a byte order mark and values that are not finite are read: %s",
          failure.text);
    for (int64_t i = 1; ok && i < 4; i++) {
        double real;
        int64_t whole;
        CHECK(!json_real(&json, &json.nodes[i], &real, &failure) && strstr(failure.text, json.nodes[i].text) &&
                  !json_int(&json, &json.nodes[i], -5, 5, &whole, &failure),
              "a value that is not finite is no number: %s", failure.text);
    }
    if (ok) json_free(&json);
}

static void test_set(void) {
    static const char *const cases[][3] = {
        {"{ \"a\" : [1,\t2.50],\"b\":NaN }\n", "a", "{ \"a\" : 7,\"b\":NaN }\n"},
        {"{\"x\": {\"a\": 1}, \"a\": \"\\u0041\"}", "a", "{\"x\": {\"a\": 1}, \"a\": 7}"},
        {"{\n  \"b\": {}\n}\n", "a", "{\n  \"b\": {},\n  \"a\": 7\n}\n"},
        {"{}", "a", "{\n  \"a\": 7\n}"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        JsonText out = {NULL, 0, 0};
        json_text_add(&out, "%s", cases[i][0]);
        json_text_set(&out, cases[i][1], "7");
        CHECK(strcmp(out.data, cases[i][2]) == 0 && out.size == strlen(cases[i][2]),
              "%s gets a member and keeps its other bytes: %s", cases[i][0], out.data);
        json_text_free(&out);
    }
}

static void test_depth(void) {
    char text[256];
    Json json;
    Failure failure = {"", false};
    memset(text, '[', 128);
    memset(text + 128, ']', 128);
    CHECK(json_parse(&json, "t.json", text + 128 - JSON_MAX_DEPTH, 2 * JSON_MAX_DEPTH, &failure),
          "JSON_MAX_DEPTH nested arrays are accepted: %s", failure.text);
    json_free(&json);
    check_refused(text, sizeof text, "nested too deeply");
    char *deep = (char *)xcalloc(1 << 20, 1);
    memset(deep, '[', 1 << 20);
    check_refused(deep, 1 << 20, "nested too deeply");
    free(deep);
}

static const char document[] = "{\"name\": \"a\\\"\\\\\\/\\b\\f\\n\\r\\tb\\u00e9\\u20ac\\ud83d\\ude00\", \"raw\": "
                               "\"\xc3\xa9\xff\", \"int\": -12345678901234567, \"real\": 1.5e-3,\n"
                               " \"whole\": 8192.0, \"million\": 1E6, \"flags\": [true, false, null], \"nested\": "
                               "{\"list\": [1, {\"deep\": \"x\"}], \"empty\": {}, \"none\": []}, \"\": 0}";

static void test_values(void) {
    Json json;
    Failure failure = {"", false};
    CHECK(json_parse(&json, "t.json", document, strlen(document), &failure), "the document is parsed: %s",
          failure.text);
    const JsonNode *root = json_root(&json);
    CHECK(root->type == JSON_OBJECT && root->count == 9 && root->key == NULL,
          "the root is an object with 9 members; found %lld", (long long)root->count);
    const JsonNode *name = json_require(&json, root, "name", JSON_STRING, &failure);
    CHECK(name && strcmp(name->text, "a\"\\/\b\f\n\r\tb\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80") == 0,
          "all escapes of the string are resolved; found %s", name ? name->text : failure.text);
    CHECK(strcmp(json_member(&json, root, "raw")->text, "\xc3\xa9\xff") == 0,
          "a string keeps bytes that are not UTF-8");
    CHECK(json_member(&json, root, "") && !json_member(&json, root, "absent") && !json_member(&json, name, "x"),
          "json_member finds an empty key, but no absent key and no key of a string");
    int64_t i = 0;
    double x = 0;
    bool b = false;
    CHECK(json_int(&json, json_member(&json, root, "int"), INT64_MIN, 0, &i, &failure) && i == -12345678901234567,
          "an integer of 17 digits is read exactly; found %lld", (long long)i);
    CHECK(json_real(&json, json_member(&json, root, "real"), &x, &failure) && x == 1.5e-3,
          "a fraction is read; found %g", x);
    CHECK(json_int(&json, json_member(&json, root, "whole"), 1, 1 << 20, &i, &failure) && i == 8192,
          "8192.0 is a whole number; found %lld", (long long)i);
    CHECK(json_int(&json, json_member(&json, root, "million"), 1, 1 << 20, &i, &failure) && i == 1000000,
          "1E6 is a whole number; found %lld", (long long)i);
    const JsonNode *flags = json_member(&json, root, "flags"), *first = json_first(&json, flags),
                   *second = json_next(&json, first);
    CHECK(flags->count == 3 && json_bool(&json, first, &b, &failure) && b && json_bool(&json, second, &b, &failure) &&
              !b,
          "there are three flags, the first is true and the second false");
    CHECK(json_next(&json, second)->type == JSON_NULL && !json_next(&json, json_next(&json, second)),
          "the third flag is null, and there is no fourth");
    const JsonNode *nested = json_member(&json, root, "nested"),
                   *deep = json_next(&json, json_first(&json, json_member(&json, nested, "list")));
    char path[64];
    json_path(&json, json_member(&json, deep, "deep"), path, sizeof path);
    CHECK(strcmp(path, "nested.list[1].deep") == 0, "the path names all keys and indices; found \"%s\"", path);
    json_path(&json, root, path, sizeof path);
    CHECK(strcmp(path, "") == 0, "the path of the root is empty; found \"%s\"", path);
    json_path(&json, json_member(&json, deep, "deep"), path, 8);
    CHECK(strcmp(path, "nested.") == 0, "a path is cut to the size of its buffer; found \"%s\"", path);

    CHECK(!json_require(&json, nested, "size", JSON_NUMBER, &failure) &&
              strcmp(failure.text, "t.json: nested has no \"size\"") == 0,
          "a missing member is an error: %s", failure.text);
    CHECK(!json_require(&json, nested, "list", JSON_OBJECT, &failure) &&
              strcmp(failure.text, "t.json: nested.list: expected an object, found an array") == 0,
          "a member of another type is an error: %s", failure.text);
    CHECK_FAILS(json_int(&json, name, 0, 9, &i, &failure), "t.json: name: expected a whole number in 0..9, found \"a",
                "a string instead of a whole number is an error");
    CHECK_FAILS(json_int(&json, json_member(&json, root, "real"), 0, 9, &i, &failure), "found 1.5e-3",
                "a fraction instead of a whole number is an error");
    CHECK(!json_bool(&json, name, &b, &failure) && !json_real(&json, name, &x, &failure),
          "json_bool and json_real refuse a string");
    json_free(&json);
}

static bool int_of(const char *text, int64_t low, int64_t high, int64_t *out) {
    Json json;
    Failure failure;
    if (!json_parse(&json, "t.json", text, strlen(text), &failure)) return false;
    bool ok = json_int(&json, json_root(&json), low, high, out, &failure);
    json_free(&json);
    return ok;
}

static void test_numbers(void) {
    int64_t i = 0;
    CHECK(int_of("9223372036854775807", 0, INT64_MAX, &i) && i == INT64_MAX,
          "the largest 64-bit integer is read; found %lld", (long long)i);
    CHECK(int_of("-9223372036854775808", INT64_MIN, 0, &i) && i == INT64_MIN,
          "the smallest 64-bit integer is read; found %lld", (long long)i);
    CHECK(!int_of("9223372036854775808", 0, INT64_MAX, &i), "an integer past 64 bits is refused");
    CHECK(!int_of("99999999999999999999999999", 0, INT64_MAX, &i), "an integer past 64 bits is refused");
    CHECK(!int_of("1e300", 0, INT64_MAX, &i) && !int_of("1e999", 0, INT64_MAX, &i) && !int_of("1e18", 0, INT64_MAX, &i),
          "a whole number with an exponent is refused above 2^53");
    CHECK(!int_of("0.5", 0, 9, &i) && !int_of("10", 0, 9, &i) && !int_of("-1", 0, 9, &i) && !int_of("1e1", 0, 9, &i),
          "fractions and numbers outside the range are refused");
    CHECK(int_of("9", 0, 9, &i) && int_of("0", 0, 9, &i) && int_of("-0", 0, 9, &i),
          "the limits of the range are accepted");
    Json json;
    Failure failure;
    double x = 0;
    CHECK(json_parse(&json, "t.json", "1e999", 5, &failure), "1e999 is valid JSON: %s", failure.text);
    CHECK_FAILS(json_real(&json, json_root(&json), &x, &failure), "1e999", "1e999 is refused as a double");
    json_free(&json);
}

// Every shorter prefix of `document` is refused. Copies in which 1 to 3 bytes are random are refused or parsed. None of
// 20,000 crashes the parser.
static void test_damage(void) {
    const size_t size = strlen(document);
    Json json;
    Failure failure;
    int accepted_cuts = 0;
    char *copy = (char *)xcalloc(size, 1);
    for (size_t n = 0; n < size; n++) {
        char *cut = (char *)xcalloc(n ? n : 1, 1);  // exact size, so that ASan detects a read past the end
        memcpy(cut, document, n);
        accepted_cuts += json_parse(&json, "t.json", cut, n, &failure);
        free(cut);
    }
    CHECK(accepted_cuts == 0, "no shorter prefix is accepted; %d of %zu were", accepted_cuts, size);
    int refused = 0;
    for (uint64_t round = 0; round < 20000; round++) {
        memcpy(copy, document, size);
        for (uint64_t k = 0; k <= round % 3; k++) copy[rng_u64(round, 2 * k) % size] = (char)rng_u64(round, 2 * k + 1);
        if (json_parse(&json, "t.json", copy, size, &failure)) json_free(&json);
        else refused++;
    }
    CHECK(refused > 5000 && refused < 20000, "over 5000 of 20000 damaged documents are refused, but not all; found %d",
          refused);
    free(copy);
}

static void test_writing(void) {
    const double values[] = {0,
                             1,
                             -1,
                             0.1,
                             1e-5,
                             1e-6,
                             1e-8,
                             0.02,
                             500000,
                             1e6,
                             1e21,
                             1.0 / 3,
                             5e-324,
                             1.7976931348623157e308,
                             123456789012345680.0};
    const char *const texts[] = {"0.0", "1.0", "-1.0", "0.1", "1e-05", "1e-06", "1e-08", "0.02"};
    JsonText out = {NULL, 0, 0};
    json_text_add(&out, "{\"s\": ");
    json_text_add_string(&out, "q\"b\\n\n\x01\xc3\xa9/");
    json_text_add(&out, ", \"n\": [");
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        const size_t before = out.size + (i > 0);
        json_text_add(&out, "%s", i ? "," : "");
        json_text_add_real(&out, values[i]);
        if (i < 8)
            CHECK(strcmp(out.data + before, texts[i]) == 0,
                  "the number is written like Python's repr() writes it; found %s", out.data + before);
        CHECK(strpbrk(out.data + before, ".e"), "the number is not written like an integer; found %s",
              out.data + before);
    }
    json_text_add(&out, "]}");
    Json json;
    Failure failure = {"", false};
    CHECK(json_parse(&json, "t.json", out.data, out.size, &failure), "the written text is parsed: %s in %s",
          failure.text, out.data);
    CHECK(strcmp(json_member(&json, json_root(&json), "s")->text, "q\"b\\n\n\x01\xc3\xa9/") == 0,
          "the string is read back from %s", out.data);
    size_t i = 0;
    for (const JsonNode *n = json_first(&json, json_member(&json, json_root(&json), "n")); n;
         n = json_next(&json, n), i++) {
        double x = 0;
        CHECK(json_real(&json, n, &x, &failure) && x == values[i], "%s is read back as %.17g", n->text, values[i]);
    }
    json_free(&json);
    json_text_free(&out);
}

// A byte that is no part of valid UTF-8 is written as \udcXX, and read back as the same byte.
static void test_bytes(void) {
    static const char *const cases[][2] = {
        {"a/\xff\xfe/b", "\"a/\\udcff\\udcfe/b\""},
        {"caf\xe9", "\"caf\\udce9\""},  // Latin-1
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\""},
        {"\xe2\x82", "\"\\udce2\\udc82\""},  // cut inside a character
        {"\xc0\xaf", "\"\\udcc0\\udcaf\""},
        {"\xe0\x80\x80", "\"\\udce0\\udc80\\udc80\""},
        {"\xf0\x8f\xbf\xbf", "\"\\udcf0\\udc8f\\udcbf\\udcbf\""},  // overlong
        {"\xed\xa0\x80", "\"\\udced\\udca0\\udc80\""},             // a surrogate
        {"\xf4\x90\x80\x80", "\"\\udcf4\\udc90\\udc80\\udc80\""},  // past U+10FFFF
        {"\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf", "\"\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf\""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        JsonText out = {NULL, 0, 0};
        json_text_add_string(&out, cases[i][0]);
        CHECK(strcmp(out.data, cases[i][1]) == 0, "the bytes are written as %s; expected %s", out.data, cases[i][1]);
        json_text_free(&out);
    }
    check_refused("\"\\udc7f\"", 8, "without the first half");
    check_refused("\"\\udd00\"", 8, "without the first half");
    int wrong = 0;
    for (uint64_t round = 0; round < 2000; round++) {
        char bytes[9] = "";
        for (uint64_t k = 0; k < 8; k++) bytes[k] = (char)(1 + rng_u64(round, k) % 255);
        JsonText out = {NULL, 0, 0};
        json_text_add_string(&out, bytes);
        bool valid = true;
        for (const char *c = out.data; *c && valid; c += json_utf8_length(c)) valid = json_utf8_length(c) > 0;
        Json json;
        Failure failure = {"", false};
        const bool parsed = json_parse(&json, "t.json", out.data, out.size, &failure);
        wrong += !valid || !parsed || strcmp(json_root(&json)->text, bytes) != 0;
        if (parsed) json_free(&json);
        json_text_free(&out);
    }
    CHECK(wrong == 0, "strings of any bytes are written as UTF-8 and read back; %d of 2000 are not", wrong);
}

int main(void) {
    test_refused();
    test_extensions();
    test_set();
    test_depth();
    test_values();
    test_numbers();
    test_damage();
    test_writing();
    test_bytes();
    return check_report();
}
