"""Head dims off 8: copies of rows against the rows as they are, SDPA, and the padded head dim."""
import torch, flashsci
from flashsci.call import head_padding, plans
from common import times
pays = head_padding.pays
def run(name, B, H, Hk, Sq, Sk, D, Dv, grad, **options):
    q = torch.randn(B, H, Sq, D, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)
    k = torch.randn(B, Hk, Sk, D, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)
    v = torch.randn(B, Hk, Sk, Dv, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)
    dout = torch.randn(B, H, Sq, Dv, device="cuda", dtype=torch.bfloat16)
    def f(attend=flashsci.attention, **more):
        def g():
            if grad: torch.autograd.grad(attend(q, k, v, **more), (q, k, v), dout)
            else: attend(q, k, v, **more)
        return g
    out = {}
    plans.plans.clear(); out |= times({"copies": f(**options)})
    head_padding.pays = lambda *a, **k: False
    plans.plans.clear(); out |= times({"as they are": f(**options), "triton": f(backend="triton", **options), "cuda": f(backend="cuda", **options)})
    head_padding.pays = pays
    if H == Hk: out |= times({"sdpa": f(torch.nn.functional.scaled_dot_product_attention, is_causal=options.get("causal", False))})
    print(name, {k: round(x) for k, x in out.items()}, flush=True)
for grad in (False, True):
    print("step" if grad else "forward")
    run("D 57, 17 x 16 x 7499", 17, 16, 16, 7499, 7499, 57, 57, grad)
    run("D 25, 9 x 32, 4577 x 1815", 9, 32, 32, 4577, 1815, 25, 25, grad)
    run("D 25, 4 x 32 x 128", 4, 32, 32, 128, 128, 25, 25, grad)
    run("D 25, 64 x 32 x 128", 64, 32, 32, 128, 128, 25, 25, grad)
    run("D 25, 16 x 32 x 256", 16, 32, 32, 256, 256, 25, 25, grad)
    run("D 100, 4 x 8 x 512", 4, 8, 8, 512, 512, 100, 100, grad)
    run("D 100, 32 x 16 x 512", 32, 16, 16, 512, 512, 100, 100, grad)
    run("D 128/127, 21 x 32 x 749", 21, 32, 32, 749, 749, 128, 127, grad)
    run("D 64/125, 4 x 32/4, 2676 x 7120", 4, 32, 4, 2676, 7120, 64, 125, grad)
    run("D 78 causal, 189 x 6 x 975", 189, 6, 6, 975, 975, 78, 78, grad, causal=True)
    run("D 196, 2 x 8 x 2000", 2, 8, 8, 2000, 2000, 196, 196, grad)
