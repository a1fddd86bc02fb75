"""Checks of drawn calls ahead of their times, each call in one of many processes, where its kernels are compiled.

A check takes many times as long as the times of a call. Kernels stay in the compilers' caches on disk, also those of
the call's neighbour.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import torch

import flashsci
from flashsci.testing import DrawnCall
from tools.bench.ahead import processes
from tools.bench.drawn import ways
from tools.bench.drawn.measure import Check, check_of
from tools.bench.drawn.work import Work

#: The findings on calls by their places. None: the call is to be checked alone.
Checks = dict[int, Check | None]


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
        with them, or that found too little memory.
    """
    workers = max(1, len(os.sched_getaffinity(0)) - 1) if workers is None else workers
    waiting = enumerate(calls)
    running: dict[Future[Check | None], int] = {}
    found: Checks = {}
    begun, more = 0, True
    pool = processes(workers)
    try:
        while (more or running) and (left := until - time.monotonic()) > 0:
            try:
                while more and len(running) < 2 * workers:
                    item = next(waiting, None)
                    more = item is not None
                    if item is not None:
                        begun = item[0] + 1
                        running[pool.submit(check_once, item[1], device.type)] = item[0]
                for future in wait(running, left, FIRST_COMPLETED).done:
                    place = running.pop(future)
                    found[place] = None
                    failure = future.exception()
                    if isinstance(failure, BrokenProcessPool):
                        raise failure
                    found[place] = None if failure else future.result()
            except BrokenProcessPool:  # a process died, and its pool with it: the benchmark meets its call again
                found = {n: found.get(n) for n in range(begun)}
                running.clear()
                _stop(pool)
                pool = processes(workers)
            on_step(f"checking ahead: {len(found)} calls")
    finally:
        _stop(pool)
    late = [n for n in range(begun) if n not in found]
    few = workers // 4
    ready = late[few] if len(late) > few else begun
    return {n: found.get(n) for n in range(ready)}


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool: a call that compiles for minutes must not hold the run."""
    stopped = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in stopped:
        process.kill()
        process.join()


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
