"""Jagged nested tensors: the same packed kernels under PyTorch's own ragged type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.api.varlen import varlen_attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Any,
    key_weight: Any,
    mask: Any,
    pair_gate: Any,
    return_lse: bool,
    **options: Any,
) -> Any:
    """Attention of jagged ``[B, H, j, D]`` tensors (SDPA's convention: ``[B, j, H, D]`` transposed) or ``[B, j, D]``.

    Returns:
        out, jagged like q; with ``return_lse`` also lse, jagged ``[B, H, j]`` (``[B, j]``).

    Raises:
        ValueError: a bias, key_weight or mask (use :func:`flashsci.varlen_attention`), or tensors that are not all
            jagged in the same way.
    """
    if pair_gate is not None:
        raise ValueError("nested tensors take no pair_gate: pad them, and hide the padding by a mask")
    if bias is not None or key_weight is not None or mask is not None:
        raise ValueError(
            "nested tensors take no bias, key_weight or mask; call varlen_attention on .values() with a ragged bias"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        jagged = x.is_nested and x.layout == torch.jagged
        if not (jagged and x.dim() == q.dim() and x.dim() in (3, 4)):
            raise ValueError(
                f"q is a nested tensor; then q, k and v must all be jagged nested tensors [B, H, j, D] or [B, j, D], got {name} "
                f"with layout {x.layout} and {x.dim()} dims; torch.nested.nested_tensor(..., layout=torch.jagged) makes one"
            )
    offsets_q, offsets_k = q.offsets(), k.offsets()  # type: ignore[attr-defined]
    cu_seqlens = offsets_q.to(torch.int32), offsets_k.to(torch.int32)
    q_, k_, v_ = (_packed(x) for x in (q, k, v))
    result = varlen_attention(q_, k_, v_, *cu_seqlens, return_lse=return_lse, **options)
    if not return_lse:
        return _jagged(result, offsets_q, q.dim())
    out, lse = result
    return _jagged(out, offsets_q, q.dim()), _jagged(lse.transpose(0, 1), offsets_q, q.dim())


def _packed(x: Tensor) -> Tensor:
    """Jagged [B, H, j, D] or [B, j, D] as packed [T, H, D]."""
    return x.transpose(1, 2).values() if x.dim() == 4 else x.values().unsqueeze(1)


def _jagged(x: Tensor, offsets: Tensor, dims: int) -> Tensor:
    """Packed [T, H, ...] as jagged [B, H, j, ...], or [B, j, ...] when q had no heads."""
    if dims == 3:
        return torch.nested.nested_tensor_from_jagged(x.squeeze(1), offsets)
    return torch.nested.nested_tensor_from_jagged(x.contiguous(), offsets).transpose(1, 2)
