// Checks and times the kernels around the collectives of llmc/fsdp.cuh: gradients to fp32, and sums of them. Checks the
// proof of llmc/peer_memory.cuh, with one GPU in the place of two. Build: make build/bench_fsdp
#include "../../llmc/fsdp.cuh"
#include "bench.cuh"

// Just what the kernels' callers read of it: the stream, here the default one, and the staging buffer.
static Fsdp make_fsdp(Nccl *nccl, float *staging) {
    Fsdp f = {};
    f.nccl = nccl, f.staging = staging;
    return f;
}

static void check_to_fp32(int64_t rows, int64_t n, int64_t stride) {
    char label[96];
    format_checked(label, sizeof label, "%lld x %lld of %lld to fp32", (long long)rows, (long long)n, (long long)stride);
    bf16_bits *host = bench_normal(1, rows * stride, 1.0f);
    host[0] = 0x7fc0, host[1] = 0xff80, host[2] = 0x0001;  // NaN, -infinity, the smallest denormal
    float *x = bf16_to_floats(host, rows * stride), *want = (float *)xcalloc((size_t)(rows * n), sizeof(float));
    for (int64_t i = 0; i < rows * n; i++) want[i] = x[i / n * stride + i % n];
    Nccl nccl = {};
    Fsdp f = make_fsdp(&nccl, (float *)bench_alloc(rows * n * 4));
    bf16 *from = (bf16 *)bench_upload(host, rows * stride * 2);
    fsdp_to_fp32(&f, from, rows, n, stride);
    float *got = (float *)bench_download(f.staging, rows * n * 4, label);
    check_close(label, got, want, rows * n, n, 0, 0);
    bench_free(f.staging), bench_free(from);
    free(host), free(x), free(want), free(got);
}

// from: bf16 values, and as fp32 ones that no bf16 holds.
static void check_add(int64_t n, bool fp32, bool add) {
    char label[96];
    format_checked(label, sizeof label, "%lld elements of %s%s", (long long)n, fp32 ? "fp32" : "bf16", add ? ", added" : "");
    bf16_bits *before = bench_normal(2, n, 1.0f), *from_bits = bench_normal(3, n, 1.0f);
    float *from = bf16_to_floats(from_bits, n), *want = bf16_to_floats(before, n);
    for (int64_t i = 0; i < n; i++) {
        if (fp32) from[i] *= 1.0009765f;
        want[i] = add ? from[i] + want[i] : from[i];
    }
    bf16_bits *want_bits = bf16_from_floats(want, n);
    Nccl nccl = {};
    Fsdp f = make_fsdp(&nccl, NULL);
    bf16 *to = (bf16 *)bench_upload(before, n * 2);
    void *device = fp32 ? bench_upload(from, n * 4) : bench_upload(from_bits, n * 2);
    if (fp32) fsdp_add(&f, to, (const float *)device, n, add);
    else fsdp_add(&f, to, (const bf16 *)device, n, add);
    bf16_bits *got = (bf16_bits *)bench_download(to, n * 2, label);
    check_bytes(label, got, want_bits, n * 2, 2);
    bench_free(to), bench_free(device);
    free(before), free(from_bits), free(from), free(want), free(want_bits), free(got);
}

// 2^31 + 4096 elements: the last come out as they do alone.
static void check_large(void) {
    const int64_t n = (1ll << 31) + 4096, last = 8192;
    Nccl nccl = {};
    Fsdp f = make_fsdp(&nccl, NULL);
    bf16 *to = bench_random(n, 4, 1.0f), *from = bench_random(n, 5, 1.0f), *alone = (bf16 *)bench_alloc(last * 2);
    CUDA_CHECK(cudaMemcpy(alone, to + n - last, (size_t)last * 2, cudaMemcpyDeviceToDevice));
    fsdp_add(&f, to, from, n, true);
    fsdp_add(&f, alone, from + n - last, last, true);
    check_same_on_device("2^31 elements, added", to + n - last, alone, last * 2, 2);
    bench_free(to), bench_free(from), bench_free(alone);
}

// Two ranks in one process: their memory is two allocations of this GPU.
typedef struct {
    PeerMemory peers;
    char *room;  // [2][PEER_PROOF_BYTES], then the arrivals
    cudaStream_t stream;
} PeerRank;

enum { PEER_ROOM = 2 * PEER_PROOF_BYTES, PEER_MEMORY = PEER_ROOM + PEER_MAX_RANKS * sizeof(uint32_t) };

static void check_peer_reads(PeerRank ranks[2]) {
    char reason[256] = "";
    for (int place = 0; place < 2; place++)
        peer_write_pattern(place, ranks[place].room, PEER_PROOF_BYTES, ranks[place].stream);
    for (int place = 0; place < 2; place++)
        CHECK(peer_check_patterns(&ranks[place].peers, place, ranks[place].room, PEER_PROOF_BYTES, ranks[place].stream,
                                  reason, sizeof reason), "place %d: %s", place, reason);
    CUDA_CHECK(cudaMemset(ranks[1].room + 1000, 0x77, 1));
    const bool right = peer_check_patterns(&ranks[0].peers, 0, ranks[0].room, PEER_PROOF_BYTES, ranks[0].stream, reason,
                                           sizeof reason);
    CHECK(!right && strstr(reason, "rank 1's GPU reads wrong from rank 0's, first at byte 1000"), "0x77: %s", reason);
}

