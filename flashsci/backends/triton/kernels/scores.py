"""The steps from products q k^T to probabilities: bias, ALiBi, mask, window, softcap, exponentials. One code for
every kernel.

Conventions
- A kernel gets P of a tile of products in two steps: `scores`, then `probabilities`. The forward, which has no lse yet,
  takes `exponential` instead. Another order of the loads around them changes registers and spills.
- A tile of scores is [M, N], queries by keys, or, TRANSPOSED, [N, M]; bias, mask and window are written
  once for both.
- Scores are natural-log scores, except under `FOLD` (no bias, key weights, ALiBi or softcap, scale > 0), where they stay
  the raw products and the scale is folded into the exponent: one multiply-add per score.
- Scores may be huge: biases of -1e30 stand for masks, and 16-bit products reach 1e11. Their maximum is subtracted
  before any other step, from the same rounded numbers (see `rounded_product`, `HUGE`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .chunks import aligned, head_pointer

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Kinds of bias and mask, as seen by the loads.
ABSENT = tl.constexpr(0)
PLANE = tl.constexpr(1)  # a value for each (i, j)
KEY = tl.constexpr(2)  # a value for each j

WORDS = tl.constexpr(4)  # of a row of a tile, see tiles.py


class Plane(NamedTuple):
    """A bias or mask as one head sees it."""

    pointer: Any
    row_stride: Any
    column_stride: Any
    rows: Any  # beyond them there is nothing


class Bits(NamedTuple):
    """A mask at one step through its table, see tiles.py."""

    cut: Any  # whether a score may be hidden: by the mask, by the window, or behind the keys
    words: Any  # the pointer to the first word of the first row
    pitch: Any  # from the word of a row to that of the next
    partial: Any  # whether the words are read
    rest: Any  # the words where they are not read: -1 or 0


class Addends(NamedTuple):
    """The terms that a head adds to its scaled products; a mask adds 0 or -inf. Each is (x,), or () where there is none:
    Triton's functions return no None in a tuple."""

    bias: Any  # a Plane, or its tile if that was loaded before
    mask: Any  # a Plane, or Bits
    alibi: Any  # a slope


@triton.jit
def load_row(pointers, mask, other, ALONG_COLUMNS: tl.constexpr):
    """A vector of row statistics.

    One that runs along the columns of the score tile is loaded as [M, 1] and summed. The compiler would otherwise
    load it in the layout of the scores: each thread all its columns, with a 64-bit pointer each, which spills.
    """
    if ALONG_COLUMNS:
        return tl.sum(tl.load(pointers[:, None], mask=mask[:, None], other=other), 1)
    else:
        return tl.load(pointers, mask=mask, other=other)


@triton.jit
def addends_of(inputs, strides, at, span, sizes, F: tl.constexpr):
    """The Addends of the head `at`."""
    bias = bias_of(inputs.bias, strides.bias, at, span, inputs, sizes, F.BIAS_VECTOR, F)
    return addends(bias, mask_of(inputs, strides, at, span, F), alibi_of(inputs, strides, at, sizes, F))


@triton.jit
def addends(bias, mask, alibi):
    """The Addends of these; any may be None."""
    return Addends(() if bias is None else (bias,), () if mask is None else (mask,), () if alibi is None else (alibi,))


@triton.jit
def bias_of(pointer, strides, at, span, inputs, sizes, VECTOR: tl.constexpr, F: tl.constexpr):
    """The plane of a bias, or of a tensor of its shape, for the head `at`; None for None. strides: (b0, b1, head,
    row, column).

    A ragged bias has one row-major [len_q, len_k] block per sequence; a block that is not inside the tensor counts as
    absent.
    """
    if pointer is not None:
        if F.RAGGED:
            start = tl.load(inputs.bias_offsets + tl.maximum(at.b, 0))
            last = sizes.bias_total - span.len_q.to(tl.int64) * span.len_k  # no sum, which may overflow
            fits = (start >= 0) & (start <= last)
            start = tl.where(fits, start, 0)
            base = pointer + at.h.to(tl.int64) * strides[2] + start * strides[4]
            row_stride = span.len_k.to(tl.int64) * strides[4]
            return Plane(base, row_stride, strides[4], tl.where(fits, span.len_q, 0))
        else:
            return dense_plane(pointer, strides, at, span, VECTOR)


@triton.jit
def mask_of(inputs, strides, at, span, F: tl.constexpr):
    """The plane of the mask for the head `at`; None without a mask."""
    if inputs.mask is not None:
        return dense_plane(inputs.mask, strides.mask, at, span, F.MASK_VECTOR)


