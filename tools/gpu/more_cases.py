"""Generated cases for a report, part by part, until it has enough for these kernels or the time is up.

    python tools/gpu/more_cases.py --seconds 500                       added to reports/gpu-check.json
    python tools/gpu/more_cases.py --out build/gpu-check/gpu-check.json --seconds 300

Enough: 10,000 cases, of which cuda:sm90 had 3,000 and some backend 1,500 in fp32, by `total` of
flashsci/check/report.py. A part is a `python -m flashsci check --cases-only` of one of the CUDA units in turn, with
its own name and so its own seed. It ends when its time is up, and the report gets the cases that it has judged
until then. Exit status: 0 with enough, 1 with failures or with less.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from flashsci import digest  # noqa: E402
from flashsci.check.report import total  # noqa: E402

CHECK = (sys.executable, "-m", "flashsci", "check", "--cases-only")
ENOUGH = {"cases": 10_000, "cuda:sm90": 3_000, "fp32": 1_500}
# Units, and the backend that their cases count for.
UNITS = {
    "cuda/sm90": ("cases", "cuda:sm90"),
    "cuda": ("cases", "cuda:sm90", "fp32"),
    "cuda/sm80": ("cases", "fp32"),
}
ENDING = 20.0  # seconds that a part takes to end and to write
LEAST = 30.0  # below which no part begins


def report_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {"units": {}}


def counted(report: dict[str, Any], units: dict[str, str]) -> dict[str, int]:
    """The parts of a report that hold for the kernels in this tree, by their digests, although it was last written
    for others."""
    parts = {name: part for name, part in report.get("parts", {}).items() if "units" in part}
    found = total({**report, "parts": parts, "units": units})
    backends = found["backends"].values()
    return {
        "cases": found["cases"],
        "cuda:sm90": found["backends"].get("cuda:sm90", {"cases": 0})["cases"],
        # Several backends share a case: the one with the most says how many there are at least.
        "fp32": max((sums["fp32"] for sums in backends), default=0),
    }


def next_unit(have: dict[str, int], parts: Counter[str], barren: Container[str]) -> str | None:
    """The unit with the fewest parts among those that help; None if there is enough."""
    short = [what for what, wanted in ENOUGH.items() if have[what] < wanted]
    useful = [u for u, gives in UNITS.items() if u not in barren and set(short) & set(gives)]
    return min(useful, key=lambda unit: parts[unit], default=None)


def free_name(unit: str, taken: Container[str]) -> str:
    number = 1
    while f"{unit}/more-{number}" in taken:
        number += 1
    return f"{unit}/more-{number}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """An interrupt as by Ctrl-C: an interrupted check ends its worker processes."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "gpu-check.json", help="the report")
    parser.add_argument("--seconds", type=float, default=540, help="for all parts (default 540)")
    parser.add_argument("--part-seconds", type=float, default=150, help="for a part (default 150)")
    parser.add_argument("--cases", type=int, default=5000, help="of a part at most (default 5000)")
    parser.add_argument("--check", default="", metavar="OPTIONS", help="added to the check's, such as '--workers 8'")
    options = parser.parse_args(arguments)
    # A shell starts background jobs with interrupts ignored, and a check would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    until = time.monotonic() + options.seconds
    parts: Counter[str] = Counter()
    barren: set[str] = set()
    failed, units = [], digest.units()
    have = counted(report_of(options.out), units)
    while (unit := next_unit(have, parts, barren)) is not None:
        left = until - time.monotonic()
        if left < LEAST + ENDING:
            print(f"{left:.0f} s are left, too few for a part", flush=True)
            break
        name = free_name(unit, report_of(options.out).get("parts", {}))
        minutes = min(options.part_seconds, left - ENDING) / 60
        command = [
            *CHECK, "--unit", unit, "--part", name, "--cases", str(options.cases), "--out", str(options.out),
            "--minutes", f"{minutes:.2f}", *shlex.split(options.check),
        ]  # fmt: skip
        print(f"--- {name}, {left:.0f} s left", flush=True)
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            code = process.wait(timeout=left)
        except subprocess.TimeoutExpired:
            stop(process)
            print(f"{name}: not done after {left:.0f} s; nothing of it is in the report", flush=True)
            break
        parts[unit] += 1
        before, have = have, counted(report_of(options.out), units)
        if code:
            failed.append(name)
        if have == before:  # it was interrupted, or nothing here runs these kernels
            barren.add(unit)
        print(", ".join(f"{what} {number} of {ENOUGH[what]}" for what, number in have.items()), flush=True)
    enough = all(have[what] >= wanted for what, wanted in ENOUGH.items())
    said = ", ".join(f"{what} {number} of {ENOUGH[what]}" for what, number in have.items())
    print(f"{sum(parts.values())} parts, failed: {', '.join(failed) or 'none'}; {said}")
    return int(bool(failed) or not enough)


if __name__ == "__main__":
    sys.exit(main())
