#!/usr/bin/env python3
"""Times PyTorch's attention within documents, beside which build/bench_attention has this program's.

usage: dev/cuda/attention_masked.py [T]
Flex attention (compiled, with a block mask) and varlen_attn (flash attention over packed documents; each query head
gets keys of its own here, and that copy is timed, too), 32 query heads, 8 of keys and values, bf16, one sequence of T
tokens (8192) of documents of equal length. Prints medians of single calls in microseconds, forward and backward.
"""
import statistics
import sys

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

HEADS, KV_HEADS, CALLS = 32, 8, 30


def median_us(call):
    times = []
    for _ in range(CALLS + 5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[5:])


def both(function, inputs):
    """Medians of forward and of backward alone."""
    forward = median_us(lambda: function(*inputs))
    output = function(*inputs)
    gradient = torch.randn_like(output)
    return forward, median_us(lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True))


compiled = torch.compile(flex_attention)


def flex(T, head_dim, length):
    document = torch.arange(T, device="cuda") // length
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (document[q] == document[k]), None, None, T, T)
    inputs = [torch.randn(1, heads, T, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
              for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return both(lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True), inputs)


def varlen(T, head_dim, length):
    from torch.nn.attention.varlen import varlen_attn
    bounds = torch.tensor([*range(0, T, length), T], device="cuda", dtype=torch.int32)
    inputs = [torch.randn(T, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
              for heads in (HEADS, KV_HEADS, KV_HEADS)]
    repeat = HEADS // KV_HEADS  # without grouped heads, each query head has keys of its own

    def grouped(q, k, v):
        return varlen_attn(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), bounds, bounds, length,
                           length, window_size=(-1, 0))
    return both(grouped, inputs)


def main():
    T = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, T {T}")
    for name, function in (("flex", flex), ("varlen", varlen)):
        for head_dim in (64, 128):
            for length in (T, 2000, 500, 100):
                try:
                    forward, backward = function(T, head_dim, length)
                    print(f"{name}, head_dim {head_dim}, documents of {length}: forward {forward:.0f}, backward "
                          f"{backward:.0f} us", flush=True)
                except Exception as error:  # one that this version of PyTorch lacks does not keep the others out
                    print(f"{name}, head_dim {head_dim}, documents of {length}: {error!r}"[:300], flush=True)


if __name__ == "__main__":
    main()
