"""Double backward of short sequences, each in one program: everything is read once, nothing is recomputed.

Maths     see tangents.py; the row sums m, delta and zeta are computed here, so T is centred at once
Grid      as in backward_small.py: one axis over (sequence, key head); a program goes through the query heads of its key head
Tiles     one score tile holds the whole sequence: q, tq, k, tk, v, tv, dO, O in, gq, gk, gv, tO out, 12 products
Limits    bytes, and registers: four score tiles at once
"""

import triton.language as tl

from .backward_queries import COLUMN_SUMS, ROW_SUMS, STORE
from .backward_small import within_tile
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
from .coord import flat_row, member, whole_sequence
from .dropout import drop, dropout_keep
from .kernel import kernel
from .scores import addends_of, bias_of, load_weights, probabilities, reference_of, scores, store_plane
from .tangents import add_moved, second_order, softcap_bend, tangent_scores


@kernel
def double_backward_small_kernel(
    inputs, tangents, out, lse, dout, dlse, gq, gk, gv, gbias, weight_sums, tout, mean,
    strides, tangent_strides, out_strides, dout_strides, gq_strides, gk_strides, gv_strides, tout_strides, gbias_strides,
    sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, GBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    """gq, gk, gv, gbias (or its sums), weight_sums (gw, one per key head and key), tout, mean; None is not
    computed."""
    at, span = whole_sequence(tl.program_id(0), inputs, sizes, mod, F.VARLEN)
    if F.VARLEN:
        if (at.b < 0) | (at.b >= sizes.sequences):  # rows of no sequence
            store_zeros(gk, gk_strides, at, at.hk, span.start_k, span.len_k, sizes.head_dim, BLOCK, D)
            store_zeros(gv, gv_strides, at, at.hk, span.start_k, span.len_k, sizes.head_dim_v, BLOCK, V)
            for m in tl.range(0, sizes.group):
                h = at.h + m
                store_zeros(gq, gq_strides, at, h, span.start_q, span.len_q, sizes.head_dim, BLOCK, D)
                store_zeros(tout, tout_strides, at, h, span.start_q, span.len_q, sizes.head_dim_v, BLOCK, V)
                first = flat_row(at.b, h, sizes.heads, span.start_q, sizes.size_q, True)
                store_zero_values(mean, first, span.len_q, BLOCK)
                if BIAS_GRADIENT == COLUMN_SUMS:
                    first = flat_row(at.b, h, sizes.heads, span.start_k, sizes.size_k, True)
                    store_zero_values(gbias, first, span.len_k, BLOCK)
            first = flat_row(at.b, at.hk, sizes.heads_k, span.start_k, sizes.size_k, True)
            store_zero_values(weight_sums, first, span.len_k, BLOCK)
            return
        # Even with wrong cu_seqlens, a program stays within its tile.
        span = within_tile(span, mod, BLOCK)
    UNBOUNDED: tl.constexpr = tangents.weight is not None
    i = tl.arange(0, BLOCK)
    inside = i < span.len_q

    k_rows = load_rows(inputs.k, strides.k, at, at.hk, span.start_k, span.len_k, sizes.head_dim, BLOCK, D)
    v_rows = load_rows(inputs.v, strides.v, at, at.hk, span.start_k, span.len_k, sizes.head_dim_v, BLOCK, V)
    tk_rows = load_rows(tangents.k, tangent_strides.k, at, at.hk, span.start_k, span.len_k, sizes.head_dim, BLOCK, D)
    tv_rows = load_rows(tangents.v, tangent_strides.v, at, at.hk, span.start_k, span.len_k, sizes.head_dim_v, BLOCK, V)
    acc_k = zero_chunks(BLOCK, D)
    acc_v = zero_chunks(BLOCK, V)
    weights = load_weights(inputs.weight, strides.weight, at, span, i)
    tweights = load_weights(tangents.weight, tangent_strides.weight, at, span, i)
    weight_sum = tl.zeros([BLOCK], tl.float32)

    for m in tl.range(0, sizes.group):
        head = member(at, m)
        position = flat_row(at.b, head.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN) + i
        q_rows = load_rows(inputs.q, strides.q, at, head.h, span.start_q, span.len_q, sizes.head_dim, BLOCK, D)
        tq_rows = load_rows(
            tangents.q, tangent_strides.q, at, head.h, span.start_q, span.len_q, sizes.head_dim, BLOCK, D
        )
        dout_rows = load_rows(dout, dout_strides, at, head.h, span.start_q, span.len_q, sizes.head_dim_v, BLOCK, V)
        out_rows = load_rows(out, out_strides, at, head.h, span.start_q, span.len_q, sizes.head_dim_v, BLOCK, V)
        added = addends_of(inputs, strides, head, span, sizes, F)
        tbias = bias_of(tangents.bias, tangent_strides.bias, head, span, inputs, sizes, TBIAS_VECTOR, F)

        products = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK, BLOCK]
        s, slope = scores(products, i, i, added, span, mod, F, FOLD, True, F.WINDOW, False)
        row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
        reference = reference_of(row_lse, FOLD)
        p, bare = probabilities(s, reference, weights, mod.scale, FOLD, False)
        t, raw_t = tangent_scores(
            products, q_rows, k_rows, tq_rows, tk_rows, slope, i, i, tbias, span, mod, F,
            TBIAS, TBIAS_VECTOR, PRECISION, False,
        )  # fmt: skip
        row_mean = tl.sum(p * t, 1)
        if tweights is not None:
            kept_extra = bare * tweights[None, :]
            row_mean += tl.sum(kept_extra, 1)
        dp = score_chunks(dout_rows, v_rows, None, PRECISION, False)
        tdp = tl.zeros([BLOCK, BLOCK], tl.float32)
        if tv_rows is not None:
            tdp = score_chunks(dout_rows, tv_rows, None, PRECISION, False)
        keep = dropout_keep(inputs, head, sizes, 0, 0, mod, F, BLOCK, BLOCK, False)
        kept = drop(p, keep, mod)
        dp = drop(dp, keep, mod)
        tdp = drop(tdp, keep, mod)
        if tweights is not None:
            kept_extra = drop(kept_extra, keep, mod)
        w_kept = kept * (t - row_mean[:, None])
        if tweights is not None:
            w_kept += kept_extra
        tout_rows = zero_chunks(BLOCK, V)
        tout_rows = add_moved(w_kept, v_rows, tout_rows, PRECISION, False, UNBOUNDED)
        if tv_rows is not None:
            tout_rows = add_product(kept, tv_rows, tout_rows, PRECISION)
        acc_v = add_moved(w_kept, dout_rows, acc_v, PRECISION, True, UNBOUNDED)
        row_delta = row_dot(dout_rows, out_rows)
        if dlse is not None:
            row_delta -= tl.load(dlse + position, mask=inside, other=0.0)
        row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)
        row_zeta = row_dot(dout_rows, tout_rows)
        if tout is not None:
            tout_tile = rows_of(tout, tout_strides, at, head.h, span.start_q, V.VECTOR)
            store_chunks(tout_tile, tout_strides, span.len_q, sizes.head_dim_v, tout_rows, BLOCK, V)
        if mean is not None:
            tl.store(mean + position, row_mean, mask=inside)

        bend = softcap_bend(products, s, slope, mod, F)
        _w, f, e_raw, f_raw, g = second_order(
            p, bare, t, raw_t, tweights, dp - row_delta[:, None], tdp - row_zeta[:, None], row_mean, slope, bend, F, False
        )  # fmt: skip
        if weight_sums is not None:
            weight_sum += tl.sum(g, 0)
        if BIAS_GRADIENT == STORE:
            gplane = bias_of(gbias, gbias_strides, head, span, inputs, sizes, GBIAS_VECTOR, F)
            store_plane(gplane, i, i, span.len_k, f, GBIAS_VECTOR)
        if BIAS_GRADIENT == ROW_SUMS:
            tl.store(gbias + position, tl.sum(f, 1), mask=inside)
        if BIAS_GRADIENT == COLUMN_SUMS:
            first = flat_row(at.b, head.h, sizes.heads, span.start_k, sizes.size_k, F.VARLEN)
            tl.store(gbias + first + i, tl.sum(f, 0), mask=i < span.len_k)
        e_raw = e_raw.to(q_rows[0].dtype)
        if gq is not None:
            acc_q = zero_chunks(BLOCK, D)
            acc_q = add_moved(f_raw, k_rows, acc_q, PRECISION, False, UNBOUNDED)
            if tk_rows is not None:
                acc_q = add_product(e_raw, tk_rows, acc_q, PRECISION)
            gq_tile = rows_of(gq, gq_strides, at, head.h, span.start_q, D.VECTOR)
            acc_q = scale_chunks(acc_q, mod.scale)
            store_chunks(gq_tile, gq_strides, span.len_q, sizes.head_dim, acc_q, BLOCK, D)
        if gk is not None:
            acc_k = add_moved(f_raw, q_rows, acc_k, PRECISION, True, UNBOUNDED)
            if tq_rows is not None:
                acc_k = add_product(e_raw.T, tq_rows, acc_k, PRECISION)

    if weight_sums is not None:
        first = flat_row(at.b, at.hk, sizes.heads_k, span.start_k, sizes.size_k, F.VARLEN)
        tl.store(weight_sums + first + i, weight_sum, mask=i < span.len_k)
    if gk is not None:
        gk_tile = rows_of(gk, gk_strides, at, at.hk, span.start_k, D.VECTOR)
        acc_k = scale_chunks(acc_k, mod.scale)
        store_chunks(gk_tile, gk_strides, span.len_k, sizes.head_dim, acc_k, BLOCK, D)
    if gv is not None:
        gv_tile = rows_of(gv, gv_strides, at, at.hk, span.start_k, V.VECTOR)
        store_chunks(gv_tile, gv_strides, span.len_k, sizes.head_dim_v, acc_v, BLOCK, V)
