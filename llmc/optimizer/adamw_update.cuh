// AdamW's arrays on the GPU, and its update of 8 elements by one thread with bf16 or fp32 moments.
#ifndef LLMC_ADAMW_UPDATE_CUH
#define LLMC_ADAMW_UPDATE_CUH

#include "../base/coat.h"
#include "../fp8/quantize_kernels.cuh"
#include "../reference/adamw_math.h"
#include "adamw_norm.cuh"

enum { ADAMW_THREADS = 256 };  // threads of a block

// How moments are stored: in bf16, rounded stochastically; in fp32; in FP8 in groups (coat.h), rounded to nearest; in
// FP8 in groups, rounded stochastically; or as MS-AMP stores them, in FP8 and FP16 (msamp.h).
typedef enum { ADAMW_BF16, ADAMW_FP32, ADAMW_COAT, ADAMW_COAT_STOCHASTIC, ADAMW_MSAMP } AdamwMoments;

// Data of COAT's moments beside their codes.
typedef struct {
    uint32_t *exp_avg_groups, *exp_avg_sq_groups;  // one word for each COAT_GROUP elements
    CoatTables *tables;                            // device memory
} AdamwCoat;

// FP16 master weights and MS-AMP's moments: states with one scale for each tensor (msamp.h). A tensor is an entry of
// the parameter table. Each scale is equal on all ranks.
typedef struct {
    fp16_bits *master;           // FP16 master weights; NULL: none
    float *scales, *new_scales;  // [MSAMP_STATES][tensors]; NULL without such states
    uint32_t *amaxes;            // [tensors][MSAMP_STATES] fp32 bits
    int64_t tensors;
} AdamwScaled;

// A rank's flat shard arrays. Masters and moments have the shard plan's `total` elements. Weights have fewer if the
// layers' matrices have no bf16 weights (weights_begin). Offloaded arrays lie in pinned host memory (offload.cuh).
typedef struct {
    bf16 *weights;
    // fp32 master weights; NULL: none. With fp32 or FP16 masters `weights` is their rounded copy. Without masters each
    // update rounds `weights` stochastically, or to nearest (AdamwStep.nearest_weights).
    float *master;
    void *exp_avg, *exp_avg_sq;
    AdamwMoments moments;
    AdamwCoat coat;  // with COAT's moments
    AdamwScaled scaled;
    AdamwGradients gradients;
} AdamwArrays;

// Recipe tensorwise_bounded: E4M3 codes that the update writes of FP8 weights, with scales that are known before it.
typedef struct {
    uint8_t *codes;      // a launch's unit 0 has its codes here, and each next one `stride` later
    const float *scale;  // scale[u * scale_stride + j]: of the j-th FP8 weight of the launch's unit u
    int64_t stride, scale_stride;
} AdamwCodes;

// Values that are constant over all elements of a step, or of a tensor.
typedef struct {
    AdamwStep step;
    float factor;              // factor for the gradients
    float gradient_scale_inv;  // for FP8 gradients
    bool skipped;              // true: the step is skipped
} AdamwTerms;

typedef enum { GRADIENTS_BF16, GRADIENTS_FP32, GRADIENTS_FP8 } AdamwGradientType;

HOST_DEVICE static constexpr bool adamw_is_coat(AdamwMoments moments) {
    return moments == ADAMW_COAT || moments == ADAMW_COAT_STOCHASTIC;
}

// Bytes of the first moment of one element, without COAT's words of groups.
HOST_DEVICE static inline int64_t adamw_moment_bytes(AdamwMoments moments) {
    return moments == ADAMW_FP32 ? 4 : moments == ADAMW_MSAMP || adamw_is_coat(moments) ? 1 : 2;
}

// Bytes of both moments of one element, without COAT's words of groups.
static inline int64_t adamw_moments_bytes(AdamwMoments moments) {
    return moments == ADAMW_MSAMP ? 3 : 2 * adamw_moment_bytes(moments);
}

