// Models and arrays for the checks of AdamW's states, in adamw_coat.cu, adamw_msamp.cu and gradient_fp8.cu.
#ifndef ADAMW_PARTS_CUH
#define ADAMW_PARTS_CUH

#include "../../llmc/optimizer/adamw.cuh"
#include "../../llmc/kernels/initialize.cuh"
#include "bench.cuh"

enum { AMAX_STRIDE = 12 };

// Returns a small model with every kind of parameter of its family. Hidden size 40 leaves padding behind some tensors,
// and makes some COAT groups span two joined tensors.
static inline ModelConfig small_model(const char *preset) {
    ModelConfig m;
    if (!model_config_preset(&m, preset)) die("no preset %s", preset);
    m.vocab_size = 320, m.hidden_size = 40, m.intermediate_size = 72, m.num_layers = 3, m.num_heads = 4,
    m.num_kv_heads = 2, m.head_dim = 16;
    return m;
}

// Copies a rank's part of a flat array, of which `group` elements take `bytes` bytes.
static inline void copy_part(const ParameterTable *t, const ShardPlan *plan, const void *flat, void *to, int64_t bytes,
                             int64_t group) {
    for (int64_t l = ROOT; l < t->num_layers; l++)
        for (int k = 0; k < NUM_SEGMENTS; k++) {
            const ShardSegment g = segment_slice(t, plan, l, k);
            const ShardRange r = segment_range(t, plan, l, k, g.flat, g.size);
            memcpy((char *)to + r.shard / group * bytes, (const char *)flat + (g.flat + r.first) / group * bytes,
                   (size_t)(r.count / group * bytes));
        }
}

static inline void *upload_floats(const float *x, int64_t n, bool fp32) {
    if (fp32) return bench_upload(x, n * 4);
    bf16_bits *bits = bf16_from_floats(x, n);
    void *p = bench_upload(bits, n * 2);
    free(bits);
    return p;
}

static inline void check_device(const char *label, const char *array, const void *device, const void *want,
                                int64_t bytes, int64_t element) {
    char text[160];
    format_checked(text, sizeof text, "%s: %s", label, array);
    void *got = bench_download(device, bytes, text);
    check_bytes(text, got, want, bytes, element);
    free(got);
}

#endif
