// Parses JSON, writes it and parses it again: both results must be equal, also if strings hold bytes that
// are not UTF-8.
#include "fuzz.h"

static void json_write(const Json *json, const JsonNode *node, JsonText *out) {
    const bool array = node->type == JSON_ARRAY;
    if (node->type == JSON_STRING) json_text_add_string(out, node->text);
    else if (node->type == JSON_NULL) json_text_add(out, "null");
    else if (node->text[0]) json_text_add(out, "%s", node->text);
    if (!array && node->type != JSON_OBJECT) return;
    json_text_add(out, array ? "[" : "{");
    for (const JsonNode *child = json_first(json, node); child; child = json_next(json, child)) {
        if (child != json_first(json, node)) json_text_add(out, ",");
        if (!array) json_text_add_string(out, child->key), json_text_add(out, ":");
        json_write(json, child, out);
    }
    json_text_add(out, array ? "]" : "}");
}

// Reads a value as a whole number, a bool and a real number. A real number that json_text_add_real writes must read
// back equal.
static void json_read(const Json *json, const JsonNode *node) {
    Failure failure;
    char path[64];
    int64_t whole;
    double real;
    bool flag;
    json_path(json, node, path, sizeof path);
    if (json_int(json, node, -5, 1 << 20, &whole, &failure)) FUZZ_CHECK(whole >= -5 && whole <= 1 << 20);
    json_int(json, node, INT64_MIN, INT64_MAX, &whole, &failure);
    json_bool(json, node, &flag, &failure);
    if (json_real(json, node, &real, &failure)) {
        JsonText text = {NULL, 0, 0};
        json_text_add_real(&text, real);
        FUZZ_CHECK(strtod(text.data, NULL) == real);
        json_text_free(&text);
    }
    if (node->key) FUZZ_CHECK(json_member(json, &json->nodes[node->parent], node->key) == node);
}

static void json_run(const uint8_t *data, size_t size) {
    Json json, again;
    Failure failure;
    if (!json_parse(&json, "input", (const char *)data, size, &failure)) return;
    JsonText text = {NULL, 0, 0};
    json_write(&json, json_root(&json), &text);
    FUZZ_CHECK(json_parse(&again, "output", text.data, text.size, &failure));
    for (int64_t i = 0; i < json.count; i++) json_read(&json, &json.nodes[i]);
    for (int64_t i = 0; i < json.count; i++) {
        const JsonNode *a = &json.nodes[i], *b = &again.nodes[i];
        FUZZ_CHECK(json.count == again.count && a->type == b->type && a->count == b->count);
        FUZZ_CHECK(a->parent == b->parent && a->next == b->next && a->first == b->first);
        FUZZ_CHECK(strcmp(a->text, b->text) == 0 && !a->key == !b->key && (!a->key || strcmp(a->key, b->key) == 0));
    }
    json_free(&again);
    json_free(&json);
    json_text_free(&text);
}

static size_t json_seed(int i, uint8_t *out) {
    static const char *const seeds[] = {
        "{'a': [1, -2.5e-3, true, false, null, 'x\\n\\u00e4\\ud83d\\ude00'], 'b': {'c': {}}, 'd': []}",
        ("[9223372036854775807, -9223372036854775808, 1e308, 4.9e-324, 0.1, 12345678901234567890123, -0.0, 1E+2,"
         " 0.30000000000000004, 1.7976931348623157e308]"),
        "{'__metadata__':{'format':'pt'},'w':{'dtype':'F32','shape':[2,3],'data_offsets':[0,24]}}",
        ("[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["
         "]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]"),
        "'\\'\\\\\\/\\b\\f\\n\\r\\t\\u001f'",
        "  {'k\\u0041':1 , 'kA' : 2}\n"};
    return i < (int)(sizeof seeds / sizeof seeds[0]) ? fuzz_text(out, seeds[i]) : 0;
}

FUZZ_TARGET(json)
