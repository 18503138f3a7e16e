// Checks and times every attention implementation. Arguments select what runs: mma or sm90, fwd or bwd, check or bench.
// If both or neither of a pair are given, both run. `deterministic` leaves out the backward pass that is not
// deterministic, and changes nothing else.
// The check compares outputs on fresh random data, also with random documents, with a plain fp64 computation, and
// detects writes outside the outputs. The bench prints medians of single calls on random data as TFLOP/s of the causal
// half (4*NH*HD*T^2/2 forward, 2.5 times that backward; with documents of N tokens, N in place of one T) and as a share
// of the dense bf16 peak. It also times the memory-bound kernels that run before and after the GEMMs of the backward
// pass.
// Build and run: make build/bench_attention && build/bench_attention
#include "../../llmc/kernels/attention.cuh"
#include "bench.cuh"

#define GUARD 4096  // bytes of poison on each side of a Tensor

typedef struct {
    const char *name;
    void (*forward)(bf16 *, float *, uint32_t *, const bf16 *, AttentionDims, cudaStream_t);
    void (*backward)(bf16 *, const bf16 *, const bf16 *, const bf16 *, const float *, void *, AttentionDims,
                     cudaStream_t);
    bool hopper;
} Implementation;

static const Implementation implementations[] = {
    {"mma", attention_forward_mma, attention_backward_mma, false},
    {"sm90", attention_forward_sm90, attention_backward_sm90, true},
};

// ---------------------------------------------------------------------------------------------------------------------
// Tensors between guards. Bytes 0xff are NaN in bf16, fp32 and fp64. So a result becomes NaN if a kernel does not write
// it, or computes it with a number from outside a tensor.

typedef struct {
    uint8_t *base;
    size_t bytes;
} Tensor;

static void *tensor_data(Tensor t) { return t.base + GUARD; }

static void tensor_poison(Tensor t) { CUDA_CHECK(cudaMemset(t.base, 0xff, t.bytes + 2 * GUARD)); }

static Tensor tensor_alloc(size_t bytes) {
    Tensor t = {NULL, (bytes + 255) / 256 * 256};
    CUDA_CHECK(cudaMalloc((void **)&t.base, t.bytes + 2 * GUARD));
    tensor_poison(t);
    return t;
}

static void tensor_free(Tensor t) { CUDA_CHECK(cudaFree(t.base)); }

// True if nothing was written outside the first `used` bytes.
static bool tensor_guards_hold(Tensor t, size_t used) {
    size_t after = t.bytes - used + GUARD;
    uint8_t *copy = (uint8_t *)xcalloc(after + GUARD, 1);
    CUDA_CHECK(cudaMemcpy(copy, t.base, GUARD, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(copy + GUARD, t.base + GUARD + used, after, cudaMemcpyDeviceToHost));
    bool holds = true;
    for (size_t i = 0; i < after + GUARD; i++) holds = holds && copy[i] == 0xff;
    free(copy);
    return holds;
}

static __global__ void fill_normal_kernel(bf16 *x, int64_t n, uint64_t key, int64_t row, int64_t scaled, float scale) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __float2bfloat16(rng_normal(key, (uint64_t)i) * (i % row < scaled ? scale : 1.0f));
}

// Fills with standard normal values; the first `scaled` of each `row` elements are multiplied by `scale`.
static void fill_normal(Tensor t, int64_t n, uint64_t key, int64_t row, int64_t scaled, float scale) {
    fill_normal_kernel<<<grid_size(n, 256), 256>>>((bf16 *)tensor_data(t), n, key, row, scaled, scale);
    CUDA_CHECK_LAUNCH();
}

static __global__ void count_differences_kernel(const uint32_t *a, const uint32_t *b, int64_t n,
                                                unsigned long long *count) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        if (a[i] != b[i]) atomicAdd(count, 1ull);
}

