"""flash_attn's functions over flashsci: the signatures of the real packages, and what they compute by the formula in fp64."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re

import pytest
import torch
from torch.nn.functional import pad

import flashsci
from flashsci.api.dropout import draw_seed
from flashsci.compat.flash_attn import cache, fa2, fa3, steps
from flashsci.testing import Inputs, Judge

pytestmark = pytest.mark.every(3)

# Of the sources of flash_attn 2.8.3, by module of this package that has the function.
FA2 = """
fa2.flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
fa2.flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
fa2.flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
fa2.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None)
fa2.flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
fa2.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False)
steps._flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax)
steps._flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False)
steps._flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None)
steps._flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False)
padding.index_first_axis(input, indices)
padding.index_put_first_axis(values, indices, first_axis_dim)
padding.unpad_input(hidden_states, attention_mask, unused_mask=None)
padding.pad_input(hidden_states, indices, batch, seqlen)
rotary.RotaryEmbedding.__init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None)
rotary.RotaryEmbedding.forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None)
rotary.apply_rotary(x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False, conjugate=False)
rotary.apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None)
rotary.apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None)
rotary.apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0)
"""
# Of FlashAttention-3's hopper/flash_attn_interface.py at 01afd16; the one among the sources of flash_attn 2.8.3 has all but
# return_attn_probs.
FA3 = """
fa3.flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)
fa3.flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False)
fa3.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)
fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False)
"""
Q, CU = torch.randn(2, 4, 2, 8), torch.tensor([0, 4, 8], dtype=torch.int32)
ROWS = Q.flatten(0, 1)
RECORDED = [line for line in (FA2 + FA3).splitlines() if line]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda line: line.partition("(")[0])
def test_signatures(recorded):
    module, *path = recorded.partition("(")[0].split(".")
    found = importlib.import_module(f"flashsci.compat.flash_attn.{module}")
    for name in path:
        found = getattr(found, name)
    signature = inspect.signature(found)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    signature = signature.replace(parameters=plain, return_annotation=signature.empty)
    assert ".".join([module, *path]) + str(signature) == recorded


def seen(seq_q, seq_k, causal=False, window=(-1, -1)):
    """Which keys a query sees, by the words of flash_attn: bool [Sq, Sk]."""
    i, j = torch.arange(seq_q)[:, None] + seq_k - seq_q, torch.arange(seq_k)
    left, right = window[0], 0 if causal else window[1]
    mask = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if left >= 0:
        mask &= j >= i - left
    return mask & (j <= i + right) if right >= 0 else mask


def heads_first(**tensors):
    return {name: x.transpose(1, 2) for name, x in tensors.items()}


def gradients(out, dout, **leaves):
    found = torch.autograd.grad(out, list(leaves.values()), dout)
    return {f"d{name}": x for name, x in zip(leaves, found, strict=True)}


CALLS = {
    "full": {},
    "causal": dict(causal=True),
    "causal-window": dict(causal=True, window_size=(2, 2)),
    "window": dict(window_size=(3, 1)),
    "right": dict(window_size=(-1, 1)),
    "list": dict(window_size=[1, 0]),
    "softcap": dict(softcap=2.0, causal=True),
    "scale": dict(softmax_scale=0.3, deterministic=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lengths", [(7, 7), (4, 9), (9, 4)])
@pytest.mark.parametrize("call", CALLS)
def test_dense(call, lengths, dtype):
    (seq_q, seq_k), options = lengths, CALLS[call]
    q = torch.randn(2, seq_q, 4, 8).to(dtype).requires_grad_()
    k, v = (torch.randn(2, seq_k, 2, 8).to(dtype).requires_grad_() for _ in range(2))
    dout = torch.randn(2, seq_q, 4, 8).to(dtype)
    mask = seen(seq_q, seq_k, options.get("causal", False), options.get("window_size", (-1, -1)))
    judge = Judge(
        Inputs(
            **heads_first(q=q, k=k, v=v, dout=dout),
            mask=mask,
            options=dict(scale=options.get("softmax_scale"), softcap=options.get("softcap")),
        ),
        fused=False,
    )
    out, lse, probabilities = fa2.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert probabilities is None and out.is_contiguous()
    assert torch.equal(lse == torch.inf, (~mask.any(1)).expand_as(lse)), "flash_attn's sign"
    found = heads_first(out=out, **gradients(out, dout, q=q, k=k, v=v))
    judge.require(found | dict(lse=lse.masked_fill(lse == torch.inf, -torch.inf)))
    again, lse = fa3.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    judge.require(heads_first(out=again) | dict(lse=lse))
    for alone in (fa2.flash_attn_func(q, k, v, **options), fa3.flash_attn_func(q, k, v, **options)):
        judge.require(heads_first(out=alone, **gradients(alone, dout, q=q, k=k, v=v)))


def packed(lens_q, lens_k, *shape, dtype=torch.float32):
    """q, k, v, dout and offsets of packed sequences; shape is (Hq, Hk, D)."""
    heads_q, heads_k, dim = shape
    q, dout = (torch.randn(sum(lens_q), heads_q, dim, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(sum(lens_k), heads_k, dim, dtype=dtype) for _ in range(2))
    offsets = [pad(torch.tensor(x).cumsum(0), (1, 0)).to(torch.int32) for x in (lens_q, lens_k)]
    return *(x.requires_grad_() for x in (q, k, v)), dout, *offsets


def pairs(blocks):
    """Bool or float blocks [Sq, Sk] (or [H, Sq, Sk]) as a bias per pair."""
    added = [torch.zeros(x.shape).masked_fill(~x, -torch.inf) if x.dtype == torch.bool else x for x in blocks]
    return torch.cat([x.expand(1, *x.shape).flatten(1) if x.dim() == 2 else x.flatten(1) for x in added], 1)


LENS = [(5, 1, 0, 4), (3, 6, 2, 4)]


@pytest.mark.parametrize("call", CALLS)
def test_varlen(call):
    options = CALLS[call]
    q, k, v, dout, cu_q, cu_k = packed(*LENS, 4, 2, 8)
    window = options.get("window_size", (-1, -1))
    masks = [seen(*n, options.get("causal", False), window) for n in zip(*LENS, strict=True)]
    inputs = Inputs(
        q, k, v, dout=dout, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, bias=pairs(masks), bias_grad=False,
        options=dict(scale=options.get("softmax_scale"), softcap=options.get("softcap")),
    )  # fmt: skip
    arguments = q, k, v, cu_q, cu_k, 5, torch.tensor(6)
    out, lse, _ = fa2.flash_attn_varlen_func(*arguments, **options, return_attn_probs=True)
    found = dict(out=out, lse=lse.masked_fill(lse == torch.inf, -torch.inf))
    Judge(inputs, fused=False).require(found | gradients(out, dout, q=q, k=k, v=v))
    assert torch.equal(fa2.flash_attn_varlen_func(*arguments, **options), out)
    assert torch.equal(fa3.flash_attn_varlen_func(*arguments, **options), out)
    again, lse = fa3.flash_attn_varlen_func(*arguments, **options, return_attn_probs=True)
    assert torch.equal(again, out) and torch.equal(lse, found["lse"])


def test_head_dims_of_q_and_v_may_differ():
    q, k, v = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 3)
    Judge(Inputs(**heads_first(q=q, k=k, v=v)), fused=False).require(heads_first(out=fa2.flash_attn_func(q, k, v)))


@pytest.mark.parametrize("module", [fa2, fa3])
def test_qkv_in_one_tensor(module):
    qkv = torch.randn(2, 6, 3, 4, 8, requires_grad=True)
    dout = torch.randn(2, 6, 4, 8)
    out = module.flash_attn_func(*qkv.unbind(2), causal=True)
    together = module.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(together, out) and together.is_contiguous()
    (expected,) = torch.autograd.grad(out, qkv, dout)
    (found,) = torch.autograd.grad(together, qkv, dout)
    assert torch.equal(found, expected)


def test_grouped_heads_in_one_tensor():
    qkv = torch.randn(2, 6, 4 + 2 + 2, 8)
    found = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    assert torch.equal(found, fa3.flash_attn_func(*qkv.split((4, 2, 2), 2), causal=True))


def test_kv_in_one_tensor():
    q, kv = torch.randn(2, 3, 4, 8), torch.randn(2, 6, 2, 2, 8)
    found = fa2.flash_attn_kvpacked_func(q, kv, window_size=(2, 0))
    assert torch.equal(found, fa2.flash_attn_func(q, *kv.unbind(2), window_size=(2, 0)))


def test_packed_in_one_tensor():
    q, k, v, _, cu_q, cu_k = packed(*LENS, 4, 2, 8)
    found = fa2.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), cu_q, cu_k, 5, 6, causal=True)
    assert torch.equal(found, fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, causal=True))
    qkv = torch.randn(10, 3, 4, 8)
    found = fa2.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 5, softcap=3.0)
    same = (*qkv.unbind(1), cu_q, cu_q, 5, 5)
    assert torch.equal(found, fa2.flash_attn_varlen_func(*same, softcap=3.0))


def test_dropout(seed):
    q, k, v = (torch.randn(2, 6, 2, 8, requires_grad=True) for _ in range(3))
    dout = torch.randn(2, 6, 2, 8)
    torch.manual_seed(seed)
    drawn = draw_seed(q.device)
    torch.manual_seed(seed)
    out = fa2.flash_attn_func(q, k, v, 0.3)
    judge = Judge(
        Inputs(
            **heads_first(q=q, k=k, v=v, dout=dout),
            dropout_seed=drawn,
            options=dict(dropout_p=0.3),
        ),
        fused=False,
    )
    judge.require(heads_first(out=out, **gradients(out, dout, q=q, k=k, v=v)))


def test_lse_has_the_gradient_that_flash_attn_ignores():
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
    dlse = torch.randn(1, 2, 5)
    lse = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[1]
    inputs = Inputs(**heads_first(q=q, k=k, v=v, dout=torch.zeros(1, 5, 2, 8)), dlse=dlse, mask=seen(5, 5, True))
    found = torch.autograd.grad(lse, (q, k), dlse)
    Judge(inputs, fused=False).require(heads_first(dq=found[0], dk=found[1]))


# ALiBi


def alibi(slopes, seq_q, seq_k):
    """The bias that the words of flash_attn name, [*slopes, Sq, Sk]."""
    i, j = torch.arange(seq_q)[:, None] + seq_k - seq_q, torch.arange(seq_k)
    return -slopes[..., None, None] * (i - j).abs()


ALIBI_OPTIONS = [dict(causal=True), dict(window_size=(3, 0)), dict(), dict(window_size=(5, 2))]


@pytest.mark.parametrize("options", ALIBI_OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_alibi(shape, dtype, options):
    q = torch.randn(2, 5, 4, 8).to(dtype).requires_grad_()
    k, v = (torch.randn(2, 9, 2, 8).to(dtype).requires_grad_() for _ in range(2))
    dout, slopes = torch.randn(2, 5, 4, 8).to(dtype), torch.rand(shape)
    out = fa2.flash_attn_func(q, k, v, **options, alibi_slopes=slopes)
    found = heads_first(out=out, **gradients(out, dout, q=q, k=k, v=v))
    mask = seen(5, 9, options.get("causal", False), options.get("window_size", (-1, -1)))
    wide = torch.promote_types(dtype, torch.float32)
    bias = alibi(slopes.to(wide), 5, 9)
    inputs = Inputs(**heads_first(q=q, k=k, v=v, dout=dout), bias=bias, mask=mask, bias_grad=False)
    Judge(inputs, fused=False).require(found)


@pytest.mark.parametrize("shape", [(4,), (4, 4)], ids=str)
def test_packed_alibi(shape):
    q, k, v, dout, cu_q, cu_k = packed(*LENS, 4, 2, 8, dtype=torch.float64)
    slopes = torch.rand(shape)
    out = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, causal=True, alibi_slopes=slopes)
    per_sequence = slopes.double().expand(4, 4)
    blocks = [
        alibi(per_sequence[n], *lens).masked_fill(~seen(*lens, True), -torch.inf)
        for n, lens in enumerate(zip(*LENS, strict=True))
    ]
    inputs = Inputs(q, k, v, dout=dout, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, bias=pairs(blocks), bias_grad=False)
    found = dict(out=out, **gradients(out, dout, q=q, k=k, v=v))
    Judge(inputs, fused=False).require(found)


def test_lse_beside_alibi_that_sees_both_sides():
    q, k, v = torch.randn(2, 5, 4, 8).double(), *torch.randn(2, 2, 9, 4, 8).double()
    slopes = torch.rand(4)
    _, lse, _ = fa2.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5 + alibi(slopes, 5, 9)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-12)


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(causal=True, return_attn_probs=True), NotImplementedError, "no lse"),
        (dict(window_size=(3, 0), return_attn_probs=True), NotImplementedError, "no lse"),
        (dict(causal=True, alibi_slopes=torch.ones(3)), ValueError, r"Hq\] = \[2, 4\]"),
        (dict(causal=True, alibi_slopes=torch.ones(4).half()), TypeError, "must be float32"),
        (dict(causal=True, alibi_slopes=0.5), TypeError, "must be a torch.Tensor"),
    ],
    ids=str,
)
def test_alibi_refused(options, error, words):
    options = dict(alibi_slopes=torch.rand(4)) | options
    q = torch.randn(2, 6, 4, 8).to(options.pop("dtype", torch.float16))
    with pytest.raises(error, match=words):
        fa2.flash_attn_func(q, q, q, **options)
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    with pytest.raises(error, match=words):
        fa2.flash_attn_varlen_func(*[q.flatten(0, 1)] * 3, cu, cu, 6, 6, **options)


# A cache


def cached_rows(batch, capacity, heads, dim, kind):
    """A cache [B, Sc, Hk, D] in one of the layouts that clients have, filled with NaN."""
    shape = {
        "contiguous": (batch, capacity, heads, dim),
        "sliced": (batch, capacity + 3, heads, dim),
        "heads_first": (batch, heads, capacity, dim),
        "rows_first": (capacity, batch, heads, dim),
    }[kind]
    whole = torch.full(shape, torch.nan)
    return {
        "contiguous": whole,
        "sliced": whole[:, 1:-2],
        "heads_first": whole.transpose(1, 2),
        "rows_first": whole.transpose(0, 1),
    }[kind]


LAYOUTS = ["contiguous", "sliced", "heads_first", "rows_first"]
CACHED = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(3, 1)),
    "softcap": dict(softcap=2.0, softmax_scale=0.3, causal=True),
    "leftpad": dict(leftpad=True, causal=True),
    "entries": dict(entries=True, causal=True),
    "entries-leftpad": dict(leftpad=True, entries=True, causal=True, layout="sliced"),
    "int": dict(lengths=4, causal=True),
    "int-leftpad": dict(lengths=4, causal=True, leftpad=True),
    "none": dict(lengths=None, new=0),
    "no-new": dict(new=0, causal=True),
    "one": dict(seq_q=1, new=1),
    "interleaved": dict(rotary=True, causal=True),
    "halves": dict(rotary=True, causal=True, rotary_interleaved=False, leftpad=True),
    "rotary-full": dict(rotary=True, entries=True),
    "rotary-window": dict(rotary=True, window_size=(2, -1), lengths=4),
    "rotary-wide": dict(rotary=True, window_size=(12, -1)),
    "more-new": dict(seq_q=2, new=5, causal=True),
    **{layout: dict(layout=layout, causal=True) for layout in LAYOUTS},
    "mixed": dict(layout="sliced", layout_v="heads_first", causal=True),
}


def rotated(x, position, angles, interleaved):
    """x [S, H, D] in fp64 turned by the angles of its positions: complex numbers, for pairs of the first R dims."""
    x, half = x.double(), angles.shape[1]
    turned = x[..., : 2 * half]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
    product = torch.complex(a, b) * torch.polar(torch.ones(1).double(), angles[position])[:, None]
    a, b = product.real, product.imag
    pair = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((pair, x[..., 2 * half :]), -1)


@pytest.mark.parametrize("name", CACHED)
def test_cache(name):
    options = dict(CACHED[name])
    lengths = options.pop("lengths", torch.tensor([4, 0, 6], dtype=torch.int32))
    seq_q, new = options.pop("seq_q", 3), options.pop("new", 3)
    layout = options.pop("layout", "contiguous")
    layouts = layout, options.pop("layout_v", layout)
    with_entries, with_leftpad = options.pop("entries", False), options.pop("leftpad", False)
    batch, capacity, heads_q, heads_k, dim, dim_v = 3, 11, 4, 2, 8, 5
    count = 5 if with_entries else batch
    entries = torch.tensor([3, 0, 4], dtype=torch.int32) if with_entries else None
    leftpad = torch.tensor([2, 0, 1], dtype=torch.int32) if with_leftpad else None
    caches = [cached_rows(count, capacity, heads_k, d, kind) for d, kind in zip((dim, dim_v), layouts, strict=True)]
    q, k, v = (
        torch.randn(batch, s, h, d) for s, h, d in ((seq_q, heads_q, dim), (new, heads_k, dim), (new, heads_k, dim_v))
    )
    used = [capacity] * batch if lengths is None else torch.as_tensor(lengths).expand(batch).tolist()
    first = [0] * batch if leftpad is None else leftpad.tolist()
    first = [min(f, n) for f, n in zip(first, used, strict=True)]
    if leftpad is not None:
        leftpad = torch.tensor(first, dtype=torch.int32)
    rows = list(range(batch)) if entries is None else entries.tolist()
    for n, row in enumerate(rows):  # only what is in use holds numbers
        for x in caches:
            x[row, first[n] : used[n]] = torch.randn_like(x[row, first[n] : used[n]])
    arguments, rotary = {}, options.pop("rotary", False)
    angles = torch.outer(torch.arange(20.0), torch.tensor([1.0, 0.3, 0.1])).double()
    if rotary:
        arguments.update(rotary_cos=angles.cos().float(), rotary_sin=angles.sin().float())
    interleaved = options.get("rotary_interleaved", True)
    before = [x.clone() for x in caches]
    written = dict(k=k, v=v) if new else {}
    out, lse = fa2.flash_attn_with_kvcache(
        q, *caches, **written, **arguments, cache_seqlens=lengths, cache_batch_idx=entries, cache_leftpad=leftpad,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    causal, window = options.get("causal", False), options.get("window_size", (-1, -1))
    for n, row in enumerate(rows):
        position = torch.arange(used[n], used[n] + new)
        turned_q, turned_k = q[n], k[n]
        if rotary:
            turned_k = rotated(k[n], position, angles, interleaved)
            local = causal or any(0 <= side < capacity for side in window)
            places = used[n] + torch.arange(seq_q) * local
            turned_q = rotated(q[n], places, angles, interleaved)
        kept = torch.ones(capacity, dtype=torch.bool).index_fill(0, position, False)
        for x, old, fresh in zip(caches, before, (turned_k, v[n]), strict=True):
            torch.testing.assert_close(x[row, position].double(), fresh.double(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(x[row, kept], old[row, kept], rtol=0, atol=0, equal_nan=True)
        keys, values = (x[row, first[n] : used[n] + new] for x in caches)
        judged = (x.float().transpose(0, 1) for x in (turned_q, keys, values))
        Judge(
            Inputs(
                *judged,
                mask=seen(seq_q, keys.shape[0], causal, window),
                options=dict(scale=options.get("softmax_scale"), softcap=options.get("softcap")),
            ),
            fused=False,
        ).require(dict(out=out[n].transpose(0, 1), lse=lse[n].masked_fill(lse[n] == torch.inf, -torch.inf)))
    for row in set(range(count)) - set(rows):
        assert all(x[row].isnan().all() for x in caches)
    again = fa3.flash_attn_with_kvcache(
        q, *before, **written, **arguments, cache_seqlens=lengths, cache_batch_idx=entries, cache_leftpad=leftpad,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    assert torch.equal(again[0], out) and again[2:] == (None, None)
    assert torch.equal(again[1], lse.masked_fill(lse == torch.inf, -torch.inf))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_is_copied_only_where_it_is_no_rows(layout):
    k = cached_rows(3, 11, 2, 8, layout)
    k_rows, _, _ = cache._as_rows(k, cached_rows(3, 11, 2, 5, layout))
    shared = k_rows.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert shared == (layout != "rows_first")
    k.copy_(torch.randn(k.shape))
    k_rows, v_rows, step = cache._as_rows(k, k)
    for n in range(3):
        assert torch.equal(k_rows[n * step : n * step + 11], k[n])
        assert torch.equal(v_rows[n * step : n * step + 11], k[n])


@pytest.mark.parametrize("lengths", [torch.tensor([4, 0, 6], dtype=torch.int32), 5])
@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=str)
def test_cache_with_alibi(shape, lengths):
    q = torch.randn(3, 2, 4, 8).half()
    k_cache, v_cache = torch.randn(2, 3, 9, 4, 8).half()
    k, v = torch.randn(2, 3, 2, 4, 8).half()
    slopes = torch.rand(shape)
    out = fa2.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, alibi_slopes=slopes
    )
    for n, used in enumerate(torch.as_tensor(lengths).expand(3).tolist()):
        parts = (x.transpose(0, 1) for x in (q[n], k_cache[n, : used + 2], v_cache[n, : used + 2]))
        bias = alibi(slopes.expand(3, 4)[n], 2, used + 2)
        inputs = Inputs(*parts, bias=bias, mask=seen(2, used + 2, True))
        Judge(inputs, fused=False).require(dict(out=out[n].transpose(0, 1)))


def test_cache_of_the_triton_kernels():
    """Gaps of another backend, which reads whole tiles: NaN in rows that are not in use stays there."""
    pytest.importorskip("triton")
    k_cache, v_cache = (cached_rows(2, 9, 1, 16, "contiguous") for _ in range(2))
    q, k, v = torch.randn(3, 2, 2, 1, 16).unbind(0)
    for x in (k_cache, v_cache):
        x[0, :4] = torch.randn(4, 1, 16)
    lengths = torch.tensor([4, 0], dtype=torch.int32)
    with flashsci.use_backend("triton"):
        out = fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    for n, used in enumerate(lengths.tolist()):
        parts = (x.transpose(0, 1) for x in (q[n], k_cache[n, : used + 2], v_cache[n, : used + 2]))
        inputs = Inputs(*parts, mask=seen(2, used + 2, True))
        Judge(inputs).require(dict(out=out[n].transpose(0, 1)))


def test_cache_has_no_gradient():
    q = torch.randn(1, 1, 2, 8, requires_grad=True)
    k_cache = torch.randn(1, 4, 2, 8, requires_grad=True)
    out = fa2.flash_attn_with_kvcache(q, k_cache, k_cache, q, q, cache_seqlens=2)
    assert not out.requires_grad, "as flash_attn"


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(v=None), "together"),
        (dict(cache_seqlens=None), "cache_seqlens"),
        (dict(cache_seqlens=8), "holds 9 rows, 10 are needed"),
        (dict(k=None, v=None, cache_seqlens=10), "holds 9 rows, 10 are needed"),
        (dict(q=torch.randn(3, 2, 4, 8)), "cache_batch_idx"),
        (dict(q=torch.randn(2, 4, 8)), r"q must be \[B, S, H, D\]"),
        (dict(v_cache=torch.randn(2, 8, 4, 8)), "k_cache and v_cache"),
        (dict(v=torch.randn(2, 1, 4, 8)), "same rows"),
        (dict(rotary_cos=torch.ones(9, 2)), "go together"),
        (dict(rotary_cos=torch.ones(9, 2), rotary_sin=torch.ones(9, 2), k=None, v=None), "new k and v"),
        (dict(rotary_cos=torch.ones(4, 2), rotary_sin=torch.ones(4, 2)), "hold 4 positions, 5 are"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_cache_errors(change, words):
    x, new = torch.randn(2, 9, 4, 8), torch.randn(2, 2, 4, 8)
    arguments = dict(q=new, k_cache=x, v_cache=x, k=new, v=new, cache_seqlens=3) | change
    with pytest.raises(ValueError, match=words):
        fa2.flash_attn_with_kvcache(**arguments)


# Forward and backward by themselves


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("lengths", [(4, 9), (9, 4)])
def test_steps(lengths, dropout_p):
    (seq_q, seq_k), options = lengths, (0.4, True, 3, -1, 2.0, None)
    q, dout = torch.randn(2, 2, seq_q, 4, 8).unbind(0)
    k, v = torch.randn(2, 2, seq_k, 2, 8).unbind(0)
    out, lse, none, state = steps._flash_attn_forward(q, k, v, dropout_p, *options, False)
    assert none is None and (state.shape, state.dtype) == ((2,), torch.int64)
    into = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    steps._flash_attn_backward(dout, q, k, v, out, lse, *into, dropout_p, *options, True, rng_state=state)
    inputs = Inputs(
        **heads_first(q=q, k=k, v=v, dout=dout),
        mask=seen(seq_q, seq_k, True, (3, -1)),
        dropout_seed=state,
        options=dict(scale=0.4, softcap=2.0, dropout_p=dropout_p),
    )
    found = heads_first(out=out, **dict(zip(("dq", "dk", "dv"), into, strict=True)))
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    Judge(inputs, fused=False).require(found | dict(lse=lse))


def test_packed_steps():
    q, k, v, dout, *offsets = packed(*LENS, 4, 2, 8)
    rest = (*offsets, 5, 6, 0.0, None, True)
    out, lse, _, state = steps._flash_attn_varlen_forward(q, k, v, *rest)
    assert not out.requires_grad
    into = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    steps._flash_attn_varlen_backward(dout, q, k, v, out, lse, *into, *rest, -1, -1, 0.0, None, False, rng_state=state)
    masks = [seen(*n, True) for n in zip(*LENS, strict=True)]
    inputs = Inputs(
        q, k, v, dout=dout, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], bias=pairs(masks), bias_grad=False
    )
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    found = dict(zip(("dq", "dk", "dv"), into, strict=True), out=out, lse=lse)
    Judge(inputs, fused=False).require(found)


def test_ring_of_steps():
    """As clients do it: blocks of keys one by one, merged by lse; their gradients under the merged out and lse."""
    q, dout = torch.randn(2, 2, 6, 4, 8).unbind(0)
    k, v = torch.randn(2, 2, 6, 2, 8).unbind(0)
    blocks = [(k[:, 3:], v[:, 3:]), (k[:, :3], v[:, :3])]
    tail = (None, False, -1, -1, 0.0, None)
    found = [steps._wrapped_flash_attn_forward(q, *x, 0.0, *tail, False)[:2] for x in blocks]
    (first, lse_1), (second, lse_2) = found
    share = torch.sigmoid(lse_2 - lse_1).transpose(1, 2)[..., None]
    out, lse = first + share * (second - first), torch.logaddexp(lse_1, lse_2)
    dq, parts = torch.zeros_like(q), []
    for x in blocks:
        into = [torch.empty_like(y) for y in (q, *x)]
        steps._wrapped_flash_attn_backward(dout, q, *x, out, lse, *into, 0.0, *tail, False)
        dq += into[0]
        parts.insert(0, into[1:])
    dk, dv = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    results = heads_first(out=out, dq=dq, dk=dk, dv=dv) | dict(lse=lse)
    Judge(Inputs(**heads_first(q=q, k=k, v=v, dout=dout)), fused=False).require(results)


@pytest.mark.parametrize("forward", [True, False])
def test_steps_take_no_alibi(forward):
    options = (0.0, None, True, -1, -1, 0.0, torch.rand(2))
    with pytest.raises(NotImplementedError, match="alibi_slopes: build the bias"):
        if forward:
            steps._flash_attn_forward(Q, Q, Q, *options, False)
        else:
            steps._flash_attn_backward(*[Q] * 5, torch.zeros(2, 2, 4), Q, Q, Q, *options, False)


@pytest.mark.parametrize("asked, given", [(True, True), (False, None)])
def test_what_flashsci_is_asked_for(asked, given, monkeypatch):
    """False asks for nothing: then torch's own switch decides."""
    found = []

    def stub(q, *_, **options):
        found.append(options["deterministic"])
        return q

    def backward(_, q, k, v, out, lse, **options):
        found.append(options["deterministic"])
        assert lse.eq(-torch.inf).all(), "as flashsci marks rows that see no key"
        return q, k, v, None

    for name in ("attention", "varlen_attention"):
        monkeypatch.setattr(fa2, name, stub)
    monkeypatch.setattr(steps, "attention_backward", backward)
    rows, lse, into = (
        (ROWS, ROWS, ROWS, CU, CU, 4, 4),
        torch.full((2, 2, 4), torch.inf),
        torch.zeros(3, *Q.shape),
    )
    for module in (fa2, fa3):
        module.flash_attn_func(Q, Q, Q, deterministic=asked)
        module.flash_attn_qkvpacked_func(torch.stack((Q, Q, Q), 2), deterministic=asked)
        module.flash_attn_varlen_func(*rows, deterministic=asked)
    fa2.flash_attn_kvpacked_func(Q, torch.stack((Q, Q), 2), deterministic=asked)
    tail = (0.0, None, False, -1, -1, 0.0, None, asked)
    steps._flash_attn_backward(*[Q] * 5, lse, *into, *tail)
    steps._flash_attn_varlen_backward(*[ROWS] * 5, lse, *into.flatten(1, 2), CU, CU, 4, 4, *tail)
    assert found == [given] * 9


