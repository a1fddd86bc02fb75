"""A bias copied to another order of its dims: one whose heads are neighbours in memory, as a Linear over pairs leaves it, to
one whose keys are, and a gradient back.

Maths     target = source
Grid      one axis over (batch member, row, tile of keys)
Tiles     keys by heads; loads follow the source's order and stores the target's: between them the tile goes through shared memory
Limits    memory
"""

from typing import NamedTuple

import triton.language as tl

from .kernel import kernel


class CopyStrides(NamedTuple):
    source: tuple[int, ...]  # (b0, b1, head, row, column)
    target: tuple[int, ...]


class CopySizes(NamedTuple):
    batch1: int
    heads: int
    rows: int
    keys: int
    tiles: int  # of a row


@kernel
def copy_bias_kernel(
    source, target, strides, sizes,
    KEYS: tl.constexpr, HEADS: tl.constexpr, WHOLE_KEYS: tl.constexpr, WHOLE_HEADS: tl.constexpr,
):  # fmt: skip
    """WHOLE: no tile reaches beyond, so that nothing has to be masked, which would hinder wide loads."""
    pid = tl.program_id(0)
    line = pid // sizes.tiles
    row = (line % sizes.rows).to(tl.int64)
    batch = line // sizes.rows
    b0 = (batch // sizes.batch1).to(tl.int64)
    b1 = (batch % sizes.batch1).to(tl.int64)
    source += b0 * strides.source[0] + b1 * strides.source[1] + row * strides.source[3]
    target += b0 * strides.target[0] + b1 * strides.target[1] + row * strides.target[3]
    key = (pid % sizes.tiles * KEYS + tl.arange(0, KEYS)).to(tl.int64)[:, None]
    for first in tl.range(0, sizes.heads, HEADS):
        head = (first + tl.arange(0, HEADS)).to(tl.int64)[None, :]
        inside = tl.full([KEYS, HEADS], True, tl.int1)
        if not WHOLE_KEYS:
            inside &= key < sizes.keys
        if not WHOLE_HEADS:
            inside &= head < sizes.heads
        x = tl.load(source + key * strides.source[4] + head * strides.source[2], mask=inside)
        tl.store(target + key * strides.target[4] + head * strides.target[2], x, mask=inside)
