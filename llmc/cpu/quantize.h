// The CPU trainer's casts: the scale of each tensor, and the operands of a GEMM cast by their linear layer's recipe.
#ifndef LLMC_CPU_QUANTIZE_H
#define LLMC_CPU_QUANTIZE_H

#include "../reference/linear.h"
#include "shard.h"

// Returns the scale of a tensor with one scale, given the fp32 bits of its own amax: by the rule of the recipe, or of
// weights that are cast from FP16 masters. Delayed scaling uses the scale made from earlier amaxes, if there is one,
// and recipe tensorwise_bounded that of a weight's bound.
static inline float cast_scale(const Trainer *t, int64_t l, int id, TensorRole role, uint32_t amax) {
    const Recipe *r = precision_of(&t->precision, l, id);
    const Fp8Format format = precision_format(&t->precision, role);
    if (role == TENSOR_W && t->precision.casts_masters) return fp16_weights_fp8_scale(float_from_bits(amax));
    const bool has_known = r->delayed || (r->bounded && role == TENSOR_W);
    const float known = has_known ? t->scales.delayed.scale[tensor_index(l, role, id)] : 0;
    if (!r->delayed && !(known > 0)) return fp8_rule_scale(r->rule, float_from_bits(amax), format);
    return known > 0 ? known : fp8_scale_te(float_from_bits(amax), format, (int)t->o->fp8_margin);
}

// Returns the scale of a whole weight, whose amax was found when the weights changed.
static inline float weight_scale(const Trainer *t, int64_t l, int id) {
    return cast_scale(t, l, id, TENSOR_W, t->scales.amax[tensor_index(l, TENSOR_W, id)]);
}

// Returns the scale to cast a tensor of n elements with. 0: the cast computes its scales, or the tensor is not cast. In
// a micro-step with delayed scaling, also records the amax of an input or a gradient.
static inline float qtensor_scale(Trainer *t, const QTensor *q, int64_t n) {
    const Recipe *r = precision_of(&t->precision, q->layer, q->linear);
    if (q->role == TENSOR_W) return recipe_has_tensor_scales(r) ? weight_scale(t, q->layer, q->linear) : 0;
    if (!r->delayed) return 0;
    const uint32_t amax = quantize_tensor_amax(q->data, n, r->rule);
    uint32_t *largest = &t->scales.amax[tensor_index(q->layer, q->role, q->linear)];
    if (t->training && amax > *largest) *largest = amax;
    return cast_scale(t, q->layer, q->linear, q->role, amax);
}

// Returns a tensor as a GEMM reads it: cast by the recipe of its linear layer. In an audited step, adds an FP8 cast to
// the audit. A weight that was cast ahead is not cast again.
static inline LinearOperand qtensor_operand(Trainer *t, const QTensor *q, TensorUsage copy) {
    const Recipe *r = precision_of(&t->precision, q->layer, q->linear);
    const LinearShape *s = &t->precision.linear[q->linear];
    const int64_t rows = q->role == TENSOR_W ? s->N : t->d.R, cols = q->role == TENSOR_DY ? s->N : s->K;
    const Fp8Format format = precision_format(&t->precision, q->role);
    const ScaleGranularity granularity = recipe_granularity(r, q->role, copy);
    const float scale = qtensor_scale(t, q, rows * cols);
    if (q->codes) return linear_operand_of_codes(q->codes, rows, cols, copy, format, scale);
    const LinearOperand x = linear_operand(q->data, rows, cols, copy, granularity, r->rule, format, scale);
    if (t->training && t->scales.auditing && x.codes)
        audit_copy(&t->scales.step_audit[audit_index(q->layer, q->linear, q->role, copy)], q->data, x.codes, x.scales,
                   x.shape, granularity, format);
    return x;
}

// c [M, N] = a b^T + bias, with a [M, depth] and b [N, depth]. copy_a, copy_b: rowwise or columnwise data. Operands are
// decoded and multiplied with fp32 sums: --fp8-emulate and --fp8-fast-accum change nothing on the CPU.
static inline void gemm(Trainer *t, Real *c, const QTensor *a, TensorUsage copy_a, const QTensor *b, TensorUsage copy_b,
                        int64_t M, int64_t N, int64_t depth, const Real *bias) {
    LinearOperand qa = qtensor_operand(t, a, copy_a), qb = qtensor_operand(t, b, copy_b);
    linear_product(c, qa, qb, M, N, depth, bias, t->rounding);
    linear_operand_free(&qa), linear_operand_free(&qb);
}

// Returns operand 0 or 1 of a GEMM of lm_head, in the order of Recipe.granularity: `data` as it is, or cast to FP8
// (--fp8-lm-head). `amax`: what the scale is made from, if the tensor has one; 0: the tensor's own amax.
static inline LinearOperand head_operand(const Trainer *t, GemmKind gemm, int operand, const Real *data, float amax) {
    const Recipe *r = &t->precision.head;
    const LinearShape *s = &t->precision.lm_head;
    const TensorRole role = gemm_tensor(gemm, operand);
    const int64_t rows = role == TENSOR_W ? s->N : t->d.R, cols = role == TENSOR_DY ? s->N : s->K;
    const Fp8Format format = precision_format(&t->precision, role);
    return linear_operand(data, rows, cols, gemm_usage(gemm, operand), r->granularity[gemm][operand], r->rule, format,
                          amax > 0 ? fp8_rule_scale(r->rule, amax, format) : 0);
}

// Computes a GEMM of lm_head into c, from its operands in the order of Recipe.granularity: w and x, w and dy, or x and
// dy. `amax`: see head_operand; of x or dy.
static inline void head_gemm(const Trainer *t, GemmKind gemm, Real *c, const Real *first, const Real *second,
                             float amax) {
    const GemmSizes n = precision_sizes(&t->precision.lm_head, gemm, t->d.R);
    LinearOperand a = head_operand(t, gemm, 1, second, amax), b = head_operand(t, gemm, 0, first, 0);
    linear_product(c, a, b, n.rows, n.columns, n.depth, NULL, t->rounding);
    linear_operand_free(&a), linear_operand_free(&b);
}

#endif
