"""Which backend serves a call, which one its gradients come from, and why: names, reasons, preferences, overrides.

Backends say what they can compute. What they should is decided here alone: :data:`PREFERENCES` for the call,
:data:`GRADIENT_PREFERENCES` for the gradients of what the cuda backend computed, each row with its evidence.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.errors import BackendError
from flashsci.ops import NEED_BIAS, Saved, Tensors
from flashsci.problem import Problem, sums_bias


@dataclass(frozen=True)
class Backend:
    """One implementation. ``load`` imports it on first use; ``rejects`` gives the reason it cannot
    serve a call, or None."""

    name: str
    module: str
    part: str | None = None  # the attribute of the module that is meant, else the module itself

    def load(self) -> Any:
        module = importlib.import_module(self.module)
        return module if self.part is None else getattr(module, self.part)

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine at all, or None."""
        try:
            return self.load().unavailable()
        except ImportError as error:
            return f"cannot be imported: {error}"

    def rejects(self, problem: Problem, anywhere: bool = False) -> str | None:
        """Why it cannot serve a call, gradients included, or None. ``anywhere``: leave out whether this machine can run
        it."""
        reason = (None if anywhere else self.unavailable()) or self.load().rejects(problem)
        if reason is None and problem.requires_grad:
            found = gradients(self.name, problem, anywhere=anywhere)
            reason = found.reason if found.backend is None else None
        return reason

    def remark(self, problem: Problem) -> str | None:
        """What is worth knowing about a call that it serves: whose its gradients are, if they are another's."""
        if not problem.requires_grad:
            return None
        found = gradients(self.name, problem)
        if found.backend == self.name:
            return None
        where = ""
        if gradients(self.name, problem, strides=True).backend == self.name:
            where = ", where its Hopper backward does not take the strides of bias or mask"
        return f"its gradients come from {found.backend}{where}: {found.reason}"


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference", "flashsci.backends.reference"),  # the specification in plain PyTorch
        Backend("sdpa", "flashsci.backends.sdpa"),  # what PyTorch ships
        Backend("triton", "flashsci.backends.triton"),  # readable prototypes, every feature
        Backend("cuda", "flashsci.backends.cuda"),  # hand-written production kernels
    )
}


# The cuda backend restricted to one generation of its kernels, on any device that runs them: for tests and
# comparisons. Never chosen by "auto".
GENERATIONS = {
    backend.name: backend
    for backend in (
        Backend("cuda:sm75", "flashsci.backends.cuda", "SM75"),
        Backend("cuda:sm80", "flashsci.backends.cuda", "SM80"),
        Backend("cuda:sm90", "flashsci.backends.cuda", "SM90"),
    )
}


# Backends whose gradients may be another's.
SHARES_GRADIENTS = frozenset(("cuda", *GENERATIONS))


@dataclass(frozen=True)
class Preference:
    """The order in which ``auto`` tries backends for the calls that ``applies`` selects."""

    order: tuple[str, ...]
    applies: Callable[[Problem], bool]
    evidence: str


def _plain(p: Problem) -> bool:
    """What SDPA's fused kernels serve without a materialised mask."""
    causal_at_most = p.window_left < 0 and p.window_right <= 0
    pairs = p.bias or p.mask or p.key_weight
    return causal_at_most and not (pairs or p.lower_right or p.varlen)


def _hopper(p: Problem) -> bool:
    return p.capability is not None and p.capability[0] == 9


def _ampere(p: Problem) -> bool:
    return p.capability is not None and p.capability[0] == 8


def _half(p: Problem) -> bool:
    return p.dtype.itemsize == 2


def _hopper_kernels(p: Problem) -> bool:
    """What the sm90 kernels take (strides apart): the forward, and with gradients the backward."""
    aligned = p.head_dim % 8 == 0 and p.head_dim_v % 8 == 0
    pairs = p.bias or p.mask or p.key_weight
    return _hopper(p) and _half(p) and aligned and not (pairs or p.dropout_p)


def _bias_kernels(p: Problem) -> bool:
    """A bias by pairs, of more queries than a small tile has; a compiler hides its shape."""
    shape = p.bias_shape or ()
    by_pairs = len(shape) > 1 and shape[-2] > 64
    dims = p.head_dim, p.head_dim_v
    if p.dtype == torch.float32:
        return by_pairs and max(dims) <= 128
    aligned = all(dim % 8 == 0 and 16 < dim <= 128 for dim in dims)
    return by_pairs and _half(p) and aligned


