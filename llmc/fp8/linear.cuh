// The linear layers of a model: their GEMMs in bf16 and in the run's FP8 recipe, and the casts of their operands.
#ifndef LLMC_LINEAR_CUH
#define LLMC_LINEAR_CUH

#include "gemm.cuh"
#include "../gpu/profile.cuh"
#include "tensor_scales.cuh"

// Plans of the three GEMMs of a linear layer, in bf16 and in FP8. With --fp8-filter a linear layer may run in bf16 in
// some transformer layers and in FP8 in others.
typedef struct {
    GemmPlan bf16[NUM_GEMMS], fp8[NUM_GEMMS];
} LinearPlans;

// lm_head's tensors in FP8 (--fp8-lm-head): the data that its FP8 GEMMs read, with amaxes and scales. y and dlogits
// hold one chunk of rows. All of it is in use only while logits are.
typedef struct {
    QTensor w, y, dlogits;
} HeadTensors;

typedef struct {
    const Precision *precision;
    int64_t rows, head_rows;  // rows of the layers' GEMMs; rows of lm_head's GEMMs, which run in chunks
    bool qkv_bias;
    Gemm gemm;
    LinearPlans plans[NUM_LINEARS];
    LinearShape head;                                      // lm_head, over VP columns of logits
    GemmPlan lm_head[NUM_GEMMS], lm_head_tail[NUM_GEMMS];  // for head_rows rows; for the last chunk if it has fewer
    HeadTensors head_tensors;
    TensorScales scales;
    Profile *profile;
} Linears;

// Rows of logits in memory at a time. Large chunks keep the GEMMs efficient: each chunk writes lm_head's gradient, and
// each but the first also reads it. Small chunks save memory.
enum { LOGITS_ROWS = 4096, LOGITS_FEW_ROWS = 2048 };
static_assert(LOGITS_ROWS % 128 == 0 && LOGITS_FEW_ROWS % 128 == 0, "chunks hold whole blocks of each recipe's rows");

// Returns the rows of logits in memory at a time: the R rows of a micro-step, but at most LOGITS_ROWS. If the logits of
// that many rows do not fit into `room`, at most LOGITS_FEW_ROWS. `room` is the number of logits that fit into the
// memory of gradients that are computed later; 0: there is no such memory, and no limit.
static inline int64_t logits_rows(const Dims *d, int64_t room) {
    const int64_t many = min_i64(d->R, LOGITS_ROWS);
    return room && many * d->VP > room ? min_i64(d->R, LOGITS_FEW_ROWS) : many;
}

// Describes the linear layers over R rows. linears_place and linears_plan must follow before use.
static inline void linears_describe(Linears *ln, const Precision *p, const ModelConfig *m, int64_t R, int64_t head_rows,
                                    const Options *o, Profile *profile) {
    memset(ln, 0, sizeof *ln);
    ln->precision = p, ln->rows = R, ln->head_rows = head_rows, ln->qkv_bias = m->qkv_bias, ln->profile = profile;
    ln->head = p->lm_head, ln->head.N = model_padded_vocabulary(m);
    ln->gemm.deterministic = o->deterministic;
    tensor_scales_describe(&ln->scales, p, R, o);
}

// True if at least the logits are an FP8 GEMM.
static inline bool linears_head_is_fp8(const Linears *ln) { return recipe_is_fp8(&ln->precision->head, GEMM_FPROP); }

// Returns how many elements the two decoded operands of the largest GEMM have, if all linear layers are emulated; 0
// without --fp8-emulate.
static inline int64_t linears_emulation_elements(const Linears *ln) {
    int64_t most = 0;
    for (int i = 0; i < NUM_LINEARS + linears_head_is_fp8(ln) && ln->precision->emulated; i++) {
        const LinearShape *s = i < NUM_LINEARS ? &ln->precision->linear[i] : &ln->head;
        const int64_t R = i < NUM_LINEARS ? ln->rows : ln->head_rows;
        most = max_i64(most, max_i64(R * (s->N + s->K), s->N * s->K + R * max_i64(s->N, s->K)));
    }
    return most;
}

