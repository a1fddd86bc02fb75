"""Copies of a bias whose keys are not neighbours in memory: ``[.., Sq, Sk, H]`` with permuted dims, as a Linear over
pairs leaves it. Also of a bias or mask whose rows do not begin at multiples of 16 bytes (row_pitch.py).

Kernels read the copy. The gradient goes back in the order of the bias, which the Linear's own backward reads without
a copy. torch's copy between such orders takes several times as long, because it moves numbers one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashsci.call import ops
from flashsci.call.ops import Tensors, empty_with_inner_keys, with_inner_keys
from flashsci.choice.backends import BACKENDS

#: Elements from which a kernel saves more than its extra Python time, compared with torch's copy; and of a copy in the same
#: order, which torch makes nearly as fast.
MANY, MANY_IN_ORDER = 1 << 18, 1 << 22


def choose(tensors: Tensors) -> Callable[[Tensor], Tensor]:
    """A function that copies the bias of plain tensors like these, differentiable to any order: a Triton kernel, or
    torch."""
    return choose_for(tensors.bias)


def choose_for(x: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The same for a bias or mask."""
    if (
        x is None
        or x.device.type != "cuda"
        or x.numel() < (MANY_IN_ORDER if x.dim() and x.stride(-1) == 1 else MANY)
        or x.dim() > 5
        or x.element_size() > 4
        or BACKENDS["triton"].unavailable() is not None
    ):
        return with_inner_keys
    return copied


def copied(bias: Tensor) -> Tensor:
    """The copy of :func:`flashsci.call.ops.with_inner_keys`, by a kernel."""
    if bias.requires_grad and torch.is_grad_enabled():
        found: Tensor = InnerKeys.apply(bias)
        return found
    return _fill(bias, empty_with_inner_keys(bias), True)


class InnerKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        ctx.kind = tuple(bias.shape), bias.stride()
        return _fill(bias, empty_with_inner_keys(bias), True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled() or gradient.stride(-1) != 1 or not ops.bypasses_dispatcher((gradient,)):
            return gradient  # it is to be differentiated, or its order is not known
        shape, back = _order(*ctx.kind)
        target = torch.empty(shape, dtype=gradient.dtype, device=gradient.device).permute(back)
        return gradient if gradient.stride() == target.stride() else _fill(gradient, target)


@functools.lru_cache(maxsize=1024)
def _order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Sizes of a contiguous tensor in the memory order of a tensor, and the permutation to the order of its dims."""
    order = sorted(range(len(shape)), key=lambda d: -stride[d])
    return [shape[d] for d in order], [order.index(d) for d in range(len(shape))]


def _fill(source: Tensor, target: Tensor, padded: bool = False) -> Tensor:
    from flashsci.backends.triton.plans.copy import copied

    if source.dtype is torch.bool:  # no kernel stores bits
        copied(source.view(torch.uint8), target.view(torch.uint8), padded)
        return target
    return copied(source, target, padded)
