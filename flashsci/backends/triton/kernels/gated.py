"""Attention with a gate of pairs: out = (P g) v, where P is the softmax without the gate; and its gradients.

Maths     as in forward.py, backward_queries.py and backward_keys.py, with g R in the place of dropout's R; delta = dO . O - dlse stays.
          dG = R P (dO V^T), summed over the heads and batch members that share the gate
Grid      as there; that of the gate's gradient as in bias_gradient.py
Tiles     as there; the tile of the gate streams. dG is stored by the kernel of dq if the gate has a number for each score; else it
          has a kernel of its own: 2 products a tile
Limits    as there
"""

import triton.language as tl

from .backward_keys import dkdv_tile_of
from .backward_queries import dq_tile_of
from .bias_gradient import bias_tile, sharer, unseen
from .chunks import aligned, load_rows, rows_of, score_chunks
from .coord import flat_row, key_tile, query_tile
from .dropout import drop, dropout_keep
from .forward import AGAIN_N, attend, finish
from .gate import gate_of, gated, pair_step, store_sums
from .kernel import kernel
from .scores import LN2, addends_of, dense_plane, load_weights, of_addends, probabilities, scores


@kernel
def gated_forward_kernel(
    inputs, gate, out, lse, strides, gate_strides, out_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE_VECTOR: tl.constexpr,
):  # fmt: skip
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    i = i0 + tl.arange(0, BLOCK_M)
    rows_left = span.len_q - i0
    plane = gate_of(gate, gate_strides, at, span, GATE_VECTOR)
    q_rows = load_rows(inputs.q, strides.q, at, at.h, span.start_q + i0, rows_left, sizes.head_dim, BLOCK_M, D)
    row_max, row_sum, acc = attend(
        q_rows, plane, i0, at, span, inputs, strides, sizes, mod,
        F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, GATE_VECTOR, False,
    )  # fmt: skip
    lse_rows = lse + flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, F.VARLEN)
    out_tile = rows_of(out, out_strides, at, at.h, span.start_q + i0, V.VECTOR)
    if FOLD:
        row_max = row_max * LN2
        if tl.max((row_sum != row_sum).to(tl.int32), 0) > 0:  # scores are huge (or NaN)
            row_max, row_sum, acc = attend(
                q_rows, plane, i0, at, span, inputs, strides, sizes, mod,
                F, D, V, False, PRECISION, BLOCK_M, AGAIN_N, GATE_VECTOR, True,
            )  # fmt: skip
            finish(lse_rows, out_tile, out_strides, i, span, rows_left, sizes, mod, row_max, row_sum, acc, V, BLOCK_M)
            return
    finish(lse_rows, out_tile, out_strides, i, span, rows_left, sizes, mod, row_max, row_sum, acc, V, BLOCK_M)


