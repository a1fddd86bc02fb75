"""Attention to a paged cache, as flash_attn's ``block_table`` and ``page_table`` describe one, and the update of its pages.

Pages are not copied (:func:`flashsci.paged_attention`), except in calls with ALiBi, padding on the left, dropout or
gradients: these gather the pages into a dense copy first. Any page size is served.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.api.paged import paged_attention, write_kv_cache
from flashsci.compat.flash_attn.gaps import attend_with_gaps


def check_pages(k_cache: Tensor, v_cache: Tensor, table: Tensor, name: str) -> None:
    """Check shapes and dtype of pages and of their table, ``name``.

    Raises:
        TypeError, ValueError: they do not fit.
    """
    if k_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"with a {name} k and v must be [pages, page, Hk, D] and [pages, page, Hk, Dv], got shapes {list(k_cache.shape)} "
            f"and {list(v_cache.shape)}"
        )
    if not isinstance(table, Tensor) or table.dtype not in (torch.int32, torch.int64):
        kind = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise TypeError(f"{name} must be an int32 tensor, got {kind}")
    if table.dim() != 2 or table.shape[1] == 0:
        raise ValueError(f"{name} must be [B, pages of a sequence], got shape {list(table.shape)}")


def gathered(cache: Tensor, table: Tensor) -> Tensor:
    """The pages of every sequence one after the other, ``[B, rows, Hk, D]``: a copy, differentiable in the cache."""
    return cache[table.clamp(0, cache.shape[0] - 1)].flatten(1, 2)


def attend_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    used: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int | None,
    alibi_slopes: Tensor | None,
    options: dict[str, Any],
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out ``[Tq, Hq, Dv]``, lse ``[Hq, Tq]``) of packed queries and the first ``used[n]`` rows in the pages ``table[n]``."""
    wants = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_cache, v_cache))
    if wants or options["dropout_p"] or alibi_slopes is not None:
        k_rows, v_rows = gathered(k_cache, table), gathered(v_cache, table)
        count, capacity = k_rows.shape[:2]
        first = torch.arange(count, device=q.device) * capacity
        result: tuple[Tensor, Tensor] = attend_with_gaps(
            q, k_rows.flatten(0, 1), v_rows.flatten(0, 1), cu_seqlens_q, first, first + used.clamp(max=capacity),
            max_seqlen_q=max_seqlen_q, max_seqlen_k=capacity, alibi_slopes=alibi_slopes, return_lse=True, **options,
        )  # fmt: skip
        return result
    found: tuple[Tensor, Tensor] = paged_attention(
        q, k_cache, v_cache, block_table=table.to(torch.int32), seqused_k=used.to(torch.int32),
        cu_seqlens_q=cu_seqlens_q.to(torch.int32), max_seqlen_q=max_seqlen_q, causal=options["causal"],
        window=options["window"], softcap=options["softcap"], scale=options["scale"], k_scale=k_scale, v_scale=v_scale,
        return_lse=True,
    )  # fmt: skip
    return found


def write_pages(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    sequence: Tensor,
    row: Tensor,
) -> None:
    """Write new keys and values ``[T, Hk, .]`` to the rows ``row [T]`` of the sequences ``sequence [T]``; rows that
    the table does not have are skipped."""
    page, columns = k_cache.shape[1], table.shape[1]
    column = row // page
    number = table[sequence, column.clamp(0, columns - 1)].long()
    slots = torch.where((column < columns) & (number >= 0), number * page + row % page, -1)
    write_kv_cache(k, v, k_cache, v_cache, slots)
