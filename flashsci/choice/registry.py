"""The choice of a backend for a call and for its gradients: names, reasons, preferences, overrides.

Each backend says which calls it can compute. The rules of flashsci/choice/preferences alone decide which calls it should
compute: one set for calls, one for the gradients of calls that the cuda backend computed, each with its evidence.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashsci.call.ops import NEED_BIAS, Given, Saved, Scalars, Tensors
from flashsci.call.problem import Problem, sums_bias
from flashsci.call.tracing import count_flops, rounds_products
from flashsci.choice import preferences
from flashsci.choice.loaded import Loaded
from flashsci.errors import BackendError


@dataclass(frozen=True)
class Backend:
    """One implementation. ``load`` imports it on first use; ``rejects`` gives the reason why it cannot serve a call,
    or None."""

    name: str
    module: str
    part: str | None = None  # the backend's attribute in the module; None: the module

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
        """Why it cannot serve a call, gradients included, or None. ``anywhere``: ignore whether this machine can run
        it."""
        reason = (None if anywhere else self.unavailable()) or self.load().rejects(problem)
        if reason is None and problem.requires_grad:
            found = gradients(self.name, problem, anywhere=anywhere)
            reason = found.reason if found.backend is None else None
        return reason

    def remark(self, problem: Problem) -> str | None:
        """A note on a call that it serves: whose kernels compute its gradients, if these are another backend's or of
        an older generation than the device's."""
        if not problem.requires_grad:
            return None
        found = gradients(self.name, problem)
        kernels = _older_kernels(found.backend, problem)
        source = f"its gradients come from {found.backend}{kernels}"
        if found.backend == self.name.removeprefix("auto:"):
            return f"{source}: so short a call is faster by them" if kernels else None
        where = ""
        if gradients(self.name, problem, strides=True).backend == self.name:
            where = ", where its Hopper backward does not take the strides of bias or mask"
        return f"{source}{where}: {found.reason}"


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
# comparisons. "auto" never chooses it.
GENERATIONS = {
    backend.name: backend
    for backend in (
        Backend("cuda:sm75", "flashsci.backends.cuda", "SM75"),
        Backend("cuda:sm80", "flashsci.backends.cuda", "SM80"),
        Backend("cuda:sm90", "flashsci.backends.cuda", "SM90"),
        # All generations, and no other backend's gradients.
        Backend("cuda:own", "flashsci.backends.cuda", "OWN"),
    )
}


# Plain PyTorch for small calls in fp32: a backend where rules name it, without a column in tables.
EAGER = Backend("eager", "flashsci.backends.eager")

# Triton as chosen by "auto": a request for Triton by name gets its gradients too.
AUTO_TRITON = Backend("auto:triton", "flashsci.backends.triton")

# The reference's packed calls where a compiler or tracer records them.
RECORDED = Backend("reference:packed", "flashsci.backends.reference_packed")
_ALL = {
    **BACKENDS,
    **GENERATIONS,
    EAGER.name: EAGER,
    AUTO_TRITON.name: AUTO_TRITON,
    RECORDED.name: RECORDED,
}

FORWARD_OF_CUDA = frozenset(("cuda", *GENERATIONS))

# Backends whose gradients may be another's: cuda and triton accept each other's out and lse.
SHARES_GRADIENTS = FORWARD_OF_CUDA | {AUTO_TRITON.name}


@dataclass(frozen=True)
class Explanation:
    """The outcome of a choice: who was asked for a call, who refused and why. Its ``str`` is made to be read."""

    problem: Problem
    asked: str
    chosen: str | None
    reasons: dict[str, str | None]  # why a backend cannot serve the call; None: it can
    evidence: str = ""
    remarks: dict[str, str] = field(default_factory=dict)  # on backends that can serve it
    #: Kernels of the call and of its gradients, "sm90/triangle_fwd": folders of csrc, in the order of their launches.
    #: None if the backend is not cuda, or if nothing is known of them here.
    kernel: str | None = None
    gradient_kernel: str | None = None

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
        if self.kernel is not None:
            gradients = self.gradient_kernel
            tail = "" if gradients is None else f"; its gradients: {gradients}"
            lines.append(f"    kernels: {self.kernel}{tail}")
        elif self.gradient_kernel is not None:
            lines.append(f"    kernels of its gradients: {self.gradient_kernel}")
        if self.evidence:
            lines.append(f"    order of 'auto': {self.evidence}")
        return "\n".join(lines)

    __repr__ = __str__


