"""Forward between the products q k^T and P v, for wide heads with scores in memory.

Maths     P = R e^(S - lse), in the place of q k^T
Grid      one axis over (sequence, head, tile of rows)
Tiles     whole rows, up to 8,192 keys of them; a program with one row has more warps beyond 4,096
Limits    bytes of the scores
"""

import triton
import triton.language as tl

from .dropout import drop_unscaled, dropout_keep
from .gate import gated
from .kernel import kernel
from .scores import addends_of, exponential, load_weights, scores, weighted_scores
from .wide_scores import load_scores, score_rows, store_scores


@kernel
def wide_forward_kernel(
    inputs, p, lse, strides, tiles, sizes, mod,
    F: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """p: q k^T on the way in, P on the way out."""
    i0, at, span, first = score_rows(tl.program_id(0), tiles, sizes, mod, BLOCK_M)
    forward_rows_of(inputs, None, p, lse, i0, at, span, first, strides, sizes, mod, F, VECTOR, BLOCK_M, BLOCK_N, 0)


@triton.jit
def forward_rows_of(
    inputs, gate, p, lse, i0, at, span, first, strides, sizes, mod,
    F: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """The results of whole rows, stored. gate: as `gate_of` makes it."""
    i = i0 + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    added = addends_of(inputs, strides, at, span, sizes, F)
    s = load_scores(p, first, i, j, span, VECTOR)
    s, _slope = scores(s, i, j, added, span, mod, F, False, True, F.WINDOW, False)
    s = weighted_scores(s, load_weights(inputs.weight, strides.weight, at, span, j))

    row_max = tl.max(s, 1)
    # A row without keys has maximum -inf: subtract 0 instead, e^(-inf - 0) = 0.
    reference = tl.where(row_max == float("-inf"), 0.0, row_max)
    e = exponential(s, reference[:, None], mod.scale, False)
    row_sum = tl.sum(e, 1)
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(lse + first + i, row_max + tl.log(row_sum), mask=i < span.len_q)
    keep = dropout_keep(inputs, at, sizes, i0, 0, mod, F, BLOCK_M, BLOCK_N, False)
    e = gated(drop_unscaled(e, keep), gate, i, j, span, GATE_VECTOR, False)
    store_scores(p, first, i, j, span, e * (mod.keep_scale / row_sum)[:, None], VECTOR)
