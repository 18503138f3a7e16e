#!/usr/bin/env python3
"""Makes the goldens of the tensorwise FP8 recipe with torchao, on the CPU.

FP8 values are stored as bytes (U8). A tensor's scale s is F32 [1]; values are multiplied by it before the cast.

fp8_casts.safetensors    e4m3, e5m2 U8 [65536]: byte i is the saturating cast of the bfloat16 with bits i. NaN bytes are
                         those of torch's CPU code (7F, FF), so compare NaNs as NaNs
fp8_scales.safetensors   e4m3, e5m2, e4m3_pow2, e5m2_pow2 F32 [32640]: s for the amax with bfloat16 bits i (all finite
                         ones >= 0); pow2: rounded down to a power of two. NAME_special F32 [2]: s for infinity and NaN
fp8_tensors.safetensors  CASE.x BF16 [M, N], quantized with one scale for the whole tensor: CASE.e4m3, CASE.e5m2 U8
                         [M, N], CASE.e4m3_scale, CASE.e5m2_scale
fp8_linear.safetensors   Float8Linear (emulate=True) on a fused gate and up layer with M rows, C inputs, 2F outputs:
                         x [M, C], w [2F, C], dy [M, 2F], results y [M, 2F], dx [M, C], dw [2F, C] BF16; GEMM operands
                         x_fp8, w_fp8 (E4M3), dy_fp8 (E5M2) U8 with x_scale, w_scale, dy_scale
"""

import hashlib
import pathlib

import torch
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from golden_file import write_golden

OUT = pathlib.Path(__file__).resolve().parent / "goldens"
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# The expected first 16 hex digits of the SHA-256 of each cast table. make_casts() checks them, so a torch that casts
# differently is noticed at once.
CAST_SHA256 = {"e4m3": "556222ae80c3498b", "e5m2": "bd44828554535a84"}


def bfloat16_of_bits(bits):
    return bits.to(torch.int16).view(torch.bfloat16)


def write(name, tensors):
    path = OUT / f"{name}.safetensors"
    write_golden(path, tensors, dict(torch=torch.__version__.split("+")[0], recipe="tensorwise"))
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def make_casts():
    # torchao casts float32 values (x times its scale). Clamping bfloat16 would lose the sign of a NaN.
    values = bfloat16_of_bits(torch.arange(65536)).float()
    tensors = {name: to_fp8_saturated(values, dtype).view(torch.uint8) for name, dtype in FORMATS.items()}
    for name, codes in tensors.items():
        digest = hashlib.sha256(codes.numpy().tobytes()).hexdigest()
        assert digest.startswith(CAST_SHA256[name]), f"{name}: {digest}"
    write("fp8_casts", tensors)


def make_scales():
    amaxes, special = bfloat16_of_bits(torch.arange(0x7F80)), torch.tensor([torch.inf, torch.nan], dtype=torch.bfloat16)
    tensors = {}
    for name, dtype in FORMATS.items():
        for suffix, power_of_two in (("", False), ("_pow2", True)):
            tensors[name + suffix] = amax_to_scale(amaxes, dtype, power_of_two)
            tensors[name + suffix + "_special"] = amax_to_scale(special, dtype, power_of_two)
    write("fp8_scales", tensors)


def quantize(x, dtype):
    fp8 = hp_tensor_to_float8_dynamic(x, dtype, None)
    return fp8._data.contiguous().view(torch.uint8), fp8._scale.reshape(1)


def random_cases():
    g = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    activations = normal(48, 64)
    activations[:, 5] *= 60.0  # an outlier channel, as in trained models
    activations[17, 40] = -900.0
    wide = torch.sign(normal(33, 77)) * torch.exp2(torch.rand((33, 77), generator=g) * 50 - 40)
    with_nan, with_infinity = normal(16, 16), normal(16, 16)
    with_nan[3, 4], with_infinity[9, 2] = torch.nan, -torch.inf
    cases = {
        "weight": 0.02 * normal(96, 64),
        "activation_outliers": activations,
        "gradient": 1e-6 * normal(48, 96),
        "wide_range": wide,
        "one_value": torch.full((1, 1), -3.0),
        "zero": torch.zeros(4, 8),
        "subnormal": torch.full((4, 8), 1e-39) * normal(4, 8).sign(),
        "below_epsilon": 1e-13 * normal(8, 16),  # amax < 1e-12: the scale is that of 1e-12
        "nan": with_nan,
        "infinity": with_infinity,
    }
    return {name: x.bfloat16() for name, x in cases.items()}


def make_tensors():
    tensors = {}
    for case, x in random_cases().items():
        tensors[f"{case}.x"] = x
        for name, dtype in FORMATS.items():
            tensors[f"{case}.{name}"], tensors[f"{case}.{name}_scale"] = quantize(x, dtype)
    write("fp8_tensors", tensors)


def make_linear(M=80, C=64, F=96):
    g = torch.Generator().manual_seed(4)
    x = torch.randn((M, C), generator=g)
    x[:, 7] *= 20.0
    x = x.bfloat16().requires_grad_()
    dy = (1e-4 * torch.randn((M, 2 * F), generator=g) * torch.exp(2 * torch.randn((M, 1), generator=g))).bfloat16()
    linear = torch.nn.Linear(C, 2 * F, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(0.05 * torch.randn((2 * F, C), generator=g))
    layer = Float8Linear.from_float(linear, Float8LinearConfig(emulate=True))
    y = layer(x)
    y.backward(dy)
    tensors = dict(x=x, w=layer.weight, dy=dy, y=y, dx=x.grad, dw=layer.weight.grad)
    for name, operand, dtype in (
        ("x", x, FORMATS["e4m3"]),
        ("w", layer.weight, FORMATS["e4m3"]),
        ("dy", dy, FORMATS["e5m2"]),
    ):
        tensors[f"{name}_fp8"], tensors[f"{name}_scale"] = quantize(operand.detach(), dtype)
    write("fp8_linear", {name: t.detach() for name, t in tensors.items()})


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # sums in one order
    make_casts()
    make_scales()
    make_tensors()
    make_linear()
