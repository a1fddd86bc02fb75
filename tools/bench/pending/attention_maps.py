# ruff: noqa
"""Time and memory of attention maps against materialising P, on one GPU; about 30 s."""

import sys, time

sys.path.insert(0, ".")
import torch, flashsci


def measured(f, n=5):
    f()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    t = time.perf_counter()
    for _ in range(n):
        f()
    torch.cuda.synchronize()
    return f"{(time.perf_counter() - t) / n * 1e3:9.2f} ms  {(torch.cuda.max_memory_allocated() - before) / 2**20:9.1f} MiB"


for s, heads in ((8192, 16), (32768, 4)):
    q, k, v = torch.randn(3, 1, heads, s, 128, device="cuda", dtype=torch.bfloat16).unbind(0)
    for causal in (False, True):
        _, lse = flashsci.attention(q, k, v, causal=causal, return_lse=True)
        what = dict(causal=causal)

        def plain():
            x = (q @ k.mT).float() * 128**-0.5
            if causal:
                x = x.masked_fill(torch.ones(s, s, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
            top = x.amax(-1)
            p = x.softmax(-1)
            del x
            return torch.special.entr(p).sum(-1), top, p.sum(-2)

        everything = dict(entropy=True, largest_score=True, key_sum=True)

        def by(backend, **more):
            with flashsci.use_backend(backend):
                return flashsci.attention_statistics(q, k, lse, **more, **what)

        print(f"S {s} heads {heads} causal {causal}")
        try:
            print("  P materialised       ", measured(plain, 2))
            due = plain()
        except torch.OutOfMemoryError:
            print("  P materialised        out of memory")
            due = None
        torch.cuda.empty_cache()
        print("  kernels, all three   ", measured(lambda: by("auto", **everything)))
        print("  kernels, largest     ", measured(lambda: by("auto", largest_score=True)))
        print("  blocks of PyTorch    ", measured(lambda: by("reference", **everything), 1))
        print("  top 8                ", measured(lambda: by("auto", top_k=8), 1))
        print(
            "  64 rows of P         ",
            measured(lambda: flashsci.attention_weights(q, k, lse, rows=slice(-64, None), **what)),
        )
        print("  forward, for scale   ", measured(lambda: flashsci.attention(q, k, v, **what)))
        if due is not None:
            found = by("auto", **everything)
            print("  relative errors      ", *(f"{((a - b).norm() / b.norm()).item():.1e}" for a, b in zip(found, due)))
        due = None
