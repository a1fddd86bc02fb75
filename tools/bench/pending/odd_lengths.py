# ruff: noqa
"""Time of odd lengths over that of the neighbouring multiple of 64: PYTHONPATH=$PWD python tools/bench/pending/odd_lengths.py [seconds]

One GPU; back-to-back calls between events, median of 5 rounds, odd and neighbour in turn. A row: us of the neighbour, us
of the odd length, their ratio; forward, then step (forward and all gradients). SDPA: the same tensors.
"""

import statistics
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flashsci
from flashsci.call import bias_copy

BEGIN, BUDGET = time.time(), float(sys.argv[1]) if len(sys.argv) > 1 else 58.0
BF, F32 = torch.bfloat16, torch.float32
# name, B, H, D, whole, odd, shape of bias (b, h, q, k: 0 for the size, 1 for 1), its dtype, or "mask"
CASES = [
    ("shared bias", 16, 8, 32, 1024, 1023, "1hqk", BF),
    ("shared bias", 16, 8, 32, 384, 383, "1hqk", BF),
    ("pair bias", 16, 8, 32, 1024, 1025, "bhqk", BF),
    ("one head's bias", 16, 8, 64, 1024, 1023, "b1qk", BF),
    ("bias of all heads", 1, 12, 64, 4096, 4093, "11qk", BF),
    ("pair bias", 16, 8, 32, 2048, 2047, "bhqk", BF),
    ("mask of pairs", 16, 8, 64, 1024, 1023, "11qk", torch.bool),
    ("mask of pairs", 16, 8, 32, 1024, 1023, "11qk", torch.bool),
    ("key mask", 16, 8, 32, 1024, 1025, "b11k", torch.bool),
    ("no bias", 16, 8, 32, 1024, 1025, "", BF),
    ("fp32 shared bias", 16, 8, 32, 1024, 1025, "1hqk", F32),
]


def made(b, h, d, s, shape, dtype):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(b, h, s, d, device="cuda", dtype=BF) for _ in range(4))
    plane = None
    if shape:
        plane = torch.randn([{"b": b, "h": h, "q": s, "k": s, "1": 1}[c] for c in shape], device="cuda")
        plane = plane > -1 if dtype is torch.bool else plane.to(dtype)
    return q, k, v, plane, dout


def ours(backend):
    def run(q, k, v, plane):
        name = {} if plane is None else {"mask" if plane.dtype is torch.bool else "bias": plane}
        return flashsci.attention(q, k, v, backend=backend, **name)

    return run


def torchs(q, k, v, plane):
    return sdpa(q, k, v, attn_mask=plane if plane is None or plane.dtype is torch.bool else plane.to(q.dtype))


def step(run, given):
    q, k, v, plane, dout = given
    own = [x.detach().requires_grad_() for x in (q, k, v)]
    bias = plane if plane is None or plane.dtype is torch.bool else plane.detach().requires_grad_()
    wanted = own if bias is None or bias.dtype is torch.bool else [*own, bias]
    return lambda: torch.autograd.grad(run(*own, bias), wanted, dout)


def timed(f, calls):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        f()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls


def both(whole, odd):
    for f in (whole, odd, whole, odd, whole, odd):
        f()
    calls = max(3, min(50, int(2e4 / max(timed(odd, 3), 1))))
    rounds = [(timed(whole, calls), timed(odd, calls)) for _ in range(5)]
    a, b = (statistics.median(x) for x in zip(*rounds, strict=True))
    return a, b


print(torch.cuda.get_device_name(), torch.__version__, "us: whole, odd, ratio; forward | step")
for label, run in (("cuda", ours("cuda")), ("sdpa", torchs), ("triton", ours("triton"))):
    for name, b, h, d, whole, odd, shape, dtype in CASES:
        if time.time() - BEGIN > BUDGET:
            print("out of time before", label, name, whole)
            continue
        title = f"{name} B{b} H{h} D{d} {whole}->{odd}"
        try:
            pair = [made(b, h, d, s, shape, dtype) for s in (whole, odd)]
            if label != "sdpa":  # the numbers of odd lengths, against the same in float32
                q, k, v, plane, _ = pair[1]
                some = plane if plane is None else plane[:1] if plane.shape[0] > 1 else plane
                mask = some if some is None or some.dtype is torch.bool else some.float()
                expected = sdpa(q[:1].float(), k[:1].float(), v[:1].float(), attn_mask=mask)
                for backend in (label,):
                    error = (ours(backend)(q, k, v, plane)[:1].float() - expected).abs().max().item()
                    if not error < 0.05:
                        print(f"WRONG {backend} {title}: {error}")
                if label == "cuda" and plane is not None and dtype is BF:
                    timed(lambda: bias_copy.copied(plane), 3)
                    print(f"{title:42s} copy    {timed(lambda: bias_copy.copied(plane), 10):9.1f}")
            forward = [lambda g=g: run(*g[:4]) for g in pair]
            with torch.no_grad():
                a, bb = both(*forward)
            c, e = both(*(step(run, g) for g in pair))
            print(
                f"{title:42s} {label:7s} {a:9.1f} {bb:9.1f} {bb / a:6.2f} | {c:9.1f} {e:9.1f} {e / c:6.2f}", flush=True
            )
            del pair, forward
        except Exception as error:  # a table with a hole is better than none
            print(f"{title:42s} {label:7s} {type(error).__name__}: {str(error)[:90]}")
        torch.cuda.empty_cache()
print(f"{time.time() - BEGIN:.0f} s")
