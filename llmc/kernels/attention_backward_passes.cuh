// Passes over memory before and after the GEMMs of Hopper's attention backward (attention_backward_sm90.cuh).
#ifndef LLMC_ATTENTION_BACKWARD_PASSES_CUH
#define LLMC_ATTENTION_BACKWARD_PASSES_CUH

#include "attention_backward_plan.cuh"
#include "../gpu/hopper.cuh"

// Computes lse * log2(e) and delta, and zeroes dq and the counters, which the GEMMs' kernel adds to. The grid is
// (padded T / rows of a block, NH, B) with 256 threads; HD/8 lanes share a row.
template <int HD>
__global__ void attention_backward_stats(float *stats, float *dq, int *counters, int64_t num_counters, const bf16 *dout,
                                         const bf16 *out, const float *lse, int64_t T, int64_t NH) {
    grid_dependency_wait();
    const int lanes = HD / 8, rows = 256 / lanes;
    int64_t padded = (int64_t)gridDim.x * rows, h = blockIdx.y, b = blockIdx.z;
    int64_t t = (int64_t)blockIdx.x * rows + threadIdx.x / lanes;
    // Index of this thread in the grid. dq has HD values for each padded row; each thread zeroes 8.
    const int64_t thread = ((b * NH + h) * gridDim.x + blockIdx.x) * 256 + threadIdx.x;
    for (int i = 0; i < 2; i++)
        ((float4 *)dq)[(thread - threadIdx.x) * 2 + i * 256 + threadIdx.x] = make_float4(0, 0, 0, 0);
    if (thread < num_counters) counters[thread] = 0;
    float sum = 0;
    if (t < T) {
        int64_t at = ((b * T + t) * NH + h) * HD + threadIdx.x % lanes * 8;
        uint4 x = *(const uint4 *)(dout + at), y = *(const uint4 *)(out + at);
        const __nv_bfloat162 *dx = (const __nv_bfloat162 *)&x, *oy = (const __nv_bfloat162 *)&y;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 u = __bfloat1622float2(dx[i]), v = __bfloat1622float2(oy[i]);
            sum += u.x * v.x + u.y * v.y;
        }
    }
#pragma unroll
    for (int i = lanes / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
    if (threadIdx.x % lanes == 0) {
        float *row = stats + (b * NH + h) * 2 * padded + t;
        row[0] = t < T ? lse[(b * NH + h) * T + t] * LOG2_E : INFINITY;
        row[padded] = sum;
    }
}

// The grid is (padded T / 64, blocks of 64 columns of dqkv, B) with 256 threads. Columns of dK and dV are in it only if
// they have fp32 parts. Each thread writes 8 columns of two rows, as far as they are below T.
template <int HD>
__global__ void attention_backward_rows(bf16 *dqkv, const float *dq, const float *partial, int64_t T, int64_t NH,
                                        int64_t NKV, int64_t parts) {
    grid_dependency_wait();
    const int64_t blocks = HD / 64, MQ = attention_backward_queries(HD);
    int64_t tile = blockIdx.x, column = blockIdx.y, b = blockIdx.z, padded = gridDim.x * (int64_t)64;
    const float *from;
    int64_t stride = 0;
    float scale = rsqrtf((float)HD);
    if (column < NH * blocks) {
        int64_t query_tile = (b * NH + column / blocks) * (padded / MQ) + tile * 64 / MQ;
        from = dq + (query_tile * 2 + (HD == 128 ? column % 2 : tile % 2)) * ATTENTION_BACKWARD_FRAGMENT;
        parts = 1;
    } else {
        int64_t head = column / blocks - NH, value = head >= NKV;
        head = (b * NKV + head % NKV) * parts;
        stride = padded * 2 * HD;
        from = partial + head * stride + (tile * 2 + value) * (HD * 64) + column % blocks * ATTENTION_BACKWARD_FRAGMENT;
        if (value) scale = 1;
    }
    int chunk = threadIdx.x % 8, group = threadIdx.x / 8;  // group: 4 threads that share accumulator rows
    float x[16] = {0};
    for (int64_t part = 0; part < parts; part++) {
        const float4 *in = (const float4 *)(from + part * stride) + chunk * 128 + group * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 v = in[i];
            x[2 * i] += v.x, x[2 * i + 1] += v.y, x[8 + 2 * i] += v.z, x[9 + 2 * i] += v.w;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t t = tile * 64 + group / 8 * 16 + group % 8 + half * 8;
        uint32_t y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) y[i] = pack_bf16(x[8 * half + 2 * i] * scale, x[8 * half + 2 * i + 1] * scale);
        if (t < T)
            *(uint4 *)(dqkv + (b * T + t) * (NH + 2 * NKV) * HD + column * 64 + chunk * 8) =
                make_uint4(y[0], y[1], y[2], y[3]);
    }
}

#endif
