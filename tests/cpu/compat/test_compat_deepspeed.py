"""flashsci.compat.deepspeed against the formula of DS4Sci_EvoformerAttention, with masks as numbers."""

from __future__ import annotations

import pytest
import torch

import flashsci
from flashsci.compat.deepspeed import DS4Sci_EvoformerAttention
from flashsci.testing import Inputs, Judge
from tests.support import standins

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# deepspeed 0.19.8, ops/deepspeed4science/evoformer_attn.py
RECORDED = "DS4Sci_EvoformerAttention(Q, K, V, biases)"


def test_signature():
    standins.same_signature(DS4Sci_EvoformerAttention, RECORDED)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_both_biases(backend, dtype):
    standins.evoformer(backend, "cpu", dtype)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_a_mask_alone(backend, dtype):
    standins.evoformer(backend, "cpu", dtype, pairs=False)


def test_odd_layouts_and_head_dims():
    standins.evoformer("triton", "cpu", FP32, sizes=(1, 2, 18, 3, 10), odd=True)


def inputs(dtype=torch.float64, s=9):
    q, k, v = (torch.randn(2, 2, s, 2, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    keys = torch.randn(2, 2, 1, 1, s, dtype=dtype, requires_grad=True)
    pairs = torch.randn(2, 1, 2, s, s, dtype=dtype, requires_grad=True)
    return q, k, v, keys, pairs


@pytest.mark.parametrize("shift", [0.0, 300.0])
@pytest.mark.parametrize("given", ["keys", "pairs", "both"])
def test_any_numbers_have_values_and_gradients(given, shift):
    """Both biases learnt; e^300 would overflow."""
    q, k, v, keys, pairs = inputs()
    biases = [keys + shift if given != "pairs" else None, pairs if given != "keys" else None]
    leaves = [q, k, v, *([keys] if given != "pairs" else []), *([pairs] if given != "keys" else [])]
    out, expected = DS4Sci_EvoformerAttention(q, k, v, biases), standins.evoformer_formula(q, k, v, biases)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    dout = torch.randn_like(out)
    found, truth = (torch.autograd.grad(x, leaves, dout) for x in (out, expected))
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("depth", [60, 95, 128])
def test_biases_that_cancel_each_other(depth, backend):
    """What the first takes from a key the second gives back: e^-95 is subnormal, e^-128 no number of float32."""
    b, n, s, h, d = 1, 2, 17, 2, 8
    q, k, v, dout = torch.randn(4, b, n, s, h, d)
    keys = torch.randint(-512, 512, (b, n, 1, 1, s)) / 256  # so that the sum of both is exact
    pairs = torch.randint(-512, 512, (b, 1, h, s, s)) / 256
    keys[..., 3] -= depth
    pairs[..., 3] += depth
    heads_first = [x.transpose(2, 3) for x in (q, k, v, dout)]
    judge = Judge(Inputs(*heads_first[:3], dout=heads_first[3], bias=keys + pairs))
    leaves = [x.requires_grad_() for x in (q, k, v, keys, pairs)]
    with flashsci.use_backend(backend):
        out = DS4Sci_EvoformerAttention(q, k, v, [keys, pairs])
        dq, dk, dv, dkeys, dpairs = torch.autograd.grad(out, leaves, dout)
    found = dict(out=out.detach(), dq=dq, dk=dk, dv=dv)
    judge.require({name: x.transpose(2, 3) for name, x in found.items()})
    truth = judge.truth["dbias"]
    for a, t in ((dkeys, truth.sum((2, 3), keepdim=True)), (dpairs, truth.sum(1, keepdim=True))):
        assert (a - t).abs().max() <= 1e-5 * t.abs().max()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("low", [-1400.0, -1e4, -1e9, -torch.inf, torch.finfo(FP32).min])
def test_low_numbers_are_masks_beside_a_second_bias(low, backend):
    """Also to the gradients, which stay numbers, and in a sequence of nothing else."""
    q, k, v, keys, pairs = (x.detach().float() for x in inputs())
    keys[0, 0, ..., 2:5], keys[0, 1] = low, low
    pairs[..., 3] += 400
    leaves = [x.requires_grad_() for x in (q, k, v, keys, pairs)]
    with flashsci.use_backend(backend):
        out = DS4Sci_EvoformerAttention(q, k, v, [keys, pairs])
        found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    hidden = keys.detach().clone()
    hidden[0, 0, ..., 2:5], hidden[0, 1] = -torch.inf, 0.0
    wide = [x.detach().double() for x in (q, k, v, hidden, pairs)]
    expected = standins.evoformer_formula(*wide[:3], wide[3:])
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    assert all(x.isfinite().all() for x in found) and found[3][0, 0, ..., 2:5].eq(0).all()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("low", [-136.0, -150.0, -1300.0])
def test_a_number_that_may_be_no_mask_is_not_taken_for_one(low, backend):
    Q, K, V = torch.randn(3, 1, 2, 5, 2, 8).unbind(0)
    keys, pairs = torch.zeros(1, 2, 1, 1, 5), torch.randn(1, 1, 2, 5, 5)
    keys[0, 0, ..., 2] = low
    pairs[..., 2] = -low
    with flashsci.use_backend(backend):
        out = DS4Sci_EvoformerAttention(Q, K, V, [keys, pairs])
    assert out[:, 0].isnan().all() and out[:, 1].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_gradient_of_the_first_bias_in_single_precision(backend):
    wide = inputs(s=11)
    dout = torch.randn_like(wide[0])
    truth = torch.autograd.grad(standins.evoformer_formula(*wide[:3], list(wide[3:])), wide, dout)
    narrow = [x.detach().float().requires_grad_() for x in wide]
    with flashsci.use_backend(backend):
        out = DS4Sci_EvoformerAttention(*narrow[:3], narrow[3:])
        found = torch.autograd.grad(out, narrow, dout.float())
    for a, b in zip(found, truth, strict=True):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def test_second_order():
    q, k, v, keys, pairs = inputs(s=3)
    with flashsci.use_backend("reference"):
        assert torch.autograd.gradgradcheck(
            lambda *x: DS4Sci_EvoformerAttention(*x[:3], x[3:]),
            [x[:1, :1].detach().requires_grad_() for x in (q, k, v, keys, pairs)],
        )


@pytest.mark.parametrize("given", [slice(0), slice(1), slice(2)])
def test_under_compile(given):
    q, k, v, *biases = inputs()
    compiled = torch.compile(DS4Sci_EvoformerAttention, fullgraph=True, backend="aot_eager")
    found, truth = (f(q, k, v, biases[given]) for f in (compiled, DS4Sci_EvoformerAttention))
    torch.testing.assert_close(found, truth)
    leaves = [q, k, v, *biases[given]]
    for a, b in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (found, truth)), strict=True):
        torch.testing.assert_close(a, b)


