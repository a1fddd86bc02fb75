"""The gradient of ALiBi slopes in Triton's kernels, interpreted, by the judge of every backend; derivatives beyond it."""

from dataclasses import replace

import pytest
import torch

import flashsci
from flashsci.testing import Case, Judge, Variant, evaluate, generate, make_inputs

pytestmark = pytest.mark.every(6)

KINDS = {
    "plain": {},
    "causal": dict(causal=True, align="lower_right"),
    "window": dict(window=(9, 4)),
    "softcap": dict(softcap=4.0),
    "mask": dict(mask_shape=(2, 1, 1, 40), mask_kind="keys"),
    "pairs": dict(mask_shape=(19, 40)),
    "dropout": dict(dropout_p=0.3),
    "bias": dict(bias_shape=(2, 4, 19, 40)),
    "key weights": dict(weight_shape=(2, 1, 40)),
}
SHAPES = ((4,), (1,), (2, 4), (2, 1), (1, 4))


def learnt(inputs, shape=None):
    slopes = inputs.alibi_slopes if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(3)) / 4
    return replace(inputs, alibi_slopes=slopes, alibi_grad=True)


def dense(kind="plain", dtype="float32", seed=0, dim=16):
    given = KINDS[kind]
    variant = Variant(
        dtype, dim, dim, alibi=True, lse_grad=True, window="window" in given or "causal" in given, softcap="softcap" in given,
        mask="mask_shape" in given, dropout="dropout_p" in given, bias="pair" if "bias_shape" in given else None,
        key_weight="float" if "weight_shape" in given else None,
    )  # fmt: skip
    return make_inputs(Case(variant, seed, lead=(2,), heads_k=2, group=2, seq_q=19, seq_k=40, **given))


def packed(seed=0, dtype="float32"):
    variant = Variant(dtype, 16, 16, alibi=True, varlen=True, lse_grad=True)
    return make_inputs(Case(variant, seed, heads_k=2, group=2, lens_q=(5, 0, 33, 20), lens_k=(40, 3, 0, 20)))


def judged(inputs, backend="triton"):
    found = evaluate(inputs, backend)
    assert "dalibi_slopes" in found
    Judge(inputs).require(found)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("kind", KINDS)
def test_every_feature(kind, dtype):
    judged(learnt(dense(kind, dtype), (4,)))


@pytest.mark.parametrize("shape", SHAPES)
def test_slopes_that_broadcast(shape):
    judged(learnt(dense("causal"), shape))


@pytest.mark.parametrize("shape", ((4,), (1, 4), (4, 4)))
def test_packed_sequences(shape):
    """Of each sequence, or of all; one without queries, one without keys."""
    for seed in range(2):
        judged(learnt(packed(seed), shape))


def test_wide_heads():
    """Calls whose other gradients come from kernels that hold the scores in memory."""
    judged(learnt(dense(dim=144), (4,)))


def test_generated():
    pool = [
        Variant(dtype, 16, 24, alibi=True, window=window, lse_grad=True)
        for dtype in ("float32", "float16")
        for window in (False, True)
    ]
    for case in generate(11, 6, pool, score_limit=1 << 11):
        judged(learnt(make_inputs(case)))


def test_the_judge_finds_a_wrong_gradient():
    inputs = learnt(dense("causal"), (4,))
    found, judge = evaluate(inputs, "triton"), Judge(inputs)
    assert judge.catches("dalibi_slopes", found["dalibi_slopes"])


def given(shape=(4,)):
    q, k, v = (torch.randn(2, 4, 12, 16, requires_grad=True) for _ in range(3))
    return q, k, v, torch.rand(shape).requires_grad_()


def test_second_derivatives_are_those_of_the_reference():
    """The forward's out is no part of them: its gradient is given."""
    q, k, v, slopes = given()
    dout = torch.randn(2, 4, 12, 16)

    def both(backend):
        out = flashsci.attention(q, k, v, alibi_slopes=slopes, backend=backend)
        first = torch.autograd.grad(out, (q, slopes), dout, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v, slopes))

    for found, due in zip(both("triton"), both("reference"), strict=True):
        torch.testing.assert_close(found, due)
        assert due.abs().max() > 0


def test_a_batch_of_gradients():
    q, k, v, slopes = given((2, 4))

    def both(backend):
        out = flashsci.attention(q, k, v, alibi_slopes=slopes, backend=backend)
        cotangents = torch.stack((torch.ones_like(out), torch.arange(16.0).expand_as(out)))
        return torch.autograd.grad(out, (q, slopes), cotangents, is_grads_batched=True)

    for found, due in zip(both("triton"), both("reference"), strict=True):
        torch.testing.assert_close(found, due)


def test_the_result_may_change_in_place():
    q, k, v, slopes = given()
    flashsci.attention(q, k, v, alibi_slopes=slopes, backend="triton").mul_(2.0)


def test_only_the_slopes_are_learnt():
    q, k, v, slopes = given()
    out = flashsci.attention(q.detach(), k.detach(), v.detach(), alibi_slopes=slopes, backend="triton")
    (alone,) = torch.autograd.grad(out.sum(), slopes)
    out = flashsci.attention(q, k, v, alibi_slopes=slopes, backend="triton")
    assert torch.equal(alone, torch.autograd.grad(out.sum(), slopes)[0])


def test_what_is_left_to_the_reference():
    """Tangents, transforms, a sink, and derivatives of gradients that are given: refused by name, else computed by another."""
    q, k, v, slopes = (x.detach() for x in given())
    along = lambda name: torch.func.jvp(  # noqa: E731
        lambda s: flashsci.attention(q, k, v, alibi_slopes=s, backend=name), (slopes,), (torch.ones_like(slopes),)
    )
    by_transform = lambda name: torch.func.grad(  # noqa: E731
        lambda s: flashsci.attention(q, k, v, alibi_slopes=s, backend=name).sum()
    )(slopes)
    beside_sink = lambda name: flashsci.attention(  # noqa: E731
        q, k, v, alibi_slopes=slopes.clone().requires_grad_(), sink=torch.zeros(4), backend=name
    )
    out, lse = flashsci.attention(q, k, v, alibi_slopes=slopes, return_lse=True, backend="reference")
    of_gradients = lambda name: flashsci.attention_backward(  # noqa: E731
        out, q, k, v, out, lse, alibi_slopes=slopes.clone().requires_grad_(), backend=name
    )
    for ask in (along, by_transform, beside_sink, of_gradients):
        with pytest.raises(flashsci.BackendError, match="slopes"):
            ask("triton")
        ask("auto")