// Places a tensor of lm_head, without bf16 data.
static inline QTensor linears_place_head_tensor(const Linears *ln, TensorRole role, Arena *a) {
    const int64_t rows = role == TENSOR_W ? ln->head.N : ln->head_rows,
                  cols = role == TENSOR_DY ? ln->head.N : ln->head.K;
    QTensor q = recipe_qtensor(&ln->precision->head, role, precision_format(ln->precision, role));
    const ScaleGranularity row = q.row_granularity, col = q.col_granularity;
    q.fp8 = row != NO_SCALE;
    q.amax = (uint32_t *)arena_take(a, tensor_amaxes(row, col, rows, cols) * (int64_t)sizeof(uint32_t));
    if (row != NO_SCALE) {
        q.rowwise = (uint8_t *)arena_take(a, rows * cols);
        q.rowwise_scale_inv = arena_take(a, scale_bytes(row, rows, cols));
    }
    if (col != NO_SCALE) {
        q.columnwise = (uint8_t *)arena_take(a, rows * cols);
        q.columnwise_scale_inv = q.rowwise_scale_inv;
        if (row != PER_TENSOR || col != PER_TENSOR)
            q.columnwise_scale_inv = arena_take(a, scale_bytes(col, cols, rows));
    }
    return q;
}

// Places lm_head's tensors. With --fp8-lm-head off there are none.
static inline void linears_place_head(void *linears, Arena *a) {
    Linears *ln = (Linears *)linears;
    arena_group(a, "FP8 tensors of lm_head");
    ln->head_tensors.w = linears_place_head_tensor(ln, TENSOR_W, a);
    ln->head_tensors.y = linears_place_head_tensor(ln, TENSOR_X, a);
    ln->head_tensors.dlogits = linears_place_head_tensor(ln, TENSOR_DY, a);
}

// Places the GEMM workspace, of at least GEMM_WORKSPACE_BYTES and at least `workspace` bytes. With --fp8-emulate also
// places what emulated GEMMs need.
static inline void linears_place(Linears *ln, int64_t workspace, Arena *a) {
    const bool emulated = ln->precision->emulated;
    arena_group(a, "GEMMs, optimizer");
    ln->gemm.workspace = arena_take(a, max_i64(GEMM_WORKSPACE_BYTES, workspace));
    ln->gemm.scratch = emulated ? (bf16 *)arena_take(a, linears_emulation_elements(ln) * (int64_t)sizeof(bf16)) : NULL;
    ln->gemm.alpha = emulated ? (float *)arena_take(a, (int64_t)sizeof(float)) : NULL;
}

// ---- planning

// Chooses a GEMM's algorithm. Candidates run with operands and results in `memory`, which must not be in use yet and
// must have room for them in bf16, with two times ARENA_ALIGNMENT more.
static inline void linears_plan_gemm(Linears *ln, GemmPlan *p, char *memory) {
    char *result = memory;
    const QTensor a = gemm_fill_operand(p, 0, &result, ln->gemm.stream),
                  b = gemm_fill_operand(p, 1, &result, ln->gemm.stream);
    // The bias is read from the data of a, whose bytes are finite as bf16 too.
    gemm_choose(&ln->gemm, p, (bf16 *)result, &a, &b, a.data);
}

// Plans the three GEMMs of a linear layer over R rows in one recipe.
static inline void linears_plan_layer(Linears *ln, const LinearShape *s, GemmPlan plans[NUM_GEMMS],
                                      const Recipe *recipe, int64_t R, bool bias, char *memory) {
    for (int kind = 0; kind < NUM_GEMMS; kind++) {
        const GemmSpec spec = gemm_spec(ln->precision, recipe, (GemmKind)kind);
        plans[kind] = gemm_describe(s->name, (GemmKind)kind, R, s->N, s->K, spec, bias && kind == GEMM_FPROP);
        linears_plan_gemm(ln, &plans[kind], memory);
    }
}

