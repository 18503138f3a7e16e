// Reads JSON (RFC 8259) into a flat array of nodes, and writes JSON text.
//
// Files may be hostile: nesting and the number of values are limited, every number and escape is checked, and an object
// must not have a key twice. \u0000 is refused, since strings here end at a zero byte. A byte 0xXX that is not UTF-8
// (in a path, for example) is written as \udcXX, as Python's "surrogateescape" does (PEP 383), and read back as that
// byte. So the JSON that this program writes is always UTF-8, and Python's os.fsencode turns the text that json.load
// reads into the path's bytes. A byte that is not UTF-8 in JSON that is read is kept as it is.
//
// Two things that other programs write are accepted though RFC 8259 has them not: a byte order mark before the text,
// and Python's NaN, Infinity and -Infinity. These are no numbers: json_int and json_real refuse them.
#ifndef LLMC_JSON_H
#define LLMC_JSON_H

#include <math.h>

#include "file_io.h"

#define JSON_MAX_DEPTH 64
#define JSON_MAX_NODES ((int64_t)1 << 24)

typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT, JSON_NONFINITE } JsonType;

typedef struct {
    JsonType type;
    int64_t parent, next, first;  // indices of nodes: parent, next sibling, first child; -1: none
    int64_t count;                // children
    const char *key;              // key of a member of an object, else NULL
    const char *text;             // string with its escapes decoded; number as in the file; "true"; "false"; else ""
    size_t begin, end;            // place of the value in the parsed text: bytes [begin, end)
} JsonNode;

typedef struct {
    char *source;     // file name for messages
    char *file;       // the text that json_parse_file has read; else NULL
    JsonNode *nodes;  // nodes[0] is the root
    int64_t count, capacity;
    char *pool;  // holds the keys, strings and numbers
} Json;

typedef struct {
    Json *json;
    const char *start, *at, *end;
    char *pool;  // next free byte of json->pool
    Failure *failure;
} JsonParser;

static inline const char *json_type_name(JsonType type) {
    static const char *const names[] = {"null",     "true or false", "a number",           "a string",
                                        "an array", "an object",     "not a finite number"};
    return names[type];
}

static inline void json_free(Json *json) {
    free(json->source);
    free(json->file);
    free(json->nodes);
    free(json->pool);
    memset(json, 0, sizeof *json);
}

static inline bool json_syntax_error(JsonParser *p, const char *what) {
    int64_t line = 1, column = 1;
    for (const char *c = p->start; c < p->at; c++) {
        column = *c == '\n' ? 1 : column + 1;
        line += *c == '\n';
    }
    return fail(p->failure, "%s: line %lld, column %lld: %s%s", p->json->source, (long long)line, (long long)column,
                what, p->at == p->end ? " (end of text)" : "");
}

static inline void json_skip_space(JsonParser *p) {
    while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n' || *p->at == '\r')) p->at++;
}

// Skips character c and returns true if it is next. Else returns false.
static inline bool json_take(JsonParser *p, char c) {
    if (p->at == p->end || *p->at != c) return false;
    p->at++;
    return true;
}

static inline bool json_hex4(JsonParser *p, uint32_t *code) {
    *code = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        char c = p->at < p->end ? *p->at : 0;
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return json_syntax_error(p, "\\u needs four hexadecimal digits");
        *code = *code * 16 + (uint32_t)digit;
    }
    return true;
}

static inline void json_put_utf8(JsonParser *p, uint32_t code) {
    static const uint32_t marks[] = {0, 0xc0, 0xe0, 0xf0};  // in the first byte, by the number of bytes behind it
    const int behind = (code >= 0x80) + (code >= 0x800) + (code >= 0x10000);
    *p->pool++ = (char)(marks[behind] | code >> 6 * behind);
    for (int i = behind - 1; i >= 0; i--) *p->pool++ = (char)(0x80 | (code >> 6 * i & 0x3f));
}

