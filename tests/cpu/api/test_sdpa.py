"""flashsci.sdpa against torch's: values and gradients in fp64 over drawn calls, rounding in fp32 and bf16 by the judge,
signature, refusals."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashsci
from flashsci.testing import Inputs, Judge

theirs = torch.nn.functional.scaled_dot_product_attention
INF = float("inf")


@st.composite
def calls(draw):
    """Tensors and options of a call that SDPA's documentation allows: any rank, any broadcast."""
    size = st.integers(1, 5)
    length, keys, dim, dim_v = draw(size), draw(st.integers(1, 6)), draw(size), draw(size)
    outer = draw(st.lists(st.integers(1, 3), max_size=2))
    gqa = draw(st.booleans())
    if gqa:
        of_key, of_value, times = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(size)
        query_heads = of_key * of_value * times
        heads = [[query_heads], [of_key], [of_value]]
    else:
        count = draw(st.integers(1, 3))
        heads = [[draw(st.sampled_from((count, 1)))] for _ in range(3)]
        if not outer and draw(st.booleans()):
            heads = [x if draw(st.booleans()) else [] for x in heads]

    def leading(own):
        """Some of the outer dims missing, from the left, or 1; heads alone may stand without them."""
        there = outer[draw(st.integers(0, len(outer))) :] if own else []
        return [n if draw(st.booleans()) else 1 for n in there] + own

    shapes = [leading(own) for own in heads]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = normal(*shapes[0], length, dim)
    key = normal(*shapes[1], keys, dim)
    value = normal(*shapes[2], keys, dim_v)
    # As torch's math has it, a mask broadcasts to what q k^T is, heads of GQA repeated; v may still be larger.
    full = list(torch.broadcast_shapes(shapes[0], shapes[0] if gqa else shapes[1]))
    if gqa:
        full[:-1] = torch.broadcast_shapes(shapes[0][:-1], shapes[1][:-1])
    mask, kind = None, draw(st.sampled_from(("none", "causal", "bool", "float", "learnt")))
    if kind in ("bool", "float", "learnt"):
        shape = [n if draw(st.booleans()) else 1 for n in [*full, length, keys]]
        shape = shape[draw(st.integers(0, len(shape) - 2)) :]
        keep = torch.rand(shape, generator=generator) < draw(st.sampled_from((0.3, 0.8)))
        mask = keep if kind == "bool" else normal(*shape).masked_fill(~keep, -INF)
        mask = mask.requires_grad_() if kind == "learnt" else mask
    options = dict(
        attn_mask=mask,
        is_causal=kind == "causal",
        scale=draw(st.sampled_from((None, 0.3, -1.0, 2))),
        enable_gqa=gqa,
    )
    return [x.requires_grad_() for x in (query, key, value)], options


@pytest.mark.parametrize("shape, keys", [((2, 3, 5, 8), 0), ((2, 3, 0, 8), 4), ((0, 3, 5, 8), 4)])
def test_empty(shape, keys):
    query, key = torch.randn(shape), torch.randn(*shape[:2], keys, 8)
    assert torch.equal(flashsci.sdpa(query, key, key), theirs(query, key, key))


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_causal_at_scales_that_torch_gets_wrong(scale):
    """torch's kernel for the CPU gives NaN there; its math does not."""
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
    with sdpa_kernel(SDPBackend.MATH):
        due = theirs(q, k, v, is_causal=True, scale=scale)
    torch.testing.assert_close(flashsci.sdpa(q, k, v, is_causal=True, scale=scale), due)


def with_gradients(function, tensors, options):
    out = function(*tensors, **options)
    mask = options["attn_mask"]
    leaves = [*tensors, *([mask] if mask is not None and mask.requires_grad else [])]
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


