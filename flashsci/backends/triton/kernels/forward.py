"""Forward: out = softmax(scores) v and lse, one query tile per program.

Maths     running max m, sum l and accumulator a over key tiles: a <- a e^(m - m') + e^(s - m') v
Grid      one axis over (section of heads, tile, head); longest causal tiles first (coord.dense_tile)
Tiles     query tile and fp32 accumulator stay on chip, key and value tiles stream through the pipeline
Loops     key tiles that the mask cuts have loops of their own; tiles that are seen whole need no checks
Huge      one multiply-add per score (FOLD in scores.py) serves scores up to HUGE; a tile with larger ones is computed
          again without it
Limits    tensor cores and exponentials share the time at D = 64; the tensor cores lead from D = 128 on
"""

import triton
import triton.language as tl

from .chunks import (
    add_product,
    load_chunks,
    load_rows,
    row_pointer,
    rows_of,
    scale_chunks,
    score_chunks,
    store_chunks,
    zero_chunks,
)
from .coord import flat_row, key_range, query_tile
from .dropout import drop_unscaled, dropout_keep
from .gate import gated
from .kernel import kernel
from .scores import HUGE, LN2, LOG2E, addends_of, exponential, load_weights, scores, weighted_scores
from .tiles import key_step, key_steps, keys_of

AGAIN_N = tl.constexpr(32)  # key tiles of a second computation; tiles of 16 cost the kernel 20 registers (D 64)


@kernel
def forward_kernel(
    inputs, out, lse, strides, out_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    i = i0 + tl.arange(0, BLOCK_M)
    rows_left = span.len_q - i0
    q_rows = load_rows(inputs.q, strides.q, at, at.h, span.start_q + i0, rows_left, sizes.head_dim, BLOCK_M, D)
    row_max, row_sum, acc = attend(
        q_rows, None, i0, at, span, inputs, strides, sizes, mod, F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, 0, False
    )
    lse_rows = lse + flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN)
    out_tile = rows_of(out, out_strides, at, at.h, span.start_q + i0, V.VECTOR)
    if FOLD:
        row_max = row_max * LN2
        if tl.max((row_sum != row_sum).to(tl.int32), 0) > 0:  # scores are huge (or NaN)
            row_max, row_sum, acc = attend(
                q_rows,
                None,
                i0,
                at,
                span,
                inputs,
                strides,
                sizes,
                mod,
                F,
                D,
                V,
                False,
                PRECISION,
                BLOCK_M,
                AGAIN_N,
                0,
                True,
            )
            finish(lse_rows, out_tile, out_strides, i, span, rows_left, sizes, mod, row_max, row_sum, acc, V, BLOCK_M)
            return
    finish(lse_rows, out_tile, out_strides, i, span, rows_left, sizes, mod, row_max, row_sum, acc, V, BLOCK_M)


@triton.jit
def attend(
    q_rows, gate, i0, at, span, inputs, strides, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE_VECTOR: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Running maximum (in log2 units under FOLD), sum and accumulator of one query tile over all its keys. gate: as
    `gate_of` makes it.

    Under FOLD a row whose maximum was HUGE at any time gets a sum of NaN, because its exponentials may have
    overflowed. AGAIN: the way without FOLD for a tile with such a row, which is rare: all key tiles in one loop.
    """
    i = i0 + tl.arange(0, BLOCK_M)
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_head = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    lists = keys_of(i0, at, span, inputs, strides, F.TILES)
    added = addends_of(inputs, strides, at, span, sizes, F)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_chunks(BLOCK_M, V)

    edges = key_range(i0, span, mod, BLOCK_M, BLOCK_N, F.WINDOW)
    steps = key_steps(lists, edges, BLOCK_N)
    FIRST: tl.constexpr = 2 if F.TILES else 0 if F.WINDOW == 2 else 1
    STEP: tl.constexpr = 1 if F.TILES else BLOCK_N
    for part in tl.static_range(2 if AGAIN else FIRST, 3):
        for step in tl.range(steps[0 if AGAIN else part], steps[part + 1], STEP, num_stages=1 if AGAIN else None):
            start, here = key_step(added, lists, edges, tl.multiple_of(step, STEP), i0, BLOCK_N, F.TILES)
            j = start + tl.arange(0, BLOCK_N)
            keys_left = span.len_k - start
            k_tile = row_pointer(k_head, strides.k, start, D.VECTOR)
            v_tile = row_pointer(v_head, strides.v, start, V.VECTOR)
            k_rows = load_chunks(k_tile, strides.k, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
            s = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
            s, _slope = scores(s, i, j, here, span, mod, F, FOLD, part != 1, 0 if part == 1 else F.WINDOW, False)
            weights = load_weights(inputs.weight, strides.weight, at, span, j)
            s = weighted_scores(s, weights)

            tile_max = tl.max(s, 1)
            if FOLD:
                tile_max = tile_max * (mod.scale * LOG2E)
            new_max = tl.maximum(row_max, tile_max)
            # A row that has seen no key yet has max -inf: subtract 0 instead, e^(-inf - 0) = 0.
            reference = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = exponential(s, reference[:, None], mod.scale, FOLD)
            decay = tl.exp2((row_max - reference) * (1.0 if FOLD else LOG2E))
            if FOLD:
                decay = tl.where(tl.abs(reference) < HUGE, decay, float("nan"))
            row_sum = row_sum * decay + tl.sum(p, 1)
            row_max = new_max
            keep = dropout_keep(inputs, at, sizes, i0, start, mod, F, BLOCK_M, BLOCK_N, False)
            p = gated(drop_unscaled(p, keep), gate, i, j, span, GATE_VECTOR, False)

            v_rows = load_chunks(v_tile, strides.v, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
            acc = add_product(p, v_rows, scale_chunks(acc, decay[:, None]), PRECISION)
    return row_max, row_sum, acc


@triton.jit
def finish(
    lse_rows, out_tile, out_strides, i, span, rows_left, sizes, mod, row_max, row_sum, acc,
    V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Stores lse and out. A row without keys has max -inf and sum 0: lse -inf, out 0."""
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(lse_rows + i, row_max + tl.log(row_sum), mask=i < span.len_q)
    rows = scale_chunks(acc, (mod.keep_scale / row_sum)[:, None])
    store_chunks(out_tile, out_strides, rows_left, sizes.head_dim_v, rows, BLOCK_M, V)
