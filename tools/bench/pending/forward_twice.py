# ruff: noqa
"""Forward mode over forward mode: PYTHONPATH=$PWD python tools/bench/pending/forward_twice.py [seconds]

One GPU; back-to-back calls between events, median of 5 rounds. A row: us of the first JVP, of jvp of jvp through Triton's
kernels, of the same through plain PyTorch, and their ratio; then us of 16 JVPs under vmap, and one after the other.
"""

import statistics
import sys
import time

import torch

import flashsci

BEGIN, BUDGET = time.time(), float(sys.argv[1]) if len(sys.argv) > 1 else 28.0
BF, F32 = torch.bfloat16, torch.float32
CASES = [
    ("bf16 causal", 4, 16, 64, 2048, BF, True),
    ("bf16", 4, 16, 128, 2048, BF, False),
    ("fp32", 4, 8, 32, 512, F32, False),
    ("fp32", 4, 8, 64, 1024, F32, False),
    ("fp32 short", 256, 4, 32, 32, F32, False),
]


def plain(causal):
    def run(q, k, v):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ v

    return run


def timed(f):
    for _ in range(3):
        f()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rounds = []
    for _ in range(5):
        begin.record()
        for _ in range(5):
            f()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) * 1e3 / 5)
    return statistics.median(rounds)


def twice(call, xs, a, b):
    along = lambda *x: torch.func.jvp(call, x, a)[1]
    return torch.func.jvp(along, xs, b)[1]


print(torch.cuda.get_device_name(), torch.__version__, "us")
for name, b, h, d, s, dtype, causal in CASES:
    if time.time() - BEGIN > BUDGET:
        print("out of time before", name, d)
        continue
    title = f"{name} B{b} H{h} D{d} S{s}"
    torch.manual_seed(0)
    given = [tuple(torch.randn(b, h, s, d, device="cuda", dtype=dtype) for _ in range(3)) for _ in range(3)]
    ours = lambda *x: flashsci.attention(*x, causal=causal, backend="triton")
    try:
        with torch.no_grad():
            exact = twice(plain(causal), *(tuple(x[:1, :1].double() for x in xs) for xs in given))
            found = twice(ours, *given)[:1, :1]
            error = (found - exact).abs().max().item() / exact.abs().max().item()
            if not error < (0.03 if dtype is BF else 1e-4):
                print("WRONG", title, error)
            first = timed(lambda: torch.func.jvp(ours, *given[:2]))
            mine, theirs = (timed(lambda f=f: twice(f, *given)) for f in (ours, plain(causal)))
            print(
                f"{title:32s} jvp {first:9.1f}  twice {mine:9.1f}  plain {theirs:9.1f}  {theirs / mine:6.2f}",
                flush=True,
            )
            q, k, v = (x[:1] for x in given[0])
            many = torch.randn(16, *q.shape, device="cuda", dtype=dtype)
            one = lambda t: torch.func.jvp(lambda q: ours(q, k, v), (q,), (t,))[1]
            mapped, each = timed(lambda: torch.func.vmap(one)(many)), timed(lambda: [one(t) for t in many])
            print(f"{title:32s} vmap of 16 {mapped:9.1f}  16 calls {each:9.1f}  {each / mapped:6.2f}", flush=True)
    except Exception as error:  # a table with a hole is better than none
        print(f"{title:32s} {type(error).__name__}: {str(error)[:90]}")
    torch.cuda.empty_cache()
print(f"{time.time() - BEGIN:.0f} s")
