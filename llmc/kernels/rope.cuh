// QK-norm (Qwen3) and rotary position embedding (Su et al. 2021), fused, and their gradients.
//
//    n = x * rstd * w  (x without QK-norm)
//    y[i] = n[i] cos - n[i + HD/2] sin,   y[i + HD/2] = n[i + HD/2] cos + n[i] sin
//
// Arithmetic is fp32 with one rounding. Backward applies the inverse rotation, then the gradient of the norm. V passes
// unchanged. If backward finds the amax of the result, it also reads V's gradient, which counts in it. Bytes per
// element of q and k: forward reads 2 and writes 2; backward reads 2 and writes 2, and reads 2 more with QK-norm. For
// v, backward reads 2 if it finds the amax, and forward reads 2 and writes 2 unless it works in place. HD is 64 or 128,
// as in attention. Sums over tokens and heads have a fixed order that depends on the sizes only.
#ifndef LLMC_ROPE_CUH
#define LLMC_ROPE_CUH

#include "../gpu/column_sums.cuh"
#include "../config/model_config.h"

typedef struct {
    int64_t B, T, NH, NKV, HD;
    float eps;              // epsilon of QK-norm
    const int32_t *starts;  // Documents.starts; NULL: each sequence is one document
} RopeDims;

static inline RopeDims rope_dims(const Dims *d, double eps) {
    return RopeDims{d->B, d->T, d->NH, d->NKV, d->HD, (float)eps, d->documents.starts};
}

// A block of 256 threads takes 4 tokens at a time, 64 threads each. HD/16 neighbouring lanes share a head: lane j holds
// elements 8j .. 8j + 7 of both halves, so it has both members of each rotated pair. A group of lanes loops over the
// token's heads and keeps its cosines and sines.
enum {
    ROPE_THREADS = 256,
    ROPE_TOKEN_THREADS = 64,
    ROPE_TOKENS = ROPE_THREADS / ROPE_TOKEN_THREADS,
    ROPE_BACKWARD_BLOCKS = 264
};

typedef struct {
    bf16 *out;                    // [rows, (NH + 2 NKV) * HD]; backward works in place
    const bf16 *in;               // the projection's output; backward without QK-norm does not read it
    const bf16 *q_norm, *k_norm;  // [HD]; NULL: no norm
    const float *table;           // cosines and sines [T, HD] (rope_table_fill)
    int64_t rows;                 // B * T tokens
    int T, NH, NKV;
    float eps;
    uint32_t *amax;  // backward: raised to max |out|; NULL: not wanted
    // Backward with QK-norm: [2, blocks, HD], each block's sums for q_norm, then for k_norm.
    float *partials;
    const int32_t *starts;  // RopeDims.starts
} RopeKernel;

// The 16 elements of a head that one thread holds, as bf16 and as floats.
typedef struct {
    Bf16x8 low, high;
} RopePacked;

typedef struct {
    float low[8], high[8];
} RopePair;

// A thread's position within a token.
typedef struct {
    // Number of the lane within its group; number of the group of lanes; groups per token.
    int lane, group, groups;
} RopePosition;

template <int HD>
__device__ static inline RopePosition rope_position(void) {
    const int thread = threadIdx.x % ROPE_TOKEN_THREADS, lanes = HD / 16;
    return RopePosition{thread % lanes, thread / lanes, ROPE_TOKEN_THREADS / lanes};
}

template <int HD>
__device__ static inline RopePacked rope_load(const bf16 *head, int lane) {
    return RopePacked{bf16x8_load(head + lane * 8), bf16x8_load(head + HD / 2 + lane * 8)};
}

__device__ static inline RopePair rope_unpack(const RopePacked &x) {
    RopePair r;
    bf16x8_unpack(r.low, x.low);
    bf16x8_unpack(r.high, x.high);
    return r;
}

