"""Output, Jacobian and Laplacian of attention by the coordinates of its inputs; formulas in flashsci/call/laplacian.py.

Maths     C = dS - sum_j P dS; d out = (P C) V + P dV; X = LS + sum C^2; L out = P (X - sum_j P X) V + 2 sum (P C) dV + P LV
Grid      few keys: tiles of queries, for each query head, for each part of the directions; many keys: the Jacobian has
          a program for each direction, the Laplacian one for all of them
Tiles     few keys: P and the sums over directions stay on chip, each direction is read once, six products;
          many keys: the Jacobian goes through the keys twice, the Laplacian once, twelve products
Limits    products, of fp32 operands in full or as three products of tensor cores
"""

import triton
import triton.language as tl

from .kernel import kernel


@triton.jit
def load_tile(base, rows, columns, count, width):
    """[R, C] fp32 numbers of contiguous rows, 0 beyond them."""
    inside = (rows[:, None] < count) & (columns[None, :] < width)
    return tl.load(base + rows[:, None] * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b^T."""
    return tl.dot(a, tl.trans(b), input_precision=PRECISION)


@triton.jit
def masked_scores(s, bias, mask, strides, b, h, i, j, sizes):
    """Scores [M, N] with bias, -inf where nothing is seen. strides: of bias and mask, (batch, head, row, column) each."""
    inside = (i[:, None] < sizes.rows) & (j[None, :] < sizes.keys)
    if bias is not None:
        place = (
            b.to(tl.int64) * strides[0][0] + h * strides[0][1] + i[:, None] * strides[0][2] + j[None, :] * strides[0][3]
        )
        s += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    seen = inside
    if mask is not None:
        place = (
            b.to(tl.int64) * strides[1][0] + h * strides[1][1] + i[:, None] * strides[1][2] + j[None, :] * strides[1][3]
        )
        seen = seen & (tl.load(mask + place, mask=inside, other=0) != 0)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def slope_of(q, k, dq, dk, first_q, first_k, i, j, d, sizes, PRECISION: tl.constexpr):
    """dS / scale of a tile, for the direction that begins at first_q in dq and at first_k in dk."""
    slope = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    if dq is not None:
        slope += product(load_tile(dq + first_q, i, d, sizes.rows, sizes.dim), k, PRECISION)
    if dk is not None:
        slope += product(q, load_tile(dk + first_k, j, d, sizes.keys, sizes.dim), PRECISION)
    return slope


@triton.jit
def place_of(pid, sizes, BLOCK_M: tl.constexpr):
    """Of a program: the part of the directions, batch, query head, index of its head in q and in k, and its rows."""
    tiles = tl.cdiv(sizes.rows, BLOCK_M)
    i = (pid % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = (pid // tiles) % (sizes.batch * sizes.heads)
    part = pid // (tiles * sizes.batch * sizes.heads)
    b, h = head // sizes.heads, head % sizes.heads
    return part, b, h, head.to(tl.int64), (b * (sizes.heads // sizes.group) + h // sizes.group).to(tl.int64), i


@kernel
def few_keys_kernel(
    q, k, v, dq, dk, dv, lq, lk, lv, bias, mask, out, jacobian, laplacian, strides, sizes,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """All results, for keys of one tile. laplacian: fp32, one for each part of the directions."""
    part, b, h, head, key_head, i = place_of(tl.program_id(0), sizes, BLOCK_M)
    j, d, e = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q_tile = load_tile(q + head * sizes.rows * sizes.dim, i, d, sizes.rows, sizes.dim)
    k_tile = load_tile(k + key_head * sizes.keys * sizes.dim, j, d, sizes.keys, sizes.dim)
    v_tile = load_tile(v + key_head * sizes.keys * sizes.dim_v, j, e, sizes.keys, sizes.dim_v)
    s = masked_scores(product(q_tile, k_tile, PRECISION) * sizes.scale, bias, mask, strides, b, h, i, j, sizes)
    top = tl.max(s, 1)
    p = tl.exp(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
    norm = tl.sum(p, 1)
    p = p / tl.where(norm == 0.0, 1.0, norm)[:, None]
    inside = (i[:, None] < sizes.rows) & (e[None, :] < sizes.dim_v)
    place = head * sizes.rows * sizes.dim_v + i[:, None] * sizes.dim_v + e[None, :]
    heads = (sizes.batch * sizes.heads).to(tl.int64)
    keys = heads // sizes.group * sizes.keys
    square = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    rate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    begin = part * sizes.step
    for n in range(begin, tl.minimum(begin + sizes.step, sizes.directions)):
        first_q = (n * heads + head) * sizes.rows * sizes.dim
        first_k = n * keys * sizes.dim + key_head * sizes.keys * sizes.dim
        found = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        if dq is not None or dk is not None:
            slope = slope_of(q_tile, k_tile, dq, dk, first_q, first_k, i, j, d, sizes, PRECISION) * sizes.scale
            centred = slope - tl.sum(p * slope, 1)[:, None]
            square += centred * centred
            change = p * centred
            found += tl.dot(change, v_tile, input_precision=PRECISION)
        if dq is not None and dk is not None:
            dq_tile = load_tile(dq + first_q, i, d, sizes.rows, sizes.dim)
            rate += product(dq_tile, load_tile(dk + first_k, j, d, sizes.keys, sizes.dim), PRECISION)
        if dv is not None:
            first_v = n * keys * sizes.dim_v + key_head * sizes.keys * sizes.dim_v
            dv_tile = load_tile(dv + first_v, j, e, sizes.keys, sizes.dim_v)
            found += tl.dot(p, dv_tile, input_precision=PRECISION)
            if dq is not None or dk is not None:
                total += tl.dot(change, dv_tile, input_precision=PRECISION)
        tl.store(jacobian + n * heads * sizes.rows * sizes.dim_v + place, found, mask=inside)
    rate *= 2.0
    total *= 2.0
    if part == 0:
        tl.store(out + place, tl.dot(p, v_tile, input_precision=PRECISION), mask=inside)
        if lq is not None:
            first_q = head * sizes.rows * sizes.dim
            rate += product(load_tile(lq + first_q, i, d, sizes.rows, sizes.dim), k_tile, PRECISION)
        if lk is not None:
            first_k = key_head * sizes.keys * sizes.dim
            rate += product(q_tile, load_tile(lk + first_k, j, d, sizes.keys, sizes.dim), PRECISION)
        if lv is not None:
            first_v = key_head * sizes.keys * sizes.dim_v
            lv_tile = load_tile(lv + first_v, j, e, sizes.keys, sizes.dim_v)
            total += tl.dot(p, lv_tile, input_precision=PRECISION)
    rate = rate * sizes.scale + square
    change = p * (rate - tl.sum(p * rate, 1)[:, None])
    total += tl.dot(change, v_tile, input_precision=PRECISION)
    tl.store(laplacian + part * heads * sizes.rows * sizes.dim_v + place, total, mask=inside)


@kernel
def output_kernel(
    q, k, v, bias, mask, out, lse, strides, sizes,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The output and the lse of each row, fp32, -inf without keys."""
    _part, b, h, head, key_head, i = place_of(tl.program_id(0), sizes, BLOCK_M)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    first_k, first_v = key_head * sizes.keys * sizes.dim, key_head * sizes.keys * sizes.dim_v
    q_tile = load_tile(q + head * sizes.rows * sizes.dim, i, d, sizes.rows, sizes.dim)
    total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in range(0, sizes.keys, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k + first_k, j, d, sizes.keys, sizes.dim)
        s = masked_scores(product(q_tile, k_tile, PRECISION) * sizes.scale, bias, mask, strides, b, h, i, j, sizes)
        higher = tl.maximum(top, tl.max(s, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(s - reference[:, None])
        share = tl.exp(top - reference)
        norm = norm * share + tl.sum(p, 1)
        v_tile = load_tile(v + first_v, j, e, sizes.keys, sizes.dim_v)
        total = total * share[:, None] + tl.dot(p, v_tile, input_precision=PRECISION)
        top = higher
    found = norm > 0.0
    norm = tl.where(found, norm, 1.0)
    inside = (i[:, None] < sizes.rows) & (e[None, :] < sizes.dim_v)
    place = head * sizes.rows * sizes.dim_v + i[:, None] * sizes.dim_v + e[None, :]
    tl.store(out + place, total / norm[:, None], mask=inside)
    tl.store(lse + head * sizes.rows + i, tl.where(found, top + tl.log(norm), float("-inf")), mask=i < sizes.rows)


@triton.jit
def probabilities(q_tile, k_tile, lse, bias, mask, strides, b, h, i, j, sizes, PRECISION: tl.constexpr):
    """P of a tile from the lse of its rows."""
    s = masked_scores(product(q_tile, k_tile, PRECISION) * sizes.scale, bias, mask, strides, b, h, i, j, sizes)
    return tl.exp(s - tl.where(lse == float("-inf"), float("inf"), lse)[:, None])


@kernel
def jacobian_kernel(
    q, k, v, dq, dk, dv, bias, mask, lse, jacobian, means, strides, sizes,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The Jacobian in one direction, and sum_j P dS of each row: fp32."""
    n, b, h, head, key_head, i = place_of(tl.program_id(0), sizes, BLOCK_M)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    heads = (sizes.batch * sizes.heads).to(tl.int64)
    keys = heads // sizes.group * sizes.keys
    first_q, first_k = head * sizes.rows * sizes.dim, key_head * sizes.keys * sizes.dim
    first_v = key_head * sizes.keys * sizes.dim_v
    next_q, next_k, next_v = n * heads * sizes.rows * sizes.dim, n * keys * sizes.dim, n * keys * sizes.dim_v
    q_tile = load_tile(q + first_q, i, d, sizes.rows, sizes.dim)
    of_row = tl.load(lse + head * sizes.rows + i, mask=i < sizes.rows, other=float("-inf"))
    mean = tl.zeros([BLOCK_M], tl.float32)
    if dq is not None or dk is not None:
        for start in range(0, sizes.keys, BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            k_tile = load_tile(k + first_k, j, d, sizes.keys, sizes.dim)
            p = probabilities(q_tile, k_tile, of_row, bias, mask, strides, b, h, i, j, sizes, PRECISION)
            slope = slope_of(q_tile, k_tile, dq, dk, first_q + next_q, first_k + next_k, i, j, d, sizes, PRECISION)
            mean += tl.sum(p * slope, 1)
        tl.store(means + (n * heads + head) * sizes.rows + i, mean * sizes.scale, mask=i < sizes.rows)
    found = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(0, sizes.keys, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k + first_k, j, d, sizes.keys, sizes.dim)
        p = probabilities(q_tile, k_tile, of_row, bias, mask, strides, b, h, i, j, sizes, PRECISION)
        if dq is not None or dk is not None:
            slope = slope_of(q_tile, k_tile, dq, dk, first_q + next_q, first_k + next_k, i, j, d, sizes, PRECISION)
            change = p * (slope - mean[:, None]) * sizes.scale
            v_tile = load_tile(v + first_v, j, e, sizes.keys, sizes.dim_v)
            found += tl.dot(change, v_tile, input_precision=PRECISION)
        if dv is not None:
            dv_tile = load_tile(dv + first_v + next_v, j, e, sizes.keys, sizes.dim_v)
            found += tl.dot(p, dv_tile, input_precision=PRECISION)
    inside = (i[:, None] < sizes.rows) & (e[None, :] < sizes.dim_v)
    place = (n * heads + head) * sizes.rows * sizes.dim_v + i[:, None] * sizes.dim_v + e[None, :]
    tl.store(jacobian + place, found, mask=inside)


@kernel
def laplacian_kernel(
    q, k, v, dq, dk, dv, lq, lk, lv, bias, mask, lse, means, out, laplacian, strides, sizes,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The Laplacian: one tile of keys after the other, all directions in each. sum_j P X V - (sum_j P X) out comes last."""
    _part, b, h, head, key_head, i = place_of(tl.program_id(0), sizes, BLOCK_M)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    heads = (sizes.batch * sizes.heads).to(tl.int64)
    keys = heads // sizes.group * sizes.keys
    first_q, first_k = head * sizes.rows * sizes.dim, key_head * sizes.keys * sizes.dim
    first_v = key_head * sizes.keys * sizes.dim_v
    q_tile = load_tile(q + first_q, i, d, sizes.rows, sizes.dim)
    of_row = tl.load(lse + head * sizes.rows + i, mask=i < sizes.rows, other=float("-inf"))
    total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    mean_rate = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, sizes.keys, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k + first_k, j, d, sizes.keys, sizes.dim)
        v_tile = load_tile(v + first_v, j, e, sizes.keys, sizes.dim_v)
        p = probabilities(q_tile, k_tile, of_row, bias, mask, strides, b, h, i, j, sizes, PRECISION)
        square = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        rate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if dq is not None or dk is not None:
            for n in range(sizes.directions):
                next_q = first_q + n * heads * sizes.rows * sizes.dim
                next_k = first_k + n * keys * sizes.dim
                slope = slope_of(q_tile, k_tile, dq, dk, next_q, next_k, i, j, d, sizes, PRECISION)
                mean = tl.load(means + (n * heads + head) * sizes.rows + i, mask=i < sizes.rows, other=0.0)
                centred = slope * sizes.scale - mean[:, None]
                square += centred * centred
                if dq is not None and dk is not None:
                    dq_tile = load_tile(dq + next_q, i, d, sizes.rows, sizes.dim)
                    rate += 2.0 * product(dq_tile, load_tile(dk + next_k, j, d, sizes.keys, sizes.dim), PRECISION)
                if dv is not None:
                    dv_tile = load_tile(dv + first_v + n * keys * sizes.dim_v, j, e, sizes.keys, sizes.dim_v)
                    total += tl.dot(2.0 * p * centred, dv_tile, input_precision=PRECISION)
        if lq is not None:
            rate += product(load_tile(lq + first_q, i, d, sizes.rows, sizes.dim), k_tile, PRECISION)
        if lk is not None:
            rate += product(q_tile, load_tile(lk + first_k, j, d, sizes.keys, sizes.dim), PRECISION)
        if lv is not None:
            lv_tile = load_tile(lv + first_v, j, e, sizes.keys, sizes.dim_v)
            total += tl.dot(p, lv_tile, input_precision=PRECISION)
        change = p * (rate * sizes.scale + square)
        mean_rate += tl.sum(change, 1)
        total += tl.dot(change, v_tile, input_precision=PRECISION)
    inside = (i[:, None] < sizes.rows) & (e[None, :] < sizes.dim_v)
    place = head * sizes.rows * sizes.dim_v + i[:, None] * sizes.dim_v + e[None, :]
    total -= mean_rate[:, None] * tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(laplacian + place, total, mask=inside)
