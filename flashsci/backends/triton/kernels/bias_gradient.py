"""Gradient of a bias that heads or batch members share: each program owns a tile of the bias's own shape.

Maths     dBias_tile = sum over the members (b0, b1, head) that share it of P (dP - delta), see backward_queries.py
Grid      one axis over (split, bias block, query tile, key tile); a varlen program goes through all key tiles itself
Tiles     the fp32 sum and the bias tile stay; q, k, dO, v of one member after the other stream (2 products a member)
Order     members are summed in order within a split, splits by one torch.sum afterwards: the same result every run
Limits    reads of q, k, dO, v from L2: 2 (M + N) D elements for 4 M N D operations
"""

import triton
import triton.language as tl

from .chunks import aligned, load_rows, score_chunks
from .coord import HeadCoord, Span, flat_row, shift_of, varlen_rows, varlen_tile
from .dropout import drop, dropout_keep
from .kernel import kernel
from .scores import (
    addends,
    alibi_of,
    bias_of,
    load_plane,
    load_weights,
    mask_of,
    of_addends,
    probabilities,
    scores,
    store_plane,
)
from .tiles import is_shared, tile_at


@kernel
def bias_gradient_kernel(
    inputs, dout, reference, delta, dbias, strides, dout_strides, dbias_strides, own, shared, sharing, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DBIAS_VECTOR: tl.constexpr,
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
    dbias += split.to(tl.int64) * aligned(sharing.split_stride, DBIAS_VECTOR)
    dplane = bias_of(dbias, dbias_strides, block, span, inputs, sizes, DBIAS_VECTOR, F)

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
            first_row = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN)
            q_rows = load_rows(inputs.q, strides.q, at, at.h, span.start_q + i0, rows_left, sizes.head_dim, BLOCK_M, D)
            k_rows = load_rows(
                inputs.k, strides.k, at, at.hk, span.start_k + j0, columns_left, sizes.head_dim, BLOCK_N, D
            )
            s = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
            dout_rows = load_rows(
                dout, dout_strides, at, at.h, span.start_q + i0, rows_left, sizes.head_dim_v, BLOCK_M, V
            )
            v_rows = load_rows(
                inputs.v, strides.v, at, at.hk, span.start_k + j0, columns_left, sizes.head_dim_v, BLOCK_N, V
            )
            dp = score_chunks(dout_rows, v_rows, None, PRECISION, False)
            mask = mask_of(inputs, strides, at, span, F)
            if F.TILES:
                _some, mask = tile_at(i0, j0, at, span, inputs, strides, F.TILES, F.WINDOW)
            added = addends(bias_values, mask, alibi_of(inputs, strides, at, sizes, F))
            # Columns beyond the keys hold any values, and are not stored.
            s, slope = scores(s, i, j, added, span, mod, F, FOLD, False, F.WINDOW, False)
            row_reference = tl.load(reference + first_row + i, mask=inside, other=float("inf"))
            row_delta = tl.load(delta + first_row + i, mask=inside, other=0.0)
            weights = load_weights(inputs.weight, strides.weight, at, span, j)
            p, _bare = probabilities(s, row_reference, weights, mod.scale, FOLD, False)
            keep = dropout_keep(inputs, at, sizes, i0, j0, mod, F, BLOCK_M, BLOCK_N, False)
            dp = drop(dp, keep, mod)
            total += of_addends(p * (dp - row_delta[:, None]), slope, F)
        store_plane(dplane, i, j, span.len_k, total, DBIAS_VECTOR)


@triton.jit
def bias_tile(pid, inputs, own, sharing, sizes, mod, BLOCK_M: tl.constexpr, VARLEN: tl.constexpr):
    """The place of a program that owns a tile of the bias: first row, key tile, split, HeadCoord in the bias,
    Span."""
    tile_k = pid % sharing.tiles_k
    pid = pid // sharing.tiles_k
    tile = pid % sharing.tiles_q
    pid = pid // sharing.tiles_q
    b0, b1, h = indices(pid % sharing.blocks, own)
    split = pid // sharing.blocks
    n = tl.full([], 0, tl.int32)
    start_q = n
    start_k = n
    len_q = sizes.size_q
    len_k = sizes.size_k
    if VARLEN:
        n, tile, start_q, len_q = varlen_tile(tile, inputs.cu_seqlens_q, sizes.sequences, sizes.size_q, BLOCK_M)
        start_k, len_k = varlen_rows(inputs.cu_seqlens_k, n, sizes.sequences, sizes.size_k)
    span = Span(start_q, len_q, start_k, len_k, shift_of(len_q, len_k, mod))
    return tile * BLOCK_M, tile_k, split, HeadCoord(n, b0, b1, h, h), span


@triton.jit
def sharer(block, m, shared, sizes, VARLEN: tl.constexpr):
    """The m-th of the heads and batch members that share a block of the bias."""
    b0, b1, h = indices(m, shared)
    b0 += block.b0
    b1 += block.b1
    h += block.h
    b = block.b if VARLEN else b0 * sizes.batch1 + b1
    return HeadCoord(b, b0, b1, h, h // sizes.group)


@triton.jit
def indices(x, sizes):
    """The indices of x counted over three sizes (b0, b1, head), the last fastest."""
    return x // (sizes[1] * sizes[2]), x // sizes[2] % sizes[1], x % sizes[2]


@triton.jit
def unseen(i0, j0, span, mod, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Whether the window hides every key of a tile from its queries."""
    hidden = False
    if WINDOW >= 1:
        hidden = j0 > i0 + BLOCK_M - 1 + span.shift + mod.right
    if WINDOW == 2:
        hidden = hidden | (j0 + BLOCK_N - 1 < i0 + span.shift - mod.left)
    return hidden
