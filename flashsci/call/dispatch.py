"""The step from a planned call to the kernels of its backend, with autograd nodes where needed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashsci.api.dropout import check_dropout, draw_seed
from flashsci.call import arguments, learnt_slopes, second_order
from flashsci.call.ops import Given, Tensors, bypasses_dispatcher, follow_layout
from flashsci.call.plans import Call, Plan, Run, remember
from flashsci.call.row_pitch import whole_rows
from flashsci.call.torch_state import count_flops, transforming_eagerly
from flashsci.choice.gradients import written


def run(
    plan: Plan,
    tensors: Tensors,
    needs_grad: bool,
    sink: Tensor | None = None,
    call: Call | None = None,
    around: Callable[[Run], Run] = lambda run: run,
    reads_lse: bool = True,
    record: Callable[[Plan], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of the backend that a plan names, with autograd nodes where needed.

    Args:
        call: the key and the tensors of the call, if it may be remembered; a seed of dropout was drawn then, not given.
        around: wraps the function that computes from these tensors into one that computes the whole call.
        reads_lse: whether the caller reads the lse.
        record: computes and records a call whose tensors kernels take as given, as its repeats do.
    """
    module = plan.module
    count_flops()
    if sink is not None:
        from flashsci.call.sink import attend

        return attend(plan, tensors, sink, needs_grad, call)
    if not module.FUSED:
        if call is not None and plan.settled and not plan.scalars.dropout_p and bypasses_dispatcher(tensors):
            remember(call, around(_again_unfused(plan, tensors, needs_grad)))
        found = _unfused(plan, needs_grad, tensors)
        plan.settled = True
        return found
    # A compiler does not say which transforms it traces: there, a gradient may always be wanted.
    if torch.compiler.is_compiling() or transforming_eagerly():
        # Code that a compiler traces imports nothing from the package itself: torch before 2.12 accepts only modules
        # of ModuleType.
        from flashsci.call.autograd import Forward

        given = whole_rows(plan.tabled(plan.raised(tensors).inner_contiguous()))
        result: tuple[Tensor, Tensor] = Forward.apply(written(plan.choice), *given, *plan.scalars)
        return result
    if needs_grad and learnt_slopes.are_learnt(tensors):
        return learnt_slopes.attend(plan, tensors)
    direct = bypasses_dispatcher(tensors)
    if direct and call is not None and plan.settled:
        again = _again(plan, tensors, needs_grad, reads_lse)
        remember(call, around(_drawing(again) if plan.scalars.dropout_p else again))
    tensors = plan.to_save(tensors, needs_grad, direct)
    if needs_grad and record is not None and direct and plan.as_given:
        return record(plan)
    if needs_grad:
        nodes = _nodes()
        apply = nodes.apply_directly if direct else nodes.EagerForward.apply
        result = apply(plan, direct, *tensors)
        return result
    return plan.prepared(tensors)(tensors) if direct else module.forward(tensors, plan.scalars)


def _unfused(plan: Plan, needs_grad: bool, given: Given) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of a backend whose graph is autograd's own."""
    tensors = plan.raised(given)
    twice = needs_grad and plan.choice.forward in second_order.BACKENDS
    first = second_order.first_order(tensors) if twice else tensors
    out, lse = plan.module.forward(first, plan.scalars)
    if twice:
        out = second_order.differentiable_twice(out, tensors, plan.scalars)
    return follow_layout(out, tensors.q), lse


def _again_unfused(plan: Plan, tensors: Tensors, needs_grad: bool) -> Any:
    """A run of later calls of plain tensors like these, by such a backend."""
    if plan.rank is None and plan.choice.forward in second_order.BACKENDS:
        found = second_order.prepared(tensors, plan.scalars, needs_grad)
        if found is not None:
            return found
    return functools.partial(_unfused, plan, needs_grad)


def _again(plan: Plan, tensors: Tensors, needs_grad: bool, reads_lse: bool) -> Run:
    """A run of later calls of plain tensors like these."""
    if needs_grad:
        record = _nodes().apply_directly

        def run(given: Given) -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = record(plan, True, *given)
            return result

    elif plan.as_given:
        prepared = plan.prepared(tensors)
        discarding = None if reads_lse else getattr(prepared, "without_lse", None)
        return prepared if discarding is None else discarding()
    else:

        def run(given: Given) -> tuple[Tensor, Tensor]:
            return plan.prepared(given)(given)

    if plan.as_given:
        return run
    return lambda given: run(plan.ready(Tensors(*given), needs_grad, True))


_SEED = Tensors._fields.index("dropout_seed")


def _drawing(run: Run) -> Run:
    """The run with a fresh seed for each call, as calls that are given none draw it."""

    def drawn(given: Given) -> tuple[Tensor, Tensor]:
        return run((*given[:_SEED], draw_seed(given[0].device), *given[_SEED + 1 :]))

    return drawn


@functools.cache
def _nodes() -> Any:
    """flashsci.call.autograd, which imports the compiler: not loaded before it is needed."""
    return importlib.import_module("flashsci.call.autograd")


def seed_for(q: Tensor, dropout_p: float, dropout_seed: Tensor | None) -> Tensor:
    """The given seed, checked and contiguous, or a fresh one."""
    if dropout_seed is None:
        return draw_seed(q.device)
    check_dropout(dropout_p, dropout_seed)
    arguments.check_type("dropout_seed", dropout_seed)
    arguments.same_device(q, dropout_seed=dropout_seed)
    return dropout_seed.contiguous()
