// Checks llmc/kernels/rope.cuh (QK-norm, rotation) against llmc/reference/rope.h, and the bias gradient of
// llmc/gpu/column_sums.cuh against llmc/reference/linear.h. Times both.
// Build and run: make build/bench_rope && build/bench_rope
#include "../../llmc/reference/linear.h"
#include "../../llmc/reference/rope.h"
#include "../../llmc/kernels/rope.cuh"
#include "bench.cuh"

#define EPS 1e-6f

// Tolerance against the exact value: one bf16 rounding (2^-8 of the value). The floor is for fp32 sums of HD terms near
// 1, and differences of two of them.
#define TOLERANCE (1.01 / 256)
#define FLOOR 2e-5

typedef struct {
    RopeDims d;
    Dims dims;        // for the reference
    float *norms[2];  // q_norm and k_norm as floats; NULL without QK-norm
    int64_t rows, heads, n;
    char label[96];
    bf16_bits *qkv, *dout, *q_norm, *k_norm;
    float *table;
    int32_t *tokens;  // with their documents; NULL: each sequence is one
} Case;

// documents: of 7 tokens on average, instead of one in each sequence.
static Case case_create(int64_t B, int64_t T, int64_t NH, int64_t NKV, int64_t HD, bool norm, bool documents) {
    Case c = {};
    c.dims.B = B, c.dims.T = T, c.dims.R = B * T, c.dims.NH = NH, c.dims.NKV = NKV, c.dims.HD = HD;
    c.d.B = B, c.d.T = T, c.d.NH = NH, c.d.NKV = NKV, c.d.HD = HD, c.d.eps = EPS;
    c.rows = B * T, c.heads = NH + 2 * NKV, c.n = c.rows * c.heads * HD;
    format_checked(c.label, sizeof c.label, "B=%lld T=%lld heads %lld+2*%lld HD=%lld%s%s", (long long)B, (long long)T,
                   (long long)NH, (long long)NKV, (long long)HD, norm ? " qk-norm" : "", documents ? " documents" : "");
    if (documents) {
        int32_t *tokens = (int32_t *)xcalloc((size_t)(3 * c.rows), sizeof *tokens);
        for (int64_t i = 0; i < c.rows; i++) tokens[i] = (int32_t)(rng_u64(6, (uint64_t)i) % 7);
        c.dims.documents = Documents{tokens + c.rows, tokens + 2 * c.rows};
        documents_find(c.dims.documents, tokens, B, T, 0);
        c.d.starts = (int32_t *)bench_upload(c.dims.documents.starts, c.rows * 4);
        c.tokens = tokens;
    }
    ModelConfig m;
    if (!model_config_preset(&m, "llama3.1-8b")) die("no preset");
    m.head_dim = HD;
    c.qkv = bench_normal(1, c.n, 1.0f), c.dout = bench_normal(2, c.n, 1.0f), c.q_norm = bench_normal(3, HD, 1.0f),
    c.k_norm = bench_normal(4, HD, 1.0f);
    c.table = (float *)xcalloc((size_t)(T * HD), 4);
    rope_table_fill(c.table, &m, T);
    if (norm) c.norms[0] = bf16_to_floats(c.q_norm, HD), c.norms[1] = bf16_to_floats(c.k_norm, HD);
    return c;
}

static void case_free(Case *c) {
    void *host[] = {c->qkv, c->dout, c->q_norm, c->k_norm, c->table, c->norms[0], c->norms[1], c->tokens};
    bench_free((void *)c->d.starts);
    for (void *p : host) free(p);
}

