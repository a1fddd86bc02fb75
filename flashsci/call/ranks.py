"""The tensors of a dense call at one rank, as raw ops take them."""

from __future__ import annotations

import torch
from torch import Tensor

from flashsci.call.kinds import Role, fields
from flashsci.call.ops import Given, Tensors
from flashsci.call.torch_state import is_traced

# The tensors with leading dims besides rows, each with its place and role.
_BROADCAST = tuple(
    (i, field.role)
    for i, field in enumerate(fields(Tensors).values())
    if field.role in (Role.SCORES, Role.TILES, Role.KEYS, Role.HEADS)
)


def _as_scores(x: Tensor, role: Role | None) -> Tensor:
    """The tensor with a dim of 1 for each dim of the scores that its role does not have."""
    return x.unsqueeze(-2) if role is Role.KEYS else x[..., None, None] if role is Role.HEADS else x


def _from_scores(x: Tensor, role: Role | None) -> Tensor:
    """The inverse of :func:`_as_scores`."""
    return x.squeeze(-2) if role is Role.KEYS else x[..., 0, 0] if role is Role.HEADS else x


def aligned(tensors: Given, leading: tuple[int, ...]) -> Tensors:
    """The tensors at one rank (those of keys: one less, of heads: two less), with at most two leading dims.

    The leading dims of q, k, v are expanded; the other tensors have dims of 1 in front.
    """
    q, k, v, *others = tensors
    rank = max(q.dim(), k.dim(), v.dim())

    def same_rank(x: Tensor) -> Tensor:
        return x.reshape(*(1,) * (rank - x.dim()), *x.shape) if x.dim() < rank else x

    def fold(x: Tensor) -> Tensor:
        if rank <= 5:
            return x
        outer = x.shape[:-4]
        return x.flatten(0, -5) if outer.numel() == 1 else x.expand(*leading[:-1], *x.shape[-4:]).flatten(0, -5)

    def expanded(x: Tensor) -> Tensor:
        # A tensor that has the dims already needs no view, and autograd no node; a compiler would make it a
        # condition.
        if not (torch.compiler.is_compiling() or is_traced()) and x.shape[:-3] == leading:
            return x
        return x.expand(*leading, *x.shape[-3:])

    q, k, v = (same_rank(x) for x in (q, k, v))
    if rank > 3:
        q, k, v = (expanded(x) for x in (q, k, v))
    every = [fold(q), fold(k), fold(v), *others]
    for i, role in _BROADCAST:
        x = every[i]
        if x is not None:
            every[i] = _from_scores(fold(same_rank(_as_scores(x, role))), role)
    return Tensors._make(every)
