#!/usr/bin/env python3
"""Makes msamp.safetensors: 20 AdamW steps with the optimizer states of MS-AMP (llmc/base/msamp.h), and casts of FP16
weights to FP8, in numpy.

The rules are written here again, from a description of MS-AMP's code (github.com/Azure/MS-AMP, 9746ea8: optim/adamw.py,
optim/adamw.cu, common/tensor/meta.py). All arithmetic is numpy.float32, in MS-AMP's order. A tensor's scale is
at most 2^126, while MS-AMP's may become infinite; the script checks that nothing else differs from MS-AMP's formula.

One tensor of each kind of gradients: normal; with outliers (x 1e4); with zeros; all zero; all equal; denormal (1e-40);
huge (1e13) beside tiny (1e-17); zero in every other step. Weights are normal; large in the first tensor, all zero in
the fourth, tiny (1e-37) in the fifth.

msamp.safetensors   gradients [20, N], weights [N] before the first step, sizes [8] of the tensors;
                    after each step: exp_avg [20, N] U8, exp_avg_sq [20, N] F16, exp_avg_scale and exp_avg_sq_scale
                    [20, 8]; weights.fp32 [20, N] with fp32 masters; with FP16 masters weights.fp16 [20, N] and
                    weights.fp16_scale [20, 8];
                    rule.amax, rule.scale, rule.fp_max, rule.result: cases of the scale rule;
                    cast.weights [M] of T tensors with cast.sizes [T], as cast.fp16 [M] with cast.fp16_scale [T], and as
                    cast.fp8 [M] U8; tensors with equal numbers in cast.fused [T] share one FP8 tensor, and
                    cast.fp8_scale_inv has one entry for each FP8 tensor

A cast multiplies the FP16 numbers by (FP8 scale x inverse of the FP16 scale), and follows common/tensor/tensor.py: the
FP8 scale comes from the amax of the FP16 tensor, by the same rule. Two things are not from there. Tensors of a fused
weight share the largest of their amaxes, and the amax is that of the numbers after rounding to FP16 (MS-AMP keeps the
one from before): it can be found again from the FP16 tensor.
"""

import pathlib

import numpy as np

from golden_file import write_golden

OUT = pathlib.Path(__file__).resolve().parent / "goldens" / "msamp.safetensors"
STEPS, SIZES = 20, [257, 129, 128, 64, 200, 100, 96, 50]
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1
E4M3_MAX, FP16_MAX = np.float32(448), np.float32(65504)
LARGEST_SCALE = np.float32(2.0**126)
f32 = np.float32


def e4m3_values():
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    return np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))


E4M3 = e4m3_values()
MIDDLES = (E4M3[1:] + E4M3[:-1]) / 2


