"""The raw ops of attention with a gate of pairs: their arguments, schemas, fake kernels and rules for vmap.

``flashsci::<backend>_gated_forward``, ``_gated_backward``, ``_gated_jvp`` and ``_gated_double_backward`` know nothing of
autograd: flashsci/call/gate_nodes.py has the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flashsci.call import kinds
from flashsci.call.ops import (
    ROLES,
    Pass,
    Saved,
    Scalars,
    Tangents,
    Tensors,
    bypasses_dispatcher,
    fake_backward,
    fake_double_backward,
    fake_forward,
    register_vmap,
)
from flashsci.call.schemas import arguments, define_op


class Gate(NamedTuple):
    """The gate of a call: broadcastable to the scores ``[*, Hq, Sq, Sk]``, with as many dims."""

    pair_gate: kinds.Gate


class GatedTangents(NamedTuple):
    """One tangent for each of the tensors that have gradients in kernels: of :class:`Tangents`, and of the gate; None for zero."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    key_weight: Tensor | None
    pair_gate: Tensor | None


# The bits of a double backward follow the fields of GatedTangents, then dout and dlse; ops.NEED_Q, ... are the first.
NEED_GATE, NEED_GATED_DOUT, NEED_GATED_DLSE = (1 << (len(Tangents._fields) + i) for i in range(3))


def without_gate(need: int) -> int:
    """The bits of a double backward as those of a call without a gate."""
    return need & (NEED_GATE - 1) | (need & ~(2 * NEED_GATE - 1)) >> 1


class GatedKernels(NamedTuple):
    """The gated functions of a backend: of its raw ops, and two for plain calls that repeat an earlier one."""

    forward: Callable[..., Any]
    """(tensors, gate, scalars) -> out, lse."""
    backward: Callable[..., Any]
    """(dout, dlse, saved, gate, need) -> dq, dk, dv, dbias, dkey_weight, dpair_gate; those that ``need`` does not name are
    empty."""
    jvp: Callable[..., Any]
    """(tangents, saved, gate) -> tangents of out and lse."""
    double_backward: Callable[..., Any]
    """(tangents, dout, dlse, saved, gate, need) -> gradients of the same six, then of dout and dlse, for cotangents of their
    gradients."""
    prepared_forward: Callable[..., Any]
    """(tensors, gate, scalars) -> a function of (tensors, gate) with the signatures of these: out, lse."""
    prepared_backward: Callable[..., Any]
    """(dout, dlse, saved, gate, need) -> a function of (dout, dlse, tensors, gate, out, lse): the six gradients, None where
    ``need`` does not name them."""


_N, _T = len(Tensors._fields), len(GatedTangents._fields)
_CALL, _SCALARS, _TANGENTS = arguments(Tensors, Gate), arguments(Scalars), arguments(GatedTangents, prefix="t")
_SAVED = f"{_CALL}, Tensor out, Tensor lse, {_SCALARS}"
_ROLES = ROLES | {f"{prefix}pair_gate": kinds.fields(Gate)["pair_gate"].role for prefix in ("", "t")}
_GRADIENTS = ", ".join(f"Tensor {{0}}{name}" for name in GatedTangents._fields)


def flat(saved: Saved, gate: Tensor) -> tuple[Any, ...]:
    """The arguments of the raw ops for a call and its results."""
    return *saved.tensors, gate, saved.out, saved.lse, *saved.scalars


def grouped(given: Sequence[Any]) -> tuple[Saved, Tensor]:
    """The inverse of :func:`flat`."""
    return Saved(Tensors(*given[:_N]), given[_N + 1], given[_N + 2], Scalars(*given[_N + 3 :])), given[_N]


def empty_gradients(tensors: Tensors, gate: Tensor, need: int) -> tuple[Tensor, ...]:
    """Empty tensors for all gradients."""
    found = fake_backward(tensors, need)
    return *found, gate.new_empty(gate.shape if need & NEED_GATE else (0,))


def _empty_double_backward(saved: Saved, gate: Tensor, need: int) -> tuple[Tensor, ...]:
    """Empty tensors for the gradients of the gradients."""
    *_, gout, glse = fake_double_backward(saved.tensors, without_gate(need))
    return *empty_gradients(saved.tensors, gate, need), gout, glse


PASSES = {
    "forward": Pass(
        f"({_CALL}, {_SCALARS}) -> (Tensor out, Tensor lse)",
        lambda tensors, gate, scalars: fake_forward(tensors),
        lambda tensors, gate, scalars: (*tensors, gate, *scalars),
        lambda *given: (Tensors(*given[:_N]), given[_N], Scalars(*given[_N + 1 :])),
    ),
    "backward": Pass(
        f"(Tensor? dout, Tensor? dlse, {_SAVED}, int need) -> ({_GRADIENTS.format('d')})",
        lambda dout, dlse, saved, gate, need: empty_gradients(saved.tensors, gate, need),
        lambda dout, dlse, saved, gate, need: (dout, dlse, *flat(saved, gate), need),
        lambda dout, dlse, *given: (dout, dlse, *grouped(given[:-1]), given[-1]),
    ),
    "jvp": Pass(
        f"({_TANGENTS}, {_SAVED}) -> (Tensor tout, Tensor tlse)",
        lambda tangents, saved, gate: fake_forward(saved.tensors),
        lambda tangents, saved, gate: (*tangents, *flat(saved, gate)),
        lambda *given: (GatedTangents(*given[:_T]), *grouped(given[_T:])),
    ),
    "double_backward": Pass(
        f"({_TANGENTS}, Tensor? dout, Tensor? dlse, {_SAVED}, int need) -> ({_GRADIENTS.format('g')}, Tensor gdout, Tensor gdlse)",
        lambda tangents, dout, dlse, saved, gate, need: _empty_double_backward(saved, gate, need),
        lambda tangents, dout, dlse, saved, gate, need: (*tangents, dout, dlse, *flat(saved, gate), need),
        lambda *given: (
            GatedTangents(*given[:_T]), *given[_T : _T + 2], *grouped(given[_T + 2 : -1]), given[-1],
        ),
    ),
}  # fmt: skip


def define(backend: str, kernels: GatedKernels, keys: Sequence[str]) -> GatedKernels:
    """Define a backend's ops for the given dispatch keys; returns the functions that call them."""
    ops = {name: _define(f"{backend}_gated_{name}", PASSES[name], getattr(kernels, name), keys) for name in PASSES}
    return kernels._replace(**ops)


def _define(name: str, of: Pass, kernel: Callable[..., Any], keys: Sequence[str]) -> Callable[..., Any]:
    op = define_op(
        name,
        of.schema,
        lambda *given: kernel(*of.grouped(*given)),
        keys,
        lambda *given: of.fake(*of.grouped(*given)),
    )
    register_vmap(op, _ROLES)

    def call(*given: Any) -> Any:
        arguments = of.flat(*given)
        return kernel(*given) if bypasses_dispatcher(arguments) else op(*arguments)

    return call
