"""The autograd nodes of fused backends, to second order, in reverse and in forward mode.

There are five nodes, so that every derivative of a derivative has a node:

    Forward         backward: Backward                         jvp: Jvp
    Backward        backward: DoubleBackward                   jvp: DoubleBackward + Backward
    Jvp             backward: Backward, DoubleBackward         jvp: SecondJvp; Jvp, where the tangents alone have tangents
    DoubleBackward  backward: itself + Backward, in the tangents it is linear in; refused in all else
    SecondJvp       (both are refused)

The double backward of <tx, dx> is the tangent of the backward along tx, so one kernel serves both. out and lse enter
every node but the first detached: the formulas already hold their dependence on the other tensors. Jvp takes the tangent
of lse that forward mode has found at the level below. A backend without
second-order kernels of its own uses Triton's, with the same q, k, v, out and lse. Third order raises, both under
``loss.backward()`` and under ``torch.autograd.grad(loss, parameters)``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.call.ops import (
    PASSES,
    Saved,
    Scalars,
    Tangents,
    Tensors,
    bypasses_dispatcher,
    is_legacy_batch,
    packed,
)
from flashsci.call.plans import Plan
from flashsci.call.row_pitch import whole_rows
from flashsci.call.schemas import LIBRARY
from flashsci.call.torch_state import transforming
from flashsci.choice import backends, differentiate
from flashsci.choice.gradients import unwritten, written
from flashsci.errors import BackendError

# Nodes take tensors and options one by one: autograd does not look for tensors inside tuples, nor functorch for
# tangents.
_TENSORS, _SCALARS = len(Tensors._fields), len(Scalars._fields)
_LEAVES = len(Tangents._fields)  # the tensors that have gradients come first
_SAVED = _TENSORS + 2  # with out and lse
_REST = _TENSORS - _LEAVES + _SCALARS  # the arguments without gradients
_Gradients = tuple[Tensor | None, ...]
_NOTHING: _Gradients = (None,) * _LEAVES


def refuse(what: str) -> Any:
    raise BackendError(
        f"flashsci: {what} is not supported (it would otherwise be dropped silently); "
        "compute this call with backend='reference', which differentiates to any order"
    )


THIRD = "a third derivative through a fused kernel"
#: The refusal of gated calls, see gate_nodes.py.
FORWARD_TWICE = (
    "forward mode over a forward-mode or second derivative of a fused kernel (a Hessian is "
    "torch.func.jacfwd(torch.func.jacrev(f)))"
)

# The refusal as an op: a compiler traces backwards that never run.
LIBRARY.define("refuse(Tensor x, str what) -> Tensor")
LIBRARY.impl("refuse", lambda x, what: refuse(what), "CompositeExplicitAutograd")
torch.library.register_fake("flashsci::refuse", lambda x, what: torch.empty_like(x), lib=LIBRARY)
torch.library.register_vmap("flashsci::refuse", lambda info, dims, x, what: refuse(what), lib=LIBRARY)


class Guard(torch.autograd.Function):
    """x itself, with derivatives that raise: the formulas end where autograd would go on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, what: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.what = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.ops.flashsci.refuse(gradient, ctx.what), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse(ctx.what)


def guarded(tensors: Any, what: str) -> list[Any]:
    """The tensors among these, guarded where a graph is recorded."""
    if not (torch.is_grad_enabled() or transforming()):
        return list(tensors)
    return [Guard.apply(x, what) if isinstance(x, Tensor) and x.is_floating_point() else x for x in tensors]


@functools.cache
def _need(wanted: tuple[bool, ...]) -> int:
    """The bits (ops.NEED_Q, ...) of the gradients wanted, given as booleans in order."""
    return sum(1 << i for i, x in enumerate(wanted) if x)


def _refuse_beyond_leaves(asked: Sequence[bool]) -> None:
    """``asked``: flags of the inputs, in the order of Tensors, by which a derivative is wanted."""
    wanted = zip(Tensors._fields, asked, strict=False)
    beyond = [n for n, x in wanted if x and n not in Tangents._fields]
    if beyond:
        refuse(f"a derivative by {', '.join(beyond)} in a fused kernel")


def _needed(found: Any, need: int) -> _Gradients:
    return tuple(g if need >> i & 1 else None for i, g in enumerate(found))


def _backward(choice: str, dout: Any, dlse: Any, saved: Saved, need: int) -> _Gradients:
    """Gradients of q, k, v, bias, key_weight, None where not needed."""
    if (dout is None and dlse is None) or not need:
        return _NOTHING
    transformed = transforming()
    if torch.is_grad_enabled() or transformed:
        given = choice, dout, dlse, *saved.flat(), need
        if transformed or torch.compiler.is_compiling():
            found = Backward.apply(*given)
        elif _any_batch(dout, dlse):
            found = torch.ops.flashsci.recorded_backward(*given)
        else:
            found = EagerBackward.apply(*given)
    else:
        found = differentiate.backward(unwritten(choice), dout, dlse, saved, need)
    return _needed(found, need)


