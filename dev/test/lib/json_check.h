// Reads fields of a line of log.jsonl, for tests.
#ifndef DEV_TEST_JSON_CHECK_H
#define DEV_TEST_JSON_CHECK_H

#include <math.h>

#include "../../../llmc/base/json.h"

// Returns the number `key` of the root object, or NaN if it has no number of that name.
static inline double member(const Json *json, const char *key) {
    Failure failure;
    double value = (double)NAN;
    const JsonNode *node = json_member(json, json_root(json), key);
    if (node && node->type == JSON_NUMBER) json_real(json, node, &value, &failure);
    return value;
}

#endif
