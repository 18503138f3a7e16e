// Chooses the GPU of each rank, checks that this program can run on it, and estimates the memory of CUDA and NCCL.
#ifndef LLMC_DEVICE_CUH
#define LLMC_DEVICE_CUH

#include "../config/flops.h"
#include "../fp8/gemm.cuh"
#include "comm_nccl.cuh"

// Assumed GPU memory in use outside the arena, without NCCL's: context, kernels, cuBLASLt. An estimate, after
// measurements with cudaMemGetInfo on an H200 with CUDA 13.0.
#define CUDA_OVERHEAD_BYTES (640ll << 20)

// Each rank sends this description of its GPU to all ranks.
typedef struct {
    char host[64];
    cudaUUID_t uuid;
    int visible;  // number of GPUs that the rank sees
} RankGpu;

// Finds the first two ranks i < j of a host that have the same GPU. Returns false if all GPUs differ.
static inline bool find_shared_gpu(const RankGpu *gpus, int64_t world, int64_t *i, int64_t *j) {
    for (*j = 1; *j < world; ++*j)
        for (*i = 0; *i < *j; ++*i)
            if (strcmp(gpus[*i].host, gpus[*j].host) == 0 &&
                memcmp(&gpus[*i].uuid, &gpus[*j].uuid, sizeof gpus[*i].uuid) == 0)
                return true;
    return false;
}

// Writes the UUID in the format of nvidia-smi -L.
static inline void format_uuid(char *out, size_t capacity, const cudaUUID_t *uuid) {
    const unsigned char *b = (const unsigned char *)uuid->bytes;
    format_checked(out, capacity, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                   b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

// The UUID of the GPU that this process uses.
static inline Words device_uuid(void) {
    cudaDeviceProp device;
    int index;
    Words uuid;
    CUDA_CHECK(cudaGetDevice(&index));
    CUDA_CHECK(cudaGetDeviceProperties(&device, index));
    format_uuid(uuid.text, sizeof uuid.text, &device.uuid);
    return uuid;
}

// Dies if two ranks of a host have the same GPU.
static inline void require_own_gpus(const RankGpu *gpus, int64_t world) {
    char uuid[64];
    int64_t i, j;
    if (!find_shared_gpu(gpus, world, &i, &j)) return;
    format_uuid(uuid, sizeof uuid, &gpus[j].uuid);
    die_with(
        EXIT_USAGE,
        "ranks %lld and %lld on %s have the same GPU, %s (visible GPUs: rank %lld has %d, rank %lld has %d); every "
        "rank needs its own GPU: start at most %d there, or set CUDA_VISIBLE_DEVICES to another GPU for each "
        "rank (for tests, --share-gpu lets them share it)",
        (long long)i, (long long)j, gpus[j].host, uuid, (long long)i, gpus[i].visible, (long long)j, gpus[j].visible,
        gpus[j].visible);
}

// Lets NCCL connect ranks that share a GPU. NCCL refuses two ranks of one host on one GPU, so NCCL_HOSTID gives every
// rank a host of its own.
static inline void nccl_hosts_apart(const Comm *comm) {
    char host[96];
    format_checked(host, sizeof host, "%s-rank%lld", comm->host, (long long)comm->rank);
    if (setenv("NCCL_HOSTID", host, 1)) die("setenv NCCL_HOSTID failed: %s", strerror(errno));
}

// Chooses GPU local_rank modulo the number of GPUs that this rank sees. Dies if it sees none, or, without `share`, if
// two ranks of a host have the same GPU.
static inline void choose_device(const Comm *comm, bool share, cudaDeviceProp *device) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0)
        die_with(EXIT_UNSUPPORTED, "no usable GPU (%s); the CPU trainer is train_fp8, and --dry-run needs no GPU",
                 error != cudaSuccess ? cudaGetErrorString(error) : "none found");
    const int index = (int)(comm->local_rank % count);
    CUDA_CHECK(cudaGetDeviceProperties(device, index));
    RankGpu *gpus = (RankGpu *)xcalloc((size_t)comm->world, sizeof *gpus), *own = &gpus[comm->rank];
    memcpy(own->host, comm->host, sizeof own->host);
    own->uuid = device->uuid, own->visible = count;
    comm_all_gather(comm, COMM_WORLD, own, gpus, (int64_t)sizeof *own);
    if (share) nccl_hosts_apart(comm);
    else require_own_gpus(gpus, comm->world);
    free(gpus);
    CUDA_CHECK(cudaSetDevice(index));
}

