"""Attention with a gate of pairs, ``out = (P * pair_gate) v``: the step from a planned call to kernels or the reference.

Triton's kernels compute a call and its derivatives to second order. Transforms that ask for more go through the reference, which
holds all scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.call.gate_nodes import EagerForward, Forward, in_fp32
from flashsci.call.ops import Tensors, follow_layout, raised, with_rank
from flashsci.call.plans import Plan
from flashsci.call.ranks import aligned
from flashsci.call.sink import with_sink
from flashsci.call.torch_state import count_flops, transforming
from flashsci.call.transforms import within_second_order


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
    if not plan.module.FUSED:
        out, lse = reference.forward(tensors, plan.scalars, sink, full)
    elif not (torch.compiler.is_compiling() or transforming()):
        given = tensors.inner_contiguous()
        out, lse = EagerForward.apply(plan.choice.forward, plan.scalars, sink, *given, full)
    elif within_second_order():
        given = tensors.inner_contiguous()
        out, lse = Forward.apply(plan.choice.forward, *given, full, *plan.scalars)
        out, lse = (out, lse) if sink is None else with_sink(out, lse, sink)
    else:
        out, lse = in_fp32(tensors, plan.scalars, sink, full)
    out = follow_layout(out, tensors.q)
    if leading is not None and len(leading) > 2:
        out, lse = (x.unflatten(0, leading[:-1]) for x in (out, lse))
    return out, lse
