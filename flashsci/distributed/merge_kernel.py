"""A kernel that adds a piece to the sums (out, lse) in one pass over memory:
:func:`flashsci.distributed.merging.merge` on GPUs.

Grid      (tiles of rows, heads, batch members)
Tiles     ROWS rows of out and of the piece, whole, with their lse
Limits    memory: the sum is read and written, the piece read; 10 bytes a
          number where the piece has 16 bits, 6 where the sum has, too
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # numbers of a program


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    out, lse, part, part_lse, rows, width,
    out_member, out_head, out_row, part_member, part_head, part_row,
    lse_member, lse_head, part_lse_member, part_lse_head,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head, member = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    of_lse = lse + member * lse_member + head * lse_head + row
    of_part = part_lse + member * part_lse_member + head * part_lse_head + row
    old = tl.load(of_lse, mask=inside, other=float("-inf"))
    new = tl.load(of_part, mask=inside, other=float("-inf"))
    top = tl.maximum(old, new)
    seen = top > float("-inf")
    base = tl.where(seen, top, 0.0)
    added = tl.exp(new - base)
    both = tl.where(seen, tl.exp(old - base) + added, 1.0)
    share = added / both
    column = tl.arange(0, WIDTH)[None, :]
    filled = inside[:, None] & (column < width)
    sums = out + member * out_member + head * out_head + row[:, None] * out_row + column
    x = tl.load(sums, mask=filled, other=0.0).to(tl.float32)
    y = tl.load(
        part + member * part_member + head * part_head + row[:, None] * part_row + column,
        mask=filled,
        other=0.0,
    )
    tl.store(sums, x + share[:, None] * (y.to(tl.float32) - x), mask=filled)
    # There are fewer rows than threads: several threads hold each row, and all must have read it before one writes
    # it.
    tl.debug_barrier()
    tl.store(of_lse, tl.where(seen, base + tl.log(both), float("-inf")), mask=inside)


def launch(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> bool:
    """Add a piece in place: out [..., H, S, Dv] in up to 32 bits, lse [..., H, S] in float32. False: it cannot take
    such strides, and does nothing."""
    if not out.numel():
        return True
    members = tuple(_as_four(x, last) for x, last in ((out, 3), (lse, 2), (part, 3), (part_lse, 2)))
    if any(x is None for x in members):
        return False
    o, total, p, new = members
    batch, heads, rows, width = o.shape
    wide = triton.next_power_of_2(width)
    count = max(1, TILE // wide)
    with torch.cuda.device(o.device if o.is_cuda else -1):
        merge_kernel[triton.cdiv(rows, count), heads, batch](
            o, total, p, new, rows, width, *o.stride()[:3], *p.stride()[:3], *total.stride()[:2], *new.stride()[:2],
            ROWS=count, WIDTH=wide, num_warps=4,
        )  # fmt: skip
    return True


def _as_four(x: Tensor, last: int) -> Tensor | None:
    """[members, heads, S(, Dv)], a view whose last dim is contiguous."""
    missing = last + 1 - x.dim()
    if missing > 0:
        x = x[(None,) * missing]
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    try:
        return x.view(-1, *x.shape[-last:])
    except RuntimeError:
        return None
