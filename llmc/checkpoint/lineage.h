// The lineage of a run that branched (--branch): the stretches before this one, and how each of them was trained.
#ifndef LLMC_LINEAGE_H
#define LLMC_LINEAGE_H

#include "../base/json.h"

typedef struct {
    int64_t step;  // its last step
    int64_t rounding_seed;
    char precision[32], recipe[32];  // recipe "": trained without FP8
} Stretch;

typedef struct {
    Stretch *stretches;  // oldest first
    int64_t count;
} Lineage;

static inline void lineage_add(Lineage *l, const Stretch *s) {
    l->stretches = (Stretch *)xrealloc(l->stretches, (size_t)(l->count + 1) * sizeof *l->stretches);
    l->stretches[l->count++] = *s;
}

// Adds the stretches as a JSON array.
static inline void lineage_json(JsonText *out, const Lineage *l) {
    json_text_add(out, "[");
    for (int64_t i = 0; i < l->count; i++) {
        const Stretch *s = &l->stretches[i];
        json_text_add(out, "%s{\"step\": %lld, \"precision\": ", i ? ", " : "", (long long)s->step);
        json_text_add_string(out, s->precision);
        json_text_add(out, ", \"fp8_recipe\": ");
        if (*s->recipe) json_text_add_string(out, s->recipe);
        else json_text_add(out, "null");
        json_text_add(out, ", \"rounding_seed\": %lld}", (long long)s->rounding_seed);
    }
    json_text_add(out, "]");
}

// Adds what lineage_json has written as "branches" of the root; nothing if there is no such member.
static inline bool lineage_read(const Json *json, Lineage *out, Failure *failure) {
    const JsonNode *list = json_member(json, json_root(json), "branches");
    if (!list) return true;
    if (list->type != JSON_ARRAY) return json_expected(json, list, json_type_name(JSON_ARRAY), failure);
    for (const JsonNode *node = json_first(json, list); node; node = json_next(json, node)) {
        Stretch s = {};
        const JsonNode *step = json_require(json, node, "step", JSON_NUMBER, failure),
                       *seed = step ? json_require(json, node, "rounding_seed", JSON_NUMBER, failure) : NULL,
                       *precision = seed ? json_require(json, node, "precision", JSON_STRING, failure) : NULL,
                       *recipe = json_member(json, node, "fp8_recipe");
        if (!precision || !json_int(json, step, 0, INT64_MAX, &s.step, failure) ||
            !json_int(json, seed, 0, INT64_MAX, &s.rounding_seed, failure))
            return false;
        snprintf(s.precision, sizeof s.precision, "%s", precision->text);
        if (recipe && recipe->type == JSON_STRING) snprintf(s.recipe, sizeof s.recipe, "%s", recipe->text);
        lineage_add(out, &s);
    }
    return true;
}

// Prints one line, if the run or one before it branched.
static inline void lineage_print(const Lineage *l) {
    for (int64_t i = 0; i < l->count; i++) {
        const Stretch *s = &l->stretches[i];
        printf("%s%s%s%s to step %lld (rounding seed %lld)", i ? ", " : "lineage: ", s->precision,
               *s->recipe ? " " : "", s->recipe, (long long)s->step, (long long)s->rounding_seed);
    }
    if (l->count) printf(", then this run\n");
}

#endif
