"""Tangents of out and lse, one query tile per program; for the double backward also two sums of each row.

Maths     see tangents.py: m = sum_j P T + N tw, tO = sum_j R ((P T + N tw) V + P tV) - m O; delta = dO . O - dlse, zeta = dO . tO
Grid      as in forward.py
Tiles     q, tq and the fp32 tO stay on chip; k, tk, v, tv stream: 5 products a tile, lse and O are those of the forward
Centre    m is known only at the end. Until then T - c stands for T - m, with c the mean over the first tile that a row sees:
          tO = sum_j R ((P (T - c) + N tw) V + P tV) - (m - c) O. Without it, 16-bit roundings would grow with a common part
          of T, which softmax does not see. With a tangent of key weights, N tw has no bound where P is small; then m comes
          from a first sweep over the keys (2 more products)
Limits    tensor cores; at D = 64 the exponentials hide behind five products
"""

import triton
import triton.language as tl

from .chunks import (
    add_product,
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
from .gate import gate_tile, times
from .kernel import kernel
from .scores import addends_of, bias_of, load_weights, probabilities, reference_of, scores
from .tangents import add_moved, tangent_scores
from .tiles import key_step, key_steps, keys_of


@kernel
def jvp_kernel(
    inputs, tangents, out, lse, dout, dlse, tout, mean, delta, zeta,
    strides, tangent_strides, out_strides, dout_strides, tout_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    """tout, mean = tangents of out, lse; with dout also delta and zeta."""
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    jvp_tile_of(
        inputs, tangents, None, None, out, lse, dout, dlse, tout, mean, delta, zeta, i0, at, span,
        strides, tangent_strides, out_strides, dout_strides, tout_strides, sizes, mod,
        F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, TBIAS, TBIAS_VECTOR, 0, 0,
    )  # fmt: skip


@triton.jit
def jvp_tile_of(
    inputs, tangents, gate, tgate, out, lse, dout, dlse, tout, mean, delta, zeta, i0, at, span,
    strides, tangent_strides, out_strides, dout_strides, tout_strides, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
    GATE_VECTOR: tl.constexpr, TGATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """The results of one query tile, stored. gate, tgate: as `gate_of` makes them of the gate and its tangent."""
    MOVES: tl.constexpr = tangents.q is not None or tangents.k is not None or tangents.bias is not None  # T is not 0
    i = i0 + tl.arange(0, BLOCK_M)
    row = span.start_q + i0
    rows_left = span.len_q - i0
    position = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN) + i
    inside = i < span.len_q
    lists = keys_of(i0, at, span, inputs, strides, F.TILES)
    added = addends_of(inputs, strides, at, span, sizes, F)
    tbias = bias_of(tangents.bias, tangent_strides.bias, at, span, inputs, sizes, TBIAS_VECTOR, F)

    q_rows = load_rows(inputs.q, strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    tq_rows = load_rows(tangents.q, tangent_strides.q, at, at.h, row, rows_left, sizes.head_dim, BLOCK_M, D)
    k_head = rows_of(inputs.k, strides.k, at, at.hk, span.start_k, D.VECTOR)
    v_head = rows_of(inputs.v, strides.v, at, at.hk, span.start_k, V.VECTOR)
    tk_head = rows_of(tangents.k, tangent_strides.k, at, at.hk, span.start_k, D.VECTOR)
    tv_head = rows_of(tangents.v, tangent_strides.v, at, at.hk, span.start_k, V.VECTOR)
    row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
    reference = reference_of(row_lse, FOLD)
    centre = tl.zeros([BLOCK_M], tl.float32)
    centred = tl.zeros([BLOCK_M], tl.int1)
    excess = tl.zeros([BLOCK_M], tl.float32)  # m - c
    total = tl.zeros([BLOCK_M], tl.float32)  # sum of P: 1, up to roundings of a huge lse
    acc = zero_chunks(BLOCK_M, V)

    edges = key_range(i0, span, mod, BLOCK_M, BLOCK_N, F.WINDOW)
    steps = key_steps(lists, edges, BLOCK_N)
    FIRST: tl.constexpr = 2 if F.TILES else 0 if F.WINDOW == 2 else 1
    STEP: tl.constexpr = 1 if F.TILES else BLOCK_N
    SWEEPS: tl.constexpr = 1 if tangents.weight is None else 2
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
                tweights = load_weights(tangents.weight, tangent_strides.weight, at, span, j)
                p, bare = probabilities(s, reference, weights, mod.scale, FOLD, False)
                keep = dropout_keep(inputs, at, sizes, i0, start, mod, F, BLOCK_M, BLOCK_N, False)
                kept = drop(p, keep, mod)
                factor = gate_tile(gate, i, j, span, GATE_VECTOR, False)
                passed = times(kept, factor)
                if MOVES or tweights is not None:
                    mass = tl.sum(p, 1)
                    total += mass
                    if MOVES:
                        tk_rows = load_from(
                            tk_head, tangent_strides.k, start, keys_left, sizes.head_dim, BLOCK_N, D, part != 1
                        )
                        t, _raw = tangent_scores(
                            products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F,
                            TBIAS, TBIAS_VECTOR, PRECISION, False,
                        )  # fmt: skip
                        moment = tl.sum(p * t, 1)
                        if SWEEPS == 1:
                            fresh = (mass > 1e-30) & (centred == 0)
                            centre = tl.where(fresh, moment / tl.where(fresh, mass, 1.0), centre)
                            centred = centred | fresh
                        excess += moment - centre * mass
                        change = passed * (t - centre[:, None])
                    else:
                        excess -= centre * mass
                        change = -passed * centre[:, None]
                    if tweights is not None:
                        extra = bare * tweights[None, :]
                        excess += tl.sum(extra, 1)
                        extra = drop(extra, keep, mod)
                        change += times(extra, factor)
                    if tgate is not None:
                        change += kept * gate_tile(tgate, i, j, span, TGATE_VECTOR, False)
                    if sweep == SWEEPS - 1:
                        v_rows = load_from(v_head, strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
                        acc = add_moved(change, v_rows, acc, PRECISION, False, tangents.weight is not None)
                elif tgate is not None:
                    v_rows = load_from(v_head, strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)
                    change = kept * gate_tile(tgate, i, j, span, TGATE_VECTOR, False)
                    acc = add_product(change, v_rows, acc, PRECISION)
                if tangents.v is not None and sweep == SWEEPS - 1:
                    tv_rows = load_from(tv_head, tangent_strides.v, start, keys_left, sizes.head_dim_v, BLOCK_N, V, part != 1)  # fmt: skip
                    acc = add_product(passed, tv_rows, acc, PRECISION)
        if sweep < SWEEPS - 1:
            centre = excess / at_least_one_key(total)
            excess = tl.zeros([BLOCK_M], tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)

    if MOVES or tangents.weight is not None:
        share = 1.0 / at_least_one_key(total)
        excess = excess * share
        acc = scale_chunks(acc, share[:, None])
    out_rows = load_rows(out, out_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
    tout_rows = without_mean(acc, excess, out_rows)
    tout_tile = rows_of(tout, tout_strides, at, at.h, row, V.VECTOR)
    store_chunks(tout_tile, tout_strides, rows_left, sizes.head_dim_v, tout_rows, BLOCK_M, V)
    tl.store(mean + position, centre + excess, mask=inside)
    dout_rows = load_rows(dout, dout_strides, at, at.h, row, rows_left, sizes.head_dim_v, BLOCK_M, V)
    if dout_rows is not None:
        row_delta = row_dot(dout_rows, out_rows)
        if dlse is not None:
            row_delta -= tl.load(dlse + position, mask=inside, other=0.0)
        row_delta = tl.where(row_lse == float("-inf"), 0.0, row_delta)
        tl.store(delta + position, row_delta, mask=inside)
        tl.store(zeta + position, row_dot(dout_rows, tout_rows), mask=inside)


@triton.jit
def at_least_one_key(total):
    """total, and 1 in rows that see no key."""
    return tl.where(total > 0.0, total, 1.0)


@triton.jit
def without_mean(acc, mean, out_rows):
    """tO = acc - m O."""
    t0 = acc[0] - mean[:, None] * out_rows[0].to(tl.float32)
    if len(acc) == 2:
        return t0, acc[1] - mean[:, None] * out_rows[1].to(tl.float32)
    else:
        return (t0,)
