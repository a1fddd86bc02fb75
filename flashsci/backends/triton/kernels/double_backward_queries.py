"""Double backward by query tiles: the gradient of q, and of a bias that has every dim or one column.

Maths     see tangents.py: gQ = scale (F' K + E' tK); gBias = F; E', F' with respect to scores before the softcap
Grid      as in forward.py
Tiles     q, tq, dO and the fp32 gq stay on chip; k, tk, v, tv stream: 7 products a tile
Limits    registers: four score tiles (S, T, dO V^T, dO tV^T) and one accumulator
"""

import triton
import triton.language as tl

from .backward_queries import ROW_SUMS, STORE
from .chunks import (
    add_product,
    load_from,
    load_rows,
    rows_of,
    scale_chunks,
    score_chunks,
    store_chunks,
    zero_chunks,
)
from .coord import flat_row, key_range, query_tile
from .dropout import drop, dropout_keep
from .gate import gate_tile, times, times_tangent
from .kernel import kernel
from .scores import addends_of, bias_of, load_weights, probabilities, reference_of, scores, store_plane
from .tangents import add_moved, second_order, softcap_bend, tangent_scores
from .tiles import key_step, key_steps, keys_of


@kernel
def double_backward_queries_kernel(
    inputs, tangents, lse, dout, mean, delta, zeta, gq, gbias,
    strides, tangent_strides, dout_strides, gq_strides, gbias_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, GBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    """gq (unless None), and gbias if it is F itself (STORE) or its sums over keys (ROW_SUMS, fp32, one per query row)."""
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    second_order_queries_of(
        inputs, tangents, None, None, lse, dout, mean, delta, zeta, gq, gbias, i0, at, span,
        strides, tangent_strides, dout_strides, gq_strides, gbias_strides, sizes, mod,
        F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, TBIAS, TBIAS_VECTOR, BIAS_GRADIENT, GBIAS_VECTOR, 0, 0,
    )  # fmt: skip


@triton.jit
def second_order_queries_of(
    inputs, tangents, gate, tgate, lse, dout, mean, delta, zeta, gq, gbias, i0, at, span,
    strides, tangent_strides, dout_strides, gq_strides, gbias_strides, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, GBIAS_VECTOR: tl.constexpr, GATE_VECTOR: tl.constexpr, TGATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """The results of one query tile, stored. gate, tgate: as `gate_of` makes them of the gate and its tangent."""
    i = i0 + tl.arange(0, BLOCK_M)
    row = span.start_q + i0
    rows_left = span.len_q - i0
    position = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN) + i
    inside = i < span.len_q
    lists = keys_of(i0, at, span, inputs, strides, F.TILES)
    added = addends_of(inputs, strides, at, span, sizes, F)
    tbias = bias_of(tangents.bias, tangent_strides.bias, at, span, inputs, sizes, TBIAS_VECTOR, F)
    if BIAS_GRADIENT == STORE:
        gbias = bias_of(gbias, gbias_strides, at, span, inputs, sizes, GBIAS_VECTOR, F)

    q_rows = load_rows(inputs.q, strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    tq_rows = load_rows(tangents.q, tangent_strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    dout_rows = load_rows(dout, dout_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_head = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    tk_head = rows_of(tangents.k, tangent_strides.k, at, at.hk, span.start_k, D.VECTOR)
    tv_head = rows_of(tangents.v, tangent_strides.v, at, at.hk, span.start_k, V.VECTOR)
    row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
    reference = reference_of(row_lse, FOLD)
    row_mean = tl.load(mean + position, mask=inside, other=0.0)
    row_delta = tl.load(delta + position, mask=inside, other=0.0)
    row_zeta = tl.load(zeta + position, mask=inside, other=0.0)
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
            k_rows = load_from(k_head, strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
            tk_rows = load_from(tk_head, tangent_strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
            v_rows = load_from(v_head, strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
            products = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
            s, slope = scores(products, i, j, here, span, mod, F, FOLD, part != 1, 0 if part == 1 else F.WINDOW, False)
            weights = load_weights(inputs.weight, strides.weight, at, span, j)
            tweights = load_weights(tangents.weight, tangent_strides.weight, at, span, j)
            p, bare = probabilities(s, reference, weights, mod.scale, FOLD, False)
            t, raw_t = tangent_scores(
                products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F,
                TBIAS, TBIAS_VECTOR, PRECISION, False,
            )  # fmt: skip
            dp = score_chunks(dout_rows, v_rows, None, PRECISION, False)
            tdp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            tv_rows = load_from(tv_head, tangent_strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
            if tv_rows is not None:
                tdp = score_chunks(dout_rows, tv_rows, None, PRECISION, False)
            keep = dropout_keep(inputs, at, sizes, i0, start, mod, F, BLOCK_M, BLOCK_N, False)
            dp = drop(dp, keep, mod)
            tdp = drop(tdp, keep, mod)
            factor = gate_tile(gate, i, j, span, GATE_VECTOR, False)
            tdp = times_tangent(dp, tdp, factor, gate_tile(tgate, i, j, span, TGATE_VECTOR, False))
            dp = times(dp, factor)
            bend = softcap_bend(products, s, slope, mod, F)
            _w, f, e_raw, f_raw, _g = second_order(
                p, bare, t, raw_t, tweights, dp - row_delta[:, None], tdp - row_zeta[:, None], row_mean, slope, bend, F, False
            )  # fmt: skip
            if BIAS_GRADIENT == STORE:
                store_plane(gbias, i, j, span.len_k, f, GBIAS_VECTOR)
            if BIAS_GRADIENT == ROW_SUMS:
                row_sums += tl.sum(f, 1)
            if gq is not None:
                acc = add_moved(f_raw, k_rows, acc, PRECISION, False, tangents.weight is not None)
                if tk_rows is not None:
                    acc = add_product(e_raw, tk_rows, acc, PRECISION)

    if BIAS_GRADIENT == ROW_SUMS:
        tl.store(gbias + position, row_sums, mask=inside)
    if gq is not None:
        gq_tile = rows_of(gq, gq_strides, at, at.h, row, D.VECTOR)
        acc = scale_chunks(acc, mod.scale)
        store_chunks(gq_tile, gq_strides, rows_left, sizes.head_dim, acc, BLOCK_M, D)
