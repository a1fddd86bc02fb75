"""The autograd nodes of attention with a gate of pairs by kernels, to second order, in reverse and in forward mode.

They are those of flashsci/call/autograd.py with one more tensor that has derivatives. Kernels hold no scores. A third derivative,
and a recorded backward of a batch of cotangents (``is_grads_batched``), go through the reference, which holds all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashsci.backends import reference
from flashsci.call import recompute, repeats
from flashsci.call.autograd import FORWARD_TWICE, refuse
from flashsci.call.gate_ops import GatedKernels, GatedTangents, flat, grouped
from flashsci.call.ops import Given, Saved, Scalars, Tangents, Tensors, bypasses_dispatcher, is_legacy_batch
from flashsci.call.plans import alone
from flashsci.call.sink import in_place, sink_gradient, with_sink
from flashsci.call.torch_state import transforming
from flashsci.choice import backends

# A node takes tensors and options one by one: the name of the backend, ..., the fields of Tensors, the gate, ..., those of Scalars.
_TENSORS, _SCALARS, _LEAVES = len(Tensors._fields), len(Scalars._fields), len(GatedTangents._fields)
_INNER = len(Tangents._fields)  # the leaves among Tensors; the gate follows behind
_SAVED = _TENSORS + 3  # with the gate, out and lse
_Gradients = tuple[Tensor | None, ...]
_NOTHING: _Gradients = (None,) * _LEAVES


def _kernels(name: str) -> GatedKernels:
    found: GatedKernels = backends.kernels(name).gated_calls
    return found


def _leaves(given: Sequence[Any]) -> tuple[Any, ...]:
    """Those of the fields of Tensors, and of the gate behind them, that have gradients; of flags, too."""
    return *given[:_INNER], given[_TENSORS]


def _in_order(found: Sequence[Any]) -> tuple[Any, ...]:
    """The inverse, with None for the others."""
    return *found[:_INNER], *(None,) * (_TENSORS - _INNER), found[_INNER]


def _need(wanted: Sequence[bool]) -> int:
    return sum(1 << i for i, want in enumerate(wanted) if want)


def _needed(found: Sequence[Tensor], need: int) -> _Gradients:
    return tuple(x if need >> i & 1 else None for i, x in enumerate(found))


def _recording() -> bool:
    return torch.is_grad_enabled() or transforming()


def _backward(name: str, dout: Any, dlse: Any, saved: Saved, gate: Tensor, need: int) -> _Gradients:
    """Gradients of the leaves, None where not needed."""
    if (dout is None and dlse is None) or not need:
        return _NOTHING
    if not _recording():
        return _needed(_kernels(name).backward(dout, dlse, saved, gate, need), need)
    if _batched(dout, dlse):
        wanted = [bool(need >> i & 1) for i in range(_LEAVES)]
        return _first_by_reference(saved, gate, wanted, (dout, dlse))
    return _needed(Backward.apply(name, dout, dlse, *flat(saved, gate), need), need)


def _double_backward(
    name: str, tangents: GatedTangents, dout: Any, dlse: Any, saved: Saved, gate: Tensor, need: int
) -> _Gradients:
    """Gradients of the leaves, dout and dlse of <tangents, gradients of the leaves>."""
    if all(t is None for t in tangents) or not need:
        return (None,) * (_LEAVES + 2)
    if not _recording():
        return _needed(_kernels(name).double_backward(tangents, dout, dlse, saved, gate, need), need)
    if _batched(*tangents, dout, dlse):
        wanted = [bool(need >> i & 1) for i in range(_LEAVES + 2)]
        return tuple(_second_by_reference(saved, gate, wanted, (dout, dlse), tangents))
    return _needed(DoubleBackward.apply(name, *tangents, dout, dlse, *flat(saved, gate), need), need)


def _batched(*tensors: Tensor | None) -> bool:
    """Whether one of these is a batch of the vmap behind ``is_grads_batched``, where a Function loses its graph."""
    return any(x is not None and is_legacy_batch(x) for x in tensors)


def _along(
    name: str,
    tangents: GatedTangents,
    tdout: Any,
    tdlse: Any,
    dout: Any,
    dlse: Any,
    saved: Saved,
    gate: Tensor,
    need: int,
) -> _Gradients:
    """The tangent of the backward's results along those of the leaves, and of dout and dlse, in which it is linear."""
    first = _double_backward(name, tangents, dout, dlse, saved, gate, need)[:_LEAVES]
    second = _backward(name, tdout, tdlse, saved, gate, need)
    return tuple(b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True))


