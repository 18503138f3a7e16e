// --fp8-filter auto: which linear layers are faster in bf16 on this GPU, found by timing both.
//
// The FP8 time of a linear layer is the time of its three GEMMs plus the casts of x, w and dy as separate passes over
// memory. In a step the casts of x and dy may take less, because those that follow a norm or SwiGLU are fused with it.
// The cast of w counts as often as a run makes it (precision_casts_once): once a step, divided by the number of
// micro-steps, or in forward and again in backward of each micro-step.
#ifndef LLMC_AUTO_FILTER_CUH
#define LLMC_AUTO_FILTER_CUH

#include "gemm.cuh"

enum { AUTO_FILTER_RUNS = 7, AUTO_FILTER_BUFFERS = 24 };

// Buffers and data for timing one linear layer. The buffers are freed after the layer.
typedef struct {
    Gemm gemm;
    const Precision *precision;
    const Options *options;
    LinearShape shape;
    int64_t R;
    bool casts_once;              // precision_casts_once
    bf16 *result;                 // large enough for the result of each GEMM
    QTensor tensor[NUM_TENSORS];  // w [N, K], x [R, K], dy [R, N]
    int64_t amaxes[NUM_TENSORS];  // number of amaxes of each tensor
    void *buffers[AUTO_FILTER_BUFFERS];
    int num_buffers;
    cudaEvent_t begin, end;
} AutoFilter;

// Allocates zeroed device memory; NULL for 0 bytes. Dies if it cannot be had.
static inline void *auto_filter_alloc(AutoFilter *f, int64_t bytes) {
    if (!bytes) return NULL;
    void *p = NULL;
    const cudaError_t error = cudaMalloc(&p, (size_t)bytes);
    if (error != cudaSuccess)
        die_with(
            error == cudaErrorMemoryAllocation ? EXIT_MEMORY : EXIT_OTHER,
            "--fp8-filter auto: cannot allocate %lld bytes of GPU memory to time layer %s (%s); list the layers for "
            "bf16 by name instead",
            (long long)bytes, f->shape.name, cudaGetErrorString(error));
    CUDA_CHECK(cudaMemsetAsync(p, 0, (size_t)bytes, f->gemm.stream));
    return f->buffers[f->num_buffers++] = p;
}

static inline int64_t auto_filter_rows(const AutoFilter *f, TensorRole t) { return t == TENSOR_W ? f->shape.N : f->R; }
static inline int64_t auto_filter_cols(const AutoFilter *f, TensorRole t) {
    return t == TENSOR_DY ? f->shape.N : f->shape.K;
}

// Allocates a tensor's bf16 data, FP8 data, scales and amaxes, and fills the bf16 data with random numbers.
static inline void auto_filter_tensor(AutoFilter *f, TensorRole t) {
    const Recipe *r = f->precision->recipe;
    const int64_t rows = auto_filter_rows(f, t), cols = auto_filter_cols(f, t), n = rows * cols;
    QTensor *q = &f->tensor[t];
    *q = recipe_qtensor(r, t, precision_format(f->precision, t));
    if (q->row_granularity != NO_SCALE) q->rowwise = (uint8_t *)auto_filter_alloc(f, n);
    if (q->col_granularity != NO_SCALE) q->columnwise = (uint8_t *)auto_filter_alloc(f, n);
    q->rowwise_scale_inv = auto_filter_alloc(f, scale_bytes(q->row_granularity, rows, cols));
    q->columnwise_scale_inv = q->row_granularity == PER_TENSOR && q->col_granularity == PER_TENSOR
                                  ? q->rowwise_scale_inv
                                  : auto_filter_alloc(f, scale_bytes(q->col_granularity, cols, rows));
    f->amaxes[t] = tensor_amaxes(q->row_granularity, q->col_granularity, rows, cols);
    q->amax = (uint32_t *)auto_filter_alloc(f, f->amaxes[t] * (int64_t)sizeof(uint32_t));
    if (r->delayed) {
        const float scale = gemm_fill_scale(PER_TENSOR, r->rule, q->format, rows, cols);
        float *delayed = (float *)auto_filter_alloc(f, sizeof(float));
        CUDA_CHECK(cudaMemcpyAsync(delayed, &scale, sizeof scale, cudaMemcpyHostToDevice, f->gemm.stream));
        q->delayed_scale = delayed;
    }
    q->data = (bf16 *)auto_filter_alloc(f, n * (int64_t)sizeof(bf16));
    gemm_fill(q->data, n, t, 0, q->format, f->gemm.stream);
}

static inline void auto_filter_cast(AutoFilter *f, TensorRole t) {
    const QTensor *q = &f->tensor[t];
    if (!q->rowwise && !q->columnwise) return;
    if (f->amaxes[t]) CUDA_CHECK(cudaMemsetAsync(q->amax, 0, (size_t)f->amaxes[t] * sizeof(uint32_t), f->gemm.stream));
    tensor_quantize(*q, q->data, auto_filter_rows(f, t), auto_filter_cols(f, t), f->gemm.stream);
}

// Returns the median microseconds of launch(), after one warm-up run.
template <class Launch>
static inline double auto_filter_time(AutoFilter *f, Launch launch) {
    double us[AUTO_FILTER_RUNS];
    launch();
    for (int i = 0; i < AUTO_FILTER_RUNS; i++) {
        float ms;
        CUDA_CHECK(cudaEventRecord(f->begin, f->gemm.stream));
        launch();
        CUDA_CHECK(cudaEventRecord(f->end, f->gemm.stream));
        CUDA_CHECK(cudaEventSynchronize(f->end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, f->begin, f->end));
        int j = i;
        for (; j > 0 && us[j - 1] > ms * 1e3; j--) us[j] = us[j - 1];
        us[j] = ms * 1e3;
    }
    return us[AUTO_FILTER_RUNS / 2];
}

