"""The place where a program works: its tile, head and sequence, and the range of tiles that it goes through.

A query tile has rows i, a key tile has columns j, both counted within their own sequence. A sequence starts at row
`start_q` of the tensor of a varlen batch, and at row 0 of that of a dense batch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class HeadCoord(NamedTuple):
    b: Any  # sequence: over both batch dims, or in the varlen batch
    b0: Any  # batch dims; 0 in a varlen batch
    b1: Any
    h: Any  # query head
    hk: Any  # its key head


class Span(NamedTuple):
    """Rows of a sequence's queries and keys."""

    start_q: Any
    len_q: Any
    start_k: Any
    len_k: Any
    shift: Any  # the diagonal of window and causal is at j - i = shift


@triton.jit
def query_tile(
    pid, inputs, sizes, schedule, mod,
    BLOCK_M: tl.constexpr, VARLEN: tl.constexpr, LONGEST_FIRST: tl.constexpr,
):  # fmt: skip
    """The place of a program that owns a query tile: first row, HeadCoord, Span."""
    if VARLEN:
        h = pid // schedule.tiles
        b, tile, start_q, len_q = varlen_tile(
            pid % schedule.tiles, inputs.cu_seqlens_q, sizes.sequences, sizes.size_q, BLOCK_M
        )
        start_k, len_k = varlen_rows(inputs.cu_seqlens_k, b, sizes.sequences, sizes.size_k)
        b0 = tl.full([], 0, tl.int32)
        b1 = b0
    else:
        tile, b, b0, b1, h = dense_tile(pid, sizes.heads, sizes.batch1, schedule, LONGEST_FIRST)
        start_q = tl.full([], 0, tl.int32)
        start_k = start_q
        len_q = sizes.size_q
        len_k = sizes.size_k
    at = HeadCoord(b, b0, b1, h, h // sizes.group)
    return tile * BLOCK_M, at, Span(start_q, len_q, start_k, len_k, shift_of(len_q, len_k, mod))


@triton.jit
def key_tile(pid, inputs, sizes, schedule, mod, BLOCK_N: tl.constexpr, VARLEN: tl.constexpr):
    """The place of a program that owns a key tile: first column, HeadCoord of the first query head, Span."""
    if VARLEN:
        hk = pid // schedule.tiles
        b, tile, start_k, len_k = varlen_tile(
            pid % schedule.tiles, inputs.cu_seqlens_k, sizes.sequences, sizes.size_k, BLOCK_N
        )
        start_q, len_q = varlen_rows(inputs.cu_seqlens_q, b, sizes.sequences, sizes.size_q)
        b0 = tl.full([], 0, tl.int32)
        b1 = b0
    else:
        tile, b, b0, b1, hk = dense_tile(pid, sizes.heads_k, sizes.batch1, schedule, False)
        start_q = tl.full([], 0, tl.int32)
        start_k = start_q
        len_q = sizes.size_q
        len_k = sizes.size_k
    at = HeadCoord(b, b0, b1, hk * sizes.group, hk)
    return tile * BLOCK_N, at, Span(start_q, len_q, start_k, len_k, shift_of(len_q, len_k, mod))


@triton.jit
def whole_sequence(pid, inputs, sizes, mod, VARLEN: tl.constexpr):
    """The place of a program that owns a sequence of a key head: HeadCoord of the first query head, Span.

    A varlen batch has two more sequences: -1 and `sequences` are the rows before and after all others.
    """
    hk = pid % sizes.heads_k
    if VARLEN:
        b = pid // sizes.heads_k - 1
        start_q, len_q = varlen_rows_or_rest(inputs.cu_seqlens_q, b, sizes.sequences, sizes.size_q)
        start_k, len_k = varlen_rows_or_rest(inputs.cu_seqlens_k, b, sizes.sequences, sizes.size_k)
        b0 = tl.full([], 0, tl.int32)
        b1 = b0
    else:
        b = pid // sizes.heads_k
        b0 = b // sizes.batch1
        b1 = b % sizes.batch1
        start_q = tl.full([], 0, tl.int32)
        start_k = start_q
        len_q = sizes.size_q
        len_k = sizes.size_k
    at = HeadCoord(b, b0, b1, hk * sizes.group, hk)
    return at, Span(start_q, len_q, start_k, len_k, shift_of(len_q, len_k, mod))


@triton.jit
def dense_head(head, heads, batch1, group):
    """HeadCoord of a query head of a dense batch, counted over the whole batch. group: query heads of a key head."""
    b = head // heads
    h = head % heads
    return HeadCoord(b, b // batch1, b % batch1, h, h // group)


@triton.jit
def member(at, m):
    """The m-th query head from `at` on, of the same key head."""
    return HeadCoord(at.b, at.b0, at.b1, at.h + m, at.hk)


@triton.jit
def shift_of(len_q, len_k, mod):
    return (len_k - len_q) * mod.lower_right


@triton.jit
def flat_row(b, h, heads, start, size, VARLEN: tl.constexpr):
    """The start of a sequence of a head in a tensor with one number per row (lse, delta, sums, ...)."""
    head = h.to(tl.int64) if VARLEN else b.to(tl.int64) * heads + h
    return head * size + start


@triton.jit
def dense_tile(pid, heads, batch1, schedule, REVERSED: tl.constexpr):
    """Tile, sequence, batch dims and head of a program.

    Heads are taken in sections whose keys and values fit in the L2 cache together. Within a section all heads do
    their first tile, then their second, ...: with a causal mask the longest come first.
    """
    in_section = schedule.section * schedule.tiles
    first = pid // in_section * schedule.section
    rest = pid % in_section
    width = tl.minimum(schedule.section, schedule.heads_total - first)
    tile = rest // width
    if REVERSED:
        tile = schedule.tiles - 1 - tile
    bh = first + rest % width
    b = bh // heads
    return tile, b, b // batch1, b % batch1, bh % heads


@triton.jit
def sequence_edge(cu_seqlens, s, total):
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + s), 0), total)