// Stores this thread's 16 elements of a head, rounded, and returns the running maximum raised to their magnitudes (see
// amax_update).
template <int HD>
__device__ static inline uint32_t rope_store(bf16 *head, int lane, const RopePair &x, uint32_t packed_amax) {
    const Bf16x8 low = bf16x8_pack(x.low), high = bf16x8_pack(x.high);
    bf16x8_store(head + lane * 8, low);
    bf16x8_store(head + HD / 2 + lane * 8, high);
    return amax_update(amax_update(packed_amax, low), high);
}

// Loads cosines (low) and sines (high) of this lane's 8 pairs, at the position of a row in its document.
template <int HD>
__device__ static inline RopePair rope_angles(const RopeKernel &k, int64_t row, int lane) {
    const int64_t position = row % k.T - (k.starts ? __ldg(k.starts + row) : 0);
    const float4 *p = (const float4 *)(k.table + position * HD + lane * 16);
    RopePair a;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float4 v = __ldg(p + j);
        a.low[2 * j] = v.x, a.high[2 * j] = v.y, a.low[2 * j + 1] = v.z, a.high[2 * j + 1] = v.w;
    }
    return a;
}

// Rotates by the angle (DIRECTION 1) or back (-1).
template <int DIRECTION>
__device__ static inline RopePair rope_rotate(const RopePair &x, const RopePair &angle) {
    RopePair y;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float sine = DIRECTION * angle.high[j];
        y.low[j] = x.low[j] * angle.low[j] - x.high[j] * sine;
        y.high[j] = x.high[j] * angle.low[j] + x.low[j] * sine;
    }
    return y;
}

// Returns the sum of a[i] * b[i] over the whole head, in all of its lanes.
template <int HD>
__device__ static inline float rope_dot(const RopePair &a, const RopePair &b) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) sum = fmaf(a.high[j], b.high[j], fmaf(a.low[j], b.low[j], sum));
#pragma unroll
    for (int offset = HD / 32; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return sum;
}

template <int HD>
__device__ static inline float rope_rstd(const RopePair &x, float eps) {
    return 1 / sqrtf(rope_dot<HD>(x, x) / HD + eps);
}

// Each iteration takes two heads, so that both loads are in flight together. The lanes of a warp shuffle together, so
// groups without a head left still run the iteration, on zeros.
template <int HD, bool NORM>
static __global__ void __launch_bounds__(ROPE_THREADS, NORM ? 3 : 4) qknorm_rope_forward_kernel(const RopeKernel p) {
    grid_dependency_wait();
    const RopePosition at = rope_position<HD>();
    const int64_t row = blockIdx.x * (int64_t)ROPE_TOKENS + threadIdx.x / ROPE_TOKEN_THREADS;
    if (row >= p.rows) return;
    const int64_t first = row * (p.NH + 2 * p.NKV) * HD;
    const int heads = p.NH + p.NKV;
    const RopePair angle = rope_angles<HD>(p, row, at.lane);
    for (int base = at.group; base - at.group < heads; base += 2 * at.groups) {
        RopePacked packed[2] = {};
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (base + k * at.groups < heads)
                packed[k] = rope_load<HD>(p.in + first + (base + k * at.groups) * HD, at.lane);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int h = base + k * at.groups;
            RopePair x = rope_unpack(packed[k]);
            if (NORM) {
                const RopePair w = rope_unpack(rope_load<HD>(h < p.NH ? p.q_norm : p.k_norm, at.lane));
                const float rstd = rope_rstd<HD>(x, p.eps);
#pragma unroll
                for (int j = 0; j < 8; j++) x.low[j] *= rstd * w.low[j], x.high[j] *= rstd * w.high[j];
            }
            if (h < heads) rope_store<HD>(p.out + first + h * HD, at.lane, rope_rotate<1>(x, angle), 0);
        }
    }
    if (p.out == p.in) return;
    const int64_t values = first + (int64_t)heads * HD;
    for (int i = (int)(threadIdx.x % ROPE_TOKEN_THREADS) * 8; i < p.NKV * HD; i += ROPE_TOKEN_THREADS * 8)
        bf16x8_store(p.out + values + i, bf16x8_load(p.in + values + i));
}

