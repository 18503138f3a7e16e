// Checks llmc/kernels/embedding.cuh against llmc/reference/embedding.h, and times it.
// Build and run: make build/bench_embedding && build/bench_embedding
#include "../../llmc/kernels/embedding.cuh"
#include "../../llmc/reference/embedding.h"
#include "bench.cuh"

enum { TOKENS_ZIPF, TOKENS_EQUAL, TOKENS_DISTINCT, NUM_TOKEN_KINDS };

// TOKENS_ZIPF: an id is about V^u for uniform u, so that a few ids are frequent, as in text. TOKENS_EQUAL: only the
// last id. TOKENS_DISTINCT: multiples of 7 modulo V; in the cases below an id repeats only if R > V.
static int32_t *make_tokens(uint64_t seed, int64_t R, int64_t V, int kind) {
    int32_t *tokens = (int32_t *)xcalloc((size_t)R, sizeof *tokens);
    for (int64_t i = 0; i < R; i++) {
        const double u = rng_uniform(rng_key(seed, 7), (uint64_t)i);
        tokens[i] = (int32_t)(kind == TOKENS_ZIPF    ? min_i64((int64_t)pow((double)V, u) - 1, V - 1)
                              : kind == TOKENS_EQUAL ? V - 1
                                                     : (i * 7) % V);
    }
    return tokens;
}

// Checks that the index holds exactly the rows of x whose token has elements in the part, each once. Rows must be
// grouped by token id, ids must ascend, and so must the rows of an id.
static void check_index(const char *label, const int32_t *index, const int32_t *tokens, int64_t R, int64_t C,
                        EmbeddingPart part) {
    const int32_t *rows = index + 1, *begins = index + R + 1, *ids = index + 2 * R + 2, n = index[0];
    int64_t kept = 0;
    for (int64_t i = 0; i < R; i++)
        kept += (int64_t)tokens[i] * C < part.first + part.count && ((int64_t)tokens[i] + 1) * C > part.first;
    int64_t bad = begins[0] != 0 || begins[n] != kept, seen = 0;
    for (int32_t s = 0; !bad && s < n; s++) {
        bad += begins[s + 1] <= begins[s] || (s > 0 && ids[s] <= ids[s - 1]);
        for (int32_t i = begins[s]; i < begins[s + 1]; i++, seen++)
            bad += tokens[rows[i]] != ids[s] || (i > begins[s] && rows[i] <= rows[i - 1]);
    }
    CHECK(bad == 0 && seen == kept, "%s: the index is sorted and complete; %lld errors, %lld of %lld rows", label,
          (long long)bad, (long long)seen, (long long)kept);
}

// Updates the gradient in parts, as `shard_size` ranks do, and checks that the parts together are `want` to the bit.
// table [V, C] is the gradient before the update. want [V, C] is the gradient after an update in one part. Both are on
// the device, like dx [R, C].
static void check_parts(const char *label, const bf16 *table, const bf16 *want, const bf16 *dx, const int32_t *tokens,
                        int64_t R, int64_t C, int64_t V, int64_t shard_size) {
    // shard_plan.h gives a rank a slice of this size.
    const int64_t slice = round_up(round_up(V * C, 128), shard_size * 128) / shard_size;
    bf16 *parts = (bf16 *)bench_alloc(shard_size * slice * 2);
    CUDA_CHECK(cudaMemcpy(parts, table, (size_t)(V * C * 2), cudaMemcpyDeviceToDevice));
    int32_t *index = (int32_t *)xcalloc((size_t)embedding_index_size(R), sizeof *index);
    for (int64_t rank = 0; rank < shard_size; rank++) {
        const EmbeddingPart part = {rank * slice, slice};
        embedding_sort(index, tokens, R, C, part);
        check_index(label, index, tokens, R, C, part);
        int32_t *d_index = (int32_t *)bench_upload(index, embedding_index_size(R) * 4);
        embedding_backward(parts + rank * slice, part, dx, d_index, R, C, GradientSum{}, false, 0);
        bench_free(d_index);
    }
    check_same_on_device(label, parts, want, V * C * 2, C * 2);
    bench_free(parts);
    free(index);
}

static void check_case(int64_t R, int64_t C, int64_t V, int kind) {
    char label[96];
    format_checked(label, sizeof label, "R=%lld C=%lld V=%lld tokens %d", (long long)R, (long long)C, (long long)V,
                   kind);
    int32_t *tokens = make_tokens((uint64_t)(R + C), R, V, kind),
            *index = (int32_t *)xcalloc((size_t)embedding_index_size(R), sizeof *index);
    const EmbeddingPart whole = {0, V * C};
    embedding_sort(index, tokens, R, C, whole);
    check_index(label, index, tokens, R, C, whole);
    bf16_bits *table_bits = bench_normal(1, V * C, 1.0f), *dx_bits = bench_normal(2, R * C, 1.0f);
    float *table = bf16_to_floats(table_bits, V * C), *dx = bf16_to_floats(dx_bits, R * C),
          *x = (float *)xcalloc((size_t)(R * C), sizeof(float));
    embedding_forward_reference(x, table, tokens, R, C);
    embedding_backward_reference(table, dx, tokens, R, C, V, true, ROUND_NONE);

    bf16 *d_table = (bf16 *)bench_upload(table_bits, V * C * 2),
         *d_before = (bf16 *)bench_upload(table_bits, V * C * 2);
    bf16 *d_dx = (bf16 *)bench_upload(dx_bits, R * C * 2), *d_x = (bf16 *)bench_alloc(R * C * 2);
    int32_t *d_tokens = (int32_t *)bench_upload(tokens, R * 4),
            *d_index = (int32_t *)bench_upload(index, embedding_index_size(R) * 4);
    embedding_forward(d_x, d_table, d_tokens, R, C, 0);
    bf16_bits *want_x = bf16_from_floats(x, R * C), *got_x = (bf16_bits *)bench_download(d_x, R * C * 2, label);
    check_bytes(label, got_x, want_x, R * C * 2, C * 2);
    embedding_backward(d_table, whole, d_dx, d_index, R, C, GradientSum{}, false, 0);
    for (int64_t shard_size = 1; shard_size < 6; shard_size++)
        check_parts(label, d_before, d_table, d_dx, tokens, R, C, V, shard_size);
    bf16_bits *got_bits = (bf16_bits *)bench_download(d_table, V * C * 2, label);
    float *got = bf16_to_floats(got_bits, V * C);
    // one bf16 rounding; the floor is for fp32 sums of up to R values near 1
    check_close(label, got, table, V * C, C, 1.01 / 256, 1e-7 * (double)R);
    void *device[] = {d_table, d_before, d_dx, d_x, d_tokens, d_index};
    void *host[] = {tokens, index, table_bits, dx_bits, table, dx, x, want_x, got_x, got_bits, got};
    for (void *p : device) bench_free(p);
    for (void *p : host) free(p);
}

