"""The largest probabilities of each row of P and their keys, one query tile per program.

Maths     P = w e^(S - L); of equal ones the smaller key comes first
Grid      as in forward.py
Tiles     q and the K best of each row stay on chip; k streams: one product a tile
Limits    steps, in each of which every row takes its largest new entry of the tile. A tile has as many as the row with the
          most new ones: K in the first tile, for random scores about K / n and a few in the n-th, none where no row has any
"""

import triton
import triton.language as tl

from .chunks import load_from, load_rows, rows_of, score_chunks
from .coord import flat_row, key_range, query_tile
from .kernel import kernel
from .scores import addends_of, load_weights, probabilities, reference_of, scores

LAST = tl.constexpr(0x7FFFFFFF)  # no key, and the bits of a number without its sign
LOWEST = tl.constexpr(-(1 << 62))


@triton.jit
def entry(bits, key):
    """An entry of the list of a row, int64: entries have the order of their probabilities, those of smaller keys first."""
    return (bits.to(tl.int64) << 32) | (LAST - key)


@triton.jit
def inserted(best, low, found):
    """best [M, K] with found [M] in the place of its lowest entries low [M], and the lowest after that."""
    best = tl.where(best == low[:, None], found[:, None], best)
    return best, tl.min(best, 1)


@triton.jit
def least_of(low):
    """The bits that a probability must exceed to enter a row: those of its lowest entry, or of 0."""
    return tl.maximum(low >> 32, 0).to(tl.int32)


@kernel
def map_top_kernel(
    inputs, lse, values, keys, count, strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """values (fp32) and keys (int64): count of each row, at most K, in descending order. Beyond the probabilities above zero
    there are other keys of the sequence with 0, then -1."""
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
    # Rows beyond the queries have the lse of rows without keys: probability 0.
    reference = reference_of(tl.load(lse + position, mask=inside, other=float("-inf")), FOLD)
    best = tl.zeros([BLOCK_M, K], tl.int64) - 1 - tl.arange(0, K)[None, :]  # below all entries
    low = tl.min(best, 1)

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
            weights = load_weights(inputs.weight, strides.weight, at, span, j)
            p, _bare = probabilities(s, reference, weights, mod.scale, FOLD, False)
            bits = p.to(tl.int32, bitcast=True) & LAST  # without a sign NaN is the largest
            top = tl.max(bits, 1)
            while tl.max((top > least_of(low)).to(tl.int32), 0) > 0:
                key = tl.min(tl.where(bits == top[:, None], j[None, :], LAST), 1)
                best, low = inserted(best, low, tl.where(top > least_of(low), entry(top, key), low))
                bits = tl.where(j[None, :] == key[:, None], 0, bits)
                top = tl.max(bits, 1)

    if tl.min(low, 0) < 0:  # a row has fewer than K above zero: the first of its other keys follow
        for key in tl.range(0, tl.minimum(span.len_k, K)):
            known = tl.max(((best >= 0) & (LAST - (best & LAST) == key)).to(tl.int32), 1) > 0
            best, low = inserted(best, low, tl.where(known | (low >= 0), low, entry(tl.zeros_like(i), key)))

    first = position.to(tl.int64) * count
    for n in tl.range(0, count):
        largest = tl.max(best, 1)
        value = least_of(largest).to(tl.float32, bitcast=True)
        tl.store(values + first + n, value, mask=inside)
        tl.store(keys + first + n, tl.where(largest < 0, -1, LAST - (largest & LAST)), mask=inside)
        best = tl.where(best == largest[:, None], LOWEST, best)
