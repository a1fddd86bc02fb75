"""Machineries that differentiate: reverse and forward mode, each over each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .cells import Call, Pair, machinery, require
from .oracle import Results, along, direction, loss

FAMILY = "derivatives"


def parts(numbers: Tensor, like: Results) -> Results:
    """Flat numbers in the shapes of results."""
    pieces = numbers.split([x.numel() for x in like])
    return tuple(piece.reshape(x.shape) for piece, x in zip(pieces, like, strict=True))


def cotangents_of(results: Results) -> list[Tensor]:
    """Fixed cotangents of the results that have a graph; made on the CPU."""
    return [direction(r) for r in results if r.requires_grad]


def pull(results: Results, x: Tensor, cotangents: list[Tensor] | None = None) -> Tensor:
    """The gradient of fixed cotangents of all results."""
    differentiable = [r for r in results if r.requires_grad]
    require(bool(differentiable))
    cotangents = cotangents_of(results) if cotangents is None else cotangents
    found = torch.autograd.grad(differentiable, x, cotangents, allow_unused=True)[0]
    return torch.zeros_like(x) if found is None else found


def pulled(call: Call, other: bool = False) -> Tensor:
    return call.exact(other).pulled.reshape(call.x().shape)


def leaf(call: Call, other: bool = False) -> Tensor:
    call.floats()
    return call.x(other).requires_grad_()


def gradients(call: Call, results: Results, x: Tensor) -> Iterator[Pair]:
    """Results, and the gradient of x through them."""
    yield from zip(results, call.value(), strict=True)
    found = pull(results, x)
    yield found, pulled(call)


@machinery("call", FAMILY)
def plain(call: Call) -> Iterator[Pair]:
    yield from zip(call(call.x()), call.value(), strict=True)


@machinery("inference_mode", FAMILY)
def inference(call: Call) -> Iterator[Pair]:
    with torch.inference_mode():
        yield from zip(call(call.x()), call.value(), strict=True)


@machinery("autocast", FAMILY, eps=2.0**-8)
def autocast(call: Call) -> Iterator[Pair]:
    with torch.autocast(call.device, torch.bfloat16):
        yield from zip(call(call.x()), call.value(), strict=True)


@machinery("autocast, reverse", FAMILY, eps=2.0**-8)
def autocast_reverse(call: Call) -> Iterator[Pair]:
    x = leaf(call)
    with torch.autocast(call.device, torch.bfloat16):
        results = call(x)
    yield from gradients(call, results, x)


@machinery("reverse", FAMILY)
def reverse(call: Call) -> Iterator[Pair]:
    x = leaf(call)
    yield from gradients(call, call(x), x)


@machinery("reverse, again", FAMILY)
def reverse_again(call: Call) -> Iterator[Pair]:
    """A second call like the first takes a shorter way, which another point shows to be no stale one."""
    x = leaf(call)
    call(x)
    call(x)
    other = leaf(call, other=True)
    results = call(other)
    yield from zip(results, call.value(other=True), strict=True)
    yield pull(results, other), pulled(call, other=True)


@machinery("jvp", FAMILY)
def jvp(call: Call) -> Iterator[Pair]:
    call.floats()
    x = call.x()
    results, tangents = torch.func.jvp(call, (x,), (direction(x),))
    yield from zip(results, call.value(), strict=True)
    yield from zip(tangents, parts(call.exact().pushed, results), strict=True)


@machinery("dual", FAMILY)
def dual(call: Call) -> Iterator[Pair]:
    call.floats()
    x = call.x()
    with forward_ad.dual_level():
        results = call(forward_ad.make_dual(x, direction(x)))
        tangents = [forward_ad.unpack_dual(r).tangent for r in results]
        found = [torch.zeros_like(r) if t is None else t for r, t in zip(results, tangents, strict=True)]
        yield from zip(found, parts(call.exact().pushed, results), strict=True)


def curvature(call: Call, seed: int = 0) -> Tensor:
    x = call.x()
    return call.exact().curvatures[seed].reshape(x.shape)


def of_loss(call: Call):
    return lambda x: loss(call(x))


@machinery("reverse over reverse", FAMILY)
def reverse_over_reverse(call: Call) -> Iterator[Pair]:
    x = leaf(call)
    total = loss(call(x))
    require(total.requires_grad)
    (first,) = torch.autograd.grad(total, x, create_graph=True)
    yield first, call.exact().gradient.reshape(x.shape)
    (second,) = torch.autograd.grad(first, x, direction(x))
    yield second, curvature(call)


@machinery("func.grad of func.grad", FAMILY)
def grad_of_grad(call: Call) -> Iterator[Pair]:
    call.floats()
    x = call.x()
    t = direction(x)
    second = torch.func.grad(lambda y: (torch.func.grad(of_loss(call))(y) * t).sum())(x)
    yield second, curvature(call)


@machinery("forward over reverse", FAMILY)
def forward_over_reverse(call: Call) -> Iterator[Pair]:
    call.floats()
    x = call.x()
    first, second = torch.func.jvp(torch.func.grad(of_loss(call)), (x,), (direction(x),))
    yield first, call.exact().gradient.reshape(x.shape)
    yield second, curvature(call)


@machinery("dual over backward", FAMILY)
def dual_over_backward(call: Call) -> Iterator[Pair]:
    """Forward mode over reverse mode without functorch."""
    x = leaf(call)
    with forward_ad.dual_level():
        total = loss(call(forward_ad.make_dual(x, direction(x))))
        (first,) = torch.autograd.grad(total, x)
        tangent = forward_ad.unpack_dual(first).tangent
        require(tangent is not None, "the gradient has no tangent")
        yield tangent, curvature(call)


@machinery("reverse over forward", FAMILY)
def reverse_over_forward(call: Call) -> Iterator[Pair]:
    call.floats()
    x = call.x()
    t = direction(x)
    second = torch.func.grad(lambda y: torch.func.jvp(of_loss(call), (y,), (t,))[1])(x)
    yield second, curvature(call)


@machinery("forward over forward", FAMILY)
def forward_over_forward(call: Call) -> Iterator[Pair]:
    call.floats()
    x = call.x()
    first = lambda y: torch.func.jvp(of_loss(call), (y,), (direction(x),))[1]  # noqa: E731
    _, second = torch.func.jvp(first, (x,), (direction(x, 1),))
    yield second, along(x, 1) @ call.exact().curvatures[0]
