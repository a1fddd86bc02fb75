"""The update of a paged KV cache: every new token's keys and values go to their slot, quantised on the way if the
cache is.

Grid      one program a token
Tiles     all heads of a token together, keys first, then values
Limits    memory
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .kernel import kernel
from .scores import at_most


class CacheStrides(NamedTuple):
    key: tuple[int, ...]  # (row, head)
    value: tuple[int, ...]
    k_cache: tuple[int, ...]  # (page, row, head)
    v_cache: tuple[int, ...]


class CacheSizes(NamedTuple):
    pages: int
    page: int
    heads: int
    head_dim: int
    head_dim_v: int
    k_scale_stride: int
    v_scale_stride: int


@kernel
def write_cache_kernel(
    key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, strides, sizes,
    MOST: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot < 0) | (slot >= sizes.pages.to(tl.int64) * sizes.page):
        return
    page, row = slot // sizes.page, slot % sizes.page
    copy_rows(
        key + token * strides.key[0], strides.key[1], k_cache + page * strides.k_cache[0] + row * strides.k_cache[1],
        strides.k_cache[2], k_scale, sizes.k_scale_stride, sizes.heads, sizes.head_dim, MOST, HEADS, WIDTH,
    )  # fmt: skip
    copy_rows(
        value + token * strides.value[0], strides.value[1], v_cache + page * strides.v_cache[0] + row * strides.v_cache[1],
        strides.v_cache[2], v_scale, sizes.v_scale_stride, sizes.heads, sizes.head_dim_v, MOST, HEADS, WIDTH_V,
    )  # fmt: skip


@triton.jit
def copy_rows(
    source, source_stride, target, target_stride, scale, scale_stride, heads, width,
    MOST: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """All heads of a token, divided by their scale. MOST: the largest number of an 8-bit float, 0 for others."""
    columns = tl.arange(0, WIDTH)[None, :]
    for first in tl.range(0, heads, HEADS):
        head = (first + tl.arange(0, HEADS)).to(tl.int64)
        inside = (head < heads)[:, None] & (columns < width)
        x = tl.load(source + head[:, None] * source_stride + columns, mask=inside, other=0.0)
        if scale is not None:
            divisor = tl.load(scale + head * scale_stride, mask=head < heads, other=1.0)
            x = tl.math.div_rn(x.to(tl.float32), tl.broadcast_to(divisor[:, None], (HEADS, WIDTH)))
        if MOST > 0:
            x = -at_most(-at_most(x.to(tl.float32), MOST), MOST)  # NaN stays NaN
        tl.store(
            target + head[:, None] * target_stride + columns,
            x.to(target.dtype.element_ty),
            mask=inside,
        )
