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
    load_row,
    load_weights,
    plane_place,
    probabilities,
    query_range,
    reference_of,
    scores,
)


@triton.jit(do_not_specialize=RUNTIME_SECOND)
def second_keys_kernel(
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, lse, dout, tq, tk, tv, tbias, tweight,
    mean, delta, zeta, gk, gv, column_sums, weight_sums,
    q_strides, k_strides, v_strides, dout_strides, tq_strides, tk_strides, tv_strides, gk_strides, gv_strides,
    weight_strides, tweight_strides,  # of (b0, b1, key head, key)
    bias_strides, mask_strides, tbias_strides,  # of (b0, b1, head, row, column); those above of (b0, b1, head, row)
    bias_total, batch1, heads, group, heads_total, section, tiles, sequences,  # heads: of keys
    size_q, size_k, head_dim, head_dim_v,
    scale, softcap, left, right, lower_right, threshold, keep_scale,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, RAGGED: tl.constexpr,
    MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    COLUMN_SUMS: tl.constexpr,
):  # fmt: skip
    """gk, gv (unless None), the sums of F over queries (fp32, one per query head and key) if COLUMN_SUMS, and gw (weight_sums,
    unless None: fp32, one per key head and key).

    Columns beyond the keys compute on zeros; whatever that gives stays in their own rows, which are not stored.
    """
    TRANSPOSED: tl.constexpr = BIAS != PLANE and MASK != PLANE
    j0, b, b0, b1, hk, start_k, len_k, start_q, len_q = tile_place(
        tl.program_id(0), cu_seqlens_k, cu_seqlens_q, batch1, heads, heads_total, section, tiles, sequences, size_k, size_q,
        BLOCK_N, PACKED, False,
    )  # fmt: skip
    if j0 >= len_k:
        return
    j = j0 + tl.arange(0, BLOCK_N)
    row = start_k + j0
    columns_left = len_k - j0
    shift = (len_k - len_q) * lower_right

    k_tile = rows_of(k, k_strides, b0, b1, hk, row, VECTOR)
    k_rows = load_chunks(
        k_tile, k_strides, columns_left, head_dim, BLOCK_N, D0, D1, EVEN_D, VECTOR, True
    )
    v_tile = rows_of(v, v_strides, b0, b1, hk, row, VECTOR)
    v_rows = load_chunks(
        v_tile, v_strides, columns_left, head_dim_v, BLOCK_N, V0, V1, EVEN_V, VECTOR, True
    )
    tk_rows = None
    if tk is not None:
        tk_tile = rows_of(tk, tk_strides, b0, b1, hk, row, VECTOR)
        tk_rows = load_chunks(
            tk_tile, tk_strides, columns_left, head_dim, BLOCK_N, D0, D1, EVEN_D, VECTOR, True
        )
    if tv is not None:
        tv_tile = rows_of(tv, tv_strides, b0, b1, hk, row, VECTOR)
        tv_rows = load_chunks(
            tv_tile, tv_strides, columns_left, head_dim_v, BLOCK_N, V0, V1, EVEN_V, VECTOR, True
        )
    acc_k = zero_chunks(BLOCK_N, D0, D1)
    acc_v = zero_chunks(BLOCK_N, V0, V1)

    weights = None
    tweights = None
    if weight is not None:
        weights = load_weights(weight, weight_strides, b0, b1, hk, start_k, j, len_k)
    if tweight is not None:
        tweights = load_weights(tweight, tweight_strides, b0, b1, hk, start_k, j, len_k)
    weight_sum = tl.zeros([BLOCK_N], tl.float32)

    low, whole, cut, high = query_range(
        j0, tl.minimum(j0 + BLOCK_N, len_k), len_q, shift, left, right, BLOCK_M, WINDOW
    )
    for member in tl.range(0, group):
        h = hk * group + member
        statistics = statistics_row(b, h, heads * group, start_q, size_q, PACKED)
        q_head = rows_of(q, q_strides, b0, b1, h, start_q, VECTOR)
        dout_head = rows_of(dout, dout_strides, b0, b1, h, start_q, VECTOR)
        if tq is not None:
            tq_head = rows_of(tq, tq_strides, b0, b1, h, start_q, VECTOR)
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
        sums = tl.zeros([BLOCK_N], tl.float32)

        for part in tl.static_range(0 if WINDOW >= 1 else 1, 3 if WINDOW == 2 else 2):
            if part == 0:
                begin, end = low, whole
            elif part == 1:
                begin, end = whole, cut if WINDOW == 2 else high
            else:
                begin, end = cut, high
            for start in tl.range(begin, end, BLOCK_M):
                start = tl.multiple_of(start, BLOCK_M)
                i = start + tl.arange(0, BLOCK_M)
                rows_left = len_q - start
                step = start.to(tl.int64)
                inside = i < len_q
                position = statistics + i
                q_rows = load_chunks(
                    q_head + step * aligned(q_strides[3], VECTOR), q_strides, rows_left, head_dim,
                    BLOCK_M, D0, D1, EVEN_D, VECTOR, True,
                )  # fmt: skip
                tq_rows = None
                if tq is not None:
                    tq_rows = load_chunks(
                        tq_head + step * aligned(tq_strides[3], VECTOR), tq_strides, rows_left, head_dim,
                        BLOCK_M, D0, D1, EVEN_D, VECTOR, True,
                    )  # fmt: skip
                dout_rows = load_chunks(
                    dout_head + step * aligned(dout_strides[3], VECTOR), dout_strides, rows_left, head_dim_v,
                    BLOCK_M, V0, V1, EVEN_V, VECTOR, True,
                )  # fmt: skip
                products = score_chunks(q_rows, k_rows, None, D1, PRECISION, TRANSPOSED)
                s, slope = scores(
                    products, i, j, plane, plane_strides, bias_rows, mask_head, mask_head_strides, len_q, len_k, shift, left,
                    right, scale, softcap, False, 0 if part == 1 else WINDOW, SOFTCAP, q_rows[0].dtype == tl.float32, FOLD,
                    BIAS, BIAS_VECTOR, MASK, MASK_VECTOR, TRANSPOSED,
                )  # fmt: skip
                # Rows beyond the queries count as rows without keys: probability 0.
                row_lse = load_row(lse + position, inside, float("-inf"), TRANSPOSED)
                reference = reference_of(row_lse, FOLD)
                reference = reference[None, :] if TRANSPOSED else reference[:, None]
                p, bare = probabilities(s, reference, weights, scale, FOLD, TRANSPOSED)
                t, raw_t = tangent_scores(
                    q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tplane, tplane_strides, bias_rows, len_k, scale,
                    BLOCK_M, BLOCK_N, D1, SOFTCAP, TBIAS, TBIAS_VECTOR, PRECISION, TRANSPOSED,
                )  # fmt: skip
                dp = score_chunks(dout_rows, v_rows, None, V1, PRECISION, TRANSPOSED)
                if tv is not None:
                    tdp = score_chunks(dout_rows, tv_rows, None, V1, PRECISION, TRANSPOSED)
                else:
                    tdp = tl.zeros_like(dp)
                if DROPOUT:
                    stream = (b * heads + hk) * group + member
                    keep = dropout_keep(
                        dropout_seed, stream, start, j0, threshold, BLOCK_M, BLOCK_N, TRANSPOSED
                    )
                    dp = tl.where(keep, dp * keep_scale, 0.0)
                    tdp = tl.where(keep, tdp * keep_scale, 0.0)
                bend = 0.0
                if SOFTCAP:
                    bend = softcap_bend(
                        products, slope, scale, softcap, q_rows[0].dtype == tl.float32
                    )
                row_mean = load_row(mean + position, inside, 0.0, TRANSPOSED)
                row_delta = load_row(delta + position, inside, 0.0, TRANSPOSED)
                row_zeta = load_row(zeta + position, inside, 0.0, TRANSPOSED)
                w, f, e_raw, f_raw, g = second_order(
                    p, bare, t, raw_t, tweights, dp, tdp, row_mean, row_delta, row_zeta, slope, bend, SOFTCAP, TRANSPOSED
                )  # fmt: skip
                if COLUMN_SUMS:
                    sums += tl.sum(f, 1 if TRANSPOSED else 0)
                if weight_sums is not None:
                    weight_sum += tl.sum(g, 1 if TRANSPOSED else 0)
                if gv is not None:
                    if DROPOUT:
                        w = tl.where(keep, w * keep_scale, 0.0)
                    w = w.to(dout_rows[0].dtype)
                    acc_v = add_product(w if TRANSPOSED else w.T, dout_rows, acc_v, V1, PRECISION)
                if gk is not None:
                    f_raw = f_raw.to(q_rows[0].dtype)
                    acc_k = add_product(
                        f_raw if TRANSPOSED else f_raw.T, q_rows, acc_k, D1, PRECISION
                    )
                    if tq is not None:
                        e_raw = e_raw.to(q_rows[0].dtype)
                        acc_k = add_product(
                            e_raw if TRANSPOSED else e_raw.T, tq_rows, acc_k, D1, PRECISION
                        )
        if COLUMN_SUMS:
            first = h.to(tl.int64) if PACKED else b.to(tl.int64) * (heads * group) + h
            tl.store(column_sums + first * size_k + start_k + j, sums, mask=j < len_k)

    if weight_sums is not None:
        first = hk.to(tl.int64) if PACKED else b.to(tl.int64) * heads + hk
        tl.store(weight_sums + first * size_k + start_k + j, weight_sum, mask=j < len_k)
    if gk is not None:
        gk_tile = rows_of(gk, gk_strides, b0, b1, hk, row, VECTOR)
        found = (acc_k[0] * scale, acc_k[1] * scale)
        store_chunks(gk_tile, gk_strides, columns_left, head_dim, found, BLOCK_N, D0, D1, VECTOR)
    if gv is not None:
        gv_tile = rows_of(gv, gv_strides, b0, b1, hk, row, VECTOR)
        store_chunks(gv_tile, gv_strides, columns_left, head_dim_v, acc_v, BLOCK_N, V0, V1, VECTOR)