// Returns the number of 4-byte words in which two tensors of one size differ, with their guards.
static int64_t count_differences(Tensor a, Tensor b) {
    unsigned long long *device, count;
    CUDA_CHECK(cudaMalloc((void **)&device, sizeof count));
    CUDA_CHECK(cudaMemset(device, 0, sizeof count));
    count_differences_kernel<<<1024, 256>>>((uint32_t *)a.base, (uint32_t *)b.base, (int64_t)(a.bytes + 2 * GUARD) / 4,
                                            device);
    CUDA_CHECK(cudaMemcpy(&count, device, sizeof count, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(device));
    return (int64_t)count;
}

// Sets d->documents to documents of `length` tokens or, with a key, of random lengths with this mean, in new GPU
// memory.
static void documents_create(AttentionDims *d, int64_t length, uint64_t key) {
    const int64_t n = d->B * d->T;
    int32_t *tokens = (int32_t *)xcalloc((size_t)(3 * n), sizeof *tokens);
    const Documents host = {tokens + n, tokens + 2 * n};
    for (int64_t i = 0; i < n; i++)
        tokens[i] = (key ? rng_u64(key, (uint64_t)i) % (uint64_t)length : i % d->T % length) == 0;
    documents_find(host, tokens, d->B, d->T, 1);
    int32_t *device = (int32_t *)bench_upload(host.starts, 2 * n * 4);
    d->documents = Documents{device, device + n};
    free(tokens);
}

// ---------------------------------------------------------------------------------------------------------------------
// The reference: fp64 sums, with the T x T matrices P and dS in memory. `rounded` rounds to bf16 where an
// implementation on tensor cores must: P and dS before their GEMMs, and the results out, dQ, dK and dV. Then delta
// follows from the rounded out.

__device__ static double round_bf16(double x, bool rounded) {
    return rounded ? (double)__bfloat162float(__float2bfloat16((float)x)) : x;
}

// The positions at which the document of token t begins and behind which it ends.
__device__ static int64_t reference_start(AttentionDims d, int64_t b, int64_t t) {
    return d.documents.starts ? d.documents.starts[b * d.T + t] : 0;
}
__device__ static int64_t reference_end(AttentionDims d, int64_t b, int64_t t) {
    return d.documents.ends ? d.documents.ends[b * d.T + t] : d.T;
}

__device__ static double reference_reduce(double x, double *scratch, bool maximum) {
    scratch[threadIdx.x] = x;
    __syncthreads();
    for (int n = blockDim.x / 2; n > 0; n /= 2) {
        if ((int)threadIdx.x < n) {
            double y = scratch[threadIdx.x + n];
            scratch[threadIdx.x] = maximum ? fmax(scratch[threadIdx.x], y) : scratch[threadIdx.x] + y;
        }
        __syncthreads();
    }
    double result = scratch[0];
    __syncthreads();
    return result;
}

// One thread block per query (t, h, b). p is [B*NH][T][T] in global memory.
static __global__ void reference_forward_kernel(double *out, double *lse, double *p, const bf16 *qkv, AttentionDims d,
                                                bool rounded) {
    __shared__ double scratch[128];
    const int64_t t = blockIdx.x, h = blockIdx.y, b = blockIdx.z, row = (d.NH + 2 * d.NKV) * d.HD,
                  start = reference_start(d, b, t);
    const bf16 *q = qkv + (b * d.T + t) * row + h * d.HD, *k = qkv + b * d.T * row + (d.NH + h / (d.NH / d.NKV)) * d.HD,
               *v = k + d.NKV * d.HD;
    double *pt = p + ((b * d.NH + h) * d.T + t) * d.T, m = -INFINITY, sum = 0;
    for (int64_t u = start + threadIdx.x; u <= t; u += blockDim.x) {
        double s = 0;
        for (int64_t i = 0; i < d.HD; i++)
            s += (double)__bfloat162float(q[i]) * (double)__bfloat162float(k[u * row + i]);
        pt[u] = s / sqrt((double)d.HD);
        m = fmax(m, pt[u]);
    }
    m = reference_reduce(m, scratch, true);
    for (int64_t u = start + threadIdx.x; u <= t; u += blockDim.x) sum += exp(pt[u] - m);
    sum = reference_reduce(sum, scratch, false);
    for (int64_t u = start + threadIdx.x; u <= t; u += blockDim.x) pt[u] = exp(pt[u] - m);
    __syncthreads();
    for (int64_t i = threadIdx.x; i < d.HD; i += blockDim.x) {
        double o = 0;
        for (int64_t u = start; u <= t; u++) o += round_bf16(pt[u], rounded) * (double)__bfloat162float(v[u * row + i]);
        out[(b * d.T + t) * d.NH * d.HD + h * d.HD + i] = round_bf16(o / sum, rounded);
    }
    __syncthreads();
    for (int64_t u = start + threadIdx.x; u <= t; u += blockDim.x) pt[u] /= sum;
    if (threadIdx.x == 0) lse[(b * d.NH + h) * d.T + t] = m + log(sum);
}

// One thread block per query computes dS and dQ.
static __global__ void reference_backward_q_kernel(double *dqkv, double *ds, const double *p, const double *out,
                                                   const bf16 *dout, const bf16 *qkv, AttentionDims d, bool rounded) {
    __shared__ double scratch[128];
    const int64_t t = blockIdx.x, h = blockIdx.y, b = blockIdx.z, row = (d.NH + 2 * d.NKV) * d.HD,
                  start = reference_start(d, b, t);
    const bf16 *k = qkv + b * d.T * row + (d.NH + h / (d.NH / d.NKV)) * d.HD, *v = k + d.NKV * d.HD;
    const int64_t at = (b * d.T + t) * d.NH * d.HD + h * d.HD, matrix = ((b * d.NH + h) * d.T + t) * d.T;
    double delta = 0;
    for (int64_t i = threadIdx.x; i < d.HD; i += blockDim.x)
        delta += (double)__bfloat162float(dout[at + i]) * round_bf16(out[at + i], rounded);
    delta = reference_reduce(delta, scratch, false);
    for (int64_t u = start + threadIdx.x; u <= t; u += blockDim.x) {
        double dp = 0;
        for (int64_t i = 0; i < d.HD; i++)
            dp += (double)__bfloat162float(dout[at + i]) * (double)__bfloat162float(v[u * row + i]);
        ds[matrix + u] = round_bf16(p[matrix + u] * (dp - delta), rounded);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < d.HD; i += blockDim.x) {
        double dq = 0;
        for (int64_t u = start; u <= t; u++) dq += ds[matrix + u] * (double)__bfloat162float(k[u * row + i]);
        dqkv[(b * d.T + t) * row + h * d.HD + i] = round_bf16(dq / sqrt((double)d.HD), rounded);
    }
}

// One thread block per key (u, kv head, b) computes dK and dV, with one thread per column.
static __global__ void reference_backward_kv_kernel(double *dqkv, const double *ds, const double *p, const bf16 *dout,
                                                    const bf16 *qkv, AttentionDims d, bool rounded) {
    const int64_t u = blockIdx.x, g = blockIdx.y, b = blockIdx.z, i = threadIdx.x, group = d.NH / d.NKV,
                  row = (d.NH + 2 * d.NKV) * d.HD;
    double dk = 0, dv = 0;
    for (int64_t h = g * group; h < (g + 1) * group; h++) {
        for (int64_t t = u; t < reference_end(d, b, u); t++) {
            const int64_t matrix = ((b * d.NH + h) * d.T + t) * d.T + u;
            dv +=
                round_bf16(p[matrix], rounded) * (double)__bfloat162float(dout[((b * d.T + t) * d.NH + h) * d.HD + i]);
            dk += ds[matrix] * (double)__bfloat162float(qkv[(b * d.T + t) * row + h * d.HD + i]);
        }
    }
    double *to = dqkv + (b * d.T + u) * row + (d.NH + g) * d.HD + i;
    to[0] = round_bf16(dk / sqrt((double)d.HD), rounded);
    to[d.NKV * d.HD] = round_bf16(dv, rounded);
}

typedef struct {
    double *out, *lse, *dqkv;  // on the host
} Reference;

static double *download(const double *device, int64_t n) {
    double *host = (double *)xcalloc((size_t)n, sizeof(double));
    CUDA_CHECK(cudaMemcpy(host, device, (size_t)n * sizeof(double), cudaMemcpyDeviceToHost));
    return host;
}

static Reference reference_compute(Tensor qkv, Tensor dout, AttentionDims d, bool rounded) {
    const int64_t n_out = d.B * d.T * d.NH * d.HD, n_lse = d.B * d.NH * d.T,
                  n_qkv = d.B * d.T * (d.NH + 2 * d.NKV) * d.HD;
    double *out, *lse, *dqkv, *p, *ds;
    CUDA_CHECK(cudaMalloc((void **)&out, (size_t)n_out * 8));
    CUDA_CHECK(cudaMalloc((void **)&lse, (size_t)n_lse * 8));
    CUDA_CHECK(cudaMalloc((void **)&dqkv, (size_t)n_qkv * 8));
    CUDA_CHECK(cudaMalloc((void **)&p, (size_t)(n_lse * d.T) * 8));
    CUDA_CHECK(cudaMalloc((void **)&ds, (size_t)(n_lse * d.T) * 8));
    const bf16 *x = (const bf16 *)tensor_data(qkv), *dy = (const bf16 *)tensor_data(dout);
    const dim3 queries((unsigned)d.T, (unsigned)d.NH, (unsigned)d.B),
        keys((unsigned)d.T, (unsigned)d.NKV, (unsigned)d.B);
    reference_forward_kernel<<<queries, 128>>>(out, lse, p, x, d, rounded);
    CUDA_CHECK_LAUNCH();
    reference_backward_q_kernel<<<queries, 128>>>(dqkv, ds, p, out, dy, x, d, rounded);
    CUDA_CHECK_LAUNCH();
    reference_backward_kv_kernel<<<keys, (unsigned)d.HD>>>(dqkv, ds, p, dy, x, d, rounded);
    CUDA_CHECK_LAUNCH();
    Reference r = {download(out, n_out), download(lse, n_lse), download(dqkv, n_qkv)};
    double *all[] = {out, lse, dqkv, p, ds};
    for (int i = 0; i < 5; i++) CUDA_CHECK(cudaFree(all[i]));
    return r;
}

static void reference_free(Reference r) {
    free(r.out);
    free(r.lse);
    free(r.dqkv);
}

// ---------------------------------------------------------------------------------------------------------------------
// Comparison

// Over columns [first, end) of rows of `row` elements: ||a - b|| (difference), ||b|| (norm), and the number of elements
// of `a` that are not finite. `worst` is the index of the first of these or, if there are none, of the largest
// difference.
typedef struct {
    double difference, norm;
    int64_t worst, not_finite;
} Distance;

static Distance distance(const double *a, const double *b, int64_t rows, int64_t row, int64_t first, int64_t end) {
    Distance d = {0, 0, 0, 0};
    double worst = -1;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = r * row + first; i < r * row + end; i++) {
            double e = a[i] - b[i];
            if (!isfinite(a[i])) {
                if (d.not_finite++ == 0) d.worst = i;
                worst = INFINITY;
            } else if (fabs(e) > worst) {
                worst = fabs(e);
                d.worst = i;
            }
            d.difference += e * e;
            d.norm += b[i] * b[i];
        }
    }
    d.difference = sqrt(d.difference);
    d.norm = sqrt(d.norm);
    return d;
}

