#!/usr/bin/env python3
"""Makes msamp_gradients.safetensors: gradients in FP8 as in MS-AMP (llmc/reference/gradient_fp8.h), in numpy.

The rules of `added` are written from a description of MS-AMP's code (github.com/Azure/MS-AMP, 9746ea8:
common/tensor/meta.py, nn/functional.py). Sums over ranks are cast with one scale as there, but added in fp32, rank 0
first, and their mean is cast with a scale of its own. The scale rule and E4M3 are those of make_msamp_goldens.py. All
gradients are finite.

One tensor of each kind: normal; with outliers (x 1e4); with zeros; all zero; all equal; denormal (1e-40); huge (1e30)
beside tiny (1e-17); zero in every other step. Values are bfloat16.

msamp_gradients.safetensors   gradients [4 ranks, 20 steps, N], sizes [8] of the tensors;
                              added [20, N] U8 and added_scale [20, 8]: rank 0's gradients so far, added up;
                              for W = 1 to 4 ranks: mean.W [20, N] U8 means of each step, mean.W.scale [20, 8]
"""

import pathlib

import numpy as np

from golden_file import write_golden
from make_msamp_goldens import E4M3_MAX, e4m3_decode, e4m3_encode, f32, scale_of

OUT = pathlib.Path(__file__).resolve().parent / "goldens" / "msamp_gradients.safetensors"
RANKS, STEPS, SIZES = 4, 20, [37, 21, 16, 8, 13, 19, 18, 9]


def bf16(x):
    """The nearest bfloat16, ties to even."""
    bits = np.asarray(x, f32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(f32)


def make_gradients(rng):
    parts = [rng.standard_normal((RANKS, STEPS, size)).astype(f32) * f32(0.01) for size in SIZES]
    parts[1][..., ::7] *= f32(1e4)
    parts[2][..., ::3] = 0
    parts[3][:] = 0
    parts[4][:] = f32(0.0371)
    parts[5] *= f32(1e-38)
    parts[6][..., ::2] *= f32(1e32)
    parts[6][..., 1::2] *= f32(1e-15)
    parts[7][:, ::2] = 0
    return [bf16(part) for part in parts]


def cast(x, scale):
    return e4m3_encode(x * scale)


def added(gradients):
    """Each step's gradient joins the decoded sum; the result has its own scale."""
    rows, codes, scale = [], None, None
    for gradient in gradients:
        value = gradient if codes is None else gradient + e4m3_decode(codes) * (f32(1) / scale)
        scale = scale_of(np.abs(value).max(), f32(1), E4M3_MAX)
        codes = cast(value, scale)
        rows.append((codes, [scale]))
    return rows


def meaned(gradients, divided=False):
    """gradients [W, STEPS, n]. Returns the mean of each step with its scale. divided: gradients are divided by W."""
    ranks, rows = len(gradients), []
    for step in range(STEPS):
        scale = scale_of(np.abs(gradients[:, step]).max(), f32(1), E4M3_MAX)
        values = [e4m3_decode(cast(one[step], scale)) for one in gradients]
        total = values[0]
        for one in values[1:]:
            total = total + one
        mean = total * (f32(1) / scale / f32(1 if divided else ranks))
        scale = scale_of(np.abs(mean).max(), f32(1), E4M3_MAX)
        rows.append((cast(mean, scale), [scale]))
    return rows


def check_division(part):
    """For 2 and 4 ranks: gradients that are divided by W before the cast have the same mean."""
    for ranks in (2, 4):
        for (codes, scale), (other, same) in zip(meaned(part[:ranks]), meaned(part[:ranks] / f32(ranks), True)):
            assert np.array_equal(codes, other) and same[0] == scale[0]


def stack(runs, names):
    for k, name in enumerate(names):
        array = np.stack([np.concatenate([run[step][k] for run in runs]) for step in range(STEPS)])
        yield name, array.astype(f32) if "scale" in name else array


def main():
    parts = make_gradients(np.random.default_rng(12))
    tensors = {"sizes": np.array(SIZES, np.int32), "gradients": np.concatenate(parts, axis=2)}
    tensors.update(stack([added(part[0]) for part in parts], ("added", "added_scale")))
    for ranks in range(1, RANKS + 1):
        tensors.update(stack([meaned(part[:ranks]) for part in parts], (f"mean.{ranks}", f"mean.{ranks}.scale")))
    for k, part in enumerate(parts):
        if k != 5:  # a denormal number divided by W is rounded
            check_division(part)
    write_golden(OUT, tensors, {})
    print(f"{OUT.name}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
