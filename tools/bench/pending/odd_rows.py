"""Cliffs of a 16-bit pair bias of odd lengths: in place, by a copy, and the next multiple of 64; the same for key masks."""
import sys, torch, flashsci
from flashsci.backends import cuda
from flashsci.backends.cuda import decisions
from flashsci.call import plans
from common import times
def made(S, H, B, D, shape, dtype=torch.bfloat16):
    q, k, v = (torch.randn(B, H, S, D, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    return q, k, v, torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()
real = cuda.reads_ragged_bias
print("S, H, B, D | in place, copy, next multiple: forward | step | ratio in place/next, copy/next")
for S, H, B, D in ((383, 16, 4, 64), (511, 8, 4, 64), (1023, 16, 1, 64), (1023, 16, 4, 64), (2047, 16, 1, 64), (1023, 16, 1, 128), (1023, 8, 4, 128), (2047, 16, 1, 128), (1023, 4, 64, 32)):
    rows, found = {}, {}
    for name, n, hook in (("place", S, real), ("copy", S, lambda *a, **k: False), ("next", -(-S // 64) * 64, real)):
        rows[name] = (made(n, H, B, D, (B, H, n, n)), hook)
    for kind in ("forward", "step"):
        def call(x, hook):
            q, k, v, bias = x
            dout = torch.randn_like(q)
            def f():
                if kind == "forward":
                    with torch.no_grad(): flashsci.attention(q, k, v, bias=bias)
                else: torch.autograd.grad(flashsci.attention(q, k, v, bias=bias), x, dout)
            plans.plans.clear(); cuda.reads_ragged_bias = hook; f(); f()
            return f
        functions = {}
        for name, (x, hook) in rows.items():
            functions[name] = call(x, hook)
        # plans are kept per shape: place and copy share one, so they run in turns with their plans made again
        out = {}
        for name, (x, hook) in rows.items():
            plans.plans.clear(); cuda.reads_ragged_bias = hook
            out[name] = times({name: functions[name]})[name]
        found[kind] = out
    cuda.reads_ragged_bias = real
    f, s = found["forward"], found["step"]
    print(S, H, B, D, "|", *(f"{x:.0f}" for x in f.values()), "|", *(f"{x:.0f}" for x in s.values()), "|",
          f"{f['place']/f['next']:.2f} {f['copy']/f['next']:.2f} | {s['place']/s['next']:.2f} {s['copy']/s['next']:.2f}", flush=True)
print("key masks and key biases, cuda: odd, next")
for S in (383, 1023, 2047):
    for D in (64, 128):
        r = {}
        for n in (S, -(-S // 64) * 64):
            q, k, v = (torch.randn(8, 16, n, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            mask = (torch.arange(n, device="cuda") < torch.randint(n // 2, n, (8, 1, 1, 1), device="cuda"))
            bias = torch.randn(8, 16, 1, n, device="cuda", dtype=torch.bfloat16)
            r[n] = times({f"{b} {w}": (lambda b=b, w=w: flashsci.attention(q, k, v, backend=b, **({"mask": mask} if w == "mask" else {"bias": bias}))) for b in ("cuda", "triton", "auto") for w in ("mask", "bias")})
        a, b = r.values()
        print(S, D, {x: f"{a[x]:.0f} {b[x]:.0f} {a[x]/b[x]:.2f}" for x in a}, flush=True)