def in_fp32(tensors: Tensors, scalars: Scalars, sink: Tensor | None, gate: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse by the reference as kernels compute: scores and P of 16-bit tensors in fp32."""
    wide: list[Any] = [x.float() if x is not None and x.is_floating_point() else x for x in tensors]
    with torch.autocast(tensors.q.device.type, enabled=False):
        out, lse = reference.forward(Tensors(*wide), scalars, sink, gate)
    return out.to(tensors.q.dtype), lse


def _first_by_reference(saved: Saved, gate: Any, wanted: Sequence[bool], cotangents: Sequence[Any]) -> _Gradients:
    """Gradients of the leaves, with graphs of any order."""

    def compute(*leaves: Any) -> tuple[Tensor, Tensor]:
        *inner, gate = leaves
        return in_fp32(saved.tensors.with_leaves(inner), saved.scalars, None, gate)

    return tuple(recompute.gradients(compute, (*saved.tensors.leaves, gate), wanted, cotangents))


def _second_by_reference(
    saved: Saved, gate: Any, wanted: Sequence[bool], cotangents: Sequence[Any], tangents: Sequence[Any]
) -> list[Tensor | None]:
    """Gradients of the leaves, then of dout and dlse, of <tangents, gradients of the leaves>, with graphs of any order."""

    def compute(*given: Any) -> list[Tensor]:
        *leaves, dout, dlse = given
        tensors = saved.tensors.with_leaves(leaves[:-1])
        along = [t is not None for t in tangents]
        found = _first_by_reference(saved._replace(tensors=tensors), leaves[-1], along, (dout, dlse))
        return [saved.lse.new_zeros(()) if x is None else x for x in found]

    return recompute.gradients(compute, (*saved.tensors.leaves, gate, *cotangents), wanted, tangents)


class GatedCalls:
    """The kernels of gated calls of one kind, and what eager calls of it have decided.

    A function of plain tensors is kept for the forward, and one for each kind of backward: repeats of these calls check nothing.
    """

    __slots__ = ("_backwards", "_forward", "name", "scalars")

    def __init__(self, name: str, scalars: Scalars) -> None:
        self.name, self.scalars = name, scalars
        self._forward: Any = None
        self._backwards: dict[tuple[Any, ...], Any] = {}

    def forward(self, tensors: Given, gate: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse of plain tensors as kernels take them; of later calls, with the same signatures."""
        if self._forward is None:
            self._forward = _kernels(self.name).prepared_forward(Tensors(*tensors), gate, self.scalars)
        found: tuple[Tensor, Tensor] = self._forward(tensors, gate)
        return found

    def general_forward(self, tensors: Given, gate: Tensor) -> tuple[Tensor, Tensor]:
        """The same for any tensors."""
        found: tuple[Tensor, Tensor] = _kernels(self.name).forward(Tensors(*tensors), gate, self.scalars)
        return found

    def backward(self, dout: Tensor | None, dlse: Tensor | None, saved: Sequence[Any], need: int) -> _Gradients:
        """Gradients of the leaves, None where not needed. ``saved``: the fields of Tensors, the gate, out, lse, of any kind and
        strides, because hooks of saved tensors may change them."""
        if (dout is None and dlse is None) or not need:
            return _NOTHING
        *tensors, gate, out, lse = saved
        given = [x for x in (*saved, dout, dlse) if x is not None]
        key = need, dout is None, dlse is None
        kept = self._backwards.get(key)
        run = repeats.find(kept, given) if kept is not None and not _recording() and alone() else None
        if run is None:
            whole = Saved(Tensors(*tensors), out.detach(), lse.detach(), self.scalars)
            if _recording() or not bypasses_dispatcher(given):
                return _backward(self.name, dout, dlse, whole, gate, need)
            run = _kernels(self.name).prepared_backward(dout, dlse, whole, gate, need)
            repeats.keep(self._backwards, key, given, run)
        found: _Gradients = run(dout, dlse, tensors, gate, out, lse)
        return found


class Forward(torch.autograd.Function):
    """out, lse; the inputs are the backend's name, the fields of Tensors, the gate, and the fields of Scalars."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        tensors, scalars = Tensors(*inputs[:_TENSORS]), Scalars(*inputs[_TENSORS + 1 :])
        found: tuple[Tensor, Tensor] = _kernels(name).forward(tensors, inputs[_TENSORS], scalars)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors = inputs[1 : 2 + _TENSORS]
        ctx.set_materialize_grads(False)
        ctx.name, ctx.scalars = inputs[0], inputs[2 + _TENSORS :]
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        saved, gate = _of(ctx)
        found = _backward(ctx.name, dout, dlse, saved, gate, _need(_leaves(ctx.needs_input_grad[1:])))
        return (None, *_in_order(found), *(None,) * _SCALARS)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        saved, gate = _of(ctx)
        return Jvp.apply(ctx.name, *_leaves(tangents), *flat(saved, gate))


def _of(ctx: Any) -> tuple[Saved, Tensor]:
    """The values that a forward left. The formulas hold the dependence of out and lse on the tensors."""
    *tensors, out, lse = ctx.saved_tensors
    return grouped((*tensors, out.detach(), lse.detach(), *ctx.scalars))


class Backward(torch.autograd.Function):
    """Gradients of the leaves; the inputs are the backend's name, dout, dlse, those of ``gate_ops.flat``, and ``need``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, dout: Tensor | None, dlse: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
        saved, gate = grouped(inputs[:-1])
        found: tuple[Tensor, ...] = _kernels(name).backward(dout, dlse, saved, gate, inputs[-1])
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.name, ctx.scalars, ctx.need = inputs[0], inputs[3 + _SAVED : -1], inputs[-1]
        ctx.save_for_backward(*inputs[1 : 3 + _SAVED])
        ctx.save_for_forward(*inputs[1 : 3 + _SAVED])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        dout, dlse, *tensors = ctx.saved_tensors
        saved, gate = grouped((*tensors, *ctx.scalars))
        wanted_dout, wanted_dlse, *wanted = ctx.needs_input_grad[1:]
        need = _need((*_leaves(wanted), wanted_dout, wanted_dlse))
        found = _double_backward(ctx.name, GatedTangents(*cotangents), dout, dlse, saved, gate, need)
        return (None, *found[_LEAVES:], *_in_order(found), *(None,) * (2 + _SCALARS + 1))

    @staticmethod
    def jvp(ctx: Any, _: Any, tdout: Any, tdlse: Any, *tangents: Any) -> Any:
        dout, dlse, *tensors = ctx.saved_tensors
        saved, gate = grouped((*tensors, *ctx.scalars))
        along = GatedTangents(*_leaves(tangents))
        found = _along(ctx.name, along, tdout, tdlse, dout, dlse, saved, gate, ctx.need)
        # Tangents must be tensors, also those of empty results.
        likes = (saved.tensors.q if x is None else x for x in _leaves(tensors))
        return tuple(
            x.new_zeros(x.shape if ctx.need >> i & 1 else 0) if t is None else t
            for i, (x, t) in enumerate(zip(likes, found, strict=True))
        )


class Jvp(torch.autograd.Function):
    """Tangents of out and lse; the inputs are the backend's name, the tangents of the leaves, and those of ``gate_ops.flat``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _kernels(name).jvp(GatedTangents(*inputs[:_LEAVES]), *grouped(inputs[_LEAVES:]))
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.name, ctx.scalars = inputs[0], inputs[1 + _LEAVES + _SAVED :]
        ctx.save_for_backward(*inputs[1 : 1 + _LEAVES + _SAVED])
        ctx.save_for_forward(*inputs[1 : 1 + _LEAVES + _SAVED])

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        tangents = GatedTangents(*ctx.saved_tensors[:_LEAVES])
        saved, gate = grouped((*ctx.saved_tensors[_LEAVES:], *ctx.scalars))
        wanted = ctx.needs_input_grad[1:]
        first = _backward(ctx.name, dout, dlse, saved, gate, _need(wanted[:_LEAVES]))
        second = _NOTHING
        if dout is not None or dlse is not None:
            need = _need(_leaves(wanted[_LEAVES:]))
            second = _double_backward(ctx.name, tangents, dout, dlse, saved, gate, need)[:_LEAVES]
        return (None, *first, *_in_order(second), *(None,) * (2 + _SCALARS))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse(FORWARD_TWICE)


class DoubleBackward(torch.autograd.Function):
    """Gradients of the leaves, dout and dlse; the inputs are the backend's name, cotangents of the leaves' gradients, then those
    of :class:`Backward`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, *inputs: Any) -> tuple[Tensor, ...]:
        tangents, (dout, dlse) = GatedTangents(*inputs[:_LEAVES]), inputs[_LEAVES : _LEAVES + 2]
        saved, gate = grouped(inputs[_LEAVES + 2 : -1])
        found: tuple[Tensor, ...] = _kernels(name).double_backward(tangents, dout, dlse, saved, gate, inputs[-1])
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.scalars, ctx.need = inputs[3 + _LEAVES + _SAVED : -1], inputs[-1]
        ctx.save_for_backward(*inputs[1 : 3 + _LEAVES + _SAVED])
        ctx.save_for_forward(*inputs[1 : 3 + _LEAVES + _SAVED])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        *tangents, dout, dlse = ctx.saved_tensors[: _LEAVES + 2]
        saved, gate = grouped((*ctx.saved_tensors[_LEAVES + 2 :], *ctx.scalars))
        wanted = ctx.needs_input_grad[1:]
        needed = [bool(ctx.need >> i & 1) for i in range(_LEAVES + 2)]

        def compute(*given: Any) -> list[Tensor]:
            along, cotangents, leaves = given[:_LEAVES], given[_LEAVES : _LEAVES + 2], given[_LEAVES + 2 :]
            call = saved._replace(tensors=saved.tensors.with_leaves(leaves[:-1]))
            found = _second_by_reference(call, leaves[-1], needed, cotangents, along)
            return [saved.lse.new_zeros(()) if x is None else x for x in found]

        at = _LEAVES + 2
        given = (*tangents, dout, dlse, *saved.tensors.leaves, gate)
        found = recompute.gradients(compute, given, (*wanted[:at], *_leaves(wanted[at:])), cotangents)
        return (None, *found[:at], *_in_order(found[at:]), *(None,) * (2 + _SCALARS + 1))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse(FORWARD_TWICE)


