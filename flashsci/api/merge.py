"""Attention over all keys, combined from attention over disjoint sets of them by lse: for ring attention, split
caches, shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to all keys from attention to disjoint sets of them, exact and differentiable.

    Args:
        outs: out of each part, ``[..., Hq, Sq, Dv]``: a sequence, or one tensor with the parts as first dim.
        lses: lse of each part, ``[..., Hq, Sq]``, natural. -inf, or +inf as flash-attn 2 writes it, in rows
            that see no key of that part.

    Returns:
        ``(out, lse)``: out in the dtype of the parts' outs, summed in that of lse. Rows without a key in any part
        have out 0, lse -inf and zero gradients.

    Raises:
        ValueError: numbers of parts or shapes that do not belong together.

    For packed calls, with out ``[Tq, Hq, Dv]`` and lse ``[Hq, Tq]``, give ``out.transpose(0, 1)``. Only one of the
    parts may include a sink.

    Examples:
        >>> import torch, flashsci
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16).unbind(0)
        >>> parts = [
        ...     flashsci.attention(q, k[..., keys, :], v[..., keys, :], return_lse=True)
        ...     for keys in (slice(0, 3), slice(3, 10))
        ... ]
        >>> out, lse = flashsci.merge(*zip(*parts))
        >>> torch.allclose(out, flashsci.attention(q, k, v), atol=1e-6)
        True

    Source: Juravsky et al., arXiv:2402.05099; Liu et al., arXiv:2310.01889.
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"outs and lses must have the same number of parts, at least one; got {len(outs)} and {len(lses)}"
        )
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                "each part must have out [..., Hq, Sq, Dv] and lse [..., Hq, Sq], the same shapes in all; got "
                f"{list(out.shape)} and {list(lse.shape)}, the first out {list(outs[0].shape)} (of packed calls "
                "give out.transpose(0, 1))"
            )
    parts = torch.stack(lses)
    parts = parts.masked_fill(parts.isinf(), -torch.inf)  # this also has no gradient
    whole = torch.logsumexp(parts, 0)
    # The parts of a row without keys are zeros, so their factors do not matter.
    shares = (parts - whole.masked_fill(whole == -torch.inf, 0)).exp().unsqueeze(-1)
    merged = shares[0] * outs[0]
    for share, out in zip(shares[1:], outs[1:], strict=True):
        merged = merged + share * out
    return merged.to(outs[0].dtype), whole