// Loads 8 elements of an array that is stored as bf16 or fp32.
template <bool FP32>
__device__ static inline void adamw_load(float out[8], const void *array, int64_t i) {
    if (FP32) fp32x8_unpack(out, fp32x8_load((const float *)array + i));
    else bf16x8_unpack(out, bf16x8_load((const bf16 *)array + i));
}

__device__ static inline void adamw_store_fp32(void *array, int64_t i, const float x[8]) {
    fp32x8_store((float *)array + i, x);
}

// Returns the upper 16 bits of 8 words.
__device__ static inline Bf16x8 adamw_upper_halves(const uint32_t x[8]) {
    Bf16x8 v;
#pragma unroll
    for (int k = 0; k < 4; k++) v.word[k] = __byte_perm(x[2 * k], x[2 * k + 1], 0x7632);
    return v;
}

__device__ static inline float adamw_load_one(const void *array, int64_t i, bool fp32) {
    return fp32 ? ((const float *)array)[i] : __bfloat162float(((const bf16 *)array)[i]);
}

// Loads 8 gradients. scale_inv counts for FP8 gradients only.
template <AdamwGradientType GRADIENTS>
__device__ static inline void adamw_load_gradients(float out[8], const AdamwGradients &g, int64_t i, float scale_inv) {
    if (GRADIENTS == GRADIENTS_FP8) {
        fp8x8_to_floats(out, *(const uint2 *)(g.codes + i));
#pragma unroll
        for (int j = 0; j < 8; j++) out[j] = __fmul_rn(out[j], scale_inv);
    } else {
        constexpr bool FP32 = GRADIENTS == GRADIENTS_FP32;
        adamw_load<FP32>(out, FP32 ? (const void *)g.fp32_data : (const void *)g.bf16_data, i);
    }
}

// Returns `squares` plus the squares of 8 gradients, for steps that are skipped.
template <AdamwGradientType GRADIENTS>
__device__ static inline float adamw_add_squares(float squares, const AdamwGradients &gradients, int64_t i,
                                                 float scale_inv) {
    float g[8];
    adamw_load_gradients<GRADIENTS>(g, gradients, i, scale_inv);
#pragma unroll
    for (int j = 0; j < 8; j++) squares = __fmaf_rn(g[j], g[j], squares);
    return squares;
}

template <AdamwGradientType GRADIENTS>
__device__ static inline float adamw_load_gradient(const AdamwGradients &g, int64_t i, float scale_inv) {
    if (GRADIENTS == GRADIENTS_FP8) return gradient_fp8_value(g.codes[i], scale_inv);
    return GRADIENTS == GRADIENTS_FP32 ? g.fp32_data[i] : __bfloat162float(g.bf16_data[i]);
}

// Updates element i, whose index in the flat array is `flat`, with the functions that the CPU uses. An element with a
// non-finite gradient stays unchanged, so that the weights can still be inspected if the norm is computed after the
// update. Returns the bits of the magnitude of the new bf16 weight.
template <bool MASTER, AdamwMoments MOMENTS, AdamwGradientType GRADIENTS>
__device__ static uint32_t adamw_update_one(const AdamwArrays &a, int64_t i, int64_t flat, const AdamwTerms &c,
                                            bool decay) {
    const AdamwStep *step = &c.step;
    // __fmul_rn keeps the compiler from fusing this multiplication with a later addition or subtraction.
    const float gradient = __fmul_rn(adamw_load_gradient<GRADIENTS>(a.gradients, i, c.gradient_scale_inv), c.factor);
    if (adamw_magnitude(gradient) == 0x7f800000u) return ((const bf16_bits *)a.weights)[i] & 0x7fffu;
    AdamwElement e = {adamw_load_one(MASTER ? (const void *)a.master : (const void *)a.weights, i, MASTER),
                      adamw_load_one(a.exp_avg, i, MOMENTS == ADAMW_FP32),
                      adamw_load_one(a.exp_avg_sq, i, MOMENTS == ADAMW_FP32)};
    e = adamw_update(e, gradient, decay, step);
    const AdamwRandom random = adamw_random(step, flat);
    const bf16_bits weight = MASTER ? bf16_from_float(e.weight) : adamw_round(e.weight, random.weight);
    if (MASTER) a.master[i] = e.weight;
    ((bf16_bits *)a.weights)[i] = weight;
    if (MOMENTS == ADAMW_FP32) {
        ((float *)a.exp_avg)[i] = e.exp_avg;
        ((float *)a.exp_avg_sq)[i] = e.exp_avg_sq;
    } else {
        ((bf16_bits *)a.exp_avg)[i] = adamw_round(e.exp_avg, random.exp_avg);
        ((bf16_bits *)a.exp_avg_sq)[i] = adamw_round(e.exp_avg_sq, random.exp_avg_sq);
    }
    return weight & 0x7fffu;
}

