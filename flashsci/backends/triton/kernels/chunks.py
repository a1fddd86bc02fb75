"""Tiles of rows: their loads, products and stores.

A head dim is held as one or two chunks of a power of two, so that 80 = 64 + 16 and 96 = 64 + 32 do not cost as much
as 128. A tile of rows is a tuple of its chunks, (x0,) or (x0, x1); C: Chunks in arguments.py.

Every stride and head dim is a multiple of VECTOR elements: `aligned` tells the compiler, which then loads 16 bytes at a
time.
"""

import triton
import triton.language as tl

# The interpreter multiplies the bit patterns of 16-bit operands; there, products are computed in fp32.
INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def aligned(x, VECTOR: tl.constexpr):
    """x, a multiple of VECTOR, in a form that shows this to the compiler."""
    return x // VECTOR * VECTOR if VECTOR > 1 else x


@triton.jit
def head_pointer(pointer, strides, at, h, VECTOR: tl.constexpr):
    """Start of head h of the sequence: strides are those of (b0, b1, head, ...)."""
    offset = at.b0.to(tl.int64) * strides[0] + at.b1.to(tl.int64) * strides[1] + h.to(tl.int64) * strides[2]
    return pointer + aligned(offset, VECTOR)


@triton.jit
def row_pointer(head, strides, row, VECTOR: tl.constexpr):
    """Start of a row of a head: strides are those of (b0, b1, head, row)."""
    return head + row.to(tl.int64) * aligned(strides[3], VECTOR)


@triton.jit
def rows_of(pointer, strides, at, h, row, VECTOR: tl.constexpr):
    """Start of a row of head h; None for None."""
    if pointer is not None:
        return row_pointer(head_pointer(pointer, strides, at, h, VECTOR), strides, row, VECTOR)


