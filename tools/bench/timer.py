"""Timing that compares: candidates interleaved launch by launch in one process, summarised by medians.

Clocks, temperature and neighbours drift by tens of percent over seconds, and hit whatever runs
alone at that moment; interleaved, every candidate sees the same drift, so ratios hold where
absolute figures do not.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

Function = Callable[[], object]

#: An event pair resolves about half a microsecond; shorter work is repeated until it lasts this
#: long.
_SHORTEST_SECONDS = 100e-6
#: `torch.cuda._sleep` counts GPU clock cycles. The highest clock of the GPUs known makes the wait
#: long enough on all.
_CYCLES_PER_SECOND = 2.2e9
#: Seconds; longer launches mean that the function is about launching (or synchronises).
_LONGEST_WAIT = 20e-3


@dataclass(frozen=True)
class Times:
    """Seconds per call over `n` measurements of `batch` calls each."""

    median: float
    p20: float
    p80: float
    min: float
    n: int
    batch: int = 1
    host_bound: bool = False  # the GPU may have waited for the host: it launches too slowly

    @staticmethod
    def of(samples: list[float], batch: int = 1, host_bound: bool = False) -> Times:
        s = sorted(samples)
        last = len(s) - 1
        return Times(
            median=statistics.median(s),
            p20=s[round(0.2 * last)],
            p80=s[round(0.8 * last)],
            min=s[0],
            n=len(s),
            batch=batch,
            host_bound=host_bound,
        )


def interleave(
    functions: Mapping[str, Function],
    device: torch.device,
    seconds: float = 1.0,
    rounds: tuple[int, int] = (5, 200),
    seed: int = 0,
) -> dict[str, Times]:
    """Time all functions, one call (or one short batch of calls) of each per round, in an order
    that changes by round.

    On a GPU, time is between two events on the stream, with enough queued work before them that the
    GPU never waits for the host; a function that lasts longer than 100 us starts with a cold L2.
    `seconds` is about the whole time spent, within the given limits on the number of rounds.
    """
    measure = _GpuClock(device) if device.type == "cuda" else _HostClock()
    batches, turns = {}, {}
    total = 0.0
    for name, function in functions.items():
        once = measure.pilot(name, function)
        batches[name] = max(1, math.ceil(_SHORTEST_SECONDS / max(once, 1e-7)))
        turns[name] = max(2, int(seconds / max(once, 1e-7)))  # very slow functions skip some rounds
        total += once * batches[name] + measure.overhead(name, batches[name])
    count = max(rounds[0], min(rounds[1], int(seconds / max(total, 1e-9))))
    order = list(functions)
    shuffle = random.Random(seed).shuffle
    for turn in range(count):
        shuffle(order)
        for name in order:
            if turn < turns[name]:
                measure.record(name, functions[name], batches[name])
    return measure.finish(batches)


class _HostClock:
    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def pilot(self, name: str, function: Function) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def overhead(self, name: str, batch: int) -> float:
        return 0.0

    def record(self, name: str, function: Function, batch: int) -> None:
        start = time.perf_counter()
        for _ in range(batch):
            function()
        self.samples.setdefault(name, []).append(time.perf_counter() - start)

    def finish(self, batches: Mapping[str, int]) -> dict[str, Times]:
        return {
            name: Times.of([s / batches[name] for s in samples], batches[name])
            for name, samples in self.samples.items()
        }


class _GpuClock:
    """Events on the stream, behind a wait that is long enough for the host to queue the work.

    Work whose start event has passed before the last launch is queued may have gaps in it. Such samples count
    only if there are no others, and the next wait is longer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event, bool]]] = {}
        self.launching: dict[str, float] = {}  # seconds the host needs for one call
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        # Read, not written: L2 would write it back to memory while the function runs.
        self.flush = torch.zeros(max(l2, 1 << 24) // 2, dtype=torch.float32, device=device)

    def pilot(self, name: str, function: Function) -> float:
        """GPU seconds of one call; notes the host's launch time."""
        launches: list[float] = []
        while len(launches) < 4 and sum(launches) < 0.1:
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            function()
            launches.append(time.perf_counter() - start)
        self.launching[name] = statistics.median(launches)
        self.record(name, function, 1)
        torch.cuda.synchronize(self.device)
        ((start_event, end_event, _),) = self.events.pop(name)
        return start_event.elapsed_time(end_event) * 1e-3

    def overhead(self, name: str, batch: int) -> float:
        """Seconds of waiting that cover the launching of `batch` calls."""
        return min(_LONGEST_WAIT, 50e-6 + 2 * self.launching.get(name, 0.0) * batch)

    def record(self, name: str, function: Function, batch: int) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(self.overhead(name, batch) * _CYCLES_PER_SECOND))
        self.flush.sum()
        start.record()
        for _ in range(batch):
            function()
        end.record()
        late = start.query()
        if late:
            self.launching[name] *= 2
        self.events.setdefault(name, []).append((start, end, late))

    def finish(self, batches: Mapping[str, int]) -> dict[str, Times]:
        torch.cuda.synchronize(self.device)
        found = {}
        for name, measured in self.events.items():
            good = [m for m in measured if not m[2]]
            host_bound = len(good) < 3
            pairs = measured if host_bound else good
            batch = batches[name]
            samples = [start.elapsed_time(end) * 1e-3 / batch for start, end, _ in pairs]
            found[name] = Times.of(samples, batch, host_bound)
        return found