static double *download_bf16(Tensor t, int64_t n) {
    bf16_bits *bits = (bf16_bits *)xcalloc((size_t)n, sizeof *bits);
    CUDA_CHECK(cudaMemcpy(bits, tensor_data(t), (size_t)n * 2, cudaMemcpyDeviceToHost));
    double *x = (double *)xcalloc((size_t)n, sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = bf16_to_float(bits[i]);
    free(bits);
    return x;
}

// Largest ratio of an error to the rounded reference's error, over the checks in which the latter is above `slack`. It
// is printed to show how tight the bound is.
static double largest_ratio;

// A correct implementation is about as far from the exact result as the rounded reference is. The bound is twice that
// distance, which allows for chance in the smallest cases; a wrong mask, tile or scale costs far more. `slack` is for
// results that are zero except for fp32 rounding (T = 1: dQ = dK = 0).
static void check_error(const char *what, const double *got, const double *exact, const double *rounded, int64_t rows,
                        int64_t row, int64_t first, int64_t end, double slack) {
    Distance error = distance(got, exact, rows, row, first, end),
             allowed = distance(rounded, exact, rows, row, first, end);
    const double bound = 2 * allowed.difference + slack;
    if (allowed.difference > slack && error.difference / allowed.difference > largest_ratio)
        largest_ratio = error.difference / allowed.difference;
    CHECK(error.difference <= bound,
          "%s: the error is %.3e of the norm, the bound %.3e; %lld not finite; worst at row %lld column %lld: %g, want "
          "%g",
          what, error.difference / error.norm, bound / error.norm, (long long)error.not_finite,
          (long long)(error.worst / row), (long long)(error.worst % row), got[error.worst], exact[error.worst]);
}

typedef struct {
    AttentionDims d;
    float logit_scale;
    int64_t documents;  // mean of the lengths of random documents; 0: each sequence is one
} Case;

// Tensors and references of one case; n_* are numbers of elements.
typedef struct {
    Case c;
    char name[96];
    int64_t n_qkv, n_out, n_lse;
    Tensor qkv, dout, exact_out, exact_lse, out, lse, dqkv, again, workspace;
    Reference exact, rounded;
} Setup;

static Setup setup_case(Case c, uint64_t key) {
    Setup s;
    if (c.documents) documents_create(&c.d, c.documents, rng_key(key, 2));
    const AttentionDims d = c.d;
    s.c = c;
    format_checked(s.name, sizeof s.name, "B %lld T %lld NH %lld NKV %lld HD %lld logits x%g documents %lld",
                   (long long)d.B, (long long)d.T, (long long)d.NH, (long long)d.NKV, (long long)d.HD,
                   (double)c.logit_scale, (long long)c.documents);
    const int64_t row = (d.NH + 2 * d.NKV) * d.HD;
    s.n_qkv = d.B * d.T * row;
    s.n_out = d.B * d.T * d.NH * d.HD;
    s.n_lse = d.B * d.NH * d.T;
    s.qkv = tensor_alloc((size_t)s.n_qkv * 2);
    s.dqkv = tensor_alloc((size_t)s.n_qkv * 2);
    s.again = tensor_alloc((size_t)s.n_qkv * 2);
    s.dout = tensor_alloc((size_t)s.n_out * 2);
    s.out = tensor_alloc((size_t)s.n_out * 2);
    s.exact_out = tensor_alloc((size_t)s.n_out * 2);
    s.lse = tensor_alloc((size_t)s.n_lse * 4);
    s.exact_lse = tensor_alloc((size_t)s.n_lse * 4);
    s.workspace = tensor_alloc(attention_workspace_bytes(d.B, d.T, d.NH, d.NKV, d.HD));
    fill_normal(s.qkv, s.n_qkv, rng_key(key, 0), row, d.NH * d.HD, c.logit_scale);
    fill_normal(s.dout, s.n_out, rng_key(key, 1), d.NH * d.HD, 0, 1.0f);
    s.exact = reference_compute(s.qkv, s.dout, d, false);
    s.rounded = reference_compute(s.qkv, s.dout, d, true);
    bf16_bits *out = (bf16_bits *)xcalloc((size_t)s.n_out, 2);  // backward is checked on the exact forward's results
    float *lse = (float *)xcalloc((size_t)s.n_lse, 4);
    for (int64_t i = 0; i < s.n_out; i++) out[i] = bf16_from_float((float)s.exact.out[i]);
    for (int64_t i = 0; i < s.n_lse; i++) lse[i] = (float)s.exact.lse[i];
    CUDA_CHECK(cudaMemcpy(tensor_data(s.exact_out), out, (size_t)s.n_out * 2, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(tensor_data(s.exact_lse), lse, (size_t)s.n_lse * 4, cudaMemcpyHostToDevice));
    free(out);
    free(lse);
    return s;
}

static void setup_free(Setup *s) {
    Tensor all[] = {s->qkv, s->dout, s->exact_out, s->exact_lse, s->out, s->lse, s->dqkv, s->again, s->workspace};
    for (int i = 0; i < 9; i++) tensor_free(all[i]);
    if (s->c.documents) bench_free(s->c.d.documents.starts);
    reference_free(s->exact);
    reference_free(s->rounded);
}

// amax is a device pointer or NULL.
static void run_forward(const Implementation *im, Setup *s, Tensor out, Tensor lse, uint32_t *amax) {
    im->forward((bf16 *)tensor_data(out), (float *)tensor_data(lse), amax, (const bf16 *)tensor_data(s->qkv), s->c.d,
                0);
    cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) die("%s forward, %s: %s", im->name, s->name, cudaGetErrorString(error));
}

static void run_backward(const Implementation *im, Setup *s, Tensor dqkv, bool deterministic) {
    AttentionDims d = s->c.d;
    d.deterministic = deterministic;
    im->backward((bf16 *)tensor_data(dqkv), (const bf16 *)tensor_data(s->dout), (const bf16 *)tensor_data(s->qkv),
                 (const bf16 *)tensor_data(s->exact_out), (const float *)tensor_data(s->exact_lse),
                 tensor_data(s->workspace), d, 0);
    cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) die("%s backward, %s: %s", im->name, s->name, cudaGetErrorString(error));
}

