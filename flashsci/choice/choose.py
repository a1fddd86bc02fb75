"""The decision who computes a call: the one function that every kind of call asks.

Each backend says which calls it can compute. The rules of flashsci/choice/preferences alone decide which calls it should
compute: one set for calls, one for the gradients of calls that cuda or triton computed, each with its evidence.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from flashsci.call import laplacian_ops, map_ops, residual_ops
from flashsci.call.problem import Problem, problem_of
from flashsci.choice import backends
from flashsci.choice.backends import (
    ATTENTION,
    FORWARD_OF_CUDA,
    LAPLACIAN,
    PAGED,
    RECORDED,
    RESIDUAL,
    find,
    override,
    requested,
)
from flashsci.choice.candidates import candidates, rejects, rule_of
from flashsci.choice.explanation import explain, refusal
from flashsci.choice.gradients import Choice, by_rules, named
from flashsci.errors import BackendError
from flashsci.limits import CHECKED

_warned: set[str] = set()
_warning = threading.Lock()  # one warning per reason, from any number of threads
_examined: set[tuple[int, int] | None] = {None, *CHECKED}
_choices: dict[tuple[Problem, str, bool], Choice] = {}


def choose(problem: Problem, name: str, strict: bool = False) -> Choice:
    """The choice for a call. Choices are cached; a fallback warns once for each reason.

    Raises:
        BackendError: no backend can serve the call, or the one asked for cannot.
        ValueError: unknown name.
    """
    key = (problem, name, strict)
    known = _choices.get(key)
    if known is not None:
        return known
    tried = candidates(problem, backends.check_name(name), strict)
    # One by one, so that unneeded backends are never imported.
    chosen = next((candidate for candidate in tried if rejects(candidate, problem) is None), None)
    if chosen is None:
        raise BackendError(refusal(explain(problem, name, strict)))
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
    found = named(chosen)
    if name == "auto":
        served = by_rules(chosen) if problem.requires_grad and not problem.batch_invariant else found
        found = served._replace(reason=rule_of(problem).cited())
    _choices[key] = found
    return found


def forget() -> None:
    """Drop all cached choices: the times behind them have changed."""
    _choices.clear()


#: In the place of a backend: no kernels of this kind; the call is computed from parts.
PARTS = ""
HAVE_RESIDUAL = ("auto", "triton")  # the requests that kernels of residual attention may serve
HAVE_LAPLACIAN = ("auto", "triton", "reference")  # the requests that a forward Laplacian takes


def rejects_residual(problem: Problem) -> str | None:
    """Why no kernels compute out and scores of a call at once, or None."""
    return _narrow(problem, RESIDUAL, "residual attention", residual_ops.MAX_HEAD_DIM)


def _narrow(problem: Problem, kind: str, name: str, most: int) -> str | None:
    """Why Triton's kernels of a kind, with head dims up to ``most``, do not serve a call, or None."""
    reason = rejects("triton", problem) or find("triton").ignores(problem, kind)
    if reason is None and max(problem.head_dim, problem.head_dim_v) > most:
        dims = f"{problem.head_dim} and {problem.head_dim_v}"
        reason = f"its kernels of {name} have head dims up to {most}, got {dims}"
    return reason


def _residual(problem: Problem, name: str, strict: bool) -> Choice:
    """The choice for residual attention: the backend that computes out and scores at once, or PARTS."""
    if name not in HAVE_RESIDUAL:
        return Choice(PARTS, PARTS)
    reason = rejects_residual(problem)
    if reason is None:
        return named("triton")
    if name == "triton":
        raise BackendError(f"backend 'triton' cannot serve this call: {reason}; backend='auto' computes it from parts")
    return Choice(PARTS, PARTS, reason)


