"""The version-sensitive tests under other releases of torch and Triton, each pair in an environment of its own.

    python -m tools.packaging.versions                 every pair of flashsci/versions.py, one after the other
    python -m tools.packaging.versions 2.10 2.14       the pairs of these releases of torch
    python -m tools.packaging.versions 2.14.1-3.8.0    one pair
    python -m tools.packaging.versions 2.14 --quick    a few hundred of the tests
    python -m tools.packaging.versions 2.14 --keep     leave the environment (5 to 8 GB) for the next time

A wheel in dist/ is installed there, too, and tried: one library serves every torch. The environments are made in
.venv-versions/ and removed. The last lines are a table of the pairs, with counts and times.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from flashsci.versions import TESTED, series

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-versions"
NEEDED = ("pytest", "hypothesis", "numpy", "ase", "matplotlib", "typer", "rich", "transformers==5.17.*")

#: Tests of what depends on the release: compilers, tracers, modes and transforms of torch; its operators and
#: DTensors; Triton's interpreter and its launches.
QUICK = (
    "tests/compile/test_compile.py",
    "tests/compile/test_flops.py",
    "tests/compile/test_torch_features.py",
    "tests/cpu/integrations/test_torch_impl.py",
    "tests/cpu/call/test_first_calls.py",
    "tests/cpu/call/test_graph_capture.py",
)
SENSITIVE = (
    *QUICK,
    "tests/compile/test_degenerate.py",
    "tests/compile/test_drawn_seeds.py",
    "tests/compile/test_grads_batched.py",
    "tests/compile/test_jit_trace.py",
    "tests/compile/test_modes.py",
    "tests/compile/test_recorded_packed.py",
    "tests/compile/test_transforms.py",
    "tests/compile/test_words.py",
    "tests/cpu/api/test_sdpa.py",
    "tests/cpu/call/test_autograd.py",
    "tests/cpu/call/test_memory.py",
    "tests/cpu/call/test_repeats.py",
    "tests/cpu/distributed/test_distributed.py",
    "tests/cpu/triton/test_triton_interpreter.py",
)


@dataclass
class Row:
    """The outcome of one pair."""

    torch: str
    triton: str
    outcome: str
    minutes: float
    failed: bool

    def __str__(self) -> str:
        return f"| {self.torch} | {self.triton} | {self.outcome} | {self.minutes:.1f} |"


def chosen(wanted: list[str]) -> list[tuple[str, str]]:
    """The pairs of some releases of torch ("2.14"), and single ones ("2.14.1-3.8.0"); all of them if none is named."""
    names = {pair: {".".join(map(str, series(pair[0]))), "-".join(pair)} for pair in TESTED}
    if unknown := sorted(set(wanted) - set().union(*names.values())):
        sys.exit(f"no pair {', '.join(unknown)} is tested; there are {', '.join(sorted(set().union(*names.values())))}")
    return [pair for pair in TESTED if not wanted or names[pair] & set(wanted)]


def pip(python: Path, *words: str) -> None:
    subprocess.run([str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *words], check=True)


def environment(torch: str, triton: str) -> Path:
    """A Python with this pair."""
    folder = FOLDER / f"{torch}-{triton}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
        pip(python, f"torch=={torch}", *NEEDED)
        # torch names the Triton that it was built with, if any; another one goes over it.
        pip(python, "--no-deps", f"triton=={triton}")
    return python


def last_line(text: str) -> str:
    """The closing line of pytest, without its time."""
    lines = [line.strip(" =") for line in text.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return re.sub(r" in [\d.]+s.*", "", lines[-1]) if lines else "no tests ran"


def run(torch: str, triton: str, given: argparse.Namespace) -> Row:
    start = time.monotonic()
    python = environment(torch, triton)
    outside = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    outcome, failed = "", False
    for wheel in sorted((ROOT / "dist").glob("*.whl")):
        pip(python, "--no-deps", "--force-reinstall", str(wheel))
        tried = subprocess.run(
            [str(python), str(ROOT / "tools/packaging/installed.py")], cwd=python.parent, env=outside
        )
        failed |= tried.returncode != 0
        outcome += "the wheel fails; " if tried.returncode else "the wheel loads; "
        subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", "flashsci"], check=True)
    files = QUICK if given.quick else SENSITIVE
    which = "not slow" if given.quick else "every or not slow"
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, *files]
    environ = outside | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        text = ""
        for line in tests.stdout:
            print(line, end="", flush=True)
            text += line
    outcome += last_line(text)
    if not given.keep:
        shutil.rmtree(python.parents[1])
    return Row(torch, triton, outcome, (time.monotonic() - start) / 60, failed or tests.returncode != 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.packaging.versions", description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", help="of torch, such as 2.14; or a pair: 2.14.1-3.8.0")
    parser.add_argument("--quick", action="store_true", help="a few hundred of the tests")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    given = parser.parse_args()
    rows = []
    for torch, triton in chosen(given.releases):
        print(f"==> torch {torch}, Triton {triton}", flush=True)
        rows.append(run(torch, triton, given))
    print("| torch | Triton | outcome | minutes |", "| --- | --- | --- | --- |", *rows, sep="\n")
    sys.exit(any(row.failed for row in rows))


if __name__ == "__main__":
    main()
