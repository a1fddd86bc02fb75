"""One distributed call as plain data, which an operator can carry as text; and the part of it that each rank
computes."""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import torch

from flashsci.distributed.block import Scores
from flashsci.distributed.layout import Interval, Layout
from flashsci.distributed.pieces import Band, Piece, deepest, joined, pieces, seen


class DistributedCall(NamedTuple):
    """Options and layouts that all ranks share."""

    group: str  # the name of the process group
    queries: Layout
    keys: Layout
    band: Band
    scores: Scores
    # Whether bias and mask have the rows of their rank, not one row for all; and whether the call has one of them.
    split: tuple[bool, bool] = (False, False)
    placed: bool = False

    @property
    def world(self) -> int:
        return len(self.queries.lengths)

    def text(self) -> str:
        return json.dumps(self)

    def pieces(self, rank: int, source: int) -> list[Piece]:
        """The pieces that rank computes with the keys of source."""
        return _pieces(self, rank, source)

    def needed(self, rank: int, source: int) -> Interval | None:
        """The rows of source's keys that rank needs; None: it sees none of them."""
        found = self.pieces(rank, source)
        return seen(found) if found else None

    def needed_pieces(self, rank: int, source: int) -> list[Piece]:
        """The pieces, with keys counted from the first needed key."""
        found = self.pieces(rank, source)
        first = seen(found)[0] if found else 0
        return [p._replace(keys=(p.keys[0] - first, p.keys[1] - first)) for p in found]

    def most_parts(self, rank: int) -> tuple[int, int]:
        """The most parts of the out of one query of this rank, and of the gradients of one of its keys."""
        return _most_parts(self, rank)

    def pairs(self, rank: int) -> int:
        """Query-key pairs that a rank computes."""
        return sum(p.pairs() for source in range(self.world) for p in self.pieces(rank, source))


@functools.lru_cache(maxsize=4096)
def _pieces(call: DistributedCall, rank: int, source: int) -> list[Piece]:
    found = pieces(call.queries.intervals(rank), call.keys.intervals(source), call.band)
    return found if call.placed else joined(found)


@functools.lru_cache(maxsize=1024)
def _most_parts(call: DistributedCall, rank: int) -> tuple[int, int]:
    ranks = range(call.world)
    rows = [p.rows for source in ranks for p in call.pieces(rank, source)]
    others = [call.needed(worker, rank) for worker in ranks if worker != rank]
    keys = [p.keys for p in call.pieces(rank, rank)] + [x for x in others if x is not None]
    return deepest(rows), deepest(keys)


@torch._dynamo.assume_constant_result
def from_text(text: str) -> DistributedCall:
    """The inverse of :meth:`Call.text`."""
    return _from_text(text)


@functools.lru_cache(maxsize=1024)
def _from_text(text: str) -> DistributedCall:
    group, queries, keys, band, scores, split, placed = json.loads(text)
    (kind_q, lengths_q), (kind_k, lengths_k), (left, right, shift, offsets) = queries, keys, band
    return DistributedCall(
        group,
        Layout(kind_q, tuple(lengths_q)),
        Layout(kind_k, tuple(lengths_k)),
        Band(left, right, shift, None if offsets is None else tuple(offsets)),
        Scores(*scores),
        (bool(split[0]), bool(split[1])),
        bool(placed),
    )
