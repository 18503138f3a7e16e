// Checks the kernels of llmc/shard/transport.cuh: conversion of gradients to fp32, and their sums over ranks and
// micro-steps, which must equal the CPU's bit for bit. Times the kernels except transport_sum.
// It also checks the peer memory test of llmc/shard/peer_memory.cuh, with one GPU in place of two.
// Build and run: make build/bench_fsdp && build/bench_fsdp
#include "../../llmc/shard/transport.cuh"
#include "bench.cuh"

// Returns a Transport with the stream of `nccl` (the callers pass one that is zero: the default stream) and a staging
// buffer.
static Transport make_transport(Nccl *nccl, float *staging) {
    Transport t = {};
    t.nccl = nccl, t.staging = staging;
    return t;
}

static void check_to_fp32(int64_t rows, int64_t n, int64_t stride) {
    char label[96];
    format_checked(label, sizeof label, "%lld rows of %lld, stride %lld, to fp32", (long long)rows, (long long)n,
                   (long long)stride);
    bf16_bits *host = bench_normal(1, rows * stride, 1.0f);
    host[0] = 0x7fc0, host[1] = 0xff80, host[2] = 0x0001;  // NaN, -infinity, the smallest denormal
    float *x = bf16_to_floats(host, rows * stride), *want = (float *)xcalloc((size_t)(rows * n), sizeof(float));
    for (int64_t i = 0; i < rows * n; i++) want[i] = x[i / n * stride + i % n];
    Nccl nccl = {};
    Transport t = make_transport(&nccl, (float *)bench_alloc(rows * n * 4));
    bf16 *from = (bf16 *)bench_upload(host, rows * stride * 2);
    transport_to_fp32(&t, from, rows, n, stride);
    float *got = (float *)bench_download(t.staging, rows * n * 4, label);
    check_close(label, got, want, rows * n, n, 0, 0);
    bench_free(t.staging), bench_free(from);
    free(host), free(x), free(want), free(got);
}

// Uploads the sum in its device type, bf16 or fp32.
static void *upload_sum(const float *x, int64_t n, bool fp32) {
    if (fp32) return bench_upload(x, n * 4);
    bf16_bits *bits = bf16_from_floats(x, n);
    void *p = bench_upload(bits, n * 2);
    free(bits);
    return p;
}

static void check_sum(const char *label, const void *device, const float *want, int64_t n, bool fp32) {
    void *got = bench_download(device, n * (fp32 ? 4 : 2), label);
    bf16_bits *bits = bf16_from_floats(want, n);
    check_bytes(label, got, fp32 ? (const void *)want : bits, n * (fp32 ? 4 : 2), fp32 ? 4 : 2);
    free(got), free(bits);
}

static void set_sum(Transport *t, void *device, bool fp32) {
    t->fp32_sums = fp32;
    if (fp32) t->sums_fp32 = (float *)device;
    else t->sums = (bf16 *)device;
}

// Returns the three ways in which gradients join a sum. They replace it; or they are added and rounded to nearest, as
// those of an embedding in the first micro-step; or they are added and rounded stochastically, as in later micro-steps.
static const GradientSum *sum_kinds(void) {
    static const GradientSum kinds[] = {
        {false, false, 0, 0}, {true, false, 0, 0}, {true, true, 0x123456789abcdef1ull, (1ll << 35) + 4096}};
    return kinds;
}

