"""The all-gather strategy: every rank collects all keys and values and computes its own queries.

One call of the kernels for each interval of queries, no sums of parts, and differentiable to the order that the kernels are:
the collectives are functions with gradients. It costs the memory of the whole k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashsci.distributed import block
from flashsci.distributed.block import Side
from flashsci.distributed.call import from_text
from flashsci.distributed.collectives import place_in
from flashsci.distributed.layout import assemble
from flashsci.distributed.pieces import pieces


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
    text: str,
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries; differentiable. ``text`` is that of the call."""
    call = from_text(text)
    k, v = (assemble(x, call.keys, -2, call.group) for x in (k, v))
    if key_weight is not None:
        key_weight = assemble(key_weight, call.keys, -1, call.group)
    own = call.queries.intervals(place_in(call.group)[0])
    found = pieces(own, [(0, call.keys.total)], call.band)
    return block.attend(q, k, v, key_weight, Side(bias, mask), found, call.scores)


def recorded(
    function: Callable[..., tuple[Tensor, Tensor]],
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
    cotangents: tuple[Tensor | None, Tensor | None],
    text: str,
) -> list[Tensor | None]:
    """The gradients of ``function(*tensors, text)`` with a graph of their own, of those tensors that need one."""
    ends = [
        (x, g) for x, g in zip(function(*tensors, text), cotangents, strict=True) if g is not None
    ]
    leaves = [x if need else None for x, need in zip(tensors, needs, strict=True)]
    wanted = [x for x in leaves if x is not None]
    found = iter(
        torch.autograd.grad([x for x, _ in ends], wanted, [g for _, g in ends], create_graph=True)
    )
    return [None if x is None else next(found) for x in leaves]
