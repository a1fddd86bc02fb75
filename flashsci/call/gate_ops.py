"""The raw ops of attention with a gate of pairs: their arguments, schemas and fake kernels.

``flashsci::<backend>_gated_forward`` and ``_gated_backward`` know nothing of autograd: flashsci/call/gate.py has the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flashsci.call import kinds
from flashsci.call.ops import Saved, Scalars, Tangents, Tensors, bypasses_dispatcher, fake_backward, fake_forward
from flashsci.call.schemas import arguments, define_op

#: The bit of the gate's gradient, after those of the tensors with gradients (``ops.NEED_Q``, ...).
NEED_GATE = 1 << len(Tangents._fields)


class Gate(NamedTuple):
    """The gate of a call: broadcastable to the scores ``[*, Hq, Sq, Sk]``, with as many dims."""

    pair_gate: kinds.Gate


class GatedKernels(NamedTuple):
    """The gated functions of a backend."""

    forward: Callable[[Tensors, Tensor, Scalars], tuple[Tensor, Tensor]]
    """Returns out and lse."""
    backward: Callable[..., tuple[Tensor, ...]]
    """Returns dq, dk, dv, dbias, dkey_weight and dpair_gate, empty where ``need`` does not name them; takes (dout, dlse, saved,
    gate, need)."""


_CALL = arguments(Tensors, Gate)
_SCALARS = arguments(Scalars)
_FORWARD = f"({_CALL}, {_SCALARS}) -> (Tensor out, Tensor lse)"
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in (*Tangents._fields, *Gate._fields))
_BACKWARD = f"(Tensor? dout, Tensor? dlse, {_CALL}, Tensor out, Tensor lse, {_SCALARS}, int need) -> ({_GRADIENTS})"
_N = len(Tensors._fields)


def _grouped(given: Sequence[Any]) -> tuple[Tensors, Tensor, Scalars]:
    return Tensors(*given[:_N]), given[_N], Scalars(*given[_N + 1 :])


def _saved(given: Sequence[Any]) -> tuple[Saved, Tensor]:
    return Saved(Tensors(*given[:_N]), given[_N + 1], given[_N + 2], Scalars(*given[_N + 3 :])), given[_N]


def empty_gradients(tensors: Tensors, gate: Tensor, need: int) -> tuple[Tensor, ...]:
    """Empty tensors for all gradients."""
    found = fake_backward(tensors, need)
    return *found, gate.new_empty(gate.shape if need & NEED_GATE else (0,))


def define(backend: str, kernels: GatedKernels, keys: Sequence[str]) -> GatedKernels:
    """Define a backend's ops for the given dispatch keys; returns the functions that call them."""

    def backward(dout: Any, dlse: Any, *given: Any) -> tuple[Tensor, ...]:
        return kernels.backward(dout, dlse, *_saved(given[:-1]), given[-1])

    def fake(dout: Any, dlse: Any, *given: Any) -> tuple[Tensor, ...]:
        saved, gate = _saved(given[:-1])
        return empty_gradients(saved.tensors, gate, given[-1])

    run = define_op(
        f"{backend}_gated_forward",
        _FORWARD,
        lambda *given: kernels.forward(*_grouped(given)),
        keys,
        lambda *given: fake_forward(_grouped(given)[0]),
    )
    run_backward = define_op(f"{backend}_gated_backward", _BACKWARD, backward, keys, fake)

    def forward_of(tensors: Tensors, gate: Tensor, scalars: Scalars) -> tuple[Tensor, Tensor]:
        given = *tensors, gate, *scalars
        if bypasses_dispatcher(given):
            return kernels.forward(tensors, gate, scalars)
        result: tuple[Tensor, Tensor] = run(*given)
        return result

    def backward_of(dout: Any, dlse: Any, saved: Saved, gate: Tensor, need: int) -> tuple[Tensor, ...]:
        given = dout, dlse, *saved.tensors, gate, saved.out, saved.lse, *saved.scalars, need
        if bypasses_dispatcher(given):
            return kernels.backward(dout, dlse, saved, gate, need)
        result: tuple[Tensor, ...] = run_backward(*given)
        return result

    return GatedKernels(forward_of, backward_of)
