"""Attention with a gate of pairs between products of whole heads, for wide heads with scores in memory.

Maths     as in wide_forward.py, wide_backward.py and wide_double_backward.py, with g R in the place of R (gated.py,
          gated_second_order.py); the gradient of g at each pair is stored, and torch.sum adds it up to the shape of g
Grid      as there
Tiles     as there
Limits    bytes of the scores, of g and of its gradient
"""

import triton.language as tl

from .gate import gate_of
from .kernel import kernel
from .wide_backward import backward_rows_of
from .wide_double_backward import second_order_rows_of
from .wide_forward import forward_rows_of
from .wide_scores import score_rows


@kernel
def gated_wide_forward_kernel(
    inputs, gate, p, lse, strides, gate_strides, tiles, sizes, mod,
    F: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """As wide_forward_kernel."""
    i0, at, span, first = score_rows(tl.program_id(0), tiles, sizes, mod, BLOCK_M)
    plane = gate_of(gate, gate_strides, at, span, GATE_VECTOR)
    forward_rows_of(
        inputs, plane, p, lse, i0, at, span, first, strides, sizes, mod, F, VECTOR, BLOCK_M, BLOCK_N, GATE_VECTOR
    )


@kernel
def gated_wide_backward_kernel(
    inputs, gate, p, ds, lse, delta, dbias, terms, dgate, strides, gate_strides, tiles, sizes, mod,
    F: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """As wide_backward_kernel. dgate: None, or the gradient of the gate at each pair."""
    i0, at, span, first = score_rows(tl.program_id(0), tiles, sizes, mod, BLOCK_M)
    plane = gate_of(gate, gate_strides, at, span, GATE_VECTOR)
    backward_rows_of(
        inputs, plane, p, ds, lse, delta, dbias, terms, dgate, i0, at, span, first, strides, sizes, mod,
        F, VECTOR, BLOCK_M, BLOCK_N, GATE_VECTOR,
    )  # fmt: skip


@kernel
def gated_wide_double_backward_kernel(
    inputs, tangents, gate, tgate, w, e, f, tdp, lse, delta, p, fbias, terms, ggate, mean,
    strides, tangent_strides, gate_strides, tgate_strides, tiles, sizes, mod,
    F: tl.constexpr, TBIAS: tl.constexpr, TBIAS_VECTOR: tl.constexpr, VECTOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GATE_VECTOR: tl.constexpr, TGATE_VECTOR: tl.constexpr,
):  # fmt: skip
    """As wide_double_backward_kernel. ggate: None, or the gradient of the gate at each pair."""
    i0, at, span, first = score_rows(tl.program_id(0), tiles, sizes, mod, BLOCK_M)
    plane = gate_of(gate, gate_strides, at, span, GATE_VECTOR)
    tplane = gate_of(tgate, tgate_strides, at, span, TGATE_VECTOR)
    second_order_rows_of(
        inputs, tangents, plane, tplane, w, e, f, tdp, lse, delta, p, fbias, terms, ggate, mean, i0, at, span, first,
        strides, tangent_strides, sizes, mod, F, TBIAS, TBIAS_VECTOR, VECTOR, BLOCK_M, BLOCK_N, GATE_VECTOR, TGATE_VECTOR,
    )  # fmt: skip