// Adds n gradients to a sum, from its element `at` on. The gradients are bf16, or fp32 with values that bf16 cannot
// represent.
static void check_add(int64_t at, int64_t n, bool fp32_from, bool fp32, GradientSum how) {
    char label[128];
    format_checked(label, sizeof label, "%lld elements of %s to %s%s%s", (long long)n, fp32_from ? "fp32" : "bf16",
                   fp32 ? "fp32" : "bf16", how.add ? ", added" : "", how.stochastic ? " stochastically" : "");
    bf16_bits *before = bench_normal(2, at + n, 1.0f), *from_bits = bench_normal(3, n, 1.0f);
    from_bits[0] = 0xff80, from_bits[1] = 0x0001,
    from_bits[2] = 0x7f7f;  // -infinity, the smallest denormal, the largest number
    float *from = bf16_to_floats(from_bits, n), *want = bf16_to_floats(before, at + n);
    for (int64_t i = 3; fp32_from && i < n; i++) from[i] *= 1.0009765f;
    Nccl nccl = {};
    Transport t = make_transport(&nccl, NULL);
    void *to = upload_sum(want, at + n, fp32),
         *device = fp32_from ? bench_upload(from, n * 4) : bench_upload(from_bits, n * 2);
    set_sum(&t, to, fp32);
    gradient_sum_reference(want + at, from, 0, n, fp32, &how);
    if (fp32_from) transport_add_reduced(&t, at, (const float *)device, n, how);
    else transport_add_reduced(&t, at, (const bf16 *)device, n, how);
    check_sum(label, to, want, at + n, fp32);
    bench_free(to), bench_free(device);
    free(before), free(from_bits), free(from), free(want);
}

// Checks the kernel that sums the gradients of all ranks after copy engines have brought them. It adds in rank order,
// in fp32.
static void check_rank_sum(int64_t ranks, int64_t shard_rank, int64_t n, bool fp32, GradientSum how) {
    char label[128];
    format_checked(label, sizeof label, "%lld elements summed on rank %lld of %lld, to %s%s%s", (long long)n,
                   (long long)shard_rank, (long long)ranks, fp32 ? "fp32" : "bf16", how.add ? ", added" : "",
                   how.stochastic ? " stochastically" : "");
    bf16_bits *before = bench_normal(4, n, 1.0f), *bits = bench_normal(5, ranks * n, 1.0f),
              *others = (bf16_bits *)xcalloc((size_t)(ranks * n), 2);
    float *x = bf16_to_floats(bits, ranks * n), *want = bf16_to_floats(before, n),
          *sum = (float *)xcalloc((size_t)n, 4);
    for (int64_t rank = 0; rank < ranks; rank++) {
        for (int64_t i = 0; i < n; i++) sum[i] = rank ? sum[i] + x[rank * n + i] : x[i];
        if (rank != shard_rank) memcpy(others + (rank - (rank > shard_rank)) * n, bits + rank * n, (size_t)n * 2);
    }
    Nccl nccl = {};
    Transport t = make_transport(&nccl, NULL);
    t.shard_size = ranks, t.shard_rank = shard_rank;
    t.received = (bf16 *)bench_upload(others, ranks * n * 2);
    void *to = upload_sum(want, n, fp32);
    bf16 *own = (bf16 *)bench_upload(bits + shard_rank * n, n * 2);
    set_sum(&t, to, fp32);
    gradient_sum_reference(want, sum, 0, n, fp32, &how);
    transport_add_received(&t, 0, own, n, how);
    check_sum(label, to, want, n, fp32);
    bench_free(to), bench_free(own), bench_free(t.received);
    free(before), free(bits), free(others), free(x), free(want), free(sum);
}

// Adds a gradient of 2^31 + 4096 elements to a sum. The last 8,192 elements of the sum must be the same as when only
// they are added.
static void check_large(void) {
    const int64_t n = (1ll << 31) + 4096, last = 8192;
    Nccl nccl = {};
    Transport t = make_transport(&nccl, NULL);
    bf16 *to = bench_random(n, 4, 1.0f), *from = bench_random(n, 5, 1.0f), *alone = (bf16 *)bench_alloc(last * 2);
    CUDA_CHECK(cudaMemcpy(alone, to + n - last, (size_t)last * 2, cudaMemcpyDeviceToDevice));
    GradientSum how = sum_kinds()[2];
    t.sums = to;
    transport_add_reduced(&t, 0, from, n, how);
    t.sums = alone, how.flat += n - last;
    transport_add_reduced(&t, 0, from + n - last, last, how);
    check_same_on_device("2^31 elements, added", to + n - last, alone, last * 2, 2);
    bench_free(to), bench_free(from), bench_free(alone);
}

