#!/usr/bin/env python3
"""Makes the goldens of the FP8 recipes, on the CPU. For tensorwise it makes only a linear layer;
make_fp8_goldens.py makes the rest.

torchao's goldens come from torchao's functions (MX with one correction: mx_copy), Transformer Engine's from
te_recipes.py.

FP8 data of a matrix x [R, C] are a matrix [outer, depth] of bytes (U8): `row` is the rowwise data, `col` the columnwise
data, which are transposed. A scale covers values along the depth, with 128x128 a square of values. If scale_inv is
[1, 1], it covers the whole tensor.
CASE.GRAIN.USAGE.FORMAT holds the codes, and CASE.GRAIN.USAGE.FORMAT_inverse scale_inv: [outer, blocks along depth] (for
128x128: [blocks, blocks]) in F32, or U8 for the E8M0 exponents of MX. NaN bytes are those of torch's CPU code, so
compare NaNs as NaNs.

recipe_torchao.safetensors  CASE.x BF16; CASE.rows.*: one scale a row (powers of two); CASE.mx.*: one for 32 values
                            (RCEIL); mx_bytes.FORMAT U8 [32640]: E8M0 byte for the amax with bfloat16 bits i;
                            layout.OUTERxBLOCKS and .tiled U8: E8M0 bytes, and their order for the GEMMs
recipe_te.safetensors       CASE.x BF16; CASE.1x128.*, CASE.128x128.row.*; scales.amax F32 with scales.FORMAT and
                            .FORMAT_pow2 (scales, not scale_inv); delayed.hLENGTH_mMARGIN_FORMAT.amaxes and .scales F32:
                            the scale after each update
recipe_linear.safetensors   x [M, K], w [N, K], dy [M, N] BF16. For each recipe of torchao RECIPE.TENSOR_USAGE and
                            _inverse: every operand that its emulated linear layer made (dy E5M2 for tensorwise, else
                            E4M3); and y [M, N], dx [M, K], dw [N, K] BF16
"""

import dataclasses
import pathlib

import numpy as np
import torch
import torchao.float8.float8_linear as float8_linear
import torchao.prototype.moe_training.mxfp8_linear as mxfp8_linear
from torchao.float8.config import Float8LinearConfig, ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_utils import to_fp8_saturated
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.utils import to_blocked
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

import te_recipes
from golden_file import write_golden

OUT = pathlib.Path(__file__).resolve().parent / "goldens"
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCK = 32
# The expected E4M3 data of MX blocks [v, -v / 3, 0...], by v: E8M0 byte and the first two codes. make_torchao() checks
# them, so a torchao that casts differently is noticed at once.
MX_PAIRS = {
    1.0: "77 78 EB",
    1.75: "77 7E F1",
    1.7578125: "78 76 E9",
    448.0: "7F 7E F1",
    450.0: "80 76 E9",
    2.0**127 * (2 - 2.0**-7): "F7 78 EB",
    0.0: "00 00 80",
    2.0**-127: "00 38 AA",
}
# The expected scales of delayed scaling with a history of 4 in E4M3: amaxes, and the scale after each. make_te() checks
# them.
DELAYED = [1, 2, 0.5, 0, 0.25, 0.25, 0.25, 0.25, np.inf, 0.25], [448, 224, 224, 224, 224, 224, 896, 1792, 1792, 1792]


def write(name, tensors, recipe):
    path = OUT / f"{name}.safetensors"
    write_golden(path, tensors, dict(torch=torch.__version__.split("+")[0], recipe=recipe))
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def bytes_of(fp8):
    return fp8.contiguous().view(torch.uint8)


# ---- inputs


def activations(g, R, C):
    x = torch.randn((R, C), generator=g)
    x[:, 5] *= 60.0  # an outlier channel, as in trained models
    x[7, 40] = -900.0
    x[11], x[:, 33] = 0, 0
    return x.bfloat16()


def gradient(g, R, C):
    """Rows of very different size, down to bfloat16's smallest numbers."""
    x = 1e-6 * torch.randn((R, C), generator=g) * torch.exp(2 * torch.randn((R, 1), generator=g))
    x[3] *= 1e-10
    x[4] = 2.0**-133 * torch.randint(-3, 4, (C,), generator=g)
    x[5] *= 1e-20
    x[R - 1] = 0
    return x.bfloat16()


def special(g, R, C):
    x = torch.randn((R, C), generator=g)
    x[2, 3], x[9, 70], x[9, 71], x[20, 80] = torch.inf, -torch.inf, torch.nan, torch.nan
    x[30:62, 32:64] = 0
    x[30:62, 64:96] *= 1e-39
    x[63, 95] = torch.finfo(torch.bfloat16).max
    return x.bfloat16()


def blocks(g, R=200, C=330):
    """Squares of 128: with an infinity, a NaN, zero, subnormal, with one outlier, with infinity and NaN."""
    x = torch.randn((R, C), generator=g)
    x[10, 20], x[40, 200], x[150, 300], x[151, 301] = torch.inf, torch.nan, -torch.inf, torch.nan
    x[:128, 256:] = 0
    x[128:, :128] *= 1e-39
    x[170, 140] = 3e4
    return x.bfloat16()


