// A tensor of a GEMM: its bf16 and FP8 data with their scales, and which tensor of the model it is.
#ifndef LLMC_QTENSOR_CUH
#define LLMC_QTENSOR_CUH

#include "../config/recipes.h"
#include "../reference/audit.h"
#include "../gpu/cuda_utils.cuh"

// How the amaxes that a cast needs become known.
typedef enum {
    AMAX_UNUSED,         // no amax needed: the tensor is not cast, or its scales are per block and found by the cast
    AMAX_FROM_PRODUCER,  // the kernel that produces the tensor raises its amax
    AMAX_FROM_PASS,      // a separate pass over the values, before the cast, raises the amaxes
    AMAX_DELAYED         // the scale follows from amaxes of earlier casts; at the first cast, from the tensor's amax
} AmaxSource;

// A tensor [R, C]. All pointers are to device memory; those of data and of scale_inv are aligned to 16 bytes. Data
// whose pointer is NULL does not exist, or is not to be written by a cast.
typedef struct {
    bf16 *data;                     // [R, C], for readers of bf16: GEMMs, casts, attention
    uint8_t *rowwise, *columnwise;  // FP8 [R, C], and its transpose [C, R]
    // scale_inv of rowwise and of columnwise data, laid out by scale_index() (recipes.h). The two pointers are equal if
    // both granularities are PER_TENSOR.
    void *rowwise_scale_inv, *columnwise_scale_inv;
    // The tensor's amaxes, as many as tensor_amaxes() of recipes.h returns (cuda_utils.cuh has their encoding). Not
    // read if there are none, as with block scales.
    uint32_t *amax;
    // The scale to cast with, for PER_TENSOR granularities: delayed, or bounded (weight_bound.h). The cast then raises
    // the amax, in which NaN does not count. NULL: scales follow from amaxes.
    const float *delayed_scale;
    AuditSums *audit[2];  // audit sums of rowwise and columnwise data; NULL: not audited
    Fp8Format format;
    ScaleGranularity row_granularity, col_granularity;
    ScaleRule rule;

    int64_t layer;  // -1: not a tensor of a layer
    TensorRole role;
    LinearId linear;
    AmaxSource amax_source;
    bool fp8;  // true: the tensor's linear layer runs in the FP8 recipe
} QTensor;

// E5M2 codes that the kernel which computes a tensor writes in place of bf16 data, if it knows the tensor's scale.
typedef struct {
    uint8_t *rowwise;  // [R, C]; NULL: the kernel writes bf16 data
    float scale;
} ProducedCodes;

// Returns a tensor with the formats and granularities that recipe r has for a role, without data, amaxes or scales.
static inline QTensor recipe_qtensor(const Recipe *r, TensorRole role, Fp8Format format) {
    QTensor q;
    memset(&q, 0, sizeof q);
    q.layer = -1, q.role = role;
    q.format = format, q.rule = r->rule;
    q.row_granularity = recipe_granularity(r, role, ROWWISE),
    q.col_granularity = recipe_granularity(r, role, COLUMNWISE);
    return q;
}

// Returns a tensor that has only bf16 data: GEMMs read it in bf16, or write it.
static inline QTensor qtensor_bf16(const bf16 *data) {
    QTensor q;
    memset(&q, 0, sizeof q);
    q.layer = -1, q.data = (bf16 *)data;
    return q;
}

// Returns a tensor whose data is all at `data`, and whose scales are all at `scale_inv`: an operand of any GEMM.
static inline QTensor qtensor_operand(void *data, void *scale_inv) {
    QTensor q = qtensor_bf16((const bf16 *)data);
    q.rowwise = q.columnwise = (uint8_t *)data;
    q.rowwise_scale_inv = q.columnwise_scale_inv = scale_inv;
    return q;
}

// Returns the amax slot that the kernel which produces q raises; NULL if it raises none.
static inline uint32_t *qtensor_produced_amax(const QTensor *q) {
    return q->amax_source == AMAX_FROM_PRODUCER ? q->amax : NULL;
}

#endif