@settings(max_examples=100)
@given(calls())
def test_same_as_torch_in_fp64(call):
    tensors, options = call
    with sdpa_kernel(SDPBackend.MATH):
        expected = with_gradients(theirs, tensors, options)
    for ours, due in zip(with_gradients(flashsci.sdpa, tensors, options), expected, strict=True):
        assert ours.shape == due.shape and ours.dtype == due.dtype
        torch.testing.assert_close(ours, due, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "heads, mask, causal",
    [
        ((4, 4), None, True),
        ((4, 2), None, False),
        ((4, 2), ("bool", (2, 1, 1, 40)), False),
        ((4, 4), ("bias", (1, 4, 33, 40)), False),
        ((4, 1), ("bias", (33, 40)), False),
        ((2, 2), ("float32", (2, 1, 33, 40)), False),
    ],
)
def test_rounding(dtype, heads, mask, causal):
    """fp32 and bf16 against fp64, by the bounds of flashsci.testing; a float mask's gradient among them."""
    q, k, v = (torch.randn(2, h, s, 24) for h, s in zip((*heads, heads[1]), (33, 40, 40)))  # noqa: B905
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, torch.randn(2, heads[0], 33, 24)))
    given = {}
    if mask is not None:
        kind, shape = mask
        given["mask" if kind == "bool" else "bias"] = (
            torch.rand(shape) < 0.7
            if kind == "bool"
            else torch.randn(shape, dtype=torch.float32 if kind == "float32" else dtype)
        )
    judge = Judge(Inputs(q, k, v, dout=dout, options=dict(causal=causal), **given), fused=False)
    leaves = {n: x.requires_grad_() for n, x in (("dq", q), ("dk", k), ("dv", v))}
    attn_mask = next(iter(given.values()), None)
    if "bias" in given:
        leaves["dbias"] = attn_mask.requires_grad_()
    out = flashsci.sdpa(q, k, v, attn_mask, 0.0, causal, None, heads[0] != heads[1])
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    judge.require({"out": out.detach(), **dict(zip(leaves, gradients, strict=True))})


def test_signature_is_torchs():
    """Names, order and defaults, as torch documents them (a builtin has no signature of its own)."""
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    ours = inspect.signature(flashsci.sdpa).parameters
    assert [(a.name, a.default_value) for a in schema.arguments] == [
        (n, None if p.default is inspect.Parameter.empty else p.default) for n, p in ours.items()
    ]


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_that_see_nothing_are_zero(kind):
    q, k, v = torch.randn(3, 2, 3, 5, 8).requires_grad_().unbind(0)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    mask = mask if kind == "bool" else torch.zeros(5, 5).masked_fill(~mask, -INF).requires_grad_()
    for function in (theirs, flashsci.sdpa):
        out = function(q, k, v, mask)
        leaves = (q, mask) if kind == "float" else (q,)
        gradients = torch.autograd.grad(out.sum(), leaves)
        assert out[:, :, 2].eq(0).all() and gradients[0][:, :, 2].eq(0).all()
        assert all(torch.isfinite(g).all() for g in gradients)


def test_dropout_is_drawn_from_torchs_generator():
    q, k, v = torch.randn(3, 1, 2, 64, 8).unbind(0)
    torch.manual_seed(5)
    first = flashsci.sdpa(q, k, v, dropout_p=0.4)
    second = flashsci.sdpa(q, k, v, dropout_p=0.4)
    torch.manual_seed(5)
    assert torch.equal(flashsci.sdpa(q, k, v, dropout_p=0.4), first)
    assert not torch.equal(first, second)
    ones = flashsci.sdpa(q, k, torch.ones_like(v), dropout_p=0.4)
    assert abs(ones.mean().item() - 1) < 0.1  # what is kept is multiplied by 1 / (1 - p)


@pytest.mark.parametrize("lengths", [(5, 5), (3, 5), (5, 3)])
@pytest.mark.parametrize("kind", ["bool", "float", "learnt"])
def test_a_mask_beside_is_causal(lengths, kind):
    """Both hold, as in torch's kernel for the CPU; elsewhere torch raises."""
    q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (*lengths, lengths[1]))
    keep = torch.rand(lengths) < 0.7
    mask = keep if kind == "bool" else torch.randn(lengths).masked_fill(~keep, -INF)
    mask = mask.requires_grad_() if kind == "learnt" else mask
    triangle = torch.ones(lengths, dtype=torch.bool).tril()
    both = mask & triangle if kind == "bool" else mask.masked_fill(~triangle, -INF)
    leaves = [q, k, v] + ([mask] if kind == "learnt" else [])
    out, due = flashsci.sdpa(q, k, v, mask, is_causal=True), theirs(q, k, v, both)
    torch.testing.assert_close(out, due)
    for ours, other in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (out, due)), strict=True):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("corner", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 5)])
