"""The summary of drawn calls: the regret of `auto`, its speed against torch alone, cliffs, and a work list.

Times are those of a loop of calls, the larger of host and GPU, as a model pays them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.bench.drawn.ways import CHOICES, TORCH

Record = dict[str, Any]
WORKS = ("forward", "step", "second")
#: The rows of the work list.
LISTED = 15
#: Lengths from which padding to a multiple of 64 adds at most a quarter to a length.
LONG = 256
AUTO = "auto"


def read(path: Path) -> list[Record]:
    """The records of a file that `bench --suite drawn --json` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def times(record: Record) -> dict[str, float]:
    """Microseconds of the candidates that were right. One code that was timed under several names has one time."""
    right = {n: c for n, c in record["candidates"].items() if c["gate"] == "passed"}
    least: dict[tuple[str, ...], float] = {}
    for name, found in right.items():
        key = _code(name, found)
        least[key] = min(found["loop_us"], least.get(key, math.inf))
    return {name: least[_code(name, found)] for name, found in right.items()}


def _code(name: str, found: Record) -> tuple[str, ...]:
    """The backends of a call and of its gradients; of a candidate of torch its name."""
    return tuple(found["by"]) if "by" in found else (name,)


def best(found: dict[str, float], names: Iterable[str]) -> tuple[str, float] | None:
    """The fastest of these candidates."""
    known = [(found[n], n) for n in names if n in found]
    return (min(known)[1], min(known)[0]) if known else None


def regret(record: Record) -> float | None:
    """The time of `auto` over that of the best choice that it had; None without its time."""
    found = times(record)
    fastest = best(found, (AUTO, *CHOICES))
    return found[AUTO] / fastest[1] if AUTO in found and fastest else None


def against_torch(record: Record) -> float | None:
    """The time of the best of torch alone over that of `auto`."""
    found = times(record)
    fastest = best(found, TORCH)
    return fastest[1] / found[AUTO] if AUTO in found and fastest else None


def cliff(record: Record) -> tuple[float, float] | None:
    """The time of `auto` over that of the neighbour: of the calls, and of one score of each."""
    found, other = times(record), record.get("neighbour") or {}
    if AUTO not in found or other.get("gate") != "passed":
        return None
    ratio = found[AUTO] / other["loop_us"]
    return ratio, ratio * other["scores"] / record["scores"]


def is_long(record: Record) -> bool:
    call = record["call"]
    return min(call.get("lens") or (call.get("seq_q", 1), call.get("seq_k", 1))) >= LONG


def summary(records: list[Record]) -> str:
    """The whole report as text."""
    parts = [_about(records), _regrets(records), _torch(records), _cliffs(records), _listed(records), _faults(records)]
    return "\n\n".join(part for part in parts if part)


def _about(records: list[Record]) -> str:
    def every(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(str(v) for v in values if v)) or "-"

    envs = [r["env"] for r in records]
    seeds = every(r["call"]["seed"] for r in records)
    versions = ", ".join(f"{n} {every(e[n] for e in envs)}" for n in ("torch", "triton", "cuda", "flashsci", "python"))
    commits = every(f"{r['commit']}{' with changes' if r['dirty'] else ''}" for r in records if r["commit"])
    timed = sum(regret(r) is not None for r in records)
    spent = [r["seconds"] for r in records if "seconds" in r]
    each = ", ".join(
        f"{n} {statistics.mean(s[n] for s in spent if n in s):.2f} s"
        for n in dict.fromkeys(n for s in spent for n in s)
    )
    return (
        f"{timed} of {len(records)} drawn calls timed; seed {seeds}; {every(e['gpu'] or e['host'] for e in envs)}; "
        f"{versions}; commit {commits}; for each call: {each or '-'}"
    )


def _row(name: str, values: list[float], limits: tuple[float, ...], most: bool = True) -> str:
    """Count, geometric mean, shares above (or below) limits, and the worst."""
    shares = [sum(v > x if most else v < x for v in values) / len(values) for x in limits]
    shown = "".join(f"{share:>10.1%}" for share in shares)
    worst = max(values) if most else min(values)
    return f"{name:<12}{len(values):>6}{statistics.geometric_mean(values):>10.3f}{shown}{worst:>10.2f}"


