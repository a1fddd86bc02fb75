"""A whole run: cases and traps are planned, judged by worker processes, counted and reported."""

from __future__ import annotations

import datetime
import random
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashsci import digest
from flashsci.check import judging, planning, report, units
from flashsci.check.tally import Tally
from flashsci.check.workers import (
    LargeTraps,
    processes_here,
    results_of,
    tasks_of,
)
from flashsci.testing import Trap
from flashsci.testing.coverage import Coverage

Say = Callable[[str], Any]


class Results:
    """The results of a run's tasks so far."""

    def __init__(self, cases: int, say: Say):
        self.cases, self.say = cases, say  # cases: how many are planned
        self.done = 0
        self.kinds: Counter[type] = Counter()  # cases judged, by class
        self.started = time.time()
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self.coverage = Coverage()
        self.traps: dict[str, dict[str, str]] = defaultdict(dict)  # name -> backend -> outcome

    def take(self, kind: str, result: Any) -> None:
        """Take in a result of :func:`flashsci.check.workers.work`."""
        if kind == "trap":
            name, backend, outcome = result
            self.traps[name][backend] = outcome
            if outcome.startswith("failed"):
                self.say(f"trap {name}, {backend}: {outcome}")
            return
        which, count, found, seen = result
        self.done += count
        self.kinds[which] += count
        self.coverage.add(seen)
        for name, tally in found.items():
            self.tallies[name].add(tally)
            for failure in tally.failures[:2]:
                self.say(f"{name}: {failure['problem']}\n    {failure['case']}")
        self.say(f"{self.done} of {self.cases} cases, {time.time() - self.started:.0f} s")

    def failures(self) -> int:
        outcomes = [o for by in self.traps.values() for o in by.values()]
        traps = sum(o.startswith("failed") for o in outcomes)
        return sum(len(t.failures) for t in self.tallies.values()) + traps

    def unfinished(self, traps: Sequence[Trap], backends: Sequence[str]) -> list[str]:
        """Traps that there was no time for. Cases have no order: any number of judged cases counts."""
        return [f"{t.name} on {b}" for t in traps for b in backends if b not in self.traps[t.name]]


def seed_of(part: str | None) -> int:
    """Today's date as a number, so that every day draws other cases; for a part, three digits of its name follow."""
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d")
    return int(date if part is None else f"{date}{zlib.crc32(part.encode()) % 1000:03d}")


