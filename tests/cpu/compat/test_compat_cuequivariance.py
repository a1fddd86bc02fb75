"""flashsci.compat.cuequivariance against the documented formula of cuequivariance_torch.triangle_attention."""

from __future__ import annotations

import math

import pytest
import torch

import flashsci
from flashsci.compat.cuequivariance import mask_to_kv_lengths, triangle_attention
from tests.support import standins

BACKENDS = pytest.mark.parametrize("backend", ["reference", "sdpa", "triton"])
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# cuequivariance_torch 0.13.0, primitives/triangle.py
RECORDED = "triangle_attention(q, k, v, bias, mask=None, scale=None, return_aux=False, *, kv_lengths=None)"


def test_signatures():
    standins.same_signature(triangle_attention, RECORDED)
    standins.same_signature(mask_to_kv_lengths, "mask_to_kv_lengths(mask)")


@BACKENDS
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_values_and_gradients(backend, dtype):
    standins.triangle(backend, "cpu", dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"odd": True},
        {"dims": (12, 20), "scale": 0.3},
        {"sizes": (1, 2, 1, 5, 17)},
    ],
    ids=str,
)
def test_layouts_head_dims_and_biases(options):
    standins.triangle("triton", "cpu", FP32, **options)


def inputs(*shape):
    q, k, v = torch.randn(3, *(shape or (1, 4, 2, 6, 16))).unbind(0)
    return q, k, v, torch.randn(*q.shape[:-4], 1, *q.shape[-3:-1], k.shape[-2])


def test_without_a_mask_it_is_attention():
    q, k, v, bias = inputs()
    torch.testing.assert_close(triangle_attention(q, k, v, bias), standins.triangle_formula(q, k, v, bias))


def test_without_batch_the_result_has_one():
    q, k, v, bias = inputs(4, 2, 6, 16)
    mask = torch.rand(4, 1, 1, 6) < 0.6
    out = triangle_attention(q, k, v, bias, mask)
    assert out.shape == (1, 4, 2, 6, 16)
    torch.testing.assert_close(out[0], standins.triangle_formula(q, k, v, bias, mask))


def test_a_bias_of_another_dtype_is_cast_to_float32():
    q, k, v, bias = inputs()
    bias = bias.bfloat16().requires_grad_()
    out = triangle_attention(q, k, v, bias)
    torch.testing.assert_close(out, triangle_attention(q, k, v, bias.float()), rtol=0, atol=0)
    (found,) = torch.autograd.grad(out.sum(), bias)
    assert found.dtype == torch.bfloat16 and found.shape == bias.shape


def test_a_mask_of_numbers_is_cast():
    q, k, v, bias = inputs()
    mask = torch.randint(0, 3, (1, 4, 1, 1, 6))
    out = triangle_attention(q, k, v, bias, mask)
    torch.testing.assert_close(out, triangle_attention(q, k, v, bias, mask != 0), rtol=0, atol=0)


def test_lengths():
    q, k, v, bias = inputs()
    lengths = torch.tensor([6, 3, 0, 9], dtype=torch.int32).view(1, 4, 1, 1, 1)
    mask = torch.arange(6) < lengths
    out = triangle_attention(q, k, v, bias, kv_lengths=lengths)
    torch.testing.assert_close(out, triangle_attention(q, k, v, bias, mask), rtol=0, atol=0)
    assert torch.equal(mask_to_kv_lengths(mask), lengths.clamp(max=6))
    assert torch.equal(mask_to_kv_lengths(mask[0].float()), lengths.clamp(max=6))
    with pytest.raises(ValueError, match="both"):
        triangle_attention(q, k, v, bias, mask, kv_lengths=lengths)
    with pytest.raises(ValueError, match="right-padded"):
        mask_to_kv_lengths(mask.flip(-1))
    with pytest.raises(ValueError, match=r"\[B, N, 1, 1, K\]"):
        mask_to_kv_lengths(mask[0, 0])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_auxiliary_results(masked, dtype):
    q, k, v, bias = (x.to(dtype) for x in inputs())
    mask = torch.rand(1, 4, 1, 1, 6) < 0.6 if masked else None
    if masked:
        mask[:, 0], mask[:, 1, ..., 0] = False, True
    out, lse, maximum = triangle_attention(q, k, v, bias, mask, return_aux=True)
    torch.testing.assert_close(out, triangle_attention(q, k, v, bias, mask))
    scores = 0.25 * q @ k.mT + bias
    scores = scores if mask is None else scores.masked_fill(~mask, -1e9)
    torch.testing.assert_close(lse, scores.logsumexp(-1, keepdim=True))
    assert lse.dtype == dtype
    if masked:
        assert lse[:, 0].eq(-1e9 + math.log(6)).all()
    for use in (lambda m: m.shape, lambda m: m + 1, lambda m: lse - m, lambda m: torch.exp(m), lambda m: m[0]):
        with pytest.raises(flashsci.BackendError, match="maximum of the scores"):
            use(maximum)


def test_autocast():
    q, k, v, bias = inputs()
    mask = torch.rand(1, 4, 1, 1, 6) < 0.6
    with torch.autocast("cpu", torch.bfloat16):
        out = triangle_attention(q, k, v, bias, mask)
    assert out.dtype == torch.bfloat16


def test_under_compile():
    q, k, v, bias = (x.requires_grad_() for x in inputs())
    mask = torch.rand(1, 4, 1, 1, 6) < 0.6
    compiled = torch.compile(triangle_attention, fullgraph=True, backend="aot_eager")
    truth = triangle_attention(q, k, v, bias, mask)
    found = compiled(q, k, v, bias, mask)
    torch.testing.assert_close(found, truth)
    for a, b in zip(*(torch.autograd.grad(x.sum(), (q, v, bias)) for x in (found, truth)), strict=True):
        torch.testing.assert_close(a, b)


def test_no_keys():
    q, k, v, bias = inputs(1, 2, 2, 3, 16)
    mask = torch.ones(1, 2, 1, 1, 0, dtype=torch.bool)
    assert triangle_attention(q, k[..., :0, :], v[..., :0, :], bias[..., :0], mask).eq(0).all()


def test_second_order():
    q, k, v, bias = (x.double().requires_grad_() for x in inputs(1, 2, 1, 3, 4))
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool().view(1, 2, 1, 1, 3)
    with flashsci.use_backend("reference"):
        assert torch.autograd.gradgradcheck(lambda *x: triangle_attention(*x, mask), (q, k, v, bias))


def test_shapes_that_do_not_fit():
    q, k, v, bias = inputs()
    with pytest.raises(ValueError, match="bias of shape"):
        triangle_attention(q, k, v, bias[..., :3])
    with pytest.raises(ValueError, match="mask of shape"):
        triangle_attention(q, k, v, bias, torch.ones(1, 4, 1, 1, 5, dtype=torch.bool))
