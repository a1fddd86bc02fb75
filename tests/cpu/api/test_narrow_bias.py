"""A 16-bit bias beside float32 q, k and v: the same as that bias in float32, with a gradient in 16 bits."""

import pytest
import torch

import flashsci
from flashsci import attention, attention_backward, varlen_attention

BACKENDS = ("reference", "sdpa", "triton")


def made(dtype, wide=torch.float32):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 16, dtype=wide, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 9, 9, 3).to(dtype).permute(0, 3, 1, 2).requires_grad_()
    return q, k, v, bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_as_in_float32(backend, dtype):
    q, k, v, bias = made(dtype)
    options = {"backend": backend}
    out = attention(q, k, v, bias=bias, **options)
    wide = bias.detach().float().requires_grad_()
    expected = attention(q, k, v, bias=wide, **options)
    assert out.dtype == torch.float32 and torch.equal(out, expected)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, bias), dout)
    dq, dbias = torch.autograd.grad(expected, (q, wide), dout)
    assert torch.equal(found[0], dq)
    assert found[1].dtype == dtype and torch.equal(found[1], dbias.to(dtype))


def test_gradients_by_themselves_and_packed_calls():
    q, k, v, bias = (x.detach() for x in made(torch.bfloat16))
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    found = attention_backward(out, q, k, v, out, lse, bias=bias)
    expected = attention_backward(out, q, k, v, out, lse, bias=bias.float())
    assert found.dbias.dtype == torch.bfloat16
    assert torch.equal(found.dbias, expected.dbias.bfloat16()) and torch.equal(found.dq, expected.dq)
    edges = torch.tensor([0, 4, 9], dtype=torch.int32)
    rows = torch.randn(9, 3, 16)
    pairs = torch.randn(1, 16 + 25).bfloat16()
    packed = varlen_attention(rows, rows, rows, edges, bias=pairs)
    assert torch.equal(packed, varlen_attention(rows, rows, rows, edges, bias=pairs.float()))


def test_narrower_q_takes_no_other_halves():
    q = torch.randn(1, 2, 4, 8).half()
    with pytest.raises(TypeError, match=r"q's dtype \(torch.float16\) or float32, got torch.bfloat16"):
        attention(q, q, q, bias=torch.zeros(4, 4).bfloat16())
    q = q.float()
    with pytest.raises(TypeError, match=r"bfloat16, float16 or float32, got torch\.float64"):
        attention(q, q, q, bias=torch.zeros(4, 4).double())
    assert flashsci.explain(q, q, q, bias=torch.zeros(4, 4).bfloat16()).chosen is not None
    assert attention(q.double(), q.double(), q.double(), bias=torch.zeros(4, 4).half()).dtype == torch.float64


def test_compiled():
    q, k, v, bias = made(torch.bfloat16)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, bias=bias), attention(q, k, v, bias=bias))
