"""Values and derivatives of a formula in float64, by plain reverse mode alone, along fixed directions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .entries import ENTRIES, Entry

Results = tuple[Tensor, ...]


def flat(results: Results) -> Tensor:
    return torch.cat([x.reshape(-1) for x in results])


def loss(results: Results) -> Tensor:
    """A number with a second derivative in whatever the results are linear in."""
    first, *rest = (_projections(x, 1)[0] + x.square().sum() / 2 for x in map(_wide, results))
    return sum(rest, start=first)


def _wide(x: Tensor) -> Tensor:
    """8-bit floats have no arithmetic."""
    return x.float() if x.dtype.itemsize == 1 else x


def _projections(x: Tensor, count: int) -> Tensor:
    """``[count]``: sums of x with fixed weights, made of what every tracer, device and transform knows."""
    x = _wide(x)
    angles = torch.arange(x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape)
    return torch.stack([(x * torch.cos(angles * (n + 1) + n)).sum() for n in range(count)])


def projected(results: Results, count: int = 3) -> Tensor:
    """A few numbers of all results."""
    return sum((_projections(x, count) for x in results[1:]), start=_projections(results[0], count))


def direction(x: Tensor, seed: int = 0) -> Tensor:
    """Numbers like x, the same on every device."""
    random = torch.Generator().manual_seed(seed + 1)
    return torch.randn(x.shape, generator=random, dtype=torch.float64).to(x.device, x.dtype)


def along(x: Tensor, seed: int = 0) -> Tensor:
    """The same numbers, after their rounding to x's dtype, as float64."""
    return direction(x, seed).double().cpu().reshape(-1)


@dataclass(frozen=True)
class Exact:
    """Derivatives of a formula at a point of one of its tensors of n numbers, along the directions of :func:`direction`."""

    pulled: Tensor  # [n]: gradient under fixed cotangents
    pushed: Tensor  # [numbers of all results]: tangents along the first direction
    projected: Tensor  # [3, n]: Jacobian of `projected`
    gradient: Tensor  # [n]: of `loss`
    curvatures: Tensor  # [2, n]: Hessian of `loss` times the first two directions


class Differentiated:
    """A call's formula as a function of its row's tensor, the others fixed."""

    def __init__(self, entry: Entry, row: str, count: int | None) -> None:
        self.entry, self.row, self.count = entry, row, count
        self.inputs = {n: x.double() if x.is_floating_point() else x for n, x in entry.inputs(row).items()}

    def __call__(self, x: Tensor) -> Results:
        return tuple(self.entry.formula(substituted(self.entry, self.inputs, self.row, x)))[: self.count]


def variable_of(entry: Entry, row: str) -> str:
    """The row whose tensor varies: q's (the first one's) beside a tensor of integers."""
    if "+" in row or entry.inputs(row)[row].is_floating_point():
        return row
    return next((n for n in entry.needed if entry.inputs(row)[n].is_floating_point()), row)


def point(inputs: dict[str, Tensor], variable: str) -> Tensor:
    """What varies, as one tensor."""
    if "+" in variable:
        return flat(tuple(inputs[n] for n in variable.split("+")))
    return inputs[variable]


def substituted(entry: Entry, inputs: dict[str, Tensor], row: str, x: Tensor) -> dict[str, Tensor]:
    """The tensors of a call with another value of what varies."""
    variable = variable_of(entry, row)
    if "+" not in variable:
        return inputs | {variable: x}
    names = variable.split("+")
    parts = x.split([inputs[n].numel() for n in names])
    return inputs | {n: part.reshape(inputs[n].shape).clone() for n, part in zip(names, parts, strict=True)}


def where(name: str, row: str, other: bool = False) -> Tensor:
    """The point in float64; ``other``: a second one."""
    entry = ENTRIES[name]
    x = point(entry.inputs(row), variable_of(entry, row))
    if not x.is_floating_point():
        return x
    x = x.double()
    steps = torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape)
    return x * (1 + 0.3 * torch.sin(steps)) if other else x


@functools.cache
def value(name: str, row: str, count: int | None, other: bool = False) -> Results:
    return tuple(x.detach() for x in Differentiated(ENTRIES[name], row, count)(where(name, row, other)))


@functools.cache
def exact(name: str, row: str, count: int | None, other: bool = False) -> Exact:
    x = where(name, row, other).clone().requires_grad_()
    results = Differentiated(ENTRIES[name], row, count)(x)
    like = torch.float32
    ts = [along(x.detach().to(like), n).reshape(x.shape) for n in (0, 1)]
    numbers = flat(results)
    weights = torch.cat([along(r.detach().to(like)) for r in results]).requires_grad_()
    pulled = _gradient((numbers * weights).sum(), x, create_graph=True)
    pushed = _gradient((pulled * ts[0]).sum(), weights)
    three = torch.stack([_gradient(number, x).reshape(-1) for number in projected(results)])
    slope = _gradient(loss(results), x, create_graph=True)
    curvatures = torch.stack([_gradient((slope * t).sum(), x).reshape(-1) for t in ts])
    return Exact(pulled.detach().reshape(-1), pushed, three, slope.detach().reshape(-1), curvatures)


def _gradient(number: Tensor, x: Tensor, create_graph: bool = False) -> Tensor:
    """Zeros where the number does not depend on x."""
    if not number.requires_grad:
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad(number, x, retain_graph=True, create_graph=create_graph, allow_unused=True)
    if found is None:
        return torch.zeros_like(x)
    return found if create_graph else found.detach()
