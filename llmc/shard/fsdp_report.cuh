// Opens the memory of peers for copy engines, and prints how weights and gradients are communicated.
#ifndef LLMC_FSDP_REPORT_CUH
#define LLMC_FSDP_REPORT_CUH

#include "fsdp.cuh"

// Opens each rank's arena, memory [bytes], to the other ranks of its shard group, if copy engines are to be tried. If
// that fails on any rank, all ranks use NCCL, and rank 0 prints the reason of the lowest rank on which it failed. With
// `required` the run then ends with this reason instead.
static inline void fsdp_open_peers(Fsdp *f, const Comm *c, char *memory, int64_t bytes, bool required) {
    char reason[256] = "";
    if (f->transport.kind != TRANSPORT_COPY_ENGINES) return;
    if (transport_open_peers(&f->transport, c, memory, bytes, reason, sizeof reason)) return;
    const double first = comm_min(c, COMM_WORLD, *reason ? (double)c->rank : INFINITY);
    comm_broadcast(c, COMM_WORLD, (int64_t)first, reason, (int64_t)sizeof reason);
    if (required) die_with(EXIT_UNSUPPORTED, "--copy-engines on: %s", reason);
    printf("no copy engines: %s\n", reason);
}

// Returns the dtype in which the layers' matrices are all-gathered, if weights are sharded.
static inline const char *fsdp_gather_dtype(const Fsdp *f) {
    if (f->plan.weight_source != FSDP_WEIGHTS_GATHER_FP8) return "bf16";
    return f->plan.precision->any_bf16 ? "fp8 (bf16 for layers with bf16 linears)" : "fp8";
}

// Prints the all-gather dtype among the settings of a dry run, if weights are sharded.
static inline void fsdp_print_gathers(const Fsdp *f) {
    if (fsdp_is_sharded(f)) printf("%-26s %s\n", "all-gather dtype", fsdp_gather_dtype(f));
}

// Returns the dtype in which gradients outside FP8 sums are added up over the ranks of a shard group, or over replicas.
static inline const char *fsdp_reduce_dtype(const Fsdp *f, bool over_replicas) {
    const Transport *t = &f->transport;
    const bool fp32 = over_replicas ? t->fp32_sums : t->kind == TRANSPORT_COPY_ENGINES;
    return fp32 || t->reduce_dtype == REDUCE_FP32 ? "fp32" : "bf16";
}

// Prints in one line how the ranks communicate weights and gradients. Call it after fsdp_open_peers, which may change
// that. Prints nothing for one rank.
static inline void fsdp_print_transport(const Fsdp *f) {
    const bool engines = f->transport.kind == TRANSPORT_COPY_ENGINES, sharded = fsdp_is_sharded(f);
    if (f->plan.world == 1) return;
    printf("transport %s", engines ? "copy engines" : "NCCL");
    if (sharded) printf("; all-gather in %s", fsdp_gather_dtype(f));
    printf("; gradients reduced in %s%s",
           f->transport.reduce_dtype == REDUCE_FP8 ? "fp8, and outside the layers' matrices in " : "",
           fsdp_reduce_dtype(f, !sharded));
    if (sharded && f->plan.replicas > 1)
        printf(" (over replicas in %s%s)", fsdp_reduce_dtype(f, true), engines ? " by NCCL" : "");
    printf("\n");
}

#endif