@triton.jit
def alibi_of(inputs, strides, at, sizes, F: tl.constexpr):
    """The ALiBi slope of the head `at`; None without ALiBi. Rows of no sequence have no slope and no keys."""
    if inputs.alibi_slopes is not None:
        head = inputs.alibi_slopes + at.h.to(tl.int64) * strides.alibi[2]
        if F.VARLEN:
            known = (at.b >= 0) & (at.b < sizes.sequences)
            return tl.load(head + at.b.to(tl.int64) * strides.alibi[0], mask=known, other=0.0)
        else:
            batch = at.b0.to(tl.int64) * strides.alibi[0] + at.b1.to(tl.int64) * strides.alibi[1]
            return tl.load(head + batch)


@triton.jit
def dense_plane(pointer, strides, at, span, VECTOR: tl.constexpr):
    base = head_pointer(pointer, strides, at, at.h, VECTOR)
    base += span.start_k.to(tl.int64) * strides[4]
    return Plane(base, strides[3], strides[4], span.len_q)


@triton.jit
def plane_pointers(plane, i, j, len_k, KIND: tl.constexpr, VECTOR: tl.constexpr):
    """Pointers to bias or mask at (i, j), and which are inside. VECTOR 0: columns have a stride of their own.

    Rows are whole vectors: a load ends with the vector of the last key, and `scores` hides all beyond that key. A plane
    that is stored has a multiple of VECTOR keys.
    """
    inside = j < (aligned(len_k + (VECTOR - 1), VECTOR) if VECTOR > 1 else len_k)
    pointers = plane.pointer + (j if VECTOR > 0 else j.to(tl.int64) * plane.column_stride)
    if KIND == PLANE:
        pointers += i.to(tl.int64) * aligned(plane.row_stride, VECTOR)
        inside = inside & (i < plane.rows)
    return pointers, inside


