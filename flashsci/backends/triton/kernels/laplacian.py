"""Output, Jacobian and Laplacian of attention by the coordinates of its inputs; formulas in flashsci/call/laplacian.py.

Maths     C = dS - sum_j P dS; d out = (P C) V + P dV; X = LS + sum C^2; L out = P (X - sum_j P X) V + 2 sum (P C) dV + P LV
Grid      tiles of queries, for each query head; the Jacobian for each direction, the Laplacian for each part of them
Tiles     the Jacobian goes through the keys once, five products a direction; the Laplacian through the directions of one
          tile of keys after the other, four products
Limits    products, of fp32 operands in full or as three products of tensor cores
"""

import triton
import triton.language as tl

from .chunks import aligned
from .kernel import kernel


@triton.jit
def load_tile(base, rows, columns, count, width):
    """[R, C] fp32 numbers of contiguous rows, 0 beyond them."""
    inside = (rows[:, None] < count) & (columns[None, :] < width)
    return tl.load(base + rows[:, None] * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a b^T."""
    return tl.dot(a, tl.trans(b), total, input_precision=PRECISION)


@triton.jit
def masked_scores(s, bias, mask, strides, b, h, i, j, sizes):
    """Scores [M, N] with bias, -inf where nothing is seen. strides: of bias and mask, (batch, head, row, column) each."""
    inside = (i[:, None] < sizes.rows) & (j[None, :] < sizes.keys)
    if bias is not None:
        place = b * strides[0][0] + h * strides[0][1] + i[:, None] * strides[0][2] + j[None, :] * strides[0][3]
        s += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    seen = inside
    if mask is not None:
        place = b * strides[1][0] + h * strides[1][1] + i[:, None] * strides[1][2] + j[None, :] * strides[1][3]
        seen = seen & (tl.load(mask + place, mask=inside, other=0) != 0)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def probabilities(s, lse, bias, mask, strides, b, h, i, j, sizes):
    """P of a tile from its products and the lse of its rows."""
    s = masked_scores(s * sizes.scale, bias, mask, strides, b, h, i, j, sizes)
    return tl.exp(s - tl.where(lse == float("-inf"), float("inf"), lse)[:, None])


@triton.jit
def place_of(pid, sizes, BLOCK_M: tl.constexpr):
    """Of a program: the part of the directions, batch, query head, index of its head in q and in k, and its rows."""
    tiles = tl.cdiv(sizes.rows, BLOCK_M)
    i = (pid % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = (pid // tiles) % sizes.parts
    head = (pid // (tiles * sizes.parts)).to(tl.int64)
    b, h = head // sizes.heads, head % sizes.heads
    return part, b, h, head, b * (sizes.heads // sizes.group) + h // sizes.group, i


@triton.jit
def moved(pointer, offset):
    """The pointer, moved on; None for None."""
    if pointer is not None:
        return pointer + offset


@kernel
def output_kernel(
    q, k, v, bias, mask, out, lse, strides, sizes,
    PRECISION: tl.constexpr, SCORES: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The output and the lse of each row, fp32, -inf without keys."""
    dim, dim_v = aligned(sizes.dim, VECTOR), aligned(sizes.dim_v, VECTOR)
    _part, b, h, head, key_head, i = place_of(tl.program_id(0), sizes, BLOCK_M)
    e = tl.arange(0, BLOCK_V)
    q += head * sizes.rows * dim
    k += key_head * sizes.keys * dim
    v += key_head * sizes.keys * dim_v
    total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in range(0, sizes.keys, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, dim, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            s = product(load_tile(q, i, d, sizes.rows, dim), load_tile(k, j, d, sizes.keys, dim), s, SCORES)
        s = masked_scores(s * sizes.scale, bias, mask, strides, b, h, i, j, sizes)
        higher = tl.maximum(top, tl.max(s, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(s - reference[:, None])
        share = tl.exp(top - reference)
        norm = norm * share + tl.sum(p, 1)
        v_tile = load_tile(v, j, e, sizes.keys, dim_v)
        total = tl.dot(p, v_tile, total * share[:, None], input_precision=PRECISION)
        top = higher
    found = norm > 0.0
    norm = tl.where(found, norm, 1.0)
    inside = (i[:, None] < sizes.rows) & (e[None, :] < dim_v)
    place = head * sizes.rows * dim_v + i[:, None] * dim_v + e[None, :]
    tl.store(out + place, total / norm[:, None], mask=inside)
    tl.store(lse + head * sizes.rows + i, tl.where(found, top + tl.log(norm), float("-inf")), mask=i < sizes.rows)


@kernel
def jacobian_kernel(
    q, k, v, dq, dk, dv, bias, mask, out, lse, jacobian, means, strides, sizes,
    PRECISION: tl.constexpr, SCORES: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The Jacobian in one direction, and sum_j P dS of each row, fp32. dS is centred by its mean over the first tile of keys
    that a row sees, until the mean over all of them is known."""
    dim, dim_v = aligned(sizes.dim, VECTOR), aligned(sizes.dim_v, VECTOR)
    n, b, h, head, key_head, i = place_of(tl.program_id(0), sizes, BLOCK_M)
    e = tl.arange(0, BLOCK_V)
    heads = (sizes.batch * sizes.heads).to(tl.int64)
    rows, keys = n * heads * sizes.rows, n * (heads // sizes.group) * sizes.keys  # before this direction
    q += head * sizes.rows * dim
    k += key_head * sizes.keys * dim
    v += key_head * sizes.keys * dim_v
    dq = moved(dq, rows * dim + head * sizes.rows * dim)
    dk = moved(dk, keys * dim + key_head * sizes.keys * dim)
    dv = moved(dv, keys * dim_v + key_head * sizes.keys * dim_v)
    of_row = tl.load(lse + head * sizes.rows + i, mask=i < sizes.rows, other=float("-inf"))
    centre = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M], tl.float32)  # beyond the centre
    seen = tl.zeros([BLOCK_M], tl.float32)
    found = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(0, sizes.keys, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        slope = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, dim, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            q_tile, k_tile = load_tile(q, i, d, sizes.rows, dim), load_tile(k, j, d, sizes.keys, dim)
            s = product(q_tile, k_tile, s, SCORES)
            if dq is not None:
                slope = product(load_tile(dq, i, d, sizes.rows, dim), k_tile, slope, SCORES)
            if dk is not None:
                slope = product(q_tile, load_tile(dk, j, d, sizes.keys, dim), slope, SCORES)
        p = probabilities(s, of_row, bias, mask, strides, b, h, i, j, sizes)
        if dq is not None or dk is not None:
            slope *= sizes.scale
            share = tl.sum(p, 1)
            centre = tl.where(seen > 0.0, centre, tl.sum(p * slope, 1) / tl.where(share > 0.0, share, 1.0))
            seen += share
            change = p * (slope - centre[:, None])
            mean += tl.sum(change, 1)
            found = tl.dot(change, load_tile(v, j, e, sizes.keys, dim_v), found, input_precision=PRECISION)
        if dv is not None:
            found = tl.dot(p, load_tile(dv, j, e, sizes.keys, dim_v), found, input_precision=PRECISION)
    inside = (i[:, None] < sizes.rows) & (e[None, :] < dim_v)
    place = head * sizes.rows * dim_v + i[:, None] * dim_v + e[None, :]
    if dq is not None or dk is not None:
        found -= mean[:, None] * tl.load(out + place, mask=inside, other=0.0)
        tl.store(means + rows + head * sizes.rows + i, centre + mean, mask=i < sizes.rows)
    tl.store(jacobian + rows * dim_v + place, found, mask=inside)


@kernel
def laplacian_kernel(
    q, k, v, dq, dk, dv, lq, lk, lv, bias, mask, out, lse, means, laplacian, strides, sizes,
    PRECISION: tl.constexpr, SCORES: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The share of one part of the directions in the Laplacian, fp32; that of the Laplacians given is in the first part.
    sum_j P X V - (sum_j P X) out comes last."""
    dim, dim_v = aligned(sizes.dim, VECTOR), aligned(sizes.dim_v, VECTOR)
    part, b, h, head, key_head, i = place_of(tl.program_id(0), sizes, BLOCK_M)
    e = tl.arange(0, BLOCK_V)
    heads = (sizes.batch * sizes.heads).to(tl.int64)
    rows, keys = heads * sizes.rows, heads // sizes.group * sizes.keys  # of one direction
    at_q, at_k, at_v = head * sizes.rows * dim, key_head * sizes.keys * dim, key_head * sizes.keys * dim_v
    q += at_q
    k += at_k
    v += at_v
    dq = moved(dq, at_q)
    dk = moved(dk, at_k)
    dv = moved(dv, at_v)
    lq = moved(lq, at_q)
    lk = moved(lk, at_k)
    lv = moved(lv, at_v)
    begin = part * sizes.step
    end = tl.minimum(begin + sizes.step, sizes.directions)
    of_row = tl.load(lse + head * sizes.rows + i, mask=i < sizes.rows, other=float("-inf"))
    total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    mean_rate = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, sizes.keys, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        rate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, dim, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            q_tile, k_tile = load_tile(q, i, d, sizes.rows, dim), load_tile(k, j, d, sizes.keys, dim)
            s = product(q_tile, k_tile, s, SCORES)
            if lq is not None:
                rate = product(load_tile(lq, i, d, sizes.rows, dim), k_tile, rate, SCORES)
            if lk is not None:
                rate = product(q_tile, load_tile(lk, j, d, sizes.keys, dim), rate, SCORES)
        p = probabilities(s, of_row, bias, mask, strides, b, h, i, j, sizes)
        rate = tl.where(part == 0, rate * sizes.scale, 0.0)
        pairs = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if dq is not None or dk is not None:
            for n in range(begin, end):
                slope = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for first in range(0, dim, BLOCK_D):
                    d = first + tl.arange(0, BLOCK_D)
                    if dq is not None:
                        dq_tile = load_tile(dq + n * rows * dim, i, d, sizes.rows, dim)
                        slope = product(dq_tile, load_tile(k, j, d, sizes.keys, dim), slope, SCORES)
                    if dk is not None:
                        dk_tile = load_tile(dk + n * keys * dim, j, d, sizes.keys, dim)
                        slope = product(load_tile(q, i, d, sizes.rows, dim), dk_tile, slope, SCORES)
                    if dq is not None and dk is not None:
                        pairs = product(dq_tile, dk_tile, pairs, SCORES)
                mean = tl.load(means + n * rows + head * sizes.rows + i, mask=i < sizes.rows, other=0.0)
                centred = slope * sizes.scale - mean[:, None]
                rate += centred * centred
                if dv is not None:
                    dv_tile = load_tile(dv + n * keys * dim_v, j, e, sizes.keys, dim_v)
                    total = tl.dot(2.0 * p * centred, dv_tile, total, input_precision=PRECISION)
        change = p * (rate + 2.0 * sizes.scale * pairs)
        mean_rate += tl.sum(change, 1)
        total = tl.dot(change, load_tile(v, j, e, sizes.keys, dim_v), total, input_precision=PRECISION)
        if lv is not None:  # noqa: SIM102  known to the compiler, unlike the part
            if part == 0:
                total = tl.dot(p, load_tile(lv, j, e, sizes.keys, dim_v), total, input_precision=PRECISION)
    inside = (i[:, None] < sizes.rows) & (e[None, :] < dim_v)
    place = head * sizes.rows * dim_v + i[:, None] * dim_v + e[None, :]
    total -= mean_rate[:, None] * tl.load(out + place, mask=inside, other=0.0)
    tl.store(laplacian + part * rows * dim_v + place, total, mask=inside)
