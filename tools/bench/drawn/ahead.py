"""Ahead-of-time compilation of the kernels of drawn calls: each call runs once in one of many processes.

Triton's kernels are compiled for dtypes, head dims, options, and for sizes and strides that are multiples of 16: the
calls themselves are run, with their neighbours.
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
from tools.bench.drawn.work import Work

#: The candidates whose kernels are compiled at a first call.
COMPILED = ("triton", "auto", "cuda")


def compile_ahead(
    calls: Iterable[DrawnCall],
    device: torch.device,
    until: float,
    workers: int | None = None,
    on_step: Callable[[str], object] = lambda text: None,
) -> int:
    """Compile for the calls in order, until that time by the monotonic clock or for all of them.

    Returns:
        The number of calls that are ready: the first ones, but for a few that were still compiling.
    """
    workers = max(1, len(os.sched_getaffinity(0)) - 1) if workers is None else workers
    waiting = enumerate(calls)
    running: dict[Future[None], int] = {}
    finished: set[int] = set()
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
                        running[pool.submit(run_once, item[1], device.type)] = item[0]
                for future in wait(running, left, FIRST_COMPLETED).done:
                    finished.add(running.pop(future))
                    if isinstance(failure := future.exception(), BrokenProcessPool):
                        raise failure
            except BrokenProcessPool:  # a process died, and its pool with it: the benchmark meets its call again
                finished.update(range(begun))
                running.clear()
                _stop(pool)
                pool = processes(workers)
            on_step(f"compiling ahead: {len(finished)} calls")
    finally:
        _stop(pool)
    late = [n for n in range(begun) if n not in finished]
    few = workers // 4
    return late[few] if len(late) > few else begun


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool: a call that compiles for minutes must not hold the run."""
    stopped = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in stopped:
        process.kill()
        process.join()


def run_once(call: DrawnCall, device: str) -> None:
    """Run a call and its neighbour by the candidates that compile. Errors are ignored here: the benchmark meets them
    again and reports them."""
    torch.set_num_threads(1)
    for one, names in ((call, COMPILED), (call.neighbour(), ("auto",))):
        with contextlib.suppress(Exception):
            work = Work(one, torch.device(device))
            for name in names:
                with contextlib.suppress(Exception), flashsci.use_backend(name, strict=True):
                    work.timed(ways.attend(name, work.inputs))()
            del work
        if device == "cuda":
            with contextlib.suppress(Exception):
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
