"""The cuda_forward op on a GPU: results against fp64, bad input, streams, graphs, host time, speed.

python tools/gpu_cuda_op.py [--speed]
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time

import torch

sys.path.insert(0, ".")
from flashsci.backends import cuda as backend
from flashsci.ops import empty_like_layout
from tools.gpu_cuda import verify

DEVICE = "cuda"


def op(*args):
    return torch.ops.flashsci.cuda_forward.default(*args)


def call(q, k, v, cu=(None, None), window=(-1, -1), scale=None, softcap=0.0, lower_right=False):
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    return op(q, k, v, *cu, -1, -1, scale, softcap, *window, lower_right)


def correctness() -> int:
    torch.manual_seed(1)
    failures = count = 0
    for dtype, rank in itertools.product((torch.float16, torch.bfloat16), (2, 3, 4, 5)):
        lead = (2, 3, 4)[5 - rank :]
        for d, dv in ((64, 64), (40, 72), (7, 5), (256, 32)):
            for order in range(3):

                def make(*shape):
                    t = torch.randn(*shape, device=DEVICE).to(dtype)
                    if order == 1 and rank >= 3:  # heads inside: [.., S, H, D] in memory
                        t = t.transpose(-3, -2).contiguous().transpose(-3, -2)
                    if order == 2 and rank >= 4:  # batch expanded
                        t = t[:1].expand(shape[0], *t.shape[1:])
                    return t

                kv_lead = (*lead[:-1], 2) if lead else ()
                q, k, v = make(*lead, 130, d), make(*kv_lead, 70, d), make(*kv_lead, 70, dv)
                out, lse = call(q, k, v, window=(-1, 0))
                want = empty_like_layout(q, (*q.shape[:-1], dv))
                if out.stride() != want.stride() or out.shape != want.shape or out.dtype != dtype:
                    print("LAYOUT", rank, d, dv, order, out.stride(), want.stride())
                    failures += 1
                if (
                    lse.shape != q.shape[:-1]
                    or not lse.is_contiguous()
                    or lse.dtype != torch.float32
                ):
                    print("LSE", lse.shape, lse.stride())
                    failures += 1
                a = [x[None] if rank == 2 else x for x in (out, lse, q, k, v)]
                ratio = verify(f"rank {rank} {d},{dv} order {order}", *a, window=(-1, 0))
                failures += ratio == float("inf")
                count += 1
    # sizes
    for shape_q, shape_k in (
        ((2, 4, 0, 64), (2, 2, 9, 64)),
        ((0, 4, 5, 64), (0, 2, 9, 64)),
        ((1, 4, 5, 64), (1, 2, 0, 64)),
    ):
        q, k = (
            torch.randn(shape_q, device=DEVICE).half(),
            torch.randn(shape_k, device=DEVICE).half(),
        )
        out, lse = call(q, k, k)
        if shape_k[2] == 0:
            failures += not ((out == 0).all() and (lse == -math.inf).all())
        count += 1
    # more than 2^31 elements (and a row stride that a 32-bit offset would wrap)
    big = torch.empty(2**31 // 64 + 4096, 64, device=DEVICE, dtype=torch.bfloat16)
    q = big[-256:].normal_()[None]
    rows = big.view(1, -1, 64)[:, :: (2**31 // 64) // 64].normal_()  # 65 rows spread over 4 GiB
    out, lse = call(q, rows, rows)
    failures += verify("int64", out, lse, q, rows, rows) == float("inf")
    del big, rows
    # stream and graph
    q, k, v = (torch.randn(2, 4, 333, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    want = call(q, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = call(q, k, v)
    torch.cuda.current_stream().wait_stream(side)
    failures += not (torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(q, k, v)
    q.normal_()
    graph.replay()
    want = call(q, k, v)
    failures += not (torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]))
    for _ in range(50):
        again = call(q, k, v)
        failures += not (torch.equal(again[0], want[0]) and torch.equal(again[1], want[1]))
    # bad input
    h = lambda *s, dtype=torch.half: torch.zeros(s, device=DEVICE, dtype=dtype)  # noqa: E731
    cu = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    bad = {
        "rank 1": (h(8), h(8), h(8)),
        "rank 6": (h(1, 1, 1, 1, 4, 8),) * 3,
        "rank mix": (h(1, 4, 8), h(4, 8), h(4, 8)),
        "dtype": (h(4, 8, dtype=torch.float),) * 3,
        "dtype mix": (h(4, 8), h(4, 8, dtype=torch.bfloat16), h(4, 8)),
        "device mix": (h(4, 8), torch.zeros(4, 8).half(), h(4, 8)),
        "batch": (h(2, 1, 4, 8), h(1, 1, 4, 8), h(1, 1, 4, 8)),
        "heads": (h(3, 4, 8), h(2, 4, 8), h(2, 4, 8)),
        "heads 0": (h(3, 4, 8), h(0, 4, 8), h(0, 4, 8)),
        "kv": (h(2, 4, 8), h(2, 4, 8), h(2, 5, 8)),
        "dim": (h(4, 8), h(4, 7), h(4, 8)),
        "dim 0": (h(4, 0), h(4, 0), h(4, 0)),
        "dim 257": (h(4, 257), h(4, 257), h(4, 8)),
        "stride": (h(8, 4).t(), h(4, 8), h(4, 8)),
        "cu one": (h(1, 4, 8), h(1, 4, 8), h(1, 4, 8), (cu, None)),
        "cu rank": (h(4, 8), h(4, 8), h(4, 8), (cu, cu)),
        "cu dtype": (h(1, 4, 8), h(1, 4, 8), h(1, 4, 8), (cu.long(), cu)),
        "cu cpu": (h(1, 4, 8), h(1, 4, 8), h(1, 4, 8), (cu.cpu(), cu)),
        "cu empty": (h(1, 4, 8), h(1, 4, 8), h(1, 4, 8), (cu[:0], cu[:0])),
        "cu length": (h(1, 4, 8), h(1, 4, 8), h(1, 4, 8), (cu[:1], cu)),
    }
    for name, args in bad.items():
        try:
            call(*args)
            print("NO ERROR", name)
            failures += 1
        except RuntimeError as error:
            message = str(error).split("\n")[0]
            if "flashsci::cuda_forward" not in message:
                print("MESSAGE", name, message[:160])
        count += 1
    torch.cuda.synchronize()
    print(f"op: {count} cases, {failures} failures")
    return failures


def host_time() -> None:
    q, k, v = (torch.randn(1, 8, 64, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    f = torch.ops.flashsci.cuda_forward.default
    sdpa = torch.nn.functional.scaled_dot_product_attention
    runs = {
        "op": lambda: f(q, k, v, None, None, -1, -1, 0.125, 0.0, -1, -1, False),
        "backend.forward": lambda: backend.forward(
            q, k, v, *(None,) * 6, -1, -1, 0.125, 0.0, -1, -1, False, 0.0, "default"
        ),
        "sdpa": lambda: sdpa(q, k, v),
        "empty_like x2": lambda: (torch.empty_like(q), torch.empty_like(q)),
    }
    for name, fn in runs.items():
        for _ in range(200):
            fn()
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                fn()
            times.append((time.perf_counter() - start) / 100 * 1e6)
        print(f"host {name}: {statistics.median(times):.2f} us")
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(100):
            runs["op"]()
    g.replay()
    start.record()
    g.replay()
    stop.record()
    torch.cuda.synchronize()
    print(f"device time of the small call: {start.elapsed_time(stop) * 10:.2f} us")


if __name__ == "__main__":
    print(backend.build_info(), "unavailable:", backend.unavailable(), "stale:", backend.stale())
    status = correctness()
    host_time()
    sys.exit(status != 0)
