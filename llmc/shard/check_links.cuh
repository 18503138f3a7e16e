// --check-links on GPUs: the collectives of FSDP, pairs of GPUs by copy engines or NCCL, and each GPU alone.
//
// The measurements use the trainer's memory. Weights and gradients are zero there before and after them. So the
// collectives gather and sum zeros.
// Pairs, and the copies and GEMMs of one GPU, use the memory of this rank's sums of gradients. NCCL's pairs have a
// communicator of their own: NCCL keeps buffers for each pair of ranks until the communicator is destroyed.
#ifndef LLMC_CHECK_LINKS_CUH
#define LLMC_CHECK_LINKS_CUH

#include "../ranks/check_links.h"
#include "fsdp.cuh"
#include "../fp8/auto_filter.cuh"
#include "../gpu/profile.cuh"

// Assumed GPU memory of NCCL for one partner of a rank, outside the arena.
#define GPU_LINKS_PARTNER_BYTES (64ll << 20)

#define GPU_LINKS_COPY_BYTES (256ll << 20)  // largest copy within a GPU's memory

enum { GPU_LINKS_GEMM_SIZE = 8192, GPU_LINKS_GEMM_ALIGNMENT = 256, GPU_LINKS_GEMM_RUNS = 20 };

// Smaller GEMMs and copies are not measured. They take little longer than their launches, so their times say little
// about the GPU.
enum { GPU_LINKS_LEAST_GEMM = 2048, GPU_LINKS_LEAST_COPY = 64 << 20 };
enum { NVML_P2P_READ = 0, NVML_P2P_NVLINK = 2 };  // nvmlGpuP2PCapsIndex_t; the status 0 means that it works

// Each rank sends this to all ranks.
typedef struct {
    char pci_bus_id[32];
    char nccl_host[64];  // NCCL_HOSTID, or the host's name: if two ranks' differ, NCCL connects them as two hosts
} LinkCard;

typedef struct {
    int (*init)(void);
    int (*device)(const char *pci_bus_id, void **device);  // nvmlDeviceGetHandleByPciBusId_v2
    int (*p2p_status)(void *from, void *to, int capability, int *status);
} LinkNvml;

typedef struct {
    Fsdp *f;
    const Comm *comm;
    const Gemm *gemm;
    char *room;  // [room_bytes] this rank's sums of gradients
    int64_t room_bytes, pair_bytes;
    LinkCard *cards;  // [world]
    LinkNvml nvml;    // init is NULL without NVML
    Comm pairs_comm;  // all ranks, without shard groups and replicas
    Nccl pairs;       // for pairs that do not use copy engines; valid if pairs_open
    bool pairs_open;
    cudaEvent_t begin, end;
} GpuLinks;

static inline double gpu_links_seconds(const GpuLinks *g) {
    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, g->begin, g->end));
    return ms * 1e-3;
}

// LinkOps.collective
static inline double gpu_links_collective(void *context, LinkCollective c, int64_t runs) {
    GpuLinks *g = (GpuLinks *)context;
    const cudaStream_t stream = g->f->in.nccl->stream;
    CUDA_CHECK(cudaEventRecord(g->begin, stream));
    for (int64_t i = 0; i < runs; i++) {
        if (c == LINK_REDUCE) fsdp_reduce_scatter(g->f, 0);
        if (c == LINK_REPLICAS) fsdp_reduce_replicas(g->f, 0, true);
        if (c != LINK_GATHER) continue;
        fsdp_invalidate(&g->f->weights);
        fsdp_prefetch(g->f, 0);
    }
    CUDA_CHECK(cudaEventRecord(g->end, stream));
    nccl_wait(g->f->in.nccl, g->end);
    return gpu_links_seconds(g);
}

// True if this rank reads the memory of rank `peer` by copy engines: if copy engines are in use, and both ranks are in
// one shard group.
static inline bool gpu_links_reads(const GpuLinks *g, int64_t peer) {
    const Comm *c = g->comm;
    return g->f->transport.kind == TRANSPORT_COPY_ENGINES && peer / c->shard_size == c->replica;
}

// LinkOps.pair
static inline double gpu_links_pair(void *context, int64_t peer, int64_t runs) {
    GpuLinks *g = (GpuLinks *)context;
    const bool reads = gpu_links_reads(g, peer);
    Nccl *n = reads ? g->f->in.nccl : &g->pairs;
    const size_t bytes = (size_t)g->pair_bytes;
    char *in = g->room + g->pair_bytes;
    CUDA_CHECK(cudaEventRecord(g->begin, n->stream));
    for (int64_t i = 0; i < runs; i++) {
        if (reads) {
            const int64_t from = peer % g->comm->shard_size;
            CUDA_CHECK(peer_copy(&g->f->transport.peers, from, g->room, in, g->pair_bytes, n->stream));
            continue;
        }
        nccl_begin(n, "exchange between two ranks", NO_LAYER);
        NCCL_CHECK(ncclSend(g->room, bytes, ncclUint8, (int)peer, n->comms[COMM_WORLD], n->stream));
        NCCL_CHECK(ncclRecv(in, bytes, ncclUint8, (int)peer, n->comms[COMM_WORLD], n->stream));
        nccl_end(n);
    }
    CUDA_CHECK(cudaEventRecord(g->end, n->stream));
    nccl_wait(n, g->end);
    return gpu_links_seconds(g);
}

