"""The vmap of torch.autograd (``functional.jacobian(vectorize=True)``, ``is_grads_batched``) by the rule that torch.vmap has of an op.

Without a rule of its own torch runs an op there sample by sample. A rule serves ops of the thread that entered the vmap: autograd runs the
backward of a GPU in another one, which does not know the level.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_enter, _leave = torch._C._vmapmode_increment_nesting, torch._C._vmapmode_decrement_nesting
_is_batch = torch._C._functorch.is_legacy_batchedtensor


def by_rule(op: Callable[..., Any], rule: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """The kernel of an op for batches of that vmap; ``rule``: as torch.library.register_vmap takes it."""

    def batched(*args: Any) -> Any:
        level = _enter() - 1
        _leave()
        _leave()  # the rule works on the samples, outside of this level
        try:
            # A tensor without this level becomes one sample, which serves all.
            every = [torch._remove_batch_dim(x, level, 1, 0) if _mapped(x) else x for x in args]
            count = max(x.shape[0] for x, given in zip(every, args, strict=True) if _mapped(given))
            if count == 1:
                return op(*(x[0] if _mapped(given) else x for x, given in zip(every, args, strict=True)))
            dims = [0 if _mapped(given) and x.shape[0] == count else None for x, given in zip(every, args, strict=True)]
            every = [
                x[0] if _mapped(given) and dim is None else x for x, given, dim in zip(every, args, dims, strict=True)
            ]
            found, places = rule(SimpleNamespace(batch_size=count), tuple(dims), *every)
        finally:
            _enter()
        return tuple(
            x if dim is None else torch._add_batch_dim(_outermost(x, dim), 0, level)
            for x, dim in zip(found, places, strict=True)
        )

    return batched


def _outermost(x: Tensor, dim: int) -> Tensor:
    """x with the mapped dim in front, in memory too: without that torch does not take views of a sample's memory."""
    x = x.movedim(dim, 0)
    return x if all(x.stride(0) >= stride for stride in x.stride()[1:]) else x.contiguous()


def _mapped(x: Any) -> bool:
    return isinstance(x, Tensor) and _is_batch(x)
