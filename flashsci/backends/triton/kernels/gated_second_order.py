"""The second order of attention with a gate of pairs g, whose tangent is tg: tangents of out and lse, and the double backward.

Maths     as in tangents.py, with g R in the place of R, and the tangent of that factor:
          tO = sum_j R ((g W + tg P) V + g P tV);   U = g R (dO V^T) - delta;   Y = R (g dO tV^T + tg dO V^T) - zeta
          gV = R (g W + tg P)^T dO;                 gG = R (W dO V^T + P dO tV^T), summed over the scores that share a number of g
Grid      as in jvp.py, double_backward_queries.py and double_backward_keys.py; that of the sums as in gated.py
Tiles     as there; the tiles of g and tg stream. gG has a kernel of its own: 5 products a tile
Limits    as there
"""

import triton.language as tl

from .bias_gradient import bias_tile, sharer, unseen
from .chunks import aligned, load_rows, score_chunks
from .coord import flat_row, key_tile, query_tile
from .double_backward_keys import second_order_keys_of
from .double_backward_queries import second_order_queries_of
from .dropout import drop, dropout_keep
from .gate import gate_of, gate_tile, pair_step, store_sums, times, times_tangent
from .jvp import jvp_tile_of
from .kernel import kernel
from .scores import addends_of, bias_of, dense_plane, load_weights, probabilities, reference_of, scores
from .tangents import second_order, softcap_bend, tangent_scores


