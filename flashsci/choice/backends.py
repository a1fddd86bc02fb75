"""The table of backends: their names, the modules of their kernels for each kind of call, and requests for one by
name."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flashsci.call.kinds import ATTENTION as ATTENTION
from flashsci.call.kinds import FP8 as FP8
from flashsci.call.kinds import LAPLACIAN as LAPLACIAN
from flashsci.call.kinds import PAGED as PAGED
from flashsci.call.kinds import RESIDUAL as RESIDUAL
from flashsci.call.problem import Problem
from flashsci.choice.loaded import Loaded


@dataclass(frozen=True)
class Backend:
    """One implementation; its modules are imported on first use."""

    name: str
    module: str
    part: str | None = None  # the backend's attribute in the module; None: the module
    #: Its kernels for other kinds of call, each as "module:attribute".
    kinds: Mapping[str, str] = field(default_factory=dict, compare=False)

    def load(self) -> Any:
        """The module that decides on calls of every kind, and computes dense and packed ones."""
        module = importlib.import_module(self.module)
        return module if self.part is None else getattr(module, self.part)

    def kernels(self, kind: str) -> Any:
        """The object that computes calls of one kind."""
        if kind == ATTENTION:
            return self.load()
        module, _, attribute = self.kinds[kind].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine at all, or None."""
        try:
            return self.load().unavailable()
        except ImportError as error:
            return f"cannot be imported: {error}"

    def rejects(self, problem: Problem, anywhere: bool = False) -> str | None:
        """Why its forward cannot serve a call, or None. ``anywhere``: ignore whether this machine can run it."""
        reason = (None if anywhere else self.unavailable()) or self.load().rejects(problem)
        return reason or self.ignores(problem, problem.kind)

    def ignores(self, problem: Problem, kind: str) -> str | None:
        """The refusal of tensors that its kernels of a kind of call do not read, and would ignore; None if there are none.

        A module declares those that it reads: ``READS``, by kind of call.
        """
        reads = getattr(self.load(), "READS", {}).get(kind, ())
        names = [name for name in problem.given if name not in reads]
        return f"its kernels of {kind} calls do not read {', '.join(names)}" if names else None


def _cuda(generation: str, part: str | None, **kinds: str) -> Backend:
    places = {kind: f"flashsci.backends.cuda.{place}" for kind, place in kinds.items()}
    return Backend(f"cuda{generation}", "flashsci.backends.cuda", part, places)


BACKENDS = {
    backend.name: backend
    for backend in (
        # The specification in plain PyTorch.
        Backend(
            "reference",
            "flashsci.backends.reference",
            kinds={
                PAGED: "flashsci.backends.reference_paged:OPS",
                FP8: "flashsci.backends.reference_fp8:OP",
            },
        ),
        # SDPA of PyTorch.
        Backend("sdpa", "flashsci.backends.sdpa"),
        # Readable prototypes of every feature.
        Backend(
            "triton",
            "flashsci.backends.triton",
            kinds={
                PAGED: "flashsci.backends.triton.plans.paged:OPS",
                FP8: "flashsci.backends.triton.plans.fp8:OP",
                RESIDUAL: "flashsci.backends.triton.plans.residual:OPS",
                LAPLACIAN: "flashsci.backends.triton.plans.laplacian:OP",
            },
        ),
        # Hand-written production kernels.
        _cuda("", None, paged="paged:OPS", fp8="fp8:OP"),
    )
}

#: The cuda backend restricted to one generation of its kernels, on any device that runs them: for tests and
#: comparisons. "auto" never chooses it.
GENERATIONS = {
    backend.name: backend
    for backend in (
        _cuda(":sm75", "SM75"),
        _cuda(":sm80", "SM80", paged="paged:SM80"),
        _cuda(":sm90", "SM90", paged="paged:SM90", fp8="fp8:OP"),
    )
}

#: The request for all generations of the cuda backend, without the gradients of other backends.
OWN = "cuda:own"

#: Plain PyTorch for small calls in fp32: a backend where rules name it, without a column in tables.
EAGER = Backend("eager", "flashsci.backends.eager")

