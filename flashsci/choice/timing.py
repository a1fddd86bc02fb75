"""The times of several calls of one kind, taken in turns on the machine at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]
Clock = Callable[[Call, int], float]

ROUNDS = 7  # samples of each call; the median counts
SAMPLE = 2e-3  # seconds that a sample of a short call should take
MOST = 20  # calls in a sample
CLOSE = 2.0  # calls that take longer than the fastest by this factor are timed once


def by_events(call: Call, count: int) -> float:
    """Seconds of one of ``count`` calls one after the other on the current stream of a GPU."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.current_stream().synchronize()
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / count


def by_host(call: Call, count: int) -> float:
    """Seconds of one of ``count`` calls one after the other on the host."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def measure(calls: dict[str, Call], device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of each call by its name, and the errors of calls that raise.

    The first calls warm up: they compile, and make the plans that later calls repeat.
    """
    clock: Clock = by_events if device.type == "cuda" else by_host
    times: dict[str, float] = {}
    unable: dict[str, str] = {}

    def sample(name: str, count: int) -> float | None:
        try:
            return clock(calls[name], count)
        except Exception as error:  # of any kind: the user's own call goes on, and the table names the error
            unable[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            times.pop(name, None)
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if out_of_memory and device.type == "cuda":
            torch.cuda.empty_cache()  # what the trial left is free for the user's call
        return None

    for name in calls:
        if sample(name, 2) is not None and (seconds := sample(name, 1)) is not None:
            times[name] = seconds
    if not times:
        return times, unable
    least = min(times.values())
    count = max(1, min(MOST, round(SAMPLE / max(least, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name, seconds in times.items() if seconds <= CLOSE * least}
    for _ in range(ROUNDS):
        for name, found in samples.items():
            if name in times and (seconds := sample(name, count)) is not None:
                found.append(seconds)
    return {name: statistics.median(samples.get(name) or [seconds]) for name, seconds in times.items()}, unable
