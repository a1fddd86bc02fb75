"""Processes that share the work, split by variant: each variant is compiled once, and many at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from flashsci.check import judging, machine_code
from flashsci.check.tally import Tally
from flashsci.testing import Case, FP8Case, MapCase, PagedCase
from flashsci.testing.coverage import Coverage

_seen: set[str] = set()  # hashes of the Triton kernels whose machine code was examined
AnyCase = Case | PagedCase | FP8Case


def tasks_of(cases: Iterable[AnyCase], backends: Sequence[str], device: str, order: int) -> list[Any]:
    """Cases grouped by the kernels that they need: a worker compiles the kernels that it runs."""
    groups: dict[Any, list[AnyCase]] = defaultdict(list)
    for case in cases:
        groups[case.compiled if isinstance(case, PagedCase) else case.variant].append(case)
    # If nothing is compiled, a variant need not stay together.
    size = 1 << 30 if "triton" in backends else 8
    return [
        ("cases", group[i : i + size], tuple(backends), device, order)
        for group in groups.values()
        for i in range(0, len(group), size)
    ]


def work(task: tuple[Any, ...]) -> tuple[str, Any]:
    """Run one task of a worker process: ("cases", list, backends, device, order) or ("trap", name, backend,
    device)."""
    kind, *rest = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if kind == "trap":
        return kind, judging.spring(*rest)
    cases, backends, device, order = rest
    merged: dict[str, Tally] = defaultdict(Tally)
    coverage = Coverage()
    for case in cases:
        try:
            if isinstance(case, PagedCase):
                found = judging.judge_paged_case(case, backends, device)
            elif isinstance(case, FP8Case):
                found = judging.judge_fp8_case(case, backends, device)
            elif isinstance(case, MapCase):
                found = judging.judge_map_case(case, backends, device)
            else:
                found = judging.judge_case(case, backends, device, order, coverage)
        except Exception:
            found = {backends[0]: Tally()}
            found[backends[0]].fail(case, traceback.format_exc(limit=-3))
        for name, tally in found.items():
            merged[name].add(tally)
        # Many processes share the device: the memory of the judge of a large case is freed.
        if device == "cuda" and torch.cuda.memory_reserved() > 1 << 30:
            torch.cuda.empty_cache()
    ran = "triton" in merged and merged["triton"].cases and any(map(launches, cases))
    if device == "cuda" and ran:
        for problem in undefined_reads():
            merged["triton"].fail(cases[-1], problem)
    return kind, (type(cases[0]), len(cases), dict(merged), coverage)


def launches(case: AnyCase) -> bool:
    """Whether kernels have any work for a case."""
    if isinstance(case, Case) and case.variant.varlen:
        return sum(case.lens_q) > 0 and sum(case.lens_k) > 0
    return not isinstance(case, Case) or case.scores > 0


def undefined_reads() -> list[str]:
    """Reads of undefined registers in the machine code of Triton kernels that this process has compiled since the
    last call.

    Call it after one of them has run: to find no kernel at all is a problem, too.
    """
    cubins = machine_code.triton_cubins()
    if not cubins:
        return ["Triton kernels ran, and none of their machine code was found"]
    new = {h: cubin for h, cubin in cubins.items() if h not in _seen}
    _seen.update(new)
    found = [f for cubin in new.values() for f in machine_code.undefined_in(cubin)]
    return [f"{f.kernel} reads {f.register}, which nothing has written: {f.instruction}" for f in found]


def processes_here(device: str) -> int:
    """The number of processes: one for each core, at most 14 for each GPU, because more would only wait for it."""
    gpus = torch.cuda.device_count() if device == "cuda" else 1
    return min(14 * max(gpus, 1), os.cpu_count() or 1)


def take_gpu() -> None:
    """Select the GPU of a worker process."""
    if torch.cuda.device_count() > 1:
        (number, *_) = multiprocessing.current_process()._identity
        torch.cuda.set_device(number % torch.cuda.device_count())


def results_of(tasks: list[Any], workers: int, until: float) -> Iterator[tuple[str, Any]]:
    """Results as they come, until that time. A process is replaced after some tasks, because an error of the device
    lasts as long as the process."""
    if workers <= 1:
        for task in tasks:
            if time.time() < until:
                yield work(task)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, take_gpu, maxtasksperchild=96) as pool:
        results = pool.imap_unordered(work, tasks)
        with contextlib.suppress(StopIteration, multiprocessing.TimeoutError):
            while True:
                yield results.next(timeout=max(0.0, until - time.time()))


class LargeTraps(threading.Thread):
    """Traps that need much of the device's memory, one after the other, while other processes judge the cases.

    Those processes mostly compile. A trap that found no memory is tried again alone; no other failure is.
    """

    def __init__(self, springs: list[tuple[str, str, str]], until: float):
        super().__init__(daemon=True)
        self.springs, self.until = springs, until
        self.outcomes: dict[tuple[str, str, str], str] = {}

    def run(self) -> None:
        for spring in self.springs:
            outcome = self.outcomes.get(spring)
            if time.time() < self.until and (outcome is None or "out of memory" in outcome):
                *_, self.outcomes[spring] = judging.spring(*spring)
                torch.cuda.empty_cache()

    def results(self) -> list[tuple[str, str, str]]:
        """(trap, backend, outcome) of the traps that there was time for; call it when nothing else runs."""
        if self.is_alive():
            self.join(max(0.0, self.until - time.time()))
        if not self.is_alive():
            self.run()
        return [(name, backend, o) for (name, backend, _), o in list(self.outcomes.items())]
