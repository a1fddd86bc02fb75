"""Attention with a gate of pairs, ``out = (P * pair_gate) v``: the step from a planned call to kernels or the reference.

Triton's kernels compute a call and its gradients. Derivatives of derivatives, tangents and transforms go through the
reference, which holds all scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.call import recompute
from flashsci.call.gate_ops import NEED_GATE, GatedKernels
from flashsci.call.ops import Saved, Scalars, Tangents, Tensors, follow_layout, raised, with_rank
from flashsci.call.plans import Plan
from flashsci.call.ranks import aligned
from flashsci.call.sink import in_place, sink_gradient
from flashsci.call.torch_state import count_flops, transforming

_TENSORS, _LEAVES = len(Tensors._fields), len(Tangents._fields)


def attend(plan: Plan, tensors: Tensors, gate: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and lse of a checked dense call.

    Args:
        plan: of the call; its backend reads gates.
        tensors: as the user gives them.
        gate: broadcastable to the scores.
    """
    count_flops()
    leading = plan.leading
    if leading is not None:
        whole = aligned(Tensors(tensors.q, tensors.k, tensors.v, gate), leading).bias
        assert whole is not None
        tensors, gate = aligned(tensors, leading), whole
    rank = tensors.q.dim()
    tensors, full = raised(tensors, rank), with_rank(gate, rank)
    assert full is not None
    if plan.module.FUSED and not transforming():
        given = tensors.inner_contiguous()
        out, lse = Gated.apply(plan.module.gated.OPS, plan.scalars, sink, full, *given)
    elif plan.module.FUSED:
        out, lse = _in_fp32(tensors, plan.scalars, sink, full)
    else:
        out, lse = reference.forward(tensors, plan.scalars, sink, full)
    out = follow_layout(out, tensors.q)
    if leading is not None and len(leading) > 2:
        out, lse = (x.unflatten(0, leading[:-1]) for x in (out, lse))
    return out, lse


def _in_fp32(tensors: Tensors, scalars: Scalars, sink: Tensor | None, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The reference as kernels compute: scores and P of 16-bit tensors in fp32."""
    wide: list[Any] = [x.float() if x is not None and x.is_floating_point() else x for x in tensors]
    with torch.autocast(tensors.q.device.type, enabled=False):
        out, lse = reference.forward(Tensors(*wide), scalars, sink, gate)
    return out.to(tensors.q.dtype), lse


class Gated(torch.autograd.Function):
    """out, lse of gated attention.

    Kernels compute a plain backward from out and lse with the sink (flashsci/call/sink.py). A backward that is recorded for a
    derivative of its own goes through the reference.
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: GatedKernels, scalars: Scalars, sink: Tensor | None, gate: Tensor, *given: Any
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernels.forward(Tensors(*given), gate, scalars)
        if sink is not None:
            out, lse = in_place(out, lse, sink)
        ctx.set_materialize_grads(False)
        ctx.kernels, ctx.scalars = kernels, scalars
        ctx.save_for_backward(sink, gate, *given, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        sink, gate, *given, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2 : 4 + _LEAVES]
        if dout is None and dlse is None:
            found: list[Tensor | None] = [None] * len(wanted)
        elif torch.is_grad_enabled() or transforming():
            found = _recorded(ctx.scalars, (sink, gate, *given), wanted, dout, dlse)
        else:
            saved = Saved(Tensors(*given).inner_contiguous(), out, lse, ctx.scalars)
            found = _by_kernels(ctx.kernels, sink, gate, saved, wanted, dout, dlse)
        return (None, None, *found, *(None,) * (_TENSORS - _LEAVES))


def _by_kernels(
    kernels: GatedKernels,
    sink: Tensor | None,
    gate: Tensor,
    saved: Saved,
    wanted: Sequence[bool],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:
    """Gradients of the sink, the gate and the leaves, None where not wanted."""
    of_sink, of_gate, *of_leaves = wanted
    need = sum(1 << i for i, want in enumerate(of_leaves) if want) | (NEED_GATE if of_gate else 0)
    *leaves, dgate = kernels.backward(dout, dlse, saved, gate, need)
    dsink = None
    if of_sink:
        assert sink is not None
        dsink = sink_gradient(dout, dlse, saved.out, saved.lse, sink)
    rows = (x if want else None for x, want in zip(leaves, of_leaves, strict=True))
    return [dsink, dgate if of_gate else None, *rows]


def _recorded(
    scalars: Scalars, given: Sequence[Any], wanted: Sequence[bool], dout: Tensor | None, dlse: Tensor | None
) -> list[Tensor | None]:
    """The same with gradients of their own. ``given``: sink, gate, and the fields of Tensors."""
    count = len(wanted)

    def compute(sink: Tensor | None, gate: Tensor, *leaves: Any) -> tuple[Tensor, Tensor]:
        return _in_fp32(Tensors(*leaves, *given[count:]), scalars, sink, gate)

    return recompute.gradients(compute, given[:count], wanted, (dout, dlse))
