"""The measurement of one drawn call: check every candidate, and time those that are right.

A record is one call: its fields, and of each candidate either its times, with the backends that ran, or the reason why
it has none. A check may have been made before, beside those of other calls (ahead.py); times are taken alone.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import flashsci
from flashsci.choice.backends import FORWARD_OF_CUDA, OWN
from flashsci.choice.gradients import by_rules, gradients, named
from flashsci.testing import DrawnCall
from tools.bench.drawn import ways
from tools.bench.drawn.sample import Sample
from tools.bench.drawn.work import Work, without_dropout
from tools.bench.inputs import Unsupported
from tools.bench.measure import commit_of_tree, environment, fatal, first_line
from tools.bench.peers import refusals
from tools.bench.timer import back_to_back, interleave

Record = dict[str, Any]
SCHEMA = 1
NEIGHBOUR = "neighbour"
#: Seconds of timing for one call: by the host's clock, and by that of the GPU.
LOOP_SECONDS, GPU_SECONDS = 0.2, 0.1
#: Candidates this many times as slow as the fastest have no time by the GPU's clock.
SLOW = 10


NO_MEMORY = "refused: out of memory"
#: Of a kernel whose stack finds no room.
OF_DRIVER = "Triton Error [CUDA]: out of memory"


class Check(NamedTuple):
    """The findings on the candidates of a call, as plain data."""

    reasons: dict[str, str]  # why candidates have no times
    ran: dict[str, Record]  # the code behind those of flashsci
    seconds: float


def check_of(call: DrawnCall, device: torch.device) -> Check | None:
    """The findings on the candidates of a call. None if memory was short, which others may have taken."""
    measurement = Measurement(call, device, [])
    measurement.check()
    found = measurement.findings()
    return None if NO_MEMORY in found.reasons.values() else found


def record_of(call: DrawnCall, device: torch.device, check: Check | None = None) -> Record:
    """The record of one call, given a check of it or with one."""
    attempt = Attempt(call, device)
    return attempt.ready(check) or attempt.record()


class Attempt:
    """The record of one call in two steps, so that several calls can be made ready at once and timed one after the other.

    A call that fails has the reason under "failed", and after a lost device "lost" is true.
    """

    def __init__(self, call: DrawnCall, device: torch.device):
        self.call, self.device = call, device
        self.crowded = False  # whether memory was short, which others may have taken
        self._doing = ["inputs"]
        self._made: Measurement | None = None

    def ready(self, check: Check | None = None) -> Record | None:
        """Make the call ready to be timed, given a check of it or with one; the record if it failed."""
        try:
            self._made = Measurement(self.call, self.device, self._doing)
            self._made.ready(check)
            if (
                self.device.type == "cuda"
            ):  # others are timed next: leave them the GPU, and the memory that is not needed
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
        except Exception as error:
            return self._failed(error)
        self.crowded = NO_MEMORY in self._made.reasons.values()
        return None

    def record(self) -> Record:
        """Time it, and let its memory go."""
        assert self._made is not None
        try:
            record = self._made.record()
        except Exception as error:
            return self._failed(error)
        self.end()
        return record

    def end(self, lost: bool = False) -> None:
        self._made = None
        gc.collect()
        if self.device.type == "cuda" and not lost:
            torch.cuda.empty_cache()

    def _failed(self, error: Exception) -> Record:
        lost = fatal(error)
        self.crowded = isinstance(error, torch.OutOfMemoryError)
        record = failed(self.call, self.device, f"{self._doing[-1]}: {first_line(error)}", lost)
        self.end(lost)
        return record


def failed(call: DrawnCall, device: torch.device, reason: str, lost: bool) -> Record:
    """The record of a call that has no times."""
    return {**about(call, device), "failed": reason, "lost": lost, "candidates": {}}


def about(call: DrawnCall, device: torch.device) -> Record:
    """The part of a record that is known before anything has run."""
    commit, dirty = commit_of_tree()
    return {
        "schema": SCHEMA,
        "call": call.as_dict(),
        "text": str(call),
        "scores": call.scores,
        "commit": commit,
        "dirty": dirty,
        "env": environment(device),
    }


class Measurement:
    """One drawn call: its candidates, their correctness, and their times."""

    def __init__(self, call: DrawnCall, device: torch.device, doing: list[str]):
        """``doing``: gets the name of each step before it begins, such as that of a candidate."""
        self.call, self.device, self.doing = call, device, doing
        self.started = time.monotonic()
        self.work = Work(call, device)
        self.able: dict[str, Callable[[], object]] = {}
        self.reasons: dict[str, str] = {}
        self.ran: dict[str, Record] = {}
        self.neighbour: DrawnCall
        self.spent: dict[str, float] = {}

    def check(self) -> None:
        """Check every candidate."""
        self.doing.append("oracle")
        sample = Sample(self.work)
        sample.judge  # noqa: B018  (an oracle that disagrees with its check fails the call, not a candidate)
        for name in ways.names_of(self.device, self.call.work):
            self.doing.append(name)
            reason = self._try(name, sample)
            if reason is not None:
                self.reasons[name] = reason

    def findings(self) -> Check:
        return Check(self.reasons, self.ran, time.monotonic() - self.started)

    def _prepare(self, check: Check) -> None:
        """Make the candidates that a check found right ready to be timed."""
        self.ran = check.ran
        for name in ways.names_of(self.device, self.call.work):
            self.doing.append(name)
            reason = check.reasons.get(name) or self._ready(name)
            if reason is not None:
                self.reasons[name] = reason

    def ready(self, check: Check | None = None) -> None:
        """Make the candidates that are right ready to be timed, and the neighbour; given a check, or with one."""
        start = time.monotonic()
        if check is None:
            self.check()
            check = self.findings()
        else:
            self._prepare(check)
        self.doing.append(NEIGHBOUR)
        self.neighbour = self._neighbour()
        self.spent = {"checking": check.seconds, "preparing": time.monotonic() - start}

    def record(self) -> Record:
        """The times of what is ready."""
        record = about(self.call, self.device)
        began = time.monotonic()
        self.doing.append("timing")
        times = self._times()
        record["candidates"] = {
            name: times.get(name) or {"gate": self.reasons[name]} for name in ways.names_of(self.device, self.call.work)
        }
        record[NEIGHBOUR] = {
            "call": self.neighbour.as_dict(),
            "scores": self.neighbour.scores,
            **(times.get(NEIGHBOUR) or {"gate": self.reasons[NEIGHBOUR]}),
        }
        spent = {**self.spent, "timing": time.monotonic() - began}
        record["seconds"] = {n: round(x, 2) for n, x in spent.items()}
        return record

    def _ran(self, name: str) -> Record:
        """The code behind a candidate of flashsci: the backends of the call and of its gradients, and their CUDA
        kernels."""
        x = self.work.inputs
        found = flashsci.explain(x.q, x.k, x.v, backend=name, **ways.given(x))
        chosen = found.chosen
        if chosen is None or not self.work.leaves:
            second = None
        elif found.gradient_kernel is not None:
            second = "cuda"
        else:
            choice = (by_rules if name == "auto" else named)(chosen)
            second = gradients(choice, found.problem).backend
        forward = "cuda" if chosen in (*FORWARD_OF_CUDA, OWN) else chosen
        return {"by": [forward, second], "kernels": [found.kernel, found.gradient_kernel]}

    def _try(self, name: str, sample: Sample) -> str | None:
        """Check one candidate; the reason why it is not timed, or None."""
        work, ours = self.work, name in ways.OURS
        x = work.inputs if ours else without_dropout(work.inputs)  # others draw a dropout of their own
        try:
            with self._alone(name):
                results = work.results(ways.attend(name, x), x, sample.dout)
            problem = sample.problem(name, results)
            if problem is not None:
                return f"failed: {problem}"
            if ours:
                self.ran[name] = self._ran(name)
        except Exception as error:
            return self._reason(error, ours)
        return self._ready(name)

    def _ready(self, name: str) -> str | None:
        """Run a candidate as it is timed; the reason why it is not, or None."""
        try:
            with self._alone(name):
                function = self.work.timed(ways.attend(name, self.work.inputs))
                function()
        except Exception as error:
            return self._reason(error, name in ways.OURS)
        self.able[name] = function
        return None

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """The setting of a candidate, in which no other kernels step in."""
        context = flashsci.use_backend(name, strict=True) if name in ways.OURS else refusals()
        with context, ways.within(name):
            yield

    def _reason(self, error: Exception, ours: bool) -> str:
        """An error as the reason why a candidate has no time; of a lost device, the error itself."""
        if fatal(error):
            raise error
        if isinstance(error, torch.OutOfMemoryError) or OF_DRIVER in str(error):
            return NO_MEMORY
        if isinstance(error, Unsupported | flashsci.BackendError) or not ours:
            return f"refused: {first_line(error)}"
        return f"failed: it raised {first_line(error)}"

    def _neighbour(self) -> DrawnCall:
        """The neighbour of the call, ready to be timed beside it."""
        call = self.call.neighbour()
        try:
            work = Work(call, self.device)
            function = work.timed(ways.attend("auto", work.inputs))
            function()
        except Exception as error:
            self.reasons[NEIGHBOUR] = self._reason(error, ours=True)
        else:
            self.able[NEIGHBOUR] = function
        return call

    def _times(self) -> dict[str, Record]:
        loops = back_to_back(self.able, self.device, LOOP_SECONDS, within=ways.within)
        on_gpu = {}
        if self.device.type == "cuda":
            most = SLOW * min((t.median for t in loops.values()), default=0.0)
            quick = {n: _within(n, f) for n, f in self.able.items() if loops[n].median <= most}
            on_gpu = interleave(quick, self.device, GPU_SECONDS, rounds=(3, 20))
        found = {}
        for name, loop in loops.items():
            found[name] = {
                "gate": "passed",
                **self.ran.get(name, {}),
                "loop_us": _us(loop.median),
                "loop_min_us": _us(loop.min),
                "n": loop.n * loop.batch,
            }
            if name in on_gpu:
                found[name]["gpu_us"] = _us(on_gpu[name].median)
        return found


def _within(name: str, function: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        with ways.within(name):
            return function()

    return call


def _us(seconds: float) -> float:
    """Microseconds to five digits."""
    return float(f"{seconds * 1e6:.5g}")
