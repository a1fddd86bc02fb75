"""Backward by key tiles: dk and dv; every sum has one owner, no atomics.

Maths     as in backward_queries.py; dK = scale dS'^T Q; dV = (R P)^T dO
Grid      one axis over (section of key heads, tile, key head); a program goes through its query heads in order
Tiles     k, v and the fp32 dk, dv stay on chip, q and dO stream: 4 products a tile. The scores are computed transposed,
          [keys, queries], so that P^T and dS^T are left operands straight from registers. With a bias or mask for each
          pair they are not transposed: that tile is read in its memory layout, and P and dS turn in shared memory
Limits    registers: two accumulators and two score tiles at once
"""

import triton
import triton.language as tl

from .chunks import (
    add_product,
    load_chunks,
    load_rows,
    row_pointer,
    rows_of,
    scale_chunks,
    score_chunks,
    store_chunks,
    zero_chunks,
)
from .coord import flat_row, key_tile, member, query_range
from .dropout import drop, dropout_keep
from .gate import gate_of, gated
from .kernel import kernel
from .scores import PLANE, addends_of, load_row, load_weights, of_addends, of_products, probabilities, scores
from .tiles import queries_of, query_step, query_steps


@kernel
def dkdv_kernel(
    inputs, dout, reference, delta, dk, dv, column_sums, weight_sums,
    strides, dout_strides, dk_strides, dv_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk, dv, and the sums for the gradients of bias and key weights; an argument of None is not computed.

    column_sums: dS over queries, fp32, one per query head and key. weight_sums: the gradient of key weights, fp32,
    one per key head and key.
    """
    j0, at, span = key_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_N, F.VARLEN)
    if j0 >= span.len_k:
        return
    dkdv_tile_of(
        inputs, None, dout, reference, delta, dk, dv, column_sums, weight_sums, j0, at, span,
        strides, strides.bias, dout_strides, dk_strides, dv_strides, sizes, mod,
        F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, 0,
    )  # fmt: skip


@triton.jit
def dkdv_tile_of(
    inputs, gate, dout, reference, delta, dk, dv, column_sums, weight_sums, j0, at, span,
    strides, gate_strides, dout_strides, dk_strides, dv_strides, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """The results of one key tile, stored. gate: None, or the pointer of a tensor.

    Columns beyond the keys compute on zeros. Their results (inf included) stay in their own rows of dk and dv, which
    are not stored.
    """
    TRANSPOSED: tl.constexpr = F.BIAS != PLANE and (F.MASK != PLANE or F.TILES) and gate is None
    j = j0 + tl.arange(0, BLOCK_N)
    row = span.start_k + j0
    columns_left = span.len_k - j0

    k_rows = load_rows(inputs.k, strides.k, at, at.hk, row, columns_left, sizes.head_dim, BLOCK_N, D)
    v_rows = load_rows(inputs.v, strides.v, at, at.hk, row, columns_left, sizes.head_dim_v, BLOCK_N, V)
    acc_k = zero_chunks(BLOCK_N, D)
    acc_v = zero_chunks(BLOCK_N, V)
    weights = load_weights(inputs.weight, strides.weight, at, span, j)
    weight_sum = tl.zeros([BLOCK_N], tl.float32)

    edges = query_range(j0, span, mod, BLOCK_N, BLOCK_M, F.WINDOW)
    FIRST: tl.constexpr = 2 if F.TILES else 0 if F.WINDOW >= 1 else 1
    LAST: tl.constexpr = 3 if F.TILES or F.WINDOW == 2 else 2
    STEP: tl.constexpr = 1 if F.TILES else BLOCK_M
    for m in tl.range(0, sizes.group):
        head = member(at, m)
        statistics = flat_row(at.b, head.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN)
        q_head = rows_of(inputs.q, strides.q, at, head.h, span.start_q, D.VECTOR)
        dout_head = rows_of(dout, dout_strides, at, head.h, span.start_q, V.VECTOR)
        lists = queries_of(j0, head, span, inputs, strides, F.TILES)
        steps = query_steps(lists, edges, BLOCK_M, F.TILES)
        added = addends_of(inputs, strides, head, span, sizes, F)
        of_head = gate_of(gate, gate_strides, head, span, GATE_VECTOR)
        sums = tl.zeros([BLOCK_N], tl.float32)

        for part in tl.static_range(FIRST, LAST):
            # Rows are checked in any case: without a left side of the window, the last rows are in part 1.
            for step in tl.range(steps[part], steps[3 if part == 1 and F.WINDOW < 2 else part + 1], STEP):
                start, here = query_step(added, lists, edges, tl.multiple_of(step, STEP), j0, BLOCK_M, F.TILES)
                i = start + tl.arange(0, BLOCK_M)
                rows_left = span.len_q - start
                inside = i < span.len_q
                q_tile = row_pointer(q_head, strides.q, start, D.VECTOR)
                q_rows = load_chunks(q_tile, strides.q, rows_left, sizes.head_dim, BLOCK_M, D, True)
                s = score_chunks(q_rows, k_rows, None, PRECISION, TRANSPOSED)
                # Rows beyond the queries have reference +inf, too: probability 0.
                row_reference = load_row(reference + statistics + i, inside, float("inf"), TRANSPOSED)
                s, slope = scores(s, i, j, here, span, mod, F, FOLD, False, 0 if part == 1 else F.WINDOW, TRANSPOSED)
                p, bare = probabilities(s, row_reference, weights, mod.scale, FOLD, TRANSPOSED)
                dout_tile = row_pointer(dout_head, dout_strides, start, V.VECTOR)
                dout_rows = load_chunks(dout_tile, dout_strides, rows_left, sizes.head_dim_v, BLOCK_M, V, True)
                keep = dropout_keep(inputs, head, sizes, start, j0, mod, F, BLOCK_M, BLOCK_N, TRANSPOSED)
                if dv is not None:
                    kept = gated(drop(p, keep, mod), of_head, i, j, span, GATE_VECTOR, TRANSPOSED).to(
                        dout_rows[0].dtype
                    )
                    acc_v = add_product(kept if TRANSPOSED else kept.T, dout_rows, acc_v, PRECISION)
                if dk is not None or column_sums is not None or weight_sums is not None:
                    row_delta = load_row(delta + statistics + i, inside, 0.0, TRANSPOSED)
                    dp = score_chunks(dout_rows, v_rows, None, PRECISION, TRANSPOSED)
                    dp = gated(drop(dp, keep, mod), of_head, i, j, span, GATE_VECTOR, TRANSPOSED)
                    dp -= row_delta[None, :] if TRANSPOSED else row_delta[:, None]
                    ds = p * dp
                    if weight_sums is not None:
                        weight_sum += tl.sum(bare * dp, 1 if TRANSPOSED else 0)
                    if column_sums is not None:
                        sums += tl.sum(of_addends(ds, slope, F), 1 if TRANSPOSED else 0)
                    if dk is not None:
                        ds = of_products(ds, slope, F).to(q_rows[0].dtype)
                        acc_k = add_product(ds if TRANSPOSED else ds.T, q_rows, acc_k, PRECISION)
        if column_sums is not None:
            first = flat_row(at.b, head.h, sizes.heads, span.start_k, sizes.size_k, F.VARLEN)
            tl.store(column_sums + first + j, sums, mask=j < span.len_k)

    if weight_sums is not None:
        first = flat_row(at.b, at.hk, sizes.heads_k, span.start_k, sizes.size_k, F.VARLEN)
        tl.store(weight_sums + first + j, weight_sum, mask=j < span.len_k)
    if dk is not None:
        dk_tile = rows_of(dk, dk_strides, at, at.hk, row, D.VECTOR)
        acc_k = scale_chunks(acc_k, mod.scale)
        store_chunks(dk_tile, dk_strides, columns_left, sizes.head_dim, acc_k, BLOCK_N, D)
    if dv is not None:
        dv_tile = rows_of(dv, dv_strides, at, at.hk, row, V.VECTOR)
        store_chunks(dv_tile, dv_strides, columns_left, sizes.head_dim_v, acc_v, BLOCK_N, V)
