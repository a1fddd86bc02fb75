"""Second derivatives of calls that SDPA computed; SDPA's own graph ends at the first derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.backends import sdpa
from flashsci.backends.sdpa_kernels import laid_out
from flashsci.call import recompute
from flashsci.call.ops import Given, Scalars, Tensors, fake_forward, follow_layout
from flashsci.call.torch_state import transforming
from flashsci.choice import backends, differentiate
from flashsci.choice.gradients import named, written

BACKENDS = ("sdpa",)  # backends whose graphs end there


def differentiable_twice(out: Tensor, tensors: Tensors, scalars: Scalars) -> Tensor:
    """``out`` of SDPA's graph, made twice differentiable where a second derivative may be wanted."""
    if torch.compiler.is_compiling() or not out.requires_grad or transforming():
        return out
    result: Tensor = SecondOrder.apply(out, scalars, *tensors)
    return result


def first_order(tensors: Tensors) -> Tensors:
    """The tensors as SDPA takes them on a GPU.

    Without a request for a gradient, cuDNN's backward still returns one that has no derivative, and a recorded
    backward would carry it along.
    """
    if not tensors.q.is_cuda or torch.compiler.is_compiling() or transforming():
        return tensors
    # SDPA has no gradient of key weights.
    q, k, v, bias = FirstOrder.apply(tensors.q, tensors.k, tensors.v, tensors.bias)
    return tensors._replace(q=q, k=k, v=v, bias=bias)


#: The node of cuDNN's forward, which alone returns a gradient without a request for one.
UNREQUESTED = "ScaledDotProductCudnnAttentionBackward0"


def prepared(tensors: Tensors, scalars: Scalars, needs_grad: bool) -> Callable[[Given], tuple[Tensor, None]] | None:
    """A function that computes calls of plain tensors like these by SDPA, as :func:`first_order`, its forward and
    :func:`differentiable_twice` do; None where these have more to do than for q, k, v alone."""
    forward = sdpa.prepared(tensors, scalars)
    if forward is None:
        return None
    strides = fake_forward(tensors)[0].stride()

    def run(given: Given) -> tuple[Tensor, None]:
        q, k, v = given[0], given[1], given[2]
        out = forward(q, k, v)
        if needs_grad:
            node = out.grad_fn
            if node is not None and type(node).__name__ == UNREQUESTED:
                node.register_hook(_ends)
            out = apply_directly(out, scalars, *given)
        return (out if out.stride() == strides else follow_layout(out, q)), None

    return run


def _ends(gradients: Sequence[Tensor | None], _: Any) -> tuple[None, ...] | None:
    """A hook of SDPA's node: in a recorded backward its gradients go no further."""
    return (None,) * len(gradients) if torch.is_grad_enabled() else None


class FirstOrder(torch.autograd.Function):
    """The tensors unchanged; in a recorded backward, gradients that return to them go no further."""

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
    """``out`` of SDPA's graph, unchanged, with a second derivative.

    A plain backward goes on into SDPA's graph. A backward that is recorded for a derivative of its own does not: its
    gradients of q, k, v, bias are those of Triton's kernels if they can serve the call, else the reference's, either
    after a forward of its own.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, scalars: Scalars, *tensors: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.scalars, ctx.strides = scalars, out.stride()
        # autograd must not see a view: users may write to it, as to SDPA's own result.
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
        found = recompute.gradients(_again(ctx.scalars), ctx.saved_tensors, wanted, (dout,))
        return None, None, *found


#: ``apply`` without the search for functorch's tensors, for plain ones.
apply_directly = super(torch.autograd.Function, SecondOrder).apply


def _again(scalars: Scalars) -> Callable[..., tuple[Tensor]]:
    """A function that computes out again from the tensors of a call, with derivatives of every available order."""

    def compute(*given: Any) -> tuple[Tensor]:
        tensors = Tensors(*given)
        if tensors.q.is_cuda and differentiate.triton_rejects(tensors) is None:
            from flashsci.call.autograd import Forward  # imports the compiler

            return (Forward.apply(written(named("triton")), *tensors.inner_contiguous(), *scalars)[0],)
        return (backends.kernels("reference").forward(tensors, scalars)[0],)

    return compute