static inline void gpu_links_load_nvml(LinkNvml *n) {
    void *handle = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!handle) return;
    *(void **)&n->init = dlsym(handle, "nvmlInit_v2");
    *(void **)&n->device = dlsym(handle, "nvmlDeviceGetHandleByPciBusId_v2");
    *(void **)&n->p2p_status = dlsym(handle, "nvmlDeviceGetP2PStatus");
    if (!n->init || !n->device || !n->p2p_status || n->init()) n->init = NULL;
}

// True if NVML says that GPU `from` of this host has a capability (NVML_P2P_READ, NVML_P2P_NVLINK) for GPU `to`.
static inline bool gpu_links_can(const LinkNvml *n, void *from, void *to, int capability) {
    int status = -1;
    return n->p2p_status(from, to, capability, &status) == 0 && status == 0;
}

// LinkOps.path
static inline LinkPath gpu_links_path(void *context, int64_t peer, bool same_host) {
    const GpuLinks *g = (const GpuLinks *)context;
    const LinkCard *own = &g->cards[g->comm->rank], *other = &g->cards[peer];
    const char *disabled = getenv("NCCL_P2P_DISABLE");
    void *from = NULL, *to = NULL;
    if (!same_host) return LINK_NETWORK;
    if (!gpu_links_reads(g, peer)) {
        if (strcmp(own->nccl_host, other->nccl_host) != 0) return LINK_NETWORK;
        if (disabled && strtol(disabled, NULL, 0) == 1) return LINK_HOST_MEMORY;
    }
    if (!g->nvml.init || g->nvml.device(own->pci_bus_id, &from) || g->nvml.device(other->pci_bus_id, &to))
        return LINK_UNKNOWN;
    if (gpu_links_can(&g->nvml, from, to, NVML_P2P_NVLINK)) return LINK_NVLINK;
    return gpu_links_can(&g->nvml, from, to, NVML_P2P_READ) ? LINK_PCIE : LINK_HOST_MEMORY;
}

// LinkOps.open_pairs. Opens no communicator if copy engines connect all ranks.
static inline bool gpu_links_open_pairs(void *context, char *reason, size_t capacity) {
    GpuLinks *g = (GpuLinks *)context;
    const Comm *c = g->comm;
    if (g->f->transport.kind == TRANSPORT_COPY_ENGINES && c->replicas == 1) return true;
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    const int64_t partners = min_i64(c->world - 1, 2 * LINKS_PARTNERS);
    const double least = comm_min(c, COMM_WORLD, (double)available) / 1048576,
                 needed = (double)(NCCL_OVERHEAD_BYTES + partners * GPU_LINKS_PARTNER_BYTES) / 1048576;
    if (least < needed) {
        format_checked(reason, capacity, "NCCL may need %.0f MiB for them, and a GPU has only %.0f MiB free", needed,
                       least);
        return false;
    }
    g->pairs_comm = *c;
    g->pairs_comm.shard_size = g->pairs_comm.replicas = 1;
    nccl_open(&g->pairs, &g->pairs_comm);
    return g->pairs_open = true;
}

// Returns the FLOP/s of a square BF16 GEMM of random numbers, up to GPU_LINKS_GEMM_SIZE on a side, whose matrices fit
// the room. 0: GPU_LINKS_LEAST_GEMM does not fit.
static inline double gpu_links_gemm(const GpuLinks *g) {
    const cudaStream_t stream = g->gemm->stream;
    const int64_t fits = (int64_t)sqrt((double)g->room_bytes / (3 * sizeof(bf16))),
                  n = min_i64(fits, GPU_LINKS_GEMM_SIZE) / GPU_LINKS_GEMM_ALIGNMENT * GPU_LINKS_GEMM_ALIGNMENT;
    bf16 *a = (bf16 *)g->room, *b = a + n * n, *d = b + n * n;
    if (n < GPU_LINKS_LEAST_GEMM) return 0;
    gemm_fill(a, 2 * n * n, 0, 0, FP8_E4M3, stream);
    const QTensor w = qtensor_bf16(a), x = qtensor_bf16(b);
    GemmPlan p = gemm_describe("--check-links", GEMM_FPROP, n, n, n,
                               gemm_spec(g->f->plan.precision, recipe_row(RECIPE_BF16), GEMM_FPROP), false);
    gemm_choose(g->gemm, &p, d, &w, &x, NULL);
    for (int i = 0; i < 2 * GPU_LINKS_GEMM_RUNS; i++) {  // the first half warms the GPU up
        if (i == GPU_LINKS_GEMM_RUNS) CUDA_CHECK(cudaEventRecord(g->begin, stream));
        gemm_run(g->gemm, &p, d, &w, &x, NULL, false);
    }
    CUDA_CHECK(cudaEventRecord(g->end, stream));
    CUDA_CHECK(cudaEventSynchronize(g->end));
    const double flops = gemm_flops(&p) * GPU_LINKS_GEMM_RUNS;
    gemm_destroy(&p);
    return flops / gpu_links_seconds(g);
}

