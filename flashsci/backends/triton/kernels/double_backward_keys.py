"""Double backward by key tiles: the gradients of k and v, and the sums over queries of a bias gradient.

Maths     see tangents.py: gK = scale (F'^T Q + E'^T tQ); gV = (R P (T - m))^T dO
Grid      as in backward_keys.py: over key heads; a program goes through its query heads in order
Tiles     k, tk, v, tv and the fp32 gk, gv stay on chip; q, tq, dO stream: 8 products a tile. Scores are transposed or not as
          in backward_keys.py
Limits    registers: four score tiles and two accumulators
"""

import triton
import triton.language as tl

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
from .coord import flat_row, key_tile, member, query_range
from .dropout import drop, dropout_keep
from .gate import gate_of, gate_tile, times, times_tangent
from .kernel import kernel
from .scores import PLANE, addends_of, along_rows, bias_of, load_row, load_weights, probabilities, reference_of, scores
from .tangents import add_moved, second_order, softcap_bend, tangent_scores
from .tiles import queries_of, query_step, query_steps


@kernel
def double_backward_keys_kernel(
    inputs, tangents, lse, dout, mean, delta, zeta, gk, gv, column_sums, weight_sums,
    strides, tangent_strides, dout_strides, gk_strides, gv_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    """gk, gv, and the sums for the gradients of bias and key weights; an argument of None is not computed.

    column_sums: F over queries, fp32, one per query head and key. weight_sums: gw, fp32, one per key head and key.
    """
    j0, at, span = key_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_N, F.VARLEN)
    if j0 >= span.len_k:
        return
    second_order_keys_of(
        inputs, tangents, None, None, lse, dout, mean, delta, zeta, gk, gv, column_sums, weight_sums, j0, at, span,
        strides, tangent_strides, strides.bias, strides.bias, dout_strides, gk_strides, gv_strides, sizes, mod,
        F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, TBIAS, TBIAS_VECTOR, 0, 0,
    )  # fmt: skip


