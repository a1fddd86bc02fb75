# ruff: noqa
"""Times of gated calls against calls without a gate and against the formula in PyTorch, on one GPU; about 30 s.

    PYTHONPATH=$PWD python tools/bench/pending/gated.py [seconds]

A row: a case; for forward, step (forward and all gradients) and second order (double backward of <q-gradient, itself>) the ms of the
gated call, of the call without a gate, and of PyTorch, each time the GPU's and behind it the host's; the errors of out, dq, dgate and the second dq against fp64, over those of PyTorch
in the same dtype. The last rows: wide values in fp32 by products of whole heads, and by one kernel.
"""

import sys
import time

import torch

import flashsci
from flashsci.backends.triton import tilings
from flashsci.backends.triton.plans import dense

BEGIN, BUDGET = time.time(), float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
BF, F32 = torch.bfloat16, torch.float32
# name, B, H, Hk, D, Dv, S, shape of the gate (b, h, q, k: 0 for the size, 1 for 1), causal, dtype
CASES = [
    ("EGT, own gate", 4, 16, 16, 64, 64, 1024, "bhqk", False, BF),
    ("EGT, own gate, fp32", 4, 8, 8, 64, 64, 512, "bhqk", False, F32),
    ("gate of all heads", 4, 16, 16, 64, 64, 2048, "b1qk", False, BF),
    ("gate of the batch", 8, 8, 8, 128, 128, 1024, "11qk", True, BF),
    ("grouped heads", 4, 16, 4, 64, 64, 1024, "bhqk", True, BF),
    ("gate of keys", 4, 16, 16, 64, 64, 1024, "bh1k", False, BF),
    ("one gate a head", 4, 16, 16, 64, 64, 1024, "1h11", False, BF),
    ("short", 256, 8, 8, 32, 32, 40, "bhqk", False, F32),
    ("descriptors", 64, 1, 1, 129, 384, 138, "bhqk", False, F32),
    ("descriptors, bf16", 64, 1, 1, 129, 384, 138, "bhqk", False, BF),
    ("descriptors, long", 8, 1, 1, 129, 384, 600, "bhqk", False, F32),
]


def formula(q, k, v, gate, causal):
    group = q.shape[1] // k.shape[1]
    s = (q @ k.repeat_interleave(group, 1).mT) * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    p = s.softmax(-1)
    return (p if gate is None else p * gate) @ v.repeat_interleave(group, 1)


def measured(f, n=7):
    try:
        f()
        f()
        torch.cuda.synchronize()
        t = time.perf_counter()
        f()
        torch.cuda.synchronize()
        n = max(1, min(n, int(0.15 / (time.perf_counter() - t))))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        host = []
        torch.cuda._sleep(40_000_000)  # about 20 ms, in which all launches are queued: events see the GPU alone
        marks[0].record()
        for mark in marks[1:]:
            t = time.perf_counter()
            f()
            host.append(1e3 * (time.perf_counter() - t))
            mark.record()
        torch.cuda.synchronize()
        times = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
        return f"{times[len(times) // 2]:8.3f}/{sorted(host)[len(host) // 2]:.3f}"
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "     oom"


def results(call, leaves, dout, second=True):
    out = call(*leaves)
    first = torch.autograd.grad(out, leaves, dout, create_graph=second)
    found = [out, first[0], first[-1]]
    if second:
        found.append(torch.autograd.grad(first[0].float().square().sum(), leaves)[0])
    return [x.detach().double() for x in found]


def run(name, b, h, hk, d, dv, s, shape, causal, dtype):
    torch.manual_seed(0)
    draw = lambda *n: torch.randn(*n, device="cuda", dtype=dtype)
    q, k, v, dout = draw(b, h, s, d), draw(b, hk, s, d), draw(b, hk, s, dv), draw(b, h, s, dv)
    sizes = {"b": b, "h": h, "q": s, "k": s, "1": 1}
    gate = draw(*(sizes[c] if c == w else 1 for c, w in zip(shape, "bhqk")))
    leaves = [x.requires_grad_() for x in (q, k, v, gate)]
    by = lambda q, k, v, gate=None: flashsci.attention(
        q, k, v, pair_gate=gate, causal=causal, backend="triton" if gate is not None else "auto"
    )
    theirs = lambda q, k, v, gate=None: formula(q, k, v, gate, causal)
    row = []
    for call, given in ((by, leaves), (by, leaves[:3]), (theirs, leaves)):

        def forward():
            with torch.no_grad():
                call(*given)

        def step():
            torch.autograd.grad(call(*given), given, dout)

        def second():
            (first,) = torch.autograd.grad(call(*given), given[:1], dout, create_graph=True)
            torch.autograd.grad(first.float().square().sum(), given)

        row.append([measured(f) for f in (forward, step, second)])
    text = "  |".join("".join(row[n][m] for n in range(3)) for m in range(3))
    error = ""
    if b * h * s * s <= 1 << 24:
        exact = [x.detach().double().requires_grad_() for x in leaves]
        due = results(theirs, exact, dout.double())
        ratios = []
        for x, y, z in zip(results(by, leaves, dout), results(theirs, leaves, dout), due):
            ratios.append(f"{(x - z).norm() / (y - z).norm():5.2f}")
        error = " ".join(ratios)
        del exact, due
    print(f"{name:22s} {text}  | {error}  ({time.time() - BEGIN:.0f} s)", flush=True)
    torch.cuda.empty_cache()


print(f"{'':22s} {'forward: gate, none, PyTorch':>24s} | step | second order | errors over PyTorch's")
for case in CASES:
    if time.time() - BEGIN < BUDGET:
        run(*case)
# Wide values in fp32 without products of whole heads: one kernel forward.
tilings.is_wide = lambda *given: False
dense.plan.cache_clear()
flashsci.attention(*torch.randn(3, 1, 1, 8, 8, device="cuda").unbind(0))
if time.time() - BEGIN < BUDGET + 5:
    name, b, h, hk, d, dv, s, shape, causal, dtype = CASES[8]
    q, k, v = (torch.randn(b, h, s, n, device="cuda") for n in (d, d, dv))
    gate = torch.randn(b, h, s, s, device="cuda")
    with torch.no_grad():
        print(
            "descriptors, one kernel:", measured(lambda: flashsci.attention(q, k, v, pair_gate=gate, backend="triton"))
        )
