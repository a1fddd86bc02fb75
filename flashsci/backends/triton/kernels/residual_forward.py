"""Forward of residual attention: out = softmax(S) v, lse and the scores S = scale q k^T + bias; one query tile per
program.

The next layer adds S to its own scores.

Maths     as in forward.py, without its FOLD
Grid      as forward
Tiles     as forward; every tile of S is stored once, in the dtype of the bias (of q without one); P is
          that of S before this rounding
Limits    bytes of bias and scores; at 8 channels a head also the instructions around the exponentials
"""

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
from .kernel import kernel
from .residual_scores import bias_tile, plane_of, store_pieces
from .scores import LOG2E, addends, bias_of, scores


@kernel
def residual_forward_kernel(
    inputs, out, lse, kept, strides, out_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    VECTOR: tl.constexpr, BIAS_VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """kept: the scores, as in residual_scores.py. BIAS_VECTOR: VECTOR for the bias; 0: its keys are not
    neighbours."""
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, False, False)
    i = i0 + tl.arange(0, BLOCK_M)
    rows_left = span.len_q - i0
    q_rows = load_rows(inputs.q, strides.q, at, at.h, i0, rows_left, sizes.head_dim, BLOCK_M, D)
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_head = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    bias = bias_of(inputs.bias, strides.bias, at, span, inputs, sizes, BIAS_VECTOR, F)
    into = plane_of(kept, at, span, sizes, VECTOR)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_chunks(BLOCK_M, V)

    edges = key_range(i0, span, mod, BLOCK_M, BLOCK_N, 0)
    for part in tl.static_range(1, 3):
        for start in tl.range(edges[part], edges[part + 1], BLOCK_N):
            start = tl.multiple_of(start, BLOCK_N)
            j = start + tl.arange(0, BLOCK_N)
            keys_left = span.len_k - start
            k_tile = row_pointer(k_head, strides.k, start, D.VECTOR)
            v_tile = row_pointer(v_head, strides.v, start, V.VECTOR)
            k_rows = load_chunks(k_tile, strides.k, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
            s = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
            added = addends(bias_tile(bias, i, j, span.len_k, F.BIAS, BIAS_VECTOR), None, None)
            s, _slope = scores(s, i, j, added, span, mod, F, False, part != 1, 0, False)
            store_pieces(into, i, j, span.len_k, s, VECTOR)

            new_max = tl.maximum(row_max, tl.max(s, 1))
            # A row that has seen no key yet has max -inf: subtract 0 instead, e^(-inf - 0) = 0.
            reference = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2((s - reference[:, None]) * LOG2E)
            decay = tl.exp2((row_max - reference) * LOG2E)
            row_sum = row_sum * decay + tl.sum(p, 1)
            row_max = new_max
            keep = dropout_keep(inputs, at, sizes, i0, start, mod, F, BLOCK_M, BLOCK_N, False)
            p = drop_unscaled(p, keep)
            v_rows = load_chunks(v_tile, strides.v, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
            acc = add_product(p, v_rows, scale_chunks(acc, decay[:, None]), PRECISION)

    # A row without keys has max -inf and sum 0: lse -inf, out 0.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    rows = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, False) + i
    tl.store(lse + rows, row_max + tl.log(row_sum), mask=i < span.len_q)
    out_tile = rows_of(out, out_strides, at, at.h, i0, V.VECTOR)
    acc = scale_chunks(acc, (mod.keep_scale / row_sum)[:, None])
    store_chunks(out_tile, out_strides, rows_left, sizes.head_dim_v, acc, BLOCK_M, V)