@kernel
def gated_jvp_kernel(
    inputs, tangents, gate, tgate, out, lse, dout, dlse, tout, mean, delta, zeta,
    strides, tangent_strides, gate_strides, tgate_strides, out_strides, dout_strides, tout_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
    GATE_VECTOR: tl.constexpr, TGATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """As jvp_kernel."""
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    plane = gate_of(gate, gate_strides, at, span, GATE_VECTOR)
    tplane = gate_of(tgate, tgate_strides, at, span, TGATE_VECTOR)
    jvp_tile_of(
        inputs, tangents, plane, tplane, out, lse, dout, dlse, tout, mean, delta, zeta, i0, at, span,
        strides, tangent_strides, out_strides, dout_strides, tout_strides, sizes, mod,
        F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, TBIAS, TBIAS_VECTOR, GATE_VECTOR, TGATE_VECTOR,
    )  # fmt: skip


@kernel
def gated_double_backward_queries_kernel(
    inputs, tangents, gate, tgate, lse, dout, mean, delta, zeta, gq, gbias,
    strides, tangent_strides, gate_strides, tgate_strides, dout_strides, gq_strides, gbias_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, GBIAS_VECTOR: tl.constexpr, GATE_VECTOR: tl.constexpr, TGATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """As double_backward_queries_kernel."""
    i0, at, span = query_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_M, F.VARLEN, F.WINDOW >= 1)
    if i0 >= span.len_q:
        return
    plane = gate_of(gate, gate_strides, at, span, GATE_VECTOR)
    tplane = gate_of(tgate, tgate_strides, at, span, TGATE_VECTOR)
    second_order_queries_of(
        inputs, tangents, plane, tplane, lse, dout, mean, delta, zeta, gq, gbias, i0, at, span,
        strides, tangent_strides, dout_strides, gq_strides, gbias_strides, sizes, mod,
        F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, TBIAS, TBIAS_VECTOR, BIAS_GRADIENT, GBIAS_VECTOR, GATE_VECTOR, TGATE_VECTOR,
    )  # fmt: skip


@kernel
def gated_double_backward_keys_kernel(
    inputs, tangents, gate, tgate, lse, dout, mean, delta, zeta, gk, gv, column_sums, weight_sums,
    strides, tangent_strides, gate_strides, tgate_strides, dout_strides, gk_strides, gv_strides, sizes, schedule, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
    GATE_VECTOR: tl.constexpr, TGATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """As double_backward_keys_kernel."""
    j0, at, span = key_tile(tl.program_id(0), inputs, sizes, schedule, mod, BLOCK_N, F.VARLEN)
    if j0 >= span.len_k:
        return
    second_order_keys_of(
        inputs, tangents, gate, tgate, lse, dout, mean, delta, zeta, gk, gv, column_sums, weight_sums, j0, at, span,
        strides, tangent_strides, gate_strides, tgate_strides, dout_strides, gk_strides, gv_strides, sizes, mod,
        F, D, V, FOLD, PRECISION, BLOCK_M, BLOCK_N, TBIAS, TBIAS_VECTOR, GATE_VECTOR, TGATE_VECTOR,
    )  # fmt: skip


@kernel
def second_order_pair_sums_kernel(
    inputs, tangents, gate, tgate, lse, dout, mean, delta, zeta, sums,
    strides, tangent_strides, gate_strides, tgate_strides, dout_strides, sums_strides, own, shared, sharing, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr,
    GATE_VECTOR: tl.constexpr, TGATE_VECTOR: tl.constexpr, SUMS_VECTOR: tl.constexpr,
    OF_GATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As pair_sums_kernel: sums of the second-order gradient of the gate (OF_GATE), or of a bias."""
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
        at = sharer(block, m, shared, sizes, False)
        i = i0 + tl.arange(0, BLOCK_M)
        j = j0 + tl.arange(0, BLOCK_N)
        inside = i < span.len_q
        rows_left = span.len_q - i0
        columns_left = span.len_k - j0
        position = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, False) + i
        q_rows = load_rows(inputs.q, strides.q, at, at.h, i0, rows_left, sizes.head_dim, BLOCK_M, D)
        tq_rows = load_rows(tangents.q, tangent_strides.q, at, at.h, i0, rows_left, sizes.head_dim, BLOCK_M, D)
        k_rows = load_rows(inputs.k, strides.k, at, at.hk, j0, columns_left, sizes.head_dim, BLOCK_N, D)
        tk_rows = load_rows(tangents.k, tangent_strides.k, at, at.hk, j0, columns_left, sizes.head_dim, BLOCK_N, D)
        dout_rows = load_rows(dout, dout_strides, at, at.h, i0, rows_left, sizes.head_dim_v, BLOCK_M, V)
        v_rows = load_rows(inputs.v, strides.v, at, at.hk, j0, columns_left, sizes.head_dim_v, BLOCK_N, V)
        products = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
        added = addends_of(inputs, strides, at, span, sizes, F)
        tbias = bias_of(tangents.bias, tangent_strides.bias, at, span, inputs, sizes, TBIAS_VECTOR, F)
        # With COLUMNS those beyond the keys hold any values, and are not stored.
        s, slope = scores(products, i, j, added, span, mod, F, FOLD, not COLUMNS, F.WINDOW, False)
        row_lse = tl.load(lse + position, mask=inside, other=float("-inf"))
        weights = load_weights(inputs.weight, strides.weight, at, span, j)
        tweights = load_weights(tangents.weight, tangent_strides.weight, at, span, j)
        p, bare = probabilities(s, reference_of(row_lse, FOLD), weights, mod.scale, FOLD, False)
        t, raw_t = tangent_scores(
            products, q_rows, k_rows, tq_rows, tk_rows, slope, i, j, tbias, span, mod, F,
            TBIAS, TBIAS_VECTOR, PRECISION, False,
        )  # fmt: skip
        dp = score_chunks(dout_rows, v_rows, None, PRECISION, False)
        tdp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        tv_rows = load_rows(tangents.v, tangent_strides.v, at, at.hk, j0, columns_left, sizes.head_dim_v, BLOCK_N, V)
        if tv_rows is not None:
            tdp = score_chunks(dout_rows, tv_rows, None, PRECISION, False)
        keep = dropout_keep(inputs, at, sizes, i0, j0, mod, F, BLOCK_M, BLOCK_N, False)
        dp = drop(dp, keep, mod)
        tdp = drop(tdp, keep, mod)
        plane = gate_of(gate, gate_strides, at, span, GATE_VECTOR)
        tplane = gate_of(tgate, tgate_strides, at, span, TGATE_VECTOR)
        factor = gate_tile(plane, i, j, span, GATE_VECTOR, False)
        tfactor = gate_tile(tplane, i, j, span, TGATE_VECTOR, False)
        row_mean = tl.load(mean + position, mask=inside, other=0.0)
        row_delta = tl.load(delta + position, mask=inside, other=0.0)
        row_zeta = tl.load(zeta + position, mask=inside, other=0.0)
        u = times(dp, factor) - row_delta[:, None]
        y = times_tangent(dp, tdp, factor, tfactor) - row_zeta[:, None]
        bend = softcap_bend(products, s, slope, mod, F)
        w, f, _e_raw, _f_raw, _g = second_order(p, bare, t, raw_t, tweights, u, y, row_mean, slope, bend, F, False)
        if OF_GATE:
            total += w * dp + p * tdp
        else:
            total += f
    sums += split.to(tl.int64) * aligned(sharing.split_stride, SUMS_VECTOR)
    results = dense_plane(sums, sums_strides, block, span, SUMS_VECTOR)
    store_sums(results, own_i, own_j, span, total, BLOCK_M, BLOCK_N, SUMS_VECTOR, ROWS, COLUMNS)
