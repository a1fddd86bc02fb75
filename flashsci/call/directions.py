"""Many directions of one call: under ``torch.vmap``, tangents that alone are mapped share the probabilities of the call.

``flashsci::<backend>_many_jvp`` takes tangents [n, *] of q, k and v. The rule of ``<backend>_jvp`` for vmap calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.call import flops
from flashsci.call.ops import JVP_SCHEMA, MANY, PASSES, Saved, Tangents, Tensors, fake_forward
from flashsci.call.schemas import LIBRARY, define_op

_GROUPED = PASSES["jvp"].grouped
_L = len(Tangents._fields)


def _count(tangents: Tangents) -> int:
    return next(x.shape[0] for x in tangents if x is not None)


def _fake(*given: Any) -> tuple[Tensor, Tensor]:
    tangents, saved = _GROUPED(*given)
    count = _count(tangents)
    out, lse = fake_forward(saved.tensors)
    return out.new_empty((count, *out.shape)), lse.new_empty((count, *lse.shape))


def define(
    backend: str, kernel: Callable[[Tangents, Saved], Any], serves: Callable[[Tensors], bool], keys: Sequence[str]
) -> None:
    """Define a backend's op of many directions for the given dispatch keys, and its use by the rule of its ``jvp``.

    Args:
        kernel: takes the tangents [n, *] and the values that a forward leaves.
        serves: whether the kernel serves a call of these tensors.
    """
    name = f"{backend}_many_jvp"
    op = define_op(name, JVP_SCHEMA, lambda *given: kernel(*_GROUPED(*given)), keys, _fake)

    def many(count: int, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any] | None:
        tangents, saved = _GROUPED(*args)
        alone = tangents.bias is None and tangents.key_weight is None
        if not (alone and serves(saved.tensors)):
            return None
        each = [
            None if x is None else x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tangents, in_dims, strict=False)
        ]
        return op(*each, *args[_L:]), (0, 0)

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        """More directions, if tangents alone are mapped; else one sample after the other."""
        tangents, count = Tangents(*args[:_L]), info.batch_size
        if all(dim is None for dim in in_dims[_L:]):
            each = [
                x if x is None else (x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
                for x, dim in zip(tangents, in_dims, strict=False)
            ]
            found = op(*each, *args[_L:])
            return tuple(x.unflatten(0, (count, -1)) for x in found), (0, 0)
        samples = [
            op(*(x if dim is None else x.select(dim, n) for x, dim in zip(args, in_dims, strict=True)))
            for n in range(count)
        ]
        return tuple(torch.stack(x) for x in zip(*samples, strict=True)), (0, 0)

    torch.library.register_vmap(op, rule, lib=LIBRARY)
    MANY[name] = many
    flops.PAIRS[name] = lambda given: _count(Tangents(*(given[f"t{n}"] for n in Tangents._fields))) * flops.pairs(given)