# What is refused, and what it costs


def test_seqused_k_hides_keys_and_their_gradients():
    q, k, v, dout, cu_q, cu_k = packed(*LENS, 4, 2, 8)
    used = torch.tensor([2, 1, 0, 3], dtype=torch.int32)
    masks = []
    for (n, m), u in zip(zip(*LENS, strict=True), used.tolist(), strict=True):
        masks.append(pad(seen(n, u, True), (0, m - u)))
    inputs = Inputs(q, k, v, dout=dout, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, bias=pairs(masks), bias_grad=False)
    out = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 3, seqused_k=used, causal=True)
    found = dict(out=out, **gradients(out, dout, q=q, k=k, v=v))
    Judge(inputs, fused=False).require(found)


TAKEN = {
    fa3.flash_attn_func: ((Q, Q, Q), "qv attention_chunk"),
    fa3.flash_attn_qkvpacked_func: ((torch.stack((Q, Q, Q), 2),), "attention_chunk"),
    fa3.flash_attn_varlen_func: ((ROWS, ROWS, ROWS, CU, CU, 4, 4), "qv attention_chunk"),
    fa3.flash_attn_with_kvcache: ((Q, Q, Q), "qv q_descale attention_chunk"),
    steps._flash_attn_varlen_forward: (
        (ROWS, ROWS, ROWS, CU, CU, 4, 4, 0.0, None, False),
        "alibi_slopes zero_tensors",
    ),
}
REFUSED = [(f, name) for f, (_, names) in TAKEN.items() for name in names.split()]