# First match wins. Each row says what it rests on; figures are ratios of medians from
# `python -m flashsci bench --suite headline`, benchmarks/results.
PREFERENCES = (
    Preference(
        ("triton", "reference"),
        lambda p: p.paged and p.device_type == "cuda",
        "nobody else takes a paged cache",
    ),
    Preference(
        ("sdpa", "reference"),
        lambda p: p.device_type != "cuda",
        "there is no other fused kernel off the GPU",
    ),
    Preference(
        ("sdpa", "triton", "reference"),
        lambda p: p.capability is not None and p.capability < (8, 0),
        "Triton emits no tensor-core code before sm_80",
    ),
    Preference(
        ("cuda", "sdpa", "triton", "reference"),
        lambda p: _hopper_kernels(p) and _plain(p),
        "H200, dense bf16, against SDPA's best (cuDNN): 36 cells of D 64, 128, 256 forward 1.10 to 1.39, "
        "1.20 in the geometric mean, backward 1.06 to 1.47, 1.22; D 96 and 192 forward 1.07 to 1.53, "
        "backward 1.15 to 1.57 (docs/kernels/sm90_*.md)",
    ),
    Preference(
        ("cuda", "triton", "sdpa", "reference"),
        lambda p: _hopper_kernels(p) and not (p.varlen and p.head_dim < 128),
        "H200, against Triton: 1.8 times forward and 1.6 backward with a window of 1,024, 1.5 and "
        "1.4 on packed documents; short packed crystals (D 32, 64) are Triton's",
    ),
    Preference(
        ("sdpa", "triton", "cuda", "reference"),
        lambda p: _hopper(p) and _half(p) and _plain(p),
        "H200, dense D 64 to 256: SDPA (cuDNN) leads Triton by 1.05 to 1.38 forward, "
        "1.15 to 1.37 backward",
    ),
    Preference(
        ("cuda", "triton", "sdpa", "reference"),
        lambda p: _ampere(p) and _half(p),
        "written for this generation; not measured on it yet",
    ),
    Preference(
        ("cuda", "triton", "sdpa", "reference"),
        lambda p: _hopper(p) and p.dtype == torch.float32 and _plain(p) and 32 < p.head_dim <= 128,
        "H200, dense fp32 from S 2048: D 64 against Triton forward 2.1, backward 1.6; D 128 against "
        "SDPA (efficient) 1.4 and 1.0",
    ),
    Preference(
        ("cuda", "triton", "sdpa", "reference"),
        lambda p: _hopper(p) and _bias_kernels(p),
        "H200, against Triton: 10 cases in bf16 forward 0.6 (one structure, small grid) to 1.4, 1.14 "
        "in the mean, backward 1.0 to 1.75, 1.33; 4 in fp32 forward 1.08 to 1.20, backward 0.98 to 1.74",
    ),
    Preference(
        ("triton", "cuda", "sdpa", "reference"),
        lambda p: True,
        "H200: Triton leads on packed crystals, short rows (Sq up to 64, D up to 16) and a bias of "
        "keys; with bias it leads SDPA by 2.1 to 5.9",
    ),
)


@dataclass(frozen=True)
class GradientPreference:
    """Who computes the gradients of what the cuda backend computed forward, in order, for the calls that ``applies``
    selects, given the generation of kernels that the library would take for them."""

    order: tuple[str, ...]
    applies: Callable[[Problem, int], bool]
    evidence: str


def _unbiased(p: Problem) -> bool:
    return not (p.bias or p.mask)


def _widest(p: Problem) -> int:
    return max(p.head_dim, p.head_dim_v)