@kernel
def gated_dq_kernel(
    inputs, gate, dout, reference, delta, dq, dbias, dgate,
    strides, gate_strides, dout_strides, dq_strides, dbias_strides, dgate_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS_GRADIENT: tl.constexpr, DBIAS_VECTOR: tl.constexpr,
    GATE_VECTOR: tl.constexpr, DGATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """As dq_kernel; and dgate, which has a number for each score (None: it is not computed here)."""
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    dq_tile_of(
        inputs, gate_of(gate, gate_strides, at, span, GATE_VECTOR), dout, reference, delta, dq, dbias, i0, at, span,
        strides, dout_strides, dq_strides, dbias_strides, sizes, mod,
        F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, BIAS_GRADIENT, DBIAS_VECTOR,
        gate_of(dgate, dgate_strides, at, span, DGATE_VECTOR), GATE_VECTOR, DGATE_VECTOR,
    )  # fmt: skip


@kernel
def gated_dkdv_kernel(
    inputs, gate, dout, reference, delta, dk, dv, column_sums, weight_sums,
    strides, gate_strides, dout_strides, dk_strides, dv_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """As dkdv_kernel."""
    j0, at, span = key_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_N, F.VARLEN)
    if j0 >= span.len_k:
        return
    dkdv_tile_of(
        inputs, gate, dout, reference, delta, dk, dv, column_sums, weight_sums, j0, at, span,
        strides, gate_strides, dout_strides, dk_strides, dv_strides, sizes, mod,
        F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, GATE_VECTOR,
    )  # fmt: skip


@kernel
def pair_sums_kernel(
    inputs, gate, dout, reference, delta, sums, strides, gate_strides, dout_strides, sums_strides, own, shared, sharing, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE_VECTOR: tl.constexpr, SUMS_VECTOR: tl.constexpr, OF_GATE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """For each pair the sum of a gradient over the heads and batch members that share it: of the gate (OF_GATE), or of a bias.

    Without ROWS a gate has one row for all queries, and there is a sum for each key; without COLUMNS one for each query.
    """
    own_i, tile_k, split, block, span = bias_tile(tl.program_id(0), inputs, own, sharing, sizes, mod, BLOCK_M, False)
    if own_i >= span.len_q:
        return
    own_j = tile_k * BLOCK_N
    first = split * sharing.members_per_split
    last = tl.minimum(first + sharing.members_per_split, sharing.members)
    hidden = False
    if ROWS and COLUMNS:
        hidden = unseen(own_i, own_j, span, mod, BLOCK_M, BLOCK_N, F.WINDOW)
    if hidden:  # its gradient is zero
        last = first
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in tl.range(first, last):
        m, i0, j0 = pair_step(n, own_i, own_j, shared, BLOCK_M, BLOCK_N, ROWS, COLUMNS)
        i = i0 + tl.arange(0, BLOCK_M)
        j = j0 + tl.arange(0, BLOCK_N)
        inside = i < span.len_q
        rows_left = span.len_q - i0
        columns_left = span.len_k - j0
        at = sharer(block, m, shared, sizes, False)
        position = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, False) + i
        q_rows = load_rows(inputs.q, strides.q, at, at.h, i0, rows_left, sizes.head_dim, BLOCK_M, D)
        k_rows = load_rows(inputs.k, strides.k, at, at.hk, j0, columns_left, sizes.head_dim, BLOCK_N, D)
        dout_rows = load_rows(dout, dout_strides, at, at.h, i0, rows_left, sizes.head_dim_v, BLOCK_M, V)
        v_rows = load_rows(inputs.v, strides.v, at, at.hk, j0, columns_left, sizes.head_dim_v, BLOCK_N, V)
        products = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
        dp = score_chunks(dout_rows, v_rows, None, PRECISION, False)
        added = addends_of(inputs, strides, at, span, sizes, F)
        # With COLUMNS those beyond the keys hold any values, and are not stored.
        s, slope = scores(products, i, j, added, span, mod, F, FOLD, not COLUMNS, F.WINDOW, False)
        row_reference = tl.load(reference + position, mask=inside, other=float("inf"))
        weights = load_weights(inputs.weight, strides.weight, at, span, j)
        p, _bare = probabilities(s, row_reference, weights, mod.scale, FOLD, False)
        keep = dropout_keep(inputs, at, sizes, i0, j0, mod, F, BLOCK_M, BLOCK_N, False)
        dp = drop(dp, keep, mod)
        if OF_GATE:
            total += p * dp
        else:
            of_head = gate_of(gate, gate_strides, at, span, GATE_VECTOR)
            dp = gated(dp, of_head, i, j, span, GATE_VECTOR, False)
            row_delta = tl.load(delta + position, mask=inside, other=0.0)
            total += of_addends(p * (dp - row_delta[:, None]), slope, F)
    sums += split.to(tl.int64) * aligned(sharing.split_stride, SUMS_VECTOR)
    results = dense_plane(sums, sums_strides, block, span, SUMS_VECTOR)
    store_sums(results, own_i, own_j, span, total, BLOCK_M, BLOCK_N, SUMS_VECTOR, ROWS, COLUMNS)
