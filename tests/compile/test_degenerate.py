"""Calls without queries, keys, heads or batch, and offsets and seeds that are views: on every backend, every tensor."""

from __future__ import annotations

import math

import pytest
import torch

import flashsci
from flashsci.testing import poisoned_memory
from tests.support.everywhere import BACKENDS, DEVICE, GPU, backends

pytestmark = [pytest.mark.usefixtures("loaded"), pytest.mark.every(4)]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16, torch.float16] if GPU else [])])


# batch, query heads, key heads, queries, keys
EMPTY = {
    "batch": (0, 4, 2, 5, 7),
    "query heads": (2, 0, 2, 5, 7),
    "queries": (2, 4, 2, 0, 7),
    "keys": (2, 4, 2, 5, 0),
    "queries and keys": (2, 4, 2, 0, 0),
    "batch and keys": (0, 4, 2, 5, 0),
}
# A bias that every dim shares, that nothing shares, and in between.
BIASES = {
    "none": lambda b, h, m, n: None,
    "one": lambda b, h, m, n: (1, 1, 1, 1),
    "batch shares": lambda b, h, m, n: (1, h, m, n),
    "heads share": lambda b, h, m, n: (b, 1, m, n),
    "keys": lambda b, h, m, n: (1, 1, 1, n),
    "rows": lambda b, h, m, n: (1, 1, m, 1),
    "pairs": lambda b, h, m, n: (1, 1, m, n),
    "own": lambda b, h, m, n: (b, h, m, n),
}


@backends
@dtypes
@pytest.mark.parametrize("what", EMPTY)
@pytest.mark.parametrize("kind", BIASES)
def test_nothing_to_attend(backend, dtype, what, kind):
    """Out 0 and lse -inf where there are rows; zeros for every gradient, first and second order, in poisoned memory."""
    b, h, hk, m, n = EMPTY[what]
    lse = backend != "sdpa"
    q, k, v = (
        torch.randn(s, device=DEVICE).to(dtype).requires_grad_() for s in ((b, h, m, 16), (b, hk, n, 16), (b, hk, n, 8))
    )
    inputs, shape = [q, k, v], BIASES[kind](b, h, m, n)
    bias = None if shape is None else torch.randn(shape, device=DEVICE).requires_grad_()
    inputs += [] if bias is None else [bias]
    with poisoned_memory():
        options = dict(return_lse=lse, deterministic=False, backend=backend)  # poison asks for it
        found = flashsci.attention(q, k, v, bias=bias, **options)
        out, row = found if lse else (found, None)
        assert out.shape == (b, h, m, 8) and out.eq(0).all()
        assert row is None or (row.shape == (b, h, m) and row.eq(-math.inf).all())
        ends = [out] if row is None else [out, row]
        upstream = [torch.randn_like(x, requires_grad=True) for x in ends]
        first = torch.autograd.grad(ends, inputs, upstream, create_graph=True, allow_unused=True)
        for x, g in zip(inputs, first, strict=True):
            assert g is not None and g.shape == x.shape and g.eq(0).all()
        wanted = [x for x in first if x.requires_grad]
        if wanted:
            second = torch.autograd.grad(
                wanted,
                [*inputs, *upstream],
                [torch.randn_like(x) for x in wanted],
                allow_unused=True,
            )
            assert all(g is None or g.eq(0).all() for g in second)
        # And without a recorded backward, which may take another way.
        plain = [x.detach().requires_grad_() for x in inputs]
        again = flashsci.attention(*plain[:3], bias=None if bias is None else plain[3], **options)
        ends = [again] if row is None else list(again)
        found = torch.autograd.grad(ends, plain, [x.detach() for x in upstream], allow_unused=True)
        assert all(g is not None and g.shape == x.shape and g.eq(0).all() for x, g in zip(plain, found, strict=True))


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b not in ("sdpa", "cuda")])
@pytest.mark.parametrize("what", EMPTY)
def test_nothing_to_weigh(backend, what):
    b, h, hk, m, n = EMPTY[what]
    tensors = [torch.randn(s, device=DEVICE) for s in ((b, h, m, 16), (b, hk, n, 16), (b, hk, n, 8))]
    for shape in ((1, 1, n), (b, hk, n), (1, 1, 1)):
        weight = torch.rand(shape, device=DEVICE, requires_grad=True)
        with poisoned_memory():
            out, lse = flashsci.attention(*tensors, key_weight=weight, return_lse=True, backend=backend)
            (gradient,) = torch.autograd.grad([out, lse], weight, [torch.randn_like(out), torch.randn_like(lse)])
        assert gradient.shape == shape and gradient.eq(0).all()


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "sdpa"])
@dtypes
@pytest.mark.parametrize("lengths", [([], []), ([0, 0], [0, 0]), ([3, 0], [0, 4]), ([0], [5]), ([5], [0])])
def test_packed_sequences_without_pairs(backend, dtype, lengths):
    """No sequences, empty ones, queries without keys and keys without queries."""
    offsets = [torch.tensor([0, *x], device=DEVICE).cumsum(0).to(torch.int32) for x in lengths]
    q, k, v = (
        torch.randn(sum(x), h, d, device=DEVICE).to(dtype).requires_grad_()
        for x, h, d in ((lengths[0], 4, 16), (lengths[1], 2, 16), (lengths[1], 2, 8))
    )
    with poisoned_memory():
        out, lse = flashsci.varlen_attention(q, k, v, *offsets, return_lse=True, deterministic=False, backend=backend)
        found = torch.autograd.grad([out, lse], (q, k, v), [torch.randn_like(out), torch.randn_like(lse)])
    assert out.shape == (len(q), 4, 8) and out.eq(0).all() and lse.eq(-math.inf).all()
    assert all(g.shape == x.shape and g.eq(0).all() for x, g in zip((q, k, v), found, strict=True))


