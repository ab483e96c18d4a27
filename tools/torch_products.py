#!/usr/bin/env python3
"""The matrix products of a Qwen3-8B layer by torch.matmul, beside which the "target ..." lines of `millrace-bench cuda` are read.

usage: torch_products.py        needs PyTorch and a GPU; 16384 rows, random bf16 data
Each line: median of five measurements of about 80 ms, as the bench does; then three calls after a pause, before the clocks have dropped.
"""
import statistics
import time

import torch

T, H, I, QKV = 16384, 4096, 12288, 6144


def seconds(f, n):
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(n):
        f()
    torch.cuda.synchronize()
    return (time.perf_counter() - t) / n


def main():
    torch.manual_seed(0)
    x = torch.randn(T, I, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2 * I, H, device="cuda", dtype=torch.bfloat16) * 0.015
    out = torch.empty(T * 2 * I, device="cuda", dtype=torch.bfloat16)
    total = 0.0
    calls = []
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}", flush=True)
    for name, n, k in (("qkv", QKV, H), ("o", H, H), ("gate+up", 2 * I, H), ("down", H, I)):
        a, b, y = x.view(-1)[:T * k].view(T, k), w.view(-1)[:n * k].view(n, k), out[:T * n].view(T, n)

        def call(a=a, b=b, y=y):
            torch.matmul(a, b.t(), out=y)

        calls.append(call)
        seconds(call, 3)
        n_calls = int(0.08 / seconds(call, 3)) + 1
        s = statistics.median(seconds(call, n_calls) for _ in range(5))
        time.sleep(0.5)
        short = seconds(call, 3)
        total += s
        flop = 2e-12 * T * n * k
        print(f"torch {name:26s} {s * 1e3:9.3f} {flop / s:9.1f}           three calls after a pause: {flop / short:.1f}", flush=True)
    s = statistics.median(seconds(lambda: [c() for c in calls], 10) for _ in range(5))
    print(f"torch, the four in turn          {s * 1e3:9.3f} {2e-12 * T * (QKV * H + H * H + 3 * I * H) / s:9.1f}")


main()
