"""The report of a check: its contents, and how it is written and shown."""

from __future__ import annotations

import json
import os
import platform
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from flashsci import records
from flashsci.check.tally import SCALED
from flashsci.check.units import holds


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


def write(report: dict[str, Any], path: Path, part: str | None) -> dict[str, Any]:
    """Write a whole run, or enter a part under its name into the existing report; returns the whole report.

    ``units`` and ``library`` of the file say what every unit was last checked as, by any run; ``judged``, and
    ``units`` of a part, say what that run has judged. Parts of kernels that have changed since are removed, the
    others stay.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.is_file() else {"units": {}}
    # For parts without digests it is unknown which kernels they judged.
    parts = {name: p for name, p in before.get("parts", {}).items() if "units" in p}
    passed = not report["failures"] and not report["unfinished"]
    if part is None:
        whole = {**report, "judged": report["units"]}
    else:
        whole = before
        if passed:
            whole["units"].update(report["units"])
            built = {u: found for u, found in report["library"].items() if u in report["units"]}
            whole.setdefault("library", {}).update(built)
    if passed or part is None:
        parts = {name: p for name, p in parts.items() if _judged_these(p["units"], whole["units"])}
    whole["parts"] = {**parts, part: dict(report)} if part else parts
    whole["total"] = total(whole)
    # A run that is killed here leaves the old report.
    written = path.with_name(f"{path.name}.{os.getpid()}")
    records.write(written, whole)
    os.replace(written, path)
    return whole


def _judged_these(judged: dict[str, str], now: dict[str, str]) -> bool:
    """Whether a run has judged kernels in their present form, by the digests of its units."""
    return all(now.get(unit) == found for unit, found in judged.items())


def total(report: dict[str, Any]) -> dict[str, Any]:
    """Sums over the whole run and its parts, for judged kernels that have not changed since.

    A backend's cases of a run count if no unit that it runs has changed since. Of runs that drew the same cases (one
    seed, the same units) the longest counts.
    """
    whole = {**report, "units": report["judged"]} if "judged" in report else None
    runs = [*([] if whole is None else [whole]), *report["parts"].values()]
    different: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        key = (run["seed"], *run["units"])
        if key not in different or different[key]["cases"] < run["cases"]:
            different[key] = run
    backends: dict[str, dict[str, int]] = {}
    for run in different.values():
        for name, seen in run["coverage"].items():
            of_it = {u: found for u, found in run["units"].items() if holds(name, u)}
            if _judged_these(of_it, report["units"]):
                sums = backends.setdefault(name, {"cases": 0, "fp32": 0, "failures": 0})
                found = run["backends"].get(name, {"cases": 0, "failures": []})
                sums["cases"] += found["cases"]
                sums["fp32"] += seen.get("float32", {"cases": 0})["cases"]
                sums["failures"] += len(found["failures"])
    same = [r for r in different.values() if _judged_these(r["units"], report["units"])]
    return {
        "runs": len(same),
        "cases": sum(run["cases"] for run in same),
        "seeds": sorted({run["seed"] for run in same}),
        "backends": dict(sorted(backends.items())),
    }


def show_total(report: dict[str, Any], say: Any) -> None:
    """Show the sums over the whole run and its parts."""
    found = report["total"]
    say(f"\nthese kernels, {found['runs']} runs and parts: {found['cases']} generated cases")
    for name, sums in found["backends"].items():
        say(f"  {name}: {sums['cases']} ({sums['fp32']} in fp32), {sums['failures']} failures")


def show(report: dict[str, Any], say: Any) -> None:
    """Show a short table of a report."""
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
    say(f"{report['cases']} cases of seed {report['seed']}, {report['failures']} failures, {report['seconds']} s")
