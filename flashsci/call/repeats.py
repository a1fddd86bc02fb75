"""Recognition of calls that repeat an earlier one: one comparison of their tensors replaces every check.

torch's compiler has a C function for it: it compares types, dispatch keys, dtypes, devices, sizes, strides, and which
tensors require grad. The keys are those of the tensor (a negative view, zeros without memory, a functorch wrapper)
and of the thread (a transform, autocast, inference mode, tracing), so a tensor that is not plain never equals one
that was. A call that has the same tensor twice is no repeat either; this is slower and not wrong. The same comparison
in Python takes several times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# Private, as are all of dynamo's guards. Without it every call goes the general way.
_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
MOST = 8  # comparisons of one key: it does not hold sizes, strides, dtypes, gradients

Kept = tuple[tuple[Any, Any], ...]  # comparisons, each with the value kept for it
_strided = torch.strided


def find(kept: Kept, tensors: Iterable[Tensor]) -> Any:
    """The value kept for as many tensors like these; or None."""
    for x in tensors:  # the comparison asks for strides, and ends the process if there are none
        if x.layout is not _strided or x.is_nested:
            return None
    for same, value in kept:
        if same(*tensors):
            return value
    return None


def keep(store: dict[Any, Any], key: Any, tensors: Sequence[Tensor], value: Any) -> None:
    """Store a value in ``store[key]``, where :func:`find` finds it. No tensor is held."""
    if _Guards is None or len({id(x) for x in tensors}) < len(tensors):
        return
    try:
        guards = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if not guards.check(*tensors):
            return
    except (AttributeError, TypeError):  # another version of torch, with other arguments
        return
    store[key] = ((guards.check, value), *store.get(key, ())[: MOST - 1])
