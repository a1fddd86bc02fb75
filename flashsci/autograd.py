"""The one place where the kernels of fused backends are wired into autograd, to second order.

Four nodes, so that a derivative of a derivative has somewhere to go, in reverse and in forward mode:

    Forward         backward: Backward                         jvp: Jvp
    Backward        backward: DoubleBackward                   jvp: DoubleBackward + Backward
    Jvp             backward: Backward, DoubleBackward         (a second tangent is refused)
    DoubleBackward  backward: itself + Backward, in the tangents it is linear in; refused in all else

The double backward of <tx, dx> is the tangent of the backward along tx, so one kernel serves both. out and
lse enter every node but the first detached: the formulas hold their dependence on the others
already. A backend without second-order kernels of its own has Triton's, from the same q, k, v, out and
lse. Third order raises, under ``loss.backward()`` and ``torch.autograd.grad(loss, parameters)`` alike.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashsci import registry
from flashsci.ops import LIBRARY, SCALARS, TENSORS
from flashsci.tracing import transforming

_LEAVES = 5  # q, k, v, bias, key_weight: what has gradients
_TENSORS, _SCALARS = len(TENSORS), len(SCALARS)
_SAVED = _TENSORS + 2  # with out and lse
_REST = _TENSORS - _LEAVES + _SCALARS  # arguments after those with gradients
_Gradients = tuple[Tensor | None, ...]
_NOTHING: _Gradients = (None,) * _LEAVES


def _refuse(what: str) -> Any:
    raise registry.BackendError(
        f"flashsci: {what} is not supported (it would otherwise be dropped silently); "
        "compute this call with backend='reference', which differentiates to any order"
    )


THIRD = "a third derivative through a fused kernel"
FORWARD_TWICE = (
    "forward mode over a forward-mode or second derivative of a fused kernel (a Hessian is "
    "torch.func.jacfwd(torch.func.jacrev(f)))"
)

# The refusal as an op: a compiler traces backwards that nobody will ever run.
LIBRARY.define("refuse(Tensor x, str what) -> Tensor")
LIBRARY.impl("refuse", lambda x, what: _refuse(what), "CompositeExplicitAutograd")
torch.library.register_fake("flashsci::refuse", lambda x, what: torch.empty_like(x), lib=LIBRARY)
torch.library.register_vmap(
    "flashsci::refuse", lambda info, dims, x, what: _refuse(what), lib=LIBRARY
)


class Guard(torch.autograd.Function):
    """x itself, whose derivatives raise: where autograd would go on, the formulas end."""

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
        _refuse(FORWARD_TWICE if ctx.what == THIRD else ctx.what)


def guarded(tensors: Any, what: str) -> list[Any]:
    """The tensors among these, guarded where a graph is recorded."""
    if not (torch.is_grad_enabled() or transforming()):
        return list(tensors)
    return [
        Guard.apply(x, what) if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in tensors
    ]


def _second_order(backend: str, q: Tensor, v: Tensor) -> Any:
    """The module with the second-order kernels for what a backend computed: its own, or Triton's."""
    module = registry.kernels(backend)
    if not hasattr(module, "double_backward"):
        reason = _triton_rejects(q.device, q.dtype, q.shape[-1], v.shape[-1])
        if reason is not None:
            raise registry.BackendError(
                f"flashsci: second derivatives come from the triton backend, and {reason}; compute "
                "this call with backend='reference'"
            )
        module = registry.kernels("triton")
    return module


@functools.lru_cache
def _triton_rejects(device: torch.device, dtype: torch.dtype, d: int, dv: int) -> str | None:
    problem = registry.problem_of(device.type, device.index, dtype, 1, 1, d, dv, ())
    return registry.BACKENDS["triton"].rejects(problem)


def _need(wanted: Any) -> int:
    """The bits (ops.NEED_Q, ...) of the gradients wanted, given as booleans in order."""
    return sum(1 << i for i, x in enumerate(wanted) if x)


