// AdamW's update of 8 elements by one thread, with COAT's FP8 moments (coat.h).
#ifndef LLMC_ADAMW_COAT_CUH
#define LLMC_ADAMW_COAT_CUH

#include "adamw_update.cuh"

static_assert(COAT_GROUP == 16 * 8, "16 threads, half a warp, hold a group");

#define COAT_WARP 0xffffffffu  // whole warps work together: shuffles among half of a warp cost much more

// Rows of CoatTables.value in shared memory. A warp works on two groups. Each has one row for the k of its exp_avg and
// one for the k of its exp_avg_sq.
typedef struct {
    float value[2][2][COAT_CODES + 1];  // [moment][group]
} CoatRows;

enum { COAT_ROW_BYTES = sizeof(((CoatRows *)0)->value[0][0]) };

// Returns the address in shared memory of this group's row of exp_avg. Its row of exp_avg_sq is two rows further on.
__device__ static inline uint32_t coat_rows(void) {
    __shared__ __align__(COAT_ROW_BYTES) CoatRows rows[ADAMW_THREADS / 32];
    return (uint32_t)__cvta_generic_to_shared(rows[threadIdx.x / 32].value[0][threadIdx.x / 16 % 2]);
}

// Copies the row of a group's word to shared memory. The 16 threads of the group call it.
__device__ static inline void coat_copy_row(uint32_t to, const CoatTables *t, uint32_t word) {
    const float4 *row = (const float4 *)t->value[word & 255] + threadIdx.x % 16;
    to += threadIdx.x % 16 * (uint32_t)sizeof(float4);
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
        const float4 v = row[16 * j];
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + j * COAT_ROW_BYTES / 2), "f"(v.x), "f"(v.y),
                     "f"(v.z), "f"(v.w)
                     : "memory");
    }
}

// Puts the rows of this group's words where coat_rows says. All threads of a warp call it.
__device__ static inline void coat_share_rows(uint32_t rows, const CoatTables *t, uint32_t m_word, uint32_t v_word) {
    __syncwarp();  // the warp has read the rows that are overwritten here
    coat_copy_row(rows, t, m_word);
    coat_copy_row(rows + 2 * COAT_ROW_BYTES, t, v_word);
    __syncwarp();
}

// Returns entry offset / 4 + NEXT of a row in shared memory. The lowest two bits of offset, and bits from 9 on, do not
// count.
template <int NEXT>
__device__ static inline float coat_entry(uint32_t row, uint32_t offset) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1 + %2];"
                 : "=f"(value)
                 : "r"((offset & (COAT_ROW_BYTES - 4)) | row), "n"(4 * NEXT));
    return value;
}

// Decodes 8 codes of a group, whose row is in shared memory. SIGNED: exp_avg; exp_avg_sq is not below zero.
template <bool SIGNED>
__device__ static inline void coat_load(float out[8], uint32_t row, uint2 codes, float max) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const uint32_t four = j < 4 ? codes.x : codes.y;
        const int bit = 8 * (j % 4);
        out[j] = __fmul_rn(coat_entry<0>(row, bit ? four >> (bit - 2) : four << 2), max);
        if (SIGNED) out[j] = float_from_bits(float_bits(out[j]) | (four << (24 - bit) & 0x80000000u));
    }
}

// The fp32 bits of a group's largest magnitude, and those of its smallest magnitude above zero, minus 1. A magnitude of
// zero never is the smallest, because 0 minus 1 is UINT32_MAX.
typedef struct {
    uint32_t largest, smallest_minus_1;
} CoatExtremes;

template <bool SIGNED>
__device__ static inline CoatExtremes coat_extremes_of_8(const float x[8]) {
    CoatExtremes e = {0, UINT32_MAX};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const uint32_t magnitude = SIGNED ? float_bits(x[j]) & 0x7fffffffu : float_bits(x[j]);
        e.largest = max(e.largest, magnitude);
        e.smallest_minus_1 = min(e.smallest_minus_1, magnitude - 1);
    }
    return e;
}

