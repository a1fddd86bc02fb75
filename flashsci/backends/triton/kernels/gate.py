"""The gate of pairs: a factor of P after the softmax, which multiplies dP, too; and its tangent."""

import triton
import triton.language as tl

from .scores import PLANE, dense_plane, load_plane, store_plane


@triton.jit
def gate_of(pointer, strides, at, span, VECTOR: tl.constexpr):
    """The plane of the gate for the head `at`; None for None. strides: (b0, b1, head, row, column)."""
    if pointer is not None:
        return dense_plane(pointer, strides, at, span, VECTOR)


@triton.jit
def gated(x, gate, i, j, span, VECTOR: tl.constexpr, TRANSPOSED: tl.constexpr):
    """x times the gate at rows i and columns j (vectors); x for None. Beyond the tensor the gate is zero."""
    return times(x, gate_tile(gate, i, j, span, VECTOR, TRANSPOSED))


@triton.jit
def gate_tile(gate, i, j, span, VECTOR: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The gate, or its tangent, at rows i and columns j (vectors), zero beyond the tensor; None for None."""
    if gate is not None:
        return load_plane(gate, i, j, span.len_k, PLANE, VECTOR, TRANSPOSED).to(tl.float32)


@triton.jit
def times(x, factor):
    """x times a tile of the gate; x for None."""
    if factor is None:
        return x
    else:
        return x * factor


@triton.jit
def times_tangent(x, tx, factor, tfactor):
    """The tangent of x times a tile of the gate, whose tangent is tfactor (None: zero); tx without a gate."""
    if tfactor is None:
        return times(tx, factor)
    else:
        return tx * factor + x * tfactor


@triton.jit
def pair_step(n, own_i, own_j, shared, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Step n of a sum for each pair: the member that shares the tile, and where its scores begin.

    Sums without ROWS, or without COLUMNS, go along the tiles of queries, or of keys, member after member.
    """
    if ROWS and COLUMNS:
        return n, own_i, own_j
    else:
        members = shared[0] * shared[1] * shared[2]
        along = n // members
        return n % members, own_i if ROWS else along * M, own_j if COLUMNS else along * N


@triton.jit
def store_sums(
    plane, i0, j0, span, total, M: tl.constexpr, N: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Store the sums [M, N] of a program, added up along rows without ROWS, and along columns without COLUMNS."""
    i = i0 + tl.arange(0, M)
    j = j0 + tl.arange(0, N)
    kind = plane.pointer.dtype.element_ty
    if ROWS and COLUMNS:
        store_plane(plane, i, j, span.len_k, total, VECTOR)
    elif ROWS:
        tl.store(plane.pointer + i.to(tl.int64) * plane.row_stride, tl.sum(total, 1).to(kind), mask=i < span.len_q)
    else:
        tl.store(plane.pointer + j, tl.sum(total, 0).to(kind), mask=j < span.len_k)
