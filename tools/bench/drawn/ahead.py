"""Checks of drawn calls ahead of their times, the calls of a kind in one of many processes, where their kernels are compiled.

A first check takes many times as long as the times of a call. Kernels stay in the compilers' caches on disk, also those
of the call's neighbour.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import groupby, zip_longest

import torch

import flashsci
from flashsci.testing import DrawnCall
from flashsci.testing.calls import SIZES
from tools.bench.ahead import processes
from tools.bench.drawn import ways
from tools.bench.drawn.measure import Check, check_of
from tools.bench.drawn.work import Work
from tools.bench.measure import fatal

#: The times that processes may take a GPU's memory together: few need their share at once, and those without room are checked alone.
CROWDED = 3.0
#: The findings on calls by their places. None: the call is to be checked alone.
Checks = dict[int, Check | None]
#: The findings on calls in order, and whether the device is lost.
Found = tuple[list[Check | None], bool]


def check_ahead(
    calls: Iterable[DrawnCall],
    device: torch.device,
    until: float,
    workers: int | None = None,
    on_step: Callable[[str], object] = lambda text: None,
) -> Checks:
    """Check the calls in order, until that time by the monotonic clock or all of them.

    Returns:
        The findings on the first calls; None for a few among them that were still being checked, that took their process
        or device with them, or that found too little memory.
    """
    workers = max(1, len(os.sched_getaffinity(0)) - 1) if workers is None else workers
    kinds = (tuple(own) for _, own in groupby(calls, lambda call: call.index // SIZES))
    lanes = [processes(1) for _ in range(workers)]
    free = list(range(workers))
    running: dict[Future[Found], tuple[int, range]] = {}
    found: Checks = {}
    begun, more = 0, True
    try:
        while (more or running) and (left := until - time.monotonic()) > 0:
            while free and more:
                kind = next(kinds, ())
                more = bool(kind)
                if kind:
                    lane = free.pop()
                    running[lanes[lane].submit(check_each, kind, device.type, min(1.0, CROWDED / workers))] = (
                        lane,
                        range(begun, begun + len(kind)),
                    )
                    begun += len(kind)
            for future in wait(running, left, FIRST_COMPLETED).done:
                lane, places = running.pop(future)
                checks, lost = ([], True) if future.exception() else future.result()
                found |= zip_longest(places, checks)
                if lost:  # the benchmark meets the call again, which took its device or its process with it
                    _stop(lanes[lane])
                    lanes[lane] = processes(1)
                free.append(lane)
            on_step(f"checking ahead: {len(found)} calls")
    finally:
        for lane_ in lanes:
            _stop(lane_)
    late = [n for n in range(begun) if n not in found]
    few = SIZES * (workers // 4)
    ready = late[few] if len(late) > few else begun
    return {n: found.get(n) for n in range(ready)}


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the process of a pool: a call that compiles for minutes must not hold the run."""
    stopped = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in stopped:
        process.kill()
        process.join()


def check_each(calls: Sequence[DrawnCall], device: str, share: float) -> Found:
    """The findings on the calls of a kind, after the first of them mostly by kernels that are compiled, up to one that
    loses the device; and whether one did. ``share``: of the GPU's memory, that they may take."""
    found: list[Check | None] = []
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)
    for call in calls:
        try:
            found.append(check_once(call, device))
        except Exception as error:
            if fatal(error):
                return found, True
            found.append(None)
    return found, False


def check_once(call: DrawnCall, device: str) -> Check | None:
    """The findings on a call; its neighbour runs once, whose errors the benchmark meets again and reports."""
    torch.set_num_threads(1)
    try:
        return check_of(call, torch.device(device))
    finally:
        with contextlib.suppress(Exception), flashsci.use_backend("auto", strict=True):
            neighbour = Work(call.neighbour(), torch.device(device))
            neighbour.timed(ways.attend("auto", neighbour.inputs))()
        if device == "cuda":
            with contextlib.suppress(Exception):
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
