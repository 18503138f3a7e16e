#!/usr/bin/env python3
"""Makes coat.safetensors: 20 AdamW steps whose moments are FP8 codes in groups of 128 (llmc/base/coat.h), in numpy.

The rules are written here again, from the description of COAT (Xi and others 2024, arXiv 2410.19313) and of what
differs (the head of coat.h). Quotients and products are fp32, as in coat.h; powers are float64, rounded to fp32. In
mode nearest the script also compares with COAT's own formula, with zeros left out of the min: values must decode as by
COAT's three numbers (scale, k, sqrt(max * min)), and less than 1% of the codes may be the next code. Groups whose k is
not COAT's (clamped, or from the rounded max) are left out.

Groups of 128 gradients, one kind each: normal; with outliers (x 1e4); with zeros; all zero; all equal; denormal
(1e-42); huge (1e13) beside tiny (1e-17); half of them zero in every other step.

coat.safetensors   gradients [20, 1024], weights [1024] before the first step, both F32;
                   after each step, for MODE nearest and stochastic: MODE.weights [20, 1024] F32; MODE.exp_avg,
                   MODE.exp_avg_sq [20, 1024] U8; MODE.exp_avg_groups, MODE.exp_avg_sq_groups [20, 8] U32
"""

import pathlib

import numpy as np

from golden_file import write_golden

OUT = pathlib.Path(__file__).resolve().parent / "goldens" / "coat.safetensors"
STEPS, GROUPS, SIZE = 20, 8, 128
LR, BETA1, BETA2, EPS, DECAY, SEED = 1e-3, 0.9, 0.95, 1e-8, 0.1, 42
f32 = np.float32


def e4m3_values():
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    return np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))


E4M3 = e4m3_values()
MIDDLES = np.concatenate([[0.0], (E4M3[1:] + E4M3[:-1]) / 2])
SPAN = np.log2(448.0 * 448.0 / 2)


def to_f32(x):
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(x, dtype=np.float64).astype(f32)


def values_of(power):
    """|x| / max of each code with k = power / 16."""
    return to_f32((E4M3 / 448) ** (16 / power))


def thresholds_of(power):
    return to_f32((MIDDLES / 448) ** (16 / power))


def word_of(x):
    magnitudes = np.abs(x)
    largest = magnitudes.max()
    if largest < f32(2.0**-100):
        return np.uint32(0)
    bits = (int(largest.view(np.uint32)) + 255) & ~255
    top = np.uint32(bits).view(f32)
    smallest = magnitudes[magnitudes > 0].min()
    with np.errstate(over="ignore"):
        power = max(p for p in range(1, 257) if top <= to_f32(np.exp2(SPAN * 16 / p)) * smallest)
    return np.uint32(bits | (power - 1))


def split(word):
    return np.uint32(int(word) & ~255).view(f32), (int(word) & 255) + 1


def encode(x, word, random):
    """Codes of a group. random: 32 random bits of each value, or None to round to nearest."""
    if word == 0:
        return np.zeros(SIZE, np.uint8)
    top, power = split(word)
    part = np.abs(x) * (f32(1) / top)
    if random is None:
        codes = np.searchsorted(thresholds_of(power), part, side="right") - 1
    else:
        values = values_of(power)
        codes = np.searchsorted(values, part, side="right") - 1
        gap = np.append(np.diff(values), f32(1))[codes]
        codes += part - values[codes] > gap * ((random >> 9).astype(f32) * f32(2.0**-23))
    codes = np.where(x == 0, 0, codes)
    return (codes | np.where(np.signbit(x) & (x != 0), 0x80, 0)).astype(np.uint8)


def decode(codes, word):
    top, power = split(word)
    magnitudes = values_of(power)[codes & 0x7F] * top
    return np.where(codes & 0x80, -magnitudes, magnitudes).astype(f32)


def fma(a, b, c):
    """fp32 a * b + c: the float64 product is exact, and the sum is rounded to float64, then to fp32."""
    return to_f32(np.float64(a) * np.float64(b) + np.float64(c))


def random_words(step, elements):
    """Random bits of each element's weight and moments in an optimizer step, counted from 1 (adamw_math.h)."""
    mask = (1 << 64) - 1

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    stream = 0x5352000000000000 + step
    key = mix(mix((SEED + 0x9E3779B97F4A7C15) & mask) ^ ((stream * 0xD1342543DE82EF95 + 1) & mask))
    out = np.zeros((3, elements), np.uint32)
    for i in range(elements):
        x = (i >> 3) ^ (key & 0xFFFFFFFF)
        x = ((x ^ x >> 16) * 0x7FEB352D + (key >> 32)) & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        x = (x + (i & 7) * 0x21F0AAAD) & 0xFFFFFFFF
        x ^= x >> 16
        out[:, i] = [x * factor & 0xFFFFFFFF for factor in (0xD35A2D97, 0x846CA68B, 0xEF1D6B47)]
    return out


