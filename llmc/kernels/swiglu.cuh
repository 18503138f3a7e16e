// SwiGLU (Shazeer 2020) on the fused projection gate_up [R, 2F], gate in columns [0, F), up in [F, 2F).
//
//    s = 1 / (1 + exp(-gate)),   h = bf16(gate * s * up)
//    d_gate = bf16(dh * up * s * (1 + gate * (1 - s))),   d_up = bf16(dh * gate * s)
//
// h and d_gate_up are stored in bf16 only if the caller wants them in bf16, for a GEMM. For FP8 GEMMs one pass finds
// the amax if the recipe needs it, and another recomputes the values, bit for bit, and casts. The gradient's first pass
// can also write the columnwise FP8 h, which wgrad of the down projection needs. Then the forward pass writes only
// rowwise h, and of h only the amax is kept for backward. Bytes per element of h: the kernels for bf16 read 4 and write
// 2 (forward), and read 6 and write 4, or 6 with h (backward). With FP8 the forward amax pass reads 4; the forward cast
// reads 4 and writes 1 for each of rowwise and columnwise data; the backward amax pass reads 6, and writes 1 if it
// casts h; the backward cast reads 6 and writes 4 for rowwise and columnwise data. Sizes: any number of rows, F a
// multiple of 16, pointers aligned to 16 bytes.
#ifndef LLMC_SWIGLU_CUH
#define LLMC_SWIGLU_CUH

#include "../fp8/quantize.cuh"

// Returns 1 / (1 + exp(-x)). The relative error is below 1e-6 for x > -10 and grows further down, but at -87 it is
// still below 1e-5, far below bf16's 2e-3. Overflow of exp gives the correct limit 0.
__device__ static inline float sigmoid_fast(float x) {
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, -LOG2_E)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(__fadd_rn(1.0f, e)));
    return s;
}

// All passes call these two functions. The compiler cannot contract their operations differently, so all passes get
// equal bits.
__device__ static inline Bf16x8 swiglu_values(Bf16x8 gate, Bf16x8 up) {
    float g[8], u[8];
    bf16x8_unpack(g, gate);
    bf16x8_unpack(u, up);
#pragma unroll
    for (int i = 0; i < 8; i++) g[i] = __fmul_rn(__fmul_rn(g[i], sigmoid_fast(g[i])), u[i]);
    return bf16x8_pack(g);
}

// Computes the two gradients and, unless h is NULL, h from the same sigmoid.
__device__ static inline void swiglu_gradients(Bf16x8 *d_gate, Bf16x8 *d_up, Bf16x8 *h, Bf16x8 dh, Bf16x8 gate,
                                               Bf16x8 up) {
    float d[8], g[8], u[8], product[8];
    bf16x8_unpack(d, dh);
    bf16x8_unpack(g, gate);
    bf16x8_unpack(u, up);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float s = sigmoid_fast(g[i]), silu = __fmul_rn(g[i], s);
        const float slope = __fmul_rn(s, __fmaf_rn(g[i], __fsub_rn(1.0f, s), 1.0f));
        product[i] = __fmul_rn(silu, u[i]);
        g[i] = __fmul_rn(__fmul_rn(d[i], u[i]), slope);
        d[i] = __fmul_rn(d[i], silu);
    }
    *d_gate = bf16x8_pack(g);
    *d_up = bf16x8_pack(d);
    if (h) *h = bf16x8_pack(product);
}

// ---------------------------------------------------------------------------------------------------------------------
// Elementwise kernels. A block of 32 x 8 threads takes 256 columns x 32 rows; a thread takes 8 columns of 4 rows and
// issues all loads first.

enum {
    SWIGLU_THREADS = 256,
    SWIGLU_COLUMNS = 256,
    SWIGLU_ROWS = 4,
    SWIGLU_BLOCK_ROWS = SWIGLU_THREADS / WARP_SIZE * SWIGLU_ROWS
};

// Returns the first of this thread's 4 rows, which are SWIGLU_THREADS / WARP_SIZE apart, and the first of its 8
// columns.
__device__ static inline void swiglu_position(int64_t *row, int64_t *column, int64_t F) {
    const unsigned column_tiles = (unsigned)ceil_div(F, SWIGLU_COLUMNS);
    *row = (int64_t)(blockIdx.x / column_tiles) * SWIGLU_BLOCK_ROWS + threadIdx.x / WARP_SIZE;
    *column = (int64_t)(blockIdx.x % column_tiles) * SWIGLU_COLUMNS + 8 * (threadIdx.x % WARP_SIZE);
}