// Backward of heads [begin, end) of all the block's tokens, without QK-norm.
template <int HD>
__device__ static inline uint32_t rope_backward_heads(const RopeKernel &p, int begin, int end, uint32_t packed_amax) {
    const RopePosition at = rope_position<HD>();
    for (int64_t row = blockIdx.x * (int64_t)ROPE_TOKENS + threadIdx.x / ROPE_TOKEN_THREADS; row < p.rows;
         row += gridDim.x * (int64_t)ROPE_TOKENS) {
        const int64_t first = row * (p.NH + 2 * p.NKV) * HD;
        const RopePair angle = rope_angles<HD>(p, row, at.lane);
        for (int base = begin + at.group; base < end; base += 2 * at.groups) {
            const bool second = base + at.groups < end;
            bf16 *a = p.out + first + base * HD, *b = a + at.groups * HD;
            RopePacked d[2] = {};
            d[0] = rope_load<HD>(a, at.lane);
            if (second) d[1] = rope_load<HD>(b, at.lane);
            packed_amax = rope_store<HD>(a, at.lane, rope_rotate<-1>(rope_unpack(d[0]), angle), packed_amax);
            if (second)
                packed_amax = rope_store<HD>(b, at.lane, rope_rotate<-1>(rope_unpack(d[1]), angle), packed_amax);
        }
    }
    return packed_amax;
}

// Writes partial [HD] = sum over the block's threads of dw. Every thread of the block calls it.
template <int HD>
__device__ static inline void rope_sum_block(float *partial, const RopePair &dw) {
    __shared__ float sums[ROPE_THREADS / WARP_SIZE][HD];
    const int lane = rope_position<HD>().lane, warp = threadIdx.x / WARP_SIZE;
    // Wait until all threads have read the sums of an earlier call.
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float low = dw.low[j], high = dw.high[j];
#pragma unroll
        for (int offset = HD / 16; offset < WARP_SIZE; offset *= 2) {
            low += __shfl_xor_sync(0xffffffffu, low, offset);
            high += __shfl_xor_sync(0xffffffffu, high, offset);
        }
        if (threadIdx.x % WARP_SIZE == lane) {  // the warp's first group of lanes
            sums[warp][lane * 8 + j] = low;
            sums[warp][HD / 2 + lane * 8 + j] = high;
        }
    }
    __syncthreads();
    if (threadIdx.x >= HD) return;
    float sum = sums[0][threadIdx.x];
    for (int w = 1; w < ROPE_THREADS / WARP_SIZE; w++) sum += sums[w][threadIdx.x];
    partial[threadIdx.x] = sum;
}

// Backward of heads [begin, end) of all the block's tokens, with QK-norm weight w. partial [HD] is the block's part of
// the weight's gradient.
template <int HD>
__device__ static inline uint32_t qknorm_rope_backward_heads(const RopeKernel &p, int begin, int end, const bf16 *w,
                                                             float *partial, uint32_t packed_amax) {
    const RopePosition at = rope_position<HD>();
    const RopePacked w_packed = rope_load<HD>(w, at.lane);
    RopePair dw = {};
    for (int64_t row = blockIdx.x * (int64_t)ROPE_TOKENS + threadIdx.x / ROPE_TOKEN_THREADS; row < p.rows;
         row += gridDim.x * (int64_t)ROPE_TOKENS) {
        const int64_t first = row * (p.NH + 2 * p.NKV) * HD;
        const RopePair angle = rope_angles<HD>(p, row, at.lane), weight = rope_unpack(w_packed);
        for (int base = begin; base < end; base += at.groups) {
            const bool active = base + at.group < end;
            const int64_t head = first + (base + at.group) * HD;
            RopePacked d_packed = {}, x_packed = {};
            if (active) d_packed = rope_load<HD>(p.out + head, at.lane), x_packed = rope_load<HD>(p.in + head, at.lane);
            RopePair g = rope_rotate<-1>(rope_unpack(d_packed), angle), n = rope_unpack(x_packed);
            const float rstd = rope_rstd<HD>(n, p.eps);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                n.low[j] *= rstd, n.high[j] *= rstd;
                dw.low[j] = fmaf(g.low[j], n.low[j], dw.low[j]), dw.high[j] = fmaf(g.high[j], n.high[j], dw.high[j]);
                g.low[j] *= weight.low[j], g.high[j] *= weight.high[j];
            }
            const float mean = rope_dot<HD>(g, n) / HD;
#pragma unroll
            for (int j = 0; j < 8; j++)
                g.low[j] = rstd * (g.low[j] - n.low[j] * mean), g.high[j] = rstd * (g.high[j] - n.high[j] * mean);
            if (active) packed_amax = rope_store<HD>(p.out + head, at.lane, g, packed_amax);
        }
    }
    rope_sum_block<HD>(partial, dw);
    return packed_amax;
}

