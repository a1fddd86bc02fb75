"""Roundings as perturbations: derivatives by them give the standard deviations that bounds.py allows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.testing.tolerance import UNIFORM


class Rounding(NamedTuple):
    """A format that P is rounded to before its product with v, if it is not the results' own."""

    unit: float  # unit roundoff
    tiny: float  # the smallest normal number, relative to the largest P of a row

    def of_sum(self, x: Tensor) -> Tensor:
        """The increase of the sums of rows of x, at least zero, if x is rounded before."""
        step = torch.ldexp(torch.full_like(x, self.unit), torch.frexp(x).exponent)
        step = step.clamp(min=2 * self.unit * self.tiny)
        return (torch.round(x / step) * step - x).sum(-1, keepdim=True)


class Precisions(NamedTuple):
    """The precisions of a call, as unit roundoffs: those of results, and of values that kernels keep in fp32.

    ``tiny``: the smallest normal number of results. ``of_p``, ``parts``: see Formula in formula.py.
    """

    unit: float
    internal: float
    tiny: float
    of_bias: float
    of_weight: float
    of_sink: float
    of_p: Rounding | None = None
    parts: Rounding | None = None
    of_gate: float = 2.0**-24

    def of_result(self, name: str) -> float:
        """The unit roundoff of one result."""
        special = {
            "bias": self.of_bias,
            "key_weight": self.of_weight,
            "sink": self.of_sink,
            "alibi_slopes": self.internal,
            "pair_gate": self.of_gate,
        }
        if name in ("gdlse", "tlse", "tulse"):
            return self.internal
        return special.get(name[1:], self.unit)

    def subnormal(self, x: Tensor) -> Tensor:
        """One rounding cell, in units of ``unit``, where x is a subnormal number: all such numbers may round in the
        same direction."""
        size = torch.where(x.detach() != 0, x.detach().abs(), torch.inf)
        cell = self.tiny * (size < self.tiny).to(x.dtype)
        if self.parts is not None:
            part = self.parts
            cell = cell + part.tiny * (part.unit / self.unit) * (size < part.tiny / part.unit)
        return cell


def finite(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, torch.zeros_like(x))


class Roundings:
    """All roundings of one block. ``unit``, ``tiny``: unit roundoff and smallest normal number of the results."""

    def __init__(self, unit: float, tiny: float):
        self.unit, self.tiny = unit, tiny
        # (perturbation, group of equal roundings, number of groups)
        self.leaves: list[tuple[Tensor, Tensor, int]] = []

    def rounded(
        self,
        x: Tensor,
        unit: float | None = None,
        like: Tensor | None = None,
        tiny: Any = None,
        bins: float = 8,
        rows: Tensor | None = None,
    ) -> Tensor:
        """x with a perturbation, zero, that stands for its rounding to the precision ``unit``.

        Mantissas that are equal, to an eighth of a rounding (``bins``), round equally. Therefore they share a group,
        of all rows or of those that share an index (``rows``). Values that ``unit`` represents do not round at all.
        ``like``: the tensor that is rounded in x's place, x times a factor of its row. ``tiny``: the smallest normal
        number (of each row), None: that of results, where ``unit`` is theirs.
        """
        unit = self.unit if unit is None else unit
        mantissa = torch.frexp((x if like is None else like).detach().abs()).mantissa
        mantissas, group = torch.unique(torch.round(mantissa * (bins / unit)), return_inverse=True)
        exact = torch.round(mantissa * (2**16 / unit)) % 2**15 == 0
        leaf = torch.zeros_like(x, requires_grad=True)
        size = x.detach().abs()
        tiny = self.tiny if tiny is None and unit == self.unit else tiny
        if tiny is not None:  # the spacing of subnormal numbers is that of the smallest normal ones
            size = torch.where(size < tiny, (size / unit).clamp(max=tiny), size)
        size = torch.where(exact & (size == x.detach().abs()), 0.0, size)
        # A value that does not round adds zero, to any group: masked scores are millions of equal zeros, and a GPU
        # adds to one address serially.
        count = mantissas.numel()
        if rows is not None and count:
            group, count = group + rows * count, count * (int(rows.max()) + 1)
        any_group = torch.arange(group.numel(), device=x.device).view_as(group) % max(count, 1)
        self.leaves.append((leaf, torch.where(size == 0, any_group, group), count))
        return x + leaf * (x.detach().sign() * size * (unit * UNIFORM))

    def shifted(self, x: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """x with one perturbation a row, of ``size``, and the index of each row; rows of equal size share both."""
        sizes, copies = torch.unique(torch.round(size * 2.0**40), return_inverse=True)
        leaf = torch.zeros_like(size, requires_grad=True)
        self.leaves.append((leaf, copies, sizes.numel()))
        return x + leaf * size, copies

    def variances(self, value: Tensor, directions: Tensor) -> Tensor:
        """Variance of <value, direction> for each of [n, *] directions, if groups of equal values round
        independently."""
        found = directions.new_zeros(directions.shape[0])
        if not value.numel():
            return found
        leaves = [leaf for leaf, _, _ in self.leaves]
        # All directions at once if they are small, else one by one: each takes the memory of all leaves.
        together = len(directions) if sum(x.numel() for x in leaves) < 1 << 21 else 1
        for begin in range(0, len(directions), together):
            part = slice(begin, begin + together)
            changes = torch.autograd.grad(
                finite(value),
                leaves,
                directions[part],
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            for change, (_, group, count) in zip(changes, self.leaves, strict=True):
                if change is not None and count:
                    sums = change.new_zeros(len(change), count)
                    sums.index_add_(1, group.flatten(), change.flatten(1))
                    found[part] += sums.square().sum(1)
        return found
