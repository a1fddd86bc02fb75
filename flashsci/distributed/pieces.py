"""The visible part of a block of scores, as calls that kernels know.

A causal mask, a window and packed sequences are conditions on positions in the whole sequence. Between an interval of
queries and one of keys they leave a band. Rows and keys outside it are cut off. Then it is a window ``(left, right)``
of two non-negative bounds from the upper left, or no window at all if it hides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from flashsci.call.problem import pairs_of
from flashsci.distributed.layout import Interval


class Band(NamedTuple):
    """Query i sees keys ``i + shift - left`` to ``i + shift + right`` of its own sequence; -1: unbounded."""

    left: int
    right: int
    shift: int = 0
    offsets: tuple[int, ...] | None = None  # those of packed sequences


class Piece(NamedTuple):
    """One call: rows of this rank's queries against rows of a rank's keys."""

    rows: Interval  # rows of the rank's own tensors
    keys: Interval
    # The keys' place in the whole sequence, as in biases and masks; None: in several places.
    columns: Interval | None
    left: int
    right: int
    # Offsets of packed sequences of queries and keys within rows and keys; None: one dense call.
    offsets: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def pairs(self) -> int:
        """Query-key pairs that it computes."""
        if self.offsets is None:
            (a, b), (c, d) = self.rows, self.keys
            return pairs_of(b - a, d - c, self.left, self.right)
        sequences = zip(*(itertools.pairwise(x) for x in self.offsets), strict=True)
        return sum(pairs_of(b - a, d - c, self.left, self.right) for (a, b), (c, d) in sequences)


def pieces(queries: Sequence[Interval], keys: Sequence[Interval], band: Band) -> list[Piece]:
    """The pieces, by rows, of all keys that these queries see; intervals follow each other in their rank's memory."""
    found: list[Piece] = []
    row = 0
    for q in queries:
        key = 0
        for k in keys:
            places = (row - q[0], key - k[0])
            found += (_dense if band.offsets is None else _packed)(q, k, band, places)
            key += k[1] - k[0]
        row += q[1] - q[0]
    return sorted(found)


def joined(found: Sequence[Piece]) -> list[Piece]:
    """The same in fewer calls, if no bias or mask needs to know the places of keys.

    A rank's chunks are neighbours in its memory, in the order of the sequence. The visible part of its own head and
    tail is one causal call, and that of another's one full call.
    """
    for join in (_beside, _below):
        done: list[Piece] = []
        for piece in found:
            both = join(done[-1], piece) if done and _simple(done[-1]) and _simple(piece) else None
            if both is None:
                done.append(piece)
            else:
                done[-1] = both
        found = done
    return list(found)


def _simple(piece: Piece) -> bool:
    return piece.offsets is None and piece.left < 0


def _beside(a: Piece, b: Piece) -> Piece | None:
    """One call for two pieces with the same rows, if the first sees all of its keys; else None."""
    if a.rows != b.rows or a.keys[1] != b.keys[0] or a.right >= 0:
        return None
    right = b.right if b.right < 0 else b.right + a.keys[1] - a.keys[0]
    return Piece(a.rows, (a.keys[0], b.keys[1]), None, -1, right)


def _below(a: Piece, b: Piece) -> Piece | None:
    """One call for two pieces with adjoining rows, if the second continues where the first ends; else None."""
    if a.rows[1] != b.rows[0] or a.keys[0] != b.keys[0]:
        return None
    n, of_a, of_b = a.rows[1] - a.rows[0], a.keys[1] - a.keys[0], b.keys[1] - b.keys[0]
    if a.right < 0:
        fits = b.right < 0 and of_a == of_b
    else:
        bounded = of_a == of_b or (of_a < of_b and n + a.right <= of_a)
        fits = bounded and (b.right == a.right + n or (b.right < 0 and n + a.right >= of_b - 1))
    columns = a.columns if of_a == of_b else None
    return Piece((a.rows[0], b.rows[1]), b.keys, columns, -1, a.right) if fits else None


def seen(found: Sequence[Piece]) -> Interval:
    """The keys that any of these pieces needs, in their rank's memory."""
    return min(p.keys[0] for p in found), max(p.keys[1] for p in found)


def deepest(found: Sequence[Interval]) -> int:
    """The largest number of these intervals that share a place."""
    ends = sorted([(a, 1) for a, b in found if a < b] + [(b, -1) for a, b in found if a < b])
    return max(itertools.accumulate(step for _, step in ends), default=0)


def _dense(q: Interval, k: Interval, band: Band, places: tuple[int, int]) -> list[Piece]:
    n, m, first = q[1] - q[0], k[1] - k[0], q[0] + band.shift - k[0]
    left, right = band.left, band.right
    row, key, last_row, last_key = 0, 0, n, m
    if right >= 0:
        row = max(0, -(first + right))
    if left >= 0:
        key = max(0, row + first - left)
        last_row = min(n, m - first + left)
    if right >= 0:
        last_key = min(m, last_row + first + right)
    if row >= last_row or key >= last_key:
        return []
    first += row - key
    n, m = last_row - row, last_key - key
    left = -1 if left < 0 or left - first >= n - 1 else left - first
    right = -1 if right < 0 or right + first >= m - 1 else right + first
    (a, b), (c, d) = (q[0] + row, q[0] + last_row), (k[0] + key, k[0] + last_key)
    of_q, of_k = places
    return [Piece((a + of_q, b + of_q), (c + of_k, d + of_k), (c, d), left, right)]


def _packed(q: Interval, k: Interval, band: Band, places: tuple[int, int]) -> list[Piece]:
    """Pieces of packed sequences. Sequences whose first query meets their first key go together in one packed call.

    At most one other sequence exists: the one inside which an interval begins.
    """
    assert band.offsets is not None
    whole: list[tuple[Interval, Interval]] = []
    found: list[Piece] = []
    for start, stop in itertools.pairwise(band.offsets):
        a, b, c, d = max(q[0], start), min(q[1], stop), max(k[0], start), min(k[1], stop)
        if a >= b or c >= d:
            continue
        if a == c:
            whole.append(((a, b), (c, d)))
        else:
            found += _dense((a, b), (c, d), band, places)
    if len(whole) == 1:
        return found + _dense(*whole[0], band, places)
    return [*found, _together(whole, band, places)] if whole else found


def _together(whole: list[tuple[Interval, Interval]], band: Band, places: tuple[int, int]) -> Piece:
    (a, _), (c, _) = whole[0]
    of_q = (0, *(rows[1] - a for rows, _ in whole))
    of_k = (0, *(keys[1] - c for _, keys in whole))
    rows, keys = ((x + place, x + n[-1] + place) for x, n, place in zip((a, c), (of_q, of_k), places, strict=True))
    return Piece(rows, keys, (c, c + of_k[-1]), band.left, band.right, (of_q, of_k))
