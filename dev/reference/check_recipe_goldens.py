#!/usr/bin/env python3
"""Checks the goldens of make_recipe_goldens.py in another way.

torchao's FP8 data are computed again in numpy, from the definition of scales and formats. Transformer Engine's data,
which were made in numpy, are computed again: the scales from their definition, the codes by torch's casts. The linear
layers must be GEMMs of their decoded operands. Scales of delayed scaling must follow from windows of the amaxes.
"""

import pathlib
import re
import sys

import numpy as np
import torch

from check_fp8_goldens import FORMATS, cast, decode, from_bfloat16, read_golden, same_codes, scale_of

TORCH_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
RECIPES = pathlib.Path(__file__).resolve().parents[2] / "llmc/config/recipes.h"


def exponents(scales):
    """Returns scale_inv as float64, from E8M0 exponents or from fp32 numbers."""
    if scales.dtype != np.uint8:
        return scales.astype(np.float64)
    return np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))


def spread(scales, shape, height, width):
    return np.repeat(np.repeat(scales, height, 0), width, 1)[: shape[0], : shape[1]]


def block_amaxes(x, height, width, keeps_nan):
    rows, cols = x.shape
    magnitude = np.abs(x if keeps_nan else np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf))
    return np.array(
        [
            [magnitude[i : i + height, k : k + width].max() for k in range(0, cols, width)]
            for i in range(0, rows, height)
        ],
        np.float32,
    )


def power_below(x):
    return np.where((x > 0) & np.isfinite(x), np.ldexp(1.0, np.frexp(np.where(np.isfinite(x), x, 1))[1] - 1), x)


def expected_inverse(grain, amax, name):
    """Returns scale_inv in float64, from the definitions of the recipes."""
    largest = FORMATS[name][2]
    if grain == "rows":  # scale: the largest power of two not above MAX / amax
        return 1 / power_below(scale_of(amax, name).astype(np.float64))
    if grain == "mx":  # scale_inv: the smallest power of two 2^-127 .. 2^127 that takes amax into the range
        ratio = amax.astype(np.float64) / largest
        power = power_below(np.maximum(ratio, 2.0**-127))
        return np.where(np.isinf(ratio), 2.0**127, np.where(power < ratio, 2 * power, power))
    scale = power_below(np.minimum(largest / amax.astype(np.float64), np.finfo(np.float32).max))
    return np.where((amax == 0) | ~np.isfinite(amax), 1.0, 1 / scale)


def check_copies(golden, keeps_nan):
    good = True
    for key in [key for key in golden if key.count(".") == 3 and not key.endswith("_inverse")]:
        case, grain, copy, name = key.split(".")
        x = from_bfloat16(golden[f"{case}.x"])
        x = x if copy == "row" else np.ascontiguousarray(x.T)
        height, width = {"rows": (1, x.shape[1]), "mx": (1, 32), "1x128": (1, 128), "128x128": (128, 128)}[grain]
        inverse = exponents(golden[key + "_inverse"])
        scales_ok = np.array_equal(
            inverse, expected_inverse(grain, block_amaxes(x, height, width, keeps_nan), name), equal_nan=True
        )
        scaled = (x * (1 / spread(inverse, x.shape, height, width)).astype(np.float32)).astype(np.float32)
        if keeps_nan:
            codes = cast(scaled, name)
        else:
            largest = FORMATS[name][2]
            codes = torch.from_numpy(scaled).clamp(-largest, largest).to(TORCH_FORMATS[name]).view(torch.uint8).numpy()
        ok = scales_ok and same_codes(golden[key], codes, name)
        print(
            f"  {key}: {'exact' if ok else 'DIFFERS'}, {len(np.unique(golden[key]))} different bytes, "
            f"{len(np.unique(inverse))} different scales"
        )
        good &= ok
    return good


