"""Second derivatives of what SDPA computed, whose own graph ends at the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashsci import recording, registry
from flashsci.backends.sdpa_kernels import laid_out
from flashsci.ops import Scalars, Tensors
from flashsci.tracing import transforming

BACKENDS = ("sdpa",)  # whose graphs end there
_GRADIENTS = 4  # of q, k, v, bias: SDPA has none of key weights


def differentiable_twice(out: Tensor, tensors: Tensors, scalars: Scalars) -> Tensor:
    """``out`` of SDPA's graph, for a second derivative too where one may be asked for."""
    if torch.compiler.is_compiling() or not out.requires_grad or transforming():
        return out
    result: Tensor = SecondOrder.apply(out, scalars, *tensors)
    return result


def first_order(tensors: Tensors) -> Tensors:
    """The tensors as SDPA takes them on a GPU: cuDNN's backward, asked without a gradient, gives one that has no
    derivative, and a recorded backward would carry it along."""
    if not tensors.q.is_cuda or torch.compiler.is_compiling() or transforming():
        return tensors
    return Tensors(*FirstOrder.apply(*tensors[:_GRADIENTS]), *tensors[_GRADIENTS:])


class FirstOrder(torch.autograd.Function):
    """Tensors as they are; what comes back to them in a backward that is recorded goes no further."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        same = tuple(None if x is None else x.view_as(x) for x in tensors)
        wanted = zip(same, ctx.needs_input_grad, strict=True)
        ctx.mark_non_differentiable(*(x for x, need in wanted if x is not None and not need))
        return same

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * len(gradients) if torch.is_grad_enabled() else gradients


class SecondOrder(torch.autograd.Function):
    """``out`` of SDPA's graph, as it is. A plain backward goes on into that graph. One that is recorded for
    a derivative of its own turns off here: its gradients of q, k, v, bias are those of Triton's kernels
    where they can serve the call, else the reference's, either after a forward of its own."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, scalars: Scalars, *tensors: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.scalars, ctx.strides = scalars, out.stride()
        # Not a view to autograd: users may write to it, as to what SDPA returns.
        return out.detach()

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Any, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if dout is None:
            return tuple(gradients)
        if not (torch.is_grad_enabled() or transforming()):
            gradients[0] = laid_out(dout, ctx.strides)
            return tuple(gradients)
        wanted = ctx.needs_input_grad[2:]
        found = recording.gradients(_again(ctx.scalars), ctx.saved_tensors, wanted, (dout,))
        return None, None, *found


def _again(scalars: Scalars) -> Callable[..., tuple[Tensor]]:
    """What computes out once more, of the tensors of a call, so that it has a derivative of every order that there is."""

    def compute(*given: Any) -> tuple[Tensor]:
        tensors = Tensors(*given)
        if tensors.q.is_cuda and registry.triton_rejects(tensors) is None:
            from flashsci.autograd import Forward  # imports the compiler

            return (Forward.apply("triton", *tensors.inner_contiguous(), *scalars)[0],)
        return (registry.kernels("reference").forward(tensors, scalars)[0],)

    return compute
