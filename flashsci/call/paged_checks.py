"""The checks of the raw ops of paged attention and of the cache update, for any caller."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from flashsci.call import memory
from flashsci.call.kinds import Role, named
from flashsci.call.op_checks import (
    MAX_LENGTH,
    declared,
    inner_contiguous,
    need,
    need_no_overlap,
    numbers,
    rows,
    same,
    shapes,
    unfolded,
    whole,
)
from flashsci.call.ops import statistics_dtype
from flashsci.call.paged_ops import PagedScalars, PagedTensors


class Limits(NamedTuple):
    """The limits of a backend's paged ops."""

    dtypes: tuple[torch.dtype, ...]  # of queries and new tokens
    head_dim: int = sys.maxsize  # for a call; an update has no limit
    length: int = sys.maxsize  # for the rows of a call and the keys of a sequence


KERNELS = Limits((torch.float16, torch.bfloat16, torch.float32), 256, MAX_LENGTH)


def attention(tensors: PagedTensors, out: Tensor, scalars: PagedScalars, limits: Limits) -> None:
    """Check all of a call except whether its tensors share memory: :func:`attention_apart` does that.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    q, k_cache, v_cache, table, sink = tensors.q, tensors.k_cache, tensors.v_cache, tensors.block_table, tensors.sink
    given = shapes(q=q, k_cache=k_cache, v_cache=v_cache)
    _dtype("q", q, limits)
    need(q.dim() == 3, f"q must be packed, [T, Hq, D], got {list(q.shape)}")
    _caches(q, k_cache, v_cache)
    heads_k = k_cache.shape[2]
    need(q.shape[-1] == k_cache.shape[-1], f"q and k_cache must have the same head dim: {given}")
    need(
        max(q.shape[-1], v_cache.shape[-1]) <= limits.head_dim,
        f"head dims must be 1 to {limits.head_dim}: {given}",
    )
    need(q.shape[1] % heads_k == 0, f"the heads of q must be a multiple of those of k_cache: {given}")
    need(
        table.dim() == 2 and table.shape[1] > 0,
        f"block_table must be [N, max_pages] with at least one page, got {list(table.shape)}",
    )
    sequences = table.shape[0]
    declared(PagedTensors, "block_table", table, table.shape, q)
    declared(PagedTensors, "seqused_k", tensors.seqused_k, (sequences,), q)
    declared(PagedTensors, "cu_seqlens_q", tensors.cu_seqlens_q, (sequences + 1,), q)
    keys = table.shape[1] * k_cache.shape[1]
    need(
        max(keys, q.shape[0] * q.shape[1], sequences) <= limits.length,
        f"sequences, rows of q times heads, and keys of a sequence are limited to {limits.length}, got {sequences}, "
        f"{q.shape[0] * q.shape[1]} and {keys}; use fewer columns of block_table, or several calls",
    )
    if sink is not None:
        declared(PagedTensors, "sink", sink, (q.shape[1],), q)
    for name, of_cache in (("k_scale", tensors.k_scale), ("v_scale", tensors.v_scale)):
        if of_cache is not None:
            declared(PagedTensors, name, of_cache, (sequences, heads_k), q)
    same("out", out, (*q.shape[:2], v_cache.shape[-1]), (q.dtype,), q)
    inner_contiguous("out", out)
    unfolded("out", out)
    most = torch.finfo(statistics_dtype(q.dtype)).max
    numbers(scalars.scale, scalars.softcap, scalars.window_left, scalars.window_right, most)


_INDICES = named(PagedTensors, Role.INDEX)


def as_kernels_read(tensors: PagedTensors) -> PagedTensors:
    """The tensors, with copies of q and of small tensors that are not stored as kernels read them."""
    indices = {name: getattr(tensors, name).contiguous() for name in _INDICES}
    return tensors._replace(q=rows(tensors.q), **indices, sink=whole(tensors.sink))


def attention_apart(tensors: PagedTensors, out: Tensor) -> None:
    """Check that ``out``, which is written, shares no memory with the tensors that are read."""
    need_no_overlap("out", out, **tensors._asdict())


def write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    limits: Limits,
) -> None:
    """Check all of an update except whether its tensors share memory: :func:`write_apart` does that."""
    given = shapes(key=key, value=value, k_cache=k_cache, v_cache=v_cache)
    _dtype("key", key, limits)
    _caches(key, k_cache, v_cache)
    heads_k = k_cache.shape[2]
    need(
        key.dim() == value.dim() == 3 and key.shape[0] == value.shape[0],
        f"key and value must be [T, Hk, D] and [T, Hk, Dv]: {given}",
    )
    tokens = key.shape[0]
    same("key", key, (tokens, heads_k, k_cache.shape[-1]), (key.dtype,), key)
    same("value", value, (tokens, heads_k, v_cache.shape[-1]), (key.dtype,), key)
    need(
        slot_mapping.dim() == 1 and slot_mapping.shape[0] <= tokens,
        f"slot_mapping must be [at most T = {tokens}], a slot for each row of key, got {list(slot_mapping.shape)}",
    )
    same("slot_mapping", slot_mapping, slot_mapping.shape, (torch.int64,), key)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            declared(PagedTensors, name, scale, (heads_k,), key)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        unfolded(name, cache)
    need(
        max(tokens, k_cache.shape[0], k_cache.shape[1]) <= limits.length,
        f"tokens, pages and rows of a page are limited to {limits.length}: {given}",
    )


def write_apart(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Check that the caches, which are written, share no memory with the tensors that are read.

    They may be one tensor, if they are given one value.
    """
    read = dict(key=key, value=value, slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale)
    need_no_overlap("k_cache", k_cache, **read)
    need_no_overlap("v_cache", v_cache, **read)
    if memory.share(k_cache, v_cache):
        need(
            _one(k_cache, v_cache) and _one(key, value) and _one(k_scale, v_scale),
            "k_cache and v_cache share memory and are given different tokens; views that interleave may share a buffer, not "
            "an element",
        )


def _one(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether these are the same numbers."""
    if a is None or b is None:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _dtype(name: str, x: Tensor, limits: Limits) -> None:
    allowed = ", ".join(str(d) for d in limits.dtypes)
    need(x.dtype in limits.dtypes, f"{name} must be one of {allowed}, got {x.dtype}", TypeError)


def _caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    given = shapes(k_cache=k_cache, v_cache=v_cache)
    need(
        k_cache.dim() == v_cache.dim() == 4 and k_cache.shape[:3] == v_cache.shape[:3],
        f"k_cache and v_cache must be [pages, page, Hk, D] and [pages, page, Hk, Dv] and agree in all but the last: {given}",
    )
    need(
        0 not in k_cache.shape and v_cache.shape[-1] > 0,
        f"caches must have at least one page, row, head and column: {given}",
    )
    declared(PagedTensors, "k_cache", k_cache, k_cache.shape, q)
    same("v_cache", v_cache, v_cache.shape, (k_cache.dtype,), q)
    inner_contiguous("k_cache", k_cache)
    inner_contiguous("v_cache", v_cache)
