"""Double backward along many directions of one call: a program computes P and dO V^T of its tile once for GROUP of them.

Maths     as in double_backward_queries.py and double_backward_keys.py, for each direction
Grid      a program for a tile and GROUP directions: of queries for gq, of keys for gk and gv; the programs of a tile are
          neighbours, which share what they stream in L2
Tiles     by queries: q, dO and for each direction tq and the fp32 gq stay on chip; k and v stream once for the group, tk and tv for each
          direction: two products a tile for the group, and five for each direction. By keys: k, v and for each direction tk, tv and the
          fp32 gk and gv stay on chip; q and dO stream once for the group, tq for each direction: two products, and six
Limits    the registers of GROUP times gq, or of GROUP times gk and gv. A bias has no gradient here that is a sum over queries, heads or
          batch members
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
from .coord import flat_row, key_range, key_tile, member, query_range, query_tile
from .dropout import drop, dropout_keep
from .kernel import kernel
from .many_jvp import direction_of, one_of
from .scores import (
    PLANE,
    addends_of,
    along_rows,
    bias_of,
    load_row,
    load_weights,
    probabilities,
    reference_of,
    scores,
    store_plane,
)
from .tangents import add_moved, second_order, softcap_bend, tangent_scores
from .tiles import key_step, key_steps, keys_of, queries_of, query_step, query_steps


@triton.jit
def query_direction(
    state, n, tq_rows, tangents, tangent_strides, steps, at, span, start, keys_left, i, j, products, q_rows, k_rows, dout_rows, p, bare, u,
    keep, slope, bend, gbias, inputs, sizes, mod, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, BIAS_GRADIENT: tl.constexpr,
    GBIAS_VECTOR: tl.constexpr, WITH_GQ: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    """gq and the row sums of direction n after one more tile of keys. gbias: the plane that F is stored in, or None."""
    acc, row_sums, row_mean, row_zeta = state
    tk = rows_of(direction_of(tangents.k, n, steps[1], D.VECTOR), tangent_strides.k, at, at.hk, span.start_k, D.VECTOR)
    tk_rows = load_from(tk, tangent_strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, CHECK_ROWS)
    tv = rows_of(direction_of(tangents.v, n, steps[2], V.VECTOR), tangent_strides.v, at, at.hk, span.start_k, V.VECTOR)
    tv_rows = load_from(tv, tangent_strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, CHECK_ROWS)
    of_tbias = direction_of(tangents.bias, n, steps[3], TBIAS_VECTOR)
    tbias = bias_of(of_tbias, tangent_strides.bias, at, span, inputs, sizes, TBIAS_VECTOR, F)
    tweights = load_weights(direction_of(tangents.weight, n, steps[4], 1), tangent_strides.weight, at, span, j)
    t, raw_t = tangent_scores(
        products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F, TBIAS, TBIAS_VECTOR, PRECISION, False
    )  # fmt: skip
    tdp = tl.zeros_like(u)
    if tv_rows is not None:
        tdp = drop(score_chunks(dout_rows, tv_rows, None, PRECISION, False), keep, mod)
    _w, f, e_raw, f_raw, _g = second_order(
        p, bare, t, raw_t, tweights, u, tdp - row_zeta[:, None], row_mean, slope, bend, F, False
    )
    if BIAS_GRADIENT == STORE:
        store_plane(gbias, i, j, span.len_k, f, GBIAS_VECTOR)
    if BIAS_GRADIENT == ROW_SUMS:
        row_sums += tl.sum(f, 1)
    if WITH_GQ:
        acc = add_moved(f_raw, k_rows, acc, PRECISION, False, tangents.weight is not None)
        if tk_rows is not None:
            acc = add_product(e_raw, tk_rows, acc, PRECISION)
    return acc, row_sums, row_mean, row_zeta


@kernel
def many_double_backward_queries_kernel(
    inputs, tangents, lse, dout, mean, delta, zeta, gq, gbias,
    strides, tangent_strides, dout_strides, gq_strides, gbias_strides, sizes, schedule, mod, tiles,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, GBIAS_VECTOR: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """gq (unless None) and gbias along each direction: F itself (STORE), or its sums over keys (ROW_SUMS).

    tiles: the number of directions, and the steps from one to the next in the tangents of q, k, v, bias and weights, in mean and zeta, and
    in gq and gbias.
    """
    directions, steps = tiles
    groups = tl.cdiv(directions, GROUP)
    pid = tl.program_id(0)
    i0, at, span = query_tile(pid // groups, inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    n0 = pid % groups * GROUP
    last = directions - 1  # an incomplete group computes it more than once
    i = i0 + tl.arange(0, BLOCK_M)
    row = span.start_q + i0
    rows_left = span.len_q - i0
    position = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN) + i
    inside = i < span.len_q
    lists = keys_of(i0, at, span, inputs, strides, F.TILES)
    added = addends_of(inputs, strides, at, span, sizes, F)

    q_rows = load_rows(inputs.q, strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    dout_rows = load_rows(dout, dout_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_head = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
    reference = reference_of(row_lse, FOLD)
    row_delta = tl.load(delta + position, mask=inside, other=0.0)
    tq_all = ()
    states = ()
    for g in tl.static_range(0, GROUP):
        n = tl.minimum(n0 + g, last)
        tq = direction_of(tangents.q, n, steps[0], D.VECTOR)
        tq_rows = load_rows(tq, tangent_strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
        if tangents.q is not None:
            tq_all = tq_all + (tq_rows,)  # noqa: RUF005  Triton has no unpacking
        row_mean = tl.load(direction_of(mean, n, steps[5], 1) + position, mask=inside, other=0.0)
        row_zeta = tl.load(direction_of(zeta, n, steps[5], 1) + position, mask=inside, other=0.0)
        states = states + ((zero_chunks(BLOCK_M, D), tl.zeros([BLOCK_M], tl.float32), row_mean, row_zeta),)  # noqa: RUF005

    edges = key_range(i0, span, mod, BLOCK_M, BLOCK_N, F.WINDOW)
    places = key_steps(lists, edges, BLOCK_N)
    FIRST: tl.constexpr = 2 if F.TILES else 0 if F.WINDOW == 2 else 1
    STEP: tl.constexpr = 1 if F.TILES else BLOCK_N
    for part in tl.static_range(FIRST, 3):
        for step in tl.range(places[part], places[part + 1], STEP):
            start, here = key_step(added, lists, edges, tl.multiple_of(step, STEP), i0, BLOCK_N, F.TILES)
            j = start + tl.arange(0, BLOCK_N)
            keys_left = span.len_k - start
            k_rows = load_from(k_head, strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
            v_rows = load_from(v_head, strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
            products = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
            s, slope = scores(products, i, j, here, span, mod, F, FOLD, part != 1, 0 if part == 1 else F.WINDOW, False)
            weights = load_weights(inputs.weight, strides.weight, at, span, j)
            p, bare = probabilities(s, reference, weights, mod.scale, FOLD, False)
            keep = dropout_keep(inputs, at, sizes, i0, start, mod, F, BLOCK_M, BLOCK_N, False)
            u = drop(score_chunks(dout_rows, v_rows, None, PRECISION, False), keep, mod) - row_delta[:, None]
            bend = softcap_bend(products, s, slope, mod, F)
            moved = ()
            for g in tl.static_range(0, GROUP):
                n = tl.minimum(n0 + g, last)
                plane = None
                if BIAS_GRADIENT == STORE:
                    of_gbias = direction_of(gbias, n, steps[7], GBIAS_VECTOR)
                    plane = bias_of(of_gbias, gbias_strides, at, span, inputs, sizes, GBIAS_VECTOR, F)
                moved = moved + (  # noqa: RUF005
                    query_direction(
                        states[g], n, one_of(tq_all, g, tangents.q), tangents, tangent_strides, steps, at, span, start, keys_left, i, j,
                        products, q_rows, k_rows, dout_rows, p, bare, u, keep, slope, bend, plane, inputs, sizes, mod, F, D, V,
                        PRECISION, BLOCK_N, TBIAS, TBIAS_VECTOR, BIAS_GRADIENT, GBIAS_VECTOR, gq is not None, part != 1,
                    ),
                )  # fmt: skip
            states = moved

    for g in tl.static_range(0, GROUP):
        n = tl.minimum(n0 + g, last)
        acc, row_sums, _mean, _zeta = states[g]
        if BIAS_GRADIENT == ROW_SUMS:
            tl.store(direction_of(gbias, n, steps[7], 1) + position, row_sums, mask=inside)
        if gq is not None:
            gq_tile = rows_of(direction_of(gq, n, steps[6], D.VECTOR), gq_strides, at, at.h, row, D.VECTOR)
            store_chunks(gq_tile, gq_strides, rows_left, sizes.head_dim, scale_chunks(acc, mod.scale), BLOCK_M, D)


@triton.jit
def key_direction(
    state, n, tk_rows, tv_rows, tweights, tangents, tangent_strides, mean, zeta, steps, head, span, start, rows_left, statistics, inside,
    i, j, products, q_rows, k_rows, dout_rows, p, bare, u, keep, slope, bend, inputs, sizes, mod, F: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, TRANSPOSED: tl.constexpr,
    WITH_GK: tl.constexpr, WITH_GV: tl.constexpr, WITH_SUMS: tl.constexpr,
):  # fmt: skip
    """gk, gv and the sums for key weights of direction n after one more tile of queries."""
    UNBOUNDED: tl.constexpr = tangents.weight is not None
    acc_k, acc_v, weight_sum = state
    of_tq = direction_of(tangents.q, n, steps[0], D.VECTOR)
    tq = rows_of(of_tq, tangent_strides.q, head, head.h, span.start_q, D.VECTOR)
    tq_rows = load_from(tq, tangent_strides.q, start, rows_left, sizes.head_dim, BLOCK_M, D, True)
    of_tbias = direction_of(tangents.bias, n, steps[3], TBIAS_VECTOR)
    tbias = bias_of(of_tbias, tangent_strides.bias, head, span, inputs, sizes, TBIAS_VECTOR, F)
    t, raw_t = tangent_scores(
        products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F,
        TBIAS, TBIAS_VECTOR, PRECISION, TRANSPOSED,
    )  # fmt: skip
    tdp = tl.zeros_like(u)
    if tv_rows is not None:
        tdp = drop(score_chunks(dout_rows, tv_rows, None, PRECISION, TRANSPOSED), keep, mod)
    row_mean = load_row(direction_of(mean, n, steps[5], 1) + statistics + i, inside, 0.0, TRANSPOSED)
    row_zeta = load_row(direction_of(zeta, n, steps[5], 1) + statistics + i, inside, 0.0, TRANSPOSED)
    w, _f, e_raw, f_raw, g = second_order(
        p, bare, t, raw_t, tweights, u, tdp - along_rows(row_zeta, TRANSPOSED), row_mean, slope, bend, F, TRANSPOSED
    )
    if WITH_SUMS:
        weight_sum += tl.sum(g, 1 if TRANSPOSED else 0)
    if WITH_GV:
        acc_v = add_moved(drop(w, keep, mod), dout_rows, acc_v, PRECISION, not TRANSPOSED, UNBOUNDED)
    if WITH_GK:
        acc_k = add_moved(f_raw, q_rows, acc_k, PRECISION, not TRANSPOSED, UNBOUNDED)
        if tq_rows is not None:
            e_raw = e_raw.to(q_rows[0].dtype)
            acc_k = add_product(e_raw if TRANSPOSED else e_raw.T, tq_rows, acc_k, PRECISION)
    return acc_k, acc_v, weight_sum


@kernel
def many_double_backward_keys_kernel(
    inputs, tangents, lse, dout, mean, delta, zeta, gk, gv, weight_sums,
    strides, tangent_strides, dout_strides, gk_strides, gv_strides, sizes, schedule, mod, tiles,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """gk, gv, and the sums for the gradient of key weights (fp32, one per key head and key) along each direction; an argument of None is
    not computed.

    tiles: the number of directions, and the steps from one to the next in the tangents of q, k, v, bias and weights, in mean and zeta, and
    in gk, gv and weight_sums.
    """
    TRANSPOSED: tl.constexpr = F.BIAS != PLANE and (F.MASK != PLANE or F.TILES)  # as in backward_keys.py
    directions, steps = tiles
    groups = tl.cdiv(directions, GROUP)
    pid = tl.program_id(0)
    j0, at, span = key_tile(pid // groups, inputs, sizes, schedule, mod, BLOCK_N, F.VARLEN)
    if j0 >= span.len_k:
        return
    n0 = pid % groups * GROUP
    last = directions - 1
    j = j0 + tl.arange(0, BLOCK_N)
    row = span.start_k + j0
    columns_left = span.len_k - j0

    k_rows = load_rows(inputs.k, strides.k, at, at.hk, row, columns_left, sizes.head_dim, BLOCK_N, D)
    v_rows = load_rows(inputs.v, strides.v, at, at.hk, row, columns_left, sizes.head_dim_v, BLOCK_N, V)
    weights = load_weights(inputs.weight, strides.weight, at, span, j)
    tk_all = ()
    tv_all = ()
    tweights_all = ()
    states = ()
    for g in tl.static_range(0, GROUP):
        n = tl.minimum(n0 + g, last)
        tk = direction_of(tangents.k, n, steps[1], D.VECTOR)
        tk_rows = load_rows(tk, tangent_strides.k, at, at.hk, row, columns_left, sizes.head_dim, BLOCK_N, D)
        if tangents.k is not None:
            tk_all = tk_all + (tk_rows,)  # noqa: RUF005
        tv = direction_of(tangents.v, n, steps[2], V.VECTOR)
        tv_rows = load_rows(tv, tangent_strides.v, at, at.hk, row, columns_left, sizes.head_dim_v, BLOCK_N, V)
        if tangents.v is not None:
            tv_all = tv_all + (tv_rows,)  # noqa: RUF005
        tweights = load_weights(direction_of(tangents.weight, n, steps[4], 1), tangent_strides.weight, at, span, j)
        if tangents.weight is not None:
            tweights_all = tweights_all + (tweights,)  # noqa: RUF005
        zero = tl.zeros([BLOCK_N], tl.float32)
        states = states + ((zero_chunks(BLOCK_N, D), zero_chunks(BLOCK_N, V), zero),)  # noqa: RUF005

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
        places = query_steps(lists, edges, BLOCK_M, F.TILES)
        added = addends_of(inputs, strides, head, span, sizes, F)

        for part in tl.static_range(FIRST, LAST):
            # Rows are checked in any case: without a left side of the window, the last rows are in part 1.
            for step in tl.range(places[part], places[3 if part == 1 and F.WINDOW < 2 else part + 1], STEP):
                start, here = query_step(added, lists, edges, tl.multiple_of(step, STEP), j0, BLOCK_M, F.TILES)
                i = start + tl.arange(0, BLOCK_M)
                rows_left = span.len_q - start
                inside = i < span.len_q
                q_rows = load_from(q_head, strides.q, start, rows_left, sizes.head_dim, BLOCK_M, D, True)
                dout_rows = load_from(dout_head, dout_strides, start, rows_left, sizes.head_dim_v, BLOCK_M, V, True)
                products = score_chunks(q_rows, k_rows, None, PRECISION, TRANSPOSED)
                s, slope = scores(
                    products, i, j, here, span, mod, F, FOLD, False, 0 if part == 1 else F.WINDOW, TRANSPOSED
                )  # fmt: skip
                # Rows beyond the queries count as rows without keys: probability 0.
                row_lse = load_row(lse + statistics + i, inside, float("-inf"), TRANSPOSED)
                reference = reference_of(row_lse, FOLD)
                p, bare = probabilities(s, reference, weights, mod.scale, FOLD, TRANSPOSED)
                keep = dropout_keep(inputs, head, sizes, start, j0, mod, F, BLOCK_M, BLOCK_N, TRANSPOSED)
                row_delta = load_row(delta + statistics + i, inside, 0.0, TRANSPOSED)
                u = drop(score_chunks(dout_rows, v_rows, None, PRECISION, TRANSPOSED), keep, mod)
                u -= along_rows(row_delta, TRANSPOSED)
                bend = softcap_bend(products, s, slope, mod, F)
                moved = ()
                for g in tl.static_range(0, GROUP):
                    moved = moved + (  # noqa: RUF005
                        key_direction(
                            states[g], tl.minimum(n0 + g, last), one_of(tk_all, g, tangents.k), one_of(tv_all, g, tangents.v),
                            one_of(tweights_all, g, tangents.weight), tangents, tangent_strides, mean, zeta, steps, head, span, start,
                            rows_left, statistics, inside, i, j, products, q_rows, k_rows, dout_rows, p, bare, u, keep, slope, bend,
                            inputs, sizes, mod, F, D, PRECISION, BLOCK_M, TBIAS, TBIAS_VECTOR, TRANSPOSED, gk is not None, gv is not None,
                            weight_sums is not None,
                        ),
                    )  # fmt: skip
                states = moved

    for g in tl.static_range(0, GROUP):
        n = tl.minimum(n0 + g, last)
        acc_k, acc_v, weight_sum = states[g]
        if weight_sums is not None:
            first = flat_row(at.b, at.hk, sizes.heads_k, span.start_k, sizes.size_k, F.VARLEN)
            tl.store(direction_of(weight_sums, n, steps[8], 1) + first + j, weight_sum, mask=j < span.len_k)
        if gk is not None:
            gk_tile = rows_of(direction_of(gk, n, steps[6], D.VECTOR), gk_strides, at, at.hk, row, D.VECTOR)
            store_chunks(gk_tile, gk_strides, columns_left, sizes.head_dim, scale_chunks(acc_k, mod.scale), BLOCK_N, D)
        if gv is not None:
            gv_tile = rows_of(direction_of(gv, n, steps[7], V.VECTOR), gv_strides, at, at.hk, row, V.VECTOR)
            store_chunks(gv_tile, gv_strides, columns_left, sizes.head_dim_v, acc_v, BLOCK_N, V)
