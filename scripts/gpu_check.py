"""What a GPU says of this tree: is it right (check, tests, races, sanitizers), and how fast (bench). A table comes last.

    make gpu-check                              every step, after installing
    python scripts/gpu_check.py                 the same in the present environment
    python scripts/gpu_check.py check races     some steps
    python scripts/gpu_check.py --wheel dist/flashsci-*.whl --runners build/manual
                                                on a machine without nvcc: kernels and runners that were built elsewhere
    python scripts/gpu_check.py --limit tests=1200 --option check='--cases 5000' --option bench='--suite dense'

Steps, each with a time limit and a log in the output folder:

    preflight    is there a GPU, does its driver answer, is it free (nothing else runs if not)
    check        `python -m flashsci check`: generated problems and traps against fp64, and the report
    tests        tests/gpu, tests/compile and tests/properties, without the races and what needs no GPU
    cpu          tests/cpu, with the GPU hidden
    races        every kernel instance many times over, beside a second stream
    sanitizers   compute-sanitizer over the runners without Python (`make build-manual` builds them)
    bench        `python -m flashsci bench`: the headline cases, quickly

The report of `check` is written to the output folder; what belongs to the repository (reports/gpu-check.json, figures) is
updated by `make check` and `make sweep`. Exit status: 1 if a step failed or ran out of time. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "flashsci/_C.so"
SANITIZERS = ("memcheck", "initcheck", "synccheck")
GENERATIONS = ("sm75", "sm80", "sm90")
RACES = "tests/gpu/test_races.py"
WITHOUT_GPU = (
    "tests/compile/test_build.py",
    "tests/compile/test_triton_aot.py",
)  # show the same anywhere
RUNNERS = ("forward_runner", "backward_runner")
PYTEST = ("-m", "pytest", "-q", "-rf", "--maxfail=20", "--tb=short", "--durations=10", "-p", "no:cacheprovider")  # fmt: skip


@dataclass(frozen=True)
class Step:
    """Commands of which all must succeed; they run at the same time."""

    seconds: int  # for all of them
    commands: dict[str, list[str]]  # by the name of the log
    environment: dict[str, str] = field(default_factory=dict)
    skipped: str | None = None  # why there is nothing to run


def steps(out: Path, runners: Path, workers: int) -> dict[str, Step]:
    """All steps, in the order in which they run."""

    def python(name: str, *arguments: str) -> dict[str, list[str]]:
        return {name: [sys.executable, *arguments]}

    def pytest(name: str, *arguments: str) -> dict[str, list[str]]:
        return python(name, *PYTEST, "-n", str(workers), *arguments)

    return {
        "preflight": Step(60, python("preflight", "scripts/preflight.py")),
        "check": Step(1000, python("check", "-m", "flashsci", "check", "--out", str(out / "gpu-check.json"))),
        "tests": Step(900, pytest("tests", "tests/gpu", "tests/compile", "tests/properties",
                                  *(f"--ignore={path}" for path in (RACES, *WITHOUT_GPU)))),
        "cpu": Step(900, pytest("cpu", "-m", "not slow", "tests/cpu"), {"CUDA_VISIBLE_DEVICES": ""}),
        "races": Step(900, pytest("races", RACES)),
        "sanitizers": sanitizers(runners),
        "bench": Step(600, python("bench", "-m", "flashsci", "bench", "--quick", "--json", str(out / "bench.json"))),
    }  # fmt: skip


def sanitizers(runners: Path) -> Step:
    """Every tool over the kernels of every generation at once: each leaves most of the GPU idle."""
    tool = shutil.which("compute-sanitizer")
    missing = [name for name in RUNNERS if not (runners / name).is_file()]
    why = None
    if tool is None:
        why = "compute-sanitizer is not on the PATH (it comes with the CUDA toolkit)"
    elif missing:
        why = f"{runners} has no {' and no '.join(missing)}: make build-manual, or --runners FOLDER"
    commands = {
        f"{kind}-{name.removesuffix('_runner')}-{generation}": [
            tool or "compute-sanitizer", "--error-exitcode=9", "--tool", kind, str(runners / name), generation,
        ]
        for kind in SANITIZERS
        for name in RUNNERS
        for generation in GENERATIONS
    }  # fmt: skip
    return Step(500, commands, skipped=why)


def take_library(wheel: Path, root: Path = ROOT) -> None:
    """Put the CUDA library of a wheel into the tree, where `import flashsci` finds it."""
    with zipfile.ZipFile(wheel) as archive:
        if LIBRARY not in archive.namelist():
            raise SystemExit(
                f"gpu_check: {wheel} has no {LIBRARY}: it was built without nvcc, or with FA_ARCHS=none. "
                "Build it where nvcc is: FA_ARCHS=90 make wheel"
            )
        target = root / LIBRARY
        target.unlink(missing_ok=True)  # a process that has it open keeps its copy
        target.write_bytes(archive.read(LIBRARY))


def run(step: Step, out: Path) -> tuple[str, float, dict[str, str]]:
    """(result, seconds, the last line of each log)."""
    if step.skipped:
        return "skipped", 0.0, {"": step.skipped}
    start = time.monotonic()
    running = {}
    for name, command in step.commands.items():
        with (out / f"{name}.log").open("w") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            running[name] = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1", **step.environment},
            )  # fmt: skip
    results = []
    for name, process in running.items():
        try:
            left = start + step.seconds - time.monotonic()
            code = process.wait(timeout=max(left, 0.1))
            results.append("passed" if code == 0 else f"failed: exit {code}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
            results.append(f"out of time: {step.seconds} s")
            with (out / f"{name}.log").open("a") as log:
                log.write(f"gpu_check: stopped after {step.seconds} s; --limit gives it more\n")
    worst = next((r for r in results if r != "passed"), "passed")
    return worst, time.monotonic() - start, {name: last_line(out / f"{name}.log") for name in running}  # fmt: skip


def last_line(log: Path) -> str:
    """The last line that says something."""
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip(" =") for line in reversed(lines) if line.strip(" =")), "")


def table(rows: Iterable[tuple[str, str, float, dict[str, str]]]) -> str:
    lines = []
    for name, result, seconds, said in rows:
        for log, line in said.items():
            head = f"{name:<11} {result:<20} {seconds:6.0f} s"
            about = f"{log}: " if log not in ("", name) else ""
            lines.append(
                f"{head if log == next(iter(said)) else ' ' * len(head)}  {about}{line[:140]}"
            )
    return "\n".join(lines)


def settings(given: list[str], known: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE options; NAME is a step."""
    found = dict(item.split("=", 1) for item in given if "=" in item)
    wrong = [item for item in given if item.split("=", 1)[0] not in known or "=" not in item]
    if wrong:
        raise SystemExit(
            f"gpu_check: {wrong[0]!r} is not STEP=VALUE with a step of {', '.join(known)}"
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", help="default: all of them")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", help="logs and results (default build/gpu-check)")  # fmt: skip
    parser.add_argument("--wheel", type=Path, help="take the CUDA library out of this wheel")
    parser.add_argument("--runners", type=Path, default=ROOT / "build" / "manual", help="folder with the runners (default build/manual)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="test processes (default: one per core, at most 8)")  # fmt: skip
    parser.add_argument("--limit", action="append", default=[], metavar="STEP=SECONDS")
    parser.add_argument("--option", action="append", default=[], metavar="STEP=OPTIONS", help="added to the step's command")  # fmt: skip
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    plan = steps(out, options.runners.resolve(), options.workers)
    unknown = [name for name in options.steps if name not in plan]
    if unknown:
        parser.error(f"no step named {unknown[0]!r}; there are {', '.join(plan)}")
    limits = settings(options.limit, plan)
    added = settings(options.option, plan)
    if options.wheel:
        take_library(options.wheel)
    # What earlier checks of the same kernels showed counts on.
    report = ROOT / "reports" / "gpu-check.json"
    if report.is_file() and not (out / report.name).exists():
        shutil.copy(report, out / report.name)
    rows = []
    for name in [n for n in plan if n in (options.steps or plan)]:
        step = plan[name]
        extra = shlex.split(added.get(name, ""))
        commands = {log: [*command, *extra] for log, command in step.commands.items()}
        step = Step(int(limits.get(name, step.seconds)), commands, step.environment, step.skipped)
        print(f"=== {name} (at most {step.seconds} s): {out / name}.log", flush=True)
        result, seconds, said = run(step, out)
        rows.append((name, result, seconds, said))
        print(table(rows[-1:]), flush=True)
        if result.startswith("failed") and name in step.commands:
            tail = (out / f"{name}.log").read_text(errors="replace").splitlines()[-25:]
            print(*tail, sep="\n", flush=True)
        if name == "preflight" and result != "passed":
            break
    print(f"\n{table(rows)}\nlogs and results: {out}")
    return int(any(result not in ("passed", "skipped") for _, result, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
