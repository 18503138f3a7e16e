// Check and timing of llmc/attention_backward_sm90.cuh against a naive fp32 computation.
#include "../../llmc/attention_backward_sm90.cuh"
#include <math.h>
#include <vector>
#include <algorithm>

__device__ float u01(uint64_t x) {
    x ^= x >> 33; x *= 0xff51afd7ed558ccdULL; x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53ULL; x ^= x >> 33;
    return ((x >> 40) + 0.5f) / 16777216.0f;
}
__global__ void fill_normal(bf16 *p, int64_t n, uint64_t seed, float scale) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        p[i] = __float2bfloat16(scale * sqrtf(-2 * logf(u01(seed + 2 * i))) * cospif(2 * u01(seed + 2 * i + 1)));
}
__global__ void fill_lse(float *p, int64_t n, int64_t T) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) p[i] = logf(i % T + 1.0f) + 0.5f;
}
// grid (T, NH)
__global__ void ref_rows(float *P, float *dS, bf16 *out, float *lse, const bf16 *qkv, const bf16 *dout, int b, int T, int NH, int NKV, int HD) {
    int i = blockIdx.x, h = blockIdx.y, kv = h / (NH / NKV);
    int64_t C = (NH + 2 * NKV) * HD;
    __shared__ float q[128], g[128], red[128];
    float sc = rsqrtf((float)HD);
    int t = threadIdx.x;
    if (t < HD) { q[t] = __bfloat162float(qkv[(b * (int64_t)T + i) * C + h * HD + t]); g[t] = __bfloat162float(dout[((b * (int64_t)T + i) * NH + h) * HD + t]); }
    __syncthreads();
    float *p = P + ((int64_t)h * T + i) * T, *ds = dS + ((int64_t)h * T + i) * T;
    float mx = -INFINITY;
    for (int j = t; j < T; j += 128) {
        if (j > i) { p[j] = 0; ds[j] = 0; continue; }
        const bf16 *k = qkv + (b * (int64_t)T + j) * C + (NH + kv) * HD, *v = k + NKV * HD;
        float s = 0, d = 0;
        for (int c = 0; c < HD; c++) { s += q[c] * __bfloat162float(k[c]); d += g[c] * __bfloat162float(v[c]); }
        p[j] = s * sc; ds[j] = d; mx = fmaxf(mx, s * sc);
    }
    red[t] = mx; __syncthreads();
    for (int k = 0; k < 128; k++) mx = fmaxf(mx, red[k]);
    __syncthreads();
    float sum = 0, dot = 0;
    for (int j = t; j <= i; j += 128) { float e = expf(p[j] - mx); sum += e; dot += e * ds[j]; p[j] = e; }
    red[t] = sum; __syncthreads(); sum = 0; for (int k = 0; k < 128; k++) sum += red[k];
    __syncthreads();
    red[t] = dot; __syncthreads(); dot = 0; for (int k = 0; k < 128; k++) dot += red[k];
    dot /= sum;
    for (int j = t; j <= i; j += 128) { p[j] /= sum; ds[j] = p[j] * (ds[j] - dot); }
    __syncthreads();
    if (t < HD) {
        float o = 0;
        for (int j = 0; j <= i; j++) o += p[j] * __bfloat162float(qkv[(b * (int64_t)T + j) * C + (NH + NKV + kv) * HD + t]);
        out[((b * (int64_t)T + i) * NH + h) * HD + t] = __float2bfloat16(o);
    }
    if (t == 0) lse[((int64_t)b * NH + h) * T + i] = mx + logf(sum);
}
// grid (T, NH + 2*NKV), HD threads: fp32 dqkv
__global__ void ref_grads(float *dqkv, const float *P, const float *dS, const bf16 *qkv, const bf16 *dout, int b, int T, int NH, int NKV, int HD) {
    int i = blockIdx.x, hh = blockIdx.y, t = threadIdx.x, group = NH / NKV;
    int64_t C = (NH + 2 * NKV) * HD;
    float x = 0, sc = rsqrtf((float)HD);
    if (hh < NH) {
        for (int j = 0; j <= i; j++) x += dS[((int64_t)hh * T + i) * T + j] * __bfloat162float(qkv[(b * (int64_t)T + j) * C + (NH + hh / group) * HD + t]);
        x *= sc;
    } else if (hh < NH + NKV) {
        for (int h = (hh - NH) * group; h < (hh - NH + 1) * group; h++)
            for (int r = i; r < T; r++) x += dS[((int64_t)h * T + r) * T + i] * __bfloat162float(qkv[(b * (int64_t)T + r) * C + h * HD + t]);
        x *= sc;
    } else {
        for (int h = (hh - NH - NKV) * group; h < (hh - NH - NKV + 1) * group; h++)
            for (int r = i; r < T; r++) x += P[((int64_t)h * T + r) * T + i] * __bfloat162float(dout[((b * (int64_t)T + r) * NH + h) * HD + t]);
    }
    dqkv[(b * (int64_t)T + i) * C + hh * HD + t] = x;
}
template <class X> X *dev(int64_t n, int fill = 0xff) { X *p; CUDA_CHECK(cudaMalloc(&p, n * sizeof(X))); CUDA_CHECK(cudaMemset(p, fill, n * sizeof(X))); return p; }