def host_time(
    functions: Mapping[str, Function],
    device: torch.device,
    seconds: float = 1.0,
    calls: int = 50,
    to_end: bool = False,
    warmup: int = 10,
) -> dict[str, Times]:
    """Seconds by the host's clock: the host's part of one call, without the GPU's work (the bound of eager
    small models), or with `to_end` until the GPU is done.

    Each sample is `calls` calls in a row on an idle device; the device is drained between samples, so that a
    full launch queue never blocks the host. Every second round has the opposite order: one function may leave
    the host's caches in its own state to the next. `seconds` is about the whole time spent.
    """

    def drain() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(warmup):
            function()
    end = time.perf_counter() + seconds
    order = list(functions.items())
    while time.perf_counter() < end or len(next(iter(samples.values()))) < 3:
        order.reverse()
        for name, function in order:
            drain()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if to_end:
                drain()
            samples[name].append((time.perf_counter() - start) / calls)
    drain()
    return {name: Times.of(s, calls) for name, s in samples.items()}


def back_to_back(
    functions: Mapping[str, Function],
    device: torch.device,
    seconds: float = 0.2,
    rounds: int = 5,
    most: int = 500,
    within: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext(),
    seed: int = 0,
) -> dict[str, Times]:
    """Seconds per call in a loop, by the host's clock: the larger of what host and device need, as a model pays it.

    Each sample is a run of calls from an idle device until it is idle again, up to ``most`` of them; every round has
    one run of each function, in an order that changes. A run lasts about ``seconds`` over the number of all runs. A
    function that is too slow for that has one call a run, and so few runs that it takes twice its share; a function
    twenty times as slow as the fastest has its trial alone. ``within``: the context of a function's runs, which no call
    pays for.
    """

    def drain() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def run(name: str, count: int) -> float:
        function = functions[name]
        with within(name):
            drain()
            start = time.perf_counter()
            for _ in range(count):
                function()
            drain()
            return (time.perf_counter() - start) / count

    trial = {name: min(run(name, 1), run(name, 2)) for name in functions}
    fastest = min(trial.values(), default=0.0)
    share = seconds / max(1, len(functions))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    counts, turns = {}, {}
    for name, once in trial.items():
        counts[name] = max(1, min(most, int(share / rounds / max(once, 1e-9))))
        turns[name] = min(rounds, max(2, int(2 * share / max(once, 1e-9))))
        if once > 20 * fastest and once > share:
            samples[name], turns[name] = [once], 0
    order = list(functions)
    shuffle = random.Random(seed).shuffle
    for turn in range(rounds):
        shuffle(order)
        for name in order:
            if turn < turns[name]:
                samples[name].append(run(name, counts[name]))
    return {name: Times.of(s, counts[name]) for name, s in samples.items()}
