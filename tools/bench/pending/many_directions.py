# ruff: noqa
"""Many directions of one call under vmap: python tools/bench/pending/many_directions.py [seconds]

One GPU; back-to-back calls between events, median of 5 rounds. A row for each number of directions: us of Triton's kernel that shares P
among directions, of the same with the directions as one more batch dim (the way of calls that it does not serve), of one call
after the other, and of plain PyTorch; then the batch's time over the sharing kernel's. "WRONG": further from fp64 than
the dtype explains.
"""

import statistics
import sys
import time

import torch

import flashsci
from flashsci.call import ops

BEGIN, BUDGET = time.time(), float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
BF, F32 = torch.bfloat16, torch.float32
CASES = [
    # name, batch, heads, queries and keys, head dim, dtype, options, moved
    ("bf16", 2, 16, 1024, 64, BF, {}, "qkv"),
    ("bf16 causal", 2, 16, 2048, 64, BF, {"causal": True}, "qkv"),
    ("bf16", 2, 16, 1024, 32, BF, {}, "qkv"),
    ("bf16 of q", 2, 16, 1024, 64, BF, {}, "q"),
    ("bf16 bias", 2, 8, 512, 32, BF, {"bias": True}, "qkvb"),
    ("bf16 bias", 2, 8, 512, 64, BF, {"bias": True}, "qkvb"),
    ("fp32", 4, 8, 512, 32, F32, {}, "qkv"),
    ("fp32 short", 64, 4, 63, 32, F32, {}, "qkv"),
    ("fp32 bias", 4, 8, 256, 32, F32, {"bias": True}, "qkvb"),
    ("fp32 dropout", 4, 8, 512, 32, F32, {"dropout_p": 0.1}, "qkv"),
]
COUNTS = (2, 4, 16)


def plain(causal=False):
    def run(q, k, v, bias=None):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if bias is not None:
            scores = scores + bias
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ v

    return run


def timed(f):
    for _ in range(2):
        f()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rounds = []
    for _ in range(5):
        begin.record()
        for _ in range(3):
            f()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) * 1e3 / 3)
    return statistics.median(rounds)


def along(call, xs):
    return lambda *ts: torch.func.jvp(call, xs, ts)[1]


def as_batch(f):
    """f without the ops that share P."""
    kept, ops.MANY["triton_jvp"] = ops.MANY["triton_jvp"], lambda *given: None
    try:
        return f()
    finally:
        ops.MANY["triton_jvp"] = kept


def main():
    print(torch.cuda.get_device_name(), torch.__version__, "us")
    torch.ones(1, device="cuda")
    flashsci.attention(*(torch.ones(1, 1, 1, 16, device="cuda") for _ in range(3)), backend="triton")
    for name, b, h, s, d, dtype, options, moved in CASES:
        title = f"{name} B{b} H{h} S{s} D{d}"
        if time.time() - BEGIN > BUDGET:
            print("out of time before", title)
            continue
        torch.manual_seed(0)
        x = {n: torch.randn(b, h, s, d, device="cuda", dtype=dtype) for n in "qkv"}
        given = {n: o for n, o in options.items() if n not in ("bias", "dropout_p")}
        if "bias" in options:
            x["b"] = torch.randn(b, h, s, s, device="cuda", dtype=dtype)
        drops = {}
        if "dropout_p" in options:
            drops = {"dropout_p": options["dropout_p"], "dropout_seed": torch.tensor([1, 2], device="cuda")}
        still = {n: t for n, t in x.items() if n not in moved}
        order = list(moved)

        def ours(*values):
            t = still | dict(zip(order, values))
            return flashsci.attention(t["q"], t["k"], t["v"], bias=t.get("b"), backend="triton", **given, **drops)

        def theirs(*values, to=lambda t: t):
            t = {n: to(y) for n, y in still.items()} | dict(zip(order, values))
            return plain(**given)(t["q"], t["k"], t["v"], t.get("b"))

        xs = tuple(x[n] for n in order)
        for count in COUNTS:
            try:
                with torch.no_grad():
                    ts = tuple(torch.randn(count, *t.shape, device="cuda", dtype=dtype) for t in xs)
                    ours_along = along(ours, xs)
                    many = lambda: torch.vmap(ours_along)(*ts)
                    if not drops:
                        part = lambda t: t[:1, :1].double()
                        exact = along(lambda *v: theirs(*v, to=part), tuple(map(part, xs)))(*(part(t[-1]) for t in ts))
                        error = (many()[-1][:1, :1] - exact).abs().max().item() / exact.abs().max().item()
                        if not error < (0.03 if dtype is BF else 1e-4):
                            print("WRONG", title, count, error)
                    shared = timed(many)
                    batch = as_batch(lambda: timed(many))
                    each = timed(lambda: [ours_along(*(t[n] for t in ts)) for n in range(count)])
                    other = float("nan")
                    if not drops and count * b * h * s * s < 2**31:
                        other = timed(lambda: torch.vmap(along(theirs, xs))(*ts))
                    print(
                        f"{title:32s} n {count:3d}  shared {shared:9.1f}  batch {batch:9.1f}  each {each:9.1f}  plain {other:9.1f}"
                        f"  {batch / shared:6.2f}",
                        flush=True,
                    )
            except Exception as error:  # a table with a hole is better than none
                print(f"{title:32s} n {count} {type(error).__name__}: {str(error)[:90]}")
            torch.cuda.empty_cache()
    print(f"{time.time() - BEGIN:.0f} s")


main()
