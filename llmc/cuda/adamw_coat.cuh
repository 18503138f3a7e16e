// AdamW's update of 8 elements by one thread, with FP8 moments (coat.h).
#ifndef LLMC_ADAMW_COAT_CUH
#define LLMC_ADAMW_COAT_CUH

#include "adamw_update.cuh"

static_assert(COAT_GROUP == 16 * 8, "16 threads, half a warp, hold a group");

__device__ static inline uint32_t coat_threads(void) { return 0xffffu << (threadIdx.x & 16); }

// Decodes 8 codes of a group with this word.
__device__ static inline void coat_load(float out[8], const CoatTables *t, const void *codes, uint32_t word,
                                        uint32_t i) {
    const uint2 c = *(const uint2 *)((const uint8_t *)codes + i);
    const float max = coat_max(word);
    const uint32_t row = (word & 255) * (uint32_t)sizeof t->value[0];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const uint32_t at = __byte_perm(j < 4 ? c.x : c.y, 0, 0x4440 + j % 4) * (uint32_t)sizeof(float) + row;
        out[j] = __fmul_rn(*(const float *)((const char *)t->value + at), max);
    }
}

// The largest magnitude of a group and the smallest above zero, as bits.
typedef struct {
    uint32_t largest, smallest;
} CoatExtremes;

// Returns the extremes of a group of which this thread has 8 values. All threads of the group call it.
__device__ static inline CoatExtremes coat_extremes(const float x[8]) {
    uint32_t largest = 0, smallest = UINT32_MAX;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const uint32_t magnitude = float_bits(x[j]) & 0x7fffffffu;
        largest = max(largest, magnitude);
        smallest = min(smallest, magnitude - 1);  // 0 becomes the largest number: zeros do not count
    }
    const CoatExtremes e = {__reduce_max_sync(coat_threads(), largest),
                            __reduce_min_sync(coat_threads(), smallest) + 1};
    return e;
}

// Returns 448 (|x| / max)^k with the sign of x; part = |x| / max. It is off by less than 2^-18 of itself: the errors of
// log2 and 2^x are below 2^-22, and the exponent of part^k is above -18.
__device__ static inline float coat_expand(float x, float part, float k) {
    const float log2_448 = 8.807354922f;
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(part));
    y = __fmaf_rn(y, k, log2_448);
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(y));
    return copysignf(y, x);
}

// Rounds to E4M3, to nearest, with saturation: a in the lower byte, b in the upper one.
__device__ static inline uint32_t coat_e4m3x2(float a, float b) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
    return codes;
}

// Rounds to E4M3 stochastically, as coat_encode does, from the nearest code.
__device__ static inline uint32_t coat_round(const float *values, uint32_t nearest, float part, uint32_t random) {
    const uint32_t sign = nearest & COAT_SIGN, code = nearest & (COAT_SIGN - 1);
    const float here = values[code];
    const bool up = here <= part;
    const float there = values[up ? code + 1 : code - 1], below = up ? here : there, above = up ? there : here;
    const bool rounds_up = part - below > __fmul_rn(above - below, (float)(random >> 16) * 0x1p-16f);
    return sign | (code - !up + rounds_up);
}

// Encodes 8 values and stores their codes, in a group with this word. random: rounding bits of each value, for
// stochastic rounding. A code is sure if the values 2^-16 above and below the computed one round to it too, and k is so
// large that part does not underflow. Otherwise coat_encode finds all 8.
template <bool STOCHASTIC>
__device__ static inline void coat_store(const CoatTables *t, void *codes, uint32_t word, float inverse_max, uint32_t i,
                                         const float x[8], const uint32_t random[8]) {
    const uint32_t row = word & 255;
    const float k = (float)(row + 1) * 0.0625f;
    uint32_t c[2] = {0, 0}, lower[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float part[2] = {__fmul_rn(fabsf(x[j]), inverse_max), __fmul_rn(fabsf(x[j + 1]), inverse_max)};
        const float y0 = coat_expand(x[j], part[0], k), y1 = coat_expand(x[j + 1], part[1], k);
        const float up = 1 + 0x1p-16f, down = 1 - 0x1p-16f;
        uint32_t pair = coat_e4m3x2(STOCHASTIC ? y0 : y0 * up, STOCHASTIC ? y1 : y1 * up);
        if (STOCHASTIC)
            pair = coat_round(t->value[row], pair & 255, part[0], random[j]) |
                   coat_round(t->value[row], pair >> 8, part[1], random[j + 1]) << 8;
        else lower[j / 4] |= coat_e4m3x2(y0 * down, y1 * down) << 8 * (j % 4);
        c[j / 4] |= pair << 8 * (j % 4);
    }
    const bool sure = STOCHASTIC || (c[0] == lower[0] && c[1] == lower[1]);
    if (!sure || row < 2) {
        c[0] = c[1] = 0;
#pragma unroll
        for (int j = 0; word && j < 8; j++)
            c[j / 4] |= (uint32_t)coat_encode(t, word, inverse_max, x[j], STOCHASTIC, random[j]) << 8 * (j % 4);
    }
    *(uint2 *)((uint8_t *)codes + i) = make_uint2(c[0], c[1]);
}