def _by_work(records: list[Record], figure: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for record in records:
        value = figure(record)
        if value is not None:
            found.setdefault(record["call"].get("work", "forward"), []).append(value)
    rows = {work: found[work] for work in WORKS if work in found}
    return rows | ({"all": [v for values in rows.values() for v in values]} if len(rows) > 1 else {})


def _regrets(records: list[Record]) -> str:
    rows = [_row(n, v, (1.1, 1.3)) for n, v in _by_work(records, regret).items()]
    header = f"{'':<12}{'calls':>6}{'mean':>10}{'> 1.1':>10}{'> 1.3':>10}{'worst':>10}"
    return "\n".join(["Regret: time of auto over that of the best choice", header, *rows]) if rows else ""


def _torch(records: list[Record]) -> str:
    rows = [_row(n, v, (1 / 1.1,), most=False) for n, v in _by_work(records, against_torch).items()]
    header = f"{'':<12}{'calls':>6}{'mean':>10}{'< 1/1.1':>10}{'worst':>10}"
    title = "Speed of auto over the best of torch alone (kernels of SDPA, plain math)"
    return "\n".join([title, header, *rows]) if rows else ""


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _cliffs(records: list[Record]) -> str:
    found = [(pair, r) for r in records if (pair := cliff(r)) is not None]
    series = {
        "a call": [pair[0] for pair, _ in found],
        f"a score, S >= {LONG}": [pair[1] for pair, r in found if is_long(r)],
    }
    rows = [
        f"{name:<20}{len(v):>6}{statistics.median(v):>10.3f}{_quantile(v, 0.99):>10.2f}{max(v):>10.2f}"
        for name, v in series.items()
        if v
    ]
    title = "Cliffs: time of auto over that of the neighbour (lengths rounded up to 64, contiguous)"
    header = f"{'':<20}{'calls':>6}{'median':>10}{'99 %':>10}{'worst':>10}"
    worst = sorted(found, key=lambda item: -item[0][0])[:5]
    lines = [f"{pair[0]:>8.2f}  {_name(r)}" for pair, r in worst if pair[0] > 1.25]
    return "\n".join([title, header, *rows, *lines]) if rows else ""


def _name(record: Record) -> str:
    return f"{record['call']['seed']}/{record['call']['index']} {record['text']}"


def _short(time: float) -> str:
    return f"{time:.0f}" if time >= 100 else f"{time:.3g}"


def _listed(records: list[Record]) -> str:
    """The calls that lose most time: against the best choice or the best of torch, whichever is more."""
    found = []
    for record in records:
        ran = times(record)
        fastest = best(ran, (AUTO, *CHOICES, *TORCH))
        if AUTO in ran and fastest and ran[AUTO] > 1.05 * fastest[1]:
            found.append((ran[AUTO] / fastest[1], record, ran[AUTO], fastest))
    found.sort(key=lambda item: -item[0])
    if not found:
        return ""
    lines = ["Work list: auto over the best of all", f"{'':>6}  {'auto':<14}{'us':>8}  {'best':<16}{'us':>8}  call"]
    for ratio, record, time, (name, least) in found[:LISTED]:
        chosen = ", ".join(dict.fromkeys(filter(None, record["candidates"][AUTO]["by"])))
        lines.append(f"{ratio:>6.2f}  {chosen:<14}{_short(time):>8}  {name:<16}{_short(least):>8}  {_name(record)}")
    return "\n".join(lines)


def _faults(records: list[Record]) -> str:
    """Calls that failed, results of flashsci that were wrong, and the number of those of others."""
    lines, others = [], dict.fromkeys(TORCH, 0)
    for record in records:
        if "failed" in record:
            lines.append(f"{_name(record)}: {record['failed']}")
        gates = {n: c["gate"] for n, c in record["candidates"].items()}
        gates["neighbour"] = (record.get("neighbour") or {}).get("gate", "")
        for name in (n for n, g in gates.items() if g.startswith("failed") or (n == AUTO and g != "passed")):
            if name in others:
                others[name] += 1
            else:
                lines.append(f"{_name(record)}: {name} {gates[name]}")
    wrong = ", ".join(f"{name} {count}" for name, count in others.items() if count)
    lines += [f"of torch, by candidate: {wrong}"] if wrong else []
    return "\n".join(["Wrong results and errors", *lines]) if lines else ""
