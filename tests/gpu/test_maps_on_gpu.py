"""Attention maps on a GPU: kernels and blocks by the two-error rule, odd lengths, and the memory of reductions."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.testing import exact_matmul
from tests.support.map_calls import OPTIONS, near, packed, reduced, rounded, scores_of, size_of, written

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EVERYTHING = dict(entropy=True, largest_score=True, key_sum=True, top_k=3)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, dtype, backend):
    q, k, lse, options, theirs = rounded(name, dtype, "cuda")
    p, s = written(q.double(), k.double(), **theirs)
    narrow = {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in theirs.items()}
    with flashsci.use_backend(backend), exact_matmul():
        found = flashsci.attention_statistics(q, k, lse, **EVERYTHING, **options)
        weights = flashsci.attention_weights(q, k, lse, **options)
        plain = written(q, k, **narrow)
    near((*found[:4], weights), (*reduced(p, s), p), (*reduced(*plain), plain[0]), size_of(s))


@pytest.mark.parametrize("dim", [16, 40, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pattern", [dict(), dict(causal=True), dict(window=(70, 9))], ids=str)
def test_lengths_beyond_a_tile(dim, dtype, pattern):
    q = torch.randn(2, 4, 333, dim, device="cuda", dtype=dtype)
    k = torch.randn(2, 2, 451, dim, device="cuda", dtype=dtype)
    wanted = dict(EVERYTHING, **pattern)
    _, lse = flashsci.attention(q.double(), k.double(), k.double(), return_lse=True, backend="reference", **pattern)
    exact = flashsci.attention_statistics(q.double(), k.double(), lse, **wanted)[:4]
    with flashsci.use_backend("reference"):
        plain = flashsci.attention_statistics(q, k, lse.float(), **wanted)[:4]
    near(flashsci.attention_statistics(q, k, lse.float(), **wanted)[:4], exact, plain, size_of(scores_of(q, k)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pattern", [dict(), dict(causal=True, align="lower_right"), dict(window=(70, 9))], ids=str)
def test_packed(dtype, pattern):
    """Kernels read the offsets on the device, and give what each sequence gives alone."""
    q, k, first, second = packed((70, 0, 300, 1), (65, 9, 0, 260), 64, dtype, "cuda")
    edges = dict(cu_seqlens_q=first, cu_seqlens_k=second)
    _, lse = flashsci.varlen_attention(
        q.double(), k.double(), k.double(), first, second, return_lse=True, backend="reference", **pattern
    )
    exact = flashsci.attention_statistics(q.double(), k.double(), lse, **EVERYTHING, **edges, **pattern)[:4]
    with flashsci.use_backend("reference"):
        plain = flashsci.attention_statistics(q, k, lse.float(), **EVERYTHING, **edges, **pattern)[:4]
    found = flashsci.attention_statistics(q, k, lse.float(), **EVERYTHING, **edges, **pattern)[:4]
    near(found, exact, plain, size_of(scores_of(q.transpose(0, 1), k.transpose(0, 1))))


@pytest.mark.parametrize("count", [1, 2, 8, 20, 64])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "window", "bias", "mask", "weights", "few queries"])
def test_the_largest_and_their_keys(name, dtype, dim, count):
    """Values of torch.topk, and different keys that have them."""
    rows, keys = 20 if name == "few queries" else 333, 451
    q = torch.randn(2, 4, rows, dim, device="cuda", dtype=dtype)
    k = torch.randn(2, 2, keys, dim, device="cuda", dtype=dtype)
    options = {
        "causal": dict(causal=True), "window": dict(window=(70, 9)), "bias": dict(bias=torch.randn(2, 4, rows, keys, device="cuda", dtype=dtype)),
        "mask": dict(mask=torch.rand(rows, keys, device="cuda") > 0.9), "weights": dict(key_weight=torch.rand(2, 2, keys, device="cuda").to(dtype)),
    }.get(name, {})  # fmt: skip
    wide = {n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in options.items()}
    _, lse = flashsci.attention(q.double(), k.double(), k.double(), return_lse=True, backend="reference", **wide)
    exact = flashsci.attention_weights(q.double(), k.double(), lse, **wide)
    plain = flashsci.attention_weights(q, k, lse.float(), **options)
    found = flashsci.attention_statistics(q, k, lse.float(), top_k=count, **options)
    values, places = found.top_values, found.top_indices
    size = size_of(scores_of(q, k)) + 5
    due = (exact.topk(count, -1).values, exact.gather(-1, places))
    near((values, values), due, (plain.topk(count, -1).values, plain.gather(-1, places)), size)
    assert (values.diff(dim=-1) <= 0).all() and (places.sort(-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("packs", [False, True], ids=["dense", "packed"])
def test_captured_in_a_graph(packs):
    """A graph of the reductions gives other results for other numbers in the same memory."""
    q, k, first, second = packed((70, 30), (65, 40), 64, torch.bfloat16, "cuda")
    edges = dict(cu_seqlens_q=first, cu_seqlens_k=second) if packs else {}
    q, k = (q, k) if packs else (q.transpose(0, 1), k.transpose(0, 1))
    lse = torch.full((4, 100), 9.0, device="cuda")

    def call():
        return flashsci.attention_statistics(q, k, lse, **EVERYTHING, **edges)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    q.copy_(torch.randn_like(q))
    graph.replay()
    for x, y in zip(found, call(), strict=True):
        assert torch.equal(x, y)


def test_compiled_by_the_kernels():
    q, k = torch.randn(2, 1, 4, 100, 64, device="cuda").unbind(0)
    lse = torch.full((1, 4, 100), 9.0, device="cuda")

    def call(q, k, lse):
        return flashsci.attention_statistics(q, k, lse, **EVERYTHING)

    for x, y in zip(torch.compile(call, fullgraph=True)(q, k, lse), call(q, k, lse), strict=True):
        assert torch.equal(x, y)


def test_reductions_hold_no_tensor_of_all_pairs():
    q, k = torch.randn(2, 1, 8, 8192, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    _, lse = flashsci.attention(q, k, k, return_lse=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flashsci.attention_statistics(q, k, lse, **EVERYTHING)
    assert torch.cuda.max_memory_allocated() - before < 1 << 23
