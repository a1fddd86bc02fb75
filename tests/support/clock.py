"""A clock that moves only as a test says, in place of a module's ``time``; and processes that last as long by it as told."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any


class Clock:
    """``monotonic``, ``perf_counter`` and ``sleep`` of `time`."""

    def __init__(self, now: float = 7.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def processes(clock: Clock, lasts: float) -> SimpleNamespace:
    """In place of a module's ``subprocess``: each process is real, and lasts these seconds by the clock. A process
    that is waited for too long runs on until it is stopped, which takes no time."""

    class Process(subprocess.Popen):
        missed = False

        def wait(self, timeout: float | None = None) -> int:
            if not self.missed and self.returncode is None:
                clock.sleep(lasts if timeout is None else min(lasts, timeout))
                if timeout is not None and lasts > timeout:
                    self.missed = True
                    raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait()

    names: dict[str, Any] = {name: getattr(subprocess, name) for name in ("TimeoutExpired", "STDOUT", "DEVNULL")}
    return SimpleNamespace(Popen=Process, **names)
