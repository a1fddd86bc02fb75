"""The gate of pairs: a factor of P after the softmax, which multiplies dP, too."""

import triton
import triton.language as tl

from .scores import PLANE, dense_plane, load_plane


@triton.jit
def gate_of(pointer, strides, at, span, VECTOR: tl.constexpr):
    """The plane of the gate for the head `at`; None for None. strides: (b0, b1, head, row, column)."""
    if pointer is not None:
        return dense_plane(pointer, strides, at, span, VECTOR)


@triton.jit
def gated(x, gate, i, j, span, VECTOR: tl.constexpr, TRANSPOSED: tl.constexpr):
    """x times the gate at rows i and columns j (vectors); x for None. Beyond the tensor the gate is zero."""
    if gate is None:
        return x
    else:
        return x * load_plane(gate, i, j, span.len_k, PLANE, VECTOR, TRANSPOSED).to(tl.float32)