// Checks a table of more than 2^31 elements: looks up rows near its end, and adds gradients to them.
static void check_large(void) {
    const int64_t C = 16384, V = (1ll << 31) / C + 64, R = 8;
    int32_t tokens[8], index[3 * 8 + 2];
    for (int i = 0; i < 8; i++) tokens[i] = (int32_t)(V - 1 - 3 * i);
    const EmbeddingPart whole = {0, V * C};
    embedding_sort(index, tokens, R, C, whole);
    bf16 *table = bench_random(V * C, 1, 1.0f), *x = (bf16 *)bench_alloc(R * C * 2),
         *doubled = (bf16 *)bench_alloc(R * C * 2);
    int32_t *d_tokens = (int32_t *)bench_upload(tokens, sizeof tokens),
            *d_index = (int32_t *)bench_upload(index, sizeof index);
    embedding_forward(x, table, d_tokens, R, C, 0);
    embedding_backward(table, whole, x, d_index, R, C, GradientSum{}, false,
                       0);  // each row plus itself: doubling is exact
    embedding_forward(doubled, table, d_tokens, R, C, 0);
    bf16_bits *a = (bf16_bits *)bench_download(x, R * C * 2, "large table"),
              *b = (bf16_bits *)bench_download(doubled, R * C * 2, "large table");
    for (int64_t i = 0; i < R * C; i++) a[i] = bf16_from_float(2 * bf16_to_float(a[i]));
    check_bytes("large table", b, a, R * C * 2, C * 2);
    bf16_bits *last = (bf16_bits *)xcalloc((size_t)C, 2);
    CUDA_CHECK(cudaMemcpy(last, table + (V - 1) * C, (size_t)(C * 2), cudaMemcpyDeviceToHost));
    check_bytes("large table, last row", last, b, C * 2, C * 2);
    bench_free(table), bench_free(x), bench_free(doubled), bench_free(d_tokens), bench_free(d_index);
    free(a), free(b), free(last);
}

static void bench_case(Bench *b, int64_t R, int64_t C, int64_t V, const char *shape) {
    int32_t *tokens = make_tokens(3, R, V, TOKENS_ZIPF),
            *index = (int32_t *)xcalloc((size_t)embedding_index_size(R), sizeof *index);
    const EmbeddingPart whole = {0, V * C};
    const double start = seconds_now();
    embedding_sort(index, tokens, R, C, whole);
    printf("%-36s %-16s %9.1f us on the host, %d distinct ids\n", "embedding sort", shape,
           (seconds_now() - start) * 1e6, index[0]);
    bf16 *table = bench_random(V * C, 1, 1.0f), *dx = bench_random(R * C, 2, 1.0f), *x = (bf16 *)bench_alloc(R * C * 2);
    int32_t *d_tokens = (int32_t *)bench_upload(tokens, R * 4),
            *d_index = (int32_t *)bench_upload(index, embedding_index_size(R) * 4);
    double us = bench_time_us(b, [&] { embedding_forward(x, table, d_tokens, R, C, 0); });
    bench_report(b, "embedding forward", shape, us, 2.0 * (double)(R * C) + 2.0 * (double)(index[0] * C),
                 "one short block per token, of a few KB; rows that are read again from L2 are not counted");
    us = bench_time_us(b, [&] { embedding_backward(table, whole, dx, d_index, R, C, GradientSum{}, false, 0); });
    bench_report(b, "embedding backward", shape, us, 2.0 * (double)(R * C) + 4.0 * (double)(index[0] * C),
                 "latency: a block takes one id and 256 columns at a time, and adds up the id's rows in a fixed order");
    bench_free(table), bench_free(dx), bench_free(x), bench_free(d_tokens), bench_free(d_index);
    free(tokens), free(index);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check"))
        for (int kind = 0; kind < NUM_TOKEN_KINDS; kind++) {
            check_case(1, 8, 1, kind);
            check_case(37, 64, 320, kind);
            check_case(130, 264, 1000, kind);
            check_case(1024, 896, 70000, kind);
            check_case(2500, 256, 300, kind);
        }
    if (bench_part_wanted(argc, argv, "large")) check_large();
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_case(&b, 2048, 4096, 128256, "2048 x 4096");
        bench_case(&b, 8192, 4096, 128256, "8192 x 4096");
        bench_case(&b, 8192, 2560, 151936, "8192 x 2560");
        bench_destroy(&b);
    }
    return check_report();
}