static void check_forward(const Implementation *im, Setup *s) {
    char what[160];
    const AttentionDims d = s->c.d;
    tensor_poison(s->out);
    tensor_poison(s->lse);
    run_forward(im, s, s->out, s->lse, NULL);
    double *got = download_bf16(s->out, s->n_out);
    format_checked(what, sizeof what, "%s forward, %s, out", im->name, s->name);
    check_error(what, got, s->exact.out, s->rounded.out, d.B * d.T, d.NH * d.HD, 0, d.NH * d.HD, 0);
    float largest_out = 0;
    for (int64_t i = 0; i < s->n_out; i++) largest_out = fmaxf(largest_out, fabsf((float)got[i]));
    free(got);
    // lse is fp32 throughout: dot products of bf16 summed in fp32 (error about 1e-6 of the largest score), then a fast
    // exp2 and a log.
    float *lse = (float *)xcalloc((size_t)s->n_lse, 4);
    CUDA_CHECK(cudaMemcpy(lse, tensor_data(s->lse), (size_t)s->n_lse * 4, cudaMemcpyDeviceToHost));
    int64_t worst = 0;
    double largest = 0;
    for (int64_t i = 0; i < s->n_lse; i++) {
        largest = fmax(largest, fabs(s->exact.lse[i]));
        if (!(fabs(lse[i] - s->exact.lse[i]) <= fabs(lse[worst] - s->exact.lse[worst]))) worst = i;
    }
    CHECK(fabs(lse[worst] - s->exact.lse[worst]) <= 1e-5 * (10 + largest),
          "%s forward, %s: lse [B*NH, T] at [%lld, %lld] is %g, want %g", im->name, s->name, (long long)(worst / d.T),
          (long long)(worst % d.T), (double)lse[worst], s->exact.lse[worst]);
    free(lse);
    CHECK(tensor_guards_hold(s->out, (size_t)s->n_out * 2) && tensor_guards_hold(s->lse, (size_t)s->n_lse * 4),
          "%s forward, %s writes nothing outside its outputs", im->name, s->name);
    Tensor out2 = tensor_alloc((size_t)s->n_out * 2), lse2 = tensor_alloc((size_t)s->n_lse * 4);
    uint32_t *amax = (uint32_t *)bench_zeros(sizeof *amax);
    run_forward(im, s, out2, lse2, amax);
    CHECK(count_differences(s->out, out2) == 0 && count_differences(s->lse, lse2) == 0,
          "%s forward, %s: runs without and with the amax give equal bits", im->name, s->name);
    float *found = (float *)bench_download(amax, sizeof *amax, s->name);
    CHECK(*found == largest_out, "%s forward, %s: the amax is %g, want %g", im->name, s->name, (double)*found,
          (double)largest_out);
    free(found);
    bench_free(amax);
    tensor_free(out2);
    tensor_free(lse2);
}

