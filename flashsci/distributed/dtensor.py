"""DTensors as arguments and results: the mesh dim that splits the sequence, and the meaning of gradients for each
placement."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashsci.distributed.collectives import replicated

Wrap = Callable[[Tensor], DTensor]


def is_dtensor(x: Any) -> bool:
    return isinstance(x, DTensor)


def unwrapped(tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, Wrap]:
    """The local parts of q, k, v, bias, key_weight, mask; the process group of the sequence; and a wrapper.

    The wrapper makes DTensors of results ``[..., Hq, Sq]`` or ``[..., Hq, Sq, Dv]``.

    Raises:
        TypeError: a mixture of DTensors and other tensors.
        ValueError: placements that are not those of one call on each rank's part.
    """
    q, k, v, bias, key_weight, mask = tensors
    if not all(x is None or is_dtensor(x) for x in tensors):
        raise TypeError("q is a DTensor, so must be every tensor of the call; DTensor.from_local makes one of a part")
    rows, mesh = q.dim() - 2, q.device_mesh
    for name, x in (("k", k), ("v", v), ("bias", bias), ("key_weight", key_weight), ("mask", mask)):
        if x is not None and x.device_mesh != mesh:
            raise ValueError(f"{name} is on another mesh than q; redistribute it")
    split = [i for i, p in enumerate(q.placements) if p.is_shard(rows)]
    fits = all(p.is_replicate() or (p.is_shard() and p.dim <= rows) for p in q.placements)
    if len(split) != 1 or not fits or not q.placements == k.placements == v.placements:
        raise ValueError(
            f"q, k, v must have equal placements, Shard({rows}) (the sequence) on one mesh dim and Shard of a leading dim or "
            f"Replicate on the others, got {q.placements}, {k.placements}, {v.placements}; redistribute them"
        )
    local = [x.to_local() for x in (q, k, v)]
    for name, x, last in (("bias", bias, 0), ("key_weight", key_weight, 1), ("mask", mask, 0)):
        if x is None:
            local.append(None)
            continue
        part = x.to_local(grad_placements=x.placements)
        for i in _summed(name, x, q, split[0], last):
            part = replicated(part, mesh.get_group(i).group_name)
        local.append(part)

    def wrap(x: Tensor) -> DTensor:
        shape = (*q.shape[:-1], *x.shape[q.dim() - 1 :])
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return DTensor.from_local(x, mesh, q.placements, run_check=False, shape=torch.Size(shape), stride=stride)

    return tuple(local), mesh.get_group(split[0]), wrap


def _summed(name: str, x: DTensor, q: DTensor, split: int, last: int) -> list[int]:
    """The mesh dims over which gradients of x are summed: those that split q, and not x.

    x is [..., Hq or 1, Sq or 1, Sk] or, with ``last`` 1, [..., Hk or 1, Sk]. The call itself sums over the dim of the
    sequence.
    """
    found = []
    shift = q.dim() - last - x.dim()  # leading dims that x lacks
    for i, (own, of_q) in enumerate(zip(x.placements, q.placements, strict=True)):
        alike = own.is_shard() and of_q.is_shard() and own.dim + shift == of_q.dim  # type: ignore[attr-defined]
        if not alike and (not own.is_replicate() or (last and i == split)):
            raise ValueError(
                f"{name} has the placement {own} on mesh dim {i} where q has {of_q}; it must be split as q is, or Replicate"
            )
        if not alike and of_q.is_shard() and i != split:
            found.append(i)
    return found
