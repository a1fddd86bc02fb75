"""Packed calls of the reference as ops, for compilers and tracers, which record a call instead of running it.

The reference reads the offsets on the host and works sequence by sequence: a compiler cannot trace that, and a tracer
would keep the lengths that it saw. The ops ``flashsci::reference_packed_*`` are opaque to both, in forward, backward,
second order and forward mode. Eager calls do not need them, and have derivatives of any order without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.backends.reference import READS, rejects, unavailable
from flashsci.call import ops
from flashsci.call.ops import PASSES, Saved, Scalars, Tangents, Tensors

__all__ = ["FUSED", "READS", "backward", "double_backward", "forward", "jvp", "rejects", "second_jvp", "unavailable"]

FUSED = True
_KEYS = ("CPU", "CUDA")


def _forward(tensors: Tensors, scalars: Scalars) -> tuple[Tensor, ...]:
    return reference.forward(tensors, scalars)


def _leaves(saved: Saved) -> tuple[list[Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """The tensors that have gradients, without the graph of the call; and out and lse as a function of them, with a
    graph."""
    present = [x for x in saved.tensors.leaves if x is not None]
    leaves = [x.detach().requires_grad_() for x in present]

    def compute() -> tuple[Tensor, Tensor]:
        given = iter(leaves)
        of_leaves = [None if x is None else next(given) for x in saved.tensors.leaves]
        return reference.forward(saved.tensors.with_leaves(of_leaves), saved.scalars)

    return leaves, compute


def _along(saved: Saved, tangents: Tangents, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    """The leaves, and <tangents, gradients of <out, dout> + <lse, dlse>>, differentiable in leaves, dout and dlse."""
    leaves, compute = _leaves(saved)
    first = torch.autograd.grad(compute(), leaves, (dout, dlse), create_graph=True, materialize_grads=True)
    present = [t for t, x in zip(tangents, saved.tensors, strict=False) if x is not None]
    pairs = zip(first, present, strict=True)
    return leaves, sum((g * t).sum() for g, t in pairs if t is not None)


def _zeros(like: Tensor, x: Tensor | None) -> Tensor:
    return (torch.zeros_like(like) if x is None else x.detach()).requires_grad_()


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd at work inside of an op, below which torch's dispatcher leaves it out."""
    key, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for name in (key.AutogradFunctionality, key.AutogradOther, key.ADInplaceOrView):
        excluded = excluded.remove(name)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _jvp(tangents: Tangents, saved: Saved) -> tuple[Tensor, ...]:
    with _recording():
        dout, dlse = _zeros(saved.out, None), _zeros(saved.lse, None)
        _, along = _along(saved, tangents, dout, dlse)
        return torch.autograd.grad(along, (dout, dlse), materialize_grads=True)


def _second_jvp(
    first: Tangents, second: Tangents, mixed: Tangents, first_lse: Tensor, second_lse: Tensor, saved: Saved
) -> tuple[Tensor, ...]:
    tensors = saved.tensors
    with _recording():
        dout, dlse = _zeros(saved.out, None), _zeros(saved.lse, None)
        # A first tangent of zero may move along the second.
        moving = [None if x is None else _zeros(x, t) for x, t in zip(tensors.leaves, first, strict=True)]
        leaves, along = _along(saved, Tangents(*moving), dout, dlse)
        tangents = torch.autograd.grad(along, (dout, dlse), create_graph=True, materialize_grads=True)
        cotangents = _zeros(saved.out, None), _zeros(saved.lse, None)
        inputs = (*leaves, *(t for t in moving if t is not None))
        found = torch.autograd.grad(tangents, inputs, cotangents, create_graph=True, materialize_grads=True)
        directions = [t for of in (second, mixed) for t, x in zip(of, tensors.leaves, strict=True) if x is not None]
        pairs = [(g, t) for g, t in zip(found, directions, strict=True) if t is not None and g.requires_grad]
        if not pairs:
            return torch.zeros_like(saved.out), torch.zeros_like(saved.lse)
        whole = torch.stack([(g * t).sum() for g, t in pairs]).sum()
        return torch.autograd.grad(whole, cotangents, materialize_grads=True)


def _double_backward(
    tangents: Tangents, dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int
) -> tuple[Tensor, ...]:
    with _recording():
        dout, dlse = _zeros(saved.out, dout), _zeros(saved.lse, dlse)
        leaves, along = _along(saved, tangents, dout, dlse)
        found = iter(torch.autograd.grad(along, (*leaves, dout, dlse), materialize_grads=True))
    every = [None if x is None else next(found) for x in (*saved.tensors.leaves, dout, dlse)]
    return tuple(saved.out.new_empty(0) if x is None or not need >> i & 1 else x for i, x in enumerate(every))


def _laid_out(kernel: Callable[..., Sequence[Tensor]], what: str) -> Callable[..., Any]:
    """The kernel, with results in new memory and in the strides that a compiler expects."""
    fake = PASSES[what].fake

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        rooms = fake(*arguments)
        found = kernel(*arguments)
        return tuple(room.copy_(x) for room, x in zip(rooms, found, strict=True))

    return run


forward, backward, jvp, second_jvp, double_backward = (
    ops.define("reference_packed", what, _laid_out(kernel, what), _KEYS)
    for what, kernel in (
        ("forward", _forward),
        ("backward", reference.backward),
        ("jvp", _jvp),
        ("second_jvp", _second_jvp),
        ("double_backward", _double_backward),
    )
)