template <int HD, bool NORM>
static __global__ void __launch_bounds__(ROPE_THREADS, NORM ? 2 : 4) qknorm_rope_backward_kernel(const RopeKernel p) {
    grid_dependency_wait();
    uint32_t packed_amax = 0;
    if (NORM) {
        float *partial = p.partials + blockIdx.x * HD;
        packed_amax = qknorm_rope_backward_heads<HD>(p, 0, p.NH, p.q_norm, partial, packed_amax);
        packed_amax =
            qknorm_rope_backward_heads<HD>(p, p.NH, p.NH + p.NKV, p.k_norm, partial + gridDim.x * HD, packed_amax);
    } else {
        packed_amax = rope_backward_heads<HD>(p, 0, p.NH + p.NKV, packed_amax);
    }
    if (!p.amax) return;
    for (int64_t row = blockIdx.x * (int64_t)ROPE_TOKENS + threadIdx.x / ROPE_TOKEN_THREADS; row < p.rows;
         row += gridDim.x * (int64_t)ROPE_TOKENS) {
        const bf16 *values = p.out + (row * (p.NH + 2 * p.NKV) + p.NH + p.NKV) * HD;
#pragma unroll 2
        for (int i = (int)(threadIdx.x % ROPE_TOKEN_THREADS) * 8; i < p.NKV * HD; i += ROPE_TOKEN_THREADS * 8)
            packed_amax = amax_update(packed_amax, bf16x8_load(values + i));
    }
    amax_publish(p.amax, packed_amax);
}

static inline void rope_check(const char *function, const RopeKernel *p, RopeDims d) {
    if (d.HD != 64 && d.HD != 128)
        die("%s: head_dim %lld is not supported on the GPU, 64 and 128 are", function, (long long)d.HD);
    if (d.B < 1 || d.T < 1 || d.NH < 1 || d.NKV < 1 || d.T > INT_MAX || (d.NH + 2 * d.NKV) * d.HD > INT_MAX)
        die("%s: %lld x %lld tokens of %lld + 2 x %lld heads are out of range", function, (long long)d.B,
            (long long)d.T, (long long)d.NH, (long long)d.NKV);
    const void *pointers[] = {p->out, p->in, p->q_norm, p->k_norm, p->table};
    for (int i = 0; i < 5; i++) require_aligned16(pointers[i], function, "an array");
}

