"""The measurement of drawn calls in processes of their own: a call that takes its device with it costs only itself.

Making a call ready takes the host four times as long as timing it. So several processes make calls ready at the same time; then
one after the other times its call, and the others wait. Kernels of any candidate may fail so that every later call of the process
fails, too. Then the call has the reason in its record, and a new process takes the place of the old one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from flashsci.testing import CallLimits, DrawnCall, draw_call
from tools.bench.drawn.measure import Attempt, Check, Record, failed

#: Seconds without a word after which a process is stopped; one call, or the start of the process.
PATIENCE = 100.0
#: The most calls that are ready at the same time on a GPU, whose operands have up to 2 GiB each.
MOST_READY = 8
#: The words of a process: the call is ready; its record; its memory may be that of other calls.
READY, RECORD, CROWDED = "ready", "record", "crowded"
#: The words to a process, beside (number, check): time the call.
TIME = None


def measured(
    seed: int,
    numbers: Sequence[int],
    limits: CallLimits,
    device: torch.device,
    until: float,
    on_step: Callable[[str], object],
    checks: Mapping[int, Check | None],
    ready: int | None = None,
) -> Iterator[Record]:
    """As `course.measured`, in other processes. ``ready``: so many calls are ready at the same time."""
    if ready is None:
        ready = min(MOST_READY, len(os.sched_getaffinity(0)) // 2) if device.type == "cuda" else 1
    processes = [_Process(seed, limits, device) for _ in range(max(1, min(ready, len(numbers))))]
    try:
        for first in range(0, len(numbers), len(processes)):
            if time.monotonic() >= until:
                return
            turn = numbers[first : first + len(processes)]
            found = _turn(processes, turn, until, on_step, checks)
            for n in turn:
                if n not in found:  # the time is over
                    return
                yield found[n]
    finally:
        for process in processes:
            process.stop()


def _turn(
    processes: Sequence[_Process],
    turn: Sequence[int],
    until: float,
    on_step: Callable[[str], object],
    checks: Mapping[int, Check | None],
) -> dict[int, Record]:
    """The records of these calls: all are made ready together, those that find too little memory for that alone afterwards."""
    found: dict[int, Record] = {}
    own = dict(zip(turn, processes, strict=False))
    for n, process in own.items():
        process.prepare(n, checks.get(n))
    words = {}
    for n, process in own.items():
        on_step(f"{n}: {process.call(n)}")
        words[n] = process.heard(n)
    alone = []
    for n, (word, record) in words.items():  # nothing else runs now
        if word == READY and time.monotonic() < until:
            word, record = own[n].timed(n)
        if record is not None:
            found[n] = record
        elif word == CROWDED:
            alone.append(n)
    for n in alone:
        if time.monotonic() < until:
            own[n].prepare(n, checks.get(n), alone=True)
            _, record = own[n].heard(n)
            found[n] = own[n].timed(n)[1] if record is None else record
    return found


Answer = tuple[str, Record | None]


class _Process:
    """A process that makes calls ready and times them; another one after a call that ended it or lost its device."""

    def __init__(self, seed: int, limits: CallLimits, device: torch.device):
        self.seed, self.limits, self.device = seed, limits, device
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.end, theirs = context.Pipe()
        given = theirs, self.seed, self.limits, self.device.type
        self.process = context.Process(target=_serve, args=given, daemon=True)
        self.process.start()
        theirs.close()
        self.stopped = False

    def call(self, n: int) -> DrawnCall:
        return draw_call(self.seed, n, self.limits)

    def prepare(self, n: int, check: Check | None, alone: bool = False) -> None:
        """Let it make a call ready; ``alone``: no other call is. Another process starts here, not while calls are timed."""
        if self.stopped:
            self._start()
        self._say((n, check, alone))

    def timed(self, n: int) -> Answer:
        """Its answer after it has timed the call that it made ready."""
        self._say(TIME)
        return self.heard(n)

    def _say(self, words: Any) -> None:
        with contextlib.suppress(OSError):  # of a process that has ended: its answer says so
            self.end.send(words)

    def heard(self, n: int) -> Answer:
        """Its answer, with a record if that is all of the call; the record says why if there is no answer."""
        reason = f"no result within {PATIENCE:.0f} s"
        if self.end.poll(PATIENCE):
            try:
                word, record = self.end.recv()
            except (EOFError, OSError):
                self.process.join()
                reason = f"the process ended with status {self.process.exitcode}"
            else:
                if record is not None and record.get("lost"):
                    self.stop()
                return word, record
        self.stop()
        return RECORD, failed(self.call(n), self.device, reason, lost=True)

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.process.kill()
            self.process.join()
            self.end.close()


def _serve(pipe: Connection, seed: int, limits: CallLimits, name: str) -> None:
    """The course of a process: make a call ready, say so, time it, and send its record."""
    from tools.bench.drawn import course

    device = torch.device(name)
    course.begin(device)
    while True:
        n, check, alone = pipe.recv()
        attempt = Attempt(draw_call(seed, n, limits), device)
        record = attempt.ready(check)
        if record is None and (alone or not attempt.crowded):
            pipe.send((READY, None))
            if pipe.recv() is not TIME:
                raise RuntimeError("flashsci: a call was to be timed")
            record = attempt.record()
        if attempt.crowded and not alone:  # before its times, or among them
            attempt.end()
            pipe.send((CROWDED, None))
        else:
            pipe.send((RECORD, record))
