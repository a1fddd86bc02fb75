"""Backward of short sequences, each in one program: everything is read once, nothing is recomputed.

Maths     as in backward_queries.py, with delta = sum_d dO O - dlse computed here
Grid      one axis over (sequence, key head); a program goes through the query heads of its key head
Tiles     one score tile holds the whole sequence: q, k, v, dO, O in, dq, dk, dv out, 5 products
Limits    bytes; for small sequences the number of programs that the device can start
"""

import triton
import triton.language as tl

from .backward_queries import COLUMN_SUMS, ROW_SUMS, STORE
from .chunks import (
    add_product,
    load_rows,
    row_dot,
    rows_of,
    scale_chunks,
    score_chunks,
    store_chunks,
    store_zero_values,
    store_zeros,
    zero_chunks,
)
from .coord import Span, flat_row, member, whole_sequence
from .dropout import drop, dropout_keep
from .kernel import kernel
from .scores import (
    addends,
    alibi_of,
    bias_of,
    load_weights,
    mask_of,
    of_addends,
    of_products,
    probabilities,
    reference_of,
    scores,
    store_plane,
)


@kernel
def small_backward_kernel(
    inputs, dout, out, lse, dlse, dq, dk, dv, dbias, weight_sums,
    strides, dout_strides, out_strides, dq_strides, dk_strides, dv_strides, dbias_strides, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, BIAS_GRADIENT: tl.constexpr, DBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv; dbias, dS or its sums, by BIAS_GRADIENT; weight_sums unless None."""
    at, span = whole_sequence(tl.program_id(0), inputs, sizes, mod, F.VARLEN)
    if F.VARLEN:
        if (at.b < 0) | (at.b >= sizes.sequences):  # rows of no sequence
            store_zeros(dk, dk_strides, at, at.hk, span.start_k, span.len_k, sizes.head_dim, BLOCK, D)
            store_zeros(dv, dv_strides, at, at.hk, span.start_k, span.len_k, sizes.head_dim_v, BLOCK, V)
            for m in tl.range(0, sizes.group):
                h = at.h + m
                store_zeros(dq, dq_strides, at, h, span.start_q, span.len_q, sizes.head_dim, BLOCK, D)
                if BIAS_GRADIENT == COLUMN_SUMS:
                    first = flat_row(at.b, h, sizes.heads, span.start_k, sizes.size_k, True)
                    store_zero_values(dbias, first, span.len_k, BLOCK)
            first = flat_row(at.b, at.hk, sizes.heads_k, span.start_k, sizes.size_k, True)
            store_zero_values(weight_sums, first, span.len_k, BLOCK)
            return
        # Even with wrong cu_seqlens, a program stays within its tile.
        span = within_tile(span, mod, BLOCK)
    i = tl.arange(0, BLOCK)

    k_rows = load_rows(inputs.k, strides.k, at, at.hk, span.start_k, span.len_k, sizes.head_dim, BLOCK, D)
    v_rows = load_rows(inputs.v, strides.v, at, at.hk, span.start_k, span.len_k, sizes.head_dim_v, BLOCK, V)
    acc_k = zero_chunks(BLOCK, D)
    acc_v = zero_chunks(BLOCK, V)
    weights = load_weights(inputs.weight, strides.weight, at, span, i)
    weight_sum = tl.zeros([BLOCK], tl.float32)

    for m in tl.range(0, sizes.group):
        head = member(at, m)
        bias = bias_of(inputs.bias, strides.bias, head, span, inputs, sizes, F.BIAS_VECTOR, F)
        q_rows, ds, slope, acc_v, bare = head_scores(
            inputs, dout, out, lse, dlse, head, span, k_rows, v_rows, acc_v, bias, weights,
            strides, dout_strides, out_strides, sizes, mod, F, D, V, FOLD, PRECISION, BLOCK,
        )  # fmt: skip
        if weight_sums is not None:
            weight_sum += tl.sum(bare, 0)
        of_bias = of_addends(ds, slope, F)
        if BIAS_GRADIENT == STORE:
            dplane = bias_of(dbias, dbias_strides, head, span, inputs, sizes, DBIAS_VECTOR, F)
            store_plane(dplane, i, i, span.len_k, of_bias, DBIAS_VECTOR)
        elif BIAS_GRADIENT == ROW_SUMS:
            first = flat_row(at.b, head.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN)
            tl.store(dbias + first + i, tl.sum(of_bias, 1), mask=i < span.len_q)
        elif BIAS_GRADIENT == COLUMN_SUMS:
            column = flat_row(at.b, head.h, sizes.heads, span.start_k, sizes.size_k, F.VARLEN)
            tl.store(dbias + column + i, tl.sum(of_bias, 0), mask=i < span.len_k)
        acc_k = head_products(
            dq, dq_strides, head, span, q_rows, k_rows, ds, slope, acc_k, sizes, mod, F, D, PRECISION, BLOCK
        )

    if weight_sums is not None:
        first = flat_row(at.b, at.hk, sizes.heads_k, span.start_k, sizes.size_k, F.VARLEN)
        tl.store(weight_sums + first + i, weight_sum, mask=i < span.len_k)
    dk_tile = rows_of(dk, dk_strides, at, at.hk, span.start_k, D.VECTOR)
    dv_tile = rows_of(dv, dv_strides, at, at.hk, span.start_k, V.VECTOR)
    acc_k = scale_chunks(acc_k, mod.scale)
    store_chunks(dk_tile, dk_strides, span.len_k, sizes.head_dim, acc_k, BLOCK, D)
    store_chunks(dv_tile, dv_strides, span.len_k, sizes.head_dim_v, acc_v, BLOCK, V)


@triton.jit
def head_scores(
    inputs, dout, out, lse, dlse, at, span, k_rows, v_rows, acc_v, bias, weights,
    strides, dout_strides, out_strides, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Values of one query head; the other arguments belong to its key head. bias: as `scores` takes it.

    They are: rows of q, dS [BLOCK, BLOCK], slope of the softcap, the sum of P^T dO with its part added, and the terms
    of the gradient of key weights.
    """
    i = tl.arange(0, BLOCK)
    inside = i < span.len_q
    first = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN)
    q_rows = load_rows(inputs.q, strides.q, at, at.h, span.start_q, span.len_q, sizes.head_dim, BLOCK, D)
    dout_rows = load_rows(dout, dout_strides, at, at.h, span.start_q, span.len_q, sizes.head_dim_v, BLOCK, V)
    out_rows = load_rows(out, out_strides, at, at.h, span.start_q, span.len_q, sizes.head_dim_v, BLOCK, V)
    row_delta = row_dot(dout_rows, out_rows)
    s = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK, BLOCK]
    dp = score_chunks(dout_rows, v_rows, None, PRECISION, False)
    if dlse is not None:
        row_delta -= tl.load(dlse + first + i, mask=inside, other=0.0)
    # Rows without keys and beyond the queries get reference +inf: their probabilities are 0.
    row_lse = tl.load(lse + first + i, mask=inside, other=float("-inf"))
    row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)
    row_reference = reference_of(row_lse, FOLD)

    added = addends(bias, mask_of(inputs, strides, at, span, F), alibi_of(inputs, strides, at, sizes, F))
    s, slope = scores(s, i, i, added, span, mod, F, FOLD, True, F.WINDOW, False)
    p, bare = probabilities(s, row_reference, weights, mod.scale, FOLD, False)
    keep = dropout_keep(inputs, at, sizes, 0, 0, mod, F, BLOCK, BLOCK, False)
    kept = drop(p, keep, mod)
    dp = drop(dp, keep, mod)
    acc_v = add_product(kept.to(dout_rows[0].dtype).T, dout_rows, acc_v, PRECISION)
    dp -= row_delta[:, None]
    return q_rows, p * dp, slope, acc_v, bare * dp


@triton.jit
def head_products(
    dq, dq_strides, at, span, q_rows, k_rows, ds, slope, acc_k, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores dq of one query head, and returns the sum of dS^T q with its part added."""
    ds = of_products(ds, slope, F).to(q_rows[0].dtype)
    dq_tile = rows_of(dq, dq_strides, at, at.h, span.start_q, D.VECTOR)
    dq_rows = scale_chunks(add_product(ds, k_rows, zero_chunks(BLOCK, D), PRECISION), mod.scale)
    store_chunks(dq_tile, dq_strides, span.len_q, sizes.head_dim, dq_rows, BLOCK, D)
    return add_product(ds.T, q_rows, acc_k, PRECISION)


@triton.jit
def within_tile(span, mod, BLOCK: tl.constexpr):
    """The span cut to at most the first BLOCK rows of a sequence."""
    len_q = tl.minimum(span.len_q, BLOCK)
    len_k = tl.minimum(span.len_k, BLOCK)
    shift = (len_k - len_q) * mod.lower_right
    return Span(span.start_q, len_q, span.start_k, len_k, shift)
