"""One call on one backend: its results and every derivative, by name, and the same call without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashsci.testing.inputs import Inputs
from flashsci.testing.second_tangents import second_direction

LEAVES = ("q", "k", "v", "bias", "key_weight", "sink", "alibi_slopes", "pair_gate")


def evaluate(inputs: Inputs, backend: str = "auto", lse: bool = True, **options: Any) -> dict[str, Tensor]:
    """out, lse and the gradients of one call, by name (see TENSORS), by the backend asked for and never another.

    Args:
        inputs: dense or packed; ``dout`` None: forward alone; with tangents: the second order, too.
        backend: as in :func:`flashsci.attention`.
        lse: whether to ask for the lse even if there is no ``dlse`` (the sdpa backend has none).
        options: replace options of ``inputs``.

    Raises:
        BackendError: the backend cannot serve the call.
    """
    lse = not inputs.residual and (lse or inputs.dlse is not None)
    learning = inputs.has_gradients
    leaves: dict[str, Tensor] = {n: getattr(inputs, n).detach().requires_grad_(learning) for n in ("q", "k", "v")}
    learnt_of = {"bias": inputs.bias_grad, "key_weight": inputs.key_weight_grad, "sink": True, "pair_gate": True}
    for name, learnt in learnt_of.items():
        x = getattr(inputs, name)
        if x is not None:
            leaves[name] = x.detach().requires_grad_(learning and learnt)
    if inputs.alibi_slopes is not None and inputs.alibi_grad:
        leaves["alibi_slopes"] = inputs.alibi_slopes.detach().requires_grad_(learning)
    call = _call_of(inputs, backend, lse, options)
    tensors: list[Any] = [leaves.get(n) for n in LEAVES]
    second = "scores" if inputs.residual else "lse"
    with _saving(inputs.execution if learning else ""):
        found = dict(zip(("out", second), call(*tensors), strict=False))
    if learning:
        wanted = {f"d{n}": x for n, x in leaves.items() if x.requires_grad}
        dout, dlse = inputs.dout, inputs.dlse
        ends, cotangents = ([], []) if dout is None else ([found["out"]], [dout])
        if inputs.dscores is not None:
            ends.append(found["scores"])
            cotangents.append(inputs.dscores)
        if dlse is not None:
            dlse = dlse.to(found["lse"].dtype)
            ends.append(found["lse"])
            cotangents.append(dlse)
        if not inputs.tangents:
            # The gradient of scores alone does not reach v.
            batched = inputs.execution == "batched"
            if batched:
                cotangents = [torch.stack((-x, x)) for x in cotangents]
            gradients = torch.autograd.grad(
                ends,
                list(wanted.values()),
                cotangents,
                materialize_grads=inputs.residual,
                is_grads_batched=batched,
            )
            if batched:
                gradients = tuple(x[1] for x in gradients)
            found.update(zip(wanted, gradients, strict=True))
        else:
            cotangents = [x.detach().requires_grad_() for x in cotangents]
            gradients = torch.autograd.grad(ends, list(wanted.values()), cotangents, create_graph=True)
            found.update(zip(wanted, gradients, strict=True))
            found.update(_second_order(inputs, wanted, found, cotangents))
            found.update(_forward_mode(inputs, tensors, call))
            if inputs.twice:
                found.update(_forward_mode_twice(inputs, tensors, call))
    return {name: x.detach() for name, x in found.items()}


def _call_of(inputs: Inputs, backend: str, lse: bool, options: dict[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
    """A function from the tensors of :data:`LEAVES` to out and, with ``lse``, lse (or the scores of a residual call)."""
    import flashsci

    arguments: dict[str, Any] = dict(inputs.options, return_lse=lse, backend=backend)
    if inputs.dropout_seed is not None:
        arguments["dropout_seed"] = inputs.dropout_seed
    if inputs.alibi_slopes is not None:
        arguments["alibi_slopes"] = inputs.alibi_slopes
    arguments.update(options)
    if inputs.residual:
        names = ("scale", "dropout_p", "dropout_seed", "precision", "backend")
        arguments = {n: x for n, x in arguments.items() if n in names}

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        optional = dict(zip(LEAVES[3:], others, strict=True))
        given = arguments | {name: x for name, x in optional.items() if x is not None}
        with flashsci.use_backend(backend, strict=True):
            if inputs.residual:
                return flashsci.residual_attention(q, k, v, **given)
            if inputs.cu_seqlens_q is not None:
                result = flashsci.varlen_attention(q, k, v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, **given)
            else:
                result = flashsci.attention(q, k, v, **{"mask": inputs.mask, **given})
        return result if lse else (result,)

    return call


@contextmanager
def _saving(execution: str) -> Iterator[None]:
    """A context in which autograd's saved tensors come back as ``execution`` says."""
    if execution != "hooks":
        yield
        return

    def turned(x: Tensor) -> Tensor:
        return x if x.dim() < 2 else x.transpose(-1, -2).contiguous().transpose(-1, -2)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, turned):
        yield


