# ruff: noqa
"""Masks that hide tiles on one GPU, at most a minute: PYTHONPATH=$PWD python tools/bench/pending/mask_tiles.py [--no-flex] [--seconds 60]

Each case: flashsci with the bool mask (auto, triton, and triton with tables off), with its BlockMask, with what says the same
without a mask (window, packing), torch's SDPA with the mask, FlexAttention with its own BlockMask; forward and step, us, GPU events,
interleaved. Errors against fp32 math on a few rows. Then the time to build tables.
"""

import argparse, itertools, statistics, sys, time
import torch, torch.nn.functional as F
import flashsci
from flashsci.call import mask_tiles
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

p = argparse.ArgumentParser()
p.add_argument("--no-flex", action="store_true")
p.add_argument("--seconds", type=float, default=60)
A = p.parse_args()
began = time.time()
dev = "cuda"
dt = torch.bfloat16
print(torch.cuda.get_device_name(), torch.__version__)
flex = torch.compile(flex_attention, dynamic=False)


def timed(fs, seconds=0.25):
    """Median GPU time of each function, interleaved; us."""
    found = {n: [] for n in fs}
    for f in fs.values():
        for _ in range(2):
            f()
    torch.cuda.synchronize()
    end = time.time() + seconds * len(fs)
    while True:
        for n, f in fs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            f()
            b.record()
            found[n].append((a, b))
        torch.cuda.synchronize()
        if time.time() > end or len(found[n]) >= 30:
            break
    return {n: statistics.median(a.elapsed_time(b) for a, b in x) * 1e3 for n, x in found.items()}


def case(name, B, H, S, D, mask, mod, other=None):
    if time.time() - began > A.seconds:
        print(name, "skipped: out of time")
        return
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, S, D, device=dev, dtype=dt, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    block = flashsci.BlockMask.from_mask(mask)
    calls = {
        "mask auto": lambda: flashsci.attention(q, k, v, mask=mask),
        "mask triton": lambda: flashsci.attention(q, k, v, mask=mask, backend="triton"),
        "mask cuda": lambda: flashsci.attention(q, k, v, mask=mask, backend="cuda"),
        "BlockMask": lambda: flashsci.attention(q, k, v, mask=block),
        "sdpa mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    }
    if other:
        calls["other way"] = lambda: other(q, k, v)
    if not A.no_flex and mod is not None:
        fm = create_block_mask(mod, None, None, S, S, device=dev)
        calls["flex"] = lambda: flex(q, k, v, block_mask=fm)
    out = {}
    for n, f in list(calls.items()):
        try:
            out[n] = f()
            torch.autograd.grad(out[n], (q, k, v), dout)
        except Exception as e:
            print("   ", n, "failed:", type(e).__name__, str(e)[:200])
            del calls[n]
    rows = torch.randint(0, S, (64,), device=dev)
    s = (q[:, :, rows].float() @ k.float().mT) / D**0.5
    m = mask[..., rows, :] if mask.shape[-2] > 1 else mask
    true = s.masked_fill(~m, -torch.inf).softmax(-1).nan_to_num(0) @ v.float()
    errors = {n: (o[:, :, rows].float() - true).abs().max().item() for n, o in out.items()}

    def forward(f):
        def run():
            with torch.no_grad():
                f()

        return run

    def step(f):
        return lambda: torch.autograd.grad(f(), (q, k, v), dout)

    fw, st = timed({n: forward(f) for n, f in calls.items()}), timed({n: step(f) for n, f in calls.items()})
    pitched = mask if block.mask is None else block.mask
    table = timed({"t": lambda: mask_tiles.table_of(mask), "p": lambda: mask_tiles.table_of(pitched)})
    t0 = time.time()
    flashsci.BlockMask.from_mask(mask)
    torch.cuda.synchronize()
    print(
        f"{name}: {B} x {H} x {S} x {D}; table {table['t']:.0f} us (at a pitch of 16: {table['p']:.0f}); visible {mask.float().mean().item():.3f}"
    )
    for n in calls:
        print(f"    {n:12s} forward {fw[n]:8.1f}  step {st[n]:8.1f}  error {errors[n]:.1e}")
    sys.stdout.flush()


def index(S):
    return torch.arange(S, device=dev)[:, None], torch.arange(S, device=dev)


S = 10242
i, j = index(S)
case(
    "band 256",
    1,
    16,
    S,
    64,
    (i - j).abs() <= 256,
    lambda b, h, q, k: (q - k).abs() <= 256,
    lambda q, k, v: flashsci.attention(q, k, v, window=(256, 256)),
)
S = 8192
i, j = index(S)
ids = torch.arange(S, device=dev) // 1024
cu = torch.arange(0, S + 1, 1024, device=dev, dtype=torch.int32)
case(
    "8 documents",
    1,
    16,
    S,
    128,
    ids[:, None] == ids,
    lambda b, h, q, k: ids[q] == ids[k],
    lambda q, k, v: flashsci.varlen_attention(
        q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), cu, max_seqlen_q=1024, max_seqlen_k=1024
    ).transpose(0, 1)[None],
)
case("prefix 1024, causal", 1, 16, S, 128, (j <= i) | (j < 1024), lambda b, h, q, k: (k <= q) | (k < 1024))
case(
    "nothing hidden",
    1,
    16,
    4096,
    128,
    torch.ones(4096, 4096, device=dev, dtype=torch.bool),
    lambda b, h, q, k: q >= 0,
    lambda q, k, v: flashsci.attention(q, k, v),
)
g = torch.rand(S // 64, S // 64, device=dev) < 0.02
g.fill_diagonal_(True)
cut = torch.rand(S, S, device=dev) < 0.5
gm = g.repeat_interleave(64, 0).repeat_interleave(64, 1) & cut
case("graph of 2 % of the tiles", 1, 16, S, 64, gm, lambda b, h, q, k: gm[q, k])
case("half of all at random", 1, 16, 4096, 64, cut[:4096, :4096].contiguous(), lambda b, h, q, k: cut[q, k])
pad = (torch.arange(4096, device=dev) < torch.tensor([4096, 3000, 2000, 1000], device=dev)[:, None])[:, None, None]
case("padding", 4, 16, 4096, 64, pad, None)
print(f"{time.time() - began:.0f} s")
