"""What tests/conftest.py promises of Hypothesis: the same examples always, but those of a seed where one is given."""

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


def draws(folder: Path, *options: str) -> str:
    """The integers that a run with these options draws."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_draws.py").write_text(DRAWS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
        "test_draws.py",
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
    return next(line for line in done.stdout.splitlines() if "DRAWN" in line)


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
