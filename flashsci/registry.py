"""Which backend serves a call, and why: names, reasons, the preference table, overrides."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch
from torch import Tensor

from flashsci.problem import Problem


class BackendError(RuntimeError):
    """No backend, or not the one asked for, can serve the call; the message says why and what else
    can."""


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

    def rejects(self, problem: Problem) -> str | None:
        return self.unavailable() or self.load().rejects(problem)

    def remark(self, problem: Problem) -> str | None:
        """What is worth knowing about a call that it serves."""
        found: str | None = getattr(self.load(), "remark", lambda _: None)(problem)
        return found


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference", "flashsci.backends.reference"),  # the specification in plain PyTorch
        Backend("sdpa", "flashsci.backends.sdpa"),  # what PyTorch ships
        Backend("triton", "flashsci.backends.triton"),  # readable prototypes, every feature
        Backend("cuda", "flashsci.backends.cuda"),  # hand-written production kernels
    )
}


# The cuda backend held to one generation of its kernels, on any device that runs them: for tests and
# comparisons. Never chosen by "auto".
GENERATIONS = {
    backend.name: backend
    for backend in (
        Backend("cuda:sm75", "flashsci.backends.cuda", "SM75"),
        Backend("cuda:sm80", "flashsci.backends.cuda", "SM80"),
        Backend("cuda:sm90", "flashsci.backends.cuda", "SM90"),
    )
}


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

    Example:
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