// Plans all GEMMs that the run has. `memory` is the arena of GPU memory, which is not in use yet. write_cache:
// algorithms that were timed go into the user's file (gemm_cache.h); one rank of each host should write it.
static inline void linears_plan(Linears *ln, cudaStream_t stream, char *memory, bool write_cache) {
    const Precision *p = ln->precision;
    const Recipe *bf16_recipe = recipe_row(RECIPE_BF16);
    const int64_t tail = ln->rows % ln->head_rows;
    CUBLAS_CHECK(cublasLtCreate(&ln->gemm.handle));
    ln->gemm.stream = ln->scales.stream = stream;
    gemm_open_cache(&ln->gemm);
    for (int id = 0; id < NUM_LINEARS; id++) {
        int64_t fp8_layers = 0;
        for (int64_t l = 0; l < p->num_layers; l++) fp8_layers += recipe_is_fp8(precision_of(p, l, id), GEMM_FPROP);
        const bool bias = id == QKV_PROJ && ln->qkv_bias;
        LinearPlans *plans = &ln->plans[id];
        if (fp8_layers) linears_plan_layer(ln, &p->linear[id], plans->fp8, p->recipe, ln->rows, bias, memory);
        if (fp8_layers < p->num_layers)
            linears_plan_layer(ln, &p->linear[id], plans->bf16, bf16_recipe, ln->rows, bias, memory);
    }
    linears_plan_layer(ln, &ln->head, ln->lm_head, &p->head, ln->head_rows, false, memory);
    if (tail) linears_plan_layer(ln, &ln->head, ln->lm_head_tail, &p->head, tail, false, memory);
    gemm_close_cache(&ln->gemm, write_cache);
}

static inline void linears_destroy_plans(GemmPlan plans[NUM_GEMMS]) {
    for (int kind = 0; kind < NUM_GEMMS; kind++)
        if (plans[kind].matmul) gemm_destroy(&plans[kind]);
}

static inline void linears_destroy(Linears *ln) {
    for (int id = 0; id < NUM_LINEARS; id++) {
        linears_destroy_plans(ln->plans[id].bf16);
        linears_destroy_plans(ln->plans[id].fp8);
    }
    linears_destroy_plans(ln->lm_head);
    linears_destroy_plans(ln->lm_head_tail);
    CUBLAS_CHECK(cublasLtDestroy(ln->gemm.handle));
}

// Prints the table of all GEMMs with their operands.
static inline void linears_print(const Linears *ln) { precision_print(ln->precision, ln->rows, ln->head_rows, "bf16"); }

// Prints in one line the GEMMs that should have fast accumulation, but for which cuBLASLt has no such algorithm
// (gemm_choose). Prints nothing if there are none. Call it after linears_plan.
static inline void linears_print_full_accum(const Linears *ln) {
    bool found = false;
    for (int id = 0; id <= NUM_LINEARS; id++)
        for (int kind = 0; kind < NUM_GEMMS; kind++) {
            const GemmPlan *p = id < NUM_LINEARS ? &ln->plans[id].fp8[kind] : &ln->lm_head[kind];
            if (!p->matmul || !p->native || p->spec.fast_accum ||
                !precision_fast_accum(ln->precision, p->spec.recipe, (GemmKind)kind))
                continue;
            printf("%s %s %s",
                   found ? "," : "cuBLASLt has no fast_accum algorithm, so accumulation is full, in:", p->layer,
                   gemm_kind_name((GemmKind)kind));
            found = true;
        }
    if (found) printf("\n");
}

// ---- GEMMs

// Computes d = a b, or d += a b if `accumulate`, with operands as in gemm_run(). `op` names the operation in the
// profile.
static inline void linears_gemm(Linears *ln, const char *op, GemmPlan *p, bf16 *d, const QTensor *a, const QTensor *b,
                                const bf16 *bias, bool accumulate) {
    gemm_run(&ln->gemm, p, d, a, b, bias, accumulate);
    profile_mark(ln->profile, op, p->native ? PROFILE_FLOPS_FP8 : PROFILE_FLOPS_BF16, gemm_flops(p));
}

static inline GemmPlan *linears_plan_of(Linears *ln, const QTensor *w, GemmKind kind) {
    return w->fp8 ? &ln->plans[w->linear].fp8[kind] : &ln->plans[w->linear].bf16[kind];
}

// Computes y [R, N] = x [R, K] w [N, K]^T + bias [N]. bias may be NULL; only q, k and v of some models have one.
static inline void linears_fprop(Linears *ln, bf16 *y, const QTensor *x, const QTensor *w, const bf16 *bias) {
    linears_gemm(ln, "linear layers, fprop", linears_plan_of(ln, w, GEMM_FPROP), y, w, x, bias, false);
}

