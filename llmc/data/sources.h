// Opens the sources of --mix as one loader.
#ifndef LLMC_SOURCES_H
#define LLMC_SOURCES_H

#include "dataloader.h"

// Places the samples of a block by a permutation from the seed.
static inline void sources_arrange(Mix *mix, uint64_t seed) {
    const uint64_t mix_stream = 0x6d6978ull;  // "mix": apart from other streams
    int16_t seen[MIX_MOST] = {0};
    for (int64_t i = 0; i < MIX_BLOCK; i++) {
        int64_t at = dataloader_permute(i, MIX_BLOCK, rng_key(seed, mix_stream));
        uint8_t place = 0;
        for (; at >= mix->sources[place].count; place++) at -= mix->sources[place].count;
        mix->places[i] = place, mix->numbers[i] = seen[place]++;
    }
}

// Opens the sources that `text` names, each as dataloader_open opens shards. Dies if it cannot be read (mix_read), or
// if a source has no whole sequence.
static inline DataLoader sources_open(const char *text, int64_t T, bool shuffle, uint64_t seed) {
    DataLoader dl = dataloader_begin(T, shuffle, seed);
    char name[OPTION_TEXT_CAPACITY];
    dl.mix = mix_read(text);
    for (int i = 0; i < dl.mix.num; i++) {
        MixSource *s = &dl.mix.sources[i];
        const int64_t shards = dl.num_shards;
        format_checked(name, sizeof name, "%.*s", s->length, s->name);
        s->first_sequence = dl.num_sequences;
        dataloader_append(&dl, name);
        s->num_shards = dl.num_shards - shards, s->num_sequences = dl.num_sequences - s->first_sequence;
        if (!s->num_shards)
            die("--mix: no shard of %s has the %lld tokens that one sequence needs (its inputs and one more target); "
                "use a shorter --sequence-length or more text",
                name, (long long)T + 1);
    }
    sources_arrange(&dl.mix, seed);
    return dl;
}

// Returns the number of the first source without token `id`; -1: each has it. Without --mix all shards are one source.
static inline int sources_lacking(DataLoader *dl, int64_t id) {
    for (int i = 0; i < dl->mix.num; i++) {
        const MixSource *s = &dl->mix.sources[i];
        DataLoader one = *dl;
        one.shards = dataloader_find_shard(dl, s->first_sequence), one.num_shards = s->num_shards;
        if (!dataloader_holds(&one, id)) return i;
    }
    return dataloader_holds(dl, id) ? -1 : 0;
}

#endif
