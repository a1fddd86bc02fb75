"""Gradients of a recomputed function, with a graph: for a backward that is recorded, or along which there are
tangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def gradients(
    compute: Callable[..., Any],
    inputs: Sequence[Any],
    wanted: Sequence[bool],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of ``<compute(*inputs), cotangents>`` by the inputs, None where not wanted.

    They have a graph where grad mode is on, and tangents where the cotangents or inputs have them.

    Args:
        compute: returns as many tensors as there are cotangents.
        inputs: tensors with the graphs that they came with, and others.
        cotangents: None: zero, but not all of them.
    """
    # Through aliases: one input may be computed from another, or be the same tensor, as q, k and v of one x are. The
    # graph between them passes the gradient of one on to the other; without aliases it would be counted twice.
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [x.view_as(x) if want else x for x, want in zip(inputs, wanted, strict=True)]
        results = zip(compute(*aliases), cotangents, strict=True)
    # A result may depend on none of the wanted inputs, as scores do not depend on v.
    ends = [(x, g) for x, g in results if g is not None and x.requires_grad]
    if not ends:
        return [None] * len(wanted)
    leaves = [x for x, want in zip(aliases, wanted, strict=True) if want]
    outputs, given = zip(*ends, strict=True)
    found = iter(torch.autograd.grad(outputs, leaves, given, create_graph=recorded, allow_unused=True))
    return [next(found) if want else None for want in wanted]
