"""Backward by query tiles: dq; every sum has one owner, no atomics.

Maths     P = e^(S - lse); dP = R (dO V^T); dS = P (dP - delta), delta = sum_d dO O - dlse; dQ = scale dS' K;
          dS' = dS times the softcap's slope; dBias = dS, or dS' if the softcap bounds the bias, too; R = dropout's keep / (1 - p)
Grid      as in forward.py
Tiles     q, dO and the fp32 dq stay on chip, k and v stream: 3 products a tile
Limits    with backward_keys.py 7 products, against 5 of a kernel that adds up dq with atomics: the price of determinism
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
from .coord import flat_row, key_range, query_tile
from .dropout import drop, dropout_keep
from .gate import gated
from .kernel import kernel
from .scores import addends_of, bias_of, load_weights, of_addends, of_products, probabilities, scores, store_plane
from .tiles import key_step, key_steps, keys_of

# The use of dS, in addition to dq and dk: stored unchanged (the bias has every dim), or summed over keys or queries, or
# over keys times -|i + shift - j|, which is the derivative of a score by its slope of ALiBi.
NO_BIAS_GRADIENT = tl.constexpr(0)
STORE = tl.constexpr(1)
ROW_SUMS = tl.constexpr(2)
COLUMN_SUMS = tl.constexpr(3)
DISTANCE_SUMS = tl.constexpr(4)


@kernel
def dq_kernel(
    inputs, dout, reference, delta, dq, dbias,
    strides, dout_strides, dq_strides, dbias_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS_GRADIENT: tl.constexpr, DBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    """dq (unless None), and dbias if it is dS itself (STORE) or sums over keys (ROW_SUMS, DISTANCE_SUMS: fp32, one per query row)."""
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    dq_tile_of(
        inputs, None, dout, reference, delta, dq, dbias, i0, at, span,
        strides, dout_strides, dq_strides, dbias_strides, sizes, mod,
        F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, BIAS_GRADIENT, DBIAS_VECTOR, None, 0, 0,
    )  # fmt: skip


@triton.jit
def dq_tile_of(
    inputs, gate, dout, reference, delta, dq, dbias, i0, at, span,
    strides, dout_strides, dq_strides, dbias_strides, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS_GRADIENT: tl.constexpr, DBIAS_VECTOR: tl.constexpr,
    dgate, GATE_VECTOR: tl.constexpr, DGATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """The results of one query tile, stored. gate, dgate: as `gate_of` makes them."""
    i = i0 + tl.arange(0, BLOCK_M)
    row = span.start_q + i0
    rows_left = span.len_q - i0
    first = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN)

    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_head = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    if BIAS_GRADIENT == STORE:
        dbias = bias_of(dbias, dbias_strides, at, span, inputs, sizes, DBIAS_VECTOR, F)
    lists = keys_of(i0, at, span, inputs, strides, F.TILES)
    added = addends_of(inputs, strides, at, span, sizes, F)
    q_rows = load_rows(inputs.q, strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    dout_rows = load_rows(dout, dout_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
    row_reference = tl.load(reference + first + i, mask=i < span.len_q, other=float("inf"))
    row_delta = tl.load(delta + first + i, mask=i < span.len_q, other=0.0)
    row_sums = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_chunks(BLOCK_M, D)

    edges = key_range(i0, span, mod, BLOCK_M, BLOCK_N, F.WINDOW)
    steps = key_steps(lists, edges, BLOCK_N)
    FIRST: tl.constexpr = 2 if F.TILES else 0 if F.WINDOW == 2 else 1
    STEP: tl.constexpr = 1 if F.TILES else BLOCK_N
    for part in tl.static_range(FIRST, 3):
        for step in tl.range(steps[part], steps[part + 1], STEP):
            start, here = key_step(added, lists, edges, tl.multiple_of(step, STEP), i0, BLOCK_N, F.TILES)
            j = start + tl.arange(0, BLOCK_N)
            keys_left = span.len_k - start
            k_tile = row_pointer(k_head, strides.k, start, D.VECTOR)
            v_tile = row_pointer(v_head, strides.v, start, V.VECTOR)
            k_rows = load_chunks(k_tile, strides.k, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
            v_rows = load_chunks(v_tile, strides.v, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
            s = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
            dp = score_chunks(dout_rows, v_rows, None, PRECISION, False)
            s, slope = scores(s, i, j, here, span, mod, F, FOLD, part != 1, 0 if part == 1 else F.WINDOW, False)
            weights = load_weights(inputs.weight, strides.weight, at, span, j)
            p, _bare = probabilities(s, row_reference, weights, mod.scale, FOLD, False)
            keep = dropout_keep(inputs, at, sizes, i0, start, mod, F, BLOCK_M, BLOCK_N, False)
            dp = drop(dp, keep, mod)
            if dgate is not None:
                store_plane(dgate, i, j, span.len_k, p * dp, DGATE_VECTOR)
            dp = gated(dp, gate, i, j, span, GATE_VECTOR, False)
            ds = p * (dp - row_delta[:, None])
            if BIAS_GRADIENT == STORE:
                store_plane(dbias, i, j, span.len_k, of_addends(ds, slope, F), DBIAS_VECTOR)
            if BIAS_GRADIENT == ROW_SUMS:
                row_sums += tl.sum(of_addends(ds, slope, F), 1)
            if BIAS_GRADIENT == DISTANCE_SUMS:
                away = tl.abs(j[None, :] - i[:, None] - span.shift).to(tl.float32)
                row_sums -= tl.sum(of_addends(ds, slope, F) * away, 1)
            if dq is not None:
                ds = of_products(ds, slope, F)
                acc = add_product(ds, k_rows, acc, PRECISION)

    if BIAS_GRADIENT >= ROW_SUMS:  # one of the sums over keys
        tl.store(dbias + first + i, row_sums, mask=i < span.len_q)
    if dq is not None:
        dq_tile = rows_of(dq, dq_strides, at, at.h, row, D.VECTOR)
        acc = scale_chunks(acc, mod.scale)
        store_chunks(dq_tile, dq_strides, rows_left, sizes.head_dim, acc, BLOCK_M, D)
