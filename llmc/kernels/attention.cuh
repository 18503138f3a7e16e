// Causal self-attention with grouped key/value heads, forward and backward, without a T x T matrix in memory.
// On Hopper, if the program was built for it (hopper_available), kernels with TMA and wgmma run, else with mma.sync.
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include "attention_backward_sm90.cuh"
#include "attention_dims.h"
#include "attention_forward_sm90.cuh"
#include "attention_mma.cuh"

// Dies unless the kernels support these sizes and pointers.
static inline void attention_check(AttentionDims d, const void *qkv, const void *out) {
    if (d.HD != 64 && d.HD != 128) die("attention: head_dim %lld is not supported; 64 and 128 are", (long long)d.HD);
    if (d.NKV < 1 || d.NH < d.NKV || d.NH % d.NKV)
        die("attention: %lld query heads cannot share %lld key/value heads evenly", (long long)d.NH, (long long)d.NKV);
    if (d.B < 1 || d.B > 65535 || d.T < 1 || d.T > (1 << 24) || d.NH > 8192)
        die("attention: batch %lld, length %lld, %lld heads: the kernels take 1..65535, 1..16777216, 1..8192",
            (long long)d.B, (long long)d.T, (long long)d.NH);
    require_aligned16(qkv, "attention", "qkv");
    require_aligned16(out, "attention", "the output");
}

// Returns the bytes of workspace that attention_backward needs: enough for either implementation. Forward needs none.
static inline size_t attention_workspace_bytes(int64_t B, int64_t T, int64_t NH, int64_t NKV, int64_t HD) {
    AttentionDims d = {B, T, NH, NKV, HD, false, {}};
    size_t mma = attention_backward_mma_workspace_bytes(d), sm90 = attention_backward_sm90_workspace_bytes(d);
    return mma > sm90 ? mma : sm90;
}

// Returns the FLOPs of forward's two causal GEMMs, Q K^T and P V.
static inline double attention_flops(AttentionDims d) { return 2.0 * (double)(d.B * d.T * d.NH * d.HD) * (double)d.T; }

// Writes out [B,T,NH*HD] bf16 and lse [B,NH,T] fp32 (natural logarithm of each query's sum of exponentials) from qkv
// [B,T,(NH+2*NKV)*HD] bf16 (query, key, value heads; queries and keys after RoPE). Scores are scaled by 1/sqrt(HD).
// Raises *amax to max |out| unless amax is NULL. Returns the FLOPs of its causal GEMMs. Dies as attention_check.
static inline double attention_forward(bf16 *out, float *lse, uint32_t *amax, const bf16 *qkv, AttentionDims d,
                                       cudaStream_t stream) {
    attention_check(d, qkv, out);
    if (hopper_available()) attention_forward_sm90(out, lse, amax, qkv, d, stream);
    else attention_forward_mma(out, lse, amax, qkv, d, stream);
    return attention_flops(d);
}

// Writes all of dqkv [B,T,(NH+2*NKV)*HD] bf16, the gradient with respect to qkv, given dout = dL/dout [B,T,NH*HD] bf16
// and the inputs and outputs of forward. workspace holds attention_workspace_bytes() and is 256-byte aligned; its
// contents do not matter. Returns the FLOPs of five causal GEMMs (forward has two), although the mma.sync version
// computes seven. Dies as attention_check.
static inline double attention_backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out,
                                        const float *lse, void *workspace, AttentionDims d, cudaStream_t stream) {
    attention_check(d, qkv, out);
    require_aligned16(dqkv, "attention_backward", "dqkv");
    require_aligned16(dout, "attention_backward", "dout");
    if (hopper_available()) attention_backward_sm90(dqkv, dout, qkv, out, lse, workspace, d, stream);
    else attention_backward_mma(dqkv, dout, qkv, out, lse, workspace, d, stream);
    return 2.5 * attention_flops(d);
}

#endif
