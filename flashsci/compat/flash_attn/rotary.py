"""``flash_attn.layers.rotary`` in PyTorch operations: rotary position embeddings, computed in float32 and rounded once.

Su et al.: "RoFormer: enhanced transformer with rotary position embedding", arXiv:2104.09864. Sun et al.: "A
length-extrapolatable transformer", arXiv:2212.10554 (``scale_base``).
"""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor

from flashsci.call.torch_state import transforming


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate pairs of the first R head dims of every token by the angles of its position.

    Args:
        x: ``[B, S, H, D]``; packed, with ``cu_seqlens``: ``[T, H, D]``.
        cos, sin: ``[P, R / 2]`` for P positions, R <= D.
        seqlen_offsets: position of the first token of every sequence; int ``[B]`` tensor or one int.
        cu_seqlens: int32 ``[B + 1]``.
        max_seqlen: checked against P if given; it has no other effect.
        interleaved: pairs are dims (2 i, 2 i + 1) instead of (i, i + R / 2).
        inplace: write the result into x, and return x. If autograd does not allow a write to x (a leaf that requires
            a gradient, a view of one, a view from ``unbind`` or ``split``), the result is another tensor with x's
            memory, as in flash_attn: it has the gradient, and x itself must not be used any more. Compiled and under
            torch.func such an x raises.
        conjugate: rotate back.

    Returns:
        x, rotated, in its dtype. Gradients reach x, and cos and sin if they require one.

    Raises:
        ValueError: shapes that do not fit, or positions beyond the table if the host can tell.

    Examples:
        >>> import torch
        >>> from flashsci.compat.flash_attn.rotary import apply_rotary
        >>> angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1]))
        >>> x = torch.randn(2, 5, 3, 6)
        >>> there = apply_rotary(x, angles.cos(), angles.sin())
        >>> back = apply_rotary(there, angles.cos(), angles.sin(), conjugate=True)
        >>> torch.allclose(back, x, atol=1e-6)
        True
    """
    if not isinstance(seqlen_offsets, Tensor):
        seqlen_offsets = index(seqlen_offsets)
    packed = cu_seqlens is not None
    if x.dim() != (3 if packed else 4):
        layout = "[T, H, D] with cu_seqlens" if packed else "[B, S, H, D]"
        raise ValueError(f"x must be {layout}, got shape {list(x.shape)}")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos and sin must have shape [P, R / 2] with R at most the head dim {x.shape[-1]}, got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    longest = max_seqlen if packed else x.shape[1]
    if isinstance(seqlen_offsets, int) and longest is not None:
        longest += seqlen_offsets
    if longest is not None and longest > cos.shape[0]:
        raise ValueError(f"cos and sin hold {cos.shape[0]} positions, {longest} are needed")
    position = _positions(x, seqlen_offsets, cu_seqlens)
    cos, sin = cos[position].unsqueeze(-2), sin[position].unsqueeze(-2)  # [(B,) S, 1, R / 2]
    rotated = _rotate(x[..., : 2 * cos.shape[-1]], cos, -sin if conjugate else sin, interleaved)
    if inplace and _may_be_written(x):
        x[..., : rotated.shape[-1]].copy_(rotated)
        return x
    whole = torch.cat((rotated, x[..., rotated.shape[-1] :]), -1)
    return _in_memory_of(x, whole) if inplace else whole


def _may_be_written(x: Tensor) -> bool:
    """Whether autograd allows an operation on x in place."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return True
    if torch.compiler.is_compiling() or transforming():  # these follow no memory: there autograd's word stands
        return True
    if x.is_leaf or not x._is_view():
        return not x.is_leaf
    autograd: Any = torch._C._autograd
    recorded: bool = autograd._get_creation_meta(x) == autograd.CreationMeta.DEFAULT
    return recorded and not (x._base is not None and x._base.is_leaf)


def _in_memory_of(x: Tensor, result: Tensor) -> Tensor:
    """A tensor with x's memory, overwritten, and with the gradient of ``result``."""
    return x.detach().copy_(result)


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor | slice:
    """Index into the tables: a slice, or positions ``[B, S]`` or ``[T]``."""
    if cu_seqlens is None:
        if isinstance(offsets, int):
            return slice(offsets, offsets + x.shape[1])
        return offsets[:, None] + torch.arange(x.shape[1], device=x.device)
    sequence = sequences_of(x.shape[0], cu_seqlens)
    row = torch.arange(x.shape[0], device=x.device, dtype=cu_seqlens.dtype)
    first = offsets if isinstance(offsets, int) else offsets[sequence]
    return row - cu_seqlens[sequence] + first


