#!/usr/bin/env python3
"""Checks the goldens of make_fp8_goldens.py in numpy, from the definition of the formats.

Every cast must be the nearest representable value, ties to the even code, saturated. Every scale must be
MAX / max(amax, 1e-12), or that rounded down to a power of two. Each result of the linear layer must be the GEMM of its
decoded operands, up to rounding.
"""

import json
import math
import pathlib
import sys

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent / "goldens"
FORMATS = {"e4m3": (3, 7, 448.0), "e5m2": (2, 15, 57344.0)}  # mantissa bits, exponent bias, largest value


def read_golden(name):
    raw = (FOLDER / f"{name}.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    types = {"U8": np.uint8, "F32": np.float32, "BF16": np.uint16}
    return {
        key: np.frombuffer(data[slice(*t["data_offsets"])], types[t["dtype"]]).reshape(t["shape"])
        for key, t in header.items()
        if key != "__metadata__"
    }


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def positive_values(name):
    """Returns the finite values >= 0 of a format; the index is the code."""
    mantissa, bias, largest = FORMATS[name]
    values = []
    for code in range(128):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        values.append(
            math.ldexp(fraction, 1 - bias - mantissa)
            if exponent == 0
            else math.ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)
        )
    return np.array([v for v in values if v <= largest])


def cast(x, name):
    """Returns the codes nearest to float32 x, found in float64, which holds every midpoint; NaN as 7F with its sign."""
    values = positive_values(name)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    above = np.searchsorted(values, magnitude).clip(1, len(values) - 1)
    middle = (values[above - 1] + values[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    codes = np.where(np.isnan(x), 0x7F, above - 1 + up).astype(np.uint8)
    return codes | (np.signbit(x) * 0x80).astype(np.uint8)


def decode(codes, name):
    values = positive_values(name)
    magnitude = np.append(values, np.full(128 - len(values), np.nan))[codes & 0x7F]
    return np.where(codes & 0x80, -magnitude, magnitude)


def scale_of(amax, name):
    return (FORMATS[name][2] / np.maximum(amax.astype(np.float64), 1e-12)).astype(np.float32)


def same_codes(a, b, name):
    nan = np.isnan(decode(a, name))
    return np.array_equal(nan, np.isnan(decode(b, name))) and np.array_equal(a[~nan], b[~nan])


def check_casts(golden):
    values = from_bfloat16(np.arange(65536, dtype=np.uint16))
    return all(same_codes(golden[name], cast(values, name), name) for name in FORMATS)


def check_scales(golden):
    amaxes = from_bfloat16(np.arange(0x7F80, dtype=np.uint16))
    good = True
    for name in FORMATS:
        scale = scale_of(amaxes, name)
        pow2 = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1)
        good &= np.array_equal(golden[name], scale) and np.array_equal(golden[name + "_pow2"], pow2)
        for suffix in ("", "_pow2"):
            infinity, nan = golden[f"{name}{suffix}_special"]
            good &= bool(infinity == 0 and np.isnan(nan))
    return good


def check_tensors(golden):
    good = True
    for case in sorted({key.split(".")[0] for key in golden}):
        x = from_bfloat16(golden[f"{case}.x"])
        for name in FORMATS:
            scale = scale_of(np.abs(x).max(), name)
            codes = cast(x * scale, name)
            found = golden[f"{case}.{name}_scale"][0]
            ok = (found == scale or np.isnan(found) and np.isnan(scale)) and same_codes(
                golden[f"{case}.{name}"], codes, name
            )
            used = len(np.unique(golden[f"{case}.{name}"]))
            print(f"  {case} {name}: {'exact' if ok else 'DIFFERS'}, scale {found:.9g}, {used} different bytes")
            good &= bool(ok)
    return good


def check_linear(golden):
    x, w, dy = (
        decode(golden[f"{key}_fp8"], name) / golden[f"{key}_scale"].astype(np.float64)
        for key, name in (("x", "e4m3"), ("w", "e4m3"), ("dy", "e5m2"))
    )
    good = True
    for key, name in (("x", "e4m3"), ("w", "e4m3"), ("dy", "e5m2")):
        value = from_bfloat16(golden[key])
        good &= same_codes(golden[f"{key}_fp8"], cast(value * scale_of(np.abs(value).max(), name), name), name)
    for key, a, b in (("y", x, w.T), ("dx", dy, w), ("dw", dy.T, x)):
        # Rounding to bfloat16 (8 significant bits) moves a value by at most 2^-8 of it. Rounding in float32 moves a sum
        # by far less than 1e-5 of the sum of its terms' sizes.
        allowed = 2.0**-7.99 * np.abs(a @ b) + 1e-5 * (np.abs(a) @ np.abs(b))
        error = np.abs(from_bfloat16(golden[key]) - a @ b) / allowed
        print(f"  {key}: largest error {error.max():.3f} of the allowed one")
        good &= bool(error.max() <= 1)
    return good


if __name__ == "__main__":
    np.seterr(invalid="ignore")  # NaN and infinity times zero are among the cases
    results = []
    for name, check in (
        ("fp8_casts", check_casts),
        ("fp8_scales", check_scales),
        ("fp8_tensors", check_tensors),
        ("fp8_linear", check_linear),
    ):
        results.append(check(read_golden(name)))
        print(f"{name}: {'ok' if results[-1] else 'FAILED'}")
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(0 if all(results) else 1)