def _double_backward(choice: str, tangents: Tangents, dout: Any, dlse: Any, saved: Saved, need: int) -> _Gradients:
    """Gradients of q, k, v, bias, key_weight, dout, dlse of <tangents, gradients of the first five>."""
    if all(t is None for t in tangents) or not need:
        return (None,) * (_LEAVES + 2)
    if torch.is_grad_enabled() or transforming():
        given = choice, *tangents, dout, dlse, *saved.flat(), need
        if not torch.compiler.is_compiling() and _any_batch(*tangents, dout, dlse):
            found = torch.ops.flashsci.recorded_double_backward(*given)
        else:
            found = _recorded_double_backward(*given)
    else:
        module = differentiate.second_order(unwritten(choice).forward, saved.tensors)
        found = module.double_backward(tangents, dout, dlse, saved, need)
    return _needed(found, need)


def _recorded_double_backward(choice: str, *given: Any) -> tuple[Tensor, ...]:
    """The node of :func:`_double_backward`, behind guards; its inputs are those of the pass."""
    tangents, dout, dlse, saved, need = PASSES["double_backward"].grouped(*given)
    fixed = guarded((dout, dlse, *saved.tensors, saved.out, saved.lse), THIRD)
    found: tuple[Tensor, ...] = DoubleBackward.apply(choice, *tangents, *fixed, *saved.scalars, need)
    return found


def _any_batch(*tensors: Tensor | None) -> bool:
    """Whether one of these is a batch of the vmap behind ``is_grads_batched``. An autograd.Function loses its graph
    there."""
    return any(x is not None and is_legacy_batch(x) for x in tensors)


def _along(
    choice: str,
    tangents: Tangents,
    tdout: Any,
    tdlse: Any,
    dout: Any,
    dlse: Any,
    saved: Saved,
    need: int,
) -> _Gradients:
    """The tangent of the backward's results along tangents of the tensors with gradients, and of dout and dlse, in
    which it is linear."""
    first = _double_backward(choice, tangents, dout, dlse, saved, need)[:_LEAVES]
    second = _backward(choice, tdout, tdlse, saved, need)
    return tuple(b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True))


