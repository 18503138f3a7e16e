"""cuDNN's attention through torch, on the shapes of dev/cuda/attention.cu's bench, for comparison.

Run: python3 dev/cuda/attention_cudnn.py
"""
import statistics
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PEAK_TFLOPS = 989.5  # H100 and H200 SXM, dense bf16
CALLS = 11


def median_ms(call):
    """Returns the median time of single calls, queued back to back as in the bench of attention.cu."""
    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    for i in range(CALLS):
        events[i].record()
        call()
    events[CALLS].record()
    torch.cuda.synchronize()
    return statistics.median(events[i].elapsed_time(events[i + 1]) for i in range(CALLS))


def bench(T, HD, NH=32, NKV=8):
    qkv = torch.randn(1, T, NH + 2 * NKV, HD, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in qkv.split([NH, NKV, NKV], dim=2))
    dout = torch.randn(1, T, NH, HD, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    def forward():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        with torch.no_grad():
            times = [("forward", 1.0, median_ms(forward))]
        out = forward()
        times.append(("backward", 2.5, median_ms(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))))
    for name, factor, ms in times:
        tflops = factor * 4 * NH * HD * T * T / 2 / (1e9 * ms)
        percent = 100 * tflops / PEAK_TFLOPS
        print(f"cudnn {name:8} B 1 T {T:5} NH {NH} NKV {NKV} HD {HD:3} "
              f"{ms:8.3f} ms {tflops:7.1f} TFLOP/s {percent:5.1f}% of peak")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}")
    for HD in (64, 128):
        for T in (2048, 4096, 8192):
            bench(T, HD)