// Reads an escape, from after its backslash.
static inline bool json_parse_escape(JsonParser *p) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char c = p->at < p->end ? *p->at : 0;
    const char *found = c ? strchr(from, c) : NULL;
    if (found) {
        p->at++;
        *p->pool++ = to[found - from];
        return true;
    }
    if (!json_take(p, 'u')) return json_syntax_error(p, "unknown escape in a string");
    uint32_t code, low;
    if (!json_hex4(p, &code)) return false;
    if (code == 0) return json_syntax_error(p, "\\u0000 in a string");
    if (code >= 0xdc80 && code <= 0xdcff) {  // stands for a byte that is not UTF-8
        *p->pool++ = (char)(code & 0xff);
        return true;
    }
    if (code >= 0xdc00 && code <= 0xdfff)
        return json_syntax_error(p, "second half of a surrogate pair without the first half");
    if (code >= 0xd800 && code <= 0xdbff) {
        if (!json_take(p, '\\') || !json_take(p, 'u'))
            return json_syntax_error(p, "first half of a surrogate pair without the second half");
        if (!json_hex4(p, &low)) return false;
        if (low < 0xdc00 || low > 0xdfff)
            return json_syntax_error(p, "first half of a surrogate pair without the second half");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    json_put_utf8(p, code);
    return true;
}

static inline bool json_parse_string(JsonParser *p, const char **text) {
    *text = p->pool;
    if (!json_take(p, '"')) return json_syntax_error(p, "expected a string");
    while (p->at < p->end && *p->at != '"') {
        if ((unsigned char)*p->at < 0x20) return json_syntax_error(p, "control character in a string");
        if (json_take(p, '\\')) {
            if (!json_parse_escape(p)) return false;
        } else {
            *p->pool++ = *p->at++;
        }
    }
    if (!json_take(p, '"')) return json_syntax_error(p, "string without an end");
    *p->pool++ = 0;
    return true;
}

static inline bool json_digits(JsonParser *p) {
    const char *from = p->at;
    while (p->at < p->end && *p->at >= '0' && *p->at <= '9') p->at++;
    return p->at > from;
}

static inline bool json_parse_number(JsonParser *p, const char **text) {
    const char *from = p->at;
    json_take(p, '-');
    if (!json_take(p, '0') && !json_digits(p)) return json_syntax_error(p, "expected a value");
    if (json_take(p, '.') && !json_digits(p)) return json_syntax_error(p, "expected digits after the point");
    if (json_take(p, 'e') || json_take(p, 'E')) {
        if (!json_take(p, '+')) json_take(p, '-');
        if (!json_digits(p)) return json_syntax_error(p, "expected digits in the exponent");
    }
    *text = p->pool;
    memcpy(p->pool, from, (size_t)(p->at - from));
    p->pool += p->at - from;
    *p->pool++ = 0;
    return true;
}

