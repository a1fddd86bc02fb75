"""Sums of P over the queries, one key tile of a query head per program.

Maths     P = w e^(S - L); sum_i P
Grid      tiles of keys, for each query head of the batch; a packed batch has those of coord.py
Tiles     k stays on chip; q and the reference stream: one product a tile. The order of a sum is fixed
Limits    tensor cores and one exponential a score
"""

import triton
import triton.language as tl

from .chunks import load_from, load_rows, rows_of, score_chunks
from .coord import HeadCoord, Span, dense_head, flat_row, query_range, shift_of, varlen_rows, varlen_tile
from .kernel import kernel
from .scores import addends_of, load_weights, probabilities, reference_of, scores


@triton.jit
def head_key_tile(pid, inputs, sizes, schedule, mod, BLOCK_N: tl.constexpr, VARLEN: tl.constexpr):
    """The place of a program that owns a key tile of a query head: first column, HeadCoord, Span."""
    first = tl.full([], 0, tl.int32)
    tile = pid % schedule.tiles
    if VARLEN:
        h = pid // schedule.tiles
        b, tile, start_k, len_k = varlen_tile(tile, inputs.cu_seqlens_k, sizes.sequences, sizes.size_k, BLOCK_N)
        start_q, len_q = varlen_rows(inputs.cu_seqlens_q, b, sizes.sequences, sizes.size_q)
        at = HeadCoord(b, first, first, h, h // sizes.group)
    else:
        at = dense_head(pid // schedule.tiles, sizes.heads, sizes.batch1, sizes.group)
        start_q = first
        start_k = first
        len_q = sizes.size_q
        len_k = sizes.size_k
    return tile * BLOCK_N, at, Span(start_q, len_q, start_k, len_k, shift_of(len_q, len_k, mod))


@kernel
def map_keys_kernel(
    inputs, lse, sums, strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """sums: fp32, one per query head and key."""
    j0, at, span = head_key_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_N, F.VARLEN)
    if j0 >= span.len_k:
        return
    j = j0 + tl.arange(0, BLOCK_N)
    row = span.start_k + j0
    k_rows = load_rows(inputs.k, strides.k, at, at.hk, row, span.len_k - j0, sizes.head_dim, BLOCK_N, D)
    q_head = rows_of(inputs.q, strides.q, at, at.h, span.start_q, D.VECTOR)
    statistics = lse + flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN)
    added = addends_of(inputs, strides, at, span, sizes, F)
    weights = load_weights(inputs.weight, strides.weight, at, span, j)
    total = tl.zeros([BLOCK_N], tl.float32)

    edges = query_range(j0, span, mod, BLOCK_N, BLOCK_M, F.WINDOW)
    for part in tl.static_range(0 if F.WINDOW >= 1 else 1, 3 if F.WINDOW == 2 else 2):
        # Rows are checked in any case: without a left side of the window, the last rows are in part 1.
        for start in tl.range(edges[part], edges[3 if part == 1 and F.WINDOW < 2 else part + 1], BLOCK_M):
            start = tl.multiple_of(start, BLOCK_M)
            i = start + tl.arange(0, BLOCK_M)
            q_rows = load_from(q_head, strides.q, start, span.len_q - start, sizes.head_dim, BLOCK_M, D, True)
            products = score_chunks(q_rows, k_rows, None, PRECISION, False)
            # Rows beyond the queries have the lse of rows without keys: probability 0.
            reference = reference_of(tl.load(statistics + i, mask=i < span.len_q, other=float("-inf")), FOLD)
            s, _slope = scores(products, i, j, added, span, mod, F, FOLD, True, 0 if part == 1 else F.WINDOW, False)
            p, _bare = probabilities(s, reference, weights, mod.scale, FOLD, False)
            total += tl.sum(p, 0)
    result = sums + flat_row(at.b, at.h, sizes.heads, span.start_k, sizes.size_k, F.VARLEN)
    tl.store(result + j, total, mask=j < span.len_k)
