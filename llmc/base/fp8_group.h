// Groups of 128 values as E4M3 codes with one E8M0 scale_inv (fp8.h), for activations that are kept for backward.
// The CPU trainer and CUDA kernels share these rules, so that both compute the same bits.
//
// The scale is a power of two, the largest with which no finite bf16 value of the group saturates, but at most 2^127.
// So a decoded value has at most the four significant bits of E4M3, and bf16 holds it exactly if its magnitude is
// 2^-126 or more. But finite values with a magnitude of 1.9375 x 2^127 or more become infinite. A NaN makes the whole
// group NaN. An infinity stays infinite, and values with a magnitude up to 2^117 in its group become zero.
#ifndef LLMC_FP8_GROUP_H
#define LLMC_FP8_GROUP_H

#include "fp8.h"

enum { FP8_GROUP = 128 };  // values in a group

// Returns the scale_inv of a group, as E8M0. `amax`: fp32 bits of the largest magnitude; NaN is above infinity.
HOST_DEVICE static inline uint8_t fp8_group_scale_inv(uint32_t amax) {
    return e8m0_from_amax(float_from_bits(amax), FP8_E4M3);
}

// Returns the factor by which a group's values are multiplied before the cast: 1 / scale_inv.
HOST_DEVICE static inline float fp8_group_factor(uint8_t scale_inv) {
    if (scale_inv == 0xff) return float_from_bits(0x7fc00000u);
    return scale_inv == 254 ? float_from_bits(0x00400000u) : float_from_bits((uint32_t)(254 - scale_inv) << 23);
}

#endif
