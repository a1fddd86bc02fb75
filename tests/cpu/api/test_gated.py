"""A gate of pairs: what it means, who computes it, and what refuses it."""

from __future__ import annotations

import sys

import pytest
import torch

import flashsci
from flashsci.backends import triton
from flashsci.backends.triton.launcher import Launch
from flashsci.call import plans
from flashsci.call.ops import Saved, Scalars, Tensors
from flashsci.testing import Inputs, Judge, evaluate

BACKENDS = ("reference", "triton")
every = pytest.mark.parametrize("backend", BACKENDS)


def drawn(*lead, heads=(4, 2), rows=(9, 11), dims=(16, 8), dtype=torch.float32):
    (hq, hk), (sq, sk), (d, dv) = heads, rows, dims
    shapes = ((hq, sq, d), (hk, sk, d), (hk, sk, dv))
    return [torch.randn(*lead, *s, dtype=dtype).requires_grad_() for s in shapes]


def written(q, k, v, gate, **options):
    """The formula in fp64 with the probabilities in memory."""
    q, k, v, gate = (x.detach().double() for x in (q, k, v, gate))
    group = q.shape[-3] // k.shape[-3]
    s = q @ k.repeat_interleave(group, -3).mT * q.shape[-1] ** -0.5
    if options.get("causal"):
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -torch.inf)
    return (s.softmax(-1) * gate) @ v.repeat_interleave(group, -3)


@every
@pytest.mark.parametrize("options", ({}, {"causal": True}), ids=str)
@pytest.mark.parametrize("shape", ((2, 4, 9, 11), (4, 9, 11), (2, 1, 9, 11), (11,), (9, 1), ()), ids=str)
def test_it_multiplies_probabilities(shape, options, backend):
    q, k, v = drawn(2)
    gate = torch.randn(shape)
    out, lse = flashsci.attention(q, k, v, pair_gate=gate, return_lse=True, backend=backend, **options)
    torch.testing.assert_close(out.double(), written(q, k, v, gate, **options), rtol=1e-5, atol=1e-5)
    plain = flashsci.attention(q, k, v, return_lse=True, backend=backend, **options)[1]
    assert torch.equal(lse, plain)


