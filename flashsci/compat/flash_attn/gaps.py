"""Packed attention with sequences that do not fill their rows: some keys or queries of a sequence are unused.

The rows are not moved. Every sequence becomes several: the one that is computed, one of unused queries without keys,
with out 0, and one of unused keys without queries. Neither lengths nor rows are read on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashsci.api.varlen import varlen_attention
from flashsci.call.ops import interleaved


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
    """:func:`flashsci.varlen_attention` with the keys ``first_k[n]`` to ``last_k[n]`` for sequence n, differentiable.

    Args:
        q: ``[Tq, Hq, D]``.
        k, v: ``[Tk, Hk, D]``, ``[Tk, Hk, Dv]``.
        cu_seqlens_q: int ``[N + 1]``.
        first_k, last_k: int ``[N]``: rows of k, the last one not included, in rising order over the sequences.
        used_q: int ``[N]``: only this many queries of each sequence, from its first, are computed; the others get out
            0, lse -inf and no gradient. None: all.
        max_seqlen_k: at least the longest sequence and the longest run of rows between two; None: searched on the
            device.
        alibi_slopes: ``[Hq]`` or ``[N, Hq]``.
        options: as in :func:`flashsci.varlen_attention`.

    Returns:
        out ``[Tq, Hq, Dv]``, or as in ``return_lse``.
    """
    if used_q is None:
        parts, cu_q = 2, interleaved(cu_seqlens_q, 2, -1)
        bounds = torch.stack((first_k, last_k), 1)
    else:
        begin, end = cu_seqlens_q[:-1], cu_seqlens_q[1:]
        parts, starts = 3, torch.stack((begin, begin + used_q, end), 1).flatten()
        cu_q = torch.cat((cu_seqlens_q[:1], starts, cu_seqlens_q[-1:]))
        bounds = torch.stack((first_k, last_k, last_k), 1)
    cu_k = pad(pad(bounds.flatten(), (1, 0)), (0, 1), value=k.shape[0])
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        alibi_slopes = torch.cat((alibi_slopes[:1], interleaved(alibi_slopes, parts, -2)))
    return varlen_attention(
        q, k, v, cu_q.to(torch.int32), cu_k.to(torch.int32), max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        alibi_slopes=alibi_slopes, **options,
    )  # fmt: skip