// One of two ranks in this process. The memory of each is an allocation on this GPU.
typedef struct {
    PeerMemory peers;
    char *memory;  // [2][PEER_PROOF_BYTES], then the arrivals
    cudaStream_t stream;
} PeerRank;

enum { PEER_ROOM = 2 * PEER_PROOF_BYTES, PEER_MEMORY = PEER_ROOM + PEER_MAX_RANKS * sizeof(uint32_t) };

static void check_peer_reads(PeerRank ranks[2]) {
    char reason[256] = "";
    for (int rank = 0; rank < 2; rank++)
        peer_write_pattern(rank, ranks[rank].memory, PEER_PROOF_BYTES, ranks[rank].stream);
    for (int rank = 0; rank < 2; rank++)
        CHECK(peer_check_patterns(&ranks[rank].peers, rank, ranks[rank].memory, PEER_PROOF_BYTES, ranks[rank].stream,
                                  reason, sizeof reason),
              "rank %d reads the other rank's data: %s", rank, reason);
    CUDA_CHECK(cudaMemset(ranks[1].memory + 1000, 0x77, 1));
    const bool right = peer_check_patterns(&ranks[0].peers, 0, ranks[0].memory, PEER_PROOF_BYTES, ranks[0].stream,
                                           reason, sizeof reason);
    CHECK(!right && strstr(reason, "rank 1's GPU gives wrong data to rank 0's GPU, first at byte 1000"),
          "a changed byte of rank 1 is found: %s", reason);
}

// Tests a barrier that both ranks reach, and one that one rank misses. The other rank's stream must continue anyway.
static void check_peer_barriers(PeerRank ranks[2]) {
    char reason[256] = "";
    uint32_t arrivals[2];
    peer_barrier(&ranks[1].peers, ranks[1].stream);
    CHECK(peer_prove_barrier(&ranks[0].peers, 0, PEER_PROOF_SECONDS, ranks[0].stream, reason, sizeof reason),
          "a barrier that both ranks reach completes: %s", reason);
    peer_finish(ranks[1].stream);
    CHECK(!peer_prove_barrier(&ranks[0].peers, 0, 0.2, ranks[0].stream, reason, sizeof reason) &&
              strstr(reason, "did not complete on rank 0 within 0.2 s"),
          "a barrier that one rank misses is reported: %s", reason);
    CUDA_CHECK(cudaMemsetAsync(ranks[0].memory, 0, PEER_ROOM, ranks[0].stream));
    CHECK(peer_ends(ranks[0].stream, PEER_PROOF_SECONDS), "the stream continues after a barrier that one rank missed");
    CUDA_CHECK(cudaMemcpy(arrivals, ranks[1].peers.arrivals, sizeof arrivals, cudaMemcpyDeviceToHost));
    CHECK(arrivals[0] == 2 && arrivals[1] == 0,
          "rank 1 has two arrivals from rank 0 and none from itself; got %u and %u", arrivals[0], arrivals[1]);
}

