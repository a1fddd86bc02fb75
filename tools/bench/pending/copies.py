# ruff: noqa
"""Times of copy_rows by tile: PYTHONPATH=$PWD python tools/bench/pending/copies.py"""
import itertools, statistics, sys, time, math
import torch
from flashsci.backends.triton.plans import copy
from flashsci.call.ops import empty_with_inner_keys
from flashsci.choice import backends
backends.load("triton")
def gpu(f, n=12):
    f(); f(); torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    marks[0].record()
    for m in marks[1:]:
        f(); m.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
for shape, dt in (((1, 8, 1023, 1023), torch.bfloat16), ((1, 8, 383, 383), torch.bfloat16), ((16, 8, 1025, 1025), torch.bfloat16), ((16, 8, 2047, 2047), torch.bfloat16), ((1, 8, 1025, 1025), torch.float32), ((1, 1, 8191, 8191), torch.bfloat16)):
    x = torch.randn(shape, device="cuda").to(dt); y = empty_with_inner_keys(x)
    row = []
    for rows, words, warps in ((16, 32, 4), (32, 32, 4), (16, 64, 4), (8, 64, 4), (8, 128, 4), (4, 128, 4), (4, 256, 4), (32, 64, 4), (16, 128, 4), (16, 64, 8), (32, 64, 8), (8, 64, 2)):
        copy.ROWS, copy.WORDS = rows, words
        made = {}
        real = copy.Launch
        def launch(k, p, a): return real(k, p, a | {"num_warps": warps})
        copy.Launch = launch
        copy._copy.cache_clear()
        y.fill_(7)
        copy.copied(x, y, True)
        assert torch.equal(x, y)
        row.append(f"{rows}x{words}/{warps} {gpu(lambda: copy.copied(x, y, True)):.1f}")
        copy.Launch = real
    z = torch.empty_like(x)
    n = 2 * x.numel() * x.element_size()
    print(shape, dt, f"{n / 4.3e6:.1f} at 4.3 TB/s; clone {gpu(lambda: z.copy_(x)):.1f}; torch {gpu(lambda: y.copy_(x)):.1f};", ", ".join(row), flush=True)
    back = torch.empty_like(x)
    copy._copy.cache_clear(); copy.ROWS, copy.WORDS = 16, 32
    copy.copied(y, back); assert torch.equal(x, back)
    print("   back", f"{gpu(lambda: copy.copied(y, back)):.1f}")
