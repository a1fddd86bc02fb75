"""Second tangents of out and lse, along two directions a and b, one query tile per program: forward mode over forward mode.

Maths     with T, T', W, N of tangents.py in each direction, and C the second tangent of S:
          C' = scale (abQ K^T + Q abK^T + aQ bK^T + bQ aK^T);  C = slope C' + bend aT' bT' + abB
          X  = P ((aT - am) (bT - bm) + C) + N (aw (bT - bm) + bw (aT - am) + abw);  abm = sum_j X
          abO = sum_j R (X V + aW bV + bW aV + P abV) - abm O
Grid      as in forward.py
Tiles     the queries and their tangents and the fp32 abO stay on chip; keys, values and their tangents stream: 13 products a
          tile if every tangent is there. lse, O, am and bm are those of the forward and of its tangents
Centre    as in jvp.py: P (C + ..) is taken about its mean over the first tile; with a tangent of key weights, a first sweep
          over the keys finds abm
Limits    tensor cores
"""

import triton
import triton.language as tl

from .chunks import add_product, load_from, load_rows, rows_of, scale_chunks, score_chunks, store_chunks, zero_chunks
from .coord import flat_row, key_range, query_tile
from .dropout import drop, dropout_keep
from .jvp import at_least_one_key, without_mean
from .kernel import kernel
from .scores import addends_of, bias_of, load_weights, probabilities, reference_of, scores
from .tangents import add_moved, softcap_bend, tangent_of, tangent_scores
from .tiles import key_step, key_steps, keys_of