// A barrier to which both come; and one to which one of them does not, whose stream goes on all the same.
static void check_peer_barriers(PeerRank ranks[2]) {
    char reason[256] = "";
    uint32_t arrivals[2];
    peer_barrier(&ranks[1].peers, ranks[1].stream);
    CHECK(peer_prove_barrier(&ranks[0].peers, 0, PEER_PROOF_SECONDS, ranks[0].stream, reason, sizeof reason), "%s",
          reason);
    peer_finish(ranks[1].stream);
    CHECK(!peer_prove_barrier(&ranks[0].peers, 0, 0.2, ranks[0].stream, reason, sizeof reason) &&
              strstr(reason, "did not come to rank 0 within 0.2 s"), "a barrier of one rank: %s", reason);
    CUDA_CHECK(cudaMemsetAsync(ranks[0].room, 0, PEER_ROOM, ranks[0].stream));
    CHECK(peer_ends(ranks[0].stream, PEER_PROOF_SECONDS), "the stream of a barrier that did not come stands still");
    CUDA_CHECK(cudaMemcpy(arrivals, ranks[1].peers.arrivals, sizeof arrivals, cudaMemcpyDeviceToHost));
    CHECK(arrivals[0] == 2 && arrivals[1] == 0, "arrivals %u, %u", arrivals[0], arrivals[1]);
}

static void check_peers(void) {
    PeerRank ranks[2] = {};
    for (PeerRank &r : ranks) {
        r.room = (char *)bench_zeros(PEER_MEMORY);
        CUDA_CHECK(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    }
    CUDA_CHECK(cudaDeviceSynchronize());  // the other streams do not wait for the clearing
    bool waits = true;
    for (int place = 0; place < 2; place++) {
        PeerMemory *p = &ranks[place].peers;
        p->ranks = 2, p->place = place, p->arrivals = (uint32_t *)(ranks[place].room + PEER_ROOM);
        for (int i = 0; i < 2; i++) p->base[i] = ranks[i].room;
        waits = peer_can_wait(p, ranks[place].stream) && waits;
        peer_finish(ranks[place].stream);
    }
    check_peer_reads(ranks);
    if (waits) check_peer_barriers(ranks);
    else printf("skipped: barriers, because the driver cannot let streams wait for memory\n");
    for (PeerRank &r : ranks) {
        CUDA_CHECK(cudaStreamDestroy(r.stream));
        bench_free(r.room);
    }
}

// A layer of llama3.1-8b on 4 ranks, in pieces of FSDP_STAGING_ELEMENTS where sums are fp32.
static void bench_kernels(Bench *b) {
    const int64_t group = 4, slice = 218112000 / group, part = FSDP_STAGING_ELEMENTS / group;
    const char *reason = "128 blocks, by design: the other multiprocessors are left to the matrix products beside it";
    Nccl nccl = {};
    Fsdp f = make_fsdp(&nccl, (float *)bench_zeros(group * part * 4));
    bf16 *gradients = bench_random(group * slice, 6, 1.0f), *to = (bf16 *)bench_zeros(slice * 2);
    double us = bench_time_us(b, [&] { fsdp_to_fp32(&f, gradients, group, part, slice); });
    bench_report(b, "fsdp, gradients to fp32", "4 x 16777216", us, 6.0 * (double)(group * part), reason);
    us = bench_time_us(b, [&] { fsdp_add(&f, to, f.staging, part, true); });
    bench_report(b, "fsdp, sum of fp32 added", "16777216", us, 8.0 * (double)part, reason);
    us = bench_time_us(b, [&] { fsdp_add(&f, to, f.staging, part, false); });
    bench_report(b, "fsdp, sum of fp32 rounded", "16777216", us, 6.0 * (double)part, reason);
    us = bench_time_us(b, [&] { fsdp_add(&f, to, gradients, slice, true); });
    bench_report(b, "fsdp, sum of bf16 added", "54528000", us, 6.0 * (double)slice, reason);
    bench_free(f.staging), bench_free(gradients), bench_free(to);
}

int main(int argc, char **argv) {
    if (bench_part_wanted(argc, argv, "check")) {
        check_to_fp32(1, 8, 8);
        check_to_fp32(3, 1000, 1016);
        check_to_fp32(4, 131072, 200000);  // more than the blocks take at once
        for (int kind = 0; kind < 4; kind++) {
            check_add(8, kind & 1, kind & 2);
            check_add(4008, kind & 1, kind & 2);
            check_add(300000, kind & 1, kind & 2);
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
