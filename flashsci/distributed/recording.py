"""The common part of the autograd functions over a forward and a backward op.

A backward that is recorded, for a derivative of its own, goes through a function that collects the whole tensors
instead: that function has derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.call import recompute
from flashsci.call.torch_state import transforming

Attend = Callable[..., tuple[Tensor, Tensor]]


def forward(ctx: Any, op: Attend, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """out and lse from tensors and, as the last argument, the text of the call."""
    out, lse = op(*inputs)
    ctx.call = inputs[-1]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:-1], out, lse)
    return out, lse


def backward(
    ctx: Any,
    op: Callable[..., Sequence[Tensor | None]],
    collected: Attend,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Any, ...]:
    """The gradients of all inputs, None for inputs that need none."""
    *tensors, out, lse = ctx.saved_tensors
    if transforming() or (torch.is_grad_enabled() and not torch.compiler.is_compiling()):
        needs = ctx.needs_input_grad[: len(tensors)]
        compute = functools.partial(_with_text, collected, ctx.call)
        found: Sequence[Tensor | None] = recompute.gradients(compute, tensors, needs, (dout, dlse))
    else:
        dout = torch.zeros_like(out) if dout is None else dout
        found = op(dout, dlse, *tensors, out.detach(), lse.detach(), ctx.call)
    wanted = zip(found, ctx.needs_input_grad, strict=False)
    rest = len(ctx.needs_input_grad) - len(found)
    return (*(g if need else None for g, need in wanted), *(None,) * rest)


def _with_text(function: Attend, text: str, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    return function(*tensors, text)