@every
def test_leading_dims_of_any_number(backend):
    """Those of q, k, v broadcast, and the gate broadcasts to them."""
    q, k, v = drawn(2, 1, 3)
    k = torch.randn(5, 1, 2, 11, 16).requires_grad_()
    gate = torch.randn(5, 1, 1, 9, 11).requires_grad_()
    out, lse = flashsci.attention(q, k, v, pair_gate=gate, return_lse=True, backend=backend)
    assert out.shape == (2, 5, 3, 4, 9, 8) and lse.shape == out.shape[:-1]
    kk, vv, qq = (x.detach().expand(2, 5, 3, *x.shape[-3:]) for x in (k, v, q))
    torch.testing.assert_close(out.double(), written(qq, kk, vv, gate), rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v, gate), dout)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, gate)]
    due = torch.autograd.grad(flashsci.attention(*wide[:3], pair_gate=wide[3]), wide, dout.double())
    for x, y in zip(found, due, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@every
def test_values_wider_than_keys_are_one_call(backend):
    """D 129 with Dv 384, as descriptor attention has them."""
    q, k, v = (x.detach() for x in drawn(1, heads=(1, 1), rows=(17, 23), dims=(129, 384)))
    given = Inputs(q, k, v, pair_gate=torch.randn(17, 23), dout=torch.randn(1, 1, 17, 384))
    Judge(given, backend == "triton").require(evaluate(given, backend))


@every
def test_a_gate_of_ones_is_none(backend):
    q, k, v = drawn(2)
    gate = torch.ones(9, 11, requires_grad=True)
    dout = torch.randn(2, 4, 9, 8)
    found, due = (flashsci.attention(q, k, v, backend=backend, **options) for options in ({"pair_gate": gate}, {}))
    torch.testing.assert_close(found, due)
    dq, dgate = torch.autograd.grad(found, (q, gate), dout)
    torch.testing.assert_close(dq, torch.autograd.grad(due, q, dout)[0])
    # The gradient of a common factor is <dout, out>.
    torch.testing.assert_close(dgate.sum(), (dout * due).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", (False, True))
@every
def test_compiles_in_one_graph(backend, dynamic):
    torch._dynamo.reset()
    q, k, v = drawn(2)
    gate = torch.randn(4, 9, 11).requires_grad_()

    def call(q, k, v, gate):
        return flashsci.attention(q, k, v, pair_gate=gate, causal=True, backend=backend)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    dout = torch.randn(2, 4, 9, 8)
    for x, y in zip(
        (compiled(q, k, v, gate), *torch.autograd.grad(compiled(q, k, v, gate), (q, k, v, gate), dout)),
        (call(q, k, v, gate), *torch.autograd.grad(call(q, k, v, gate), (q, k, v, gate), dout)),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_opcheck():
    tensors = Tensors(*(x.detach() for x in drawn(2)), torch.randn(2, 1, 9, 11))
    scalars = Scalars(-1, -1, 0.25, 2.0, 3, 0, False, 0.0, "default", False, True)
    gate = torch.randn(1, 4, 9, 11)
    out, lse = triton.gated_calls.forward(tensors, gate, scalars)
    torch.library.opcheck(torch.ops.flashsci.triton_gated_forward.default, (*tensors, gate, *scalars))
    for need in (63, 32, 5):
        given = (torch.randn_like(out), None, *tensors, gate, out, lse, *scalars, need)
        torch.library.opcheck(torch.ops.flashsci.triton_gated_backward.default, given)


def test_transforms():
    """vmap, jvp and a Hessian-vector product, by whichever backend."""
    q, k, v = (x.detach() for x in drawn(3, heads=(2, 2)))
    gate = torch.randn(3, 2, 9, 11)
    for backend in BACKENDS:

        def call(q, gate, k=k[0], v=v[0], backend=backend):
            return flashsci.attention(q, k, v, pair_gate=gate, backend=backend)

        whole = torch.func.vmap(call)(q, gate)
        torch.testing.assert_close(whole[1], call(q[1], gate[1]))
        tangent = torch.randn_like(gate[0])
        _, along = torch.func.jvp(lambda g, call=call: call(q[0], g), (gate[0],), (tangent,))
        torch.testing.assert_close(along, call(q[0], tangent))  # linear in the gate
        loss = lambda q, call=call: call(q, gate[0]).square().sum()  # noqa: E731
        direction = torch.randn_like(q[0])
        product = torch.func.jvp(torch.func.grad(loss), (q[0],), (direction,))[1]
        leaf = q[0].clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        torch.testing.assert_close(product, torch.autograd.grad(first, leaf, direction)[0], rtol=1e-4, atol=1e-4)


def test_who_computes_it():
    q, k, v = drawn(2)
    gate = torch.randn(9, 11)
    found = flashsci.explain(q, k, v, pair_gate=gate)
    assert found.chosen in BACKENDS and "pair_gate" in found.reasons["sdpa"] and found.reasons["triton"] is None
    with pytest.raises(flashsci.BackendError, match=r"do not read pair_gate.*'reference' or 'triton' can"):
        flashsci.attention(q, k, v, pair_gate=gate, backend="sdpa")


def test_refusals():
    q, k, v = (x.detach() for x in drawn(2))
    with pytest.raises(ValueError, match=r"pair_gate of shape \[3, 11\] does not broadcast"):
        flashsci.attention(q, k, v, pair_gate=torch.randn(3, 11))
    with pytest.raises(TypeError, match=r"pair_gate is a bool tensor; a bool pattern goes in mask="):
        flashsci.attention(q, k, v, pair_gate=torch.ones(9, 11, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"pair_gate must be a torch\.Tensor or None"):
        flashsci.attention(q, k, v, pair_gate=1.0)
    eight = [x.to(torch.float8_e4m3fn) for x in (q, k, v.repeat(1, 1, 1, 2))]
    with pytest.raises((ValueError, flashsci.BackendError), match="pair_gate"):
        flashsci.attention(*eight, pair_gate=torch.randn(9, 11))
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="nested tensors take no pair_gate: pad them"):
        flashsci.attention(nested, nested, nested, pair_gate=torch.randn(2, 2, 5, 5))


@pytest.fixture
def examined(monkeypatch):
    """Grows with every call that is no repeat."""
    module, found = sys.modules["flashsci.api.attention"], []
    plan = module._plan
    monkeypatch.setattr(module, "_plan", lambda *given: found.append(given) or plan(*given))
    return found


@pytest.mark.parametrize("sink", (False, True))
@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("shape", ((2, 4, 9, 11), (4, 9, 11), (11,)), ids=str)
def test_alike_calls_are_repeats(shape, grad, sink, examined):
    """With their own results and gradients."""

    def given():
        leaves = [*drawn(2), torch.randn(shape), *([torch.randn(4)] if sink else [])]
        return [x.detach().requires_grad_(grad) for x in leaves]

    def call(q, k, v, gate, *sinks):
        options = dict(zip(("sink",), sinks, strict=False))
        return flashsci.attention(q, k, v, pair_gate=gate, causal=True, return_lse=True, backend="triton", **options)

    call(*given())
    for _ in range(2):
        tensors = given()
        before = len(examined)
        found = call(*tensors)
        assert len(examined) == before
        plans.plans.clear()
        due = call(*tensors)
        assert len(examined) == before + 1
        if grad:
            dout = torch.randn_like(due[0])
            found, due = ((*x, *torch.autograd.grad(x[0], tensors, dout)) for x in (found, due))
        for x, y in zip(found, due, strict=True):
            assert torch.equal(x, y)


def test_calls_that_differ_are_examined(examined):
    q, k, v = (x.detach() for x in drawn(2))
    gate = torch.randn(2, 4, 9, 11)

    def call(gate=gate, **options):
        return flashsci.attention(q, k, v, pair_gate=gate, backend="triton", **options)

    call()
    for gate_of_another, options in (
        (gate[:1], {}),
        (gate.mT.contiguous().mT, {}),
        (gate, {"causal": True}),
        (None, {}),
    ):
        before = len(examined)
        call(gate_of_another, **options)
        assert len(examined) == before + 1
    seeded = [call(dropout_p=0.5) for _ in range(3)]
    assert not torch.equal(seeded[1], seeded[2])


def test_hooks_of_saved_tensors_are_seen():
    """They may bring back other strides than were saved."""
    leaves = [*drawn(2), torch.randn(2, 4, 9, 11, requires_grad=True)]
    dout = torch.randn(2, 4, 9, 8)

    def gradients():
        return torch.autograd.grad(flashsci.attention(*leaves[:3], pair_gate=leaves[3], backend="triton"), leaves, dout)

    gradients()
    due = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.mT.contiguous().mT if x.dim() > 3 else x):
        found = gradients()
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("need", (32, 33, 63))
@pytest.mark.parametrize("shape", ((2, 4, 9, 11), (1, 4, 9, 11)), ids=str)
def test_who_computes_the_gradient_of_the_gate(shape, need, monkeypatch):
    """With a number for each score the kernel by queries, which stores it; else sums have a kernel of their own."""
    q, k, v = (x.detach() for x in drawn(2))
    tensors, scalars = Tensors(q, k, v), Scalars(-1, -1, 0.3, 0.0, 3, 0, False, 0.0, "default", False)
    gate = torch.randn(shape)
    out, lse = triton.gated_calls.forward(tensors, gate, scalars)
    dout, launched, launch = torch.randn_like(out), [], Launch.__call__
    monkeypatch.setattr(
        Launch, "__call__", lambda self, *x: launched.append(self.kernel.fn.__name__) or launch(self, *x)
    )
    found = triton.gated_calls.backward(dout, None, Saved(tensors, out, lse, scalars), gate, need)
    own = shape[0] == 2
    assert ("pair_sums_kernel" in launched) != own
    assert ("gated_dq_kernel" in launched) == (own or need & 1 == 1)
    wide = [x.double().requires_grad_() for x in (q, k, v, gate)]
    due = flashsci.attention(*wide[:3], pair_gate=wide[3], scale=0.3, window=(3, 0), backend="reference")
    (dgate,) = torch.autograd.grad(due, wide[3], dout.double())
    torch.testing.assert_close(found[5].double(), dgate, rtol=1e-5, atol=1e-5)