def e4m3_encode(x):
    """Codes of fp32 values: the nearest, ties to the even code, saturating."""
    magnitudes = np.abs(x).astype(np.float64)
    low, high = np.searchsorted(MIDDLES, magnitudes, side="left"), np.searchsorted(MIDDLES, magnitudes, side="right")
    codes = np.where(low % 2 == 0, low, high)
    return (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def e4m3_decode(codes):
    magnitudes = E4M3[codes & 0x7F].astype(f32)
    return np.where(codes & 0x80, -magnitudes, magnitudes)


def fp16_encode(x):
    """numpy rounds to nearest even; finite values saturate."""
    return np.clip(x, -FP16_MAX, FP16_MAX).astype(np.float16)


def scale_of(amax, scale, fp_max, limit=True):
    """MS-AMP's rule, with its order of conditions. log2 is rounded once, from float64. With `limit` the scale is at
    most 2^126."""
    with np.errstate(all="ignore"):
        exponent = np.floor(f32(np.log2(np.float64(f32(fp_max) / f32(amax)))))
        power = np.round(np.exp2(np.abs(exponent)))
        if limit:
            power = min(power, LARGEST_SCALE)
        result = f32(power) if amax > 0 else f32(scale)
        result = result if np.isfinite(amax) else f32(scale)
        return f32(1) / result if exponent < 0 else result


def rule_cases():
    amaxes = [0.0, np.nan, np.inf, 1e-45, 1e-40, 1.2e-38, 3e38, 1.0, 448.0, 65504.0, 65520.0]
    for power in range(-130, 112, 5):
        for top in (448.0, 65504.0):
            middle = f32(top * 2.0**power)
            amaxes += [np.nextafter(middle, f32(0)), middle]
            for _ in range(3):
                middle = np.nextafter(middle, f32(np.inf))
                amaxes.append(middle)
    cases = [(f32(a), f32(s), top) for a in amaxes for s in (1.0, 0.125, 2.0**30) for top in (E4M3_MAX, FP16_MAX)]
    return [np.array(column, f32) for column in zip(*cases)] + [np.array([scale_of(*c) for c in cases], f32)]


def check_rule(amaxes, scales, tops, results):
    """Fails if a result differs from the rule without a limit, other than by the limit. Prints in how many cases fp32's
    own log2 has another floor."""
    free = np.array([scale_of(*case, limit=False) for case in zip(amaxes, scales, tops)], f32)
    same = free == results
    assert np.all(same | ((free > LARGEST_SCALE) & (results == LARGEST_SCALE) & (amaxes < 1e-33)))
    with np.errstate(all="ignore"):
        once = np.float32(np.log2(np.float64(tops / amaxes)))
        own = np.log2(tops / amaxes)
    finite = np.isfinite(once)
    differ = np.sum(np.floor(once[finite]) != np.floor(own[finite]))
    print(f"scale rule: {len(results)} cases, {np.sum(~same)} limited; numpy's fp32 log2 has another floor in {differ}")


def moments(m8, m_scale, v16, v_scale, g):
    beta1, beta2 = f32(BETA1), f32(BETA2)
    m = beta1 * e4m3_decode(m8) * (f32(1) / m_scale) + (f32(1) - beta1) * g
    v = beta2 * v16.astype(f32) * (f32(1) / v_scale) + (f32(1) - beta2) * (g * g)
    return m, v


def new_weights(p, m, v, step):
    bias1, bias2 = (f32(1 - float(f32(beta)) ** step) for beta in (BETA1, BETA2))
    step_size = f32(LR) / bias1
    p = p * f32(1 - LR * DECAY)
    return p - step_size * (m / (np.sqrt(v) / np.sqrt(bias2) + f32(EPS)))


def make_gradients(rng):
    parts = [rng.standard_normal((STEPS, size)).astype(f32) * f32(0.01) for size in SIZES]
    parts[1][:, ::37] *= f32(1e4)
    parts[2][:, ::3] = 0
    parts[3][:] = 0
    parts[4][:] = f32(0.0371)
    parts[5] *= f32(1e-38)
    parts[6][:, ::2] *= f32(1e15)
    parts[6][:, 1::2] *= f32(1e-15)
    parts[7][::2] = 0
    return parts


def make_weights(rng):
    parts = [rng.standard_normal(size).astype(f32) for size in SIZES]
    parts[0] *= f32(1e6)
    parts[3][:] = 0
    parts[4] *= f32(1e-37)
    return parts


def train(gradients, weights):
    """Returns what one tensor has after each step: lists of (exp_avg, scale, exp_avg_sq, scale, weights, ...)."""
    size, rows = len(weights), []
    m8, v16 = np.zeros(size, np.uint8), np.zeros(size, np.float16)
    m_scale = v_scale = master_scale = f32(1)
    p32 = weights
    for step in range(-1, STEPS):
        if step >= 0:
            m, v = moments(m8, m_scale, v16, v_scale, gradients[step])
            p32 = new_weights(p32, m, v, step + 1)
            p = new_weights(p16.astype(f32) * (f32(1) / master_scale), m, v, step + 1)
            m_scale = scale_of(np.abs(m).max(), f32(1), E4M3_MAX)
            v_scale = scale_of(v.max(), f32(1), FP16_MAX)
            m8, v16 = e4m3_encode(m * m_scale), fp16_encode(v * v_scale)
        else:
            p = weights
        master_scale = scale_of(np.abs(p).max(), master_scale, FP16_MAX)
        p16 = fp16_encode(p * master_scale)
        if step >= 0:
            rows.append((m8, [m_scale], v16, [v_scale], p32, p16, [master_scale]))
    return rows


def make_fused_weights(rng):
    """Fused weights: lists of tensors. Most sizes are no multiple of 8, so that casts have ragged ends."""
    normal = lambda n, size: rng.standard_normal(n).astype(f32) * f32(size)
    outliers, sparse, edge, ties = normal(500, 0.02), normal(131, 1), normal(99, 0.3), normal(257, 1)
    outliers[::71] *= f32(1e4)
    sparse[::2] = 0
    edge[7] = f32(448 / 256) * (1 + f32(2.0**-13))  # rounds to a number whose scale is twice as large
    ties[:] = 448 / 2.0 ** rng.integers(0, 20, 257)
    ties[1::3] *= f32(1 + 1 / 16)
    return [
        [normal(301, 0.02), normal(129, 0.0004), normal(77, 5)],
        [outliers, normal(93, 1e-4)],
        [sparse, np.zeros(65, f32)],
        [np.zeros(40, f32)],
        [normal(203, 1e-40), normal(50, 1e-37), np.zeros(3, f32)],
        [normal(111, 1e30), normal(64, 1e-30), normal(31, 1e-42)],
        [normal(33, 1e-38)],
        [edge, normal(17, 0.001)],
        [ties, f32(448) * np.ones(1, f32), -normal(90, 2.0**-10)],
        [normal(5, 3e37)],
    ]


def cast_fused(tensors):
    """Returns the FP16 tensors, their scales, the FP8 tensors, and their common scale_inv."""
    scales = [scale_of(np.abs(p).max(), f32(1), FP16_MAX) for p in tensors]
    halves = [fp16_encode(p * s) for p, s in zip(tensors, scales)]
    amax = max(np.abs(h.astype(f32) * (f32(1) / s)).max() for h, s in zip(halves, scales))
    fp8 = scale_of(amax, f32(1), E4M3_MAX)
    codes = [e4m3_encode(h.astype(f32) * (fp8 * (f32(1) / s))) for h, s in zip(halves, scales)]
    return halves, scales, codes, f32(1) / fp8


def add_casts(tensors, rng):
    fused = make_fused_weights(rng)
    halves, scales, codes, inverses = (list(column) for column in zip(*map(cast_fused, fused)))
    flat = lambda lists: [x for inner in lists for x in inner]
    tensors["cast.weights"] = np.concatenate(flat(fused))
    tensors["cast.sizes"] = np.array([len(p) for p in flat(fused)], np.int32)
    tensors["cast.fused"] = np.array([k for k, inner in enumerate(fused) for _ in inner], np.int32)
    tensors["cast.fp16"], tensors["cast.fp16_scale"] = np.concatenate(flat(halves)), np.array(flat(scales), f32)
    tensors["cast.fp8"], tensors["cast.fp8_scale_inv"] = np.concatenate(flat(codes)), np.array(inverses, f32)


def main():
    rng = np.random.default_rng(11)
    gradients, weights = make_gradients(rng), make_weights(rng)
    names = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    names += ("weights.fp32", "weights.fp16", "weights.fp16_scale")
    runs = [train(g, w) for g, w in zip(gradients, weights)]
    tensors = {"sizes": np.array(SIZES, np.int32), "gradients": np.concatenate(gradients, axis=1)}
    tensors["weights"] = np.concatenate(weights)
    for k, name in enumerate(names):
        array = np.stack([np.concatenate([run[step][k] for run in runs]) for step in range(STEPS)])
        tensors[name] = array.astype(f32) if name.endswith("scale") else array
    rule = rule_cases()
    check_rule(*rule)
    for name, column in zip(("amax", "scale", "fp_max", "result"), rule):
        tensors[f"rule.{name}"] = column
    add_casts(tensors, np.random.default_rng(12))
    write_golden(OUT, tensors, dict(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY))
    print(f"{OUT.name}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