def _laplacian(problem: Problem, name: str) -> Choice:
    """The choice for a forward Laplacian: Triton's kernels, or PARTS for plain PyTorch."""
    if backends.check_name(name) not in HAVE_LAPLACIAN:
        raise BackendError(
            f"backend {name!r} has no forward Laplacian; use backend='auto', 'triton' or 'reference', also by "
            "flashsci.use_backend around the call"
        )
    if name == "reference" or (name == "auto" and problem.device_type != "cuda"):
        return Choice(PARTS, PARTS)
    reason = _narrow(problem, LAPLACIAN, "the forward Laplacian", laplacian_ops.MAX_HEAD_DIM)
    if reason is None:
        return named("triton")
    if name == "triton":
        raise BackendError(f"backend 'triton' cannot serve this call: {reason}; backend='auto' takes plain PyTorch")
    return Choice(PARTS, PARTS, reason)


def constant(function: Callable[..., Choice]) -> Callable[..., Choice]:
    """A decision that a compiler makes once per trace, from constants alone.

    It raises the refusals of ``function`` where a compiler passes them on: inside a constant, a refusal would be an
    internal error of the compiler. It passes on the backend of ``use_backend``: a compiler that traces the context
    sets it only when the program runs, and traces again where another one is set outside.
    """

    def outcome(name: str | None, strict: bool, *arguments: Any) -> tuple[Choice | None, str]:
        with backends.overridden(name, strict):
            try:
                return function(*arguments), ""
            except BackendError as error:
                return None, str(error)

    # This is the attribute that torch.compiler.assume_constant_result sets; importing the compiler is not needed.
    outcome._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @functools.wraps(function)
    def found(*arguments: Any) -> Choice:
        choice, refusal = outcome(override.name, override.strict, *arguments)
        if choice is None:
            raise BackendError(refusal)
        return choice

    return found


@constant
def decide(kind: str, call: tuple[Any, ...], backend: str) -> Choice:
    """The choice for a call; its kernels are then in ``backends.LOADED[kind]``.

    Args:
        kind: of :mod:`flashsci.choice.backends`.
        call: the arguments of :func:`problem_of`.
        backend: as the user gave it.
    """
    problem, (asked, strict) = problem_of(*call), requested(backend)
    if kind in (RESIDUAL, LAPLACIAN):
        choice = _residual(problem, asked, strict) if kind == RESIDUAL else _laplacian(problem, asked)
        if choice.forward == PARTS:
            return choice
    else:
        choice = choose(problem, asked, strict)
    backends.load(choice.forward, kind)
    if choice.forward in FORWARD_OF_CUDA and problem.capability not in _examined:
        _examine(problem)
    return choice


def _examine(problem: Problem) -> None:
    """Check a GPU on which no kernel of the library has run."""
    assert problem.capability is not None
    if problem.device_type != "cuda" or problem.capability in _examined:
        return
    _examined.add(problem.capability)  # first, so that other threads do not wait
    from flashsci.choice.first_check import look

    if not look(problem.capability):
        _examined.discard(problem.capability)


@constant
def decide_write(call: tuple[Any, ...], backend: str) -> Choice:
    """The choice for an update of a paged cache. cuda uses Triton's kernel: it moves the new tokens once, and no
    kernel could move less."""
    choice = decide(PAGED, call, backend)
    return (
        choice if backends.kernels(choice.forward, PAGED).write_kv_cache is not None else decide(PAGED, call, "triton")
    )


@constant
def decide_map(device_type: str, device_index: int | None, dtype: torch.dtype, head_dim: int) -> Choice:
    """The choice for the reductions of an attention map: Triton's kernels, which are then loaded, or PARTS."""
    asked = requested("auto")[0]
    parts = Choice(PARTS, PARTS)
    if asked not in ("auto", "triton") or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return parts
    if device_type != "cuda" and not (device_type == "cpu" and asked == "triton"):
        return parts
    if device_type == "cuda" and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device_index) < (8, 0):
        return parts
    triton = find("triton")
    if triton.unavailable() is not None or not (device_type == "cuda" or triton.load().INTERPRETED):
        return parts
    return named("triton") if head_dim <= map_ops.MAX_HEAD_DIM else parts


@constant
def recorded_reference() -> Choice:
    """The choice of RECORDED, whose module is then in ``backends.LOADED``."""
    backends.load(RECORDED.name, ATTENTION)
    return named(RECORDED.name)