@pytest.mark.parametrize("function, name", REFUSED, ids=lambda x: getattr(x, "__qualname__", x))
def test_refused_by_name(function, name):
    arguments = TAKEN[function][0]
    function(*arguments)
    value = {"attention_chunk": 4, "zero_tensors": True}.get(name, torch.ones(2))
    with pytest.raises(NotImplementedError, match=rf"does not take {name}: \w+"):
        function(*arguments, **{name: value})


def test_every_argument_is_used_refused_or_known_to_plan_only():
    """No argument is taken and then ignored: each is read where the function's work is done, or named above."""
    plans = {"num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"}
    for module in (fa2, fa3, steps):
        for name, function in vars(module).items():
            if name.startswith(("flash_attn", "_flash_attn")):
                body = inspect.getsource(function).rpartition('"""')[2]
                unread = {p for p in inspect.signature(function).parameters if not re.search(rf"\b{p}\b", body)}
                assert unread <= (plans if module is not steps else {"return_softmax"}), name


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: fa2.flash_attn_func(ROWS, ROWS, ROWS), r"\[B, S, H, D\]"),
        (lambda: fa2.flash_attn_qkvpacked_func(Q), r"\[B, S, 3, H, D\]"),
        (lambda: fa2.flash_attn_kvpacked_func(Q, torch.stack((Q, Q, Q), 2)), r"\[B, S, 2, H, D\]"),
        (lambda: fa2.flash_attn_varlen_qkvpacked_func(ROWS, CU, 4), r"\[T, 3, H, D\]"),
        (lambda: fa3.flash_attn_qkvpacked_func(Q, num_heads_q=1), r"1 \+ 2 Hk"),
        (lambda: fa2.flash_attn_func(Q, Q, Q, window_size=(3,)), "window"),
        (lambda: fa2.flash_attn_func(Q, Q, Q, -0.5), "dropout_p"),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()


