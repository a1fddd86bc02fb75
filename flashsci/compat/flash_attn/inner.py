"""Attention without projections, as modules of ``flash_attn.modules.mha``.

Modules that call flash_attn_func and similar functions are named Flash...; the others call
:func:`flashsci.attention`. A query that sees no key gets 0 there; flash_attn masks by -10000 and averages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashsci.api.attention import attention
from flashsci.compat.flash_attn.fa2 import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashsci.compat.flash_attn.scalars import EVERYWHERE, Window


def get_alibi_slopes(nheads: int) -> list[float]:
    """A slope for each head, ``2^(-8 i / n)``; between powers of two every second one of the next larger power is added.

    Press, Smith, Lewis: "Train short, test long", arXiv:2108.12409.
    """
    power = 1 << (nheads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes + get_alibi_slopes(2 * power)[0::2][: nheads - power] if nheads > power else slopes


class _Inner(nn.Module):
    """Attention without projections, with dropout in training only."""

    def __init__(self, causal: bool, softmax_scale: float | None, attention_dropout: float):
        super().__init__()
        self.causal, self.softmax_scale = causal, softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    @property
    def _dropout_p(self) -> float:
        return self.drop.p if self.training else 0.0

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, align: str) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = attention(
            q, k, v, mask=mask, causal=causal, align=align, scale=self.softmax_scale or None, dropout_p=self._dropout_p
        )
        return out.transpose(1, 2)


class _Padded(_Inner):
    """Attention of padded rows, of which a mask may hide some keys."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ):
        super().__init__(causal, softmax_scale, attention_dropout)

    def _seen(self, causal: bool | None, key_padding_mask: Tensor | None) -> tuple[bool, Tensor | None]:
        """Whether a call is causal, and its mask ``[B, 1, 1, Sk]``."""
        causal = self.causal if causal is None else bool(causal)
        return causal, None if key_padding_mask is None else key_padding_mask.bool()[:, None, None]


class _FlashInner(_Inner):
    alibi_slopes: Tensor | None

    def _set(self, window_size: Window, alibi_slopes: Tensor | None, deterministic: bool) -> None:
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size, self.deterministic = window_size, deterministic

    def _options(self, causal: bool | None) -> dict[str, Any]:
        slopes = self.alibi_slopes
        return dict(
            dropout_p=self._dropout_p,
            softmax_scale=self.softmax_scale,
            window_size=self.window_size,
            causal=self.causal if causal is None else causal,
            deterministic=self.deterministic,
            alibi_slopes=None if slopes is None else slopes.float(),  # a cast of the model has cast the buffer
        )


class FlashSelfAttention(_FlashInner):
    """Self-attention of one tensor of queries, keys and values, padded or packed."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: Window = EVERYWHERE,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ):
        super().__init__(causal, softmax_scale, attention_dropout)
        self._set(window_size, alibi_slopes, deterministic)

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """``[B, S, 3, H, D]`` to ``[B, S, H, D]``; with ``cu_seqlens`` ``[T, 3, H, D]`` to ``[T, H, D]``."""
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **options)
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)


class FlashCrossAttention(_FlashInner):
    """Attention of queries to one tensor of keys and values, padded or packed."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: Window = EVERYWHERE,
        deterministic: bool = False,
    ):
        super().__init__(causal, softmax_scale, attention_dropout)
        self._set(window_size, alibi_slopes, deterministic)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """``[B, Sq, H, D]`` and ``[B, Sk, 2, Hk, D]`` to ``[B, Sq, H, D]``; with ``cu_seqlens`` and ``cu_seqlens_k`` packed."""
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **options)
        if cu_seqlens_k is None:
            raise ValueError("cu_seqlens says where queries begin; give cu_seqlens_k for the keys")
        return flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **options)


class CrossAttention(_Padded):
    """Attention of padded queries to one tensor of keys and values; a mask may hide some of them."""

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """``[B, Sq, H, D]`` and ``[B, Sk, 2, Hk, D]`` to ``[B, Sq, H, D]``.

        Args:
            key_padding_mask: bool ``[B, Sk]``, True for keys that are seen. Then the diagonal of ``causal`` ends at
                the last visible key; the visible keys are the first rows.
        """
        causal, mask = self._seen(causal, key_padding_mask)
        if mask is not None and causal:
            seq_q, seq_k = q.shape[1], kv.shape[1]
            i = torch.arange(seq_q, device=q.device)[:, None]
            last = i + mask.sum(-1, keepdim=True) - seq_q
            mask, causal = mask & (torch.arange(seq_k, device=q.device) <= last), False
        k, v = kv.unbind(2)
        return self._attend(q, k, v, mask, causal, "lower_right")


class SelfAttention(_Padded):
    """Self-attention of one padded tensor of queries, keys and values; a mask may hide some keys."""

    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """``[B, S, 3, H, D]`` to ``[B, S, H, D]``; key_padding_mask bool ``[B, S]``, True for keys that are seen."""
        causal, mask = self._seen(causal, key_padding_mask)
        q, k, v = qkv.unbind(2)
        return self._attend(q, k, v, mask, causal, "upper_left")
