"""Backward of short rows: dq by rows of queries, dk and dv by rows of keys, rows of many heads in one tile (short_rows.py).

Maths     as in backward_queries.py and backward_keys.py, one pair at a time
Grid      one axis over the rows of all heads
Tiles     the rows that gradients are for stay on chip, with these; those that they meet pass one by one
Limits    bytes: q, k, v and dO twice, out once
"""

import triton.language as tl

from .backward_queries import DISTANCE_SUMS, ROW_SUMS, STORE
from .chunks import rows_of, scale_chunks, zero_chunks
from .coord import HeadCoord
from .kernel import kernel
from .scores import (
    PLANE,
    addends_of,
    bias_of,
    of_addends,
    of_products,
    plane_pointers,
    probabilities,
    reference_of,
    scores,
)
from .short_rows import add_multiple, load_each, load_next, products_of, rows_here, store_at, whole_span


@kernel
def short_delta_kernel(
    dout, out, lse, dlse, reference, delta, dout_strides, out_strides, sizes, rows,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta and reference of every row, as backward_preprocess.py has them. dlse: None, or fp32 like lse."""
    row, inside, at, i = rows_here(tl.program_id(0), rows, sizes.size_q, sizes.heads, sizes.group, sizes.batch1, BLOCK)
    dout_rows = load_each(dout, dout_strides, at, at.h, i[:, None], sizes.head_dim_v, V)
    out_rows = load_each(out, out_strides, at, at.h, i[:, None], sizes.head_dim_v, V)
    row_delta = products_of(dout_rows, out_rows)
    if dlse is not None:
        row_delta -= tl.load(dlse + row)
    row_lse = tl.load(lse + row)
    tl.store(reference + row, reference_of(row_lse, False), mask=inside)
    tl.store(delta + row, tl.where(row_lse == float("-inf"), 0.0, row_delta), mask=inside)


@kernel
def short_dq_kernel(
    inputs, dout, reference, delta, dq, dbias,
    strides, dout_strides, dq_strides, dbias_strides, sizes, rows, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, BIAS_GRADIENT: tl.constexpr,
):  # fmt: skip
    """dq (unless None), and dbias by BIAS_GRADIENT, as backward_queries.py has them."""
    row, inside, at, i = rows_here(tl.program_id(0), rows, sizes.size_q, sizes.heads, sizes.group, sizes.batch1, BLOCK)
    span = whole_span(sizes, mod)
    q_rows = load_each(inputs.q, strides.q, at, at.h, i[:, None], sizes.head_dim, D)
    dout_rows = load_each(dout, dout_strides, at, at.h, i[:, None], sizes.head_dim_v, V)
    k_heads = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_heads = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    added = addends_of(inputs, strides, at, span, sizes, F)
    if BIAS_GRADIENT == STORE:
        dplane = bias_of(dbias, dbias_strides, at, span, inputs, sizes, 0, F)
    row_reference = tl.reshape(tl.load(reference + row), [BLOCK])
    row_delta = tl.load(delta + row)
    row_sum = tl.zeros([BLOCK, 1], tl.float32)
    acc = zero_chunks(BLOCK, D)
    for step in tl.range(0, sizes.size_k):
        j = step + tl.arange(0, 1)
        k_rows = load_next(k_heads, strides.k, j[:, None], sizes.head_dim, D)
        v_rows = load_next(v_heads, strides.v, j[:, None], sizes.head_dim_v, V)
        s, slope = scores(products_of(q_rows, k_rows), i, j, added, span, mod, F, False, False, F.WINDOW, False)
        p, _bare = probabilities(s, row_reference, None, mod.scale, False, False)
        ds = p * (products_of(dout_rows, v_rows) - row_delta)
        of_bias = of_addends(ds, slope, F)
        if BIAS_GRADIENT == STORE:
            places, _there = plane_pointers(dplane, i[:, None], j[None, :], span.len_k, PLANE, 0)
            tl.store(places, of_bias.to(dbias.dtype.element_ty), mask=inside)
        if BIAS_GRADIENT == ROW_SUMS:
            row_sum += of_bias
        if BIAS_GRADIENT == DISTANCE_SUMS:
            row_sum -= of_bias * tl.abs(j[None, :] - i[:, None] - span.shift).to(tl.float32)
        if dq is not None:
            acc = add_multiple(of_products(ds, slope, F), k_rows, acc)
    if BIAS_GRADIENT >= ROW_SUMS:  # one of the sums over keys
        tl.store(dbias + row, row_sum, mask=inside)
    if dq is not None:
        dq_rows = rows_of(dq, dq_strides, at, at.h, i[:, None], D.VECTOR)
        store_at(dq_rows, inside, sizes.head_dim, scale_chunks(acc, mod.scale), D)


@kernel
def short_dkdv_kernel(
    inputs, dout, reference, delta, dk, dv, column_sums,
    strides, dout_strides, dk_strides, dv_strides, sizes, rows, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dk, dv and column_sums, as backward_keys.py has them; an argument of None is not computed."""
    _row, inside, at, j = rows_here(tl.program_id(0), rows, sizes.size_k, sizes.heads_k, 1, sizes.batch1, BLOCK)
    span = whole_span(sizes, mod)
    k_rows = load_each(inputs.k, strides.k, at, at.h, j[:, None], sizes.head_dim, D)
    v_rows = load_each(inputs.v, strides.v, at, at.h, j[:, None], sizes.head_dim_v, V)
    acc_k = zero_chunks(BLOCK, D)
    acc_v = zero_chunks(BLOCK, V)
    for m in tl.range(0, sizes.group):
        head = HeadCoord(at.b, at.b0, at.b1, at.h * sizes.group + m, at.h)
        first = head.b * sizes.heads + head.h
        q_heads = rows_of(inputs.q, strides.q, head, head.h, span.start_q, D.VECTOR)
        dout_heads = rows_of(dout, dout_strides, head, head.h, span.start_q, V.VECTOR)
        added = addends_of(inputs, strides, head, span, sizes, F)
        sums = tl.zeros([BLOCK, 1], tl.float32)
        for step in tl.range(0, sizes.size_q):
            i = step + tl.arange(0, 1)
            q_rows = load_next(q_heads, strides.q, i[:, None], sizes.head_dim, D)
            dout_rows = load_next(dout_heads, dout_strides, i[:, None], sizes.head_dim_v, V)
            row = first * sizes.size_q + i[:, None]
            row_reference = tl.reshape(tl.load(reference + row), [BLOCK])
            row_delta = tl.load(delta + row)
            s, slope = scores(products_of(q_rows, k_rows), i, j, added, span, mod, F, False, False, F.WINDOW, True)
            p, _bare = probabilities(s, row_reference, None, mod.scale, False, False)
            if dv is not None:
                acc_v = add_multiple(p, dout_rows, acc_v)
            ds = p * (products_of(dout_rows, v_rows) - row_delta)
            if column_sums is not None:
                sums += of_addends(ds, slope, F)
            if dk is not None:
                acc_k = add_multiple(of_products(ds, slope, F), q_rows, acc_k)
        if column_sums is not None:
            tl.store(column_sums + first * sizes.size_k + j[:, None], sums, mask=inside)
    if dk is not None:
        dk_rows = rows_of(dk, dk_strides, at, at.h, j[:, None], D.VECTOR)
        store_at(dk_rows, inside, sizes.head_dim, scale_chunks(acc_k, mod.scale), D)
    if dv is not None:
        dv_rows = rows_of(dv, dv_strides, at, at.h, j[:, None], V.VECTOR)
        store_at(dv_rows, inside, sizes.head_dim_v, acc_v, V)
