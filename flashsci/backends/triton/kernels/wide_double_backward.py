"""Tangents of out and lse, and the double backward, between products of whole heads, for wide heads with scores in
memory.

Maths     see tangents.py; m and zeta are sums over the rows that a program owns
Grid      as in wide_forward.py
Tiles     as there
Limits    bytes of the scores
"""

import triton
import triton.language as tl

from .dropout import drop, dropout_keep
from .gate import gate_tile, times, times_tangent
from .kernel import kernel
from .scores import addends_of, bias_of, load_weights, probabilities, reference_of, scores
from .tangents import second_order, softcap_bend, tangent_of
from .wide_scores import load_scores, score_rows, store_scores


@kernel
def wide_double_backward_kernel(
    inputs, tangents, w, e, f, tdp, lse, delta, p, fbias, terms, mean,
    strides, tangent_strides, tiles, sizes, mod,
    F: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Input: products; output: factors of the next products.

    w: q k^T, then R W. e: None without tangents of q and k, else tq k^T + q tk^T, then E'. f: None if only tangents
    of out and lse are wanted, else dO v^T, then F'. tdp: None without a tangent of v, else dO tv^T, which stays. p:
    None, or memory for R P; fbias: F; terms: those of gw.
    """
    i0, at, span, first = score_rows(tl.program_id(0), tiles, sizes, mod, BLOCK_M)
    second_order_rows_of(
        inputs, tangents, None, None, w, e, f, tdp, lse, delta, p, fbias, terms, None, mean, i0, at, span, first,
        strides, tangent_strides, sizes, mod, F, TBIAS, TBIAS_VECTOR, VECTOR, BLOCK_M, BLOCK_N, 0, 0,
    )  # fmt: skip


@triton.jit
def second_order_rows_of(
    inputs, tangents, gate, tgate, w, e, f, tdp, lse, delta, p, fbias, terms, ggate, mean, i0, at, span, first,
    strides, tangent_strides, sizes, mod,
    F: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GATE_VECTOR: tl.constexpr, TGATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """The results of whole rows, stored. gate, tgate: as `gate_of` makes them of the gate and its tangent; ggate: None, or the
    gradient of the gate at each pair."""
    i = i0 + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    inside = i < span.len_q
    added = addends_of(inputs, strides, at, span, sizes, F)
    tbias = bias_of(tangents.bias, tangent_strides.bias, at, span, inputs, sizes, TBIAS_VECTOR, F)
    weights = load_weights(inputs.weight, strides.weight, at, span, j)
    tweights = load_weights(tangents.weight, tangent_strides.weight, at, span, j)
    row_lse = tl.load(lse + first + i, mask=inside, other=float("-inf"))
    reference = reference_of(row_lse, False)

    products = load_scores(w, first, i, j, span, VECTOR)
    s, slope = scores(products, i, j, added, span, mod, F, False, True, F.WINDOW, False)
    found, bare = probabilities(s, reference, weights, mod.scale, False, False)
    raw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if e is not None:
        raw = load_scores(e, first, i, j, span, VECTOR)
    t, raw = tangent_of(raw, slope, i, j, tbias, span, mod, F, TBIAS, TBIAS_VECTOR, False)
    row_mean = tl.sum(found * t, 1)
    if tweights is not None:
        row_mean += tl.sum(bare * tweights[None, :], 1)
    change = found * (t - row_mean[:, None])
    if tweights is not None:
        change += bare * tweights[None, :]
    keep = dropout_keep(inputs, at, sizes, i0, 0, mod, F, BLOCK_M, BLOCK_N, False)
    kept = drop(found, keep, mod)
    change = drop(change, keep, mod)
    tl.store(mean + first + i, row_mean, mask=inside)
    factor = gate_tile(gate, i, j, span, GATE_VECTOR, False)
    tfactor = gate_tile(tgate, i, j, span, TGATE_VECTOR, False)
    moved = times_tangent(kept, change, factor, tfactor)
    passed = times(kept, factor)
    store_scores(w, first, i, j, span, moved, VECTOR)
    store_scores(p, first, i, j, span, passed, VECTOR)
    if f is not None:
        dp = load_scores(f, first, i, j, span, VECTOR)
        row_zeta = tl.sum(moved * dp, 1)  # dO . tO
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if tdp is not None:
            y = load_scores(tdp, first, i, j, span, VECTOR)
            row_zeta += tl.sum(passed * y, 1)
        store_scores(ggate, first, i, j, span, change * dp + kept * y, VECTOR)
        dp = drop(dp, keep, mod)
        y = times_tangent(dp, drop(y, keep, mod), factor, tfactor)
        dp = times(dp, factor)
        row_delta = tl.load(delta + first + i, mask=inside, other=0.0)
        bend = softcap_bend(products, s, slope, mod, F)
        _w, plain, e_raw, f_raw, g = second_order(
            found, bare, t, raw, tweights, dp - row_delta[:, None], y - row_zeta[:, None], row_mean, slope, bend, F, False
        )  # fmt: skip
        store_scores(terms, first, i, j, span, g, VECTOR)
        store_scores(fbias, first, i, j, span, plain, VECTOR)
        store_scores(e, first, i, j, span, e_raw, VECTOR)
        store_scores(f, first, i, j, span, f_raw, VECTOR)
