// --mix: the sources of the training data, and which sample of a run comes from which.
//
// A block of MIX_BLOCK samples holds a fixed number of each source: its share, by the largest remainder. All blocks
// have one order, so the source of a sample and its number within the source follow from the sample's number alone.
#ifndef LLMC_MIX_H
#define LLMC_MIX_H

#include "options.h"

enum { MIX_BLOCK = 1000, MIX_MOST = 64 };

typedef struct {
    const char *name;  // a path or pattern: `length` bytes of the option's text
    int length;
    double weight;
    int64_t count;                                      // samples in a block
    int64_t num_shards, first_sequence, num_sequences;  // in the loader: sources_open sets these
} MixSource;

// Sample i of a block is number numbers[i] among the block's samples of source places[i]; sources_open sets both.
typedef struct {
    int num;  // 0: no mix
    MixSource sources[MIX_MOST];
    uint8_t places[MIX_BLOCK];
    int16_t numbers[MIX_BLOCK];
} Mix;

// Sets the samples of each source in a block by weights that add up to `sum`. Dies if a source gets none.
static inline void mix_count(Mix *mix, double sum) {
    double rest[MIX_MOST];
    int64_t left = MIX_BLOCK;
    for (int i = 0; i < mix->num; i++) {
        rest[i] = mix->sources[i].weight / sum * MIX_BLOCK;
        left -= mix->sources[i].count = (int64_t)rest[i];
        rest[i] -= (double)mix->sources[i].count;
    }
    for (int largest = 0; left > 0; left--, largest = 0) {
        for (int i = 1; i < mix->num; i++) largest = rest[i] > rest[largest] ? i : largest;
        mix->sources[largest].count++, rest[largest] = -1;
    }
    for (const MixSource *s = mix->sources; s < mix->sources + mix->num; s++)
        if (!s->count)
            die_with(EXIT_USAGE, "--mix: with weight %g of %g %.*s has none of %d sequences; give a larger weight",
                     s->weight, sum, s->length, s->name, MIX_BLOCK);
}

// Reads the text of --mix. Dies if it does not name at least two sources, each with a weight.
static inline Mix mix_read(const char *text) {
    char part[OPTION_TEXT_CAPACITY];
    double sum = 0;
    Mix mix = {};
    for (const char *at = text, *end; at; at = *end ? end + 1 : NULL) {
        at += strspn(at, " ");
        end = at + strcspn(at, ",");
        format_checked(part, sizeof part, "%.*s", (int)(end - at), at);
        char *weight = strrchr(part, '=');
        if (!weight || weight == part) die_with(EXIT_USAGE, "--mix: \"%s\" is not of the form PATH=WEIGHT", part);
        if (mix.num == MIX_MOST) die_with(EXIT_USAGE, "--mix names more than %d sources", MIX_MOST);
        MixSource *s = &mix.sources[mix.num++];
        s->name = at, s->length = (int)(weight - part);
        s->weight = option_number("mix", weight + 1, false, 1e-6, OPTION_MAX);
        sum += s->weight;
    }
    if (mix.num < 2) die_with(EXIT_USAGE, "--mix names one source; name a second one, or use --train-data");
    mix_count(&mix, sum);
    return mix;
}

// Returns the source of sample *sample of a run. *sample becomes its number among the source's samples.
static inline const MixSource *mix_place(const Mix *mix, int64_t *sample) {
    const int64_t i = *sample % MIX_BLOCK;
    const MixSource *source = &mix->sources[mix->places[i]];
    *sample = *sample / MIX_BLOCK * source->count + mix->numbers[i];
    return source;
}

#endif
