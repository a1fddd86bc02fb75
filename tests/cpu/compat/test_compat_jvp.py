"""flashsci.compat.jvp_flash_attention: forward mode, its tangents' gradients, and torch.compile."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.compat.jvp_flash_attention import JVPAttn, attention, attention_jvp
from tests.support import standins

FP32, BF16 = torch.float32, torch.bfloat16
# jvp_flash_attention 0.14.0, jvp_attention.py; `attention = JVPAttn.fwd`
RECORDED = (
    "fwd(q, k, v, attn_mask=None, dropout_p=0.0, causal=False, sm_scale=None, warp_specialize=True, USE_TMA=True, "
    "verify_attn_mask=True)"
)
THROUGH = pytest.mark.parametrize("through", ["func", "dual", "explicit"])


def test_signatures():
    for function in (attention, JVPAttn.fwd, JVPAttn.fwd_dual):
        standins.same_signature(function, RECORDED)


@THROUGH
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_tangents_and_gradients(backend, dtype, through):
    standins.tangents(backend, "cpu", dtype, length=12, through=through)


@pytest.mark.parametrize("mask", ["bool", "-1e9", "-100", "-inf"])
def test_masks(mask):
    standins.tangents("triton", "cpu", FP32, mask)


@pytest.mark.parametrize("mask", ["bool", "-1e9"])
def test_masks_without_a_transform(mask):
    standins.tangents("triton", "cpu", FP32, mask, through="explicit", length=12)


@pytest.mark.parametrize("mask", [None, "bool"])
def test_causal(mask):
    standins.tangents("triton", "cpu", FP32, mask, causal=True)


def six(*shape, dtype=torch.float32, grad=False):
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for _ in range(6)]


def formula(q, k, v):
    return (q.shape[-1] ** -0.5 * q @ k.mT).softmax(-1) @ v


def mean_flow(call, q, k, v, *tangents):
    """The loss of MeanFlow: its target holds the tangent, without a gradient."""
    out, tangent = call(q, k, v, *tangents)
    return (out - (v - tangent).detach()).square().mean()


def test_a_mean_flow_step():
    leaves = six(1, 2, 6, 8, dtype=torch.float64, grad=True)
    calls = (
        lambda q, k, v, *t: torch.func.jvp(formula, (q, k, v), t),
        lambda q, k, v, *t: torch.func.jvp(attention, (q, k, v), t),
        lambda *x: attention_jvp(*x)[::2],
    )
    truth, *found = (torch.autograd.grad(mean_flow(c, *leaves), leaves[:3]) for c in calls)
    for gradients in found:
        for a, b in zip(gradients, truth, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_under_compile(backend):
    """fullgraph: nothing is left to eager mode."""
    leaves = six(1, 2, 6, 16, grad=True)

    def explicit(*x):
        return attention_jvp(*x, backend=backend)[::2]

    def transformed(q, k, v, *t):
        with flashsci.use_backend(backend):
            return torch.func.jvp(attention, (q, k, v), t)

    with flashsci.use_backend(backend):
        expected = transformed(*leaves)
        truth = torch.autograd.grad(mean_flow(transformed, *leaves), leaves[:3])
        for call in (explicit, lambda q, k, v, *t: torch.func.jvp(attention, (q, k, v), t)):
            torch._dynamo.reset()
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(*leaves), expected)
            found = torch.autograd.grad(mean_flow(compiled, *leaves), leaves[:3])
            for a, b in zip(found, truth, strict=True):
                torch.testing.assert_close(a, b)


def test_forward_mode_makes_no_scores():
    """Off the CPU `auto` would leave dense calls to SDPA, which has no forward mode; who computes the lse has."""
    seen = []
    original = flashsci.attention

    def spied(*arguments, **options):
        seen.append(options["return_lse"])
        return original(*arguments, **options)

    q, k, v, *t = six(1, 2, 6, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashsci, "attention", spied)
        attention(q, k, v)
        torch.func.jvp(attention, (q, k, v), tuple(t))
        attention_jvp(q, k, v, *t)
    assert seen == [False, True, True]


def test_absent_tangents_are_zero():
    q, k, v, tq, tk, tv = six(1, 2, 6, 8, dtype=torch.float64)
    zero = torch.zeros_like(q)
    for given in ((tq, None, None), (None, tk, tv), (None, None, None)):
        full = [zero if t is None else t for t in given]
        truth = torch.func.jvp(formula, (q, k, v), tuple(full))
        out, lse, tangent = attention_jvp(q, k, v, *given)
        torch.testing.assert_close((out, tangent), truth)
        torch.testing.assert_close(lse, (8**-0.5 * q @ k.mT).logsumexp(-1))


def test_gradients_of_tangents_by_tangents():
    leaves = six(1, 1, 3, 4, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(lambda *x: attention_jvp(*x)[2], leaves)


def test_scale_and_dropout():
    q, k, v, *t = six(1, 2, 40, 16)
    torch.testing.assert_close(attention(q, k, v, sm_scale=0.0), v.mean(-2, True).expand_as(v))
    out, _, tangent = attention_jvp(q, k, v, None, None, t[2], sm_scale=0.0)
    torch.testing.assert_close(tangent, t[2].mean(-2, True).expand_as(v))
    torch.testing.assert_close(out, v.mean(-2, True).expand_as(v))
    # One mask for values and tangents: where they are the same, so are the results.
    out, tangent = torch.func.jvp(lambda v: attention(q, k, v, dropout_p=0.4), (v,), (v,))
    torch.testing.assert_close(out, tangent)
    assert not torch.allclose(out, attention(q, k, v), atol=1e-2)


def test_a_learnt_mask_has_its_gradient():
    q, k, v, *_ = six(1, 2, 6, 8, dtype=torch.float64)
    bias = torch.randn(1, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda b: attention(q, k, v, b), bias)


def test_what_does_not_fit_is_refused():
    q, k, v, tq, tk, tv = six(1, 2, 6, 8)
    with pytest.raises(ValueError, match="tk must have the shape and dtype of k"):
        attention_jvp(q, k, v, tq, tk[..., :4], tv)
    with pytest.raises(ValueError, match="tv must have the shape and dtype of v"):
        attention_jvp(q, k, v, tq, tk, tv.double())
    with pytest.raises(ValueError, match="mask of shape"):
        attention(q, k, v, torch.ones(6, 5, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="Nested forward mode"):
        torch.func.jvp(lambda q: attention_jvp(q, k, v, tq, tk, tv)[0], (q,), (tq,))