def _needed(found: Any, need: int) -> _Gradients:
    return tuple(g if need >> i & 1 else None for i, g in enumerate(found))


def _backward(backend: str, dout: Any, dlse: Any, rest: tuple[Any, ...], need: int) -> _Gradients:
    """Gradients of q, k, v, bias, key_weight, None where not needed; ``rest`` is ops.TENSORS, out, lse,
    ops.SCALARS."""
    if (dout is None and dlse is None) or not need:
        return _NOTHING
    transformed = transforming()
    if torch.is_grad_enabled() or transformed:
        node = Backward if transformed or torch.compiler.is_compiling() else EagerBackward
        found = node.apply(backend, dout, dlse, *rest, need)
    else:
        found = registry.kernels(backend).backward(dout, dlse, *rest, need)
    return _needed(found, need)


def _double_backward(
    backend: str, tangents: Any, dout: Any, dlse: Any, rest: tuple[Any, ...], need: int
) -> _Gradients:
    """Gradients of q, k, v, bias, key_weight, dout, dlse of <tangents, gradients of the first five>."""
    if all(t is None for t in tangents) or not need:
        return (None,) * (_LEAVES + 2)
    if torch.is_grad_enabled() or transforming():
        fixed = guarded((dout, dlse, *rest[:_SAVED]), THIRD)
        found = DoubleBackward.apply(backend, *tangents, *fixed, *rest[_SAVED:], need)
    else:
        module = _second_order(backend, rest[0], rest[2])
        found = module.double_backward(*tangents, dout, dlse, *rest, need)
    return _needed(found, need)


def _along(
    backend: str,
    tangents: Any,
    tdout: Any,
    tdlse: Any,
    dout: Any,
    dlse: Any,
    rest: tuple[Any, ...],
    need: int,
) -> _Gradients:
    """The tangent of the backward's results along tangents of what has gradients and of dout and dlse, in
    which it is linear."""
    first = _double_backward(backend, tangents, dout, dlse, rest, need)[:_LEAVES]
    second = _backward(backend, tdout, tdlse, rest, need)
    return tuple(
        b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)
    )


class Forward(torch.autograd.Function):
    """out, lse = attention; inputs are the backend's name, then ops.TENSORS and ops.SCALARS."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
        return registry.kernels(backend).forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _keep(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1 : 1 + _TENSORS], *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        need = _need(ctx.needs_input_grad[1 : 1 + _LEAVES])
        return (None, *_backward(ctx.backend, dout, dlse, _rest(ctx), need), *(None,) * _REST)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        return Jvp.apply(ctx.backend, *tangents[:_LEAVES], *_rest(ctx))


class EagerForward(torch.autograd.Function):
    """:class:`Forward` for plain eager calls: for a Function with ``setup_context`` torch binds a
    signature at every call, which costs more than the rest of a small one."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = registry.kernels(inputs[0]).forward(*inputs[1:])
        _keep(ctx, inputs, output)
        return output

    backward = Forward.backward


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.backend = inputs[0]
    ctx.save_for_backward(*inputs[1 : 1 + _TENSORS], *output)
    ctx.scalars = inputs[1 + _TENSORS :]


def _rest(ctx: Any) -> tuple[Any, ...]:
    """ops.TENSORS, out, lse, ops.SCALARS of a forward."""
    *tensors, out, lse = ctx.saved_tensors
    return *tensors, out.detach(), lse.detach(), *ctx.scalars