// Joins `own` with the `sent` of another thread, whose lane is this thread's lane XOR distance.
__device__ static inline CoatExtremes coat_join(CoatExtremes own, CoatExtremes sent, int distance) {
    return CoatExtremes{max(own.largest, __shfl_xor_sync(COAT_WARP, sent.largest, distance)),
                        min(own.smallest_minus_1, __shfl_xor_sync(COAT_WARP, sent.smallest_minus_1, distance))};
}

// of_m, of_v: extremes of this thread's values of exp_avg and exp_avg_sq. Returns those of the whole group: of exp_avg
// in the first 8 of its 16 threads, of exp_avg_sq in the other 8 (`second`).
__device__ static inline CoatExtremes coat_extremes(CoatExtremes of_m, CoatExtremes of_v, bool second) {
    CoatExtremes e = coat_join(second ? of_v : of_m, second ? of_m : of_v, 8);
#pragma unroll
    for (int distance = 4; distance; distance /= 2) e = coat_join(e, e, distance);
    return e;
}

// Returns 1 / max of a group. A group's max has 16 significant bits.
__device__ static inline float coat_inverse(float max) {
    float r;
    if (max > 0x1p125f) return 1 / max;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(max));
    return __fmaf_rn(r, __fmaf_rn(-max, r, 1.0f), r);
}

// Returns 448 * part^k with a relative error below 2^-18: the errors of log2 and 2^x are below 2^-22, and the exponent
// of part^k is above -18.
__device__ static inline float coat_expand(float part, float k) {
    const float log2_448 = 8.807354922f;
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(part));
    y = __fmaf_rn(y, k, log2_448);
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(y));
    return y;
}

// Rounds factor times each of 4 values to E4M3, to nearest, with saturation.
__device__ static inline uint32_t coat_e4m3x4(const float x[4], float factor) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    const float scaled[4] = {x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor};
    return fp8x4_from_floats<FP8_E4M3>(scaled);
#else
    uint32_t codes;
    asm("{ .reg .b16 low, high;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
        "mov.b32 %0, {low, high}; }"
        : "=r"(codes)
        : "f"(x[0] * factor), "f"(x[1] * factor), "f"(x[2] * factor), "f"(x[3] * factor));
    return codes;
#endif
}

// Returns the codes of 4 values in a group with this word, rounded to nearest. coat_expand is inexact. So its result is
// rounded twice, once raised and once lowered by 2^-17 of itself. If the two codes differ, the table decides.
template <bool SIGNED>
__device__ static inline uint32_t coat_nearest(const CoatTables *t, uint32_t word, float inverse_max,
                                               const float x[4]) {
    const float k = (float)((word & 255) + 1) * 0.0625f;
    float part[4], y[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        part[j] = __fmul_rn(fabsf(x[j]), inverse_max);
        y[j] = coat_expand(part[j], k);
        if (SIGNED) y[j] = copysignf(y[j], x[j]);
    }
    const uint32_t upper = coat_e4m3x4(y, 1 + 0x1p-17f);
    uint32_t codes = coat_e4m3x4(y, 1 - 0x1p-17f);
    if (upper == codes) return codes;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t code = upper >> 8 * j & 255;
        if (code != (codes >> 8 * j & 255) && t->threshold[word & 255][code & 127] <= part[j]) codes += 1u << 8 * j;
    }
    return codes;
}

// Rounds `part`, a value's magnitude divided by the group's max, stochastically. bits >> 20 is a guess of the code just
// below `part`. *above: `part` minus that code's value; it is below zero if the guess is too large.
__device__ static inline uint32_t coat_round(uint32_t row, uint32_t bits, float part, uint32_t random, float *above) {
    const float value = coat_entry<0>(row, bits >> 18), next = coat_entry<1>(row, bits >> 18);
    *above = __fsub_rn(part, value);
    return (bits >> 20) + coat_rounds_up(*above, __fsub_rn(next, value), random);
}

