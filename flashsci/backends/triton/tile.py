"""Device functions shared by every kernel: where a program works, what it loads, which scores it sees.

Conventions of all kernels in this package
- A query tile has rows i, a key tile has columns j, both counted within their own sequence (a packed
  sequence starts at row `start_q` of the tensor, a dense one at 0).
- A tile of scores is [M, N], queries by keys, or, TRANSPOSED, [N, M]; bias, mask and window are written
  once for both.
- A head dim is held as one or two chunks of a power of two (`D0`, `D1`; `D1` = 0: one chunk), so that
  80 = 64 + 16 and 96 = 64 + 32 cost what they are, not 128.
- Strides are never specialised. `VECTOR` is the number of elements that every stride and head dim is
  known to be a multiple of: `aligned` tells the compiler, which then loads 16 bytes at a time.
- Scores are natural-log scores, except under `FOLD` (no bias, no softcap, scale > 0), where they stay
  the raw products and the scale is folded into the exponent: one multiply-add per score.
- Scores may be huge: biases of -1e30 stand for masks, and 16-bit products reach 1e11. Their maximum is subtracted
  before anything else is done to them, from the same rounded numbers (see `rounded_product`, `HUGE`).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The interpreter multiplies the bit patterns of 16-bit operands; there, products are taken in fp32.
INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)

# Kinds of bias and mask, as seen by the loads.
ABSENT = tl.constexpr(0)
PLANE = tl.constexpr(1)  # a value for each (i, j)
KEY = tl.constexpr(2)  # a value for each j
TILE = tl.constexpr(3)  # of a bias: the tile itself, loaded before


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def score_dot(a, b, acc, PRECISION: tl.constexpr):
    """a b^T + acc for a [M, D], b [N, D]: scores and dP, whose error exponentials and differences magnify.

    Tensor cores round every partial sum towards zero. For three TF32 products, meant to be as good
    as fp32, sums are therefore kept short (D <= 64) and added outside.
    """
    if PRECISION == "tf32x3":
        if a.shape[1] > 64:
            a0, a1 = tl.split(tl.reshape(a, (a.shape[0], a.shape[1] // 2, 2)))  # even, odd columns
            b0, b1 = tl.split(tl.reshape(b, (b.shape[0], b.shape[1] // 2, 2)))
            return score_dot(a1, b1, score_dot(a0, b0, acc, PRECISION), PRECISION)
        elif acc is None:
            return dot(a, b.T, None, PRECISION)
        else:
            return acc + dot(a, b.T, None, PRECISION)
    else:
        return dot(a, b.T, acc, PRECISION)


@triton.jit
def aligned(x, VECTOR: tl.constexpr):
    """x, which is a multiple of VECTOR, in a form that shows it."""
    return x // VECTOR * VECTOR if VECTOR > 1 else x


@triton.jit
def head_pointer(pointer, strides, b0, b1, h, VECTOR: tl.constexpr):
    """Start of one head: strides are those of (b0, b1, head, row)."""
    offset = (
        b0.to(tl.int64) * strides[0] + b1.to(tl.int64) * strides[1] + h.to(tl.int64) * strides[2]
    )
    return pointer + aligned(offset, VECTOR)


@triton.jit
def load_tile(
    tile,
    row_stride,
    rows_left,
    columns_left,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    CHECK_COLUMNS: tl.constexpr,
):
    """[ROWS, WIDTH] at `tile`; zero outside the rows and columns left (0 * NaN must not happen)."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    pointers = tile + rows.to(tl.int64) * aligned(row_stride, VECTOR) + columns
    if CHECK_ROWS and CHECK_COLUMNS:
        return tl.load(
            pointers, mask=(rows < rows_left) & (columns < aligned(columns_left, VECTOR)), other=0.0
        )
    elif CHECK_ROWS:
        return tl.load(pointers, mask=rows < rows_left, other=0.0)
    elif CHECK_COLUMNS:
        return tl.load(pointers, mask=columns < aligned(columns_left, VECTOR), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(
    tile,
    row_stride,
    rows_left,
    columns_left,
    value,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    pointers = tile + rows.to(tl.int64) * aligned(row_stride, VECTOR) + columns
    inside = (rows < rows_left) & (columns < aligned(columns_left, VECTOR))
    tl.store(pointers, value.to(tile.dtype.element_ty), mask=inside)


# Where a program works.


@triton.jit
def dense_place(pid, tiles, heads, batch1, heads_total, section, REVERSED: tl.constexpr):
    """Tile, head and batch of a program.

    Heads go in sections whose keys and values fit in the L2 cache together; within a section all heads
    do their first tile, then their second, ...: with a causal mask the longest come first.
    """
    in_section = section * tiles
    first = pid // in_section * section
    rest = pid % in_section
    width = tl.minimum(section, heads_total - first)
    tile = rest // width
    if REVERSED:
        tile = tiles - 1 - tile
    bh = first + rest % width
    b = bh // heads
    return tile, b, b // batch1, b % batch1, bh % heads


@triton.jit
def sequence_edge(cu_seqlens, s, total):
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + s), 0), total)