class EagerForward(torch.autograd.Function):
    """out, lse of an eager call, with its sink; no transform sees this node.

    Kernels compute a plain backward from out and lse with the sink (flashsci/call/sink.py). A backward that is recorded for a
    derivative of its own runs another forward if there is a sink, and goes through the graph of ``with_sink``. The inputs are the
    call's GatedCalls, whether it may bypass torch's dispatcher (``ops.bypasses_dispatcher``), the sink, the fields of Tensors, and
    the gate.
    """

    @staticmethod
    def forward(ctx: Any, calls: GatedCalls, direct: bool, sink: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
        found = calls.forward if direct else calls.general_forward
        output = found(given[:-1], given[-1])
        if sink is not None:
            output = in_place(*output, sink)
        ctx.set_materialize_grads(False)
        ctx.calls = calls
        ctx.save_for_backward(sink, *given, *output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        sink, *saved = ctx.saved_tensors
        wanted_sink, *wanted = ctx.needs_input_grad[2:]
        dsink: Tensor | None = None
        if sink is not None and _recording() and not (dout is None and dlse is None):
            dsink, *found = _through_sink(ctx.calls, sink, saved[:-2], (wanted_sink, *_leaves(wanted)), (dout, dlse))
        else:
            found = ctx.calls.backward(dout, dlse, saved, _need(_leaves(wanted)))
            if wanted_sink and not (dout is None and dlse is None):
                dsink = sink_gradient(dout, dlse, saved[-2], saved[-1], sink)
        return (None, None, dsink, *_in_order(found))


#: ``apply`` without the search for functorch's tensors, which ``ops.bypasses_dispatcher`` has done already.
apply_directly = super(torch.autograd.Function, EagerForward).apply


def _through_sink(
    calls: GatedCalls, sink: Tensor, given: list[Any], wanted: Sequence[bool], cotangents: Sequence[Any]
) -> list[Any]:
    """Gradients of the sink and of the leaves, with graphs of their own."""
    tensors, gate = Tensors(*given[:-1]), given[-1]

    def compute(sink: Tensor, *leaves: Any) -> tuple[Tensor, Tensor]:
        *inner, gate = leaves
        call = tensors.with_leaves(inner)
        if _batched(*cotangents):
            return in_fp32(call, calls.scalars, sink, gate)
        out, lse = EagerForward.apply(calls, False, None, *call.laid_out(), gate)
        return with_sink(out, lse, sink)

    return recompute.gradients(compute, (sink, *tensors.leaves, gate), wanted, cotangents)


# Dynamo cannot trace Functions that define jvp; as graph nodes they compile.
for node in (Forward, Backward, Jvp, DoubleBackward):
    torch.compiler.allow_in_graph(node)