// Computes dx [R, K] = dy [R, N] w [N, K].
static inline void linears_dgrad(Linears *ln, bf16 *dx, const QTensor *dy, const QTensor *w) {
    linears_gemm(ln, "linear layers, dgrad", linears_plan_of(ln, w, GEMM_DGRAD), dx, w, dy, NULL, false);
}

// Computes dw [N, K] = dy [R, N]^T x [R, K].
static inline void linears_wgrad(Linears *ln, bf16 *dw, const QTensor *dy, const QTensor *x) {
    linears_gemm(ln, "linear layers, wgrad", linears_plan_of(ln, x, GEMM_WGRAD), dw, x, dy, NULL, false);
}

// Returns lm_head's plans for `rows` rows: head_rows, or the rows of a smaller last chunk.
static inline GemmPlan *linears_lm_head(Linears *ln, int64_t rows) {
    return rows == ln->head_rows ? ln->lm_head : ln->lm_head_tail;
}

// ---- Casts of tensors [R, C]. A Source supplies the values (quantize_kernels.cuh).

// Raises the amaxes that the tensor's rowwise and columnwise casts need. Does nothing if they need none, as with block
// scales.
template <class Source>
static inline void qtensor_amax_pass(Linears *ln, const QTensor *q, const Source &source, int64_t R, int64_t C) {
    if (!tensor_amaxes(q->row_granularity, q->col_granularity, R, C)) return;
    profile_bytes(ln->profile, "amax passes", quantize_amax_source("quantize", *q, source, R, C, ln->gemm.stream));
}

// Casts the tensor, and audits the cast if the step is audited. Amaxes that the scales follow from must be known. But
// with the delayed recipe, while scales_ready is false, this function finds the amax itself, and a tensor without a
// scale gets one from that amax.
template <class Source>
static inline void qtensor_cast(Linears *ln, const QTensor *q, const Source &source, int64_t R, int64_t C) {
    if (q->amax_source == AMAX_DELAYED && !ln->scales.scales_ready) {
        qtensor_amax_pass(ln, q, source, R, C);
        tensor_scales_begin(&ln->scales, q);
    }
    const QTensor audited = tensor_scales_audited(&ln->scales, *q);
    profile_bytes(ln->profile, "FP8 casts", quantize_source("quantize", audited, source, R, C, ln->gemm.stream));
}

// Makes the FP8 data of a tensor. Does nothing if its linear layer is not FP8.
template <class Source>
static inline void qtensor_produce(Linears *ln, const QTensor *q, const Source &source, int64_t R, int64_t C) {
    if (!q->fp8) return;
    if (q->amax_source == AMAX_FROM_PASS) qtensor_amax_pass(ln, q, source, R, C);
    qtensor_cast(ln, q, source, R, C);
}

// ---------------------------------------------------------------------------------------------------------------------
// lm_head, whose tensors are cast here. A scale depends neither on the size of chunks nor on the number of ranks:
// those of rowwise data do not reach over rows, blocks of columnwise data lie within a chunk (options_head_conflict
// refuses whole columns), that of a whole y is made from all rows of the micro-step, that of whole dlogits from a bound
// (precision_dlogits_amax). With --fp8-lm-head off nothing is cast.

// Finds the amaxes of q.data [rows, cols], if its scales need any.
static inline void linears_head_amaxes(Linears *ln, const QTensor *q, int64_t rows, int64_t cols) {
    const int64_t amaxes = tensor_amaxes(q->row_granularity, q->col_granularity, rows, cols);
    if (!amaxes) return;
    CUDA_CHECK(cudaMemsetAsync(q->amax, 0, (size_t)amaxes * sizeof(uint32_t), ln->gemm.stream));
    qtensor_amax_pass(ln, q, TensorSource{q->data, cols}, rows, cols);
}

static inline void linears_head_cast(Linears *ln, const QTensor *q, int64_t rows, int64_t cols) {
    const TensorSource source = {q->data, cols};
    profile_bytes(ln->profile, "FP8 casts", quantize_source("lm_head", *q, source, rows, cols, ln->gemm.stream));
}

