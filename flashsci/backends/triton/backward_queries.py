"""Backward by query tiles: delta, then dq; every sum has one owner, no atomics.

Maths     P = e^(S - lse); dP = R (dO V^T); dS = P (dP - delta), delta = sum_d dO O - dlse; dQ = scale dS' K;
          dBias = dS; dS' = dS times the softcap's slope, R = dropout's keep / (1 - p)
Grid      as in forward.py
Tiles     q, dO and the fp32 dq stay on chip, k and v stream: 3 products a tile
Limits    with backward_keys.py 7 products, against 5 of a kernel that adds up dq with atomics: the price of determinism
"""

import triton
import triton.language as tl

from .forward import RUNTIME
from .tile import (
    PLANE,
    aligned,
    dense_place,
    dot,
    dropout_keep,
    head_pointer,
    key_range,
    load_tile,
    load_weights,
    packed_place,
    packed_span,
    plane_place,
    plane_pointers,
    probabilities,
    reference_of,
    score_dot,
    scores,
    store_tile,
)

# What becomes of dS besides dq, dk: stored as it is (the bias has every dim), or summed over keys or queries.
NO_BIAS_GRADIENT = tl.constexpr(0)
STORE = tl.constexpr(1)
ROW_SUMS = tl.constexpr(2)

RUNTIME_BACKWARD = (
    *RUNTIME,
    "dout_strides",
    "dq_strides",
    "dk_strides",
    "dv_strides",
    "dbias_strides",
)


