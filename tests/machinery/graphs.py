"""Machineries around autograd's graph: hooks on what it saves, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .cells import Call, Pair, machinery, require
from .derivatives import curvature, gradients, leaf
from .oracle import direction, loss

FAMILY = "graph"


def cloned(x: Tensor) -> Tensor:
    return x.clone()


def transposed(x: Tensor) -> Tensor:
    """The same numbers, the last dim no longer the innermost."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x.clone()


def misaligned(x: Tensor) -> Tensor:
    """The same numbers, one element after an aligned address."""
    room = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    return room.copy_(x)


def _hooked(unpack: Callable[[Tensor], Tensor]):
    def run(call: Call) -> Iterator[Pair]:
        x = leaf(call)
        with saved_tensors_hooks(lambda t: t, unpack):
            results = call(x)
        yield from gradients(call, results, x)

    return run


def _hooked_twice(unpack: Callable[[Tensor], Tensor]):
    def run(call: Call) -> Iterator[Pair]:
        x = leaf(call)
        with saved_tensors_hooks(lambda t: t, unpack):
            total = loss(call(x))
            require(total.requires_grad)
            (first,) = torch.autograd.grad(total, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x, direction(x))
        yield second, curvature(call)

    return run


for unpack in (cloned, transposed, misaligned):
    machinery(f"saved tensors {unpack.__name__}", FAMILY)(_hooked(unpack))
    machinery(f"saved tensors {unpack.__name__}, second order", FAMILY)(_hooked_twice(unpack))


@machinery("save_on_cpu", FAMILY)
def saved_on_cpu(call: Call) -> Iterator[Pair]:
    x = leaf(call)
    with save_on_cpu():
        results = call(x)
    yield from gradients(call, results, x)


@machinery("dout transposed", FAMILY)
def strided_cotangents(call: Call) -> Iterator[Pair]:
    """Cotangents that arrive with other strides than results have."""
    x = leaf(call)
    results = call(x)
    require(any(r.requires_grad for r in results))
    total = loss(tuple(transposed(r) for r in results))
    (found,) = torch.autograd.grad(total, x)
    yield found, call.exact().gradient.reshape(x.shape)


@machinery("checkpoint", FAMILY)
def checkpointed(call: Call) -> Iterator[Pair]:
    x = leaf(call)
    yield from gradients(call, checkpoint(call, x, use_reentrant=False), x)


@machinery("checkpoint, reentrant", FAMILY)
def checkpointed_reentrant(call: Call) -> Iterator[Pair]:
    """Its gradients are those of backward() alone."""
    x = leaf(call)
    results = checkpoint(call, x, use_reentrant=True)
    yield from zip(results, call.value(), strict=True)
    total = loss(results)
    require(total.requires_grad)
    total.backward()
    yield x.grad, call.exact().gradient.reshape(x.shape)
