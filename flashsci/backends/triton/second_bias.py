"""Double backward of a bias that heads or batch members share: each program owns a tile of the bias's own shape.

Maths     gBias_tile = sum over the members (b0, b1, head) that share it of F, see tangents.py
Grid, order and tiles  as in bias_gradient.py; q, tq, k, tk, dO, v, tv of one member after the other stream: 5 products a member
Limits    reads of those from L2
"""

import triton
import triton.language as tl

from .bias_gradient import RUNTIME_BIAS, indices
from .chunks import load_chunks, rows_of, score_chunks, statistics_row
from .tangents import (
    RUNTIME_SECOND,
    second_order,
    softcap_bend,
    tangent_scores,
)
from .tile import (
    PLANE,
    TILE,
    aligned,
    dropout_keep,
    load_plane,
    load_weights,
    packed_place,
    packed_span,
    plane_place,
    plane_pointers,
    probabilities,
    reference_of,
    scores,
)


@triton.jit(do_not_specialize=(*RUNTIME_BIAS, *RUNTIME_SECOND))
def second_bias_kernel(
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, lse, dout, tq, tk, tv, tbias, tweight,
    mean, delta, zeta, gbias,
    q_strides, k_strides, v_strides, dout_strides, tq_strides, tk_strides, tv_strides,  # of (b0, b1, head, row)
    weight_strides, tweight_strides,  # of (b0, b1, key head, key)
    bias_strides, mask_strides, tbias_strides, dbias_strides,  # of (b0, b1, head, row, column); dbias: of gbias
    own, shared, members, members_per_split, blocks, tiles_k, split_stride,  # as in bias_gradient.py
    bias_total, batch1, heads, group, tiles, sequences,
    size_q, size_k, head_dim, head_dim_v,
    scale, softcap, left, right, lower_right, threshold, keep_scale,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, RAGGED: tl.constexpr,
    MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    GBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile_k = pid % tiles_k
    pid = pid // tiles_k
    tile = pid % tiles
    pid = pid // tiles
    own0, own1, own_h = indices(pid % blocks, own)
    split = pid // blocks
    n = tl.full([], 0, tl.int32)
    start_q = n
    start_k = n
    len_q = size_q
    len_k = size_k
    if PACKED:
        n, tile, start_q, len_q = packed_place(tile, cu_seqlens_q, sequences, size_q, BLOCK_M)
        start_k, len_k = packed_span(cu_seqlens_k, n, sequences, size_k)
    i0 = tile * BLOCK_M
    if i0 >= len_q:
        return
    i = i0 + tl.arange(0, BLOCK_M)
    rows_left = len_q - i0
    inside = i < len_q
    shift = (len_k - len_q) * lower_right
    first = split * members_per_split
    last = tl.minimum(first + members_per_split, members)
    plane, plane_strides, bias_rows = plane_place(
        bias, bias_strides, own0, own1, own_h, n, start_k, len_q, len_k, bias_offsets, bias_total, BIAS_VECTOR, RAGGED
    )  # fmt: skip
    if TBIAS:
        tbias, tbias_strides, _rows = plane_place(
            tbias, tbias_strides, own0, own1, own_h, n, start_k, len_q, len_k, bias_offsets, bias_total, TBIAS_VECTOR, RAGGED
        )  # fmt: skip
    gbias += split.to(tl.int64) * aligned(split_stride, GBIAS_VECTOR)
    gbias, dbias_strides, _rows = plane_place(
        gbias, dbias_strides, own0, own1, own_h, n, start_k, len_q, len_k, bias_offsets, bias_total, GBIAS_VECTOR, RAGGED
    )  # fmt: skip

    for j0 in tl.range(
        tile_k * BLOCK_N, len_k if PACKED else tile_k * BLOCK_N + 1, BLOCK_N, num_stages=1
    ):
        j = j0 + tl.arange(0, BLOCK_N)
        columns_left = len_k - j0
        bias_tile = load_plane(
            plane, plane_strides, i, j, bias_rows, len_k, BIAS, BIAS_VECTOR, False
        )
        end = last
        # A tile that nobody sees: its gradient is zero.
        if WINDOW >= 1 and j0 > i0 + BLOCK_M - 1 + shift + right:
            end = first
        if WINDOW == 2 and j0 + BLOCK_N - 1 < i0 + shift - left:
            end = first
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for member in tl.range(first, end):
            b0, b1, h = indices(member, shared)
            b0 += own0
            b1 += own1
            h += own_h
            b = n if PACKED else b0 * batch1 + b1
            position = statistics_row(b, h, heads, start_q, size_q, PACKED) + i
            q_tile = rows_of(q, q_strides, b0, b1, h, start_q + i0, VECTOR)
            q_rows = load_chunks(
                q_tile, q_strides, rows_left, head_dim, BLOCK_M, D0, D1, EVEN_D, VECTOR, True
            )
            tq_rows = None
            if tq is not None:
                tq_tile = rows_of(tq, tq_strides, b0, b1, h, start_q + i0, VECTOR)
                tq_rows = load_chunks(
                    tq_tile, tq_strides, rows_left, head_dim, BLOCK_M, D0, D1, EVEN_D, VECTOR, True
                )
            k_tile = rows_of(k, k_strides, b0, b1, h // group, start_k + j0, VECTOR)
            k_rows = load_chunks(
                k_tile, k_strides, columns_left, head_dim, BLOCK_N, D0, D1, EVEN_D, VECTOR, True
            )
            tk_rows = None
            if tk is not None:
                tk_tile = rows_of(tk, tk_strides, b0, b1, h // group, start_k + j0, VECTOR)
                tk_rows = load_chunks(
                    tk_tile, tk_strides, columns_left, head_dim, BLOCK_N, D0, D1, EVEN_D, VECTOR, True
                )  # fmt: skip
            dout_tile = rows_of(dout, dout_strides, b0, b1, h, start_q + i0, VECTOR)
            dout_rows = load_chunks(
                dout_tile, dout_strides, rows_left, head_dim_v, BLOCK_M, V0, V1, EVEN_V, VECTOR, True
            )  # fmt: skip
            v_tile = rows_of(v, v_strides, b0, b1, h // group, start_k + j0, VECTOR)
            v_rows = load_chunks(
                v_tile, v_strides, columns_left, head_dim_v, BLOCK_N, V0, V1, EVEN_V, VECTOR, True
            )
            if MASK:
                mask_head, mask_head_strides, _rows = plane_place(
                    mask, mask_strides, b0, b1, h, n, start_k, len_q, len_k, None, 0, MASK_VECTOR, False
                )  # fmt: skip
            else:
                mask_head, mask_head_strides = mask, mask_strides
            products = score_chunks(
                q_rows, k_rows, None, D1, PRECISION, False
            )  # [BLOCK_M, BLOCK_N]
            # Columns beyond the keys hold anything, and are not stored.
            s, slope = scores(
                products, i, j, bias_tile, None, bias_rows, mask_head, mask_head_strides, len_q, len_k, shift, left, right, scale,
                softcap, False, WINDOW, SOFTCAP, q_rows[0].dtype == tl.float32, FOLD, TILE, 0, MASK, MASK_VECTOR, False,
            )  # fmt: skip
            row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
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
            reference = reference_of(row_lse, FOLD)[:, None]
            p, bare = probabilities(s, reference, weights, scale, FOLD, False)
            t, raw_t = tangent_scores(
                q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, tbias_strides, bias_rows, len_k, scale,
                BLOCK_M, BLOCK_N, D1, SOFTCAP, TBIAS, TBIAS_VECTOR, PRECISION, False,
            )  # fmt: skip
            dp = score_chunks(dout_rows, v_rows, None, V1, PRECISION, False)
            tdp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if tv is not None:
                tv_tile = rows_of(tv, tv_strides, b0, b1, h // group, start_k + j0, VECTOR)
                tv_rows = load_chunks(
                    tv_tile, tv_strides, columns_left, head_dim_v, BLOCK_N, V0, V1, EVEN_V, VECTOR, True
                )  # fmt: skip
                tdp = score_chunks(dout_rows, tv_rows, None, V1, PRECISION, False)
            if DROPOUT:
                keep = dropout_keep(
                    dropout_seed, b * heads + h, i0, j0, threshold, BLOCK_M, BLOCK_N, False
                )
                dp = tl.where(keep, dp * keep_scale, 0.0)
                tdp = tl.where(keep, tdp * keep_scale, 0.0)
            bend = 0.0
            if SOFTCAP:
                bend = softcap_bend(products, slope, scale, softcap, q_rows[0].dtype == tl.float32)
            row_mean = tl.load(mean + position, mask=inside, other=0.0)
            row_delta = tl.load(delta + position, mask=inside, other=0.0)
            row_zeta = tl.load(zeta + position, mask=inside, other=0.0)
            _w, f, _e_raw, _f_raw, _g = second_order(
                p, bare, t, raw_t, tweights, dp, tdp, row_mean, row_delta, row_zeta, slope, bend, SOFTCAP, False
            )  # fmt: skip
            total += f
        pointers, found = plane_pointers(
            gbias, dbias_strides, i[:, None], j[None, :], bias_rows, len_k, PLANE, GBIAS_VECTOR
        )
        tl.store(pointers, total.to(gbias.dtype.element_ty), mask=found)
