"""``cuequivariance_torch.triangle_attention`` by :func:`flashsci.attention`.

Masked scores are -1e9 in its formula, not -inf: a query that sees no key at all averages the values. Kernels here
give such rows 0 and no gradients, so the average is put in afterwards.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashsci.api.attention import attention
from flashsci.compat.kinds import flag, number
from flashsci.errors import BackendError

MASKED = -1e9  # the score of a masked key


def mask_to_kv_lengths(mask: Tensor) -> Tensor:
    """The lengths of right-padded rows, as ``kv_lengths`` of :func:`triangle_attention`; waits for the device.

    Args:
        mask: ``[B, N, 1, 1, K]`` or ``[N, 1, 1, K]``, True (or not 0) at the first keys of each row and nowhere else.

    Returns:
        int32 ``[B, N, 1, 1, 1]``.

    Raises:
        ValueError: another shape, or a True after a False.

    Examples:
        >>> import torch
        >>> mask_to_kv_lengths(torch.tensor([[True, True, False]]).view(1, 1, 1, 3)).flatten()
        tensor([2], dtype=torch.int32)
    """
    if mask.dim() not in (4, 5) or mask.shape[-3:-1] != (1, 1):
        raise ValueError(f"mask must have shape [B, N, 1, 1, K] or [N, 1, 1, K], got {list(mask.shape)}")
    mask = _five_dims(mask).bool()
    lengths = mask.sum(-1, keepdim=True, dtype=torch.int32)
    if not torch.equal(mask, _first(lengths, mask.shape[-1])):
        raise ValueError("mask has keys after masked ones; lengths describe right-padded rows only, give mask= itself")
    return lengths


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Tensor | None = None,
) -> Any:
    """Attention along the edges of triangles, ``softmax(scale q k^T + bias, masked) v``, differentiable in q, k, v and
    bias to second order.

    Args:
        q: ``[B, N, H, Q, D]``; float16, bfloat16, float32 or float64. Without B: all tensors without it.
        k, v: ``[B, N, H, K, D]``.
        bias: ``[B, 1, H, Q, K]``, one for the N rows; if its dtype is not q's, it is cast to float32.
        mask: ``[B, N, 1, 1, K]``, True (or not 0) = attend. A row without keys gives the average of its values.
        scale: default ``1 / sqrt(D)``.
        return_aux: return ``(out, lse, max)``.
        kv_lengths: int32 ``[B, N, 1, 1, 1]``: keys from there on are masked. Not with ``mask``.

    Returns:
        out ``[B, N, H, Q, D]`` in q's dtype, with B = 1 if it was absent. With ``return_aux`` also lse, float32 ``[B,
        N, H, Q, 1]``, the natural log of the sum of exponentials of scores. In place of the scores' maximum,
        which kernels here never write, comes an object that raises on any use.

    Raises:
        TypeError, ValueError: as :func:`flashsci.attention`; and ValueError for both of mask and kv_lengths.
        BackendError: use of the maximum.

    float32 is computed in float32 accuracy, even if ``torch.backends.cuda.matmul.allow_tf32`` is set.

    Examples:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 6, 4, 6, 32).unbind(0)
        >>> bias = torch.randn(1, 1, 4, 6, 6, requires_grad=True)
        >>> mask = torch.rand(1, 6, 1, 1, 6) < 0.7
        >>> triangle_attention(q, k, v, bias, mask).sum().backward(); bias.grad.shape
        torch.Size([1, 1, 4, 6, 6])

    Source: the formula in the documentation of cuequivariance_torch 0.13; Jumper et al., Nature 596, 583 (2021),
        algorithms 13 and 14.
    """
    if not isinstance(bias, Tensor):
        raise TypeError(
            f"bias must be a tensor [B, 1, H, Q, K], got {type(bias).__name__}; without one call flashsci.attention"
        )
    scale, return_aux = number("scale", scale), flag("return_aux", return_aux)
    if q.dim() == 4:
        q, k, v, bias = (_five_dims(x) for x in (q, k, v, bias))
    if bias.dtype is not q.dtype and bias.dtype is not torch.float32:
        bias = bias.float()
    if kv_lengths is not None:
        if mask is not None:
            raise ValueError("triangle_attention takes mask or kv_lengths, got both; leave one out")
        mask = _first(kv_lengths, k.shape[-2])
    if mask is None or k.shape[-2] == 0:
        found = attention(q, k, v, bias=bias, scale=scale, return_lse=return_aux)
        return (found[0], found[1].unsqueeze(-1), _Maximum()) if return_aux else found
    mask = _five_dims(mask if mask.dtype is torch.bool else mask.bool())
    found = attention(q, k, v, bias=bias, mask=mask, scale=scale, return_lse=return_aux)
    out = found[0] if return_aux else found
    some = mask.any(-1, keepdim=True)
    out = torch.where(some, out, v.mean(-2, keepdim=True).to(out.dtype))
    if not return_aux:
        return out
    lse = torch.where(some, found[1].unsqueeze(-1), MASKED + math.log(k.shape[-2]))
    return out, lse, _Maximum()


def _five_dims(x: Tensor) -> Tensor:
    return x if x.dim() == 5 else x.unsqueeze(0)


def _first(lengths: Tensor, keys: int) -> Tensor:
    """Bool ``[..., keys]``: True before ``lengths [..., 1]``."""
    return torch.arange(keys, device=lengths.device) < lengths


def _no_maximum(*_: Any, **__: Any) -> NoReturn:
    raise BackendError(
        "triangle_attention: the third result of return_aux, the maximum of the scores, is not computed by flashsci; "
        "lse alone is enough to recompute probabilities, exp(score - lse)"
    )


class _Maximum:
    """An object in place of the maximum of the scores: it may be passed on, but not used."""

    __torch_function__ = classmethod(_no_maximum)
    __getattr__ = __getitem__ = __array__ = _no_maximum
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _no_maximum
