"""The layout of a sequence's rows over ranks: contiguous parts, or a head and a tail chunk for each rank, which
balances causal calls."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashsci.distributed import agreement
from flashsci.distributed.agreement import Mesh
from flashsci.distributed.collectives import all_gather, refuse_transforms

LAYOUTS = ("contiguous", "head_tail")
Interval = tuple[int, int]


def even(total: int, parts: int) -> list[int]:
    """The starts of ``parts`` parts of ``total`` rows, and the end of the last; their lengths differ by at most
    one."""
    return [i * total // parts for i in range(parts + 1)]


class Layout(NamedTuple):
    """Rows of a sequence over the ranks of a mesh."""

    kind: str
    lengths: tuple[int, ...]  # rows of each rank

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def intervals(self, rank: int) -> list[Interval]:
        """The rows of a rank as intervals of the sequence, in the order in which the rank holds them."""
        if self.kind == "contiguous":
            start = sum(self.lengths[:rank])
            return [(start, start + self.lengths[rank])]
        count = 2 * len(self.lengths)
        bounds = even(self.total, count)
        (a, b), (c, d) = ((bounds[i], bounds[i + 1]) for i in (rank, count - 1 - rank))
        return [(a, d)] if b == c else [(a, b), (c, d)]

    @classmethod
    def of(cls, kind: str, total: int, world: int) -> Layout:
        """The layout of :func:`shard`."""
        if kind == "contiguous":
            bounds = even(total, world)
            return cls(kind, tuple(b - a for a, b in itertools.pairwise(bounds)))
        bounds = even(total, 2 * world)
        size = [b - a for a, b in itertools.pairwise(bounds)]
        return cls(kind, tuple(size[i] + size[-1 - i] for i in range(world)))


def check_layout(kind: str) -> None:
    if kind not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {kind!r}")


def shard(x: Tensor, mesh: Mesh, *, dim: int = -2, layout: str = "contiguous") -> Tensor:
    """This rank's part of a whole tensor that every rank has.

    Args:
        x: any tensor that is the same on every rank: token ids, positions (``torch.arange(S)``), or q itself.
        mesh: one-dimensional DeviceMesh over which the sequence is split.
        dim: the dim of the sequence.
        layout: "contiguous": rank r of W has rows ``r S // W`` to ``(r + 1) S // W``. "head_tail": the sequence is
            cut into 2 W chunks, and rank r has chunks r and 2 W - 1 - r, so that all ranks have the same work under a
            causal mask. S may be any number.

    Returns:
        The part, one view or the two chunks one after the other. Its gradient only reaches these rows of this rank's
        x.

    Raises:
        ValueError: an unknown layout, or a mesh of more than one dim.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> import flashsci.distributed as fd
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> positions = fd.shard(torch.arange(10), mesh, dim=0, layout="head_tail")
        >>> fd.unshard(positions, mesh, dim=0, layout="head_tail").tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> dist.destroy_process_group()

    Source: the head and tail chunks of Llama 3, arXiv:2407.21783, section 3.3.2.
    """
    check_layout(layout)
    group = agreement.group_of(mesh)
    whole = Layout.of(layout, x.shape[dim], group.size())
    parts = [x.narrow(dim, a, b - a) for a, b in whole.intervals(group.rank())]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@torch.compiler.disable(
    reason="ranks compare the lengths of their parts at every call: call flashsci.distributed.unshard outside of the compiled function"
)
def unshard(x: Tensor, mesh: Mesh, *, dim: int = -2, layout: str = "contiguous") -> Tensor:
    """The whole of a tensor whose parts are on the ranks: the inverse of :func:`shard`, differentiable to any order.

    Args:
        x: this rank's part; contiguous parts may be of any length.
        mesh, dim, layout: as in :func:`shard`.

    Returns:
        The whole, on every rank. A part's gradient is the sum over the ranks of their gradients for its rows.

    Raises:
        ValueError: shapes or dtypes that differ between ranks in dims other than ``dim``, or lengths that are not those
            of the layout.
        TypeError: a DTensor, which knows its parts itself.
        BackendError: inside torch.vmap, with a forward-mode tangent, or for a batch of gradients.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> import flashsci.distributed as fd
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> fd.unshard(torch.ones(3, 2), mesh, dim=0).shape
        torch.Size([3, 2])
        >>> dist.destroy_process_group()
    """
    check_layout(layout)
    if isinstance(x, DTensor):
        raise TypeError("x is a DTensor; call x.full_tensor(), which puts its parts together")
    refuse_transforms(x)
    group = agreement.group_of(mesh)
    agreement.check_transforms("distributed.unshard", x=x)
    dim = dim % x.dim()
    said = agreement.tensor_fields("x", x, {dim: "rows"}) | {"dim": dim, "layout": layout}
    table = agreement.agree(group, said, agreement.rows("x"), x.device.type)
    whole = checked(layout, [int(row["x rows"]) for row in table], "x")
    return assemble(x, whole, dim, group.group_name)


def checked(kind: str, lengths: list[int], name: str) -> Layout:
    """The layout of parts of these lengths.

    Raises:
        ValueError: they are not those of head and tail chunks.
    """
    found = Layout(kind, tuple(lengths))
    if kind == "head_tail" and found != Layout.of(kind, found.total, len(lengths)):
        raise ValueError(
            f"layout='head_tail' of {found.total} rows over {len(lengths)} ranks has "
            f"{list(Layout.of(kind, found.total, len(lengths)).lengths)} rows by rank, got {lengths} of {name}; cut "
            "with flashsci.distributed.shard"
        )
    return found


def assemble(x: Tensor, layout: Layout, dim: int, group_name: str) -> Tensor:
    """The whole of x in the order of the sequence; a view if the layout allows it."""
    rows = all_gather(x.movedim(dim, 0), layout.lengths, group_name)
    return in_order(rows, layout).movedim(0, dim)


def in_order(rows: Tensor, layout: Layout) -> Tensor:
    """Rows (dim 0) in rank order, rearranged to the order of the sequence."""
    if layout.kind == "contiguous" or not layout.total:  # torch.cat of nothing has no gradient
        return rows
    return torch.cat([rows[a:b] for a, b in _places(layout)])


def by_rank(rows: Tensor, layout: Layout) -> Tensor:
    """Rows (dim 0) in the order of the sequence, rearranged to rank order."""
    if layout.kind == "contiguous" or not layout.total:
        return rows
    parts = [rows[a:b] for r in range(len(layout.lengths)) for a, b in layout.intervals(r)]
    return torch.cat(parts)


def _places(layout: Layout) -> list[Interval]:
    """The places of the intervals in rank order, sorted by their place in the sequence."""
    found, place = [], 0
    for rank in range(len(layout.lengths)):
        for a, b in layout.intervals(rank):
            found.append((a, place, place + b - a))
            place += b - a
    return [(start, stop) for _, start, stop in sorted(found)]