@triton.jit
def moved_scores(
    products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, mean, span, mod, F: tl.constexpr,
    TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T - m of a tile; None without a tangent of scores and of key weights (mean: None)."""
    if tq_rows is not None or tk_rows is not None or tbias is not None:
        t, _raw = tangent_scores(
            products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F, TBIAS, TBIAS_VECTOR, PRECISION, False
        )  # fmt: skip
        return t - mean[:, None]
    elif mean is not None:
        return tl.zeros_like(products) - mean[:, None]


@triton.jit
def moved_products(
    products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F: tl.constexpr,
    TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T' of a tile with a tangent of scores. The compiler merges its products with those of :func:`moved_scores`."""
    _t, raw = tangent_scores(
        products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F, TBIAS, TBIAS_VECTOR, PRECISION, False
    )  # fmt: skip
    return raw


@triton.jit
def moved_probabilities(p, bare, t, tweights):
    """W of one direction; None for zero. t: T - m or None."""
    if t is not None and tweights is not None:
        return p * t + bare * tweights[None, :]
    elif t is not None:
        return p * t


@triton.jit
def row_mean(mean, position, inside, HAS: tl.constexpr):
    """The tangent of lse of each row; None where it is zero because nothing moves the row's scores."""
    if HAS:
        return tl.load(mean + position, mask=inside, other=0.0)


@kernel
def second_jvp_kernel(
    inputs, first, second, mixed, out, lse, first_mean, second_mean, result, result_mean,
    strides, first_strides, second_strides, mixed_strides, out_strides, result_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    """result, result_mean: the second tangents of out, lse along `first` (a) and `second` (b), whose tangent along b is
    `mixed` (ab). TBIAS, TBIAS_VECTOR: three each, those of the tangents of a bias."""
    WEIGHTED: tl.constexpr = first.weight is not None or second.weight is not None or mixed.weight is not None
    A_SCORES: tl.constexpr = first.q is not None or first.k is not None or first.bias is not None
    B_SCORES: tl.constexpr = second.q is not None or second.k is not None or second.bias is not None
    A: tl.constexpr = A_SCORES or first.weight is not None
    B: tl.constexpr = B_SCORES or second.weight is not None
    CROSSED: tl.constexpr = (first.q is not None and second.k is not None) or (
        first.k is not None and second.q is not None
    )
    BENT: tl.constexpr = F.SOFTCAP and A_SCORES and B_SCORES
    MIXED: tl.constexpr = mixed.q is not None or mixed.k is not None or mixed.bias is not None
    MOVES: tl.constexpr = MIXED or CROSSED or BENT or (A and B) or WEIGHTED  # X is not 0

    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    i = i0 + tl.arange(0, BLOCK_M)
    row = span.start_q + i0
    rows_left = span.len_q - i0
    position = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN) + i
    inside = i < span.len_q
    lists = keys_of(i0, at, span, inputs, strides, F.TILES)
    added = addends_of(inputs, strides, at, span, sizes, F)
    a_bias = bias_of(first.bias, first_strides.bias, at, span, inputs, sizes, TBIAS_VECTOR[0], F)
    b_bias = bias_of(second.bias, second_strides.bias, at, span, inputs, sizes, TBIAS_VECTOR[1], F)
    ab_bias = bias_of(mixed.bias, mixed_strides.bias, at, span, inputs, sizes, TBIAS_VECTOR[2], F)

    q_rows = load_rows(inputs.q, strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    aq_rows = load_rows(first.q, first_strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    bq_rows = load_rows(second.q, second_strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    abq_rows = load_rows(mixed.q, mixed_strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    ak_head = rows_of(first.k, first_strides.k, at, at.hk, span.start_k, D.VECTOR)
    bk_head = rows_of(second.k, second_strides.k, at, at.hk, span.start_k, D.VECTOR)
    abk_head = rows_of(mixed.k, mixed_strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_head = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    av_head = rows_of(first.v, first_strides.v, at, at.hk, span.start_k, V.VECTOR)
    bv_head = rows_of(second.v, second_strides.v, at, at.hk, span.start_k, V.VECTOR)
    abv_head = rows_of(mixed.v, mixed_strides.v, at, at.hk, span.start_k, V.VECTOR)
    row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
    reference = reference_of(row_lse, FOLD)
    a_mean = row_mean(first_mean, position, inside, A)
    b_mean = row_mean(second_mean, position, inside, B)
    centre = tl.zeros([BLOCK_M], tl.float32)
    centred = tl.zeros([BLOCK_M], tl.int1)
    excess = tl.zeros([BLOCK_M], tl.float32)  # sum of X, less that of P c
    total = tl.zeros([BLOCK_M], tl.float32)  # sum of P: 1, up to roundings of a huge lse
    acc = zero_chunks(BLOCK_M, V)

    edges = key_range(i0, span, mod, BLOCK_M, BLOCK_N, F.WINDOW)
    steps = key_steps(lists, edges, BLOCK_N)
    FIRST: tl.constexpr = 2 if F.TILES else 0 if F.WINDOW == 2 else 1
    STEP: tl.constexpr = 1 if F.TILES else BLOCK_N
    SWEEPS: tl.constexpr = 2 if WEIGHTED else 1
    for sweep in tl.static_range(0, SWEEPS):
        for part in tl.static_range(FIRST, 3):
            for step in tl.range(steps[part], steps[part + 1], STEP):
                start, here = key_step(added, lists, edges, tl.multiple_of(step, STEP), i0, BLOCK_N, F.TILES)
                j = start + tl.arange(0, BLOCK_N)
                keys_left = span.len_k - start
                k_rows = load_from(k_head, strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
                products = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
                s, slope = scores(
                    products, i, j, here, span, mod, F, FOLD, part != 1, 0 if part == 1 else F.WINDOW, False
                )  # fmt: skip
                weights = load_weights(inputs.weight, strides.weight, at, span, j)
                a_weights = load_weights(first.weight, first_strides.weight, at, span, j)
                b_weights = load_weights(second.weight, second_strides.weight, at, span, j)
                ab_weights = load_weights(mixed.weight, mixed_strides.weight, at, span, j)
                p, bare = probabilities(s, reference, weights, mod.scale, FOLD, False)
                keep = dropout_keep(inputs, at, sizes, i0, start, mod, F, BLOCK_M, BLOCK_N, False)
                ak_rows = load_from(ak_head, first_strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
                bk_rows = load_from(bk_head, second_strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
                a = moved_scores(
                    products, q_rows, k_rows, aq_rows, ak_rows, slope, i, j, a_bias, a_mean, span, mod, F,
                    TBIAS[0], TBIAS_VECTOR[0], PRECISION,
                )  # fmt: skip
                b = moved_scores(
                    products, q_rows, k_rows, bq_rows, bk_rows, slope, i, j, b_bias, b_mean, span, mod, F,
                    TBIAS[1], TBIAS_VECTOR[1], PRECISION,
                )  # fmt: skip
                if MOVES:
                    rate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                    if MIXED or CROSSED:
                        abk_rows = load_from(
                            abk_head, mixed_strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, part != 1
                        )
                        if abq_rows is not None:
                            rate = score_chunks(abq_rows, k_rows, rate, PRECISION, False)
                        if abk_rows is not None:
                            rate = score_chunks(q_rows, abk_rows, rate, PRECISION, False)
                        if aq_rows is not None and bk_rows is not None:
                            rate = score_chunks(aq_rows, bk_rows, rate, PRECISION, False)
                        if bq_rows is not None and ak_rows is not None:
                            rate = score_chunks(bq_rows, ak_rows, rate, PRECISION, False)
                        rate, _raw = tangent_of(
                            rate, slope, i, j, ab_bias, span, mod, F, TBIAS[2], TBIAS_VECTOR[2], False
                        )
                    if BENT:
                        a_raw = moved_products(
                            products, q_rows, k_rows, aq_rows, ak_rows, slope, i, j, a_bias, span, mod, F,
                            TBIAS[0], TBIAS_VECTOR[0], PRECISION,
                        )  # fmt: skip
                        b_raw = moved_products(
                            products, q_rows, k_rows, bq_rows, bk_rows, slope, i, j, b_bias, span, mod, F,
                            TBIAS[1], TBIAS_VECTOR[1], PRECISION,
                        )  # fmt: skip
                        rate += softcap_bend(products, s, slope, mod, F) * a_raw * b_raw
                    if A and B:
                        rate += a * b
                    mass = tl.sum(p, 1)
                    total += mass
                    moment = tl.sum(p * rate, 1)
                    if SWEEPS == 1:
                        fresh = (mass > 1e-30) & (centred == 0)
                        centre = tl.where(fresh, moment / tl.where(fresh, mass, 1.0), centre)
                        centred = centred | fresh
                    excess += moment - centre * mass
                    change = p * (rate - centre[:, None])
                    if WEIGHTED:
                        extra = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                        if a_weights is not None and b is not None:
                            extra += b * a_weights[None, :]
                        if b_weights is not None and a is not None:
                            extra += a * b_weights[None, :]
                        if ab_weights is not None:
                            extra += tl.broadcast_to(ab_weights[None, :], (BLOCK_M, BLOCK_N))
                        extra = bare * extra
                        excess += tl.sum(extra, 1)
                        change += extra
                if sweep == SWEEPS - 1:
                    if MOVES:
                        v_rows = load_from(v_head, strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
                        acc = add_moved(drop(change, keep, mod), v_rows, acc, PRECISION, False, True)
                    if A and second.v is not None:
                        bv_rows = load_from(
                            bv_head, second_strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1
                        )
                        w = drop(moved_probabilities(p, bare, a, a_weights), keep, mod)
                        acc = add_moved(w, bv_rows, acc, PRECISION, False, first.weight is not None)
                    if B and first.v is not None:
                        av_rows = load_from(
                            av_head, first_strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1
                        )
                        w = drop(moved_probabilities(p, bare, b, b_weights), keep, mod)
                        acc = add_moved(w, av_rows, acc, PRECISION, False, second.weight is not None)
                    if mixed.v is not None:
                        abv_rows = load_from(
                            abv_head, mixed_strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1
                        )
                        acc = add_product(drop(p, keep, mod), abv_rows, acc, PRECISION)
        if sweep < SWEEPS - 1:
            centre = excess / at_least_one_key(total)
            excess = tl.zeros([BLOCK_M], tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)

    if MOVES:
        share = 1.0 / at_least_one_key(total)
        excess = excess * share
        acc = scale_chunks(acc, share[:, None])
    out_rows = load_rows(out, out_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
    result_rows = without_mean(acc, excess, out_rows)
    tile = rows_of(result, result_strides, at, at.h, row, V.VECTOR)
    store_chunks(tile, result_strides, rows_left, sizes.head_dim_v, result_rows, BLOCK_M, V)
    tl.store(result_mean + position, centre + excess, mask=inside)
