"""Tables of tiles: the tiles of a mask that hold a visible score, as kernels go through them.

A table is a row of int32 for each block of a mask. Both directions are stored: for each query tile its key tiles, and
for each key tile its query tiles. Each has two parts: `before` counts the listed tiles before each tile, and the list
holds 2 t for the listed tile t, and 2 t + 1 if all of its scores are visible.

    before [rows, keys + 1], list [rows, keys], before [keys, rows + 1], list [keys, rows]

Tiles are TILE x TILE; kernels with smaller tiles go through a listed one in steps. A mask that is equal for all
queries (KEY) has one row, and a key tile that it lists is seen by every query tile.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .chunks import head_pointer
from .scores import KEY, SeenPlane

TILE = tl.constexpr(64)


class Lists(NamedTuple):
    """The list of one tile of queries or keys."""

    before: Any
    listed: Any


@triton.jit
def keys_of(i0, at, span, inputs, strides, TILES: tl.constexpr):
    """The list of key tiles of the query tile at i0; None without a table."""
    if TILES:
        head = head_pointer(inputs.mask_tiles, strides.tiles, at, at.h, 1)
        rows = 1 if TILES == KEY else tl.cdiv(span.len_q, TILE)
        row = (i0 * 0 if TILES == KEY else i0 // TILE).to(tl.int64)
        keys = tl.cdiv(span.len_k, TILE).to(tl.int64)
        return Lists(head + row * (keys + 1), head + rows * (keys + 1) + row * keys)


@triton.jit
def queries_of(j0, at, span, inputs, strides, TILES: tl.constexpr):
    """The list of query tiles of the key tile at j0; None without a table."""
    if TILES:
        head = head_pointer(inputs.mask_tiles, strides.tiles, at, at.h, 1)
        keys = tl.cdiv(span.len_k, TILE).to(tl.int64)
        rows = keys * 0 + 1 if TILES == KEY else tl.cdiv(span.len_q, TILE).to(tl.int64)
        head += rows * (2 * keys + 1)
        row = j0 // TILE
        return Lists(head + row * (rows + 1), head + keys * (rows + 1) + row * rows)


@triton.jit
def key_steps(lists, edges, BLOCK_N: tl.constexpr):
    """The edges that `key_range` found; with a list, the same in steps of it, all in the last part."""
    if lists is not None:
        first, last = steps_between(lists, edges[0], edges[3], BLOCK_N)
        return first, first, first, last
    else:
        return edges


@triton.jit
def query_steps(lists, edges, BLOCK_M: tl.constexpr, TILES: tl.constexpr):
    """The edges that `query_range` found, in the same form."""
    if lists is None:
        return edges
    elif TILES == KEY:
        high = tl.maximum(edges[3], 0)
        first = tl.minimum(edges[0], high) // BLOCK_M
        last = tl.cdiv(high, BLOCK_M) * tl.load(lists.before + 1)
        return first, first, first, last
    else:
        first, last = steps_between(lists, edges[0], edges[3], BLOCK_M)
        return first, first, first, last


@triton.jit
def steps_between(lists, low, high, BLOCK: tl.constexpr):
    """The first step, and the end of the steps, of the listed tiles that hold one of [low, high)."""
    high = tl.maximum(high, 0)
    low = tl.minimum(low, high)
    first = tl.load(lists.before + low // TILE)
    last = tl.load(lists.before + tl.cdiv(high, TILE))
    return first * (TILE // BLOCK), last * (TILE // BLOCK)


@triton.jit
def step_of(lists, step, mask, BLOCK: tl.constexpr, EVERY: tl.constexpr):
    """The start of the tile of a step, and the mask as its scores read it. EVERY: the steps are all tiles, in order."""
    STEPS: tl.constexpr = TILE // BLOCK
    step += tl.zeros([], tl.int32)  # a tensor: the interpreter counts in Python
    if EVERY:
        entry = tl.load(lists.listed)
        start = step * BLOCK
    else:
        entry = tl.load(lists.listed + step // STEPS)
        start = entry // 2 * TILE + step % STEPS * BLOCK
    return start, seen_whole(mask, entry % 2 == 1)


@triton.jit
def seen_whole(mask, whole):
    """The mask of a tile that is not read where the tile is `whole`."""
    return SeenPlane(mask.pointer, mask.row_stride, mask.column_stride, mask.rows, whole)


@triton.jit
def is_shared(strides, shared):
    """Whether the members (b0, b1, head) that share a bias have one block of the mask."""
    along_b0 = (strides.tiles[0] == 0) | (shared[0] == 1)
    along_b1 = (strides.tiles[1] == 0) | (shared[1] == 1)
    return along_b0 & along_b1 & ((strides.tiles[2] == 0) | (shared[2] == 1))


@triton.jit
def tile_of(i0, j0, at, span, inputs, strides, TILES: tl.constexpr):
    """Whether the tile at (i0, j0) holds a visible score, and whether all of its scores are visible."""
    lists = keys_of(i0, at, span, inputs, strides, TILES)
    tile = j0 // TILE
    before = tl.load(lists.before + tile)
    some = tl.load(lists.before + tile + 1) > before
    entry = tl.load(lists.listed + before, mask=some, other=0)
    return some, entry % 2 == 1
