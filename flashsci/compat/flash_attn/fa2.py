"""The functions of flash_attn 2.8, computed by flashsci: their signatures, layouts and meaning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.api.attention import attention
from flashsci.api.varlen import varlen_attention
from flashsci.compat.flash_attn.cache import Cached, cached_attention
from flashsci.compat.flash_attn.pages import attend_pages, check_pages
from flashsci.compat.flash_attn.scalars import (
    EVERYWHERE,
    Window,
    constants,
    options_of,
    window_of,
)
from flashsci.compat.kinds import flag


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of padded or equally long sequences, in flash_attn's layout.

    Args:
        q: ``[B, Sq, Hq, D]``; float16, bfloat16, and beyond flash_attn float32 and float64.
        k: ``[B, Sk, Hk, D]``; Hq is a multiple of Hk.
        v: ``[B, Sk, Hk, Dv]``.
        dropout_p: probability of dropping an entry of P; flashsci draws the entries, and they differ from
            flash_attn's.
        softmax_scale: factor of q k^T; None: ``1 / sqrt(D)``.
        causal: query i sees keys up to ``i + Sk - Sq``: aligned to the lower right corner.
        window_size: (left, right) keys around ``i + Sk - Sq``; -1 is unbounded.
        softcap: scores are ``softcap tanh(s / softcap)``; 0.0 for none.
        alibi_slopes: float32 ``[Hq]`` or ``[B, Hq]``: adds ``-slope |i + Sk - Sq - j|`` to the scores.
        deterministic: gradients that are bitwise equal run to run; False: as in
            ``torch.use_deterministic_algorithms``.
        return_attn_probs: return ``(out, lse, None)``.

    Returns:
        out ``[B, Sq, Hq, Dv]``; lse float32 ``[B, Hq, Sq]``, natural, +inf in rows that see no key, as in flash_attn.
        It is differentiable; flash_attn's is not. There is no matrix of dropped probabilities: None.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.attention`.
        NotImplementedError: causal ALiBi together with ``return_attn_probs``, for which flash_attn's lse is not that
            of the scores.

    Examples:
        >>> import torch
        >>> from flashsci.compat.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(3, 2, 10, 4, 16).unbind(0)
        >>> flash_attn_func(q, k, v, causal=True, window_size=(4, 0)).shape
        torch.Size([2, 10, 4, 16])

    Source: Dao, arXiv:2307.08691; the interface is that of flash_attn 2.8.3.
    """
    if not q.dim() == k.dim() == v.dim() == 4:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k and v must be [B, S, H, D], got shapes {shapes}")
    return _heads_first(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _heads_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> Any:
    """:func:`flash_attn_func` for views ``[B, H, S, D]``."""
    window = None if window_size is EVERYWHERE else window_of(window_size)
    if not (
        type(causal) is bool is type(deterministic)
        and type(softcap) is float is type(dropout_p)
        and (softmax_scale is None or type(softmax_scale) is float)
    ):
        causal, deterministic, softcap, dropout_p, softmax_scale = constants(
            causal, deterministic, softcap, dropout_p, softmax_scale
        )
    if return_attn_probs and alibi_slopes is not None:
        _no_shifted_lse("flash_attn_func", causal, window)
    result = attention(
        q,
        k,
        v,
        alibi_slopes=alibi_slopes,
        causal=causal,
        window=window,
        align="lower_right",
        scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        return_lse=bool(return_attn_probs),
        deterministic=deterministic or None,
    )
    if return_attn_probs:
        out, lse = result
        return out.transpose(1, 2), unseen_infinite(lse), None
    return result.transpose(1, 2)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` for k and v in one tensor ``[B, Sk, 2, Hk, D]``."""
    check_parts("kv", kv, 2, "B, S")
    k, v = kv.transpose(1, 3).unbind(2)
    return _heads_first(
        q.transpose(1, 2), k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` for q, k and v in one tensor ``[B, S, 3, H, D]``."""
    check_parts("qkv", qkv, 3, "B, S")
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return _heads_first(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of N packed sequences: q ``[Tq, Hq, D]``, k ``[Tk, Hk, D]``, v ``[Tk, Hk, Dv]``.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 ``[N + 1]``, the starts of the sequences, rising from 0 to Tq and Tk.
        max_seqlen_q, max_seqlen_k: at least the longest lengths. A tensor is not read, because that would wait for
            the device: the device then searches the longest.
        alibi_slopes: float32 ``[Hq]`` or ``[N, Hq]``.
        block_table: int32 ``[N, pages of a sequence]``: k and v are pages ``[pages, page, Hk, .]`` of any size, and
            cu_seqlens_k gives the number of rows that each sequence uses. With dropout, ALiBi or gradients the pages
            are copied first.
        others: as in :func:`flash_attn_func`.

    Returns:
        out ``[Tq, Hq, Dv]``; with ``return_attn_probs`` ``(out, lse [Hq, Tq], None)``.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.varlen_attention`.
        NotImplementedError: as :func:`flash_attn_func`.

    Examples:
        >>> import torch
        >>> from flashsci.compat.flash_attn import flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 13, 4, 16).unbind(0)
        >>> offsets = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True).shape
        torch.Size([13, 4, 16])
    """
    window = None if window_size is EVERYWHERE else window_of(window_size)
    if not (
        type(causal) is bool is type(deterministic)
        and type(softcap) is float is type(dropout_p)
        and (softmax_scale is None or type(softmax_scale) is float)
    ):
        causal, deterministic, softcap, dropout_p, softmax_scale = constants(
            causal, deterministic, softcap, dropout_p, softmax_scale
        )
    if return_attn_probs and alibi_slopes is not None:
        _no_shifted_lse("flash_attn_varlen_func", causal, window)
    longest_q, longest_k = host_length(max_seqlen_q), host_length(max_seqlen_k)
    if block_table is not None:
        check_pages(k, v, block_table, "block_table")
        used = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        options = options_of(dropout_p, softmax_scale, causal, window, softcap, deterministic)
        out, lse = attend_pages(q, k, v, block_table, used, cu_seqlens_q, longest_q, alibi_slopes, options)
        return (out, unseen_infinite(lse), None) if return_attn_probs else out
    result = varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        alibi_slopes=alibi_slopes,
        causal=causal,
        window=window,
        align="lower_right",
        scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        return_lse=bool(return_attn_probs),
        deterministic=deterministic or None,
    )
    return (result[0], unseen_infinite(result[1]), None) if return_attn_probs else result


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` for k and v in one tensor ``[Tk, 2, Hk, D]``."""
    check_parts("kv", kv, 2, "T")
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` for q, k and v in one tensor ``[T, 3, H, D]``."""
    check_parts("qkv", qkv, 3, "T")
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention to a cache, dense or in pages, which new keys and values extend in place; without gradients, as in
    flash_attn.

    Args:
        q: ``[B, Sq, Hq, D]``.
        k_cache, v_cache: ``[Bc, Sc, Hk, D]``, ``[Bc, Sc, Hk, Dv]``; not copied, unless their strides do not fit one
            buffer, or ``cache_batch_idx`` chooses. With block_table pages ``[pages, page, Hk, .]``, of any size.
        k, v: ``[B, Snew, Hk, D]``, ``[B, Snew, Hk, Dv]``: written to the rows of the cache from ``cache_seqlens`` on,
            then seen like the others.
        rotary_cos, rotary_sin: ``[P, R / 2]``: rotate k, at its position in the cache, and q: by position if causal or
            windowed, else all at ``cache_seqlens``.
        cache_seqlens: rows in use before this call, int or int32 ``[B]``; None: all.
        cache_batch_idx: int ``[B]``, the cache's entry for each entry of q; the chosen entries are copied. With
            block_table its row.
        cache_leftpad: int32 ``[B]``, the first row in use; None: 0.
        block_table: int32 ``[Bc, pages of a sequence]``: row r of an entry is in its page ``r // page``. With cache_leftpad or
            alibi_slopes the pages are copied first.
        rotary_interleaved: pairs are dims (2 i, 2 i + 1) instead of (i, i + R / 2).
        num_splits: the way flash_attn divides the work; flashsci divides by itself, and results do not depend on it.
        others: as in :func:`flash_attn_func`; positions are counted from the end of the rows in use.

    Returns:
        out ``[B, Sq, Hq, Dv]``; with ``return_softmax_lse`` ``(out, lse [B, Hq, Sq])``.

    Raises:
        TypeError, ValueError, BackendError: as :func:`flashsci.attention`; also ValueError for rows beyond the cache,
            if the host knows the lengths.
        NotImplementedError: as :func:`flash_attn_func`.

    Examples:
        >>> import torch
        >>> from flashsci.compat.flash_attn import flash_attn_with_kvcache
        >>> cache_k, cache_v = torch.zeros(2, 1, 32, 2, 16).unbind(0)
        >>> q, k, v = torch.randn(3, 1, 5, 2, 16).unbind(0)
        >>> out = flash_attn_with_kvcache(q, cache_k, cache_v, k, v, cache_seqlens=0, causal=True)
        >>> out.shape, torch.equal(cache_k[:, :5], k)
        (torch.Size([1, 5, 2, 16]), True)
    """
    options = options_of(0.0, softmax_scale, causal, window_size, softcap)
    if return_softmax_lse and alibi_slopes is not None:
        _no_shifted_lse("flash_attn_with_kvcache", options["causal"], options["window"])
    given = Cached(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        flag("rotary_interleaved", rotary_interleaved), alibi_slopes,
    )  # fmt: skip
    out, lse = cached_attention(given, options, "block_table")
    return (out, unseen_infinite(lse)) if return_softmax_lse else out


