// --evaluate: sums a model's losses over documents; prints and logs the mean, its interval, perplexity, bits per byte.
#ifndef LLMC_EVALUATE_H
#define LLMC_EVALUATE_H

#include <math.h>

#include "../data/dataloader.h"
#include "../data/tokenizer.h"
#include "logger.h"
#include "stop.h"

// Runs the forward pass on this rank's part of batch number `batch`. Returns the loss of each token [B][T].
typedef const float *(*TokenLosses)(void *trainer, DataLoader *data, int64_t batch);

// Fewer units than this give no interval.
#define EVALUATION_LEAST_UNITS 5
#define EVALUATION_PROGRESS_SECONDS 10

// A unit is a document, or a sequence if documents are not known. The tokens of one unit depend on each other, so units
// are what the interval counts. A token's loss is in nats.
typedef struct {
    const Tokenizer *tokenizer;
    bool documents;                                // units are documents: they may go on in the next sequence
    double unit_loss, unit_tokens;                 // the current unit's
    double units, loss, tokens, bytes;             // sums over ended units; bytes: those of all predicted tokens
    double loss_squares, products, token_squares;  // sums over ended units of loss^2, loss x tokens, tokens^2
    double began, shown;                           // seconds_now of the begin and of the latest line of progress
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

// Prints and logs the result of `sequences` of all sequences of `data`.
static inline void evaluation_report(Evaluation *e, Logger *l, const char *data, int64_t sequences, int64_t all) {
    evaluation_end_unit(e);
    const double loss = e->loss / e->tokens, reach = evaluation_t(e->units - 1) * evaluation_error(e),
                 byte = e->bytes > 0 ? e->loss / log(2) / e->bytes : (double)NAN;
    const char *unit = e->documents ? "documents" : "sequences";
    printf("evaluation of %s: %.0f tokens in %.0f %s\n", data, e->tokens, e->units, unit);
    printf("loss %.6f nats per token | perplexity %.4f", loss, exp(loss));
    if (isfinite(byte)) printf(" | %.4f bits per byte", byte);
    if (isfinite(reach))
        printf("\n95%% interval over %s: loss %.6f to %.6f, perplexity %.4f to %.4f", unit, loss - reach, loss + reach,
               exp(loss - reach), exp(loss + reach));
    if (isfinite(byte) && isfinite(reach))
        printf(", bits per byte %.4f to %.4f", byte * (1 - reach / loss), byte * (1 + reach / loss));
    printf("\n");
    fflush(stdout);
    JsonText line = logger_begin("evaluation");
    logger_add_text(&line, "data", data);
    logger_add_int(&line, "sequences", sequences);
    logger_add_int(&line, "all_sequences", all);
    logger_add_int(&line, "tokens", (int64_t)e->tokens);
    logger_add_text(&line, "unit", unit);
    logger_add_int(&line, "units", (int64_t)e->units);
    logger_add(&line, "loss", loss);
    logger_add(&line, "loss_low", loss - reach);
    logger_add(&line, "loss_high", loss + reach);
    logger_add(&line, "perplexity", exp(loss));
    logger_add(&line, "bits_per_byte", byte);
    logger_add(&line, "seconds", seconds_now() - e->began);
    logger_write(l, &line);
}

// Every few seconds prints how far the evaluation is.
static inline void evaluation_progress(Evaluation *e, Logger *l, int64_t done, int64_t sequences) {
    char left[64];
    const double now = seconds_now(), tokens = e->tokens + e->unit_tokens;
    if (done >= sequences || now - e->shown < EVALUATION_PROGRESS_SECONDS) return;
    e->shown = now;
    logger_format_left((now - e->began) / (double)done * (double)(sequences - done), left, sizeof left);
    format_checked(l->unprinted, sizeof l->unprinted, "evaluated %lld of %lld sequences, %.0f tokens | loss %.6f%s\n",
                   (long long)done, (long long)sequences, tokens, (e->loss + e->unit_loss) / tokens, left);
    logger_print_line(l);
}

// Computes and reports the loss of data->spread sequences. Documents are known if a tokenizer table names the
// separator, and if no sequence between two others is left out. A stop signal ends it early. All ranks call.
static inline void evaluation_run(const Options *o, const Comm *c, DataLoader *data, const Tokenizer *tokenizer,
                                  TokenLosses token_losses, void *trainer, Logger *l) {
    const int64_t T = o->sequence_length, rows = c->world * o->batch_size;
    int64_t done = 0;
    int stop = 0;
    Evaluation e = {};
    e.tokenizer = tokenizer, e.documents = tokenizer->count && data->spread == data->num_sequences;
    float *losses = (float *)xcalloc((size_t)(rows * T), sizeof *losses);
    int32_t *tokens = (int32_t *)xcalloc((size_t)(2 * T), sizeof *tokens);
    activity_phase(PHASE_VALIDATION, 0);
    e.began = e.shown = seconds_now();
    while (done < data->spread) {
        stop = stop_requested(c);
        if (stop) break;
        const float *mine = token_losses(trainer, data, done / rows);
        comm_all_gather(c, COMM_WORLD, mine, losses, o->batch_size * T * (int64_t)sizeof *losses);
        const int64_t end = done + dataloader_rows_before(done, rows, data->spread);
        for (int64_t row = 0; done < end; done++, row++) {
            dataloader_batch(data, done, 1, tokens, tokens + T);
            evaluation_add(&e, tokens, tokens + T, losses + row * T, T);
        }
        evaluation_progress(&e, l, done, data->spread);
    }
    if (stop)
        printf("stopped by signal %d after %lld of %lld sequences; the result is theirs\n", stop, (long long)done,
               (long long)data->spread);
    if (done) evaluation_report(&e, l, o->evaluate, done, data->spread);
    free(losses);
    free(tokens);
}

#endif
