"""Rows of any number of heads in one tile, for sequences far shorter than a tile.

A tile has BLOCK rows, counted through all heads of the batch. Each row has a head of its own: what is a number elsewhere (a
HeadCoord, a pointer to a head) is a column [BLOCK, 1] here. Programs go through the keys (or queries) of their rows one by
one, so that a tile of scores is such a column, too. Products are plain fp32: rows of different heads never meet, not even in a
product with zero, which NaN would survive.
"""

import triton
import triton.language as tl

from .chunks import aligned, row_pointer, rows_of
from .coord import HeadCoord, Span


@triton.jit
def rows_here(pid, rows, size, heads, group, batch1, BLOCK: tl.constexpr):
    """The rows of a program: their numbers over all heads [BLOCK, 1], whether they exist, their HeadCoord, and their numbers in
    their heads [BLOCK]. Rows that do not exist repeat the last one.

    heads: query heads, or those of keys with group 1.
    """
    counted = pid * BLOCK + tl.arange(0, BLOCK)
    inside = counted < rows
    row = tl.minimum(counted, rows - 1)
    head = row // size
    b = (head // heads)[:, None]
    h = (head % heads)[:, None]
    return row[:, None], inside[:, None], HeadCoord(b, b // batch1, b % batch1, h, h // group), row % size


@triton.jit
def whole_span(sizes, mod):
    """The Span of every head."""
    start = tl.full([], 0, tl.int32)
    shift = (sizes.size_k - sizes.size_q) * mod.lower_right
    return Span(start, sizes.size_q, start, sizes.size_k, shift)


@triton.jit
def load_at(rows, width, C: tl.constexpr):
    """Rows of `width` elements at pointers [BLOCK, 1], as chunks."""
    x0 = load_part(rows, width, C.W0, C)
    if C.W1 > 0:
        return x0, load_part(rows + C.W0, width - C.W0, C.W1, C)
    else:
        return (x0,)


@triton.jit
def load_part(rows, left, WIDTH: tl.constexpr, C: tl.constexpr):
    columns = tl.arange(0, WIDTH)[None, :]
    if C.PADDED:
        return tl.load(rows + columns, mask=columns < aligned(left, C.VECTOR), other=0.0)
    else:
        return tl.load(rows + columns)


@triton.jit
def load_each(pointer, strides, at, h, row, width, C: tl.constexpr):
    """Row `row` (a column) of head h of each row of the tile; None for None."""
    if pointer is not None:
        return load_at(rows_of(pointer, strides, at, h, row, C.VECTOR), width, C)


@triton.jit
def load_next(heads, strides, row, width, C: tl.constexpr):
    """The same of rows of heads that begin at these pointers."""
    return load_at(row_pointer(heads, strides, row, C.VECTOR), width, C)


@triton.jit
def store_at(rows, inside, width, x, C: tl.constexpr):
    """Store chunks x as rows of `width` elements at pointers [BLOCK, 1], where inside."""
    store_part(rows, inside, width, x[0], C.W0, C)
    if C.W1 > 0:
        store_part(rows + C.W0, inside, width - C.W0, x[1], C.W1, C)


@triton.jit
def store_part(rows, inside, left, value, WIDTH: tl.constexpr, C: tl.constexpr):
    columns = tl.arange(0, WIDTH)[None, :]
    tl.store(rows + columns, value.to(rows.dtype.element_ty), mask=inside & (columns < aligned(left, C.VECTOR)))


@triton.jit
def products_of(x, y):
    """sum_d x y of each row, fp32 [BLOCK, 1]."""
    found = tl.sum(x[0].to(tl.float32) * y[0].to(tl.float32), 1)
    if len(x) == 2:
        found += tl.sum(x[1].to(tl.float32) * y[1].to(tl.float32), 1)
    return found[:, None]


@triton.jit
def add_multiple(factor, x, acc):
    """acc + factor x, for a factor of each row [BLOCK, 1]."""
    a0 = acc[0] + factor * x[0].to(tl.float32)
    if len(acc) == 2:
        return a0, acc[1] + factor * x[1].to(tl.float32)
    else:
        return (a0,)
