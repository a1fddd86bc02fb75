"""The regret of `auto`: the time of its choice over that of the best candidate, for the cases of records.

The best of a case is the fastest candidate that passed its check: cuda, triton, every kernel of SDPA, and
plain math if `auto` may hold its scores. *Forward* is a call without gradients; *backward* and *both* are of
one with. A forward takes at least its host time: the GPU finishes short ones sooner, and waits. A case of the
suite `latency` counts by its pass `host` alone.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flashsci.call import ops
from flashsci.call.problem import Problem, sums_bias
from flashsci.choice import backends, candidates, preferences
from flashsci.choice.preferences import Table
from tools.bench.inputs import DTYPES

ROOT = Path(__file__).resolve().parents[2]
#: The default for records that do not say.
CAPABILITIES = {"NVIDIA H200": (9, 0)}
BACKENDS = ("cuda", "triton", "sdpa", "eager")  # the candidates of `auto`, except the last resort
SHARING = ("cuda", "triton")  # each may compute the gradients of the other's forward
#: The host time of a forward, in microseconds: `small-call` on an H200.
HOST = {"cuda": 15.0, "triton": 21.0, "sdpa": 17.0}
SDPA_KERNELS = ("sdpa:flash", "sdpa:cudnn", "sdpa:efficient")


@dataclass(frozen=True)
class Timed:
    """One case of one file of records: the backends of its passes, and their times."""

    file: str
    id: str
    suite: str
    commit: str  # and the day
    gpu: str
    problem: Problem
    generation: int  # the cuda backend's kernels that would compute its gradients
    forward: dict[str, float]  # backend -> us; inf: refused or wrong
    backward: dict[str, float]
    best: dict[str, float]  # pass -> us of the best candidate, whether auto could pick it or not
    wrong: frozenset[str]  # backends that failed their check

    def gradients(self, backend: str) -> float | None:
        """The time of a backend's own gradients. The gradients measured for `cuda` may be another backend's."""
        own = self.backward.get("cuda:own") if backend == "cuda" else None
        return own or self.backward.get(backend)

    def serving(self, grad: bool) -> dict[str, float]:
        """Times of the forward; inf if a gradient is wanted and no backend has it."""

        def refuses(name: str) -> bool:
            whose = SHARING if name in SHARING else (name,)
            return all(self.gradients(n) in (None, math.inf) for n in whose)

        lacking = {n for n in self.forward if grad and n in self.backward and refuses(n)}
        return {n: math.inf if n in lacking else time for n, time in self.forward.items()}

    def time(self, backend: str, gradients: str) -> float | None:
        """The time of forward and backward; ``gradients``: the backend of the gradients, as cuda and triton
        may have each other's."""
        first = self.forward.get(backend)
        second = self.gradients(gradients if backend in SHARING else backend)
        return None if first is None or second is None else first + second


def problem_of(case: dict[str, Any], capability: tuple[int, int] | None, on_gpu: bool) -> Problem:
    """The case of a record as `auto` would see it, with gradients if it has any."""
    lens = case.get("lens")
    batch = (case.get("B", 1), case["N"]) if "N" in case else (case.get("B", 1),)
    left, right = case.get("window", (-1, -1))
    order, bias = case.get("order", 0), case.get("bias")
    shape = None if bias is None or lens else tuple(bias)
    dtype, bias_dtype = DTYPES[case["dtype"]], DTYPES[case.get("bias_dtype", case["dtype"])]
    wanted = bool(bias and order and case.get("bias_grad"))
    summed = (
        wanted
        and shape is not None
        and sums_bias(torch.empty(shape, dtype=bias_dtype, device="meta"), (*batch, case["H"]))
    )
    return Problem(
        "cuda" if on_gpu else "cpu", capability, dtype, case["H"], case["Hk"], case["D"], case["Dv"],
        batch=(lens["n"],) if lens else batch,
        seq_q=lens["total"] if lens else case["Sq"], seq_k=lens["total"] if lens else case["Sk"],
        varlen=bool(lens), ragged_bias=bool(lens and bias), bias_shape=shape, bias_dtype=bias_dtype if bias else None,
        bias_grad=wanted, bias_summed=summed, inner_heads=bool(case.get("bias_layout")), mask="mask" in case,
        mask_by_query="mask" in case and case["mask"][-2] > 1,
        window_left=left, window_right=0 if case.get("causal") else right, requires_grad=order > 0,
    )  # fmt: skip