def check_layout(golden):
    good = True
    for key in [key for key in golden if key.startswith("layout.") and not key.endswith(".tiled")]:
        scales, tiled = golden[key], golden[key + ".tiled"]
        expected = np.zeros_like(tiled)
        for (i, block), byte in np.ndenumerate(scales):  # CUDA's manual of cuBLASLt: tiles of 128 rows and 4 blocks
            tile = i // 128 * -(-scales.shape[1] // 4) + block // 4
            expected[tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + block % 4] = byte
        good &= np.array_equal(tiled, expected)
    return good


def check_torchao(golden):
    amaxes = from_bfloat16(np.arange(0x7F80, dtype=np.uint16))
    good = check_copies(golden, keeps_nan=True) and check_layout(golden)
    for name in FORMATS:
        good &= np.array_equal(exponents(golden[f"mx_bytes.{name}"]), expected_inverse("mx", amaxes, name))
    return good


def check_delayed(golden):
    good = True
    for key in [key for key in golden if key.startswith("delayed.") and key.endswith(".amaxes")]:
        length, margin, name = (part.lstrip("hm") for part in key.split(".")[1].split("_"))
        seen, scale, expected = [], np.float32(1), []
        for amax in golden[key]:
            seen += [amax] if amax > 0 else []
            window = seen[-int(length) :]
            if window and np.isfinite(max(window)):
                scale = np.float32(np.float64(FORMATS[name][2]) / 2 ** int(margin) / np.float64(max(window)))
            expected.append(scale)
        good &= np.array_equal(golden[key.replace("amaxes", "scales")], np.array(expected))
    return good


def check_te(golden):
    amax, good = golden["scales.amax"], check_copies(golden, keeps_nan=False) and check_delayed(golden)
    for name in FORMATS:
        exact = np.minimum((FORMATS[name][2] / amax.astype(np.float64)), np.finfo(np.float32).max).astype(np.float32)
        expected = np.where((amax == 0) | ~np.isfinite(amax), np.float32(1), exact)
        good &= np.array_equal(golden[f"scales.{name}"], expected) and np.array_equal(
            golden[f"scales.{name}_pow2"], power_below(expected.astype(np.float64))
        )
    return good


def check_linear(golden):
    good, formats = True, dict(re.findall(r'\{"(\w+)", \{\{.*\n *FP8_(\w+),', RECIPES.read_text()))
    for recipe in sorted({key.split(".")[0] for key in golden if "." in key}):

        def operand(tensor, copy):
            key, name = f"{recipe}.{tensor}_{copy}", formats[recipe].lower() if tensor == "dy" else "e4m3"
            x = from_bfloat16(golden[tensor]).astype(np.float64)
            if key not in golden:
                return x if copy == "row" else x.T
            codes, inverse = golden[key], exponents(golden[key + "_inverse"])
            return decode(codes, name) * spread(
                inverse, codes.shape, -(-codes.shape[0] // inverse.shape[0]), -(-codes.shape[1] // inverse.shape[1])
            )

        gemms = {
            "y": (operand("x", "row"), operand("w", "row")),
            "dx": (operand("dy", "row"), operand("w", "col")),
            "dw": (operand("dy", "col"), operand("x", "col")),
        }
        for key, (a, b) in gemms.items():
            # Rounding to bfloat16 (8 significant bits) moves a value by at most 2^-8 of it. Rounding in float32 moves a
            # sum by far less than 1e-5 of the sum of its terms' sizes.
            allowed = 2.0**-7.99 * np.abs(a @ b.T) + 1e-5 * (np.abs(a) @ np.abs(b.T))
            error = (np.abs(from_bfloat16(golden[f"{recipe}.{key}"]) - a @ b.T) / allowed).max()
            print(f"  {recipe}.{key}: largest error {error:.3f} of the allowed one")
            good &= bool(error <= 1)
    return good


if __name__ == "__main__":
    np.seterr(all="ignore")  # NaN, infinities and zero scales are among the cases
    results = []
    for name, check in (("recipe_torchao", check_torchao), ("recipe_te", check_te), ("recipe_linear", check_linear)):
        results.append(check(read_golden(name)))
        print(f"{name}: {'ok' if results[-1] else 'FAILED'}")
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(0 if all(results) else 1)