class _Override(threading.local):
    def __init__(self) -> None:
        # Attributes of the instance: a compiler that traces `use_backend` finds the same ones afterwards.
        self.name: str | None = None
        self.strict = False


_override = _Override()
_warned: set[str] = set()
_warning = threading.Lock()  # one warning per reason, from any number of threads
_choices: dict[tuple[Problem, str, bool], str] = {}


def _check_name(name: str) -> str:
    if name not in ("auto", EAGER.name, *BACKENDS, *GENERATIONS):
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
    before = _override.name, _override.strict
    _override.name, _override.strict = _check_name(name), strict
    try:
        yield
    finally:
        _override.name, _override.strict = before


def requested(backend: str) -> tuple[str, bool]:
    """(name, strict) after overrides: the argument, then use_backend, then FLASHSCI_BACKEND, then "auto"."""
    if backend == "auto":
        backend = _override.name or _from_environment() or "auto"
    return backend, _override.strict


_VARIABLE = "FLASHSCI_BACKEND"
_encoded: Any = getattr(os.environ, "encodekey", str)(_VARIABLE)


def _from_environment() -> str | None:
    # os.environ raises and catches an error where a variable is not set: a tenth of a small call.
    raw = getattr(os.environ, "_data", None)
    if raw is not None and _encoded not in raw:
        return None
    return os.environ.get(_VARIABLE)


def find(name: str) -> Backend:
    """The backend of a checked name."""
    return BACKENDS.get(name) or _ALL[name]


class Gradients(NamedTuple):
    """The backend whose kernels compute the gradients of a call, and the reason for it."""

    backend: str | None  # None: no backend's
    reason: str | None = None  # why it is not the backend itself


def gradients(
    name: str, problem: Problem, strides: bool = False, anywhere: bool = False
) -> Gradients:
    """The choice for the gradients of a call that backend ``name`` serves.

    Args:
        strides: whether bias and mask have the strides that the Hopper backward takes; a Problem does not hold them.
        anywhere: ignore whether this machine can run the others.
    """
    module = _sharing(name)
    if module is None:
        return Gradients(name)
    if name == AUTO_TRITON.name:
        return _instead_of_triton(module, problem, strides, anywhere)
    generation, lacks = module.backward_kernels(problem, strides)
    order: tuple[str, ...] = (name, "triton")
    why = lacks
    if name in ("cuda:sm90", "cuda:own"):  # for tests and timing: no other may answer
        order = (name,)
    elif name == "cuda" and lacks is None:
        rule = preferences.find("gradients", problem, generation, "cuda")
        order, why = rule.order, rule.cited()
    for candidate in order:
        if candidate == name:
            reason = lacks
        else:
            other = find(candidate)
            reason = (None if anywhere else other.unavailable()) or other.load().rejects(problem)
        if reason is None:
            return Gradients(candidate, None if candidate == name else why)
    if order == (name,):
        return Gradients(None, f"it has no gradients of this call of its own: {lacks}")
    return Gradients(
        None,
        f"its gradients would come from the {order[-1]} backend, which cannot serve this call ({reason})",
    )


def _older_kernels(name: str | None, problem: Problem) -> str:
    """A note on the older generation of kernels that computes the gradients; empty if none does."""
    if name not in FORWARD_OF_CUDA:
        return ""
    generation = find(name).load().older_backward(problem)
    return f" (sm{generation} kernels)" if generation else ""


