"""What is found once for calls that are alike: whose kernels compute them, with which options, and how they are launched."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from flashsci import bias_copy, registry
from flashsci.ops import Saved, Scalars, Tensors, with_inner_keys


def signature(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What plans know of tensors: of each shape, strides, dtype and device."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def gradients(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Of which of these a call is to have gradients: never empty, so that it counts as true."""
    return tuple([x is not None and x.requires_grad for x in tensors])


class Plan:
    """What a call's tensors (by their signature) and options decide, and what computes it.

    Inside a model, between other work, a call costs the host several times what it costs in a loop: of what Python
    touches nothing is in a cache. So all that can be is found once for calls that are alike.
    """

    __slots__ = (
        "_backwards",
        "_copied",
        "_forward",
        "_leaves_bias",
        "as_given",
        "backend",
        "leading",
        "module",
        "scalars",
    )

    def __init__(
        self,
        backend: str,
        module: ModuleType,
        scalars: Scalars,
        leading: tuple[int, ...] | None = None,
    ) -> None:
        self.backend, self.module, self.scalars = backend, module, scalars
        # Leading dims to expand q, k, v to; None: equal ranks and dims already.
        self.leading = leading
        self.as_given = False  # whether kernels are known to take these tensors without a copy
        self._leaves_bias: bool | None = None  # to kernels that copy it themselves
        self._copied: Callable[[Tensor], Tensor] = with_inner_keys  # how others get it
        self._forward: Callable[[Tensors], tuple[Tensor, Tensor]] | None = None
        self._backwards: dict[tuple[Any, ...], Callable[..., tuple[Tensor | None, ...]]] = {}

    def ready(self, tensors: Tensors, needs_grad: bool, direct: bool = False) -> Tensors:
        """The tensors as kernels take them, with copies where they must be. ``direct``: they are plain (``ops.plain``)."""
        rows = tensors.inner_contiguous(None)
        if self._leaves_bias is None:
            # A copy that the gradients need as well is made here, for both.
            strided = not needs_grad and rows.has_strided_bias() and hasattr(self.module, "copies_bias")  # fmt: skip
            self._leaves_bias = strided and self.module.copies_bias(rows, self.scalars)
            if rows.has_strided_bias():
                self._copied = bias_copy.choose(rows)
        copied = self._copied if direct else with_inner_keys
        given = rows if self._leaves_bias else rows.inner_contiguous(copied)
        self.as_given = given is tensors
        return given

    def forward(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """out, lse of plain tensors, as kernels take them."""
        run = self._forward
        if run is None:
            run = self._forward = registry.prepared_forward(self.module, tensors, self.scalars)
        return run(tensors)

    def backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        need: int,
    ) -> tuple[Tensor | None, ...]:
        """dq, dk, dv, dbias, dkey_weight of plain tensors, None where ``need`` does not name them."""
        # Of all tensors: hooks of saved ones may have brought back others than were given.
        key = (need, *signature(*tensors, out, lse, dout, dlse))
        run = self._backwards.get(key)
        if run is None:
            saved = Saved(tensors, out, lse, self.scalars)
            run = registry.prepared_backward(self.backend, dout, dlse, saved, need)
            if len(self._backwards) >= MOST_BACKWARDS:
                self._backwards.clear()
            self._backwards[key] = run
        return run(dout, dlse, tensors, out, lse)


plans: dict[tuple[Any, ...], Plan] = {}  # by what decides them; the entry points make the keys
MOST_PLANS, MOST_BACKWARDS = 4096, 64


def keep(key: tuple[Any, ...], plan: Plan) -> Plan:
    """The plan, found again by its key."""
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan
