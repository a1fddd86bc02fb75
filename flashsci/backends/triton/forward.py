"""Forward: out = softmax(scores) v and lse, one query tile per program.

Maths     running max m, sum l and accumulator a over key tiles: a <- a e^(m - m') + e^(s - m') v
Grid      one axis over (section of heads, tile, head); longest causal tiles first (tile.dense_place)
Tiles     query tile and fp32 accumulator stay on chip, key and value tiles stream through the pipeline
Loops     key tiles that the mask cuts are handled apart from those seen whole, which check nothing
Huge      one multiply-add per score (tile.FOLD) serves scores up to HUGE; a tile with larger ones is done again without
Limits    tensor cores and exponentials share the time at D = 64; the tensor cores lead from D = 128 on
"""

import triton
import triton.language as tl

from .chunks import add_product, load_chunks, score_chunks, store_chunks, zero_chunks
from .tile import (
    HUGE,
    LN2,
    LOG2E,
    aligned,
    dense_place,
    dropout_keep,
    exponential,
    head_pointer,
    key_range,
    load_weights,
    packed_place,
    packed_span,
    plane_place,
    scores,
)

RUNTIME = (
    "q_strides",
    "k_strides",
    "v_strides",
    "out_strides",
    "bias_strides",
    "mask_strides",
    "weight_strides",
    "bias_total",
    "batch1",
    "heads",
    "group",
    "heads_total",
    "section",
    "tiles",
    "sequences",
    "size_q",
    "size_k",
    "head_dim",
    "head_dim_v",
    "left",
    "right",
    "lower_right",
    "threshold",
)


AGAIN_N = tl.constexpr(16)  # key tiles of what is done again: few registers