class _Sizes(NamedTuple):
    """The sizes of a call whose gradients are wanted; known where no compiler hides them."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    bias: tuple[int, ...]
    sequences: int  # packed; -1: dense

    def features(self) -> dict[str, Any]:
        batch = self.q[:-3] if self.sequences < 0 else (self.sequences,)
        sizes = {"batch": batch, "seq_q": self.q[-2], "seq_k": self.k[-2]}
        return {**sizes, "bias_shape": self.bias} if self.bias else sizes

    def heads(self) -> tuple[int, int]:
        return (1, 1) if len(self.q) < 3 else (self.q[-3], self.k[-3])


def _sharing(name: str) -> Any:
    """The module that decides whether its kernels compute the gradients of calls that backend ``name`` computed; None
    if there is no choice."""
    # By name first: a failing attribute look-up on a module costs as much as the rest of a small call.
    if name not in SHARES_GRADIENTS:
        return None
    module = kernels("cuda" if name == AUTO_TRITON.name else name)
    return module if hasattr(module, "backward_kernels") else None


def _instead_of_triton(module: Any, problem: Problem, strides: bool, anywhere: bool) -> Gradients:
    """The gradients' choice for a call that Triton computed because ``auto`` chose it."""
    reason = (None if anywhere else BACKENDS["cuda"].unavailable()) or module.rejects(problem)
    generation, lacks = (0, reason) if reason else module.backward_kernels(problem, strides)
    if lacks is None:
        rule = preferences.find("gradients", problem, generation, "triton")
        if rule.order[0] == "cuda":
            return Gradients("cuda", rule.cited())
    return Gradients("triton")


@functools.lru_cache(maxsize=4096)
def _gradients_of(
    name: str,
    strides: bool,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    sizes: _Sizes | None,
    **features: Any,
) -> str:
    """The backend that computes gradients, cached by the properties that decide it."""
    heads = (1, 1) if sizes is None else sizes.heads()
    if sizes is not None:
        features |= sizes.features()
    dims = head_dim, head_dim_v
    problem = problem_of(device.type, device.index, dtype, *heads, *dims, tuple(features.items()))
    found = gradients(name, problem, strides)
    if found.backend is None:
        raise BackendError(
            f"flashsci: backend {name!r} has no backward for this call: {found.reason}"
            + _advice(_able(problem, {}))
        )
    return found.backend