class Forward(torch.autograd.Function):
    """out, lse = attention; the inputs are the Choice as :func:`written`, the fields of Tensors, and those of Scalars."""

    generate_vmap_rule = True

    @staticmethod
    def forward(choice: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        tensors, scalars = Tensors(*inputs[:_TENSORS]), Scalars(*inputs[_TENSORS:])
        result: tuple[Tensor, Tensor] = backends.kernels(unwritten(choice).forward).forward(tensors, scalars)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors = inputs[1 : 1 + _TENSORS]
        ctx.set_materialize_grads(False)
        ctx.choice, ctx.scalars = inputs[0], Scalars(*inputs[1 + _TENSORS :])
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        _refuse_beyond_leaves(ctx.needs_input_grad[1:])
        need = _need(ctx.needs_input_grad[1 : 1 + _LEAVES])
        found = _backward(ctx.choice, dout, dlse, _saved(ctx), need)
        return (None, *found, *(None,) * _REST)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        _refuse_beyond_leaves([x is not None for x in tangents])
        saved = _saved(ctx)._replace(lse=Statistic.apply(ctx.saved_tensors[-1]))
        return Jvp.apply(ctx.choice, *tangents[:_LEAVES], *saved.flat())


class EagerForward(torch.autograd.Function):
    """:class:`Forward` for plain eager calls.

    For a Function with ``setup_context`` torch binds a signature at every call, which costs more than the rest of a
    small call. No transform sees this node. Its inputs are the call's Plan, whether it may bypass torch's dispatcher
    (``ops.bypasses_dispatcher``), and the fields of Tensors.
    """

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
        need = _need(ctx.needs_input_grad[2 : 2 + _LEAVES])
        found = eager_backward(ctx.plan, dout, dlse, ctx.saved_tensors, need)
        return (None, None, *found, *(None,) * (_TENSORS - _LEAVES))


class EagerPacked(torch.autograd.Function):
    """:class:`EagerForward` of packed tensors as users give them: separate nodes for views of them would take longer
    than the rest.

    The inputs are the call's Plan and those of ``ops.packed``.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, *given: Any) -> tuple[Tensor, Tensor]:
        tensors = packed(*given)
        out, lse = plan.prepared(tensors)(tensors)
        output = out.transpose(0, 1), lse
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.save_for_backward(*given, *output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *given, out, lse = ctx.saved_tensors
        saved = *packed(*given), out.transpose(0, 1), lse
        dout = None if dout is None else dout.transpose(0, 1)
        need = _need(ctx.needs_input_grad[1:4])
        rows = eager_backward(ctx.plan, dout, dlse, saved, need)[:3]
        return (None, *[None if x is None else x.transpose(0, 1) for x in rows], None, None, None)


def eager_backward(plan: Plan, dout: Tensor | None, dlse: Tensor | None, saved: Any, need: int) -> _Gradients:
    """Gradients of a call that :class:`EagerForward` computed; ``saved``: in the order of Tensors, with out and
    lse."""
    if plan.rank is None:
        return _backward_of_equal_ranks(plan, dout, dlse, saved, need)
    *given, out, lse = saved
    full = (*plan.raised(given), out, lse)
    found = _backward_of_equal_ranks(plan, dout, dlse, full, need)
    return tuple([g if g is None else g.view(x.shape) for g, x in zip(found, given, strict=False)])


def _backward_of_equal_ranks(plan: Plan, dout: Tensor | None, dlse: Tensor | None, saved: Any, need: int) -> _Gradients:
    if not torch.is_grad_enabled():
        found = plan.repeated_backward(dout, dlse, saved, need)
        if found is not None:
            return found
    if dout is None and dlse is None:
        return _NOTHING
    if not torch.is_grad_enabled() and not transforming() and bypasses_dispatcher((dout, dlse, *saved)):
        return plan.backward(dout, dlse, saved, need)
    *tensors, out, lse = saved
    # A plain forward may have left rows of a bias as they are (plans.py).
    given = whole_rows(Tensors(*tensors))
    kept = Saved(given, out.detach(), lse.detach(), plan.scalars)
    return _backward(written(plan.choice), dout, dlse, kept, need)


#: ``apply`` without the search for functorch's tensors, which ``ops.bypasses_dispatcher`` has done already.
apply_directly = super(torch.autograd.Function, EagerForward).apply
apply_packed = super(torch.autograd.Function, EagerPacked).apply


def _saved(ctx: Any) -> Saved:
    """The values that a forward left."""
    *tensors, out, lse = ctx.saved_tensors
    return Saved(Tensors(*tensors), out.detach(), lse.detach(), ctx.scalars)


class Statistic(torch.autograd.Function):
    """lse itself, with the tangent that it has and without a gradient: :class:`Jvp` has both in its formulas."""

    generate_vmap_rule = True

    @staticmethod
    def forward(lse: Tensor) -> Tensor:
        return lse.view_as(lse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


class Backward(torch.autograd.Function):
    """dq, dk, dv, dbias, dkey_weight; the inputs are the Choice as :func:`written`, dout, dlse, the fields of Saved, and
    ``need``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(choice: str, dout: Tensor | None, dlse: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
        return differentiate.backward(unwritten(choice), dout, dlse, Saved.of(inputs[:-1]), inputs[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep_backward(ctx, inputs)
        ctx.save_for_forward(*inputs[1 : 3 + _SAVED])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        dout, dlse, *tensors = ctx.saved_tensors
        saved = Saved.of((*tensors, *ctx.scalars))
        wanted_dout, wanted_dlse, *wanted = ctx.needs_input_grad[1 : 3 + _LEAVES]
        need = _need((*wanted, wanted_dout, wanted_dlse))
        found = _double_backward(ctx.choice, Tangents(*cotangents), dout, dlse, saved, need)
        return (None, *found[_LEAVES:], *found[:_LEAVES], *(None,) * (_REST + 3))

    @staticmethod
    def jvp(ctx: Any, _: Any, tdout: Any, tdlse: Any, *tangents: Any) -> Any:
        dout, dlse, *tensors = ctx.saved_tensors
        along, saved = Tangents(*tangents[:_LEAVES]), Saved.of((*tensors, *ctx.scalars))
        found = _along(ctx.choice, along, tdout, tdlse, dout, dlse, saved, ctx.need)
        # Tangents must be tensors, also those of empty results.
        likes = (saved.tensors.q if x is None else x for x in tensors[:_LEAVES])
        return tuple(
            x.new_zeros(x.shape if ctx.need >> i & 1 else 0) if t is None else t
            for i, (x, t) in enumerate(zip(likes, found, strict=True))
        )


class EagerBackward(torch.autograd.Function):
    """:class:`Backward` for plain eager calls, as :class:`EagerForward`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        _keep_backward(ctx, inputs)
        return Backward.forward(*inputs)

    backward = Backward.backward


def _keep_backward(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.choice, ctx.scalars, ctx.need = inputs[0], inputs[3 + _SAVED : -1], inputs[-1]
    ctx.save_for_backward(*inputs[1 : 3 + _SAVED])


class Jvp(torch.autograd.Function):
    """Tangents of out and lse; the inputs are the Choice as :func:`written`, the fields of Tangents and those of Saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(choice: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        tangents, saved = Tangents(*inputs[:_LEAVES]), Saved.of(inputs[_LEAVES:])
        module = differentiate.second_order(unwritten(choice).forward, saved.tensors)
        result: tuple[Tensor, Tensor] = module.jvp(tangents, saved)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.choice, ctx.scalars = inputs[0], inputs[1 + _LEAVES + _SAVED :]
        tensors = (*inputs[1 : 1 + _LEAVES + _SAVED], output[1])
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)  # vmap needs the same in both

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, _ = ctx.saved_tensors
        need, tangents = ctx.needs_input_grad, Tangents(*tensors[:_LEAVES])
        saved = Saved.of((*tensors[_LEAVES:], *ctx.scalars))
        first = _backward(ctx.choice, dout, dlse, saved, _need(need[1 : 1 + _LEAVES]))
        second = _NOTHING
        if dout is not None or dlse is not None:
            wanted = _need(need[1 + _LEAVES : 1 + 2 * _LEAVES])
            second = _double_backward(ctx.choice, tangents, dout, dlse, saved, wanted)[:_LEAVES]
        return (None, *first, *second, *(None,) * (_REST + 2))

    @staticmethod
    def jvp(ctx: Any, _: Any, *given: Any) -> Any:
        *tensors, first_lse = ctx.saved_tensors
        saved = Saved.of((*tensors[_LEAVES:], *ctx.scalars))
        mixed, second = Tangents(*given[:_LEAVES]), Tangents(*given[_LEAVES : 2 * _LEAVES])
        if all(x is None for x in second):  # linear in the tangents
            return Jvp.apply(ctx.choice, *mixed, *saved.flat())
        second_lse = given[_LEAVES + _SAVED - 1]
        if second_lse is None:
            second_lse = Jvp.apply(ctx.choice, *second, *saved.flat())[1]
        return SecondJvp.apply(ctx.choice, *tensors[:_LEAVES], *second, *mixed, first_lse, second_lse, *saved.flat())


class DoubleBackward(torch.autograd.Function):
    """Gradients of q, k, v, bias, key_weight, dout, dlse.

    The inputs are the Choice as :func:`written`, cotangents of the first five's gradients, then those of :class:`Backward`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(choice: str, *inputs: Any) -> tuple[Tensor, ...]:
        tangents, (dout, dlse) = Tangents(*inputs[:_LEAVES]), inputs[_LEAVES : _LEAVES + 2]
        saved, need = Saved.of(inputs[_LEAVES + 2 : -1]), inputs[-1]
        module = differentiate.second_order(unwritten(choice).forward, saved.tensors)
        result: tuple[Tensor, ...] = module.double_backward(tangents, dout, dlse, saved, need)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.choice, ctx.scalars = inputs[0], inputs[3 + _LEAVES + _SAVED : -1]
        tensors = inputs[1 + _LEAVES : 3 + _LEAVES + _SAVED]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        dout, dlse, *tensors = ctx.saved_tensors
        saved = Saved.of((*tensors, *ctx.scalars))
        *along, tdout, tdlse = cotangents
        need = _need(ctx.needs_input_grad[1 : 1 + _LEAVES])
        found = _along(ctx.choice, Tangents(*along), tdout, tdlse, dout, dlse, saved, need)
        return (None, *found, *(None,) * (2 + _SAVED + _SCALARS + 1))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse(THIRD)


class SecondJvp(torch.autograd.Function):
    """Second tangents of out and lse.

    The inputs are the Choice as :func:`written`, the fields of three Tangents (along a first and a second direction, and
    of the former along the latter), the tangents of lse along the two, and the fields of Saved.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(choice: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        given = PASSES["second_jvp"].grouped(*inputs)
        module = differentiate.second_order(unwritten(choice).forward, given[-1].tensors, "second_jvp")
        result: tuple[Tensor, Tensor] = module.second_jvp(*given)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_forward()  # vmap needs it, even to refuse

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        refuse(THIRD)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse(THIRD)


# The nodes of a recorded backward as ops; that vmap runs them sample by sample, each with a graph.
for what, record in (
    ("backward", lambda *given: EagerBackward.apply(*given)),
    ("double_backward", _recorded_double_backward),
):
    LIBRARY.define(f"recorded_{what}" + PASSES[what].schema.replace("(", "(str choice, ", 1))
    LIBRARY.impl(f"recorded_{what}", record, "CompositeImplicitAutograd")

# Dynamo cannot trace Functions that define jvp; as graph nodes they compile.
for node in (Guard, Forward, Statistic, Backward, Jvp, DoubleBackward, SecondJvp):
    torch.compiler.allow_in_graph(node)
