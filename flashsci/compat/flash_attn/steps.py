"""Forward and backward of flash_attn 2.8 as separate functions, from which clients build ring attention and similar
schemes.

The caller holds the values that autograd would save: out, lse and the state of the random numbers. Autograd records
nothing here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.api.attention import attention
from flashsci.api.backward import attention_backward
from flashsci.api.dropout import draw_seed
from flashsci.api.varlen import varlen_attention
from flashsci.compat.flash_attn.fa2 import host_length, unseen_infinite, unseen_minus_infinite
from flashsci.compat.flash_attn.gaps import attend_with_gaps
from flashsci.compat.flash_attn.pages import attend_pages, check_pages
from flashsci.compat.flash_attn.refusals import refuse
from flashsci.compat.flash_attn.scalars import options_of

ForwardResults = tuple[Tensor, Tensor, None, Tensor]


@torch.no_grad()
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> ForwardResults:
    """Attention of q ``[B, Sq, Hq, D]``, k and v ``[B, Sk, Hk, .]``.

    Returns:
        (out ``[B, Sq, Hq, Dv]``, lse ``[B, Hq, Sq]`` with +inf for rows that see no key, None, rng_state int64
        ``[2]``). There is no matrix of dropped probabilities, even with ``return_softmax``: None.
    """
    refuse("_flash_attn_forward", alibi_slopes=alibi_slopes)
    rng_state = _rng_state(q, dropout_p)
    out, lse = attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        dropout_seed=rng_state if dropout_p else None,
        return_lse=True,
        **_options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap),
    )
    return out.transpose(1, 2), unseen_infinite(lse), None, rng_state


@torch.no_grad()
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> ForwardResults:
    """:func:`_flash_attn_forward` of packed sequences: out ``[Tq, Hq, Dv]``, lse ``[Hq, Tq]``.

    Args:
        block_table: as in :func:`flashsci.compat.flash_attn.flash_attn_varlen_func`.
        leftpad_k, seqused_k: int32 ``[N]``: the keys of a sequence are those from leftpad_k to seqused_k of its rows.
    """
    refuse("_flash_attn_varlen_forward", alibi_slopes=alibi_slopes, zero_tensors=zero_tensors)
    rng_state = _rng_state(q, dropout_p)
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    longest_q = host_length(max_seqlen_q)
    if block_table is not None:
        refuse(
            "_flash_attn_varlen_forward with a block_table",
            leftpad_k=leftpad_k,
            dropout_p=dropout_p,
        )
        check_pages(k, v, block_table, "block_table")
        used = cu_seqlens_k[1:] - cu_seqlens_k[:-1] if seqused_k is None else seqused_k
        out, lse = attend_pages(q, k, v, block_table, used, cu_seqlens_q, longest_q, None, options)
        return out, unseen_infinite(lse), None, rng_state
    seed = rng_state if dropout_p else None
    if leftpad_k is not None or seqused_k is not None:
        first, last = cu_seqlens_k[:-1], cu_seqlens_k[1:]
        out, lse = attend_with_gaps(
            q, k, v, cu_seqlens_q, first if leftpad_k is None else first + leftpad_k,
            last if seqused_k is None else first + seqused_k, max_seqlen_q=longest_q, dropout_seed=seed,
            return_lse=True, **options,
        )  # fmt: skip
        return out, unseen_infinite(lse), None, rng_state
    out, lse = varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=longest_q, max_seqlen_k=host_length(max_seqlen_k),
        dropout_seed=seed, return_lse=True, **options,
    )  # fmt: skip
    return out, unseen_infinite(lse), None, rng_state


@torch.no_grad()
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    """Write the gradients of q, k and v, for the given out and lse, into dq, dk and dv.

    flash_attn returns ``rowsum(dout out)``, padded to tiles; this function returns nothing.
    """
    refuse("_flash_attn_backward", alibi_slopes=alibi_slopes)
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    found = attention_backward(
        dout,
        q,
        k,
        v,
        out,
        unseen_minus_infinite(softmax_lse),
        dropout_seed=rng_state if dropout_p else None,
        **_options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic),
    )
    for into, x in zip((dq, dk, dv), found[:3], strict=True):
        into.copy_(x.transpose(1, 2))


@torch.no_grad()
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """:func:`_flash_attn_backward` of packed sequences."""
    refuse("_flash_attn_varlen_backward", alibi_slopes=alibi_slopes, zero_tensors=zero_tensors)
    found = attention_backward(
        dout, q, k, v, out, unseen_minus_infinite(softmax_lse), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=host_length(max_seqlen_q), max_seqlen_k=host_length(max_seqlen_k),
        dropout_seed=rng_state if dropout_p else None,
        **_options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic),
    )  # fmt: skip
    for into, x in zip((dq, dk, dv), found[:3], strict=True):
        into.copy_(x)


# flash_attn also registers the four as operators.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool = False,
) -> dict[str, Any]:
    return options_of(dropout_p, softmax_scale, causal, (left, right), softcap, deterministic)


def _rng_state(q: Tensor, dropout_p: float) -> Tensor:
    """The seed of a dropout mask; without dropout, numbers that are not read."""
    if dropout_p:
        return draw_seed(q.device)
    return torch.empty(2, dtype=torch.int64, device=q.device)