@triton.jit
def load_tile(
    tile, row_stride, rows_left, columns_left,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    """[ROWS, WIDTH] at `tile`; zero outside the rows and columns left (0 * NaN must not happen)."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    pointers = tile + rows.to(tl.int64) * aligned(row_stride, C.VECTOR) + columns
    if CHECK_ROWS and C.PADDED:
        inside = (rows < rows_left) & (columns < aligned(columns_left, C.VECTOR))
        return tl.load(pointers, mask=inside, other=0.0)
    elif CHECK_ROWS:
        return tl.load(pointers, mask=rows < rows_left, other=0.0)
    elif C.PADDED:
        return tl.load(pointers, mask=columns < aligned(columns_left, C.VECTOR), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_chunks(tile, strides, rows_left, width, ROWS: tl.constexpr, C: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """ROWS rows of `width` elements at `tile`, zero outside the rows left; None for None."""
    if tile is not None:
        x0 = load_tile(tile, strides[3], rows_left, width, ROWS, C.W0, C, CHECK_ROWS)
        if C.W1 > 0:
            x1 = load_tile(tile + C.W0, strides[3], rows_left, width - C.W0, ROWS, C.W1, C, CHECK_ROWS)
            return x0, x1
        else:
            return (x0,)


@triton.jit
def load_rows(pointer, strides, at, h, row, rows_left, width, ROWS: tl.constexpr, C: tl.constexpr):
    """ROWS rows of head h from `row` on, zero outside the rows left; None for None."""
    tile = rows_of(pointer, strides, at, h, row, C.VECTOR)
    return load_chunks(tile, strides, rows_left, width, ROWS, C, True)


@triton.jit
def load_from(head, strides, row, rows_left, width, ROWS: tl.constexpr, C: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """ROWS rows from `row` on of the sequence that begins at `head`; None for None."""
    if head is not None:
        tile = row_pointer(head, strides, row, C.VECTOR)
        return load_chunks(tile, strides, rows_left, width, ROWS, C, CHECK_ROWS)


@triton.jit
def store_tile(
    tile, row_stride, rows_left, columns_left, value,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    pointers = tile + rows.to(tl.int64) * aligned(row_stride, VECTOR) + columns
    inside = (rows < rows_left) & (columns < aligned(columns_left, VECTOR))
    tl.store(pointers, value.to(tile.dtype.element_ty), mask=inside)


@triton.jit
def store_chunks(tile, strides, rows_left, width, x, ROWS: tl.constexpr, C: tl.constexpr):
    """Store the rows left of x, as rows of `width` elements at `tile`."""
    store_tile(tile, strides[3], rows_left, width, x[0], ROWS, C.W0, C.VECTOR)
    if C.W1 > 0:
        store_tile(tile + C.W0, strides[3], rows_left, width - C.W0, x[1], ROWS, C.W1, C.VECTOR)


@triton.jit
def store_zeros(pointer, strides, at, h, start, length, width, ROWS: tl.constexpr, C: tl.constexpr):
    """Store zeros in `length` rows of head h from `start` on; nothing if the pointer is None."""
    if pointer is not None:
        head = head_pointer(pointer, strides, at, h, C.VECTOR)
        zeros = zero_chunks(ROWS, C)
        for row in tl.range(0, length, ROWS):
            tile = row_pointer(head, strides, start + row, C.VECTOR)
            store_chunks(tile, strides, length - row, width, zeros, ROWS, C)


@triton.jit
def store_zero_values(pointer, first, length, COUNT: tl.constexpr):
    """Store zeros in `length` numbers from `first` on; nothing if the pointer is None."""
    if pointer is not None:
        for i in tl.range(0, length, COUNT):
            place = i + tl.arange(0, COUNT)
            tl.store(pointer + first + place, tl.zeros([COUNT], tl.float32), mask=place < length)


@triton.jit
def zero_chunks(ROWS: tl.constexpr, C: tl.constexpr):
    x0 = tl.full([ROWS, C.W0], 0.0, tl.float32)
    if C.W1 > 0:
        return x0, tl.full([ROWS, C.W1], 0.0, tl.float32)
    else:
        return (x0,)


@triton.jit
def scale_chunks(x, factor):
    x0 = x[0] * factor
    if len(x) == 2:
        return x0, x[1] * factor
    else:
        return (x0,)


@triton.jit
def row_dot(x, y):
    """sum_d x y of two tiles, in fp32."""
    found = tl.sum(x[0].to(tl.float32) * y[0].to(tl.float32), 1)
    if len(x) == 2:
        found += tl.sum(x[1].to(tl.float32) * y[1].to(tl.float32), 1)
    return found


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def score_dot(a, b, acc, PRECISION: tl.constexpr):
    """a b^T + acc for a [M, D], b [N, D]: scores and dP, whose error is magnified by exponentials and differences.

    Tensor cores round every partial sum towards zero. Three TF32 products should be as good as fp32, so their sums
    are kept short (D <= 64) and added outside the tensor cores.
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
def score_chunks(queries, keys, acc, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr):
    """queries [M, W] keys [N, W]^T + acc: [M, N] or, TRANSPOSED, [N, M]. acc may be None."""
    if TRANSPOSED:
        s = score_dot(keys[0], queries[0], acc, PRECISION)
        if len(keys) == 2:
            s = score_dot(keys[1], queries[1], s, PRECISION)
    else:
        s = score_dot(queries[0], keys[0], acc, PRECISION)
        if len(keys) == 2:
            s = score_dot(queries[1], keys[1], s, PRECISION)
    return s


@triton.jit
def add_product(weights, rows, acc, PRECISION: tl.constexpr):
    """acc + weights rows, for weights [M, N] and rows [N, W]."""
    weights = weights.to(rows[0].dtype)
    a0 = dot(weights, rows[0], acc[0], PRECISION)
    if len(rows) == 2:
        return a0, dot(weights, rows[1], acc[1], PRECISION)
    else:
        return (a0,)
