"""The promises of tests/conftest.py: of Hypothesis the same examples always, but those of a seed where one is given; and
one in n cases of what is marked so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")
CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
DRAWS = """
from hypothesis import given, settings, strategies as st

def test_draws():
    drawn = []
    settings(max_examples=20)(given(st.integers(0, 1 << 60))(lambda x: drawn.append(x)))()
    print("DRAWN", drawn)
"""


CASES = """
import pytest

pytestmark = pytest.mark.every(4)

@pytest.mark.parametrize("n", range(21))
def test_many(n): print("RAN many", n)

@pytest.mark.parametrize("n", range(2))
def test_two(n): print("RAN two", n)

def test_one(): print("RAN one")
"""


def run(folder: Path, text: str, *options: str) -> list[str]:
    """The lines that a run of a file with these options prints."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow: slow\n  rest: rest\n  every(n): one in n\n")
    (folder / "test_file.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
        "test_file.py",
    ]
    path = os.pathsep.join([str(CONFTEST.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def draws(folder: Path, *options: str) -> str:
    """The integers that a run with these options draws."""
    return next(line for line in run(folder, DRAWS, *options) if "DRAWN" in line)


@pytest.mark.slow
def test_one_in_n_cases_runs_at_once_and_the_others_are_the_rest(tmp_path, monkeypatch):
    def ran(*options):
        return [line.split("RAN ")[1].rstrip(".") for line in run(tmp_path, CASES, *options) if "RAN" in line]

    monkeypatch.setenv("FLASHSCI_SHARE", "0")
    quick, every = ran("-m", "not slow"), ran()
    assert [sum(name in line for line in quick) for name in ("many", "two", "one")] == [6, 1, 1]
    assert sorted(quick + ran("-m", "rest")) == sorted(every) and len(every) == 24
    shares = [quick]
    for share in ("1", "2", "3"):
        monkeypatch.setenv("FLASHSCI_SHARE", share)
        shares.append(ran("-m", "not slow"))
        assert len(shares[-1]) == len(quick)
    assert {line for found in shares for line in found} == set(every), "four shares of a quarter are all cases"


@pytest.mark.slow
def test_a_seed_decides_what_is_drawn(tmp_path):
    one, again, two = (draws(tmp_path, f"--hypothesis-seed={n}") for n in (1, 1, 2))
    assert one == again
    assert one != two
    assert one != draws(tmp_path) == draws(tmp_path)


def test_names_of_modules_are_unique():
    """Folders of tests are no packages: of two modules of one name, pytest collects neither."""
    files = [p for p in Path(__file__).parents[2].rglob("*.py") if p.name != "conftest.py"]
    names = [p.name for p in files]
    twice = [str(p) for p in files if names.count(p.name) > 1]
    assert not twice, f"rename one of {twice}"
