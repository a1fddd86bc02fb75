"""Tiles of scores in memory, whole rows of one head: the helpers that the wide_* kernels between two products
share."""

import triton
import triton.language as tl

from .chunks import aligned
from .coord import Span, dense_head, shift_of


@triton.jit
def score_rows(pid, tiles, sizes, mod, BLOCK_M: tl.constexpr):
    """The place of a program that owns rows of a head's scores: first row, HeadCoord, Span, first row in tensors of the section
    alone.

    tiles: of a head, and the first head of the section, over all batch members.
    """
    count, first = tiles
    head = pid // count
    i0 = pid % count * BLOCK_M
    at = dense_head(first + head, sizes.heads, sizes.batch1, sizes.group)
    start = tl.full([], 0, tl.int32)
    shift = shift_of(sizes.size_q, sizes.size_k, mod)
    span = Span(start, sizes.size_q, start, sizes.size_k, shift)
    return i0, at, span, head.to(tl.int64) * sizes.size_q


@triton.jit
def inner_pointers(pointer, first, i, j, span, VECTOR: tl.constexpr):
    """Pointers to rows i and columns j (vectors) of a head whose rows begin at `first`, and which are inside. VECTOR:
    size_k is a multiple of it."""
    length = aligned(span.len_k, VECTOR)
    pointers = pointer + (first + i)[:, None] * length + j[None, :]
    return pointers, (i < span.len_q)[:, None] & (j < length)[None, :]


@triton.jit
def load_scores(pointer, first, i, j, span, VECTOR: tl.constexpr):
    """[M, N], zero outside; None for None."""
    if pointer is not None:
        pointers, inside = inner_pointers(pointer, first, i, j, span, VECTOR)
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_scores(pointer, first, i, j, span, x, VECTOR: tl.constexpr):
    """Store the part of x that is inside; nothing for None."""
    if pointer is not None:
        pointers, inside = inner_pointers(pointer, first, i, j, span, VECTOR)
        tl.store(pointers, x, mask=inside)