def check_alone(inputs: Inputs, backend: str, found: dict[str, Tensor], lse: bool = True) -> None:
    """Require the same bits from the same call without gradients, of tensors at other addresses.

    The values that are kept for repeated calls must not depend on the tensors that they were made for, and inference
    must use the same kernels.

    Args:
        inputs, backend, lse: as of :func:`evaluate`, which gave ``found`` with gradients.

    Raises:
        AssertionError: other bits.
    """
    alone = inputs.elsewhere().forward_alone()
    for name, x in evaluate(alone, backend, lse, deterministic=False).items():
        same = x.shape == found[name].shape and torch.equal(_bits(x), _bits(found[name]))
        assert same, f"{name}: other bits without gradients, or of tensors at other addresses"


def _bits(x: Tensor) -> Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def _second_order(
    inputs: Inputs, leaves: dict[str, Tensor], found: dict[str, Tensor], cotangents: list[Tensor]
) -> dict[str, Tensor]:
    """Gradients of <tangents, first gradients> by every tensor that can have one."""
    chosen = [(found[f"d{n[1:]}"], t.to(found[f"d{n[1:]}"].dtype)) for n, t in inputs.tangents.items()]
    wanted = {f"g{n[1:]}": x for n, x in leaves.items()}
    wanted.update(zip(("gdout", "gdlse"), cotangents, strict=False))
    gradients = torch.autograd.grad(
        [x for x, _ in chosen], list(wanted.values()), [t for _, t in chosen], allow_unused=True
    )
    return {
        name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wanted.items(), gradients, strict=True)
    }


def _forward_mode(inputs: Inputs, tensors: list[Tensor | None], call: Any) -> dict[str, Tensor]:
    """Tangents of out and lse."""
    from torch.autograd import forward_ad

    with torch.no_grad(), forward_ad.dual_level():
        duals = []
        for name, x in zip(LEAVES, tensors, strict=True):
            tangent = inputs.tangents.get(f"t{name}")
            x = None if x is None else x.detach()
            if x is not None and tangent is not None:
                # torch gives a tangent the layout of its tensor, and cannot do so in expanded memory.
                x = x.contiguous() if 0 in x.stride() else x
                x = forward_ad.make_dual(x, tangent.to(x.dtype))
            duals.append(x)
        results = dict(zip(("tout", "tlse"), call(*duals), strict=False))
        tangents = {name: (forward_ad.unpack_dual(x), x) for name, x in results.items()}
        return {
            name: torch.zeros_like(x) if pair.tangent is None else pair.tangent for name, (pair, x) in tangents.items()
        }


def _forward_mode_twice(inputs: Inputs, tensors: list[Tensor | None], call: Any) -> dict[str, Tensor]:
    """Tangents of the tangents of out and lse: along a second direction, along which the first moves, too."""
    given = dict(zip(LEAVES, tensors, strict=True))
    names = [n for n, x in given.items() if x is not None and f"t{n}" in inputs.tangents]
    second, mixed = second_direction(inputs.tangents)

    def along(tangents: dict[str, Tensor]) -> list[Tensor]:
        return [tangents[f"t{n}"].to(given[n].dtype) for n in names]  # type: ignore[union-attr]

    def first(*at: Tensor) -> Any:
        """The tangents at some values of the leaves, and of their tangents."""

        def moved(*values: Tensor) -> tuple[Tensor, ...]:
            every = {n: None if x is None else x.detach() for n, x in given.items()}
            found: tuple[Tensor, ...] = call(*(every | dict(zip(names, values, strict=True))).values())
            return found

        half = len(names)
        return torch.func.jvp(moved, at[:half], at[half:])[1]

    with torch.no_grad():
        # torch gives a tangent the layout of its tensor. It cannot do so in expanded memory, nor twice for a negated view.
        at = (*(given[n].detach() for n in names), *along(inputs.tangents))  # type: ignore[union-attr]
        at = tuple(x.contiguous() if 0 in x.stride() else x.resolve_neg() for x in at)
        found = torch.func.jvp(first, at, (*along(second), *along(mixed)))[1]
    return dict(zip(("tuout", "tulse"), found, strict=False))


