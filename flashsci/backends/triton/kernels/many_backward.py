"""Gradients for many cotangents of one call: a program computes P of its tile once for GROUP of them.

Maths     as in backward_queries.py and backward_keys.py, for each direction: a cotangent of out, and one of lse in delta
Grid      a program for a tile and GROUP directions: of queries for dq, of keys for dk and dv; the programs of a tile are
          neighbours, which share what they stream in L2
Tiles     by queries: q and for each direction dO and the fp32 dq stay on chip, k and v stream once for the group; one product a tile for
          the group, and two for each direction. By keys: k, v and for each direction the fp32 dk and dv stay on chip, q streams once
          for the group, and dO for each direction; one product, and three
Limits    the registers of GROUP times dq, or of GROUP times dk and dv. A bias has no gradient here that is a sum over queries, heads or
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
from .many_jvp import direction_of
from .scores import (
    PLANE,
    addends_of,
    bias_of,
    load_row,
    load_weights,
    of_addends,
    of_products,
    probabilities,
    scores,
    store_plane,
)
from .tiles import key_step, key_steps, keys_of, queries_of, query_step, query_steps


@triton.jit
def query_direction(
    state, dout_rows, row_delta, v_rows, k_rows, p, slope, keep, dbias, i, j, span, mod, F: tl.constexpr, PRECISION: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, DBIAS_VECTOR: tl.constexpr, WITH_DQ: tl.constexpr,
):  # fmt: skip
    """dq and the row sums of one direction after one more tile of keys."""
    acc, row_sums = state
    dp = drop(score_chunks(dout_rows, v_rows, None, PRECISION, False), keep, mod)
    ds = p * (dp - row_delta[:, None])
    if BIAS_GRADIENT == STORE:
        store_plane(dbias, i, j, span.len_k, of_addends(ds, slope, F), DBIAS_VECTOR)
    if BIAS_GRADIENT == ROW_SUMS:
        row_sums += tl.sum(of_addends(ds, slope, F), 1)
    if WITH_DQ:
        acc = add_product(of_products(ds, slope, F), k_rows, acc, PRECISION)
    return acc, row_sums


@kernel
def many_dq_kernel(
    inputs, dout, reference, delta, dq, dbias,
    strides, dout_strides, dq_strides, dbias_strides, sizes, schedule, mod, tiles,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS_GRADIENT: tl.constexpr, DBIAS_VECTOR: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dq (unless None) and dbias along each direction: dS itself (STORE), or its sums over keys (ROW_SUMS).

    tiles: the number of directions, and the steps from one to the next in dout, delta, dq and dbias.
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
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_head = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    row_reference = tl.load(reference + position, mask=inside, other=float("inf"))
    cotangents = ()
    states = ()
    for g in tl.static_range(0, GROUP):
        n = tl.minimum(n0 + g, last)
        of_dout = direction_of(dout, n, steps[0], V.VECTOR)
        dout_rows = load_rows(of_dout, dout_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
        row_delta = tl.load(direction_of(delta, n, steps[1], 1) + position, mask=inside, other=0.0)
        cotangents = cotangents + ((dout_rows, row_delta),)  # noqa: RUF005  Triton has no unpacking
        states = states + ((zero_chunks(BLOCK_M, D), tl.zeros([BLOCK_M], tl.float32)),)  # noqa: RUF005

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
            s = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
            s, slope = scores(s, i, j, here, span, mod, F, FOLD, part != 1, 0 if part == 1 else F.WINDOW, False)
            weights = load_weights(inputs.weight, strides.weight, at, span, j)
            p, _bare = probabilities(s, row_reference, weights, mod.scale, FOLD, False)
            keep = dropout_keep(inputs, at, sizes, i0, start, mod, F, BLOCK_M, BLOCK_N, False)
            moved = ()
            for g in tl.static_range(0, GROUP):
                plane = None
                if BIAS_GRADIENT == STORE:
                    of_dbias = direction_of(dbias, tl.minimum(n0 + g, last), steps[3], DBIAS_VECTOR)
                    plane = bias_of(of_dbias, dbias_strides, at, span, inputs, sizes, DBIAS_VECTOR, F)
                moved = moved + (  # noqa: RUF005
                    query_direction(
                        states[g], cotangents[g][0], cotangents[g][1], v_rows, k_rows, p, slope, keep, plane, i, j, span, mod, F,
                        PRECISION, BIAS_GRADIENT, DBIAS_VECTOR, dq is not None,
                    ),
                )  # fmt: skip
            states = moved

    for g in tl.static_range(0, GROUP):
        n = tl.minimum(n0 + g, last)
        acc, row_sums = states[g]
        if BIAS_GRADIENT == ROW_SUMS:
            tl.store(direction_of(dbias, n, steps[3], 1) + position, row_sums, mask=inside)
        if dq is not None:
            dq_tile = rows_of(direction_of(dq, n, steps[2], D.VECTOR), dq_strides, at, at.h, row, D.VECTOR)
            store_chunks(dq_tile, dq_strides, rows_left, sizes.head_dim, scale_chunks(acc, mod.scale), BLOCK_M, D)


@triton.jit
def key_direction(
    state, dout_rows, deltas, inside, q_rows, v_rows, kept, p, bare, slope, keep, mod, F: tl.constexpr, PRECISION: tl.constexpr,
    TRANSPOSED: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr, WITH_SUMS: tl.constexpr,
):  # fmt: skip
    """dk, dv and the sums for key weights of one direction after one more tile of queries."""
    acc_k, acc_v, weight_sum = state
    if WITH_DV:
        acc_v = add_product(kept, dout_rows, acc_v, PRECISION)
    if WITH_DK or WITH_SUMS:
        row_delta = load_row(deltas, inside, 0.0, TRANSPOSED)
        dp = drop(score_chunks(dout_rows, v_rows, None, PRECISION, TRANSPOSED), keep, mod)
        dp -= row_delta[None, :] if TRANSPOSED else row_delta[:, None]
        if WITH_SUMS:
            weight_sum += tl.sum(bare * dp, 1 if TRANSPOSED else 0)
        if WITH_DK:
            ds = of_products(p * dp, slope, F).to(q_rows[0].dtype)
            acc_k = add_product(ds if TRANSPOSED else ds.T, q_rows, acc_k, PRECISION)
    return acc_k, acc_v, weight_sum


@kernel
def many_dkdv_kernel(
    inputs, dout, reference, delta, dk, dv, weight_sums,
    strides, dout_strides, dk_strides, dv_strides, sizes, schedule, mod, tiles,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dk, dv, and the sums for the gradient of key weights (fp32, one per key head and key) along each direction; an argument of None is
    not computed.

    tiles: the number of directions, and the steps from one to the next in dout, delta, dk, dv and weight_sums.
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
    states = ()
    for _g in tl.static_range(0, GROUP):
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
        lists = queries_of(j0, head, span, inputs, strides, F.TILES)
        listed = query_steps(lists, edges, BLOCK_M, F.TILES)
        added = addends_of(inputs, strides, head, span, sizes, F)

        for part in tl.static_range(FIRST, LAST):
            # Rows are checked in any case: without a left side of the window, the last rows are in part 1.
            for step in tl.range(listed[part], listed[3 if part == 1 and F.WINDOW < 2 else part + 1], STEP):
                start, here = query_step(added, lists, edges, tl.multiple_of(step, STEP), j0, BLOCK_M, F.TILES)
                i = start + tl.arange(0, BLOCK_M)
                rows_left = span.len_q - start
                inside = i < span.len_q
                q_rows = load_from(q_head, strides.q, start, rows_left, sizes.head_dim, BLOCK_M, D, True)
                s = score_chunks(q_rows, k_rows, None, PRECISION, TRANSPOSED)
                # Rows beyond the queries have reference +inf, too: probability 0.
                row_reference = load_row(reference + statistics + i, inside, float("inf"), TRANSPOSED)
                s, slope = scores(s, i, j, here, span, mod, F, FOLD, False, 0 if part == 1 else F.WINDOW, TRANSPOSED)
                p, bare = probabilities(s, row_reference, weights, mod.scale, FOLD, TRANSPOSED)
                keep = dropout_keep(inputs, head, sizes, start, j0, mod, F, BLOCK_M, BLOCK_N, TRANSPOSED)
                kept = drop(p, keep, mod).to(q_rows[0].dtype)
                kept = kept if TRANSPOSED else kept.T
                moved = ()
                for g in tl.static_range(0, GROUP):
                    n = tl.minimum(n0 + g, last)
                    of_dout = direction_of(dout, n, steps[0], V.VECTOR)
                    dout_head = rows_of(of_dout, dout_strides, at, head.h, span.start_q, V.VECTOR)
                    dout_rows = load_from(dout_head, dout_strides, start, rows_left, sizes.head_dim_v, BLOCK_M, V, True)
                    moved = moved + (  # noqa: RUF005
                        key_direction(
                            states[g], dout_rows, direction_of(delta, n, steps[1], 1) + statistics + i, inside, q_rows, v_rows, kept, p,
                            bare, slope, keep, mod, F, PRECISION, TRANSPOSED, dk is not None, dv is not None, weight_sums is not None,
                        ),
                    )  # fmt: skip
                states = moved

    for g in tl.static_range(0, GROUP):
        n = tl.minimum(n0 + g, last)
        acc_k, acc_v, weight_sum = states[g]
        if weight_sums is not None:
            first = flat_row(at.b, at.hk, sizes.heads_k, span.start_k, sizes.size_k, F.VARLEN)
            tl.store(direction_of(weight_sums, n, steps[4], 1) + first + j, weight_sum, mask=j < span.len_k)
        if dk is not None:
            dk_tile = rows_of(direction_of(dk, n, steps[2], D.VECTOR), dk_strides, at, at.hk, row, D.VECTOR)
            store_chunks(dk_tile, dk_strides, columns_left, sizes.head_dim, scale_chunks(acc_k, mod.scale), BLOCK_N, D)
        if dv is not None:
            dv_tile = rows_of(direction_of(dv, n, steps[3], V.VECTOR), dv_strides, at, at.hk, row, V.VECTOR)
            store_chunks(dv_tile, dv_strides, columns_left, sizes.head_dim_v, acc_v, BLOCK_N, V)
