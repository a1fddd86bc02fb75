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
    load_chunks,
    rows_of,
    score_chunks,
    statistics_row,
    store_chunks,
    tile_place,
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
    aligned,
    dropout_keep,
    key_range,
    load_weights,
    plane_place,
    plane_pointers,
    probabilities,
    reference_of,
    scores,
)


@triton.jit(do_not_specialize=RUNTIME_SECOND)
def second_queries_kernel(
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, lse, dout, tq, tk, tv, tbias, tweight,
    mean, delta, zeta, gq, gbias,
    q_strides, k_strides, v_strides, dout_strides, tq_strides, tk_strides, tv_strides, gq_strides,
    weight_strides, tweight_strides,  # of (b0, b1, key head, key)
    bias_strides, mask_strides, tbias_strides, gbias_strides,  # of (b0, b1, head, row, column); above of (b0, b1, head, row)
    bias_total, batch1, heads, group, heads_total, section, tiles, sequences,
    size_q, size_k, head_dim, head_dim_v,
    scale, softcap, left, right, lower_right, threshold, keep_scale,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, RAGGED: tl.constexpr,
    MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, GBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    """gq (unless None), and gbias if it is F itself (STORE) or its sums over keys (ROW_SUMS, fp32, one per query row)."""
    i0, b, b0, b1, h, start_q, len_q, start_k, len_k = tile_place(
        tl.program_id(0), cu_seqlens_q, cu_seqlens_k, batch1, heads, heads_total, section, tiles, sequences, size_q, size_k,
        BLOCK_M, PACKED, WINDOW >= 1,
    )  # fmt: skip
    if i0 >= len_q:
        return
    i = i0 + tl.arange(0, BLOCK_M)
    row = start_q + i0
    rows_left = len_q - i0
    shift = (len_k - len_q) * lower_right
    position = statistics_row(b, h, heads, start_q, size_q, PACKED) + i
    inside = i < len_q
    bias_rows = len_q
    if BIAS:
        bias, bias_strides, bias_rows = plane_place(
            bias, bias_strides, b0, b1, h, b, start_k, len_q, len_k, bias_offsets, bias_total, BIAS_VECTOR, RAGGED
        )  # fmt: skip
    if TBIAS:
        tbias, tbias_strides, _rows = plane_place(
            tbias, tbias_strides, b0, b1, h, b, start_k, len_q, len_k, bias_offsets, bias_total, TBIAS_VECTOR, RAGGED
        )  # fmt: skip
    if BIAS_GRADIENT == STORE:
        gbias, gbias_strides, _rows = plane_place(
            gbias, gbias_strides, b0, b1, h, b, start_k, len_q, len_k, bias_offsets, bias_total, GBIAS_VECTOR, RAGGED
        )  # fmt: skip
    if MASK:
        mask, mask_strides, _rows = plane_place(
            mask, mask_strides, b0, b1, h, b, start_k, len_q, len_k, None, 0, MASK_VECTOR, False
        )

    q_tile = rows_of(q, q_strides, b0, b1, h, row, VECTOR)
    q_rows = load_chunks(
        q_tile, q_strides, rows_left, head_dim, BLOCK_M, D0, D1, EVEN_D, VECTOR, True
    )
    tq_rows = None
    if tq is not None:
        tq_tile = rows_of(tq, tq_strides, b0, b1, h, row, VECTOR)
        tq_rows = load_chunks(
            tq_tile, tq_strides, rows_left, head_dim, BLOCK_M, D0, D1, EVEN_D, VECTOR, True
        )
    dout_tile = rows_of(dout, dout_strides, b0, b1, h, row, VECTOR)
    dout_rows = load_chunks(
        dout_tile, dout_strides, rows_left, head_dim_v, BLOCK_M, V0, V1, EVEN_V, VECTOR, True
    )
    k_head = rows_of(k, k_strides, b0, b1, h // group, start_k, VECTOR)
    v_head = rows_of(v, v_strides, b0, b1, h // group, start_k, VECTOR)
    if tk is not None:
        tk_head = rows_of(tk, tk_strides, b0, b1, h // group, start_k, VECTOR)
    if tv is not None:
        tv_head = rows_of(tv, tv_strides, b0, b1, h // group, start_k, VECTOR)
    row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
    reference = reference_of(row_lse, FOLD)
    row_mean = tl.load(mean + position, mask=inside, other=0.0)
    row_delta = tl.load(delta + position, mask=inside, other=0.0)
    row_zeta = tl.load(zeta + position, mask=inside, other=0.0)
    row_sums = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_chunks(BLOCK_M, D0, D1)

    low, whole, cut, high = key_range(
        i0, tl.minimum(i0 + BLOCK_M, len_q), len_k, shift, left, right, BLOCK_N, WINDOW
    )
    for part in tl.static_range(0 if WINDOW == 2 else 1, 3):  # as in forward.py
        if part == 0:
            begin, end = low, whole
        elif part == 1:
            begin, end = whole, cut
        else:
            begin, end = cut, high
        for start in tl.range(begin, end, BLOCK_N):
            start = tl.multiple_of(start, BLOCK_N)
            j = start + tl.arange(0, BLOCK_N)
            keys_left = len_k - start
            step = start.to(tl.int64)
            k_rows = load_chunks(
                k_head + step * aligned(k_strides[3], VECTOR), k_strides, keys_left, head_dim,
                BLOCK_N, D0, D1, EVEN_D, VECTOR, part != 1,
            )  # fmt: skip
            tk_rows = None
            if tk is not None:
                tk_rows = load_chunks(
                    tk_head + step * aligned(tk_strides[3], VECTOR), tk_strides, keys_left, head_dim,
                    BLOCK_N, D0, D1, EVEN_D, VECTOR, part != 1,
                )  # fmt: skip
            v_rows = load_chunks(
                v_head + step * aligned(v_strides[3], VECTOR), v_strides, keys_left, head_dim_v,
                BLOCK_N, V0, V1, EVEN_V, VECTOR, part != 1,
            )  # fmt: skip
            products = score_chunks(
                q_rows, k_rows, None, D1, PRECISION, False
            )  # [BLOCK_M, BLOCK_N]
            s, slope = scores(
                products, i, j, bias, bias_strides, bias_rows, mask, mask_strides, len_q, len_k, shift, left, right, scale,
                softcap, part != 1, 0 if part == 1 else WINDOW, SOFTCAP, q_rows[0].dtype == tl.float32, FOLD,
                BIAS, BIAS_VECTOR, MASK, MASK_VECTOR, False,
            )  # fmt: skip
            weights = None
            tweights = None
            if weight is not None:
                weights = load_weights(
                    weight, weight_strides, b0, b1, h // group, start_k, j, len_k
                )
            if tweight is not None:
                tweights = load_weights(
                    tweight, tweight_strides, b0, b1, h // group, start_k, j, len_k
                )
            p, bare = probabilities(s, reference[:, None], weights, scale, FOLD, False)
            t, raw_t = tangent_scores(
                q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, tbias_strides, bias_rows, len_k, scale,
                BLOCK_M, BLOCK_N, D1, SOFTCAP, TBIAS, TBIAS_VECTOR, PRECISION, False,
            )  # fmt: skip
            dp = score_chunks(dout_rows, v_rows, None, V1, PRECISION, False)
            if tv is not None:
                tv_rows = load_chunks(
                    tv_head + step * aligned(tv_strides[3], VECTOR), tv_strides, keys_left, head_dim_v,
                    BLOCK_N, V0, V1, EVEN_V, VECTOR, part != 1,
                )  # fmt: skip
                tdp = score_chunks(dout_rows, tv_rows, None, V1, PRECISION, False)
            else:
                tdp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if DROPOUT:
                keep = dropout_keep(
                    dropout_seed, b * heads + h, i0, start, threshold, BLOCK_M, BLOCK_N, False
                )
                dp = tl.where(keep, dp * keep_scale, 0.0)
                tdp = tl.where(keep, tdp * keep_scale, 0.0)
            bend = 0.0
            if SOFTCAP:
                bend = softcap_bend(products, slope, scale, softcap, q_rows[0].dtype == tl.float32)
            _w, f, e_raw, f_raw, _g = second_order(
                p, bare, t, raw_t, tweights, dp, tdp, row_mean, row_delta, row_zeta, slope, bend, SOFTCAP, False
            )  # fmt: skip
            if BIAS_GRADIENT == STORE:
                pointers, found = plane_pointers(
                    gbias, gbias_strides, i[:, None], j[None, :], bias_rows, len_k, PLANE, GBIAS_VECTOR
                )  # fmt: skip
                tl.store(pointers, f.to(gbias.dtype.element_ty), mask=found)
            if BIAS_GRADIENT == ROW_SUMS:
                row_sums += tl.sum(f, 1)
            if gq is not None:
                acc = add_product(f_raw, k_rows, acc, D1, PRECISION)
                if tk is not None:
                    acc = add_product(e_raw, tk_rows, acc, D1, PRECISION)

    if BIAS_GRADIENT == ROW_SUMS:
        tl.store(gbias + position, row_sums, mask=inside)
    if gq is not None:
        gq_tile = rows_of(gq, gq_strides, b0, b1, h, row, VECTOR)
        found = (acc[0] * scale, acc[1] * scale)
        store_chunks(gq_tile, gq_strides, rows_left, head_dim, found, BLOCK_M, D0, D1, VECTOR)