def generation_of(case: dict[str, Any], problem: Problem) -> int:
    """The cuda backend's kernels for the gradients of a case, with bias and mask in their memory layout."""
    if problem.capability is None:
        return 0
    module = backends.find("cuda").load()
    reason = module.library.load()
    if reason is not None and (problem.bias or problem.mask):
        raise RuntimeError(f"the library says whose gradients records are of, and {reason}")
    sizes = (problem.heads_q, problem.seq_q), (problem.heads_k, problem.seq_k)
    rank = len(problem.batch) + 3

    def empty(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        shape = (*shape,)
        return torch.empty(*(1,) * (rank - len(shape)), *shape, dtype=dtype, device="meta")

    q, k = (empty((*problem.batch, *n, problem.head_dim), problem.dtype) for n in sizes)
    v = empty((*problem.batch, *sizes[1], problem.head_dim_v), problem.dtype)
    bias = mask = None
    if problem.bias_shape is not None:
        bias = empty(problem.bias_shape, problem.bias_dtype)
    if "mask" in case:
        mask = empty(case["mask"], torch.bool)
    tensors = ops.Tensors(q, k, v, bias, mask=mask)
    scalars = ops.Scalars(-1, -1, 1.0, 0.0, -1, -1, False, 0.0, "default", False)
    saved = ops.Saved(tensors, *ops.fake_forward(tensors), scalars)
    need = ops.NEED_Q | ops.NEED_K | ops.NEED_V | (ops.NEED_BIAS if problem.bias_grad else 0)
    takes = module.hopper_takes(saved, need)
    generation: int = module.backward_kernels(problem, takes)[0]
    return generation


def read(path: Path) -> list[Timed]:
    """The cases of a file of records."""
    found: dict[str, list[dict]] = {}
    for record in json.loads(path.read_text()):
        on_host = record["suite"] == "latency"
        if record["pass"] in (("host",) if on_host else ("forward", "backward")):
            found.setdefault(record["case"]["id"], []).append(record)
    path = path.resolve()
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    return [case for records in found.values() if (case := _timed(name, records))]


def _timed(file: str, records: list[dict]) -> Timed | None:
    about = records[0]
    gpu = about["env"]["gpu"]
    capability = about["env"].get("capability") or CAPABILITIES.get(gpu)
    problem = problem_of(about["case"], capability and tuple(capability), gpu is not None)
    passes: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for r in records:
        times = passes["forward" if r["pass"] == "host" else r["pass"]]
        times[r["backend"]] = r["time_us"]["median"] if r["time_us"] else math.inf
    if "cuda" in (forward := passes["forward"]) and "cuda:own" in forward:  # one code, timed twice
        forward["cuda"] = forward["cuda:own"] = min(forward["cuda"], forward["cuda:own"])
    if gpu is not None and about["suite"] != "latency":
        least = {n: HOST.get(n.split(":")[0], 0.0) for n in forward}
        passes["forward"] = {n: max(time, least[n]) for n, time in forward.items()}
    best = {}
    for kind, times in passes.items():
        peers = [n for n in times if n in (*BACKENDS, "cuda:own", *SDPA_KERNELS)]
        if candidates.may_hold_scores(problem):
            peers += [n for n in ("math", "sdpa:math") if n in times]
        best[kind] = min((times[n] for n in peers), default=math.inf)
    if math.isinf(best["forward"]):
        return None
    if not passes["backward"]:
        problem = replace(problem, requires_grad=False)
    served = {kind: _backends(times, problem) for kind, times in passes.items()}
    generation = generation_of(about["case"], problem) if passes["backward"] else 0
    when = about["commit"], about["env"].get("date")  # older records have no date
    commit = ", ".join(x for x in when if x) or "no commit"
    wrong = frozenset(r["backend"] for r in records if r["gate"].startswith("failed"))
    return Timed(
        file, about["case"]["id"], about["suite"], commit, gpu or "CPU", problem, generation, **served, best=best, wrong=wrong,
    )  # fmt: skip


def _backends(times: dict[str, float], problem: Problem) -> dict[str, float]:
    """Times by the candidates of `auto`. A candidate without a measurement has the time of the one that it
    would run."""
    found = {n: times[n] for n in (*BACKENDS, "cuda:own", "reference") if n in times}
    if "sdpa" not in found:
        masked = problem.bias or problem.mask or problem.head_dim != problem.head_dim_v
        kernels = ("sdpa:flash", "sdpa:efficient") if masked else ("sdpa:default", *SDPA_KERNELS)
        there = [times[n] for n in kernels if n in times]
        if there:
            found["sdpa"] = min(there)
    refused = candidates.rejects("eager", problem)
    if "eager" not in found and "math" in times and refused is None:
        found["eager"] = times["math"]
    return found


def pick(order: Iterable[str], case: Timed, grad: bool) -> str | None:
    """The first backend of an order that is not known to refuse; None: it was not measured."""
    times = case.serving(grad)
    for name in order:
        if name == "eager" and not candidates.may_hold_scores(case.problem):
            continue
        if name not in times:
            return None
        if times[name] < math.inf or name in case.wrong:
            return name
    return None


@dataclass(frozen=True)
class Regret:
    """The choice of `auto` for a pass of a case, and its time over the best."""

    case: Timed
    kind: str  # "forward", "backward" or "both"
    backend: str | None  # None: its choice was not measured
    ratio: float | None  # None: not measured, or wrong


def regrets(cases: list[Timed], tables: tuple[Table, ...]) -> list[Regret]:
    """The choices for every case and pass: "forward" for a call without gradients, "backward" and "both" for
    one with."""
    found = []
    for case in cases:
        name = picked(case, tables, grad=False)
        known = name is not None and name not in case.wrong
        ratio = case.forward[name] / case.best["forward"] if known else None
        found.append(Regret(case, "forward", name, ratio))
        if not case.problem.requires_grad or math.isinf(case.best["backward"]):
            continue
        name = picked(case, tables, grad=True)
        by = _gradients(case, tables, name)
        total = None if name is None else case.time(name, by)
        if name is None or total is None or math.isinf(total):
            found += [Regret(case, kind, name, None) for kind in ("backward", "both")]
            continue
        second = total - case.forward[name]
        shown = f"{name}, {by}" if name in SHARING and by != name else name
        found.append(Regret(case, "backward", shown, second / case.best["backward"]))
        found.append(Regret(case, "both", shown, total / fastest(case)))
    return found


def picked(case: Timed, tables: tuple[Table, ...], grad: bool) -> str | None:
    problem = replace(case.problem, requires_grad=grad)
    order = preferences.first(tables, "calls", preferences.features(problem)).order
    return pick(order, case, grad)


def _gradients(case: Timed, tables: tuple[Table, ...], forward: str | None) -> str:
    found = preferences.features(case.problem, case.generation, forward or "")
    order = preferences.first(tables, "gradients", found).order
    return next((n for n in order if case.gradients(n) not in (None, math.inf)), order[0])


def fastest(case: Timed) -> float:
    """The least time of forward and backward."""
    pairs = itertools.product(case.forward, SHARING)
    totals = [t for name, by in pairs if allowed(name, case) and (t := case.time(name, by))]
    return min(totals)


def allowed(name: str, case: Timed) -> bool:
    return name not in ("eager", "reference") or candidates.may_hold_scores(case.problem)


def summary(found: list[Regret]) -> dict[str, list[float]]:
    """{pass: [number of cases, geometric mean, worst]}."""
    by = {}
    for kind in ("forward", "backward", "both"):
        ratios = [r.ratio for r in found if r.kind == kind and r.ratio is not None]
        if ratios:
            by[kind] = [
                len(ratios),
                round(statistics.geometric_mean(ratios), 3),
                round(max(ratios), 2),
            ]
    return by


def report(found: list[Regret]) -> str:
    """Regret by suite and pass, the worst ten, and the choices of `auto` without a measurement."""
    lines = []
    for suite in sorted({r.case.suite for r in found}):
        for kind, (count, mean, worst) in summary([r for r in found if r.case.suite == suite]).items():
            lines.append(f"{suite:<12}{kind:<10}{count:>4} cases{mean:>8.3f} worst {worst:.2f}")
    for kind, (count, mean, worst) in summary(found).items():
        lines.append(f"{'all':<12}{kind:<10}{count:>4} cases{mean:>8.3f} worst {worst:.2f}")
    known = [r for r in found if r.ratio is not None]
    for r in sorted(known, key=lambda r: -r.ratio)[:10]:
        lines.append(f"{r.ratio:>6.2f}  {r.case.id} {r.kind}: {r.backend} ({Path(r.case.file).stem})")
    blind = [r for r in found if r.ratio is None]
    for r in blind:
        what = "not measured" if r.backend is None else f"{r.backend}, wrong or without gradients"
        lines.append(f"    ?  {r.case.id} {r.kind}: {what} ({Path(r.case.file).stem})")
    return "\n".join(lines)


def by_gpu(paths: Iterable[Path]) -> dict[str, list[Timed]]:
    """{name of the table: cases}, "cpu" for machines without a GPU."""
    found: dict[str, list[Timed]] = {}
    for case in (case for path in paths for case in read(path)):
        capability = case.problem.capability
        name = "cpu" if capability is None else f"sm{capability[0]}{capability[1]}"
        found.setdefault(name, []).append(case)
    return found