def test_causal_biases_of_torch(corner, lengths):
    from torch.nn.attention import bias

    mask = getattr(bias, corner)(*lengths)
    q, k, v = (torch.randn(2, 4, n, 8) for n in (*lengths, lengths[1]))
    torch.testing.assert_close(flashsci.sdpa(q, k, v, mask), theirs(q, k, v, mask))


def test_options_as_torch_takes_them():
    q, k, v = torch.randn(3, 1, 2, 5, 8).requires_grad_().unbind(0)
    for options in (
        dict(scale=torch.tensor(0.3)),
        dict(scale=2),
        dict(dropout_p=torch.tensor(0.0)),
        dict(dropout_p=0),
        dict(dropout_p=1.0),
    ):
        ours, due = flashsci.sdpa(q, k, v, **options), theirs(q, k, v, **options)
        torch.testing.assert_close(ours, due)
        ours, due = (torch.autograd.grad(x.sum(), v, retain_graph=True)[0] for x in (ours, due))
        torch.testing.assert_close(ours, due)


def test_autocast():
    q, k, v = torch.randn(3, 1, 2, 7, 8).unbind(0)
    mask = torch.randn(7, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert flashsci.sdpa(q, k, v, mask).dtype == theirs(q, k, v, mask).dtype == torch.bfloat16


def test_compiles():
    q, k, v = torch.randn(3, 1, 2, 7, 8).unbind(0)
    compiled = torch.compile(flashsci.sdpa, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, is_causal=True), theirs(q, k, v, is_causal=True))


q4, k2, k3 = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 3, 5, 8)
KEEP = torch.ones(5, 5, dtype=torch.bool)
NESTED = torch.nested.nested_tensor([torch.zeros(4, 5, 8), torch.zeros(4, 3, 8)])


@pytest.mark.parametrize(
    "arguments, options, error, says",
    [
        ((NESTED, NESTED, NESTED), {}, ValueError, "layout=torch.jagged"),
        ((q4, k2, k2), {}, ValueError, "enable_gqa=True"),
        ((q4, k3, k3), dict(enable_gqa=True), ValueError, "must divide those of query"),
        ((q4[:, :1], k2, k2), dict(enable_gqa=True), ValueError, "must divide those of query"),
        ((q4, q4, q4[:, :, :3]), {}, ValueError, "same length"),
        ((q4, q4, q4, KEEP.int()), {}, TypeError, "bias must have q's dtype"),
        ((q4, q4, q4, KEEP[:3]), {}, ValueError, "does not broadcast"),
        ((q4, q4, q4, torch.zeros(5, 1, 1, 5, 5)), {}, ValueError, "does not broadcast"),
        ((q4, q4, q4, [[True]]), {}, TypeError, "attn_mask must be a torch.Tensor"),
        ((q4, q4, q4), dict(dropout_p=1.1), ValueError, "dropout_p must be in"),
        (
            (q4, q4, q4),
            dict(scale=torch.tensor(2.0, requires_grad=True)),
            TypeError,
            "multiply q by it",
        ),
        ((q4, q4, q4), dict(scale=torch.tensor([2.0])), TypeError, "multiply q by it"),
        ((q4, q4, q4), dict(is_causal=1), TypeError, "causal must be True or False"),
        ((q4, q4, q4), dict(enable_gqa=1), TypeError, "enable_gqa must be True or False"),
    ],
)
def test_refusals(arguments, options, error, says):
    with pytest.raises(error, match=says):
        flashsci.sdpa(*arguments, **options)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_jagged(heads):
    values = [torch.randn(13, h, 8) for h in (heads[0], heads[1], heads[1])]
    offsets = torch.tensor([0, 5, 13])
    q, k, v = (torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in values)
    out = flashsci.sdpa(q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1])
    for ours, *qkv in zip(out.unbind(), q.unbind(), k.unbind(), v.unbind(), strict=True):
        due = theirs(*qkv, is_causal=True, enable_gqa=heads[0] != heads[1])
        torch.testing.assert_close(ours, due)
    if heads[0] != heads[1]:
        with pytest.raises(ValueError, match="enable_gqa=True"):
            flashsci.sdpa(q, k, v)


def test_functions_are_no_modules():
    program = (
        "import flashsci.api.sdpa, flashsci\nfrom flashsci import sdpa\nassert sdpa is flashsci.sdpa and callable(sdpa)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
