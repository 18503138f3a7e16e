// A tensor that GEMMs read: its bf16 and FP8 data with their scales, and which tensor of the model it is.
#ifndef LLMC_QTENSOR_CUH
#define LLMC_QTENSOR_CUH

#include "../config/recipes.h"
#include "../reference/audit.h"
#include "cuda_utils.cuh"

// How the amaxes that a cast needs come to be known.
typedef enum {
    AMAX_UNUSED,  // none are needed: the tensor is not cast, or its scales are of blocks, which the cast sees whole
    AMAX_FROM_PRODUCER,  // the kernel that produces the tensor raises them on its way
    AMAX_FROM_PASS,      // a pass over the tensor before its cast raises them
    AMAX_DELAYED         // the scale is of earlier steps; the cast itself raises the amax, for later ones
} AmaxSource;

// A tensor [R, C]. All pointers are to device memory, aligned to 16 bytes. NULL data is not kept, or not wanted.
typedef struct {
    bf16 *data;                     // [R, C], for GEMMs in bf16
    uint8_t *rowwise, *columnwise;  // FP8 [R, C], and transposed [C, R]
    // Scales of both, laid out as scale_index() (recipes.h); the same pointer if both granularities are PER_TENSOR.
    void *rowwise_scale_inv, *columnwise_scale_inv;
    uint32_t *amax;  // tensor_amaxes() slots (recipes.h; "amax slots" in cuda_utils.cuh); not for block scales
    // The scale to cast with if the granularities are PER_TENSOR; a NaN then raises no amax. NULL: the scale follows
    // from the amax.
    const float *delayed_scale;
    AuditSums *audit[2];  // sums of an audited cast over rowwise and columnwise data; NULL: not audited
    Fp8Format format;
    ScaleGranularity row_granularity, col_granularity;
    ScaleRule rule;

    int64_t layer;  // -1: no tensor of a layer
    TensorRole role;
    LinearId linear;
    AmaxSource amax_source;
    bool fp8;  // its linear layer runs in the FP8 recipe
} QTensor;

// A tensor of a role as recipe r casts it, without data, amaxes or scales.
static inline QTensor recipe_qtensor(const Recipe *r, TensorRole role, Fp8Format format) {
    QTensor q;
    memset(&q, 0, sizeof q);
    q.layer = -1, q.role = role;
    q.format = format, q.rule = r->rule;
    q.row_granularity = recipe_granularity(r, role, ROWWISE),
    q.col_granularity = recipe_granularity(r, role, COLUMNWISE);
    return q;
}

// A tensor that GEMMs read in bf16 alone.
static inline QTensor qtensor_bf16(const bf16 *data) {
    QTensor q;
    memset(&q, 0, sizeof q);
    q.layer = -1, q.data = (bf16 *)data;
    return q;
}

// A tensor whose data and scales all lie at `memory`, for timing GEMMs of any recipe.
static inline QTensor qtensor_for_timing(void *memory) {
    QTensor q = qtensor_bf16((const bf16 *)memory);
    q.rowwise = q.columnwise = (uint8_t *)memory;
    q.rowwise_scale_inv = q.columnwise_scale_inv = memory;
    return q;
}

// The slot that the kernel which produces q raises to its amax; NULL: it raises none.
static inline uint32_t *qtensor_produced_amax(const QTensor *q) {
    return q->amax_source == AMAX_FROM_PRODUCER ? q->amax : NULL;
}

#endif