static void check_backward(const Implementation *im, Setup *s, bool deterministic) {
    const AttentionDims d = s->c.d;
    const int64_t row = (d.NH + 2 * d.NKV) * d.HD, bounds[] = {0, d.NH * d.HD, (d.NH + d.NKV) * d.HD, row};
    const char *parts[] = {"dQ", "dK", "dV"}, *mode = deterministic ? " deterministic" : "";
    tensor_poison(s->dqkv);
    tensor_poison(s->workspace);
    run_backward(im, s, s->dqkv, deterministic);
    double *got = download_bf16(s->dqkv, s->n_qkv);
    for (int i = 0; i < 3; i++) {
        char what[160];
        format_checked(what, sizeof what, "%s backward%s, %s, %s", im->name, mode, s->name, parts[i]);
        // fp32 rounding makes an error of about 1e-6 in an element of dS. dQ and dK multiply it by keys or queries,
        // and the queries' elements are about logit_scale. The norm of n_out such errors is the slack.
        const double slack = 1e-6 * s->c.logit_scale * sqrt((double)s->n_out);
        check_error(what, got, s->exact.dqkv, s->rounded.dqkv, d.B * d.T, row, bounds[i], bounds[i + 1], slack);
    }
    free(got);
    const size_t workspace = attention_workspace_bytes(d.B, d.T, d.NH, d.NKV, d.HD);
    CHECK(tensor_guards_hold(s->dqkv, (size_t)s->n_qkv * 2) && tensor_guards_hold(s->workspace, workspace),
          "%s backward%s, %s writes nothing outside its output and workspace", im->name, mode, s->name);
    if (!deterministic) return;
    const int repeats = d.T == 1000 ? 100 : 2;  // an ordering error shows rarely, so one length is repeated often
    int64_t differences = 0;
    for (int i = 0; i < repeats; i++) {
        tensor_poison(s->again);
        run_backward(im, s, s->again, true);
        differences += count_differences(s->dqkv, s->again);
    }
    CHECK(differences == 0, "%s backward, %s: %d deterministic runs give the bits of the first; %lld words differ",
          im->name, s->name, repeats, (long long)differences);
}

