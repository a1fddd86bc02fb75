"""The scores that residual attention keeps, their gradients, and its bias: planes of [len_q, len_k] numbers.

Rows of any length begin at multiples of VECTOR numbers (those of scores at multiples of 16 bytes). Loads and stores
take VECTOR at a time, also where a row ends within them. Then the numbers beyond its end, in the same 16 bytes, are
read too; the caller must hide them.
"""

import triton
import triton.language as tl

from .chunks import aligned
from .coord import flat_row
from .scores import PLANE, Plane


@triton.jit
def plane_of(pointer, at, span, sizes, VECTOR: tl.constexpr):
    """The plane of a head; all planes follow each other, in rows as short as possible; None for None."""
    if pointer is not None:
        first = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, False)
        stride = (tl.cdiv(span.len_k, VECTOR) * VECTOR).to(tl.int64)
        return Plane(pointer + aligned(first * stride, VECTOR), stride, 1, span.len_q)


@triton.jit
def piece_pointers(plane, i, j, len_k, VECTOR: tl.constexpr):
    """Pointers to rows i and columns j (vectors), and which are in a piece that has numbers of a row."""
    pointers = plane.pointer + i.to(tl.int64)[:, None] * aligned(plane.row_stride, VECTOR) + j[None, :]
    inside = (i < plane.rows)[:, None] & (j < tl.cdiv(len_k, VECTOR) * VECTOR)[None, :]
    return pointers, inside


@triton.jit
def load_pieces(plane, i, j, len_k, VECTOR: tl.constexpr):
    """[M, N] in fp32; any values beyond the ends of rows, zero beyond the last row."""
    pointers, inside = piece_pointers(plane, i, j, len_k, VECTOR)
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_pieces(plane, i, j, len_k, x, VECTOR: tl.constexpr):
    """Store x [M, N], also beyond the ends of rows, up to VECTOR."""
    pointers, inside = piece_pointers(plane, i, j, len_k, VECTOR)
    tl.store(pointers, x.to(plane.pointer.dtype.element_ty), mask=inside)


@triton.jit
def bias_tile(plane, i, j, len_k, KIND: tl.constexpr, VECTOR: tl.constexpr):
    """The bias that `scores` adds at rows i and columns j (None for None).

    It is a tile, read in pieces, or the plane itself if its rows are of another kind.
    """
    if plane is not None:
        if VECTOR > 0 and KIND == PLANE:
            return load_pieces(plane, i, j, len_k, VECTOR)
        else:
            return plane
