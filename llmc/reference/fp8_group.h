// Encodes values as groups of FP8 codes (base/fp8_group.h) and decodes them, in plain C.
#ifndef LLMC_REFERENCE_FP8_GROUP_H
#define LLMC_REFERENCE_FP8_GROUP_H

#include "../base/fp8_group.h"

// Returns the scale_inv of a group of n values, as E8M0.
static inline uint8_t fp8_group_find_scale_inv(const float *x, int64_t n) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < n; i++) amax = fp8_rule_amax(SCALE_MX, amax, x[i]);
    return fp8_group_scale_inv(amax);
}

static inline uint8_t fp8_group_code(float x, uint8_t scale_inv) {
    return fp8_from_float(x * fp8_group_factor(scale_inv), FP8_E4M3);
}

// Returns the value of a code, in bf16.
static inline float fp8_group_value(uint8_t code, uint8_t scale_inv) {
    return bf16_round(fp8_to_float(code, FP8_E4M3) * e8m0_to_float(scale_inv));
}

// Encodes x [n] in groups, beginning with its first value, and overwrites x with the decoded values. The last group may
// be smaller.
static inline void fp8_group_round(float *x, int64_t n) {
    PARALLEL_FOR
    for (int64_t begin = 0; begin < n; begin += FP8_GROUP) {
        const int64_t end = min_i64(begin + FP8_GROUP, n);
        const uint8_t scale_inv = fp8_group_find_scale_inv(x + begin, end - begin);
        for (int64_t i = begin; i < end; i++) x[i] = fp8_group_value(fp8_group_code(x[i], scale_inv), scale_inv);
    }
}

#endif
