"""flash_attn's functions over flashsci where flash_attn runs: 16 bits on a GPU, lengths that stay there."""

from __future__ import annotations

import pytest
import torch

import flashsci.compat.flash_attn as compat
from flashsci.compat.flash_attn import fa2
from flashsci.testing import Inputs, Judge

pytestmark = pytest.mark.gpu


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def seen(seq_q, seq_k, left=None):
    """Bool [Sq, Sk]: causal, aligned lower right, with ``left`` keys before."""
    i = torch.arange(seq_q, device="cuda")[:, None] + seq_k - seq_q
    j = torch.arange(seq_k, device="cuda")
    return (j <= i) if left is None else (j <= i) & (j >= i - left)


def heads_first(**tensors):
    return {name: x.transpose(1, 2) for name, x in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alibi", [False, True])
def test_dense(alibi, dtype):
    q, dout = normal(2, 200, 4, 64, dtype=dtype), normal(2, 200, 4, 64, dtype=dtype)
    k, v = (normal(2, 333, 2, 64, dtype=dtype) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda") if alibi else None
    out = fa2.flash_attn_func(*leaves, causal=True, window_size=(150, 0), alibi_slopes=slopes)
    gradients = torch.autograd.grad(out, leaves, dout)
    bias = None
    if slopes is not None:
        i = torch.arange(200, device="cuda")[:, None] + 133
        bias = -slopes[:, None, None] * (i - torch.arange(333, device="cuda")).abs()
    inputs = Inputs(
        **heads_first(q=q, k=k, v=v, dout=dout), mask=seen(200, 333, 150), bias=bias, bias_grad=False
    )  # fmt: skip
    found = dict(zip(("dq", "dk", "dv"), gradients, strict=True), out=out)
    Judge(inputs).require(heads_first(**found))


def test_cache_in_a_graph_whose_lengths_change():
    """One token more a replay; nothing waits for the device, and rows that are not in use hold NaN."""
    lengths = torch.tensor([37, 300], dtype=torch.int32, device="cuda")
    k_cache, v_cache = torch.full((2, 2, 400, 2, 64), torch.nan, device="cuda").half().unbind(0)
    for n, used in enumerate(lengths.tolist()):
        for x in (k_cache, v_cache):
            x[n, :used] = normal(used, 2, 64, dtype=torch.float16)
    q, k, v = normal(2, 1, 8, 64, dtype=torch.float16), *normal(2, 2, 1, 2, 64, dtype=torch.float16)

    def step():
        out = fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)  # fmt: skip
        lengths.add_(1)
        return out

    def check(out):
        for n, used in enumerate(lengths.tolist()):
            parts = (x.transpose(0, 1) for x in (q[n], k_cache[n, :used], v_cache[n, :used]))
            Judge(Inputs(*parts)).require(dict(out=out[n].transpose(0, 1)))

    check(step())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        q.copy_(normal(2, 1, 8, 64, dtype=torch.float16))
        graph.replay()
        check(out)


def test_transformers():
    """Nothing of transformers is patched: it finds a CUDA device and, as far as it can tell, flash_attn."""
    transformers = pytest.importorskip("transformers")
    compat.install()
    try:
        models = []
        for implementation in ("eager", "flash_attention_2", "sdpa"):
            config = transformers.LlamaConfig(
                hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                vocab_size=50, pad_token_id=0, dtype="bfloat16",
            )  # fmt: skip
            model = transformers.LlamaForCausalLM
            models.append(model._from_config(config, attn_implementation=implementation))
        eager, flash, exact = (m.to("cuda", torch.bfloat16).eval() for m in models)
        flash.load_state_dict(eager.state_dict())
        exact.load_state_dict(eager.state_dict())
        exact.double()  # not of eager: its softmax is fp32, where a mask of fp64's least number is -inf
        ids = torch.randint(1, 50, (2, 70), device="cuda")
        mask = torch.ones_like(ids)
        mask[0, :23] = 0
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        arguments = dict(attention_mask=mask, position_ids=position)
        with torch.no_grad():
            found, plain, exact = (
                m(ids, **arguments).logits[mask.bool()] for m in (flash, eager, exact)
            )
        errors = [(x.double() - exact).norm() for x in (found, plain)]
        assert errors[0] <= 2 * errors[1], errors
    finally:
        compat.uninstall()
