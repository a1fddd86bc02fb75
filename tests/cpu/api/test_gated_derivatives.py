"""Derivatives of attention with a gate of pairs: to second order by kernels, beyond by the reference, with the same values."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jvp, vmap

import flashsci
from flashsci.backends import reference, triton

pytestmark = pytest.mark.every(4)


@pytest.fixture
def holding(monkeypatch):
    """The calls of the reference, which hold all scores."""
    calls = []
    honest = reference.forward
    monkeypatch.setattr(reference, "forward", lambda *a, **k: calls.append(a) or honest(*a, **k))
    return calls


def drawn(rows=7, dim=8):
    torch.manual_seed(3)
    return [*torch.randn(3, 2, 2, rows, dim), torch.randn(2, rows, rows)]


def attend(backend, *tensors, **options):
    q, k, v, gate = tensors
    return flashsci.attention(q, k, v, pair_gate=gate, backend=backend, **options)


def loss_of(backend):
    return lambda *tensors: attend(backend, *tensors).square().sum()


def agree(found, due):
    for x, y in zip(*(torch.utils._pytree.tree_leaves(z) for z in (found, due)), strict=True):
        torch.testing.assert_close(x, y, rtol=3e-4, atol=3e-4)


def _forward(backend, tensors, along):
    return jvp(lambda *x: attend(backend, *x), tuple(tensors), tuple(along))


def _forward_over_reverse(backend, tensors, along):
    return jvp(grad(loss_of(backend), argnums=(0, 1, 2, 3)), tuple(tensors), tuple(along))


def _reverse_over_reverse(backend, tensors, along):
    first = grad(loss_of(backend), argnums=(0, 1, 2, 3))
    total = lambda *x: sum((g * t).sum() for g, t in zip(first(*x), along, strict=True))  # noqa: E731
    return grad(total, argnums=(0, 1, 2, 3))(*tensors)


def _reverse_over_forward(backend, tensors, along):
    moved = lambda *x: jvp(lambda *y: attend(backend, *y), x, tuple(along))[1].square().sum()  # noqa: E731
    return grad(moved, argnums=(0, 1, 2, 3))(*tensors)


def _mapped(backend, tensors, along):
    q, gate = (torch.stack((x, t)) for x, t in ((tensors[0], along[0]), (tensors[3], along[3])))
    value = lambda q, gate: _forward_over_reverse(backend, (q, *tensors[1:3], gate), along)  # noqa: E731
    return vmap(value)(q, gate)


def _hessian_of_the_gate(backend, tensors, along):
    q, k, v, gate = (x[..., :3, :4] for x in tensors)
    return hessian(lambda gate: loss_of(backend)(q, k, v, gate))(gate[..., :3])


def _batch_of_eager(backend, tensors, along):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attend(backend, *leaves)
    return vmap(lambda g: torch.autograd.grad(out, leaves, g, retain_graph=True))(torch.stack((out, 2 * out)).detach())


def eager(backend, tensors, along=(), sink=None, order=2):
    """Gradients up to this order."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    options = {} if sink is None else {"sink": sink.clone().requires_grad_()}
    inputs = [*leaves, *options.values()]
    found, total = [], attend(backend, *leaves, **options).square().sum()
    for n in range(order):
        gradients = torch.autograd.grad(total, inputs, create_graph=n + 1 < order)
        found += [x.detach() / 30.0**n for x in gradients]
        total = sum(x.square().sum() for x in gradients)
    return found


def with_a_sink(backend, tensors, along, order=2):
    return eager(backend, tensors, along, torch.tensor([0.5, -1.0]), order)


SECOND = (
    _forward, _forward_over_reverse, _reverse_over_reverse, _reverse_over_forward, _mapped, _hessian_of_the_gate, _batch_of_eager, eager,
    with_a_sink,
)  # fmt: skip


@pytest.mark.parametrize("what", SECOND, ids=lambda f: f.__name__.strip("_"))
def test_to_second_order_no_scores_are_held(what, holding):
    tensors = drawn()
    along = [torch.randn_like(x) for x in tensors]
    found = what("triton", tensors, along)
    assert not holding
    agree(found, what("reference", tensors, along))


def _third(backend, tensors, along):
    return eager(backend, tensors, order=3)


def _third_with_a_sink(backend, tensors, along):
    return with_a_sink(backend, tensors, along, order=3)


def _forward_over_forward(backend, tensors, along):
    return jacfwd(jacfwd(lambda gate: loss_of(backend)(*tensors[:3], gate)))(tensors[3][..., :1])


def _three_transforms(backend, tensors, along):
    product = lambda q: jvp(grad(lambda q: loss_of(backend)(q, *tensors[1:])), (q,), (along[0],))[1]  # noqa: E731
    return grad(lambda q: product(q).square().sum())(tensors[0])


