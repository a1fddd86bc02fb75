"""Tables of tiles: the tiles of a mask that hold a visible score, as kernels go through them.

A table is a row of int32 for each block of a mask. Both directions are stored: for each query tile its key tiles, and
for each key tile its query tiles. Each has two parts: `before` counts the listed tiles before each tile, and the list
holds 2 t for the listed tile t, and 2 t + 1 if all of its scores are visible.

    before [rows, keys + 1], list [rows, keys], before [keys, rows + 1], list [keys, rows], place [rows, keys]
    bits [places, TILE, WORDS], which begin at a multiple of BITS numbers

Behind the lists are bits, TILE for each row of a tile, in WORDS words of 32, and for each tile its place among them. Kernels
read those of tiles that hide some of their scores, and never the mask itself. A table that kernels made has a place for
every tile; one of a `BlockMask` only for the tiles that are read. Tiles are TILE x TILE; kernels with smaller tiles go
through a listed one in steps, and read the words of their own columns. A mask that is equal for all queries (KEY) has one row of tiles with one row of bits each,
which follow the places at once, and a key tile that it lists is seen by every query tile.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .chunks import head_pointer
from .scores import KEY, WORDS, Addends, Bits

TILE = tl.constexpr(128)
BITS = tl.constexpr(512)  # TILE WORDS


class Lists(NamedTuple):
    """The list of one tile of queries or keys, and the bits of its tiles."""

    before: Any
    listed: Any
    count: Any  # its most tiles
    places: Any  # of its tiles
    apart: Any  # from the place of one of its tiles to that of the next
    bits: Any
    most: Any  # places that have bits


@triton.jit
def keys_of(i0, at, span, inputs, strides, TILES: tl.constexpr):
    """The list of key tiles of the query tile at i0; None without a table."""
    if TILES:
        head = head_pointer(inputs.mask_tiles, strides.tiles, at, at.h, 1)
        keys = tl.cdiv(span.len_k, TILE).to(tl.int64)
        rows = keys * 0 + 1 if TILES == KEY else tl.cdiv(span.len_q, TILE).to(tl.int64)
        row = (i0 * 0 if TILES == KEY else i0 // TILE).to(tl.int64)
        places = head + 4 * rows * keys + rows + keys + row * keys
        before = head + row * (keys + 1)
        listed = head + rows * (keys + 1) + row * keys
        bits = head + start_of_bits(rows, keys, TILES)
        return Lists(before, listed, keys.to(tl.int32), places, 1, bits, strides.tiles[3])


@triton.jit
def queries_of(j0, at, span, inputs, strides, TILES: tl.constexpr):
    """The list of query tiles of the key tile at j0; None without a table."""
    if TILES:
        head = head_pointer(inputs.mask_tiles, strides.tiles, at, at.h, 1)
        keys = tl.cdiv(span.len_k, TILE).to(tl.int64)
        rows = keys * 0 + 1 if TILES == KEY else tl.cdiv(span.len_q, TILE).to(tl.int64)
        row = (j0 // TILE).to(tl.int64)
        places = head + 4 * rows * keys + rows + keys + row
        bits = head + start_of_bits(rows, keys, TILES)
        head += rows * (2 * keys + 1)
        before = head + row * (rows + 1)
        listed = head + keys * (rows + 1) + row * rows
        return Lists(before, listed, rows.to(tl.int32), places, keys, bits, strides.tiles[3])


@triton.jit
def start_of_bits(rows, keys, TILES: tl.constexpr):
    """The numbers of a table before its bits."""
    lists = 5 * rows * keys + rows + keys
    if TILES == KEY:
        return lists
    else:
        return tl.cdiv(lists, BITS) * BITS


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
        last = tl.where(tl.load(lists.before + 1) > 0, tl.cdiv(high, BLOCK_M), 0)
        return first, first, first, last
    else:
        first, last = steps_between(lists, edges[0], edges[3], BLOCK_M)
        return first, first, first, last


@triton.jit
def steps_between(lists, low, high, BLOCK: tl.constexpr):
    """The first step, and the end of the steps, of the listed tiles that hold one of [low, high)."""
    high = tl.maximum(high, 0)
    low = tl.minimum(low, high)
    first = tl.minimum(tl.maximum(tl.load(lists.before + low // TILE), 0), lists.count)
    last = tl.minimum(tl.maximum(tl.load(lists.before + tl.cdiv(high, TILE)), 0), lists.count)
    return first * (TILE // BLOCK), last * (TILE // BLOCK)


@triton.jit
def key_step(added, lists, edges, step, i0, BLOCK_N: tl.constexpr, TILES: tl.constexpr):
    """The start of the key tile of a step, and the Addends there: with a list, the bits of the rows from i0 on are their
    mask. edges: as `key_range` found them."""
    step += tl.zeros([], tl.int32)  # a tensor: the interpreter counts in Python
    if lists is None:
        return step, added
    else:
        entry = entry_of(lists, step // (TILE // BLOCK_N))
        start = entry // 2 * TILE + step % (TILE // BLOCK_N) * BLOCK_N
        cut = (start < edges[1]) | (start >= edges[2])
        bits = bits_of(lists, entry // 2, i0, start, cut, entry % 2 == 0, -1, TILES)
        return start, Addends(added.bias, (bits,), added.alibi)


@triton.jit
def query_step(added, lists, edges, step, j0, BLOCK_M: tl.constexpr, TILES: tl.constexpr):
    """The start of the query tile of a step, and the Addends there: with a list, the bits of its rows from column j0 on are
    their mask. edges: as `query_range` found them."""
    step += tl.zeros([], tl.int32)
    if lists is None:
        return step, added
    else:
        if TILES == KEY:  # the steps are all query tiles, in order
            start = step * BLOCK_M
            tile = step * 0
            entry = entry_of(lists, 0)
        else:
            entry = entry_of(lists, step // (TILE // BLOCK_M))
            tile = entry // 2
            start = tile * TILE + step % (TILE // BLOCK_M) * BLOCK_M
        cut = (start < edges[1]) | (start >= edges[2])
        bits = bits_of(lists, tile, start, j0, cut, entry % 2 == 0, -1, TILES)
        return start, Addends(added.bias, (bits,), added.alibi)


@triton.jit
def entry_of(lists, place):
    """An entry of a list: it names a tile of the mask, for any numbers in the table."""
    return tl.minimum(tl.maximum(tl.load(lists.listed + place), 0), 2 * lists.count - 1)


@triton.jit
def bits_of(lists, tile, i0, j0, cut, partial, rest, TILES: tl.constexpr):
    """The bits of a tile from row i0 and column j0 on, which are read if it is `partial`. cut: whether something else
    hides scores; rest: see Bits."""
    place = tl.load(lists.places + tile * lists.apart, mask=partial, other=0)
    place = tl.minimum(tl.maximum(place, 0), lists.most - 1).to(tl.int64)
    words = lists.bits + place * (WORDS if TILES == KEY else BITS) + j0 % TILE // 32
    if TILES == KEY:
        return Bits(cut | partial, words, 0, partial, rest)
    else:
        return Bits(cut | partial, words + i0 % TILE * WORDS, WORDS, partial, rest)


@triton.jit
def is_shared(strides, shared):
    """Whether the members (b0, b1, head) that share a bias have one block of the mask."""
    along_b0 = (strides.tiles[0] == 0) | (shared[0] == 1)
    along_b1 = (strides.tiles[1] == 0) | (shared[1] == 1)
    return along_b0 & along_b1 & ((strides.tiles[2] == 0) | (shared[2] == 1))


@triton.jit
def tile_at(i0, j0, at, span, inputs, strides, TILES: tl.constexpr, WINDOW: tl.constexpr):
    """Whether the tile at (i0, j0) holds a visible score, and the bits of its rows from i0 on."""
    lists = keys_of(i0, at, span, inputs, strides, TILES)
    j0 += tl.zeros([], tl.int32)  # a tensor: the interpreter counts in Python
    tile = j0 // TILE
    before = tl.load(lists.before + tile)
    some = tl.load(lists.before + tile + 1) > before
    entry = entry_of(lists, tl.minimum(tl.maximum(before, 0), lists.count - 1))
    cut = (some == 0) | (WINDOW >= 1)
    return some, bits_of(lists, tile, i0, j0, cut, some & (entry % 2 == 0), tl.where(some, -1, 0), TILES)
