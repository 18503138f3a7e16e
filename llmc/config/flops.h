// Counts a model's floating-point operations per token, and compares them with the hardware's peak (MFU, SOL).
//
//   model FLOPs per token = 6 x (parameters that GEMMs read: with lm_head, without the embedding)
//                           + 6 x layers x heads x head_dim x T
// The second term is causal attention. In a layer, forward has for each token 2 GEMMs over T/2 keys on average, with 2
// FLOPs a multiply-add: 2 x heads x head_dim x T FLOPs. Backward has twice as many. Recomputation does not count.
//   mfu = model FLOP/s over the dense BF16 peak of the GPU
//   sol = time of all GEMMs at the dense peak of their precision (FP8: twice BF16), over the measured time
// FP8 FLOPs are counted GEMM by GEMM. A linear layer [N, K] has three GEMMs of 2 x N x K FLOPs a token. lm_head has
// those in FP8 that --fp8-lm-head says. With --precision fp8, a GEMM of a transformer layer counts as bf16 if a filter
// keeps its linear layer in bf16, if N or K does not fit FP8 GEMMs (linear_fits), if the recipe keeps this GEMM in
// bf16, or with --fp8-emulate.
#ifndef LLMC_FLOPS_H
#define LLMC_FLOPS_H

#include <ctype.h>

#include "precision.h"

typedef struct {
    double bf16, fp8;  // FLOPs per token in GEMMs that read bf16 (or fp32), and in GEMMs that read FP8
} TokenFlops;

// The hardware and the software of one rank.
typedef struct {
    char name[256], versions[256];  // GPU or CPU; versions of CUDA and its libraries, or of the CPU's compiler
    double peak_bf16;               // dense FLOP/s; 0: not known
    char pci_bus_id[32];            // the GPU's address; "": a CPU
} DeviceInfo;

// Returns the FLOPs per token of lm_head's GEMMs that read FP8.
static inline double flops_head_fp8(const Precision *p) {
    double flops = 0;
    for (int gemm = 0; gemm < NUM_GEMMS && !p->emulated; gemm++)
        if (recipe_is_fp8(&p->head, (GemmKind)gemm)) flops += 2.0 * (double)p->lm_head.N * (double)p->lm_head.K;
    return flops;
}

// Returns the FLOPs per token of training on sequences of T tokens. Attention counts as bf16; `p` decides for each
// linear layer.
static inline TokenFlops flops_per_token(const ParameterTable *t, const ModelConfig *m, int64_t T, const Precision *p) {
    TokenFlops f = {6.0 * (double)matmul_parameters(t, m) +
                        6.0 * (double)m->num_layers * (double)m->num_heads * (double)m->head_dim * (double)T,
                    0};
    for (int64_t l = 0; l < p->num_layers && !p->emulated; l++)
        for (int id = 0; id < NUM_LINEARS; id++)
            for (int gemm = 0; gemm < NUM_GEMMS; gemm++)
                if (recipe_is_fp8(precision_of(p, l, id), (GemmKind)gemm))
                    f.fp8 += 2.0 * (double)p->linear[id].N * (double)p->linear[id].K;
    f.fp8 += flops_head_fp8(p);
    f.bf16 -= f.fp8;
    return f;
}

static inline double flops_total(TokenFlops f) { return f.bf16 + f.fp8; }

// These two return mfu and sol (see above) at `tokens_per_second` per GPU; NAN if the peak is unknown (peak_bf16 0).
static inline double flops_mfu(TokenFlops f, double tokens_per_second, double peak_bf16) {
    return peak_bf16 > 0 ? flops_total(f) * tokens_per_second / peak_bf16 : (double)NAN;
}

static inline double flops_sol(TokenFlops f, double tokens_per_second, double peak_bf16) {
    return peak_bf16 > 0 ? (f.bf16 + f.fp8 / 2) * tokens_per_second / peak_bf16 : (double)NAN;
}

// True if `text` has `word` as a whole word: "NVIDIA H200" has "H200", "NVIDIA GH200" does not.
static inline bool flops_has_word(const char *text, const char *word) {
    const size_t n = strlen(word);
    for (const char *at = text; (at = strstr(at, word)) != NULL; at++)
        if ((at == text || !isalnum((unsigned char)at[-1])) && !isalnum((unsigned char)at[n])) return true;
    return false;
}

// Returns dense BF16 FLOP/s with fp32 accumulation; 0: not known. Takes the first row that fits the compute capability
// and the CUDA runtime's name of the GPU. Where NVIDIA's data sheets print the sparse figure, a row has half of it.
static inline double flops_peak_bf16(int major, int minor, const char *name) {
    static const struct {
        int major, minor;
        const char *word, *also;
        double tflops;
    } table[] = {
        // clang-format off
        {10, 0, "B200", NULL, 2250},  {10, 0, "GB200", NULL, 2500}, {9, 0, "H200", "NVL", 835.5},
        {9, 0, "H200", NULL, 989.5},  {9, 0, "GH200", NULL, 989.5}, {9, 0, "H100", "PCIe", 756},
        {9, 0, "H100", "NVL", 835.5}, {9, 0, "H100", NULL, 989.5},  {9, 0, "H800", NULL, 989.5},
        {9, 0, "H20", NULL, 148},     {8, 0, "A100", NULL, 312},    {8, 0, "A800", NULL, 312},
        {8, 0, "A30", NULL, 165},     {8, 6, "A40", NULL, 149.7},   {8, 9, "L40S", NULL, 362},
        {8, 9, "L40", NULL, 181},     {8, 9, "L4", NULL, 121},      {8, 9, "4090", NULL, 165.2},
        // clang-format on
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i].major == major && table[i].minor == minor && flops_has_word(name, table[i].word) &&
            (!table[i].also || flops_has_word(name, table[i].also)))
            return table[i].tflops * 1e12;
    return 0;
}

#endif