// LinkOps.gpu
static inline LinkGpu gpu_links_gpu(void *context) {
    const GpuLinks *g = (const GpuLinks *)context;
    const cudaStream_t stream = g->gemm->stream;
    LinkGpu alone;
    const int64_t bytes = min_i64(g->room_bytes / 2, GPU_LINKS_COPY_BYTES);
    alone.copy = bytes < GPU_LINKS_LEAST_COPY ? 0 : profile_copy_rate(g->room, bytes, stream);
    alone.gemm = gpu_links_gemm(g);
    CUDA_CHECK(cudaMemsetAsync(g->room, 0, (size_t)g->room_bytes, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return alone;
}

// LinkOps.close
static inline void gpu_links_close(void *context) {
    GpuLinks *g = (GpuLinks *)context;
    fsdp_invalidate(&g->f->weights);
    if (g->pairs_open) nccl_close(&g->pairs);
    CUDA_CHECK(cudaEventDestroy(g->begin));
    CUDA_CHECK(cudaEventDestroy(g->end));
    free(g->cards);
    free(g);
}

// Gathers the cards of all ranks.
static inline void gpu_links_gather_cards(GpuLinks *g) {
    const Comm *c = g->comm;
    const char *nccl_host = getenv("NCCL_HOSTID");
    int index;
    g->cards = (LinkCard *)xcalloc((size_t)c->world, sizeof *g->cards);
    LinkCard *own = &g->cards[c->rank];
    CUDA_CHECK(cudaGetDevice(&index));
    CUDA_CHECK(cudaDeviceGetPCIBusId(own->pci_bus_id, (int)sizeof own->pci_bus_id, index));
    snprintf(own->nccl_host, sizeof own->nccl_host, "%s", nccl_host ? nccl_host : c->host);
    comm_all_gather(c, COMM_WORLD, own, g->cards, (int64_t)sizeof *own);
}

// Returns the functions and sizes that --check-links uses. All ranks call it, after trainer_create and before the
// weights have values.
// `gemm` runs on the compute stream.
static inline LinkOps gpu_links(Fsdp *f, const Comm *c, const Gemm *gemm) {
    GpuLinks *g = (GpuLinks *)xcalloc(1, sizeof *g);
    const Transport *t = &f->transport;
    const bool engines = t->kind == TRANSPORT_COPY_ENGINES, fp32 = t->reduce_dtype == REDUCE_FP32,
               codes = t->reduce_dtype == REDUCE_FP8;  // one byte for each gradient of a layer's matrices
    const int64_t element = t->fp32_sums ? sizeof(float) : sizeof(bf16), all = fsdp_sums_elements(f);
    LinkOps ops;
    memset(&ops, 0, sizeof ops);
    g->f = f, g->comm = c, g->gemm = gemm;
    g->room = t->fp32_sums ? (char *)t->sums_fp32 : (char *)t->sums, g->room_bytes = all * element;
    g->pair_bytes = min_i64(LINKS_MOST_BYTES, g->room_bytes / 2 / ARENA_ALIGNMENT * ARENA_ALIGNMENT);
    CUDA_CHECK(cudaEventCreate(&g->begin));
    CUDA_CHECK(cudaEventCreate(&g->end));
    gpu_links_gather_cards(g);
    gpu_links_load_nvml(&g->nvml);
    ops.context = g, ops.within = engines ? "copy engines" : "NCCL", ops.across = "NCCL";
    ops.pair_bytes = g->pair_bytes;
    ops.collective = gpu_links_collective, ops.pair = gpu_links_pair, ops.path = gpu_links_path;
    ops.open_pairs = gpu_links_open_pairs, ops.gpu = gpu_links_gpu, ops.close = gpu_links_close;
    if (fsdp_is_sharded(f)) {
        ops.bytes[LINK_GATHER] = (double)(fsdp_layer_matrices(f) * (fsdp_gathers_fp8(f, 0) ? 1 : 2));
        ops.bytes[LINK_REDUCE] = (double)(gathered_elements(&f->plan.shard, 0) * (fp32 && !engines ? 4 : 2)) -
                                 (codes ? (double)fsdp_layer_matrices(f) : 0);
    }
    if (f->plan.replicas > 1)
        ops.bytes[LINK_REPLICAS] = (double)(shard_elements(&f->plan.shard, 0) * (fp32 || t->fp32_sums ? 4 : 2)) -
                                   (codes ? (double)f->gradients.fp8_layout.matrices : 0);
    return ops;
}

#endif
