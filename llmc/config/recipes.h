// The FP8 recipes: one table that says how each operand of a linear layer's three GEMMs is stored and scaled.
// Casts, GEMM plans, tensors kept for backward, all-gathers and the printed GEMM table follow from recipe_row() below.
// A new recipe is a name in RECIPES and a row in recipe_row(); a new granularity or rule of scales also needs kernels.
//
// A linear layer has weight w [N, K] and, over M rows, three GEMMs (row-major):
//   fprop  y [M, N] = x  [M, K]   w^T        sums over K
//   dgrad  dx[M, K] = dy [M, N]   w          sums over N
//   wgrad  dw[N, K] = dy [M, N]^T x          sums over M
// So two GEMMs read each of x, w and dy. One GEMM sums over the tensor's columns and reads its rowwise data, stored as
// the tensor is. The other GEMM sums over the tensor's rows and reads its columnwise data. GPUs store FP8 columnwise
// data transposed. (The names are Transformer Engine's.) Rowwise and columnwise data are matrices [outer, depth]: the
// GEMM sums over the depth.
#ifndef LLMC_RECIPES_H
#define LLMC_RECIPES_H

#include "../base/fp8.h"
#include "../base/utils.h"

typedef enum { GEMM_FPROP, GEMM_DGRAD, GEMM_WGRAD, NUM_GEMMS } GemmKind;

// The granularities of scales: which values of rowwise or columnwise data [outer, depth] share one scale. NO_SCALE: the
// operand is not FP8. PER_TENSOR_BROADCAST: the tensor's scale is written once for each row, for GEMMs whose other
// operand has a scale for each row. Host code reads this table. Kernels call scale_index(), scale_load() and
// is_per_tensor() instead; test_recipes.c compares them with the table. fp8_rule_scale() in fp8.h makes a scale from an
// amax.
//   rows, cols    size of the block that has one scale in memory; WHOLE: all rows or columns
//   pad           the grid of scales [blocks of rows, blocks of cols] is stored in multiples of these
//   scales        type of a scale in memory
//   amaxes        amaxes that a cast needs beforehand: one of the tensor, one for each row, or none, because a cast
//                 reads whole blocks or there is no cast
//   same          true if rowwise and columnwise data, both of this granularity, hold the same codes and scales, in
//                 another order
//   mode          CUBLASLT_MATMUL_MATRIX_SCALE_... of an operand
//   GPUs          first and last compute capability, as 10 * major + minor, with such GEMMs (CUDA 13 cuBLAS manual,
//                 "cublasLtMatmul", FP8 scaling modes)
#define WHOLE 0
#define UNLIMITED INT32_MAX
// clang-format off
#define SCALE_GRANULARITIES(X)                                                                                        \
    /*id                     name       rows   cols   pad     scales amaxes same   mode            GPUs            */ \
    X(NO_SCALE,              "",        WHOLE, WHOLE, 1,   1, NONE,  NONE,  false, SCALAR_32F,     0,   UNLIMITED)    \
    X(PER_TENSOR,            "tensor",  WHOLE, WHOLE, 1,   1, FP32,  ONE,   true,  SCALAR_32F,     89,  UNLIMITED)    \
    X(PER_TENSOR_BROADCAST,  "tensor",  1,     WHOLE, 1,   1, FP32,  ONE,   false, OUTER_VEC_32F,  90,  99)           \
    X(PER_ROW,               "row",     1,     WHOLE, 1,   1, FP32,  ROWS,  false, OUTER_VEC_32F,  90,  99)           \
    X(BLOCK_1X128,           "1x128",   1,     128,   1,   1, FP32,  NONE,  false, VEC128_32F,     90,  99)           \
    X(BLOCK_128X128,         "128x128", 128,   128,   1,   4, FP32,  NONE,  true,  BLK128x128_32F, 90,  99)           \
    X(BLOCK_1X32,            "1x32",    1,     32,    128, 4, E8M0,  NONE,  false, VEC32_UE8M0,    100, UNLIMITED)
// clang-format on

#define GRANULARITY_ID(id, ...) id,
typedef enum { SCALE_GRANULARITIES(GRANULARITY_ID) NUM_GRANULARITIES } ScaleGranularity;

typedef enum { SCALE_TYPE_NONE, SCALE_TYPE_FP32, SCALE_TYPE_E8M0 } ScaleType;
typedef enum { AMAX_NONE, AMAX_ONE, AMAX_ROWS } AmaxNeed;

typedef struct {
    const char *name;  // in printed tables
    int64_t rows, cols, pad_rows, pad_cols;
    ScaleType type;
    AmaxNeed amaxes;
    bool same_codes;
    int first_gpu, last_gpu;
} GranularityTraits;

