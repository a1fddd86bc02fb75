"""`python -m flashsci check`: is every kernel right on this GPU? Writes reports/gpu-check.json.

Generated problems (flashsci.testing.cases) are judged against the fp64 oracle by the criteria of
flashsci.testing.bounds, forward, lse and all gradients, on every backend; then come the known traps
and bitwise determinism. Worker processes share the work by kernel variant, so that each variant is
compiled once and many are compiled at a time. The report carries one digest per kernel unit: a CPU
test knows from it which kernels changed since. It also lists what the generator draws, but did not for some
dtype or head dims of a backend (`coverage`).

"cuda" picks kernels as users get them; "cuda:sm90" and the like are held to one generation, so that what another one
served in its place does not count. A part of the cases is drawn for the newest generation, and judged on CUDA kernels alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import multiprocessing
import operator
import os
import platform
import re
import sys
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flashsci import digest
from flashsci.registry import BACKENDS, BackendError
from flashsci.testing import (
    TENSORS,
    TRAPS,
    Case,
    Judge,
    Skipped,
    Variant,
    evaluate,
    generate,
    make_inputs,
    poisoned_memory,
    second_order_variants,
    variants,
)
from flashsci.testing.bounds import PLAIN
from flashsci.testing.cases import (
    BULK_LENGTHS,
    LARGE_LENGTHS,
    SMALL_LENGTHS,
    SeededChoices,
    draw_case,
    layouts_of,
    resized,
)
from flashsci.testing.coverage import VIEWS, Coverage

SCALED = 1.01  # outputs times this must fail: the test of the test
KERNELS = ("triton", "cuda")  # backends of our own
DTYPE_OF = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
CRITERIA = ("error", "gain", "spread")
# Names for several units: the starts of theirs.
GROUPS = {"second_order": ("triton/jvp", "triton/second_")}


@dataclass
class Tally:
    """What some cases showed of one backend."""

    cases: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    worst: dict[str, list[float]] = field(default_factory=dict)  # tensor -> ratios by CRITERIA
    caught: dict[str, list[int]] = field(
        default_factory=dict
    )  # tensor -> [failed when scaled, judged]
    forward_only: int = 0  # of the cases: those whose gradients the backend refuses

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def see(self, tensor: str, ratios: Sequence[float], caught: bool | None = None) -> None:
        before = self.worst.get(tensor, [0.0] * len(ratios))
        self.worst[tensor] = [max(a, b) for a, b in zip(before, ratios, strict=True)]
        if caught is not None:
            counts = self.caught.setdefault(tensor, [0, 0])
            counts[0] += caught
            counts[1] += 1

    def fail(self, case: Case, message: str) -> None:
        self.failures.append({"problem": message, "case": repr(case)})

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.forward_only += other.forward_only
        self.failures += other.failures
        for reason, count in other.refused.items():
            self.refused[reason] = self.refused.get(reason, 0) + count
        for tensor, ratios in other.worst.items():
            self.see(tensor, ratios)
        for tensor, counts in other.caught.items():
            mine = self.caught.setdefault(tensor, [0, 0])
            mine[:] = [a + b for a, b in zip(mine, counts, strict=True)]

    def summary(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "of these forward only": self.forward_only,
            "failures": self.failures,
            "refused": self.refused,
            "worst ratio of error to allowance": {
                t: dict(zip(CRITERIA, (_digits(r) for r in self.worst[t]), strict=False))
                for t in TENSORS
                if t in self.worst
            },
            f"a result times {SCALED} would fail": {
                t: {"caught": c, "judged": n, "share": _digits(c / n)}
                for t, (c, n) in sorted(self.caught.items(), key=lambda kv: TENSORS.index(kv[0]))
            },
        }


def judge_case(
    case: Case,
    backends: Sequence[str],
    device: str,
    order: int = 1,
    coverage: Coverage | None = None,
) -> dict[str, Tally]:
    """Judge one case on several backends, and each pair of them against each other.

    Keys are backend names and, for pairs, "a-b". ``order`` 0 leaves out the gradients. A backend held to a generation that
    refuses gradients is judged by its forward. ``coverage`` sees what was judged.
    """
    tallies: dict[str, Tally] = defaultdict(Tally)
    inputs = make_inputs(case, device)
    forward = replace(inputs, dout=None, dlse=None, tangents={})
    if order == 0:
        inputs = forward
    results: dict[str, dict[str, torch.Tensor]] = {}
    for name in backends:
        tally = tallies[name]
        for given in (inputs, forward):
            try:
                with poisoned_memory(cuda_bytes=0):
                    results[name] = evaluate(given, name, name != "sdpa", deterministic=False)
                tally.forward_only += given is not inputs
                break
            except BackendError as error:
                tally.refuse(_reason(error))
                if ":" not in name or given.dout is None:
                    break
            except Exception:
                tally.fail(case, traceback.format_exc(limit=-3))
                break
    # The oracle is the larger part of the time: not for what nobody serves.
    judges: dict[bool, Judge] = {}
    for name in results:
        tally, fused = tallies[name], name not in PLAIN
        if fused not in judges:
            judges[fused] = Judge(inputs, fused)
        tally.cases += 1
        if coverage is not None:
            coverage.see(name, case)
        for found in judges[fused].findings(results[name]):
            x = results[name][found.tensor]
            tally.see(found.tensor, found.ratios, judges[fused].catches(found.tensor, x, SCALED))
            if found.problem:
                tally.fail(case, found.problem)
    for a, b in itertools.combinations(results, 2):
        tally = tallies[f"{a}-{b}"]
        tally.cases += 1
        judge = judges[a not in PLAIN and b not in PLAIN]
        for tensor in results[a].keys() & results[b].keys():
            found = judge.compare(tensor, results[a][tensor], results[b][tensor])
            tally.see(tensor, (found.ratios[0],))
            if found.problem:
                tally.fail(case, found.problem)
    return dict(tallies)


def _reason(error: BackendError) -> str:
    """An error without the shapes of its call, which would make every refusal one of its own."""
    return re.sub(r"\[[\d, ]*\]", "[..]", str(error)).split("; use ")[0]


def _work(task: tuple[Any, ...]) -> tuple[str, Any]:
    """One task of a worker process: ("cases", list, backends, device, order) or ("trap", name, backend, device)."""
    kind, *rest = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if kind == "trap":
        return kind, _spring(*rest)
    cases, backends, device, order = rest
    merged: dict[str, Tally] = defaultdict(Tally)
    coverage = Coverage()
    for case in cases:
        try:
            found = judge_case(case, backends, device, order, coverage)
        except Exception:
            found = {backends[0]: Tally()}
            found[backends[0]].fail(case, traceback.format_exc(limit=-3))
        for name, tally in found.items():
            merged[name].add(tally)
        # Many processes share the device: what a judge of a large case took goes back.
        if device == "cuda" and torch.cuda.memory_reserved() > 1 << 30:
            torch.cuda.empty_cache()
    return kind, (len(cases), dict(merged), coverage)


def _spring(name: str, backend: str, device: str) -> tuple[str, str, str]:
    """(trap, backend, outcome)."""
    try:
        TRAPS[name](backend, device)
        outcome = "passed"
    except Skipped as reason:
        outcome = f"skipped: {reason}"
    except BackendError as reason:
        outcome = f"refused: {reason}"
    except Exception as error:
        text = str(error) if isinstance(error, AssertionError) else traceback.format_exc(limit=-3)
        outcome = f"failed: {text}"
    return name, backend, outcome


class _Large(threading.Thread):
    """Traps that need much of the device's memory, one after the other, beside the processes that judge the cases: those
    mostly compile. What found no memory beside them is tried again alone; no other failure is."""

    def __init__(self, springs: list[tuple[str, str, str]], until: float):
        super().__init__(daemon=True)
        self.springs, self.until = springs, until
        self.outcomes: dict[tuple[str, str, str], str] = {}

    def run(self) -> None:
        for spring in self.springs:
            outcome = self.outcomes.get(spring)
            if time.time() < self.until and (outcome is None or "out of memory" in outcome):
                *_, self.outcomes[spring] = _spring(*spring)
                torch.cuda.empty_cache()

    def results(self) -> list[tuple[str, str, str]]:
        """(trap, backend, outcome) of those that there was time for; to be called when nothing else runs."""
        if self.is_alive():
            self.join(max(0.0, self.until - time.time()))
        if not self.is_alive():
            self.run()
        return [(name, backend, o) for (name, backend, _), o in list(self.outcomes.items())]


def chosen_units(unit: str | None) -> dict[str, str]:
    """Digests of the units that ``unit`` names: one, those that start so, those of a group, or all."""
    starts = GROUPS.get(unit or "", (unit or "",))
    return {u: d for u, d in digest.units().items() if u.startswith(starts)}


def plan_cases(
    count: int, seed: int, device: str, unit: str | None, order: int = 1, many: bool = False
) -> list[Case]:
    """The cases of a run; every sixteenth family has long sequences. Interpreter-sized on the CPU.

    ``many``: of more variants and layouts than Triton could compile kernels for in the time of a run.
    """
    make = second_order_variants if order == 2 else variants
    pool = make() if device == "cuda" else make(max_dim=32)
    if unit and "bias" in unit:
        pool = [v for v in pool if v.bias_grad]
    hopper = bool(unit and unit.startswith("cuda/sm90"))
    if unit and unit.startswith("cuda"):
        only = DTYPE_OF.get(unit.rsplit("_")[-1])
        # Without what these kernels refuse: a case that nobody serves shows nothing.
        served = [
            v
            for v in variants(1024 if many else 512) + variants(features=False)
            if not (v.dropout or v.key_weight or (v.varlen and v.bias))
            and only in (None, v.dtype)
            and not (hopper and (v.dtype == "float32" or v.head_dim % 8 or v.head_dim_v % 8))
            and not (v.dtype == "float32" and max(v.head_dim, v.head_dim_v) > 128)
        ]
        pool = list(dict.fromkeys(served))[: 256 if many else 64]
    if device != "cuda":
        return list(generate(seed, count, pool, lengths=SMALL_LENGTHS, score_limit=1 << 9))
    # One family of problems for each variant, so that the kernels to compile stay few: within it,
    # values, batch, heads and lengths of a class vary.
    choices = SeededChoices(seed)
    rounds = max(1, min(8, count // (2 * len(pool)))) if many else 2 if count >= 4000 else 1
    families: list[Case] = []
    met: dict[tuple[Any, ...], int] = defaultdict(int)
    for i, variant in enumerate(pool * rounds):
        lengths = LARGE_LENGTHS if i % 16 == 0 else BULK_LENGTHS
        family = _dealt(draw_case(choices, [variant], lengths), met)
        families.append(_aligned(family) if hopper else family)
    most = 19 if order == 2 else 21  # log2 of scores: the second order of the oracle is slow
    limits = [1 << (most if i % 16 == 0 else most - 2) for i in range(len(families))]
    n = len(families)
    return [resized(choices, families[i % n], limits[i % n]) for i in range(count)]


def _dealt(case: Case, met: dict[tuple[Any, ...], int]) -> Case:
    """Layouts, and views and dims of a bias, in turn, dtype by dtype: families are too few to leave that to chance. ``met``
    counts them."""

    def rarest(what: str, options: Sequence[Any]) -> Any:
        found = min(options, key=lambda x: met[case.variant.dtype, what, x])
        met[case.variant.dtype, what, found] += 1
        return found

    kinds = layouts_of(case)
    layout = rarest("q", kinds)
    others: tuple[str, ...] = ()
    if case.layouts:  # each from another start: not all alike
        turned = {n: kinds[i:] + kinds[:i] for i, n in enumerate(("k", "v", "dout"))}
        others = tuple(rarest(n, of) for n, of in turned.items())
    case = replace(case, layout=layout, layouts=others)
    if case.bias_shape is not None and not case.variant.varlen:
        rank = len(case.score_shape)
        dims = rarest("dims", range(rank, 0, -1))
        shape = ((1,) * rank + case.bias_shape)[-dims:]
        case = replace(case, bias_view=rarest("view", VIEWS), bias_shape=shape)
    return case


def _aligned(case: Case) -> Case:
    """Rows at multiples of 16 bytes, which Hopper's copies need; as drawn in other respects."""
    kept = lambda layout: "bshd" if layout == "shifted" else layout  # noqa: E731
    return replace(case, layout=kept(case.layout), layouts=tuple(map(kept, case.layouts)))


