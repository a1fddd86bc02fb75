"""The check of an argument without derivatives, as a node of the graph of a compiler that traces transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsci.call.derivatives import Asked, refuse


class Undifferentiable(torch.autograd.Function):
    """An argument without derivatives where a compiler traces transforms: it refuses those that they want.

    A compiler's tensors do not show what transforms want of them. The output is not used. ``recording``: grad mode at
    the call.
    """

    @staticmethod
    def forward(x: Tensor, entry: str, argument: str, recording: bool) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.entry, ctx.argument, recording = inputs
        if recording and ctx.needs_input_grad[0]:
            refuse(ctx.entry, Asked.REVERSE, [ctx.argument])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse(ctx.entry, Asked.FORWARD, [ctx.argument])

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *names: Any) -> tuple[Tensor, Any]:
        entry, argument, _ = names
        refuse(entry, Asked.MAPPED, [argument])
        return Undifferentiable.apply(x, *names), in_dims[0]


# Dynamo cannot trace Functions that define jvp; as a graph node it compiles.
torch.compiler.allow_in_graph(Undifferentiable)
