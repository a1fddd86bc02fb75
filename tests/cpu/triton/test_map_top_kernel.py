"""Triton's kernel of the largest probabilities of each row, interpreted: values as of torch.topk, and keys that have them."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashsci
from flashsci.call import maps
from flashsci.call.map_ops import MAX_TOP
from tests.support.map_calls import OPTIONS, near, packed, rounded, scores_of, size_of, written

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu/test_maps_on_gpu.py runs them"),
    pytest.mark.every(4),
]


@pytest.fixture(autouse=True)
def never_in_pytorch(monkeypatch):
    """With kernels nothing is left to blocks of PyTorch."""

    def refused(*given):
        assert flashsci.choice.choose.requested("auto")[0] != "triton"
        return computed(*given)

    computed = maps._computed
    monkeypatch.setattr(maps, "_computed", refused)


def top(q, k, lse, count, **options):
    with flashsci.use_backend("triton"):
        return flashsci.attention_statistics(q, k, lse, top_k=count, **options)[3:]


def fits(values, keys, p, plain, size, there=None):
    """Values by the two-error rule, in descending order; keys of the sequence that have them, each once, then -1. there: the
    number of keys."""
    count, there = values.shape[-1], p.shape[-1] if there is None else there
    assert values.dtype is torch.float32 and keys.dtype is torch.int64 and keys.shape == values.shape
    pad = (0, max(0, count - p.shape[-1]))
    due, of_plain = (torch.nn.functional.pad(x, pad).topk(count, -1).values for x in (p, plain))
    near((values,), (due,), (of_plain,), size)
    assert (values.diff(dim=-1) <= 0).all()
    found = min(count, there)
    assert (keys[..., found:] == -1).all() and (values[..., found:] == 0).all()
    if found:
        keys = keys[..., :found]
        assert keys.amin() >= 0 and keys.amax() < there
        assert (keys.sort(-1).values.diff(dim=-1) > 0).all()
        near((values[..., :found],), (p.gather(-1, keys),), (plain.gather(-1, keys),), size)


def exact_of(q, k, **options):
    """(lse in float32, P in float64 of the lse, P in float32)."""
    wide = {n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in options.items()}
    if "alibi_slopes" in options:
        wide["alibi_slopes"] = options["alibi_slopes"]
    _, lse = flashsci.attention(q.double(), k.double(), k.double(), return_lse=True, backend="reference", **wide)
    p = flashsci.attention_weights(q.double(), k.double(), lse, **wide)
    return lse.float(), p, flashsci.attention_weights(q, k, lse.float(), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 5, 11])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, count, dtype):
    q, k, lse, options, theirs = rounded(name, dtype)
    p, s = written(q.double(), k.double(), **theirs)
    narrow = {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in theirs.items()}
    fits(*top(q, k, lse, count, **options), p, written(q, k, **narrow)[0], size_of(s))


@pytest.mark.parametrize("count", [1, 2, 5, 33, MAX_TOP])
@pytest.mark.parametrize("pattern", [dict(), dict(causal=True), dict(window=(20, 3))], ids=str)
@pytest.mark.parametrize("shape", [(70, 8), (3, 131, 8), (2, 1, 2, 3, 65, 8)], ids=str)
def test_ranks_and_lengths_beyond_a_tile(shape, pattern, count):
    q, k = torch.randn(2, *shape).unbind(0)
    lse, p, plain = exact_of(q, k, **pattern)
    fits(*top(q, k, lse, count, **pattern), p, plain, size_of(scores_of(q, k)))


@pytest.mark.parametrize("order", ["rising", "falling", "equal", "pairs"])
def test_orders_of_the_keys(order):
    """Each tile has better keys than those before, or none has; equal ones come in the order of their keys."""
    n = torch.arange(100.0)
    size = {"rising": n / 20, "falling": -n / 20, "equal": 0 * n, "pairs": (n // 2 * 37 % 50) / 10}[order]
    q, k = torch.ones(40, 1), size[:, None]
    lse, p, plain = exact_of(q, k, scale=1.0)
    values, keys = top(q, k, lse, 20, scale=1.0)
    fits(values, keys, p, plain, 6)
    assert torch.equal(keys[0], (-size).sort(stable=True).indices[:20])


@pytest.mark.parametrize("hidden", ["all", "most", "one row"])
def test_fewer_visible_keys_than_asked_for(hidden):
    """Other keys of the sequence follow with zero, the first ones first."""
    q, k = torch.randn(2, 2, 40, 8).unbind(0)
    mask = torch.zeros(40, 40, dtype=torch.bool)
    if hidden == "most":
        mask[:, [3, 17, 39]] = True
    if hidden == "one row":
        mask[:] = True
        mask[7] = False
    lse, p, plain = exact_of(q, k, mask=mask)
    values, keys = top(q, k, lse, 10, mask=mask)
    fits(values, keys, p, plain, size_of(scores_of(q, k)))
    rest = {"all": range(10), "most": (0, 1, 2, 4, 5, 6, 7), "one row": range(10)}[hidden]
    assert keys[0, 7, -len(rest) :].tolist() == list(rest)


@pytest.mark.parametrize("size", [1e-30, 30.0, 1e4, 1e9])
def test_extreme_scores(size):
    """P of zero, of one, and of rows whose lse is rounded to large multiples."""
    q, k = torch.randn(2, 2, 37, 8).unbind(0)
    lse, p, _ = exact_of(q * size, k)
    values, keys = top(q * size, k, lse, 4)
    assert values.isfinite().all() and (values <= 1).all() and (keys >= 0).all()
    if size < 1e4:
        fits(values, keys, p, flashsci.attention_weights(q * size, k, lse), size_of(scores_of(q * size, k)))
    elif size < 1e9:
        assert torch.equal(keys[..., 0], p.argmax(-1))
    else:
        assert (values[..., 0] == 1).all()


def test_nan_is_the_largest():
    """As torch.topk has it."""
    q, k = torch.randn(2, 20, 8).unbind(0)
    k[13] = torch.nan
    values, keys = top(q, k, torch.zeros(20) + 5, 3)
    assert values[:, 0].isnan().all() and (keys[:, 0] == 13).all() and values[:, 1:].isfinite().all()


def test_strides_and_layouts():
    q, k = torch.randn(2, 17, 4, 16).transpose(1, 2), torch.randn(2, 2, 16, 19).mT
    bias, lse = torch.randn(4, 19, 17).mT, torch.randn(2, 17, 4).transpose(1, 2) + 9
    p, plain = (
        flashsci.attention_weights(q.to(t), k.to(t), lse.to(t), bias=bias.to(t)) for t in (torch.float64, torch.float32)
    )
    fits(*top(q, k, lse, 6, bias=bias), p, plain, size_of(scores_of(q, k, bias)))


EDGES = (3, 0, 40, 1, 17), (70, 9, 0, 18, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "window", "bias of pairs", "bias of keys", "weights", "slopes"])
def test_packed(name, dtype):
    """Every sequence has the results of a dense call of its own; -1 follows its last key."""
    q, k, first, second = packed(*EDGES, 16, dtype)
    pairs = sum(m * n for m, n in zip(*EDGES, strict=True))
    options = {
        "none": {}, "causal": dict(causal=True, align="lower_right"), "window": dict(window=(9, 3)),
        "bias of pairs": dict(bias=torch.randn(4, pairs, dtype=dtype)), "bias of keys": dict(bias=torch.randn(1, 1, 99, dtype=dtype)),
        "weights": dict(key_weight=torch.rand(2, 99).to(dtype)), "slopes": dict(alibi_slopes=torch.rand(5, 4)),
    }[name]  # fmt: skip
    wide = {n: x.double() if torch.is_tensor(x) and n != "alibi_slopes" else x for n, x in options.items()}
    edges = dict(cu_seqlens_q=first, cu_seqlens_k=second)
    _, lse = flashsci.varlen_attention(
        q.double(), k.double(), k.double(), first, second, return_lse=True, backend="reference", **wide
    )
    exact = flashsci.attention_weights(q.double(), k.double(), lse, **edges, **wide)
    plain = flashsci.attention_weights(q, k, lse.float(), **edges, **options)
    values, keys = top(q, k, lse.float(), 12, **edges, **options)
    s = scores_of(q.transpose(0, 1), k.transpose(0, 1))
    every = 1 + s.abs().amax() + options.get("bias", torch.zeros(1)).abs().amax()
    for n, (i, j) in enumerate(itertools.pairwise(first)):
        if i < j:
            fits(values[:, i:j], keys[:, i:j], exact[n], plain[n], every, EDGES[1][n])


def test_more_than_the_kernel_has_and_gradients():
    """PyTorch finds them, next to reductions by kernels."""
    q, k = torch.randn(2, 1, 2, 70, 8).unbind(0)
    lse = torch.zeros(1, 2, 70) + 9
    with pytest.raises(AssertionError):
        top(q, k, lse, MAX_TOP + 1)
    q.requires_grad_()
    with pytest.raises(AssertionError):
        top(q, k, lse, 3)
    with flashsci.use_backend("triton"), pytest.raises(ValueError, match="top_k from 0 to 64, got 65"):
        call = [q.detach(), k, lse, *[None] * 7, 1.0, 0.0, -1, -1, False, "default", False, False, False, False]
        torch.ops.flashsci.triton_map_statistics(*call, MAX_TOP + 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_by_the_kernel(dynamic):
    q, k = torch.randn(2, 1, 4, 20, 16).unbind(0)
    lse = torch.randn(1, 4, 20) + 9

    def call(q, k, lse):
        with flashsci.use_backend("triton"):
            return flashsci.attention_statistics(q, k, lse, entropy=True, top_k=3)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for x, y in zip(compiled(q, k, lse), call(q, k, lse), strict=True):
        assert x is y is None or torch.equal(x, y)


def test_mapped():
    q, k = torch.randn(2, 3, 2, 20, 8).unbind(0)
    lse = torch.zeros(3, 2, 20) + 9
    found = torch.func.vmap(lambda q, k, lse: top(q, k, lse, 4))(q, k, lse)
    for x, y in zip(found, top(q, k, lse, 4), strict=True):
        assert torch.equal(x, y)
