// RMSNorm (Zhang and Sennrich 2019), with the residual add before it and the residual gradient add after it.
//
//    rstd = 1 / sqrt(mean(x^2) + eps),   y = bf16(x * rstd * w)
//    n = x * rstd, g = dy * w:   dx = bf16(dresidual + rstd * (g - n * mean(g * n))),   dw = sum over rows of dy * n
//
// All arithmetic is fp32, so the sum of squares of a row must stay below 3e38. y is stored only if the caller wants it
// in bf16, for a GEMM. The forward kernel writes rstd, and the amax of y if the tensor has one current scale. A cast
// for FP8 GEMMs recomputes y, bit for bit, in its tile. Bytes per element: forward with residual reads 4 and writes 2
// (2 more for y); the cast reads 2 and writes 1 + 1; backward with dresidual reads 6 and writes 2. Sizes: any number of
// rows, C a multiple of 16 up to 16384, pointers aligned to 16 bytes. The bits of the results do not depend on the
// number of SMs or on the order of blocks.
#ifndef LLMC_RMSNORM_CUH
#define LLMC_RMSNORM_CUH

#include "../gpu/column_sums.cuh"
#include "../fp8/quantize.cuh"

enum { RMSNORM_MAX_C = 16384 };

// Returns y of 8 elements. The forward kernel and the cast call it, and its multiplications cannot be contracted, so
// both get equal bits.
__device__ static inline Bf16x8 rmsnorm_values(Bf16x8 x, float rstd, const float w[8]) {
    float f[8];
    bf16x8_unpack(f, x);
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = __fmul_rn(__fmul_rn(f[i], rstd), w[i]);
    return bf16x8_pack(f);
}

// A row belongs to THREADS threads (in forward, a whole block); each holds VECTORS times 8 of its values in registers.
#define RMSNORM_COLUMN(i) (8 * ((i) * THREADS + (int)threadIdx.x % THREADS))

// Reports input that is not finite, or whose sum of squares overflows fp32. Norms are numbered in the order of the
// forward pass, and *first becomes the number of the first norm that reads such a row.
typedef struct {
    uint32_t *first;  // lowered to `number`; NULL: no check
    uint32_t number;
} RmsnormWatch;

// Normalizes the rows of x. With RESIDUAL, x is the residual: the kernel first computes x_out = bf16(x + delta), and
// normalizes x_out.
typedef struct {
    bf16 *x_out, *y;
    float *rstd;
    uint32_t *amax;
    const bf16 *x, *delta, *weight;
    int64_t R;
    int C;
    float eps;
    RmsnormWatch watch;
} RmsnormForward;

template <int VECTORS, int THREADS, bool RESIDUAL>
static __global__ void __launch_bounds__(THREADS, 1024 / THREADS) rmsnorm_forward_kernel(const RmsnormForward p) {
    grid_dependency_wait();
    __shared__ float scratch[2][THREADS / WARP_SIZE];
    uint32_t packed_amax = 0;
    int parity = 0;
    for (int64_t row = blockIdx.x; row < p.R; row += gridDim.x, parity ^= 1) {
        Bf16x8 x[VECTORS] = {}, delta[VECTORS] = {};
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (RMSNORM_COLUMN(i) >= p.C) continue;
            x[i] = bf16x8_load(p.x + row * p.C + RMSNORM_COLUMN(i));
            if (RESIDUAL) delta[i] = bf16x8_load(p.delta + row * p.C + RMSNORM_COLUMN(i));
        }
        float squares = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float f[8], d[8];
            bf16x8_unpack(f, x[i]);
            if (RESIDUAL) {
                bf16x8_unpack(d, delta[i]);
                for (int k = 0; k < 8; k++) f[k] += d[k];
                x[i] = bf16x8_pack(f);
                if (RMSNORM_COLUMN(i) < p.C) bf16x8_store(p.x_out + row * p.C + RMSNORM_COLUMN(i), x[i]);
                bf16x8_unpack(f, x[i]);
            }
            for (int k = 0; k < 8; k++) squares = fmaf(f[k], f[k], squares);
        }
        const float sum = group_sum<THREADS / WARP_SIZE>(squares, scratch[parity], 0);
        const float rstd = 1.0f / sqrtf(sum / (float)p.C + p.eps);
        if (threadIdx.x == 0) p.rstd[row] = rstd;
        if (threadIdx.x == 0 && !float_is_positive(rstd) && p.watch.first) atomicMin(p.watch.first, p.watch.number);
        if (!p.y && !p.amax) continue;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (RMSNORM_COLUMN(i) >= p.C) continue;
            float w[8];
            bf16x8_unpack(w, bf16x8_load(p.weight + RMSNORM_COLUMN(i)));
            const Bf16x8 y = rmsnorm_values(x[i], rstd, w);
            if (p.y) bf16x8_store(p.y + row * p.C + RMSNORM_COLUMN(i), y);
            packed_amax = amax_update(packed_amax, y);
        }
    }
    if (p.amax) amax_publish(p.amax, packed_amax);
}