# First match wins. Only cuda and triton take each other's out and lse.
GRADIENT_PREFERENCES = (
    GradientPreference(
        ("cuda", "triton"),
        lambda p, generation: not (_hopper(p) and _half(p)),
        "H200, fp32: Triton takes 1.6 times as long (dense, D 64), with bias 0.98 to 1.74; other devices are not "
        "measured yet",
    ),
    GradientPreference(
        ("triton", "cuda"),
        lambda p, generation: (
            generation == 90 and p.bias_grad and p.bias_summed and _widest(p) <= 64
        ),
        "H200, head dims to 64: Triton sums the gradient of a 16-bit bias that is shared in 0.83 to 0.89 of the time",
    ),
    GradientPreference(
        ("cuda", "triton"),
        lambda p, generation: generation == 90,
        "H200, the Hopper backward: Triton takes 1.6 times as long with a window of 1,024, 1.4 on packed documents, "
        "1.33 in the mean of 10 cases with bias, 1.3 to 1.7 with a shared bias of fp32",
    ),
    GradientPreference(
        ("cuda", "triton"),
        lambda p, generation: _unbiased(p) and _widest(p) > 128,
        "H200, D 256: the backward written for sm80 takes half of Triton's time",
    ),
    GradientPreference(
        ("triton", "cuda"),
        lambda p, generation: True,
        "on Hopper its backward is faster than the one written for sm80",
    ),
)


@dataclass(frozen=True)
class Explanation:
    """Who was asked for a call, who refused and why. Its ``str`` is made to be read."""

    problem: Problem
    asked: str
    chosen: str | None
    reasons: dict[str, str | None]  # why a backend cannot serve the call; None: it can
    evidence: str = ""
    remarks: dict[str, str] = field(default_factory=dict)  # on backends that can serve it

    def __str__(self) -> str:
        p = self.problem
        device = (
            p.device_type
            if p.capability is None
            else f"{p.device_type} sm_{p.capability[0]}{p.capability[1]}"
        )
        lines = [
            f"asked for {self.asked!r}, chosen {self.chosen!r} ({device}, "
            f"{str(p.dtype).removeprefix('torch.')})"
        ]
        for name, reason in self.reasons.items():
            sign = "->" if name == self.chosen else "  "
            text = "can serve this call" if reason is None else f"no: {reason}"
            if name in self.remarks:
                text += f"; {self.remarks[name]}"
            lines.append(f" {sign} {name:<9} {text}")
        if self.evidence:
            lines.append(f"    order of 'auto': {self.evidence}")
        return "\n".join(lines)

    __repr__ = __str__


class _Override(threading.local):
    name: str | None = None
    strict: bool = False


_override = _Override()
_warned: set[str] = set()
_warning = threading.Lock()  # once for each reason, however many threads meet it
_choices: dict[tuple[Problem, str, bool], str] = {}


def _check_name(name: str) -> str:
    if name != "auto" and name not in BACKENDS and name not in GENERATIONS:
        known = ", ".join(repr(n) for n in ("auto", *BACKENDS))
        raise ValueError(f"unknown backend {name!r}; known backends: {known}")
    return name


@contextmanager
def use_backend(name: str, strict: bool = False) -> Iterator[None]:
    """Serve the calls inside with one backend, in this thread, where they say ``backend="auto"``.

    Args:
        name: "auto", "reference", "sdpa", "triton" or "cuda"; or "cuda:sm75", "cuda:sm80",
            "cuda:sm90": CUDA kernels of that generation only, on any newer device that runs them.
        strict: never fall back: a CUDA build that is absent raises :class:`BackendError` instead of
            running Triton. It holds for calls that name a backend themselves, too.

    Raises:
        ValueError: unknown name.

    Examples:
        >>> import torch, flashsci
        >>> q = k = v = torch.randn(2, 4, 8, 16)
        >>> with flashsci.use_backend("reference"):
        ...     out = flashsci.attention(q, k, v)
    """
    before = _override.name, _override.strict
    _override.name, _override.strict = _check_name(name), strict
    try:
        yield
    finally:
        _override.name, _override.strict = before


def requested(backend: str) -> tuple[str, bool]:
    """(name, strict) after overrides: the argument, then use_backend, then FLASHSCI_BACKEND, then
    "auto"."""
    if backend == "auto":
        backend = _override.name or os.environ.get("FLASHSCI_BACKEND") or "auto"
    return backend, _override.strict


def find(name: str) -> Backend:
    """The backend of a checked name."""
    return BACKENDS.get(name) or GENERATIONS[name]


class Gradients(NamedTuple):
    """Whose kernels compute the gradients of what a backend computed."""

    backend: str | None  # None: nobody's
    reason: str | None = None  # why it is not the backend itself


