// Reports of --fp8-audit: lines in log.jsonl, and the table of operands at the end of a run.
#ifndef LLMC_AUDIT_REPORT_H
#define LLMC_AUDIT_REPORT_H

#include "../reference/audit.h"
#include "../ranks/comm.h"
#include "logger.h"

// Returns the number of a model's audit sums, which are an array [layer][LinearId][TensorRole][TensorUsage].
static inline int64_t audit_count(const Precision *p) { return p->num_layers * AUDIT_LAYER; }

// Merges each of n audit sums with those of all other ranks: adds counts and squares, and takes the largest amax and
// scales. All ranks call, and get equal results.
static inline void audit_reduce(const Comm *c, AuditSums *sums, int64_t n) {
    double *totals = (double *)xcalloc((size_t)n, 5 * sizeof(double)), *total = totals;
    uint32_t *maxima = (uint32_t *)xcalloc((size_t)n, 3 * sizeof(uint32_t)), *maximum = maxima;
    for (const AuditSums *s = sums; s < sums + n; s++, total += 5, maximum += 3) {
        total[0] = s->count, total[1] = s->flushed, total[2] = s->saturated, total[3] = s->signal, total[4] = s->noise;
        maximum[0] = s->amax, maximum[1] = s->scale_max, maximum[2] = s->scale_inv_max;
    }
    comm_sum(c, COMM_WORLD, totals, 5 * n);
    comm_max_u32(c, COMM_WORLD, maxima, 3 * n);
    total = totals, maximum = maxima;
    for (AuditSums *s = sums; s < sums + n; s++, total += 5, maximum += 3) {
        s->count = total[0], s->flushed = total[1], s->saturated = total[2], s->signal = total[3], s->noise = total[4];
        s->amax = maximum[0], s->scale_max = maximum[1], s->scale_inv_max = maximum[2];
    }
    free(totals);
    free(maxima);
}

// AUDIT_OPERANDS: a linear layer's three GEMMs have two operands each, rowwise or columnwise data of a tensor.
// AUDIT_WORST: the line "lowest SQNR" names at most so many operands.
enum { AUDIT_OPERANDS = 2 * NUM_GEMMS, AUDIT_WORST = 3 };

typedef struct {
    TensorRole tensor;
    TensorUsage copy;
    const char *gemm_name, *name;
} AuditOperand;

static inline AuditOperand audit_operand(int index) {
    static const char *const names[NUM_TENSORS] = {"w", "x", "dy"};
    const GemmKind gemm = (GemmKind)(index / 2);
    const int operand = 1 - index % 2;  // operand B (x or dy) comes first
    const TensorRole tensor = gemm_tensor(gemm, operand);
    return (AuditOperand){tensor, gemm_usage(gemm, operand), gemm_kind_name(gemm), names[tensor]};
}

static inline bool audit_shared(const Precision *p, TensorRole tensor) {
    return audit_shares_codes(recipe_granularity(p->recipe, tensor, ROWWISE),
                              recipe_granularity(p->recipe, tensor, COLUMNWISE));
}

// Returns the sums of one operand of linear layer `id` of layer l; count is 0 if the operand is bf16 or was in no
// audit. If rowwise and columnwise data have equal codes, returns the sums of both together.
static inline AuditSums audit_of(const AuditSums *sums, const Precision *p, int64_t l, int id, AuditOperand o) {
    AuditSums s = {};
    if (recipe_granularity(precision_of(p, l, id), o.tensor, o.copy) == NO_SCALE) return s;
    for (int copy = 0; copy < 2; copy++)
        if (copy == (int)o.copy || audit_shared(p, o.tensor))
            audit_merge(&s, &sums[audit_index(l, id, o.tensor, (TensorUsage)copy)]);
    return s;
}

// Writes the audit of one step to the log, if it is open: a line for each layer, linear layer and FP8 operand that was
// cast. A value that JSON cannot hold, such as an infinite sqnr_db, is null.
static inline void audit_log(Logger *logger, int64_t step, const AuditSums *sums, const Precision *p) {
    if (!logger->file) return;
    for (int64_t i = 0; i < p->num_layers * NUM_LINEARS * AUDIT_OPERANDS; i++) {
        const int64_t l = i / (NUM_LINEARS * AUDIT_OPERANDS);
        const int id = (int)(i / AUDIT_OPERANDS % NUM_LINEARS);
        const AuditOperand o = audit_operand((int)(i % AUDIT_OPERANDS));
        const AuditSums s = audit_of(sums, p, l, id, o);
        if (s.count == 0) continue;
        JsonText line = logger_begin("fp8_audit");
        logger_add_int(&line, "step", step);
        logger_add_int(&line, "layer", l);
        logger_add_text(&line, "linear", p->linear[id].name);
        logger_add_text(&line, "gemm", o.gemm_name);
        logger_add_text(&line, "operand", o.name);
        logger_add(&line, "amax", (double)float_from_bits(s.amax));
        logger_add(&line, "scale_min", (double)audit_scale_min(&s));
        logger_add(&line, "scale_max", (double)audit_scale_max(&s));
        logger_add(&line, "flushed", s.flushed / s.count);
        logger_add(&line, "saturated", s.saturated / s.count);
        logger_add(&line, "sqnr_db", audit_sqnr_db(&s));
        logger_write(logger, &line);
    }
}

