"""The vmap behind ``is_grads_batched`` and ``torch.autograd.functional`` with ``vectorize``, over every kind of call."""

from __future__ import annotations

import pytest
import torch

import flashsci
from tests.support.everywhere import BACKENDS, DEVICE

pytestmark = [
    pytest.mark.every(4),
    pytest.mark.usefixtures("loaded"),
    pytest.mark.filterwarnings("ignore:.*performance drop.*"),
]
every = pytest.mark.parametrize("backend", ["auto", *BACKENDS])


def leaf(*shape):
    return torch.randn(shape, device=DEVICE).requires_grad_()


def rows():
    return leaf(1, 2, 3, 8), leaf(1, 1, 4, 8), leaf(1, 1, 4, 8)


OFFSETS = torch.tensor([0, 1, 4], dtype=torch.int32, device=DEVICE)
DENSE = {
    "plain": (lambda b, *x: flashsci.attention(*x, causal=True, backend=b), rows),
    "bias": (
        lambda b, q, k, v, m: flashsci.attention(q, k, v, bias=m, backend=b),
        lambda: (*rows(), leaf(1, 1, 3, 4)),
    ),
    "residual": (
        lambda b, q, k, v, m: flashsci.residual_attention(q, k, v, m, backend=b),
        lambda: (*rows(), leaf(1, 1, 3, 4)),
    ),
}
OTHERS = {
    "lse": (lambda b, *x: flashsci.attention(*x, return_lse=True, backend=b), rows),
    "sink": (
        lambda b, q, k, v, s: flashsci.attention(q, k, v, sink=s, backend=b),
        lambda: (*rows(), leaf(2)),
    ),
    "packed": (
        lambda b, *x: flashsci.varlen_attention(*x, OFFSETS, backend=b),
        lambda: (leaf(4, 2, 8), leaf(4, 1, 8), leaf(4, 1, 8)),
    ),
}


def flat(found):
    return torch.cat([x.flatten() for x in (found if isinstance(found, tuple) else (found,))])


def case(name, backend):
    if name in OTHERS and backend == "sdpa":
        pytest.skip("SDPA does not serve it")
    call, make = (DENSE | OTHERS)[name]
    return (lambda *x: flat(call(backend, *x))), make()


def agree(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@every
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", [*DENSE, *OTHERS])
def test_a_batch_of_gradients_is_a_loop_over_them(backend, name, recorded):
    """With a graph of its own (``recorded``), too: an autograd.Function alone would lose it."""
    call, inputs = case(name, backend)
    for _ in range(3):
        torch.autograd.grad(call(*inputs).sum(), inputs)
    out = call(*inputs)
    batch = torch.randn(3, *out.shape, device=DEVICE)
    options = dict(retain_graph=True, create_graph=recorded)
    found = torch.autograd.grad(out, inputs, batch, is_grads_batched=True, **options)
    each = [torch.autograd.grad(out, inputs, g, **options) for g in batch]
    wanted = [torch.stack(x) for x in zip(*each, strict=True)]
    agree(found, wanted)
    if recorded:
        second = [
            torch.autograd.grad(sum(x.sin().sum() for x in first), inputs, retain_graph=True)
            for first in (found, wanted)
        ]
        agree(*second)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b not in ("reference", "sdpa")])
def test_a_batch_of_second_derivatives_has_no_third(backend):
    """It is refused as one alone is, not dropped."""
    call, inputs = case("plain", backend)
    (force,) = torch.autograd.grad(call(*inputs).sin().sum(), inputs[0], create_graph=True)
    batch = torch.randn(2, *force.shape, device=DEVICE)
    found = torch.autograd.grad(force, inputs, batch, is_grads_batched=True, create_graph=True)
    with pytest.raises(flashsci.BackendError, match="third derivative"):
        torch.autograd.grad(sum(x.sum() for x in found), inputs)


@every
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
@pytest.mark.parametrize("name", ["bias", "packed", "sink"])
def test_vectorized_jacobians(backend, name, strategy):
    call, inputs = case(name, backend)
    short = lambda *x: call(*x)[:6]  # noqa: E731
    options = dict(vectorize=True, strategy=strategy)
    found = torch.autograd.functional.jacobian(short, inputs, **options)
    agree(found, torch.autograd.functional.jacobian(short, inputs))


@every
def test_vectorized_hessians(backend):
    call, inputs = case("plain", backend)
    loss = lambda q: call(q, *inputs[1:]).sin().sum()  # noqa: E731
    found = torch.autograd.functional.hessian(loss, inputs[0], vectorize=True)
    agree((found,), (torch.autograd.functional.hessian(loss, inputs[0]),))
