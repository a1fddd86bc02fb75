"""Machineries that map over a batch: torch.func.vmap of each derivative, and the older batching of torch.autograd."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad

from .cells import Call, NotHere, Pair, machinery, require
from .derivatives import leaf, of_loss
from .oracle import along, direction, projected

FAMILY = "batches"


def stacked(call: Call) -> Tensor:
    return torch.stack([call.x(), call.x(other=True)])


def over_points(call: Call, found: Tensor, expected: str, t: Tensor | None = None) -> Iterator[Pair]:
    """Two results, of the two points."""
    for n, other in enumerate((False, True)):
        exact = call.exact(other)
        numbers = {
            "gradient": exact.gradient,
            "curvature": exact.curvatures[0],
            "pushed": exact.projected @ along(call.x()),
        }
        yield found[n], numbers[expected].reshape(found[n].shape)


@machinery("vmap", FAMILY)
def vmap(call: Call) -> Iterator[Pair]:
    """Over the row's own tensor, of integers too."""
    if not (call.x().is_floating_point() and call.row == call.variable):
        x = call.inputs()[call.row]
        inputs = call.inputs()
        results = torch.func.vmap(lambda x: call.of(inputs | {call.row: x}))(torch.stack([x, x]))
        others = (False, False)
    else:
        results, others = torch.func.vmap(call)(stacked(call)), (False, True)
    for n, other in enumerate(others):
        yield from zip([r[n] for r in results], call.value(other), strict=True)


@machinery("vmap of grad", FAMILY)
def vmap_of_grad(call: Call) -> Iterator[Pair]:
    call.floats()
    found = torch.func.vmap(torch.func.grad(of_loss(call)))(stacked(call))
    yield from over_points(call, found, "gradient")


@machinery("vmap of jvp", FAMILY)
def vmap_of_jvp(call: Call) -> Iterator[Pair]:
    call.floats()
    xs, t = stacked(call), direction(call.x())
    push = lambda x: torch.func.jvp(lambda y: projected(call(y)), (x,), (t,))[1]  # noqa: E731
    yield from over_points(call, torch.func.vmap(push)(xs), "pushed")


@machinery("vmap over directions", FAMILY)
def vmap_over_directions(call: Call) -> Iterator[Pair]:
    """Of one point: kernels may share its probabilities."""
    call.floats()
    x = call.x()
    push = lambda t: torch.func.jvp(lambda y: projected(call(y)), (x,), (t,))[1]  # noqa: E731
    found = torch.func.vmap(push)(torch.stack([direction(x, n) for n in range(3)]))
    for n in range(3):
        yield found[n], call.exact().projected @ along(x, n)


@machinery("older vmap over directions", FAMILY)
def older_vmap_over_directions(call: Call) -> Iterator[Pair]:
    """That of torch.autograd.functional."""
    call.floats()
    x = call.x()
    with forward_ad.dual_level():
        push = lambda t: forward_ad.unpack_dual(projected(call(forward_ad.make_dual(x, t)))).tangent  # noqa: E731
        found = _vmap(push)(torch.stack([direction(x, n) for n in range(3)]))
    for n in range(3):
        yield found[n], call.exact().projected @ along(x, n)


@machinery("vmap over cotangents", FAMILY)
def vmap_of_vjp(call: Call) -> Iterator[Pair]:
    call.floats()
    found = torch.func.jacrev(lambda y: projected(call(y)))(call.x())
    yield found, call.exact().projected.reshape(3, *call.x().shape)


@machinery("vmap of forward over reverse", FAMILY)
def vmap_of_forward_over_reverse(call: Call) -> Iterator[Pair]:
    call.floats()
    xs, t = stacked(call), direction(call.x())
    curve = lambda x: torch.func.jvp(torch.func.grad(of_loss(call)), (x,), (t,))[1]  # noqa: E731
    yield from over_points(call, torch.func.vmap(curve)(xs), "curvature")


@machinery("vmap of reverse over reverse", FAMILY)
def vmap_of_reverse_over_reverse(call: Call) -> Iterator[Pair]:
    call.floats()
    xs, t = stacked(call), direction(call.x())
    first = torch.func.grad(of_loss(call))
    curve = torch.func.grad(lambda x: (first(x) * t).sum())
    yield from over_points(call, torch.func.vmap(curve)(xs), "curvature")


def _plane(call: Call):
    """(loss as a function of two numbers, the point where they are zero, its directions ``[2, n]``)."""
    call.floats()
    x = call.x()
    if x.dtype.itemsize == 1:
        raise NotHere("8-bit floats have no sums")
    base = [direction(x, n) for n in (0, 1)]

    def curve(a: Tensor) -> Tensor:
        return of_loss(call)(x + a[0] * base[0] + a[1] * base[1])

    return curve, x.new_zeros(2), torch.stack([along(x, n) for n in (0, 1)])


@machinery("func.hessian", FAMILY)
def hessian(call: Call) -> Iterator[Pair]:
    curve, zero, base = _plane(call)
    yield torch.func.hessian(curve)(zero), call.exact().curvatures @ base.mT


@machinery("is_grads_batched", FAMILY)
def grads_batched(call: Call) -> Iterator[Pair]:
    x = leaf(call)
    three = projected(call(x))
    require(three.requires_grad)
    eye = torch.eye(3, device=x.device)
    (found,) = torch.autograd.grad(three, x, eye, is_grads_batched=True)
    yield found, call.exact().projected.reshape(found.shape)


@machinery("is_grads_batched, second order", FAMILY)
def grads_batched_twice(call: Call) -> Iterator[Pair]:
    x = leaf(call)
    total = of_loss(call)(x)
    require(total.requires_grad)
    (first,) = torch.autograd.grad(total, x, create_graph=True)
    ts = torch.stack([direction(x, 0), direction(x, 1)])
    (found,) = torch.autograd.grad(first, x, ts, is_grads_batched=True)
    for n in (0, 1):
        yield found[n], call.exact().curvatures[n].reshape(x.shape)


@machinery("functional.jacobian, vectorize", FAMILY)
def jacobian(call: Call) -> Iterator[Pair]:
    call.floats()
    found = torch.autograd.functional.jacobian(lambda y: projected(call(y)), call.x(), vectorize=True)
    yield found, call.exact().projected.reshape(3, *call.x().shape)


@machinery("functional.jacobian, forward mode", FAMILY)
def jacobian_forward(call: Call) -> Iterator[Pair]:
    curve, zero, base = _plane(call)
    found = torch.autograd.functional.jacobian(curve, zero, vectorize=True, strategy="forward-mode")
    yield found, base @ call.exact().gradient


@machinery("functional.hessian, vectorize", FAMILY)
def functional_hessian(call: Call) -> Iterator[Pair]:
    curve, zero, base = _plane(call)
    yield (
        torch.autograd.functional.hessian(curve, zero, vectorize=True),
        call.exact().curvatures @ base.mT,
    )
