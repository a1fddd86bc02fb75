"""Workbench of the sm75 kernels: generated cases and traps by fp64, and times beside SDPA. Needs a GPU newer than Turing,
or Turing itself; on a newer one the kernels are compiled from their PTX.

    nvcc -shared -Xcompiler -fPIC -std=c++17 -O3 -gencode arch=compute_75,code=sm_90 csrc/sm75/*_fp16.cu -o sm75.so
    python tools/gpu_sm75.py check sm75.so --cases 400
    python tools/gpu_sm75.py time sm75.so
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import statistics
import sys
import time
import types
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flashsci import check as checks
from flashsci import testing
from flashsci.testing import Case, generate, variants
from flashsci.testing.cases import BULK_LENGTHS, LARGE_LENGTHS
from tools.launchers import install

NAME = "sm75"
DIM_FORWARD, DIM_BACKWARD = 256, 128
TRAPS: dict[str, Any] = {}


def half_precision_traps() -> dict[str, Any]:
    """flashsci.testing.TRAPS with every dtype replaced by the one that these kernels have."""
    source = Path(testing.traps.__file__).read_text(encoding="utf-8")
    source = source.replace("bfloat16", "float16").replace('"float32"', '"float16"')
    module = types.ModuleType("half_precision_traps")
    sys.modules[module.__name__] = module  # dataclasses look themselves up
    exec(compile(source, testing.traps.__file__, "exec"), module.__dict__)
    return module.TRAPS


def worker(path: str) -> None:
    torch.set_num_threads(1)
    TRAPS.update(half_precision_traps())
    install(NAME, path, "sm75_fp16", torch.float16, max_dim_backward=DIM_BACKWARD)


def plan(count: int, seed: int, max_dim: int) -> list[Case]:
    """Cases of every feature these kernels have, one in eight with long sequences."""
    found = {
        replace(v, dropout=False, **(dict(bias=None, bias_grad=False) if v.varlen else {}))
        for v in variants(192, dtypes=("float16",), max_dim=max_dim)
    }
    pool = sorted(found, key=repr)
    short = generate(seed, count - count // 8, pool, lengths=BULK_LENGTHS)
    long = generate(seed + 1, count // 8, pool, lengths=LARGE_LENGTHS, score_limit=1 << 21)
    return [*short, *long]


def judge(task: tuple[str, Any, int]) -> tuple[str, Any]:
    kind, what, order = task
    if kind == "trap":
        try:
            TRAPS[what](NAME, "cuda")
            return kind, (what, "passed")
        except Exception as error:
            refused = type(error).__name__ in ("Skipped", "BackendError")
            return kind, (what, f"{'not run' if refused else 'FAILED'}: {error!r}"[:2000])
    total = checks.Tally()
    for case in what:
        try:
            for tally in checks.judge_case(case, [NAME], "cuda", order).values():
                total.add(tally)
        except Exception as error:
            total.fail(case, repr(error)[:500])
    return kind, total


def check(path: str, count: int, seed: int, order: int, workers: int, seconds: float) -> int:
    start = time.time()
    worker(path)  # what cannot be loaded fails here, not in every process of the pool
    cases = plan(count, seed, DIM_BACKWARD if order else DIM_FORWARD)
    tasks: list[tuple[str, Any, int]] = [
        ("trap", t.name, order) for t in TRAPS.values() if not t.gigabytes
    ]
    tasks += [("cases", cases[i::40], order) for i in range(40) if cases[i::40]]
    total, sprung = checks.Tally(), {}
    with multiprocessing.get_context("spawn").Pool(workers, worker, (path,)) as pool:
        results = pool.imap_unordered(judge, tasks)
        for _ in tasks:
            left = seconds - (time.time() - start)
            try:
                kind, found = results.next(timeout=max(left, 0.1))
            except multiprocessing.TimeoutError:
                total.fail(Case(), "out of time")
                break
            if kind == "trap":
                sprung[found[0]] = found[1]
            else:
                total.add(found)
    for name, outcome in sprung.items():
        print(f"trap {name}: {outcome}")
    reasons: dict[str, list[str]] = defaultdict(list)
    for failure in total.failures:
        reasons[failure["problem"].splitlines()[-1][:160]].append(failure["case"])
    for problem, which in list(reasons.items())[:25]:
        print(f"FAILED {problem}  ({len(which)} such)\n    {which[0]}")
    bad = len(total.failures) + sum(x.startswith("FAILED") for x in sprung.values())
    for tensor, ratios in total.worst.items():
        print(f"{tensor}: worst error, gain, spread over allowance", *(f"{r:.2f}" for r in ratios))
    print("caught when scaled", {t: f"{a}/{b}" for t, (a, b) in total.caught.items()})
    print("refused", total.refused)
    print(f"{total.cases} cases, {bad} failures, {time.time() - start:.0f} s")
    return bad


def timed(runs: dict[str, Any], reps: int) -> dict[str, float]:
    """Median milliseconds, interleaved launch by launch."""
    times: dict[str, list[Any]] = {name: [] for name in runs}
    for rep in range(reps + 2):
        for name, run in runs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            if rep >= 2:
                times[name].append((start, stop))
    torch.cuda.synchronize()
    return {n: statistics.median(a.elapsed_time(b) for a, b in t) for n, t in times.items()}


def timing(paths: list[str], reps: int, backward: bool) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    import flashsci

    names = []
    for path in paths:
        name, _, file = path.rpartition("=")
        names.append(name or NAME)
        install(names[-1], file, "sm75_fp16", torch.float16)
    print("   d  mask      s", *(n.rjust(10) for n in (*names, "efficient")), " TFLOP/s")
    for d, causal, s in itertools.product((32, 64, 96, 128, 256), (False, True), (1024, 8192)):
        if backward and d > DIM_BACKWARD:
            continue
        b, h = 16384 // s, 2048 // d
        q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=torch.half) for _ in range(3))
        dout = torch.randn_like(q)
        runs = {}

        def ours(name: str, q=q, k=k, v=v, causal=causal) -> Any:
            return flashsci.attention(q, k, v, causal=causal, backend=name)

        def theirs(q=q, k=k, v=v, causal=causal) -> Any:
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return sdpa(q, k, v, is_causal=causal)

        for name, forward in (*((n, lambda n=n: ours(n)) for n in names), ("efficient", theirs)):
            if backward:
                for x in (q, k, v):
                    x.requires_grad_()
                out = forward()
                runs[name] = lambda out=out, q=q, k=k, v=v, dout=dout: torch.autograd.grad(
                    out, (q, k, v), dout, retain_graph=True
                )
            else:
                runs[name] = forward
        work = (10 if backward else 4) * b * h * s * s * d * (0.5 if causal else 1)
        found = timed(runs, reps)
        cells = (f"{work / ms * 1e-9:10.1f}" for ms in found.values())
        print(f"{d:4d} {'causal' if causal else 'full':>6} {s:6d}", *cells, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("check", "time", "time-backward"))
    parser.add_argument("libraries", nargs="+")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--order", type=int, default=1, help="0: without gradients")
    parser.add_argument("--large", action="store_true", help="the traps of many gigabytes, alone")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--reps", type=int, default=8)
    a = parser.parse_args()
    if a.mode == "check" and a.large:
        worker(a.libraries[0])
        found = [judge(("trap", t.name, 1))[1] for t in TRAPS.values() if t.gigabytes]
        print("\n".join(f"trap {name}: {outcome}" for name, outcome in found))
        sys.exit(any(outcome != "passed" for _, outcome in found))
    if a.mode == "check":
        bad = check(a.libraries[0], a.cases, a.seed, a.order, a.workers, a.seconds)
        sys.exit(bad != 0)
    timing(a.libraries, a.reps, a.mode == "time-backward")