@triton.jit
def varlen_tile(slot, cu_seqlens, sequences, total, BLOCK: tl.constexpr):
    """Sequence, tile in it, its first row and its length, for one of `total // BLOCK + sequences + 2` slots.

    The edges alone decide: sequence n owns the slots from cu[n] // BLOCK + n on, always enough for its tiles. Rows
    before the first and after the last sequence count as sequences -1 and `sequences`.
    """
    low = 0  # the largest s in [0, sequences + 1] with edge(s) // BLOCK + s <= slot, edge(s) = cu[s - 1]
    high = sequences + 1
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_edge(cu_seqlens, middle - 1, total) // BLOCK + middle <= slot:
            low = middle
        else:
            high = middle - 1
    start = tl.full([], 0, tl.int32)
    if low > 0:
        start = sequence_edge(cu_seqlens, low - 1, total)
    end = total
    if low <= sequences:
        end = sequence_edge(cu_seqlens, low, total)
    tile = slot - (start // BLOCK + low)
    return low - 1, tile, start, tl.maximum(end - start, 0)


@triton.jit
def varlen_rows(cu_seqlens, n, sequences, total):
    """First row and length of sequence n; no rows for the two extra sequences (see varlen_tile)."""
    start = tl.full([], 0, tl.int32)
    length = tl.full([], 0, tl.int32)
    if (n >= 0) & (n < sequences):
        start = sequence_edge(cu_seqlens, n, total)
        length = tl.maximum(sequence_edge(cu_seqlens, n + 1, total) - start, 0)
    return start, length


@triton.jit
def varlen_rows_or_rest(cu_seqlens, n, sequences, total):
    """First row and length of sequence n; -1 and `sequences` are the rows before and after all others."""
    start = tl.full([], 0, tl.int32)
    end = total
    if n >= 0:
        start = sequence_edge(cu_seqlens, n, total)
    if n < sequences:
        end = sequence_edge(cu_seqlens, n + 1, total)
    return start, tl.maximum(end - start, 0)


@triton.jit
def split_range(low, high, full_low, full_high, BLOCK: tl.constexpr):
    """Cuts [low, high) into tiles: masked [a, b), unmasked [b, c), masked [c, high)."""
    a = tl.maximum(low, 0) // BLOCK * BLOCK
    last = tl.maximum(tl.cdiv(high, BLOCK) * BLOCK, a)
    b = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(full_low, 0), BLOCK) * BLOCK, a), last)
    c = tl.minimum(tl.maximum(tl.maximum(full_high, 0) // BLOCK * BLOCK, b), last)
    return a, b, c, high


@triton.jit
def key_range(i0, span, mod, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Key tiles that the query tile at i0 can see, as four edges (a, b, c, d).

    The left side of the window cuts the tiles of part 0, [a, b); those of part 1, [b, c), are wholly visible; the
    right side or the end cuts those of part 2, [c, d).
    """
    i1 = tl.minimum(i0 + BLOCK_M, span.len_q)
    low = 0
    high = span.len_k
    full_low = 0
    full_high = span.len_k
    if WINDOW >= 1:
        high = tl.minimum(span.len_k, i1 + span.shift + mod.right)
        full_high = tl.minimum(span.len_k, i0 + span.shift + mod.right + 1)
    if WINDOW == 2:
        low = i0 + span.shift - mod.left
        full_low = i1 - 1 + span.shift - mod.left
    return split_range(low, high, full_low, full_high, BLOCK_N)


@triton.jit
def query_range(j0, span, mod, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr):
    """Query tiles that see the key tile at j0, in the same form. Rows are checked in every part: so the last rows
    need no part of their own."""
    j1 = tl.minimum(j0 + BLOCK_N, span.len_k)
    low = 0
    high = span.len_q
    full_low = 0
    full_high = span.len_q
    if WINDOW >= 1:
        low = j0 - span.shift - mod.right
        full_low = j1 - 1 - span.shift - mod.right
    if WINDOW == 2:
        high = tl.minimum(span.len_q, j1 - span.shift + mod.left)
        full_high = tl.minimum(span.len_q, j0 - span.shift + mod.left + 1)
    return split_range(low, high, full_low, full_high, BLOCK_M)
