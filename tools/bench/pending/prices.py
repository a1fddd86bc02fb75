# ruff: noqa
"""Dropout, ALiBi against peers, and the price of deterministic="batch": python tools/bench/pending/prices.py [seconds]; one GPU."""

import statistics, sys, time
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
import flashsci

BEGIN, BUDGET = time.time(), float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
BF, F32 = torch.bfloat16, torch.float32
flex = torch.compile(flex_attention, dynamic=False)


def steps(f, leaves, dout):
    return lambda: torch.autograd.grad(f(), leaves, dout)


def timed(fs, seconds=1.0):
    """Median GPU us of each, in turn; and back-to-back us."""
    found = {n: [] for n in fs}
    for n, f in list(fs.items()):
        try:
            for _ in range(3):
                f()
            torch.cuda.synchronize()
        except Exception as e:
            print("  ", n, "failed", type(e).__name__, str(e)[:100])
            found.pop(n)
    fs = {n: fs[n] for n in found}
    end = time.time() + seconds
    while time.time() < end:
        for n, f in fs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(600_000)
            a.record()
            for _ in range(3):
                f()
            b.record()
            found[n].append((a, b))
        torch.cuda.synchronize()
    return {n: statistics.median(a.elapsed_time(b) for a, b in x) * 1e3 / 3 for n, x in found.items()}


def row(name, fwd, step):
    a, b = timed(fwd), timed(step)
    print(f"{name:44s} " + "  ".join(f"{n} {a[n]:.0f}/{b.get(n, float('nan')):.0f}" for n in a), flush=True)


def pair(make, leaves, dout):
    """forward without graph, and step, of each way."""

    def no_grad(f):
        def g():
            with torch.no_grad():
                return f()

        return g

    return {n: no_grad(f) for n, f in make.items()}, {n: steps(f, leaves, dout) for n, f in make.items()}


def leaves_of(b, h, s, d, hk=None, dtype=BF):
    q, k, v = (torch.randn(b, n, s, d, device="cuda", dtype=dtype).requires_grad_() for n in (h, hk or h, hk or h))
    return (q, k, v), torch.randn(b, h, s, d, device="cuda", dtype=dtype)


def sdpa_by(kernel, *args, **kw):
    def f():
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(*args, **kw)

    return f


print(torch.cuda.get_device_name(), torch.__version__, "us, forward/step")
for b, h, s, d, causal in (
    (4, 16, 1024, 64, False),
    (4, 16, 1024, 128, False),
    (2, 16, 4096, 64, True),
    (2, 16, 4096, 128, True),
    (16, 8, 300, 32, False),
):
    x, dout = leaves_of(b, h, s, d)
    make = {
        f"{n}": (lambda n=n: flashsci.attention(*x, causal=causal, dropout_p=0.1, backend=n))
        for n in ("auto", "cuda", "triton")
    }
    make["sdpa flash"] = sdpa_by(SDPBackend.FLASH_ATTENTION, *x, dropout_p=0.1, is_causal=causal)
    make["sdpa cudnn"] = sdpa_by(SDPBackend.CUDNN_ATTENTION, *x, dropout_p=0.1, is_causal=causal)
    make["none, auto"] = lambda: flashsci.attention(*x, causal=causal)
    row(f"dropout B {b} H {h} S {s} D {d} {'causal' if causal else ''}", *pair(make, x, dout))
for b, h, s, d, causal in (
    (4, 16, 1024, 64, False),
    (4, 16, 1024, 128, False),
    (2, 16, 4096, 64, True),
    (2, 16, 4096, 128, True),
):
    x, dout = leaves_of(b, h, s, d)
    slopes = torch.rand(h, device="cuda")

    def mod(score, bb, hh, i, j):
        return score - slopes[hh] * (i - j).abs()

    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, s, s, device="cuda") if causal else None
    make = {
        f"{n}": (lambda n=n: flashsci.attention(*x, causal=causal, alibi_slopes=slopes, backend=n))
        for n in ("auto", "cuda", "triton")
    }
    make["flex"] = lambda: flex(*x, score_mod=mod, block_mask=block)
    make["none, auto"] = lambda: flashsci.attention(*x, causal=causal)
    row(f"alibi B {b} H {h} S {s} D {d} {'causal' if causal else ''}", *pair(make, x, dout))

print('deterministic="batch" over the default')
for b, h, hk, s, d, causal, dtype in (
    (4, 16, 16, 1024, 64, False, BF),
    (4, 16, 4, 4096, 128, True, BF),
    (64, 16, 16, 128, 64, False, BF),
    (4, 8, 8, 512, 32, False, F32),
    (4, 16, 16, 1024, 128, True, F32),
):
    x, dout = leaves_of(b, h, s, d, hk, dtype)
    make = {
        f"{n}": (lambda n=n: flashsci.attention(*x, causal=causal, deterministic=n)) for n in (False, True, "batch")
    }
    row(f"dense B {b} H {h}/{hk} S {s} D {d} {'causal' if causal else ''} {dtype}", *pair(make, x, dout))
for lengths, h, d, dtype in (
    ([20] * 512, 8, 64, BF),
    ([100, 300, 20, 700] * 16, 16, 64, BF),
    ([4000, 1000, 3000], 16, 128, BF),
    ([64] * 256, 8, 32, F32),
):
    x = [torch.randn(sum(lengths), h, d, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    dout = torch.randn_like(x[0])
    edges = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    m = max(lengths)
    make = {
        f"{n}": (
            lambda n=n: flashsci.varlen_attention(
                *x, edges, max_seqlen_q=m, max_seqlen_k=m, causal=True, deterministic=n
            )
        )
        for n in (False, "batch")
    }
    row(f"packed {len(lengths)} x {sum(lengths) // len(lengths)} H {h} D {d} {dtype}", *pair(make, x, dout))
for seqs, length, queries in ((1, 8192, 1), (16, 2048, 1), (128, 2048, 1), (8, 4096, 64), (256, 512, 1)):
    pages = -(-length // 16)
    kc, vc = torch.randn(2, seqs * pages, 16, 8, 128, device="cuda", dtype=BF)
    table = torch.randperm(seqs * pages, device="cuda", dtype=torch.int32).view(seqs, pages)
    q = torch.randn(seqs * queries, 32, 128, device="cuda", dtype=BF)
    used = torch.full((seqs,), length, device="cuda", dtype=torch.int32)
    edges = torch.arange(seqs + 1, device="cuda", dtype=torch.int32) * queries
    make = {
        f"{n}": (
            lambda n=n: flashsci.paged_attention(
                q,
                kc,
                vc,
                block_table=table,
                seqused_k=used,
                cu_seqlens_q=edges,
                max_seqlen_q=queries,
                causal=True,
                deterministic=n,
            )
        )
        for n in (False, "batch")
    }

    def no_grad(f):
        def g():
            with torch.no_grad():
                return f()

        return g

    row(f"paged {seqs} x {length}, {queries} queries", {n: no_grad(f) for n, f in make.items()}, {})
print(f"{time.time() - BEGIN:.0f} s")
