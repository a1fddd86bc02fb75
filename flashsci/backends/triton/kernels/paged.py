"""Paged attention: out = softmax(q k^T) v for packed queries, keys and values in the pages of a cache.

Maths     the forward's (forward.py), without its FOLD; a sink adds e^sink to the row sum, the scale of an 8-bit K multiplies the
          scale of the scores, that of V the result
Grid      one axis over (slot of query rows, split of the keys, key head), from shapes alone: the device finds slots as in
          coord.varlen_tile, splits share the keys that a tile can see, and those without any write lse -inf and leave
Tiles     rows are (query, head of the group) pairs, so that a decode fills a tile with the heads that share its keys; key
          tiles are gathered by the block table, a page for each key
Splits    partial results, normalised, in fp32, and their lse; `paged_combine_kernel` adds them up
Limits    decode: memory; prefill: as forward, and the addresses of gathered rows
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .chunks import add_product, aligned, scale_chunks, score_chunks, zero_chunks
from .coord import Span, sequence_edge, split_range
from .kernel import kernel
from .scores import LOG2E, addends, exponential, scores


class PagedStrides(NamedTuple):
    q: tuple[int, ...]  # (row, head)
    k: tuple[int, ...]  # (page, row, key head)
    v: tuple[int, ...]
    out: tuple[int, ...]  # (split, row, head); with one split, that of the split is 0


class PagedSizes(NamedTuple):
    sequences: int
    size_q: int  # rows of q
    pages: int  # of the cache
    page: int  # keys in one
    columns: int  # of the block table
    heads_k: int
    group: int  # query heads of a key head
    head_dim: int
    head_dim_v: int
    slots: int
    splits: int
    split_keys: int  # least keys of a split, a multiple of BLOCK_N
    lse_strides: tuple[int, ...]  # (split, row, head)
    k_scale_strides: tuple[int, ...]  # (sequence, key head)
    v_scale_strides: tuple[int, ...]


class PagedMod(NamedTuple):
    """The steps on a product q k^T: the fields of ScoreMod that apply here."""

    scale: Any
    softcap: Any
    left: Any
    right: Any


class PagedRows(NamedTuple):
    """Rows of a tile, each a query and one of the heads that share a key head."""

    token: Any  # row of q, out and lse
    head: Any
    query: Any  # within its sequence
    inside: Any


@kernel
def paged_kernel(
    q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, sink, k_scale, v_scale, out, lse,
    strides, sizes, mod,
    F: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    hk = pid % sizes.heads_k
    split = pid // sizes.heads_k % sizes.splits
    # The last tiles of a prompt see the most keys: they come first.
    slot = sizes.slots - 1 - pid // sizes.heads_k // sizes.splits
    n, row0, start_q, len_q = row_tile(slot, cu_seqlens_q, sizes, BLOCK_M)
    if row0 >= len_q * sizes.group:
        return
    known = (n >= 0) & (n < sizes.sequences)
    n = tl.minimum(tl.maximum(n, 0), sizes.sequences - 1).to(tl.int64)
    len_k = tl.full([], 0, tl.int32)
    if known:
        most = sizes.columns * sizes.page
        len_k = tl.minimum(tl.maximum(tl.load(seqused_k + n), 0), most)
    span = Span(start_q, len_q, 0, len_k, len_k - len_q)

    rows = tile_rows(row0, span, hk, sizes, BLOCK_M)
    scale = mod.scale
    if k_scale is not None:
        at = n * sizes.k_scale_strides[0] + hk * sizes.k_scale_strides[1]
        scale = scale * tl.load(k_scale + at)
    table = block_table + n * sizes.columns
    q_rows = load_rows(q, row_offsets(rows, strides.q[0], strides.q[1], Q.VECTOR), rows.inside, sizes.head_dim, Q)
    edges = visible_keys(row0, span, split, sizes, mod, F.WINDOW, BLOCK_M, BLOCK_N)
    row_max, row_sum, acc = attend(
        q_rows, k_cache, v_cache, table, rows, span, edges, hk, strides, sizes,
        PagedMod(scale, mod.softcap, mod.left, mod.right), F, K, V, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    if sink is not None and not SPLIT:
        logit = tl.load(sink + rows.head, mask=rows.inside & known, other=float("-inf"))
        row_max, row_sum, acc = add_sink(logit.to(tl.float32), row_max, row_sum, acc)
    # A row without keys has max -inf and sum 0: lse -inf, out 0.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    factor = 1.0 / row_sum
    if v_scale is not None:
        at = n * sizes.v_scale_strides[0] + hk * sizes.v_scale_strides[1]
        factor = factor * tl.load(v_scale + at)
    if lse is not None:
        at = row_offsets(rows, sizes.lse_strides[1], sizes.lse_strides[2], 1)
        at += split.to(tl.int64) * sizes.lse_strides[0]
        tl.store(lse + at, row_max + tl.log(row_sum), mask=rows.inside)
    if not SPLIT or edges[0] < edges[3]:  # nothing reads the part of a split without keys
        out_tile = out + aligned(split.to(tl.int64) * strides.out[0], R.VECTOR)
        at = row_offsets(rows, strides.out[1], strides.out[2], R.VECTOR)
        store_rows(out_tile, at, rows.inside, sizes.head_dim_v, scale_chunks(acc, factor[:, None]), R)


@triton.jit
def attend(
    q_rows, k_cache, v_cache, table, rows, span, edges, hk, strides, sizes, mod,
    F: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum and accumulator of one tile over the keys between the edges."""
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_chunks(BLOCK_M, V)
    for part in tl.static_range(0 if F.WINDOW == 2 else 1, 3):
        for start in tl.range(edges[part], edges[part + 1], BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            # Keys that no row sees may have any value, or no address.
            inside = (j >= edges[4]) & (j < edges[5])
            page = tl.load(table + j // sizes.page, mask=inside, other=0)
            page = tl.minimum(tl.maximum(page, 0), sizes.pages - 1).to(tl.int64)
            at = key_offsets(page, j % sizes.page, hk, strides.k, K.VECTOR)
            k_rows = widened(load_rows(k_cache, at, inside, sizes.head_dim, K), q_rows[0].dtype)
            s = score_chunks(q_rows, k_rows, None, PRECISION, False)  # [BLOCK_M, BLOCK_N]
            s, _slope = scores(
                s, rows.query, j, addends(None, None, None), span, mod, F, False, part != 1, 0 if part == 1 else F.WINDOW, False,
            )  # fmt: skip

            new_max = tl.maximum(row_max, tl.max(s, 1))
            # A row that has seen no key yet has max -inf: subtract 0 instead, e^(-inf - 0) = 0.
            reference = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = exponential(s, reference[:, None], mod.scale, False)
            decay = tl.exp2((row_max - reference) * LOG2E)
            row_sum = row_sum * decay + tl.sum(p, 1)
            row_max = new_max
            at = key_offsets(page, j % sizes.page, hk, strides.v, V.VECTOR)
            v_rows = widened(load_rows(v_cache, at, inside, sizes.head_dim_v, V), q_rows[0].dtype)
            acc = add_product(p, v_rows, scale_chunks(acc, decay[:, None]), PRECISION)
    return row_max, row_sum, acc


@kernel
def paged_combine_kernel(
    part_out, part_lse, cu_seqlens_q, sink, out, lse, strides, sizes,
    R: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out and lse of all splits combined, ROWS (row, head) pairs a program.

    part_out fp32 [splits, T, Hq, Dv] and part_lse fp32 [splits, T, Hq] are contiguous; SPLITS is a power of two.
    """
    heads = sizes.heads_k * sizes.group
    total = sizes.size_q.to(tl.int64) * heads
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < total
    token, head = row // heads, row % heads
    split = tl.arange(0, SPLITS)
    at = split[:, None] * total + row[None, :]
    sums = tl.load(part_lse + at, mask=(split < sizes.splits)[:, None] & inside[None, :], other=float("-inf"))
    top = tl.max(sums, 0)
    if sink is not None:
        first = sequence_edge(cu_seqlens_q, 0, sizes.size_q)
        last = sequence_edge(cu_seqlens_q, sizes.sequences, sizes.size_q)
        known = inside & (token >= first) & (token < last)
        logit = tl.load(sink + head, mask=known, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, logit)
    reference = tl.where(top == float("-inf"), 0.0, top)
    whole = tl.sum(tl.exp2((sums - reference[None, :]) * LOG2E), 0)
    if sink is not None:
        whole += tl.exp2((logit - reference) * LOG2E)
    whole = tl.where(whole == 0.0, 1.0, whole)
    if lse is not None:
        tl.store(
            lse + head * sizes.lse_strides[2] + token * sizes.lse_strides[1],
            top + tl.log(whole),
            mask=inside,
        )
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    columns = tl.arange(0, WIDTH)[None, :]
    for s in tl.range(0, sizes.splits):
        weight = tl.load(part_lse + s * total + row, mask=inside, other=float("-inf"))
        # The part of a split without keys was never written.
        read = (weight > float("-inf"))[:, None] & (columns < sizes.head_dim_v)
        part = tl.load(part_out + (s * total + row)[:, None] * sizes.head_dim_v + columns, mask=read, other=0.0)
        acc += part * (tl.exp2((weight - reference) * LOG2E) / whole)[:, None]
    at = aligned(token * strides.out[1] + head * strides.out[2], R.VECTOR)[:, None] + columns
    stored = inside[:, None] & (columns < aligned(sizes.head_dim_v, R.VECTOR))
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=stored)


@triton.jit
def add_sink(logit, row_max, row_sum, acc):
    """The row statistics with one more logit in the sum of each row."""
    new_max = tl.maximum(row_max, logit)
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2((row_max - reference) * LOG2E)
    row_sum = row_sum * decay + tl.exp2((logit - reference) * LOG2E)
    return new_max, row_sum, scale_chunks(acc, decay[:, None])


@triton.jit
def row_tile(slot, cu_seqlens, sizes, BLOCK_M: tl.constexpr):
    """Sequence, first (query, head) row in it, its first token and its queries, for one slot.

    There are `size_q * group // BLOCK_M + sequences + 2` slots: as coord.varlen_tile, with every edge multiplied by
    `group`.
    """
    low = 0
    high = sizes.sequences + 1
    while low < high:
        middle = (low + high + 1) // 2
        edge = sequence_edge(cu_seqlens, middle - 1, sizes.size_q) * sizes.group
        if edge // BLOCK_M + middle <= slot:
            low = middle
        else:
            high = middle - 1
    start = tl.full([], 0, tl.int32)
    if low > 0:
        start = sequence_edge(cu_seqlens, low - 1, sizes.size_q)
    end = sizes.size_q
    if low <= sizes.sequences:
        end = sequence_edge(cu_seqlens, low, sizes.size_q)
    tile = slot - (start * sizes.group // BLOCK_M + low)
    return low - 1, tile * BLOCK_M, start, tl.maximum(end - start, 0)


@triton.jit
def tile_rows(row0, span, hk, sizes, BLOCK_M: tl.constexpr):
    row = row0 + tl.arange(0, BLOCK_M)
    query = row // sizes.group
    inside = row < span.len_q * sizes.group
    return PagedRows(span.start_q + query, hk * sizes.group + row % sizes.group, query, inside)


@triton.jit
def row_offsets(rows, row_stride, head_stride, VECTOR: tl.constexpr):
    """The offsets of the rows in a tensor of these strides."""
    return aligned(rows.token.to(tl.int64) * row_stride + rows.head.to(tl.int64) * head_stride, VECTOR)


@triton.jit
def key_offsets(page, row, hk, strides, VECTOR: tl.constexpr):
    """The offsets of keys in a cache; pages are int64."""
    return aligned(page * strides[0] + row * strides[1] + hk.to(tl.int64) * strides[2], VECTOR)


@triton.jit
def visible_keys(row0, span, split, sizes, mod, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Edges of the parts of this split (see coord.key_range), and the first and the end of the keys that rows of the
    tile see."""
    first = row0 // sizes.group
    last = (tl.minimum(row0 + BLOCK_M, span.len_q * sizes.group) - 1) // sizes.group
    low = 0
    high = span.len_k
    full_low = 0
    full_high = span.len_k
    if WINDOW >= 1:
        high = tl.minimum(span.len_k, last + 1 + span.shift + mod.right)
        full_high = tl.minimum(span.len_k, first + 1 + span.shift + mod.right)
    if WINDOW == 2:
        low = first + span.shift - mod.left
        full_low = last + span.shift - mod.left
    a, b, c, d = split_range(low, high, full_low, full_high, BLOCK_N)
    tiles = tl.cdiv(tl.maximum(d - a, 0), BLOCK_N)
    keys = tl.maximum(tl.cdiv(tiles, sizes.splits) * BLOCK_N, sizes.split_keys)
    begin = a + split * keys
    end = tl.maximum(tl.minimum(begin + keys, d), begin)
    return (
        begin,
        tl.minimum(tl.maximum(b, begin), end),
        tl.minimum(tl.maximum(c, begin), end),
        end,
        low,
        high,
    )


@triton.jit
def load_rows(pointer, offsets, inside, width, C: tl.constexpr):
    """Rows of `width` elements at the offsets, zero where they are not inside, as chunks."""
    x0 = load_tile(pointer, offsets, inside, width, C.W0, C)
    if C.W1 > 0:
        return x0, load_tile(pointer + C.W0, offsets, inside, width - C.W0, C.W1, C)
    else:
        return (x0,)


@triton.jit
def load_tile(pointer, offsets, inside, columns_left, WIDTH: tl.constexpr, C: tl.constexpr):
    columns = tl.arange(0, WIDTH)[None, :]
    read = inside[:, None]
    if C.PADDED:
        read = read & (columns < aligned(columns_left, C.VECTOR))
    return tl.load(pointer + offsets[:, None] + columns, mask=read, other=0.0)


@triton.jit
def store_rows(pointer, offsets, inside, width, x, C: tl.constexpr):
    store_tile(pointer, offsets, inside, width, x[0], C.W0, C)
    if C.W1 > 0:
        store_tile(pointer + C.W0, offsets, inside, width - C.W0, x[1], C.W1, C)


@triton.jit
def store_tile(pointer, offsets, inside, columns_left, x, WIDTH: tl.constexpr, C: tl.constexpr):
    columns = tl.arange(0, WIDTH)[None, :]
    written = inside[:, None] & (columns < aligned(columns_left, C.VECTOR))
    tl.store(pointer + offsets[:, None] + columns, x.to(pointer.dtype.element_ty), mask=written)


@triton.jit
def widened(rows, dtype: tl.constexpr):
    """Rows of a cache in the dtype of the queries; from 8 bits that is exact."""
    if len(rows) == 2:
        return rows[0].to(dtype), rows[1].to(dtype)
    else:
        return (rows[0].to(dtype),)
