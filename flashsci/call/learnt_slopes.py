"""The gradient of ALiBi slopes: one more pass over the scores, in the backward of calls whose slopes are learnt.

With dS the gradient of the scores, the slope of a head has the gradient -sum_ij dS_ij |i + shift - j|. The backend of the
other gradients, which are those of any call, computes the sums over keys: ``slope_sums`` of flashsci/backends/cuda and of
flashsci/backends/triton/plans/dense.py.

A backward that is recorded for a derivative of its own, or whose tensors are not ordinary ones, goes through the reference
instead, which has every order.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from flashsci.call import recompute
from flashsci.call.ops import Saved, Tangents, Tensors, bypasses_dispatcher
from flashsci.call.plans import Plan

_SLOPES = Tensors._fields.index("alibi_slopes")
_LEAVES = len(Tangents._fields)  # the tensors that have gradients in kernels come first


def are_learnt(tensors: Tensors) -> bool:
    """Whether the gradient of the slopes of an eager call is wanted."""
    slopes = tensors.alibi_slopes
    return slopes is not None and slopes.requires_grad and torch.is_grad_enabled()


def attend(plan: Plan, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """out and lse of an eager call of fused kernels, differentiable in the slopes, too."""
    direct = bypasses_dispatcher(tensors)
    result: tuple[Tensor, Tensor] = LearntSlopes.apply(plan, direct, *plan.to_save(tensors, True, direct))
    return result


class LearntSlopes(torch.autograd.Function):
    """out, lse = attention whose slopes have a gradient, eagerly; the inputs are those of ``EagerForward``."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, direct: bool, *tensors: Any) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = (
            plan.prepared(tensors)(tensors) if direct else plan.module.forward(Tensors(*tensors), plan.scalars)
        )
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, *output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        plan, wanted = ctx.plan, ctx.needs_input_grad[2:]
        if dout is None and dlse is None:
            return (None,) * (2 + len(wanted))
        if torch.is_grad_enabled() or not bypasses_dispatcher((dout, dlse, *tensors, out, lse)):
            return None, None, *recompute.gradients(_by_reference(plan), tensors, wanted, (dout, dlse))
        from flashsci.call.autograd import eager_backward  # imports the compiler
        from flashsci.choice.differentiate import slope_sums

        need = sum(1 << i for i, x in enumerate(wanted[:_LEAVES]) if x)
        found = eager_backward(plan, dout, dlse, ctx.saved_tensors, need) if need else ()
        gradients = [x if wanted[i] else None for i, x in enumerate(found)]
        gradients += [None] * (len(wanted) - len(gradients))
        if wanted[_SLOPES]:
            given = Tensors(*tensors)
            saved = Saved(plan.raised(given).laid_out(), out, lse, plan.scalars)
            gradients[_SLOPES] = of_rows(slope_sums(plan.choice, dout, dlse, saved), given)
        return None, None, *gradients


def _by_reference(plan: Plan) -> Any:
    reference = importlib.import_module("flashsci.backends.reference")
    return lambda *tensors: reference.forward(plan.raised(tensors), plan.scalars)


def of_rows(sums: Tensor, tensors: Tensors) -> Tensor:
    """The sums of rows [*, Hq, Sq] as the gradient of slopes in their shape."""
    slopes, edges = tensors.alibi_slopes, tensors.cu_seqlens_q
    assert slopes is not None
    wide = sums.to(torch.float64)
    if edges is not None and slopes.dim() == 2 and slopes.shape[0] > 1:  # rows of no sequence have sums of zero
        total = torch.segment_reduce(wide.t().contiguous(), "sum", offsets=edges.long(), axis=0, unsafe=True)
    else:
        total = wide.sum(-1)
    if total.dim() < slopes.dim():
        total = total.reshape((1,) * (slopes.dim() - total.dim()) + total.shape)
    return total.sum_to_size(slopes.shape).to(slopes.dtype)