def run(
    unit: str | None = None,
    cases: int = 2000,
    out: str | Path | None = "reports/gpu-check.json",
    seed: int | None = None,
    workers: int | None = None,
    device: str = "cuda",
    backends: Sequence[str] | None = None,
    minutes: float = 15.0,
    say: Say = print,
    part: str | None = None,
    cases_only: bool = False,
) -> int:
    """Check and write the report; 0 when all is right, 1 with failures, 2 when it cannot run here.

    Args:
        unit: one unit of ``flashsci.digest.units()``, the start of its name, "second_order", "paged" or "fp8"; None
            for all.
        cases: the number of generated problems. Where Hopper's kernels are, a run of all units takes 7 of 20 for them
            alone and 3 of 20 for the fp32 kernels. It adds a tenth as many of second order, a twentieth of paged
            attention and of 8-bit floats each, and a sixteenth of wide heads by Triton, which are all of a run of
            "triton/wide".
        out: path of the report; None for no report. A part (see ``part``) is added to the existing report.
        seed: seed of the generator; None for today's date as a number, to which a part adds three digits. The report
            names it.
        workers: processes; None for one per core, at most 14 for each GPU, which they share.
        device: "cuda"; "cpu" tests the check itself where Triton interprets.
        backends: the backends to judge; None for triton, cuda, and every generation of CUDA kernels that the library
            holds and the device runs; on the CPU for triton.
        minutes: stop after this time, and report the results so far; traps that there was no time for are a failure.
        say: receives lines of progress.
        part: a name; the results are added to the report under it, next to the whole run and other parts. None: the
            name of the unit, or without a unit a whole run, which replaces the last one.
        cases_only: no traps, for a part of a run that has sprung them already.
    """
    chosen = units.chosen_units(unit)
    part = part or unit
    seed = seed_of(part) if seed is None else seed
    if not chosen:
        known = ", ".join((*digest.units(), *units.GROUPS))
        say(f"no kernel unit is called {unit!r}; there are: {known}")
        return 2
    reason = units.refusal(digest.units(), device)
    if reason:
        say(reason)
        return 2
    if backends is None:
        backends = units.kernels_here() if device == "cuda" else ("triton",)
    second = {u for u in chosen if u.startswith(units.GROUPS["second_order"])}
    # Triton's second order serves the saved tensors of any backend's forward.
    asked = tuple(backends)
    if unit and len(second) < len(chosen):
        backends = tuple(b for b in backends if any(units.holds(b, u) for u in chosen))
    # Units that none of these backends runs are not checked by them.
    chosen = {u: d for u, d in chosen.items() if u in second or any(units.holds(b, u) for b in backends)}
    forwards = all(u.split("/")[-1].startswith(("forward", "fwd_")) for u in chosen)
    order = 0 if unit and forwards else 1
    orders = [1] if not second else [2] if len(second) == len(chosen) else [1, 2]
    traps = [
        t
        for t in judging.TRAPS.values()
        if not cases_only and t.order in orders and (device == "cuda" or not (t.cuda or t.slow))
    ]
    apart = {n: {u for u in chosen if u.startswith(units.GROUPS[n])} for n in planning.APART}
    only = next((n for n, own in apart.items() if own and len(own) == len(chosen)), None)
    served: dict[str, tuple[str, ...]] = {}  # the backends on which the calls of a group are judged
    if only is not None:
        plans = [planning.APART[only][1](cases, seed, device, backends)]
        backends = plans[0][1]
        served[only] = backends
    else:
        plans = planning.plans_of(cases, seed, device, unit, orders, backends)
        for name, own in apart.items():
            if own and cases >= 20 and units.runs_group(name, device):
                plans.append(planning.APART[name][1](cases // 20, seed, device, backends))
                served[name] = plans[-1][1]
    if unit and not backends:
        say(f"none of {', '.join(asked)} runs units of {unit!r} on this machine")
        return 2
    results = Results(sum(len(planned) for planned, _ in plans), say)
    _execute(plans, traps, backends, device, order, workers, minutes, results)
    for name, own in apart.items():
        # Kernels without a case of theirs, or that no backend here runs, are not checked.
        judged = served.get(name, ()) if results.kinds[planning.APART[name][0]] else ()
        unseen = {u for u in own if not any(units.holds(b, u) for b in judged)}
        chosen = {u: found for u, found in chosen.items() if u not in unseen}
    found = {
        "machine": report.machine(device),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.time() - results.started),
        "seed": seed,
        "cases": results.done,
        "failures": results.failures(),
        "unfinished": results.unfinished(traps, backends),
        "backends": {name: tally.summary() for name, tally in sorted(results.tallies.items())},
        "traps": {name: results.traps[name] for name in sorted(results.traps)},
        "coverage": results.coverage.summary(backends),
        "library": units.library_units(),
        "units": chosen,
    }
    report.show(found, say)
    if out is not None:
        whole = report.write(found, Path(out), part)
        report.show_total(whole, say)
        say(f"wrote {out}")
    untried = [b for b in backends if not results.tallies[b].cases]
    if untried:
        say(f"no case ran on: {', '.join(untried)}")
    if found["unfinished"]:
        say(f"out of time: {found['unfinished']}")
    return 1 if found["failures"] or untried or found["unfinished"] else 0


def _execute(
    plans: Sequence[planning.PlannedCases],
    traps: Sequence[Trap],
    backends: Sequence[str],
    device: str,
    order: int,
    processes: int | None,
    minutes: float,
    results: Results,
) -> None:
    """All tasks, until the time is up: small traps and cases, and large traps at the same time as the worker
    processes."""
    processes = processes_here(device) if processes is None else processes
    until = results.started + 60 * minutes
    springs = [("trap", t.name, b, device) for t in traps for b in backends if not t.gigabytes]
    judged = [t for cases, names in plans for t in tasks_of(cases, names, device, order)]
    large = LargeTraps([(t.name, b, device) for t in traps for b in backends if t.gigabytes], until)
    if processes > 1:
        large.start()
    random.Random(results.cases).shuffle(judged)
    # A trap keeps the interpreter busy longer than many of its small cases.
    tasks = [*springs, *judged] if device == "cuda" else [*judged, *springs]
    for kind, result in results_of(tasks, processes, until):
        results.take(kind, result)
    for name, backend, outcome in large.results():
        results.take("trap", (name, backend, outcome))
        results.say(f"trap {name}, {backend}: {outcome[:60]}")