@triton.jit
def attend(
    q_rows, k_head, v_head, bias, bias_strides, bias_rows, weight, weight_strides, mask, mask_strides, dropout_seed,
    k_strides, v_strides, b0, b1, h, group, stream, start_k, i0, len_q, len_k, head_dim, head_dim_v,
    scale, softcap, shift, left, right, threshold,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum and accumulator of one query tile over all its keys.

    Under FOLD a row whose maximum was HUGE at any time gets a sum of NaN: its exponentials may have overflowed.
    AGAIN: the way without FOLD for a tile with such a row, which few ever take: all key tiles in one loop.
    """
    i = i0 + tl.arange(0, BLOCK_M)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # log2 units under FOLD
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc0, acc1 = zero_chunks(BLOCK_M, V0, V1)

    low, whole, cut, high = key_range(
        i0, tl.minimum(i0 + BLOCK_M, len_q), len_k, shift, left, right, BLOCK_N, WINDOW
    )
    for part in tl.static_range(
        2 if AGAIN else 0 if WINDOW == 2 else 1, 3
    ):  # cut by the left edge; seen whole; cut by the right edge
        if part == 0:
            begin, end = low, whole
        elif part == 1:
            begin, end = whole, cut
        else:
            begin, end = low if AGAIN else cut, high
        for start in tl.range(begin, end, BLOCK_N, num_stages=1 if AGAIN else None):
            start = tl.multiple_of(start, BLOCK_N)
            j = start + tl.arange(0, BLOCK_N)
            keys_left = len_k - start
            k_tile = k_head + start.to(tl.int64) * aligned(k_strides[3], VECTOR)
            v_tile = v_head + start.to(tl.int64) * aligned(v_strides[3], VECTOR)
            k_rows = load_chunks(
                k_tile, k_strides, keys_left, head_dim, BLOCK_N, D0, D1, EVEN_D, VECTOR, part != 1
            )
            s = score_chunks(q_rows, k_rows, None, D1, PRECISION, False)  # [BLOCK_M, BLOCK_N]
            s, _slope = scores(
                s, i, j, bias, bias_strides, bias_rows, mask, mask_strides, len_q, len_k, shift, left, right, scale, softcap,
                part != 1, 0 if part == 1 else WINDOW, SOFTCAP, q_rows[0].dtype == tl.float32, FOLD,
                BIAS, BIAS_VECTOR, MASK, MASK_VECTOR, False,
            )  # fmt: skip
            if weight is not None:
                weights = load_weights(
                    weight, weight_strides, b0, b1, h // group, start_k, j, len_k
                )
                nothing = weights == 0.0
                logarithm = tl.log(tl.where(nothing, 1.0, weights))
                s += tl.where(nothing, float("-inf"), logarithm)[None, :]

            tile_max = tl.max(s, 1)
            if FOLD:
                tile_max = tile_max * (scale * LOG2E)
            new_max = tl.maximum(row_max, tile_max)
            # A row that has seen no key yet has max -inf: subtract 0 instead, e^(-inf - 0) = 0.
            reference = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = exponential(s, reference[:, None], scale, FOLD)
            decay = tl.exp2((row_max - reference) * (1.0 if FOLD else LOG2E))
            if FOLD:
                decay = tl.where(tl.abs(reference) < HUGE, decay, float("nan"))
            row_sum = row_sum * decay + tl.sum(p, 1)
            row_max = new_max
            if DROPOUT:
                keep = dropout_keep(
                    dropout_seed, stream, i0, start, threshold, BLOCK_M, BLOCK_N, False
                )
                p = tl.where(keep, p, 0.0)

            v_rows = load_chunks(
                v_tile, v_strides, keys_left, head_dim_v, BLOCK_N, V0, V1, EVEN_V, VECTOR, part != 1
            )
            acc = (acc0 * decay[:, None], acc1 * decay[:, None] if V1 > 0 else acc1)
            acc0, acc1 = add_product(p, v_rows, acc, V1, PRECISION)
    return row_max, row_sum, (acc0, acc1)


@triton.jit
def finish(
    lse, out_tile, out_strides, i, len_q, rows_left, head_dim_v, row_max, row_sum, acc, keep_scale,
    BLOCK_M: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Stores lse and out. A row without keys has max -inf and sum 0: lse -inf, out 0."""
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(lse + i, row_max + tl.log(row_sum), mask=i < len_q)
    inverse = (keep_scale / row_sum)[:, None]
    rows = (acc[0] * inverse, acc[1] * inverse if V1 > 0 else acc[1])
    store_chunks(out_tile, out_strides, rows_left, head_dim_v, rows, BLOCK_M, V0, V1, VECTOR)


@triton.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    q, k, v, bias, weight, mask, cu_seqlens_q, cu_seqlens_k, bias_offsets, dropout_seed, out, lse,
    q_strides, k_strides, v_strides, out_strides,  # of (b0, b1, head, row)
    bias_strides, mask_strides,  # of (b0, b1, head, row, column)
    weight_strides,  # of (b0, b1, key head, key)
    bias_total,  # elements of a ragged bias per head
    batch1, heads, group, heads_total, section, tiles, sequences,
    size_q, size_k, head_dim, head_dim_v,  # size: rows of the tensor, which are the sequence when dense
    scale, softcap, left, right, lower_right, threshold, keep_scale,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, RAGGED: tl.constexpr, MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_V: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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

    q_row = (start_q + i0).to(tl.int64) * aligned(q_strides[3], VECTOR)
    q_tile = head_pointer(q, q_strides, b0, b1, h, VECTOR) + q_row
    k_head = head_pointer(k, k_strides, b0, b1, h // group, VECTOR)
    k_head += start_k.to(tl.int64) * aligned(k_strides[3], VECTOR)
    v_head = head_pointer(v, v_strides, b0, b1, h // group, VECTOR)
    v_head += start_k.to(tl.int64) * aligned(v_strides[3], VECTOR)
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

    q_rows = load_chunks(
        q_tile, q_strides, rows_left, head_dim, BLOCK_M, D0, D1, EVEN_D, VECTOR, True
    )
    row_max, row_sum, acc = attend(
        q_rows, k_head, v_head, bias, bias_strides, bias_rows, weight, weight_strides, mask, mask_strides, dropout_seed,
        k_strides, v_strides, b0, b1, h, group, stream, start_k, i0, len_q, len_k, head_dim, head_dim_v,
        scale, softcap, shift, left, right, threshold,
        WINDOW, SOFTCAP, DROPOUT, FOLD, BIAS, BIAS_VECTOR, MASK, MASK_VECTOR,
        BLOCK_M, BLOCK_N, D0, D1, V0, V1, EVEN_D, EVEN_V, VECTOR, PRECISION, False,
    )  # fmt: skip
    out_row = (start_q + i0).to(tl.int64) * aligned(out_strides[3], VECTOR)
    out_tile = head_pointer(out, out_strides, b0, b1, h, VECTOR) + out_row
    if FOLD:
        row_max = row_max * LN2
        if tl.max((row_sum != row_sum).to(tl.int32), 0) > 0:  # scores are huge (or NaN)
            row_max, row_sum, acc = attend(
                q_rows, k_head, v_head, bias, bias_strides, bias_rows, weight, weight_strides, mask, mask_strides,
                dropout_seed, k_strides, v_strides, b0, b1, h, group, stream, start_k, i0, len_q, len_k, head_dim,
                head_dim_v, scale, softcap, shift, left, right, threshold,
                WINDOW, SOFTCAP, DROPOUT, False, BIAS, BIAS_VECTOR, MASK, MASK_VECTOR,
                BLOCK_M, AGAIN_N, D0, D1, V0, V1, EVEN_D, EVEN_V, VECTOR, PRECISION, True,
            )  # fmt: skip
            finish(
                lse + row0, out_tile, out_strides, i, len_q, rows_left, head_dim_v, row_max, row_sum, acc, keep_scale,
                BLOCK_M, V0, V1, VECTOR,
            )  # fmt: skip
            return
    finish(
        lse + row0, out_tile, out_strides, i, len_q, rows_left, head_dim_v, row_max, row_sum, acc, keep_scale,
        BLOCK_M, V0, V1, VECTOR,
    )  # fmt: skip