// True if SQNR db is worse than `than`. NaN is the worst.
static inline bool audit_is_worse(double db, double than) { return isnan(db) ? !isnan(than) : db < than; }

// Prints one row of the table: an operand of a linear layer, over all layers that have audited casts of it. Prints
// nothing if there is no such layer.
static inline void audit_print_operand(const AuditSums *sums, const Precision *p, int id, AuditOperand o) {
    AuditSums all = {};
    int64_t worst_layer = -1;
    double worst = 0;
    for (int64_t l = 0; l < p->num_layers; l++) {
        const AuditSums s = audit_of(sums, p, l, id, o);
        if (s.count == 0) continue;
        const double db = audit_sqnr_db(&s);
        if (worst_layer < 0 || audit_is_worse(db, worst)) worst = db, worst_layer = l;
        audit_merge(&all, &s);
    }
    if (worst_layer < 0) return;
    printf("  %-9s %-6s %-3s %-4s %-8s %7.2f %8.2f %6lld %12.4f%% %10.4f%% %12.4g\n", p->linear[id].name, o.gemm_name,
           o.name, precision_format(p, o.tensor) == FP8_E4M3 ? "e4m3" : "e5m2",
           granularity_traits(recipe_granularity(p->recipe, o.tensor, o.copy))->name, audit_sqnr_db(&all), worst,
           (long long)worst_layer, 100 * all.flushed / all.count, 100 * all.saturated / all.count,
           (double)float_from_bits(all.amax));
}

typedef struct {
    double db;
    int64_t layer;
    int id;
    AuditOperand operand;
} AuditPlace;

// Finds the operands with the lowest SQNR, worst first; ties in the order of layers, linear layers and operands.
// Returns how many it found, at most AUDIT_WORST. Rowwise and columnwise data with equal codes count once.
static inline int audit_find_worst(AuditPlace worst[AUDIT_WORST], const AuditSums *sums, const Precision *p) {
    int found = 0;
    for (int64_t i = 0; i < p->num_layers * NUM_LINEARS * AUDIT_OPERANDS; i++) {
        AuditPlace place = {0, i / (NUM_LINEARS * AUDIT_OPERANDS), (int)(i / AUDIT_OPERANDS % NUM_LINEARS),
                            audit_operand((int)(i % AUDIT_OPERANDS))};
        const AuditSums s = audit_of(sums, p, place.layer, place.id, place.operand);
        if (s.count == 0 || (place.operand.copy == COLUMNWISE && audit_shared(p, place.operand.tensor))) continue;
        place.db = audit_sqnr_db(&s);
        int at = found;
        for (; at > 0 && audit_is_worse(place.db, worst[at - 1].db); at--)
            if (at < AUDIT_WORST) worst[at] = worst[at - 1];
        if (at < AUDIT_WORST) worst[at] = place;
        if (found < AUDIT_WORST) found++;
    }
    return found;
}

// Prints the table at the end of a run, from `sums` over all ranks and over the audits since this program started.
static inline void audit_print_table(const AuditSums *sums, const Precision *p) {
    AuditPlace worst[AUDIT_WORST];
    const int found = audit_find_worst(worst, sums, p);
    if (!found) {
        printf("\nFP8 audit: no FP8 operand was cast in an audited step\n");
        return;
    }
    printf("\nFP8 audit: %s; SQNR is signal to quantization noise in dB, over all layers and in the worst one; "
           "percentages are shares of all values\n",
           p->recipe->name);
    printf("  %-9s %-6s %-17s %7s %8s %6s %13s %11s %12s\n", "linear", "pass", "operand", "SQNR", "worst", "layer",
           "flushed to 0", "saturated", "amax");
    for (int i = 0; i < NUM_LINEARS * AUDIT_OPERANDS; i++)
        audit_print_operand(sums, p, i / AUDIT_OPERANDS, audit_operand(i % AUDIT_OPERANDS));
    printf("  lowest SQNR:");
    for (int i = 0; i < found; i++) {
        const AuditOperand o = worst[i].operand;
        printf("%s layer %lld %s %s (%s, %.2f dB)", i ? "," : "", (long long)worst[i].layer,
               p->linear[worst[i].id].name, o.name, audit_shared(p, o.tensor) ? "both passes" : o.gemm_name,
               worst[i].db);
    }
    printf("\n");
    fflush(stdout);
}

#endif