class Backward(torch.autograd.Function):
    """dq, dk, dv, dbias, dkey_weight; inputs are the backend's name, dout, dlse, ops.TENSORS, out, lse,
    ops.SCALARS and ``need``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, ...]:
        return registry.kernels(backend).backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep_backward(ctx, inputs)
        ctx.save_for_forward(*inputs[1 : 3 + _SAVED])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        dout, dlse, *rest = ctx.saved_tensors
        wanted_dout, wanted_dlse, *wanted = ctx.needs_input_grad[1 : 3 + _LEAVES]
        found = _double_backward(
            ctx.backend, cotangents, dout, dlse, (*rest, *ctx.scalars), _need((*wanted, wanted_dout, wanted_dlse))
        )  # fmt: skip
        return (None, *found[_LEAVES:], *found[:_LEAVES], *(None,) * (_REST + 3))

    @staticmethod
    def jvp(ctx: Any, _: Any, tdout: Any, tdlse: Any, *tangents: Any) -> Any:
        dout, dlse, *rest = ctx.saved_tensors
        found = _along(
            ctx.backend,
            tangents[:_LEAVES],
            tdout,
            tdlse,
            dout,
            dlse,
            (*rest, *ctx.scalars),
            ctx.need,
        )
        # Tangents must be tensors, also those of results that are empty.
        likes = (rest[0] if x is None else x for x in rest[:_LEAVES])
        return tuple(
            x.new_zeros(x.shape if ctx.need >> i & 1 else 0) if t is None else t
            for i, (x, t) in enumerate(zip(likes, found, strict=True))
        )


class EagerBackward(torch.autograd.Function):
    """:class:`Backward` for plain eager calls, as :class:`EagerForward`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        _keep_backward(ctx, inputs)
        return registry.kernels(inputs[0]).backward(*inputs[1:])

    backward = Backward.backward


def _keep_backward(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.backend, ctx.need = inputs[0], inputs[-1]
    ctx.save_for_backward(*inputs[1 : 3 + _SAVED])
    ctx.scalars = inputs[3 + _SAVED : -1]


class Jvp(torch.autograd.Function):
    """Tangents of out and lse; inputs are the backend's name, tangents of q, k, v, bias, key_weight, ops.TENSORS,
    out, lse, ops.SCALARS."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
        return _second_order(backend, arguments[_LEAVES], arguments[_LEAVES + 2]).jvp(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.backend = inputs[0]
        saved = inputs[1 : 1 + _LEAVES + _SAVED]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)  # vmap needs it, if only to refuse
        ctx.scalars = inputs[1 + _LEAVES + _SAVED :]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        tangents, rest = saved[:_LEAVES], (*saved[_LEAVES:], *ctx.scalars)
        need = ctx.needs_input_grad
        first = _backward(ctx.backend, dout, dlse, rest, _need(need[1 : 1 + _LEAVES]))
        second = _NOTHING
        if dout is not None or dlse is not None:
            wanted = _need(need[1 + _LEAVES : 1 + 2 * _LEAVES])
            second = _double_backward(ctx.backend, tangents, dout, dlse, rest, wanted)[:_LEAVES]
        return (None, *first, *second, *(None,) * (_REST + 2))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse(FORWARD_TWICE)


class DoubleBackward(torch.autograd.Function):
    """Gradients of q, k, v, bias, key_weight, dout, dlse; inputs are the backend's name, cotangents of the first
    five's gradients, then those of :class:`Backward`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, ...]:
        q, _, v = arguments[_LEAVES + 2 : _LEAVES + 5]
        return _second_order(backend, q, v).double_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.backend = inputs[0]
        saved = inputs[1 + _LEAVES : 3 + _LEAVES + _SAVED]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.scalars = inputs[3 + _LEAVES + _SAVED : -1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        dout, dlse, *rest = ctx.saved_tensors
        *along, tdout, tdlse = cotangents
        need = _need(ctx.needs_input_grad[1 : 1 + _LEAVES])
        found = _along(ctx.backend, along, tdout, tdlse, dout, dlse, (*rest, *ctx.scalars), need)
        return (None, *found, *(None,) * (2 + _SAVED + _SCALARS + 1))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse(FORWARD_TWICE)


# Dynamo cannot trace Functions that define jvp; as graph nodes they compile.
for node in (Guard, Forward, Backward, Jvp, DoubleBackward):
    torch.compiler.allow_in_graph(node)