static inline void rmsnorm_check(const char *function, int64_t R, int64_t C, const void *x, const void *weight) {
    if (R < 1 || C < 16 || C % 16 || C > RMSNORM_MAX_C)
        die("%s: %lld rows of %lld values: need at least 1 row, and a multiple of 16 values up to %d", function,
            (long long)R, (long long)C, RMSNORM_MAX_C);
    require_aligned16(x, function, "x");
    require_aligned16(weight, function, "weight");
}

// Calls LAUNCH(VECTORS, THREADS) for rows of C values: THREADS threads hold a row, each up to VECTORS times 8 values.
#define RMSNORM_DISPATCH(C, LAUNCH)           \
    do {                                      \
        if ((C) <= 1024) LAUNCH(1, 128);      \
        else if ((C) <= 2048) LAUNCH(2, 128); \
        else if ((C) <= 4096) LAUNCH(4, 128); \
        else if ((C) <= 8192) LAUNCH(4, 256); \
        else LAUNCH(4, 512);                  \
    } while (0)

static inline void rmsnorm_forward_launch(RmsnormForward p, cudaStream_t stream) {
    const int64_t slots = 8ll * device_sm_count();  // blocks of 128 threads that the whole GPU runs at once
#define RMSNORM_LAUNCH(VECTORS, THREADS)                                                                         \
    do {                                                                                                         \
        const unsigned blocks = (unsigned)min_i64(p.R, slots * 128 / (THREADS));                                 \
        if (p.delta) CUDA_LAUNCH(rmsnorm_forward_kernel<VECTORS, THREADS, true>, blocks, THREADS, 0, stream, p); \
        else CUDA_LAUNCH(rmsnorm_forward_kernel<VECTORS, THREADS, false>, blocks, THREADS, 0, stream, p);        \
    } while (0)
    RMSNORM_DISPATCH(p.C, RMSNORM_LAUNCH);
#undef RMSNORM_LAUNCH
}

// Computes rstd [R] fp32, and y [R, C] unless NULL, from x [R, C] and weight [C], and raises *amax to max |y| unless
// NULL. Returns the bytes moved.
static inline int64_t rmsnorm_forward(bf16 *y, float *rstd, uint32_t *amax, const bf16 *x, const bf16 *weight,
                                      int64_t R, int64_t C, float eps, RmsnormWatch watch, cudaStream_t stream) {
    rmsnorm_check("rmsnorm_forward", R, C, x, weight);
    require_aligned16(y, "rmsnorm_forward", "y");
    const RmsnormForward p = {NULL, y, rstd, amax, x, NULL, weight, R, (int)C, eps, watch};
    rmsnorm_forward_launch(p, stream);
    return R * C * (y ? 4 : 2);
}

// Computes x_out = bf16(residual + delta), all [R, C], and normalizes x_out like rmsnorm_forward. x_out may be residual
// or delta. Returns the bytes moved.
static inline int64_t residual_rmsnorm_forward(bf16 *x_out, bf16 *y, float *rstd, uint32_t *amax, const bf16 *residual,
                                               const bf16 *delta, const bf16 *weight, int64_t R, int64_t C, float eps,
                                               RmsnormWatch watch, cudaStream_t stream) {
    rmsnorm_check("residual_rmsnorm_forward", R, C, residual, weight);
    require_aligned16(x_out, "residual_rmsnorm_forward", "x_out");
    require_aligned16(y, "residual_rmsnorm_forward", "y");
    require_aligned16(delta, "residual_rmsnorm_forward", "delta");
    const RmsnormForward p = {x_out, y, rstd, amax, residual, delta, weight, R, (int)C, eps, watch};
    rmsnorm_forward_launch(p, stream);
    return R * C * (y ? 8 : 6);
}

