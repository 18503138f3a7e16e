// Opens the memory of peers for copy engines, and says how weights and gradients are communicated.
#ifndef LLMC_FSDP_REPORT_CUH
#define LLMC_FSDP_REPORT_CUH

#include "fsdp.cuh"

// Lets the ranks that share a copy of the weights read each other's arena, of `bytes` bytes at `memory`, where they can
// and may. If not, rank 0 says why for all; with `required`, that ends the run.
static inline void fsdp_open_peers(Fsdp *f, const Comm *c, char *memory, int64_t bytes, bool required) {
    char reason[256] = "";
    if (f->transport.kind != TRANSPORT_COPY_ENGINES) return;
    if (transport_open_peers(&f->transport, c, memory, bytes, reason, sizeof reason)) return;
    const double first = comm_min(c, COMM_WORLD, *reason ? (double)c->rank : INFINITY);
    comm_broadcast(c, COMM_WORLD, (int64_t)first, reason, (int64_t)sizeof reason);
    if (required) die_with(EXIT_UNSUPPORTED, "--copy-engines on: %s", reason);
    printf("\nNCCL moves weights and gradients, because %s\n", reason);
}

// Prints the dtype in which layers are gathered, after the settings.
static inline void fsdp_print_gathers(const Fsdp *f) {
    const char *dtype = f->weights != FSDP_WEIGHTS_GATHER_FP8 ? "bf16"
                        : f->precision->any_bf16              ? "FP8 where all of them is"
                                                              : "FP8";
    if (fsdp_is_sharded(f)) printf("%-26s %s\n", "layers are gathered in", dtype);
}

// Says how weights and gradients travel, which is known after fsdp_open_peers.
static inline void fsdp_print_transport(const Fsdp *f) {
    if (f->world == 1) return;
    if (f->transport.kind == TRANSPORT_COPY_ENGINES)
        printf("\nlayers and gradients travel by the GPUs' copy engines; gradients are added up in fp32%s\n",
               f->replicas == 1 ? "" : ", over replicas by NCCL");
    else
        printf("\nlayers and gradients travel by NCCL; gradients are reduced in %s\n",
               f->transport.reduce_dtype == REDUCE_FP32 ? "fp32" : "bf16");
}

#endif
