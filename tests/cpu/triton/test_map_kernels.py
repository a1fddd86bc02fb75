"""Triton's kernels of attention maps, interpreted: the reductions by the two-error rule, with every option and odd lengths."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.api.maps import fused
from flashsci.call import arguments
from flashsci.call.map_tensors import MapTensors
from flashsci.call.maps import Reductions
from flashsci.testing.tolerance import BASELINE_FACTOR, FLOOR_ROUNDINGS
from tests.support.map_calls import OPTIONS, rounded, written

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu/test_maps_on_gpu.py runs them")
WANTED = Reductions(entropy=True, largest_score=True, key_sum=True)


def by_kernels(
    q, k, lse, *, wanted=WANTED, causal=False, window=None, align="upper_left", softcap=None, softcap_at="scores", **tensors
):  # fmt: skip
    options = arguments.Options.of(causal, window, align, None, softcap, 0.0, True, False, None, softcap_at)
    return fused(MapTensors(q, k, lse, **tensors), options.scalars(q.shape[-1]), wanted)


def reduced(p, s):
    return -(p * torch.where(p == 0, 1.0, p).log()).sum(-1), s.amax(-1), p.sum(-2)


def near(found, exact, plain, size):
    for x, truth, other in zip(found, exact, plain, strict=True):
        seen = truth.isfinite()
        assert x.shape == truth.shape and torch.equal(x.isfinite(), seen)
        error, baseline = ((y.double() - truth)[seen].norm() for y in (x, other))
        least = FLOOR_ROUNDINGS * size * torch.finfo(torch.float32).eps / 2 * truth[seen].norm()
        assert error <= torch.maximum(BASELINE_FACTOR * baseline, least)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, dtype):
    q, k, lse, options, theirs = rounded(name, dtype)
    p, s = written(q.double(), k.double(), **theirs)
    narrow = {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in theirs.items()}
    size = 1 + s[s.isfinite()].abs().amax()
    near(by_kernels(q, k, lse, **options), reduced(p, s), reduced(*written(q, k, **narrow)), size)


@pytest.mark.parametrize("shape", [(5, 8), (3, 70, 8), (2, 3, 130, 80), (2, 1, 2, 3, 5, 8)], ids=str)
@pytest.mark.parametrize("pattern", [dict(), dict(causal=True), dict(window=(20, 3))], ids=str)
def test_ranks_and_lengths_beyond_a_tile(shape, pattern):
    q, k = torch.randn(2, *shape).unbind(0)
    _, lse = flashsci.attention(q.double(), k.double(), k.double(), return_lse=True, backend="reference", **pattern)
    exact = flashsci.attention_statistics(
        q.double(), k.double(), lse, entropy=True, largest_score=True, key_sum=True, **pattern
    )
    plain = flashsci.attention_statistics(q, k, lse.float(), entropy=True, largest_score=True, key_sum=True, **pattern)
    near(by_kernels(q, k, lse.float(), **pattern), exact[:3], plain[:3], 10)


@pytest.mark.parametrize("wanted", ["entropy", "largest_score", "key_sum"])
def test_one_alone_has_the_same_bits(wanted):
    q, k = torch.randn(2, 2, 3, 40, 16).unbind(0)
    lse = torch.randn(2, 3, 40) + 9
    every = by_kernels(q, k, lse)
    (alone,) = by_kernels(q, k, lse, wanted=Reductions(**{wanted: True}))
    assert torch.equal(alone, every[["entropy", "largest_score", "key_sum"].index(wanted)])


def test_strides_and_layouts():
    q, k = (torch.randn(2, 17, 4, 16).transpose(1, 2) for _ in range(2))
    k = torch.randn(2, 2, 16, 19).mT
    bias = torch.randn(4, 19, 17).mT
    lse = torch.randn(2, 17, 4).transpose(1, 2) + 9
    found = by_kernels(q, k, lse, bias=bias)
    due = flashsci.attention_statistics(q, k, lse, bias=bias, entropy=True, largest_score=True, key_sum=True)
    exact = flashsci.attention_statistics(
        q.double(), k.double(), lse.double(), bias=bias.double(), entropy=True, largest_score=True, key_sum=True
    )
    near(found, exact[:3], due[:3], 10)