@triton.jit(
    do_not_specialize=(
        "dout_strides",
        "out_strides",
        "batch1",
        "heads",
        "tiles",
        "size_q",
        "head_dim_v",
    )
)
def delta_kernel(
    dout, out, lse, dlse, reference, delta,
    dout_strides, out_strides, batch1, heads, tiles, size_q, head_dim_v,
    BLOCK_M: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr,
    FOLD: tl.constexpr,
):  # fmt: skip
    """delta = sum_d dout out - dlse, and the reference that `exponential` takes: lse, in log2 units under FOLD.

    A row without keys gets reference +inf, so that its probabilities are 0, and delta 0. Rows of packed sequences are
    treated as those of one long sequence.
    """
    pid = tl.program_id(0)
    bh = pid // tiles
    i0 = pid % tiles * BLOCK_M
    b = bh // heads
    h = bh % heads
    rows_left = size_q - i0
    dout_tile = head_pointer(dout, dout_strides, b // batch1, b % batch1, h, VECTOR)
    dout_tile += i0.to(tl.int64) * aligned(dout_strides[3], VECTOR)
    out_tile = head_pointer(out, out_strides, b // batch1, b % batch1, h, VECTOR)
    out_tile += i0.to(tl.int64) * aligned(out_strides[3], VECTOR)
    g = load_tile(
        dout_tile, dout_strides[3], rows_left, head_dim_v, BLOCK_M, V0, VECTOR, True, not EVEN_V
    )
    o = load_tile(
        out_tile, out_strides[3], rows_left, head_dim_v, BLOCK_M, V0, VECTOR, True, not EVEN_V
    )
    d = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    if V1 > 0:
        g = load_tile(
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
        o = load_tile(
            out_tile + V0,
            out_strides[3],
            rows_left,
            head_dim_v - V0,
            BLOCK_M,
            V1,
            VECTOR,
            True,
            not EVEN_V,
        )
        d += tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    rows = tl.arange(0, BLOCK_M)
    position = bh.to(tl.int64) * size_q + i0 + rows
    if dlse is not None:
        d -= tl.load(dlse + position, mask=rows < rows_left, other=0.0)
    row_lse = tl.load(lse + position, mask=rows < rows_left, other=0.0)
    dead = row_lse == float("-inf")
    tl.store(reference + position, reference_of(row_lse, FOLD), mask=rows < rows_left)
    tl.store(delta + position, tl.where(dead, 0.0, d), mask=rows < rows_left)


@triton.jit(do_not_specialize=RUNTIME_BACKWARD)
def dq_kernel(
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, dout, reference, delta, dq, dbias,
    q_strides, k_strides, v_strides, dout_strides, dq_strides,  # of (b0, b1, head, row)
    bias_strides, mask_strides, dbias_strides,  # of (b0, b1, head, row, column)
    weight_strides,  # of (b0, b1, key head, key)
    bias_total, batch1, heads, group, heads_total, section, tiles, sequences,
    size_q, size_k, head_dim, head_dim_v,
    scale, softcap, left, right, lower_right, threshold, keep_scale,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, RAGGED: tl.constexpr, MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    NEED_DQ: tl.constexpr, BIAS_GRADIENT: tl.constexpr, DBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    """dq, and dbias if it is dS itself (STORE) or its sums over keys (ROW_SUMS, fp32, one per query row)."""
    pid = tl.program_id(0)
    if PACKED:
        h = pid // tiles
        n, tile, start_q, len_q = packed_place(
            pid % tiles, cu_seqlens_q, sequences, size_q, BLOCK_M
        )
        start_k, len_k = packed_span(cu_seqlens_k, n, sequences, size_k)
        b = n
        b0 = tl.full([], 0, tl.int32)
        b1 = b0
        row0 = h.to(tl.int64) * size_q + start_q
    else:
        tile, b, b0, b1, h = dense_place(
            pid, tiles, heads, batch1, heads_total, section, WINDOW >= 1
        )
        n = b
        start_q = tl.full([], 0, tl.int32)
        start_k = start_q
        len_q = size_q
        len_k = size_k
        row0 = (b.to(tl.int64) * heads + h) * size_q
    i0 = tile * BLOCK_M
    if i0 >= len_q:
        return
    i = i0 + tl.arange(0, BLOCK_M)
    rows_left = len_q - i0
    shift = (len_k - len_q) * lower_right
    stream = b * heads + h

    q_tile = head_pointer(q, q_strides, b0, b1, h, VECTOR) + (start_q + i0).to(tl.int64) * aligned(
        q_strides[3], VECTOR
    )
    dout_tile = head_pointer(dout, dout_strides, b0, b1, h, VECTOR)
    dout_tile += (start_q + i0).to(tl.int64) * aligned(dout_strides[3], VECTOR)
    k_head = head_pointer(k, k_strides, b0, b1, h // group, VECTOR)
    k_head += start_k.to(tl.int64) * aligned(k_strides[3], VECTOR)
    v_head = head_pointer(v, v_strides, b0, b1, h // group, VECTOR)
    v_head += start_k.to(tl.int64) * aligned(v_strides[3], VECTOR)
    if BIAS_GRADIENT == STORE:
        dbias, dbias_strides, dbias_rows = plane_place(
            dbias,
            dbias_strides,
            b0,
            b1,
            h,
            n,
            start_k,
            len_q,
            len_k,
            bias_offsets,
            bias_total,
            DBIAS_VECTOR,
            RAGGED,
        )
    if BIAS:
        bias, bias_strides, bias_rows = plane_place(
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
        bias_rows = len_q
    if MASK:
        mask, mask_strides, _mask_rows = plane_place(
            mask, mask_strides, b0, b1, h, n, start_k, len_q, len_k, None, 0, MASK_VECTOR, False
        )

    # q: [BLOCK_M, D], g = dO: [BLOCK_M, Dv]
    q0 = load_tile(q_tile, q_strides[3], rows_left, head_dim, BLOCK_M, D0, VECTOR, True, not EVEN_D)
    g0 = load_tile(
        dout_tile, dout_strides[3], rows_left, head_dim_v, BLOCK_M, V0, VECTOR, True, not EVEN_V
    )
    dq0 = tl.zeros([BLOCK_M, D0], tl.float32)
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
        dq1 = tl.zeros([BLOCK_M, D1], tl.float32)
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
    row_reference = tl.load(reference + row0 + i, mask=i < len_q, other=float("inf"))
    row_delta = tl.load(delta + row0 + i, mask=i < len_q, other=0.0)
    row_sums = tl.zeros([BLOCK_M], tl.float32)

    low, whole, cut, high = key_range(
        i0, tl.minimum(i0 + BLOCK_M, len_q), len_k, shift, left, right, BLOCK_N, WINDOW
    )
    for part in tl.static_range(0 if WINDOW == 2 else 1, 3):
        if part == 0:
            begin, end = low, whole
        elif part == 1:
            begin, end = whole, cut
        else:
            begin, end = cut, high
        for start in tl.range(begin, end, BLOCK_N):
            start = tl.multiple_of(start, BLOCK_N)
            k_tile = k_head + start.to(tl.int64) * aligned(k_strides[3], VECTOR)
            v_tile = v_head + start.to(tl.int64) * aligned(v_strides[3], VECTOR)
            k0 = load_tile(
                k_tile,
                k_strides[3],
                len_k - start,
                head_dim,
                BLOCK_N,
                D0,
                VECTOR,
                part != 1,
                not EVEN_D,
            )
            v0 = load_tile(
                v_tile,
                v_strides[3],
                len_k - start,
                head_dim_v,
                BLOCK_N,
                V0,
                VECTOR,
                part != 1,
                not EVEN_V,
            )
            s = score_dot(q0, k0, None, PRECISION)  # [BLOCK_M, BLOCK_N]
            dp = score_dot(g0, v0, None, PRECISION)
            if D1 > 0:
                k1 = load_tile(
                    k_tile + D0,
                    k_strides[3],
                    len_k - start,
                    head_dim - D0,
                    BLOCK_N,
                    D1,
                    VECTOR,
                    part != 1,
                    not EVEN_D,
                )
                s = score_dot(q1, k1, s, PRECISION)
            if V1 > 0:
                v1 = load_tile(
                    v_tile + V0,
                    v_strides[3],
                    len_k - start,
                    head_dim_v - V0,
                    BLOCK_N,
                    V1,
                    VECTOR,
                    part != 1,
                    not EVEN_V,
                )
                dp = score_dot(g1, v1, dp, PRECISION)
            j = start + tl.arange(0, BLOCK_N)
            s, slope = scores(
                s,
                i,
                j,
                bias,
                bias_strides,
                bias_rows,
                mask,
                mask_strides,
                len_q,
                len_k,
                shift,
                left,
                right,
                scale,
                softcap,
                part != 1,
                0 if part == 1 else WINDOW,
                SOFTCAP,
                q0.dtype == tl.float32,
                FOLD,
                BIAS,
                BIAS_VECTOR,
                MASK,
                MASK_VECTOR,
                False,
            )
            weights = None
            if weight is not None:
                weights = load_weights(
                    weight, weight_strides, b0, b1, h // group, start_k, j, len_k
                )
            p, _bare = probabilities(s, row_reference[:, None], weights, scale, FOLD, False)
            if DROPOUT:
                keep = dropout_keep(
                    dropout_seed, stream, i0, start, threshold, BLOCK_M, BLOCK_N, False
                )
                dp = tl.where(keep, dp * keep_scale, 0.0)
            ds = p * (dp - row_delta[:, None])
            if BIAS_GRADIENT == STORE:
                pointers, inside = plane_pointers(
                    dbias,
                    dbias_strides,
                    i[:, None],
                    j[None, :],
                    dbias_rows,
                    len_k,
                    PLANE,
                    DBIAS_VECTOR,
                )
                tl.store(pointers, ds.to(dbias.dtype.element_ty), mask=inside)
            if BIAS_GRADIENT == ROW_SUMS:
                row_sums += tl.sum(ds, 1)
            if NEED_DQ:
                if SOFTCAP:
                    ds = ds * slope
                ds = ds.to(k0.dtype)
                dq0 = dot(ds, k0, dq0, PRECISION)
                if D1 > 0:
                    dq1 = dot(ds, k1, dq1, PRECISION)

    if BIAS_GRADIENT == ROW_SUMS:
        tl.store(dbias + row0 + i, row_sums, mask=i < len_q)
    if NEED_DQ:
        dq_tile = head_pointer(dq, dq_strides, b0, b1, h, VECTOR)
        dq_tile += (start_q + i0).to(tl.int64) * aligned(dq_strides[3], VECTOR)
        store_tile(dq_tile, dq_strides[3], rows_left, head_dim, dq0 * scale, BLOCK_M, D0, VECTOR)
        if D1 > 0:
            store_tile(
                dq_tile + D0,
                dq_strides[3],
                rows_left,
                head_dim - D0,
                dq1 * scale,
                BLOCK_M,
                D1,
                VECTOR,
            )