@triton.jit
def load_plane(plane, i, j, len_k, KIND: tl.constexpr, VECTOR: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Bias or mask at rows i and columns j (vectors), zero outside: [M, N] or, TRANSPOSED, [N, M]."""
    i = i[None, :] if TRANSPOSED else i[:, None]
    j = j[:, None] if TRANSPOSED else j[None, :]
    pointers, inside = plane_pointers(plane, i, j, len_k, KIND, VECTOR)
    return tl.load(pointers, mask=inside, other=0)


@triton.jit
def bits_at(bits, j, M: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Whether M rows see columns j (a vector, inside one tile): [M, N] or, TRANSPOSED, [N, M].

    Words become scores by a change of shape: so a thread holds those of its own scores alone.
    """
    N: tl.constexpr = j.shape[0]
    COUNT: tl.constexpr = (N + 31) // 32
    EACH: tl.constexpr = N // COUNT  # columns of a word
    rows = tl.arange(0, M) * bits.pitch
    places = tl.arange(0, COUNT)
    places = rows[None, :] + places[:, None] if TRANSPOSED else rows[:, None] + places[None, :]
    words = tl.load(bits.words + places, mask=bits.partial, other=bits.rest)
    if TRANSPOSED:
        words = tl.reshape(tl.broadcast_to(words[:, None, :], [COUNT, EACH, M]), [N, M])
    else:
        words = tl.reshape(tl.broadcast_to(words[:, :, None], [M, COUNT, EACH]), [M, N])
    column = j % 32 if N < 32 else tl.arange(0, N) % 32
    column = column[:, None] if TRANSPOSED else column[None, :]
    return (words >> column) & 1 != 0


@triton.jit
def store_plane(plane, i, j, len_k, value, VECTOR: tl.constexpr):
    """Store value [M, N] at rows i and columns j (vectors) of a bias gradient, where they are inside."""
    pointers, inside = plane_pointers(plane, i[:, None], j[None, :], len_k, PLANE, VECTOR)
    tl.store(pointers, value.to(plane.pointer.dtype.element_ty), mask=inside)


@triton.jit
def rounded_product(x, y):
    """x y as a separate rounded number.

    The compiler would contract x y - m to one multiply-add, which leaves the rounding of x y where zero is correct:
    for scores beyond 1e9 this is more than an exponential can take. The addition of 0 costs nothing and, because it
    turns -0 into 0, is not optimised away.
    """
    return tl.fma(x, y, 0.0)


@triton.jit
def tanh(x):
    """tanh x to a few ulp of its value, and its derivative without cancellation.

    The derivative is 1 - tanh^2 = 4 e / (1 + e)^2 with e = e^(-2 |x|). 1 - e cancels near 0, and a softcap far above
    the scores magnifies that loss: there a series is used, in every dtype.
    """
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    inverse = 1.0 / (1.0 + e)
    large = (1.0 - e) * inverse
    z = x * x
    series = (
        (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
        - 3.33332819422e-1
    ) * z * x + x
    t = tl.where(tl.abs(x) < 0.625, series, tl.where(x < 0.0, -large, large))
    return t, 4.0 * e * inverse * inverse


@triton.jit
def scores(
    products, i, j, added, span, mod, F: tl.constexpr, FOLD: tl.constexpr,
    CHECK_KEYS: tl.constexpr, WINDOW: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of products q k^T at rows i and columns j (vectors), and the slope of the softcap (1 without).
    [M, N] or, TRANSPOSED, [N, M].

    added: Addends. CHECK_KEYS: the tile may extend beyond the keys. WINDOW: F.WINDOW, or 0 for a tile that the window does
    not cut.
    """
    slope = 1.0
    s = products
    factor = mod.scale
    if F.SOFTCAP and not F.CAPS_BIAS:
        s, slope = tanh(products * (mod.scale / mod.softcap))
        factor = mod.softcap
    if len(added.bias) > 0:  # one multiply-add, in every kernel the same: P is recomputed from equal scores
        if isinstance(added.bias[0], tl.tensor):
            value = added.bias[0]
        else:
            value = load_plane(added.bias[0], i, j, span.len_k, F.BIAS, F.BIAS_VECTOR, TRANSPOSED)
        s = tl.fma(s, factor, value.to(tl.float32))
    elif not FOLD:
        s = rounded_product(s, factor)
    if len(added.alibi) > 0:  # one multiply-add, for the same reason
        away = j[:, None] - i[None, :] if TRANSPOSED else j[None, :] - i[:, None]
        s = tl.fma(tl.abs(away - span.shift).to(tl.float32), -added.alibi[0], s)
    if F.CAPS_BIAS:
        bounded, slope = tanh(rounded_product(s, 1.0 / mod.softcap))
        # A bias of -inf hides its key.
        s = tl.where(s == float("-inf"), s, rounded_product(bounded, mod.softcap))
    if len(added.mask) > 0 and len(added.mask[0]) == 5:  # Bits
        if added.mask[0].cut:
            s = tl.where(bits_at(added.mask[0], j, i.shape[0], TRANSPOSED), s, float("-inf"))
            s = within(s, i, j, span, mod, CHECK_KEYS, WINDOW, TRANSPOSED)
    else:
        if len(added.mask) > 0:
            attend = load_plane(added.mask[0], i, j, span.len_k, F.MASK, F.MASK_VECTOR, TRANSPOSED)
            s = tl.where(attend != 0, s, float("-inf"))
        s = within(s, i, j, span, mod, CHECK_KEYS, WINDOW, TRANSPOSED)
    if F.CAPS_BIAS:  # the bias beyond the last key may be NaN
        slope = tl.where(s == float("-inf"), 0.0, slope)
    return s, slope


@triton.jit
def within(s, i, j, span, mod, CHECK_KEYS: tl.constexpr, WINDOW: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Scores, -inf behind the keys and outside the window."""
    i = i[None, :] if TRANSPOSED else i[:, None]
    j = j[:, None] if TRANSPOSED else j[None, :]
    if CHECK_KEYS:
        s = tl.where(j < span.len_k, s, float("-inf"))
    if WINDOW >= 1:
        s = tl.where(j - i <= span.shift + mod.right, s, float("-inf"))
    if WINDOW == 2:
        s = tl.where(j - i >= span.shift - mod.left, s, float("-inf"))
    return s


@triton.jit
def of_products(ds, slope, F: tl.constexpr):
    """The gradient of scaled products: dS times the slope of the softcap."""
    if F.SOFTCAP:
        return ds * slope
    else:
        return ds


@triton.jit
def of_addends(ds, slope, F: tl.constexpr):
    """The gradient of a bias at each pair: dS, times the slope of a softcap that bounds the bias, too."""
    if F.CAPS_BIAS:
        return ds * slope
    else:
        return ds


# A reference from here on is rounded to multiples of 2 or more: exponents next to it mean nothing.
HUGE = tl.constexpr(16777216.0)
# From here on, the roundings of an lse, and of the scores next to it, may halve P.
LARGE = tl.constexpr(1048576.0)
MARGIN = tl.constexpr(2.0**-18)


@triton.jit
def exponential(s, reference, scale, FOLD: tl.constexpr):
    """e^(s - reference); under FOLD the reference is in log2 units, see the head of this file.

    Under FOLD the multiply-add sees the rounding of the reference: 2^(s c - r) is off by one factor for the whole
    row, up to 2 where the reference is not HUGE. A sum of exponentials with the same reference cancels that factor.
    """
    if FOLD:
        return tl.exp2(s * (scale * LOG2E) - reference)
    else:
        return tl.exp2((s - reference) * LOG2E)


@triton.jit
def reference_of(lse, FOLD: tl.constexpr):
    """The reference that `probabilities` subtracts: lse, in log2 units under FOLD; +inf for rows without keys, so
    that their probabilities are 0.

    A LARGE lse has lost much of the sum of exponentials. Its roundings here and those of the scores in another kernel
    decide between 0 and infinity. It is lowered by more than these roundings, so that the row's largest scores get 1.
    The forward may be that of another backend, whose tensor cores truncate a sum over the head dim in up to 32 steps.
    """
    reference = tl.where(lse == float("-inf"), float("inf"), lse)
    if FOLD:
        reference = reference * LOG2E
    # Not to -inf, which is the score of a hidden key.
    low = tl.maximum(reference * (1.0 + MARGIN), LOWEST)
    low = tl.where(reference < 0.0, low, reference * (1.0 - MARGIN))
    return tl.where(tl.abs(reference) < LARGE, reference, low)


LOWEST = tl.constexpr(-3.4028234663852886e38)
# e^(S - lse) without a key's weight has no bound; with this bound, a weight of zero makes it zero.
LARGEST = tl.constexpr(1e38)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)  # of fp32


@triton.jit
def load_weights(pointer, strides, at, span, j):
    """Key weights (or other values per key) of the sequence's key head at columns j, zero outside: fp32 [N]; None for
    None.

    strides: (b0, b1, key head, key). Subnormal weights are zero: 1 / w is beyond fp32, and units that flush them
    disagree.
    """
    if pointer is not None:
        head = head_pointer(pointer, strides, at, at.hk, 1)
        columns = (span.start_k + j).to(tl.int64) * strides[3]
        found = tl.load(head + columns, mask=j < span.len_k, other=0.0)
        # Two conversions on purpose: Triton 3.6 moves a single one to where its operand is not yet defined.
        subnormal = tl.abs(found).to(tl.float32) < SMALLEST_NORMAL
        return tl.where(subnormal, 0.0, found.to(tl.float32))


@triton.jit
def weighted_scores(s, weights):
    """s [M, N] + log w: scores whose exponentials are weighted by w [N], -inf for a weight of zero; None: s
    itself."""
    if weights is None:
        return s
    else:
        nothing = weights == 0.0
        logarithm = tl.log(tl.where(nothing, 1.0, weights))
        return s + tl.where(nothing, float("-inf"), logarithm)[None, :]


@triton.jit
def along_rows(x, TRANSPOSED: tl.constexpr):
    """A number per query in the shape that broadcasts to a tile of scores."""
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def at_most(x, most):
    """min(x, most); NaN stays NaN."""
    return tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def probabilities(s, reference, weights, scale, FOLD: tl.constexpr, TRANSPOSED: tl.constexpr):
    """P = w e^(s - reference), with the reference of each row [M], and the same without the weights w [N] (None: 1). The
    latter is the derivative by a weight, also where the weight is zero.

    lse is rounded, for scores of -1e9 to multiples of 64. Therefore P is cut at 1, its bound: it would be infinite in
    such rows, and NaN where it meets a zero. Elsewhere the cut only removes roundings.
    """
    reference = along_rows(reference, TRANSPOSED)
    if weights is None:
        exponent = s * (scale * LOG2E) - reference if FOLD else (s - reference) * LOG2E
        p = tl.exp2(at_most(exponent, 0.0))
        return p, p
    else:
        # w N is at most 1. For a weight of zero N is at most LARGEST, and at most 1 in a row whose reference is HUGE.
        most = tl.where(weights > 0.0, tl.minimum(1.0 / weights, LARGEST), -1.0)
        most, weights = (most[:, None], weights[:, None]) if TRANSPOSED else (most[None, :], weights[None, :])
        most = tl.where(most < 0.0, tl.where(tl.abs(reference) < HUGE, LARGEST, 1.0), most)
        bare = at_most(exponential(s, reference, scale, FOLD), most)
        return bare * weights, bare
