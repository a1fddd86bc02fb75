"""The values per row of out that every backward kernel needs: delta, and the reference of its probabilities.

Maths     delta = sum_d dO O - dlse; reference: lse as `scores.probabilities` takes it
Grid      one axis over (sequence, head, query tile)
Limits    bytes: dO and O once
"""

import triton.language as tl

from .chunks import load_rows, row_dot
from .coord import dense_head
from .kernel import kernel
from .scores import reference_of


@kernel
def delta_kernel(
    dout, out, lse, dlse, reference, delta, dout_strides, out_strides, sizes, tiles,
    V: tl.constexpr, FOLD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta and reference. dlse: None, or fp32 like lse.

    A row without keys gets reference +inf, so that its probabilities are 0, and delta 0. Rows of varlen sequences are
    treated as those of one long sequence.
    """
    pid = tl.program_id(0)
    bh = pid // tiles
    i0 = pid % tiles * BLOCK_M
    at = dense_head(bh, sizes.heads, sizes.batch1, sizes.group)
    rows_left = sizes.size_q - i0
    dout_rows = load_rows(dout, dout_strides, at, at.h, i0, rows_left, sizes.head_dim_v, BLOCK_M, V)
    out_rows = load_rows(out, out_strides, at, at.h, i0, rows_left, sizes.head_dim_v, BLOCK_M, V)
    row_delta = row_dot(dout_rows, out_rows)
    rows = tl.arange(0, BLOCK_M)
    position = bh.to(tl.int64) * sizes.size_q + i0 + rows
    if dlse is not None:
        row_delta -= tl.load(dlse + position, mask=rows < rows_left, other=0.0)
    row_lse = tl.load(lse + position, mask=rows < rows_left, other=0.0)
    dead = row_lse == float("-inf")
    tl.store(reference + position, reference_of(row_lse, FOLD), mask=rows < rows_left)
    tl.store(delta + position, tl.where(dead, 0.0, row_delta), mask=rows < rows_left)