// Encodes and stores both moments of 8 elements, and the words of their groups. All threads of the group call it; they
// have read the old words. Half of them compute the word of exp_avg, half that of exp_avg_sq.
template <bool STOCHASTIC>
__device__ static inline void coat_store_moments(const AdamwArrays &a, uint32_t i, const float m[8], const float v[8],
                                                 const uint32_t m_random[8], const uint32_t v_random[8]) {
    const AdamwCoat &coat = a.coat;
    const CoatExtremes of_m = coat_extremes(m), of_v = coat_extremes(v);
    const bool second = threadIdx.x & 8;
    const uint32_t word = coat_word(coat.tables, float_from_bits(second ? of_v.largest : of_m.largest),
                                    float_from_bits(second ? of_v.smallest : of_m.smallest));
    const float inverse_max = 1 / coat_max(word);
    if (threadIdx.x % 8 == 0) (second ? coat.exp_avg_sq_groups : coat.exp_avg_groups)[i / COAT_GROUP] = word;
    coat_store<STOCHASTIC>(coat.tables, a.exp_avg, __shfl_sync(coat_threads(), word, 0, 16),
                           __shfl_sync(coat_threads(), inverse_max, 0, 16), i, m, m_random);
    coat_store<STOCHASTIC>(coat.tables, a.exp_avg_sq, __shfl_sync(coat_threads(), word, 8, 16),
                           __shfl_sync(coat_threads(), inverse_max, 8, 16), i, v, v_random);
}

// Recomputes the weights of 8 elements by adamw_update, where adamw_update_fast may not be exact. The moments are still
// those before the step. An element with a non-finite gradient keeps its weight.
template <bool MASTER, bool FP32_GRADIENTS>
__device__ static uint32_t adamw_weights_rare(const AdamwArrays &a, uint32_t i, int64_t group, const AdamwTerms &c,
                                              float kept, uint32_t largest, uint32_t m_word, uint32_t v_word) {
#pragma unroll 1
    for (int j = 0; j < 8; j++) {
        const float gradient =
            __fmul_rn(adamw_load_one(adamw_gradients<FP32_GRADIENTS>(a), i + j, FP32_GRADIENTS), c.factor);
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

// adamw_update_8 with FP8 moments. The 16 threads of a group call it together.
template <bool MASTER, bool STOCHASTIC, bool FP32_GRADIENTS>
__device__ static inline uint32_t adamw_update_8_coat(const AdamwArrays &a, uint32_t i, int64_t group,
                                                      const AdamwTerms &c, float kept, uint32_t largest,
                                                      float *squares) {
    float w[8], m[8], v[8], g[8], new_m[8], new_v[8], denominators[8];
    uint32_t w_sum[8], m_random[8], v_random[8];
    if (c.skipped) return amax_update(largest, bf16x8_load(a.weights + i));
    const uint32_t m_word = a.coat.exp_avg_groups[i / COAT_GROUP], v_word = a.coat.exp_avg_sq_groups[i / COAT_GROUP];
    bool finite = true;
    adamw_load<MASTER>(w, MASTER ? (const void *)a.master : (const void *)a.weights, i);
    adamw_load<FP32_GRADIENTS>(g, adamw_gradients<FP32_GRADIENTS>(a), i);
    coat_load(m, a.coat.tables, a.exp_avg, m_word, i);
    coat_load(v, a.coat.tables, a.exp_avg_sq, v_word, i);
    const uint32_t hash = adamw_random_group(c.step.key, group);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        AdamwElement e = {w[j], m[j], v[j]};
        *squares = __fmaf_rn(g[j], g[j], *squares);
        g[j] = __fmul_rn(g[j], c.factor);
        e = adamw_update_fast(e, g[j], kept, c.step, &denominators[j]);
        finite = finite & (fabsf(g[j]) < INFINITY);
        w[j] = e.weight, new_m[j] = e.exp_avg, new_v[j] = e.exp_avg_sq;
        const AdamwRandom random = adamw_random_member(&c.step, hash, j);
        w_sum[j] = float_bits(w[j]) + (random.weight >> 16);
        m_random[j] = random.exp_avg, v_random[j] = random.exp_avg_sq;
    }
    const Bf16x8 weights = MASTER ? bf16x8_pack(w) : adamw_upper_halves(w_sum);
    uint32_t joined = amax_update(largest, weights);
    if (!adamw_is_common(denominators, 0x1p-33f, weights, joined)) {
        joined = adamw_weights_rare<MASTER, FP32_GRADIENTS>(a, i, group, c, kept, largest, m_word, v_word);
    } else {
        if (MASTER) adamw_store_fp32(a.master, i, w);
        bf16x8_store(a.weights + i, weights);
    }
    if (!finite) {  // moments without a finite gradient stay
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (!(fabsf(g[j]) < INFINITY)) new_m[j] = m[j], new_v[j] = v[j];
    }
    coat_store_moments<STOCHASTIC>(a, i, new_m, new_v, m_random, v_random);
    return joined;
}

#endif