static void check_forward(const Case *c) {
    const bool norm = c->norms[0] != NULL;
    float *qkv = bf16_to_floats(c->qkv, c->n), *want = (float *)xcalloc((size_t)c->n, 4);
    qknorm_rope_forward_reference(want, qkv, c->norms[0], c->norms[1], c->table, &c->dims, EPS, ROUND_NONE);
    bf16 *in = (bf16 *)bench_upload(c->qkv, c->n * 2), *out = (bf16 *)bench_alloc(c->n * 2);
    bf16 *q_norm = (bf16 *)bench_upload(c->q_norm, c->d.HD * 2), *k_norm = (bf16 *)bench_upload(c->k_norm, c->d.HD * 2);
    float *table = (float *)bench_upload(c->table, c->d.T * c->d.HD * 4);
    qknorm_rope_forward(out, in, norm ? q_norm : NULL, norm ? k_norm : NULL, table, c->d, 0);
    bf16_bits *got_bits = (bf16_bits *)bench_download(out, c->n * 2, c->label);
    float *got = bf16_to_floats(got_bits, c->n);
    check_close(c->label, got, want, c->n, c->heads * c->d.HD, TOLERANCE, FLOOR);
    bf16_bits *kept = (bf16_bits *)bench_download(in, c->n * 2, c->label);
    check_bytes(c->label, kept, c->qkv, c->n * 2, c->heads * c->d.HD * 2);
    qknorm_rope_forward(in, in, norm ? q_norm : NULL, norm ? k_norm : NULL, table, c->d, 0);
    check_same_on_device(c->label, in, out, c->n * 2, c->heads * c->d.HD * 2);
    bench_free(in), bench_free(out), bench_free(q_norm), bench_free(k_norm), bench_free(table);
    free(qkv), free(want), free(got_bits), free(got), free(kept);
}

// `special` puts a NaN among the gradients of V, which must reach the amax.
static void check_backward(const Case *c, bool special) {
    const bool norm = c->norms[0] != NULL;
    const int64_t HD = c->d.HD;
    bf16_bits *dout_bits = (bf16_bits *)xcalloc((size_t)c->n, 2), *dw_bits = bench_normal(5, 2 * HD, 3.0f);
    memcpy(dout_bits, c->dout, (size_t)c->n * 2);
    if (special) dout_bits[c->n - 3] = 0x7fc0;
    float *qkv = bf16_to_floats(c->qkv, c->n), *dout = bf16_to_floats(dout_bits, c->n),
          *want = (float *)xcalloc((size_t)c->n, 4);
    float *want_dw = bf16_to_floats(dw_bits, 2 * HD);
    qknorm_rope_backward_reference(want, want_dw, want_dw + HD, dout, qkv, c->norms[0], c->norms[1], c->table, &c->dims,
                                   EPS, ROUND_NONE);

    bf16 *d[2], *dw[2];
    uint32_t *amax[2];
    bf16 *in = (bf16 *)bench_upload(c->qkv, c->n * 2), *q_norm = (bf16 *)bench_upload(c->q_norm, HD * 2),
         *k_norm = (bf16 *)bench_upload(c->k_norm, HD * 2);
    float *table = (float *)bench_upload(c->table, c->d.T * HD * 4);
    void *workspace = bench_alloc((int64_t)rope_workspace_bytes(HD));
    for (int run = 0; run < 2; run++) {
        d[run] = (bf16 *)bench_upload(dout_bits, c->n * 2), dw[run] = (bf16 *)bench_upload(dw_bits, 2 * HD * 2),
        amax[run] = (uint32_t *)bench_zeros(4);
        qknorm_rope_backward(d[run], norm ? dw[run] : NULL, norm ? dw[run] + HD : NULL, amax[run], norm ? in : NULL,
                             norm ? q_norm : NULL, norm ? k_norm : NULL, table, c->d, workspace, 0);
    }
    check_same_on_device(c->label, d[0], d[1], c->n * 2, c->heads * HD * 2);
    check_same_on_device(c->label, dw[0], dw[1], 2 * HD * 2, HD * 2);
    bf16_bits *got_bits = (bf16_bits *)bench_download(d[0], c->n * 2, c->label),
              *got_dw_bits = (bf16_bits *)bench_download(dw[0], 2 * HD * 2, c->label);
    float *got = bf16_to_floats(got_bits, c->n), *got_dw = bf16_to_floats(got_dw_bits, 2 * HD);
    check_close(c->label, got, want, c->n, c->heads * HD, TOLERANCE, FLOOR);
    // An element of dw is an fp32 sum of rows * heads terms near 1.
    if (norm)
        check_close(c->label, got_dw, want_dw, 2 * HD, HD, TOLERANCE, 2e-6 * sqrt((double)(c->rows * c->d.NH)) + FLOOR);
    uint32_t *got_amax = (uint32_t *)bench_download(amax[0], 4, c->label);
    const uint32_t want_amax = quantize_tensor_amax(got, c->n, SCALE_TORCHAO);
    CHECK(got_amax[0] == want_amax, "%s: the amax is 0x%08x in bits, want 0x%08x", c->label, got_amax[0], want_amax);
    void *device[] = {d[0], d[1], dw[0], dw[1], amax[0], amax[1], in, q_norm, k_norm, table, workspace};
    void *host[] = {dout_bits, dw_bits, qkv, dout, want, want_dw, got_bits, got_dw_bits, got, got_dw, got_amax};
    for (void *p : device) bench_free(p);
    for (void *p : host) free(p);
}

