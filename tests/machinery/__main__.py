"""Runs cells outside of pytest: one, or all of them for the page. The exit status is 1 where one is bad or a process died."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .outcomes import Outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machinery", description=__doc__)
    parser.add_argument("--write", type=Path, help="run all cells, and write the page there")
    parser.add_argument("--processes", type=int, default=1, help="so many at a time")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument("--save", type=Path, help="keep the outcomes there, as JSON")
    parser.add_argument("--read", type=Path, nargs="+", help="run nothing, and take outcomes that were kept")
    parser.add_argument(
        "--known", type=Path, nargs="+", default=[], help="outcomes that were kept: run the other cells, and bad ones"
    )
    parser.add_argument("--family", default="", help="machineries of this family alone")
    parser.add_argument("--seconds", type=float, default=1e9, help="what has run until then counts")
    parser.add_argument("--cell", help="a machinery and a call as JSON: prints its outcome")
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    from .cells import MACHINERIES, Call
    from .outcomes import BAD
    from .table import cells

    if given.cell:
        name, *call = json.loads(given.cell)
        print("\n" + json.dumps(MACHINERIES[name].here(Call(*call))), flush=True)
        return 0
    if given.part:
        part, parts = given.part
        known = {key for key, (outcome, _) in _read(given.known).items() if outcome.kind not in BAD}
        left = [cell for cell in cells() if given.only in str(cell) and given.family in cell.machinery.family]
        left = [cell for cell in left if cell.key not in known]
        for n, cell in enumerate(left):
            if n // min(20, len(left) // parts + 1) % parts == part:
                start = time.monotonic()
                outcome = cell.outcome()
                call = cell.call
                print(
                    "\n@"
                    + json.dumps(
                        [
                            call.name,
                            call.row,
                            cell.machinery.name,
                            call.backend,
                            *outcome,
                            time.monotonic() - start,
                        ]
                    ),
                    flush=True,
                )
        return 0
    lines, died = ([], 0) if given.read else run(given)
    if given.save:
        from .page import where

        given.save.write_text("\n".join([json.dumps({"where": where()}), *lines]) + "\n")
    outcomes = _read(given.known) | _read(given.read or []) | _parsed(lines)
    found = {key: outcome for key, (outcome, _) in outcomes.items()}
    seconds: Counter[str] = Counter()
    for (_, _, machinery, _), (_, took) in outcomes.items():
        seconds[machinery] += took
    for key, outcome in found.items():
        if outcome.kind in BAD:
            print(" | ".join([*key, *outcome]))
    print("seconds:", seconds.most_common(12))
    if given.write:
        from .page import page

        given.write.write_text(page(found, _where(given.read or [])))
    kinds = Counter(outcome.kind for outcome in found.values())
    print(f"{len(found)} cells:", ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    return int(died > 0 or not found or any(kind in BAD for kind in kinds))


Key = tuple[str, str, str, str]  # function, tensor, machinery, backend


def _parsed(lines: Iterable[str]) -> dict[Key, tuple[Outcome, float]]:
    """Outcomes and seconds, from one JSON line for each cell; the last line of a cell counts."""
    from .outcomes import Outcome

    found: dict[Key, tuple[Outcome, float]] = {}
    for values in map(json.loads, lines):
        if isinstance(values, list):
            name, row, machinery, backend, kind, why, took = values
            found[name, row, machinery, backend] = Outcome(kind, why), took
    return found


def _where(paths: Iterable[Path]) -> str | None:
    """The machine that outcomes were kept on, as the first line of the first file says."""
    for path in paths:
        first = json.loads(path.read_text().partition("\n")[0])
        if isinstance(first, dict):
            return str(first["where"])
    return None


def _read(paths: Iterable[Path]) -> dict[Key, tuple[Outcome, float]]:
    return _parsed(line for path in paths for line in path.read_text().splitlines() if line)


def run(given: argparse.Namespace) -> tuple[list[str], int]:
    """What processes say of their parts of the cells, a line each; and how many processes died."""
    command = [
        sys.executable,
        "-m",
        "tests.machinery",
        "--only",
        given.only,
        "--family",
        given.family,
        *(["--known", *map(str, given.known)] if given.known else []),
        "--part",
    ]
    end, died = time.monotonic() + given.seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / str(n) for n in range(given.processes)]
        workers = [
            subprocess.Popen(
                [*command, str(n), str(given.processes)],
                stdout=path.open("w"),
                stderr=subprocess.DEVNULL,
            )
            for n, path in enumerate(said)
        ]
        for n, worker in enumerate(workers):
            try:
                worker.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                print(f"process {n} ran out of time")
            else:
                if worker.returncode:
                    died += 1
                    print(f"process {n} died with {worker.returncode}, after its last line")
        lines = [line for path in said for line in path.read_text().splitlines()]
    return [line[1:] for line in lines if line.startswith("@") and line.endswith("]")], died


if __name__ == "__main__":
    sys.exit(main())
