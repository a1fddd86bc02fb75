"""flash_attn's functions over flashsci where flash_attn runs: 16 bits on a GPU, lengths that stay there."""

from __future__ import annotations

import pytest
import torch

import flashsci
import flashsci.compat.flash_attn as compat
from flashsci.compat.flash_attn import fa2, fa3
from flashsci.compat.flash_attn.mha import MHA, InferenceParams
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
    inputs = Inputs(**heads_first(q=q, k=k, v=v, dout=dout), mask=seen(200, 333, 150), bias=bias, bias_grad=False)
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
        out = fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
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


def paged(used, page, columns, dtype=torch.float16):
    """Pages in random order with NaN in rows that are not in use, their table, and the dense caches that they stand for."""
    count = len(used)
    table = torch.randperm(count * columns, device="cuda").view(count, columns).to(torch.int32)
    dense = torch.full((2, count, columns * page, 2, 64), torch.nan, device="cuda", dtype=dtype)
    for n, rows in enumerate(used):
        dense[:, n, :rows] = normal(2, rows, 2, 64, dtype=dtype)
    pages = torch.empty(2, count * columns, page, 2, 64, device="cuda", dtype=dtype)
    pages[:, table.flatten().long()] = dense.view(2, count * columns, page, 2, 64)
    return pages, table, dense


