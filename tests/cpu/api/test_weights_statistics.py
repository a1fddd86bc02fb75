"""Reductions of probabilities against softmax written out in float64, by the two-error rule where they are rounded."""

from __future__ import annotations

import pytest
import torch

import flashsci
from tests.support.map_calls import OPTIONS, called, near, reduced, rounded, size_of, written

EVERYTHING = dict(entropy=True, largest_score=True, key_sum=True, top_k=3)


@pytest.mark.parametrize("small", [False, True], ids=["one block", "blocks"])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name, small, monkeypatch):
    q, k, lse, options, p, s = called(name, small, monkeypatch)
    found = flashsci.attention_statistics(q, k, lse, **EVERYTHING, **options)
    due = reduced(p, s)
    torch.testing.assert_close(tuple(found[:4]), due)
    torch.testing.assert_close(p.gather(-1, found.top_indices), found.top_values)

    def loss(results):
        return sum(torch.where(x.isfinite(), x, 0).sin().sum() for x in results)

    got, wanted = (torch.autograd.grad(loss(x), (q, k), create_graph=True) for x in (found[:4], due))
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(loss(x), (q, k)) for x in (got, wanted)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_rounded_by_the_two_error_rule(name, dtype):
    """As near to float64 as the formulas in the dtype of the inputs, to a factor, or to roundings of float32."""
    q, k, lse, options, theirs = rounded(name, dtype)
    found = flashsci.attention_statistics(q, k, lse, **EVERYTHING, **options)[:4]
    p, s = written(q.double(), k.double(), **theirs)
    narrow = {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in theirs.items()}
    near(found, reduced(p, s), reduced(*written(q, k, **narrow)), size_of(s))


@pytest.mark.parametrize("keys", [0, 1])
def test_few_keys(keys):
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, keys, 8)
    _, lse = flashsci.attention(q, k, k, return_lse=True)
    found = flashsci.attention_statistics(q, k, lse, entropy=True, largest_score=True, key_sum=True, top_k=keys)
    assert found.key_sum.shape == (1, 2, keys) and torch.allclose(found.entropy, torch.zeros(1, 2, 3), atol=1e-6)
    assert (found.largest_score == -torch.inf).all() == (keys == 0)


def test_only_what_is_asked_for():
    q, k, _ = torch.randn(3, 1, 2, 4, 8)
    lse = torch.zeros(1, 2, 4)
    found = flashsci.attention_statistics(q, k, lse, largest_score=True)
    assert [x is None for x in found] == [True, False, True, True, True]
    with pytest.raises(ValueError, match="no reduction is asked for"):
        flashsci.attention_statistics(q, k, lse)
    with pytest.raises(ValueError, match="at most the number of keys, 4, got 5"):
        flashsci.attention_statistics(q, k, lse, top_k=5)
    with pytest.raises(TypeError, match="entropy must be True or False"):
        flashsci.attention_statistics(q, k, lse, entropy=1)


def test_the_largest_logit_clips_as_muon_does():
    """QK-Clip: scaled by the root of t / largest, the next largest logit is t."""
    q, k, v = torch.randn(3, 2, 4, 10, 16, dtype=torch.float64) * 3
    _, lse = flashsci.attention(q, k, v, return_lse=True)
    top = flashsci.attention_statistics(q, k, lse, largest_score=True).largest_score.amax((0, -1))
    factor = (1.5 / top).sqrt()[:, None, None]
    q, k = q * factor, k * factor
    _, lse = flashsci.attention(q, k, v, return_lse=True)
    again = flashsci.attention_statistics(q, k, lse, largest_score=True).largest_score.amax((0, -1))
    torch.testing.assert_close(again, torch.full_like(again, 1.5))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_as_one_graph(dynamic):
    """Values and gradients are those of eager mode."""
    q, k, _ = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64).requires_grad_().unbind(0)
    lse = torch.randn(1, 2, 9, dtype=torch.float64) + 9

    def reductions(q, k, lse):
        found = flashsci.attention_statistics(q, k, lse, **EVERYTHING, causal=True)
        return *found, flashsci.attention_weights(q, k, lse, rows=slice(2, 5), average_heads=True)

    def gradients(results):
        return torch.autograd.grad(sum(x.sin().sum() for x in results if x.is_floating_point()), (q, k))

    made = torch.compile(reductions, backend="aot_eager", fullgraph=True, dynamic=dynamic)(q, k, lse)
    due = reductions(q, k, lse)
    torch.testing.assert_close(made, due)
    torch.testing.assert_close(gradients(made), gradients(due))
