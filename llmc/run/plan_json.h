// --dry-run --json: the plan of a run as one JSON object, for programs. docs/TRAINING.md says what it holds.
#ifndef LLMC_PLAN_JSON_H
#define LLMC_PLAN_JSON_H

#include "../base/arena.h"
#include "run_setup.h"
#include "traffic_report.h"

typedef struct {
    const char *program;  // "train_fp8", "train_fp8cu"
    const RunSetup *setup;
    const Options *options;  // after options_resolve
    const Comm *comm;
    const ParameterTable *table;
    const Precision *precision;
    const Arena *arena;       // counts the bytes of a rank
    int64_t other_bytes;      // bytes of a rank outside the arena
    int64_t rows, head_rows;  // rows of activations in the linear layers' and lm_head's GEMMs
    int64_t shard_elements;   // parameters that a rank keeps, padding included
} PlanFacts;

// Adds the bytes of a rank, by the headings of the memory plan.
static inline void plan_json_memory(JsonText *out, const PlanFacts *f) {
    const Arena *a = f->arena;
    json_text_add(out, ", \"memory\": {\"groups\": [");
    for (int i = 0; i < a->num_groups; i++) {
        if (!a->groups[i].bytes) continue;
        json_text_add(out, "%s{\"name\": ", json_text_comma(out));
        json_text_add_string(out, a->groups[i].name);
        logger_add_int(out, "bytes", a->groups[i].bytes);
        json_text_add(out, "}");
    }
    json_text_add(out, "]");
    logger_add_int(out, "reused_bytes", a->reused);
    logger_add_int(out, "other_bytes", f->other_bytes);
    logger_add_int(out, "total_bytes", a->used + f->other_bytes);
    json_text_add(out, "}");
}

// Adds the dtype of operand i of a GEMM and, if it is FP8, its scale granularity (Recipe.granularity). The key is the
// tensor's role.
static inline void plan_json_operand(JsonText *out, const PlanFacts *f, const Recipe *r, GemmKind gemm, int i) {
    static const char *const roles[NUM_TENSORS] = {"w", "x", "dy"};
    const TensorRole role = gemm_tensor(gemm, i);
    const ScaleGranularity granularity = r->granularity[gemm][i];
    const char *dtype = f->options->precision == PRECISION_FP32 ? "fp32" : "bf16";
    if (granularity != NO_SCALE) dtype = precision_format(f->precision, role) == FP8_E4M3 ? "e4m3" : "e5m2";
    json_text_add(out, ", \"%s\": {\"dtype\": \"%s\"", roles[role], dtype);
    if (granularity != NO_SCALE) logger_add_text(out, "scale_per", granularity_traits(granularity)->name);
    json_text_add(out, "}");
}

// Adds the three GEMMs of linear layer `s` with recipe r, and the numbers of the model's layers in which `s` has that
// recipe. `id`: its LinearId; -1: lm_head, which is in no layer.
static inline void plan_json_linear(JsonText *out, const PlanFacts *f, const LinearShape *s, int id, const Recipe *r) {
    const Precision *p = f->precision;
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        const GemmSizes sizes = precision_sizes(s, (GemmKind)gemm, id < 0 ? f->head_rows : f->rows);
        json_text_add(out, "%s{\"linear\": \"%s\"", json_text_comma(out), s->name);
        logger_add_text(out, "gemm", gemm_kind_name((GemmKind)gemm));
        json_text_add(out, ", \"layers\": [");
        for (int64_t l = 0; id >= 0 && l < p->num_layers; l++) {
            if (precision_of(p, l, id) == r) json_text_add(out, "%s%lld", json_text_comma(out), (long long)l);
        }
        json_text_add(out, "]");
        logger_add_int(out, "M", sizes.rows);
        logger_add_int(out, "N", sizes.columns);
        logger_add_int(out, "K", sizes.depth);
        for (int i = 1; i >= 0; i--) plan_json_operand(out, f, r, (GemmKind)gemm, i);
        json_text_add(out, ", \"fast_accum\": %s}", precision_fast_accum(p, r, (GemmKind)gemm) ? "true" : "false");
    }
}

static inline void plan_json_gemms(JsonText *out, const PlanFacts *f) {
    const Precision *p = f->precision;
    const Recipe *bf16 = recipe_row(RECIPE_BF16);
    char layers[128];
    json_text_add(out, ", \"gemms\": [");
    for (int id = 0; id < NUM_LINEARS; id++)
        for (int fp8 = 1; fp8 >= 0; fp8--)
            if (precision_layers(p, id, fp8 == 1, layers, sizeof layers))
                plan_json_linear(out, f, &p->linear[id], id, fp8 ? p->recipe : bf16);
    plan_json_linear(out, f, &p->lm_head, -1, &p->head);
    json_text_add(out, "]");
}

// Adds the hash of the shards' headers, order and some of their tokens (dataloader_identity).
static inline void plan_json_fingerprint(JsonText *out, const char *key, const DataIdentity *identity) {
    char text[32];
    format_checked(text, sizeof text, FINGERPRINT_FORMAT, (unsigned long long)identity->fingerprint);
    logger_add_text(out, key, text);
}

// Adds what follows from the options and the data: sizes, memory and GEMMs. The settings record of log.jsonl has the
// same members.
static inline void plan_json_derived(JsonText *out, const PlanFacts *f) {
    const DataLoader *data = &f->setup->train;
    if (data->num_shards) {
        logger_add_int(out, "training_tokens", data->num_tokens);
        logger_add_int(out, "training_sequences", data->num_sequences);
        logger_add_int(out, "training_shards", data->num_shards);
        plan_json_fingerprint(out, "training_fingerprint", &f->setup->data);
    }
    if (f->setup->val.num_shards) plan_json_fingerprint(out, "validation_fingerprint", &f->setup->val_data);
    logger_add_int(out, "checkpoint_bytes", run_setup_checkpoint_bytes(f->table, f->options));
    logger_add_int(out, "ranks_per_replica", f->comm->shard_size);
    logger_add_int(out, "shard_elements", f->shard_elements);
    json_text_add(out, ", \"fp8_filter_decided\": %s", f->precision->filter_open ? "false" : "true");
    plan_json_memory(out, f);
    plan_json_gemms(out, f);
}

static inline TrafficFacts plan_traffic(const PlanFacts *f) {
    return (TrafficFacts){
        strcmp(f->program, "train_fp8") == 0, f->options, &f->setup->model, f->comm, f->table, f->precision};
}

// Prints the object and a newline.
static inline void plan_json_print(const PlanFacts *f) {
    const Options *o = f->options;
    const ModelConfig *m = &f->setup->model;
    const TokenFlops flops = flops_per_token(f->table, m, o->sequence_length, f->precision);
    JsonText out = {NULL, 0, 0};
    json_text_add(&out, "{\"program\": \"%s\"", f->program);
    logger_add_text(&out, "version", TRAINER_VERSION);
    logger_add_text(&out, "build", TRAINER_BUILD);
    logger_add_text(&out, "model", m->name);
    logger_add_int(&out, "parameters", f->table->num_parameters);
    logger_add_int(&out, "vocab_size", m->vocab_size);
    logger_add(&out, "model_flops_per_token", flops_total(flops));
    logger_add_int(&out, "world_size", f->comm->world);
    logger_add_int(&out, "fp8_gemms", precision_fp8_gemms(f->precision));
    plan_json_derived(&out, f);
    const TrafficFacts traffic = plan_traffic(f);
    traffic_json(&out, &traffic);
    logger_add_settings(&out, o);
    printf("%s}\n", out.data);
    json_text_free(&out);
}

#endif
