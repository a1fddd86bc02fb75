"""Times of calls with few keys, beside those of other backends and of plain math: python tools/bench/pending/short_rows.py [INDEX ...]"""

from __future__ import annotations

import math
import statistics
import sys

import torch

import flashsci
from flashsci.backends.triton import tilings

# (batch, query heads, key heads, queries, keys, D, Dv, dtype, options), steps or forwards; us of tiles when they were drawn.
CALLS = [
    ((4897, 40, 40, 1, 7, 128, 128, "bfloat16", {}), False, 2181),
    ((10335, 4, 4, 3, 3, 16, 159, "float16", {"causal": True, "bias": (3, 3)}), False, 859),
    ((3938, 4, 2, 1, 1, 200, 200, "bfloat16", {}), False, 250),
    ((1805, 32, 32, 1, 1, 128, 128, "bfloat16", {"causal": True}), False, 852),
    ((91, 16, 16, 2035, 6, 48, 48, "bfloat16", {}), False, 1030),
    ((14304, 16, 2, 3, 3, 192, 192, "bfloat16", {"causal": True}), False, 3473),
    ((6570, 4, 4, 1, 1, 215, 215, "float32", {}), False, 682),
    ((5, 8, 8, 12, 12, 64, 64, "bfloat16", {}), False, 20),
    ((18605, 16, 8, 2, 2, 80, 80, "float32", {"mask": (18605, 1, 2, 2)}), True, 38561),
    ((4904, 32, 32, 4, 4, 41, 41, "float32", {"causal": True, "bias": (4904, 32, 4, 4)}), True, 13953),
    ((14760, 6, 6, 1, 1, 78, 78, "float16", {"causal": True}), True, 4140),
    ((19889, 8, 8, 2, 2, 128, 128, "bfloat16", {}), True, 6788),
    ((2536, 32, 32, 4, 1, 40, 40, "bfloat16", {"softcap": 9.0}), False, 376),
    ((8192, 8, 8, 16, 16, 64, 64, "bfloat16", {}), True, 0),
    ((8192, 8, 8, 8, 8, 32, 32, "float32", {"bias": (8192, 8, 8, 8)}), True, 0),
]  # fmt: skip


def timed(run) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(7):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first.record()
        for _ in range(4):
            run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 250)
    return statistics.median(times)


def math_of(q, k, v, bias, mask, causal):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]))
    s = s if bias is None else s + bias
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    s = s if mask is None else s.masked_fill(~mask, -math.inf)
    return s.softmax(-1).nan_to_num().to(v.dtype) @ v


def main(indices: list[int]) -> None:
    for index, ((b, h, hk, sq, sk, d, dv, name, options), step, before) in enumerate(CALLS):
        if indices and index not in indices:
            continue
        dtype = getattr(torch, name)
        torch.manual_seed(index)
        q, k, v = (
            torch.randn(b, n, s, w, device="cuda", dtype=dtype) for n, s, w in ((h, sq, d), (hk, sk, d), (hk, sk, dv))
        )
        bias = torch.randn(options["bias"], device="cuda", dtype=dtype) if "bias" in options else None
        mask = torch.rand(options["mask"], device="cuda") > 0.3 if "mask" in options else None
        rest = {key: x for key, x in options.items() if key not in ("bias", "mask")}
        leaves = [x.requires_grad_(step) for x in (q, k, v)]
        dout = torch.randn(b, h, sq, dv, device="cuda", dtype=dtype)

        def of(call, leaves=leaves, dout=dout, step=step):
            return (lambda: torch.autograd.grad(call(), leaves, dout)) if step else call

        runs = {
            backend: of(
                lambda backend=backend: flashsci.attention(q, k, v, bias=bias, mask=mask, backend=backend, **rest)
            )
            for backend in ("triton", "cuda")
        }
        if "softcap" not in rest:
            runs["math"] = of(lambda: math_of(q, k, v, bias, mask, rest.get("causal", False)))
        tensors = 4 if not step else 11
        bytes_ = b * q.element_size() * (h * sq * (d + dv) + hk * sk * (d + dv)) * tensors / 4
        found = {}
        for backend, run in runs.items():
            try:
                found[backend] = timed(run)
            except flashsci.BackendError:
                found[backend] = math.nan
        print(
            f"{index:2d} {'step' if step else 'fwd '} B {b} H {h}/{hk} {sq} x {sk} D {d}/{dv} {name}: "
            + "  ".join(f"{x} {t:.0f}" for x, t in found.items())
            + f"  tiles when drawn {before}  bytes at 4.2 TB/s {bytes_ / 4.2e6:.0f}  {tilings.short_rows((9, 0), max(d, dv), 4, 8)}",
            flush=True,
        )


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]])
