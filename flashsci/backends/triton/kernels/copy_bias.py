"""A bias copied to another order of its dims, with keys as neighbours instead of heads, and a gradient copied back.

A Linear over pairs leaves a bias whose heads are neighbours in memory.

Maths     target = source
Grid      one axis over (up to three dims, tile of the dim that is read, tile of the dim that is written)
Tiles     4 KB: the dim with neighbours in the target by the dim with neighbours in the source. 16 bytes a lane both ways,
          rows of 64 bytes and more, with shared memory between. A program has one position of the other dims
Limits    memory. 64 threads of 64 bytes: all loads for a few MB are under way at once, and an SM has at most one such
          block more than another. Larger blocks leave a longer tail at the end, and more bytes a thread mean longer waits
"""

from typing import NamedTuple

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .kernel import kernel


class CopyStrides(NamedTuple):
    source: tuple[int, ...]  # (three outer dims, the dim that is read, the dim that is written)
    target: tuple[int, ...]


class CopySizes(NamedTuple):
    outer1: int
    outer2: int
    read: int  # of the dim whose neighbours are read
    written: int


class CopySide(NamedTuple):
    """One side of a tile: the dim that is read, or the one that is written."""

    TILE: int
    VECTOR: int  # rows of neighbours begin, and end, at multiples of it
    WHOLE: bool  # no tile reaches beyond the dim
    ONE: bool  # there is one tile


@kernel
def copy_bias_kernel(
    source, target, strides, sizes,
    READ: tl.constexpr, WRITTEN: tl.constexpr, OUTER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """OUTER: whether there are outer dims. EARLY: the launch does not wait for the kernel before it; the wait for its
    results is here."""
    line = tl.program_id(0)
    written = tl.arange(0, WRITTEN.TILE).to(tl.int64)[:, None]
    read = tl.arange(0, READ.TILE).to(tl.int64)[None, :]
    if not WRITTEN.ONE:
        tiles = tl.cdiv(sizes.written, WRITTEN.TILE)
        written += line % tiles * WRITTEN.TILE
        line //= tiles
    if not READ.ONE:
        tiles = tl.cdiv(sizes.read, READ.TILE)
        read += line % tiles * READ.TILE
        line //= tiles
    if OUTER:
        outer2 = (line % sizes.outer2).to(tl.int64)
        line //= sizes.outer2
        outer1, outer0 = (line % sizes.outer1).to(tl.int64), (line // sizes.outer1).to(tl.int64)
        at = outer0 * strides.source[0] + outer1 * strides.source[1] + outer2 * strides.source[2]
        source += at // READ.VECTOR * READ.VECTOR  # tells the compiler the factor
        at = outer0 * strides.target[0] + outer1 * strides.target[1] + outer2 * strides.target[2]
        target += at // WRITTEN.VECTOR * WRITTEN.VECTOR
    inside = tl.full([WRITTEN.TILE, READ.TILE], True, tl.int1)
    if not WRITTEN.WHOLE:
        inside &= written < sizes.written // WRITTEN.VECTOR * WRITTEN.VECTOR
    if not READ.WHOLE:
        inside &= read < sizes.read // READ.VECTOR * READ.VECTOR
    source += read * strides.source[3] + written * (strides.source[4] // READ.VECTOR * READ.VECTOR)
    target += read * (strides.target[3] // WRITTEN.VECTOR * WRITTEN.VECTOR) + written * strides.target[4]
    if EARLY:
        gdc_wait()
    tl.store(target, tl.load(source, mask=inside), mask=inside)
