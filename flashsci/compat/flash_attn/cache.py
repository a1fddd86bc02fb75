"""Attention of a few new queries to a dense cache of keys and values, each sequence of the batch with a length of its own.

The cache is not copied, nor are its lengths read on the host. Its rows, one batch entry after the other, are a packed call in
which every second sequence is a gap: rows that are not in use, and no query.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashsci.attention import attention
from flashsci.compat.flash_attn.rotary import apply_rotary
from flashsci.varlen import varlen_attention


@torch.no_grad()
def cached_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    rotary_interleaved: bool,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out ``[B, Sq, Hq, Dv]``, lse ``[B, Hq, Sq]``) of q ``[B, Sq, Hq, D]`` and the caches ``[Bc, Sc, Hk, D or Dv]``.

    New k and v ``[B, Snew, Hk, D or Dv]`` are written behind ``cache_seqlens`` first. Without gradients, as in flash_attn.
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be [B, S, H, D], got shape {list(x.shape)}")
    if (k is None) != (v is None):
        raise ValueError("new k and v must be given together")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "k_cache and v_cache must agree in all but the head dim, got "
            f"{list(k_cache.shape)} and {list(v_cache.shape)}"
        )
    batch, seq_q = q.shape[:2]
    entries, capacity = k_cache.shape[:2]
    if cache_batch_idx is None and entries != batch:
        raise ValueError(
            f"the cache has {entries} entries and q {batch}; name the entries in cache_batch_idx"
        )
    if k is not None and cache_seqlens is None:
        raise ValueError("new k and v need cache_seqlens, where to write them")
    length: int | Tensor = capacity if cache_seqlens is None else cache_seqlens
    if rotary_cos is not None or rotary_sin is not None:
        if k is None or rotary_cos is None or rotary_sin is None:
            raise ValueError("rotary_cos and rotary_sin go together, and with new k and v")
        rotate = partial(
            apply_rotary, cos=rotary_cos, sin=rotary_sin, seqlen_offsets=length, interleaved=rotary_interleaved
        )  # fmt: skip
        k = rotate(k)
        if causal or any(0 <= side < capacity for side in window_size):
            q = rotate(q)
        else:  # all queries of a call stand at the first new position
            q = rotate(q.flatten(1, 2).unsqueeze(1)).view(q.shape)
    if k is not None and v is not None:
        _write(k_cache, v_cache, k, v, length, cache_batch_idx)
        length = length + k.shape[1]
    if cache_batch_idx is not None:
        k_cache, v_cache = (x.index_select(0, cache_batch_idx) for x in (k_cache, v_cache))
    options: dict[str, Any] = dict(
        causal=causal, window=window_size, align="lower_right", scale=softmax_scale, softcap=softcap, return_lse=True
    )  # fmt: skip
    if isinstance(length, int) and cache_leftpad is None:
        if length > capacity:
            raise ValueError(f"the cache holds {capacity} rows, {length} are needed")
        q, k, v = (x.transpose(1, 2) for x in (q, k_cache[:, :length], v_cache[:, :length]))
        out, lse = attention(q, k, v, alibi_slopes=alibi_slopes, **options)
        return out.transpose(1, 2), lse
    out, lse = _with_gaps(q, k_cache, v_cache, cache_leftpad, length, alibi_slopes, options)
    return out.unflatten(0, (batch, seq_q)), lse.unflatten(1, (batch, seq_q)).transpose(0, 1)


def _with_gaps(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    begin: Tensor | None,
    end: int | Tensor,
    alibi_slopes: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """(out ``[B * Sq, Hq, Dv]``, lse ``[Hq, B * Sq]``) of the rows from ``begin`` to ``end`` of every entry, int or ``[B]``."""
    batch, seq_q = q.shape[:2]
    k_rows, v_rows, step = _as_rows(k_cache, v_cache)
    entry = step * torch.arange(batch, device=q.device)
    bounds = torch.stack((entry if begin is None else entry + begin, entry + end), 1).flatten()
    cu_seqlens_k = pad(pad(bounds.to(torch.int32), (1, 0)), (0, 1), value=k_rows.shape[0])
    rows = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * seq_q
    cu_seqlens_q = rows.repeat_interleave(2)  # gaps have no query
    q = q.flatten(0, 1)
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        alibi_slopes = torch.cat((alibi_slopes.repeat_interleave(2, 0), alibi_slopes[-1:]))
    longest = step + (
        0 if begin is None else k_cache.shape[1]
    )  # a gap may reach into the next entry
    out, lse = varlen_attention(
        q, k_rows, v_rows, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=seq_q, max_seqlen_k=longest,
        alibi_slopes=alibi_slopes, **options
    )  # fmt: skip
    return out, lse


def _write(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    first: int | Tensor,
    entries: Tensor | None,
) -> None:
    """New rows k and v ``[B, Snew, Hk, .]`` to the rows ``first``, ... of their cache entries."""
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"new k and v must have the same rows, got {list(k.shape)} and {list(v.shape)}"
        )
    new = k.shape[1]
    if isinstance(first, int):
        if first + new > k_cache.shape[1]:
            raise ValueError(f"the cache holds {k_cache.shape[1]} rows, {first + new} are needed")
        where: tuple[Any, ...] = (slice(None) if entries is None else entries, slice(first, first + new))  # fmt: skip
    else:
        rows = first[:, None] + torch.arange(new, device=k.device)
        if entries is None:
            entries = torch.arange(k.shape[0], device=k.device)
        where = entries[:, None], rows
    k_cache[where], v_cache[where] = k, v


def _as_rows(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, int]:
    """``[B, Sc, Hk, .]`` as ``[rows, Hk, .]``, and how many rows after its predecessor a batch entry begins.

    Views, where both caches have their entries a whole number of rows apart: contiguous ones, slices of longer ones,
    ``[B, Hk, Sc, D]`` transposed. Copies else.
    """
    batch, capacity = k_cache.shape[:2]
    steps = {_step(k_cache), _step(v_cache)}
    step = steps.pop()
    if steps or step is None:
        return k_cache.flatten(0, 1).contiguous(), v_cache.flatten(0, 1).contiguous(), capacity
    count = max(0, (batch - 1) * step + capacity)
    k_rows, v_rows = (
        x.as_strided((count, *x.shape[2:]), x.stride()[1:]) for x in (k_cache, v_cache)
    )
    return k_rows, v_rows, step


def _step(cache: Tensor) -> int | None:
    """Rows from one batch entry to the next; None where that is no whole number, or entries overlap."""
    batch, capacity = cache.shape[:2]
    entry, row = cache.stride()[:2]
    if batch <= 1:
        return capacity
    whole = row > 0 and entry % row == 0 and entry // row >= capacity
    return entry // row if whole else None
