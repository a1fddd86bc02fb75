"""The one place where the kernels of fused backends are wired into autograd, to second order.

Four nodes, so that a derivative of a derivative has somewhere to go, in reverse and in forward mode:

    Forward         backward: Backward                         jvp: Jvp
    Backward        backward: DoubleBackward                   jvp: DoubleBackward + Backward
    Jvp             backward: Backward, DoubleBackward         (a second tangent is refused)
    DoubleBackward  backward: itself + Backward, in the tangents it is linear in; refused in all else

The double backward of <tx, dx> is the tangent of the backward along tx, so one kernel serves both. out and
lse enter every node but the first detached: the formulas hold their dependence on q, k, v, bias
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

_TENSORS, _SCALARS = len(TENSORS), len(SCALARS)
_REST = _TENSORS - 4 + _SCALARS  # arguments after q, k, v, bias
_Gradients = tuple[Tensor | None, ...]
_NOTHING: _Gradients = (None,) * 4


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
    """Gradients of q, k, v, bias, None where not needed; ``rest`` is ops.TENSORS, out, lse, ops.SCALARS."""
    if (dout is None and dlse is None) or not need:
        return _NOTHING
    if torch.is_grad_enabled() or transforming():
        found = Backward.apply(backend, dout, dlse, *rest, need)
    else:
        found = registry.kernels(backend).backward(dout, dlse, *rest, need)
    return _needed(found, need)


def _double_backward(
    backend: str, tangents: Any, dout: Any, dlse: Any, rest: tuple[Any, ...], need: int
) -> _Gradients:
    """Gradients of q, k, v, bias, dout, dlse of <tangents, gradients of q, k, v, bias>."""
    if all(t is None for t in tangents) or not need:
        return (None,) * 6
    fixed = guarded((dout, dlse, *rest[: _TENSORS + 2]), THIRD)
    found = DoubleBackward.apply(backend, *tangents, *fixed, *rest[_TENSORS + 2 :], need)
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
    """The tangent of the backward's results along tangents of q, k, v, bias, dout and dlse, in which dout
    and dlse are linear."""
    first = _double_backward(backend, tangents, dout, dlse, rest, need)[:4]
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
        need = _need(ctx.needs_input_grad[1:5])
        return (None, *_backward(ctx.backend, dout, dlse, _rest(ctx), need), *(None,) * _REST)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        return Jvp.apply(ctx.backend, *tangents[:4], *_rest(ctx))


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
    """dq, dk, dv, dbias; inputs are the backend's name, dout, dlse, ops.TENSORS, out, lse,
    ops.SCALARS and ``need``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, ...]:
        return registry.kernels(backend).backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.need = inputs[0], inputs[-1]
        tensors = inputs[1 : _TENSORS + 5]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.scalars = inputs[_TENSORS + 5 : -1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        dout, dlse, *rest = ctx.saved_tensors
        wanted_dout, wanted_dlse, *wanted = ctx.needs_input_grad[1:7]
        found = _double_backward(
            ctx.backend, cotangents, dout, dlse, (*rest, *ctx.scalars), _need((*wanted, wanted_dout, wanted_dlse))
        )  # fmt: skip
        return (None, *found[4:], *found[:4], *(None,) * (_REST + 3))

    @staticmethod
    def jvp(ctx: Any, _: Any, tdout: Any, tdlse: Any, *tangents: Any) -> Any:
        dout, dlse, *rest = ctx.saved_tensors
        found = _along(
            ctx.backend, tangents[:4], tdout, tdlse, dout, dlse, (*rest, *ctx.scalars), ctx.need
        )
        # Tangents must be tensors, also those of results that are empty.
        likes = (*rest[:3], rest[0] if rest[3] is None else rest[3])
        return tuple(
            x.new_zeros(x.shape if ctx.need >> i & 1 else 0) if t is None else t
            for i, (x, t) in enumerate(zip(likes, found, strict=True))
        )


class Jvp(torch.autograd.Function):
    """Tangents of out and lse; inputs are the backend's name, tangents of q, k, v, bias, ops.TENSORS, out, lse,
    ops.SCALARS."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, Tensor]:
        return _second_order(backend, arguments[4], arguments[6]).jvp(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.backend = inputs[0]
        ctx.save_for_backward(*inputs[1 : _TENSORS + 7])
        ctx.save_for_forward(*inputs[1 : _TENSORS + 7])  # vmap needs it, if only to refuse
        ctx.scalars = inputs[_TENSORS + 7 :]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        tangents, rest = ctx.saved_tensors[:4], (*ctx.saved_tensors[4:], *ctx.scalars)
        need = ctx.needs_input_grad
        first = _backward(ctx.backend, dout, dlse, rest, _need(need[1:5]))
        second = _NOTHING
        if dout is not None or dlse is not None:
            second = _double_backward(ctx.backend, tangents, dout, dlse, rest, _need(need[5:9]))[:4]
        return (None, *first, *second, *(None,) * (_REST + 2))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse(FORWARD_TWICE)


class DoubleBackward(torch.autograd.Function):
    """Gradients of q, k, v, bias, dout, dlse; inputs are the backend's name, cotangents of dq, dk, dv, dbias, then those of
    :class:`Backward`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(backend: str, *arguments: Any) -> tuple[Tensor, ...]:
        return _second_order(backend, arguments[6], arguments[8]).double_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.backend = inputs[0]
        ctx.save_for_backward(*inputs[5 : _TENSORS + 9])
        ctx.save_for_forward(*inputs[5 : _TENSORS + 9])
        ctx.scalars = inputs[_TENSORS + 9 : -1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        dout, dlse, *rest = ctx.saved_tensors
        *along, tdout, tdlse = cotangents
        need = _need(ctx.needs_input_grad[1:5])
        found = _along(ctx.backend, along, tdout, tdlse, dout, dlse, (*rest, *ctx.scalars), need)
        return (None, *found, *(None,) * (_TENSORS + 4 + _SCALARS + 1))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse(FORWARD_TWICE)


# Dynamo cannot trace Functions that define jvp; as graph nodes they compile.
for node in (Guard, Forward, Backward, Jvp, DoubleBackward):
    torch.compiler.allow_in_graph(node)