// Checks that kernels with the mask, where each sequence is one document, give the bits of those without.
static void check_one_document(const Implementation *im, Setup *s) {
    Setup masked = *s;
    documents_create(&masked.c.d, s->c.d.T, 0);
    masked.out = tensor_alloc((size_t)s->n_out * 2), masked.lse = tensor_alloc((size_t)s->n_lse * 4);
    Tensor *poisoned[] = {&s->out, &s->lse, &s->dqkv, &s->again};
    for (int i = 0; i < 4; i++) tensor_poison(*poisoned[i]);
    run_forward(im, s, s->out, s->lse, NULL);
    run_forward(im, &masked, masked.out, masked.lse, NULL);
    CHECK(count_differences(s->out, masked.out) == 0 && count_differences(s->lse, masked.lse) == 0,
          "%s forward, %s: one document has the bits of no documents", im->name, s->name);
    run_backward(im, s, s->dqkv, true);
    run_backward(im, &masked, s->again, true);
    CHECK(count_differences(s->dqkv, s->again) == 0, "%s backward, %s: one document has the bits of no documents",
          im->name, s->name);
    bench_free(masked.c.d.documents.starts);
    tensor_free(masked.out);
    tensor_free(masked.lse);
}

static void call_attention_forward(bf16 *out, float *lse, uint32_t *amax, const bf16 *qkv, AttentionDims d,
                                   cudaStream_t stream) {
    attention_forward(out, lse, amax, qkv, d, stream);
}

static void call_attention_backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse,
                                    void *workspace, AttentionDims d, cudaStream_t stream) {
    attention_backward(dqkv, dout, qkv, out, lse, workspace, d, stream);
}

// Checks that the public entry points give the bits of the implementation for this GPU.
static void check_dispatch(Setup *s) {
    const Implementation chosen = implementations[hopper_available() ? 1 : 0],
                         dispatch = {"dispatch", call_attention_forward, call_attention_backward, false};
    Tensor out2 = tensor_alloc((size_t)s->n_out * 2), lse2 = tensor_alloc((size_t)s->n_lse * 4);
    Tensor *poisoned[] = {&s->out, &s->lse, &s->dqkv, &s->again};
    for (int i = 0; i < 4; i++) tensor_poison(*poisoned[i]);
    run_forward(&chosen, s, s->out, s->lse, NULL);
    run_forward(&dispatch, s, out2, lse2, NULL);
    CHECK(count_differences(s->out, out2) == 0 && count_differences(s->lse, lse2) == 0,
          "%s: attention_forward gives the bits of %s", s->name, chosen.name);
    run_backward(&chosen, s, s->dqkv, true);
    run_backward(&dispatch, s, s->again, true);
    CHECK(count_differences(s->dqkv, s->again) == 0, "%s: attention_backward gives the bits of %s", s->name,
          chosen.name);
    tensor_free(out2);
    tensor_free(lse2);
}

// ---------------------------------------------------------------------------------------------------------------------
// Main program: cases and arguments

typedef struct {
    bool implementation[2], forward, backward, check, bench, deterministic_only;
} Choice;

static bool implementation_runs(const Choice *o, int i) {
    return o->implementation[i] && (!implementations[i].hopper || hopper_available());
}

static void check_case(const Choice *o, Case c, uint64_t key) {
    Setup s = setup_case(c, key);
    for (int i = 0; i < 2; i++) {
        if (!implementation_runs(o, i)) continue;
        if (o->forward) check_forward(&implementations[i], &s);
        if (o->backward && !o->deterministic_only) check_backward(&implementations[i], &s, false);
        if (o->backward) check_backward(&implementations[i], &s, true);
        if (o->forward && o->backward && !c.documents) check_one_document(&implementations[i], &s);
    }
    if (o->forward && o->backward) check_dispatch(&s);
    setup_free(&s);
}

// Covers lengths that do and do not fill their tiles, groups of 1, 4 and 8 query heads, 1 and 2 sequences, and scores
// of standard deviation 1 and 30 (softmax almost one-hot). `many` has many short sequences: a thread block of the sm90
// backward computes a whole GQA group there, and writes dK and dV directly in bf16. At head_dim 128, the sm90 backward
// that is not deterministic also has two sections there (attention_backward_plan.cuh). Documents have one token each,
// less than a tile, about a tile, and several.
static void check_all(const Choice *o) {
    const int64_t lengths[] = {1, 63, 113, 128, 1000, 2048}, groups[] = {1, 4, 8, 4}, documents[] = {1, 9, 90, 400};
    const uint64_t seed = (uint64_t)time(NULL);
    printf("check: seed %llu\n", (unsigned long long)seed);
    uint64_t n = 0;
    for (int64_t HD = 64; HD <= 128; HD *= 2) {
        for (int t = 0; t < 6; t++) {
            for (int g = 0; g < 4; g++) {
                Case c = {{lengths[t] == 2048 ? 1 : 2, lengths[t], 8, 8 / groups[g], HD, false, {}},
                          g == 3 ? 30.0f : 1.0f,
                          0};
                check_case(o, c, rng_key(seed, n++));
                c.documents = documents[(t + g) % 4];
                check_case(o, c, rng_key(seed, n++));
            }
        }
        Case many = {{300, 130, 2, 1, HD, false, {}}, 1.0f, 0};
        check_case(o, many, rng_key(seed, n++));
        many.documents = 40;
        check_case(o, many, rng_key(seed, n++));
    }
    printf("check: largest error is %.3f times the rounded reference's (bound 2)\n", largest_ratio);
}

static void call_unsupported(void *context) {
    AttentionDims d = *(const AttentionDims *)context;
    attention_forward(NULL, NULL, NULL, NULL, d, 0);
}

