"""``xformers.ops.memory_efficient_attention`` and its biases by flashsci.

Calls with one sequence go to :func:`flashsci.attention`, packed ones to :func:`flashsci.varlen_attention`, and no
mask is ever made. Biases (xformers_bias.py) are recognised by the name of their class and by attributes, so those of
an installed xformers serve as well as those here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.api.attention import attention
from flashsci.api.merge import merge
from flashsci.api.varlen import varlen_attention
from flashsci.compat import xformers_bias
from flashsci.compat.kinds import number
from flashsci.compat.xformers_bias import (
    AttentionBias,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)
from flashsci.errors import BackendError

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "merge_attentions",
]

_Lists = Sequence[Tensor]


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention of ``[B, M, H, K]`` tensors, differentiable in query, key, value and a tensor bias to second order.

    Args:
        query: ``[B, Mq, H, K]``, ``[B, Mq, K]`` for one head, or ``[B, Mq, G, H, K]`` for G groups of H heads; float16,
            bfloat16, float32 or float64.
        key, value: ``[B, Mk, H, K]`` and ``[B, Mk, H, Kv]``, with as many dims as query. Heads that share a key and
            value by ``expand`` share them in the kernel.
        attn_bias: None; a tensor added to the scores, ``[B, H, Mq, Mk]`` (or ``[B, Mq, Mk]``, or ``[B, G, H, Mq,
            Mk]``), query's dtype or float32, -inf allowed; or one of the biases below, or of xformers. Packed biases
            need B = 1.
        p: probability of dropping an entry of the softmax, in [0, 1). The entries are not the same as in xformers.
        scale: factor of the scores; default ``1 / sqrt(K)``.
        op: None. Operators of xformers cannot be chosen here; ``flashsci.use_backend`` chooses among ours.
        output_dtype: None or query's dtype.

    Returns:
        ``[B, Mq, H, Kv]`` (or with query's dims) in query's dtype and layout. Rows without any key are 0.

    Raises:
        BackendError: a paged or unknown bias, an ``op``, an ``output_dtype`` other than query's.
        TypeError, ValueError: as :func:`flashsci.attention`; also ValueError for shapes that do not fit the bias.

    Examples:
        >>> import torch
        >>> from flashsci.compat.xformers import BlockDiagonalMask, memory_efficient_attention
        >>> proteins = [torch.randn(1, length, 4, 16) for length in (5, 9)]
        >>> bias, x = BlockDiagonalMask.from_tensor_list(proteins)
        >>> [y.shape[1] for y in bias.split(memory_efficient_attention(x, x, x, bias))]
        [5, 9]

    Source: the interface of xformers 0.0.35; Rabe, Staats, arXiv:2112.05682.
    """
    if op is not None or output_dtype is not None:
        _check_options(op, output_dtype, query)
    return _attend(query, key, value, attn_bias, p, scale, False)


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`memory_efficient_attention` outside autograd."""
    _check_options(op, output_dtype, query)
    with torch.no_grad():
        return _attend(query, key, value, attn_bias, p, scale, False)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) outside autograd.

    lse is float32 (float64 for float64), natural, ``[B, H, Mq]`` (``[B, G, H, Mq]``; for ``[B, Mq, K]`` with H = 1),
    for packed queries ``[1, H, Mq]``; -inf for rows without keys.

    Raises:
        NotImplementedError: ``p`` other than 0, as in xformers.
    """
    _check_options(op, output_dtype, query)
    if p != 0.0:
        raise NotImplementedError(
            f"memory_efficient_attention_forward_requires_grad takes no dropout, got p={p}; "
            "memory_efficient_attention does"
        )
    with torch.no_grad():
        found: tuple[Tensor, Tensor] = _attend(query, key, value, attn_bias, p, scale, True)
        return found