def _batch_of_cotangents(backend, tensors, along):
    """A recorded backward of a batch, then a batch through a recorded backward."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attend(backend, *leaves)
    whole = torch.stack((out, 2 * out)).detach()
    first = torch.autograd.grad(out, leaves, whole, is_grads_batched=True, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
    single = torch.autograd.grad(attend(backend, *leaves).square().sum(), leaves, create_graph=True)
    cotangents = [torch.stack((t, 2 * t)) for t in along]
    return first, second, torch.autograd.grad(single, leaves, cotangents, is_grads_batched=True)


FURTHER = (_third, _third_with_a_sink, _forward_over_forward, _three_transforms, _batch_of_cotangents)


@pytest.mark.parametrize("what", FURTHER, ids=lambda f: f.__name__.strip("_"))
def test_further_derivatives_are_the_references(what, holding):
    tensors = drawn(rows=4, dim=4)
    along = [torch.randn_like(x) for x in tensors]
    found = what("triton", tensors, along)
    assert holding
    agree(found, what("reference", tensors, along))


def raw_call():
    q, k, v, gate = drawn()
    given = {"bias": torch.randn(2, 1, 7, 7), "key_weight": torch.rand(2, 2, 7)}
    tensors = reference.Tensors(q, k, v, **given)
    scalars = reference.Scalars(-1, -1, 0.3, 2.0, -1, 0, False, 0.0, "default", False)
    gate = gate[:, None, :, :1].clone()
    out, lse = triton.gated_calls.forward(tensors, gate, scalars)
    tangents = [torch.randn_like(x) for x in (q, k, v, *given.values(), gate)]
    return tangents, torch.randn_like(out), torch.randn_like(lse), (*tensors, gate, out, lse, *scalars)


def test_gradients_that_are_not_needed_are_empty_and_change_nothing():
    tangents, dout, dlse, call = raw_call()
    for op, start, count in (
        (torch.ops.flashsci.triton_gated_backward, (dout, dlse), 6),
        (torch.ops.flashsci.triton_gated_double_backward, (*tangents, dout, dlse), 8),
    ):
        whole = op(*start, *call, (1 << count) - 1)
        for bits in itertools.combinations(range(count), 2):
            for i, (x, y) in enumerate(zip(op(*start, *call, sum(1 << b for b in bits)), whole, strict=True)):
                assert torch.equal(x, y) if i in bits else x.numel() == 0, (bits, i)


def test_opcheck():
    tangents, dout, dlse, call = raw_call()
    torch.library.opcheck(torch.ops.flashsci.triton_gated_jvp.default, (*tangents, *call))
    for need in (255, 32 + 64, 128 + 5):
        given = (*tangents, dout, dlse, *call, need)
        torch.library.opcheck(torch.ops.flashsci.triton_gated_double_backward.default, given)


def test_refusals_of_the_raw_ops():
    tangents, dout, dlse, call = raw_call()
    wrong = [*tangents[:5], tangents[5][:1]]
    with pytest.raises(
        ValueError, match=r"the tangent of pair_gate must have shape \[2, 1, 7, 1\], got \[1, 1, 7, 1\]"
    ):
        torch.ops.flashsci.triton_gated_jvp(*wrong, *call)
    with pytest.raises(TypeError, match=r"the tangent of pair_gate must be torch.float32, got torch.float64"):
        torch.ops.flashsci.triton_gated_double_backward(*tangents[:5], tangents[5].double(), dout, dlse, *call, 255)


@pytest.mark.parametrize("shape", ((64,), (64, 1), (4, 1, 1), (64, 64)), ids=str)
def test_memory_is_that_of_rows_and_of_the_gate(shape):
    """Through both backwards and forward mode."""
    rows = torch.randn(3, 1, 4, 64, 16)
    gate = torch.randn(shape)
    along = [*torch.randn_like(rows).unbind(0), torch.randn_like(gate)]
    tensors = (*rows.unbind(0), gate)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        eager("triton", tensors)
        _forward("triton", tensors, along)
    most = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < most <= 4 * max(rows[0].numel(), gate.numel())


def test_learnt_slopes_beside_a_gate_are_refused():
    q, k, v, gate = drawn()
    slopes = torch.rand(2, requires_grad=True)
    with pytest.raises(flashsci.BackendError, match="eager call without sink and pair_gate"):
        attend("triton", q, k, v, gate, alibi_slopes=slopes)
    found = attend("reference", q, k, v, gate, alibi_slopes=slopes)
    assert torch.autograd.grad(found.sum(), slopes)[0].abs().max() > 0