@triton.jit
def packed_place(slot, cu_seqlens, sequences, total, BLOCK: tl.constexpr):
    """Sequence, tile in it, its first row and its length, for one of `total // BLOCK + sequences + 2` slots.

    Counting from the edges alone: sequence n owns the slots from cu[n] // BLOCK + n on, always enough for
    its tiles. Rows before the first and after the last sequence count as sequences -1 and `sequences`.
    """
    low = 0  # the largest s in [0, sequences + 1] with edge(s) // BLOCK + s <= slot, edge(s) = cu[s - 1]
    high = sequences + 1
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_edge(cu_seqlens, middle - 1, total) // BLOCK + middle <= slot:
            low = middle
        else:
            high = middle - 1
    start = tl.full([], 0, tl.int32)
    if low > 0:
        start = sequence_edge(cu_seqlens, low - 1, total)
    end = total
    if low <= sequences:
        end = sequence_edge(cu_seqlens, low, total)
    tile = slot - (start // BLOCK + low)
    return low - 1, tile, start, tl.maximum(end - start, 0)


@triton.jit
def packed_span(cu_seqlens, n, sequences, total):
    """First row and length of sequence n; no rows for the two that are none (see packed_place)."""
    start = tl.full([], 0, tl.int32)
    length = tl.full([], 0, tl.int32)
    if (n >= 0) & (n < sequences):
        start = sequence_edge(cu_seqlens, n, total)
        length = tl.maximum(sequence_edge(cu_seqlens, n + 1, total) - start, 0)
    return start, length


@triton.jit
def split_range(low, high, full_low, full_high, BLOCK: tl.constexpr):
    """Cuts [low, high) into tiles: masked [a, b), unmasked [b, c), masked [c, high)."""
    a = tl.maximum(low, 0) // BLOCK * BLOCK
    last = tl.maximum(tl.cdiv(high, BLOCK) * BLOCK, a)
    b = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(full_low, 0), BLOCK) * BLOCK, a), last)
    c = tl.minimum(tl.maximum(tl.maximum(full_high, 0) // BLOCK * BLOCK, b), last)
    return a, b, c


@triton.jit
def key_range(i0, i1, len_k, shift, left, right, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Key tiles that query rows [i0, i1) can see: masked [a, b), unmasked [b, c), masked [c, d)."""
    low = 0
    high = len_k
    full_low = 0
    full_high = len_k
    if WINDOW >= 1:
        high = tl.minimum(len_k, i1 + shift + right)
        full_high = tl.minimum(len_k, i0 + shift + right + 1)
    if WINDOW == 2:
        low = i0 + shift - left
        full_low = i1 - 1 + shift - left
    a, b, c = split_range(low, high, full_low, full_high, BLOCK)
    return a, b, c, high


@triton.jit
def query_range(j0, j1, len_q, shift, left, right, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Query tiles that see key columns [j0, j1), likewise."""
    low = 0
    high = len_q
    full_low = 0
    full_high = len_q
    if WINDOW >= 1:
        low = j0 - shift - right
        full_low = j1 - 1 - shift - right
    if WINDOW == 2:
        high = tl.minimum(len_q, j1 - shift + left)
        full_high = tl.minimum(len_q, j0 - shift + left + 1)
    a, b, c = split_range(low, high, full_low, full_high, BLOCK)
    return a, b, c, high


@triton.jit
def load_row(pointers, mask, other, ALONG_COLUMNS: tl.constexpr):
    """A vector of row statistics. One that runs along the columns of the score tile is loaded as
    [M, 1] and summed: the compiler would otherwise load it in the layout of the scores, every
    thread all its columns with a 64-bit pointer each, which spills."""
    if ALONG_COLUMNS:
        return tl.sum(tl.load(pointers[:, None], mask=mask[:, None], other=other), 1)
    else:
        return tl.load(pointers, mask=mask, other=other)


# Scores.


@triton.jit
def plane_pointers(pointer, strides, i, j, len_q, len_k, KIND: tl.constexpr, VECTOR: tl.constexpr):
    """Pointers to bias or mask at (i, j), and which lie inside. VECTOR 0: columns have a stride of their own."""
    inside = j < aligned(len_k, VECTOR)
    pointers = pointer + (j if VECTOR > 0 else j.to(tl.int64) * strides[1])
    if KIND == PLANE:
        pointers += i.to(tl.int64) * aligned(strides[0], VECTOR)
        inside = inside & (i < len_q)
    return pointers, inside


@triton.jit
def load_plane(
    pointer, strides, i, j, len_q, len_k,
    KIND: tl.constexpr, VECTOR: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Bias or mask at rows i and columns j (vectors), zero outside: [M, N] or, TRANSPOSED, [N, M]."""
    i = i[None, :] if TRANSPOSED else i[:, None]
    j = j[:, None] if TRANSPOSED else j[None, :]
    pointers, inside = plane_pointers(pointer, strides, i, j, len_q, len_k, KIND, VECTOR)
    return tl.load(pointers, mask=inside, other=0)


@triton.jit
def plane_place(
    pointer,
    strides,
    b0,
    b1,
    h,
    n,
    start_k,
    len_q,
    len_k,
    offsets,
    total,
    VECTOR: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Start, (row, column) strides and number of rows of the bias (or mask) of one head.

    strides: (b0, b1, head, row, column). A ragged bias has one row-major [len_q, len_k] block per
    sequence; a block that does not lie inside the tensor counts as absent.
    """
    if RAGGED:
        start = tl.load(offsets + tl.maximum(n, 0))
        fits = (start >= 0) & (start + len_q.to(tl.int64) * len_k <= total)
        start = tl.where(fits, start, 0)
        base = pointer + h.to(tl.int64) * strides[2] + start * strides[4]
        return base, (len_k.to(tl.int64) * strides[4], strides[4]), tl.where(fits, len_q, 0)
    else:
        base = head_pointer(pointer, strides, b0, b1, h, VECTOR)
        return base + start_k.to(tl.int64) * strides[4], (strides[3], strides[4]), len_q


@triton.jit
def rounded_product(x, y):
    """x y as a number of its own. The compiler would contract x y - m to one multiply-add, which leaves the rounding
    of x y where zero is due: of scores beyond 1e9, more than an exponential can take. Adding 0 costs nothing and, as
    it turns -0 into 0, is not undone."""
    return tl.fma(x, y, 0.0)


@triton.jit
def tanh(x, ACCURATE: tl.constexpr):
    """tanh x and its derivative, 1 - tanh^2 = 4 e / (1 + e)^2 with e = e^(-2 |x|): nothing cancels where it is small."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    inverse = 1.0 / (1.0 + e)
    large = (1.0 - e) * inverse
    t = tl.where(x < 0.0, -large, large)
    if ACCURATE:  # near 0 the difference above loses digits that fp32 results need
        z = x * x
        series = (
            (
                ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
                + 1.33314422036e-1
            )
            * z
            - 3.33332819422e-1
        ) * z * x + x
        t = tl.where(tl.abs(x) < 0.625, series, t)
    return t, 4.0 * e * inverse * inverse


@triton.jit
def scores(
    products, i, j, bias, bias_strides, bias_rows, mask, mask_strides, len_q, len_k, shift, left, right, scale, softcap,
    CHECK_KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ACCURATE: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, BIAS_VECTOR: tl.constexpr, MASK: tl.constexpr, MASK_VECTOR: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of products q k^T at rows i and columns j (vectors), and the slope of the
    softcap (1 without). [M, N] or, TRANSPOSED, [N, M]."""
    slope = 1.0
    s = products
    factor = scale
    if SOFTCAP:
        s, slope = tanh(products * (scale / softcap), ACCURATE)
        factor = softcap
    if (
        BIAS != ABSENT
    ):  # one multiply-add, in every kernel the same: P is recomputed from equal scores
        if BIAS == TILE:
            value = bias
        else:
            value = load_plane(
                bias, bias_strides, i, j, bias_rows, len_k, BIAS, BIAS_VECTOR, TRANSPOSED
            )
        s = tl.fma(s, factor, value.to(tl.float32))
    elif not FOLD:
        s = rounded_product(s, factor)
    if MASK != ABSENT:
        attend = load_plane(mask, mask_strides, i, j, len_q, len_k, MASK, MASK_VECTOR, TRANSPOSED)
        s = tl.where(attend != 0, s, float("-inf"))
    i = i[None, :] if TRANSPOSED else i[:, None]
    j = j[:, None] if TRANSPOSED else j[None, :]
    if CHECK_KEYS:
        s = tl.where(j < len_k, s, float("-inf"))
    if WINDOW >= 1:
        s = tl.where(j - i <= shift + right, s, float("-inf"))
    if WINDOW == 2:
        s = tl.where(j - i >= shift - left, s, float("-inf"))
    return s, slope


# A reference from here on is rounded to multiples of 2 or more: exponents next to it mean nothing.
HUGE = tl.constexpr(16777216.0)


@triton.jit
def exponential(s, reference, scale, FOLD: tl.constexpr):
    """e^(s - reference); under FOLD the reference is in log2 units, see the head of this file.

    Under FOLD the multiply-add sees the rounding of the reference: 2^(s c - r) is off by one factor for the whole row,
    up to 2 where the reference is not HUGE, which a sum of exponentials with the same reference takes back.
    """
    if FOLD:
        return tl.exp2(s * (scale * LOG2E) - reference)
    else:
        return tl.exp2((s - reference) * LOG2E)


@triton.jit
def reference_of(lse, FOLD: tl.constexpr):
    """What `probabilities` subtracts: lse, in log2 units under FOLD; +inf for rows without keys, so that theirs are 0.

    A HUGE lse has lost the sum of exponentials, and its roundings here and those of the scores in another kernel
    decide between 0 and infinity. It is lowered by more than they are, so that the row's largest scores get 1.
    """
    reference = tl.where(lse == float("-inf"), float("inf"), lse)
    if FOLD:
        reference = reference * LOG2E
    # Not to -inf, which a hidden key's score has.
    low = tl.maximum(reference * (1.0 + 2.0**-21), LOWEST)
    low = tl.where(reference < 0.0, low, reference * (1.0 - 2.0**-21))
    return tl.where(tl.abs(reference) < HUGE, reference, low)


LOWEST = tl.constexpr(-3.4028234663852886e38)
# e^(S - lse) without a key's weight has no bound; with this one, a weight of zero makes it zero.
LARGEST = tl.constexpr(1e38)


@triton.jit
def load_weights(pointer, strides, b0, b1, h, start_k, j, len_k):
    """Key weights (or what is one per key) of key head h at columns j, zero outside: fp32 [N].
    strides: of (b0, b1, head, key)."""
    head = head_pointer(pointer, strides, b0, b1, h, 1)
    columns = (start_k + j).to(tl.int64) * strides[3]
    return tl.load(head + columns, mask=j < len_k, other=0.0).to(tl.float32)


@triton.jit
def at_most(x, most):
    """min(x, most); NaN stays NaN."""
    return tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def probabilities(s, reference, weights, scale, FOLD: tl.constexpr, TRANSPOSED: tl.constexpr):
    """P = w e^(s - reference), and the same without the weights w [N] (None: 1): what a derivative by a
    weight has, also where the weight is zero.

    lse is rounded, of scores of -1e9 to multiples of 64: P is cut at 1, its bound, or it would be infinite in such
    rows, and NaN where it meets a zero. Elsewhere that only takes back roundings.
    """
    if weights is None:
        exponent = s * (scale * LOG2E) - reference if FOLD else (s - reference) * LOG2E
        p = tl.exp2(at_most(exponent, 0.0))
        return p, p
    else:
        # w N is at most 1; of a weight of zero N is LARGEST at most, and 1 in a row that knows no better.
        most = tl.where(weights > 0.0, tl.minimum(1.0 / weights, LARGEST), -1.0)
        most, weights = (
            (most[:, None], weights[:, None]) if TRANSPOSED else (most[None, :], weights[None, :])
        )
        most = tl.where(most < 0.0, tl.where(tl.abs(reference) < HUGE, LARGEST, 1.0), most)
        bare = at_most(exponential(s, reference, scale, FOLD), most)
        return bare * weights, bare


@triton.jit
def dropout_keep(
    seed, stream, i0, j0, threshold, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Which probabilities of the tile at (i0, j0) stay: [M, N], or [N, M] if TRANSPOSED.

    One Philox call serves four neighbouring keys: counter (offset, stream, i, j // 4), lane j % 4.
    """
    key = tl.load(seed)
    offset = tl.load(seed + 1).to(tl.uint32)
    i = (i0 + tl.arange(0, M)).to(tl.uint32)
    quads = (j0 // 4 + tl.arange(0, N // 4)).to(tl.uint32)
    if TRANSPOSED:
        i, quads = tl.broadcast(i[None, :], quads[:, None])
    else:
        i, quads = tl.broadcast(i[:, None], quads[None, :])
    zeros = i ^ i
    r0, r1, r2, r3 = tl.philox(key, zeros + offset, zeros + stream.to(tl.uint32), i, quads)
    bits = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # [.., .., 2, 2], lanes in order
    if TRANSPOSED:
        bits = tl.permute(bits, (0, 2, 3, 1))
        bits = tl.reshape(bits, (N, M))
    else:
        bits = tl.reshape(bits, (M, N))
    return bits >= threshold.to(tl.uint32, bitcast=True)