def unseen_infinite(lse: Tensor) -> Tensor:
    """lse with flash_attn 2's mark for rows that see no key, +inf; flashsci has the limit of the logarithm, -inf."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def unseen_minus_infinite(lse: Tensor) -> Tensor:
    """The inverse of :func:`unseen_infinite`."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def host_length(x: int | Tensor | None) -> int | None:
    """A bound on lengths in flashsci's form: a host int, or None for a search on the device."""
    return None if isinstance(x, Tensor) else x


def _no_shifted_lse(function: str, causal: bool, window: Window | None) -> None:
    """Refuse the lse with ALiBi if no query sees a later key.

    In that case flash_attn adds ``slope j`` instead of ``-slope |i + Sk - Sq - j|``. Its out is the same, but its lse
    differs, and depends on where a block of keys begins.
    """
    if causal or (window is not None and window[1] == 0):
        raise NotImplementedError(
            f"flashsci's stand-in for {function} returns no lse beside alibi_slopes and causal, where flash_attn's is not "
            "that of the scores; call flashsci.attention(alibi_slopes=..., return_lse=True)"
        )


def check_parts(name: str, x: Tensor, count: int, lead: str) -> None:
    dims = 4 if lead == "T" else 5
    if x.dim() != dims or x.shape[-3] != count:
        raise ValueError(f"{name} must be [{lead}, {count}, H, D], got shape {list(x.shape)}")
