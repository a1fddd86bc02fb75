"""Forward of short rows: out and lse of queries with few keys, rows of many heads in one tile (short_rows.py).

Maths     as in forward.py, one key at a time
Grid      one axis over the rows of all heads
Tiles     q and the fp32 accumulator stay on chip; keys and values pass one by one
Limits    bytes, as long as the queries of a head are few or its keys are: keys and values of a head come from L1 after the first
          query
"""

import triton.language as tl

from .chunks import rows_of, scale_chunks, zero_chunks
from .kernel import kernel
from .scores import LOG2E, addends_of, exponential, scores
from .short_rows import add_multiple, load_each, load_next, products_of, rows_here, store_at, whole_span


@kernel
def short_forward_kernel(
    inputs, out, lse, strides, out_strides, sizes, rows, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, inside, at, i = rows_here(tl.program_id(0), rows, sizes.size_q, sizes.heads, sizes.group, sizes.batch1, BLOCK)
    span = whole_span(sizes, mod)
    q_rows = load_each(inputs.q, strides.q, at, at.h, i[:, None], sizes.head_dim, D)
    k_heads = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_heads = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    added = addends_of(inputs, strides, at, span, sizes, F)
    row_max = tl.full([BLOCK, 1], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK, 1], tl.float32)
    acc = zero_chunks(BLOCK, V)
    for step in tl.range(0, sizes.size_k):
        j = step + tl.arange(0, 1)
        k_rows = load_next(k_heads, strides.k, j[:, None], sizes.head_dim, D)
        v_rows = load_next(v_heads, strides.v, j[:, None], sizes.head_dim_v, V)
        s, _slope = scores(products_of(q_rows, k_rows), i, j, added, span, mod, F, False, False, F.WINDOW, False)
        new_max = tl.maximum(row_max, s)
        # A row that has seen no key yet has max -inf: subtract 0 instead, e^(-inf - 0) = 0.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = exponential(s, reference, mod.scale, False)
        decay = tl.exp2((row_max - reference) * LOG2E)
        row_sum = row_sum * decay + p
        row_max = new_max
        acc = add_multiple(p, v_rows, scale_chunks(acc, decay))
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # without keys: lse -inf, out 0
    tl.store(lse + row, row_max + tl.log(row_sum), mask=inside)
    out_rows = rows_of(out, out_strides, at, at.h, i[:, None], V.VECTOR)
    store_at(out_rows, inside, sizes.head_dim_v, scale_chunks(acc, 1.0 / row_sum), V)
