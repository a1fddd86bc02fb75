"""FlashAttention-3's module ``flash_attn_interface`` over flashsci.

Its functions return out, or with ``return_attn_probs``, which the earlier of its versions lack, (out, lse); in rows that see
no key lse is -inf, unlike flash_attn 2's. Of its arguments ``num_splits``, ``pack_gqa`` and ``sm_margin`` say how to divide the work and
not what to compute: flashsci divides by itself, and results do not depend on them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.compat.flash_attn import fa2
from flashsci.compat.flash_attn.cache import cached_attention
from flashsci.compat.flash_attn.fa2 import EVERYWHERE, Window
from flashsci.compat.flash_attn.refusals import refuse


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = EVERYWHERE,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """As :func:`flashsci.compat.flash_attn.flash_attn_func`, without dropout and ALiBi.

    Args:
        qv, q_descale, k_descale, v_descale, attention_chunk: refused unless they ask for nothing.

    Returns:
        out ``[B, Sq, Hq, Dv]``; with ``return_attn_probs`` ``(out, lse [B, Hq, Sq])``.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.attention`.
        NotImplementedError: for what is refused.
    """
    refuse(
        "flash_attn_interface.flash_attn_func", qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    result = fa2.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs
    )  # fmt: skip
    return _with_lse(*result) if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = EVERYWHERE,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of one tensor: ``[B, S, 3, H, D]``, or ``[B, S, Hq + 2 Hk, D]`` with ``num_heads_q`` = Hq."""
    refuse(
        "flash_attn_interface.flash_attn_qkvpacked_func", q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip
    options = (
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        None,
        deterministic,
        return_attn_probs,
    )
    if num_heads_q is None:
        result = fa2.flash_attn_qkvpacked_func(qkv, *options)
    else:
        if qkv.dim() != 4 or (qkv.shape[2] - num_heads_q) % 2:
            raise ValueError(
                f"qkv must be [B, S, {num_heads_q} + 2 Hk, D], got shape {list(qkv.shape)}"
            )
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, heads_k, heads_k), 2)
        result = fa2.flash_attn_func(q, k, v, *options)
    return _with_lse(*result) if return_attn_probs else result


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = EVERYWHERE,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """As :func:`flashsci.compat.flash_attn.flash_attn_varlen_func`, without dropout and ALiBi.

    Args:
        seqused_k: int32 ``[N]``: of every sequence only so many keys, from its first, are seen; the others get no gradient.
        seqused_q, qv, q_descale, k_descale, v_descale, attention_chunk: refused unless they ask for nothing.

    Returns:
        out ``[Tq, Hq, Dv]``; with ``return_attn_probs`` ``(out, lse [Hq, Tq])``.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.varlen_attention`.
        NotImplementedError: for what is refused.
    """
    refuse(
        "flash_attn_interface.flash_attn_varlen_func", seqused_q=seqused_q, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip
    longest_k: int | None = max_seqlen_k
    if seqused_k is not None:
        # Every second sequence holds the unused keys of its predecessor, and no query.
        used = torch.stack((cu_seqlens_k[:-1], cu_seqlens_k[:-1] + seqused_k), 1)
        cu_seqlens_k = torch.cat((used.flatten().to(torch.int32), cu_seqlens_k[-1:]))
        cu_seqlens_q = torch.cat((cu_seqlens_q[:1], cu_seqlens_q[1:].repeat_interleave(2)))
        longest_k = None
    result = fa2.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, longest_k, 0.0, softmax_scale, causal, window_size, softcap,
        None, deterministic, return_attn_probs,
    )  # fmt: skip
    return _with_lse(*result) if return_attn_probs else result


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """As :func:`flashsci.compat.flash_attn.flash_attn_with_kvcache`, without ALiBi.

    Returns:
        out ``[B, Sq, Hq, Dv]``; with ``return_softmax_lse`` ``(out, lse, None, None)``, the last two for the partial results
        that FlashAttention-3 returns there.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.attention`.
        NotImplementedError: for qv, page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, descales,
            attention_chunk and scheduler_metadata.
    """
    refuse(
        "flash_attn_interface.flash_attn_with_kvcache", qv=qv, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, rotary_seqlens=rotary_seqlens, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk, scheduler_metadata=scheduler_metadata,
    )  # fmt: skip
    out, lse = cached_attention(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, softmax_scale,
        causal, window_size, softcap, rotary_interleaved, None,
    )  # fmt: skip
    return (out, lse, None, None) if return_softmax_lse else out


def _with_lse(out: Tensor, lse: Tensor, _: None) -> tuple[Tensor, Tensor]:
    return out, fa2.unseen_minus_infinite(lse)
