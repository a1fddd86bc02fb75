"""Saved-tensor hooks bring tensors back with other strides: the gradients of every node stay those of the numbers."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import flashsci
from flashsci.call.autograd import EagerForward
from flashsci.call.ops import Scalars, Tensors
from flashsci.call.plans import Plan
from flashsci.call.sink import SinkForward
from flashsci.choice import differentiate
from flashsci.choice.backends import kernels
from flashsci.choice.gradients import named
from tests.support.everywhere import BACKENDS, DEVICE

SCALARS = Scalars(-1, -1, 0.5, 0.0, -1, -1, True, 0.0, "default", False)


def transposed(x):
    """The last dim outermost in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else spread(x)


def spread(x):
    """Every other number."""
    memory = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1]) if x.dim() else x
    if not x.dim():
        return x
    memory[..., ::2] = x
    return memory[..., ::2]


def shifted(x):
    """One number off its alignment."""
    memory = x.new_zeros(x.numel() + 1)
    memory[1:] = x.reshape(-1)
    return memory[1:].view(x.shape)


def negated(x):
    """Memory that holds the negative."""
    return torch._neg_view(-x) if x.is_floating_point() else shifted(x)


def reversed_dims(x):
    """All dims in the other order in memory."""
    dims = list(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


CHANGES = {f.__name__: f for f in (transposed, spread, shifted, negated, reversed_dims)}
FUSED = [b for b in BACKENDS if b not in ("reference", "sdpa")]
NOT_CUDAS = ("alibi", "dropout", "packed bias")
pytestmark = [pytest.mark.usefixtures("loaded"), pytest.mark.every(4)]
fused = pytest.mark.parametrize("backend", FUSED)
changes = pytest.mark.parametrize("change", CHANGES)


def leaf(*shape):
    return torch.randn(shape, device=DEVICE).requires_grad_()


def rows(*lead, bias=False):
    tensors = [leaf(*lead, 2, 3, 8), leaf(*lead, 1, 4, 8), leaf(*lead, 1, 4, 8)]
    return [*tensors, leaf(*lead, 1, 3, 4)] if bias else tensors


OFFSETS = torch.tensor([0, 1, 4], dtype=torch.int32, device=DEVICE)
SEED = torch.tensor([3, 4], device=DEVICE)
MASK = torch.arange(12, device=DEVICE).reshape(3, 4) % 5 > 0


def packed_inputs():
    return [leaf(4, 2, 8), leaf(4, 1, 8), leaf(4, 1, 8)]


CALLS = {
    "dense": (lambda b, q, k, v: flashsci.attention(q, k, v, causal=True, backend=b), lambda: rows(2)),
    "bias": (lambda b, q, k, v, m: flashsci.attention(q, k, v, bias=m, mask=MASK, backend=b), lambda: rows(2, bias=True)),
    "without batch": (lambda b, q, k, v: flashsci.attention(q, k, v, backend=b), rows),
    "hidden keys": (lambda b, q, k, v: flashsci.attention(q, k, v, mask=MASK, backend=b), lambda: rows(2)),
    "expanded": (
        lambda b, q, k, v: flashsci.attention(q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1), backend=b), lambda: rows(2),
    ),
    "lse": (lambda b, *x: flashsci.attention(*x, return_lse=True, backend=b), lambda: rows(2)),
    "weights": (
        lambda b, q, k, v, w: flashsci.attention(q, k, v, key_weight=w, backend=b),
        lambda: [leaf(2, 2, 3, 8), leaf(2, 2, 4, 8), leaf(2, 2, 4, 8), torch.rand(2, 2, 4, device=DEVICE).requires_grad_()],
    ),
    "alibi": (
        lambda b, q, k, v: flashsci.attention(q, k, v, alibi_slopes=torch.ones(2, 2, device=DEVICE), return_lse=True, backend=b),
        lambda: rows(2),
    ),
    "dropout": (
        lambda b, q, k, v: flashsci.attention(q, k, v, dropout_p=0.5, dropout_seed=SEED, backend=b), lambda: rows(2),
    ),
    "sink": (lambda b, q, k, v, s: flashsci.attention(q, k, v, sink=s, backend=b), lambda: [*rows(2), leaf(2)]),
    "packed": (lambda b, q, k, v: flashsci.varlen_attention(q, k, v, OFFSETS, backend=b), packed_inputs),
    "packed with lse": (
        lambda b, q, k, v: flashsci.varlen_attention(q, k, v, OFFSETS, return_lse=True, backend=b), packed_inputs,
    ),
    "packed bias": (
        lambda b, q, k, v, m: flashsci.varlen_attention(q, k, v, OFFSETS, bias=m, backend=b),
        lambda: [*packed_inputs(), leaf(1, 10)],
    ),
    "residual": (
        lambda b, q, k, v: flashsci.residual_attention(q, k, v, backend="auto" if b != "reference" else b), lambda: rows(2),
    ),
    "residual bias": (
        lambda b, q, k, v, m: flashsci.residual_attention(q, k, v, m, backend="auto" if b != "reference" else b),
        lambda: rows(2, bias=True),
    ),
    "residual dropout": (
        lambda b, q, k, v: flashsci.residual_attention(
            q, k, v, dropout_p=0.5, dropout_seed=SEED, backend="auto" if b != "reference" else b
        ),
        lambda: rows(2),
    ),
}  # fmt: skip