static __global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_forward_kernel(bf16 *h, uint32_t *amax, const bf16 *gate_up, int64_t R, int64_t F) {
    grid_dependency_wait();
    int64_t first, column;
    swiglu_position(&first, &column, F);
    Bf16x8 gate[SWIGLU_ROWS] = {}, up[SWIGLU_ROWS] = {};
#pragma unroll
    for (int i = 0; i < SWIGLU_ROWS; i++) {
        const int64_t row = first + i * (SWIGLU_THREADS / WARP_SIZE);
        if (row >= R || column >= F) continue;
        gate[i] = bf16x8_load(gate_up + row * 2 * F + column);
        up[i] = bf16x8_load(gate_up + row * 2 * F + F + column);
    }
    uint32_t packed_amax = 0;
#pragma unroll
    for (int i = 0; i < SWIGLU_ROWS; i++) {
        const int64_t row = first + i * (SWIGLU_THREADS / WARP_SIZE);
        const Bf16x8 v = swiglu_values(gate[i], up[i]);
        packed_amax = amax_update(packed_amax, v);
        if (h && row < R && column < F) bf16x8_store(h + row * F + column, v);
    }
    if (amax) amax_publish(amax, packed_amax);
}

static __global__ void __launch_bounds__(SWIGLU_THREADS, 3)
    swiglu_backward_kernel(bf16 *d_gate_up, bf16 *h, uint32_t *amax, const bf16 *dh, const bf16 *gate_up, int64_t R,
                           int64_t F) {
    grid_dependency_wait();
    int64_t first, column;
    swiglu_position(&first, &column, F);
    Bf16x8 d[SWIGLU_ROWS] = {}, gate[SWIGLU_ROWS] = {}, up[SWIGLU_ROWS] = {};
#pragma unroll
    for (int i = 0; i < SWIGLU_ROWS; i++) {
        const int64_t row = first + i * (SWIGLU_THREADS / WARP_SIZE);
        if (row >= R || column >= F) continue;
        d[i] = bf16x8_load(dh + row * F + column);
        gate[i] = bf16x8_load(gate_up + row * 2 * F + column);
        up[i] = bf16x8_load(gate_up + row * 2 * F + F + column);
    }
    uint32_t packed_amax = 0;
#pragma unroll
    for (int i = 0; i < SWIGLU_ROWS; i++) {
        const int64_t row = first + i * (SWIGLU_THREADS / WARP_SIZE);
        Bf16x8 d_gate, d_up, product;
        swiglu_gradients(&d_gate, &d_up, &product, d[i], gate[i], up[i]);
        packed_amax = amax_update(amax_update(packed_amax, d_gate), d_up);
        if (row >= R || column >= F) continue;
        if (d_gate_up) {
            bf16x8_store(d_gate_up + row * 2 * F + column, d_gate);
            bf16x8_store(d_gate_up + row * 2 * F + F + column, d_up);
        }
        if (h) bf16x8_store(h + row * F + column, product);
    }
    if (amax) amax_publish(amax, packed_amax);
}

static inline unsigned swiglu_blocks(const char *function, const bf16 *gate_up, int64_t R, int64_t F) {
    if (R < 1 || F < 16 || F % 16)
        die("%s: %lld rows of 2 x %lld values: need at least 1 row, and a multiple of 16 values", function,
            (long long)R, (long long)F);
    require_aligned16(gate_up, function, "gate_up");
    return grid_size(ceil_div(R, SWIGLU_BLOCK_ROWS) * ceil_div(F, SWIGLU_COLUMNS), 1);
}

// Computes h [R, F] from gate_up [R, 2F]. Returns the bytes moved.
static inline int64_t swiglu_forward(bf16 *h, const bf16 *gate_up, int64_t R, int64_t F, cudaStream_t stream) {
    const unsigned blocks = swiglu_blocks("swiglu_forward", gate_up, R, F);
    require_aligned16(h, "swiglu_forward", "h");
    CUDA_LAUNCH(swiglu_forward_kernel, blocks, SWIGLU_THREADS, 0, stream, h, NULL, gate_up, R, F);
    return R * F * 6;
}

// Raises *amax to max |h|; h is not stored.
static inline void swiglu_amax(uint32_t *amax, const bf16 *gate_up, int64_t R, int64_t F, cudaStream_t stream) {
    const unsigned blocks = swiglu_blocks("swiglu_amax", gate_up, R, F);
    CUDA_LAUNCH(swiglu_forward_kernel, blocks, SWIGLU_THREADS, 0, stream, NULL, amax, gate_up, R, F);
}

// Computes d_gate_up [R, 2F] and again h [R, F], each unless NULL, from dh [R, F] and gate_up [R, 2F]. d_gate_up may be
// gate_up; h may be dh. Returns the bytes moved.
static inline int64_t swiglu_backward(bf16 *d_gate_up, bf16 *h, const bf16 *dh, const bf16 *gate_up, int64_t R,
                                      int64_t F, cudaStream_t stream) {
    const unsigned blocks = swiglu_blocks("swiglu_backward", gate_up, R, F);
    require_aligned16(d_gate_up, "swiglu_backward", "d_gate_up");
    require_aligned16(h, "swiglu_backward", "h");
    require_aligned16(dh, "swiglu_backward", "dh");
    CUDA_LAUNCH(swiglu_backward_kernel, blocks, SWIGLU_THREADS, 0, stream, d_gate_up, h, NULL, dh, gate_up, R, F);
    return R * F * (6 + (h ? 2 : 0) + (d_gate_up ? 4 : 0));
}