static inline const GranularityTraits *granularity_traits(ScaleGranularity g) {
#define GRANULARITY_TRAITS(id, name, rows, cols, pad_rows, pad_cols, type, amaxes, same, mode, first, last) \
    {name, rows, cols, pad_rows, pad_cols, SCALE_TYPE_##type, AMAX_##amaxes, same, first, last},
    static const GranularityTraits table[NUM_GRANULARITIES] = {SCALE_GRANULARITIES(GRANULARITY_TRAITS)};
    return &table[g];
}

static inline int64_t scale_type_bytes(ScaleType type) {
    return type == SCALE_TYPE_FP32 ? 4 : type == SCALE_TYPE_E8M0 ? 1 : 0;
}

// The four linear layers of each transformer layer. q, k and v are one fused weight, gate and up another.
typedef enum { QKV_PROJ, OUT_PROJ, GATE_UP_PROJ, DOWN_PROJ, NUM_LINEARS } LinearId;

// The tensors of a linear layer, and the two ways in which GEMMs read them.
typedef enum { TENSOR_W, TENSOR_X, TENSOR_DY, NUM_TENSORS } TensorRole;
typedef enum { ROWWISE, COLUMNWISE } TensorUsage;

// The choices of --fp8-recipe; recipe_row() has a row for each, in this order.
#define RECIPES(X)                          \
    X(RECIPE_TENSORWISE, "tensorwise")      \
    X(RECIPE_DELAYED, "delayed")            \
    X(RECIPE_BOUNDED, "tensorwise_bounded") \
    X(RECIPE_ROWWISE, "rowwise")            \
    X(RECIPE_ROWWISE_GW_HP, "rowwise_with_gw_hp") X(RECIPE_BLOCKWISE, "blockwise") X(RECIPE_MXFP8, "mxfp8")
// The help of --fp8-recipe.
#define RECIPES_HELP                                                                                                 \
    "tensorwise: a tensor, scaled by its current amax; delayed: a tensor, scaled by its past amaxes; "               \
    "tensorwise_bounded: tensorwise, but AdamW casts the weights, scaled by a bound on their amax; rowwise: a row; " \
    "rowwise_with_gw_hp: a row, but dgrad reads weights with one scale for the tensor, and wgrad is in bf16; "       \
    "blockwise: 1x128, weights 128x128; mxfp8: 1x32; GPUs: without --fp8-emulate, rowwise, rowwise_with_gw_hp and "  \
    "blockwise need Hopper, mxfp8 needs Blackwell"
#define RECIPE_ID(id, name) id,
enum { RECIPES(RECIPE_ID) NUM_RECIPES, RECIPE_BF16 = NUM_RECIPES };

typedef struct {
    const char *name;
    ScaleGranularity granularity[NUM_GEMMS][2];  // cuBLASLt's A and B: fprop w, x; dgrad w, dy; wgrad x, dy
    Fp8Format dy_format;                         // unless --fp8-format says otherwise; x and w are E4M3
    ScaleRule rule;
    bool delayed;        // scales from earlier amaxes
    bool bounded;        // scales of weights from their amax before a step and AdamW's largest step (weight_bound.h)
    bool fast_accum;     // its FP8 GEMMs can use fast accumulation (--fp8-fast-accum)
    int multiple;        // GEMMs need N and K, and in FP8 also M, in multiples of this
    const char *scales;  // in printed tables
} Recipe;

// The rule by which each recipe makes its scales, and the program whose rule it is:
//   tensorwise, rowwise, rowwise_with_gw_hp
//                torchao: scale = MAX / max(amax, 1e-12) in fp64; with rowwise and rowwise_with_gw_hp, rounded down to
//                a power of two. A NaN makes all values that share its scale NaN.
//   tensorwise_bounded
//                as tensorwise, but a weight's amax is replaced by a bound on it, from AdamW's first step on
//   delayed      Transformer Engine: scale = MAX / 2^margin / largest amax of the window, in fp32 (delayed.h has the
//                rules for amaxes that are zero, infinite or NaN). But the first cast of a tensor takes its current
//                amax; Transformer Engine takes scale 1, which would flush the first gradients to zero.
//   blockwise    Transformer Engine: MAX / amax, rounded down to a power of two. NaN does not count in the amax. An
//                amax of zero or infinity gives scale 1. torchao's prototype has no such rules for NaN, zero, infinity.
//   mxfp8        Transformer Engine and torchao: E8M0 rounded up (RCEIL). A NaN makes its block NaN (torchao).
static inline const Recipe *recipe_row(int index) {
    static const Recipe rows[] = {// clang-format off
        // name, granularities of fprop w, x; dgrad w, dy; wgrad x, dy
        // dy, rule, delayed, bounded, fast_accum, multiple, scales
        {"tensorwise", {{PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}},
         FP8_E5M2, SCALE_TORCHAO, false, false, true, 16, "tensor, current amax"},
        {"delayed", {{PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}},
         FP8_E5M2, SCALE_TE, true, false, true, 16, "tensor, amax history"},
        {"tensorwise_bounded", {{PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}, {PER_TENSOR, PER_TENSOR}},
         FP8_E5M2, SCALE_TORCHAO, false, true, true, 16, "tensor, current amax (w: bound)"},
        {"rowwise", {{PER_ROW, PER_ROW}, {PER_ROW, PER_ROW}, {PER_ROW, PER_ROW}},
         FP8_E4M3, SCALE_TORCHAO_POW2, false, false, true, 16, "row, power of 2"},
        {"rowwise_with_gw_hp", {{PER_ROW, PER_ROW}, {PER_TENSOR_BROADCAST, PER_ROW}, {NO_SCALE, NO_SCALE}},
         FP8_E4M3, SCALE_TORCHAO_POW2, false, false, true, 16, "row (dgrad: w tensor), power of 2"},
        {"blockwise", {{BLOCK_128X128, BLOCK_1X128}, {BLOCK_128X128, BLOCK_1X128}, {BLOCK_1X128, BLOCK_1X128}},
         FP8_E4M3, SCALE_TE_POW2, false, false, false, 128, "1x128 (w 128x128), power of 2"},
        {"mxfp8", {{BLOCK_1X32, BLOCK_1X32}, {BLOCK_1X32, BLOCK_1X32}, {BLOCK_1X32, BLOCK_1X32}},
         FP8_E4M3, SCALE_MX, false, false, false, 32, "1x32, E8M0"},
        {"bf16", {{NO_SCALE, NO_SCALE}, {NO_SCALE, NO_SCALE}, {NO_SCALE, NO_SCALE}},
         FP8_E4M3, SCALE_TORCHAO, false, false, false, 8, "none"}};
    // clang-format on
    static_assert(sizeof rows / sizeof rows[0] == RECIPE_BF16 + 1, "the table has one row for each RECIPE_ value");
    return &rows[index];
}

static inline const char *gemm_kind_name(GemmKind kind) {
    return kind == GEMM_FPROP ? "fprop" : kind == GEMM_DGRAD ? "dgrad" : "wgrad";
}

// Returns the tensor that a GEMM reads as operand 0 or 1, in the order of Recipe.granularity.
static inline TensorRole gemm_tensor(GemmKind gemm, int operand) {
    static const TensorRole tensors[NUM_GEMMS][2] = {
        {TENSOR_W, TENSOR_X}, {TENSOR_W, TENSOR_DY}, {TENSOR_X, TENSOR_DY}};
    return tensors[gemm][operand];
}

// Returns which data of that tensor the GEMM reads.
static inline TensorUsage gemm_usage(GemmKind gemm, int operand) {
    return gemm == GEMM_FPROP || (gemm == GEMM_DGRAD && operand == 1) ? ROWWISE : COLUMNWISE;
}

// Returns the granularity of a tensor's rowwise or columnwise data. Exactly one GEMM reads each of them.
static inline ScaleGranularity recipe_granularity(const Recipe *r, TensorRole tensor, TensorUsage usage) {
    static const struct {
        GemmKind gemm;
        int operand;
    } reader[NUM_TENSORS][2] = {
        {{GEMM_FPROP, 0}, {GEMM_DGRAD, 0}}, {{GEMM_FPROP, 1}, {GEMM_WGRAD, 0}}, {{GEMM_DGRAD, 1}, {GEMM_WGRAD, 1}}};
    return r->granularity[reader[tensor][usage].gemm][reader[tensor][usage].operand];
}

static inline bool recipe_is_fp8(const Recipe *r, GemmKind gemm) { return r->granularity[gemm][0] != NO_SCALE; }

// True if weights have one scale for the whole tensor. Their rowwise and columnwise data then hold the same codes, and
// all ranks can use one scale, so that weights can be all-gathered in FP8.
static inline bool recipe_has_tensor_scales(const Recipe *r) {
    return recipe_granularity(r, TENSOR_W, ROWWISE) == PER_TENSOR &&
           recipe_granularity(r, TENSOR_W, COLUMNWISE) == PER_TENSOR;
}

// True if tensors have one scale for the whole tensor, made from its current amax (weights: or from a bound on it).
static inline bool recipe_has_current_tensor_scales(const Recipe *r) {
    return recipe_has_tensor_scales(r) && !r->delayed;
}

// True if at least one of the two GEMMs that read a tensor does not read it in FP8.
static inline bool recipe_needs_bf16(const Recipe *r, TensorRole tensor) {
    return recipe_granularity(r, tensor, ROWWISE) == NO_SCALE || recipe_granularity(r, tensor, COLUMNWISE) == NO_SCALE;
}

// The number of a linear layer's tensor in the model, in the order [layer][role][linear]. If the recipe has one scale
// for each tensor, this is the index of the tensor's amax and scale, on the GPU and on the CPU. With recipe delayed it
// is also that of its amax history; checkpoints hold histories and scales in this order.
HOST_DEVICE static inline int64_t tensor_index(int64_t layer, TensorRole role, int linear) {
    return (layer * NUM_TENSORS + role) * NUM_LINEARS + linear;
}
static_assert(TENSOR_W == 0 && TENSOR_X == 1 && TENSOR_DY == 2 && NUM_TENSORS == 3 && QKV_PROJ == 0 && OUT_PROJ == 1 &&
                  GATE_UP_PROJ == 2 && DOWN_PROJ == 3 && NUM_LINEARS == 4,
              "checkpoints hold histories and scales in this order");
enum { TENSORS_PER_LAYER = NUM_TENSORS * NUM_LINEARS };
static inline int64_t tensor_count(int64_t layers) { return layers * TENSORS_PER_LAYER; }

// Rowwise or columnwise data of a tensor [rows, cols] as a matrix [outer, depth]. Its element (i, k) is element
// i * outer_stride + k * depth_stride of the tensor.
typedef struct {
    int64_t outer, depth, outer_stride, depth_stride;
} UsageShape;

static inline UsageShape usage_shape(int64_t rows, int64_t cols, TensorUsage usage) {
    const UsageShape row = {rows, cols, cols, 1}, col = {cols, rows, 1, cols};
    return usage == ROWWISE ? row : col;
}

HOST_DEVICE static inline bool is_per_tensor(ScaleGranularity g) {
    return g == PER_TENSOR || g == PER_TENSOR_BROADCAST;
}

// ---------------------------------------------------------------------------------------------------------------------
// Scales of data [outer, depth] as GEMMs read them. They are scale_inv: value = code * scale_inv. They lie in
// cuBLASLt's order (CUDA 13 manual). PER_TENSOR: one fp32. PER_ROW and PER_TENSOR_BROADCAST: fp32 [outer]. 1x128: fp32,
// outer contiguous. 128x128: fp32, depth contiguous, with the scales of each block row padded to a multiple of 4. 1x32:
// E8M0 bytes, in tiles of 128 x 4 scales, 512 bytes each.

// Returns the index of the scale of element (i, k).
HOST_DEVICE static inline int64_t scale_index(ScaleGranularity g, int64_t i, int64_t k, int64_t outer, int64_t depth) {
    if (g == PER_ROW || g == PER_TENSOR_BROADCAST) return i;
    if (g == BLOCK_1X128) return k / 128 * outer + i;
    if (g == BLOCK_128X128) return i / 128 * (ceil_div(ceil_div(depth, 128), 4) * 4) + k / 128;
    if (g == BLOCK_1X32) {
        const int64_t block = k / 32, tile = i / 128 * ceil_div(ceil_div(depth, 32), 4) + block / 4;
        return tile * 512 + i % 32 * 16 + i % 128 / 32 * 4 + block % 4;
    }
    return 0;
}

// Bytes of all scales of data [outer, depth]; 0 with NO_SCALE.
static inline int64_t scale_bytes(ScaleGranularity g, int64_t outer, int64_t depth) {
    const GranularityTraits *r = granularity_traits(g);
    const int64_t rows = r->rows == WHOLE ? 1 : ceil_div(outer, r->rows);
    const int64_t cols = r->cols == WHOLE ? 1 : ceil_div(depth, r->cols);
    return round_up(rows, r->pad_rows) * round_up(cols, r->pad_cols) * scale_type_bytes(r->type);
}

// Returns the scale_inv at an index.
HOST_DEVICE static inline float scale_load(ScaleGranularity g, const void *scales, int64_t index) {
    return g == BLOCK_1X32 ? e8m0_to_float(((const uint8_t *)scales)[index]) : ((const float *)scales)[index];
}

// Number of amaxes that a cast to data [outer, depth] needs beforehand.
static inline int64_t usage_amaxes(ScaleGranularity g, int64_t outer) {
    const AmaxNeed need = granularity_traits(g)->amaxes;
    return need == AMAX_ROWS ? outer : need == AMAX_ONE ? 1 : 0;
}

// Number of amaxes that the casts of a tensor [rows, cols] need: for its rowwise data, then for its columnwise data. If
// both are PER_TENSOR, they share one.
static inline int64_t tensor_amaxes(ScaleGranularity row, ScaleGranularity col, int64_t rows, int64_t cols) {
    return row == PER_TENSOR && col == PER_TENSOR ? 1 : usage_amaxes(row, rows) + usage_amaxes(col, cols);
}

#endif
