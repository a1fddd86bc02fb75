"""The Ulysses strategy: an all-to-all turns parts of the sequence into heads, and another turns them back.

In between, each rank computes whole sequences of its heads. If there are many heads it has the least traffic of the
three, and the longest calls for the kernels. Key heads stay whole, with their group of query heads; there must be at
least one for each rank. Source: Jacobs et al., arXiv:2309.14509.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from flashsci.distributed import block
from flashsci.distributed.block import Side
from flashsci.distributed.call import DistributedCall, from_text
from flashsci.distributed.collectives import all_to_all, place_in
from flashsci.distributed.layout import Layout, assemble, even
from flashsci.distributed.pieces import pieces

Shape = tuple[int, ...]


def refuses(call: DistributedCall, heads_q: int, heads_k: int, bias: Shape | None, mask: Shape | None) -> str | None:
    """Why this strategy cannot serve a call, given the shapes of its bias and mask; None if it can."""
    if heads_k < call.world:
        return f"it has {heads_k} key heads for {call.world} ranks"
    for name, x, split in zip(("bias", "mask"), (bias, mask), call.split, strict=True):
        if split and x is not None and _heads(x) == 1 != heads_q:
            return f"its {name} is split by rows and has one head, which every rank would have to collect"
    return None


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
    rank, heads_q, heads_k = place_in(call.group)[0], _heads(q.shape), _heads(k.shape)
    bounds = even(heads_k, call.world)
    of_k = tuple(b - a for a, b in itertools.pairwise(bounds))
    of_q = tuple(n * (heads_q // heads_k) for n in of_k)
    first = sum(of_q[:rank])

    def of_pairs(x: Tensor | None, split: bool) -> Tensor | None:
        if x is None or (_heads(x.shape) == 1 and not split):
            return x
        if not split:
            return x.narrow(-3, first, of_q[rank])
        if x.dtype == torch.bool:  # not every library moves these
            return to_heads(x.to(torch.uint8), of_q, call.queries, call.group).bool()
        return to_heads(x, of_q, call.queries, call.group)

    if key_weight is not None:
        if key_weight.dim() > 1 and key_weight.shape[-2] != 1:
            key_weight = to_heads(key_weight.unsqueeze(-1), of_k, call.keys, call.group).squeeze(-1)
        else:
            key_weight = assemble(key_weight, call.keys, -1, call.group)
    bias, mask = (of_pairs(x, split) for x, split in zip((bias, mask), call.split, strict=True))
    k, v = (to_heads(x, of_k, call.keys, call.group) for x in (k, v))
    q = to_heads(q, of_q, call.queries, call.group)
    found = pieces([(0, call.queries.total)], [(0, call.keys.total)], call.band)
    out, lse = block.attend(q, k, v, key_weight, Side(bias, mask), found, call.scores)
    out = to_rows(out, of_q, call.queries, call.group)
    return out, to_rows(lse.unsqueeze(-1), of_q, call.queries, call.group).squeeze(-1)


def to_heads(x: Tensor, heads: tuple[int, ...], layout: Layout, group_name: str) -> Tensor:
    """[..., H, rows of this rank, D] -> [..., heads of this rank, S, D]."""
    rank = place_in(group_name)[0]
    own, rows = heads[rank], layout.lengths
    flat = x.movedim((-3, -2), (0, 1)).flatten(0, 1)
    flat = all_to_all(flat, tuple(n * rows[rank] for n in heads), tuple(own * n for n in rows), group_name)
    parts = []
    for source, part in enumerate(flat.split([own * n for n in rows])):
        part, place = part.unflatten(0, (own, rows[source])), 0
        for a, b in layout.intervals(source):
            parts.append((a, part.narrow(1, place, b - a)))
            place += b - a
    parts.sort(key=lambda pair: pair[0])
    return torch.cat([part for _, part in parts], 1).movedim((0, 1), (-3, -2))


def to_rows(x: Tensor, heads: tuple[int, ...], layout: Layout, group_name: str) -> Tensor:
    """[..., heads of this rank, S, D] -> [..., H, rows of this rank, D]."""
    rank = place_in(group_name)[0]
    own, rows = heads[rank], layout.lengths
    x = x.movedim((-3, -2), (0, 1))
    parts = []
    for to in range(len(rows)):
        found = [x.narrow(1, a, b - a) for a, b in layout.intervals(to)]
        parts.append(torch.cat(found, 1).flatten(0, 1))
    flat = torch.cat(parts)
    flat = all_to_all(flat, tuple(own * n for n in rows), tuple(n * rows[rank] for n in heads), group_name)
    return flat.unflatten(0, (sum(heads), rows[rank])).movedim((0, 1), (-3, -2))


def _heads(shape: Shape) -> int:
    return shape[-3] if len(shape) > 2 else 1
