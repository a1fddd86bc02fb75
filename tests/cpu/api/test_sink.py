"""Attention sinks: against a softmax with one more column, under the derivatives that kernels have no part in."""

import pytest
import torch

import flashsci
from flashsci.backends import triton
from tests.support.naive import naive
from tests.support.opaque import define

BACKENDS = ["reference", "triton"]
SINKS = torch.tensor([0.5, -torch.inf, 3.0, -2.0])


def draw(*shape):
    return torch.randn(*shape, requires_grad=True)


def agree(found, truth):
    """Small unit-scale problems: within 32 roundings of one."""
    assert found.dtype == torch.float32 and found.shape == truth.shape
    assert torch.equal(torch.isfinite(found), torch.isfinite(truth))
    error = torch.where(torch.isfinite(truth), found.double() - truth.double(), 0.0)
    assert error.abs().max() <= 32 * torch.finfo(torch.float32).eps


def gradients(results, cotangents, *leaves):
    return torch.autograd.grad(results, leaves, cotangents, retain_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_one_more_column(backend, half):
    """Every query of the last batch member sees no key: its out is 0 and its lse the sink, or -inf where there is none."""
    q, k, v = draw(2, 4, 5, 8), draw(2, 2, 7, 8), draw(2, 2, 7, 6)
    sink = SINKS.to(torch.bfloat16 if half else torch.float32).requires_grad_()
    mask = torch.rand(2, 1, 5, 7) < 0.7
    mask[1] = False
    leaves = q, k, v, sink
    inputs = [x.detach().bfloat16() for x in leaves[:3]] if half else leaves[:3]
    inputs = [x.requires_grad_() for x in inputs]
    out, lse = flashsci.attention(*inputs, mask=mask, sink=sink, return_lse=True, backend=backend)
    dout, dlse = torch.randn(2, 4, 5, 6), torch.randn(2, 4, 5)
    assert torch.equal(lse[1, :, 0], sink.float()) and not out[1].any()
    found = gradients((out, lse), (dout.to(out.dtype), dlse), *inputs, sink)
    assert all(x.isfinite().all() for x in found) and found[3][1] == 0
    if half:
        return
    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = naive(*wide[:3], mask=mask, sink=wide[3])
    of_truth = gradients(truth, (dout.double(), dlse.double()), *wide)
    for a, b in zip((out, lse, *found), (*truth, *of_truth), strict=True):
        agree(a, b)
    recorded = torch.autograd.grad((out, lse), (*inputs, sink), (dout, dlse), create_graph=True)
    assert recorded[3][1] == 0
    for a, b in zip(recorded, of_truth, strict=True):
        agree(a.detach(), b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed(backend):
    q, k, v, sink = draw(9, 4, 8), draw(8, 2, 8), draw(8, 2, 8), SINKS.clone()
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 4, 9], [0, 5, 8, 8]))
    out, lse = flashsci.varlen_attention(q, k, v, cu_q, cu_k, sink=sink, return_lse=True, backend=backend)
    first = naive(*(x[:n].transpose(0, 1) for x, n in ((q, 4), (k, 5), (v, 5))), sink=sink)
    agree(out[:4].transpose(0, 1), first[0])
    agree(lse[:, :4], first[1])
    assert not out[4:].any() and torch.equal(lse[:, 4:], sink[:, None].expand(4, 5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_heads(backend):
    q, sink = draw(6, 8), torch.randn(1, requires_grad=True)
    found = flashsci.attention(q, q, q, sink=sink, return_lse=True, backend=backend)
    truth = naive(q, q, q, sink=sink)
    for a, b in zip(found, truth, strict=True):
        agree(a, b)
    cotangents = [torch.randn_like(x) for x in found]
    agree(*(gradients(x, cotangents, sink)[0] for x in (found, truth)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_extremes(backend):
    """Far above or below every score, nothing cancels and nothing overflows."""
    q, k, v = draw(1, 4, 3, 8), draw(1, 4, 5, 8), draw(1, 4, 5, 8)
    bias = torch.tensor([0.0, 0.0, -1e9, 1e6])[:, None, None].expand(4, 3, 5)
    sink = torch.tensor([-1e30, 1e30, 2.0, 3.0], requires_grad=True)
    plain = flashsci.attention(q, k, v, bias=bias, backend=backend)
    out, lse = flashsci.attention(q, k, v, bias=bias, sink=sink, return_lse=True, backend=backend)
    for head in (0, 3):  # the sink has no share
        assert torch.equal(out[:, head], plain[:, head])
    assert not out[:, 1:3].any() and torch.equal(lse[0, 1:3, 0], sink[1:3])
    found = gradients((out, lse), [torch.randn_like(x) for x in (out, lse)], q, k, v, sink)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_under_the_lse_with_the_sink(backend):
    """P recomputed from that lse leaves the sink its share: attention_backward needs no sink."""
    q, k, v = draw(1, 2, 5, 8), draw(1, 1, 70, 8), draw(1, 1, 70, 8)
    sink = SINKS[1:3].clone().requires_grad_()
    out, lse = flashsci.attention(q, k, v, sink=sink, return_lse=True, backend=backend)
    dout = torch.randn_like(out)
    *due, dsink = gradients(out, dout, q, k, v, sink)
    detached = [x.detach() for x in (dout, q, k, v, out, lse)]
    found = flashsci.attention_backward(*detached, backend=backend)
    for a, b in zip(found[:3], due, strict=True):
        agree(a, b)
    delta = (dout * out).sum(-1)
    agree(dsink, -(torch.exp(sink[:, None] - lse) * delta).sum((0, 2)).detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_derivatives(backend, stand_in):
    """Triton's kernels stood in for by closed formulas in fp64."""
    stand_in(triton, rejects=lambda problem: None, **define())
    shapes = (2, 3, 2), (1, 4, 2), (1, 4, 3), (2,)
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def call(q, k, v, sink):
        return flashsci.attention(q, k, v, sink=sink, causal=True, return_lse=True, backend=backend)

    assert torch.autograd.gradcheck(call, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, tensors)

    def scalar(*x):
        return sum(y.sin().sum() for y in call(*x))

    primals = [x.detach() for x in tensors]
    argnums = tuple(range(4))
    directions = tuple(torch.randn_like(x) for x in primals)
    over = torch.func.jvp(torch.func.grad(scalar, argnums), tuple(primals), directions)[1]
    (loss,) = gradients(scalar(*tensors), None, tensors[3])  # first order of the sink alone
    first = torch.autograd.grad(scalar(*tensors), tensors, create_graph=True)
    reverse = torch.autograd.grad(first, tensors, directions)
    torch.testing.assert_close(over, reverse, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(loss, first[3].detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_sink_is_learnt(backend):
    q, k, v = torch.randn(3, 1, 4, 6, 8)
    sink = SINKS.clone().requires_grad_()
    out = flashsci.attention(q, k, v, sink=sink, backend=backend)
    truth = naive(q.double(), k.double(), v.double(), sink=sink.double())[0]
    agree(out, truth)
    dout = torch.randn_like(out)
    agree(*(gradients(x, dout.to(x.dtype), sink)[0] for x in (out, truth)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap(backend):
    q, k, v = torch.randn(3, 5, 2, 4, 6, 8)

    def call(q, k, v):
        return flashsci.attention(q, k, v, sink=SINKS, return_lse=True, backend=backend)

    for found, due in zip(torch.vmap(call)(q, k, v), call(q, k, v), strict=True):
        agree(found, due)


def test_refusals():
    q = torch.randn(1, 4, 6, 8)
    half = q.bfloat16()
    weight = torch.rand(6, requires_grad=True)
    for kind, words, given in (
        (TypeError, "sink must be a torch.Tensor or None, got float", dict(sink=0.5)),
        (TypeError, "q's dtype .* or float32, got torch.float16", dict(sink=SINKS.half())),
        (ValueError, r"\[Hq\] = \[4\], got \[1, 4\]", dict(sink=SINKS[None])),
        (ValueError, "sink is on meta", dict(sink=SINKS.to("meta"))),
        (flashsci.BackendError, "no attention sinks", dict(sink=SINKS, backend="sdpa")),
        (flashsci.BackendError, "key weights beside a sink", dict(sink=SINKS, key_weight=weight, backend="triton")),
    ):
        with pytest.raises(kind, match=words):
            flashsci.attention(half, half, half, **given)
    assert flashsci.explain(q, q, q, sink=SINKS).chosen == "reference"
    found = flashsci.attention(q, q, q, sink=SINKS, key_weight=weight)
    agree(found, naive(q, q, q, sink=SINKS, key_weight=weight)[0])


@pytest.mark.parametrize("lse", [1.0, 8.0, 20.0, 60.0])
@pytest.mark.parametrize("mode", ["recorded", "func", "jvp"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_sink_that_takes_little(backend, mode, lse):
    """To relative precision: a share of e^-60 has a gradient, too, which 1 - sigmoid would lose."""
    q, k, v = (torch.randn(1, 4, 5, 8) for _ in range(3))
    dout = torch.randn(1, 4, 5, 8)
    sink = torch.full((4,), 0.5)

    def call(sink, backend=backend, dtype=torch.float32):
        x = [y.to(dtype) for y in (q, k, v)]
        return flashsci.attention(*x, bias=torch.tensor(lse, dtype=dtype), sink=sink, backend=backend)

    def along(call, sink, dout):
        if mode == "recorded":
            leaf = sink.clone().requires_grad_()
            return torch.autograd.grad(call(leaf), leaf, dout, create_graph=True)[0].detach()
        if mode == "func":
            return torch.func.vjp(call, sink)[1](dout)[0]
        return torch.func.jvp(call, (sink,), (torch.ones_like(sink),))[1]

    found = along(call, sink, dout)
    due = along(lambda s: call(s, "reference", torch.float64), sink.double(), dout.double())
    torch.testing.assert_close(found.double(), due, rtol=1e-3, atol=0)
