"""Many directions of one call: under ``torch.vmap``, tangents that alone are mapped share the probabilities of the call.

The rule of ``flashsci::<backend>_jvp`` for vmap calls ``<backend>_many_jvp``, which takes tangents [n, *].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.call import flops
from flashsci.call.ops import MANY, PASSES, Saved, Tangents, count_of

_L = len(Tangents._fields)


def share(backend: str, serves: Callable[[Tangents, Saved], bool]) -> None:
    """Let the rule of a backend's ``jvp`` call its ``many_jvp`` for the calls that ``serves`` names."""
    name = f"{backend}_many_jvp"

    def op(*given: Any) -> Any:
        return getattr(torch.ops.flashsci, name)(*given)

    def many(count: int, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any] | None:
        tangents, saved = PASSES["jvp"].grouped(*args)
        if count < 2 or not serves(tangents, saved):
            return None
        return op(*_in_front(count, in_dims, args), *args[_L:]), (0, 0)

    def more(count: int, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        """Directions of directions are directions."""
        every = [x if x is None else x.flatten(0, 1) for x in _in_front(count, in_dims, args)]
        return tuple(x.unflatten(0, (count, -1)) for x in op(*every, *args[_L:])), (0, 0)

    MANY[f"{backend}_jvp"], MANY[name] = many, more
    flops.COUNTED[name] = _products


def _in_front(count: int, in_dims: Sequence[Any], args: Sequence[Any]) -> list[Tensor | None]:
    """The tangents with the mapped dim in front; those that are not mapped are repeated."""
    return [
        x if x is None else x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(args[:_L], in_dims, strict=False)
    ]


def _products(given: dict[str, Any]) -> tuple[int, int]:
    """Products over D and over Dv: those of the call once, and those of each direction."""
    count = count_of(Tangents(*(given[f"t{name}"] for name in Tangents._fields)))
    (shared_dim, shared_values), (over_dim, over_values) = flops.PRODUCTS["forward"], flops.PRODUCTS["jvp"]
    return shared_dim + count * (over_dim - shared_dim), shared_values + count * (over_values - shared_values)