@triton.jit
def second_order_keys_of(
    inputs, tangents, gate, tgate, lse, dout, mean, delta, zeta, gk, gv, column_sums, weight_sums, j0, at, span,
    strides, tangent_strides, gate_strides, tgate_strides, dout_strides, gk_strides, gv_strides, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
    GATE_VECTOR: tl.constexpr, TGATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """The results of one key tile, stored. gate, tgate: None, or the pointers of the gate and its tangent.

    Columns beyond the keys compute on zeros; their results stay in their own rows, which are not stored.
    """
    TRANSPOSED: tl.constexpr = F.BIAS != PLANE and (F.MASK != PLANE or F.TILES) and gate is None
    UNBOUNDED: tl.constexpr = tangents.weight is not None
    j = j0 + tl.arange(0, BLOCK_N)
    row = span.start_k + j0
    columns_left = span.len_k - j0

    k_rows = load_rows(inputs.k, strides.k, at, at.hk, row, columns_left, sizes.head_dim, BLOCK_N, D)
    v_rows = load_rows(inputs.v, strides.v, at, at.hk, row, columns_left, sizes.head_dim_v, BLOCK_N, V)
    tk_rows = load_rows(tangents.k, tangent_strides.k, at, at.hk, row, columns_left, sizes.head_dim, BLOCK_N, D)
    tv_rows = load_rows(tangents.v, tangent_strides.v, at, at.hk, row, columns_left, sizes.head_dim_v, BLOCK_N, V)
    acc_k = zero_chunks(BLOCK_N, D)
    acc_v = zero_chunks(BLOCK_N, V)
    weights = load_weights(inputs.weight, strides.weight, at, span, j)
    tweights = load_weights(tangents.weight, tangent_strides.weight, at, span, j)
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
        tq_head = rows_of(tangents.q, tangent_strides.q, at, head.h, span.start_q, D.VECTOR)
        lists = queries_of(j0, head, span, inputs, strides, F.TILES)
        steps = query_steps(lists, edges, BLOCK_M, F.TILES)
        added = addends_of(inputs, strides, head, span, sizes, F)
        tbias = bias_of(tangents.bias, tangent_strides.bias, head, span, inputs, sizes, TBIAS_VECTOR, F)
        of_head = gate_of(gate, gate_strides, head, span, GATE_VECTOR)
        along_head = gate_of(tgate, tgate_strides, head, span, TGATE_VECTOR)
        sums = tl.zeros([BLOCK_N], tl.float32)

        for part in tl.static_range(FIRST, LAST):
            for step in tl.range(steps[part], steps[3 if part == 1 and F.WINDOW < 2 else part + 1], STEP):
                start, here = query_step(added, lists, edges, tl.multiple_of(step, STEP), j0, BLOCK_M, F.TILES)
                i = start + tl.arange(0, BLOCK_M)
                rows_left = span.len_q - start
                inside = i < span.len_q
                position = statistics + i
                q_rows = load_from(q_head, strides.q, start, rows_left, sizes.head_dim, BLOCK_M, D, True)
                tq_rows = load_from(tq_head, tangent_strides.q, start, rows_left, sizes.head_dim, BLOCK_M, D, True)
                dout_rows = load_from(dout_head, dout_strides, start, rows_left, sizes.head_dim_v, BLOCK_M, V, True)
                products = score_chunks(q_rows, k_rows, None, PRECISION, TRANSPOSED)
                s, slope = scores(
                    products, i, j, here, span, mod, F, FOLD, False, 0 if part == 1 else F.WINDOW, TRANSPOSED
                )  # fmt: skip
                # Rows beyond the queries count as rows without keys: probability 0.
                row_lse = load_row(lse + position, inside, float("-inf"), TRANSPOSED)
                reference = reference_of(row_lse, FOLD)
                p, bare = probabilities(s, reference, weights, mod.scale, FOLD, TRANSPOSED)
                t, raw_t = tangent_scores(
                    products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F,
                    TBIAS, TBIAS_VECTOR, PRECISION, TRANSPOSED,
                )  # fmt: skip
                dp = score_chunks(dout_rows, v_rows, None, PRECISION, TRANSPOSED)
                tdp = tl.zeros_like(dp)
                if tv_rows is not None:
                    tdp = score_chunks(dout_rows, tv_rows, None, PRECISION, TRANSPOSED)
                keep = dropout_keep(inputs, head, sizes, start, j0, mod, F, BLOCK_M, BLOCK_N, TRANSPOSED)
                dp = drop(dp, keep, mod)
                tdp = drop(tdp, keep, mod)
                factor = gate_tile(of_head, i, j, span, GATE_VECTOR, TRANSPOSED)
                tfactor = gate_tile(along_head, i, j, span, TGATE_VECTOR, TRANSPOSED)
                tdp = times_tangent(dp, tdp, factor, tfactor)
                dp = times(dp, factor)
                bend = softcap_bend(products, s, slope, mod, F)
                row_mean = load_row(mean + position, inside, 0.0, TRANSPOSED)
                row_delta = load_row(delta + position, inside, 0.0, TRANSPOSED)
                row_zeta = load_row(zeta + position, inside, 0.0, TRANSPOSED)
                w, f, e_raw, f_raw, g = second_order(
                    p, bare, t, raw_t, tweights, dp - along_rows(row_delta, TRANSPOSED), tdp - along_rows(row_zeta, TRANSPOSED),
                    row_mean, slope, bend, F, TRANSPOSED,
                )  # fmt: skip
                if column_sums is not None:
                    sums += tl.sum(f, 1 if TRANSPOSED else 0)
                if weight_sums is not None:
                    weight_sum += tl.sum(g, 1 if TRANSPOSED else 0)
                if gv is not None:
                    w = drop(times_tangent(p, w, factor, tfactor), keep, mod)
                    acc_v = add_moved(w, dout_rows, acc_v, PRECISION, not TRANSPOSED, UNBOUNDED)
                if gk is not None:
                    acc_k = add_moved(f_raw, q_rows, acc_k, PRECISION, not TRANSPOSED, UNBOUNDED)
                    if tq_rows is not None:
                        e_raw = e_raw.to(q_rows[0].dtype)
                        acc_k = add_product(e_raw if TRANSPOSED else e_raw.T, tq_rows, acc_k, PRECISION)
        if column_sums is not None:
            first = flat_row(at.b, head.h, sizes.heads, span.start_k, sizes.size_k, F.VARLEN)
            tl.store(column_sums + first + j, sums, mask=j < span.len_k)

    if weight_sums is not None:
        first = flat_row(at.b, at.hk, sizes.heads_k, span.start_k, sizes.size_k, F.VARLEN)
        tl.store(weight_sums + first + j, weight_sum, mask=j < span.len_k)
    if gk is not None:
        gk_tile = rows_of(gk, gk_strides, at, at.hk, row, D.VECTOR)
        acc_k = scale_chunks(acc_k, mod.scale)
        store_chunks(gk_tile, gk_strides, columns_left, sizes.head_dim, acc_k, BLOCK_N, D)
    if gv is not None:
        gv_tile = rows_of(gv, gv_strides, at, at.hk, row, V.VECTOR)
        store_chunks(gv_tile, gv_strides, columns_left, sizes.head_dim_v, acc_v, BLOCK_N, V)