// Runs before the first CUDA call, because a forked process cannot share a CUDA context.
static void check_bad_sizes(void) {
    char output[512];
    AttentionDims head_dim = {1, 16, 8, 2, 80, false, {}}, heads = {1, 16, 8, 3, 64, false, {}},
                  empty = {1, 0, 8, 2, 64, false, {}};
    CHECK(check_dies(call_unsupported, &head_dim, "head_dim 80 is not supported", output, sizeof output),
          "head_dim 80 is refused: %s", output);
    CHECK(check_dies(call_unsupported, &heads, "8 query heads cannot share 3", output, sizeof output),
          "8 query heads over 3 key/value heads are refused: %s", output);
    CHECK(check_dies(call_unsupported, &empty, "length 0", output, sizeof output), "length 0 is refused: %s", output);
}

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

#define BENCH_CALLS 11

// Says why attention stays below the GEMM peak. The arithmetic is that of a Hopper SM: 4096 FLOPs of GEMMs and 16
// exponentials per cycle.
static const char *bench_reason(const Implementation *im, AttentionDims d, int pass) {
    if (!im->hopper && pass) return "mma.sync, slower than wgmma on Hopper; 7 GEMMs, of which 5 are counted";
    if (!im->hopper) return "mma.sync, slower than wgmma on Hopper; softmax between its GEMMs";
    if (pass == 2)
        return "blocks wait for their turn to add to dQ; dS goes through shared memory; exponentials take cycles too";
    if (pass == 1) return "dQ is added in fp32 in memory; dS goes through shared memory; exponentials take cycles too";
    if (d.T < 4096) return "short sequences: the causal triangle has few tiles per SM; softmax takes cycles too";
    if (d.HD == 64) return "the exponentials take as many cycles as the two GEMMs";
    return "the exponentials take half as many cycles as the two GEMMs";
}

// pass is 0 for forward, 1 for backward, 2 for deterministic backward. length: that of documents; 0: no mask.
static void bench_one(Bench *b, const Implementation *im, AttentionDims d, int pass, int64_t length) {
    if (length) documents_create(&d, length, 0);
    const int64_t n_qkv = d.B * d.T * (d.NH + 2 * d.NKV) * d.HD, n_out = d.B * d.T * d.NH * d.HD;
    Tensor qkv = tensor_alloc((size_t)n_qkv * 2), dqkv = tensor_alloc((size_t)n_qkv * 2),
           out = tensor_alloc((size_t)n_out * 2);
    Tensor dout = tensor_alloc((size_t)n_out * 2), lse = tensor_alloc((size_t)(d.B * d.NH * d.T) * 4);
    Tensor workspace = tensor_alloc(attention_workspace_bytes(d.B, d.T, d.NH, d.NKV, d.HD));
    fill_normal(qkv, n_qkv, 1, 1, 0, 1.0f);
    fill_normal(dout, n_out, 2, 1, 0, 1.0f);
    cudaEvent_t events[BENCH_CALLS + 1];
    for (int i = 0; i <= BENCH_CALLS; i++) CUDA_CHECK(cudaEventCreate(&events[i]));
    im->forward((bf16 *)tensor_data(out), (float *)tensor_data(lse), NULL, (const bf16 *)tensor_data(qkv), d, 0);
    d.deterministic = pass == 2;
    const auto launch = [&] {
        if (pass == 0)
            im->forward((bf16 *)tensor_data(out), (float *)tensor_data(lse), NULL, (const bf16 *)tensor_data(qkv), d,
                        0);
        else
            im->backward((bf16 *)tensor_data(dqkv), (const bf16 *)tensor_data(dout), (const bf16 *)tensor_data(qkv),
                         (const bf16 *)tensor_data(out), (const float *)tensor_data(lse), tensor_data(workspace), d, 0);
    };
    for (int i = -2; i < BENCH_CALLS; i++) {
        if (i == 0) bench_clock_begin(b);
        if (i >= 0) CUDA_CHECK(cudaEventRecord(events[i]));
        launch();
    }
    CUDA_CHECK(cudaEventRecord(events[BENCH_CALLS]));
    const double ghz = bench_clock_end(b);
    float ms[BENCH_CALLS];
    for (int i = 0; i < BENCH_CALLS; i++) CUDA_CHECK(cudaEventElapsedTime(&ms[i], events[i], events[i + 1]));
    qsort(ms, BENCH_CALLS, sizeof ms[0], compare_floats);
    bench_sustained(b, ms[BENCH_CALLS / 2] * 1e3, launch);
    char name[64], shape[64];
    format_checked(name, sizeof name, "attention %s, %s", im->name,
                   pass == 0   ? "forward"
                   : pass == 1 ? "backward"
                               : "backward deterministic");
    format_checked(shape, sizeof shape, "%lld, %lld/%lldx%lld", (long long)d.T, (long long)d.NH, (long long)d.NKV,
                   (long long)d.HD);
    if (length)
        format_checked(shape + strlen(shape), sizeof shape - strlen(shape), ", documents of %lld", (long long)length);
    const double seen = (double)(length ? length : d.T),
                 flops = 4.0 * (double)(d.B * d.NH * d.HD) * (double)d.T * seen / 2 * (pass ? 2.5 : 1.0);
    bench_report_flops(b, name, shape, ms[BENCH_CALLS / 2] * 1e3, flops, false, ghz,
                       length ? "tiles at the ends of documents are only partly used" : bench_reason(im, d, pass));
    if (length) bench_free(d.documents.starts);
    for (int i = 0; i <= BENCH_CALLS; i++) CUDA_CHECK(cudaEventDestroy(events[i]));
    Tensor all[] = {qkv, dqkv, out, dout, lse, workspace};
    for (int i = 0; i < 6; i++) tensor_free(all[i]);
}