// Returns the codes of 4 values in a group with this word, rounded stochastically by random bits of each. The group's
// row is in shared memory. The result of coat_expand, raised a little, gives a guess of the code just below a value.
// The guess is never too small. If it is too large, above[j] is below zero, and the next smaller code is the guess.
template <bool SIGNED>
__device__ static inline uint32_t coat_stochastic(uint32_t row, uint32_t word, float inverse_max, const float x[4],
                                                  const uint32_t random[4]) {
    const float k = (float)((word & 255) + 1) * 0.0625f;
    float part[4], above[4];
    uint32_t bits[4], code[4], codes = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        part[j] = __fmul_rn(fabsf(x[j]), inverse_max);
        // Bits 20 and up of the fp32 number 2^-120 * y are the E4M3 code of y, rounded down, also if y is below 2^-6.
        bits[j] = float_bits(__fmul_rn(coat_expand(part[j], k), 0x1p-120f * (1 + 0x1p-17f)));
        code[j] = coat_round(row, bits[j], part[j], random[j], &above[j]);
    }
    if (fminf(fminf(above[0], above[1]), fminf(above[2], above[3])) < 0)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (above[j] < 0) code[j] = coat_round(row, bits[j] - (1u << 20), part[j], random[j], &above[j]);
#pragma unroll
    for (int j = 0; j < 4; j++) codes |= (code[j] | (SIGNED ? float_bits(x[j]) >> 24 & COAT_SIGN : 0)) << 8 * j;
    return codes;
}

// Returns the codes of 8 values of exp_avg (SIGNED) or exp_avg_sq in a group with this word. If k is below 3/16,
// coat_expand may underflow, so coat_encode finds the codes. With a word of 0 all codes are 0. hash: the result of
// adamw_random_group for the 8 elements.
template <bool SIGNED, bool STOCHASTIC>
__device__ static inline uint2 coat_encode_8(uint32_t row, const CoatTables *t, uint32_t word, float inverse_max,
                                             const float x[8], const AdamwStep &step, uint32_t hash) {
    uint32_t c[2] = {0, 0}, random[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const AdamwRandom bits = adamw_random_member(&step, hash, j);
        random[j] = SIGNED ? bits.exp_avg : bits.exp_avg_sq;
    }
    if ((word & 255) >= 2) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            c[h] = STOCHASTIC ? coat_stochastic<SIGNED>(row, word, inverse_max, x + 4 * h, random + 4 * h)
                              : coat_nearest<SIGNED>(t, word, inverse_max, x + 4 * h);
    } else if (word) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            c[j / 4] |= (uint32_t)coat_encode(t, word, inverse_max, x[j], STOCHASTIC, random[j]) << 8 * (j % 4);
    }
    return make_uint2(c[0], c[1]);
}

// Encodes both moments of 8 elements, whose extremes are of_m and of_v. Stores them, and the words of their groups, if
// `active`. All threads of a warp call it. hash: as for coat_encode_8.
template <bool STOCHASTIC>
__device__ static inline void coat_store(uint32_t rows, const AdamwArrays &a, uint32_t i, const float m[8],
                                         const float v[8], CoatExtremes of_m, CoatExtremes of_v, const AdamwStep &step,
                                         uint32_t hash, bool active) {
    const CoatTables *t = a.coat.tables;
    const bool second = threadIdx.x & 8;
    const CoatExtremes e = coat_extremes(of_m, of_v, second);
    const uint32_t word = coat_word(t, float_from_bits(e.largest), float_from_bits(e.smallest_minus_1 + 1));
    const float inverse = coat_inverse(coat_max(word));
    const uint32_t m_word = __shfl_sync(COAT_WARP, word, 0, 16), v_word = __shfl_sync(COAT_WARP, word, 8, 16);
    const float m_inverse = __shfl_sync(COAT_WARP, inverse, 0, 16), v_inverse = __shfl_sync(COAT_WARP, inverse, 8, 16);
    if (STOCHASTIC) coat_share_rows(rows, t, m_word, v_word);
    const uint2 m_codes = coat_encode_8<true, STOCHASTIC>(rows, t, m_word, m_inverse, m, step, hash),
                v_codes =
                    coat_encode_8<false, STOCHASTIC>(rows + 2 * COAT_ROW_BYTES, t, v_word, v_inverse, v, step, hash);
    if (!active) return;
    if (threadIdx.x % 8 == 0) (second ? a.coat.exp_avg_sq_groups : a.coat.exp_avg_groups)[i / COAT_GROUP] = word;
    *(uint2 *)((uint8_t *)a.exp_avg + i) = m_codes;
    *(uint2 *)((uint8_t *)a.exp_avg_sq + i) = v_codes;
}

