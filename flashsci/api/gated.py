"""Attention with a gate of pairs, ``out = (P * pair_gate) v``: the step from a planned call to kernels or the reference.

Triton's kernels compute a call and its derivatives to second order. Transforms that ask for more go through the reference, which
holds all scores.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.call.gate_nodes import EagerForward, Forward, GatedCalls, apply_directly, in_fp32
from flashsci.call.ops import Tensors, bypasses_dispatcher, follow_layout, raised, with_rank
from flashsci.call.plans import Call, Plan, remember
from flashsci.call.ranks import aligned
from flashsci.call.sink import in_place, with_sink
from flashsci.call.torch_state import count_flops, transforming
from flashsci.call.transforms import within_second_order


def attend(
    plan: Plan, tensors: Tensors, gate: Tensor, sink: Tensor | None, needs_grad: bool, call: Call | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of a checked dense call.

    Args:
        plan: of the call; its backend reads gates.
        tensors: as the user gives them.
        gate: broadcastable to the scores.
        call: the key and the tensors of the call, if it may be remembered.
    """
    count_flops()
    leading = plan.leading
    if leading is not None:
        whole = aligned(Tensors(tensors.q, tensors.k, tensors.v, gate), leading).bias
        assert whole is not None
        tensors, gate = aligned(tensors, leading), whole
    rank = tensors.q.dim()
    equal, full = raised(tensors, rank), with_rank(gate, rank)
    assert full is not None
    if not plan.module.FUSED:
        out, lse = reference.forward(equal, plan.scalars, sink, full)
    elif not (torch.compiler.is_compiling() or transforming()):
        given = equal.inner_contiguous()
        calls = plan.gated = plan.gated or GatedCalls(plan.choice.forward, plan.scalars)
        direct = bypasses_dispatcher((*given, full, sink))
        if given is equal and leading is None and direct and call is not None and not plan.scalars.dropout_p:
            pairs: Any = zip((*tensors, gate), (*equal, full), strict=True)
            level = all(x is None or x.dim() == y.dim() for x, y in pairs)
            remember(call, functools.partial(_again, calls, None if level else rank, needs_grad))
        out, lse = _computed(calls, direct, needs_grad, sink, (*given, full))
        if given is equal and leading is None:  # kernels lay out as q is
            return out, lse
    elif within_second_order():
        given = equal.inner_contiguous()
        out, lse = Forward.apply(plan.choice.forward, *given, full, *plan.scalars)
        out, lse = (out, lse) if sink is None else with_sink(out, lse, sink)
    else:
        out, lse = in_fp32(equal, plan.scalars, sink, full)
    out = follow_layout(out, tensors.q)
    if leading is not None and len(leading) > 2:
        out, lse = (x.unflatten(0, leading[:-1]) for x in (out, lse))
    return out, lse


def _computed(
    calls: GatedCalls, direct: bool, needs_grad: bool, sink: Tensor | None, given: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """out and lse of an eager call; ``given``: the fields of Tensors and the gate, of one rank."""
    if needs_grad:
        apply = apply_directly if direct else EagerForward.apply
        result: tuple[Tensor, Tensor] = apply(calls, direct, sink, *given)
        return result
    out, lse = (calls.forward if direct else calls.general_forward)(given[:-1], given[-1])
    return (out, lse) if sink is None else in_place(out, lse, sink)


def _again(calls: GatedCalls, rank: int | None, needs_grad: bool, given: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """A later call of plain tensors: the fields of Tensors, the sink and the gate; ``rank``: to which they are raised."""
    *tensors, sink, gate = given
    if rank is not None:
        tensors, gate = list(raised(tensors, rank)), with_rank(gate, rank)
    return _computed(calls, True, needs_grad, sink, (*tensors, gate))
