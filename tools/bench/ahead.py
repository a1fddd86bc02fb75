"""Ahead-of-time compilation: what Triton and FlexAttention compile at a first call, in many processes.

One after the other, compiling takes most of a run. The processes leave their results in the compilers' caches
on disk, where the benchmark itself finds them. Errors are ignored here: the benchmark meets them again and
reports them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from tools.bench import candidates, revision
from tools.bench.candidates import BASE
from tools.bench.cases import Case, series
from tools.bench.inputs import make_inputs

Job = tuple[Case, str]

#: Memory that a process may need on the GPU, itself included.
_BYTES_EACH = 12 << 30


def jobs(cases: Iterable[Case], names: Iterable[str]) -> list[Job]:
    """The jobs that are worth compiling ahead: Triton's kernels are the same for all lengths, FlexAttention's
    are not. The CUDA backends may use Triton's kernels too, but no others that are compiled at run time."""
    names = list(names)
    found: dict[tuple[str, str], Job] = {}
    for case in cases:
        for name in names:
            if name.removesuffix(BASE) == "triton":
                found.setdefault((series(case.id), name), (case, name))
            elif name == "flex":
                found[case.id, name] = (case, name)
    return list(found.values())


def compile_ahead(
    cases: Iterable[Case],
    names: Iterable[str],
    device: torch.device,
    order: int = 1,
    base: str | None = None,
    on_step: Callable[[str], object] = lambda text: None,
) -> None:
    """Run every job once, so that its kernels are in the caches."""
    todo = jobs(cases, candidates.names_of(names, device, base is not None))
    room = torch.cuda.get_device_properties(device).total_memory // _BYTES_EACH
    workers = min(len(todo) // 2, len(os.sched_getaffinity(0)) - 1, room)
    if workers < 2:
        return
    with processes(workers, base) as pool:
        running = [pool.submit(_once, case, name, device.type, order) for case, name in todo]
        for done, future in enumerate(as_completed(running), start=1):
            on_step(f"compiling ahead: {done} of {len(todo)}")
            with contextlib.suppress(BrokenProcessPool):
                future.result()


def processes(workers: int, base: str | None = None) -> ProcessPoolExecutor:
    """A pool of fresh processes that compile."""
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _prepare, (base,))


def _prepare(base: str | None) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if base is not None:
        revision.load(base)


def _once(case: Case, name: str, device: str, order: int) -> None:
    with contextlib.suppress(Exception):
        inputs = make_inputs(case, torch.device(device))
        if min(order, case.order) == 0:
            inputs = inputs.detached()
        out = candidates.candidate(name, inputs)()
        if inputs.leaves:
            torch.autograd.grad(out, list(inputs.leaves.values()), inputs.dout)
