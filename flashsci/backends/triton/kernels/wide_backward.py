"""Backward between the products q k^T, dO v^T and those of the gradients, for wide heads with scores in memory.

Maths     P = e^(S - lse) again; dS = P (R dO v^T - delta); R P and dS in the places of the products
Grid      as in wide_forward.py
Tiles     as there
Limits    bytes of the scores
"""

import triton
import triton.language as tl

from .dropout import drop, dropout_keep
from .gate import gate_tile, times
from .kernel import kernel
from .scores import addends_of, load_weights, of_addends, of_products, probabilities, reference_of, scores
from .wide_scores import load_scores, score_rows, store_scores


@kernel
def wide_backward_kernel(
    inputs, p, ds, lse, delta, dbias, terms, strides, tiles, sizes, mod,
    F: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """p: q k^T on the way in, R P on the way out; ds: dO v^T, dS. dbias: None, or the gradient of a bias at each pair; terms: None, or
    those of the gradient of key weights."""
    i0, at, span, first = score_rows(tl.program_id(0), tiles, sizes, mod, BLOCK_M)
    backward_rows_of(
        inputs, None, p, ds, lse, delta, dbias, terms, None, i0, at, span, first, strides, sizes, mod,
        F, VECTOR, BLOCK_M, BLOCK_N, 0,
    )  # fmt: skip


@triton.jit
def backward_rows_of(
    inputs, gate, p, ds, lse, delta, dbias, terms, dgate, i0, at, span, first, strides, sizes, mod,
    F: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """The results of whole rows, stored. gate: as `gate_of` makes it; dgate: None, or its gradient at each pair."""
    i = i0 + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    inside = i < span.len_q
    added = addends_of(inputs, strides, at, span, sizes, F)
    weights = load_weights(inputs.weight, strides.weight, at, span, j)
    # Rows without keys and beyond the queries get reference +inf: their probabilities are 0.
    row_lse = tl.load(lse + first + i, mask=inside, other=float("-inf"))
    row_delta = tl.load(delta + first + i, mask=inside, other=0.0)
    s = load_scores(p, first, i, j, span, VECTOR)
    dp = load_scores(ds, first, i, j, span, VECTOR)
    s, slope = scores(s, i, j, added, span, mod, F, False, True, F.WINDOW, False)
    reference = reference_of(row_lse, False)
    found, bare = probabilities(s, reference, weights, mod.scale, False, False)
    keep = dropout_keep(inputs, at, sizes, i0, 0, mod, F, BLOCK_M, BLOCK_N, False)
    kept = drop(found, keep, mod)
    dp = drop(dp, keep, mod)
    store_scores(dgate, first, i, j, span, found * dp, VECTOR)
    factor = gate_tile(gate, i, j, span, GATE_VECTOR, False)
    dp = times(dp, factor)
    dp -= row_delta[:, None]
    gradient = found * dp
    store_scores(p, first, i, j, span, times(kept, factor), VECTOR)
    store_scores(dbias, first, i, j, span, of_addends(gradient, slope, F), VECTOR)
    store_scores(terms, first, i, j, span, bare * dp, VECTOR)
    store_scores(ds, first, i, j, span, of_products(gradient, slope, F), VECTOR)