static void launch(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, void *ws, AttentionDims d, AttentionBackwardPlan plan) {
    if (d.HD == 128) attention_backward_launch<128>(dqkv, dout, qkv, out, lse, ws, d, plan, 0);
    else attention_backward_launch<64>(dqkv, dout, qkv, out, lse, ws, d, plan, 0);
}
static int passed, failed, shown;

static void diagnose(const std::vector<float> &e, const std::vector<float> &r, AttentionDims d) {
    if (shown++ > 5) return;
    int64_t C = (d.NH + 2 * d.NKV) * d.HD;
    printf("   per 64x64 tile relative error, batch 0 (rows: token blocks; columns: heads x %d)\n", (int)d.HD / 64);
    for (int64_t r0 = 0; r0 < std::min<int64_t>(d.T, 512); r0 += 64) {
        printf("   %5d:", (int)r0);
        for (int64_t c0 = 0; c0 < std::min<int64_t>(C, 64 * 16); c0 += 64) {
            double a = 0, b = 0;
            for (int64_t i = r0; i < std::min(r0 + 64, d.T); i++) for (int64_t c = c0; c < c0 + 64; c++) a += (double)e[i * C + c] * e[i * C + c], b += (double)r[i * C + c] * r[i * C + c];
            printf(" %.1e", sqrt(a / (b + 1e-30)));
        }
        printf("\n");
    }
}
static void check(int B, int T, int NH, int NKV, int HD) {
    AttentionDims d = {B, T, NH, NKV, HD, false};
    int64_t C = (NH + 2 * NKV) * HD, N = (int64_t)B * T;
    bf16 *qkv = dev<bf16>(N * C), *dout = dev<bf16>(N * NH * HD), *out = dev<bf16>(N * NH * HD), *dqkv = dev<bf16>(N * C + 4096);
    float *lse = dev<float>((int64_t)B * NH * T), *P = dev<float>((int64_t)NH * T * T), *dS = dev<float>((int64_t)NH * T * T), *ref = dev<float>(N * C);
    fill_normal<<<256, 256>>>(qkv, N * C, 1, 1.5f);
    fill_normal<<<256, 256>>>(dout, N * NH * HD, 1ull << 40, 1.0f);
    for (int b = 0; b < B; b++) {
        ref_rows<<<dim3(T, NH), 128>>>(P, dS, out, lse, qkv, dout, b, T, NH, NKV, HD);
        ref_grads<<<dim3(T, NH + 2 * NKV), HD>>>(ref, P, dS, qkv, dout, b, T, NH, NKV, HD);
    }
    std::vector<float> r(N * C), e(N * C);
    CUDA_CHECK(cudaMemcpy(r.data(), ref, N * C * 4, cudaMemcpyDeviceToHost));
    std::vector<bf16> y(N * C + 4096), z;
    AttentionBackwardPlan chosen = attention_backward_plan(d);
    double worst[3] = {0, 0, 0};
    for (int det = 0; det < 2; det++)
        for (int h = 1; h <= NH / NKV; h *= 2)
            for (int rep = 0; rep < (det ? 3 : 1); rep++) {
                AttentionBackwardPlan plan = {h, rep == 1 ? 1 : chosen.section};
                d.deterministic = det;
                int64_t bytes = attention_backward_layout(d, plan).total;
                char *ws = dev<char>(bytes + 256);
                CUDA_CHECK(cudaMemset(dqkv, 0xff, (N * C + 4096) * 2));
                launch(dqkv, dout, qkv, out, lse, ws, d, plan);
                cudaError_t err = cudaDeviceSynchronize();
                if (err != cudaSuccess) { printf("CUDA ERROR %s at B %d T %d NH %d NKV %d HD %d h %d det %d\n", cudaGetErrorString(err), B, T, NH, NKV, HD, h, det); exit(1); }
                CUDA_CHECK(cudaMemcpy(y.data(), dqkv, (N * C + 4096) * 2, cudaMemcpyDeviceToHost));
                double se[3] = {0}, sr[3] = {0}, mx[3] = {0};
                int64_t nan[3] = {0}, over = 0, guard = 0;
                for (int64_t i = 0; i < N; i++)
                    for (int64_t c = 0; c < C; c++) {
                        int w = c < NH * HD ? 0 : c < (NH + NKV) * HD ? 1 : 2;
                        double v = __bfloat162float(y[i * C + c]), x = v - r[i * C + c];
                        e[i * C + c] = (float)x;
                        if (!(v == v)) nan[w]++; else se[w] += x * x, mx[w] = std::max(mx[w], fabs(x));
                        sr[w] += (double)r[i * C + c] * r[i * C + c];
                    }
                unsigned char tail[256];
                CUDA_CHECK(cudaMemcpy(tail, ws + bytes, 256, cudaMemcpyDeviceToHost));
                for (int i = 0; i < 256; i++) guard += tail[i] != 0xff;
                for (int i = 0; i < 4096; i++) { uint16_t bits; memcpy(&bits, &y[N * C + i], 2); over += bits != 0xffff; }
                double floor_ = 1e-4 * sr[2] + 1e-30, rel[3];
                bool bad = over || guard;
                for (int w = 0; w < 3; w++) { rel[w] = sqrt(se[w] / (sr[w] + floor_)); bad |= !(rel[w] < 1e-2) || nan[w]; worst[w] = std::max(worst[w], rel[w]); }
                bool same = true;
                if (det && rep && rep == 2) same = !memcmp(y.data(), z.data(), N * C * 2);
                if (det && rep == 0) z = y;
                bad |= !same;
                bad ? failed++ : passed++;
                if (bad && failed < 60)
                    printf("FAIL B %d T %4d NH %d NKV %d HD %3d heads/block %d det %d rep %d | rel dq %.2e dk %.2e dv %.2e | max %.1e %.1e %.1e | nan %ld %ld %ld | overrun %ld %ld | same %d\n", B, T, NH,
                           NKV, HD, h, det, rep, rel[0], rel[1], rel[2], mx[0], mx[1], mx[2], nan[0], nan[1], nan[2], over, guard, same);
                if (bad && det == 0) diagnose(e, r, d);
                cudaFree(ws);
            }
    if (T >= 1000 || T == 1) printf("B %d T %4d NH %d NKV %d HD %3d worst rel dq %.2e dk %.2e dv %.2e\n", B, T, NH, NKV, HD, worst[0], worst[1], worst[2]);
    cudaFree(qkv), cudaFree(dout), cudaFree(out), cudaFree(dqkv), cudaFree(lse), cudaFree(P), cudaFree(dS), cudaFree(ref);
}
template <class F> static double median_ms(F f, int n = 9) {
    cudaEvent_t a, b;
    cudaEventCreate(&a), cudaEventCreate(&b);
    std::vector<float> t;
    f();
    for (int i = 0; i < n; i++) { float ms; cudaEventRecord(a); f(); cudaEventRecord(b); CUDA_CHECK(cudaEventSynchronize(b)); cudaEventElapsedTime(&ms, a, b); t.push_back(ms); }
    std::sort(t.begin(), t.end());
    return t[n / 2];
}
static void timing(int T, int HD) {
    const int B = 1, NH = 32, NKV = 8;
    AttentionDims d = {B, T, NH, NKV, HD, false};
    int64_t C = (NH + 2 * NKV) * HD, N = (int64_t)B * T;
    bf16 *qkv = dev<bf16>(N * C), *dout = dev<bf16>(N * NH * HD), *out = dev<bf16>(N * NH * HD), *dqkv = dev<bf16>(N * C);
    float *lse = dev<float>((int64_t)B * NH * T);
    fill_normal<<<256, 256>>>(qkv, N * C, 1, 1.0f);
    fill_normal<<<256, 256>>>(dout, N * NH * HD, 1ull << 40, 1.0f);
    fill_normal<<<256, 256>>>(out, N * NH * HD, 1ull << 41, 0.02f);
    fill_lse<<<256, 256>>>(lse, (int64_t)B * NH * T, T);
    double flops = 2.5 * 4 * NH * HD * (double)T * T / 2;
    AttentionBackwardPlan chosen = attention_backward_plan(d);
    char *ws = dev<char>(attention_backward_layout(d, {1, 1}).total);
    printf("T %d HD %d (chosen heads/block %d section %d):", T, HD, chosen.heads_per_block, chosen.section);
    for (int i = 0; i < 20; i++) launch(dqkv, dout, qkv, out, lse, ws, d, chosen);
    double ms = median_ms([&] { launch(dqkv, dout, qkv, out, lse, ws, d, chosen); }, 21);
    printf(" %.3f ms %.0f TF |", ms, flops / ms * 1e-9);
    AttentionBackwardLayout at = attention_backward_layout(d, chosen);
    int64_t padded = round_up(T, 128);
    printf(" memset %.3f", median_ms([&] { CUDA_CHECK(cudaMemsetAsync(ws, 0, at.stats, 0)); }));
    if (HD == 128) {
        printf(" stats %.3f", median_ms([&] { attention_backward_stats<128><<<dim3(padded / 16, NH, B), 256>>>((float *)(ws + at.stats), dout, out, lse, T, NH); }));
        printf(" rows %.3f", median_ms([&] { attention_backward_rows<128><<<dim3(padded / 64, (NH + (at.total > at.partial ? 2 * NKV : 0)) * 2, B), 256>>>(dqkv, (float *)ws, (float *)(ws + at.partial), T, NH, NKV, NH / chosen.heads_per_block / NKV); }));
    } else {
        printf(" stats %.3f", median_ms([&] { attention_backward_stats<64><<<dim3(padded / 32, NH, B), 256>>>((float *)(ws + at.stats), dout, out, lse, T, NH); }));
        printf(" rows %.3f", median_ms([&] { attention_backward_rows<64><<<dim3(padded / 64, (NH + (at.total > at.partial ? 2 * NKV : 0)), B), 256>>>(dqkv, (float *)ws, (float *)(ws + at.partial), T, NH, NKV, NH / chosen.heads_per_block / NKV); }));
    }
    printf("\n   heads/block:section TF / deterministic:");
    for (int h = 1; h <= 4; h *= 2)
        for (int sec = T <= 2048 ? 8 : 2; sec <= 32 / h && sec <= 16; sec *= 2) {
            AttentionBackwardPlan plan = {h, sec};
            d.deterministic = false;
            ms = median_ms([&] { launch(dqkv, dout, qkv, out, lse, ws, d, plan); }, 9);
            d.deterministic = true;
            double ms2 = median_ms([&] { launch(dqkv, dout, qkv, out, lse, ws, d, plan); }, 9);
            printf(" %d:%d %.0f/%.0f", h, sec, flops / ms * 1e-9, flops / ms2 * 1e-9);
        }
    printf("\n");
    cudaFree(qkv), cudaFree(dout), cudaFree(out), cudaFree(dqkv), cudaFree(lse), cudaFree(ws);
}
int main(int argc, char **) {
    bool quick = argc > 1;
    if (argc > 2) {
        for (int HD = 128; HD >= 64; HD /= 2) check(2, 113, 4, 2, HD), check(1, 300, 2, 1, HD);
        printf("%d passed, %d failed\n", passed, failed);
        return failed != 0;
    }
    for (int HD = 128; HD >= 64; HD /= 2) {
        const int Ts[] = {128, 1, 63, 113, 256, 1000, 2048}, heads[3][2] = {{2, 2}, {4, 1}, {8, 1}};
        for (int T : Ts)
            for (auto &h : heads)
                for (int B = 1; B <= 2; B++)
                    if (quick ? T <= 256 && B == 2 : T <= 1000 || B == 1) check(B, T, h[0], h[1], HD);
        fflush(stdout);
    }
    printf("%d passed, %d failed\n", passed, failed);
    fflush(stdout);
    for (int HD = 128; HD >= 64; HD /= 2)
        for (int T = 2048; T <= 8192; T *= 2) { timing(T, HD); fflush(stdout); }
    return failed != 0;
}
