// Opens the memory of peers for copy engines, and prints how weights and gradients are communicated.
#ifndef LLMC_FSDP_REPORT_CUH
#define LLMC_FSDP_REPORT_CUH

#include "fsdp.cuh"

// Opens the arenas, memory [bytes], of the ranks of a shard group to each other, if options and hardware allow it. If
// it does not work on every rank, NCCL is used and rank 0 prints the reason; with `required` the run ends instead.
static inline void fsdp_open_peers(Fsdp *f, const Comm *c, char *memory, int64_t bytes, bool required) {
    char reason[256] = "";
    if (f->transport.kind != TRANSPORT_COPY_ENGINES) return;
    if (transport_open_peers(&f->transport, c, memory, bytes, reason, sizeof reason)) return;
    const double first = comm_min(c, COMM_WORLD, *reason ? (double)c->rank : INFINITY);
    comm_broadcast(c, COMM_WORLD, (int64_t)first, reason, (int64_t)sizeof reason);
    if (required) die_with(EXIT_UNSUPPORTED, "--copy-engines on: %s", reason);
    printf("no copy engines: %s\n", reason);
}

// Returns the dtype in which the matrices of layers are gathered.
static inline const char *fsdp_gather_dtype(const Fsdp *f) {
    if (f->weights != FSDP_WEIGHTS_GATHER_FP8) return "bf16";
    return f->precision->any_bf16 ? "fp8 (bf16 for layers with bf16 linears)" : "fp8";
}

// Prints this dtype among the settings of a dry run, if weights are sharded.
static inline void fsdp_print_gathers(const Fsdp *f) {
    if (fsdp_is_sharded(f)) printf("%-26s %s\n", "all-gather dtype", fsdp_gather_dtype(f));
}

// Prints in one line how several ranks communicate weights and gradients, which is known after fsdp_open_peers.
static inline void fsdp_print_transport(const Fsdp *f) {
    const bool engines = f->transport.kind == TRANSPORT_COPY_ENGINES;
    if (f->world == 1) return;
    printf("transport %s", engines ? "copy engines" : "NCCL");
    if (fsdp_is_sharded(f)) printf("; all-gather in %s", fsdp_gather_dtype(f));
    printf("; gradients reduced in %s%s\n", engines || f->transport.reduce_dtype == REDUCE_FP32 ? "fp32" : "bf16",
           engines && f->replicas > 1 ? ", over replicas by NCCL" : "");
}

#endif
