"""``deepspeed.ops.deepspeed4science.DS4Sci_EvoformerAttention`` by :func:`flashsci.attention`.

Its two biases have the shapes [B, N, 1, 1, S] and [B, 1, H, S, S]; their sum, [B, N, H, S, S], is never made. The
second is the bias of a call, the first becomes its key weights: e^(s + b) = w e^s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashsci.api.attention import attention
from flashsci.call.ops import statistics_dtype


def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    """Attention of AlphaFold's Evoformer, ``softmax(Q K^T / sqrt(D) + biases) V``, differentiable in Q, K, V and
    both biases to second order.

    Args:
        Q, K, V: ``[*, S, H, D]``, with biases ``[B, N, S, H, D]``; float16, bfloat16, float32 or float64.
        biases: at most two, each in Q's dtype or float32 (with float32 also a 16-bit dtype), or None. The first ``[B,
            N, 1, 1, S]``, for keys: a mask as ``1e9 * (mask - 1)``, or any numbers. The second ``[B, 1, H, S, S]``,
            for pairs. The list is not changed. If there is a second bias, numbers of the first count exactly down to
            135 (float64: 1080) below the largest of their row, and from ten times that on they are masks. A number in
            between makes its row of the result NaN, because kernels cannot say whether the second bias would lift it:
            write a mask as -1e9, or add such numbers to the second bias.

    Returns:
        ``[*, S, H, D]`` in Q's dtype and layout. Rows whose keys are all masked attend to them by their scores and
        the second bias, which is the limit of the formula.

    Raises:
        ValueError: more than two biases, or shapes that do not fit.
        TypeError, BackendError: as :func:`flashsci.attention`.

    Lengths up to 16 and head dims above 64 are served; DeepSpeed's kernels refuse them.

    Examples:
        >>> import torch
        >>> Q, K, V = torch.randn(3, 1, 8, 20, 4, 32).unbind(0)
        >>> mask = 1e9 * (torch.randint(0, 2, (1, 8, 1, 1, 20)) - 1.0)
        >>> pairs = torch.randn(1, 1, 4, 20, 20, requires_grad=True)
        >>> DS4Sci_EvoformerAttention(Q, K, V, [mask, pairs]).sum().backward(); pairs.grad.shape
        torch.Size([1, 1, 4, 20, 20])

    Source: the interface of deepspeed 0.19; Jumper et al., Nature 596, 583 (2021), algorithms 7, 13 and 14.
    """
    if len(biases) > 2:
        raise ValueError(
            f"biases may be two, of keys [B, N, 1, 1, S] and of pairs [B, 1, H, S, S], got {len(biases)}; "
            "add up those of one shape first"
        )
    of_keys, of_pairs = (*biases, None, None)[:2]
    bias, weight = of_pairs, None
    if of_keys is not None or of_pairs is not None:
        _check_shapes(Q, of_keys, of_pairs)
    if of_keys is not None:
        # -inf, the value of 1e9 * (mask - 1) in float16, counts as the least number.
        of_keys = of_keys.clamp(min=torch.finfo(of_keys.dtype).min / 2)
        if of_pairs is None:
            bias = of_keys.log_softmax(-1, dtype=statistics_dtype(Q.dtype))
        else:
            weight = _weights(of_keys.squeeze(-2).to(statistics_dtype(Q.dtype)))
    out = attention(Q.transpose(-2, -3), K.transpose(-2, -3), V.transpose(-2, -3), bias=bias, key_weight=weight)
    return out.transpose(-2, -3)


def _weights(of_keys: Tensor) -> Tensor:
    """Exponentials of ``[B, N, 1, S]`` times a factor for each row, on which attention does not depend.

    The largest is 1, or is raised so that the least becomes e^-75 (float64: e^-600): a gradient by a weight is as
    large as 1 / w, and their sums must be finite. Rows are not raised above e^60 (e^480): a weight that is still too
    low is 0, or NaN if it may not be a mask.
    """
    high, low = (60.0, -75.0) if of_keys.dtype == torch.float32 else (480.0, -600.0)
    below = of_keys - of_keys.detach().amax(-1, keepdim=True)
    least = low - high
    masked = below.detach() < least
    lift = (low - below.detach().masked_fill(masked, 0.0).amin(-1, keepdim=True)).clamp(min=0.0)
    weights = (below + lift).exp().masked_fill(masked, 0.0)
    return weights.masked_fill(masked & (below.detach() > 10 * least), torch.nan)


def _check_shapes(Q: Tensor, of_keys: Tensor | None, of_pairs: Tensor | None) -> None:
    if Q.dim() != 5:
        raise ValueError(f"with biases Q must be [B, N, S, H, D], got shape {list(Q.shape)}; unsqueeze what is missing")
    B, N, S, H, _ = Q.shape
    if of_keys is not None and of_keys.shape != (B, N, 1, 1, S):
        raise ValueError(f"biases[0] must have shape [B, N, 1, 1, S] = {[B, N, 1, 1, S]}, got {list(of_keys.shape)}")
    if of_pairs is not None and of_pairs.shape != (B, 1, H, S, S):
        raise ValueError(f"biases[1] must have shape [B, 1, H, S, S] = {[B, 1, H, S, S]}, got {list(of_pairs.shape)}")