def gradients(
    name: str, problem: Problem, strides: bool = False, anywhere: bool = False
) -> Gradients:
    """The choice for the gradients of a call that backend ``name`` serves.

    Args:
        strides: bias and mask lie in memory as the Hopper backward takes them; a Problem does not know.
        anywhere: leave out whether this machine can run the others.
    """
    module = find(name).load()
    if name not in SHARES_GRADIENTS or not hasattr(module, "backward_kernels"):
        return Gradients(name)
    generation, lacks = module.backward_kernels(problem, strides)
    order: tuple[str, ...] = (name, "triton")
    why = lacks
    if name == "cuda:sm90":  # for tests of these kernels: no other may answer
        order = (name,)
    elif name == "cuda" and lacks is None:
        row = next(p for p in GRADIENT_PREFERENCES if p.applies(problem, generation))
        order, why = row.order, row.evidence
    for candidate in order:
        if candidate == name:
            reason = lacks
        else:
            other = find(candidate)
            reason = (None if anywhere else other.unavailable()) or other.load().rejects(problem)
        if reason is None:
            return Gradients(candidate, None if candidate == name else why)
    if order == (name,):
        advice = "use backend='cuda'"
        return Gradients(None, f"it has no gradients of this call of its own: {lacks}; {advice}")
    return Gradients(
        None,
        f"its gradients would come from the {order[-1]} backend, which cannot serve this call ({reason}); "
        "use backend='sdpa' or 'reference'",
    )


@functools.lru_cache(maxsize=1024)
def _gradients_of(
    name: str,
    strides: bool,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    **features: Any,
) -> str:
    """The backend that computes gradients, by what decides it."""
    sizes = 1, 1, head_dim, head_dim_v
    problem = problem_of(device.type, device.index, dtype, *sizes, tuple(features.items()))
    found = gradients(name, problem, strides)
    if found.backend is None:
        raise BackendError(
            f"flashsci: backend {name!r} has no backward for this call: {found.reason}"
        )
    return found.backend


