"""All checks of this tree on a GPU: correctness (check, tests, races, sanitizers) and speed (bench).

A table comes last.

    make gpu-check                              every step, after installing
    python tools/gpu/gpu_check.py                 the same in the present environment
    python tools/gpu/gpu_check.py check races     some steps
    python tools/gpu/gpu_check.py --wheel dist/flashsci-*.whl --runners build/manual
                                                on a machine without nvcc: kernels and runners that were built elsewhere
    python tools/gpu/gpu_check.py --limit tests=1200 --option check='--cases 5000' --option bench='--suite dense'
    python tools/gpu/gpu_check.py check cases --seconds 580
                                                where a command may run for ten minutes: steps stop before that, and the table comes

Steps, each with a time limit and a log in the output folder:

    preflight    is there a GPU, does its driver answer, is it free (nothing else runs if not)
    check        `python -m flashsci check`: generated problems and traps against fp64, and the report
    cases        `tools/gpu/more_cases.py`: more generated problems for that report, until it holds 10,000
    tests        tests/gpu, tests/compile and tests/properties, without the races and the tests that need no GPU
    machinery    tests/machinery: every public call under every machinery of torch, as many cells as there is time for
    cpu          tests/cpu, with the GPU hidden
    races        every kernel instance many times over, next to a second stream
    sanitizers   compute-sanitizer over the runners without Python (`make build-manual` builds them)
    bench        `python -m flashsci bench`: the headline cases, quickly

The report of `check` is written to the output folder; files of the repository (reports/gpu-check.json, figures) are
updated by `make check` and `make sweep`. A step that runs out of time is interrupted, so that its log has its
findings until then. Exit status: 1 if a step failed or ran out of time. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import math
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

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "flashsci/_C.so"
SANITIZERS = ("memcheck", "initcheck", "synccheck")
GENERATIONS = ("sm75", "sm80", "sm90")
RACES = "tests/gpu/test_races.py"
WITHOUT_GPU = (
    "tests/compile/test_build.py",
    "tests/compile/test_triton_aot.py",
)  # show the same anywhere
RUNNERS = ("forward_runner", "backward_runner")
GRACE = 15  # seconds in which an interrupted step may report its findings
# In a step's command: the part of the step's limit that is left for its work, without start and report.
SECONDS, MINUTES = "{seconds}", "{minutes}"
PYTEST = ("-m", "pytest", "-q", "-rf", "--maxfail=20", "--tb=short", "--durations=10", "-p", "no:cacheprovider")


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

    report = str(out / "gpu-check.json")
    return {
        "preflight": Step(60, python("preflight", "tools/gpu/preflight.py")),
        "check": Step(1000, python("check", "-m", "flashsci", "check", "--out", report, "--minutes", MINUTES)),
        "cases": Step(600, python("cases", "tools/gpu/more_cases.py", "--out", report, "--seconds", SECONDS)),
        "tests": Step(900, pytest("tests", "tests/gpu", "tests/compile", "tests/properties",
                                  *(f"--ignore={path}" for path in (RACES, *WITHOUT_GPU)))),
        "machinery": Step(1200, python("machinery", "-m", "tests.machinery", "--processes", str(workers), "--seconds", SECONDS,
                                       "--save", str(out / "machinery.json"))),
        "cpu": Step(900, pytest("cpu", "-m", "not slow", "tests/cpu"), {"CUDA_VISIBLE_DEVICES": ""}),
        "races": Step(900, pytest("races", RACES)),
        "sanitizers": sanitizers(runners),
        "bench": Step(600, python("bench", "-m", "flashsci", "bench", "--quick", "--json", str(out / "bench.json"), "--minutes", MINUTES)),
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
            tool or "compute-sanitizer",
            "--error-exitcode=9",
            "--tool",
            kind,
            str(runners / name),
            generation,
        ]
        for kind in SANITIZERS
        for name in RUNNERS
        for generation in GENERATIONS
    }
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


def fitted(argument: str, seconds: float) -> str:
    """An argument of a step's command under a limit."""
    work = max(seconds - 60, seconds / 2)
    return {SECONDS: f"{work:.0f}", MINUTES: f"{work / 60:.2f}"}.get(argument, argument)