def mx_pairs():
    x = torch.zeros(BLOCK, BLOCK, dtype=torch.bfloat16)
    values = torch.tensor(
        list(MX_PAIRS) + [2.0**-133, 2.0**-126, 2.0**-118 * 1.75, 2.0**-117], dtype=torch.float64
    ).bfloat16()
    x[: len(values), 0], x[: len(values), 1] = values, (-values.float() / 3).bfloat16()
    return x


# ---- torchao


def rows_copies(x):
    """Yields USAGE.FORMAT, codes and scale_inv of rowwise and of columnwise data, with a scale per row of that data."""
    for name, dtype in FORMATS.items():
        for copy, axis in (("row", -1), ("col", 0)):
            fp8 = hp_tensor_to_float8_dynamic(
                x,
                dtype,
                None,
                scaling_granularity=ScalingGranularity.AXISWISE,
                axiswise_dim=axis,
                round_scales_to_power_of_2=True,
            )
            codes, inverse = fp8._data, fp8._scale.reciprocal()
            yield f"{copy}.{name}", bytes_of(codes if copy == "row" else codes.t()), inverse.reshape(-1, 1)


def mx_copy(x, dtype):
    """Returns codes and E8M0 exponents of torchao's cast, with one correction.

    torchao 0.18 multiplies blocks whose exponent byte is 0 by 1. Later versions multiply by 2^127, as the byte says,
    and so does this function.
    """
    exponent, codes = to_mx(x, dtype, BLOCK, ScaleCalculationMode.RCEIL)
    exponent = exponent.view(torch.uint8)
    zero = (exponent == 0).repeat_interleave(BLOCK, 1)
    return torch.where(zero, bytes_of(to_fp8_saturated(x.float() * 2.0**127, dtype)), bytes_of(codes)), exponent


def mx_copies(x):
    for name, dtype in FORMATS.items():
        for copy, matrix in (("row", x), ("col", x.t().contiguous())):
            yield f"{copy}.{name}", *mx_copy(matrix, dtype)


def make_torchao():
    g = torch.Generator().manual_seed(5)
    rows, mx = ("rows", rows_copies), ("mx", mx_copies)
    cases = {
        "activations": (activations(g, 96, 160), rows, mx),
        "gradient": (gradient(g, 160, 128), mx),
        "ragged": (gradient(g, 130, 200), rows),
        "special": (special(g, 64, 96), rows, mx),
        "pairs": (mx_pairs(), mx),
    }
    tensors = {}
    for case, (x, *grains) in cases.items():
        tensors[f"{case}.x"] = x
        for grain, copies in grains:
            for key, codes, inverse in copies(x):
                tensors[f"{case}.{grain}.{key}"], tensors[f"{case}.{grain}.{key}_inverse"] = codes, inverse
    for i, expected in enumerate(MX_PAIRS.values()):
        found = [tensors["pairs.mx.row.e4m3_inverse"][i, 0], *tensors["pairs.mx.row.e4m3"][i, :2]]
        assert expected == " ".join(f"{int(b):02X}" for b in found), (i, expected, found)
    amaxes = torch.zeros(0x7F80, BLOCK, dtype=torch.bfloat16)
    amaxes[:, 0] = torch.arange(0x7F80).to(torch.int16).view(torch.bfloat16)
    for name, dtype in FORMATS.items():
        tensors[f"mx_bytes.{name}"] = (
            to_mx(amaxes, dtype, BLOCK, ScaleCalculationMode.RCEIL)[0].view(torch.uint8).flatten()
        )
    for outer, count in ((128, 4), (160, 5), (96, 9), (300, 4)):
        scales = torch.randint(1, 255, (outer, count), generator=g).to(torch.uint8)
        tensors[f"layout.{outer}x{count}"], tensors[f"layout.{outer}x{count}.tiled"] = scales, to_blocked(scales)
    write("recipe_torchao", tensors, "rowwise, mxfp8")


# ---- Transformer Engine


