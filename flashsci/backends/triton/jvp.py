"""Tangents of out and lse, one query tile per program; for the double backward also two sums of each row.

Maths     see tangents.py: m = sum_j P T + N tw, tO = sum_j R ((P T + N tw) V + P tV) - m O; delta = dO . O - dlse, zeta = dO . tO
Grid      as in forward.py
Tiles     q, tq and the fp32 tO stay on chip; k, tk, v, tv stream: 5 products a tile, lse and O are those of the forward
Centre    m is known at the end only. Until then T - c stands for T - m, with c the mean over the first tile that a row sees:
          tO = sum_j R ((P (T - c) + N tw) V + P tV) - (m - c) O. Without it, 16-bit roundings would grow with a common part of T, which
          softmax does not see. With a tangent of key weights, whose N tw has no bound where P is small, m comes from a first sweep
          over the keys (2 more products)
Limits    tensor cores; at D = 64 the exponentials hide behind five products
"""

import triton
import triton.language as tl

from .chunks import (
    add_product,
    load_chunks,
    row_dot,
    rows_of,
    score_chunks,
    statistics_row,
    store_chunks,
    tile_place,
    zero_chunks,
)
from .tangents import RUNTIME_SECOND, tangent_scores
from .tile import (
    aligned,
    dropout_keep,
    key_range,
    load_weights,
    plane_place,
    probabilities,
    reference_of,
    scores,
)


@triton.jit(do_not_specialize=RUNTIME_SECOND)
def jvp_kernel(
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, out, lse, dout, dlse, tq, tk, tv, tbias, tweight,
    tout, mean, delta, zeta,
    q_strides, k_strides, v_strides, out_strides, dout_strides, tq_strides, tk_strides, tv_strides, tout_strides,
    weight_strides, tweight_strides,  # of (b0, b1, key head, key)
    bias_strides, mask_strides, tbias_strides,  # of (b0, b1, head, row, column); those above of (b0, b1, head, row)
    bias_total, batch1, heads, group, heads_total, section, tiles, sequences,
    size_q, size_k, head_dim, head_dim_v,
    scale, softcap, left, right, lower_right, threshold, keep_scale,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, RAGGED: tl.constexpr,
    MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """tout, mean = tangents of out, lse; with dout also delta and zeta."""
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
    k_head = rows_of(k, k_strides, b0, b1, h // group, start_k, VECTOR)
    v_head = rows_of(v, v_strides, b0, b1, h // group, start_k, VECTOR)
    if tk is not None:
        tk_head = rows_of(tk, tk_strides, b0, b1, h // group, start_k, VECTOR)
    if tv is not None:
        tv_head = rows_of(tv, tv_strides, b0, b1, h // group, start_k, VECTOR)
    row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
    reference = reference_of(row_lse, FOLD)
    centre = tl.zeros([BLOCK_M], tl.float32)
    centred = tl.zeros([BLOCK_M], tl.int1)
    excess = tl.zeros([BLOCK_M], tl.float32)  # m - c
    acc = zero_chunks(BLOCK_M, V0, V1)

    low, whole, cut, high = key_range(
        i0, tl.minimum(i0 + BLOCK_M, len_q), len_k, shift, left, right, BLOCK_N, WINDOW
    )
    SWEEPS: tl.constexpr = 1 if tweight is None else 2
    for sweep in tl.static_range(0, SWEEPS):
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
                kept = p
                if DROPOUT:
                    keep = dropout_keep(
                        dropout_seed, b * heads + h, i0, start, threshold, BLOCK_M, BLOCK_N, False
                    )
                    kept = tl.where(keep, p * keep_scale, 0.0)
                if tq is not None or tk is not None or TBIAS or tweight is not None:
                    mass = tl.sum(p, 1)
                    if tq is not None or tk is not None or TBIAS:
                        tk_rows = None
                        if tk is not None:
                            tk_rows = load_chunks(
                                tk_head + step * aligned(tk_strides[3], VECTOR), tk_strides, keys_left, head_dim,
                                BLOCK_N, D0, D1, EVEN_D, VECTOR, part != 1,
                            )  # fmt: skip
                        t, _raw = tangent_scores(
                            q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, tbias_strides, bias_rows, len_k, scale,
                            BLOCK_M, BLOCK_N, D1, SOFTCAP, TBIAS, TBIAS_VECTOR, PRECISION, False,
                        )  # fmt: skip
                        moment = tl.sum(p * t, 1)
                        if SWEEPS == 1:
                            fresh = (mass > 1e-30) & (centred == 0)
                            centre = tl.where(fresh, moment / tl.where(fresh, mass, 1.0), centre)
                            centred = centred | fresh
                        excess += moment - centre * mass
                        change = kept * (t - centre[:, None])
                    else:  # T is 0
                        excess -= centre * mass
                        change = -kept * centre[:, None]
                    if tweight is not None:
                        extra = bare * tweights[None, :]
                        excess += tl.sum(extra, 1)
                        if DROPOUT:
                            extra = tl.where(keep, extra * keep_scale, 0.0)
                        change += extra
                    if sweep == SWEEPS - 1:
                        v_rows = load_chunks(
                            v_head + step * aligned(v_strides[3], VECTOR), v_strides, keys_left, head_dim_v,
                            BLOCK_N, V0, V1, EVEN_V, VECTOR, part != 1,
                        )  # fmt: skip
                        acc = add_product(change, v_rows, acc, V1, PRECISION)
                if tv is not None and sweep == SWEEPS - 1:
                    tv_rows = load_chunks(
                        tv_head + step * aligned(tv_strides[3], VECTOR), tv_strides, keys_left, head_dim_v,
                        BLOCK_N, V0, V1, EVEN_V, VECTOR, part != 1,
                    )  # fmt: skip
                    acc = add_product(kept, tv_rows, acc, V1, PRECISION)
        if sweep < SWEEPS - 1:
            centre = excess
            excess = tl.zeros([BLOCK_M], tl.float32)

    out_tile = rows_of(out, out_strides, b0, b1, h, row, VECTOR)
    out_rows = load_chunks(
        out_tile, out_strides, rows_left, head_dim_v, BLOCK_M, V0, V1, EVEN_V, VECTOR, True
    )
    tout0 = acc[0] - excess[:, None] * out_rows[0].to(tl.float32)
    tout1 = acc[1]
    if V1 > 0:
        tout1 = acc[1] - excess[:, None] * out_rows[1].to(tl.float32)
    tout_tile = rows_of(tout, tout_strides, b0, b1, h, row, VECTOR)
    store_chunks(
        tout_tile, tout_strides, rows_left, head_dim_v, (tout0, tout1), BLOCK_M, V0, V1, VECTOR
    )
    tl.store(mean + position, centre + excess, mask=inside)
    if dout is not None:
        dout_tile = rows_of(dout, dout_strides, b0, b1, h, row, VECTOR)
        dout_rows = load_chunks(
            dout_tile, dout_strides, rows_left, head_dim_v, BLOCK_M, V0, V1, EVEN_V, VECTOR, True
        )
        row_delta = row_dot(dout_rows, out_rows, V1)
        if dlse is not None:
            row_delta -= tl.load(dlse + position, mask=inside, other=0.0)
        row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)
        tl.store(delta + position, row_delta, mask=inside)
        tl.store(zeta + position, row_dot(dout_rows, (tout0, tout1), V1), mask=inside)
