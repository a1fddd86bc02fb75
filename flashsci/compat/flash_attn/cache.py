"""Attention of a few new queries to a cache of keys and values, dense or in pages; each sequence has a length of its
own.

A dense cache is not copied, and its lengths are not read on the host. Its rows, one batch entry after the other, are
a packed call in which every second sequence is a gap: rows that are not in use, and no query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.api.attention import attention
from flashsci.compat.flash_attn.gaps import attend_with_gaps
from flashsci.compat.flash_attn.pages import attend_pages, check_pages, gathered, write_pages
from flashsci.compat.flash_attn.rotary import apply_rotary, sequences_of


class Cached(NamedTuple):
    """The tensors of a call with a cache, with the names of FlashAttention-3, which has the most."""

    q: Tensor  # [B, Sq, Hq, D]; with cu_seqlens_q [Tq, Hq, D]
    k_cache: Tensor  # [Bc, Sc, Hk, D]; with page_table [pages, page, Hk, D]
    v_cache: Tensor
    k: Tensor | None  # [B, Snew, Hk, D]; with cu_seqlens_k_new [Tnew, Hk, D]
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    page_table: Tensor | None
    rotary_interleaved: bool
    alibi_slopes: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    max_seqlen_q: int | None = None
    rotary_seqlens: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def capacity(self) -> int:
        rows = self.k_cache.shape[1]
        return rows if self.page_table is None else rows * self.page_table.shape[1]


@torch.no_grad()
def cached_attention(x: Cached, options: dict[str, Any], table_name: str = "page_table") -> tuple[Tensor, Tensor]:
    """(out ``[B, Sq, Hq, Dv]``, lse ``[B, Hq, Sq]``), or for packed queries ``[Tq, Hq, Dv]`` and ``[Hq, Tq]``.

    New k and v are first written after ``cache_seqlens`` rows. Without gradients, as in flash_attn.

    Args:
        options: those of scalars.options_of.
        table_name: the caller's name for ``page_table``.
    """
    _check(x, table_name)
    length = _length(x)
    if x.rotary_cos is not None or x.rotary_sin is not None:
        x = _rotated(x, length, options)
    if x.page_table is not None and x.cache_batch_idx is not None:
        chosen = x.page_table.index_select(0, x.cache_batch_idx)
        x = x._replace(page_table=chosen, cache_batch_idx=None)
    if x.k is not None and x.v is not None:
        length = _extend(x, x.k, x.v, length)
    if x.page_table is not None:
        if x.cache_leftpad is None and x.alibi_slopes is None:
            return _attend_pages(x, x.page_table, length, options)
        k_cache, v_cache = (gathered(c, x.page_table) for c in (x.k_cache, x.v_cache))
        x = x._replace(k_cache=k_cache, v_cache=v_cache, page_table=None)
    if x.cache_batch_idx is not None:
        k_cache, v_cache = (c.index_select(0, x.cache_batch_idx) for c in (x.k_cache, x.v_cache))
        x = x._replace(k_cache=k_cache, v_cache=v_cache)
    if isinstance(length, int) and x.cache_leftpad is None and x.cu_seqlens_q is None:
        if length > x.capacity:
            raise ValueError(f"the cache holds {x.capacity} rows, {length} are needed")
        q, k, v = (y.transpose(1, 2) for y in (x.q, x.k_cache[:, :length], x.v_cache[:, :length]))
        out, lse = attention(q, k, v, alibi_slopes=x.alibi_slopes, return_lse=True, **options)
        return out.transpose(1, 2), lse
    return _with_gaps(x, length, options)


def _check(x: Cached, table_name: str) -> None:
    packed = x.cu_seqlens_q is not None
    if x.q.dim() != (3 if packed else 4):
        layout = "[T, H, D] with cu_seqlens_q" if packed else "[B, S, H, D]"
        raise ValueError(f"q must be {layout}, got shape {list(x.q.shape)}")
    for name, cache in (("k_cache", x.k_cache), ("v_cache", x.v_cache)):
        if cache.dim() != 4:
            raise ValueError(f"{name} must be [B, S, H, D], got shape {list(cache.shape)}")
    if (x.k is None) != (x.v is None):
        raise ValueError("new k and v must be given together")
    if x.k_cache.shape[:3] != x.v_cache.shape[:3]:
        raise ValueError(
            "k_cache and v_cache must agree in all but the head dim, got "
            f"{list(x.k_cache.shape)} and {list(x.v_cache.shape)}"
        )
    entries, holder = x.k_cache.shape[0], "cache"
    if x.page_table is not None:
        check_pages(x.k_cache, x.v_cache, x.page_table, table_name)
        entries, holder = x.page_table.shape[0], table_name
    if x.cache_batch_idx is None and entries != x.batch:
        raise ValueError(f"the {holder} has {entries} entries and q {x.batch}; name the entries in cache_batch_idx")
    for name, y in (
        ("cache_seqlens", x.cache_seqlens),
        ("cache_batch_idx", x.cache_batch_idx),
        ("cache_leftpad", x.cache_leftpad),
        ("rotary_seqlens", x.rotary_seqlens),
    ):
        if isinstance(y, Tensor) and y.dim() > 0 and y.shape != (x.batch,):
            raise ValueError(f"{name} must be [B] = [{x.batch}], got shape {list(y.shape)}")
    if x.cu_seqlens_k_new is not None:
        if x.k is None:
            raise ValueError("cu_seqlens_k_new says where new k and v begin; give them, too")
        if x.cu_seqlens_k_new.shape != (x.batch + 1,):
            raise ValueError(
                f"cu_seqlens_k_new must be [B + 1] = [{x.batch + 1}], got shape {list(x.cu_seqlens_k_new.shape)}"
            )
    if x.k is not None and x.cache_seqlens is None:
        raise ValueError("new k and v need cache_seqlens, where to write them")
    if x.page_table is None and not (x.k_descale is None and x.v_descale is None):
        raise NotImplementedError(
            "k_descale and v_descale go with an 8-bit cache in pages (page_table); multiply a dense cache by them first"
        )


def _length(x: Cached) -> int | Tensor:
    """Rows in use before the call: an int, or ``[B]`` on the device."""
    if x.cache_seqlens is None:
        return x.capacity
    if isinstance(x.cache_seqlens, Tensor):
        return x.cache_seqlens if x.cache_seqlens.dim() else x.cache_seqlens.expand(x.batch)
    return int(x.cache_seqlens)


def _rotated(x: Cached, length: int | Tensor, options: dict[str, Any]) -> Cached:
    """The call with k rotated at its positions in the cache, and q at its own positions, or all of q at the first new
    one."""
    if x.k is None or x.rotary_cos is None or x.rotary_sin is None:
        raise ValueError("rotary_cos and rotary_sin go together, and with new k and v")
    first = length if x.rotary_seqlens is None else x.rotary_seqlens.expand(x.batch)

    def rotate(y: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        assert x.rotary_cos is not None and x.rotary_sin is not None
        return apply_rotary(y, x.rotary_cos, x.rotary_sin, offsets, cu_seqlens, interleaved=x.rotary_interleaved)

    k = rotate(x.k, first, x.cu_seqlens_k_new)
    window = options["window"] or ()
    if options["causal"] or any(0 <= side < x.capacity for side in window):
        q = rotate(x.q, first, x.cu_seqlens_q)
    elif x.cu_seqlens_q is None:
        q = rotate(x.q.flatten(1, 2).unsqueeze(1), first).view(x.q.shape)
    else:  # every row is a sequence of its own
        rows = sequences_of(x.q.shape[0], x.cu_seqlens_q)
        q = rotate(x.q.unsqueeze(1), first if isinstance(first, int) else first[rows]).squeeze(1)
    return x._replace(q=q, k=k)


def _extend(x: Cached, k: Tensor, v: Tensor, first: int | Tensor) -> int | Tensor:
    """Write the new rows after ``first``; return the new lengths of the cache."""
    lead = 2 if x.cu_seqlens_k_new is None else 1
    if k.shape[:lead] != v.shape[:lead] or k.dim() != lead + 2:
        layout = "[B, Snew, H, D]" if lead == 2 else "[Tnew, H, D]"
        raise ValueError(f"new k and v must have the same rows, {layout}, got {list(k.shape)} and {list(v.shape)}")
    if x.cu_seqlens_k_new is None:
        new: int | Tensor = k.shape[1]
        if isinstance(first, int):
            if first + k.shape[1] > x.capacity:
                raise ValueError(f"the cache holds {x.capacity} rows, {first + k.shape[1]} are needed")
            if x.page_table is None:
                entries = slice(None) if x.cache_batch_idx is None else x.cache_batch_idx
                rows = slice(first, first + k.shape[1])
                x.k_cache[entries, rows], x.v_cache[entries, rows] = k, v
                return first + k.shape[1]
        sequence = torch.arange(k.shape[0], device=k.device)[:, None]
        row = torch.arange(k.shape[1], device=k.device)
        row = row + (first if isinstance(first, int) else first[:, None])
    else:
        new = x.cu_seqlens_k_new[1:] - x.cu_seqlens_k_new[:-1]
        sequence = sequences_of(k.shape[0], x.cu_seqlens_k_new)
        row = torch.arange(k.shape[0], device=k.device) - x.cu_seqlens_k_new[sequence]
        row = row + (first if isinstance(first, int) else first[sequence])
    if x.page_table is not None:
        if lead == 2:
            sequence, row = sequence.expand(k.shape[:2]), row.expand(k.shape[:2])
            k, v, sequence, row = (y.flatten(0, 1) for y in (k, v, sequence, row))
        write_pages(k, v, x.k_cache, x.v_cache, x.page_table, sequence, row)
    else:
        entry = sequence
        if x.cache_batch_idx is not None:
            entry = x.cache_batch_idx[:, None] if lead == 2 else x.cache_batch_idx[sequence]
        x.k_cache[entry, row], x.v_cache[entry, row] = k, v
    return first + new


def _queries(x: Cached) -> tuple[Tensor, Tensor, int | None]:
    """Packed queries, the starts of their sequences, and a bound of their lengths."""
    if x.cu_seqlens_q is not None:
        return x.q, x.cu_seqlens_q, x.max_seqlen_q
    batch, seq_q = x.q.shape[:2]
    begin = _multiples(seq_q, batch + 1, x.q.device)
    return x.q.flatten(0, 1), begin, seq_q


def _multiples(step: int, count: int, device: torch.device) -> Tensor:
    """int32 0, step, 2 step, ..."""
    if step == 0:
        return torch.zeros(count, device=device, dtype=torch.int32)
    return torch.arange(0, count * step, step, device=device, dtype=torch.int32)


def _as_given(x: Cached, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    if x.cu_seqlens_q is not None:
        return out, lse
    shape = x.q.shape[:2]
    return out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)


def _attend_pages(x: Cached, table: Tensor, length: int | Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    q, begin, longest = _queries(x)
    if isinstance(length, int):
        if length > x.capacity:
            raise ValueError(f"the cache holds {x.capacity} rows, {length} are needed")
        length = torch.full((x.batch,), length, device=q.device, dtype=torch.int32)
    out, lse = attend_pages(
        q, x.k_cache, x.v_cache, table, length, begin, longest, None, options, x.k_descale, x.v_descale
    )
    return _as_given(x, out, lse)


def _with_gaps(x: Cached, length: int | Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    q, begin, longest_q = _queries(x)
    k_rows, v_rows, step = _as_rows(x.k_cache, x.v_cache)
    entry = _multiples(step, x.batch, q.device)
    pad = x.cache_leftpad
    longest = step + (0 if pad is None else x.capacity)  # a gap may reach into the next entry
    out, lse = attend_with_gaps(
        q, k_rows, v_rows, begin, entry if pad is None else entry + pad, entry + length,
        max_seqlen_q=longest_q, max_seqlen_k=longest, alibi_slopes=x.alibi_slopes, return_lse=True, **options,
    )  # fmt: skip
    return _as_given(x, out, lse)


def _as_rows(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, int]:
    """``[B, Sc, Hk, .]`` as ``[rows, Hk, .]``, and the number of rows from one batch entry's start to the next.

    Views, if the entries of both caches are a whole number of rows apart: contiguous caches, slices of longer ones,
    ``[B, Hk, Sc, D]`` transposed. Otherwise copies.
    """
    batch, capacity = k_cache.shape[:2]
    steps = {_step(k_cache), _step(v_cache)}
    step = steps.pop()
    if steps or step is None:
        return k_cache.flatten(0, 1).contiguous(), v_cache.flatten(0, 1).contiguous(), capacity
    count = max(0, (batch - 1) * step + capacity)
    k_rows, v_rows = (x.as_strided((count, *x.shape[2:]), x.stride()[1:]) for x in (k_cache, v_cache))
    return k_rows, v_rows, step


def _step(cache: Tensor) -> int | None:
    """Rows from one batch entry to the next; None if that is no whole number, or entries overlap."""
    batch, capacity = cache.shape[:2]
    entry, row = cache.stride()[:2]
    if batch <= 1:
        return capacity
    whole = row > 0 and entry % row == 0 and entry // row >= capacity
    return entry // row if whole else None
