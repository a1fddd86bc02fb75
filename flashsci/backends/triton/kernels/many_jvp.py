"""Tangents of out and lse along many directions: P is computed once for a group of them.

Maths     as in jvp.py, for each direction; without tangents of bias and key weights
Grid      a program for a query tile and GROUP directions; the programs of a tile are neighbours, which share k and v in L2
Tiles     q and for each direction tq and the fp32 tO stay on chip; k and v stream once for all directions, tk and tv for each
Limits    tensor cores
"""

import triton
import triton.language as tl

from .chunks import add_product, load_from, load_rows, rows_of, scale_chunks, score_chunks, store_chunks, zero_chunks
from .coord import flat_row, key_range, query_tile
from .dropout import drop, dropout_keep
from .jvp import at_least_one_key, without_mean
from .kernel import kernel
from .scores import alibi_of, bias_of, load_weights, mask_of, probabilities, reference_of, scores
from .tangents import tangent_scores
from .tiles import key_step, key_steps, keys_of


@triton.jit
def direction_of(pointer, n, step):
    """The tensor of direction n; None for None."""
    if pointer is not None:
        return pointer + n.to(tl.int64) * step


@triton.jit
def advanced(
    state, tangents, tq_rows, tangent_strides, n, steps, start, at, span, keys_left, products, q_rows, k_rows, v_rows,
    slope, i, j, p, kept, mass, fresh, sizes, mod, F: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, CHECK_ROWS: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """Centre, excess and acc (see jvp.py) of direction n after one more tile of keys."""
    centre, excess, acc = state
    if MOVES:
        tk = rows_of(direction_of(tangents.k, n, steps[1]), tangent_strides.k, at, at.hk, span.start_k, D.VECTOR)
        tk_rows = load_from(tk, tangent_strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, CHECK_ROWS)
        t, _raw = tangent_scores(
            products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, None, span, mod, F, 0, 0, PRECISION, False
        )
        moment = tl.sum(p * t, 1)
        centre = tl.where(fresh, moment / tl.where(fresh, mass, 1.0), centre)
        excess += moment - centre * mass
        acc = add_product(kept * (t - centre[:, None]), v_rows, acc, PRECISION)
    if tangents.v is not None:
        tv = rows_of(direction_of(tangents.v, n, steps[2]), tangent_strides.v, at, at.hk, span.start_k, V.VECTOR)
        tv_rows = load_from(tv, tangent_strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, CHECK_ROWS)
        acc = add_product(kept, tv_rows, acc, PRECISION)
    return centre, excess, acc


@kernel
def many_jvp_kernel(
    inputs, tangents, out, lse, tout, mean, strides, tangent_strides, out_strides, tout_strides, sizes, schedule, mod, tiles,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """tout, mean: the tangents of out, lse along each direction. tiles: the directions, and the steps from one to the next in
    the tangents of q, k, v, in tout and in mean."""
    MOVES: tl.constexpr = tangents.q is not None or tangents.k is not None
    directions, steps = tiles
    groups = tl.cdiv(directions, GROUP)
    n0 = tl.program_id(0) % groups * GROUP
    i0, at, span = query_tile(
        tl.program_id(0) // groups, inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1
    )
    if i0 >= span.len_q:
        return
    i = i0 + tl.arange(0, BLOCK_M)
    row = span.start_q + i0
    rows_left = span.len_q - i0
    position = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN) + i
    inside = i < span.len_q
    bias = bias_of(inputs.bias, strides.bias, at, span, inputs, sizes, F.BIAS_VECTOR, F)
    mask = mask_of(inputs, strides, at, span, F)
    lists = keys_of(i0, at, span, inputs, strides, F.TILES)
    alibi = alibi_of(inputs, strides, at, sizes, F)

    q_rows = load_rows(inputs.q, strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_head = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
    reference = reference_of(row_lse, FOLD)
    centred = tl.zeros([BLOCK_M], tl.int1)
    total = tl.zeros([BLOCK_M], tl.float32)
    tq_all = ()
    states = ()  # below, sums of tuples: Triton has no unpacking
    for g in tl.static_range(0, GROUP):
        n = tl.minimum(n0 + g, directions - 1)  # the last group may be incomplete: it computes its last direction again
        tq = direction_of(tangents.q, n, steps[0])
        tq_all = tq_all + (load_rows(tq, tangent_strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D),)  # noqa: RUF005
        states = states + ((tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32), zero_chunks(BLOCK_M, V)),)  # noqa: RUF005

    edges = key_steps(lists, key_range(i0, span, mod, BLOCK_M, BLOCK_N, F.WINDOW), BLOCK_N)
    FIRST: tl.constexpr = 2 if F.TILES else 0 if F.WINDOW == 2 else 1
    STEP: tl.constexpr = 1 if F.TILES else BLOCK_N
    for part in tl.static_range(FIRST, 3):
        for start in tl.range(edges[part], edges[part + 1], STEP):
            seen = mask
            if F.TILES:
                start, seen = key_step(lists, start, i0, BLOCK_M, BLOCK_N, F.TILES)
            start = tl.multiple_of(start, BLOCK_N)
            j = start + tl.arange(0, BLOCK_N)
            keys_left = span.len_k - start
            k_rows = load_from(k_head, strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, part != 1)
            v_rows = load_from(v_head, strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
            products = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
            s, slope = scores(
                products, i, j, bias, seen, alibi, span, mod, F, FOLD, part != 1, 0 if part == 1 else F.WINDOW, False
            )  # fmt: skip
            weights = load_weights(inputs.weight, strides.weight, at, span, j)
            p, _bare = probabilities(s, reference[:, None], weights, mod.scale, FOLD, False)
            kept = drop(p, dropout_keep(inputs, at, sizes, i0, start, mod, F, BLOCK_M, BLOCK_N, False), mod)
            mass = tl.sum(p, 1)
            total += mass
            fresh = (mass > 1e-30) & (centred == 0)
            centred = centred | fresh
            moved = ()
            for g in tl.static_range(0, GROUP):
                n = tl.minimum(n0 + g, directions - 1)
                moved = moved + (  # noqa: RUF005
                    advanced(
                        states[g], tangents, tq_all[g], tangent_strides, n, steps, start, at, span, keys_left, products,
                        q_rows, k_rows, v_rows, slope, i, j, p, kept, mass, fresh, sizes, mod, F, D, V, PRECISION, BLOCK_N,
                        part != 1, MOVES,
                    ),
                )  # fmt: skip
            states = moved

    out_rows = load_rows(out, out_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
    share = 1.0 / at_least_one_key(total) if MOVES else tl.full([BLOCK_M], 1.0, tl.float32)
    for g in tl.static_range(0, GROUP):
        n = tl.minimum(n0 + g, directions - 1)
        centre, excess, acc = states[g]
        excess = excess * share
        rows = without_mean(scale_chunks(acc, share[:, None]), excess, out_rows)
        tile = rows_of(direction_of(tout, n, steps[3]), tout_strides, at, at.h, row, V.VECTOR)
        store_chunks(tile, tout_strides, rows_left, sizes.head_dim_v, rows, BLOCK_M, V)
        tl.store(direction_of(mean, n, steps[4]) + position, centre + excess, mask=inside)
