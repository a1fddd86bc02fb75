"""Backward of short sequences, each in one program: everything is read once, nothing is recomputed.

Maths     as in backward_queries.py, with delta = sum_d dO O - dlse worked out here
Grid      one axis over (sequence, key head); a program goes through the query heads of its key head
Tiles     one score tile holds the whole sequence: q, k, v, dO, O in, dq, dk, dv out, 5 products
Limits    bytes; of small sequences the number of programs that the device can start
"""

import triton
import triton.language as tl

from .backward_queries import NO_BIAS_GRADIENT, ROW_SUMS, RUNTIME_BACKWARD, STORE
from .tile import (
    PLANE,
    aligned,
    dot,
    dropout_keep,
    head_pointer,
    load_tile,
    load_weights,
    plane_place,
    plane_pointers,
    probabilities,
    reference_of,
    score_dot,
    scores,
    sequence_edge,
    store_tile,
)

COLUMN_SUMS = tl.constexpr(3)  # beside the uses of dS in backward_queries.py


@triton.jit
def packed_rows(cu_seqlens, n, sequences, total):
    """First row and length of sequence n; -1 and `sequences` are the rows before and after all."""
    start = tl.full([], 0, tl.int32)
    end = total
    if n >= 0:
        start = sequence_edge(cu_seqlens, n, total)
    if n < sequences:
        end = sequence_edge(cu_seqlens, n + 1, total)
    return start, tl.maximum(end - start, 0)