// Writes the codes of 8 weights that adamw_update_one has stored one by one.
__device__ static inline void adamw_code_rare(uint8_t *codes, const bf16 *weights, float scale) {
#pragma unroll 1
    for (int j = 0; j < 8; j++)
        codes[j] = fp8_from_float(__fmul_rn(bf16_to_float(((const bf16_bits *)weights)[j]), scale), FP8_E4M3);
}

// The slow path of adamw_update_8, for elements where adamw_update_fast may not be exact and for skipped steps. In a
// skipped step it only raises `largest` to the magnitudes of the weights.
template <bool MASTER, AdamwMoments MOMENTS, AdamwGradientType GRADIENTS>
__device__ static inline uint32_t adamw_update_rare(const AdamwArrays &a, uint32_t i, int64_t group,
                                                    const AdamwTerms &c, float kept, uint32_t largest) {
    if (c.skipped) return amax_update(largest, bf16x8_load(a.weights + i));
#pragma unroll 1
    for (int j = 0; j < 8; j++)
        largest =
            amax_larger(largest, adamw_update_one<MASTER, MOMENTS, GRADIENTS>(a, i + j, 8 * group + j, c, kept != 1));
    return largest;
}

// adamw_update without the branches that sqrtf and division take for rare operands. Its iterations are those that nvcc
// uses for common operands. The bits are equal to adamw_update's if
//  - the denominator is at least 2^-33, and
//  - the magnitude of the new weight is in [2^-30, infinity). A smaller weight could be changed by a quotient below
//    2^-67, which may be inexact. An infinite or NaN gradient or second moment fails this condition: with infinity, the
//    root is infinity times the 0 that rsqrt gives. So the denominator is NaN, and with it the weight.
__device__ static inline AdamwElement adamw_update_fast(AdamwElement e, float gradient, float kept, const AdamwStep &s,
                                                        float *denominator) {
    e.exp_avg = __fmaf_rn(s.one_minus_beta1, __fsub_rn(gradient, e.exp_avg), e.exp_avg);
    e.exp_avg_sq = __fmaf_rn(s.beta2, e.exp_avg_sq, __fmul_rn(__fmul_rn(s.one_minus_beta2, gradient), gradient));
    // x = exp_avg_sq * 2^60, so that the remainder of the smallest operand is a normal number. 0 has no finite rsqrt,
    // so 2^-126 is added, which changes no other x. The root of 0 becomes 2^-93, too small to change a denominator of
    // 2^-33 or more.
    const float x = __fmaf_rn(e.exp_avg_sq, 0x1p60f, 0x1p-126f);
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    float root = __fmul_rn(x, r);
    root = __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(r, 0.5f), root);
    const float d = __fmaf_rn(root, s.inverse_sqrt_bias2 * 0x1p-30f, s.eps);
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    r = __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
    float q = __fmul_rn(e.exp_avg, r);
    q = __fmaf_rn(r, __fmaf_rn(-d, q, e.exp_avg), q);
    e.weight = __fmaf_rn(-s.step_size, q, __fmul_rn(e.weight, kept));
    *denominator = d;
    return e;
}

