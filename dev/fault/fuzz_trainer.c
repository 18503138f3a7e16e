// Reads a trainer.json with the right hash: checks files, reads settings, compares them with those of a new run.
#include "fuzz.h"

static void trainer_write_folder(const uint8_t *data, size_t size) {
    static const char config[] = "{'model_type': 'llama', 'vocab_size': 64, 'hidden_size': 8, 'intermediate_size': 8,"
                                 " 'num_hidden_layers': 1, 'num_attention_heads': 1}";
    uint8_t config_text[sizeof config];
    JsonText text = {NULL, 0, 0};
    json_text_reserve(&text, size + 1);
    if (size) memcpy(text.data, data, size);
    text.data[text.size = size] = 0;
    json_text_add(&text, CHECKPOINT_SEAL_FORMAT, (unsigned long long)xxhash64(text.data, text.size));
    fuzz_write("trainer.json", text.data, text.size);
    fuzz_write("config.json", config_text, fuzz_text(config_text, config));
    fuzz_write("model.safetensors", "12345", 5);
    json_text_free(&text);
}

static void trainer_run(const uint8_t *data, size_t size) {
    Failure failure;
    Json json;
    ModelConfig model;
    char setting[64];
    Options options = options_default();
    options_resolve(&options);
    trainer_write_folder(data, size);
    const char *folder = fuzz()->folder;
    const DataIdentity identity = {1000, 1, 42};
    const bool whole = checkpoint_is_whole(folder, true, &failure);
    FUZZ_CHECK(!whole || checkpoint_is_whole(folder, false, &failure));
    if (!checkpoint_open_trainer(folder, &json, &failure)) {
        FUZZ_CHECK(!whole);
        return;
    }
    JsonText differs = checkpoint_settings_mismatch(&json, &options, false);
    checkpoint_data_mismatch(&json, "train-data", &identity, &differs);
    json_text_free(&differs);
    json_free(&json);
    checkpoint_read_setting(folder, "precision", setting, sizeof setting);
    hf_config_read(&model, folder);
    const CheckpointRun run = {.model = &model, .options = &options, .data = identity};
    const TrainerProgress progress = checkpoint_check(folder, &run);
    FUZZ_CHECK(progress.step >= 0 && progress.samples >= 0);
    fuzz_free(model.source);
}

// Writes a valid trainer.json without the hash that ends it. Seed 0 fits the run of trainer_run(), seed 1 lacks the
// training data, and seed 2 has other training data. Seeds 1 and 2 have only the settings that a resumed run must
// match.
static size_t trainer_seed(int i, uint8_t *out) {
    JsonText text = {NULL, 0, 0};
    Options o = options_default();
    options_resolve(&o);
    json_text_add(&text, "{\n  \"format_version\": 1,\n  \"step\": 2,\n  \"samples\": 8,\n  \"model\": \"tiny\",\n");
    const char *const data = "  \"training_data\": {\"tokens\": 1000, \"shards\": 1, \"fingerprint\": \"%016x\"},\n";
    if (i != 1) json_text_add(&text, data, i == 0 ? 42 : 43);
    json_text_add(&text, "  \"settings\": {");
    const char *separator = "";
    for (const OptionRow *row = option_rows(); row->name; row++) {
        char value[256];
        if (row->kind == OPTION_GROUP || (i != 0 && row->match != MUST_MATCH && row->match != BRANCHES)) continue;
        option_format(&o, row, value, sizeof value);
        json_text_add(&text, "%s\"%s\": \"%s\"", separator, row->name, value);
        separator = ", ";
    }
    json_text_add(&text, "},\n  \"files\": [{\"name\": \"model.safetensors\", \"bytes\": 5, \"xxh64\": \"%016llx\"}]",
                  (unsigned long long)xxhash64("12345", 5));
    const size_t size = i < 3 && text.size <= FUZZ_SEED_CAPACITY ? text.size : 0;
    memcpy(out, text.data, size);
    json_text_free(&text);
    return size;
}

FUZZ_TARGET(trainer)