def gradients(call, inputs, backend, order):
    found = call(backend, *inputs)
    ends = found if isinstance(found, tuple) else (found,)
    loss = sum(x.sin().sum() for x in ends)
    first = torch.autograd.grad(loss, inputs, create_graph=order == 2)
    if order == 1:
        return first
    return torch.autograd.grad(sum(x.sin().sum() for x in first), inputs)


def check(name, backend, change, order):
    call, make = CALLS[name]
    inputs = make()
    wanted = gradients(call, inputs, backend, order)
    gradients(call, inputs, backend, 1)  # another way once a call repeats
    with saved_tensors_hooks(lambda x: x, CHANGES[change]):
        for _ in range(2):
            found = gradients(call, inputs, backend, order)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b)


@fused
@changes
@pytest.mark.parametrize("name", CALLS)
def test_strides_of_what_hooks_give_back_do_not_matter(name, backend, change):
    if backend == "cuda" and name in NOT_CUDAS:
        pytest.skip("the cuda backend does not serve it")
    check(name, backend, change, 1)


@fused
@pytest.mark.parametrize("change", ["transposed", "negated"])
@pytest.mark.parametrize("name", ["bias", "sink", "packed", "residual bias"])
def test_nor_do_they_to_second_order(name, backend, change):
    check(name, backend, change, 2)


@changes
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", ["dense", "bias", "hidden keys", "without batch", "expanded"])
def test_backends_in_autograds_own_graph(name, backend, change, order):
    check(name, backend, change, order)


class Sharing:
    """A backend that is asked whose kernels should compute gradients, and notes as what it sees the tensors."""

    def __init__(self):
        self.seen = []

    def takes_pairs(self, tensors, scalars):
        self.seen.append(tensors)
        return True

    def backward(self, dout, dlse, saved, need):
        self.seen.append(saved.tensors)
        return kernels("triton").backward(dout, dlse, saved, need)

    def forward(self, tensors, scalars):
        self.seen.append(tensors)
        return kernels("triton").forward(tensors, scalars)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("order", [1, 2])
def test_who_chooses_kernels_sees_tensors_as_kernels_take_them(monkeypatch, order, sink):
    """The library looks at strides, and refuses those that no kernel takes."""
    module, plan = Sharing(), Plan(named("cuda"), None, SCALARS)
    plan.module = module
    monkeypatch.setattr(differentiate, "sharing", lambda choice: module if choice.forward == "cuda" else None)
    monkeypatch.setattr(differentiate, "kernels", lambda name: module if name == "cuda" else kernels(name))
    inputs = rows(2, bias=True) + [leaf(2)] * sink

    def call(backend, q, k, v, bias, s=None):
        if s is not None:
            return SinkForward.apply(plan, False, s, *Tensors(q, k, v, bias))
        return EagerForward.apply(plan, False, *Tensors(q, k, v, bias))

    with saved_tensors_hooks(lambda x: x, transposed):
        found = gradients(call, inputs, "cuda", order)
    expected = gradients(lambda b, *x: _plain(*x), inputs, "", order)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert len(module.seen) >= 2
    assert all(x.stride(-1) == 1 for tensors in module.seen for x in tensors[:3])


def _plain(q, k, v, bias, sink=None):
    return flashsci.attention(q, k, v, bias=bias, sink=sink, return_lse=True, scale=0.5, backend="reference")