@triton.jit
def store_zeros(
    head, strides, start, length, head_dim,
    ROWS: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    for row in tl.range(0, length, ROWS):
        tile = head + (start + row).to(tl.int64) * aligned(strides[3], VECTOR)
        zeros = tl.zeros([ROWS, WIDTH0], tl.float32)
        store_tile(tile, strides[3], length - row, head_dim, zeros, ROWS, WIDTH0, VECTOR)
        if WIDTH1 > 0:
            zeros = tl.zeros([ROWS, WIDTH1], tl.float32)
            store_tile(
                tile + WIDTH0, strides[3], length - row, head_dim - WIDTH0, zeros, ROWS, WIDTH1, VECTOR
            )  # fmt: skip


@triton.jit
def store_zero_values(pointer, length, COUNT: tl.constexpr):
    if pointer is not None:
        for i in tl.range(0, length, COUNT):
            place = i + tl.arange(0, COUNT)
            tl.store(pointer + place, tl.zeros([COUNT], tl.float32), mask=place < length)


@triton.jit(do_not_specialize=RUNTIME_BACKWARD)
def small_backward_kernel(
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, dout, out, lse, dlse, dq, dk, dv, dbias,
    weight_sums,
    q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides, dk_strides, dv_strides,  # of (b0, b1, head, row)
    bias_strides, mask_strides, dbias_strides,  # of (b0, b1, head, row, column)
    weight_strides,  # of (b0, b1, key head, key)
    bias_total, batch1, heads, group, sequences,  # heads: of keys
    size_q, size_k, head_dim, head_dim_v,
    scale, softcap, left, right, lower_right, threshold, keep_scale,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, RAGGED: tl.constexpr, MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, DBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    hk = pid % heads
    if PACKED:
        n = pid // heads - 1
        start_q, len_q = packed_rows(cu_seqlens_q, n, sequences, size_q)
        start_k, len_k = packed_rows(cu_seqlens_k, n, sequences, size_k)
        b = n
        b0 = tl.full([], 0, tl.int32)
        b1 = b0
    else:
        b = pid // heads
        n = b
        b0 = b // batch1
        b1 = b % batch1
        start_q = tl.full([], 0, tl.int32)
        start_k = start_q
        len_q = size_q
        len_k = size_k
    dk_head = head_pointer(dk, dk_strides, b0, b1, hk, VECTOR)
    dv_head = head_pointer(dv, dv_strides, b0, b1, hk, VECTOR)
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    if PACKED:
        if (n < 0) | (n >= sequences):  # rows of no sequence
            store_zeros(dk_head, dk_strides, start_k, len_k, head_dim, BLOCK_N, D0, D1, VECTOR)
            store_zeros(dv_head, dv_strides, start_k, len_k, head_dim_v, BLOCK_N, V0, V1, VECTOR)
            for member in tl.range(0, group):
                h = hk * group + member
                dq_head = head_pointer(dq, dq_strides, b0, b1, h, VECTOR)
                store_zeros(dq_head, dq_strides, start_q, len_q, head_dim, BLOCK_M, D0, D1, VECTOR)
                if BIAS_GRADIENT == COLUMN_SUMS:
                    store_zero_values(dbias + h.to(tl.int64) * size_k + start_k, len_k, BLOCK_N)
            if weight_sums is not None:
                store_zero_values(weight_sums + hk.to(tl.int64) * size_k + start_k, len_k, BLOCK_N)
            return
        # Whatever cu_seqlens says, a program stays within its tile.
        len_q = tl.minimum(len_q, BLOCK_M)
        len_k = tl.minimum(len_k, BLOCK_N)
    shift = (len_k - len_q) * lower_right

    k_tile = head_pointer(k, k_strides, b0, b1, hk, VECTOR) + start_k.to(tl.int64) * aligned(
        k_strides[3], VECTOR
    )
    v_tile = head_pointer(v, v_strides, b0, b1, hk, VECTOR) + start_k.to(tl.int64) * aligned(
        v_strides[3], VECTOR
    )
    k0 = load_tile(
        k_tile, k_strides[3], len_k, head_dim, BLOCK_N, D0, VECTOR, True, not EVEN_D
    )  # [BLOCK_N, D0]
    v0 = load_tile(v_tile, v_strides[3], len_k, head_dim_v, BLOCK_N, V0, VECTOR, True, not EVEN_V)
    dk0 = tl.zeros([BLOCK_N, D0], tl.float32)
    dv0 = tl.zeros([BLOCK_N, V0], tl.float32)
    if D1 > 0:
        k1 = load_tile(
            k_tile + D0, k_strides[3], len_k, head_dim - D0, BLOCK_N, D1, VECTOR, True, not EVEN_D
        )
        dk1 = tl.zeros([BLOCK_N, D1], tl.float32)
    if V1 > 0:
        v1 = load_tile(
            v_tile + V0, v_strides[3], len_k, head_dim_v - V0, BLOCK_N, V1, VECTOR, True, not EVEN_V
        )
        dv1 = tl.zeros([BLOCK_N, V1], tl.float32)

    weights = None
    if weight is not None:
        weights = load_weights(weight, weight_strides, b0, b1, hk, start_k, j, len_k)
    weight_sum = tl.zeros([BLOCK_N], tl.float32)

    for member in tl.range(0, group):
        h = hk * group + member
        stream = (b * heads + hk) * group + member
        row0 = h.to(tl.int64) * size_q + start_q if PACKED else stream.to(tl.int64) * size_q
        q_tile = head_pointer(q, q_strides, b0, b1, h, VECTOR) + start_q.to(tl.int64) * aligned(
            q_strides[3], VECTOR
        )
        dout_tile = head_pointer(dout, dout_strides, b0, b1, h, VECTOR)
        dout_tile += start_q.to(tl.int64) * aligned(dout_strides[3], VECTOR)
        out_tile = head_pointer(out, out_strides, b0, b1, h, VECTOR)
        out_tile += start_q.to(tl.int64) * aligned(out_strides[3], VECTOR)

        q0 = load_tile(q_tile, q_strides[3], len_q, head_dim, BLOCK_M, D0, VECTOR, True, not EVEN_D)
        g0 = load_tile(
            dout_tile, dout_strides[3], len_q, head_dim_v, BLOCK_M, V0, VECTOR, True, not EVEN_V
        )
        o = load_tile(
            out_tile, out_strides[3], len_q, head_dim_v, BLOCK_M, V0, VECTOR, True, not EVEN_V
        )
        row_delta = tl.sum(g0.to(tl.float32) * o.to(tl.float32), 1)
        s = score_dot(q0, k0, None, PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = score_dot(g0, v0, None, PRECISION)
        if D1 > 0:
            q1 = load_tile(
                q_tile + D0,
                q_strides[3],
                len_q,
                head_dim - D0,
                BLOCK_M,
                D1,
                VECTOR,
                True,
                not EVEN_D,
            )
            s = score_dot(q1, k1, s, PRECISION)
        if V1 > 0:
            g1 = load_tile(
                dout_tile + V0,
                dout_strides[3],
                len_q,
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
                len_q,
                head_dim_v - V0,
                BLOCK_M,
                V1,
                VECTOR,
                True,
                not EVEN_V,
            )
            row_delta += tl.sum(g1.to(tl.float32) * o.to(tl.float32), 1)
            dp = score_dot(g1, v1, dp, PRECISION)
        if dlse is not None:
            row_delta -= tl.load(dlse + row0 + i, mask=i < len_q, other=0.0)
        # Rows without keys and beyond the queries get reference +inf: their probabilities are 0.
        row_lse = tl.load(lse + row0 + i, mask=i < len_q, other=float("-inf"))
        dead = row_lse == float("-inf")
        row_delta = tl.where(dead, 0.0, row_delta)
        row_reference = reference_of(row_lse, FOLD)

        if BIAS:
            plane, plane_strides, bias_rows = plane_place(
                bias, bias_strides, b0, b1, h, n, start_k, len_q, len_k, bias_offsets, bias_total, BIAS_VECTOR, RAGGED
            )  # fmt: skip
        else:
            plane, plane_strides, bias_rows = bias, bias_strides, len_q
        if MASK:
            mask_head, mask_head_strides, _mask_rows = plane_place(
                mask, mask_strides, b0, b1, h, n, start_k, len_q, len_k, None, 0, MASK_VECTOR, False
            )
        else:
            mask_head, mask_head_strides = mask, mask_strides
        s, slope = scores(
            s, i, j, plane, plane_strides, bias_rows, mask_head, mask_head_strides, len_q, len_k, shift, left, right, scale,
            softcap, True, WINDOW, SOFTCAP, q0.dtype == tl.float32, FOLD, BIAS, BIAS_VECTOR, MASK, MASK_VECTOR, False,
        )  # fmt: skip
        p, bare = probabilities(s, row_reference[:, None], weights, scale, FOLD, False)
        kept = p
        if DROPOUT:
            keep = dropout_keep(dropout_seed, stream, 0, 0, threshold, BLOCK_M, BLOCK_N, False)
            kept = tl.where(keep, p * keep_scale, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        kept = kept.to(g0.dtype).T
        dv0 = dot(kept, g0, dv0, PRECISION)
        if V1 > 0:
            dv1 = dot(kept, g1, dv1, PRECISION)
        dp -= row_delta[:, None]
        ds = p * dp
        if weight_sums is not None:
            weight_sum += tl.sum(bare * dp, 0)
        if BIAS_GRADIENT == STORE:
            dplane, dplane_strides, dbias_rows = plane_place(
                dbias, dbias_strides, b0, b1, h, n, start_k, len_q, len_k, bias_offsets, bias_total, DBIAS_VECTOR, RAGGED
            )  # fmt: skip
            pointers, inside = plane_pointers(
                dplane,
                dplane_strides,
                i[:, None],
                j[None, :],
                dbias_rows,
                len_k,
                PLANE,
                DBIAS_VECTOR,
            )
            tl.store(pointers, ds.to(dbias.dtype.element_ty), mask=inside)
        elif BIAS_GRADIENT == ROW_SUMS:
            tl.store(dbias + row0 + i, tl.sum(ds, 1), mask=i < len_q)
        elif BIAS_GRADIENT != NO_BIAS_GRADIENT:
            row = h if PACKED else stream
            tl.store(dbias + row.to(tl.int64) * size_k + start_k + j, tl.sum(ds, 0), mask=j < len_k)
        if SOFTCAP:
            ds = ds * slope
        ds = ds.to(q0.dtype)
        dq_tile = head_pointer(dq, dq_strides, b0, b1, h, VECTOR) + start_q.to(tl.int64) * aligned(
            dq_strides[3], VECTOR
        )
        dq0 = dot(ds, k0, None, PRECISION) * scale
        store_tile(dq_tile, dq_strides[3], len_q, head_dim, dq0, BLOCK_M, D0, VECTOR)
        dk0 = dot(ds.T, q0, dk0, PRECISION)
        if D1 > 0:
            dq1 = dot(ds, k1, None, PRECISION) * scale
            store_tile(dq_tile + D0, dq_strides[3], len_q, head_dim - D0, dq1, BLOCK_M, D1, VECTOR)
            dk1 = dot(ds.T, q1, dk1, PRECISION)

    if weight_sums is not None:
        first = hk.to(tl.int64) if PACKED else b.to(tl.int64) * heads + hk
        tl.store(weight_sums + first * size_k + start_k + j, weight_sum, mask=j < len_k)
    dk_tile = dk_head + start_k.to(tl.int64) * aligned(dk_strides[3], VECTOR)
    dv_tile = dv_head + start_k.to(tl.int64) * aligned(dv_strides[3], VECTOR)
    store_tile(dk_tile, dk_strides[3], len_k, head_dim, dk0 * scale, BLOCK_N, D0, VECTOR)
    store_tile(dv_tile, dv_strides[3], len_k, head_dim_v, dv0, BLOCK_N, V0, VECTOR)
    if D1 > 0:
        store_tile(
            dk_tile + D0, dk_strides[3], len_k, head_dim - D0, dk1 * scale, BLOCK_N, D1, VECTOR
        )
    if V1 > 0:
        store_tile(dv_tile + V0, dv_strides[3], len_k, head_dim_v - V0, dv1, BLOCK_N, V1, VECTOR)
