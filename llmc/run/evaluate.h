// --evaluate: sums a model's losses over documents, and prints the mean with its interval, perplexity, bits per byte.
#ifndef LLMC_EVALUATE_H
#define LLMC_EVALUATE_H

#include <math.h>

#include "../data/dataloader.h"
#include "../data/tokenizer.h"
#include "stop.h"

// Runs the forward pass on this rank's part of batch number `batch`. Returns the loss of each token [B][T].
typedef const float *(*TokenLosses)(void *trainer, DataLoader *data, int64_t batch);

// Fewer units than this give no interval.
#define EVALUATION_LEAST_UNITS 5

// A unit is a document, or a sequence if documents are not known. The tokens of one unit depend on each other, so units
// are what the interval counts. A token's loss is in nats.
typedef struct {
    const Tokenizer *tokenizer;
    bool documents;                                // units are documents: they may go on in the next sequence
    double unit_loss, unit_tokens;                 // the current unit's
    double units, loss, tokens, bytes;             // sums over ended units; bytes: those of all predicted tokens
    double loss_squares, products, token_squares;  // sums over ended units of loss^2, loss x tokens, tokens^2
} Evaluation;

static inline void evaluation_end_unit(Evaluation *e) {
    const double l = e->unit_loss, n = e->unit_tokens;
    if (n == 0) return;
    e->units++, e->loss += l, e->tokens += n;
    e->loss_squares += l * l, e->products += l * n, e->token_squares += n * n;
    e->unit_loss = e->unit_tokens = 0;
}

// Adds one sequence of T tokens: the loss of predicting each target. A separator among the inputs begins a document;
// as a target it belongs to the document that it ends, and has no bytes. A negative target does not count.
static inline void evaluation_add(Evaluation *e, const int32_t *inputs, const int32_t *targets, const float *losses,
                                  int64_t T) {
    for (int64_t i = 0; i < T; i++) {
        size_t bytes = 0;
        if (e->documents && inputs[i] == e->tokenizer->separator) evaluation_end_unit(e);
        if (targets[i] != e->tokenizer->separator) tokenizer_decode(e->tokenizer, targets[i], &bytes);
        e->unit_loss += (double)losses[i], e->unit_tokens += targets[i] >= 0, e->bytes += (double)bytes;
    }
    if (!e->documents) evaluation_end_unit(e);
}

// The standard error of loss / tokens over units, by the linearized ratio; NAN for too few units.
static inline double evaluation_error(const Evaluation *e) {
    const double mean = e->loss / e->tokens,
                 squares = e->loss_squares - 2 * mean * e->products + mean * mean * e->token_squares;
    return e->units < EVALUATION_LEAST_UNITS ? (double)NAN
                                             : sqrt(fmax(0, squares) * e->units / (e->units - 1)) / e->tokens;
}

// Student's t at 97.5%, by the first terms of its series in 1 / df: from df 4 on within 0.3%.
static inline double evaluation_t(double df) { return 1.959964 + (2.372271 + (2.822486 + 2.556 / df) / df) / df; }

static inline void evaluation_print(Evaluation *e, const char *data) {
    evaluation_end_unit(e);
    const double loss = e->loss / e->tokens, reach = evaluation_t(e->units - 1) * evaluation_error(e),
                 byte = e->loss / log(2) / e->bytes;
    const char *unit = e->documents ? "documents" : "sequences";
    printf("evaluation of %s: %.0f tokens in %.0f %s\n", data, e->tokens, e->units, unit);
    printf("loss %.6f nats per token | perplexity %.4f", loss, exp(loss));
    if (e->bytes > 0) printf(" | %.4f bits per byte", byte);
    if (isfinite(reach))
        printf("\n95%% interval over %s: loss %.6f to %.6f, perplexity %.4f to %.4f", unit, loss - reach, loss + reach,
               exp(loss - reach), exp(loss + reach));
    if (e->bytes > 0 && isfinite(reach))
        printf(", bits per byte %.4f to %.4f", byte * (1 - reach / loss), byte * (1 + reach / loss));
    printf("\n");
    fflush(stdout);
}

// Computes and prints the loss of data->spread sequences. Documents are known if a tokenizer table names the separator,
// and if no sequence between two others is left out. A stop signal ends it early. All ranks call.
static inline void evaluation_run(const Options *o, const Comm *c, DataLoader *data, const Tokenizer *tokenizer,
                                  TokenLosses token_losses, void *trainer) {
    const int64_t T = o->sequence_length, rows = c->world * o->batch_size;
    Evaluation e = {tokenizer, tokenizer->count && data->spread == data->num_sequences, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    float *losses = (float *)xcalloc((size_t)(rows * T), sizeof *losses);
    int32_t *tokens = (int32_t *)xcalloc((size_t)(2 * T), sizeof *tokens);
    activity_phase(PHASE_VALIDATION, 0);
    for (int64_t first = 0; first < data->spread && !stop_requested(c); first += rows) {
        const float *mine = token_losses(trainer, data, first / rows);
        comm_all_gather(c, COMM_WORLD, mine, losses, o->batch_size * T * (int64_t)sizeof *losses);
        for (int64_t row = 0; row < dataloader_rows_before(first, rows, data->spread); row++) {
            dataloader_batch(data, first + row, 1, tokens, tokens + T);
            evaluation_add(&e, tokens, tokens + T, losses + row * T, T);
        }
    }
    evaluation_print(&e, o->evaluate);
    free(losses);
    free(tokens);
}

#endif
