# ruff: noqa
"""Second derivatives along many directions under vmap: python tools/bench/pending/many_second.py [seconds]

One GPU; back-to-back calls between events, the ways one after the other in each of 7 rounds, medians. A row for each number of directions:
us of Triton's kernels that share P among directions, and of the same call with the directions as one more batch dim (the way of calls that
they do not serve); then the second over the first. "vjp" is torch.vmap of the pullback of a gradient by q, k, v (reverse over reverse),
without the first order; "hvp" is torch.vmap of torch.func.jvp of torch.func.grad, with all of it; there "batch" has the tangents and
gradients that come first as one more batch dim, too. "DIFFERENT": the two ways disagree by more than the dtype explains.
"""

import statistics
import sys
import time

import torch

import flashsci
from flashsci.backends.triton.plans import many_double_backward
from flashsci.call import directions, ops

# Wherever there are kernels, so that the rule can be judged, too.
directions.share("triton", "double_backward", lambda *given: many_double_backward.has_kernels(*given[3:]))

BEGIN, BUDGET = time.time(), float(sys.argv[1]) if len(sys.argv) > 1 else 35.0
BF = torch.bfloat16
CASES = [
    # name, batch, heads, queries and keys, head dim, dtype, options
    ("bf16", 2, 8, 1024, 64, BF, {}),
    ("bf16", 2, 8, 256, 64, BF, {}),
    ("bf16", 2, 8, 1024, 32, BF, {}),
    ("bf16 causal", 2, 8, 1024, 64, BF, {"causal": True}),
    ("bf16", 2, 8, 256, 32, BF, {}),
    ("bf16 bias", 2, 8, 256, 64, BF, {"bias": True}),
    ("bf16 dropout", 2, 8, 1024, 64, BF, {"dropout_p": 0.1}),
]
COUNTS = (4, 16)
SHARING = "triton_double_backward", "triton_backward", "triton_jvp"


def as_batch(f):
    """f without the ops that share P."""

    def run():
        kept = {name: ops.MANY[name] for name in SHARING}
        ops.MANY.update(dict.fromkeys(SHARING, lambda *given: None))
        try:
            return f()
        finally:
            ops.MANY.update(kept)

    return run


def medians(ways):
    for f in ways:
        f(), f()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rounds = [[] for _ in ways]
    for _ in range(7):
        for found, f in zip(rounds, ways):
            begin.record()
            for _ in range(3):
                f()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / 3)
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
        x = tuple(torch.randn(b, h, s, d, device="cuda", dtype=dtype) for _ in range(3))
        bias = torch.randn(b, h, s, s, device="cuda", dtype=dtype) if "bias" in options else None
        dout = torch.randn(b, h, s, d, device="cuda", dtype=dtype)
        given = {n: o for n, o in options.items() if n != "bias"}
        if "dropout_p" in given:
            given["dropout_seed"] = torch.tensor([1, 2], device="cuda")

        def call(q, k, v):
            return flashsci.attention(q, k, v, bias=bias, backend="triton", **given)

        for count in COUNTS:
            try:
                ways = tuple(torch.randn(count, *y.shape, device="cuda", dtype=dtype) for y in x)
                gradient = lambda *y: torch.func.vjp(call, *y)[1](dout)
                energy = torch.func.grad(lambda *y: (call(*y) * dout).sum(), (0, 1, 2))
                pull = torch.func.vjp(gradient, *x)[1]
                for kind, f in (
                    ("vjp", lambda: torch.vmap(lambda *t: pull(t))(*ways)),
                    ("hvp", lambda: torch.vmap(lambda *t: torch.func.jvp(energy, x, t)[1])(*ways)),
                ):
                    error = error_of(f(), as_batch(f)())
                    if not error < 0.03:
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
