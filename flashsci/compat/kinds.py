"""Options in the types that extensions of other packages take: tensors of one element, numpy scalars, and ints as
flags.

flashsci's own functions refuse tensors as options, because options are constants of a call. Here tensors are read,
which waits for the device as it does in those packages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def number(name: str, x: Any) -> Any:
    """``x``, or the number that a tensor of one element holds.

    Raises:
        ValueError: a tensor of more elements, or one that requires a gradient.
    """
    if not isinstance(x, Tensor):
        return x
    if x.numel() != 1:
        raise ValueError(f"{name} must be a number, got a tensor of shape {list(x.shape)}")
    if x.requires_grad:
        raise ValueError(
            f"{name} is a constant of a call, and the tensor given requires a gradient that it would not get; multiply q by it "
            "instead, or detach it"
        )
    return x.item()


def flag(name: str, x: Any) -> Any:
    """``x`` as a bool; None is False.

    Raises:
        TypeError: neither a bool nor a number.
        ValueError: as :func:`number`.
    """
    if type(x) is bool or isinstance(x, torch.SymBool):
        return x
    x = number(name, x)
    if x is not None and not hasattr(x, "__bool__"):
        raise TypeError(f"{name} must be True or False, got {x!r}")
    return bool(x)