// Replaces m and v by the stored moments for those of 8 elements whose gradient is not finite.
template <AdamwGradientType GRADIENTS>
__device__ static inline void coat_keep(float m[8], float v[8], const AdamwArrays &a, uint32_t i, float factor,
                                        float scale_inv, uint32_t m_word, uint32_t v_word) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float g = __fmul_rn(adamw_load_gradient<GRADIENTS>(a.gradients, i + j, scale_inv), factor);
        if (fabsf(g) < INFINITY) continue;
        m[j] = coat_decode(a.coat.tables, m_word, ((const uint8_t *)a.exp_avg)[i + j]);
        v[j] = coat_decode(a.coat.tables, v_word, ((const uint8_t *)a.exp_avg_sq)[i + j]);
    }
}

// Computes and stores the weights of 8 elements by adamw_update, where adamw_update_fast may not be exact. Returns
// `largest` raised to their magnitudes. The stored moments, which it reads, must still be those from before the step.
// An element with a non-finite gradient keeps its weight.
template <bool MASTER, AdamwGradientType GRADIENTS>
__device__ static uint32_t adamw_weights_rare(const AdamwArrays &a, uint32_t i, int64_t group, const AdamwTerms &c,
                                              float kept, uint32_t largest, uint32_t m_word, uint32_t v_word) {
#pragma unroll 1
    for (int j = 0; j < 8; j++) {
        const float gradient =
            __fmul_rn(adamw_load_gradient<GRADIENTS>(a.gradients, i + j, c.gradient_scale_inv), c.factor);
        bf16_bits *weight = (bf16_bits *)a.weights + i + j;
        if (adamw_magnitude(gradient) != 0x7f800000u) {
            AdamwElement e = {adamw_load_one(MASTER ? (const void *)a.master : (const void *)a.weights, i + j, MASTER),
                              coat_decode(a.coat.tables, m_word, ((const uint8_t *)a.exp_avg)[i + j]),
                              coat_decode(a.coat.tables, v_word, ((const uint8_t *)a.exp_avg_sq)[i + j])};
            e = adamw_update(e, gradient, kept != 1, &c.step);
            if (MASTER) a.master[i + j] = e.weight;
            *weight =
                MASTER ? bf16_from_float(e.weight) : adamw_round(e.weight, adamw_random(&c.step, 8 * group + j).weight);
        }
        largest = amax_larger(largest, *weight & 0x7fffu);
    }
    return largest;
}

// Brings the data of 8 elements to the L2 cache.
template <bool MASTER, AdamwGradientType GRADIENTS>
__device__ static inline void coat_prefetch(const AdamwArrays &a, uint32_t i) {
    const void *lines[] = {MASTER ? (const void *)(a.master + i) : (const void *)(a.weights + i),
                           GRADIENTS == GRADIENTS_FP8    ? (const void *)(a.gradients.codes + i)
                           : GRADIENTS == GRADIENTS_FP32 ? (const void *)(a.gradients.fp32_data + i)
                                                         : (const void *)(a.gradients.bf16_data + i),
                           (const uint8_t *)a.exp_avg + i,
                           (const uint8_t *)a.exp_avg_sq + i,
                           a.coat.exp_avg_groups + i / COAT_GROUP,
                           a.coat.exp_avg_sq_groups + i / COAT_GROUP};
#pragma unroll
    for (int k = 0; k < 6; k++) asm volatile("prefetch.global.L2 [%0];" ::"l"(lines[k]));
}