def backward(
    name: str, dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dbias, dkey_weight of what backend ``name`` computed, by whose kernels they should be computed."""
    module = kernels(name)
    # By name first: a look-up of what a module has not costs as much as the rest of a small call.
    if name in SHARES_GRADIENTS and hasattr(module, "backward_kernels"):
        module = kernels(_gradient_backend(name, module, saved, need))
    found: tuple[Tensor, ...] = module.backward(dout, dlse, saved, need)
    return found


def _gradient_backend(name: str, module: Any, saved: Saved, need: int) -> str:
    q, _, v, bias, key_weight, mask, cu_seqlens_q, *_ = saved.tensors
    scalars = saved.scalars
    features: dict[str, Any] = {}
    if bias is not None:
        features["bias_shape"] = ()  # there is one; a compiler may hide its sizes
        features["bias_grad"] = bool(need & NEED_BIAS)
        features["bias_summed"] = sums_bias(bias, q.shape[:-2])
    return _gradients_of(
        name, module.hopper_takes(saved, need), q.device, q.dtype, q.shape[-1], v.shape[-1], mask=mask is not None, key_weight=key_weight is not None,
        varlen=cu_seqlens_q is not None, dropout_p=0.5 if scalars.dropout_p else 0.0, precision=scalars.precision,
        requires_grad=True, **features,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _triton_rejects(device: torch.device, dtype: torch.dtype, d: int, dv: int) -> str | None:
    problem = problem_of(device.type, device.index, dtype, 1, 1, d, dv, ())
    return BACKENDS["triton"].rejects(problem)


def triton_rejects(tensors: Tensors) -> str | None:
    """Why Triton's kernels cannot compute second derivatives of a call, or None."""
    q, v = tensors.q, tensors.v
    return _triton_rejects(q.device, q.dtype, q.shape[-1], v.shape[-1])


def second_order(name: str, tensors: Tensors) -> Any:
    """The module with the second-order kernels for what a fused backend computed: its own, or Triton's.

    Raises:
        BackendError: neither has them.
    """
    module = kernels(name)
    if hasattr(module, "double_backward"):
        return module
    reason = triton_rejects(tensors)
    if reason is not None:
        raise BackendError(
            f"flashsci: second derivatives come from the triton backend, and {reason}; compute "
            "this call with backend='reference'"
        )
    return kernels("triton")


def _candidates(problem: Problem, name: str, strict: bool) -> tuple[str, ...]:
    """The backends to try, in order, for a request."""
    if name == "auto":
        return _preference(problem).order
    absent = name == "cuda" and not strict and find(name).unavailable() is not None
    return (name, "triton") if absent else (name,)


def _preference(problem: Problem) -> Preference:
    return next(p for p in PREFERENCES if p.applies(problem))


def explain(problem: Problem, name: str, strict: bool = False) -> Explanation:
    """What :func:`choose` would do, with every backend's reason."""
    _check_name(name)
    candidates = _candidates(problem, name, strict)
    reasons = {n: find(n).rejects(problem) for n in dict.fromkeys((*BACKENDS, *candidates))}
    chosen = next((candidate for candidate in candidates if reasons[candidate] is None), None)
    order = f"{' > '.join(candidates)}: {_preference(problem).evidence}" if name == "auto" else ""
    remarks = {n: find(n).remark(problem) for n, reason in reasons.items() if reason is None}
    known = {n: remark for n, remark in remarks.items() if remark is not None}
    return Explanation(problem, name, chosen, reasons, order, known)


def choose(problem: Problem, name: str, strict: bool = False) -> str:
    """The backend for a call. Decisions are cached; a fallback warns once for each reason.

    Raises:
        BackendError: nobody, or not the backend asked for, can serve it.
        ValueError: unknown name.
    """
    key = (problem, name, strict)
    known = _choices.get(key)
    if known is not None:
        return known
    candidates = _candidates(problem, _check_name(name), strict)
    # One by one, so that a backend nobody needs is never imported.
    chosen = next(
        (candidate for candidate in candidates if find(candidate).rejects(problem) is None),
        None,
    )
    if chosen is None:
        raise BackendError(_refusal(explain(problem, name, strict)))
    if name not in ("auto", chosen):
        reason = str(find(name).unavailable())
        with _warning:
            first = reason not in _warned
            _warned.add(reason)
        if first:
            warnings.warn(
                f"flashsci: backend {name!r} is unavailable, running {chosen!r}: {reason}",
                stacklevel=3,
            )
    if len(_choices) > 4096:
        _choices.clear()
    _choices[key] = chosen
    return chosen


def _refusal(found: Explanation) -> str:
    able = ", ".join(repr(n) for n, reason in found.reasons.items() if reason is None)
    if found.asked == "auto":
        return "no backend can serve this call: " + "; ".join(
            f"{n}: {r}" for n, r in found.reasons.items()
        )
    message = f"backend {found.asked!r} cannot serve this call: {found.reasons[found.asked]}"
    return message + (f"; these can: {able}" if able else "")


# Modules of backends chosen so far, for callers that torch.compile traces: it follows a dict, not
# an import.
LOADED: dict[str, Any] = {}


def call(
    q: Tensor, v: Tensor, heads_q: int, heads_k: int, features: dict[str, object]
) -> tuple[Any, ...]:
    """The arguments of :func:`problem_of`: only constants, so that torch.compile can hand them
    over (``index`` makes it specialise on heads and head dims, which kernels do anyway)."""
    device = q.device
    sizes = index(heads_q), index(heads_k), index(q.shape[-1]), index(v.shape[-1])
    return (device.type, device.index, q.dtype, *sizes, tuple(features.items()))


def problem_of(
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    heads_q: int,
    heads_k: int,
    head_dim: int,
    head_dim_v: int,
    features: tuple[tuple[str, Any], ...],
) -> Problem:
    on_gpu = device_type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device_index) if on_gpu else None
    return Problem(
        device_type, capability, dtype, heads_q, heads_k, head_dim, head_dim_v, **dict(features)
    )


def decide(*arguments: Any) -> str:
    """The backend (its name; its module is then in LOADED) for ``(*arguments of problem_of, backend
    argument)``."""
    name = choose(problem_of(*arguments[:-1]), *requested(arguments[-1]))
    LOADED[name] = kernels(name)
    return name


# What torch.compiler.assume_constant_result sets, without importing the compiler: decided once per
# trace.
decide._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernels(name: str) -> Any:
    """The module of a backend, by name."""
    return LOADED.get(name) or find(name).load()
