"""Continuous batching of Hugging Face transformers: ``attn_implementation="paged|fsci"``.

transformers stores a request's keys in blocks of a cache and says for each step, token by token, which slots to write
and which to read. If a step reads blocks from their beginnings (full attention), the slots of a sequence are its
pages, and :func:`flashsci.paged_attention` reads them without a copy. Layers with a window have a ring of slots
instead: the cache gathers their keys, and the call is a packed one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.api.paged import paged_attention, write_kv_cache
from flashsci.api.varlen import varlen_attention

PAGE = 16  # the divisor of pages


@torch.no_grad()
def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: Any = None,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of ``paged|fsci``, which ``flashsci.integrations.transformers.register`` registers.

    Args:
        module: the attention layer; its ``layer_idx`` tells the cache the place of its keys, and its window.
        query: ``[1, Hq, T, D]``, the new tokens of all requests one after the other.
        key: ``[1, Hk, T, D]``.
        value: ``[1, Hk, T, D]``.
        attention_mask: must be None, as in continuous batching.
        cache: transformers' ``PagedAttentionCache``.
        cu_seq_lens_q: offsets ``[N + 1]`` of the requests' new tokens.
        cu_seq_lens_k: offsets ``[N + 1]`` of the keys they see, or one for each kind of layer.
        max_seqlen_q: the longest, as a host int.
        max_seqlen_k: the same for keys, or one for each kind of layer.
        read_index: for each group of layers the slots to read, ``[keys]``; empty if no request has keys in the cache.
        write_index: for each group the slots of the new tokens, ``[T]``.
        scaling, softcap, s_aux: as in ``attention_forward`` of :mod:`flashsci.integrations.transformers`.
        others: arguments that models pass on. A block table raises: transformers makes one for flash-attn only.

    Returns:
        ``([1, T, Hq, D], None)``.

    Raises:
        ValueError: no cache, a mask, or a block table.
        TypeError, BackendError: as :func:`flashsci.paged_attention`.

    Source: transformers 5.17, ``generation.continuous_batching``.
    """
    if cache is None or cu_seq_lens_q is None or read_index is None or write_index is None:
        raise ValueError(
            "attn_implementation='paged|fsci' is for continuous batching (generate_batch), which passes a cache; load the "
            "model with 'fsci' for anything else"
        )
    made_for_others = dict(attention_mask=attention_mask, block_table=others.get("block_table"))
    for name, given in made_for_others.items():
        if given is not None:
            raise ValueError(
                f"flashsci in transformers' continuous batching: {name} is not supported; use "
                "attn_implementation='paged|sdpa'"
            )
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    window = cache.sliding_windows[module.layer_idx]
    windowed = window != 1  # transformers' mark of layers that see everything
    kind = "sliding_attention" if windowed else "full_attention"
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    options: dict[str, Any] = dict(
        causal=True, window=(window - 1, 0) if windowed else None, scale=scaling, softcap=softcap
    )
    q = query[0].transpose(0, 1)
    cu_q, cu_k = cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32)
    slots = read_index[group]
    if windowed or slots.numel() == 0 or cache.block_size % PAGE:
        k, v = cache.update(key, value, module.layer_idx, read_index, write_index)
        packed = varlen_attention(
            q, k, v, cu_q, cu_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, align="lower_right",
            return_lse=s_aux is not None, **options,
        )  # fmt: skip
        return _with_sinks(packed, s_aux).unsqueeze(0), None
    k_cache, v_cache = (x[layer].unflatten(0, (-1, cache.block_size)) for x in (cache.key_cache, cache.value_cache))
    k, v = (x[0].transpose(0, 1) for x in (key, value))
    write_kv_cache(k, v, k_cache, v_cache, write_index[group].to(torch.int64))
    out = paged_attention(
        q, k_cache, v_cache, block_table=_pages(slots, cu_k, max_seqlen_k, cache.block_size), seqused_k=cu_k.diff(),
        cu_seqlens_q=cu_q, max_seqlen_q=max_seqlen_q, sink=s_aux, **options,
    )  # fmt: skip
    return out.unsqueeze(0), None


def _pages(slots: Tensor, cu_k: Tensor, longest: int, page: int) -> Tensor:
    """The block table of sequences whose slots are whole pages, except the last: the page of every page-th slot."""
    firsts = torch.arange(0, max(longest, 1), page, device=slots.device)
    at = cu_k[:-1, None] + firsts  # beyond a sequence's end any slot will do
    return (slots[at.clamp_(max=slots.shape[0] - 1)] // page).to(torch.int32)


def _with_sinks(packed: Any, s_aux: Tensor | None) -> Tensor:
    """out [T, Hq, D]; a sink is one more key without a value, and takes its share of the probability from all others."""
    if s_aux is None:
        out: Tensor = packed
        return out
    out, lse = packed
    left = torch.sigmoid(lse - s_aux.to(lse.dtype)[:, None]).transpose(0, 1).unsqueeze(-1)
    return (out * left).to(out.dtype)