// Applies QK-norm (unless q_norm and k_norm [HD] are NULL) and rotation to the queries and keys of `in`, and copies V
// if `out` is another array. `in` and `out` are [B, T, (NH + 2 NKV) * HD], and may be the same array. table is
// rope_table_fill's, with T positions. Returns the bytes moved, without those of V.
static inline int64_t qknorm_rope_forward(bf16 *out, const bf16 *in, const bf16 *q_norm, const bf16 *k_norm,
                                          const float *table, RopeDims d, cudaStream_t stream) {
    const RopeKernel p = {out,       in,         q_norm, k_norm, table, d.B * d.T, (int)d.T,
                          (int)d.NH, (int)d.NKV, d.eps,  NULL,   NULL,  d.starts};
    rope_check("qknorm_rope_forward", &p, d);
    const unsigned blocks = grid_size(p.rows, ROPE_TOKENS);
    if (d.HD == 64 && q_norm) CUDA_LAUNCH(qknorm_rope_forward_kernel<64, true>, blocks, ROPE_THREADS, 0, stream, p);
    else if (d.HD == 64) CUDA_LAUNCH(qknorm_rope_forward_kernel<64, false>, blocks, ROPE_THREADS, 0, stream, p);
    else if (q_norm) CUDA_LAUNCH(qknorm_rope_forward_kernel<128, true>, blocks, ROPE_THREADS, 0, stream, p);
    else CUDA_LAUNCH(qknorm_rope_forward_kernel<128, false>, blocks, ROPE_THREADS, 0, stream, p);
    return p.rows * (d.NH + d.NKV) * d.HD * 4;
}

// Turns dqkv [B, T, (NH + 2 NKV) * HD], in place, from the gradient of the forward pass's output into that of its input
// `qkv`, the projection's output. With QK-norm also computes dq_norm, dk_norm [HD]. Without QK-norm, qkv and all
// pointers to norms are NULL, and workspace is not used. Raises *amax to max |dqkv|, V included, unless NULL. workspace
// holds rope_workspace_bytes. Returns the bytes moved, without those of V.
static inline int64_t qknorm_rope_backward(bf16 *dqkv, bf16 *dq_norm, bf16 *dk_norm, uint32_t *amax, const bf16 *qkv,
                                           const bf16 *q_norm, const bf16 *k_norm, const float *table, RopeDims d,
                                           void *workspace, cudaStream_t stream) {
    const RopeKernel p = {dqkv,     qkv,       q_norm,     k_norm, table, d.B * d.T,
                          (int)d.T, (int)d.NH, (int)d.NKV, d.eps,  amax,  (float *)workspace,
                          d.starts};
    rope_check("qknorm_rope_backward", &p, d);
    if (!q_norm) {
        const unsigned blocks = grid_size(p.rows, ROPE_TOKENS);
        if (d.HD == 64) CUDA_LAUNCH(qknorm_rope_backward_kernel<64, false>, blocks, ROPE_THREADS, 0, stream, p);
        else CUDA_LAUNCH(qknorm_rope_backward_kernel<128, false>, blocks, ROPE_THREADS, 0, stream, p);
        return p.rows * (d.NH + d.NKV) * d.HD * 4;
    }
    const int64_t blocks = min_i64(ROPE_BACKWARD_BLOCKS, ceil_div(p.rows, ROPE_TOKENS));
    if (d.HD == 64) CUDA_LAUNCH(qknorm_rope_backward_kernel<64, true>, (unsigned)blocks, ROPE_THREADS, 0, stream, p);
    else CUDA_LAUNCH(qknorm_rope_backward_kernel<128, true>, (unsigned)blocks, ROPE_THREADS, 0, stream, p);
    column_sums_finish(dq_norm, p.partials, blocks, d.HD, stream);
    column_sums_finish(dk_norm, p.partials + blocks * d.HD, blocks, d.HD, stream);
    return p.rows * (d.NH + d.NKV) * d.HD * 6;
}

// Returns the bytes of device workspace that qknorm_rope_backward needs.
static inline size_t rope_workspace_bytes(int64_t HD) {
    return (size_t)(2 * ROPE_BACKWARD_BLOCKS * HD) * sizeof(float);
}

// Copies rope_table_fill's table for T positions to the GPU, [T, HD], after all work in the stream. Waits for the copy.
static inline void rope_table_upload(float *table, const ModelConfig *m, int64_t T, cudaStream_t stream) {
    const size_t bytes = (size_t)(T * m->head_dim) * sizeof(float);
    float *host = (float *)xcalloc(bytes, 1);
    rope_table_fill(host, m, T);
    CUDA_CHECK(cudaMemcpyAsync(table, host, bytes, cudaMemcpyDefault, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    free(host);
}

#endif
