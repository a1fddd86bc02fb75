"""Tiles of rows as pairs of chunks, and where programs of the second-order kernels work.

A head dim is held as one or two chunks of a power of two (see tile.py). Here both travel together, as a
pair (x0, x1); with one chunk, x1 stands for nothing and no code is made for it.
"""

import triton
import triton.language as tl

from .tile import (
    aligned,
    dense_place,
    dot,
    head_pointer,
    load_tile,
    packed_place,
    packed_span,
    score_dot,
    store_tile,
)


@triton.jit
def rows_of(pointer, strides, b0, b1, h, row, VECTOR: tl.constexpr):
    """Start of a row of one head: strides are those of (b0, b1, head, row)."""
    head = head_pointer(pointer, strides, b0, b1, h, VECTOR)
    return head + row.to(tl.int64) * aligned(strides[3], VECTOR)


@triton.jit
def load_chunks(
    tile, strides, rows_left, width,
    ROWS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    """[ROWS, W0] and [ROWS, W1] of the rows at `tile`; zero outside the rows and columns left."""
    x0 = load_tile(tile, strides[3], rows_left, width, ROWS, W0, VECTOR, CHECK_ROWS, not EVEN)
    if W1 > 0:
        x1 = load_tile(
            tile + W0, strides[3], rows_left, width - W0, ROWS, W1, VECTOR, CHECK_ROWS, not EVEN
        )
        return x0, x1
    else:
        return x0, x0


@triton.jit
def zero_chunks(ROWS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr):
    x0 = tl.zeros([ROWS, W0], tl.float32)
    if W1 > 0:
        return x0, tl.zeros([ROWS, W1], tl.float32)
    else:
        return x0, tl.zeros([ROWS, 16], tl.float32)


@triton.jit
def score_chunks(
    queries, keys, acc, W1: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """queries [M, W] keys [N, W]^T + acc: [M, N] or, TRANSPOSED, [N, M]. acc may be None."""
    if TRANSPOSED:
        s = score_dot(keys[0], queries[0], acc, PRECISION)
        if W1 > 0:
            s = score_dot(keys[1], queries[1], s, PRECISION)
    else:
        s = score_dot(queries[0], keys[0], acc, PRECISION)
        if W1 > 0:
            s = score_dot(queries[1], keys[1], s, PRECISION)
    return s


@triton.jit
def add_product(weights, rows, acc, W1: tl.constexpr, PRECISION: tl.constexpr):
    """acc + weights rows, for weights [M, N] and rows [N, W]."""
    weights = weights.to(rows[0].dtype)
    a0 = dot(weights, rows[0], acc[0], PRECISION)
    if W1 > 0:
        return a0, dot(weights, rows[1], acc[1], PRECISION)
    else:
        return a0, acc[1]


@triton.jit
def row_dot(x, y, W1: tl.constexpr):
    """sum_d x y of two tiles, in fp32."""
    found = tl.sum(x[0].to(tl.float32) * y[0].to(tl.float32), 1)
    if W1 > 0:
        found += tl.sum(x[1].to(tl.float32) * y[1].to(tl.float32), 1)
    return found


@triton.jit
def store_chunks(
    tile, strides, rows_left, width, x,
    ROWS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    store_tile(tile, strides[3], rows_left, width, x[0], ROWS, W0, VECTOR)
    if W1 > 0:
        store_tile(tile + W0, strides[3], rows_left, width - W0, x[1], ROWS, W1, VECTOR)


@triton.jit
def tile_place(
    pid, cu_seqlens, cu_seqlens_other, batch1, heads, heads_total, section, tiles, sequences, size, size_other,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """Where a program that owns a tile of rows works: (first row of the tile in its sequence, b, b0, b1, head),
    then start and length of its sequence and of the other side's (keys for queries, queries for keys)."""
    if PACKED:
        h = pid // tiles
        b, tile, start, length = packed_place(pid % tiles, cu_seqlens, sequences, size, BLOCK)
        start_other, length_other = packed_span(cu_seqlens_other, b, sequences, size_other)
        b0 = tl.full([], 0, tl.int32)
        b1 = b0
    else:
        tile, b, b0, b1, h = dense_place(pid, tiles, heads, batch1, heads_total, section, REVERSED)
        start = tl.full([], 0, tl.int32)
        start_other = start
        length = size
        length_other = size_other
    return tile * BLOCK, b, b0, b1, h, start, length, start_other, length_other


@triton.jit
def statistics_row(b, h, heads, start_q, size_q, PACKED: tl.constexpr):
    """Where the row statistics (lse, delta, ...) of a sequence's query head begin."""
    head = h.to(tl.int64) if PACKED else b.to(tl.int64) * heads + h
    return head * size_q + start_q
