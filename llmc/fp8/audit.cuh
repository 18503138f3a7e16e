// --fp8-audit on the GPU: compares FP8 data that a cast has written with the bf16 values that it was made from.
// (fp16_weights.cuh compares FP8 weights with FP16 masters.) A step with an audit is slower: audits are meant to be
// rare. The last bits of the sums of squares depend on the order in which thread blocks end.
#ifndef LLMC_AUDIT_CUH
#define LLMC_AUDIT_CUH

#include "quantize_kernels.cuh"

// A thread block is 8 warps side by side. A warp reads 8 columns of 32 rows, each lane one row. So in columnwise data
// the lanes read contiguous codes. When one warp reads part of a 32-byte sector of rowwise data or of the source, the
// rest is in L1 for the next warp.
enum {
    AUDIT_THREADS = 256,
    AUDIT_WARPS = AUDIT_THREADS / WARP_SIZE,
    AUDIT_COLUMNS = 8 * AUDIT_WARPS,
    AUDIT_BLOCKS_PER_SM = 4
};

// Rowwise or columnwise data of a QTensor, and one or two destinations for its sums.
typedef struct {
    const uint8_t *codes;
    const void *scales;
    bool transposed;  // columnwise data
    ScaleGranularity granularity;
    Fp8Format format;
    AuditSums *to[2];
} AuditView;

// Sums `s` over the threads of the block, and adds the result to *to[0] and also to *to[1] (device memory; either may
// be NULL).
__device__ static inline void audit_publish(AuditSums *const to[2], AuditSums s) {
    __shared__ AuditSums of_warp[AUDIT_WARPS];
    s.count = warp_sum(s.count), s.flushed = warp_sum(s.flushed), s.saturated = warp_sum(s.saturated);
    s.signal = warp_sum(s.signal), s.noise = warp_sum(s.noise);
    s.amax = warp_max_u32(s.amax), s.scale_max = warp_max_u32(s.scale_max),
    s.scale_inv_max = warp_max_u32(s.scale_inv_max);
    if (threadIdx.x % WARP_SIZE == 0) of_warp[threadIdx.x / WARP_SIZE] = s;
    __syncthreads();
    AuditSums *sums = threadIdx.x == 0 ? to[0] : threadIdx.x == 1 ? to[1] : NULL;
    if (!sums) return;
    s = of_warp[0];
    for (int w = 1; w < AUDIT_WARPS; w++) audit_merge(&s, &of_warp[w]);
    atomicAdd(&sums->count, s.count);
    atomicAdd(&sums->flushed, s.flushed);
    atomicAdd(&sums->saturated, s.saturated);
    atomicAdd(&sums->signal, s.signal);
    atomicAdd(&sums->noise, s.noise);
    atomicMax(&sums->amax, s.amax);
    atomicMax(&sums->scale_max, s.scale_max);
    atomicMax(&sums->scale_inv_max, s.scale_inv_max);
}

// Compares 8 values of one row with their 8 codes, which share a scale.
__device__ static inline void audit_vector(AuditSums *sums, Bf16x8 v, const uint8_t *codes, float scale_inv,
                                           Fp8Format format) {
    float x[8];
    bf16x8_unpack(x, v);
    const uint2 words = *(const uint2 *)codes;
#pragma unroll
    for (int j = 0; j < 8; j++)
        audit_add(sums, x[j], (uint8_t)((j < 4 ? words.x : words.y) >> (8 * (j % 4))), scale_inv, format);
}

// Compares 8 values of one row of the matrix [R, columns] with the view's codes.
__device__ static inline void audit_view(AuditSums *sums, const AuditView &view, Bf16x8 v, int64_t row, int64_t column,
                                         int64_t R, int64_t columns) {
    if (!view.transposed) {  // at every granularity the 8 columns share a scale
        const float scale_inv =
            scale_load(view.granularity, view.scales, scale_index(view.granularity, row, column, R, columns));
        audit_vector(sums, v, view.codes + row * columns + column, scale_inv, view.format);
        return;
    }
    float x[8], scale_inv[8];
    uint8_t code[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        code[j] = view.codes[(column + j) * R + row];
        scale_inv[j] =
            scale_load(view.granularity, view.scales, scale_index(view.granularity, column + j, row, columns, R));
    }
    bf16x8_unpack(x, v);
#pragma unroll
    for (int j = 0; j < 8; j++) audit_add(sums, x[j], code[j], scale_inv[j], view.format);
}

