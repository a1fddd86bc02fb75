"""Tables of tiles from blocks of a mask's rows, by torch's own ops on any device, and the masks of such tables.

A table made here has bits of the tiles alone that hide some of their scores (flashsci/call/mask_tiles.py). Neither
direction needs memory for more than a block of rows, the table and what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flashsci.call.mask_tiles import BITS, TILE, has_rows, lists_length, tiles
from flashsci.call.ops import empty_with_inner_keys

#: Scores of a mask that are held at once.
BLOCK = 1 << 22


def row_blocks(count: int, rows: int, keys: int) -> Iterator[tuple[int, int]]:
    """The first and the last row of each block of whole tiles, of ``count`` masks at once."""
    step = max(1, BLOCK // max(1, count * keys) // TILE) * TILE
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _in_tiles(part: Tensor) -> Tensor:
    """A block of rows [N, r, Sk] as tiles [N, tiles of queries, tiles of keys, TILE, TILE]; False beyond it."""
    rest = [-n % TILE for n in part.shape[:0:-1]]
    part = torch.nn.functional.pad(part, (0, rest[0], 0, rest[1]))
    return part.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE)).transpose(2, 3)


def _inside(length: int, device: torch.device) -> Tensor:
    """The rows or keys of each tile that belong to a mask of this length."""
    return (length - TILE * torch.arange(tiles(length), device=device)).clamp(max=TILE)


def _packed(found: Tensor) -> Tensor:
    """The words [N, BITS] of tiles [N, TILE, TILE]."""
    places = 1 << torch.arange(8, device=found.device, dtype=torch.uint8)
    of_bytes = (found.unflatten(-1, (-1, 8)) * places).sum(-1, dtype=torch.uint8)
    return of_bytes.flatten(1).view(torch.int32)


def _unpacked(words: Tensor) -> Tensor:
    """The tiles [N, TILE, TILE] of words [N, BITS]."""
    places = torch.arange(8, device=words.device, dtype=torch.uint8)
    bits = (words.contiguous().view(torch.uint8).unsqueeze(-1) >> places) & 1
    return bits.bool().view(-1, TILE, TILE)


def _lists(kinds: Tensor) -> tuple[Tensor, Tensor]:
    """The counts [N, lines, n + 1] and the lists [N, lines, n] of kinds [N, lines, n] of tiles."""
    count = kinds.shape[-1]
    shown = kinds > 0
    before = torch.nn.functional.pad(shown.cumsum(-1, dtype=torch.int32), (1, 0))
    entries = (2 * torch.arange(count, device=kinds.device) + kinds // 2).int()
    listed = entries.new_zeros(*kinds.shape[:-1], count + 1)
    listed.scatter_(-1, torch.where(shown, before[..., :-1], count).long(), entries.expand(kinds.shape))
    return before, listed[..., :-1]


def table_of(part_of: Callable[[int, int], Tensor], lead: tuple[int, ...], rows: int, keys: int) -> Tensor:
    """The table [*lead, 1, N] of a mask [*lead, rows, keys] with more than one row.

    Args:
        part_of: the rows [*lead, last - first, keys] of the mask from a first one to a last one.
    """
    count = math.prod(lead)
    kinds, bits, owners = [], [], []
    for first, last in row_blocks(count, rows, keys):
        found = _in_tiles(part_of(first, last).reshape(count, last - first, keys))
        shown = found.sum((-1, -2), dtype=torch.int32)
        whole = _inside(last - first, shown.device)[:, None] * _inside(keys, shown.device)
        kind = (shown > 0).int() + (shown == whole)
        partial = (kind == 1).nonzero(as_tuple=True)
        kinds.append(kind)
        bits.append(_packed(found[partial]))
        owners.append(partial[0])
    kind = torch.cat(kinds, 1)
    return _assembled(kind, torch.cat(bits), torch.cat(owners), rows, keys).unflatten(0, (*lead, 1))


def _assembled(kind: Tensor, bits: Tensor, owners: Tensor, rows: int, keys: int) -> Tensor:
    """The tables [N, length] of masks, from the kinds of their tiles and the bits [tiles, BITS] of partial ones, which
    come in the order of rows, each with the mask it belongs to."""
    count = kind.shape[0]
    partial = (kind == 1).flatten(1)
    ranks = partial.cumsum(1, dtype=torch.int32) - 1
    most = max(1, int(partial.sum(1).max()))
    start = lists_length(rows, keys)
    table = torch.zeros(count, start + most * BITS, dtype=torch.int32, device=kind.device)
    places = torch.where(partial, ranks, 0)
    parts = [*_lists(kind), *_lists(kind.mT), places]
    lists = torch.cat([x.reshape(count, -1) for x in parts], 1)
    table[:, : lists.shape[1]] = lists
    order = owners.argsort(stable=True)  # by mask, and within it by rows
    owners = owners[order]
    firsts = torch.searchsorted(owners, torch.arange(count, device=owners.device))
    table[:, start:].unflatten(1, (most, BITS))[
        owners, torch.arange(len(owners), device=owners.device) - firsts[owners]
    ] = bits[order]
    return table


def mask_of(table: Tensor, rows: int, keys: int) -> Tensor:
    """The mask [*, rows, keys] of a table [*, 1, N] of one with a row for each query; keys have neighbours in memory."""
    assert has_rows(table.shape, rows)
    lead = table.shape[:-2]
    flat = table.reshape(math.prod(lead), table.shape[-1])
    across, down = tiles(keys), tiles(rows)
    before, listed, _, _, places, _ = flat.split(_lengths(down, across, flat.shape[1]), 1)
    total = before.view(-1, down, across + 1)[..., -1:]
    listed = listed.view(-1, down, across)
    kind = torch.zeros(len(flat), down, across + 1, dtype=torch.int32, device=flat.device)
    real = torch.arange(across, device=flat.device) < total
    kind.scatter_(-1, torch.where(real, listed // 2, across).long(), 1 + listed % 2)
    kind, place = kind[..., :-1], places.view(-1, down, across)
    bits = flat[:, lists_length(rows, keys) :].unflatten(1, (-1, BITS))
    mask = empty_with_inner_keys(flat.new_empty(len(flat), rows, keys, dtype=torch.bool))
    for first, last in row_blocks(len(flat), rows, keys):
        above, below = first // TILE, tiles(last)
        of = kind[:, above:below]
        found = (of == 2)[..., None, None].repeat(1, 1, 1, TILE, TILE)
        partial = (of == 1).nonzero(as_tuple=True)
        found[partial] = _unpacked(bits[partial[0], place[:, above:below][partial].long()])
        mask[:, first:last] = found.transpose(2, 3).flatten(3).flatten(1, 2)[:, : last - first, :keys]
    return mask.view(*lead, rows, keys)


def _lengths(down: int, across: int, length: int) -> list[int]:
    """The lengths of the parts of a table: both counts, each with its list, places, and the rest."""
    parts = [down * (across + 1), down * across, across * (down + 1), across * down, down * across]
    return [*parts, length - sum(parts)]
