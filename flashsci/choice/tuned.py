"""The winners of `flashsci.tune`: times of candidates by kind of call, in the process and in a file of the machine.

Rules of flashsci/choice/preferences ask here first. A kind of call is its :class:`Problem`, on which a choice depends.
FLASHSCI_TUNE=0 leaves the file unread.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import sys
import threading
import warnings
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from flashsci import cached
from flashsci.call.problem import Problem
from flashsci.choice.backends import OWN, check_name

SWITCH = "FLASHSCI_TUNE"
MARGIN = 1.02  # a candidate must be faster than the default by this factor


def backends_of(name: str) -> tuple[str, str]:
    """The backends of a request that a trial makes: of the forward, and of the gradients."""
    forward, _, gradients = ("cuda" if name == OWN else name).partition("/")
    return forward, gradients or forward


@dataclass(frozen=True)
class Times:
    """Seconds of the candidates for one kind of call, by the names of their requests."""

    default: str  # the request that is the choice without tuning
    usual: str  # the backend of its forward
    seconds: dict[str, float]  # of a call; with gradients, of its forward and backward
    forward: dict[str, float] = field(default_factory=dict)  # where gradients are wanted, of the forward alone
    unable: dict[str, str] = field(default_factory=dict)  # the errors of candidates that raised

    @property
    def winner(self) -> str:
        """The fastest request; the default if none is faster by MARGIN."""
        if not self.seconds:
            return self.default
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        before = self.seconds.get(self.default)
        return self.default if before is not None and before <= MARGIN * self.seconds[fastest] else fastest

    @property
    def passes(self) -> tuple[str, str] | None:
        """The backends of the winner, (forward, gradients); None where rules decide as before."""
        name = self.winner
        return None if name == self.default else backends_of(name)

    def label(self, name: str) -> str:
        """A request as a table names it."""
        if name == "auto":
            return f"{self.usual}, gradients by rules"
        forward, gradients = backends_of(name)
        return forward if forward == gradients else f"{forward}, gradients by {gradients}"

    def text(self, device: str) -> str:
        """The evidence, as `explain` says it."""
        if not self.seconds:
            return f"tuned on this {device}, the default stays: no candidate could be timed"
        order = sorted(self.seconds, key=self.seconds.__getitem__)
        found = "; " if any("," in self.label(name) for name in order) else ", "
        stays = "" if self.passes else ", the default stays"
        return f"tuned on this {device}{stays}: " + found.join(
            f"{self.label(name)} {duration(self.seconds[name])}" for name in order
        )


def duration(seconds: float) -> str:
    """A time in three digits.

    >>> duration(31.24e-6), duration(0.0123), duration(2)
    ('31.2 us', '12.3 ms', '2 s')
    """
    scale, unit = next(x for x in ((1, "s"), (1e3, "ms"), (1e6, "us")) if seconds * x[0] >= 1 or x[1] == "us")
    return f"{seconds * scale:.3g} {unit}"


def written(problem: Problem) -> str:
    """A problem as text, a key of the file: its fields that are not their defaults."""
    usual = {f.name: f.default for f in fields(Problem)}
    found = {name: x for name, x in asdict(problem).items() if x != usual[name]}
    return json.dumps({n: str(x) if isinstance(x, torch.dtype) else x for n, x in found.items()}, sort_keys=True)


def read(text: str) -> Problem:
    """The inverse of :func:`written`.

    Raises:
        ValueError, TypeError, AttributeError: the text is of no problem.
    """
    found = json.loads(text)
    for name, x in found.items():
        if isinstance(x, list):
            found[name] = tuple(x)
        elif name.endswith("dtype"):
            found[name] = getattr(torch, x.removeprefix("torch."))
    return Problem(**found)


def _without_sizes(p: Problem, kind: str) -> Problem:
    """The problem as a compiler shows it, which hides sizes and numbers; from the gradients it also hides heads."""
    if kind == "gradients":
        p = replace(p, heads_q=1, heads_k=1)
    return replace(
        p,
        batch=None,
        seq_q=None,
        seq_k=None,
        sizes_from_data=False,
        inner_heads=False,
        bias_summed=False,
        bias_shape=None if p.bias_shape is None else (),
        softcap=float(p.softcap > 0),
        dropout_p=float(p.dropout_p > 0),
    )


def _of_gradients(p: Problem) -> Problem:
    """The part of a problem that the choice of its gradients sees: tensors and options as kernels take them."""
    batch = None if p.batch is None else (math.prod(p.batch),)
    shape = p.bias_shape
    if shape is not None:
        ones = next((i for i, n in enumerate(shape) if n != 1), len(shape))
        shape = () if p.varlen else shape[ones:]
    return replace(
        p,
        batch=batch,
        bias_shape=shape,
        bias_dtype=None,
        bias_summed=p.bias_summed and p.bias_grad and not p.varlen,
        key_weight_grad=False,
        alibi_grad=False,
        sink=False,
        inner_heads=False,
        ragged_bias=False,
        return_lse=False,
        requires_grad=True,
        given=(),
        softcap=float(p.softcap > 0),
        dropout_p=float(p.dropout_p > 0),
    )


class Winners:
    """All times of one device that are known in the process."""

    def __init__(self) -> None:
        self.exact: dict[str, dict[Problem, Times]] = {"calls": {}, "gradients": {}}
        #: By problems as compiled calls show them.
        self.hidden: dict[tuple[str, Problem], list[Times]] = {}

    def add(self, problem: Problem, times: Times) -> None:
        self._add("calls", problem, times)
        if problem.requires_grad:
            self._add("gradients", _of_gradients(problem), times)

    def _add(self, kind: str, problem: Problem, times: Times) -> None:
        self.exact[kind][problem] = times
        self.hidden.setdefault((kind, _without_sizes(problem, kind)), []).append(times)

    def find(self, kind: str, problem: Problem) -> Times | None:
        """The times for a problem. Without sizes, those of any size if all of these have the same winner."""
        part = problem if kind == "calls" else _of_gradients(problem)
        if part.seq_q is not None:
            return self.exact[kind].get(part)
        found = self.hidden.get((kind, _without_sizes(part, kind)), [])
        return found[-1] if len({times.passes for times in found}) == 1 else None


_FAULTS = (ValueError, TypeError, AttributeError, KeyError)  # of a file with other contents
_lock = threading.RLock()
_known: dict[str, Winners] = {}
_said: set[str] = set()


def path() -> Path:
    """The file of the machine."""
    return cached.tuned()


@functools.lru_cache(maxsize=64)
def device_of(kind: str, capability: tuple[int, int] | None) -> str | None:
    """The device of this machine for which times hold, by name; None if there is none."""
    if kind == "cpu":
        return f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    if kind != "cuda" or capability is None or not torch.cuda.is_available():
        return None
    every = range(torch.cuda.device_count())
    first = next((i for i in every if torch.cuda.get_device_capability(i) == capability), None)
    return None if first is None else torch.cuda.get_device_name(first)


@functools.cache
def _software() -> str:
    """The versions and the library for which times hold."""
    from flashsci.backends.cuda.library import build_info

    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    built = json.dumps(build_info(), sort_keys=True)
    library = hashlib.sha256(built.encode()).hexdigest()[:16]
    return (
        f"library {library}, torch {torch.__version__}, triton {triton}, flashsci {sys.modules['flashsci'].__version__}"
    )


def _winners(problem: Problem) -> tuple[str, Winners] | None:
    """The name of the problem's device and its times, from the file at the first request."""
    device = device_of(problem.device_type, problem.capability)
    if device is None:
        return None
    found = _known.get(device)
    if found is None:
        with _lock:
            found = _known.get(device)
            if found is None:
                found = _load(device)
                _known[device] = found
    return device, found


