"""The scores that residual attention keeps, and their gradients: one [len_q, len_k] plane per head, one after the other."""

import triton
import triton.language as tl

from .chunks import aligned
from .coord import flat_row
from .scores import Plane


@triton.jit
def plane_of(pointer, at, span, sizes, VECTOR: tl.constexpr):
    """The plane of a head; None for None. VECTOR: len_k is a multiple of it."""
    if pointer is not None:
        rows = flat_row(at.b, at.h, sizes.heads, span.start_q, sizes.size_q, False)
        length = span.len_k.to(tl.int64)
        return Plane(pointer + aligned(rows * length, VECTOR), length, 1, span.len_q)