def test_without_biases_dims_are_free():
    q, k, v = (torch.randn(5, 2, 8, requires_grad=True) for _ in range(3))
    given = []
    out = DS4Sci_EvoformerAttention(q, k, v, given)
    torch.testing.assert_close(out, standins.evoformer_formula(q, k, v, []))
    assert given == [] and out.is_contiguous()


def test_what_does_not_fit_is_refused():
    q, k, v, keys, pairs = inputs()
    with pytest.raises(ValueError, match="may be two"):
        DS4Sci_EvoformerAttention(q, k, v, [keys, pairs, pairs])
    with pytest.raises(ValueError, match=r"biases\[0\] must have shape \[B, N, 1, 1, S\] = \[2, 2, 1, 1, 9\]"):
        DS4Sci_EvoformerAttention(q, k, v, [pairs, keys])
    with pytest.raises(ValueError, match=r"biases\[1\] must have shape"):
        DS4Sci_EvoformerAttention(q, k, v, [keys, pairs.expand(2, 2, 2, 9, 9)])
    with pytest.raises(ValueError, match=r"\[B, N, S, H, D\]"):
        DS4Sci_EvoformerAttention(q[0], k[0], v[0], [keys[0]])
    with pytest.raises(TypeError, match="bias must have q's dtype"):
        DS4Sci_EvoformerAttention(q.half(), k.half(), v.half(), [None, pairs.bfloat16()])
