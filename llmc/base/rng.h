// Counter-based random numbers: a value depends on (seed, stream, index) alone, on every rank and device.
#ifndef LLMC_RNG_H
#define LLMC_RNG_H

#include <math.h>

#include "bf16.h"

// The mixing function of SplitMix64 (Steele, Lea, Flood 2014).
HOST_DEVICE static inline uint64_t rng_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Returns the key of an independent sequence, for example of (seed, optimizer step) or (seed, tensor).
HOST_DEVICE static inline uint64_t rng_key(uint64_t seed, uint64_t stream) {
    return rng_mix(rng_mix(seed + 0x9e3779b97f4a7c15ull) ^ (stream * 0xd1342543de82ef95ull + 1));
}

// 64 random bits, the index-th of the sequence `key`.
HOST_DEVICE static inline uint64_t rng_u64(uint64_t key, uint64_t index) {
    return rng_mix(key + index * 0x9e3779b97f4a7c15ull);
}

// Uniform in [0, 1), 24 bits.
HOST_DEVICE static inline float rng_uniform(uint64_t key, uint64_t index) {
    return (float)(rng_u64(key, index) >> 40) * 0x1p-24f;
}

// -2 ln(u) for u in (0, 1]: exponent and mantissa apart, ln(1+f) by the atanh series; relative error below 1e-6. No
// product is added to anything except by an explicit fmaf, so that host and device round alike with any compiler.
HOST_DEVICE static inline float rng_minus_2ln(float u) {
    uint32_t bits = float_bits(u);
    int exponent = (int)(bits >> 23) - 127;
    float m = float_from_bits((bits & 0x007fffffu) | 0x3f800000u);
    if (m > 1.41421356f) {
        m *= 0.5f;
        exponent++;
    }
    float s = (m - 1.0f) / (m + 1.0f);
    float s2 = s * s;
    float p = fmaf(s2, 1.0f / 9, 1.0f / 7);
    p = fmaf(s2, p, 1.0f / 5);
    p = fmaf(s2, p, 1.0f / 3);
    p = fmaf(s2, p, 1.0f);
    return -fmaf((float)exponent, 1.3862943611f, 4.0f * (s * p));
}

// cos(2 pi u) for u in [0, 1): folded to a quarter turn, Taylor polynomial there; absolute error below 1e-6.
HOST_DEVICE static inline float rng_cos_turn(float u) {
    float q = u < 0.5f ? u : 1.0f - u;
    bool negative = q > 0.25f;
    if (negative) q = 0.5f - q;
    float x = q * 6.2831853072f, x2 = x * x;
    float p = fmaf(x2, -2.755731922e-7f, 2.480158730e-5f);
    p = fmaf(x2, p, -1.388888889e-3f);
    p = fmaf(x2, p, 4.166666667e-2f);
    p = fmaf(x2, p, -0.5f);
    p = fmaf(x2, p, 1.0f);
    return negative ? -p : p;
}

// Standard normal (Box and Muller 1958), the same bits on host and device.
HOST_DEVICE static inline float rng_normal(uint64_t key, uint64_t index) {
    uint64_t r = rng_u64(key, index);
    float u1 = (float)((r >> 40) + 1) * 0x1p-24f;
    float u2 = (float)((r >> 8) & 0xffffffu) * 0x1p-24f;
    return sqrtf(rng_minus_2ln(u1)) * rng_cos_turn(u2);
}

#endif