def make_te():
    g = torch.Generator().manual_seed(6)
    tensors = {}
    for case, x, names in (
        ("activations", activations(g, 130, 200), ("e4m3", "e5m2")),
        ("blocks", blocks(g), ("e4m3",)),
    ):
        tensors[f"{case}.x"] = x
        values = x.float().numpy()
        for name in names:
            for key, matrix, height in (
                (f"1x128.row.{name}", values, 1),
                (f"1x128.col.{name}", values.T, 1),
                (f"128x128.row.{name}", values, 128),
            ):
                codes, inverse = te_recipes.blockwise(np.ascontiguousarray(matrix), height, 128, name)
                tensors[f"{case}.{key}"], tensors[f"{case}.{key}_inverse"] = torch.from_numpy(codes), torch.from_numpy(
                    inverse
                )
    amaxes = (
        np.concatenate([np.arange(0, 0x7F80, 37), np.arange(1, 128), [0x7F7F, 0x7F80, 0x7FC0]]).astype(np.uint32) << 16
    )
    tensors["scales.amax"] = torch.from_numpy(amaxes.view(np.float32))
    for name in FORMATS:
        for suffix, power_of_two in (("", False), ("_pow2", True)):
            tensors[f"scales.{name}{suffix}"] = torch.from_numpy(
                te_recipes.scale_of(amaxes.view(np.float32), name, power_of_two)
            )
    random = torch.exp(3 * torch.randn(200, generator=g)) * (torch.rand(200, generator=g) > 0.1)
    random[[60, 120, 121]] = torch.inf
    for length, margin, name, sequence in (
        (4, 0, "e4m3", DELAYED[0]),
        (1, 0, "e5m2", random[:40]),
        (16, 2, "e5m2", random),
        (1024, 0, "e4m3", random),
    ):
        key = f"delayed.h{length}_m{margin}_{name}"
        tensors[f"{key}.amaxes"] = torch.as_tensor(sequence, dtype=torch.float32)
        tensors[f"{key}.scales"] = torch.from_numpy(
            te_recipes.delayed_scales(tensors[f"{key}.amaxes"].numpy(), length, margin, name)
        )
    assert tensors["delayed.h4_m0_e4m3.scales"].tolist() == DELAYED[1]
    write("recipe_te", tensors, "blockwise, delayed")


# ---- linear layers


class Recorder:
    """Stands in for a cast function and keeps its results."""

    def __init__(self, function):
        self.function, self.results = function, []

    def __call__(self, *args, **kwargs):
        self.results.append(self.function(*args, **kwargs))
        return self.results[-1]


def float8_linear_run(recipe, x, w, dy):
    """Returns y, dx, dw and the operands, in the order in which torchao casts them."""
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(w)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    layer, x = float8_linear.Float8Linear.from_float(linear, config), x.clone().requires_grad_()
    original = float8_linear.hp_tensor_to_float8_dynamic
    recorder = float8_linear.hp_tensor_to_float8_dynamic = Recorder(original)
    y = layer(x)
    y.backward(dy)
    float8_linear.hp_tensor_to_float8_dynamic = original
    # torchao casts x and w^T for y, then dy and w^T for dx, then dy and x for dw. Where `transposed` is True, the
    # golden is the transpose of the cast matrix: the dimension that the GEMM sums over comes last.
    transposed = (False, True, False, False, True, True)
    operands = [
        (bytes_of(t._data.t() if turn else t._data), t._scale.reciprocal().reshape(-1, 1))
        for t, turn in zip(recorder.results, transposed)
    ]
    return y, x.grad, layer.weight.grad, operands


def mx_linear_run(x, w, dy):
    class Stand:
        to_mx = staticmethod(Recorder(mxfp8_linear.MXTensor.to_mx))

    original, mxfp8_linear.MXTensor = mxfp8_linear.MXTensor, Stand
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    e4m3 = FORMATS["e4m3"]
    y = mxfp8_linear.mx_mm.apply(
        x,
        w,
        e4m3,
        e4m3,
        e4m3,
        BLOCK,
        KernelPreference.EMULATED,
        MXFP8Dim0CastKernelChoice.TORCH,
        MXFP8Dim1CastKernelChoice.TORCH,
        ScaleCalculationMode.RCEIL,
        False,
    )
    y.backward(dy)
    mxfp8_linear.MXTensor = original
    return y, x.grad, w.grad, [(bytes_of(t.qdata), bytes_of(t.scale)) for t in Stand.to_mx.results]


def make_linear(M=64, K=96, N=128):
    g = torch.Generator().manual_seed(7)
    x, w = torch.randn((M, K), generator=g), 0.05 * torch.randn((N, K), generator=g)
    x[:, 7] *= 20.0
    dy = 1e-4 * torch.randn((M, N), generator=g) * torch.exp(2 * torch.randn((M, 1), generator=g))
    tensors = dict(x=x.bfloat16(), w=w.bfloat16(), dy=dy.bfloat16())
    inputs = [tensors[key] for key in ("x", "w", "dy")]
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"):
        *results, operands = mx_linear_run(*inputs) if recipe == "mxfp8" else float8_linear_run(recipe, *inputs)
        assert len(operands) == (4 if recipe == "rowwise_with_gw_hp" else 6)
        for key, (codes, inverse) in zip(("x_row", "w_row", "dy_row", "w_col", "dy_col", "x_col"), operands):
            tensors[f"{recipe}.{key}"], tensors[f"{recipe}.{key}_inverse"] = codes, inverse
        for key, result in zip(("y", "dx", "dw"), results):
            tensors[f"{recipe}.{key}"] = result.detach()
    write("recipe_linear", tensors, "tensorwise, rowwise, rowwise_with_gw_hp, mxfp8")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # sums in one order
    make_torchao()
    make_te()
    make_linear()
