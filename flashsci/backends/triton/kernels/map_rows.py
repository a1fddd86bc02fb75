"""Statistics of the rows of P, one query tile per program.

Maths     P = w e^(S - L); entropy -sum_j P log P; largest S
Grid      as in forward.py
Tiles     q stays on chip; k streams: one product a tile, no store but two numbers a row
Limits    tensor cores and two exponentials or logarithms a score
"""

import triton.language as tl

from .chunks import load_from, load_rows, rows_of, score_chunks
from .coord import flat_row, key_range, query_tile
from .kernel import kernel
from .scores import addends_of, load_weights, probabilities, reference_of, scores


@kernel
def map_rows_kernel(
    inputs, lse, entropy, largest, strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """entropy and largest, fp32, one per row; an argument of None is not computed."""
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    i = i0 + tl.arange(0, BLOCK_M)
    row = span.start_q + i0
    position = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN) + i
    inside = i < span.len_q
    added = addends_of(inputs, strides, at, span, sizes, F)
    q_rows = load_rows(inputs.q, strides.q, at, at.h, row, span.len_q - i0, sizes.head_dim, BLOCK_M, D)
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    reference = reference_of(tl.load(lse + position, mask=inside, other=float("-inf")), FOLD)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)

    edges = key_range(i0, span, mod, BLOCK_M, BLOCK_N, F.WINDOW)
    for part in tl.static_range(0 if F.WINDOW == 2 else 1, 3):
        for start in tl.range(edges[part], edges[part + 1], BLOCK_N):
            start = tl.multiple_of(start, BLOCK_N)
            j = start + tl.arange(0, BLOCK_N)
            k_rows = load_from(k_head, strides.k, start, span.len_k - start, sizes.head_dim, BLOCK_N, D, part != 1)
            products = score_chunks(q_rows, k_rows, None, PRECISION, False)
            s, _slope = scores(
                products, i, j, added, span, mod, F, FOLD, part != 1, 0 if part == 1 else F.WINDOW, False
            )  # fmt: skip
            if largest is not None:
                top = tl.maximum(top, tl.max(s, 1))
            if entropy is not None:
                weights = load_weights(inputs.weight, strides.weight, at, span, j)
                p, _bare = probabilities(s, reference, weights, mod.scale, FOLD, False)
                total -= tl.sum(p * tl.log(tl.where(p > 0.0, p, 1.0)), 1)
    if largest is not None:
        tl.store(largest + position, top * mod.scale if FOLD else top, mask=inside)
    if entropy is not None:
        tl.store(entropy + position, total, mask=inside)
