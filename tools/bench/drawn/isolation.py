"""The measurement of drawn calls in a process of its own: a call that takes its device with it costs only itself.

Kernels of any candidate may fail so that every later call of the process fails, too. Then the call has the reason in
its record, and a new process goes on with the next one.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from flashsci.testing import CallLimits, draw_call
from tools.bench.drawn.measure import Check, Record, failed

#: Seconds without a word after which a process is stopped; one call, or the start of the process.
PATIENCE = 100.0
STEP, RECORD, END = "step", "record", "end"


def measured(
    seed: int,
    numbers: Sequence[int],
    limits: CallLimits,
    device: torch.device,
    until: float,
    on_step: Callable[[str], object],
    checks: Mapping[int, Check | None],
) -> Iterator[Record]:
    """As `course.measured`, in other processes, one after the other."""
    left = list(numbers)
    while left:
        process = _Process(seed, left, limits, device.type, until, {n: checks.get(n) for n in left})
        try:
            for kind, value in process.messages():
                if kind == STEP:
                    on_step(value)
                elif kind == RECORD:
                    left = left[1:]
                    yield value
                else:
                    return
        finally:
            process.stop()
        if process.reason is not None and left:
            yield failed(draw_call(seed, left[0], limits), device, process.reason, lost=True)
            left = left[1:]


class _Process:
    """A process that measures, and the reason of its end; None after its last message."""

    def __init__(self, *given: Any):
        context = multiprocessing.get_context("spawn")
        self.end, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(theirs, *given), daemon=True)
        self.process.start()
        theirs.close()
        self.reason: str | None = None

    def messages(self) -> Iterator[tuple[str, Any]]:
        while self.end.poll(PATIENCE):
            try:
                kind, value = self.end.recv()
            except EOFError:
                self.process.join()
                self.reason = f"the process ended with status {self.process.exitcode}"
                return
            yield kind, value
            if kind == END or (kind == RECORD and value.get("lost")):
                return
        self.reason = f"no result within {PATIENCE:.0f} s"

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.end.close()


def _serve(
    pipe: Connection,
    seed: int,
    numbers: list[int],
    limits: CallLimits,
    device: str,
    until: float,
    checks: Mapping[int, Check | None],
) -> None:
    from tools.bench.drawn import course

    def say(text: str) -> None:
        pipe.send((STEP, text))

    for record in course.measured(seed, numbers, limits, torch.device(device), until, say, checks):
        pipe.send((RECORD, record))
        if record.get("lost"):
            return
    pipe.send((END, None))