// adamw_update_8 with COAT's moments. All threads of a warp call it together. A thread that is not `active` computes
// the elements of another thread, and stores nothing. Prefetches the 8 elements from `next` on. In a skipped step it
// only adds the squared gradients and raises `largest` to the magnitudes of the weights.
template <bool MASTER, bool STOCHASTIC, AdamwGradientType GRADIENTS>
__device__ static inline uint32_t adamw_update_8_coat(const AdamwArrays &a, uint32_t i, uint32_t next, int64_t group,
                                                      const AdamwTerms &c, float kept, uint32_t largest, float *squares,
                                                      bool active) {
    float w[8], m[8], v[8], g[8], denominators[8], sum = 0;
    uint32_t w_sum[8];
    if (c.skipped) {
        if (active) *squares = adamw_add_squares<GRADIENTS>(*squares, a.gradients, i, c.gradient_scale_inv);
        return amax_update(largest, bf16x8_load(a.weights + i));
    }
    const uint32_t rows = coat_rows(), m_word = a.coat.exp_avg_groups[i / COAT_GROUP],
                   v_word = a.coat.exp_avg_sq_groups[i / COAT_GROUP];
    const uint2 m_codes = *(const uint2 *)((const uint8_t *)a.exp_avg + i),
                v_codes = *(const uint2 *)((const uint8_t *)a.exp_avg_sq + i);
    adamw_load<MASTER>(w, MASTER ? (const void *)a.master : (const void *)a.weights, i);
    adamw_load_gradients<GRADIENTS>(g, a.gradients, i, c.gradient_scale_inv);
    coat_prefetch<MASTER, GRADIENTS>(a, next);
    coat_share_rows(rows, a.coat.tables, m_word, v_word);
    coat_load<true>(m, rows, m_codes, coat_max(m_word));
    coat_load<false>(v, rows + 2 * COAT_ROW_BYTES, v_codes, coat_max(v_word));
    const uint32_t hash = adamw_random_group(c.step.key, group);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        AdamwElement e = {w[j], m[j], v[j]};
        sum = __fmaf_rn(g[j], g[j], sum);
        g[j] = __fmul_rn(g[j], c.factor);
        e = adamw_update_fast(e, g[j], kept, c.step, &denominators[j]);
        w[j] = e.weight, m[j] = e.exp_avg, v[j] = e.exp_avg_sq;
        // The upper half of w_sum[j] equals bf16_from_float_stochastic() if w[j] is finite.
        w_sum[j] = float_bits(w[j]) + (adamw_random_member(&c.step, hash, j).weight >> 16);
    }
    const Bf16x8 weights = MASTER ? bf16x8_pack(w) : adamw_upper_halves(w_sum);
    uint32_t joined = amax_update(largest, weights);
    if (active) {
        *squares += sum;
        if (!adamw_is_common(denominators, 0x1p-33f, weights, joined)) {
            joined = adamw_weights_rare<MASTER, GRADIENTS>(a, i, group, c, kept, largest, m_word, v_word);
        } else {
            if (MASTER) adamw_store_fp32(a.master, i, w);
            bf16x8_store(a.weights + i, weights);
        }
    }
    CoatExtremes of_m = coat_extremes_of_8<true>(m), of_v = coat_extremes_of_8<false>(v);
    if (max(of_m.largest, of_v.largest) >= 0x7f800000u) {
        coat_keep<GRADIENTS>(m, v, a, i, c.factor, c.gradient_scale_inv, m_word, v_word);
        of_m = coat_extremes_of_8<true>(m), of_v = coat_extremes_of_8<false>(v);
    }
    coat_store<STOCHASTIC>(rows, a, i, m, v, of_m, of_v, c.step, hash, active);
    return joined;
}

#endif