// Casts the weight [VP, C], and finds the amax of y [R, C], before the first chunk of rows. Without `backward` only
// fprop will read the weight.
static inline void linears_head_begin(Linears *ln, const bf16 *w, const bf16 *y, bool backward) {
    HeadTensors *h = &ln->head_tensors;
    h->w.data = (bf16 *)w;
    if (!h->w.fp8) return;
    QTensor cast = h->w, all = h->y;
    if (!backward) cast.columnwise = NULL;
    all.data = (bf16 *)y;
    linears_head_amaxes(ln, &cast, ln->head.N, ln->head.K);
    linears_head_cast(ln, &cast, ln->head.N, ln->head.K);
    if (is_per_tensor(all.row_granularity)) linears_head_amaxes(ln, &all, ln->rows, ln->head.K);
}

// Returns `rows` rows of y, cast.
static inline QTensor linears_head_input(Linears *ln, const bf16 *y, int64_t rows) {
    QTensor q = ln->head_tensors.y;
    q.data = (bf16 *)y;
    if (!q.fp8) return q;
    if (!is_per_tensor(q.row_granularity)) linears_head_amaxes(ln, &q, rows, ln->head.K);
    linears_head_cast(ln, &q, rows, ln->head.K);
    return q;
}

static __global__ void head_float_kernel(uint32_t *amax_or_scale_inv, float value) {
    grid_dependency_wait();
    *amax_or_scale_inv = __float_as_uint(value);
}

// Returns the codes that the cross-entropy is to write in place of gradients of logits in bf16. There are none unless
// dgrad and wgrad both read codes of one scale for the tensor: E5M2, since options refuse E4M3 there.
static inline ProducedCodes linears_head_codes(const Linears *ln, float grad_scale) {
    const QTensor *q = &ln->head_tensors.dlogits;
    if (q->row_granularity != PER_TENSOR || q->col_granularity != PER_TENSOR) return ProducedCodes{};
    return ProducedCodes{q->rowwise, fp8_rule_scale(q->rule, precision_dlogits_amax(grad_scale), FP8_E5M2)};
}

// Returns the gradient of `rows` rows of logits as dgrad and wgrad read it, made of linears_head_codes or of dlogits.
static inline QTensor linears_head_gradient(Linears *ln, const bf16 *dlogits, int64_t rows, float grad_scale) {
    const ProducedCodes codes = linears_head_codes(ln, grad_scale);
    QTensor q = ln->head_tensors.dlogits;
    if (codes.rowwise) {
        CUDA_LAUNCH(head_float_kernel, 1, 1, 0, ln->gemm.stream, (uint32_t *)q.rowwise_scale_inv, 1 / codes.scale);
        fp8_transpose(q.columnwise, q.rowwise, rows, ln->head.N, ln->gemm.stream);
        profile_bytes(ln->profile, "FP8 casts", 2 * rows * ln->head.N);
        return q;
    }
    q.data = (bf16 *)dlogits;
    if (!q.fp8) return q;
    if (is_per_tensor(q.row_granularity))
        CUDA_LAUNCH(head_float_kernel, 1, 1, 0, ln->gemm.stream, q.amax, precision_dlogits_amax(grad_scale));
    else linears_head_amaxes(ln, &q, rows, ln->head.N);
    linears_head_cast(ln, &q, rows, ln->head.N);
    return q;
}

// Computes the logits [rows, VP] of `rows` rows of y, after linears_head_begin. Returns these rows as wgrad reads them.
static inline QTensor linears_head_logits(Linears *ln, bf16 *logits, const bf16 *y, int64_t rows) {
    const QTensor x = linears_head_input(ln, y, rows);
    linears_gemm(ln, "lm_head", &linears_lm_head(ln, rows)[GEMM_FPROP], logits, &ln->head_tensors.w, &x, NULL, false);
    return x;
}

// Computes dx [rows, C], and dw [VP, C] or, if `accumulate`, adds to it, after the cross-entropy has written
// linears_head_codes or dlogits [rows, VP]. x: what linears_head_logits returned.
static inline void linears_head_backward(Linears *ln, bf16 *dx, bf16 *dw, const bf16 *dlogits, const QTensor *x,
                                         int64_t rows, float grad_scale, bool accumulate) {
    GemmPlan *plans = linears_lm_head(ln, rows);
    const QTensor dy = linears_head_gradient(ln, dlogits, rows, grad_scale);
    linears_gemm(ln, "lm_head", &plans[GEMM_DGRAD], dx, &ln->head_tensors.w, &dy, NULL, false);
    linears_gemm(ln, "lm_head", &plans[GEMM_WGRAD], dw, x, &dy, NULL, accumulate);
}

#endif
