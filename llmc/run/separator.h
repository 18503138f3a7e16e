// The token that begins each document (--document-mask, samples): which it is, and whether the data has it.
#ifndef LLMC_SEPARATOR_H
#define LLMC_SEPARATOR_H

#include "../config/model_config.h"
#include "../config/options.h"
#include "../data/sources.h"
#include "../data/tokenizer.h"
#include "../ranks/comm.h"

// The token before each document: that of --document-mask ID, else the tokenizer table's or, without a table, the
// model's BOS token; -1: not known.
static inline int64_t separator_of(const Options *o, const Tokenizer *tokenizer, const ModelConfig *m) {
    if (isdigit((unsigned char)*o->document_mask)) return strtoll(o->document_mask, NULL, 10);
    return tokenizer->count ? tokenizer->separator : m->bos_token_id;
}

// With --document-mask: dies if it is not known how a document begins in `data`, if that differs from rank 0's, or if
// no document begins so. All ranks call.
static inline void separator_require(const Options *o, const Comm *c, DataLoader *data, const Tokenizer *tokenizer,
                                     const ModelConfig *m) {
    const int64_t separator = data->separator;
    int64_t first = separator;
    char table[PATH_CAPACITY];
    tokenizer_path(table, sizeof table, data->shards[0].path);
    comm_broadcast(c, COMM_WORLD, 0, &first, sizeof first);
    if (separator != first)
        die("--document-mask on: here documents begin with token %lld (tokenizer table %s), on rank 0 with %lld; give "
            "all hosts the same files",
            (long long)separator, table, (long long)first);
    if (separator < 0)
        die_with(EXIT_USAGE,
                 "--document-mask on: it is not known which token begins a document: there is no tokenizer table %s, "
                 "and model %s has no BOS token; give the token's id: --document-mask ID",
                 table, m->name);
    const char *option = *o->evaluate ? "evaluate" : *o->mix ? "mix: " : "train-data";
    const int lacking = c->local_rank == 0 ? sources_lacking(data, separator) : -1;
    const MixSource *source = &data->mix.sources[max_i64(0, lacking)];
    if (lacking >= 0)
        die_with(
            EXIT_USAGE,
            "--document-mask %s: --%s%.*s has no token %lld, %s; give the id of the token that begins each document: "
            "--document-mask ID",
            o->document_mask, option, source->length, source->length ? source->name : "", (long long)separator,
            isdigit((unsigned char)*o->document_mask) ? "the id that it names"
            : tokenizer->count                        ? "the separator of its tokenizer table"
                                                      : "the model's BOS token");
}

// Tells the loaders how a document begins. With --document-mask dies as separator_require does. All ranks call.
static inline void separator_find(const Options *o, const Comm *c, DataLoader *train, DataLoader *val,
                                  const Tokenizer *tokenizer, const ModelConfig *m) {
    train->separator = val->separator = separator_of(o, tokenizer, m);
    if (options_masks_documents(o)) separator_require(o, c, *o->evaluate ? val : train, tokenizer, m);
}

#endif
