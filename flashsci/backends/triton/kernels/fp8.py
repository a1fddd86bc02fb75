"""Forward on 8-bit floats: out = softmax(scale q k^T) v and lse for q, k, v in e4m3 with scales, one query tile per program.

Maths     the forward's (forward.py), without its FOLD; both products are of e4m3. Scores are products times the scales of
          their row and key tile. P is 256 e^(s - m), rounded to nearest: e4m3 holds it to 1 part in 16 down to 2^-14 of the
          row's maximum, and below that in steps of 2^-17 of it. The row sum is that of P before rounding, without the 256
Sums      tensor cores keep about 14 bits of a sum of 8-bit products. No sum is longer than a key tile (P v) or 128 columns
          (q k^T): the sums are added in fp32, P v times the scale of its values
Grid      as forward
Tiles     query tile and fp32 accumulator stay on chip, key and value tiles stream through the pipeline. A key tile is
          within one block of scales; a query tile may have several
Transpose wgmma takes 8-bit operands with their sum innermost, but v has it outermost: Triton turns each tile of v on its
          way through shared memory
Limits    by count of instructions the exponentials, and the turning of v. On an H200 it takes two to six times as long as the
          kernel for Hopper (docs/guide/fp8.md)
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .chunks import (
    dot,
    load_chunks,
    load_rows,
    row_pointer,
    rows_of,
    scale_chunks,
    store_chunks,
    zero_chunks,
)
from .coord import flat_row, key_range, query_tile
from .kernel import kernel
from .scores import LN2, LOG2E, addends, scores

LARGEST_P = tl.constexpr(8.0)  # log2 of it; the largest e4m3 is 448


class FP8Strides(NamedTuple):
    q: tuple[int, ...]  # (b0, b1, head, row)
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]


class ScaleStrides(NamedTuple):
    """Strides of the scales of q, k or v."""

    b0: int  # for a packed tensor without blocks: sequence
    b1: int
    head: int
    block: int
    rows: int  # rows of a block
    slots: int  # 1: blocks of a packed tensor (fp8_ops.rows_per_scale)


class FP8Sizes(NamedTuple):
    """The fields of Sizes that apply here, and the strides of the scales."""

    batch1: int
    heads: int
    heads_k: int
    group: int
    sequences: int
    size_q: int
    size_k: int
    head_dim: int
    head_dim_v: int
    q_scale: ScaleStrides
    k_scale: ScaleStrides
    v_scale: ScaleStrides


class FP8Mod(NamedTuple):
    """The steps on a product q k^T: the fields of ScoreMod that apply here."""

    scale: Any
    softcap: Any
    left: Any
    right: Any
    lower_right: Any


@kernel
def fp8_kernel(
    inputs, q_scale, k_scale, v_scale, out, lse, strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    i = i0 + tl.arange(0, BLOCK_M)
    rows_left = span.len_q - i0
    q_rows = load_rows(inputs.q, strides.q, at, at.h, span.start_q + i0, rows_left, sizes.head_dim, BLOCK_M, D)
    factor = tl.full([BLOCK_M], 0.0, tl.float32) + mod.scale
    if q_scale is not None:
        first = first_scale(q_scale, sizes.q_scale, at, at.h, span.start_q, sizes, F.VARLEN)
        at_rows = (i // sizes.q_scale.rows).to(tl.int64) * sizes.q_scale.block
        factor = factor * tl.load(first + at_rows, mask=i < span.len_q, other=0.0)
    row_max, row_sum, acc = attend(
        q_rows, factor, i0, at, span, inputs, k_scale, v_scale, strides, sizes, mod, F, D, V, BLOCK_M, BLOCK_N
    )

    # A row without keys has max -inf and sum 0: lse -inf, out 0.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    if lse is not None:
        lse_rows = lse + flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN)
        value = row_max + (tl.log2(row_sum) - LARGEST_P) * LN2
        tl.store(lse_rows + i, value, mask=i < span.len_q)
    out_tile = rows_of(out, strides.out, at, at.h, span.start_q + i0, R.VECTOR)
    rows = scale_chunks(acc, (1.0 / row_sum)[:, None])
    store_chunks(out_tile, strides.out, rows_left, sizes.head_dim_v, rows, BLOCK_M, R)


@triton.jit
def attend(
    q_rows, factor, i0, at, span, inputs, k_scale, v_scale, strides, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum (of 256 P) and accumulator of one query tile over all its keys. factor: that of the
    products, by rows."""
    i = i0 + tl.arange(0, BLOCK_M)
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_head = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    k_first = first_scale(k_scale, sizes.k_scale, at, at.hk, span.start_k, sizes, F.VARLEN)
    v_first = first_scale(v_scale, sizes.v_scale, at, at.hk, span.start_k, sizes, F.VARLEN)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_chunks(BLOCK_M, V)

    edges = key_range(i0, span, mod, BLOCK_M, BLOCK_N, F.WINDOW)
    for part in tl.static_range(0 if F.WINDOW == 2 else 1, 3):
        for start in tl.range(edges[part], edges[part + 1], BLOCK_N):
            start = tl.multiple_of(start, BLOCK_N)
            j = start + tl.arange(0, BLOCK_N)
            keys_left = span.len_k - start
            k_tile = row_pointer(k_head, strides.k, start, D.VECTOR)
            v_tile = row_pointer(v_head, strides.v, start, V.VECTOR)
            k_rows = load_chunks(k_tile, strides.k, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
            of_tile = (factor * scale_of(k_first, sizes.k_scale, start))[:, None]
            s, _slope = scores(
                score_products(q_rows, k_rows), i, j, addends(None, None, None), span,
                FP8Mod(of_tile, mod.softcap, mod.left, mod.right, mod.lower_right), F, False, part != 1,
                0 if part == 1 else F.WINDOW, False,
            )  # fmt: skip

            new_max = tl.maximum(row_max, tl.max(s, 1))
            # A row that has seen no key yet has max -inf: subtract 0 instead, e^(-inf - 0) = 0.
            reference = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2((s - reference[:, None]) * LOG2E + LARGEST_P)
            decay = tl.exp2((row_max - reference) * LOG2E)
            row_sum = row_sum * decay + tl.sum(p, 1)
            row_max = new_max
            v_rows = load_chunks(v_tile, strides.v, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
            acc = add_tile(p, v_rows, scale_of(v_first, sizes.v_scale, start), scale_chunks(acc, decay[:, None]))
    return row_max, row_sum, acc


@triton.jit
def score_products(q_rows, k_rows):
    """q k^T [BLOCK_M, BLOCK_N] in chunks of the head dim: none is wider than 128, and their sums are added in
    fp32."""
    s = dot(q_rows[0], k_rows[0].T, None, "ieee")
    if len(q_rows) == 2:
        s += dot(q_rows[1], k_rows[1].T, None, "ieee")
    return s


@triton.jit
def add_tile(p, v_rows, scale, acc):
    """acc + p v scale, for p [BLOCK_M, BLOCK_N] rounded to v's dtype."""
    p = p.to(v_rows[0].dtype)
    a0 = acc[0] + dot(p, v_rows[0], None, "ieee") * scale
    if len(v_rows) == 2:
        return a0, acc[1] + dot(p, v_rows[1], None, "ieee") * scale
    else:
        return (a0,)


@triton.jit
def first_scale(scale, strides, at, h, start, sizes, VARLEN: tl.constexpr):
    """The start of the scales of a head's sequence that begins at row `start`; None for None."""
    if scale is not None:
        first = scale + h.to(tl.int64) * strides.head
        if VARLEN:
            n = tl.minimum(tl.maximum(at.b, 0), sizes.sequences - 1).to(tl.int64)
            return first + n * strides.b0 + (start // strides.rows + n) * strides.slots * strides.block
        else:
            return first + at.b0.to(tl.int64) * strides.b0 + at.b1.to(tl.int64) * strides.b1


@triton.jit
def scale_of(first, strides, row):
    """The scale of a row and of the rows that share its block; 1 for None."""
    if first is not None:
        return tl.load(first + (row // strides.rows).to(tl.int64) * strides.block)
    else:
        return 1.0
