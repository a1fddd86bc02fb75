"""Attention maps on a GPU: kernels and blocks by the two-error rule, odd lengths, and the memory of reductions."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.testing import exact_matmul
from flashsci.testing.tolerance import BASELINE_FACTOR, FLOOR_ROUNDINGS
from tests.support.map_calls import OPTIONS, rounded, written

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EVERYTHING = dict(entropy=True, largest_score=True, key_sum=True, top_k=3)


def reduced(p, s):
    return -(p * torch.where(p == 0, 1.0, p).log()).sum(-1), s.amax(-1), p.sum(-2), p.topk(3, -1).values


def near(found, exact, plain, size):
    for x, truth, other in zip(found, exact, plain, strict=True):
        seen = truth.isfinite()
        assert x.shape == truth.shape and torch.equal(x.isfinite(), seen)
        error, baseline = ((y.double() - truth)[seen].norm() for y in (x, other))
        least = FLOOR_ROUNDINGS * size * torch.finfo(torch.float32).eps / 2 * truth[seen].norm()
        assert error <= torch.maximum(BASELINE_FACTOR * baseline, least)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, dtype, backend):
    q, k, lse, options, theirs = rounded(name, dtype, "cuda")
    p, s = written(q.double(), k.double(), **theirs)
    narrow = {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in theirs.items()}
    size = 1 + s[s.isfinite()].abs().amax()
    with flashsci.use_backend(backend), exact_matmul():
        found = flashsci.attention_statistics(q, k, lse, **EVERYTHING, **options)
        weights = flashsci.attention_weights(q, k, lse, **options)
        plain = written(q, k, **narrow)
    near((*found[:4], weights), (*reduced(p, s), p), (*reduced(*plain), plain[0]), size)


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
    near(flashsci.attention_statistics(q, k, lse.float(), **wanted)[:4], exact, plain, 10)


def test_reductions_hold_no_tensor_of_all_pairs():
    q, k = torch.randn(2, 1, 8, 8192, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    _, lse = flashsci.attention(q, k, k, return_lse=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flashsci.attention_statistics(q, k, lse, entropy=True, largest_score=True, key_sum=True)
    assert torch.cuda.max_memory_allocated() - before < 1 << 22
