"""``flash_attn.modules.mha.MHA``: multi-head attention as a module whose parameters have flash_attn's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashsci.compat.flash_attn.fa2 import flash_attn_with_kvcache
from flashsci.compat.flash_attn.inner import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flashsci.compat.flash_attn.rotary import RotaryEmbedding
from flashsci.compat.flash_attn.scalars import EVERYWHERE, Window, window_of


@dataclass
class InferenceParams:
    """The state that a generating model passes to its layers: the caches, and the number of rows in use."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Tensor] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


class LinearResidual(nn.Linear):
    """A linear layer that also returns its input."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(input), input


def _update_kv_cache(kv: Tensor, inference_params: Any, layer_idx: Any) -> Tensor:
    """Write ``kv`` ``[B, S, 2, Hk, D]`` after the first ``seqlen_offset`` rows of the layer's cache; return all rows
    in use.

    The cache is made if there is none.
    """
    caches = inference_params.key_value_memory_dict
    if layer_idx not in caches:
        size = inference_params.max_batch_size, inference_params.max_seqlen
        caches[layer_idx] = kv.new_empty(*size, *kv.shape[2:])
    cache: Tensor = caches[layer_idx]
    first, row = inference_params.batch_size_offset, inference_params.seqlen_offset
    last, end = first + kv.shape[0], row + kv.shape[1]
    if last > cache.shape[0] or end > cache.shape[1]:
        raise ValueError(
            f"the cache of layer {layer_idx} holds {cache.shape[0]} sequences of {cache.shape[1]} rows, {last} of {end} are "
            "needed; make max_batch_size and max_seqlen larger"
        )
    cache[first:last, row:end] = kv
    return cache[first:last, :end]


class MHA(nn.Module):
    """Multi-head self-attention, or with ``cross_attn`` cross-attention, with projections, as in flash_attn.

    Args:
        dropout: probability of dropping attention's probabilities.
        dropout: of attention's probabilities.
        dwconv: a causal depthwise convolution of three rows after the projection.
        dwconv: a causal depthwise convolution of three rows behind the projection.
        rotary_emb_dim: head dims that are rotated, 0 for none; not with cross_attn.
        fused_bias_fc: the way flash_attn adds the bias; the numbers are those of ``torch.nn.Linear``, which is used
            here.
        fused_bias_fc: how flash_attn adds the bias; the numbers are those of ``torch.nn.Linear``, which is used here.
        return_residual: forward returns ``(out, x)``.
        checkpointing: recompute attention in the backward.

    Raises:
        ValueError: arguments that do not fit together.

    Examples:
        >>> import torch
        >>> from flashsci.compat.flash_attn.mha import MHA
        >>> layer = MHA(32, 4, num_heads_kv=2, causal=True, rotary_emb_dim=8, use_flash_attn=True)
        >>> layer(torch.randn(2, 5, 32)).shape, sorted(layer.state_dict())
        (torch.Size([2, 5, 32]), ['Wqkv.bias', 'Wqkv.weight', 'out_proj.bias', 'out_proj.weight'])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: Any = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: Window = EVERYWHERE,
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.cross_attn, self.causal, self.layer_idx, self.dwconv = (
            cross_attn,
            causal,
            layer_idx,
            dwconv,
        )
        self.rotary_emb_dim, self.use_flash_attn = rotary_emb_dim, use_flash_attn
        self.return_residual, self.checkpointing = return_residual, checkpointing
        if embed_dim % num_heads or num_heads % self.num_heads_kv:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, and that of num_heads_kv, got {embed_dim}, {num_heads} and "
                f"{self.num_heads_kv}"
            )
        if rotary_emb_dim > 0 and cross_attn:
            raise ValueError("rotary_emb_dim goes with self-attention, got cross_attn=True, too")
        if not use_flash_attn and (use_alibi or window_of(window_size) is not None):
            raise ValueError("use_alibi and window_size need use_flash_attn=True")
        self.head_dim = embed_dim // num_heads
        kv_dim = 2 * self.head_dim * self.num_heads_kv
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                base=rotary_emb_base,
                scale_base=rotary_emb_scale_base,
                interleaved=rotary_emb_interleaved,
                device=device,
            )
        where: dict[str, Any] = dict(device=device, dtype=dtype)
        projection = LinearResidual if return_residual else nn.Linear
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **where)
            self.Wkv = projection(embed_dim, kv_dim, bias=qkv_proj_bias, **where)
        else:
            self.Wqkv = projection(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **where)
        if dwconv:
            if self._in_one:
                self.dwconv_qkv = _depthwise(embed_dim + kv_dim, where)
            else:
                self.dwconv_q, self.dwconv_kv = _depthwise(embed_dim, where), _depthwise(kv_dim, where)
        common: dict[str, Any] = dict(causal=causal, softmax_scale=softmax_scale, attention_dropout=dropout)
        if use_flash_attn:
            slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
            common.update(alibi_slopes=slopes, window_size=window_size)
            self.inner_attn: nn.Module = FlashSelfAttention(**common)
            self.inner_cross_attn: Any = FlashCrossAttention(**common)
        else:
            self.inner_attn, self.inner_cross_attn = SelfAttention(**common), CrossAttention(**common)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **where)

    @property
    def _in_one(self) -> bool:
        """Whether q, k and v are one tensor."""
        return not self.cross_attn and self.num_heads_kv == self.num_heads

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        size = batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim
        return self.out_proj.weight.new_empty(size, dtype=dtype, requires_grad=False)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Attention of x to itself, or to ``x_kv``.

        Args:
            x: ``[B, S, embed_dim]``; with cu_seqlens packed, ``[T, embed_dim]``.
            x_kv: with cross_attn: the source of keys and values; None: x.
            key_padding_mask: bool ``[B, S]``, True for keys that are seen; without use_flash_attn only.
            cu_seqlens: int32 ``[B + 1]``, with max_seqlen; with use_flash_attn, without rotary_emb_dim and dwconv only.
            mixer_subset: with cross_attn: index of the rows of x that are queries.
            inference_params: an :class:`InferenceParams`, to extend a cache and attend to it.
            kwargs: passed to the inner attention, such as ``causal``, or with cross_attn ``cu_seqlens_k``.

        Returns:
            as x, for the queries' rows; with return_residual ``(out, x)``.
        """
        self._check(x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
        if self.use_flash_attn:
            kwargs = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen) | kwargs
        else:
            kwargs = dict(key_padding_mask=key_padding_mask) | kwargs
        residual = x
        if self.cross_attn:
            kv = self.Wkv(x if x_kv is None else x_kv)
            if self.return_residual:
                kv, given = kv
                residual = given if x_kv is None else x
            q = self.Wq(residual if mixer_subset is None else residual[:, mixer_subset])
        else:
            qkv = self.Wqkv(x)
            if self.return_residual:
                qkv, residual = qkv
            if self._in_one:
                context = self._of_one(qkv, inference_params, kwargs)
                out = self.out_proj(context.flatten(-2))
                return (out, residual) if self.return_residual else out
            q, kv = qkv[..., : self.embed_dim], qkv[..., self.embed_dim :]
            if self.use_flash_attn and cu_seqlens is not None:
                kwargs = dict(cu_seqlens_k=cu_seqlens, max_seqlen_k=max_seqlen) | kwargs
        out = self.out_proj(self._of_two(q, kv, inference_params, kwargs).flatten(-2))
        return (out, residual) if self.return_residual else out

    def _of_one(self, qkv: Tensor, inference_params: Any, kwargs: dict[str, Any]) -> Tensor:
        if self.dwconv:
            qkv = _convolved(self.dwconv_qkv, qkv)
        qkv = qkv.unflatten(-1, (3, self.num_heads, self.head_dim))
        if inference_params is not None and self._in_a_kernel(inference_params):
            return self._extend(qkv[:, :, 0], qkv[:, :, 1:], inference_params, rotate=True)
        if self.rotary_emb_dim > 0:
            qkv = self.rotary_emb(qkv, **_place(inference_params))
        if inference_params is None:
            return self._run(self.inner_attn, qkv, **kwargs)
        return self._extend(qkv[:, :, 0], qkv[:, :, 1:], inference_params)

    def _of_two(self, q: Tensor, kv: Tensor, inference_params: Any, kwargs: dict[str, Any]) -> Tensor:
        if self.dwconv:
            q, kv = _convolved(self.dwconv_q, q), _convolved(self.dwconv_kv, kv)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        kv = kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))
        if inference_params is not None and self._in_a_kernel(inference_params):
            return self._extend(q, kv, inference_params, rotate=True)
        if self.rotary_emb_dim > 0:
            q, kv = self.rotary_emb(q, kv, **_place(inference_params))
        if inference_params is None:
            return self._run(self.inner_cross_attn, q, kv, **kwargs)
        return self._extend(q, kv, inference_params)

    def _run(self, inner: Callable[..., Tensor], *tensors: Tensor, **kwargs: Any) -> Tensor:
        if not self.checkpointing:
            return inner(*tensors, **kwargs)
        out: Tensor = checkpoint(inner, *tensors, use_reentrant=False, **kwargs)
        return out

    def _in_a_kernel(self, inference_params: Any) -> bool:
        """Whether flash_attn_with_kvcache rotates: not for a prompt, nor with xPos."""
        return bool(
            self.use_flash_attn
            and inference_params.seqlen_offset > 0
            and self.rotary_emb_dim > 0
            and self.rotary_emb.scale is None
        )

    def _extend(self, q: Tensor, kv: Tensor, inference_params: Any, rotate: bool = False) -> Tensor:
        """Attention to the layer's cache, with ``kv`` ``[B, S, 2, Hk, D]`` written into it."""
        if self.layer_idx is None:
            raise ValueError("inference_params need layer_idx, given to the constructor of MHA")
        if not self.use_flash_attn or inference_params.seqlen_offset == 0:
            whole = _update_kv_cache(kv, inference_params, self.layer_idx)
            return self.inner_cross_attn(q, whole)
        first = inference_params.batch_size_offset
        cache = inference_params.key_value_memory_dict[self.layer_idx][first : first + q.shape[0]]
        lengths = inference_params.lengths_per_sample
        turn: dict[str, Any] = {}
        if rotate:
            rotary = self.rotary_emb
            rotary._update_cos_sin_cache(inference_params.max_seqlen, device=q.device, dtype=q.dtype)
            turn = dict(
                rotary_cos=rotary._cos_cached, rotary_sin=rotary._sin_cached, rotary_interleaved=rotary.interleaved
            )
        inner = self.inner_cross_attn
        options = inner._options(None)
        out: Tensor = flash_attn_with_kvcache(
            q, cache[:, :, 0], cache[:, :, 1], kv[:, :, 0], kv[:, :, 1],
            cache_seqlens=inference_params.seqlen_offset if lengths is None else lengths[first : first + q.shape[0]],
            softmax_scale=options["softmax_scale"], causal=options["causal"], window_size=options["window_size"],
            alibi_slopes=options["alibi_slopes"], **turn,
        )  # fmt: skip
        return out

    def _check(
        self,
        x_kv: Tensor | None,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        mixer_subset: Any,
        inference_params: Any,
    ) -> None:
        if not self.cross_attn and not (x_kv is None and mixer_subset is None):
            raise ValueError("x_kv and mixer_subset go with cross_attn=True")
        if cu_seqlens is not None:
            if not self.use_flash_attn or self.dwconv or self.rotary_emb_dim > 0:
                raise ValueError(
                    "cu_seqlens needs use_flash_attn=True, and neither dwconv nor rotary_emb_dim: they know nothing of where "
                    "packed sequences begin"
                )
            if max_seqlen is None:
                raise ValueError("cu_seqlens and max_seqlen go together")
        if key_padding_mask is not None and (self.use_flash_attn or cu_seqlens is not None):
            raise ValueError(
                "key_padding_mask needs use_flash_attn=False and no cu_seqlens; with use_flash_attn pack the rows "
                "(bert_padding.unpad_input) and give cu_seqlens"
            )
        if inference_params is not None and (self.dwconv or key_padding_mask is not None or cu_seqlens is not None):
            raise ValueError("inference_params go without key_padding_mask and cu_seqlens, and not with dwconv")


def _depthwise(channels: int, where: dict[str, Any]) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, kernel_size=3, padding=2, groups=channels, **where)


def _convolved(convolution: nn.Module, x: Tensor) -> Tensor:
    """Rows ``[B, S, C]``, each computed from itself and the two rows before it."""
    y: Tensor = convolution(x.transpose(1, 2))[..., :-2]
    return y.transpose(1, 2).contiguous()


def _place(inference_params: Any) -> dict[str, Any]:
    """The keyword arguments by which RotaryEmbedding finds the position of the first row."""
    if inference_params is None:
        return {}
    lengths = inference_params.lengths_per_sample
    offset = inference_params.seqlen_offset if lengths is None else lengths
    return dict(seqlen_offset=offset, max_seqlen=inference_params.max_seqlen)
