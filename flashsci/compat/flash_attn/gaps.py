"""Packed attention where sequences do not fill their rows: some keys of a sequence are unused, or some of its queries.

The rows stay where they are. Every sequence becomes a few: the one that is computed, one of unused queries without keys, whose
out is 0, and one of unused keys without queries. Neither lengths nor rows are read on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.varlen import varlen_attention


def attend_with_gaps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    first_k: Tensor,
    last_k: Tensor,
    *,
    used_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    alibi_slopes: Tensor | None = None,
    **options: Any,
) -> Any:
    """:func:`flashsci.varlen_attention` of the keys ``first_k[n]`` to ``last_k[n]`` for sequence n, differentiable.

    Args:
        q: ``[Tq, Hq, D]``.
        k, v: ``[Tk, Hk, D]``, ``[Tk, Hk, Dv]``.
        cu_seqlens_q: int ``[N + 1]``.
        first_k, last_k: int ``[N]``: rows of k, the last one not included, in rising order over the sequences.
        used_q: int ``[N]``: only so many queries of every sequence, from its first, are computed; the others get out 0, lse
            -inf and no gradient. None: all.
        max_seqlen_k: at least the longest sequence and the longest run of rows between two; None: searched on the device.
        alibi_slopes: ``[Hq]`` or ``[N, Hq]``.
        options: as in :func:`flashsci.varlen_attention`.

    Returns:
        out ``[Tq, Hq, Dv]``, or as ``return_lse`` says.
    """
    begin, end = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    if used_q is None:
        edges_q: tuple[Tensor, ...] = begin, end
        edges_k: tuple[Tensor, ...] = first_k, last_k
    else:
        edges_q, edges_k = (begin, begin + used_q, end), (first_k, last_k, last_k)
    cu_q = torch.cat((cu_seqlens_q[:1], _interleaved(edges_q), cu_seqlens_q[-1:]))
    # Made on the device: a copy from the host would wait.
    bounds = torch.arange(2, device=first_k.device, dtype=first_k.dtype) * k.shape[0]
    cu_k = torch.cat((bounds[:1], _interleaved(edges_k), bounds[1:]))
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        alibi_slopes = torch.cat((alibi_slopes[:1], alibi_slopes.repeat_interleave(len(edges_q), 0)))  # fmt: skip
    return varlen_attention(
        q, k, v, cu_q.to(torch.int32), cu_k.to(torch.int32), max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        alibi_slopes=alibi_slopes, **options,
    )  # fmt: skip


def _interleaved(edges: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(edges, 1).flatten()
