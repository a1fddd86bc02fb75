"""flashsci.compat.xformers against the documented formula of memory_efficient_attention and of its biases."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flashsci
from flashsci.compat import xformers, xformers_bias
from flashsci.compat.xformers import (
    BlockDiagonalCausalMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LowerTriangularMask,
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
    merge_attentions,
)
from tests.support import standins

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INF = torch.inf
# xformers 0.0.35, ops/fmha/__init__.py and ops/fmha/attn_bias.py
CALL = "(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None)"
RECORDED = {
    "memory_efficient_attention": CALL,
    "memory_efficient_attention_forward": CALL,
    "memory_efficient_attention_forward_requires_grad": CALL,
    "merge_attentions": "(attn_split, lse_split, write_lse=True, output_dtype=None)",
    "LowerTriangularMask": "(device=None)",
    "LowerTriangularMaskWithTensorBias": "(bias)",
    "LowerTriangularFromBottomRightLocalAttentionMask": "(_window_size)",
    "LocalAttentionFromBottomRightMask": "(window_left, window_right)",
    "BlockDiagonalMask": "(q_seqinfo, k_seqinfo, _batch_sizes=None)",
    "BlockDiagonalCausalMask": "(q_seqinfo, k_seqinfo, _batch_sizes=None)",
    "BlockDiagonalCausalFromBottomRightMask": "(q_seqinfo, k_seqinfo, _batch_sizes=None)",
    "BlockDiagonalCausalLocalAttentionMask": "(q_seqinfo, k_seqinfo, _batch_sizes=None, _window_size=0)",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": "(q_seqinfo, k_seqinfo, _batch_sizes=None, _window_size=0)",
    "BlockDiagonalPaddedKeysMask": "(q_seqinfo, k_seqinfo)",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": "(q_seqinfo, k_seqinfo, causal_diagonal=None)",
    "BlockDiagonalLocalAttentionPaddedKeysMask": "(q_seqinfo, k_seqinfo, window_left, window_right)",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": "(q_seqinfo, k_seqinfo, _window_size)",
    "BlockDiagonalGappyKeysMask": "(q_seqinfo, k_seqinfo)",
    "BlockDiagonalCausalWithOffsetGappyKeysMask": "(q_seqinfo, k_seqinfo)",
}
METHODS = {
    "LowerTriangularMask.add_bias": "(self, bias)",
    "LowerTriangularFromBottomRightMask.make_local_attention": "(self, window_size)",
    "BlockDiagonalMask.from_seqlens": "(q_seqlen, kv_seqlen=None, *, device=None)",
    "BlockDiagonalMask.from_tensor_list": "(tensors)",
    "BlockDiagonalMask.from_tensor_lists_qkv": "(tensors_q, tensors_k, tensors_v=None)",
    "BlockDiagonalMask.split": "(self, tensor)",
    "BlockDiagonalMask.split_queries": "(self, tensor)",
    "BlockDiagonalMask.split_kv": "(self, tensor)",
    "BlockDiagonalMask.make_causal": "(self)",
    "BlockDiagonalMask.make_causal_from_bottomright": "(self)",
    "BlockDiagonalMask.make_local_attention": "(self, window_size)",
    "BlockDiagonalMask.make_local_attention_from_bottomright": "(self, window_size)",
    "BlockDiagonalPaddedKeysMask.from_seqlens": "(q_seqlen, kv_padding, kv_seqlen, causal_diagonal=None, *, device=None)",
    "BlockDiagonalPaddedKeysMask.make_local_attention": "(self, window_left, window_right)",
    "BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local": "(q_seqlen, kv_padding, kv_seqlen, window_left, window_right)",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local": "(q_seqlen, kv_padding, kv_seqlen, window_size)",
    "BlockDiagonalGappyKeysMask.from_seqlens": "(q_seqlen, kv_seqstarts, kv_seqlen, *, device=None)",
    "AttentionBias.to": "(self, device)",
}


@pytest.mark.parametrize("name", [*RECORDED, *METHODS])
def test_signatures(name):
    found = xformers
    for part in name.split("."):
        found = getattr(found, part)
    standins.same_signature(found, f"x{(RECORDED | METHODS)[name]}")


def test_every_bias_has_a_meaning():
    biases = {n for n in xformers.__all__ if isinstance(getattr(xformers, n), type)}
    assert biases - {"AttentionBias"} == set(xformers_bias.BANDS)


# --- Values and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_plain_calls(backend, dtype):
    standins.one_sequence(backend, "cpu", dtype, scale=0.3)


@pytest.mark.parametrize("band", standins.BANDS)
@pytest.mark.parametrize("lengths", [(6, 9), (9, 6), (5, 5)])
def test_bands(band, lengths):
    standins.one_sequence("triton", "cpu", FP32, band, lengths)


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
@pytest.mark.parametrize(
    "options",
    [{}, {"band": "LowerTriangularMask"}, {"tensor": True}, {"tensor": True, "band": "LowerTriangularMask"}],
    ids=str,
)
def test_dims(heads, options):
    standins.one_sequence("triton", "cpu", FP32, heads=heads, odd=True, **options)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_tensor_bias_with_a_mask_as_numbers(dtype):
    standins.one_sequence("triton", "cpu", dtype, tensor=True)


@pytest.mark.parametrize("name", standins.PACKED)
def test_packed(name):
    standins.packed("triton", "cpu", FP32, name)


@pytest.mark.parametrize("name", ["BlockDiagonalCausalMask", "BlockDiagonalPaddedKeysMask"])
@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_packed_groups(name, groups, shared):
    standins.packed("reference", "cpu", BF16, name, groups, shared)


@pytest.mark.parametrize("dims", [4, 5])
def test_heads_that_share_by_expand_share_in_the_kernel(dims, monkeypatch):
    seen = []

    def spied(q, k, v, **options):
        seen.append((q.shape[-3], k.shape[-3]))
        return flashsci.attention(q, k, v, **options)

    monkeypatch.setattr(xformers, "attention", spied)
    groups = (2,) if dims == 5 else ()
    q = torch.randn(1, 5, *groups, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 7, *groups, 1, 8, dtype=torch.float64, requires_grad=True)
    wide = [x.expand(1, 7, *groups, 4, 8) for x in (k, v)]
    found, truth = memory_efficient_attention(q, *wide), standins.xformers_formula(q, *wide)
    assert seen == [(4, 1)]
    torch.testing.assert_close(found, truth)
    dout = torch.randn_like(found)
    for a, b in zip(*(torch.autograd.grad(x, (k, v), dout) for x in (found, truth)), strict=True):
        torch.testing.assert_close(a, b)


def test_second_order():
    q, k, v = (torch.randn(1, 3, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = BlockDiagonalMask.from_seqlens([2, 1], device="cpu")
    assert torch.autograd.gradgradcheck(lambda *x: memory_efficient_attention(*x, bias), (q, k, v))


@pytest.mark.parametrize("lengths", [None, [20, 30]])
def test_dropout(lengths):
    q, k, v = torch.randn(3, 1, 50, 2, 8)
    bias = None if lengths is None else BlockDiagonalMask.from_seqlens(lengths, device="cpu")
    torch.manual_seed(1)
    first = memory_efficient_attention(q, k, v, bias, p=0.5)
    torch.manual_seed(1)
    torch.testing.assert_close(memory_efficient_attention(q, k, v, bias, p=0.5), first)
    assert not torch.allclose(first, memory_efficient_attention(q, k, v, bias), atol=0.1)


@pytest.mark.parametrize("name", ["tensor", "LowerTriangularMask", "BlockDiagonalMask", "BlockDiagonalPaddedKeysMask"])
def test_under_compile(name):
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    bias = torch.randn(1, 2, 8, 8, requires_grad=True) if name == "tensor" else None
    if name == "LowerTriangularMask":
        bias = LowerTriangularMask()
    keys = q
    if name in standins.PACKED:
        bias, _ = standins.packed_biases("cpu")[name]
        keys = torch.randn(1, bias.k_seqinfo.seqstart_py[-1], 2, 16, requires_grad=True)
    compiled = torch.compile(memory_efficient_attention, fullgraph=True, backend="aot_eager")
    with flashsci.use_backend("triton" if name in standins.PACKED else "auto"):
        found, truth = (f(q, keys, keys, bias) for f in (compiled, memory_efficient_attention))
        torch.testing.assert_close(found, truth)
        (a,), (b,) = (torch.autograd.grad(x.sum(), q) for x in (found, truth))
    torch.testing.assert_close(a, b)


def test_nothing_at_all():
    bias = BlockDiagonalMask.from_seqlens([], device="cpu")
    x = torch.randn(1, 0, 2, 8, requires_grad=True)
    memory_efficient_attention(x, x, x, bias).sum().backward()
    assert x.grad.shape == x.shape
    bias = BlockDiagonalMask.from_seqlens([2, 0], [0, 3], device="cpu")
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 3, 2, 8)
    assert memory_efficient_attention(q, k, k, bias).eq(0).all()


# --- Outside of autograd --------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [3, 4, 5])
def test_forward_and_lse(dims):
    shape = {3: (2, 5, 8), 4: (2, 5, 3, 8), 5: (2, 5, 2, 3, 8)}[dims]
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    out = memory_efficient_attention_forward(q, k, v)
    same, lse = memory_efficient_attention_forward_requires_grad(q, k, v)
    assert not out.requires_grad and not lse.requires_grad
    torch.testing.assert_close(out, standins.xformers_formula(q, k, v).detach())
    torch.testing.assert_close(same, out)
    heads = shape[2:-1] or (1,)
    scores = 8**-0.5 * q.view(2, 5, *heads, 8).movedim(1, -2) @ k.view(2, 5, *heads, 8).movedim(1, -2).mT
    torch.testing.assert_close(lse, scores.logsumexp(-1).detach())
    assert lse.shape == (2, *heads, 5)


@pytest.mark.parametrize("heads", [(3,), (2, 3)])
def test_lse_of_packed_queries(heads):
    q, k, v = torch.randn(3, 1, 7, *heads, 8)
    bias = BlockDiagonalCausalMask.from_seqlens([2, 5], device="cpu")
    out, lse = memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    mask = bias.materialize((7, 7))
    torch.testing.assert_close(out, standins.xformers_formula(q, k, v, mask))
    scores = 8**-0.5 * q.movedim(1, -2) @ k.movedim(1, -2).mT + mask
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    assert lse.shape == (1, *heads, 7)


@pytest.mark.parametrize("heads", [(3,), (2, 3)])
@pytest.mark.parametrize("stacked", [False, True])
def test_merged_parts_are_the_whole(heads, stacked):
    """The first query sees no key of the later parts."""
    q, k, v = torch.randn(3, 2, 6, *heads, 8)
    parts = []
    for first in (0, 2, 4):
        bias = torch.zeros(2, *heads, 6, 2)
        bias[..., 0, :] = -INF if first else 0
        parts.append(
            memory_efficient_attention_forward_requires_grad(q, k[:, first : first + 2], v[:, first : first + 2], bias)
        )
    outs, lses = (list(x) for x in zip(*parts, strict=True))
    if stacked:
        outs, lses = torch.stack(outs), torch.stack(lses)
    out, lse = merge_attentions(outs, lses)
    bias = torch.zeros(6, 6)
    bias[0, 2:] = -INF
    torch.testing.assert_close(out, standins.xformers_formula(q, k, v, bias))
    scores = 8**-0.5 * q.movedim(1, -2) @ k.movedim(1, -2).mT + bias
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    narrow, none = merge_attentions(outs, lses, write_lse=False, output_dtype=BF16)
    assert none is None and narrow.dtype == BF16
    torch.testing.assert_close(narrow, out.bfloat16())


def test_merging_is_differentiable():
    outs = torch.randn(3, 1, 2, 1, 2, dtype=torch.float64, requires_grad=True)
    lses = torch.randn(3, 1, 1, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: merge_attentions(*x), (outs, lses))


def test_rows_without_any_key_merge_to_nothing():
    outs = torch.zeros(2, 1, 3, 1, 4, requires_grad=True)
    lses = torch.tensor([-INF, 0.5, -INF]).expand(2, 1, 1, 3).clone()
    lses[1, ..., 1] = -INF
    out, lse = merge_attentions(outs, lses)
    assert out.eq(0).all() and torch.equal(lse.flatten(), torch.tensor([-INF, 0.5, -INF]))
    (found,) = torch.autograd.grad(out.sum(), outs)
    assert found.isfinite().all()


def test_parts_that_do_not_belong_together():
    outs, lses = torch.zeros(2, 1, 3, 1, 4), torch.zeros(2, 1, 1, 3)
    with pytest.raises(ValueError, match="same number of parts"):
        merge_attentions(outs, lses[:1])
    with pytest.raises(ValueError, match="each part must have"):
        merge_attentions([outs[0], outs[1, :, :2]], list(lses))
    with pytest.raises(ValueError, match="each part must have"):
        merge_attentions(outs, lses.transpose(2, 3))


# --- The biases -----------------------------------------------------------------------------------


def seen_by_hand(name, options, q, k, rows, keys):
    """Which key each query sees, pair by pair, from what xformers documents of a bias."""
    keep = torch.zeros(rows, keys, dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(q, k, strict=True):
        shift = (k1 - k0) - (q1 - q0) if options.get("align") else 0
        left, right = options.get("window", (keys, 0 if "causal" in options else keys))
        for i in range(q0, q1):
            for j in range(k0, k1):
                away = (j - k0) - (i - q0) - shift
                keep[i, j] = -left <= away <= right
    return keep


@pytest.mark.parametrize("name", [*standins.BANDS, *standins.PACKED])
def test_materialized(name):
    if name in standins.BANDS:
        make, options = standins.BANDS[name]
        bias, rows, keys = make(), 4, 6
        q, k = [(0, rows)], [(0, keys)]
    else:
        bias, options = standins.packed_biases("cpu")[name]
        rows, keys = bias.q_seqinfo.seqstart_py[-1], bias.k_seqinfo.seqstart_py[-1]
        starts, k = [0, 3, 4, 8], [(0, 5), (5, 7), (7, 11)]
        if "Padded" in name:
            k = [(0, 5), (6, 8), (12, 16)]
        if "Gappy" in name:
            k = [(4, 9), (1, 3), (9, 13)]
        q = list(itertools.pairwise(starts))
    keep = seen_by_hand(name, options, q, k, rows, keys)
    found = bias.materialize((2, 1, rows, keys), BF16)
    assert found.shape == (2, 1, rows, keys) and found.dtype == BF16
    assert torch.equal(found, torch.where(keep, 0.0, -INF).bfloat16().expand(2, 1, rows, keys))
    moved = bias.to("cpu")
    assert type(moved) is type(bias)
    assert torch.equal(moved.materialize((rows, keys)).isfinite(), keep)


def test_a_causal_mask_with_a_bias_materialized():
    bias = torch.randn(2, 3, 4, 4)
    found = LowerTriangularMask().add_bias(bias).to("cpu").materialize((2, 3, 4, 4))
    assert torch.equal(found, bias + torch.full((4, 4), -INF).triu(1))


def test_lists_of_tensors_and_back():
    tensors = [torch.randn(1, 3, 2, 4), torch.randn(2, 5, 2, 4), torch.randn(1, 1, 2, 4)]
    bias, joined = BlockDiagonalMask.from_tensor_list(tensors)
    assert joined.shape == (1, 14, 2, 4) and bias.q_seqinfo.seqstart_py == [0, 3, 8, 13, 14]
    assert bias.q_seqinfo.seqstart.tolist() == [0, 3, 8, 13, 14]
    assert (bias.q_seqinfo.min_seqlen, bias.q_seqinfo.max_seqlen) == (1, 5)
    for made in (bias, bias.make_causal(), bias.to("cpu")):
        for a, b in zip(made.split(joined), tensors, strict=True):
            assert torch.equal(a, b)
    values = [x[:, :2] for x in tensors]
    both, q, k, v = BlockDiagonalMask.from_tensor_lists_qkv(tensors, values, values)
    assert torch.equal(q, joined) and torch.equal(k, v)
    for a, b in zip(both.split_kv(k), values, strict=True):
        assert torch.equal(a, b)
    assert [x.shape[1] for x in both.split_queries(q)] == [3, 5, 1]
    assert BlockDiagonalMask.from_tensor_lists_qkv(tensors, values)[3] is None
    with pytest.raises(ValueError, match="split_queries or split_kv"):
        both.split(q)
    with pytest.raises(ValueError, match=r"must have shape \[1, 14, ...\]"):
        bias.split(joined[:, :-1])


def test_biases_refuse_what_has_no_meaning():
    blocks = BlockDiagonalMask.from_seqlens([2, 3], device="cpu")
    for make in (
        lambda: blocks.make_local_attention(0),
        lambda: blocks.make_local_attention_from_bottomright(0),
        lambda: xformers.LowerTriangularFromBottomRightMask().make_local_attention(0),
        lambda: xformers.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local([1], 2, [1], 0),
        lambda: xformers.LocalAttentionFromBottomRightMask(-1, 0),
        lambda: BlockDiagonalMask.from_seqlens([1], [1, 2]),
        lambda: BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], 3, [1, 4]),
        lambda: BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], 3, [1]),
        lambda: xformers.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [0, 3], [1, 1]),
        lambda: blocks.materialize((5, 6)),
    ):
        with pytest.raises(ValueError):
            make()


# --- Biases of xformers itself --------------------------------------------------------------------


def imitation(bias):
    """An object with the class's name and attributes, of no class of ours."""

    def copied(x):
        if not dataclasses.is_dataclass(x):
            return x
        fields = {f.name: copied(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return type(type(x).__name__, (SimpleNamespace,), {})(**fields)

    return copied(bias)


@pytest.mark.parametrize("name", standins.PACKED)
def test_imitations(name):
    standins.packed("reference", "cpu", FP32, name, imitate=imitation)


@pytest.fixture(scope="module")
def theirs():
    """The biases of the installed xformers: its one file, without what the package builds and registers."""
    found = importlib.util.find_spec("xformers")
    if found is None or found.origin is None:
        pytest.skip("xformers is not installed")
    file = Path(found.origin).parent / "ops" / "fmha" / "attn_bias.py"
    spec = importlib.util.spec_from_file_location("_xformers_attn_bias", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def of_xformers(theirs, bias):
    """The same bias, of their class."""
    fields = {f.name: getattr(bias, f.name) for f in dataclasses.fields(bias)} if dataclasses.is_dataclass(bias) else {}
    for name in ("q_seqinfo", "k_seqinfo"):
        if name in fields:
            fields[name] = getattr(theirs, type(fields[name]).__name__)(**vars(fields[name]))
    return getattr(theirs, type(bias).__name__)(**fields)


@pytest.mark.parametrize("name", standins.PACKED)
def test_packed_biases_of_xformers(theirs, name):
    standins.packed("reference", "cpu", FP32, name, imitate=lambda bias: of_xformers(theirs, bias))


@pytest.mark.parametrize("name", [*standins.BANDS, *standins.PACKED])
def test_materialized_like_those_of_xformers(theirs, name):
    if name in standins.BANDS:
        bias, shape = standins.BANDS[name][0](), (4, 6)
    else:
        bias, _ = standins.packed_biases("cpu")[name]
        shape = (bias.q_seqinfo.seqstart_py[-1], bias.k_seqinfo.seqstart_py[-1])
    found, truth = (x.materialize(shape) for x in (bias, of_xformers(theirs, bias)))
    assert torch.equal(found, truth)


# --- Refusals -------------------------------------------------------------------------------------


def test_what_is_not_supported_is_refused_by_name():
    q, k, v = torch.randn(3, 1, 6, 2, 8)
    with pytest.raises(flashsci.BackendError, match=r"op=.*flashsci\.use_backend"):
        memory_efficient_attention(q, k, v, op=("fw", "bw"))
    with pytest.raises(flashsci.BackendError, match=r"output_dtype=torch.float64"):
        memory_efficient_attention(q, k, v, output_dtype=torch.float64)
    assert memory_efficient_attention(q, k, v, output_dtype=torch.float32).dtype == torch.float32
    with pytest.raises(NotImplementedError, match=r"p=0.1"):
        memory_efficient_attention_forward_requires_grad(q, k, v, p=0.1)
    paged = type("PagedBlockDiagonalPaddedKeysMask", (), {})()
    with pytest.raises(flashsci.BackendError, match=r"Paged.* gather the pages"):
        memory_efficient_attention(q, k, v, paged)
    own = type("Mine", (LowerTriangularMask,), {})()
    with pytest.raises(flashsci.BackendError, match="of type Mine is not supported"):
        memory_efficient_attention(q, k, v, own)
    with pytest.raises(flashsci.BackendError, match="of type AttentionBias"):
        xformers.AttentionBias().materialize((2, 2))


def test_shapes_that_do_not_fit():
    q, k, v = torch.randn(3, 1, 6, 2, 8)
    with pytest.raises(ValueError, match="must all be"):
        memory_efficient_attention(q[0], k, v)
    bias = BlockDiagonalMask.from_seqlens([2, 3], device="cpu")
    with pytest.raises(ValueError, match="of 5 queries and 5 keys takes"):
        memory_efficient_attention(q, k, v, bias)
    with pytest.raises(ValueError, match="of 5 queries and 5 keys takes"):
        memory_efficient_attention(*(x[:, :5, 0] for x in (q, k, v)), bias)
    with pytest.raises(ValueError, match="of 5 queries and 5 keys takes"):
        memory_efficient_attention(*(x[:, :5].expand(2, 5, 2, 8) for x in (q, k, v)), bias)
    with pytest.raises(ValueError, match=r"attn_bias\.to"):
        memory_efficient_attention(*(x[:, :5].to("meta") for x in (q, k, v)), bias)
    with pytest.raises(ValueError, match="bias of shape"):
        memory_efficient_attention(q, k, v, torch.zeros(1, 3, 6, 6))
