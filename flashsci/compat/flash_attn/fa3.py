"""FlashAttention-3's module ``flash_attn_interface``, computed by flashsci.

Its functions return out, or (out, lse) with ``return_attn_probs``, which its earlier versions lack; in rows that see
no key lse is -inf, unlike flash_attn 2's. The arguments ``num_splits``, ``pack_gqa``, ``sm_margin`` and
``scheduler_metadata`` only say how to divide the work: flashsci divides by itself, and results do not depend on them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashsci.api.attention import attention
from flashsci.api.varlen import varlen_attention
from flashsci.call.ops import interleaved
from flashsci.compat.flash_attn import fa2
from flashsci.compat.flash_attn.cache import Cached, cached_attention
from flashsci.compat.flash_attn.gaps import attend_with_gaps
from flashsci.compat.flash_attn.refusals import refuse
from flashsci.compat.flash_attn.scalars import EVERYWHERE, Window, options_of
from flashsci.compat.kinds import flag


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
    """:func:`flashsci.compat.flash_attn.flash_attn_func` without dropout and ALiBi.

    Args:
        q_descale, k_descale, v_descale: float32 ``[B, Hk]`` for float8_e4m3fn tensors. The stored values times these
            are q, k and v.
        qv, attention_chunk: refused unless they have no effect.

    Returns:
        out ``[B, Sq, Hq, Dv]``, in bfloat16 for 8-bit tensors; with ``return_attn_probs`` ``(out, lse [B, Hq, Sq])``.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.attention`.
        NotImplementedError: for refused arguments.
    """
    refuse("flash_attn_interface.flash_attn_func", qv=qv, attention_chunk=attention_chunk)
    if not (q_descale is k_descale is v_descale is None):
        options = options_of(0.0, softmax_scale, causal, window_size, softcap, deterministic)
        scales = _scales(q, k, q_descale, k_descale, v_descale)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = attention(q, k, v, return_lse=True, **scales, **options)
        return (out.transpose(1, 2), lse) if return_attn_probs else out.transpose(1, 2)
    result = fa2.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs
    )
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
    """:func:`flash_attn_func` for one tensor: ``[B, S, 3, H, D]``, or ``[B, S, Hq + 2 Hk, D]`` with ``num_heads_q`` =
    Hq."""
    if qkv.dim() == 5 and num_heads_q == qkv.shape[3]:
        num_heads_q = None
    if num_heads_q is None and q_descale is k_descale is v_descale is None:
        refuse("flash_attn_interface.flash_attn_qkvpacked_func", attention_chunk=attention_chunk)
        result = fa2.flash_attn_qkvpacked_func(
            qkv,
            0.0,
            softmax_scale,
            causal,
            window_size,
            softcap,
            None,
            deterministic,
            return_attn_probs,
        )
        return _with_lse(*result) if return_attn_probs else result
    if num_heads_q is None:
        fa2.check_parts("qkv", qkv, 3, "B, S")
        q, k, v = qkv.unbind(2)
    else:
        if qkv.dim() != 4 or (qkv.shape[2] - num_heads_q) % 2:
            raise ValueError(f"qkv must be [B, S, {num_heads_q} + 2 Hk, D], got shape {list(qkv.shape)}")
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, heads_k, heads_k), 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


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
    """:func:`flashsci.compat.flash_attn.flash_attn_varlen_func` without dropout and ALiBi.

    Args:
        seqused_k: int32 ``[N]``: only this many keys of each sequence, from its first, are seen; the others get no
            gradient.
        seqused_q: int32 ``[N]``: only this many queries of each sequence, from its first, are computed; the others
            get out 0, lse -inf and no gradient.
        q_descale, k_descale, v_descale: as in :func:`flash_attn_func`; not together with seqused_q or seqused_k.
        qv, attention_chunk: refused unless they have no effect.

    Returns:
        out ``[Tq, Hq, Dv]``; with ``return_attn_probs`` ``(out, lse [Hq, Tq])``.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.varlen_attention`.
        NotImplementedError: for refused arguments.
    """
    name = "flash_attn_interface.flash_attn_varlen_func"
    refuse(name, qv=qv, attention_chunk=attention_chunk)
    gaps = not (seqused_q is seqused_k is None)
    scaled = not (q_descale is k_descale is v_descale is None)
    if not (gaps or scaled):
        result = fa2.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size,
            softcap, None, deterministic, return_attn_probs,
        )  # fmt: skip
        return _with_lse(*result) if return_attn_probs else result
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, deterministic)
    longest_q = fa2.host_length(max_seqlen_q)
    if gaps:
        refuse(f"{name} with seqused", q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        first, last = cu_seqlens_k[:-1], cu_seqlens_k[1:]
        out, lse = attend_with_gaps(
            q, k, v, cu_seqlens_q, first, last if seqused_k is None else first + seqused_k,
            used_q=seqused_q, max_seqlen_q=longest_q, return_lse=True, **options,
        )  # fmt: skip
    else:
        scales = _scales(q, k, q_descale, k_descale, v_descale)
        out, lse = varlen_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=longest_q,
            max_seqlen_k=fa2.host_length(max_seqlen_k), return_lse=True, **scales, **options,
        )  # fmt: skip
    return (out, lse) if return_attn_probs else out


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
    """:func:`flashsci.compat.flash_attn.flash_attn_with_kvcache` without ALiBi.

    Args:
        page_table: as ``block_table`` of that function.
        cu_seqlens_q: int32 ``[B + 1]``: q is packed, ``[Tq, Hq, D]``; max_seqlen_q bounds its lengths.
        cu_seqlens_k_new: int32 ``[B + 1]``: k and v are packed, ``[Tnew, Hk, .]``.
        k_descale, v_descale: float32 ``[B, Hk]`` for an 8-bit cache in pages, with 16-bit queries.
        rotary_seqlens: int32 ``[B]``: positions of the first new rows, if they are not ``cache_seqlens``.
        scheduler_metadata: the way FlashAttention-3 divides the work; results do not depend on it.
        qv, q_descale, attention_chunk: refused unless they have no effect.

    Returns:
        out ``[B, Sq, Hq, Dv]``; with ``return_softmax_lse`` ``(out, lse, None, None)``, where FlashAttention-3
        returns partial results as the last two.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.attention` and :func:`flashsci.paged_attention`.
        NotImplementedError: for refused arguments.
    """
    refuse("flash_attn_interface.flash_attn_with_kvcache", qv=qv, q_descale=q_descale, attention_chunk=attention_chunk)
    given = Cached(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
        flag("rotary_interleaved", rotary_interleaved), None, cu_seqlens_q, cu_seqlens_k_new,
        fa2.host_length(max_seqlen_q), rotary_seqlens, k_descale, v_descale,
    )  # fmt: skip
    out, lse = cached_attention(given, options_of(0.0, softmax_scale, causal, window_size, softcap))
    return (out, lse, None, None) if return_softmax_lse else out


def _scales(q: Tensor, k: Tensor, of_q: Tensor | None, of_k: Tensor | None, of_v: Tensor | None) -> dict[str, Any]:
    """The scales for each head of q, as in flashsci; FlashAttention-3 has one for each group of heads."""
    if of_q is not None and of_q.dim() == 2:
        of_q = interleaved(of_q, q.shape[-2] // k.shape[-2], -1)
    return {"q_scale": of_q, "k_scale": of_k, "v_scale": of_v}


def _with_lse(out: Tensor, lse: Tensor, _: None) -> tuple[Tensor, Tensor]:
    return out, fa2.unseen_minus_infinite(lse)