template <class Source>
static __global__ void __launch_bounds__(AUDIT_THREADS)
    audit_kernel(const Source source, const AuditView view, int64_t R, int64_t C) {
    grid_dependency_wait();
    const int64_t column_tiles = ceil_div(C, AUDIT_COLUMNS), tiles = ceil_div(R, WARP_SIZE) * column_tiles;
    AuditSums sums = {};
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t row = tile / column_tiles * WARP_SIZE + threadIdx.x % WARP_SIZE,
                      column = tile % column_tiles * AUDIT_COLUMNS + threadIdx.x / WARP_SIZE * 8;
        if (row >= R || column >= C) continue;
        typename Source::Column of_column = {};
        typename Source::Raw raw;
        Bf16x8 v[Source::OUTPUTS];
        uint32_t unused = 0;
        source.load_column(&of_column, column);
        source.load(&raw, row, column);
        source.values(v, raw, of_column, &unused);
#pragma unroll
        for (int o = 0; o < Source::OUTPUTS; o++)
            audit_view(&sums, view, v[o], row, o * C + column, R, Source::OUTPUTS * C);
    }
    audit_publish(view.to, sums);
}

static inline unsigned audit_blocks(int64_t n) {
    return (unsigned)max_i64(1, min_i64(n, (int64_t)device_sm_count() * AUDIT_BLOCKS_PER_SM));
}

// Compares the codes of `out`, which an earlier enqueued cast of the source has written, with the source's values. Adds
// the sums to *out.audit[ROWWISE] and *out.audit[COLUMNWISE] (device memory, either may be NULL). Data that is NULL in
// `out` adds nothing. If the granularities make rowwise and columnwise codes equal (audit_shares_codes), they are read
// once, and the result is added to both sums.
template <class Source>
static inline void audit_source(QTensor out, Source source, int64_t R, int64_t C, cudaStream_t stream) {
    AuditView row = {out.rowwise, out.rowwise_scale_inv,     false, out.row_granularity,
                     out.format,  {out.audit[ROWWISE], NULL}};
    AuditView col = {out.columnwise, out.columnwise_scale_inv,     true, out.col_granularity,
                     out.format,     {out.audit[COLUMNWISE], NULL}};
    if (row.codes && row.to[0] && col.codes && audit_shares_codes(out.row_granularity, out.col_granularity)) {
        row.to[1] = col.to[0];
        col.to[0] = NULL;
    }
    const unsigned blocks = audit_blocks(ceil_div(R, WARP_SIZE) * ceil_div(C, AUDIT_COLUMNS));
    if (row.codes && row.to[0]) CUDA_LAUNCH(audit_kernel<Source>, blocks, AUDIT_THREADS, 0, stream, source, row, R, C);
    if (col.codes && col.to[0]) CUDA_LAUNCH(audit_kernel<Source>, blocks, AUDIT_THREADS, 0, stream, source, col, R, C);
}

// ---- A contiguous part of a tensor with one scale

static __global__ void __launch_bounds__(AUDIT_THREADS)
    audit_part_kernel(AuditSums *to, const bf16 *x, const uint8_t *codes, const float *scale_inv, int64_t n,
                      Fp8Format format) {
    grid_dependency_wait();
    const int64_t step = (int64_t)gridDim.x * AUDIT_THREADS;
    const float inverse = *scale_inv;
    AuditSums sums = {};
    for (int64_t i = blockIdx.x * (int64_t)AUDIT_THREADS + threadIdx.x; i < n / 8; i += step)
        audit_vector(&sums, bf16x8_load(x + 8 * i), codes + 8 * i, inverse, format);
    AuditSums *const destinations[2] = {to, NULL};
    audit_publish(destinations, sums);
}

// Adds the audit sums of n consecutive elements, which share the scale whose inverse is *scale_inv, to *to. n is a
// multiple of 8; with 0 it does nothing. Device pointers; x is aligned to 16 bytes, codes to 8.
static inline void audit_part(AuditSums *to, const bf16 *x, const uint8_t *codes, const float *scale_inv, int64_t n,
                              Fp8Format format, cudaStream_t stream) {
    if (n < 0 || n % 8) die("audit_part: %lld elements: need a multiple of 8", (long long)n);
    if (n == 0) return;
    require_aligned16(x, "audit_part", "x");
    CUDA_LAUNCH(audit_part_kernel, audit_blocks(ceil_div(n, 8 * AUDIT_THREADS)), AUDIT_THREADS, 0, stream, to, x, codes,
                scale_inv, n, format);
}

#endif
