"""Backward of residual attention by key tiles: dk, dv and dS, the gradient of the bias; then dq from dS.

Maths     dS = P o (R o (dO V^T) - delta) + G, with P = e^(S - lse), delta = sum_d dO O and G the gradient of the scores that
          were a result; dK = scale dS^T Q, dV = (R P)^T dO, dQ = scale dS K
Grid      one axis over (tile of keys, head); for a separate dq (tile of queries, head)
Tiles     k, v and the fp32 dk, dv stay on chip; q, dO, the scores and G stream, dS is stored. S is read if it was stored in
          fp32, else computed again from q, k and the bias: S rounded to 16 bits gives another P
dq        where one tile has all keys, by the same program; else by a second kernel, which reads dS: as many bytes as a bias
Limits    bytes of scores, G and dS
"""

import triton.language as tl

from .chunks import (
    add_product,
    load_chunks,
    load_rows,
    row_dot,
    row_pointer,
    rows_of,
    scale_chunks,
    score_chunks,
    store_chunks,
    zero_chunks,
)
from .coord import flat_row, key_tile, member, query_tile
from .dropout import drop, dropout_keep
from .kernel import kernel
from .residual_scores import bias_tile, load_pieces, plane_of, store_pieces
from .scores import addends, bias_of, probabilities, reference_of, scores


@kernel
def residual_backward_kernel(
    inputs, dout, out, lse, delta, kept, dkept, ds, dq, dk, dv,
    strides, dout_strides, out_strides, dq_strides, dk_strides, dv_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    VECTOR: tl.constexpr, BIAS_VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """kept: the scores in fp32, or None; dkept: their gradient G, or None: zero. ds, dq: or None.

    dq and out are given only if one tile has all keys. Otherwise they are None, with delta and, as lse, the reference
    as `delta_kernel` writes them.
    """
    j0, at, span = key_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_N, False)
    j = j0 + tl.arange(0, BLOCK_N)
    inside = (j < span.len_k)[None, :]
    columns_left = span.len_k - j0
    k_rows = load_rows(inputs.k, strides.k, at, at.hk, j0, columns_left, sizes.head_dim, BLOCK_N, D)
    v_rows = load_rows(inputs.v, strides.v, at, at.hk, j0, columns_left, sizes.head_dim_v, BLOCK_N, V)
    acc_k = zero_chunks(BLOCK_N, D)
    acc_v = zero_chunks(BLOCK_N, V)

    for m in tl.range(0, sizes.group):
        head = member(at, m)
        bias = bias_of(inputs.bias, strides.bias, head, span, inputs, sizes, BIAS_VECTOR, F)
        kept_plane = plane_of(kept, head, span, sizes, VECTOR)
        dkept_plane = plane_of(dkept, head, span, sizes, VECTOR)
        ds_plane = plane_of(ds, head, span, sizes, VECTOR)
        statistics = flat_row(at.b, head.h, sizes.heads, span.start_q, sizes.size_q, False)

        for start in tl.range(0, span.len_q, BLOCK_M):
            start = tl.multiple_of(start, BLOCK_M)
            i = start + tl.arange(0, BLOCK_M)
            rows_left = span.len_q - start
            q_rows = load_rows(inputs.q, strides.q, at, head.h, start, rows_left, sizes.head_dim, BLOCK_M, D)
            dout_rows = load_rows(dout, dout_strides, at, head.h, start, rows_left, sizes.head_dim_v, BLOCK_M, V)
            rows_inside = i < span.len_q
            # Rows without keys and beyond the queries have reference +inf: their probabilities are 0.
            if delta is None:
                out_rows = load_rows(out, out_strides, at, head.h, start, rows_left, sizes.head_dim_v, BLOCK_M, V)
                row_delta = row_dot(dout_rows, out_rows)
                row_lse = tl.load(lse + statistics + i, mask=rows_inside, other=float("-inf"))
                reference = reference_of(row_lse, False)
            else:
                row_delta = tl.load(delta + statistics + i, mask=rows_inside, other=0.0)
                reference = tl.load(lse + statistics + i, mask=rows_inside, other=float("inf"))
            if kept_plane is not None:
                s = load_pieces(kept_plane, i, j, span.len_k, VECTOR)
                s = tl.where(inside, s, float("-inf"))
            else:
                s = score_chunks(q_rows, k_rows, None, PRECISION, False)
                added = addends(bias_tile(bias, i, j, span.len_k, F.BIAS, BIAS_VECTOR), None, None)
                s, _slope = scores(s, i, j, added, span, mod, F, False, True, 0, False)
            p, _bare = probabilities(s, reference, None, mod.scale, False, False)
            keep = dropout_keep(inputs, head, sizes, start, j0, mod, F, BLOCK_M, BLOCK_N, False)
            left = drop(p, keep, mod).to(dout_rows[0].dtype)
            acc_v = add_product(left.T, dout_rows, acc_v, PRECISION)
            dp = drop(score_chunks(dout_rows, v_rows, None, PRECISION, False), keep, mod)
            change = p * (dp - row_delta[:, None])
            if dkept_plane is not None:
                more = load_pieces(dkept_plane, i, j, span.len_k, VECTOR)
                change += tl.where(inside, more, 0.0)
            if ds_plane is not None:
                store_pieces(ds_plane, i, j, span.len_k, change, VECTOR)
            change = change.to(q_rows[0].dtype)
            acc_k = add_product(change.T, q_rows, acc_k, PRECISION)
            if dq is not None:
                dq_tile = rows_of(dq, dq_strides, at, head.h, start, D.VECTOR)
                rows = add_product(change, k_rows, zero_chunks(BLOCK_M, D), PRECISION)
                rows = scale_chunks(rows, mod.scale)
                store_chunks(dq_tile, dq_strides, rows_left, sizes.head_dim, rows, BLOCK_M, D)

    dk_tile = rows_of(dk, dk_strides, at, at.hk, j0, D.VECTOR)
    acc_k = scale_chunks(acc_k, mod.scale)
    store_chunks(dk_tile, dk_strides, columns_left, sizes.head_dim, acc_k, BLOCK_N, D)
    dv_tile = rows_of(dv, dv_strides, at, at.hk, j0, V.VECTOR)
    store_chunks(dv_tile, dv_strides, columns_left, sizes.head_dim_v, acc_v, BLOCK_N, V)


@kernel
def residual_queries_kernel(
    inputs, ds, dq, strides, dq_strides, sizes, schedule, mod,
    D: tl.constexpr, PRECISION: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, False, False)
    i = i0 + tl.arange(0, BLOCK_M)
    plane = plane_of(ds, at, span, sizes, VECTOR)
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    acc = zero_chunks(BLOCK_M, D)
    for start in tl.range(0, span.len_k, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        j = start + tl.arange(0, BLOCK_N)
        change = load_pieces(plane, i, j, span.len_k, VECTOR)
        k_tile = row_pointer(k_head, strides.k, start, D.VECTOR)
        k_rows = load_chunks(k_tile, strides.k, span.len_k - start, sizes.head_dim, BLOCK_N, D, True)
        acc = add_product(change, k_rows, acc, PRECISION)
    tile = rows_of(dq, dq_strides, at, at.h, i0, D.VECTOR)
    acc = scale_chunks(acc, mod.scale)
    store_chunks(tile, dq_strides, span.len_q - i0, sizes.head_dim, acc, BLOCK_M, D)