static void check_case(int64_t B, int64_t T, int64_t NH, int64_t NKV, int64_t HD, int kind) {
    Case c = case_create(B, T, NH, NKV, HD, kind % 2, kind / 2);
    check_forward(&c);
    check_backward(&c, false);
    check_backward(&c, true);
    case_free(&c);
}

static void check_bias(int64_t rows, int64_t columns) {
    char label[64];
    format_checked(label, sizeof label, "bias %lld x %lld", (long long)rows, (long long)columns);
    bf16_bits *dy_bits = bench_normal(1, rows * columns, 1.0f), *db_bits = bench_normal(2, columns, 1.0f);
    float *dy = bf16_to_floats(dy_bits, rows * columns), *want = bf16_to_floats(db_bits, columns);
    bias_backward_reference(want, dy, rows, columns, ROUND_NONE);
    bf16 *d_dy = (bf16 *)bench_upload(dy_bits, rows * columns * 2), *db = (bf16 *)bench_upload(db_bits, columns * 2);
    bf16 *again = (bf16 *)bench_upload(db_bits, columns * 2);
    void *workspace = bench_alloc((int64_t)bias_workspace_bytes(rows, columns));
    bias_backward(db, d_dy, rows, columns, workspace, 0);
    bias_backward(again, d_dy, rows, columns, workspace, 0);
    check_same_on_device(label, db, again, columns * 2, columns * 2);
    bf16_bits *got_bits = (bf16_bits *)bench_download(db, columns * 2, label);
    float *got = bf16_to_floats(got_bits, columns);
    // The floor is for fp32 sums of values near 1.
    check_close(label, got, want, columns, columns, TOLERANCE, 2e-6 * sqrt((double)rows));
    bench_free(d_dy), bench_free(db), bench_free(again), bench_free(workspace);
    free(dy_bits), free(db_bits), free(dy), free(want), free(got_bits), free(got);
}

// Rotates a tensor of more than 2^31 elements in place. Its last sequence must get the same bits as a copy of that
// sequence that is rotated alone.
static void check_large(void) {
    const int64_t T = 8192, B = 44, width = 48 * 128, n = B * T * width, last = T * width;
    ModelConfig m;
    if (!model_config_preset(&m, "llama3.1-8b")) die("no preset");
    RopeDims all = {B, T, 32, 8, 128, EPS, NULL}, one = {1, T, 32, 8, 128, EPS, NULL};
    float *host_table = (float *)xcalloc((size_t)(T * 128), 4);
    rope_table_fill(host_table, &m, T);
    float *table = (float *)bench_upload(host_table, T * 128 * 4);
    bf16 *x = bench_random(n, 1, 1.0f), *sequence = (bf16 *)bench_alloc(last * 2);
    CUDA_CHECK(cudaMemcpy(sequence, x + n - last, (size_t)last * 2, cudaMemcpyDeviceToDevice));
    qknorm_rope_forward(x, x, NULL, NULL, table, all, 0);
    qknorm_rope_forward(sequence, sequence, NULL, NULL, table, one, 0);
    check_same_on_device("2^31 elements, forward", x + n - last, sequence, last * 2, width * 2);
    qknorm_rope_backward(x, NULL, NULL, NULL, NULL, NULL, NULL, table, all, NULL, 0);
    qknorm_rope_backward(sequence, NULL, NULL, NULL, NULL, NULL, NULL, table, one, NULL, 0);
    check_same_on_device("2^31 elements, backward", x + n - last, sequence, last * 2, width * 2);
    bench_free(table), bench_free(x), bench_free(sequence);
    free(host_table);
}

