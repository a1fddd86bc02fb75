"""Many directions of one call: under ``torch.vmap``, tangents or cotangents that alone are mapped share the probabilities of the call.

The rule of ``flashsci::<backend>_jvp`` for vmap calls ``<backend>_many_jvp``, which takes tangents [n, *]; that of ``<backend>_backward``
calls ``<backend>_many_backward``, which takes cotangents [n, *]; that of ``<backend>_double_backward`` calls
``<backend>_many_double_backward``, which takes tangents [n, *] and the cotangents of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.call import flops
from flashsci.call.ops import MANY, PASSES, count_of

#: Products over D and over Dv that directions share.
_SHARED = {"jvp": flops.PRODUCTS["forward"], "backward": (1, 0), "double_backward": (1, 1)}


def share(backend: str, what: str, serves: Callable[..., bool]) -> None:
    """Let the rule of a backend's ``jvp``, ``backward`` or ``double_backward`` (``what``) call its op for many directions where ``serves``,
    which takes the grouped arguments of the pass, is true."""
    own, name = f"{backend}_{what}", f"{backend}_many_{what}"
    directed = PASSES[what].directed

    def op(every: list[Tensor | None], args: Sequence[Any]) -> Any:
        return getattr(torch.ops.flashsci, name)(*every, *args[directed:])

    def many(count: int, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any] | None:
        if count < 2 or not serves(*PASSES[what].grouped(*args)):
            return None
        return _placed(op(_in_front(count, in_dims, args[:directed]), args))

    def more(count: int, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        """Directions of directions are directions."""
        every = [x if x is None else x.flatten(0, 1) for x in _in_front(count, in_dims, args[:directed])]
        return _placed([x.unflatten(0, (count, -1)) if x.dim() > 1 else x for x in op(every, args)])

    MANY[own], MANY[name] = many, more
    flops.COUNTED[name] = lambda given: _products(name, what, given)


def _in_front(count: int, in_dims: Sequence[Any], along: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Tangents or cotangents with the mapped dim in front; those that are not mapped are repeated."""
    return [
        x if x is None else x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(along, in_dims, strict=False)
    ]


def _placed(found: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Results, and their mapped dims: gradients that are not needed have none."""
    return tuple(found), tuple(0 if x.dim() > 1 else None for x in found)


def _products(name: str, what: str, given: dict[str, Any]) -> tuple[int, int]:
    """Products over D and over Dv: those of the call once, and those of each direction."""
    schema = getattr(torch.ops.flashsci, name).default._schema
    count = count_of([given.get(x.name) for x in schema.arguments[: PASSES[what].directed]])
    (shared_dim, shared_values), (over_dim, over_values) = _SHARED[what], flops.PRODUCTS[what]
    return shared_dim + count * (over_dim - shared_dim), shared_values + count * (over_values - shared_values)
