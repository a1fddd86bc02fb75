"""Tangents of out and lse along many directions: a program computes P of its tile once for GROUP of them. For the double backward also two
sums of each row.

Maths     as in jvp.py, for each direction; delta is the same for all
Grid      a program for a query tile and GROUP directions; the programs of a tile are neighbours, which share k and v in L2
Tiles     q and for each direction tq and the fp32 tO stay on chip; k and v stream once for the group, tk and tv for each
          direction: one product a tile for the group, and four for each direction
Centre    as in jvp.py; the first tile that a row sees is the same for all directions
Limits    tensor cores; the registers of GROUP times tO
"""

import triton
import triton.language as tl

from .chunks import (
    add_product,
    aligned,
    load_from,
    load_rows,
    row_dot,
    rows_of,
    scale_chunks,
    score_chunks,
    store_chunks,
    zero_chunks,
)
from .coord import flat_row, key_range, query_tile
from .dropout import drop, dropout_keep
from .jvp import at_least_one_key, without_mean
from .kernel import kernel
from .scores import addends_of, bias_of, load_weights, probabilities, reference_of, scores
from .tangents import add_moved, tangent_scores
from .tiles import key_step, key_steps, keys_of


@triton.jit
def direction_of(pointer, n, step, VECTOR: tl.constexpr):
    """The start of direction n; None for None."""
    if pointer is not None:
        return pointer + aligned(n.to(tl.int64) * step, VECTOR)


@triton.jit
def one_of(every, n: tl.constexpr, given):
    """Number n of a tuple; None where its tensor is absent, since a tuple holds no None."""
    if given is not None:
        return every[n]


