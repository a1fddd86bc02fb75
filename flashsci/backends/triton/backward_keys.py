"""Backward by key tiles: dk and dv; every sum has one owner, no atomics.

Maths     as in backward_queries.py; dK = scale dS'^T Q; dV = (R P)^T dO
Grid      one axis over (section of key heads, tile, key head); a program goes through its query heads in order
Tiles     k, v and the fp32 dk, dv stay on chip, q and dO stream: 4 products a tile. The scores are computed transposed,
          [keys, queries], so that P^T and dS^T are left operands straight from registers; with a bias or mask for each
          pair they are not, because that tile is then read as it lies in memory, and P and dS turn in shared memory
Limits    registers: two accumulators and two score tiles at once
"""

import triton
import triton.language as tl

from .backward_queries import RUNTIME_BACKWARD
from .tile import (
    PLANE,
    aligned,
    dense_place,
    dot,
    dropout_keep,
    head_pointer,
    load_row,
    load_tile,
    load_weights,
    packed_place,
    packed_span,
    plane_place,
    probabilities,
    query_range,
    score_dot,
    scores,
    store_tile,
)


@triton.jit
def score_product(queries, keys, acc, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """queries [M, D], keys [N, D] -> [M, N] or, TRANSPOSED, [N, M]."""
    if TRANSPOSED:
        return score_dot(keys, queries, acc, PRECISION)
    else:
        return score_dot(queries, keys, acc, PRECISION)


@triton.jit(do_not_specialize=RUNTIME_BACKWARD)
def dkdv_kernel(
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, dout, reference, delta, dk, dv, column_sums,
    weight_sums,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,  # of (b0, b1, head, row)
    bias_strides, mask_strides,  # of (b0, b1, head, row, column)
    weight_strides,  # of (b0, b1, key head, key)
    bias_total, batch1, heads, group, heads_total, section, tiles, sequences,
    size_q, size_k, head_dim, head_dim_v,
    scale, softcap, left, right, lower_right, threshold, keep_scale,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, RAGGED: tl.constexpr, MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, COLUMN_SUMS: tl.constexpr,
):  # fmt: skip
    """dk, dv, the sums of dS over queries (fp32, one per query head and key) if COLUMN_SUMS, and the
    gradient of key weights (weight_sums, unless None: fp32, one per key head and key).

    `heads` and `heads_total` count key heads here. Columns beyond the keys compute on zeros, whatever that gives
    (inf included) stays in their own rows of dk and dv, which are not stored.
    """
    TRANSPOSED: tl.constexpr = BIAS != PLANE and MASK != PLANE
    pid = tl.program_id(0)
    if PACKED:
        hk = pid // tiles
        n, tile, start_k, len_k = packed_place(
            pid % tiles, cu_seqlens_k, sequences, size_k, BLOCK_N
        )
        start_q, len_q = packed_span(cu_seqlens_q, n, sequences, size_q)
        b = n
        b0 = tl.full([], 0, tl.int32)
        b1 = b0
    else:
        tile, b, b0, b1, hk = dense_place(pid, tiles, heads, batch1, heads_total, section, False)
        n = b
        start_q = tl.full([], 0, tl.int32)
        start_k = start_q
        len_q = size_q
        len_k = size_k
    j0 = tile * BLOCK_N
    if j0 >= len_k:
        return
    j = j0 + tl.arange(0, BLOCK_N)
    columns_left = len_k - j0
    shift = (len_k - len_q) * lower_right

    k_tile = head_pointer(k, k_strides, b0, b1, hk, VECTOR) + (start_k + j0).to(tl.int64) * aligned(
        k_strides[3], VECTOR
    )
    v_tile = head_pointer(v, v_strides, b0, b1, hk, VECTOR) + (start_k + j0).to(tl.int64) * aligned(
        v_strides[3], VECTOR
    )
    k0 = load_tile(
        k_tile, k_strides[3], columns_left, head_dim, BLOCK_N, D0, VECTOR, True, not EVEN_D
    )  # [BLOCK_N, D0]
    v0 = load_tile(
        v_tile, v_strides[3], columns_left, head_dim_v, BLOCK_N, V0, VECTOR, True, not EVEN_V
    )
    dk0 = tl.zeros([BLOCK_N, D0], tl.float32)
    dv0 = tl.zeros([BLOCK_N, V0], tl.float32)
    if D1 > 0:
        k1 = load_tile(
            k_tile + D0,
            k_strides[3],
            columns_left,
            head_dim - D0,
            BLOCK_N,
            D1,
            VECTOR,
            True,
            not EVEN_D,
        )
        dk1 = tl.zeros([BLOCK_N, D1], tl.float32)
    if V1 > 0:
        v1 = load_tile(
            v_tile + V0,
            v_strides[3],
            columns_left,
            head_dim_v - V0,
            BLOCK_N,
            V1,
            VECTOR,
            True,
            not EVEN_V,
        )
        dv1 = tl.zeros([BLOCK_N, V1], tl.float32)

    weights = None
    if weight is not None:
        weights = load_weights(weight, weight_strides, b0, b1, hk, start_k, j, len_k)
    weight_sum = tl.zeros([BLOCK_N], tl.float32)

    low, whole, cut, high = query_range(
        j0, tl.minimum(j0 + BLOCK_N, len_k), len_q, shift, left, right, BLOCK_M, WINDOW
    )
    for member in tl.range(0, group):
        h = hk * group + member
        stream = (b * heads + hk) * group + member
        row0 = h.to(tl.int64) * size_q + start_q if PACKED else stream.to(tl.int64) * size_q
        q_head = head_pointer(q, q_strides, b0, b1, h, VECTOR) + start_q.to(tl.int64) * aligned(
            q_strides[3], VECTOR
        )
        dout_head = head_pointer(dout, dout_strides, b0, b1, h, VECTOR)
        dout_head += start_q.to(tl.int64) * aligned(dout_strides[3], VECTOR)
        if BIAS:
            plane, plane_strides, bias_rows = plane_place(
                bias,
                bias_strides,
                b0,
                b1,
                h,
                n,
                start_k,
                len_q,
                len_k,
                bias_offsets,
                bias_total,
                BIAS_VECTOR,
                RAGGED,
            )
        else:
            plane, plane_strides, bias_rows = bias, bias_strides, len_q
        if MASK:
            mask_head, mask_head_strides, _mask_rows = plane_place(
                mask, mask_strides, b0, b1, h, n, start_k, len_q, len_k, None, 0, MASK_VECTOR, False
            )
        else:
            mask_head, mask_head_strides = mask, mask_strides
        sums = tl.zeros([BLOCK_N], tl.float32)

        for part in tl.static_range(0 if WINDOW >= 1 else 1, 3 if WINDOW == 2 else 2):
            if part == 0:
                begin, end = low, whole
            elif part == 1:
                # Rows are checked in any case: their own tail needs no loop.
                begin, end = whole, cut if WINDOW == 2 else high
            else:
                begin, end = cut, high
            for start in tl.range(begin, end, BLOCK_M):
                start = tl.multiple_of(start, BLOCK_M)
                rows_left = len_q - start
                q_tile = q_head + start.to(tl.int64) * aligned(q_strides[3], VECTOR)
                dout_tile = dout_head + start.to(tl.int64) * aligned(dout_strides[3], VECTOR)
                i = start + tl.arange(0, BLOCK_M)
                q0 = load_tile(
                    q_tile, q_strides[3], rows_left, head_dim, BLOCK_M, D0, VECTOR, True, not EVEN_D
                )
                s = score_product(q0, k0, None, TRANSPOSED, PRECISION)
                if D1 > 0:
                    q1 = load_tile(
                        q_tile + D0,
                        q_strides[3],
                        rows_left,
                        head_dim - D0,
                        BLOCK_M,
                        D1,
                        VECTOR,
                        True,
                        not EVEN_D,
                    )
                    s = score_product(q1, k1, s, TRANSPOSED, PRECISION)
                # Rows beyond the queries have reference +inf, too: probability 0.
                row_reference = load_row(reference + row0 + i, i < len_q, float("inf"), TRANSPOSED)
                s, slope = scores(
                    s,
                    i,
                    j,
                    plane,
                    plane_strides,
                    bias_rows,
                    mask_head,
                    mask_head_strides,
                    len_q,
                    len_k,
                    shift,
                    left,
                    right,
                    scale,
                    softcap,
                    False,
                    0 if part == 1 else WINDOW,
                    SOFTCAP,
                    k0.dtype == tl.float32,
                    FOLD,
                    BIAS,
                    BIAS_VECTOR,
                    MASK,
                    MASK_VECTOR,
                    TRANSPOSED,
                )
                row_reference = row_reference[None, :] if TRANSPOSED else row_reference[:, None]
                p, bare = probabilities(s, row_reference, weights, scale, FOLD, TRANSPOSED)
                g0 = load_tile(
                    dout_tile,
                    dout_strides[3],
                    rows_left,
                    head_dim_v,
                    BLOCK_M,
                    V0,
                    VECTOR,
                    True,
                    not EVEN_V,
                )
                if V1 > 0:
                    g1 = load_tile(
                        dout_tile + V0,
                        dout_strides[3],
                        rows_left,
                        head_dim_v - V0,
                        BLOCK_M,
                        V1,
                        VECTOR,
                        True,
                        not EVEN_V,
                    )
                if DROPOUT:
                    keep = dropout_keep(
                        dropout_seed, stream, start, j0, threshold, BLOCK_M, BLOCK_N, TRANSPOSED
                    )
                if NEED_DV:
                    kept = p
                    if DROPOUT:
                        kept = tl.where(keep, p * keep_scale, 0.0)
                    kept = kept.to(g0.dtype)
                    if not TRANSPOSED:
                        kept = kept.T
                    dv0 = dot(kept, g0, dv0, PRECISION)
                    if V1 > 0:
                        dv1 = dot(kept, g1, dv1, PRECISION)
                if NEED_DK or COLUMN_SUMS or weight_sums is not None:
                    row_delta = load_row(delta + row0 + i, i < len_q, 0.0, TRANSPOSED)
                    dp = score_product(g0, v0, None, TRANSPOSED, PRECISION)
                    if V1 > 0:
                        dp = score_product(g1, v1, dp, TRANSPOSED, PRECISION)
                    if DROPOUT:
                        dp = tl.where(keep, dp * keep_scale, 0.0)
                    row_delta = row_delta[None, :] if TRANSPOSED else row_delta[:, None]
                    dp -= row_delta
                    ds = p * dp
                    if weight_sums is not None:
                        weight_sum += tl.sum(bare * dp, 1 if TRANSPOSED else 0)
                    if COLUMN_SUMS:
                        sums += tl.sum(ds, 1 if TRANSPOSED else 0)
                    if NEED_DK:
                        if SOFTCAP:
                            ds = ds * slope
                        ds = ds.to(q0.dtype)
                        if not TRANSPOSED:
                            ds = ds.T
                        dk0 = dot(ds, q0, dk0, PRECISION)
                        if D1 > 0:
                            dk1 = dot(ds, q1, dk1, PRECISION)
        if COLUMN_SUMS:
            row = h if PACKED else stream
            tl.store(column_sums + row.to(tl.int64) * size_k + start_k + j, sums, mask=j < len_k)

    if weight_sums is not None:
        first = hk.to(tl.int64) if PACKED else b.to(tl.int64) * heads + hk
        tl.store(weight_sums + first * size_k + start_k + j, weight_sum, mask=j < len_k)
    if NEED_DK:
        dk_tile = head_pointer(dk, dk_strides, b0, b1, hk, VECTOR)
        dk_tile += (start_k + j0).to(tl.int64) * aligned(dk_strides[3], VECTOR)
        store_tile(dk_tile, dk_strides[3], columns_left, head_dim, dk0 * scale, BLOCK_N, D0, VECTOR)
        if D1 > 0:
            store_tile(
                dk_tile + D0,
                dk_strides[3],
                columns_left,
                head_dim - D0,
                dk1 * scale,
                BLOCK_N,
                D1,
                VECTOR,
            )
    if NEED_DV:
        dv_tile = head_pointer(dv, dv_strides, b0, b1, hk, VECTOR)
        dv_tile += (start_k + j0).to(tl.int64) * aligned(dv_strides[3], VECTOR)
        store_tile(dv_tile, dv_strides[3], columns_left, head_dim_v, dv0, BLOCK_N, V0, VECTOR)
        if V1 > 0:
            store_tile(
                dv_tile + V0, dv_strides[3], columns_left, head_dim_v - V0, dv1, BLOCK_N, V1, VECTOR
            )
