"""Gradient of a bias that heads or batch members share: each program owns a tile of the bias's own shape.

Maths     dBias_tile = sum over the members (b0, b1, head) that share it of P (dP - delta), see backward_queries.py
Grid      one axis over (split, bias block, query tile, key tile); a packed program goes through all key tiles itself
Tiles     the fp32 sum and the bias tile stay; q, k, dO, v of one member after the other stream (2 products a member)
Order     members are summed in order within a split, splits by one torch.sum afterwards: the same result every run
Limits    reads of q, k, dO, v from L2: 2 (M + N) D elements for 4 M N D operations
"""

import triton
import triton.language as tl

from .forward import RUNTIME
from .tile import (
    PLANE,
    TILE,
    aligned,
    dropout_keep,
    head_pointer,
    load_plane,
    load_tile,
    load_weights,
    packed_place,
    packed_span,
    plane_place,
    plane_pointers,
    probabilities,
    score_dot,
    scores,
)

RUNTIME_BIAS = (
    *RUNTIME,
    "dout_strides",
    "dbias_strides",
    "own",
    "shared",
    "members",
    "members_per_split",
    "blocks",
    "tiles_k",
    "split_stride",
)


@triton.jit
def indices(x, sizes):
    """x counted out over three sizes (b0, b1, head), the last fastest."""
    return x // (sizes[1] * sizes[2]), x // sizes[2] % sizes[1], x % sizes[2]


@triton.jit(do_not_specialize=RUNTIME_BIAS)
def bias_gradient_kernel(
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, dout, reference, delta, dbias,
    q_strides, k_strides, v_strides, dout_strides,  # of (b0, b1, head, row)
    bias_strides, mask_strides, dbias_strides,  # of (b0, b1, head, row, column)
    weight_strides,  # of (b0, b1, key head, key)
    own, shared,  # sizes over (b0, b1, head): of the bias, and of what shares it (one of the two is 1 in every dim)
    members, members_per_split, blocks, tiles_k, split_stride,
    bias_total, batch1, heads, group, tiles, sequences,
    size_q, size_k, head_dim, head_dim_v,
    scale, softcap, left, right, lower_right, threshold, keep_scale,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, RAGGED: tl.constexpr, MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    DBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile_k = pid % tiles_k
    pid = pid // tiles_k
    tile = pid % tiles
    pid = pid // tiles
    own0, own1, own_h = indices(pid % blocks, own)
    split = pid // blocks
    if PACKED:
        n, tile, start_q, len_q = packed_place(tile, cu_seqlens_q, sequences, size_q, BLOCK_M)
        start_k, len_k = packed_span(cu_seqlens_k, n, sequences, size_k)
    else:
        n = tl.full([], 0, tl.int32)
        start_q = n
        start_k = n
        len_q = size_q
        len_k = size_k
    i0 = tile * BLOCK_M
    if i0 >= len_q:
        return
    i = i0 + tl.arange(0, BLOCK_M)
    rows_left = len_q - i0
    shift = (len_k - len_q) * lower_right
    first = split * members_per_split
    last = tl.minimum(first + members_per_split, members)
    plane, plane_strides, bias_rows = plane_place(
        bias,
        bias_strides,
        own0,
        own1,
        own_h,
        n,
        start_k,
        len_q,
        len_k,
        bias_offsets,
        bias_total,
        BIAS_VECTOR,
        RAGGED,
    )
    dbias += split.to(tl.int64) * aligned(split_stride, DBIAS_VECTOR)
    dbias, dbias_strides, dbias_rows = plane_place(
        dbias,
        dbias_strides,
        own0,
        own1,
        own_h,
        n,
        start_k,
        len_q,
        len_k,
        bias_offsets,
        bias_total,
        DBIAS_VECTOR,
        RAGGED,
    )

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
        ds = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for member in tl.range(first, end):
            b0, b1, h = indices(member, shared)
            b0 += own0
            b1 += own1
            h += own_h
            if PACKED:
                b = n
                row0 = h.to(tl.int64) * size_q + start_q + i0
            else:
                b = b0 * batch1 + b1
                row0 = (b.to(tl.int64) * heads + h) * size_q + i0
            q_tile = head_pointer(q, q_strides, b0, b1, h, VECTOR)
            q_tile += (start_q + i0).to(tl.int64) * aligned(q_strides[3], VECTOR)
            dout_tile = head_pointer(dout, dout_strides, b0, b1, h, VECTOR)
            dout_tile += (start_q + i0).to(tl.int64) * aligned(dout_strides[3], VECTOR)
            k_tile = head_pointer(k, k_strides, b0, b1, h // group, VECTOR)
            k_tile += (start_k + j0).to(tl.int64) * aligned(k_strides[3], VECTOR)
            v_tile = head_pointer(v, v_strides, b0, b1, h // group, VECTOR)
            v_tile += (start_k + j0).to(tl.int64) * aligned(v_strides[3], VECTOR)
            q0 = load_tile(
                q_tile, q_strides[3], rows_left, head_dim, BLOCK_M, D0, VECTOR, True, not EVEN_D
            )
            k0 = load_tile(
                k_tile, k_strides[3], columns_left, head_dim, BLOCK_N, D0, VECTOR, True, not EVEN_D
            )
            s = score_dot(q0, k0, None, PRECISION)  # [BLOCK_M, BLOCK_N]
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
                s = score_dot(q1, k1, s, PRECISION)
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
            v0 = load_tile(
                v_tile,
                v_strides[3],
                columns_left,
                head_dim_v,
                BLOCK_N,
                V0,
                VECTOR,
                True,
                not EVEN_V,
            )
            dp = score_dot(g0, v0, None, PRECISION)
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
                dp = score_dot(g1, v1, dp, PRECISION)
            if MASK:
                mask_head, mask_head_strides, _mask_rows = plane_place(
                    mask,
                    mask_strides,
                    b0,
                    b1,
                    h,
                    n,
                    start_k,
                    len_q,
                    len_k,
                    None,
                    0,
                    MASK_VECTOR,
                    False,
                )
            else:
                mask_head, mask_head_strides = mask, mask_strides
            # Columns beyond the keys hold anything, and are not stored.
            s, _slope = scores(
                s,
                i,
                j,
                bias_tile,
                None,
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
                WINDOW,
                SOFTCAP,
                q0.dtype == tl.float32,
                FOLD,
                TILE,
                0,
                MASK,
                MASK_VECTOR,
                False,
            )
            rows = tl.arange(0, BLOCK_M)
            row_reference = tl.load(
                reference + row0 + rows, mask=rows < rows_left, other=float("inf")
            )
            row_delta = tl.load(delta + row0 + rows, mask=rows < rows_left, other=0.0)
            weights = None
            if weight is not None:
                weights = load_weights(
                    weight, weight_strides, b0, b1, h // group, start_k, j, len_k
                )
            p, _bare = probabilities(s, row_reference[:, None], weights, scale, FOLD, False)
            if DROPOUT:
                keep = dropout_keep(
                    dropout_seed, b * heads + h, i0, j0, threshold, BLOCK_M, BLOCK_N, False
                )
                dp = tl.where(keep, dp * keep_scale, 0.0)
            ds += p * (dp - row_delta[:, None])
        pointers, inside = plane_pointers(
            dbias, dbias_strides, i[:, None], j[None, :], dbias_rows, len_k, PLANE, DBIAS_VECTOR
        )
        tl.store(pointers, ds.to(dbias.dtype.element_ty), mask=inside)