static void check_peers(void) {
    PeerRank ranks[2] = {};
    for (PeerRank &r : ranks) {
        r.memory = (char *)bench_zeros(PEER_MEMORY);
        CUDA_CHECK(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    }
    // These streams do not wait for the memset, which is on the default stream.
    CUDA_CHECK(cudaDeviceSynchronize());
    bool waits = true;
    for (int rank = 0; rank < 2; rank++) {
        PeerMemory *p = &ranks[rank].peers;
        p->ranks = 2, p->rank = rank, p->arrivals = (uint32_t *)(ranks[rank].memory + PEER_ROOM);
        for (int i = 0; i < 2; i++) p->base[i] = ranks[i].memory;
        waits = peer_can_wait(p, ranks[rank].stream) && waits;
        peer_finish(ranks[rank].stream);
    }
    check_peer_reads(ranks);
    if (waits) check_peer_barriers(ranks);
    else printf("skipped: barriers, because cuStreamBatchMemOp does not work here\n");
    for (PeerRank &r : ranks) {
        CUDA_CHECK(cudaStreamDestroy(r.stream));
        bench_free(r.memory);
    }
}

// Times adding a layer's gradient to the sum on one GPU, with all SMs.
static void bench_joins(Bench *b, Transport *t, const bf16 *gradients, int64_t n) {
    const GradientSum how = sum_kinds()[2];
    const unsigned blocks = grid_size(n, TRANSPORT_THREADS * 8);
    for (int fp32 = 0; fp32 < 2; fp32++) {
        void *sum = bench_zeros(n * (fp32 ? 4 : 2));
        set_sum(t, sum, fp32);
        const double us = bench_time_us(b, [&] { transport_add(t, 0, gradients, n, how, blocks, 0); });
        bench_report(b, fp32 ? "gradients added to the fp32 sum" : "gradients added to the bf16 sum", "218112000", us,
                     (fp32 ? 10.0 : 6.0) * (double)n);
        bench_free(sum);
    }
}

// Times one rank's kernels for a layer of llama3.1-8b on 4 ranks. Gradients that are reduced in fp32 go through the
// staging buffer in pieces of at most TRANSPORT_STAGING_ELEMENTS elements, so their lines time one piece: all of it
// (to fp32), or this rank's quarter of it (added, replaces).
static void bench_kernels(Bench *b) {
    const int64_t shard_size = 4, slice = 218112000 / shard_size, part = TRANSPORT_STAGING_ELEMENTS / shard_size;
    const char *reason = "at most 128 blocks, to leave room for concurrent GEMMs";
    Nccl nccl = {};
    Transport t = make_transport(&nccl, (float *)bench_zeros(shard_size * part * 4));
    bf16 *gradients = bench_random(shard_size * slice, 6, 1.0f), *to = (bf16 *)bench_zeros(slice * 2);
    double us = bench_time_us(b, [&] { transport_to_fp32(&t, gradients, shard_size, part, slice); });
    bench_report(b, "fsdp, gradients to fp32", "4 x 16777216", us, 6.0 * (double)(shard_size * part), reason);
    const GradientSum *how = sum_kinds();
    t.sums = to;
    us = bench_time_us(b, [&] { transport_add_reduced(&t, 0, t.staging, part, how[2]); });
    bench_report(b, "fsdp, reduced fp32 added to the bf16 sum", "16777216", us, 8.0 * (double)part, reason);
    us = bench_time_us(b, [&] { transport_add_reduced(&t, 0, t.staging, part, how[0]); });
    bench_report(b, "fsdp, reduced fp32 replaces the bf16 sum", "16777216", us, 6.0 * (double)part, reason);
    us = bench_time_us(b, [&] { transport_add_reduced(&t, 0, gradients, slice, how[2]); });
    bench_report(b, "fsdp, reduced bf16 added to the bf16 sum", "54528000", us, 6.0 * (double)slice, reason);
    bench_joins(b, &t, gradients, shard_size * slice);
    bench_free(t.staging), bench_free(gradients), bench_free(to);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        check_to_fp32(1, 8, 8);
        check_to_fp32(3, 1000, 1016);
        check_to_fp32(4, 131072, 200000);  // too many elements for one pass of 128 thread blocks: they loop
        for (int kind = 0; kind < 12; kind++) {
            const GradientSum how = sum_kinds()[kind / 4];
            check_add(0, 8, kind & 1, kind & 2, how);
            check_add(256, 4008, kind & 1, kind & 2, how);
            check_add(8, 300000, kind & 1, kind & 2, how);  // too many for one pass of 128 thread blocks
            check_rank_sum(2 + kind % 3, kind % 2, 4104, kind & 2, how);
        }
        check_peers();
    }
    if (bench_part_wanted(argc, argv, "large")) check_large();
    if (bench_part_wanted(argc, argv, "bench")) {
        Bench b = bench_create();
        bench_kernels(&b);
        bench_destroy(&b);
    }
    return check_report();
}