def _plans(
    count: int,
    seed: int,
    device: str,
    unit: str | None,
    orders: Sequence[int],
    backends: Sequence[str],
) -> list[tuple[list[Case], tuple[str, ...]]]:
    """Which cases are judged on which backends.

    Half of a run of everything, and three quarters of one of CUDA units, are for generations of CUDA kernels held to
    themselves, in many more layouts and variants than the rest. Second order is Triton's, after a forward of either.
    """
    backends = tuple(backends)
    # What these serve they serve themselves: no Triton kernel stands in, and none is compiled.
    held = tuple(b for b in backends if b in ("cuda:sm90", "cuda:sm80"))

    def apart(share: int, part: str, names: tuple[str, ...]) -> tuple[list[Case], tuple[str, ...]]:
        return plan_cases(share, seed + len(plans), device, part, many=True), names

    plans: list[tuple[list[Case], tuple[str, ...]]] = []
    rest = count
    if device == "cuda" and unit is None and "cuda:sm90" in held:
        plans.append(apart(7 * count // 20, "cuda/sm90", held))
        if "cuda:sm80" in held:
            plans.append(apart(3 * count // 20, "cuda/sm80/fwd_fp32", ("cuda:sm80",)))
    elif (
        device == "cuda" and held and unit is not None and unit.startswith("cuda") and orders != [2]
    ):
        plans.append(apart(3 * count // 4, unit, held))
    rest -= sum(len(planned) for planned, _ in plans)
    plans.insert(0, (plan_cases(rest, seed, device, unit, orders[0]), backends))
    if len(orders) > 1:
        users = tuple(b for b in backends if ":" not in b)
        plans.append((plan_cases(count // 10, seed, device, unit, orders[1]), users or backends))
    return plans


def _longest_first(tasks: list[Any]) -> list[Any]:
    """So that no worker is left with a long one at the end."""
    return sorted(tasks, key=lambda task: -len(task[2]) * sum(map(_work_of, task[1])))


def _tasks(cases: Iterable[Case], backends: Sequence[str], device: str, order: int) -> list[Any]:
    """Cases grouped by variant: a worker compiles what it runs."""
    groups: dict[Variant, list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.variant].append(case)
    # Where nothing is compiled, nothing keeps a variant together.
    size = 1 << 30 if "triton" in backends else 32
    return [
        ("cases", group[i : i + size], tuple(backends), device, order)
        for group in groups.values()
        for i in range(0, len(group), size)
    ]


def _work_of(case: Case) -> float:
    """What a case costs, roughly: scores by head dims; fp32 kernels take the longest to compile."""
    packed = case.heads_q * sum(map(operator.mul, case.lens_q, case.lens_k))
    scores = packed if case.variant.varlen else math.prod(case.score_shape)
    dims = 64 + case.variant.head_dim + case.variant.head_dim_v
    return (scores + (1 << 18)) * dims * (2 if case.variant.dtype == "float32" else 1)


def _results(tasks: list[Any], workers: int, until: float) -> Iterator[tuple[str, Any]]:
    """Results as they come, until that time. A process is replaced after some tasks: an error of the
    device lasts as long as the process."""
    if workers <= 1:
        for task in tasks:
            if time.time() < until:
                yield _work(task)
        return
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=6) as pool:
        results = pool.imap_unordered(_work, tasks)
        with contextlib.suppress(StopIteration, multiprocessing.TimeoutError):
            while True:
                yield results.next(timeout=max(0.0, until - time.time()))


def library_units() -> dict[str, str]:
    """Digests that the loaded CUDA library carries; empty without a library."""
    info = BACKENDS["cuda"].load().build_info()
    return {} if info is None else info["units"]


def kernels_here() -> tuple[str, ...]:
    """The backends with kernels of ours: as users get them, and every generation that runs here by itself."""
    folders = {unit.split("/")[1] for unit in library_units()}
    held = [f"cuda:{folder}" for folder in folders if folder.startswith("sm")]
    return (*KERNELS, *sorted((n for n in held if _runs_here(n)), reverse=True))


def _runs_here(backend: str) -> bool:
    """Whether this device runs a generation of kernels: Hopper's on nothing else, the others' on what is newer."""
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    wanted = int(backend.removeprefix("cuda:sm"))
    return major == 9 if wanted == 90 else 10 * major + minor >= wanted


def _holds(backend: str, unit: str) -> bool:
    """Whether a backend, such as "cuda:sm80", runs a unit, such as "cuda/sm80/fwd_bf16"."""
    family, generation, *_ = unit.split("/")
    return backend in (family, f"{family}:{generation}")


def refusal(units: dict[str, str], device: str) -> str | None:
    """Why a check here would prove nothing about this tree; None when it would."""
    if device == "cuda" and not torch.cuda.is_available():
        return (
            "torch sees no CUDA GPU here; run this on a machine with one (python -m flashsci env)"
        )
    for unit, found in library_units().items():
        if units.get(unit) not in (None, found):
            return (
                f"the loaded CUDA library was built from other sources ({unit}: {found}, tree: "
                f"{units[unit]}); build it again (make build) and repeat"
            )
    return None


def machine(device: str) -> dict[str, Any]:
    import triton

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["capability"] = list(torch.cuda.get_device_capability())
    return found


def run(
    unit: str | None = None,
    cases: int = 2000,
    out: str | Path | None = "reports/gpu-check.json",
    seed: int | None = None,
    workers: int | None = None,
    device: str = "cuda",
    backends: Sequence[str] | None = None,
    minutes: float = 15.0,
    say: Any = print,
) -> int:
    """Check and write the report; 0 when all is right, 1 with failures, 2 when it cannot run here.

    Args:
        unit: one unit of ``flashsci.digest.units()``, the start of its name, or "second_order"; None for all.
        cases: how many generated problems; where Hopper's kernels are, a run of all units takes 7 of 20 for them alone and
            3 of 20 for the fp32 kernels; it adds a tenth as many of second order.
        out: where the report goes; None for nowhere. A run with ``unit`` updates it.
        seed: of the generator; None for today's date as a number, so that every day draws others. The report names it.
        workers: processes; None for one per core, at most 14.
        device: "cuda"; "cpu" tries the check itself where Triton interprets.
        backends: which backends to judge; None for triton, cuda, and every generation of CUDA kernels that the library
            holds and the device runs.
        minutes: stop then, and report what was done; unfinished work is a failure.
        say: receives lines of progress.
    """
    units, chosen = digest.units(), chosen_units(unit)
    if seed is None:
        seed = int(datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d"))
    if not chosen:
        say(f"no kernel unit is called {unit!r}; there are: {', '.join((*units, *GROUPS))}")
        return 2
    reason = refusal(units, device)
    if reason:
        say(reason)
        return 2
    backends = kernels_here() if backends is None else backends
    second = {u for u in chosen if u.startswith(GROUPS["second_order"])}
    # Triton's second order serves what any backend's forward saved.
    if unit and len(second) < len(chosen):
        backends = tuple(b for b in backends if any(_holds(b, u) for u in chosen))
    # What none of these backends runs is not checked by them.
    chosen = {u: d for u, d in chosen.items() if u in second or any(_holds(b, u) for b in backends)}
    order = 0 if unit and all("/forward" in u for u in chosen) else 1
    started = time.time()
    workers = min(14, os.cpu_count() or 1) if workers is None else workers
    orders = [1] if not second else [2] if len(second) == len(chosen) else [1, 2]
    traps = [
        t
        for t in TRAPS.values()
        if t.order in orders and (device == "cuda" or not (t.cuda or t.slow))
    ]
    springs = [("trap", t.name, b, device) for t in traps for b in backends if not t.gigabytes]
    plans = _plans(cases, seed, device, unit, orders, backends)
    cases = sum(len(planned) for planned, _ in plans)
    tasks = _longest_first(
        [t for planned, names in plans for t in _tasks(planned, names, device, order)]
    )
    tasks = springs + tasks
    tallies: dict[str, Tally] = defaultdict(Tally)
    coverage = Coverage()
    outcomes: dict[str, dict[str, str]] = defaultdict(dict)
    done, problems = 0, 0

    def take(kind: str, result: Any) -> None:
        nonlocal done
        if kind == "trap":
            name, backend, outcome = result
            outcomes[name][backend] = outcome
            if outcome.startswith("failed"):
                say(f"trap {name}, {backend}: {outcome}")
        else:
            count, found, seen = result
            done += count
            coverage.add(seen)
            for name, tally in found.items():
                tallies[name].add(tally)
                for failure in tally.failures[:2]:
                    say(f"{name}: {failure['problem']}\n    {failure['case']}")
            say(f"{done} of {cases} cases, {time.time() - started:.0f} s")

    until = started + 60 * minutes
    large = _Large([(t.name, b, device) for t in traps for b in backends if t.gigabytes], until)
    if workers > 1:
        large.start()
    for kind, result in _results(tasks, workers, until):
        take(kind, result)
    for name, backend, outcome in large.results():
        take("trap", (name, backend, outcome))
        say(f"trap {name}, {backend}: {outcome[:60]}")
    bad_traps = [n for n, by in outcomes.items() for o in by.values() if o.startswith("failed")]
    problems = sum(len(t.failures) for t in tallies.values()) + len(bad_traps)
    missing = [f"{t.name} on {b}" for t in traps for b in backends if b not in outcomes[t.name]]
    unfinished = ([f"{cases - done} cases"] if done < cases else []) + missing
    report = {
        "machine": machine(device),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started),
        "seed": seed,
        "cases": done,
        "failures": problems,
        "unfinished": unfinished,
        "backends": {name: tally.summary() for name, tally in sorted(tallies.items())},
        "traps": {name: outcomes[name] for name in sorted(outcomes)},
        "coverage": coverage.summary(backends),
        "library": library_units(),
        "units": chosen,
    }
    show(report, say)
    if out is not None:
        write(report, Path(out), unit)
        say(f"wrote {out}")
    untried = [b for b in backends if not tallies[b].cases]
    if untried:
        say(f"no case ran on: {', '.join(untried)}")
    if unfinished:
        say(f"out of time: {unfinished}")
    return 1 if problems or untried or unfinished else 0


def write(report: dict[str, Any], path: Path, unit: str | None) -> None:
    """Write a full report, or enter the result of a part into the one that is there; if it passed, parts that judged earlier kernels leave."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if unit:
        whole = json.loads(path.read_text()) if path.is_file() else {"units": {}}
        part = dict(report)
        parts = whole.get("parts", {})
        if not report["failures"] and not report["unfinished"]:
            parts = {u: p for u, p in parts.items() if not _other_kernels(u, p, report)}
            whole["units"].update(report["units"])
            built = {u: found for u, found in report["library"].items() if u in report["units"]}
            whole.setdefault("library", {}).update(built)
        whole["parts"] = {**parts, unit: part}
        report = whole
    path.write_text(json.dumps(report, indent=1) + "\n")


def _other_kernels(unit: str, part: dict[str, Any], report: dict[str, Any]) -> bool:
    """Whether units that an older part has judged have changed since, by the library and the units of this report."""
    judged = {
        **{name: built for name, built in part["library"].items() if name.startswith(unit)},
        **part.get("units", {}),
    }
    now = {**report["library"], **report["units"]}
    return any(found != now.get(name, found) for name, found in judged.items())


def show(report: dict[str, Any], say: Any) -> None:
    """A short table of a report."""
    key = f"a result times {SCALED} would fail"
    for name, found in report["backends"].items():
        refused = sum(found["refused"].values())
        say(
            f"\n{name}: {found['cases']} cases, {len(found['failures'])} failures, {refused} refusals, "
            f"{found['of these forward only']} forward only"
        )
        for tensor, ratios in found["worst ratio of error to allowance"].items():
            caught = found[key].get(tensor)
            share = f"   x{SCALED} caught {caught['caught']}/{caught['judged']}" if caught else ""
            text = "  ".join(f"{c} {r:.3f}" for c, r in ratios.items())
            say(f"  {tensor:<6}{text}{share}")
    counts: dict[str, int] = defaultdict(int)
    for by in report["traps"].values():
        for outcome in by.values():
            counts[outcome.split(":")[0]] += 1
    say(f"\ntraps: {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
    for name, groups in report["coverage"].items():
        for group, seen in groups.items():
            if seen["never"]:
                never = ", ".join(seen["never"])
                say(f"never drawn, {name}, {group} ({seen['cases']} cases): {never}")
    say(
        f"{report['cases']} cases of seed {report['seed']}, {report['failures']} failures, "
        f"{report['seconds']} s"
    )


def reproduce(text: str, backends: Sequence[str], device: str, say: Any = print) -> int:
    """Judge one case given as the report prints it."""
    case = eval(text, {"Case": Case, "Variant": Variant})
    tallies = judge_case(case, backends, device)
    for name, tally in tallies.items():
        what = [f["problem"] for f in tally.failures] or list(tally.refused) or ["right"]
        say(f"{name}: " + "\n  ".join(what))
    return int(any(t.failures for t in tallies.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m flashsci check`."""
    parser = argparse.ArgumentParser(prog="python -m flashsci check", description=__doc__)
    parser.add_argument("--unit", help="only this kernel unit (or units that start so)")
    parser.add_argument("--cases", type=int, default=2000, help="generated problems (default 2000)")
    parser.add_argument("--out", default="reports/gpu-check.json", help="where the report goes")
    parser.add_argument(
        "--seed", type=int, help="of the generator (default: today's date, YYYYMMDD)"
    )
    parser.add_argument("--workers", type=int, help="processes (default: one per core, at most 14)")
    parser.add_argument("--minutes", type=float, default=15.0, help="stop then (default 15)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backends", help="comma-separated (default: all with kernels of ours)")
    parser.add_argument("--reproduce", metavar="CASE", help="judge one case, as a report prints it")
    options = parser.parse_args(arguments)
    backends = options.backends.split(",") if options.backends else None
    if options.reproduce:
        return reproduce(options.reproduce, backends or kernels_here(), options.device)
    return run(
        options.unit,
        options.cases,
        options.out,
        options.seed,
        options.workers,
        options.device,
        backends,
        options.minutes,
    )


def _digits(x: float) -> float:
    return round(x, 4) if math.isfinite(x) else x


if __name__ == "__main__":
    sys.exit(main())