@pytest.mark.parametrize("page", [1, 16, 256, 24])
@pytest.mark.parametrize("module", [fa2, fa3])
def test_pages_in_a_graph_whose_lengths_change(module, page):
    """As the dense cache, with no wait for the device; the new rows lie in their pages, no other row changes."""
    columns = -(-512 // page)
    pages, table, dense = paged((37, 300), page, columns)
    lengths = torch.tensor([37, 300], dtype=torch.int32, device="cuda")
    q, k, v = normal(2, 2, 8, 64, dtype=torch.float16), *normal(2, 2, 2, 2, 64, dtype=torch.float16)
    name = "block_table" if module is fa2 else "page_table"

    def step():
        out = module.flash_attn_with_kvcache(
            q,
            *pages,
            k,
            v,
            cache_seqlens=lengths,
            causal=True,
            window_size=(250, 0),
            **{name: table},
        )
        lengths.add_(2)
        return out

    def check(out):
        for n, end in enumerate(lengths.tolist()):
            dense[0, n, end - 2 : end], dense[1, n, end - 2 : end] = k[n], v[n]
            parts = (x.transpose(0, 1) for x in (q[n], dense[0, n, :end], dense[1, n, :end]))
            inputs = Inputs(*parts, mask=seen(2, end, 250))
            Judge(inputs).require(dict(out=out[n].transpose(0, 1)))
        whole = pages[:, table.long()].flatten(2, 3)
        torch.testing.assert_close(whole, dense, rtol=0, atol=0, equal_nan=True)

    check(step())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(out)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = step()
    torch.cuda.current_stream().wait_stream(side)
    check(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        q.copy_(normal(2, 2, 8, 64, dtype=torch.float16))
        graph.replay()
        check(out)


def test_pages_of_packed_sequences():
    used, lens_q = (300, 1, 77), [200, 1, 40]
    pages, table, dense = paged(used, 16, 20)
    q = normal(sum(lens_q), 8, 64, dtype=torch.float16)
    cu_q, cu_k = (
        torch.nn.functional.pad(torch.tensor(x, device="cuda").cumsum(0), (1, 0)).to(torch.int32)
        for x in (lens_q, used)
    )
    slopes = torch.rand(8, device="cuda")
    for alibi in (None, slopes):
        out = fa2.flash_attn_varlen_func(
            q, *pages, cu_q, cu_k, 200, 300, causal=True, block_table=table, alibi_slopes=alibi
        )
        for n, (qn, found) in enumerate(zip(q.split(lens_q), out.split(lens_q), strict=True)):
            parts = (x.transpose(0, 1) for x in (qn, dense[0, n, : used[n]], dense[1, n, : used[n]]))
            i = torch.arange(lens_q[n], device="cuda")[:, None] + used[n] - lens_q[n]
            distance = (i - torch.arange(used[n], device="cuda")).abs()
            bias = None if alibi is None else -alibi[:, None, None] * distance
            inputs = Inputs(*parts, mask=seen(lens_q[n], used[n]), bias=bias, bias_grad=False)
            Judge(inputs).require(dict(out=found.transpose(0, 1)))


@pytest.mark.parametrize("of_k", [None, (100, 30)])
def test_unused_queries_without_a_wait(of_k):
    lens, used = [130, 70], [90, 70]
    q, dout = normal(200, 4, 64), normal(200, 4, 64)
    k, v = normal(200, 2, 64), normal(200, 2, 64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu = torch.tensor([0, 130, 200], dtype=torch.int32, device="cuda")
    device = dict(dtype=torch.int32, device="cuda")
    of_q = torch.tensor(used, **device)
    of_k_there = None if of_k is None else torch.tensor(of_k, **device)

    def step():
        out = fa3.flash_attn_varlen_func(*leaves, cu, cu, 130, 130, seqused_q=of_q, seqused_k=of_k_there, causal=True)
        return out, torch.autograd.grad(out, leaves, dout)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for n, start in enumerate((0, 130)):
        rows_q = slice(start, start + used[n])
        rows_k = slice(start, start + (lens if of_k is None else of_k)[n])
        parts = [x.detach().transpose(0, 1) for x in (q[rows_q], k[rows_k], v[rows_k])]
        inputs = Inputs(*parts, dout=dout[rows_q].transpose(0, 1), mask=seen(used[n], parts[1].shape[1]))
        results = dict(out=out[rows_q], dq=found[0][rows_q], dk=found[1][rows_k], dv=found[2][rows_k])
        Judge(inputs).require({name: x.detach().transpose(0, 1) for name, x in results.items()})
        unused = slice(start + used[n], start + lens[n])
        assert out[unused].eq(0).all() and found[0][unused].eq(0).all()


def test_options_on_the_device():
    """As flash_attn's tests give them."""
    q = normal(2, 100, 4, 64)
    window = torch.randint(0, 100, (2,))
    expected = fa2.flash_attn_func(q, q, q, window_size=tuple(window.tolist()), softmax_scale=0.25)
    for given in (window, tuple(window), tuple(window.cuda())):
        scale = torch.tensor(0.25, device="cuda")
        assert torch.equal(fa2.flash_attn_func(q, q, q, window_size=given, softmax_scale=scale), expected)


def test_descaled_8_bits():
    """FlashAttention-3's scales, one for each sequence and key head, are those of flashsci's own calls."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("8-bit products need sm_90")
    q, k, v = (normal(2, 256, h, 64).to(torch.float8_e4m3fn) for h in (8, 2, 2))
    scales = [torch.rand(2, 2, device="cuda") + 0.5 for _ in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    out = fa3.flash_attn_func(q, k, v, causal=True, **named)
    expected = flashsci.attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        q_scale=scales[0].repeat_interleave(4, 1),
        k_scale=scales[1],
        v_scale=scales[2],
        causal=True,
    )
    assert torch.equal(out, expected.transpose(1, 2))


@pytest.mark.parametrize("heads_k", [4, 2])
def test_mha_generates_what_it_computes_at_once(heads_k):
    torch.manual_seed(0)
    module = MHA(
        256, 4, num_heads_kv=heads_k, causal=True, layer_idx=0, use_flash_attn=True, rotary_emb_dim=64,
        device="cuda", dtype=torch.float16,
    )  # fmt: skip
    x = normal(2, 40, 256, dtype=torch.float16)
    params = InferenceParams(64, 2)
    with torch.no_grad():
        whole = module(x)
        parts = []
        for rows in (30, 1, 4, 1, 1, 1, 1, 1):
            parts.append(module(x[:, params.seqlen_offset :][:, :rows], inference_params=params))
            params.seqlen_offset += rows
        exact = MHA(
            256, 4, num_heads_kv=heads_k, causal=True, use_flash_attn=True, rotary_emb_dim=64, dtype=torch.float64
        )
        exact.load_state_dict({name: y.double().cpu() for name, y in module.state_dict().items()})
        truth = exact(x.double().cpu()).cuda()
    errors = [(y.double() - truth).norm() for y in (torch.cat(parts, 1), whole)]
    assert errors[0] <= 2 * errors[1], errors
    assert errors[1] <= 8 * torch.finfo(torch.float16).eps * truth.norm()


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
            found, plain, exact = (m(ids, **arguments).logits[mask.bool()] for m in (flash, eager, exact))
        errors = [(x.double() - exact).norm() for x in (found, plain)]
        assert errors[0] <= 2 * errors[1], errors
    finally:
        compat.uninstall()