// True if each of 8 denominators is at least `limit`, and each new weight is in the range where adamw_update_fast is
// exact. `weights` are the new weights after rounding to bf16, so each may be off by less than one unit in the last
// place. `largest` is at least their largest magnitude (amax_update).
__device__ static inline bool adamw_is_common(const float denominators[8], float limit, Bf16x8 weights,
                                              uint32_t largest) {
    uint32_t smallest = 0x7fff7fffu, denominator = UINT32_MAX;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        smallest = __vminu2(smallest, weights.word[k] & 0x7fff7fffu);
        denominator = __vimin3_u32(denominator, float_bits(denominators[2 * k]), float_bits(denominators[2 * k + 1]));
    }
    // `low` is 2^-30 plus one bf16 unit, because rounding may have raised a weight's magnitude by up to one unit.
    const uint32_t low = float_bits(0x1p-30f) + 0x10000u, high = float_bits(INFINITY);
    return !((denominator < float_bits(limit)) | (smallest < low) | (smallest << 16 < low) | (largest >= high) |
             (largest << 16 >= high));
}

// Updates elements i .. i + 7, which are group `group` of the flat array. Returns `largest` raised to the magnitudes of
// the new bf16 weights (see amax_update), and adds the squared gradients to *squares. A skipped step changes no
// element. With CODES writes the codes of the new weights to codes[i .. i + 7], unless that is NULL or the step is
// skipped.
template <bool MASTER, AdamwMoments MOMENTS, AdamwGradientType GRADIENTS, bool CODES>
__device__ static inline uint32_t adamw_update_8(const AdamwArrays &a, uint32_t i, int64_t group, const AdamwTerms &c,
                                                 float kept, uint32_t largest, float *squares, uint8_t *codes,
                                                 float scale) {
    float w[8], m[8], v[8], g[8], denominators[8];
    uint32_t w_sum[8], m_sum[8], v_sum[8];
    adamw_load<MASTER>(w, MASTER ? (const void *)a.master : (const void *)a.weights, i);
    adamw_load<MOMENTS == ADAMW_FP32>(m, a.exp_avg, i);
    adamw_load<MOMENTS == ADAMW_FP32>(v, a.exp_avg_sq, i);
    adamw_load_gradients<GRADIENTS>(g, a.gradients, i, c.gradient_scale_inv);
    const uint32_t hash = adamw_random_group(c.step.key, group);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        AdamwElement e = {w[j], m[j], v[j]};
        e = adamw_update_fast(e, __fmul_rn(g[j], c.factor), kept, c.step, &denominators[j]);
        *squares = __fmaf_rn(g[j], g[j], *squares);
        w[j] = e.weight, m[j] = e.exp_avg, v[j] = e.exp_avg_sq;
        const AdamwRandom random = adamw_random_member(&c.step, hash, j);
        // The upper half of w_sum[j] equals bf16_from_float_stochastic() if w[j] is finite.
        w_sum[j] = float_bits(w[j]) + (random.weight >> 16);
        m_sum[j] = float_bits(m[j]) + (random.exp_avg >> 16);
        v_sum[j] = float_bits(v[j]) + (random.exp_avg_sq >> 16);
    }
    const Bf16x8 weights = MASTER ? bf16x8_pack(w) : adamw_upper_halves(w_sum);
    const uint32_t joined = amax_update(largest, weights);
    if (!adamw_is_common(denominators, c.skipped ? INFINITY : 0x1p-33f, weights, joined)) {
        largest = adamw_update_rare<MASTER, MOMENTS, GRADIENTS>(a, i, group, c, kept, largest);
        if (CODES && codes && !c.skipped) adamw_code_rare(codes + i, a.weights + i, scale);
        return largest;
    }
    if (MASTER) adamw_store_fp32(a.master, i, w);
    bf16x8_store(a.weights + i, weights);
    if (CODES && codes) *(uint2 *)(codes + i) = fp8x8_from_bf16<FP8_E4M3>(weights, scale);
    if (MOMENTS == ADAMW_FP32) {
        adamw_store_fp32(a.exp_avg, i, m);
        adamw_store_fp32(a.exp_avg_sq, i, v);
    } else {
        bf16x8_store((bf16 *)a.exp_avg + i, adamw_upper_halves(m_sum));
        bf16x8_store((bf16 *)a.exp_avg_sq + i, adamw_upper_halves(v_sum));
    }
    return joined;
}

#endif