static inline int json_compare_keys(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static inline bool json_check_keys(JsonParser *p, int64_t object) {
    const JsonNode *nodes = p->json->nodes;
    int64_t n = 0;
    if (nodes[object].count < 2) return true;
    const char **keys = (const char **)xcalloc((size_t)nodes[object].count, sizeof *keys);
    for (int64_t i = nodes[object].first; i >= 0; i = nodes[i].next) keys[n++] = nodes[i].key;
    qsort(keys, (size_t)n, sizeof *keys, json_compare_keys);
    const char *twice = NULL;
    for (int64_t i = 1; i < n && !twice; i++)
        if (strcmp(keys[i - 1], keys[i]) == 0) twice = keys[i];
    free(keys);
    if (!twice) return true;
    char message[256];
    snprintf(message, sizeof message, "key \"%.100s\" appears twice in one object", twice);
    return json_syntax_error(p, message);
}

static inline bool json_parse_value(JsonParser *p, int64_t parent, const char *key, int depth);

// Reads an array or object from after its '[' or '{' up to its closing bracket.
static inline bool json_parse_children(JsonParser *p, int64_t node, int depth) {
    const bool object = p->json->nodes[node].type == JSON_OBJECT;
    const char close = object ? '}' : ']';
    int64_t last = -1;
    json_skip_space(p);
    if (json_take(p, close)) return true;
    for (;;) {
        const char *key = NULL;
        json_skip_space(p);
        if (object) {
            if (!json_parse_string(p, &key)) return false;
            json_skip_space(p);
            if (!json_take(p, ':')) return json_syntax_error(p, "expected ':' after a key");
        }
        int64_t child = p->json->count;
        if (!json_parse_value(p, node, key, depth + 1)) return false;
        if (last < 0) p->json->nodes[node].first = child;
        else p->json->nodes[last].next = child;
        last = child;
        p->json->nodes[node].count++;
        json_skip_space(p);
        if (json_take(p, close)) return !object || json_check_keys(p, node);
        if (!json_take(p, ',')) return json_syntax_error(p, object ? "expected ',' or '}'" : "expected ',' or ']'");
    }
}

// Skips a word, and returns true, if it is next.
static inline bool json_take_word(JsonParser *p, const char *word) {
    const size_t n = strlen(word);
    const bool next = (size_t)(p->end - p->at) >= n && memcmp(p->at, word, n) == 0;
    p->at += next ? n : 0;
    return next;
}

// Skips NaN, Infinity or -Infinity, and returns true if it is next.
static inline bool json_parse_nonfinite(JsonParser *p, const char **text) {
    static const char *const words[] = {"NaN", "Infinity", "-Infinity"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        if (!json_take_word(p, words[i])) continue;
        *text = words[i];
        return true;
    }
    return false;
}

static inline bool json_parse_value(JsonParser *p, int64_t parent, const char *key, int depth) {
    Json *json = p->json;
    json_skip_space(p);
    if (depth > JSON_MAX_DEPTH) return json_syntax_error(p, "nested too deeply");
    if (json->count == JSON_MAX_NODES) return json_syntax_error(p, "too many values");
    if (json->count == json->capacity) {
        json->capacity = json->capacity ? 2 * json->capacity : 64;
        json->nodes = (JsonNode *)xrealloc(json->nodes, (size_t)json->capacity * sizeof *json->nodes);
    }
    const int64_t index = json->count++;
    const char c = p->at < p->end ? *p->at : 0;
    JsonNode node = {JSON_NULL, parent, -1, -1, 0, key, "", (size_t)(p->at - p->start), 0};
    bool ok = true;
    if (c == '{' || c == '[') {
        p->at++;
        node.type = c == '{' ? JSON_OBJECT : JSON_ARRAY;
        json->nodes[index] = node;
        ok = json_parse_children(p, index, depth);
        json->nodes[index].end = (size_t)(p->at - p->start);
        return ok;
    }
    if (c == '"') {
        node.type = JSON_STRING;
        ok = json_parse_string(p, &node.text);
    } else if (c == 't' || c == 'f') {
        node.type = JSON_BOOL;
        node.text = c == 't' ? "true" : "false";
        ok = json_take_word(p, node.text) || json_syntax_error(p, "expected a value");
    } else if (c == 'n') {
        ok = json_take_word(p, "null") || json_syntax_error(p, "expected a value");
    } else if (json_parse_nonfinite(p, &node.text)) {
        node.type = JSON_NONFINITE;
    } else {
        node.type = JSON_NUMBER;
        ok = json_parse_number(p, &node.text);
    }
    node.end = (size_t)(p->at - p->start);
    json->nodes[index] = node;
    return ok;
}

// Parses `size` bytes of text; `source` names the text in messages. On success the caller frees *json with json_free.
static inline bool json_parse(Json *json, const char *source, const char *text, size_t size, Failure *failure) {
    memset(json, 0, sizeof *json);
    json->source = xstrdup(source);
    json->pool = (char *)xcalloc(size + 1, 1);  // enough: each zero byte stands for a quote or separator
    JsonParser p = {json, text, text, text + size, json->pool, failure};
    if (size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) p.at += 3;
    bool ok = json_parse_value(&p, -1, NULL, 0);
    json_skip_space(&p);
    if (ok && p.at < p.end) ok = json_syntax_error(&p, "text after the value");
    if (!ok) json_free(json);
    return ok;
}

static inline bool json_parse_file(Json *json, const char *path, Failure *failure) {
    size_t size;
    char *text = read_file(path, &size);
    if (!text) return fail(failure, "cannot read %s: %s", path, read_words());
    bool ok = json_parse(json, path, text, size, failure);
    const char *words = ok || *text == '{' ? NULL : file_look_alike(text, size);
    if (words) fail(failure, "%s: JSON is expected, but this is %s", path, words);
    if (ok) json->file = text;
    else free(text);
    return ok;
}

// ---- access

static inline const JsonNode *json_root(const Json *json) { return &json->nodes[0]; }

static inline const JsonNode *json_first(const Json *json, const JsonNode *node) {
    return node->first < 0 ? NULL : &json->nodes[node->first];
}

static inline const JsonNode *json_next(const Json *json, const JsonNode *node) {
    return node->next < 0 ? NULL : &json->nodes[node->next];
}

// The member `key` of an object; NULL if there is none, or if `object` is no object or NULL.
static inline const JsonNode *json_member(const Json *json, const JsonNode *object, const char *key) {
    if (!object || object->type != JSON_OBJECT) return NULL;
    for (const JsonNode *node = json_first(json, object); node; node = json_next(json, node))
        if (strcmp(node->key, key) == 0) return node;
    return NULL;
}

// The path of a node, such as "rope_scaling.factor" or "files[2].name"; "" for the root. A long path is cut.
static inline void json_path(const Json *json, const JsonNode *node, char *out, size_t capacity) {
    if (capacity == 0) return;
    out[0] = 0;
    if (node->parent < 0) return;
    const JsonNode *parent = &json->nodes[node->parent];
    json_path(json, parent, out, capacity);
    size_t n = strlen(out);
    if (node->key) {
        snprintf(out + n, capacity - n, "%s%s", n ? "." : "", node->key);
    } else {
        int64_t position = 0;
        for (const JsonNode *at = json_first(json, parent); at != node; at = json_next(json, at)) position++;
        snprintf(out + n, capacity - n, "[%lld]", (long long)position);
    }
}

// Fails with "FILE: path: expected WHAT, found ...", without a path for the root. Always returns false.
static inline bool json_expected(const Json *json, const JsonNode *node, const char *what, Failure *failure) {
    char path[256];
    json_path(json, node, path, sizeof path);
    if (node->type == JSON_NULL || node->type == JSON_ARRAY || node->type == JSON_OBJECT)
        return fail(failure, "%s: %s%sexpected %s, found %s", json->source, path, *path ? ": " : "", what,
                    json_type_name(node->type));
    const char *quote = node->type == JSON_STRING ? "\"" : "";
    return fail(failure, "%s: %s%sexpected %s, found %s%.80s%s", json->source, path, *path ? ": " : "", what, quote,
                node->text, quote);
}

// Returns the member `key`. If it is missing or has another type, returns NULL, and `failure` says why.
static inline const JsonNode *json_require(const Json *json, const JsonNode *object, const char *key, JsonType type,
                                           Failure *failure) {
    char path[256];
    const JsonNode *node = json_member(json, object, key);
    if (node && node->type == type) return node;
    json_path(json, object, path, sizeof path);
    if (node) json_expected(json, node, json_type_name(type), failure);
    else fail(failure, "%s: %s%shas no \"%s\"", json->source, path, *path ? " " : "", key);
    return NULL;
}

static inline bool json_real(const Json *json, const JsonNode *node, double *out, Failure *failure) {
    if (node->type != JSON_NUMBER) return json_expected(json, node, "a number", failure);
    *out = strtod(node->text, NULL);
    return isfinite(*out) || json_expected(json, node, "a number that a double can hold", failure);
}

// Reads a whole number in low..high, both included. 8192.0 and 1e6 are whole too; numbers with a point or an exponent
// must be of a magnitude below 2^53; plain digits may go on to 2^63.
static inline bool json_int(const Json *json, const JsonNode *node, int64_t low, int64_t high, int64_t *out,
                            Failure *failure) {
    char what[96];
    snprintf(what, sizeof what, "a whole number in %lld..%lld", (long long)low, (long long)high);
    if (node->type != JSON_NUMBER) return json_expected(json, node, what, failure);
    if (node->text[strcspn(node->text, ".eE")] == 0) {
        errno = 0;
        long long value = strtoll(node->text, NULL, 10);
        if (errno || value < low || value > high) return json_expected(json, node, what, failure);
        *out = value;
        return true;
    }
    double real = strtod(node->text, NULL);
    const double inexact = 9007199254740992.0;  // 2^53: from here on, a double may be another whole number, rounded
    if (!(fabs(real) < inexact) || real != floor(real) || real < (double)low || real > (double)high)
        return json_expected(json, node, what, failure);
    *out = (int64_t)real;
    return true;
}

static inline bool json_bool(const Json *json, const JsonNode *node, bool *out, Failure *failure) {
    if (node->type != JSON_BOOL) return json_expected(json, node, "true or false", failure);
    *out = node->text[0] == 't';
    return true;
}

// ---- writing

// A text that grows as pieces are appended.
typedef struct {
    char *data;
    size_t size, capacity;
} JsonText;

static inline void json_text_reserve(JsonText *out, size_t more) {
    if (out->size + more + 1 <= out->capacity) return;
    out->capacity = 2 * (out->size + more + 1);
    out->data = (char *)xrealloc(out->data, out->capacity);
}

// Appends like printf.
UTILS_PRINTF(2, 3) static inline void json_text_add(JsonText *out, const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n < 0) die("json_text_add: cannot format \"%s\"", format);
    json_text_reserve(out, (size_t)n);
    vsnprintf(out->data + out->size, (size_t)n + 1, format, again);
    va_end(again);
    out->size += (size_t)n;
}