class Counter(torch.overrides.TorchFunctionMode):
    """Counts what PyTorch is asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "call, views",
    [
        (lambda m: m.flash_attn_func(Q, Q, Q, causal=True), ["transpose"] * 4),
        (
            lambda m: m.flash_attn_qkvpacked_func(torch.stack((Q, Q, Q), 2)),
            ["stack", "transpose", "unbind", "transpose"],
        ),
        (lambda m: m.flash_attn_varlen_func(ROWS, ROWS, ROWS, CU, CU, 4, 4), []),
    ],
    ids=["dense", "one tensor", "packed"],
)
@pytest.mark.parametrize("module", [fa2, fa3])
def test_a_call_costs_one_view_a_tensor(module, call, views, monkeypatch):
    monkeypatch.setattr(fa2, "attention", lambda q, *_, **__: q)
    monkeypatch.setattr(fa2, "varlen_attention", lambda q, *_, **__: q)
    with Counter() as counter:
        call(module)
    assert [n for n in counter.names if not n.startswith("__") and n not in ("dim", "shape")] == views


@pytest.mark.parametrize("module", ["fa2", "padding", "rotary", "stand_in"], ids=lambda name: f"examples of {name}")
def test_examples_in_docstrings(module):
    found = importlib.import_module(f"flashsci.compat.flash_attn.{module}")
    failed, tried = doctest.testmod(found)
    assert tried and not failed


@pytest.mark.slow
def test_compiled():
    def step(q, k, v):
        return fa2.flash_attn_func(q, k, v, causal=True, window_size=(3, 3), softcap=2.0)

    leaves = [torch.randn(2, 6, 2, 8, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(*leaves)
    plain = step(*leaves)
    assert torch.equal(compiled, plain)
    pairs_of = zip(*(torch.autograd.grad(x.sum(), leaves) for x in (compiled, plain)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs_of)