// Writes the value of CUDA_ARCH for `make`, for GPUs of compute capability major.minor.
static inline void format_cuda_arch(char *out, size_t capacity, int major, int minor) {
    format_checked(out, capacity, "%d%s", 10 * major + minor, major == 9 ? "a" : "");  // only sm_90a has wgmma
}

// Dies if the GPU cannot run the kernels of this program, because they were compiled for another architecture.
static inline void check_architecture(const cudaDeviceProp *device) {
    char arch[16];
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, (const void *)gemm_alpha_kernel);
    if (error == cudaSuccess) return;
    if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction) CUDA_CHECK(error);
    format_cuda_arch(arch, sizeof arch, device->major, device->minor);
    die_with(EXIT_UNSUPPORTED,
             "this program was built for sm_%s and the GPU is %s with compute capability %d.%d; rebuild with "
             "make CUDA_ARCH=%s",
             CUDA_ARCH, device->name, device->major, device->minor, arch);
}

// Chooses the rank's GPU. Dies if there is none, or if it cannot run this program with these options.
static inline void open_device(const Options *o, const Comm *comm) {
    cudaDeviceProp device;
    choose_device(comm, o->share_gpu, &device);
    if (device.major < 8)
        die_with(EXIT_UNSUPPORTED, "%s has compute capability %d.%d; 8.0 or above is needed", device.name, device.major,
                 device.minor);
    check_architecture(&device);
    if (comm->rank == 0 && (device.major != 9 || device.minor != 0))
        warn("this program was never run on a GPU of compute capability %d.%d, only on 9.0: scripts/check_gpu.sh tests "
             "it here, and docs/GPUS.md says what is known",
             device.major, device.minor);
    if (o->precision == PRECISION_FP8 && !o->fp8_emulate) gemm_require_native(options_recipe(o));
}

// Estimates the bytes of GPU memory in use outside the arena, for the memory plan.
static inline int64_t memory_overhead(const Comm *comm) {
    return CUDA_OVERHEAD_BYTES + nccl_communicators(comm->world, comm->shard_size) * NCCL_OVERHEAD_BYTES;
}

// Returns the bytes that the memory plan may take: free memory, plus CUDA_OVERHEAD_BYTES, which the plan counts and
// CUDA has already allocated.
static inline int64_t memory_available(const Comm *) {
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return (int64_t)available + CUDA_OVERHEAD_BYTES;
}

// Writes the versions of the libraries as "CUDA 13000, cuBLASLt ..., NCCL ...".
static inline void format_versions(char *out, size_t capacity) {
    int nccl = 0;
    NCCL_CHECK(ncclGetVersion(&nccl));
    format_checked(out, capacity, "CUDA %d, cuBLASLt %zu, NCCL %d.%d.%d", CUDART_VERSION, cublasLtGetVersion(),
                   nccl / 10000, nccl / 100 % 100, nccl % 100);
}

// Describes the GPU that open_device chose.
static inline DeviceInfo device_info(const Options *o) {
    DeviceInfo d;
    cudaDeviceProp gpu;
    int index = 0;
    CUDA_CHECK(cudaGetDevice(&index));
    CUDA_CHECK(cudaGetDeviceProperties(&gpu, index));
    CUDA_CHECK(cudaDeviceGetPCIBusId(d.pci_bus_id, (int)sizeof d.pci_bus_id, index));
    format_checked(d.name, sizeof d.name, "%s", gpu.name);
    format_versions(d.versions, sizeof d.versions);
    d.peak_bf16 = o->peak_tflops > 0 ? o->peak_tflops * 1e12 : flops_peak_bf16(gpu.major, gpu.minor, gpu.name);
    return d;
}

#endif
