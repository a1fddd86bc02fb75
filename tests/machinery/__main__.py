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
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machinery", description=__doc__)
    parser.add_argument("--write", type=Path, help="run all cells, and write the page there")
    parser.add_argument("--processes", type=int, default=1, help="so many at a time")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument("--save", type=Path, help="keep the outcomes there, as JSON")
    parser.add_argument("--read", type=Path, nargs="+", help="run nothing, and take outcomes that were kept")
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
    from .outcomes import BAD, Outcome
    from .table import cells

    if given.cell:
        name, *call = json.loads(given.cell)
        print("\n" + json.dumps(MACHINERIES[name].here(Call(*call))), flush=True)
        return 0
    if given.part:
        part, parts = given.part
        for n, cell in enumerate(cells()):
            if n // 20 % parts == part and given.only in str(cell) and given.family in cell.machinery.family:
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
    lines, died = (
        ([line for path in given.read for line in path.read_text().splitlines()], 0) if given.read else run(given)
    )
    found, seconds = {}, Counter()
    for line in lines:
        *key, kind, why, took = json.loads(line)
        found[tuple(key)] = Outcome(kind, why)
        seconds[key[2]] += took
    if given.save:
        given.save.write_text("\n".join(lines) + "\n")
    for key, outcome in found.items():
        if outcome.kind in BAD:
            print(" | ".join([*key, *outcome]))
    print("seconds:", seconds.most_common(12))
    if given.write:
        from .page import page

        given.write.write_text(page(found))
    kinds = Counter(outcome.kind for outcome in found.values())
    print(f"{len(found)} cells:", ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    return int(died > 0 or not found or any(kind in BAD for kind in kinds))


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