def evaluate_along(inputs: Inputs, backend: str, directions: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The tangents of out and lse along several directions, in one call under ``torch.vmap``; each is as ``inputs.tangents``."""
    call = _call_of(inputs, backend, True, {})
    names = [n for n in LEAVES if f"t{n}" in directions[0]]
    given = {n: getattr(inputs, n) for n in LEAVES}
    given = {n: None if x is None else x.detach() for n, x in given.items()}
    # torch gives a tangent the layout of its tensor, and cannot do so in expanded memory or for a negated view.
    at = tuple(given[n].contiguous() if 0 in given[n].stride() else given[n].resolve_neg() for n in names)

    def moved(*values: Tensor) -> tuple[Tensor, ...]:
        return call(*(given | dict(zip(names, values, strict=True))).values())

    every = [torch.stack([t[f"t{n}"].to(given[n].dtype) for t in directions]) for n in names]
    with torch.no_grad():
        tout, tlse = torch.vmap(lambda *along: torch.func.jvp(moved, at, along)[1])(*every)
    return [{"tout": tout[n], "tlse": tlse[n]} for n in range(len(directions))]


def evaluate_batch(
    inputs: Inputs, backend: str, cotangents: Sequence[Sequence[Tensor | None]], older: bool = False
) -> list[dict[str, Tensor]]:
    """The gradients for several cotangents, in one call under ``torch.vmap``.

    Args:
        cotangents: of out and lse, each as ``inputs.dout`` and ``inputs.dlse``; None in all, or in none.
        older: by ``is_grads_batched`` instead.
    """
    call = _call_of(inputs, backend, True, {})
    learnt = {"bias": inputs.bias_grad, "key_weight": inputs.key_weight_grad, "alibi_slopes": inputs.alibi_grad}
    given = {n: getattr(inputs, n) for n in LEAVES}
    names = [n for n, x in given.items() if x is not None and learnt.get(n, True)]
    given = {n: None if x is None else x.detach() for n, x in given.items()}
    ends = [i for i, x in enumerate(cotangents[0]) if x is not None]

    def chosen(*values: Tensor) -> tuple[Tensor, ...]:
        found = call(*(given | dict(zip(names, values, strict=True))).values())
        return tuple(found[i] for i in ends)

    leaves = [given[n].requires_grad_(older) for n in names]
    pull = None
    if older:
        results = chosen(*leaves)
    else:
        results, pull = torch.func.vjp(chosen, *leaves)[:2]
    every = [torch.stack([x[i].to(y.dtype) for x in cotangents]) for i, y in zip(ends, results, strict=True)]  # type: ignore[union-attr]
    if pull is None:
        gradients = torch.autograd.grad(results, leaves, every, is_grads_batched=True)
    else:
        gradients = torch.vmap(lambda *along: pull(along))(*every)
    return [{f"d{name}": x[n] for name, x in zip(names, gradients, strict=True)} for n in range(len(cotangents))]


def evaluate_second_batch(
    inputs: Inputs, backend: str, directions: Sequence[dict[str, Tensor]], forward: bool = False
) -> list[dict[str, Tensor]]:
    """Gradients of <tangents, first gradients> along several directions, in one call under ``torch.vmap``.

    Args:
        directions: each as ``inputs.tangents``.
        forward: as tangents of the first gradients instead, which are the same for all tensors but the cotangents.
    """
    call = _call_of(inputs, backend, True, {})
    learnt = {"bias": inputs.bias_grad, "key_weight": inputs.key_weight_grad, "alibi_slopes": inputs.alibi_grad}
    given = {n: getattr(inputs, n) for n in LEAVES}
    names = [n for n, x in given.items() if x is not None and learnt.get(n, True)]
    moved = [n for n in names if f"t{n}" in directions[0]]
    # torch gives a tangent the layout of its tensor, and cannot do so in expanded memory or for a negated view.
    given = {n: x if x is None else x.detach().contiguous().resolve_neg() for n, x in given.items()}
    ends = [i for i, x in enumerate((inputs.dout, inputs.dlse)) if x is not None]

    def chosen(*values: Tensor) -> tuple[Tensor, ...]:
        found = call(*(given | dict(zip(names, values, strict=True))).values())
        return tuple(found[i] for i in ends)

    def gradients(values: Sequence[Tensor], along: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(names, torch.func.vjp(chosen, *values)[1](tuple(along)), strict=True))

    at = [given[n] for n in names]
    with torch.no_grad():
        results = chosen(*at)
    along = [(inputs.dout, inputs.dlse)[i].to(y.dtype) for i, y in zip(ends, results, strict=True)]  # type: ignore[union-attr]
    every = [torch.stack([t[f"t{n}"].to(given[n].dtype) for t in directions]) for n in moved]
    if forward:

        def first(*values: Tensor) -> tuple[Tensor, ...]:
            changed = given | dict(zip(moved, values, strict=True))
            return tuple(gradients([changed[n] for n in names], along).values())

        point = tuple(given[n] for n in moved)
        found = torch.vmap(lambda *t: torch.func.jvp(first, point, t)[1])(*every)
    else:

        def wanted(*values: Tensor) -> tuple[Tensor, ...]:
            found = gradients(values[: len(names)], values[len(names) :])
            return tuple(found[n] for n in moved)

        pull = torch.func.vjp(wanted, *at, *along)[1]
        found = torch.vmap(lambda *t: pull(t))(*every)
    every_name = [f"g{n}" for n in names] + ([] if forward else [("gdout", "gdlse")[i] for i in ends])
    return [{name: x[n] for name, x in zip(every_name, found, strict=True)} for n in range(len(directions))]
