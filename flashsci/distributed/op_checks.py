"""The checks of this package's raw ops: tensors must be those of their call and rank. Attention itself checks the
rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashsci.call.op_checks import need, same, shapes
from flashsci.call.ops import statistics_dtype
from flashsci.distributed.call import DistributedCall


def rows_of_rank(call: DistributedCall, rank: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the rows of a rank's tensors against those that it has of a sequence."""
    _alike(q, k, v)
    for x, name, layout in ((q, "q", call.queries), (k, "k", call.keys), (v, "v", call.keys)):
        need(
            x.shape[-2] == layout.lengths[rank],
            f"rank {rank} has {layout.lengths[rank]} rows of {name} in this call, got {list(x.shape)}",
        )


def rows_of_pairs(call: DistributedCall, rank: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> None:
    """Check for whole rows of a pair representation, and the bias of a rank's queries."""
    _alike(q, k, v)
    need(k.shape[-2] == v.shape[-2], f"k and v must have the same keys: {shapes(k=k, v=v)}")
    total, own = call.queries.total, call.queries.lengths[rank]
    need(q.shape[-2] == total, f"q must have {total} rows in this call, got {list(q.shape)}")
    need(
        bias.dim() >= 2 and bias.shape[-2] == own,
        f"rank {rank} has the bias of {own} queries in this call, got {list(bias.shape)}",
    )


def of_pairs(q: Tensor, keys: int, **tensors: Tensor | None) -> None:
    """Check that biases and masks are broadcastable to the scores of q."""
    full = (*q.shape[:-1], keys)
    for name, x in tensors.items():
        if x is not None:
            _broadcasts(name, x, full)


def of_keys(key_weight: Tensor | None, k: Tensor) -> None:
    if key_weight is not None:
        _broadcasts("key_weight", key_weight, k.shape[:-1])
        need(
            key_weight.shape[-1:] == k.shape[-2:-1],
            f"key_weight must have the keys of k: {shapes(key_weight=key_weight, k=k)}",
        )


def results(q: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None) -> None:
    """Check the results of a forward, and their gradients."""
    for name, x in (("out", out), ("dout", dout)):
        if x is not None:
            same(name, x, (*q.shape[:-1], v.shape[-1]), (q.dtype,), q)
    for name, x in (("lse", lse), ("dlse", dlse)):
        if x is not None:
            same(name, x, q.shape[:-1], (statistics_dtype(q.dtype),), q)


def _alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    given = shapes(q=q, k=k, v=v)
    need(
        q.dim() == k.dim() == v.dim() >= 2 and q.shape[:-3] == k.shape[:-3] == v.shape[:-3],
        f"q, k and v must have the same leading dims before heads, rows and columns: {given}",
    )
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (q, k, v)]
    need(
        heads[1] == heads[2] and (heads[0] == 0 or (heads[1] > 0 and heads[0] % heads[1] == 0)),
        f"k and v must have the same heads, and q a multiple of them: {given}",
    )
    need(q.shape[-1] == k.shape[-1], f"q and k must have the same head dim: {given}")
    same("k", k, k.shape, (q.dtype,), q)
    same("v", v, v.shape, (q.dtype,), q)


def _broadcasts(name: str, x: Tensor, full: Sequence[int]) -> None:
    try:
        fits = torch.broadcast_shapes(x.shape, full) == tuple(full)
    except RuntimeError:
        fits = False
    need(fits, f"{name} must broadcast to {list(full)}, got {list(x.shape)}")
