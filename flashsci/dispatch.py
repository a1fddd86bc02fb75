"""From a checked call to the backend that serves it: plans, kept for calls that are alike, and how they run."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci import arguments, second_order
from flashsci.dropout import check_dropout, draw_seed
from flashsci.ops import Scalars, Tensors, follow_layout
from flashsci.tracing import transforming_eagerly


class Plan(NamedTuple):
    """What a call's shapes, dtypes and options decide."""

    backend: str
    module: ModuleType
    scalars: Scalars
    # Leading dims to expand q, k, v to; None: equal ranks and dims already.
    leading: tuple[int, ...] | None = None


plans: dict[tuple[Any, ...], Plan] = {}  # by what decides them; the entry point makes the keys
MOST_PLANS = 4096


def keep(key: tuple[Any, ...], plan: Plan) -> Plan:
    """The plan, found again by its key."""
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def run(
    plan: Plan, tensors: Tensors, needs_grad: bool, sink: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of the backend that a plan names, wired into autograd."""
    module = plan.module
    if sink is not None:
        from flashsci.sink import attend

        return attend(plan.backend, tensors, plan.scalars, sink, needs_grad)
    if not module.FUSED:
        twice = needs_grad and plan.backend in second_order.BACKENDS
        given = second_order.first_order(tensors) if twice else tensors
        out, lse = module.forward(given, plan.scalars)
        if twice:
            out = second_order.differentiable_twice(out, tensors, plan.scalars)
        return follow_layout(out, tensors.q), lse
    tensors = tensors.inner_contiguous()
    # A compiler does not say what transforms it traces: there, a gradient may always be wanted.
    transformed = torch.compiler.is_compiling() or transforming_eagerly()
    if needs_grad or transformed:
        from flashsci import autograd  # imports the compiler

        result: tuple[Tensor, Tensor]
        if transformed:
            result = autograd.Forward.apply(plan.backend, *tensors, *plan.scalars)
        else:
            result = autograd.EagerForward.apply(plan.backend, plan.scalars, *tensors)
        return result
    return module.forward(tensors, plan.scalars)


def seed_for(q: Tensor, dropout_p: float, dropout_seed: Tensor | None) -> Tensor:
    """The seed given, checked and contiguous, or a fresh one."""
    if dropout_seed is None:
        return draw_seed(q.device)
    check_dropout(dropout_p, dropout_seed)
    arguments.same_device(q, dropout_seed=dropout_seed)
    return dropout_seed.contiguous()
