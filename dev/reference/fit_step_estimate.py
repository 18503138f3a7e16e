"""Fits the five factors of llmc/config/step_estimate.h (time over the time at peak) to steps measured on one H200
(dev/results/2026-11-22.md, "One H200: speed and memory" and "How speed grows", commits 38215d3 and 85332f2). Prints
the factors, the error of each step, the worst of these, and the worst error on each model if that model is left out of
the fit. Needs numpy and scipy.
"""
import numpy as np
from scipy.optimize import nnls

BF16_PEAK, BYTES_PER_SECOND = 989.5e12, 4.8e12

# vocabulary, hidden size, intermediate size, layers, heads, key/value heads, head_dim, tied
MODELS = {
    "llama3.2-1b": (128256, 2048, 8192, 16, 32, 8, 64, True),
    "llama3.2-3b": (128256, 3072, 8192, 28, 24, 8, 128, True),
    "qwen3-4b": (151936, 2560, 9728, 36, 32, 8, 128, True),
    "llama3.1-8b": (128256, 4096, 14336, 32, 32, 8, 128, False),
    "qwen3-14b": (151936, 5120, 17408, 40, 40, 8, 128, False),
}

# model, T, batch, tok/s in BF16 and in FP8 tensorwise (None: not measured)
STEPS = [
    ("llama3.2-1b", 2048, 1, 62427, 75072), ("llama3.2-1b", 4096, 1, 64066, 80251),
    ("llama3.2-1b", 8192, 1, 59483, 73556), ("llama3.2-3b", 2048, 1, 25047, 31298),
    ("llama3.2-3b", 4096, 1, 25939, 34108), ("llama3.2-3b", 8192, 1, 24294, 31774),
    ("qwen3-4b", 2048, 1, 19214, 23631), ("qwen3-4b", 4096, 1, 19056, 25021),
    ("qwen3-4b", 8192, 1, 17427, 22195), ("llama3.1-8b", 2048, 1, 11266, 14760),
    ("llama3.1-8b", 4096, 1, 11873, 16407), ("llama3.1-8b", 8192, 1, 11313, 16012),
    ("llama3.1-8b", 2048, 4, 12655, 18932), ("llama3.1-8b", 1024, 1, None, 11465),
    ("llama3.1-8b", 16384, 1, None, 13626), ("qwen3-14b", 8192, 1, None, 9166),
]


def times_at_peak(model, length, batch, fp8):
    """Five times at the hardware's peak, in seconds: bf16 GEMMs; FP8 GEMMs; attention; elementwise kernels; AdamW with
    the casts of weights."""
    vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim, tied = MODELS[model]
    rows = length * batch
    linear = layers * (hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden +
                       3 * hidden * intermediate)
    head = vocabulary * hidden
    parameters = linear + head * (1 if tied else 2)
    row_bytes = 2 * (hidden * (18 if fp8 else 14) + intermediate * (9 if fp8 else 8))
    attention = 6 * layers * heads * head_dim * length * rows * (128 / head_dim) ** 0.5
    return [6 * rows * (head + (0 if fp8 else linear)) / BF16_PEAK,
            (6 * rows * linear if fp8 else 0) / (2 * BF16_PEAK),
            attention / BF16_PEAK,
            layers * rows * row_bytes / BYTES_PER_SECOND,
            (14 * parameters + (6 * linear if fp8 else 0)) / BYTES_PER_SECOND]


def fit(terms, seconds):
    """Factors (time over the time at peak) with the smallest relative squared error."""
    return nnls(terms / seconds[:, None], np.ones(len(seconds)))[0]


def main():
    names, terms, seconds = [], [], []
    for model, length, batch, *speeds in STEPS:
        for fp8, speed in enumerate(speeds):
            if speed:
                names.append((model, length, batch, "FP8" if fp8 else "BF16"))
                terms.append(times_at_peak(model, length, batch, bool(fp8)))
                seconds.append(length * batch / speed)
    terms, seconds = np.array(terms), np.array(seconds)
    efficiencies = fit(terms, seconds)
    print("time over the time at peak: bf16 GEMM, FP8 GEMM, attention, elementwise, optimizer:",
          " ".join(f"{e:.3f}" for e in efficiencies))
    errors = terms @ efficiencies / seconds - 1
    for name, second, error in zip(names, seconds, errors):
        print(*name, f"{second * 1e3:.1f} ms, estimated {100 * error:+.1f}%")
    print(f"worst: {100 * np.abs(errors).max():.1f}%")
    for model in MODELS:
        left_out = np.array([name[0] == model for name in names])
        others = terms @ fit(terms[~left_out], seconds[~left_out]) / seconds - 1
        worst = np.abs(others[left_out]).max()
        print(f"without {model} in the fit, the worst of its steps is off by {100 * worst:.1f}%")


if __name__ == "__main__":
    main()
