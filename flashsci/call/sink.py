"""Attention sinks: one more logit per head in the softmax, without a value. Kernels do not compute them.

With out and lse of the keys alone, and s the sink of their head, those of keys and sink are

    out' = sigmoid(lse - s) out;  lse' = log(e^lse + e^s)

Kernels recompute P = exp(S - lse) from the given lse. With out' and lse' their gradients are therefore those with the
sink. The sink's own gradient is -sum_rows e^(s - lse') delta with delta = <dout, out'> - dlse'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flashsci.call import recompute
from flashsci.call.ops import Given, Tangents, Tensors, bypasses_dispatcher, follow_layout
from flashsci.call.plans import Call, Plan, Run, remember
from flashsci.call.row_pitch import whole_rows
from flashsci.call.torch_state import transforming
from flashsci.choice.gradients import written


def attend(
    plan: Plan,
    tensors: Tensors,
    sink: Tensor,
    needs_grad: bool,
    call: Call | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse with a sink [Hq], differentiable to the order of the backend. ``call``: as in ``dispatch.run``."""
    module, scalars = plan.module, plan.scalars
    found: tuple[Tensor, Tensor]
    if not module.FUSED:  # the reference; SDPA refuses
        out, lse = module.forward(plan.raised(tensors), scalars, sink)
        return follow_layout(out, tensors.q), lse
    if torch.compiler.is_compiling() or transforming():
        from flashsci.call.autograd import Forward  # imports the compiler

        given = whole_rows(plan.tabled(plan.raised(tensors).inner_contiguous()))
        out, lse = Forward.apply(written(plan.choice), *given, *scalars)
        return with_sink(out, lse, sink)
    direct = bypasses_dispatcher((*tensors, sink))
    tensors = plan.to_save(tensors, needs_grad, direct)
    if needs_grad:
        found = SinkForward.apply(plan, direct, sink, *tensors)
    else:
        run = plan.prepared(tensors) if direct else _general(plan)
        found = in_place(*run(tensors), sink)
    if direct and call is not None and plan.as_given and plan.leading is None and not scalars.dropout_p:
        remember(call, _again(plan, tensors, needs_grad))
    return found


def _again(plan: Plan, tensors: Tensors, needs_grad: bool) -> Run:
    """A run of later calls of plain tensors like these, with the sink behind them."""
    if needs_grad:

        def record(given: Given) -> tuple[Tensor, Tensor]:
            *tensors, sink = given
            result: tuple[Tensor, Tensor] = SinkForward.apply(plan, True, sink, *tensors)
            return result

        return record
    prepared = plan.prepared(tensors)

    def run(given: Given) -> tuple[Tensor, Tensor]:
        out, lse = prepared(given[:-1])
        return in_place(out, lse, given[-1])

    return run


def _general(plan: Plan) -> Run:
    """The forward of a plan through torch's dispatcher."""
    return lambda tensors: plan.module.forward(Tensors(*tensors), plan.scalars)


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """out' [*, Hq, Sq, Dv] and lse' [*, Hq, Sq]; all derivatives are those of the formula."""
    share, whole = _share(lse, sink, differentiable=True)
    neither = (lse == -torch.inf) & (_column(sink, lse) == -torch.inf)  # sink nor keys: no derivative
    return (out * share.unsqueeze(-1)).to(out.dtype), whole.masked_fill(neither, -torch.inf)


def in_place(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The same, for an out that nothing else uses: one pass over it, rounded once."""
    share, whole = _share(lse, sink)
    return out.mul_(share.unsqueeze(-1)), whole


def _share(lse: Tensor, sink: Tensor, differentiable: bool = False) -> tuple[Tensor, Tensor]:
    """The share that the sink leaves to the keys, and lse'. Rows that see no key have lse -inf, and so may heads
    without a sink.

    differentiable: whether autograd derives them. It derives sigmoid from its result, whose distance from 1 is the share
    of the sink, and is lost where the sink takes little; so there the share is e^(lse - lse').
    """
    column = _column(sink, lse)
    nothing = lse == -torch.inf
    lse = lse.masked_fill(nothing, 0)
    more = lse - column
    beyond = softplus(-more)
    share = torch.sigmoid(more)
    if differentiable:
        share = torch.where(more > 0, torch.exp(-beyond), share)
    # From the larger of the two: nothing cancels.
    whole = torch.where(more > 0, lse + beyond, column + softplus(more))
    return share.masked_fill(nothing, 0), torch.where(nothing, column, whole)


def _column(sink: Tensor, lse: Tensor) -> Tensor:
    """sink in the shape that broadcasts to lse [*, Hq, Sq], or [Sq] without heads."""
    sink = sink.to(lse.dtype)
    return sink.unsqueeze(-1) if lse.dim() > 1 else sink


class SinkForward(torch.autograd.Function):
    """out, lse = attention with a sink, eagerly.

    A plain backward is the kernels' own with out' and lse'. A backward that is recorded for a derivative of its own
    runs another forward, and then goes through the graph of :func:`with_sink`.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, direct: bool, sink: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        run = plan.prepared(tensors) if direct else _general(plan)
        output = in_place(*run(tensors), sink)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.save_for_backward(sink, *tensors, *output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        sink, *tensors, out, lse = ctx.saved_tensors
        plan, wanted = ctx.plan, ctx.needs_input_grad[2:]
        if dout is None and dlse is None:
            return (None,) * (2 + len(wanted))
        if torch.is_grad_enabled() or transforming():  # for a derivative of its own
            return None, None, *_recorded(plan, [sink, *tensors], wanted, dout, dlse)
        from flashsci.call.autograd import eager_backward  # imports the compiler

        need = sum(1 << i for i, x in enumerate(wanted[1 : 1 + len(Tangents._fields)]) if x)
        saved = (*tensors, out, lse)
        found = eager_backward(plan, dout, dlse, saved, need) if need else ()
        gradients = [x if wanted[1 + i] else None for i, x in enumerate(found)]
        gradients += [None] * (len(tensors) - len(gradients))
        dsink = sink_gradient(dout, dlse, out, lse, sink) if wanted[0] else None
        return None, None, dsink, *gradients


def _recorded(
    plan: Plan,
    given: list[Any],
    wanted: tuple[bool, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:
    """Gradients of sink and tensors that have gradients themselves."""
    from flashsci.call.autograd import EagerForward  # imports the compiler

    def compute(sink: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        # Saved-tensor hooks may have brought back other strides than kernels take.
        out, lse = EagerForward.apply(plan, False, *plan.raised(tensors).laid_out())
        return with_sink(out, lse, sink)

    return recompute.gradients(compute, given, wanted, (dout, dlse))


def sink_gradient(dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """-sum_rows e^(s - lse') (<dout, out'> - dlse'), in lse's dtype; zero in rows without sink and keys."""
    column = _column(sink, lse)
    p = torch.where(lse == -torch.inf, 0, torch.exp(column - lse))
    delta = torch.zeros_like(lse)
    if dout is not None:
        delta = (dout.to(lse.dtype) * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    terms = p * delta
    other_dims = [d for d in range(terms.dim()) if d != max(0, terms.dim() - 2)]
    total = terms.sum(other_dims) if terms.dim() > 1 else terms.sum(0, keepdim=True)
    return -total.to(sink.dtype)
