"""DTensors as arguments and results: the mesh dim that splits the sequence, if any, and the meaning of gradients for
each placement."""

from __future__ import annotations

import functools
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

    return tuple(local), mesh.get_group(split[0]), functools.partial(_placed, q=q)


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


# Dims of q after the last one that a tensor of the call shares with it, from the right.
_ALIGNED = {"k": 0, "v": 0, "bias": 0, "key_weight": 1, "mask": 0, "alibi_slopes": 2, "sink": 2}


def splits_sequence(q: Any) -> bool:
    """Whether q ``[..., Hq, Sq, D]``, a DTensor, has its sequence split over ranks."""
    return any(p.is_shard(q.dim() - 2) for p in q.placements)


def on_shards(attend: Callable[..., Any], tensors: dict[str, Any], refused: dict[str, Any], **options: Any) -> Any:
    """A call on DTensors whose sequences are whole on each rank, computed by each rank on its heads and batch; no
    tensor is moved. The gradient of a tensor that all heads or the whole batch share is summed over their ranks.

    Args:
        attend: :func:`flashsci.attention`.
        tensors: by name, those that are given; q is a DTensor.
        refused: options that have no meaning for each part; an error where one is given.

    Raises:
        TypeError: a mixture of DTensors and other tensors; an option that is refused.
        ValueError: other placements.
    """
    for name, x in refused.items():
        if isinstance(x, Tensor) or x:
            raise TypeError(
                f"q is a DTensor, and {name} is not taken with DTensors, nor by flashsci.distributed; call this on to_local() of each"
            )
    q: DTensor = tensors["q"]
    for name, x in tensors.items():
        if not is_dtensor(x):
            raise TypeError(
                f"q is a DTensor, {name} is not; make one of it with DTensor.from_local or distribute_tensor, or call "
                "flashsci.distributed.attention on the parts of a sequence"
            )
        if x.device_mesh != q.device_mesh:
            raise ValueError(f"{name} is on another mesh than q; redistribute it")
    _check_whole(q)
    local = {name: q.to_local() if name == "q" else _part(name, x, q) for name, x in tensors.items()}
    _check_groups(q, tensors["k"])
    found = attend(**local, **options)
    return tuple(_placed(x, q) for x in found) if isinstance(found, tuple) else _placed(found, q)


def _check_whole(q: DTensor) -> None:
    for i, p in enumerate(q.placements):
        if p.is_replicate() or (p.is_shard() and p.dim < q.dim() - 2):  # type: ignore[attr-defined]
            continue
        advice = "redistribute it to Replicate, or to Shard of the batch or the heads"
        if p.is_shard(q.dim() - 2):
            advice = "its sequence is split: call flashsci.distributed.attention"
        raise ValueError(f"q is a DTensor with the placement {p} on mesh dim {i}; {advice}")


def _part(name: str, x: DTensor, q: DTensor) -> Tensor:
    """This rank's part of a tensor other than q."""
    shift = q.dim() - _ALIGNED[name] - x.dim()  # leading dims that x lacks
    part: Tensor = x.to_local(grad_placements=x.placements)
    for i, (own, of_q) in enumerate(zip(x.placements, q.placements, strict=True)):
        dim = of_q.dim - shift if of_q.is_shard() else None  # type: ignore[attr-defined]
        if own.is_replicate() if dim is None else dim >= 0 and own.is_shard(dim):
            continue
        shared = dim is not None and (dim < 0 or x.shape[dim] == 1)
        if not (shared and own.is_replicate()):
            wanted = "Replicate()" if dim is None or shared else f"Shard({dim})"
            raise ValueError(
                f"{name} has the placement {own} on mesh dim {i} where q has {of_q}; {wanted} is wanted there: "
                "redistribute it"
            )
        part = replicated(part, q.device_mesh.get_group(i).group_name)
    return part


def _check_groups(q: DTensor, k: DTensor) -> None:
    """Check that each rank has the keys of its queries' heads."""
    heads = q.dim() - 3
    if heads < 0 or k.dim() < 3 or k.shape[-3] in (1, q.shape[-3]):
        return
    ranks = math.prod(q.device_mesh.size(i) for i, p in enumerate(q.placements) if p.is_shard(heads))
    if k.shape[-3] % ranks:
        raise ValueError(
            f"{k.shape[-3]} heads of k do not divide into {ranks} equal parts, so groups of {q.shape[-3] // k.shape[-3]} heads of q "
            "would be torn apart; redistribute q, k, v to Replicate on a mesh dim, or repeat the heads of k and v"
        )


def _placed(x: Tensor, q: DTensor) -> DTensor:
    """A result ``[..., Hq, Sq]`` or ``[..., Hq, Sq, Dv]`` as a DTensor placed as q is."""
    shape = (*q.shape[:-1], *x.shape[q.dim() - 1 :])
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(x, q.device_mesh, q.placements, run_check=False, shape=torch.Size(shape), stride=stride)
