"""What `python -m flashsci check` does not ask of a backend: deterministic gradients against fp64 and the same bits every time, fp32 in each
precision and over more than fp16's range, traps in fp16. Of the package's own kernels, or of a build of one unit's .cu. Needs a GPU.

    python -m tools.check_build cuda:sm80 --dtype fp32                   through the bindings
    python -m tools.check_build sm75=sm75.so --dtype fp16 --cases 400    before the bindings know it
    python -m tools.check_build cuda:sm75 --dtype fp16 --cases 0 --large the traps of many gigabytes, alone
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import sys
import time
import traceback
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flashsci import check, testing
from flashsci.bench.inputs import DTYPES
from flashsci.registry import BackendError
from flashsci.testing import TRAPS, Inputs, Judge, Skipped, evaluate, make_inputs, poisoned_memory
from tools.launchers import install

DEVICE = "cuda"
PRECISIONS = (None, "tf32x3", "tf32")


def traps_of(dtype: str) -> dict[str, testing.Trap]:
    """Most traps of flashsci.testing are in bf16 or fp32, which sm75 has not: all of them in fp16."""
    if dtype != "fp16":
        return TRAPS
    path = testing.traps.__file__
    source = Path(path).read_text(encoding="utf-8")
    source = source.replace("bfloat16", "float16").replace('"float32"', '"float16"')
    module = types.ModuleType("half_precision_traps")
    sys.modules[module.__name__] = module  # dataclasses look themselves up
    exec(compile(source, path, "exec"), module.__dict__)
    return module.TRAPS


def extremes() -> list[tuple[str, Inputs]]:
    """Inputs whose rows differ in size by more than fp16 spans; hidden keys that hold anything."""
    found = []
    kinds = ("hidden", "rows", "tiny", "huge", "columns")
    for seed, (dim, seq, kind) in enumerate(itertools.product((8, 32, 64, 128), (40, 200), kinds)):
        g = torch.Generator(DEVICE).manual_seed(seed)
        rand = functools.partial(torch.randn, device=DEVICE, generator=g)
        q, k, v, dout = (rand(2, 2, seq, dim) for _ in range(4))
        mask = None
        if kind == "hidden":
            mask = torch.rand(2, 1, 1, seq, device=DEVICE, generator=g) < 0.7
            hidden = ~mask[:, 0, 0]
            for x, size in ((k, 1e15), (v, 1e15)):
                x.transpose(1, 2)[hidden] *= size
        elif kind == "rows":
            for x in (v, dout):
                x *= torch.exp2(torch.randint(-30, 30, (2, 2, seq, 1), device=DEVICE, generator=g))
        elif kind in ("tiny", "huge"):
            for x, size in ((q, 1e-12), (k, 1e12), (v, 1e-12), (dout, 1e-8)):
                x *= size if kind == "tiny" else 1 / size
        else:
            for x in (v, dout):
                x *= torch.exp2(torch.randint(-10, 10, (dim,), device=DEVICE, generator=g))
        found.append((f"{kind} d{dim} s{seq}", Inputs(q, k, v, None, mask, dout)))
    return found


def judge(inputs: Inputs, backend: str, repeats: int) -> tuple[list[str], dict[str, float]]:
    """Problems, and the largest ratio of error to allowance by tensor."""
    judged = Judge(inputs)

    def run() -> dict[str, torch.Tensor]:
        with poisoned_memory(cuda_bytes=0):
            return evaluate(inputs, backend, deterministic=True)

    found = run()
    findings = judged.findings(found)
    problems = [f.problem for f in findings if f.problem]
    for _ in range(repeats):
        again = run()
        differ = [n for n, x in found.items() if not torch.equal(x, again[n])]
        if differ:
            problems.append(f"another run differs in {differ}")
            break
    return problems, {f.tensor: max(f.ratios) for f in findings}


def prepare(given: str) -> str:
    """The name of the backend; in every process."""
    torch.set_num_threads(1)
    return install(given).name if "=" in given else given


def work(task: tuple[str, str, Any, int]) -> tuple[str, str | list[str], dict[str, float]]:
    """What was judged, why not or its problems, ratios."""
    backend, dtype, what, repeats = task
    label = str(what)
    try:
        if isinstance(what, str):
            traps_of(dtype)[what](backend, DEVICE)
            return label, [], {}
        if isinstance(what, int):
            label, inputs = extremes()[what]
        else:
            inputs = make_inputs(what, DEVICE)
        return label, *judge(inputs, backend, repeats)
    except (Skipped, BackendError) as reason:
        return label, str(reason), {}
    except Exception as error:
        # The module of traps_of has a Skipped of its own.
        skipped = type(error).__name__ == "Skipped"
        return label, str(error) if skipped else [traceback.format_exc(limit=-3)], {}


def plan(dtype: str, count: int, seed: int, large: bool) -> list[tuple[Any, int]]:
    """(trap, number of extremes or case; repeats); one case in 25 is repeated 100 times."""
    cases: list[Any] = check.plan_cases(count, seed, DEVICE, f"cuda/sm80/fwd_{dtype}")
    if dtype == "fp32":
        cases = [replace(case, precision=PRECISIONS[i % 3]) for i, case in enumerate(cases)]
        cases += range(40) if count else []
    traps = [t.name for t in traps_of(dtype).values() if bool(t.gigabytes) == large and t.order < 2]
    return [(trap, 0) for trap in traps] + [
        (case, 100 if i % 25 == 0 else 1) for i, case in enumerate(cases)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", help="a name, or name=path of a build")
    parser.add_argument("--dtype", default="bf16", choices=[n for n in DTYPES if n != "fp64"])
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", action="store_true", help="the traps of many gigabytes instead")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--minutes", type=float, default=9.0, help="stop then")
    options = parser.parse_args()
    start = time.time()
    name = prepare(options.backend)  # what cannot be loaded fails here, not in every process
    found = plan(options.dtype, options.cases, options.seed, options.large)
    tasks = [(name, options.dtype, *task) for task in found]
    worst: dict[str, float] = {}
    refused: dict[str, int] = {}
    done = failures = 0
    workers = 1 if options.large else options.workers
    with multiprocessing.get_context("spawn").Pool(workers, prepare, (options.backend,)) as pool:
        results = pool.imap_unordered(work, tasks)
        for _ in tasks:
            try:
                left = 60 * options.minutes - (time.time() - start)
                label, problems, ratios = results.next(timeout=max(left, 0.1))
            except multiprocessing.TimeoutError:
                print("out of time")
                failures += 1
                break
            done += 1
            if isinstance(problems, str):
                refused[problems] = refused.get(problems, 0) + 1
                continue
            failures += bool(problems)
            for problem in problems:
                if failures <= 12:
                    print("FAIL", label[:900], problem[-900:], sep="\n    ", flush=True)
            for tensor, ratio in ratios.items():
                worst[tensor] = max(worst.get(tensor, 0.0), ratio)
        pool.terminate()
    print("worst ratio to what is allowed:", {n: round(r, 3) for n, r in worst.items()})
    print("refused:", refused)
    print(f"{done} of {len(tasks)}, {failures} failures, {time.time() - start:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