// Returns the microseconds that the casts of w take in a micro-step. In a run that casts in each pass, forward needs
// rowwise data and backward columnwise data (both if it recomputes GEMMs); amaxes are found once a step all the same,
// and do not count.
static inline double auto_filter_weight_casts(AutoFilter *f) {
    const double both = auto_filter_time(f, [&] { auto_filter_cast(f, TENSOR_W); });
    if (f->casts_once) return both / (double)f->options->grad_accumulation_steps;
    QTensor forward = f->tensor[TENSOR_W], backward = forward;
    const Recomputed again = options_recomputed(f->options);
    forward.columnwise = NULL;
    if (!again.attention && !again.mlp) backward.rowwise = NULL;
    double us = 0;
    for (const QTensor &q : {forward, backward})
        if (q.rowwise || q.columnwise)
            us += auto_filter_time(f, [&] { quantize_transpose(q, q.data, f->shape.N, f->shape.K, f->gemm.stream); });
    return us;
}

// Returns the microseconds of the layer's three GEMMs in recipe r. FP8 GEMMs read what auto_filter_cast wrote.
static inline double auto_filter_gemms(AutoFilter *f, const Recipe *r) {
    double us = 0;
    for (int i = 0; i < NUM_GEMMS; i++) {
        const GemmKind kind = (GemmKind)i;
        const QTensor *a = &f->tensor[gemm_tensor(kind, 0)], *b = &f->tensor[gemm_tensor(kind, 1)];
        GemmPlan p =
            gemm_describe(f->shape.name, kind, f->R, f->shape.N, f->shape.K, gemm_spec(f->precision, r, kind), false);
        gemm_choose(&f->gemm, &p, f->result, a, b, NULL);
        us += auto_filter_time(f, [&] { gemm_run(&f->gemm, &p, f->result, a, b, NULL, false); });
        gemm_destroy(&p);
    }
    return us;
}

// Times one linear layer and prints its times. Returns true if FP8 is not faster.
static inline bool auto_filter_layer(AutoFilter *f) {
    const LinearShape *s = &f->shape;
    for (int t = 0; t < NUM_TENSORS; t++) auto_filter_tensor(f, (TensorRole)t);
    f->result = (bf16 *)auto_filter_alloc(f, max_i64(f->R * max_i64(s->N, s->K), s->N * s->K) * (int64_t)sizeof(bf16));
    double casts = auto_filter_weight_casts(f);
    for (const TensorRole t : {TENSOR_X, TENSOR_DY}) casts += auto_filter_time(f, [&] { auto_filter_cast(f, t); });
    const double fp8 = auto_filter_gemms(f, f->precision->recipe) + casts,
                 plain = auto_filter_gemms(f, recipe_row(RECIPE_BF16));
    printf(" %s %.1f/%.1f (casts %.1f)", s->name, plain, fp8, casts);
    for (int i = 0; i < f->num_buffers; i++) CUDA_CHECK(cudaFree(f->buffers[i]));
    f->num_buffers = 0;
    return plain <= fp8;
}

// Times the linear layers in FP8 and in bf16. Writes to `list` the names of those that FP8 does not make faster,
// comma-separated as for --fp8-filter; "" if there are none. Layers whose sizes the recipe does not support stay in
// bf16 anyway: they are neither timed nor listed. `p` is a plan without a filter, R the rows of a micro-step,
// shard_size the ranks per replica. Prints the times in one line, and allocates and frees GPU memory for one layer at a
// time. options_rules.h refuses
// --fp8-filter auto with --fp8-emulate and with --deterministic. Dies if memory is short or cuBLASLt lacks a GEMM.
static inline void auto_filter(char *list, size_t capacity, const Precision *p, const Options *o, int64_t R,
                               int64_t shard_size, cudaStream_t stream) {
    AutoFilter f;
    memset(&f, 0, sizeof f);
    f.precision = p, f.options = o, f.R = R, f.gemm.stream = stream;
    f.casts_once = precision_casts_once(o, shard_size);
    CUBLAS_CHECK(cublasLtCreate(&f.gemm.handle));
    CUDA_CHECK(cudaMalloc(&f.gemm.workspace, GEMM_WORKSPACE_BYTES));
    CUDA_CHECK(cudaEventCreate(&f.begin));
    CUDA_CHECK(cudaEventCreate(&f.end));
    printf("--fp8-filter auto, us of a layer's GEMMs in bf16/in fp8 with casts:");
    list[0] = 0;
    for (int id = 0; id < NUM_LINEARS; id++) {
        f.shape = p->linear[id];
        if (!linear_fits(&f.shape, p->recipe)) {
            printf(" %s bf16 (sizes are not multiples of %d)", f.shape.name, p->recipe->multiple);
            continue;
        }
        const size_t used = strlen(list);
        if (auto_filter_layer(&f)) format_checked(list + used, capacity - used, "%s%s", used ? "," : "", f.shape.name);
    }
    printf("\n");
    CUBLAS_CHECK(cublasLtDestroy(f.gemm.handle));
    CUDA_CHECK(cudaFree(f.gemm.workspace));
    CUDA_CHECK(cudaEventDestroy(f.begin));
    CUDA_CHECK(cudaEventDestroy(f.end));
}

// Runs auto_filter for a model and its options, on the default stream.
static inline void auto_filter_find(const Options *o, const ModelConfig *m, int64_t shard_size, char *list,
                                    size_t capacity) {
    ParameterTable table = parameter_table(m);
    Precision all = precision_plan(o, "", m, &table, true);
    auto_filter(list, capacity, &all, o, o->batch_size * o->sequence_length, shard_size, NULL);
    precision_free(&all);
    parameter_table_free(&table);
}

#endif