def backward(
    name: str, dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dbias, dkey_weight of a call that backend ``name`` computed, by the kernels that should compute
    them."""
    sharing = _sharing(name)
    if sharing is not None:
        # The choice asks the library, which takes no other strides; saved-tensor hooks may bring back any.
        saved = saved._replace(tensors=saved.tensors.laid_out())
        name = _gradient_backend(name, sharing, saved, need)
    module = kernels(name)
    count_flops()
    found: tuple[Tensor, ...] = module.backward(dout, dlse, saved, need)
    return found


def prepared_forward(
    module: Any, tensors: Tensors, scalars: Scalars
) -> Callable[[Given], tuple[Tensor, Tensor]]:
    """A module's forward for plain tensors with the signature of these, in their order, with everything else
    decided."""
    if hasattr(module, "prepared_forward"):
        found: Callable[[Given], tuple[Tensor, Tensor]] = module.prepared_forward(tensors, scalars)
        return found
    return lambda tensors: module.forward(Tensors(*tensors), scalars)


def prepared_backward(
    name: str, dout: Tensor | None, dlse: Tensor | None, saved: Saved, need: int
) -> Callable[..., tuple[Tensor | None, ...]]:
    """:func:`backward` prepared in the same way: a function of (dout, dlse, tensors, out, lse), with None for
    gradients that ``need`` does not name."""
    sharing = _sharing(name)
    if sharing is not None:
        name = _gradient_backend(name, sharing, saved, need)
    module, scalars = kernels(name), saved.scalars
    if hasattr(module, "prepared_backward"):
        found: Callable[..., tuple[Tensor | None, ...]] = module.prepared_backward(
            dout, dlse, saved, need
        )
        return found
    wanted = [bool(need >> i & 1) for i in range(5)]

    def run(
        dout: Tensor | None, dlse: Tensor | None, tensors: Given, out: Tensor, lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        found = module.backward(dout, dlse, Saved(Tensors(*tensors), out, lse, scalars), need)
        return tuple([x if want else None for x, want in zip(found, wanted, strict=True)])

    return run


def _gradient_backend(name: str, module: Any, saved: Saved, need: int) -> str:
    q, k, v, bias, key_weight, mask, cu_seqlens_q, _, _, _, alibi_slopes = saved.tensors
    scalars = saved.scalars
    features: dict[str, Any] = {}
    bias_shape: tuple[int, ...] = ()
    if name in FORWARD_OF_CUDA and module.takes_pairs(saved.tensors, scalars):
        return name
    if bias is not None:
        bias_shape = bias.shape
        features["bias_shape"] = ()  # the call has a bias; a compiler may hide its sizes
        features["bias_grad"] = bool(need & NEED_BIAS)
        features["bias_summed"] = sums_bias(bias, q.shape[:-2])
    sequences = -1 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    window = scalars.window_left, scalars.window_right
    known = all(type(n) is int for n in (*q.shape, *k.shape, *window, sequences))
    sizes = _Sizes(q.shape, k.shape, bias_shape, sequences) if known else None
    return _gradients_of(
        name, module.hopper_takes(saved, need), q.device, q.dtype, q.shape[-1], v.shape[-1], sizes,
        mask=mask is not None, key_weight=key_weight is not None, alibi=alibi_slopes is not None, varlen=cu_seqlens_q is not None,
        window_left=window[0] if known else -1, window_right=window[1] if known else -1,
        lower_right=scalars.lower_right, softcap=1.0 if scalars.softcap else 0.0, dropout_p=0.5 if scalars.dropout_p else 0.0, precision=scalars.precision,
        deterministic=scalars.deterministic, requires_grad=True, **features,
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
    """The module with the second-order kernels for calls that a fused backend computed: its own, or Triton's.

    Raises:
        BackendError: neither has them.
    """
    module = kernels(name)
    if hasattr(module, "double_backward"):
        count_flops()
        return module
    reason = triton_rejects(tensors)
    if reason is not None:
        raise BackendError(
            f"flashsci: second derivatives come from the triton backend, and {reason}; compute "
            "this call with backend='reference'"
        )
    module = kernels("triton")
    count_flops()
    return module


def _candidates(problem: Problem, name: str, strict: bool) -> tuple[str, ...]:
    """The backends to try, in order, for a request."""
    if name == "auto":
        order = preferences.find("calls", problem).order
        return tuple(n for n in order if _may_choose(n, problem))
    absent = name == "cuda" and not strict and find(name).unavailable() is not None
    return (name, "triton") if absent else (name,)


def _may_choose(name: str, p: Problem) -> bool:
    """Whether ``auto`` may take a backend that can serve a call.

    Without a request, float32 stays float32, and memory stays proportional to the call's own tensors.
    """
    if name not in ("eager", "sdpa"):
        return True
    has_tf32 = p.capability is not None and p.capability >= (8, 0)
    rounded = has_tf32 and p.precision != "tf32" and rounds_products(p.dtype)
    return not rounded and (name != "eager" or may_hold_scores(p))


def may_hold_scores(p: Problem) -> bool:
    """Whether ``auto`` may take a backend that holds every score.

    The scores must be no more numbers than the call's own tensors (q, k, v, out and bias), so that memory stays
    proportional to those.
    """
    if p.varlen or p.batch is None or p.seq_q is None or p.seq_k is None:
        return False
    rows = p.heads_q * p.seq_q + p.heads_k * p.seq_k
    bias = math.prod(p.bias_shape) if p.bias_shape else 0
    count = math.prod(p.batch)
    return (
        count * p.heads_q * p.seq_q * p.seq_k <= count * rows * (p.head_dim + p.head_dim_v) + bias
    )


def explain(problem: Problem, name: str, strict: bool = False) -> Explanation:
    """The outcome that :func:`choose` would have, with every backend's reason."""
    _check_name(name)
    candidates = _candidates(problem, name, strict)
    reasons = {n: find(n).rejects(problem) for n in dict.fromkeys((*BACKENDS, *candidates))}
    chosen = next((candidate for candidate in candidates if reasons[candidate] is None), None)
    evidence = ""
    if name == "auto":
        rule = preferences.find("calls", problem)
        evidence = f"{' > '.join(candidates)}: {rule.cited()}"
    able = [n for n, reason in reasons.items() if reason is None]
    of_auto = {"triton": AUTO_TRITON.name} if name == "auto" else {}
    remarks = {n: find(of_auto.get(n, n)).remark(problem) for n in able}
    known = {n: remark for n, remark in remarks.items() if remark is not None}
    return Explanation(problem, name, chosen, reasons, evidence, known)


def choose(problem: Problem, name: str, strict: bool = False) -> str:
    """The backend for a call. Decisions are cached; a fallback warns once for each reason.

    Raises:
        BackendError: no backend can serve the call, or the one asked for cannot.
        ValueError: unknown name.
    """
    key = (problem, name, strict)
    known = _choices.get(key)
    if known is not None:
        return known
    candidates = _candidates(problem, _check_name(name), strict)
    # One by one, so that unneeded backends are never imported.
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


def _able(problem: Problem, reasons: dict[str, str | None]) -> list[str]:
    """The backends that can serve a call, in the order that ``auto`` prefers. ``reasons``: those known already."""
    order = dict.fromkeys((*_candidates(problem, "auto", False), *BACKENDS))
    return [n for n in order if (reasons[n] if n in reasons else find(n).rejects(problem)) is None]


def _advice(able: Sequence[str]) -> str:
    """Advice after a refusal, as the end of its sentence."""
    *others, last = (repr(n) for n in able) if able else ("",)
    if not last:
        return "; no other backend can"
    return f"; backend={', '.join(others)} or {last} can" if others else f"; backend={last} can"


def _refusal(found: Explanation) -> str:
    if found.asked == "auto":
        return "no backend can serve this call: " + "; ".join(
            f"{n}: {r}" for n, r in found.reasons.items()
        )
    message = f"backend {found.asked!r} cannot serve this call: {found.reasons[found.asked]}"
    return message + _advice(_able(found.problem, found.reasons))


# Modules of the backends chosen so far, for callers that torch.compile traces: it follows no import.
LOADED: Loaded[Any] = Loaded()


def call(
    q: Tensor, v: Tensor, heads_q: int, heads_k: int, features: dict[str, object]
) -> tuple[Any, ...]:
    """The arguments of :func:`problem_of`: only constants, so that torch.compile can pass them (``index`` makes it
    specialise on heads and head dims, as kernels do anyway)."""
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


def settled(function: Callable[..., str]) -> Callable[..., str]:
    """A decision that a compiler makes once per trace, from constants alone.

    It raises the refusals of ``function`` where a compiler passes them on: inside a constant, a refusal would be an
    internal error of the compiler. It passes on the backend of ``use_backend``: a compiler that traces the context
    sets it only when the program runs, and traces again where another one is set outside.
    """

    def outcome(name: str | None, strict: bool, *arguments: Any) -> tuple[str, str | None]:
        before = _override.name, _override.strict
        _override.name, _override.strict = name, strict
        try:
            return function(*arguments), None
        except BackendError as error:
            return "", str(error)
        finally:
            _override.name, _override.strict = before

    # This is the attribute that torch.compiler.assume_constant_result sets; importing the compiler is not needed.
    outcome._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @functools.wraps(function)
    def found(*arguments: Any) -> str:
        name, refusal = outcome(_override.name, _override.strict, *arguments)
        if refusal is not None:
            raise BackendError(refusal)
        return name

    return found


@settled
def decide(*arguments: Any) -> str:
    """The name of the backend for ``(*arguments of problem_of, backend argument)``; its module is then in LOADED."""
    problem, (asked, strict) = problem_of(*arguments[:-1]), requested(arguments[-1])
    name = choose(problem, asked, strict)
    if asked == "auto" and name == "triton" and problem.requires_grad:
        name = AUTO_TRITON.name
    LOADED[name] = kernels(name)
    return name


@settled
def load_recorded_reference() -> str:
    """The name of RECORDED; its module is then in LOADED."""
    LOADED[RECORDED.name] = kernels(RECORDED.name)
    return RECORDED.name


def kernels(name: str) -> Any:
    """The module of a backend, by name."""
    return LOADED.get(name) or find(name).load()
