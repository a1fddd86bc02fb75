# ruff: noqa
"""Many cotangents of one call under vmap: python tools/bench/pending/many_cotangents.py [seconds]

One GPU; back-to-back calls between events, the ways one after the other in each of 7 rounds, medians. A row for each number of cotangents:
us of Triton's kernels that share P among cotangents, and of the same call with the cotangents as one more batch dim (the way of calls
that they do not serve); then the second over the first. "jacrev" is torch.func.jacrev of n sums of out, with the forward;
"vjp" is torch.vmap of a pullback, without. "DIFFERENT": the two ways disagree by more than the dtype explains.
"""

import statistics
import sys
import time

import torch

import flashsci
from flashsci.call import ops

BEGIN, BUDGET = time.time(), float(sys.argv[1]) if len(sys.argv) > 1 else 55.0
BF, F32 = torch.bfloat16, torch.float32
CASES = [
    # name, batch, heads, queries and keys, head dim, dtype, options
    ("bf16", 2, 8, 1024, 64, BF, {}),
    ("bf16", 2, 8, 256, 64, BF, {}),
    ("fp32", 2, 8, 1024, 32, F32, {}),
    ("fp32", 2, 8, 256, 32, F32, {}),
    ("bf16 causal", 2, 8, 1024, 64, BF, {"causal": True}),
    ("bf16", 2, 8, 1024, 32, BF, {}),
    ("bf16 bias", 2, 8, 256, 64, BF, {"bias": True}),
    ("fp32 bias", 2, 8, 256, 32, F32, {"bias": True}),
    ("bf16 dropout", 2, 8, 1024, 64, BF, {"dropout_p": 0.1}),
]
COUNTS = (8, 32)


def as_batch(f):
    """f without the ops that share P."""

    def run():
        kept, ops.MANY["triton_backward"] = ops.MANY["triton_backward"], lambda *given: None
        try:
            return f()
        finally:
            ops.MANY["triton_backward"] = kept

    return run


def medians(ways):
    """GPU us: the host queues a call while the GPU waits."""
    for f in ways:
        f(), f()
    rounds = [[] for _ in ways]
    for _ in range(7):
        for found, f in zip(rounds, ways):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)
            begin.record()
            f()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3)
    return [statistics.median(found) for found in rounds]


def error_of(found, due):
    leaves = torch.utils._pytree.tree_leaves
    return max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in zip(leaves(found), leaves(due))
    )


def main():
    print(torch.cuda.get_device_name(), torch.__version__, "us")
    for name, b, h, s, d, dtype, options in CASES:
        title = f"{name} B{b} H{h} S{s} D{d}"
        if time.time() - BEGIN > BUDGET:
            print("out of time before", title)
            continue
        torch.manual_seed(0)
        q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=dtype) for _ in range(3))
        bias = [torch.randn(b, h, s, s, device="cuda", dtype=dtype)] if "bias" in options else []
        given = {n: o for n, o in options.items() if n != "bias"}
        if "dropout_p" in given:
            given["dropout_seed"] = torch.tensor([1, 2], device="cuda")

        def call(q, k, v, *bias):
            return flashsci.attention(q, k, v, bias=bias[0] if bias else None, backend="triton", **given)

        for count in COUNTS:
            try:
                ways = torch.randn(count, b, h, s, d, device="cuda", dtype=dtype)
                pull = torch.func.vjp(call, q, k, v, *bias)[1]
                sums = lambda q, k, v: (call(q, k, v, *bias)[None] * ways).flatten(1).sum(1)
                for kind, f in (
                    ("vjp", lambda: torch.vmap(pull)(ways)),
                    ("jacrev", lambda: torch.func.jacrev(sums, (0, 1, 2))(q, k, v)),
                ):
                    if kind == "jacrev" and (bias or count * ways.numel() > 1 << 31):
                        continue
                    error = error_of(f(), as_batch(f)())
                    if not error < (0.03 if dtype is BF else 1e-3):
                        print("DIFFERENT", title, kind, count, error)
                    shared, batch = medians((f, as_batch(f)))
                    print(
                        f"{title:32s} {kind:6s} n {count:3d}  shared {shared:9.1f}  batch {batch:9.1f}  {batch / shared:6.2f}",
                        flush=True,
                    )
            except Exception as error:  # a table with a hole is better than none
                print(f"{title:32s} n {count} {type(error).__name__}: {str(error)[:90]}")
            torch.cuda.empty_cache()
    print(f"{time.time() - BEGIN:.0f} s")


main()
