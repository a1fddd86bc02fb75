"""Attention with a gate of pairs, ``out = (P * pair_gate) v``: the step from a planned call to kernels or the reference.

Triton's kernels compute a call and its gradients. Derivatives of derivatives, tangents and transforms go through the
reference, which holds all scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.api.attention import aligned
from flashsci.backends import reference
from flashsci.call import recompute
from flashsci.call.gate_ops import NEED_GATE, GatedKernels
from flashsci.call.ops import Saved, Scalars, Tangents, Tensors, follow_layout, raised, with_rank
from flashsci.call.plans import Plan
from flashsci.call.sink import with_sink
from flashsci.call.torch_state import count_flops, transforming
from flashsci.choice import backends

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
        tensors = tensors.inner_contiguous()
        kernels = plan.module.gated.OPS
        out, lse = Gated.apply(kernels, plan.scalars, full, *tensors)
        if sink is not None:
            out, lse = with_sink(out, lse, sink)
    else:
        out, lse = reference.forward(tensors, plan.scalars, sink, full)
    out = follow_layout(out, tensors.q)
    if leading is not None and len(leading) > 2:
        out, lse = (x.unflatten(0, leading[:-1]) for x in (out, lse))
    return out, lse


class Gated(torch.autograd.Function):
    """out, lse of gated attention.

    Kernels compute a plain backward. A backward that is recorded for a derivative of its own goes through the reference.
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: GatedKernels, scalars: Scalars, gate: Tensor, *given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernels.forward(Tensors(*given), gate, scalars)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        ctx.kernels, ctx.scalars = kernels, scalars
        ctx.save_for_backward(gate, *given, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        gate, *given, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2 : 3 + _LEAVES]
        none = (None,) * (_TENSORS - _LEAVES)
        if dout is None and dlse is None:
            return (None, None, *(None,) * len(wanted), *none)
        if torch.is_grad_enabled() or transforming():
            found = _recorded(ctx.scalars, gate, given, wanted, dout, dlse)
        else:
            found = _by_kernels(ctx, gate, given, wanted, dout, dlse, out, lse)
        return (None, None, *found, *none)


def _by_kernels(
    ctx: Any,
    gate: Tensor,
    given: Sequence[Any],
    wanted: Sequence[bool],
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> list[Tensor | None]:
    """Gradients of the gate, then of the leaves, None where not wanted."""
    of_gate, *of_leaves = wanted
    need = sum(1 << i for i, want in enumerate(of_leaves) if want) | (NEED_GATE if of_gate else 0)
    saved = Saved(Tensors(*given).inner_contiguous(), out, lse, ctx.scalars)
    *leaves, dgate = ctx.kernels.backward(dout, dlse, saved, gate, need)
    return [dgate if of_gate else None, *(x if want else None for x, want in zip(leaves, of_leaves, strict=True))]


def _recorded(
    scalars: Scalars,
    gate: Tensor,
    given: Sequence[Any],
    wanted: Sequence[bool],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:
    """The same with gradients of their own."""
    leaves, others = given[:_LEAVES], given[_LEAVES:]

    def compute(gate: Tensor, *leaves: Any) -> tuple[Tensor, Tensor]:
        return reference.forward(Tensors(*leaves, *others), scalars, None, gate)

    return recompute.gradients(compute, [gate, *leaves], wanted, (dout, dlse))
