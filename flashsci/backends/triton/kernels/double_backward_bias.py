"""Double backward of a bias that heads or batch members share: each program owns a tile of the bias's own shape.

Maths     gBias_tile = sum over the members (b0, b1, head) that share it of F, see tangents.py
Grid, order and tiles  as in bias_gradient.py; q, tq, k, tk, dO, v, tv of one member after the other stream: 5 products a member
Limits    reads of these tensors from L2
"""

import triton.language as tl

from .bias_gradient import bias_tile, sharer, unseen
from .chunks import aligned, load_rows, score_chunks
from .coord import flat_row
from .dropout import drop, dropout_keep
from .kernel import kernel
from .scores import (
    addends,
    alibi_of,
    bias_of,
    load_plane,
    load_weights,
    mask_of,
    probabilities,
    reference_of,
    scores,
    store_plane,
)
from .tangents import second_order, softcap_bend, tangent_scores
from .tiles import is_shared, tile_at


@kernel
def double_backward_bias_kernel(
    inputs, tangents, lse, dout, mean, delta, zeta, gbias,
    strides, tangent_strides, dout_strides, gbias_strides, own, shared, sharing, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
    GBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    i0, tile_k, split, block, span = bias_tile(tl.program_id(0), inputs, own, sharing, sizes, mod, BLOCK_M, F.VARLEN)
    if i0 >= span.len_q:
        return
    i = i0 + tl.arange(0, BLOCK_M)
    inside = i < span.len_q
    rows_left = span.len_q - i0
    first = split * sharing.members_per_split
    last = tl.minimum(first + sharing.members_per_split, sharing.members)
    bias = bias_of(inputs.bias, strides.bias, block, span, inputs, sizes, F.BIAS_VECTOR, F)
    tbias = bias_of(tangents.bias, tangent_strides.bias, block, span, inputs, sizes, TBIAS_VECTOR, F)
    gbias += split.to(tl.int64) * aligned(sharing.split_stride, GBIAS_VECTOR)
    gplane = bias_of(gbias, gbias_strides, block, span, inputs, sizes, GBIAS_VECTOR, F)

    for j0 in tl.range(tile_k * BLOCK_N, span.len_k if F.VARLEN else tile_k * BLOCK_N + 1, BLOCK_N, num_stages=1):
        j = j0 + tl.arange(0, BLOCK_N)
        columns_left = span.len_k - j0
        bias_values = load_plane(bias, i, j, span.len_k, F.BIAS, F.BIAS_VECTOR, False)
        end = last
        if unseen(i0, j0, span, mod, BLOCK_M, BLOCK_N, F.WINDOW):  # its gradient is zero
            end = first
        if F.TILES:
            some, _bits = tile_at(i0, j0, block, span, inputs, strides, F.TILES, F.WINDOW)
            if is_shared(strides, shared) & (some == 0):  # its gradient is zero
                end = first
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for m in tl.range(first, end):
            at = sharer(block, m, shared, sizes, F.VARLEN)
            row = span.start_q + i0
            column = span.start_k + j0
            position = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN) + i
            q_rows = load_rows(inputs.q, strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
            tq_rows = load_rows(tangents.q, tangent_strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
            k_rows = load_rows(inputs.k, strides.k, at, at.hk, column, columns_left, sizes.head_dim, BLOCK_N, D)
            tk_rows = load_rows(
                tangents.k, tangent_strides.k, at, at.hk, column, columns_left, sizes.head_dim, BLOCK_N, D
            )
            dout_rows = load_rows(dout, dout_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
            v_rows = load_rows(inputs.v, strides.v, at, at.hk, column, columns_left, sizes.head_dim_v, BLOCK_N, V)
            mask = mask_of(inputs, strides, at, span, F)
            if F.TILES:
                _some, mask = tile_at(i0, j0, at, span, inputs, strides, F.TILES, F.WINDOW)
            added = addends(bias_values, mask, alibi_of(inputs, strides, at, sizes, F))
            products = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
            # Columns beyond the keys hold any values, and are not stored.
            s, slope = scores(products, i, j, added, span, mod, F, FOLD, False, F.WINDOW, False)
            row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
            weights = load_weights(inputs.weight, strides.weight, at, span, j)
            tweights = load_weights(tangents.weight, tangent_strides.weight, at, span, j)
            reference = reference_of(row_lse, FOLD)
            p, bare = probabilities(s, reference, weights, mod.scale, FOLD, False)
            t, raw_t = tangent_scores(
                products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F,
                TBIAS, TBIAS_VECTOR, PRECISION, False,
            )  # fmt: skip
            dp = score_chunks(dout_rows, v_rows, None, PRECISION, False)
            tdp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            tv_rows = load_rows(
                tangents.v, tangent_strides.v, at, at.hk, column, columns_left, sizes.head_dim_v, BLOCK_N, V
            )
            if tv_rows is not None:
                tdp = score_chunks(dout_rows, tv_rows, None, PRECISION, False)
            keep = dropout_keep(inputs, at, sizes, i0, j0, mod, F, BLOCK_M, BLOCK_N, False)
            dp = drop(dp, keep, mod)
            tdp = drop(tdp, keep, mod)
            bend = softcap_bend(products, s, slope, mod, F)
            row_mean = tl.load(mean + position, mask=inside, other=0.0)
            row_delta = tl.load(delta + position, mask=inside, other=0.0)
            row_zeta = tl.load(zeta + position, mask=inside, other=0.0)
            _w, f, _e_raw, _f_raw, _g = second_order(
                p, bare, t, raw_t, tweights, dp - row_delta[:, None], tdp - row_zeta[:, None], row_mean, slope, bend, F, False
            )  # fmt: skip
            total += f
        store_plane(gplane, i, j, span.len_k, total, GBIAS_VECTOR)
