"""ALiBi as a bias per key, which is exact wherever a query sees no key after its own position.

The bias ``-slope |i + Sk - Sq - j|`` of query i and key j is then ``slope (j - (Sk - 1))`` plus a number that is the same in
the whole row, which a softmax does not see: O(Sk) memory in place of O(Sq Sk). Queries that see keys on both sides have no
such form, and are refused.

Press, Smith, Lewis: "Train short, test long: attention with linear biases enables input length extrapolation",
arXiv:2108.12409.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense_bias(slopes: Tensor, q: Tensor, k: Tensor, causal: bool, window: Sequence[int]) -> Tensor:
    """``[H, 1, Sk]`` or ``[B, H, 1, Sk]`` for q ``[B, H, Sq, D]``, k ``[B, Hk, Sk, D]``, slopes ``[H]`` or ``[B, H]``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`_check`.
    """
    _check(slopes, q, q.shape[0], q.shape[1], causal or window[1] == 0 or q.shape[2] == 1)
    distance = torch.arange(1 - k.shape[2], 1, device=q.device, dtype=_dtype(q))
    return slopes[..., None, None].to(distance.dtype) * distance


def packed_bias(
    slopes: Tensor,
    q: Tensor,
    k: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    causal: bool,
    window: Sequence[int],
) -> Tensor:
    """``[H, 1, Tk]`` for packed q ``[Tq, H, D]``, k ``[Tk, Hk, D]``, slopes ``[H]`` or ``[N, H]`` of N sequences.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`_check`.
    """
    sequences = cu_seqlens_k.shape[0] - 1
    _check(slopes, q, sequences, q.shape[1], causal or window[1] == 0 or max_seqlen_q == 1)
    key = torch.arange(k.shape[0], device=q.device, dtype=torch.int32)
    ends = cu_seqlens_k[1:].contiguous()
    sequence = torch.searchsorted(ends, key, right=True).clamp(max=max(0, sequences - 1))
    distance = (key - (ends[sequence] - 1)).to(_dtype(q))
    of_keys = slopes[:, None] if slopes.dim() == 1 else slopes[sequence].T
    return (of_keys.to(distance.dtype) * distance).unsqueeze(1)


def _dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _check(slopes: Tensor, q: Tensor, batch: int, heads: int, one_sided: bool) -> None:
    """
    Raises:
        TypeError: slopes that are no float32 tensor.
        ValueError: slopes of another shape.
        NotImplementedError: queries that may see keys on both sides; float32 inputs.
    """
    if not isinstance(slopes, Tensor) or slopes.dtype != torch.float32:
        kind = slopes.dtype if isinstance(slopes, Tensor) else type(slopes).__name__
        raise TypeError(f"alibi_slopes must be a float32 tensor [H] or [B, H], got {kind}")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes must have shape [{heads}] or [{batch}, {heads}], got {list(slopes.shape)}"
        )
    if not one_sided:
        raise NotImplementedError(
            "alibi_slopes without causal=True (or window_size=(left, 0)) would need a bias of Hq Sq Sk numbers; "
            "where that fits into memory, build it and call flashsci.attention(bias=...)"
        )
    if q.dtype == torch.float32:
        # j - (Sk - 1) grows to Sk, and its rounding in float32 with it: nothing in 16 bits, digits here.
        raise NotImplementedError(
            "alibi_slopes of float32 tensors would lose float32 accuracy in a bias per key (flash_attn takes 16 bits "
            "only); build the bias from i and j and call flashsci.attention(bias=...)"
        )