def run(step: Step, out: Path) -> tuple[str, float, dict[str, str]]:
    """(result, seconds, the last line of each log)."""
    if step.skipped:
        return "skipped", 0.0, {"": step.skipped}
    start = time.monotonic()
    # The tree also for child processes of steps, if the package is not installed.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    running: dict[str, subprocess.Popen[bytes]] = {}
    results: dict[str, str] = {}
    try:
        for name, command in step.commands.items():
            command = [fitted(argument, step.seconds) for argument in command]
            with (out / f"{name}.log").open("w") as log:
                log.write(f"$ {shlex.join(command)}\n")
                log.flush()
                running[name] = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **step.environment},
                )
        for name, process in running.items():
            left = start + step.seconds - time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=max(left, 0.1))
                results[name] = "passed" if code == 0 else f"failed: exit {code}"
        stop([p for name, p in running.items() if name not in results])
    finally:  # the end of this program ends its child processes
        stop([p for p in running.values() if p.poll() is None], grace=0)
    for name in running.keys() - results.keys():
        results[name] = f"out of time: {step.seconds} s"
        with (out / f"{name}.log").open("a") as log:
            log.write(f"gpu_check: stopped after {step.seconds} s; --limit gives it more\n")
    worst = next((results[name] for name in running if results[name] != "passed"), "passed")
    return worst, time.monotonic() - start, {name: last_line(out / f"{name}.log") for name in running}


def stop(processes: list[subprocess.Popen[bytes]], grace: float = GRACE) -> None:
    """Interrupt, so that pytest shows its failures; then kill the process and its children."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    until = time.monotonic() + grace
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(until - time.monotonic(), 0))
        with contextlib.suppress(ProcessLookupError):  # nothing is left of the group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def logs(step: Step, out: Path) -> str:
    """The place of the details, in one line."""
    return str(out / f"{next(iter(step.commands))}.log") if len(step.commands) == 1 else str(out)


def last_line(log: Path) -> str:
    """The last line with content."""
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip(" =") for line in reversed(lines) if line.strip(" =")), "")


def table(rows: Iterable[tuple[str, str, float, dict[str, str]]]) -> str:
    lines = []
    for name, result, seconds, said in rows:
        for log, line in said.items():
            head = f"{name:<11} {result:<20} {seconds:6.0f} s"
            about = f"{log}: " if log not in ("", name) else ""
            lines.append(f"{head if log == next(iter(said)) else ' ' * len(head)}  {about}{line[:140]}")
    return "\n".join(lines)


def settings(given: list[str], known: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE options; NAME is a step."""
    found = dict(item.split("=", 1) for item in given if "=" in item)
    wrong = [item for item in given if item.split("=", 1)[0] not in known or "=" not in item]
    if wrong:
        raise SystemExit(f"gpu_check: {wrong[0]!r} is not STEP=VALUE with a step of {', '.join(known)}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", help="default: all of them")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu-check", help="logs and results (default build/gpu-check)"
    )
    parser.add_argument("--wheel", type=Path, help="take the CUDA library out of this wheel")
    parser.add_argument(
        "--runners", type=Path, default=ROOT / "build" / "manual", help="folder with the runners (default build/manual)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="test processes (default: one per core, at most 8)",
    )
    parser.add_argument("--limit", action="append", default=[], metavar="STEP=SECONDS")
    parser.add_argument(
        "--option", action="append", default=[], metavar="STEP=OPTIONS", help="added to the step's command"
    )
    parser.add_argument(
        "--seconds", type=int, help="for all steps together: no limit goes beyond, and the table comes before"
    )
    options = parser.parse_args(arguments)
    # A shell starts background jobs with interrupts ignored, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    # Results of earlier checks of the same kernels still count.
    report = ROOT / "reports" / "gpu-check.json"
    if report.is_file() and not (out / report.name).exists():
        shutil.copy(report, out / report.name)
    rows: list[tuple[str, str, float, dict[str, str]]] = []
    # Stopping takes its time, too.
    until = time.monotonic() + options.seconds - 2 * GRACE if options.seconds else math.inf
    try:
        for name in [n for n in plan if n in (options.steps or plan)]:
            step = plan[name]
            extra = shlex.split(added.get(name, ""))
            commands = {log: [*command, *extra] for log, command in step.commands.items()}
            left = until - time.monotonic()
            seconds = min(int(limits.get(name, step.seconds)), left)
            if left < GRACE:
                rows.append((name, "no time left", 0.0, {"": "--seconds leaves none for it"}))
                continue
            step = Step(int(seconds), commands, step.environment, step.skipped)
            print(f"=== {name} (at most {step.seconds} s): {logs(step, out)}", flush=True)
            rows.append((name, *run(step, out)))
            print(table(rows[-1:]), flush=True)
            result = rows[-1][1]
            if result.startswith("failed") and name in step.commands:
                tail = (out / f"{name}.log").read_text(errors="replace").splitlines()[-25:]
                print(*tail, sep="\n", flush=True)
            if name == "preflight" and result != "passed":
                break
    finally:
        print(f"\n{table(rows)}\nlogs and results: {out}", flush=True)
    return int(any(result not in ("passed", "skipped") for _, result, _, _ in rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the table, and without the steps
    sys.exit(main())
