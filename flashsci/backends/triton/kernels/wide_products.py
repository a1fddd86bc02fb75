"""Products of whole heads: q k^T, P v, dS k, dS^T q and similar ones, for wide heads with scores in memory.

Maths     out = factor (a b + a2 b2), for every head of a section; one head of k or v may serve several of q
Grid      one axis over ([piece of the sum,] sequence, head, row tile, column tile)
Tiles     both operands stream; fp32 sums stay on chip
Sums      over the depth of a tile by tensor cores, which round towards zero; tiles are added outside; a sum over more than 1,024
          keys is divided into pieces where programs are few, and torch.sum adds these
Limits    bytes, for 40 rows and fewer; else the tensor cores
"""

import triton
import triton.language as tl

from .chunks import dot, load_tile, rows_of, store_tile
from .coord import HeadCoord, dense_head
from .kernel import kernel


@kernel
def product_kernel(
    a, b, a2, b2, out, strides, product,
    A: tl.constexpr, B: tl.constexpr, OUT_VECTOR: tl.constexpr, OUT_LOCAL: tl.constexpr, GROUPED: tl.constexpr, PIECES: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """a2, b2: None, or a second pair like the first. OUT_LOCAL: the result has the section's heads alone. PIECES: each piece of the
    sum has a result of its own, the outer dim of `out`."""
    pid = tl.program_id(0)
    n0 = pid % product.tiles_n * BLOCK_N
    strip = pid // product.tiles_n
    m0 = strip % product.tiles_m * BLOCK_M
    head = strip // product.tiles_m
    piece = tl.full([], 0, tl.int32)
    k0, k1 = piece, product.depth
    if PIECES:
        piece = head // product.count
        head = head % product.count
        k0 = piece * product.piece
        k1 = tl.minimum(k0 + product.piece, k1)
    at = dense_head(product.first + head, product.heads, product.batch1, 1)
    inner = section_head(head, 0)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if GROUPED:
        for member in tl.range(0, product.members):
            acc = both_terms(
                acc, a, b, a2, b2, strides, at, inner, member, m0, n0, k0, k1, product, A, B, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        acc = both_terms(
            acc, a, b, a2, b2, strides, at, inner, 0, m0, n0, k0, k1, product, A, B, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    of_out = section_head(head, piece) if OUT_LOCAL else at
    tile = rows_of(out, strides.out, of_out, of_out.h, m0, OUT_VECTOR) + n0
    store_tile(
        tile, strides.out[3], product.rows - m0, product.columns - n0, acc * product.factor, BLOCK_M, BLOCK_N, OUT_VECTOR
    )  # fmt: skip


@triton.jit
def both_terms(
    acc, a, b, a2, b2, strides, at, inner, member, m0, n0, k0, k1, product,
    A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + a b + a2 b2 for one of the heads of a that are summed. at: the result's head; inner: the same of the section."""
    acc = add_term(
        acc, a, strides.a, b, strides.b, at, inner, member, m0, n0, k0, k1, product, A, B, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if a2 is not None:
        acc = add_term(
            acc, a2, strides.a2, b2, strides.b2, at, inner, member, m0, n0, k0, k1, product, A, B, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return acc


@triton.jit
def section_head(head, piece):
    """The place of a section's head in memory that holds those of the section alone, for each piece of a sum."""
    zero = tl.full([], 0, tl.int32)
    return HeadCoord(zero, zero, zero + piece, head, head)


@triton.jit
def add_term(
    acc, a, a_strides, b, b_strides, at, inner, member, m0, n0, k0, k1, product,
    A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    for k in tl.range(k0, k1, BLOCK_K):
        k = tl.multiple_of(k, BLOCK_K)
        depth = product.depth - k
        of_a = inner if A.LOCAL else at
        h = at.h * product.members + member
        x = load_operand(
            a, a_strides, of_a, of_a.h * product.members + member, m0, k, product.rows - m0, depth, BLOCK_M, BLOCK_K, A
        )
        y = load_operand(b, b_strides, at, h // product.shared, k, n0, depth, product.columns - n0, BLOCK_K, BLOCK_N, B)
        acc += dot(x, y, None, PRECISION)
    return acc


@triton.jit
def load_operand(
    pointer, strides, at, h, row, column, rows_left, columns_left,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OF: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] of head h at (row, column) of the product's matrix."""
    if OF.TURNED:
        tile = rows_of(pointer, strides, at, h, column, OF.VECTOR) + row
        return load_tile(tile, strides[3], columns_left, rows_left, COLUMNS, ROWS, OF, True).T
    else:
        tile = rows_of(pointer, strides, at, h, row, OF.VECTOR) + column
        return load_tile(tile, strides[3], rows_left, columns_left, ROWS, COLUMNS, OF, True)
