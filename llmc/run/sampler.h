// Text that the model writes: picks the next token from its logits, and prints samples and what --generate asks for.
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <math.h>

#include "../config/model_config.h"
#include "../base/rng.h"
#include "stop.h"
#include "../data/tokenizer.h"

#define SAMPLE_TEMPERATURE 0.8f

// Draws a token with probability softmax(logits / SAMPLE_TEMPERATURE) from the first `count` of `logits` (fp32). The
// random number depends on seed, step and position alone.
static inline int32_t sampler_choose(const float *logits, int64_t count, uint64_t seed, int64_t step,
                                     int64_t position) {
    const uint64_t sample_stream = 0x73616d706c65ull;  // "sample": its own random stream
    float largest = -INFINITY;
    for (int64_t v = 0; v < count; v++) largest = logits[v] > largest ? logits[v] : largest;
    double sum = 0, below = 0;
    for (int64_t v = 0; v < count; v++) sum += expf((logits[v] - largest) / SAMPLE_TEMPERATURE);
    const double target = sum * rng_uniform(rng_key(rng_key(seed, sample_stream), (uint64_t)step), (uint64_t)position);
    for (int64_t v = 0; v < count; v++) {
        below += expf((logits[v] - largest) / SAMPLE_TEMPERATURE);
        if (below > target) return (int32_t)v;
    }
    return (int32_t)(count - 1);
}

// Returns a trainer's logits [V], fp32, for the token after tokens[0 ... length), 1 <= length <= --sequence-length.
// They are valid until the trainer computes anything else. All ranks call.
typedef const float *(*NextLogits)(void *context, const int32_t *tokens, int64_t length);

// Prints up to --max-tokens tokens that the model writes after tokens [n], until the next separator or a request to
// stop, and a newline. `tokens` has room for them. There is no key/value cache: each token takes a forward pass over
// the tokens before it, at most --sequence-length of them. All ranks call, since each may hold a part of the weights.
// Rank 0's choice of the token counts: logits of other ranks may differ by rounding.
static inline void sampler_continue(const Options *o, const Comm *c, const ModelConfig *m, const Tokenizer *tokenizer,
                                    int64_t separator, int64_t step, int32_t *tokens, int64_t n, NextLogits next,
                                    void *context) {
    const int64_t choices = tokenizer->count ? min_i64(tokenizer->count, m->vocab_size) : m->vocab_size;
    TextPlace at = {0, 0};
    for (const int64_t end = n + o->max_tokens; n < end && !stop_requested(c); n++) {
        const int64_t length = min_i64(n, o->sequence_length);
        tokens[n] = sampler_choose(next(context, tokens + n - length, length), choices, (uint64_t)o->seed, step, n);
        comm_broadcast(c, COMM_WORLD, 0, &tokens[n], sizeof tokens[n]);
        if (tokens[n] == separator) break;
        tokenizer_print(tokenizer, tokens[n], &at, stdout);
    }
    activity_begin(ACTIVITY_FILE, "write", "stdout");
    printf("\n");
    fflush(stdout);
    activity_end();
}

// Prints a sample of what the model writes after a separator (separator.h). If that is not known, the text
// begins after token 0, and no token ends it. All ranks call.
static inline void sampler_print(const Options *o, const Comm *c, const ModelConfig *m, const Tokenizer *tokenizer,
                                 int64_t separator, int64_t step, NextLogits next, void *context) {
    int32_t *tokens = (int32_t *)xcalloc((size_t)o->max_tokens + 1, sizeof *tokens);
    tokens[0] = (int32_t)max_i64(0, separator);
    activity_phase(PHASE_SAMPLING, step);
    printf("sample after step %lld: ", (long long)step);
    sampler_continue(o, c, m, tokenizer, separator, step, tokens, 1, next, context);
    free(tokens);
}

// --generate: prints a text, given as tokens [n] after a separator, and what the model writes after it. All ranks call.
static inline void sampler_generate(const Options *o, const Comm *c, const ModelConfig *m, const Tokenizer *tokenizer,
                                    const int32_t *prompt, int64_t n, NextLogits next, void *context) {
    int32_t *tokens = (int32_t *)xcalloc((size_t)(n + o->max_tokens), sizeof *tokens);
    memcpy(tokens, prompt, (size_t)n * sizeof *tokens);
    printf("%s", o->generate);
    activity_phase(PHASE_SAMPLING, 0);
    sampler_continue(o, c, m, tokenizer, prompt[0], 0, tokens, n, next, context);
    free(tokens);
}

#endif
