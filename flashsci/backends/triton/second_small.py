"""Double backward of short sequences, each in one program: everything is read once, nothing is recomputed.

Maths     see tangents.py; the row sums m, delta and zeta are worked out here, so T is centred at once
Grid      as in backward_small.py: one axis over (sequence, key head); a program goes through the query heads of its key head
Tiles     one score tile holds the whole sequence: q, tq, k, tk, v, tv, dO, O in, gq, gk, gv, tO out, 12 products
Limits    bytes, and registers: four score tiles at once
"""

import triton
import triton.language as tl

from .backward_queries import ROW_SUMS, STORE
from .backward_small import COLUMN_SUMS, packed_rows, store_zero_values, store_zeros
from .chunks import (
    add_product,
    load_chunks,
    row_dot,
    rows_of,
    score_chunks,
    statistics_row,
    store_chunks,
    zero_chunks,
)
from .tangents import (
    RUNTIME_SECOND,
    second_order,
    softcap_bend,
    tangent_scores,
)
from .tile import (
    PLANE,
    dropout_keep,
    head_pointer,
    load_weights,
    plane_place,
    plane_pointers,
    probabilities,
    reference_of,
    scores,
)


@triton.jit
def store_zero_rows(
    pointer, strides, b0, b1, h, start, length, width,
    ROWS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    if pointer is not None:
        head = head_pointer(pointer, strides, b0, b1, h, VECTOR)
        store_zeros(head, strides, start, length, width, ROWS, W0, W1, VECTOR)


@triton.jit(do_not_specialize=RUNTIME_SECOND)
def second_small_kernel(
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, out, lse, dout, dlse, tq, tk, tv, tbias, tweight,
    gq, gk, gv, gbias, weight_sums, tout, mean,
    q_strides, k_strides, v_strides, out_strides, dout_strides, tq_strides, tk_strides, tv_strides,
    gq_strides, gk_strides, gv_strides, tout_strides,  # of (b0, b1, head, row)
    weight_strides, tweight_strides,  # of (b0, b1, key head, key)
    bias_strides, mask_strides, tbias_strides, gbias_strides,  # of (b0, b1, head, row, column)
    bias_total, batch1, heads, group, sequences,  # heads: of keys
    size_q, size_k, head_dim, head_dim_v,
    scale, softcap, left, right, lower_right, threshold, keep_scale,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, RAGGED: tl.constexpr,
    MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BLOCK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, GBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    """What of gq, gk, gv, gbias (or its sums), weight_sums (gw, one per key head and key), tout, mean is not None."""
    pid = tl.program_id(0)
    hk = pid % heads
    i = tl.arange(0, BLOCK)
    if PACKED:
        b = pid // heads - 1
        start_q, len_q = packed_rows(cu_seqlens_q, b, sequences, size_q)
        start_k, len_k = packed_rows(cu_seqlens_k, b, sequences, size_k)
        b0 = tl.full([], 0, tl.int32)
        b1 = b0
        if (b < 0) | (b >= sequences):  # rows of no sequence
            store_zero_rows(
                gk, gk_strides, b0, b1, hk, start_k, len_k, head_dim, BLOCK, D0, D1, VECTOR
            )
            store_zero_rows(
                gv, gv_strides, b0, b1, hk, start_k, len_k, head_dim_v, BLOCK, V0, V1, VECTOR
            )
            for member in tl.range(0, group):
                h = hk * group + member
                store_zero_rows(
                    gq, gq_strides, b0, b1, h, start_q, len_q, head_dim, BLOCK, D0, D1, VECTOR
                )
                store_zero_rows(
                    tout, tout_strides, b0, b1, h, start_q, len_q, head_dim_v, BLOCK, V0, V1, VECTOR
                )
                if mean is not None:
                    store_zero_values(mean + h.to(tl.int64) * size_q + start_q, len_q, BLOCK)
                if BIAS_GRADIENT == COLUMN_SUMS:
                    store_zero_values(gbias + h.to(tl.int64) * size_k + start_k, len_k, BLOCK)
            if weight_sums is not None:
                store_zero_values(weight_sums + hk.to(tl.int64) * size_k + start_k, len_k, BLOCK)
            return
        # Whatever cu_seqlens says, a program stays within its tile.
        len_q = tl.minimum(len_q, BLOCK)
        len_k = tl.minimum(len_k, BLOCK)
    else:
        b = pid // heads
        b0 = b // batch1
        b1 = b % batch1
        start_q = tl.full([], 0, tl.int32)
        start_k = start_q
        len_q = size_q
        len_k = size_k
    shift = (len_k - len_q) * lower_right
    inside = i < len_q

    k_tile = rows_of(k, k_strides, b0, b1, hk, start_k, VECTOR)
    k_rows = load_chunks(k_tile, k_strides, len_k, head_dim, BLOCK, D0, D1, EVEN_D, VECTOR, True)
    v_tile = rows_of(v, v_strides, b0, b1, hk, start_k, VECTOR)
    v_rows = load_chunks(v_tile, v_strides, len_k, head_dim_v, BLOCK, V0, V1, EVEN_V, VECTOR, True)
    tk_rows = None
    if tk is not None:
        tk_tile = rows_of(tk, tk_strides, b0, b1, hk, start_k, VECTOR)
        tk_rows = load_chunks(
            tk_tile, tk_strides, len_k, head_dim, BLOCK, D0, D1, EVEN_D, VECTOR, True
        )
    if tv is not None:
        tv_tile = rows_of(tv, tv_strides, b0, b1, hk, start_k, VECTOR)
        tv_rows = load_chunks(
            tv_tile, tv_strides, len_k, head_dim_v, BLOCK, V0, V1, EVEN_V, VECTOR, True
        )
    acc_k = zero_chunks(BLOCK, D0, D1)
    acc_v = zero_chunks(BLOCK, V0, V1)

    weights = None
    tweights = None
    if weight is not None:
        weights = load_weights(weight, weight_strides, b0, b1, hk, start_k, i, len_k)
    if tweight is not None:
        tweights = load_weights(tweight, tweight_strides, b0, b1, hk, start_k, i, len_k)
    weight_sum = tl.zeros([BLOCK], tl.float32)

    for member in tl.range(0, group):
        h = hk * group + member
        position = statistics_row(b, h, heads * group, start_q, size_q, PACKED) + i
        q_tile = rows_of(q, q_strides, b0, b1, h, start_q, VECTOR)
        q_rows = load_chunks(
            q_tile, q_strides, len_q, head_dim, BLOCK, D0, D1, EVEN_D, VECTOR, True
        )
        tq_rows = None
        if tq is not None:
            tq_tile = rows_of(tq, tq_strides, b0, b1, h, start_q, VECTOR)
            tq_rows = load_chunks(
                tq_tile, tq_strides, len_q, head_dim, BLOCK, D0, D1, EVEN_D, VECTOR, True
            )
        dout_tile = rows_of(dout, dout_strides, b0, b1, h, start_q, VECTOR)
        dout_rows = load_chunks(
            dout_tile, dout_strides, len_q, head_dim_v, BLOCK, V0, V1, EVEN_V, VECTOR, True
        )
        out_tile = rows_of(out, out_strides, b0, b1, h, start_q, VECTOR)
        out_rows = load_chunks(
            out_tile, out_strides, len_q, head_dim_v, BLOCK, V0, V1, EVEN_V, VECTOR, True
        )
        plane, plane_strides, bias_rows = bias, bias_strides, len_q
        tplane, tplane_strides = tbias, tbias_strides
        mask_head, mask_head_strides = mask, mask_strides
        if BIAS:
            plane, plane_strides, bias_rows = plane_place(
                bias, bias_strides, b0, b1, h, b, start_k, len_q, len_k, bias_offsets, bias_total, BIAS_VECTOR, RAGGED
            )  # fmt: skip
        if TBIAS:
            tplane, tplane_strides, _rows = plane_place(
                tbias, tbias_strides, b0, b1, h, b, start_k, len_q, len_k, bias_offsets, bias_total, TBIAS_VECTOR, RAGGED
            )  # fmt: skip
        if MASK:
            mask_head, mask_head_strides, _rows = plane_place(
                mask, mask_strides, b0, b1, h, b, start_k, len_q, len_k, None, 0, MASK_VECTOR, False
            )

        products = score_chunks(q_rows, k_rows, None, D1, PRECISION, False)  # [BLOCK, BLOCK]
        s, slope = scores(
            products, i, i, plane, plane_strides, bias_rows, mask_head, mask_head_strides, len_q, len_k, shift, left, right,
            scale, softcap, True, WINDOW, SOFTCAP, q_rows[0].dtype == tl.float32, FOLD, BIAS, BIAS_VECTOR, MASK, MASK_VECTOR,
            False,
        )  # fmt: skip
        row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
        reference = reference_of(row_lse, FOLD)[:, None]
        p, bare = probabilities(s, reference, weights, scale, FOLD, False)
        t, raw_t = tangent_scores(
            q_rows, k_rows, tq_rows, tk_rows, slope, i, i, tplane, tplane_strides, bias_rows, len_k, scale,
            BLOCK, BLOCK, D1, SOFTCAP, TBIAS, TBIAS_VECTOR, PRECISION, False,
        )  # fmt: skip
        row_mean = tl.sum(p * t, 1)
        kept = p
        if tweight is not None:
            kept_extra = bare * tweights[None, :]
            row_mean += tl.sum(kept_extra, 1)
        dp = score_chunks(dout_rows, v_rows, None, V1, PRECISION, False)
        tdp = tl.zeros([BLOCK, BLOCK], tl.float32)
        if tv is not None:
            tdp = score_chunks(dout_rows, tv_rows, None, V1, PRECISION, False)
        if DROPOUT:
            stream = (b * heads + hk) * group + member
            keep = dropout_keep(dropout_seed, stream, 0, 0, threshold, BLOCK, BLOCK, False)
            kept = tl.where(keep, p * keep_scale, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0)
            tdp = tl.where(keep, tdp * keep_scale, 0.0)
            if tweight is not None:
                kept_extra = tl.where(keep, kept_extra * keep_scale, 0.0)
        w_kept = kept * (t - row_mean[:, None])
        if tweight is not None:
            w_kept += kept_extra
        w_kept = w_kept.to(q_rows[0].dtype)
        tout_rows = add_product(w_kept, v_rows, zero_chunks(BLOCK, V0, V1), V1, PRECISION)
        if tv is not None:
            tout_rows = add_product(kept, tv_rows, tout_rows, V1, PRECISION)
        acc_v = add_product(w_kept.T, dout_rows, acc_v, V1, PRECISION)
        row_delta = row_dot(dout_rows, out_rows, V1)
        if dlse is not None:
            row_delta -= tl.load(dlse + position, mask=inside, other=0.0)
        row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)
        row_zeta = row_dot(dout_rows, tout_rows, V1)
        if tout is not None:
            tout_tile = rows_of(tout, tout_strides, b0, b1, h, start_q, VECTOR)
            store_chunks(
                tout_tile, tout_strides, len_q, head_dim_v, tout_rows, BLOCK, V0, V1, VECTOR
            )
        if mean is not None:
            tl.store(mean + position, row_mean, mask=inside)

        bend = 0.0
        if SOFTCAP:
            bend = softcap_bend(products, slope, scale, softcap, q_rows[0].dtype == tl.float32)
        _w, f, e_raw, f_raw, g = second_order(
            p, bare, t, raw_t, tweights, dp, tdp, row_mean, row_delta, row_zeta, slope, bend, SOFTCAP, False
        )  # fmt: skip
        if weight_sums is not None:
            weight_sum += tl.sum(g, 0)
        if BIAS_GRADIENT == STORE:
            gplane, gplane_strides, _rows = plane_place(
                gbias, gbias_strides, b0, b1, h, b, start_k, len_q, len_k, bias_offsets, bias_total, GBIAS_VECTOR, RAGGED
            )  # fmt: skip
            pointers, found = plane_pointers(
                gplane,
                gplane_strides,
                i[:, None],
                i[None, :],
                bias_rows,
                len_k,
                PLANE,
                GBIAS_VECTOR,
            )
            tl.store(pointers, f.to(gbias.dtype.element_ty), mask=found)
        if BIAS_GRADIENT == ROW_SUMS:
            tl.store(gbias + position, tl.sum(f, 1), mask=inside)
        if BIAS_GRADIENT == COLUMN_SUMS:
            first = statistics_row(b, h, heads * group, start_k, size_k, PACKED)
            tl.store(gbias + first + i, tl.sum(f, 0), mask=i < len_k)
        f_raw = f_raw.to(q_rows[0].dtype)
        e_raw = e_raw.to(q_rows[0].dtype)
        if gq is not None:
            acc_q = add_product(f_raw, k_rows, zero_chunks(BLOCK, D0, D1), D1, PRECISION)
            if tk is not None:
                acc_q = add_product(e_raw, tk_rows, acc_q, D1, PRECISION)
            gq_tile = rows_of(gq, gq_strides, b0, b1, h, start_q, VECTOR)
            acc_q = (acc_q[0] * scale, acc_q[1] * scale)
            store_chunks(gq_tile, gq_strides, len_q, head_dim, acc_q, BLOCK, D0, D1, VECTOR)
        if gk is not None:
            acc_k = add_product(f_raw.T, q_rows, acc_k, D1, PRECISION)
            if tq is not None:
                acc_k = add_product(e_raw.T, tq_rows, acc_k, D1, PRECISION)

    if weight_sums is not None:
        first = hk.to(tl.int64) if PACKED else b.to(tl.int64) * heads + hk
        tl.store(weight_sums + first * size_k + start_k + i, weight_sum, mask=i < len_k)
    if gk is not None:
        gk_tile = rows_of(gk, gk_strides, b0, b1, hk, start_k, VECTOR)
        acc_k = (acc_k[0] * scale, acc_k[1] * scale)
        store_chunks(gk_tile, gk_strides, len_k, head_dim, acc_k, BLOCK, D0, D1, VECTOR)
    if gv is not None:
        gv_tile = rows_of(gv, gv_strides, b0, b1, hk, start_k, VECTOR)
        store_chunks(gv_tile, gv_strides, len_k, head_dim_v, acc_v, BLOCK, V0, V1, VECTOR)