def update(step, w, m, v, g):
    """AdamW's new weight and moments, in fp32 (adamw_math.h)."""
    step_size = f32(LR / (1 - BETA1**step))
    inverse_sqrt_bias2 = f32(1 / np.sqrt(1 - BETA2**step))
    m = fma(f32(1 - BETA1), g - m, m)
    v = fma(f32(BETA2), v, (f32(1 - BETA2) * g) * g)
    denominator = fma(np.sqrt(v), inverse_sqrt_bias2, f32(EPS))
    w = fma(-step_size, m / denominator, w * f32(1 - LR * DECAY))
    return w, m, v


def make_gradients(rng):
    g = rng.standard_normal((STEPS, GROUPS, SIZE)).astype(f32) * f32(0.01)
    g[:, 1, ::37] *= f32(1e4)
    g[:, 2, ::3] = 0
    g[:, 3] = 0
    g[:, 4] = f32(0.0371)
    g[:, 5] *= f32(1e-40)
    g[:, 6, ::2] *= f32(1e15)
    g[:, 6, 1::2] *= f32(1e-15)
    g[::2, 7, : SIZE // 2] = 0
    return g.reshape(STEPS, -1)


def check_against_coat(x, word, codes):
    """Compares a group with COAT's formula in float64. Returns how many codes it compared, and how many differ.

    Fails if a code differs by more than one step. Compares nothing if the group's k is not COAT's.
    """
    magnitudes = np.abs(x.astype(np.float64))
    magnitudes = magnitudes[magnitudes > 0]
    top, power = magnitudes.max(), split(word)[1]
    if power in (1, 256):
        return 0, 0  # clamped: COAT has no finite k here, or one beyond the table
    k = np.floor(SPAN / np.log2(top / magnitudes.min()) * 16) / 16
    center = np.sqrt(top) * np.sqrt(magnitudes.min())
    scale = (top / center) ** k / 448
    scaled = (magnitudes / center) ** k / scale
    own = codes[x != 0] & 0x7F
    decoded = (E4M3[own] * scale) ** (1 / k) * center
    same_power = int(round(k * 16)) == power
    assert same_power or abs(k * 16 - power) <= 1, (k, power)
    if not same_power:
        return 0, 0  # the max is rounded up, so a ratio just below a bound may take the next k
    np.testing.assert_allclose(decoded, decode(codes, word)[x != 0].astype(np.float64).__abs__(), rtol=1e-4, atol=1e-44)
    nearest = np.abs(scaled[:, None] - E4M3).argmin(axis=1)
    assert np.abs(nearest - own).max() <= 1
    return len(own), int((nearest != own).sum())


def train(gradients, weights, stochastic):
    w, out = weights.copy(), {}
    m_codes, v_codes = (np.zeros((GROUPS, SIZE), np.uint8) for _ in "mv")
    m_words, v_words = (np.zeros(GROUPS, np.uint32) for _ in "mv")
    compared = np.zeros(2, np.int64)
    for step in range(STEPS):
        m, v = (
            np.concatenate([decode(codes[i], words[i]) for i in range(GROUPS)])
            for codes, words in ((m_codes, m_words), (v_codes, v_words))
        )
        w, m, v = update(step + 1, w, m, v, gradients[step])
        random = random_words(step + 1, len(w))
        for codes, words, x, bits in ((m_codes, m_words, m, random[1]), (v_codes, v_words, v, random[2])):
            for i in range(GROUPS):
                part = slice(i * SIZE, (i + 1) * SIZE)
                words[i] = word_of(x[part])
                codes[i] = encode(x[part], words[i], bits[part] if stochastic else None)
                if not stochastic and words[i]:
                    compared += check_against_coat(x[part], words[i], codes[i])
        for name, array in (
            ("weights", w),
            ("exp_avg", m_codes.ravel()),
            ("exp_avg_sq", v_codes.ravel()),
            ("exp_avg_groups", m_words),
            ("exp_avg_sq_groups", v_words),
        ):
            out.setdefault(name, []).append(array.copy())
    if not stochastic:
        print(f"COAT's formula: {compared[0]} codes compared, {compared[1]} differ, each by one step")
        assert compared[0] > 10000 and compared[1] < compared[0] / 100
    return {name: np.stack(arrays) for name, arrays in out.items()}


def main():
    rng = np.random.default_rng(7)
    tensors = {"gradients": make_gradients(rng)}
    tensors["weights"] = rng.standard_normal(GROUPS * SIZE).astype(f32)
    for mode in ("nearest", "stochastic"):
        for name, array in train(tensors["gradients"], tensors["weights"], mode == "stochastic").items():
            tensors[f"{mode}.{name}"] = array
    write_golden(OUT, tensors, dict(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY, seed=SEED))
    print(f"{OUT.name}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
