"""Backward of short sequences whose batch members share a bias, with its gradient, reading everything once.

Each program goes through members of one block of the bias, as in a window transformer.

Maths     as in backward_small.py; dBias_block = sum over the members that share it of dS
Grid      one axis over (split, bias block): dense, as many key heads as query heads
Tiles     one score tile holds a whole sequence; the fp32 sum and the bias stay
Order     members are summed in order within a split, splits by one torch.sum afterwards: the same result every run
Limits    the time of one member after the other: loads, 5 products, stores
"""

import triton.language as tl

from .backward_small import head_products, head_scores
from .bias_gradient import bias_tile, sharer
from .chunks import aligned, load_rows, rows_of, scale_chunks, store_chunks, zero_chunks
from .coord import flat_row
from .kernel import kernel
from .scores import bias_of, load_plane, load_weights, of_addends, store_plane


@kernel
def small_shared_backward_kernel(
    inputs, dout, out, lse, dlse, dq, dk, dv, dbias, weight_sums,
    strides, dout_strides, out_strides, dq_strides, dk_strides, dv_strides, dbias_strides, own, shared, sharing, sizes, mod,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, DBIAS_VECTOR: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv; a part of dbias; weight_sums unless None."""
    _i0, _tile_k, split, block, span = bias_tile(tl.program_id(0), inputs, own, sharing, sizes, mod, BLOCK, False)
    i = tl.arange(0, BLOCK)
    bias = bias_of(inputs.bias, strides.bias, block, span, inputs, sizes, F.BIAS_VECTOR, F)
    bias_values = load_plane(bias, i, i, span.len_k, F.BIAS, F.BIAS_VECTOR, False)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    first = split * sharing.members_per_split
    for m in tl.range(first, tl.minimum(first + sharing.members_per_split, sharing.members)):
        at = sharer(block, m, shared, sizes, False)
        k_rows = load_rows(inputs.k, strides.k, at, at.hk, span.start_k, span.len_k, sizes.head_dim, BLOCK, D)
        v_rows = load_rows(inputs.v, strides.v, at, at.hk, span.start_k, span.len_k, sizes.head_dim_v, BLOCK, V)
        weights = load_weights(inputs.weight, strides.weight, at, span, i)
        q_rows, ds, slope, dv_rows, bare = head_scores(
            inputs, dout, out, lse, dlse, at, span, k_rows, v_rows, zero_chunks(BLOCK, V), bias_values, weights,
            strides, dout_strides, out_strides, sizes, mod, F, D, V, FOLD, PRECISION, BLOCK,
        )  # fmt: skip
        total += of_addends(ds, slope, F)
        if weight_sums is not None:
            row = flat_row(at.b, at.hk, sizes.heads_k, span.start_k, sizes.size_k, False)
            tl.store(weight_sums + row + i, tl.sum(bare, 0), mask=i < span.len_k)
        dv_tile = rows_of(dv, dv_strides, at, at.hk, span.start_k, V.VECTOR)
        store_chunks(dv_tile, dv_strides, span.len_k, sizes.head_dim_v, dv_rows, BLOCK, V)
        dk_rows = head_products(
            dq, dq_strides, at, span, q_rows, k_rows, ds, slope, zero_chunks(BLOCK, D), sizes, mod, F, D, PRECISION, BLOCK
        )  # fmt: skip
        dk_tile = rows_of(dk, dk_strides, at, at.hk, span.start_k, D.VECTOR)
        dk_rows = scale_chunks(dk_rows, mod.scale)
        store_chunks(dk_tile, dk_strides, span.len_k, sizes.head_dim, dk_rows, BLOCK, D)
    dbias += split.to(tl.int64) * aligned(sharing.split_stride, DBIAS_VECTOR)
    dplane = bias_of(dbias, dbias_strides, block, span, inputs, sizes, DBIAS_VECTOR, F)
    store_plane(dplane, i, i, span.len_k, total, DBIAS_VECTOR)
