// SwiGLU (Shazeer 2020) in plain C: h = silu(gate) * up, silu(g) = g / (1 + exp(-g)).
//
// A row of gate_up [rows, 2F] holds gate, then up.
#ifndef LLMC_REFERENCE_SWIGLU_H
#define LLMC_REFERENCE_SWIGLU_H

#include <math.h>

#include "rounding.h"

// h [rows, F]
static inline void swiglu_forward_reference(float *h, const float *gate_up, int64_t rows, int64_t F,
                                            Rounding rounding) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++)
        for (int64_t f = 0; f < F; f++) {
            const float gate = gate_up[i * 2 * F + f], up = gate_up[i * 2 * F + F + f];
            h[i * F + f] = round_to(gate / (1 + expf(-gate)) * up, rounding);
        }
}

// dgate_up [rows, 2F] from dh; may overwrite gate_up.
static inline void swiglu_backward_reference(float *dgate_up, const float *dh, const float *gate_up, int64_t rows,
                                             int64_t F, Rounding rounding) {
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++)
        for (int64_t f = 0; f < F; f++) {
            const float gate = gate_up[i * 2 * F + f], up = gate_up[i * 2 * F + F + f], d = dh[i * F + f];
            const float sigmoid = 1 / (1 + expf(-gate));
            dgate_up[i * 2 * F + f] = round_to(d * up * sigmoid * (1 + gate * (1 - sigmoid)), rounding);
            dgate_up[i * 2 * F + F + f] = round_to(d * gate * sigmoid, rounding);
        }
}

#endif
