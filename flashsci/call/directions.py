"""Many directions of one call: under ``torch.vmap``, tangents that alone are mapped share the probabilities of the call.

``flashsci::<backend>_many_jvp`` takes tangents [n, *]. The rule of ``<backend>_jvp`` for vmap calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flashsci.call import flops
from flashsci.call.ops import JVP_SCHEMA, MANY, PASSES, Saved, Tangents, Tensors, fake_forward, register_vmap
from flashsci.call.schemas import define_op

_GROUPED = PASSES["jvp"].grouped
_L = len(Tangents._fields)


def count_of(tangents: Tangents) -> int:
    """The number of directions."""
    return next(x.shape[0] for x in tangents if x is not None)


def stacked(x: Tensor, count: int) -> Tensor:
    """An empty tensor of ``count`` of these, one after the other, each with the strides of ``x``."""
    return x.new_empty_strided((count, *x.shape), (x.numel(), *x.stride()))


def _fake(*given: Any) -> tuple[Tensor, ...]:
    tangents, saved = _GROUPED(*given)
    return tuple(stacked(x, count_of(tangents)) for x in fake_forward(saved.tensors))


def _products(given: dict[str, Any]) -> tuple[int, int]:
    """Products over D and over Dv: those of the call once, and those of each direction."""
    count = count_of(Tangents(*(given[f"t{name}"] for name in Tangents._fields)))
    over_dim, over_values = flops.PRODUCTS["jvp"]
    forward = flops.PRODUCTS["forward"]
    return forward[0] + count * (over_dim - forward[0]), forward[1] + count * (over_values - forward[1])


def define(
    backend: str, kernel: Callable[[Tangents, Saved], Any], serves: Callable[[Tensors], bool], keys: Sequence[str]
) -> Callable[[Tangents, Saved], Any]:
    """Define a backend's op of many directions for the given dispatch keys, and its use by the rule of its ``jvp``.

    Args:
        kernel: takes the tangents [n, *] and the values that a forward leaves.
        serves: whether the kernel serves a call of these tensors.

    Returns:
        A function that calls the op with grouped arguments.
    """
    name = f"{backend}_many_jvp"
    op = define_op(name, JVP_SCHEMA, lambda *given: kernel(*_GROUPED(*given)), keys, _fake)

    def mapped(count: int, in_dims: Sequence[Any], args: Sequence[Any]) -> list[Tensor | None]:
        """The tangents with the mapped dim in front."""
        return [
            x if x is None else x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(args[:_L], in_dims, strict=False)
        ]

    def many(count: int, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any] | None:
        if count < 2 or not serves(_GROUPED(*args)[1].tensors):
            return None
        return op(*mapped(count, in_dims, args), *args[_L:]), (0, 0)

    def more(count: int, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        """Directions of directions are directions."""
        every = [x if x is None else x.flatten(0, 1) for x in mapped(count, in_dims, args)]
        return tuple(x.unflatten(0, (count, -1)) for x in op(*every, *args[_L:])), (0, 0)

    MANY[f"{backend}_jvp"], MANY[name] = many, more
    register_vmap(op, along=1)
    flops.COUNTED[name] = _products
    return lambda tangents, saved: op(*tangents, *saved.flat())