// ---- FP8: sources of the cast (see "A Source" in quantize_kernels.cuh)

struct SwigluSource {
    enum { ROLES = 1 << TENSOR_X, INPUTS = 2, OUTPUTS = 1, MIN_BLOCKS = 3, GROUPS_AHEAD = 1, AMAX = 0 };
    struct Raw {
        Bf16x8 gate, up;
    };
    struct Column {};
    const bf16 *gate_up;
    int64_t F;
    __device__ void load_column(Column *, int64_t) const {}
    __device__ void load(Raw *raw, int64_t row, int64_t column) const {
        raw->gate = bf16x8_load(gate_up + row * 2 * F + column);
        raw->up = bf16x8_load(gate_up + row * 2 * F + F + column);
    }
    __device__ void values(Bf16x8 v[1], const Raw &raw, const Column &, uint32_t *) const {
        v[0] = swiglu_values(raw.gate, raw.up);
    }
};

// Runs SwigluSource's own amax kernel, for quantize_amax_source.
static inline bool source_amax(uint32_t *amax, const SwigluSource &source, int64_t R, int64_t F, cudaStream_t stream) {
    swiglu_amax(amax, source.gate_up, R, F, stream);
    return true;
}

// Output 0 is d_gate, output 1 d_up.
struct SwigluGradientSource {
    enum { ROLES = 1 << TENSOR_DY, INPUTS = 3, OUTPUTS = 2, MIN_BLOCKS = 2, GROUPS_AHEAD = 1, AMAX = 0 };
    struct Raw {
        Bf16x8 d, gate, up;
    };
    struct Column {};
    const bf16 *dh, *gate_up;
    int64_t F;
    __device__ void load_column(Column *, int64_t) const {}
    __device__ void load(Raw *raw, int64_t row, int64_t column) const {
        raw->d = bf16x8_load(dh + row * F + column);
        raw->gate = bf16x8_load(gate_up + row * 2 * F + column);
        raw->up = bf16x8_load(gate_up + row * 2 * F + F + column);
    }
    __device__ void values(Bf16x8 v[2], const Raw &raw, const Column &, uint32_t *) const {
        swiglu_gradients(&v[0], &v[1], NULL, raw.d, raw.gate, raw.up);
    }
};

// The source of h for the backward pass. Its only output is h; the gradients d_gate and d_up just raise the amax.
struct SwigluGradientAmaxSource {
    enum { ROLES = 1 << TENSOR_X, INPUTS = 3, OUTPUTS = 1, MIN_BLOCKS = 3, GROUPS_AHEAD = 1, AMAX = 1 };
    typedef SwigluGradientSource::Raw Raw;
    struct Column {};
    uint32_t *amax_slot;
    SwigluGradientSource gradients;
    __device__ void load_column(Column *, int64_t) const {}
    __device__ void load(Raw *raw, int64_t row, int64_t column) const { gradients.load(raw, row, column); }
    __device__ void values(Bf16x8 v[1], const Raw &raw, const Column &, uint32_t *packed_amax) const {
        Bf16x8 d_gate, d_up;
        swiglu_gradients(&d_gate, &d_up, &v[0], raw.d, raw.gate, raw.up);
        *packed_amax = amax_update(amax_update(*packed_amax, d_gate), d_up);
    }
};

// First pass of the backward: raises *amax to the larger of max |d_gate| and max |d_up|. If h.rowwise or h.columnwise
// is given, it casts h to them as quantize_source casts SwigluSource, with the amax that the forward pass left in
// h.amax. Returns the bytes moved.
static inline int64_t swiglu_backward_amax(uint32_t *amax, QTensor h, const bf16 *dh, const bf16 *gate_up, int64_t R,
                                           int64_t F, cudaStream_t stream) {
    const unsigned blocks = swiglu_blocks("swiglu_backward_amax", gate_up, R, F);
    require_aligned16(dh, "swiglu_backward_amax", "dh");
    if (h.rowwise || h.columnwise) {
        SwigluGradientAmaxSource source = {amax, {dh, gate_up, F}};
        return quantize_source("swiglu_backward_amax", h, source, R, F, stream);
    }
    CUDA_LAUNCH(swiglu_backward_kernel, blocks, SWIGLU_THREADS, 0, stream, NULL, NULL, amax, dh, gate_up, R, F);
    return R * F * 6;
}

#endif
