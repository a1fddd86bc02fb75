"""Dropout and ALiBi against SDPA's kernels and FlexAttention is left to bench; B 4, H 16, S 1024, D 64 and more."""
import torch, flashsci
from torch.nn.attention import SDPBackend, sdpa_kernel
from common import times
def run(B, H, S, D, causal):
    q, k, v, dout = (torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    def of(backend):
        return lambda: flashsci.attention(q, k, v, dropout_p=0.1, causal=causal, backend=backend)
    def torchs(which):
        def f():
            with sdpa_kernel(which): return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=causal)
        return f
    calls = {"triton": of("triton"), "cuda": of("cuda"), "flash": torchs(SDPBackend.FLASH_ATTENTION), "cudnn": torchs(SDPBackend.CUDNN_ATTENTION)}
    fwd = times(calls); step = times({n: (lambda f=f: torch.autograd.grad(f(), (q, k, v), dout)) for n, f in calls.items()})
    print(B, H, S, D, causal, {n: f"{fwd[n]:.0f}/{step[n]:.0f}" for n in calls}, flush=True)
for S, D, causal in ((1024, 64, False), (4096, 64, True), (1024, 128, False), (4096, 128, True), (256, 64, False)): run(4, 16, S, D, causal)
