"""The one place where the forward and backward of fused kernels are wired into autograd.

Two nodes: :class:`Forward` calls :class:`Backward` as a node of its own, so that a derivative of a
derivative has somewhere to go. Fused kernels have no second order yet: ``Backward`` refuses instead
of dropping the term, under ``loss.backward()`` and ``torch.autograd.grad(loss, parameters)`` alike
(it keeps q, k, v as inputs, so autograd cannot prune it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci import registry
from flashsci.ops import NEED_BIAS, NEED_K, NEED_Q, NEED_V, SCALARS, TENSORS

_NEEDS = (NEED_Q, NEED_K, NEED_V, NEED_BIAS)
_REST = len(TENSORS) - len(_NEEDS) + len(SCALARS)  # arguments after q, k, v, bias


def _refuse(what: str) -> Any:
    raise registry.BackendError(
        f"flashsci: {what} through a fused kernel is not supported yet (it would otherwise be "
        "dropped silently); "
        "compute this call with backend='reference', which differentiates to any order"
    )


class Forward(torch.autograd.Function):
    """out, lse = attention; inputs are the backend's name, then ops.TENSORS and ops.SCALARS."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
        return registry.kernels(backend).forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.backend = inputs[0]
        ctx.save_for_backward(*inputs[1 : 1 + len(TENSORS)], *output)
        ctx.scalars = inputs[1 + len(TENSORS) :]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        need = sum(
            bit for bit, wanted in zip(_NEEDS, ctx.needs_input_grad[1:5], strict=True) if wanted
        )
        gradients: tuple[Tensor | None, ...] = (None,) * 4
        if dout is not None or dlse is not None:
            # out and lse are constants of the backward: its derivative formula already holds their
            # dependence.
            found = Backward.apply(
                ctx.backend, dout, dlse, *tensors, out.detach(), lse.detach(), *ctx.scalars, need
            )
            gradients = tuple(
                g if need & bit else None for g, bit in zip(found, _NEEDS, strict=True)
            )
        return (None, *gradients, *(None,) * _REST)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse("a forward-mode derivative")


class Backward(torch.autograd.Function):
    """dq, dk, dv, dbias; inputs are the backend's name, dout, dlse, ops.TENSORS, out, lse,
    ops.SCALARS and ``need``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, ...]:
        return registry.kernels(backend).backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        _refuse("a second derivative")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse("a forward-mode derivative")


class EagerForward(torch.autograd.Function):
    """:class:`Forward` for plain eager calls: for a Function with ``setup_context`` torch binds a
    signature at every call, which costs more than the rest of a small one."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = Forward.forward(*inputs)
        Forward.setup_context(ctx, inputs, output)
        return output

    backward = Forward.backward
    jvp = Forward.jvp


# Dynamo cannot trace Functions that define jvp; as graph nodes they compile.
torch.compiler.allow_in_graph(Forward)
torch.compiler.allow_in_graph(Backward)