// Returns the separator before the next item of an array or object: "" before its first.
static inline const char *json_text_comma(const JsonText *out) {
    return strchr("[{", out->data[out->size - 1]) ? "" : ", ";
}

// Returns the number of bytes of the UTF-8 character at `s`; 0 if the bytes there are not UTF-8 (RFC 3629: no overlong
// form, no surrogate, at most U+10FFFF).
static inline int json_utf8_length(const char *s) {
    const unsigned char *c = (const unsigned char *)s;
    if (c[0] < 0x80) return 1;
    const int length = c[0] >= 0xf0 ? 4 : c[0] >= 0xe0 ? 3 : 2;
    const unsigned char low = c[0] == 0xe0   ? 0xa0
                              : c[0] == 0xf0 ? 0x90
                                             : 0x80,
                        high = c[0] == 0xed   ? 0x9f
                               : c[0] == 0xf4 ? 0x8f
                                              : 0xbf;
    if (c[0] < 0xc2 || c[0] > 0xf4 || c[1] < low || c[1] > high) return 0;
    for (int i = 2; i < length; i++)
        if ((c[i] & 0xc0) != 0x80) return 0;
    return length;
}

// Appends a string in quotes, escaped.
static inline void json_text_add_string(JsonText *out, const char *s) {
    json_text_add(out, "\"");
    for (int n; *s; s += max_i64(1, n)) {
        const unsigned char c = (unsigned char)*s;
        n = json_utf8_length(s);
        if (n == 0) json_text_add(out, "\\udc%02x", c);
        else if (c == '"' || c == '\\') json_text_add(out, "\\%c", c);
        else if (c < 0x20) json_text_add(out, "\\u%04x", c);
        else json_text_add(out, "%.*s", n, s);
    }
    json_text_add(out, "\"");
}

// Appends a number with the fewest digits that read back as this double. It has a point or an exponent, so that no
// reader takes it for an integer. Dies if it is not finite.
static inline void json_text_add_real(JsonText *out, double value) {
    if (!isfinite(value)) die("JSON cannot hold the number %f", value);
    char text[64];
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    json_text_add(out, "%s%s", text, text[strcspn(text, ".e")] ? "" : ".0");
}

static inline void json_text_free(JsonText *out) {
    free(out->data);
    memset(out, 0, sizeof *out);
}

// Sets the member `key` of an object, which *text holds, to `value`, which is JSON itself. Appends a member if there is
// none of that name. Every other byte stays as it is. Dies if *text holds no object.
static inline void json_text_set(JsonText *text, const char *key, const char *value) {
    Json json;
    Failure failure;
    JsonText out = {NULL, 0, 0};
    if (!json_parse(&json, "json_text_set", text->data, text->size, &failure)) die("%s", failure.text);
    const JsonNode *root = json_root(&json), *node = json_member(&json, root, key), *last = json_first(&json, root);
    if (root->type != JSON_OBJECT) die("json_text_set: the text is %s", json_type_name(root->type));
    while (last && last->next >= 0) last = json_next(&json, last);
    const size_t begin = node ? node->begin : last ? last->end : root->begin + 1, end = node ? node->end : begin;
    json_text_add(&out, "%.*s", (int)begin, text->data);
    if (!node) json_text_add(&out, "%s\n  \"%s\": ", last ? "," : "", key);
    json_text_add(&out, "%s%s%s", value, node || last ? "" : "\n", text->data + end);
    json_free(&json);
    json_text_free(text);
    *text = out;
}

#endif