def _load(device: str) -> Winners:
    found, file = Winners(), path()
    if os.environ.get(SWITCH) == "0" or not file.is_file():
        return found
    try:
        kept = cached.entries(file).get(f"{device}, {_software()}", {})
        for text, times in kept.items():
            found.add(read(text), _checked(times))
    except _FAULTS as error:
        _say(
            f"flashsci: {file} is not a file of flashsci.tune ({type(error).__name__}: {error}); it is ignored, and "
            "the next tuning writes it anew. `flashsci.tune.clear()` deletes it."
        )
        return Winners()
    return found


def _checked(entry: dict[str, Any]) -> Times:
    times = Times(**entry)
    if not all(isinstance(x, float) and x > 0 for x in (*times.seconds.values(), *times.forward.values())):
        raise ValueError("a time that is no positive number")
    for name in (times.default, times.usual, *times.seconds):
        check_name(name)
    return times


def _is_sound(text: str, entry: Any) -> bool:
    try:
        return bool(_checked(entry) and read(text))
    except _FAULTS:
        return False


def _say(text: str) -> None:
    with _lock:
        first = text not in _said
        _said.add(text)
    if first:
        warnings.warn(text, stacklevel=3)


def find(kind: str, problem: Problem, forward: str = "") -> tuple[tuple[str, ...], str] | None:
    """The backends that tuning puts first for a call ("calls") or for its gradients ("gradients"), none where the
    default stays, and the evidence; None where nothing is known.

    Args:
        forward: the backend that computed the forward, for gradients.
    """
    if not _known and os.environ.get(SWITCH) == "0":
        return None
    known = _winners(problem)
    times = None if known is None else known[1].find(kind, problem)
    if times is None:
        return None
    evidence = times.text("GPU" if problem.device_type == "cuda" else "CPU")
    if times.passes is None:
        return (), evidence
    if kind == "calls":
        return times.passes[:1], evidence
    return (times.passes[1:], evidence) if times.passes[0] == forward else None


def lacks(problem: Problem) -> bool:
    """Whether this kind of call can be timed on this machine and has not been."""
    found = _winners(problem)
    return found is not None and problem not in found[1].exact["calls"]


def keep(problem: Problem, times: Times) -> None:
    """Keep times in the process and in the file; a kind of which no candidate could be timed, in the process alone."""
    found = _winners(problem)
    if found is None:
        return
    device, winners = found
    with _lock:
        winners.add(problem, times)
    if not times.seconds:
        return
    key, text = f"{device}, {_software()}", written(problem)

    def changed(entries: dict[str, Any]) -> dict[str, Any]:
        of_device = entries.get(key)
        kept = of_device if isinstance(of_device, dict) else {}
        sound = {known: entry for known, entry in kept.items() if _is_sound(known, entry)}
        return {**entries, key: {**sound, text: asdict(times)}}

    try:
        cached.update(path(), changed)
    except OSError as error:
        _say(
            f"flashsci: the times of flashsci.tune cannot be kept in {path()} ({error}); they hold for this process. "
            f"Set {cached.FOLDER} to a folder that can be written."
        )


def clear() -> None:
    """Forget all times, in the process and in the file."""
    with _lock:
        _known.clear()
        path().unlink(missing_ok=True)
