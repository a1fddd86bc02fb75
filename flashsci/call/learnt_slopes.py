"""The gradient of ALiBi slopes: one more pass over the scores, behind a call whose kernels treat the slopes as constants.

With dS the gradient of the scores, the slope of a head has the gradient -sum_ij dS_ij |i + shift - j|. Triton computes the
sums over keys from q, k, v, out and lse of any fused backend (``slope_sums`` of flashsci/backends/triton/plans/dense.py).

A backward that is recorded for a derivative of its own, or whose tensors are not ordinary ones, goes through the reference
instead, which has every order.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from flashsci.call import recompute
from flashsci.call.ops import Saved, Tensors, bypasses_dispatcher
from flashsci.call.plans import Plan

_SLOPES = Tensors._fields.index("alibi_slopes")
_BEFORE = 3  # the arguments of the node before its tensors


def are_learnt(tensors: Tensors) -> bool:
    """Whether the gradient of the slopes of an eager call is wanted."""
    slopes = tensors.alibi_slopes
    return slopes is not None and slopes.requires_grad and torch.is_grad_enabled()


def attend(plan: Plan, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """out and lse of an eager call of a fused backend, differentiable in the slopes, too."""
    from flashsci.call.autograd import EagerForward  # imports the compiler

    constant = tensors._replace(alibi_slopes=tensors.alibi_slopes.detach())  # type: ignore[union-attr]
    direct = bypasses_dispatcher(constant)
    ready = plan.to_save(constant, True, direct)
    out, lse = EagerForward.apply(plan, direct, *ready)
    result: tuple[Tensor, Tensor] = LearntSlopes.apply(
        plan, out, lse, *ready._replace(alibi_slopes=tensors.alibi_slopes)
    )
    return result


class LearntSlopes(torch.autograd.Function):
    """out and lse themselves, which depend on the slopes from here on."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, out: Tensor, lse: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, out, lse)
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        plan, wanted = ctx.plan, ctx.needs_input_grad[_BEFORE:]
        if dout is None and dlse is None:
            return (None,) * (_BEFORE + len(wanted))
        if torch.is_grad_enabled() or not bypasses_dispatcher((dout, dlse, *tensors, out, lse)):
            # All gradients come from here: none goes on to the kernels.
            found = recompute.gradients(_by_reference(plan), tensors, wanted, (dout, dlse))
            return None, None, None, *found
        gradients: list[Tensor | None] = [None] * len(wanted)
        if wanted[_SLOPES]:
            given = Tensors(*tensors)
            laid_out = plan.raised(given).laid_out()
            saved = Saved(laid_out, out, lse, plan.scalars)
            gradients[_SLOPES] = _summed(_triton().slope_sums(dout, dlse, saved), given)
        return None, dout, dlse, *gradients


def _by_reference(plan: Plan) -> Any:
    reference = importlib.import_module("flashsci.backends.reference")
    return lambda *tensors: reference.forward(plan.raised(tensors), plan.scalars)


def _triton() -> Any:
    return importlib.import_module("flashsci.backends.triton.plans.dense")


def _summed(sums: Tensor, tensors: Tensors) -> Tensor:
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
