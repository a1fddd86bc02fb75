"""The table of tiles of a mask, see tiles.py: one kernel reads the mask once, one makes lists of what it found.

Maths     kind of a tile: 0 if it hides every score, 2 if it hides none, else 1; a running count of kinds above 0; bits
Grid      classify: one axis over (block of the mask, query tile, key tile); list: (block, query or key tile)
Tiles     TILE rows of TILE bytes, each read once
Limits    memory: the bytes of the mask
"""

from typing import Any, NamedTuple

import triton.language as tl

from .kernel import kernel
from .scores import PLANE, Plane, load_plane
from .tiles import BITS, TILE, WORDS


class MaskSizes(NamedTuple):
    rows: int
    keys: int
    tiles_q: int
    tiles_k: int
    lead1: int  # the two inner ones of the three dims before rows
    lead2: int
    length: int  # of the table of one block
    words: int  # of bits at its end
    tile_rows: int  # with bits


class MaskStrides(NamedTuple):
    lead0: Any
    lead1: Any
    lead2: Any
    row: Any
    column: Any


@kernel
def classify_kernel(mask, kinds, table, strides, sizes, VECTOR: tl.constexpr):
    """kinds [block, tiles_q, tiles_k] of the tiles of a mask, one byte each, and the bits of the table.

    Rows and keys beyond the mask do not count; their bits are 0.
    """
    pid = tl.program_id(0)
    tile_k = pid % sizes.tiles_k
    tile_q = pid // sizes.tiles_k % sizes.tiles_q
    block = pid // (sizes.tiles_k * sizes.tiles_q)
    outer = block // sizes.lead2
    pointer = mask + (outer // sizes.lead1).to(tl.int64) * strides.lead0
    pointer += (outer % sizes.lead1).to(tl.int64) * strides.lead1 + (block % sizes.lead2).to(tl.int64) * strides.lead2
    i = tile_q * TILE + tl.arange(0, TILE)
    j = tile_k * TILE + tl.arange(0, TILE)
    plane = Plane(pointer, strides.row, strides.column, sizes.rows)
    attend = load_plane(plane, i, j, sizes.keys, PLANE, VECTOR, False) != 0
    inside = (i < sizes.rows)[:, None] & (j < sizes.keys)[None, :]
    visible = (attend & inside).to(tl.int32)
    hidden = (inside & (attend == 0)).to(tl.int32)
    some = tl.max(tl.max(visible, 1), 0)
    rest = tl.max(tl.max(hidden, 1), 0)
    kind = tl.where(some == 0, 0, 2 - rest)
    first = (block.to(tl.int64) * sizes.tiles_q + tile_q) * sizes.tiles_k
    tl.store(kinds + first + tile_k, kind.to(tl.int8))

    place = tl.arange(0, 32)[None, None, :]
    words = tl.sum(tl.reshape(visible, [TILE, WORDS, 32]) << place, 2)
    row = tl.arange(0, TILE)[:, None]
    table += (block + 1).to(tl.int64) * sizes.length - sizes.words
    table += (tile_q.to(tl.int64) * sizes.tiles_k + tile_k) * (WORDS * sizes.tile_rows)
    tl.store(table + row * WORDS + tl.arange(0, WORDS)[None, :], words, mask=row < sizes.tile_rows)


@kernel
def list_kernel(kinds, table, sizes, BLOCK: tl.constexpr):
    """The table of each block, from the kinds of its tiles."""
    own = sizes.tiles_q + sizes.tiles_k
    line = tl.program_id(0) % own
    block = (tl.program_id(0) // own).to(tl.int64)
    kinds += block * sizes.tiles_q * sizes.tiles_k
    table += block * sizes.length
    of_queries = line < sizes.tiles_q
    if of_queries:
        count = sizes.tiles_k
        lines = sizes.tiles_q
        first = line * sizes.tiles_k
        step = 1
    else:
        line -= sizes.tiles_q
        count = sizes.tiles_q
        lines = sizes.tiles_k
        first = line
        step = sizes.tiles_k
        table += sizes.tiles_q * (2 * sizes.tiles_k + 1)
    n = tl.arange(0, BLOCK)
    kind = tl.load(kinds + first + n * step, mask=n < count, other=0).to(tl.int32)
    listed = (kind > 0).to(tl.int32)
    before = tl.cumsum(listed, 0) - listed
    total = tl.sum(listed, 0)
    tl.store(table + line * (count + 1) + n, before, mask=n < count)
    tl.store(table + line * (count + 1) + count, total)
    table += lines * (count + 1) + line * count
    tl.store(table + before, 2 * n + kind // 2, mask=listed != 0)
    tl.store(table + n, n * 0, mask=(n >= total) & (n < count))
    if of_queries:  # every tile has a place, in order
        table += (lines - line) * count + sizes.tiles_k * (2 * sizes.tiles_q + 1)
        tl.store(table + line * count + n, line * count + n, mask=n < count)
        end = lines * count
        rest = sizes.length - sizes.words - (5 * end + lines + count)  # up to the bits, which begin at a multiple
        gap = tl.arange(0, BITS)
        tl.store(table + end + gap, gap * 0, mask=(gap < rest) & (line == 0))