// Times the memory-bound kernels of the backward pass. Before the GEMMs each implementation runs a kernel that computes
// delta, the row sums of dout * out. After the GEMMs sm90 runs a kernel that casts dQ to bf16.
template <int HD>
static void bench_beside_gemms(Bench *b, const Choice *o) {
    // T is whole tiles, and so long that a thread block sums the whole GQA group.
    const int64_t T = 8192, NH = 32, NKV = 8, n = T * NH * HD;
    const AttentionDims d = {1, T, NH, NKV, HD, false, {}};
    bf16 *dout = bench_random(n, 1, 1), *out = bench_random(n, 2, 1),
         *dqkv = (bf16 *)bench_alloc(T * (NH + 2 * NKV) * HD * 2);
    float *dq = (float *)bench_alloc(n * 4), *lse = (float *)bench_zeros(NH * T * 4),
          *stats = (float *)bench_alloc(2 * NH * T * 4);
    char shape[32];
    format_checked(shape, sizeof shape, "%lld, %lld/%lldx%d", (long long)T, (long long)NH, (long long)NKV, HD);
    if (implementation_runs(o, 0)) {
        const double us =
            bench_time_us(b, [&] { attention_delta_kernel<<<grid_size(T * NH, 8), 256>>>(stats, dout, out, d); });
        bench_report(b, "attention mma backward, delta", shape, us, 4.0 * (double)n + 4.0 * (double)(NH * T),
                     "one warp per row of one head: a thread loads 2 bytes at a time");
    }
    if (implementation_runs(o, 1)) {
        const dim3 stats_grid((unsigned)(T * HD / 8 / 256), (unsigned)NH, 1),
            rows_grid((unsigned)(T / 64), (unsigned)(NH * HD / 64), 1);
        double us = bench_time_us(
            b, [&] { attention_backward_stats<HD><<<stats_grid, 256>>>(stats, dq, NULL, 0, dout, out, lse, T, NH); });
        bench_report(b, "attention sm90 backward, lse, delta, zero dQ", shape, us,
                     8.0 * (double)n + 12.0 * (double)(NH * T),
                     "short blocks: a thread loads 16 bytes of each tensor once");
        us = bench_time_us(b, [&] { attention_backward_rows<HD><<<rows_grid, 256>>>(dqkv, dq, NULL, T, NH, NKV, 1); });
        bench_report(b, "attention sm90 backward, dQ to bf16", shape, us, 6.0 * (double)n,
                     "a load reads 16 of every 64 bytes of a fragment; later loads find the rest in L1");
    }
    CUDA_CHECK_LAUNCH();
    void *device[] = {dout, out, dqkv, dq, lse, stats};
    for (void *p : device) bench_free(p);
}

// Benches the shapes of Llama-3.1-8B (head_dim 128) and their variants with head_dim 64, and the longest with
// documents; attention_cudnn.py has these shapes too.
static void bench_all(const Choice *o) {
    const int64_t documents[] = {0, 2000, 500, 100};
    Bench b = bench_create();
    for (int i = 0; i < 2; i++) {
        if (!implementation_runs(o, i)) continue;
        for (int64_t HD = 64; HD <= 128; HD *= 2) {
            for (int64_t T = 2048; T <= 8192; T *= 2) {
                AttentionDims d = {1, T, 32, 8, HD, false, {}};
                for (int k = 0; k < (T == 8192 ? 4 : 1); k++) {
                    if (o->forward) bench_one(&b, &implementations[i], d, 0, documents[k]);
                    if (o->backward && !o->deterministic_only) bench_one(&b, &implementations[i], d, 1, documents[k]);
                    if (o->backward && implementations[i].hopper)
                        bench_one(&b, &implementations[i], d, 2, documents[k]);
                }
            }
        }
    }
    if (o->backward) bench_beside_gemms<64>(&b, o);
    if (o->backward) bench_beside_gemms<128>(&b, o);
    bench_destroy(&b);
}

int main(int argc, char **argv) {
    const char *words[] = {"mma", "sm90", "fwd", "bwd", "check", "bench", "deterministic"};
    bool given[7] = {false};
    for (int i = 1; i < argc; i++) {
        int w = 0;
        while (w < 7 && strcmp(argv[i], words[w])) w++;
        if (w == 7) die("unknown word \"%s\": use mma, sm90, fwd, bwd, check, bench, deterministic", argv[i]);
        given[w] = true;
    }
    // Naming no word or both words of a pair (mma sm90, fwd bwd, check bench) selects both.
    bool on[6];
    for (int i = 0; i < 6; i++) on[i] = given[i] || !given[i ^ 1];
    const Choice o = {{on[0], on[1]}, on[2], on[3], on[4], on[5], given[6]};
    if (o.check) check_bad_sizes();
    if (o.implementation[1] && !hopper_available())
        printf("sm90: skipped, the GPU is not of compute capability 9.0 or the build is not for sm_90a\n");
    if (o.check) check_all(&o);
    if (o.bench) bench_all(&o);
    return check_report();
}