def sequences_of(rows: int, cu_seqlens: Tensor) -> Tensor:
    """The sequence of every packed row, int64 ``[rows]``; rows after the last sequence count to it."""
    row = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    last = max(0, cu_seqlens.shape[0] - 2)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=last)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, -1)
    pair = a * cos - b * sin, a * sin + b * cos
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return rotated.to(x.dtype)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """:func:`apply_rotary` with its arguments in another order."""
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved=interleaved, inplace=inplace)


apply_rotary_emb_func = apply_rotary_emb


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """The pairs (a, b) of the last dim as (-b, a)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    return torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x ``[B, S, H, D]`` rotated by tables ``[S, R / 2]`` or ``[B, S, R / 2]``."""
    turned = 2 * cos.shape[-1]
    rotated = _rotate(x[..., :turned], cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)
    return torch.cat((rotated, x[..., turned:]), -1)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate the q and k of ``qkv`` in place: ``[B, S, 3, H, D]``, or ``[B, S, Hq + 2 Hk, D]`` with ``num_heads_q`` = Hq.

    ``cos_k`` and ``sin_k`` are the tables of k, if they differ from those of q.
    """
    if qkv.dim() == 5 and qkv.shape[2] == 3 and num_heads_q in (None, qkv.shape[3]):
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
    else:
        raise ValueError(
            "qkv must be [B, S, 3, H, D], or [B, S, Hq + 2 Hk, D] with num_heads_q, got shape "
            f"{list(qkv.shape)} and num_heads_q={num_heads_q}"
        )
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    options: Any = (interleaved, _may_be_written(qkv), seqlen_offsets)
    q = apply_rotary_emb(q, cos, sin, *options)
    k = apply_rotary_emb(k, cos_k, sin_k, *options)
    if options[1]:
        return qkv
    if qkv.dim() == 5:
        return _in_memory_of(qkv, torch.stack((q, k, qkv[:, :, 2]), 2))
    return _in_memory_of(qkv, torch.cat((q, k, qkv[:, :, q.shape[2] + k.shape[2] :]), 2))


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate the k of ``kv`` ``[B, S, 2, H, D]`` in place."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv must be [B, S, 2, H, D], got shape {list(kv.shape)}")
    written = _may_be_written(kv)
    k = apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, written, seqlen_offsets)
    return kv if written else _in_memory_of(kv, torch.stack((k, kv[:, :, 1]), 2))


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding of a packed projection, with tables that grow as needed and have the projection's dtype.

    Args:
        dim: head dims to rotate, R; even.
        base: position p turns pair i by ``p / base^(2 i / dim)``.
        scale_base: if not None, also scale by position, q up and k down (xPos).
        scale_base: not None: also scale by position, q up and k down (xPos).
        device: of the buffers.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.inv_freq: Tensor
        self.scale: Tensor | None
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None
        if scale_base is not None:
            even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
            scale = (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        # Names that subclasses and inference code read.
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (even / self.dim)

    def _update_cos_sin_cache(
        self,
        seqlen: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Tables of at least ``seqlen`` positions; xPos centres its scale on the middle of them."""
        cached = self._cos_cached
        if (
            cached is not None
            and seqlen <= self._seq_len_cached
            and (cached.device, cached.dtype) == (device, dtype)
            and not (self.training and cached.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        # A model cast to 16 bits has also cast the buffer; angles need all the digits of float32.
        frequency = self.inv_freq
        if frequency.dtype != torch.float32:
            frequency = self._compute_inv_freq(device)
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        angle = position[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (position - seqlen // 2) / self.scale_base
        scale = self.scale.to(power) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate in place: ``qkv`` as in :func:`apply_rotary_emb_qkv_`; or, with ``kv`` ``[B, S, 2, Hk, D]``, q ``[B,
        S, Hq, D]`` and the k of kv.

        Args:
            seqlen_offset: position of the first token; a tensor ``[B]`` needs ``max_seqlen``.
            max_seqlen: positions that the tables must hold.

        Returns:
            qkv, or (q, kv).
        """
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError("seqlen_offset is a tensor and no table has been made yet; give max_seqlen")
        cos_k, sin_k = self._cos_k_cached, self._sin_k_cached  # None but for xPos
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