// Source that recomputes y from x and rstd (see "A Source" in quantize_kernels.cuh).
struct RmsnormSource {
    enum { ROLES = 1 << TENSOR_X, INPUTS = 1, OUTPUTS = 1, MIN_BLOCKS = 4, GROUPS_AHEAD = 1, AMAX = 0 };
    struct Raw {
        Bf16x8 x;
        float rstd;
    };
    struct Column {
        float w[8];
    };
    const bf16 *x, *weight;
    const float *rstd;
    int64_t C;
    __device__ void load_column(Column *c, int64_t column) const { bf16x8_unpack(c->w, bf16x8_load(weight + column)); }
    __device__ void load(Raw *raw, int64_t row, int64_t column) const {
        raw->x = bf16x8_load(x + row * C + column);
        raw->rstd = rstd[row];
    }
    __device__ void values(Bf16x8 v[1], const Raw &raw, const Column &c, uint32_t *) const {
        v[0] = rmsnorm_values(raw.x, raw.rstd, c.w);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Backward. A block has 512 threads: as many thread groups as fit, each with its own rows. A group sums dw over its
// rows in registers, the groups of a block add up their sums, and the block writes one fp32 row of partial sums; a
// second kernel adds those rows. The order is fixed and the number of blocks does not depend on the GPU, so the bits of
// dw do not either.

enum { RMSNORM_BACKWARD_THREADS = 512 };

typedef struct {
    bf16 *dx;
    float *partials;  // [blocks, C]
    uint32_t *amax;
    const bf16 *dy, *x, *weight, *dresidual;
    const float *rstd;
    int64_t R;
    int C;
} RmsnormBackward;

// Computes dx of one row, and adds the row's part of dw.
template <int VECTORS, int THREADS>
__device__ static inline void rmsnorm_backward_row(float dw[VECTORS][8], uint32_t *packed_amax,
                                                   const RmsnormBackward &p, int64_t row, float *scratch, int barrier) {
    const float rstd = p.rstd[row];
    Bf16x8 dy[VECTORS] = {}, x[VECTORS] = {}, residual[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (RMSNORM_COLUMN(i) >= p.C) continue;
        dy[i] = bf16x8_load(p.dy + row * p.C + RMSNORM_COLUMN(i));
        x[i] = bf16x8_load(p.x + row * p.C + RMSNORM_COLUMN(i));
        if (p.dresidual) residual[i] = bf16x8_load(p.dresidual + row * p.C + RMSNORM_COLUMN(i));
    }
    float dot = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (RMSNORM_COLUMN(i) >= p.C) continue;
        float d[8], n[8], w[8];
        bf16x8_unpack(d, dy[i]), bf16x8_unpack(n, x[i]), bf16x8_unpack(w, bf16x8_load(p.weight + RMSNORM_COLUMN(i)));
        for (int k = 0; k < 8; k++) {
            n[k] *= rstd;
            dw[i][k] = fmaf(d[k], n[k], dw[i][k]);
            dot = fmaf(d[k] * w[k], n[k], dot);
        }
    }
    const float mean = group_sum<THREADS / WARP_SIZE>(dot, scratch, barrier) / (float)p.C;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (RMSNORM_COLUMN(i) >= p.C) continue;
        float d[8], n[8], w[8], r[8];
        bf16x8_unpack(d, dy[i]), bf16x8_unpack(n, x[i]), bf16x8_unpack(w, bf16x8_load(p.weight + RMSNORM_COLUMN(i))),
            bf16x8_unpack(r, residual[i]);
        for (int k = 0; k < 8; k++) d[k] = r[k] + rstd * (d[k] * w[k] - n[k] * rstd * mean);
        const Bf16x8 dx = bf16x8_pack(d);
        bf16x8_store(p.dx + row * p.C + RMSNORM_COLUMN(i), dx);
        *packed_amax = amax_update(*packed_amax, dx);
    }
}