# Views of a vector: what the memory between and behind its elements holds must not matter.
VIEWS = {
    "every second": lambda x, junk: torch.stack([x, torch.full_like(x, junk)], 1).flatten()[::2],
    "a column": lambda x, junk: torch.stack([torch.full_like(x, junk), x, torch.full_like(x, junk)], 1)[:, 1],
    "an offset": lambda x, junk: torch.cat([torch.full_like(x, junk), x])[len(x) :],
}


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "sdpa"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_offsets_that_are_views(backend, view, which):
    """Of any stride, for queries, keys or both: as their contiguous copies, forward, backward, second order."""
    starts = torch.tensor([0, 2, 5, 9], dtype=torch.int32, device=DEVICE)
    ends = torch.tensor([0, 4, 5, 11], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(n, 2, 16, device=DEVICE).requires_grad_() for n in (9, 11, 11))
    pairs = torch.randn(1, 2 * 4 + 3 + 4 * 6, device=DEVICE).requires_grad_()
    bias = None if backend == "cuda" else pairs

    def results(cu_q, cu_k):
        inputs = [q, k, v, *([] if bias is None else [bias])]
        out, lse = flashsci.varlen_attention(
            q, k, v, cu_q, cu_k, bias=bias, return_lse=True, validate=True, backend=backend
        )
        first = torch.autograd.grad(out.sin().sum() + lse.sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        with torch.no_grad():
            given = flashsci.attention_backward(
                out,
                q,
                k,
                v,
                out,
                lse,
                bias=bias,
                cu_seqlens_q=cu_q,
                cu_seqlens_k=cu_k,
                backend=backend,
            )
        return [out, lse, *first, *second, *(g for g in given if g is not None)]

    odd = lambda x, name: VIEWS[view](x, 3) if which in (name, "both") else x  # noqa: E731
    for a, b in zip(results(odd(starts, "q"), odd(ends, "k")), results(starts, ends), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "sdpa"])
def test_offsets_that_are_expanded(backend):
    """[0, 0, 0]: one element in memory, three sequences' bounds to read."""
    zeros = torch.zeros(1, dtype=torch.int32, device=DEVICE).expand(3)
    q, k = (
        torch.randn(0, 2, 16, device=DEVICE),
        torch.randn(6, 2, 16, device=DEVICE, requires_grad=True),
    )
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)
    out = flashsci.varlen_attention(q, k, k, zeros, offsets, backend=backend)
    assert out.shape == (0, 2, 16)
    (gradient,) = torch.autograd.grad(out.sum(), k)
    assert gradient.eq(0).all()


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b not in ("sdpa", "cuda")])
@pytest.mark.parametrize("view", [*VIEWS, "expanded"])
def test_seeds_that_are_views(backend, view):
    seed = torch.tensor([7, 7 if view == "expanded" else 3], device=DEVICE)
    odd = seed[:1].expand(2) if view == "expanded" else VIEWS[view](seed, 99)
    q, k, v = (torch.randn(2, 2, 6, 16, device=DEVICE).requires_grad_() for _ in range(3))

    def results(seed):
        options = dict(dropout_p=0.5, dropout_seed=seed, backend=backend)
        out, lse = flashsci.attention(q, k, v, return_lse=True, **options)
        first = torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))
        with torch.no_grad():
            given = flashsci.attention_backward(out, q, k, v, out, lse, **options)
        return [out, *first, *second, *given[:3]]

    for a, b in zip(results(odd), results(seed), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(flashsci.dropout_mask(odd, 0.5, (6, 7)), flashsci.dropout_mask(seed, 0.5, (6, 7)))
