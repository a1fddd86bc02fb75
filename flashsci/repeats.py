"""Calls that repeat an earlier one are known by one comparison of their tensors with that one's, past every check.

torch's compiler has a C function for it: types, dispatch keys, dtypes, devices, sizes, strides, and who requires grad. The keys
are those of the tensor (a negative view, zeros without memory, a functorch wrapper) and of the thread (a transform, autocast,
inference mode, tracing), so that what is not plain never equals what was. The same tensor twice in one call is no repeat, either,
which is slower and not wrong. Asking Python for as much takes several times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# Private, as all of dynamo's guards. Without it every call goes the general way.
_Guards: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None
)
MOST = 8  # that one key tells not apart: sizes, strides, dtypes, gradients

Kept = tuple[tuple[Any, Any], ...]  # comparisons and what they lead to
_strided = torch.strided


def find(kept: Kept, tensors: Iterable[Tensor]) -> Any:
    """What was kept for tensors like these, as many of them; or None."""
    for x in tensors:  # the comparison asks for strides, and ends the process where there are none
        if x.layout is not _strided or x.is_nested:
            return None
    for same, value in kept:
        if same(*tensors):
            return value
    return None


def keep(store: dict[Any, Any], key: Any, tensors: Sequence[Tensor], value: Any) -> None:
    """Let :func:`find` find it in ``store[key]``. No tensor is held."""
    if _Guards is None or len({id(x) for x in tensors}) < len(tensors):
        return
    try:
        guards = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if not guards.check(*tensors):
            return
    except (AttributeError, TypeError):  # another torch's, which wants other arguments
        return
    store[key] = ((guards.check, value), *store.get(key, ())[: MOST - 1])
