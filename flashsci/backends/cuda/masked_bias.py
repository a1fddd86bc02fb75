"""A bias that is -inf where a mask hides a pair, in the place of both.

Hopper's backward has room for the tiles of a 16-bit bias or for those of a mask. The copy lasts as long as the backward; its
gradient is that of the bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flashsci.call.ops import Given, Tensors, empty_with_inner_keys
from flashsci.call.row_pitch import differs_by_query, once

#: Scores of a call from which on the copy costs less than the kernels of sm80, which read both.
FEWEST_SCORES = 1 << 25


def fits(tensors: Tensors) -> bool:
    """Whether a bias has a number of its own for each number of a mask by pairs, so that the copy is not larger.

    Args:
        tensors: in the ranks that backends take, with sizes that are numbers.
    """
    bias, mask = tensors.bias, tensors.mask
    if bias is None or mask is None or tensors.mask_tiles is not None or tensors.cu_seqlens_q is not None:
        return False
    if bias.dim() != mask.dim() or not differs_by_query(mask):
        return False
    own, of_mask = once(bias).shape, once(mask).shape
    pairs = tensors.q.shape[-2], tensors.k.shape[-2]
    return own[-2:] == pairs and all(m in (1, n) for n, m in zip(own, of_mask, strict=True))


def pays(tensors: Tensors) -> bool:
    """Whether a call has so many scores that the copy is a small part of its time."""
    return tensors.q.shape[:-1].numel() * tensors.k.shape[-2] >= FEWEST_SCORES


def hidden_in_bias(tensors: Tensors) -> Tensors:
    """Tensors that :func:`fits` accepts, with the copy and without the mask."""
    bias, mask = tensors.bias, tensors.mask
    assert bias is not None and mask is not None
    with torch.no_grad():
        shown = once(bias)
        copy = empty_with_inner_keys(shown)
        torch.where(once(mask), shown, shown.new_full((), -math.inf), out=copy)
    return tensors._replace(bias=copy.expand(bias.shape), mask=None)


def hiding(run: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A prepared backward of such tensors as one that takes the mask."""

    def backward(
        dout: Tensor | None, dlse: Tensor | None, tensors: Given, out: Tensor, lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        return run(dout, dlse, hidden_in_bias(Tensors(*tensors)), out, lse)

    return backward