@triton.jit
def one_step(
    state, tangents, tangent_strides, steps, n, tq_rows, at, span, start, keys_left, i, j, products, q_rows, k_rows, v_rows,
    slope, p, bare, keep, kept, mass, fresh, inputs, sizes, mod, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, CHECK_ROWS: tl.constexpr,
    MOVES: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Centre, excess and acc of direction n after one more tile of keys. LAST: in the last sweep over them."""
    centre, excess, acc = state
    tweights = load_weights(direction_of(tangents.weight, n, steps[4], 1), tangent_strides.weight, at, span, j)
    if MOVES or tweights is not None:
        if MOVES:
            tk = rows_of(
                direction_of(tangents.k, n, steps[1], D.VECTOR), tangent_strides.k, at, at.hk, span.start_k, D.VECTOR
            )
            tk_rows = load_from(tk, tangent_strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, CHECK_ROWS)
            tbias = bias_of(
                direction_of(tangents.bias, n, steps[3], TBIAS_VECTOR), tangent_strides.bias, at, span, inputs, sizes,
                TBIAS_VECTOR, F,
            )  # fmt: skip
            t, _raw = tangent_scores(
                products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F, TBIAS, TBIAS_VECTOR,
                PRECISION, False,
            )  # fmt: skip
            moment = tl.sum(p * t, 1)
            if tweights is None:
                centre = tl.where(fresh, moment / tl.where(fresh, mass, 1.0), centre)
            excess += moment - centre * mass
            change = kept * (t - centre[:, None])
        else:
            excess -= centre * mass
            change = -kept * centre[:, None]
        if tweights is not None:
            extra = bare * tweights[None, :]
            excess += tl.sum(extra, 1)
            change += drop(extra, keep, mod)
        if LAST:
            acc = add_moved(change, v_rows, acc, PRECISION, False, tangents.weight is not None)
    if tangents.v is not None and LAST:
        tv = rows_of(
            direction_of(tangents.v, n, steps[2], V.VECTOR), tangent_strides.v, at, at.hk, span.start_k, V.VECTOR
        )
        tv_rows = load_from(tv, tangent_strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, CHECK_ROWS)
        acc = add_product(kept, tv_rows, acc, PRECISION)
    return centre, excess, acc


@kernel
def many_jvp_kernel(
    inputs, tangents, out, lse, dout, dlse, tout, mean, delta, zeta,
    strides, tangent_strides, out_strides, dout_strides, tout_strides, sizes, schedule, mod, tiles,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """tout, mean: the tangents of out, lse along each direction. delta, zeta: the sums that the double backward needs of dout and dlse, or
    None without dout. tiles: the number of directions, the steps from one to the next in the tangents of q, k, v, bias and weights, and
    in tout and mean (as in zeta)."""
    MOVES: tl.constexpr = tangents.q is not None or tangents.k is not None or tangents.bias is not None  # T is not 0
    directions, steps = tiles
    groups = tl.cdiv(directions, GROUP)
    pid = tl.program_id(0)
    i0, at, span = query_tile(pid // groups, inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    n0 = pid % groups * GROUP
    last = directions - 1  # an incomplete group computes it more than once
    i = i0 + tl.arange(0, BLOCK_M)
    row = span.start_q + i0
    rows_left = span.len_q - i0
    position = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN) + i
    inside = i < span.len_q
    lists = keys_of(i0, at, span, inputs, strides, F.TILES)
    added = addends_of(inputs, strides, at, span, sizes, F)

    q_rows = load_rows(inputs.q, strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_head = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
    reference = reference_of(row_lse, FOLD)
    centred = tl.zeros([BLOCK_M], tl.int1)
    total = tl.zeros([BLOCK_M], tl.float32)  # sum of P: 1, up to roundings of a huge lse
    tq_all = ()
    states = ()
    for g in tl.static_range(0, GROUP):
        tq = direction_of(tangents.q, tl.minimum(n0 + g, last), steps[0], D.VECTOR)
        tq_rows = load_rows(tq, tangent_strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
        if tangents.q is not None:
            tq_all = tq_all + (tq_rows,)  # noqa: RUF005  Triton has no unpacking
        zero = tl.zeros([BLOCK_M], tl.float32)
        states = states + ((zero, zero, zero_chunks(BLOCK_M, V)),)  # noqa: RUF005

    edges = key_range(i0, span, mod, BLOCK_M, BLOCK_N, F.WINDOW)
    places = key_steps(lists, edges, BLOCK_N)
    FIRST: tl.constexpr = 2 if F.TILES else 0 if F.WINDOW == 2 else 1
    STEP: tl.constexpr = 1 if F.TILES else BLOCK_N
    SWEEPS: tl.constexpr = 1 if tangents.weight is None else 2
    for sweep in tl.static_range(0, SWEEPS):
        for part in tl.static_range(FIRST, 3):
            for step in tl.range(places[part], places[part + 1], STEP):
                start, here = key_step(added, lists, edges, tl.multiple_of(step, STEP), i0, BLOCK_N, F.TILES)
                j = start + tl.arange(0, BLOCK_N)
                keys_left = span.len_k - start
                k_rows = load_from(k_head, strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
                v_rows = load_from(v_head, strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
                products = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
                s, slope = scores(
                    products, i, j, here, span, mod, F, FOLD, part != 1, 0 if part == 1 else F.WINDOW, False
                )  # fmt: skip
                weights = load_weights(inputs.weight, strides.weight, at, span, j)
                p, bare = probabilities(s, reference, weights, mod.scale, FOLD, False)
                keep = dropout_keep(inputs, at, sizes, i0, start, mod, F, BLOCK_M, BLOCK_N, False)
                kept = drop(p, keep, mod)
                mass = tl.sum(p, 1)
                total += mass
                fresh = (mass > 1e-30) & (centred == 0)
                centred = centred | fresh
                moved = ()
                for g in tl.static_range(0, GROUP):
                    moved = moved + (  # noqa: RUF005
                        one_step(
                            states[g], tangents, tangent_strides, steps, tl.minimum(n0 + g, last), one_of(tq_all, g, tangents.q), at, span, start,
                            keys_left, i, j, products, q_rows, k_rows, v_rows, slope, p, bare, keep, kept, mass, fresh,
                            inputs, sizes, mod, F, D, V, PRECISION, BLOCK_N, TBIAS, TBIAS_VECTOR, part != 1, MOVES,
                            sweep == SWEEPS - 1,
                        ),
                    )  # fmt: skip
                states = moved
        if sweep < SWEEPS - 1:
            begun = ()
            for g in tl.static_range(0, GROUP):
                zero = tl.zeros([BLOCK_M], tl.float32)
                begun = begun + ((states[g][1] / at_least_one_key(total), zero, states[g][2]),)  # noqa: RUF005
            states = begun
            total = tl.zeros([BLOCK_M], tl.float32)

    out_rows = load_rows(out, out_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
    for g in tl.static_range(0, GROUP):
        n = tl.minimum(n0 + g, last)
        centre, excess, acc = states[g]
        if MOVES or tangents.weight is not None:
            share = 1.0 / at_least_one_key(total)
            excess = excess * share
            acc = scale_chunks(acc, share[:, None])
        rows = without_mean(acc, excess, out_rows)
        tile = rows_of(direction_of(tout, n, steps[5], V.VECTOR), tout_strides, at, at.h, row, V.VECTOR)
        store_chunks(tile, tout_strides, rows_left, sizes.head_dim_v, rows, BLOCK_M, V)
        tl.store(direction_of(mean, n, steps[6], 1) + position, centre + excess, mask=inside)
        dout_rows = load_rows(dout, dout_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
        if dout_rows is not None:
            tl.store(direction_of(zeta, n, steps[6], 1) + position, row_dot(dout_rows, rows), mask=inside)
    dout_rows = load_rows(dout, dout_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
    if dout_rows is not None:
        row_delta = row_dot(dout_rows, out_rows)
        if dlse is not None:
            row_delta -= tl.load(dlse + position, mask=inside, other=0.0)
        row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)
        tl.store(delta + position, row_delta, mask=inside & (n0 == 0))