static void bench_case(Bench *b, const char *shape, int64_t T, int64_t NH, int64_t NKV, int64_t HD, bool norm) {
    ModelConfig m;
    if (!model_config_preset(&m, "llama3.1-8b")) die("no preset");
    m.head_dim = HD;
    RopeDims d = {1, T, NH, NKV, HD, EPS, NULL};
    const int64_t n = T * (NH + 2 * NKV) * HD, rotated = T * (NH + NKV) * HD;
    float *host_table = (float *)xcalloc((size_t)(T * HD), 4);
    rope_table_fill(host_table, &m, T);
    float *table = (float *)bench_upload(host_table, T * HD * 4);
    bf16 *in = bench_random(n, 1, 1.0f), *out = bench_random(n, 2, 1.0f), *q_norm = bench_random(HD, 3, 1.0f);
    bf16 *k_norm = bench_random(HD, 4, 1.0f), *dw = bench_random(2 * HD, 5, 1.0f);
    uint32_t *amax = (uint32_t *)bench_zeros(4);
    void *workspace =
        bench_alloc(max_i64((int64_t)rope_workspace_bytes(HD), (int64_t)bias_workspace_bytes(T, (NH + 2 * NKV) * HD)));
    const char *rotation = "blocks of 4 tokens, whose threads have two heads in flight at a time";
    if (norm) {
        double us = bench_time_us(b, [&] { qknorm_rope_forward(out, in, q_norm, k_norm, table, d, 0); });
        bench_report(b, "QK-norm + RoPE", shape, us, 4.0 * (double)n,
                     "each head's sum is needed before its output: shuffles, and registers for 3 blocks per SM");
        us = bench_time_us(
            b, [&] { qknorm_rope_backward(out, dw, dw + HD, amax, in, q_norm, k_norm, table, d, workspace, 0); });
        bench_report(b, "QK-norm + RoPE backward", shape, us, 6.0 * (double)rotated + 2.0 * (double)(n - rotated),
                     "two sums of each head, and dw in registers: 2 blocks per SM; then two launches that add up "
                     "the parts of dw");
    } else {
        double us = bench_time_us(b, [&] { qknorm_rope_forward(in, in, NULL, NULL, table, d, 0); });
        bench_report(b, "RoPE in place", shape, us, 4.0 * (double)rotated, rotation);
        us = bench_time_us(
            b, [&] { qknorm_rope_backward(out, NULL, NULL, amax, NULL, NULL, NULL, table, d, workspace, 0); });
        bench_report(b, "RoPE backward", shape, us, 4.0 * (double)rotated + 2.0 * (double)(n - rotated), rotation);
        us = bench_time_us(b, [&] { bias_backward(in, out, T, (NH + 2 * NKV) * HD, workspace, 0); });
        bench_report(b, "bias backward", shape, us, 2.0 * (double)n,
                     "two launches: the second adds up the sums of groups of rows");
    }
    void *device[] = {table, in, out, q_norm, k_norm, dw, amax, workspace};
    for (void *p : device) bench_free(p);
    free(host_table);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        for (int kind = 0; kind < 4; kind++) {  // without and with QK-norm, then both with documents
            check_case(1, 1, 1, 1, 64, kind);
            check_case(2, 7, 3, 1, 64, kind);
            check_case(1, 63, 14, 2, 64, kind);
            check_case(3, 50, 32, 8, 64, kind);
            check_case(1, 5, 2, 2, 128, kind);
            check_case(2, 33, 12, 2, 128, kind);
            check_case(1, 1100, 16, 8, 128, kind);
        }
        check_bias(1, 8);
        check_bias(63, 1152);
        check_bias(1000, 2048);
        check_bias(5000, 264);
    }
    if (bench_part_wanted(argc, argv, "large")) check_large();
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_case(&b, "8192, 32/8x128", 8192, 32, 8, 128, false);
        bench_case(&b, "8192, 32/8x64", 8192, 32, 8, 64, false);
        bench_case(&b, "2048, 32/8x128", 2048, 32, 8, 128, false);
        bench_case(&b, "8192, 32/8x128", 8192, 32, 8, 128, true);
        bench_case(&b, "8192, 16/8x128", 8192, 16, 8, 128, true);
        bench_case(&b, "8192, 28/4x128", 8192, 28, 4, 128, false);
        bench_destroy(&b);
    }
    return check_report();
}