// Adds the dw of all groups of the block to group 0's, from the last group down.
template <int VECTORS, int THREADS, int GROUPS>
__device__ static inline void rmsnorm_join_groups(float dw[VECTORS][8]) {
    __shared__ float sums[VECTORS][8][THREADS];
    const int group = threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
    for (int from = GROUPS - 1; from > 0; from--) {
#pragma unroll
        for (int i = 0; i < VECTORS * 8; i++)
            if (group == from) sums[i / 8][i % 8][thread] = dw[i / 8][i % 8];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < VECTORS * 8; i++)
            if (group == from - 1) dw[i / 8][i % 8] += sums[i / 8][i % 8][thread];
    }
}

template <int VECTORS, int THREADS>
static __global__ void __launch_bounds__(RMSNORM_BACKWARD_THREADS, 1) rmsnorm_backward_kernel(const RmsnormBackward p) {
    grid_dependency_wait();
    enum { GROUPS = RMSNORM_BACKWARD_THREADS / THREADS };
    __shared__ float scratch[GROUPS][2][THREADS / WARP_SIZE];
    const int group = threadIdx.x / THREADS;
    float dw[VECTORS][8] = {};
    uint32_t packed_amax = 0;
    int parity = 0;
    for (int64_t row = (int64_t)blockIdx.x * GROUPS + group; row < p.R; row += (int64_t)gridDim.x * GROUPS, parity ^= 1)
        rmsnorm_backward_row<VECTORS, THREADS>(dw, &packed_amax, p, row, scratch[group][parity], 1 + group);
    if constexpr (GROUPS > 1) rmsnorm_join_groups<VECTORS, THREADS, GROUPS>(dw);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (group > 0 || RMSNORM_COLUMN(i) >= p.C) continue;
        fp32x8_store(p.partials + (int64_t)blockIdx.x * p.C + RMSNORM_COLUMN(i), dw[i]);
    }
    if (p.amax) amax_publish(p.amax, packed_amax);
}

#undef RMSNORM_COLUMN

// Returns the number of blocks of the backward kernel; the group sizes are those of RMSNORM_DISPATCH.
static inline int64_t rmsnorm_backward_blocks(int64_t R, int64_t C) {
    // `most` is two blocks on each of 128 SMs if C is at most 1024, else one.
    const int64_t group_threads = C <= 4096 ? 128 : C <= 8192 ? 256 : 512, most = C <= 1024 ? 256 : 128;
    return min_i64(ceil_div(R, RMSNORM_BACKWARD_THREADS / group_threads), most);
}

// Returns the bytes of device workspace that rmsnorm_backward needs.
static inline size_t rmsnorm_workspace_bytes(int64_t R, int64_t C) {
    return (size_t)(rmsnorm_backward_blocks(R, C) * C) * sizeof(float);
}

// Computes dx [R, C] and dweight [C] from dy, x [R, C], rstd [R], weight [C]. dresidual [R, C] is the gradient of x
// from the residual connection (NULL: none); dx may be dresidual, dy or x. Raises *amax to max |dx| unless NULL.
// Returns the bytes moved.
static inline int64_t rmsnorm_backward(bf16 *dx, bf16 *dweight, uint32_t *amax, const bf16 *dy, const bf16 *x,
                                       const float *rstd, const bf16 *weight, const bf16 *dresidual, int64_t R,
                                       int64_t C, void *workspace, cudaStream_t stream) {
    rmsnorm_check("rmsnorm_backward", R, C, x, weight);
    require_aligned16(dx, "rmsnorm_backward", "dx");
    require_aligned16(dy, "rmsnorm_backward", "dy");
    require_aligned16(dresidual, "rmsnorm_backward", "dresidual");
    require_aligned16(workspace, "rmsnorm_backward", "workspace");
    const RmsnormBackward p = {dx, (float *)workspace, amax, dy, x, weight, dresidual, rstd, R, (int)C};
    const int64_t blocks = rmsnorm_backward_blocks(R, C);
#define RMSNORM_LAUNCH(VECTORS, THREADS) \
    CUDA_LAUNCH(rmsnorm_backward_kernel<VECTORS, THREADS>, (unsigned)blocks, RMSNORM_BACKWARD_THREADS, 0, stream, p)
    RMSNORM_DISPATCH(C, RMSNORM_LAUNCH);
#undef RMSNORM_LAUNCH
    column_sums_finish(dweight, p.partials, blocks, C, stream);
    return R * C * (dresidual ? 8 : 6);
}

#endif
