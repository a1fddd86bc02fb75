"""Value, Jacobian and Hessian of a formula in float64, by plain reverse mode, one row after the other."""

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


@dataclass(frozen=True)
class Exact:
    """A formula at a point of one of its tensors."""

    jacobian: Tensor  # [results, numbers of the tensor], of all results
    projected: Tensor  # [3, numbers]: Jacobian of `projected`
    gradient: Tensor  # [numbers]: of `loss`
    hessian: Tensor  # [numbers, numbers]: of `loss`


class Differentiated:
    """A call's formula as a function of its row's tensor, the others fixed."""

    def __init__(self, entry: Entry, row: str, count: int | None) -> None:
        self.entry, self.row, self.count = entry, row, count
        self.inputs = {
            n: x.double() if x.is_floating_point() else x for n, x in entry.inputs(row).items()
        }

    def __call__(self, x: Tensor) -> Results:
        return tuple(self.entry.formula(substituted(self.entry, self.inputs, self.row, x)))[
            : self.count
        ]


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
    return inputs | {
        n: part.reshape(inputs[n].shape).clone() for n, part in zip(names, parts, strict=True)
    }


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
    return tuple(
        x.detach() for x in Differentiated(ENTRIES[name], row, count)(where(name, row, other))
    )


@functools.cache
def exact(name: str, row: str, count: int | None, other: bool = False) -> Exact:
    x = where(name, row, other).clone().requires_grad_()
    results = Differentiated(ENTRIES[name], row, count)(x)
    jacobian = torch.stack([_gradient(number, x) for number in flat(results)])
    three = torch.stack([_gradient(number, x) for number in projected(results)])
    total = loss(results) + 0 * x.sum()  # a result may not depend on x
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    hessian = torch.stack([_gradient(number, x) for number in slope.reshape(-1)])
    return Exact(jacobian, three, slope.detach().reshape(-1), hessian)


def _gradient(number: Tensor, x: Tensor) -> Tensor:
    if not number.requires_grad:
        return torch.zeros(x.numel(), dtype=x.dtype)
    (found,) = torch.autograd.grad(number, x, retain_graph=True, allow_unused=True)
    return torch.zeros(x.numel(), dtype=x.dtype) if found is None else found.detach().reshape(-1)