#: The reference's packed calls where a compiler or tracer records them.
RECORDED = Backend("reference:packed", "flashsci.backends.reference_packed")

#: Requests of `flashsci.tune` for the forward of one backend with the gradients of another: "cuda/triton".
PAIRS = {f"{forward}/{other}": BACKENDS[forward] for forward, other in (("cuda", "triton"), ("triton", "cuda"))}

_OTHERS = {**GENERATIONS, **PAIRS, EAGER.name: EAGER, RECORDED.name: RECORDED, OWN: BACKENDS["cuda"]}

#: All names of requests but "auto".
REQUESTS = (*BACKENDS, *GENERATIONS, OWN, EAGER.name)

#: Backends whose forward is the library's.
FORWARD_OF_CUDA = frozenset(("cuda", *GENERATIONS))


def find(name: str) -> Backend:
    """The backend of a checked name."""
    return BACKENDS.get(name) or _OTHERS[name]


#: The kernels of the backends chosen so far, by kind of call and name, for callers that a compiler traces: it follows
#: no import.
LOADED: dict[str, Loaded[Any]] = {kind: Loaded() for kind in (ATTENTION, PAGED, FP8, RESIDUAL, LAPLACIAN)}


def kernels(name: str, kind: str = ATTENTION) -> Any:
    """The kernels of a backend for one kind of call."""
    return LOADED[kind].get(name) or find(name).kernels(kind)


def load(name: str, kind: str = ATTENTION) -> Any:
    """:func:`kernels`, which are then in LOADED."""
    found = kernels(name, kind)
    LOADED[kind][name] = found
    return found


class _Override(threading.local):
    def __init__(self) -> None:
        # Attributes of the instance: a compiler that traces `use_backend` finds the same ones afterwards.
        self.name: str | None = None
        self.strict = False


override = _Override()


def check_name(name: str) -> str:
    """The name of a request, if there is such a backend."""
    if name not in ("auto", *BACKENDS, *REQUESTS, *PAIRS):  # BACKENDS may have grown
        known = ", ".join(repr(n) for n in ("auto", *BACKENDS, EAGER.name))
        raise ValueError(f"unknown backend {name!r}; known backends: {known}")
    return name


@contextmanager
def use_backend(name: str, strict: bool = False) -> Iterator[None]:
    """Serve the calls inside with one backend, in this thread, where they say ``backend="auto"``.

    Args:
        name: "auto", "reference", "sdpa", "eager", "triton" or "cuda"; or "cuda:sm75", "cuda:sm80", "cuda:sm90": CUDA
            kernels of that generation only, on any newer device that runs them; "cuda:own": all generations, without
            the gradients of other backends.
        strict: never fall back: an absent CUDA build raises :class:`BackendError` instead of running Triton. This
            also holds for calls that name a backend themselves.

    Raises:
        ValueError: unknown name.

    Examples:
        >>> import torch, flashsci
        >>> q = k = v = torch.randn(2, 4, 8, 16)
        >>> with flashsci.use_backend("reference"):
        ...     out = flashsci.attention(q, k, v)
    """
    before = override.name, override.strict
    override.name, override.strict = check_name(name), strict
    try:
        yield
    finally:
        override.name, override.strict = before


@contextmanager
def overridden(name: str | None, strict: bool) -> Iterator[None]:
    """:func:`use_backend` with what another frame had set, None included."""
    before = override.name, override.strict
    override.name, override.strict = name, strict
    try:
        yield
    finally:
        override.name, override.strict = before


def requested(backend: str) -> tuple[str, bool]:
    """(name, strict) after overrides: the argument, then use_backend, then FLASHSCI_BACKEND, then "auto"."""
    if backend == "auto":
        backend = override.name or _from_environment() or "auto"
    return backend, override.strict


_VARIABLE = "FLASHSCI_BACKEND"
_encoded: Any = getattr(os.environ, "encodekey", str)(_VARIABLE)


def _from_environment() -> str | None:
    # os.environ raises and catches an error where a variable is not set: a tenth of a small call.
    raw = getattr(os.environ, "_data", None)
    if raw is not None and _encoded not in raw:
        return None
    return os.environ.get(_VARIABLE)