def merge_attentions(
    attn_split: Tensor | _Lists,
    lse_split: Tensor | _Lists,
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention to all keys from attention to parts of them, differentiable.

    Args:
        attn_split: outs of the parts, each ``[B, M, H, K]`` or ``[B, M, G, H, K]``: a list, or one tensor with the
            parts as first dim.
        lse_split: their lse, each ``[B, H, M]`` or ``[B, G, H, M]``, natural; -inf for rows that see none of a part's keys.
        write_lse: whether to return the combined lse.
        output_dtype: that of out; default that of the parts.

    Returns:
        (out, lse), with None for lse if it was not asked for. Rows without keys in any part have out 0, lse -inf.

    Raises:
        ValueError: numbers of parts or shapes that do not fit together.

    Examples:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 6, 2, 8).unbind(0)
        >>> halves = [
        ...     memory_efficient_attention_forward_requires_grad(q, k[:, i : i + 3], v[:, i : i + 3])
        ...     for i in (0, 3)
        ... ]
        >>> out, lse = merge_attentions(*zip(*halves))
        >>> torch.allclose(out, memory_efficient_attention(q, k, v), atol=1e-6)
        True

    Source: Juravsky et al., arXiv:2402.05099.
    """
    outs, lses = list(attn_split), list(lse_split)
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"attn_split and lse_split must have the same number of parts, got {len(outs)} and {len(lses)}"
        )
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != _lse_shape(outs[0]):
            raise ValueError(
                "each part must have out [B, M, *H, K] and lse [B, *H, M] of the same shapes, got "
                f"{list(out.shape)} and {list(lse.shape)}, the first out {list(outs[0].shape)}"
            )
    wide = [x.to(lses[0].dtype) for x in outs]
    merged, whole = merge(wide, [lse.movedim(-1, 1) for lse in lses])
    return merged.to(output_dtype or outs[0].dtype), whole.movedim(1, -1) if write_lse else None


def _lse_shape(out: Tensor) -> tuple[int, ...]:
    batch, length, *heads, _ = out.shape
    return (batch, *heads, length)


def _check_options(op: Any, output_dtype: torch.dtype | None, query: Tensor) -> None:
    if op is not None:
        raise BackendError(
            f"op={op!r} names operators of xformers, which flashsci does not run; give op=None, and choose a backend by "
            "flashsci.use_backend(name)"
        )
    if output_dtype not in (None, query.dtype):
        raise BackendError(
            f"output_dtype={output_dtype} is not supported for a query of {query.dtype}: kernels round to query's dtype; "
            "cast query, key and value first, or the result"
        )


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Any, p: float, scale: float | None, lse: bool) -> Any:
    p, scale = number("p", p), number("scale", scale)
    dims = query.dim()
    if not (3 <= dims <= 5 and key.dim() == dims and value.dim() == dims):
        raise ValueError(
            "query, key, value must all be [B, M, H, K], [B, M, K] or [B, M, G, H, K], got "
            f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    band: dict[str, Any] = {}
    tensor = bias
    if bias is not None and not isinstance(bias, Tensor):
        band = xformers_bias.band_of(bias)
        if hasattr(bias, "q_seqinfo"):
            return _packed(query, key, value, bias, band, p, scale, lse)
        tensor = getattr(bias, "_bias", None)
    if dims == 3:
        query, key, value = (x.unsqueeze(2) for x in (query, key, value))
        tensor = None if tensor is None else tensor.unsqueeze(1)
    else:
        key, value = _shared(key, value)
    # [B, M, G, H, K] as [B, G, H, M, K]: groups are one more batch dim.
    if dims == 5:
        query, key, value = (x.permute(0, 2, 3, 1, 4) for x in (query, key, value))
    else:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    found = attention(query, key, value, bias=tensor, scale=scale, dropout_p=p, return_lse=lse, **band)
    out = found[0] if lse else found
    out = out.permute(0, 3, 1, 2, 4) if dims == 5 else out.transpose(1, 2)
    if dims == 3:
        out = out.squeeze(2)
    return (out, found[1]) if lse else out


def _shared(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """key and value with one expanded head, if all their heads are the same one."""
    if key.stride(-2) == 0 and value.stride(-2) == 0 and key.shape[-2] == value.shape[-2] > 1:
        return key[..., :1, :], value[..., :1, :]
    return key, value


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Any,
    band: dict[str, Any],
    p: float,
    scale: float | None,
    lse: bool,
) -> Any:
    dims, of_q, of_k = query.dim(), bias.q_seqinfo, bias.k_seqinfo
    rows, keys = of_q.seqstart_py[-1], of_k.seqstart_py[-1]
    batch, length, *_ = query.shape
    one = batch == key.shape[0] == value.shape[0] == 1
    if dims == 3 or not one or length != rows or key.shape[1] != keys:
        raise ValueError(
            f"a {type(bias).__name__} of {rows} queries and {keys} keys takes [1, {rows}, H, K] and [1, {keys}, H, K] "
            f"(or [1, M, G, H, K]), got {list(query.shape)} and {list(key.shape)}"
        )
    if of_q.seqstart.device != query.device:
        raise ValueError(
            f"attn_bias is on {of_q.seqstart.device} but query is on {query.device}; give "
            "attn_bias.to(query.device), or device= where it is made"
        )
    key, value = _shared(key, value)
    groups = None
    if dims == 5:
        groups = query.shape[2:4]
        query, key, value = query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)
    query, key, value = query.squeeze(0), key.squeeze(0), value.squeeze(0)
    starts = of_k.seqstart
    if hasattr(of_k, "seqlen"):
        starts, places = _gathered(of_k)
        key, value = key.index_select(0, places), value.index_select(0, places)
    found = varlen_attention(
        query, key, value, of_q.seqstart, starts, max_seqlen_q=max(of_q.max_seqlen, 0),  # -1 where there is none
        max_seqlen_k=max(of_k.max_seqlen, 0), scale=scale, dropout_p=p, return_lse=lse, **band,
    )  # fmt: skip
    out = (found[0] if lse else found).unsqueeze(0)
    if groups is not None:
        out = out.unflatten(2, groups)
    if not lse:
        return out
    statistics = found[1].unsqueeze(0)
    return out, statistics if groups is None else statistics.unflatten(1, groups)


def _gathered(info: Any) -> tuple[Tensor, Tensor]:
    """Offsets of the sequences after the keys in use are gathered, and the present place of each such key.

    No wait for the device: their number is known on the host.
    """
    total = sum(info.seqlen_py)
    starts = torch.nn.functional.pad(info.seqlen.cumsum(0, dtype=torch.int32), (1, 0))
    shifts = info.seqstart[: len(info.seqlen_py)] - starts[:-1]
    places = torch.repeat_interleave(shifts, info.seqlen, output_size=total)
    return starts, places + torch.arange(total, dtype=places.dtype, device=places.device)
